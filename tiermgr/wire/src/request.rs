//! What a client or `tiermgrctl` may send.

use crate::control::ControlRequest;
use crate::hello::{Attach, Hello};
use serde::{Deserialize, Serialize};

/// Options of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionOptions {
    /// What lies in it; sets defaults of the policy.
    pub kind: Kind,
}

/// What kind of data a region holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Ordinary memory of a program.
    #[default]
    Heap,
    /// Model weights: written once, read in order.
    Weights,
    /// A key-value cache.
    Kv,
    /// Activations.
    Activation,
}

/// Advice about a range. Numbers are those of `tiermgr_advice` in the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Advice {
    /// No advice any more.
    Normal,
    /// Will be needed soon.
    WillNeed,
    /// Will not be needed for a while.
    Cold,
    /// Read in ascending order.
    Sequential,
    /// In no order.
    Random,
    /// In ascending order again and again.
    Cyclic,
    /// Written rarely.
    ReadMostly,
}

/// Every message to the daemon. Addresses and lengths are bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// First message.
    Hello(Hello),
    /// Second message of a client or a forked child.
    Attach(Attach),
    /// Manage a range. Answer: `Region`.
    AddRegion {
        /// A multiple of 2 MiB.
        start: u64,
        /// A multiple of 2 MiB.
        len: u64,
        /// Options.
        options: RegionOptions,
        /// For lists; at most 64 bytes are kept.
        name: String,
    },
    /// Stop managing a region whose bytes are no longer needed. Answer: `Done`.
    DropRegion {
        /// From `Region`.
        region: u32,
    },
    /// The bytes are no longer needed; the next read gives zeros. Answer: `Done`.
    Discard {
        /// Page-aligned.
        start: u64,
        /// Page-aligned.
        len: u64,
    },
    /// Advice. Answer: `Done`.
    Advise {
        /// Page-aligned.
        start: u64,
        /// Page-aligned.
        len: u64,
        /// What about it.
        advice: Advice,
    },
    /// Bring in, without waiting. Answer: `Done`.
    Prefetch {
        /// Page-aligned.
        start: u64,
        /// Page-aligned.
        len: u64,
    },
    /// Bring in and hold. Answer: `Lease`, when it is there.
    Pin {
        /// Page-aligned.
        start: u64,
        /// Page-aligned.
        len: u64,
    },
    /// End a lease. Answer: `Done`.
    Unpin {
        /// From `Lease`.
        lease: u64,
    },
    /// Where is it? Answer: `Residency`.
    Residency {
        /// Page-aligned.
        start: u64,
        /// Page-aligned.
        len: u64,
    },
    /// Counters of this family. Answer: `Stats`.
    Stats,
    /// Only on a connection whose role is `Control`.
    Control(ControlRequest),
}
