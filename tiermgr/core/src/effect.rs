//! What the manager asks of the world. Each effect with an `op` is answered by exactly one event that
//! carries the same `op`; the others have no answer.

use crate::units::{Addr, LeaseId, OpId, ProcId, RequestId, SlotId, Span};

/// A piece of the staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufRange {
    /// Which buffer.
    pub buf: Buffer,
    /// First byte inside the buffer.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// A staging buffer. The manager hands the numbers out; only the host knows addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// One of the chunk-sized buffers that are lent to the family.
    Stream(u16),
    /// One of the extent-sized buffers, the family's own.
    Demand(u16),
}

/// Work for the helper, which runs inside the client's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `UFFDIO_MOVE` of `len` bytes, holes allowed. Atomic per page.
    Move {
        /// From here.
        from: Addr,
        /// To here, in limbo.
        to: Addr,
        /// Bytes.
        len: u64,
    },
    /// `MADV_DONTNEED`: the pages are gone.
    Drop(Span),
    /// `MADV_POPULATE_WRITE`: makes pages that fork left shared exclusive, without changing them.
    Populate(Span),
}

/// An action in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// `UFFDIO_COPY` of the staged bytes to `to`, waking sleepers. Answer: `Copied`.
    Copy {
        /// Answered with this.
        op: OpId,
        /// Whose address space.
        proc: ProcId,
        /// The bytes.
        from: BufRange,
        /// Where to.
        to: Addr,
        /// Install write-protected.
        protect: bool,
    },
    /// `UFFDIO_COPY` of zeros. Answer: `Copied`.
    Zero {
        /// Answered with this.
        op: OpId,
        /// Whose address space.
        proc: ProcId,
        /// Where to.
        to: Span,
    },
    /// Sets or clears write protection, waking sleepers when it clears. Answer: `Protected`.
    Protect {
        /// Answered with this.
        op: OpId,
        /// Whose address space.
        proc: ProcId,
        /// Where.
        span: Span,
        /// Set (`true`) or clear.
        on: bool,
    },
    /// Tries an ioctl that changes nothing (a `COPY` onto the nonce page), to learn whether a layout
    /// change is queued. Answer: `Protected`, with `Done` where none is.
    Probe {
        /// Answered with this.
        op: OpId,
        /// Whose address space.
        proc: ProcId,
    },
    /// Wakes whoever sleeps on the range, to look again. No answer.
    Wake {
        /// Whose address space.
        proc: ProcId,
        /// Where.
        span: Span,
    },
    /// `UFFDIO_POISON`: accesses raise SIGBUS, and whoever sleeps there is woken once they do. Where the
    /// kernel cannot do that the program is ended, or they sleep on. No answer.
    Poison {
        /// Whose address space.
        proc: ProcId,
        /// Where.
        span: Span,
    },
    /// Registers the range for missing and write-protect faults, or unregisters it (and wakes).
    /// Answer: `Armed`.
    Arm {
        /// Answered with this.
        op: OpId,
        /// Whose address space.
        proc: ProcId,
        /// Where.
        span: Span,
        /// Register (`true`) or unregister.
        on: bool,
    },
    /// Reads the kernel's page table for one extent. Answer: `Mapped`.
    ReadMap {
        /// Answered with this.
        op: OpId,
        /// Whose address space.
        proc: ProcId,
        /// First byte of the extent, in its place or in limbo.
        at: Addr,
    },
    /// Orders helper work. Commands of a process are carried out in the order of their effects.
    /// Answer: `Commanded`.
    Command {
        /// Answered with this.
        op: OpId,
        /// Whose helper.
        proc: ProcId,
        /// What.
        command: Command,
    },
    /// Cancels a command unless the helper has taken it. No answer of its own: the command is still
    /// answered, by its result or by `CommandOutcome::Cancelled`.
    Cancel {
        /// The op of the command.
        op: OpId,
        /// Whose helper.
        proc: ProcId,
    },
    /// `process_vm_readv` into staging. Answer: `LimboRead`.
    ReadLimbo {
        /// Answered with this.
        op: OpId,
        /// Whose address space.
        proc: ProcId,
        /// From here.
        from: Addr,
        /// To here.
        to: BufRange,
    },
    /// Writes staged extents to consecutive slots, with a checksum per page. Answer: `Written`.
    WriteSlots {
        /// Answered with this.
        op: OpId,
        /// The bytes.
        from: BufRange,
        /// First slot.
        slot: SlotId,
    },
    /// Reads consecutive slots into staging and verifies the checksum of every page as it was
    /// written. Answer: `SlotsRead`.
    ReadSlots {
        /// Answered with this.
        op: OpId,
        /// First slot.
        slot: SlotId,
        /// Where to.
        to: BufRange,
        /// A fault waits for it: goes before reads ahead.
        demand: bool,
    },
    /// Asks for more slots. Answered in time by `Event::SlotsGranted`, or by silence when the store
    /// is full.
    WantSlots,
    /// Gives a whole segment of slots back to the store.
    ReturnSlots {
        /// First slot of the segment.
        first: SlotId,
    },
    /// Asks for one more chunk-sized buffer. Answered in time by `Event::StreamLent`, or by silence while
    /// others have them.
    WantStream,
    /// Gives a chunk-sized buffer back: nothing uses it any more.
    ReturnStream {
        /// Its number.
        stream: u16,
    },
    /// Asks for room. Answered in time by `Event::Budget`.
    WantRoom {
        /// Bytes that would be of use.
        bytes: u64,
    },
    /// Answers a client's request.
    Reply {
        /// Which.
        request: RequestId,
        /// With what.
        reply: Reply,
    },
    /// A forked child has all that it gets of its parent, which may be nothing. To be remembered across a restart
    /// before its next event: a fork that is told again gives it what its parent has by then.
    Born {
        /// The child.
        proc: ProcId,
    },
    /// The process needs no more service: forget its descriptors, end its helper.
    Release {
        /// Which.
        proc: ProcId,
    },
}

/// Answers to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done.
    Done,
    /// A region was made.
    Region(crate::units::RegionId),
    /// A lease was made.
    Lease(LeaseId),
    /// How much of a range is where.
    Residency(Residency),
    /// Not done, for this reason.
    Refused(Refusal),
}

/// Bytes of a range, by place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// In DRAM.
    pub resident_bytes: u64,
    /// In the store.
    pub parked_bytes: u64,
    /// Never touched.
    pub absent_bytes: u64,
    /// Left to the kernel: touched or not, it is native memory.
    pub unarmed_bytes: u64,
    /// Lost.
    pub poisoned_bytes: u64,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The range is not inside one region of the client.
    #[error("the range is not inside a managed region")]
    NotManaged,
    /// Not a multiple of what it must be, or empty.
    #[error("the range is empty or not aligned")]
    Misaligned,
    /// It overlaps a region that exists.
    #[error("the range overlaps a managed region")]
    Overlaps,
    /// More than a maximum of ours.
    #[error("a limit is reached: too many regions, leases or records")]
    TooMany,
    /// The pin would leave no room for anything else.
    #[error("pinning this would exceed what may be pinned")]
    NoRoom,
    /// No room for what is to be remembered of it.
    #[error("the state directory has no room for the records of the region")]
    NoStateRoom,
    /// The kernel could not register the range.
    #[error(
        "the kernel has no memory to register the range: a program with very many mappings is at its \
         limit (raise it with `sysctl vm.max_map_count`), or memory is short"
    )]
    NoMappings,
    /// There is no such lease.
    #[error("no such lease")]
    NoLease,
    /// The process is unknown or going away.
    #[error("the process is not attached")]
    NotAttached,
    /// Everything parked was to come back, and does not fit.
    #[error("what is parked does not fit into memory")]
    DoesNotFit,
    /// Bytes of the range were lost by a device.
    #[error("bytes of the range were lost by the store")]
    Lost,
    /// It cannot be left to the kernel: pages of it were lost by a device, and we answer their next
    /// touch.
    #[error(
        "pages of the program were lost by the store, and would read as zeros without the daemon: end \
         the program, or have it give these pages up"
    )]
    StaysForLost,
}
