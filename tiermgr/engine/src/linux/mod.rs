//! The real world: one family on one thread.
//!
//! **Units.** Addresses are the client's, sizes bytes, times monotonic nanoseconds.
//! **Problem.** A faulting thread waits while we look elsewhere; a sleep costs a wake-up; what we have
//! read from the kernel must survive us; and none of it may take bytes from anybody else's memory.
//! **Approach.** [`Host::start`] carries out what is one system call, and hands over what is more (to the
//! device, to a helper). [`Host::collect`] gathers outcomes, answers of devices and helpers, letters
//! of other threads, and userfaultfd messages, in this order: what was done before a message was read
//! was done before it. With nothing there it looks on for some microseconds, then sleeps in io_uring,
//! where everything that can happen ends the sleep.
//! **Not here.** What to do about any of it (`tiermgr-core`).

mod commands;
mod faults;
mod headroom;
mod io;
mod lives;
mod memory;
mod proc;
mod procs;
mod recover;
mod spin;
#[cfg(test)]
mod tests;
mod token;

use proc::Attached;
pub use proc::Prepared;

use crate::error::EngineError;
use crate::host::Host;
use crate::mailbox::{Claim, Mail, Mailbox, answer as send};
use crate::room::{FamilyId, Room, Share};
use crate::staging::Seat;
use crate::state::FamilyState;
use crate::stats::HostStats;
use crate::store::Store;
use headroom::Cap;
use io::Io;
use procs::Procs;
use spin::Spin;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;
use tiermgr_core::effect::{Effect, Reply};
use tiermgr_core::event::{Event, Request};
use tiermgr_core::units::{EXTENT_BYTES, Geometry, ProcId, RequestId, Tick};
use tiermgr_core::watch::{Overdue, WaitsOn};
use tiermgr_sys::nowait::make_nonblocking;
use tiermgr_sys::probe::KernelFeatures;
use tiermgr_sys::process::{monotonic_ns, page_size};
use tiermgr_wire::control::FamilyStats;
use token::Token;

/// How often processes that cannot tell us that they end are looked at.
const LOOK_NS: u64 = 100_000_000;
/// The longest sleep while there are more descriptors than the ring can poll.
const UNPOLLED_SLEEP_NS: u64 = 1_000_000;
/// How soon poisoning that a layout change delayed is tried again.
const POISON_AGAIN_NS: u64 = 1_000_000;
/// How soon slots are asked for again. Whoever gives some back says so, but not every cause is a lack of them.
const SLOTS_AGAIN_NS: u64 = 1_000_000_000;

/// Has asked for what nobody waits for. Requests are counted from 1.
const NOBODY: RequestId = RequestId(0);

/// What a host is told once.
#[derive(Debug)]
pub struct HostConfig {
    /// The family.
    pub family: FamilyId,
    /// What the kernel can do.
    pub features: KernelFeatures,
    /// The store.
    pub store: Arc<Store>,
    /// The DRAM ledger.
    pub room: Arc<Room>,
    /// The family's share of it.
    pub share: Arc<Share>,
    /// What the family has of the staging memory.
    pub seat: Arc<Seat>,
    /// The descriptor table ([`ExecutorConfig::table`](crate::executor::ExecutorConfig::table)).
    pub table: u64,
    /// The budget that the manager begins with. The share may have become smaller since.
    pub budget_bytes: u64,
    /// Letters of other threads; its wake also tells of room and slots.
    pub mailbox: Arc<Mailbox>,
}

/// A request that waits for its reply.
#[derive(Debug)]
struct Pending {
    proc: ProcId,
    claim: Claim,
    answer: SyncSender<Reply>,
}

/// The host of one family.
#[derive(Debug)]
pub struct LinuxHost {
    config: HostConfig,
    mailbox: Arc<Mailbox>,
    state: FamilyState,
    procs: Procs,
    io: Io,
    spin: Spin,
    /// Outcomes of effects that were carried out at once.
    outcomes: Vec<Event>,
    others: Vec<Token>,
    pending: BTreeMap<RequestId, Pending>,
    stats_wanted: Vec<SyncSender<FamilyStats>>,
    explanation_wanted: bool,
    /// Processes of an earlier daemon have not been bounded by their cgroups yet.
    caps_due: bool,
    /// Processes whose messages an earlier daemon left.
    to_replay: Vec<ProcId>,
    budget_told: u64,
    /// What cgroups leave of it.
    cap: Cap,
    /// What the manager counts as used, at its last turn.
    used_bytes: u64,
    /// The part of it that is known to have been touched.
    touched_bytes: u64,
    /// When more slots are asked for again, if nobody says earlier that there are some.
    slots_again: Tick,
    wake_polled: bool,
    poison_delayed: bool,
    /// When a program is to be killed that outlived its SIGBUS.
    next_kill: Tick,
    stopping: bool,
    /// A process was attached at some time: without any left, the family has ended.
    served: bool,
    next_look: Tick,
    /// Some helper has not acknowledged the epoch that began with this host.
    epochs_pending: bool,
    page_bytes: u64,
    extent_pages: usize,
    stats: HostStats,
}

impl LinuxHost {
    /// A host without processes. To be made on the thread that will use it.
    ///
    /// # Errors
    /// [`EngineError::Kernel`] where io_uring or memory cannot be had.
    pub fn new(config: HostConfig, state: FamilyState) -> Result<Self, EngineError> {
        let page_bytes = page_size();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            mailbox: Arc::clone(&config.mailbox),
            io: Io::new(
                Arc::clone(&config.store),
                config.family,
                Geometry { page_bytes },
                Arc::clone(&config.seat),
            )?,
            budget_told: config.budget_bytes,
            cap: Cap::NONE,
            used_bytes: 0,
            touched_bytes: 0,
            config,
            state,
            procs: Procs::new(),
            spin: Spin::new(processors > 1),
            outcomes: Vec::with_capacity(256),
            others: Vec::with_capacity(256),
            pending: BTreeMap::new(),
            stats_wanted: Vec::new(),
            explanation_wanted: false,
            caps_due: false,
            to_replay: Vec::new(),
            slots_again: Tick::NEVER,
            wake_polled: false,
            poison_delayed: false,
            next_kill: Tick::NEVER,
            stopping: false,
            served: false,
            next_look: Tick(0),
            epochs_pending: false,
            page_bytes,
            extent_pages: usize::try_from(EXTENT_BYTES / page_bytes).unwrap_or(1),
            stats: HostStats::default(),
        })
    }

    /// Whether the thread is to end: it was told to, or there were processes and none is left. Without
    /// processes not before the device is done with us: a write under way must not land in a slot
    /// that is another family's by then.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        if self.procs.live().is_empty() {
            (self.stopping || self.served) && self.io.is_idle()
        } else {
            self.stopping
        }
    }

    /// Whether any process is served now.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.procs.live().is_empty()
    }

    /// Whether somebody has waited too long and the log should say for what; asked once.
    pub(crate) fn take_explanation_wanted(&mut self) -> bool {
        std::mem::take(&mut self.explanation_wanted)
    }

    /// Those who asked for counters since the last call.
    pub(crate) fn take_stats_wanted(&mut self) -> Vec<SyncSender<FamilyStats>> {
        std::mem::take(&mut self.stats_wanted)
    }

    /// What the manager cannot see.
    #[must_use]
    pub fn stats(&self) -> HostStats {
        HostStats { store_retries: self.io.retries, ..self.stats }
    }

    /// Says what the family uses now, and how much of that is native memory which may be touched yet.
    pub fn report_use(&mut self, bytes: u64, credit_bytes: u64) {
        self.used_bytes = bytes;
        self.touched_bytes = bytes.saturating_sub(credit_bytes);
        self.config.room.report(&self.config.share, bytes);
        // What is there was not known when the processes were found.
        if std::mem::take(&mut self.caps_due) {
            for id in self.procs.live().to_vec() {
                self.join_cap(id);
            }
        }
    }

    /// The state files.
    #[must_use]
    pub const fn state(&self) -> &FamilyState {
        &self.state
    }

    fn tick(&self) -> Tick {
        Tick(monotonic_ns())
    }

    /// Everything that is there already, oldest first as far as can be known.
    fn gather(&mut self, events: &mut Vec<Event>) {
        events.append(&mut self.outcomes);
        // Before what has ended: who waits is to get what that gives back.
        events.extend(self.io.short_changed());
        let now = self.tick();
        self.io.reap(now, events, &mut self.others);
        self.reap_others(events);
        for at in 0..self.procs.live().len() {
            if let Some(known) = self.procs.live_at(at) {
                Self::reap_commands(known, events);
            }
        }
        if self.mailbox.wake().take() {
            self.read_mail(events);
        }
        for proc in std::mem::take(&mut self.to_replay) {
            self.replay_messages(proc, events);
        }
        self.read_messages(events);
        if now >= self.next_look {
            self.look_at_lives(now, events);
        }
        if now >= self.cap.next_look() {
            self.look_at_cap(now);
        }
        if now >= self.next_kill {
            self.kill_for_lost_bytes(now);
        }
        if now >= self.slots_again {
            self.want_slots();
        }
        if self.poison_delayed {
            self.poison_delayed = false;
            for at in 0..self.procs.live().len() {
                let waiting = self.procs.live_at(at).filter(|known| !known.to_poison.is_empty());
                if let Some(id) = waiting.map(|known| known.id) {
                    self.poison_now(id);
                }
            }
        }
    }

    fn reap_others(&mut self, events: &mut Vec<Event>) {
        let mut others = std::mem::take(&mut self.others);
        for token in others.drain(..) {
            match token {
                Token::Wake => {
                    self.wake_polled = false;
                    self.mailbox.wake().drain();
                }
                Token::Arena(proc, generation) => {
                    if let Some(known) = self.procs.of_generation(proc, generation) {
                        known.arena_polled = false;
                        known.readable = true;
                        // A poll of a description that the client made blocking ends at once, for ever.
                        if let Err(error) = make_nonblocking(known.arena.as_fd()) {
                            tracing::error!(%error, pid = known.entry.pid, "it stays blocking");
                        }
                    }
                }
                Token::Ring(proc, generation) => {
                    if let Some(known) = self.procs.of_generation(proc, generation) {
                        Self::ring_signalled(known);
                    }
                }
                Token::Exit(proc, generation) => {
                    let known = self.procs.of_generation(proc, generation);
                    let attached = known.and_then(|known| known.attached.as_mut());
                    if attached.is_some_and(Attached::has_exited) {
                        self.tell_gone(proc, events);
                    }
                }
                Token::HelperExit(proc, generation) => {
                    let known = self.procs.of_generation(proc, generation);
                    if let Some(known) = known
                        && known.attached.as_mut().is_some_and(Attached::has_helper_exited)
                    {
                        Self::helper_died(known, events);
                        // By then it is known whether the program has ended with it.
                        self.next_look = self.tick().after_ns(LOOK_NS);
                    }
                }
                Token::Store(_) => {}
            }
        }
        self.others = others;
    }

    fn read_mail(&mut self, events: &mut Vec<Event>) {
        self.tell_budget();
        if self.slots_again != Tick::NEVER {
            self.want_slots();
        }
        let lent = self.io.try_stream(self.mailbox.wake());
        self.outcomes.extend(lent);
        while let Some(mail) = self.mailbox.next() {
            match mail {
                Mail::Attach { new, claim, answer } => {
                    if claim.take() {
                        send(&answer, self.attach(*new, events));
                    }
                }
                Mail::Prove { seed, answer } => send(&answer, self.put_nonces(seed)),
                Mail::Adopt { child, new, claim, answer } => {
                    if claim.take() {
                        send(&answer, self.adopt_child(child, *new, events));
                    }
                }
                Mail::Arena { proc, answer } => send(&answer, self.arena_of(proc)),
                Mail::Ask { request, proc, what, claim, answer } => {
                    if self.procs.get(proc).is_some() {
                        self.pending.insert(request, Pending { proc, claim, answer });
                        events.push(Event::Asked { request, proc, what });
                    }
                }
                Mail::Gone { proc } => {
                    if let Some(known) = self.procs.get_mut(proc) {
                        known.disconnected = true;
                        self.next_look = Tick(0);
                    }
                }
                Mail::Back { proc } => {
                    if let Some(known) = self.procs.get_mut(proc) {
                        known.disconnected = false;
                    }
                }
                Mail::Stats { answer } => self.stats_wanted.push(answer),
                Mail::Explain => self.explanation_wanted = true,
                Mail::Stop => self.stopping = true,
                Mail::Release { answer } => {
                    let kept = self.release_all();
                    self.stopping |= kept == 0;
                    send(&answer, kept);
                }
            }
        }
    }

    /// Tells the manager its budget where that has changed.
    fn tell_budget(&mut self) {
        let budget = self.config.share.budget().min(self.cap.bytes());
        if budget != self.budget_told {
            self.budget_told = budget;
            self.outcomes.push(Event::Budget { bytes: budget });
        }
    }

    fn want_slots(&mut self) {
        let wake = self.mailbox.wake();
        match self.config.store.take(self.config.family, wake) {
            Some((first, count)) => {
                self.slots_again = Tick::NEVER;
                self.outcomes.push(Event::SlotsGranted { first, count });
            }
            None => self.slots_again = self.tick().after_ns(SLOTS_AGAIN_NS),
        }
    }

    fn reply(&mut self, request: RequestId, reply: Reply) {
        let Some(Pending { proc, claim, answer }) = self.pending.remove(&request) else { return };
        if claim.take() {
            send(&answer, reply);
        } else if let Reply::Lease(lease) = reply {
            // Whoever asked was told that it took too long, and nobody else knows the number.
            let what = Request::Unpin { lease };
            self.outcomes.push(Event::Asked { request: NOBODY, proc, what });
        }
    }

    /// Whether somebody outside the manager waits for the loop to turn.
    fn is_called(&self) -> bool {
        self.is_finished() || self.explanation_wanted || !self.stats_wanted.is_empty()
    }

    /// Looks for something without sleeping, for as long as that has paid off lately.
    fn spin_for(&mut self, until: Tick, events: &mut Vec<Event>) -> bool {
        let begun = self.tick();
        let end = begun.after_ns(self.spin.limit_ns()).min(until);
        while self.tick() < end {
            std::hint::spin_loop();
            self.gather(events);
            if !events.is_empty() || !self.outcomes.is_empty() || self.is_called() {
                self.spin.hit();
                return true;
            }
        }
        false
    }

    fn sleep(&mut self, until: Tick, events: &mut Vec<Event>) {
        let until = if self.arm_polls() {
            until
        } else {
            until.min(self.tick().after_ns(UNPOLLED_SLEEP_NS))
        };
        self.set_rings_sleeping(true);
        // A helper that answered before it saw the flag has signalled nobody.
        for at in 0..self.procs.live().len() {
            if let Some(known) = self.procs.live_at(at) {
                Self::reap_commands(known, events);
            }
        }
        let begun = self.tick();
        if events.is_empty() && begun < until {
            let timeout = (until != Tick::NEVER).then(|| Duration::from_nanos(until.0 - begun.0));
            self.io.sleep(timeout);
            self.stats.sleeps += 1;
            self.spin.slept(self.tick().0.saturating_sub(begun.0));
        } else {
            self.io.submit();
        }
        self.set_rings_sleeping(false);
    }
}

impl Host for LinuxHost {
    fn now(&mut self) -> Tick {
        self.tick()
    }

    fn collect(&mut self, deadline: Tick, events: &mut Vec<Event>) {
        self.retire_messages();
        loop {
            self.gather(events);
            if !events.is_empty() || self.is_called() {
                return;
            }
            let mut until = deadline.min(self.io.deadline());
            if self.needs_looks() {
                until = until.min(self.next_look);
            }
            until = until.min(self.cap.next_look()).min(self.next_kill).min(self.slots_again);
            let now = self.tick();
            if self.poison_delayed {
                until = until.min(now.after_ns(POISON_AGAIN_NS));
            }
            if self.awaits_epoch() {
                until = until.min(now.after_ns(LOOK_NS));
            }
            if !self.outcomes.is_empty() {
                continue;
            }
            if deadline <= now {
                return;
            }
            if !self.spin_for(until, events) {
                self.sleep(until, events);
            }
            if !events.is_empty() {
                return;
            }
        }
    }

    fn start(&mut self, effect: &Effect) {
        match *effect {
            Effect::Copy { op, proc, from, to, protect } => self.copy(op, proc, from, to, protect),
            Effect::Zero { op, proc, to } => self.zero(op, proc, to),
            Effect::Protect { op, proc, span, on } => self.protect(op, proc, span, on),
            Effect::Probe { op, proc } => self.probe(op, proc),
            Effect::Wake { proc, span } => self.wake(proc, span),
            Effect::Poison { proc, span } => self.poison(proc, span),
            Effect::Arm { op, proc, span, on } => self.arm(op, proc, span, on),
            Effect::ReadMap { op, proc, at } => self.read_map(op, proc, at),
            Effect::Command { op, proc, command } => self.command(op, proc, command),
            Effect::Cancel { op, proc } => self.cancel(op, proc),
            Effect::ReadLimbo { op, proc, from, to } => self.read_limbo(op, proc, from, to),
            Effect::WriteSlots { op, from, slot } => {
                if !self.io.write(op, from, slot) {
                    self.outcomes.push(Event::Written { op, ok: false });
                }
            }
            // A demand read needs no rank of its own: each read goes to the device at once.
            Effect::ReadSlots { op, slot, to, demand: _ } => {
                if !self.io.read(op, slot, to) {
                    self.outcomes.push(Event::SlotsRead { op, ok: false, damaged: 0 });
                }
            }
            Effect::WantSlots => self.want_slots(),
            Effect::ReturnSlots { first } => {
                if !self.config.store.give_back(self.config.family, first) {
                    tracing::error!(slot = first.0, "returning slots that are not leased");
                }
            }
            Effect::WantStream => {
                let lent = self.io.want_stream(self.mailbox.wake());
                self.outcomes.extend(lent);
            }
            Effect::ReturnStream { stream } => self.io.return_stream(stream),
            Effect::WantRoom { bytes } => {
                // What a cgroup refuses would be of no use.
                if self.cap.bytes() == u64::MAX {
                    let wish = self.budget_told.saturating_add(bytes);
                    self.config.room.want(&self.config.share, wish, self.tick());
                }
                self.tell_budget();
            }
            Effect::Reply { request, reply } => self.reply(request, reply),
            Effect::Born { proc } => self.note_birth(proc),
            Effect::Release { proc } => self.release(proc),
        }
    }

    fn overdue(&mut self, overdue: &Overdue, waits_on: WaitsOn) {
        let pid = self.procs.get(overdue.proc).map(|known| known.entry.pid);
        tracing::warn!(
            family = self.config.family,
            pid,
            address = format_args!("{:#x}", overdue.page.0),
            %waits_on,
            "a thread has slept at a page for more than five seconds"
        );
    }
}
