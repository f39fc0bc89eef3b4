//! The serving process: takes connections in, keeps house once a second, and ends in order.
//!
//! **Ending.** A program whose pages are parked can go on only while somebody serves it. So the daemon
//! ends only after everything was brought back and disarmed, or when nobody is left. Where that is
//! impossible (it does not fit into memory), it says why and goes on serving; the next SIGTERM tries
//! again. One that dies before it has done either is followed by one that the keeper tells to end. SIGKILL ends
//! the daemon at once: programs that touch parked pages then wait, they never read zeros, since keeper and
//! helpers hold the userfaultfds.

use crate::admit::{Admission, Admitted};
use crate::families::Families;
use crate::keeper;
use crate::session;
use crate::start::StateLock;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::kill;
use nix::sys::signalfd::SignalFd;
use nix::unistd::getppid;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_sys::shm;
use tiermgr_sys::sock::{Listener, PeerCred, Stream};
use tiermgr_sys::uffd::DeviceFd;

/// Enough for a session's few frames; its buffers are on the heap.
const SESSION_STACK_BYTES: usize = 256 << 10;
/// How often house is kept.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// After a failed accept, usually for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the serving process is told about itself.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// The process that keeps descriptors.
    pub keeper_pid: i32,
    /// Times that the keeper has made a new serving process.
    pub restarts: u32,
    /// User that the daemon runs as.
    pub uid: u32,
    /// A private daemon: it also ends when its maker and all programs have gone.
    pub embedded: bool,
}

/// The daemon as all threads see it.
#[derive(Debug)]
pub struct Daemon {
    identity: Identity,
    families: Families,
    device: DeviceFd,
    admission: Arc<Admission>,
    _state_lock: StateLock,
    warnings: Mutex<Vec<String>>,
    started: Instant,
    ending: AtomicBool,
    ended: AtomicBool,
    leave_when_idle: AtomicBool,
    /// Held by whoever brings everything back.
    ender: Mutex<()>,
    /// Signalled when the main thread is to return.
    leave: OwnedFd,
}

impl Daemon {
    /// A daemon that is ready to serve.
    ///
    /// # Errors
    /// What the kernel says when it has no descriptor to give.
    pub fn new(
        identity: Identity,
        families: Families,
        device: DeviceFd,
        admission: Arc<Admission>,
        state_lock: StateLock,
        warnings: Vec<String>,
    ) -> io::Result<Self> {
        Ok(Self {
            identity,
            families,
            device,
            admission,
            _state_lock: state_lock,
            warnings: Mutex::new(warnings),
            started: Instant::now(),
            ending: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            leave_when_idle: AtomicBool::new(false),
            ender: Mutex::new(()),
            leave: shm::eventfd()?,
        })
    }

    /// The families.
    #[must_use]
    pub const fn families(&self) -> &Families {
        &self.families
    }

    /// The open `/dev/userfaultfd`, to be handed to clients.
    #[must_use]
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// What the serving process was told about itself.
    #[must_use]
    pub const fn identity(&self) -> Identity {
        self.identity
    }

    /// Time since this serving process began.
    #[must_use]
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// What an operator should know.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn warn(&self, warning: String) {
        tracing::warn!("{warning}");
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).push(warning);
    }

    /// Whether everything is being brought back, so that nothing new is to be begun.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Brings everything back and disarms it. Blocks until then. The caller then calls
    /// [`Daemon::leave_if_ended`].
    ///
    /// # Errors
    /// The reasons against it, for people. The daemon goes on serving.
    pub fn end_orderly(&self, why: &str) -> Result<(), String> {
        let _one_at_a_time = match self.ender.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err("the daemon is already bringing everything back".to_owned());
            }
        };
        if self.ended.load(Ordering::Acquire) {
            return Ok(());
        }
        self.ending.store(true, Ordering::Release);
        tracing::info!(why, families = self.families.count(), "ending: bringing everything back");
        match self.families.drain() {
            Ok(()) => {
                self.ended.store(true, Ordering::Release);
                Ok(())
            }
            Err(reasons) => {
                self.ending.store(false, Ordering::Release);
                if self.identity.embedded {
                    self.leave_when_idle.store(true, Ordering::Release);
                }
                let reasons = format!(
                    "not ended, because programs would wait for ever: {}; end those programs, or \
                     allow more DRAM, and try again",
                    reasons.join("; ")
                );
                tracing::error!("{reasons}");
                self.tell_refusal();
                Err(reasons)
            }
        }
    }

    /// The keeper would tell our successor to end, who might come long after whoever asked for it has thought
    /// better.
    fn tell_refusal(&self) {
        // Once it has gone, our parent is another process, and its number may be anybody's.
        if getppid().as_raw() == self.identity.keeper_pid
            && let Err(error) = kill(getppid(), keeper::REFUSED)
        {
            tracing::warn!(%error, "telling the keeper that the daemon goes on");
        }
    }

    /// Lets the main thread return if everything was brought back. Apart from
    /// [`Daemon::end_orderly`], so that whoever asked is answered first.
    pub fn leave_if_ended(&self) {
        if self.ended.load(Ordering::Acquire)
            && let Err(error) = shm::eventfd_signal(self.leave.as_fd())
        {
            tracing::error!(%error, "waking the main thread");
        }
    }
}

/// Serves until everything was brought back or nobody is left.
///
/// `signals` carries SIGTERM and SIGINT; `watched` are pidfds.
///
/// # Errors
/// When the kernel refuses to poll.
pub fn serve(
    daemon: &Arc<Daemon>,
    listener: &Listener,
    signals: &SignalFd,
    mut watched: Watched,
) -> io::Result<()> {
    let mut last_tidy = Instant::now();
    if daemon.identity.embedded && watched.maker.is_none() {
        daemon.leave_when_idle.store(true, Ordering::Release);
    }
    loop {
        let ready = wait(daemon, listener, signals, &watched)?;
        if ready.leave {
            return Ok(());
        }
        if ready.signal {
            end_on_signal(daemon, signals);
        }
        if ready.keeper {
            watched.keeper = None;
            daemon.warn(
                "the keeper has died: if the daemon dies too, programs that touch parked pages wait \
                 for ever; restart the daemon"
                    .to_owned(),
            );
        }
        if ready.maker {
            watched.maker = None;
            daemon.leave_when_idle.store(true, Ordering::Release);
        }
        if ready.connection {
            admit(daemon, listener);
        }
        if last_tidy.elapsed() >= TIDY_EVERY {
            last_tidy = Instant::now();
            daemon.families.tidy();
        }
        if daemon.leave_when_idle.load(Ordering::Acquire) && daemon.families.close_if_idle() {
            tracing::info!("nobody is left");
            return Ok(());
        }
    }
}

/// Processes whose end matters.
#[derive(Debug)]
pub struct Watched {
    /// The keeper.
    pub keeper: Option<OwnedFd>,
    /// Whoever started a private daemon.
    pub maker: Option<OwnedFd>,
}

#[expect(clippy::struct_excessive_bools, reason = "one answer for each thing that is waited for")]
struct Ready {
    leave: bool,
    signal: bool,
    connection: bool,
    keeper: bool,
    maker: bool,
}

fn wait(
    daemon: &Daemon,
    listener: &Listener,
    signals: &SignalFd,
    watched: &Watched,
) -> io::Result<Ready> {
    let timeout = PollTimeout::try_from(TIDY_EVERY).map_err(io::Error::other)?;
    let poll = |fd| PollFd::new(fd, PollFlags::POLLIN);
    // An absent one is replaced by one that is watched anyway, and not looked at.
    let absent = daemon.leave.as_fd();
    let mut fds = [
        poll(daemon.leave.as_fd()),
        poll(signals.as_fd()),
        poll(listener.as_fd()),
        poll(watched.keeper.as_ref().map_or(absent, AsFd::as_fd)),
        poll(watched.maker.as_ref().map_or(absent, AsFd::as_fd)),
    ];
    match nix::poll::poll(&mut fds, timeout) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    let is_ready = |at: usize| fds.get(at).and_then(PollFd::any).unwrap_or(false);
    Ok(Ready {
        leave: is_ready(0),
        signal: is_ready(1),
        connection: is_ready(2),
        keeper: watched.keeper.is_some() && is_ready(3),
        maker: watched.maker.is_some() && is_ready(4),
    })
}

fn end_on_signal(daemon: &Arc<Daemon>, signals: &SignalFd) {
    match signals.read_signal() {
        Ok(Some(info)) => tracing::info!(signal = info.ssi_signo, from = info.ssi_pid, "signal"),
        Ok(None) => return,
        Err(error) => {
            tracing::warn!(%error, "reading a signal");
            return;
        }
    }
    let daemon = Arc::clone(daemon);
    // Bringing everything back takes time, and connections go on meanwhile.
    let thread = thread::Builder::new().name("ender".to_owned()).spawn(move || {
        // The reasons are in the log already.
        if daemon.end_orderly("a signal").is_ok() {
            daemon.leave_if_ended();
        }
    });
    if let Err(error) = thread {
        tracing::error!(%error, "starting a thread to end in");
    }
}

fn admit(daemon: &Arc<Daemon>, listener: &Listener) {
    let stream = match listener.accept() {
        Ok(stream) => stream,
        Err(error) => {
            tracing::warn!(%error, "accepting a connection");
            thread::sleep(ACCEPT_PAUSE);
            return;
        }
    };
    let peer = match stream.peer_cred() {
        Ok(peer) => peer,
        Err(error) => {
            tracing::warn!(%error, "asking who has connected");
            return;
        }
    };
    match daemon.admission.admit(peer.uid) {
        Ok(admitted) => begin_session(daemon, stream, peer, admitted),
        // Dropped without a word: an answer could block, and this thread must not.
        Err(error) => tracing::warn!(uid = peer.uid, pid = peer.pid, %error, "refused"),
    }
}

fn begin_session(daemon: &Arc<Daemon>, stream: Stream, peer: PeerCred, admitted: Admitted) {
    let daemon = Arc::clone(daemon);
    let thread = thread::Builder::new()
        .name("session".to_owned())
        .stack_size(SESSION_STACK_BYTES)
        .spawn(move || session::run(&daemon, &stream, peer, admitted));
    if let Err(error) = thread {
        tracing::warn!(%error, "starting a thread for a connection");
    }
}
