//! Certain pages instead of any: what a program unmaps, and what it maps at an address of its choice.

use super::{
    Arena, BUSY, Block, CLEAN, DIRTY, DOUBTFUL, Fate, INSIDE, Kind, OF_DOUBTFUL, Tag, USED,
};

/// What the first pages of a range are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// They were nobody's and are live now.
    Taken {
        /// They read as zeros.
        is_zero: bool,
        /// A discard may still reach them.
        is_doubtful: bool,
    },
    /// They were not free, and stay as they were.
    Live,
    /// They are about to be discarded.
    Busy,
}

impl Arena {
    /// The block that a page below `top` lies in.
    fn block_at(&self, page: u32) -> Block {
        let mut first = page;
        // The first page of all begins a block.
        while self.tag(first).state == INSIDE {
            first -= 1;
        }
        Block { first, pages: self.tag(first).pages }
    }

    /// The first page of the block in which a range begins. Where blocks are unmapped from their ends, those
    /// are nearer than their beginnings.
    pub(super) fn first_of(&self, range: Block) -> u32 {
        let end = range.first + range.pages;
        let ends_a_block = end == self.top || self.tag(end).state != INSIDE;
        if !ends_a_block {
            return self.block_at(range.first).first;
        }
        let mut first = end;
        while first > range.first {
            first -= self.tag(first - 1).back;
        }
        first
    }

    /// Takes pages of live blocks, whole ones and parts, to be discarded. They belong to the caller until
    /// [`Self::give_back`]. False, and nothing is changed, where one of them is not live.
    pub fn release_held(&mut self, range: Block) -> bool {
        let is_cut = self.cut(range);
        if is_cut {
            self.hold(range.first);
        }
        is_cut
    }

    /// Whether all pages of a range are free, and nothing is on its way to them.
    #[must_use]
    pub fn is_free(&self, range: Block) -> bool {
        let end = range.first + range.pages;
        let mut page = range.first;
        while page < end.min(self.top) {
            let block = self.block_at(page);
            if !matches!(self.tag(block.first).state, DIRTY | CLEAN) {
                return false;
            }
            page = block.first + block.pages;
        }
        true
    }

    /// Makes the first pages of a range live, if they are free, and gives how many of its pages that is the
    /// answer for.
    pub fn claim(&mut self, range: Block) -> (u32, Claim) {
        let Block { first, pages } = range;
        if first >= self.top {
            let gap = Block { first: self.top, pages: first - self.top };
            self.top = first + pages;
            if gap.pages > 0 {
                self.insert(gap, Kind::Clean);
            }
            self.write(range, USED);
            return (pages, Claim::Taken { is_zero: true, is_doubtful: false });
        }
        let block = self.block_at(first);
        let block_end = block.first + block.pages;
        let taken = Block { first, pages: pages.min(block_end - first) };
        let lead = Block { first: block.first, pages: first - block.first };
        let rest_first = first + taken.pages;
        let rest = Block { first: rest_first, pages: block_end - rest_first };
        let Tag { state, .. } = *self.tag(block.first);
        let fate = match state {
            DIRTY => Fate::Free(Kind::Dirty),
            CLEAN => Fate::Free(Kind::Clean),
            DOUBTFUL => Fate::Doubtful,
            BUSY => return (taken.pages, Claim::Busy),
            _ => return (taken.pages, Claim::Live),
        };
        if state == DOUBTFUL {
            self.unlink(OF_DOUBTFUL, block.first);
        } else {
            self.remove(block.first);
        }
        self.tag_mut(block.first).state = INSIDE;
        self.write(taken, USED);
        for part in [lead, rest] {
            if part.pages > 0 {
                self.write(part, USED);
                self.free(part, fate);
            }
        }
        let is_zero = state == CLEAN;
        (taken.pages, Claim::Taken { is_zero, is_doubtful: state == DOUBTFUL })
    }
}
