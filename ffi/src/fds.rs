//! Our descriptors in somebody else's process.
//!
//! They are close-on-exec, have high numbers so that a program which uses or closes low ones never
//! meets them, and are listed here so that the preload library can keep `close`, `dup2` and
//! `close_range` off them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Three for each client: socket, arenas, limbo.
const SLOTS: usize = 64;
const EMPTY: i32 = -1;
/// Where numbers are looked for; the first that the limits of the process allow.
const BASES: [i32; 4] = [500, 200, 100, 20];

static LISTED: [AtomicI32; SLOTS] = [const { AtomicI32::new(EMPTY) }; SLOTS];
/// Process whose table the list speaks of. The child of a vfork has its own table, but our memory.
static LISTED_PID: AtomicI32 = AtomicI32::new(0);

/// An entry of the list. Dropped before its descriptor is closed.
#[derive(Debug)]
pub struct Listed(RawFd);

impl Listed {
    /// Lists `fd`.
    #[must_use]
    pub fn new(fd: BorrowedFd<'_>) -> Self {
        let number = fd.as_raw_fd();
        LISTED_PID.store(own_pid(), Ordering::Relaxed);
        for slot in &LISTED {
            let taken = slot.compare_exchange(EMPTY, number, Ordering::Relaxed, Ordering::Relaxed);
            if taken.is_ok() {
                break;
            }
        }
        Self(number)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        for slot in &LISTED {
            let left = slot.compare_exchange(self.0, EMPTY, Ordering::Relaxed, Ordering::Relaxed);
            if left.is_ok() {
                break;
            }
        }
    }
}

/// A descriptor of ours with a high number.
#[derive(Debug)]
pub struct Fd {
    _listed: Listed,
    number: OwnedFd,
}

impl Fd {
    /// Moves `fd` to a high number and lists it. Where the limits of the process leave no high
    /// number it stays where it is.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        let number = raise(fd);
        Self { _listed: Listed::new(number.as_fd()), number }
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.number.as_fd()
    }
}

/// The list holds for this process from now on. For a forked child.
pub(crate) fn adopt_list() {
    LISTED_PID.store(own_pid(), Ordering::Relaxed);
}

/// Whether a number is ours, and this process' own.
#[must_use]
pub fn is_ours(number: RawFd) -> bool {
    number >= 0
        && LISTED.iter().any(|slot| slot.load(Ordering::Relaxed) == number)
        && LISTED_PID.load(Ordering::Relaxed) == own_pid()
}

/// The lowest of our numbers from `from` on.
#[must_use]
pub fn next_ours(from: RawFd) -> Option<RawFd> {
    let next = LISTED
        .iter()
        .map(|slot| slot.load(Ordering::Relaxed))
        .filter(|&number| number != EMPTY && number >= from)
        .min()?;
    (LISTED_PID.load(Ordering::Relaxed) == own_pid()).then_some(next)
}

/// Number of this process, from the kernel: also right in a child of vfork or of a raw clone.
pub(crate) fn own_pid() -> i32 {
    // SAFETY: getpid has no preconditions.
    unsafe { libc::getpid() }
}

/// The same open file under a high number, or `fd` itself where the limits leave none.
#[must_use]
pub(crate) fn raise(fd: OwnedFd) -> OwnedFd {
    for base in BASES {
        // SAFETY: duplicating an open descriptor has no preconditions.
        let raised = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, base) };
        if raised >= 0 {
            // SAFETY: `raised` is open, new, and owned by nobody.
            return unsafe { OwnedFd::from_raw_fd(raised) };
        }
    }
    fd
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_high_listed_and_closed_on_exec() {
        let file = std::fs::File::open("/dev/null").expect("/dev/null");
        let fd = Fd::new(file.into());
        let number = fd.as_fd().as_raw_fd();
        assert!(number >= 500);
        assert!(is_ours(number));
        assert_eq!(next_ours(0), Some(number));
        assert_eq!(next_ours(number + 1), None);
        // SAFETY: asking for flags has no preconditions.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        assert_eq!(flags, libc::FD_CLOEXEC);
        drop(fd);
        assert!(!is_ours(number));
    }
}
