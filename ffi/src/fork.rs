//! Clients across fork.
//!
//! Before a fork its thread takes all locks of all clients, so that the child's copy is whole. The
//! child drops what is the parent's (the connection, limbo, the helper) and joins the family on a
//! connection of its own, before fork returns there: only then has it a helper, and pages that can
//! leave memory. Where it runs another program at once, the helper ends with that.
//!
//! vfork, posix_spawn and raw clone do not come here.

use crate::client::Client;
use crate::fds;
use crate::sandbox::{self, Deed};
use crate::status::{Error, Result, Status};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

/// Clients of one process.
pub const CLIENTS_MAX: usize = 16;

static FOLLOWED: [AtomicPtr<Client>; CLIENTS_MAX] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; CLIENTS_MAX];
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// The process, a child, that has joined since the last `prepare`. One that a signal handler has made in the middle of
/// the child's half of a fork, and that returns from the handler, ends that half as well; one that was made in the
/// middle of another half goes on to fork, and has a child that is still to join.
static JOINED_AS: AtomicI32 = AtomicI32::new(NOBODY);
const NOBODY: i32 = 0;

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> libc::c_int;
}

/// Has the handlers called from now on. Best as early as possible: of all `prepare` handlers those
/// installed first run last, and those of others may still allocate.
///
/// # Errors
/// `NoMemory`.
pub fn install() -> Result<()> {
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return Ok(());
    }
    call_around(prepare, parent, child).inspect_err(|_| INSTALLED.store(false, Ordering::Release))
}

/// Has functions of this library called around every fork: before it, and after it in parent and child.
///
/// # Errors
/// `NoMemory`.
pub fn call_around(
    prepare: extern "C" fn(),
    parent: extern "C" fn(),
    child: extern "C" fn(),
) -> Result<()> {
    // SAFETY: the functions stay: glibc forgets handlers of a library when it unloads it.
    let outcome = unsafe { pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    if outcome == 0 {
        return Ok(());
    }
    Err(Error::new(Status::NoMemory, "the C library has no room for a fork handler"))
}

/// Enters a client into the list; false if that is full.
pub(crate) fn follow(client: &Client) -> bool {
    let entry = (&raw const *client).cast_mut();
    FOLLOWED.iter().any(|slot| {
        slot.compare_exchange(std::ptr::null_mut(), entry, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    })
}

/// Takes a client off the list. It lives on until no handler can have seen it.
pub(crate) fn forget(client: &Client) {
    let entry = (&raw const *client).cast_mut();
    for slot in &FOLLOWED {
        let _was_there = slot
            .compare_exchange(entry, std::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
    }
}

fn followed() -> impl Iterator<Item = &'static Client> {
    FOLLOWED.iter().filter_map(|slot| {
        let client = slot.load(Ordering::Acquire);
        // SAFETY: entries are live clients: one that ends or is dropped is taken off the list before,
        // and by contract no other thread is in the library, fork included, meanwhile.
        unsafe { client.as_ref() }
    })
}

extern "C" fn prepare() {
    JOINED_AS.store(NOBODY, Ordering::Relaxed);
    for client in followed() {
        client.hold_for_fork();
    }
}

extern "C" fn parent() {
    for client in followed() {
        client.release_after_fork();
    }
}

extern "C" fn child() {
    fds::note_fork();
    if !sandbox::may(Deed::Leave) {
        // It cannot join either, and what it has of its parent stays as it is.
        for client in followed() {
            client.release_after_fork();
        }
        return;
    }
    let pid = fds::own_pid();
    let has_joined = JOINED_AS.swap(pid, Ordering::Relaxed) == pid;
    for client in followed() {
        if !has_joined && fds::own_pid() == pid {
            client.join_family_after_fork();
        }
        client.release_after_fork();
    }
}
