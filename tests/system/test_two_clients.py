"""Several clients in one process do not get into each other's way, whoever leaves or is killed."""

import os
import pathlib
import signal
import subprocess
import time

import pytest

import product

MIB = 1 << 20


@pytest.fixture
def daemon(folder):
    with product.Daemon(folder, 96 * MIB, 1024 * MIB) as running:
        yield running


@pytest.fixture
def start(daemon):
    """Starts the program, waits until both clients have filled, and kills what is left at the end."""
    source = pathlib.Path(__file__).with_name("two_clients.c")
    program = product.compile_c(source, product.BUILD / "system" / "two_clients",
                                *product.library_flags())
    started = []

    def begin(*arguments):
        process = subprocess.Popen([program, *map(str, arguments)], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=daemon.environment())
        started.append(process)
        assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err


def assert_empty(status):
    assert not (status["families"] or status["dram_granted_bytes"] or status["store_used_bytes"])


def test_each_client_has_the_helper_that_it_started(daemon, start):
    process = start("stay", 96, 4)
    rows = [row for row in daemon.control("clients") if row["pid"] == process.pid]
    assert len(rows) == 2, rows
    assert len({row["helper_pid"] for row in rows}) == 2, rows
    finish(process)


def test_the_second_client_works_on_when_the_first_leaves(daemon, start):
    for _ in range(3):
        finish(start("leave", 128, 2))
    assert daemon.status()["totals"]["parked_pages"] >= 10_000
    assert_empty(daemon.wait_until_empty())


def test_both_outlive_the_serving_daemon(daemon, start):
    process = start("stay", 96, 6)
    killed = set()
    while len(killed) < 4 and process.poll() is None:
        status = daemon.wait_for(lambda s: s["daemon_pid"] not in killed)
        os.kill(status["daemon_pid"], signal.SIGKILL)
        killed.add(status["daemon_pid"])
        time.sleep(0.5)
    finish(process)
    assert len(killed) >= 2, "the clients ended too early for this test to say anything"
    assert_empty(daemon.wait_until_empty())


def test_a_helper_is_found_by_the_number_that_its_program_knows(daemon, workload):
    """In a pid namespace of its own the program and its helper have other numbers than outside."""
    if not product.shutil.which("unshare"):
        pytest.skip("unshare is not installed")
    command = ["unshare", "--pid", "--fork", "--kill-child", workload, "fill", "192", "1"]
    done = subprocess.run(command, env=daemon.preloaded(), capture_output=True, text=True,
                          timeout=100, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert daemon.status()["totals"]["parked_pages"] >= 10_000
    assert_empty(daemon.wait_until_empty())
