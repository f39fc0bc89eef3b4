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


@pytest.mark.parametrize("hears", [False, True])
def test_a_daemon_told_to_end_ends_although_its_serving_process_dies(daemon, hears):
    """It is dead when it is told, or dies before it has done as it was told."""
    serving = daemon.status()["daemon_pid"]
    if hears:
        os.kill(serving, signal.SIGSTOP)
        daemon.process.terminate()
        deadline = time.monotonic() + 10
        while not is_pending(serving, signal.SIGTERM):
            assert time.monotonic() < deadline, "the keeper passes nothing on"
            time.sleep(0.01)
        os.kill(serving, signal.SIGKILL)
    else:
        # Of two signals that wait for it the keeper is given the one with the lower number first.
        daemon.process.send_signal(signal.SIGSTOP)
        os.kill(serving, signal.SIGKILL)
        daemon.process.terminate()
        daemon.process.send_signal(signal.SIGCONT)
    assert daemon.process.wait(30) == 0, daemon.log_text()


def test_a_wish_that_was_refused_is_not_carried_out_later(daemon, client, workload):
    before = daemon.status()
    daemon.process.terminate()
    deadline = time.monotonic() + 60
    while "does not fit into memory" not in daemon.log_text():
        assert time.monotonic() < deadline and daemon.process.poll() is None, daemon.log_text()
        time.sleep(0.05)
    # A private daemon that nobody needs any more ends by itself, and this program would let it.
    other = subprocess.Popen([workload, "hold", "24"], stdin=subprocess.PIPE, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=daemon.preloaded())
    try:
        assert other.stdout.readline() == "filled\n", other.communicate(timeout=20)
        client.kill()
        assert daemon.wait_for(lambda s: s["families"] == 1)["families"] == 1
        os.kill(before["daemon_pid"], signal.SIGKILL)
        daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"])
        time.sleep(2)
        after = daemon.status()
        assert after["restarts"] == 1 and after["families"] == 1, (after, daemon.log_text())
        finish(other)
    finally:
        other.kill()
        other.communicate()


def is_pending(pid, number):
    """Whether a signal waits for a process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith("ShdPnd:")]
    return any(mask >> (number - 1) & 1 for mask in masks)
