//! Address space: managed ranges, and tables of our own that are never managed.
//!
//! A program may have asked that all its memory be locked from now on (`mlockall(MCL_FUTURE)`). The kernel
//! then fills a mapping when it becomes writable, however large it is. What is made here is reserved
//! without access first, and made writable once its lock is such that nothing is filled.

use crate::sandbox::{self, Deed};
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;
use tiermgr_core::units::CHUNK_BYTES;

/// A multiple of this is where regions, limbo and huge pages begin.
pub const CHUNK: usize = {
    assert!(CHUNK_BYTES == 2 << 20);
    2 << 20
};

/// Bytes of a page.
#[must_use]
pub fn page_bytes() -> usize {
    usize::try_from(tiermgr_sys::process::page_size()).unwrap_or(4096)
}

/// What becomes of a range where the program locks all memory that it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// Its pages are locked when they are touched: what the program has there stays in memory, as it
    /// asked for.
    OnTouch,
    /// It is not locked: nothing of the program's lives there, and others must be able to empty it.
    Never,
}

/// A range with a page of nothing on either side.
#[derive(Debug)]
pub struct Reserved {
    start: usize,
    len: usize,
}

impl Reserved {
    /// Reserves `len` bytes (a multiple of a chunk) from a multiple of a chunk on: private anonymous
    /// memory, readable and writable, that costs nothing before it is touched.
    ///
    /// The guard pages keep the kernel from merging the mapping with a neighbour: what is armed and
    /// what is not then never depends on who lives next door.
    ///
    /// # Errors
    /// `ENOMEM` where the address space or a limit of the process is used up, `EAGAIN` where that is the
    /// limit of locked memory; `EPERM` where a filter of the program's would end it.
    pub fn new(len: usize, locking: Locking) -> io::Result<Self> {
        let guard = page_bytes();
        let with_slack = len
            .checked_add(CHUNK + 2 * guard)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let base = reserve(with_slack)?;
        let start = (base + guard).next_multiple_of(CHUNK);
        let end = start + len;
        let unused_end = base + with_slack;
        unmap(base, start - guard - base);
        unmap(end + guard, unused_end - end - guard);
        open(start, len, locking).inspect_err(|_| unmap(start - guard, len + 2 * guard))?;
        Ok(Self { start, len })
    }

    /// First byte.
    #[must_use]
    pub const fn start(&self) -> usize {
        self.start
    }

    /// Length without the guards.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.len
    }

    /// Passes advice to the kernel. Advice that it does not know is no advice.
    pub fn advise(&self, advice: i32) {
        // SAFETY: the range is our own mapping; the callers' advice (HUGEPAGE, DONTFORK, DONTDUMP)
        // changes no byte of it.
        unsafe {
            libc::madvise(self.start as *mut libc::c_void, self.len, advice);
        }
    }

    /// Undoes what a lock of all memory of the process did to it.
    pub fn unlock(&self) {
        // SAFETY: a lock changes no byte, and that of our own mapping is nobody else's business.
        unsafe {
            libc::munlock(self.start as *mut libc::c_void, self.len);
        }
    }

    /// Gives the range back. Nothing may point into it, and nothing of the daemon or the helper may
    /// be on its way to it.
    pub fn unmap(self) {
        let guard = page_bytes();
        unmap(self.start - guard, self.len + 2 * guard);
    }
}

fn unmap(start: usize, len: usize) {
    if len > 0 {
        // SAFETY: callers pass parts of a mapping that they made and that nothing uses.
        unsafe {
            libc::munmap(start as *mut libc::c_void, len);
        }
    }
}

/// Maps `len` bytes that nobody may touch yet.
fn reserve(len: usize) -> io::Result<usize> {
    leave_unless(Deed::Map)?;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base as usize) }
}

/// `EPERM` for what a filter of the program's would end it for.
pub(crate) fn leave_unless(deed: Deed) -> io::Result<()> {
    if sandbox::may(deed) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

fn check(outcome: libc::c_int) -> io::Result<()> {
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes part of what [`reserve`] gave readable and writable, and fills none of it.
fn open(start: usize, len: usize, locking: Locking) -> io::Result<()> {
    let address = start as *mut libc::c_void;
    // The kernel refuses to drop locked pages, also where there are none: so the mapping tells whether it
    // was locked when it was made.
    // SAFETY: there is nothing to be dropped in a mapping that nobody could touch.
    let dropped = check(unsafe { libc::madvise(address, len, libc::MADV_DONTNEED) });
    if dropped.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
        leave_unless(Deed::Lock)?;
        match locking {
            // SAFETY: locking changes no byte.
            Locking::OnTouch => check(unsafe { libc::mlock2(address, len, libc::MLOCK_ONFAULT) })?,
            // SAFETY: as above; the lock is that of our own mapping.
            Locking::Never => check(unsafe { libc::munlock(address, len) })?,
        }
    }
    // SAFETY: the mapping is our own, and nobody uses it yet.
    check(unsafe { libc::mprotect(address, len, libc::PROT_READ | libc::PROT_WRITE) })
}

/// Maps one private page of its own that nobody touches, kept apart from its neighbours by guards,
/// and gives its address.
///
/// # Errors
/// As [`Reserved::new`].
pub fn untouched_page() -> io::Result<usize> {
    let page = page_bytes();
    let base = reserve(3 * page)?;
    let middle = base + page;
    open(middle, page, Locking::Never).inspect_err(|_| unmap(base, 3 * page))?;
    Ok(middle)
}

/// Gives back what [`untouched_page`] gave, and nobody uses.
pub fn unmap_untouched_page(start: usize) {
    let page = page_bytes();
    unmap(start - page, 3 * page);
}

/// Of a page that [`untouched_page`] gave: children that are forked from now on have nothing there.
pub fn keep_from_children(start: usize) {
    // SAFETY: it changes no byte; the page is nobody's who would look for it in a child.
    unsafe { libc::madvise(start as *mut libc::c_void, page_bytes(), libc::MADV_DONTFORK) };
}

/// Types for which bytes of zero are a value.
///
/// # Safety
/// All-zero bytes must be a valid value of the type, and the type must have no `Drop`.
pub unsafe trait ZeroIsValid {}

/// An array in a mapping of its own: neither in managed memory nor in libc's heap. It costs memory
/// only where it was touched. Dropping it does not give it back.
pub struct Table<T> {
    base: NonNull<T>,
    len: usize,
    of: PhantomData<T>,
}

// SAFETY: a table owns its elements, like a `Vec`.
unsafe impl<T: Send> Send for Table<T> {}

impl<T> std::fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: ZeroIsValid> Table<T> {
    /// `len` elements of zero bytes.
    ///
    /// # Errors
    /// As [`Reserved::new`].
    pub fn zeroed(len: usize) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= 4096) };
        let bytes = len
            .checked_mul(size_of::<T>())
            .filter(|&bytes| bytes > 0)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let start = reserve(bytes)?;
        open(start, bytes, Locking::OnTouch).inspect_err(|_| unmap(start, bytes))?;
        let base = NonNull::new(start as *mut T)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { base, len, of: PhantomData })
    }
}

impl<T> Table<T> {
    /// Gives it back.
    pub fn unmap(self) {
        unmap(self.base.as_ptr() as usize, self.len * size_of::<T>());
    }

    /// The elements, for good.
    #[must_use]
    pub fn leak(self) -> &'static [T] {
        // SAFETY: as in `deref`; as the table is given up, nobody makes a `&mut` of it any more.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T> std::ops::Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `base` begins a live mapping of `len` elements, page-aligned, zero at first, which
        // is a valid value (`ZeroIsValid`); only its owner unmaps it, and gives it up by that.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T> std::ops::DerefMut for Table<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}
