//! Skipping with a reason, waiting with a deadline, and a hard limit on time.

use std::fmt::Display;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// With this variable set, a test that cannot run fails.
pub const STRICT: &str = "TIERMGR_CI_STRICT";

/// Says why a test does not run; the caller returns next.
///
/// # Panics
/// Where [`STRICT`] is set: there, everything is to run.
pub fn skip(reason: impl Display) {
    eprintln!("skipped: {reason}");
    assert!(
        std::env::var_os(STRICT).is_none(),
        "{STRICT} is set, and a test was skipped: {reason}"
    );
}

/// Waits until `condition` holds and tells whether it came to hold within `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Ends the whole process when a test takes longer than it may: a thread that waits for a page cannot be
/// ended in any other way. Dropping it calls that off.
#[derive(Debug)]
pub struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    /// Starts the clock for the test `name`.
    pub fn start(name: &'static str, limit: Duration) -> Self {
        let (alive, end) = channel::<()>();
        std::thread::spawn(move || {
            if end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{name} has not ended after {limit:?}");
                std::process::abort();
            }
        });
        Self { _alive: alive }
    }
}

/// A test that has begun: no other test of the same binary runs, and a watchdog does.
#[derive(Debug)]
pub struct Begun {
    _watchdog: Watchdog,
    _alone: MutexGuard<'static, ()>,
}

/// Begins a test that must be alone in its process: a fork there concerns every userfaultfd of the process,
/// and waits until each of them has been read. It may take a minute.
pub fn begin(name: &'static str) -> Begun {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Begun { _watchdog: Watchdog::start(name, Duration::from_secs(60)), _alone: alone }
}
