//! Protection and locks.

use super::native::{self, Errno};
use super::{Outcome, Whose, change, flags_of, is_locked, leave_unless, whose};
use std::ffi::c_int;
use std::ops::Range;
use tiermgr::changes::{GUARDED, KEYED, LOCKED, PROTECTION, UNSURE};
use tiermgr::client::Client;
use tiermgr::sandbox::Deed;

/// The part of a range before the first page that the program has unmapped. The kernel stops there, too.
fn up_to_hole(client: &Client, range: &Range<usize>) -> (Range<usize>, Outcome) {
    let holes = client.heap().runs(range.clone(), |flags| whose(flags) == Whose::Nobodys);
    match holes.into_iter().find(|run| run.kind) {
        Some(hole) => (range.start..hole.range.start, Err(libc::ENOMEM)),
        None => (range.clone(), Ok(0)),
    }
}

/// mprotect and, with a key, pkey_mprotect.
pub(super) fn protect(
    client: &Client,
    range: Range<usize>,
    access: c_int,
    key: Option<c_int>,
) -> Outcome {
    let (range, at_end) = up_to_hole(client, &range);
    // A key of -1 is none.
    let keyed = if key.is_some_and(|key| key != -1) { KEYED } else { 0 };
    // Should the kernel change part of it and then fail, nobody knows what is where.
    change(client, &range, UNSURE, 0)?;
    protect_but_guards(client, &range, access, key).inspect_err(|&why| {
        // Of what makes no sense it does nothing.
        if why == libc::EINVAL {
            // Clearing never fails.
            let _cleared = change(client, &range, 0, UNSURE).is_ok();
        }
    })?;
    let kept = if key.is_some() { 0 } else { KEYED };
    change(client, &range, flags_of(access) | keyed, PROTECTION & !kept)?;
    at_end
}

fn protect_but_guards(
    client: &Client,
    range: &Range<usize>,
    access: c_int,
    key: Option<c_int>,
) -> Result<(), Errno> {
    let guarded = |flags| flags & GUARDED != 0;
    let mut at = range.start;
    // A guard outlives a change of protection, which takes effect when it is removed.
    let runs = client.heap().runs(range.clone(), guarded);
    for guard in runs.filter(|run| run.kind) {
        protect_natively(&(at..guard.range.start), access, key)?;
        at = guard.range.end;
    }
    protect_natively(&(at..range.end), access, key)
}

fn protect_natively(range: &Range<usize>, access: c_int, key: Option<c_int>) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    let outcome = match key {
        // SAFETY: the program asked for it.
        Some(key) => unsafe { native::pkey_mprotect(range.start, range.len(), access, key) },
        // SAFETY: as above.
        None => unsafe { native::mprotect(range.start, range.len(), access) },
    };
    outcome.map(|_zero| ())
}

/// mlock and, with flags, mlock2.
pub(super) fn lock(client: &Client, range: Range<usize>, flags: Option<c_int>) -> Outcome {
    let (range, at_end) = up_to_hole(client, &range);
    // Before: a signal handler may come in between.
    change(client, &range, LOCKED, 0)?;
    if !range.is_empty() {
        let outcome = match flags {
            // SAFETY: a lock changes no byte.
            Some(flags) => unsafe { native::mlock2(range.start, range.len(), flags) },
            // SAFETY: as above.
            None => unsafe { native::mlock(range.start, range.len()) },
        };
        outcome.inspect_err(|_| forget_lock_unless_held(client, &range))?;
    }
    at_end
}

/// Whether a range is locked that was not locked as it was asked, the kernel knows: beyond a limit nothing is, where
/// pages could not be brought in all of it may be, and another thread may have locked it anew.
pub(super) fn forget_lock_unless_held(client: &Client, range: &Range<usize>) {
    if leave_unless(Deed::Advise).is_ok() && !is_locked(range) {
        // Clearing never fails.
        let _cleared = change(client, range, 0, LOCKED).is_ok();
    }
}

/// After munlockall.
pub(super) fn note_all_unlocked(client: &Client) {
    for range in client.heap().changed(LOCKED) {
        forget_lock_unless_held(client, &range);
    }
}

/// munlock.
pub(super) fn unlock(client: &Client, range: Range<usize>) -> Outcome {
    let (range, at_end) = up_to_hole(client, &range);
    if !range.is_empty() {
        // SAFETY: a lock changes no byte.
        unsafe { native::munlock(range.start, range.len()) }?;
        change(client, &range, 0, LOCKED)?;
    }
    at_end
}
