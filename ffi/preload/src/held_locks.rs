//! Whether a thread is in the middle of jemalloc, for a fork in a signal handler.
//!
//! jemalloc's own handler takes all its locks before a fork. Where a signal has interrupted it, this thread has some
//! of them already (those of a fork that was interrupted: all), and would wait for itself. So its locks are
//! counted as they are taken and given back, and a fork by a thread that has any leaves jemalloc alone on both
//! sides. The child then goes on where its parent was interrupted, as with libc's malloc: what it has locked it
//! unlocks. What other threads had locked stays so in the child.
//!
//! Forks of one thread nest, since a handler ends those that it began: of those inside of jemalloc the last
//! to begin is the first to end.
//!
//! The count cannot be in thread-local storage of our own, to reach which may allocate: in the middle of
//! jemalloc. Threads have the values of the first keys in their control blocks.

use crate::atfork::Handlers;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// glibc's `PTHREAD_KEY_2NDLEVEL_SIZE`: values of later keys are allocated.
const KEYS_IN_PLACE: libc::pthread_key_t = 32;
const NO_KEY: u32 = u32::MAX;

static KEY: AtomicU32 = AtomicU32::new(NO_KEY);

/// One fork that left jemalloc alone. A lock counts as one.
const FORK: usize = 1 << 32;

unsafe extern "C" {
    fn _rjem_je_jemalloc_prefork();
    fn _rjem_je_jemalloc_postfork_parent();
    fn _rjem_je_jemalloc_postfork_child();
}

/// To be called before jemalloc is used.
pub(crate) fn begin() {
    let mut key = 0;
    // SAFETY: it writes a key; there is nothing to be done with values of threads that end.
    if unsafe { libc::pthread_key_create(&raw mut key, None) } != 0 {
        return;
    }
    if key < KEYS_IN_PLACE {
        KEY.store(key, Ordering::Release);
    } else {
        // Somebody has used them up: such a fork then waits for itself.
        // SAFETY: a key that was just made.
        unsafe { libc::pthread_key_delete(key) };
    }
}

/// The locks that this thread has, and the forks that left jemalloc alone.
fn count() -> usize {
    let key = KEY.load(Ordering::Relaxed);
    if key == NO_KEY {
        return 0;
    }
    // SAFETY: the key is never deleted.
    unsafe { libc::pthread_getspecific(key) as usize }
}

/// A signal handler in the middle of this leaves the count as it found it.
fn set_count(count: usize) {
    let key = KEY.load(Ordering::Relaxed);
    if key != NO_KEY {
        // SAFETY: the key is never deleted. With one this low it cannot fail.
        unsafe { libc::pthread_setspecific(key, ptr::without_provenance::<c_void>(count)) };
    }
}

/// jemalloc's handlers, or others as they are.
pub(crate) fn guard(handlers: Handlers) -> Handlers {
    let prefork: unsafe extern "C" fn() = _rjem_je_jemalloc_prefork;
    if handlers.prepare.is_some_and(|prepare| ptr::fn_addr_eq(prepare, prefork)) {
        Handlers { prepare: Some(prepare), parent: Some(parent), child: Some(child) }
    } else {
        handlers
    }
}

unsafe extern "C" fn prepare() {
    let count = count();
    if count != 0 {
        set_count(count + FORK);
    } else {
        // SAFETY: a fork begins, and this thread has none of the locks.
        unsafe { _rjem_je_jemalloc_prefork() };
    }
}

/// Whether jemalloc was left alone before this fork.
fn was_left_alone() -> bool {
    let count = count();
    if count >= FORK {
        set_count(count - FORK);
    }
    count >= FORK
}

unsafe extern "C" fn parent() {
    if !was_left_alone() {
        // SAFETY: `prepare` has called its counterpart.
        unsafe { _rjem_je_jemalloc_postfork_parent() };
    }
}

unsafe extern "C" fn child() {
    if !was_left_alone() {
        // SAFETY: `prepare` has called its counterpart.
        unsafe { _rjem_je_jemalloc_postfork_child() };
        // Its locks were made anew, and not unlocked.
        set_count(0);
    }
}

/// What jemalloc calls in place of libc's functions (`build.rs`). Nobody else here has mutexes of this kind.
#[cfg(not(test))]
mod wrapped {
    use super::{count, set_count};
    use libc::pthread_mutex_t;
    use std::ffi::c_int;

    unsafe extern "C" {
        fn __real_pthread_mutex_lock(mutex: *mut pthread_mutex_t) -> c_int;
        fn __real_pthread_mutex_trylock(mutex: *mut pthread_mutex_t) -> c_int;
        fn __real_pthread_mutex_unlock(mutex: *mut pthread_mutex_t) -> c_int;
    }

    fn add() {
        set_count(count() + 1);
    }

    fn subtract() {
        // Without a key nothing is counted.
        set_count(count().saturating_sub(1));
    }

    // By jumps, as names that Rust exports are exported to the program, too.
    macro_rules! wrapped {
        ($jump:literal) => {
            std::arch::global_asm!(
                ".text",
                ".globl __wrap_pthread_mutex_lock",
                "__wrap_pthread_mutex_lock:",
                concat!($jump, " {lock}"),
                ".globl __wrap_pthread_mutex_trylock",
                "__wrap_pthread_mutex_trylock:",
                concat!($jump, " {trylock}"),
                ".globl __wrap_pthread_mutex_unlock",
                "__wrap_pthread_mutex_unlock:",
                concat!($jump, " {unlock}"),
                lock = sym lock,
                trylock = sym trylock,
                unlock = sym unlock,
            );
        };
    }
    #[cfg(target_arch = "x86_64")]
    wrapped!("jmp");
    #[cfg(target_arch = "aarch64")]
    wrapped!("b");

    fn counted(lock: impl FnOnce() -> c_int) -> c_int {
        // Counted first: from the next instruction on a signal handler may find it locked.
        add();
        let outcome = lock();
        if outcome != 0 {
            subtract();
        }
        outcome
    }

    /// # Safety
    /// pthread_mutex_lock(3).
    unsafe extern "C" fn lock(mutex: *mut pthread_mutex_t) -> c_int {
        // SAFETY: by contract.
        counted(|| unsafe { __real_pthread_mutex_lock(mutex) })
    }

    /// # Safety
    /// pthread_mutex_trylock(3).
    unsafe extern "C" fn trylock(mutex: *mut pthread_mutex_t) -> c_int {
        // SAFETY: by contract.
        counted(|| unsafe { __real_pthread_mutex_trylock(mutex) })
    }

    /// # Safety
    /// pthread_mutex_unlock(3).
    unsafe extern "C" fn unlock(mutex: *mut pthread_mutex_t) -> c_int {
        // SAFETY: by contract.
        let outcome = unsafe { __real_pthread_mutex_unlock(mutex) };
        subtract();
        outcome
    }
}
