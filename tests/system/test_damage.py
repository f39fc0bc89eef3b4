"""Bytes that the store gives back changed are never shown: exactly those pages are lost."""

import os
import pathlib
import subprocess

import product

MIB = 1 << 20
PAGE = 4096
EXTENT = 65536
MARK = (0x6567617061736968).to_bytes(8, "little")


def parked_pages(store):
    """Where in the store each page lies that says which it is, by its number."""
    found = {}
    with open(store, "rb") as file:
        offset = 0
        while block := file.read(4 * MIB):
            for at in range(0, len(block), PAGE):
                if block[at:at + 8] == MARK:
                    found[int.from_bytes(block[at + 8:at + 16], "little")] = offset + at
            offset += len(block)
    return found


def test_a_damaged_page_is_lost_and_no_other(folder):
    program = product.compile_c(pathlib.Path(__file__).with_name("damage.c"),
                                product.BUILD / "system" / "damage")
    with product.Daemon(folder, 64 * MIB, 1024 * MIB) as daemon:
        client = subprocess.Popen([program, "128"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  text=True, env=daemon.preloaded())
        try:
            assert client.stdout.readline() == "filled\n"
            # One page of every place in its extent, so that no place stands for another.
            chosen = {}
            for page, offset in sorted(parked_pages(folder / "store").items()):
                chosen.setdefault(offset % EXTENT // PAGE, (page, offset))
            assert len(chosen) == EXTENT // PAGE, chosen
            descriptor = os.open(folder / "store", os.O_WRONLY)
            for _, offset in chosen.values():
                os.pwrite(descriptor, b"\xff", offset + PAGE - 1)
            os.fsync(descriptor)
            os.close(descriptor)
            out, _ = client.communicate("go\n", timeout=100)
        finally:
            client.kill()
            client.communicate()
        assert client.returncode == 0 and out.endswith("right\n"), out
        lost = {int(line.split()[1]) for line in out.splitlines() if line.startswith("lost")}
        # What was in DRAM as well may have been kept there.
        assert lost and lost <= {page for page, _ in chosen.values()}, (lost, chosen)
        assert daemon.status()["totals"]["poisoned_pages"] == len(lost)
