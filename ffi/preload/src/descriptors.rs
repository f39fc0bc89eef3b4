//! Keeps the program from closing our descriptors.
//!
//! Daemons and shells close every number that they did not open. Such calls succeed and leave ours
//! open, as if there were none. `dup2` and `dup3` onto one of ours fail with `EBUSY`, the errno that
//! the manual has for a number which is taken at the moment. In the child of a vfork, and of a raw
//! clone, the descriptors are copies that nobody needs, and the calls go through.

use crate::errno;
use crate::libc_next::next;
use std::ffi::{c_int, c_long, c_uint};
use syscalls::{Sysno, raw};
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
    let from = c_uint::try_from(first).unwrap_or(0);
    let before = errno::get();
    // SAFETY: same contract.
    if unsafe { close_range(from, c_uint::MAX, 0) } != 0 {
        // A sandbox that does not know the call.
        for fd in first.max(0)..numbers_max() {
            // SAFETY: same contract.
            unsafe { close(fd) };
        }
        errno::set(before);
    }
}

/// More numbers than the limit allows are not open, unless it was lowered; then those below 65536 may be.
fn numbers_max() -> c_int {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one `rlimit`.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    let allowed = if known { c_int::try_from(limit.rlim_cur).unwrap_or(c_int::MAX) } else { 0 };
    allowed.clamp(1 << 16, 1 << 20)
}

fn kernel_close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let [first, last] = [first, last].map(|number| number as usize);
    // Not by libc's `syscall`, in front of which this library stands.
    // SAFETY: the caller of the interposed function answers for what is closed.
    let result = unsafe {
        raw::syscall3(Sysno::close_range as usize, first, last, flags.unsigned_abs() as usize)
    };
    match result.cast_signed() {
        error @ -4095..=-1 => {
            errno::set(c_int::try_from(-error).unwrap_or(libc::EINVAL));
            -1
        }
        _ => 0,
    }
}

/// The same by libc's `syscall`, where that would reach one of ours.
///
/// # Safety
/// That of the system call.
pub(crate) unsafe fn by_number(number: c_long, [a, b, c, ..]: [usize; 6]) -> Option<c_long> {
    // The upper half of a register that holds an `int` is anything.
    let low = |register: usize| {
        let [a, b, c, d, ..] = register.to_le_bytes();
        c_uint::from_le_bytes([a, b, c, d])
    };
    let int = |register| low(register).cast_signed();
    let outcome = match number {
        // SAFETY: the arguments are those of the call, and the caller has its contract.
        libc::SYS_close if fds::is_ours(int(a)) => unsafe { close(int(a)) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        libc::SYS_dup2 if fds::is_ours(int(b)) => unsafe { dup2(int(a), int(b)) },
        // SAFETY: as above.
        libc::SYS_dup3 if fds::is_ours(int(b)) => unsafe { dup3(int(a), int(b), int(c)) },
        // SAFETY: as above.
        libc::SYS_close_range => unsafe { close_range(low(a), low(b), int(c)) },
        _ => return None,
    };
    Some(outcome.into())
}
