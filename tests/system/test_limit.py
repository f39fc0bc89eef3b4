"""Memory stays within the limit, as seen from outside every 10 ms; contents stay right meanwhile."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import product
from box import MIB, Box
from meter import Meter

PAGE = 4096


def assert_worked(counters, data_mib, dram_mib):
    """An oversubscribed run in which hardly anything moved proves nothing."""
    least = min(10_000, (data_mib - dram_mib) * MIB // PAGE)
    came = counters["recalled_pages"] + counters["prefetched_pages"] + counters["rescued_pages"]
    assert came >= least, counters
    assert counters["parked_pages"] >= least, counters


@pytest.mark.parametrize("dram_mib, data_mib", [(64, 192), (128, 384)])
def test_peak_within_two_percent_and_16_mib(run_bounded, workload, box, dram_mib, data_mib):
    with Meter(box) as meter:
        _, counters = run_bounded([workload, "fill", data_mib, 2], dram_mib, popen=box.popen)
    assert_worked(counters, data_mib, dram_mib)
    assert meter.peaks["samples"] > 100, meter.peaks
    limit = dram_mib * MIB * 102 // 100 + 16 * MIB
    assert meter.peaks["held_bytes"] <= limit, f"{meter.peaks}\n{counters}"


# What comes back keeps its slot until it is written to, so a store smaller than the data is full.
def test_peak_holds_with_a_full_store(run_bounded, workload, box):
    with Meter(box) as meter:
        _, counters = run_bounded([workload, "fill", 240, 2], 64, store_mib=208, popen=box.popen)
    assert_worked(counters, 240, 64)
    limit = 64 * MIB * 102 // 100 + 16 * MIB
    assert meter.peaks["together_bytes"] <= limit, f"{meter.peaks}\n{counters}"


def test_everything_fits_a_cgroup_with_the_daemon_inside(run_bounded, workload, folder):
    limit = 128 * MIB * 102 // 100 + 32 * MIB
    with Box("tight", limit) as box:
        _, counters = run_bounded([workload, "fill", 256, 2], 128, popen=box.popen)
        assert box.oom_kills() == 0
    assert_worked(counters, 256, 128)


@contextlib.contextmanager
def client_in_a_small_box(daemon, command):
    """Runs a client to its end in a cgroup far below the daemon's limit; the body may do something meanwhile."""
    with Box("small", 96 * MIB) as box:
        client = box.popen(command, env=daemon.preloaded(), stderr=subprocess.PIPE, text=True)
        try:
            yield
            _, complaint = client.communicate(timeout=120)
        finally:
            client.kill()
            client.communicate()
        assert client.returncode == 0, complaint
        assert box.oom_kills() == 0


def test_a_cgroup_smaller_than_the_share_of_dram_is_parked_down_to(workload, folder):
    with product.Daemon(folder, 512 * MIB, 1024 * MIB) as daemon:
        with client_in_a_small_box(daemon, [workload, "fill", "256", "1"]):
            pass
        assert daemon.status()["totals"]["parked_pages"] >= 160 * MIB // PAGE


def test_a_new_daemon_parks_down_to_a_cgroup_that_is_full(workload, folder):
    with product.Daemon(folder, 512 * MIB, 1024 * MIB) as daemon:
        with client_in_a_small_box(daemon, [workload, "fill", "192", "4"]):
            before = daemon.wait_for(lambda s: s["totals"]["recalled_pages"] > 10_000)
            os.kill(before["daemon_pid"], signal.SIGKILL)
        after = daemon.status()
        assert after["restarts"] == 1 and after["totals"]["parked_pages"] > 10_000, after


def test_parent_and_child_of_a_fork_keep_their_own_bytes(run_bounded, workload, box):
    _, counters = run_bounded([workload, "fork", 128], 96, popen=box.popen)
    assert counters["forks"] >= 1, counters
    assert counters["poisoned_pages"] == 0, counters


# Most of what is resident is shared after the fork, and each side writes to all of it.
@pytest.mark.parametrize("dram_mib, data_mib", [(96, 128), (192, 256)])
def test_fork_stays_within_the_limit(run_bounded, workload, box, dram_mib, data_mib):
    with Meter(box) as meter:
        _, counters = run_bounded([workload, "fork", data_mib], dram_mib, popen=box.popen)
    assert counters["forks"] >= 1, counters
    limit = dram_mib * MIB * 102 // 100 + 16 * MIB
    assert meter.peaks["held_bytes"] <= limit, f"{meter.peaks}\n{counters}"


def test_blocks_come_and_go(run_bounded, workload):
    _, counters = run_bounded([workload, "blocks", 192, 10], 64)
    assert counters["parked_pages"] > 0, counters


def test_exit_status_is_that_of_the_program(folder):
    for code in (0, 3, 77):
        command = product.run_command(64 * MIB, f"{folder / 'store'}:256M", None,
                                      [sys.executable, "-c", f"raise SystemExit({code})"])
        done = subprocess.run(command, env=product.clean_environment(), timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_nothing_is_left_behind(run_bounded, workload, folder, box):
    def states():
        """Folders of private daemons, those of others on this machine left out."""
        served = b""
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                served += path.read_bytes()
        found = [p for base in ("/dev/shm", "/run") for p in pathlib.Path(base).glob("tiermgr-run-*")]
        return {p for p in found if str(p).encode() not in served}

    before = states()
    run_bounded([workload, "fill", 128, 1], 64, popen=box.popen)
    # The helper sees within a tenth of a second that its client has gone.
    deadline = time.monotonic() + 5
    while box.pids() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert box.pids() == []
    assert states() - before == set()
    # Neither does the store that it made stay.
    assert [p.name for p in folder.iterdir()] == ["report.json"]
