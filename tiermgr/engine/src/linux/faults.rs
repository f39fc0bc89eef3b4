//! Reads userfaultfd messages and orders them.
//!
//! The kernel hands out waiting faults before waiting events, whatever came first. So: read what
//! there is, then FORK, then UNMAP and REMAP, and faults last.

use super::LinuxHost;
use super::proc::Proc;
use super::token::Token;
use crate::error::EngineError;
use crate::state::messages::MESSAGES_MAX;
use std::os::fd::{AsFd, IntoRawFd, RawFd};
use tiermgr_core::event::Event;
use tiermgr_core::units::{Addr, ProcId, Span};
use tiermgr_sys::uffd::{Message, Uffd};

/// Processes whose descriptors are read without asking a poll first.
const READ_UNASKED_MAX: usize = 4;

impl LinuxHost {
    /// Forgets the messages of the last turn: their effects have begun.
    pub(super) fn retire_messages(&mut self) {
        for at in 0..self.procs.live().len() {
            let Some(known) = self.procs.live_at(at) else { continue };
            if known.batch > 0 {
                self.state.messages.retire(known.id, known.batch);
                known.batch = 0;
            }
        }
    }

    /// Reads what the processes of the family have queued.
    pub(super) fn read_messages(&mut self, events: &mut Vec<Event>) {
        let unasked = self.procs.live().len() <= READ_UNASKED_MAX;
        let mut at = 0;
        // By position: a FORK adds a process at the end, and it has messages of its own to read.
        while let Some(known) = self.procs.live_at(at) {
            at += 1;
            if known.batch > 0 {
                continue;
            }
            let polled = std::mem::take(&mut known.readable);
            if !(polled || unasked && !known.entry.gone) {
                continue;
            }
            match self.state.messages.read(known.id, &known.arena) {
                Ok(0) => {}
                Ok(count) => {
                    known.batch = count;
                    // There may be more than fits.
                    known.readable = true;
                    let id = known.id;
                    self.step_messages(id, count, events);
                }
                Err(error) => {
                    tracing::error!(%error, pid = known.entry.pid, "reading a userfaultfd");
                }
            }
        }
    }

    /// Steps the messages that an earlier daemon had read from `proc` and not retired.
    pub(super) fn replay_messages(&mut self, proc: ProcId, events: &mut Vec<Event>) {
        if let Some(known) = self.procs.get_mut(proc) {
            known.batch = MESSAGES_MAX;
            self.step_messages(proc, MESSAGES_MAX, events);
        }
    }

    fn step_messages(&mut self, id: ProcId, count: usize, events: &mut Vec<Event>) {
        let mut others = 0;
        for at in 0..count {
            match self.message(id, at) {
                Some(Message::Fork { fd }) => self.forked(id, fd, events),
                Some(_) => others += 1,
                None => {}
            }
        }
        if others == 0 {
            return;
        }
        for at in 0..count {
            let (start, len) = match self.message(id, at) {
                Some(Message::Remap { from, len, .. }) => (from, len),
                Some(Message::Unmap { start, end } | Message::Remove { start, end }) => {
                    (start, end.saturating_sub(start))
                }
                _ => continue,
            };
            events.push(Event::Unmapped { proc: id, span: Span::new(Addr(start), len) });
        }
        for at in 0..count {
            if let Some(Message::Pagefault { address, write, wp, .. }) = self.message(id, at) {
                self.faulted(id, Addr(address), write, wp, events);
            }
        }
    }

    fn message(&self, id: ProcId, at: usize) -> Option<Message> {
        self.state.messages.get(id, at)?.parse()
    }

    fn faulted(&mut self, id: ProcId, at: Addr, write: bool, wp: bool, events: &mut Vec<Event>) {
        let Some(known) = self.procs.get(id) else { return };
        if at.align_down(self.page_bytes) == known.nonce_page {
            self.serve_nonce_page(known);
            return;
        }
        events.push(Event::Faulted { proc: id, at, write, protected: wp });
    }

    /// Takes the descriptor of a forked child into service. The kernel has installed it before the
    /// message could be read.
    fn forked(&mut self, parent: ProcId, fd: RawFd, events: &mut Vec<Event>) {
        if self.procs.child_with(parent, fd).is_some() {
            // This is a replay, and whoever began it has told of the child already.
            return;
        }
        let Some(arena) = adopt(fd) else { return };
        let child = self.procs.next_id();
        let (Some(child), Some(known)) = (child, self.procs.get(parent)) else {
            return leave_open(arena, &EngineError::TooManyProcesses);
        };
        if let Err(error) = self.state.reserve(child) {
            return leave_open(arena, &error);
        }
        let proc = Proc::child(child, self.procs.generation(child), known, arena);
        if let Err(error) = self.state.messages.prepare(child) {
            tracing::warn!(%error, "a forked process is served from memory that can be swapped out");
        }
        self.state.procs.put(&proc.entry);
        self.procs.insert(proc);
        events.push(Event::Forked { parent, child });
    }

    /// Arms the polls that a sleep needs. `false`: there was no room for all.
    pub(super) fn arm_polls(&mut self) -> bool {
        let mut all = true;
        for at in 0..self.procs.live().len() {
            let Some(known) = self.procs.live_at(at) else { continue };
            if !known.arena_polled && !known.entry.gone {
                let token = Token::Arena(known.id, known.generation);
                known.arena_polled = self.io.poll(known.arena.as_fd(), token);
                // More polls than the ring holds: those left out are read unasked.
                known.readable |= !known.arena_polled;
                all &= known.arena_polled;
            }
            let Some(attached) = &mut known.attached else { continue };
            if !attached.ring_polled && attached.helper_alive {
                let token = Token::Ring(known.id, known.generation);
                attached.ring_polled = self.io.poll(attached.ring.eventfd(), token);
                all &= attached.ring_polled;
            }
            if let Some(process) = attached.pidfd.as_ref().filter(|_| !attached.exited)
                && !attached.exit_polled
            {
                let token = Token::Exit(known.id, known.generation);
                attached.exit_polled = self.io.poll(process.as_fd(), token);
                all &= attached.exit_polled;
            }
            if let Some(helper) = attached.helper_pidfd.as_ref().filter(|_| attached.helper_alive)
                && !attached.helper_exit_polled
            {
                let token = Token::HelperExit(known.id, known.generation);
                attached.helper_exit_polled = self.io.poll(helper.as_fd(), token);
                all &= attached.helper_exit_polled;
            }
        }
        if !self.wake_polled
            && let Some(event) = self.mailbox.wake().event()
        {
            self.wake_polled = self.io.poll(event, Token::Wake);
            all &= self.wake_polled;
        }
        all
    }
}

/// Of a forked child that cannot be served. Closing its descriptor would turn its parked pages into zeros;
/// left open, the child waits at the first of them.
fn leave_open(arena: Uffd, error: &EngineError) {
    let fd = arena.into_fd().into_raw_fd();
    tracing::error!(%error, fd, "a forked process cannot be served");
}

#[expect(unsafe_code, reason = "a descriptor arrives as a number in a message")]
fn adopt(fd: RawFd) -> Option<Uffd> {
    // SAFETY: `fd` stands in a FORK message that the kernel wrote into memory that only the daemon
    // maps. The kernel installed it for the reader of that message, which is us (or an earlier daemon
    // that shared our table): nobody else owns it.
    match unsafe { Uffd::adopt(fd) } {
        Ok(arena) => Some(arena),
        Err(error) => {
            tracing::error!(%error, fd, "the descriptor of a forked process");
            None
        }
    }
}
