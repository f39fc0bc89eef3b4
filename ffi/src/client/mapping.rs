//! Mappings of a program's own, of managed memory.

use super::{Client, tell_to_discard};
use crate::heap::Discarded;
use crate::status::{Error, Result, Status};
use std::ops::Range;

/// Pieces of old memory that are tried for one mapping, each of which cannot be had as a discard of it may still
/// happen.
const TRIES: usize = 4;

impl Client {
    /// A mapping of `bytes`, whole pages, that read as zeros, on a multiple of `align`. It is unmapped by
    /// [`Self::unmap`], in any pieces.
    ///
    /// # Errors
    /// As [`Self::allocate`], and `ConnectionLost`.
    pub fn map(&self, bytes: usize, align: usize) -> Result<Range<usize>> {
        for _ in 0..TRIES {
            let block = self.heap.map(self, bytes, align)?;
            let range = block.address..block.address + bytes;
            if block.is_zero || self.make_zero(&range) {
                return Ok(range);
            }
        }
        Err(Error::new(
            Status::ConnectionLost,
            "the daemon does not answer, and all memory that it once promised has been used",
        ))
    }

    /// A mapping at a certain place, if all of it is free. False: it is not.
    ///
    /// # Errors
    /// `NoMemory`.
    pub fn map_at(&self, range: &Range<usize>) -> Result<bool> {
        match self.heap.map_at(self, range)? {
            Some(is_zero) => Ok(is_zero || self.make_zero(range)),
            None => Ok(false),
        }
    }

    /// Takes a range, all of mappings, back: the program has no access to it any more. Its bytes are dropped,
    /// now if that takes but a moment.
    pub fn unmap(&self, range: &Range<usize>) {
        self.heap.unmap(range, || match self.inside() {
            Some(connected) => self.discard_held(connected, range.start, range.len()),
            None => Discarded::Refused,
        });
    }

    /// Waits for other threads, unlike the discards of `free`: what is unmapped is not used again before
    /// all the rest, and would fill memory.
    fn discard_now(&self, range: &Range<usize>) -> Discarded {
        match self.inside() {
            Some(connected) => tell_to_discard(connected, range.start, range.len()),
            None => Discarded::Refused,
        }
    }

    /// Makes a new mapping of old memory read as zeros; where nobody can tell whether it does it is unmapped.
    fn make_zero(&self, range: &Range<usize>) -> bool {
        match self.discard_now(range) {
            Discarded::Done => self.heap.settle(range.start, range.len()),
            Discarded::Refused => {
                let start = range.start as *mut u8;
                // SAFETY: a new mapping, readable, writable and nobody else's.
                unsafe { start.write_bytes(0, range.len()) };
            }
            Discarded::Unknown => {
                self.heap.unmap(range, || Discarded::Unknown);
                return false;
            }
        }
        true
    }
}
