//! Attaches that the daemon answers late, or not at all, may have been carried out: limbo stays where it is,
//! and a helper at its side, until the daemon has said that it does not serve the process by them.

use super::{
    Act, Book, FAMILY, GREETED_LATE, Manner, Scripted, in_child, refusal, say, say_with, says_child,
};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tiermgr::client::Client;
use tiermgr::status::Status;
use tiermgr_sys::abi;
use tiermgr_sys::process::page_size;
use tiermgr_sys::sock::Stream;
use tiermgr_sys::uffd::{self, DeviceFd, Mode, Uffd};
use tiermgr_wire::hello::{Attach, Role};
use tiermgr_wire::reply::{ErrorCode, FromDaemon};
use tiermgr_wire::request::ToDaemon;

const LIMBO_BYTES: usize = 8 << 20;
/// Longer than a forked child waits.
const LATE: Duration = Duration::from_secs(6);

/// What becomes of an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnAttach {
    /// The process is served, and told so.
    Serve,
    /// The same, after a while.
    ServeLate,
    /// It is served, and the connection ends.
    ServeUntold,
    /// The connection ends.
    Close,
    /// The same, after the nonce page was armed by a userfaultfd that somebody keeps and nobody reads.
    ArmAndClose,
    /// The connection ends, and so does every other.
    CloseForGood,
    /// An error.
    Refuse,
    /// The same, and from then on greetings take their time.
    RefuseAndSlowDown,
    /// The same, after a while.
    RefuseLate,
    /// It is served, by an attach before this one, and this one is refused.
    ServeByEarlier,
    /// The same, after more than a request waits for.
    ServeByEarlierLate,
}

impl OnAttach {
    /// False: the connection is to end.
    pub(crate) fn carry_out(
        self,
        stream: &Stream,
        book: &Book,
        peer: i32,
        brought: &[OwnedFd],
    ) -> bool {
        let serve = || book.served.lock().expect("not poisoned").insert(peer);
        if matches!(self, Self::ServeLate | Self::RefuseLate) {
            thread::sleep(LATE);
        }
        if self == Self::ServeByEarlierLate {
            thread::sleep(Duration::from_secs(3));
        }
        match self {
            Self::Serve | Self::ServeLate => {
                serve();
                // A child sends one, and gets one; it does not look at it.
                let given: Vec<_> = match brought {
                    [own] => vec![own.as_fd()],
                    _ => Vec::new(),
                };
                say_with(stream, &FromDaemon::Attached, &given);
            }
            Self::ServeUntold => {
                serve();
                return false;
            }
            Self::Close => return false,
            Self::ArmAndClose => {
                let sent = attaches(book);
                let page = sent.last().expect("it was noted").nonce_page;
                let arena = brought[0].try_clone().expect("a descriptor");
                let events = abi::FEATURE_EVENT_FORK | abi::FEATURE_EVENT_UNMAP;
                uffd::handshake(arena.as_fd(), events).expect("a new one");
                let arena = Uffd::from_fd(arena);
                arena.register(page, page_size(), Mode::MISSING).expect("a page of its own");
                book.kept.lock().expect("not poisoned").push(arena);
                return false;
            }
            Self::CloseForGood => {
                book.behave(Manner::ClosesAtOnce);
                return false;
            }
            Self::ServeByEarlier | Self::ServeByEarlierLate => {
                serve();
                say(stream, &refusal(ErrorCode::NotPermitted));
            }
            Self::RefuseAndSlowDown => {
                book.behave(Manner::GreetsLate);
                say(stream, &refusal(ErrorCode::NoRoom));
            }
            Self::Refuse | Self::RefuseLate => say(stream, &refusal(ErrorCode::NoRoom)),
        }
        true
    }
}

/// A userfaultfd that serves nobody.
pub(crate) fn some_uffd(device: &DeviceFd) -> OwnedFd {
    uffd::new_from_device(device.as_fd()).expect("a userfaultfd")
}

fn attaches(book: &Book) -> Vec<Attach> {
    let seen = book.seen.lock().expect("not poisoned");
    let attaches = seen.iter().filter_map(|message| match message {
        ToDaemon::Attach(attach) => Some(*attach),
        _ => None,
    });
    attaches.collect()
}

/// Whether limbo is mapped in process `pid` and its helper lives.
fn state_of(pid: i32, attach: &Attach) -> State {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    let begin = format!("{:x}-{:x} ", attach.limbo_start, attach.limbo_start + LIMBO_BYTES as u64);
    let is_mapped = maps.lines().any(|line| line.starts_with(&begin));
    let status = std::fs::read_to_string(format!("/proc/{}/status", attach.helper_pid));
    let lives = status.is_ok_and(|text| {
        text.contains("tiermgr-helper") && text.contains(&format!("PPid:\t{pid}\n"))
    });
    (is_mapped, lives)
}

/// Forks a child that asks for something `requests` times, and gives what came of each: true where it was
/// done. After the last, `look` gets the child's pid.
fn ask_in_child(
    client: &Client,
    address: usize,
    requests: usize,
    look: impl Fn(i32) + Send,
) -> Vec<bool> {
    let (told, tell) = Stream::pair().expect("a socket");
    let (waits, go) = Stream::pair().expect("a socket");
    thread::scope(|scope| {
        let looker = scope.spawn(move || {
            let mut packet = [0; 8];
            let (length, _) = told.recv_with_fds(&mut packet).expect("the child tells");
            assert_eq!(length, 4, "the child ended early");
            look(i32::from_ne_bytes(packet[..4].try_into().expect("four bytes")));
            go.send_with_fds(&[0], &[]).expect("the child waits");
        });
        let status = in_child(|| {
            let done = (0..requests).map(|_| client.prefetch(address, 4096).is_ok());
            let outcomes = done.fold(1, |outcomes, is_done| outcomes << 1 | i32::from(is_done));
            let pid = std::process::id().to_ne_bytes();
            if tell.send_with_fds(&pid, &[]).is_err() || waits.recv_with_fds(&mut [0; 8]).is_err() {
                return 0;
            }
            outcomes
        });
        assert!(libc::WIFEXITED(status), "{status:#x}");
        drop(tell);
        looker.join().expect("no panic");
        let outcomes = libc::WEXITSTATUS(status);
        (0..requests).rev().map(|at| outcomes >> at & 1 == 1).collect()
    })
}

/// What became of the limbo of an attach, and of its helper.
type State = (bool, bool);
const KEPT: State = (true, true);
const GONE: State = (false, false);
/// Limbo is mapped, its helper is dead.
const HELD: State = (true, false);

/// What a daemon that does so with the attaches of a child has seen, what came of the child's requests, and
/// what then became of each attach that it sent.
fn child_with(
    name: &str,
    acts: &[OnAttach],
    requests: usize,
) -> Option<(Arc<Book>, Vec<bool>, Vec<State>)> {
    let daemon = Scripted::new(name)?;
    let client = daemon.client();
    let address = client.allocate(1 << 20, 4096).expect("a block").address;
    let book = Arc::clone(&daemon.book);
    book.on_attach(acts.iter().copied());
    let states = std::sync::Mutex::new(Vec::new());
    let outcomes = ask_in_child(&client, address, requests, |pid| {
        let sent = attaches(&book);
        let state = |(at, attach): (usize, &Attach)| {
            // Where a later one has its place it is gone.
            let replaced = sent[at + 1..].iter().any(|it| it.limbo_start == attach.limbo_start);
            let (is_mapped, lives) = state_of(pid, attach);
            (is_mapped && !replaced, lives)
        };
        *states.lock().expect("not poisoned") =
            sent.iter().enumerate().skip(1).map(state).collect();
    });
    client.prefetch(address, 4096).expect("the parent's connection is as before");
    client.disconnect().expect("quiet");
    let states = states.into_inner().expect("not poisoned");
    Some((book, outcomes, states))
}

#[test]
fn an_attach_that_is_answered_late_holds() {
    let acts = [OnAttach::ServeLate];
    let Some((book, outcomes, states)) = child_with("late", &acts, 2) else { return };
    assert_eq!((outcomes, states), (vec![true, true], vec![KEPT]));
    assert_eq!(book.seen(says_child), 1, "on the same connection");
}

#[test]
fn an_attach_whose_answer_was_lost_holds_where_the_daemon_serves_the_child() {
    let acts = [OnAttach::ServeUntold];
    let Some((book, outcomes, states)) = child_with("untold", &acts, 1) else { return };
    assert_eq!((outcomes, states), (vec![true], vec![KEPT]));
    assert_eq!(book.seen(says_child), 2);
}

#[test]
fn a_child_gets_its_userfaultfd_with_the_next_greeting() {
    let Some(daemon) = Scripted::new("greeted") else { return };
    let client = daemon.client();
    let address = client.allocate(1 << 20, 4096).expect("a block").address;
    daemon.book.on_attach([OnAttach::ServeUntold]);
    let began = Arc::clone(&daemon.book);
    // The second request finds that the daemon was restarted over the first.
    daemon.book.act(move |_| if began.seen(says_child) == 2 { Act::Vanish } else { Act::Usual });
    let outcomes = ask_in_child(&client, address, 1, |_| {});
    assert_eq!(outcomes, [true]);
    let hello = |lacks| {
        daemon.book.seen(|message| {
            matches!(message, ToDaemon::Hello(hello)
                if hello.role == Role::ForkedChild { family: FAMILY, lacks_arena: lacks })
        })
    };
    assert_eq!((hello(true), hello(false)), (2, 1));
    client.prefetch(address, 4096).expect("found again");
    client.disconnect().expect("quiet");
}

#[test]
fn a_child_that_the_daemon_did_not_come_to_serve_attaches_anew() {
    let acts = [OnAttach::Close, OnAttach::Close];
    let Some((book, outcomes, states)) = child_with("anew", &acts, 2) else { return };
    assert_eq!(outcomes, [true, true]);
    // Attaches that were not refused are let go once another one is answered.
    assert_eq!(states, [GONE, GONE, KEPT]);
    assert_eq!(book.seen(says_child), 3);
}

#[test]
fn an_attach_that_the_daemon_completes_after_another_greeting_holds() {
    let acts = [OnAttach::Close, OnAttach::ServeByEarlier];
    let Some((_, outcomes, states)) = child_with("overtaken", &acts, 2) else { return };
    assert_eq!((outcomes.last(), states), (Some(&true), vec![HELD, GONE]));
}

#[test]
fn an_attach_that_the_daemon_serves_by_outlives_one_that_is_refused_late() {
    let acts = [OnAttach::Close, OnAttach::ServeByEarlierLate];
    let Some((_, outcomes, states)) = child_with("late-overtaken", &acts, 2) else { return };
    assert_eq!((outcomes, states), (vec![false, true], vec![HELD, GONE]));
    // As many as it takes: the daemon serves by the first.
    let acts = [OnAttach::Close, OnAttach::Close, OnAttach::ServeByEarlierLate];
    let Some((_, outcomes, states)) = child_with("twice-overtaken", &acts, 2) else { return };
    assert_eq!((outcomes, states), (vec![false, true], vec![HELD, HELD, GONE]));
}

#[test]
fn a_refused_attach_leaves_nothing_behind() {
    let acts = [OnAttach::Refuse];
    let Some((_, outcomes, states)) = child_with("no-attach", &acts, 1) else { return };
    assert_eq!((outcomes, states), (vec![true], vec![GONE, KEPT]));
    let acts = [OnAttach::RefuseLate];
    let Some((_, outcomes, states)) = child_with("late-refusal", &acts, 2) else { return };
    assert_eq!((outcomes, states), (vec![false, true], vec![GONE, KEPT]));
}

/// How often the attach of a child is sent, and how long it stands in calls of `free` that have to tell the daemon
/// of something, until `seconds` after its fork.
fn free_in_child(name: &str, acts: &[OnAttach], seconds: u64) -> Option<(usize, Duration)> {
    const MUCH: usize = 100 << 20;
    let daemon = Scripted::new(name)?;
    let client = daemon.client();
    let much = client.allocate(MUCH, 4096).expect("a block").address;
    daemon.book.on_attach(acts.iter().copied());
    let (told, tell) = Stream::pair().expect("a socket");
    let status = in_child(|| {
        // SAFETY: no preconditions; this one takes its time.
        unsafe { libc::alarm(30) };
        let until = Instant::now() + Duration::from_secs(seconds);
        let (mut block, mut stood) = (much, Duration::ZERO);
        while Instant::now() < until {
            let began = Instant::now();
            if client.free(block).is_err() {
                return 1;
            }
            stood += began.elapsed();
            thread::sleep(Duration::from_millis(20));
            let Ok(small) = client.allocate(4096, 4096) else { return 2 };
            block = small.address;
        }
        let stood = u64::try_from(stood.as_millis()).unwrap_or(u64::MAX);
        i32::from(tell.send_with_fds(&stood.to_ne_bytes(), &[]).is_err())
    });
    assert_eq!(status, 0, "{status:#x}");
    let mut packet = [0; 8];
    told.recv_with_fds(&mut packet).expect("the child has told");
    let sent = attaches(&daemon.book).len() - 1;
    client.disconnect().expect("quiet");
    Some((sent, Duration::from_millis(u64::from_ne_bytes(packet))))
}

#[test]
fn free_pauses_after_an_attach_that_was_refused_late() {
    // The second one is sent by `free`, which waits two seconds for it.
    let acts = [OnAttach::Refuse, OnAttach::RefuseLate, OnAttach::RefuseLate];
    let Some((sent, stood)) = free_in_child("late-refusals", &acts, 9) else { return };
    assert_eq!(sent, 2, "{stood:?}");
    // The fork has waited for this one, for longer yet.
    let acts = [OnAttach::RefuseLate, OnAttach::RefuseLate];
    let Some((sent, stood)) = free_in_child("late-at-fork", &acts, 4) else { return };
    assert_eq!(sent, 1, "{stood:?}");
}

#[test]
fn free_waits_two_seconds_for_greeting_and_answer_together() {
    let acts = [OnAttach::RefuseAndSlowDown, OnAttach::RefuseLate];
    // A machine that is busy with something else may hold one of them up.
    for attempt in 1.. {
        let Some((sent, stood)) = free_in_child("slow-greeting", &acts, 5) else { return };
        assert_eq!(sent, 2, "{stood:?}");
        if stood < GREETED_LATE + Duration::from_millis(1900) {
            return;
        }
        assert!(attempt < 3, "{stood:?}");
    }
}

#[test]
fn a_program_whose_first_attach_was_not_answered_is_served_by_it() {
    let Some(daemon) = Scripted::new("first-untold") else { return };
    daemon.book.on_attach([OnAttach::ServeUntold]);
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block");
    client.prefetch(block.address, 4096).expect("served");
    assert_eq!(attaches(&daemon.book).len(), 1);

    // It is no child, whatever a daemon says of it later.
    let own = std::process::id().cast_signed();
    *daemon.book.served.lock().expect("not poisoned") = [0].into();
    daemon.book.vanish();
    client.prefetch(block.address, 4096).expect_err("unknown");
    assert_eq!(attaches(&daemon.book).len(), 1);
    daemon.book.served.lock().expect("not poisoned").insert(own);
    client.prefetch(block.address, 4096).expect("served");
    client.disconnect().expect("quiet");
}

#[test]
fn a_program_whose_first_attach_was_not_carried_out_attaches_anew() {
    let Some(daemon) = Scripted::new("first-unserved") else { return };
    daemon.book.on_attach([OnAttach::Close]);
    let client = daemon.client();
    let [first, second] = attaches(&daemon.book)[..] else { panic!("attached once more") };
    assert_ne!(first.nonce_page, second.nonce_page, "the daemon may have filled it");
    // Where its limbo was, the other's may be, or a part of it.
    let (is_mapped, lives) = state_of(std::process::id().cast_signed(), &first);
    assert!(!lives && (first.limbo_start == second.limbo_start || !is_mapped));
    client.disconnect().expect("quiet");
}

/// The keeper has what the daemon had.
#[test]
fn a_program_whose_daemon_was_killed_over_its_first_attach_can_fork() {
    let Some(daemon) = Scripted::new("first-armed") else { return };
    daemon.book.on_attach([OnAttach::ArmAndClose]);
    let client = daemon.client();
    assert_eq!(attaches(&daemon.book).len(), 2);
    // SAFETY: no preconditions; ends the test where the fork hangs.
    unsafe { libc::alarm(20) };
    assert_eq!(in_child(|| 0), 0);
    // SAFETY: no preconditions.
    unsafe { libc::alarm(0) };
    client.disconnect().expect("quiet");
}

#[test]
fn a_program_whose_daemon_is_gone_at_its_first_attach_has_nothing_of_it() {
    let Some(daemon) = Scripted::new("first-gone") else { return };
    daemon.book.on_attach([OnAttach::CloseForGood]);
    let began = Instant::now();
    let error = Client::connect(daemon.config()).expect_err("nobody answers");
    assert_eq!(error.status, Status::ConnectionLost, "{error}");
    let [first] = attaches(&daemon.book)[..] else { panic!("attached once") };
    assert_eq!(state_of(std::process::id().cast_signed(), &first), GONE);
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}
