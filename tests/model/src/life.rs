//! What a fork needs before and after, and how processes end.

use crate::daemon::wake_all;
use crate::model::{Model, Out};
use crate::op::{Op, PrepareStep};
use crate::rules::Rule;
use crate::state::{CHILD, Fork, Limbo, PARENT, Space, Stage, State, Verb, Write};
use crate::step::What;
use tiermgr_core::page::PageState;

impl Model {
    pub(crate) fn advance_prepare(
        &self,
        state: &State,
        extent: usize,
        step: PrepareStep,
        out: &mut Out,
    ) {
        let mut next = *state;
        match step {
            PrepareStep::Recorded => {
                if self.holds(Rule::UnprotectBeforePopulate)
                    && !self.clear_protection(&mut next, PARENT, extent)
                {
                    return;
                }
                next.spaces[PARENT].ops[extent] = Op::Prepare(PrepareStep::Cleared);
            }
            PrepareStep::Cleared => {
                if !state.ring_has_room() {
                    return;
                }
                next.order(Verb::Populate, extent);
                next.spaces[PARENT].ops[extent] = Op::Prepare(PrepareStep::Ordered);
            }
            PrepareStep::Ordered => {
                if next.take_answer(Verb::Populate, extent).is_none() {
                    return;
                }
                self.unlock(&mut next, PARENT, extent);
            }
        }
        out.push(What::PrepareAdvanced, PARENT, extent, next);
    }

    /// What begins and ends with a process.
    pub(crate) fn life(&self, state: &State, out: &mut Out) {
        let quiet = (0..self.scenario.extents())
            .all(|extent| state.spaces[PARENT].ops[extent] == Op::None)
            && state.limbo.write == Write::None;
        if state.fork == Fork::Held && quiet {
            self.bear_child(state, out);
        }
        let answered = state.commands.iter().flatten().all(|c| c.orphan);
        if state.exited && !state.released && state.fork == Fork::Born && quiet && answered {
            let mut next = *state;
            next.released = true;
            next.spaces[PARENT] = Space::default();
            next.limbo = Limbo::default();
            out.push(What::ParentReleased, PARENT, 0, next);
        }
    }

    fn bear_child(&self, state: &State, out: &mut Out) {
        let resting = state.limbo.stage != Stage::Free;
        if resting && self.holds(Rule::ForkWritesLimbo) {
            return;
        }
        let mut next = *state;
        next.fork = Fork::Born;
        let parent = next.spaces[PARENT];
        for page in 0..parent.records.len() {
            next.spaces[CHILD].records[page] = match parent.records[page] {
                PageState::Filling => PageState::Parked,
                // Limbo is not inherited: the child finds nothing there.
                PageState::LimboDirty | PageState::LimboClean => PageState::Absent,
                other => other,
            };
        }
        next.spaces[CHILD].slots = parent.slots;
        for extent in 0..self.scenario.extents() {
            self.tidy_slot(&mut next, CHILD, extent);
        }
        wake_all(&mut next);
        out.push(What::ChildBorn, PARENT, 0, next);
    }
}
