"""NumPy in less memory than its arrays need gives the same bytes as NumPy with all it wants."""

import os
import pathlib
import subprocess
import sys

import pytest

from meter import Meter
import product

WORK = pathlib.Path(__file__).with_name("numpy_work.py")
MIB = 1 << 20
# MiB of the working set; it gets half of them.
SIZE_MIB = int(os.environ.get("TIERMGR_TEST_NUMPY_MIB", "192"))


@pytest.mark.seconds(400 * max(1, SIZE_MIB // 192))
def test_matmul_sort_and_in_place_give_the_same_bytes(run_bounded, box):
    pytest.importorskip("numpy")
    env = product.clean_environment(OPENBLAS_NUM_THREADS="2")
    command = [sys.executable, str(WORK), str(SIZE_MIB)]
    free = subprocess.run(command, env=env, timeout=600, check=True, capture_output=True, text=True)
    with Meter(box) as meter:
        out, counters = run_bounded(command, SIZE_MIB // 2, store_mib=max(2048, 4 * SIZE_MIB),
                                    popen=box.popen, seconds=300 * max(1, SIZE_MIB // 192), env=env)
    assert out == free.stdout
    assert len(out.splitlines()) == 3
    assert counters["recalled_pages"] + counters["prefetched_pages"] >= 10_000, counters
    # The interpreter and its small objects lie outside; so the bound is wider than for a C program.
    limit = SIZE_MIB // 2 * MIB * 102 // 100 + 16 * MIB + 48 * MIB
    assert meter.peaks["held_bytes"] <= limit, meter.peaks
