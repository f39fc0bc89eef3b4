"""Programs whose daemon is stopped and goes on, is killed and comes back, or is not there at all."""

import os
import signal
import threading
import time

import cpython
import product
import redis_load
import sqlite
from box import MIB, Box
from meter import Meter
from ways import METER_MS, Case, Failed, Seen, Way, short, store_mib

# Seconds in which it works.
PAUSE = 1.5
# How often it must have been stopped, and killed, while the program ran: that runs again until then.
OUTAGES_MIN = 2


class Trouble(threading.Thread):
    """Kills the daemon, then stops it for a second and lets it go on, in turn, until it is told to end."""

    def __init__(self, daemon):
        super().__init__()
        self.daemon_of_test, self.over = daemon, threading.Event()
        self.stopped, self.killed, self.error = 0, 0, None

    def run(self):
        last = 0
        try:
            while not self.over.wait(PAUSE):
                pid = self.daemon_of_test.wait_for(lambda s, last=last: s["daemon_pid"] != last)["daemon_pid"]
                if self.killed <= self.stopped:
                    os.kill(pid, signal.SIGKILL)
                    last = pid
                    self.killed += 1
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self.over.wait(1)
                    os.kill(pid, signal.SIGCONT)
                    self.stopped += 1
        except Exception as error:  # whatever it was: the test fails for it
            self.error = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


class Served(Way):
    """Programs of a daemon that is there already."""

    def __init__(self, box, folder, dram_mib, flags, daemon):
        super().__init__(box, folder, dram_mib, flags)
        self.daemon = daemon

    def command(self, command):
        head = [str(product.CTL), "--socket", str(self.daemon.socket), "run", *self.flags, "--require"]
        return [*head, "--report", str(self.report), "--", *map(str, command)]


class Absent(Way):
    """Programs that find no daemon."""

    def __init__(self, box, folder, flags, require):
        super().__init__(box, folder)
        self.settings = [f"LD_PRELOAD={product.PRELOAD}", f"TIERMGR_SOCKET={folder / 'nobody'}",
                         f"TIERMGR_SMALL={int('--small' in flags)}", f"TIERMGR_MMAP={int('--mmap' in flags)}",
                         f"TIERMGR_REQUIRE={int(require)}"]

    def command(self, command):
        return ["env", *self.settings, *map(str, command)]


def measure_in_trouble(case, folder, dram_mib, flags):
    """One run of a case, with a daemon that is stopped and killed meanwhile."""
    with Box("programs") as box:
        began = time.monotonic()
        with Meter(box, METER_MS) as meter, \
                product.Daemon(folder, dram_mib * MIB, store_mib(dram_mib) * MIB, popen=box.popen) as daemon:
            way = Served(box, folder, dram_mib, flags, daemon)
            results = []
            with Trouble(daemon) as trouble:
                while not results or (min(trouble.stopped, trouble.killed) < OUTAGES_MIN and trouble.is_alive()):
                    results.append(case.run(way))
            if trouble.error:
                raise Failed(f"stopped {trouble.stopped} times, killed {trouble.killed} times: {trouble.error}")
            if any(result != results[0] for result in results):
                raise Failed(f"it has not given the same each time: {short(results)}")
            status = daemon.wait_until_empty()
            way.note({"poisoned_pages": status["totals"]["poisoned_pages"], "store_errors": 0})
            way.counters["outages"] = trouble.stopped + trouble.killed
        return Seen(results[0], dram_mib, meter.peaks["held_bytes"] // MIB, time.monotonic() - began, way.counters)


def measure_absent(case, folder, flags):
    """A run without a daemon must be as one without tiermgr; where a daemon is required, it must fail."""
    with Box("programs") as box:
        began = time.monotonic()
        with Meter(box, METER_MS) as meter:
            way = Absent(box, folder, flags, require=False)
            result = case.run(way)
        seen = Seen(result, None, meter.peaks["held_bytes"] // MIB, time.monotonic() - began, way.counters)
    with Box("programs") as box:
        try:
            case.run(Absent(box, folder, flags, require=True))
        except (Failed, AssertionError):
            return seen
    raise Failed("it ran to its end although a daemon is required")


def cases():
    return [
        Case("redis-outages", "40,000 values: filled, read, changed, all looked at",
             lambda way: redis_load.shadow(way, 40_000), in_trouble=True, outside_mib=64),
        Case("cpython-outages", "700,000 lists in a dictionary", cpython.dictionaries, in_trouble=True, outside_mib=64),
        Case("sqlite-outages", "80,000 rows, random changes, savepoints, integrity_check",
             lambda way: sqlite.rows(way, 80_000, 2), in_trouble=True, outside_mib=64),
    ]
