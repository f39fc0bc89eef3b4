"""The main job: a language model in half its memory, with and without tiermgr; then a C program.

Run by scripts/demo, which builds and installs what this needs. Exits with 1 where two texts differ,
a byte of the C program is wrong, or tiermgr had nothing to do.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "system"))

from box import MIB, Box, SwapFile, Unavailable, drop_caches, swap_in_use  # noqa: E402
from meter import Meter  # noqa: E402
from product import BUILD, DIST, ROOT, clean_environment, compile_c, counters, run_command  # noqa: E402

TOKENS = 64
LIMIT_SECONDS = 240
# Threads of llama.cpp wait for each other by spinning, so one that has no processor holds up all. One
# processor is left to the daemon, in every run.
THREADS = min(4, max(1, (os.cpu_count() or 1) - 1))
# What the limit leaves to the pages of libraries that are in use. --dram counts the daemon in.
LIBRARY_BYTES = 12 * MIB
PAGE = 4096


class Failed(Exception):
    """The demo did not show what it is there to show."""


class Run:
    """One way of generating the text."""

    def __init__(self, folder, name, limit_bytes=None, dram_bytes=None, swap=False):
        self.name, self.limit_bytes, self.dram_bytes = name, limit_bytes, dram_bytes
        self.text_file = folder / f"{name}.txt"
        self.report = folder / f"{name}.json"
        command = [sys.executable, str(HERE / "generate.py"), "--tokens", str(TOKENS)]
        command += ["--threads", str(THREADS), "--text", str(self.text_file)]
        if dram_bytes is not None:
            command = run_command(dram_bytes, f"{folder / 'store'}:512M", self.report, command)
        with contextlib.suppress(Unavailable):
            drop_caches()
        # The cgroup keeps the peak; a meter beside it would take processor time from the model.
        with Box("demo", limit_bytes, swap=swap) as box:
            process = box.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=clean_environment(), stdin=subprocess.DEVNULL, cwd=ROOT)
            try:
                out, err = process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                box.kill_all()
                out, err = process.communicate()
                err += f"\nstopped after {LIMIT_SECONDS} s"
            self.cgroup_peak_bytes = box.peak_bytes()
            kills = box.oom_kills()
        if process.returncode != 0:
            if kills:
                err += f"\nthe kernel killed {kills} process(es): the limit of the cgroup was reached"
            raise Failed(f"run '{name}' ended with {process.returncode}:\n{err[-3000:]}")
        self.result = json.loads(out.splitlines()[-1])
        self.counters = counters(self.report) if dram_bytes is not None else {}

    @property
    def text(self):
        return self.text_file.read_bytes()

    def row(self):
        """A line of the table."""
        peak = f"{self.cgroup_peak_bytes / MIB:.1f}" if self.cgroup_peak_bytes else "?"
        limit = f"{self.limit_bytes / MIB:.0f}" if self.limit_bytes else "none"
        moved = self.counters.get("store_read_bytes", 0) + self.counters.get("store_written_bytes", 0)
        recalls = self.counters.get("recalled_pages", "-")
        moved = f"{moved / MIB:.0f}" if self.counters else "-"
        return (f"{self.name:<22}{self.result['tokens_per_s']:>9.2f}{limit:>9}{peak:>9}"
                f"{recalls:>10}{moved:>9}")


def language_model(folder):
    """Unlimited, limited under tiermgr, limited with a swap file."""
    print(f"A model of 135 million parameters writes {TOKENS} tokens; weights on the heap, "
          f"{THREADS} thread(s).\n")
    free = Run(folder, "unlimited")
    whole = free.result["peak_rss_bytes"]
    limit = whole // 2 + 24 * MIB
    other = free.result["anon_bytes"] - free.result["weights_bytes"]
    dram = (limit - other - LIBRARY_BYTES) // MIB * MIB
    print(f"Its resident memory is {whole / MIB:.1f} MiB at most, so the limit is half of that and 24 MiB: "
          f"{limit / MIB:.1f} MiB for\nprogram and daemon together. {other / MIB:.0f} MiB of it are small "
          f"allocations that tiermgr leaves alone; --dram is {dram // MIB} MiB.\n")
    runs = [free]
    runs.append(Run(folder, "tiermgr, all fits", dram_bytes=1024 * MIB))
    runs.append(Run(folder, "tiermgr, half", limit_bytes=limit, dram_bytes=dram))
    skipped = None
    try:
        with SwapFile(BUILD / "demo-swap", 512 * MIB):
            runs.append(Run(folder, "swap file, half", limit_bytes=limit, swap=True))
    except Unavailable as error:
        skipped = str(error)
    except Failed as error:
        # The kernel could not do it at all; that is a result, not a fault of ours.
        skipped = str(error)
    print(f"{'run':<22}{'tokens/s':>9}{'limit':>9}{'peak':>9}{'recalls':>10}{'moved':>9}\n"
          f"{'':<31}{'MiB':>9}{'MiB':>9}{'pages':>10}{'MiB':>9}")
    for run in runs:
        print(run.row())
    print("The peaks are of all that the memory cgroup held, files that were read included.")
    if skipped:
        print(f"swap file, half: no figure: {skipped}")
    for run in runs[1:]:
        if run.text != free.text:
            raise Failed(f"run '{run.name}' gave another text than '{free.name}'")
    print(f"\nAll {len(runs)} texts are the same, byte for byte:\n\n  "
          + free.text.decode().strip().replace("\n", "\n  ") + "\n")
    recalls_min = min(10_000, (free.result["weights_bytes"] - dram) // PAGE)
    half = runs[2]
    came = half.counters["recalled_pages"] + half.counters.get("prefetched_pages", 0)
    if came < recalls_min:
        raise Failed(f"only {came} pages came back, {recalls_min} were to be expected")


def c_program(folder):
    """1 GiB in 512 MiB through the C interface."""
    program = compile_c(HERE / "gigabyte.c", BUILD / "demo" / "gigabyte", f"-I{ROOT / 'include'}",
                        f"-L{DIST / 'lib'}", "-ltiermgr", f"-Wl,-rpath,{DIST / 'lib'}")
    report = folder / "gigabyte.json"
    command = run_command(512 * MIB, f"{folder / 'store'}:2G", report, [program])
    limit = 512 * MIB * 102 // 100 + 64 * MIB
    print("A C program writes, reads and changes 1 GiB through the C interface with 512 MiB of DRAM.\n")
    with Box("demo-c", limit) as box, Meter(box) as meter:
        process = box.popen(command, env=clean_environment(), stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the C program took more than {LIMIT_SECONDS} s") from error
    if code:
        raise Failed(f"the C program ended with {code}")
    told = counters(report)
    print(f"  program and daemon {meter.peaks['held_bytes'] / MIB:.1f} MiB, the daemon "
          f"{meter.peaks['daemon_bytes'] / MIB:.1f} MiB at their peaks, seen from outside; "
          f"{told['recalled_pages']} pages recalled,\n  {told.get('prefetched_pages', 0)} prefetched, "
          f"{told['store_written_bytes'] // MIB} MiB written, {told['store_read_bytes'] // MIB} MiB read.")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    if swap_in_use():
        print("note: this machine swaps already, so the figures without a swap file may be off")
    BUILD.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="scratch-demo-", dir=BUILD) as name:
            folder = pathlib.Path(name)
            language_model(folder)
            c_program(folder)
    except (Failed, Unavailable) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print("\ndemo: done, everything as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
