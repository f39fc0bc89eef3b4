//! Memory cgroups that take nothing more: room is what leaves, and nothing that waits for room may keep it
//! from leaving.

use super::*;

const NO_MEMORY: Option<(u64, IoctlOutcome)> = Some((0, IoctlOutcome::NoMemory));

fn extent(n: u64) -> Addr {
    BASE.plus(n * EXTENT_BYTES)
}

fn read(machine: &mut Machine, at: Addr) {
    machine.turn(Event::Faulted { proc: PROC, at, write: false, protected: false });
}

fn written(machine: &Machine) -> usize {
    machine.orders.iter().filter(|order| matches!(order, Effect::WriteSlots { .. })).count()
}

/// The copy that was ordered last.
fn last_copy(machine: &Machine) -> OpId {
    let copies = machine.orders.iter().rev().filter_map(|order| match *order {
        Effect::Copy { op, .. } | Effect::Zero { op, .. } => Some(op),
        _ => None,
    });
    copies.take(1).next().expect("no copy")
}

/// Room comes although what faults have read has all the buffers that it may have, and nobody lends any.
#[test]
fn a_write_finds_a_buffer_beside_all_that_wait_for_memory() {
    let mut machine = Machine::with_limbo();
    machine.streams.clear();
    for n in 1..=u64::from(crate::limits::DEMAND_BUFFERS) {
        // No two of them side by side, which would be a stream.
        let at = extent(2 * n - 1);
        machine.record(at, PageStates::all(PageState::Parked, 16));
        machine.copies.push_back(None);
        read(&mut machine, at);
    }
    machine.turn(Event::Budget { bytes: 0 });
    for _ in 0..3 {
        machine.pass();
    }
    assert_eq!(written(&machine), 1, "{:?}", machine.manager.describe());
}

/// Three extents in one block of limbo, of which one is on its way back and finds no memory.
fn rescuing() -> Machine {
    let mut machine = Machine::new();
    machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    machine.turn(Event::Budget { bytes: 1 << 30 });
    for n in 0..3 {
        machine.touch(extent(n));
    }
    machine.turn(Event::Budget { bytes: 0 });
    let moved = machine.command(|command| matches!(command, Command::Move { .. })).unwrap();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.carried_out(moved, 3 * EXTENT_BYTES);
    assert_eq!(machine.manager.gauges().limbo_pages, 48);
    machine.copies.push_back(None);
    read(&mut machine, extent(0));
    machine
}

#[test]
fn what_lies_in_limbo_beside_a_rescue_leaves_without_it() {
    let mut machine = rescuing();
    machine.streams.clear();
    machine.turn(Event::Budget { bytes: 0 });
    machine.pass();
    assert_eq!(written(&machine), 2, "an extent at a time");
    let dropped = |first: u64, count: u64| {
        let span = Span::new(LIMBO.plus(first * EXTENT_BYTES), count * EXTENT_BYTES);
        move |command| command == Command::Drop(span)
    };
    let beside = machine.command(dropped(1, 2)).expect("they are not dropped");
    machine.carried_out(beside, 2 * EXTENT_BYTES);
    assert_eq!(machine.manager.gauges().parked_pages, 32);
    let (op, bytes) = (last_copy(&machine), EXTENT_BYTES);
    machine.turn(Event::Copied { op, bytes, outcome: IoctlOutcome::Done });
    let emptied = machine.command(dropped(0, 1)).expect("what was rescued is left in limbo");
    machine.carried_out(emptied, EXTENT_BYTES);
    assert_eq!(machine.manager.gauges().limbo_pages + machine.manager.gauges().dropping_pages, 0);
}

/// Other blocks are written although the oldest waits for its rescue.
#[test]
fn a_block_that_waits_for_its_rescue_holds_up_no_other() {
    let mut machine = Machine::new();
    machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
    assert!(matches!(machine.add(1, BASE, 2), Some(Reply::Region(_))));
    machine.touch(BASE);
    machine.turn(Event::Budget { bytes: 1 << 30 });
    let moved = machine.command(|command| matches!(command, Command::Move { .. })).unwrap();
    machine.carried_out(moved, EXTENT_BYTES);
    machine.copies.push_back(None);
    read(&mut machine, BASE);
    let beside = BASE.plus(CHUNK_BYTES);
    machine.touch(beside);
    machine.turn(Event::Budget { bytes: 0 });
    let moved = machine.command(|command| matches!(command, Command::Move { .. })).unwrap();
    machine.carried_out(moved, EXTENT_BYTES);
    assert_eq!(written(&machine), 1, "{:?}", machine.manager.describe());
}

/// Memory of a process that has ended is given back with it: what waits for memory must not keep it.
#[test]
fn a_process_ends_that_waits_for_memory() {
    for state in [PageState::Parked, PageState::Absent] {
        let mut machine = with_parked();
        machine.record(BASE, PageStates::all(state, 16));
        machine.copies = [NO_MEMORY, NO_MEMORY].into();
        read(&mut machine, BASE);
        machine.turn(Event::ProcGone { proc: PROC });
        for _ in 0..2 {
            machine.now = machine.now.after_ns(1_000_000);
            machine.copies.push_back(NO_MEMORY);
            machine.turn(Event::TimerFired);
        }
        assert!(machine.orders.contains(&Effect::Release { proc: PROC }), "{state:?}");
    }
}

#[test]
fn a_read_ahead_that_finds_no_memory_keeps_no_buffer() {
    let mut machine = with_parked();
    machine.record(extent(1), PageStates::all(PageState::Parked, 16));
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.copies.push_back(None);
    machine.ask(2, Request::Prefetch { span: Span::new(BASE, 2 * EXTENT_BYTES) });
    assert!(machine.streams.len() < usize::from(crate::limits::STREAM_BUFFERS));
    // Somebody comes to wait for what is on its way.
    read(&mut machine, extent(1));
    let op = last_copy(&machine);
    machine.turn(Event::Copied { op, bytes: 0, outcome: IoctlOutcome::NoMemory });
    assert_eq!(machine.streams.len(), usize::from(crate::limits::STREAM_BUFFERS));
    let wake = Effect::Wake { proc: PROC, span: Span::new(extent(1), EXTENT_BYTES) };
    assert!(machine.orders.contains(&wake), "nobody tells who waits to ask again");
    read(&mut machine, extent(1));
    assert_eq!(machine.manager.state_of(PROC, extent(1)), Some(PageState::Clean));
}

/// The host refuses a copy without asking the kernel, which might have told of a fork.
#[test]
fn a_copy_that_found_no_memory_proves_nothing_about_forks() {
    let mut machine = with_parked();
    let span = Span::new(extent(4), EXTENT_BYTES);
    machine.copies = [NO_MEMORY, None].into();
    let space = machine.manager.spaces.get_mut(&PROC).unwrap();
    space.zapped.push((OpId(1), span));
    read(&mut machine, BASE);
    let zapped = |machine: &Machine| machine.manager.spaces[&PROC].zapped.len();
    assert_eq!(zapped(&machine), 1, "a fork may have seen what was zapped");
    machine.pass();
    let op = last_copy(&machine);
    machine.turn(Event::Copied { op, bytes: EXTENT_BYTES, outcome: IoctlOutcome::Done });
    assert_eq!(zapped(&machine), 0);
}

fn moved(order: &Effect) -> Option<OpId> {
    match *order {
        Effect::Command { op, command: Command::Move { .. }, .. } => Some(op),
        _ => None,
    }
}

/// Rescues that wait for memory leave a block through which something can leave.
#[test]
fn rescues_leave_one_block_to_what_leaves() {
    let mut machine = Machine::new();
    machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
    assert!(matches!(machine.add(1, BASE, 4), Some(Reply::Region(_))));
    let chunk = |n: u64| BASE.plus(n * CHUNK_BYTES);
    machine.turn(Event::Budget { bytes: 1 << 30 });
    (0..4).for_each(|n| machine.touch(chunk(n)));
    machine.turn(Event::Budget { bytes: 0 });
    machine.turn(Event::Budget { bytes: 1 << 30 });
    let moves: Vec<OpId> = machine.orders.iter().filter_map(moved).collect();
    for op in moves {
        machine.carried_out(op, EXTENT_BYTES);
    }
    for n in 0..4 {
        assert_eq!(machine.manager.state_of(PROC, chunk(n)), Some(PageState::LimboDirty));
    }
    machine.orders.clear();
    let copies = |machine: &Machine| {
        machine.orders.iter().filter(|order| matches!(order, Effect::Copy { .. })).count()
    };
    for n in 0..4 {
        machine.copies.push_back(None);
        read(&mut machine, chunk(n));
    }
    assert_eq!(copies(&machine), 3);
    let (op, bytes) = (last_copy(&machine), EXTENT_BYTES);
    machine.copies.clear();
    machine.turn(Event::Copied { op, bytes, outcome: IoctlOutcome::Done });
    assert_eq!(machine.manager.state_of(PROC, chunk(3)), Some(PageState::Dirty), "it had to wait");
}

/// The helper makes the pages of an extent exclusive, and faults on one that the program has just dropped.
#[test]
fn what_the_helper_waits_for_comes_in_a_held_process_too() {
    let mut machine = Machine::new();
    machine.add(1, BASE, 1);
    let mut states = PageStates::default();
    states.set(0, PageState::Dirty);
    machine.record(BASE, states);
    let space = machine.manager.spaces.get_mut(&PROC).unwrap();
    let kind = op::Kind::Prepare(op::Prepare::Populating { rest: 0 });
    let id = machine.manager.shared.begin(space, op::Op { proc: PROC, at: BASE, kind });
    Shared::<Kept>::lock(space.region_at_mut(BASE).unwrap(), 0, id);
    machine.turn(Event::Forked { parent: PROC, child: ProcId(2) });
    machine.copies = [NO_MEMORY, None].into();
    let at = BASE.plus(2 * PAGE);
    machine.turn(Event::Faulted { proc: PROC, at, write: true, protected: false });
    machine.orders.clear();
    machine.now = machine.now.after_ns(2_000_000);
    machine.turn(Event::TimerFired);
    let zeros = |order: &Effect| matches!(*order, Effect::Zero { to, .. } if to.start == at);
    assert!(machine.orders.iter().any(zeros), "the helper is left to wait");
}
