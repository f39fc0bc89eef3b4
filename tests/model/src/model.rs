//! The rules of the game: which states follow a state.

use crate::broken::Broken;
use crate::op::Op;
use crate::rules::{Rule, Rules};
use crate::scenario::Scenario;
use crate::state::{
    CHILD, FOREIGN_VALUE, Fork, Mapping, PAGES, PARENT, Request, SLOTS, State, Thread, Write, small,
};
use crate::step::{Step, What};
use tiermgr_core::page::{PageEvent, PageState};

/// A scenario under a set of rules.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// The world.
    pub scenario: Scenario,
    /// The protocol.
    pub rules: Rules,
}

/// Where the states that follow are collected.
#[derive(Debug, Default)]
pub struct Out {
    /// What happens, and what is then.
    pub next: Vec<(Step, State)>,
}

impl Out {
    pub(crate) fn push(&mut self, what: What, proc: usize, at: usize, mut state: State) {
        state.sweep_orphans();
        self.next.push((Step { what, proc: small(proc), at: small(at) }, state));
    }
}

impl Model {
    /// Puts everything that can happen in `state` into `out`.
    pub fn successors(&self, state: &State, out: &mut Out) {
        out.next.clear();
        self.collect(state, out);
        for (_, next) in &mut out.next {
            self.canonize(next);
        }
    }

    fn collect(&self, state: &State, out: &mut Out) {
        if state.alive && state.budget.crashes == 0 && self.private(state, out) {
            return;
        }
        self.programs(state, out);
        self.device(state, out);
        self.helper(state, out);
        if !state.alive {
            self.restart(state, out);
            return;
        }
        self.kill(state, out);
        self.messages(state, out);
        if state.fork == Fork::Read && self.rules.holds(Rule::ForkFirst) {
            return;
        }
        self.policy(state, out);
        self.limbo(state, out);
        self.operations(state, out);
        self.requests(state, out);
        self.life(state, out);
    }

    /// What is wrong with `state`, if anything.
    #[must_use]
    pub fn check(&self, state: &State) -> Option<Broken> {
        if state.broken.is_some() {
            return state.broken;
        }
        for page in 0..PAGES {
            match state.mapping {
                Mapping::Foreign => {
                    let pte = state.spaces[PARENT].ptes[page];
                    if !pte.present || pte.value != FOREIGN_VALUE {
                        return Some(Broken::Foreign { page: small(page) });
                    }
                }
                Mapping::Managed | Mapping::Disarmed
                    if !state.exited && shows_wrong_byte(state, PARENT, page) =>
                {
                    return Some(Broken::WrongByte { proc: small(PARENT), page: small(page) });
                }
                _ => {}
            }
            if state.fork != Fork::None && shows_wrong_byte(state, CHILD, page) {
                return Some(Broken::WrongByte { proc: small(CHILD), page: small(page) });
            }
        }
        None
    }

    /// Whether nobody waits for the daemon.
    #[must_use]
    pub fn is_served(&self, state: &State) -> bool {
        state.threads.iter().all(|t| *t == Thread::Idle)
            && state.request == Request::None
            && matches!(state.fork, Fork::None | Fork::Born | Fork::Lost)
    }

    pub(crate) const fn holds(&self, rule: Rule) -> bool {
        self.rules.holds(rule)
    }

    /// Records `event` for a page. An event that the table has no arrow for is an error of ours.
    pub(crate) fn record(&self, state: &mut State, proc: usize, page: usize, event: PageEvent) {
        let space = &mut state.spaces[proc];
        match space.records[page].next(event) {
            Some(next) => space.records[page] = next,
            None => {
                if state.broken.is_none() {
                    state.broken = Some(Broken::NoArrow { page: small(page) });
                }
            }
        }
        self.tidy_slot(state, proc, self.scenario.extent_of(page));
    }

    /// Forgets a slot that no page of the extent needs.
    pub(crate) fn tidy_slot(&self, state: &mut State, proc: usize, extent: usize) {
        let space = &mut state.spaces[proc];
        if !self.scenario.pages_of(extent).any(|page| space.records[page].needs_slot()) {
            space.slots[extent] = 0;
        }
    }

    /// Whether a page of the extent is in a state that `wanted` names.
    pub(crate) fn any(
        &self,
        state: &State,
        proc: usize,
        extent: usize,
        wanted: impl Fn(PageState) -> bool,
    ) -> bool {
        self.scenario.pages_of(extent).any(|page| wanted(state.spaces[proc].records[page]))
    }

    /// Ends the operation that owns the extent, and wakes whoever faulted meanwhile.
    pub(crate) fn unlock(&self, state: &mut State, proc: usize, extent: usize) {
        state.spaces[proc].ops[extent] = Op::None;
        if std::mem::take(&mut state.spaces[proc].wakes[extent]) {
            for page in self.scenario.pages_of(extent) {
                state.wake(proc, page);
            }
        }
    }

    /// The first slot that nobody needs.
    pub(crate) fn free_slot(&self, state: &State) -> Option<u8> {
        let written = match state.limbo.write {
            Write::None => 0,
            Write::Flying { slot, .. } | Write::Landed { slot } | Write::Unrecorded { slot } => {
                slot
            }
        };
        (1..=small(SLOTS)).find(|&slot| {
            let held = |proc: usize| {
                let space = &state.spaces[proc];
                (0..self.scenario.extents()).any(|extent| {
                    let freed =
                        space.ops[extent] == Op::Unprotect(crate::op::UnprotectStep::SlotFreed);
                    space.slots[extent] == slot && !freed
                })
            };
            let child = held(CHILD) && self.holds(Rule::SlotsCounted);
            slot != written && !held(PARENT) && !child
        })
    }
}

fn shows_wrong_byte(state: &State, proc: usize, page: usize) -> bool {
    let space = &state.spaces[proc];
    let pte = space.ptes[page];
    pte.present && pte.value != space.truth[page] && !(space.or_zero[page] && pte.value == 0)
}
