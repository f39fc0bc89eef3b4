"""A program that attaches and then misbehaves harms nobody but itself: not a witness that checks its
bytes, not the daemon, not the memory and the slots of others."""

import contextlib
import pathlib
import shutil
import subprocess
import time

import pytest

import product
from system_daemon import (as_user, client_environment, group_ids, status_of, system_daemon,
                           wait_until_empty)

MOVES = ["attach-blocking", "steal-messages", "steal-signals", "scribble", "damage-oldest",
         "nonsense", "kill-helper",
         "stop-helper", "close"]
SECONDS = 4


@pytest.fixture
def served(folder, workload):
    with system_daemon(folder, "families_per_uid = 3") as public:
        source = pathlib.Path(__file__).with_name("hostile.c")
        program = product.compile_c(source, product.BUILD / "system" / "hostile", "-rdynamic",
                                    f"-I{product.DIST / 'include'}", f"-L{product.DIST / 'lib'}",
                                    f"-Wl,-rpath,{public}", "-ltiermgr")
        # Where a user without rights may run it; the path of the library is that of this folder.
        subprocess.run(["cp", "-L", program, product.DIST / "lib" / "libtiermgr.so.0", public],
                       check=True)
        shutil.copy(workload, public / "workload")
        yield public


@pytest.fixture
def witness(served):
    """A program of somebody else that works as long as it is let, and then checks every byte."""
    process = subprocess.Popen([served / "workload", "hold", "128"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=client_environment(served))
    assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
    yield process
    process.kill()
    process.communicate()


def misbehave(served, move, seconds=SECONDS):
    env = product.clean_environment(TIERMGR_SOCKET=str(served / "socket"),
                                    LD_LIBRARY_PATH=str(served))
    return as_user(group_ids()[0], [served / "hostile", move, seconds], seconds=60, env=env)


def wait_for_families(served, count, seconds=20):
    deadline = time.monotonic() + seconds
    while (status := status_of(served))["families"] != count:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def wait_for_helpers(program, seconds=20):
    """Until no process has the memory of `program`: its helpers have its command line."""
    name = bytes(program) + b"\0"
    deadline = time.monotonic() + seconds

    def holders():
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes().startswith(name):
                    yield path.parent.name

    while left := list(holders()):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("move", MOVES)
def test_a_witness_does_not_notice(folder, served, witness, move):
    before = status_of(served)
    done = misbehave(served, move)
    # What is done to a ring loses no byte of its owner's either, as long as no command is forged.
    allowed = (0,) if move == "damage-oldest" else (0, -7, -9)
    assert done.returncode in allowed, (done.returncode, done.stderr)
    assert (folder / "daemon.log").read_text().count("ERROR ending a helper") <= 1
    # It is forgotten, with all that it had been given, while the witness goes on.
    after = wait_for_families(served, 1)
    wait_for_helpers(served / "hostile")
    assert (after["daemon_pid"], after["restarts"]) == (before["daemon_pid"], before["restarts"])
    out, err = witness.communicate("go\n", timeout=60)
    assert witness.returncode == 0 and out.endswith("right\n"), (out, err)
    empty = wait_until_empty(served)
    assert not (empty["families"] or empty["dram_granted_bytes"] or empty["store_used_bytes"]), empty


def test_leases_are_bounded(served):
    done = misbehave(served, "take-leases", 50)
    assert done.stdout == "4096 NO_ROOM\n", (done.stdout, done.stderr)


def test_places_are_bounded_for_each_user(served):
    done = misbehave(served, "take-places", 50)
    assert done.stdout.startswith("3 NO_ROOM ") and "families_per_uid" in done.stdout, done
    # Others find theirs.
    subprocess.run([served / "workload", "fill", "16", "1"], check=True, timeout=60,
                   stdin=subprocess.DEVNULL, env=client_environment(served))
    wait_until_empty(served)
