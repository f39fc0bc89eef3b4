//! The arenas of a client together: where a block comes from, and how much freed memory is kept.

use crate::arena::{Arena, Block, Kind};
use std::io;
use tiermgr_core::units::low_u32;

/// Arenas of one client. They double in size, so the address space ends first.
pub const ARENAS_MAX: usize = 64;
/// Freed bytes that are kept for reuse: a quarter of what is live, but within these bounds. Reuse
/// costs neither a message nor a page fault; but under pressure old bytes are parked like any other.
const DIRTY_BYTES_MIN: usize = 64 << 20;
const DIRTY_BYTES_MAX: usize = 256 << 20;
/// Blocks from here up begin on a huge page.
const HUGE_BYTES: usize = 2 << 20;
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

/// Free memory that the daemon is to forget; in nobody's hands but the taker's.
#[derive(Debug)]
pub struct Excess {
    arena: usize,
    block: Block,
    /// First byte.
    pub address: usize,
    /// Length.
    pub bytes: usize,
}

/// The address is not that of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLive;

/// All arenas of a client.
#[derive(Debug)]
pub struct Arenas {
    page_bytes: usize,
    list: [Option<Arena>; ARENAS_MAX],
    count: usize,
    live_pages: usize,
    dirty_pages: usize,
}

impl Arenas {
    /// None yet.
    #[must_use]
    pub const fn new(page_bytes: usize) -> Self {
        Self {
            page_bytes,
            list: [const { None }; ARENAS_MAX],
            count: 0,
            live_pages: 0,
            dirty_pages: 0,
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

    /// Adds `bytes` of fresh memory.
    ///
    /// # Errors
    /// `ENOMEM` where there are too many arenas or no memory for tables.
    pub fn add(&mut self, start: usize, bytes: usize) -> io::Result<()> {
        let slot = self
            .list
            .get_mut(self.count)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        *slot = Some(Arena::new(start, bytes, self.page_bytes)?);
        self.count += 1;
        Ok(())
    }

    /// A block of at least `bytes` on a multiple of `align`, a power of two. `None`: another arena is
    /// needed.
    ///
    /// Dirty memory first, since it is there already; then clean; then such as was never used, from
    /// the lowest address up.
    pub fn allocate(&mut self, bytes: usize, align: usize) -> Option<Allocated> {
        let pages = self.pages_of(bytes)?;
        let align = low_u32(align.div_ceil(self.page_bytes).max(1) as u64);
        let huge = low_u32((HUGE_BYTES / self.page_bytes) as u64);
        let (block, arena, is_zero) = if pages >= huge && align < huge {
            self.take(pages, huge).or_else(|| self.take(pages, align))?
        } else {
            self.take(pages, align)?
        };
        self.live_pages += block.pages as usize;
        if !is_zero {
            self.dirty_pages -= block.pages as usize;
        }
        let address = self.list[arena].as_ref()?.address(block.first);
        Some(Allocated { address, is_zero })
    }

    fn take(&mut self, pages: u32, align: u32) -> Option<(Block, usize, bool)> {
        for kind in [Kind::Dirty, Kind::Clean] {
            for (index, arena) in self.list.iter_mut().flatten().enumerate() {
                if let Some(block) = arena.take(kind, pages, align) {
                    return Some((block, index, kind == Kind::Clean));
                }
            }
        }
        self.list.iter_mut().flatten().enumerate().find_map(|(index, arena)| {
            arena.take_fresh(pages, align).map(|block| (block, index, true))
        })
    }

    /// Frees the block at `address`.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn free(&mut self, address: usize) -> Result<(), NotLive> {
        let (index, block) = self.find(address)?;
        if let Some(arena) = &mut self.list[index] {
            arena.free(block);
        }
        self.live_pages -= block.pages as usize;
        self.dirty_pages += block.pages as usize;
        Ok(())
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
        let Some(arena) = &mut self.list[index] else { return Ok(false) };
        if pages <= block.pages {
            let rest = (block.pages - pages) as usize;
            if rest * self.page_bytes >= SHRINK_BYTES_MIN {
                arena.shrink(block, pages);
                self.live_pages -= rest;
                self.dirty_pages += rest;
            }
            return Ok(true);
        }
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
        if self.dirty_pages * self.page_bytes <= kept {
            return None;
        }
        let index = (0..self.count)
            .max_by_key(|&index| self.list[index].as_ref().map_or(0, Arena::dirty_pages))?;
        let arena = self.list[index].as_mut()?;
        let block = arena.take_oldest_dirty()?;
        self.dirty_pages -= block.pages as usize;
        Some(Excess {
            arena: index,
            block,
            address: arena.address(block.first),
            bytes: block.pages as usize * self.page_bytes,
        })
    }

    /// Takes back what [`Self::take_excess`] gave: clean where the daemon confirmed, dirty where not.
    pub fn give_back(&mut self, excess: &Excess, is_zero: bool) {
        let kind = if is_zero { Kind::Clean } else { Kind::Dirty };
        if let Some(Some(arena)) = self.list.get_mut(excess.arena) {
            arena.give_back(excess.block, kind);
            if !is_zero {
                self.dirty_pages += excess.block.pages as usize;
            }
        }
    }

    fn find(&self, address: usize) -> Result<(usize, Block), NotLive> {
        self.list
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
mod tests {
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
        let dirty: usize =
            arenas.list.iter().flatten().map(|arena| arena.dirty_pages() as usize).sum();
        assert_eq!(arenas.dirty_pages, dirty);
    }

    fn assert_free(model: &BTreeMap<usize, usize>, address: usize, bytes: usize) {
        if let Some((&before, &length)) = model.range(..address + bytes).next_back() {
            assert!(before + length <= address, "{address:#x} overlaps {before:#x}");
        }
    }

    /// Allocations, frees, resizes and discards in any order against a map of what is live.
    fn run(seed: u64) {
        let mut chance = Chance(seed | 1);
        let mut arenas = Arenas::new(PAGE);
        arenas.add(1 << 30, 64 << 20).expect("tables");
        arenas.add(3 << 30, 512 << 20).expect("tables");
        let mut model = BTreeMap::new();
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
                        assert_eq!(arenas.usable_bytes(new.address), Ok(bytes));
                        model.insert(new.address, bytes);
                    }
                }
                4..7 => {
                    let any = model.keys().nth(chance.below(model.len().max(1))).copied();
                    if let Some(address) = any {
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
                            model.insert(address, now);
                        }
                    }
                }
                _ => {
                    if held.len() > chance.below(4) {
                        let excess = held.swap_remove(chance.below(held.len()));
                        arenas.give_back(&excess, chance.below(4) > 0);
                    } else {
                        held.extend(arenas.take_excess());
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
            arenas.give_back(&excess, true);
        }
        for address in std::mem::take(&mut model).into_keys() {
            arenas.free(address).expect("live");
        }
        check(&arenas, &model);
    }

    #[test]
    fn agrees_with_a_model() {
        for seed in 1..=40 {
            eprintln!("seed {seed}");
            run(seed * 0x9e37_79b9);
        }
    }

    #[test]
    fn freed_memory_is_kept_up_to_a_limit() {
        let mut arenas = Arenas::new(PAGE);
        arenas.add(1 << 30, 1 << 30).expect("tables");
        let blocks: Vec<_> =
            (0..3).map(|_| arenas.allocate(40 << 20, PAGE).expect("room").address).collect();
        arenas.free(blocks[0]).expect("live");
        assert!(arenas.take_excess().is_none());
        arenas.free(blocks[2]).expect("live");
        let excess = arenas.take_excess().expect("80 MiB are more than 64 MiB");
        assert_eq!((excess.address, excess.bytes), (blocks[0], 40 << 20));
        assert!(arenas.take_excess().is_none());
        arenas.give_back(&excess, true);

        let dirty = arenas.allocate(40 << 20, PAGE).expect("room");
        assert_eq!(dirty, Allocated { address: blocks[2], is_zero: false });
        let clean = arenas.allocate(40 << 20, PAGE).expect("room");
        assert_eq!(clean, Allocated { address: blocks[0], is_zero: true });
    }

    #[test]
    fn what_does_not_fit_is_not_given() {
        let mut arenas = Arenas::new(PAGE);
        assert_eq!(arenas.allocate(1, PAGE), None);
        arenas.add(1 << 30, 2 << 20).expect("tables");
        assert_eq!(arenas.allocate((2 << 20) + 1, PAGE), None);
        assert_eq!(arenas.allocate(usize::MAX, PAGE), None);
        assert!(arenas.allocate(2 << 20, PAGE).is_some());
    }
}
