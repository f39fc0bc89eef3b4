//! What programs do beside allocating: they fork by other ways than `fork`, confine themselves, close descriptors
//! that they do not know, bring an allocator of their own, and run others.

use super::stage::{Stage, compile, dist, root, run_within, skip, working_set};
use super::{PAGE_BYTES, program, source};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Smaller than that of other tests, since there are many, and children that do not park are slow.
const SIZE: u64 = 96 * MIB;

/// Runs a program at half of [`SIZE`].
fn at_half(name: &str, settings: &[(&str, &str)], recalled_pages_min: u64) {
    let Some(stage) = Stage::new(name, SIZE / 2, &[]) else { return };
    let mut command = stage.command(&program(name));
    command.env("SIZE", SIZE.to_string()).envs(settings.iter().copied());
    if stage.expect_ok(&mut command) {
        stage.expect_work(recalled_pages_min);
    }
}

const fn recalls_min() -> u64 {
    SIZE / 4 / PAGE_BYTES
}

fn forks_by(how: &str, recalled_pages_min: u64) {
    at_half("fork_forms", &[("HOW", how)], recalled_pages_min);
}

#[test]
fn children_of_system_calls_have_their_bytes() {
    for how in ["raw", "instruction", "clone3", "nested-raw"] {
        forks_by(how, recalls_min());
    }
}

#[test]
fn children_in_pid_namespaces_have_their_bytes() {
    for how in ["unshared", "raw-namespace"] {
        forks_by(how, recalls_min());
    }
}

#[test]
fn programs_that_are_spawned_and_processes_that_share_the_memory_disturb_nothing() {
    for how in ["spawn", "shared"] {
        forks_by(how, recalls_min());
    }
}

#[test]
fn daemons_children_of_threads_and_nested_ones_have_their_bytes() {
    for how in ["daemon", "threads", "nested", "nested-both"] {
        forks_by(how, recalls_min());
    }
}

#[test]
fn children_of_a_signal_handler_have_their_bytes() {
    forks_by("handler", recalls_min() / 4);
}

/// In the middle of which its handler forks.
#[test]
fn a_fork_that_is_interrupted_by_a_fork_ends_as_any_other() {
    fork_inside(&[]);
}

pub(crate) fn fork_inside(settings: &[(&str, &str)]) {
    let Some(stage) = Stage::new("fork-inside", SIZE / 2, &[]) else { return };
    let flags = ["-std=gnu11", "-shared", "-fPIC"].map(OsStr::new);
    let library = compile("cc", &[source("fork_inside_library.c")], "libfork-inside.so", &flags);
    let flags = [OsStr::new("-std=gnu11"), library.as_os_str()];
    let program = compile("cc", &[source("fork_inside.c")], "malloc-fork-inside", &flags);
    for (name, value) in [("FORK_INSIDE", "1"), ("FORK_OUTSIDE", "1")] {
        let mut command = stage.command(&program);
        command.env("SIZE", SIZE.to_string()).env(name, value).envs(settings.iter().copied());
        if stage.expect_ok(&mut command) {
            stage.expect_work(recalls_min());
        }
    }
}

/// The handlers of a library that is older than the allocator wait for a thread that allocates. `more`: what else
/// the program is linked with, older still.
fn beside_an_older_library(name: &str, more: &[&OsStr]) {
    let flags = ["-std=gnu11", "-shared", "-fPIC"].map(OsStr::new);
    let library = compile("cc", &[source("fork_older_library.c")], "libfork-older.so", &flags);
    let flags = ["-std=gnu11", "-Wl,--no-as-needed"].map(OsStr::new);
    let flags = [&flags[..], &[library.as_os_str()], more].concat();
    let program = compile("cc", &[source("fork_older.c")], name, &flags);
    for small in ["0", "1"] {
        let Some(stage) = Stage::new("fork-older", SIZE / 2, &[]) else { return };
        stage.expect_ok(stage.command(&program).env("TIERMGR_SMALL", small));
        stage.expect_work(0);
    }
}

#[test]
fn a_fork_waits_for_a_thread_that_allocates_in_an_older_library() {
    beside_an_older_library("malloc-fork-older", &[]);
}

/// Under ours nobody takes them.
#[test]
fn forks_with_an_allocator_that_keeps_its_locks_across_them() {
    let flags = ["-std=gnu11", "-shared", "-fPIC", "-fno-builtin"].map(OsStr::new);
    let behind = compile("cc", &[source("locked_malloc.c")], "liblocked-malloc.so", &flags);
    beside_an_older_library("malloc-fork-over-locks", &[behind.as_os_str()]);
}

#[test]
fn children_that_nobody_tells_of_give_back_what_they_had() {
    forks_by("many-raw", recalls_min());
}

fn confined(what: &[&str], settings: &[(&str, &str)]) {
    for what in what {
        at_half("confined", &[&[("WHAT", *what)], settings].concat(), recalls_min());
    }
}

#[test]
fn a_filter_that_ends_the_program_for_our_calls_ends_it_for_none() {
    confined(
        &["kill-userfaultfd", "kill-ioctl", "kill-madvise", "kill-connect", "kill-sendmsg"],
        &[],
    );
    confined(&["kill-ioctl", "kill-recvmsg"], &[("BY_SYSCALL", "1")]);
}

#[test]
fn a_filter_is_its_threads_and_leaves_the_others_what_they_had() {
    for what in ["harmless", "vfork", "deadly", "for-all"] {
        at_half("confined_threads", &[("WHAT", what)], 0);
    }
}

#[test]
fn a_filter_that_ends_the_program_for_mprotect_leaves_it_its_memory() {
    for what in ["no-mprotect", "no-munlock"] {
        let settings = [("WHAT", what), ("TIERMGR_REQUIRE", "0"), ("TIERMGR_MMAP", "1")];
        at_half("confined_threads", &settings, 0);
    }
    confined(&["kill-mprotect"], &[("TIERMGR_REQUIRE", "0")]);
}

#[test]
fn a_filter_that_refuses_our_calls_is_lived_with() {
    confined(&["refuse-userfaultfd", "refuse-ioctl", "refuse-madvise", "refuse-connect"], &[]);
    confined(&["no-waits"], &[]);
}

#[test]
fn rights_that_a_program_gives_up_are_not_missed() {
    confined(&["user", "capabilities", "undumpable", "no-new-privileges"], &[]);
}

#[test]
fn namespaces_and_roots_of_its_own_are_lived_with() {
    confined(&["namespaces", "user-namespace", "chroot"], &[]);
}

#[test]
fn limits_that_a_program_sets_itself_are_lived_with() {
    confined(&["nofile", "address-space", "data", "memlock", "processes"], &[]);
}

#[test]
fn attempts_to_start_a_helper_leave_nothing_behind() {
    at_half("no_helper", &[], 0);
}

#[test]
fn a_thread_with_a_small_stack_may_be_the_first_to_allocate() {
    at_half("small_stack", &[], 0);
}

#[test]
fn handlers_may_interrupt_the_allocator() {
    at_half("handlers", &[], 0);
    let natively = run_within(&mut Command::new(program("handlers")), Duration::from_secs(60));
    let natively = natively.expect("ends in time");
    assert!(natively.status.success(), "{}", said_by(&natively));
}

#[test]
fn handlers_may_fork_while_the_program_connects() {
    at_half("handler_connects", &[], 0);
}

#[test]
fn handlers_may_fork_in_the_middle_of_a_request() {
    at_half("handler_forks", &[], 0);
    at_half("handler_forks", &[("RAW", "1")], 0);
}

#[test]
fn children_of_a_handler_join_as_the_interrupted_call_ends() {
    at_half("handler_leaves", &[], 0);
}

/// Runs a program that allocates by all functions, without a daemon, beside `preloads`.
fn beside(program: &Path, preloads: &str, settings: &[(&str, &str)]) -> Output {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", preloads).env("TIERMGR_SOCKET", "/nonexistent/socket");
    command.env("NO_PVALLOC", "1").envs(settings.iter().copied());
    match run_within(&mut command, Duration::from_secs(100)) {
        Ok(output) => output,
        Err(error) => panic!("{error}"),
    }
}

fn chain(name: &str, flags: &[&str], more: &[PathBuf]) -> PathBuf {
    let sources = [&[root().join("tests/malloc/chain.c")], more].concat();
    let flags: Vec<&OsStr> =
        ["-std=gnu11", "-fno-builtin"].iter().chain(flags).map(OsStr::new).collect();
    compile("cc", &sources, name, &flags)
}

fn preload() -> Option<String> {
    let preload = dist("lib/libtiermgr_preload.so");
    if !preload.exists() {
        skip("dist/lib/libtiermgr_preload.so is not built; run scripts/build");
        return None;
    }
    Some(preload.to_string_lossy().into_owned())
}

/// Says why nothing is managed, once, and lets the program go on; or, where that is required, not begin.
fn is_refused(program: &Path, preloads: &str, settings: &[(&str, &str)], cause: &str) {
    let output = beside(program, preloads, settings);
    let said = said_by(&output);
    assert!(output.status.success() && said.contains("ok chain"), "{:?} {said}", output.status);
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("tiermgr[")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(
        lines[0].contains(cause) && lines[0].contains("nothing of this program is managed"),
        "{said}"
    );

    let output = beside(program, preloads, &[settings, &[("TIERMGR_REQUIRE", "1")]].concat());
    let said = said_by(&output);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains(cause) && !said.contains("ok chain"), "{said}");

    let output = beside(program, preloads, &[settings, &[("TIERMGR_DISABLE", "1")]].concat());
    assert!(
        output.status.success() && !said_by(&output).contains("tiermgr["),
        "{}",
        said_by(&output)
    );
}

/// Where Debian has it.
fn debians(library: &str) -> Option<String> {
    let found = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"]
        .into_iter()
        .map(|folder| format!("{folder}/{library}"))
        .find(|path| Path::new(path).exists());
    if found.is_none() {
        skip(&format!("{library} is not there; run scripts/setup"));
    }
    found
}

/// A program at a fixed place, as Debian's Python is.
fn fixed_chain() -> PathBuf {
    chain("malloc-chain-fixed", &["-no-pie", "-fno-pie"], &[])
}

#[test]
fn a_program_at_a_fixed_place_is_managed() {
    let Some(stage) = Stage::new("chain", working_set() / 2, &[]) else { return };
    stage.expect_ok(&mut stage.command(&fixed_chain()));
    stage.expect_work(0);
    assert_eq!(stage.status().attached_total, 1);
}

#[test]
fn an_allocator_behind_ours_serves_what_is_not_managed() {
    let (Some(preload), Some(jemalloc)) = (preload(), debians("libjemalloc.so.2")) else { return };
    let chain = chain("malloc-chain", &[], &[]);
    let output = beside(&chain, &format!("{preload}:{jemalloc}"), &[("TIERMGR_LOG", "off")]);
    assert!(output.status.success(), "{}", said_by(&output));
    for small in ["0", "1"] {
        let Some(stage) = Stage::new("chain", working_set() / 2, &[]) else { return };
        let mut command = stage.command(&chain);
        command.env("LD_PRELOAD", format!("{preload}:{jemalloc}")).env("TIERMGR_SMALL", small);
        stage.expect_ok(&mut command);
        stage.expect_work(0);
        assert!(stage.status().attached_total > 0);
    }
}

#[test]
fn an_allocator_in_front_of_ours_is_named_and_left_alone() {
    let (Some(preload), Some(jemalloc)) = (preload(), debians("libjemalloc.so.2")) else { return };
    let chain = chain("malloc-chain", &[], &[]);
    for program in [chain, fixed_chain()] {
        is_refused(&program, &format!("{jemalloc}:{preload}"), &[], "libjemalloc.so.2");
    }
}

#[test]
fn what_an_allocator_in_front_of_ours_maps_is_managed_where_mappings_are() {
    let (Some(preload), Some(jemalloc)) = (preload(), debians("libjemalloc.so.2")) else { return };
    let Some(stage) = Stage::new("chain", working_set() / 2, &[]) else { return };
    let mut command = stage.command(&chain("malloc-chain", &[], &[]));
    command.env("LD_PRELOAD", format!("{jemalloc}:{preload}"));
    command.env("TIERMGR_MMAP", "1").env("NO_PVALLOC", "1");
    assert!(stage.expect_ok(&mut command));
    assert_eq!(stage.status().attached_total, 1);
    stage.expect_work(0);
}

#[test]
fn an_allocator_of_the_programs_own_is_named_and_left_alone() {
    let Some(preload) = preload() else { return };
    let own = [root().join("tests/malloc/own_malloc.c")];
    let chain = chain("malloc-chain-own", &[], &own);
    is_refused(&chain, &preload, &[], "malloc-chain-own");
}

#[test]
fn sanitizers_are_named_and_left_alone() {
    let Some(preload) = preload() else { return };
    let address = chain("malloc-chain-address", &["-fsanitize=address"], &[]);
    // What `tiermgrctl run` sets: the sanitizer would end a program in which it is not first.
    let order = [("ASAN_OPTIONS", "verify_asan_link_order=0")];
    is_refused(&address, &preload, &order, "AddressSanitizer");
    let thread = chain("malloc-chain-thread", &["-fsanitize=thread"], &[]);
    is_refused(&thread, &preload, &[], "ThreadSanitizer");
}

#[test]
fn valgrind_is_named_and_left_alone() {
    let Some(preload) = preload() else { return };
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skip("valgrind is not there; run scripts/setup");
    }
    let chain = chain("malloc-chain", &[], &[]);
    let mut command = Command::new("valgrind");
    command.arg("-q").arg(chain).env("LD_PRELOAD", preload).env("NO_PVALLOC", "1");
    let output = run_within(&mut command, Duration::from_secs(100)).expect("ends in time");
    let said = said_by(&output);
    assert!(output.status.success() && said.contains("ok chain"), "{said}");
    assert_eq!(said.matches("valgrind cannot follow").count(), 1, "{said}");
}

#[test]
fn a_program_that_opens_the_library_itself_is_told_where_it_belongs() {
    let Some(preload) = preload() else { return };
    let source = root().join("tests/malloc/opens.c");
    let opens =
        compile("cc", &[source], "malloc-opens", &[OsStr::new("-std=gnu11"), OsStr::new("-ldl")]);
    let run = |tunables: &str| {
        let mut command = Command::new(&opens);
        command.arg(&preload).env_remove("LD_PRELOAD").env("GLIBC_TUNABLES", tunables);
        run_within(&mut command, Duration::from_secs(60)).expect("ends in time")
    };
    // The data of jemalloc's threads wants a place that is given away before the program begins.
    let output = run("");
    let said = said_by(&output);
    assert!(output.status.success() && said.contains("static TLS"), "{said}");
    let output = run("glibc.rtld.optional_static_tls=65536");
    let said = said_by(&output);
    assert!(output.status.success() && said.contains("ok opens"), "{said}");
    assert!(said.contains("loaded by dlopen") && said.contains("LD_PRELOAD"), "{said}");
}

#[test]
fn rules_say_which_programs_of_a_tree_are_managed() {
    let Some(stage) = Stage::new("rules", working_set() / 2, &[]) else { return };
    let beside = |name| stage.socket().with_file_name(name);
    let (rules, plain, link) = (beside("rules"), beside("named"), beside("by-another-name"));
    // Whatever allocates at all attaches where small blocks are managed.
    fs::copy("/bin/ls", &plain).expect("a copy");
    std::os::unix::fs::symlink(&plain, &link).expect("a link");
    let attached = |text: &str, program: &Path| {
        fs::write(&rules, text).expect("a file");
        let before = stage.status().attached_total;
        let mut shell = stage.command(Path::new("/bin/sh"));
        let script = format!("{} / > /dev/null && echo ok tree", program.display());
        shell.arg("-c").arg(script).env("TIERMGR_RULES", &rules);
        assert!(stage.expect_ok(&mut shell));
        stage.status().attached_total - before
    };
    assert_eq!(attached("other small\n", &plain), 0, "neither the shell nor the program is named");
    assert_eq!(attached("named off\n* small\n", &plain), 1, "the shell alone");
    assert_eq!(attached("named small\n", &plain), 1, "the program alone");
    assert_eq!(attached("*\n", &plain), 0, "without options nothing is large enough");
    assert_eq!(attached("named min-size=1G\nnamed small\n", &plain), 0, "the first rule decides");
    assert_eq!(attached("by-another-name small\n", &link), 1, "the name that it was started by");
    assert_eq!(attached("by-another-name small\n", &plain), 0, "that name alone");
    assert_eq!(attached("/*/name? small\n", &link), 1, "the path of its file");
    let before = stage.status().attached_total;
    let mut shell = stage.command(Path::new("/bin/sh"));
    shell.arg("-c").arg(format!("{} / > /dev/null && echo ok tree", plain.display()));
    assert!(stage.expect_ok(shell.env("TIERMGR_RULES", "# its text\nnamed small\n")));
    assert_eq!(stage.status().attached_total - before, 1, "rules without a file");
}

#[test]
fn rules_that_are_none_are_named_and_nothing_is_managed() {
    let Some(preload) = preload() else { return };
    let chain = chain("malloc-chain", &[], &[]);
    is_refused(&chain, &preload, &[("TIERMGR_RULES", "/nonexistent/rules")], "/nonexistent/rules");
    is_refused(&chain, &preload, &[("TIERMGR_RULES", "/etc/passwd")], "line 1");
    is_refused(&chain, &preload, &[("TIERMGR_RULES", "a\na min-size=1K\n")], "line 2");
    is_refused(&chain, &preload, &[("TIERMGR_RULES", "a\nb off\n* small no-small\n")], "line 3");
    is_refused(
        &chain,
        &preload,
        &[("TIERMGR_RULES", "a off\n* off\n")],
        "every rule here says `off`",
    );
}

fn said_by(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}
