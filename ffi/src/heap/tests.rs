use super::*;
use crate::arenas::Claim;
use std::cell::Cell;

const PIECE: usize = 4096;

/// Gives ranges that nobody touches, as far as its limit goes.
struct Pretended {
    next: Cell<usize>,
    largest: usize,
    arenas_left: Cell<usize>,
    outcome: Cell<Discarded>,
    /// So many discards are not answered in time.
    late: Cell<usize>,
    owes: Cell<bool>,
    forgotten: Cell<usize>,
    opens: Cell<bool>,
    opened: Cell<usize>,
}

impl Pretended {
    const fn new(largest: usize) -> Self {
        Self {
            next: Cell::new(1 << 40),
            largest,
            arenas_left: Cell::new(usize::MAX),
            outcome: Cell::new(Discarded::Done),
            late: Cell::new(0),
            owes: Cell::new(false),
            forgotten: Cell::new(0),
            opens: Cell::new(true),
            opened: Cell::new(0),
        }
    }
}

impl Source for Pretended {
    fn add_arena(&self, bytes: usize) -> Result<usize> {
        assert!(bytes.is_multiple_of(CHUNK));
        if bytes > self.largest || self.arenas_left.get() == 0 {
            return Err(Error::new(Status::NoMemory, "too much"));
        }
        self.arenas_left.set(self.arenas_left.get() - 1);
        let start = self.next.get();
        self.next.set(start + bytes + CHUNK);
        Ok(start)
    }

    fn discard(&self, _address: usize, bytes: usize) -> Discarded {
        if let Some(left) = self.late.get().checked_sub(1) {
            self.late.set(left);
            return Discarded::Unknown;
        }
        if self.outcome.get() == Discarded::Done {
            self.forgotten.set(self.forgotten.get() + bytes);
        }
        self.outcome.get()
    }

    fn is_answer_owed(&self) -> bool {
        self.owes.get() && self.late.get() > 0
    }

    fn open(&self, range: &Range<usize>) -> io::Result<()> {
        self.opened.set(self.opened.get() + range.len());
        if self.opens.get() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOMEM)) }
    }
}

#[test]
fn arenas_come_when_needed_and_addresses_are_known() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    assert!(!heap.owns(1 << 40));
    let block = heap.allocate(&source, 1 << 20, 1).expect("room");
    assert!(block.is_zero && heap.owns(block.address) && !heap.owns(1 << 39));
    assert_eq!(heap.usable_bytes(block.address), Ok(1 << 20));
    let large = heap.allocate(&source, 16 << 30, 1).expect("an arena of its own size");
    assert!(heap.owns(large.address + (16 << 30) - 1));
    heap.free(&source, block.address).expect("live");
    assert_eq!(heap.free(&source, block.address), Err(NotLive));
}

#[test]
fn what_one_free_does_not_discard_is_left_to_the_next() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    let blocks = 3 * DISCARDS_MAX;
    source.outcome.set(Discarded::Refused);
    let addresses: Vec<_> = (0..2 * blocks)
        .map(|_| heap.allocate(&source, 10 << 20, 1).expect("room").address)
        .collect();
    // Every second one, so that they stay apart.
    for address in addresses.iter().step_by(2) {
        heap.free(&source, *address).expect("live");
    }
    source.outcome.set(Discarded::Done);
    for address in addresses.iter().skip(1).step_by(2) {
        heap.free(&source, *address).expect("live");
    }
    heap.trim(&source);
    assert_eq!(source.forgotten.get(), 2 * blocks * (10 << 20), "each of them, and once");
}

#[test]
fn discards_that_are_late_are_waited_for_before_memory_is_refused() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(ARENA_BYTES_MIN));
    source.arenas_left.set(1);
    let block = heap.allocate(&source, 60 << 20, 1).expect("room").address;
    heap.free(&source, block).expect("live");
    source.late.set(3);
    assert_eq!(heap.trim(&source), 0);
    let again = heap.allocate(&source, 60 << 20, 1).expect("what was freed");
    assert_eq!(again, Allocated { address: block, is_zero: true });
    assert_eq!(source.late.get(), 0);
    // For longer, as long as the daemon is at work.
    for (owes, is_refused) in [(false, true), (true, false)] {
        heap.free(&source, block).expect("live");
        source.late.set(DOUBT_TRIES_MAX + 20);
        source.owes.set(owes);
        assert_eq!(heap.trim(&source), 0);
        assert_eq!(heap.allocate(&source, 60 << 20, 1).is_err(), is_refused);
        source.late.set(0);
        if is_refused {
            heap.allocate(&source, 60 << 20, 1).expect("what was freed");
        }
    }
}

#[test]
fn small_extents_fill_holes_before_they_cut_large_free_blocks() {
    let (heap, source) = (Heap::with_extents(2 << 20), Pretended::new(usize::MAX));
    let first = heap.allocate_extent(&source, 16 << 10, 4096).expect("room").address;
    // Before a block on a multiple of a huge page there is a hole that was never used.
    let large = heap.allocate(&source, 33 << 20, 2 << 20).expect("room").address;
    heap.free(&source, large).expect("live");
    let second = heap.allocate_extent(&source, 16 << 10, 4096).expect("room").address;
    assert!(first < second && second < large, "{first:#x} {second:#x} {large:#x}");
    let again = heap.allocate(&source, 33 << 20, 2 << 20).expect("room").address;
    assert_eq!(again, large);
}

#[test]
fn the_daemon_is_asked_for_nothing_that_the_heap_could_not_use() {
    // More arenas than there can be, and pages than an arena can have.
    for heap in [Heap::new(PIECE), Heap::with_extents(PIECE)] {
        let source = Pretended::new(ARENA_BYTES_MIN);
        source.arenas_left.set(ARENAS_MAX + 8);
        for _ in 0..ARENAS_MAX {
            heap.allocate(&source, ARENA_BYTES_MIN - CHUNK, CHUNK).expect("room");
        }
        for _ in 0..3 {
            let error = heap.allocate(&source, ARENA_BYTES_MIN - CHUNK, CHUNK).expect_err("full");
            assert_eq!(error.status, Status::NoMemory);
            assert_eq!(source.arenas_left.get(), 8, "asked for what nobody can use");
        }
        let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
        let error = heap.allocate(&source, 1 << 45, 1).expect_err("no tables");
        assert_eq!(error.status, Status::NoMemory);
        assert_eq!(source.next.get(), 1 << 40, "asked for what nobody can use");
    }
}

#[test]
fn parts_of_extents_are_given_back_and_discarded_in_whole_pieces() {
    let (heap, source) = (Heap::with_extents(2 << 20), Pretended::new(usize::MAX));
    let addresses: Vec<_> = (0..4096)
        .map(|_| heap.allocate_extent(&source, 16 << 10, 4096).expect("room").address)
        .collect();
    let (first, last) = (addresses[0], addresses[4095]);
    assert!(heap.is_one_arena(first, last) && !heap.is_one_arena(first, 0));
    let of_many = heap.release_extent(&source, first + 4096, 4 << 20);
    assert_eq!(of_many, Ok(true));
    let again = heap.release_extent(&source, first + 4096, 4096);
    assert_eq!(again, Err(NotLive));
    assert_eq!(heap.live_bytes(), (64 << 20) - (4 << 20));
    assert_eq!(heap.trim(&source), 2 << 20, "the one huge page that is whole");
    let again = heap.allocate(&source, 2 << 20, 4096).expect("room");
    assert_eq!(again, Allocated { address: first + (2 << 20), is_zero: true });
}

#[test]
fn an_address_tells_whose_it_is() {
    let (heap, source) = (Heap::with_extents(2 << 20), Pretended::new(usize::MAX));
    let mut chance = 1_usize;
    let mut live = Vec::new();
    for _ in 0..4000 {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let pages = 1 + (chance >> 40) % 64;
        if live.len() > 100 {
            let (address, pages, is_block) = live.swap_remove((chance >> 20) % live.len());
            if is_block {
                heap.free(&source, address).expect("live");
            } else {
                let freed = heap.release_extent(&source, address, pages * PIECE);
                assert_eq!(freed, Ok(true));
            }
        }
        let is_block = chance >> 63 == 0;
        let new = if is_block {
            heap.allocate(&source, pages * PIECE, PIECE)
        } else {
            heap.allocate_extent(&source, pages * PIECE, PIECE)
        };
        live.push((new.expect("room").address, pages, is_block));
        for (address, pages, is_block) in &live {
            let wanted = if *is_block { Owner::Block } else { Owner::Extent };
            assert_eq!(heap.owner_of(*address), wanted);
            if !is_block {
                assert_eq!(heap.owner_of(address + pages * PIECE - 1), Owner::Extent);
            }
        }
    }
    assert_eq!(heap.owner_of(0), Owner::Nobody);
}

#[test]
fn little_address_space_makes_smaller_arenas() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(256 << 20));
    heap.allocate(&source, 100 << 20, 1).expect("half, and half again, until it fits");
    let error = heap.allocate(&source, 300 << 20, 1).expect_err("more than there is");
    assert_eq!(error.status, Status::NoMemory);
}

#[test]
fn absurd_sizes_and_alignments_are_refused() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(1 << 40));
    for bytes in [usize::MAX, usize::MAX / 2, 1 << 62] {
        let error = heap.allocate(&source, bytes, 1).expect_err("absurd");
        assert_eq!(error.status, Status::NoMemory);
    }
    for align in [0, 3, ALIGN_MAX * 2] {
        let error = heap.allocate(&source, 1, align).expect_err("no alignment");
        assert_eq!(error.status, Status::InvalidArgument);
    }
    let block = heap.allocate(&source, 1, ALIGN_MAX).expect("the largest alignment");
    assert!(block.address.is_multiple_of(ALIGN_MAX));
}

#[test]
fn what_the_daemon_did_not_forget_is_not_called_zero() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    source.outcome.set(Discarded::Refused);
    let a = heap.allocate(&source, 100 << 20, 1).expect("room");
    heap.free(&source, a.address).expect("live");
    let again = heap.allocate(&source, 100 << 20, 1).expect("room");
    assert_eq!(again, Allocated { address: a.address, is_zero: false });
    source.outcome.set(Discarded::Done);
    heap.free(&source, again.address).expect("live");
    assert_eq!(source.forgotten.get(), 100 << 20);
    let zero = heap.allocate(&source, 100 << 20, 1).expect("room");
    assert_eq!(zero, Allocated { address: a.address, is_zero: true });
}

#[test]
fn what_may_still_be_discarded_is_not_given_out() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    let a = heap.allocate(&source, 100 << 20, 1).expect("room");
    source.outcome.set(Discarded::Unknown);
    heap.free(&source, a.address).expect("live");
    let b = heap.allocate(&source, 100 << 20, 1).expect("room");
    assert_ne!(b.address, a.address);
    // A later refusal is no answer to the first one.
    source.outcome.set(Discarded::Refused);
    heap.free(&source, b.address).expect("live");
    let c = heap.allocate(&source, 100 << 20, 1).expect("room");
    assert_eq!(c.address, b.address);
    source.outcome.set(Discarded::Done);
    heap.free(&source, c.address).expect("live");
    assert_eq!(source.forgotten.get(), 200 << 20);
    let all = heap.allocate(&source, 200 << 20, 1).expect("room");
    assert_eq!(all, Allocated { address: a.address, is_zero: true });
}

struct Shared(std::sync::Mutex<usize>);

impl Source for Shared {
    fn add_arena(&self, bytes: usize) -> Result<usize> {
        let mut next = self.0.lock().expect("not poisoned");
        let start = *next;
        *next += bytes + CHUNK;
        Ok(start)
    }

    fn discard(&self, _address: usize, _bytes: usize) -> Discarded {
        Discarded::Done
    }

    fn open(&self, _range: &Range<usize>) -> io::Result<()> {
        Ok(())
    }
}

/// Two threads wait for a block without making an arena themselves, one of them asleep most of the
/// time, so that the maker wakes it up just when the arena can be used.
#[test]
fn a_block_is_known_to_be_ours_as_soon_as_it_can_be_had() {
    for _ in 0..3000 {
        let (heap, source) = (Heap::new(PIECE), Shared(std::sync::Mutex::new(1 << 40)));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let block = loop {
                        let mut arenas = heap.arenas.enter().expect("not inside");
                        if let Some(block) = arenas.allocate(1 << 20, 1, First::Dirty) {
                            break block;
                        }
                    };
                    assert!(heap.owns(block.address), "whose is {:#x}?", block.address);
                });
            }
            heap.allocate(&source, 1 << 20, 1).expect("room");
        });
    }
}

#[test]
fn many_threads_share_one_heap() {
    let (heap, source) = (Heap::new(PIECE), Shared(std::sync::Mutex::new(1 << 40)));
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (heap, source) = (&heap, &source);
            scope.spawn(move || {
                for round in 0..2000_usize {
                    let bytes = (round * 7919 + thread * 131) % (8 << 20) + 1;
                    let block = heap.allocate(source, bytes, 1).expect("room");
                    heap.free(source, block.address).expect("live");
                }
            });
        }
    });
    assert_eq!(heap.arenas.enter().expect("not inside").live_bytes(), 0);
}

const PAGES: usize = 512;
const BYTES: usize = PAGES * PIECE;

fn range_of(block: Allocated) -> Range<usize> {
    block.address..block.address + BYTES
}

#[test]
fn a_mapping_is_no_block_and_no_extent() {
    for heap in [Heap::new(PIECE), Heap::with_extents(PIECE)] {
        let source = Pretended::new(usize::MAX);
        let mapping = range_of(heap.map(&source, BYTES, 1).expect("room"));
        assert_eq!(heap.mapped_bytes(), BYTES);
        for address in [mapping.start, mapping.start + 5, mapping.end - PIECE, mapping.end - 1] {
            assert!(heap.is_mapped(address));
            assert_eq!(heap.owner_of(address), Owner::Block);
            assert_eq!(heap.usable_bytes(address), Err(NotLive));
            assert_eq!(heap.resize(address, 2 * BYTES), Err(NotLive));
            assert_eq!(heap.free(&source, address), Err(NotLive));
        }
        heap.unmap(&mapping, || Discarded::Done);
        assert!(!heap.is_mapped(mapping.start));
        assert_eq!((heap.mapped_bytes(), heap.live_bytes()), (0, 0));
        let extent = heap.allocate_extent(&source, BYTES, 1).expect("room");
        assert_eq!(range_of(extent), mapping);
        assert_ne!(heap.owner_of(extent.address + 5), Owner::Nobody);
        assert_eq!(heap.owner_of(extent.address + 5) == Owner::Extent, heap.has_extents);
    }
}

#[test]
fn what_was_unmapped_is_opened_for_whoever_gets_it_next() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    let mapping = range_of(heap.map(&source, BYTES, 1).expect("room"));
    let middle = mapping.start + 10 * PIECE..mapping.start + 20 * PIECE;
    heap.unmap(&middle, || Discarded::Done);
    assert_eq!(source.opened.get(), 0);
    source.opens.set(false);
    let open = heap.allocate(&source, 8 * PIECE, 1).expect("what was never used is open");
    assert!(open.is_zero && open.address >= mapping.end);
    heap.allocate(&source, ARENA_BYTES_FIRST - 2 * BYTES, 1).expect("the rest of the arena");
    let error = heap.allocate(&source, 9 * PIECE, 1).expect_err("it cannot be opened");
    assert_eq!(error.status, Status::NoMemory);
    let error = heap.map_at(&source, &middle).expect_err("neither can it for a mapping");
    assert_eq!(error.status, Status::NoMemory);
    source.opens.set(true);
    source.opened.set(0);
    let block = heap.allocate(&source, 8 * PIECE, 1).expect("room");
    assert_eq!((block.address, source.opened.get()), (middle.start, 8 * PIECE));
    assert_eq!(heap.resize(block.address, 10 * PIECE), Ok(false), "its end is closed still");
    heap.free(&source, block.address).expect("live");
    let again = heap.allocate(&source, 8 * PIECE, 1).expect("room");
    assert_eq!((again.address, source.opened.get()), (middle.start, 8 * PIECE), "open already");
}

#[test]
fn a_mapping_gets_zeros_before_old_bytes_and_a_place_if_that_is_free() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    let old = heap.allocate(&source, BYTES, 1).expect("room").address;
    heap.free(&source, old).expect("live");
    let mapping = heap.map(&source, BYTES, 1).expect("room");
    assert!(mapping.is_zero && mapping.address != old);
    assert_eq!(heap.map_at(&source, &(old..old + BYTES)).expect("room"), Some(false));
    assert_eq!(heap.map_at(&source, &(old..old + BYTES)).expect("room"), None, "taken");
    let behind = mapping.address + BYTES..mapping.address + 3 * BYTES;
    assert_eq!(heap.map_at(&source, &behind).expect("room"), Some(true));
    let outside = behind.start..behind.start + (64 << 30);
    assert_eq!(heap.map_at(&source, &outside).expect("room"), None);
    // All that lies side by side can be given up at once.
    heap.unmap(&(old..behind.end), || Discarded::Done);
    assert_eq!((heap.mapped_bytes(), heap.live_bytes()), (0, 0));
}

#[test]
fn what_is_unmapped_twice_is_not_taken_from_its_next_owner() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    let mapping = range_of(heap.map(&source, BYTES, 1).expect("room"));
    heap.unmap(&mapping, || Discarded::Done);
    let block = heap.allocate(&source, BYTES, 1).expect("room");
    assert_eq!(block.address, mapping.start);
    heap.unmap(&mapping, || panic!("it is a block's"));
    assert_eq!(heap.usable_bytes(block.address), Ok(BYTES));
}

#[test]
fn an_unmapped_page_that_may_still_be_discarded_is_claimed_only_to_be_discarded_anew() {
    let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
    let mapping = range_of(heap.map(&source, BYTES, 1).expect("room"));
    heap.unmap(&mapping, || Discarded::Unknown);
    assert_eq!(heap.map_at(&source, &mapping).expect("room"), None);
    let half = mapping.start..mapping.start + BYTES / 2;
    let doubtful = Claim::Taken { is_zero: false, is_doubtful: true };
    assert_eq!(heap.claim(&half).expect("room"), (BYTES / 2, doubtful));
    // Its owner could not discard it.
    heap.unmap(&half, || Discarded::Refused);
    assert_eq!(heap.claim(&half).expect("room"), (BYTES / 2, doubtful), "the doubt stays");
    heap.settle(half.start, half.len());
    heap.unmap(&half, || Discarded::Refused);
    let old = Claim::Taken { is_zero: false, is_doubtful: false };
    assert_eq!(heap.claim(&mapping).expect("room"), (BYTES / 2, old));
}

#[test]
fn what_cannot_be_opened_is_not_given_out_for_fresh() {
    for as_mapping in [false, true] {
        let (heap, source) = (Heap::new(PIECE), Pretended::new(usize::MAX));
        let mapping = range_of(heap.map(&source, BYTES, 1).expect("room"));
        heap.unmap(&mapping, || Discarded::Done);
        source.opens.set(false);
        let take = || {
            if as_mapping { heap.map(&source, BYTES, 1) } else { heap.allocate(&source, BYTES, 1) }
        };
        for _ in 0..2 {
            let got = range_of(take().expect("there is what was never used"));
            let closed = |flags| flags & UNMAPPED != 0;
            assert!(!heap.runs(got.clone(), closed).any(|run| run.kind), "{got:?} is closed");
        }
        source.opens.set(true);
        assert_eq!(range_of(take().expect("room")), mapping, "it serves when it can be opened");
    }
}

/// Another thread frees all there is while this one asks for an arena in vain.
#[test]
fn what_others_freed_while_an_arena_was_refused_is_found() {
    struct FreesMeanwhile(Pretended, Heap, Cell<Option<usize>>);
    impl Source for FreesMeanwhile {
        fn add_arena(&self, bytes: usize) -> Result<usize> {
            if let Some(block) = self.2.take() {
                self.1.free(&self.0, block).expect("live");
                self.1.trim(&self.0);
            }
            self.0.add_arena(bytes)
        }

        fn discard(&self, address: usize, bytes: usize) -> Discarded {
            self.0.discard(address, bytes)
        }

        fn open(&self, range: &Range<usize>) -> io::Result<()> {
            self.0.open(range)
        }
    }
    let pretended = Pretended::new(ARENA_BYTES_MIN);
    pretended.arenas_left.set(1);
    let source = FreesMeanwhile(pretended, Heap::new(PIECE), Cell::new(None));
    let (heap, bytes) = (&source.1, ARENA_BYTES_MIN - CHUNK);
    let all = heap.allocate(&source, bytes, CHUNK).expect("room").address;
    source.2.set(Some(all));
    let again = heap.allocate(&source, bytes, CHUNK).expect("what was freed");
    assert_eq!(again, Allocated { address: all, is_zero: true });
}
