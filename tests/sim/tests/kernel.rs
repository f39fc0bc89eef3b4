//! The simulated kernel does what the real one was measured to do. `tests/kernel` pins the same facts
//! on the real one; where the two differ, the simulator proves nothing.

use tiermgr_core::effect::Command;
use tiermgr_core::event::{CommandOutcome, Event, IoctlOutcome};
use tiermgr_core::units::{Addr, CHUNK_BYTES, EXTENT_BYTES, OpId, Span};
use tiermgr_sim::helper::Helper;
use tiermgr_sim::kernel::{
    Access, Frames, Layout, Mm, MoveStep, PopulateStep, Pte, Sleeper, Touch, Vma, Waiter,
};

const PAGE: u64 = 4096;

struct Machine {
    frames: Frames,
    mm: Mm,
}

/// One armed chunk at the start of the arena, one unarmed one behind it.
fn machine() -> Machine {
    let layout = Layout { page_bytes: PAGE, arena_chunks: 3, limbo_chunks: 1 };
    let mut mm = Mm::new(layout, true);
    mm.map(0, 1024, Vma::Managed { armed: false });
    assert_eq!(mm.arm(layout.arena_span(0, 512), true), IoctlOutcome::Done);
    Machine { frames: Frames::default(), mm }
}

impl Machine {
    fn at(&self, page: usize) -> Addr {
        self.mm.layout.arena_addr(page)
    }

    fn limbo(&self, page: u64) -> Addr {
        self.mm.layout.limbo_span().start.plus(page * PAGE)
    }

    fn copy(&mut self, page: usize, generations: &[u64], protect: bool) -> (u64, IoctlOutcome) {
        let to = self.at(page);
        self.mm.copy(&mut self.frames, to, generations, protect)
    }

    fn touch(&mut self, page: usize, access: Access) -> Touch {
        let at = self.at(page);
        self.mm.touch(&mut self.frames, at, access)
    }

    fn sleep(&mut self, page: usize, who: usize) {
        let at = self.at(page);
        let who = Sleeper::Thread(who);
        self.mm.waiters.push(Waiter { who, at, write: false, protected: false, read: false });
    }

    fn move_page(&mut self, page: usize, to: u64) -> MoveStep {
        let (from, to) = (self.at(page), self.limbo(to));
        self.mm.move_page(&self.frames, from, to)
    }

    fn generation(&self, at: Addr) -> Option<u64> {
        self.mm.page(at)?.pte.frame().map(|frame| self.frames.generation(frame))
    }
}

#[test]
fn a_touch_of_an_armed_absent_page_sleeps_and_of_an_unarmed_one_gives_zeros() {
    let mut machine = machine();
    assert_eq!(machine.touch(0, Access::Read), Touch::Asleep { protected: false });
    assert!(matches!(machine.touch(512, Access::Read), Touch::Done(_, 0)));
    assert!(matches!(machine.touch(512, Access::Write(5)), Touch::Done(_, 5)));
    assert_eq!(machine.frames.in_use(), 1, "the page of zeros costs nothing");
    assert_eq!(machine.touch(1024, Access::Read), Touch::Segv);
}

#[test]
fn copy_wakes_what_it_installed_and_never_overwrites() {
    let mut machine = machine();
    machine.sleep(0, 0);
    machine.sleep(3, 1);
    assert_eq!(machine.copy(2, &[9], false), (PAGE, IoctlOutcome::Done));
    assert_eq!(machine.copy(0, &[1, 2, 3, 4], false), (2 * PAGE, IoctlOutcome::Exists));
    assert_eq!(machine.generation(machine.at(2)), Some(9));
    assert_eq!(machine.mm.waiters.len(), 1, "only the range that was installed is woken");
    assert_eq!(machine.copy(2, &[7], false), (0, IoctlOutcome::Exists));
    assert_eq!(machine.mm.waiters.len(), 1, "EEXIST wakes nobody");
}

#[test]
fn copy_outside_what_is_registered_is_refused_as_a_whole() {
    let mut machine = machine();
    assert_eq!(machine.copy(511, &[1, 2], false), (0, IoctlOutcome::NoRange));
    assert_eq!(machine.copy(1024, &[1], false), (0, IoctlOutcome::NoRange));
}

#[test]
fn a_write_to_a_protected_page_sleeps_until_it_is_unprotected() {
    let mut machine = machine();
    machine.copy(0, &[1], true);
    assert!(matches!(machine.touch(0, Access::Read), Touch::Done(_, 1)));
    assert_eq!(machine.touch(0, Access::Write(2)), Touch::Asleep { protected: true });
    machine.sleep(0, 0);
    let span = machine.mm.layout.arena_span(0, 1);
    assert_eq!(machine.mm.protect(span, false), IoctlOutcome::Done);
    assert!(machine.mm.waiters.is_empty(), "clearing wakes");
    assert!(matches!(machine.touch(0, Access::Write(2)), Touch::Done(_, 2)));
}

#[test]
fn fills_are_refused_from_the_start_of_a_fork_until_its_thread_has_gone_on() {
    let mut machine = machine();
    machine.copy(0, &[1], false);
    let child = machine.mm.fork(&mut machine.frames);
    machine.mm.changing += 1;
    let span = machine.mm.layout.arena_span(0, 1);
    assert_eq!(machine.copy(1, &[2], false), (0, IoctlOutcome::EventsPending));
    assert_eq!(machine.mm.protect(span, true), IoctlOutcome::EventsPending);
    assert!(!machine.mm.poison(machine.mm.layout.arena_span(1, 1)));
    // Registrations, drops and moves are not refused.
    assert_eq!(machine.mm.arm(machine.mm.layout.arena_span(512, 512), true), IoctlOutcome::Done);
    let at = machine.at(0);
    assert!(machine.mm.drop_page(&mut machine.frames, at));
    machine.mm.changing -= 1;
    assert_eq!(machine.copy(1, &[2], false), (PAGE, IoctlOutcome::Done));
    assert_eq!(child.page(machine.at(1)).unwrap().pte, Pte::NONE, "the child has its own table");
    assert!(child.page(machine.at(0)).unwrap().pte.frame().is_some());
}

#[test]
fn a_fork_shares_pages_keeps_protection_and_leaves_limbo_behind() {
    let mut machine = machine();
    machine.copy(0, &[1, 2], true);
    assert_eq!(machine.move_page(1, 1), MoveStep::Moved);
    let mut child = machine.mm.fork(&mut machine.frames);
    assert!(child.page(machine.limbo(1)).is_none());
    assert!(matches!(
        child.page(machine.at(0)).unwrap().pte,
        Pte::Present { wp: true, exclusive: false, .. }
    ));
    let at = machine.at(0);
    child.arm(child.layout.arena_span(0, 512), false);
    assert!(matches!(child.touch(&mut machine.frames, at, Access::Write(9)), Touch::Done(_, 9)));
    assert_eq!(machine.generation(machine.at(0)), Some(1), "views diverge");
}

#[test]
fn move_takes_holes_refuses_pinned_and_shared_pages_and_loses_protection() {
    let mut machine = machine();
    machine.copy(1, &[1, 2, 3], true);
    assert_eq!(machine.move_page(0, 0), MoveStep::Hole);
    assert_eq!(machine.move_page(1, 1), MoveStep::Moved);
    assert!(matches!(
        machine.mm.page(machine.limbo(1)).unwrap().pte,
        Pte::Present { wp: false, .. }
    ));
    assert_eq!(machine.touch(1, Access::Read), Touch::Asleep { protected: false });

    let Touch::Done(frame, _) = machine.touch(2, Access::PinRead) else { panic!("it is there") };
    assert_eq!(machine.move_page(2, 2), MoveStep::Busy);
    machine.frames.unpin(frame);

    let child = machine.mm.fork(&mut machine.frames);
    assert_eq!(machine.move_page(3, 3), MoveStep::Busy);
    let mut child = child;
    child.destroy(&mut machine.frames);
    assert_eq!(machine.move_page(3, 3), MoveStep::Busy, "also after the child has gone");
}

#[test]
fn move_needs_an_empty_destination_in_limbo_and_steals_from_any_source() {
    let mut machine = machine();
    machine.copy(0, &[1, 2], false);
    assert_eq!(machine.move_page(0, 0), MoveStep::Moved);
    assert_eq!(machine.move_page(1, 0), MoveStep::Stopped, "EEXIST");
    let (from, to) = (machine.at(1), machine.at(600));
    assert_eq!(machine.mm.move_page(&machine.frames, from, to), MoveStep::Stopped);
    // A mapping of somebody else, at an address that was ours: only the destination is checked.
    machine.mm.map(1024, 1, Vma::Foreign);
    machine.touch(1024, Access::Write(77));
    assert_eq!(machine.move_page(1024, 5), MoveStep::Moved);
    assert!(matches!(machine.touch(1024, Access::Read), Touch::Done(_, 0)));
}

#[test]
fn a_marker_is_left_by_protecting_and_stops_a_move() {
    let mut machine = machine();
    let span = machine.mm.layout.arena_span(0, 1);
    machine.mm.protect(span, true);
    assert_eq!(machine.mm.page(machine.at(0)).unwrap().pte, Pte::Absent { marker: true });
    assert_eq!(machine.touch(0, Access::Read), Touch::Asleep { protected: false });
    assert_eq!(machine.move_page(0, 0), MoveStep::Stopped);
    assert_eq!(machine.copy(0, &[4], false), (PAGE, IoctlOutcome::Done), "a copy fills it");
    let at = machine.at(0);
    machine.mm.protect(span, true);
    assert!(machine.mm.drop_page(&mut machine.frames, at));
    assert_eq!(machine.mm.page(at).unwrap().pte, Pte::NONE, "DONTNEED drops it");
}

#[test]
fn populate_makes_shared_pages_exclusive_and_sleeps_on_protected_ones() {
    let mut machine = machine();
    machine.copy(0, &[1, 2], false);
    let child = machine.mm.fork(&mut machine.frames);
    let at = machine.at(0);
    assert_eq!(machine.mm.populate_page(&mut machine.frames, at), PopulateStep::Done);
    assert_eq!(machine.generation(at), Some(1), "the contents stay");
    assert_eq!(machine.move_page(0, 0), MoveStep::Moved);
    assert!(child.page(at).unwrap().pte.frame().is_some());
    let at = machine.at(1);
    machine.mm.protect(machine.mm.layout.arena_span(1, 1), true);
    assert_eq!(
        machine.mm.populate_page(&mut machine.frames, at),
        PopulateStep::Asleep { protected: true }
    );
}

#[test]
fn a_pinned_page_is_copied_for_a_child_and_stays_with_its_parent() {
    let mut machine = machine();
    machine.copy(0, &[1], false);
    let Touch::Done(frame, _) = machine.touch(0, Access::PinWrite) else { panic!("it is there") };
    let child = machine.mm.fork(&mut machine.frames);
    assert_ne!(child.page(machine.at(0)).unwrap().pte.frame(), Some(frame));
    assert!(matches!(machine.touch(0, Access::Write(2)), Touch::Done(same, 2) if same == frame));
}

#[test]
fn limbo_reads_stop_at_the_first_absent_page() {
    let mut machine = machine();
    machine.copy(0, &[1, 2], false);
    machine.move_page(0, 0);
    machine.move_page(1, 2);
    let start = machine.limbo(0);
    assert_eq!(machine.mm.read(&machine.frames, Span::new(start, 4 * PAGE)), [1]);
}

#[test]
fn disarming_clears_protection_and_wakes() {
    let mut machine = machine();
    machine.copy(0, &[1], true);
    machine.sleep(7, 0);
    assert_eq!(machine.mm.arm(machine.mm.layout.arena_span(0, 512), false), IoctlOutcome::Done);
    assert!(machine.mm.waiters.is_empty());
    assert!(matches!(machine.touch(0, Access::Write(2)), Touch::Done(_, 2)));
    assert!(matches!(machine.touch(7, Access::Read), Touch::Done(_, 0)));
}

#[test]
fn registering_and_protecting_pass_over_holes_and_copying_does_not() {
    let mut machine = machine();
    machine.copy(0, &[1], false);
    machine.mm.unmap(&mut machine.frames, 3, 1);
    let span = machine.mm.layout.arena_span(0, 512);
    assert_eq!(machine.mm.arm(span, true), IoctlOutcome::Done);
    assert_eq!(machine.mm.protect(span, true), IoctlOutcome::Done);
    assert_eq!(machine.touch(0, Access::Write(2)), Touch::Asleep { protected: true });
    assert_eq!(machine.copy(2, &[1, 2, 3], false), (0, IoctlOutcome::NoRange));
    let hole = machine.mm.layout.arena_span(3, 1);
    assert_eq!(machine.mm.arm(hole, true), IoctlOutcome::NoRange);
    assert_eq!(machine.mm.protect(hole, true), IoctlOutcome::NoRange);
    // A mapping that is not registered stops protection, after what lies before it.
    assert_eq!(machine.mm.protect(machine.mm.layout.arena_span(0, 512), false), IoctlOutcome::Done);
    let beyond = machine.mm.layout.arena_span(0, 513);
    assert_eq!(machine.mm.protect(beyond, true), IoctlOutcome::NoRange);
    assert_eq!(machine.touch(0, Access::Write(2)), Touch::Asleep { protected: true });
}

#[test]
fn unmapping_tells_only_where_something_was_registered() {
    let mut machine = machine();
    machine.copy(0, &[1], false);
    assert!(machine.mm.unmap(&mut machine.frames, 0, 512));
    assert!(!machine.mm.unmap(&mut machine.frames, 512, 512));
    assert_eq!(machine.frames.in_use(), 0);
    assert_eq!(machine.mm.present(machine.at(0)), Some(0));
}

#[test]
fn a_poisoned_page_raises_sigbus_until_it_is_dropped() {
    let mut machine = machine();
    machine.copy(1, &[1], false);
    assert!(machine.mm.poison(machine.mm.layout.arena_span(0, 2)));
    assert_eq!(machine.touch(0, Access::Read), Touch::Bus);
    assert!(matches!(machine.touch(1, Access::Read), Touch::Done(_, 1)), "present pages stay");
    let at = machine.at(0);
    machine.mm.drop_page(&mut machine.frames, at);
    assert_eq!(machine.touch(0, Access::Read), Touch::Asleep { protected: false });
}

#[test]
fn everything_answers_esrch_once_the_space_has_ended() {
    let mut machine = machine();
    machine.copy(0, &[1], false);
    machine.mm.destroy(&mut machine.frames);
    assert_eq!(machine.copy(1, &[1], false), (0, IoctlOutcome::NoProcess));
    assert_eq!(machine.mm.present(machine.at(0)), None);
    assert!(machine.mm.read(&machine.frames, machine.mm.layout.limbo_span()).is_empty());
    assert_eq!(machine.frames.in_use(), 0);
}

fn outcome(helper: &mut Helper) -> (u64, CommandOutcome) {
    match helper.take_result() {
        Some(Event::Commanded { bytes, outcome, .. }) => (bytes, outcome),
        other => panic!("{other:?} is no result"),
    }
}

#[test]
fn a_helper_works_in_order_reports_a_prefix_and_cancels_only_what_is_not_taken() {
    let mut machine = machine();
    machine.copy(0, &[1, 2, 3], false);
    let Touch::Done(frame, _) = machine.touch(1, Access::PinRead) else { panic!("it is there") };
    let mut helper = Helper::running();
    let (from, to) = (machine.at(0), machine.limbo(0));
    helper.order(OpId(1), Command::Move { from, to, len: EXTENT_BYTES });
    helper.order(OpId(2), Command::Drop(Span::new(to, CHUNK_BYTES)));
    helper.work(&mut machine.mm, &mut machine.frames, 1, false);
    helper.cancel(OpId(1));
    assert!(!helper.has_result(), "it was taken");
    helper.cancel(OpId(2));
    assert_eq!(outcome(&mut helper), (0, CommandOutcome::Cancelled));
    helper.work(&mut machine.mm, &mut machine.frames, 100, false);
    assert_eq!(outcome(&mut helper), (PAGE, CommandOutcome::Busy));
    machine.frames.unpin(frame);
    assert_eq!(machine.generation(machine.limbo(0)), Some(1));
}

#[test]
fn a_helper_that_dies_answers_everything_and_sleeps_in_no_fault() {
    let mut machine = machine();
    let mut helper = Helper::running();
    helper.order(OpId(1), Command::Populate(machine.mm.layout.arena_span(0, 16)));
    helper.order(OpId(2), Command::Populate(machine.mm.layout.arena_span(16, 16)));
    helper.work(&mut machine.mm, &mut machine.frames, 100, false);
    assert_eq!(machine.mm.waiters.len(), 1);
    assert!(!helper.is_enabled(&machine.mm));
    helper.die(&mut machine.mm);
    assert!(machine.mm.waiters.is_empty());
    assert_eq!(outcome(&mut helper), (0, CommandOutcome::Stopped));
    assert_eq!(outcome(&mut helper), (0, CommandOutcome::NoHelper));
    helper.order(OpId(3), Command::Drop(machine.mm.layout.limbo_span()));
    assert_eq!(outcome(&mut helper), (0, CommandOutcome::NoHelper));
}
