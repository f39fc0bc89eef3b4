//! A daemon that is there and takes no notice: what asks it ends within its limit.

use super::{Manner, Scripted, says_child};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr::client::Client;
use tiermgr::status::Status;

/// More than what a heap keeps of freed memory.
const MUCH: usize = 100 << 20;
/// Far more than any of the limits.
const GENEROUS: Duration = Duration::from_secs(15);
/// Between two signals of a timer: less than any of the limits.
const TICK: Duration = Duration::from_millis(20);

/// Neither `free` nor a request that waits for a restart hangs.
fn expect_ends(client: &Client, blocks: [usize; 2], kept: usize) {
    // The first finds that the connection has ended. A moment later the next looks for the daemon.
    for block in blocks {
        let began = Instant::now();
        client.free(block).expect("live");
        assert!(began.elapsed() < GENEROUS, "free: {:?}", began.elapsed());
        thread::sleep(Duration::from_millis(20));
    }
    let began = Instant::now();
    let error = client.prefetch(kept, 4096).expect_err("nobody answers");
    assert!(began.elapsed() < GENEROUS, "{:?}", began.elapsed());
    assert_eq!(error.status, Status::ConnectionLost, "{error}");
}

#[test]
fn a_daemon_that_accepts_nobody_is_away() {
    let Some(daemon) = Scripted::new("accepts-nobody") else { return };
    let client = daemon.client();
    let kept = client.allocate(1 << 20, 4096).expect("a block").address;
    let blocks = [(); 2].map(|()| client.allocate(MUCH, 4096).expect("a block").address);
    daemon.close();
    daemon.book.vanish();
    expect_ends(&client, blocks, kept);
    let error = Client::connect(daemon.config()).expect_err("nobody accepts");
    assert_eq!(error.status, Status::ConnectionLost, "{error}");
    assert!(error.message.contains("takes no connection"), "{error}");
    assert_eq!(daemon.book.seen(says_child), 0);
    daemon.open();
    client.prefetch(kept, 4096).expect("it is back");
    client.disconnect().expect("quiet");
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// Calls `inside`, and a signal handler on this thread again and again meanwhile; not for ever.
fn under_a_timer(inside: impl FnOnce()) {
    // SAFETY: zeros are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler is a function of the kind that it is installed as.
    let set = unsafe { libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    // SAFETY: no preconditions.
    let own = unsafe { libc::pthread_self() };
    let (is_over, began) = (AtomicBool::new(false), Instant::now());
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) && began.elapsed() < 2 * GENEROUS {
                // SAFETY: the thread waits for this one.
                assert_eq!(unsafe { libc::pthread_kill(own, libc::SIGUSR2) }, 0);
                thread::sleep(TICK);
            }
        });
        inside();
        is_over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_greeting_that_does_not_come_is_waited_for_in_time_under_a_timer() {
    let Some(daemon) = Scripted::new("ungreeted-timer") else { return };
    let client = daemon.client();
    let kept = client.allocate(1 << 20, 4096).expect("a block").address;
    let blocks = [(); 2].map(|()| client.allocate(MUCH, 4096).expect("a block").address);
    daemon.book.behave(Manner::SaysNothing);
    daemon.book.vanish();
    under_a_timer(|| expect_ends(&client, blocks, kept));
    assert!(daemon.book.seen(says_child) >= 2, "it was not asked");
    daemon.book.behave(Manner::Polite);
    client.prefetch(kept, 4096).expect("it is back");
    client.disconnect().expect("quiet");
}

/// More than what is left of the first arena.
const PAST_THE_ARENA: usize = 5 << 30;

#[test]
fn a_daemon_that_is_gone_for_good_is_looked_for_now_and_then_and_found() {
    let Some(daemon) = Scripted::new("gone") else { return };
    let client = daemon.client();
    client.allocate(1 << 20, 4096).expect("a block");
    daemon.book.behave(Manner::ClosesAtOnce);
    daemon.book.vanish();
    let ask = || client.allocate(PAST_THE_ARENA, 4096).map(|block| block.address);
    let refused = || assert_eq!(ask().expect_err("gone").status, Status::ConnectionLost);
    refused();
    let waited_for = daemon.book.seen(says_child);
    assert!(waited_for > 1, "it might have come back");
    let began = Instant::now();
    // If each waited these would take minutes; once a second one of them looks.
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..25).for_each(|_| refused()));
        }
    });
    let looks = daemon.book.seen(says_child) - waited_for;
    let most = 1 + usize::try_from(began.elapsed().as_secs()).expect("fits");
    assert!(looks <= most, "it was looked for {looks} times in {:?}", began.elapsed());

    daemon.book.behave(Manner::Polite);
    let deadline = Instant::now() + GENEROUS;
    let block = loop {
        match ask() {
            Ok(block) => break block,
            Err(error) => assert!(Instant::now() < deadline, "not found: {error}"),
        }
        // It is looked for once a second, whoever asks how often.
        thread::sleep(TICK);
    };
    // The next that goes is waited for, as the first was.
    daemon.book.behave(Manner::ClosesAtOnce);
    daemon.book.vanish();
    let back = thread::scope(|scope| {
        scope.spawn(|| {
            // Well within what it is waited for.
            thread::sleep(Duration::from_millis(300));
            daemon.book.behave(Manner::Polite);
        });
        client.allocate(2 * PAST_THE_ARENA, 4096)
    });
    back.expect("it was away for a moment");
    client.free(block).expect("live");
    client.disconnect().expect("quiet");
}

/// That another request has waited in vain does not make the daemon gone: the next may come back any moment.
#[test]
fn growth_waits_for_itself() {
    let Some(daemon) = Scripted::new("growth-waits") else { return };
    let client = daemon.client();
    let kept = client.allocate(1 << 20, 4096).expect("a block").address;
    daemon.book.behave(Manner::ClosesAtOnce);
    daemon.book.vanish();
    client.prefetch(kept, 4096).expect_err("it waits for two seconds");
    daemon.book.behave(Manner::Polite);
    client
        .allocate(PAST_THE_ARENA, 4096)
        .expect("it waits until the daemon may be looked for again");
    client.disconnect().expect("quiet");
}

/// A daemon that was restarted and has not taken the program up yet has ended nothing: whoever takes it for one that ends
/// believes that all which was asked is done.
#[test]
fn a_daemon_that_does_not_serve_yet_is_away() {
    let Some(daemon) = Scripted::new("not-yet") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block").address;
    daemon.book.behave(Manner::NotYet);
    daemon.book.vanish();
    let is_away = || {
        let error = client.discard_surely(block, 4096).expect_err("nobody serves");
        assert_eq!(error.status, Status::ConnectionLost, "{error}");
    };
    is_away();
    // From here on nobody waits, and what the daemon says is the answer.
    let (asked, deadline) = (daemon.book.seen(says_child), Instant::now() + GENEROUS);
    while daemon.book.seen(says_child) == asked {
        assert!(Instant::now() < deadline, "it is not asked again");
        is_away();
        thread::sleep(TICK);
    }
    assert_eq!(daemon.book.discards_of(block), 0);
    daemon.book.behave(Manner::Polite);
    client.prefetch(block, 4096).expect("it serves");
    client.discard_surely(block, 4096).expect("done");
    client.disconnect().expect("quiet");
}
