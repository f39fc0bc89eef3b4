//! Programs that change their memory by system calls.

use crate::stage::{Stage, run_within};
use crate::{WITHOUT_MOVE, program, recalls_min};
use std::process::Command;
use std::time::Duration;

/// Blocks of 4 MiB are pushed out many times here: by little, so that it takes little time.
const DRAM: u64 = 40 << 20;
const SIZE: &str = "48M";

/// Without `UFFDIO_MOVE` what leaves must rest first, and each row takes ten seconds: those that differ there.
const SLOW: &str = "32M";
const WHEN_RESIDENT: &str = "|MADV_DONTNEED|MADV_WIPEONFORK|MADV_DONTFORK|a private file over it|";
const WHEN_PARKED: &str = "|MADV_DONTNEED|munmap|mmap over it|mremap|";

fn calls_on(state: &str, settings: &[(&str, &str)], flags: &[&str]) {
    let name = format!("vm-calls-{state}");
    let Some(stage) = Stage::new(&name, DRAM, flags) else { return };
    let mut command = stage.command(&program("vm_calls"));
    command.env("STATE", state).env("SIZE", SIZE).envs(settings.iter().copied());
    if stage.expect_ok(&mut command) {
        stage.expect_work(0);
    }
}

/// What the table says is what Linux does.
#[test]
fn vm_calls_of_linux() {
    for name in ["vm_calls", "vm_kept", "vm_beside"] {
        let mut command = Command::new(program(name));
        let output = run_within(command.env("SIZE", SIZE), Duration::from_secs(60));
        let output = output.expect("ends in time");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn locks_and_dumps_are_what_the_kernel_knows() {
    let Some(stage) = Stage::new("vm-kept", DRAM, &[]) else { return };
    stage.expect_ok(stage.command(&program("vm_kept")).env("SIZE", SIZE));
    let mapped = [("MAPPED", "1"), ("TIERMGR_MMAP", "1"), ("TIERMGR_MMAP_MIN", "64K")];
    stage.expect_ok(stage.command(&program("vm_kept")).env("SIZE", SIZE).envs(mapped));
}

#[test]
fn memory_beside_that_of_others_is_served_as_any() {
    let Some(stage) = Stage::new("vm-beside", DRAM, &[]) else { return };
    stage.expect_ok(stage.command(&program("vm_beside")).env("SIZE", SIZE));
    let mapped = [("MAPPED", "1"), ("TIERMGR_MMAP", "1"), ("TIERMGR_MMAP_MIN", "64K")];
    stage.expect_ok(stage.command(&program("vm_beside")).env("SIZE", SIZE).envs(mapped));
}

#[test]
fn vm_calls_on_native_memory() {
    calls_on("native", &[], &[]);
}

#[test]
fn vm_calls_on_resident_memory() {
    calls_on("resident", &[], &[]);
}

#[test]
fn vm_calls_on_parked_memory() {
    calls_on("parked", &[("EXPECT_PARKED", "1")], &[]);
}

#[test]
fn vm_calls_on_native_memory_without_uffd_move() {
    calls_on("native", &[], WITHOUT_MOVE);
}

#[test]
fn vm_calls_on_resident_memory_without_uffd_move() {
    calls_on("resident", &[("ONLY", WHEN_RESIDENT), ("SIZE", SLOW)], WITHOUT_MOVE);
}

#[test]
fn vm_calls_on_parked_memory_without_uffd_move() {
    let settings = [("ONLY", WHEN_PARKED), ("SIZE", SLOW), ("EXPECT_PARKED", "1")];
    calls_on("parked", &settings, WITHOUT_MOVE);
}

fn discards_beside_faults_with(flags: &[&str]) {
    let Some(stage) = Stage::new("vm-threads", DRAM, flags) else { return };
    let mut command = stage.command(&program("vm_threads"));
    if stage.expect_ok(command.env("SIZE", SIZE)) {
        stage.expect_work(recalls_min() / 8);
    }
}

fn discards_refused_with(flags: &[&str]) {
    let Some(stage) = Stage::new("discard-refused", DRAM, flags) else { return };
    let mut command = stage.command(&program("discard_refused"));
    if stage.expect_ok(command.env("SIZE", SIZE)) {
        stage.expect_work(recalls_min() / 8);
    }
}

#[test]
fn discards_that_are_refused() {
    discards_refused_with(&[]);
}

#[test]
fn discards_that_are_refused_without_uffd_move() {
    discards_refused_with(WITHOUT_MOVE);
}

#[test]
fn discards_beside_faults() {
    discards_beside_faults_with(&[]);
}

#[test]
fn discards_beside_faults_without_uffd_move() {
    discards_beside_faults_with(WITHOUT_MOVE);
}

fn with_the_daemon(name: &str) {
    let Some(stage) = Stage::new(name, DRAM, &[]) else { return };
    let status = stage.status();
    let pids = format!("{} {}", status.keeper_pid, status.daemon_pid);
    let mut command = stage.command(&program(&name.replace('-', "_")));
    stage.expect_ok(command.env("SIZE", SIZE).env("DAEMON", pids));
}

#[test]
fn discards_while_the_daemon_is_stopped_and_killed() {
    with_the_daemon("vm-stopped");
}

#[test]
fn vm_calls_without_a_daemon() {
    with_the_daemon("vm-alone");
}

/// Memory past what it has comes from libc, and is not waited for again and again.
#[test]
fn more_memory_than_a_daemon_gave_that_is_gone() {
    let Some(stage) = Stage::new("gone", 1 << 30, &[]) else { return };
    let status = stage.status();
    let pids = format!("{} {}", status.keeper_pid, status.daemon_pid);
    let mut command = stage.command(&program("gone"));
    let settings = [("TIERMGR_REQUIRE", "0"), ("TIERMGR_SMALL", "1"), ("DAEMON", &pids)];
    stage.expect_ok(command.envs(settings));
}

fn nothing_lies_where_a_child_got_nothing(what: &str) {
    // Less is limbo, which a child maps too, than what is not forked.
    let Some(stage) = Stage::new("fork-holes", 128 << 20, &[]) else { return };
    let mut command = stage.command(&program("fork_holes"));
    stage.expect_ok(command.env("WHAT", what).env("SIZE", "96M"));
}

#[test]
fn nothing_lies_in_a_block_where_a_child_got_nothing() {
    nothing_lies_where_a_child_got_nothing("managed");
}

#[test]
fn nothing_lies_in_what_a_child_did_not_get_of_a_mapping_over_a_block() {
    nothing_lies_where_a_child_got_nothing("shared");
}
