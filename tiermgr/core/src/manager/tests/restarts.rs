//! What a new daemon finds: records that a kill left, and page tables that show more.

use super::*;

/// Pages given up, or copied back, lie in limbo for as long as others of their extent do. That is longer
/// than a daemon lives where the store is full.
#[test]
fn limbo_that_no_record_names_is_counted_after_a_restart() {
    let mut machine = Machine::with_limbo();
    assert_eq!(machine.ask(2, Request::Discard { span: Span::new(BASE, 3 * PAGE) }), None);
    let dropped = machine.command(|command| matches!(command, Command::Drop(_))).unwrap();
    machine.carried_out(dropped, 3 * PAGE);
    assert_eq!(machine.reply_to(RequestId(2)), Some(Reply::Done));
    let counted = |machine: &Machine| {
        let gauges = machine.manager.gauges();
        (gauges.limbo_pages, gauges.dropping_pages, gauges.resident_pages)
    };
    assert_eq!(counted(&machine), (13, 3, 0));
    machine.maps.insert((PROC, LIMBO), PageMask::MAX);
    // One had been copied back, and nobody took note.
    machine.maps.insert((PROC, BASE), 1 << 15);
    let mut machine = machine.restarted();
    assert_eq!(counted(&machine), (12, 4, 1));
    // All of it comes back: what is left there is stale as a whole, and counted once.
    machine.turn(Event::Budget { bytes: 1 << 30 });
    let asked = machine.ask(3, Request::Pin { span: Span::new(BASE, PAGE) });
    assert!(matches!(asked, Some(Reply::Lease(_))), "{asked:?}");
    let (limbo, dropping, _) = counted(&machine);
    assert_eq!((limbo, dropping), (0, 16));
    // What else lies in limbo is to be dropped first.
    while let Some(dropped) = machine.command(|command| matches!(command, Command::Drop(_))) {
        let is_it = |order: &Effect| matches!(order, Effect::Command { op, .. } if *op == dropped);
        machine.orders.retain(|order| !is_it(order));
        machine.carried_out(dropped, 0);
    }
    assert_eq!(machine.manager.gauges().dropping_pages, 0);
}
