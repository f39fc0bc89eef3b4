//! The handshake of a program and of a forked child, and what it makes for the daemon.
//!
//! Once `Attach` was sent the daemon may serve this process, and move its pages into limbo, whether or not its
//! answer comes. Only an error in answer says that it does not and will not; everything else leaves helper
//! and limbo as they are, and the next greeting tells.

use super::talk::{Limit, greeting, open, readable, receive, send, unexpected};
use super::{Owed, RESTART_WAIT, RETRY_NS_MIN, Session, nanoseconds};
use crate::fds::{self, Fd};
use crate::sandbox::{self, Deed};
use crate::space::{self, Locking, Reserved};
use crate::status::{Error, Result, Status};
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use tiermgr_sys::helper::{self, HelperConfig, HelperHandle};
use tiermgr_sys::process::{monotonic_ns, nap};
use tiermgr_sys::sock::Stream;
use tiermgr_sys::uffd;
use tiermgr_wire::hello::{Attach, Hello, Role, Welcome};
use tiermgr_wire::reply::FromDaemon;
use tiermgr_wire::request::ToDaemon;

/// What this process has made for the daemon.
#[derive(Debug)]
pub(super) struct Attached {
    /// Who has made it. To a child that a signal handler forks it is somebody else's.
    pid: i32,
    /// Kept open for as long as we live: with the last copy of a userfaultfd the kernel would forget
    /// what is armed, and answer a touch of a parked page with zeros. A forked child gets its own from
    /// the daemon.
    arena: Option<Fd>,
    limbo_fd: Fd,
    limbo: Option<Reserved>,
    helper: HelperHandle,
    is_confirmed: bool,
}

impl Attached {
    /// Whether the daemon has said that it serves this process by this. Until then it may do so.
    pub(super) const fn is_confirmed(&self) -> bool {
        self.is_confirmed
    }

    /// By an attach as a child: it was not confirmed, and holds no userfaultfd of the arenas.
    pub(super) const fn may_be_replaced(&self) -> bool {
        !self.is_confirmed && self.arena.is_none()
    }

    pub(super) fn lacks_arena(&self) -> bool {
        !self.arena.as_ref().is_some_and(Fd::is_intact)
    }

    /// The daemon serves this process, and gave the userfaultfd that it lacked.
    pub(super) fn confirm(&mut self, given: Vec<OwnedFd>) {
        self.is_confirmed = true;
        if let Some(arena) = given.into_iter().next() {
            // A higher number takes a system call that a filter may forbid by now.
            let raised = sandbox::may(Deed::Join);
            self.arena = Some(if raised { Fd::new(arena) } else { Fd::list(arena) });
        }
    }

    /// After a lock of all memory. What is locked does not move, unless where it goes is locked too.
    pub(super) fn unlock_limbo(&self) -> Option<Range<usize>> {
        let limbo = self.limbo.as_ref().filter(|_| fds::is_settled(self.pid))?;
        limbo.unlock();
        Some(limbo.start()..limbo.start() + limbo.bytes())
    }

    /// Ends the helper. False: it does not end in time, and may still move pages.
    pub(super) fn stop_helper(&mut self) -> bool {
        if !fds::is_settled(self.pid) {
            return false;
        }
        self.helper.stop();
        self.helper.reap(Duration::from_secs(1)).is_ok()
    }

    /// Takes everything down. Nobody may be left who could have had pages moved into limbo.
    pub(super) fn discard(mut self) {
        // A helper that does not end in time keeps its stack; limbo stays mapped under it.
        if self.stop_helper()
            && let Some(limbo) = self.limbo.take()
        {
            limbo.unmap();
        }
    }

    /// Of an attach that came to nothing, although the daemon may have armed the nonce page. Where it was killed over
    /// that, its keeper has the userfaultfd, and nobody reads it: a fork that copies the page, or an munmap of
    /// it, would wait for ever. So the page is taken back, and stays where it is, for this process alone: the
    /// daemon may arm it yet.
    pub(super) fn forsake(self, nonce_page: usize) {
        space::keep_from_children(nonce_page);
        self.take_back(nonce_page);
        self.discard();
    }

    fn take_back(&self, nonce_page: usize) {
        let Some(arena) = &self.arena else { return };
        let bytes = space::page_bytes() as u64;
        let _was_armed = uffd::unregister(arena.as_fd(), nonce_page as u64, bytes).is_ok();
    }

    /// In a forked child: leaves what is the parent's.
    pub(super) fn leave(self) {
        let Self { pid: _, arena, limbo_fd, limbo, helper, is_confirmed: _ } = self;
        drop(arena);
        drop(limbo_fd);
        // Limbo is not mapped here (MADV_DONTFORK), and its address is free for others; the
        // helper is the parent's.
        let _not_ours = (ManuallyDrop::new(limbo), ManuallyDrop::new(helper));
    }
}

/// A daemon that is to be attached to.
#[derive(Debug)]
pub(super) struct Invitation {
    stream: Stream,
    welcome: Welcome,
    given: Vec<OwnedFd>,
}

/// What a daemon says to a hello.
#[derive(Debug)]
pub(super) enum Greeted {
    /// It serves this process already, and gives what that said it lacks.
    Known(Stream, Vec<OwnedFd>),
    /// It does not.
    Invited(Invitation),
}

/// Says hello.
pub(super) fn greet(socket: &Path, role: Role, limit: Limit, packet: &mut [u8]) -> Result<Greeted> {
    let by_ns = limit.greeting_by();
    let stream = open(socket, by_ns, limit.pid())?;
    let hello = ToDaemon::Hello(Hello { version: tiermgr_wire::VERSION, role });
    match greeting(&stream, &hello, by_ns, limit.pid(), packet)? {
        (FromDaemon::Ready, given) => Ok(Greeted::Known(stream, given)),
        (FromDaemon::Welcome(welcome), given) => {
            Ok(Greeted::Invited(Invitation { stream, welcome, given }))
        }
        (other, _) => Err(unexpected("the greeting", other)),
    }
}

/// What was made and sent, and not refused.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) arena_bytes: usize,
    /// The answer may be owed yet. An error: the connection ended without one.
    pub(super) connection: Result<Session>,
    pub(super) family: u64,
    pub(super) attached: Attached,
    pub(super) device: OwnedFd,
}

/// Makes the userfaultfds, limbo and the helper, sends them, and waits for the answer.
///
/// An error: nothing is left of it, with the daemon neither.
pub(super) fn attach(
    invitation: Invitation,
    is_child: bool,
    nonce_page: usize,
    limit: Limit,
    packet: &mut [u8],
) -> Result<Joined> {
    let Invitation { stream, welcome, given } = invitation;
    let pid = limit.pid();
    let [device, ring, event] = <[OwnedFd; 3]>::try_from(given).map_err(|given| {
        let text = format!("the daemon greeted with {} descriptors instead of 3", given.len());
        Error::because(Status::Protocol, text)
    })?;

    let new_uffd = || {
        uffd::new_from_device(device.as_fd())
            .map(Fd::new)
            .map_err(|error| Error::system("making a userfaultfd from the daemon's device", &error))
    };
    let arena = if is_child { None } else { Some(new_uffd()?) };
    let limbo_fd = new_uffd()?;
    let mut limbo = reserve_limbo(&welcome)?;
    let limbo_start = limbo.as_ref().map_or(0, |limbo| limbo.start() as u64);
    let config = HelperConfig {
        ring: ring.as_fd(),
        event: event.as_fd(),
        arena: arena.as_ref().map(AsFd::as_fd),
        limbo: limbo_fd.as_fd(),
        hold: &[],
    };
    let helper = unless_short_of_processes(|| helper::spawn(&config))
        .map_err(|error| {
            // A child tries again, for as long as it lives.
            if let Some(limbo) = limbo.take().filter(|_| fds::is_settled(pid)) {
                limbo.unmap();
            }
            if error.kind() != io::ErrorKind::PermissionDenied {
                return Error::system("starting the helper process", &error);
            }
            let what =
                "starting the helper process, which a sandbox forbids (it takes clone, capset and seccomp)";
            Error { status: Status::NotPermitted, ..Error::system(what, &error) }
        })?;
    let mut attached = Attached { pid, arena, limbo_fd, limbo, helper, is_confirmed: false };

    let message = ToDaemon::Attach(Attach {
        limbo_start,
        nonce_page: nonce_page as u64,
        helper_pid: attached.helper.pid(),
    });
    let both = [attached.arena.as_ref().unwrap_or(&attached.limbo_fd), &attached.limbo_fd];
    let sent: [BorrowedFd<'_>; 2] = both.map(AsFd::as_fd);
    let sent = if is_child { &sent[1..] } else { &sent[..] };
    if let Err(error) = send(&stream, &message, sent, packet) {
        attached.discard();
        return Err(error);
    }
    let connection = if readable(&stream, limit.for_answer()) {
        match receive(&stream, limit.pid(), packet) {
            Ok((FromDaemon::Attached, given)) if given.len() == usize::from(is_child) => {
                attached.confirm(given);
                Session::new(stream, Owed::Nothing)
            }
            Ok((FromDaemon::Error { code, message }, _)) => {
                attached.take_back(nonce_page);
                attached.discard();
                return Err(Error::because(code.into(), message));
            }
            Ok((other, _)) => Err(unexpected("the answer to Attach", other)),
            Err(error) => Err(error),
        }
    } else {
        Session::new(stream, Owed::Attached)
    };
    let arena_bytes = usize::try_from(welcome.arena_bytes).unwrap_or(usize::MAX);
    Ok(Joined { connection, family: welcome.family, arena_bytes, attached, device })
}

/// Starts a process. Where there are as many as there may be, others end soon: a program would have to do without
/// its helper for life.
fn unless_short_of_processes<T>(mut start: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let give_up = monotonic_ns().saturating_add(nanoseconds(RESTART_WAIT));
    loop {
        let outcome = start();
        let is_short = outcome.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EAGAIN));
        if !is_short || monotonic_ns() >= give_up {
            return outcome;
        }
        nap(Duration::from_nanos(RETRY_NS_MIN));
    }
}

/// Reserves the range where pages wait before they are parked. It is not inherited by fork: a child
/// makes its own.
fn reserve_limbo(welcome: &Welcome) -> Result<Option<Reserved>> {
    let bytes = usize::try_from(welcome.limbo_bytes).unwrap_or(usize::MAX);
    if bytes == 0 {
        return Ok(None);
    }
    if !bytes.is_multiple_of(space::CHUNK) {
        return Err(Error::new(Status::Protocol, "the daemon asked for a limbo of an odd size"));
    }
    let limbo = Reserved::new(bytes, Locking::Never)
        .map_err(|error| Error::system("reserving limbo", &error))?;
    limbo.advise(libc::MADV_DONTFORK);
    limbo.advise(libc::MADV_DONTDUMP);
    Ok(Some(limbo))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_helper_for_which_there_is_no_process_is_tried_again() {
        let (mut tries, of) = (0, |number: i32| io::Error::from_raw_os_error(number));
        let started = unless_short_of_processes(|| {
            tries += 1;
            if tries < 5 { Err(of(libc::EAGAIN)) } else { Ok(tries) }
        });
        assert_eq!(started.expect("in the end"), 5);
        let refused = unless_short_of_processes::<()>(|| Err(of(libc::EPERM)));
        assert_eq!(refused.expect_err("at once").raw_os_error(), Some(libc::EPERM));
        let short = unless_short_of_processes::<()>(|| Err(of(libc::EAGAIN)));
        assert_eq!(short.expect_err("not for ever").raw_os_error(), Some(libc::EAGAIN));
    }
}
