//! The first process of `tiermgrd`: it keeps descriptors open, and does nothing else.
//!
//! **Problem.** When the last reference to a userfaultfd closes, the kernel forgets the registration
//! and answers a touch of a parked page with zeros. A FORK event gives its reader the only reference
//! to the child's descriptor, so a reader that is killed at the next instruction would take it along.
//! **Approach.** The serving process is a clone that shares the descriptor table. When it dies, the
//! keeper closes everything that is not a userfaultfd (the store's lock above all, or nobody could
//! open it again) and makes a new one, which finds the userfaultfds under the same numbers.
//! **Not here.** What a restarted daemon does with them (`families`, `engine`).
//!
//! The keeper has one thread, holds no lock, and waits for signals with `sigwait`, which needs no
//! descriptor.

use crate::exit;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getppid};
use std::io;
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_sys::keeper::{ForkResult, UFFD_LINK, clone_sharing_files, close_all_but, list_uffds};

/// A serving process that lived so long did not die of its start.
const LIVED_LONG: Duration = Duration::from_secs(1);
/// Deaths in a row, each soon after the start, after which the keeper gives up if it holds nothing
/// for anybody.
const DEATHS_MAX: u32 = 5;
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// Programs may be waiting.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// What the serving process is told.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The keeper.
    pub keeper_pid: i32,
    /// Times that a serving process was made before.
    pub restarts: u32,
    /// Whoever started the keeper, while it lives.
    pub maker_pid: Option<i32>,
}

/// Which process returns from [`run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The serving process, with its exit status.
    Served(u8),
    /// The keeper, with its exit status: nothing more is to be kept.
    Kept(u8),
}

/// The signals that keeper and serving process wait for rather than be interrupted by.
#[must_use]
pub fn signals() -> SigSet {
    let mut set = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD] {
        set.add(signal);
    }
    set
}

/// Makes serving processes, each of which calls `serve` and returns its status, until one ends in
/// order. The process must have no other thread.
///
/// # Errors
/// When the kernel refuses to make a process or to wait for one.
pub fn run(mut serve: impl FnMut(Call) -> u8) -> io::Result<Outcome> {
    let signals = signals();
    signals.thread_block()?;
    let keeper_pid = std::process::id().cast_signed();
    let maker = getppid();
    let mut deaths_in_a_row = 0;
    let mut restarts = 0;
    loop {
        let began = Instant::now();
        // Once it has gone, our parent is another process.
        let maker_pid = (getppid() == maker).then_some(maker.as_raw());
        let child = match clone_sharing_files()? {
            ForkResult::Child => {
                let call = Call { keeper_pid, restarts, maker_pid };
                return Ok(Outcome::Served(serve(call)));
            }
            ForkResult::Parent { child } => Pid::from_raw(child),
        };
        let end = wait_and_forward(&signals, child)?;
        close_all_but(|_, link| link == UFFD_LINK)?;
        let held = list_uffds()?.len();
        if let WaitStatus::Exited(_, code) = end {
            let code = u8::try_from(code).unwrap_or(exit::DIED);
            // An orderly end, or a start that cannot succeed and leaves nobody waiting.
            if code == exit::OK || (matches!(code, exit::USAGE | exit::START) && held == 0) {
                return Ok(Outcome::Kept(code));
            }
        }
        restarts += 1;
        deaths_in_a_row = if began.elapsed() >= LIVED_LONG { 1 } else { deaths_in_a_row + 1 };
        tracing::error!(?end, userfaultfds = held, restarts, "the serving process has died");
        if deaths_in_a_row > DEATHS_MAX && held == 0 {
            tracing::error!("it dies again and again, and nobody waits for it: giving up");
            return Ok(Outcome::Kept(exit::DIED));
        }
        thread::sleep(pause_before(deaths_in_a_row));
    }
}

/// None before the first new attempt.
fn pause_before(deaths_in_a_row: u32) -> Duration {
    match deaths_in_a_row {
        0 | 1 => Duration::ZERO,
        deaths => PAUSE_FIRST.saturating_mul(1 << (deaths - 2).min(10)).min(PAUSE_MAX),
    }
}

/// Waits for the end of `child`. What asks the keeper to end is passed on: only the serving process
/// knows whether it may.
fn wait_and_forward(signals: &SigSet, child: Pid) -> io::Result<WaitStatus> {
    loop {
        match signals.wait()? {
            Signal::SIGCHLD => {
                let end = waitpid(child, Some(WaitPidFlag::WNOHANG))?;
                if matches!(end, WaitStatus::Exited(..) | WaitStatus::Signaled(..)) {
                    return Ok(end);
                }
            }
            Signal::SIGTERM | Signal::SIGINT => kill(child, Signal::SIGTERM)?,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_new_attempt_comes_at_once_and_later_ones_never_late() {
        assert_eq!(pause_before(1), Duration::ZERO);
        assert_eq!(pause_before(2), PAUSE_FIRST);
        assert_eq!(pause_before(3), PAUSE_FIRST * 2);
        assert_eq!(pause_before(u32::MAX), PAUSE_MAX);
    }
}
