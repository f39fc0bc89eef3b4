"""NumPy's own tests."""

import sys

import product
from ways import Case, judge_outcomes, outcomes

# Tests that may differ, each with its reason.
KNOWN = {}


def fast(way):
    found = way.folder / "tests.xml"
    script = f"import numpy, sys; sys.exit(not numpy.test('fast', extra_argv=['-p', 'no:cacheprovider', '--junit-xml={found}']))"
    way.run([sys.executable, "-c", script], 5400, cwd=way.folder, status=(0, 1),
            env=product.clean_environment(PYTHONMALLOC="malloc", OPENBLAS_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1"))
    return outcomes(found)


def cases():
    return [Case("numpy-tests", "numpy.test('fast')", fast, judge_outcomes(KNOWN))]
