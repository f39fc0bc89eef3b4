"""Whole programs in half of their memory: `programs.py [NAME...]`, run by scripts/programs.

Each program runs natively, then managed with room for all of it, then with a limit of half its peak. Prints a table
as markdown; the status is 1 if something was not as it is natively.
"""

import argparse
import signal
import sys
import traceback

import builds
import cpython
import numpy_suite
import outages
import postgres
import product
import redis_load
import sqlite
import stress
import ways



def all_cases(mmap):
    return [*redis_load.cases(), *cpython.cases(), *numpy_suite.cases(), *sqlite.cases(), *stress.cases(mmap),
            *postgres.cases(), *builds.cases(), *outages.cases()]


class Table:
    """Rows as they come, and whether all is well."""

    HEAD = ("program", "way", "limit, MiB", "peak, MiB", "pages back", "MiB moved", "s", "verdict")

    def __init__(self):
        self.failures = []
        print("| " + " | ".join(self.HEAD) + " |")
        print("|" + "---|" * len(self.HEAD), flush=True)

    def row(self, name, way, seen, complaints):
        verdict = "right" if not complaints else f"WRONG: {len(complaints)}"
        cells = [name, way, seen.limit_mib or "none", seen.peak_mib, seen.recalled_pages(), seen.moved_mib(),
                 f"{seen.seconds:.0f}", verdict]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        self.failures += [f"{name}, {way}: {complaint}" for complaint in complaints]

    def failure(self, name, way, error):
        print(f"| {name} | {way} |  |  |  |  |  | FAILED |", flush=True)
        print(f"{name}, {way}: {error}", file=sys.stderr, flush=True)
        self.failures.append(f"{name}, {way}: {error}")


def attempt(table, case, way, measured, native=None, mmap=False):
    """Runs one row; gives what was seen, or None."""
    with product.scratch() as folder:
        try:
            seen = measured(folder)
        except (ways.Failed, AssertionError, OSError, RuntimeError) as error:
            table.failure(case.name, way, f"{error}\n{traceback.format_exc(limit=-3)}")
            return None
    table.row(case.name, way, seen, [] if native is None else ways.judge(case, native, seen, mmap))
    return seen


def run_case(table, case, options):
    flags = ("--small", "--mmap") if options.mmap else ("--small",)
    native = attempt(table, case, "native", lambda folder: ways.measure(case, folder))
    if native is None:
        return
    limit = ways.half_of(native)
    if case.in_trouble:
        rows = [("half, stopped and killed", lambda folder: outages.measure_in_trouble(case, folder, limit, flags)),
                ("absent", lambda folder: outages.measure_absent(case, folder, flags))]
    else:
        rows = [("all fits", lambda folder: ways.measure(case, folder, ways.PLENTY_MIB, flags)),
                ("half", lambda folder: ways.measure(case, folder, limit, flags))]
    for way, measured in rows:
        if options.way is None or way in options.way:
            attempt(table, case, way, measured, native, options.mmap)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names [all]")
    parser.add_argument("--mmap", action="store_true", help="the programs' own mappings are managed too")
    parser.add_argument("--way", action="append", help="only these ways beside native: all fits, half, ...")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args()
    cases = [case for case in all_cases(options.mmap)
             if not options.names or any(case.name.startswith(name) for name in options.names)]
    if not cases:
        parser.error(f"there is no program {' '.join(options.names)}")
    if options.list:
        for case in cases:
            print(f"{case.name:26} {case.what}")
        return
    (product.BUILD / "programs").mkdir(parents=True, exist_ok=True)
    # What was started is ended, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    table = Table()
    for case in cases:
        run_case(table, case, options)
    print(f"\n{len(cases)} programs, {len(table.failures)} complaints")
    for failure in table.failures:
        print(f"- {failure}")
    sys.exit(bool(table.failures))


if __name__ == "__main__":
    main()
