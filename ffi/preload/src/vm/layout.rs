//! munmap, and mmap over what is there.

use super::Whose;
use super::access::forget_lock_unless_held;
use super::advice::advise_as_usual;
use super::held::release;
use super::native::{self, Errno};
use super::{Outcome, access_of, change, drop_bytes, errno_of, flags_of, leave_unless, whose};
use std::ffi::c_int;
use std::ops::Range;
use std::time::Duration;
use tiermgr::arenas::Claim;
use tiermgr::cancel::Uncancelled;
use tiermgr::changes::{
    Flags, GUARDED, KEYED, LOCKED, MAPPED, NOT_FORKED, PROTECTION, REPLACED, UNMAPPED, UNSURE,
    WIPED,
};
use tiermgr::client::Client;
use tiermgr::heap::Discarded;
use tiermgr::sandbox::{Deed, may};
use tiermgr::space::page_bytes;
use tiermgr::status::Status;

/// What the daemon counts in.
pub(super) const EXTENT: usize = 64 << 10;
const ALL: Flags = Flags::MAX;

/// Arguments of mmap other than the address.
#[derive(Clone, Copy)]
pub(super) struct Mapping {
    pub(super) bytes: usize,
    pub(super) access: c_int,
    pub(super) flags: c_int,
    pub(super) fd: c_int,
    pub(super) offset: usize,
}

/// munmap. What was cut from the heap goes back to it, and no system call of the kernel's own unmaps it: were the
/// addresses given to others, whatever the helper was told to move a moment before would be theirs. To the
/// program nothing is there. What is a part of a block stays taken until that is freed.
pub(super) fn munmap(client: &Client, range: Range<usize>) -> Outcome {
    // What a signal handler takes back from a mapping would be lost where it has interrupted the heap.
    let is_mapped = |flags: Flags| flags & (MAPPED | UNMAPPED) == MAPPED;
    if client.heap().is_inside() && client.heap().runs(range.clone(), is_mapped).any(|run| run.kind)
    {
        return Err(libc::EAGAIN);
    }
    let kind = |flags| flags & !(PROTECTION & !KEYED);
    for run in client.heap().runs(range, kind) {
        match (run.ours, whose(run.kind)) {
            (false, _) => {
                // SAFETY: the program asked for it.
                unsafe { native::munmap(run.range.start, run.range.len()) }?;
            }
            (true, Whose::Ours) => let_go(client, &run.range, run.kind)?,
            (true, Whose::Foreign) => {
                cover(&run.range)?;
                change(client, &run.range, UNMAPPED, 0)?;
                retire(client, &run.range, run.kind);
            }
            (true, Whose::Nobodys) => {}
        }
    }
    Ok(0)
}

/// Of a mapping's pages in which something else is mapped: the heap has no use for them any more.
pub(super) fn retire(client: &Client, range: &Range<usize>, flags: Flags) {
    if flags & MAPPED != 0 {
        client.heap().retire(range);
    }
}

/// Makes managed memory of one kind inaccessible and drops its bytes.
pub(super) fn let_go(client: &Client, range: &Range<usize>, flags: Flags) -> Result<(), Errno> {
    change(client, range, UNMAPPED, 0)?;
    match close(client, range, flags) {
        // What it must not close stays open, and loses its bytes; whoever gets it opens it all the same. What else has
        // to be undone must not reach them.
        Err(libc::EPERM)
            if !may(Deed::Protect) && flags & (KEYED | LOCKED | WIPED | NOT_FORKED) == 0 => {}
        outcome => outcome.or_else(|why| {
            change(client, range, 0, UNMAPPED)?;
            Err(why)
        })?,
    }
    change(client, range, 0, ALL & !(UNMAPPED | MAPPED))?;
    if flags & MAPPED != 0 {
        client.unmap(range);
    } else {
        // Bytes that stay take room until the block is freed, and nobody can read them: before anything
        // else is to be seen here they are dropped again.
        client.discard_soon(range.start, range.len());
    }
    Ok(())
}

/// Takes back what the program had asked for, and all access.
fn close(client: &Client, range: &Range<usize>, flags: Flags) -> Result<(), Errno> {
    fork_as_usual(client, range, flags)?;
    unlock(range, flags)?;
    advise_as_usual(range, flags);
    set_access(range, libc::PROT_NONE, flags)
}

/// Ends a lock.
pub(super) fn unlock(range: &Range<usize>, flags: Flags) -> Result<(), Errno> {
    if flags & LOCKED == 0 {
        return Ok(());
    }
    leave_unless(Deed::Lock)?;
    // SAFETY: a lock changes no byte.
    unsafe { native::munlock(range.start, range.len()) }.map(|_zero| ())
}

/// Ends what `MADV_WIPEONFORK` and `MADV_DONTFORK` asked for.
pub(super) fn fork_as_usual(
    client: &Client,
    range: &Range<usize>,
    flags: Flags,
) -> Result<(), Errno> {
    for (flag, advice) in [(WIPED, libc::MADV_KEEPONFORK), (NOT_FORKED, libc::MADV_DOFORK)] {
        if flags & flag != 0 {
            leave_unless(Deed::Advise)?;
            // SAFETY: it changes no byte.
            unsafe { native::madvise(range.start, range.len(), advice) }?;
            change(client, range, 0, flag)?;
        }
    }
    if flags & (WIPED | NOT_FORKED) != 0 {
        release(client);
    }
    Ok(())
}

/// Sets protection, and takes a key away.
pub(super) fn set_access(range: &Range<usize>, access: c_int, flags: Flags) -> Result<(), Errno> {
    let (start, bytes) = (range.start, range.len());
    leave_unless(if flags & KEYED == 0 { Deed::Protect } else { Deed::Key })?;
    let outcome = if flags & KEYED == 0 {
        // SAFETY: the callers' program asked for it, or has given the memory up.
        unsafe { native::mprotect(start, bytes, access) }
    } else {
        // SAFETY: as above.
        unsafe { native::pkey_mprotect(start, bytes, access, 0) }
    };
    outcome.map(|_zero| ())
}

/// Maps what has no access over something that is not managed.
pub(super) fn cover(range: &Range<usize>) -> Result<(), Errno> {
    leave_unless(Deed::Map)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the program has unmapped what is there, or given up the block around it.
    unsafe { native::mmap(range.start, range.len(), libc::PROT_NONE, flags, -1, 0) }.map(|_at| ())
}

/// mmap with `MAP_FIXED` or `MAP_FIXED_NOREPLACE`.
pub(super) fn mmap(client: &Client, range: Range<usize>, mapping: Mapping) -> Outcome {
    let Mapping { flags, .. } = mapping;
    if flags & libc::MAP_FIXED_NOREPLACE != 0 && !is_free(client, &range) {
        return Err(libc::EEXIST);
    }
    let kind = flags & libc::MAP_TYPE;
    let is_plain = flags & libc::MAP_ANONYMOUS != 0
        && kind == libc::MAP_PRIVATE
        && flags & (libc::MAP_HUGETLB | libc::MAP_GROWSDOWN) == 0;
    let start = range.start;
    if is_plain {
        try_elsewhere(mapping)?;
        for run in client.heap().runs(range, |flags| flags) {
            if run.ours && run.kind & REPLACED == 0 {
                claim_each(client, &run.range, |part, claim| match claim {
                    Claim::Taken { is_zero: true, .. } => set_up(client, part, mapping),
                    _ => empty(client, part, run.kind, mapping),
                })?;
            } else {
                over_foreign(&run.range, mapping)?;
                change(client, &run.range, 0, UNMAPPED)?;
            }
        }
    } else {
        replace(client, &range, mapping)?;
    }
    Ok(start)
}

/// What the kernel has against flags that are not usual shows before anything is lost.
fn try_elsewhere(mapping: Mapping) -> Result<(), Errno> {
    const PLACE: c_int = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE | libc::MAP_POPULATE;
    const USUAL: c_int = PLACE
        | libc::MAP_PRIVATE
        | libc::MAP_ANONYMOUS
        | libc::MAP_NORESERVE
        | libc::MAP_STACK
        | libc::MAP_NONBLOCK;
    if mapping.flags & !USUAL == 0 {
        return Ok(());
    }
    leave_unless(Deed::Map)?;
    let bytes = page_bytes();
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let made = unsafe { native::mmap(0, bytes, mapping.access, mapping.flags & !PLACE, -1, 0) }?;
    // SAFETY: nobody has seen it yet.
    unsafe { native::munmap(made, bytes) }.map(|_zero| ())
}

/// Whether all of a range is managed and unmapped. One that lies in part outside meets the guard page of
/// an arena, which is mapped.
fn is_free(client: &Client, range: &Range<usize>) -> bool {
    let mut runs = client.heap().runs(range.clone(), |flags| whose(flags) == Whose::Nobodys);
    runs.all(|run| run.ours && run.kind)
}

/// Between two looks at memory that another thread is discarding, and how often it is looked at.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_LOOKS: u32 = 1000;

/// Takes what of a range is free from the heap, as part of a mapping, and has something done with each part of
/// the range. What was free becomes so again where that fails.
fn claim_each(
    client: &Client,
    range: &Range<usize>,
    mut then: impl FnMut(&Range<usize>, Claim) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let _uncancelled = Uncancelled::new();
    let mut at = range.start;
    let mut looks = 0;
    while at < range.end {
        let (bytes, claim) =
            client.heap().claim(&(at..range.end)).map_err(|error| match error.status {
                Status::Inside => libc::EAGAIN,
                _ => libc::ENOMEM,
            })?;
        if claim == Claim::Busy {
            looks += 1;
            if looks > BUSY_LOOKS {
                return Err(libc::EAGAIN);
            }
            tiermgr::nap(BUSY_PAUSE);
            continue;
        }
        let part = at..at + bytes;
        then(&part, claim).inspect_err(|_| {
            if claim != Claim::Live {
                client.heap().unmap(&part, || Discarded::Refused);
            }
        })?;
        at = part.end;
    }
    Ok(())
}

fn over_foreign(range: &Range<usize>, mapping: Mapping) -> Result<(), Errno> {
    let Mapping { access, flags, .. } = mapping;
    let flags = flags & !libc::MAP_FIXED_NOREPLACE | libc::MAP_FIXED;
    // SAFETY: the program asked for it.
    unsafe { native::mmap(range.start, range.len(), access, flags, -1, 0) }.map(|_at| ())
}

/// New private memory over managed memory of one kind: the same memory without its bytes.
fn empty(
    client: &Client,
    range: &Range<usize>,
    before: Flags,
    mapping: Mapping,
) -> Result<(), Errno> {
    change(client, range, before | UNMAPPED, 0)?;
    if let Err(why) = close(client, range, before).and_then(|()| drop_bytes(client, range)) {
        if before & (UNMAPPED | GUARDED) == 0 {
            set_access(range, access_of(before), 0)?;
            change(client, range, 0, UNMAPPED)?;
        }
        return Err(why);
    }
    set_up(client, range, mapping)
}

/// Gives empty managed memory what a new mapping has.
pub(super) fn set_up(client: &Client, range: &Range<usize>, mapping: Mapping) -> Result<(), Errno> {
    const POPULATE: c_int = libc::MAP_POPULATE;
    let access = mapping.access & (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    set_access(range, access, 0)?;
    change(client, range, flags_of(access), ALL & !MAPPED)?;
    let (start, bytes) = (range.start, range.len());
    if mapping.flags & libc::MAP_LOCKED != 0 {
        change(client, range, LOCKED, 0)?;
        // The kernel does not tell either where it could not lock all of it.
        // SAFETY: a lock changes no byte.
        let is_locked = may(Deed::Lock) && unsafe { native::mlock(start, bytes) }.is_ok();
        if !is_locked {
            forget_lock_unless_held(client, range);
        }
    } else if mapping.flags & (POPULATE | libc::MAP_NONBLOCK) == POPULATE {
        let advice = if access & libc::PROT_WRITE == 0 {
            libc::MADV_POPULATE_READ
        } else {
            libc::MADV_POPULATE_WRITE
        };
        // As little does it tell here.
        // SAFETY: it changes no byte.
        let _populated =
            may(Deed::Advise) && unsafe { native::madvise(start, bytes, advice) }.is_ok();
    }
    Ok(())
}

/// Something else over managed memory. It is mapped elsewhere first: what the kernel has against it shows
/// before anything is lost.
fn replace(client: &Client, range: &Range<usize>, mapping: Mapping) -> Result<(), Errno> {
    let Mapping { bytes, access, flags, fd, offset } = mapping;
    leave_unless(Deed::Move)?;
    let flags = flags & !(libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let made = unsafe { native::mmap(0, bytes, access, flags, fd, offset) }?;
    let length = range.len();
    put_over(client, range, |to| {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the program asked for what is made to be here; nothing is on its way to what was.
        unsafe { native::mremap(made, length, length, flags, to) }
    })
    .inspect_err(|_| {
        // SAFETY: nobody has seen it yet.
        let _unmapped = unsafe { native::munmap(made, length) }.is_ok();
    })
}

/// Has something that is not managed put over a range. Before that the daemon lets go of it: it arms the
/// memory, so that the kernel tells it what happens there; it drops the bytes, so that there is nothing to
/// be moved; and it holds the extents that lie partly outside, since a move of their other part would pass
/// over this one. When the kernel has told it, it does nothing there any more.
pub(super) fn put_over(
    client: &Client,
    range: &Range<usize>,
    put: impl FnOnce(usize) -> Outcome,
) -> Result<(), Errno> {
    let outcome = put_over_claimed(client, range, put);
    if outcome.is_err() {
        // What was taken from the heap for this goes back.
        let taken = MAPPED | UNMAPPED;
        for run in client.heap().runs(range.clone(), |flags| flags & (taken | REPLACED)) {
            if run.kind == taken {
                client.heap().unmap(&run.range, || Discarded::Refused);
            }
        }
    }
    outcome
}

fn put_over_claimed(
    client: &Client,
    range: &Range<usize>,
    put: impl FnOnce(usize) -> Outcome,
) -> Result<(), Errno> {
    let mut edges = Edges::new(client);
    let is_managed = |flags: Flags| flags & REPLACED == 0;
    for run in client.heap().runs(range.clone(), is_managed).filter(|run| run.ours && run.kind) {
        claim_each(client, &run.range, |part, claim| match claim {
            Claim::Live => Ok(()),
            _ => change(client, part, UNMAPPED, 0),
        })?;
        edges.arm(&run.range)?;
        edges.hold(&run.range, range)?;
    }
    for run in client.heap().runs(range.clone(), |flags| flags) {
        if run.ours && is_managed(run.kind) {
            fork_as_usual(client, &run.range, run.kind)?;
            unlock(&run.range, run.kind)?;
            change(client, &run.range, 0, LOCKED)?;
        }
    }
    // Now, since it can fail: what is put there must not be taken for ours.
    change(client, range, UNSURE, 0)?;
    for run in client.heap().runs(range.clone(), is_managed).filter(|run| run.ours && run.kind) {
        drop_bytes(client, &run.range)?;
    }
    put(range.start)?;
    change(client, range, REPLACED, ALL & !MAPPED)
}

/// Leases of the extents at both ends of a range, until they are let go.
struct Edges<'a> {
    client: &'a Client,
    leases: [u64; 8],
    used: usize,
}

impl<'a> Edges<'a> {
    const fn new(client: &'a Client) -> Self {
        Self { client, leases: [0; 8], used: 0 }
    }

    /// One page that is held makes all of a region armed.
    fn arm(&mut self, range: &Range<usize>) -> Result<(), Errno> {
        let found = self.client.residency(range.start, range.len());
        if found.map_err(|error| errno_of(&error))?.unarmed_bytes > 0 {
            self.pin(range.start)?;
        }
        Ok(())
    }

    /// Holds the extents of a managed range that lie partly outside of `whole`, in which it lies, by a page there: the
    /// kernel tells of what is put over `whole`, and with that a lease of a page of it ends. Where all that is outside is
    /// others' nothing can be moved.
    fn hold(&mut self, range: &Range<usize>, whole: &Range<usize>) -> Result<(), Errno> {
        for edge in [range.start, range.end].into_iter().filter(|edge| !edge.is_multiple_of(EXTENT))
        {
            let start = edge & !(EXTENT - 1);
            let sides = [start..whole.start, whole.end..start + EXTENT];
            let runs = |side| self.client.heap().runs(side, |flags| flags & REPLACED == 0);
            let mut outside = sides.into_iter().filter(|side| !side.is_empty()).flat_map(runs);
            if let Some(run) = outside.find(|run| run.ours && run.kind) {
                self.pin(run.range.start)?;
            }
        }
        Ok(())
    }

    fn pin(&mut self, page: usize) -> Result<(), Errno> {
        let free = self.leases.get_mut(self.used).ok_or(libc::ENOMEM)?;
        *free = self.client.pin(page, page_bytes()).map_err(|error| errno_of(&error))?;
        self.used += 1;
        Ok(())
    }
}

impl Drop for Edges<'_> {
    fn drop(&mut self) {
        for &lease in self.leases.iter().take(self.used) {
            // Without an answer 64 KiB stay in memory until the process ends.
            let _ended = self.client.unpin(lease).is_ok();
        }
    }
}
