use super::*;
use crate::memory::HUGE_PAGE;
use std::fs::File;

fn range(start: usize, len: usize) -> BufferRange {
    BufferRange { index: 0, bytes: start..start + len }
}

fn ring() -> Option<Ring> {
    match Ring::new(8) {
        Ok(mut ring) => {
            let buffer = AnonBuffer::new(HUGE_PAGE).expect("2 MiB");
            match ring.register_buffers(vec![buffer]) {
                // The limit of locked memory is one for all that a user runs; root has none.
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                    eprintln!("skipped: locking 2 MiB: {error}");
                    assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "{error}");
                    None
                }
                registered => {
                    registered.expect("register");
                    Some(ring)
                }
            }
        }
        Err(error) => {
            eprintln!("skipped: io_uring: {error}");
            assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "{error}");
            None
        }
    }
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
    ring.write_fixed(file, range(0, 4096), 8192, 7).expect("push");
    assert!(ring.buffer(&range(0, 4096)).is_ok(), "reading what is written out harms nobody");
    assert!(matches!(ring.buffer_mut(&range(4095, 1)), Err(PushError::Busy)));
    assert!(matches!(ring.read_fixed(file, range(0, 4096), 0, 8), Err(PushError::Busy)));
    let done = Completed { user_data: 7, result: Ok(4096) };
    assert_eq!(one(&mut ring), done);

    ring.read_fixed(file, range(65536, 4096), 8192, 9).expect("push");
    assert!(matches!(ring.buffer(&range(65536, 1)), Err(PushError::Busy)));
    assert_eq!(one(&mut ring).result, Ok(4096));
    assert!(ring.buffer(&range(65536, 4096)).expect("idle").iter().all(|&b| b == 0x5a));
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn ranges_outside_are_refused() {
    let Some(mut ring) = ring() else { return };
    let file = ring.register_file(File::open("/dev/zero").expect("zero").as_fd()).expect("file");
    for bad in [range(HUGE_PAGE, 1), range(0, HUGE_PAGE + 1), range(5, 0)] {
        assert!(matches!(ring.read_fixed(file, bad, 0, 0), Err(PushError::NoSuchRange)));
    }
    let other = BufferRange { index: 1, bytes: 0..1 };
    assert!(matches!(ring.buffer(&other), Err(PushError::NoSuchRange)));
}

#[test]
fn a_device_error_comes_as_its_errno() {
    let Some(mut ring) = ring() else { return };
    let full = File::options().write(true).open("/dev/full").expect("full");
    let file = ring.register_file(full.as_fd()).expect("file");
    ring.write_fixed(file, range(0, 512), 0, 1).expect("push");
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
