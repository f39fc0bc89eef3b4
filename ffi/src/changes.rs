//! What a program has changed about pages of its heap: protection, locks, mappings of its own.
//!
//! A block that is freed goes to its next owner, who knows nothing of all that. So each page has a word of
//! flags in a table beside its arena. A table is made at the first change in its arena, and costs memory
//! only where it was written; an arena in which nothing was changed has none. Every page has its own word,
//! so that nothing overflows and nothing is guessed. All of it is read without a lock: system calls are
//! made in signal handlers too.

use crate::arenas::ARENAS_MAX;
use crate::heap::Heap;
use crate::space::{Table, ZeroIsValid, page_bytes};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU16, Ordering};

/// What was changed about a page. Zero: nothing, and it is as malloc gave it.
pub type Flags = u16;
/// It cannot be read.
pub const NO_READ: Flags = 1;
/// It cannot be written.
pub const NO_WRITE: Flags = 2;
/// It can be executed.
pub const EXEC: Flags = 4;
/// It has a protection key.
pub const KEYED: Flags = 8;
/// Its protection may be another one than the flags say.
pub const UNSURE: Flags = 16;
/// It is locked.
pub const LOCKED: Flags = 32;
/// The program has unmapped it. It has no access, and is nobody's, or a part of a block that is not freed yet.
pub const UNMAPPED: Flags = 64;
/// Something is mapped there that is not ours.
pub const REPLACED: Flags = 128;
/// Access to it is an error until the guard is removed; the other flags keep its protection.
pub const GUARDED: Flags = 256;
/// A forked child gets zeros.
pub const WIPED: Flags = 512;
/// A forked child does not get it.
pub const NOT_FORKED: Flags = 1024;
/// It belongs to a mapping that the program made: it is no block's.
pub const MAPPED: Flags = 2048;
/// It may not have the advice that arenas have: about huge pages, dumps or merging.
pub const ADVISED: Flags = 4096;
/// What is mapped there may be anybody's: they found nothing there, and it stays when the block is freed.
pub const TAKEN: Flags = 8192;
/// It is in no core dump.
pub const NOT_DUMPED: Flags = 16384;
/// All that tells of protection.
pub const PROTECTION: Flags = NO_READ | NO_WRITE | EXEC | KEYED | UNSURE;

/// Tables of flags, one for each arena.
#[derive(Debug)]
pub(crate) struct Changes([AtomicPtr<AtomicU16>; ARENAS_MAX]);

// SAFETY: zero is a value of an integer, and an integer has no `Drop`.
unsafe impl ZeroIsValid for AtomicU16 {}

impl Changes {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicPtr::new(std::ptr::null_mut()) }; ARENAS_MAX])
    }

    /// The flags of an arena of `pages` pages, if any was ever set.
    fn table(&self, arena: usize, pages: usize) -> Option<&[AtomicU16]> {
        let base = self.0.get(arena)?.load(Ordering::Acquire);
        if base.is_null() {
            return None;
        }
        // SAFETY: `table_or_new` made it with as many elements as the arena has pages, a number that
        // never changes; tables are never unmapped.
        Some(unsafe { std::slice::from_raw_parts(base, pages) })
    }

    fn table_or_new(&self, arena: usize, pages: usize) -> io::Result<&[AtomicU16]> {
        if let Some(table) = self.table(arena, pages) {
            return Ok(table);
        }
        let slot = self.0.get(arena).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let new = Table::<AtomicU16>::zeroed(pages)?;
        let base = new.as_ptr().cast_mut();
        // Whoever comes second leaves a table that nobody uses: address space only.
        let _was_first = slot
            .compare_exchange(std::ptr::null_mut(), base, Ordering::AcqRel, Ordering::Acquire)
            .is_ok();
        self.table(arena, pages).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }
}

/// A part of a range, page-aligned, all of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run<K> {
    /// Where.
    pub range: Range<usize>,
    /// Whether it lies in an arena. A run never spans two arenas.
    pub ours: bool,
    /// Of what kind it is.
    pub kind: K,
}

/// See [`Heap::runs`].
#[derive(Debug)]
pub struct Runs<'a, F> {
    heap: &'a Heap,
    at: usize,
    end: usize,
    kind_of: F,
}

impl<K: PartialEq, F: Fn(Flags) -> K> Iterator for Runs<'_, F> {
    type Item = Run<K>;

    fn next(&mut self) -> Option<Run<K>> {
        if self.at >= self.end {
            return None;
        }
        let start = self.at;
        let Some((arena, bounds)) = self.heap.bounds_of(start) else {
            self.at = self.heap.next_arena(start).min(self.end);
            return Some(Run { range: start..self.at, ours: false, kind: (self.kind_of)(0) });
        };
        let until = bounds.end.min(self.end);
        let page = page_bytes();
        let Some(table) = self.heap.changes.table(arena, bounds.len() / page) else {
            self.at = until;
            return Some(Run { range: start..until, ours: true, kind: (self.kind_of)(0) });
        };
        let first = (start - bounds.start) / page;
        let last = (until - bounds.start).div_ceil(page);
        let flags = |word: &AtomicU16| word.load(Ordering::Relaxed);
        let kind = (self.kind_of)(flags(&table[first]));
        let same = table[first + 1..last]
            .iter()
            .take_while(|word| (self.kind_of)(flags(word)) == kind)
            .count();
        self.at = (bounds.start + (first + 1 + same) * page).min(until);
        Some(Run { range: start..self.at, ours: true, kind })
    }
}

impl Heap {
    fn all_bounds(&self) -> impl Iterator<Item = Range<usize>> {
        let known = self.bounds_len.load(Ordering::Acquire);
        self.bounds
            .iter()
            .take(known)
            .map(|bounds| bounds.start.load(Ordering::Relaxed)..bounds.end.load(Ordering::Relaxed))
    }

    pub(crate) fn bounds_of(&self, address: usize) -> Option<(usize, Range<usize>)> {
        self.all_bounds().enumerate().find(|(_, bounds)| bounds.contains(&address))
    }

    fn next_arena(&self, address: usize) -> usize {
        let starts = self.all_bounds().map(|bounds| bounds.start);
        starts.filter(|&start| start > address).min().unwrap_or(usize::MAX)
    }

    /// Whether any byte of a range lies in an arena. Lock-free.
    #[must_use]
    pub fn owns_part_of(&self, range: &Range<usize>) -> bool {
        self.all_bounds().any(|bounds| range.start < bounds.end && bounds.start < range.end)
    }

    /// Cuts a range of whole pages into runs of one kind, in ascending order. What lies in no arena has
    /// no flags.
    pub fn runs<K: PartialEq, F: Fn(Flags) -> K>(
        &self,
        range: Range<usize>,
        kind_of: F,
    ) -> Runs<'_, F> {
        Runs { heap: self, at: range.start, end: range.end, kind_of }
    }

    /// Sets and clears flags of the pages of a range that lie in arenas.
    ///
    /// # Errors
    /// `ENOMEM` where there is no memory for a table; nothing was changed in that arena then. Setting
    /// nothing never fails.
    pub fn change(&self, range: Range<usize>, set: Flags, clear: Flags) -> io::Result<()> {
        for run in self.runs(range, |_| ()).filter(|run| run.ours) {
            let Some((arena, bounds)) = self.bounds_of(run.range.start) else { continue };
            let page = page_bytes();
            let pages = bounds.len() / page;
            let table = if set == 0 {
                match self.changes.table(arena, pages) {
                    Some(table) => table,
                    None => continue,
                }
            } else {
                self.changes.table_or_new(arena, pages)?
            };
            let first = (run.range.start - bounds.start) / page;
            let last = (run.range.end - bounds.start).div_ceil(page);
            for word in &table[first..last] {
                // Others may change other flags of the same page. A word that stays as it is need not cost a
                // page of the table.
                let _was = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |flags| {
                    let changed = (flags & !clear) | set;
                    (changed != flags).then_some(changed)
                });
            }
        }
        Ok(())
    }

    /// The range of all pages with one of `flags`, in arenas that have any changes.
    pub fn changed(&self, flags: Flags) -> impl Iterator<Item = Range<usize>> {
        self.all_bounds()
            .enumerate()
            .filter(|(arena, bounds)| {
                self.changes.table(*arena, bounds.len() / page_bytes()).is_some()
            })
            .flat_map(move |(_, bounds)| self.runs(bounds, move |found| found & flags != 0))
            .filter(|run| run.kind)
            .map(|run| run.range)
    }

    /// Whether nothing was ever changed in the arena in which `address` lies.
    #[must_use]
    pub fn is_unchanged(&self, address: usize) -> bool {
        self.bounds_of(address).is_none_or(|(arena, bounds)| {
            self.changes.table(arena, bounds.len() / page_bytes()).is_none()
        })
    }

    /// From `at` on: the end of what is changed, or of what is not, and which of the two it is.
    pub(crate) fn changed_run(&self, at: usize, end: usize) -> (usize, bool) {
        self.runs(at..end, |flags| flags != 0)
            .next()
            .map_or((end, false), |run| (run.range.end, run.kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Discarded, Source};
    use crate::status::Result;

    const PAGE: usize = 4096;

    /// Gives the same range once.
    struct Once(usize);

    impl Source for Once {
        fn add_arena(&self, _bytes: usize) -> Result<usize> {
            Ok(self.0)
        }

        fn discard(&self, _address: usize, _bytes: usize) -> Discarded {
            Discarded::Done
        }

        fn open(&self, _range: &Range<usize>) -> io::Result<()> {
            Ok(())
        }
    }

    fn runs(heap: &Heap, range: Range<usize>) -> Vec<(Range<usize>, bool, Flags)> {
        heap.runs(range, |flags| flags).map(|run| (run.range, run.ours, run.kind)).collect()
    }

    #[test]
    fn ranges_are_cut_at_arenas_and_at_changes() {
        let (heap, start) = (Heap::new(PAGE), 1 << 40);
        assert_eq!(runs(&heap, PAGE..3 * PAGE), [(PAGE..3 * PAGE, false, 0)]);
        heap.allocate(&Once(start), 1 << 20, 1).expect("room");
        assert!(!heap.owns_part_of(&(start - PAGE..start)));
        assert!(heap.owns_part_of(&(start - PAGE..start + 1)));
        let around = start - PAGE..start + 4 * PAGE;
        let (before, page) = (start - PAGE..start, |n: usize| start + n * PAGE);
        assert_eq!(
            runs(&heap, around.clone()),
            [(before.clone(), false, 0), (page(0)..page(4), true, 0)]
        );
        heap.change(start - PAGE..page(2), LOCKED | EXEC, 0).expect("a table");
        heap.change(page(1)..page(3), NO_READ, EXEC).expect("a table");
        assert_eq!(
            runs(&heap, around.clone()),
            [
                (before, false, 0),
                (page(0)..page(1), true, LOCKED | EXEC),
                (page(1)..page(2), true, LOCKED | NO_READ),
                (page(2)..page(3), true, NO_READ),
                (page(3)..page(4), true, 0),
            ]
        );
        assert!(heap.changed(LOCKED).eq(std::iter::once(page(0)..page(2))));
        heap.change(around, 0, Flags::MAX).expect("nothing is set");
        assert_eq!(heap.changed(Flags::MAX).count(), 0);
    }

    /// As two threads may: one protects a page, the other locks it.
    #[test]
    fn flags_that_threads_change_at_once_are_all_kept() {
        const ROUNDS: usize = 200_000;
        let heap = Heap::new(PAGE);
        let block = heap.allocate(&Once(1 << 40), 2 * PAGE, 1).expect("room").address;
        let page = block..block + PAGE;
        let own_flag = |flag: Flags| {
            for round in 0..ROUNDS {
                let is_set = round % 2 == 0;
                let (set, clear) = if is_set { (flag, 0) } else { (0, flag) };
                heap.change(page.clone(), set, clear).expect("a table");
                let seen = runs(&heap, page.clone())[0].2 & flag;
                assert_eq!(seen, set, "round {round}: a change of flag {flag} was lost");
            }
        };
        std::thread::scope(|scope| {
            for flag in [NO_WRITE, LOCKED, WIPED] {
                scope.spawn(move || own_flag(flag));
            }
        });
        assert_eq!(runs(&heap, page.clone()), [(page, true, 0)]);
    }

    #[test]
    fn what_stays_changed_is_nobodys_once_it_is_freed() {
        let (heap, source) = (Heap::new(PAGE), Once(1 << 40));
        let block = heap.allocate(&source, 8 * PAGE, 1).expect("room").address;
        heap.change(block + 2 * PAGE..block + 3 * PAGE, REPLACED, 0).expect("a table");
        assert_eq!(heap.resize(block, PAGE), Ok(true));
        assert_eq!(heap.usable_bytes(block), Ok(8 * PAGE), "its end stays with it");
        heap.free(&source, block).expect("live");
        let pages: Vec<_> =
            (0..7).map(|_| heap.allocate(&source, PAGE, 1).expect("room").address).collect();
        assert!(!pages.contains(&(block + 2 * PAGE)));
        assert!(pages.iter().all(|&page| page < block + 8 * PAGE), "all others are used again");
    }
}
