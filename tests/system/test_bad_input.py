"""What a person or a program can get wrong is refused with the cause, and harms nobody."""

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

import product
from box import Box
from system_daemon import (as_user, client_environment, group_ids, status_of, system_daemon,
                           wait_until_empty)

MIB = 1 << 20
MESSAGES = int(os.environ.get("TIERMGR_TEST_MESSAGES", "1000000"))


def start(folder, *options, config=None):
    """Starts a daemon that is expected to refuse; gives its status and what it said."""
    command = [str(product.DAEMON)]
    if config is None:
        command += ["--embedded", "--socket", str(folder / "socket")]
        command += ["--state-dir", str(folder / "state"), *map(str, options)]
    else:
        path = folder / "tiermgrd.toml"
        path.write_text(config)
        command += ["--config", str(path), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False,
                          stdin=subprocess.DEVNULL, env=product.clean_environment())
    return done.returncode, done.stdout + done.stderr


def refused(folder, *options, config=None, says=()):
    """The daemon must end with an error that names the cause, and without a panic."""
    code, text = start(folder, *options, config=config)
    assert code not in (0, 101) and code > 0, (code, text)
    assert "panicked" not in text, text
    for words in says:
        options_of_words = words if isinstance(words, tuple) else (words,)
        assert any(word in text for word in options_of_words), (words, text)
    return text


def test_an_unknown_key_is_named(folder):
    refused(folder, config="drma = '1G'\n", says=["drma"])


def test_a_value_of_the_wrong_kind_is_named(folder):
    refused(folder, config="dram = 'plenty'\n", says=["dram"])
    refused(folder, config="[store]\nsize = -1\n", says=["size"])


def checked(folder, config):
    path = folder / "checked.toml"
    path.write_text(config)
    return subprocess.run([product.DAEMON, "--check-config", path], timeout=30, check=False,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_a_configuration_is_checked_against_the_machine(folder):
    fine = f'state_dir = "/dev/shm/tiermgr-test-checked"\n[store]\npath = "{folder / "store"}"\nsize = "64MiB"\n'
    done = checked(folder, fine)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for setting, words in (('socket_group = "no-such-group"', "no-such-group"),
                           ('assume_missing = ["swap"]', "uffd_move")):
        done = checked(folder, f"{setting}\n{fine}")
        assert done.returncode == 2 and words in done.stderr, done.stderr
    # A daemon would start, or could once the disk is mounted.
    for config, words in ((fine.replace("/dev/shm", str(folder)), "not on a tmpfs"),
                          (fine.replace(str(folder), "/dev/shm"), "lies on tmpfs"),
                          (f'dram = "900TiB"\n{fine}', "more than the machine has")):
        done = checked(folder, config)
        assert done.returncode == 0 and words in done.stderr, done.stderr
    assert [path.name for path in folder.iterdir()] == ["checked.toml"]


@pytest.mark.parametrize("files", [8, 10, 12, 14, 16, 18])
def test_too_few_open_files_are_named_as_the_cause(folder, files):
    """Wherever the start runs into it. Whoever waits for the daemon is told, too."""
    command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", product.CTL, "run", "--dram",
               "64M", "--nvme", f"{folder / 'store'}:64M", "true"]
    done = subprocess.run(list(map(str, command)), timeout=60, check=False, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, env=product.clean_environment())
    assert done.returncode in (0, 125), done.stderr
    assert done.returncode == 0 or "ulimit -n" in done.stderr, done.stderr
    assert "another tiermgrd" not in done.stderr, done.stderr


@pytest.mark.parametrize("files", [4, 5, 6, 8, 12, 30])
def test_a_program_with_too_few_open_files_says_so(folder, workload, files):
    with product.Daemon(folder, 64 * MIB, 64 * MIB) as daemon:
        environment = daemon.preloaded()
        del environment["TIERMGR_REQUIRE"]
        done = subprocess.run(["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", workload, "fill",
                               "8", "1"], env=environment, timeout=60, check=False,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        assert "ulimit -n" in done.stderr, done.stderr


def test_a_named_file_that_is_missing_is_an_error(folder):
    code = subprocess.run([product.DAEMON, "--config", folder / "nothing.toml"], timeout=30,
                          capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert code.returncode != 0
    assert "nothing.toml" in code.stdout + code.stderr


@pytest.mark.parametrize("dram", ["0", "1", "-1", "1X", "", "99999999T", "18446744073709551616"])
def test_dram_that_makes_no_sense(folder, dram):
    refused(folder, "--dram", dram, "--store", f"{folder / 'store'}:64M")


def test_a_store_on_tmpfs(folder):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        refused(folder, "--dram", "64M", "--store", f"{shm}/store:64M", says=["tmpfs"])
        assert not list(pathlib.Path(shm).iterdir()), "a refused store was left behind"


def test_a_store_where_no_folder_can_be_made(folder):
    (folder / "file").touch()
    refused(folder, "--dram", "64M", "--store", f"{folder}/file/store:64M", says=["file"])


def test_a_store_that_is_too_small(folder):
    refused(folder, "--dram", "64M", "--store", f"{folder / 'store'}:1M", says=["store"])


def test_a_store_larger_than_the_disk(folder):
    refused(folder, "--dram", "64M", "--store", f"{folder / 'store'}:900T", says=["store"])
    left = folder / "store"
    assert not left.exists() or left.stat().st_blocks == 0, "a refused store keeps its blocks"


def needs_mounts_of_its_own():
    if not product.shutil.which("unshare"):
        pytest.skip("unshare is not installed")
    if not os.path.ismount("/") or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounts cannot be made private here (a chroot, or a container without rights)")


def test_a_store_on_a_read_only_file_system(folder):
    needs_mounts_of_its_own()
    inner = f"""
        mount --make-rprivate / && mount --bind {folder} {folder} &&
        mount -o remount,bind,ro {folder} &&
        exec {product.DAEMON} --embedded --socket /dev/shm/tiermgr-ro-{os.getpid()} \\
            --state-dir /dev/shm/tiermgr-ro-state-{os.getpid()} --dram 64M --store {folder}/store:64M
    """
    done = subprocess.run(["unshare", "--mount", "bash", "-c", inner], capture_output=True,
                          text=True, timeout=30, check=False, stdin=subprocess.DEVNULL)
    text = done.stdout + done.stderr
    assert done.returncode not in (0, 101) and "ead-only" in text, (done.returncode, text)
    assert "removing" not in text, text


def test_a_machine_without_userfaultfd(folder):
    needs_mounts_of_its_own()
    inner = f"""
        mount --make-rprivate / && mount --bind /dev/null /dev/userfaultfd &&
        exec {product.DAEMON} --embedded --socket {folder}/socket --state-dir {folder}/state \\
            --dram 64M --store {folder}/store:64M
    """
    done = subprocess.run(["unshare", "--mount", "bash", "-c", inner], capture_output=True,
                          text=True, timeout=30, check=False, stdin=subprocess.DEVNULL)
    text = done.stdout + done.stderr
    assert done.returncode not in (0, 101) and "userfaultfd" in text, (done.returncode, text)


def test_a_store_that_somebody_uses(folder):
    with product.Daemon(folder, 64 * MIB, 64 * MIB):
        with product.scratch() as other:
            refused(other, "--dram", "64M", "--store", f"{folder / 'store'}:64M", says=["store"])


def test_a_level_of_the_log_that_does_not_exist(folder):
    refused(folder, "--log-level", "loud", says=["error, warn, info, debug and trace"])


def test_a_group_that_does_not_exist(folder):
    code, text = start(folder, config='socket_group = "no-such-group"\n')
    assert code == 2 and "groupadd" in text, (code, text)


def test_a_program_that_is_not_there(folder):
    command = product.run_command(64 * MIB, f"{folder / 'store'}:64M", None, [folder / "nothing"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False,
                          stdin=subprocess.DEVNULL, env=product.clean_environment())
    assert done.returncode == 127, (done.returncode, done.stderr)
    assert "nothing" in done.stderr


# What `run` starts may end with 2 itself.
@pytest.mark.parametrize("verb, code", [(["run", "--dram", "64M"], 125),
                                        (["run", "--dram", "x", "--", "true"], 125),
                                        (["statsu"], 2), (["status", "--jsn"], 2)])
def test_a_command_line_that_makes_no_sense(verb, code):
    done = subprocess.run([product.CTL, *verb], capture_output=True, text=True, timeout=30,
                          check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code, (done.returncode, done.stderr)


def test_nobody_listens(folder):
    done = subprocess.run([product.CTL, "status"], capture_output=True, text=True, timeout=30,
                          check=False, env=product.clean_environment(
                              TIERMGR_SOCKET=str(folder / "nobody")))
    assert done.returncode not in (0, 101)
    assert str(folder / "nobody") in done.stderr, done.stderr


def test_without_a_daemon_a_program_runs_all_the_same(folder):
    env = product.clean_environment(LD_PRELOAD=str(product.PRELOAD),
                                    TIERMGR_SOCKET=str(folder / "nobody"))
    command = [sys.executable, "-c", "x = bytearray(8 << 20); print(len(x))"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "8388608\n", done.stderr
    done = subprocess.run(command, env={**env, "TIERMGR_REQUIRE": "1"}, capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert str(folder / "nobody") in done.stderr, done.stderr


@pytest.mark.parametrize("block_mib", [8, 512, 1 << 20])
def test_more_than_there_is_room_for_is_refused_and_the_program_lives(folder, block_mib):
    """4 GiB or more where DRAM and store have 320 MiB: malloc says no, the rest goes on."""
    program = f"""
blocks = []
try:
    for _ in range(4096 // {block_mib} + 1):
        block = bytearray({block_mib} << 20)
        block[::4096] = b"x" * len(block[::4096])
        blocks.append(block)
except MemoryError:
    held = [set(block[::4096]) for block in blocks]
    print("refused", all(values == set(b"x") for values in held))
"""
    command = product.run_command(64 * MIB, f"{folder / 'store'}:256M", None,
                                  [sys.executable, "-c", program])
    # In a box, so that memory which is wrongly taken from elsewhere ends this program alone.
    with Box("greedy", 1024 * MIB) as box:
        process = box.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            stdin=subprocess.DEVNULL, env=product.clean_environment())
        try:
            out, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            box.kill_all()
            out, err = process.communicate()
    assert process.returncode == 0 and out == "refused True\n", (process.returncode, out, err)


@pytest.mark.seconds(900)
def test_a_million_random_messages_harm_nobody(folder, workload):
    seed = int(os.environ.get("TIERMGR_TEST_SEED", "1"))
    print(f"seed {seed}: TIERMGR_TEST_SEED={seed} repeats this run")
    with system_daemon(folder) as public:
        for source in (workload, pathlib.Path(__file__).with_name("messages.py")):
            product.shutil.copy(source, public)
        # Somebody honest, who must not notice.
        honest = subprocess.Popen([workload, "hold", "192"], stdin=subprocess.PIPE, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  env=client_environment(public))
        assert honest.stdout.readline() == "filled\n"
        before = status_of(public)
        command = ["/usr/bin/python3", public / "messages.py", public / "socket", seed, MESSAGES]
        done = as_user(group_ids()[0], command, seconds=800)
        assert done.returncode == 0, done.stderr
        after = status_of(public)
        assert after["daemon_pid"] == before["daemon_pid"], "the daemon was restarted"
        assert after["restarts"] == before["restarts"]
        out, err = honest.communicate("go\n", timeout=100)
        assert honest.returncode == 0 and out.endswith("right\n"), err
        empty = wait_until_empty(public)
        assert not (empty["families"] or empty["dram_granted_bytes"] or empty["store_used_bytes"])
