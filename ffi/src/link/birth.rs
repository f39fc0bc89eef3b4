//! Children that are forked while a call speaks to the daemon.
//!
//! A signal handler may fork while its thread is inside a request, with the lock of the link. The child goes on with
//! that request when its handler returns, and what it finds is its parent's: the connection, on which an answer
//! comes that is its parent's too. So a request takes signals only while it waits, and looks whose process it is
//! before it sends or receives. A child that makes none joins as it gives the lock back. One whose handler never returns
//! cannot: its pages are served for as long as the daemon or its parent keep them.

use super::talk::{Limit, Undisturbed, left};
use super::{ATTACH_WAIT, CHILD_WAIT, Connection, Link, RETRY_NS_MIN, may_come_back, nanoseconds};
use crate::cancel::Uncancelled;
use crate::fds::{self, Fd};
use crate::sandbox::{self, Deed};
use crate::space;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;
use tiermgr_sys::process::{monotonic_ns, nap};
use tiermgr_sys::uffd::{self, Mode, Uffd};

const NONE: i32 = -1;

/// What the handlers of a fork may use of a link that its thread is inside of.
#[derive(Debug)]
pub(crate) struct Birth {
    /// Makes userfaultfds that the daemon has no part in, by an ioctl: programs may be forbidden the system call.
    device: Fd,
    nonce_page: usize,
    /// Whether our memory was armed when this process, or its parent, was last about to fork.
    was_armed: AtomicBool,
    /// A child that was forked inside a call.
    newborn: AtomicI32,
}

impl Birth {
    pub(super) const fn new(device: Fd, nonce_page: usize) -> Self {
        Self {
            device,
            nonce_page,
            was_armed: AtomicBool::new(false),
            newborn: AtomicI32::new(NONE),
        }
    }

    pub(super) const fn nonce_page(&self) -> usize {
        self.nonce_page
    }

    pub(super) fn was_armed(&self) -> bool {
        self.was_armed.load(Ordering::Relaxed)
    }

    /// Before a fork: notes whether there is something that a child must not lose.
    pub(crate) fn note_armed(&self) {
        let _uncancelled = Uncancelled::new();
        let is_armed = sandbox::may(Deed::Look) && matches!(self.take_nonce_page(), Ok(None));
        self.was_armed.store(is_armed, Ordering::Relaxed);
    }

    /// In a child whose thread is inside the link, before it goes on there.
    pub(crate) fn begin_inside(&self) {
        self.newborn.store(fds::own_pid(), Ordering::Relaxed);
    }

    /// Whether this process is a child that was forked inside a call, and no child of that one.
    pub(crate) fn is_newborn(&self) -> bool {
        let newborn = self.newborn.load(Ordering::Relaxed);
        // Mostly there is none, and no need of a system call.
        newborn != NONE && newborn == fds::own_pid()
    }

    /// The child has the link for its own.
    pub(super) fn end_inside(&self) {
        self.newborn.store(NONE, Ordering::Relaxed);
    }

    /// A userfaultfd of our own that has the nonce page, unless that is armed by the daemon's.
    pub(super) fn take_nonce_page(&self) -> io::Result<Option<Uffd>> {
        if !self.device.is_intact() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let fd = uffd::new_from_device(self.device.as_fd())?;
        uffd::handshake(fd.as_fd(), 0)?;
        let own = Uffd::from_fd(fd);
        let bytes = space::page_bytes() as u64;
        match own.register(self.nonce_page as u64, bytes, Mode::MISSING) {
            Ok(_) => Ok(Some(own)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Which process this is, to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// That whose link it is.
    Own,
    /// A child, forked inside a call: the link is to become its own.
    Newborns,
    /// Another, of which nobody told us.
    Strangers,
}

impl Link {
    pub(super) fn whose(&self) -> Whose {
        if fds::is_settled(self.pid) {
            Whose::Own
        } else if self.birth.is_newborn() {
            Whose::Newborns
        } else {
            Whose::Strangers
        }
    }

    /// In a forked child: leaves what is the parent's, and joins its family. Where the daemon does
    /// not answer in time the child goes on without a helper: its pages are served and do not park.
    pub(crate) fn join_family_after_fork(&mut self) {
        let _uncancelled = Uncancelled::new();
        // As in `Client::connect`.
        let undisturbed = sandbox::may(Deed::Join).then(Undisturbed::new);
        // First: a child that a handler forks from here on is noted again.
        self.birth.end_inside();
        self.pid = fds::settle();
        for inherited in self.attached.take().into_iter().chain(self.earlier.drain(..)) {
            inherited.leave();
        }
        self.guard = None;
        (self.connection, self.pace) = (Connection::Down { retry_ns: 0 }, self.pace.of_child());
        if undisturbed.is_none() {
            return;
        }
        let give_up = monotonic_ns().saturating_add(nanoseconds(CHILD_WAIT));
        loop {
            let limit = Limit::new(left(give_up), ATTACH_WAIT);
            let Err(error) = self.greet(limit) else { return };
            if self.birth.was_armed()
                && let Ok(Some(own)) = self.birth.take_nonce_page()
            {
                self.guard(own);
                return;
            }
            let worth_it = self.birth.was_armed() && may_come_back(&error, &self.config.socket);
            if !worth_it || monotonic_ns() >= give_up {
                return;
            }
            nap(Duration::from_nanos(RETRY_NS_MIN));
        }
    }

    /// Keeper and daemon were killed between our fork and the moment when we would have got our
    /// userfaultfd: with it went what was armed, and what was parked would read as zeros. Armed by
    /// ourselves it waits, as everybody else's does.
    fn guard(&mut self, own: Uffd) {
        for &(_, start, len) in &self.regions {
            if own.register(start, len, Mode::MISSING).is_err() {
                // Nothing may be read here any more.
                std::process::abort();
            }
        }
        self.guard = Some(Fd::list(Uffd::from_fd(fds::raise(own.into_fd()))));
    }
}
