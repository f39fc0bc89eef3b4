//! Starting CMD, passing signals on, and its exit status.

use super::strays::Strays;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawnp};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;
use tiermgr_sys::pidfd;

/// `si_code` of a signal that the terminal sent to the whole foreground group.
const SENT_BY_KERNEL: i32 = 0x80;

/// The signals that end programs, blocked, and readable from a descriptor.
#[derive(Debug)]
pub(super) struct Signals {
    fd: SignalFd,
    /// What we were started with, and CMD is to be started with.
    mask_before: SigSet,
}

/// Something else that may happen while a program runs.
pub(super) trait Watch {
    /// Readable when it has happened; `None` if nothing more can.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    /// It has happened, while `program` runs.
    fn react(&mut self, program: Pid);
}

/// Nothing.
#[derive(Debug)]
pub(super) struct Nothing;

impl Watch for Nothing {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn react(&mut self, _program: Pid) {}
}

/// What [`Signals::wait_readable`] saw first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wakeup {
    /// The descriptor is readable, or its writer has gone.
    Readable,
    /// A signal that asks us to end.
    Signal(i32),
    /// The time is over.
    Timeout,
}

impl Signals {
    pub(super) fn block() -> io::Result<Self> {
        let mut set = SigSet::empty();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
            set.add(signal);
        }
        let mask_before = set.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Self { fd, mask_before })
    }

    /// Waits for the end of our child `pid`, and passes on to it what we are sent. What comes from the
    /// terminal reached it already, since it is in our group. Meanwhile `watch` is looked after.
    /// `strays` is looked for what it does not reach.
    pub(super) fn wait_for(
        &self,
        pid: Pid,
        watch: &mut impl Watch,
        strays: &mut Strays,
    ) -> io::Result<u8> {
        let pidfd = pidfd::open(pid.as_raw())?;
        loop {
            match waitpid(pid, Some(WaitPidFlag::WNOHANG))? {
                WaitStatus::Exited(_, code) => return Ok(u8::try_from(code & 0xff).unwrap_or(1)),
                WaitStatus::Signaled(_, signal, _) => return Ok(code_of_signal(signal as i32)),
                _ => {}
            }
            let mut fds = [
                PollFd::new(pidfd.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.fd.as_fd(), PollFlags::POLLIN),
                // An absent one is replaced by one that is watched anyway, and not looked at.
                PollFd::new(watch.fd().unwrap_or(self.fd.as_fd()), PollFlags::POLLIN),
            ];
            let until_look = strays.until_next() + Duration::from_millis(1);
            match poll(&mut fds, PollTimeout::try_from(until_look).unwrap_or(PollTimeout::MAX)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
            strays.look(pid);
            let has_happened = fds[2].any().unwrap_or(false);
            if has_happened && watch.fd().is_some() {
                watch.react(pid);
            }
            while let Some((signal, code)) = self.next_signal()? {
                if code != SENT_BY_KERNEL {
                    // It may have ended meanwhile; then the loop sees it.
                    kill(pid, signal).or_else(ignore_absent)?;
                }
            }
        }
    }

    /// Waits until `other` is readable, a signal asks us to end, or the time is over.
    pub(super) fn wait_readable(
        &self,
        other: BorrowedFd<'_>,
        patience: Duration,
    ) -> io::Result<Wakeup> {
        let timeout = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
        let mut fds = [
            PollFd::new(other, PollFlags::POLLIN),
            PollFd::new(self.fd.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        if fds[0].any().unwrap_or(false) {
            return Ok(Wakeup::Readable);
        }
        let signal = self.next_signal()?;
        Ok(signal.map_or(Wakeup::Timeout, |(signal, _)| Wakeup::Signal(signal as i32)))
    }

    /// A signal that came, and who sent it (`si_code`).
    fn next_signal(&self) -> io::Result<Option<(Signal, i32)>> {
        let Some(info) = self.fd.read_signal()? else { return Ok(None) };
        let number = i32::try_from(info.ssi_signo).map_err(io::Error::other)?;
        Ok(Some((Signal::try_from(number)?, info.ssi_code)))
    }
}

/// Starts `command` in our process group, with `changes` to our environment.
pub(super) fn spawn(
    command: &[OsString],
    changes: &[(OsString, OsString)],
    signals: &Signals,
) -> Result<Pid, Errno> {
    let args = command
        .iter()
        .map(|arg| CString::new(arg.clone().into_vec()).map_err(|_nul| Errno::EINVAL))
        .collect::<Result<Vec<_>, _>>()?;
    let path = args.first().ok_or(Errno::EINVAL)?;
    if path.is_empty() {
        return Err(Errno::ENOENT);
    }
    let mut variables: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    variables.extend(changes.iter().cloned());
    let environment = variables
        .into_iter()
        .map(|(mut pair, value)| {
            pair.push("=");
            pair.push(value);
            CString::new(pair.into_vec()).map_err(|_nul| Errno::EINVAL)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_sigmask(&signals.mask_before)?;
    // Rust's runtime ignores SIGPIPE in us; that must not be inherited.
    let mut to_default = SigSet::empty();
    to_default.add(Signal::SIGPIPE);
    attributes.set_sigdefault(&to_default)?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
    )?;
    posix_spawnp(path, &PosixSpawnFileActions::init()?, &attributes, &args, &environment)
}

/// A process that has ended already needs no signal.
pub(super) fn ignore_absent(error: Errno) -> nix::Result<()> {
    if error == Errno::ESRCH { Ok(()) } else { Err(error) }
}

/// As shells have it.
pub(super) fn code_of_failure(error: Errno) -> u8 {
    if matches!(error, Errno::ENOENT | Errno::ENOTDIR) { 127 } else { 126 }
}

/// As shells have it.
pub(super) fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(signal.clamp(0, 64)).map_or(255, |signal| 128 + signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strays() -> Strays {
        Strays::new(std::path::Path::new("/nonexistent.so"), None)
    }

    fn status_of(signals: &Signals, command: &[&str], changes: &[(&str, &str)]) -> u8 {
        let command: Vec<OsString> = command.iter().map(Into::into).collect();
        let changes: Vec<(OsString, OsString)> =
            changes.iter().map(|(name, value)| (name.into(), value.into())).collect();
        match spawn(&command, &changes, signals) {
            Ok(pid) => signals.wait_for(pid, &mut Nothing, &mut strays()).unwrap(),
            Err(error) => code_of_failure(error),
        }
    }

    #[test]
    fn statuses_are_those_of_a_shell() {
        let signals = &Signals::block().unwrap();
        let status_of = |command: &[&str]| status_of(signals, command, &[]);
        assert_eq!(status_of(&["true"]), 0);
        assert_eq!(status_of(&["sh", "-c", "exit 7"]), 7);
        assert_eq!(status_of(&["sh", "-c", "kill -TERM $$"]), 128 + 15);
        assert_eq!(status_of(&["sh", "-c", "kill -KILL $$"]), 128 + 9);
        assert_eq!(status_of(&["no-such-program-anywhere"]), 127);
        assert_eq!(status_of(&["/etc/passwd"]), 126);
        assert_eq!(status_of(&["/etc/passwd/x"]), 127);
        assert_eq!(status_of(&[""]), 127);
    }

    #[test]
    fn the_environment_is_ours_with_changes() {
        let signals = &Signals::block().unwrap();
        let script = "test \"$TIERMGR_X\" = 'a b'";
        assert_eq!(status_of(signals, &["sh", "-c", script], &[("TIERMGR_X", "a b")]), 0);
        assert_eq!(status_of(signals, &["sh", "-c", "test -n \"$PATH\""], &[]), 0);
    }

    #[test]
    fn signals_are_passed_on() {
        let signals = Signals::block().unwrap();
        let command: Vec<OsString> = ["sleep", "20"].map(Into::into).to_vec();
        let pid = spawn(&command, &[], &signals).unwrap();
        // To this thread: others of the test program do not block it.
        nix::sys::signal::raise(Signal::SIGTERM).unwrap();
        assert_eq!(signals.wait_for(pid, &mut Nothing, &mut strays()).unwrap(), 128 + 15);
    }

    #[test]
    fn the_program_starts_with_the_mask_that_we_had() {
        let script = "grep -q '^SigBlk:[[:space:]]*0*$' /proc/self/status";
        let signals = &Signals::block().unwrap();
        assert_eq!(status_of(signals, &["sh", "-c", script], &[]), 0);
    }
}
