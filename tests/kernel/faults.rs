//! What userfaultfd says and accepts: faults, protection, refusals.
//!
//! Each test names the fact that the product rests on. A test that goes red after a kernel update says
//! which assumption to look at, not that the test is to be changed.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;
use tiermgr_sys::abi;
use tiermgr_sys::memory::read_present;
use tiermgr_sys::process::page_size;
use tiermgr_sys::uffd::{Installed, Message, Mode, Outcome};
use tiermgr_tests::harness::{begin, eventually};
use tiermgr_tests::memory::{ARENA, Area, message_now, next_message, page_of, userfaultfd};

const BLOCKED: Duration = Duration::from_millis(30);

fn done(pages: u64) -> Installed {
    Installed { bytes: pages * page_size(), outcome: Outcome::Done }
}

/// Arming memory that is in use keeps what is there: only absent pages fault.
#[test]
fn arming_keeps_what_is_there_and_reports_touches_of_the_rest() {
    let _begun = begin("arming");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(4);
    area.write(0, 10);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    assert_eq!(area.read(0), 10);
    area.write(0, 11);
    let reader = thread::spawn(move || area.read(2));
    let expected =
        Message::Pagefault { address: area.at(2), write: false, wp: false, minor: false };
    assert_eq!(next_message(&uffd), expected);
    assert_eq!(uffd.copy(area.at(2), &page_of(99), false, true), done(1));
    assert_eq!(reader.join().expect("reader"), 99);
    let writer = thread::spawn(move || area.write(3, 5));
    let expected = Message::Pagefault { address: area.at(3), write: true, wp: false, minor: false };
    assert_eq!(next_message(&uffd), expected);
    assert_eq!(uffd.copy(area.at(3), &page_of(0), false, true), done(1));
    writer.join().expect("writer");
    assert_eq!(area.read(3), 5);
}

/// COPY never overwrites; who waits is not woken by the refusal, and a wake lets it look again.
#[test]
fn a_copy_onto_a_page_is_refused_and_a_wake_still_needed() {
    let _begun = begin("EEXIST");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let reader = thread::spawn(move || area.read(0));
    next_message(&uffd);
    assert_eq!(uffd.copy(area.at(0), &page_of(1), false, false), done(1));
    let again = uffd.copy(area.at(0), &page_of(2), false, true);
    assert_eq!(again, Installed { bytes: 0, outcome: Outcome::Exists });
    thread::sleep(BLOCKED);
    assert!(!reader.is_finished(), "nobody woke it");
    assert_eq!(uffd.wake(area.at(0), page_size()), Outcome::Done);
    assert_eq!(reader.join().expect("reader"), 1);
}

/// A COPY over a hole and a page stops at the page and says how far it came.
#[test]
fn a_copy_stops_at_the_first_page_that_is_there() {
    let _begun = begin("partial copy");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(4);
    area.write(2, 7);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let bytes = [page_of(1), page_of(2), page_of(3)].concat();
    let end = uffd.copy(area.at(0), &bytes, false, true);
    assert_eq!(end, Installed { bytes: 2 * page_size(), outcome: Outcome::Exists });
    assert_eq!((area.read(0), area.read(1), area.read(2)), (1, 2, 7));
}

/// A page that is installed protected is clean until the first write reports itself.
#[test]
fn the_first_write_to_a_protected_page_is_reported() {
    let _begun = begin("write protection");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    assert_eq!(uffd.copy(area.at(0), &page_of(3), true, true), done(1));
    assert!(area.entry(0).write_protected());
    assert_eq!(area.read(0), 3);
    assert_eq!(message_now(&uffd), None, "reading is no event");
    let writer = thread::spawn(move || area.write(0, 4));
    let expected = Message::Pagefault { address: area.at(0), write: true, wp: true, minor: false };
    assert_eq!(next_message(&uffd), expected);
    assert_eq!(area.read(0), 3);
    assert_eq!(uffd.protect(area.at(0), page_size(), false, true), Outcome::Done);
    writer.join().expect("writer");
    assert_eq!(area.read(0), 4);
    assert!(!area.entry(0).write_protected());
}

/// With WP_UNPOPULATED an absent page can be protected: a marker lies in its place, which pagemap shows as
/// bit 62 and not as present. A read of it is a MISSING fault like any other.
#[test]
fn an_absent_page_can_be_protected_and_is_still_absent() {
    let _begun = begin("markers");
    let Some(uffd) = userfaultfd(ARENA | abi::FEATURE_WP_UNPOPULATED) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    assert_eq!(uffd.protect(area.at(0), page_size(), true, false), Outcome::Done);
    let entry = area.entry(0);
    assert!(!entry.present() && entry.swapped(), "{entry:x?}");
    let reader = thread::spawn(move || area.read(0));
    assert!(matches!(next_message(&uffd), Message::Pagefault { wp: false, .. }));
    assert_eq!(uffd.copy(area.at(0), &page_of(6), false, true), done(1));
    assert_eq!(reader.join().expect("reader"), 6);
}

/// While a REMOVE is unread every fill is refused, and the madvise waits; both go on once it was read.
#[test]
fn fills_are_refused_while_a_message_is_unread() {
    let _begun = begin("EAGAIN");
    let Some(uffd) = userfaultfd(ARENA | abi::FEATURE_EVENT_REMOVE) else { return };
    let area = Area::new(4);
    area.write(0, 1);
    area.write(1, 2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let dropper = thread::spawn(move || area.advise(0, 1, libc::MADV_DONTNEED));
    let refused = eventually(Duration::from_secs(5), || {
        // Protecting is refused like filling, and changes nothing that this test looks at.
        uffd.protect(area.at(1), page_size(), true, false) == Outcome::EventsPending
    });
    assert!(refused);
    let fill = uffd.copy(area.at(3), &page_of(9), false, true);
    assert_eq!(fill, Installed { bytes: 0, outcome: Outcome::EventsPending });
    assert!(!dropper.is_finished());
    let expected = Message::Remove { start: area.at(0), end: area.at(1) };
    assert_eq!(next_message(&uffd), expected);
    dropper.join().expect("thread").expect("madvise");
    assert_eq!(uffd.copy(area.at(0), &page_of(8), false, true), done(1));
}

/// Arena descriptors do without REMOVE: a discard there neither sends nor waits. (Also: asking one
/// descriptor for its features must not ask the next one for all of them.)
#[test]
fn without_remove_a_discard_goes_through_at_once() {
    let _begun = begin("no REMOVE");
    let Some(_first) = userfaultfd(ARENA) else { return };
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::filled(2, 1);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    area.advise(0, 2, libc::MADV_DONTNEED).expect("madvise");
    assert_eq!(message_now(&uffd), None);
    assert_eq!(area.present_pages(), 0);
}

/// munmap and mremap of armed memory are told, and wait until that was read.
#[test]
fn unmap_is_told() {
    let _begun = begin("UNMAP");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::filled(4, 1);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let unmapper = thread::spawn(move || area.unmap(1, 2));
    assert_eq!(next_message(&uffd), Message::Unmap { start: area.at(1), end: area.at(3) });
    unmapper.join().expect("thread").expect("munmap");
    let gone = uffd.copy(area.at(1), &page_of(1), false, true);
    assert_eq!(gone, Installed { bytes: 0, outcome: Outcome::NoRange });
}

/// mremap of armed memory is told, the new place stays armed, and what was there has come along.
#[test]
fn remap_is_told_and_the_new_place_is_served() {
    let _begun = begin("REMAP");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let (area, place) = (Area::new(4), Area::new(4));
    area.write(0, 8);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let mover = thread::spawn(move || area.move_to(0, 4, &place));
    let expected = Message::Remap { from: area.at(0), to: place.at(0), len: area.len() };
    let mut seen = next_message(&uffd);
    // The move also unmaps: both are told, in an order that the kernel may choose.
    if matches!(seen, Message::Unmap { .. }) {
        seen = next_message(&uffd);
    }
    assert_eq!(seen, expected);
    let moved = eventually(Duration::from_secs(10), || {
        let _unmap = message_now(&uffd);
        mover.is_finished()
    });
    assert!(moved);
    assert_eq!(mover.join().expect("thread").expect("mremap"), place.at(0));
    assert_eq!(place.read(0), 8);
    let reader = thread::spawn(move || place.read(1));
    let fault = next_message(&uffd);
    assert!(matches!(fault, Message::Pagefault { address, .. } if address == place.at(1)));
    assert_eq!(uffd.copy(place.at(1), &page_of(9), false, true), done(1));
    assert_eq!(reader.join().expect("reader"), 9);
}

/// A mapping of which only a part is armed is two mappings: mremap of the whole refuses and moves nothing.
#[test]
fn a_half_armed_mapping_cannot_be_remapped_as_one() {
    let _begun = begin("half armed");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let (area, place) = (Area::filled(4, 1), Area::new(4));
    uffd.register(area.at(0), 2 * page_size(), Mode::MISSING_WP).expect("register");
    // On a thread: should it not be refused, it waits for a reader, and this test fails by its limit.
    let mover = thread::spawn(move || area.move_to(0, 4, &place));
    let error = mover.join().expect("thread").expect_err("two mappings");
    assert!(matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EINVAL)), "{error}");
    assert_eq!((area.read(0), area.read(3)), (1, 4));
}

/// A split of the mapping in the middle of a range refuses the whole of it, although nothing is gone.
#[test]
fn a_copy_across_a_split_of_the_mapping_is_refused() {
    let _begun = begin("VMA split");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(4);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    area.advise(2, 2, libc::MADV_DONTDUMP).expect("madvise");
    let bytes = [page_of(1), page_of(2), page_of(3), page_of(4)].concat();
    let end = uffd.copy(area.at(0), &bytes, false, true);
    assert_eq!(end.outcome, Outcome::NoRange, "{end:?}");
    let half = bytes.len() / 2;
    let rest = u64::try_from(half).expect("small") - end.bytes.min(2 * page_size());
    if rest > 0 {
        assert_eq!(uffd.copy(area.at(0), &bytes[..half], false, true), done(2));
    }
    assert_eq!(uffd.copy(area.at(2), &bytes[half..], false, true), done(2));
    assert_eq!((area.read(1), area.read(2)), (2, 3));
}

/// One userfaultfd for a mapping: a second one is refused.
#[test]
fn a_range_has_one_userfaultfd() {
    let _begun = begin("one descriptor");
    let (Some(first), Some(second)) = (userfaultfd(ARENA), userfaultfd(ARENA)) else { return };
    let area = Area::new(2);
    first.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let error = second.register(area.at(0), area.len(), Mode::MISSING_WP).expect_err("taken");
    assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
}

/// UNREGISTER lets waiters go, with zeros: it is for memory of which nothing is parked.
#[test]
fn unregister_lets_waiters_go_with_zeros() {
    let _begun = begin("UNREGISTER");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let reader = thread::spawn(move || area.read(0));
    next_message(&uffd);
    uffd.unregister(area.at(0), area.len()).expect("unregister");
    assert_eq!(reader.join().expect("reader"), 0);
}

/// A poisoned page answers every access with an error, and only that page does.
#[test]
fn a_poisoned_page_is_an_error_and_never_zeros() {
    let _begun = begin("POISON");
    let Some(uffd) = userfaultfd(ARENA | abi::FEATURE_POISON) else { return };
    let area = Area::new(3);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    assert_eq!(uffd.copy(area.at(0), &page_of(1), false, true), done(1));
    assert_eq!(uffd.poison(area.at(1), page_size()), done(1));
    let me = std::process::id().cast_signed();
    let mut into = vec![0xff; 2 * usize::try_from(page_size()).expect("small")];
    let n = tiermgr_sys::memory::read_memory(me, &[(area.at(0), 2 * page_size())], &mut into)
        .expect("the first page");
    assert_eq!(n, into.len() / 2, "short at the poisoned page");
    uffd.unregister(area.at(0), area.len()).expect("unregister");
    let status = tiermgr_tests::memory::fork(move || i32::from(area.read(1) != 0)).wait();
    assert_eq!(status, 128 + libc::SIGBUS, "poison outlives the registration, also in a child");
}

/// `/proc/PID/mem` ends at a page that a userfaultfd would have to serve, where `process_vm_readv` waits: a
/// daemon that reads through it never waits for itself.
#[test]
fn a_read_through_proc_mem_ends_at_an_absent_page() {
    let _begun = begin("/proc/PID/mem");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    assert_eq!(uffd.copy(area.at(0), &page_of(1), false, true), done(1));
    let memory = std::fs::File::open("/proc/self/mem").expect("open");
    let page = usize::try_from(page_size()).expect("small");
    let mut into = vec![0xff; 2 * page];
    assert_eq!(memory.read_at(&mut into, area.at(0)).expect("the first page"), page);
    assert_eq!(into[page], 0xff, "nothing came for the second");
    let error = memory.read_at(&mut into, area.at(1)).expect_err("absent");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let me = std::process::id().cast_signed();
    let error = read_present(me, area.at(1), &mut into[..8]).expect_err("absent");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(message_now(&uffd), None, "nobody was asked for it");
}

/// A userfaultfd that is passed on serves the memory of the process that made it.
#[test]
fn a_descriptor_that_was_passed_serves_its_makers_memory() {
    let _begun = begin("SCM_RIGHTS");
    let Some(probe) = userfaultfd(ARENA & !abi::FEATURE_EVENT_FORK) else { return };
    drop(probe);
    let (ours, theirs) = tiermgr_sys::sock::Stream::pair().expect("pair");
    let area = Area::new(2);
    let client = tiermgr_tests::memory::fork(move || {
        let Some(uffd) = userfaultfd(ARENA & !abi::FEATURE_EVENT_FORK) else { return 77 };
        if theirs.send_with_fds(b"x", &[uffd.as_fd()]).is_err() {
            return 78;
        }
        // Closed: what the daemon received is the last one.
        drop(uffd);
        let mut go = [0];
        if theirs.recv_with_fds(&mut go).is_err() {
            return 79;
        }
        i32::from(area.read(1) != 4711)
    });
    let (_, mut fds) = ours.recv_with_fds(&mut [0; 8]).expect("receive");
    let uffd = tiermgr_sys::uffd::Uffd::from_fd(fds.pop().expect("one descriptor"));
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register from outside");
    ours.send_with_fds(b"g", &[]).expect("send");
    assert!(
        matches!(next_message(&uffd), Message::Pagefault { address, .. } if address == area.at(1))
    );
    assert_eq!(uffd.copy(area.at(1), &page_of(4711), false, true), done(1));
    assert_eq!(client.wait(), 0);
}
