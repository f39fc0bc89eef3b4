"""Programs whose memory is small objects, with `run --small` or TIERMGR_SMALL=1: they keep to their limit and
find every byte, whatever becomes of the daemon."""

import contextlib
import hashlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from meter import Meter
import product
from resp import Redis, Refused

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
    """The server, which Debian's redis-tools has under another name."""
    found = shutil.which("redis-check-rdb")
    if not found:
        pytest.skip("redis-check-rdb is not there: run scripts/setup")
    program = folder / "redis-server"
    program.symlink_to(pathlib.Path(found).resolve())
    return program


@contextlib.contextmanager
def redis_server(program, at, prefix=(), env=None):
    """A server with its socket and its dump in a folder of its own."""
    at.mkdir(exist_ok=True)
    path = at / "redis.sock"
    command = [*map(str, prefix), str(program), "--port", "0", "--unixsocket", str(path), "--save", "",
               "--dir", str(at), "--appendonly", "no", "--enable-debug-command", "yes"]
    with open(at / "log", "w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env=env or product.clean_environment())
        try:
            client = None
            deadline = time.monotonic() + 60
            while client is None:
                try:
                    client = Redis(path)
                    client("PING")
                except (OSError, Refused):
                    client = None
                    assert process.poll() is None and time.monotonic() < deadline, \
                        (at / "log").read_text()[-4000:]
                    time.sleep(0.05)
            yield client
            client.send([("SHUTDOWN", "NOSAVE")])
            assert process.wait(60) == 0, (at / "log").read_text()[-4000:]
            client.close()
        finally:
            process.kill()
            process.wait()


def value_of(key, turn):
    word = hashlib.blake2b(b"%d %d" % (key, turn), digest_size=32).digest()
    return (word * 128)[:200 + (key * 977 + turn) % 3500]


def batches(sequence, size=64):
    sequence = list(sequence)
    return (sequence[i:i + size] for i in range(0, len(sequence), size))


@pytest.mark.seconds(400)
def test_redis_holds_twice_its_limit(folder, redis_program):
    keys, dram_mib = 50_000, 56
    report = folder / "report.json"
    prefix = product.run_command(dram_mib * MIB, f"{folder / 'store'}:1024M", report, [])
    prefix[2:2] = SMALL
    chance = random.Random(7)
    turns = {}
    with redis_server(redis_program, folder / "managed", prefix) as client:
        for batch in batches(range(keys)):
            client.many(("SET", f"key:{key}", value_of(key, 0)) for key in batch)
            turns.update((key, 0) for key in batch)
        for turn in range(1, 60):
            some = [chance.randrange(keys) for _ in range(40)]
            for key, found in zip(some, client.many(("GET", f"key:{key}") for key in some)):
                assert found == (value_of(key, turns[key]) if key in turns else None), key
            gone = some[:5]
            client.many(("DEL", f"key:{key}") for key in gone)
            for key in gone:
                turns.pop(key, None)
            written = set(some[5:20]) - set(gone)
            client.many(("SET", f"key:{key}", value_of(key, turn)) for key in written)
            turns.update((key, turn) for key in written)
        for batch in batches(range(keys)):
            for key, found in zip(batch, client.many(("GET", f"key:{key}") for key in batch)):
                assert found == (value_of(key, turns[key]) if key in turns else None), key
        assert client("DBSIZE") == len(turns)
        written = save_while_writing(client, folder / "managed")
    counters = product.counters(report)
    assert counters["recalled_pages"] + counters["prefetched_pages"] >= 10_000, counters
    assert counters["poisoned_pages"] == 0 and counters["forks"] >= 1, counters
    # By a server that knows nothing of tiermgr.
    with redis_server(redis_program, folder / "managed") as client:
        found = [int(value) for value in client("MGET", *(f"counter:{i}" for i in range(1000)))]
        for key in chance.sample(sorted(turns), 3000):
            assert client("GET", f"key:{key}") == value_of(key, turns[key]), key
        assert client("DBSIZE") == len(turns) + 1000
    # A snapshot of one instant: each key has the last number that was written to it before that.
    last = max(found)
    assert 1000 <= last < written
    assert found == [last - (last - i) % 1000 for i in range(1000)]


def save_while_writing(client, at):
    """Writes an increasing number to a thousand keys in turn, and has a snapshot taken meanwhile; gives the
    number of writes."""
    count = 0

    def write():
        nonlocal count
        client.many(("SET", f"counter:{(count + i) % 1000}", count + i) for i in range(100))
        count += 100

    for _ in range(20):
        write()
    client("BGSAVE")
    deadline = time.monotonic() + 200
    while b"rdb_bgsave_in_progress:1" in client("INFO", "persistence"):
        write()
        assert time.monotonic() < deadline, (at / "log").read_text()[-4000:]
    assert b"rdb_last_bgsave_status:ok" in client("INFO", "persistence")
    for _ in range(20):
        write()
    return count
