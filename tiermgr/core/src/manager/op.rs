//! Operations in flight. Each waits for exactly one event at a time.

use crate::effect::{BufRange, Buffer};
use crate::page::PageMask;
use crate::units::{Addr, LimboBlock, OpId, ProcId, RegionId, RequestId, SlotId, Span};
use std::collections::BTreeMap;

/// An operation and whose it is.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    pub proc: ProcId,
    /// An address of the region it works on.
    pub at: Addr,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// Brings extents of one chunk in from consecutive slots.
    Fill(Fill),
    /// Installs zeros.
    Zero(Zero),
    /// Brings an extent back from limbo.
    Rescue(Rescue),
    /// Clears write protection of an extent that was written to. Where others have a part of it, in which the kernel
    /// stops: of one page after the other.
    Unprotect { page: Option<u32> },
    /// Write-protects a region after a fork.
    Shield { span: Span },
    /// Moves a run of extents of one chunk to limbo.
    Move { block: LimboBlock, count: u32 },
    /// Write-protects a run of extents of one chunk where they are, for want of a move.
    Guard { block: LimboBlock, count: u32 },
    /// Looks up what a move that stopped did to one extent.
    MoveCheck { block: LimboBlock },
    /// Writes extents of a limbo block to the store.
    Write(Write),
    /// Drops stale extents of a limbo block.
    DropLimbo { block: LimboBlock, mask: u32 },
    /// Makes the pages of an extent that a fork left shared exclusive: unprotect, look which are
    /// there, and have the helper write to these without changing them.
    Prepare(Prepare),
    /// Registers (or, at birth and at the end, unregisters) a range.
    Arm {
        span: Span,
        on: bool,
        then: ArmThen,
        /// Times that the kernel had no memory for it.
        tries: u8,
    },
    /// Reads the map of an extent that has just been armed.
    MapArmed,
    /// Zaps a range that the client gave up.
    Discard {
        span: Span,
        request: Option<RequestId>,
        /// Pages that take room until they are zapped, though no record counts them.
        pages: u64,
    },
    /// Compares a record with the kernel after a restart.
    Look {
        in_place: Option<PageMask>,
        /// Pages that are not there although the record says so are taken as given up.
        strict: bool,
        /// Pages that no record counts and that may be there, until this look shows.
        held_pages: u64,
    },
    /// Counts what a drop that failed has left of an extent in limbo.
    StaleLook { block: LimboBlock },
    /// Looks whether a child without a table has in its place what its parent cannot give it.
    KeptLook,
    /// Proves that no FORK is pending.
    Probe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArmThen {
    /// Answer with the region's number.
    ReplyRegion(RequestId),
    /// Read the maps.
    Map,
    /// Write-protect the region: a forked child's unarmed part.
    Shield,
    /// Registered again after a restart.
    Rearmed,
    /// Disarmed because the region ends.
    Ended,
    /// Disarmed because the process is no longer managed.
    Drained,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    pub buf: BufRange,
    pub count: u32,
    /// Pages of each extent that are being filled are those in state `Filling`.
    pub demand: bool,
    pub write: bool,
    pub slot: SlotId,
    /// Reads that failed so far.
    pub tries: u8,
    /// Pages that every read so far has shown as damaged; at last, those that are lost.
    pub bad: PageMask,
    /// Given up while the device was reading: nothing is installed.
    pub cancelled: bool,
    /// The bytes are here; the piece that is being installed.
    pub piece: Option<Piece>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prepare {
    Unprotecting,
    Looking,
    /// The pages that come after the run that is being populated.
    Populating {
        rest: PageMask,
    },
}

/// A contiguous piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub start: Addr,
    pub len: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Zero {
    /// Pages still to be done, in the extent at `Op::at`.
    pub mask: PageMask,
    /// The piece that is being installed.
    pub piece: Piece,
    /// The record says that the page is there: somebody looks whether it is.
    pub recheck: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Rescue {
    pub buffer: Buffer,
    pub block: LimboBlock,
    pub write: bool,
    pub step: RescueStep,
    /// Room kept for the second copy.
    pub reserved_pages: u64,
    pub tries: u8,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum RescueStep {
    Reading(Piece),
    Checking,
    Copying(Piece),
}

#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub buffer: Buffer,
    pub block: LimboBlock,
    /// Extents in the order in which they lie in the buffer.
    pub extents: Vec<Addr>,
    pub step: WriteStep,
    /// Pieces to write: first slot, first extent in the buffer, count.
    pub pieces: Vec<(SlotId, u32, u32)>,
    /// The extent whose map has been read just now.
    pub looked: Option<usize>,
    /// Short reads so far.
    pub tries: u8,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum WriteStep {
    /// Reading a run of pages that begins in extent `index` and may go on into those behind it.
    Reading { index: usize, piece: Piece },
    /// Looking up why a read was short: extent `index`.
    Checking { index: usize },
    /// Writing `pieces[index]`.
    Writing { index: usize },
}

/// All operations in flight.
#[derive(Debug, Default)]
pub(crate) struct Ops {
    last: u64,
    ops: BTreeMap<OpId, (Op, Option<RegionId>)>,
}

impl Ops {
    /// The number that the next operation gets.
    pub(crate) const fn next(&self) -> OpId {
        OpId(self.last + 1)
    }

    /// `counted_by` is the region that must not end before the operation does.
    pub(crate) fn insert(&mut self, op: Op, counted_by: Option<RegionId>) -> OpId {
        let id = self.next();
        self.last = id.0;
        self.ops.insert(id, (op, counted_by));
        id
    }

    pub(crate) fn get_mut(&mut self, id: OpId) -> Option<&mut Op> {
        self.ops.get_mut(&id).map(|(op, _)| op)
    }

    pub(crate) fn get(&self, id: OpId) -> Option<&Op> {
        self.ops.get(&id).map(|(op, _)| op)
    }

    pub(crate) fn remove(&mut self, id: OpId) -> Option<(Op, Option<RegionId>)> {
        self.ops.remove(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (OpId, &Op)> {
        self.ops.iter().map(|(&id, (op, _))| (id, op))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }
}
