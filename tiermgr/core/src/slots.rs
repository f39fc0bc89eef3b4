//! Slots leased from the store: which are free, and who still needs the others.
//!
//! A slot is free, held (by records or by an operation that is about to record it), or in quarantine.
//! Quarantine is for slots that nobody needs any more as far as is known: while a FORK message may be
//! unread, the child it announces may need what its parent has just forgotten. Any ioctl on the
//! parent that was ordered later and did not end with EAGAIN proves that none was.
//!
//! `free + held + quarantined == slots leased`, always.

use crate::units::{CHUNK_EXTENTS, OpId, ProcId, SlotId};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Slots of a segment, the unit that the store leases.
pub const SEGMENT_SLOTS: u32 = 128;

/// Runs of slots that are remembered as doubtful: at most a segment's worth of the longest writes, so
/// that a spare segment always has others.
const DOUBTFUL_MAX: usize = (SEGMENT_SLOTS / CHUNK_EXTENTS) as usize;

#[derive(Debug)]
struct Segment {
    /// Processes' records (and operations) that hold each slot.
    holders: [u16; SEGMENT_SLOTS as usize],
    /// Bit set: free.
    free: u128,
}

/// A slot that waits for proof.
#[derive(Clone, Copy, Debug)]
struct Quarantined {
    slot: SlotId,
    proc: ProcId,
    /// The first operation number that can prove anything.
    from_op: OpId,
}

/// The slots that one family has leased.
#[derive(Debug, Default)]
pub struct SlotPool {
    segments: BTreeMap<u32, Segment>,
    quarantine: VecDeque<Quarantined>,
    free_slots: u32,
    held_slots: u32,
    /// Segment to continue in: consecutive allocations lie side by side.
    cursor: u32,
    /// Slots that the store failed to write last. Whether they are free is another matter.
    doubtful: VecDeque<Range<u32>>,
}

impl SlotPool {
    /// Adds a segment that the store granted.
    pub fn add_segment(&mut self, first: SlotId) {
        let segment = Segment { holders: [0; SEGMENT_SLOTS as usize], free: u128::MAX };
        if self.segments.insert(first.0, segment).is_none() {
            self.free_slots += SEGMENT_SLOTS;
        }
    }

    /// Takes up to `wanted` consecutive free slots, each held once. Prefers the longest run near the
    /// last one, and doubtful slots to none; `None` where no slot is free.
    pub fn allocate(&mut self, wanted: u32) -> Option<(SlotId, u32)> {
        let wanted = wanted.min(SEGMENT_SLOTS);
        let best = self.best_run(wanted, false).or_else(|| self.best_run(wanted, true));
        let (first, start, len) = best?;
        let segment = self.segments.get_mut(&first)?;
        for index in start..start + len {
            segment.free &= !(1 << index);
            segment.holders[index as usize] = 1;
        }
        self.cursor = first;
        self.free_slots -= len;
        self.held_slots += len;
        Some((SlotId(first + start), len))
    }

    /// The best run of free slots: its segment, and first index and length there.
    fn best_run(&self, wanted: u32, also_doubtful: bool) -> Option<(u32, u32, u32)> {
        let mut best: Option<(u32, u32, u32)> = None;
        let order = self.segments.range(self.cursor..).chain(self.segments.range(..self.cursor));
        for (&first, segment) in order {
            let doubtful = if also_doubtful { 0 } else { self.doubtful_in(first) };
            let (start, len) = longest_run(segment.free & !doubtful, wanted);
            if len > best.map_or(0, |(_, _, len)| len) {
                best = Some((first, start, len));
            }
            if len == wanted {
                break;
            }
        }
        best
    }

    /// The doubtful slots of a segment.
    fn doubtful_in(&self, first: u32) -> u128 {
        let mut mask = 0;
        for run in &self.doubtful {
            for slot in run.start.max(first)..run.end.min(first + SEGMENT_SLOTS) {
                mask |= 1 << (slot - first);
            }
        }
        mask
    }

    /// Slots are free, and of each the last write has failed.
    #[must_use]
    pub fn has_doubtful_only(&self) -> bool {
        self.free_slots > 0 && self.best_run(1, false).is_none()
    }

    /// How a write to slots has ended. Where it failed others are taken first from now on: the next try
    /// must not meet the same bad spot.
    pub fn note_write(&mut self, first: SlotId, count: u32, ok: bool) {
        let slots = first.0..first.0 + count;
        if ok {
            self.doubtful.retain(|run| run.end <= slots.start || slots.end <= run.start);
            return;
        }
        self.doubtful.retain(|run| run.start < slots.start || slots.end < run.end);
        self.doubtful.push_back(slots);
        if self.doubtful.len() > DOUBTFUL_MAX {
            self.doubtful.pop_front();
        }
    }

    /// One more holder: a forked child's record.
    pub fn retain(&mut self, slot: SlotId) {
        if let Some((segment, index)) = self.locate(slot) {
            segment.holders[index] = segment.holders[index].saturating_add(1);
        }
    }

    /// One holder less. The last one sends the slot to quarantine until an ioctl on `proc` ordered
    /// as `from_op` or later has ended without EAGAIN.
    pub fn release(&mut self, slot: SlotId, proc: ProcId, from_op: OpId) {
        if self.drop_holder(slot) {
            self.quarantine.push_back(Quarantined { slot, proc, from_op });
        }
    }

    /// Gives back a slot that no record ever named.
    pub fn release_unrecorded(&mut self, slot: SlotId) {
        if self.drop_holder(slot) {
            self.set_free(slot);
        }
    }

    /// An ioctl of `proc` ordered as `op` ended without EAGAIN.
    pub fn proven(&mut self, proc: ProcId, op: OpId) {
        let waiting = std::mem::take(&mut self.quarantine);
        for entry in waiting {
            if entry.proc == proc && entry.from_op <= op {
                self.set_free(entry.slot);
            } else {
                self.quarantine.push_back(entry);
            }
        }
    }

    /// `proc` is gone: it can fork no more.
    pub fn forget_proc(&mut self, proc: ProcId) {
        self.proven(proc, OpId(u64::MAX));
    }

    /// A process whose slots wait for proof, if any do.
    #[must_use]
    pub fn quarantined_proc(&self) -> Option<ProcId> {
        self.quarantine.front().map(|entry| entry.proc)
    }

    /// A segment of which every slot is free, taken out of the pool to be given back.
    pub fn take_empty_segment(&mut self) -> Option<SlotId> {
        let first = self.segments.iter().find(|(_, s)| s.free == u128::MAX).map(|(&f, _)| f)?;
        self.segments.remove(&first);
        self.doubtful.retain(|run| run.end <= first || first + SEGMENT_SLOTS <= run.start);
        self.free_slots -= SEGMENT_SLOTS;
        Some(SlotId(first))
    }

    /// A slot that a record found at a restart holds. False where its segment is not ours.
    pub fn adopt(&mut self, slot: SlotId) -> bool {
        let Some((segment, index)) = self.locate(slot) else {
            return false;
        };
        segment.holders[index] = segment.holders[index].saturating_add(1);
        if segment.free & (1 << index) != 0 {
            segment.free &= !(1 << index);
            self.free_slots -= 1;
            self.held_slots += 1;
        }
        true
    }

    /// Free slots.
    #[must_use]
    pub const fn free_slots(&self) -> u32 {
        self.free_slots
    }

    /// Held slots, those in quarantine not included.
    #[must_use]
    pub const fn held_slots(&self) -> u32 {
        self.held_slots
    }

    /// Slots in quarantine.
    #[must_use]
    pub fn quarantined_slots(&self) -> usize {
        self.quarantine.len()
    }

    /// Segments leased.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    fn drop_holder(&mut self, slot: SlotId) -> bool {
        let Some((segment, index)) = self.locate(slot) else {
            return false;
        };
        debug_assert!(segment.holders[index] > 0, "slot {slot:?} released twice");
        segment.holders[index] = segment.holders[index].saturating_sub(1);
        let last = segment.holders[index] == 0;
        if last {
            self.held_slots -= 1;
        }
        last
    }

    fn set_free(&mut self, slot: SlotId) {
        if let Some((segment, index)) = self.locate(slot) {
            segment.free |= 1 << index;
            self.free_slots += 1;
        }
    }

    fn locate(&mut self, slot: SlotId) -> Option<(&mut Segment, usize)> {
        let (&first, segment) = self.segments.range_mut(..=slot.0).next_back()?;
        let index = slot.0 - first;
        (index < SEGMENT_SLOTS).then_some((segment, index as usize))
    }
}

/// First index and length (at most `wanted`) of the first run of set bits that is long enough, or of
/// the longest.
fn longest_run(bits: u128, wanted: u32) -> (u32, u32) {
    let mut best = (0, 0);
    let mut rest = bits;
    let mut base = 0;
    while rest != 0 {
        let skip = rest.trailing_zeros();
        base += skip;
        rest >>= skip;
        let run = rest.trailing_ones().min(wanted);
        if run > best.1 {
            best = (base, run);
        }
        if run == wanted {
            break;
        }
        base += run;
        rest = if run >= u128::BITS { 0 } else { rest >> run };
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> SlotPool {
        let mut pool = SlotPool::default();
        pool.add_segment(SlotId(1));
        pool
    }

    #[test]
    fn a_run_is_consecutive_and_held() {
        let mut pool = pool();
        assert_eq!(pool.allocate(32), Some((SlotId(1), 32)));
        assert_eq!(pool.allocate(32), Some((SlotId(33), 32)));
        assert_eq!(pool.held_slots(), 64);
        assert_eq!(pool.free_slots(), 64);
    }

    #[test]
    fn the_last_slot_is_given_out_and_then_none() {
        let mut pool = pool();
        assert_eq!(pool.allocate(127), Some((SlotId(1), 127)));
        assert_eq!(pool.allocate(32), Some((SlotId(128), 1)));
        assert_eq!(pool.allocate(1), None);
    }

    #[test]
    fn slots_that_the_store_failed_to_write_are_taken_last() {
        let mut pool = pool();
        let runs: Vec<_> = (0..3).map(|_| pool.allocate(32).unwrap()).collect();
        pool.note_write(SlotId(1), 32, false);
        pool.note_write(SlotId(33), 32, false);
        for (first, count) in runs {
            (0..count).for_each(|n| pool.release_unrecorded(first.plus(n)));
        }
        assert_eq!(pool.free_slots(), 128);
        assert_eq!(pool.allocate(32), Some((SlotId(65), 32)));
        assert!(!pool.has_doubtful_only());
        assert_eq!(pool.allocate(64), Some((SlotId(97), 32)));
        assert!(pool.has_doubtful_only());
        assert_eq!(pool.allocate(48), Some((SlotId(1), 48)));
        pool.note_write(SlotId(1), 48, true);
        assert_eq!(pool.allocate(16), Some((SlotId(49), 16)));
        assert!(!pool.has_doubtful_only(), "nothing is free");
    }

    #[test]
    fn no_more_than_a_segment_is_doubtful() {
        let mut pool = pool();
        for round in 0..10 {
            pool.note_write(SlotId(1 + round % 5 * 16), 16, false);
            pool.note_write(SlotId(2 + round % 5 * 16), 1, false);
        }
        assert_eq!(pool.doubtful.len(), DOUBTFUL_MAX);
        assert!(pool.doubtful_in(1).count_ones() <= SEGMENT_SLOTS);
        assert_eq!(pool.take_empty_segment(), Some(SlotId(1)));
        assert!(pool.doubtful.is_empty(), "of another family from now on");
    }

    #[test]
    fn a_released_slot_waits_for_a_later_ioctl_of_its_process() {
        let mut pool = pool();
        let (slot, _) = pool.allocate(1).unwrap();
        pool.release(slot, ProcId(1), OpId(10));
        assert_eq!((pool.held_slots(), pool.quarantined_slots()), (0, 1));
        pool.proven(ProcId(1), OpId(9));
        pool.proven(ProcId(2), OpId(11));
        assert_eq!(pool.quarantined_slots(), 1);
        pool.proven(ProcId(1), OpId(10));
        assert_eq!((pool.free_slots(), pool.quarantined_slots()), (128, 0));
    }

    #[test]
    fn a_shared_slot_lives_until_its_last_holder() {
        let mut pool = pool();
        let (slot, _) = pool.allocate(1).unwrap();
        pool.retain(slot);
        pool.release(slot, ProcId(1), OpId(1));
        assert_eq!((pool.held_slots(), pool.quarantined_slots()), (1, 0));
        pool.release(slot, ProcId(2), OpId(1));
        assert_eq!((pool.held_slots(), pool.quarantined_slots()), (0, 1));
    }

    #[test]
    fn an_empty_segment_can_be_given_back() {
        let mut pool = pool();
        let (slot, _) = pool.allocate(1).unwrap();
        assert_eq!(pool.take_empty_segment(), None);
        pool.release_unrecorded(slot);
        assert_eq!(pool.take_empty_segment(), Some(SlotId(1)));
        assert_eq!(pool.free_slots(), 0);
    }

    #[test]
    fn the_first_run_that_is_long_enough_wins() {
        assert_eq!(longest_run(0b1110_0110, 2), (1, 2));
        assert_eq!(longest_run(0b1110_0110, 3), (5, 3));
        assert_eq!(longest_run(0b1110_0110, 4), (5, 3));
        assert_eq!(longest_run(u128::MAX, 128), (0, 128));
        assert_eq!(longest_run(0, 4), (0, 0));
    }
}
