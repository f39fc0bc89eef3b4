//! madvise.

use super::held::{hold, release};
use super::native::{self, Errno};
use super::{
    Outcome, Whose, access_of, change, drop_bytes, is_locked, leave_unless, parts, try_drop_bytes,
};
use std::ffi::c_int;
use std::ops::Range;
use tiermgr::changes::{ADVISED, Flags, GUARDED, LOCKED, NOT_DUMPED, NOT_FORKED, WIPED};
use tiermgr::client::Client;
use tiermgr::sandbox::Deed;

const DONTNEED_LOCKED: c_int = 24;
const GUARD_INSTALL: c_int = 102;
const GUARD_REMOVE: c_int = 103;
/// Numbers of `tiermgr_advice`.
const HINT_NORMAL: i32 = 0;
const HINT_WILLNEED: i32 = 1;
const HINT_COLD: i32 = 2;
const HINT_SEQUENTIAL: i32 = 3;
const HINT_RANDOM: i32 = 4;

/// As the kernel does: parts that are not mapped are passed over, and told of at the end.
pub(super) fn madvise(client: &Client, range: Range<usize>, advice: c_int) -> Outcome {
    let mut has_holes = false;
    for (part, whose) in parts(client, range) {
        let outcome = match whose {
            Whose::Ours => of_ours(client, &part, advice),
            Whose::Nobodys => Err(libc::ENOMEM),
            Whose::Foreign => native(&part, advice),
        };
        match outcome {
            Ok(()) => {}
            Err(libc::ENOMEM) => has_holes = true,
            Err(why) => return Err(why),
        }
    }
    if has_holes { Err(libc::ENOMEM) } else { Ok(0) }
}

fn native(range: &Range<usize>, advice: c_int) -> Result<(), Errno> {
    // SAFETY: the program asked for it, or it undoes what the program had asked for.
    unsafe { native::madvise(range.start, range.len(), advice) }.map(|_zero| ())
}

fn of_ours(client: &Client, range: &Range<usize>, advice: c_int) -> Result<(), Errno> {
    match advice {
        libc::MADV_DONTNEED | DONTNEED_LOCKED => drop_bytes(client, range),
        libc::MADV_FREE => match try_drop_bytes(client, range) {
            // The bytes may go at any time from now on, or never.
            Err(why) if why == libc::EAGAIN || !is_locked(range) => Ok(()),
            outcome => outcome,
        },
        GUARD_INSTALL => guard(client, range),
        GUARD_REMOVE => unguard(client, range),
        libc::MADV_WIPEONFORK => hold_for(client, range, advice, WIPED),
        libc::MADV_DONTFORK => hold_for(client, range, advice, NOT_FORKED),
        libc::MADV_KEEPONFORK => let_go(client, range, advice, WIPED),
        libc::MADV_DOFORK => let_go(client, range, advice, NOT_FORKED),
        libc::MADV_COLD | libc::MADV_PAGEOUT if is_locked(range) => Err(libc::EINVAL),
        libc::MADV_COLD | libc::MADV_PAGEOUT => hint(client, range, HINT_COLD),
        libc::MADV_WILLNEED => hint(client, range, HINT_WILLNEED),
        libc::MADV_NORMAL => hint(client, range, HINT_NORMAL),
        libc::MADV_SEQUENTIAL => hint(client, range, HINT_SEQUENTIAL),
        libc::MADV_RANDOM => hint(client, range, HINT_RANDOM),
        libc::MADV_DONTDUMP => {
            change(client, range, ADVISED | NOT_DUMPED, 0)?;
            native(range, advice)
        }
        libc::MADV_DODUMP => {
            native(range, advice)?;
            change(client, range, 0, NOT_DUMPED)
        }
        libc::MADV_HUGEPAGE
        | libc::MADV_NOHUGEPAGE
        | libc::MADV_MERGEABLE
        | libc::MADV_UNMERGEABLE => {
            change(client, range, ADVISED, 0)?;
            native(range, advice)
        }
        // None of these changes a byte, and MADV_REMOVE is refused, as on all private memory.
        _ => native(range, advice),
    }
}

/// Takes back what advice has set for good: the kernel makes a mapping of its own of each part that differs.
pub(super) fn advise_as_usual(range: &Range<usize>, flags: Flags) {
    if flags & ADVISED != 0 && leave_unless(Deed::Advise).is_ok() {
        for advice in [libc::MADV_UNMERGEABLE, libc::MADV_DODUMP, libc::MADV_HUGEPAGE] {
            // Where the kernel does not know it nothing was set either.
            let _undone = native(range, advice).is_ok();
        }
    }
}

fn hint(client: &Client, range: &Range<usize>, advice: i32) -> Result<(), Errno> {
    client.hint(range.start, range.len(), advice);
    Ok(())
}

/// The parts of a managed range with the same flags.
fn by_flags(client: &Client, range: &Range<usize>) -> impl Iterator<Item = (Range<usize>, Flags)> {
    client.heap().runs(range.clone(), |flags| flags).map(|run| (run.range, run.kind))
}

fn set_access(range: &Range<usize>, access: c_int) -> Result<(), Errno> {
    leave_unless(Deed::Protect)?;
    // SAFETY: the program asked that this part be inaccessible, or not be so any longer.
    unsafe { native::mprotect(range.start, range.len(), access) }.map(|_zero| ())
}

/// Closed first: what another thread wrote between the two would be under the guard.
fn guard(client: &Client, range: &Range<usize>) -> Result<(), Errno> {
    if by_flags(client, range).any(|(_, flags)| flags & LOCKED != 0) {
        return Err(libc::EINVAL);
    }
    for (part, _) in by_flags(client, range).filter(|(_, flags)| flags & GUARDED == 0) {
        change(client, &part, GUARDED, 0)?;
        let outcome = set_access(&part, libc::PROT_NONE).and_then(|()| drop_bytes(client, &part));
        outcome.inspect_err(|_| {
            // Where this fails too the part stays closed: an access is an error, never a wrong byte.
            let _opened = unguard(client, &part).is_ok();
        })?;
    }
    Ok(())
}

fn unguard(client: &Client, range: &Range<usize>) -> Result<(), Errno> {
    for (part, flags) in by_flags(client, range).filter(|(_, flags)| flags & GUARDED != 0) {
        set_access(&part, access_of(flags))?;
        change(client, &part, 0, GUARDED)?;
    }
    Ok(())
}

/// What a child is to find there is the kernel's to say: it can do so only where all of it is in place. A part that
/// was advised before stays so, also where another is refused.
fn hold_for(
    client: &Client,
    range: &Range<usize>,
    advice: c_int,
    flag: Flags,
) -> Result<(), Errno> {
    for run in client.heap().runs(range.clone(), |flags| flags & flag != 0) {
        if !run.kind {
            hold_part(client, &run.range, advice, flag)?;
        }
    }
    Ok(())
}

fn hold_part(
    client: &Client,
    range: &Range<usize>,
    advice: c_int,
    flag: Flags,
) -> Result<(), Errno> {
    change(client, range, flag, 0)?;
    let outcome = hold(client, range).and_then(|()| native(range, advice));
    outcome.inspect_err(|_| {
        // Clearing never fails.
        let _cleared = change(client, range, 0, flag).is_ok();
        release(client);
    })
}

fn let_go(client: &Client, range: &Range<usize>, advice: c_int, flag: Flags) -> Result<(), Errno> {
    native(range, advice)?;
    change(client, range, 0, flag)?;
    release(client);
    Ok(())
}
