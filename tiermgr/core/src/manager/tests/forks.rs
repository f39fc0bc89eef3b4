//! Forks at bad moments: the store fails, the address space ends, a message comes late.

use super::*;

const CHILD: ProcId = ProcId(2);
const FORK: Event = Event::Forked { parent: PROC, child: CHILD };

/// Lets time pass until `done`. Gives how long that took.
fn pass_until(machine: &mut Machine, done: impl Fn(&Machine) -> bool) -> u64 {
    let begun = machine.now;
    while !done(machine) {
        machine.pass();
        assert!(machine.now < begun.after_ns(20_000_000_000), "it never comes");
    }
    machine.now.0 - begun.0
}

fn born(machine: &mut Machine, child: ProcId) -> u64 {
    pass_until(machine, |machine| machine.manager.state_of(child, BASE).is_some())
}

#[test]
fn nobody_waits_for_limbo_whose_address_space_has_ended() {
    for child_ends_first in [false, true] {
        let mut machine = Machine::with_limbo();
        machine.ended = true;
        machine.turn(FORK);
        if child_ends_first {
            machine.turn(Event::ProcGone { proc: CHILD });
        }
        machine.turn(Event::ProcGone { proc: PROC });
        if !child_ends_first {
            born(&mut machine, CHILD);
            assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Poisoned));
            machine.turn(Event::ProcGone { proc: CHILD });
        }
        for proc in [PROC, CHILD] {
            let released = Effect::Release { proc };
            pass_until(&mut machine, |machine| machine.orders.contains(&released));
        }
    }
}

#[test]
fn a_child_does_not_wait_for_a_store_that_writes_no_more() {
    for writes_take_ns in [0, 305_000_000, 1_500_000_000] {
        let mut machine = Machine::with_limbo();
        machine.store_works = false;
        machine.writes_take_ns = writes_take_ns;
        // Failures before it do not count: the first and the last may lie far apart.
        for _ in 0..2 {
            machine.now = machine.now.after_ns(10_000_000_000);
            machine.turn(Event::Budget { bytes: 0 });
            machine.turn(Event::Budget { bytes: 1 << 30 });
            while !machine.writing.is_empty() {
                machine.pass();
            }
        }
        assert!(machine.manager.stats().store_errors >= 2);
        machine.turn(FORK);
        let waited = born(&mut machine, CHILD);
        let tries_ns = 2_000_000_000 + 2 * writes_take_ns;
        assert!(waited >= 2_000_000_000, "given up after {waited} ns");
        assert!(waited <= tries_ns + 300_000_000, "given up after {waited} ns");
        assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Poisoned));
        // Whoever has the bytes keeps them.
        assert_eq!(machine.manager.state_of(PROC, BASE), Some(PageState::LimboDirty));
        // The next one does not wait as long for a store that is known to fail.
        let next = ProcId(3);
        machine.turn(Event::Forked { parent: PROC, child: next });
        let waited = born(&mut machine, next);
        assert!(waited <= 200_000_000 + writes_take_ns, "{waited} ns");
        assert_eq!(machine.manager.state_of(next, BASE), Some(PageState::Poisoned));
        // In the parent they come back where they are touched.
        machine.turn(Event::TimerFired);
        machine.turn(Event::Faulted { proc: PROC, at: BASE, write: true, protected: false });
        assert_eq!(machine.manager.state_of(PROC, BASE), Some(PageState::Dirty));
    }
}

/// A move is recorded before it is carried out, and between a fork and its message it takes pages from
/// the parent alone, or none where the frames are shared.
#[test]
fn what_a_child_has_in_its_place_is_not_lost_with_its_parents_limbo() {
    for ended in [false, true] {
        let mut machine = Machine::with_limbo();
        machine.ended = ended;
        machine.store_works = false;
        machine.maps.insert((CHILD, BASE), 0b101);
        machine.turn(FORK);
        if ended {
            machine.turn(Event::ProcGone { proc: PROC });
        }
        born(&mut machine, CHILD);
        let state = |page| machine.manager.state_of(CHILD, BASE.plus(page * PAGE));
        assert_eq!(
            [state(0), state(1), state(2)],
            [PageState::Dirty, PageState::Poisoned, PageState::Dirty].map(Some)
        );
        // Its parent has not got them: whoever has them counts them.
        assert_eq!(machine.manager.gauges().resident_pages, 2, "ended {ended}");
    }
}

/// A fork begins, what it has copied leaves the parent, and only then its message is read.
#[test]
fn what_left_its_parent_after_the_fork_is_looked_for_in_the_child() {
    for is_under_way in [false, true] {
        let mut machine = match is_under_way {
            false => Machine::with_limbo(),
            true => Machine::with_move(),
        };
        machine.maps.insert((CHILD, BASE), 0b101);
        machine.turn(FORK);
        if is_under_way {
            let moved = machine.command(|command| matches!(command, Command::Move { .. })).unwrap();
            machine.carried_out(moved, EXTENT_BYTES);
        }
        born(&mut machine, CHILD);
        machine.turn(Event::TimerFired);
        let state = |page| machine.manager.state_of(CHILD, BASE.plus(page * PAGE));
        assert_eq!(
            [state(0), state(1), state(2)],
            [PageState::Dirty, PageState::Parked, PageState::Dirty].map(Some)
        );
        assert_eq!(machine.manager.gauges().resident_pages, 2);
    }
}

/// The same where the helper made a copy meanwhile: parent and child have no frame in common.
#[test]
fn what_the_helper_copied_after_the_fork_is_counted_twice() {
    let mut machine = Machine::new();
    machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.touch(BASE);
    machine.turn(FORK);
    born(&mut machine, CHILD);
    let resident = |machine: &Machine| machine.manager.gauges().resident_pages;
    assert_eq!(resident(&machine), 16, "shared");
    machine.maps.insert((PROC, BASE), PageMask::MAX);
    machine.now = machine.now.after_ns(10_000_000);
    machine.turn(Event::Budget { bytes: 0 });
    let copied = machine.command(|command| matches!(command, Command::Populate(_))).unwrap();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.carried_out(copied, EXTENT_BYTES);
    assert_eq!(resident(&machine), 32);
    let next = ProcId(3);
    machine.turn(Event::Forked { parent: PROC, child: next });
    born(&mut machine, next);
    assert_eq!(resident(&machine), 48);
}

/// A child of a fork may have in its place what its table shows as parked.
#[test]
fn what_is_in_its_place_is_not_lost_with_its_slot() {
    let mut machine = with_parked();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.maps.insert((PROC, BASE), 0b101);
    machine.damaged = 0b11;
    machine.turn(Event::Faulted {
        proc: PROC,
        at: BASE.plus(PAGE),
        write: false,
        protected: false,
    });
    let state = |machine: &Machine, page| machine.manager.state_of(PROC, BASE.plus(page * PAGE));
    pass_until(&mut machine, |machine| state(machine, 1) != Some(PageState::Filling));
    assert_eq!(
        [0, 1, 3].map(|page| state(&machine, page)),
        [PageState::Dirty, PageState::Poisoned, PageState::Clean].map(Some)
    );
    let poisons = |order: &&Effect| matches!(order, Effect::Poison { .. });
    let span = Span::new(BASE.plus(PAGE), PAGE);
    let poisoned: Vec<&Effect> = machine.orders.iter().filter(poisons).collect();
    assert_eq!(poisoned, [&Effect::Poison { proc: PROC, span }]);
}

/// A write that fails takes longer than the rest after it: with two blocks that are written in turns
/// there is always one on its way. With no room they are written by another hand than the fork's.
#[test]
fn writes_that_fail_in_turns_keep_no_child_waiting() {
    for budget in [1 << 30, 0] {
        for forks_again in [false, true] {
            let mut machine = Machine::new();
            machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
            assert!(matches!(machine.add(1, BASE, 2), Some(Reply::Region(_))));
            machine.turn(Event::Budget { bytes: 1 << 30 });
            let homes = [BASE, BASE.plus(CHUNK_BYTES)];
            for home in homes {
                machine.touch(home);
            }
            machine.turn(Event::Budget { bytes: 0 });
            let [first, second] = homes.map(|home| {
                let is_its =
                    |command| matches!(command, Command::Move { from, .. } if from == home);
                machine.command(is_its).unwrap()
            });
            machine.store_works = false;
            machine.writes_take_ns = 305_000_000;
            machine.turn(Event::Budget { bytes: 1 << 30 });
            machine.carried_out(first, EXTENT_BYTES);
            machine.turn(FORK);
            machine.now = machine.now.after_ns(200_000_000);
            machine.turn(Event::Budget { bytes: budget });
            machine.carried_out(second, EXTENT_BYTES);
            assert_eq!(machine.writing.len(), 2);
            let mut next = 3;
            let begun = machine.now;
            while machine.manager.state_of(CHILD, BASE).is_none() {
                machine.pass();
                assert!(machine.now < begun.after_ns(20_000_000_000), "it waits for ever");
                // At a bad moment: one is on its way.
                if forks_again && machine.writing.len() == 1 {
                    machine.turn(Event::Forked { parent: PROC, child: ProcId(next) });
                    next += 1;
                }
            }
            assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Poisoned));
            assert_eq!(machine.manager.state_of(PROC, BASE), Some(PageState::LimboDirty));
        }
    }
}

#[test]
fn a_child_waits_for_a_store_that_fails_for_a_while() {
    let mut machine = Machine::with_limbo();
    machine.store_works = false;
    machine.turn(FORK);
    for _ in 0..5 {
        machine.now = machine.manager.deadline();
        machine.turn(Event::TimerFired);
    }
    assert_eq!(machine.manager.state_of(CHILD, BASE), None, "given up at once");
    machine.store_works = true;
    born(&mut machine, CHILD);
    assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Parked));
}

#[test]
fn one_bad_spot_in_the_store_loses_nothing() {
    for others_are_free in [true, false] {
        let mut machine = Machine::with_limbo();
        let slots = &mut machine.manager.shared.slots;
        if !others_are_free {
            slots.allocate(SEGMENT_SLOTS - 1);
        }
        let (next, _) = slots.allocate(1).unwrap();
        slots.release_unrecorded(next);
        machine.bad_slot = Some(next);
        machine.orders.clear();
        machine.turn(FORK);
        assert_eq!(machine.manager.stats().store_errors, 1);
        machine.pass();
        if !others_are_free {
            assert!(machine.orders.contains(&Effect::WantSlots), "it has no others");
            let first = SlotId(1 + SEGMENT_SLOTS);
            machine.turn(Event::SlotsGranted { first, count: SEGMENT_SLOTS });
        }
        let waited = born(&mut machine, CHILD);
        assert!(waited <= 200_000_000, "{waited} ns");
        assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Parked));
    }
}

/// A page that is mapped no longer stops a fill there, and a fork the rest of it: what is parked still
/// must come back before the memory is left to the kernel.
#[test]
fn a_drain_brings_back_what_lies_beside_a_page_that_is_mapped_no_longer() {
    let mut machine = with_parked();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    let no_range = Some((0, IoctlOutcome::NoRange));
    machine.copies = [Some((3 * PAGE, IoctlOutcome::NoRange)), no_range, None].into();
    assert_eq!(machine.ask(2, Request::Drain), None);
    let copy = machine.orders.iter().rev().find_map(|order| match *order {
        Effect::Copy { op, to, .. } => Some((op, to)),
        _ => None,
    });
    let rest = BASE.plus(4 * PAGE);
    let Some((op, to)) = copy else { panic!("nothing was brought in") };
    assert_eq!(to, rest);
    machine.turn(FORK);
    machine.copies = [no_range, no_range].into();
    machine.orders.clear();
    let outcome = IoctlOutcome::EventsPending;
    machine.turn(Event::Copied { op, bytes: 0, outcome });
    machine.turn(Event::TimerFired);
    assert_eq!(machine.reply_to(RequestId(2)), Some(Reply::Done));
    let position = |wanted: fn(&Effect) -> bool| machine.orders.iter().position(wanted);
    let back = position(|order| {
        let rest = BASE.plus(4 * PAGE);
        matches!(*order, Effect::Copy { to, from, .. } if to == rest && u64::from(from.len) == 12 * PAGE)
    });
    let disarmed = position(|order| matches!(order, Effect::Arm { on: false, .. }));
    assert!(back.is_some() && back < disarmed, "{:?}", machine.orders);
}

/// Where an extent lies in two mappings a copy of all of it is refused, and one of each page is not. Between the two a
/// fork has seen all of them missing.
#[test]
fn a_fill_does_not_go_on_page_by_page_after_a_fork() {
    let mut machine = with_parked();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.copies.push_back(None);
    machine.turn(Event::Faulted { proc: PROC, at: BASE, write: false, protected: false });
    let copy = |order: &Effect| match *order {
        Effect::Copy { op, proc: PROC, .. } => Some(op),
        _ => None,
    };
    let op = machine.orders.iter().find_map(copy).expect("a fill");
    machine.orders.clear();
    machine.turn(FORK);
    machine.turn(Event::Copied { op, bytes: 0, outcome: IoctlOutcome::NoRange });
    assert_eq!(machine.orders.iter().find_map(copy), None, "{:?}", machine.orders);
    for page in 0..16 {
        let at = BASE.plus(page * PAGE);
        assert_eq!(machine.manager.state_of(CHILD, at), Some(PageState::Parked), "page {page}");
    }
}

/// A thread forks, and before the message of that can be read another one unmaps: what the first has
/// copied is its child's.
#[test]
fn an_unmap_forgets_nothing_that_a_fork_may_have_copied() {
    let mut machine = with_parked();
    machine.holds_probes = true;
    machine.turn(Event::Unmapped { proc: PROC, span: Span::new(BASE, EXTENT_BYTES) });
    machine.turn(FORK);
    machine.release_probes();
    machine.turn(Event::TimerFired);
    assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Parked));
    assert_eq!(machine.manager.state_of(PROC, BASE), Some(PageState::Absent));
}

/// A thread forks, its message cannot be read yet, and the memory is left to the kernel meanwhile: the
/// child has it armed.
#[test]
fn a_drain_ends_after_the_forks_that_began_before_it() {
    let mut machine = Machine::new();
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.holds_probes = true;
    assert_eq!(machine.ask(2, Request::Drain), None, "nobody knows whether a fork is pending");
    assert!(machine.orders.iter().any(|order| matches!(order, Effect::Arm { on: false, .. })));
    machine.turn(FORK);
    machine.release_probes();
    machine.turn(Event::TimerFired);
    assert_eq!(machine.reply_to(RequestId(2)), Some(Reply::Done));
    assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Absent));
}

/// As above, of one region that the kernel had not been asked for yet. Armed for the fork it would stay
/// so, and whoever touches these addresses next would sleep for ever.
#[test]
fn a_region_that_ends_is_not_armed_for_a_fork() {
    // Its message comes when the region has been disarmed, or while it is.
    for disarmed in [true, false] {
        let mut machine = Machine::new();
        machine.turn(Event::Budget { bytes: 1 << 30 });
        let Some(Reply::Region(region)) = machine.add(1, BASE, 1) else { panic!("no region") };
        let arms: fn(&Effect) -> Option<(OpId, bool)> = |order| match *order {
            Effect::Arm { op, proc: PROC, on, .. } => Some((op, on)),
            _ => None,
        };
        assert!(machine.orders.iter().all(|order| arms(order).is_none()), "armed at birth");
        machine.holds_disarming = true;
        assert_eq!(machine.ask(2, Request::DropRegion { region }), None);
        let Some((op, false)) = machine.orders.iter().find_map(arms) else {
            panic!("{:?}", machine.orders)
        };
        machine.holds_probes = true;
        let done = Event::Armed { op, outcome: IoctlOutcome::Done };
        if disarmed {
            machine.turn(done);
            machine.turn(FORK);
        } else {
            machine.turn(FORK);
            machine.turn(done);
        }
        machine.release_probes();
        machine.turn(Event::TimerFired);
        assert_eq!(machine.reply_to(RequestId(2)), Some(Reply::Done));
        let last = machine.orders.iter().rev().find_map(arms);
        assert_eq!(last, Some((op, false)), "it stays armed");
        // The child has it still, and armed.
        let armed = machine.orders.iter().find_map(|order| match *order {
            Effect::Arm { proc: CHILD, span, on: true, .. } => Some(span),
            _ => None,
        });
        assert_eq!(armed, Some(Span::new(BASE, CHUNK_BYTES)));
        assert_eq!(machine.manager.state_of(CHILD, BASE), Some(PageState::Absent));
    }
}

/// What lies at the addresses of a region that is not mapped there is somebody else's: a fork that began before
/// the parent had mapped it may be told afterwards. Moved, its bytes would be gone, as nothing is armed.
#[test]
fn what_cannot_be_armed_is_never_moved() {
    for foreign_to in [CHILD, PROC] {
        let mut machine = Machine::new();
        machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
        machine.turn(Event::Budget { bytes: 1 << 30 });
        assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
        machine.foreign_to = Some(foreign_to);
        machine.maps.insert((foreign_to, BASE), PageMask::MAX);
        if foreign_to == CHILD {
            machine.turn(FORK);
            let limbo = Span::new(LIMBO, 4 * CHUNK_BYTES);
            machine.turn(Event::ProcReady { proc: CHILD, limbo });
        }
        machine.turn(Event::Budget { bytes: 0 });
        for _ in 0..20 {
            machine.now = machine.now.after_ns(100_000_000);
            machine.turn(Event::TimerFired);
        }
        assert!(machine.orders.iter().any(
            |order| matches!(*order, Effect::Arm { proc, on: true, .. } if proc == foreign_to)
        ));
        let is_moved = |command| matches!(command, Command::Move { .. });
        assert!(machine.command(is_moved).is_none(), "{foreign_to:?}");
        assert_eq!(machine.manager.gauges().resident_pages, 0, "{foreign_to:?}");
        if foreign_to == CHILD {
            assert_eq!(machine.manager.state_of(CHILD, BASE), None, "it has no such region");
        }
    }
}

/// As above, of a child of a child: it was forked before its parent knew that it has nothing armed there.
#[test]
fn what_cannot_be_armed_is_armed_in_no_grandchild() {
    const GRANDCHILD: ProcId = ProcId(3);
    const ITS_CHILD: ProcId = ProcId(4);
    let mut machine = Machine::new();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    machine.foreign_to = Some(CHILD);
    machine.holds_probes = true;
    machine.turn(FORK);
    let asked = |machine: &Machine, asked: ProcId| {
        machine.orders.iter().find_map(|order| match *order {
            Effect::Probe { op, proc } if proc == asked => Some(op),
            _ => None,
        })
    };
    if let Some(op) = asked(&machine, PROC) {
        machine.turn(Event::Protected { op, outcome: IoctlOutcome::Done });
    }
    assert!(
        asked(&machine, CHILD).is_some(),
        "it gives the region up when no fork of it is pending"
    );
    machine.turn(Event::Forked { parent: CHILD, child: GRANDCHILD });
    assert_eq!(machine.manager.state_of(GRANDCHILD, BASE), None, "it has its table already");
    machine.turn(Event::Forked { parent: GRANDCHILD, child: ITS_CHILD });
    machine.release_probes();
    machine.turn(Event::TimerFired);
    for heir in [GRANDCHILD, ITS_CHILD] {
        let armed = machine
            .orders
            .iter()
            .any(|order| matches!(*order, Effect::Arm { proc, on: true, .. } if proc == heir));
        assert!(armed, "{heir:?}");
    }
}

/// What its parent registers next is none of the child's: told again after a restart, its fork would give it that.
#[test]
fn a_child_of_a_parent_without_regions_is_born_at_once() {
    let mut machine = Machine::new();
    machine.turn(FORK);
    assert!(machine.orders.contains(&Effect::Born { proc: CHILD }), "{:?}", machine.orders);
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    assert_eq!(machine.manager.state_of(CHILD, BASE), None);
}

/// A thread forks while another one waits for a discard, and the process ends: the child keeps what it had.
#[test]
fn a_discard_takes_nothing_from_a_child_whose_parent_ends() {
    let mut machine = Machine::with_limbo();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    let at = BASE.plus(EXTENT_BYTES);
    machine.touch(at);
    let is_here =
        |machine: &Machine| machine.manager.state_of(PROC, at).is_some_and(PageState::is_resident);
    assert!(is_here(&machine));
    // It waits until what lies in limbo has been written.
    machine.writes_take_ns = 1_000_000_000;
    let span = Span::new(at, EXTENT_BYTES);
    machine.holds_probes = true;
    assert_eq!(machine.ask(7, Request::Discard { span }), None);
    machine.turn(FORK);
    machine.release_probes();
    assert_eq!(machine.manager.state_of(CHILD, at), None, "it has its table already");
    machine.turn(Event::ProcGone { proc: PROC });
    assert!(machine.command(|command| matches!(command, Command::Drop(_))).is_none());
    assert!(is_here(&machine));
    born(&mut machine, CHILD);
    assert!(machine.manager.state_of(CHILD, at).is_some_and(PageState::is_resident));
}
