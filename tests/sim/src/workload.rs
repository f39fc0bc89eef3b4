//! What threads of clients and devices do, and what they must see.

use crate::client::{Call, Dma, Expect, Held, OwnRegion, Process, RegionState, State};
use crate::kernel::{Access, FrameId, LayoutMessage, Pte, Sleeper, Touch, Vma, Waiter};
use crate::world::World;
use tiermgr_core::effect::{Refusal, Reply};
use tiermgr_core::event::{Advice, Request};
use tiermgr_core::units::{CHUNK_BYTES, LeaseId, ProcId, RegionId, RequestId, Span};

impl Process {
    /// The message that thread `thread` waits for was read.
    pub(crate) fn message_was_read(&mut self, thread: usize) {
        let state = &mut self.threads[thread].state;
        match *state {
            State::ForkTold => *state = State::Told(None),
            State::UnmapTold(key) => *state = State::Told(key),
            _ => {}
        }
    }
}

impl World {
    /// One step of a thread that can go on. False where it chose to do nothing.
    pub(crate) fn thread_goes_on(&mut self, proc: usize, thread: usize) -> bool {
        match self.procs[proc].threads[thread].state {
            State::Ready if self.settling => self.look_at_next(proc, thread),
            State::Ready => self.choose(proc, thread),
            State::Touching(page, access) | State::Asleep(page, access) => {
                self.touch(proc, thread, page, access);
                true
            }
            State::Forking(_)
                if !self.settling && self.rng.chance(self.scenario.faults.forks_late) =>
            {
                true
            }
            State::Forking(child) => {
                let message = LayoutMessage::Fork(child);
                self.procs[proc].mm.messages.push((message, thread));
                self.procs[proc].threads[thread].state = State::ForkTold;
                true
            }
            State::Unmapping(span, key) => {
                let message = LayoutMessage::Unmap(span);
                self.procs[proc].mm.messages.push((message, thread));
                self.procs[proc].threads[thread].state = State::UnmapTold(key);
                true
            }
            State::Told(key) => {
                self.procs[proc].mm.changing -= 1;
                self.procs[proc].threads[thread].state = State::Ready;
                if let Some(key) = key {
                    self.region_is_gone(proc, key);
                }
                true
            }
            State::Calling(..) | State::ForkTold | State::UnmapTold(_) | State::Ended => false,
        }
    }

    /// The last look at everything: the first thread that is free reads all pages in order.
    fn look_at_next(&mut self, proc: usize, thread: usize) -> bool {
        let process = &mut self.procs[proc];
        while process.sweep < process.expect.len() {
            let page = process.sweep;
            process.sweep += 1;
            if process.may_touch(page) {
                process.threads[thread].state = State::Touching(page, Access::Read);
                return true;
            }
        }
        false
    }

    /// Wrong byte: the page a program reads must hold what it last wrote, in its own view.
    fn touch(&mut self, proc: usize, thread: usize, page: usize, access: Access) {
        let turn = self.turn;
        let at = self.procs[proc].addr(page);
        self.say(format_args!("thread {thread} of {proc}: {access:?} of page {page} ({at:?})"));
        match self.procs[proc].mm.touch(&mut self.frames, at, access) {
            Touch::Done(frame, generation) => {
                self.procs[proc].threads[thread].state = State::Ready;
                self.touched(proc, page, access, frame, generation);
            }
            Touch::Asleep { protected } => {
                let write = access.is_write();
                let who = Sleeper::Thread(thread);
                let process = &mut self.procs[proc];
                process.mm.waiters.push(Waiter { who, at, write, protected, read: false });
                let sleeper = &mut process.threads[thread];
                if !matches!(sleeper.state, State::Asleep(..)) {
                    sleeper.since = turn;
                }
                sleeper.state = State::Asleep(page, access);
            }
            Touch::Bus => {
                self.procs[proc].threads[thread].state = State::Ready;
                let expect = &mut self.procs[proc].expect[page];
                if expect.loss_ok || expect.undefined {
                    expect.lost = true;
                    self.counts.lost += 1;
                } else {
                    let what = format!(
                        "page {page} of process {proc} ({at:?}) raises SIGBUS and was not lost"
                    );
                    self.broken("wrong byte", what);
                }
            }
            Touch::Segv => {
                self.procs[proc].threads[thread].state = State::Ready;
                let what = format!("page {page} of process {proc} ({at:?}) raises SIGSEGV");
                self.broken("wrong byte", what);
            }
        }
    }

    fn touched(&mut self, proc: usize, page: usize, access: Access, frame: FrameId, found: u64) {
        let expect = &mut self.procs[proc].expect[page];
        match access {
            Access::Write(generation) => expect.write(generation),
            Access::Read | Access::PinRead | Access::PinWrite => {
                if expect.allows(found) {
                    expect.settle(found);
                } else {
                    let expect = *expect;
                    self.wrong_byte(proc, page, found, expect);
                }
            }
        }
        if matches!(access, Access::PinRead | Access::PinWrite) {
            self.procs[proc].expect[page].dma += 1;
            self.dmas.push(Dma { proc, page, frame, write: access == Access::PinWrite });
        }
    }

    fn wrong_byte(&mut self, proc: usize, page: usize, found: u64, expect: Expect) {
        let at = self.procs[proc].addr(page);
        let what = format!(
            "page {page} of process {proc} ({at:?}) holds generation {found}, must be {expect:?}"
        );
        self.broken("wrong byte", what);
    }

    /// A device ends: what it wrote must be what the program finds, and what it read what was there.
    pub(crate) fn finish_dma(&mut self, dma: Dma) {
        self.say(format_args!("{dma:?} ends"));
        let Dma { proc, page, frame, write } = dma;
        let at = self.procs[proc].addr(page);
        if !self.procs[proc].exited {
            let mapped = self.procs[proc].mm.page(at).and_then(|page| page.pte.frame());
            // Where pages are parked in their place nobody sees that a device reads one: it goes on with
            // the bytes that were there, as it would next to a program that writes.
            let left_unseen = mapped != Some(frame) && !write && !self.scenario.config.has_move;
            if mapped != Some(frame) && !left_unseen {
                self.broken(
                    "a pinned page stays",
                    format!("a device works on page {page} of process {proc} ({at:?}), which left"),
                );
            }
            self.procs[proc].expect[page].dma -= 1;
            if write {
                let generation = self.new_generation();
                self.frames.write(frame, generation);
                self.procs[proc].expect[page].write(generation);
            } else if !left_unseen {
                let found = self.frames.generation(frame);
                let expect = self.procs[proc].expect[page];
                if !expect.allows(found) {
                    self.wrong_byte(proc, page, found, expect);
                }
            }
        }
        self.frames.unpin(frame);
    }

    fn choose(&mut self, proc: usize, thread: usize) -> bool {
        let habits = self.scenario.habits;
        let asks = u32::from(self.procs[proc].may_ask());
        let room = u32::from(self.procs.len() < self.scenario.procs_max);
        let weights = [
            habits.read,
            habits.write,
            habits.dma,
            habits.add * asks,
            habits.drop_region * asks,
            habits.discard * asks,
            habits.pin * asks,
            habits.pin * asks,
            habits.prefetch * asks,
            habits.advise * asks,
            habits.residency * asks,
            habits.drain * asks,
            habits.fork * room,
            habits.raw_unmap,
            habits.nonsense * asks,
            habits.split,
        ];
        match self.rng.weighted(&weights) {
            0 => self.begin_touch(proc, thread, Access::Read),
            1 => {
                let generation = self.new_generation();
                self.begin_touch(proc, thread, Access::Write(generation))
            }
            2 => {
                let access = self.rng.pick(&[Access::PinRead, Access::PinWrite]);
                self.begin_touch(proc, thread, access)
            }
            3 => self.begin_add(proc, thread),
            4 => self.begin_drop(proc, thread),
            5 => self.begin_discard(proc, thread),
            6 => self.begin_pin(proc, thread),
            7 => self.begin_unpin(proc, thread),
            8 => self.begin_hint(proc, thread, None),
            9 => {
                let advice = self.rng.pick(&[
                    Advice::WillNeed,
                    Advice::Cold,
                    Advice::Sequential,
                    Advice::Random,
                    Advice::Cyclic,
                    Advice::ReadMostly,
                    Advice::Normal,
                ]);
                self.begin_hint(proc, thread, Some(advice))
            }
            10 => self.begin_residency(proc, thread),
            11 => {
                let idle = self.procs[proc]
                    .regions
                    .iter()
                    .all(|region| matches!(region.state, RegionState::Live | RegionState::Native));
                if idle {
                    self.ask(proc, thread, Request::Drain, Call::Drain);
                }
                idle
            }
            12 => self.begin_fork(proc, thread),
            13 => self.begin_raw_unmap(proc, thread),
            14 => self.begin_nonsense(proc, thread),
            _ => self.split(proc),
        }
    }

    fn some_region(&mut self, proc: usize, managed: bool) -> Option<OwnRegion> {
        let regions = &self.procs[proc].regions;
        let fits = |region: &OwnRegion| match region.state {
            RegionState::Live => region.id.is_some() || !managed,
            RegionState::Native => !managed,
            _ => false,
        };
        let count = regions.iter().filter(|region| fits(region)).count();
        if count == 0 {
            return None;
        }
        let nth = self.rng.index(count);
        self.procs[proc].regions.iter().filter(|region| fits(region)).nth(nth).copied()
    }

    /// Some pages of a region, none of them unmapped.
    fn some_pages(&mut self, proc: usize) -> Option<(usize, u64)> {
        let region = self.some_region(proc, true)?;
        let first = self.rng.below(region.pages);
        let rest = region.pages - first;
        let longest = if self.rng.chance(500) { rest.min(20) } else { rest };
        let pages = self.rng.range(1, longest);
        let first = region.first + crate::ix(first);
        let range = first..first + crate::ix(pages);
        self.procs[proc].mm.arena()[range]
            .iter()
            .all(|page| matches!(page.vma, Vma::Managed { .. }))
            .then_some((first, pages))
    }

    fn begin_touch(&mut self, proc: usize, thread: usize, access: Access) -> bool {
        let cursor = self.procs[proc].threads[thread].cursor;
        let page = if self.rng.chance(self.scenario.sequential) && cursor > 0 {
            cursor + 1
        } else {
            let Some(region) = self.some_region(proc, false) else { return false };
            let window = region.pages.min(self.scenario.window_pages);
            // Most touches fall into a window that the clock moves along.
            let drift = if self.rng.chance(900) { self.turn / 64 } else { self.rng.word() >> 32 };
            region.first + crate::ix((drift + self.rng.below(window)) % region.pages)
        };
        let process = &mut self.procs[proc];
        process.threads[thread].cursor = page;
        if !process.may_touch(page) {
            process.threads[thread].cursor = 0;
            return false;
        }
        if matches!(access, Access::PinRead | Access::PinWrite) && process.expect[page].discarding {
            return false;
        }
        process.threads[thread].state = State::Touching(page, access);
        true
    }

    fn begin_add(&mut self, proc: usize, thread: usize) -> bool {
        let layout = self.scenario.layout;
        let chunks = self.rng.range(1, self.scenario.region_chunks_max);
        if chunks > layout.arena_chunks {
            return false;
        }
        let chunk = self.rng.below(layout.arena_chunks - chunks + 1);
        let first = crate::ix(chunk * layout.chunk_pages());
        let pages = chunks * layout.chunk_pages();
        let range = first..first + crate::ix(pages);
        let process = &mut self.procs[proc];
        let used = process.mm.arena()[range.clone()]
            .iter()
            .any(|page| matches!(page.vma, Vma::Managed { .. }));
        let owned = process.regions.iter().any(|region| {
            region.first < range.end && range.start < region.first + crate::ix(region.pages)
        });
        if used || owned {
            return false;
        }
        // A mapping that is none of ours goes first: nobody is told of that.
        process.mm.unmap(&mut self.frames, first, pages);
        process.expect[range].fill(Expect::default());
        process.mm.map(first, pages, Vma::Managed { armed: false });
        let key = process.new_key();
        let state = RegionState::Adding;
        process.regions.push(OwnRegion { key, id: None, first, pages, state });
        let span = layout.arena_span(first, pages);
        debug_assert!(span.len.is_multiple_of(CHUNK_BYTES));
        self.ask(proc, thread, Request::AddRegion { span }, Call::Add(key));
        true
    }

    fn begin_drop(&mut self, proc: usize, thread: usize) -> bool {
        let Some(region) = self.some_region(proc, true) else { return false };
        let Some(id) = region.id else { return false };
        if !self.procs[proc].is_quiet(region.first, region.pages) {
            return false;
        }
        if let Some(region) = self.procs[proc].region_mut(region.key) {
            region.state = RegionState::Leaving;
        }
        // Its bytes are given up with the request: disarmed, it reads as zeros.
        let end = region.first + crate::ix(region.pages);
        for page in &mut self.procs[proc].expect[region.first..end] {
            page.undefined = true;
        }
        self.ask(proc, thread, Request::DropRegion { region: id }, Call::Drop(region.key));
        true
    }

    fn begin_discard(&mut self, proc: usize, thread: usize) -> bool {
        let Some((first, pages)) = self.some_pages(proc) else { return false };
        let range = first..first + crate::ix(pages);
        let taken = self.procs[proc].expect[range.clone()]
            .iter()
            .any(|page| page.discarding || page.dma > 0 || page.leases > 0);
        let pinning = self.procs[proc].threads.iter().any(|thread| match thread.state {
            State::Touching(page, access) | State::Asleep(page, access) => {
                range.contains(&page) && matches!(access, Access::PinRead | Access::PinWrite)
            }
            State::Calling(_, Call::Pin(at, len)) => {
                at < range.end && range.start < at + crate::ix(len)
            }
            _ => false,
        });
        if taken || pinning {
            return false;
        }
        for page in &mut self.procs[proc].expect[range] {
            page.discarding = true;
            page.written = false;
        }
        let span = self.scenario.layout.arena_span(first, pages);
        self.ask(proc, thread, Request::Discard { span }, Call::Discard(first, pages));
        true
    }

    fn begin_pin(&mut self, proc: usize, thread: usize) -> bool {
        let Some((first, pages)) = self.some_pages(proc) else { return false };
        let range = first..first + crate::ix(pages);
        if self.procs[proc].expect[range].iter().any(|page| page.discarding || page.lost) {
            return false;
        }
        let span = self.scenario.layout.arena_span(first, pages);
        self.ask(proc, thread, Request::Pin { span }, Call::Pin(first, pages));
        true
    }

    fn begin_unpin(&mut self, proc: usize, thread: usize) -> bool {
        let held = self.procs[proc].leases.len();
        if held == 0 {
            return false;
        }
        let index = self.rng.index(held);
        let lease = self.forget_lease(proc, index);
        self.ask(proc, thread, Request::Unpin { lease }, Call::Unpin);
        true
    }

    pub(crate) fn forget_lease(&mut self, proc: usize, index: usize) -> LeaseId {
        let Held { lease, first, pages } = self.procs[proc].leases.swap_remove(index);
        for page in &mut self.procs[proc].expect[first..first + crate::ix(pages)] {
            page.leases -= 1;
        }
        lease
    }

    fn begin_hint(&mut self, proc: usize, thread: usize, advice: Option<Advice>) -> bool {
        let Some((first, pages)) = self.some_pages(proc) else { return false };
        let span = self.scenario.layout.arena_span(first, pages);
        let what = match advice {
            Some(advice) => Request::Advise { span, advice },
            None => Request::Prefetch { span },
        };
        self.ask(proc, thread, what, Call::Hint);
        true
    }

    fn begin_residency(&mut self, proc: usize, thread: usize) -> bool {
        let Some((first, pages)) = self.some_pages(proc) else { return false };
        let span = self.scenario.layout.arena_span(first, pages);
        self.ask(proc, thread, Request::Residency { span }, Call::Residency(span.len));
        true
    }

    fn begin_nonsense(&mut self, proc: usize, thread: usize) -> bool {
        let outside = Span::new(tiermgr_core::units::Addr(0x7000_0000_0000), CHUNK_BYTES);
        let wraps = Span::new(tiermgr_core::units::Addr(u64::MAX - 4095), u64::MAX - 4095);
        let empty = self.scenario.layout.arena_span(0, 0);
        let span = self.rng.pick(&[outside, wraps, empty]);
        let what = match self.rng.below(7) {
            0 => Request::DropRegion { region: RegionId(u32::MAX) },
            1 => Request::Discard { span },
            2 => Request::Pin { span },
            3 => Request::Prefetch { span },
            4 => Request::Unpin { lease: LeaseId(u64::MAX) },
            5 => Request::AddRegion { span: self.rng.pick(&[wraps, empty]) },
            _ => Request::Advise { span, advice: Advice::Cold },
        };
        self.ask(proc, thread, what, Call::Nonsense);
        true
    }

    fn begin_fork(&mut self, proc: usize, thread: usize) -> bool {
        if self.procs[proc].released {
            return false;
        }
        let child = crate::n32(self.procs.len());
        let mm = self.procs[proc].mm.fork(&mut self.frames);
        let threads = crate::ix(self.rng.range(1, 2));
        let mut born = self.procs[proc].forked(ProcId(child), mm, threads);
        born.raw = self.rng.chance(self.scenario.raw_children);
        self.procs.push(born);
        self.counts.forks += 1;
        let parent = &mut self.procs[proc];
        parent.mm.changing += 1;
        parent.threads[thread].state = State::Forking(child);
        self.say(format_args!("process {proc} forks {child}"));
        true
    }

    fn split(&mut self, proc: usize) -> bool {
        let Some((first, pages)) = self.some_pages(proc) else { return false };
        let apart = self.rng.chance(800);
        self.procs[proc].mm.split(first, pages, apart);
        true
    }

    fn begin_raw_unmap(&mut self, proc: usize, thread: usize) -> bool {
        let Some((first, pages)) = self.some_pages(proc) else { return false };
        if !self.procs[proc].is_quiet(first, pages) {
            return false;
        }
        self.say(format_args!("process {proc} unmaps {pages} pages from {first} without a word"));
        self.unmap(proc, thread, first, pages, None);
        true
    }

    /// `munmap` by a thread, which waits for its message to be read where there is one.
    fn unmap(&mut self, proc: usize, thread: usize, first: usize, pages: u64, key: Option<u32>) {
        let process = &mut self.procs[proc];
        let told = process.mm.unmap(&mut self.frames, first, pages);
        process.expect[first..first + crate::ix(pages)].fill(Expect::default());
        if told && !process.released {
            process.mm.changing += 1;
            let span = process.mm.layout.arena_span(first, pages);
            process.threads[thread].state = State::Unmapping(span, key);
        } else {
            process.threads[thread].state = State::Ready;
            if let Some(key) = key {
                self.region_is_gone(proc, key);
            }
        }
    }

    /// The range of a region is free again; sometimes another mapping takes it.
    fn region_is_gone(&mut self, proc: usize, key: u32) {
        let process = &mut self.procs[proc];
        let Some(at) = process.regions.iter().position(|region| region.key == key) else { return };
        let region = process.regions.swap_remove(at);
        if !self.rng.chance(500) {
            return;
        }
        self.say(format_args!("process {proc} maps something else at page {}", region.first));
        self.procs[proc].mm.map(region.first, region.pages, Vma::Foreign);
        for page in (region.first..).take(crate::ix(region.pages)) {
            if self.rng.chance(300) {
                let generation = self.new_generation();
                let at = self.procs[proc].addr(page);
                let frame = self.frames.alloc(generation);
                self.procs[proc].expect[page].value = generation;
                if let Some(page) = self.procs[proc].mm.page_mut(at) {
                    page.pte = Pte::Present { frame, wp: false, exclusive: true };
                }
            }
        }
    }

    /// Reply exactly once: a second answer would be taken for the answer to something else.
    pub(crate) fn on_reply(&mut self, request: RequestId, reply: Reply) {
        let Some((proc, thread)) = self.requests.remove(&request) else {
            self.broken("one reply for each request", format!("{request:?} has no reply to get"));
            return;
        };
        self.counts.replies += 1;
        if self.procs[proc].exited {
            return;
        }
        let State::Calling(waiting, call) = self.procs[proc].threads[thread].state else { return };
        debug_assert_eq!(waiting, request);
        self.procs[proc].threads[thread].state = State::Ready;
        match (call, reply) {
            (Call::Add(key), Reply::Region(id)) => {
                if let Some(region) = self.procs[proc].region_mut(key) {
                    region.state = RegionState::Live;
                    region.id = Some(id);
                }
            }
            (Call::Add(key), Reply::Refused(_)) => {
                if let Some(region) = self.procs[proc].region_mut(key) {
                    region.state = RegionState::Native;
                }
            }
            (Call::Drop(key), Reply::Done) => {
                let region = self.procs[proc].region_mut(key).copied();
                if let Some(region) = region {
                    self.unmap(proc, thread, region.first, region.pages, Some(key));
                }
            }
            (Call::Discard(first, pages), Reply::Done) => {
                let end = first + crate::ix(pages);
                self.procs[proc].expect[first..end].iter_mut().for_each(Expect::discarded);
            }
            (Call::Pin(first, pages), Reply::Lease(lease)) => {
                self.procs[proc].leases.push(Held { lease, first, pages });
                for page in &mut self.procs[proc].expect[first..first + crate::ix(pages)] {
                    page.leases += 1;
                }
            }
            (Call::Drain, Reply::Done) => self.is_drained(proc),
            (Call::Residency(len), Reply::Residency(r)) => {
                let sum = r.resident_bytes
                    + r.parked_bytes
                    + r.absent_bytes
                    + r.unarmed_bytes
                    + r.poisoned_bytes;
                if sum != len {
                    self.broken("answers add up", format!("{r:?} of {len} bytes"));
                }
            }
            (Call::Pin(..) | Call::Drain | Call::Nonsense, Reply::Refused(_))
            | (Call::Unpin | Call::Hint, Reply::Done) => {}
            // Without its helper nobody can zap for the client; it does so itself.
            (Call::Discard(..), Reply::Refused(Refusal::NotAttached))
                if !self.procs[proc].helper.alive =>
            {
                self.is_refused(proc, call);
            }
            (call, reply) => {
                // While a drain is under way by another thread, anything may be refused.
                let draining = self.procs[proc].drained
                    || self.procs[proc].perhaps_drained
                    || self.procs[proc]
                        .threads
                        .iter()
                        .any(|thread| matches!(thread.state, State::Calling(_, Call::Drain)));
                if !(draining && matches!(reply, Reply::Refused(_))) {
                    self.broken("answers fit", format!("{reply:?} to {call:?} of process {proc}"));
                }
                self.is_refused(proc, call);
            }
        }
    }

    /// A call that was refused changed nothing.
    fn is_refused(&mut self, proc: usize, call: Call) {
        match call {
            Call::Drop(key) => {
                if let Some(region) = self.procs[proc].region_mut(key) {
                    region.state = RegionState::Native;
                }
            }
            Call::Discard(first, pages) => {
                for page in &mut self.procs[proc].expect[first..first + crate::ix(pages)] {
                    page.maybe_zero |= page.discarding;
                    page.discarding = false;
                }
            }
            _ => {}
        }
    }

    fn is_drained(&mut self, proc: usize) {
        while !self.procs[proc].leases.is_empty() {
            self.forget_lease(proc, 0);
        }
        let process = &mut self.procs[proc];
        process.drained = true;
        for region in &mut process.regions {
            if region.state == RegionState::Live {
                region.state = RegionState::Native;
                region.id = None;
            }
        }
    }
}

impl Process {
    /// Whether a thread may touch this page of the arena: it is in a region that is in use.
    pub(crate) fn may_touch(&self, page: usize) -> bool {
        let Some(entry) = self.mm.arena().get(page) else { return false };
        matches!(entry.vma, Vma::Managed { .. })
            && !self.expect[page].lost
            && !self.expect[page].undefined
            && self.regions.iter().any(|region| {
                matches!(region.state, RegionState::Live | RegionState::Native)
                    && region.first <= page
                    && page < region.first + crate::ix(region.pages)
            })
    }
}
