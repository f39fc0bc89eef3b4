//! What the world tells the manager.

use crate::page::PageMask;
use crate::units::{Addr, LeaseId, OpId, ProcId, RegionId, RequestId, SlotId, Span};

/// How an attempt to install or protect pages ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoctlOutcome {
    /// All of it.
    Done,
    /// `EAGAIN`: a layout change is queued. Read messages, then try the rest again.
    EventsPending,
    /// `EEXIST`: a page was already there. Sleepers still need a wake.
    Exists,
    /// `ENOENT`, `EINVAL`: the range is not (or no longer as a whole) registered.
    NoRange,
    /// `ESRCH`: the address space is gone.
    NoProcess,
    /// `ENOMEM` and the like: the kernel has no memory for it now.
    NoMemory,
}

/// How a command to the helper ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    /// All of it.
    Done,
    /// It stopped: pages that are pinned or shared with a forked process (`EBUSY`).
    Busy,
    /// It stopped for another reason (`EAGAIN`, `EEXIST`, `EINVAL`, `ENOENT`): what came of it must
    /// be looked up page by page.
    Stopped,
    /// Cancelled before it was begun: nothing happened.
    Cancelled,
    /// The helper is dead: nothing happened, and nothing will.
    NoHelper,
}

/// Advice of a client about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Will be needed soon.
    WillNeed,
    /// Will not be needed for a while: park it first.
    Cold,
    /// Read in ascending order.
    Sequential,
    /// In no order: do not read ahead.
    Random,
    /// In ascending order again and again: keep a part, let the rest pass through.
    Cyclic,
    /// Written rarely.
    ReadMostly,
    /// No advice any more.
    Normal,
}

/// What a client asks for, already checked for form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Take `span` under management. Answer: `Reply::Region`.
    AddRegion {
        /// Chunk-aligned, private, anonymous, writable, never touched so far.
        span: Span,
    },
    /// The client is about to unmap the region. After the answer nothing of ours happens there.
    DropRegion {
        /// Which.
        region: RegionId,
    },
    /// The bytes of `span` are no longer needed; the next read gives zeros.
    Discard {
        /// Page-aligned, inside one region.
        span: Span,
    },
    /// Advice.
    Advise {
        /// Page-aligned, inside one region.
        span: Span,
        /// What about it.
        advice: Advice,
    },
    /// Bring `span` in. Answered at once; the work goes on.
    Prefetch {
        /// Page-aligned, inside one region.
        span: Span,
    },
    /// Bring `span` in and hold it there. Answered when it is there.
    Pin {
        /// Page-aligned, inside one region.
        span: Span,
    },
    /// End a lease.
    Unpin {
        /// Which.
        lease: LeaseId,
    },
    /// Where is `span`?
    Residency {
        /// Page-aligned, inside one region.
        span: Span,
    },
    /// Bring everything of the process back, disarm, and manage it no longer.
    Drain,
}

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A client or a forked child can be served. `limbo` is its limbo range (chunk-aligned, armed);
    /// a process without one never parks. For a child this follows its `Forked`.
    ProcReady {
        /// Which.
        proc: ProcId,
        /// Its limbo range, empty where there is none.
        limbo: Span,
    },
    /// The process has exited, or replaced its image.
    ProcGone {
        /// Which.
        proc: ProcId,
    },
    /// A client asks.
    Asked {
        /// Answered with this.
        request: RequestId,
        /// By whom.
        proc: ProcId,
        /// For what.
        what: Request,
    },
    /// A thread sleeps on a page.
    Faulted {
        /// In whose address space.
        proc: ProcId,
        /// Where.
        at: Addr,
        /// It wants to write.
        write: bool,
        /// The page is there and write-protected.
        protected: bool,
    },
    /// `parent` has forked; `child` is its copy, served through a descriptor of its own from now on.
    Forked {
        /// Who forked.
        parent: ProcId,
        /// A number that was not in use.
        child: ProcId,
    },
    /// The client unmapped or remapped armed memory without telling us.
    Unmapped {
        /// Whose.
        proc: ProcId,
        /// What is no longer there.
        span: Span,
    },
    /// Outcome of `Copy` and `Zero`.
    Copied {
        /// Which.
        op: OpId,
        /// Bytes installed, from the front.
        bytes: u64,
        /// How it ended.
        outcome: IoctlOutcome,
    },
    /// Outcome of `Protect` and of `Probe`.
    Protected {
        /// Which.
        op: OpId,
        /// How it ended.
        outcome: IoctlOutcome,
    },
    /// Outcome of `Arm`.
    Armed {
        /// Which.
        op: OpId,
        /// How it ended.
        outcome: IoctlOutcome,
    },
    /// Outcome of `ReadMap`.
    Mapped {
        /// Which.
        op: OpId,
        /// Pages of the extent that are mapped. Swap entries and write-protect markers are not.
        present: PageMask,
        /// The address space could be read.
        known: bool,
    },
    /// Outcome of `Command`.
    Commanded {
        /// Which.
        op: OpId,
        /// Bytes done from the front, holes included.
        bytes: u64,
        /// How it ended.
        outcome: CommandOutcome,
    },
    /// Outcome of `ReadLimbo`.
    LimboRead {
        /// Which.
        op: OpId,
        /// Bytes read from the front.
        bytes: u64,
    },
    /// Outcome of `WriteSlots`.
    Written {
        /// Which.
        op: OpId,
        /// All of it is in the store.
        ok: bool,
    },
    /// Outcome of `ReadSlots`.
    SlotsRead {
        /// Which.
        op: OpId,
        /// The device gave all the bytes.
        ok: bool,
        /// Where `ok`: the pages whose checksum was wrong. Bit 0 stands for the first page of any of
        /// the extents that were read.
        damaged: PageMask,
    },
    /// The store granted a segment.
    SlotsGranted {
        /// First slot.
        first: SlotId,
        /// How many.
        count: u32,
    },
    /// A chunk-sized buffer was lent.
    StreamLent {
        /// Its number, below `STREAM_BUFFERS`, and no other that is lent has it.
        stream: u16,
    },
    /// Whether others wait for chunk-sized buffers: each goes back after one use then.
    StreamsShort {
        /// They do.
        short: bool,
    },
    /// How many bytes the family may have in DRAM from now on, limbo included.
    Budget {
        /// Bytes.
        bytes: u64,
    },
    /// A deadline that the manager asked for has come.
    TimerFired,
}
