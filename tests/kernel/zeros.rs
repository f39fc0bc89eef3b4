//! Ways to a silent page of zeros on private memory, and the guard against each.
//!
//! Fork without its event is in `forks.rs`; the reader of a FORK message that is killed, in `survival.rs`.

use std::thread;
use std::time::Duration;
use tiermgr_sys::process::page_size;
use tiermgr_sys::uffd::{Message, Mode, Outcome};
use tiermgr_tests::harness::{begin, skip};
use tiermgr_tests::memory::{ARENA, Area, message_now, next_message, page_of, userfaultfd};

/// Number 1: with the last descriptor the kernel forgets the registration, and whoever waits goes on with
/// zeros. Guard: the client, its helper and the keeper hold duplicates.
#[test]
fn the_last_close_turns_parked_pages_into_zeros() {
    let _begun = begin("last close");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let reader = thread::spawn(move || area.read(0));
    next_message(&uffd);
    drop(uffd);
    assert_eq!(reader.join().expect("reader"), 0, "that is what the guard is for");
}

/// The guard: while there is a duplicate, the waiter waits. A fault that was read before is not reported
/// again until somebody wakes the range.
#[test]
fn with_a_duplicate_the_waiter_waits_for_a_new_daemon() {
    let _begun = begin("duplicate");
    let Some(first) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    first.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let second = first.try_clone().expect("duplicate");
    let reader = thread::spawn(move || area.read(0));
    next_message(&first);
    drop(first);
    thread::sleep(Duration::from_millis(30));
    assert!(!reader.is_finished());
    assert_eq!(message_now(&second), None, "it was read by the one that died");
    assert_eq!(second.wake(area.at(0), area.len()), Outcome::Done);
    assert!(
        matches!(next_message(&second), Message::Pagefault { address, .. } if address == area.at(0))
    );
    assert_eq!(second.copy(area.at(0), &page_of(3), false, true).outcome, Outcome::Done);
    assert_eq!(reader.join().expect("reader"), 3);
}

/// Number 3: what is mapped anew at an address is not served, whatever was parked there. Guard: the UNMAP
/// message, which munmap waits for.
#[test]
fn a_new_mapping_at_an_old_address_is_not_served() {
    let _begun = begin("reuse");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let unmapper = thread::spawn(move || area.unmap(0, 2));
    assert!(matches!(next_message(&uffd), Message::Unmap { .. }));
    unmapper.join().expect("thread").expect("munmap");
    area.map_again(0, 2).expect("mmap");
    assert_eq!(area.read(0), 0);
    assert_eq!(message_now(&uffd), None);
}

/// Number 6: collapsing into a huge page would fill holes with zeros; on armed memory it does not.
#[test]
fn a_collapse_fills_no_hole_of_armed_memory() {
    let _begun = begin("collapse");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let pages = (2 << 20) / page_size();
    let area = Area::filled(pages, 1);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    area.advise(5, 1, libc::MADV_DONTNEED).expect("park a page");
    area.advise(0, pages, libc::MADV_HUGEPAGE).expect("madvise");
    match area.advise(0, pages, libc::MADV_COLLAPSE) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) && page_size() > 4096 => {
            return skip("MADV_COLLAPSE needs another area here");
        }
        // Whether it says yes or no, the hole must be one.
        Ok(()) | Err(_) => {}
    }
    assert!(!area.present(5));
    let reader = thread::spawn(move || area.read(5));
    assert!(
        matches!(next_message(&uffd), Message::Pagefault { address, .. } if address == area.at(5))
    );
    assert_eq!(uffd.copy(area.at(5), &page_of(6), false, true).outcome, Outcome::Done);
    assert_eq!(reader.join().expect("reader"), 6);
}

/// Discards of armed memory leave absent pages that fault: zeros come only from a daemon that knows.
#[test]
fn a_discard_of_armed_memory_faults_and_is_not_answered_by_the_kernel() {
    let _begun = begin("discard");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::filled(2, 1);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    area.advise(0, 1, libc::MADV_DONTNEED).expect("discard");
    let reader = thread::spawn(move || area.read(0));
    next_message(&uffd);
    assert_eq!(uffd.copy(area.at(0), &page_of(0), false, true).outcome, Outcome::Done);
    assert_eq!(reader.join().expect("reader"), 0);
}
