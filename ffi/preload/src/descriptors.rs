//! Keeps the program from closing our descriptors.
//!
//! Daemons and shells close every number that they did not open. Such calls succeed and leave ours
//! open, as if there were none. `dup2` and `dup3` onto one of ours fail with `EBUSY`, the errno that
//! the manual has for a number which is taken at the moment. In the child of a vfork, and of a raw
//! clone, the descriptors are copies that nobody needs, and the calls go through.

use crate::errno;
use crate::libc_next::next;
use std::ffi::{c_int, c_uint};
use tiermgr::fds;

fn missing() -> c_int {
    errno::set(libc::ENOSYS);
    -1
}

/// # Safety
/// close(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close(fd: c_int) -> c_int {
    if fds::is_ours(fd) {
        return 0;
    }
    // SAFETY: the next function has the contract of this one.
    next().map_or_else(missing, |next| unsafe { (next.close)(fd) })
}

/// # Safety
/// dup2(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if fds::is_ours(new) {
        errno::set(libc::EBUSY);
        return -1;
    }
    // SAFETY: the next function has the contract of this one.
    next().map_or_else(missing, |next| unsafe { (next.dup2)(old, new) })
}

/// # Safety
/// dup3(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if fds::is_ours(new) {
        errno::set(libc::EBUSY);
        return -1;
    }
    // SAFETY: the next function has the contract of this one.
    next().map_or_else(missing, |next| unsafe { (next.dup3)(old, new, flags) })
}

/// # Safety
/// close_range(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOEXEC: c_int = 4;
    // Ours are close-on-exec in any case.
    if flags & CLOEXEC != 0 || first > last {
        return kernel_close_range(first, last, flags);
    }
    let mut from = first;
    loop {
        let Some(ours) = c_int::try_from(from)
            .ok()
            .and_then(fds::next_ours)
            .and_then(|ours| c_uint::try_from(ours).ok())
            .filter(|&ours| ours <= last)
        else {
            return kernel_close_range(from, last, flags);
        };
        if ours > from {
            let outcome = kernel_close_range(from, ours - 1, flags);
            if outcome != 0 {
                return outcome;
            }
        }
        if ours == last {
            return 0;
        }
        from = ours + 1;
    }
}

/// # Safety
/// closefrom(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn closefrom(first: c_int) {
    let first = c_uint::try_from(first).unwrap_or(0);
    // SAFETY: same contract.
    unsafe { close_range(first, c_uint::MAX, 0) };
}

fn kernel_close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: the caller of the interposed function answers for what is closed.
    let outcome = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    if outcome == 0 { 0 } else { -1 }
}
