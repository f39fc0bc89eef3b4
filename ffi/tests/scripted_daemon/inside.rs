//! Signal handlers that fork while their thread speaks to the daemon: the parent gets its answer, and the child asks
//! for itself.

use super::{Act, Manner, Scripted, is_discard, says_child};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use tiermgr::client::Client;
use tiermgr::status::Status;
use tiermgr_wire::request::ToDaemon;

/// More than what a heap keeps of freed memory.
const MUCH: usize = 100 << 20;

/// What the handler does.
static IS_RAW: AtomicBool = AtomicBool::new(false);
/// The child goes on long before its parent does.
static LINGERS: AtomicBool = AtomicBool::new(false);
/// Whose memory the child takes in the handler.
static TAKES_FROM: AtomicPtr<Client> = AtomicPtr::new(std::ptr::null_mut());

/// What it gives: the child's number, 0 in the child.
static CHILD: AtomicI32 = AtomicI32::new(-1);
static TAKEN: AtomicUsize = AtomicUsize::new(0);

extern "C" fn fork_here(_signal: libc::c_int) {
    let pid = if IS_RAW.load(Ordering::SeqCst) {
        // SAFETY: as fork, of which no handlers hear; the child goes on with this test, which forbids it little.
        i32::try_from(unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) })
            .unwrap_or(-1)
    } else {
        // SAFETY: what a program does that forks in a handler; the thread is not inside libc's heap.
        unsafe { libc::fork() }
    };
    if pid == 0 {
        // SAFETY: no preconditions; ends a child that hangs.
        unsafe { libc::alarm(10) };
        // SAFETY: null, or a client that outlives the test's wait.
        if let Some(client) = unsafe { TAKES_FROM.load(Ordering::SeqCst).as_ref() } {
            let taken = client.allocate(MUCH, 4096).map_or(0, |block| block.address);
            TAKEN.store(taken, Ordering::SeqCst);
        }
    } else if LINGERS.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(100));
    }
    CHILD.store(pid, Ordering::SeqCst);
}

/// Calls `inside`, and the handler on this thread once `is_time`; then `after`. In the child it ends with what
/// `judge` says of the outcome. Gives the outcome in the parent.
fn forked_inside<T>(
    is_time: impl Fn() -> bool + Sync,
    after: impl Fn() + Sync,
    inside: impl FnOnce() -> T,
    judge: impl FnOnce(&T) -> i32,
) -> T {
    CHILD.store(-1, Ordering::SeqCst);
    // SAFETY: zeros are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = fork_here as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler is a function of the kind that it is installed as.
    let set = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    // SAFETY: no preconditions.
    let own = unsafe { libc::pthread_self() };
    let pid = std::process::id();
    let is_over = AtomicBool::new(false);
    let (outcome, child) = thread::scope(|scope| {
        let bell = scope.spawn(|| {
            while !is_time() {
                thread::sleep(Duration::from_millis(1));
            }
            // SAFETY: the thread waits for this one.
            assert_eq!(unsafe { libc::pthread_kill(own, libc::SIGUSR1) }, 0);
            let mut left = 100;
            while CHILD.load(Ordering::SeqCst) == -1 && left > 0 {
                thread::sleep(Duration::from_millis(1));
                left -= 1;
            }
            // The child comes to it first.
            thread::sleep(Duration::from_millis(100));
            after();
            while !is_over.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let outcome = inside();
        if std::process::id() != pid {
            let status = judge(&outcome);
            // SAFETY: ends the child without the handlers of the test's own process.
            unsafe { libc::_exit(status) };
        }
        is_over.store(true, Ordering::SeqCst);
        bell.join().expect("no panic");
        (outcome, CHILD.load(Ordering::SeqCst))
    });
    assert!(child > 0, "no child");
    let mut status = 0;
    // SAFETY: a child of ours, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child: {status:#x}");
    outcome
}

/// The first discard waits until the test lets it go on.
fn stall_first_discard(daemon: &Scripted) {
    let discards = AtomicU32::new(0);
    daemon.book.act(move |message| {
        let is_first = is_discard(message) && discards.fetch_add(1, Ordering::SeqCst) == 0;
        if is_first { Act::Stall } else { Act::Usual }
    });
}

#[test]
fn a_child_that_is_forked_inside_a_request_asks_for_itself() {
    let Some(daemon) = Scripted::new("inside") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block").address;
    let other = client.create_region(1 << 20, tiermgr_wire::request::Kind::Heap, "other");
    stall_first_discard(&daemon);
    let outcome = forked_inside(
        || daemon.book.discards_of(block) == 1,
        || daemon.book.go_on(),
        || client.discard_surely(block, 4096),
        |outcome| match outcome {
            // It is a client like any other from then on.
            Ok(()) if client.prefetch(block, 4096).is_err() => 2,
            Ok(()) if client.destroy_region(other.clone().expect("made")).is_err() => 3,
            Ok(()) => 0,
            Err(_) => 4,
        },
    );
    outcome.expect("the parent has its answer");
    assert_eq!(daemon.book.discards_of(block), 2);
    assert_eq!(daemon.book.seen(says_child), 1);
    client.prefetch(block, 4096).expect("and goes on");
    client.disconnect().expect("quiet");
}

#[test]
fn a_raw_clone_inside_a_request_leaves_the_answer_to_its_parent() {
    let Some(daemon) = Scripted::new("raw-inside") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block").address;
    stall_first_discard(&daemon);
    IS_RAW.store(true, Ordering::SeqCst);
    let outcome = forked_inside(
        || daemon.book.discards_of(block) == 1,
        || daemon.book.go_on(),
        || client.discard_surely(block, 4096),
        |outcome| {
            let is_told = outcome.as_ref().is_err_and(|error| error.status == Status::NotPermitted);
            i32::from(!is_told)
        },
    );
    IS_RAW.store(false, Ordering::SeqCst);
    outcome.expect("the parent has its answer");
    assert_eq!(daemon.book.discards_of(block), 1);
    client.disconnect().expect("quiet");
}

/// What is being forgotten for the parent is free to the child, which takes it in the handler.
#[test]
fn a_child_that_is_forked_while_a_block_is_forgotten_keeps_what_it_gets() {
    let Some(daemon) = Scripted::new("forgotten-inside") else { return };
    let client = daemon.client();
    let block = client.allocate(MUCH, 4096).expect("a block").address;
    stall_first_discard(&daemon);
    TAKES_FROM.store((&raw const *client).cast_mut(), Ordering::SeqCst);
    forked_inside(
        || daemon.book.discards_of(block) == 1,
        || daemon.book.go_on(),
        || client.free(block).expect("live"),
        |()| match TAKEN.load(Ordering::SeqCst) {
            taken if taken != block => 2,
            _ if client.prefetch(block, 4096).is_err() => 3,
            _ => 0,
        },
    );
    TAKES_FROM.store(std::ptr::null_mut(), Ordering::SeqCst);
    assert_eq!(daemon.book.discards_of(block), 1, "the child's was forgotten, too");
    client.prefetch(block, 4096).expect("nothing is owed any more");
    client.disconnect().expect("quiet");
}

/// The same where it is yet to be forgotten.
#[test]
fn a_child_that_is_forked_before_a_block_is_forgotten_keeps_what_it_gets() {
    let Some(daemon) = Scripted::new("forgotten-later") else { return };
    let client = daemon.client();
    let range = client.map(MUCH, 4096).expect("a mapping");
    let pinned = client.allocate(4096, 4096).expect("a block").address;
    let is_pin = |message: &ToDaemon| matches!(message, ToDaemon::Pin { .. });
    daemon.book.act(move |message| if is_pin(message) { Act::Stall } else { Act::Usual });
    TAKES_FROM.store((&raw const *client).cast_mut(), Ordering::SeqCst);
    thread::scope(|scope| {
        let pin = scope.spawn(|| client.pin(pinned, 4096));
        while daemon.book.seen(is_pin) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        forked_inside(
            || {
                thread::sleep(Duration::from_millis(300));
                true
            },
            || daemon.book.go_on(),
            || client.unmap(&range),
            |()| match TAKEN.load(Ordering::SeqCst) {
                taken if taken != range.start => 2,
                _ => 0,
            },
        );
        pin.join().expect("no panic").expect_err("the script says no");
    });
    TAKES_FROM.store(std::ptr::null_mut(), Ordering::SeqCst);
    assert_eq!(daemon.book.discards_of(range.start), 1, "the child's was forgotten, too");
    client.disconnect().expect("quiet");
}

/// It would connect its parent's socket.
#[test]
fn a_child_that_is_forked_before_its_parent_is_accepted_connects_for_itself() {
    let Some(daemon) = Scripted::new("unaccepted-inside") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block").address;
    daemon.close();
    daemon.book.vanish();
    forked_inside(
        || {
            thread::sleep(Duration::from_millis(100));
            true
        },
        || daemon.open(),
        || client.prefetch(block, 4096),
        |outcome| i32::from(outcome.is_err()),
    )
    .expect("the parent is served");
    assert_eq!(daemon.book.seen(says_child), 2, "each says hello once");
    client.prefetch(block, 4096).expect("and goes on");
    client.disconnect().expect("quiet");
}

/// In its parent's place it would take that one's greeting.
#[test]
fn a_child_that_is_forked_before_its_parent_is_greeted_leaves_the_greeting_to_it() {
    let Some(daemon) = Scripted::new("ungreeted-inside") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block").address;
    daemon.book.behave(Manner::GreetsOnCue);
    daemon.book.vanish();
    LINGERS.store(true, Ordering::SeqCst);
    forked_inside(
        || daemon.book.seen(says_child) == 1,
        || daemon.book.go_on(),
        || client.prefetch(block, 4096),
        |outcome| i32::from(outcome.is_err()),
    )
    .expect("the parent is served");
    LINGERS.store(false, Ordering::SeqCst);
    assert_eq!(daemon.book.seen(says_child), 2, "each says hello once");
    client.prefetch(block, 4096).expect("and goes on");
    client.disconnect().expect("quiet");
}
