//! Small blocks, where `TIERMGR_SMALL` asks for them: from jemalloc, whose extents are managed.
//!
//! Until the first of them has connected to the daemon, and for good where there is none, they come from
//! libc. So do those that a thread asks for in the middle of its own fork: between the handlers that stop
//! jemalloc and those that let it go on, whose locks this thread holds then. What it frees there is lost.
//!
//! Most calls need one look: [`serves`] at a size, or [`crate::chunks::look`] at an address. Where these do not
//! know, [`who`] and [`owns`] do.

use crate::errno;
use crate::route::{self, Outcome};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use tiermgr::heap::Owner;
use tiermgr::lock::thread_key;
use tikv_jemalloc_sys as je;

/// Nobody asked for it, or there is no daemon.
const OFF: u8 = 0;
/// The first request connects.
const WAITING: u8 = 1;
const ON: u8 = 2;

static MODE: AtomicU8 = AtomicU8::new(OFF);
/// Key of the thread that forks, or 0.
static FORKER: AtomicUsize = AtomicUsize::new(0);

/// Sizes below come from jemalloc. 0 where more has to be asked, as while a thread forks.
static BELOW: AtomicUsize = AtomicUsize::new(0);

/// Whether jemalloc serves a size, without looking further.
#[inline(always)]
pub(crate) fn serves(bytes: usize) -> bool {
    bytes < BELOW.load(Ordering::Relaxed)
}

/// Whether any thread may use jemalloc: none is in the middle of a fork.
#[inline(always)]
pub(crate) fn is_free_to_use() -> bool {
    FORKER.load(Ordering::Relaxed) == 0
}

/// The daemon may be asked for small blocks from now on.
pub(crate) fn begin() {
    MODE.store(WAITING, Ordering::Release);
}

/// There is a client. Called under the lock under which it was made, which a fork holds too.
pub(crate) fn go_on() {
    if MODE.load(Ordering::Relaxed) == WAITING {
        MODE.store(ON, Ordering::Release);
        if !is_forking() {
            BELOW.store(route::min_size(), Ordering::Release);
        }
    }
}

/// There is no daemon: libc serves small blocks too.
pub(crate) fn give_up() {
    MODE.store(OFF, Ordering::Release);
}

/// Whether small blocks are served here.
pub(crate) fn is_on() -> bool {
    MODE.load(Ordering::Acquire) == ON
}

/// Whether this thread may ask jemalloc something: in the middle of its own fork it has jemalloc's locks already.
pub(crate) fn may_ask() -> bool {
    is_on() && !is_forking()
}

/// Who serves a small request now.
pub(crate) enum Who {
    /// jemalloc.
    Jemalloc,
    /// Nobody: `ENOMEM`.
    Nobody,
    /// The library behind this one.
    Next,
}

/// Who serves a small request of this thread.
#[inline]
pub(crate) fn who() -> Who {
    match MODE.load(Ordering::Acquire) {
        OFF => Who::Next,
        ON if !is_forking() => Who::Jemalloc,
        ON => Who::Next,
        _ => first(),
    }
}

#[cold]
fn first() -> Who {
    let before = errno::get();
    let connected = route::connected();
    errno::set(before);
    match connected {
        Ok(_) if is_forking() => Who::Next,
        Ok(_) => Who::Jemalloc,
        Err(Outcome::Refused) => Who::Nobody,
        Err(_) => Who::Next,
    }
}

#[inline]
fn is_forking() -> bool {
    let forker = FORKER.load(Ordering::Relaxed);
    forker != 0 && forker == thread_key()
}

/// Whether a block is one of jemalloc's.
#[inline]
pub(crate) fn owns(address: usize) -> bool {
    is_on()
        && route::client().is_some_and(|client| client.heap().owner_of(address) == Owner::Extent)
}

/// # Safety
/// A live block for which [`owns`] holds, given up by the caller.
#[inline]
pub(crate) unsafe fn free(block: *mut c_void) {
    if !is_forking() {
        // SAFETY: what lies in extents was given out by jemalloc.
        unsafe { je::free(block) };
    }
}

/// Resizes a block; null where that has to be done by hand.
///
/// # Safety
/// A live block for which [`owns`] holds, given up by the caller if the result is not null.
pub(crate) unsafe fn resize(block: *mut c_void, bytes: usize) -> *mut c_void {
    if is_forking() {
        return std::ptr::null_mut();
    }
    // SAFETY: what lies in extents was given out by jemalloc.
    unsafe { je::realloc(block, bytes) }
}

/// # Safety
/// A live block for which [`owns`] holds.
pub(crate) unsafe fn usable_bytes(block: *mut c_void) -> usize {
    // SAFETY: what lies in extents was given out by jemalloc. It takes no lock for this.
    unsafe { je::malloc_usable_size(block) }
}

/// Before a fork, before the handlers of jemalloc.
pub(crate) fn before_fork() {
    if MODE.load(Ordering::Relaxed) != OFF {
        FORKER.store(thread_key(), Ordering::Relaxed);
        BELOW.store(0, Ordering::Relaxed);
    }
}

/// After a fork, in parent and child, after the handlers of jemalloc.
pub(crate) fn after_fork() {
    FORKER.store(0, Ordering::Relaxed);
    if is_on() {
        BELOW.store(route::min_size(), Ordering::Release);
    }
}
