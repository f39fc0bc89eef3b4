//! This thread's errno: whoever asked for memory finds it as it was.

use std::ffi::c_int;

fn location() -> *mut c_int {
    // SAFETY: it has no preconditions, and gives the address of this thread's errno.
    unsafe { libc::__errno_location() }
}

/// The value.
pub(crate) fn get() -> c_int {
    // SAFETY: `location` is valid for this thread as long as it runs.
    unsafe { location().read() }
}

/// Changes the value.
pub(crate) fn set(value: c_int) {
    // SAFETY: `location` is valid for this thread as long as it runs.
    unsafe { location().write(value) }
}
