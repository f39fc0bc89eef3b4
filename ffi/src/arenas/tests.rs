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

/// Allocations, frees, resizes and discards in any order against a map of what is live.
fn run(seed: u64, piece: u32) {
    let mut chance = Chance(seed | 1);
    let mut arenas = Arenas::new(PAGE, piece);
    arenas.add(1 << 30, 64 << 20).expect("tables");
    arenas.add(3 << 30, 512 << 20).expect("tables");
    let mut model = BTreeMap::new();
    let mut doubtful = BTreeMap::new();
    let mut held: Vec<Excess> = Vec::new();
    for step in 0..3000 {
        match chance.below(10) {
            0..4 => {
                let magnitude = 12 + chance.below(12);
                let bytes = 1 + chance.below(1 << magnitude);
                let align = PAGE << chance.below(12);
                if let Some(new) = arenas.allocate(bytes, align) {
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
                    held.extend(arenas.take_excess());
                } else {
                    held.extend(arenas.take_doubtful());
                }
                for excess in &held {
                    assert!(excess.address.is_multiple_of(piece as usize * PAGE));
                    assert!(excess.bytes.is_multiple_of(piece as usize * PAGE));
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
    arenas.add(1 << 30, 1 << 30).expect("tables");
    let blocks: Vec<_> =
        (0..3).map(|_| arenas.allocate(40 << 20, PAGE).expect("room").address).collect();
    arenas.free(blocks[0]).expect("live");
    assert!(arenas.take_excess().is_none());
    arenas.free(blocks[2]).expect("live");
    let excess = arenas.take_excess().expect("80 MiB are more than 64 MiB");
    assert_eq!((excess.address, excess.bytes), (blocks[0], 40 << 20));
    assert!(arenas.take_excess().is_none());
    arenas.give_back(&excess, Discarded::Done);

    let dirty = arenas.allocate(40 << 20, PAGE).expect("room");
    assert_eq!(dirty, Allocated { address: blocks[2], is_zero: false });
    let clean = arenas.allocate(40 << 20, PAGE).expect("room");
    assert_eq!(clean, Allocated { address: blocks[0], is_zero: true });
}

#[test]
fn what_does_not_fit_is_not_given() {
    let mut arenas = Arenas::new(PAGE, 1);
    assert_eq!(arenas.allocate(1, PAGE), None);
    arenas.add(1 << 30, 2 << 20).expect("tables");
    assert_eq!(arenas.allocate((2 << 20) + 1, PAGE), None);
    assert_eq!(arenas.allocate(usize::MAX, PAGE), None);
    assert!(arenas.allocate(2 << 20, PAGE).is_some());
}

#[test]
fn what_a_discard_may_still_reach_is_not_given_out() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, 8 << 20).expect("tables");
    let block = arenas.allocate(4 << 20, PAGE).expect("room").address;
    let beside = arenas.allocate(4 << 20, PAGE).expect("room").address;
    arenas.doubt(block + PAGE, PAGE);
    assert_eq!(arenas.resize(block, 1 << 20), Ok(true));
    assert_eq!(arenas.usable_bytes(block), Ok(4 << 20), "its end stays with it");
    arenas.free(block).expect("live");
    for outcome in [Discarded::Unknown, Discarded::Refused] {
        assert_eq!(arenas.allocate(PAGE, PAGE), None, "before {outcome:?}");
        let piece = arenas.take_doubtful().expect("the block");
        assert_eq!((piece.address, piece.bytes, piece.is_doubtful()), (block, 4 << 20, true));
        arenas.give_back(&piece, outcome);
    }
    assert_eq!(arenas.resize(beside, 5 << 20), Ok(false));
    assert_eq!(arenas.allocate(PAGE, PAGE), None);
    let piece = arenas.take_doubtful().expect("the block");
    arenas.give_back(&piece, Discarded::Done);
    let again = arenas.allocate(4 << 20, PAGE);
    assert_eq!(again, Some(Allocated { address: block, is_zero: true }));
    arenas.free(block).expect("live");
    assert!(arenas.take_doubtful().is_none(), "the doubt is settled");
}

#[test]
fn a_child_starts_without_doubts() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, 128 << 20).expect("tables");
    let [first, second] =
        [80 << 20, 48 << 20].map(|bytes| arenas.allocate(bytes, PAGE).expect("room").address);
    arenas.doubt(second, PAGE);
    arenas.free(first).expect("live");
    let held = arenas.take_excess().expect("80 MiB are more than 64 MiB");
    arenas.free(second).expect("live");
    arenas.forget_discards();
    check(&arenas, &BTreeMap::new());
    arenas.give_back(&held, Discarded::Refused);
    check(&arenas, &BTreeMap::new());
    let all = arenas.allocate(128 << 20, PAGE);
    assert_eq!(all, Some(Allocated { address: first, is_zero: false }));
}

#[test]
fn doubts_are_few_and_none_is_forgotten() {
    let mut arenas = Arenas::new(PAGE, 1);
    arenas.add(1 << 30, 1 << 30).expect("tables");
    let blocks: Vec<_> = (0..3 * DOUBTS_MAX)
        .map(|_| arenas.allocate(1 << 20, PAGE).expect("room").address)
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
