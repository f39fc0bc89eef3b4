//! Handlers around fork: this library's are the oldest, whoever installs any.
//!
//! Those before a fork run in reverse order. One of a library that installed it before us would run inside of
//! ours, where this thread holds our locks: were it to wait there for a thread that allocates (as each does that
//! takes a mutex under which others allocate), both would wait for ever. With libc's malloc no such thing
//! happens, whose locks are taken last of all. So the call by which everybody installs handlers comes here, and
//! the first one installs ours before its own. Where libc is asked for its own function by name, handlers
//! still run inside of ours.
//!
//! Our locks are then taken while others hold theirs: under ours nobody else's code may be called, an allocator
//! behind us included ([`crate::own`]).

use crate::held_locks;
use crate::libc_next::{self, next};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tiermgr::lock::Guarded;

pub(crate) type Handler = Option<unsafe extern "C" fn()>;

#[derive(Clone, Copy)]
pub(crate) struct Handlers {
    pub(crate) prepare: Handler,
    pub(crate) parent: Handler,
    pub(crate) child: Handler,
}

/// Of this library and of what is linked into it.
const OWN_MAX: usize = 8;

/// The first [`OWN_COUNT`] are written, and change no more.
struct Own(UnsafeCell<[Handlers; OWN_MAX]>);

// SAFETY: `add_own` alone writes, in one thread at a time, and only what nobody reads yet.
unsafe impl Sync for Own {}

static OWN: Own =
    Own(UnsafeCell::new([Handlers { prepare: None, parent: None, child: None }; OWN_MAX]));
static OWN_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Ours are libc's first.
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// Who installs, and who forks: both halves of a fork call the same handlers.
static TURN: Guarded<()> = Guarded::new(());

unsafe extern "C" {
    /// By its address libc knows whose a handler is.
    static __dso_handle: c_void;
}

fn own() -> impl DoubleEndedIterator<Item = Handlers> {
    let count = OWN_COUNT.load(Ordering::Acquire);
    (0..count).map(|index| {
        let first = OWN.0.get().cast::<Handlers>();
        // SAFETY: `count` is at most the length of the array.
        let handlers = unsafe { first.add(index) };
        // SAFETY: it was written before it was counted, and nobody writes it again.
        unsafe { handlers.read() }
    })
}

fn call(handler: Handler) {
    if let Some(handler) = handler {
        // SAFETY: whoever installed it said that it may be called around a fork.
        unsafe { handler() };
    }
}

unsafe extern "C" fn prepare() {
    // A signal handler that interrupts this, and forks, calls the same handlers: nobody else installs meanwhile.
    let _held = TURN.hold_for_fork();
    own().rev().for_each(|handlers| call(handlers.prepare));
}

unsafe extern "C" fn parent() {
    own().for_each(|handlers| call(handlers.parent));
    drop(TURN.end_fork());
}

unsafe extern "C" fn child() {
    own().for_each(|handlers| call(handlers.child));
    drop(TURN.end_fork());
}

fn register(handlers: Handlers, owner: *mut c_void) -> c_int {
    let Handlers { prepare, parent, child } = handlers;
    let register = next().map_or_else(libc_next::register_atfork, |next| next.register_atfork);
    // SAFETY: the contract of this function is that of `__register_atfork`, and what is ours stays loaded.
    unsafe { register(prepare, parent, child, owner) }
}

/// Installs ours, unless they are.
fn install() -> c_int {
    if INSTALLED.load(Ordering::Acquire) {
        return 0;
    }
    // A signal handler that installs something in the middle of this gets in front of us.
    let Some(_turn) = TURN.enter() else { return 0 };
    if INSTALLED.load(Ordering::Acquire) {
        return 0;
    }
    let ours = Handlers { prepare: Some(prepare), parent: Some(parent), child: Some(child) };
    // As nobody's, they stay when the process ends and libc forgets what each library has installed: destructors
    // of others come after that, and may fork.
    let outcome = register(ours, std::ptr::null_mut());
    INSTALLED.store(outcome == 0, Ordering::Release);
    outcome
}

fn add_own(handlers: Handlers) -> c_int {
    let Some(_turn) = TURN.enter() else { return libc::ENOMEM };
    let count = OWN_COUNT.load(Ordering::Relaxed);
    if count == OWN_MAX {
        return libc::ENOMEM;
    }
    let first = OWN.0.get().cast::<Handlers>();
    // SAFETY: `count` is less than the length of the array.
    let free = unsafe { first.add(count) };
    // SAFETY: nobody reads it before it is counted, and no other thread has the turn.
    unsafe { free.write(handlers) };
    OWN_COUNT.store(count + 1, Ordering::Release);
    0
}

/// What `pthread_atfork`, a part of each library and program, calls.
///
/// # Safety
/// pthread_atfork(3), with the library that is to be loaded for as long as the handlers are to be called.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    owner: *mut c_void,
) -> c_int {
    let handlers = Handlers { prepare, parent, child };
    let installed = install();
    if !std::ptr::eq(owner, &raw const __dso_handle) {
        return register(handlers, owner);
    }
    if installed == 0 { add_own(held_locks::guard(handlers)) } else { installed }
}
