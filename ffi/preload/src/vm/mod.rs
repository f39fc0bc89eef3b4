//! System calls by which a program changes its memory, where that memory is managed.
//!
//! To the kernel an arena is one mapping whose pages come and go. A program that discards, moves, unmaps or
//! protects part of a block by the plain system call would get parked bytes back where it asked for zeros,
//! wait for ever at an address that nobody serves, or leave its changes to the next owner of the block. So
//! these calls are made here on the program's behalf. For every other address they cost one look at the
//! bounds of the arenas, without a lock, and go on to the next library. A range may cover both: each part is
//! treated as what it is.
//!
//! | call | on managed memory |
//! |---|---|
//! | `MADV_DONTNEED`, `DONTNEED_LOCKED`, `FREE` | the daemon drops the bytes. With nothing changed `EAGAIN` where it is away, and `EINVAL` where nobody ever will, as without a helper (`FREE`: success, the bytes stay), or on locked memory |
//! | `MADV_GUARD_INSTALL`, `GUARD_REMOVE` | the same, and the part is inaccessible until the guard is removed |
//! | `MADV_WIPEONFORK`, `DONTFORK`, and back | the part is held in memory under a lease as long as it lasts, then natively; `ENOMEM` where no more may be held |
//! | `MADV_WILLNEED`, `COLD`, `PAGEOUT`, `NORMAL`, `SEQUENTIAL`, `RANDOM` | advice to the daemon |
//! | other advice | natively; undone when the block is freed |
//! | `munmap` | the bytes are dropped and the part is inaccessible; its addresses stay taken until the block is freed, and then serve again. Pages of a mapping serve again at once |
//! | `mmap` at no certain address | where `TIERMGR_MMAP` asks for it: cut from the heap (`fresh`) |
//! | `mmap` with `MAP_FIXED`, private and anonymous | the bytes are dropped, the memory stays managed |
//! | `mmap` with `MAP_FIXED`, anything else | natively, when the daemon has let the part go; it is not managed from then on, and retired when the block is freed |
//! | `mremap` | a mapping grows in place, or its bytes are copied to another; those of a block are copied to a new native mapping, which is not managed unless `TIERMGR_MMAP` asks for it. The old part is as after `munmap`, or with `MREMAP_DONTUNMAP` empty |
//! | `mprotect`, `pkey_mprotect`, `mlock`, `mlock2`, `munlock`, `munlockall` | natively; undone when the block is freed |
//! | `mlockall` | arenas as with `MCL_ONFAULT`, everything else natively (`lock_all`) |
//!
//! Nothing here allocates. A signal handler that interrupts this library's own work with the daemon gets
//! `EAGAIN`, and so does one that interrupts the heap and unmaps a mapping.

mod access;
mod advice;
mod fresh;
mod held;
mod layout;
mod lock_all;
mod mend;
mod native;
mod remap;

pub(crate) use held::{follow_forks, keep_lock_across_forks};
pub(crate) use mend::{before_free, before_release};
pub(crate) use native::look_up;

use crate::{descriptors, errno, route, sandbox};
use native::Errno;
use std::ffi::{c_int, c_long};
use std::ops::Range;
use std::time::Duration;
use tiermgr::changes::{EXEC, Flags, NO_READ, NO_WRITE, REPLACED, UNMAPPED};
use tiermgr::client::Client;
use tiermgr::sandbox::Deed;
use tiermgr::space::page_bytes;
use tiermgr::status::{Error, Status};

type Outcome = Result<usize, Errno>;

/// The client and the whole pages of a range, if any of them is managed. What is no range of pages is
/// nobody's: the kernel says what is wrong with it, and does nothing.
fn managed(start: usize, bytes: usize) -> Option<(&'static Client, Range<usize>)> {
    let client = route::client()?;
    let page = page_bytes();
    let end = start.checked_add(bytes)?.checked_next_multiple_of(page)?;
    let range = start..end;
    let is_ours = bytes > 0 && start.is_multiple_of(page) && client.heap().owns_part_of(&range);
    is_ours.then_some((client, range))
}

/// The same for calls that take a range from and to anywhere in a page.
fn managed_pages(start: usize, bytes: usize) -> Option<(&'static Client, Range<usize>)> {
    let offset = start % page_bytes();
    managed(start - offset, bytes.checked_add(offset)?)
}

/// Gives a result as C functions do. Where all is well errno stays as it was.
fn give(before: Errno, outcome: Outcome) -> isize {
    match outcome {
        Ok(value) => {
            errno::set(before);
            value.cast_signed()
        }
        Err(why) => {
            errno::set(why);
            -1
        }
    }
}

fn give_int(before: Errno, outcome: Outcome) -> c_int {
    if give(before, outcome) == -1 { -1 } else { 0 }
}

/// What kind of memory a page is to a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// Managed.
    Ours,
    /// Not managed: the kernel's business alone.
    Foreign,
    /// Nothing is there, to the program.
    Nobodys,
}

fn whose(flags: Flags) -> Whose {
    if flags & UNMAPPED != 0 {
        Whose::Nobodys
    } else if flags & REPLACED != 0 {
        Whose::Foreign
    } else {
        Whose::Ours
    }
}

/// A range in parts, by whom they belong to.
fn parts(client: &Client, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, Whose)> {
    client
        .heap()
        .runs(range, whose)
        .map(|run| (run.range, if run.ours { run.kind } else { Whose::Foreign }))
}

/// So long a program waits that is told to try again: many do so at once, and without end.
const AGAIN_PAUSE: Duration = Duration::from_millis(1);

/// Has the daemon drop the bytes of managed memory; where this fails nothing was changed.
fn drop_bytes(client: &Client, range: &Range<usize>) -> Result<(), Errno> {
    try_drop_bytes(client, range).inspect_err(|&why| {
        if why == libc::EAGAIN {
            tiermgr::nap(AGAIN_PAUSE);
        }
    })
}

/// The same for whom a failure is no error.
fn try_drop_bytes(client: &Client, range: &Range<usize>) -> Result<(), Errno> {
    client.discard_surely(range.start, range.len()).map_err(|error| errno_of(&error))
}

/// What the kernel would say where the daemon does not do what it was asked.
const fn errno_of(error: &Error) -> Errno {
    match error.status {
        // Nobody ever will: the memory is locked, the helper has ended, this is the child of a raw clone, or a
        // filter forbids it. Of locked memory and of some other kinds the kernel says the same, in madvise as in
        // mremap, and callers do without. `EAGAIN` has some ask for ever, and `ENOMEM` means a hole in the range.
        Status::Unsupported | Status::NotPermitted | Status::NotManaged => libc::EINVAL,
        _ => libc::EAGAIN,
    }
}

fn is_locked(range: &Range<usize>) -> bool {
    if !tiermgr::sandbox::may(Deed::Advise) {
        return false;
    }
    // The kernel refuses this advice on locked memory.
    // SAFETY: it changes no byte.
    let cold = unsafe { native::madvise(range.start, range.len(), libc::MADV_COLD) };
    cold == Err(libc::EINVAL)
}

/// What the program has not called itself must not end it, where a filter of its own forbids that.
fn leave_unless(deed: Deed) -> Result<(), Errno> {
    if tiermgr::sandbox::may(deed) { Ok(()) } else { Err(libc::EPERM) }
}

const fn flags_of(access: c_int) -> Flags {
    let mut flags = 0;
    if access & libc::PROT_READ == 0 {
        flags |= NO_READ;
    }
    if access & libc::PROT_WRITE == 0 {
        flags |= NO_WRITE;
    }
    if access & libc::PROT_EXEC != 0 {
        flags |= EXEC;
    }
    flags
}

const fn access_of(flags: Flags) -> c_int {
    let mut access = libc::PROT_NONE;
    if flags & NO_READ == 0 {
        access |= libc::PROT_READ;
    }
    if flags & NO_WRITE == 0 {
        access |= libc::PROT_WRITE;
    }
    if flags & EXEC != 0 {
        access |= libc::PROT_EXEC;
    }
    access
}

/// Sets and clears flags. Clearing alone never fails.
fn change(client: &Client, range: &Range<usize>, set: Flags, clear: Flags) -> Result<(), Errno> {
    client.heap().change(range.clone(), set, clear).map_err(|_no_table| libc::ENOMEM)
}

/// # Safety
/// madvise(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn madvise(address: usize, bytes: usize, advice: c_int) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match managed(address, bytes) {
            Some((client, range)) => advice::madvise(client, range, advice),
            // SAFETY: same contract.
            None => unsafe { native::madvise(address, bytes, advice) },
        },
    )
}

/// # Safety
/// posix_madvise(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_madvise(
    address: usize,
    bytes: usize,
    advice: c_int,
) -> c_int {
    // To POSIX this is advice that changes no byte, and glibc does nothing at all. The other numbers are
    // those of madvise.
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    let before = errno::get();
    // SAFETY: same contract.
    let outcome = unsafe { madvise(address, bytes, advice) };
    let why = errno::get();
    errno::set(before);
    if outcome == 0 { 0 } else { why }
}

/// # Safety
/// munmap(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munmap(address: usize, bytes: usize) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match managed(address, bytes) {
            Some((client, range)) => layout::munmap(client, range),
            // SAFETY: same contract.
            None => unsafe { native::munmap(address, bytes) },
        },
    )
}

/// # Safety
/// mmap(2).
unsafe fn map(address: usize, mapping: layout::Mapping) -> isize {
    let layout::Mapping { bytes, access, flags, fd, offset } = mapping;
    let before = errno::get();
    // Any other is placed where nothing is, and arenas leave no hole.
    let is_fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
    // The kernel refuses it before it looks at anything else.
    let is_odd = !offset.is_multiple_of(page_bytes());
    let ours = if is_odd {
        None
    } else if is_fixed {
        managed(address, bytes).map(|(client, range)| layout::mmap(client, range, mapping))
    } else if fresh::is_wanted(&mapping) {
        fresh::mmap(address, mapping)
    } else {
        None
    };
    // SAFETY: same contract.
    let natively = || unsafe { native::mmap(address, bytes, access, flags, fd, offset) };
    give(before, ours.unwrap_or_else(natively))
}

/// # Safety
/// mmap(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mmap(
    address: usize,
    bytes: usize,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: usize,
) -> isize {
    // SAFETY: same contract.
    unsafe { map(address, layout::Mapping { bytes, access, flags, fd, offset }) }
}

// What jemalloc maps for its tables: the linker has all calls of mmap in this library come here (`build.rs`). A
// function that Rust exports without mangling would be one more name in the way of the program's.
macro_rules! wrapped {
    ($jump:literal) => {
        std::arch::global_asm!(
            ".text",
            ".globl __wrap_mmap, __wrap_mmap64",
            "__wrap_mmap:",
            "__wrap_mmap64:",
            concat!($jump, " {own}"),
            own = sym own_mmap
        );
    };
}
#[cfg(target_arch = "x86_64")]
wrapped!("jmp");
#[cfg(target_arch = "aarch64")]
wrapped!("b");

/// # Safety
/// mmap(2).
unsafe extern "C" fn own_mmap(
    address: usize,
    bytes: usize,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: usize,
) -> isize {
    // SAFETY: same contract.
    give(errno::get(), unsafe { native::mmap(address, bytes, access, flags, fd, offset) })
}

/// # Safety
/// mmap(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mmap64(
    address: usize,
    bytes: usize,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: usize,
) -> isize {
    // SAFETY: same contract.
    unsafe { map(address, layout::Mapping { bytes, access, flags, fd, offset }) }
}

/// The last argument is there only with some flags; without them nobody looks at it.
///
/// # Safety
/// mremap(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mremap(
    address: usize,
    bytes: usize,
    new_bytes: usize,
    flags: c_int,
    to: usize,
) -> isize {
    let before = errno::get();
    let to_fixed = flags & libc::MREMAP_FIXED != 0;
    // Of a length of zero the kernel looks at the first page.
    let source = managed(address, bytes.max(1));
    let target = if to_fixed { managed(to, new_bytes) } else { None };
    let client = source.as_ref().or(target.as_ref()).map(|(client, _)| *client);
    give(
        before,
        match client {
            Some(client) => {
                remap::mremap(client, remap::Move { address, bytes, new_bytes, flags, to })
            }
            // SAFETY: same contract.
            None => unsafe { native::mremap(address, bytes, new_bytes, flags, to) },
        },
    )
}

/// # Safety
/// mprotect(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mprotect(address: usize, bytes: usize, access: c_int) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match managed(address, bytes) {
            Some((client, range)) => access::protect(client, range, access, None),
            // SAFETY: same contract.
            None => unsafe { native::mprotect(address, bytes, access) },
        },
    )
}

/// # Safety
/// pkey_mprotect(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pkey_mprotect(
    address: usize,
    bytes: usize,
    access: c_int,
    key: c_int,
) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match managed(address, bytes) {
            Some((client, range)) => access::protect(client, range, access, Some(key)),
            // SAFETY: same contract.
            None => unsafe { native::pkey_mprotect(address, bytes, access, key) },
        },
    )
}

/// # Safety
/// mlock(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlock(address: usize, bytes: usize) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match managed_pages(address, bytes) {
            Some((client, range)) => access::lock(client, range, None),
            // SAFETY: same contract.
            None => unsafe { native::mlock(address, bytes) },
        },
    )
}

/// # Safety
/// mlock2(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlock2(address: usize, bytes: usize, flags: c_int) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match managed_pages(address, bytes) {
            Some((client, range)) => access::lock(client, range, Some(flags)),
            // SAFETY: same contract.
            None => unsafe { native::mlock2(address, bytes, flags) },
        },
    )
}

/// # Safety
/// mlockall(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match route::client() {
            Some(client) if flags & libc::MCL_CURRENT != 0 => lock_all::lock_all(client, flags),
            // SAFETY: same contract.
            _ => unsafe { native::mlockall(flags) },
        },
    )
}

/// # Safety
/// munlockall(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munlockall() -> c_int {
    let before = errno::get();
    // SAFETY: same contract.
    let outcome = unsafe { native::munlockall() };
    if outcome.is_ok()
        && let Some(client) = route::client()
    {
        access::note_all_unlocked(client);
    }
    give_int(before, outcome)
}

/// # Safety
/// munlock(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munlock(address: usize, bytes: usize) -> c_int {
    let before = errno::get();
    give_int(
        before,
        match managed_pages(address, bytes) {
            Some((client, range)) => access::unlock(client, range),
            // SAFETY: same contract.
            None => unsafe { native::munlock(address, bytes) },
        },
    )
}

/// libc's `syscall`. C passes as many arguments as the call has; all six are taken from where they would
/// be, as libc itself does, and those that were not passed reach nobody who looks at them.
///
/// # Safety
/// That of the system call.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let arguments = [a, b, c, d, e, f];
    if let Some(outcome) = of_memory(number, arguments) {
        return outcome;
    }
    // SAFETY: same contract.
    if let Some(outcome) = unsafe { descriptors::by_number(number, arguments) } {
        return outcome;
    }
    // SAFETY: same contract.
    let go_on = || unsafe { native::syscall(number, arguments) };
    // SAFETY: same contract.
    unsafe { sandbox::by_number(number, arguments, go_on) }.unwrap_or_else(go_on)
}

/// A system call for which there is a function here, while there is managed memory or may be.
fn of_memory(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> Option<c_long> {
    if route::client().is_none() && number != libc::SYS_mmap {
        return None;
    }
    // The upper half of a register that holds an `int` is anything.
    let int = |register: usize| {
        let [a, b, c, d, ..] = register.to_le_bytes();
        c_int::from_le_bytes([a, b, c, d])
    };
    let long = |address: isize| address as c_long;
    let outcome = match number {
        // SAFETY: the arguments are those of the call, and the caller has its contract.
        libc::SYS_madvise => unsafe { madvise(a, b, int(c)) }.into(),
        // SAFETY: as above.
        libc::SYS_munmap => unsafe { munmap(a, b) }.into(),
        // SAFETY: as above.
        libc::SYS_mprotect => unsafe { mprotect(a, b, int(c)) }.into(),
        // SAFETY: as above.
        libc::SYS_pkey_mprotect => unsafe { pkey_mprotect(a, b, int(c), int(d)) }.into(),
        // SAFETY: as above.
        libc::SYS_mlock => unsafe { mlock(a, b) }.into(),
        // SAFETY: as above.
        libc::SYS_mlock2 => unsafe { mlock2(a, b, int(c)) }.into(),
        // SAFETY: as above.
        libc::SYS_mlockall => unsafe { mlockall(int(a)) }.into(),
        // SAFETY: as above.
        libc::SYS_munlockall => unsafe { munlockall() }.into(),
        // SAFETY: as above.
        libc::SYS_munlock => unsafe { munlock(a, b) }.into(),
        // SAFETY: as above.
        libc::SYS_mremap => long(unsafe { mremap(a, b, c, int(d), e) }),
        // SAFETY: as above.
        libc::SYS_mmap => long(unsafe {
            let (access, flags, fd) = (int(c), int(d), int(e));
            map(a, layout::Mapping { bytes: b, access, flags, fd, offset: f })
        }),
        _ => return None,
    };
    Some(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_keep_protection() {
        for access in 0..8 {
            assert_eq!(access_of(flags_of(access)), access);
        }
        assert_eq!(flags_of(libc::PROT_READ | libc::PROT_WRITE), 0, "as malloc gives it");
    }

    /// Nothing is managed in a test: all goes on to the C library.
    #[test]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "a program that maps memory")]
    fn other_memory_is_the_kernels() {
        let page = page_bytes();
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the test's own mapping, which nobody else knows.
        unsafe {
            let at = mmap(0, 2 * page, access, flags, -1, 0).cast_unsigned();
            errno::set(7);
            assert_eq!(mprotect(at, page, libc::PROT_READ), 0);
            assert_eq!(madvise(at, page, libc::MADV_DONTNEED), 0);
            assert_eq!(posix_madvise(at, page, libc::POSIX_MADV_NORMAL), 0);
            assert_eq!(errno::get(), 7, "errno stays as it was");
            assert_eq!(posix_madvise(at + 1, page, libc::POSIX_MADV_NORMAL), libc::EINVAL);
            assert_eq!(errno::get(), 7, "POSIX leaves errno alone");
            assert_eq!(madvise(at + 1, page, libc::MADV_DONTNEED), -1);
            assert_eq!(errno::get(), libc::EINVAL);
            let moved = mremap(at, page, 2 * page, libc::MREMAP_MAYMOVE, 0).cast_unsigned();
            assert_ne!(moved, at);
            assert_eq!(syscall(libc::SYS_munmap, moved, 2 * page, 0, 0, 0, 0), 0);
            assert_eq!(munmap(at + page, page), 0);
            assert_eq!(syscall(libc::SYS_close, usize::MAX, 0, 0, 0, 0, 0), -1);
            assert_eq!(errno::get(), libc::EBADF);
        }
    }
}
