//! Bringing extents in from their slots, for a fault or ahead of one.

use super::Manager;
use super::fault::{NO_MEMORY_RETRY_NS, Served};
use super::op::{Fill, Kind, Op, Piece};
use super::shared::{Shared, fill_copy};
use super::space::{Region, Space, page_mask, runs};
use crate::effect::{BufRange, Effect};
use crate::event::IoctlOutcome;
use crate::limits::COPY_PIECE_BYTES;
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::Records;
use crate::units::{Addr, CHUNK_BYTES, CHUNK_EXTENTS, EXTENT_BYTES, OpId, ProcId, Span, low_u32};

/// Times that a failed read is tried again before its pages count as lost.
const READ_TRIES_MAX: u8 = 6;
/// Wait before the first new try; it doubles each time.
const READ_RETRY_NS: u64 = 1_000_000;

impl<R: Records> Manager<R> {
    /// Reads what streams and clients want ahead of a touch, while there is room to spare.
    pub(super) fn read_ahead(&mut self, effects: &mut Vec<Effect>) {
        let procs: Vec<ProcId> =
            self.spaces.values().filter(|s| !s.ahead.is_empty()).map(|s| s.id).collect();
        for proc in procs {
            while let Some((at, count)) =
                self.spaces.get_mut(&proc).and_then(|space| space.ahead.pop_front())
            {
                let Some(space) = self.spaces.get_mut(&proc) else {
                    break;
                };
                if !self.waiting.is_empty() || space.is_held() {
                    space.ahead.push_front((at, count));
                    break;
                }
                let done = self.read_ahead_run(proc, at, count, effects);
                if done == 0 {
                    if let Some(space) = self.spaces.get_mut(&proc) {
                        space.ahead.push_front((at, count));
                    }
                    break;
                }
                if done < count
                    && let Some(space) = self.spaces.get_mut(&proc)
                {
                    space.ahead.push_front((at.plus(u64::from(done) * EXTENT_BYTES), count - done));
                }
            }
            if let Some(space) = self.spaces.get_mut(&proc) {
                // Wishes that nobody could follow for long are stale.
                while space.ahead.len() > 64 {
                    space.ahead.pop_front();
                }
            }
        }
    }

    /// Starts one read for the first run of parked extents. Gives how many extents are dealt with
    /// (0: no room or no buffer now).
    fn read_ahead_run(
        &mut self,
        proc: ProcId,
        at: Addr,
        count: u32,
        effects: &mut Vec<Effect>,
    ) -> u32 {
        let Some(region) = self.spaces.get(&proc).and_then(|s| s.region_at(at)) else {
            return count;
        };
        if region.closing.is_some() {
            return count;
        }
        let first = region.extent_of(at);
        let chunk_end = (first / CHUNK_EXTENTS + 1) * CHUNK_EXTENTS;
        let end = (first + count).min(chunk_end).min(region.record.extents);
        let wanted = |extent: u32| {
            !region.note(extent).is_busy()
                && !region.is_unarmed(extent)
                && self.shared.record(region, extent).states.any(|s| s == PageState::Parked)
        };
        let Some(start) = (first..end).find(|&extent| wanted(extent)) else {
            return end - first;
        };
        let slot = self.shared.record(region, start).slot;
        let run = (start..end)
            .take_while(|&extent| {
                wanted(extent)
                    && self.shared.record(region, extent).slot == slot.plus(extent - start)
            })
            .count();
        let run = low_u32(run as u64);
        let start_at = region.extent_addr(start);
        match self.start_fill(proc, start_at, run, None, false, effects) {
            Served::Yes => start + run - first,
            Served::NoRoom | Served::NoBuffer => start - first,
        }
    }

    /// Reads `count` extents of one chunk, in consecutive slots, into their places. `demand` is
    /// `Some(write)` where a thread waits for the (single) extent.
    pub(super) fn start_fill(
        &mut self,
        proc: ProcId,
        at: Addr,
        count: u32,
        demand: Option<bool>,
        desperate: bool,
        effects: &mut Vec<Effect>,
    ) -> Served {
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return Served::Yes;
        };
        let Some(index) = space.region_index(at) else {
            return Served::Yes;
        };
        let first = space.regions[index].extent_of(at);
        let parked = |states: crate::page::PageStates| states.mask(|s| s == PageState::Parked);
        let pages: u32 = (first..first + count)
            .map(|e| parked(shared.record(&space.regions[index], e).states).count_ones())
            .sum();
        let keep = if demand.is_some() { 0 } else { shared.reserve_pages() / 2 };
        if !desperate && !shared.has_room(u64::from(pages), keep) {
            return Served::NoRoom;
        }
        let buffer = match count {
            1 => shared.staging.take_demand(),
            _ => shared.staging.take_for_ahead(shared.now, effects),
        };
        let Some(buf) = buffer else {
            return Served::NoBuffer;
        };
        let len = low_u32(u64::from(count) * EXTENT_BYTES);
        let to = BufRange { buf, offset: 0, len };
        let slot = shared.record(&space.regions[index], first).slot;
        let fill = Fill {
            buf: to,
            count,
            demand: demand.is_some(),
            write: demand == Some(true),
            slot,
            tries: 0,
            bad: PageMask::MAX,
            cancelled: false,
            piece: None,
        };
        let id = shared.begin(space, Op { proc, at, kind: Kind::Fill(fill) });
        let region = &mut space.regions[index];
        for extent in first..first + count {
            Shared::<R>::lock(region, extent, id);
            let record = shared.record(region, extent);
            let mask = parked(record.states);
            if let Some(states) = record.states.after(mask, PageEvent::FillBegun) {
                shared.update(proc, region, extent, states, record.slot, record.limbo());
            }
        }
        effects.push(Effect::ReadSlots { op: id, slot, to, demand: demand.is_some() });
        Served::Yes
    }

    pub(super) fn on_slots_read(
        &mut self,
        id: OpId,
        ok: bool,
        damaged: PageMask,
        effects: &mut Vec<Effect>,
    ) {
        let Some(op) = self.shared.ops.get(id) else {
            return;
        };
        let Kind::Fill(fill) = op.kind else {
            return;
        };
        let (proc, at) = (op.proc, op.at);
        if !ok || damaged != 0 {
            self.shared.stats.store_errors += 1;
        }
        if ok {
            self.shared.stats.store_read_bytes += u64::from(fill.count) * EXTENT_BYTES;
        }
        let held = self.spaces.get(&proc).is_none_or(Space::is_held);
        if fill.cancelled || held {
            self.cancel_fill(id, effects);
            return;
        }
        if ok && damaged == 0 {
            self.continue_fill(id, effects);
            return;
        }
        if fill.count > 1 || !fill.demand {
            // Nobody waits for these yet: whoever does will learn exactly which pages are lost.
            self.cancel_fill(id, effects);
            return;
        }
        // Bytes may be damaged on their way as well as on the device: what was whole once is not lost.
        let damaged = match ok {
            true => damaged,
            false => PageMask::MAX,
        };
        let bad = fill.bad & damaged;
        let tried = fill.tries >= READ_TRIES_MAX && damaged == bad;
        if !tried && fill.tries < READ_TRIES_MAX * 4 {
            let backoff = READ_RETRY_NS << fill.tries.min(READ_TRIES_MAX);
            if let Some(Op { kind: Kind::Fill(fill), .. }) = self.shared.ops.get_mut(id) {
                fill.tries += 1;
                fill.bad = bad;
            }
            self.retry_later(id, backoff);
            return;
        }
        // A forked child may have pages in their place that its parent parked: these are not lost.
        if let Some(Op { kind: Kind::Fill(fill), .. }) = self.shared.ops.get_mut(id) {
            fill.bad = damaged;
        }
        effects.push(Effect::ReadMap { op: id, proc, at });
    }

    /// What a device has lost of an extent, and whether it is in its place all the same.
    pub(super) fn on_loss_looked(
        &mut self,
        id: OpId,
        present: PageMask,
        effects: &mut Vec<Effect>,
    ) {
        let Some(&Op { proc, at, kind: Kind::Fill(fill) }) = self.shared.ops.get(id) else {
            return;
        };
        if fill.cancelled || self.spaces.get(&proc).is_none_or(Space::is_held) {
            self.cancel_fill(id, effects);
            return;
        }
        let filling = self.spaces.get(&proc).and_then(|s| s.region_at(at)).map_or(0, |region| {
            let states = self.shared.record(region, region.extent_of(at)).states;
            states.mask(|state| state == PageState::Filling)
        });
        let page_bytes = self.shared.page_bytes();
        for (first, count) in runs(u32::from(filling & fill.bad & present)) {
            let start = at.plus(u64::from(first) * page_bytes);
            let there = Span::new(start, u64::from(count) * page_bytes);
            self.note_pages(proc, there, PageEvent::FoundPresent);
            effects.push(Effect::Wake { proc, span: there });
        }
        self.poison(proc, at, fill.bad & !present, effects);
        self.continue_fill(id, effects);
    }

    /// Marks the filling pages of `lost` as lost. Nothing else of the extent is.
    fn poison(&mut self, proc: ProcId, at: Addr, lost: PageMask, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let page_bytes = shared.page_bytes();
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) else {
            return;
        };
        let extent = region.extent_of(at);
        let record = shared.record(region, extent);
        let mask = record.states.mask(|s| s == PageState::Filling) & lost;
        if let Some(states) = record.states.after(mask, PageEvent::Lost) {
            shared.update(proc, region, extent, states, record.slot, record.limbo());
        }
        shared.stats.poisoned_pages += u64::from(mask.count_ones());
        for (first, count) in runs(u32::from(mask)) {
            let start = at.plus(u64::from(first) * page_bytes);
            let span = Span::new(start, u64::from(count) * page_bytes);
            effects.push(Effect::Poison { proc, span });
        }
    }

    /// Installs the next piece of what was read, or ends the fill.
    fn continue_fill(&mut self, id: OpId, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(Op { proc, at, kind: Kind::Fill(fill) }) = shared.ops.get(id) else {
            return;
        };
        let (proc, at, count) = (*proc, *at, fill.count);
        let Some(space) = self.spaces.get(&proc) else {
            return;
        };
        let Some(region) = space.region_at(at) else {
            return;
        };
        let from = fill.piece.map_or(at, |p| p.start);
        let piece = next_filling(shared, region, at, count, from);
        let Some(piece) = piece else {
            self.end_fill(id, effects);
            return;
        };
        if let Some(op) = shared.ops.get_mut(id) {
            if let Kind::Fill(fill) = &mut op.kind {
                fill.piece = Some(piece);
            }
            if let Kind::Fill(fill) = &op.kind {
                effects.push(fill_copy(id, op, fill, piece));
            }
        }
    }

    fn end_fill(&mut self, id: OpId, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(proc) = shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(Op { at, kind: Kind::Fill(fill), .. }) = shared.end(space, id) else {
            return;
        };
        shared.staging.give_back(fill.buf.buf);
        let Some(region) = space.region_at_mut(at) else {
            return;
        };
        let first = region.extent_of(at);
        for extent in first..first + fill.count {
            Shared::<R>::unlock(proc, region, extent, id, effects);
            if shared.record(region, extent).states.any(PageState::is_resident) {
                shared.became_resident(proc, region, extent);
            }
        }
        let states = shared.record(region, first).states;
        let absent = states.mask(|s| s == PageState::Absent) & page_mask(0, shared.extent_pages());
        let whole = !fill.cancelled && !states.any(|s| s == PageState::Parked);
        if fill.demand && whole && absent != 0 {
            // Whoever touched a page that never was must not find the extent gone again.
            self.start_zero(proc, at, absent, false, true, effects);
        }
    }

    /// Gives a fill up: what is not installed yet stays parked.
    pub(super) fn cancel_fill(&mut self, id: OpId, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(Op { proc, at, kind: Kind::Fill(fill) }) = shared.ops.get(id) else {
            return;
        };
        let (proc, at, count) = (*proc, *at, fill.count);
        if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) {
            let first = region.extent_of(at);
            for extent in first..first + count {
                let record = shared.record(region, extent);
                let mask = record.states.mask(|s| s == PageState::Filling);
                if let Some(states) = record.states.after(mask, PageEvent::FillCancelled) {
                    shared.update(proc, region, extent, states, record.slot, record.limbo());
                }
                region.note_mut(extent).wake = true;
            }
        }
        self.end_fill(id, effects);
    }

    pub(super) fn on_copied(
        &mut self,
        id: OpId,
        bytes: u64,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        self.note_proof(id, outcome);
        match self.shared.ops.get(id).map(|op| &op.kind) {
            Some(Kind::Fill(_)) => self.on_fill_copied(id, bytes, outcome, effects),
            Some(Kind::Zero(_)) => self.on_zeroed(id, bytes, outcome, effects),
            Some(Kind::Rescue(_)) => self.on_rescue_copied(id, bytes, outcome, effects),
            _ => {}
        }
    }

    fn on_fill_copied(
        &mut self,
        id: OpId,
        bytes: u64,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let Some(Op { proc, kind: Kind::Fill(fill), .. }) = self.shared.ops.get(id) else {
            return;
        };
        let (proc, fill) = (*proc, *fill);
        let Some(piece) = fill.piece else {
            return;
        };
        let page_bytes = self.shared.page_bytes();
        let bytes = bytes.min(piece.len);
        let event = if fill.write { PageEvent::FilledDirty } else { PageEvent::FilledClean };
        self.note_pages(proc, Span::new(piece.start, bytes), event);
        let pages = bytes / page_bytes;
        if fill.demand {
            self.shared.stats.recalled_pages += pages;
        } else {
            self.shared.stats.prefetched_pages += pages;
        }
        match outcome {
            IoctlOutcome::Done => {}
            IoctlOutcome::Exists => {
                // Only the client can have put a page there: its bytes are the newest.
                let page = Span::new(piece.start.plus(bytes), page_bytes);
                self.note_pages(proc, page, PageEvent::FoundPresent);
                effects.push(Effect::Wake { proc, span: page });
            }
            // A fork saw the rest missing: it must not appear now.
            IoctlOutcome::EventsPending | IoctlOutcome::NoMemory | IoctlOutcome::NoRange
                if fill.cancelled => {}
            IoctlOutcome::EventsPending => {
                self.set_fill_piece(id, piece, bytes, piece.len - bytes);
                self.retry_later(id, 0);
                return;
            }
            // Memory may come only from what a held process has, which stays until nothing of it is under way;
            // and nobody waits for a read ahead: whoever does by now is woken, and asks again.
            IoctlOutcome::NoMemory
                if !fill.demand || self.spaces.get(&proc).is_none_or(Space::is_held) =>
            {
                self.cancel_fill(id, effects);
                return;
            }
            IoctlOutcome::NoMemory => {
                self.set_fill_piece(id, piece, bytes, piece.len - bytes);
                self.retry_later(id, NO_MEMORY_RETRY_NS);
                return;
            }
            IoctlOutcome::NoRange if piece.len - bytes > page_bytes => {
                // It may cross the edge of two mappings: page by page.
                self.set_fill_piece(id, piece, bytes, page_bytes);
                self.issue(id, effects);
                return;
            }
            IoctlOutcome::NoRange => {
                // This page is mapped no longer; the others of the extent may be.
                let page = Span::new(piece.start.plus(bytes), page_bytes);
                self.note_pages(proc, page, PageEvent::FillCancelled);
                self.note_hole(proc, page.start);
            }
            IoctlOutcome::NoProcess => {
                self.cancel_fill(id, effects);
                return;
            }
        }
        if fill.cancelled {
            self.cancel_fill(id, effects);
        } else {
            self.continue_fill(id, effects);
        }
    }

    fn set_fill_piece(&mut self, id: OpId, piece: Piece, done: u64, len: u64) {
        if let Some(Op { kind: Kind::Fill(fill), .. }) = self.shared.ops.get_mut(id) {
            fill.piece = Some(Piece { start: piece.start.plus(done), len });
        }
    }
}

/// The next contiguous run of filling pages of the operation, from `from` on, no longer than one
/// piece.
fn next_filling<R: Records>(
    shared: &Shared<R>,
    region: &Region,
    at: Addr,
    count: u32,
    from: Addr,
) -> Option<Piece> {
    let page_bytes = shared.page_bytes();
    let end = at.plus(u64::from(count) * EXTENT_BYTES);
    let filling = |page: Addr| {
        let states = shared.record(region, region.extent_of(page)).states;
        states.get(shared.page_of(page)) == PageState::Filling
    };
    let mut start = from;
    while start < end && !filling(start) {
        start = start.plus(page_bytes);
    }
    if start >= end {
        return None;
    }
    let mut len = page_bytes;
    while len < COPY_PIECE_BYTES && start.plus(len) < end && filling(start.plus(len)) {
        len += page_bytes;
    }
    debug_assert!(start.0 / CHUNK_BYTES == (start.0 + len - 1) / CHUNK_BYTES);
    Some(Piece { start, len })
}
