//! The heart of tiermgr: which page is where, what may happen to it next, and what to move.
//!
//! [`manager::Manager::step`] takes the time and one event, and answers with effects. It reads no
//! clock, makes no system call, and touches no memory of a client: the same events at the same ticks
//! give the same effects, in the product and in the simulator.
//!
//! One manager serves one *family*: a client and the processes it forked. Modules stand in the order
//! in which data flows.

#![forbid(unsafe_code)]

pub mod effect;
pub mod event;
pub mod limits;
pub mod manager;
pub mod page;
mod ranges;
pub mod record;
pub mod slots;
pub mod stats;
pub mod stream;
pub mod units;
pub mod watch;
