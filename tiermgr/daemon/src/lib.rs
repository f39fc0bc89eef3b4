//! `tiermgrd`, the daemon: configuration, sessions and process life around the engine.
//!
//! Two processes: the *keeper* ([`keeper`]) holds descriptors and makes the *serving process*, which
//! has one main thread ([`daemon`]), one thread for each connection ([`session`]) and, in the engine,
//! one for each family. Nothing in this crate lies in the fault path.
//!
//! Modules in the order in which they matter from start to request.

#![forbid(unsafe_code)]

pub mod admit;
pub mod cli;
pub mod config;
pub mod control;
pub mod daemon;
pub mod exit;
pub mod families;
pub mod keeper;
pub mod log;
pub mod manual;
pub mod notify;
pub mod protocol;
pub mod session;
pub mod start;
