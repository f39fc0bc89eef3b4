"""CPython: its own tests, and processes that share an array by fork."""

import os
import pathlib
import subprocess
import sys

import product
from ways import Case, Failed, judge_outcomes, outcomes

HERE = pathlib.Path(__file__).parent
TESTS = ("test_dict", "test_list", "test_bytes", "test_io", "test_threading", "test_subprocess", "test_mmap",
         "test_json", "test_pickle", "test_fork1", "test_gc")
# What test_multiprocessing_fork is, which not every installation has, and under a name that is not taken for it: what it
# takes in is always there.
MULTIPROCESSING = "test_multiprocessing_by_fork"
MULTIPROCESSING_TEXT = """import test._test_multiprocessing
test._test_multiprocessing.install_tests_in_module_dict(globals(), "fork")
"""
ARRAY_MIB = int(os.environ.get("TIERMGR_TEST_ARRAY_MIB", "1024"))
# Its own allocator of small objects takes them from mappings.
ENVIRONMENT = {"PYTHONMALLOC": "malloc"}
# Tests that may differ, each with its reason.
POSIX = ".test.test_subprocess.POSIXProcessTestCase."
KNOWN = {
    POSIX + "test_pass_fds_redirected": "it counts all descriptors, and three are the library's",
    POSIX + "test_close_fds_when_max_fd_is_lowered": "no descriptor is left to attach with, and --require refuses",
}


def interpreter():
    """One that has the tests of the library."""
    for program in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        asked = subprocess.run([program, "-c", "import test.support, test.test_dict"], check=False, capture_output=True,
                               env=product.clean_environment())
        if asked.returncode == 0:
            return program
    raise Failed("no Python here has its own tests: run scripts/setup")


def own_tests(names, seconds, text=None):
    """Runs tests of the library, or one whose text is given."""

    def run(way):
        found, options = way.folder / "tests.xml", ()
        if text is not None:
            (way.folder / f"{names[0]}.py").write_text(text)
            options = ("--testdir", way.folder)
        # Its status tells of tests that fail natively too.
        way.run([interpreter(), "-m", "test", *options, "--junit-xml", found, "--tempdir", way.folder, "--timeout", "300", *names],
                seconds, env=product.clean_environment(**ENVIRONMENT), cwd=way.folder, status=(0, 2, 3))
        return outcomes(found)

    return run


def dictionaries(way):
    script = "\n".join(["table = {i: [str(i) * 3, (i, -i)] for i in range(700_000)}",
                        "for i in range(0, 700_000, 7): table[i] = [str(i) * 3, (i, -i)]",
                        "for i, (text, pair) in table.items(): assert text == str(i) * 3 and pair == (i, -i), i",
                        "print(len(table))"])
    return way.run([sys.executable, "-c", script], 600, env=product.clean_environment(**ENVIRONMENT))


def forked_array(way, mib=ARRAY_MIB, children=4):
    return way.run([sys.executable, HERE / "fork_array.py", mib, children], 1200,
                   env=product.clean_environment(OPENBLAS_NUM_THREADS="1"))


def cases():
    return [
        Case("cpython-dictionaries", "700,000 lists in a dictionary", dictionaries, moves=True, outside_mib=64),
        Case("cpython-tests", " ".join(TESTS), own_tests(TESTS, 1800), judge_outcomes(KNOWN)),
        Case("cpython-multiprocessing", MULTIPROCESSING, own_tests([MULTIPROCESSING], 1800, MULTIPROCESSING_TEXT),
             judge_outcomes(KNOWN)),
        Case("cpython-fork", f"an array of {ARRAY_MIB} MiB and 4 forked children, then a pool of them", forked_array,
             moves=True),
    ]
