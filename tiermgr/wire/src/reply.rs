//! What the daemon answers.

use crate::control::{ControlReply, FamilyStats};
use crate::hello::Welcome;
use serde::{Deserialize, Serialize};

/// Why something was refused. The numbers are those of `tiermgr_status` in the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorCode {
    /// The arguments are wrong.
    InvalidArgument,
    /// The range is not managed.
    NotManaged,
    /// A limit is reached, or there is no room.
    NoRoom,
    /// The peer may not do this.
    NotPermitted,
    /// The daemon or the kernel cannot do this.
    Unsupported,
    /// Client and daemon are of different versions.
    VersionMismatch,
    /// The message made no sense at this point.
    Protocol,
    /// A device failed and bytes were lost.
    DataLost,
    /// The daemon is ending; to the greeting of a process that an earlier one served: it does not serve it yet.
    ShuttingDown,
    /// Something failed inside the daemon; its log says what.
    Internal,
}

/// Answers, one for each request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromDaemon {
    /// To `Hello` of a client or a child.
    Welcome(Welcome),
    /// To `Hello` of a control connection, and of a process that is attached already. Descriptors: for one
    /// that lacks it the userfaultfd of its arenas.
    Ready,
    /// To `Attach`. Descriptors: for a forked child the userfaultfd of its arenas, for a client none.
    Attached,
    /// Done.
    Done,
    /// A region's number.
    Region(u32),
    /// A lease's number.
    Lease(u64),
    /// Bytes by place.
    Residency {
        /// In DRAM.
        resident_bytes: u64,
        /// In the store.
        parked_bytes: u64,
        /// Never touched.
        absent_bytes: u64,
        /// Native memory, touched or not.
        unarmed_bytes: u64,
        /// Lost.
        poisoned_bytes: u64,
    },
    /// Counters.
    Stats(FamilyStats),
    /// To a control request.
    Control(ControlReply),
    /// Not done.
    Error {
        /// For programs.
        code: ErrorCode,
        /// For people: cause and next step.
        message: String,
    },
}
