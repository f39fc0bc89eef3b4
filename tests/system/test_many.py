"""Many small programs under one limit: together with the daemon they stay within it, and one for which there
is no room is told so."""

import subprocess

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
    assert meter.peaks["held_bytes"] <= limit, (meter.peaks, counters)


def test_programs_that_rest_cost_little(run_bounded, box):
    """Each of them has a thread in the daemon; none has a buffer before it needs one."""
    with Meter(box) as meter:
        run_bounded(at_once(40, "/bin/sleep", 3), 64, popen=box.popen, flags=("--small",))
    assert meter.peaks["daemon_bytes"] <= 48 * MIB, meter.peaks
    limit = 64 * MIB * 102 // 100 + 16 * MIB
    assert meter.peaks["held_bytes"] <= limit + 40 * OUTSIDE_EACH, meter.peaks


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
