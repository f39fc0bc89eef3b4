"""A program with an allocator of its own, which gets its memory by mmap, under `run --mmap`: CPython."""

import sys

from meter import Meter
import product

MIB = 1 << 20
# The interpreter itself, its libraries and what libc's malloc has of small blocks lie outside.
OUTSIDE = 64 * MIB
MAPPED = ("--mmap", "--require")

# Each object is small, and comes from an arena of 1 MiB that the interpreter has mapped.
OBJECTS = """
import os, sys
count, rounds = int(sys.argv[1]), int(sys.argv[2])
def made(i, turn):
    return (i + turn, str(i * 1000003 + turn), [i, -i, turn])
table = [made(i, 0) for i in range(count)]
turns = [0] * count
for turn in range(1, rounds + 1):
    for i in range(turn, count, 5):
        table[i], turns[i] = made(i, turn), turn
    for i in range(0, count, 3):
        assert table[i] == made(i, turns[i]), i
child = os.fork()
if child == 0:
    os._exit(0 if all(table[i] == made(i, turns[i]) for i in range(count)) else 1)
for i in range(count):
    table[i] = made(i, -1)
assert os.waitpid(child, 0)[1] == 0, "the child found other objects"
assert all(table[i] == made(i, -1) for i in range(count))
del table
print("ok", count)
"""


def interpreter(count, rounds):
    return [sys.executable, "-c", OBJECTS, str(count), str(rounds)]


def test_objects_of_an_interpreter_in_half_their_memory(run_bounded, box):
    count = 500_000
    with Meter(box) as meter:
        out, counters = run_bounded(interpreter(count, 2), 80, popen=box.popen, flags=MAPPED)
    assert out.splitlines()[-1] == f"ok {count}"
    assert counters["recalled_pages"] + counters["prefetched_pages"] >= 10_000, counters
    # The limit is one for the family; the child writes counts of references into all that it looks at.
    assert meter.peaks["held_bytes"] <= 80 * MIB * 102 // 100 + 16 * MIB + 2 * OUTSIDE, meter.peaks


def test_without_the_switch_they_stay_where_the_kernel_maps_them(run_bounded):
    """What makes the test above one of mappings."""
    _, counters = run_bounded(interpreter(300_000, 1), 80)
    assert counters["recalled_pages"] + counters["prefetched_pages"] < 10_000, counters
