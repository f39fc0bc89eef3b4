//! What survives a daemon that is killed at any instruction: descriptors, by the keeper, and messages, by
//! being read into memory that outlives the reader.
//!
//! These tests clone with a shared descriptor table, so this binary has one thread and its own `main`.

#![expect(clippy::expect_used, reason = "a test ends where it fails")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;
use tiermgr_sys::keeper::{ForkResult, UFFD_LINK, clone_sharing_files, close_all_but, list_uffds};
use tiermgr_sys::memory::PageEntry;
use tiermgr_sys::nowait::prepare_thread;
use tiermgr_sys::process::page_size;
use tiermgr_sys::shm::{SharedFile, sealed_memfd};
use tiermgr_sys::sock::Stream;
use tiermgr_sys::uffd::{Message, Mode, Msg, Outcome, Uffd};
use tiermgr_tests::harness::{eventually, skip};
use tiermgr_tests::memory::{ARENA, Area, Child, fork, page_of, userfaultfd, wait_for};

const LIMIT: Duration = Duration::from_secs(10);

fn main() {
    let tests: [(&str, fn()); 5] = [
        ("a_process_with_threads_is_not_cloned", a_process_with_threads_is_not_cloned),
        ("a_childs_descriptor_dies_with_its_reader", a_childs_descriptor_dies_with_its_reader),
        ("a_keeper_holds_a_childs_descriptor", a_keeper_holds_a_childs_descriptor),
        (
            "a_keeper_holds_the_store_lock_until_it_closes",
            a_keeper_holds_the_store_lock_until_it_closes,
        ),
        ("messages_read_into_shared_memory_survive", messages_read_into_shared_memory_survive),
    ];
    // Arguments of the test runner: a name to look for, or a wish to list.
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let only: Vec<&String> = wanted.iter().filter(|word| !word.starts_with('-')).collect();
    for (name, test) in tests {
        if only.is_empty() || only.iter().any(|word| name.contains(word.as_str())) {
            if wanted.iter().any(|word| word == "--list") {
                eprintln!("{name}: test");
                continue;
            }
            // SAFETY: takes an integer; the alarm ends a test that hangs.
            unsafe { libc::alarm(60) };
            test();
            eprintln!("test {name} ... ok");
        }
    }
}

/// Locks of the C library and of other threads would stay taken in the new process.
fn a_process_with_threads_is_not_cloned() {
    let child = fork(|| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || stopped.recv().is_ok());
        let refused = clone_sharing_files();
        let closed = close_all_but(|_, _| true);
        drop(stop);
        let joined = thread.join();
        i32::from(!(refused.is_err() && closed.is_err() && matches!(joined, Ok(false))))
    });
    assert_eq!(child.wait(), 0);
}

/// A client that forks; the child then reads a page that is parked. Gives the client and its
/// userfaultfd, which no other process of the test has.
struct ForkingClient {
    client: Child,
    go: Stream,
    uffd: Uffd,
    area: Area,
}

const PARKED: u64 = 0x7061_726b;

impl ForkingClient {
    /// The client exits with 0 when the child read what was parked, with 42 when it read zeros.
    fn start() -> Option<Self> {
        userfaultfd(ARENA)?;
        let (ours, theirs) = Stream::pair().expect("pair");
        let area = Area::new(2);
        let client = fork(move || {
            let Some(uffd) = userfaultfd(ARENA) else { return 1 };
            let registered = uffd.register(area.at(0), area.len(), Mode::MISSING_WP);
            if registered.is_err() || theirs.send_with_fds(b"u", &[uffd.as_fd()]).is_err() {
                return 2;
            }
            let mut go = [0];
            if theirs.recv_with_fds(&mut go).is_err() {
                return 3;
            }
            // The child must not hold the parent's descriptor, nor the parent die before the child.
            let child = fork(move || match area.read(1) {
                PARKED => 0,
                0 => 42,
                _ => 4,
            });
            child.wait()
        });
        let (_, mut fds) = ours.recv_with_fds(&mut [0; 8]).expect("the client's userfaultfd");
        let uffd = Uffd::from_fd(fds.pop().expect("one"));
        Some(Self { client, go: ours, uffd, area })
    }
}

/// Reads until a FORK message has come, then is killed at the next instruction.
fn read_fork_and_die(uffd: &Uffd) -> i32 {
    if prepare_thread().is_err() {
        return 2;
    }
    let mut messages = [Msg::default()];
    let came = eventually(LIMIT, || matches!(uffd.read_messages(&mut messages), Ok(1)));
    if came && matches!(messages[0].parse(), Some(Message::Fork { .. })) {
        // SAFETY: takes an integer.
        unsafe { libc::raise(libc::SIGKILL) };
    }
    1
}

/// Silent zeros, number 9: the only descriptor of a child is installed in the reader of the message, and
/// dies with it.
fn a_childs_descriptor_dies_with_its_reader() {
    let Some(ForkingClient { client, go, uffd, .. }) = ForkingClient::start() else { return };
    let reader = fork(move || read_fork_and_die(&uffd));
    go.send_with_fds(b"g", &[]).expect("go");
    assert_eq!(reader.wait(), 128 + libc::SIGKILL);
    assert_eq!(client.wait(), 42, "the child read zeros: that is what the keeper is for");
}

/// The guard: a process that shares the descriptor table still has it, and the child is served.
fn a_keeper_holds_a_childs_descriptor() {
    let Some(ForkingClient { client, go, uffd, area }) = ForkingClient::start() else { return };
    let before = list_uffds().expect("list");
    match clone_sharing_files().expect("clone") {
        ForkResult::Child => {
            let status = read_fork_and_die(&uffd);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(status) };
        }
        ForkResult::Parent { child } => {
            go.send_with_fds(b"g", &[]).expect("go");
            assert_eq!(wait_for(child), 128 + libc::SIGKILL);
        }
    }
    let new: Vec<RawFd> =
        list_uffds().expect("list").into_iter().filter(|fd| !before.contains(fd)).collect();
    assert_eq!(new.len(), 1, "{new:?}");
    // SAFETY: the dead daemon installed it, and nothing here owns it.
    let theirs = unsafe { Uffd::adopt(new[0]) }.expect("a userfaultfd");
    // What the dead daemon may have read is not reported again: wake, then fill.
    assert_eq!(theirs.wake(area.at(0), area.len()), Outcome::Done);
    let end = theirs.copy(area.at(1), &page_of(PARKED), false, true);
    assert_eq!(end.outcome, Outcome::Done);
    assert_eq!(client.wait(), 0);
    drop(uffd);
}

/// With one table the keeper also holds what a successor must open anew; it closes all but userfaultfds.
fn a_keeper_holds_the_store_lock_until_it_closes() {
    let Some(uffd) = userfaultfd(ARENA) else { return };
    let path = std::env::temp_dir().join(format!("tiermgr-lock-{}", std::process::id()));
    let file = File::create_new(&path).expect("file");
    let lock = |file: &File| {
        // SAFETY: flock takes integers.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
    };
    drop(file);
    match clone_sharing_files().expect("clone") {
        ForkResult::Child => {
            let opened = File::options().write(true).open(&path);
            let locked = opened.is_ok_and(|file| {
                let locked = lock(&file);
                // Left open, as by a daemon that is killed.
                let _number = std::os::fd::IntoRawFd::into_raw_fd(file);
                locked
            });
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(!locked)) };
        }
        ForkResult::Parent { child } => {
            assert_eq!(wait_for(child), 0);
        }
    }
    let mine = File::options().write(true).open(&path).expect("file");
    assert!(!lock(&mine), "the table of the dead daemon is our own");
    drop(mine);
    let closed = close_all_but(|_, link| link == UFFD_LINK).expect("close");
    assert!(closed >= 1);
    let mine = File::options().write(true).open(&path).expect("file");
    assert!(lock(&mine));
    assert!(list_uffds().expect("list").contains(&uffd.as_fd().as_raw_fd()));
    std::fs::remove_file(&path).expect("clean");
}

/// A message that was read and not yet recorded when the reader was killed is in the buffer that it was
/// read into, if that is memory that lives on.
fn messages_read_into_shared_memory_survive() {
    let features = ARENA & !tiermgr_sys::abi::FEATURE_EVENT_FORK;
    let Some(uffd) = userfaultfd(features | tiermgr_sys::abi::FEATURE_EVENT_REMOVE) else { return };
    let len = 16 * page_size();
    let memfd = sealed_memfd("tiermgr-messages", len).expect("memfd");
    let twin = memfd.try_clone().expect("dup");
    let buffer = SharedFile::map(memfd, len).expect("map");
    let area = Area::filled(8, 1);
    uffd.register(area.at(0), area.len(), Mode::MISSING_WP).expect("register");
    let reader_end = uffd.try_clone().expect("dup");
    let reader = fork(move || {
        let Ok(buffer) = SharedFile::map(twin, len) else { return 1 };
        let Some(slice) = buffer.slice(0, len) else { return 2 };
        if prepare_thread().is_err() {
            return 4;
        }
        let came = eventually(LIMIT, || reader_end.read_messages_into(&slice).is_ok_and(|n| n > 0));
        if came {
            // SAFETY: takes an integer.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        3
    });
    // Waits until the reader has read.
    area.advise(2, 3, libc::MADV_DONTNEED).expect("madvise");
    assert_eq!(reader.wait(), 128 + libc::SIGKILL);
    let slice = buffer.slice(0, len).expect("inside");
    let message = slice.message(0).and_then(|message| message.parse());
    assert_eq!(message, Some(Message::Remove { start: area.at(2), end: area.at(5) }));
    assert_eq!(area.entry(2), PageEntry(area.entry(2).0 & !(1 << 63)), "the page is gone");
    if area.present_pages() != 5 {
        skip("pages were dropped that nobody discarded");
    }
}
