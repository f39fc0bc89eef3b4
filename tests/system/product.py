"""The built product: where its parts are, how it is run, what it reports."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
BUILD = ROOT / "build"
CTL = DIST / "bin" / "tiermgrctl"
DAEMON = DIST / "bin" / "tiermgrd"
PRELOAD = DIST / "lib" / "libtiermgr_preload.so"

MIB = 1 << 20


def clean_environment(**more):
    """The environment without a setting of tiermgr or a preload of somebody else's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TIERMGR_")}
    kept.pop("LD_PRELOAD", None)
    kept.update(more)
    return kept


def run_command(dram_bytes, store, report, command):
    """`tiermgrctl run` for `command`."""
    head = [str(CTL), "run", "--dram", str(dram_bytes)]
    if store is not None:
        head += ["--nvme", str(store)]
    if report is not None:
        head += ["--report", str(report)]
    return [*head, "--", *map(str, command)]


def counters(report):
    """The counters of a report, from wherever in it they stand."""
    found = {}

    def walk(node):
        if isinstance(node, dict):
            for key, value in node.items():
                if isinstance(value, (dict, list)):
                    walk(value)
                elif isinstance(value, int):
                    found.setdefault(key, value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(json.loads(pathlib.Path(report).read_text()))
    return found


def compile_c(source, out, *flags):
    """Compiles one C file where it, or a header beside it, is newer than what was made of it."""
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(out)]
    command += [str(source), "-pthread", *map(str, flags)]
    stamp = out.with_suffix(".command")
    sources = [pathlib.Path(source), *pathlib.Path(source).parent.glob("*.h")]
    fresh = out.exists() and out.stat().st_mtime > max(s.stat().st_mtime for s in sources)
    if not (fresh and stamp.exists() and stamp.read_text() == " ".join(command)):
        subprocess.run(command, check=True)
        stamp.write_text(" ".join(command))
    return out


def library_flags():
    """For a C program that uses the library of dist/."""
    return [f"-I{DIST / 'include'}", f"-L{DIST / 'lib'}", f"-Wl,-rpath,{DIST / 'lib'}", "-ltiermgr"]


@contextlib.contextmanager
def scratch():
    """A folder on the file system of the repository: a store on tmpfs is refused."""
    BUILD.mkdir(exist_ok=True)
    path = tempfile.mkdtemp(prefix="scratch-", dir=BUILD)
    try:
        yield pathlib.Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Daemon:
    """A daemon of our own, with its socket and its store below `folder`, and with the state of an
    earlier one if `state` is given."""

    def __init__(self, folder, dram_bytes, store_bytes, popen=subprocess.Popen, extra=(), state=None,
                 store=None):
        self.socket = folder / "socket"
        self.state = state or pathlib.Path(tempfile.mkdtemp(prefix="tiermgr-test-", dir="/dev/shm"))
        ready, tell = os.pipe()
        command = self.command(tell, dram_bytes, f"{store or folder / 'store'}:{store_bytes}")
        # A store of this size on a file that is not there yet is preallocated first.
        self.log = open(folder / "daemon.log", "w+")
        self.process = popen([*command, *extra], pass_fds=[tell], stdin=subprocess.DEVNULL,
                             stdout=self.log, stderr=self.log, env=clean_environment())
        os.close(tell)
        try:
            readable, _, _ = select.select([ready], [], [], 60)
            said = os.read(ready, 4096).decode() if readable else ""
            if said.strip() != "ready":
                raise RuntimeError(f"the daemon did not start: {said}\n{self.log_text()}")
        except BaseException:
            self.close()
            raise
        finally:
            os.close(ready)

    def command(self, tell, dram_bytes, store):
        """How it is started."""
        command = [str(DAEMON), "--embedded", "--socket", str(self.socket)]
        command += ["--state-dir", str(self.state), "--dram", str(dram_bytes)]
        return [*command, "--store", store, "--ready-fd", str(tell)]

    def log_text(self):
        """What it has written so far."""
        self.log.flush()
        return pathlib.Path(self.log.name).read_text()

    def control(self, *verb):
        """`tiermgrctl VERB --json` against this daemon."""
        out = subprocess.run([str(CTL), *verb, "--json"], capture_output=True, text=True,
                             timeout=20, env=self.environment())
        if out.returncode:
            raise RuntimeError(f"tiermgrctl {verb}: {out.stderr}\n{self.log_text()}")
        return json.loads(out.stdout)

    def status(self):
        """`tiermgrctl status`."""
        return self.control("status")

    def environment(self, **more):
        """For programs that are to find this daemon, and to fail rather than go without."""
        return clean_environment(TIERMGR_SOCKET=str(self.socket), TIERMGR_REQUIRE="1",
                                 LD_PRELOAD="", **more)

    def preloaded(self, **more):
        """The same with the allocator in place."""
        return {**self.environment(**more), "LD_PRELOAD": str(PRELOAD)}

    def wait_for(self, what, seconds=20):
        """Waits until `what(status)` holds, and gives the last status either way."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                status = self.status()
                if what(status) or time.monotonic() > deadline:
                    return status
            except RuntimeError:
                # It may be starting anew.
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def wait_until_empty(self, seconds=20):
        """Waits until nobody holds anything."""
        return self.wait_for(
            lambda s: not (s["families"] or s["dram_granted_bytes"] or s["store_used_bytes"]),
            seconds)

    def close(self):
        """Ends it and removes its state."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self.log.close()
        shutil.rmtree(self.state, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
