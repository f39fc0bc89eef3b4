//! Our descriptors in somebody else's process.
//!
//! They are close-on-exec, have high numbers so that a program which uses or closes low ones never
//! meets them, and are listed here so that the preload library can keep `close`, `dup2` and
//! `close_range` off them. What closes them all the same (an instruction of the program's own) is found out
//! before the number is used: it may be somebody else's by then.

use crate::sandbox::{self, Deed};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

/// Five for each client: socket, device, arenas, limbo, guard.
const SLOTS: usize = 128;
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

/// The file behind a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// `None`: the number is not open.
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        let mut facts = MaybeUninit::<libc::stat>::uninit();
        // The call itself: a seccomp filter is asked about this one.
        // SAFETY: fstat writes one `stat`.
        let outcome = unsafe { libc::syscall(libc::SYS_fstat, fd.as_raw_fd(), facts.as_mut_ptr()) };
        if outcome != 0 {
            return None;
        }
        // SAFETY: fstat has filled it in.
        let facts = unsafe { facts.assume_init() };
        Some(Self { device: facts.st_dev, inode: facts.st_ino })
    }
}

/// A descriptor of ours, listed.
#[derive(Debug)]
pub struct Fd<T: AsFd = OwnedFd> {
    listed: Option<Listed>,
    inner: ManuallyDrop<T>,
    file: Option<FileId>,
}

impl<T: AsFd> Fd<T> {
    /// Lists a descriptor that has a high number already.
    pub(crate) fn list(inner: T) -> Self {
        let file = FileId::of(inner.as_fd());
        Self { listed: Some(Listed::new(inner.as_fd())), inner: ManuallyDrop::new(inner), file }
    }

    /// Whether the number still stands for what it stood for. One that was closed behind our back may be
    /// somebody else's.
    pub(crate) fn is_intact(&self) -> bool {
        self.file.is_some() && FileId::of(self.inner.as_fd()) == self.file
    }
}

impl<T: AsFd> AsFd for Fd<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<T: AsFd> Deref for Fd<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsFd> Drop for Fd<T> {
    fn drop(&mut self) {
        // First: what is listed is not closed.
        self.listed = None;
        if self.is_intact() {
            // SAFETY: nothing uses it after this.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

impl Fd {
    /// Moves `fd` to a high number and lists it. Where the limits of the process leave no high
    /// number it stays where it is.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self::list(raise(fd))
    }
}

/// This process is the one that the list speaks of, and whose connections are ours. For one that connects,
/// and for a forked child.
pub(crate) fn settle() -> i32 {
    let pid = own_pid();
    LISTED_PID.store(pid, Ordering::Relaxed);
    if MARK.load(Ordering::Relaxed).is_null()
        && let Some(mark) = page_that_children_lack()
    {
        // SAFETY: the mapping just made, which nobody else knows.
        unsafe { &*mark }.is_whole.store(true, Ordering::Relaxed);
        let was_there = MARK
            .compare_exchange(std::ptr::null_mut(), mark, Ordering::AcqRel, Ordering::Relaxed)
            .is_err();
        if was_there {
            // SAFETY: the mapping just made, which nobody else knows.
            unsafe { libc::munmap(mark.cast(), crate::space::page_bytes()) };
        }
    }
    if let Some(mark) = mark() {
        mark.is_settled.store(true, Ordering::Relaxed);
    }
    pid
}

/// What the kernel clears in each child that has its own memory. A number alone says too little: the first
/// process of one pid namespace may be a raw clone of the first of another.
struct Mark {
    is_settled: AtomicBool,
    /// All threads are here that may be inside a lock.
    is_whole: AtomicBool,
}

static MARK: AtomicPtr<Mark> = AtomicPtr::new(std::ptr::null_mut());

fn mark() -> Option<&'static Mark> {
    // SAFETY: null, or the beginning of a page that is never unmapped; any bytes of ours and zeros make one.
    unsafe { MARK.load(Ordering::Acquire).as_ref() }
}

fn page_that_children_lack() -> Option<*mut Mark> {
    let bytes = crate::space::page_bytes();
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping just made, which nothing uses yet.
    if unsafe { libc::madvise(page, bytes, libc::MADV_WIPEONFORK) } == 0 {
        return Some(page.cast());
    }
    // SAFETY: as above.
    unsafe { libc::munmap(page, bytes) };
    None
}

/// This process was forked in order, with our handlers: all locks are whole.
pub(crate) fn note_fork() {
    if let Some(mark) = mark() {
        mark.is_whole.store(true, Ordering::Relaxed);
    }
}

/// Whether this is the process that settled as `pid`: not a child of a vfork, nor of a raw clone.
pub(crate) fn is_settled(pid: i32) -> bool {
    mark().is_none_or(|mark| mark.is_settled.load(Ordering::Relaxed)) && own_pid() == pid
}

/// Whether this process uses the memory of another one, in which nothing is its own: the child of a vfork.
pub(crate) fn is_borrowed() -> bool {
    mark().is_some_and(|mark| mark.is_settled.load(Ordering::Relaxed))
        && own_pid() != LISTED_PID.load(Ordering::Relaxed)
}

/// Whether this is the child of a raw clone, into which one thread has come along, or of a fork that is not over. It
/// stays one when it connects anew.
pub(crate) fn is_copy() -> bool {
    mark().is_some_and(|mark| !mark.is_whole.load(Ordering::Relaxed))
}

/// Whether the list speaks of this process. One that must not ask whose it is leaves its descriptors open.
fn is_of_this_process() -> bool {
    !sandbox::may(Deed::Leave) || is_settled(LISTED_PID.load(Ordering::Relaxed))
}

/// Whether a number is ours, and this process' own.
#[must_use]
pub fn is_ours(number: RawFd) -> bool {
    number >= 0
        && LISTED.iter().any(|slot| slot.load(Ordering::Relaxed) == number)
        && is_of_this_process()
}

/// The lowest of our numbers from `from` on.
#[must_use]
pub fn next_ours(from: RawFd) -> Option<RawFd> {
    let next = LISTED
        .iter()
        .map(|slot| slot.load(Ordering::Relaxed))
        .filter(|&number| number != EMPTY && number >= from)
        .min()?;
    is_of_this_process().then_some(next)
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
        settle();
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

    /// Children are told by more than their number: this one is given that of its parent.
    #[test]
    fn a_raw_clone_is_somebody_else_whatever_its_number() {
        let pid = settle();
        assert!(is_settled(pid));
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            let is_same = is_settled(own_pid());
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(is_same)) };
        }
        let mut status = 0;
        let child = i32::try_from(child).expect("a pid");
        // SAFETY: waitpid writes one int.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "it took itself for its parent");
    }

    #[test]
    fn a_number_that_became_somebody_elses_is_left_to_it() {
        let null = std::fs::File::open("/dev/null").expect("/dev/null");
        let fd = Fd::new(null.into());
        let number = fd.as_fd().as_raw_fd();
        let other = std::fs::File::open("/dev/zero").expect("/dev/zero");
        // SAFETY: closes ours, as a program does that closes everything.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        drop(fd);
        // SAFETY: asking for flags has no preconditions.
        assert!(unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0, "it was closed");
        // SAFETY: made above, and nobody else's.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }
}
