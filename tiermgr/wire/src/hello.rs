//! The first messages of a connection.
//!
//! A client sends `ToDaemon::Hello`, gets `FromDaemon::Welcome` with three descriptors (the userfaultfd
//! device, the ring's memfd and the ring's eventfd), makes its userfaultfds with
//! `USERFAULTFD_IOC_NEW`, maps limbo and the nonce page, starts its helper, and sends
//! `ToDaemon::Attach` with its userfaultfds. Handshake and registration are the daemon's.

use serde::{Deserialize, Serialize};

/// Who gives way to whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Keeps its room longest.
    Latency,
    /// The default.
    #[default]
    Standard,
    /// Gives way first.
    Bulk,
}

/// What the peer is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// A program that wants memory managed. Begins a new family.
    Client {
        /// For lists; at most 64 bytes are kept.
        name: String,
        /// Who gives way.
        class: Class,
    },
    /// A forked child of a client: joins the family of its parent. Also a process that lost its connection.
    ForkedChild {
        /// `Welcome::family` of the parent.
        family: u64,
        /// It has no userfaultfd of its arenas: `FromDaemon::Ready` brings it.
        lacks_arena: bool,
    },
    /// `tiermgrctl`.
    Control,
}

/// First message of every connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::VERSION`].
    pub version: u16,
    /// What the peer is.
    pub role: Role,
}

/// Answer to a client's or a child's hello. Descriptors: userfaultfd device, ring memfd, ring
/// eventfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Number of the family; unguessable, since a child proves its descent with it (and by a nonce).
    pub family: u64,
    /// Bytes of limbo to reserve, a multiple of 2 MiB.
    pub limbo_bytes: u64,
    /// Bytes to reserve for the first arena of a heap: each costs the daemon memory for its records.
    pub arena_bytes: u64,
    /// Length of the ring's memfd in bytes.
    pub ring_bytes: u64,
    /// The kernel has `UFFDIO_MOVE`. Without it no limbo is used and the helper only drops.
    pub has_move: bool,
}

/// What the client made. Descriptors: for a client the userfaultfd of its arenas, then that of
/// limbo; for a forked child only that of limbo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// First byte of limbo, a multiple of 2 MiB.
    pub limbo_start: u64,
    /// A private anonymous page of its own that nobody touches. A child has its parent's.
    pub nonce_page: u64,
    /// The helper, as the client's pid namespace numbers it.
    pub helper_pid: i32,
}
