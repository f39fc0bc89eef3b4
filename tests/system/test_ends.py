"""Whoever is killed, nothing stays booked, and whoever lives on reads the right bytes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import product

MIB = 1 << 20


@pytest.fixture
def daemon(folder):
    with product.Daemon(folder, 96 * MIB, 1024 * MIB) as running:
        yield running


@pytest.fixture
def start(daemon, workload):
    """Starts clients, and kills what is left of them at the end."""
    started = []

    def begin(*arguments):
        process = subprocess.Popen([workload, *map(str, arguments)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=daemon.preloaded())
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def hold(start):
    """Starts a client that fills its memory and then waits for a line."""

    def begin(mib=192):
        process = start("hold", mib)
        line = process.stdout.readline()
        assert line == "filled\n", process.communicate(timeout=20)
        return process

    return begin


def finish(process):
    """Lets it check its memory."""
    out, err = process.communicate("go\n", timeout=100)
    assert process.returncode == 0 and out.endswith("right\n"), (process.returncode, out, err)


def helper_of(daemon, process):
    """The helper, by the daemon's list of clients."""
    rows = daemon.control("clients")
    rows = rows if isinstance(rows, list) else rows["clients"]
    return next(row["helper_pid"] for row in rows if row["pid"] == process.pid)


def assert_empty(status):
    assert status["families"] == 0, status
    assert status["dram_granted_bytes"] == 0, status
    assert status["store_used_bytes"] == 0, status


def test_a_client_that_ends_gives_everything_back(daemon, hold):
    process = hold()
    status = daemon.status()
    assert status["families"] == 1 and status["store_used_bytes"] > 0, status
    finish(process)
    assert_empty(daemon.wait_until_empty())


def test_a_killed_client_gives_everything_back(daemon, hold):
    process = hold()
    process.kill()
    process.communicate(timeout=20)
    assert_empty(daemon.wait_until_empty())


def test_a_client_that_loses_its_helper_keeps_its_bytes_and_is_shown(daemon, start):
    process = start("hold", 192)
    assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
    helper = helper_of(daemon, process)
    os.kill(helper, signal.SIGKILL)
    status = daemon.wait_for(lambda s: s["totals"]["without_helper_now"])
    assert status["totals"]["without_helper_now"] == 1, status
    assert any("lost their helper" in warning for warning in status["warnings"]), status
    deadline = time.monotonic() + 10
    while not (told := lost_helpers(daemon)):
        assert time.monotonic() < deadline, daemon.log_text()
        time.sleep(0.05)
    assert len(told) == 1 and f"pid={process.pid} helper={helper}" in told[0], told
    assert helper_of(daemon, process) == 0
    # One that is taken up without a helper is as badly off.
    os.kill(status["daemon_pid"], signal.SIGKILL)
    after = daemon.wait_for(lambda s: s["daemon_pid"] != status["daemon_pid"])
    assert after["totals"]["without_helper_now"] == 1, after
    finish(process)
    assert_empty(status := daemon.wait_until_empty())
    assert status["totals"]["without_helper_now"] == 0 and not status["warnings"], status


def test_a_program_and_its_helper_that_end_together_are_nothing_to_warn_of(daemon, hold):
    process = hold()
    helper = helper_of(daemon, process)
    os.kill(helper, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=20)
    assert_empty(daemon.wait_until_empty())
    assert not lost_helpers(daemon)


def test_a_program_that_has_disconnected_is_nothing_to_warn_of(daemon):
    """Its helper has ended, and it has nothing left that could be moved."""
    script = f"""
import ctypes, sys
library = ctypes.CDLL({str(product.DIST / "lib" / "libtiermgr.so")!r})
client = ctypes.c_void_p()
assert library.tiermgr_connect(None, ctypes.byref(client)) == 0
assert library.tiermgr_disconnect(client) == 0
print("closed", flush=True)
sys.stdin.readline()
"""
    process = subprocess.Popen([sys.executable, "-c", script], text=True, env=daemon.environment(),
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "closed\n", process.communicate(timeout=20)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            status = daemon.status()
            assert not status["totals"]["without_helper_now"] and not status["warnings"], status
            time.sleep(0.05)
        assert not lost_helpers(daemon)
    finally:
        process.communicate("\n", timeout=20)
    assert process.returncode == 0
    assert_empty(daemon.wait_until_empty())


def lost_helpers(daemon):
    return [line for line in daemon.log_text().splitlines() if "the helper of a program has gone" in line]


def test_a_client_outlives_the_serving_daemon(daemon, hold):
    process = hold()
    before = daemon.status()
    os.kill(before["daemon_pid"], signal.SIGKILL)
    finish(process)
    after = daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"])
    assert after["restarts"] == before["restarts"] + 1, after
    assert_empty(daemon.wait_until_empty())


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_that_becomes_another_program_gives_everything_back(daemon, start, restarts):
    """Also where it has said nothing to the daemon that serves it now."""
    process = start("become", 192)
    assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
    before = daemon.status()
    if restarts:
        os.kill(before["daemon_pid"], signal.SIGKILL)
        after = daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"])
        assert after["families"] == 1, after
    process.stdin.write("go\n")
    process.stdin.flush()
    assert_empty(daemon.wait_until_empty())
    assert process.poll() is None


def test_ten_kills_of_the_daemon_while_a_client_works(daemon, start):
    process = start("fill", 192, 6)
    killed = set()
    while len(killed) < 10 and process.poll() is None:
        time.sleep(0.3)
        status = daemon.wait_for(lambda s: s["daemon_pid"] not in killed)
        os.kill(status["daemon_pid"], signal.SIGKILL)
        killed.add(status["daemon_pid"])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(killed) >= 2, "the client ended too early for this test to say anything"
    assert_empty(daemon.wait_until_empty())


def test_two_clients_share_and_a_killed_one_leaves_the_other_whole(daemon, hold):
    first, second = hold(192), hold(96)
    first.kill()
    first.communicate(timeout=20)
    finish(second)
    assert_empty(daemon.wait_until_empty())


def test_no_process_and_no_descriptor_grows_with_the_number_of_clients(daemon, workload):
    def held():
        status = daemon.status()
        pids = (status["daemon_pid"], status["keeper_pid"])
        threads = len(list(pathlib.Path(f"/proc/{pids[0]}/task").iterdir()))
        return [len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir())) for pid in pids] + [threads]

    def once():
        subprocess.run([workload, "fill", "32", "1"], env=daemon.preloaded(), check=True,
                       stdin=subprocess.DEVNULL, timeout=60)

    once()
    assert_empty(daemon.wait_until_empty())
    before = held()
    for _ in range(20):
        once()
    assert_empty(daemon.wait_until_empty())
    deadline = time.monotonic() + 10
    while (after := held()) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(b <= a + 2 for a, b in zip(before, after, strict=True)), (before, after)
