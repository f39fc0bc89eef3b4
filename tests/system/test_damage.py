"""Bytes that the store gives back changed are never shown: exactly those pages are lost."""

import contextlib
import os
import pathlib
import signal
import subprocess

import pytest

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


@contextlib.contextmanager
def damaged(folder, *arguments, extra=()):
    """A daemon, a program that has filled its memory and waits to be told to read it, and the pages of
    it that have been changed in the store."""
    program = product.compile_c(pathlib.Path(__file__).with_name("damage.c"),
                                product.BUILD / "system" / "damage")
    with product.Daemon(folder, 64 * MIB, 1024 * MIB, extra=extra) as daemon:
        client = subprocess.Popen([program, "128", *arguments], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True, env=daemon.preloaded())
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
            yield daemon, client, {page for page, _ in chosen.values()}
        finally:
            client.kill()
            client.communicate()


def test_a_damaged_page_is_lost_and_no_other(folder):
    with damaged(folder) as (daemon, client, chosen):
        out, _ = client.communicate("go\n", timeout=100)
        assert client.returncode == 0 and out.endswith("right\n"), out
        lost = {int(line.split()[1]) for line in out.splitlines() if line.startswith("lost")}
        # What was in DRAM as well may have been kept there.
        assert lost and lost <= chosen, (lost, chosen)
        assert daemon.status()["totals"]["poisoned_pages"] == len(lost)


@pytest.mark.parametrize("how, ended_by", [("touch", signal.SIGBUS), ("ignore", signal.SIGKILL)])
def test_where_pages_cannot_be_poisoned_a_program_is_ended(folder, how, ended_by):
    extra = ("--assume-missing", "uffd_poison")
    with damaged(folder, how, extra=extra) as (daemon, client, _):
        out, _ = client.communicate("go\n", timeout=60)
        assert client.returncode == -ended_by, (client.returncode, out)
        assert "wrong" not in out and "right" not in out, out
        log = daemon.log_text()
        # Once, however often the sleeper was woken.
        assert log.count("the store has lost") == 1, log
        assert ("lived on after SIGBUS" in log) == (ended_by == signal.SIGKILL), log
