"""NumPy arrays in managed memory, with a working set of twice what the daemon may use."""

import gc
import os
import subprocess
import sys
import threading

import pytest
from conftest import DRAM, MIB, ROOT, needed

np = needed("numpy")
import tiermgr


def pattern(seed, count):
    return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)


def test_an_array_is_like_any_other(client):
    array = client.empty((300, 400, 5), "float32")
    assert array.shape == (300, 400, 5) and array.dtype == np.float32
    assert array.flags.c_contiguous and array.flags.writeable
    array[:] = np.arange(array.size, dtype="float32").reshape(array.shape)
    assert array[299, 399, 4] == array.size - 1
    assert client.empty(0).size == 0
    assert client.empty((3, 0, 2), "int8").shape == (3, 0, 2)
    named = client.empty(1000, "int64", kind="weights", name="test")
    assert not named.any(), "a region reads as zeros"


@pytest.mark.parametrize("kind", [None, "kv"])
def test_twice_the_memory(client, kind):
    count = 2 * DRAM // 8 // 8
    arrays = [client.empty(count, "uint64", kind=kind) for _ in range(8)]
    for seed, array in enumerate(arrays):
        array[:] = pattern(seed, count)
    for _ in range(2):
        for seed, array in enumerate(arrays):
            assert np.array_equal(array, pattern(seed, count)), f"array {seed}"
    stats = client.stats()
    assert stats.parked_pages * 4096 > DRAM // 2, stats
    assert stats.poisoned_pages == 0 and stats.store_errors == 0
    assert stats.dram_now_bytes <= DRAM


def test_memory_is_freed_with_the_last_view(client):
    before = client.residency(client.empty(1, "uint8"))
    array = client.empty(32 * MIB, "uint8", kind="heap")
    array[:] = 1
    view = array[100:200]
    del array
    gc.collect()
    assert (view == 1).all()
    del view
    gc.collect()
    # Its address is free again: a region of the same size can be had any number of times.
    for _ in range(50):
        client.empty(32 * MIB, "uint8", kind="heap")[0] = 1
    assert before.poisoned_bytes == 0


def test_an_array_outlives_its_client(daemon):
    client = tiermgr.Client(daemon)
    array = client.empty(8 * MIB, "uint8")
    array[:] = 3
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.stats()
    del client
    gc.collect()
    assert (array == 3).all()


def test_advice_prefetch_and_leases(client):
    array = client.empty((64, MIB), "uint8")
    array[:] = np.arange(64, dtype="uint8")[:, None]
    for advice in ["normal", "willneed", "cold", "sequential", "random", "cyclic", "read_mostly"]:
        client.advise(array, advice)
    client.prefetch(array[3:9])
    with client.pin(array[10:12]) as lease:
        assert client.residency(array[10:12]).parked_bytes == 0
        assert (array[10] == 10).all()
    lease.release()
    # As much as the program may have in DRAM cannot be held: who asks is told how much could be.
    with pytest.raises(tiermgr.TiermgrError, match=r"half of the .* pinned already"):
        client.pin(array)
    where = client.residency(array)
    total = sum(vars(where).values())
    assert total == array.nbytes
    client.advise(array[20:21], "dontneed")
    assert not array[20].any() and (array[19] == 19).all() and (array[21] == 21).all()
    # Less than a page is nobody's to drop.
    client.advise(array[5, 10:20], "dontneed")
    assert (array[5] == 5).all()


def test_errors_are_exceptions_that_say_what_to_do(client, daemon):
    with pytest.raises(tiermgr.NoDaemonError, match="/nonexistent") as caught:
        tiermgr.Client("/nonexistent/socket")
    assert caught.value.status_name == "NO_DAEMON" and isinstance(caught.value, ConnectionError)
    with pytest.raises(ValueError, match="latency"):
        tiermgr.Client(daemon, class_="fast")
    with pytest.raises(ValueError, match="weights"):
        client.empty(10, kind="something")
    with pytest.raises(ValueError, match="sequential"):
        client.advise(client.empty(10), "soon")
    with pytest.raises(ValueError, match="objects"):
        client.empty(10, object)
    with pytest.raises(MemoryError):
        client.empty(1 << 58, "uint8")
    with pytest.raises(tiermgr.NotManagedError):
        client.prefetch(np.empty(1 << 20))
    with pytest.raises(ValueError, match="contiguous"):
        client.prefetch(client.empty((100, 100))[:, 3])


def test_threads_work_beside_each_other(client):
    count = DRAM // 8 // 4
    wrong = []

    def work(seed):
        array = client.empty(count, "uint64")
        array[:] = pattern(seed, count)
        if not np.array_equal(np.sort(array), np.sort(pattern(seed, count))):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert not wrong


def test_fork_gives_the_child_the_same_bytes(client):
    count = DRAM // 8
    array = client.empty(count, "uint64")
    array[:] = pattern(1, count)
    child = os.fork()
    if child == 0:
        good = np.array_equal(array, pattern(1, count))
        array[:] = pattern(2, count)
        good = good and np.array_equal(array, pattern(2, count)) and client.stats().forks >= 1
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert np.array_equal(array, pattern(1, count))


def test_the_module_has_a_client_of_its_own(daemon):
    program = """
import numpy, tiermgr
array = tiermgr.empty((1000, 1000))
array[:] = 1
tiermgr.advise(array, "cyclic")
tiermgr.prefetch(array)
with tiermgr.pin(array[:10]):
    pass
assert tiermgr.residency(array).poisoned_bytes == 0
print(tiermgr.stats().poisoned_pages, int(array.sum()))
"""
    environment = {**os.environ, "TIERMGR_SOCKET": daemon}
    environment["PYTHONPATH"] = str(ROOT / "ffi" / "python")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "0 1000000\n", done.stderr


def test_arrays_from_malloc_under_the_preload_library(daemon, built):
    program = """
import numpy, tiermgr
array = numpy.arange(8 << 20, dtype="uint64")
part = array[: 1 << 20]
with tiermgr.pin(part):
    assert tiermgr.residency(part).parked_bytes == 0
tiermgr.advise(array, "cold")
tiermgr.prefetch(array[:1000])
print(int(array[-1]))
"""
    environment = {**os.environ, "TIERMGR_SOCKET": daemon, "TIERMGR_REQUIRE": "1"}
    environment["PYTHONPATH"] = str(ROOT / "ffi" / "python")
    environment["LD_PRELOAD"] = str(built / "lib" / "libtiermgr_preload.so")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{(8 << 20) - 1}\n", done.stderr


def test_a_library_that_is_not_there_is_an_import_error():
    environment = {**os.environ, "TIERMGR_LIBRARY": "/nonexistent.so"}
    environment["PYTHONPATH"] = str(ROOT / "ffi" / "python")
    done = subprocess.run(
        [sys.executable, "-c", "import tiermgr; tiermgr.Client()"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ImportError" in done.stderr and "TIERMGR_LIBRARY" in done.stderr
