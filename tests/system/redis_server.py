"""A Redis server of a test's own, what its client expects of it, and snapshots of one instant."""

import contextlib
import hashlib
import os
import pathlib
import random
import shutil
import subprocess
import time

import product
from resp import Redis, Refused

COUNTERS = 1000


def program_in(folder):
    """The server, which Debian's redis-tools has under another name; None where it is not installed."""
    found = shutil.which("redis-check-rdb")
    if not found:
        return None
    program = folder / "redis-server"
    if not program.is_symlink():
        program.symlink_to(pathlib.Path(found).resolve())
    return program


@contextlib.contextmanager
def redis_server(program, at, prefix=(), env=None, popen=subprocess.Popen):
    """A server with its socket and its dump in a folder of its own."""
    at.mkdir(exist_ok=True)
    path = at / "redis.sock"
    command = [*map(str, prefix), str(program), "--port", "0", "--unixsocket", str(path), "--save", "",
               "--dir", str(at), "--appendonly", "no", "--enable-debug-command", "yes"]
    with open(at / "log", "w+") as log:
        process = popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
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


class Shadow:
    """What a server should hold: a turn for each key, from which its value follows."""

    def __init__(self, client, keys, seed=7):
        self.client, self.keys, self.chance, self.turns = client, keys, random.Random(seed), {}

    def fill(self):
        for batch in batches(range(self.keys)):
            self.client.many(("SET", f"key:{key}", value_of(key, 0)) for key in batch)
            self.turns.update((key, 0) for key in batch)

    def look(self, client, keys):
        for key, found in zip(keys, client.many(("GET", f"key:{key}") for key in keys)):
            assert found == (value_of(key, self.turns[key]) if key in self.turns else None), key

    def change(self, turn):
        """Reads 40 keys by chance, deletes 5, writes 15."""
        some = [self.chance.randrange(self.keys) for _ in range(40)]
        self.look(self.client, some)
        gone = some[:5]
        self.client.many(("DEL", f"key:{key}") for key in gone)
        for key in gone:
            self.turns.pop(key, None)
        written = set(some[5:20]) - set(gone)
        self.client.many(("SET", f"key:{key}", value_of(key, turn)) for key in written)
        self.turns.update((key, turn) for key in written)

    def verify(self, client=None, beside=0):
        """Looks at all keys; `beside` are keys of somebody else."""
        client = client or self.client
        for batch in batches(range(self.keys)):
            self.look(client, batch)
        assert client("DBSIZE") == len(self.turns) + beside


class Counter:
    """Writes an increasing number to a thousand keys in turn."""

    def __init__(self, client):
        self.client, self.count = client, 0

    def write(self, rounds=1):
        for _ in range(rounds):
            self.client.many(("SET", f"counter:{(self.count + i) % COUNTERS}", self.count + i) for i in range(100))
            self.count += 100

    def snapshot(self, seconds=200):
        """Has a snapshot taken and writes meanwhile; gives the numbers of writes that it must lie between."""
        first = self.count
        self.client("BGSAVE")
        deadline = time.monotonic() + seconds
        while b"rdb_bgsave_in_progress:1" in self.client("INFO", "persistence"):
            self.write()
            assert time.monotonic() < deadline, "the snapshot takes too long"
        assert b"rdb_last_bgsave_status:ok" in self.client("INFO", "persistence")
        return first, self.count


def assert_one_instant(client, bounds):
    """Each key has the last number that was written to it before the snapshot."""
    found = [int(value) for value in client("MGET", *(f"counter:{i}" for i in range(COUNTERS)))]
    last = max(found)
    assert bounds[0] <= last + 1 <= bounds[1], (last, bounds)
    assert found == [last - (last - i) % COUNTERS for i in range(COUNTERS)], last
    return last
