"""A memory cgroup of its own, and a swap file, each undone whatever happens.

Both cgroup versions are known. A `Box` holds a program *and* its daemon, so that no figure can be
met by memory that stands outside. `Unavailable` says why there can be none here.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time

MIB = 1 << 20


class Unavailable(Exception):
    """This machine or this user does not allow it; the text says why."""


class Layout:
    """Where the memory controller is, and how its files are called."""

    def __init__(self):
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        v2 = pathlib.Path("/sys/fs/cgroup")
        if (v1 / "memory.limit_in_bytes").exists():
            self.version, self.root = 1, v1
            self.limit, self.usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            self.peak, self.swap_limit = "memory.max_usage_in_bytes", None
        elif (v2 / "cgroup.controllers").exists():
            self.version, self.root = 2, v2
            if "memory" not in (v2 / "cgroup.controllers").read_text().split():
                raise Unavailable("the cgroup v2 hierarchy has no memory controller")
            self.limit, self.usage = "memory.max", "memory.current"
            self.peak, self.swap_limit = "memory.peak", "memory.swap.max"
        else:
            raise Unavailable("no memory cgroups are mounted below /sys/fs/cgroup")


class Box:
    """A memory cgroup. Use it as a context manager: at its end it kills what is left inside."""

    def __init__(self, name, limit_bytes=None, swap=False):
        self.layout = Layout()
        self.limit_bytes = limit_bytes
        self.path = self.layout.root / f"tiermgr-{name}-{os.getpid()}"
        try:
            if self.layout.version == 2:
                control = self.layout.root / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    control.write_text("+memory")
            self.path.mkdir()
        except OSError as error:
            raise Unavailable(f"making a memory cgroup: {error.strerror}") from error
        try:
            if limit_bytes is not None:
                self._write(self.layout.limit, str(limit_bytes))
            if self.layout.swap_limit is not None and not swap:
                self._write(self.layout.swap_limit, "0")
        except OSError as error:
            self.close()
            raise Unavailable(f"setting the limit of a memory cgroup: {error.strerror}") from error

    def _write(self, name, text):
        (self.path / name).write_text(text)

    def _number(self, name):
        return int((self.path / name).read_text())

    def pids(self):
        """Processes inside, threads not counted."""
        return [int(word) for word in (self.path / "cgroup.procs").read_text().split()]

    def usage_bytes(self):
        """What the kernel charges now, page cache included."""
        return self._number(self.layout.usage)

    def peak_bytes(self):
        """Highest charge so far, page cache included; None where the kernel does not tell."""
        try:
            return self._number(self.layout.peak)
        except OSError:
            return None

    def oom_kills(self):
        """Processes that the kernel killed here because the limit was reached."""
        name = "memory.oom_control" if self.layout.version == 1 else "memory.events"
        for line in (self.path / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def popen(self, command, **options):
        """Starts `command` inside."""
        procs = str(self.path / "cgroup.procs")

        def join():
            with open(procs, "w") as file:
                file.write("0" if self.layout.version == 2 else str(os.getpid()))

        return subprocess.Popen(command, preexec_fn=join, **options)

    def kill_all(self):
        """Kills what is inside. Only what was started in this box, and its children, can be."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self):
        """Empties and removes the cgroup."""
        deadline = time.monotonic() + 20
        while self.path.exists():
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                self.kill_all()
                time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def swap_in_use():
    """Whether the machine swaps at all."""
    return len(pathlib.Path("/proc/swaps").read_text().splitlines()) > 1


class SwapFile:
    """A swap file, in use from enter to exit."""

    def __init__(self, path, size_bytes):
        self.path = pathlib.Path(path)
        self.size_bytes = size_bytes

    def __enter__(self):
        if os.geteuid() != 0:
            raise Unavailable("swapon needs root")
        for tool in ("mkswap", "swapon", "swapoff"):
            if not shutil.which(tool):
                raise Unavailable(f"{tool} is not installed (package util-linux or mount)")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        try:
            # Written, not reserved: some file systems refuse a swap file with unwritten extents.
            with open(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                block = bytes(4 * MIB)
                for _ in range(-(-self.size_bytes // len(block))):
                    file.write(block)
            subprocess.run(["mkswap", self.path], check=True, capture_output=True)
            subprocess.run(["swapon", self.path], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.path.unlink(missing_ok=True)
            detail = getattr(error, "stderr", None) or str(error)
            raise Unavailable(f"turning a swap file on: {detail.strip()}") from error
        return self

    def __exit__(self, *_):
        try:
            subprocess.run(["swapoff", self.path], check=True, capture_output=True)
        finally:
            self.path.unlink(missing_ok=True)


def drop_caches():
    """Empties the page cache, so that files are charged to whoever reads them next."""
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise Unavailable(f"dropping the page cache: {error.strerror}") from error
