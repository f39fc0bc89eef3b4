//! Puts right what the program had changed about a block, before that is given up.

use super::advice::advise_as_usual;
use super::change;
use super::layout::{cover, fork_as_usual, set_access, unlock};
use super::native::Errno;
use std::ops::Range;
use tiermgr::changes::{Flags, GUARDED, PROTECTION, REPLACED, TAKEN, UNMAPPED};
use tiermgr::client::Client;

/// The block at `address` is about to be freed. What cannot be put right stays changed: the heap gives it to
/// nobody.
pub(crate) fn before_free(client: &Client, address: usize) {
    if client.heap().is_unchanged(address) {
        return;
    }
    // An address that is no block's is for the heap to complain of.
    let Ok(bytes) = client.heap().usable_bytes(address) else { return };
    before_release(client, address, bytes);
}

/// The same for pages that are given up, whole blocks or not.
pub(crate) fn before_release(client: &Client, address: usize, bytes: usize) {
    let heap = client.heap();
    for run in heap.runs(address..address + bytes, |flags| flags).filter(|run| run.kind != 0) {
        if mend(client, &run.range, run.kind).is_ok() {
            // Clearing never fails.
            let _cleared = change(client, &run.range, 0, Flags::MAX).is_ok();
        } else if run.kind & REPLACED == 0 {
            // Nobody will use it any more: at least it should cost nothing.
            client.discard_soon(run.range.start, run.range.len());
        }
    }
}

fn mend(client: &Client, range: &Range<usize>, flags: Flags) -> Result<(), Errno> {
    if flags & REPLACED != 0 {
        if flags & (UNMAPPED | TAKEN) == 0 {
            cover(range)?;
        }
        // It is not managed, and cannot become so again.
        return Err(libc::EEXIST);
    }
    fork_as_usual(client, range, flags)?;
    advise_as_usual(range, flags);
    unlock(range, flags)?;
    if flags & (PROTECTION | GUARDED | UNMAPPED) != 0 {
        set_access(range, libc::PROT_READ | libc::PROT_WRITE, flags)?;
    }
    Ok(())
}
