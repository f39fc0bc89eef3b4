//! The control connection to a daemon.

use crate::verb::run::place::{FOLDER_PREFIX, SOCKET_NAME, runtime_parents};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tiermgr_sys::sock::Stream;
use tiermgr_wire::control::{ControlReply, ControlRequest, ROWS_MAX, Status};
use tiermgr_wire::hello::{Hello, Role};
use tiermgr_wire::reply::FromDaemon;
use tiermgr_wire::request::ToDaemon;
use tiermgr_wire::{DEFAULT_SOCKET, PACKET_BYTES_MAX, WireError};

/// A daemon that serves answers such questions in microseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Most pages of a list that are asked for: a daemon that never ends its list is not believed.
const PAGES_MAX: u32 = 4096;

/// Whether one answers at all is asked of a few, in passing.
const GLANCE_TIMEOUT: Duration = Duration::from_millis(200);
/// More private daemons are not named.
const PRIVATE_MAX: usize = 8;

/// Why a daemon could not be asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    /// Nobody listens.
    #[error(
        "no daemon answers at {}; {}{}, or give its socket with --socket",
        path.display(),
        told(private),
        how_to_start()
    )]
    Absent {
        /// Where.
        path: PathBuf,
        /// Sockets of private daemons that answer.
        private: Vec<PathBuf>,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// What was named is something else.
    #[error("{} is not a socket; give that of the daemon with --socket", path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// The socket is not for this user.
    #[error(
        "the socket {} is not open to you; use sudo, or join its group (`socket_group` in the \
         daemon's configuration)",
        path.display()
    )]
    Forbidden {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Too many wait to be accepted.
    #[error(
        "the daemon at {} takes no connection, and too many wait for it already; see its log (is it stopped?)",
        path.display()
    )]
    Crowded {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The connection broke.
    #[error("the daemon ended the conversation (is it overloaded or ending? see its log)")]
    Broken(#[source] io::Error),
    /// What came is not a message.
    #[error("the daemon is of another version")]
    Wire(#[from] WireError),
    /// The daemon says no.
    #[error("the daemon refuses: {0}")]
    Refused(String),
    /// The answer is none to this question.
    #[error("the daemon gave an answer to another question: {0}")]
    Unexpected(String),
}

/// How a daemon for the whole machine is started on this machine.
pub(crate) fn how_to_start() -> &'static str {
    if Path::new("/run/systemd/system").exists() {
        "start it with `systemctl start tiermgrd`"
    } else {
        "start `tiermgrd` as root"
    }
}

/// Private daemons, for who looks for one and finds none.
fn told(private: &[PathBuf]) -> String {
    let Some(first) = private.first() else { return String::new() };
    let others: Vec<_> = private.iter().skip(1).map(|path| path.display().to_string()).collect();
    let others = if others.is_empty() {
        others.concat()
    } else {
        format!(" (others: {})", others.join(", "))
    };
    format!(
        "a private one of `tiermgrctl run` does: --socket {}{others}; for the whole machine ",
        first.display()
    )
}

/// An open control connection.
#[derive(Debug)]
pub(crate) struct Link {
    stream: Stream,
}

impl Link {
    /// Connects to the daemon at `socket`, or at the default place.
    pub(crate) fn open(socket: Option<&Path>) -> Result<Self, ConnectError> {
        let path = socket.unwrap_or(Path::new(DEFAULT_SOCKET));
        let stream = connect(path, ANSWER_TIMEOUT).map_err(|error| match error {
            ConnectError::Absent { path, source, .. } if socket.is_none() => {
                ConnectError::Absent { path, private: private_sockets(), source }
            }
            error => error,
        })?;
        stream.set_send_timeout(Some(ANSWER_TIMEOUT)).map_err(ConnectError::Broken)?;
        let link = Self { stream };
        link.send(&ToDaemon::Hello(Hello { version: tiermgr_wire::VERSION, role: Role::Control }))?;
        match link.receive(Some(ANSWER_TIMEOUT))? {
            FromDaemon::Ready => Ok(link),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&self, request: ControlRequest) -> Result<ControlReply, ConnectError> {
        self.begin(request)?;
        self.finish(Some(ANSWER_TIMEOUT))
    }

    /// Asks without waiting.
    pub(crate) fn begin(&self, request: ControlRequest) -> Result<(), ConnectError> {
        self.send(&ToDaemon::Control(request))
    }

    /// Waits for the answer to [`Link::begin`].
    pub(crate) fn finish(&self, patience: Option<Duration>) -> Result<ControlReply, ConnectError> {
        match self.receive(patience)? {
            FromDaemon::Control(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Readable when the answer is there.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The daemon as a whole.
    pub(crate) fn status(&self) -> Result<Status, ConnectError> {
        match self.ask(ControlRequest::Status)? {
            ControlReply::Status(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    /// A whole list, page by page. It may change between pages.
    pub(crate) fn list<T>(
        &self,
        request: impl Fn(u32) -> ControlRequest,
        rows_of: impl Fn(ControlReply) -> Option<Vec<T>>,
    ) -> Result<Vec<T>, ConnectError> {
        let mut all = Vec::new();
        for page in 0..PAGES_MAX {
            let skip = page * u32::try_from(ROWS_MAX).unwrap_or(u32::MAX);
            let reply = self.ask(request(skip))?;
            let rows = rows_of(reply)
                .ok_or_else(|| ConnectError::Unexpected("not the list asked for".to_owned()))?;
            let is_last = rows.len() < ROWS_MAX;
            all.extend(rows);
            if is_last {
                break;
            }
        }
        Ok(all)
    }

    fn send(&self, message: &ToDaemon) -> Result<(), ConnectError> {
        let mut buffer = [0; 512];
        let packet = tiermgr_wire::encode(message, &mut buffer)?;
        self.stream.send_with_fds(packet, &[]).map_err(ConnectError::Broken)
    }

    fn receive(&self, patience: Option<Duration>) -> Result<FromDaemon, ConnectError> {
        let began = Instant::now();
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let len = loop {
            // None at all would be refused.
            let left = patience
                .map(|whole| whole.saturating_sub(began.elapsed()).max(Duration::from_millis(1)));
            self.stream.set_recv_timeout(left).map_err(ConnectError::Broken)?;
            match self.stream.recv_with_fds(&mut packet) {
                Ok((len, _no_fds)) => break len,
                // This program was stopped, and goes on.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ConnectError::Broken(error)),
            }
        };
        let received = packet.get(..len).unwrap_or(&packet);
        if received.is_empty() {
            return Err(ConnectError::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
        match tiermgr_wire::decode(received)? {
            FromDaemon::Error { message, .. } => Err(ConnectError::Refused(message)),
            message => Ok(message),
        }
    }
}

fn connect(path: &Path, patience: Duration) -> Result<Stream, ConnectError> {
    Stream::connect_within(path, patience).map_err(|source| {
        let path = path.to_owned();
        if path.metadata().is_ok_and(|facts| !facts.file_type().is_socket()) {
            ConnectError::NotASocket { path }
        } else if source.kind() == io::ErrorKind::PermissionDenied {
            ConnectError::Forbidden { path, source }
        } else if source.kind() == io::ErrorKind::WouldBlock {
            ConnectError::Crowded { path, source }
        } else {
            ConnectError::Absent { path, private: Vec::new(), source }
        }
    })
}

/// Where private daemons answer, of those that this user has started: in nobody else's folder is looked.
fn private_sockets() -> Vec<PathBuf> {
    let user = nix::unistd::geteuid().as_raw();
    let is_own = |folder: &Path| {
        folder.symlink_metadata().is_ok_and(|facts| facts.is_dir() && facts.uid() == user)
    };
    let mut sockets: Vec<_> = runtime_parents()
        .iter()
        .filter_map(|parent| parent.read_dir().ok())
        .flat_map(|entries| entries.flatten())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(FOLDER_PREFIX))
        .map(|entry| entry.path())
        .filter(|folder| is_own(folder))
        .map(|folder| folder.join(SOCKET_NAME))
        // A folder may be left over from a daemon that was killed.
        .filter(|socket| Stream::connect_within(socket, GLANCE_TIMEOUT).is_ok())
        .take(PRIVATE_MAX)
        .collect();
    sockets.sort();
    sockets.dedup();
    sockets
}

fn unexpected(answer: &impl std::fmt::Debug) -> ConnectError {
    ConnectError::Unexpected(format!("{answer:?}").chars().take(80).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tiermgr_sys::sock::Listener;

    #[test]
    fn a_daemon_that_takes_no_connection_is_named_as_such() {
        let path = std::env::temp_dir().join(format!("tiermgrctl-crowd-{}", std::process::id()));
        let _listener = Listener::bind(&path, 0o600, None).unwrap();
        let brief = Duration::from_millis(1);
        let error = loop {
            // Whoever gave up has a place among those who wait all the same.
            match connect(&path, brief) {
                Ok(stream) => drop(stream),
                Err(error) => break error,
            }
        };
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(error, ConnectError::Crowded { .. }), "{error:?}");
        assert!(error.to_string().contains("takes no connection"), "{error}");
    }
}
