//! Making room: which extents leave, and how they get to limbo.
//!
//! The policy is a second chance: chunks stand in a queue in the order in which they became resident;
//! from the front, extents that have not just arrived move to limbo, where a touch brings them back
//! to the end of the queue. What is not touched there is written out, oldest first. This is the
//! inactive list of Linux' page reclaim, with moves in place of the accessed bit.

use super::Manager;
use super::limbo::settle_block;
use super::op::{ArmThen, Kind, Op};
use super::shared::Shared;
use super::space::{Stage, extent_mask, runs};
use super::write::want_slots;
use crate::effect::{Command, Effect};
use crate::event::CommandOutcome;
use crate::limits::COMMANDS_IN_FLIGHT_MAX;
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::Records;
use crate::units::{
    Addr, CHUNK_BYTES, CHUNK_EXTENTS, EXTENT_BYTES, LimboBlock, OpId, ProcId, Span, low_u32,
};

/// Chunks looked at in one turn for each that is moved.
const TRIES_MAX: usize = 64;
/// Blocks that one turn sends to limbo.
const MOVES_PER_TURN_MAX: usize = 8;

/// Least room that is asked for at once. Others have to park before it comes, which takes
/// milliseconds: a family that asked for what it lacks now would never come near its share.
const ROOM_STRIDE_BYTES: u64 = 16 << 20;

/// When room is asked for again that has not come: whoever was to shrink meanwhile is no longer known to
/// want any.
const ROOM_ASK_AGAIN_NS: u64 = 1_000_000_000;

/// A refused extent rests for at most two to the power of this many milliseconds.
const REFUSAL_BACKOFF_MAX: u8 = 12;

/// What can be done about a chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Verdict {
    /// Extents that may move.
    move_mask: u32,
    /// Of these, those that will need a slot.
    dirty_mask: u32,
    /// Extents that a fork left shared: they must be made exclusive first.
    prepare_mask: u32,
    /// Extents of which a part is in the store: they must come in before they can leave whole.
    mixed: Option<u32>,
    /// Extents that were refused before: each moves by itself, so that it stops no other.
    alone: u32,
    /// Some extent stays resident.
    stays: bool,
}

impl<R: Records> Manager<R> {
    /// Whether nothing is on its way that could make room, and nothing more can be started.
    pub(super) fn is_stuck(&self) -> bool {
        let leaving = self.shared.ops.iter().any(|(_, op)| {
            matches!(
                op.kind,
                Kind::Move { .. }
                    | Kind::Guard { .. }
                    | Kind::MoveCheck { .. }
                    | Kind::Write(_)
                    | Kind::DropLimbo { .. }
                    | Kind::Prepare(_)
                    | Kind::Arm { .. }
                    | Kind::MapArmed
                    | Kind::Discard { .. }
                    | Kind::Rescue(_)
            )
        });
        let credit = self.shared.gauges.credit_pages > 0;
        let movable = self.spaces.values().any(|s| s.has_helper)
            && (!self.shared.queue.is_empty()
                || self.spaces.values().any(|s| s.has_helper && !s.resting.is_empty()));
        let blocked = self.shared.now < self.shared.store_rests_until;
        !leaving && !credit && (!movable || blocked || self.fruitless)
    }

    /// Keeps room free.
    pub(super) fn park(&mut self, effects: &mut Vec<Effect>) {
        self.fruitless = false;
        self.rests_on = false;
        self.shared.staging.writes_look();
        let extent_pages = u64::from(self.shared.extent_pages());
        let waiting = self.waiting.len() as u64 + u64::from(self.starving);
        let demand = waiting * extent_pages;
        let wanted = self.shared.gauges.used_pages() + demand + self.shared.reserve_pages();
        let Some(over) = wanted.checked_sub(self.shared.budget_pages).filter(|&over| over > 0)
        else {
            return;
        };
        // Whoever rests keeps what it uses and makes its reserve out of that: room is for those who
        // have touched something since they last asked.
        let faults = Some(self.shared.stats.faults);
        let asked = self.shared.room_asked.map(|at| at.after_ns(ROOM_ASK_AGAIN_NS));
        let may_ask = asked.is_none_or(|again| again <= self.shared.now);
        if may_ask && (demand > 0 || self.asked_at_faults != faults) {
            self.shared.room_asked = Some(self.shared.now);
            self.asked_at_faults = faults;
            let bytes = (over + self.shared.reserve_pages()) * self.shared.page_bytes();
            let stride = (self.budget_bytes() / 2).max(ROOM_STRIDE_BYTES);
            effects.push(Effect::WantRoom { bytes: bytes.max(stride) });
        }
        if self.shared.gauges.credit_pages > 0 {
            // How much of it is really used shows only once it is armed.
            self.start_arming(effects);
            return;
        }
        // Reads ahead stop at half of the reserve, so the rest is cut short before that.
        let kept = self.shared.reserve_pages() / 4 * 3;
        let urgent =
            demand > 0 || self.shared.gauges.used_pages() + kept > self.shared.budget_pages;
        let written = self.write_resting(over, urgent, effects);
        let moved = self.fill_limbo(over, effects);
        let resting = self.spaces.values().any(|s| !s.resting.is_empty());
        self.fruitless = written == 0 && moved == 0 && !self.rests_on && (urgent || !resting);
    }

    /// Writes out blocks that have rested, until enough is on its way. Gives how many were begun.
    fn write_resting(&mut self, over: u64, urgent: bool, effects: &mut Vec<Effect>) -> u32 {
        let now = self.shared.now;
        for space in self.spaces.values().filter(|s| s.writes_rest_until > now) {
            self.timer = self.timer.min(space.writes_rest_until);
        }
        let mut begun = 0;
        while self.leaving_pages() < over {
            let oldest = self
                .spaces
                .values()
                .filter(|s| s.has_helper && !s.gone && s.writes_rest_until <= now)
                .filter(|s| !s.writes_no_more())
                .filter_map(|s| {
                    // A block may wait only for rescues to end.
                    let block = *s.resting.iter().find(|b| {
                        let block = &s.blocks[b.0 as usize];
                        block.mask & !block.rescued != 0
                    })?;
                    Some((s.blocks[block.0 as usize].since, s.id, block))
                })
                .min();
            let Some((since, proc, block)) = oldest else {
                break;
            };
            let rested = since.after_ns(self.shared.config.probation_ns);
            // In its place a page is guarded by this rest alone: nothing shortens it.
            let in_place = !self.shared.config.has_move;
            if (in_place || !urgent) && rested > self.shared.now {
                self.rests_on = in_place;
                self.timer = self.timer.min(rested);
                break;
            }
            let mask = self.spaces[&proc].blocks[block.0 as usize].mask;
            if !self.start_write(proc, block, effects) {
                break;
            }
            let after = self.spaces[&proc].blocks[block.0 as usize];
            if after.stage == Stage::Resting && after.mask == mask {
                // All of it is being brought back.
                break;
            }
            begun += 1;
        }
        begun
    }

    /// Pages that are on their way out of limbo.
    fn leaving_pages(&self) -> u64 {
        let written = self.shared.ops.iter().map(|(_, op)| match &op.kind {
            Kind::Write(write) => write.extents.len() as u64,
            _ => 0,
        });
        let written: u64 = written.sum();
        self.shared.gauges.dropping_pages + written * u64::from(self.shared.extent_pages())
    }

    /// Moves extents to limbo until enough rests there. Gives how many chunks were begun.
    fn fill_limbo(&mut self, over: u64, effects: &mut Vec<Effect>) -> usize {
        let chunk_pages = u64::from(self.shared.config.geometry.chunk_pages());
        let target = over.max(self.shared.budget_pages / 16).max(chunk_pages);
        let mut moves = 0;
        let mut tries = 0;
        let ignore_age_from = self.shared.queue.len().min(TRIES_MAX / 2);
        // Chunks that must be copied before they can leave, for which there is no room now.
        let mut passed_over = Vec::new();
        // With a full store, the few chunks that can leave may stand anywhere in the queue.
        let tries_max = match self.shared.slots_overdue() {
            true => self.shared.queue.len().max(TRIES_MAX),
            false => TRIES_MAX,
        };
        while self.shared.gauges.limbo_pages < target
            && moves < MOVES_PER_TURN_MAX
            && tries < tries_max
        {
            let copied = self.prepared.pop_front();
            let Some((proc, at)) = copied.or_else(|| self.shared.queue.pop_front()) else {
                break;
            };
            tries += 1;
            let back = |manager: &mut Self| match copied {
                Some(chunk) => manager.prepared.push_front(chunk),
                None => manager.shared.queue.push_front((proc, at)),
            };
            if self.commands_in_flight(proc) + CHUNK_EXTENTS > COMMANDS_IN_FLIGHT_MAX {
                back(self);
                break;
            }
            let mind_age = copied.is_none() && tries <= ignore_age_from;
            let Some(verdict) = self.judge(proc, at, mind_age) else {
                continue;
            };
            if let Some(extent) = verdict.mixed {
                let home = at.plus(u64::from(extent) * EXTENT_BYTES);
                if let Some(space) = self.spaces.get_mut(&proc) {
                    space.ahead.push_back((home, 1));
                }
            }
            if verdict.move_mask != 0 {
                match self.start_move(proc, at, verdict, effects) {
                    Some(true) => moves += 1,
                    Some(false) => {}
                    None => {
                        // No block or no slots yet: the same for every other chunk.
                        back(self);
                        break;
                    }
                }
            } else if verdict.prepare_mask != 0 && copied.is_none() {
                if !self.start_prepare(proc, at, verdict.prepare_mask, effects) {
                    passed_over.push((proc, at));
                    continue;
                }
                moves += 1;
            }
            if copied.is_some() {
                // It stands in the queue as well.
                continue;
            }
            if verdict.stays || verdict.move_mask != 0 || verdict.prepare_mask != 0 {
                self.shared.queue.push_back((proc, at));
            } else if let Some(region) =
                self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at))
            {
                let chunk = region.extent_of(at) / CHUNK_EXTENTS;
                region.chunk_mut(chunk).queued = false;
            }
        }
        for chunk in passed_over.into_iter().rev() {
            self.shared.queue.push_front(chunk);
        }
        moves
    }

    /// Commands that the helper of a process has, or may get from operations under way.
    pub(super) fn commands_in_flight(&self, proc: ProcId) -> u32 {
        let commands = self.shared.ops.iter().filter(|(_, op)| {
            op.proc == proc
                && matches!(
                    op.kind,
                    Kind::Move { .. }
                        | Kind::DropLimbo { .. }
                        | Kind::Prepare(_)
                        | Kind::Discard { .. }
                )
        });
        low_u32(commands.count() as u64)
    }

    /// What may leave of the chunk at `at`. `None` where there is no such chunk any more.
    fn judge(&mut self, proc: ProcId, at: Addr, mind_age: bool) -> Option<Verdict> {
        let shared = &self.shared;
        let space = self.spaces.get(&proc)?;
        let region = space.region_at(at)?;
        let mut verdict = Verdict::default();
        let usable = space.has_helper
            && !space.drained
            && space.draining.is_empty()
            && !space.is_held()
            && region.closing.is_none();
        let quarter = low_u32(shared.gauges.resident_pages / u64::from(shared.extent_pages()) / 4);
        // A discard waits until nobody works on any extent of its span.
        let chunk = Span::new(at, CHUNK_BYTES);
        let given_up: Vec<Span> = self
            .discards
            .iter()
            .filter(|d| d.proc == proc && d.span.overlaps(chunk))
            .map(|d| d.span)
            .collect();
        let first = region.extent_of(at);
        for position in 0..CHUNK_EXTENTS {
            let extent = first + position;
            let states = shared.record(region, extent).states;
            if !states.any(PageState::is_resident) {
                continue;
            }
            let note = region.note(extent);
            let bit = 1 << position;
            let young = mind_age && shared.stamp.wrapping_sub(note.stamp) < quarter;
            let refused = note.rest.lasts(shared.now);
            let away = states.any(PageState::is_away);
            let place = Span::new(region.extent_addr(extent), EXTENT_BYTES);
            let given = given_up.iter().any(|span| span.overlaps(place));
            if !usable || note.is_busy() || note.pins > 0 || young || refused || given {
                verdict.stays = true;
            } else if away {
                verdict.stays = true;
                if states.any(|s| s == PageState::Parked) {
                    verdict.mixed = Some(position);
                }
            } else if note.cow {
                verdict.prepare_mask |= bit;
            } else {
                verdict.move_mask |= bit;
                if note.refusals > 0 {
                    verdict.alone |= bit;
                }
                if states.any(|s| s == PageState::Dirty) {
                    verdict.dirty_mask |= bit;
                }
            }
        }
        Some(verdict)
    }

    /// Orders the moves of a chunk. `None`: nothing can move now. `Some(false)`: not this one.
    fn start_move(
        &mut self,
        proc: ProcId,
        at: Addr,
        verdict: Verdict,
        effects: &mut Vec<Effect>,
    ) -> Option<bool> {
        let shared = &mut self.shared;
        let space = self.spaces.get_mut(&proc)?;
        // Every extent in limbo has a slot that it could go to: a fork can always write it out.
        let needed = shared.unslotted_extents + u64::from(verdict.dirty_mask.count_ones());
        let mut move_mask = verdict.move_mask;
        if verdict.dirty_mask != 0 && u64::from(shared.slots.free_slots()) < needed {
            want_slots(shared, effects);
            if !shared.slots_overdue() {
                return None;
            }
            // The store is full. What is clean has its slot already, and can leave all the same.
            move_mask &= !verdict.dirty_mask;
            if move_mask == 0 {
                return Some(false);
            }
        }
        let Some(block) = space.free_block() else {
            // This process' limbo is full; another's may not be.
            return Some(false);
        };
        let now = shared.now;
        {
            let entry = space.block(block);
            entry.stage = Stage::Moving;
            entry.home = at;
            entry.since = now;
            entry.mask = move_mask;
        }
        let alone = verdict.alone;
        for (first, count) in move_runs(move_mask, alone) {
            let start = at.plus(u64::from(first) * EXTENT_BYTES);
            let to = space.limbo_addr(block, start);
            let kind = match space.in_place {
                false => Kind::Move { block, count },
                true => Kind::Guard { block, count },
            };
            let id = shared.begin(space, Op { proc, at: start, kind });
            space.block(block).ops += 1;
            let index = space.region_index(start)?;
            let region = &mut space.regions[index];
            let extent = region.extent_of(start);
            for extent in extent..extent + count {
                Shared::<R>::lock(region, extent, id);
                let record = shared.record(region, extent);
                let mask = record.states.mask(PageState::is_resident);
                if let Some(states) = record.states.after(mask, PageEvent::LimboBegun) {
                    shared.update(proc, region, extent, states, record.slot, Some(block));
                }
            }
            let len = u64::from(count) * EXTENT_BYTES;
            if space.in_place {
                let span = Span::new(start, len);
                effects.push(Effect::Protect { op: id, proc, span, on: true });
            } else {
                let command = Command::Move { from: start, to, len };
                effects.push(Effect::Command { op: id, proc, command });
            }
        }
        Some(true)
    }

    pub(super) fn on_commanded(
        &mut self,
        id: OpId,
        bytes: u64,
        outcome: CommandOutcome,
        effects: &mut Vec<Effect>,
    ) {
        match self.shared.ops.get(id).map(|op| &op.kind) {
            Some(Kind::Move { .. }) => self.on_moved(id, bytes, outcome, effects),
            Some(Kind::DropLimbo { .. }) => self.on_limbo_dropped(id, outcome, effects),
            Some(Kind::Prepare(_)) => self.on_populated(id, outcome, effects),
            Some(Kind::Discard { .. }) => self.on_discarded(id, outcome, effects),
            _ => {}
        }
    }

    fn on_moved(
        &mut self,
        id: OpId,
        bytes: u64,
        outcome: CommandOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let Some(Op { proc, at, kind: Kind::Move { block, count } }) = self.shared.ops.get(id)
        else {
            return;
        };
        let (proc, at, block, count) = (*proc, *at, *block, *count);
        let done = match outcome {
            CommandOutcome::Done => count,
            CommandOutcome::Busy | CommandOutcome::Stopped => {
                self.shared.stats.moves_refused += 1;
                low_u32(bytes.min(u64::from(count) * EXTENT_BYTES) / EXTENT_BYTES)
            }
            CommandOutcome::Cancelled | CommandOutcome::NoHelper => 0,
        };
        let nothing_moved = matches!(outcome, CommandOutcome::Cancelled | CommandOutcome::NoHelper);
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        if outcome == CommandOutcome::NoHelper {
            space.has_helper = false;
        }
        shared.end(space, id);
        let Some(index) = space.region_index(at) else {
            return;
        };
        if !nothing_moved {
            let span = Span::new(at, u64::from(count) * EXTENT_BYTES);
            space.zapped.push((shared.ops.next(), span));
        }
        let first = space.regions[index].extent_of(at);
        for n in 0..count {
            let extent = first + n;
            let refusals = space.regions[index].note(extent).refusals;
            let home = space.regions[index].extent_addr(extent);
            if n < done {
                space.regions[index].note_mut(extent).refusals = 0;
                Shared::<R>::unlock(proc, &mut space.regions[index], extent, id, effects);
            } else if nothing_moved {
                Self::refuse_extent(shared, space, index, extent, block, PageMask::MAX);
                Shared::<R>::unlock(proc, &mut space.regions[index], extent, id, effects);
            } else {
                // What came of this one must be looked up page by page.
                let kind = Kind::MoveCheck { block };
                let check = shared.begin(space, Op { proc, at: home, kind });
                let note = space.regions[index].note_mut(extent);
                note.busy = check;
                // Pages that a fork left shared, or marks of protection on missing ones, may be what
                // stopped it: the next try prepares it.
                note.cow |= n == done && note.refusals == 0;
                note.refusals = note.refusals.saturating_add(1);
                note.rest.set(shared.now, 1 << refusals.min(REFUSAL_BACKOFF_MAX));
                space.block(block).ops += 1;
                let at = space.limbo_addr(block, home);
                effects.push(Effect::ReadMap { op: check, proc, at });
            }
        }
        space.block(block).ops -= 1;
        settle_block(shared, space, block);
    }

    /// The pages of `mask` that were to go to limbo are still in their place.
    pub(super) fn refuse_extent(
        shared: &mut Shared<R>,
        space: &mut super::space::Space,
        index: usize,
        extent: u32,
        block: LimboBlock,
        mask: PageMask,
    ) {
        let proc = space.id;
        let record = shared.record(&space.regions[index], extent);
        let staying = record.states.mask(PageState::is_limbo) & mask;
        let Some(states) = record.states.after(staying, PageEvent::LimboRefused) else {
            return;
        };
        let region = &mut space.regions[index];
        shared.update(proc, region, extent, states, record.slot, Some(block));
        shared.enqueue(proc, region, extent);
        if !states.any(PageState::is_limbo) {
            let position = extent % CHUNK_EXTENTS;
            space.block(block).mask &= !extent_mask(position, 1);
        }
    }

    /// Which pages of an extent a stopped move took.
    pub(super) fn on_move_checked(
        &mut self,
        id: OpId,
        present: PageMask,
        known: bool,
        effects: &mut Vec<Effect>,
    ) {
        let shared = &mut self.shared;
        let Some(proc) = shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(Op { at, kind: Kind::MoveCheck { block }, .. }) = shared.end(space, id) else {
            return;
        };
        if let Some(index) = space.region_index(at) {
            let extent = space.regions[index].extent_of(at);
            if known {
                Self::refuse_extent(shared, space, index, extent, block, !present);
            }
            Shared::<R>::unlock(proc, &mut space.regions[index], extent, id, effects);
        }
        space.block(block).ops -= 1;
        settle_block(shared, space, block);
        let half = space
            .region_at(at)
            .map(|r| shared.record(r, r.extent_of(at)).states)
            .is_some_and(|s| s.any(PageState::is_limbo) && s.any(PageState::is_resident));
        if half && !self.spaces.get(&proc).is_none_or(super::space::Space::is_held) {
            // Extents leave whole or not at all.
            self.start_rescue(proc, at, false, true, effects);
        }
    }

    /// Arms the largest unarmed part, so that what is used of it becomes known.
    fn start_arming(&mut self, effects: &mut Vec<Effect>) {
        let busy = self.spaces.values().flat_map(|s| &s.regions).any(|r| r.arming.is_some());
        if busy {
            return;
        }
        let largest = self
            .spaces
            .values()
            .filter(|s| !s.is_held() && !s.drained)
            .flat_map(|s| &s.regions)
            .filter(|r| r.closing.is_none() && r.record.unarmed_extents > 0)
            .max_by_key(|r| r.record.unarmed_extents)
            .map(|r| (r.record.proc, r.record.base));
        if let Some((proc, base)) = largest {
            self.arm_region(proc, base, ArmThen::Map, effects);
        }
    }
}

/// Runs of `mask` as `(first, count)`, with each extent of `alone` by itself.
fn move_runs(mask: u32, alone: u32) -> impl Iterator<Item = (u32, u32)> {
    let singles =
        runs(mask & alone).flat_map(|(first, count)| (first..first + count).map(|n| (n, 1)));
    runs(mask & !alone).chain(singles)
}
