//! [`SimHost`]: the seam between the production driver and the simulated world.

use crate::client::Dma;
use crate::kernel::{LayoutMessage, Mm, Vma};
use crate::store::Io;
use crate::world::World;
use tiermgr_core::effect::{BufRange, Command, Effect};
use tiermgr_core::event::{Event, IoctlOutcome};
use tiermgr_core::limits::{COMMANDS_IN_FLIGHT_MAX, COPY_PIECE_BYTES};
use tiermgr_core::units::{Addr, EXTENT_BYTES, OpId, ProcId, SlotId, Span, Tick, low_u32};
use tiermgr_core::watch::{Overdue, WaitsOn};
use tiermgr_engine::host::Host;

/// The simulated host. It owns the world.
#[derive(Debug)]
pub struct SimHost {
    /// The world.
    pub world: World,
}

impl Host for SimHost {
    fn now(&mut self) -> Tick {
        self.world.now
    }

    fn collect(&mut self, _deadline: Tick, events: &mut Vec<Event>) {
        let world = &mut self.world;
        for (proc, span) in std::mem::take(&mut world.poisons) {
            world.poison(proc, span);
        }
        let first = events.len();
        events.append(&mut world.outbox);
        world.last_messages.clear();
        let messages = events.len();
        world.read_messages(events);
        let unmaps =
            events[messages..].iter().filter(|event| matches!(event, Event::Unmapped { .. }));
        world.last_messages.extend(unmaps);
        for event in &events[first..] {
            if let Some(op) = op_of(event)
                && !world.ops.remove(&op)
            {
                world.broken("one answer for each operation", format!("{op:?} answered twice"));
            }
            world.trace.note(world.turn, world.now.0, format_args!("-> {event:?}"));
        }
    }

    fn start(&mut self, effect: &Effect) {
        let world = &mut self.world;
        match (&mut world.doomed, effect) {
            (Some(0), _) => return,
            // A note takes no time, in which others could act or a kill come.
            (_, &Effect::Born { proc }) => {
                world.trace.note(world.turn, world.now.0, format_args!("   <- {effect:?}"));
                return world.born(proc);
            }
            (Some(left), _) => *left -= 1,
            (None, _) => {}
        }
        if !world.settling && world.rng.chance(world.scenario.faults.interleave) {
            world.act();
        }
        world.trace.note(world.turn, world.now.0, format_args!("   <- {effect:?}"));
        world.start(effect);
    }

    fn overdue(&mut self, overdue: &Overdue, waits_on: WaitsOn) {
        let world = &mut self.world;
        world.counts.overdue += 1;
        world.trace.note(world.turn, world.now.0, format_args!("late: {overdue:?} {waits_on}"));
    }
}

const fn op_of(event: &Event) -> Option<OpId> {
    match *event {
        Event::Copied { op, .. }
        | Event::Protected { op, .. }
        | Event::Armed { op, .. }
        | Event::Mapped { op, .. }
        | Event::Commanded { op, .. }
        | Event::LimboRead { op, .. }
        | Event::Written { op, .. }
        | Event::SlotsRead { op, .. } => Some(op),
        _ => None,
    }
}

impl World {
    fn born(&mut self, child: ProcId) {
        if let Some(index) = self.proc_index(child) {
            self.procs[index].born = true;
            self.forked_at = Some(self.turn);
        }
    }

    fn begin(&mut self, op: OpId) {
        if !self.ops.insert(op) {
            self.broken(
                "one answer for each operation",
                format!("{op:?} was given to a second operation while the first is under way"),
            );
        }
    }

    /// The process that an operation works on. After `Release` there is none.
    fn space(&mut self, proc: ProcId) -> Option<usize> {
        let index = self.proc_index(proc)?;
        if !self.procs[index].known {
            self.broken("nothing outside", format!("{proc:?} was never announced"));
            return None;
        }
        (!self.procs[index].released).then_some(index)
    }

    pub(crate) fn start(&mut self, effect: &Effect) {
        match *effect {
            Effect::Copy { op, proc, from, to, protect } => {
                self.begin(op);
                let staged = self.staged(from, false);
                let (bytes, outcome) = self.copy(proc, to, &staged, protect);
                self.tell(Event::Copied { op, bytes, outcome });
            }
            Effect::Zero { op, proc, to } => {
                self.begin(op);
                let zeros = vec![0; crate::ix(to.len / self.scenario.layout.page_bytes)];
                let (bytes, outcome) = self.copy(proc, to.start, &zeros, false);
                self.tell(Event::Copied { op, bytes, outcome });
            }
            Effect::Protect { op, proc, span, on } => {
                self.begin(op);
                let outcome = self.on_space(proc, |mm| mm.protect(span, on));
                self.tell(Event::Protected { op, outcome });
            }
            Effect::Probe { op, proc } => {
                self.begin(op);
                // The nonce page is always there, so a copy onto it tells the one from the other.
                let outcome = self.on_space(proc, |mm| match mm.changing {
                    _ if mm.is_gone() => IoctlOutcome::NoProcess,
                    0 => IoctlOutcome::Done,
                    _ => IoctlOutcome::EventsPending,
                });
                self.tell(Event::Protected { op, outcome });
            }
            Effect::Wake { proc, span } => {
                if let Some(index) = self.space(proc) {
                    self.procs[index].mm.wake(span);
                }
            }
            Effect::Poison { proc, span } => self.poison(proc, span),
            Effect::Arm { op, proc, span, on } => {
                self.begin(op);
                let outcome = if on && self.goes_wrong(self.scenario.faults.arm_no_memory) {
                    IoctlOutcome::NoMemory
                } else {
                    self.on_space(proc, |mm| mm.arm(span, on))
                };
                self.tell(Event::Armed { op, outcome });
            }
            Effect::ReadMap { op, proc, at } => {
                self.begin(op);
                self.read_map(op, proc, at);
            }
            Effect::Command { op, proc, command } => {
                self.begin(op);
                self.order(op, proc, command);
            }
            Effect::Cancel { op, proc } => {
                if let Some(index) = self.proc_index(proc) {
                    self.procs[index].helper.cancel(op);
                }
            }
            Effect::ReadLimbo { op, proc, from, to } => {
                self.begin(op);
                self.read_limbo(op, proc, from, to);
            }
            Effect::WriteSlots { op, from, slot } => self.store_io(op, true, slot, from, false),
            Effect::ReadSlots { op, slot, to, demand } => {
                self.store_io(op, false, slot, to, demand);
            }
            Effect::WantSlots => self.wants_slots = true,
            Effect::ReturnSlots { first } => {
                if let Err(what) = self.store.take_back(first) {
                    self.broken("slots are given back whole and at rest", what);
                }
            }
            Effect::WantStream => {
                self.wants_stream = true;
                if !self.rng.chance(self.scenario.streams_late) {
                    self.lend_stream();
                }
            }
            Effect::ReturnStream { stream } => {
                if let Err(what) = self.store.return_stream(stream) {
                    self.broken("a buffer has one user", what);
                }
            }
            Effect::WantRoom { bytes } => self.wants_room = bytes.max(1),
            Effect::Reply { request, reply } => self.on_reply(request, reply),
            Effect::Born { proc } => self.born(proc),
            Effect::Release { proc } => self.release(proc),
        }
    }

    fn staged(&mut self, range: BufRange, filling: bool) -> Vec<u64> {
        if let Some(what) = self.store.conflict(range, filling) {
            self.broken("a buffer has one user", what);
        }
        match self.store.staged(range) {
            Ok(staged) => staged.to_vec(),
            Err(what) => {
                self.broken("nothing outside", what);
                Vec::new()
            }
        }
    }

    fn on_space(
        &mut self,
        proc: ProcId,
        ioctl: impl FnOnce(&mut Mm) -> IoctlOutcome,
    ) -> IoctlOutcome {
        self.space(proc).map_or(IoctlOutcome::NoProcess, |index| ioctl(&mut self.procs[index].mm))
    }

    fn copy(
        &mut self,
        proc: ProcId,
        to: Addr,
        generations: &[u64],
        protect: bool,
    ) -> (u64, IoctlOutcome) {
        let page = self.scenario.layout.page_bytes;
        if generations.len() as u64 * page > COPY_PIECE_BYTES {
            self.broken(
                "nothing is wider than limits.rs",
                format!("a copy of {} pages to {to:?}", generations.len()),
            );
        }
        let Some(index) = self.space(proc) else { return (0, IoctlOutcome::NoProcess) };
        if self.procs[index].mm.layout.limbo_span().contains(to) {
            self.broken("nothing outside", format!("a copy into limbo at {to:?}"));
        }
        if !self.group_takes(generations.len()) {
            return (0, IoctlOutcome::NoMemory);
        }
        // A layout change is looked for before memory is.
        let changing = self.procs[index].mm.changing > 0;
        if !changing && self.goes_wrong(self.scenario.faults.copy_no_memory) {
            return (0, IoctlOutcome::NoMemory);
        }
        let mm = &mut self.procs[index].mm;
        if generations.len() > 1 && self.rng.chance(self.scenario.faults.copy_cut) {
            let part = 1 + self.rng.index(generations.len() - 1);
            let (bytes, outcome) = mm.copy(&mut self.frames, to, &generations[..part], protect);
            let cut =
                if outcome == IoctlOutcome::Done { IoctlOutcome::EventsPending } else { outcome };
            return (bytes, cut);
        }
        mm.copy(&mut self.frames, to, generations, protect)
    }

    pub(crate) fn poison(&mut self, proc: ProcId, span: Span) {
        let Some(index) = self.space(proc) else { return };
        let process = &mut self.procs[index];
        if !self.scenario.has_poison {
            process.waits_for_lost = true;
        } else if !process.mm.poison(span) {
            self.poisons.push((proc, span));
        }
    }

    fn read_map(&mut self, op: OpId, proc: ProcId, at: Addr) {
        if !at.0.is_multiple_of(EXTENT_BYTES) {
            self.broken("nothing outside", format!("the map of {at:?}, which begins no extent"));
        }
        let unreadable = self.goes_wrong(self.scenario.faults.map_unknown);
        let present = self.space(proc).and_then(|index| self.procs[index].mm.present(at));
        let event = match present {
            Some(present) if !unreadable => Event::Mapped { op, present, known: true },
            _ => Event::Mapped { op, present: 0, known: false },
        };
        self.tell(event);
    }

    fn order(&mut self, op: OpId, proc: ProcId, command: Command) {
        let Some(index) = self.space(proc) else {
            let outcome = tiermgr_core::event::CommandOutcome::NoHelper;
            self.tell(Event::Commanded { op, bytes: 0, outcome });
            return;
        };
        self.procs[index].helper.order(op, command);
        let held = self.procs[index].helper.outstanding();
        if held > crate::ix(u64::from(COMMANDS_IN_FLIGHT_MAX)) {
            self.broken(
                "nothing is wider than limits.rs",
                format!("{held} commands are with the helper of {proc:?}"),
            );
        }
    }

    fn read_limbo(&mut self, op: OpId, proc: ProcId, from: Addr, to: BufRange) {
        self.staged(to, true);
        self.finish_writes_of_devices(proc, from, to.len);
        let span = Span::new(from, u64::from(to.len));
        let page = self.scenario.layout.page_bytes;
        let mut generations = Vec::new();
        if let Some(index) = self.space(proc) {
            let mm = &self.procs[index].mm;
            generations = mm.read(&self.frames, span);
            let stopped = mm.page(from.plus(generations.len() as u64 * page));
            let in_limbo = mm.layout.limbo_span().contains(from);
            // Limbo raises SIGBUS, so a read of it comes back short. Elsewhere the reader sleeps.
            let sleeps = !in_limbo
                && (generations.len() as u64) < span.len / page
                && stopped.is_some_and(|page| page.vma == Vma::Managed { armed: true });
            if sleeps && !mm.is_gone() {
                self.broken(
                    "the daemon never waits for itself",
                    format!(
                        "{span:?} is read, and a page of it is absent: only the reader can fill it"
                    ),
                );
            }
        }
        if generations.len() > 1 && self.goes_wrong(self.scenario.faults.limbo_short) {
            generations.truncate(self.rng.index(generations.len()));
        }
        if let Ok(staged) = self.store.staged(to) {
            for (staged, &generation) in staged.iter_mut().zip(&generations) {
                *staged = generation;
            }
        }
        self.tell(Event::LimboRead { op, bytes: generations.len() as u64 * page });
    }

    /// What is parked in its place has rested for longer than a transfer takes: a device that began to
    /// write before the rest has ended.
    fn finish_writes_of_devices(&mut self, proc: ProcId, from: Addr, len: u32) {
        let Some(index) = self.space(proc).filter(|_| !self.scenario.config.has_move) else {
            return;
        };
        let span = Span::new(from, u64::from(len));
        let layout = self.procs[index].mm.layout;
        let ends = |dma: &Dma| {
            dma.proc == index && dma.write && span.contains(layout.arena_addr(dma.page))
        };
        while let Some(at) = self.dmas.iter().position(ends) {
            let dma = self.dmas.swap_remove(at);
            self.finish_dma(dma);
        }
    }

    fn store_io(&mut self, op: OpId, write: bool, slot: SlotId, buf: BufRange, demand: bool) {
        self.begin(op);
        let count = low_u32(u64::from(buf.len) / EXTENT_BYTES);
        if let Err(what) = self.store.start(Io { op, write, slot, count, buf, demand }) {
            self.broken("slots and buffers have one user", what);
            let event = if write {
                Event::Written { op, ok: false }
            } else {
                Event::SlotsRead { op, ok: false, damaged: 0 }
            };
            self.tell(event);
        }
    }

    /// The daemon closes its descriptors of a process and ends its helper.
    fn release(&mut self, proc: ProcId) {
        let Some(index) = self.space(proc) else {
            self.broken("nothing outside", format!("{proc:?} is released and is not there"));
            return;
        };
        self.say(format_args!("process {index} is released"));
        let process = &mut self.procs[index];
        process.released = true;
        process.helper.die(&mut process.mm);
        while let Some(result) = process.helper.take_result() {
            self.outbox.push(result);
        }
        // Messages that nobody will read any more let go of their threads.
        let messages = std::mem::take(&mut self.procs[index].mm.messages);
        for (message, thread) in messages {
            if let LayoutMessage::Fork(child) = message {
                self.procs[crate::ix(u64::from(child))].mm.close_descriptors();
            }
            self.procs[index].message_was_read(thread);
        }
        if self.procs[index].exited {
            self.end_space(index);
        } else {
            self.procs[index].mm.close_descriptors();
        }
    }
}
