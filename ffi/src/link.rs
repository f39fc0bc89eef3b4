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

mod attach;
mod birth;
mod seek;
mod talk;

use crate::cancel::Uncancelled;
use crate::fds::{self, Fd};
use crate::sandbox::{self, Deed};
use crate::space;
use crate::status::{Error, Result, Status};
use attach::{Attached, Greeted, Invitation, Joined};
pub(crate) use birth::Birth;
use birth::Whose;
pub(crate) use seek::AWAY;
use seek::Pace;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
pub(crate) use talk::Undisturbed;
use talk::{Exchanged, Limit, answer, exchange, readable};
use tiermgr_sys::process::{monotonic_ns, nap};
use tiermgr_sys::sock::Stream;
use tiermgr_sys::uffd::Uffd;
pub use tiermgr_wire::hello::Class;
use tiermgr_wire::hello::Role;
use tiermgr_wire::reply::{ErrorCode, FromDaemon};
use tiermgr_wire::request::ToDaemon;

/// Where a daemon listens if nothing else is said.
const DEFAULT_SOCKET: &str = "/run/tiermgr/tiermgrd.sock";

/// Requests and their answers are far smaller; an error's text is cut off by the daemon before this.
const PACKET_BYTES: usize = 8 << 10;
/// A daemon that does not greet within this is as good as none.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// How long a forked child waits to be greeted before it goes on without a helper; also how long its later attempts to
/// attach take, but for the start of the helper.
const CHILD_WAIT: Duration = Duration::from_secs(2);
/// Each greeting is waited for so long, however late it is asked for.
const GREETING_MIN: Duration = BRIEF_GREETING;
/// How long it then waits for the answer to its `Attach`: longer than the daemon looks for the helper and for
/// the child, two seconds each.
const ATTACH_WAIT: Duration = Duration::from_secs(5);
/// How long `free` waits for its answer: longer than the daemon needs for a gibibyte that no device is
/// busy with.
const BRIEF_WAIT: Duration = Duration::from_millis(250);
/// How long `free` waits for a daemon that came back to greet.
const BRIEF_GREETING: Duration = Duration::from_millis(100);
/// How long a request waits for a daemon that restarts.
const RESTART_WAIT: Duration = Duration::from_secs(2);
const RETRY_NS_MIN: u64 = 5_000_000;
const RETRY_NS_MAX: u64 = 1_000_000_000;
/// The same for a program that has no memory with the daemon yet.
const RETRY_NS_MAX_FIRST: u64 = 100_000_000;

/// Of so many attaches whose outcome was never told everything is kept; of those before them, limbo only.
const EARLIER_MAX: usize = 16;

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
    /// The same, but where a daemon has not come back in those two seconds it is not waited for again: until it
    /// is found it is looked for about once a second.
    Growth,
}

/// What came of a request.
pub type Answered = std::result::Result<FromDaemon, Failed>;

/// A request that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Why.
    pub error: Error,
    /// The daemon may have carried it out, or may do so at any time from now on. False: it was not
    /// carried out, and never will be.
    pub may_happen: bool,
    /// This process was forked, by a signal handler, from the one that asked. The link is its own now; for itself it
    /// has asked nothing.
    pub is_newborn: bool,
}

impl Failed {
    pub(crate) const fn never(error: Error) -> Self {
        Self { error, may_happen: false, is_newborn: false }
    }

    const fn perhaps(error: Error) -> Self {
        Self { error, may_happen: true, is_newborn: false }
    }

    /// The daemon answered with an error.
    fn refused(code: ErrorCode, message: String) -> Self {
        // These two are also the answers to a request that was passed on and not waited for any longer.
        let may_happen = matches!(code, ErrorCode::Internal | ErrorCode::ShuttingDown);
        Self { error: Error::because(code.into(), message), may_happen, is_newborn: false }
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
    owes: Owed,
}

/// What the daemon is to say before it can be asked anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owed {
    Nothing,
    /// An answer that nobody waits for.
    Answer,
    /// Whether it serves this process.
    Attached,
}

#[derive(Debug)]
enum Connection {
    Up(Session),
    /// The daemon is away. Not before `retry_ns` is it looked for again.
    Down {
        retry_ns: u64,
    },
}

/// A process' connection.
#[derive(Debug)]
pub struct Link {
    config: Config,
    /// The process that made it. A child of a raw clone must not speak on its parent's connection.
    pid: i32,
    family: u64,
    /// What the daemon would have the first arena be.
    arena_bytes: usize,
    connection: Connection,
    pace: Pace,
    birth: Arc<Birth>,
    /// What the daemon manages for us: number, start and length.
    regions: Vec<(u32, u64, u64)>,
    /// `None` in a forked child that could not attach yet, or was refused.
    attached: Option<Attached>,
    /// Of a child that had to attach again: the daemon may come to serve it by one of these, the oldest first, until
    /// it has said that it does by `attached`.
    earlier: Vec<Attached>,
    /// In a child that nobody serves, and nobody ever will: see [`Link::guard`].
    guard: Option<Fd<Uffd>>,
    packet: Box<[u8]>,
}

impl Link {
    /// What the daemon would have the first arena of a heap be.
    pub const fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

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
        let pid = fds::settle();
        let mut packet = vec![0_u8; PACKET_BYTES].into_boxed_slice();
        let give_up = monotonic_ns().saturating_add(nanoseconds(RESTART_WAIT));
        let limit = Limit::new(HANDSHAKE_WAIT, HANDSHAKE_WAIT);
        let mut pause_ns = RETRY_NS_MIN;
        let (nonce_page, Joined { connection, family, arena_bytes, attached, device }) = loop {
            match begin(&config, give_up, limit, &mut packet) {
                Ok(Some(joined)) => break joined,
                Ok(None) => {}
                // A program that begins in the instant in which the daemon restarts would have to do
                // without it for life.
                Err(error) if may_come_back(&error, &config.socket) && monotonic_ns() < give_up => {
                    pause(&mut pause_ns);
                }
                Err(error) => return Err(error),
            }
        };
        if !fds::is_settled(pid) {
            // It is the parent's, in whose midst a signal handler has forked.
            attached.leave();
            return Err(FORKED);
        }
        sandbox::note_start();
        Ok(Self {
            config,
            pid,
            family,
            arena_bytes,
            connection: Connection::Up(connection?),
            pace: Pace::FIRST,
            birth: Arc::new(Birth::new(Fd::new(device), nonce_page)),
            regions: Vec::new(),
            attached: Some(attached),
            earlier: Vec::new(),
            guard: None,
            packet,
        })
    }

    /// Whether the daemon has been asked for something and has still to answer.
    #[must_use]
    pub const fn owes_answer(&self) -> bool {
        matches!(&self.connection, Connection::Up(Session { owes: Owed::Answer, .. }))
    }

    /// Class of the client.
    #[must_use]
    pub const fn class(&self) -> Class {
        self.config.class
    }

    /// Sends a request and waits for its answer. A child that a signal handler forks meanwhile asks for itself.
    ///
    /// # Errors
    /// What the daemon answers, or `ConnectionLost`; with `Patience::Brief` also where the daemon still
    /// works at this or an earlier request. What can as well be carried out twice is asked again. `NotPermitted`
    /// in the child of a raw clone.
    pub fn request(&mut self, message: &ToDaemon, patience: Patience) -> Answered {
        loop {
            match self.request_as_same(message, patience) {
                Err(failed) if failed.is_newborn && !failed.may_happen => {}
                outcome => return outcome,
            }
        }
    }

    /// As [`Self::request`], but a child that is forked meanwhile asks nothing: what this is about may be
    /// somebody else's there.
    ///
    /// # Errors
    /// As [`Self::request`].
    pub fn request_as_same(&mut self, message: &ToDaemon, patience: Patience) -> Answered {
        let _uncancelled = Uncancelled::new();
        if !sandbox::may(Deed::Ask) {
            return Err(Failed::never(FILTERED));
        }
        let give_up = monotonic_ns().saturating_add(nanoseconds(RESTART_WAIT));
        loop {
            self.be_whose_it_is(message)?;
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
            if session.owes != Owed::Nothing {
                if patience == Patience::Brief && !readable(&session.stream, Duration::ZERO) {
                    return Err(Failed::never(BUSY));
                }
                self.take_what_is_owed().map_err(Failed::never)?;
                continue;
            }
            let wait = (patience == Patience::Brief).then_some(BRIEF_WAIT);
            let exchanged = exchange(&session.stream, message, wait, self.pid, &mut self.packet);
            match exchanged {
                Exchanged::Elsewhere => {}
                // A daemon that ended while nothing was asked shows itself only now: nothing was asked
                // of it yet, so that asking the next one is no repetition.
                Exchanged::Unsent(error) => {
                    self.lost();
                    if patience == Patience::Brief || error.status != Status::ConnectionLost {
                        return Err(Failed::never(error));
                    }
                }
                Exchanged::Late => {
                    session.owes = Owed::Answer;
                    return Err(Failed::perhaps(BUSY));
                }
                Exchanged::Answered(FromDaemon::Error { code, message }) => {
                    return Err(Failed::refused(code, message));
                }
                Exchanged::Answered(reply) => {
                    self.note_regions(message, &reply);
                    return Ok(reply);
                }
                Exchanged::Cut(error) => {
                    self.lost();
                    let is_repeated = patience == Patience::Restart
                        && error.status == Status::ConnectionLost
                        && may_be_repeated(message)
                        && monotonic_ns() < give_up;
                    if !is_repeated {
                        return Err(Failed::perhaps(error));
                    }
                }
            }
        }
    }

    /// A child that was forked inside a call takes the link over, and is told so.
    fn be_whose_it_is(&mut self, message: &ToDaemon) -> std::result::Result<(), Failed> {
        match self.whose() {
            Whose::Own => Ok(()),
            Whose::Strangers => Err(Failed::never(Error::new(
                Status::NotPermitted,
                "this process was made by a raw clone of the one that connected; use fork, or connect anew",
            ))),
            Whose::Newborns => {
                self.join_family_after_fork();
                // It has all that the daemon had carried out for its parent when it was forked.
                let may_happen =
                    matches!(message, ToDaemon::AddRegion { .. } | ToDaemon::DropRegion { .. });
                Err(Failed { error: FORKED, may_happen, is_newborn: true })
            }
        }
    }

    fn note_regions(&mut self, message: &ToDaemon, reply: &FromDaemon) {
        match (message, reply) {
            (&ToDaemon::AddRegion { start, len, .. }, &FromDaemon::Region(number)) => {
                // It may have been dropped without an answer, and be there under another number.
                self.regions.retain(|&(_, known, _)| known != start);
                self.regions.push((number, start, len));
            }
            (&ToDaemon::DropRegion { region }, FromDaemon::Done) => {
                self.regions.retain(|&(number, ..)| number != region);
            }
            _ => {}
        }
    }

    /// What the handlers of a fork need where its thread is inside of the link.
    pub(crate) fn birth(&self) -> Arc<Birth> {
        Arc::clone(&self.birth)
    }

    /// Ends the connection, and the helper. The caller has dropped all regions with the daemon's
    /// consent, or (`is_quiet` false) could not.
    pub fn end(&mut self, is_quiet: bool) {
        let _uncancelled = Uncancelled::new();
        self.connection = Connection::Down { retry_ns: u64::MAX };
        for mut attached in self.attached.take().into_iter().chain(self.earlier.drain(..)) {
            if is_quiet {
                attached.discard();
            } else {
                // Limbo stays: pages may lie there. Whether the helper ends in time makes no difference.
                let _ended = attached.stop_helper();
            }
        }
    }

    /// See [`Client::unlock_limbo`](crate::client::Client::unlock_limbo).
    pub(crate) fn unlock_limbo(&self) -> Option<Range<usize>> {
        for earlier in &self.earlier {
            let _range = earlier.unlock_limbo();
        }
        self.attached.as_ref()?.unlock_limbo()
    }

    fn try_greet(&mut self, limit: Limit) -> Result<()> {
        if self.attached.is_none() && !sandbox::may(Deed::Join) {
            return Err(FILTERED);
        }
        let lacks_arena = self.attached.as_ref().is_none_or(Attached::lacks_arena);
        let role = Role::ForkedChild { family: self.family, lacks_arena };
        let greeted = attach::greet(&self.config.socket, role, limit, &mut self.packet);
        let is_served = self.attached.is_some();
        let greeted = greeted.map_err(|error| match error.status {
            // Whoever is there serves this process later, or another one does.
            Status::ShuttingDown if is_served => Error { status: Status::ConnectionLost, ..error },
            _ => error,
        })?;
        match (greeted, &mut self.attached) {
            (Greeted::Known(stream, given), Some(attached)) => {
                attached.confirm(given);
                self.connection = Connection::Up(Session::new(stream, Owed::Nothing)?);
                Ok(())
            }
            (Greeted::Invited(invitation), attached)
                if attached.as_ref().is_none_or(Attached::may_be_replaced) =>
            {
                self.attach(invitation, limit)
            }
            _ => Err(Error::new(
                Status::Protocol,
                "the daemon does not know this process as it should",
            )),
        }
    }

    /// In a forked child that the daemon does not serve: attaches, perhaps not for the first time.
    fn attach(&mut self, invitation: Invitation, limit: Limit) -> Result<()> {
        if !sandbox::may(Deed::Join) {
            return Err(FILTERED);
        }
        // As in `Client::connect`.
        let _undisturbed = Undisturbed::new();
        if let Some(mut earlier) = self.attached.take() {
            // A connection that was cut off here may go on there for a moment. Without a helper nothing is
            // moved any more, whatever comes of it; what is in limbo already is kept.
            let _ended = earlier.stop_helper();
            if self.earlier.len() == EARLIER_MAX {
                drop(self.earlier.remove(0));
            }
            self.earlier.push(earlier);
        }
        match attach::attach(invitation, true, self.birth.nonce_page(), limit, &mut self.packet) {
            Ok(Joined { connection, attached, .. }) => {
                let is_confirmed = attached.is_confirmed();
                self.attached = Some(attached);
                if is_confirmed {
                    self.discard_earlier();
                }
                self.connection = Connection::Up(connection?);
                Ok(())
            }
            Err(error) => {
                self.attached = self.earlier.pop();
                Err(error)
            }
        }
    }

    /// Once the last attach is answered: the daemon serves a child by one only.
    fn discard_earlier(&mut self) {
        if sandbox::may(Deed::Join) {
            self.earlier.drain(..).for_each(Attached::discard);
        }
    }

    /// Receives what is owed. Afterwards the connection is good, or down.
    fn take_what_is_owed(&mut self) -> Result<()> {
        let Connection::Up(session) = &mut self.connection else { return Ok(()) };
        let Some(answer) = answer(&session.stream, self.pid, &mut self.packet) else {
            return Ok(());
        };
        match (std::mem::replace(&mut session.owes, Owed::Nothing), answer) {
            // What it says is of no use any more: its range is asked for again.
            (Owed::Answer, Ok(_)) => {}
            (Owed::Attached, Ok((FromDaemon::Attached, given))) => {
                if let Some(attached) = &mut self.attached {
                    attached.confirm(given);
                    self.discard_earlier();
                }
            }
            (Owed::Attached, Ok((FromDaemon::Error { code, message }, _))) => {
                self.back_off();
                if let Some(refused) = std::mem::replace(&mut self.attached, self.earlier.pop())
                    && sandbox::may(Deed::Join)
                {
                    refused.discard();
                }
                return Err(Error::because(code.into(), message));
            }
            (Owed::Attached, _) => self.back_off(),
            _ => self.lost(),
        }
        Ok(())
    }
}

pub(crate) const FILTERED: Error = Error::new(
    Status::NotPermitted,
    "this thread has a seccomp filter of the program's own, which ends it for a system call by which the daemon \
     is asked, or of which nothing is known",
);

const FORKED: Error = Error::new(
    Status::ConnectionLost,
    "a signal handler has forked this process in the middle of a request",
);

const BUSY: Error = Error::new(Status::ConnectionLost, "the daemon still works at a request");

impl Session {
    /// Takes a greeted stream into use.
    fn new(stream: Stream, owes: Owed) -> Result<Self> {
        stream
            .set_recv_timeout(None)
            .map_err(|error| Error::system("preparing the socket", &error))?;
        let stream = Stream::from_fd(fds::raise(stream.into_fd()));
        Ok(Self { stream: Fd::list(stream), owes })
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

/// A page of its own for each attach: the daemon fills and arms it.
fn new_nonce_page() -> Result<usize> {
    space::untouched_page()
        .map_err(|error| Error::system("mapping a page for the daemon's checks", &error))
}

/// One attempt to begin a family, with its nonce page. `None`: the daemon was killed over it and knows nothing
/// of it now.
///
/// Nothing is managed yet, so that whatever was made can be taken down at any time; but for the page, which the
/// daemon may arm yet.
fn begin(
    config: &Config,
    give_up: u64,
    limit: Limit,
    packet: &mut [u8],
) -> Result<Option<(usize, Joined)>> {
    let role = Role::Client { name: config.name.clone(), class: config.class };
    let Greeted::Invited(invitation) = attach::greet(&config.socket, role, limit, packet)? else {
        return Err(Error::new(Status::Protocol, "the daemon takes this program for another"));
    };
    let nonce_page = new_nonce_page()?;
    let mut joined = attach::attach(invitation, false, nonce_page, limit, packet)
        .inspect_err(|_| space::unmap_untouched_page(nonce_page))?;
    let mut pause_ns = RETRY_NS_MIN;
    loop {
        let error = match &joined.connection {
            Ok(session) if session.owes == Owed::Nothing => {
                return Ok(Some((nonce_page, joined)));
            }
            Ok(_) => Error::new(Status::ConnectionLost, "the daemon does not answer"),
            Err(error) => error.clone(),
        };
        // A daemon that comes back serves this program already if it came so far.
        if joined.connection.is_ok()
            || !may_come_back(&error, &config.socket)
            || monotonic_ns() >= give_up
        {
            joined.attached.forsake(nonce_page);
            return Err(error);
        }
        pause(&mut pause_ns);
        let role = Role::ForkedChild { family: joined.family, lacks_arena: false };
        joined.connection = match attach::greet(&config.socket, role, limit, packet) {
            Ok(Greeted::Known(stream, given)) => {
                joined.attached.confirm(given);
                Session::new(stream, Owed::Nothing)
            }
            Ok(Greeted::Invited(_)) => break,
            Err(error) if error.status == Status::NotPermitted => break,
            Err(error) => Err(error),
        };
    }
    joined.attached.forsake(nonce_page);
    Ok(None)
}

/// Sleeps, and longer the next time.
fn pause(pause_ns: &mut u64) {
    nap(Duration::from_nanos(*pause_ns));
    *pause_ns = (2 * *pause_ns).min(RETRY_NS_MAX_FIRST);
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

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
