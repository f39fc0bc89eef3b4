use super::*;

impl Arena {
    /// Panics where an invariant of the module does not hold.
    pub(crate) fn check(&self) {
        let (mut page, mut dirty, mut free_blocks) = (0, 0, 0);
        let (mut held, mut doubtful, mut whole) = (0, Vec::new(), Vec::new());
        let mut before = INSIDE;
        while page < self.top {
            let tag = *self.tag(page);
            assert_ne!(tag.state, INSIDE, "page {page} begins a block");
            assert!(tag.pages > 0 && page + tag.pages <= self.top);
            assert_eq!(self.tag(page + tag.pages - 1).back, tag.pages);
            for inside in page + 1..page + tag.pages {
                assert_eq!(self.tag(inside).state, INSIDE, "page {inside} lies inside {page}");
            }
            assert!(
                tag.state != before || (tag.state != DIRTY && tag.state != CLEAN),
                "neighbours of one kind at {page}"
            );
            if tag.state == DIRTY {
                dirty += tag.pages;
                if self.whole(Block { first: page, pages: tag.pages }).is_some() {
                    whole.push(page);
                }
            }
            free_blocks += u32::from(tag.state == DIRTY || tag.state == CLEAN);
            held += u32::from(tag.state == BUSY);
            if tag.state == DOUBTFUL {
                doubtful.push(page);
            }
            before = tag.state;
            page += tag.pages;
        }
        assert_ne!(before, CLEAN, "a clean block ends at top");
        assert_eq!(page, self.top);
        assert_eq!(dirty, self.dirty_pages);
        assert_eq!(held, self.held);
        for (list, blocks) in [(OF_DOUBTFUL, doubtful), (OF_DIRTY, whole)] {
            let mut link = self.ages[list].oldest;
            let mut listed = Vec::new();
            while let Some(first) = link.checked_sub(1) {
                assert_eq!(self.tag(first).older.checked_sub(1), listed.last().copied());
                listed.push(first);
                link = self.tag(first).newer;
            }
            assert_eq!(self.ages[list].newest.checked_sub(1), listed.last().copied());
            listed.sort_unstable();
            assert_eq!(listed, blocks, "each doubtful or dirty block is in its list");
        }
        for kind in [Kind::Dirty, Kind::Clean] {
            for bin in 0..BINS {
                let mut link = self.bins[kind.bin_base() + bin];
                assert_eq!(link != 0, self.next_filled(kind, bin) == Some(bin));
                let mut prev = 0;
                while let Some(first) = link.checked_sub(1) {
                    let tag = *self.tag(first);
                    assert_eq!((tag.state, bin_of(tag.pages), tag.prev), (kind.state(), bin, prev));
                    free_blocks -= 1;
                    prev = link;
                    link = tag.next;
                }
            }
        }
        assert_eq!(free_blocks, 0, "each free block is in one bin");
    }
}

const DIRTIED: Fate = Fate::Free(Kind::Dirty);

fn arena(pages: usize) -> Arena {
    Arena::new(2 << 20, Tables::new(pages * 4096, 4096).expect("tables"), 4096, 1)
}

#[test]
fn bins_ascend_without_gaps() {
    let mut last = 0;
    for pages in 1..1 << 16 {
        let bin = bin_of(pages);
        assert!(bin == last || bin == last + 1, "{pages} pages");
        last = bin;
    }
    assert!(bin_of(u32::MAX) < BINS);
}

#[test]
fn freed_neighbours_become_one_block_again() {
    let mut arena = arena(100);
    let blocks: Vec<_> = (0..3).map(|_| arena.take_last(10, 1).expect("room")).collect();
    arena.free(blocks[0], DIRTIED);
    arena.free(blocks[2], DIRTIED);
    arena.check();
    arena.free(blocks[1], DIRTIED);
    arena.check();
    assert_eq!(arena.take(Kind::Dirty, 30, 1, u32::MAX), Some(Block { first: 0, pages: 30 }));
    arena.check();
}

#[test]
fn a_clean_block_at_the_top_lowers_it() {
    let mut arena = arena(100);
    let block = arena.take_last(100, 1).expect("room");
    assert_eq!(arena.take_last(1, 1), None);
    arena.free(block, DIRTIED);
    let dirty = arena.take_oldest_dirty().expect("dirty");
    arena.check();
    assert!(arena.give_back(dirty, Fate::Free(Kind::Clean)));
    arena.check();
    assert_eq!(arena.take_last(100, 1), Some(block));
}

#[test]
fn alignment_is_that_of_addresses() {
    let mut arena = arena(3000);
    arena.take_last(1, 1).expect("room");
    let block = arena.take_last(600, 512).expect("room");
    assert!(arena.address(block.first).is_multiple_of(2 << 20));
    arena.check();
    assert_eq!(arena.take(Kind::Clean, 511, 1, u32::MAX), Some(Block { first: 1, pages: 511 }));
    assert_eq!(arena.take(Kind::Clean, 1, 1, u32::MAX), None);
}

#[test]
fn growth_takes_what_lies_behind_and_shrinking_gives_it_back() {
    let mut arena = arena(100);
    let first = arena.take_last(10, 1).expect("room");
    let second = arena.take_last(10, 1).expect("room");
    assert!(!arena.grow(first, 11));
    arena.free(second, DIRTIED);
    assert!(arena.grow(first, 15));
    arena.check();
    assert!(arena.grow(Block { first: 0, pages: 15 }, 100));
    arena.check();
    assert!(!arena.grow(Block { first: 0, pages: 100 }, 101));
    arena.shrink(Block { first: 0, pages: 100 }, 40);
    arena.check();
    assert_eq!(arena.dirty_pages(), 60);
}

#[test]
fn only_the_first_page_of_a_live_block_is_its_address() {
    let mut arena = arena(100);
    let a = arena.take_last(10, 1).expect("room");
    let b = arena.take_last(10, 1).expect("room");
    let address = arena.address(b.first);
    assert_eq!(arena.live_block(address), Some(b));
    assert_eq!(arena.live_block(address + 4096), None);
    assert_eq!(arena.live_block(address + 1), None);
    arena.free(b, DIRTIED);
    assert_eq!(arena.live_block(address), None);
    arena.free(a, DIRTIED);
    assert_eq!(arena.take(Kind::Dirty, 20, 1, u32::MAX), Some(Block { first: 0, pages: 20 }));
    assert_eq!(arena.live_block(address), None, "stale state inside a merged block");
}

#[test]
fn a_doubtful_block_is_nobodys_until_it_is_confirmed() {
    let mut arena = arena(100);
    let blocks: Vec<_> = (0..4).map(|_| arena.take_last(25, 1).expect("room")).collect();
    arena.free(blocks[0], DIRTIED);
    let taken = arena.take_oldest_dirty().expect("dirty");
    assert!(arena.give_back(taken, Fate::Doubtful));
    arena.free(blocks[1], Fate::Doubtful);
    arena.check();
    for kind in [Kind::Dirty, Kind::Clean] {
        assert_eq!(arena.take(kind, 1, 1, u32::MAX), None);
    }
    assert_eq!(arena.take_oldest_dirty(), None);
    arena.free(blocks[2], DIRTIED);
    arena.check();
    assert_eq!(arena.take(Kind::Dirty, 26, 1, u32::MAX), None, "merged with a doubtful neighbour");
    assert_eq!(arena.live_block(arena.address(blocks[0].first)), None);

    let first = arena.take_oldest_doubtful().expect("two of them");
    assert_eq!(first, blocks[0], "the oldest first");
    arena.check();
    assert!(arena.give_back(first, Fate::Free(Kind::Clean)));
    assert!(!arena.give_back(first, DIRTIED), "given back twice");
    arena.check();
    assert_eq!(arena.take(Kind::Clean, 25, 1, u32::MAX), Some(first));
}

#[test]
fn a_forked_child_owes_no_discards() {
    let mut arena = arena(100);
    let blocks: Vec<_> = (0..4).map(|_| arena.take_last(20, 1).expect("room")).collect();
    arena.free(blocks[0], DIRTIED);
    arena.free(blocks[2], DIRTIED);
    let held = arena.take_oldest_dirty().expect("dirty");
    arena.free(blocks[1], Fate::Doubtful);
    arena.forget_discards();
    arena.check();
    assert!(!arena.give_back(held, DIRTIED), "a thread that the child does not have");
    assert_eq!(arena.take(Kind::Dirty, 60, 1, u32::MAX), Some(Block { first: 0, pages: 60 }));
    arena.check();
}
