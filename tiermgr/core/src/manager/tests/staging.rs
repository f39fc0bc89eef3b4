//! Large buffers that come late or never.

use super::*;
use crate::effect::Buffer;

/// One extent rests in limbo and has to leave, and nothing is lent.
fn short_of_room() -> Machine {
    let mut machine = Machine::with_limbo();
    machine.streams.clear();
    machine.turn(Event::Budget { bytes: 0 });
    assert!(machine.orders.contains(&Effect::WantStream));
    assert_eq!(written(&machine), [], "one may be lent at once");
    machine
}

fn written(machine: &Machine) -> Vec<Buffer> {
    let writes = machine.orders.iter().filter_map(|order| match *order {
        Effect::WriteSlots { from, .. } => Some(from.buf),
        _ => None,
    });
    writes.collect()
}

/// Room comes through the small buffers where others have the large ones for ever, and the manager sees
/// to it itself: nothing else happens.
#[test]
fn what_is_lent_no_large_buffer_is_written_through_a_small_one() {
    let mut machine = short_of_room();
    machine.now = machine.manager.deadline();
    machine.turn(Event::TimerFired);
    assert!(matches!(written(&machine)[..], [Buffer::Demand(_)]), "{:?}", machine.orders);
    assert_eq!(machine.manager.gauges().parked_pages, 16);
}

#[test]
fn a_large_buffer_that_comes_late_is_used_once_and_given_back() {
    let mut machine = short_of_room();
    machine.turn(Event::StreamLent { stream: 2 });
    assert_eq!(written(&machine), [Buffer::Stream(2)]);
    assert_eq!(machine.streams, [2], "nothing else is to be written");
    // One that nobody has a use for goes back at once.
    machine.streams.clear();
    machine.turn(Event::StreamLent { stream: 1 });
    assert_eq!(machine.streams, [1]);
}
