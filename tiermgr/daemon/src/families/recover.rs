//! Taking up what an earlier daemon served.
//!
//! A family that cannot be taken up is not given up: its programs sleep where they touch what was
//! parked, and wake into the right bytes or not at all. It is tried again for as long as it takes.

use super::{Families, Family, FamilyFacts, Inner};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_engine::error::EngineError;
use tiermgr_engine::executor::Executor;
use tiermgr_wire::chain;

/// How long a family that could not be taken up waits for the next try; twice as long each time.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(60);

/// A family of an earlier daemon that could not be taken up: its programs wait.
#[derive(Debug)]
pub(super) struct Waiting {
    number: u64,
    facts: FamilyFacts,
    /// Why not, at the last try.
    error: String,
    /// `None` while it is being tried: it stays here, so that nobody takes it for gone.
    next_try: Option<Instant>,
    pause: Duration,
}

impl Waiting {
    /// Of the user whose program it is.
    pub(super) const fn uid(&self) -> u32 {
        self.facts.uid
    }
}

/// One that is being tried: how long it has waited for that, and what came of the last try.
type Tried = (u64, FamilyFacts, Duration, String);

impl Inner {
    /// Those whose next try has come.
    fn begin_due_tries(&mut self, now: Instant) -> Vec<Tried> {
        if self.closed { Vec::new() } else { self.begin_tries(|at| at <= now) }
    }

    /// Those that nobody is trying now and whose next try `is_due`.
    fn begin_tries(&mut self, is_due: impl Fn(Instant) -> bool) -> Vec<Tried> {
        let due = self.waiting.iter_mut().filter(|waiting| waiting.next_try.is_some_and(&is_due));
        due.map(|waiting| {
            waiting.next_try = None;
            (waiting.number, waiting.facts.clone(), waiting.pause, waiting.error.clone())
        })
        .collect()
    }

    /// Whether one is being tried now.
    pub(super) fn is_trying(&self) -> bool {
        self.waiting.iter().any(|waiting| waiting.next_try.is_none())
    }

    fn end_try(&mut self, number: u64) {
        self.waiting.retain(|waiting| waiting.number != number);
    }
}

impl Families {
    /// Goes on with the families that an earlier daemon served. To be called before anything else.
    /// Blocks until no helper works for that daemon any more.
    ///
    /// A family that cannot be taken up now keeps its files and slots, and is tried again by
    /// [`Families::tidy`]: its programs wait, and must not find somebody else's bytes.
    ///
    /// # Errors
    /// Where the state directory cannot be read.
    pub fn recover(&self) -> io::Result<()> {
        let found = self.find_facts()?;
        self.lock().last_number = found.keys().copied().max().unwrap_or(0);
        let begun: Vec<(u64, FamilyFacts, Result<Arc<Executor>, EngineError>)> =
            thread::scope(|scope| {
                let threads: Vec<_> = found
                    .into_iter()
                    .map(|(number, facts)| {
                        let config = self.executor_config(number, facts.class);
                        (number, facts, scope.spawn(move || Executor::recover(config)))
                    })
                    .collect();
                threads
                    .into_iter()
                    .map(|(number, facts, thread)| {
                        (number, facts, thread.join().unwrap_or(Err(EngineError::Ended)))
                    })
                    .collect()
            });
        let mut kept = BTreeSet::new();
        for (number, facts, result) in begun {
            kept.insert(number);
            self.take_up(number, facts, result, RETRY_PAUSE, "");
        }
        self.shared.store.give_back_dead(|number| kept.contains(&number));
        self.keep_own();
        Ok(())
    }

    fn take_up(
        &self,
        number: u64,
        facts: FamilyFacts,
        result: Result<Arc<Executor>, EngineError>,
        mut pause: Duration,
        error_before: &str,
    ) {
        match result {
            Ok(executor) => {
                tracing::info!(family = number, name = facts.name, "taken up again");
                self.attached(executor.processes().len() as u64);
                let family = Family::new(number, facts, executor);
                let mut inner = self.lock();
                inner.end_try(number);
                inner.families.insert(number, Arc::new(family));
            }
            Err(error) => {
                if matches!(error, EngineError::Stopped { .. }) {
                    // They may go on at any time, and should not have to wait then.
                    pause = RETRY_PAUSE;
                }
                let error = chain(&error);
                if error != error_before {
                    tracing::error!(
                        family = number,
                        name = facts.name,
                        error,
                        "a family cannot be taken up yet; its programs wait where they touch what was parked"
                    );
                }
                let next_try = Some(Instant::now() + pause);
                let mut inner = self.lock();
                inner.end_try(number);
                inner.waiting.push(Waiting { number, facts, error, next_try, pause });
            }
        }
    }

    /// Tries those again that could not be taken up and whose time has come.
    pub(super) fn retry_waiting(&self) {
        let due = self.lock().begin_due_tries(Instant::now());
        self.retry(due, |pause| (pause * 2).min(RETRY_PAUSE_MAX));
    }

    /// Tries all of them again now: somebody waits for the outcome.
    pub(super) fn retry_all_waiting(&self) {
        let all = self.lock().begin_tries(|_| true);
        self.retry(all, |pause| pause);
    }

    fn retry(&self, tried: Vec<Tried>, next_pause: impl Fn(Duration) -> Duration) {
        for (number, facts, pause, error) in tried {
            let result = Executor::recover(self.executor_config(number, facts.class));
            self.take_up(number, facts, result, next_pause(pause), &error);
        }
    }

    /// Whether the family with this secret is one of an earlier daemon that is not served yet.
    #[must_use]
    pub fn is_waiting(&self, secret: u64) -> bool {
        self.lock().waiting.iter().any(|waiting| waiting.facts.secret.0 == secret)
    }

    /// Families of an earlier daemon that are not served, each with the reason, for people.
    #[must_use]
    pub fn not_taken_up(&self) -> Vec<String> {
        let inner = self.lock();
        let lines = inner.waiting.iter().map(|waiting| {
            format!(
                "family {} ({}) of an earlier daemon cannot be taken up, and its programs wait: {}",
                waiting.number, waiting.facts.name, waiting.error
            )
        });
        lines.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_is_being_tried_again_is_still_one_that_waits() {
        let now = Instant::now();
        let mut inner = Inner::default();
        inner.waiting.push(Waiting {
            number: 7,
            facts: FamilyFacts::unknown().unwrap(),
            error: "stopped".to_owned(),
            next_try: Some(now),
            pause: RETRY_PAUSE,
        });
        inner.closed = true;
        assert!(inner.begin_due_tries(now).is_empty(), "the daemon is about to leave");
        inner.closed = false;
        assert!(inner.begin_due_tries(now - RETRY_PAUSE).is_empty(), "not yet");
        assert!(!inner.is_trying());
        let tried = inner.begin_due_tries(now);
        assert_eq!(tried.first().map(|&(number, ..)| number), Some(7));
        assert!(inner.begin_tries(|_| true).is_empty(), "once at a time");
        assert!(inner.is_trying() && !inner.is_idle() && inner.waiting.len() == 1);
        inner.end_try(7);
        assert!(inner.is_idle());
    }
}
