//! The helper process: what it does, what it may do, and what becomes of it.

#![expect(clippy::expect_used, reason = "a test ends where it fails")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread;
use std::time::Duration;
use tiermgr_sys::helper::{self, HelperConfig, HelperHandle};
use tiermgr_sys::memory::{mappings_in, read_memory};
use tiermgr_sys::process::page_size;
use tiermgr_sys::ring::{Command, Completion, RingError, RingOwner, RingTicket};
use tiermgr_sys::task::with_memory;
use tiermgr_sys::uffd::{Message, Mode, Outcome, Uffd};
use tiermgr_sys::{pidfd, sock};
use tiermgr_tests::harness::{begin, eventually};
use tiermgr_tests::memory::{ARENA, Area, LIMBO, fork, length, next_message, page_of, userfaultfd};

const PAGES: u64 = 16;

/// A client of this process with its helper.
struct Client {
    arena: Uffd,
    home: Area,
    limbo: Uffd,
    away: Area,
    ring: RingOwner,
    helper: HelperHandle,
}

impl Client {
    /// `first + page` in each page of the arena.
    fn new(first: u64) -> Option<Self> {
        let (arena, limbo) = (userfaultfd(ARENA)?, userfaultfd(LIMBO)?);
        let (home, away) = (Area::filled(PAGES, first), Area::new(PAGES));
        arena.register(home.at(0), home.len(), Mode::MISSING_WP).expect("register");
        limbo.register(away.at(0), away.len(), Mode::MISSING).expect("register");
        let ring = RingOwner::create().expect("ring");
        let helper = spawn(&ring, &arena, &limbo);
        Some(Self { arena, home, limbo, away, ring, helper })
    }

    fn park(&self, page: u64, pages: u64) -> Command {
        Command::Move { dst: self.away.at(page), src: self.home.at(page), len: pages * page_size() }
    }

    fn end(mut self) {
        self.ring.stop();
        self.helper.reap(Duration::from_secs(10)).expect("ends when it is told to");
    }
}

fn spawn(ring: &RingOwner, arena: &Uffd, limbo: &Uffd) -> HelperHandle {
    helper::spawn(&HelperConfig {
        ring: ring.memfd(),
        event: ring.eventfd(),
        arena: Some(arena.as_fd()),
        limbo: limbo.as_fd(),
        hold: &[],
    })
    .expect("helper")
}

fn answer(ring: &mut RingOwner) -> (RingTicket, Completion) {
    let mut got = None;
    eventually(Duration::from_secs(10), || {
        got = ring.poll().expect("an honest helper");
        got.is_some()
    });
    got.expect("an answer within ten seconds")
}

fn all(pages: u64) -> Completion {
    Completion::Done { bytes: pages * page_size(), errno: 0 }
}

fn signal(helper: &HelperHandle, signal: i32) {
    let fd = pidfd::open(helper.pid()).expect("pidfd");
    pidfd::send_signal(fd.as_fd(), signal).expect("signal");
}

/// The life of a page: into limbo, read from outside, dropped, faulted, filled; and another one from limbo.
#[test]
fn pages_go_to_limbo_and_come_back() {
    let _begun = begin("park and recall");
    let Some(mut client) = Client::new(500) else { return };
    let ticket = client.ring.push(client.park(0, PAGES)).expect("room");
    assert_eq!(answer(&mut client.ring), (ticket, all(PAGES)));
    assert_eq!((client.home.present_pages(), client.away.present_pages()), (0, PAGES));
    let mut bytes = vec![0; length(client.away.len())];
    let n = read_memory(client.helper.pid(), &[(client.away.at(0), client.away.len())], &mut bytes);
    assert_eq!(n.expect("through the helper"), bytes.len());
    let drop = Command::Drop { start: client.away.at(0), len: 8 * page_size() };
    client.ring.push(drop).expect("room");
    assert_eq!(answer(&mut client.ring).1, all(8));
    assert_eq!(client.away.present_pages(), PAGES - 8);

    let home = client.home;
    let reader = thread::spawn(move || (home.read(3), home.read(9)));
    assert!(
        matches!(next_message(&client.arena), Message::Pagefault { address, .. } if address == home.at(3))
    );
    let at = length(3 * page_size());
    let parked = &bytes[at..at + length(page_size())];
    assert_eq!(client.arena.copy(home.at(3), parked, true, true).outcome, Outcome::Done);
    assert!(
        matches!(next_message(&client.arena), Message::Pagefault { address, .. } if address == home.at(9))
    );
    let at = length(9 * page_size());
    let rescued = &bytes[at..at + length(page_size())];
    assert_eq!(client.arena.copy(home.at(9), rescued, false, true).outcome, Outcome::Done);
    assert_eq!(reader.join().expect("reader"), (503, 509));
    client.end();
}

/// Refusals come back as how far it got, and why.
#[test]
fn a_refused_command_says_how_far_it_came() {
    let _begun = begin("results");
    let Some(mut client) = Client::new(1) else { return };
    client.ring.push(client.park(2, 1)).expect("room");
    assert_eq!(answer(&mut client.ring).1, all(1));
    let (dst, src, len) = (client.away.at(0), client.home.at(8), 4 * page_size());
    client.ring.push(Command::Move { dst, src, len }).expect("room");
    let taken = Completion::Done { bytes: 2 * page_size(), errno: libc::EEXIST };
    assert_eq!(answer(&mut client.ring).1, taken);
    client.ring.push(Command::Drop { start: 4096, len: page_size() }).expect("room");
    let gone = Completion::Done { bytes: 0, errno: libc::ENOMEM };
    assert_eq!(answer(&mut client.ring).1, gone);
    client
        .ring
        .push(Command::Populate { start: client.home.at(4), len: 2 * page_size() })
        .expect("room");
    assert_eq!(answer(&mut client.ring).1, all(2));
    client.end();
}

/// More commands than the ring has entries, in order, with the executor asleep in between.
#[test]
fn an_executor_that_sleeps_is_told() {
    let _begun = begin("eventfd");
    let Some(mut client) = Client::new(1) else { return };
    for round in 0..200 {
        let page = round % PAGES;
        client.ring.set_sleeping(true);
        let populate = Command::Populate { start: client.home.at(page), len: page_size() };
        let ticket = client.ring.push(populate).expect("room");
        let told = eventually(Duration::from_secs(10), || {
            tiermgr_sys::shm::eventfd_drain(client.ring.eventfd()).expect("eventfd") > 0
        });
        assert!(told, "round {round}");
        assert_eq!(client.ring.poll(), Ok(Some((ticket, all(1)))), "round {round}");
    }
    client.end();
}

/// A command that was not taken can be taken back, and then never runs; those behind it do.
#[test]
fn a_cancelled_command_never_runs() {
    let _begun = begin("cancel");
    let Some(mut client) = Client::new(1) else { return };
    signal(&client.helper, libc::SIGSTOP);
    let stopped = eventually(Duration::from_secs(10), || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", client.helper.pid()));
        stat.is_ok_and(|stat| stat.contains(") T "))
    });
    assert!(stopped);
    let first = client.ring.push(client.park(0, 1)).expect("room");
    let second = client.ring.push(client.park(1, 1)).expect("room");
    assert!(client.ring.cancel(first));
    assert_eq!(client.ring.poll(), Ok(Some((first, Completion::Cancelled))));
    // Its entry comes round again before the helper has seen that it was cancelled.
    let mut later = Vec::new();
    for page in 2..PAGES {
        later.push(client.ring.push(client.park(page, 1)).expect("room"));
    }
    signal(&client.helper, libc::SIGCONT);
    assert_eq!(answer(&mut client.ring), (second, all(1)));
    for ticket in later {
        assert_eq!(answer(&mut client.ring), (ticket, all(1)));
    }
    assert!(client.home.present(0));
    assert_eq!(client.home.present_pages(), 1);
    client.end();
}

/// A new daemon waits for the epoch; what the old one had queued never runs afterwards.
#[test]
fn a_new_epoch_ends_the_commands_of_the_old_one() {
    let _begun = begin("epoch");
    let Some(mut client) = Client::new(1) else { return };
    signal(&client.helper, libc::SIGSTOP);
    let stopped = eventually(Duration::from_secs(10), || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", client.helper.pid()));
        stat.is_ok_and(|stat| stat.contains(") T "))
    });
    assert!(stopped);
    client.ring.push(client.park(0, 1)).expect("room");
    let memfd = client.ring.memfd().try_clone_to_owned().expect("dup");
    let event = client.ring.eventfd().try_clone_to_owned().expect("dup");
    let mut second = RingOwner::open(memfd, event).expect("attach");
    thread::sleep(Duration::from_millis(20));
    assert!(!second.epoch_acknowledged());
    assert_eq!(second.push(client.park(1, 1)), Err(RingError::EpochPending));
    signal(&client.helper, libc::SIGCONT);
    assert!(eventually(Duration::from_secs(10), || second.epoch_acknowledged()));
    // The helper may have been stopped with the old command in its hands; what it did with it is settled
    // by the time it acknowledges.
    let at_home = client.home.present(0);
    let ticket = second.push(client.park(1, 1)).expect("acknowledged");
    assert_eq!(answer(&mut second), (ticket, all(1)));
    thread::sleep(Duration::from_millis(50));
    assert_eq!(client.home.present(0), at_home, "an old command ran after the acknowledgement");
    client.ring = second;
    client.end();
}

/// A helper that was killed takes nothing along: the descriptors live on, and a new one goes on.
#[test]
fn a_killed_helper_is_replaced() {
    let _begun = begin("killed helper");
    let Some(mut client) = Client::new(1) else { return };
    signal(&client.helper, libc::SIGKILL);
    client.helper.reap(Duration::from_secs(10)).expect("dead");
    let ticket = client.ring.push(client.park(0, 1)).expect("nobody to take it");
    let left = client.ring.forget_all();
    assert_eq!(left, [(ticket, client.park(0, 1))]);
    client.ring.new_epoch();
    assert!(!client.ring.epoch_acknowledged());
    client.helper = spawn(&client.ring, &client.arena, &client.limbo);
    assert!(eventually(Duration::from_secs(10), || client.ring.epoch_acknowledged()));
    client.ring.push(client.park(3, 2)).expect("room");
    assert_eq!(answer(&mut client.ring).1, all(2));
    assert_eq!(client.home.present_pages(), PAGES - 2);
    client.end();
}

fn status_of(pid: i32, key: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

/// No rights, no other descriptors, no signals, and out of the program's sight.
#[test]
fn a_helper_has_nothing_that_it_does_not_need() {
    let _begun = begin("rights");
    let Some(client) = Client::new(1) else { return };
    let pid = client.helper.pid();
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("name");
    assert_eq!(name, "tiermgr-helper\n");
    assert_eq!(status_of(pid, "CapEff"), "0000000000000000");
    assert_eq!(status_of(pid, "CapPrm"), "0000000000000000");
    assert_eq!(status_of(pid, "NoNewPrivs"), "1");
    assert_eq!(status_of(pid, "Seccomp"), "2");
    // SIGKILL and SIGSTOP cannot be blocked, and are not shown as blocked.
    let blocked = u64::from_str_radix(&status_of(pid, "SigBlk"), 16).expect("hexadecimal");
    assert_eq!(blocked, !(1 << 8 | 1 << 18), "{blocked:x}");
    assert_eq!(status_of(pid, "NSsid"), pid.to_string(), "a session of its own");
    let mut fds: Vec<i32> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("fd")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    fds.sort_unstable();
    let expected = [helper::FD_ARENA, helper::FD_LIMBO, helper::FD_EVENT, helper::FD_RING];
    assert_eq!(fds, expected);
    assert!(pidfd::same_memory(pid, std::process::id().cast_signed()).expect("kcmp"));
    let mut status = 0;
    // SAFETY: waitpid writes one int.
    let seen = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    assert_eq!(seen, -1, "the program's wait() does not know of it");
    client.end();
}

/// Its duplicates can be fetched by number, and keep parked pages parked when all others are closed.
#[test]
fn a_helper_holds_duplicates_that_a_daemon_can_fetch() {
    let _begun = begin("duplicates");
    let Some(client) = Client::new(1) else { return };
    let Client { arena, home, limbo, ring, mut helper, .. } = client;
    home.advise(0, 1, libc::MADV_DONTNEED).expect("park");
    let reader = thread::spawn(move || home.read(0));
    next_message(&arena);
    drop((arena, limbo));
    thread::sleep(Duration::from_millis(20));
    assert!(!reader.is_finished());
    let process = pidfd::open(helper.pid()).expect("pidfd");
    let again = Uffd::from_fd(pidfd::getfd(process.as_fd(), helper::FD_ARENA).expect("fetch"));
    assert_eq!(again.copy(home.at(0), &page_of(31), false, true).outcome, Outcome::Done);
    assert_eq!(reader.join().expect("reader"), 31);
    ring.stop();
    helper.reap(Duration::from_secs(10)).expect("ends");
}

/// What a child makes its helper with.
struct Given {
    memfd: OwnedFd,
    event: OwnedFd,
}

impl Given {
    fn of(ring: &RingOwner) -> Self {
        let memfd = ring.memfd().try_clone_to_owned().expect("dup");
        Self { memfd, event: ring.eventfd().try_clone_to_owned().expect("dup") }
    }

    fn spawn(&self) -> Option<HelperHandle> {
        let limbo = userfaultfd(LIMBO)?;
        helper::spawn(&HelperConfig {
            ring: self.memfd.as_fd(),
            event: self.event.as_fd(),
            arena: None,
            limbo: limbo.as_fd(),
            hold: &[],
        })
        .ok()
    }
}

/// A client that has made a helper and exited; the helper's number, and a descriptor of it.
fn exited_client(ring: &RingOwner) -> (i32, OwnedFd) {
    let (ours, theirs) = sock::Stream::pair().expect("pair");
    let given = Given::of(ring);
    let client = fork(move || {
        let Some(helper) = given.spawn() else { return 1 };
        i32::from(theirs.send_with_fds(&helper.pid().to_ne_bytes(), &[]).is_err())
    });
    let mut pid = [0; 4];
    ours.recv_with_fds(&mut pid).expect("its pid");
    let pid = i32::from_ne_bytes(pid);
    let helper = pidfd::open(pid).expect("pidfd");
    assert_eq!(client.wait(), 0);
    (pid, helper)
}

/// The memory of a client that has exited is still there until the helper is stopped: a child may need
/// pages from its limbo.
#[test]
fn a_helper_keeps_the_memory_of_a_client_that_has_exited() {
    let _begun = begin("lingering");
    if userfaultfd(LIMBO).is_none() {
        return;
    }
    let mut ring = RingOwner::create().expect("ring");
    ring.begin_service();
    let area = Area::filled(4, 90);
    let (pid, helper) = exited_client(&ring);
    // Longer than it takes it to see that.
    thread::sleep(Duration::from_millis(300));
    let mut bytes = [0; 8];
    read_memory(pid, &[(area.at(2), 8)], &mut bytes).expect("the dead client's memory");
    assert_eq!(u64::from_ne_bytes(bytes), 92);
    // It still works.
    ring.push(Command::Drop { start: area.at(2), len: page_size() }).expect("room");
    assert_eq!(answer(&mut ring).1, all(1));
    assert_eq!(area.read(2), 92, "our own copy is another one");
    ring.stop();
    assert!(pidfd::wait(helper.as_fd(), Duration::from_secs(10)).expect("poll"));
}

/// A daemon that was killed over an attach knows of no helper to stop.
#[test]
fn a_helper_by_which_nobody_served_ends_with_its_client() {
    let _begun = begin("unserved");
    if userfaultfd(LIMBO).is_none() {
        return;
    }
    let (_, helper) = exited_client(&RingOwner::create().expect("ring"));
    // A third of the time for which it would have kept the memory.
    assert!(pidfd::wait(helper.as_fd(), Duration::from_secs(10)).expect("poll"));
}

/// The first thread of a program ends, and others go on. Under the number of the program there is a zombie then,
/// without memory and descriptors; another thread speaks for it, and its helper stays its child.
#[test]
fn a_program_outlives_its_first_thread() {
    let _begun = begin("first thread");
    if userfaultfd(LIMBO).is_none() {
        return;
    }
    let (ours, theirs) = sock::Stream::pair().expect("pair");
    let ring = RingOwner::create().expect("ring");
    let given = Given::of(&ring);
    let area = Area::filled(1, 70);
    let client = fork(move || {
        let Some(helper) = given.spawn() else { return 1 };
        let pids = [std::process::id().cast_signed(), helper.pid(), given.memfd.as_raw_fd()];
        let said: Vec<u8> = pids.into_iter().flat_map(i32::to_ne_bytes).collect();
        if theirs.send_with_fds(&said, &[]).is_err() {
            return 3;
        }
        thread::spawn(move || {
            // Until it is told to end.
            let end = theirs.recv_with_fds(&mut [0; 4]).map_or(4, |_| 0);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(end) };
        });
        // SAFETY: ends this thread alone. The closure stays on its stack, which nobody unmaps.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
        5
    });
    let mut said = [0; 12];
    ours.recv_with_fds(&mut said).expect("its numbers");
    let number = |at: usize| i32::from_ne_bytes([0, 1, 2, 3].map(|byte| said[4 * at + byte]));
    let (pid, helper, descriptor) = (number(0), number(1), number(2));
    let process = pidfd::open(pid).expect("pidfd");
    assert!(eventually(Duration::from_secs(10), || status_of(pid, "State").starts_with('Z')));
    assert!(!pidfd::wait(process.as_fd(), Duration::from_millis(20)).expect("poll"), "it lives");

    let errno = |error: std::io::Error| error.raw_os_error();
    let mut bytes = [0; 8];
    let read = read_memory(pid, &[(area.at(0), 8)], &mut bytes);
    assert_eq!(errno(read.expect_err("no memory")), Some(libc::ESRCH));
    let fetched = pidfd::getfd(process.as_fd(), descriptor);
    // The latter on older kernels.
    let refused = errno(fetched.expect_err("no descriptors"));
    assert!(matches!(refused, Some(libc::ESRCH | libc::EBADF)), "{refused:?}");
    assert!(!pidfd::threads_share_memory(pid, helper));

    let other = with_memory(pid, Ok).expect("another thread");
    assert_ne!(other, pid);
    read_memory(other, &[(area.at(0), 8)], &mut bytes).expect("its memory");
    assert_eq!(u64::from_ne_bytes(bytes), 70);
    assert!(!mappings_in(pid, area.at(0), area.at(0) + 8).expect("maps").is_empty());
    assert!(pidfd::same_memory(pid, helper).expect("kcmp"));
    assert!(!pidfd::same_memory(pid, std::process::id().cast_signed()).expect("kcmp"));
    assert_eq!(pidfd::children_of(pid).expect("children"), [helper]);
    match pidfd::open_thread(other) {
        Ok(thread) => drop(pidfd::getfd(thread.as_fd(), descriptor).expect("its descriptor")),
        Err(error) => assert_eq!(errno(error), Some(libc::EINVAL), "a kernel before 6.9"),
    }

    ring.stop();
    ours.send_with_fds(&[0; 4], &[]).expect("end");
    assert_eq!(client.wait(), 0);
    let gone = pidfd::same_memory(pid, std::process::id().cast_signed());
    assert_eq!(errno(gone.expect_err("nobody can tell")), Some(libc::ESRCH));
}
