"""Three things NumPy does on arrays larger than the limit. Prints one digest a line.

All values are small integers, so that every order of additions gives the same bits.
"""

import hashlib
import sys

import numpy as np


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8)).hexdigest()


def matmul(side):
    random = np.random.default_rng(1)
    a = random.integers(0, 8, (side, side)).astype(np.float64)
    b = random.integers(0, 8, (side, side)).astype(np.float64)
    return a @ b


def sort(count):
    array = np.random.default_rng(2).integers(0, 1 << 62, count)
    array.sort()
    return array


def in_place(count):
    array = np.arange(count, dtype=np.int64)
    for step in range(4):
        array *= 3
        array += step
        array[::7] ^= 0x55
    return array


def main():
    mib = int(sys.argv[1])
    words = (mib << 20) // 8
    print("matmul", digest(matmul(int((words / 3) ** 0.5))), flush=True)
    print("sort", digest(sort(words)), flush=True)
    print("in_place", digest(in_place(words)), flush=True)


if __name__ == "__main__":
    main()
