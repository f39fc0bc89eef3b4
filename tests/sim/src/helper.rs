//! The helper of a process, as an actor: it takes commands late, does them a few pages at a time, and
//! can be stopped or killed at any point.

use crate::kernel::{Frames, Mm, MoveStep, PopulateStep, Sleeper, Waiter};
use std::collections::VecDeque;
use tiermgr_core::effect::Command;
use tiermgr_core::event::{CommandOutcome, Event};
use tiermgr_core::units::OpId;

#[derive(Clone, Copy, Debug)]
struct Order {
    op: OpId,
    command: Command,
    taken: bool,
    /// Bytes done from the front.
    done: u64,
}

/// The helper of one process.
#[derive(Debug, Default)]
pub struct Helper {
    /// It runs.
    pub alive: bool,
    /// It is stopped (SIGSTOP, a debugger, a scheduler that forgot it).
    pub stalled: bool,
    queue: VecDeque<Order>,
    /// Results that are stored and not yet seen by the daemon.
    results: VecDeque<Event>,
}

impl Helper {
    /// One that runs and has nothing to do.
    #[must_use]
    pub fn running() -> Self {
        Self { alive: true, ..Self::default() }
    }

    /// Commands that have not been answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.queue.len() + self.results.len()
    }

    /// Whether it could do something now.
    #[must_use]
    pub fn is_enabled(&self, mm: &Mm) -> bool {
        self.alive && !self.stalled && !self.queue.is_empty() && !self.is_asleep(mm)
    }

    fn is_asleep(&self, mm: &Mm) -> bool {
        mm.waiters.iter().any(|waiter| waiter.who == Sleeper::Helper)
    }

    /// Orders work.
    pub fn order(&mut self, op: OpId, command: Command) {
        if self.alive {
            self.queue.push_back(Order { op, command, taken: false, done: 0 });
        } else {
            self.answer(op, 0, CommandOutcome::NoHelper);
        }
    }

    fn answer(&mut self, op: OpId, bytes: u64, outcome: CommandOutcome) {
        self.results.push_back(Event::Commanded { op, bytes, outcome });
    }

    /// Cancels an order unless it was taken.
    pub fn cancel(&mut self, op: OpId) {
        let found = self.queue.iter().position(|order| order.op == op && !order.taken);
        if let Some(index) = found {
            self.queue.remove(index);
            self.answer(op, 0, CommandOutcome::Cancelled);
        }
    }

    /// Ends it. What was taken may be half done, and nobody tells how far.
    pub fn die(&mut self, mm: &mut Mm) {
        self.alive = false;
        self.stalled = false;
        mm.waiters.retain(|waiter| waiter.who != Sleeper::Helper);
        for order in std::mem::take(&mut self.queue) {
            let outcome =
                if order.taken { CommandOutcome::Stopped } else { CommandOutcome::NoHelper };
            self.answer(order.op, 0, outcome);
        }
    }

    /// A new daemon announces its epoch and waits until the helper has taken note: what was taken is
    /// finished, what was not is forgotten, and no result is for the new daemon.
    pub fn new_epoch(&mut self, mm: &mut Mm, frames: &mut Frames) {
        mm.waiters.retain(|waiter| waiter.who != Sleeper::Helper);
        self.queue.retain(|order| order.taken);
        self.stalled = false;
        if !self.queue.is_empty() {
            self.work(mm, frames, u64::MAX, false);
        }
        // Asleep in a fault that nobody will answer: the new daemon interrupts it with a signal.
        mm.waiters.retain(|waiter| waiter.who != Sleeper::Helper);
        self.queue.clear();
        self.results.clear();
    }

    /// The next result, if there is one.
    pub fn take_result(&mut self) -> Option<Event> {
        self.results.pop_front()
    }

    /// Whether a result waits to be seen.
    #[must_use]
    pub fn has_result(&self) -> bool {
        !self.results.is_empty()
    }

    /// Works on at most `pages` pages of the command at the head. `stop` makes a move end early for
    /// no lasting reason.
    pub fn work(&mut self, mm: &mut Mm, frames: &mut Frames, pages: u64, stop: bool) {
        let Some(mut order) = self.queue.pop_front() else { return };
        order.taken = true;
        if stop && matches!(order.command, Command::Move { .. }) {
            self.answer(order.op, order.done, CommandOutcome::Stopped);
            return;
        }
        let page = mm.layout.page_bytes;
        for _ in 0..pages {
            if order.done >= len_of(order.command) {
                break;
            }
            match step(mm, frames, order.command, order.done) {
                Step::On => order.done += page,
                Step::Asleep => {
                    self.queue.push_front(order);
                    return;
                }
                Step::End(outcome) => {
                    self.answer(order.op, order.done, outcome);
                    return;
                }
            }
        }
        if order.done >= len_of(order.command) {
            self.answer(order.op, order.done, CommandOutcome::Done);
        } else {
            self.queue.push_front(order);
        }
    }
}

enum Step {
    On,
    Asleep,
    End(CommandOutcome),
}

const fn len_of(command: Command) -> u64 {
    match command {
        Command::Move { len, .. } => len,
        Command::Drop(span) | Command::Populate(span) => span.len,
    }
}

fn step(mm: &mut Mm, frames: &mut Frames, command: Command, done: u64) -> Step {
    if mm.is_gone() {
        return Step::End(CommandOutcome::Stopped);
    }
    match command {
        Command::Move { from, to, .. } => {
            match mm.move_page(frames, from.plus(done), to.plus(done)) {
                MoveStep::Moved | MoveStep::Hole => Step::On,
                MoveStep::Busy => Step::End(CommandOutcome::Busy),
                MoveStep::Stopped => Step::End(CommandOutcome::Stopped),
            }
        }
        Command::Drop(span) => {
            // Holes are passed over; the call fails with ENOMEM in the end, all else being dropped.
            let there = mm.drop_page(frames, span.start.plus(done));
            let last = done + mm.layout.page_bytes >= span.len;
            if last && (!there || mm.has_hole(span)) {
                Step::End(CommandOutcome::Stopped)
            } else {
                Step::On
            }
        }
        Command::Populate(span) => {
            let at = span.start.plus(done);
            match mm.populate_page(frames, at) {
                PopulateStep::Done => Step::On,
                PopulateStep::Stopped => Step::End(CommandOutcome::Stopped),
                PopulateStep::Asleep { protected } => {
                    let who = Sleeper::Helper;
                    mm.waiters.push(Waiter { who, at, write: true, protected, read: false });
                    Step::Asleep
                }
            }
        }
    }
}
