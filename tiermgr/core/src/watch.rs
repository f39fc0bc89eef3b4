//! The watchdog of faults: who sleeps, since when, and who was never answered.
//!
//! It believes nothing that the manager believes. It sees the faults that come in and the effects and
//! outcomes that wake, and so finds a sleeper whom the manager has forgotten as well as one whom a slow
//! device keeps waiting.

use crate::effect::Effect;
use crate::event::{Event, IoctlOutcome};
use crate::units::{Addr, OpId, ProcId, Span, Tick};

/// A fault that is older than this is reported.
pub const OVERDUE_NS: u64 = 5_000_000_000;

/// Threads that sleep on one page.
#[derive(Clone, Copy, Debug)]
struct Sleeper {
    proc: ProcId,
    page: Addr,
    since: Tick,
    /// The ioctl that is to wake them is on its way, and where it begins.
    answer: Option<(OpId, Addr)>,
    reported: bool,
}

/// What keeps a thread waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsOn {
    /// DRAM, or a buffer: something must leave first.
    Room,
    /// The store is to give bytes.
    StoreRead,
    /// The store is to take bytes.
    StoreWrite,
    /// The helper in the process.
    Helper,
    /// The kernel.
    Kernel,
    /// A fork that is being followed, or what a restart has to look up.
    Table,
    /// Nobody: the address is not managed any more, or the fault was forgotten.
    Nobody,
}

impl std::fmt::Display for WaitsOn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Room => "room in DRAM",
            Self::StoreRead => "a read from the store",
            Self::StoreWrite => "a write to the store",
            Self::Helper => "the helper in the process",
            Self::Kernel => "the kernel",
            Self::Table => "the table of a fork or of a restart",
            Self::Nobody => "nothing that the daemon knows of",
        })
    }
}

/// A fault that nobody has answered for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// Whose.
    pub proc: ProcId,
    /// The page.
    pub page: Addr,
    /// When it was read.
    pub since: Tick,
}

/// All faults that were read and not answered yet.
#[derive(Debug)]
pub struct Watch {
    page_bytes: u64,
    sleepers: Vec<Sleeper>,
}

impl Watch {
    /// Nobody sleeps. Makes room for many at once, since faults are not to wait for an allocation.
    #[must_use]
    pub fn new(page_bytes: u64) -> Self {
        Self { page_bytes, sleepers: Vec::with_capacity(256) }
    }

    /// Takes note of an event, before the manager acts on it.
    pub fn hear(&mut self, now: Tick, event: &Event) {
        match *event {
            Event::Faulted { proc, at, .. } => {
                let page = at.align_down(self.page_bytes);
                let same = |s: &&mut Sleeper| s.proc == proc && s.page == page;
                let (answer, reported) = (None, false);
                match self.sleepers.iter_mut().find(same) {
                    // Whoever comes while an answer is on its way may have come after it.
                    Some(known) if known.answer.is_some() => {
                        (known.since, known.answer) = (now, None)
                    }
                    Some(_) => {}
                    None => {
                        self.sleepers.push(Sleeper { proc, page, since: now, answer, reported })
                    }
                }
            }
            Event::Copied { op, bytes, outcome } => self.answered(op, bytes, outcome),
            Event::Protected { op, outcome } | Event::Armed { op, outcome } => {
                self.answered(op, 0, outcome);
            }
            Event::ProcGone { proc } => self.forget(proc),
            _ => {}
        }
    }

    /// Takes note of an effect of the manager.
    pub fn see(&mut self, effect: &Effect) {
        match *effect {
            Effect::Copy { op, proc, from, to, .. } => {
                self.answer(op, proc, Span::new(to, u64::from(from.len)));
            }
            Effect::Zero { op, proc, to } => self.answer(op, proc, to),
            Effect::Protect { op, proc, span, on: false }
            | Effect::Arm { op, proc, span, on: false } => self.answer(op, proc, span),
            Effect::Wake { proc, span } | Effect::Poison { proc, span } => {
                self.sleepers.retain(|s| s.proc != proc || !span.contains(s.page));
            }
            Effect::Release { proc } => self.forget(proc),
            _ => {}
        }
    }

    fn answer(&mut self, op: OpId, proc: ProcId, span: Span) {
        for sleeper in &mut self.sleepers {
            if sleeper.proc == proc && span.contains(sleeper.page) {
                sleeper.answer = Some((op, span.start));
            }
        }
    }

    /// `bytes`, where it was cut short: whoever slept on these has been woken.
    fn answered(&mut self, op: OpId, bytes: u64, outcome: IoctlOutcome) {
        self.sleepers.retain_mut(|sleeper| {
            let Some((answer, start)) = sleeper.answer else { return true };
            if answer != op {
                return true;
            }
            // An operation keeps its number when it goes on with another piece.
            sleeper.answer = None;
            outcome != IoctlOutcome::Done && sleeper.page >= start.plus(bytes)
        });
    }

    fn forget(&mut self, proc: ProcId) {
        self.sleepers.retain(|s| s.proc != proc);
    }

    /// The oldest fault that is overdue and was not given yet.
    pub fn overdue(&mut self, now: Tick) -> Option<Overdue> {
        let oldest = self.sleepers.iter_mut().filter(|s| !s.reported).min_by_key(|s| s.since)?;
        if oldest.since.after_ns(OVERDUE_NS) > now {
            return None;
        }
        oldest.reported = true;
        Some(Overdue { proc: oldest.proc, page: oldest.page, since: oldest.since })
    }

    /// When the next fault will be overdue that was not given yet.
    #[must_use]
    pub fn deadline(&self) -> Tick {
        let waiting = self.sleepers.iter().filter(|s| !s.reported);
        waiting.map(|s| s.since.after_ns(OVERDUE_NS)).min().unwrap_or(Tick::NEVER)
    }

    /// At how many pages somebody is overdue.
    #[must_use]
    pub fn late(&self, now: Tick) -> u64 {
        let late = |s: &&Sleeper| s.since.after_ns(OVERDUE_NS) <= now;
        self.sleepers.iter().filter(late).count() as u64
    }

    /// Whether somebody sleeps there, as far as is known.
    #[must_use]
    pub fn sleeps(&self, proc: ProcId, at: Addr) -> bool {
        let page = at.align_down(self.page_bytes);
        self.sleepers.iter().any(|s| s.proc == proc && s.page == page)
    }

    /// Whether nobody sleeps.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sleepers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effect::{BufRange, Buffer};

    const PROC: ProcId = ProcId(1);
    const PAGE: u64 = 4096;

    fn faulted(at: u64) -> Event {
        Event::Faulted { proc: PROC, at: Addr(at), write: false, protected: false }
    }

    fn copy(op: u64, to: u64, pages: u32) -> Effect {
        let from = BufRange { buf: Buffer::Demand(0), offset: 0, len: pages * 4096 };
        Effect::Copy { op: OpId(op), proc: PROC, from, to: Addr(to), protect: false }
    }

    fn copied(op: u64, bytes: u64, outcome: IoctlOutcome) -> Event {
        Event::Copied { op: OpId(op), bytes, outcome }
    }

    #[test]
    fn each_late_fault_is_named_once() {
        let mut watch = Watch::new(PAGE);
        watch.hear(Tick(1), &faulted(8 * PAGE + 5));
        watch.hear(Tick(2), &faulted(9 * PAGE));
        assert_eq!(watch.deadline(), Tick(1 + OVERDUE_NS));
        assert_eq!(watch.overdue(Tick(OVERDUE_NS)), None, "a moment too early");
        let now = Tick(1 + OVERDUE_NS);
        let first = Overdue { proc: PROC, page: Addr(8 * PAGE), since: Tick(1) };
        assert_eq!(watch.overdue(now), Some(first));
        assert_eq!(watch.overdue(now), None);
        assert_eq!((watch.late(now), watch.deadline()), (1, Tick(2 + OVERDUE_NS)));
        watch.see(&Effect::Wake { proc: PROC, span: Span::new(Addr(0), 16 * PAGE) });
        assert_eq!((watch.late(now), watch.deadline()), (0, Tick::NEVER));
    }

    #[test]
    fn only_an_ioctl_that_ended_well_wakes() {
        let mut watch = Watch::new(PAGE);
        watch.hear(Tick(1), &faulted(0));
        watch.hear(Tick(1), &faulted(3 * PAGE));
        watch.see(&copy(7, 0, 16));
        watch.hear(Tick(2), &copied(7, 2 * PAGE, IoctlOutcome::EventsPending));
        assert!(!watch.sleeps(PROC, Addr(0)), "the front was installed");
        assert!(watch.sleeps(PROC, Addr(3 * PAGE)));
        // The operation goes on with a piece that does not reach the page.
        watch.see(&copy(7, 2 * PAGE, 1));
        watch.hear(Tick(3), &copied(7, PAGE, IoctlOutcome::Done));
        assert!(watch.sleeps(PROC, Addr(3 * PAGE)));
        watch.see(&copy(7, 3 * PAGE, 13));
        watch.hear(Tick(4), &copied(7, 13 * PAGE, IoctlOutcome::Done));
        assert!(watch.is_empty());
    }

    #[test]
    fn whoever_comes_after_an_answer_is_not_answered() {
        let mut watch = Watch::new(PAGE);
        watch.hear(Tick(1), &faulted(0));
        watch.see(&copy(7, 0, 1));
        watch.hear(Tick(2), &faulted(0));
        watch.hear(Tick(2), &copied(7, PAGE, IoctlOutcome::Done));
        assert!(watch.sleeps(PROC, Addr(0)));
        watch.hear(Tick(3), &Event::ProcGone { proc: PROC });
        assert!(watch.is_empty());
    }
}
