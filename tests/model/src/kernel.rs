//! What the kernel, the programs, the helper and the devices do.
//!
//! Facts that this file states, with their evidence in `tests/kernel`: COPY never overwrites and wakes
//! sleepers only where it installs; it fails with EAGAIN while a FORK is unread; MOVE looks at the
//! destination alone, goes page by page, refuses pinned and shared pages and drops write protection;
//! a fault that was read is not delivered again; fork shares what is there and nothing else.

use crate::model::{Model, Out};
use crate::rules::Rule;
use crate::state::{
    CHILD, Command, FOREIGN_VALUE, Fork, Mapping, PAGES, PARENT, Pin, Progress, Pte, Request,
    State, Thread, Verb, Write, owner, small,
};
use crate::step::What;

/// How a COPY of one page ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyEnd {
    Done,
    Exists,
    EventsPending,
    NoRange,
}

impl Model {
    /// UFFDIO_COPY of one page.
    pub(crate) fn copy(
        &self,
        state: &mut State,
        proc: usize,
        page: usize,
        value: u8,
        protected: bool,
    ) -> CopyEnd {
        if proc == PARENT && !matches!(state.mapping, Mapping::Managed) {
            return CopyEnd::NoRange;
        }
        if proc == PARENT && state.fork == Fork::Started {
            return CopyEnd::EventsPending;
        }
        let pte = &mut state.spaces[proc].ptes[page];
        if pte.present {
            return CopyEnd::Exists;
        }
        *pte = Pte { present: true, protected, shared: false, value };
        state.wake(proc, page);
        CopyEnd::Done
    }

    /// UFFDIO_WRITEPROTECT that clears. `false`: EAGAIN.
    pub(crate) fn clear_protection(&self, state: &mut State, proc: usize, extent: usize) -> bool {
        if proc == PARENT && state.fork == Fork::Started {
            return false;
        }
        for page in self.scenario.pages_of(extent) {
            state.spaces[proc].ptes[page].protected = false;
            state.wake(proc, page);
        }
        true
    }

    /// Threads of both programs, and what else a program does.
    pub(crate) fn programs(&self, state: &State, out: &mut Out) {
        for index in 0..state.threads.len() {
            match state.threads[index] {
                Thread::Idle => self.begin_access(state, index, out),
                Thread::Ready { page, write } => {
                    self.access(state, index, usize::from(page), write, out);
                }
                Thread::Faulted { .. } | Thread::Asleep { .. } => {}
            }
        }
        self.fork(state, out);
        self.ask(state, out);
        match (state.request, state.mapping) {
            (Request::Unmappable, _) => {
                let mut next = *state;
                next.request = Request::None;
                next.mapping = Mapping::Nothing;
                next.spaces[PARENT].ptes = [Pte::default(); PAGES];
                out.push(What::Unmapped, PARENT, 0, next);
            }
            (_, Mapping::Nothing) => {
                let mut next = *state;
                next.mapping = Mapping::Foreign;
                for pte in &mut next.spaces[PARENT].ptes {
                    *pte = Pte { present: true, value: FOREIGN_VALUE, ..Pte::default() };
                }
                out.push(What::ForeignMapped, PARENT, 0, next);
            }
            _ => {}
        }
    }

    fn begin_access(&self, state: &State, thread: usize, out: &mut Out) {
        let proc = owner(thread);
        if thread == 1 && state.threads[0] == Thread::Idle {
            // The two are alike.
            return;
        }
        let runs = if proc == CHILD {
            !matches!(state.fork, Fork::None | Fork::Started)
        } else {
            !state.exited
                && matches!(state.mapping, Mapping::Managed | Mapping::Disarmed)
                && !matches!(state.request, Request::Unmap | Request::Unmappable)
        };
        let left = if proc == CHILD { state.budget.child_touches } else { state.budget.touches };
        if !runs || left == 0 {
            return;
        }
        for page in 0..PAGES {
            let given_up = match state.request {
                Request::Discard { extent } => {
                    usize::from(extent) == self.scenario.extent_of(page) && proc == PARENT
                }
                _ => false,
            };
            if given_up {
                continue;
            }
            for write in [false, true] {
                let pte = state.spaces[proc].ptes[page];
                // A read of what is there changes nothing: `check` looks at it in every state.
                if !write && pte.present || write && state.budget.writes == 0 {
                    continue;
                }
                let mut next = *state;
                if proc == CHILD {
                    next.budget.child_touches -= 1;
                } else {
                    next.budget.touches -= 1;
                }
                next.budget.writes -= u8::from(write);
                next.threads[thread] = Thread::Ready { page: small(page), write };
                let what = if write { What::WriteBegins } else { What::TouchBegins };
                out.push(what, proc, page, next);
            }
        }
    }

    fn access(&self, state: &State, thread: usize, page: usize, write: bool, out: &mut Out) {
        let proc = owner(thread);
        let mut next = *state;
        let space = &mut next.spaces[proc];
        if !space.ptes[page].present && state.mapping == Mapping::Disarmed {
            space.ptes[page] = Pte { present: true, ..Pte::default() };
        }
        let pte = &mut space.ptes[page];
        next.threads[thread] = if !pte.present || write && pte.protected {
            Thread::Faulted { page: small(page), write, protected: pte.present }
        } else {
            if write {
                next.version += 1;
                pte.value = next.version;
                pte.shared = false;
                space.truth[page] = next.version;
                space.or_zero[page] = false;
            } else if space.or_zero[page] {
                space.truth[page] = pte.value;
                space.or_zero[page] = false;
            }
            Thread::Idle
        };
        out.push(What::ThreadRuns, proc, thread, next);
    }

    fn fork(&self, state: &State, out: &mut Out) {
        if state.budget.forks > 0 && state.mapping == Mapping::Managed && !state.exited {
            let mut next = *state;
            next.budget.forks -= 1;
            next.fork = Fork::Started;
            for page in 0..PAGES {
                let pte = &mut next.spaces[PARENT].ptes[page];
                pte.shared |= pte.present;
            }
            let parent = next.spaces[PARENT];
            let child = &mut next.spaces[CHILD];
            child.ptes = parent.ptes;
            child.truth = parent.truth;
            child.or_zero = parent.or_zero;
            out.push(What::Forked, PARENT, 0, next);
        }
        let after = !matches!(state.fork, Fork::None | Fork::Started | Fork::Lost);
        if state.budget.exits > 0 && after {
            let mut next = *state;
            next.budget.exits -= 1;
            next.exited = true;
            next.threads[..2].fill(Thread::Idle);
            next.request = Request::None;
            if !self.holds(Rule::HelperKeepsSpace) {
                next.spaces[PARENT].ptes = [Pte::default(); PAGES];
                next.limbo.ptes = [None; PAGES];
                for command in next.commands.iter_mut().flatten() {
                    command.progress = Progress::Cancelled;
                }
            }
            out.push(What::ParentExits, PARENT, 0, next);
        }
    }

    /// Requests of the program and of its devices.
    fn ask(&self, state: &State, out: &mut Out) {
        let free =
            state.request == Request::None && state.mapping == Mapping::Managed && !state.exited;
        let at_rest = |page: usize| {
            state.threads[..2].iter().all(|thread| match *thread {
                Thread::Idle => true,
                Thread::Ready { page: at, .. }
                | Thread::Faulted { page: at, .. }
                | Thread::Asleep { page: at, .. } => usize::from(at) != page,
            })
        };
        if free && state.budget.discards > 0 {
            for extent in 0..self.scenario.extents() {
                if !self.scenario.pages_of(extent).all(at_rest) {
                    continue;
                }
                let mut next = *state;
                next.budget.discards -= 1;
                if !self.holds(Rule::DiscardByMessage) {
                    for page in self.scenario.pages_of(extent) {
                        next.spaces[PARENT].ptes[page] = Pte::default();
                        next.spaces[PARENT].truth[page] = 0;
                    }
                    out.push(What::DiscardAsked, PARENT, extent, next);
                    continue;
                }
                next.request = Request::Discard { extent: small(extent) };
                for page in self.scenario.pages_of(extent) {
                    next.spaces[PARENT].or_zero[page] = true;
                }
                out.push(What::DiscardAsked, PARENT, extent, next);
            }
        }
        if free && state.budget.unmaps > 0 && (0..PAGES).all(at_rest) {
            let mut next = *state;
            next.budget.unmaps -= 1;
            next.request = Request::Unmap;
            // Given up: a fork from here on may find the bytes or zeros.
            next.spaces[PARENT].or_zero = [true; PAGES];
            out.push(What::UnmapAsked, PARENT, 0, next);
        }
    }

    /// Disks and other devices.
    pub(crate) fn device(&self, state: &State, out: &mut Out) {
        if let Write::Flying { slot, values } = state.limbo.write {
            let mut next = *state;
            next.store[usize::from(slot) - 1] = values;
            next.limbo.write = Write::Landed { slot };
            out.push(What::SlotWritten, PARENT, usize::from(slot), next);
        }
        if let Some((slot, values)) = state.late {
            let mut next = *state;
            next.store[usize::from(slot) - 1] = values;
            next.late = None;
            out.push(What::LateSlotWritten, PARENT, usize::from(slot), next);
        }
        match state.pin {
            None if state.budget.pins > 0 => {
                for page in 0..PAGES {
                    let pte = state.spaces[PARENT].ptes[page];
                    // Pinning for write breaks sharing and waits for protection like a write does.
                    if pte.present && !pte.protected && !pte.shared {
                        let mut next = *state;
                        next.budget.pins -= 1;
                        let page = small(page);
                        next.pin = Some(Pin { page, in_limbo: false, detached: false });
                        out.push(What::PagePinned, PARENT, usize::from(page), next);
                    }
                }
            }
            Some(pin) => self.pinned(state, pin, out),
            None => {}
        }
    }

    fn pinned(&self, state: &State, pin: Pin, out: &mut Out) {
        let page = usize::from(pin.page);
        if state.budget.device_writes > 0 {
            let mut next = *state;
            next.budget.device_writes -= 1;
            next.version += 1;
            next.spaces[PARENT].truth[page] = next.version;
            if pin.in_limbo {
                next.limbo.ptes[self.scenario.position(page)] = Some(next.version);
            } else if !pin.detached {
                next.spaces[PARENT].ptes[page].value = next.version;
            }
            out.push(What::DeviceWrites, PARENT, page, next);
        }
        let mut next = *state;
        next.pin = None;
        out.push(What::PageUnpinned, PARENT, page, next);
    }

    /// The helper works at one command at a time, page by page. It may take them in any order: the rules
    /// do not rest on the ring being one.
    pub(crate) fn helper(&self, state: &State, out: &mut Out) {
        let taken = state
            .commands
            .iter()
            .position(|c| c.is_some_and(|c| matches!(c.progress, Progress::Taken { .. })));
        for at in 0..state.commands.len() {
            if taken.is_none_or(|taken| taken == at)
                && let Some(command) = state.commands[at].filter(|c| !c.is_answered())
            {
                self.command(state, at, command, out);
            }
        }
    }

    fn command(&self, state: &State, at: usize, command: Command, out: &mut Out) {
        let extent = usize::from(command.extent);
        let mut next = *state;
        let page = match command.progress {
            Progress::Taken { page } => usize::from(page),
            _ => {
                let page = self.scenario.pages_of(extent).start;
                if state.budget.crashes > 0 || !state.alive {
                    // It can still be cancelled, or not: that makes a difference to a restart alone.
                    let progress = Progress::Taken { page: small(page) };
                    next.commands[at] = Some(Command { progress, ..command });
                    out.push(What::HelperTakes, PARENT, extent, next);
                    return;
                }
                page
            }
        };
        if command.verb == Verb::Zap && state.budget.refusals > 0 {
            let mut refused = *state;
            refused.budget.refusals -= 1;
            refused.commands[at] = Some(Command { progress: Progress::Stopped, ..command });
            out.push(What::ZapRefused, PARENT, extent, refused);
        }
        let Some(goes_on) = self.work(&mut next, command.verb, page) else {
            // Asleep in a fault of its own.
            return;
        };
        let last = page + 1 == self.scenario.pages_of(extent).end;
        let progress = match (goes_on, last) {
            (false, _) => Progress::Stopped,
            (true, true) => Progress::Done,
            (true, false) => Progress::Taken { page: small(page + 1) },
        };
        next.commands[at] = Some(Command { progress, ..command });
        out.push(What::HelperWorks, PARENT, extent, next);
    }

    /// One page of a command: whether it goes on, or `None` while the helper sleeps.
    fn work(&self, next: &mut State, verb: Verb, page: usize) -> Option<bool> {
        let position = self.scenario.position(page);
        let pte = next.spaces[PARENT].ptes[page];
        match verb {
            Verb::Move => {
                let pinned = next.pin.is_some_and(|pin| {
                    usize::from(pin.page) == page && !pin.in_limbo && !pin.detached
                });
                if !pte.present {
                    // Holes are allowed; unmapped memory is an error.
                    return Some(next.mapping == Mapping::Managed);
                }
                if pte.shared || next.limbo.ptes[position].is_some() {
                    return Some(false);
                }
                if pinned && self.holds(Rule::PinnedStays) {
                    return Some(false);
                }
                if pinned && let Some(pin) = &mut next.pin {
                    pin.in_limbo = true;
                }
                next.limbo.ptes[position] = Some(pte.value);
                next.spaces[PARENT].ptes[page] = Pte::default();
            }
            Verb::Drop => {
                next.limbo.ptes[position] = None;
                if let Some(pin) = &mut next.pin
                    && usize::from(pin.page) == page
                    && pin.in_limbo
                {
                    pin.in_limbo = false;
                    pin.detached = true;
                }
            }
            Verb::Zap => {
                let space = &mut next.spaces[PARENT];
                let extent = small(self.scenario.extent_of(page));
                if pte.present && next.request == (Request::Discard { extent }) {
                    // So it has happened, whatever the program is told of the whole.
                    space.truth[page] = 0;
                    space.or_zero[page] = false;
                }
                space.ptes[page] = Pte::default();
            }
            Verb::Populate => {
                if !pte.present {
                    // Present runs only: an absent page would make the helper wait for its master.
                    return if self.holds(Rule::PopulatePresent) { Some(true) } else { None };
                }
                if pte.protected {
                    return None;
                }
                next.spaces[PARENT].ptes[page].shared = false;
            }
        }
        Some(true)
    }
}
