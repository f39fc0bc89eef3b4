"""The keeper goes on for as long as programs depend on it, whatever the kernel refuses meanwhile."""

import os
import pathlib
import resource
import signal
import subprocess
import time

import pytest

import product

MIB = 1 << 20


@pytest.fixture
def daemon(folder):
    with product.Daemon(folder, 96 * MIB, 1024 * MIB) as running:
        yield running


@pytest.fixture
def client(daemon, workload):
    """A program with twice as much memory as the daemon gives, which waits for a line."""
    process = subprocess.Popen([workload, "hold", "192"], stdin=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=daemon.preloaded())
    assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def pids_cgroup():
    """A cgroup that can limit the number of processes."""
    v1, v2 = pathlib.Path("/sys/fs/cgroup/pids"), pathlib.Path("/sys/fs/cgroup")
    if v1.is_dir():
        root = v1
    elif "pids" in (v2 / "cgroup.controllers").read_text().split():
        root = v2
        (v2 / "cgroup.subtree_control").write_text("+pids")
    else:
        pytest.skip("there is no pids controller below /sys/fs/cgroup")
    path = root / f"tiermgr-test-{os.getpid()}"
    path.mkdir()
    yield path
    for pid in (path / "cgroup.procs").read_text().split():
        (root / "cgroup.procs").write_text(pid)
    path.rmdir()


def finish(process):
    out, err = process.communicate("go\n", timeout=100)
    assert process.returncode == 0 and out.endswith("right\n"), (process.returncode, out, err)


def test_a_table_without_a_free_number(daemon, client):
    before = daemon.status()
    keeper = before["keeper_pid"]
    # Only what it holds in reserve lies below this.
    _, hard = resource.prlimit(keeper, resource.RLIMIT_NOFILE)
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, (5, hard))
    os.kill(before["daemon_pid"], signal.SIGKILL)
    finish(client)
    after = daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"])
    assert (after["keeper_pid"], after["restarts"]) == (keeper, before["restarts"] + 1), after


def test_no_process_to_be_had_for_a_while(daemon, client, pids_cgroup):
    before = daemon.status()
    (pids_cgroup / "cgroup.procs").write_text(str(before["keeper_pid"]))
    (pids_cgroup / "pids.max").write_text("1")
    os.kill(before["daemon_pid"], signal.SIGKILL)
    time.sleep(3)
    assert daemon.process.poll() is None, "the keeper has given up"
    (pids_cgroup / "pids.max").write_text("max")
    finish(client)
    after = daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"])
    assert after["restarts"] == before["restarts"] + 1, after
