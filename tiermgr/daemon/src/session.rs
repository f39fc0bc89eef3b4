//! One connection: carries out what `protocol` let through.
//!
//! Each connection has a thread of its own with a small stack. It allocates and may block; nothing of
//! it lies in the fault path, which belongs to the family's executor. A peer can harm only itself: it
//! is answered in order, has one request under way at a time, and a send that it does not take ends
//! the session.

use crate::admit::Admitted;
use crate::control;
use crate::daemon::Daemon;
use crate::families::{self, BeginError, Family};
use crate::protocol::{self, Protocol, REQUEST_BYTES_MAX, Refused, Step};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_core::effect::{Refusal, Reply};
use tiermgr_core::event::Request;
use tiermgr_core::units::{Addr, ProcId, Span};
use tiermgr_engine::error::EngineError;
use tiermgr_engine::executor::NewProcess;
use tiermgr_sys::helper::SERVE_WAIT;
use tiermgr_sys::memory::read_present;
use tiermgr_sys::nowait::make_nonblocking;
use tiermgr_sys::ring::RingOwner;
use tiermgr_sys::sock::{PeerCred, Stream};
use tiermgr_sys::uffd::{self, Mode, Outcome, Uffd};
use tiermgr_sys::{abi, pidfd};
use tiermgr_wire::hello::{Attach, Class, Welcome};
use tiermgr_wire::reply::{ErrorCode, FromDaemon};
use tiermgr_wire::size::Size;
use tiermgr_wire::{PACKET_BYTES_MAX, chain};

/// A peer that has not come as far as it must by then is sent away. Clients of ours take ten seconds at most to be
/// greeted, two until there is a process for the helper, and then wait for that.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
const _: () = assert!(HANDSHAKE_TIMEOUT.as_secs() > 10 + 2 + SERVE_WAIT.as_secs());
/// A peer that does not take an answer for so long is sent away.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a helper may take to be found among the children of its program.
const HELPER_TIMEOUT: Duration = Duration::from_secs(2);
const HELPER_LOOK_EVERY: Duration = Duration::from_millis(2);
/// An executor answers anything but a pin in microseconds; a family whose address space is slow may
/// take long.
const ASK_TIMEOUT: Duration = Duration::from_secs(60);
/// A pin is answered when everything is there: 1 TiB from one device takes about this long.
const PIN_TIMEOUT: Duration = Duration::from_secs(600);

/// A peer that is in the middle of its handshake.
#[derive(Debug)]
struct Guest {
    ring: RingOwner,
    as_what: GuestKind,
}

#[derive(Debug)]
enum GuestKind {
    Client { secret: u64, name: String, class: Class },
    Child(Arc<Family>),
}

/// An attached process.
#[derive(Debug)]
struct Resident {
    family: Arc<Family>,
    proc: ProcId,
}

/// An answer and the descriptors that go with it.
struct Answer<'a> {
    message: FromDaemon,
    fds: Vec<BorrowedFd<'a>>,
    /// One more, which is the peer's alone.
    given: Option<OwnedFd>,
}

impl From<FromDaemon> for Answer<'_> {
    fn from(message: FromDaemon) -> Self {
        Self { message, fds: Vec::new(), given: None }
    }
}

/// Serves `stream` until its peer goes or breaks the rules.
pub fn run(daemon: &Daemon, stream: &Stream, peer: PeerCred, admitted: Admitted) {
    let mut session = Session { daemon, peer, guest: None, resident: None };
    match session.serve(stream) {
        Ok(()) => {}
        // The everyday end of a program that was killed while it waited for an answer.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Err(error) => {
            tracing::debug!(pid = peer.pid, uid = peer.uid, %error, "a session ended with an error");
        }
    }
    session.leave();
    drop(admitted);
}

struct Session<'a> {
    daemon: &'a Daemon,
    peer: PeerCred,
    guest: Option<Guest>,
    resident: Option<Resident>,
}

impl Session<'_> {
    fn serve(&mut self, stream: &Stream) -> io::Result<()> {
        let limbo_bytes = self.daemon.families().shared().limbo_bytes;
        let mut protocol = Protocol::new(tiermgr_sys::process::page_size(), limbo_bytes);
        let mut packet = vec![0; REQUEST_BYTES_MAX];
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        stream.set_send_timeout(Some(SEND_TIMEOUT))?;
        loop {
            let patience = if protocol.is_settled() {
                None
            } else {
                Some(
                    deadline
                        .saturating_duration_since(Instant::now())
                        .max(Duration::from_millis(1)),
                )
            };
            stream.set_recv_timeout(patience)?;
            let (len, fds) = match stream.recv_with_fds(&mut packet) {
                Ok((0, _)) => return Ok(()),
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let refused = Refused::closing(
                        ErrorCode::Protocol,
                        format!("a packet has at most {REQUEST_BYTES_MAX} bytes and 8 descriptors"),
                    );
                    return send(stream, &refusal(refused).into());
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    let refused =
                        Refused::closing(ErrorCode::Protocol, "no hello or attach in time");
                    return send(stream, &refusal(refused).into());
                }
                Err(error) => return Err(error),
            };
            let received = packet.get(..len).unwrap_or(&packet);
            let unsettled = !protocol.is_settled();
            match protocol.next(received, fds.len()) {
                Ok(step) => match self.carry_out(step, fds) {
                    Ok(answer) => {
                        let is_back = matches!(answer.message, FromDaemon::Ready);
                        let sent = send(stream, &answer);
                        if is_back {
                            protocol.recognise();
                        }
                        // Whoever asked for the end has its answer by now.
                        self.daemon.leave_if_ended();
                        sent?;
                    }
                    Err(mut refused) => {
                        // A handshake that failed half-way is not continued.
                        refused.close |= unsettled;
                        let close = refused.close;
                        send(stream, &refusal(refused).into())?;
                        if close {
                            return Ok(());
                        }
                    }
                },
                Err(refused) => {
                    tracing::debug!(
                        pid = self.peer.pid,
                        uid = self.peer.uid,
                        message = refused.message,
                        "refused"
                    );
                    let close = refused.close;
                    send(stream, &refusal(refused).into())?;
                    if close {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn carry_out(&mut self, step: Step, fds: Vec<OwnedFd>) -> Result<Answer<'_>, Refused> {
        if self.daemon.is_ending() && !matches!(step, Step::Control(_) | Step::WelcomeControl) {
            return self.carry_out_while_ending(step);
        }
        match step {
            Step::WelcomeControl => Ok(FromDaemon::Ready.into()),
            Step::Control(request) => control::answer(self.daemon, self.peer.uid, request)
                .map(|reply| FromDaemon::Control(reply).into()),
            Step::WelcomeClient { name, class } => {
                let secret = families::draw_secret().map_err(|error| {
                    tracing::error!(%error, "drawing a number for a family");
                    internal()
                })?;
                self.welcome(secret, GuestKind::Client { secret, name, class })
            }
            Step::WelcomeChild { family: secret, lacks_arena } => {
                let families = self.daemon.families();
                // Before the look at those that are served: one that is taken up in between is there.
                if families.is_waiting(secret) {
                    let text =
                        "the daemon was restarted, and has not taken this program up again yet";
                    return Err(Refused::closing(ErrorCode::ShuttingDown, text));
                }
                let family = families.find(secret).ok_or_else(|| {
                    Refused::closing(ErrorCode::NotPermitted, "there is no such family")
                })?;
                if let Some(proc) = family.find_process(self.peer.pid) {
                    let arena = lacks_arena.then(|| family.executor().arena_of(proc)).transpose();
                    let given = arena.map_err(|error| engine_refusal(&error))?;
                    family.joined(proc, self.peer.uid);
                    family.executor().back(proc);
                    self.resident = Some(Resident { family, proc });
                    return Ok(Answer { message: FromDaemon::Ready, fds: Vec::new(), given });
                }
                self.welcome(secret, GuestKind::Child(family))
            }
            Step::Attach(attach) => self.attach(attach, fds),
            Step::AddRegion { span, kind, name } => {
                let resident = self.resident()?;
                let Reply::Region(region) = resident.ask(Request::AddRegion { span })? else {
                    return Err(internal());
                };
                if let Some(advice) = protocol::advice_for(kind) {
                    resident.ask(Request::Advise { span, advice })?;
                }
                resident.family.named(resident.proc, region.0, name);
                Ok(FromDaemon::Region(region.0).into())
            }
            Step::Ask(request) => {
                let resident = self.resident()?;
                let reply = resident.ask(request)?;
                if let Request::DropRegion { region } = request {
                    resident.family.dropped(resident.proc, region.0);
                }
                Ok(message_of(reply).into())
            }
            Step::Stats => Ok(FromDaemon::Stats(self.resident()?.family.executor().stats()).into()),
        }
    }

    /// While everything is being brought back, programs may still give memory up.
    fn carry_out_while_ending(&self, step: Step) -> Result<Answer<'_>, Refused> {
        match step {
            Step::Ask(
                request @ (Request::DropRegion { .. }
                | Request::Discard { .. }
                | Request::Unpin { .. }
                | Request::Residency { .. }),
            ) => Ok(message_of(self.resident()?.ask(request)?).into()),
            Step::Stats => Ok(FromDaemon::Stats(self.resident()?.family.executor().stats()).into()),
            _ => Err(Refused::new(ErrorCode::ShuttingDown, "the daemon is ending")),
        }
    }

    fn welcome(&mut self, secret: u64, as_what: GuestKind) -> Result<Answer<'_>, Refused> {
        let shared = self.daemon.families().shared();
        let no_ring = |error: io::Error| {
            tracing::error!(%error, "making the ring of a client");
            Refused::closing(ErrorCode::NoRoom, "the daemon cannot make another ring")
        };
        let ring = RingOwner::create().map_err(no_ring)?;
        let ring_file = fs::File::from(ring.memfd().try_clone_to_owned().map_err(no_ring)?);
        let ring_bytes = ring_file.metadata().map_err(no_ring)?.len();
        let welcome = Welcome {
            family: secret,
            limbo_bytes: shared.limbo_bytes,
            arena_bytes: arena_bytes(shared.room.usage().total),
            ring_bytes,
            has_move: shared.features.uffd_move,
        };
        let guest = self.guest.insert(Guest { ring, as_what });
        Ok(Answer {
            message: FromDaemon::Welcome(welcome),
            fds: vec![self.daemon.device(), guest.ring.memfd(), guest.ring.eventfd()],
            given: None,
        })
    }

    fn attach(&mut self, attach: Attach, fds: Vec<OwnedFd>) -> Result<Answer<'_>, Refused> {
        let Some(Guest { ring, as_what }) = self.guest.take() else { return Err(internal()) };
        let shared = self.daemon.families().shared();
        let mut fds = fds.into_iter();
        let arena = match as_what {
            GuestKind::Client { .. } => {
                let fd = fds.next().ok_or_else(internal)?;
                shake_hands(fd.as_fd(), ARENA_FEATURES, "arena")?;
                Some(prove_identity(fd, attach.nonce_page, self.peer.pid)?)
            }
            GuestKind::Child(_) => None,
        };
        let limbo_fd = fds.next().ok_or_else(internal)?;
        shake_hands(limbo_fd.as_fd(), LIMBO_FEATURES, "limbo")?;
        let limbo = Span::new(Addr(attach.limbo_start), shared.limbo_bytes);
        let limbo_fd = arm_limbo(limbo_fd, limbo)?;
        let pid = self.peer.pid;
        let vanished = |error: io::Error| {
            Refused::closing(
                ErrorCode::NotPermitted,
                format!("the program cannot be seen: {error}"),
            )
        };
        let pidfd = pidfd::open(pid).map_err(vanished)?;
        let helper_pid = find_helper(pid, attach.helper_pid)?;
        let process = NewProcess {
            pid,
            pidfd,
            helper_pid,
            arena,
            limbo_fd,
            limbo,
            nonce_page: Addr(attach.nonce_page),
            ring,
        };
        let (family, is_new) = match as_what {
            GuestKind::Child(family) => (family, false),
            GuestKind::Client { secret, name, class } => {
                let family = self
                    .daemon
                    .families()
                    .begin(secret, &name, class, self.peer.uid)
                    .map_err(|error| not_begun(&error))?;
                (family, true)
            }
        };
        match family.executor().attach(process) {
            Ok((proc, given)) => {
                family.joined(proc, self.peer.uid);
                self.daemon.families().attached(1);
                tracing::info!(
                    family = family.number(),
                    pid,
                    uid = self.peer.uid,
                    helper = helper_pid,
                    "attached"
                );
                self.resident = Some(Resident { family, proc });
                Ok(Answer { message: FromDaemon::Attached, fds: Vec::new(), given })
            }
            Err(error) => {
                if is_new {
                    self.daemon.families().end(&family);
                }
                Err(Refused { close: true, ..engine_refusal(&error) })
            }
        }
    }

    fn resident(&self) -> Result<&Resident, Refused> {
        self.resident.as_ref().ok_or_else(internal)
    }

    /// The connection is over. That alone says little: a program may close every descriptor that it
    /// does not know and live on. The executor looks whether the address space is still there.
    fn leave(&mut self) {
        if let Some(Resident { family, proc }) = self.resident.take() {
            family.executor().gone(proc);
        }
    }
}

impl Resident {
    fn ask(&self, request: Request) -> Result<Reply, Refused> {
        let patience =
            if matches!(request, Request::Pin { .. }) { PIN_TIMEOUT } else { ASK_TIMEOUT };
        match self.family.executor().ask(self.proc, request, patience) {
            Ok(Reply::Refused(Refusal::NoRoom)) => {
                Err(Refused::new(code_of(Refusal::NoRoom), self.why_no_pin(request)))
            }
            Ok(Reply::Refused(refusal)) => Err(Refused::new(code_of(refusal), refusal.to_string())),
            Ok(reply) => Ok(reply),
            Err(error) => Err(engine_refusal(&error)),
        }
    }

    /// With the numbers, which nobody else has.
    fn why_no_pin(&self, request: Request) -> String {
        let stats = self.family.executor().stats();
        let wanted = match request {
            Request::Pin { span } => Size(span.len).rounded(),
            _ => "more".to_owned(),
        };
        format!(
            "pinning {wanted} would exceed what may be pinned: half of the {} that this program may have in \
             DRAM now, of which {} are pinned already",
            Size(stats.budget_now_bytes).rounded(),
            Size(stats.pinned_now_bytes).rounded()
        )
    }
}

fn send(stream: &Stream, answer: &Answer<'_>) -> io::Result<()> {
    // Lists are long and rare, everything else is short.
    let mut buffer = match answer.message {
        FromDaemon::Control(_) => vec![0; PACKET_BYTES_MAX],
        _ => vec![0; REQUEST_BYTES_MAX],
    };
    match tiermgr_wire::encode(&answer.message, &mut buffer) {
        Ok(bytes) => {
            let given = answer.given.as_ref().map(AsFd::as_fd);
            let fds: Vec<_> = answer.fds.iter().copied().chain(given).collect();
            stream.send_with_fds(bytes, &fds)
        }
        Err(error) => {
            tracing::error!(error = %chain(&error), "encoding an answer");
            let bytes = tiermgr_wire::encode(&refusal(internal()), &mut buffer)
                .map_err(io::Error::other)?;
            stream.send_with_fds(bytes, &[])
        }
    }
}

fn refusal(refused: Refused) -> FromDaemon {
    let mut message = refused.message;
    // Fits a packet whatever a path or a name in it may be.
    let end = (0..=1024.min(message.len())).rev().find(|end| message.is_char_boundary(*end));
    message.truncate(end.unwrap_or(0));
    FromDaemon::Error { code: refused.code, message }
}

fn internal() -> Refused {
    Refused::new(ErrorCode::Internal, "something failed inside the daemon; its log says what")
}

fn not_begun(error: &BeginError) -> Refused {
    match error {
        BeginError::Ending => Refused::closing(ErrorCode::ShuttingDown, error.to_string()),
        BeginError::TooMany
        | BeginError::TooManyOfUser { .. }
        | BeginError::TooLittleDram { .. } => {
            Refused::closing(ErrorCode::NoRoom, error.to_string())
        }
        BeginError::Engine(error) => Refused { close: true, ..engine_refusal(error) },
        BeginError::State { source, .. } if is_full(source) => {
            Refused { close: true, ..state_full(error) }
        }
        BeginError::State { .. } => {
            tracing::error!(error = %chain(error), "beginning a family");
            Refused { close: true, ..internal() }
        }
    }
}

/// Four times the DRAM limit: a program that needs more makes further ones, each twice as large. Beyond 4 GiB
/// nothing is gained, and below 64 MiB nothing saved.
const fn arena_bytes(dram_bytes: u64) -> u64 {
    let wanted = dram_bytes.saturating_mul(4);
    if wanted > ARENA_BYTES_MAX {
        return ARENA_BYTES_MAX;
    }
    let rounded = wanted.next_power_of_two();
    if rounded < ARENA_BYTES_MIN { ARENA_BYTES_MIN } else { rounded }
}

const ARENA_BYTES_MIN: u64 = 64 << 20;
const ARENA_BYTES_MAX: u64 = 4 << 30;

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn state_full(error: &dyn std::error::Error) -> Refused {
    let text = format!("{}; end programs, or make the file system larger", chain(error));
    Refused::new(ErrorCode::NoRoom, text)
}

fn engine_refusal(error: &EngineError) -> Refused {
    let code = match error {
        EngineError::Refused(refusal) => code_of(*refusal),
        EngineError::Attach { .. } => ErrorCode::NotPermitted,
        EngineError::TooManyProcesses
        | EngineError::StateFull { .. }
        | EngineError::BeyondCapacity { .. } => ErrorCode::NoRoom,
        EngineError::NoProcess(_) => ErrorCode::NotManaged,
        EngineError::Ended => ErrorCode::ShuttingDown,
        EngineError::State { source, .. } if is_full(source) => return state_full(error),
        EngineError::PageSize { .. } => ErrorCode::Unsupported,
        _ => {
            tracing::error!(error = %chain(error), "a request failed");
            return internal();
        }
    };
    Refused::new(code, error.to_string())
}

const fn code_of(refusal: Refusal) -> ErrorCode {
    match refusal {
        Refusal::NotManaged => ErrorCode::NotManaged,
        Refusal::Misaligned | Refusal::Overlaps | Refusal::NoLease => ErrorCode::InvalidArgument,
        Refusal::TooMany
        | Refusal::NoRoom
        | Refusal::NoMappings
        | Refusal::NoStateRoom
        | Refusal::DoesNotFit => ErrorCode::NoRoom,
        Refusal::NotAttached => ErrorCode::Protocol,
        Refusal::Lost | Refusal::StaysForLost => ErrorCode::DataLost,
    }
}

fn message_of(reply: Reply) -> FromDaemon {
    match reply {
        Reply::Done => FromDaemon::Done,
        Reply::Region(region) => FromDaemon::Region(region.0),
        Reply::Lease(lease) => FromDaemon::Lease(lease.0),
        Reply::Residency(residency) => FromDaemon::Residency {
            resident_bytes: residency.resident_bytes,
            parked_bytes: residency.parked_bytes,
            absent_bytes: residency.absent_bytes,
            unarmed_bytes: residency.unarmed_bytes,
            poisoned_bytes: residency.poisoned_bytes,
        },
        Reply::Refused(refused) => {
            FromDaemon::Error { code: code_of(refused), message: refused.to_string() }
        }
    }
}

/// Layout changes of arenas are told (but not REMOVE: a client that discards much would starve COPY);
/// write protection is used.
const ARENA_FEATURES: u64 = abi::FEATURE_EVENT_FORK
    | abi::FEATURE_EVENT_REMAP
    | abi::FEATURE_EVENT_UNMAP
    | abi::FEATURE_PAGEFAULT_FLAG_WP;

/// An absent page of limbo is an error of whoever reads it, never a reason to wait.
const LIMBO_FEATURES: u64 = abi::FEATURE_SIGBUS;

/// Makes sure that `fd` is a userfaultfd of which nobody has chosen the features yet, and chooses.
fn shake_hands(fd: BorrowedFd<'_>, features: u64, what: &str) -> Result<(), Refused> {
    let wrong = |why: &str| {
        Refused::closing(ErrorCode::InvalidArgument, format!("the descriptor for {what} {why}"))
    };
    // An ioctl number means something else to every kind of file: look before speaking.
    let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .map_err(|error| wrong(&format!("cannot be looked at: {error}")))?;
    if link.as_os_str() != tiermgr_sys::keeper::UFFD_LINK {
        return Err(wrong("is not a userfaultfd"));
    }
    let granted = uffd::handshake(fd, features)
        .map_err(|error| wrong(&format!("refuses the handshake: {error}")))?;
    if granted.features & features != features {
        return Err(wrong("lacks features that this kernel should have"));
    }
    // The client can undo this: nothing that reads relies on it. But a poll of a descriptor that blocks
    // is answered at once, again and again.
    make_nonblocking(fd).map_err(|error| wrong(&format!("stays blocking: {error}")))?;
    Ok(())
}

/// Makes sure that the userfaultfd is of the address space of `pid`. The pid is that of whoever made the
/// connection; a connection can be handed on, its maker can end, and its number can become somebody
/// else's, whose memory we would then read for a stranger. A child is asked for more, by the engine.
fn prove_identity(fd: OwnedFd, nonce_page: u64, pid: i32) -> Result<OwnedFd, Refused> {
    let refuse =
        |why: String| Refused::closing(ErrorCode::NotPermitted, format!("the nonce page {why}"));
    let nonce = families::draw_secret().map_err(|error| {
        tracing::error!(%error, "drawing a nonce");
        internal()
    })?;
    let mut page = vec![0; usize::try_from(tiermgr_sys::process::page_size()).unwrap_or(0)];
    let nonce = nonce.to_ne_bytes();
    if let Some(place) = page.get_mut(..nonce.len()) {
        place.copy_from_slice(&nonce);
    }
    let uffd = Uffd::from_fd(fd);
    uffd.register(nonce_page, page.len() as u64, Mode::MISSING)
        .map_err(|error| refuse(format!("cannot be armed: {error}")))?;
    let installed = uffd.copy(nonce_page, &page, false, true);
    if installed.outcome != Outcome::Done {
        return Err(refuse(format!(
            "cannot be filled ({:?}); nobody may touch it",
            installed.outcome
        )));
    }
    let mut seen = [0; 8];
    // A program that drops the page meanwhile must not keep this thread.
    read_present(pid, nonce_page, &mut seen)
        .map_err(|error| refuse(format!("cannot be read: {error}")))?;
    if seen != nonce {
        return Err(refuse("is not in the memory of the process that connected".to_owned()));
    }
    Ok(uffd.into_fd())
}

fn arm_limbo(fd: OwnedFd, limbo: Span) -> Result<OwnedFd, Refused> {
    if limbo.len == 0 {
        return Ok(fd);
    }
    let uffd = Uffd::from_fd(fd);
    uffd.register(limbo.start.0, limbo.len, Mode::MISSING).map_err(|error| {
        Refused::closing(ErrorCode::InvalidArgument, format!("limbo cannot be armed: {error}"))
    })?;
    Ok(uffd.into_fd())
}

/// The helper that a process names, by our number of it: the one that the client knows may be of another
/// pid namespace. A process can have several, one for each of its connections; that this one is what it
/// should be, the engine checks.
fn find_helper(pid: i32, named: i32) -> Result<i32, Refused> {
    let deadline = Instant::now() + HELPER_TIMEOUT;
    loop {
        let children = pidfd::children_of(pid).map_err(|error| {
            Refused::closing(ErrorCode::NotPermitted, format!("looking for the helper: {error}"))
        })?;
        // A child may end between the two looks.
        let found = children
            .into_iter()
            .find(|child| pidfd::number_seen_by(pid, *child).is_ok_and(|seen| seen == Some(named)));
        if let Some(helper) = found {
            return Ok(helper);
        }
        // The kernel's list of children leaves some out while others end.
        if Instant::now() >= deadline {
            return Err(Refused::closing(
                ErrorCode::InvalidArgument,
                format!("process {pid} has no child {named} that could be its helper"),
            ));
        }
        thread::sleep(HELPER_LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_arenas_follow_the_limit_within_bounds() {
        assert_eq!(arena_bytes(0), ARENA_BYTES_MIN);
        assert_eq!(arena_bytes(48 << 20), 256 << 20);
        assert_eq!(arena_bytes(256 << 20), 1 << 30);
        assert_eq!(arena_bytes((1 << 30) + 1), ARENA_BYTES_MAX);
        assert_eq!(arena_bytes(u64::MAX), ARENA_BYTES_MAX);
    }
}
