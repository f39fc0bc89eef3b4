//! Memory for this library itself: always from libc.
//!
//! Were it from our own `malloc`, an extent hook of jemalloc that asks the daemon for memory would call
//! jemalloc. Were it from another allocator behind us, that one's locks would be taken under ours, and in a fork
//! (`atfork`) they are held before ours are.

use crate::bootstrap;
use crate::libc_next::next;
use std::alloc::{GlobalAlloc, Layout};

struct Own;

#[global_allocator]
static OWN: Own = Own;

/// What malloc promises on 64-bit machines.
const MALLOC_ALIGN: usize = 16;

// SAFETY: blocks come from libc's `malloc` and `memalign`, or from the bump arena, which
// promise what this trait asks for; each is given back to where it came from. Nothing here unwinds.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (bytes, align) = (layout.size(), layout.align());
        match next() {
            None => bootstrap::allocate(bytes, align),
            // SAFETY: malloc has no preconditions.
            Some(next) if align <= MALLOC_ALIGN => unsafe { (next.libc_malloc)(bytes) }.cast(),
            // SAFETY: the alignment of a layout is a power of two.
            Some(next) => unsafe { (next.libc_memalign)(align, bytes) }.cast(),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        if !bootstrap::owns(block as usize)
            && let Some(next) = next()
        {
            // SAFETY: not of the bump arena, so `alloc` had it from there.
            unsafe { (next.libc_free)(block.cast()) };
        }
    }
}
