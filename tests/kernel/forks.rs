//! fork: what is told, what is shared, and how a child is known.

#![expect(clippy::expect_used, reason = "a test ends where it fails")]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tiermgr_sys::memory::read_memory;
use tiermgr_sys::process::page_size;
use tiermgr_sys::uffd::{Installed, Message, Mode, Msg, Outcome, Uffd};
use tiermgr_tests::harness::{begin, eventually};
use tiermgr_tests::memory::{
    ARENA, Area, Child, LIMBO, fork, message_now, move_pages, next_message, page_of, take_child,
    userfaultfd,
};

fn done(pages: u64) -> Installed {
    Installed { bytes: pages * page_size(), outcome: Outcome::Done }
}

/// Forks on a thread of its own, and not before this thread is past its last use of malloc: the C library
/// keeps that locked until the fork is through, and the fork waits for this thread.
fn fork_aside(body: impl FnOnce() -> i32 + Send + 'static) -> thread::JoinHandle<Child> {
    let go = Arc::new(AtomicBool::new(false));
    let gone = Arc::clone(&go);
    let forker = thread::spawn(move || {
        while !gone.load(Ordering::Acquire) {
            thread::yield_now();
        }
        fork(body)
    });
    go.store(true, Ordering::Release);
    forker
}

/// Forks on a thread of its own, for the fork waits until the FORK message was read; takes the child's
/// descriptor.
fn fork_and_take(uffd: &Uffd, body: impl FnOnce() -> i32 + Send + 'static) -> (Child, Uffd) {
    let forker = fork_aside(body);
    let child = take_child(next_message(uffd));
    (forker.join().expect("forker"), child)
}

/// The child gets a userfaultfd of its own; its absent pages fault there, and parent and child are filled
/// apart.
#[test]
fn a_child_is_served_by_the_descriptor_that_the_message_brings() {
    let _begun = begin("FORK");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(4);
    area.write(0, 10);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let (child, theirs) = fork_and_take(&uffd, move || {
        // A resident page is copied on write as ever.
        area.write(0, 11);
        i32::from(area.read(2) != 22)
    });
    assert!(
        matches!(next_message(&theirs), Message::Pagefault { address, .. } if address == area.at(2))
    );
    assert_eq!(message_now(&uffd), None);
    assert_eq!(theirs.copy(area.at(2), &page_of(22), false, true), done(1));
    assert_eq!(child.wait(), 0);
    assert_eq!(area.read(0), 10);
    assert!(!area.present(2), "the parent's page is still absent");
}

/// Until the FORK message is read the kernel refuses fills in the parent, so no page of the parent can be
/// filled and freed that the child still needs.
#[test]
fn fills_are_refused_while_a_fork_is_unread() {
    let _begun = begin("unread FORK");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(4);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    // Before the fork: the C library keeps malloc locked until the fork is through.
    let page = page_of(9);
    let forker = fork_aside(|| 0);
    let refused = eventually(Duration::from_secs(5), || {
        let end = uffd.copy(area.at(3), &page, false, true);
        if end.outcome == Outcome::Done {
            area.advise(3, 1, libc::MADV_DONTNEED).expect("discard");
        }
        end.outcome == Outcome::EventsPending
    });
    assert!(refused);
    assert!(!forker.is_finished(), "fork waits for the reader");
    let _theirs = take_child(next_message(&uffd));
    assert_eq!(forker.join().expect("forker").wait(), 0);
    assert_eq!(uffd.copy(area.at(2), &page_of(9), false, true), done(1));
}

/// Silent zeros, number 2: without EVENT_FORK the child is not served and reads zeros. Guard: EVENT_FORK on
/// every descriptor of memory that a child inherits.
#[test]
fn without_the_fork_event_a_child_reads_zeros() {
    let _begun = begin("no FORK event");
    let Some(uffd) = userfaultfd(ARENA & !tiermgr_sys::abi::FEATURE_EVENT_FORK) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let status = fork(move || if area.read(1) == 0 { 42 } else { 1 }).wait();
    assert_eq!(status, 42);
    assert_eq!(message_now(&uffd), None);
}

/// With nothing armed there is no FORK message: that is what the nonce page is for, which stays armed.
#[test]
fn with_nothing_armed_a_fork_is_not_told() {
    let _begun = begin("nothing armed");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let (area, nonce) = (Area::filled(2, 1), Area::new(1));
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    uffd.unregister(area.at(0), area.len()).expect("unregister");
    assert_eq!(fork(|| 0).wait(), 0);
    assert_eq!(message_now(&uffd), None);
    uffd.register(nonce.at(0), nonce.len(), Mode::MISSING).expect("register");
    let (child, _theirs) = fork_and_take(&uffd, || 0);
    assert_eq!(child.wait(), 0);
}

/// A FORK message names no process. A nonce that is copied through the child's descriptor shows up in the
/// child and nowhere else; afterwards another COPY there answers EEXIST while the child lives.
#[test]
fn a_nonce_proves_which_process_a_child_is() {
    let _begun = begin("nonce");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let nonce = Area::new(1);
    uffd.register(nonce.at(0), nonce.len(), Mode::MISSING).expect("register");
    let (hold, held) = tiermgr_sys::sock::Stream::pair().expect("pair");
    let (child, theirs) = fork_and_take(&uffd, move || {
        let mut end = [0];
        i32::from(held.recv_with_fds(&mut end).is_err())
    });
    let value = 0x6e6f_6e63_6531_u64;
    assert_eq!(theirs.copy(nonce.at(0), &page_of(value), false, true), done(1));
    let mut seen = [0; 8];
    let n = read_memory(child.pid, &[(nonce.at(0), 8)], &mut seen).expect("the child's memory");
    assert_eq!((n, u64::from_ne_bytes(seen)), (8, value));
    assert!(!nonce.present(0), "the parent has no such page");
    let probe = theirs.copy(nonce.at(0), &page_of(0), false, false);
    assert_eq!(probe.outcome, Outcome::Exists, "alive, and no message pending");
    hold.send_with_fds(b"e", &[]).expect("send");
    assert_eq!(child.wait(), 0);
    let probe = theirs.copy(nonce.at(0), &page_of(0), false, false);
    assert_eq!(probe.outcome, Outcome::NoProcess);
}

/// The descriptor of a dead process never becomes readable and never reports an error: only ESRCH tells.
#[test]
fn the_descriptor_of_a_dead_child_never_signals() {
    let _begun = begin("ESRCH");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let (child, theirs) = fork_and_take(&uffd, || 0);
    assert_eq!(child.wait(), 0);
    let mut poll =
        libc::pollfd { fd: theirs.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: poll reads and writes one pollfd.
    let n = unsafe { libc::poll(&raw mut poll, 1, 50) };
    assert_eq!((n, poll.revents), (0, 0));
    assert_eq!(theirs.copy(area.at(0), &page_of(1), false, true).outcome, Outcome::NoProcess);
    assert_eq!(theirs.protect(area.at(0), page_size(), true, false), Outcome::NoProcess);
    // Registering has another word for it.
    let error = theirs.register(area.at(0), area.len(), Mode::MISSING_WP).expect_err("gone");
    assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
}

/// What fork left shared refuses to move, also after the child is gone, until a write made it exclusive;
/// MADV_POPULATE_WRITE does that and changes nothing.
#[test]
fn pages_shared_by_fork_move_after_populate() {
    let _begun = begin("shared after fork");
    let (Some(arena), Some(limbo)) = (userfaultfd(ARENA), userfaultfd(LIMBO)) else { return };
    let (home, away) = (Area::filled(4, 60), Area::new(4));
    away.advise(0, 4, libc::MADV_DONTFORK).expect("madvise");
    arena.register(home.at(0), home.len(), Mode::MISSING_WP).expect("register");
    limbo.register(away.at(0), away.len(), Mode::MISSING).expect("register");
    let (child, _theirs) = fork_and_take(&arena, || 0);
    assert_eq!(child.wait(), 0);
    let refused = move_pages(&limbo, (&away, 0), (&home, 0), 4, false);
    assert_eq!(refused, Installed { bytes: 0, outcome: Outcome::Busy });
    home.advise(0, 4, libc::MADV_POPULATE_WRITE).expect("populate");
    assert_eq!(move_pages(&limbo, (&away, 0), (&home, 0), 4, false), done(4));
    assert_eq!(away.read(3), 63);
}

/// After a fork the parent may rewrite everything without a message, and the family's use doubles; pages
/// that were protected report each copy.
#[test]
fn copies_after_a_fork_are_told_only_on_protected_pages() {
    let _begun = begin("copies");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::filled(2, 1);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let (hold, held) = tiermgr_sys::sock::Stream::pair().expect("pair");
    let (child, _theirs) = fork_and_take(&uffd, move || {
        let mut end = [0];
        i32::from(held.recv_with_fds(&mut end).is_err())
    });
    area.write(0, 5);
    assert_eq!(message_now(&uffd), None, "no message for a copy on write");
    assert_eq!(uffd.protect(area.at(1), page_size(), true, false), Outcome::Done);
    let writer = thread::spawn(move || area.write(1, 6));
    assert!(matches!(next_message(&uffd), Message::Pagefault { wp: true, .. }));
    assert_eq!(uffd.protect(area.at(1), page_size(), false, true), Outcome::Done);
    writer.join().expect("writer");
    hold.send_with_fds(b"e", &[]).expect("send");
    assert_eq!(child.wait(), 0);
}

/// The kernel reads no child's descriptor without waiting (RWF_NOWAIT), and the child may have one of the same
/// description, and make it blocking. That holds nobody up.
#[test]
fn a_childs_descriptor_that_blocks_does_not_hold_its_reader() {
    let _begun = begin("blocking child");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let (hold, held) = tiermgr_sys::sock::Stream::pair().expect("pair");
    let (child, theirs) = fork_and_take(&uffd, move || {
        let mut go = [0];
        i32::from(held.recv_with_fds(&mut go).is_err() || area.read(1) != 3)
    });
    let block = || {
        // SAFETY: F_SETFL takes an integer.
        assert_eq!(unsafe { libc::fcntl(theirs.as_fd().as_raw_fd(), libc::F_SETFL, 0) }, 0);
    };
    block();
    assert_eq!(message_now(&theirs), None);
    block();
    hold.send_with_fds(b"g", &[]).expect("send");
    assert!(
        matches!(next_message(&theirs), Message::Pagefault { address, .. } if address == area.at(1))
    );
    assert_eq!(theirs.copy(area.at(1), &page_of(3), false, true), done(1));
    assert_eq!(child.wait(), 0);
}

/// A reader that has no descriptor left gets EMFILE for the FORK message again and again, and the fork
/// hangs; it goes on as soon as there is one.
#[test]
fn without_a_free_descriptor_the_fork_hangs_until_there_is_one() {
    let _begun = begin("EMFILE");
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let area = Area::new(2);
    let daemon_end = uffd.try_clone().expect("dup");
    let daemon = fork(move || read_with_no_descriptor_left(&daemon_end));
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let forker = fork_aside(|| 0);
    assert_eq!(daemon.wait(), 0);
    assert_eq!(forker.join().expect("forker").wait(), 0);
}

/// 0 when the message was refused with EMFILE twice and came once a descriptor was free.
fn read_with_no_descriptor_left(uffd: &Uffd) -> i32 {
    if tiermgr_sys::nowait::prepare_thread().is_err() {
        return 4;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    // Every number is taken. A limit of 0 would make poll refuse too.
    let none = libc::rlimit { rlim_cur: 1, rlim_max: limit.rlim_max };
    // SAFETY: setrlimit reads one rlimit.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
    let mut messages = [Msg::default()];
    let mut refused = 0;
    let mut tries = 0;
    while refused < 2 && tries < 20_000 {
        match uffd.read_messages(&mut messages) {
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => refused += 1,
            Ok(0) => {}
            _ => return 1,
        }
        tries += 1;
        // SAFETY: takes an integer.
        unsafe { libc::usleep(500) };
    }
    if refused < 2 {
        return 2;
    }
    // SAFETY: setrlimit reads one rlimit.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    match uffd.read_messages(&mut messages) {
        Ok(1) if matches!(messages[0].parse(), Some(Message::Fork { .. })) => 0,
        _ => 3,
    }
}

/// Memory that is not inherited is not told of: limbo, stacks and rings are DONTFORK.
#[test]
fn memory_that_is_not_inherited_is_not_in_the_child() {
    let _begun = begin("DONTFORK");
    let Some(limbo) = userfaultfd(LIMBO) else { return };
    let area = Area::filled(2, 1);
    area.advise(0, 2, libc::MADV_DONTFORK).expect("madvise");
    limbo.register(area.at(0), area.len(), Mode::MISSING).expect("register");
    let status = fork(move || i32::from(area.read(0) != 0)).wait();
    assert_eq!(status, 128 + libc::SIGSEGV);
}
