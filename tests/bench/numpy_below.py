"""Work on arrays that fit. Prints one JSON object: seconds of each part, the best of three."""

import json
import sys
import time

import numpy as np


def best(work):
    took = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took)


def main():
    words = (int(sys.argv[1]) << 20) // 8
    side = int((words / 3) ** 0.5)
    random = np.random.default_rng(1)
    a, b = random.random((side, side)), random.random((side, side))
    flat = random.random(words)
    index = random.integers(0, words, words // 8)
    shuffled = random.integers(0, 1 << 62, words // 4)
    print(json.dumps({
        "matmul_s": best(lambda: a @ b),
        "gather_s": best(lambda: flat[index].sum()),
        "temporaries_s": best(lambda: ((flat * 2.0 + 1.0) * flat).sum()),
        "sort_s": best(lambda: np.sort(shuffled)),
    }))


if __name__ == "__main__":
    main()
