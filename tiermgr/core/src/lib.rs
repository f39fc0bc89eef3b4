//! The heart of tiermgr: which page is where, and what may happen to it next.
//!
//! It reads no clock, makes no system call, and touches no memory of a client. Modules stand in the
//! order in which data flows.

#![forbid(unsafe_code)]

pub mod units;
pub mod page;
