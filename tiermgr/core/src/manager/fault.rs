//! Faults: look up, make room, fill.

use super::op::{ArmThen, Fill, Kind, Op, Piece, Prepare, Zero};
use super::shared::Shared;
use super::space::{Region, first_run, page_mask};
use super::{Manager, Waiting};
use crate::effect::Effect;
use crate::event::IoctlOutcome;
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::Records;
use crate::units::{Addr, EXTENT_BYTES, OpId, ProcId, SlotId, Span, low_u32};

/// How long to wait where the kernel had no memory for a page.
pub(super) const NO_MEMORY_RETRY_NS: u64 = 1_000_000;

/// What came of an attempt to serve a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// Work began, or there is nothing to do.
    Yes,
    /// It must wait for room.
    NoRoom,
    /// It must wait for a staging buffer.
    NoBuffer,
}

impl<R: Records> Manager<R> {
    pub(super) fn on_faulted(&mut self, fault: Waiting, effects: &mut Vec<Effect>) {
        self.shared.stats.faults += 1;
        let Some(space) = self.spaces.get_mut(&fault.proc) else {
            return;
        };
        let owner = space.region_at(fault.at).map(|r| r.note(r.extent_of(fault.at)).busy);
        let owner = owner.and_then(|id| self.shared.ops.get(id)).map(|op| &op.kind);
        if matches!(owner, Some(Kind::Prepare(Prepare::Populating { .. }))) {
            self.unblock_helper(fault, effects);
            return;
        }
        // Whoever sleeps in a held space is woken as a whole when the hold ends.
        if space.is_held() {
            return;
        }
        let Some(index) = space.region_index(fault.at) else {
            // A region that has ended was disarmed, which woke everybody. In any other case asleep is
            // the one answer that shows no wrong byte.
            return;
        };
        let drained = space.drained;
        let region = &mut space.regions[index];
        if drained
            || region.closing.is_some()
            || region.arming.is_some() && is_unmapped_yet(region, fault.at)
        {
            // Woken when the region is gone, or its map is known.
            return;
        }
        let extent = region.extent_of(fault.at);
        if region.is_unarmed(extent) {
            // A fault where we believe that none can be: only the kernel knows what is there.
            let base = region.record.base;
            self.arm_region(fault.proc, base, ArmThen::Map, effects);
            return;
        }
        let note = region.note_mut(extent);
        if note.is_busy() {
            note.wake = true;
            let ahead_of_device = matches!(
                self.shared.ops.get(note.busy).map(|op| &op.kind),
                Some(Kind::Fill(Fill { demand: false, .. }))
            );
            if ahead_of_device {
                self.note_progress(fault.proc, fault.at);
            }
            return;
        }
        if !self.waiting.is_empty() || self.serve(fault, false, effects) != Served::Yes {
            self.wait(fault);
        }
    }

    /// Queues a fault. One entry stands for all threads that sleep on an extent: those whose page it
    /// does not bring are woken at the end and ask again.
    fn wait(&mut self, fault: Waiting) {
        let extent = fault.at.align_down(EXTENT_BYTES);
        let same = |w: &Waiting| w.proc == fault.proc && w.at.align_down(EXTENT_BYTES) == extent;
        match self.waiting.iter_mut().find(|w| same(w)) {
            Some(waiting) => {
                waiting.write |= fault.write;
                if let Some(region) =
                    self.spaces.get_mut(&fault.proc).and_then(|s| s.region_at_mut(extent))
                {
                    let index = region.extent_of(extent);
                    region.note_mut(index).wake = true;
                }
            }
            None => self.waiting.push_back(fault),
        }
    }

    /// Serves faults that wait, oldest first, as far as room and buffers go.
    pub(super) fn serve_waiting(&mut self, effects: &mut Vec<Effect>) {
        for _ in 0..self.waiting.len() {
            let Some(fault) = self.waiting.front().copied() else {
                return;
            };
            let still_there = self
                .spaces
                .get(&fault.proc)
                .filter(|space| !space.is_held())
                .and_then(|space| space.region_at(fault.at))
                .is_some_and(|region| region.closing.is_none());
            if !still_there {
                // Gone, or woken as a whole later.
                self.waiting.pop_front();
                continue;
            }
            let busy = self.note(fault.proc, fault.at).is_some_and(|note| note.is_busy());
            if busy {
                if let Some(region) =
                    self.spaces.get_mut(&fault.proc).and_then(|s| s.region_at_mut(fault.at))
                {
                    let extent = region.extent_of(fault.at);
                    region.note_mut(extent).wake = true;
                }
                self.waiting.pop_front();
                continue;
            }
            let desperate = self.is_stuck();
            if desperate && !self.shared.has_room(u64::from(self.shared.extent_pages()), 0) {
                self.shared.stats.overcommitted_faults += 1;
            }
            match self.serve(fault, desperate, effects) {
                Served::Yes => {
                    self.waiting.pop_front();
                    self.wake_others(fault, effects);
                }
                Served::NoRoom | Served::NoBuffer => return,
            }
        }
    }

    /// Whoever waited with a fault that was served asks again, unless an operation wakes them at its end.
    fn wake_others(&mut self, fault: Waiting, effects: &mut Vec<Effect>) {
        let at = fault.at.align_down(EXTENT_BYTES);
        if let Some(region) = self.spaces.get_mut(&fault.proc).and_then(|s| s.region_at_mut(at)) {
            let extent = region.extent_of(at);
            let note = region.note_mut(extent);
            if !note.is_busy() && std::mem::take(&mut note.wake) {
                effects.push(Effect::Wake { proc: fault.proc, span: Span::new(at, EXTENT_BYTES) });
            }
        }
    }

    fn note(&self, proc: ProcId, at: Addr) -> Option<super::space::ExtentNote> {
        let region = self.spaces.get(&proc)?.region_at(at)?;
        Some(region.note(region.extent_of(at)))
    }

    /// Starts what the fault needs. `desperate`: room is taken even where there is none.
    pub(super) fn serve(
        &mut self,
        fault: Waiting,
        desperate: bool,
        effects: &mut Vec<Effect>,
    ) -> Served {
        let Waiting { proc, at, write, protected } = fault;
        let Some(space) = self.spaces.get(&proc) else {
            return Served::Yes;
        };
        let Some(region) = space.region_at(at) else {
            return Served::Yes;
        };
        let extent = region.extent_of(at);
        let base = region.extent_addr(extent);
        let states = self.shared.record(region, extent).states;
        let page = self.shared.page_of(at);
        let state = states.get(page);
        if space.in_place && states.any(PageState::is_limbo) {
            return self.stay(fault, desperate, effects);
        }
        if protected {
            if state == PageState::Absent {
                // It is there although nobody took note: zeros from just before a restart, or what a
                // forked child kept of memory that its parent gave up.
                let page_bytes = self.shared.page_bytes();
                let page = Span::new(at.align_down(page_bytes), page_bytes);
                self.note_pages(proc, page, PageEvent::FoundPresent);
            }
            if state == PageState::Parked {
                // A child has what its parent's table says is parked where that is a page of zeros which
                // the kernel shares: it moved after the fork. Filling tells that, by EEXIST, from an old
                // message, also where nobody can look at the page table.
                let served = self.start_fill(proc, base, 1, Some(write), desperate, effects);
                if served == Served::Yes {
                    self.wake_when_done(proc, at);
                }
                return served;
            }
            // Also where the page has moved away since: to clear what is not there is harmless.
            return self.unprotect(proc, base, desperate, effects);
        }
        let served = match state {
            PageState::LimboDirty | PageState::LimboClean => {
                self.start_rescue(proc, base, write, desperate, effects)
            }
            // The whole extent comes in, so that it never lies half here and half there.
            PageState::Parked | PageState::Absent if states.any(|s| s == PageState::Parked) => {
                self.start_fill(proc, base, 1, Some(write), desperate, effects)
            }
            PageState::Absent if states.any(PageState::is_limbo) => {
                self.start_rescue(proc, base, write, desperate, effects)
            }
            PageState::Absent => {
                let mask = states.mask(|s| s == PageState::Absent)
                    & page_mask(0, self.shared.extent_pages());
                self.start_zero(proc, base, mask, false, desperate, effects)
            }
            // The record says that the page is there. Either this message is old, or the client
            // dropped the page and expects zeros. A COPY of zeros tells: it never overwrites.
            PageState::Dirty | PageState::Clean => {
                self.start_zero(proc, base, page_mask(page, 1), true, true, effects)
            }
            PageState::Parked | PageState::Filling => Served::Yes,
            PageState::Poisoned => {
                let page_bytes = self.shared.page_bytes();
                let span = Span::new(at.align_down(page_bytes), page_bytes);
                effects.push(Effect::Poison { proc, span });
                Served::Yes
            }
        };
        if served == Served::Yes && state == PageState::Parked {
            self.note_progress(proc, at);
        }
        if served == Served::Yes && (state == PageState::Absent || state.is_limbo()) {
            // What begins may install other pages than the one that somebody sleeps on.
            self.wake_when_done(proc, at);
        }
        served
    }

    fn wake_when_done(&mut self, proc: ProcId, at: Addr) {
        if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) {
            let extent = region.extent_of(at);
            let note = region.note_mut(extent);
            note.wake |= note.is_busy();
        }
    }

    pub(super) fn note_progress(&mut self, proc: ProcId, at: Addr) {
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(region) = space.region_at(at) else {
            return;
        };
        if region.random.contains(region.extent_of(at)) {
            return;
        }
        // A stream ends with its region: what lies beside it is nothing that it will come to.
        let end = region.span().end().0 / EXTENT_BYTES;
        if let Some((first, count)) = space.streams.faulted(at.0 / EXTENT_BYTES) {
            let count = low_u32(end.saturating_sub(first).min(u64::from(count)));
            if count > 0 {
                space.ahead.push_back((Addr(first * EXTENT_BYTES), count));
            }
        }
    }

    /// Installs zeros in the pages of `mask`.
    pub(super) fn start_zero(
        &mut self,
        proc: ProcId,
        at: Addr,
        mask: PageMask,
        recheck: bool,
        desperate: bool,
        effects: &mut Vec<Effect>,
    ) -> Served {
        let shared = &mut self.shared;
        let pages = u64::from(mask.count_ones());
        if !desperate && !shared.has_room(pages, 0) {
            return Served::NoRoom;
        }
        let Some(space) = self.spaces.get_mut(&proc) else {
            return Served::Yes;
        };
        let Some(piece) = next_zero(shared.page_bytes(), at, mask) else {
            return Served::Yes;
        };
        let zero = Zero { mask, piece, recheck };
        let id = shared.begin(space, Op { proc, at, kind: Kind::Zero(zero) });
        shared.gauges.reserved_pages += pages;
        if let Some(region) = space.region_at_mut(at) {
            let extent = region.extent_of(at);
            Shared::<R>::lock(region, extent, id);
        }
        self.issue(id, effects);
        Served::Yes
    }

    /// The first write to a write-protected extent: its pages are dirty from now on.
    fn unprotect(
        &mut self,
        proc: ProcId,
        at: Addr,
        desperate: bool,
        effects: &mut Vec<Effect>,
    ) -> Served {
        let cow = self.note(proc, at).is_some_and(|note| note.cow);
        let pages = u64::from(self.shared.extent_pages());
        if cow && !desperate && !self.shared.has_room(pages, 0) {
            return Served::NoRoom;
        }
        if cow {
            self.part(proc, at);
            // Of all its pages only those that are written to are copied.
            if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) {
                let extent = region.extent_of(at);
                region.note_mut(extent).cow = true;
            }
        }
        self.dirty_extent(proc, at);
        let Some(space) = self.spaces.get_mut(&proc) else {
            return Served::Yes;
        };
        let id = self.shared.begin(space, Op { proc, at, kind: Kind::Unprotect { page: None } });
        if let Some(region) = space.region_at_mut(at) {
            let extent = region.extent_of(at);
            Shared::<R>::lock(region, extent, id);
        }
        self.issue(id, effects);
        Served::Yes
    }

    /// Records that the clean pages of an extent may be written to from now on.
    pub(super) fn dirty_extent(&mut self, proc: ProcId, at: Addr) {
        let shared = &mut self.shared;
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) else {
            return;
        };
        let extent = region.extent_of(at);
        let record = shared.record(region, extent);
        let clean = record.states.mask(|s| s == PageState::Clean);
        if let Some(states) = record.states.after(clean, PageEvent::Written)
            && clean != 0
        {
            shared.update(proc, region, extent, states, record.slot, record.limbo());
        }
    }

    /// Whether zeros are given up that find no memory: it may come only from what a held process has, which stays
    /// until nothing of it is under way. Another operation than the one that has the extent is for the helper,
    /// which nobody else would wake.
    fn ends_without_memory(&self, id: OpId, proc: ProcId, at: Addr) -> bool {
        let is_whole = self.note(proc, at).is_some_and(|note| note.busy == id);
        self.spaces.get(&proc).is_none_or(|space| space.gone || is_whole && space.is_held())
    }

    pub(super) fn on_zeroed(
        &mut self,
        id: OpId,
        bytes: u64,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let Some(Op { proc, at, kind: Kind::Zero(zero) }) = self.shared.ops.get(id) else {
            return;
        };
        let (proc, at, mut zero) = (*proc, *at, *zero);
        let page_bytes = self.shared.page_bytes();
        let bytes = bytes.min(zero.piece.len);
        let mut done = Span::new(zero.piece.start, bytes);
        if bytes > 0 {
            self.shared.stats.zeroed_pages += bytes / page_bytes;
            if zero.recheck {
                // The frame that the record stood for was gone, or is another process' alone.
                self.part(proc, at);
            }
            self.note_pages(proc, done, PageEvent::ZeroInstalled);
            if zero.recheck {
                self.note_pages(proc, done, PageEvent::Written);
            }
        }
        let mut give_up = false;
        match outcome {
            IoctlOutcome::Done => {}
            IoctlOutcome::Exists => {
                let page = Span::new(zero.piece.start.plus(bytes), page_bytes);
                self.note_pages(proc, page, PageEvent::FoundPresent);
                effects.push(Effect::Wake { proc, span: page });
                done.len += page_bytes;
            }
            IoctlOutcome::NoRange if zero.piece.len - bytes > page_bytes => {
                zero.piece.len = page_bytes;
            }
            IoctlOutcome::NoMemory if self.ends_without_memory(id, proc, at) => give_up = true,
            IoctlOutcome::EventsPending | IoctlOutcome::NoMemory => {}
            // This page is mapped no longer; the others of the extent may be.
            IoctlOutcome::NoRange => {
                self.note_hole(proc, zero.piece.start.plus(bytes));
                done.len += page_bytes;
            }
            IoctlOutcome::NoProcess => give_up = true,
        }
        let first = self.shared.page_of(done.start);
        let count = low_u32(done.len / page_bytes);
        let finished = page_mask(first, count) & zero.mask;
        zero.mask &= !finished;
        self.shared.gauges.reserved_pages -= u64::from(finished.count_ones());
        let next = next_zero(page_bytes, at, zero.mask).filter(|_| !give_up);
        let Some(next) = next else {
            self.shared.gauges.reserved_pages -= u64::from(zero.mask.count_ones());
            self.end_extent_op(id, zero.recheck, effects);
            return;
        };
        zero.piece = match outcome {
            IoctlOutcome::NoRange => Piece { start: next.start, len: page_bytes },
            _ => next,
        };
        if let Some(op) = self.shared.ops.get_mut(id) {
            op.kind = Kind::Zero(zero);
        }
        match outcome {
            IoctlOutcome::EventsPending => self.retry_later(id, 0),
            IoctlOutcome::NoMemory => self.retry_later(id, NO_MEMORY_RETRY_NS),
            _ => self.issue(id, effects),
        }
    }

    /// Notes that the page at `at` is mapped no longer.
    pub(super) fn note_hole(&mut self, proc: ProcId, at: Addr) {
        let page = page_mask(self.shared.page_of(at), 1);
        if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) {
            let extent = region.extent_of(at);
            region.note_mut(extent).holes |= page;
        }
    }

    /// Applies `event` to whole pages, where it can happen to them.
    pub(super) fn note_pages(&mut self, proc: ProcId, span: Span, event: PageEvent) {
        let shared = &mut self.shared;
        let page_bytes = shared.page_bytes();
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(span.start))
        else {
            return;
        };
        let mut at = span.start;
        while at < span.end() {
            let extent = region.extent_of(at);
            let end = region.extent_addr(extent + 1).min(span.end());
            let record = shared.record(region, extent);
            let mut states = record.states;
            for index in 0..(end.0 - at.0) / page_bytes {
                let page = shared.page_of(at.plus(index * page_bytes));
                if let Some(next) = states.get(page).next(event) {
                    states.set(page, next);
                }
            }
            shared.update(proc, region, extent, states, record.slot, record.limbo());
            at = end;
        }
    }

    /// Ends an operation that holds the single extent it begins at.
    pub(super) fn end_extent_op(&mut self, id: OpId, wake: bool, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(proc) = shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(op) = shared.end(space, id) else {
            return;
        };
        let Some(region) = space.region_at_mut(op.at) else {
            return;
        };
        let extent = region.extent_of(op.at);
        region.note_mut(extent).wake |= wake;
        Shared::<R>::unlock(proc, region, extent, id, effects);
        if shared.record(region, extent).states.any(PageState::is_resident) {
            shared.became_resident(proc, region, extent);
        }
    }

    pub(super) fn on_protected(
        &mut self,
        id: OpId,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        self.note_proof(id, outcome);
        if matches!(outcome, IoctlOutcome::EventsPending | IoctlOutcome::NoMemory) {
            let delay = if outcome == IoctlOutcome::NoMemory { NO_MEMORY_RETRY_NS } else { 0 };
            self.retry_later(id, delay);
            return;
        }
        match self.shared.ops.get(id).map(|op| &op.kind) {
            Some(&Kind::Unprotect { page }) => self.on_unprotected(id, page, outcome, effects),
            Some(Kind::Shield { .. } | Kind::Probe) => {
                self.end_plain_op(id);
            }
            Some(Kind::Guard { .. }) => self.on_guarded(id, outcome, effects),
            Some(Kind::Prepare(_)) => self.on_prepared(id, outcome, effects),
            _ => {}
        }
    }

    fn on_unprotected(
        &mut self,
        id: OpId,
        page: Option<u32>,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let next = match page {
            None if outcome == IoctlOutcome::NoRange => 0,
            Some(page) if outcome != IoctlOutcome::NoProcess => page + 1,
            _ => self.shared.extent_pages(),
        };
        if next >= self.shared.extent_pages() {
            // What was cleared has woken whoever slept there, page by page too: they are woken once more for nothing.
            self.end_extent_op(id, outcome != IoctlOutcome::Done || page.is_some(), effects);
            return;
        }
        if let Some(op) = self.shared.ops.get_mut(id) {
            op.kind = Kind::Unprotect { page: Some(next) };
        }
        self.issue(id, effects);
    }

    /// Ends an operation that holds no extent.
    pub(super) fn end_plain_op(&mut self, id: OpId) -> Option<Op> {
        let proc = self.shared.ops.get(id)?.proc;
        let space = self.spaces.get_mut(&proc)?;
        self.shared.end(space, id)
    }
}

/// Whether `at` lies in the part of a region that has been armed but not looked up yet.
fn is_unmapped_yet(region: &Region, at: Addr) -> bool {
    region.is_unarmed(region.extent_of(at))
}

/// The first run of pages still to be zeroed.
fn next_zero(page_bytes: u64, at: Addr, mask: PageMask) -> Option<Piece> {
    let (first, count) = first_run(mask)?;
    Some(Piece {
        start: at.plus(u64::from(first) * page_bytes),
        len: u64::from(count) * page_bytes,
    })
}

/// "No slot", for updates that leave none.
pub(super) const NO_SLOT: SlotId = SlotId::NONE;
