//! The same programs with small blocks managed too, and those that are about small blocks.

use crate::stage::{Stage, compile, working_set};
use crate::{WITHOUT_MOVE, at_half_with, program, recalls_min, source};
use std::ffi::OsStr;

const SMALL: (&str, &str) = ("TIERMGR_SMALL", "1");

fn small_at_half(name: &str, settings: &[(&str, &str)], recalled_pages_min: u64) {
    at_half_with(name, &[&[SMALL], settings].concat(), recalled_pages_min, &[]);
}

fn small_without_move(name: &str, settings: &[(&str, &str)], recalled_pages_min: u64) {
    at_half_with(name, &[&[SMALL], settings].concat(), recalled_pages_min, WITHOUT_MOVE);
}

#[test]
fn sixteen_threads() {
    small_at_half("threads", &[("THREADS", "16")], recalls_min());
}

#[test]
fn realloc_growth() {
    small_at_half("realloc_growth", &[], 0);
}

#[test]
fn fork_under_pressure() {
    small_at_half("fork_pressure", &[], recalls_min());
}

#[test]
fn fork_and_exec_a_thousand_times() {
    small_at_half("fork_exec", &[], recalls_min() / 2);
}

#[test]
fn fork_and_the_parent_exits() {
    small_at_half("fork_parent_exits", &[], recalls_min());
}

#[test]
fn threads_exit_while_others_fault() {
    small_at_half("thread_exit", &[], recalls_min() / 2);
}

#[test]
fn read_only_weights() {
    small_at_half("readonly", &[], recalls_min());
}

#[test]
fn locked_memory() {
    small_at_half("locked", &[], 0);
}

#[test]
fn storm_of_madvise_and_munmap() {
    small_at_half("storm", &[], recalls_min() / 2);
}

#[test]
fn system_calls_on_parked_memory() {
    small_at_half("syscalls", &[("EXPECT_PARKED", "1")], recalls_min());
}

#[test]
fn descriptors_are_guarded() {
    small_at_half("descriptors", &[], 0);
}

#[test]
fn objects_of_one_thread() {
    small_at_half("small_churn", &[("THREADS", "1")], recalls_min());
}

#[test]
fn objects_of_eight_threads() {
    small_at_half("small_churn", &[("THREADS", "8")], recalls_min());
}

#[test]
fn objects_of_eight_threads_without_uffd_move() {
    small_without_move("small_churn", &[("THREADS", "8")], recalls_min());
}

#[test]
fn objects_that_others_free() {
    small_at_half("small_queue", &[], recalls_min() / 2);
}

#[test]
fn forks_among_threads_that_allocate() {
    with_library("small_fork", &[], recalls_min(), &[]);
}

#[test]
fn forks_among_threads_that_allocate_without_uffd_move() {
    with_library("small_fork", &[], recalls_min(), WITHOUT_MOVE);
}

#[test]
fn borders_owners_and_what_the_allocator_says() {
    with_library("small_border", &[], 0, &[]);
}

#[test]
fn handlers_may_fork_in_the_middle_of_the_allocator() {
    small_at_half("small_handler_forks", &[], 0);
}

#[test]
fn a_fork_that_is_interrupted_by_a_fork_ends_as_any_other() {
    crate::manners::fork_inside(&[SMALL]);
}

/// Runs a program whose library is older than the allocator.
pub(crate) fn with_library(
    name: &str,
    settings: &[(&str, &str)],
    recalled_pages_min: u64,
    flags: &[&str],
) {
    let Some(stage) = Stage::new(name, working_set() / 2, flags) else { return };
    let shared = ["-std=gnu11", "-shared", "-fPIC"].map(OsStr::new);
    let library = compile("cc", &[source("small_library.c")], "libsmall-linked.so", &shared);
    let flags = [OsStr::new("-std=gnu11"), OsStr::new("-Wl,--no-as-needed"), library.as_os_str()];
    let program = compile("cc", &[source(&format!("{name}.c"))], &format!("malloc-{name}"), &flags);
    stage.expect_ok(stage.command(&program).env(SMALL.0, SMALL.1).envs(settings.iter().copied()));
    stage.expect_work(recalled_pages_min);
}

#[test]
fn before_main_and_after_it() {
    crate::early(&[SMALL]);
}

/// A program that uses nothing else finds no daemon: libc serves it, and the line is one.
#[test]
fn without_a_daemon() {
    crate::without_a_daemon(&program("conformance"), &[SMALL]);
}
