//! The manager of one family: the only entry to the core.
//!
//! A step takes one event; [`Manager::settle`] then starts what has become possible. Everything that
//! waits (faults for room, discards for a lock, forks for quiet) waits in a queue of ours and is
//! looked at again in `settle`, never inside an event.
//!
//! Rules that the code below obeys (design: the life of a page), and where:
//! - a record is true at every instant: `shared::Shared::update` is the only writer;
//! - one operation per extent: `shared::Shared::lock`; a fault on a busy extent is forgotten, and
//!   the extent woken when the operation ends, so that the kernel asks again;
//! - limbo before move, slot before park, park before drop, dirty before free: `park.rs`, `fault.rs`;
//! - nothing is freed, unmapped or reused under a command: `request.rs`, `life.rs`;
//! - FORK: fills are given up, limbo is written, then the table is copied: `fork.rs`.

mod credit;
mod fault;
mod fill;
mod fork;
mod life;
mod limbo;
mod loan;
mod op;
mod park;
mod place;
mod prepare;
mod recover;
mod request;
mod rest;
mod shared;
mod space;
mod staging;
#[cfg(test)]
mod tests;
mod waits;
mod write;

use crate::effect::{Effect, Refusal, Reply, Residency};
use crate::event::{Event, IoctlOutcome, Request};
use crate::page::PageState;
use crate::record::Records;
use crate::stats::{Gauges, Stats};
use crate::units::{Addr, Geometry, OpId, ProcId, RegionId, RequestId, Span, Tick};
use op::{Kind, Prepare};
use shared::Shared;
use space::Space;
use std::collections::{BTreeMap, VecDeque};

/// What a manager is told once.
#[derive(Clone, Copy, Debug)]
pub struct ManagerConfig {
    /// Sizes of the machine.
    pub geometry: Geometry,
    /// DRAM that the family may have at first, limbo included.
    pub budget_bytes: u64,
    /// Small staging buffers, [`DEMAND_BUFFERS_LEAST`](crate::limits::DEMAND_BUFFERS_LEAST) to
    /// [`DEMAND_BUFFERS`](crate::limits::DEMAND_BUFFERS).
    pub demand_buffers: u16,
    /// Least time that pages rest in limbo before they are written out, unless room is short.
    pub probation_ns: u64,
    /// The kernel has `UFFDIO_MOVE`. Without it pages rest where they are, write-protected.
    pub has_move: bool,
}

/// A fault that waits for room or for a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waiting {
    proc: ProcId,
    at: Addr,
    write: bool,
    protected: bool,
}

/// A discard that waits until no operation holds any of its extents.
#[derive(Clone, Copy, Debug)]
struct PendingDiscard {
    request: Option<RequestId>,
    proc: ProcId,
    /// Its addresses may be another region's by the time it begins.
    region: RegionId,
    span: Span,
    proof: Proof,
}

/// Whether an ioctl has shown, since a request came, that no FORK is waiting to be read. What a fork
/// that began before the request has copied must not be forgotten before its child has a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Proof {
    #[default]
    Needed,
    Asked(OpId),
    Given,
}

/// The manager of one family.
#[derive(Debug)]
pub struct Manager<R> {
    shared: Shared<R>,
    spaces: BTreeMap<ProcId, Space>,
    waiting: VecDeque<Waiting>,
    discards: VecDeque<PendingDiscard>,
    /// Operations whose ioctl is to be tried again, and not before when.
    retries: Vec<(OpId, Tick)>,
    /// When time alone makes something possible.
    timer: Tick,
    /// The last look for something to park found nothing that could be begun.
    fruitless: bool,
    /// Room comes as soon as pages have rested for long enough, and not before.
    rests_on: bool,
    /// How many faults there had been when more room was asked for last.
    asked_at_faults: Option<u64>,
    /// A lease or a drain found no room in this turn.
    starving: bool,
    /// Chunks with extents that have been made exclusive and are to leave next.
    prepared: VecDeque<(ProcId, Addr)>,
    /// Requests of a process that is held: a fork of it is being followed.
    deferred: VecDeque<(RequestId, ProcId, Request)>,
    next_region: u32,
    next_lease: u64,
    /// Pins that wait for a larger budget, and since when.
    pins_waiting: BTreeMap<RequestId, Tick>,
}

/// One region, for lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionView {
    /// Whose.
    pub proc: ProcId,
    /// Its number.
    pub region: RegionId,
    /// Where.
    pub span: Span,
    /// Bytes by place.
    pub residency: Residency,
}

impl<R: Records> Manager<R> {
    /// A manager without processes.
    pub fn new(config: ManagerConfig, records: R) -> Self {
        Self {
            shared: Shared::new(config, records),
            spaces: BTreeMap::new(),
            waiting: VecDeque::new(),
            discards: VecDeque::new(),
            retries: Vec::new(),
            timer: Tick::NEVER,
            fruitless: false,
            rests_on: false,
            asked_at_faults: None,
            starving: false,
            prepared: VecDeque::new(),
            deferred: VecDeque::new(),
            next_region: 0,
            next_lease: 0,
            pins_waiting: BTreeMap::new(),
        }
    }

    /// Feeds one event and appends what the host must now do.
    pub fn step(&mut self, now: Tick, event: Event, effects: &mut Vec<Effect>) {
        self.shared.now = now;
        match event {
            Event::ProcReady { proc, limbo } => self.on_ready(proc, limbo),
            Event::ProcGone { proc } => self.on_gone(proc),
            Event::Asked { request, proc, what } => self.on_asked(request, proc, what, effects),
            Event::Faulted { proc, at, write, protected } => {
                self.on_faulted(Waiting { proc, at, write, protected }, effects);
            }
            Event::Forked { parent, child } => self.on_forked(parent, child, effects),
            Event::Unmapped { proc, span } => self.on_unmapped(proc, span),
            Event::Copied { op, bytes, outcome } => self.on_copied(op, bytes, outcome, effects),
            Event::Protected { op, outcome } => self.on_protected(op, outcome, effects),
            Event::Armed { op, outcome } => self.on_armed(op, outcome, effects),
            Event::Mapped { op, present, known } => self.on_mapped(op, present, known, effects),
            Event::Commanded { op, bytes, outcome } => {
                self.on_commanded(op, bytes, outcome, effects);
            }
            Event::LimboRead { op, bytes } => self.on_limbo_read(op, bytes, effects),
            Event::Written { op, ok } => self.on_written(op, ok, effects),
            Event::SlotsRead { op, ok, damaged } => self.on_slots_read(op, ok, damaged, effects),
            Event::SlotsGranted { first, count } => self.on_slots_granted(first, count),
            Event::StreamLent { stream } => self.shared.staging.lend(stream),
            Event::StreamsShort { short } => self.shared.staging.set_short(short),
            Event::Budget { bytes } => self.shared.set_budget(bytes),
            Event::TimerFired => {}
        }
        self.settle_loans();
    }

    /// After the events of a turn: starts what has become possible (waiting faults, reads ahead,
    /// parking).
    pub fn settle(&mut self, now: Tick, effects: &mut Vec<Effect>) {
        self.shared.now = now;
        self.timer = Tick::NEVER;
        self.starving = false;
        self.shared.staging.return_spent(effects);
        self.end_births(effects);
        self.retry(effects);
        self.advance_recovery(effects);
        self.advance_arming(effects);
        self.advance_forks(effects);
        self.ask_deferred(effects);
        self.advance_discards(effects);
        self.advance_life(effects);
        self.serve_waiting(effects);
        self.advance_leases(effects);
        self.read_ahead(effects);
        self.park(effects);
        self.drop_stale(effects);
        self.tidy_slots(effects);
        let looks_again = self.shared.staging.return_unused(effects);
        self.settle_loans();
        if looks_again {
            self.timer = now;
        }
        if !self.waiting.is_empty() || self.starving {
            // With nothing in flight whose end would bring another turn, time must.
            let idle =
                self.shared.ops.is_empty() && self.shared.slots_wanted.is_none() && !self.rests_on;
            let wait = if idle { 0 } else { shared::SLOTS_GRACE_NS };
            self.timer = self.timer.min(now.after_ns(wait));
        }
        debug_assert_eq!(self.check(), Ok(()));
    }

    /// When the manager next wants to be woken; a time in the past where it has work that waits for
    /// nothing but messages.
    pub fn deadline(&self) -> Tick {
        self.retries.iter().map(|&(_, at)| at).fold(self.timer, Tick::min)
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    /// Pages by place.
    pub fn gauges(&self) -> &Gauges {
        &self.shared.gauges
    }

    /// Slots that records or operations hold.
    pub fn slots_held(&self) -> u32 {
        self.shared.slots.held_slots()
    }

    /// Bytes of a page.
    pub const fn page_bytes(&self) -> u64 {
        self.shared.page_bytes()
    }

    /// The budget, in bytes.
    pub fn budget_bytes(&self) -> u64 {
        self.shared.budget_pages * self.shared.page_bytes()
    }

    /// Whether nothing is in flight and nothing waits.
    pub fn is_quiet(&self) -> bool {
        self.shared.ops.is_empty() && self.waiting.is_empty() && self.discards.is_empty()
    }

    /// What the manager waits for, in words: for a watchdog that finds it waiting too long.
    pub fn describe(&self) -> String {
        let gauges = &self.shared.gauges;
        let held: Vec<ProcId> =
            self.spaces.values().filter(|s| s.is_held()).map(|s| s.id).collect();
        let ops: Vec<_> = self.shared.ops.iter().take(8).collect();
        format!(
            "{} faults and {} discards wait; {} of {} pages used ({gauges:?}); held {held:?}; \
             {} chunks queued; {} free slots, {} in quarantine, wanted since {:?}; \
             fruitless {}; retries {:?}; first operations {ops:?}",
            self.waiting.len(),
            self.discards.len(),
            gauges.used_pages(),
            self.shared.budget_pages,
            self.shared.queue.len(),
            self.shared.slots.free_slots(),
            self.shared.slots.quarantined_slots(),
            self.shared.slots_wanted,
            self.fruitless,
            self.retries,
        )
    }

    /// The records, for a restart.
    pub fn into_records(self) -> R {
        self.shared.records
    }

    /// All regions.
    pub fn regions(&self) -> Vec<RegionView> {
        let mut views = Vec::new();
        for space in self.spaces.values() {
            for region in &space.regions {
                let span = region.span();
                views.push(RegionView {
                    proc: space.id,
                    region: region.record.region,
                    span,
                    residency: self.shared.residency(region, span),
                });
            }
        }
        views
    }

    /// Processes of the family that are still served.
    pub fn procs(&self) -> impl Iterator<Item = ProcId> {
        self.spaces.keys().copied()
    }

    /// Whether the gauges agree with the records and the limits hold. Cheap enough for every turn of
    /// the simulator only while regions are small, so debug builds of it alone look at everything.
    ///
    /// # Errors
    /// What does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        self.shared.check_buffers()?;
        for space in self.spaces.values() {
            let ops = self.shared.ops.iter().filter(|(_, op)| op.proc == space.id).count();
            if ops != space.ops as usize {
                return Err(format!("{:?} counts {} operations, not {ops}", space.id, space.ops));
            }
        }
        Ok(())
    }

    /// Counts everything again from the records and compares.
    ///
    /// # Errors
    /// What does not agree, in words.
    pub fn check_deeply(&self) -> Result<(), String> {
        self.check()?;
        self.check_loans()?;
        let mut found = Gauges::default();
        for space in self.spaces.values() {
            for region in &space.regions {
                let mapped = region.arming.map_or(0, |arming| arming.mapped);
                found.credit_pages += u64::from(region.record.unarmed_extents - mapped)
                    * u64::from(self.shared.extent_pages());
                for extent in 0..region.record.extents {
                    let record = self.shared.records.get(region.record_index(extent));
                    let note = region.note(extent);
                    let weight = shared::weigh(record.states, note.lender.is_some());
                    found.resident_pages += weight.resident;
                    found.limbo_pages += weight.limbo;
                    found.parked_pages += weight.parked;
                    if record.states.any(PageState::needs_slot) && !record.slot.is_some() {
                        return Err(format!("extent {extent} needs a slot and has none"));
                    }
                    if record.states.any(|s| s == PageState::Filling) && !note.is_busy() {
                        return Err(format!("extent {extent} is filling and nobody fills it"));
                    }
                    if record.states.any(PageState::is_limbo) != record.limbo().is_some() {
                        return Err(format!("extent {extent}: limbo and its place disagree"));
                    }
                }
            }
        }
        let kept = &self.shared.gauges;
        let pairs = [
            ("resident", kept.resident_pages, found.resident_pages),
            ("limbo", kept.limbo_pages, found.limbo_pages),
            ("parked", kept.parked_pages, found.parked_pages),
            ("credit", kept.credit_pages, found.credit_pages),
        ];
        for (name, kept, found) in pairs {
            if kept != found {
                return Err(format!("{name}: {kept} pages counted, {found} found"));
            }
        }
        Ok(())
    }

    /// Takes the next step towards a proof.
    fn prove(&mut self, proc: ProcId, proof: Proof, effects: &mut Vec<Effect>) -> Proof {
        match proof {
            Proof::Needed => match self.spaces.get_mut(&proc) {
                Some(space) => {
                    let op = op::Op { proc, at: Addr(0), kind: Kind::Probe };
                    let id = self.shared.begin(space, op);
                    effects.push(Effect::Probe { op: id, proc });
                    Proof::Asked(id)
                }
                None => Proof::Given,
            },
            // A probe ends only without EAGAIN.
            Proof::Asked(id) if self.shared.ops.get(id).is_none() => Proof::Given,
            other => other,
        }
    }

    /// Puts the outcome of an ioctl where it proves something: without EAGAIN, no FORK was pending. Where
    /// memory was short the host may not have asked the kernel at all.
    fn note_proof(&mut self, id: OpId, outcome: IoctlOutcome) {
        if let Some(op) = self.shared.ops.get(id)
            && !matches!(outcome, IoctlOutcome::EventsPending | IoctlOutcome::NoMemory)
        {
            self.shared.slots.proven(op.proc, id);
            if let Some(space) = self.spaces.get_mut(&op.proc) {
                space.zapped.retain(|&(from, _)| from > id);
                space.parted.retain(|&(from, _)| from > id);
            }
        }
    }

    fn retry_later(&mut self, id: OpId, delay_ns: u64) {
        self.shared.stats.ioctl_retries += 1;
        self.retries.push((id, self.shared.now.after_ns(delay_ns)));
    }

    fn retry(&mut self, effects: &mut Vec<Effect>) {
        let now = self.shared.now;
        let mut due = Vec::new();
        self.retries.retain(|&(id, at)| {
            if at <= now {
                due.push(id);
            }
            at > now
        });
        for id in due {
            self.issue(id, effects);
        }
    }

    /// Orders (again) the ioctl that an operation waits for.
    fn issue(&mut self, id: OpId, effects: &mut Vec<Effect>) {
        let Some(op) = self.shared.ops.get(id) else {
            return;
        };
        let proc = op.proc;
        let extent_bytes = crate::units::EXTENT_BYTES;
        let effect = match &op.kind {
            Kind::Fill(fill) => Some(match fill.piece {
                Some(piece) => shared::fill_copy(id, op, fill, piece),
                None => {
                    Effect::ReadSlots { op: id, slot: fill.slot, to: fill.buf, demand: fill.demand }
                }
            }),
            Kind::Zero(zero) => {
                Some(Effect::Zero { op: id, proc, to: Span::new(zero.piece.start, zero.piece.len) })
            }
            Kind::Rescue(rescue) => Some(self.shared.rescue_effect(id, op, rescue, &self.spaces)),
            Kind::Unprotect { page: Some(page) } => {
                let page_bytes = self.shared.page_bytes();
                let start = op.at.plus(u64::from(*page) * page_bytes);
                Some(Effect::Protect {
                    op: id,
                    proc,
                    span: Span::new(start, page_bytes),
                    on: false,
                })
            }
            Kind::Unprotect { page: None } | Kind::Prepare(Prepare::Unprotecting) => {
                Some(Effect::Protect {
                    op: id,
                    proc,
                    span: Span::new(op.at, extent_bytes),
                    on: false,
                })
            }
            Kind::Guard { count, .. } => Some(Effect::Protect {
                op: id,
                proc,
                span: Span::new(op.at, u64::from(*count) * extent_bytes),
                on: true,
            }),
            Kind::Shield { span } => Some(Effect::Protect { op: id, proc, span: *span, on: true }),
            Kind::Arm { span, on, .. } => Some(Effect::Arm { op: id, proc, span: *span, on: *on }),
            Kind::Probe => Some(Effect::Probe { op: id, proc }),
            _ => None,
        };
        effects.extend(effect);
    }
}

/// Answers a request.
fn reply(effects: &mut Vec<Effect>, request: RequestId, reply: Reply) {
    effects.push(Effect::Reply { request, reply });
}

/// Refuses a request.
fn refuse(effects: &mut Vec<Effect>, request: RequestId, why: Refusal) {
    reply(effects, request, Reply::Refused(why));
}
