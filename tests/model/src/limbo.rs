//! The policy's choices, limbo on its way out, and what programs ask for.

use crate::daemon::is_open;
use crate::model::{Model, Out};
use crate::op::{DiscardStep, Op, PrepareStep};
use crate::rules::Rule;
use crate::state::{
    Fork, Limbo, Mapping, PAGES, PARENT, Progress, Request, Stage, State, Verb, Write, small,
};
use crate::step::What;
use tiermgr_core::page::{PageEvent, PageState};

impl Model {
    /// What the policy may begin.
    pub(crate) fn policy(&self, state: &State, out: &mut Out) {
        let usable = is_open(state)
            && state.mapping == Mapping::Managed
            && !state.is_held()
            && !state.exited;
        if !usable {
            return;
        }
        for extent in 0..self.scenario.extents() {
            let away = |s: PageState| !s.is_resident() && s != PageState::Absent;
            let may = state.spaces[PARENT].ops[extent] == Op::None
                && self.any(state, PARENT, extent, PageState::is_resident)
                && !self.any(state, PARENT, extent, away);
            if !may {
                continue;
            }
            if state.budget.parks > 0 && state.limbo.stage == Stage::Free {
                self.begin_move(state, extent, out);
            }
            let shared =
                self.scenario.pages_of(extent).any(|page| state.spaces[PARENT].ptes[page].shared);
            if state.budget.prepares > 0 && shared {
                let mut next = *state;
                next.budget.prepares -= 1;
                self.record_written(&mut next, PARENT, extent);
                next.spaces[PARENT].ops[extent] = Op::Prepare(PrepareStep::Recorded);
                out.push(What::PrepareBegun, PARENT, extent, next);
            }
        }
    }

    fn begin_move(&self, state: &State, extent: usize, out: &mut Out) {
        let mut next = *state;
        next.budget.parks -= 1;
        if self.holds(Rule::LimboBeforeMove) {
            for page in self.scenario.pages_of(extent) {
                if next.spaces[PARENT].records[page].is_resident() {
                    self.record(&mut next, PARENT, page, PageEvent::LimboBegun);
                }
            }
        }
        next.limbo.stage = Stage::Used;
        next.limbo.extent = small(extent);
        next.spaces[PARENT].ops[extent] = Op::Move { ordered: false };
        out.push(What::MoveBegun, PARENT, extent, next);
    }

    /// Writes limbo out, records, drops.
    pub(crate) fn limbo(&self, state: &State, out: &mut Out) {
        let extent = usize::from(state.limbo.extent);
        let op = state.spaces[PARENT].ops[extent];
        let in_limbo = self.any(state, PARENT, extent, PageState::is_limbo);
        match (state.limbo.stage, state.limbo.write) {
            (Stage::Used, Write::None) => {
                let working = matches!(op, Op::Move { .. } | Op::Rescue { .. });
                if in_limbo && op == Op::None {
                    self.begin_write(state, extent, out);
                } else if !in_limbo && !working {
                    self.order_drop(state, extent, Write::None, out);
                }
            }
            (Stage::Used, Write::Landed { slot }) => {
                if self.holds(Rule::ParkedBeforeDrop) {
                    let mut next = *state;
                    next.limbo.write = Write::None;
                    self.record_parked(&mut next, extent, slot);
                    out.push(What::Parked, PARENT, extent, next);
                } else {
                    self.order_drop(state, extent, Write::Unrecorded { slot }, out);
                }
            }
            (Stage::Dropping, write) => {
                let mut next = *state;
                if next.take_answer(Verb::Drop, extent).is_none() {
                    return;
                }
                next.limbo = Limbo { ptes: next.limbo.ptes, ..Limbo::default() };
                if let Write::Unrecorded { slot } = write {
                    next.limbo.extent = small(extent);
                    self.record_parked(&mut next, extent, slot);
                    next.limbo.extent = 0;
                }
                out.push(What::DropAnswered, PARENT, extent, next);
            }
            _ => {}
        }
    }

    fn begin_write(&self, state: &State, extent: usize, out: &mut Out) {
        let what = if state.fork == Fork::Held { What::LimboWriteOrdered } else { What::ParkBegun };
        let mut next = *state;
        if !self.any(state, PARENT, extent, |s| s == PageState::LimboDirty) {
            // The slot copy is valid.
            for page in self.scenario.pages_of(extent) {
                if next.spaces[PARENT].records[page] == PageState::LimboClean {
                    self.record(&mut next, PARENT, page, PageEvent::ParkRecorded);
                }
            }
            out.push(what, PARENT, extent, next);
            return;
        }
        let Some(slot) = self.free_slot(state) else {
            return;
        };
        let mut values = [0; PAGES];
        for page in self.scenario.pages_of(extent) {
            if state.spaces[PARENT].records[page].is_limbo() {
                let position = self.scenario.position(page);
                match state.limbo.ptes[position] {
                    Some(value) => values[position] = value,
                    // Without the address space nothing can be read; the write waits for ever.
                    None => return,
                }
            }
        }
        next.limbo.write = Write::Flying { slot, values };
        if !self.holds(Rule::SlotBeforeParked) {
            self.record_parked(&mut next, extent, slot);
        }
        out.push(what, PARENT, extent, next);
    }

    /// Records the pages of the extent that are in limbo as parked in `slot`, unless somebody is
    /// bringing them back.
    fn record_parked(&self, next: &mut State, extent: usize, slot: u8) {
        if next.spaces[PARENT].ops[extent] != Op::None
            || !self.any(next, PARENT, extent, PageState::is_limbo)
        {
            return;
        }
        for page in self.scenario.pages_of(extent) {
            match next.spaces[PARENT].records[page] {
                PageState::LimboDirty => {
                    self.record(next, PARENT, page, PageEvent::SlotWritten);
                    self.record(next, PARENT, page, PageEvent::ParkRecorded);
                }
                PageState::LimboClean => self.record(next, PARENT, page, PageEvent::ParkRecorded),
                PageState::Clean if self.holds(Rule::NewSlotHoldsAll) => {
                    self.record(next, PARENT, page, PageEvent::Written);
                }
                _ => {}
            }
        }
        next.spaces[PARENT].slots[extent] = slot;
        self.tidy_slot(next, PARENT, extent);
    }

    fn order_drop(&self, state: &State, extent: usize, write: Write, out: &mut Out) {
        if !state.ring_has_room() {
            return;
        }
        let mut next = *state;
        next.order(Verb::Drop, extent);
        next.limbo.stage = Stage::Dropping;
        next.limbo.write = write;
        if !self.holds(Rule::ReuseAfterDrop) {
            next.limbo = Limbo { ptes: next.limbo.ptes, ..Limbo::default() };
            orphan(&mut next, extent);
        }
        out.push(What::DropOrdered, PARENT, extent, next);
    }

    /// What the program has asked for.
    pub(crate) fn requests(&self, state: &State, out: &mut Out) {
        match state.request {
            Request::Discard { extent } => self.begin_discard(state, usize::from(extent), out),
            Request::Unmap => self.end_region(state, out),
            Request::None | Request::Unmappable => {}
        }
    }

    fn begin_discard(&self, state: &State, extent: usize, out: &mut Out) {
        let op = state.spaces[PARENT].ops[extent];
        if state.is_held() || matches!(op, Op::Discard(_)) {
            return;
        }
        let mut next = *state;
        if op != Op::None {
            if self.holds(Rule::OneOwner) {
                return;
            }
            orphan(&mut next, extent);
        }
        let proven = !self.holds(Rule::ForgetAfterProof);
        let step = if proven { DiscardStep::Proven } else { DiscardStep::Unproven };
        next.spaces[PARENT].ops[extent] = Op::Discard(step);
        out.push(What::DiscardBegun, PARENT, extent, next);
    }

    pub(crate) fn advance_discard(
        &self,
        state: &State,
        extent: usize,
        step: DiscardStep,
        out: &mut Out,
    ) {
        let mut next = *state;
        let early = matches!(step, DiscardStep::Unproven | DiscardStep::Proven);
        if early && state.is_held() && self.holds(Rule::ForgetAfterProof) {
            // The child's table comes first: it must not lack what is given up here.
            self.unlock(&mut next, PARENT, extent);
            out.push(What::DiscardPutOff, PARENT, extent, next);
            return;
        }
        let (what, then) = match step {
            DiscardStep::Unproven => {
                if state.fork == Fork::Started {
                    return;
                }
                (What::DiscardProven, DiscardStep::Proven)
            }
            DiscardStep::Proven => {
                for page in self.scenario.pages_of(extent) {
                    let is_zapped = next.spaces[PARENT].records[page].is_resident();
                    if is_zapped || !self.holds(Rule::ForgetAfterZap) {
                        self.record(&mut next, PARENT, page, PageEvent::Discarded);
                    }
                }
                (What::DiscardRecorded, DiscardStep::Recorded)
            }
            DiscardStep::Recorded => {
                if !state.ring_has_room() {
                    return;
                }
                next.order(Verb::Zap, extent);
                if !self.holds(Rule::AnswerAfterZap) {
                    orphan(&mut next, extent);
                    self.answer_discard(&mut next, extent);
                    out.push(What::DiscardAnswered, PARENT, extent, next);
                    return;
                }
                (What::DiscardOrdered, DiscardStep::Ordered)
            }
            DiscardStep::Ordered => {
                let Some(progress) = next.take_answer(Verb::Zap, extent) else {
                    return;
                };
                if progress != Progress::Done {
                    self.refuse_discard(&mut next, extent);
                    out.push(What::DiscardRefused, PARENT, extent, next);
                    return;
                }
                for page in self.scenario.pages_of(extent) {
                    self.record(&mut next, PARENT, page, PageEvent::Discarded);
                }
                self.answer_discard(&mut next, extent);
                out.push(What::DiscardAnswered, PARENT, extent, next);
                return;
            }
        };
        next.spaces[PARENT].ops[extent] = Op::Discard(then);
        out.push(what, PARENT, extent, next);
    }

    fn answer_discard(&self, next: &mut State, extent: usize) {
        if !next.exited {
            next.request = Request::None;
        }
        for page in self.scenario.pages_of(extent) {
            next.spaces[PARENT].truth[page] = 0;
            next.spaces[PARENT].or_zero[page] = false;
        }
        self.unlock(next, PARENT, extent);
    }

    /// A zap stops at the first page that it may not take. What it has not taken is as it was.
    fn refuse_discard(&self, next: &mut State, extent: usize) {
        next.request = Request::None;
        for page in self.scenario.pages_of(extent) {
            let is_forgotten = next.spaces[PARENT].records[page] == PageState::Absent;
            let is_present = next.spaces[PARENT].ptes[page].present;
            if is_forgotten && is_present {
                self.record(next, PARENT, page, PageEvent::FoundPresent);
            }
            next.spaces[PARENT].or_zero[page] = false;
        }
        self.unlock(next, PARENT, extent);
    }

    fn end_region(&self, state: &State, out: &mut Out) {
        let quiet = (0..self.scenario.extents())
            .all(|extent| state.spaces[PARENT].ops[extent] == Op::None)
            && state.commands.iter().flatten().all(|c| c.orphan)
            && state.limbo.write == Write::None;
        let waits = self.holds(Rule::AnswerAfterCommands);
        let unproven = state.fork == Fork::Started && self.holds(Rule::ForgetAfterProof);
        if waits && !quiet || state.is_held() || unproven {
            return;
        }
        let mut next = *state;
        for extent in 0..self.scenario.extents() {
            orphan(&mut next, extent);
            next.spaces[PARENT].ops[extent] = Op::None;
            next.spaces[PARENT].slots[extent] = 0;
        }
        next.spaces[PARENT].records = [PageState::Absent; PAGES];
        next.limbo.write = Write::None;
        next.request = Request::Unmappable;
        out.push(What::RegionEnded, PARENT, 0, next);
    }
}

/// Nobody waits for the commands on the extent any more.
pub(crate) fn orphan(next: &mut State, extent: usize) {
    for command in next.commands.iter_mut().flatten() {
        if usize::from(command.extent) == extent {
            command.orphan = true;
        }
    }
}
