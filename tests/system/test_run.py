"""`tiermgrctl run` says what became of the run, also when nothing of it was managed."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

import product
from system_daemon import status_of, system_daemon

# A user without rights, whom the socket of a private daemon is closed to.
UNPRIVILEGED = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


@pytest.fixture
def public(workload):
    """A folder with the workload and the library, where any user may run and read them."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="tiermgr-test-"))
    path.chmod(0o755)
    shutil.copy(workload, path / "workload")
    shutil.copy(product.PRELOAD, path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run(folder, public):
    """Runs a command; gives the finished process and its report."""

    def begin(*command, options=()):
        report = folder / "report.json"
        full = [product.CTL, "run", "--dram", "64M", "--nvme", f"{folder / 'store'}:512M",
                "--report", report, *options, "--", *command]
        env = product.clean_environment(TIERMGR_PRELOAD=str(public / product.PRELOAD.name))
        done = subprocess.run(list(map(str, full)), capture_output=True, text=True, timeout=120,
                              check=False, stdin=subprocess.DEVNULL, env=env)
        return done, json.loads(report.read_text())

    return begin


def test_a_managed_program_is_counted(run, public):
    done, report = run(public / "workload", "fill", 128, 1)
    assert done.returncode == 0, done.stderr
    assert report["attached_processes"] == 1, report
    assert not report["warnings"], report


def test_a_run_in_which_nobody_attached_says_so_where_it_matters(run, public):
    done, report = run("true")
    assert done.returncode == 0, done.stderr
    assert report["attached_processes"] == 0, report
    # It had nothing to manage.
    assert not report["warnings"] and "managed 0 clients" in done.stderr, done.stderr
    done, report = run(public / "workload", "fill", 32, 1, options=["--min-size", "1G"])
    assert report["attached_processes"] == 0, report
    assert "no program attached" in report["warnings"][0]
    assert "no program attached" in done.stderr


def test_what_gives_up_root_is_not_managed_and_not_silently_so(run, public):
    command = [*UNPRIVILEGED, public / "workload", "fill", 32, 1]
    done, report = run(*command)
    assert done.returncode == 0 and report["attached_processes"] == 0, done.stderr
    assert "no program attached" in done.stderr
    done, report = run(*command, options=["--require"])
    assert done.returncode != 0, done.stderr
    assert report["attached_processes"] == 0


def plain(*command, seconds=60, **environment):
    """`tiermgrctl` as it stands, without an option more."""
    return subprocess.run([product.CTL, *map(str, command)], capture_output=True, text=True,
                          timeout=seconds, check=False, stdin=subprocess.DEVNULL,
                          env=product.clean_environment(**environment))


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_a_mistyped_option_is_not_taken_for_the_program(separator):
    done = plain("run", "--drma", "1G", *separator, "true")
    assert done.returncode == 125 and "'--dram'" in done.stderr, done.stderr


def test_a_report_that_cannot_be_written_is_found_before_the_program_starts(folder):
    done = plain("run", "--dram", "64M", "--report", folder / "no" / "report", "touch",
                 folder / "started")
    assert done.returncode == 125 and str(folder / "no") in done.stderr, done.stderr
    assert not list(folder.iterdir())
    # A run that did not come to be leaves no empty report, and an old one as it was.
    old = folder / "old"
    old.write_text("kept")
    for report in (folder / "new", old):
        done = plain("run", "--dram", "1M", "--report", report, "true")
        assert done.returncode == 125, done.stderr
    assert old.read_text() == "kept" and not (folder / "new").exists()


def test_a_statically_linked_program_is_named_before_it_starts(folder):
    source = folder / "quiet.c"
    source.write_text("int main(void) { return 7; }\n")
    program = product.compile_c(source, folder / "quiet", "-static")
    done = plain("run", "--dram", "64M", "--nvme", f"{folder / 'store'}:64M", program)
    assert done.returncode == 7 and "statically linked" in done.stderr, done.stderr
    done = plain("run", "--dram", "64M", "--require", program)
    assert done.returncode == 125 and "statically linked" in done.stderr, done.stderr
    # A script is what its first line says.
    script = folder / "script"
    script.write_text(f"#!{program}\n")
    script.chmod(0o755)
    done = plain("run", "--dram", "64M", "--require", script)
    assert done.returncode == 125 and "statically linked" in done.stderr, done.stderr


def test_a_program_for_another_c_library_runs_without_the_library(folder):
    """Its loader would give up at the functions that only glibc has."""
    loader = folder / "ld-musl-test.so.1"
    shutil.copy(os.path.realpath("/lib64/ld-linux-x86-64.so.2" if os.uname().machine == "x86_64"
                                 else "/lib/ld-linux-aarch64.so.1"), loader)
    source = folder / "shows.c"
    source.write_text("#include <stdio.h>\n#include <stdlib.h>\n"
                      "int main(void) { puts(getenv(\"LD_PRELOAD\") ? \"preloaded\" : \"bare\"); }\n")
    program = product.compile_c(source, folder / "shows", f"-Wl,--dynamic-linker={loader}")
    store = f"{folder / 'store'}:64M"
    done = plain("run", "--dram", "64M", "--nvme", store, program)
    assert done.returncode == 0 and done.stdout == "bare\n", done
    assert "another C library" in done.stderr and str(loader) in done.stderr, done.stderr
    done = plain("run", "--dram", "64M", "--nvme", store, "--require", program)
    assert done.returncode == 125 and "another C library" in done.stderr, done.stderr


def test_what_passes_no_environment_on_is_named_before_it_starts(folder):
    sudo = folder / "sudo"
    sudo.symlink_to("/bin/true")
    store = f"{folder / 'store'}:64M"
    done = plain("run", "--dram", "64M", "--nvme", store, sudo)
    assert done.returncode == 0 and "does not pass LD_PRELOAD on" in done.stderr, done.stderr
    done = plain("run", "--dram", "64M", "--nvme", store, "--require", sudo)
    assert done.returncode == 125 and "does not pass LD_PRELOAD on" in done.stderr, done.stderr


@pytest.mark.parametrize("how, reason, words", [
    (["env", "-u", "LD_PRELOAD"], "preload_cleared", "without LD_PRELOAD"),
    (["env", "-i"], "preload_cleared", "without LD_PRELOAD"),
    ([], "not_loaded", "statically linked"),
])
def test_a_child_that_is_not_reached_is_named(run, public, folder, how, reason, words):
    workload = public / "workload"
    if not how:
        source = pathlib.Path(__file__).with_name("workload.c")
        workload = product.compile_c(source, folder / "static", "-static")
    script = f"(sleep 4; echo go) | {' '.join(how)} {workload} hold 64"
    done, report = run("sh", "-c", script)
    assert done.returncode == 0, done.stderr
    found = report["unreached_programs"]
    assert [f["reason"] for f in found] == [reason], report
    assert found[0]["name"] == workload.name and found[0]["resident_bytes"] > 48 << 20, found
    assert words in report["warnings"][0] and words in done.stderr, done.stderr


def test_rules_manage_the_programs_that_they_name(run, public, folder):
    rules = folder / "rules"
    script = f"{public / 'workload'} fill 128 1"
    for text, clients in (("workload\n", 1), ("sh\n", 0), ("workload off\n* small\n", 1),
                          (f"{public}/w* min-size=1G\n", 0)):
        rules.write_text(text)
        done, report = run("sh", "-c", script, options=["--only", rules])
        assert done.returncode == 0, done.stderr
        assert report["attached_processes"] == clients, (text, report)


def test_rules_are_known_to_a_program_that_may_not_read_their_file(run, folder):
    rules = folder / "rules"
    rules.write_text("nothing small\n")
    rules.chmod(0o600)
    options = ["--require", "--only", rules]
    done, _ = run("setpriv", "--reuid=65534", "--clear-groups", "true", options=options)
    assert done.returncode == 0 and "RULES" not in done.stderr, done.stderr


def test_wrong_rules_are_said_before_anything_starts(folder):
    rules = folder / "rules"
    started = folder / "started"
    for text, words in (("a smal\n", "line 1: `smal`"), ("", "no rule"),
                        ("a\n[ab small\n", "line 2: `[ab`"), ("* small no-small\n", "line 1: `no-small`"),
                        ("a off\n* off\n", "every rule here says `off`"),
                        ("a\nb min-size=1K\n", "line 2: min-size=1KiB is too little"),
                        (None, "No such file")):
        if text is None:
            rules.unlink()
        else:
            rules.write_text(text)
        done = plain("run", "--dram", "64M", "--only", rules, "touch", started)
        assert done.returncode == 125 and done.stderr.count(words) == 1, done.stderr
        assert str(rules) in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert not started.exists()


def test_a_program_with_a_sanitizer_runs_without_management(run, folder):
    source = folder / "clean.c"
    source.write_text("#include <stdlib.h>\nint main(void) { free(malloc(1 << 20)); return 5; }\n")
    program = product.compile_c(source, folder / "clean", "-fsanitize=address")
    done, report = run(program)
    assert done.returncode == 5 and "AddressSanitizer needs malloc" in done.stderr, done.stderr
    done, report = run(program, options=["--require"])
    assert done.returncode == 125 and report["attached_processes"] == 0, done.stderr


def test_a_size_that_is_too_small_names_the_option_that_gave_it_and_once(folder):
    for options, words in ((["--nvme", f"{folder / 'store'}:1M"], ["--nvme", "16MiB"]),
                           (["--nvme", ""], ["--nvme", "PATH"]),
                           (["--dram", "1M"], ["--dram", "32MiB"]),
                           (["--min-size", "1K"], ["--min-size", "16KiB"])):
        done = plain("run", *options, "true")
        assert done.returncode in (2, 125) and all(word in done.stderr for word in words), done.stderr
        assert done.stderr.count(words[1]) == 1 or options[1] == "", done.stderr
        assert "configuration" not in done.stderr, done.stderr
    small = folder / "small"
    small.write_bytes(bytes(4096))
    done = plain("run", "--nvme", small, "true")
    assert "has 4KiB, and 9MiB are needed" in done.stderr, done.stderr


def test_a_share_of_the_memory_is_a_limit(run):
    command = [product.CTL, "run", "--dram", "10%", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False,
                          stdin=subprocess.DEVNULL, env=product.clean_environment())
    assert done.returncode == 0, done.stderr


def test_what_is_no_socket_is_called_so():
    done = plain("status", "--socket", "/etc/passwd")
    assert done.returncode == 1 and "not a socket" in done.stderr, done.stderr
    assert "systemctl" not in done.stderr


def test_a_background_program_that_outlives_the_run_leaves_no_folder(folder, workload):
    """Its daemon stays for as long as it needs it, and then removes what tiermgrctl made."""
    script = f"{workload} hold 192 < {folder / 'pipe'} > {folder / 'out'} & sleep 3"
    subprocess.run(["mkfifo", folder / "pipe"], check=True)
    with open(folder / "pipe", "r+b", buffering=0) as pipe:
        command = [product.CTL, "run", "--dram", "64M", "sh", "-c", script]
        # To a file: what is in the background keeps it open.
        with open(folder / "err", "w") as err:
            done = subprocess.run(list(map(str, command)), stderr=err, stdin=subprocess.DEVNULL,
                                  timeout=60, env=product.clean_environment(TMPDIR=str(folder)),
                                  check=False)
        said = (folder / "err").read_text()
        assert done.returncode == 0, said
        left = list(folder.glob("tiermgr-run-*"))
        assert "stays" in said and left, (said, left)
        pipe.write(b"go\n")
        deadline = time.monotonic() + 60
        while list(folder.glob("tiermgr-run-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert "right" in (folder / "out").read_text()
    assert not list(folder.glob("tiermgr-run-*"))


@pytest.mark.parametrize("how", ["in order", "killed"])
def test_the_store_takes_no_disk_when_the_run_has_ended(folder, workload, how):
    """Else the next one finds less room. The kernel keeps the file for as long as it takes down the daemon's rings."""
    store = folder / "store"
    command = [product.CTL, "run", "--dram", "64M", "--nvme", f"{store}:256M", "--", workload, "hold", "192"]
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=product.clean_environment()) as running:
        assert running.stdout.readline()
        with open(store, "rb") as held:
            assert os.fstat(held.fileno()).st_blocks > 0
            if how == "killed":
                for pid in serving_daemon(running.pid):
                    os.kill(pid, signal.SIGKILL)
                running.terminate()
            running.communicate(None if how == "killed" else b"go\n", timeout=60)
            assert os.fstat(held.fileno()).st_blocks == 0
    assert not store.exists()


def serving_daemon(pid):
    """Keeper and serving process of a private daemon that process `pid` has started."""
    def children(of):
        return [int(word) for task in pathlib.Path(f"/proc/{of}/task").iterdir()
                for word in (task / "children").read_text().split()]

    for child in children(pid):
        name = pathlib.Path(f"/proc/{child}/comm").read_text().strip()
        if name == "tiermgrd-keeper":
            return child, children(child)[0]
    raise AssertionError("no private daemon")


def test_a_private_daemon_that_is_killed_with_its_keeper_is_missed_at_once(folder, workload):
    command = [product.CTL, "run", "--dram", "64M", "--nvme", f"{folder / 'store'}:512M", "--",
               workload, "hold", "192"]
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=product.clean_environment())
    assert process.stdout.readline() == "filled\n"
    keeper, serving = serving_daemon(process.pid)
    os.kill(keeper, signal.SIGSTOP)
    os.kill(serving, signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    said = process.stderr.readline()
    assert "waits for ever" in said and "kill " in said, said
    assert not pathlib.Path(f"/proc/{keeper}").exists(), "the keeper was not waited for"
    program = int(said.split("kill ")[1].rstrip(")\n"))
    os.kill(program, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL, err
    assert "systemctl" not in err, err
    assert not (folder / "store").exists()


def test_a_system_daemon_that_restarts_meanwhile_is_not_said_to_have_done_nothing(folder, public):
    with system_daemon(folder) as place:
        report = folder / "report.json"
        before = status_of(place)["daemon_pid"]
        script = f"{public / 'workload'} fill 160 1; kill -KILL {before}"
        done = plain("--socket", place / "socket", "run", "--report", report, "--", "sh", "-c", script,
                     TIERMGR_PRELOAD=str(public / product.PRELOAD.name))
        assert done.returncode == 0, done.stderr
        assert "restarted" in done.stderr and "nothing was limited" not in done.stderr, done.stderr
        assert "managed unknown" in done.stderr, done.stderr
        assert json.loads(report.read_text())["attached_processes"] is None
