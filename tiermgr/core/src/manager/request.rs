//! What clients ask for.

use super::limbo::{leave_block, note_stale, settle_block};
use super::op::{ArmThen, Kind, Op};
use super::shared::Shared;
use super::space::{Lease, Region, Space};
use super::{Manager, PendingDiscard, Proof, refuse, reply};
use crate::effect::{Command, Effect, Refusal, Reply};
use crate::event::{Advice, CommandOutcome, Request};
use crate::limits::{LEASES_MAX, REGIONS_MAX};
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::{Records, RegionRecord};
use crate::units::{
    Addr, CHUNK_BYTES, CHUNK_EXTENTS, EXTENT_BYTES, LeaseId, OpId, ProcId, RegionId, RequestId,
    Span, low_u32,
};

/// How long a pin waits for a budget that allows it.
const PIN_PATIENCE_NS: u64 = 2_000_000_000;

impl<R: Records> Manager<R> {
    pub(super) fn on_asked(
        &mut self,
        request: RequestId,
        proc: ProcId,
        what: Request,
        effects: &mut Vec<Effect>,
    ) {
        let Some(space) = self.spaces.get(&proc).filter(|s| !s.gone) else {
            self.pins_waiting.remove(&request);
            refuse(effects, request, Refusal::NotAttached);
            return;
        };
        if space.is_held() {
            self.deferred.push_back((request, proc, what));
            return;
        }
        let span = match what {
            Request::Advise { span, .. }
            | Request::Prefetch { span }
            | Request::Pin { span }
            | Request::Residency { span } => Some(span),
            Request::AddRegion { .. }
            | Request::DropRegion { .. }
            | Request::Discard { .. }
            | Request::Unpin { .. }
            | Request::Drain => None,
        };
        if let Some(span) = span
            && let Err(why) = self.check_span(proc, span)
        {
            refuse(effects, request, why);
            return;
        }
        match what {
            Request::AddRegion { span } => self.add_region(request, proc, span, effects),
            Request::DropRegion { region } => {
                if !self.close_region(proc, region, Some(request)) {
                    refuse(effects, request, Refusal::NotManaged);
                }
            }
            Request::Discard { span } => match self.check_span(proc, span) {
                Ok(region) => self.discards.push_back(PendingDiscard {
                    request: Some(request),
                    proc,
                    region,
                    span,
                    proof: Proof::Needed,
                }),
                Err(why) => refuse(effects, request, why),
            },
            Request::Advise { span, advice } => {
                self.advise(proc, span, advice);
                reply(effects, request, Reply::Done);
            }
            Request::Prefetch { span } => {
                self.want_ahead(proc, span);
                reply(effects, request, Reply::Done);
            }
            Request::Pin { span } => self.pin(request, proc, span, effects),
            Request::Unpin { lease } => self.unpin(request, proc, lease, effects),
            Request::Residency { span } => {
                let region = self.spaces.get(&proc).and_then(|s| s.region_at(span.start));
                let answer = region.map_or(Reply::Refused(Refusal::NotManaged), |region| {
                    Reply::Residency(self.shared.residency(region, span))
                });
                reply(effects, request, answer);
            }
            Request::Drain => self.drain(request, proc, effects),
        }
    }

    /// Requests that came while their process was held.
    pub(super) fn ask_deferred(&mut self, effects: &mut Vec<Effect>) {
        for _ in 0..self.deferred.len() {
            if let Some((request, proc, what)) = self.deferred.pop_front() {
                self.on_asked(request, proc, what, effects);
            }
        }
    }

    /// The region that all of `span` lies in.
    fn check_span(&self, proc: ProcId, span: Span) -> Result<RegionId, Refusal> {
        let page = self.shared.page_bytes();
        if span.len == 0 || !span.start.0.is_multiple_of(page) || !span.len.is_multiple_of(page) {
            return Err(Refusal::Misaligned);
        }
        let region = self.spaces.get(&proc).and_then(|s| s.region_at(span.start));
        let region = region.filter(|r| r.closing.is_none()).ok_or(Refusal::NotManaged)?;
        let left = region.span().end().0 - span.start.0;
        if span.len > left { Err(Refusal::NotManaged) } else { Ok(region.record.region) }
    }

    fn add_region(
        &mut self,
        request: RequestId,
        proc: ProcId,
        span: Span,
        effects: &mut Vec<Effect>,
    ) {
        let aligned =
            span.start.0.is_multiple_of(CHUNK_BYTES) && span.len.is_multiple_of(CHUNK_BYTES);
        if !aligned || span.len == 0 || span.start.0.checked_add(span.len).is_none() {
            refuse(effects, request, Refusal::Misaligned);
            return;
        }
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        if !space.draining.is_empty() {
            refuse(effects, request, Refusal::NotAttached);
            return;
        }
        if space.regions.iter().any(|r| r.span().overlaps(span)) {
            refuse(effects, request, Refusal::Overlaps);
            return;
        }
        let extents = u32::try_from(span.len / EXTENT_BYTES);
        let extents = extents.ok().filter(|_| space.regions.len() < REGIONS_MAX);
        let taken = extents
            .ok_or(Refusal::TooMany)
            .and_then(|extents| Ok((shared.take_records(extents)?, extents)));
        let (first, extents) = match taken {
            Ok(taken) => taken,
            Err(why) => {
                refuse(effects, request, why);
                return;
            }
        };
        let pages = u64::from(shared.extent_pages());
        let room =
            shared.budget_pages.saturating_sub(shared.gauges.used_pages() + shared.reserve_pages());
        let chunks = room / (pages * u64::from(CHUNK_EXTENTS));
        let unarmed = low_u32((chunks * u64::from(CHUNK_EXTENTS)).min(u64::from(extents)));
        shared.gauges.credit_pages += u64::from(unarmed) * pages;
        self.next_region += 1;
        let number = RegionId(self.next_region);
        let record = RegionRecord {
            proc,
            region: number,
            base: span.start,
            extents,
            first,
            unarmed_extents: unarmed,
        };
        shared.records.put_region(record);
        let at = space.regions.partition_point(|r| r.record.base < span.start);
        space.regions.insert(at, Region::new(record));
        if unarmed == extents {
            reply(effects, request, Reply::Region(number));
            return;
        }
        let native = u64::from(unarmed) * EXTENT_BYTES;
        let armed = Span::new(span.start.plus(native), span.len - native);
        let then = ArmThen::ReplyRegion(request);
        let kind = Kind::Arm { span: armed, on: true, then, tries: 0 };
        let id = shared.begin(space, Op { proc, at: span.start, kind });
        self.issue(id, effects);
    }

    fn advise(&mut self, proc: ProcId, span: Span, advice: Advice) {
        match advice {
            Advice::WillNeed => self.want_ahead(proc, span),
            Advice::Cold => self.make_cold(proc, span),
            // Reading in order is found out by looking.
            Advice::Sequential | Advice::Cyclic | Advice::Normal => {
                self.set_random(proc, span, false);
            }
            Advice::Random => self.set_random(proc, span, true),
            // Clean pages keep their slots anyway.
            Advice::ReadMostly => {}
        }
    }

    /// An extent of which a part is touched in no order counts as one.
    fn set_random(&mut self, proc: ProcId, span: Span, is_random: bool) {
        if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(span.start)) {
            let first = region.extent_of(span.start);
            let last = region.extent_of(Addr(span.end().0 - 1));
            region.random.set(first..last + 1, is_random);
        }
    }

    fn want_ahead(&mut self, proc: ProcId, span: Span) {
        let first = span.start.align_down(EXTENT_BYTES);
        let extents = (span.end().0 - first.0).div_ceil(EXTENT_BYTES);
        if let Some(space) = self.spaces.get_mut(&proc) {
            space.ahead.push_back((first, u32::try_from(extents).unwrap_or(u32::MAX)));
        }
    }

    /// Puts the chunks of a span first in the queue of what leaves.
    fn make_cold(&mut self, proc: ProcId, span: Span) {
        let shared = &mut self.shared;
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(span.start))
        else {
            return;
        };
        let first = region.extent_of(span.start);
        let last = region.extent_of(Addr(span.end().0 - 1));
        shared
            .queue
            .retain(|&(owner, at)| owner != proc || !Span::new(at, CHUNK_BYTES).overlaps(span));
        for extent in (first..=last).rev() {
            let old = shared.stamp.wrapping_sub(u32::MAX / 2);
            region.note_mut(extent).stamp = old;
            if extent % CHUNK_EXTENTS == 0 || extent == first {
                let at = region.extent_addr(extent).align_down(CHUNK_BYTES);
                region.chunk_mut(extent / CHUNK_EXTENTS).queued = true;
                shared.queue.push_front((proc, at));
            }
        }
    }

    fn pin(&mut self, request: RequestId, proc: ProcId, span: Span, effects: &mut Vec<Effect>) {
        let extent_pages = u64::from(self.shared.extent_pages());
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(index) = space.region_index(span.start) else {
            return;
        };
        if space.leases.len() >= LEASES_MAX {
            self.pins_waiting.remove(&request);
            refuse(effects, request, Refusal::TooMany);
            return;
        }
        let region = &mut space.regions[index];
        let first = region.extent_of(span.start);
        let last = region.extent_of(Addr(span.end().0 - 1));
        let fresh = (first..=last).filter(|&extent| region.note(extent).pins == 0).count() as u64;
        let full = (first..=last).any(|extent| region.note(extent).pins == u16::MAX);
        for extent in first..=last {
            // Whether a page is mapped is to be found out anew.
            region.note_mut(extent).holes = 0;
        }
        let pinned = self.shared.gauges.pinned_pages + fresh * extent_pages;
        let beyond = pinned > self.shared.budget_pages / 2;
        if beyond && !full && self.waits_for_room(request, pinned, effects) {
            self.deferred.push_back((request, proc, Request::Pin { span }));
            return;
        }
        self.pins_waiting.remove(&request);
        if full || beyond {
            refuse(effects, request, Refusal::NoRoom);
            return;
        }
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let region = &mut space.regions[index];
        self.shared.gauges.pinned_pages = pinned;
        for extent in first..=last {
            region.note_mut(extent).pins += 1;
        }
        // What a lease promises is there in truth, not only by the record.
        for extent in first..=last {
            let region = &mut space.regions[index];
            if region.is_unarmed(extent) {
                // Its arming finds out.
                continue;
            }
            region.note_mut(extent).unseen = true;
            self.shared.look_for_lease(space, index, extent, effects);
        }
        self.next_lease += 1;
        space.leases.insert(self.next_lease, Lease { span, pending: Some(request) });
    }

    /// The budget may only be small because others have not given up theirs yet: a pin asks for more
    /// and waits a moment. False once it has waited long enough.
    fn waits_for_room(
        &mut self,
        request: RequestId,
        pinned_pages: u64,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let now = self.shared.now;
        let since = *self.pins_waiting.entry(request).or_insert(now);
        if since == now {
            effects.push(Effect::WantRoom { bytes: 2 * pinned_pages * self.shared.page_bytes() });
        }
        let until = since.after_ns(PIN_PATIENCE_NS);
        self.timer = self.timer.min(until);
        now < until
    }

    fn unpin(
        &mut self,
        request: RequestId,
        proc: ProcId,
        lease: LeaseId,
        effects: &mut Vec<Effect>,
    ) {
        let extent_pages = u64::from(self.shared.extent_pages());
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(ended) = space.leases.remove(&lease.0) else {
            refuse(effects, request, Refusal::NoLease);
            return;
        };
        if let Some(pending) = ended.pending {
            refuse(effects, pending, Refusal::NoLease);
        }
        if let Some(region) = space.region_at_mut(ended.span.start) {
            let first = region.extent_of(ended.span.start);
            let last = region.extent_of(crate::units::Addr(ended.span.end().0 - 1));
            for extent in first..=last {
                let note = region.note_mut(extent);
                note.pins = note.pins.saturating_sub(1);
                if note.pins == 0 {
                    self.shared.gauges.pinned_pages -= extent_pages;
                }
            }
        }
        reply(effects, request, Reply::Done);
    }

    /// Brings in what leases wait for, and answers those that have all of it.
    pub(super) fn advance_leases(&mut self, effects: &mut Vec<Effect>) {
        let pending: Vec<(ProcId, u64, Span, RequestId)> = self
            .spaces
            .values()
            .filter(|space| !space.is_held())
            .flat_map(|space| {
                let id = space.id;
                space.leases.iter().filter_map(move |(&lease, l)| {
                    l.pending.map(|request| (id, lease, l.span, request))
                })
            })
            .collect();
        for (proc, lease, span, request) in pending {
            let there = self.bring_in(proc, span, true, effects);
            let lost = self.spaces.get(&proc).and_then(|s| s.region_at(span.start)).is_some_and(
                |region| {
                    let first = region.extent_of(span.start);
                    let last = region.extent_of(Addr(span.end().0 - 1));
                    self.shared.residency(region, span).poisoned_bytes > 0
                        || (first..=last).any(|extent| {
                            let asked = covered(&self.shared, region.extent_addr(extent), span);
                            region.note(extent).holes & asked != 0
                        })
                },
            );
            if !there && !lost {
                continue;
            }
            if let Some(entry) =
                self.spaces.get_mut(&proc).and_then(|space| space.leases.get_mut(&lease))
            {
                entry.pending = None;
            }
            if lost {
                let dropped = RequestId(0);
                let mut unwanted = Vec::new();
                self.unpin(dropped, proc, LeaseId(lease), &mut unwanted);
                refuse(effects, request, Refusal::Lost);
            } else {
                reply(effects, request, Reply::Lease(LeaseId(lease)));
            }
        }
    }

    fn drain(&mut self, request: RequestId, proc: ProcId, effects: &mut Vec<Effect>) {
        let gauges = &self.shared.gauges;
        if gauges.used_pages() + gauges.parked_pages > self.shared.budget_pages {
            refuse(effects, request, Refusal::DoesNotFit);
            return;
        }
        if self.has_lost_pages(proc) {
            refuse(effects, request, Refusal::StaysForLost);
            return;
        }
        if let Some(space) = self.spaces.get_mut(&proc) {
            space.draining.push(request);
            let chunks = space.regions.iter_mut().flat_map(|region| &mut region.chunks);
            for note in chunks.flatten().flat_map(|chunk| &mut chunk.extents) {
                // Whether a page is mapped is to be found out anew.
                note.holes = 0;
            }
        }
    }

    /// Begins discards none of whose extents is held by an operation.
    pub(super) fn advance_discards(&mut self, effects: &mut Vec<Effect>) {
        for _ in 0..self.discards.len() {
            let Some(mut discard) = self.discards.pop_front() else {
                return;
            };
            discard.proof = self.prove(discard.proc, discard.proof, effects);
            if discard.proof != Proof::Given || !self.begin_discard(discard, effects) {
                self.discards.push_back(discard);
            }
        }
    }

    fn begin_discard(&mut self, discard: PendingDiscard, effects: &mut Vec<Effect>) -> bool {
        let PendingDiscard { request, proc, region, span, .. } = discard;
        let Some(space) = self.spaces.get(&proc) else {
            if let Some(request) = request {
                refuse(effects, request, Refusal::NotAttached);
            }
            return true;
        };
        // Of one that has gone too: what it gave up after it forked is its children's.
        if space.is_held() && !(space.gone && space.forks.is_empty()) {
            return false;
        }
        let here = space.region_index(span.start);
        let Some(index) = here.filter(|&index| space.regions[index].record.region == region) else {
            if let Some(request) = request {
                refuse(effects, request, Refusal::NotManaged);
            }
            return true;
        };
        let region = &space.regions[index];
        let first = region.extent_of(span.start);
        let last = region.extent_of(Addr(span.end().0 - 1));
        let busy = (first..=last).any(|extent| region.note(extent).is_busy());
        if busy || region.arming.is_some() {
            return false;
        }
        if request.is_some() && !space.has_helper {
            // Nobody can zap it: the client clears it itself.
            if let Some(request) = request {
                refuse(effects, request, Refusal::NotAttached);
            }
            return true;
        }
        // Until the helper has dropped them the pages take room here, whoever else has them.
        self.part_span(proc, span);
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return true;
        };
        let at = span.start;
        let id =
            shared.begin(space, Op { proc, at, kind: Kind::Discard { span, request, pages: 0 } });
        let before = shared.gauges.resident_pages;
        let mut rested = 0;
        for extent in first..=last {
            let region = &mut space.regions[index];
            if region.is_unarmed(extent) {
                continue;
            }
            Shared::<R>::lock(region, extent, id);
            let base = region.extent_addr(extent);
            let states = shared.record(region, extent).states;
            // What the zap takes is forgotten before it: a kill in between must not leave a record of bytes
            // that are nowhere. What it does not reach is kept until it has been carried out: it may be refused.
            let in_place = space.in_place;
            let zapped = states.mask(|s| s.is_resident() || in_place && s.is_limbo());
            let given_up = covered(shared, base, span) & zapped;
            rested += u64::from((states.mask(PageState::is_limbo) & given_up).count_ones());
            give_up(shared, space, index, extent, given_up);
        }
        let freed = before.saturating_sub(shared.gauges.resident_pages) + rested;
        if let Some(op) = shared.ops.get_mut(id)
            && let Kind::Discard { pages, .. } = &mut op.kind
        {
            *pages = freed;
            shared.gauges.dropping_pages += freed;
        }
        if request.is_some() {
            effects.push(Effect::Command { op: id, proc, command: Command::Drop(span) });
        } else {
            // The mapping is gone already: there is nothing to zap, and somebody else may be there.
            self.finish_discard(id, true, effects);
        }
        true
    }

    pub(super) fn on_discarded(
        &mut self,
        id: OpId,
        outcome: CommandOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let Some(Op { kind: Kind::Discard { request, .. }, .. }) = self.shared.ops.get(id) else {
            return;
        };
        if let Some(request) = *request {
            if outcome == CommandOutcome::Done {
                reply(effects, request, Reply::Done);
            } else {
                refuse(effects, request, Refusal::NotAttached);
            }
        }
        self.finish_discard(id, outcome == CommandOutcome::Done, effects);
    }

    fn finish_discard(&mut self, id: OpId, zapped: bool, effects: &mut Vec<Effect>) {
        let Some(Op { proc, kind: Kind::Discard { span, pages, .. }, .. }) = self.end_plain_op(id)
        else {
            return;
        };
        let shared = &mut self.shared;
        shared.gauges.dropping_pages -= pages;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(index) = space.region_index(span.start) else {
            return;
        };
        let region = &space.regions[index];
        let first = region.extent_of(span.start);
        let last = region.extent_of(Addr(span.end().0 - 1));
        space.zapped.push((shared.ops.next(), span));
        for extent in first..=last {
            let region = &space.regions[index];
            if region.is_unarmed(extent) {
                continue;
            }
            // What was armed meanwhile is not this operation's.
            if zapped && region.note(extent).busy == id {
                let given_up = covered(shared, region.extent_addr(extent), span);
                give_up(shared, space, index, extent, given_up);
            }
            let region = &mut space.regions[index];
            Shared::<R>::unlock(proc, region, extent, id, effects);
            if !zapped {
                // What is still there takes room, and is the newest.
                let at = region.extent_addr(extent);
                let absent = shared.record(region, extent).states.mask(|s| s == PageState::Absent);
                let held_pages = u64::from((absent & covered(shared, at, span)).count_ones());
                shared.gauges.dropping_pages += held_pages;
                let kind = Kind::Look { in_place: None, strict: false, held_pages };
                let look = shared.begin(space, Op { proc, at, kind });
                Shared::<R>::lock(&mut space.regions[index], extent, look);
                effects.push(Effect::ReadMap { op: look, proc, at });
            }
        }
    }
}

/// The client wants the bytes of these pages of an extent no more, wherever they are.
fn give_up<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    index: usize,
    extent: u32,
    pages: PageMask,
) {
    let proc = space.id;
    let region = &mut space.regions[index];
    let record = shared.record(region, extent);
    let Some(states) = record.states.after(pages, PageEvent::Discarded) else {
        return;
    };
    let base = region.extent_addr(extent);
    let limbo = record.limbo();
    let from_limbo = record.states.mask(PageState::is_limbo) & pages;
    shared.update(proc, region, extent, states, record.slot, limbo);
    let Some(block) = limbo else {
        return;
    };
    if !states.any(PageState::is_limbo) {
        leave_block(shared, space, block, base);
        settle_block(shared, space, block);
    } else if !space.in_place {
        // They take room in limbo until the extent leaves it.
        note_stale(shared, space, block, base, from_limbo.count_ones());
    }
}

/// The pages of the extent at `base` that lie in `span`.
fn covered<R: Records>(shared: &Shared<R>, base: Addr, span: Span) -> PageMask {
    let page_bytes = shared.page_bytes();
    (0..shared.extent_pages())
        .filter(|&page| span.contains(base.plus(u64::from(page) * page_bytes)))
        .fold(0, |mask, page| mask | 1 << page)
}
