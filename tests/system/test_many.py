"""Many small programs under one limit: together with the daemon they stay within it, and one for which there
is no room is told so."""

import os
import signal
import subprocess
import time

import product
from box import MIB
from meter import Meter

# What a program and the shell have beside their managed blocks: stacks, tables of libraries, the preload
# library's own.
OUTSIDE_EACH = MIB


def at_once(count, *command):
    """A shell that runs so many of the same at once, and fails where any of them does."""
    script = """
count=$1; shift
pids=
for _ in $(seq "$count"); do "$@" >/dev/null & pids="$pids $!"; done
for pid in $pids; do wait "$pid" || exit 1; done
"""
    return ["/bin/bash", "-c", script, "bash", count, *command]


def test_programs_that_all_move_stay_within_the_limit(run_bounded, workload, box):
    count, dram_mib = 16, 96
    with Meter(box) as meter:
        _, counters = run_bounded(at_once(count, workload, "fill", 12, 6), dram_mib,
                                  popen=box.popen)
    assert counters["parked_pages"] >= 10_000, counters
    limit = dram_mib * MIB * 102 // 100 + 16 * MIB + count * OUTSIDE_EACH
    assert meter.peaks["held_bytes"] <= limit, f"{meter.peaks}\n{counters}"


def test_programs_that_rest_cost_little(run_bounded, box):
    """Each of them has a thread in the daemon; none has a buffer before it needs one."""
    with Meter(box) as meter:
        run_bounded(at_once(30, "/bin/sleep", 3), 64, popen=box.popen,
                    flags=("--small", "--require"))
    assert meter.peaks["daemon_bytes"] <= 40 * MIB, meter.peaks
    limit = 64 * MIB * 102 // 100 + 16 * MIB
    # jemalloc's tables take 2 MiB in each of them.
    assert meter.peaks["client_bytes"] <= limit + 30 * 2 * MIB, meter.peaks


def test_those_that_have_ended_make_room_at_once(run_bounded, workload):
    """Far more than fit, one after another."""
    script = 'for _ in $(seq "$1"); do "$2" fill 2 1 >/dev/null || exit 1; done'
    command = ["/bin/bash", "-c", script, "bash", 120, workload]
    _, counters = run_bounded(command, 32, flags=("--require",))
    assert counters["attached_processes"] >= 120, counters


def test_a_restarted_daemon_takes_no_more(folder, workload):
    """Neither with the programs that it takes up, nor when they have ended."""
    with product.Daemon(folder, 48 * MIB, 512 * MIB) as daemon:
        before = daemon.status()["dram_own_bytes"]
        held = [subprocess.Popen([workload, "hold", "3"], env=daemon.preloaded(), text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(12)]
        try:
            assert [process.stdout.readline() for process in held] == ["filled\n"] * len(held)
            os.kill(daemon.status()["daemon_pid"], signal.SIGKILL)
            after = daemon.wait_for(lambda s: s["restarts"] == 1 and s["families"] == len(held))
            # It looks at itself once a second; before that it need not know what it has touched.
            time.sleep(2)
            after = daemon.status()
            assert after["dram_own_bytes"] <= 40 * MIB, after
            for process in held:
                out, _ = process.communicate("\n", timeout=60)
                assert (process.returncode, out) == (0, "right\n")
            left = daemon.wait_for(lambda s: s["dram_own_bytes"] <= before + MIB // 2, 20)
            assert left["dram_own_bytes"] <= before + MIB // 2, (before, left)
        finally:
            for process in held:
                process.kill()
                process.communicate()


def test_one_for_which_there_is_no_room_is_told_so(folder, workload):
    """Those that are served go on; the others have what libc gives them."""
    with product.Daemon(folder, 32 * MIB, 512 * MIB) as daemon:
        held, refused = [], []
        env = daemon.preloaded()
        del env["TIERMGR_REQUIRE"]
        try:
            while not refused and len(held) < 40:
                process = subprocess.Popen([workload, "hold", "2"], env=env,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                           stderr=subprocess.PIPE, text=True)
                held.append(process)
                assert process.stdout.readline() == "filled\n", process.stderr.read()
                if daemon.status()["families"] < len(held):
                    refused.append(process)
            assert refused and len(held) > 8, len(held)
            status = daemon.status()
            assert status["dram_own_bytes"] < status["dram_limit_bytes"] == 32 * MIB, status
            complaints = [process.communicate("\n", timeout=60) for process in held]
            assert all(process.returncode == 0 for process in held), complaints
            assert [out for out, _ in complaints] == ["right\n"] * len(held)
            said = [err for _, err in complaints if err]
            assert len(said) == 1, complaints
            assert "32MiB has no room for another program" in said[0] and "--dram" in said[0], said
        finally:
            for process in held:
                process.kill()
                process.communicate()
