"""A program, run three ways: natively, under `tiermgrctl run` with room for all of it, and with half of its memory.

What it gives must be the same each time. Its peak is seen from outside, by a meter over a memory cgroup that holds
the program and its daemon; how much was moved comes from the daemon's report.
"""

import collections
import dataclasses
import subprocess
import time
import typing
import xml.etree.ElementTree

import product
from box import MIB, Box
from meter import Meter

PAGE = 4096
# Of a limit the daemon takes this for itself, more or less.
DAEMON_MIB = 24
# The least that it takes.
DRAM_MIN_MIB = 32
# Where nothing has to leave.
PLENTY_MIB = 8192
METER_MS = 25


class Failed(Exception):
    """A program has not done what it does natively."""


@dataclasses.dataclass
class Case:
    """Something that a program does."""

    name: str
    what: str
    # Called with a Way; gives what must be the same each time.
    run: typing.Callable
    # Compares what came natively with what came otherwise, and gives complaints.
    judge: typing.Callable = None
    # Whether what it holds is managed with --small, and so much that its half must make pages move.
    moves: bool = False
    # The same where its own mappings are managed too.
    moves_with_mmap: bool = False
    # MiB beside the limit that nobody manages; None: not known, and the peak is only shown.
    outside_mib: int = None
    # Whether it runs while its daemon is stopped, killed or not there, rather than in peace.
    in_trouble: bool = False

    def complaints(self, native, other):
        if self.judge is not None:
            return self.judge(native, other)
        return [] if native == other else [f"natively {short(native)}, here {short(other)}"]


def short(value, characters=300):
    text = repr(value)
    return text if len(text) <= characters else text[:characters] + "..."


@dataclasses.dataclass
class Seen:
    """What a run gave, and what was seen of it."""

    result: object
    limit_mib: int
    peak_mib: int
    seconds: float
    counters: collections.Counter

    def recalled_pages(self):
        return self.counters["recalled_pages"] + self.counters["prefetched_pages"]

    def moved_mib(self):
        return (self.recalled_pages() + self.counters["parked_pages"]) * PAGE // MIB


def store_mib(dram_mib):
    """Room for what does not fit, also where forked children each get their copy: the disk must have all of it."""
    return 1024 if dram_mib >= PLENTY_MIB else max(1024, 6 * dram_mib)


class Way:
    """Starts programs natively, or with `dram_mib` of DRAM."""

    def __init__(self, box, folder, dram_mib=None, flags=()):
        self.box, self.folder, self.dram_mib, self.flags = box, folder, dram_mib, tuple(flags)
        self.counters = collections.Counter()
        self.report = folder / "report.json"

    @property
    def is_managed(self):
        return self.dram_mib is not None

    def command(self, command):
        """What to execute for `command`."""
        if not self.is_managed:
            return [str(word) for word in command]
        full = product.run_command(self.dram_mib * MIB, f"{self.folder / 'store'}:{store_mib(self.dram_mib)}M", self.report, command)
        full[2:2] = [*self.flags, "--require"]
        return full

    def take_report(self):
        """Adds what the last command moved; to be called when it has ended."""
        if self.is_managed:
            self.note(product.counters(self.report))
            self.report.unlink()

    def note(self, counters):
        self.counters.update(counters)
        if counters["poisoned_pages"] or counters["store_errors"]:
            raise Failed(f"pages were lost: {counters}")

    def run(self, command, seconds, env=None, cwd=None, status=(0,)):
        """Runs a command to its end. Gives its output; what it says on standard error goes to a file."""
        out, err = self.folder / "out", self.folder / "err"
        # Files: a pipe would stay open as long as something that the program left behind.
        with open(out, "w+b") as out_file, open(err, "w+b") as err_file:
            process = self.box.popen(self.command(command), stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file,
                                     env=env or product.clean_environment(), cwd=cwd)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired as error:
                raise Failed(f"{command[0]} runs for {seconds} s\n{tail(out)}\n{tail(err)}") from error
            finally:
                if process.poll() is None:
                    self.box.kill_all()
                    process.wait()
        if code not in status:
            raise Failed(f"{command[0]} ended with {code}\n{tail(out)}\n{tail(err)}")
        self.take_report()
        return out.read_text(errors="replace")


def tail(path, characters=3000):
    return path.read_text(errors="replace")[-characters:]


def measure(case, folder, dram_mib=None, flags=()):
    """One run of a case."""
    with Box("programs") as box:
        began = time.monotonic()
        with Meter(box, METER_MS) as meter:
            way = Way(box, folder, dram_mib, flags)
            result = case.run(way)
        seconds = time.monotonic() - began
        if box.oom_kills():
            raise Failed("the kernel killed something for want of memory")
    return Seen(result, dram_mib, meter.peaks["held_bytes"] // MIB, seconds, way.counters)


def half_of(native):
    """The limit that leaves a program half of what it holds natively."""
    return max(DRAM_MIN_MIB, native.peak_mib // 2 + DAEMON_MIB)


def judge(case, native, seen, mmap=False):
    """What is wrong with a managed run."""
    found = case.complaints(native.result, seen.result)
    is_half = seen.limit_mib is not None and seen.limit_mib < native.peak_mib
    # What a daemon counts ends with it.
    if is_half and not seen.counters["outages"] and (case.moves or (mmap and case.moves_with_mmap)):
        least = min(10_000, (native.peak_mib - seen.limit_mib) * MIB // PAGE)
        if seen.recalled_pages() < least:
            found.append(f"{seen.recalled_pages()} pages came back, fewer than {least}")
    if is_half and case.outside_mib is not None:
        most = seen.limit_mib * 102 // 100 + 16 + case.outside_mib
        if seen.peak_mib > most:
            found.append(f"{seen.peak_mib} MiB are more than {most}")
    return found


def outcomes(path):
    """Each test of a JUnit file, and whether it passed."""
    found = {}
    for test in xml.etree.ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in test}
        kind = next((k for k in ("error", "failure", "skipped") if k in kinds), "passed")
        name = f"{test.get('classname') or ''}.{test.get('name')}"
        # Of several of one name the worst.
        if found.get(name) not in ("error", "failure"):
            found[name] = kind
    if not found:
        raise Failed(f"{path} names no test")
    return found


def judge_outcomes(known=()):
    """Judges what `outcomes` gives: whatever passes natively must pass. `known` are beginnings of names that may
    fail, each with its reason."""

    def judge(native, other):
        found = []
        for name, kind in native.items():
            if other.get(name) != kind and not any(name.startswith(start) for start in dict(known)):
                found.append(f"{name}: natively {kind}, here {other.get(name, 'missing')}")
        return found

    return judge
