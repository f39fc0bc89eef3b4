//! Parking on kernels without `UFFDIO_MOVE` (before Linux 6.8): pages rest where they are.
//!
//! An extent is write-protected, rests for the probation, is read and written to the store, recorded
//! as parked, and dropped by the helper. A write meanwhile raises a fault, and the extent stays. Unlike
//! limbo, this sees no reads, and a device that began to write into a page before it was protected
//! is noticed by nobody: the probation must outlast such transfers, which is why nothing shortens it.
//! Between the record and the drop the extent is *leaving*: nothing may fill its place.

use super::Manager;
use super::Waiting;
use super::fault::Served;
use super::limbo::{forget_stale, note_stale, settle_block};
use super::op::{Kind, Op};
use super::shared::Shared;
use super::space::{Block, Space, Stage, extent_mask, position, runs};
use crate::effect::Effect;
use crate::event::{CommandOutcome, IoctlOutcome};
use crate::page::{PageMask, PageState};
use crate::record::Records;
use crate::units::{Addr, CHUNK_BYTES, EXTENT_BYTES, LimboBlock, OpId, ProcId, Span};

impl<R: Records> Manager<R> {
    /// The write protection that begins a rest is set, or could not be.
    pub(super) fn on_guarded(
        &mut self,
        id: OpId,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let shared = &mut self.shared;
        let Some(proc) = shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(Op { at, kind: Kind::Guard { block, count }, .. }) = shared.end(space, id) else {
            return;
        };
        if let Some(index) = space.region_index(at) {
            let first = space.regions[index].extent_of(at);
            for extent in first..first + count {
                if outcome != IoctlOutcome::Done {
                    Self::refuse_extent(shared, space, index, extent, block, PageMask::MAX);
                }
                Shared::<R>::unlock(proc, &mut space.regions[index], extent, id, effects);
            }
        }
        space.block(block).ops -= 1;
        settle_block(shared, space, block);
    }

    /// A fault on an extent that rests in its place: it stays.
    pub(super) fn stay(
        &mut self,
        fault: Waiting,
        desperate: bool,
        effects: &mut Vec<Effect>,
    ) -> Served {
        // A page that is missing although it rests here was dropped by the client: with the record as
        // it was before the rest, whoever looks finds that out.
        self.unrest(fault.proc, fault.at.align_down(EXTENT_BYTES));
        self.serve(fault, desperate, effects)
    }

    /// Takes an extent out of its rest.
    fn unrest(&mut self, proc: ProcId, at: Addr) {
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(index) = space.region_index(at) else {
            return;
        };
        let extent = space.regions[index].extent_of(at);
        // One all of whose pages turned out to be missing is in no block by its record.
        let bit = extent_mask(position(at), 1);
        let home = at.align_down(CHUNK_BYTES);
        let holds = |b: &Block| b.mask & bit != 0 && b.home == home;
        let block = shared.record(&space.regions[index], extent).limbo().or_else(|| {
            let at = space.blocks.iter().position(holds)?;
            u16::try_from(at).ok().map(LimboBlock)
        });
        let Some(block) = block else {
            return;
        };
        Self::refuse_extent(shared, space, index, extent, block, PageMask::MAX);
        space.block(block).mask &= !bit;
        settle_block(shared, space, block);
    }

    /// Without a helper nobody drops what is leaving: whatever is still there stays.
    pub(super) fn keep_in_place(&mut self, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        for space in self.spaces.values_mut().filter(|s| s.in_place && !s.has_helper) {
            for index in 0..space.blocks.len() {
                let Block { home, stale, ops: 0, .. } = space.blocks[index] else {
                    continue;
                };
                let Ok(block) = u16::try_from(index).map(LimboBlock) else {
                    break;
                };
                if stale != 0 {
                    left_place(shared, space, home, stale, CommandOutcome::NoHelper, effects);
                    forget_stale(shared, space.block(block), stale);
                    settle_block(shared, space, block);
                }
            }
        }
    }

    /// Before a fork is followed: what rests stays, since the child sees it in its place.
    pub(super) fn all_stay(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let Some(space) = self.spaces.get(&proc) else {
            return;
        };
        let mut resting = Vec::new();
        for block in space.blocks.iter().filter(|b| b.ops == 0) {
            for (first, count) in runs(block.mask) {
                for n in first..first + count {
                    resting.push(block.home.plus(u64::from(n) * EXTENT_BYTES));
                }
            }
        }
        for at in resting {
            self.unrest(proc, at);
            self.dirty_extent(proc, at);
            let Some(space) = self.spaces.get_mut(&proc) else {
                return;
            };
            let id =
                self.shared.begin(space, Op { proc, at, kind: Kind::Unprotect { page: None } });
            if let Some(region) = space.region_at_mut(at) {
                let extent = region.extent_of(at);
                Shared::<R>::lock(region, extent, id);
            }
            self.issue(id, effects);
        }
    }
}

/// The helper has dropped parked extents from their place, or could not.
pub(super) fn left_place<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    home: Addr,
    mask: u32,
    outcome: CommandOutcome,
    effects: &mut Vec<Effect>,
) {
    let proc = space.id;
    if outcome == CommandOutcome::Cancelled {
        return;
    }
    for (first, count) in runs(mask) {
        for n in first..first + count {
            let at = home.plus(u64::from(n) * EXTENT_BYTES);
            let Some(index) = space.region_index(at) else {
                continue;
            };
            let extent = space.regions[index].extent_of(at);
            let note = space.regions[index].note_mut(extent);
            note.leaving = false;
            if outcome == CommandOutcome::Done {
                if std::mem::take(&mut note.wake) {
                    effects.push(Effect::Wake { proc, span: Span::new(at, EXTENT_BYTES) });
                }
                continue;
            }
            // What is still there is the newest; it must not be filled over, nor sleep protected.
            let states = shared.record(&space.regions[index], extent).states;
            let held_pages = u64::from(states.count(|s| s == PageState::Parked));
            shared.gauges.dropping_pages += held_pages;
            let kind = Kind::Look { in_place: None, strict: false, held_pages };
            let id = shared.begin(space, Op { proc, at, kind });
            Shared::<R>::lock(&mut space.regions[index], extent, id);
            effects.push(Effect::ReadMap { op: id, proc, at });
        }
    }
}

/// What rested or was leaving in a region that has ended goes with its mapping: to drop it there
/// would zap whatever the program has mapped in its stead.
pub(super) fn forget_blocks<R: Records>(shared: &mut Shared<R>, space: &mut Space, span: Span) {
    for index in 0..space.blocks.len() {
        let block = space.blocks[index];
        if block.stage != Stage::Free && span.contains(block.home) {
            shared.gauges.dropping_pages -= block.all_stale_pages();
            space.blocks[index] = Block::FREE;
            space.resting.retain(|held| usize::from(held.0) != index);
        }
    }
}

/// A parked extent is about to be dropped from its place.
pub(super) fn leave_place<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    block: LimboBlock,
    at: Addr,
    pages: u32,
) {
    if let Some(region) = space.region_at_mut(at) {
        let extent = region.extent_of(at);
        region.note_mut(extent).leaving = true;
    }
    space.block(block).stale |= 1 << position(at);
    note_stale(shared, space, block, at, pages);
}
