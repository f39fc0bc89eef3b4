//! The arenas of a client together: where a block comes from, and how much freed memory is kept.

use crate::arena::{Arena, Block, Fate, Kind};
pub use crate::arena::{Claim, Tables};
use std::ops::Range;
use tiermgr_core::units::low_u32;

/// Arenas of one client. They double in size, so the address space ends first.
pub const ARENAS_MAX: usize = 64;
/// Freed bytes that are kept for reuse: a quarter of what is live, but within these bounds. Reuse
/// costs neither a message nor a page fault; but under pressure old bytes are parked like any other.
const DIRTY_BYTES_MIN: usize = 64 << 20;
const DIRTY_BYTES_MAX: usize = 256 << 20;
/// Blocks from here up begin on a huge page.
const HUGE_BYTES: usize = 2 << 20;
/// Ranges in doubt that are told apart; see [`Arenas::doubt`].
const DOUBTS_MAX: usize = 8;
/// The end of a block is given back by `realloc` from here up.
const SHRINK_BYTES_MIN: usize = 64 << 10;

/// A new block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// Its first byte.
    pub address: usize,
    /// It reads as zeros.
    pub is_zero: bool,
}

/// Which free memory a block is cut from first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// What holds old bytes, since it is there already; then what reads as zeros.
    Dirty,
    /// What reads as zeros.
    Zero,
    /// What was never used, and nothing else.
    Fresh,
}

/// Where in an arena a block comes from.
#[derive(Clone, Copy)]
enum Place {
    /// A free block of a kind that is at most so many pages long.
    Free(Kind, u32),
    /// Behind all blocks.
    Last,
    /// Pages that were never used.
    Fresh,
}

/// What is known of a range that the daemon was told to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discarded {
    /// It reads as zeros, and nothing is on its way to it.
    Done,
    /// Nothing is on its way to it; it may hold old bytes.
    Refused,
    /// It may still happen: whoever wrote there now could find zeros later.
    Unknown,
}

/// Free memory that the daemon is to forget; in nobody's hands but the taker's.
#[derive(Debug)]
pub struct Excess {
    arena: usize,
    block: Block,
    /// An earlier discard of it may still happen.
    is_doubtful: bool,
    /// First byte.
    pub address: usize,
    /// Length.
    pub bytes: usize,
}

impl Excess {
    /// Whether it came from [`Arenas::take_doubtful`].
    #[must_use]
    pub const fn is_doubtful(&self) -> bool {
        self.is_doubtful
    }
}

/// The address is not that of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLive;

/// All arenas of a client.
#[derive(Debug)]
pub struct Arenas {
    page_bytes: usize,
    /// What is discarded in one, in pages: see [`Self::new`].
    piece: u32,
    /// The first `count` are there. Most clients have one or two: the others are not looked at. Boxed, since a client
    /// is made on whatever stack the thread has that allocates first.
    list: Box<[Option<Arena>]>,
    count: usize,
    live_pages: usize,
    dirty_pages: usize,
    /// Ranges of live blocks that a discard may still reach. Empty ones are unused.
    doubts: [Range<usize>; DOUBTS_MAX],
}

impl Arenas {
    /// None yet. Freed memory is discarded in whole pieces of `piece` pages.
    #[must_use]
    pub fn new(page_bytes: usize, piece: u32) -> Self {
        Self {
            page_bytes,
            piece,
            list: (0..ARENAS_MAX).map(|_| None).collect(),
            count: 0,
            live_pages: 0,
            dirty_pages: 0,
            doubts: [const { 0..0 }; DOUBTS_MAX],
        }
    }

    /// Arenas so far.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Bytes of live blocks.
    #[must_use]
    pub const fn live_bytes(&self) -> usize {
        self.live_pages * self.page_bytes
    }

    /// Whether there can be no more.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.count == ARENAS_MAX
    }

    /// Adds fresh memory: as much as the tables are for. `None`: there are too many arenas.
    pub fn add(&mut self, start: usize, tables: Tables) -> Option<()> {
        let slot = self.list.get_mut(self.count)?;
        *slot = Some(Arena::new(start, tables, self.page_bytes, self.piece));
        self.count += 1;
        Some(())
    }

    /// A block of at least `bytes` on a multiple of `align`, a power of two. `None`: another arena is
    /// needed.
    pub fn allocate(&mut self, bytes: usize, align: usize, first: First) -> Option<Allocated> {
        let pages = self.pages_of(bytes)?;
        let align = low_u32(align.div_ceil(self.page_bytes).max(1) as u64);
        let huge = low_u32((HUGE_BYTES / self.page_bytes) as u64);
        let (block, arena, is_zero) = if pages >= huge && align < huge {
            self.take(pages, huge, first).or_else(|| self.take(pages, align, first))?
        } else {
            self.take(pages, align, first)?
        };
        self.count_taken(block.pages, !is_zero);
        let address = self.list[arena].as_ref()?.address(block.first);
        Some(Allocated { address, is_zero })
    }

    /// From the arenas in their order.
    fn take(&mut self, pages: u32, align: u32, first: First) -> Option<(Block, usize, bool)> {
        const ANY: u32 = u32::MAX;
        // What is less than a huge page goes where no huge page has room, or it would be in the way of one.
        let hole = low_u32((HUGE_BYTES / self.page_bytes) as u64) - 1;
        let dirty = |most| Place::Free(Kind::Dirty, most);
        let clean = |most| Place::Free(Kind::Clean, most);
        let order: &[Place] = match first {
            First::Dirty if pages <= hole => {
                &[dirty(hole), clean(hole), dirty(ANY), clean(ANY), Place::Last]
            }
            First::Dirty => &[dirty(ANY), clean(ANY), Place::Last],
            First::Zero => &[clean(ANY), Place::Last, dirty(ANY)],
            First::Fresh => &[Place::Fresh],
        };
        order.iter().find_map(|&from| {
            let mut arenas = self.list[..self.count].iter_mut().flatten().enumerate();
            arenas.find_map(|(index, arena)| {
                let block = match from {
                    Place::Free(kind, most) => arena.take(kind, pages, align, most),
                    Place::Last => arena.take_last(pages, align),
                    Place::Fresh => arena.take_fresh(pages, align),
                };
                let was_dirty = matches!(from, Place::Free(Kind::Dirty, _));
                block.map(|block| (block, index, !was_dirty))
            })
        })
    }

    fn count_taken(&mut self, pages: u32, was_dirty: bool) {
        self.live_pages += pages as usize;
        if was_dirty {
            self.dirty_pages -= pages as usize;
        }
    }

    /// Takes back what [`Self::allocate`] has just given, as it was.
    pub fn put_back(&mut self, block: Allocated, bytes: usize) {
        let kind = if block.is_zero { Kind::Clean } else { Kind::Dirty };
        // A live block: this never fails.
        let _freed = self.release_as(block.address, bytes, Some(Fate::Free(kind))).is_ok();
    }

    /// Frees pages of live blocks for good: nobody gets them any more.
    ///
    /// # Errors
    /// [`NotLive`], and nothing is changed.
    pub fn retire(&mut self, address: usize, bytes: usize) -> Result<(), NotLive> {
        self.release_as(address, bytes, Some(Fate::Retired))
    }

    /// Takes pages of live blocks, whole ones and parts, to be discarded at once.
    ///
    /// # Errors
    /// [`NotLive`], and nothing is changed.
    pub fn take_live(&mut self, address: usize, bytes: usize) -> Result<Excess, NotLive> {
        let pages = self.pages_of(bytes).ok_or(NotLive)?;
        let is_doubtful = self.fate_of(address, pages) == Fate::Doubtful;
        let (arena, block) = self.at(address, pages).ok_or(NotLive)?;
        if !self.list[arena].as_mut().is_some_and(|arena| arena.release_held(block)) {
            return Err(NotLive);
        }
        self.live_pages -= pages as usize;
        Ok(Excess { arena, block, is_doubtful, address, bytes })
    }

    /// Whether a range is what somebody has taken to be discarded, and not given back.
    #[must_use]
    pub fn is_held(&self, address: usize, bytes: usize) -> bool {
        self.pages_of(bytes)
            .and_then(|pages| self.at(address, pages))
            .and_then(|(arena, block)| Some(self.list[arena].as_ref()?.is_held(block)))
            .unwrap_or(false)
    }

    /// Whether all pages of a range are free and lie in one arena.
    #[must_use]
    pub fn is_free(&self, address: usize, bytes: usize) -> bool {
        self.pages_of(bytes)
            .and_then(|pages| self.at(address, pages))
            .and_then(|(arena, block)| Some(self.list[arena].as_ref()?.is_free(block)))
            .unwrap_or(false)
    }

    /// Makes the first pages of a range live, if they are free. Gives for how many of its bytes that is the
    /// answer; `None` where it does not lie in one arena.
    pub fn claim(&mut self, address: usize, bytes: usize) -> Option<(usize, Claim)> {
        let (arena, range) = self.at(address, self.pages_of(bytes)?)?;
        let (pages, claim) = self.list[arena].as_mut()?.claim(range);
        let length = pages as usize * self.page_bytes;
        if let Claim::Taken { is_zero, is_doubtful } = claim {
            self.count_taken(pages, !is_zero && !is_doubtful);
            if is_doubtful {
                self.doubt(address, length);
            }
        }
        Some((length, claim))
    }

    fn at(&self, address: usize, pages: u32) -> Option<(usize, Block)> {
        let mut arenas = self.list[..self.count].iter().flatten().enumerate();
        arenas.find_map(|(index, arena)| Some((index, arena.range(address, pages)?)))
    }

    /// As [`Self::allocate`], from free memory of both kinds side by side: pieces that were discarded, and
    /// between them what was too little for that. It takes long, and is for where there is no other memory.
    pub fn allocate_across(&mut self, bytes: usize, align: usize) -> Option<Allocated> {
        let pages = self.pages_of(bytes)?;
        let align = low_u32(align.div_ceil(self.page_bytes).max(1) as u64);
        self.list[..self.count].iter_mut().flatten().find_map(|arena| {
            let dirty_before = arena.dirty_pages();
            let block = arena.take_across(pages, align)?;
            self.dirty_pages -= (dirty_before - arena.dirty_pages()) as usize;
            self.live_pages += pages as usize;
            Some(Allocated { address: arena.address(block.first), is_zero: false })
        })
    }

    /// Frees the block at `address`.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn free(&mut self, address: usize) -> Result<(), NotLive> {
        self.free_but(address, |_, end| (end, false))
    }

    /// Frees the block at `address` without the parts of it that nobody may have again. `run` gives, for
    /// an address in the block and its end, where the next part ends and whether it is such a one.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn free_but(
        &mut self,
        address: usize,
        run: impl Fn(usize, usize) -> (usize, bool),
    ) -> Result<(), NotLive> {
        let (_, block) = self.find(address)?;
        self.release_but(address, block.pages as usize * self.page_bytes, run)
    }

    /// As [`Self::release`], without the parts that nobody may have again; see [`Self::free_but`].
    ///
    /// # Errors
    /// [`NotLive`]. Where no part is such a one nothing is changed then.
    pub fn release_but(
        &mut self,
        address: usize,
        bytes: usize,
        run: impl Fn(usize, usize) -> (usize, bool),
    ) -> Result<(), NotLive> {
        let end = address + bytes;
        let mut at = address;
        while at < end {
            let (until, is_lost) = run(at, end);
            let retired = is_lost.then_some(Fate::Retired);
            self.release_as(at, until - at, retired)?;
            at = until;
        }
        Ok(())
    }

    /// Frees pages of live blocks, whole ones and parts.
    ///
    /// # Errors
    /// [`NotLive`], and nothing is changed.
    pub fn release(&mut self, address: usize, bytes: usize) -> Result<(), NotLive> {
        self.release_as(address, bytes, None)
    }

    fn release_as(
        &mut self,
        address: usize,
        bytes: usize,
        fate: Option<Fate>,
    ) -> Result<(), NotLive> {
        let pages = self.pages_of(bytes).ok_or(NotLive)?;
        let fate = fate.unwrap_or_else(|| self.fate_of(address, pages));
        let (arena, range) = self.at(address, pages).ok_or(NotLive)?;
        if !self.list[arena].as_mut().is_some_and(|arena| arena.release(range, fate)) {
            return Err(NotLive);
        }
        self.count_freed(pages, fate);
        Ok(())
    }

    /// What becomes of pages that the program gives up.
    fn fate_of(&self, address: usize, pages: u32) -> Fate {
        let end = address + pages as usize * self.page_bytes;
        let in_doubt = self.doubts.iter().any(|doubt| doubt.start < end && address < doubt.end);
        if in_doubt { Fate::Doubtful } else { Fate::Free(Kind::Dirty) }
    }

    fn count_freed(&mut self, pages: u32, fate: Fate) {
        self.live_pages -= pages as usize;
        if fate == Fate::Free(Kind::Dirty) {
            self.dirty_pages += pages as usize;
        }
    }

    /// A discard of this range of live blocks may still happen, at any time. The program that asked for
    /// it knows; the next owner of the pages would not: once freed they are discarded again, and nobody
    /// gets them before that is confirmed.
    ///
    /// Ranges are few; of more than eight the last ones are taken for one that spans them. A block too
    /// many that is called doubtful costs a message.
    pub fn doubt(&mut self, start: usize, bytes: usize) {
        let range = start..start + bytes;
        let same_or_none = |doubt: &&mut Range<usize>| doubt.start == doubt.end || **doubt == range;
        match self.doubts.iter_mut().find(same_or_none) {
            Some(unused) => *unused = range,
            None => {
                let last = &mut self.doubts[DOUBTS_MAX - 1];
                *last = last.start.min(range.start)..last.end.max(range.end);
            }
        }
    }

    /// A discard of this range was confirmed: none that was sent before it is on its way any more.
    pub fn settle(&mut self, start: usize, bytes: usize) {
        for doubt in &mut self.doubts {
            if start <= doubt.start && doubt.end <= start + bytes {
                *doubt = 0..0;
            }
        }
    }

    /// In a forked child: see [`Arena::forget_discards`].
    pub fn forget_discards(&mut self) {
        self.doubts = [const { 0..0 }; DOUBTS_MAX];
        for arena in self.list[..self.count].iter_mut().flatten() {
            let dirty_before = arena.dirty_pages();
            arena.forget_discards();
            self.dirty_pages += (arena.dirty_pages() - dirty_before) as usize;
        }
    }

    /// Length of the block at `address`, which is what the caller of `malloc` may use.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn usable_bytes(&self, address: usize) -> Result<usize, NotLive> {
        self.find(address).map(|(_, block)| block.pages as usize * self.page_bytes)
    }

    /// Makes the block at `address` hold `bytes` where it stands; false if something is in the way.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn resize(&mut self, address: usize, bytes: usize) -> Result<bool, NotLive> {
        let (index, block) = self.find(address)?;
        let Some(pages) = self.pages_of(bytes) else { return Ok(false) };
        if pages <= block.pages {
            let rest = block.pages - pages;
            // A part in doubt stays with the whole: what confirms a discard is one of all its pages.
            if rest as usize * self.page_bytes >= SHRINK_BYTES_MIN
                && self.fate_of(address, block.pages) != Fate::Doubtful
                && let Some(arena) = &mut self.list[index]
            {
                arena.shrink(block, pages);
                self.count_freed(rest, Fate::Free(Kind::Dirty));
            }
            return Ok(true);
        }
        let Some(arena) = &mut self.list[index] else { return Ok(false) };
        let dirty_before = arena.dirty_pages();
        let grown = arena.grow(block, pages);
        if grown {
            self.dirty_pages -= (dirty_before - arena.dirty_pages()) as usize;
            self.live_pages += (pages - block.pages) as usize;
        }
        Ok(grown)
    }

    /// Takes freed memory beyond what is kept. The caller tells the daemon, without holding the lock,
    /// and gives it back.
    pub fn take_excess(&mut self) -> Option<Excess> {
        let kept = (self.live_bytes() / 4).clamp(DIRTY_BYTES_MIN, DIRTY_BYTES_MAX);
        if self.dirty_pages * self.page_bytes <= kept { None } else { self.take_dirty() }
    }

    /// Takes freed memory, as [`Self::take_excess`] does, but also what would be kept.
    pub fn take_dirty(&mut self) -> Option<Excess> {
        let (index, arena) = self.list[..self.count]
            .iter_mut()
            .flatten()
            .enumerate()
            .filter(|(_, arena)| arena.has_whole_dirty())
            .max_by_key(|(_, arena)| arena.dirty_pages())?;
        let block = arena.take_oldest_dirty()?;
        self.dirty_pages -= block.pages as usize;
        self.excess(index, block, false)
    }

    /// Takes a freed block that an earlier discard may still reach, to be discarded again.
    pub fn take_doubtful(&mut self) -> Option<Excess> {
        let (index, block) =
            self.list[..self.count].iter_mut().flatten().enumerate().find_map(
                |(index, arena)| arena.take_oldest_doubtful().map(|block| (index, block)),
            )?;
        self.excess(index, block, true)
    }

    fn excess(&self, arena: usize, block: Block, is_doubtful: bool) -> Option<Excess> {
        let address = self.list[arena].as_ref()?.address(block.first);
        let bytes = block.pages as usize * self.page_bytes;
        Some(Excess { arena, block, is_doubtful, address, bytes })
    }

    /// Takes back what [`Self::take_excess`] or [`Self::take_doubtful`] gave.
    pub fn give_back(&mut self, excess: &Excess, outcome: Discarded) {
        let fate = match outcome {
            Discarded::Done => Fate::Free(Kind::Clean),
            // That this discard was refused says nothing of the one before it.
            Discarded::Refused if !excess.is_doubtful => Fate::Free(Kind::Dirty),
            Discarded::Refused | Discarded::Unknown => Fate::Doubtful,
        };
        if fate == Fate::Free(Kind::Clean) {
            self.settle(excess.address, excess.bytes);
        }
        if let Some(Some(arena)) = self.list.get_mut(excess.arena)
            && arena.give_back(excess.block, fate)
            && fate == Fate::Free(Kind::Dirty)
        {
            self.dirty_pages += excess.block.pages as usize;
        }
    }

    fn find(&self, address: usize) -> Result<(usize, Block), NotLive> {
        self.list[..self.count]
            .iter()
            .flatten()
            .enumerate()
            .find_map(|(index, arena)| arena.live_block(address).map(|block| (index, block)))
            .ok_or(NotLive)
    }

    fn pages_of(&self, bytes: usize) -> Option<u32> {
        u32::try_from(bytes.div_ceil(self.page_bytes).max(1)).ok()
    }
}

#[cfg(test)]
mod tests;
