"""PostgreSQL: its regression tests, against a server of a user without rights that a system daemon manages."""

import contextlib
import os
import pathlib
import pwd
import re
import shutil
import subprocess
import tempfile
import time

import debian
import product
import system_daemon
from ways import Case, Failed, judge_outcomes, store_mib

PORT = 21999
USER = "postgres"
# Tests that may differ, each with its reason.
KNOWN = {}


def installation():
    """Programs of the newest server, and of those who build extensions for it."""
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3]))
    if not found:
        raise Failed("no PostgreSQL server is installed")
    at = found[-1].parents[1]
    regress = at / "lib" / "pgxs" / "src" / "test" / "regress" / "pg_regress"
    if not regress.exists():
        raise Failed(f"{regress} is not there: install postgresql-server-dev-{at.name}")
    return at, regress


def as_postgres(command, groups):
    user = pwd.getpwnam(USER)
    return ["setpriv", "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--groups", ",".join(map(str, groups)),
            "--inh-caps=-all", *map(str, command)]


def tests_in(public, at):
    """The regression tests in a folder of that user's, with the library that some of them load."""
    source = debian.source(f"postgresql-{at.name}") / "src" / "test" / "regress"
    folder = public / "regress"
    shutil.copytree(source, folder)
    include = subprocess.run([at / "bin" / "pg_config", "--includedir-server"], check=True, capture_output=True,
                             text=True).stdout.strip()
    subprocess.run(["cc", "-O2", "-w", "-shared", "-fPIC", f"-I{include}", "-o", folder / "regress.so",
                    folder / "regress.c"], check=True)
    return folder


@contextlib.contextmanager
def home(way):
    """A folder of that user's, and what a program of theirs finds in its environment."""
    user = pwd.getpwnam(USER)
    _, other_group = system_daemon.group_ids()
    if not way.is_managed:
        public = pathlib.Path(tempfile.mkdtemp(prefix="tiermgr-test-"))
        try:
            public.chmod(0o755)
            yield public, product.clean_environment(), [user.pw_gid]
        finally:
            shutil.rmtree(public, ignore_errors=True)
        return
    group, _ = system_daemon.group_ids()
    with system_daemon.system_daemon(way.folder, dram=f"{way.dram_mib}MiB", store=f"{store_mib(way.dram_mib)}MiB",
                                     popen=way.box.popen) as public:
        environment = system_daemon.client_environment(public)
        environment["TIERMGR_SMALL"] = "1" if "--small" in way.flags else "0"
        environment["TIERMGR_MMAP"] = "1" if "--mmap" in way.flags else "0"
        yield public, environment, [user.pw_gid, group]
        way.note(dict(system_daemon.status_of(public)["totals"]))


def regression(way):
    """Gives each test and how it ended."""
    at, regress = installation()
    user = pwd.getpwnam(USER)
    with home(way) as (public, environment, groups):
        home_of_user = public / "postgres"
        home_of_user.mkdir()
        tests = tests_in(home_of_user, at)
        out_folder = home_of_user / "out"
        out_folder.mkdir()
        for path in (home_of_user, *home_of_user.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid)
        data = home_of_user / "data"
        plain = product.clean_environment(LC_ALL="C", TZ="PST8PDT")

        def step(command, seconds, env=plain, status=(0,)):
            done = way.box.popen(as_postgres(command, groups), env=env, cwd=home_of_user, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                out, _ = done.communicate(timeout=seconds)
            except subprocess.TimeoutExpired as error:
                raise Failed(f"{command[0]} runs for {seconds} s: {server_log()}") from error
            if done.returncode not in status:
                raise Failed(f"{command[0]} ended with {done.returncode}\n{out[-3000:]}\n{server_log()}")
            return out

        def server_log():
            path = home_of_user / "log"
            return path.read_text(errors="replace")[-2000:] if path.exists() else ""

        step([at / "bin" / "initdb", "--no-locale", "--encoding=UTF8", "--auth=trust", "--no-sync", "-D", data], 300)
        options = f"-p {PORT} -k {home_of_user} -c listen_addresses= -c fsync=off -c shared_buffers=64MB"
        server = way.box.popen(as_postgres([at / "bin" / "postgres", "-D", data, *options.split()], groups),
                               env={**environment, "LC_ALL": "C", "TZ": "PST8PDT"}, cwd=home_of_user,
                               stdin=subprocess.DEVNULL, stdout=open(home_of_user / "log", "w"), stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while "accepting" not in step([at / "bin" / "pg_isready", "-h", home_of_user, "-p", PORT], 30,
                                          status=(0, 1, 2)):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"the server does not start: {server_log()}")
                time.sleep(0.2)
            out = step([regress, f"--inputdir={tests}", f"--outputdir={out_folder}", f"--dlpath={tests}",
                        f"--bindir={at / 'bin'}", f"--host={home_of_user}", f"--port={PORT}", f"--user={USER}",
                        f"--schedule={tests / 'parallel_schedule'}", "--max-concurrent-tests=20"], 2400, status=(0, 1))
        finally:
            server.terminate()
            server.wait(120)
        found = dict(re.findall(r"^(?:test|\s)\s*(\S+)\s+\.\.\. (ok|FAILED)", out, re.M))
        if not found:
            raise Failed(f"pg_regress says nothing of tests:\n{out[-3000:]}")
        return found


def cases():
    return [Case("postgres-regression", "the tests of parallel_schedule, by the user postgres", regression, judge_outcomes(KNOWN))]
