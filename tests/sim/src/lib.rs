//! The production engine in a simulated world.
//!
//! [`run()`] joins the production `engine::driver` and the whole of `core` to a world that exists only
//! in memory: a kernel, helpers, a store, and programs that know what they must read. Everything
//! that can differ between two runs is drawn from one seed, so a seed is a complete description of
//! a run, and a red run prints the command that repeats it.
//!
//! The world has no threads. Each program thread, helper and device is an actor with a next step;
//! [`world::World::act`] chooses who goes next, also between two effects of the daemon. Checkers look at
//! the whole after every turn; see [`checkers`] for what each would mean to a user.

pub mod checkers;
pub mod client;
mod group;
pub mod helper;
pub mod host;
pub mod kernel;
pub mod kill;
pub mod records;
pub mod rng;
pub mod run;
pub mod scenario;
pub mod store;
pub mod trace;
pub mod watchdog;
pub mod workload;
pub mod world;

pub use run::{Failure, Outcome, Plan, run, run_plan};

/// A count as an index. The simulator runs on 64-bit machines only.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits where the simulator runs")]
pub const fn ix(count: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    count as usize
}

/// A small count as 32 bits.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "counts of a tiny world")]
pub const fn n32(count: usize) -> u32 {
    debug_assert!(count <= u32::MAX as usize);
    count as u32
}

/// The same, from 64 bits.
#[must_use]
pub const fn low32(count: u64) -> u32 {
    n32(ix(count))
}
