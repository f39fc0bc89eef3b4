"""A client that lives through a kill of the daemon goes on with all that it can do."""

import os
import pathlib
import signal
import time

import pytest
from conftest import DRAM, MIB

np = pytest.importorskip("numpy")
import tiermgr


def pattern(seed, count):
    return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)


@pytest.fixture
def kill_daemon(daemon):
    """Kills the serving process, whose keeper then starts another one."""
    keeper = next(
        int(path.parent.name)
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
        if daemon.encode() in path.read_bytes().split(b"\0")
        and "keeper" in (path.parent / "comm").read_text()
    )

    def serving():
        return pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()

    def kill(waits):
        (before,) = serving()
        os.kill(int(before), signal.SIGKILL)
        deadline = time.monotonic() + 20
        # What is asked at once meets the old one's death, what is asked later finds the new one.
        while waits and serving() in ([], [before]):
            assert time.monotonic() < deadline, "the keeper has started no other daemon"
            time.sleep(0.01)

    return kill


def again(call):
    """A request that makes or holds something is not repeated by itself: the dead daemon may have
    carried it out."""
    try:
        return call()
    except tiermgr.ConnectionLostError:
        return call()


@pytest.mark.parametrize("waits", [False, True])
def test_everything_works_after_the_daemon_was_killed(client, kill_daemon, waits):
    count = DRAM // 8
    array = client.empty(count, "uint64")
    array[:] = pattern(1, count)
    more = client.empty(count // 2, "uint64")
    more[:] = pattern(2, count // 2)
    kill_daemon(waits)

    # Each call may be the first to meet the new daemon.
    after = again(lambda: client.empty(count // 2, "uint64", kind="weights"))
    after[:] = pattern(3, count // 2)
    kill_daemon(waits)
    assert client.stats().poisoned_pages == 0
    kill_daemon(waits)
    with again(lambda: client.pin(array[: MIB // 8])):
        assert client.residency(array[: MIB // 8]).parked_bytes == 0
    kill_daemon(waits)
    client.prefetch(array[MIB // 8 : MIB // 4])
    client.advise(more, "cold")
    kill_daemon(waits)

    child = os.fork()
    if child == 0:
        good = np.array_equal(array, pattern(1, count))
        array[:] = pattern(4, count)
        own = client.empty(MIB, "uint64")
        own[:] = pattern(5, MIB)
        good = good and np.array_equal(array, pattern(4, count))
        good = good and np.array_equal(own, pattern(5, MIB)) and client.stats().forks >= 1
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert np.array_equal(array, pattern(1, count))
    assert np.array_equal(more, pattern(2, count // 2))
    assert np.array_equal(after, pattern(3, count // 2))
    stats = client.stats()
    assert stats.parked_pages > 0 and stats.poisoned_pages == 0 and stats.store_errors == 0, stats


def test_regions_can_be_given_up_after_the_daemon_was_killed(client, kill_daemon):
    arrays = [client.empty(DRAM // 4, "uint8", kind="heap") for _ in range(6)]
    for number, array in enumerate(arrays):
        array[:] = number
    kill_daemon(False)
    del arrays[1::2]
    assert all((array == number * 2).all() for number, array in enumerate(arrays))
    fresh = [client.empty(DRAM // 4, "uint8", kind="heap") for _ in range(3)]
    for array in fresh:
        assert not array.any()
        array[:] = 9
    assert all((array == number * 2).all() for number, array in enumerate(arrays))
    assert all((array == 9).all() for array in fresh)
