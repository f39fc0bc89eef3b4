//! Requests that the daemon did not answer may still be carried out: nothing that they could reach is
//! given to anybody else before the daemon has said so.

use super::{Act, Scripted, is_discard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr::changes::LOCKED;
use tiermgr::status::Status;
use tiermgr_wire::reply::ErrorCode;
use tiermgr_wire::request::{Kind, ToDaemon};

/// Whether nothing is mapped in a range.
fn is_unmapped(start: usize, bytes: usize) -> bool {
    // SAFETY: with this flag the call gives new memory where there is none, and else fails.
    let found = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            bytes,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    if found == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: what was mapped just now.
    assert_eq!(unsafe { libc::munmap(found, bytes) }, 0);
    true
}

/// More than what a heap keeps of freed memory.
const MUCH: usize = 100 << 20;

#[test]
fn a_block_is_not_reused_before_its_discard_is_confirmed() {
    let Some(daemon) = Scripted::new("unconfirmed") else { return };
    let acts =
        [Act::Vanish, Act::Refuse(ErrorCode::Internal), Act::Refuse(ErrorCode::ShuttingDown)];
    for act in acts {
        let client = daemon.client();
        let block = client.allocate(MUCH, 4096).expect("a block").address;
        daemon.book.act(move |message| if is_discard(message) { act } else { Act::Usual });
        client.free(block).expect("live");
        let other = client.allocate(MUCH, 4096).expect("a block").address;
        assert!(other >= block + MUCH || other + MUCH <= block, "{act:?}: reused");
        // That a repetition is refused says nothing about what is on its way already.
        let refused = Act::Refuse(ErrorCode::Protocol);
        daemon.book.act(move |message| if is_discard(message) { refused } else { Act::Usual });
        let small = client.allocate(4096, 4096).expect("a block");
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut discards = daemon.book.discards_of(block);
        client.free(small.address).expect("live");
        // A daemon that has gone is not looked for at once.
        while daemon.book.discards_of(block) == discards {
            assert!(Instant::now() < deadline, "{act:?}: not tried again");
            thread::sleep(Duration::from_millis(10));
            let small = client.allocate(4096, 4096).expect("a block");
            client.free(small.address).expect("live");
        }
        let another = client.allocate(MUCH, 4096).expect("a block").address;
        assert_ne!(another, block, "{act:?}: reused after a refusal");

        daemon.book.act_as_usual();
        discards = daemon.book.discards_of(block);
        let small = client.allocate(4096, 4096).expect("a block");
        client.free(small.address).expect("live");
        assert_eq!(daemon.book.discards_of(block), discards + 1, "{act:?}");
        let again = client.allocate(MUCH, 4096).expect("a block");
        assert_eq!((again.address, again.is_zero), (block, true), "{act:?}");
        client.disconnect().expect("quiet");
    }
}

#[test]
fn a_discard_that_was_refused_leaves_a_block_as_it_was() {
    let Some(daemon) = Scripted::new("refused") else { return };
    let client = daemon.client();
    let block = client.allocate(MUCH, 4096).expect("a block").address;
    daemon.book.act(|message| {
        if is_discard(message) { Act::Refuse(ErrorCode::Protocol) } else { Act::Usual }
    });
    client.free(block).expect("live");
    let again = client.allocate(MUCH, 4096).expect("a block");
    assert_eq!((again.address, again.is_zero), (block, false));
    client.disconnect().expect("quiet");
}

#[test]
fn free_does_not_wait_for_a_device() {
    let Some(daemon) = Scripted::new("stalls") else { return };
    let client = daemon.client();
    let blocks = [(); 4].map(|()| client.allocate(MUCH, 4096).expect("a block").address);
    daemon.book.act(|message| if is_discard(message) { Act::Stall } else { Act::Usual });
    let began = Instant::now();
    client.free(blocks[0]).expect("live");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let began = Instant::now();
    client.free(blocks[1]).expect("live");
    client.free(blocks[2]).expect("live");
    assert!(began.elapsed() < Duration::from_millis(200), "{:?}", began.elapsed());
    assert_eq!(daemon.book.seen(is_discard), 1, "one at a time");
    let reused = [(); 3].map(|()| client.allocate(MUCH, 4096).expect("a block").address);
    assert!(!reused.contains(&blocks[0]), "the stalled discard may still happen");

    daemon.book.go_on();
    daemon.book.act_as_usual();
    // The late answer is not taken for that of the next request.
    client.create_region(2 << 20, Kind::Heap, "next").expect("a region");
    client.free(blocks[3]).expect("live");
    assert_eq!(daemon.book.discards_of(blocks[0]), 2);
    let again = [(); 2].map(|()| client.allocate(MUCH, 4096).expect("a block"));
    assert!(again.iter().any(|block| block.address == blocks[0] && block.is_zero));
    client.disconnect().expect("quiet");
}

#[test]
fn free_does_not_wait_for_a_pin_of_another_thread() {
    let Some(daemon) = Scripted::new("long-pin") else { return };
    let client = daemon.client();
    let block = client.allocate(MUCH, 4096).expect("a block").address;
    let pinned = client.allocate(4096, 4096).expect("a block").address;
    let is_pin = |message: &ToDaemon| matches!(message, ToDaemon::Pin { .. });
    daemon.book.act(move |message| if is_pin(message) { Act::Stall } else { Act::Usual });
    thread::scope(|scope| {
        let pin = scope.spawn(|| client.pin(pinned, 4096));
        while daemon.book.seen(is_pin) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        let began = Instant::now();
        client.free(block).expect("live");
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        daemon.book.go_on();
        pin.join().expect("no panic").expect_err("the script says no");
    });
    client.disconnect().expect("quiet");
}

#[test]
fn what_a_program_dropped_without_an_answer_is_dropped_again_when_it_is_freed() {
    let Some(daemon) = Scripted::new("dropped") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block").address;
    daemon.book.act(|message| if is_discard(message) { Act::Vanish } else { Act::Usual });
    let error = client.discard_range(block + 4096, 4096).expect_err("no answer");
    assert_eq!(error.status, Status::ConnectionLost);
    daemon.book.act(|message| {
        if is_discard(message) { Act::Refuse(ErrorCode::Protocol) } else { Act::Usual }
    });
    let error = client.discard_range(block + 8192, 4096).expect_err("nobody can");
    assert_eq!(error.status, Status::Unsupported);
    client.free(block).expect("live");
    let other = client.allocate(1 << 20, 4096).expect("a block").address;
    assert_ne!(other, block, "the drop may still happen");
    daemon.book.act_as_usual();
    client.free(other).expect("live");
    assert_eq!(daemon.book.discards_of(block), 2);

    // One that was confirmed in the end leaves no doubt.
    let block = client.allocate(1 << 20, 4096).expect("a block").address;
    daemon.book.act(|message| if is_discard(message) { Act::Vanish } else { Act::Usual });
    client.discard_range(block, 4096).expect_err("no answer");
    daemon.book.act_as_usual();
    client.discard_range(block, 4096).expect("dropped");
    client.free(block).expect("live");
    assert_eq!(client.allocate(1 << 20, 4096).expect("a block").address, block);
    client.disconnect().expect("quiet");
}

/// Two threads drop the same bytes; of the later one nobody knows whether it happened. The earlier one, which
/// was confirmed, must not say that all is well after that. A third thread keeps the heap busy, so that both come
/// to it late.
#[test]
fn a_discard_that_was_confirmed_settles_none_that_came_after_it() {
    const HUGE: usize = 96 << 30;
    let Some(daemon) = Scripted::new("settled") else { return };
    let client = daemon.client();
    let huge = client.allocate(HUGE, 4096).expect("addresses").address;
    // To find that its end was changed, all of the block is looked at.
    client.heap().change(huge + HUGE - 4096..huge + HUGE, LOCKED, 0).expect("a table");
    let began = Instant::now();
    assert_eq!(client.heap().resize(huge, 4096), Ok(true));
    let busy = began.elapsed();
    for round in 0..24 {
        let block = client.allocate(1 << 20, 4096).expect("a block").address;
        let discards = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&discards);
        daemon.book.act(move |message| match message {
            _ if !is_discard(message) => Act::Usual,
            _ if counted.fetch_add(1, Ordering::SeqCst) == 0 => Act::Usual,
            _ => Act::Refuse(ErrorCode::Internal),
        });
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    thread::sleep(busy / 4);
                    // One of them is refused.
                    let _is_known = client.discard_range(block, 4096).is_ok();
                });
            }
            for _ in 0..3 {
                assert_eq!(client.heap().resize(huge, 4096), Ok(true));
            }
        });
        assert_eq!(discards.load(Ordering::SeqCst), 2);
        client.free(block).expect("live");
        let other = client.allocate(1 << 20, 4096).expect("a block").address;
        assert_ne!(other, block, "round {round}: the discard may still happen");
        daemon.book.act_as_usual();
        client.free(other).expect("live");
    }
    client.disconnect().expect("quiet");
}

#[test]
fn a_range_stays_reserved_until_it_is_known_whether_it_is_managed() {
    let Some(daemon) = Scripted::new("reserved") else { return };
    let client = daemon.client();
    let bytes = 4 << 20;
    let create = |act| {
        daemon.book.act(move |_| act);
        let outcome = client.create_region(bytes, Kind::Heap, "range");
        (outcome.map_err(|error| error.status), daemon.book.last_added())
    };
    let (outcome, refused) = create(Act::Refuse(ErrorCode::NoRoom));
    assert_eq!(outcome, Err(Status::NoRoom));
    assert!(is_unmapped(refused, bytes), "a refusal is a refusal");

    for act in [Act::Vanish, Act::Refuse(ErrorCode::Internal)] {
        let (outcome, start) = create(act);
        assert!(outcome.is_err() && !is_unmapped(start, bytes), "{act:?}");
        let (outcome, again) = create(Act::Refuse(ErrorCode::NoRoom));
        assert_eq!((outcome, again), (Err(Status::NoRoom), start));
        assert!(!is_unmapped(start, bytes), "{act:?}: refused now, but before?");
        let (outcome, again) = create(Act::Usual);
        assert_eq!(again, start, "{act:?}: it was never managed, and serves now");
        client.destroy_region(outcome.expect("a region")).expect("destroyed");
        assert!(is_unmapped(start, bytes));
    }

    let (outcome, start) = create(Act::Vanish);
    assert!(outcome.is_err());
    daemon.book.act(move |message| match message {
        ToDaemon::AddRegion { start: added, .. } if *added == start as u64 => {
            Act::Refuse(ErrorCode::InvalidArgument)
        }
        _ => Act::Usual,
    });
    client.create_region(bytes, Kind::Heap, "other").expect("elsewhere");
    assert_ne!(daemon.book.last_added(), start);
    assert!(!is_unmapped(start, bytes), "it is managed under a number that nobody knows");
    client.disconnect().expect("quiet");
}

#[test]
fn a_region_whose_end_was_not_answered_is_ended_again() {
    let Some(daemon) = Scripted::new("ended-again") else { return };
    let client = daemon.client();
    let bytes = 4 << 20;
    let region = client.create_region(bytes, Kind::Heap, "region").expect("a region");
    let start = daemon.book.last_added();
    daemon.book.act(|message| match message {
        ToDaemon::DropRegion { .. } => Act::Vanish,
        _ => Act::Usual,
    });
    let error = client.destroy_region(region).expect_err("no answer");
    assert_eq!(error.status, Status::ConnectionLost);

    // The daemon knows the number no more, but still works at the end of the region.
    let forgotten = |message: &ToDaemon| matches!(message, ToDaemon::DropRegion { region: 1 });
    daemon.book.act(move |message| match message {
        ToDaemon::AddRegion { .. } => Act::Refuse(ErrorCode::InvalidArgument),
        _ if forgotten(message) => Act::Refuse(ErrorCode::NotManaged),
        _ => Act::Usual,
    });
    let error = client.destroy_region(region).expect_err("not yet");
    assert_eq!(error.status, Status::Internal);
    assert!(!is_unmapped(start, bytes));

    daemon.book.act(move |message| {
        if forgotten(message) { Act::Refuse(ErrorCode::NotManaged) } else { Act::Usual }
    });
    client.destroy_region(region).expect("it has ended");
    assert!(is_unmapped(start, bytes));

    // Without an unanswered message before it, the same refusal is an error.
    let region = client.create_region(bytes, Kind::Heap, "region").expect("a region");
    let start = daemon.book.last_added();
    daemon.book.act(|message| match message {
        ToDaemon::DropRegion { .. } => Act::Refuse(ErrorCode::NotManaged),
        _ => Act::Usual,
    });
    let error = client.destroy_region(region).expect_err("refused");
    assert_eq!(error.status, Status::NotManaged);
    assert!(!is_unmapped(start, bytes));
    daemon.book.act_as_usual();
    client.disconnect().expect("quiet");
}
