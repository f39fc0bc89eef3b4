//! The daemon: messages, its death and its return.

use crate::model::{Model, Out};
use crate::op::{Copied, Op, UnprotectStep};
use crate::rules::Rule;
use crate::state::{
    CHILD, Fault, Fork, INBOX, Limbo, Mapping, PAGES, PARENT, Progress, Request, Stage, State,
    Thread, Write, owner, small,
};
use crate::step::What;
use tiermgr_core::page::{PageEvent, PageState};

impl Model {
    /// SIGKILL at any instant.
    pub(crate) fn kill(&self, state: &State, out: &mut Out) {
        if state.budget.crashes == 0 || state.late.is_some() {
            return;
        }
        let mut next = *state;
        next.budget.crashes -= 1;
        next.alive = false;
        next.inbox = [None; INBOX];
        for space in &mut next.spaces {
            space.ops = [Op::None; PAGES];
            space.wakes = [false; PAGES];
        }
        for command in next.commands.iter_mut().flatten() {
            command.orphan = true;
        }
        if let Write::Flying { slot, values } = next.limbo.write {
            next.late = Some((slot, values));
        }
        next.limbo = Limbo { ptes: next.limbo.ptes, ..Limbo::default() };
        if matches!(next.fork, Fork::Read | Fork::Held) {
            next.fork = if self.holds(Rule::MessagesSurvive) { Fork::Read } else { Fork::Lost };
        }
        if !self.holds(Rule::KeeperHolds) {
            next.mapping = Mapping::Disarmed;
            wake_all(&mut next);
        }
        out.push(What::DaemonKilled, PARENT, 0, next);
    }

    /// A new daemon takes over. The looks at the page table and the records are one step: while no
    /// daemon serves, pages appear and disappear in armed memory by nobody's doing.
    pub(crate) fn restart(&self, state: &State, out: &mut Out) {
        let mut next = *state;
        if self.holds(Rule::RestartWaitsForStore) && state.late.is_some() {
            return;
        }
        if self.holds(Rule::RestartWaitsForHelper) {
            // Queued commands are cancelled; one that the helper has taken must end first.
            for command in next.commands.iter_mut().flatten() {
                match command.progress {
                    Progress::Queued => command.progress = Progress::Cancelled,
                    Progress::Taken { .. } => return,
                    _ => {}
                }
            }
        }
        next.alive = true;
        for proc in [PARENT, CHILD] {
            if proc == CHILD && !next.has_child_table() {
                continue;
            }
            for page in 0..PAGES {
                if let Some(event) = self.found(&next, proc, page) {
                    self.record(&mut next, proc, page, event);
                }
            }
        }
        self.find_limbo(&mut next);
        if self.holds(Rule::RestartWakesAll) {
            wake_all(&mut next);
        }
        out.push(What::Restarted, PARENT, 0, next);
    }

    /// What a restart learns of a page by looking at the kernel's page table.
    fn found(&self, state: &State, proc: usize, page: usize) -> Option<PageEvent> {
        let there = state.spaces[proc].ptes[page].present;
        match state.spaces[proc].records[page] {
            PageState::LimboDirty | PageState::LimboClean => {
                let in_limbo = state.limbo.ptes[self.scenario.position(page)].is_some();
                if !self.holds(Rule::RestartLooksAtLimbo) {
                    return Some(PageEvent::LimboRefused);
                }
                match (there, in_limbo) {
                    // Copied back before the kill, and perhaps written since.
                    (true, _) => Some(PageEvent::FoundPresent),
                    (false, true) => None,
                    (false, false) => Some(PageEvent::LimboEmpty),
                }
            }
            PageState::Absent | PageState::Parked if there => Some(PageEvent::FoundPresent),
            PageState::Filling if there => Some(PageEvent::FoundPresent),
            PageState::Filling => {
                self.holds(Rule::RestartEndsFills).then_some(PageEvent::FillCancelled)
            }
            _ => None,
        }
    }

    /// What the limbo block is used for, by the records and the kernel's page table.
    fn find_limbo(&self, state: &mut State) {
        let named = (0..self.scenario.extents())
            .find(|&extent| self.any(state, PARENT, extent, PageState::is_limbo));
        let taken = state.limbo.ptes.iter().any(Option::is_some);
        if named.is_some() || taken {
            state.limbo.stage = Stage::Used;
            state.limbo.extent = small(named.unwrap_or(0));
        }
    }

    /// Reads messages and looks at them, in any order.
    pub(crate) fn messages(&self, state: &State, out: &mut Out) {
        if state.fork == Fork::Started {
            let mut next = *state;
            next.fork = Fork::Read;
            out.push(What::ForkRead, PARENT, 0, next);
        }
        if state.fork == Fork::Read {
            let mut next = *state;
            next.fork = Fork::Held;
            out.push(What::ForkFollowed, PARENT, 0, next);
            if self.holds(Rule::ForkFirst) {
                return;
            }
        }
        for index in 0..state.threads.len() {
            let Thread::Faulted { page, write, protected } = state.threads[index] else {
                continue;
            };
            let Some(free) = state.inbox.iter().position(Option::is_none) else {
                break;
            };
            let proc = owner(index);
            if proc == CHILD && state.fork == Fork::Lost {
                continue;
            }
            let mut next = *state;
            next.threads[index] = Thread::Asleep { page, write };
            next.inbox[free] = Some(Fault { proc: small(proc), page, write, protected });
            out.push(What::FaultRead, proc, index, next);
        }
        for index in 0..INBOX {
            let Some(fault) = state.inbox[index] else {
                continue;
            };
            let mut next = *state;
            next.inbox[index] = None;
            self.look_at(&mut next, fault);
            out.push(What::FaultLookedAt, usize::from(fault.proc), usize::from(fault.page), next);
        }
    }

    fn look_at(&self, next: &mut State, fault: Fault) {
        let (proc, page) = (usize::from(fault.proc), usize::from(fault.page));
        let extent = self.scenario.extent_of(page);
        let unborn = proc == CHILD && !next.has_child_table();
        if next.is_held() || unborn || proc == PARENT && !is_open(next) {
            // Whoever sleeps there is woken as a whole later, or has gone.
            return;
        }
        let op = next.spaces[proc].ops[extent];
        let moving = matches!(op, Op::Move { .. });
        if op != Op::None && (self.holds(Rule::OneOwner) || !moving) {
            next.spaces[proc].wakes[extent] = self.holds(Rule::BusyWakes);
            return;
        }
        if moving {
            crate::limbo::orphan(next, extent);
        }
        let record = next.spaces[proc].records[page];
        if fault.protected {
            if record.is_resident() || self.holds(Rule::ProtectionAlwaysClears) {
                self.first_write(next, proc, extent);
            } else {
                for page in self.scenario.pages_of(extent) {
                    next.wake(proc, page);
                }
            }
            return;
        }
        let write = fault.write;
        let parked = self.any(next, proc, extent, |s| s == PageState::Parked);
        let in_limbo = self.any(next, proc, extent, PageState::is_limbo);
        match record {
            PageState::LimboDirty | PageState::LimboClean => self.rescue(next, extent, write),
            PageState::Parked => self.fill(next, proc, extent, write),
            PageState::Absent if parked => self.fill(next, proc, extent, write),
            PageState::Absent if in_limbo => self.rescue(next, extent, write),
            PageState::Absent => self.zero(next, proc, page, false),
            PageState::Dirty | PageState::Clean => {
                self.zero(next, proc, page, true);
            }
            PageState::Filling | PageState::Poisoned => {}
        }
        if record == PageState::Absent && (parked || in_limbo) || record.is_limbo() {
            // What begins may bring other pages than the one that somebody sleeps on.
            next.spaces[proc].wakes[extent] = self.holds(Rule::OtherPageWakes);
        }
    }

    fn first_write(&self, next: &mut State, proc: usize, extent: usize) {
        let step = if !self.holds(Rule::DirtyBeforeUnprotect) {
            UnprotectStep::Unrecorded
        } else if !self.holds(Rule::DirtyBeforeFree) {
            UnprotectStep::SlotFreed
        } else {
            self.record_written(next, proc, extent);
            UnprotectStep::Recorded
        };
        next.spaces[proc].ops[extent] = Op::Unprotect(step);
    }

    /// Records the resident pages of an extent as written.
    pub(crate) fn record_written(&self, next: &mut State, proc: usize, extent: usize) {
        for page in self.scenario.pages_of(extent) {
            if next.spaces[proc].records[page].is_resident() {
                self.record(next, proc, page, PageEvent::Written);
            }
        }
    }

    fn fill(&self, next: &mut State, proc: usize, extent: usize, write: bool) {
        for page in self.scenario.pages_of(extent) {
            if next.spaces[proc].records[page] == PageState::Parked {
                self.record(next, proc, page, PageEvent::FillBegun);
            }
        }
        next.spaces[proc].ops[extent] = Op::FillRead { write };
    }

    fn zero(&self, next: &mut State, proc: usize, page: usize, recheck: bool) {
        let extent = self.scenario.extent_of(page);
        next.spaces[proc].ops[extent] = Op::Zero { page: small(page), recheck, copied: Copied::No };
    }

    /// Begins to bring an extent back from limbo.
    pub(crate) fn rescue(&self, next: &mut State, extent: usize, write: bool) {
        let page = self
            .scenario
            .pages_of(extent)
            .find(|&page| next.spaces[PARENT].records[page].is_limbo())
            .unwrap_or(0);
        next.spaces[PARENT].ops[extent] =
            Op::Rescue { page: small(page), write, copied: Copied::No };
    }
}

/// Wakes every thread.
pub(crate) fn wake_all(state: &mut State) {
    for proc in [PARENT, CHILD] {
        for page in 0..PAGES {
            state.wake(proc, page);
        }
    }
}

/// Whether the parent's region is there and not ending.
pub(crate) fn is_open(state: &State) -> bool {
    matches!(state.mapping, Mapping::Managed | Mapping::Disarmed)
        && !matches!(state.request, Request::Unmap | Request::Unmappable)
        && !state.released
}
