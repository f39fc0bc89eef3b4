"""Direct transfers to and from managed memory that outlive every rest of the daemon's."""

import subprocess

import pytest

import product
from box import Unavailable
from disks import SlowDisk, loop_device

MIB = 1 << 20
# Of one MiB this is four seconds: the daemon's rests are a twentieth of that, and the pressure comes
# round several times.
BYTES_PER_SECOND = 256 << 10
WITHOUT_MOVE = ("--assume-missing", "uffd_move")


@pytest.fixture(scope="module")
def transfer():
    flags = [f"-I{product.DIST / 'include'}", f"-L{product.DIST / 'lib'}", "-ltiermgr",
             f"-Wl,-rpath,{product.DIST / 'lib'}"]
    source = product.ROOT / "tests" / "system" / "transfer.c"
    return product.compile_c(source, product.BUILD / "system" / "transfer", *flags)


@pytest.fixture
def disk(folder):
    try:
        with loop_device(folder / "disk", 4 * MIB) as device:
            yield device
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def slow(disk):
    try:
        with SlowDisk(disk, BYTES_PER_SECOND) as made:
            yield made
    except Unavailable as error:
        pytest.skip(str(error))


# Where pages rest in their place nothing shows that a device still writes to them: only a lease does.
@pytest.mark.parametrize("way, flags, pin", [
    ("read", (), ()), ("write", (), ()),
    ("read", (), ("pin",)),
    ("read", WITHOUT_MOVE, ("pin",)), ("write", WITHOUT_MOVE, ()),
])
def test_a_slow_transfer_loses_no_byte(folder, disk, slow, transfer, way, flags, pin):
    with product.Daemon(folder, 64 * MIB, 512 * MIB, extra=flags) as daemon:
        subprocess.run([transfer, "prepare", disk], check=True, timeout=30)
        process = slow.popen([transfer, way, disk, 96, *pin], env=daemon.environment(), text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             stdin=subprocess.DEVNULL)
        try:
            out, err = process.communicate(timeout=150)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, out + err
        assert float(out.split()[-2]) > 2, f"too quick to show anything: {out}"
        if way == "write":
            subprocess.run([transfer, "check", disk], check=True, timeout=30)
        if way == "read" and not (flags or pin):
            totals = daemon.status()["totals"]
            assert totals["moves_refused"] > 0, f"nobody tried to park it meanwhile: {totals}"
        status = daemon.wait_until_empty()
        assert not (status["families"] or status["store_used_bytes"]), status
