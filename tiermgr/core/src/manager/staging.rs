//! Staging buffers: the small ones that every family has, and the large ones that it borrows.
//!
//! **Problem.** Large buffers make reads ahead and writes fast, but hundreds of families cannot have
//! some of their own each; and what one family does with a lent one must never keep another from
//! going on.
//! **Approach.** Faults and rescues use small buffers of the family's own. Large ones are asked for
//! when there is work for them and given back at the end of the turn that finds none, or, where others
//! wait, after one use. Whoever gets none in time writes through a small one, an extent at a time:
//! slow, but waiting for nobody. One small buffer is kept for writes: where a memory cgroup is full, what
//! faults have read stays in theirs until a write makes room.
//! **Not here.** Who is lent what (the host), and what the numbers stand for.

use crate::effect::{Buffer, Effect};
use crate::limits::STREAM_BUFFERS;
use crate::units::Tick;

/// How long a large buffer may be waited for before a write goes through a small one. A host that has
/// one lends it within a turn.
const LOAN_GRACE_NS: u64 = 1_000_000;

/// The small buffer that only writes take.
const KEPT: u16 = 0;

/// `free + busy == all` for each kind of buffer; all large ones are those that are lent.
#[derive(Debug)]
pub(super) struct Staging {
    /// How many small ones there are.
    demand: u16,
    free_demand: Vec<u16>,
    /// The small one that only writes take is free.
    kept_is_free: bool,
    free_stream: Vec<u16>,
    lent: u16,
    /// Used once, and others wait for them.
    spent: Vec<u16>,
    /// Others wait.
    short: bool,
    /// Another one has been asked for, at this time, and not come.
    wanted: Option<Tick>,
    /// A write found none at its last look.
    write_waits: bool,
}

/// What a write gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForWrite {
    /// Room for a chunk.
    Whole(Buffer),
    /// Room for one extent.
    Extent(Buffer),
    /// Nothing before this time, unless something is lent or given back earlier.
    Later(Tick),
}

impl Staging {
    pub(super) fn new(demand: u16) -> Self {
        Self {
            demand,
            free_demand: (KEPT + 1..demand).rev().collect(),
            kept_is_free: true,
            free_stream: Vec::new(),
            lent: 0,
            spent: Vec::new(),
            short: false,
            wanted: None,
            write_waits: false,
        }
    }

    /// For whoever waits for one extent.
    pub(super) fn take_demand(&mut self) -> Option<Buffer> {
        self.free_demand.pop().map(Buffer::Demand)
    }

    /// For a read ahead. Writes go first: without them room would never come.
    pub(super) fn take_for_ahead(
        &mut self,
        now: Tick,
        effects: &mut Vec<Effect>,
    ) -> Option<Buffer> {
        let busy = usize::from(self.lent) - self.free_stream.len() - self.spent.len();
        if self.write_waits || busy + 1 >= usize::from(STREAM_BUFFERS) {
            return None;
        }
        self.take_stream(now, effects)
    }

    /// For a write.
    pub(super) fn take_for_write(&mut self, now: Tick, effects: &mut Vec<Effect>) -> ForWrite {
        if let Some(buffer) = self.take_stream(now, effects) {
            return ForWrite::Whole(buffer);
        }
        self.write_waits = true;
        let Some(since) = self.wanted else {
            // As many as one family may have are at work, or about to go back; either brings further turns.
            return ForWrite::Later(Tick::NEVER);
        };
        let patience = since.after_ns(LOAN_GRACE_NS);
        if now < patience {
            return ForWrite::Later(patience);
        }
        if std::mem::take(&mut self.kept_is_free) {
            return ForWrite::Extent(Buffer::Demand(KEPT));
        }
        // Half of them stay for those that wait for a page. Whoever has the kept one waits for the store alone,
        // and gives it back.
        if self.free_demand.len() <= usize::from(self.demand / 2) {
            return ForWrite::Later(Tick::NEVER);
        }
        self.take_demand().map_or(ForWrite::Later(Tick::NEVER), ForWrite::Extent)
    }

    fn take_stream(&mut self, now: Tick, effects: &mut Vec<Effect>) -> Option<Buffer> {
        if let Some(free) = self.free_stream.pop() {
            return Some(Buffer::Stream(free));
        }
        if self.wanted.is_none() && self.lent < STREAM_BUFFERS {
            self.wanted = Some(now);
            effects.push(Effect::WantStream);
        }
        None
    }

    pub(super) fn give_back(&mut self, buffer: Buffer) {
        match buffer {
            Buffer::Stream(n) if self.short => self.spent.push(n),
            Buffer::Stream(n) => self.free_stream.push(n),
            Buffer::Demand(KEPT) => self.kept_is_free = true,
            Buffer::Demand(n) => self.free_demand.push(n),
        }
    }

    pub(super) fn lend(&mut self, stream: u16) {
        self.wanted = None;
        self.lent += 1;
        self.free_stream.push(stream);
    }

    pub(super) const fn set_short(&mut self, short: bool) {
        self.short = short;
    }

    /// Before writes look again.
    pub(super) const fn writes_look(&mut self) {
        self.write_waits = false;
    }

    /// Returns what others wait for. To be called before anybody takes one: whoever finds as many lent as may
    /// be does not ask again.
    pub(super) fn return_spent(&mut self, effects: &mut Vec<Effect>) {
        for stream in self.spent.drain(..) {
            self.lent -= 1;
            effects.push(Effect::ReturnStream { stream });
        }
    }

    /// Returns what nothing in this turn had a use for. Whether a write should look once more.
    pub(super) fn return_unused(&mut self, effects: &mut Vec<Effect>) -> bool {
        let before = self.lent;
        self.spent.append(&mut self.free_stream);
        self.return_spent(effects);
        self.lent < before && self.write_waits && self.wanted.is_none()
    }

    /// Whether `busy` buffers account for all that are not free.
    pub(super) fn check(&self, busy: usize) -> Result<(), String> {
        let free_demand = self.free_demand.len() + usize::from(self.kept_is_free);
        let free = self.free_stream.len() + self.spent.len() + free_demand;
        let all = usize::from(self.lent + self.demand);
        if busy + free == all { Ok(()) } else { Err(format!("{busy} + {free} of {all} buffers")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{DEMAND_BUFFERS, DEMAND_BUFFERS_LEAST};

    const NOW: Tick = Tick(5_000_000);

    #[test]
    fn a_loan_is_asked_for_once_and_given_back_unused() {
        let (mut staging, mut effects) = (Staging::new(DEMAND_BUFFERS), Vec::new());
        assert_eq!(staging.take_for_ahead(NOW, &mut effects), None);
        assert_eq!(staging.take_for_ahead(NOW, &mut effects), None);
        assert_eq!(effects, [Effect::WantStream]);
        staging.lend(3);
        effects.clear();
        assert_eq!(staging.take_for_write(NOW, &mut effects), ForWrite::Whole(Buffer::Stream(3)));
        staging.return_unused(&mut effects);
        assert_eq!(effects, [], "it is at work");
        staging.give_back(Buffer::Stream(3));
        staging.return_unused(&mut effects);
        assert_eq!(effects, [Effect::ReturnStream { stream: 3 }]);
        assert_eq!(staging.check(0), Ok(()));
    }

    #[test]
    fn where_others_wait_a_loan_serves_once() {
        let (mut staging, mut effects) = (Staging::new(DEMAND_BUFFERS), Vec::new());
        staging.set_short(true);
        staging.lend(0);
        assert!(matches!(staging.take_for_write(NOW, &mut effects), ForWrite::Whole(_)));
        staging.give_back(Buffer::Stream(0));
        assert_eq!(staging.check(0), Ok(()));
        staging.return_spent(&mut effects);
        assert!(matches!(staging.take_for_write(NOW, &mut effects), ForWrite::Later(_)));
        assert_eq!(effects, [Effect::ReturnStream { stream: 0 }, Effect::WantStream]);
        assert_eq!(staging.check(0), Ok(()));
    }

    #[test]
    fn a_write_that_found_all_lent_looks_again_once_they_went_back() {
        let (mut staging, mut effects) = (Staging::new(DEMAND_BUFFERS), Vec::new());
        (0..STREAM_BUFFERS).for_each(|n| staging.lend(n));
        for _ in 0..STREAM_BUFFERS {
            assert!(matches!(staging.take_for_write(NOW, &mut effects), ForWrite::Whole(_)));
        }
        staging.set_short(true);
        (0..STREAM_BUFFERS).for_each(|n| staging.give_back(Buffer::Stream(n)));
        assert_eq!(staging.take_for_write(NOW, &mut effects), ForWrite::Later(Tick::NEVER));
        assert!(staging.return_unused(&mut effects));
        assert!(!staging.return_unused(&mut effects), "nothing has changed since");
    }

    #[test]
    fn a_write_that_is_lent_nothing_takes_a_small_buffer_but_not_from_those_that_wait() {
        let (mut staging, mut effects) = (Staging::new(DEMAND_BUFFERS), Vec::new());
        let patience = NOW.after_ns(LOAN_GRACE_NS);
        assert_eq!(staging.take_for_write(NOW, &mut effects), ForWrite::Later(patience));
        let mut taken = 0;
        while let ForWrite::Extent(_) = staging.take_for_write(patience, &mut effects) {
            taken += 1;
        }
        assert_eq!(taken, DEMAND_BUFFERS / 2);
        assert!(staging.take_demand().is_some());
        assert_eq!(effects, [Effect::WantStream], "asked for once");
    }

    #[test]
    fn who_waits_for_a_page_never_has_the_last_small_buffer() {
        let (mut staging, mut effects) = (Staging::new(DEMAND_BUFFERS_LEAST), Vec::new());
        let _ = staging.take_for_write(NOW, &mut effects);
        let patience = NOW.after_ns(LOAN_GRACE_NS);
        let taken: Vec<_> = std::iter::from_fn(|| staging.take_demand()).collect();
        assert_eq!(taken.len(), usize::from(DEMAND_BUFFERS_LEAST) - 1);
        for _ in 0..3 {
            let ForWrite::Extent(buffer) = staging.take_for_write(patience, &mut effects) else {
                panic!("a write waits for who waits for it");
            };
            assert_eq!(
                staging.take_for_write(patience, &mut effects),
                ForWrite::Later(Tick::NEVER)
            );
            assert_eq!(staging.check(taken.len() + 1), Ok(()));
            staging.give_back(buffer);
            assert_eq!(staging.take_demand(), None);
        }
        assert_eq!(staging.check(taken.len()), Ok(()));
    }

    #[test]
    fn reads_ahead_leave_the_last_loan_and_each_that_a_write_waits_for() {
        let (mut staging, mut effects) = (Staging::new(DEMAND_BUFFERS), Vec::new());
        (0..STREAM_BUFFERS).for_each(|n| staging.lend(n));
        for _ in 1..STREAM_BUFFERS {
            assert!(staging.take_for_ahead(NOW, &mut effects).is_some());
        }
        assert_eq!(staging.take_for_ahead(NOW, &mut effects), None);
        assert!(matches!(staging.take_for_write(NOW, &mut effects), ForWrite::Whole(_)));
        assert_eq!(staging.take_for_write(NOW, &mut effects), ForWrite::Later(Tick::NEVER));
        staging.give_back(Buffer::Stream(0));
        staging.give_back(Buffer::Stream(1));
        assert_eq!(staging.take_for_ahead(NOW, &mut effects), None, "a write waits");
        staging.writes_look();
        assert!(staging.take_for_ahead(NOW, &mut effects).is_some());
        assert_eq!(effects, [], "as many are lent as may be");
    }
}
