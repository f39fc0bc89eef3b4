//! The connection to the daemon: handshake, requests, the daemon's restart, and the forked child.
//!
//! Whoever holds the link may be inside `malloc`. Therefore nothing here needs thread-local storage,
//! stack buffers are small, and what is allocated is small too, so that the preload library's own
//! rule sends it to libc.
//!
//! The connection is never closed while managed memory is in use: to the daemon its end is the
//! client's end. So a request waits as long as the daemon lives, and only its death ends the wait; but
//! `free` leaves a moment later, and the next request takes its answer first.
//! A daemon that comes back has kept our regions; we greet it with the number of our family.

mod talk;

use crate::cancel::Uncancelled;
use crate::fds::{self, Fd};
use crate::sandbox::{self, Deed};
use crate::space::{self, Locking, Reserved};
use crate::status::{Error, Result, Status};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use talk::{open, readable, receive, send, unexpected};
use tiermgr_sys::helper::{self, HelperConfig, HelperHandle};
use tiermgr_sys::process::monotonic_ns;
use tiermgr_sys::sock::Stream;
use tiermgr_sys::uffd::{self, Mode, Uffd};
pub use tiermgr_wire::hello::Class;
use tiermgr_wire::hello::{Attach, Hello, Role, Welcome};
use tiermgr_wire::reply::{ErrorCode, FromDaemon};
use tiermgr_wire::request::ToDaemon;

/// Where a daemon listens if nothing else is said.
const DEFAULT_SOCKET: &str = "/run/tiermgr/tiermgrd.sock";

/// Requests and their answers are far smaller; an error's text is cut off by the daemon before this.
const PACKET_BYTES: usize = 8 << 10;
/// A daemon that does not greet within this is as good as none.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// How long a forked child waits before it goes on without a helper.
const CHILD_WAIT: Duration = Duration::from_secs(2);
/// How long `free` waits for its answer: longer than the daemon needs for a gibibyte that no device is
/// busy with.
const BRIEF_WAIT: Duration = Duration::from_millis(250);
/// How long `free` waits for a daemon that came back to greet.
const BRIEF_GREETING: Duration = Duration::from_millis(100);
/// After an attempt to find the daemon, `free` leaves this many times its length to the program.
const BRIEF_PAUSES: u64 = 10;
/// How long a request waits for a daemon that restarts.
const RESTART_WAIT: Duration = Duration::from_secs(2);
const RETRY_NS_MIN: u64 = 5_000_000;
const RETRY_NS_MAX: u64 = 1_000_000_000;
/// The same for a program that has no memory with the daemon yet.
const RETRY_NS_MAX_FIRST: u64 = 100_000_000;

/// Whom to connect to, and as what.
#[derive(Clone, Debug)]
pub struct Config {
    /// Socket of the daemon.
    pub socket: PathBuf,
    /// For lists.
    pub name: String,
    /// Who gives way.
    pub class: Class,
    /// The client's heap serves an allocator of small blocks too.
    pub extents: bool,
}

/// Where the environment says that the daemon listens, else where it does if nothing is said.
#[must_use]
pub fn usual_socket() -> PathBuf {
    std::env::var_os("TIERMGR_SOCKET").map_or_else(|| PathBuf::from(DEFAULT_SOCKET), PathBuf::from)
}

/// The name of this program, as the kernel knows it.
#[must_use]
pub fn program_name() -> String {
    std::fs::read_to_string("/proc/self/comm")
        .map_or_else(|_| String::from("unknown"), |name| name.trim_end().to_owned())
}

/// How long a request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// A moment, also where the daemon waits for a device.
    Brief,
    /// Up to two seconds for a daemon that restarts, and then as long as the daemon needs.
    Restart,
}

/// A request that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Why.
    pub error: Error,
    /// The daemon may have carried it out, or may do so at any time from now on. False: it was not
    /// carried out, and never will be.
    pub may_happen: bool,
}

impl Failed {
    pub(crate) const fn never(error: Error) -> Self {
        Self { error, may_happen: false }
    }

    const fn perhaps(error: Error) -> Self {
        Self { error, may_happen: true }
    }

    /// The daemon answered with an error.
    fn refused(code: ErrorCode, message: String) -> Self {
        // These two are also the answers to a request that was passed on and not waited for any longer.
        let may_happen = matches!(code, ErrorCode::Internal | ErrorCode::ShuttingDown);
        Self { error: Error::because(code.into(), message), may_happen }
    }

    /// The daemon answered something else than what was asked.
    pub(crate) const fn odd() -> Self {
        Self::perhaps(Error::new(
            Status::Protocol,
            "the daemon answered something else than what was asked",
        ))
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

#[derive(Debug)]
struct Session {
    stream: Fd<Stream>,
    /// An answer is still to come that nobody waits for.
    owes_answer: bool,
}

/// What this process has made for the daemon.
#[derive(Debug)]
struct Attached {
    /// Kept open for as long as we live: with the last copy of a userfaultfd the kernel would forget
    /// what is armed, and answer a touch of a parked page with zeros. A forked child gets its own from
    /// the daemon.
    arena: Option<Fd>,
    limbo_fd: Fd,
    limbo: Option<Reserved>,
    helper: HelperHandle,
}

#[derive(Debug)]
enum Connection {
    Up(Session),
    /// The daemon is away. Not before `retry_ns` is it looked for again.
    Down {
        retry_ns: u64,
        wait_ns: u64,
        /// How long the last attempt took.
        took_ns: u64,
    },
}

/// A process' connection.
#[derive(Debug)]
pub struct Link {
    config: Config,
    /// The process that made it. A child of a raw clone must not speak on its parent's connection.
    pid: i32,
    family: u64,
    nonce_page: usize,
    connection: Connection,
    /// Makes userfaultfds that the daemon has no part in, by an ioctl: programs may be forbidden the system call.
    device: Fd,
    /// `None` in a forked child that could not attach yet.
    attached: Option<Attached>,
    /// Whether our memory was armed when this process, or its parent, was last about to fork.
    was_armed: bool,
    /// In a child that nobody serves, and nobody ever will: see [`Link::guard`].
    guard: Option<Fd<Uffd>>,
    packet: Box<[u8]>,
}

impl Link {
    /// Connects, makes the userfaultfds, limbo and the helper, and attaches.
    ///
    /// # Errors
    /// `NoDaemon`, what the daemon refuses, and what the kernel refuses.
    pub fn connect(config: Config) -> Result<Self> {
        let _uncancelled = Uncancelled::new();
        if !sandbox::may(Deed::Join) {
            return Err(FILTERED);
        }
        if has_another_namespace_for_children() {
            return Err(Error::new(
                Status::Unsupported,
                "this program has made a pid namespace for its children (unshare, setns), and the helper would \
                 be the first process there; have it allocate before that",
            ));
        }
        let mut packet = vec![0_u8; PACKET_BYTES].into_boxed_slice();
        let nonce_page = space::untouched_page()
            .map_err(|error| Error::system("mapping a page for the daemon's checks", &error))?;
        let role = Role::Client { name: config.name.clone(), class: config.class };
        let give_up = monotonic_ns().saturating_add(nanoseconds(RESTART_WAIT));
        let mut pause_ns = RETRY_NS_MIN;
        let Joined { session, welcome, attached, device } = loop {
            match attach(&config.socket, role.clone(), nonce_page, HANDSHAKE_WAIT, &mut packet) {
                // A program that begins in the instant in which the daemon restarts would have to do
                // without it for life.
                Err(error) if may_come_back(&error, &config.socket) && monotonic_ns() < give_up => {
                    std::thread::sleep(Duration::from_nanos(pause_ns));
                    pause_ns = (2 * pause_ns).min(RETRY_NS_MAX_FIRST);
                }
                attached => break attached?,
            }
        };
        sandbox::note_start();
        Ok(Self {
            config,
            pid: fds::settle(),
            family: welcome.family,
            nonce_page,
            connection: Connection::Up(session),
            device: Fd::new(device),
            attached: Some(attached),
            was_armed: false,
            guard: None,
            packet,
        })
    }

    /// Whether the daemon has been asked for something and has still to answer.
    #[must_use]
    pub const fn owes_answer(&self) -> bool {
        matches!(&self.connection, Connection::Up(session) if session.owes_answer)
    }

    /// Class of the client.
    #[must_use]
    pub const fn class(&self) -> Class {
        self.config.class
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// What the daemon answers, or `ConnectionLost`; with `Patience::Brief` also where the daemon still
    /// works at this or an earlier request. What can as well be carried out twice is asked again.
    pub fn request(
        &mut self,
        message: &ToDaemon,
        patience: Patience,
    ) -> std::result::Result<FromDaemon, Failed> {
        let _uncancelled = Uncancelled::new();
        if !sandbox::may(Deed::Ask) {
            return Err(Failed::never(FILTERED));
        }
        if !fds::is_settled(self.pid) {
            return Err(Failed::never(Error::new(
                Status::ConnectionLost,
                "this process was made by a raw clone of the one that connected; use fork, or connect anew",
            )));
        }
        let give_up = monotonic_ns().saturating_add(nanoseconds(RESTART_WAIT));
        loop {
            let session = match &mut self.connection {
                Connection::Up(session) => session,
                Connection::Down { .. } => {
                    self.reconnect(patience, give_up).map_err(Failed::never)?;
                    continue;
                }
            };
            if !session.stream.is_intact() {
                // Closed by an instruction of the program's own. The daemon still knows this process.
                self.lost();
                continue;
            }
            if session.owes_answer {
                if patience == Patience::Brief && !readable(&session.stream, Duration::ZERO) {
                    return Err(Failed::never(BUSY));
                }
                // What it says is of no use any more: its range is asked for again.
                if receive(&session.stream, &mut self.packet).is_err() {
                    self.lost();
                    continue;
                }
                session.owes_answer = false;
            }
            // A daemon that ended while nothing was asked shows itself only now: nothing was asked
            // of it yet, so that asking the next one is no repetition.
            if let Err(error) = send(&session.stream, message, &[], &mut self.packet) {
                self.lost();
                if patience == Patience::Brief || error.status != Status::ConnectionLost {
                    return Err(Failed::never(error));
                }
                continue;
            }
            if patience == Patience::Brief && !readable(&session.stream, BRIEF_WAIT) {
                session.owes_answer = true;
                return Err(Failed::perhaps(BUSY));
            }
            return match receive(&session.stream, &mut self.packet) {
                Ok((FromDaemon::Error { code, message }, _)) => Err(Failed::refused(code, message)),
                Ok((reply, _)) => Ok(reply),
                Err(error) => {
                    self.lost();
                    if patience == Patience::Restart
                        && error.status == Status::ConnectionLost
                        && may_be_repeated(message)
                        && monotonic_ns() < give_up
                    {
                        continue;
                    }
                    Err(Failed::perhaps(error))
                }
            };
        }
    }

    /// Ends the connection, and the helper. The caller has dropped all regions with the daemon's
    /// consent, or (`is_quiet` false) could not.
    pub fn end(&mut self, is_quiet: bool) {
        let _uncancelled = Uncancelled::new();
        self.connection = Connection::Down { retry_ns: u64::MAX, wait_ns: 0, took_ns: 0 };
        let Some(mut attached) = self.attached.take() else { return };
        attached.helper.stop();
        let ended = attached.helper.reap(Duration::from_secs(1));
        // Limbo may go once nobody is left who could be told to drop pages there.
        if is_quiet
            && ended.is_ok()
            && let Some(limbo) = attached.limbo.take()
        {
            limbo.unmap();
        }
    }

    /// Before a fork: notes whether there is something that a child must not lose.
    pub(crate) fn note_armed(&mut self) {
        let _uncancelled = Uncancelled::new();
        self.was_armed = sandbox::may(Deed::Look) && matches!(self.take_nonce_page(), Ok(None));
    }

    /// In a forked child: leaves what is the parent's, and joins its family. Where the daemon does
    /// not answer in time the child goes on without a helper: its pages are served and do not park.
    ///
    /// `regions` are all that the client has, as `(start, len)`.
    pub(crate) fn join_family_after_fork(&mut self, regions: impl Iterator<Item = (usize, usize)>) {
        let _uncancelled = Uncancelled::new();
        self.pid = fds::settle();
        if let Some(inherited) = self.attached.take() {
            let Attached { arena, limbo_fd, limbo, helper } = inherited;
            drop(arena);
            drop(limbo_fd);
            // Limbo is not mapped here (MADV_DONTFORK), and its address is free for others; the
            // helper is the parent's.
            let _not_ours = (ManuallyDrop::new(limbo), ManuallyDrop::new(helper));
        }
        self.guard = None;
        self.connection = Connection::Down { retry_ns: 0, wait_ns: RETRY_NS_MIN, took_ns: 0 };
        if !sandbox::may(Deed::Join) {
            return;
        }
        let give_up = monotonic_ns().saturating_add(nanoseconds(CHILD_WAIT));
        loop {
            let began = monotonic_ns();
            let Err(error) = self.greet(CHILD_WAIT) else { return };
            self.back_off(began);
            if self.was_armed
                && let Ok(Some(own)) = self.take_nonce_page()
            {
                self.guard(own, regions);
                return;
            }
            let worth_it = self.was_armed && may_come_back(&error, &self.config.socket);
            if !worth_it || monotonic_ns() >= give_up {
                return;
            }
            std::thread::sleep(Duration::from_nanos(RETRY_NS_MIN));
        }
    }

    /// A userfaultfd of our own that has the nonce page, unless that is armed by the daemon's.
    fn take_nonce_page(&self) -> io::Result<Option<Uffd>> {
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

    /// Keeper and daemon were killed between our fork and the moment when we would have got our
    /// userfaultfd: with it went what was armed, and what was parked would read as zeros. Armed by
    /// ourselves it waits, as everybody else's does.
    fn guard(&mut self, own: Uffd, regions: impl Iterator<Item = (usize, usize)>) {
        for (start, len) in regions {
            if own.register(start as u64, len as u64, Mode::MISSING).is_err() {
                // Nothing may be read here any more.
                std::process::abort();
            }
        }
        self.guard = Some(Fd::list(Uffd::from_fd(fds::raise(own.into_fd()))));
    }

    fn reconnect(&mut self, patience: Patience, give_up: u64) -> Result<()> {
        let Connection::Down { retry_ns, took_ns, .. } = self.connection else { return Ok(()) };
        let now = monotonic_ns();
        if patience == Patience::Brief
            && now < retry_ns.saturating_add(took_ns.saturating_mul(BRIEF_PAUSES))
        {
            return Err(Error::new(Status::ConnectionLost, "the daemon is away"));
        }
        if now < retry_ns {
            if retry_ns > give_up {
                return Err(Error::because(
                    Status::ConnectionLost,
                    format!(
                        "the daemon at {} is away; memory that is not parked goes on working",
                        self.config.socket.display()
                    ),
                ));
            }
            std::thread::sleep(Duration::from_nanos(retry_ns - now));
        }
        // An attach that is given up half-way leaves the daemon with a process that is not there: it
        // gets its time whoever asks.
        let wait = match patience {
            Patience::Brief if self.attached.is_some() => BRIEF_GREETING,
            _ => CHILD_WAIT,
        };
        let began = monotonic_ns();
        self.greet(wait).inspect_err(|_| self.back_off(began)).or_else(|error| {
            if patience == Patience::Restart && monotonic_ns() < give_up {
                Ok(())
            } else {
                Err(error)
            }
        })
    }

    /// One attempt to be the daemon's client (again).
    fn greet(&mut self, wait: Duration) -> Result<()> {
        let role = Role::ForkedChild { family: self.family };
        if self.attached.is_some() {
            // The daemon knows this process from before its restart and has nothing to give it.
            let stream = open(&self.config.socket, wait)?;
            send(&stream, &hello(role), &[], &mut self.packet)?;
            return match receive(&stream, &mut self.packet)?.0 {
                FromDaemon::Ready => {
                    self.connection = Connection::Up(Session::new(stream)?);
                    Ok(())
                }
                other => Err(unexpected("the greeting after a restart", other)),
            };
        }
        if !sandbox::may(Deed::Join) {
            return Err(FILTERED);
        }
        let joined = attach(&self.config.socket, role, self.nonce_page, wait, &mut self.packet)?;
        self.connection = Connection::Up(joined.session);
        self.attached = Some(joined.attached);
        Ok(())
    }

    fn lost(&mut self) {
        let retry_ns = monotonic_ns() + RETRY_NS_MIN;
        self.connection = Connection::Down { retry_ns, wait_ns: RETRY_NS_MIN, took_ns: 0 };
    }

    fn back_off(&mut self, began: u64) {
        if let Connection::Down { retry_ns, wait_ns, took_ns } = &mut self.connection {
            let now = monotonic_ns();
            *took_ns = now.saturating_sub(began);
            *retry_ns = now + *wait_ns;
            *wait_ns = (*wait_ns * 2).min(RETRY_NS_MAX);
        }
    }
}

pub(crate) const FILTERED: Error = Error::new(
    Status::NotPermitted,
    "a seccomp filter that this program has installed ends it for a system call by which the daemon is asked",
);

const BUSY: Error = Error::new(Status::ConnectionLost, "the daemon still works at a request");

impl Session {
    /// Takes a greeted stream into use.
    fn new(stream: Stream) -> Result<Self> {
        stream
            .set_recv_timeout(None)
            .map_err(|error| Error::system("preparing the socket", &error))?;
        let stream = Stream::from_fd(fds::raise(stream.into_fd()));
        Ok(Self { stream: Fd::list(stream), owes_answer: false })
    }
}

/// Whether it makes no difference that an earlier daemon may have carried it out.
const fn may_be_repeated(message: &ToDaemon) -> bool {
    matches!(
        message,
        ToDaemon::Stats
            | ToDaemon::Residency { .. }
            | ToDaemon::Advise { .. }
            | ToDaemon::Prefetch { .. }
    )
}

const fn hello(role: Role) -> ToDaemon {
    ToDaemon::Hello(Hello { version: tiermgr_wire::VERSION, role })
}

/// What a handshake comes to.
struct Joined {
    session: Session,
    welcome: Welcome,
    attached: Attached,
    device: OwnedFd,
}

/// The whole handshake of a client or a forked child.
fn attach(
    socket: &Path,
    role: Role,
    nonce_page: usize,
    wait: Duration,
    packet: &mut [u8],
) -> Result<Joined> {
    let is_child = matches!(role, Role::ForkedChild { .. });
    let stream = open(socket, wait)?;
    send(&stream, &hello(role), &[], packet)?;
    let (reply, given) = receive(&stream, packet)?;
    let FromDaemon::Welcome(welcome) = reply else {
        return Err(unexpected("the greeting", reply));
    };
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
    let limbo = reserve_limbo(&welcome)?;
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
            let forbidden = error.kind() == io::ErrorKind::PermissionDenied;
            let what = if forbidden {
                "starting the helper process, which a sandbox forbids (it takes clone, capset and seccomp)"
            } else {
                "starting the helper process"
            };
            Error::system(what, &error)
        })?;
    let mut attached = Attached { arena, limbo_fd, limbo, helper };

    let message = ToDaemon::Attach(Attach {
        limbo_start,
        nonce_page: nonce_page as u64,
        helper_pid: attached.helper.pid(),
    });
    let both = [attached.arena.as_ref().unwrap_or(&attached.limbo_fd), &attached.limbo_fd];
    let sent: [BorrowedFd<'_>; 2] = both.map(AsFd::as_fd);
    let sent = if is_child { &sent[1..] } else { &sent[..] };
    let outcome = send(&stream, &message, sent, packet)
        .and_then(|()| receive(&stream, packet))
        .and_then(|(reply, given)| match reply {
            FromDaemon::Attached if given.len() == usize::from(is_child) => {
                Ok((Session::new(stream)?, given))
            }
            other => Err(unexpected("the answer to Attach", other)),
        });
    match outcome {
        Ok((session, given)) => {
            if let Some(arena) = given.into_iter().next() {
                attached.arena = Some(Fd::new(arena));
            }
            Ok(Joined { session, welcome, attached, device })
        }
        Err(error) => {
            attached.helper.stop();
            // A helper that does not end in time keeps its stack; limbo stays mapped under it.
            if attached.helper.reap(Duration::from_secs(1)).is_ok()
                && let Some(limbo) = attached.limbo
            {
                limbo.unmap();
            }
            Err(error)
        }
    }
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
        std::thread::sleep(Duration::from_nanos(RETRY_NS_MIN));
    }
}

/// Whether what this process makes next would be the first process of another pid namespace.
fn has_another_namespace_for_children() -> bool {
    // Of this thread: it makes the helper, and the first one of the program may have ended.
    let namespace = |name| std::fs::read_link(format!("/proc/thread-self/ns/{name}"));
    // One that has no process yet has no name either. Where nothing can be told there is no /proc.
    namespace("pid")
        .is_ok_and(|own| namespace("pid_for_children").map_or(true, |for_them| for_them != own))
}

/// A daemon that was killed leaves its socket, and is back soon.
fn may_come_back(error: &Error, socket: &Path) -> bool {
    matches!(error.status, Status::NoDaemon | Status::ConnectionLost) && socket.exists()
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

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
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
