"""A state directory whose file system is full: regions are refused, and nobody else notices."""

import contextlib
import os
import subprocess
import sys

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


def test_regions_are_refused_and_those_that_are_there_go_on(folder, state):
    library = product.DIST / "lib" / "libtiermgr.so.0"
    with product.Daemon(folder, 128 * MIB, 8192 * MIB, state=state) as daemon:
        env = daemon.environment(PYTHONPATH=str(product.ROOT / "ffi" / "python"),
                                 TIERMGR_LIBRARY=str(library))
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
