"""Redis: a client that knows each value, snapshots while it writes, and Redis' own test suite."""

import contextlib
import os
import re
import shutil
import time

import debian
import product
from redis_server import COUNTERS, Counter, Shadow, assert_one_instant, program_in, redis_server
from ways import Case, Failed, judge_outcomes

# They look for the server's forked child by asking pgrep for its first child, which is tiermgr's helper.
SKIPPED = ("SRANDMEMBER with a dict containing long chain", "Don't rehash if redis has child process",
           "failed bgsave prevents writes")
# Tests that may differ, each with its reason.
SAVES = "its server has to save 100 MB before it is killed, and then load it for longer than that takes"
KNOWN = {"client freed during loading": SAVES, "config during loading": SAVES}
KEYS = int(os.environ.get("TIERMGR_TEST_REDIS_KEYS", "200000"))
SNAPSHOTS = 4
PORT = 21111
SUITE = ("unit/type/string", "unit/type/incr", "unit/type/list", "unit/type/list-2", "unit/type/set", "unit/type/zset",
         "unit/type/hash", "unit/type/stream", "unit/type/stream-cgroups", "unit/keyspace", "unit/scan", "unit/info",
         "unit/auth", "unit/protocol", "unit/expire", "unit/other", "unit/multi", "unit/quit", "unit/sort", "unit/dump",
         "unit/bitops", "unit/bitfield", "unit/geo", "unit/pubsub", "unit/scripting", "unit/functions",
         "unit/introspection", "unit/introspection-2", "unit/slowlog", "unit/lazyfree", "unit/tracking", "integration/rdb",
         "integration/aof", "integration/replication-2")


@contextlib.contextmanager
def server(way, name):
    """A server in one of the ways."""
    program = program_in(way.folder)
    if program is None:
        raise Failed("redis-check-rdb is not there: run scripts/setup")
    with redis_server(program, way.folder / name, way.command([]), popen=way.box.popen) as client:
        yield client
    way.take_report()


def shadow(way, keys=KEYS):
    """Fills, changes, verifies. Gives the number of keys that are left."""
    with server(way, "redis") as client:
        expected = Shadow(client, keys)
        expected.fill()
        for turn in range(1, keys // 800):
            expected.change(turn)
        expected.verify()
        return len(expected.turns)


def snapshots(way):
    """Snapshots while a client writes; each is read by a server that knows nothing of tiermgr."""
    at = way.folder / "redis"
    taken = []
    with server(way, "redis") as client:
        expected = Shadow(client, KEYS // 2)
        expected.fill()
        counter = Counter(client)
        counter.write(20)
        for number in range(SNAPSHOTS):
            bounds = counter.snapshot()
            dump = way.folder / f"dump-{number}"
            dump.mkdir()
            (at / "dump.rdb").rename(dump / "dump.rdb")
            taken.append((dump, bounds))
            until = time.monotonic() + 2
            while time.monotonic() < until:
                counter.write()
    last = -1
    for dump, bounds in taken:
        with redis_server(program_in(way.folder), dump) as reader:
            instant = assert_one_instant(reader, bounds)
            assert instant > last, (instant, last)
            last = instant
            expected.verify(reader, COUNTERS)
        shutil.rmtree(dump)
    return len(taken)


def suite_folder():
    """The source of the installed version, with the installed programs where its tests look for them."""
    source = debian.source("redis", "redis-tools")
    for tool in ("redis-server", "redis-check-rdb", "redis-check-aof", "redis-benchmark", "redis-cli", "redis-sentinel"):
        link = source / "src" / tool
        if not link.is_symlink():
            # redis-tools has the server too; which of its lives it leads depends on its name.
            found = shutil.which("redis-check-rdb") if tool in ("redis-server", "redis-sentinel") else shutil.which(tool)
            link.symlink_to(os.path.realpath(found))
    return source


def suite(way):
    """Gives each test and how it ended."""
    source = suite_folder()
    shutil.rmtree(source / "tests" / "tmp", ignore_errors=True)
    (source / "tests" / "tmp").mkdir()
    chosen = [word for name in SUITE for word in ("--single", name)]
    chosen += [word for name in SKIPPED for word in ("--skiptest", name)]
    out = way.run(["tclsh", "tests/test_helper.tcl", "--clients", 3, "--baseport", PORT, "--portcount", 400,
                   "--no-latency", "--timeout", 900, *chosen], 3000, cwd=source, status=(0, 1), env=product.clean_environment(TERM="dumb"))
    found = {}
    for kind, test in re.findall(r"\[(ok|err|exception|ignore|skip)\]: (.*?)(?: \(\d+ ms\))?$", out, re.M):
        # Of several tests of one name the worst.
        if found.get(test, "ok") == "ok":
            found[test] = kind
    if not found:
        raise Failed(f"Redis' tests say nothing:\n{out[-3000:]}")
    return found


def cases():
    return [
        Case("redis-shadow", f"{KEYS} values of 0.2 to 3.7 KB: filled, read, changed, all looked at", shadow, moves=True,
             outside_mib=64),
        Case("redis-snapshots", f"{SNAPSHOTS} BGSAVEs of {KEYS // 2} values while a counter is written", snapshots,
             moves=True),
        Case("redis-suite", f"Redis' own tests, {len(SUITE)} files", suite, judge_outcomes(KNOWN)),
    ]
