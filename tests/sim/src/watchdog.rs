//! An end for runs that have none. The production code cannot be interrupted from inside a turn, so a
//! loop in it would hang a test for ever, without a word about the seed.

use std::collections::BTreeSet;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

static RUNNING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Notes for as long as it lives that a seed is being run.
#[derive(Debug)]
pub struct Running(u64);

impl Running {
    /// `seed` begins.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).insert(seed);
        Self(seed)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Ends the process, with the seeds that were running, unless dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    /// Dropped with the watchdog, which calls it off.
    _call_off: Sender<()>,
}

impl Watchdog {
    /// `limit` from now.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        let (sender, receiver) = channel::<()>();
        thread::spawn(move || {
            if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let seeds = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
                eprintln!("no end after {limit:?}: seeds {seeds:?} are still running");
                std::process::abort();
            }
        });
        Self { _call_off: sender }
    }
}
