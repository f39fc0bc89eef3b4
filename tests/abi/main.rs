//! The C ABI as C11 and C++17 see it, and the names that the library exports.

#[cfg(test)]
#[path = "../malloc/stage.rs"]
mod stage;

use stage::{Stage, compile, dist, root, skip, working_set};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles against the installed header, and links the shared or the static library.
fn program(compiler: &str, standard: &str, source: &str, is_static: bool) -> PathBuf {
    let include = flag("-I", &dist("include"));
    let lib = flag("-L", &dist("lib"));
    let rpath = flag("-Wl,-rpath,", &dist("lib"));
    let mut flags = vec![OsStr::new(standard), OsStr::new("-pedantic"), include.as_os_str()];
    if is_static {
        flags.extend([lib.as_os_str(), OsStr::new("-l:libtiermgr.a"), OsStr::new("-lm")]);
        flags.extend([OsStr::new("-ldl"), OsStr::new("-lgcc_s")]);
    } else {
        flags.extend([lib.as_os_str(), rpath.as_os_str(), OsStr::new("-ltiermgr")]);
    }
    let path = root().join("tests/abi").join(source);
    let kind = if is_static { "static" } else { "shared" };
    compile(compiler, &[path], &format!("abi-{}-{kind}", source.replace('.', "-")), &flags)
}

fn flag(name: &str, path: &Path) -> OsString {
    let mut flag = OsString::from(name);
    flag.push(path);
    flag
}

fn run(name: &str, compiler: &str, standard: &str, source: &str, is_static: bool) {
    run_with(name, compiler, standard, source, is_static, &[]);
}

fn run_with(
    name: &str,
    compiler: &str,
    standard: &str,
    source: &str,
    is_static: bool,
    flags: &[&str],
) {
    let Some(stage) = Stage::new(name, working_set() / 2, flags) else { return };
    if !dist("lib/libtiermgr.so").exists() {
        return skip("dist/lib/libtiermgr.so is not built; run scripts/build");
    }
    let program = program(compiler, standard, source, is_static);
    let mut command = stage.command(&program);
    command.env_remove("LD_PRELOAD");
    if stage.expect_ok(&mut command) {
        stage.expect_work(0);
    }
}

#[test]
fn every_call_from_c11() {
    run("abi-c", "cc", "-std=c11", "every_call.c", false);
}

#[test]
fn every_call_from_c11_linked_statically() {
    run("abi-c-static", "cc", "-std=c11", "every_call.c", true);
}

#[test]
fn every_call_from_cxx17() {
    run("abi-cxx", "c++", "-std=c++17", "every_call.cpp", false);
}

#[test]
fn addresses_are_reused_while_the_helper_is_late() {
    run("abi-late", "cc", "-std=c11", "delayed_helper.c", false);
}

#[test]
fn addresses_are_reused_while_the_helper_is_late_without_uffd_move() {
    let flags = &["--assume-missing", "uffd_move"];
    run_with("abi-late-in-place", "cc", "-std=c11", "delayed_helper.c", false, flags);
}

#[test]
fn memory_from_malloc_can_be_pinned_where_it_is_managed() {
    let Some(stage) = Stage::new("abi-preloaded", working_set() / 2, &[]) else { return };
    let program = program("cc", "-std=gnu11", "preloaded.c", false);
    if stage.expect_ok(&mut stage.command(&program)) {
        stage.expect_work(0);
    }
}

#[test]
fn without_a_daemon_the_error_tells_what_to_do() {
    if !dist("lib/libtiermgr.so").exists() {
        return skip("dist/lib/libtiermgr.so is not built; run scripts/build");
    }
    let program = program("cc", "-std=c11", "no_daemon.c", false);
    let output = Command::new(program)
        .env("TIERMGR_SOCKET", "/nonexistent/socket")
        .output()
        .expect("a program that was just compiled runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Header, symbol list and library name the same functions.
#[test]
fn header_map_and_library_agree() {
    let library = dist("lib/libtiermgr.so");
    if !library.exists() {
        return skip("dist/lib/libtiermgr.so is not built; run scripts/build");
    }
    let header = std::fs::read_to_string(root().join("include/tiermgr.h")).expect("the header");
    let declared: BTreeSet<String> = header
        .split("TIERMGR_API ")
        .skip(1)
        .filter_map(|part| part.split_once('('))
        .filter_map(|(before, _)| before.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("tiermgr_"))
        .map(str::to_owned)
        .collect();
    let map = std::fs::read_to_string(root().join("ffi/tiermgr.map")).expect("the symbol list");
    let listed: BTreeSet<String> = map
        .lines()
        .filter_map(|line| line.trim().strip_suffix(';'))
        .filter(|name| name.starts_with("tiermgr_"))
        .map(str::to_owned)
        .collect();
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=just-symbols"])
        .arg(&library)
        .output()
        .expect("nm is part of the compiler's tools");
    let exported: BTreeSet<String> = String::from_utf8(output.stdout)
        .expect("names")
        .lines()
        .filter(|line| !line.starts_with("TIERMGR_"))
        .map(|line| line.strip_suffix("@@TIERMGR_0.1").unwrap_or(line).to_owned())
        .collect();
    assert_eq!(declared, listed, "include/tiermgr.h (left) and ffi/tiermgr.map (right)");
    assert_eq!(listed, exported, "ffi/tiermgr.map (left) and libtiermgr.so (right)");
}

/// What the header lists as errors are errors that it defines, and one that every function may give is
/// listed by none.
#[test]
fn the_header_lists_errors_that_exist() {
    let header = std::fs::read_to_string(root().join("include/tiermgr.h")).expect("the header");
    let defined: BTreeSet<&str> = header
        .split("TIERMGR_E_")
        .skip(1)
        .filter_map(|part| part.split_once(" = -"))
        .map(|(name, _)| name)
        .filter(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
        .collect();
    assert_eq!(defined.len(), 16, "the header was not understood: {defined:?}");
    let everywhere = ["CONNECTION_LOST", "SHUTTING_DOWN", "INTERNAL", "PROTOCOL", "SYSTEM"];
    let lists: Vec<&str> = header.split("* errors: ").chain(header.split("/* errors: ")).collect();
    assert!(lists.len() > 12);
    for list in lists.iter().filter(|part| !part.starts_with("/* tiermgr:")) {
        let list = list.split(['.', '/']).next().unwrap_or_default();
        for name in list.split(|c: char| !c.is_ascii_uppercase() && c != '_') {
            if name.len() > 4 && name != "DONTNEED" {
                assert!(defined.contains(name), "{name} is no error: {list}");
                assert!(!everywhere.contains(&name), "{name} may come from every function: {list}");
            }
        }
    }
}
