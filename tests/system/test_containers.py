"""What containers forbid is named, with what allows it; and a program in one is served by a daemon outside."""

import json
import pathlib
import shutil
import subprocess

import pytest

import product
from system_daemon import client_environment, status_of, system_daemon

# Docker's profile without CAP_SYS_PTRACE.
FORBIDDEN = ["userfaultfd", "io_uring_setup", "pidfd_getfd", "process_vm_readv", "kcmp"]
NO_PTRACE = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
# A /dev of its own, as containers have: the usual devices and shared memory.
OWN_DEV = """
set -e
dev=$1; shift
mount -t tmpfs dev "$dev"
for name in null zero full random urandom; do
    touch "$dev/$name"
    mount --bind "/dev/$name" "$dev/$name"
done
mkdir "$dev/shm"
mount -t tmpfs $SHM shm "$dev/shm"
mount --move "$dev" /dev
mount -t tmpfs -o ro run /run
exec "$@"
"""


@pytest.fixture(scope="session")
def deny():
    """Runs a command under a filter: `[deny, CALL..., "--", COMMAND...]`."""
    source = pathlib.Path(__file__).with_name("deny.c")
    return product.compile_c(source, product.BUILD / "system" / "deny")


def said(command, **more):
    """Runs it to its end, and gives its status and all that it said."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60,
                          check=False, stdin=subprocess.DEVNULL,
                          env=product.clean_environment(**more))
    return done.returncode, done.stdout + done.stderr


def run_true(folder):
    return [product.CTL, "run", "--dram", "64M", "--nvme", f"{folder / 'store'}:64M", "true"]


@pytest.mark.parametrize("call, feature", [("io_uring_setup", "io_uring"), ("kcmp", "kcmp"),
                                           ("pidfd_getfd", "pidfd_getfd"),
                                           ("process_vm_readv", "process_vm_readv")])
def test_a_call_that_is_forbidden_is_named_with_what_allows_it(folder, deny, call, feature):
    status, text = said([deny, call, "--", *run_true(folder)])
    assert status == 125 and feature in text and "container" in text, text
    assert len(text.splitlines()) == 1, text
    status, text = said([deny, call, "--", product.CTL, "doctor", "--json"])
    found = {f["name"]: f for f in json.loads(text)["findings"]}
    assert status == 1 and found[feature]["state"] == "fail", found
    assert call in found[feature]["fix"] and "seccomp" in found[feature]["fix"], found


def test_the_system_call_userfaultfd_is_not_needed(folder, deny):
    status, text = said([deny, "userfaultfd", "--", *run_true(folder)])
    assert status == 0, text


def test_a_daemon_that_may_not_trace_says_what_it_needs(folder):
    status, text = said([*NO_PTRACE, *run_true(folder)])
    assert status == 125 and "container" in text, text
    status, text = said([*NO_PTRACE, product.CTL, "doctor"])
    assert status == 1 and "--cap-add SYS_PTRACE" in text, text


@pytest.mark.parametrize("shared_memory", ["", "-o ro"])
def test_without_the_device_it_is_asked_for(folder, shared_memory):
    dev = folder / "dev"
    dev.mkdir()
    inside = ["unshare", "--mount", "sh", "-c", OWN_DEV, "sh", dev]
    status, text = said([*inside, *run_true(folder)], SHM=shared_memory, TMPDIR=str(folder))
    assert status == 125 and "/dev/userfaultfd" in text and "container" in text, text
    status, text = said([*inside, product.CTL, "doctor"], SHM=shared_memory)
    assert status == 1 and "--device /dev/userfaultfd" in text, text


def test_a_program_in_a_container_is_served_by_a_daemon_outside(folder, workload, deny):
    with system_daemon(folder) as public:
        shutil.copy(workload, public / "workload")
        shutil.copy(deny, public / "deny")
        command = [*NO_PTRACE, "unshare", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts",
                   public / "deny", *FORBIDDEN, "--", public / "workload"]
        for work in (["fill", "256", "2"], ["forks", "128", "3"]):
            done = subprocess.run(list(map(str, [*command, *work])), capture_output=True, text=True,
                                  timeout=150, check=False, stdin=subprocess.DEVNULL,
                                  env=client_environment(public))
            assert done.returncode == 0, done.stderr
        assert status_of(public)["totals"]["parked_pages"] >= 20_000


def test_a_program_whose_helper_may_not_confine_itself_is_told(folder, workload, deny):
    """Without seccomp there is no helper: better none than one with rights."""
    with product.Daemon(folder, 64 << 20, 256 << 20) as daemon:
        for required, status in (("0", 0), ("1", 1)):
            done = subprocess.run([deny, "seccomp", "--", workload, "fill", "32", "1"],
                                  capture_output=True, text=True, timeout=60, check=False,
                                  env={**daemon.preloaded(), "TIERMGR_REQUIRE": required})
            assert (done.returncode != 0) == bool(status), done.stderr
            assert "helper" in done.stderr and "sandbox" in done.stderr, done.stderr
