"""Benchmarks, as markdown tables: `bench.py NAME [--pairs N]`. Run by scripts/bench.

Both sides of a comparison run in memory cgroups of the same limit, the daemon included, in turn
(A B A B ...). Tables give medians, minimum and maximum, and the median of the ratios of the pairs.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "system"))

from box import MIB, Box, SwapFile, Unavailable, drop_caches  # noqa: E402
from product import (  # noqa: E402
    BUILD, CTL, DIST, PRELOAD, ROOT, Daemon, clean_environment, compile_c, counters, run_command)

DRAM_MIB = 256
DATA_MIB = 512
# What a limit leaves to the program itself, its libraries and rounding.
SLACK_MIB = 24
SMALL_OBJECTS = 10_000_000
FORKS = 1000
WAYS = ("sequential-read", "sequential-write", "random-read", "random-write")


def program(name):
    """Compiles one of the C programs here."""
    flags = []
    if name == "fault_service":
        flags = [f"-I{ROOT / 'include'}", f"-L{DIST / 'lib'}", "-ltiermgr",
                 f"-Wl,-rpath,{DIST / 'lib'}"]
    return compile_c(HERE / f"{name}.c", BUILD / "bench" / name, *flags)


def run(command, box=None, env=None, seconds=300):
    """Runs a program that prints one JSON object."""
    popen = box.popen if box else subprocess.Popen
    process = popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    stdin=subprocess.DEVNULL, text=True, env=env or clean_environment())
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, command))}: {process.returncode}\n{err[-2000:]}")
    return json.loads(out.splitlines()[-1])


def spread(values, form="{:.2f}"):
    """Median, and the range if there is one."""
    text = form.format(statistics.median(values))
    if len(values) > 1:
        text += f" ({form.format(min(values))} to {form.format(max(values))})"
    return text


def ratio(ours, theirs, form="{:.2f}"):
    """Spread of the ratios of pairs."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)], form)


def table(head, rows):
    """Prints a markdown table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)


def machine():
    """What this runs on, so that a number can be judged."""
    model = "unknown processor"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    print(f"{datetime.date.today()}, Linux {platform.release()}, {os.cpu_count()} CPUs ({model}), "
          f"{memory:.0f} GiB. Command: `scripts/bench {shlex.join(sys.argv[1:])}`\n", flush=True)


@contextlib.contextmanager
def folder():
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-bench-", dir=BUILD) as name:
        yield pathlib.Path(name)


def device(_pairs):
    """The device itself, and how far it varies."""
    with folder() as at:
        runs = [run([program("raw_device"), at / "file"]) for _ in range(3)]
    table(["device, O_DIRECT", "median (range)"],
          [["stream read, 2 MiB, GB/s", spread([r["read_gb_per_s"] for r in runs])],
           ["stream write, 2 MiB, GB/s", spread([r["write_gb_per_s"] for r in runs])],
           ["4 KiB read at depth 1, p50 us", spread([r["p50_us"] for r in runs], "{:.0f}")],
           ["4 KiB read at depth 1, p99 us", spread([r["p99_us"] for r in runs], "{:.0f}")],
           ["4 KiB reads/s at depth 16", spread([r["iops_depth_16"] for r in runs], "{:.0f}")]])
    return runs


def fault(pairs):
    """Fault service against a handler that does nothing else and never sleeps."""
    bare, ours = [], []
    binary = program("fault_service")
    with folder() as at, Daemon(at, 512 * MIB, 2048 * MIB) as daemon:
        for _ in range(pairs):
            bare.append(run([binary, "bare", 4000]))
            ours.append(run([binary, "tiermgr", 4000], env=daemon.environment()))
            daemon.wait_until_empty()
    rows = []
    for key in ("p50_us", "p90_us", "p99_us", "mean_us"):
        a, b = [r[key] for r in ours], [r[key] for r in bare]
        rows.append([key.replace("_us", ", us"), spread(a, "{:.1f}"), spread(b, "{:.1f}"), ratio(a, b)])
    table(["fault answered with zeros", "tiermgr", "bare spinning handler", "ratio"], rows)


def oversubscribed(pairs):
    """Twice the limit, against kernel swap on a file of the same disk."""
    device(1)
    limit = (DRAM_MIB + SLACK_MIB) * MIB
    binary = program("access")
    rows, work = [], []
    for way in WAYS:
        ours, swap, told = [], [], []
        for _ in range(pairs):
            with folder() as at, Box("bench", limit) as box:
                drop_caches()
                report = at / "report.json"
                ours.append(run(run_command(DRAM_MIB * MIB, f"{at / 'store'}:2G", report,
                                            [binary, way, DATA_MIB, 5]), box))
                told.append(counters(report))
            with SwapFile(BUILD / "bench-swap", 2048 * MIB), Box("bench", limit, swap=True) as box:
                drop_caches()
                swap.append(run([binary, way, DATA_MIB, 5], box))
        sequential = way.startswith("sequential")
        key, unit, form = (("gb_per_s", "GB/s", "{:.2f}") if sequential
                           else ("accesses_per_s", "accesses/s", "{:.0f}"))
        a, b = [r[key] for r in ours], [r[key] for r in swap]
        rows.append([f"{way}, {unit}", spread(a, form), spread(b, form), ratio(a, b)])
        for part in () if sequential else ("p50_us", "p99_us"):
            a, b = [r.get(part, 0) for r in ours], [r.get(part, 0) for r in swap]
            rows.append([f"{way}, {part[:3]} of absent pages, us", spread(a, "{:.0f}"),
                         spread(b, "{:.0f}"), ratio(a, b) if all(b) else "-"])
        work.append([way, *(spread([t[k] for t in told], "{:.0f}") for k in
                            ("recalled_pages", "prefetched_pages", "parked_pages")),
                     spread([(t["store_read_bytes"] + t["store_written_bytes"]) / MIB for t in told],
                            "{:.0f}")])
    print(f"{DATA_MIB} MiB of data, --dram {DRAM_MIB}M, both sides in a cgroup of "
          f"{limit // MIB} MiB; 5 s each.\n")
    table(["", "tiermgr", "swap file", "ratio"], rows)
    table(["proof of work", "recalled pages", "prefetched pages", "parked pages", "MiB moved"], work)


def pair_below(pairs, command, env):
    """Runs of `command` with and without the allocator, everything fitting."""
    ours, theirs = [], []
    with folder() as at, Daemon(at, 4096 * MIB, 256 * MIB) as daemon:
        for _ in range(pairs):
            theirs.append(run(command, env=clean_environment(**env)))
            ours.append(run(command, env=daemon.preloaded(**env)))
            daemon.wait_until_empty()
    return ours, theirs


def below(pairs):
    """NumPy where everything fits."""
    ours, theirs = pair_below(pairs, [sys.executable, HERE / "numpy_below.py", 512],
                              {"OPENBLAS_NUM_THREADS": "2"})
    rows = []
    for key in ours[0]:
        a, b = [r[key] * 1e3 for r in ours], [r[key] * 1e3 for r in theirs]
        rows.append([key.removesuffix("_s") + ", ms", spread(a, "{:.1f}"), spread(b, "{:.1f}"),
                     ratio(a, b, "{:.3f}")])
    table(["NumPy, 512 MiB, all of it fits", "tiermgr", "without", "ratio"], rows)


def malloc(pairs):
    """Allocations where everything fits."""
    rows = []
    binary = program("malloc_loop")
    for kib, rounds in ((16, 400_000), (256, 40_000), (1024, 8_000), (16384, 200)):
        ours, theirs = pair_below(pairs, [binary, kib << 10, rounds], {})
        a, b = [r["ns_per_block"] for r in ours], [r["ns_per_block"] for r in theirs]
        rows.append([f"{kib} KiB, ns a block", spread(a, "{:.0f}"), spread(b, "{:.0f}"), ratio(a, b)])
    table(["allocate, touch each page, free", "tiermgr", "glibc", "ratio"], rows)


def debian_jemalloc():
    """What small objects are compared with."""
    found = next(pathlib.Path("/usr/lib").glob("*/libjemalloc.so.2"), None)
    if found is None:
        raise Unavailable("libjemalloc.so.2 is not there: run scripts/setup")
    return str(found)


def small(pairs):
    """Small objects where everything fits, against jemalloc without us."""
    jemalloc = debian_jemalloc()
    with folder() as at, Daemon(at, 8192 * MIB, 256 * MIB) as daemon:
        objects_held(pairs, daemon, jemalloc)
        objects_made(pairs, daemon, jemalloc)


def objects_held(pairs, daemon, jemalloc):
    """Ten million objects of one thread: what they cost, and the memory that they take."""
    command = [program("small_objects"), "held", SMALL_OBJECTS, 1]
    # The second gets huge pages as managed memory does, which costs more where the kernel has to make them.
    others = {"jemalloc": {"LD_PRELOAD": jemalloc},
              "jemalloc, thp:always": {"LD_PRELOAD": jemalloc, "MALLOC_CONF": "thp:always"},
              "glibc": {}}
    sides = {"tiermgr --small": [], **{name: [] for name in others}}
    for _ in range(pairs):
        sides["tiermgr --small"].append(run(command, env=daemon.preloaded(TIERMGR_SMALL="1")))
        daemon.wait_until_empty()
        for name, env in others.items():
            sides[name].append(run(command, env=clean_environment(**env)))
    rows = []
    for key, what, form in (
            ("ns_per_malloc", "make, ns an object", "{:.0f}"),
            ("ns_per_replacement", "replace at random, ns an object", "{:.0f}"),
            ("ns_per_read", "read in order, ns an object", "{:.0f}"),
            ("held_per_byte_full", "bytes held for each byte asked for, at first", "{:.3f}"),
            ("held_per_byte_churned", "the same after all were replaced", "{:.3f}")):
        values = [[r[key] for r in runs] for runs in sides.values()]
        rows.append([what, *(spread(v, form) for v in values), ratio(values[0], values[1]),
                     ratio(values[0], values[2])])
    print(f"{SMALL_OBJECTS} objects of 16 to 256 bytes, CPU time.\n")
    table(["", *sides, "to jemalloc", "to that with thp:always"], rows)


def forks(pairs):
    """How long fork() takes beside eight writing threads: natively, where all fits, and at half of it."""
    binary = compile_c(HERE.parent / "malloc" / "fork_threads.c", BUILD / "bench" / "fork_threads")
    work = {"FORKS": str(FORKS), "SIZE": f"{DRAM_MIB}M", "WRITERS": "8"}
    sides = {"natively": [], "all of it fits": [], "at half of it": []}
    with folder() as at, folder() as at_half, Daemon(at, 2048 * MIB, 512 * MIB) as roomy, \
            Daemon(at_half, DRAM_MIB // 2 * MIB, 2048 * MIB) as tight:
        for _ in range(pairs):
            for side, env in zip(sides, (clean_environment(**work), roomy.preloaded(**work),
                                         tight.preloaded(**work)), strict=True):
                done = subprocess.run([binary], env=env, capture_output=True, text=True, check=True,
                                      timeout=1200, stdin=subprocess.DEVNULL)
                sides[side].append([int(us) for us in re.findall(r"(\d+) us", done.stdout)])
            roomy.wait_until_empty()
            recalled = tight.wait_until_empty()["totals"]["recalled_pages"]
    print(f"{FORKS} forks of {DRAM_MIB} MiB, which eight threads write to; at half of it {recalled} pages "
          "were recalled in all.\n")
    table(["fork()", *sides, "fits to natively", "half to natively"],
          [[name, *(spread(values, "{:.0f}") for values in columns),
            *(ratio(values, columns[0]) for values in columns[1:])]
           for name, columns in (("p50, us", [[r[0] for r in runs] for runs in sides.values()]),
                                 ("p99, us", [[r[1] for r in runs] for runs in sides.values()]))])


# Work of all threads together: replacements of objects of so many bytes, batches of 64, arrays.
OBJECTS = (
    *(("churn", threads, least, most, count // threads)
      for least, most, count in ((16, 64, 4_000_000), (64, 512, 2_000_000), (512, 4096, 800_000),
                                 (4096, 32768, 200_000))
      for threads in (1, 2, 4)),
    *(("queue", threads, 120_000 // threads) for threads in (2, 4)),
    *(("grow", threads, 80_000 // threads) for threads in (1, 2, 4)),
)


def objects_made(pairs, daemon, jemalloc):
    """Objects that come and go in several threads: throughput, first touches included."""
    binary = program("small_objects")
    runs = [[] for _ in OBJECTS]
    for _ in range(pairs):
        for work, pair in zip(OBJECTS, runs, strict=True):
            theirs = run([binary, *work], env=clean_environment(LD_PRELOAD=jemalloc))
            ours = run([binary, *work], env=daemon.preloaded(TIERMGR_SMALL="1"))
            daemon.wait_until_empty()
            pair.append((ours, theirs))
    rows, means = [], {"per_s": [], "per_cpu_s": []}
    for work, pair in zip(OBJECTS, runs, strict=True):
        name = {"churn": "replace, {2} to {3} bytes", "queue": "pass on", "grow": "realloc"}[work[0]]
        row = [name.format(*work), work[1]]
        for key, all_medians in means.items():
            ours, theirs = ([side[key] for side in sides] for sides in zip(*pair, strict=True))
            all_medians.append(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)))
            row += [spread([v / 1e6 for v in ours]), spread([v / 1e6 for v in theirs]),
                    ratio(ours, theirs)]
        rows.append(row)
    rows.append(["geometric mean", "", "", "", f"{statistics.geometric_mean(means['per_s']):.2f}",
                 "", "", f"{statistics.geometric_mean(means['per_cpu_s']):.2f}"])
    print("Millions of operations a second, and a second of CPU time.\n")
    table(["", "threads", "tiermgr --small", "jemalloc", "ratio", "CPU: tiermgr --small", "jemalloc",
           "ratio"], rows)


BENCHMARKS = {"device": device, "fault": fault, "oversubscribed": oversubscribed, "below": below,
              "malloc": malloc, "small": small, "forks": forks}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for path in (CTL, PRELOAD):
        if not path.exists():
            sys.exit(f"{path} is not there: run scripts/build")
    machine()
    names = BENCHMARKS if options.name == "all" else [options.name]
    try:
        for name in names:
            BENCHMARKS[name](options.pairs)
    except Unavailable as error:
        sys.exit(f"bench: cannot be measured here: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
