"""`scripts/install` puts everything in its place, and `--remove` takes it away again."""

import subprocess

import product
from test_bad_input import needs_mounts_of_its_own

INSTALLED = ["bin/tiermgrd", "bin/tiermgrctl", "lib/libtiermgr.so.0", "lib/libtiermgr_preload.so",
             "lib/pkgconfig/tiermgr.pc", "include/tiermgr.h", "share/man/man1/tiermgrctl-run.1",
             "share/man/man8/tiermgrd.8", "share/man/man5/tiermgrd.toml.5",
             "share/bash-completion/completions/tiermgrctl"]


def test_help_needs_no_root_and_does_nothing(folder):
    done = subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", product.ROOT / "scripts/install",
                           "--help"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode == 126 or "ermission denied" in done.stderr:
        # The repository lies where only root can read it.
        done = subprocess.run([product.ROOT / "scripts/install", "--help"], capture_output=True,
                              text=True, timeout=30, check=False)
    assert done.returncode == 0 and "TIERMGR_PREFIX" in done.stdout, done.stderr
    assert "--remove" in done.stdout


def test_what_was_installed_is_removed_and_nothing_else(folder):
    needs_mounts_of_its_own()
    prefix, etc = folder / "prefix", folder / "etc"
    prefix.mkdir()
    (prefix / "include").mkdir()
    # With an /etc of its own, and without a systemd that could be told.
    inner = f"""
        set -e
        mount --make-rprivate /
        cp -a /etc {etc} && mount --bind {etc} /etc
        [ ! -d /run/systemd ] || mount -t tmpfs none /run/systemd
        export TIERMGR_PREFIX={prefix}
        {product.ROOT}/scripts/install
        for file in {' '.join(INSTALLED)}; do test -s {prefix}/$file || echo missing $file; done
        test -s /etc/systemd/system/tiermgrd.service -a -s /etc/tiermgr/tiermgrd.toml
        {prefix}/bin/tiermgrd --check-config /etc/tiermgr/tiermgrd.toml >/dev/null
        {product.ROOT}/scripts/install --remove
    """
    done = subprocess.run(["unshare", "--mount", "bash", "-c", inner], capture_output=True, text=True,
                          timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "missing" not in done.stdout, done.stdout + done.stderr
    left = sorted(str(path.relative_to(prefix)) for path in prefix.rglob("*"))
    assert left == ["include"], left
    assert (etc / "tiermgr/tiermgrd.toml").exists()
    assert not (etc / "systemd/system/tiermgrd.service").exists()
