//! What other threads ask of an executor.

use crate::error::EngineError;
use crate::linux::Prepared;
use crate::wake::Wake;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tiermgr_core::effect::Reply;
use tiermgr_core::event::Request;
use tiermgr_core::units::{ProcId, RequestId};
use tiermgr_wire::control::FamilyStats;

/// One letter. Answers go through channels with room for them, so that the executor never waits.
#[derive(Debug)]
pub(crate) enum Mail {
    /// Serve a new client.
    Attach { new: Box<Prepared>, claim: Claim, answer: SyncSender<Result<ProcId, EngineError>> },
    /// Put a nonce into each child that has not shown itself.
    Prove { seed: u128, answer: SyncSender<Vec<(ProcId, u128)>> },
    /// This is who that child is. Answered with its userfaultfd.
    Adopt {
        child: ProcId,
        new: Box<Prepared>,
        claim: Claim,
        answer: SyncSender<Result<OwnedFd, EngineError>>,
    },
    /// Another descriptor of the userfaultfd of a process.
    Arena { proc: ProcId, answer: SyncSender<Result<OwnedFd, EngineError>> },
    /// A client's request. Unlike the others it is carried out in any case; the claim is that of its answer.
    Ask { request: RequestId, proc: ProcId, what: Request, claim: Claim, answer: SyncSender<Reply> },
    /// The process' connection has ended.
    Gone { proc: ProcId },
    /// It has another one.
    Back { proc: ProcId },
    /// Counters, please.
    Stats { answer: SyncSender<FamilyStats> },
    /// Say in the log what is being waited for: somebody has waited too long.
    Explain,
    /// End the thread, with everything as it is.
    Stop,
    /// Forget the processes, which have been drained, and end the thread. Where bytes of some are still
    /// away these are kept and served on. The answer is how many.
    Release { answer: SyncSender<usize> },
}

/// Something that is either done or withdrawn: whoever takes it first decides. One who does not wait any longer
/// says that it was not done, and that must be so.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claim(Arc<AtomicBool>);

impl Claim {
    /// True for the first only.
    pub(crate) fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}

/// Sends an answer to whoever waits for it, if somebody still does.
pub(crate) fn answer<T>(to: &SyncSender<T>, what: T) {
    if to.try_send(what).is_err() {
        tracing::debug!("nobody waits for the answer any more");
    }
}

#[derive(Debug, Default)]
struct Queue {
    letters: VecDeque<Mail>,
    closed: bool,
}

/// Letters to one executor.
#[derive(Debug)]
pub struct Mailbox {
    queue: Mutex<Queue>,
    wake: Arc<Wake>,
}

impl Mailbox {
    pub(crate) fn new(wake: Arc<Wake>) -> Self {
        Self { queue: Mutex::default(), wake }
    }

    /// Leaves a letter. `false`: the executor has ended and will not read it.
    pub(crate) fn post(&self, mail: Mail) -> bool {
        let mut queue = self.lock();
        if queue.closed {
            return false;
        }
        queue.letters.push_back(mail);
        drop(queue);
        self.wake.wake();
        true
    }

    /// The next letter.
    pub(crate) fn next(&self) -> Option<Mail> {
        self.lock().letters.pop_front()
    }

    /// Takes no more letters. Those that were not read are dropped, and with them their senders'
    /// hope of an answer.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        queue.letters.clear();
    }

    pub(crate) fn wake(&self) -> &Arc<Wake> {
        &self.wake
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_withdrawn_is_not_done_and_what_is_done_is_not_withdrawn() {
        let claim = Claim::default();
        let other = claim.clone();
        assert!(claim.take() && !other.take() && !claim.take());
    }
}
