"""A daemon as a machine would run it: from a configuration file, for users of one group."""

import contextlib
import grp
import json
import pathlib
import shutil
import subprocess
import tempfile
import time

import product

NOBODY = 65534


def group_ids():
    """A group that is served and one that is not; both exist on every Debian system."""
    return grp.getgrnam("users").gr_gid, grp.getgrnam("nogroup").gr_gid


@contextlib.contextmanager
def system_daemon(folder, settings="", dram="128MiB", store="1GiB", popen=subprocess.Popen):
    """A daemon from a configuration file with more `settings`, its socket for the group `users`. Gives the folder with the
    socket and all that a user without rights may run; `public / "state"` leads to its state."""
    # Programs have to be executable here, which /dev/shm need not allow; state is for a tmpfs.
    public = pathlib.Path(tempfile.mkdtemp(prefix="tiermgr-test-"))
    public.chmod(0o755)
    state = pathlib.Path(tempfile.mkdtemp(prefix="tiermgr-test-", dir="/dev/shm"))
    (public / "state").symlink_to(state)
    socket = public / "socket"
    config = folder / "tiermgrd.toml"
    config.write_text(f"""
socket = "{socket}"
socket_group = "users"
state_dir = "{state}"
dram = "{dram}"
{settings}
[store]
path = "{folder / 'store'}"
size = "{store}"
""")
    # What a user without rights runs must lie where that user may read.
    for source in (product.PRELOAD, product.CTL):
        shutil.copy(source, public)
    log = open(folder / "daemon.log", "w+")
    process = popen([product.DAEMON, "--config", config], stdin=subprocess.DEVNULL,
                               stdout=log, stderr=log, env=product.clean_environment())
    try:
        deadline = time.monotonic() + 60
        while not socket.exists():
            assert process.poll() is None, (folder / "daemon.log").read_text()
            assert time.monotonic() < deadline, "no socket after 60 s"
            time.sleep(0.02)
        yield public
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
        shutil.rmtree(public, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)


def status_of(public):
    """`tiermgrctl status`, as root."""
    out = subprocess.run([public / "tiermgrctl", "status", "--json"], capture_output=True, text=True,
                         timeout=20, check=True,
                         env=product.clean_environment(TIERMGR_SOCKET=str(public / "socket")))
    return json.loads(out.stdout)


def wait_until_empty(public, seconds=20):
    """Waits until nobody holds anything, and gives the last status either way."""
    deadline = time.monotonic() + seconds
    while True:
        status = status_of(public)
        held = status["families"] or status["dram_granted_bytes"] or status["store_used_bytes"]
        if not held or time.monotonic() > deadline:
            return status
        time.sleep(0.05)


def as_user(group, command, seconds=100, **options):
    """Runs `command` as nobody, with one group and no capability at all."""
    head = ["setpriv", "--reuid", str(NOBODY), "--regid", str(group), "--clear-groups"]
    head += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    return subprocess.run([*head, *map(str, command)], capture_output=True, text=True, timeout=seconds,
                          stdin=subprocess.DEVNULL, check=False, **options)


def client_environment(public):
    return product.clean_environment(TIERMGR_SOCKET=str(public / "socket"), TIERMGR_REQUIRE="1",
                                     LD_PRELOAD=str(public / product.PRELOAD.name))
