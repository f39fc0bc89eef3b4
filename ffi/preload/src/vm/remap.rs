//! mremap.

use super::Whose;
use super::advice::madvise;
use super::fresh;
use super::held::close_hole;
use super::layout::{self, Mapping, let_go, munmap, put_over, set_access};
use super::native::{self, Errno};
use super::{Outcome, access_of, change, drop_bytes, leave_unless, whose};
use std::ffi::c_int;
use std::ops::Range;
use tiermgr::changes::{
    EXEC, Flags, GUARDED, KEYED, LOCKED, MAPPED, NO_READ, NO_WRITE, NOT_DUMPED, NOT_FORKED,
    REPLACED, UNSURE, WIPED,
};
use tiermgr::client::Client;
use tiermgr::sandbox::Deed;
use tiermgr::space::page_bytes;

const DONTUNMAP: c_int = libc::MREMAP_DONTUNMAP;

/// Arguments of mremap.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) address: usize,
    pub(super) bytes: usize,
    pub(super) new_bytes: usize,
    pub(super) flags: c_int,
    pub(super) to: usize,
}

impl Move {
    const fn has(&self, flag: c_int) -> bool {
        self.flags & flag != 0
    }
}

/// mremap from or to managed memory, or both. What is wrong in itself is answered as the kernel does.
pub(super) fn mremap(client: &Client, mut wish: Move) -> Outcome {
    let page = page_bytes();
    let known = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | DONTUNMAP;
    let needs_move = wish.has(libc::MREMAP_FIXED) || wish.has(DONTUNMAP);
    let up = |bytes: usize| bytes.checked_next_multiple_of(page).ok_or(libc::EINVAL);
    let is_odd = !wish.address.is_multiple_of(page)
        || wish.flags & !known != 0
        || needs_move && !wish.has(libc::MREMAP_MAYMOVE)
        || wish.has(libc::MREMAP_FIXED) && !wish.to.is_multiple_of(page);
    if is_odd {
        return Err(libc::EINVAL);
    }
    wish.bytes = up(wish.bytes)?;
    wish.new_bytes = up(wish.new_bytes)?;
    if wish.new_bytes == 0 || wish.has(DONTUNMAP) && wish.bytes != wish.new_bytes {
        return Err(libc::EINVAL);
    }
    let source = wish.address..wish.address.checked_add(wish.bytes).ok_or(libc::EINVAL)?;
    let target = wish.to..wish.to.checked_add(wish.new_bytes).ok_or(libc::EINVAL)?;
    if wish.has(libc::MREMAP_FIXED) && source.start < target.end && target.start < source.end {
        return Err(libc::EINVAL);
    }
    if !client.heap().owns_part_of(&(source.start..source.end.max(source.start + 1))) {
        return put_over(client, &target, |_| natively(wish)).map(|()| wish.to);
    }
    // Private memory cannot be had twice.
    if source.is_empty() {
        return Err(libc::EINVAL);
    }
    // The kernel moves a part of one mapping only.
    let mut runs = client.heap().runs(source.clone(), |flags| flags);
    let flags = match (runs.next(), runs.next()) {
        (Some(run), None) if run.ours => run.kind,
        _ => return Err(libc::EFAULT),
    };
    match whose(flags) {
        Whose::Nobodys => Err(libc::EFAULT),
        Whose::Foreign => move_foreign(client, wish, &source, &target),
        Whose::Ours => move_ours(client, wish, &source, &target, flags),
    }
}

fn natively(Move { address, bytes, new_bytes, flags, to }: Move) -> Outcome {
    // SAFETY: the program asked for it; the callers have seen to managed memory.
    unsafe { native::mremap(address, bytes, new_bytes, flags, to) }
}

/// From a place in an arena where the program has put something else.
fn move_foreign(
    client: &Client,
    wish: Move,
    source: &Range<usize>,
    target: &Range<usize>,
) -> Outcome {
    let is_over = wish.has(libc::MREMAP_FIXED) && client.heap().owns_part_of(target);
    let at = if is_over {
        put_over(client, target, |_| natively(wish)).map(|()| wish.to)?
    } else {
        natively(wish)?
    };
    let left = if at == source.start { source.start + wish.new_bytes } else { source.start };
    let left = left..source.end;
    if !left.is_empty() && !wish.has(DONTUNMAP) {
        close_hole(client, &left);
    }
    Ok(at)
}

fn move_ours(
    client: &Client,
    wish: Move,
    source: &Range<usize>,
    target: &Range<usize>,
    flags: Flags,
) -> Outcome {
    // As in munmap.
    if flags & MAPPED != 0 && client.heap().is_inside() {
        return Err(libc::EAGAIN);
    }
    let may_stay = !wish.has(libc::MREMAP_FIXED) && !wish.has(DONTUNMAP);
    if may_stay && wish.new_bytes <= wish.bytes {
        let tail = source.start + wish.new_bytes..source.end;
        if !tail.is_empty() {
            let_go(client, &tail, flags)?;
        }
        return Ok(source.start);
    }
    // Nobody knows a key's rights elsewhere.
    let is_odd = flags & (GUARDED | KEYED | UNSURE) != 0;
    if may_stay && !is_odd && grow(client, wish, source, flags)? {
        return Ok(source.start);
    }
    if may_stay && !wish.has(libc::MREMAP_MAYMOVE) {
        return Err(libc::ENOMEM);
    }
    if is_odd {
        return Err(libc::EINVAL);
    }
    let kept = source.start..source.start + wish.bytes.min(wish.new_bytes);
    let at = place(client, wish, target, flags)?;
    let made = at..at + wish.new_bytes;
    let outcome = fill(client, &kept, &made, flags).and_then(|()| {
        if wish.has(DONTUNMAP) { drop_bytes(client, source) } else { let_go(client, source, flags) }
    });
    outcome.inspect_err(|_| {
        // What was at a place that the program named is gone, as it may be after any failure of mremap.
        let _unmapped = munmap(client, made).is_ok();
    })?;
    Ok(at)
}

/// Grows a mapping where it stands. False: something is in the way.
fn grow(client: &Client, wish: Move, source: &Range<usize>, flags: Flags) -> Result<bool, Errno> {
    let more = source.end..source.start + wish.new_bytes;
    if flags & MAPPED == 0 || !matches!(client.map_at(&more), Ok(true)) {
        return Ok(false);
    }
    let outcome = hidden_like(client, &more, flags).and_then(|()| like(client, &more, flags));
    outcome.inspect_err(|_| {
        let _unmapped = munmap(client, more).is_ok();
    })?;
    Ok(true)
}

/// New memory, where the program wants it or anywhere.
fn place(client: &Client, wish: Move, target: &Range<usize>, source_flags: Flags) -> Outcome {
    leave_unless(Deed::Map)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let map = |to: usize, fixed: c_int| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        // SAFETY: at an address of the kernel's choice, or at the one that the program gave for this.
        unsafe { native::mmap(to, wish.new_bytes, access, flags, -1, 0) }
    };
    let is_mapped = source_flags & MAPPED != 0;
    let (fd, offset) = (-1, 0);
    if !wish.has(libc::MREMAP_FIXED) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mapping = Mapping { bytes: wish.new_bytes, access, flags, fd, offset };
        let managed =
            if is_mapped || fresh::is_wanted(&mapping) { fresh::mmap(0, mapping) } else { None };
        return managed.unwrap_or_else(|| map(0, 0));
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let mapping = Mapping { bytes: wish.new_bytes, access, flags, fd, offset };
    if is_mapped && is_managed(client, target) {
        return layout::mmap(client, target.clone(), mapping);
    }
    if client.heap().owns_part_of(target) {
        return put_over(client, target, |to| map(to, libc::MAP_FIXED)).map(|()| wish.to);
    }
    map(wish.to, libc::MAP_FIXED)
}

fn is_managed(client: &Client, range: &Range<usize>) -> bool {
    let mut runs = client.heap().runs(range.clone(), |flags| flags & REPLACED != 0);
    runs.all(|run| run.ours && !run.kind)
}

/// Gives the new memory the bytes and the rights of the old.
fn fill(
    client: &Client,
    from: &Range<usize>,
    to: &Range<usize>,
    flags: Flags,
) -> Result<(), Errno> {
    // Before it has bytes that a child, or a core dump, is not to see.
    hidden_like(client, to, flags)?;
    if flags & NO_READ != 0 {
        set_access(from, libc::PROT_READ, 0)?;
    }
    copy(from, to.start);
    if flags & NO_READ != 0 {
        set_access(from, access_of(flags), 0)?;
    }
    like(client, to, flags)
}

/// Has a forked child, and a core dump, find of new memory what they would find of the old.
fn hidden_like(client: &Client, to: &Range<usize>, flags: Flags) -> Result<(), Errno> {
    for (flag, advice) in [
        (WIPED, libc::MADV_WIPEONFORK),
        (NOT_FORKED, libc::MADV_DONTFORK),
        (NOT_DUMPED, libc::MADV_DONTDUMP),
    ] {
        if flags & flag != 0 {
            madvise(client, to.clone(), advice)?;
        }
    }
    Ok(())
}

/// Gives new memory, managed or not, the rights of the old.
fn like(client: &Client, to: &Range<usize>, flags: Flags) -> Result<(), Errno> {
    let rights = flags & (NO_READ | NO_WRITE | EXEC);
    if rights != 0 {
        change(client, to, rights, 0)?;
        set_access(to, access_of(flags), 0)?;
    }
    if flags & LOCKED != 0 {
        leave_unless(Deed::Lock)?;
        change(client, to, LOCKED, 0)?;
        // SAFETY: a lock changes no byte.
        unsafe { native::mlock(to.start, to.len()) }.map_err(|_limit| libc::EAGAIN)?;
    }
    Ok(())
}

/// Copies pages that are not all zeros: the others would take memory for nothing.
fn copy(from: &Range<usize>, to: usize) {
    let page = page_bytes();
    for offset in (0..from.len()).step_by(page) {
        let source = (from.start + offset) as *const u64;
        let words = page / size_of::<u64>();
        let is_set = |word: usize| {
            // SAFETY: `word` is less than the number of words in this page.
            let at = unsafe { source.add(word) };
            // SAFETY: the page is readable; what others write meanwhile they write at their own risk, and
            // each word is read by itself.
            let value = unsafe { at.read_volatile() };
            value != 0
        };
        if (0..words).any(is_set) {
            let target = (to + offset) as *mut u64;
            // SAFETY: both have a page, one is readable, and the other is new and nobody else's.
            unsafe { std::ptr::copy_nonoverlapping(source, target, words) };
        }
    }
}
