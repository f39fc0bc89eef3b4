//! What survives the daemon: one record for each extent, kept where a restart finds it.

use crate::page::{PageState, PageStates};
use crate::units::{Addr, LimboBlock, ProcId, RecordIndex, RegionId, SlotId};

/// The durable truth about one extent.
///
/// Order of the stores, so that a kill between any two leaves a record that is true: the slot is
/// stored before a state that needs it, and forgotten after the last such state. A record of zeros
/// is an extent that was never touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExtentRecord {
    /// The state of each page.
    pub states: PageStates,
    /// Where the slot copy of the pages that need one lies.
    pub slot: SlotId,
    /// The limbo chunk that holds the pages in limbo, plus one; 0 where none does. The position
    /// inside is the extent's position in its own chunk.
    pub limbo_plus_one: u16,
}

impl ExtentRecord {
    /// The limbo chunk, where there is one.
    #[must_use]
    pub const fn limbo(self) -> Option<LimboBlock> {
        match self.limbo_plus_one {
            0 => None,
            n => Some(LimboBlock(n - 1)),
        }
    }

    /// Whether the record keeps its slot alive.
    #[must_use]
    pub fn holds_slot(self) -> bool {
        self.slot.is_some() && self.states.any(PageState::needs_slot)
    }
}

/// What is to be known about a region after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRecord {
    /// The process whose address space it is in.
    pub proc: ProcId,
    /// Its number.
    pub region: RegionId,
    /// First address, a multiple of the chunk size.
    pub base: Addr,
    /// Length in extents, a multiple of the extents of a chunk.
    pub extents: u32,
    /// Its first record.
    pub first: RecordIndex,
    /// Length, from the base, of the part that is not armed, in extents.
    pub unarmed_extents: u32,
}

/// Durable storage for records. In the product a file in a tmpfs that only root can read, mapped
/// shared; in the simulator a vector that outlives the simulated daemon.
pub trait Records {
    /// The record at `at`. Records never set are all zeros.
    fn get(&self, at: RecordIndex) -> ExtentRecord;
    /// Replaces the record at `at`, slot first where a state needs it, states last.
    fn set(&mut self, at: RecordIndex, record: ExtentRecord);
    /// Makes sure that `count` records from `first`, and their region in the directory, can be stored
    /// from now on. False, and nothing held, where there is no room for them.
    fn reserve(&mut self, first: RecordIndex, count: u32) -> bool;
    /// Zeros `count` records from `first` and gives their memory back.
    fn clear(&mut self, first: RecordIndex, count: u32);
    /// Adds a region to the durable directory, or replaces the one with the same process and number.
    fn put_region(&mut self, region: RegionRecord);
    /// Takes a region out of the durable directory.
    fn drop_region(&mut self, proc: ProcId, region: RegionId);
    /// All regions in the durable directory, in ascending order of process and number.
    fn regions(&self) -> Vec<RegionRecord>;
}
