"""`tiermgrctl run` says what became of the run, also when nothing of it was managed."""

import json
import pathlib
import shutil
import subprocess
import tempfile

import pytest

import product

# A user without rights, whom the socket of a private daemon is closed to.
UNPRIVILEGED = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


@pytest.fixture
def public(workload):
    """A folder with the workload and the library, where any user may run and read them."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="tiermgr-test-"))
    path.chmod(0o755)
    shutil.copy(workload, path / "workload")
    shutil.copy(product.PRELOAD, path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run(folder, public):
    """Runs a command; gives the finished process and its report."""

    def begin(*command, options=()):
        report = folder / "report.json"
        full = [product.CTL, "run", "--dram", "64M", "--nvme", f"{folder / 'store'}:512M",
                "--report", report, *options, "--", *command]
        env = product.clean_environment(TIERMGR_PRELOAD=str(public / product.PRELOAD.name))
        done = subprocess.run(list(map(str, full)), capture_output=True, text=True, timeout=120,
                              check=False, stdin=subprocess.DEVNULL, env=env)
        return done, json.loads(report.read_text())

    return begin


def test_a_managed_program_is_counted(run, public):
    done, report = run(public / "workload", "fill", 128, 1)
    assert done.returncode == 0, done.stderr
    assert report["attached_processes"] == 1, report
    assert not report["warnings"], report


def test_a_run_in_which_nobody_attached_says_so(run):
    done, report = run("true")
    assert done.returncode == 0, done.stderr
    assert report["attached_processes"] == 0, report
    assert "no program attached" in report["warnings"][0]
    assert "no program attached" in done.stderr


def test_what_gives_up_root_is_not_managed_and_not_silently_so(run, public):
    command = [*UNPRIVILEGED, public / "workload", "fill", 32, 1]
    done, report = run(*command)
    assert done.returncode == 0 and report["attached_processes"] == 0, done.stderr
    assert "no program attached" in done.stderr
    done, report = run(*command, options=["--require"])
    assert done.returncode != 0, done.stderr
    assert report["attached_processes"] == 0
