//! Threads that others cancel.
//!
//! A cancelled thread ends at its next call that may wait, and unwinds from there. In the middle of `malloc` it
//! would keep a lock for good; and the frames of this library are not made to be unwound.

/// Keeps this thread from ending as long as it is there. One that was cancelled ends at the program's next call
/// that may wait.
#[derive(Debug)]
pub struct Uncancelled {
    before: libc::c_int,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

const PTHREAD_CANCEL_DISABLE: libc::c_int = 1;

impl Uncancelled {
    /// From here on until this is dropped.
    #[must_use]
    pub fn new() -> Self {
        let mut before = 0;
        // SAFETY: `before` outlives the call, and the state is one of the two that exist.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Default for Uncancelled {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: the state is the one that was in force; where it was goes is not asked.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}
