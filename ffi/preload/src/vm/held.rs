//! Memory of which a forked child is to see zeros, or nothing (`MADV_WIPEONFORK`, `MADV_DONTFORK`).
//!
//! The kernel does that, to pages that are in their place; of one that is parked it knows nothing, and the
//! child would get it as any other. So such memory is held under a lease as long as it is so.

use super::layout::retire;
use super::native::{self, Errno};
use super::{Whose, change, errno_of, leave_unless, whose};
use crate::log;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use tiermgr::changes::{
    Flags, GUARDED, KEYED, MAPPED, NO_READ, NO_WRITE, NOT_FORKED, REPLACED, TAKEN, UNMAPPED,
    UNSURE, WIPED,
};
use tiermgr::client::Client;
use tiermgr::fork;
use tiermgr::lock::Guarded;
use tiermgr::sandbox::Deed;
use tiermgr::space::page_bytes;
use tiermgr::status::{Result, Status};

/// Leases at once.
const HOLDS_MAX: usize = 64;

#[derive(Clone, Copy)]
struct Hold {
    start: usize,
    end: usize,
    lease: u64,
}

static HOLDS: Guarded<[Option<Hold>; HOLDS_MAX]> = Guarded::new([None; HOLDS_MAX]);

/// Brings a managed range in and holds it.
pub(super) fn hold(client: &Client, range: &Range<usize>) -> std::result::Result<(), Errno> {
    let lease = client.pin(range.start, range.len()).map_err(|error| match error.status {
        Status::NoRoom | Status::NoMemory => libc::ENOMEM,
        Status::DataLost => libc::EIO,
        _ => errno_of(&error),
    })?;
    for run in client.heap().runs(range.clone(), writable) {
        match run.kind {
            Writable::No => {}
            Writable::Yes => write_to_each_page(&run.range),
            Writable::Perhaps => {
                let mut pages = run.range.step_by(page_bytes());
                if !pages.all(kernel_writes_to) {
                    end(client, lease);
                    return Err(libc::EACCES);
                }
            }
        }
    }
    let kept = HOLDS.enter().and_then(|mut holds| {
        let free = holds.iter_mut().find(|hold| hold.is_none())?;
        *free = Some(Hold { start: range.start, end: range.end, lease });
        Some(())
    });
    kept.ok_or_else(|| {
        end(client, lease);
        libc::ENOMEM
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Writable {
    No,
    Yes,
    /// The rights of a thread to what has a key are its own, and change by an instruction.
    Perhaps,
}

const fn writable(flags: Flags) -> Writable {
    if flags & (NO_READ | NO_WRITE | GUARDED | REPLACED | UNMAPPED) != 0 {
        Writable::No
    } else if flags & (KEYED | UNSURE) != 0 {
        Writable::Perhaps
    } else {
        Writable::Yes
    }
}

/// A page that was read back has a copy in the store until the first write. The child, whose page is
/// another one, must not be given that.
fn write_to_each_page(range: &Range<usize>) {
    for page in range.clone().step_by(page_bytes()) {
        // SAFETY: a byte of memory that the program can read and write, and which others change by atomic
        // means or at their own risk.
        let byte = unsafe { AtomicU8::from_ptr(page as *mut u8) };
        let value = byte.load(Ordering::Relaxed);
        // Also where another thread was faster the page has been written to.
        let _same =
            byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    }
}

/// As [`write_to_each_page`], by the kernel, to which a page that this thread may not write to is an error and no
/// signal.
fn kernel_writes_to(page: usize) -> bool {
    const OR_ZERO: u32 = (libc::FUTEX_OP_OR as u32) << 28;
    let nobody_waits_here = 0_u32;
    // SAFETY: it wakes nobody at the first address, and whoever sleeps at the second may be woken for nothing. There
    // it sets no bit, by atomic means, or fails.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_futex,
            &raw const nobody_waits_here,
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0,
            0_usize,
            page,
            OR_ZERO,
        )
    };
    outcome >= 0
}

fn end(client: &Client, lease: u64) {
    if let Err(error) = client.unpin(lease) {
        log::info(format_args!("memory stays held until the process ends: {error}"));
    }
}

/// Ends the leases of which nothing is wanted any more.
pub(super) fn release(client: &Client) {
    let wanted = |flags: Flags| flags & (WIPED | NOT_FORKED) != 0;
    loop {
        let unused = HOLDS.enter().and_then(|mut holds| {
            let unused = holds.iter_mut().find(|hold| {
                hold.is_some_and(|hold| {
                    !client.heap().runs(hold.start..hold.end, wanted).any(|run| run.kind)
                })
            })?;
            unused.take()
        });
        match unused {
            Some(Hold { lease, .. }) => end(client, lease),
            None => return,
        }
    }
}

extern "C" fn before_fork() {
    let _held = HOLDS.hold_for_fork();
}

extern "C" fn after_fork() {
    drop(HOLDS.end_fork());
}

extern "C" fn nothing() {}

/// Before anything is mapped in the child.
extern "C" fn first_in_child() {
    if let Some(client) = crate::route::client() {
        close_what_was_not_forked(client);
    }
    after_fork();
}

extern "C" fn in_child() {
    if let Some(client) = crate::route::client() {
        hold_anew(client);
    }
}

/// What the child did not get is not managed there. It is mapped without access at once, so that nothing
/// else comes to lie in an arena. Of what the program has put into one nobody knows whether the child got it.
fn close_what_was_not_forked(client: &Client) {
    let kind = |flags: Flags| flags & (NOT_FORKED | REPLACED | UNMAPPED);
    for range in client.heap().changed(NOT_FORKED | REPLACED) {
        for run in client.heap().runs(range, kind) {
            if run.kind & NOT_FORKED != 0 {
                close_hole(client, &run.range);
            } else if run.kind & UNMAPPED == 0 && may_have_holes(&run.range) {
                close_holes(client, &run.range, &may_have_holes);
            }
        }
    }
}

/// Only in a forked child.
fn may_have_holes(range: &Range<usize>) -> bool {
    if leave_unless(Deed::Advise).is_err() {
        return true;
    }
    // What it got is forked anyway, so this changes nothing; and it fails where nothing is mapped.
    // SAFETY: it changes no byte.
    unsafe { native::madvise(range.start, range.len(), libc::MADV_DOFORK) }.is_err()
}

/// Of a part of an arena where nothing is mapped any more: maps there what has no access.
pub(super) fn close_hole(client: &Client, range: &Range<usize>) {
    close_holes(client, range, &|_| true);
}

/// The same where something is mapped in places: half by half, as far as there are holes.
fn close_holes(client: &Client, range: &Range<usize>, has_holes: &impl Fn(&Range<usize>) -> bool) {
    let flags =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: it replaces nothing.
    let map = || unsafe { native::mmap(range.start, range.len(), libc::PROT_NONE, flags, -1, 0) };
    let held = leave_unless(Deed::Map).and_then(|()| map());
    let pages = range.len() / page_bytes();
    if held == Err(libc::EEXIST) && pages > 1 {
        let middle = range.start + pages / 2 * page_bytes();
        for half in [range.start..middle, middle..range.end] {
            if has_holes(&half) {
                close_holes(client, &half, has_holes);
            }
        }
        return;
    }
    // Where somebody was faster, or there is no memory for it, the range is theirs.
    let now = if held.is_ok() { REPLACED | UNMAPPED } else { REPLACED | TAKEN };
    for run in client.heap().runs(range.clone(), |flags| flags & MAPPED) {
        retire(client, &run.range, run.kind);
    }
    // The pages have flags already, and so a table: this never fails.
    let _changed = change(client, range, now, !now).is_ok();
}

/// Leases are the parent's alone. Without them what the child writes to wiped memory could be parked, and
/// its own children would find it.
fn hold_anew(client: &Client) {
    let Some(mut holds) = HOLDS.enter() else { return };
    for slot in holds.iter_mut() {
        let Some(hold) = slot else { continue };
        let wiped = |flags: Flags| flags & WIPED != 0 && whose(flags) == Whose::Ours;
        let range = hold.start..hold.end;
        let outcome = match client.heap().runs(range, wiped).find(|run| run.kind) {
            Some(_) => client.pin(hold.start, hold.end - hold.start).map(Some),
            None => Ok(None),
        };
        *slot = renewed(*hold, outcome);
    }
}

fn renewed(hold: Hold, outcome: Result<Option<u64>>) -> Option<Hold> {
    match outcome {
        Ok(lease) => lease.map(|lease| Hold { lease, ..hold }),
        Err(error) => {
            log::warn(format_args!(
                "memory under MADV_WIPEONFORK is not held in a forked child, whose own children may find \
                 its bytes there: {error}"
            ));
            None
        }
    }
}

/// Keeps the lock across forks, and closes holes in the child. To be called before all others that do so: of
/// `prepare` handlers the first is called last, and whoever has this lock waits for no other; of the child's it
/// is called first, and the others map memory.
///
/// # Errors
/// `NoMemory`.
pub(crate) fn keep_lock_across_forks() -> Result<()> {
    fork::call_around(before_fork, after_fork, first_in_child)
}

/// Follows forks. To be called after the client's handlers are installed: the child asks the daemon.
///
/// # Errors
/// `NoMemory`.
pub(crate) fn follow_forks() -> Result<()> {
    fork::call_around(nothing, nothing, in_child)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_writes_where_this_thread_may_and_changes_nothing() {
        let bytes = page_bytes();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        for (access, is_written) in [
            (libc::PROT_READ | libc::PROT_WRITE, true),
            (libc::PROT_READ, false),
            (libc::PROT_NONE, false),
        ] {
            // SAFETY: a new mapping at an address of the kernel's choice.
            let page = unsafe { native::mmap(0, bytes, access, flags, -1, 0) }.expect("a page");
            assert_eq!(kernel_writes_to(page), is_written);
            // SAFETY: nobody else knows it.
            unsafe { native::munmap(page, bytes) }.expect("mapped above");
        }
        let mut words = [7_u32, 8];
        assert!(kernel_writes_to((&raw mut words).addr()));
        assert_eq!(words, [7, 8]);
    }
}
