//! Mappings of a program's own: parts of the heap that it unmaps page by page.
//!
//! A page of one has the flag `MAPPED`. An unmapped page has no access, until somebody gets it again.

use super::{Error, Heap, Result, Source, inside};
use crate::arenas::{Allocated, Claim, Discarded, First};
use crate::changes::{Flags, MAPPED, UNMAPPED};
use crate::space::page_bytes;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Heap {
    /// Memory for a mapping of at least `bytes` on a multiple of `align`. Such as reads as zeros first; but
    /// where nobody discards what is unmapped, for the daemon is away, the program goes on with that: what was
    /// never used may be armed, and its first touch would wait.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn map(&self, source: &impl Source, bytes: usize, align: usize) -> Result<Allocated> {
        let is_refused = self.is_refused.load(Ordering::Relaxed);
        let first = if is_refused { First::Dirty } else { First::Zero };
        let block = self.take(source, bytes, align, first)?;
        let range = block.address..block.address + bytes.next_multiple_of(page_bytes());
        self.begin(&range).inspect_err(|_| {
            if let Some(mut arenas) = self.arenas.enter() {
                arenas.put_back(block, bytes);
            }
        })?;
        Ok(block)
    }

    /// Memory for a mapping at a certain place, of which nothing may be taken. `None`: it is not free.
    /// Otherwise whether it reads as zeros.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn map_at(&self, source: &impl Source, range: &Range<usize>) -> Result<Option<bool>> {
        let mut arenas = self.arenas.enter().ok_or_else(inside)?;
        if !arenas.is_free(range.start, range.len()) {
            return Ok(None);
        }
        let mut at = range.start;
        let mut all_zero = true;
        while at < range.end {
            let Some((bytes, Claim::Taken { is_zero, .. })) = arenas.claim(at, range.end - at)
            else {
                break;
            };
            all_zero &= is_zero;
            at += bytes;
        }
        drop(arenas);
        let opened = self
            .open(source, range)
            .map_err(|error| Error::system("opening memory that was unmapped", &error));
        let begun = opened.and_then(|()| self.begin(range));
        begun.inspect_err(|_| self.give_up(range))?;
        Ok(Some(all_zero))
    }

    /// Makes the first pages of a range, which lies in one arena, part of a mapping, if they are free. They
    /// stay without access if they were unmapped. Gives for how many bytes that is the answer.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn claim(&self, range: &Range<usize>) -> Result<(usize, Claim)> {
        let mut arenas = self.arenas.enter().ok_or_else(inside)?;
        let claimed = arenas.claim(range.start, range.len());
        drop(arenas);
        let (bytes, claim) = claimed.unwrap_or((range.len(), Claim::Live));
        if matches!(claim, Claim::Taken { .. }) {
            let taken = range.start..range.start + bytes;
            self.begin(&taken).inspect_err(|_| self.give_up(&taken))?;
        }
        Ok((bytes, claim))
    }

    fn give_up(&self, range: &Range<usize>) {
        if let Some(mut arenas) = self.arenas.enter() {
            // Live pages: this never fails.
            let _freed = arenas.release(range.start, range.len()).is_ok();
        }
    }

    /// Takes a range, all of mappings, back from the program. It has no access any more; `discard` drops
    /// its bytes.
    pub fn unmap(&self, range: &Range<usize>, discard: impl FnOnce() -> Discarded) {
        let Some(mut arenas) = self.arenas.enter() else { return };
        // Where two threads unmap the same at once, the second must not take what is somebody else's by now.
        if self.runs(range.clone(), |flags| flags & MAPPED != 0).any(|run| !run.kind) {
            return;
        }
        self.end(range, UNMAPPED);
        let Ok(piece) = arenas.take_live(range.start, range.len()) else { return };
        drop(arenas);
        let outcome = discard();
        self.is_refused.store(outcome != Discarded::Done, Ordering::Relaxed);
        // A thread that is inside already came here from a signal handler; what it has taken is lost.
        if let Some(mut arenas) = self.arenas.enter() {
            arenas.give_back(&piece, outcome);
        }
    }

    /// Takes a range of mappings, in which something is mapped that is not ours, out of use.
    pub fn retire(&self, range: &Range<usize>) {
        let Some(mut arenas) = self.arenas.enter() else { return };
        self.end(range, 0);
        // Where it is not live nobody can get it either.
        let _retired = arenas.retire(range.start, range.len()).is_ok();
    }

    /// Whether an address lies in a mapping. Lock-free.
    #[must_use]
    pub fn is_mapped(&self, address: usize) -> bool {
        self.has_mappings.load(Ordering::Relaxed)
            && self.runs(address..address + 1, |flags| flags).any(|run| run.kind & MAPPED != 0)
    }

    /// Bytes in mappings.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.mapped_bytes.load(Ordering::Relaxed)
    }

    fn begin(&self, range: &Range<usize>) -> Result<()> {
        self.change(range.clone(), MAPPED, 0)
            .map_err(|error| Error::system("a table for a mapping", &error))?;
        self.has_mappings.store(true, Ordering::Relaxed);
        self.set_owners(range, true);
        self.mapped_bytes.fetch_add(range.len(), Ordering::Relaxed);
        Ok(())
    }

    fn end(&self, range: &Range<usize>, set: Flags) {
        // The pages have a table: this never fails.
        let _changed = self.change(range.clone(), set, MAPPED).is_ok();
        self.set_owners(range, false);
        self.mapped_bytes.fetch_sub(range.len(), Ordering::Relaxed);
    }

    fn set_owners(&self, range: &Range<usize>, is_mapped: bool) {
        let Some((arena, bounds)) = self.bounds_of(range.start).filter(|_| self.has_extents) else {
            return;
        };
        let Some(words) = self.bounds[arena].not_extents.get() else { return };
        let (first, end) = (range.start - bounds.start, range.end - bounds.start);
        let (mut page, end) = (first / page_bytes(), end.div_ceil(page_bytes()));
        while page < end {
            let (word, bit) = (page / 64, page % 64);
            let count = (64 - bit).min(end - page);
            let mask = (u64::MAX >> (64 - count)) << bit;
            if is_mapped {
                words[word].fetch_or(mask, Ordering::Relaxed);
            } else {
                words[word].fetch_and(!mask, Ordering::Relaxed);
            }
            page += count;
        }
    }
}
