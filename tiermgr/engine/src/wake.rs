//! How other threads get an executor's attention.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use tiermgr_sys::shm;

/// A flag that an awake executor looks at, and an eventfd that ends the sleep of one that is not.
#[derive(Debug)]
pub struct Wake {
    raised: AtomicBool,
    event: Option<OwnedFd>,
}

impl Wake {
    /// A flag with an eventfd.
    ///
    /// # Errors
    /// What the kernel says when it has no descriptor to give.
    pub fn new() -> io::Result<Self> {
        Ok(Self { raised: AtomicBool::new(false), event: Some(shm::eventfd()?) })
    }

    /// A flag alone, for users that never sleep.
    #[must_use]
    pub fn silent() -> Self {
        Self { raised: AtomicBool::new(false), event: None }
    }

    /// Raises the flag; the first raise since the last [`Wake::take`] also signals.
    pub fn wake(&self) {
        if self.raised.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(event) = &self.event
            && let Err(error) = shm::eventfd_signal(event.as_fd())
        {
            // Only a full counter can refuse, and then the sleeper is awake already.
            tracing::warn!(%error, "signalling an executor");
        }
    }

    /// Whether the flag is up.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Takes the flag down, and says whether it was up. What was asked before the raise is visible.
    pub fn take(&self) -> bool {
        if !self.is_raised() {
            return false;
        }
        self.drain();
        self.raised.swap(false, Ordering::AcqRel)
    }

    /// Resets the eventfd, so that a poll of it waits again.
    pub fn drain(&self) {
        if let Some(event) = &self.event {
            // An empty counter is fine: a raiser that has not signalled yet ends one later sleep for
            // nothing.
            drop(shm::eventfd_drain(event.as_fd()));
        }
    }

    /// What to poll.
    #[must_use]
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        self.event.as_ref().map(AsFd::as_fd)
    }
}
