"""NumPy's own tests."""

import sys

import product
from ways import Case, Failed, judge_outcomes, outcomes

# Tests that may differ, each with its reason.
KNOWN = {
    "_core.tests.test_regression.TestRegression.test_dot_big_stride": "it skips itself without 8 GiB, which are refused"
                                                                     " beyond DRAM and store",
}
# A collection that breaks off has outcomes too.
LEAST = 20_000


def fast(way):
    """`numpy.test('fast')`, without those of f2py: they look for a build system of Fortran as they are collected, and
    where there is none no test at all is run."""
    found = way.folder / "tests.xml"
    script = ("import numpy, pathlib, pytest, sys; home = pathlib.Path(numpy.__file__).parent; "
              "sys.exit(pytest.main(['--pyargs', 'numpy', '-m', 'not slow', '-q', '-p', 'no:cacheprovider', "
              f"f'--ignore={{home}}/f2py', '--junit-xml={found}']))")
    way.run([sys.executable, "-c", script], 5400, cwd=way.folder, status=(0, 1),
            env=product.clean_environment(PYTHONMALLOC="malloc", OPENBLAS_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1"))
    seen = outcomes(found)
    if len(seen) < LEAST:
        raise Failed(f"{len(seen)} tests have an outcome, fewer than {LEAST}")
    return seen


def cases():
    return [Case("numpy-tests", "numpy.test('fast') without f2py", fast, judge_outcomes(KNOWN))]
