//! Memory cgroups that take nothing more: room is what leaves, and nothing that waits for room may keep it
//! from leaving.

use super::*;

fn extent(n: u64) -> Addr {
    BASE.plus(n * EXTENT_BYTES)
}

fn read(machine: &mut Machine, at: Addr) {
    machine.turn(Event::Faulted { proc: PROC, at, write: false, protected: false });
}

fn written(machine: &Machine) -> usize {
    machine.orders.iter().filter(|order| matches!(order, Effect::WriteSlots { .. })).count()
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
