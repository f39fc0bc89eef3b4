"""Fixtures of the system tests, their time limit, and what a skip means.

A test that cannot run says why. With TIERMGR_CI_STRICT=1 that is a failure: a machine of the project
can run all of them.
"""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1] / "programs")]

import product  # noqa: E402
from box import Box, Unavailable  # noqa: E402

SECONDS_MAX = 180


class TooLong(Exception):
    """The time limit of a test is over."""


@pytest.fixture(autouse=True)
def time_limit(request):
    """Ends a test that hangs; a mark `seconds(n)` gives another limit."""
    mark = request.node.get_closest_marker("seconds")
    seconds = mark.args[0] if mark else SECONDS_MAX

    def end(*_):
        raise TooLong(f"still running after {seconds} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def pytest_configure(config):
    config.addinivalue_line("markers", "seconds(n): time limit of this test")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and os.environ.get("TIERMGR_CI_STRICT") == "1":
        report.outcome = "failed"
        report.longrepr = f"a skip where none may be: {report.longrepr}"


@pytest.fixture(scope="session", autouse=True)
def built():
    """All of these need the product and a machine that it runs on."""
    for path in (product.CTL, product.DAEMON, product.PRELOAD):
        if not path.exists():
            pytest.fail(f"{path} is not there: run scripts/build")
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    if not os.access("/dev/userfaultfd", os.R_OK | os.W_OK):
        pytest.skip("/dev/userfaultfd is not there or may not be opened")


@pytest.fixture
def folder():
    """A folder on a disk: a store on tmpfs is refused."""
    with product.scratch() as path:
        yield path


@pytest.fixture
def box():
    """A memory cgroup without a limit, in which everything is metered."""
    try:
        with Box("test") as made:
            yield made
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def workload():
    """The C program that checks every byte."""
    source = pathlib.Path(__file__).with_name("workload.c")
    return product.compile_c(source, product.BUILD / "system" / "workload")


@pytest.fixture
def run_bounded(folder):
    """Runs a command under `tiermgrctl run`; gives its output and the counters."""

    def run(command, dram_mib, store_mib=2048, popen=subprocess.Popen, seconds=150, env=None,
            flags=()):
        report = folder / "report.json"
        full = product.run_command(dram_mib << 20, f"{folder / 'store'}:{store_mib}M", report,
                                   command)
        full[2:2] = flags
        process = popen(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        stdin=subprocess.DEVNULL, env=env or product.clean_environment())
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
        assert process.returncode == 0, f"status {process.returncode}:\n{err[-4000:]}"
        # Shown where the test fails: what the daemon has to say of the run.
        print(err[-4000:], file=sys.stderr)
        return out, product.counters(report)

    return run
