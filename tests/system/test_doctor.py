"""What `tiermgrctl doctor` tells those who are not root. Of stores, see test_store.py."""

import json

import product
from system_daemon import as_user, client_environment, group_ids, system_daemon


def findings(public, group, **environment):
    """Of a user in `group`: the status of doctor, and its findings by name."""
    env = {**client_environment(public), "LD_PRELOAD": "", **environment}
    done = as_user(group, [public / "tiermgrctl", "doctor", "--json"], env=env)
    return done.returncode, {f["name"]: f for f in json.loads(done.stdout)["findings"]}


def test_whoever_is_served_needs_nothing_more(folder):
    with system_daemon(folder) as public:
        status, found = findings(public, group_ids()[0])
    assert status == 0 and found["daemon"]["state"] == "ok", found
    assert found["userfaultfd"]["state"] == "ok", found


def test_whoever_lacks_a_group_is_told_which(folder):
    with system_daemon(folder) as public:
        status, found = findings(public, group_ids()[1])
    assert status == 1 and found["daemon"]["state"] == "fail", found
    assert "usermod -aG users" in found["daemon"]["fix"], found
    assert found["userfaultfd"]["state"] == "ok", found


def test_where_there_is_no_daemon_it_is_that_which_fails(folder):
    with system_daemon(folder) as public:
        absent = str(public / "absent")
        status, found = findings(public, group_ids()[0], TIERMGR_SOCKET=absent)
    assert status == 1 and found["daemon"]["state"] == "fail", found
    assert absent in found["daemon"]["detail"] and "start" in found["daemon"]["fix"], found
    assert found["userfaultfd"]["state"] == "ok", found


def test_root_does_without_a_daemon(folder):
    done = product.subprocess.run(
        [product.CTL, "--socket", folder / "absent", "doctor", "--json"], capture_output=True,
        text=True, timeout=30, check=False, env=product.clean_environment())
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0 and found["daemon"]["state"] == "warn", found
