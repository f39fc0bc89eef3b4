//! Work that only the helper inside a process can do.
//!
//! The ring holds a fixed number of commands; what does not fit waits here, in order. What a helper
//! answers is bounded by what it was asked, and otherwise believed: a client that lies about its own
//! memory harms its own memory.

use super::LinuxHost;
use super::memory::outcome_of;
use super::proc::{Attached, Proc};
use tiermgr_core::effect::Command;
use tiermgr_core::event::{CommandOutcome, Event, IoctlOutcome};
use tiermgr_core::units::{Addr, OpId, ProcId};
use tiermgr_sys::ring::{self, Completion};

impl LinuxHost {
    pub(super) fn command(&mut self, op: OpId, proc: ProcId, command: Command) {
        let has_helper = self.procs.get(proc).is_some_and(|known| {
            known.attached.as_ref().is_some_and(|attached| attached.helper_alive)
        });
        if let Command::Move { from, len, .. } = command
            && has_helper
        {
            let outcome = self.prove_registered(proc, from, len);
            if outcome != IoctlOutcome::Done {
                self.read_if_pending(proc, outcome);
                let outcome = CommandOutcome::Stopped;
                self.outcomes.push(Event::Commanded { op, bytes: 0, outcome });
                return;
            }
        }
        let attached = self.procs.get_mut(proc).and_then(|known| known.attached.as_mut());
        match attached {
            Some(attached) if attached.helper_alive => {
                let command = ring_command(command);
                attached.queue.push_back((op, command));
                fill_ring(attached);
            }
            _ => {
                let outcome = CommandOutcome::NoHelper;
                self.outcomes.push(Event::Commanded { op, bytes: 0, outcome });
            }
        }
    }

    /// A move looks at its destination alone: it would take pages from whatever a program has put at an
    /// address that was its region's (a mapping that REGISTER refused, or one of a child that did not get
    /// this memory from its parent), and whose next touch nobody would hear of. Write protection is
    /// refused there. On memory that is ours a move drops it; a page that the move refuses keeps it, and
    /// its next write is one fault more.
    fn prove_registered(&mut self, proc: ProcId, from: Addr, len: u64) -> IoctlOutcome {
        let Some(known) = self.procs.get_mut(proc) else { return IoctlOutcome::NoProcess };
        let outcome = outcome_of(known.arena.protect(from.0, len, true, false));
        if outcome == IoctlOutcome::NoRange && !known.told_foreign {
            known.told_foreign = true;
            tracing::warn!(
                pid = known.entry.pid,
                start = format_args!("{from:?}"),
                bytes = len,
                "memory of a program cannot leave DRAM: another mapping lies in it, or the program has \
                 registered it with a userfaultfd of its own"
            );
        }
        outcome
    }

    pub(super) fn cancel(&mut self, op: OpId, proc: ProcId) {
        let attached = self.procs.get_mut(proc).and_then(|known| known.attached.as_mut());
        let Some(attached) = attached else { return };
        if let Some(at) = attached.queue.iter().position(|&(queued, _)| queued == op) {
            attached.queue.remove(at);
            let outcome = CommandOutcome::Cancelled;
            self.outcomes.push(Event::Commanded { op, bytes: 0, outcome });
        } else if let Some(&(ticket, ..)) =
            attached.running.iter().find(|&&(_, running, _)| running == op)
        {
            // Taken or not, the ring answers in its own time.
            attached.ring.cancel(ticket);
        }
    }

    /// Takes what the helper of `known` has answered.
    pub(super) fn reap_commands(known: &mut Proc, events: &mut Vec<Event>) {
        let Some(attached) = known.attached.as_mut() else { return };
        if attached.ring_broken {
            return;
        }
        while !attached.running.is_empty() {
            match attached.ring.poll() {
                Ok(None) => break,
                Ok(Some((ticket, completion))) => {
                    let found = attached.running.iter().position(|&(known, ..)| known == ticket);
                    if let Some((_, op, len)) = found.and_then(|at| attached.running.remove(at)) {
                        events.push(commanded(op, len, completion));
                    }
                }
                Err(error) => {
                    // The client has scribbled over the ring. Once the helper is dead nothing of it
                    // runs any more, and its commands can be answered.
                    tracing::error!(%error, pid = known.entry.pid, "ending a helper");
                    attached.kill_helper();
                    attached.ring_broken = true;
                    return;
                }
            }
        }
        fill_ring(attached);
    }

    /// The helper is dead: answers everything that it was asked.
    pub(super) fn helper_died(known: &mut Proc, events: &mut Vec<Event>) {
        let Some(attached) = known.attached.as_mut() else { return };
        attached.helper_alive = false;
        // What it finished before it died is still there to be read.
        while !attached.ring_broken
            && let Ok(Some((ticket, completion))) = attached.ring.poll()
        {
            let found = attached.running.iter().position(|&(known, ..)| known == ticket);
            if let Some((_, op, len)) = found.and_then(|at| attached.running.remove(at)) {
                events.push(commanded(op, len, completion));
            }
        }
        attached.ring.forget_all();
        // Of the oldest a part may have happened, and of the others everything where the ring, which the
        // client can write to, does not say so: what came of each is looked up page by page.
        for (_, op, _) in attached.running.drain(..) {
            let outcome = CommandOutcome::Stopped;
            events.push(Event::Commanded { op, bytes: 0, outcome });
        }
        for (op, _) in attached.queue.drain(..) {
            events.push(Event::Commanded { op, bytes: 0, outcome: CommandOutcome::NoHelper });
        }
    }
}

const fn ring_command(command: Command) -> ring::Command {
    match command {
        Command::Move { from, to, len } => ring::Command::Move { dst: to.0, src: from.0, len },
        Command::Drop(span) => ring::Command::Drop { start: span.start.0, len: span.len },
        Command::Populate(span) => ring::Command::Populate { start: span.start.0, len: span.len },
    }
}

fn fill_ring(attached: &mut Attached) {
    while let Some(&(op, command)) = attached.queue.front() {
        // Full, or an epoch that is not acknowledged yet: later.
        let Ok(ticket) = attached.ring.push(command) else { break };
        attached.queue.pop_front();
        attached.running.push_back((ticket, op, command.len()));
    }
}

fn commanded(op: OpId, len: u64, completion: Completion) -> Event {
    let (bytes, outcome) = match completion {
        Completion::Cancelled => (0, CommandOutcome::Cancelled),
        Completion::Done { errno: 0, .. } => (len, CommandOutcome::Done),
        Completion::Done { bytes, errno } => {
            let outcome =
                if errno == libc::EBUSY { CommandOutcome::Busy } else { CommandOutcome::Stopped };
            (bytes.min(len), outcome)
        }
    };
    Event::Commanded { op, bytes, outcome }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_never_more_than_was_asked() {
        let done = |bytes, errno| commanded(OpId(1), 4096, Completion::Done { bytes, errno });
        let event = |bytes, outcome| Event::Commanded { op: OpId(1), bytes, outcome };
        assert_eq!(done(4096, 0), event(4096, CommandOutcome::Done));
        assert_eq!(done(u64::MAX, libc::EBUSY), event(4096, CommandOutcome::Busy));
        assert_eq!(done(0, libc::EEXIST), event(0, CommandOutcome::Stopped));
    }
}
