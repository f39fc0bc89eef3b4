//! Processes that come and go, and regions that end.
//!
//! Nothing ends under an operation: a region waits until none works on it, a process until none works
//! on any of its regions and no child waits for its table.

use super::Manager;
use super::limbo::forget_extent;
use super::op::{ArmThen, Kind, Op, Prepare};
use super::space::{Block, Ending, Region, Space};
use super::{Waiting, refuse, reply};
use crate::effect::{Effect, Refusal, Reply};
use crate::page::PageState;
use crate::record::Records;
use crate::units::{Addr, EXTENT_BYTES, ProcId, RegionId, RequestId, Span};

impl<R: Records> Manager<R> {
    pub(super) fn on_ready(&mut self, proc: ProcId, limbo: Span) {
        let space = self.spaces.entry(proc).or_insert_with(|| Space::new(proc));
        space.limbo = limbo;
        space.blocks = super::recover::empty_blocks(limbo);
        space.in_place = !self.shared.config.has_move;
        space.has_helper = !space.blocks.is_empty();
        space.ready = true;
        if space.recovering.is_some() && space.to_arm.is_empty() {
            self.resume(proc);
        }
    }

    pub(super) fn on_gone(&mut self, proc: ProcId) {
        if let Some(space) = self.spaces.get_mut(&proc) {
            space.gone = true;
            space.ahead.clear();
        }
    }

    /// The client changed the layout without telling us: what lay there is given up, and we never
    /// put or take anything there again.
    pub(super) fn on_unmapped(&mut self, proc: ProcId, span: Span) {
        let page_bytes = self.shared.page_bytes();
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let inside = |region: &Region| {
            let start = span.start.max(region.span().start);
            let end = span.end().min(region.span().end());
            (start < end).then(|| (region.record.region, Span::new(start, end.0 - start.0)))
        };
        let pieces: Vec<(RegionId, Span)> = space.regions.iter().filter_map(inside).collect();
        for (region, piece) in pieces {
            let mut at = piece.start;
            while at < piece.end() {
                if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) {
                    let extent = region.extent_of(at);
                    region.note_mut(extent).refusals = u8::MAX;
                }
                at = at.align_down(EXTENT_BYTES).plus(EXTENT_BYTES);
            }
            let aligned = Span::new(piece.start.align_down(page_bytes), piece.len);
            self.discards.push_back(super::PendingDiscard {
                request: None,
                proc,
                region,
                span: aligned,
                // A fork may have copied the page tables before, and its message come after.
                proof: super::Proof::Needed,
            });
        }
    }

    /// Marks a region as ending.
    pub(super) fn close_region(
        &mut self,
        proc: ProcId,
        number: RegionId,
        request: Option<RequestId>,
    ) -> bool {
        let Some(space) = self.spaces.get_mut(&proc) else {
            return false;
        };
        let Some(region) = space.regions.iter_mut().find(|r| r.record.region == number) else {
            return false;
        };
        if region.closing.is_some() {
            return false;
        }
        // A region that never began has nobody to answer; the number 0 is no request's.
        region.closing = Some(request.unwrap_or(RequestId(0)));
        true
    }

    pub(super) fn advance_life(&mut self, effects: &mut Vec<Effect>) {
        let procs: Vec<ProcId> = self.spaces.keys().copied().collect();
        for proc in procs {
            self.end_regions(proc, effects);
            self.advance_drain(proc, effects);
            let space = &self.spaces[&proc];
            if !space.gone {
                continue;
            }
            if space.unborn {
                self.forget_unborn(proc);
            } else if space.ops == 0 && space.forks.is_empty() {
                self.end_space(proc, effects);
            } else {
                self.cancel_commands(proc, effects);
            }
        }
    }

    fn cancel_commands(&self, proc: ProcId, effects: &mut Vec<Effect>) {
        for (id, op) in self.shared.ops.iter() {
            let command = matches!(
                op.kind,
                Kind::Move { .. }
                    | Kind::DropLimbo { .. }
                    | Kind::Discard { .. }
                    | Kind::Prepare(Prepare::Populating { .. })
            );
            if op.proc == proc && command {
                effects.push(Effect::Cancel { op: id, proc });
            }
        }
    }

    fn end_regions(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        self.prove_endings(proc, effects);
        while let Some(space) = self.spaces.get(&proc).filter(|s| s.forks.is_empty()) {
            let gone = space.gone;
            let ended = space.regions.iter().position(|r| {
                let goes_on = match r.ending {
                    Ending::Proving | Ending::Disarming => false,
                    Ending::Proven => true,
                    // A child that was forked before the disarming is armed, and has yet to get its table.
                    Ending::Disarmed => r.proof == super::Proof::Given,
                };
                r.closing.is_some() && r.ops == 0 && (gone || goes_on)
            });
            let Some(index) = ended else {
                break;
            };
            if gone || space.regions[index].ending == Ending::Disarmed {
                self.end_region(proc, index, effects);
                continue;
            }
            self.disarm(proc, index, effects);
        }
    }

    fn prove_endings(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let Some(space) = self.spaces.get(&proc).filter(|s| !s.gone) else {
            return;
        };
        let proving: Vec<(Addr, super::Proof)> = space
            .regions
            .iter()
            .filter(|r| r.closing.is_some())
            .filter(|r| matches!(r.ending, Ending::Proving | Ending::Disarmed))
            .map(|r| (r.record.base, r.proof))
            .collect();
        for (base, proof) in proving {
            let proof = self.prove(proc, proof, effects);
            if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(base)) {
                region.proof = proof;
                if proof == super::Proof::Given && region.ending == Ending::Proving {
                    region.ending = Ending::Proven;
                }
            }
        }
    }

    /// Before a region ends: a touch of what the program gave up must not become a fault that nobody
    /// answers.
    fn disarm(&mut self, proc: ProcId, index: usize, effects: &mut Vec<Effect>) {
        if let Some(space) = self.spaces.get_mut(&proc) {
            let region = &mut space.regions[index];
            region.ending = Ending::Disarming;
            let span = region.span();
            let kind = Kind::Arm { span, on: false, then: ArmThen::Ended, tries: 0 };
            let id = self.shared.begin(space, Op { proc, at: span.start, kind });
            effects.push(Effect::Arm { op: id, proc, span, on: false });
        }
    }

    pub(super) fn end_region(&mut self, proc: ProcId, index: usize, effects: &mut Vec<Effect>) {
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let shared = &mut self.shared;
        let pages = u64::from(shared.extent_pages());
        let region = &space.regions[index];
        let (record, closing) = (region.record, region.closing);
        let mapped = region.arming.map_or(0, |arming| arming.mapped);
        shared.gauges.credit_pages -= u64::from(record.unarmed_extents - mapped) * pages;
        for extent in 0..record.extents {
            if space.regions[index].note(extent).pins > 0 {
                space.regions[index].note_mut(extent).pins = 0;
                shared.gauges.pinned_pages -= pages;
            }
            let touched = shared.record(&space.regions[index], extent);
            if touched != crate::record::ExtentRecord::default() {
                forget_extent(shared, space, index, extent);
            }
        }
        let region = space.regions.remove(index);
        if space.in_place {
            super::place::forget_blocks(shared, space, region.span());
        }
        for lease in space.leases.values().filter(|l| l.span.overlaps(region.span())) {
            if let Some(request) = lease.pending {
                refuse(effects, request, Refusal::NotManaged);
            }
        }
        space.leases.retain(|_, lease| !lease.span.overlaps(region.span()));
        shared.records.drop_region(proc, record.region);
        shared.give_back_records(record.first, record.extents);
        if let Some(request) = closing.filter(|&request| request != RequestId(0)) {
            reply(effects, request, Reply::Done);
        }
    }

    /// A child that ended before it had a table.
    fn forget_unborn(&mut self, proc: ProcId) {
        let parent = self.spaces.get(&proc).and_then(|s| s.parent);
        let waits = parent
            .and_then(|parent| self.spaces.get(&parent))
            .is_some_and(|s| s.forks.contains(&proc));
        if !waits && let Some(space) = self.spaces.get_mut(&proc) {
            space.unborn = false;
        }
    }

    fn end_space(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        for region in &mut space.regions {
            region.closing.get_or_insert(RequestId(0));
        }
        self.end_regions(proc, effects);
        let Some(space) = self.spaces.remove(&proc) else {
            return;
        };
        let stale: u64 = space.blocks.iter().map(Block::all_stale_pages).sum();
        self.shared.gauges.dropping_pages -= stale;
        for request in space.leases.values().filter_map(|lease| lease.pending) {
            refuse(effects, request, Refusal::NotAttached);
        }
        for &request in &space.draining {
            refuse(effects, request, Refusal::NotAttached);
        }
        self.waiting.retain(|w: &Waiting| w.proc != proc);
        self.discards.retain(|d| {
            if d.proc == proc
                && let Some(request) = d.request
            {
                refuse(effects, request, Refusal::NotAttached);
            }
            d.proc != proc
        });
        self.shared.queue.retain(|&(owner, _)| owner != proc);
        self.prepared.retain(|&(owner, _)| owner != proc);
        self.shared.slots.forget_proc(proc);
        effects.push(Effect::Release { proc });
    }

    /// Brings a whole process back, then disarms it.
    fn advance_drain(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let Some(space) = self.spaces.get(&proc) else {
            return;
        };
        if space.draining.is_empty() || space.is_held() {
            return;
        }
        let spans: Vec<Span> = space.regions.iter().map(super::space::Region::span).collect();
        if spans.iter().any(|&span| !self.bring_in(proc, span, false, effects)) {
            return;
        }
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        if space.ops > 0 {
            return;
        }
        if space.drained && !space.regions.is_empty() {
            return;
        }
        if self.has_lost_pages(proc) {
            self.refuse_drain(proc, effects);
            return;
        }
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        if space.regions.is_empty() {
            space.drained = false;
            for request in std::mem::take(&mut space.draining) {
                reply(effects, request, Reply::Done);
            }
            return;
        }
        space.drained = true;
        for span in spans {
            // Recorded first: a restart must not take native memory for managed.
            self.make_native(proc, span.start);
            let Some(space) = self.spaces.get_mut(&proc) else {
                return;
            };
            let kind = Kind::Arm { span, on: false, then: ArmThen::Drained, tries: 0 };
            let id = self.shared.begin(space, Op { proc, at: span.start, kind });
            effects.push(Effect::Arm { op: id, proc, span, on: false });
        }
    }

    /// Whether a page of the process was lost. The next touch of it is answered by us, wherever the
    /// kernel has no mark for it: disarmed, it would read as zeros.
    pub(super) fn has_lost_pages(&self, proc: ProcId) -> bool {
        self.spaces.get(&proc).is_some_and(|space| {
            space.regions.iter().any(|region| {
                let mut armed = region.record.unarmed_extents..region.record.extents;
                let lost = |state| state == PageState::Poisoned;
                armed.any(|extent| self.shared.record(region, extent).states.any(lost))
            })
        })
    }

    fn refuse_drain(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let asked = self.spaces.get_mut(&proc).map(|s| std::mem::take(&mut s.draining));
        for request in asked.into_iter().flatten() {
            refuse(effects, request, Refusal::StaysForLost);
        }
    }

    /// Forgets the records of a region all of which is in its place.
    fn make_native(&mut self, proc: ProcId, base: Addr) {
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(index) = space.region_index(base) else {
            return;
        };
        let extents = space.regions[index].record.extents;
        for extent in 0..extents {
            let record = shared.record(&space.regions[index], extent);
            debug_assert_eq!(
                record.states.mask(PageState::is_away) & !space.regions[index].note(extent).holes,
                0,
                "native memory would read as zeros"
            );
            if record != crate::record::ExtentRecord::default() {
                forget_extent(shared, space, index, extent);
            }
        }
        let region = &mut space.regions[index];
        let armed = u64::from(extents - region.record.unarmed_extents);
        shared.gauges.credit_pages += armed * u64::from(shared.extent_pages());
        region.record.unarmed_extents = extents;
        shared.records.put_region(region.record);
    }

    /// Starts bringing in what of `span` is not in its place, zeros included where `absent`. True when
    /// all of it is there.
    pub(super) fn bring_in(
        &mut self,
        proc: ProcId,
        span: Span,
        absent: bool,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let mut all = true;
        let mut at = span.start.align_down(EXTENT_BYTES);
        while at < span.end() {
            let next = at.plus(EXTENT_BYTES);
            let Some(region) = self.spaces.get(&proc).and_then(|s| s.region_at(at)) else {
                return true;
            };
            let extent = region.extent_of(at);
            let states = self.shared.record(region, extent).states;
            let holes = region.note(extent).holes;
            let missing = |page: u32| {
                // A page that is mapped no longer can never be there. What it has in limbo a rescue forgets.
                match states.get(page) {
                    PageState::LimboDirty | PageState::LimboClean => true,
                    PageState::Parked | PageState::Filling => holes & (1 << page) == 0,
                    PageState::Absent => absent && holes & (1 << page) == 0,
                    _ => false,
                }
            };
            if region.is_unarmed(extent) {
                // Native memory is there as soon as it is touched, which a device cannot do.
                if absent {
                    all = false;
                    if region.arming.is_none() {
                        let base = region.record.base;
                        self.arm_region(proc, base, ArmThen::Map, effects);
                    }
                }
                at = next;
                continue;
            }
            let pages = self.shared.extent_pages();
            if absent
                && region.note(extent).unseen
                && let Some(space) = self.spaces.get_mut(&proc)
                && let Some(index) = space.region_index(at)
            {
                self.shared.look_for_lease(space, index, extent, effects);
            }
            let Some(region) = self.spaces.get(&proc).and_then(|s| s.region_at(at)) else {
                return true;
            };
            // Somebody is still looking whether it is there in truth.
            all &= !(absent && region.note(extent).is_busy());
            if let Some(page) = (0..pages).find(|&page| missing(page)) {
                all = false;
                if !region.note(extent).is_busy() {
                    let page_at = at.plus(u64::from(page) * self.shared.page_bytes());
                    let fault = Waiting { proc, at: page_at, write: false, protected: false };
                    let desperate = self.is_stuck();
                    if self.serve(fault, desperate, effects) != super::fault::Served::Yes {
                        self.starving = true;
                        return false;
                    }
                }
            }
            at = next;
        }
        all
    }

    /// What the record says of a page; nothing where it is not armed. For tests.
    #[must_use]
    pub fn state_of(&self, proc: ProcId, at: Addr) -> Option<PageState> {
        let region = self.spaces.get(&proc)?.region_at(at)?;
        let extent = region.extent_of(at);
        if region.is_unarmed(extent) {
            return None;
        }
        Some(self.shared.record(region, extent).states.get(self.shared.page_of(at)))
    }
}
