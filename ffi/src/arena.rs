//! One arena: a managed range that is cut into blocks of whole pages.
//!
//! Nothing of this lies in the arena itself. Managed memory holds the program's bytes only: a list
//! threaded through free blocks would bring parked pages back just to be walked.
//!
//! Each page has a `Tag` in a table beside the arena. A block is described at its first page
//! (length, state, links) and at its last (length, so that a neighbour finds its beginning). Blocks
//! tile `[0, top)`; pages from `top` up read as zeros, as nobody used them or all was discarded. Free blocks come in two kinds that are never
//! merged with each other: *dirty* ones hold old bytes, *clean* ones read as zeros.
//!
//! A discard whose outcome nobody knows may still happen. Its block is then neither dirty nor clean but
//! *doubtful*: nobody gets it until a later discard of the same pages was confirmed. Doubtful blocks are
//! linked through their own tags, so that any number of them needs no memory.
//!
//! Invariants, checked by `Arena::check` in tests:
//! - sum of the lengths of all blocks == `top`; a page is the first of a block exactly if its state is not `INSIDE`;
//! - a free block is in exactly one bin, that of its kind and length; a dirty one that holds a whole piece
//!   also in the age list;
//! - a doubtful block is in the list of those, and in no bin; `held` counts the blocks in a caller's hands;
//! - two neighbours are never both dirty or both clean, and no clean block ends at `top`.

mod claim;

pub use claim::Claim;

use crate::space::{Table, ZeroIsValid};
use std::io;
use tiermgr_core::units::low_u32;

/// Steps of two to the eighth: bins are at most 1/8 wide.
const STEPS_LOG: u32 = 3;
const BINS: usize = 240;
/// Blocks looked at in one bin before the next bin is tried.
const SCAN_MAX: u32 = 16;

/// What a page is the beginning of.
type State = u8;
const INSIDE: State = 0;
const USED: State = 1;
const DIRTY: State = 2;
const CLEAN: State = 3;
/// Taken out to be discarded, in a caller's hands.
const BUSY: State = 4;
/// Waits for a discard to be confirmed.
const DOUBTFUL: State = 5;
/// Nobody's for good.
const RETIRED: State = 6;

/// A kind of free block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Holds old bytes.
    Dirty,
    /// Reads as zeros.
    Clean,
}

impl Kind {
    const fn state(self) -> State {
        match self {
            Self::Dirty => DIRTY,
            Self::Clean => CLEAN,
        }
    }

    const fn bin_base(self) -> usize {
        match self {
            Self::Dirty => 0,
            Self::Clean => BINS,
        }
    }
}

/// What a block taken out becomes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Free, of this kind.
    Free(Kind),
    /// Nobody's, until a discard of it is confirmed.
    Doubtful,
    /// Nobody's for good: the program has put something else there.
    Retired,
}

/// Links hold page number + 1, so that zero means "none".
#[derive(Clone, Copy, Debug)]
struct Tag {
    pages: u32,
    back: u32,
    next: u32,
    prev: u32,
    older: u32,
    newer: u32,
    state: State,
}

// SAFETY: integers only.
unsafe impl ZeroIsValid for Tag {}
// SAFETY: integers only.
unsafe impl ZeroIsValid for u32 {}

/// Pages of an arena, by number from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first page.
    pub first: u32,
    /// Its length in pages.
    pub pages: u32,
}

/// What an arena needs beside its memory.
#[derive(Debug)]
pub struct Tables {
    capacity: u32,
    tags: Table<Tag>,
    bins: Table<u32>,
}

impl Tables {
    /// Those for `bytes` of memory.
    ///
    /// # Errors
    /// `ENOMEM` where there is no room for them, or where it has 2^32 pages or more.
    pub fn new(bytes: usize, page_bytes: usize) -> io::Result<Self> {
        let capacity = u32::try_from(bytes / page_bytes)
            .ok()
            .filter(|&pages| pages < u32::MAX)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let tags = Table::zeroed(capacity as usize)?;
        match Table::zeroed(2 * BINS) {
            Ok(bins) => Ok(Self { capacity, tags, bins }),
            Err(error) => {
                tags.unmap();
                Err(error)
            }
        }
    }

    /// Gives them back.
    pub fn unmap(self) {
        self.tags.unmap();
        self.bins.unmap();
    }
}

/// A range cut into blocks.
#[derive(Debug)]
pub struct Arena {
    start: usize,
    page_bytes: usize,
    capacity: u32,
    top: u32,
    /// The highest `top` from which that was lowered: what lies below was used once, and may have no access.
    reached: u32,
    /// Only whole pieces of so many pages, on a multiple of their length, are worth a discard.
    piece: u32,
    tags: Table<Tag>,
    bins: Table<u32>,
    /// Which bins hold something.
    filled: [[u64; 4]; 2],
    /// Of dirty blocks and of doubtful ones.
    ages: [Ages; 2],
    dirty_pages: u32,
    held: u32,
}

/// Both ends of a list of blocks in the order in which they came to it.
#[derive(Clone, Copy, Debug)]
struct Ages {
    oldest: u32,
    newest: u32,
}

const OF_DIRTY: usize = 0;
const OF_DOUBTFUL: usize = 1;

fn bin_of(pages: u32) -> usize {
    let log = pages.max(1).ilog2();
    let bin = if log < STEPS_LOG {
        pages
    } else {
        ((log - STEPS_LOG + 1) << STEPS_LOG) + ((pages >> (log - STEPS_LOG)) & 7)
    };
    bin as usize
}

impl Arena {
    /// An arena over as much fresh memory from `start` as the tables are for, of which whole pieces of
    /// `piece` pages are discarded.
    #[must_use]
    pub const fn new(start: usize, tables: Tables, page_bytes: usize, piece: u32) -> Self {
        let Tables { capacity, tags, bins } = tables;
        Self {
            start,
            page_bytes,
            capacity,
            top: 0,
            reached: 0,
            piece: if piece == 0 { 1 } else { piece },
            tags,
            bins,
            filled: [[0; 4]; 2],
            ages: [Ages { oldest: 0, newest: 0 }; 2],
            dirty_pages: 0,
            held: 0,
        }
    }

    /// Address of a page.
    #[must_use]
    pub fn address(&self, page: u32) -> usize {
        self.start + page as usize * self.page_bytes
    }

    /// Pages of dirty blocks.
    #[must_use]
    pub const fn dirty_pages(&self) -> u32 {
        self.dirty_pages
    }

    /// The live block that begins at `address`.
    #[must_use]
    pub fn live_block(&self, address: usize) -> Option<Block> {
        let offset = address.checked_sub(self.start)?;
        let first = u32::try_from(offset / self.page_bytes).ok()?;
        let is_live = offset.is_multiple_of(self.page_bytes)
            && first < self.top
            && self.tag(first).state == USED;
        is_live.then(|| Block { first, pages: self.tag(first).pages })
    }

    /// Pages from `address` on, if all lie in this arena.
    #[must_use]
    pub fn range(&self, address: usize, pages: u32) -> Option<Block> {
        let offset = address.checked_sub(self.start)?;
        let first = u32::try_from(offset / self.page_bytes).ok()?;
        let ends_inside = first.checked_add(pages).is_some_and(|end| end <= self.capacity);
        (offset.is_multiple_of(self.page_bytes) && ends_inside).then_some(Block { first, pages })
    }

    /// Takes `pages` from the free blocks of a kind that are at most `most` pages long, the start a multiple
    /// of `align` pages.
    pub fn take(&mut self, kind: Kind, pages: u32, align: u32, most: u32) -> Option<Block> {
        let (free, first) = self.find(kind, pages, align, most)?;
        let length = self.tag(free).pages;
        self.remove(free);
        let lead = first - free;
        if lead > 0 {
            self.insert(Block { first: free, pages: lead }, kind);
        }
        let rest = length - lead - pages;
        if rest > 0 {
            self.insert(Block { first: first + pages, pages: rest }, kind);
        }
        let block = Block { first, pages };
        self.write(block, USED);
        Some(block)
    }

    /// Takes `pages` from behind all blocks.
    pub fn take_last(&mut self, pages: u32, align: u32) -> Option<Block> {
        self.take_from(self.top, pages, align)
    }

    /// Takes `pages` that were never used.
    pub fn take_fresh(&mut self, pages: u32, align: u32) -> Option<Block> {
        self.take_from(self.top.max(self.reached), pages, align)
    }

    /// From a page on that is none of a block's.
    fn take_from(&mut self, from: u32, pages: u32, align: u32) -> Option<Block> {
        let first = self.aligned(from, align)?;
        let end = first.checked_add(pages).filter(|&end| end <= self.capacity)?;
        let gap = first - self.top;
        let gap_first = self.top;
        self.top = end;
        if gap > 0 {
            self.insert(Block { first: gap_first, pages: gap }, Kind::Clean);
        }
        let block = Block { first, pages };
        self.write(block, USED);
        Some(block)
    }

    /// Takes `pages` from free blocks of both kinds that lie side by side, and counts as dirty. This looks at
    /// block after block.
    pub fn take_across(&mut self, pages: u32, align: u32) -> Option<Block> {
        let block = self.find_across(pages, align)?;
        if block.first >= self.top {
            return self.take_last(pages, align);
        }
        let end = block.first + block.pages;
        let mut at = block.first;
        while self.tag(at).state == INSIDE {
            at -= 1;
        }
        while at < end && at < self.top {
            let Tag { pages: length, state, .. } = *self.tag(at);
            let kind = if state == DIRTY { Kind::Dirty } else { Kind::Clean };
            self.remove(at);
            self.tag_mut(at).state = INSIDE;
            let lead = Block { first: at, pages: block.first.saturating_sub(at) };
            let rest = Block { first: end, pages: (at + length).saturating_sub(end) };
            for part in [lead, rest] {
                if part.pages > 0 {
                    self.insert(part, kind);
                }
            }
            at += length;
        }
        self.top = self.top.max(end);
        self.write(block, USED);
        Some(block)
    }

    fn find_across(&self, pages: u32, align: u32) -> Option<Block> {
        let (mut run, mut page) = (0, 0);
        while page < self.top {
            let Tag { pages: length, state, .. } = *self.tag(page);
            page += length;
            if state != DIRTY && state != CLEAN {
                run = page;
                continue;
            }
            // Behind the last block nothing is in the way.
            let end = if page == self.top { self.capacity } else { page };
            let first = self.aligned(run, align)?;
            if first.checked_add(pages)? <= end {
                return Some(Block { first, pages });
            }
        }
        None
    }

    /// Frees a live block.
    pub fn free(&mut self, block: Block, fate: Fate) {
        match fate {
            Fate::Free(kind) => self.put(block, kind),
            Fate::Doubtful => {
                self.write(block, DOUBTFUL);
                self.link(OF_DOUBTFUL, block.first);
            }
            Fate::Retired => self.write(block, RETIRED),
        }
    }

    /// Frees pages of live blocks, whole ones and parts. False, and nothing is changed, where one of
    /// them is not live.
    pub fn release(&mut self, range: Block, fate: Fate) -> bool {
        let is_cut = self.cut(range);
        if is_cut {
            self.free(range, fate);
        }
        is_cut
    }

    /// Makes pages of live blocks a live block of its own. False, and nothing is changed, where one of them
    /// is not live.
    fn cut(&mut self, range: Block) -> bool {
        let Some(end) = range.first.checked_add(range.pages).filter(|&end| end <= self.top) else {
            return false;
        };
        let first = self.first_of(range);
        let mut last_end = first;
        while last_end < end {
            let Tag { pages, state, .. } = *self.tag(last_end);
            if state != USED {
                return false;
            }
            last_end += pages;
        }
        let mut page = first;
        while page < end {
            let pages = self.tag(page).pages;
            self.tag_mut(page).state = INSIDE;
            page += pages;
        }
        if first < range.first {
            self.write(Block { first, pages: range.first - first }, USED);
        }
        if end < last_end {
            self.write(Block { first: end, pages: last_end - end }, USED);
        }
        self.write(range, USED);
        true
    }

    /// Whether [`Self::take_oldest_dirty`] has something to give.
    #[must_use]
    pub const fn has_whole_dirty(&self) -> bool {
        self.ages[OF_DIRTY].oldest != 0
    }

    /// Takes the whole pieces of the dirty block that was freed longest ago. They belong to the caller
    /// until [`Self::give_back`].
    pub fn take_oldest_dirty(&mut self) -> Option<Block> {
        let first = self.ages[OF_DIRTY].oldest.checked_sub(1)?;
        let all = Block { first, pages: self.tag(first).pages };
        let whole = self.whole(all)?;
        self.remove(first);
        let lead = whole.first - all.first;
        if lead > 0 {
            self.insert(Block { first, pages: lead }, Kind::Dirty);
        }
        let rest = all.pages - lead - whole.pages;
        if rest > 0 {
            let first = whole.first + whole.pages;
            self.insert(Block { first, pages: rest }, Kind::Dirty);
        }
        self.write(whole, USED);
        Some(self.hold(whole.first))
    }

    /// The whole pieces of a block.
    fn whole(&self, block: Block) -> Option<Block> {
        let first = self.aligned(block.first, self.piece)?;
        let end = block.first + block.pages;
        let pages = end.checked_sub(first)? / self.piece * self.piece;
        (pages > 0).then_some(Block { first, pages })
    }

    /// Takes the block that has been doubtful longest. It belongs to the caller until
    /// [`Self::give_back`].
    pub fn take_oldest_doubtful(&mut self) -> Option<Block> {
        let first = self.ages[OF_DOUBTFUL].oldest.checked_sub(1)?;
        self.unlink(OF_DOUBTFUL, first);
        Some(self.hold(first))
    }

    /// Gives back what [`Self::take_oldest_dirty`] or [`Self::take_oldest_doubtful`] took; false if
    /// [`Self::forget_discards`] has done so already.
    pub fn give_back(&mut self, block: Block, fate: Fate) -> bool {
        if !self.is_held(block) {
            return false;
        }
        self.held -= 1;
        self.free(block, fate);
        true
    }

    /// Whether a block is still taken.
    #[must_use]
    pub fn is_held(&self, block: Block) -> bool {
        let tag = self.tag(block.first);
        tag.state == BUSY && tag.pages == block.pages
    }

    /// In a forked child, for which nobody has ordered anything yet: what a discard of the parent's
    /// was on its way to is dirty here.
    pub fn forget_discards(&mut self) {
        while let Some(block) = self.take_oldest_doubtful() {
            self.give_back(block, Fate::Free(Kind::Dirty));
        }
        // Held by threads that the child does not have. Rare, and then one or two.
        let mut page = 0;
        while self.held > 0 && page < self.top {
            let Tag { pages, state, .. } = *self.tag(page);
            if state == BUSY {
                self.give_back(Block { first: page, pages }, Fate::Free(Kind::Dirty));
                page = 0;
            } else {
                page += pages;
            }
        }
    }

    fn hold(&mut self, first: u32) -> Block {
        let block = Block { first, pages: self.tag(first).pages };
        self.write(block, BUSY);
        self.held += 1;
        block
    }

    /// Makes a live block `pages` long, if its neighbours are free.
    pub fn grow(&mut self, block: Block, pages: u32) -> bool {
        let mut end = block.first + block.pages;
        let Some(wanted) = block.first.checked_add(pages).filter(|&wanted| wanted <= self.capacity)
        else {
            return false;
        };
        while end < wanted && end < self.top {
            let tag = self.tag(end);
            if tag.state != DIRTY && tag.state != CLEAN {
                return false;
            }
            end += tag.pages;
        }
        let mut end = block.first + block.pages;
        while end < wanted && end < self.top {
            let Tag { pages: length, state, .. } = *self.tag(end);
            self.remove(end);
            self.tag_mut(end).state = INSIDE;
            if end + length > wanted {
                let kind = if state == DIRTY { Kind::Dirty } else { Kind::Clean };
                self.insert(Block { first: wanted, pages: end + length - wanted }, kind);
            }
            end += length;
        }
        self.top = self.top.max(wanted);
        self.write(Block { first: block.first, pages }, USED);
        true
    }

    /// Frees the end of a live block, of which `pages` remain.
    pub fn shrink(&mut self, block: Block, pages: u32) {
        let rest = Block { first: block.first + pages, pages: block.pages - pages };
        self.write(Block { first: block.first, pages }, USED);
        self.write(rest, USED);
        self.free(rest, Fate::Free(Kind::Dirty));
    }

    /// Merges a block with its neighbours of the same kind and files it.
    fn put(&mut self, block: Block, kind: Kind) {
        let Block { mut first, mut pages } = block;
        let state = kind.state();
        if first > 0 {
            let before = first - self.tag(first - 1).back;
            if self.tag(before).state == state {
                self.remove(before);
                self.tag_mut(first).state = INSIDE;
                pages += first - before;
                first = before;
            }
        }
        let end = first + pages;
        if end < self.top && self.tag(end).state == state {
            self.remove(end);
            self.tag_mut(end).state = INSIDE;
            pages += self.tag(end).pages;
        }
        if kind == Kind::Clean && first + pages == self.top {
            self.tag_mut(first).state = INSIDE;
            self.reached = self.reached.max(self.top);
            self.top = first;
        } else {
            self.insert(Block { first, pages }, kind);
        }
    }

    /// The smallest of the first few free blocks, at most `most` pages long, that hold the wanted run; and
    /// where the run begins.
    fn find(&self, kind: Kind, pages: u32, align: u32, most: u32) -> Option<(u32, u32)> {
        let mut bin = bin_of(pages);
        loop {
            bin = self.next_filled(kind, bin).filter(|&bin| bin <= bin_of(most))?;
            let mut best: Option<(u32, u32)> = None;
            let mut link = self.bins[kind.bin_base() + bin];
            for _ in 0..SCAN_MAX {
                let Some(free) = link.checked_sub(1) else { break };
                let tag = self.tag(free);
                let fits = self.aligned(free, align).filter(|first| {
                    let is_allowed = tag.pages <= most;
                    is_allowed
                        && (first - free).checked_add(pages).is_some_and(|used| used <= tag.pages)
                });
                if let Some(first) = fits
                    && best.is_none_or(|(best, _)| tag.pages < self.tag(best).pages)
                {
                    best = Some((free, first));
                }
                link = tag.next;
            }
            if best.is_some() {
                return best;
            }
            bin += 1;
        }
    }

    fn next_filled(&self, kind: Kind, from: usize) -> Option<usize> {
        let words = &self.filled[usize::from(kind == Kind::Clean)];
        let mut word = from / 64;
        let mut mask = u64::MAX << (from % 64);
        while let Some(&bits) = words.get(word) {
            let found = bits & mask;
            if found != 0 {
                return Some(word * 64 + found.trailing_zeros() as usize);
            }
            mask = u64::MAX;
            word += 1;
        }
        None
    }

    /// The first page from `page` on whose *address* is a multiple of `align` pages.
    fn aligned(&self, page: u32, align: u32) -> Option<u32> {
        let absolute = (self.start / self.page_bytes) as u64 + u64::from(page);
        let up = absolute.next_multiple_of(u64::from(align)) - absolute;
        page.checked_add(low_u32(up))
    }

    fn write(&mut self, block: Block, state: State) {
        let tag = self.tag_mut(block.first);
        tag.pages = block.pages;
        tag.state = state;
        self.tag_mut(block.first + block.pages - 1).back = block.pages;
    }

    fn insert(&mut self, block: Block, kind: Kind) {
        self.write(block, kind.state());
        let bin = bin_of(block.pages);
        let slot = kind.bin_base() + bin;
        let link = block.first + 1;
        let head = self.bins[slot];
        self.bins[slot] = link;
        self.filled[usize::from(kind == Kind::Clean)][bin / 64] |= 1 << (bin % 64);
        let tag = self.tag_mut(block.first);
        tag.next = head;
        tag.prev = 0;
        if let Some(head) = head.checked_sub(1) {
            self.tag_mut(head).prev = link;
        }
        if kind == Kind::Dirty {
            if self.whole(block).is_some() {
                self.link(OF_DIRTY, block.first);
            }
            self.dirty_pages += block.pages;
        }
    }

    /// Takes a free block out of its lists. Its state stays for the caller to change.
    fn remove(&mut self, first: u32) {
        let tag = *self.tag(first);
        let kind = if tag.state == DIRTY { Kind::Dirty } else { Kind::Clean };
        let bin = bin_of(tag.pages);
        match tag.prev.checked_sub(1) {
            Some(prev) => self.tag_mut(prev).next = tag.next,
            None => {
                self.bins[kind.bin_base() + bin] = tag.next;
                if tag.next == 0 {
                    self.filled[usize::from(kind == Kind::Clean)][bin / 64] &= !(1 << (bin % 64));
                }
            }
        }
        if let Some(next) = tag.next.checked_sub(1) {
            self.tag_mut(next).prev = tag.prev;
        }
        if kind == Kind::Dirty {
            if self.whole(Block { first, pages: tag.pages }).is_some() {
                self.unlink(OF_DIRTY, first);
            }
            self.dirty_pages -= tag.pages;
        }
    }

    /// Puts a block at the young end of a list.
    fn link(&mut self, list: usize, first: u32) {
        let link = first + 1;
        let newest = std::mem::replace(&mut self.ages[list].newest, link);
        let tag = self.tag_mut(first);
        tag.older = newest;
        tag.newer = 0;
        match newest.checked_sub(1) {
            Some(newest) => self.tag_mut(newest).newer = link,
            None => self.ages[list].oldest = link,
        }
    }

    fn unlink(&mut self, list: usize, first: u32) {
        let Tag { older, newer, .. } = *self.tag(first);
        match older.checked_sub(1) {
            Some(older) => self.tag_mut(older).newer = newer,
            None => self.ages[list].oldest = newer,
        }
        match newer.checked_sub(1) {
            Some(newer) => self.tag_mut(newer).older = older,
            None => self.ages[list].newest = older,
        }
    }

    fn tag(&self, page: u32) -> &Tag {
        &self.tags[page as usize]
    }

    fn tag_mut(&mut self, page: u32) -> &mut Tag {
        &mut self.tags[page as usize]
    }
}

#[cfg(test)]
mod tests;
