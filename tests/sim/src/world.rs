//! The world: everything the daemon does not know, and the choice of who goes next.

use crate::client::{Call, Dma, Process, State};
use crate::helper::Helper;
use crate::kernel::{Frames, LayoutMessage, Mm, Waiter};
use crate::records::SimRecords;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::store::{Fate, Store};
use crate::trace::Trace;
use std::collections::{BTreeMap, BTreeSet};
use tiermgr_core::event::Event;
use tiermgr_core::units::{OpId, ProcId, RequestId, Span, Tick};

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which checker saw it.
    pub checker: &'static str,
    /// What it saw.
    pub what: String,
}

/// How much happened: a run in which nothing happens proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Faults that slept.
    pub faults: u64,
    /// Pages that moved to limbo or were dropped there.
    pub commands: u64,
    /// Extents written to the store.
    pub written: u64,
    /// Extents read from it.
    pub read: u64,
    /// Forks.
    pub forks: u64,
    /// Kills of the daemon.
    pub kills: u64,
    /// Requests.
    pub requests: u64,
    /// Replies to them.
    pub replies: u64,
    /// Faults of the plan that happened.
    pub injected: u64,
    /// Pages reported as lost.
    pub lost: u64,
    /// Faults that the watchdog named.
    pub overdue: u64,
}

/// Everything.
#[derive(Debug)]
pub struct World {
    /// What the seed decided.
    pub scenario: Scenario,
    /// The source of chance.
    pub rng: Rng,
    /// The time.
    pub now: Tick,
    /// The turn.
    pub turn: u64,
    /// Physical memory.
    pub frames: Frames,
    /// All processes that ever were; a `ProcId` is an index.
    pub procs: Vec<Process>,
    /// The store and the buffers.
    pub store: Store,
    /// The durable records.
    pub records: SimRecords,
    /// Devices at work.
    pub dmas: Vec<Dma>,
    /// What happened.
    pub trace: Trace,
    /// How much happened.
    pub counts: Counts,
    /// Faults are over and nobody begins anything.
    pub settling: bool,
    /// Each write to the store fails from now on.
    pub store_is_dead: bool,
    /// The daemon is dead: effects go nowhere. Set to the effects that are still carried out.
    pub doomed: Option<u64>,
    /// The turn in which a daemon last began.
    pub daemon_since: u64,
    /// The turn in which the message of a fork was last read.
    pub forked_at: Option<u64>,
    /// DRAM of the family now.
    pub budget_bytes: u64,
    /// What it would be with an empty memory cgroup.
    pub(crate) share_bytes: u64,
    /// The most that its memory cgroup has room for.
    pub(crate) cap_bytes: u64,
    pub(crate) outbox: Vec<Event>,
    pub(crate) ops: BTreeSet<OpId>,
    pub(crate) requests: BTreeMap<RequestId, (usize, usize)>,
    pub(crate) poisons: Vec<(ProcId, Span)>,
    pub(crate) wants_slots: bool,
    pub(crate) wants_stream: bool,
    pub(crate) wants_room: u64,
    pub(crate) last_messages: Vec<Event>,
    generations: u64,
    last_request: u64,
    /// Things that could have failed so far, and which of them does.
    fallible: u64,
    fail_nth: Option<u64>,
    violation: Option<Violation>,
}

const ACTORS: usize = 6;

/// Instants count from the start of the machine, which may be long ago. Drawn from a copy of the generator:
/// what else a seed does must not depend on it.
fn first_instant(mut rng: Rng) -> Tick {
    const WRAP_MS: u64 = 1 << 32;
    let ms = rng.pick(&[1, WRAP_MS / 2 - 200, WRAP_MS - 200, 17 * WRAP_MS / 4]);
    Tick(ms * 1_000_000)
}

impl World {
    /// The world of `scenario`, with one client that the daemon is about to hear of.
    #[must_use]
    pub fn new(scenario: Scenario, rng: Rng, trace: Trace) -> Self {
        let mm = Mm::new(scenario.layout, scenario.wp_unpopulated);
        let mut client = Process::new(ProcId(0), mm, scenario.threads);
        client.known = true;
        client.born = true;
        let store = Store::new(scenario.layout.page_bytes, scenario.segments, scenario.streams);
        let now = first_instant(rng.clone());
        Self {
            scenario,
            rng,
            now,
            turn: 0,
            frames: Frames::default(),
            procs: vec![client],
            store,
            records: SimRecords::default(),
            dmas: Vec::new(),
            trace,
            counts: Counts::default(),
            settling: false,
            store_is_dead: false,
            doomed: None,
            daemon_since: 0,
            forked_at: None,
            budget_bytes: scenario.config.budget_bytes,
            share_bytes: scenario.config.budget_bytes,
            cap_bytes: u64::MAX,
            outbox: Vec::new(),
            ops: BTreeSet::new(),
            requests: BTreeMap::new(),
            poisons: Vec::new(),
            wants_slots: false,
            wants_stream: false,
            wants_room: 0,
            last_messages: Vec::new(),
            generations: 0,
            last_request: 0,
            fallible: 0,
            fail_nth: None,
            violation: None,
        }
    }

    /// Lets the `nth` thing that can fail (counted from 0) fail, and nothing else by this means.
    pub const fn fail_nth(&mut self, nth: u64) {
        self.fail_nth = Some(nth);
    }

    /// Whether the failure that [`Self::fail_nth`] asked for has come.
    #[must_use]
    pub fn failure_was_reached(&self) -> bool {
        self.fail_nth.is_some_and(|nth| self.fallible > nth)
    }

    /// Whether something goes wrong here and now.
    pub(crate) fn goes_wrong(&mut self, per_mille: u32) -> bool {
        let nth = self.fallible;
        self.fallible += 1;
        let fails = self.fail_nth == Some(nth) || (!self.settling && self.rng.chance(per_mille));
        if fails {
            self.counts.injected += 1;
        }
        fails
    }

    /// Notes a broken promise. The first one counts.
    pub fn broken(&mut self, checker: &'static str, what: String) {
        self.trace.say(self.turn, self.now.0, format_args!("BROKEN {checker}: {what}"));
        self.violation.get_or_insert(Violation { checker, what });
    }

    /// The first promise that was broken.
    #[must_use]
    pub const fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// A line for the trace only.
    pub(crate) fn say(&self, what: std::fmt::Arguments<'_>) {
        self.trace.say(self.turn, self.now.0, what);
    }

    /// A generation that was never written before.
    pub(crate) const fn new_generation(&mut self) -> u64 {
        self.generations += 1;
        self.generations
    }

    /// A request number that was never used before.
    pub(crate) const fn new_request(&mut self) -> RequestId {
        self.last_request += 1;
        RequestId(self.last_request)
    }

    /// An event for the daemon.
    pub(crate) fn tell(&mut self, event: Event) {
        self.outbox.push(event);
    }

    /// The process of this number.
    pub(crate) fn proc_index(&self, proc: ProcId) -> Option<usize> {
        let index = crate::ix(u64::from(proc.0));
        (index < self.procs.len()).then_some(index)
    }

    /// Time moves, and some of what can happen happens. With nothing to do, time moves to `deadline`.
    pub fn advance(&mut self, deadline: Tick) {
        self.turn += 1;
        let step = self.rng.range(1, self.scenario.tick_ns_max);
        self.now = self.now.after_ns(step);
        let mut acted = false;
        for _ in 0..self.rng.range(1, self.scenario.actions_max) {
            acted |= self.act();
        }
        let is_still = !acted && self.outbox.is_empty() && !self.has_messages();
        if deadline != Tick::NEVER && (is_still || self.rng.chance(20)) {
            self.now = self.now.max(deadline);
        }
    }

    fn has_messages(&self) -> bool {
        self.procs.iter().filter(|proc| proc.known && !proc.released).any(|proc| {
            !proc.mm.messages.is_empty() || proc.mm.waiters.iter().any(|waiter| !waiter.read)
        })
    }

    /// One actor that can go on does. False where none was found.
    pub fn act(&mut self) -> bool {
        let weights = self.scenario.actors;
        let first = self.rng.weighted(&weights);
        // The one drawn may have nothing to do: then the next, so that the world only stands still
        // where nobody can go on.
        (0..ACTORS).any(|step| {
            let actor = (first + step) % ACTORS;
            (step == 0 || weights[actor] > 0) && self.act_as(actor)
        })
    }

    fn act_as(&mut self, actor: usize) -> bool {
        match actor {
            0 => self.some_thread(),
            1 => self.some_helper(),
            2 => self.some_io(),
            3 => self.some_dma(),
            4 => self.some_notice(),
            _ => self.some_operator(),
        }
    }

    fn some_thread(&mut self) -> bool {
        let procs = self.procs.len();
        let first = self.rng.index(procs);
        for step in 0..procs {
            let proc = (first + step) % procs;
            let threads = self.procs[proc].threads.len();
            let start = self.rng.index(threads.max(1));
            for thread in (0..threads).map(|step| (start + step) % threads) {
                if self.procs[proc].can_go_on(thread) && self.thread_goes_on(proc, thread) {
                    return true;
                }
            }
        }
        false
    }

    fn some_helper(&mut self) -> bool {
        let procs = self.procs.len();
        let first = self.rng.index(procs);
        for proc in (0..procs).map(|step| (first + step) % procs) {
            let rng = &mut self.rng;
            let process = &mut self.procs[proc];
            if process.helper.has_result() && (self.settling || rng.chance(500)) {
                if let Some(result) = process.helper.take_result() {
                    self.tell(result);
                }
                return true;
            }
            if process.helper.alive {
                let stalls = self.scenario.faults.helper_stalls;
                if !self.settling && rng.chance(stalls) {
                    process.helper.stalled = !process.helper.stalled;
                }
                if self.settling {
                    process.helper.stalled = false;
                }
                if !self.settling && rng.chance(self.scenario.faults.helper_dies) {
                    self.say(format_args!("helper of {proc} dies"));
                    self.helper_dies(proc);
                    return true;
                }
            }
            if self.procs[proc].helper.is_enabled(&self.procs[proc].mm) {
                let stop = self.goes_wrong(self.scenario.faults.move_stops);
                let pages = if self.rng.chance(500) { u64::MAX } else { self.rng.range(1, 40) };
                let process = &mut self.procs[proc];
                process.helper.work(&mut process.mm, &mut self.frames, pages, stop);
                self.counts.commands += 1;
                return true;
            }
        }
        false
    }

    /// The helper of a process dies. If the program has ended too, so does the address space.
    pub(crate) fn helper_dies(&mut self, proc: usize) {
        let process = &mut self.procs[proc];
        process.helper.die(&mut process.mm);
        if process.exited {
            self.end_space(proc);
        }
    }

    fn some_io(&mut self) -> bool {
        if self.store.pending.is_empty() {
            return false;
        }
        let index = self.rng.index(self.store.pending.len());
        let io = self.store.pending[index];
        let faults = self.scenario.faults;
        let fate = if io.write {
            let fails = self.goes_wrong(faults.write_fails) || self.store_is_dead;
            if fails { Fate::Fails } else { Fate::Well }
        } else if self.goes_wrong(faults.read_fails) {
            Fate::Fails
        } else if self.goes_wrong(faults.read_damaged) {
            Fate::Damages
        } else {
            Fate::Well
        };
        if io.write {
            self.counts.written += u64::from(io.count);
        } else {
            self.counts.read += u64::from(io.count);
        }
        if fate != Fate::Well {
            self.say(format_args!("device: {io:?} {fate:?}"));
        }
        let event = self.store.finish(index, fate, &mut self.rng);
        self.tell(event);
        true
    }

    fn some_dma(&mut self) -> bool {
        if self.dmas.is_empty() {
            return false;
        }
        let index = self.rng.index(self.dmas.len());
        let dma = self.dmas.swap_remove(index);
        self.finish_dma(dma);
        true
    }

    /// News of processes: a child said hello, a process has ended.
    fn some_notice(&mut self) -> bool {
        let procs = self.procs.len();
        let first = self.rng.index(procs);
        for proc in (0..procs).map(|step| (first + step) % procs) {
            let process = &mut self.procs[proc];
            if !process.known {
                continue;
            }
            let id = process.id;
            if process.exited && !process.gone_told {
                process.gone_told = true;
                self.tell(Event::ProcGone { proc: id });
                return true;
            }
            if !process.exited && !process.ready && !process.raw {
                process.ready = true;
                process.mm.make_limbo();
                process.helper = Helper::running();
                let limbo = process.mm.layout.limbo_span();
                self.tell(Event::ProcReady { proc: id, limbo });
                return true;
            }
            let process = &self.procs[proc];
            if process.waits_for_lost && process.ready && !process.exited {
                let stuck = process.helper.outstanding() > 0;
                self.exit(proc);
                if stuck {
                    // It may sleep on the lost bytes as well.
                    self.helper_dies(proc);
                }
                return true;
            }
            if !self.settling
                && !self.procs[proc].exited
                && self.rng.chance(self.scenario.habits.exit)
            {
                self.exit(proc);
                return true;
            }
        }
        false
    }

    pub(crate) fn lend_stream(&mut self) -> bool {
        let lent = self.store.lend_stream();
        self.wants_stream = lent.is_none();
        lent.is_some_and(|event| {
            self.tell(event);
            true
        })
    }

    /// Grants of slots, buffers and room, and operators who change their minds.
    fn some_operator(&mut self) -> bool {
        if self.wants_slots {
            self.wants_slots = false;
            if let Some(grant) = self.store.grant() {
                self.tell(grant);
                return true;
            }
        }
        if self.wants_stream && self.lend_stream() {
            return true;
        }
        if self.rng.chance(self.scenario.streams_late / 10) {
            let short = self.rng.chance(500);
            self.tell(Event::StreamsShort { short });
            return true;
        }
        if self.wants_room > 0 {
            self.wants_room = 0;
            let bytes = self.scenario.config.budget_bytes;
            if self.share_bytes < bytes && self.rng.chance(500) {
                self.tell_budget(bytes);
                return true;
            }
        }
        if self.look_at_group() {
            return true;
        }
        if self.settling {
            return false;
        }
        if self.rng.chance(self.scenario.faults.store_dies) && !self.store_is_dead {
            self.say(format_args!("the store writes no more"));
            self.store_is_dead = true;
        }
        if self.rng.chance(self.scenario.budget_moves) {
            let (low, high) = (self.scenario.budget_min_bytes, self.scenario.config.budget_bytes);
            let bytes = self.rng.range(low.min(high) >> 16, high >> 16) << 16;
            self.tell_budget(bytes);
            return true;
        }
        if self.goes_wrong(self.scenario.faults.ruin)
            && self.scenario.faults.ruin > 0
            && let Some(held) = self.store.ruin(&mut self.rng)
        {
            self.say(format_args!("a page of the store with generation {held} went bad"));
            self.excuse_loss(&BTreeSet::from([held]));
        }
        false
    }

    /// From now on pages that must hold one of these generations may be reported as lost.
    fn excuse_loss(&mut self, generations: &BTreeSet<u64>) {
        for page in self.procs.iter_mut().flat_map(|process| &mut process.expect) {
            if page.value != 0 && generations.contains(&page.value) {
                page.loss_ok = true;
            }
        }
    }

    /// What a process has in limbo, or has lost, may be lost to its children that have no table yet:
    /// there is no way to them where the store writes no more, or the address space ends.
    fn excuse_heirs(&mut self, parent: usize) {
        let process = &self.procs[parent];
        let in_limbo = process.mm.limbo().iter().filter_map(|page| page.pte.frame());
        let mut lost: BTreeSet<u64> = in_limbo.map(|frame| self.frames.generation(frame)).collect();
        lost.extend(process.expect.iter().filter(|page| page.loss_ok).map(|page| page.value));
        let id = process.id;
        let heirs = |child: &&mut Process| child.parent == Some(id) && !child.born;
        for child in self.procs.iter_mut().filter(heirs) {
            for (expect, page) in child.expect.iter_mut().zip(child.mm.arena()) {
                // One that was given up, perhaps, holds zeros there as well as what it held.
                let is_lost = lost.iter().any(|&generation| expect.allows(generation));
                expect.loss_ok |= page.pte.frame().is_none() && is_lost;
            }
        }
    }

    /// The program of a process ends.
    pub fn exit(&mut self, proc: usize) {
        self.say(format_args!("process {proc} exits"));
        let process = &mut self.procs[proc];
        process.exited = true;
        let mut unborn = Vec::new();
        for thread in &mut process.threads {
            if let State::Forking(child) = thread.state {
                unborn.push(child);
            }
            process.perhaps_drained |= matches!(thread.state, State::Calling(_, Call::Drain));
            thread.state = State::Ended;
        }
        process.mm.waiters.retain(|waiter| waiter.who == crate::kernel::Sleeper::Helper);
        let messages = std::mem::take(&mut process.mm.messages);
        process.mm.changing = 0;
        let has_helper = process.helper.alive;
        for (message, _) in messages {
            // A fork whose message nobody has read fails with its parent.
            if let LayoutMessage::Fork(child) = message {
                unborn.push(child);
            }
        }
        for child in unborn {
            self.abort_child(child);
        }
        if !has_helper {
            self.end_space(proc);
        }
    }

    /// A child whose fork did not succeed: it never was.
    pub(crate) fn abort_child(&mut self, child: u32) {
        let child = &mut self.procs[crate::ix(u64::from(child))];
        child.exited = true;
        child.gone_told = true;
        child.mm.destroy(&mut self.frames);
    }

    /// The last task that uses an address space ends. What only its limbo held is lost to its
    /// children.
    pub(crate) fn end_space(&mut self, proc: usize) {
        if self.procs[proc].mm.is_gone() {
            return;
        }
        self.excuse_heirs(proc);
        let in_limbo: BTreeSet<u64> = self.procs[proc]
            .mm
            .limbo()
            .iter()
            .filter_map(|page| page.pte.frame())
            .map(|frame| self.frames.generation(frame))
            .collect();
        self.procs[proc].mm.destroy(&mut self.frames);
        self.excuse_loss(&in_limbo);
    }

    /// Faults are over: nothing goes wrong any more, nobody begins anything, and there is room.
    pub fn stop_faults(&mut self) {
        self.settling = true;
        self.store.make_plentiful();
        self.wants_slots = true;
        self.scenario.actors = [60, 30, 30, 20, 10, 10];
        self.scenario.actions_max = 24;
        if self.share_bytes < self.scenario.config.budget_bytes {
            self.tell_budget(self.scenario.config.budget_bytes);
        }
    }

    /// Why the world is not at rest, or `None` where it is.
    #[must_use]
    pub fn unrest(&self) -> Option<String> {
        if let Some(event) = self.outbox.first() {
            return Some(format!("{event:?} is not delivered"));
        }
        if let Some(io) = self.store.pending.first() {
            return Some(format!("{io:?} is under way"));
        }
        if let Some(dma) = self.dmas.first() {
            return Some(format!("{dma:?} is under way"));
        }
        let unanswered = || self.ops.first().map(|op| format!("{op:?} is not answered"));
        self.unrest_of_programs().or_else(unanswered)
    }

    /// The same of the programs and their helpers alone.
    pub(crate) fn unrest_of_programs(&self) -> Option<String> {
        for (number, process) in self.procs.iter().enumerate() {
            if process.helper.outstanding() > 0 {
                return Some(format!("the helper of process {number} has work"));
            }
            if process.known && process.exited && !process.gone_told {
                return Some(format!("the end of process {number} is not told"));
            }
            if process.runs() && process.waits_for_lost {
                if process.raw {
                    // A thread of it waits for ever, which shows no wrong byte.
                    continue;
                }
                return Some(format!("process {number} lost bytes and has not been ended"));
            }
            for (index, thread) in process.threads.iter().enumerate() {
                let rests = matches!(thread.state, State::Ready | State::Ended);
                if process.runs() && !rests {
                    let (state, since) = (thread.state, thread.since);
                    return Some(format!(
                        "thread {index} of process {number} is {state:?} since turn {since}"
                    ));
                }
            }
            if process.runs() && process.sweep < process.expect.len() {
                return Some(format!("process {number} has not looked at everything"));
            }
        }
        None
    }

    /// Grows with everything that is finished on the way to rest, and with nothing else.
    #[must_use]
    pub fn steps_to_rest(&self) -> u64 {
        let looked: usize = self.procs.iter().map(|process| process.sweep).sum();
        let exited = self.procs.iter().filter(|process| process.exited).count();
        self.counts.replies + (looked + exited) as u64
    }

    /// Reads the messages of all descriptors: forks, then unmaps, then faults.
    pub(crate) fn read_messages(&mut self, events: &mut Vec<Event>) {
        for proc in 0..self.procs.len() {
            if !self.procs[proc].known || self.procs[proc].released {
                continue;
            }
            if !self.settling && self.rng.chance(self.scenario.faults.messages_late) {
                continue;
            }
            let parent = self.procs[proc].id;
            let mut forked = false;
            let mut messages = std::mem::take(&mut self.procs[proc].mm.messages);
            messages.sort_by_key(|(message, _)| matches!(message, LayoutMessage::Unmap(_)));
            for (message, thread) in messages {
                match message {
                    LayoutMessage::Fork(child) => {
                        self.procs[crate::ix(u64::from(child))].known = true;
                        self.forked_at = Some(self.turn);
                        forked = true;
                        events.push(Event::Forked { parent, child: ProcId(child) });
                    }
                    LayoutMessage::Unmap(span) => {
                        events.push(Event::Unmapped { proc: parent, span });
                    }
                }
                self.procs[proc].message_was_read(thread);
            }
            let ends = self.scenario.faults.ends_after_fork;
            let known = self.procs[proc].ready && !self.procs[proc].exited;
            if forked && known && !self.settling && self.rng.chance(ends) {
                self.exit(proc);
                self.helper_dies(proc);
            }
            for waiter in self.procs[proc].mm.waiters.iter_mut().filter(|waiter| !waiter.read) {
                let Waiter { at, write, protected, .. } = *waiter;
                waiter.read = true;
                self.counts.faults += 1;
                events.push(Event::Faulted { proc: parent, at, write, protected });
            }
        }
        if self.store_is_dead {
            (0..self.procs.len()).for_each(|parent| self.excuse_heirs(parent));
        }
    }

    /// A request of thread `thread` goes to the daemon.
    pub(crate) fn ask(
        &mut self,
        proc: usize,
        thread: usize,
        what: tiermgr_core::event::Request,
        call: Call,
    ) {
        let request = self.new_request();
        self.counts.requests += 1;
        self.requests.insert(request, (proc, thread));
        let id = self.procs[proc].id;
        let turn = self.turn;
        let thread = &mut self.procs[proc].threads[thread];
        thread.state = State::Calling(request, call);
        thread.since = turn;
        self.tell(Event::Asked { request, proc: id, what });
    }
}
