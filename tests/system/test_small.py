"""Programs whose memory is small objects, with `run --small` or TIERMGR_SMALL=1: they keep to their limit and
find every byte, whatever becomes of the daemon."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from meter import Meter
import product
from redis_server import COUNTERS, Counter, Shadow, assert_one_instant, program_in, redis_server

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20
# Where no test needs pressure.
PLENTY = 1024 * MIB
# The interpreter itself, its libraries, and jemalloc's tables lie outside.
OUTSIDE = 64 * MIB

SMALL = ("--small", "--require")

DICTIONARIES = """
import sys, time
count, rounds = int(sys.argv[1]), int(sys.argv[2])
table = {i: [str(i) * 3, i * 1000003, (i, -i)] for i in range(count)}
for turn in range(rounds):
    for i in range(turn, count, 7):
        table[i] = [str(i) * 3, i * 1000003, (i, -i)]
    for i, (text, number, pair) in table.items():
        assert text == str(i) * 3 and number == i * 1000003 and pair == (i, -i), i
    print("round", turn, flush=True)
print("ok", len(table))
"""


def interpreter(*arguments):
    """Python without its own allocator of small objects."""
    return [sys.executable, "-c", DICTIONARIES, *map(str, arguments)]


def test_dictionaries_in_half_their_memory(run_bounded, box):
    count = 600_000
    env = product.clean_environment(PYTHONMALLOC="malloc")
    with Meter(box) as meter:
        out, counters = run_bounded(interpreter(count, 2), 100, popen=box.popen, env=env, flags=SMALL)
    assert out.splitlines()[-1] == f"ok {count}"
    assert counters["recalled_pages"] + counters["prefetched_pages"] >= 10_000, counters
    assert meter.peaks["held_bytes"] <= 100 * MIB * 102 // 100 + 16 * MIB + OUTSIDE, meter.peaks


def test_without_the_switch_they_stay_with_libc(run_bounded):
    """What makes the test above one of small objects."""
    env = product.clean_environment(PYTHONMALLOC="malloc")
    _, counters = run_bounded(interpreter(300_000, 1), 100, env=env)
    assert counters["recalled_pages"] + counters["prefetched_pages"] < 10_000, counters


def test_the_daemon_is_killed_and_comes_back(folder):
    with product.Daemon(folder, 100 * MIB, 2048 * MIB) as daemon:
        process = subprocess.Popen(interpreter(400_000, 6), stdout=subprocess.PIPE, text=True,
                                   env=daemon.preloaded(TIERMGR_SMALL="1", PYTHONMALLOC="malloc"))
        killed, lines = set(), []
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("round") and len(killed) < 3:
                pid = daemon.wait_for(lambda s: s["daemon_pid"] not in killed)["daemon_pid"]
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert process.wait(60) == 0, lines
        assert lines[-1] == "ok 400000" and len(killed) == 3
        assert daemon.wait_until_empty()["totals"]["poisoned_pages"] == 0


@pytest.fixture(scope="session")
def discarder():
    return product.compile_c(HERE / "small_discard.c", product.BUILD / "system" / "small_discard")


@contextlib.contextmanager
def obedient(program, env):
    """A program that answers lines; gives what has it obey one."""
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def obey(order):
        process.stdin.write(f"{order}\n")
        process.stdin.flush()
        said = process.stdout.readline().split()
        assert said[:1] == ["done"], f"{order}: {said}"
        return int(said[1])

    try:
        assert process.stdout.readline() == "ready\n"
        yield obey
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_discard_that_comes_late_harms_nobody(folder, discarder):
    with product.Daemon(folder, PLENTY, 2048 * MIB) as daemon:
        pid = daemon.status()["daemon_pid"]
        with obedient(discarder, daemon.preloaded(TIERMGR_SMALL="1")) as obey:
            before = daemon.status()["totals"]
            assert obey("free") == 1, "nothing was discarded: this test would test nothing"
            obey("fill")
            for _ in range(6):
                os.kill(pid, signal.SIGSTOP)
                try:
                    # The first discard waits in the socket, and the daemon will take it up.
                    assert obey("free") == 0
                    obey("fill")
                    obey("look")
                finally:
                    os.kill(pid, signal.SIGCONT)
                # It answers what came after only when it has done what came before.
                daemon.status()
                time.sleep(0.2)
                obey("look")
                assert obey("free") == 1
                obey("fill")
            obey("look")
            assert daemon.status()["totals"]["poisoned_pages"] == before["poisoned_pages"] == 0


def test_discards_while_the_daemon_is_away(folder, discarder):
    with product.Daemon(folder, PLENTY, 2048 * MIB) as daemon:
        with obedient(discarder, daemon.preloaded(TIERMGR_SMALL="1")) as obey:
            killed = 0
            for _ in range(4):
                pid = daemon.wait_for(lambda s: s["daemon_pid"] != killed)["daemon_pid"]
                os.kill(pid, signal.SIGKILL)
                killed = pid
                for order in ("free", "fill", "look"):
                    obey(order)
            daemon.wait_for(lambda s: s["daemon_pid"] != killed)
            obey("free")
            obey("fill")
            obey("look")


@pytest.fixture
def redis_program(folder):
    program = program_in(folder)
    if program is None:
        pytest.skip("redis-check-rdb is not there: run scripts/setup")
    return program


@pytest.mark.seconds(400)
def test_redis_holds_twice_its_limit(folder, redis_program):
    dram_mib = 56
    report = folder / "report.json"
    prefix = product.run_command(dram_mib * MIB, f"{folder / 'store'}:1024M", report, [])
    prefix[2:2] = SMALL
    with redis_server(redis_program, folder / "managed", prefix) as client:
        expected = Shadow(client, 50_000)
        expected.fill()
        for turn in range(1, 60):
            expected.change(turn)
        expected.verify()
        counter = Counter(client)
        counter.write(20)
        bounds = counter.snapshot()
        counter.write(20)
    counters = product.counters(report)
    assert counters["recalled_pages"] + counters["prefetched_pages"] >= 10_000, counters
    assert counters["poisoned_pages"] == 0 and counters["forks"] >= 1, counters
    # By a server that knows nothing of tiermgr.
    with redis_server(redis_program, folder / "managed") as client:
        assert_one_instant(client, bounds)
        expected.verify(client, COUNTERS)
