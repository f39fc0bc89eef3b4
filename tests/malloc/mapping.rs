//! Programs whose own mappings are managed.

use crate::stage::{Stage, run_within};
use crate::{WITHOUT_MOVE, at_half, at_half_with, program, recalls_min};
use std::process::Command;
use std::time::Duration;

const MAPPED: (&str, &str) = ("TIERMGR_MMAP", "1");
const LITTLE_TOO: (&str, &str) = ("TIERMGR_MMAP_MIN", "64K");
const SMALL: (&str, &str) = ("TIERMGR_SMALL", "1");
/// As in `vm.rs`; the daemon itself takes 17 MiB of it.
const DRAM: u64 = 40 << 20;
const SIZE: &str = "48M";

fn mapped(name: &str, settings: &[(&str, &str)], recalled_pages_min: u64, flags: &[&str]) {
    let Some(stage) = Stage::new(&name.replace('_', "-"), DRAM, flags) else { return };
    let status = stage.status();
    let mut command = stage.command(&program(name));
    command.env("SIZE", SIZE).env("DAEMON", status.keeper_pid.to_string());
    command.envs([MAPPED, LITTLE_TOO]).envs(settings.iter().copied());
    if stage.expect_ok(&mut command) {
        stage.expect_work(recalled_pages_min);
    }
}

#[test]
fn calls_on_native_mappings() {
    mapped("vm_calls", &[("MAPPED", "1"), ("STATE", "native")], 0, &[]);
}

#[test]
fn calls_on_resident_mappings() {
    mapped("vm_calls", &[("MAPPED", "1"), ("STATE", "resident")], recalls_min(), &[]);
}

#[test]
fn calls_on_parked_mappings() {
    let settings = [("MAPPED", "1"), ("STATE", "parked"), ("EXPECT_PARKED", "1")];
    mapped("vm_calls", &settings, recalls_min(), &[]);
}

#[test]
fn calls_on_parked_mappings_without_uffd_move() {
    let only = ("ONLY", "|munmap|mmap over it|mremap|mremap to a place|");
    let settings = [("MAPPED", "1"), ("STATE", "parked"), ("SIZE", "32M"), only];
    mapped("vm_calls", &settings, recalls_min() / 2, WITHOUT_MOVE);
}

#[test]
fn raw_clones_wait_for_no_thread_that_they_lack() {
    mapped("map_raw", &[], recalls_min() / 2, &[]);
}

/// What the programs state is what Linux does.
#[test]
fn mappings_of_linux() {
    let settings = [("MAPPED", "1"), ("FORKS", "3"), ("SECONDS", "1"), ("SIZE", SIZE)];
    for name in ["vm_calls", "map_walk", "map_storm", "map_edges", "map_raw"] {
        let mut command = Command::new(program(name));
        let output = run_within(command.envs(settings), Duration::from_secs(100));
        let output = output.expect("ends in time");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_random_walk_over_mappings() {
    mapped("map_walk", &[("SEED", "1"), ("STEPS", "1000")], recalls_min(), &[]);
}

#[test]
fn another_random_walk_over_mappings() {
    mapped("map_walk", &[("SEED", "2"), ("STEPS", "1000")], recalls_min(), &[]);
}

#[test]
fn a_random_walk_over_mappings_beside_small_objects() {
    mapped("map_walk", &[SMALL, ("SEED", "3"), ("STEPS", "700")], recalls_min(), &[]);
}

#[test]
fn a_random_walk_over_mappings_without_uffd_move() {
    let settings = [("SEED", "4"), ("STEPS", "300"), ("SIZE", "32M")];
    mapped("map_walk", &settings, 0, WITHOUT_MOVE);
}

#[test]
fn a_storm_of_mappings() {
    mapped("map_storm", &[], recalls_min(), &[]);
}

#[test]
fn a_storm_of_mappings_and_forks() {
    mapped("map_storm", &[("FORKS", "10")], recalls_min(), &[]);
}

#[test]
fn a_storm_of_mappings_beside_small_objects() {
    mapped("map_storm", &[SMALL, ("FORKS", "3"), ("SECONDS", "3")], recalls_min(), &[]);
}

#[test]
fn a_storm_of_mappings_without_uffd_move() {
    mapped("map_storm", &[("FORKS", "2"), ("SECONDS", "3")], recalls_min() / 2, WITHOUT_MOVE);
}

#[test]
fn mappings_while_the_daemon_is_killed() {
    mapped("map_killed", &[], 0, &[]);
}

#[test]
fn handlers_may_take_mappings_back() {
    mapped("map_handlers", &[], 0, &[]);
}

#[test]
fn mappings_without_a_daemon() {
    let Some(stage) = Stage::new("map-alone", DRAM, &[]) else { return };
    let status = stage.status();
    let mut command = stage.command(&program("map_killed"));
    command.env("DAEMON", status.keeper_pid.to_string()).env("ALONE", "1");
    stage.expect_ok(command.envs([MAPPED, LITTLE_TOO]));
}

#[test]
fn edges_of_mappings_and_no_room_is_refused() {
    edges(&[("THEN", "refused")]);
}

#[test]
fn edges_of_mappings_and_no_room_is_left_to_the_kernel() {
    edges(&[("THEN", "native"), ("TIERMGR_REQUIRE", "0")]);
}

#[test]
fn edges_of_mappings_beside_small_objects() {
    edges(&[SMALL]);
}

fn edges(settings: &[(&str, &str)]) {
    let Some(stage) = Stage::new("map-edges", 2 * DRAM, &[]) else { return };
    let mut command = stage.command(&program("map_edges"));
    if stage.expect_ok(command.env(MAPPED.0, MAPPED.1).envs(settings.iter().copied())) {
        stage.expect_work(0);
    }
}

/// Programs that are about malloc and map memory beside it.
#[test]
fn storm_of_madvise_and_munmap_on_mappings() {
    at_half("storm", &[MAPPED, LITTLE_TOO], recalls_min() / 2);
    at_half_with("storm", &[MAPPED, LITTLE_TOO, SMALL], recalls_min() / 2, &[]);
}

#[test]
fn system_calls_beside_mappings() {
    at_half("syscalls", &[MAPPED, ("EXPECT_PARKED", "1")], recalls_min());
}

/// What jemalloc maps for its tables is not taken for a mapping of the program's.
#[test]
fn tables_of_jemalloc_stay_out_of_managed_memory() {
    crate::small::with_library("small_border", &[MAPPED, LITTLE_TOO], 0, &[]);
}

#[test]
fn without_a_daemon_mappings_are_the_kernels() {
    crate::without_a_daemon(&program("map_edges"), &[MAPPED]);
}
