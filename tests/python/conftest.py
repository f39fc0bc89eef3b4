"""A private daemon for each module of tests, and the package as it lies in the tree."""

import importlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
sys.path.insert(0, str(ROOT / "ffi" / "python"))
os.environ.setdefault("TIERMGR_LIBRARY", str(DIST / "lib" / "libtiermgr.so.0"))

MIB = 1 << 20
DRAM = 128 * MIB
START_SECONDS_MAX = 20


def skip(reason):
    """Says why a test does not run, or fails where nothing may be skipped."""
    if os.environ.get("TIERMGR_CI_STRICT"):
        pytest.fail(f"skipped in a strict run: {reason}")
    pytest.skip(reason)


def needed(module):
    """A module without which none of a file's tests can run."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if os.environ.get("TIERMGR_CI_STRICT"):
            raise
        pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="session")
def built():
    """What scripts/build made."""
    if not (DIST / "lib" / "libtiermgr.so.0").exists():
        skip("dist/ is not built; run scripts/build")
    return DIST


@pytest.fixture
def daemon(built):
    """The socket of a daemon that may use 128 MiB."""
    if os.geteuid() != 0:
        skip("a daemon needs root")
    if not pathlib.Path("/dev/userfaultfd").exists():
        skip("this kernel has no /dev/userfaultfd")
    (ROOT / "build").mkdir(exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="scratch-python-", dir=ROOT / "build"))
    state = pathlib.Path(tempfile.mkdtemp(prefix="tiermgr-python-", dir="/dev/shm"))
    socket = folder / "socket"
    command = [built / "bin" / "tiermgrd", "--embedded", "--ready-fd", "1"]
    command += ["--socket", socket, "--state-dir", state / "state", "--dram", str(DRAM)]
    command += ["--store", f"{folder / 'store'}:{2048 * MIB}"]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "ready"
        yield str(socket)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(START_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            # The keeper would start another one: it goes first, the serving process after it.
            children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            process.kill()
            process.wait()
            for child in children.split():
                os.kill(int(child), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def client(daemon):
    """A client that lives as long as its test."""
    import tiermgr

    with tiermgr.Client(daemon, name="pytest") as made:
        yield made
