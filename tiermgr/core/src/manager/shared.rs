//! What all processes of a family share: records, room, slots, buffers, operations.
//!
//! The gauges are the sums over all records, at every instant, because [`Shared::update`] is the only way
//! to change a record.

use super::ManagerConfig;
use super::op::{Fill, Op, Ops, Piece, Rescue, RescueStep};
use super::space::{Region, Space};
use super::staging::Staging;
use crate::effect::{BufRange, Buffer, Effect, Refusal, Residency};
use crate::limits::RECORDS_MAX;
use crate::page::{PageMask, PageState, PageStates};
use crate::ranges::Ranges;
use crate::record::{ExtentRecord, Records};
use crate::slots::SlotPool;
use crate::stats::{Gauges, Stats};
use crate::units::{
    Addr, CHUNK_BYTES, EXTENT_BYTES, LimboBlock, OpId, ProcId, RecordIndex, SlotId, Span, Tick,
    low_u32,
};
use std::collections::{BTreeMap, VecDeque};

/// How long a grant of slots may take before the store counts as full.
pub(crate) const SLOTS_GRACE_NS: u64 = 50_000_000;

/// An extent that has just arrived does not leave before this many milliseconds have passed.
const ARRIVAL_REST_MS: u32 = 2;

/// Pages of one extent, by what they cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Weight {
    pub resident: u64,
    pub limbo: u64,
    pub parked: u64,
    /// In limbo with a page that no slot holds: it will need one.
    pub unslotted: u64,
}

/// Pages that take room in their place.
pub(crate) fn in_place(states: PageStates) -> PageMask {
    states.mask(|s| s.is_resident() || s == PageState::Filling)
}

/// What the pages of an extent cost. Borrowed frames are counted at their lender.
pub(crate) fn weigh(states: PageStates, borrowed: bool) -> Weight {
    if states == PageStates::default() {
        return Weight::default();
    }
    Weight {
        resident: if borrowed { 0 } else { u64::from(in_place(states).count_ones()) },
        limbo: u64::from(states.count(PageState::is_limbo)),
        parked: u64::from(states.count(|s| s == PageState::Parked)),
        unslotted: u64::from(states.any(|s| s == PageState::LimboDirty)),
    }
}

#[derive(Debug)]
pub(crate) struct Shared<R> {
    pub config: ManagerConfig,
    pub records: R,
    pub now: Tick,
    pub stats: Stats,
    pub gauges: Gauges,
    pub ops: Ops,
    pub slots: SlotPool,
    pub budget_pages: u64,
    /// Extents in limbo that will need a slot.
    pub unslotted_extents: u64,
    /// Extents of which a lender may have given pages up that others still have.
    pub ended_loans: Vec<(ProcId, Addr)>,
    /// Counts extents that became resident: the clock of the policy.
    pub stamp: u32,
    /// Chunks with resident extents, oldest first: the policy's queue.
    pub queue: VecDeque<(ProcId, Addr)>,
    /// More slots have been asked for, at this time, and not come.
    pub slots_wanted: Option<Tick>,
    /// More room has been asked for, at this time, and the budget is what it was.
    pub room_asked: Option<Tick>,
    /// The store failed to write: no parking before this time.
    pub store_rests_until: Tick,
    pub staging: Staging,
    /// Records that no region has.
    free_records: Ranges,
}

impl<R: Records> Shared<R> {
    pub(crate) fn new(config: ManagerConfig, records: R) -> Self {
        let mut free_records = Ranges::default();
        free_records.set(0..RECORDS_MAX, true);
        Self {
            config,
            records,
            now: Tick(0),
            stats: Stats::default(),
            gauges: Gauges::default(),
            ops: Ops::default(),
            slots: SlotPool::default(),
            budget_pages: config.budget_bytes / config.geometry.page_bytes,
            unslotted_extents: 0,
            ended_loans: Vec::new(),
            stamp: 0,
            queue: VecDeque::new(),
            slots_wanted: None,
            room_asked: None,
            store_rests_until: Tick(0),
            staging: Staging::new(config.demand_buffers),
            free_records,
        }
    }

    pub(crate) const fn page_bytes(&self) -> u64 {
        self.config.geometry.page_bytes
    }

    pub(crate) const fn extent_pages(&self) -> u32 {
        self.config.geometry.extent_pages()
    }

    pub(crate) fn page_of(&self, at: Addr) -> u32 {
        low_u32(at.0 % EXTENT_BYTES / self.page_bytes())
    }

    pub(crate) fn set_budget(&mut self, bytes: u64) {
        self.budget_pages = bytes / self.page_bytes();
        self.room_asked = None;
    }

    /// Room that background work keeps free for faults.
    pub(crate) fn reserve_pages(&self) -> u64 {
        let chunk = u64::from(self.config.geometry.chunk_pages());
        (self.budget_pages / 16).clamp(chunk / 8, chunk * 16)
    }

    /// The store has let us wait for slots for so long that it must be full.
    pub(crate) fn slots_overdue(&self) -> bool {
        self.slots_wanted.is_some_and(|since| since.after_ns(SLOTS_GRACE_NS) <= self.now)
    }

    pub(crate) fn has_room(&self, pages: u64, keep: u64) -> bool {
        self.gauges.used_pages() + pages + keep <= self.budget_pages
    }

    pub(crate) fn record(&self, region: &Region, extent: u32) -> ExtentRecord {
        self.records.get(region.record_index(extent))
    }

    /// Replaces the record of an extent and keeps gauges and slots in step. A slot that the record
    /// gains must already be held for it; the one that it loses is released after the store.
    pub(crate) fn update(
        &mut self,
        proc: ProcId,
        region: &mut Region,
        extent: u32,
        states: PageStates,
        slot: SlotId,
        limbo: Option<LimboBlock>,
    ) {
        let index = region.record_index(extent);
        let old = self.records.get(index);
        let (had, has) = (in_place(old.states), in_place(states));
        if has & !had != 0 {
            self.unshare(region, extent);
        }
        let note = region.note(extent);
        if had & !has != 0 && note.cow && note.lender.is_none() {
            self.ended_loans.push((proc, region.extent_addr(extent)));
        }
        let borrowed = note.lender.is_some();
        let mut new = ExtentRecord {
            states,
            slot,
            limbo_plus_one: match limbo {
                Some(block) if states.any(PageState::is_limbo) => block.0 + 1,
                _ => 0,
            },
        };
        if !new.holds_slot() {
            new.slot = SlotId::NONE;
        }
        self.records.set(index, new);
        let (before, after) = (weigh(old.states, borrowed), weigh(states, borrowed));
        self.gauges.resident_pages += after.resident;
        self.gauges.resident_pages -= before.resident;
        self.gauges.limbo_pages += after.limbo;
        self.gauges.limbo_pages -= before.limbo;
        self.gauges.parked_pages += after.parked;
        self.gauges.parked_pages -= before.parked;
        self.unslotted_extents += after.unslotted;
        self.unslotted_extents -= before.unslotted;
        if old.holds_slot() && old.slot != new.slot {
            let from_op = self.ops.next();
            self.slots.release(old.slot, proc, from_op);
        }
    }

    pub(crate) fn begin(&mut self, space: &mut Space, op: Op) -> OpId {
        space.ops += 1;
        let counted_by = space.region_at_mut(op.at).map(|region| {
            region.ops += 1;
            region.record.region
        });
        self.ops.insert(op, counted_by)
    }

    pub(crate) fn end(&mut self, space: &mut Space, id: OpId) -> Option<Op> {
        let (op, counted_by) = self.ops.remove(id)?;
        space.ops -= 1;
        // What began where a region had ended may end where another has begun since.
        let region = space.region_at_mut(op.at);
        if let Some(region) = region.filter(|region| Some(region.record.region) == counted_by) {
            region.ops -= 1;
        }
        Some(op)
    }

    pub(crate) fn lock(region: &mut Region, extent: u32, id: OpId) {
        let note = region.note_mut(extent);
        debug_assert!(!note.is_busy(), "extent {extent} has two owners");
        note.busy = id;
    }

    /// Ends the ownership of `id`, and wakes whoever faulted meanwhile.
    pub(crate) fn unlock(
        proc: ProcId,
        region: &mut Region,
        extent: u32,
        id: OpId,
        effects: &mut Vec<Effect>,
    ) {
        let at = region.extent_addr(extent);
        let note = region.note_mut(extent);
        if note.busy != id {
            return;
        }
        note.busy = OpId(0);
        if std::mem::take(&mut note.wake) {
            effects.push(Effect::Wake { proc, span: Span::new(at, EXTENT_BYTES) });
        }
    }

    /// Notes that an extent has become resident: it stands in the policy's queue from now on.
    pub(crate) fn became_resident(&mut self, proc: ProcId, region: &mut Region, extent: u32) {
        self.stamp = self.stamp.wrapping_add(1);
        let note = region.note_mut(extent);
        note.stamp = self.stamp;
        // Long enough for the thread that waits for it to be woken and go on.
        note.rest.at_least(self.now, ARRIVAL_REST_MS);
        self.enqueue(proc, region, extent);
    }

    pub(crate) fn enqueue(&mut self, proc: ProcId, region: &mut Region, extent: u32) {
        let at = region.extent_addr(extent).align_down(CHUNK_BYTES);
        let chunk = region.chunk_mut(extent / crate::units::CHUNK_EXTENTS);
        if !chunk.queued {
            chunk.queued = true;
            self.queue.push_back((proc, at));
        }
    }

    pub(crate) fn check_buffers(&self) -> Result<(), String> {
        self.staging.check(self.ops.iter().filter(|(_, op)| op.buffer().is_some()).count())
    }

    /// Takes the first run of records that is long enough: what programs give back in one size serves
    /// any other, together with what lies beside it.
    pub(crate) fn take_records(&mut self, count: u32) -> Result<RecordIndex, Refusal> {
        let first = self.free_records.first_run(count).ok_or(Refusal::TooMany)?;
        if !self.records.reserve(RecordIndex(first), count) {
            return Err(Refusal::NoStateRoom);
        }
        self.free_records.set(first..first + count, false);
        Ok(RecordIndex(first))
    }

    /// Keeps records that were there before us from being handed out again.
    pub(crate) fn reserve_records(&mut self, first: RecordIndex, count: u32) {
        self.free_records.set(first.0..first.0 + count, false);
    }

    pub(crate) fn give_back_records(&mut self, first: RecordIndex, count: u32) {
        self.records.clear(first, count);
        self.free_records.set(first.0..first.0 + count, true);
    }

    /// Zeros what no region has: a kill may have left records there whose region was not in the
    /// directory yet, and whoever gets them next must find none.
    pub(crate) fn clear_free_records(&mut self) {
        for run in self.free_records.iter() {
            self.records.clear(RecordIndex(run.start), run.end - run.start);
        }
    }

    pub(crate) fn residency(&self, region: &Region, span: Span) -> Residency {
        let page = self.page_bytes();
        let mut sum = Residency::default();
        let mut at = span.start;
        while at < span.end() {
            let extent = region.extent_of(at);
            let end = region.extent_addr(extent + 1).min(span.end());
            if region.is_unarmed(extent) {
                sum.unarmed_bytes += end.0 - at.0;
            } else {
                let states = self.record(region, extent).states;
                for index in 0..(end.0 - at.0) / page {
                    let state = states.get(self.page_of(at.plus(index * page)));
                    *match state {
                        PageState::Absent => &mut sum.absent_bytes,
                        PageState::Parked | PageState::Filling => &mut sum.parked_bytes,
                        PageState::Poisoned => &mut sum.poisoned_bytes,
                        _ => &mut sum.resident_bytes,
                    } += page;
                }
            }
            at = end;
        }
        sum
    }

    pub(crate) fn rescue_effect(
        &self,
        id: OpId,
        op: &Op,
        rescue: &Rescue,
        spaces: &BTreeMap<ProcId, Space>,
    ) -> Effect {
        let limbo = |at| spaces.get(&op.proc).map_or(at, |s| s.limbo_addr(rescue.block, at));
        match rescue.step {
            RescueStep::Reading(piece) => Effect::ReadLimbo {
                op: id,
                proc: op.proc,
                from: limbo(piece.start),
                to: buf_range(rescue.buffer, op.at, piece),
            },
            RescueStep::Checking => Effect::ReadMap { op: id, proc: op.proc, at: limbo(op.at) },
            RescueStep::Copying(piece) => Effect::Copy {
                op: id,
                proc: op.proc,
                from: buf_range(rescue.buffer, op.at, piece),
                to: piece.start,
                protect: !rescue.write && self.piece_is_clean(op, piece, spaces),
            },
        }
    }

    /// Whether every page of the piece, all of one extent, has a valid slot copy.
    fn piece_is_clean(&self, op: &Op, piece: Piece, spaces: &BTreeMap<ProcId, Space>) -> bool {
        let Some(region) = spaces.get(&op.proc).and_then(|s| s.region_at(op.at)) else {
            return false;
        };
        let states = self.record(region, region.extent_of(op.at)).states;
        let first = self.page_of(piece.start);
        let count = low_u32(piece.len / self.page_bytes());
        (first..first + count).all(|page| states.get(page) == PageState::LimboClean)
    }
}

impl Op {
    pub(crate) fn buffer(&self) -> Option<Buffer> {
        match &self.kind {
            super::op::Kind::Fill(fill) => Some(fill.buf.buf),
            super::op::Kind::Rescue(rescue) => Some(rescue.buffer),
            super::op::Kind::Write(write) => Some(write.buffer),
            _ => None,
        }
    }
}

/// The staged bytes of `piece`, in a buffer whose first byte belongs to `base`.
pub(crate) fn buf_range(buf: Buffer, base: Addr, piece: Piece) -> BufRange {
    BufRange { buf, offset: low_u32(piece.start.0 - base.0), len: low_u32(piece.len) }
}

/// Installs one piece of what was read.
pub(crate) fn fill_copy(id: OpId, op: &Op, fill: &Fill, piece: Piece) -> Effect {
    Effect::Copy {
        op: id,
        proc: op.proc,
        from: buf_range(fill.buf.buf, op.at, piece),
        to: piece.start,
        protect: !fill.write,
    }
}
