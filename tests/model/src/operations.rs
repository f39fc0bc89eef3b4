//! Operations on extents, step by step, in the order in which the manager takes the steps: between any
//! two of them the daemon may be killed, and everybody else may run.

use crate::kernel::CopyEnd;
use crate::model::{Model, Out};
use crate::op::{Copied, Op, UnprotectStep};
use crate::rules::Rule;
use crate::state::{PARENT, Progress, State, Verb, small};
use crate::step::What;
use tiermgr_core::page::{PageEvent, PageState};

impl Model {
    /// A step that nobody but the daemon sees, where there is one: what is in its memory and its records
    /// only matters to others when it can be killed in between. Where it cannot any more, such a step
    /// is taken before everybody else's, which loses no behaviour that shows.
    pub(crate) fn private(&self, state: &State, out: &mut Out) -> bool {
        for proc in 0..state.spaces.len() {
            for extent in 0..self.scenario.extents() {
                let op = state.spaces[proc].ops[extent];
                let hidden = match op {
                    Op::Rescue { copied, .. }
                    | Op::Fill { copied, .. }
                    | Op::Zero { copied, .. } => copied != Copied::No,
                    Op::Move { ordered: false } => state.ring_has_room(),
                    _ => false,
                };
                if hidden {
                    self.operation(state, proc, extent, op, out);
                    return true;
                }
            }
        }
        false
    }

    /// The next step of every operation.
    pub(crate) fn operations(&self, state: &State, out: &mut Out) {
        for proc in 0..state.spaces.len() {
            for extent in 0..self.scenario.extents() {
                self.operation(state, proc, extent, state.spaces[proc].ops[extent], out);
            }
        }
    }

    fn operation(&self, state: &State, proc: usize, extent: usize, op: Op, out: &mut Out) {
        match op {
            Op::None => {}
            Op::Move { ordered } => self.advance_move(state, extent, ordered, out),
            Op::Rescue { page, write, copied } => {
                self.advance_rescue(state, extent, usize::from(page), write, copied, out);
            }
            Op::FillRead { write } => self.advance_fill_read(state, proc, extent, write, out),
            Op::Fill { page, write, copied, buffer } => {
                let at = usize::from(page);
                self.advance_fill(state, (proc, extent), (at, write), copied, buffer, out);
            }
            Op::Zero { page, recheck, copied } => {
                self.advance_zero(state, proc, usize::from(page), recheck, copied, out);
            }
            Op::Unprotect(step) => self.advance_unprotect(state, proc, extent, step, out),
            Op::Prepare(step) => self.advance_prepare(state, extent, step, out),
            Op::Discard(step) => self.advance_discard(state, extent, step, out),
        }
    }

    /// Whether what is on its way back to the parent must be given up.
    fn gives_up(&self, state: &State, proc: usize) -> bool {
        proc == PARENT && state.is_held() && self.holds(Rule::ForkEndsFills)
    }

    fn advance_move(&self, state: &State, extent: usize, ordered: bool, out: &mut Out) {
        let mut next = *state;
        if !ordered {
            if state.ring_has_room() {
                next.order(Verb::Move, extent);
                next.spaces[PARENT].ops[extent] = Op::Move { ordered: true };
                out.push(What::MoveOrdered, PARENT, extent, next);
            }
            return;
        }
        let Some(answer) = next.take_answer(Verb::Move, extent) else {
            return;
        };
        let whole = answer == Progress::Done;
        for page in self.scenario.pages_of(extent) {
            let in_limbo = next.limbo.ptes[self.scenario.position(page)].is_some();
            let moved = whole || in_limbo && self.holds(Rule::ResultsByPage);
            let record = next.spaces[PARENT].records[page];
            if !self.holds(Rule::LimboBeforeMove) && record.is_resident() && moved {
                self.record(&mut next, PARENT, page, PageEvent::LimboBegun);
            } else if record.is_limbo() && !moved {
                self.record(&mut next, PARENT, page, PageEvent::LimboRefused);
            }
        }
        self.unlock(&mut next, PARENT, extent);
        let half = !whole && self.any(&next, PARENT, extent, PageState::is_limbo);
        if half && !next.is_held() {
            // Extents leave whole or not at all.
            self.rescue(&mut next, extent, false);
        }
        out.push(What::MoveAnswered, PARENT, extent, next);
    }

    fn advance_rescue(
        &self,
        state: &State,
        extent: usize,
        page: usize,
        write: bool,
        copied: Copied,
        out: &mut Out,
    ) {
        let mut next = *state;
        let position = self.scenario.position(page);
        let clean = state.spaces[PARENT].records[page] == PageState::LimboClean && !write;
        if copied == Copied::No {
            if self.gives_up(state, PARENT) {
                next.spaces[PARENT].ops[extent] = Op::None;
                next.spaces[PARENT].wakes[extent] = false;
                out.push(What::RescueGivenUp, PARENT, extent, next);
                return;
            }
            let Some(value) = state.limbo.ptes[position] else {
                // The program's doing: nobody else drops a page that a record names.
                self.record(&mut next, PARENT, page, PageEvent::LimboEmpty);
                self.next_rescue(&mut next, extent, write);
                out.push(What::RescueRecorded, PARENT, page, next);
                return;
            };
            let protected = clean && self.holds(Rule::CleanIsProtected);
            let end = self.copy(&mut next, PARENT, page, value, protected);
            let Some(copied) = self.after_copy(&mut next, PARENT, page, value, end) else {
                return;
            };
            next.spaces[PARENT].ops[extent] = Op::Rescue { page: small(page), write, copied };
            out.push(What::RescueCopied, PARENT, page, next);
            return;
        }
        let event = match copied {
            Copied::Exists => PageEvent::FoundPresent,
            _ if clean => PageEvent::RescuedClean,
            _ => PageEvent::RescuedDirty,
        };
        self.record(&mut next, PARENT, page, event);
        self.next_rescue(&mut next, extent, write);
        out.push(What::RescueRecorded, PARENT, page, next);
    }

    fn next_rescue(&self, next: &mut State, extent: usize, write: bool) {
        if self.any(next, PARENT, extent, PageState::is_limbo) {
            self.rescue(next, extent, write);
        } else {
            self.unlock(next, PARENT, extent);
        }
    }

    /// What an operation does about the end of a COPY: `None` means that it tries again.
    fn after_copy(
        &self,
        next: &mut State,
        proc: usize,
        page: usize,
        value: u8,
        end: CopyEnd,
    ) -> Option<Copied> {
        match end {
            CopyEnd::Done => Some(Copied::Done),
            CopyEnd::EventsPending | CopyEnd::NoRange => {
                (!self.holds(Rule::EagainRetries)).then_some(Copied::Done)
            }
            CopyEnd::Exists => {
                next.wake(proc, page);
                if !self.holds(Rule::ExistsKeeps) {
                    next.spaces[proc].ptes[page].value = value;
                }
                Some(Copied::Exists)
            }
        }
    }

    fn advance_fill_read(
        &self,
        state: &State,
        proc: usize,
        extent: usize,
        write: bool,
        out: &mut Out,
    ) {
        let mut next = *state;
        let slot = usize::from(state.spaces[proc].slots[extent]);
        let buffer = slot.checked_sub(1).map_or([0; 2], |index| state.store[index]);
        if self.gives_up(state, proc) {
            self.end_fill(&mut next, proc, extent);
            out.push(What::FillGivenUp, proc, extent, next);
            return;
        }
        self.next_fill(&mut next, proc, extent, write, buffer);
        out.push(What::SlotRead, proc, extent, next);
    }

    /// Goes on with the next page that is filling, or ends the fill.
    fn next_fill(
        &self,
        next: &mut State,
        proc: usize,
        extent: usize,
        write: bool,
        buffer: [u8; 2],
    ) {
        let records = next.spaces[proc].records;
        let filling = |&page: &usize| records[page] == PageState::Filling;
        match self.scenario.pages_of(extent).find(filling) {
            Some(page) => {
                let page = small(page);
                next.spaces[proc].ops[extent] =
                    Op::Fill { page, write, copied: Copied::No, buffer };
            }
            None => self.unlock(next, proc, extent),
        }
    }

    /// Gives a fill up: what is not installed stays parked.
    fn end_fill(&self, next: &mut State, proc: usize, extent: usize) {
        for page in self.scenario.pages_of(extent) {
            if next.spaces[proc].records[page] == PageState::Filling {
                self.record(next, proc, page, PageEvent::FillCancelled);
            }
        }
        next.spaces[proc].wakes[extent] = true;
        self.unlock(next, proc, extent);
    }

    fn advance_fill(
        &self,
        state: &State,
        (proc, extent): (usize, usize),
        (page, write): (usize, bool),
        copied: Copied,
        buffer: [u8; 2],
        out: &mut Out,
    ) {
        let mut next = *state;
        if copied == Copied::No {
            if self.gives_up(state, proc) {
                self.end_fill(&mut next, proc, extent);
                out.push(What::FillGivenUp, proc, extent, next);
                return;
            }
            let value = buffer[self.scenario.position(page)];
            let protected = !write && self.holds(Rule::CleanIsProtected);
            let end = self.copy(&mut next, proc, page, value, protected);
            let Some(copied) = self.after_copy(&mut next, proc, page, value, end) else {
                return;
            };
            let page = small(page);
            next.spaces[proc].ops[extent] = Op::Fill { page, write, copied, buffer };
            out.push(What::FillCopied, proc, usize::from(page), next);
            return;
        }
        let event = match copied {
            Copied::Exists => PageEvent::FoundPresent,
            _ if write => PageEvent::FilledDirty,
            _ => PageEvent::FilledClean,
        };
        self.record(&mut next, proc, page, event);
        self.next_fill(&mut next, proc, extent, write, buffer);
        out.push(What::FillRecorded, proc, page, next);
    }

    fn advance_zero(
        &self,
        state: &State,
        proc: usize,
        page: usize,
        recheck: bool,
        copied: Copied,
        out: &mut Out,
    ) {
        let mut next = *state;
        let extent = self.scenario.extent_of(page);
        if copied == Copied::No {
            let end = self.copy(&mut next, proc, page, 0, false);
            let Some(copied) = self.after_copy(&mut next, proc, page, 0, end) else {
                return;
            };
            next.spaces[proc].ops[extent] = Op::Zero { page: small(page), recheck, copied };
            out.push(What::ZeroCopied, proc, page, next);
            return;
        }
        let event = match (copied, recheck) {
            (Copied::Exists, true) => None,
            (Copied::Exists, false) => Some(PageEvent::FoundPresent),
            (_, true) => Some(PageEvent::Written),
            (_, false) => Some(PageEvent::ZeroInstalled),
        };
        if let Some(event) = event {
            self.record(&mut next, proc, page, event);
        }
        self.unlock(&mut next, proc, extent);
        out.push(What::ZeroRecorded, proc, page, next);
    }

    fn advance_unprotect(
        &self,
        state: &State,
        proc: usize,
        extent: usize,
        step: UnprotectStep,
        out: &mut Out,
    ) {
        let mut next = *state;
        match step {
            UnprotectStep::SlotFreed | UnprotectStep::Cleared => {
                self.record_written(&mut next, proc, extent);
                if step == UnprotectStep::Cleared {
                    self.unlock(&mut next, proc, extent);
                } else {
                    next.spaces[proc].ops[extent] = Op::Unprotect(UnprotectStep::Recorded);
                }
                out.push(What::UnprotectRecorded, proc, extent, next);
            }
            UnprotectStep::Recorded | UnprotectStep::Unrecorded => {
                if !self.clear_protection(&mut next, proc, extent) {
                    return;
                }
                if step == UnprotectStep::Recorded {
                    self.unlock(&mut next, proc, extent);
                } else {
                    next.spaces[proc].ops[extent] = Op::Unprotect(UnprotectStep::Cleared);
                }
                out.push(What::Unprotected, proc, extent, next);
            }
        }
    }
}
