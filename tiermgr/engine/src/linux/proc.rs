//! One process as the host sees it.
//!
//! Userfaultfds are closed in one place only, [`Proc::close`]: closing the last copy of one turns the
//! program's parked pages into zeros, losing a number costs a number. So everywhere else they leak.

use super::headroom::Headroom;
use super::token::Generation;
use crate::error::EngineError;
use crate::executor::NewProcess;
use crate::state::procs::{NO_FD, ProcEntry};
use std::collections::VecDeque;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;
use tiermgr_core::units::{Addr, OpId, ProcId, Span, Tick};
use tiermgr_sys::cgroup::MemoryGauge;
use tiermgr_sys::helper::FD_RING;
use tiermgr_sys::memory::Pagemap;
use tiermgr_sys::pidfd;
use tiermgr_sys::ring::{Command, RingOwner, RingTicket};
use tiermgr_sys::shm::FileId;
use tiermgr_sys::uffd::Uffd;

/// A process that showed itself, with everything opened and checked that takes a path.
#[derive(Debug)]
pub struct Prepared {
    pub(super) new: NewProcess,
    pub(super) pagemap: Pagemap,
    /// The address space itself, whoever has its numbers by now.
    pub(super) memory: File,
    pub(super) helper_pidfd: OwnedFd,
    pub(super) gauge: Option<MemoryGauge>,
    pub(super) start_time: u64,
    pub(super) helper_start_time: u64,
    pub(super) ring_id: FileId,
}

impl Prepared {
    /// Opens what serving the process takes, and checks that the helper really lives in its address
    /// space (what is read from the helper must never be somebody else's) and serves this very ring: a
    /// process may have several helpers, and the end of one must not pass for the end of another.
    ///
    /// # Errors
    /// [`EngineError::Attach`] where it does not, [`EngineError::Kernel`] where the kernel refuses.
    pub fn open(new: NewProcess) -> Result<Self, EngineError> {
        let pid = new.pid;
        let refuse = |reason| EngineError::Attach { pid, reason };
        if new.pid <= 0 || new.helper_pid <= 0 || new.pid == new.helper_pid {
            return Err(refuse("the process or its helper has no number here"));
        }
        let helper_pidfd =
            pidfd::open(new.helper_pid).map_err(EngineError::kernel("opening the helper"))?;
        let pagemap = Pagemap::open(new.helper_pid)
            .map_err(EngineError::kernel("opening the page table of a client"))?;
        let memory = File::open(format!("/proc/{}/mem", new.helper_pid))
            .map_err(EngineError::kernel("opening the memory of a client"))?;
        let gauge = MemoryGauge::open(new.pid)
            .inspect_err(|error| {
                tracing::warn!(%error, pid, "the memory cgroup of a client cannot be watched");
            })
            .ok();
        // Last: had the numbers been reused while we opened, the processes would differ now.
        if !pidfd::same_memory(new.pid, new.helper_pid)
            .map_err(EngineError::kernel("comparing a client with its helper"))?
        {
            return Err(refuse("the helper does not live in the memory of the process"));
        }
        let ring_id = FileId::of(new.ring.memfd())
            .map_err(EngineError::kernel("looking at the ring of a client"))?;
        let held =
            pidfd::getfd(helper_pidfd.as_fd(), FD_RING).and_then(|fd| FileId::of(fd.as_fd()));
        if held.map_err(EngineError::kernel("looking for the ring of a helper"))? != ring_id {
            return Err(refuse("the helper serves another ring than the one it was given"));
        }
        let start =
            |pid| pidfd::start_time(pid).map_err(EngineError::kernel("looking at a client"));
        let (start_time, helper_start_time) = (start(new.pid)?, start(new.helper_pid)?);
        Ok(Self {
            new,
            pagemap,
            memory,
            helper_pidfd,
            gauge,
            start_time,
            helper_start_time,
            ring_id,
        })
    }

    /// The process.
    #[must_use]
    pub const fn process(&self) -> &NewProcess {
        &self.new
    }

    /// The process, to drive its helper before it is handed over.
    pub const fn process_mut(&mut self) -> &mut NewProcess {
        &mut self.new
    }
}

/// What only a process has that showed itself.
#[derive(Debug)]
pub(super) struct Attached {
    /// `None` where the process was gone before a restart.
    pub(super) pidfd: Option<OwnedFd>,
    pub(super) exited: bool,
    pub(super) helper_pid: i32,
    /// `None` where the helper was gone before a restart.
    pub(super) helper_pidfd: Option<OwnedFd>,
    pub(super) helper_alive: bool,
    /// The ring was scribbled over: the helper has been killed, and nothing that the ring says counts.
    pub(super) ring_broken: bool,
    pub(super) limbo_fd: ManuallyDrop<Uffd>,
    pub(super) limbo: Span,
    pub(super) ring: RingOwner,
    pub(super) ring_polled: bool,
    /// Polls of the two pidfds are under way.
    pub(super) exit_polled: bool,
    pub(super) helper_exit_polled: bool,
    /// Ordered, and not in the ring yet.
    pub(super) queue: VecDeque<(OpId, Command)>,
    /// In the ring, oldest first.
    pub(super) running: VecDeque<(RingTicket, OpId, u64)>,
    pub(super) pagemap: Pagemap,
    pub(super) memory: File,
    pub(super) headroom: Headroom,
}

impl Attached {
    /// Whether the program has ended, now that a poll of its pidfd has.
    pub(super) fn has_exited(&mut self) -> bool {
        self.exit_polled = false;
        self.exited |= self.pidfd.as_ref().is_some_and(has_ended);
        self.exited
    }

    /// The same for the helper.
    pub(super) fn has_helper_exited(&mut self) -> bool {
        self.helper_exit_polled = false;
        self.helper_pidfd.as_ref().is_some_and(has_ended)
    }

    /// Ends the helper at once. Its commands are answered when its pidfd says that it is dead.
    pub(super) fn kill_helper(&self) {
        if let Some(helper) = &self.helper_pidfd
            && let Err(error) = pidfd::send_signal(helper.as_fd(), libc::SIGKILL)
            && error.raw_os_error() != Some(libc::ESRCH)
        {
            tracing::error!(%error, helper = self.helper_pid, "ending a helper");
        }
    }
}

/// A poll may also end because it failed.
pub(super) fn has_ended(process: &OwnedFd) -> bool {
    matches!(pidfd::wait(process.as_fd(), Duration::ZERO), Ok(true))
}

/// One process of the family.
#[derive(Debug)]
pub(super) struct Proc {
    pub(super) id: ProcId,
    pub(super) generation: Generation,
    pub(super) entry: ProcEntry,
    pub(super) arena: ManuallyDrop<Uffd>,
    pub(super) attached: Option<Attached>,
    pub(super) nonce_page: Addr,
    /// Messages that were read and not retired.
    pub(super) batch: usize,
    /// A poll of the arenas is under way.
    pub(super) arena_polled: bool,
    /// A poll said that there are messages.
    pub(super) readable: bool,
    /// The connection has ended: whether the program still runs is to be looked at.
    pub(super) disconnected: bool,
    /// Poisoning that a layout change delayed.
    pub(super) to_poison: Vec<Span>,
    /// The log has said that mappings which are none of ours lie in its memory.
    pub(super) told_foreign: bool,
    /// The log has said that its helper has gone.
    pub(super) told_helper: bool,
    /// It has touched lost bytes that this kernel cannot poison.
    pub(super) touched_lost: Option<TouchedLost>,
}

/// What becomes of a program that touched lost bytes where the kernel cannot poison them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TouchedLost {
    /// It has not shown itself: its thread waits until it can be ended.
    Waits,
    /// It was sent SIGBUS, and is killed at this time.
    Signalled(Tick),
    /// It was killed.
    Killed,
}

impl Proc {
    /// A process with its userfaultfd and nothing else: a forked child.
    pub(super) fn child(id: ProcId, generation: Generation, parent: &Self, arena: Uffd) -> Self {
        let entry = ProcEntry {
            proc: id,
            parent: parent.id,
            arena_fd: arena.as_fd().as_raw_fd(),
            limbo_fd: NO_FD,
            ring_fd: NO_FD,
            ring_event_fd: NO_FD,
            nonce_page: parent.nonce_page.0,
            table: parent.entry.table,
            ..ProcEntry::default()
        };
        Self::bare(entry, generation, arena)
    }

    /// A process that its entry describes, not attached.
    pub(super) fn bare(entry: ProcEntry, generation: Generation, arena: Uffd) -> Self {
        Self {
            id: entry.proc,
            generation,
            entry,
            arena: ManuallyDrop::new(arena),
            attached: None,
            nonce_page: Addr(entry.nonce_page),
            batch: 0,
            arena_polled: false,
            readable: true,
            disconnected: false,
            to_poison: Vec::new(),
            told_foreign: false,
            told_helper: false,
            touched_lost: None,
        }
    }

    /// Adds what the process showed. Its arenas, if it brought any, have been taken out before.
    pub(super) fn attach(&mut self, prepared: Prepared) {
        let Prepared {
            new,
            pagemap,
            memory,
            helper_pidfd,
            gauge,
            start_time,
            helper_start_time,
            ring_id,
        } = prepared;
        self.entry = ProcEntry {
            pid: new.pid,
            start_time,
            helper_pid: new.helper_pid,
            helper_start_time,
            limbo_fd: new.limbo_fd.as_raw_fd(),
            ring_fd: new.ring.memfd().as_raw_fd(),
            ring_event_fd: new.ring.eventfd().as_raw_fd(),
            ring_id,
            nonce_page: new.nonce_page.0,
            limbo: new.limbo,
            ..self.entry
        };
        self.nonce_page = new.nonce_page;
        new.ring.begin_service();
        self.attached = Some(Attached {
            pidfd: Some(new.pidfd),
            exited: false,
            helper_pid: new.helper_pid,
            helper_pidfd: Some(helper_pidfd),
            helper_alive: true,
            ring_broken: false,
            limbo_fd: ManuallyDrop::new(Uffd::from_fd(new.limbo_fd)),
            limbo: new.limbo,
            ring: new.ring,
            ring_polled: false,
            exit_polled: false,
            helper_exit_polled: false,
            queue: VecDeque::new(),
            running: VecDeque::new(),
            pagemap,
            memory,
            headroom: Headroom::new(gauge),
        });
    }

    /// Whether the log is to say that the helper has gone.
    pub(super) fn lacks_helper_untold(&self) -> bool {
        !self.told_helper && self.is_without_helper()
    }

    /// Whether the program lives, as far as is known, and its helper does not.
    pub(super) fn is_without_helper(&self) -> bool {
        let lost = |attached: &Attached| {
            !attached.helper_alive && !attached.exited && attached.pidfd.is_some()
        };
        !self.entry.gone && self.attached.as_ref().is_some_and(lost)
    }

    /// Closes everything: nothing of the process needs us any more.
    pub(super) fn close(self) {
        drop(ManuallyDrop::into_inner(self.arena));
        if let Some(attached) = self.attached {
            attached.ring.stop();
            if self.entry.gone {
                // A helper that is stopped does not look, and would keep the memory of a program that has ended.
                attached.kill_helper();
            }
            drop(ManuallyDrop::into_inner(attached.limbo_fd));
        }
    }
}
