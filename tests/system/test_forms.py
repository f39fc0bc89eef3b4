"""Children that come by other ways than fork(): they are served over a restart, and what they had comes back."""

import os
import pathlib
import signal
import subprocess
import time

import pytest

import product

MIB = 1 << 20
SIZE_MIB = 96
SOURCE = product.ROOT / "tests" / "malloc" / "fork_forms.c"


@pytest.fixture(scope="session")
def forms():
    return product.compile_c(SOURCE, product.BUILD / "system" / "fork_forms")


def begin(daemon, forms, how, **more):
    env = daemon.preloaded(HOW=how, SIZE=f"{SIZE_MIB}M", **more)
    return subprocess.Popen([forms], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def finish(process, said=""):
    out, err = process.communicate(said, timeout=120)
    assert process.returncode == 0 and "ok fork_forms" in out, (process.returncode, out, err)


@pytest.mark.parametrize("how", ["nested", "nested-raw"])
def test_children_of_all_kinds_go_on_with_a_daemon_that_was_killed(folder, forms, how):
    with product.Daemon(folder, SIZE_MIB // 2 * MIB, 1024 * MIB) as daemon:
        process = begin(daemon, forms, how)
        daemon.wait_for(lambda s: s["totals"]["forks"] > 0)
        kills = 0
        while process.poll() is None and kills < 4:
            os.kill(daemon.wait_for(lambda s: True)["daemon_pid"], signal.SIGKILL)
            kills += 1
            time.sleep(1)
        assert kills >= 2, "it ended before it was disturbed"
        finish(process)
        status = daemon.wait_until_empty()
        assert not (status["families"] or status["store_used_bytes"]), status
        assert status["totals"]["poisoned_pages"] == 0, status


def test_children_that_nobody_tells_of_give_their_room_back_while_the_family_lives(folder, forms):
    with product.Daemon(folder, SIZE_MIB // 2 * MIB, 1024 * MIB) as daemon:
        process = begin(daemon, forms, "many-raw", HOLD="1")
        assert process.stdout.readline() == "ended\n", process.communicate("\n", timeout=20)
        own = (SIZE_MIB + 16) * MIB

        def is_alone(status):
            totals = status["totals"]
            return status["store_used_bytes"] + totals["dram_now_bytes"] <= own

        status = daemon.wait_for(is_alone)
        assert is_alone(status) and status["totals"]["forks"] == 6, status
        assert status["families"] == 1, status
        finish(process, "\n")
        assert not daemon.wait_until_empty()["store_used_bytes"]
        assert not pathlib.Path(f"/proc/{process.pid}").exists()
