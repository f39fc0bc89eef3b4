use super::*;
use crate::memory::HUGE_PAGE;
use std::fs::File;

fn range(start: usize, len: usize) -> BufferRange {
    BufferRange { index: 0, bytes: start..start + len }
}

fn pool() -> Arc<BufferPool> {
    let pool = BufferPool::new(HUGE_PAGE).expect("one in a block");
    pool.reserve(2).expect("4 MiB");
    pool
}

fn ring() -> Option<Ring> {
    match Ring::new(8, 2) {
        Ok(mut ring) => {
            let index = ring.put(0..2, pool().take().expect("reserved")).expect("a place");
            assert_eq!(index, 0);
            Some(ring)
        }
        Err(error) => {
            eprintln!("skipped: io_uring: {error}");
            assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "{error}");
            None
        }
    }
}

/// A read that does not end by itself.
fn reading(ring: &mut Ring) -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("pipe");
    let file = ring.register_file(reader.as_fd()).expect("file");
    ring.read(file, range(0, 4096), u64::MAX, 5).expect("push");
    ring.submit().expect("submit");
    (reader, writer)
}

fn one(ring: &mut Ring) -> Completed {
    let mut out = Vec::new();
    while ring.completions(&mut out) == 0 {
        ring.wait(Some(Duration::from_secs(20))).expect("wait");
    }
    assert_eq!(out.len(), 1);
    out[0]
}

#[test]
fn what_is_written_is_read_back() {
    let Some(mut ring) = ring() else { return };
    let path = std::env::temp_dir().join(format!("tiermgr-uring-{}", std::process::id()));
    let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let file = ring.register_file(open().expect("file").as_fd()).expect("register");
    std::fs::remove_file(&path).expect("unlink");

    ring.buffer_mut(&range(0, 4096)).expect("idle").fill(0x5a);
    ring.write(file, range(0, 4096), 8192, 7).expect("push");
    assert!(ring.buffer(&range(0, 4096)).is_ok(), "reading what is written out harms nobody");
    assert!(matches!(ring.buffer_mut(&range(4095, 1)), Err(PushError::Busy)));
    assert!(matches!(ring.read(file, range(0, 4096), 0, 8), Err(PushError::Busy)));
    let done = Completed { user_data: 7, result: Ok(4096) };
    assert_eq!(one(&mut ring), done);

    ring.read(file, range(65536, 4096), 8192, 9).expect("push");
    assert!(matches!(ring.buffer(&range(65536, 1)), Err(PushError::Busy)));
    assert_eq!(one(&mut ring).result, Ok(4096));
    assert!(ring.buffer(&range(65536, 4096)).expect("idle").iter().all(|&b| b == 0x5a));
    assert_eq!(ring.in_flight(), 0);
}

/// The same through a ring that knows no buffer beforehand, as with an old kernel or little to lock.
#[test]
fn buffers_that_are_not_registered_serve_as_well() {
    let Some(mut ring) = ring() else { return };
    ring.ring.submitter().unregister_buffers().expect("it has a table");
    ring.places[0].registered = None;
    assert!(!ring.is_registered(0));
    let path = std::env::temp_dir().join(format!("tiermgr-uring-plain-{}", std::process::id()));
    let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let file = ring.register_file(open().expect("file").as_fd()).expect("register");
    std::fs::remove_file(&path).expect("unlink");
    ring.buffer_mut(&range(0, 4096)).expect("idle").fill(0x5a);
    ring.write(file, range(0, 4096), 0, 7).expect("push");
    assert_eq!(one(&mut ring).result, Ok(4096));
    ring.read(file, range(8192, 4096), 0, 8).expect("push");
    assert_eq!(one(&mut ring).result, Ok(4096));
    assert!(ring.buffer(&range(8192, 4096)).expect("idle").iter().all(|&b| b == 0x5a));
}

#[test]
fn a_buffer_in_use_is_not_taken_out_and_one_that_is_back_finds_its_place() {
    let Some(mut ring) = ring() else { return };
    let (_reader, mut writer) = reading(&mut ring);
    assert!(matches!(ring.take_out(0), Err(PushError::Busy)));
    std::io::Write::write_all(&mut writer, b"here").expect("write");
    assert_eq!(one(&mut ring).result, Ok(4));
    let first = ring.take_out(0).expect("idle");
    assert!(matches!(ring.take_out(0), Err(PushError::NoSuchRange)));
    assert!(matches!(ring.buffer(&range(0, 1)), Err(PushError::NoSuchRange)));
    assert!(ring.buffer_mut(&range(0, 1)).is_err());
    let second = first.pool().take().expect("reserved");
    assert_eq!(ring.put(0..2, second).expect("a place"), 1, "the other one is known in place 0");
    assert_eq!(ring.put(0..2, first).expect("a place"), 0);
    assert_eq!(ring.buffer(&range(0, 4)).expect("idle"), b"here");
    assert!(ring.put(0..2, pool().take().expect("reserved")).is_err(), "no place is empty");
}

/// The kernel goes on without the ring: what it writes must not land in what another has by then.
#[test]
fn what_a_dropped_ring_left_in_flight_is_given_to_nobody() {
    let Some(mut ring) = ring() else { return };
    let (_reader, _writer) = reading(&mut ring);
    let pool = pool();
    let idle = pool.take().expect("reserved");
    let idle_at = idle.as_slice().as_ptr();
    assert_eq!(ring.put(0..2, idle).expect("a place"), 1);
    let used = Arc::clone(ring.lease(0).expect("it is there").pool());
    drop(ring);
    assert_eq!(pool.take().expect("given back").as_slice().as_ptr(), idle_at);
    let left: Vec<_> = std::iter::from_fn(|| used.take()).collect();
    assert_eq!(left.len(), 1, "the other piece is never free again");
}

#[test]
fn ranges_outside_are_refused() {
    let Some(mut ring) = ring() else { return };
    let file = ring.register_file(File::open("/dev/zero").expect("zero").as_fd()).expect("file");
    for bad in [range(HUGE_PAGE, 1), range(0, HUGE_PAGE + 1), range(5, 0)] {
        assert!(matches!(ring.read(file, bad, 0, 0), Err(PushError::NoSuchRange)));
    }
    let other = BufferRange { index: 1, bytes: 0..1 };
    assert!(matches!(ring.buffer(&other), Err(PushError::NoSuchRange)));
}

#[test]
fn a_device_error_comes_as_its_errno() {
    let Some(mut ring) = ring() else { return };
    let full = File::options().write(true).open("/dev/full").expect("full");
    let file = ring.register_file(full.as_fd()).expect("file");
    ring.write(file, range(0, 512), 0, 1).expect("push");
    assert_eq!(one(&mut ring).result, Err(libc::ENOSPC));
}

#[test]
fn a_poll_reports_once_and_can_be_cancelled() {
    let Some(mut ring) = ring() else { return };
    let event = crate::shm::eventfd().expect("eventfd");
    ring.poll_once(event.as_fd(), 42).expect("push");
    crate::shm::eventfd_signal(event.as_fd()).expect("signal");
    let told = one(&mut ring);
    assert_eq!((told.user_data, told.result.is_ok()), (42, true));
    assert_eq!(ring.in_flight(), 0);
    crate::shm::eventfd_drain(event.as_fd()).expect("drain");
    ring.poll_once(event.as_fd(), 43).expect("push");
    ring.poll_cancel(43).expect("push");
    let end = one(&mut ring);
    assert_eq!((end.user_data, end.result), (43, Err(libc::ECANCELED)));
}

#[test]
fn a_wait_ends_when_its_time_is_up() {
    let Some(mut ring) = ring() else { return };
    let begun = std::time::Instant::now();
    ring.wait(Some(Duration::from_millis(10))).expect("time is up");
    assert!(begun.elapsed() >= Duration::from_millis(9));
    assert_eq!(ring.completions(&mut Vec::new()), 0);
}

#[test]
fn more_operations_than_the_ring_holds_are_refused() {
    let Some(mut ring) = ring() else { return };
    let event = crate::shm::eventfd().expect("eventfd");
    for i in 0..32 {
        ring.poll_once(event.as_fd(), i).expect("room");
    }
    assert!(matches!(ring.poll_once(event.as_fd(), 99), Err(PushError::Full)));
    crate::shm::eventfd_signal(event.as_fd()).expect("signal");
    let mut out = Vec::new();
    while out.len() < 32 {
        ring.wait(Some(Duration::from_secs(20))).expect("wait");
        ring.completions(&mut out);
    }
    let mut seen: Vec<_> = out.iter().map(|c| c.user_data).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..32).collect::<Vec<_>>());
}
