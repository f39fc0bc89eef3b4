//! Numbers with types. The only place of the core where one kind of number becomes another.
//!
//! An **extent** is 64 KiB, the unit of state, slots and recalls. A **chunk** is 2 MiB, the size of a
//! huge page and the largest run that one operation moves. Regions begin and end on chunks, so that
//! no run of extents crosses a chunk or a region by accident.

/// Bytes of an extent. Equal to the largest page size that Linux uses, so that an extent is always
/// a whole number of pages.
pub const EXTENT_BYTES: u64 = 64 << 10;
/// Bytes of a chunk: a huge page on x86-64, and the largest single move.
pub const CHUNK_BYTES: u64 = 2 << 20;
/// Extents in a chunk.
pub const CHUNK_EXTENTS: u32 = 32;
/// Most pages that an extent can have: 16 pages of 4 KiB.
pub const EXTENT_PAGES_MAX: u32 = 16;

const _: () = assert!(EXTENT_BYTES * CHUNK_EXTENTS as u64 == CHUNK_BYTES);
const _: () = assert!(EXTENT_BYTES / EXTENT_PAGES_MAX as u64 == 4096);

/// A virtual address of a client. Never dereferenced here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Addr(pub u64);

impl Addr {
    /// The address `bytes` further up.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// The address rounded down to a multiple of `align`, a power of two.
    #[must_use]
    pub const fn align_down(self, align: u64) -> Self {
        Self(self.0 & !(align - 1))
    }
}

/// A half-open range of client addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// First byte.
    pub start: Addr,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// `len` bytes from `start`.
    #[must_use]
    pub const fn new(start: Addr, len: u64) -> Self {
        Self { start, len }
    }

    /// First address behind the range.
    #[must_use]
    pub const fn end(self) -> Addr {
        self.start.plus(self.len)
    }

    /// Whether `addr` lies inside.
    #[must_use]
    pub const fn contains(self, addr: Addr) -> bool {
        addr.0 >= self.start.0 && addr.0 - self.start.0 < self.len
    }

    /// Whether the two share a byte.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($repr:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $repr);
    };
}

id! {
    /// One address space of a client family: the client itself or a forked descendant.
    ProcId(u32)
}
id! {
    /// A managed region, unique within its family.
    RegionId(u32)
}
id! {
    /// Position of an extent's record in the family's flat array of records.
    RecordIndex(u32)
}
id! {
    /// Room for one extent in the store. Slot 0 does not exist: a record of zeros has no slot.
    SlotId(u32)
}
id! {
    /// A chunk of the limbo range of one process.
    LimboBlock(u16)
}
id! {
    /// An operation in flight. Numbers only grow: an outcome with a higher number belongs to work
    /// that was ordered later. 0 is none.
    OpId(u64)
}
id! {
    /// A request of a client that waits for its reply.
    RequestId(u64)
}
id! {
    /// A lease: a promise that a range stays where it is.
    LeaseId(u64)
}

impl SlotId {
    /// "No slot".
    pub const NONE: Self = Self(0);

    /// Whether this names a slot.
    #[must_use]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }

    /// The slot `extents` further on.
    #[must_use]
    pub const fn plus(self, extents: u32) -> Self {
        Self(self.0 + extents)
    }
}

/// Monotonic nanoseconds. The core never asks for the time; it is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

impl Tick {
    /// A time so far away that it never comes.
    pub const NEVER: Self = Self(u64::MAX);

    /// `ns` nanoseconds later.
    #[must_use]
    pub const fn after_ns(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }
}

/// Sizes that depend on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a page: `sysconf(_SC_PAGESIZE)`.
    pub page_bytes: u64,
}

impl Geometry {
    /// Pages in an extent.
    #[must_use]
    pub const fn extent_pages(self) -> u32 {
        low_u32(EXTENT_BYTES / self.page_bytes)
    }

    /// Pages in a chunk.
    #[must_use]
    pub const fn chunk_pages(self) -> u32 {
        self.extent_pages() * CHUNK_EXTENTS
    }

    /// Whether the core can work with this page size.
    #[must_use]
    pub const fn is_supported(self) -> bool {
        self.page_bytes.is_power_of_two()
            && self.page_bytes >= EXTENT_BYTES / EXTENT_PAGES_MAX as u64
            && self.page_bytes <= EXTENT_BYTES
    }
}

/// The low half of a count that is known to fit.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "callers pass counts bounded by limits.rs")]
pub const fn low_u32(value: u64) -> u32 {
    debug_assert!(value <= u32::MAX as u64);
    value as u32
}
