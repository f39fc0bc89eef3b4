//! Packets to and from the daemon.

use super::{GREETING_MIN, nanoseconds};
use crate::status::{Error, Result, Status, remedy};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use tiermgr_sys::process::monotonic_ns;
use tiermgr_sys::sock::Stream;
use tiermgr_wire::reply::FromDaemon;
use tiermgr_wire::request::ToDaemon;

/// How long an attempt waits for the daemon, from its greeting to its answer to an `Attach`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    by_ns: u64,
    /// For that answer it waits so long in any case, after a helper has taken its time to start.
    answer: Duration,
}

impl Limit {
    pub(super) fn new(whole: Duration, answer: Duration) -> Self {
        Self { by_ns: monotonic_ns().saturating_add(nanoseconds(whole)), answer }
    }

    pub(super) fn for_greeting(self) -> Duration {
        left(self.by_ns)
    }

    pub(super) fn for_answer(self) -> Duration {
        left(self.by_ns).max(self.answer)
    }
}

/// From now until then.
pub(super) fn left(by_ns: u64) -> Duration {
    Duration::from_nanos(by_ns.saturating_sub(monotonic_ns()))
}

pub(super) fn open(socket: &Path, wait: Duration) -> Result<Stream> {
    let stream = Stream::connect(socket).map_err(|error| {
        let (status, cause) = match error.raw_os_error() {
            Some(libc::ENOENT | libc::ECONNREFUSED | libc::ENOTDIR) => (
                Status::NoDaemon,
                "nobody listens there; start tiermgrd, or run the program with `tiermgrctl run` (in a container: \
                 pass the socket in)",
            ),
            Some(libc::EACCES | libc::EPERM) => (
                Status::NotPermitted,
                "this user may not use the socket; ask to be put into its group",
            ),
            _ => (Status::System, "the kernel refused"),
        };
        let text =
            format!("connecting to {}: {cause} ({error}{})", socket.display(), remedy(&error));
        Error::because(status, text)
    })?;
    // None at all would be no limit.
    let wait = wait.max(GREETING_MIN);
    stream
        .set_recv_timeout(Some(wait))
        .and_then(|()| stream.set_send_timeout(Some(wait)))
        .map_err(|error| Error::system("preparing the socket", &error))?;
    Ok(stream)
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

pub(super) fn receive(stream: &Stream, packet: &mut [u8]) -> Result<(FromDaemon, Vec<OwnedFd>)> {
    loop {
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

/// Whether something can be received, be it the end of the connection, within `wait`.
pub(super) fn readable(stream: &Stream, wait: Duration) -> bool {
    let deadline = monotonic_ns().saturating_add(nanoseconds(wait));
    let mut wanted =
        libc::pollfd { fd: stream.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    loop {
        let left = deadline.saturating_sub(monotonic_ns()).div_ceil(1_000_000);
        let left = i32::try_from(left).unwrap_or(i32::MAX);
        // SAFETY: poll reads and writes one `pollfd`, which is here.
        let ready = unsafe { libc::poll(&raw mut wanted, 1, left) };
        if ready >= 0 {
            return ready > 0;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            // The next call on the socket tells what is wrong with it.
            return true;
        }
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
