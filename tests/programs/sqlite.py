"""SQLite with its database in memory: rows that are checked one by one, and its own speed test."""

import pathlib
import re
import subprocess
import sys

import debian
import product
from ways import Case, Failed

HERE = pathlib.Path(__file__).parent
ROWS = 250_000
# Percent of the size that the speed test has by itself.
SPEEDTEST_SIZE = 150


def rows(way, count=ROWS, rounds=3):
    return way.run([sys.executable, HERE / "sqlite_rows.py", count, rounds], 1500)


def speed_test(way):
    """Gives the sum that the speed test makes of all that it reads."""
    source = debian.source("sqlite3") / "test" / "speedtest1.c"
    program = product.BUILD / "programs" / "speedtest1"
    if not program.exists():
        subprocess.run(["cc", "-O2", "-w", "-o", program, source, "-lsqlite3"], check=True)
    out = way.run([program, "--memdb", "--verify", "--size", SPEEDTEST_SIZE], 1500)
    found = re.findall(r"Verification Hash: (\S+ \S+)", out)
    if not found:
        raise Failed(f"the speed test gives no sum:\n{out[-2000:]}")
    return found


def cases():
    return [
        Case("sqlite-rows", f"{ROWS} rows, random changes, savepoints, integrity_check", rows, moves=True, outside_mib=64),
        Case("sqlite-speedtest", f"speedtest1 --memdb --verify --size {SPEEDTEST_SIZE}", speed_test, moves=True),
    ]
