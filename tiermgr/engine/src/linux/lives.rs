//! Who joins the family, and who has left it.
//!
//! A client's end is told by its pidfd. A child that has not shown itself has only its descriptor,
//! which never signals: it is looked at from time to time, by an ioctl that changes nothing.

use super::proc::{Prepared, Proc, has_ended};
use super::token::Token;
use super::{LOOK_NS, LinuxHost};
use crate::error::EngineError;
use crate::state::procs::ProcEntry;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use tiermgr_core::event::Event;
use tiermgr_core::units::{ProcId, Tick};
use tiermgr_sys::pidfd;
use tiermgr_sys::shm::eventfd_drain;
use tiermgr_sys::uffd::{Mode, Outcome, Uffd};

impl LinuxHost {
    /// Takes a client into service.
    pub(super) fn attach(
        &mut self,
        mut prepared: Prepared,
        events: &mut Vec<Event>,
    ) -> Result<ProcId, EngineError> {
        let pid = prepared.new.pid;
        let Some(arena) = prepared.new.arena.take().map(Uffd::from_fd) else {
            return Err(EngineError::Attach { pid, reason: "it brings no userfaultfd" });
        };
        // From here on the descriptor guards nothing yet: an error may close it.
        let nonce_page = prepared.new.nonce_page;
        arena
            .register(nonce_page.0, self.page_bytes, Mode::MISSING)
            .map_err(EngineError::kernel("registering the nonce page of a client"))?;
        let id = self.procs.next_id().ok_or(EngineError::TooManyProcesses)?;
        let entry = ProcEntry {
            proc: id,
            arena_fd: arena.as_fd().as_raw_fd(),
            nonce_page: nonce_page.0,
            born: true,
            table: self.config.table,
            ..ProcEntry::default()
        };
        self.state.reserve(id)?;
        self.state.messages.prepare(id)?;
        self.procs.insert(Proc::bare(entry, self.procs.generation(id), arena));
        self.served = true;
        self.complete(id, prepared, events);
        Ok(id)
    }

    /// The child has shown who it is. Gives another descriptor of its userfaultfd.
    pub(super) fn adopt_child(
        &mut self,
        child: ProcId,
        prepared: Prepared,
        events: &mut Vec<Event>,
    ) -> Result<OwnedFd, EngineError> {
        let known = self.procs.get(child).ok_or(EngineError::NoProcess(child))?;
        if known.attached.is_some() || known.entry.gone {
            let reason = "another process has shown itself as this child";
            return Err(EngineError::Attach { pid: prepared.new.pid, reason });
        }
        let arena = self.arena_of(child)?;
        self.complete(child, prepared, events);
        Ok(arena)
    }

    /// Another descriptor of the userfaultfd of a process.
    pub(super) fn arena_of(&self, proc: ProcId) -> Result<OwnedFd, EngineError> {
        let known = self.procs.get(proc).ok_or(EngineError::NoProcess(proc))?;
        let arena =
            known.arena.try_clone().map_err(EngineError::kernel("duplicating a userfaultfd"))?;
        Ok(arena.into_fd())
    }

    fn complete(&mut self, id: ProcId, prepared: Prepared, events: &mut Vec<Event>) {
        let Some(known) = self.procs.get_mut(id) else { return };
        known.attach(prepared);
        self.state.procs.put(&known.entry);
        self.tell_ready(id, events);
        self.join_cap(id);
        self.signal_for_lost_bytes(id, self.tick());
    }

    /// Tells the manager of a process that has shown itself, and watches for its end.
    pub(super) fn tell_ready(&mut self, id: ProcId, events: &mut Vec<Event>) {
        let Some(known) = self.procs.get(id) else { return };
        let Some(attached) = &known.attached else { return };
        events.push(Event::ProcReady { proc: id, limbo: attached.limbo });
        // An end is to be heard of also while faults leave no time to sleep.
        self.arm_polls();
        self.io.submit();
    }

    /// Bounds the family by what the cgroup of a process has room for, beside what is known to be touched.
    pub(super) fn join_cap(&mut self, id: ProcId) {
        let attached = self.procs.get(id).and_then(|known| known.attached.as_ref());
        if let Some(room) = attached.and_then(|attached| attached.headroom.room()) {
            let share = self.config.share.budget();
            self.cap.joined(self.tick(), room, self.touched_bytes, share);
            self.tell_budget();
        }
    }

    /// A child has got its parent's table.
    pub(super) fn note_birth(&mut self, id: ProcId) {
        if let Some(known) = self.procs.get_mut(id) {
            known.entry.born = true;
            self.state.procs.put(&known.entry);
        }
    }

    /// Puts a nonce into the nonce page of each child that has not shown itself, and says which.
    pub(super) fn put_nonces(&mut self, seed: u128) -> Vec<(ProcId, u128)> {
        let mut page = vec![0; usize::try_from(self.page_bytes).unwrap_or(4096)];
        let mut placed = Vec::new();
        for (at, known) in (0..).zip(self.procs.iter()) {
            if known.attached.is_some() || known.entry.gone {
                continue;
            }
            let nonce = seed.wrapping_add(at);
            if let Some(place) = page.get_mut(..16) {
                place.copy_from_slice(&nonce.to_ne_bytes());
            }
            if known.arena.copy(known.nonce_page.0, &page, false, true).outcome == Outcome::Done {
                placed.push((known.id, nonce));
            }
        }
        placed
    }

    /// Forgets a process: nothing of it needs us any more.
    pub(super) fn release(&mut self, id: ProcId) {
        let Some(proc) = self.procs.remove(id) else { return };
        // The entry goes first: it must never name descriptors that are somebody else's by then.
        self.state.procs.remove(id);
        self.state.messages.retire(id, proc.batch);
        let generation = proc.generation;
        if proc.arena_polled {
            self.io.poll_cancel(Token::Arena(id, generation));
        }
        if let Some(attached) = &proc.attached {
            if attached.ring_polled {
                self.io.poll_cancel(Token::Ring(id, generation));
            }
            if attached.exit_polled {
                self.io.poll_cancel(Token::Exit(id, generation));
            }
            if attached.helper_exit_polled {
                self.io.poll_cancel(Token::HelperExit(id, generation));
            }
        }
        self.io.submit();
        self.pending.retain(|_, pending| pending.proc != id);
        proc.close();
    }

    /// Forgets all processes that have been drained. Gives how many are kept: children that were forked
    /// meanwhile, and those whose fork is being followed.
    pub(super) fn release_all(&mut self) -> usize {
        let mut kept = 0;
        for id in self.procs.live().to_vec() {
            let unborn = self.procs.get(id).is_some_and(|known| !known.entry.born);
            let forking =
                self.procs.iter().any(|known| !known.entry.born && known.entry.parent == id);
            // A drain ends with the regions.
            let needs_us = unborn || forking || self.state.regions.count_of(id) > 0;
            if needs_us || !self.stop_forks(id) {
                kept += 1;
            } else {
                self.release(id);
            }
        }
        kept
    }

    /// Makes forks of a drained process nobody's business. The nonce page is the last of its memory
    /// that is registered, and as long as that is so each fork waits until its message has been read:
    /// by whom, once we have gone? False where such a message waits already.
    fn stop_forks(&self, id: ProcId) -> bool {
        let Some(known) = self.procs.get(id) else { return true };
        if let Err(error) = known.arena.unregister(known.nonce_page.0, self.page_bytes) {
            tracing::debug!(%error, proc = id.0, "the nonce page of a process is gone");
        }
        if self.look(known) != Outcome::EventsPending {
            return true;
        }
        if let Err(error) = known.arena.register(known.nonce_page.0, self.page_bytes, Mode::MISSING)
        {
            tracing::debug!(%error, proc = id.0, "the nonce page of a process is gone");
        }
        false
    }

    /// Tells the manager, once, that a process has ended.
    pub(super) fn tell_gone(&mut self, id: ProcId, events: &mut Vec<Event>) {
        let Some(known) = self.procs.get_mut(id) else { return };
        if !known.entry.gone {
            known.entry.gone = true;
            self.state.procs.put(&known.entry);
            events.push(Event::ProcGone { proc: id });
        }
    }

    /// Whether there is a process that can end without a word.
    pub(super) fn needs_looks(&self) -> bool {
        self.procs.iter().any(is_to_be_looked_at)
    }

    /// Looks whether those live that cannot tell us that they end.
    pub(super) fn look_at_lives(&mut self, now: Tick, events: &mut Vec<Event>) {
        self.next_look = now.after_ns(LOOK_NS);
        let mut at = 0;
        while let Some(&id) = self.procs.live().get(at) {
            at += 1;
            let ended = self.procs.get(id).is_some_and(|known| {
                is_to_be_looked_at(known)
                    && (self.look(known) == Outcome::NoProcess || has_new_image(known))
            });
            if ended {
                self.tell_gone(id, events);
            } else {
                self.note_lost_helper(id);
            }
        }
    }

    /// Programs that live and whose helper does not. One that has disconnected has ended it, and has nothing left
    /// that could be moved.
    pub(crate) fn without_helper(&self) -> u64 {
        let lost =
            |known: &Proc| known.is_without_helper() && self.state.regions.count_of(known.id) > 0;
        self.procs.iter().map(|known| u64::from(lost(known))).sum()
    }

    /// Says, once, what has become of a program whose helper has gone.
    fn note_lost_helper(&mut self, id: ProcId) {
        let Some(known) = self.procs.get_mut(id).filter(|known| known.lacks_helper_untold()) else {
            return;
        };
        let process = known.attached.as_ref().and_then(|attached| attached.pidfd.as_ref());
        if process.is_none_or(has_ended) || self.state.regions.count_of(id) == 0 {
            return;
        }
        known.told_helper = true;
        tracing::warn!(
            family = self.config.family,
            pid = known.entry.pid,
            helper = known.entry.helper_pid,
            "the helper of a program has gone: the program's memory moves no more, and the limit does not hold \
             for it until it is started again"
        );
        let helper = known.attached.as_ref().and_then(|attached| attached.helper_pidfd.as_ref());
        if helper.is_none_or(has_ended) {
            known.entry.helper_pid = 0;
            self.state.procs.put(&known.entry);
        }
    }

    /// The helper answered while we slept.
    pub(super) fn ring_signalled(known: &mut Proc) {
        if let Some(attached) = &mut known.attached {
            attached.ring_polled = false;
            // Empty where an earlier drain took several signals at once.
            drop(eventfd_drain(attached.ring.eventfd()));
        }
    }

    /// Says to the helpers that have work whether we want to be woken.
    pub(super) fn set_rings_sleeping(&mut self, sleeping: bool) {
        for at in 0..self.procs.live().len() {
            if let Some(attached) = self.procs.live_at(at).and_then(|known| known.attached.as_ref())
                && !attached.running.is_empty()
            {
                attached.ring.set_sleeping(sleeping);
            }
        }
    }
}

fn is_to_be_looked_at(known: &Proc) -> bool {
    let is_silent = known.attached.is_none() || known.disconnected;
    !known.entry.gone && (is_silent || known.lacks_helper_untold())
}

/// Whether the process has become another program: its helper, left behind in the old memory, no
/// longer shares its address space.
fn has_new_image(known: &Proc) -> bool {
    let Some(attached) = &known.attached else { return false };
    let (pid, helper) = (known.entry.pid, attached.helper_pid);
    !attached.exited
        && attached.helper_alive
        // Of two looks the first one costs less, and mostly says that all is well.
        && !pidfd::threads_share_memory(pid, helper)
        && matches!(pidfd::same_memory(pid, helper), Ok(false))
}
