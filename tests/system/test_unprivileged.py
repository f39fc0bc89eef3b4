"""A system daemon serves users without rights, and only those of its group."""

import os
import shutil

import pytest

import product
from system_daemon import as_user, client_environment, group_ids, status_of, system_daemon

GROUP, OTHER_GROUP = group_ids()
# Says hello as a control connection and orders the daemon to end.
SHUTDOWN = """
import socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.settimeout(20)
peer.connect(sys.argv[1])
peer.send(bytes([0, 1, 2]))
peer.recv(65536)
peer.send(bytes([11, 4]))
print(peer.recv(65536))
"""

@pytest.fixture
def served(folder, workload):
    with system_daemon(folder) as public:
        shutil.copy(workload, public / "workload")
        yield public


def test_a_user_of_the_group_is_served(served):
    done = as_user(GROUP, [served / "workload", "fill", 256, 2], env=client_environment(served))
    assert done.returncode == 0, done.stderr
    totals = status_of(served)["totals"]
    assert totals["parked_pages"] >= 10_000, totals


def test_a_user_outside_the_group_is_told_why_not(served):
    done = as_user(OTHER_GROUP, [served / "workload", "fill", 16, 1],
                   env=client_environment(served))
    assert done.returncode != 0
    assert "ermission" in done.stderr, done.stderr


def test_a_user_may_look_but_not_end_the_daemon(served):
    env = product.clean_environment(TIERMGR_SOCKET=str(served / "socket"))
    look = as_user(GROUP, [served / "tiermgrctl", "status", "--json"], env=env)
    assert look.returncode == 0, look.stderr
    end = as_user(GROUP, ["/usr/bin/python3", "-c", SHUTDOWN, served / "socket"])
    assert end.returncode == 0, end.stderr
    assert "permi" in end.stdout or "root" in end.stdout, end.stdout
    again = as_user(GROUP, [served / "tiermgrctl", "status", "--json"], env=env)
    assert again.returncode == 0, again.stderr


def test_the_state_directory_is_for_root_alone(served):
    assert (served / "state").stat().st_mode & 0o077 == 0
    assert os.stat(served / "socket").st_mode & 0o007 == 0
