//! The end of an executor, with or without bringing everything back.
//!
//! While one process is drained another may be forked. So processes are drained until a look at all of
//! them, by the thread that alone reads the messages of forks, finds nobody who needs us any more.

use super::{EngineError, Executor};
use crate::mailbox::Mail;
use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_core::effect::{Refusal, Reply};
use tiermgr_core::event::Request;
use tiermgr_core::units::ProcId;

/// How long a drain may go without anything coming back.
const STILL_MAX: Duration = Duration::from_secs(60);
/// How often a drain is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Times that processes may be found which nobody has drained: each is a fork that came in between.
const ROUNDS_MAX: u32 = 100;
/// For a fork that is being followed.
const ROUND_PAUSE: Duration = Duration::from_millis(10);

impl Executor {
    /// Ends the thread. With `drain`, everything is brought back and disarmed first, which takes as
    /// long as the store takes; without, everything stays as it is, for a later daemon, and a family
    /// without processes leaves nothing behind. Blocks until then.
    ///
    /// # Errors
    /// [`EngineError::Refused`], [`EngineError::TimedOut`] (nothing came back for a minute) or
    /// [`EngineError::StillForking`] from a drain: the family is served on.
    pub fn stop(&self, drain: bool) -> Result<(), EngineError> {
        if drain {
            self.drain()?;
        } else {
            self.mailbox.post(Mail::Stop);
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            drop(thread.join());
        }
        Ok(())
    }

    fn drain(&self) -> Result<(), EngineError> {
        let mut drained = BTreeSet::new();
        for _ in 0..ROUNDS_MAX {
            for entry in self.procs.all() {
                if drained.insert(entry.proc) {
                    self.drain_process(entry.proc)?;
                }
            }
            let (answer, kept) = sync_channel(1);
            if !self.mailbox.post(Mail::Release { answer }) {
                return Ok(());
            }
            match kept.recv_timeout(STILL_MAX) {
                // Gone by itself meanwhile.
                Ok(0) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(_) => thread::sleep(ROUND_PAUSE),
                Err(RecvTimeoutError::Timeout) => return Err(EngineError::TimedOut),
            }
        }
        Err(EngineError::StillForking)
    }

    /// Has everything of one process brought back, for as long as something does come back.
    fn drain_process(&self, proc: ProcId) -> Result<(), EngineError> {
        let Some((_, reply)) = self.post_request(proc, Request::Drain) else {
            return Ok(());
        };
        let mut away = self.bytes_away(proc);
        let mut since = Instant::now();
        loop {
            match reply.recv_timeout(LOOK_EVERY) {
                // It has ended.
                Ok(Reply::Refused(Refusal::NotAttached)) => return Ok(()),
                Ok(Reply::Refused(why)) => return Err(EngineError::Refused(why)),
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = self.bytes_away(proc);
            if now != away {
                away = now;
                since = Instant::now();
            } else if since.elapsed() > STILL_MAX {
                self.mailbox.post(Mail::Explain);
                return Err(EngineError::TimedOut);
            }
        }
    }

    fn bytes_away(&self, proc: ProcId) -> u64 {
        let rows = self.regions();
        rows.iter().filter(|(owner, _)| *owner == proc).map(|(_, row)| row.parked_bytes).sum()
    }
}
