//! Limbo: bringing pages back from it, and dropping what is stale there.

use super::Manager;
use super::fault::{NO_SLOT, Served};
use super::op::{Kind, Op, Piece, Rescue, RescueStep};
use super::place::left_place;
use super::shared::Shared;
use super::space::{Block, Region, Space, Stage, extent_mask, position, runs};
use crate::effect::{Command, Effect};
use crate::event::{CommandOutcome, IoctlOutcome};
use crate::limits::COMMANDS_IN_FLIGHT_MAX;
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::Records;
use crate::units::{Addr, EXTENT_BYTES, LimboBlock, OpId, ProcId, Span, low_u32};

/// Times that a short read of limbo is tried again before the process counts as unreadable.
pub(super) const READ_TRIES_MAX: u8 = 3;

impl<R: Records> Manager<R> {
    /// Brings the pages of an extent back from limbo by copying: that needs no helper.
    pub(super) fn start_rescue(
        &mut self,
        proc: ProcId,
        at: Addr,
        write: bool,
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
        let extent = space.regions[index].extent_of(at);
        let record = shared.record(&space.regions[index], extent);
        let Some(block) = record.limbo() else {
            return Served::Yes;
        };
        let pages = u64::from(record.states.count(PageState::is_limbo));
        if !desperate && !shared.has_room(pages, 0) {
            return Served::NoRoom;
        }
        let Some(piece) = next_limbo(shared, &space.regions[index], at) else {
            return Served::Yes;
        };
        if !space.spares(block) {
            return Served::NoBuffer;
        }
        let Some(buffer) = shared.staging.take_demand() else {
            return Served::NoBuffer;
        };
        let rescue = Rescue {
            buffer,
            block,
            write,
            step: RescueStep::Reading(piece),
            reserved_pages: pages,
            tries: 0,
        };
        let id = shared.begin(space, Op { proc, at, kind: Kind::Rescue(rescue) });
        let region = &mut space.regions[index];
        Shared::<R>::lock(region, extent, id);
        space.block(block).rescued |= 1 << position(at);
        // The bytes are there twice until the limbo page is dropped.
        shared.gauges.reserved_pages += pages;
        self.issue(id, effects);
        Served::Yes
    }

    fn rescue_step(&mut self, id: OpId, step: RescueStep, effects: &mut Vec<Effect>) {
        let proc = self.shared.ops.get(id).map(|op| op.proc);
        if proc.and_then(|proc| self.spaces.get(&proc)).is_none_or(Space::is_held) {
            // A fork saw the page missing: nothing may appear before the child has its share.
            self.end_rescue(id, false, effects);
            return;
        }
        if let Some(Op { kind: Kind::Rescue(rescue), .. }) = self.shared.ops.get_mut(id) {
            rescue.step = step;
        }
        self.issue(id, effects);
    }

    pub(super) fn on_limbo_read(&mut self, id: OpId, bytes: u64, effects: &mut Vec<Effect>) {
        match self.shared.ops.get(id).map(|op| &op.kind) {
            Some(Kind::Rescue(rescue)) => {
                let RescueStep::Reading(piece) = rescue.step else {
                    return;
                };
                if bytes >= piece.len {
                    self.rescue_step(id, RescueStep::Copying(piece), effects);
                } else {
                    self.rescue_step(id, RescueStep::Checking, effects);
                }
            }
            Some(Kind::Write(_)) => self.on_write_read(id, bytes, effects),
            _ => {}
        }
    }

    /// A read of limbo was short. Pages that are not there were dropped by the client: zeros.
    pub(super) fn on_rescue_checked(
        &mut self,
        id: OpId,
        present: PageMask,
        known: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(op) = self.shared.ops.get_mut(id) else {
            return;
        };
        let (proc, at) = (op.proc, op.at);
        let Kind::Rescue(rescue) = &mut op.kind else {
            return;
        };
        rescue.tries += 1;
        if !known || rescue.tries > READ_TRIES_MAX {
            // The address space cannot be read: it is ending. Nobody is woken into zeros.
            self.end_rescue(id, false, effects);
            return;
        }
        let block = rescue.block;
        self.note_limbo_empty(proc, at, block, present);
        self.continue_rescue(id, effects);
    }

    /// Pages of the extent that ought to be in `block` and are not: the client zapped them.
    pub(super) fn note_limbo_empty(
        &mut self,
        proc: ProcId,
        at: Addr,
        block: LimboBlock,
        present: PageMask,
    ) {
        let shared = &mut self.shared;
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) else {
            return;
        };
        let extent = region.extent_of(at);
        let record = shared.record(region, extent);
        if record.limbo() != Some(block) {
            return;
        }
        let gone = record.states.mask(PageState::is_limbo) & !present;
        if let Some(states) = record.states.after(gone, PageEvent::LimboEmpty) {
            shared.update(proc, region, extent, states, record.slot, record.limbo());
        }
    }

    fn continue_rescue(&mut self, id: OpId, effects: &mut Vec<Effect>) {
        let Some(op) = self.shared.ops.get(id) else {
            return;
        };
        let (proc, at) = (op.proc, op.at);
        let piece = self
            .spaces
            .get(&proc)
            .and_then(|s| s.region_at(at))
            .and_then(|region| next_limbo(&self.shared, region, at));
        match piece {
            None => self.end_rescue(id, true, effects),
            Some(piece) => self.rescue_step(id, RescueStep::Reading(piece), effects),
        }
    }

    pub(super) fn on_rescue_copied(
        &mut self,
        id: OpId,
        bytes: u64,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let Some(Op { proc, at, kind: Kind::Rescue(rescue) }) = self.shared.ops.get(id) else {
            return;
        };
        let (proc, at, rescue) = (*proc, *at, *rescue);
        let RescueStep::Copying(piece) = rescue.step else {
            return;
        };
        let page_bytes = self.shared.page_bytes();
        let bytes = bytes.min(piece.len);
        self.note_rescued(proc, at, Span::new(piece.start, bytes), rescue.write);
        self.shared.stats.rescued_pages += bytes / page_bytes;
        let rest = Piece { start: piece.start.plus(bytes), len: piece.len - bytes };
        match outcome {
            IoctlOutcome::Done => self.continue_rescue(id, effects),
            IoctlOutcome::Exists => {
                let page = Span::new(rest.start, page_bytes);
                self.note_pages(proc, page, PageEvent::FoundPresent);
                effects.push(Effect::Wake { proc, span: page });
                self.continue_rescue(id, effects);
            }
            IoctlOutcome::EventsPending | IoctlOutcome::NoMemory => {
                if self.spaces.get(&proc).is_none_or(Space::is_held) {
                    // A fork saw the rest missing: it must not appear now.
                    self.end_rescue(id, false, effects);
                    return;
                }
                let delay = if outcome == IoctlOutcome::NoMemory { 1_000_000 } else { 0 };
                if let Some(Op { kind: Kind::Rescue(r), .. }) = self.shared.ops.get_mut(id) {
                    r.step = RescueStep::Copying(rest);
                }
                self.retry_later(id, delay);
            }
            IoctlOutcome::NoRange if rest.len > page_bytes => {
                let single = Piece { start: rest.start, len: page_bytes };
                self.rescue_step(id, RescueStep::Copying(single), effects);
            }
            IoctlOutcome::NoRange => {
                // Mapped no longer: the client gave it up.
                self.note_pages(proc, Span::new(rest.start, page_bytes), PageEvent::LimboEmpty);
                self.continue_rescue(id, effects);
            }
            IoctlOutcome::NoProcess => self.end_rescue(id, false, effects),
        }
    }

    fn note_rescued(&mut self, proc: ProcId, at: Addr, done: Span, write: bool) {
        if done.len == 0 {
            return;
        }
        let clean = !write
            && self.spaces.get(&proc).and_then(|s| s.region_at(at)).is_some_and(|region| {
                let states = self.shared.record(region, region.extent_of(at)).states;
                states.get(self.shared.page_of(done.start)) == PageState::LimboClean
            });
        let event = if clean { PageEvent::RescuedClean } else { PageEvent::RescuedDirty };
        self.note_pages(proc, done, event);
    }

    /// Ends a rescue. Where it is `whole`, nothing of the extent is in limbo any more: what lies
    /// there is stale.
    pub(super) fn end_rescue(&mut self, id: OpId, whole: bool, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(proc) = shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(Op { at, kind: Kind::Rescue(rescue), .. }) = shared.end(space, id) else {
            return;
        };
        shared.staging.give_back(rescue.buffer);
        space.block(rescue.block).rescued &= !(1 << position(at));
        shared.gauges.reserved_pages -= rescue.reserved_pages;
        if whole {
            leave_block(shared, space, rescue.block, at);
        } else if let Some(region) = space.region_at(at) {
            // Pages that have been copied lie in limbo as well until all of the extent leaves it.
            let states = shared.record(region, region.extent_of(at)).states;
            let left = u64::from(states.count(PageState::is_limbo));
            let copied = low_u32(rescue.reserved_pages.saturating_sub(left));
            note_stale(shared, space, rescue.block, at, copied);
        }
        if let Some(region) = space.region_at_mut(at) {
            let extent = region.extent_of(at);
            if shared.record(region, extent).states.any(PageState::is_resident) {
                shared.became_resident(proc, region, extent);
            }
            if whole {
                Shared::<R>::unlock(proc, region, extent, id, effects);
            } else {
                // Unlocked without a wake: the range or the process is going away.
                region.note_mut(extent).wake = false;
                Shared::<R>::unlock(proc, region, extent, id, effects);
            }
        }
        settle_block(shared, space, rescue.block);
    }

    /// Orders the helper to drop what is stale in limbo.
    pub(super) fn drop_stale(&mut self, effects: &mut Vec<Effect>) {
        self.keep_in_place(effects);
        self.count_stale(effects);
        let procs: Vec<ProcId> =
            self.spaces.values().filter(|s| s.has_helper).map(|s| s.id).collect();
        for proc in procs {
            let mut free = COMMANDS_IN_FLIGHT_MAX.saturating_sub(self.commands_in_flight(proc));
            let shared = &mut self.shared;
            let Some(space) = self.spaces.get_mut(&proc) else {
                continue;
            };
            for index in 0..space.blocks.len() {
                let block = space.blocks[index];
                let stale = block.stale & !block.rescued;
                if stale == 0 || block.ops != 0 {
                    continue;
                }
                let pieces = low_u32(runs(stale).count() as u64);
                if pieces > free {
                    break;
                }
                free -= pieces;
                let Ok(number) = u16::try_from(index).map(LimboBlock) else {
                    break;
                };
                // A block that holds nothing else goes in one stroke.
                let holds_more = block.mask | block.rescued != 0;
                let spans: Vec<(u32, u32)> = if !holds_more && !space.in_place {
                    let first = stale.trailing_zeros();
                    vec![(first, u32::BITS - stale.leading_zeros() - first)]
                } else {
                    runs(stale).collect()
                };
                for (first, count) in spans {
                    let mask = extent_mask(first, count) & stale;
                    let home = block.home.plus(u64::from(first) * EXTENT_BYTES);
                    let start = space.limbo_addr(number, home);
                    let kind = Kind::DropLimbo { block: number, mask };
                    let id = shared.begin(space, Op { proc, at: home, kind });
                    let span = Span::new(start, u64::from(count) * EXTENT_BYTES);
                    effects.push(Effect::Command { op: id, proc, command: Command::Drop(span) });
                    space.blocks[index].ops += 1;
                    space.blocks[index].dropping |= mask;
                }
            }
        }
    }

    pub(super) fn on_limbo_dropped(
        &mut self,
        id: OpId,
        outcome: CommandOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let shared = &mut self.shared;
        let Some(proc) = shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(Op { kind: Kind::DropLimbo { block, mask }, .. }) = shared.end(space, id) else {
            return;
        };
        let home = space.block(block).home;
        if space.in_place {
            left_place(shared, space, home, mask, outcome, effects);
        }
        let entry = space.block(block);
        entry.ops -= 1;
        entry.dropping &= !mask;
        // In the program's own mapping there may be holes, and each extent has been looked at.
        let dropped = match outcome {
            CommandOutcome::Done => true,
            CommandOutcome::Cancelled => false,
            _ => space.in_place,
        };
        if dropped {
            forget_stale(shared, space.block(block), mask);
        }
        // Locked limbo, or no helper: the room stays taken, at this client's cost alone.
        let stopped = outcome == CommandOutcome::Stopped && !space.in_place;
        if stopped || outcome == CommandOutcome::NoHelper {
            space.has_helper = false;
        }
        if dropped && space.in_place {
            for (first, count) in runs(mask) {
                let start = home.plus(u64::from(first) * EXTENT_BYTES);
                let span = Span::new(start, u64::from(count) * EXTENT_BYTES);
                space.zapped.push((shared.ops.next(), span));
            }
        } else if !dropped {
            space.block(block).uncounted |= mask;
        }
        settle_block(shared, space, block);
    }

    /// What nobody drops is to be counted.
    fn count_stale(&mut self, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let left = |s: &&mut Space| !s.has_helper && !s.in_place && !s.is_held();
        for space in self.spaces.values_mut().filter(left) {
            for index in 0..space.blocks.len() {
                let Block { home, stale, uncounted, .. } = space.blocks[index];
                let Ok(block) = u16::try_from(index).map(LimboBlock) else {
                    break;
                };
                space.block(block).uncounted = 0;
                for (first, count) in runs(stale & uncounted) {
                    for n in first..first + count {
                        let at = home.plus(u64::from(n) * EXTENT_BYTES);
                        let op = Op { proc: space.id, at, kind: Kind::StaleLook { block } };
                        let id = shared.begin(space, op);
                        space.block(block).ops += 1;
                        let at = space.limbo_addr(block, at);
                        effects.push(Effect::ReadMap { op: id, proc: space.id, at });
                    }
                }
            }
        }
    }

    pub(super) fn on_stale_looked(&mut self, id: OpId, present: PageMask, known: bool) {
        let shared = &mut self.shared;
        let Some(space) =
            shared.ops.get(id).map(|op| op.proc).and_then(|proc| self.spaces.get_mut(&proc))
        else {
            return;
        };
        let Some(Op { at, kind: Kind::StaleLook { block }, .. }) = shared.end(space, id) else {
            return;
        };
        let pages = if known { present.count_ones() } else { shared.extent_pages() };
        let entry = space.block(block);
        entry.ops -= 1;
        if entry.stale & 1 << position(at) != 0 {
            let kept = std::mem::take(&mut entry.stale_pages[position(at) as usize]);
            shared.gauges.dropping_pages -= u64::from(kept);
            note_stale(shared, space, block, at, pages);
        }
        settle_block(shared, space, block);
    }
}

/// Takes an extent out of its limbo block; its pages there are stale.
pub(super) fn leave_block<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    block: LimboBlock,
    at: Addr,
) {
    let bit = 1 << position(at);
    let held = space.block(block).mask & bit != 0;
    space.block(block).mask &= !bit;
    // What does not leave its place is not to be dropped there.
    if held && !space.in_place {
        space.block(block).stale |= bit;
        note_stale(shared, space, block, at, shared.extent_pages());
    }
}

/// The stale pages of the extents in `mask` take no room in the block any more.
pub(super) fn forget_stale<R: Records>(shared: &mut Shared<R>, block: &mut Block, mask: u32) {
    block.stale &= !mask;
    for (position, pages) in block.stale_pages.iter_mut().enumerate() {
        if mask & 1 << position != 0 {
            shared.gauges.dropping_pages -= u64::from(std::mem::take(pages));
        }
    }
}

/// Counts pages that take room in a block although no record counts them any more.
pub(super) fn note_stale<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    block: LimboBlock,
    at: Addr,
    pages: u32,
) {
    let kept = &mut space.block(block).stale_pages[position(at) as usize];
    let all = (u32::from(*kept) + pages).min(shared.extent_pages());
    shared.gauges.dropping_pages += u64::from(all - u32::from(*kept));
    // An extent has sixteen pages at most.
    *kept = all.to_le_bytes()[0];
}

/// Lets a block that nobody works on go where it belongs.
pub(super) fn settle_block<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    block: LimboBlock,
) {
    let now = shared.now;
    let entry = space.block(block);
    if entry.ops != 0 || entry.mask == 0 && entry.rescued != 0 {
        return;
    }
    if entry.mask == 0 {
        let was_resting = entry.stage == Stage::Resting;
        if entry.stale == 0 {
            *entry = Block::FREE;
        } else {
            entry.stage = Stage::Dropping;
        }
        if was_resting {
            space.resting.retain(|&b| b != block);
        }
    } else if matches!(entry.stage, Stage::Moving | Stage::Writing) {
        // What a write left behind has rested already.
        if entry.stage == Stage::Moving {
            entry.since = now;
        }
        entry.stage = Stage::Resting;
        space.resting.push_back(block);
    }
}

/// The first run of pages of the extent that are in limbo and equally clean.
pub(super) fn next_limbo<R: Records>(
    shared: &Shared<R>,
    region: &Region,
    at: Addr,
) -> Option<Piece> {
    let page_bytes = shared.page_bytes();
    let pages = shared.extent_pages();
    let states = shared.record(region, region.extent_of(at)).states;
    let first = (0..pages).find(|&page| states.get(page).is_limbo())?;
    let state = states.get(first);
    let count = (first..pages).take_while(|&page| states.get(page) == state).count();
    Some(Piece {
        start: at.plus(u64::from(first) * page_bytes),
        len: u64::from(low_u32(count as u64)) * page_bytes,
    })
}

/// Forgets what an extent had in limbo, for a range that is given up.
pub(super) fn forget_extent<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    region_index: usize,
    extent: u32,
) {
    let record = shared.record(&space.regions[region_index], extent);
    let proc = space.id;
    let at = space.regions[region_index].extent_addr(extent);
    let states = crate::page::PageStates::default();
    shared.update(proc, &mut space.regions[region_index], extent, states, NO_SLOT, None);
    if let Some(block) = record.limbo() {
        leave_block(shared, space, block, at);
        settle_block(shared, space, block);
    }
}
