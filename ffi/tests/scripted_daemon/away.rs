//! A daemon that is there and takes no notice: what asks it ends within its limit.

use super::{Scripted, says_child};
use std::time::{Duration, Instant};
use tiermgr::client::Client;
use tiermgr::status::Status;

/// More than what a heap keeps of freed memory.
const MUCH: usize = 100 << 20;
/// Far more than any of the limits.
const GENEROUS: Duration = Duration::from_secs(15);

/// Neither `free` nor a request that waits for a restart hangs.
fn expect_ends(client: &Client, block: usize, kept: usize) {
    let began = Instant::now();
    client.free(block).expect("live");
    assert!(began.elapsed() < GENEROUS, "free: {:?}", began.elapsed());
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
    let block = client.allocate(MUCH, 4096).expect("a block").address;
    daemon.close();
    daemon.book.vanish();
    expect_ends(&client, block, kept);
    let error = Client::connect(daemon.config()).expect_err("nobody accepts");
    assert_eq!(error.status, Status::ConnectionLost, "{error}");
    assert!(error.message.contains("takes no connection"), "{error}");
    assert_eq!(daemon.book.seen(says_child), 0);
    daemon.open();
    client.prefetch(kept, 4096).expect("it is back");
    client.disconnect().expect("quiet");
}
