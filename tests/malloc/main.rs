//! Programs whose `malloc` is tiermgr's, with twice the memory that they may have. The programs are in
//! C beside this file and check their own bytes; here they get a daemon, and its counters are looked
//! at.

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod manners;
#[cfg(test)]
mod mapping;
#[cfg(test)]
mod small;
#[cfg(test)]
mod stage;
#[cfg(test)]
mod vm;

use stage::{Stage, compile, dist, is_root, root, run_within, skip, working_set};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const PAGE_BYTES: u64 = 4096;
/// As on kernels before Linux 6.8.
const WITHOUT_MOVE: &[&str] = &["--assume-missing", "uffd_move"];

fn source(name: &str) -> PathBuf {
    root().join("tests/malloc").join(name)
}

fn program(name: &str) -> PathBuf {
    let source = source(&format!("{name}.c"));
    compile("cc", &[source], &format!("malloc-{name}"), &[OsStr::new("-std=gnu11")])
}

/// At half of its working set a program must have had about the other half brought back.
fn recalls_min() -> u64 {
    (working_set() / 4 / PAGE_BYTES).min(10_000)
}

/// Runs one program at half of its working set, with what it reads from the environment.
fn at_half(name: &str, settings: &[(&str, &str)], recalled_pages_min: u64) {
    at_half_with(name, settings, recalled_pages_min, &[]);
}

fn at_half_with(name: &str, settings: &[(&str, &str)], recalled_pages_min: u64, flags: &[&str]) {
    let Some(stage) = Stage::new(name, working_set() / 2, flags) else { return };
    let mut command = stage.command(&program(name));
    command.envs(settings.iter().copied());
    if stage.expect_ok(&mut command) {
        stage.expect_work(recalled_pages_min);
    }
}

#[test]
fn one_thread() {
    at_half("threads", &[("THREADS", "1")], recalls_min());
}

#[test]
fn two_threads() {
    at_half("threads", &[("THREADS", "2")], recalls_min());
}

#[test]
fn sixteen_threads() {
    at_half("threads", &[("THREADS", "16")], recalls_min());
}

#[test]
fn one_thread_without_uffd_move() {
    at_half_with("threads", &[("THREADS", "1")], recalls_min(), WITHOUT_MOVE);
}

#[test]
fn sixteen_threads_without_uffd_move() {
    at_half_with("threads", &[("THREADS", "16")], recalls_min(), WITHOUT_MOVE);
}

#[test]
fn realloc_growth() {
    at_half("realloc_growth", &[], 0);
}

#[test]
fn fork_under_pressure() {
    at_half("fork_pressure", &[], recalls_min());
}

#[test]
fn fork_under_pressure_without_uffd_move() {
    at_half_with("fork_pressure", &[], recalls_min(), WITHOUT_MOVE);
}

#[test]
fn fork_and_exec_a_thousand_times() {
    at_half("fork_exec", &[], recalls_min() / 2);
}

#[test]
fn fork_and_the_parent_exits() {
    at_half("fork_parent_exits", &[], recalls_min());
}

#[test]
fn fork_and_the_parent_exits_without_uffd_move() {
    at_half_with("fork_parent_exits", &[], recalls_min(), WITHOUT_MOVE);
}

fn forks() -> String {
    stage::forks().to_string()
}

#[test]
fn forks_beside_writing_threads() {
    at_half("fork_threads", &[("FORKS", &forks())], recalls_min());
}

#[test]
fn forks_beside_writing_threads_without_uffd_move() {
    // Each waits for pages to rest a while before they can leave.
    at_half_with("fork_threads", &[("FORKS", "2")], recalls_min() / 2, WITHOUT_MOVE);
}

#[test]
fn threads_exit_while_others_fault() {
    at_half("thread_exit", &[], recalls_min() / 2);
}

#[test]
fn threads_exit_while_others_fault_without_uffd_move() {
    at_half_with("thread_exit", &[], recalls_min() / 2, WITHOUT_MOVE);
}

/// With memory to spare, where discards follow each other fastest.
#[test]
fn threads_free_side_by_side() {
    let Some(stage) = Stage::new("discards", 1 << 30, &[]) else { return };
    stage.expect_ok(&mut stage.command(&program("discards")));
    // What holds small blocks too is given back in huge pages, and spreads over more than is native.
    let small = [("TIERMGR_SMALL", "1"), ("LAPS", "50")];
    stage.expect_ok(stage.command(&program("discards")).envs(small));
}

#[test]
fn read_only_weights() {
    at_half("readonly", &[], recalls_min());
}

#[test]
fn read_only_weights_without_uffd_move() {
    at_half_with("readonly", &[], recalls_min(), WITHOUT_MOVE);
}

#[test]
fn locked_memory() {
    at_half("locked", &[], 0);
}

#[test]
fn locked_memory_without_uffd_move() {
    at_half_with("locked", &[], 0, WITHOUT_MOVE);
}

#[test]
fn all_memory_locked_from_the_start() {
    at_half("locked", &[("FUTURE", "1")], recalls_min());
}

#[test]
fn all_memory_locked_from_the_start_without_uffd_move() {
    at_half_with("locked", &[("FUTURE", "1")], recalls_min(), WITHOUT_MOVE);
}

/// A program whose user may lock nothing cannot test locks: it must not end as if it had.
#[test]
fn a_program_that_skips_says_so() {
    let flags = [OsStr::new("-std=gnu11")];
    let locked = compile("cc", &[source("locked.c")], "malloc-locked-not", &flags);
    let mut command = Command::new("prlimit");
    if is_root() {
        command = Command::new("setpriv");
        command.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit"]);
    }
    command.arg("--memlock=0:0");
    let output = run_within(command.arg(locked), Duration::from_secs(60)).expect("ends in time");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(stage::skips(&said).len(), 1, "{said}");
    assert!(!said.lines().any(|line| line.starts_with("ok ")), "{said}");
}

#[test]
fn storm_of_madvise_and_munmap() {
    at_half("storm", &[], recalls_min() / 2);
}

#[test]
fn storm_of_madvise_and_munmap_without_uffd_move() {
    at_half_with("storm", &[], recalls_min() / 2, WITHOUT_MOVE);
}

#[test]
fn system_calls_on_parked_memory() {
    at_half("syscalls", &[("EXPECT_PARKED", "1")], recalls_min());
}

#[test]
fn system_calls_on_parked_memory_without_uffd_move() {
    at_half_with("syscalls", &[("EXPECT_PARKED", "1")], recalls_min(), WITHOUT_MOVE);
}

/// A mapping that is none of ours: what it needs to stay what it is, and that what can leave does.
/// Of memory that a child has not inherited the daemon believes that it is there: with less room than this
/// too little would be left for the rest.
fn foreign(what: &str, recalled_pages_min: u64) {
    let size = working_set().max(256 << 20);
    for flags in [&[], WITHOUT_MOVE] {
        let Some(stage) = Stage::new("foreign", size / 2, flags) else { return };
        let mut command = stage.command(&program("foreign"));
        if stage.expect_ok(command.env("WHAT", what).env("SIZE", size.to_string())) {
            stage.expect_work(recalled_pages_min);
        }
    }
}

#[test]
fn a_file_in_place_of_managed_memory_stays() {
    foreign("file", recalls_min() / 2);
}

#[test]
fn memory_with_a_userfaultfd_of_the_programs_own_stays() {
    foreign("uffd", recalls_min() / 2);
}

#[test]
fn mappings_of_a_child_where_its_parent_had_memory_stay() {
    foreign("dontfork", recalls_min() / 2);
}

#[test]
fn descriptors_are_guarded() {
    at_half("descriptors", &[], 0);
}

#[test]
fn before_main_and_after_it() {
    early(&[]);
}

fn early(settings: &[(&str, &str)]) {
    let Some(stage) = Stage::new("early", working_set() / 2, &[]) else { return };
    let flags = ["-std=gnu11", "-shared", "-fPIC"].map(OsStr::new);
    let linked = compile("cc", &[source("early_library.c")], "libearly-linked.so", &flags);
    let flags = [&flags[..], &[OsStr::new("-DOPENED")]].concat();
    let opened = compile("cc", &[source("early_library.c")], "libearly-opened.so", &flags);
    let flags = [OsStr::new("-std=gnu11"), linked.as_os_str(), OsStr::new("-ldl")];
    let early = compile("cc", &[source("early.c")], "malloc-early", &flags);
    stage.expect_ok(stage.command(&early).env("LIBRARY", opened).envs(settings.iter().copied()));
    stage.expect_work(0);
}

#[test]
fn without_a_daemon_memory_comes_from_libc_and_one_line_says_so() {
    without_a_daemon(&program("conformance"), &[]);
}

fn without_a_daemon(program: &Path, settings: &[(&str, &str)]) {
    let preload = dist("lib/libtiermgr_preload.so");
    if !preload.exists() {
        return skip("dist/lib/libtiermgr_preload.so is not built; run scripts/build");
    }
    let run = |more: &[(&str, &str)]| {
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", &preload).env("TIERMGR_SOCKET", "/nonexistent/socket");
        command.envs(settings.iter().chain(more).copied());
        match run_within(&mut command, Duration::from_secs(60)) {
            Ok(output) => output,
            Err(error) => panic!("{error}"),
        }
    };
    let lines =
        |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();

    let output = run(&[]);
    assert!(output.status.success(), "{}", lines(&output));
    assert_eq!(lines(&output).lines().count(), 1, "{}", lines(&output));
    assert!(lines(&output).contains("/nonexistent/socket"), "{}", lines(&output));

    let output = run(&[("TIERMGR_LOG", "off")]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", lines(&output));
    let output = run(&[("TIERMGR_DISABLE", "1")]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", lines(&output));

    let output = run(&[("TIERMGR_REQUIRE", "1")]);
    assert!(!output.status.success(), "large blocks were served though TIERMGR_REQUIRE is set");
    assert!(lines(&output).contains("TIERMGR_REQUIRE"), "{}", lines(&output));
}

/// A program that leaves small blocks to libc does not pay for jemalloc: nothing starts it there. And a
/// thread's cache of blocks is found without a call that could allocate.
#[test]
fn jemalloc_waits_until_it_is_asked_for_and_keeps_its_threads_data_in_static_storage() {
    let preload = dist("lib/libtiermgr_preload.so");
    if !preload.exists() {
        return skip("dist/lib/libtiermgr_preload.so is not built; run scripts/build");
    }
    let told = |program: &str, how: &str| {
        let output = Command::new(program).arg(how).arg(&preload).output();
        let output = output.expect("nm and readelf are parts of the compiler's tools");
        String::from_utf8(output.stdout).expect("text")
    };
    let names = told("nm", "--format=posix");
    assert!(names.lines().any(|line| line.starts_with("_rjem_malloc ")), "no names: stripped?");
    let constructor = names.lines().find(|line| line.starts_with("jemalloc_constructor "));
    if let Some(address) = constructor.and_then(|line| line.split(' ').nth(2)) {
        let pointer = format!(" {}", address.trim_start_matches('0'));
        let relocations = told("readelf", "--relocs");
        assert!(!relocations.lines().any(|line| line.ends_with(&pointer)), "{pointer} is called");
    }
    assert!(told("readelf", "--dynamic").contains("STATIC_TLS"));
    // Its tables are mapped past our own mmap, which could give it managed memory.
    let imported = told("readelf", "--relocs");
    assert!(imported.lines().any(|line| line.contains(" munmap")), "no names: stripped?");
    assert!(!imported.lines().any(|line| line.contains(" mmap")), "jemalloc calls our mmap");
}

/// A name too many would replace a function of the program's.
#[test]
fn only_malloc_the_guards_calls_on_memory_and_a_table_are_exported() {
    let preload = dist("lib/libtiermgr_preload.so");
    if !preload.exists() {
        return skip("dist/lib/libtiermgr_preload.so is not built; run scripts/build");
    }
    let wanted: BTreeSet<&str> = [
        "__register_atfork",
        "aligned_alloc",
        "calloc",
        "close",
        "close_range",
        "closefrom",
        "dup2",
        "dup3",
        "free",
        "free_aligned_sized",
        "free_sized",
        "madvise",
        "mallctl",
        "mallctlbymib",
        "mallctlnametomib",
        "mallinfo",
        "mallinfo2",
        "malloc",
        "malloc_info",
        "malloc_stats",
        "malloc_trim",
        "malloc_usable_size",
        "memalign",
        "mlock",
        "mlock2",
        "mlockall",
        "mmap",
        "mmap64",
        "mprotect",
        "mremap",
        "munlock",
        "munlockall",
        "munmap",
        "pkey_mprotect",
        "posix_madvise",
        "posix_memalign",
        "prctl",
        "pvalloc",
        "realloc",
        "reallocarray",
        "syscall",
        "tiermgr_preload_table",
        "valloc",
    ]
    .into();
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=just-symbols"])
        .arg(&preload)
        .output()
        .expect("nm is part of the compiler's tools");
    let exported = String::from_utf8(output.stdout).expect("names");
    assert_eq!(exported.lines().collect::<BTreeSet<_>>(), wanted);
}
