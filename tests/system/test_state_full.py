"""A state directory whose file system is full, and a machine without another thread: programs are refused
what cannot be had, keep what they have, and are served again as soon as there is room."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import pytest

import product
from box import Unavailable

MIB = 1 << 20
STATE_BYTES = 24 * MIB
# A new region leaves so much free, for what is forked later.
FORK_ROOM = 16 * MIB

PROGRAM = """
import sys, numpy, tiermgr
client = tiermgr.Client()
kept, regions, refused = client.empty((64 << 20) // 8, dtype="u8"), [], None
kept[:] = numpy.arange(len(kept), dtype="u8")
print("begun", flush=True)
sys.stdin.readline()
try:
    while len(regions) < 4000:
        regions.append(client.block(128 << 20, name="one of many"))
except tiermgr.OutOfMemoryError as error:
    refused = str(error)
print(len(regions), refused, flush=True)
sys.stdin.readline()
# What was promised is there: each region is used, here and there.
for n, region in enumerate(regions):
    numpy.asarray(region)[::32 << 20] = n % 251
for n, region in enumerate(regions):
    assert (numpy.asarray(region)[::32 << 20] == n % 251).all(), n
assert (kept == numpy.arange(len(kept), dtype="u8")).all()
print("right", flush=True)
"""


NEWCOMER = """
import tiermgr
client = tiermgr.Client()
array = client.empty(1 << 20, dtype="u8")
array[:] = 7
assert (array == 7).all()
"""


@contextlib.contextmanager
def small_tmpfs(folder):
    folder.mkdir()
    options = f"size={STATE_BYTES},mode=0700"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
                          capture_output=True, text=True)
    if made.returncode:
        raise Unavailable(f"a tmpfs cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder, leave):
    """Takes all but `leave` bytes, whoever else wanted them."""
    with contextlib.suppress(OSError), open(folder / "filler", "ab", buffering=0) as file:
        while os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize > leave:
            file.write(b"x" * 4096)


@pytest.fixture
def state(folder):
    try:
        with small_tmpfs(folder / "state") as mounted:
            yield mounted
    except Unavailable as error:
        pytest.skip(str(error))


def environment(daemon):
    return daemon.environment(PYTHONPATH=str(product.ROOT / "ffi" / "python"),
                              TIERMGR_LIBRARY=str(product.DIST / "lib" / "libtiermgr.so.0"))


def newcomer(daemon):
    """A program that begins now."""
    return subprocess.run([sys.executable, "-c", NEWCOMER], env=environment(daemon), timeout=60,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_programs_begin_again_once_there_is_room(folder, state):
    with product.Daemon(folder, 64 * MIB, 256 * MIB, state=state) as daemon:
        assert newcomer(daemon).returncode == 0
        fill(state, 0)
        for _ in range(3):
            refused = newcomer(daemon)
            assert refused.returncode == 1 and str(state) in refused.stderr, (refused.stderr, daemon.log_text())
        (state / "filler").unlink()
        served = newcomer(daemon)
        assert served.returncode == 0, (served.stderr, daemon.log_text())
        empty = daemon.wait_until_empty()
        assert not (empty["families"] or empty["dram_granted_bytes"]), empty


@contextlib.contextmanager
def few_tasks(name):
    """A cgroup that limits how many threads and processes there are."""
    root = pathlib.Path("/sys/fs/cgroup")
    root = root / "pids" if (root / "pids").is_dir() else root
    path = root / f"tiermgr-{name}-{os.getpid()}"
    try:
        path.mkdir()
        if not (path / "pids.max").exists():
            path.rmdir()
            pytest.skip("there is no cgroup controller for the number of processes")
    except OSError as error:
        pytest.skip(f"making a cgroup: {error.strerror}")
    try:
        yield path
    finally:
        for pid in (path / "cgroup.procs").read_text().split():
            (path.parent / "cgroup.procs").write_text(pid)
        path.rmdir()


def test_a_thread_that_cannot_begin_keeps_no_room(folder):
    with few_tasks("threads") as box, product.Daemon(folder, 64 * MIB, 256 * MIB) as daemon:
        status = daemon.status()
        for pid in (status["keeper_pid"], status["daemon_pid"]):
            (box / "cgroup.procs").write_text(str(pid))
        # The thread that has just answered ends in its own time.
        held, before = int((box / "pids.current").read_text()), None
        while held != before:
            time.sleep(0.2)
            held, before = int((box / "pids.current").read_text()), held
        for more in range(4):
            # Enough for the session, and in the end for the family.
            (box / "pids.max").write_text(str(held + more))
            done = newcomer(daemon)
            if done.returncode == 0:
                break
        assert done.returncode == 0 and more >= 2, (more, done.stderr)
        (box / "pids.max").write_text("max")
        empty = daemon.wait_until_empty()
        assert not (empty["families"] or empty["dram_granted_bytes"]), empty


def test_regions_are_refused_and_those_that_are_there_go_on(folder, state):
    with product.Daemon(folder, 128 * MIB, 8192 * MIB, state=state) as daemon:
        env = environment(daemon)
        client = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, env=env,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert client.stdout.readline() == "begun\n", client.communicate(timeout=20)
            fill(state, FORK_ROOM + MIB // 2)
            client.stdin.write("go\n")
            client.stdin.flush()
            count, said = client.stdout.readline().split(maxsplit=1)
            assert int(count) > 3 and str(state) in said, (count, said)
            fill(state, 0)
            out, err = client.communicate("go\n", timeout=100)
            assert client.returncode == 0 and out == "right\n", (out, err)
        finally:
            client.kill()
            client.communicate()
        assert daemon.process.poll() is None, daemon.log_text()
