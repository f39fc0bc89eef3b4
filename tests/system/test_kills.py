"""Kills at moments that nobody chose, and of all that there is at once."""

import os
import pathlib
import random
import signal
import socket
import subprocess
import time
import tomllib

import pytest

import product

MIB = 1 << 20
DRAM, STORE = 96 * MIB, 1024 * MIB
SEED = int(os.environ.get("TIERMGR_TEST_SEED", "1"))
ROUNDS = int(os.environ.get("TIERMGR_TEST_ROUNDS", "3"))


class Clients:
    """Programs with twice the memory that there is, and what has become of them."""

    def __init__(self, daemon, workload):
        self.environment, self.workload, self.all = daemon.preloaded(), workload, []

    def start(self, *arguments):
        process = subprocess.Popen([self.workload, *map(str, arguments)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=self.environment, start_new_session=True)
        self.all.append(process)
        return process

    def hold(self, mib):
        process = self.start("hold", mib)
        assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
        return process

    def kill(self, process):
        """With all that it forked. Gives what it had to say, which is nothing unless bytes were
        wrong."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        _, err = process.communicate(timeout=20)
        return err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            self.kill(process)


def processes_of(group):
    """Processes of a process group, and the ticks that they have run for."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[2]) == group and words[0] != "Z":
            found[int(path.parent.name)] = int(words[11]) + int(words[12])
    return found


def wait_until_still(process, seconds=60):
    """Waits until none of its processes has run for a second, and gives them."""
    deadline = time.monotonic() + seconds
    before = processes_of(process.pid)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(1)
        now = processes_of(process.pid)
        if now == before:
            return now
        before = now
    raise AssertionError(f"{process.args} has not come to rest: status {process.poll()}")


def wait_for_end(pids, seconds=20):
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def helpers_of(daemon):
    rows = daemon.control("clients")
    rows = rows if isinstance(rows, list) else rows["clients"]
    return {row["pid"]: row["helper_pid"] for row in rows}


def assert_empty(status):
    assert status["families"] == 0, status
    assert status["dram_granted_bytes"] == 0, status
    assert status["store_used_bytes"] == 0, status


def kill_both(daemon, keeper_first=True, status=None):
    """At once: a serving process that the keeper made in between would be another one."""
    status = status or daemon.status()
    pids = [status["keeper_pid"], status["daemon_pid"]]
    for pid in pids if keeper_first else reversed(pids):
        os.kill(pid, signal.SIGKILL)
    daemon.process.wait(20)
    wait_for_end(pids)


@pytest.mark.parametrize("keeper_first", [True, False])
def test_without_keeper_and_daemon_programs_wait_and_never_read_wrong_bytes(
        folder, workload, keeper_first):
    daemon = product.Daemon(folder, DRAM, STORE)
    try:
        with Clients(daemon, workload) as clients:
            clients.start("fill", 128, 100_000)
            # Its children have their memory from the kernel, and their userfaultfds from the daemon.
            clients.start("forks", 96, 100_000)
            clients.start("pair", 96, 100_000)
            held = clients.hold(128)
            daemon.wait_for(lambda s: s["totals"]["recalled_pages"] > 20_000
                            and s["totals"]["forks"] > 2)
            helpers = list(helpers_of(daemon).values())
            kill_both(daemon, keeper_first)
            held.stdin.write("go\n")
            held.stdin.flush()
            for process in clients.all:
                wait_until_still(process)
            for process in clients.all:
                assert clients.kill(process) == ""
        # What is left of them keeps no new daemon from serving.
        with product.Daemon(folder, DRAM, STORE, state=daemon.state) as after:
            assert_empty(after.wait_until_empty())
            with Clients(after, workload) as clients:
                process = clients.start("fill", 128, 1)
                _, err = process.communicate(timeout=100)
                assert process.returncode == 0, err
            assert_empty(after.wait_until_empty())
        # A helper that no daemon tells to go keeps the memory of its program for half a minute.
        wait_for_end(helpers, 60)
    finally:
        daemon.close()


def test_a_new_daemon_with_the_state_of_a_dead_one(folder, workload):
    """Programs of before go on, or wait; new ones are served; once all have ended nothing is
    booked."""
    daemon = product.Daemon(folder, DRAM, STORE)
    try:
        with Clients(daemon, workload) as clients:
            held = [clients.hold(48) for _ in range(4)]
            clients.start("pair", 64, 100_000)
            daemon.wait_for(lambda s: s["totals"]["recalled_pages"] > 10_000)
            kill_both(daemon)
            with product.Daemon(folder, DRAM, STORE, state=daemon.state) as after:
                with Clients(after, workload) as others:
                    process = others.start("fill", 128, 1)
                    _, err = process.communicate(timeout=100)
                    assert process.returncode == 0, err
                for process in held:
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    time.sleep(0.5)
                    assert process.poll() in (None, 0), process.communicate()
                for process in clients.all:
                    assert clients.kill(process) == ""
                assert_empty(after.wait_until_empty())
    finally:
        daemon.close()


def test_a_new_daemon_takes_up_forked_children_too(folder, workload):
    """The helper of a child has no duplicate of the child's userfaultfd: the child itself has."""
    daemon = product.Daemon(folder, DRAM, STORE)
    try:
        with Clients(daemon, workload) as clients:
            pair = clients.start("pair", 96, 40)
            daemon.wait_for(lambda s: s["totals"]["forks"] == 1
                            and s["totals"]["recalled_pages"] > 20_000)
            kill_both(daemon)
            assert pair.poll() is None, "it ended before the kill: more rounds are needed"
            with product.Daemon(folder, DRAM, STORE, state=daemon.state) as after:
                _, err = pair.communicate(timeout=100)
                assert pair.returncode == 0, err
                assert_empty(after.wait_until_empty())
    finally:
        daemon.close()


@pytest.mark.parametrize("together", [True, False])
def test_without_a_helper_a_new_daemon_fetches_what_the_program_holds(folder, workload, together):
    """Helper, keeper and daemon are killed, at once or the helper first: the program has its
    userfaultfds, and goes on once a new daemon serves."""
    daemon = product.Daemon(folder, DRAM, STORE)
    try:
        with Clients(daemon, workload) as clients:
            held = [clients.hold(96) for _ in range(2)]
            daemon.wait_for(lambda s: s["totals"]["parked_pages"] > 10_000)
            helpers = list(helpers_of(daemon).values())
            status = daemon.status()
            if together:
                # Stopped, so that it sees nothing of it.
                os.kill(status["daemon_pid"], signal.SIGSTOP)
            for helper in helpers:
                os.kill(helper, signal.SIGKILL)
            if not together:
                time.sleep(1)
            kill_both(daemon, status=status)
            with product.Daemon(folder, DRAM, STORE, state=daemon.state) as after:
                for process in held:
                    out, err = process.communicate("go\n", timeout=60)
                    assert process.returncode == 0 and out.endswith("right\n"), (out, err)
                assert_empty(after.wait_until_empty())
    finally:
        daemon.close()


def test_a_client_its_helper_and_the_daemon_are_killed_together(folder, workload):
    """The new daemon finds records of a process of which nothing is left."""
    with product.Daemon(folder, DRAM, STORE) as daemon, Clients(daemon, workload) as clients:
        victim, held = clients.start("fill", 128, 100_000), clients.hold(64)
        daemon.wait_for(lambda s: s["totals"]["recalled_pages"] > 10_000)
        helper, before = helpers_of(daemon)[victim.pid], daemon.status()
        # Stopped, so that it has not seen the two end when its own end comes.
        os.kill(before["daemon_pid"], signal.SIGSTOP)
        os.kill(helper, signal.SIGKILL)
        assert clients.kill(victim) == ""
        wait_for_end([helper])
        os.kill(before["daemon_pid"], signal.SIGKILL)
        out, err = held.communicate("go\n", timeout=60)
        assert held.returncode == 0 and out.endswith("right\n"), (held.returncode, out, err)
        status = daemon.wait_until_empty()
        assert_empty(status)
        assert status["restarts"] == before["restarts"] + 1, status


def test_programs_that_attach_while_the_daemon_is_killed_can_fork(folder, workload):
    """Also those whose attach it was killed over. What it refuses meanwhile comes from libc."""
    with product.Daemon(folder, DRAM, STORE) as daemon, Clients(daemon, workload) as clients:
        del clients.environment["TIERMGR_REQUIRE"]
        running, ended, kills = [], 0, 0
        began = next_kill = time.monotonic()
        while time.monotonic() < began + 12:
            running += [clients.start("forks", 1, 2) for _ in range(6 - len(running))]
            if time.monotonic() > next_kill:
                os.kill(serving_process(daemon), signal.SIGKILL)
                kills, next_kill = kills + 1, time.monotonic() + 1
            still = [process for process in running if process.poll() is None]
            ended += len(running) - len(still)
            running = still
            time.sleep(0.005)
        for process in clients.all:
            _, err = process.communicate(timeout=30)
            assert process.returncode == 0, (process.args, err, daemon.log_text())
        assert kills > 5 and ended > 5, (kills, ended)


def serving_process(daemon):
    """Without asking it: it may not serve yet."""
    deadline = time.monotonic() + 10
    children = pathlib.Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")
    while not (pids := children.read_text().split()):
        assert time.monotonic() < deadline, daemon.log_text()
        time.sleep(0.001)
    return int(pids[0])


@pytest.mark.parametrize("number", range(ROUNDS))
def test_each_of_them_is_killed_once_under_load(folder, workload, number):
    """The keeper last: without it nobody would start the daemon anew."""
    seed = SEED * 1000 + number
    print(f"seed {seed}")
    chance = random.Random(seed)
    with product.Daemon(folder, DRAM, STORE) as daemon, Clients(daemon, workload) as clients:
        filler, forker = clients.start("fill", 128, 6), clients.start("forks", 64, 8)
        victim, held = clients.start("forks", 48, 100), clients.hold(64)
        deaths = ["client", "helper", "helper", "daemon", "daemon", "child"]
        chance.shuffle(deaths)
        for death in [*deaths, "keeper"]:
            time.sleep(chance.uniform(0, 0.5))
            status = daemon.wait_for(lambda s: s["families"] > 0)
            if death == "client":
                assert clients.kill(victim) == ""
            elif death == "child":
                # Right after its fork, as like as not.
                deadline = time.monotonic() + 10
                while len(pids := processes_of(forker.pid)) < 2 and time.monotonic() < deadline:
                    pass
                for pid in set(pids) - {forker.pid} - set(helpers_of(daemon).values()):
                    signal_if_there(pid)
            elif death == "helper":
                helpers = helpers_of(daemon)
                signal_if_there(helpers[chance.choice(sorted(helpers))])
            else:
                signal_if_there(status[f"{death}_pid"])
        held.stdin.write("go\n")
        held.stdin.flush()
        for process in (filler, forker, held):
            _, err = process.communicate(timeout=150)
            assert process.returncode == 0, (process.args, process.returncode, err)
        status = daemon.wait_until_empty()
        assert_empty(status)
        assert status["totals"]["poisoned_pages"] == 0, status
        # Nobody else ends it now.
        os.kill(status["daemon_pid"], signal.SIGTERM)
        wait_for_end([status["daemon_pid"]])


def signal_if_there(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_a_client_allocates_and_forks_after_the_daemon_was_killed(folder, workload):
    with product.Daemon(folder, DRAM, 2 * STORE) as daemon, Clients(daemon, workload) as clients:
        process = clients.start("renew", 128)
        assert process.stdout.readline() == "filled\n", process.communicate(timeout=20)
        before = daemon.status()
        os.kill(before["daemon_pid"], signal.SIGKILL)
        # What was asked of one that is dying is refused, for it may have done it.
        daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"])
        out, err = process.communicate("go\n", timeout=100)
        assert process.returncode == 0 and out.endswith("right\n"), (process.returncode, out, err)
        status = daemon.wait_until_empty()
        assert status["restarts"] == 1 and status["totals"]["forks"] == 1, status
        assert_empty(status)


def proc_state(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def signal_all(pids, number):
    for pid in pids:
        os.kill(pid, number)
    deadline = time.monotonic() + 10
    while any((proc_state(pid) == "T") != (number == signal.SIGSTOP) for pid in pids):
        assert time.monotonic() < deadline, [proc_state(pid) for pid in pids]
        time.sleep(0.005)


@pytest.mark.parametrize("number", range(ROUNDS + 2))
def test_programs_that_are_stopped_while_the_daemon_restarts_keep_their_helpers(
        folder, workload, number):
    """At a moment when the helper may have been told to move something; the first one was not."""
    chance = random.Random(SEED * 1000 + number)
    with product.Daemon(folder, DRAM, STORE) as daemon, Clients(daemon, workload) as clients:
        if number == 0:
            program = clients.hold(128)
        else:
            program = clients.start("fill", 160, 6)
            daemon.wait_for(lambda s: s["totals"]["parked_pages"] > 5000)
            time.sleep(chance.uniform(0, 0.3))
        other = clients.hold(32)
        helpers = helpers_of(daemon)
        stopped = [program.pid, helpers[program.pid]]
        before = daemon.status()
        signal_all(stopped, signal.SIGSTOP)
        os.kill(before["daemon_pid"], signal.SIGKILL)
        # Nobody waits for those that are stopped.
        daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"], 5)
        out, err = other.communicate("go\n", timeout=20)
        assert other.returncode == 0 and out.endswith("right\n"), (out, err)
        time.sleep(2)
        signal_all(stopped, signal.SIGCONT)
        if number == 0:
            program.stdin.write("go\n")
            program.stdin.flush()
        moved = daemon.wait_for(lambda s: s["totals"]["parked_pages"] > 2000)
        assert moved["totals"]["parked_pages"] > 2000, (moved, daemon.log_text())
        _, err = program.communicate(timeout=100)
        assert program.returncode == 0, (err, daemon.log_text())
        assert "ending it" not in daemon.log_text(), daemon.log_text()


def restart_in_a_move(daemon, program):
    """Stops a program in the middle of a move and kills the daemon. Gives the status of the next one, and
    what is stopped."""
    helper, before = helpers_of(daemon)[program.pid], daemon.status()
    stopped = [program.pid, helper]
    signal_all(stopped, signal.SIGSTOP)
    os.kill(before["daemon_pid"], signal.SIGSTOP)
    as_if_taken(helper)
    os.kill(before["daemon_pid"], signal.SIGKILL)
    return daemon.wait_for(lambda s: s["daemon_pid"] != before["daemon_pid"], 5), stopped


def secrets_of(daemon):
    """What forked children say, of each family."""
    files = sorted(pathlib.Path(daemon.state).glob("family-*.toml"))
    return [int(tomllib.loads(file.read_text())["secret"], 16) for file in files]


def greeted_as_a_child(daemon, secret):
    """What the daemon says to a process that takes itself for one of a family (tiermgr/docs/wire.md)."""
    hello = bytearray(b"\x00\x01\x01")
    while secret > 0x7f:
        hello.append(secret & 0x7f | 0x80)
        secret >>= 7
    hello += bytes([secret, 0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(20)
        peer.connect(str(daemon.socket))
        peer.send(hello)
        return peer.recv(65536)


def test_a_family_that_is_stopped_in_the_middle_of_a_move_is_taken_up_when_it_goes_on(
        folder, workload):
    """Which pages it moves shows only then, and nobody else waits for that."""
    with product.Daemon(folder, DRAM, STORE) as daemon, Clients(daemon, workload) as clients:
        program, other = clients.hold(128), clients.hold(32)
        status, stopped = restart_in_a_move(daemon, program)
        assert status["families"] == 1, status
        assert any("in the middle of a move" in line for line in status["warnings"]), status
        answers = [greeted_as_a_child(daemon, secret) for secret in secrets_of(daemon)]
        assert any(b"has not taken this program up again yet" in answer for answer in answers), answers
        out, err = other.communicate("go\n", timeout=20)
        assert other.returncode == 0 and out.endswith("right\n"), (out, err)
        time.sleep(2)
        signal_all(stopped, signal.SIGCONT)
        out, err = program.communicate("go\n", timeout=100)
        assert program.returncode == 0 and out.endswith("right\n"), (out, err)
        after = daemon.wait_until_empty()
        assert_empty(after)
        assert after["totals"]["parked_pages"] > 2000 and not after["warnings"], after


def test_a_daemon_does_not_end_while_it_tries_to_take_up_a_family(folder, workload):
    """It tries once a second, and is told to end all the time."""
    with product.Daemon(folder, DRAM, STORE) as daemon, Clients(daemon, workload) as clients:
        program = clients.hold(128)
        waiting, stopped = restart_in_a_move(daemon, program)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            os.kill(waiting["daemon_pid"], signal.SIGTERM)
            time.sleep(0.002)
        assert daemon.status()["daemon_pid"] == waiting["daemon_pid"], daemon.log_text()
        assert "cannot be taken up, and its programs wait" in daemon.log_text()
        signal_all(stopped, signal.SIGCONT)
        out, err = program.communicate("go\n", timeout=100)
        assert program.returncode == 0 and out.endswith("right\n"), (out, err)


def test_a_family_that_goes_on_is_taken_up_before_the_daemon_says_that_it_cannot_be(
        folder, workload):
    """Whoever asks for the end is told how it is now, not how it was at the last try."""
    with product.Daemon(folder, DRAM, STORE) as daemon, Clients(daemon, workload) as clients:
        program = clients.hold(128)
        waiting, stopped = restart_in_a_move(daemon, program)
        daemon.wait_for(lambda _: "cannot be taken up yet" in daemon.log_text())
        signal_all(stopped, signal.SIGCONT)
        os.kill(waiting["daemon_pid"], signal.SIGTERM)
        # It is more than there is room for.
        daemon.wait_for(lambda _: "not ended" in daemon.log_text())
        refusal = next(line for line in daemon.log_text().splitlines() if "not ended" in line)
        assert "does not fit into memory" in refusal, refusal
        assert "of an earlier daemon" not in refusal, refusal
        out, err = program.communicate("go\n", timeout=100)
        assert program.returncode == 0 and out.endswith("right\n"), (out, err)


def as_if_taken(helper):
    """Writes into the ring of a helper what stands there while it carries out a command
    (tiermgr/sys/src/ring.rs has the layout)."""
    with open(f"/proc/{helper}/fd/6", "r+b", buffering=0) as ring:
        entry = 4096
        word = os.pread(ring.fileno(), 8, entry)
        assert word[0] == 3, word
        os.pwrite(ring.fileno(), bytes([2]) + word[1:], entry)
