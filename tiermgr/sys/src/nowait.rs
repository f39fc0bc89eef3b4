//! Reads and writes that do not block, whatever the flags of the open file description say.
//!
//! The descriptions of userfaultfds and of a ring's eventfd are shared with the client, who made the first
//! and was sent the second. O_NONBLOCK is a flag of the *description*: a client can clear it at any time,
//! also between our look at it and our read, and drain what we saw. So the flag is kept set (a poll of a
//! blocking userfaultfd answers with an error at once, and would make a loop), and never relied on.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Longest time that a read may sleep where the kernel has no read without waiting for the kind of file.
const SLEEP_MAX: Duration = Duration::from_millis(5);

/// Sets O_NONBLOCK on the description, and says whether it was missing.
///
/// # Errors
/// Of fcntl.
pub fn make_nonblocking(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: F_GETFL takes no argument and touches no memory.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    if flags & libc::O_NONBLOCK != 0 {
        return Ok(false);
    }
    // SAFETY: F_SETFL takes an integer and touches no memory.
    let rc = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(true) }
}

thread_local! {
    static TIMER: RefCell<Option<Timer>> = const { RefCell::new(None) };
}

/// Makes what reads on this thread may need. Without it the first of them does, and allocates. A forked
/// child inherits no timers: there this must be called again.
///
/// # Errors
/// Of making a timer (EAGAIN: the user has too many).
pub fn prepare_thread() -> io::Result<()> {
    TIMER.with_borrow_mut(|timer| {
        *timer = None;
        *timer = Some(Timer::new()?);
        Ok(())
    })
}

/// Reads what is there; 0 when nothing is.
///
/// # Errors
/// Of preadv2 and read, except EAGAIN and EINTR.
///
/// # Safety
/// `buffer` must be writable for `len` bytes while this runs, and no reference to them may exist.
pub(crate) unsafe fn read_now(
    fd: BorrowedFd<'_>,
    buffer: *mut u8,
    len: usize,
) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: buffer.cast(), iov_len: len };
    // SAFETY: reads one iovec, which names memory that is writable, as the caller promises.
    let n = unsafe { libc::preadv2(fd.as_raw_fd(), &raw const vector, 1, -1, libc::RWF_NOWAIT) };
    match outcome(n) {
        // Eventfds take the flag, and userfaultfds since 6.10; but not those that a FORK message brings.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        done => return done,
    }
    if !is_readable(fd)? {
        return Ok(0);
    }
    // SAFETY: as the caller promises.
    unsafe { read_for_a_moment(fd, buffer, len) }
}

/// Writes what can be written without waiting for a reader, and gives how much that was. A terminal and a
/// file on a disk are asked first whether they take anything; the latter always says so, and may make its
/// writer wait for the disk.
///
/// # Errors
/// Of pwritev2 and write, except EAGAIN and EINTR.
pub fn write_now(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: reads one iovec, and through it `bytes`, to which nothing is written.
    let n = unsafe { libc::pwritev2(fd.as_raw_fd(), &raw const vector, 1, -1, libc::RWF_NOWAIT) };
    match outcome(n) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {}
        done => return done,
    }
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: poll reads and writes one pollfd.
    if unsafe { libc::poll(&raw mut poll, 1, 0) } <= 0 || poll.revents & libc::POLLOUT == 0 {
        return Ok(0);
    }
    // SAFETY: reads `bytes`.
    outcome(unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) })
}

fn outcome(n: isize) -> io::Result<usize> {
    usize::try_from(n).or_else(|_negative| {
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
            _ => Err(error),
        }
    })
}

/// Whether something is there, as far as a look can tell.
fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    for _ in 0..2 {
        let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: poll reads and writes one pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, 0) } < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(false) } else { Err(error) };
        }
        if poll.revents & libc::POLLIN != 0 {
            return Ok(true);
        }
        // A userfaultfd whose description blocks tells nothing but this.
        if poll.revents & libc::POLLERR == 0 || !make_nonblocking(fd)? {
            break;
        }
    }
    Ok(false)
}

/// A read that a timer of the thread interrupts, should it have gone to sleep after all.
///
/// # Errors
/// Of read and of making the timer.
///
/// # Safety
/// As [`read_now`].
unsafe fn read_for_a_moment(fd: BorrowedFd<'_>, buffer: *mut u8, len: usize) -> io::Result<usize> {
    TIMER.with_borrow_mut(|made| {
        let timer = match made {
            Some(timer) => timer,
            none => none.insert(Timer::new()?),
        };
        timer.set(SLEEP_MAX)?;
        // SAFETY: as the caller promises.
        let n = outcome(unsafe { libc::read(fd.as_raw_fd(), buffer.cast(), len) });
        timer.set(Duration::ZERO)?;
        n
    })
}

/// Sends SIGURG to the thread that made it. Any signal that does nothing by itself would do; this one is
/// ignored where nobody has asked for it.
struct Timer(libc::timer_t);

impl Timer {
    fn new() -> io::Result<Self> {
        extern "C" fn ignore(_signal: libc::c_int) {}
        // SAFETY: all zeros are a valid sigaction: no flags, above all not SA_RESTART, and an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: reads one sigaction, whose handler does nothing and so is safe at any moment.
        if unsafe { libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: all zeros are a valid, empty set.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: writes the set just made.
        unsafe { libc::sigaddset(&raw mut set, libc::SIGURG) };
        // SAFETY: reads the set; the old one is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
        // SAFETY: all zeros are a valid sigevent.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGURG;
        // SAFETY: takes nothing and cannot fail.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer: libc::timer_t = std::ptr::null_mut();
        // SAFETY: reads one sigevent and writes one timer_t.
        let rc =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if rc == 0 { Ok(Self(timer)) } else { Err(io::Error::last_os_error()) }
    }

    /// Signals every `period` from now on; zero: no more. Again and again, for the first signal may come
    /// before the read that it is to end.
    fn set(&self, period: Duration) -> io::Result<()> {
        let nanos = libc::c_long::from(period.subsec_nanos().cast_signed());
        let period = libc::timespec { tv_sec: 0, tv_nsec: nanos };
        let value = libc::itimerspec { it_interval: period, it_value: period };
        // SAFETY: the timer is one that `new` made; reads one itimerspec.
        let rc = unsafe { libc::timer_settime(self.0, 0, &raw const value, std::ptr::null_mut()) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer is one that `new` made, and is not used afterwards.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::time::Instant;

    fn blocking_eventfd() -> std::os::fd::OwnedFd {
        let fd = crate::shm::eventfd().expect("eventfd");
        // SAFETY: F_SETFL takes an integer.
        assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, 0) }, 0);
        fd
    }

    #[test]
    fn a_blocking_description_does_not_hold_its_reader() {
        let fd = blocking_eventfd();
        let mut count = [0u8; 8];
        let begun = Instant::now();
        // SAFETY: `count` is writable for eight bytes and not borrowed.
        assert_eq!(unsafe { read_now(fd.as_fd(), count.as_mut_ptr(), 8) }.expect("read"), 0);
        crate::shm::eventfd_signal(fd.as_fd()).expect("signal");
        // SAFETY: as above.
        assert_eq!(unsafe { read_now(fd.as_fd(), count.as_mut_ptr(), 8) }.expect("read"), 8);
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert!(make_nonblocking(fd.as_fd()).expect("fcntl"));
        assert!(!make_nonblocking(fd.as_fd()).expect("fcntl"));
    }

    #[test]
    fn a_full_pipe_takes_nothing_and_holds_nobody() {
        let (reader, writer) = io::pipe().expect("pipe");
        let line = [b'x'; 1000];
        let mut written = 0;
        loop {
            match write_now(writer.as_fd(), &line).expect("write") {
                0 => break,
                n => written += n,
            }
        }
        assert!(written >= 4096, "{written}");
        drop(reader);
        // Rust's runtime ignores SIGPIPE.
        assert!(write_now(writer.as_fd(), &line).is_err());
    }

    /// What files without the flag get: somebody took what the look had seen.
    #[test]
    fn a_read_that_sleeps_is_interrupted() {
        let fd = blocking_eventfd();
        assert!(!is_readable(fd.as_fd()).expect("poll"));
        let mut count = [0u8; 8];
        for _ in 0..3 {
            let begun = Instant::now();
            // SAFETY: `count` is writable for eight bytes and not borrowed.
            let n = unsafe { read_for_a_moment(fd.as_fd(), count.as_mut_ptr(), 8) };
            assert_eq!(n.expect("read"), 0);
            assert!(begun.elapsed() < Duration::from_secs(5));
        }
        crate::shm::eventfd_signal(fd.as_fd()).expect("signal");
        // SAFETY: as above.
        let n = unsafe { read_for_a_moment(fd.as_fd(), count.as_mut_ptr(), 8) };
        assert_eq!(n.expect("read"), 8);
    }
}
