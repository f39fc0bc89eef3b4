//! A line on the terminal for what takes long.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// What takes less is not spoken of.
const QUIET: Duration = Duration::from_secs(2);

/// Says what is being done once it has taken [`QUIET`], and wipes it away at the end.
#[derive(Debug)]
pub(super) struct Progress {
    what: &'static str,
    began: Instant,
    shown: bool,
}

impl Progress {
    pub(super) fn new(what: &'static str) -> Self {
        Self { what, began: Instant::now(), shown: false }
    }

    /// To be called several times a second.
    pub(super) fn tick(&mut self) {
        let elapsed = self.began.elapsed();
        if elapsed >= QUIET && io::stderr().is_terminal() {
            self.shown = true;
            let seconds = elapsed.as_secs();
            drop(write!(io::stderr(), "\rtiermgrctl: {} ({seconds} s)\x1b[K", self.what));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            drop(write!(io::stderr(), "\r\x1b[K"));
        }
    }
}
