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
//! **Giving up.** While it holds a userfaultfd it does not: what the kernel refuses now (memory, a process, a
//! descriptor) is asked for again after a pause, and two descriptors are held back from the table that
//! the serving process may fill.
//!
//! **Ending.** Whether the daemon may end only the serving process knows. What asks the keeper to end is passed
//! on, and told to each new serving process too, until one has ended in order or has refused.
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
use tiermgr_sys::keeper::{
    ForkResult, Spares, UFFD_LINK, clone_sharing_files, close_all_but, list_uffds,
};
use tiermgr_sys::process::keep_ended_children;

/// A serving process that lived so long did not die of its start.
const LIVED_LONG: Duration = Duration::from_secs(1);
/// Deaths in a row, each soon after the start, after which the keeper gives up if it holds nothing
/// for anybody.
const DEATHS_MAX: u32 = 5;
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// Programs may be waiting.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Sent to the keeper by a serving process that could not end: the wish is answered.
pub const REFUSED: Signal = Signal::SIGUSR1;

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
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD, REFUSED] {
        set.add(signal);
    }
    set
}

/// Makes serving processes, each of which calls `serve` and returns its status, until one ends in
/// order. The process must have no other thread.
///
/// # Errors
/// When the kernel refuses to make a process, and nobody depends on what the keeper holds.
pub fn run(mut serve: impl FnMut(Call) -> u8) -> io::Result<Outcome> {
    let signals = signals();
    signals.thread_block()?;
    keep_ended_children()?;
    let keeper_pid = std::process::id().cast_signed();
    let maker = getppid();
    let mut spares = Spares::default();
    let mut held = 0;
    let mut deaths_in_a_row = 0;
    let mut restarts = 0;
    let mut is_to_end = false;
    loop {
        let began = Instant::now();
        if let Err(error) = spares.refill() {
            tracing::warn!(%error, "the keeper has no spare descriptors");
        }
        // Once it has gone, our parent is another process.
        let maker_pid = (getppid() == maker).then_some(maker.as_raw());
        let made = insist(held > 0, &mut spares, "making a serving process", clone_sharing_files);
        let child = match made? {
            ForkResult::Child => {
                let call = Call { keeper_pid, restarts, maker_pid };
                return Ok(Outcome::Served(serve(call)));
            }
            ForkResult::Parent { child } => Pid::from_raw(child),
        };
        if is_to_end {
            // It stays pending until the new one listens.
            pass_on(child);
        }
        let end = wait_and_forward(&signals, child, &mut is_to_end);
        // Whoever is dead may have left no number free, and what follows needs one.
        spares.release();
        held = insist(true, &mut spares, "looking at the descriptors", || {
            close_all_but(|_, link| link == UFFD_LINK)?;
            Ok(list_uffds()?.len())
        })?;
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

/// Attempts something until it works, for as long as programs depend on it (`must`); else once.
fn insist<T>(
    must: bool,
    spares: &mut Spares,
    what: &str,
    mut attempt: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let mut failures = 1;
    loop {
        match attempt() {
            Err(error) if must => {
                tracing::error!(%error, failures, "{what}; trying again");
                // It may have been for want of a descriptor.
                spares.release();
                failures += 1;
                thread::sleep(pause_before(failures));
            }
            done => return done,
        }
    }
}

/// None before the first new attempt.
fn pause_before(deaths_in_a_row: u32) -> Duration {
    match deaths_in_a_row {
        0 | 1 => Duration::ZERO,
        deaths => PAUSE_FIRST.saturating_mul(1 << (deaths - 2).min(10)).min(PAUSE_MAX),
    }
}

/// Waits for the end of `child`. What asks the keeper to end is passed on and remembered: the child may be dead
/// already, or die before it has brought everything back.
fn wait_and_forward(signals: &SigSet, child: Pid, is_to_end: &mut bool) -> WaitStatus {
    loop {
        match signals.wait() {
            Ok(Signal::SIGCHLD) => match waitpid(child, Some(WaitPidFlag::WNOHANG)) {
                Ok(end @ (WaitStatus::Exited(..) | WaitStatus::Signaled(..))) => return end,
                Ok(_) => {}
                Err(error) => {
                    // Nobody else can have waited for it; and if it lived it would be our child.
                    tracing::error!(%error, "waiting for the serving process");
                    return WaitStatus::Exited(child, i32::from(exit::DIED));
                }
            },
            Ok(Signal::SIGTERM | Signal::SIGINT) => {
                *is_to_end = true;
                pass_on(child);
            }
            Ok(REFUSED) => *is_to_end = false,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "waiting for signals");
                thread::sleep(PAUSE_MAX);
            }
        }
    }
}

fn pass_on(child: Pid) {
    if let Err(error) = kill(child, Signal::SIGTERM) {
        tracing::error!(%error, "passing a signal on");
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

    #[test]
    fn what_must_be_is_attempted_until_it_works() {
        let mut spares = Spares::default();
        let mut left = 3;
        let mut attempt = || {
            left -= 1;
            if left == 0 { Ok(left) } else { Err(io::ErrorKind::OutOfMemory.into()) }
        };
        assert!(insist(false, &mut spares, "once", &mut attempt).is_err());
        assert_eq!(insist(true, &mut spares, "again", &mut attempt).unwrap(), 0);
    }
}
