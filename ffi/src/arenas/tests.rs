use super::*;
use std::collections::BTreeMap;

const PAGE: usize = 4096;

/// A small generator with a seed, so that a red run can be repeated.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).expect("64 bits") % limit
    }
}

fn tables(bytes: usize) -> Tables {
    Tables::new(bytes, PAGE).expect("tables")
}

fn check(arenas: &Arenas, model: &BTreeMap<usize, usize>) {
    for arena in arenas.list.iter().flatten() {
        arena.check();
    }
    let live: usize = model.values().sum();
    assert_eq!(arenas.live_bytes(), live);
    let dirty: usize = arenas.list.iter().flatten().map(|arena| arena.dirty_pages() as usize).sum();
    assert_eq!(arenas.dirty_pages, dirty);
}

fn assert_free(model: &BTreeMap<usize, usize>, address: usize, bytes: usize) {
    if let Some((&before, &length)) = model.range(..address + bytes).next_back() {
        assert!(before + length <= address, "{address:#x} overlaps {before:#x}");
    }
}

/// Gives back a part of the block and, where that is live too, of what lies behind it.
fn release_some(
    arenas: &mut Arenas,
    model: &mut BTreeMap<usize, usize>,
    chance: &mut Chance,
    address: usize,
) {
    let bytes = model[&address];
    let behind = model.get(&(address + bytes)).copied().unwrap_or(0);
    let lead = chance.below(bytes / PAGE) * PAGE;
    let end = PAGE + chance.below((bytes + behind) / PAGE) * PAGE;
    if lead >= end {
        return;
    }
    arenas.release(address + lead, end - lead).expect("live");
    model.remove(&address);
    model.extend((lead > 0).then_some((address, lead)));
    if end > bytes {
        model.remove(&(address + bytes));
    }
    let whole = if end > bytes { bytes + behind } else { bytes };
    model.extend((end < whole).then_some((address + end, whole - end)));
    assert_eq!(arenas.release(address + lead, end - lead), Err(NotLive), "freed twice");
}

/// Takes a part of a block, to be discarded, as `munmap` does.
fn take_some(
    arenas: &mut Arenas,
    model: &mut BTreeMap<usize, usize>,
    chance: &mut Chance,
    address: usize,
) -> Excess {
    let bytes = model[&address];
    let lead = chance.below(bytes / PAGE) * PAGE;
    let length = PAGE + chance.below((bytes - lead) / PAGE) * PAGE;
    let piece = arenas.take_live(address + lead, length).expect("live");
    assert!(arenas.take_live(address + lead, length).is_err(), "taken twice");
    model.remove(&address);
    model.extend((lead > 0).then_some((address, lead)));
    let end = lead + length;
    model.extend((end < bytes).then_some((address + end, bytes - end)));
    piece
}

/// Claims whatever is free around an address, as `mmap` at a certain place does.
fn claim_some(
    arenas: &mut Arenas,
    model: &mut BTreeMap<usize, usize>,
    doubtful: &mut BTreeMap<usize, usize>,
    held: &[Excess],
    chance: &mut Chance,
) {
    let base = if chance.below(2) == 0 { 1 << 30 } else { 3 << 30 };
    let mut at = base + chance.below(16 << 20) / PAGE * PAGE;
    let end = at + PAGE + chance.below(4 << 20) / PAGE * PAGE;
    let was_free = arenas.is_free(at, end - at);
    let overlaps =
        |start: usize, bytes: usize, at: usize, until: usize| start < until && at < start + bytes;
    while at < end {
        let (bytes, claim) = arenas.claim(at, end - at).expect("in an arena");
        let until = at + bytes;
        assert!(bytes > 0 && until <= end);
        let is_live = model.iter().any(|(&start, &length)| overlaps(start, length, at, until));
        let is_held = held.iter().any(|piece| overlaps(piece.address, piece.bytes, at, until));
        match claim {
            Claim::Live => assert!(is_live && !was_free),
            Claim::Busy => assert!(is_held && !was_free),
            Claim::Taken { is_doubtful, .. } => {
                assert!(!is_live && !is_held);
                assert!(!(is_doubtful && was_free));
                let in_doubt =
                    doubtful.iter().any(|(&start, &length)| overlaps(start, length, at, until));
                assert!(is_doubtful || !in_doubt, "a doubt is forgotten");
                model.insert(at, bytes);
                if is_doubtful {
                    // Its owner discards it before it uses it.
                    arenas.settle(at, bytes);
                    cut_out(doubtful, at..until);
                }
            }
        }
        at = until;
    }
}

fn cut_out(ranges: &mut BTreeMap<usize, usize>, hole: Range<usize>) {
    for (start, bytes) in std::mem::take(ranges) {
        let end = start + bytes;
        for part in [start..end.min(hole.start), start.max(hole.end)..end] {
            if part.start < part.end {
                ranges.insert(part.start, part.len());
            }
        }
    }
}

/// Allocations, frees, resizes and discards in any order against a map of what is live.
fn run(seed: u64, piece: u32) {
    let mut chance = Chance(seed | 1);
    let mut arenas = Arenas::new(PAGE, piece);
    arenas.add(1 << 30, tables(64 << 20)).expect("a slot");
    arenas.add(3 << 30, tables(512 << 20)).expect("a slot");
    let mut model = BTreeMap::new();
    let mut doubtful = BTreeMap::new();
    let mut held: Vec<Excess> = Vec::new();
    for step in 0..3000 {
        match chance.below(12) {
            9 => {
                let any = model.keys().nth(chance.below(model.len().max(1))).copied();
                held.extend(any.map(|any| take_some(&mut arenas, &mut model, &mut chance, any)));
            }
            10 => claim_some(&mut arenas, &mut model, &mut doubtful, &held, &mut chance),
            0..4 => {
                let magnitude = 12 + chance.below(12);
                let bytes = 1 + chance.below(1 << magnitude);
                let align = PAGE << chance.below(12);
                let first = [First::Dirty, First::Zero][chance.below(2)];
                let new = match arenas.allocate(bytes, align, first) {
                    None => arenas.allocate_across(bytes, align),
                    new => new,
                };
                if let Some(new) = new {
                    let bytes = bytes.next_multiple_of(PAGE);
                    assert!(new.address.is_multiple_of(align));
                    assert_free(&model, new.address, bytes);
                    assert_free(&doubtful, new.address, bytes);
                    assert_eq!(arenas.usable_bytes(new.address), Ok(bytes));
                    model.insert(new.address, bytes);
                }
            }
            4..7 => {
                let any = model.keys().nth(chance.below(model.len().max(1))).copied();
                if let Some(address) = any
                    && chance.below(2) == 0
                {
                    release_some(&mut arenas, &mut model, &mut chance, address);
                } else if let Some(address) = any {
                    arenas.free(address).expect("live");
                    model.remove(&address);
                    assert_eq!(arenas.free(address), Err(NotLive), "freed twice");
                }
            }
            7..9 => {
                let any = model.keys().nth(chance.below(model.len().max(1))).copied();
                if let Some(address) = any {
                    let bytes = 1 + chance.below(4 << 20);
                    if arenas.resize(address, bytes).expect("live") {
                        let now = arenas.usable_bytes(address).expect("live");
                        assert!(now >= bytes);
                        model.remove(&address);
                        assert_free(&model, address, now);
                        assert_free(&doubtful, address, now);
                        model.insert(address, now);
                    }
                }
            }
            _ => {
                if held.len() > chance.below(4) {
                    let excess = held.swap_remove(chance.below(held.len()));
                    let outcome = match chance.below(6) {
                        0 => Discarded::Refused,
                        1 => Discarded::Unknown,
                        _ => Discarded::Done,
                    };
                    arenas.give_back(&excess, outcome);
                    let pages = excess.address..excess.address + excess.bytes;
                    if outcome == Discarded::Unknown {
                        doubtful.insert(excess.address, excess.bytes);
                    } else if outcome == Discarded::Done {
                        doubtful.retain(|address, _| !pages.contains(address));
                    }
                } else if chance.below(2) == 0 {
                    let excess = arenas.take_excess();
                    if let Some(excess) = &excess {
                        assert!(excess.address.is_multiple_of(piece as usize * PAGE));
                        assert!(excess.bytes.is_multiple_of(piece as usize * PAGE));
                    }
                    held.extend(excess);
                } else {
                    held.extend(arenas.take_doubtful());
                }
                for excess in &held {
                    assert_free(&model, excess.address, excess.bytes);
                }
            }
        }
        if step % 50 == 0 {
            check(&arenas, &model);
        }
    }
    for excess in held {
        arenas.give_back(&excess, Discarded::Done);
    }
    for address in std::mem::take(&mut model).into_keys() {
        arenas.free(address).expect("live");
    }
    check(&arenas, &model);
}

#[test]
fn agrees_with_a_model() {
    for seed in 1..=60 {
        let piece = if seed % 2 == 0 { 1 } else { 16 };
        eprintln!("seed {seed}, pieces of {piece} pages");
        run(seed * 0x9e37_79b9, piece);
    }
}

#[test]
fn freed_memory_is_kept_up_to_a_limit() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, tables(1 << 30)).expect("a slot");
    let blocks: Vec<_> = (0..3)
        .map(|_| arenas.allocate(40 << 20, PAGE, First::Dirty).expect("room").address)
        .collect();
    arenas.free(blocks[0]).expect("live");
    assert!(arenas.take_excess().is_none());
    arenas.free(blocks[2]).expect("live");
    let excess = arenas.take_excess().expect("80 MiB are more than 64 MiB");
    assert_eq!((excess.address, excess.bytes), (blocks[0], 40 << 20));
    assert!(arenas.take_excess().is_none());
    arenas.give_back(&excess, Discarded::Done);

    let dirty = arenas.allocate(40 << 20, PAGE, First::Dirty).expect("room");
    assert_eq!(dirty, Allocated { address: blocks[2], is_zero: false });
    let clean = arenas.allocate(40 << 20, PAGE, First::Dirty).expect("room");
    assert_eq!(clean, Allocated { address: blocks[0], is_zero: true });
}

#[test]
fn what_does_not_fit_is_not_given() {
    let mut arenas = Arenas::new(PAGE, 1);
    assert_eq!(arenas.allocate(1, PAGE, First::Dirty), None);
    arenas.add(1 << 30, tables(2 << 20)).expect("a slot");
    assert_eq!(arenas.allocate((2 << 20) + 1, PAGE, First::Dirty), None);
    assert_eq!(arenas.allocate(usize::MAX, PAGE, First::Dirty), None);
    assert!(arenas.allocate(2 << 20, PAGE, First::Dirty).is_some());
}

#[test]
fn what_a_discard_may_still_reach_is_not_given_out() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, tables(8 << 20)).expect("a slot");
    let block = arenas.allocate(4 << 20, PAGE, First::Dirty).expect("room").address;
    let beside = arenas.allocate(4 << 20, PAGE, First::Dirty).expect("room").address;
    arenas.doubt(block + PAGE, PAGE);
    assert_eq!(arenas.resize(block, 1 << 20), Ok(true));
    assert_eq!(arenas.usable_bytes(block), Ok(4 << 20), "its end stays with it");
    arenas.free(block).expect("live");
    for outcome in [Discarded::Unknown, Discarded::Refused] {
        assert_eq!(arenas.allocate(PAGE, PAGE, First::Dirty), None, "before {outcome:?}");
        let piece = arenas.take_doubtful().expect("the block");
        assert_eq!((piece.address, piece.bytes, piece.is_doubtful()), (block, 4 << 20, true));
        arenas.give_back(&piece, outcome);
    }
    assert_eq!(arenas.resize(beside, 5 << 20), Ok(false));
    assert_eq!(arenas.allocate(PAGE, PAGE, First::Dirty), None);
    let piece = arenas.take_doubtful().expect("the block");
    arenas.give_back(&piece, Discarded::Done);
    let again = arenas.allocate(4 << 20, PAGE, First::Dirty);
    assert_eq!(again, Some(Allocated { address: block, is_zero: true }));
    arenas.free(block).expect("live");
    assert!(arenas.take_doubtful().is_none(), "the doubt is settled");
}

#[test]
fn what_is_free_serves_though_parts_of_it_were_discarded() {
    let mut arenas = Arenas::new(PAGE, 512);
    arenas.add(1 << 30, tables(12 << 20)).expect("a slot");
    // Each is a whole piece and half of one, which is too little to be discarded; they begin 4 MiB apart.
    let blocks =
        [(); 3].map(|()| arenas.allocate(3 << 20, PAGE, First::Dirty).expect("room").address);
    for block in &blocks[..2] {
        arenas.free(*block).expect("live");
    }
    while let Some(piece) = arenas.take_dirty() {
        arenas.give_back(&piece, Discarded::Done);
    }
    assert_eq!(arenas.allocate(8 << 20, PAGE, First::Dirty), None, "no kind has so much in one");
    assert_eq!(arenas.allocate_across((8 << 20) + 1, PAGE), None, "a live block lies there");
    let all = arenas.allocate_across(8 << 20, PAGE);
    assert_eq!(all, Some(Allocated { address: blocks[0], is_zero: false }));
    check(&arenas, &BTreeMap::from([(blocks[0], 8 << 20), (blocks[2], 3 << 20)]));
}

#[test]
fn a_child_starts_without_doubts() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, tables(128 << 20)).expect("a slot");
    let [first, second] = [80 << 20, 48 << 20]
        .map(|bytes| arenas.allocate(bytes, PAGE, First::Dirty).expect("room").address);
    arenas.doubt(second, PAGE);
    arenas.free(first).expect("live");
    let held = arenas.take_excess().expect("80 MiB are more than 64 MiB");
    arenas.free(second).expect("live");
    arenas.forget_discards();
    check(&arenas, &BTreeMap::new());
    arenas.give_back(&held, Discarded::Refused);
    check(&arenas, &BTreeMap::new());
    let all = arenas.allocate(128 << 20, PAGE, First::Dirty);
    assert_eq!(all, Some(Allocated { address: first, is_zero: false }));
}

#[test]
fn doubts_are_few_and_none_is_forgotten() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, tables(1 << 30)).expect("a slot");
    let blocks: Vec<_> = (0..3 * DOUBTS_MAX)
        .map(|_| arenas.allocate(1 << 20, PAGE, First::Dirty).expect("room").address)
        .collect();
    for block in &blocks {
        arenas.doubt(*block, PAGE);
        arenas.doubt(*block, PAGE);
    }
    for block in &blocks {
        arenas.free(*block).expect("live");
    }
    let mut found: Vec<_> =
        std::iter::from_fn(|| arenas.take_doubtful().map(|piece| piece.address)).collect();
    found.sort_unstable();
    assert_eq!(found, blocks);
}

#[test]
fn what_is_taken_across_may_lie_behind_all_blocks() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, tables(64 * PAGE)).expect("a slot");
    let [_, old, last] = [8, 8, 48]
        .map(|pages| arenas.allocate(pages * PAGE, 1, First::Dirty).expect("room").address);
    let discarded = arenas.take_live(last, 48 * PAGE).expect("live");
    arenas.free(old).expect("live");
    assert_eq!(arenas.allocate(16 * PAGE, 32 * PAGE, First::Dirty), None);
    // While the thread that asked was busy elsewhere.
    arenas.give_back(&discarded, Discarded::Done);
    let across = arenas.allocate_across(16 * PAGE, 32 * PAGE).expect("room behind the old block");
    assert_eq!(across.address, (1 << 30) + 32 * PAGE);
    check(&arenas, &BTreeMap::from([(1 << 30, 8 * PAGE), (across.address, 16 * PAGE)]));
    assert_eq!(arenas.dirty_pages, 8, "the old block alone");
    let between = arenas.allocate(16 * PAGE, 1, First::Zero).expect("what lies between");
    assert_eq!(between, Allocated { address: last, is_zero: true });
    let dirty = arenas.allocate(8 * PAGE, 1, First::Dirty).expect("the old block");
    assert_eq!((dirty.address, arenas.dirty_pages), (old, 0));
}

#[test]
fn what_was_used_once_is_not_called_fresh() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, tables(64 * PAGE)).expect("a slot");
    let used = arenas.allocate(16 * PAGE, 1, First::Dirty).expect("room");
    let discarded = arenas.take_live(used.address, 16 * PAGE).expect("live");
    arenas.give_back(&discarded, Discarded::Done);
    let fresh = arenas.allocate(4 * PAGE, 1, First::Fresh).expect("room").address;
    assert_eq!(fresh, used.address + 16 * PAGE);
    check(&arenas, &BTreeMap::from([(fresh, 4 * PAGE)]));
    assert_eq!(arenas.allocate(16 * PAGE, 1, First::Zero), Some(used), "it serves all the same");
    arenas.free(fresh).expect("live");
    assert_eq!(arenas.allocate(48 * PAGE, 1, First::Fresh), None);
    assert!(arenas.allocate(44 * PAGE, 1, First::Fresh).is_some());
}
