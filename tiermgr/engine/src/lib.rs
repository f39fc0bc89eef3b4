//! Joins the core to the world.
//!
//! [`driver::Driver`] joins one family's manager to a [`host::Host`]; [`linux::LinuxHost`] is the
//! host of the product. [`executor::Executor`] runs the two on a thread of their own and is what the
//! daemon's sessions hold. All families share one [`store::Store`] and one [`room::Room`], by leases.

#![deny(unsafe_code)]

pub mod driver;
pub mod error;
pub mod executor;
pub mod host;
pub mod linux;
pub mod mailbox;
#[cfg(test)]
mod random;
pub mod room;
#[cfg(test)]
mod scratch;
pub mod slots;
pub mod staging;
pub mod state;
pub mod stats;
pub mod store;
pub mod wake;
