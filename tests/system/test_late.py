"""A device that answers so slowly that a program seems to hang: somebody says so."""

import contextlib
import subprocess

import pytest

import product
from box import Unavailable
from disks import SlowDisk, loop_device

MIB = 1 << 20


@pytest.fixture
def slow(folder):
    """A loop device, and the cgroup for which it is slow."""
    with contextlib.ExitStack() as stack:
        try:
            device = stack.enter_context(loop_device(folder / "device", 512 * MIB))
            yield device, stack.enter_context(SlowDisk(device, 8 << 10))
        except Unavailable as error:
            pytest.skip(str(error))


def test_a_fault_that_waits_for_the_device_is_named(folder, workload, slow):
    device, disk = slow
    with product.Daemon(folder, 64 * MIB, 512 * MIB, store=device) as daemon:
        program = subprocess.Popen([workload, "hold", "192"], env=daemon.preloaded(), text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with program:
            assert program.stdout.readline() == "filled\n"
            status = daemon.status()
            assert status["totals"]["parked_now_bytes"] > 64 * MIB and not status["warnings"], status
            disk.take(status["daemon_pid"])
            program.stdin.write("\n")
            program.stdin.flush()
            late = daemon.wait_for(lambda s: s["totals"]["late_faults_now"], seconds=30)
            assert late["totals"]["late_faults_now"] == 1, late
            assert any("more than five seconds" in line for line in late["warnings"]), late
            assert "a thread has slept at a page" in daemon.log_text(), daemon.log_text()
            assert "a read from the store" in daemon.log_text(), daemon.log_text()
            disk.limit(1 << 40)
            assert program.communicate(timeout=60)[0] == "right\n"
            assert program.returncode == 0
        status = daemon.wait_until_empty()
        assert not status["warnings"] and not status["totals"]["late_faults_now"], status
        assert daemon.log_text().count("a thread has slept at a page") < 20, daemon.log_text()
