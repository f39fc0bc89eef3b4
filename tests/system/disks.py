"""Loop devices, small file systems and slow disks, each undone whatever happens."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import time

from box import Unavailable

SYSTEM_CGROUPS = pathlib.Path("/sys/fs/cgroup")


def _run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60,
                          check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Unavailable(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()


def _insist(*command):
    """Undoes something that a process which is just ending may still be using."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return _run(*command)
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def loop_device(file, size_bytes, read_only=False):
    """A block device over a new file of `size_bytes`. Gives its path."""
    if os.geteuid() != 0:
        raise Unavailable("a loop device needs root")
    if not shutil.which("losetup"):
        raise Unavailable("losetup is not installed (package mount)")
    with open(file, "wb") as made:
        made.truncate(size_bytes)
    flags = ["--read-only"] if read_only else []
    device = _run("losetup", "--find", "--show", *flags, file)
    try:
        yield pathlib.Path(device)
    finally:
        _insist("losetup", "--detach", device)
        pathlib.Path(file).unlink()


@contextlib.contextmanager
def mounted(device, folder):
    """A new ext4 on `device`, mounted at `folder`."""
    if not shutil.which("mkfs.ext4"):
        raise Unavailable("mkfs.ext4 is not installed (package e2fsprogs)")
    # Without blocks kept back for root: the daemon is root, and is to run out of them.
    _run("mkfs.ext4", "-q", "-m", "0", device)
    folder.mkdir()
    _run("mount", device, folder)
    try:
        yield folder
    finally:
        _insist("umount", folder)
        folder.rmdir()


class SlowDisk:
    """A cgroup whose processes read and write `device` at so many bytes a second. Nobody else is
    slowed down, the daemon above all."""

    def __init__(self, device, bytes_per_second):
        self.device = device
        name = f"tiermgr-slow-{os.getpid()}"
        self._is_v1 = (SYSTEM_CGROUPS / "blkio" / "blkio.throttle.read_bps_device").exists()
        if self._is_v1:
            self.path = SYSTEM_CGROUPS / "blkio" / name
        elif "io" in self._controllers():
            self.path = SYSTEM_CGROUPS / name
        else:
            raise Unavailable("no cgroup here limits what a device transfers")
        try:
            if not self._is_v1:
                (SYSTEM_CGROUPS / "cgroup.subtree_control").write_text("+io")
            self.path.mkdir()
        except OSError as error:
            raise Unavailable(f"making a cgroup for a slow disk: {error.strerror}") from error
        try:
            self.limit(bytes_per_second)
        except OSError as error:
            self.close()
            raise Unavailable(f"slowing {device} down: {error.strerror}") from error

    def limit(self, bytes_per_second):
        """Sets another limit, also for what is on its way already."""
        numbers = os.stat(self.device).st_rdev
        place = f"{os.major(numbers)}:{os.minor(numbers)}"
        if self._is_v1:
            for way in ("read", "write"):
                file = self.path / f"blkio.throttle.{way}_bps_device"
                file.write_text(f"{place} {bytes_per_second}")
        else:
            text = f"{place} rbps={bytes_per_second} wbps={bytes_per_second}"
            (self.path / "io.max").write_text(text)

    def take(self, pid):
        """Has a process that runs already use the slow disk."""
        (self.path / "cgroup.procs").write_text(str(pid))

    @staticmethod
    def _controllers():
        try:
            return (SYSTEM_CGROUPS / "cgroup.controllers").read_text().split()
        except OSError:
            return []

    def popen(self, command, **options):
        """Starts `command` with the slow disk."""
        procs = str(self.path / "cgroup.procs")

        def join():
            with open(procs, "w") as file:
                file.write(str(os.getpid()))

        return subprocess.Popen([str(word) for word in command], preexec_fn=join, **options)

    def close(self):
        """Removes the cgroup, once nobody is in it."""
        deadline = time.monotonic() + 20
        while self.path.exists():
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
