//! Looking for a daemon that is away.

use super::talk::{Limit, left};
use super::{
    BRIEF_GREETING, CHILD_WAIT, Connection, FILTERED, Link, Patience, RETRY_NS_MAX, RETRY_NS_MIN,
};
use crate::sandbox::{self, Deed};
use crate::status::{Error, Result, Status};
use std::time::Duration;
use tiermgr_sys::process::{monotonic_ns, nap};

/// After an attempt to find the daemon whoever does not wait leaves this many times its length to the program.
const BRIEF_PAUSES: u64 = 10;

/// How often the daemon is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// From the next attempt that fails to the one after it.
    wait_ns: u64,
    /// How long the last attempt took, whatever came of it.
    took_ns: u64,
    /// It did not come back while a request for growth waited for it, nor since then.
    is_gone: bool,
    /// It is there, or was, and does not serve this process; or something forbids that it does.
    is_refused: bool,
}

impl Pace {
    pub(super) const FIRST: Self =
        Self { wait_ns: RETRY_NS_MIN, took_ns: 0, is_gone: false, is_refused: false };

    /// That of a forked child.
    pub(super) const fn of_child(self) -> Self {
        Self { is_gone: self.is_gone, ..Self::FIRST }
    }

    /// When whoever does not wait may look again.
    const fn brief_ns(self, retry_ns: u64) -> u64 {
        retry_ns.saturating_add(self.took_ns.saturating_mul(BRIEF_PAUSES))
    }

    /// The same for growth: one that accepts and does not greet is not left alone for longer than one that is away.
    fn growth_ns(self, retry_ns: u64) -> u64 {
        self.brief_ns(retry_ns).min(retry_ns.saturating_add(RETRY_NS_MAX))
    }
}

impl Link {
    /// When a request for growth looks for the daemon again, if it is gone.
    pub(crate) fn looks_again_ns(&self) -> Option<u64> {
        match self.connection {
            Connection::Down { retry_ns } if self.pace.is_gone => {
                Some(self.pace.growth_ns(retry_ns))
            }
            _ => None,
        }
    }

    pub(super) fn reconnect(&mut self, patience: Patience, give_up: u64) -> Result<()> {
        let Connection::Down { retry_ns } = self.connection else { return Ok(()) };
        if !sandbox::may(Deed::Reconnect) {
            return Err(FILTERED);
        }
        let (waits, looks_ns) = match patience {
            Patience::Brief => (false, self.pace.brief_ns(retry_ns)),
            Patience::Restart => (true, retry_ns),
            Patience::Growth => (!self.pace.is_gone, self.pace.growth_ns(retry_ns)),
        };
        let grows = patience == Patience::Growth;
        let now = monotonic_ns();
        if !waits && now < looks_ns {
            return Err(if self.pace.is_refused { REFUSED } else { AWAY });
        }
        if now < retry_ns {
            if retry_ns > give_up {
                self.pace.is_gone |= grows;
                return Err(Error::because(
                    Status::ConnectionLost,
                    format!(
                        "the daemon at {} is away; memory that is not parked goes on working",
                        self.config.socket.display()
                    ),
                ));
            }
            nap(Duration::from_nanos(retry_ns - now));
        }
        // One that is to attach gets its time, whoever asks.
        let wait = if waits {
            left(give_up)
        } else if self.attached.is_some() {
            BRIEF_GREETING
        } else {
            CHILD_WAIT
        };
        match self.greet(Limit::new(wait, Duration::ZERO)) {
            Err(_) if waits && monotonic_ns() < give_up => Ok(()),
            // To whoever was told that it is away this is no news.
            Err(error) if grows && error.status == Status::NoDaemon => {
                self.pace.is_gone = true;
                Err(AWAY)
            }
            Err(error) => {
                self.pace.is_gone |= grows;
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    /// One attempt to be the daemon's client (again). It may end with the answer to an `Attach` still owed.
    pub(super) fn greet(&mut self, limit: Limit) -> Result<()> {
        let began = monotonic_ns();
        let outcome = self.try_greet(limit);
        self.pace.took_ns = monotonic_ns().saturating_sub(began);
        self.pace.is_refused =
            outcome.as_ref().is_err_and(|error| error.status == Status::NotPermitted);
        match outcome {
            Ok(()) => self.pace.is_gone = false,
            Err(_) => self.back_off(),
        }
        outcome
    }

    /// A connection that was good has ended.
    pub(super) fn lost(&mut self) {
        self.pace = Pace::FIRST;
        self.connection = Connection::Down { retry_ns: monotonic_ns() + RETRY_NS_MIN };
    }

    /// An attempt has failed, be it that its end was learnt late.
    pub(super) fn back_off(&mut self) {
        self.connection = Connection::Down { retry_ns: monotonic_ns() + self.pace.wait_ns };
        self.pace.wait_ns = (self.pace.wait_ns * 2).min(RETRY_NS_MAX);
    }
}

const REFUSED: Error = Error::new(
    Status::NotPermitted,
    "the daemon does not serve this process, or a sandbox or the rights of the socket forbid it; see its log",
);

pub(crate) const AWAY: Error = Error::new(Status::ConnectionLost, "the daemon is away");
