//! Packets to and from the daemon.

use super::{FORKED, GREETING_MIN, nanoseconds};
use crate::fds;
use crate::status::{Error, Result, Status, remedy};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use tiermgr_sys::process::{monotonic_ns, nap};
use tiermgr_sys::sock::Stream;
use tiermgr_wire::reply::FromDaemon;
use tiermgr_wire::request::ToDaemon;

/// After so long a wait looks again whose process it is.
const SLICE_MS: u64 = 100;
/// After so long a connect that finds no room lets signal handlers be called.
const CONNECT_SLICE: Duration = Duration::from_millis(10);
/// Between two looks where it may not poll.
const PEEK_NS: u64 = 1_000_000;

const UNGREETED: Error = Error::new(
    Status::ConnectionLost,
    "the daemon does not greet; see its log, whether it is overloaded or stopped",
);

/// How long an attempt waits for the daemon, from its greeting to its answer to an `Attach`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    by_ns: u64,
    /// For that answer it waits so long in any case, after a helper has taken its time to start.
    answer: Duration,
    /// Whose attempt it is.
    pid: i32,
}

impl Limit {
    pub(super) fn new(whole: Duration, answer: Duration) -> Self {
        Self {
            by_ns: monotonic_ns().saturating_add(nanoseconds(whole)),
            answer,
            pid: fds::own_pid(),
        }
    }

    pub(super) const fn pid(self) -> i32 {
        self.pid
    }

    /// When an attempt to be greeted that begins now ends.
    pub(super) fn greeting_by(self) -> u64 {
        self.by_ns.max(monotonic_ns().saturating_add(nanoseconds(GREETING_MIN)))
    }

    pub(super) fn for_answer(self) -> Duration {
        left(self.by_ns).max(self.answer)
    }
}

/// From now until then.
pub(super) fn left(by_ns: u64) -> Duration {
    Duration::from_nanos(by_ns.saturating_sub(monotonic_ns()))
}

/// A connection of the process `pid`, made by then.
pub(super) fn open(socket: &Path, by_ns: u64, pid: i32) -> Result<Stream> {
    let stream = connect(socket, by_ns, pid)?;
    // None at all would be no limit.
    let wait = left(by_ns).max(GREETING_MIN);
    stream
        .set_recv_timeout(Some(wait))
        .and_then(|()| stream.set_send_timeout(Some(wait)))
        .map_err(|error| Error::system("preparing the socket", &error))?;
    Ok(stream)
}

/// A child that a signal handler forked in the middle of a connect would connect its parent's socket.
fn connect(socket: &Path, by_ns: u64, pid: i32) -> Result<Stream> {
    loop {
        let undisturbed = Undisturbed::new();
        if !fds::is_settled(pid) {
            return Err(FORKED);
        }
        let outcome = Stream::connect_within(socket, left(by_ns).min(CONNECT_SLICE));
        drop(undisturbed);
        match outcome {
            Ok(stream) => return Ok(stream),
            Err(error)
                if error.raw_os_error() == Some(libc::EAGAIN) && left(by_ns) > Duration::ZERO => {}
            Err(error) => return Err(unconnected(socket, &error)),
        }
    }
}

fn unconnected(socket: &Path, error: &io::Error) -> Error {
    let (status, cause) = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ECONNREFUSED | libc::ENOTDIR) => (
            Status::NoDaemon,
            "nobody listens there; start tiermgrd, or run the program with `tiermgrctl run` (in a container: \
             pass the socket in)",
        ),
        Some(libc::EACCES | libc::EPERM) => {
            (Status::NotPermitted, "this user may not use the socket; ask to be put into its group")
        }
        Some(libc::EAGAIN) => (
            Status::ConnectionLost,
            "the daemon takes no connection, and too many wait for it already; see its log",
        ),
        _ => (Status::System, "the kernel refused"),
    };
    let text = format!("connecting to {}: {cause} ({error}{})", socket.display(), remedy(error));
    Error::because(status, text)
}

pub(super) fn send(
    stream: &Stream,
    message: &ToDaemon,
    descriptors: &[BorrowedFd<'_>],
    packet: &mut [u8],
) -> Result<()> {
    let bytes = tiermgr_wire::encode(message, packet)?;
    loop {
        match stream.send_with_fds(bytes, descriptors) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ended("sending to the daemon", &error)),
        }
    }
}

/// For the process `pid`: what comes is not for a child that a signal handler forks.
pub(super) fn receive(
    stream: &Stream,
    pid: i32,
    packet: &mut [u8],
) -> Result<(FromDaemon, Vec<OwnedFd>)> {
    loop {
        if !fds::is_settled(pid) {
            return Err(FORKED);
        }
        match stream.recv_with_fds(packet) {
            Ok((0, _)) => {
                return Err(Error::new(Status::ConnectionLost, "the daemon closed the connection"));
            }
            Ok((length, descriptors)) => {
                return Ok((tiermgr_wire::decode(&packet[..length])?, descriptors));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ended("waiting for the daemon", &error)),
        }
    }
}

/// Says hello for the process `pid`, and waits for the greeting until then. A child that a signal handler forks
/// meanwhile leaves both to its parent.
pub(super) fn greeting(
    stream: &Stream,
    hello: &ToDaemon,
    by_ns: u64,
    pid: i32,
    packet: &mut [u8],
) -> Result<(FromDaemon, Vec<OwnedFd>)> {
    {
        let _undisturbed = Undisturbed::new();
        if !fds::is_settled(pid) {
            return Err(FORKED);
        }
        send(stream, hello, &[], packet)?;
    }
    match heard(stream, Some(left(by_ns)), pid) {
        Heard::Something => take(stream, pid, packet).unwrap_or(Err(FORKED)),
        Heard::Elsewhere => Err(FORKED),
        Heard::Nothing => Err(UNGREETED),
    }
}

/// Whether something can be received, be it the end of the connection, within `wait`.
pub(super) fn readable(stream: &Stream, wait: Duration) -> bool {
    poll(stream, Some(wait), || true) == Heard::Something
}

/// What came of a wait for something to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    /// It can be received, be it the end of the connection.
    Something,
    /// The time is up.
    Nothing,
    /// This is another process than the one that was to wait, forked by a signal handler.
    Elsewhere,
}

/// Waits until the process `pid` can receive something. Unlike a system call that receives this ends, whatever the
/// program has asked for, where a signal handler was called.
fn heard(stream: &Stream, wait: Option<Duration>, pid: i32) -> Heard {
    poll(stream, wait, || fds::is_settled(pid))
}

fn poll(stream: &Stream, wait: Option<Duration>, goes_on: impl Fn() -> bool) -> Heard {
    let deadline = wait.map(|wait| monotonic_ns().saturating_add(nanoseconds(wait)));
    loop {
        let left = deadline.map_or(u64::MAX, |deadline| deadline.saturating_sub(monotonic_ns()));
        let looked = look(stream, left);
        if !goes_on() {
            return Heard::Elsewhere;
        }
        match looked {
            Ok(false) if deadline.is_some_and(|deadline| monotonic_ns() >= deadline) => {
                return Heard::Nothing;
            }
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The next call on the socket tells what is wrong with it.
            Ok(true) | Err(_) => return Heard::Something,
        }
    }
}

/// Waits a slice of time, or `left_ns` if that is less. Whether something can be received.
fn look(stream: &Stream, left_ns: u64) -> io::Result<bool> {
    // A handler may have been called just before.
    let slice = i32::try_from(left_ns.div_ceil(1_000_000).min(SLICE_MS)).unwrap_or(i32::MAX);
    let mut wanted =
        libc::pollfd { fd: stream.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: poll reads and writes one `pollfd`, which is here.
    let ready = unsafe { libc::poll(&raw mut wanted, 1, slice) };
    if ready >= 0 {
        return Ok(ready > 0);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted {
        return Err(error);
    }
    // A program that allows itself no descriptors (RLIMIT_NOFILE) may not poll even one that it has, and a filter may
    // refuse the call. That says nothing of the socket, and a wait in its next call would have no end.
    let is_there = peek(stream)?;
    if !is_there {
        nap(Duration::from_nanos(left_ns.min(PEEK_NS)));
    }
    Ok(is_there)
}

/// Whether something can be received, by a call that does not wait.
fn peek(stream: &Stream) -> io::Result<bool> {
    let mut byte = 0_u8;
    let mut place = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: zeros are a valid header, of a message without an address and without descriptors.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut place, 1);
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // Not recv, which is another system call: filters are asked about this one.
    // SAFETY: the header, its one place and the byte there outlive the call.
    if unsafe { libc::recvmsg(stream.as_fd().as_raw_fd(), &raw mut header, flags) } >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) }
}

/// What came of a request.
#[derive(Debug)]
pub(super) enum Exchanged {
    Answered(FromDaemon),
    /// Nobody was asked.
    Unsent(Error),
    /// There is no answer yet.
    Late,
    /// There will be no answer.
    Cut(Error),
    /// This is another process than the one that asked, forked by a signal handler.
    Elsewhere,
}

/// One request of the process `pid`. Its answer is waited for so long, or for ever.
pub(super) fn exchange(
    stream: &Stream,
    message: &ToDaemon,
    wait: Option<Duration>,
    pid: i32,
    packet: &mut [u8],
) -> Exchanged {
    {
        let _undisturbed = Undisturbed::new();
        if !fds::is_settled(pid) {
            return Exchanged::Elsewhere;
        }
        if let Err(error) = send(stream, message, &[], packet) {
            return Exchanged::Unsent(error);
        }
    }
    match heard(stream, wait, pid) {
        Heard::Nothing => return Exchanged::Late,
        Heard::Elsewhere => return Exchanged::Elsewhere,
        Heard::Something => {}
    }
    match take(stream, pid, packet) {
        Some(Ok((answer, _))) => Exchanged::Answered(answer),
        Some(Err(error)) => Exchanged::Cut(error),
        None => Exchanged::Elsewhere,
    }
}

/// Waits for an answer to the process `pid`. `None`: this is another process, forked by a signal handler.
pub(super) fn answer(
    stream: &Stream,
    pid: i32,
    packet: &mut [u8],
) -> Option<Result<(FromDaemon, Vec<OwnedFd>)>> {
    if heard(stream, None, pid) == Heard::Elsewhere {
        return None;
    }
    take(stream, pid, packet)
}

/// The answer that has come.
fn take(
    stream: &Stream,
    pid: i32,
    packet: &mut [u8],
) -> Option<Result<(FromDaemon, Vec<OwnedFd>)>> {
    let _undisturbed = Undisturbed::new();
    fds::is_settled(pid).then(|| receive(stream, pid, packet))
}

/// Keeps signal handlers from this thread for as long as it is there: what a child does that one of them forks
/// comes after it. Not those of a fault of the thread's own.
#[derive(Debug)]
pub(crate) struct Undisturbed {
    before: libc::sigset_t,
}

impl Undisturbed {
    pub(crate) fn new() -> Self {
        // SAFETY: zeros are a valid set.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        let mut before = set;
        // SAFETY: the set is here.
        unsafe { libc::sigfillset(&raw mut set) };
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP] {
            // SAFETY: as above, and this is a signal.
            unsafe { libc::sigdelset(&raw mut set, fault) };
        }
        // SAFETY: both sets are here.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before) };
        Self { before }
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        // SAFETY: the set that was in force.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut())
        };
    }
}

fn ended(what: &str, error: &io::Error) -> Error {
    let status = match error.raw_os_error() {
        Some(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN | libc::EAGAIN) => {
            Status::ConnectionLost
        }
        _ => Status::System,
    };
    Error::because(status, format!("{what}: {error}"))
}

pub(super) fn unexpected(what: &str, reply: FromDaemon) -> Error {
    match reply {
        FromDaemon::Error { code, message } => Error::because(code.into(), message),
        _ => Error::because(Status::Protocol, format!("{what} was not what belongs there")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The step that goes wrong in a process that may have no descriptors. Zero: none does.
    fn wrong_without_descriptors(mine: &Stream, peer: &Stream) -> libc::c_int {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: setrlimit reads one `rlimit`.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) } != 0 {
            return 1;
        }
        let (wait, began) = (Duration::from_millis(50), monotonic_ns());
        if poll(mine, Some(wait), || true) != Heard::Nothing {
            return 2;
        }
        if monotonic_ns() - began < nanoseconds(wait) {
            return 3;
        }
        if readable(mine, Duration::ZERO) || poll(mine, None, || false) != Heard::Elsewhere {
            return 4;
        }
        if peer.send_with_fds(b"an answer", &[]).is_err() || !readable(mine, Duration::ZERO) {
            return 5;
        }
        // It is there yet.
        let mut packet = [0_u8; 16];
        if poll(mine, None, || true) != Heard::Something
            || !matches!(mine.recv_with_fds(&mut packet), Ok((9, _)))
        {
            return 6;
        }
        // SAFETY: ends the peer's side; the stream is not used after this.
        unsafe { libc::shutdown(peer.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
        if readable(mine, Duration::ZERO) { 0 } else { 7 }
    }

    #[test]
    fn a_wait_has_an_end_where_no_descriptors_are_allowed() {
        let (mine, peer) = Stream::pair().expect("a pair");
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let wrong = wrong_without_descriptors(&mine, &peer);
            // SAFETY: ends the child.
            unsafe { libc::_exit(wrong) };
        }
        let mut status = 0;
        // SAFETY: waitpid writes one int.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "{status:#x}");
    }
}
