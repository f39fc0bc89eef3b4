//! Memory for the few calls that come before libc's malloc can be found.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

const BYTES: usize = 256 << 10;
/// Every block begins with its length, in a header of this size.
const HEADER: usize = 16;

#[repr(align(4096))]
struct Arena(UnsafeCell<[u8; BYTES]>);

// SAFETY: each byte belongs to the one block that `USED` gave it to.
unsafe impl Sync for Arena {}

static ARENA: Arena = Arena(UnsafeCell::new([0; BYTES]));
static USED: AtomicUsize = AtomicUsize::new(0);

fn base() -> *mut u8 {
    ARENA.0.get().cast()
}

/// A block that reads as zeros and is never reused; null when the arena is used up.
pub(crate) fn allocate(bytes: usize, align: usize) -> *mut u8 {
    let align = align.max(HEADER);
    let Some(needed) = bytes.checked_add(HEADER + align) else { return std::ptr::null_mut() };
    let taken = USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
        used.checked_add(needed).filter(|&end| end <= BYTES)
    });
    let Ok(offset) = taken else { return std::ptr::null_mut() };
    let start = (base() as usize + offset + HEADER).next_multiple_of(align) - base() as usize;
    // SAFETY: `start` lies in [offset + HEADER, offset + HEADER + align), all inside the arena.
    let block = unsafe { base().add(start) };
    // SAFETY: the header lies in what was taken, since `start` is at least HEADER behind `offset`.
    let header = unsafe { block.sub(HEADER) };
    // SAFETY: aligned to HEADER, and nobody else's.
    unsafe { header.cast::<usize>().write(bytes) };
    block
}

/// Whether a block is one of these.
pub(crate) fn owns(address: usize) -> bool {
    address.wrapping_sub(base() as usize) < BYTES
}

/// Length of a block.
pub(crate) fn bytes_of(block: *const u8) -> usize {
    // SAFETY: callers pass a block for which `owns` holds, and a header precedes each.
    let header = unsafe { block.sub(HEADER) };
    // SAFETY: as above.
    unsafe { header.cast::<usize>().read() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_apart_and_known() {
        let a = allocate(100, 1);
        let b = allocate(1, 4096);
        assert!((b as usize).is_multiple_of(4096));
        assert!(owns(a as usize) && owns(b as usize) && !owns(0));
        assert_eq!((bytes_of(a), bytes_of(b)), (100, 1));
        assert!(b as usize >= a as usize + 100);
        assert!(allocate(BYTES, 16).is_null());
        assert!(allocate(usize::MAX, 16).is_null());
    }
}
