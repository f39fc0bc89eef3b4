//! `prctl` and `seccomp`, in front of libc's: which filters the program installs is to be known
//! ([`tiermgr::sandbox`]).

use crate::errno;
use crate::libc_next::next;
use std::ffi::{c_int, c_long, c_ulong};
use tiermgr::sandbox::{Filter, around};

/// The arguments behind the first are there as far as the option has some; the others reach nobody who looks
/// at them.
///
/// # Safety
/// prctl(2).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn prctl(
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    let Some(next) = next() else {
        errno::set(libc::ENOSYS);
        return -1;
    };
    // SAFETY: same contract.
    let go_on = || unsafe { (next.prctl)(option, a, b, c, d) };
    if option != libc::PR_SET_SECCOMP {
        return go_on();
    }
    // SAFETY: by contract `b` is what this mode takes.
    match unsafe { filter(a, b) } {
        Some(filter) => c_int::try_from(around(filter, || c_long::from(go_on()))).unwrap_or(-1),
        None => go_on(),
    }
}

/// What is to be installed; `None` for what the kernel will refuse.
///
/// # Safety
/// For a filter, `program` is null or the address of a `sock_fprog`.
unsafe fn filter<'a>(mode: c_ulong, program: c_ulong) -> Option<Filter<'a>> {
    match u32::try_from(mode).ok()? {
        libc::SECCOMP_MODE_STRICT => Some(Filter::Strict),
        libc::SECCOMP_MODE_FILTER => {
            let program = std::ptr::with_exposed_provenance::<libc::sock_fprog>(
                usize::try_from(program).ok()?,
            );
            // SAFETY: by contract.
            let program = unsafe { program.as_ref() }?;
            if program.filter.is_null() {
                return None;
            }
            // SAFETY: by contract it has as many steps as it says.
            Some(Filter::Program(unsafe {
                std::slice::from_raw_parts(program.filter, usize::from(program.len))
            }))
        }
        _ => None,
    }
}

/// The same by libc's `syscall`.
///
/// # Safety
/// That of the system call.
pub(crate) unsafe fn by_number(
    number: c_long,
    [a, b, c, ..]: [usize; 6],
    go_on: impl FnOnce() -> c_long,
) -> Option<c_long> {
    let as_mode = |operation: usize| match u32::try_from(operation) {
        Ok(libc::SECCOMP_SET_MODE_STRICT) => libc::SECCOMP_MODE_STRICT,
        Ok(libc::SECCOMP_SET_MODE_FILTER) => libc::SECCOMP_MODE_FILTER,
        _ => 0,
    };
    let (mode, flags, program) = match number {
        libc::SYS_seccomp => (as_mode(a), b as c_ulong, c),
        libc::SYS_prctl if a == libc::PR_SET_SECCOMP as usize => {
            (u32::try_from(b).unwrap_or(0), 0, c)
        }
        _ => return None,
    };
    // SAFETY: by contract the third argument is what this operation takes.
    let filter = unsafe { filter(mode.into(), program as c_ulong) }?;
    let filter = match filter {
        Filter::Program(steps) if flags & libc::SECCOMP_FILTER_FLAG_TSYNC != 0 => {
            Filter::ForAll(steps)
        }
        other => other,
    };
    // With this flag no thread's number is told: what there is is a descriptor.
    let tells_no_thread = flags & libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH != 0;
    let mut told = 0;
    let outcome = around(filter, || {
        told = go_on();
        if tells_no_thread { told.min(0) } else { told }
    });
    Some(if tells_no_thread { told } else { outcome })
}
