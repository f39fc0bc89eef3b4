//! UFFDIO_MOVE: how private pages leave and come back without a copy, and what it does not check.

#![expect(clippy::expect_used, reason = "a test ends where it fails")]

use std::thread;
use tiermgr_sys::abi;
use tiermgr_sys::memory::read_memory;
use tiermgr_sys::process::page_size;
use tiermgr_sys::uffd::{Installed, Message, Mode, Outcome, Uffd};
use tiermgr_tests::harness::begin;
use tiermgr_tests::memory::{
    ARENA, Area, LIMBO, length, message_now, move_pages, next_message, page_of, userfaultfd,
};

fn done(pages: u64) -> Installed {
    Installed { bytes: pages * page_size(), outcome: Outcome::Done }
}

/// An arena with `first + page` in each page, and a limbo of the same size, each with its descriptor.
fn arena_and_limbo(pages: u64, first: u64) -> Option<(Uffd, Area, Uffd, Area)> {
    arena_with(ARENA, pages, first)
}

fn arena_with(features: u64, pages: u64, first: u64) -> Option<(Uffd, Area, Uffd, Area)> {
    let (arena, limbo) = (userfaultfd(features)?, userfaultfd(LIMBO)?);
    let (home, away) = (Area::filled(pages, first), Area::new(pages));
    arena.register(home.at(0), home.len(), Mode::MISSING_WP).expect("register");
    limbo.register(away.at(0), away.len(), Mode::MISSING).expect("register");
    Some((arena, home, limbo, away))
}

/// A move takes the page itself: its old place is absent and faults, its new place has the bytes. The
/// source may belong to another descriptor.
#[test]
fn a_move_takes_pages_away_whole() {
    let _begun = begin("move");
    let Some((arena, home, limbo, away)) = arena_and_limbo(16, 100) else { return };
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), 16, false), done(16));
    assert_eq!((home.present_pages(), away.present_pages()), (0, 16));
    assert_eq!(away.read(5), 105);
    assert_eq!(message_now(&arena), None, "the move itself is no event");
    let reader = thread::spawn(move || home.read(7));
    assert!(
        matches!(next_message(&arena), Message::Pagefault { address, .. } if address == home.at(7))
    );
    // Back by a move, which wakes.
    assert_eq!(move_pages(&arena, (&home, 7), (&away, 7), 1, false), done(1));
    assert_eq!(reader.join().expect("reader"), 107);
}

/// Only a registered destination takes pages.
#[test]
fn the_destination_must_be_registered_with_the_descriptor_used() {
    let _begun = begin("destination");
    let Some((arena, home, _limbo, away)) = arena_and_limbo(2, 1) else { return };
    let wrong = move_pages(&arena, (&away, 0), (&home, 0), 1, false);
    assert_eq!(wrong, Installed { bytes: 0, outcome: Outcome::NoRange });
    assert_eq!(home.read(0), 1);
}

/// That is *all* that is checked: a command that comes late takes whatever lies at the source by then, and
/// its owner reads zeros. Hence no address is reused before the command is cancelled or answered.
#[test]
fn a_late_move_steals_from_whatever_lies_at_the_address() {
    let _begun = begin("stale move");
    let Some((arena, home, limbo, away)) = arena_and_limbo(4, 1) else { return };
    let unmapper = thread::spawn(move || home.unmap(0, 4));
    next_message(&arena);
    unmapper.join().expect("thread").expect("munmap");
    home.map_again(0, 4).expect("mmap");
    home.fill(700);
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), 4, false), done(4));
    assert_eq!(home.read(0), 0, "the new owner's bytes are gone without a fault");
    assert_eq!(away.read(0), 700);
}

/// A discard, a new content, and then the late move: the only copy of the new content is in limbo.
#[test]
fn a_late_move_after_a_discard_takes_the_new_content() {
    let _begun = begin("late move");
    let Some((arena, home, limbo, away)) = arena_and_limbo(2, 1) else { return };
    home.advise(0, 1, libc::MADV_DONTNEED).expect("discard");
    assert_eq!(arena.copy(home.at(0), &page_of(55), false, true), done(1));
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), 1, false), done(1));
    assert!(!home.present(0));
    assert_eq!(away.read(0), 55);
}

/// A hole stops the move; what came before it has moved, and is refused when it is tried again.
#[test]
fn a_hole_stops_a_move_and_what_has_moved_has_moved() {
    let _begun = begin("holes");
    let Some((_arena, home, limbo, away)) = arena_and_limbo(8, 1) else { return };
    home.advise(3, 1, libc::MADV_DONTNEED).expect("discard");
    let end = move_pages(&limbo, (&away, 0), (&home, 0), 8, false);
    assert_eq!(end, Installed { bytes: 3 * page_size(), outcome: Outcome::NoRange });
    assert_eq!((home.present_pages(), away.present_pages()), (4, 3));
    let again = move_pages(&limbo, (&away, 0), (&home, 0), 8, true);
    assert_eq!(again, Installed { bytes: 0, outcome: Outcome::Exists });
    // From behind what has moved, and over the hole.
    assert_eq!(move_pages(&limbo, (&away, 3), (&home, 3), 5, true), done(5));
    assert_eq!((home.present_pages(), away.present_pages()), (0, 7));
    assert_eq!(away.read(7), 8);
    assert!(!away.present(3));
}

/// Write protection is lost on the way: a page that was moved back counts as written.
#[test]
fn a_move_works_on_protected_pages_and_drops_the_protection() {
    let _begun = begin("protected pages");
    let Some((arena, home, limbo, away)) = arena_and_limbo(2, 1) else { return };
    assert_eq!(arena.protect(home.at(0), page_size(), true, false), Outcome::Done);
    assert!(home.entry(0).write_protected());
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), 1, false), done(1));
    assert!(!away.entry(0).write_protected());
    assert_eq!(move_pages(&arena, (&home, 0), (&away, 0), 1, false), done(1));
    assert!(!home.entry(0).write_protected());
    home.write(0, 2);
    assert_eq!(message_now(&arena), None);
}

/// A marker counts as a page to a move: EEXIST, although nothing is there.
#[test]
fn a_move_onto_a_marker_is_refused() {
    let _begun = begin("markers");
    let with_markers = ARENA | abi::FEATURE_WP_UNPOPULATED;
    let Some((arena, home, limbo, away)) = arena_with(with_markers, 2, 1) else { return };
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), 1, false), done(1));
    assert_eq!(arena.protect(home.at(0), page_size(), true, false), Outcome::Done);
    assert!(home.entry(0).swapped() && !home.present(0));
    let back = move_pages(&arena, (&home, 0), (&away, 0), 1, false);
    assert_eq!(back, Installed { bytes: 0, outcome: Outcome::Exists });
    assert_eq!(arena.protect(home.at(0), page_size(), false, false), Outcome::Done);
    // A COPY is not stopped by one.
    assert_eq!(arena.protect(home.at(1), page_size(), true, false), Outcome::Done);
    home.advise(1, 1, libc::MADV_DONTNEED).expect("discard");
    assert_eq!(arena.copy(home.at(1), &page_of(9), true, true), done(1));
}

/// Locked, read-only, and across mappings: refused, and nothing has moved.
#[test]
fn what_a_move_refuses() {
    let _begun = begin("refusals");
    let Some((_arena, home, limbo, away)) = arena_and_limbo(8, 1) else { return };
    home.lock(0, 1).expect("mlock");
    home.set_access(2, 1, libc::PROT_READ).expect("mprotect");
    for page in [0, 2] {
        let end = move_pages(&limbo, (&away, page), (&home, page), 1, false);
        assert_eq!(end, Installed { bytes: 0, outcome: Outcome::NoRange }, "page {page}");
    }
    let across = move_pages(&limbo, (&away, 4), (&home, 1), 2, false);
    assert_eq!(across, Installed { bytes: 0, outcome: Outcome::NoRange });
    assert_eq!(home.present_pages(), 8);
}

/// Reading limbo from outside finds the bytes; a page that is absent there ends the read short, where a
/// descriptor without FEATURE_SIGBUS would make the reader wait for itself.
#[test]
fn reading_an_absent_limbo_page_ends_short() {
    let _begun = begin("SIGBUS feature");
    let Some((_arena, home, limbo, away)) = arena_and_limbo(4, 40) else { return };
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), 2, false), done(2));
    let me = std::process::id().cast_signed();
    let mut into = vec![0; length(away.len())];
    let n = read_memory(me, &[(away.at(0), away.len())], &mut into).expect("two pages");
    assert_eq!(n, length(2 * page_size()));
    assert_eq!(into[..8], 40u64.to_ne_bytes());
    let error = read_memory(me, &[(away.at(3), page_size())], &mut into).expect_err("absent");
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
}

/// A huge page moves in one piece and stays huge.
#[test]
fn a_huge_page_moves_whole() {
    let _begun = begin("huge page");
    let (Some(arena), Some(limbo)) = (userfaultfd(ARENA), userfaultfd(LIMBO)) else { return };
    let pages = (2 << 20) / page_size();
    let (home, away) = (Area::new(pages), Area::new(pages));
    for area in [home, away] {
        area.advise(0, pages, libc::MADV_HUGEPAGE).expect("madvise");
    }
    home.fill(1);
    arena.register(home.at(0), home.len(), Mode::MISSING_WP).expect("register");
    limbo.register(away.at(0), away.len(), Mode::MISSING).expect("register");
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), pages, false), done(pages));
    assert_eq!((home.present_pages(), away.present_pages()), (0, pages));
    assert_eq!(away.read(pages - 1), pages);
}
