"""What a store can be, and what cannot be one: devices, file systems, and what becomes of them."""

import contextlib
import json
import os
import pathlib
import subprocess

import pytest

import product
from box import Unavailable
from disks import loop_device, mounted
from test_bad_input import refused

MIB = 1 << 20


@pytest.fixture
def device(folder):
    """Makes loop devices."""
    with contextlib.ExitStack() as stack:
        def make(mib, **options):
            try:
                file = folder / f"device-{mib}"
                return stack.enter_context(loop_device(file, mib * MIB, **options))
            except Unavailable as error:
                pytest.skip(str(error))

        yield make


@pytest.fixture
def file_system(device, folder):
    """A small ext4 of its own."""
    try:
        with mounted(device(192), folder / "mounted") as path:
            yield path
    except Unavailable as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def configured_daemon(folder, store, size):
    """A daemon whose store is named in its configuration. Gives it as a `product.Daemon`."""
    config = folder / "tiermgrd.toml"
    config.write_text(f'[store]\npath = "{store}"\nsize = "{size}"\n')

    class Configured(product.Daemon):
        def command(self, tell, dram_bytes, _):
            return [str(product.DAEMON), "--config", str(config), "--socket", str(self.socket),
                    "--state-dir", str(self.state), "--dram", str(dram_bytes), "--ready-fd",
                    str(tell)]

    with Configured(folder, 64 * MIB, 0) as daemon:
        yield daemon


def use(daemon, workload, mib=160):
    done = subprocess.run([workload, "fill", str(mib), "2"], env=daemon.preloaded(), timeout=100,
                          capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr + daemon.log_text()
    return daemon.wait_until_empty()["totals"]


def say_no(*arguments):
    """`tiermgrctl run` must refuse with the cause. Gives what it said."""
    command = product.run_command(64 * MIB, *arguments, ["true"])
    done = subprocess.run(command, env=product.clean_environment(), capture_output=True, text=True,
                          timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode not in (0, 101), done.stderr
    assert "panicked" not in done.stderr, done.stderr
    return done.stderr


def test_a_device_is_a_store_for_a_run(run_bounded, workload, device, folder):
    # run_bounded names a store by path and size.
    (folder / "store").symlink_to(device(512))
    _, counters = run_bounded([workload, "fill", 192, 2], 64, store_mib=512)
    assert counters["parked_pages"] >= 10_000 and counters["poisoned_pages"] == 0, counters


def test_a_device_is_a_store_for_a_run_with_all_that_it_has(workload, device, folder):
    report = folder / "report.json"
    command = product.run_command(64 * MIB, device(512), report, [workload, "fill", 192, 2])
    done = subprocess.run(command, env=product.clean_environment(), capture_output=True, text=True,
                          timeout=100, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert product.counters(report)["parked_pages"] >= 10_000


@pytest.mark.parametrize("size", ["all", "256MiB"])
def test_a_device_is_a_store_by_configuration(folder, workload, device, size):
    store = device(512)
    with configured_daemon(folder, store, size) as daemon:
        capacity = daemon.status()["store_capacity_bytes"]
        wanted = 512 * MIB if size == "all" else 256 * MIB
        assert wanted - 16 * MIB <= capacity <= wanted
        totals = use(daemon, workload)
        assert totals["parked_pages"] >= 10_000 and totals["store_errors"] == 0, totals
    # A second daemon takes what the first one left.
    with configured_daemon(folder, store, size) as daemon:
        assert use(daemon, workload)["parked_pages"] >= 10_000


def test_a_device_that_is_too_small(folder, device):
    small = device(1)
    for said in (say_no(small, None), refused(folder, "--dram", "64M", "--store", small)):
        assert str(small) in said and "are needed" in said, said
    larger = device(64)
    for said in (say_no(f"{larger}:65M", None),
                 refused(folder, "--dram", "64M", "--store", f"{larger}:65M")):
        assert str(larger) in said and "are needed" in said, said


def test_a_device_that_is_read_only(folder, device):
    store = device(64, read_only=True)
    for said in (say_no(store, None), refused(folder, "--dram", "64M", "--store", store)):
        assert str(store) in said and "read-only" in said, said


def test_a_device_that_is_mounted(folder, file_system):
    kept = file_system / "kept"
    kept.write_text("kept")
    store = subprocess.run(["findmnt", "--noheadings", "--output", "SOURCE", file_system],
                           capture_output=True, text=True, check=True).stdout.strip()
    for said in (say_no(store, None), refused(folder, "--dram", "64M", "--store", store)):
        assert store in said and "mounted" in said and "choose another" in said, said
    assert kept.read_text() == "kept"


def test_a_device_that_has_a_file_system(folder, device):
    store = device(64)
    subprocess.run(["mkfs.ext4", "-q", store], check=True, timeout=30)
    before = store.read_bytes()
    # The first block of an ext4 is for boot code and blank; its superblock lies behind it.
    for said in (say_no(store, None), refused(folder, "--dram", "64M", "--store", store)):
        assert str(store) in said and "wipefs" in said, said
    assert store.read_bytes() == before, "a device that was refused has changed"


def mark(path, offset, text=b"somebody's"):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(text)


# Where btrfs, mdadm (1.2, 0.90, 1.0), ZFS and GPT have their marks, and data that no list of marks knows.
DEVICE_MARKS = [512, 4096, 65536 + 64, 128 << 10, (64 << 20) - 65536, (64 << 20) - 8192,
                (64 << 20) - 512, (1 << 20) - 1]


@pytest.mark.parametrize("offset", DEVICE_MARKS)
def test_a_device_with_a_mark_anywhere_is_not_touched(folder, device, offset):
    store = device(64)
    mark(store, offset)
    before = store.read_bytes()
    for said in (say_no(store, None), refused(folder, "--dram", "64M", "--store", store),
                 doctor_refuses(store)):
        assert str(store) in said and "blkdiscard" in said, said
    assert store.read_bytes() == before, "a device that was refused has changed"


def test_a_device_is_taken_after_what_the_refusal_advises(folder, workload, device):
    store = device(512)
    subprocess.run(["mkfs.ext4", "-q", store], check=True, timeout=30)
    said = say_no(store, None)
    advice = said.split("`")[1]
    assert advice.startswith("wipefs -a") and str(store) in advice, said
    subprocess.run(["bash", "-c", advice], check=True, timeout=60, stdout=subprocess.DEVNULL)
    with configured_daemon(folder, store, "all") as daemon:
        assert use(daemon, workload)["parked_pages"] >= 10_000


@pytest.mark.parametrize("offset", [0, 4096, 65536 + 64, 10 << 20, (20 << 20) - 10])
def test_a_file_with_data_is_refused_and_stays_as_it_was(folder, offset):
    store = folder / "store"
    with open(store, "wb") as file:
        file.truncate(20 * MIB)
    mark(store, offset)
    before = store.read_bytes()
    for size in (":64M", ":16M", ""):
        for said in (say_no(f"{store}{size}", None),
                     refused(folder, "--dram", "64M", "--store", f"{store}{size}"),
                     doctor_refuses(f"{store}{size}")):
            assert str(store) in said and "rm " in said, said
        assert store.stat().st_size == 20 * MIB, "a file that was refused has another size"
    assert store.read_bytes() == before, "a file that was refused has changed"


def test_a_file_of_zeros_and_an_empty_one_are_stores(folder):
    for content in (b"", bytes(3 * MIB)):
        store = folder / "store"
        store.write_bytes(content)
        assert doctor(f"{store}:64M")["state"] == "ok"
        command = product.run_command(64 * MIB, f"{store}:64M", None, ["true"])
        subprocess.run(command, env=product.clean_environment(), timeout=60, check=True,
                       stdin=subprocess.DEVNULL)
        # It was there before, and so it stays; and now it is a store.
        assert store.stat().st_size == 64 * MIB
        assert "store of" in doctor(store)["detail"]


def doctor(store):
    """What `tiermgrctl doctor --nvme` finds about the store."""
    done = subprocess.run([product.CTL, "doctor", "--json", "--nvme", store], capture_output=True,
                          env=product.clean_environment(), timeout=30, check=False, text=True)
    return next(f for f in json.loads(done.stdout)["findings"] if f["name"] == "store")


def doctor_refuses(store):
    finding = doctor(store)
    assert finding["state"] == "fail", finding
    return f"{finding['detail']}; {finding['fix']}"


def test_doctor_and_run_agree(folder):
    for store in (folder, "/dev/null", f"/dev/shm/tiermgr-test-{os.getpid()}:64M",
                  folder / "no" / "store", f"{folder / 'store'}:1M", f"{folder / 'store'}:900T"):
        said = doctor_refuses(store).split(";")[0]
        assert said in say_no(store, None), said
    assert doctor(f"{folder / 'store'}:64M")["state"] == "ok"
    assert not (folder / "store").exists()


@pytest.mark.parametrize("kind", ["file", "device"])
def test_one_run_after_the_other_with_the_same_store(folder, workload, device, kind):
    """What the kernel still does for a daemon that has ended holds the lock of its store."""
    if kind == "file":
        store = folder / "store"
        store.touch()
        store = f"{store}:128M"
    else:
        store = device(128)
    command = product.run_command(64 * MIB, store, None, [workload, "fill", 96, 1])
    for _ in range(20):
        done = subprocess.run(command, env=product.clean_environment(), capture_output=True, text=True,
                              timeout=60, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr


def test_a_device_that_another_daemon_uses(folder, workload, device):
    store = device(256)
    with configured_daemon(folder, store, "all") as daemon, product.scratch() as other:
        for said in (say_no(store, None), refused(other, "--dram", "64M", "--store", store)):
            assert str(store) in said and "in use" in said and "choose another" in said, said
        use(daemon, workload)


def test_a_run_with_a_store_on_tmpfs():
    said = say_no(f"/dev/shm/tiermgr-test-{os.getpid()}:64M", None)
    assert "tmpfs" in said and "choose a path on a disk" in said, said
    assert not pathlib.Path(f"/dev/shm/tiermgr-test-{os.getpid()}").exists()


def test_a_file_system_without_room(folder, file_system):
    """What was set aside in vain is given back, whoever made the file."""
    store = file_system / "store"
    free = os.statvfs(file_system).f_bavail
    for said in (say_no(f"{store}:1G", None),
                 refused(folder, "--dram", "64M", "--store", f"{store}:1G"),
                 refused(folder, "--state-dir", folder / "state", "--socket", folder / "socket",
                         config=f'dram = "64MiB"\n[store]\npath = "{store}"\nsize = "1GiB"\n')):
        assert str(store) in said and "no room" in said, said
        assert os.statvfs(file_system).f_bavail >= free - 16, "a refused store keeps its blocks"


def test_a_file_system_that_fills_up_meanwhile(folder, workload, file_system):
    """A file with holes that somebody else made: its blocks are not set aside."""
    store = file_system / "store"
    with open(store, "wb") as file:
        file.truncate(1024 * MIB)
    with product.Daemon(folder, 64 * MIB, 1024 * MIB, store=store) as daemon:
        # What does not fit on the disk does not fit into memory either: more than both is refused or
        # ends in a wait, but no byte is wrong. So this stays below.
        process = subprocess.Popen([workload, "fill", "128", "2"], env=daemon.preloaded(), text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   stdin=subprocess.DEVNULL)
        filler = file_system / "filler"
        daemon.wait_for(lambda s: s["totals"]["parked_pages"] > 2000 or process.poll() is not None)
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(MIB))
        try:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
        except subprocess.TimeoutExpired:
            # It waits. It goes on as soon as there is room again.
            assert daemon.status()["totals"]["store_errors"] > 0
            filler.unlink()
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
        status = daemon.wait_until_empty()
        assert status["store_used_bytes"] == 0 and status["totals"]["poisoned_pages"] == 0, status
        assert status["totals"]["store_errors"] > 0, "the disk never was full"
        assert "No space left" in daemon.log_text() or "no room" in daemon.log_text(), \
            daemon.log_text()
