"""Programs whose first thread ends while others go on: under their number the kernel shows a zombie without
memory and without descriptors."""

import ctypes
import errno
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest

import product

MIB = 1 << 20
PAGE = 4096
MEMORY = 192
DRAM, STORE = 96 * MIB, 2048 * MIB
PIDFD_GETFD = 438


@pytest.fixture
def daemon(folder):
    with product.Daemon(folder, DRAM, STORE) as running:
        yield running


@pytest.fixture
def start(workload):
    """Starts a program in twice its memory, until it is filled and the first thread has ended."""
    started = []

    def begin(daemon, mode):
        process = subprocess.Popen([workload, mode, str(MEMORY)], stdin=subprocess.PIPE, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   env=daemon.preloaded())
        started.append(process)
        assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
        assert state_of(process.pid) == "Z"
        status = daemon.status()
        assert status["totals"]["parked_now_bytes"] > (MEMORY * MIB - DRAM) // 2, status
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def state_of(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def finish(daemon, process, recalled_before):
    """Lets it check its memory, allocate more and fork."""
    out, err = process.communicate("go\n", timeout=100)
    assert process.returncode == 0 and out.endswith("right\n"), (process.returncode, out, err)
    status = daemon.wait_until_empty()
    assert not status["families"] and not status["store_used_bytes"], status
    recalled = status["totals"]["recalled_pages"] - recalled_before
    assert recalled * PAGE > (MEMORY * MIB - DRAM) // 2, status


@pytest.mark.parametrize("mode", ["orphan", "late"])
def test_it_is_served(daemon, start, mode):
    """Also where the first thread had ended before the library knew of a daemon."""
    process = start(daemon, mode)
    finish(daemon, process, daemon.status()["totals"]["recalled_pages"])


@pytest.mark.parametrize("mode", ["orphan", "late"])
def test_it_is_served_by_the_next_daemon(daemon, start, mode):
    process = start(daemon, mode)
    before = daemon.status()
    os.kill(before["daemon_pid"], signal.SIGKILL)
    after = daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"])
    assert after["restarts"] == before["restarts"] + 1 and after["families"] == 1, after
    finish(daemon, process, after["totals"]["recalled_pages"])


@pytest.mark.parametrize("mode", ["orphan", "late"])
def test_it_is_served_where_its_connection_ends(daemon, start, mode):
    process = start(daemon, mode)
    end_connection(process.pid)
    # The daemon looks whether it lives, some times a second.
    time.sleep(1)
    status = daemon.status()
    assert status["families"] == 1, status
    finish(daemon, process, status["totals"]["recalled_pages"])


def test_its_descriptors_are_fetched_where_nobody_else_is_left(folder, start):
    """Helper, keeper and daemon are killed at once: the living threads have the userfaultfds."""
    daemon = product.Daemon(folder, DRAM, STORE)
    try:
        process = start(daemon, "orphan")
        status = daemon.status()
        pids = [status["keeper_pid"], status["daemon_pid"]]
        # Stopped, so that it sees nothing of it.
        os.kill(status["daemon_pid"], signal.SIGSTOP)
        for pid in [helper_of(process), *pids]:
            os.kill(pid, signal.SIGKILL)
        daemon.process.wait(20)
        deadline = time.monotonic() + 20
        while pathlib.Path(f"/proc/{status['daemon_pid']}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with product.Daemon(folder, DRAM, STORE, state=daemon.state) as after:
            finish(after, process, after.status()["totals"]["recalled_pages"])
    finally:
        daemon.close()


def helper_of(process):
    """Its only child."""
    tasks = pathlib.Path(f"/proc/{process.pid}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    assert len(children) == 1, children
    return children[0]


def end_connection(pid):
    """Ends the connection of a program from outside, as if it had closed it."""
    tid = next(int(task.name) for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
               if task.name != str(pid))
    try:
        thread = os.pidfd_open(tid, os.O_EXCL)
    except OSError as error:
        if error.errno == errno.EINVAL:
            pytest.skip("before Linux 6.9 there are no descriptors of threads")
        raise
    sockets = [int(path.name) for path in pathlib.Path(f"/proc/{tid}/fd").iterdir()
               if os.readlink(path).startswith("socket:")]
    assert len(sockets) == 1, sockets
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(PIDFD_GETFD, thread, sockets[0], 0)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    os.close(thread)
    with socket.socket(fileno=fd) as connection:
        connection.shutdown(socket.SHUT_RDWR)
