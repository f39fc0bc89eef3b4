//! Writing what rests in limbo to the store, and recording it as parked.

use super::Manager;
use super::limbo::{READ_TRIES_MAX, leave_block, settle_block};
use super::op::{Kind, Op, Piece, Write, WriteStep};
use super::shared::Shared;
use super::space::{Space, Stage, WRITE_REST_NS, runs};
use super::staging::ForWrite;
use crate::effect::{BufRange, Effect};
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::Records;
use crate::slots::SEGMENT_SLOTS;
use crate::units::{Addr, CHUNK_EXTENTS, EXTENT_BYTES, LimboBlock, OpId, ProcId, SlotId, low_u32};

/// Ranges that were zapped and that a fork may have seen before, until somebody asks whether one did.
const ZAPPED_MAX: usize = 32;

impl<R: Records> Manager<R> {
    /// Sends a resting block on its way out: extents with a valid slot copy at once, the others
    /// through the store. False where it must rest on for want of a buffer or of slots.
    pub(super) fn start_write(
        &mut self,
        proc: ProcId,
        block: LimboBlock,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return false;
        };
        let entry = *space.block(block);
        let mut dirty = Vec::new();
        let mut clean = Vec::new();
        for (first, count) in runs(entry.mask) {
            for position in first..first + count {
                let at = entry.home.plus(u64::from(position) * EXTENT_BYTES);
                let Some(region) = space.region_at(at) else {
                    continue;
                };
                let extent = region.extent_of(at);
                if region.note(extent).is_busy() {
                    continue;
                }
                let states = shared.record(region, extent).states;
                let unsaved = states.any(|s| s == PageState::LimboDirty);
                if unsaved { dirty.push(at) } else { clean.push(at) }
            }
        }
        for at in clean {
            record_parked(shared, space, block, at, None);
        }
        if dirty.is_empty() {
            settle_block(shared, space, block);
            return true;
        }
        if space.writes_no_more() {
            return false;
        }
        let rests_until = shared.store_rests_until.max(space.writes_rest_until);
        if shared.now < rests_until {
            self.timer = self.timer.min(rests_until);
            return false;
        }
        if shared.slots.free_slots() == 0 {
            want_slots(shared, effects);
            return false;
        }
        if shared.slots.has_doubtful_only() {
            // Tried again for want of others; those that come will be taken first.
            want_slots(shared, effects);
        }
        let buffer = match shared.staging.take_for_write(shared.now, effects) {
            ForWrite::Whole(buffer) => buffer,
            ForWrite::Extent(buffer) => {
                dirty.truncate(1);
                buffer
            }
            ForWrite::Later(again) => {
                self.timer = self.timer.min(again);
                // Nobody need go beyond the limit for it: operations end, or time brings a small buffer.
                self.rests_on = true;
                return false;
            }
        };
        let mut pieces: Vec<(SlotId, u32, u32)> = Vec::new();
        let mut placed = 0;
        while placed < dirty.len() {
            let left = low_u32((dirty.len() - placed) as u64);
            let Some((slot, count)) = shared.slots.allocate(left) else {
                break;
            };
            pieces.push((slot, low_u32(placed as u64), count));
            placed += count as usize;
        }
        dirty.truncate(placed);
        let at = entry.home;
        let step = WriteStep::Writing { index: 0 };
        let write = Write { buffer, block, extents: dirty, step, pieces, looked: None, tries: 0 };
        let id = shared.begin(space, Op { proc, at, kind: Kind::Write(write) });
        let entry = space.block(block);
        entry.ops += 1;
        entry.stage = Stage::Writing;
        space.resting.retain(|&b| b != block);
        self.continue_write_read(id, 0, None, effects);
        true
    }

    /// Reads the next run of pages of the block, from page address `after` of extent `index` on; with
    /// none left, begins to write.
    fn continue_write_read(
        &mut self,
        id: OpId,
        index: usize,
        after: Option<Addr>,
        effects: &mut Vec<Effect>,
    ) {
        let shared = &mut self.shared;
        let Some(Op { proc, kind: Kind::Write(write), .. }) = shared.ops.get(id) else {
            return;
        };
        let proc = *proc;
        let Some(space) = self.spaces.get(&proc) else {
            return;
        };
        let found = next_write_piece(shared, space, write, index, after);
        let Some((index, piece)) = found else {
            self.write_piece(id, 0, effects);
            return;
        };
        if space.in_place && write.looked != Some(index) {
            // A read of a missing page in its place would wait for ourselves.
            let at = write.extents[index];
            effects.push(Effect::ReadMap { op: id, proc, at });
            self.set_write_step(id, WriteStep::Checking { index });
            return;
        }
        let offset = index as u64 * EXTENT_BYTES + piece.start.0 % EXTENT_BYTES;
        let to = BufRange { buf: write.buffer, offset: low_u32(offset), len: low_u32(piece.len) };
        let from = space.limbo_addr(write.block, piece.start);
        effects.push(Effect::ReadLimbo { op: id, proc, from, to });
        self.set_write_step(id, WriteStep::Reading { index, piece });
    }

    fn set_write_step(&mut self, id: OpId, step: WriteStep) {
        if let Some(Op { kind: Kind::Write(write), .. }) = self.shared.ops.get_mut(id) {
            write.step = step;
        }
    }

    pub(super) fn on_write_read(&mut self, id: OpId, bytes: u64, effects: &mut Vec<Effect>) {
        let Some(Op { proc, kind: Kind::Write(write), .. }) = self.shared.ops.get(id) else {
            return;
        };
        let WriteStep::Reading { index, piece } = write.step else {
            return;
        };
        let (proc, block) = (*proc, write.block);
        if bytes >= piece.len {
            let end = piece.start.plus(piece.len);
            let first = write.extents[index];
            let spanned = low_u32((end.0 - 1 - first.0) / EXTENT_BYTES) as usize;
            self.continue_write_read(id, index + spanned, Some(end), effects);
            return;
        }
        let stopped = piece.start.plus(bytes);
        let index = index + low_u32((stopped.0 - write.extents[index].0) / EXTENT_BYTES) as usize;
        let at = stopped.align_down(EXTENT_BYTES);
        let Some(space) = self.spaces.get(&proc) else {
            return;
        };
        let at = space.limbo_addr(block, at);
        effects.push(Effect::ReadMap { op: id, proc, at });
        self.set_write_step(id, WriteStep::Checking { index });
    }

    pub(super) fn on_write_checked(
        &mut self,
        id: OpId,
        present: PageMask,
        known: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(op) = self.shared.ops.get_mut(id) else {
            return;
        };
        let proc = op.proc;
        let Kind::Write(write) = &mut op.kind else {
            return;
        };
        let WriteStep::Checking { index } = write.step else {
            return;
        };
        write.tries += u8::from(write.looked == Some(index));
        write.looked = Some(index);
        let (block, at) = (write.block, write.extents[index]);
        if !known || write.tries > READ_TRIES_MAX * 8 {
            if let Some(space) = self.spaces.get_mut(&proc) {
                space.note_failed_write(self.shared.now);
            }
            self.end_write(id);
            return;
        }
        self.note_limbo_empty(proc, at, block, present);
        // Everything of this extent again: what was read before the hole is the same still.
        self.continue_write_read(id, index, None, effects);
    }

    fn write_piece(&mut self, id: OpId, index: usize, effects: &mut Vec<Effect>) {
        let Some(Op { kind: Kind::Write(write), .. }) = self.shared.ops.get(id) else {
            return;
        };
        let Some(&(slot, first, count)) = write.pieces.get(index) else {
            self.end_write(id);
            return;
        };
        let bytes = low_u32(u64::from(count) * EXTENT_BYTES);
        let offset = low_u32(u64::from(first) * EXTENT_BYTES);
        let from = BufRange { buf: write.buffer, offset, len: bytes };
        effects.push(Effect::WriteSlots { op: id, from, slot });
        self.set_write_step(id, WriteStep::Writing { index });
    }

    pub(super) fn on_written(&mut self, id: OpId, ok: bool, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(op) = shared.ops.get_mut(id) else {
            return;
        };
        let proc = op.proc;
        let Kind::Write(write) = &mut op.kind else {
            return;
        };
        let WriteStep::Writing { index } = write.step else {
            return;
        };
        if let Some(&(slot, _, count)) = write.pieces.get(index) {
            shared.slots.note_write(slot, count, ok);
        }
        if !ok {
            shared.stats.store_errors += 1;
            shared.store_rests_until = shared.now.after_ns(WRITE_REST_NS);
            if let Some(space) = self.spaces.get_mut(&proc) {
                space.note_failed_write(shared.now);
            }
            self.end_write(id);
            return;
        }
        let Some(piece) = write.pieces.get_mut(index) else {
            return;
        };
        let (slot, first, count) = *piece;
        // From here on the records own the slots.
        piece.2 = 0;
        let block = write.block;
        let range = first as usize..(first + count) as usize;
        let extents: Vec<Addr> = write.extents.get(range).map(<[Addr]>::to_vec).unwrap_or_default();
        shared.stats.store_written_bytes += u64::from(count) * EXTENT_BYTES;
        if let Some(space) = self.spaces.get_mut(&proc) {
            space.note_written();
            for (n, at) in extents.into_iter().enumerate() {
                let slot = slot.plus(low_u32(n as u64));
                if !record_parked(shared, space, block, at, Some(slot)) {
                    shared.slots.release_unrecorded(slot);
                }
            }
        }
        self.write_piece(id, index + 1, effects);
    }

    /// Ends a write: slots that no record took go back, extents that were not written rest on.
    fn end_write(&mut self, id: OpId) {
        let shared = &mut self.shared;
        let Some(proc) = shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(Op { kind: Kind::Write(write), .. }) = shared.end(space, id) else {
            return;
        };
        for (slot, _, count) in write.pieces {
            for n in 0..count {
                shared.slots.release_unrecorded(slot.plus(n));
            }
        }
        shared.staging.give_back(write.buffer);
        space.block(write.block).ops -= 1;
        settle_block(shared, space, write.block);
    }

    pub(super) fn on_slots_granted(&mut self, first: SlotId, count: u32) {
        debug_assert_eq!(count, SEGMENT_SLOTS);
        if count == SEGMENT_SLOTS {
            self.shared.slots.add_segment(first);
        }
        self.shared.slots_wanted = None;
    }

    /// Keeps the list of ranges that were zapped short.
    fn prove_zaps(&mut self, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        for space in self.spaces.values_mut().filter(|s| s.zapped.len() >= ZAPPED_MAX && !s.gone) {
            let proc = space.id;
            let probing = |(_, op): (OpId, &Op)| op.proc == proc && matches!(op.kind, Kind::Probe);
            if !shared.ops.iter().any(probing) {
                let id = shared.begin(space, Op { proc, at: Addr(0), kind: Kind::Probe });
                effects.push(Effect::Probe { op: id, proc });
            }
        }
    }

    /// Proves that slots in quarantine are free, asks for slots ahead of need, gives spare ones back.
    pub(super) fn tidy_slots(&mut self, effects: &mut Vec<Effect>) {
        self.prove_zaps(effects);
        let shared = &mut self.shared;
        if shared.slots.quarantined_slots() >= CHUNK_EXTENTS as usize
            || shared.slots.free_slots() < CHUNK_EXTENTS
        {
            let proc = shared.slots.quarantined_proc();
            let probing = shared.ops.iter().any(|(_, op)| matches!(op.kind, Kind::Probe));
            match proc.and_then(|proc| self.spaces.get_mut(&proc)) {
                Some(space) if !probing => {
                    let at = Addr(0);
                    let id = shared.begin(space, Op { proc: space.id, at, kind: Kind::Probe });
                    effects.push(Effect::Probe { op: id, proc: space.id });
                }
                _ => {}
            }
        }
        // Asked for before the first page must leave: a grant takes a turn.
        let near = shared.gauges.used_pages() * 4 >= shared.budget_pages * 3;
        let kept = shared.unslotted_extents + u64::from(SEGMENT_SLOTS / 2);
        if near && !self.spaces.is_empty() && u64::from(shared.slots.free_slots()) < kept {
            want_slots(shared, effects);
        }
        // One spare segment is kept, so that a program around a boundary does not thrash. What limbo needs is
        // kept too: given back, it would be asked for again at once, and no move would ever find it.
        let most = kept.max(u64::from(2 * SEGMENT_SLOTS));
        while u64::from(shared.slots.free_slots()) >= most + u64::from(SEGMENT_SLOTS) {
            let Some(first) = shared.slots.take_empty_segment() else {
                break;
            };
            effects.push(Effect::ReturnSlots { first });
        }
        if self.spaces.is_empty() {
            while let Some(first) = shared.slots.take_empty_segment() {
                effects.push(Effect::ReturnSlots { first });
            }
        }
    }
}

/// Asks for slots once.
pub(super) fn want_slots<R>(shared: &mut Shared<R>, effects: &mut Vec<Effect>) {
    if shared.slots_wanted.is_none() {
        shared.slots_wanted = Some(shared.now);
        effects.push(Effect::WantSlots);
    }
}

/// Records an extent of `block` as parked, in `slot` or in the slot that it has. False, with nothing
/// changed, where it is no longer in this block or somebody is bringing it back.
fn record_parked<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    block: LimboBlock,
    at: Addr,
    slot: Option<SlotId>,
) -> bool {
    let proc = space.id;
    // Where pages rest in their place a fork saw them there, and there they stay.
    let stays = space.in_place && space.is_held();
    let Some(region) = space.region_at_mut(at) else {
        return false;
    };
    let extent = region.extent_of(at);
    let record = shared.record(region, extent);
    let pages = record.states.mask(PageState::is_limbo);
    if region.note(extent).is_busy() {
        return false;
    }
    if pages == 0 {
        // Everything of it turned out to be zeros.
        leave_block(shared, space, block, at);
        return false;
    }
    if record.limbo() != Some(block) || stays {
        return false;
    }
    let unsaved = record.states.mask(|s| s == PageState::LimboDirty);
    if (unsaved != 0 && slot.is_none()) || record.states.any(|s| s == PageState::Parked) {
        return false;
    }
    // A new slot holds what is in limbo and no more: pages in their place that named the old one have
    // no copy from now on.
    let orphans = match slot {
        Some(_) => record.states.mask(|s| s == PageState::Clean),
        None => 0,
    };
    let saved = record
        .states
        .after(orphans, PageEvent::Written)
        .and_then(|states| states.after(unsaved, PageEvent::SlotWritten));
    let Some(parked) = saved.and_then(|states| states.after(pages, PageEvent::ParkRecorded)) else {
        return false;
    };
    shared.update(proc, region, extent, parked, slot.unwrap_or(record.slot), None);
    let count = u64::from(pages.count_ones());
    shared.stats.parked_pages += count;
    if slot.is_none() {
        shared.stats.parked_clean_pages += count;
    }
    leave_block(shared, space, block, at);
    if space.in_place {
        // Until the helper has dropped the pages nothing may fill their place.
        super::place::leave_place(shared, space, block, at, pages.count_ones());
    }
    true
}

/// The next run of pages of the operation that are in its block, from `after` (or the beginning of
/// extent `index`) on: where it begins, and the extent it begins in. A run goes on from one extent
/// into the next where both lie side by side in memory, since they do so in the buffer too.
fn next_write_piece<R: Records>(
    shared: &Shared<R>,
    space: &Space,
    write: &Write,
    index: usize,
    after: Option<Addr>,
) -> Option<(usize, Piece)> {
    let page_bytes = shared.page_bytes();
    let pages = shared.extent_pages();
    let in_block = |at: Addr| {
        space
            .region_at(at)
            .map(|region| shared.record(region, region.extent_of(at)))
            .filter(|record| record.limbo() == Some(write.block))
            .map_or(0, |record| record.states.mask(PageState::is_limbo))
    };
    let mut found: Option<(usize, Piece)> = None;
    for (n, &at) in write.extents.iter().enumerate().skip(index) {
        let mask = in_block(at);
        for page in 0..pages {
            let start = at.plus(u64::from(page) * page_bytes);
            if after.is_some_and(|after| n == index && start < after) {
                continue;
            }
            let here = mask & (1 << page) != 0;
            match &mut found {
                None if here => found = Some((n, Piece { start, len: page_bytes })),
                Some((first, piece))
                    if here
                        && piece.start.plus(piece.len) == start
                        && (n == *first || !space.in_place) =>
                {
                    piece.len += page_bytes;
                }
                Some(done) => return Some(*done),
                None => {}
            }
        }
    }
    found
}
