//! DRAM, shared out among families.
//!
//! Everything is counted in bytes. A family holds a *grant*; what it uses lies inside the grant, or
//! above it for a moment while it shrinks. The daemon itself *keeps* what it takes, before anybody is
//! granted anything. `used + reserved + free == total`, always, where `used` is what is kept and the used
//! part of all grants, and `reserved` the rest of them.
//!
//! **Problem.** Families come, want more, and go; none may take what another holds, and none may keep
//! more than its fair share while another goes without.
//! **Approach.** Grow from what is free. With nothing free, compute the weighted max-min fair shares;
//! of those that hold more than their share, the ones that use least of it are told a *budget* that is
//! smaller by what the others lack, and their grants follow as their use goes down. Only then do the
//! others grow.
//! **Not here.** What a family gives up first (`core`), and limits of a family's own.

use crate::wake::Wake;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tiermgr_core::units::{EXTENT_BYTES, Tick};
use tiermgr_wire::hello::Class;

/// The number of a family; unique for the life of the daemon.
pub type FamilyId = u64;

/// What a family keeps above its use while others go without, so that it need not ask for each page: at
/// most so much, and where families are many their part of an eighth of all.
const SLACK_BYTES: u64 = 2 << 20;
const SLACK_SHARE: u64 = 8;

/// Whoever lacks room and touches anything asks once a second (`core`): one that has not asked for so
/// long rests, and what it lacked then is of no use to it now.
const RESTS_AFTER_NS: u64 = 4_000_000_000;

/// How much a class weighs against another when room is short.
const fn weight(class: Class) -> u64 {
    match class {
        Class::Latency => 4,
        Class::Standard => 2,
        Class::Bulk => 1,
    }
}

/// What one executor sees of the ledger without a lock.
#[derive(Debug)]
pub struct Share {
    family: FamilyId,
    /// What the family may use from now on.
    budget: AtomicU64,
    /// What it said that it uses.
    used: AtomicU64,
    /// 0, or 1 while the grant is above the budget.
    shrinking: AtomicU64,
    wake: Arc<Wake>,
}

impl Share {
    /// Bytes that the family may use from now on.
    #[must_use]
    pub fn budget(&self) -> u64 {
        self.budget.load(Ordering::Acquire)
    }

    fn tell(&self, budget: u64, granted: u64) {
        self.shrinking.store(u64::from(budget < granted), Ordering::Release);
        if self.budget.swap(budget, Ordering::AcqRel) != budget {
            self.wake.wake();
        }
    }
}

#[derive(Debug)]
struct Family {
    weight: u64,
    granted: u64,
    /// What would be of use to it, at least what it holds.
    wish: u64,
    /// When it asked last; of a newcomer, when anybody next did.
    asked: Option<Tick>,
    /// What its grant is to come down to.
    target: Option<u64>,
    share: Arc<Share>,
}

impl Family {
    fn tell(&self) {
        self.share.tell(self.target.unwrap_or(self.granted), self.granted);
    }

    fn used(&self) -> u64 {
        self.share.used.load(Ordering::Acquire)
    }

    /// What it is to be counted as needing: what it asked for, or, where it asks for nothing more,
    /// what it uses and a little on top.
    fn demand(&self, slack: u64) -> u64 {
        if self.wish > self.granted {
            return self.wish;
        }
        let used = self.used();
        used.saturating_add((used / 16).max(slack)).min(self.granted)
    }
}

/// How a tier's bytes are divided. `used + reserved + free == total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoomUse {
    /// Granted and in use, and what is kept.
    pub used: u64,
    /// Granted and not in use.
    pub reserved: u64,
    /// Not granted.
    pub free: u64,
    /// All of it.
    pub total: u64,
    /// The daemon's own, all of it: of the used as far as the total goes.
    pub kept: u64,
    /// In use above grants, or kept above the total: what is to shrink. Counted nowhere else.
    pub beyond: u64,
}

/// The DRAM ledger. Every call takes one lock for a few dozen instructions; no call blocks otherwise.
#[derive(Debug)]
pub struct Room {
    total: u64,
    ledger: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    /// The daemon's own.
    kept: u64,
    families: BTreeMap<FamilyId, Family>,
}

impl Ledger {
    fn granted(&self) -> u64 {
        self.families.values().map(|family| family.granted).sum()
    }

    fn let_rest(&mut self, now: Tick) {
        for family in self.families.values_mut() {
            let asked = *family.asked.get_or_insert(now);
            if asked.after_ns(RESTS_AFTER_NS) <= now {
                family.wish = family.wish.min(family.granted);
            }
        }
    }
}

impl Room {
    /// A ledger over `total` bytes.
    #[must_use]
    pub fn new(total: u64) -> Self {
        Self { total, ledger: Mutex::default() }
    }

    /// Keeps so much for the daemon itself from now on. Where that is not free, families give it up in time.
    pub fn keep(&self, bytes: u64) {
        let mut ledger = self.lock();
        if ledger.kept != bytes {
            ledger.kept = bytes;
            self.rebalance(&mut ledger);
        }
    }

    /// Enters `family` with a grant of at most `wish`, and of less where less is free. `wake` is used
    /// whenever the budget changes otherwise than by the family's own [`Room::want`]. A family that
    /// is here already keeps its grant and gets its share again.
    pub fn join(&self, family: FamilyId, class: Class, wish: u64, wake: Arc<Wake>) -> Arc<Share> {
        let mut ledger = self.lock();
        if let Some(known) = ledger.families.get_mut(&family) {
            // Whoever began for it before has given up, and would be woken in its place.
            let before = &known.share;
            known.share = Arc::new(Share {
                family,
                budget: AtomicU64::new(before.budget()),
                used: AtomicU64::new(before.used.load(Ordering::Acquire)),
                shrinking: AtomicU64::new(before.shrinking.load(Ordering::Acquire)),
                wake,
            });
            return Arc::clone(&known.share);
        }
        let granted = wish.min(free(self.total, &ledger));
        let share = Arc::new(Share {
            family,
            budget: AtomicU64::new(granted),
            used: AtomicU64::new(0),
            shrinking: AtomicU64::new(0),
            wake,
        });
        ledger.families.insert(
            family,
            Family {
                weight: weight(class),
                granted,
                wish,
                asked: None,
                target: None,
                share: Arc::clone(&share),
            },
        );
        self.rebalance(&mut ledger);
        share
    }

    /// Says that a budget of `wish` bytes in all would be of use. Raises the grant from what is free;
    /// where that is not enough, asks those above their fair share to shrink, and grows in time. The wish
    /// counts for some seconds from `now`; whoever lacks it still asks again.
    pub fn want(&self, share: &Share, wish: u64, now: Tick) {
        let mut ledger = self.lock();
        ledger.let_rest(now);
        let available = free(self.total, &ledger);
        // More than there is cannot be of use, and would only distort the shares of the others.
        let wish = wish.min(self.total.saturating_sub(ledger.kept));
        let Some(family) = ledger.families.get_mut(&share.family) else { return };
        family.asked = Some(now);
        family.wish = wish.max(family.granted);
        if family.target.is_none() {
            family.granted += available.min(wish.saturating_sub(family.granted));
            family.tell();
        }
        self.rebalance(&mut ledger);
    }

    /// Says what the family uses now, after it has obeyed the last budget that it saw. Takes the lock
    /// only while the family shrinks.
    pub fn report(&self, share: &Share, used: u64) {
        share.used.store(used, Ordering::Release);
        if share.shrinking.load(Ordering::Acquire) != 0 {
            self.settle_shrink(share.family);
        }
    }

    /// Takes `family` out; all that it held is free.
    pub fn leave(&self, share: &Share) {
        let mut ledger = self.lock();
        ledger.families.remove(&share.family);
        self.rebalance(&mut ledger);
    }

    /// How the bytes are divided now.
    #[must_use]
    pub fn usage(&self) -> RoomUse {
        let ledger = self.lock();
        let free = free(self.total, &ledger);
        let families = ledger.families.values();
        let granted_used: u64 = families.map(|family| family.used().min(family.granted)).sum();
        // Grants are above what is left of the total for as long as it takes families to shrink.
        let used = ledger.kept.saturating_add(granted_used).min(self.total);
        let all_used: u64 = ledger.families.values().map(Family::used).sum();
        let beyond = (ledger.kept + all_used).saturating_sub(used);
        let (total, kept) = (self.total, ledger.kept);
        RoomUse { used, reserved: total - free - used, free, total, kept, beyond }
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        // The ledger is consistent between any two statements that can panic: there are none.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle_shrink(&self, family: FamilyId) {
        let mut ledger = self.lock();
        let Some(known) = ledger.families.get_mut(&family) else { return };
        let Some(target) = known.target else { return };
        let kept = known.used().max(target).min(known.granted);
        if kept == known.granted {
            return;
        }
        known.granted = kept;
        if kept == target {
            known.target = None;
            // It may ask again; until then it is not counted as one that goes without.
            known.wish = kept;
        }
        known.tell();
        self.rebalance(&mut ledger);
    }

    /// Gives out what is free to those that wish more, smallest share first, and has those above their
    /// fair share give what the others then lack.
    fn rebalance(&self, ledger: &mut Ledger) {
        let mut available = free(self.total, ledger);
        let overdrawn = (ledger.kept + ledger.granted()).saturating_sub(self.total);
        let fair = fair_shares(self.total.saturating_sub(ledger.kept), &ledger.families);
        let families = &mut ledger.families;
        let mut poorest_first: Vec<FamilyId> = families
            .iter()
            .filter(|(_, family)| family.target.is_none() && family.granted < family.wish)
            .map(|(&id, _)| id)
            .collect();
        poorest_first.sort_by_key(|id| families.get(id).map_or(0, |f| f.granted / f.weight));
        // Up to the fair share first, then whatever remains.
        for limit_to_fair in [true, false] {
            for id in &poorest_first {
                let Some(family) = families.get_mut(id) else { continue };
                let limit = if limit_to_fair {
                    family.wish.min(fair.get(id).copied().unwrap_or(0))
                } else {
                    family.wish
                };
                let more = limit.saturating_sub(family.granted).min(available);
                if more > 0 {
                    family.granted += more;
                    available -= more;
                    family.tell();
                }
            }
        }
        let mut missing = overdrawn;
        for (id, family) in families.iter() {
            let due = family.wish.min(fair.get(id).copied().unwrap_or(0));
            missing += due.saturating_sub(family.granted);
        }
        // What nobody uses goes first: it costs its holder nothing.
        let mut rest = missing.saturating_sub(available);
        // Looked at once: what families use changes meanwhile, and a sort whose keys change panics.
        let mut idlest_first: Vec<(Reverse<u64>, FamilyId)> = families
            .iter()
            .map(|(&id, family)| (Reverse(family.granted.saturating_sub(family.used())), id))
            .collect();
        idlest_first.sort_unstable();
        for (_, id) in idlest_first {
            let Some(family) = families.get_mut(&id) else { continue };
            let fair = fair.get(&id).copied().unwrap_or(0);
            let less = family.granted.saturating_sub(fair).min(rest);
            rest -= less;
            let target = (less > 0).then_some(family.granted - less);
            if family.target != target {
                family.target = target;
                family.tell();
            }
        }
    }
}

fn free(total: u64, ledger: &Ledger) -> u64 {
    total.saturating_sub(ledger.kept).saturating_sub(ledger.granted())
}

/// Weighted max-min fair shares, in whole extents: nobody gets more than it wishes, and what one does
/// not wish is shared among the rest.
fn fair_shares(total: u64, families: &BTreeMap<FamilyId, Family>) -> BTreeMap<FamilyId, u64> {
    let mut shares = BTreeMap::new();
    let mut rest = total;
    let slack = total / SLACK_SHARE / (families.len() as u64).max(1);
    let slack = slack.clamp(EXTENT_BYTES, SLACK_BYTES);
    let mut open: Vec<(FamilyId, u64, u64)> =
        families.iter().map(|(&id, family)| (id, family.demand(slack), family.weight)).collect();
    while !open.is_empty() {
        let weights: u64 = open.iter().map(|&(_, _, weight)| weight).sum();
        let part = rest / weights;
        let before = open.len();
        let mut taken = 0;
        open.retain(|&(id, wish, weight)| {
            let satisfied = wish <= part.saturating_mul(weight);
            if satisfied {
                shares.insert(id, wish);
                taken += wish;
            }
            !satisfied
        });
        rest -= taken;
        if open.len() == before {
            for &(id, _, weight) in &open {
                let share = part.saturating_mul(weight);
                shares.insert(id, share - share % EXTENT_BYTES);
            }
            break;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const MIB: u64 = 1 << 20;

    fn check(room: &Room) -> RoomUse {
        let usage = room.usage();
        assert_eq!(usage.used + usage.reserved + usage.free, usage.total);
        usage
    }

    fn join(room: &Room, family: FamilyId, class: Class, wish: u64) -> Arc<Share> {
        room.join(family, class, wish, Arc::new(Wake::silent()))
    }

    fn want(room: &Room, share: &Share, wish: u64) {
        room.want(share, wish, Tick(0));
    }

    #[test]
    fn the_last_free_byte_is_granted_and_no_more() {
        let room = Room::new(10 * MIB);
        let a = join(&room, 1, Class::Standard, 4 * MIB);
        assert_eq!(a.budget(), 4 * MIB);
        want(&room, &a, 10 * MIB);
        assert_eq!(a.budget(), 10 * MIB);
        want(&room, &a, 11 * MIB);
        assert_eq!(a.budget(), 10 * MIB);
        assert_eq!(check(&room).free, 0);
    }

    #[test]
    fn one_above_its_share_shrinks_before_another_grows() {
        let room = Room::new(100 * MIB);
        let a = join(&room, 1, Class::Standard, 100 * MIB);
        room.report(&a, 100 * MIB);
        let b = join(&room, 2, Class::Standard, 80 * MIB);
        assert_eq!((a.budget(), b.budget()), (50 * MIB, 0));
        room.report(&a, 70 * MIB);
        assert_eq!((a.budget(), b.budget()), (50 * MIB, 30 * MIB));
        room.report(&a, 50 * MIB);
        assert_eq!((a.budget(), b.budget()), (50 * MIB, 50 * MIB));
        check(&room);
    }

    #[test]
    fn what_the_daemon_keeps_comes_before_all_shares() {
        let room = Room::new(100 * MIB);
        room.keep(10 * MIB);
        let shares: Vec<_> = (0..9).map(|n| join(&room, n, Class::Latency, 100 * MIB)).collect();
        let all_use =
            |room: &Room| shares.iter().for_each(|share| room.report(share, share.budget()));
        for _ in 0..9 {
            shares.iter().for_each(|share| want(&room, share, 100 * MIB));
            all_use(&room);
        }
        assert!(shares.iter().all(|share| share.budget() == 10 * MIB));
        room.keep(55 * MIB);
        assert_eq!(room.usage().beyond, 45 * MIB, "nobody has shrunk yet");
        all_use(&room);
        let held: u64 = shares.iter().map(|share| share.budget()).sum();
        assert!(held <= 45 * MIB && shares.iter().all(|share| share.budget() >= 4 * MIB));
        let usage = check(&room);
        assert_eq!((usage.kept, usage.beyond), (55 * MIB, 0));
        room.keep(101 * MIB);
        shares.iter().for_each(|share| room.report(share, MIB));
        assert!(shares.iter().all(|share| share.budget() == 0));
        assert_eq!(check(&room).beyond, 10 * MIB);
    }

    #[test]
    fn classes_weigh_four_two_one() {
        let room = Room::new(70 * MIB);
        let bulk = join(&room, 1, Class::Bulk, 70 * MIB);
        room.report(&bulk, 70 * MIB);
        let standard = join(&room, 2, Class::Standard, 70 * MIB);
        let latency = join(&room, 3, Class::Latency, 70 * MIB);
        room.report(&bulk, 10 * MIB);
        assert_eq!(bulk.budget(), 10 * MIB);
        assert_eq!(standard.budget(), 20 * MIB);
        assert_eq!(latency.budget(), 40 * MIB);
    }

    #[test]
    fn a_family_that_ends_gives_everything_to_those_that_wait() {
        let room = Room::new(100 * MIB);
        let a = join(&room, 1, Class::Standard, 100 * MIB);
        room.report(&a, 100 * MIB);
        let b = join(&room, 2, Class::Standard, 80 * MIB);
        room.leave(&a);
        assert_eq!(b.budget(), 80 * MIB);
        room.leave(&b);
        assert_eq!(
            check(&room),
            RoomUse { free: 100 * MIB, total: 100 * MIB, ..RoomUse::default() }
        );
    }

    #[test]
    fn room_that_nobody_uses_goes_to_those_that_wait() {
        let room = Room::new(1000 * MIB);
        let a = join(&room, 1, Class::Standard, 1000 * MIB);
        room.report(&a, 100 * MIB);
        let b = join(&room, 2, Class::Standard, 900 * MIB);
        let kept = 100 * MIB + 100 * MIB / 16;
        assert_eq!((a.budget(), b.budget()), (kept, 0));
        room.report(&a, 100 * MIB);
        assert_eq!((a.budget(), b.budget()), (kept, (900 * MIB).min(1000 * MIB - kept)));
        check(&room);
    }

    #[test]
    fn a_newcomer_takes_no_more_than_it_lacks() {
        let room = Room::new(8192 * MIB);
        let a = join(&room, 1, Class::Standard, 8192 * MIB);
        for newcomer in 0..300 {
            room.report(&a, 42 * MIB);
            let b = join(&room, 2 + newcomer, Class::Standard, 64 * MIB);
            room.report(&a, 42 * MIB);
            assert_eq!((a.budget(), b.budget()), (8128 * MIB, 64 * MIB));
            room.leave(&b);
        }
    }

    #[test]
    fn who_uses_least_of_its_room_gives_it() {
        let room = Room::new(1000 * MIB);
        let busy = join(&room, 1, Class::Standard, 500 * MIB);
        let idle = join(&room, 2, Class::Standard, 500 * MIB);
        room.report(&busy, 500 * MIB);
        room.report(&idle, 10 * MIB);
        let b = join(&room, 3, Class::Standard, 64 * MIB);
        room.report(&idle, 10 * MIB);
        assert_eq!((busy.budget(), idle.budget(), b.budget()), (500 * MIB, 436 * MIB, 64 * MIB));
    }

    #[test]
    fn a_newcomer_gets_its_share_beside_many_that_rest() {
        let room = Room::new(256 * MIB);
        let resting: Vec<_> = (0..8).map(|n| join(&room, n, Class::Standard, 256 * MIB)).collect();
        let settle = |room: &Room| {
            for share in &resting {
                want(room, share, 30 * MIB);
                room.report(share, (20 * MIB).min(share.budget()));
            }
        };
        for _ in 0..8 {
            settle(&room);
        }
        let newcomer = join(&room, 99, Class::Standard, 64 * MIB);
        for _ in 0..8 {
            want(&room, &newcomer, newcomer.budget() + 16 * MIB);
            for share in &resting {
                room.report(share, (20 * MIB).min(share.budget()));
            }
        }
        assert!(newcomer.budget() >= 64 * MIB, "{} of 80 MiB that are free", newcomer.budget());
        assert!(resting.iter().all(|share| share.budget() >= 20 * MIB));
        check(&room);
    }

    #[test]
    fn what_is_lacked_by_those_that_rest_goes_to_one_that_asks() {
        let room = Room::new(64 * MIB);
        let resting: Vec<_> = (0..32).map(|n| join(&room, n, Class::Standard, 64 * MIB)).collect();
        let busy = join(&room, 99, Class::Standard, 64 * MIB);
        let budget_at = |seconds: u64| {
            for _ in 0..40 {
                room.want(&busy, 48 * MIB, Tick(seconds * 1_000_000_000));
                room.report(&busy, busy.budget());
                resting.iter().for_each(|share| room.report(share, MIB / 2));
            }
            check(&room);
            busy.budget()
        };
        assert!(budget_at(1) < 4 * MIB, "all have just come");
        assert!(budget_at(6) >= 40 * MIB, "{} MiB", busy.budget() / MIB);
        assert!(resting.iter().all(|share| share.budget() >= MIB / 2));
        let woken = &resting[0];
        for _ in 0..40 {
            room.want(woken, 16 * MIB, Tick(7_000_000_000));
            room.report(&busy, busy.budget());
            room.report(woken, woken.budget());
        }
        assert!(woken.budget() > 15 * MIB, "it may ask again");
    }

    #[test]
    fn use_may_change_while_shares_are_computed() {
        let room = Room::new(1000 * MIB);
        let shares: Vec<_> = (0..100).map(|n| join(&room, n, Class::Standard, 50 * MIB)).collect();
        let ends = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(1);
                while !ends.load(Ordering::Relaxed) {
                    for share in &shares {
                        share.used.store(random.below(50 * MIB), Ordering::Release);
                    }
                }
            });
            let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                (0..1000).for_each(|n| want(&room, &shares[n % 100], 60 * MIB));
            }));
            ends.store(true, Ordering::Relaxed);
            assert!(rounds.is_ok());
        });
        check(&room);
    }

    #[test]
    fn one_that_has_shrunk_grows_again_when_it_asks() {
        let room = Room::new(100 * MIB);
        let a = join(&room, 1, Class::Standard, 100 * MIB);
        room.report(&a, 100 * MIB);
        let b = join(&room, 2, Class::Standard, 80 * MIB);
        room.report(&a, 50 * MIB);
        room.leave(&b);
        assert_eq!(a.budget(), 50 * MIB, "it has not said that it wants any");
        want(&room, &a, 100 * MIB);
        assert_eq!(a.budget(), 100 * MIB);
    }

    #[test]
    fn nobody_is_told_to_shrink_once_nobody_waits() {
        let room = Room::new(100 * MIB);
        let a = join(&room, 1, Class::Standard, 100 * MIB);
        room.report(&a, 100 * MIB);
        let b = join(&room, 2, Class::Standard, 80 * MIB);
        assert_eq!(a.budget(), 50 * MIB);
        room.leave(&b);
        assert_eq!(a.budget(), 100 * MIB);
    }

    #[test]
    fn the_equation_holds_and_everybody_gets_a_fair_share_in_the_end() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let total = random.below(64) * MIB + MIB;
            let room = Room::new(total);
            let mut shares: Vec<(Arc<Share>, u64)> = Vec::new();
            for step in 0..300 {
                match random.below(6) {
                    0 if shares.len() < 6 => {
                        let class = [Class::Latency, Class::Standard, Class::Bulk]
                            [usize::try_from(random.below(3)).unwrap()];
                        let share = join(&room, step + 1, class, random.below(80) * MIB);
                        shares.push((share, 0));
                    }
                    1 if !shares.is_empty() => {
                        let at = usize::try_from(random.below(shares.len() as u64)).unwrap();
                        room.leave(&shares.swap_remove(at).0);
                    }
                    2 | 3 if !shares.is_empty() => {
                        let at = usize::try_from(random.below(shares.len() as u64)).unwrap();
                        want(&room, &shares[at].0, random.below(80) * MIB);
                    }
                    4 => room.keep(random.below(total + MIB)),
                    _ => {
                        for (share, used) in &mut shares {
                            // Use follows the budget, up at once and down by steps.
                            let budget = share.budget();
                            *used = if *used > budget {
                                (*used - budget.min(*used))
                                    .min(random.below(8) * MIB + MIB)
                                    .abs_diff(*used)
                            } else {
                                budget
                            };
                            room.report(share, *used);
                        }
                    }
                }
                check(&room);
            }
            room.keep(random.below(total + 1));
            // With all at their budgets, and all wishing everything, nobody is below its share.
            for _ in 0..200 {
                for (share, _) in &shares {
                    want(&room, share, total);
                    room.report(share, share.budget());
                }
            }
            let ledger = room.lock();
            let fair = fair_shares(total - ledger.kept, &ledger.families);
            for (id, family) in &ledger.families {
                assert!(
                    family.granted + EXTENT_BYTES >= fair[id],
                    "seed {seed}: {family:?} {fair:?}"
                );
            }
        }
    }
}
