"""An array that forked processes read and change: `fork_array.py MIB CHILDREN`.

Each child finds the sums that its parent left, and what it writes is its own. A pool of workers then sums the array
piece by piece, while the parent writes to it.
"""

import multiprocessing
import sys

import numpy as np

WORDS_PER_MIB = (1 << 20) // 8


def sum_of(first, count):
    """0 <= first: the sum of `count` numbers from `first` on."""
    return count * (2 * first + count - 1) // 2


def child(array, number, children, answers):
    part = len(array) // children
    mine = array[number * part:(number + 1) * part]
    found = int(array.sum())
    mine += number + 1
    answers.put((number, found, int(mine.sum()), int(array.sum())))


def piece_sum(bounds):
    return int(SHARED[bounds[0]:bounds[1]].sum())


def main():
    global SHARED
    mib, children = int(sys.argv[1]), int(sys.argv[2])
    words = mib * WORDS_PER_MIB
    context = multiprocessing.get_context("fork")
    SHARED = np.arange(words, dtype=np.int64)
    whole, part = sum_of(0, words), words // children
    answers = context.SimpleQueue()
    started = [context.Process(target=child, args=(SHARED, n, children, answers)) for n in range(children)]
    for process in started:
        process.start()
    told = sorted(answers.get() for _ in started)
    for process in started:
        process.join()
        assert process.exitcode == 0, process.exitcode
    for number, (who, before, mine, after) in enumerate(told):
        assert who == number and before == whole, (who, before, whole)
        assert mine == sum_of(number * part, part) + (number + 1) * part, (who, mine)
        assert after == whole + (number + 1) * part, (who, after)
    assert int(SHARED.sum()) == whole, "a child's writing reached its parent"

    size = 4 * WORDS_PER_MIB
    pieces = [(start, min(start + size, words)) for start in range(0, words, size)]
    with context.Pool(children) as pool:
        sums = pool.map_async(piece_sum, pieces, chunksize=4)
        # The workers were forked before this.
        SHARED[::512] = -1
        assert sum(sums.get()) == whole, "what the parent wrote reached a child"
    assert int(SHARED[::512].sum()) == -len(SHARED[::512])
    SHARED[::512] = np.arange(0, words, 512)
    assert int(SHARED.sum()) == whole
    print("ok", whole)


if __name__ == "__main__":
    main()
