#!/usr/bin/env python3
"""What a program and its daemon hold in memory, seen from outside every 10 ms.

    meter.py --box CGROUP_DIR [--interval-ms 10]     until SIGTERM
    meter.py --pid PID ...

Sums the proportional set sizes of the kernel (smaps_rollup) over all processes of a cgroup, or of a
process and its descendants. tiermgr's helper process shares the memory of its client and is left
out. Prints one JSON object. As a module: `with Meter(box) as meter: ...; meter.peaks`.
"""

import argparse
import json
import pathlib
import signal
import subprocess
import sys
import time

KINDS = {b"Pss_Anon:": "anon_bytes", b"Pss_File:": "file_bytes", b"Pss_Shmem:": "shmem_bytes"}
# Its keeper is called tiermgrd-keeper.
DAEMON = "tiermgrd"
HELPER = "tiermgr-helper"


class Process:
    """An open smaps_rollup, so that a sample costs one read."""

    def __init__(self, pid):
        self.comm = pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
        self.rollup = open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0)

    def sample(self):
        """Bytes by kind; raises OSError when the process has gone."""
        self.rollup.seek(0)
        found = {}
        for line in self.rollup.read(4096).splitlines():
            words = line.split()
            if words and words[0] in KINDS:
                found[KINDS[words[0]]] = int(words[1]) << 10
        if not found:
            raise ProcessLookupError
        return found


def descendants(root):
    """`root` and the processes below it."""
    found, ahead = [], [root]
    while ahead:
        pid = ahead.pop()
        found.append(pid)
        for children in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                ahead += [int(word) for word in children.read_text().split()]
            except OSError:
                continue
    return found


class Watch:
    """Peaks of all samples so far."""

    def __init__(self, box, pid):
        self.procs = pathlib.Path(box, "cgroup.procs") if box else None
        self.usage = None
        if box:
            names = ("memory.usage_in_bytes", "memory.current")
            self.usage = next(p for p in (pathlib.Path(box, n) for n in names) if p.exists())
        self.pid = pid
        self.known = {}
        self.peaks = {"samples": 0, "longest_gap_ms": 0.0}

    def note(self, name, value):
        self.peaks[name] = max(self.peaks.get(name, 0), value)

    def sample(self):
        """One sample. Processes may come and go at any instant."""
        if self.procs:
            pids = [int(word) for word in self.procs.read_text().split()]
        else:
            pids = descendants(self.pid)
        client, daemon, file_bytes = 0, 0, 0
        for pid in pids:
            try:
                process = self.known.get(pid) or Process(pid)
                self.known[pid] = process
                if process.comm == HELPER:
                    continue
                found = process.sample()
            except OSError:
                self.known.pop(pid, None)
                continue
            # A process that has just been forked may still exec or rename itself.
            is_daemon = process.comm.startswith(DAEMON)
            if not is_daemon:
                del self.known[pid]
            held = found["anon_bytes"] + found["shmem_bytes"]
            file_bytes += found["file_bytes"]
            if is_daemon:
                daemon += held
            else:
                client += held
        self.note("client_bytes", client)
        self.note("daemon_bytes", daemon)
        self.note("together_bytes", client + daemon)
        self.note("file_bytes", file_bytes)
        charged = int(self.usage.read_text()) if self.usage else client + daemon
        self.note("cgroup_bytes", charged)
        # A walk of page tables takes its time, and counts a page that moves meanwhile twice; the charge
        # has it once, and file pages besides.
        self.note("held_bytes", min(client + daemon, charged))
        self.peaks["samples"] += 1


class Meter:
    """Runs this file beside a box. `peaks` is there after the end."""

    def __init__(self, box, interval_ms=10):
        self.command = [sys.executable, __file__, "--box", str(box.path)]
        self.command += ["--interval-ms", str(interval_ms)]
        self.peaks = None

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        # Its first line says that it samples.
        self.process.stdout.readline()
        return self

    def __exit__(self, *_):
        self.process.terminate()
        out, _ = self.process.communicate(timeout=20)
        self.peaks = json.loads(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--box", help="folder of a memory cgroup")
    what.add_argument("--pid", type=int, help="a process; its descendants are counted with it")
    parser.add_argument("--interval-ms", type=float, default=10)
    options = parser.parse_args()

    def end(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    watch = Watch(options.box, options.pid)
    try:
        print("sampling", flush=True)
        due = time.monotonic()
        last = due
        while True:
            watch.sample()
            now = time.monotonic()
            watch.note("longest_gap_ms", round((now - last) * 1000, 1))
            last = now
            due = max(due + options.interval_ms / 1000, now)
            time.sleep(due - now)
    except (KeyboardInterrupt, OSError):
        # The box may be gone before we are told to end.
        pass
    print(json.dumps(watch.peaks))


if __name__ == "__main__":
    main()
