//! Which addresses may be ours: two bits for each chunk of the address space.
//!
//! Each `free` asks whose a block is. For most this answers with one look: small blocks of libc and of jemalloc
//! lie in chunks that the other never had. Where both kinds of ours were, or where there is no table, it says so,
//! and the heap is asked.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use tiermgr::space::{CHUNK, Table};

/// An extent of jemalloc's was there.
const HAD_EXTENT: u64 = 1;
/// A large block began there.
const HAD_BLOCK: u64 = 2;
const CHUNKS_IN_WORD: usize = 32;
/// Addresses above are given to those only that ask for them by name.
const ADDRESS_BITS: u32 = 48;
const WORDS: usize = (1 << ADDRESS_BITS) / CHUNK / CHUNKS_IN_WORD;
/// What large blocks begin on a multiple of, whatever the machine's pages are.
const PAGE_LEAST: usize = 4096;

static WORDS_FIRST: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// What is certain of an address that was given out and not given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It is not ours.
    Foreign,
    /// It lies in an extent.
    Extent,
    /// Nothing: the heap knows.
    Unsure,
}

/// Makes the table. It is address space mostly, and no part of what the program locks in memory. Without it
/// nothing is certain.
pub(crate) fn begin() {
    if let Ok(table) = Table::<AtomicU64>::zeroed(WORDS) {
        WORDS_FIRST.store(table.leak().as_ptr().cast_mut(), Ordering::Release);
    }
}

/// The word of an address, and where in it its two bits are.
#[inline(always)]
fn word_of(address: usize) -> Option<(&'static AtomicU64, usize)> {
    let first = WORDS_FIRST.load(Ordering::Acquire);
    let chunk = address / CHUNK;
    if first.is_null() || chunk >= WORDS * CHUNKS_IN_WORD {
        return None;
    }
    // SAFETY: the table has a word for each address below the limit.
    let word = unsafe { first.add(chunk / CHUNKS_IN_WORD) };
    // SAFETY: the table is never unmapped, and all access to it is atomic.
    Some((unsafe { &*word }, chunk % CHUNKS_IN_WORD * 2))
}

fn note(address: usize, what: u64) {
    if let Some((word, shift)) = word_of(address)
        && word.load(Ordering::Relaxed) >> shift & what == 0
    {
        word.fetch_or(what << shift, Ordering::Relaxed);
    }
}

/// An extent has come, which nobody knows of yet.
pub(crate) fn note_extent(start: usize, bytes: usize) {
    for chunk in start / CHUNK..(start + bytes).div_ceil(CHUNK) {
        note(chunk * CHUNK, HAD_EXTENT);
    }
}

/// A large block has come, which nobody knows of yet.
pub(crate) fn note_block(start: usize) {
    note(start, HAD_BLOCK);
}

/// Looks at an address. Whoever has it got it after its chunk was noted, and no note is ever taken back.
#[inline(always)]
pub(crate) fn look(address: usize) -> Seen {
    let Some((word, shift)) = word_of(address) else { return Seen::Unsure };
    let had = word.load(Ordering::Relaxed) >> shift & (HAD_EXTENT | HAD_BLOCK);
    if had == 0 {
        Seen::Foreign
    } else if had == HAD_EXTENT || (had & HAD_EXTENT != 0 && !address.is_multiple_of(PAGE_LEAST)) {
        // In the second case: large blocks begin with a page.
        Seen::Extent
    } else {
        Seen::Unsure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_certain_is_what_was_noted() {
        // Nothing of this process lies so low.
        let [extent, both, block, after] = [3, 4, 5, 6].map(|chunk| chunk * CHUNK);
        assert_eq!(look(extent), Seen::Unsure, "there is no table yet");
        begin();
        assert_eq!([look(0), look(extent)], [Seen::Foreign; 2]);
        note_extent(extent + CHUNK - 4096, CHUNK);
        note_block(both + 8192);
        note_block(block);
        for address in [extent, extent + 4096, extent + 40] {
            assert_eq!(look(address), Seen::Extent, "no large block began in this chunk");
        }
        assert_eq!(look(both + 8192 + 16), Seen::Extent);
        assert_eq!([look(both + 4096), look(both + 8192), look(block)], [Seen::Unsure; 3]);
        assert_eq!([look(after), look(after + 16)], [Seen::Foreign; 2]);
        assert_eq!(look(extent | 1 << ADDRESS_BITS), Seen::Unsure, "beyond the table");
    }
}
