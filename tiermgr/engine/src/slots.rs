//! Slots of the store, leased to families by the segment.
//!
//! A segment is [`SEGMENT_SLOTS`] consecutive slots. One word for each segment lies in a state file
//! and names the family that holds it, 0 for none; a family takes and gives whole segments, and
//! divides them itself. A segment is scrubbed when it is taken: its checksums become zeros, and no
//! bytes that another family left there ever verify.

use crate::room::FamilyId;
use crate::wake::Wake;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tiermgr_core::page::PageMask;
use tiermgr_core::units::{EXTENT_BYTES, Geometry, SlotId};
use tiermgr_sys::shm::SharedFile;

/// Slots in a segment: 8 MiB of the store.
pub const SEGMENT_SLOTS: u32 = 128;
/// Bytes of a segment in the store.
pub const SEGMENT_BYTES: u64 = SEGMENT_SLOTS as u64 * EXTENT_BYTES;
/// Bytes that one checksum covers. Not the page size: the file is the same on every machine.
pub const SUM_BYTES: u64 = 4096;
/// Checksums of a slot.
pub const SLOT_SUMS: u64 = EXTENT_BYTES / SUM_BYTES;
/// Bytes of a slot's checksums in the file of checksums.
const SLOT_SUM_BYTES: u64 = SLOT_SUMS * 4;

/// Which families hold which segments.
#[derive(Debug)]
pub struct Slots {
    owners: SharedFile,
    segments: u32,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    count: u32,
    /// No segment below it is free.
    lowest: u32,
    /// Families that asked while nothing was free.
    waiting: BTreeMap<FamilyId, Arc<Wake>>,
}

impl Slots {
    /// Bytes of the state file for `segments` segments.
    #[must_use]
    pub fn file_bytes(segments: u32) -> u64 {
        u64::from(segments) * 8
    }

    /// The table over `owners`, as it is there.
    ///
    /// # Errors
    /// Where the file is too short for `segments`.
    pub fn open(owners: SharedFile, segments: u32) -> io::Result<Self> {
        if owners.len() < Self::file_bytes(segments) {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "too few segments"));
        }
        owners.allocate(0, Self::file_bytes(segments))?;
        let slots = Self { owners, segments, free: Mutex::new(Free::default()) };
        let count = (0..segments).filter(|&at| slots.owner(at) == 0).count();
        slots.lock().count = u32::try_from(count).unwrap_or(u32::MAX);
        Ok(slots)
    }

    /// All segments.
    #[must_use]
    pub const fn segments(&self) -> u32 {
        self.segments
    }

    /// Segments that nobody holds.
    #[must_use]
    pub fn free_segments(&self) -> u32 {
        self.lock().count
    }

    /// Takes a segment for `family`. With none free, `wake` is used once one is, and the answer is
    /// `None`.
    pub fn take(&self, family: FamilyId, wake: &Arc<Wake>) -> Option<SlotId> {
        let mut free = self.lock();
        let found = (free.lowest..self.segments).find(|&at| self.owner(at) == 0);
        let Some(at) = found else {
            free.lowest = self.segments;
            free.waiting.insert(family, Arc::clone(wake));
            return None;
        };
        self.set_owner(at, family);
        free.lowest = at + 1;
        free.count = free.count.saturating_sub(1);
        free.waiting.remove(&family);
        Some(SlotId(at * SEGMENT_SLOTS + 1))
    }

    /// Gives back the segment that begins at `first`. Anything that is not a segment of `family` is
    /// left alone, and the answer is `false`.
    pub fn give_back(&self, family: FamilyId, first: SlotId) -> bool {
        let Some(at) = self.segment_of(first) else { return false };
        if !(first.0 - 1).is_multiple_of(SEGMENT_SLOTS) || self.owner(at) != family || family == 0 {
            return false;
        }
        let mut free = self.lock();
        self.release(&mut free, at);
        true
    }

    /// Gives back everything that `family` holds.
    pub fn give_back_all(&self, family: FamilyId) {
        let mut free = self.lock();
        free.waiting.remove(&family);
        for at in 0..self.segments {
            if family != 0 && self.owner(at) == family {
                self.release(&mut free, at);
            }
        }
    }

    /// The segments that `family` holds, by their first slots, ascending.
    #[must_use]
    pub fn held_by(&self, family: FamilyId) -> Vec<SlotId> {
        let _free = self.lock();
        (0..self.segments)
            .filter(|&at| family != 0 && self.owner(at) == family)
            .map(|at| SlotId(at * SEGMENT_SLOTS + 1))
            .collect()
    }

    /// Gives back the segments of all families that `is_alive` denies.
    pub fn give_back_dead(&self, is_alive: impl Fn(FamilyId) -> bool) {
        let mut free = self.lock();
        for at in 0..self.segments {
            let owner = self.owner(at);
            if owner != 0 && !is_alive(owner) {
                self.release(&mut free, at);
            }
        }
    }

    /// Whether `count` slots from `first` are all in segments of `family`.
    #[must_use]
    pub fn are_held(&self, family: FamilyId, first: SlotId, count: u32) -> bool {
        let Some(last) = first.0.checked_add(count).and_then(|end| end.checked_sub(1)) else {
            return false;
        };
        let (Some(from), Some(to)) = (self.segment_of(first), self.segment_of(SlotId(last))) else {
            return false;
        };
        count > 0 && (from..=to).all(|at| self.owner(at) == family)
    }

    fn segment_of(&self, slot: SlotId) -> Option<u32> {
        let at = slot.0.checked_sub(1)? / SEGMENT_SLOTS;
        (at < self.segments).then_some(at)
    }

    fn release(&self, free: &mut Free, at: u32) {
        self.set_owner(at, 0);
        free.count += 1;
        free.lowest = free.lowest.min(at);
        for wake in std::mem::take(&mut free.waiting).into_values() {
            wake.wake();
        }
    }

    fn owner(&self, at: u32) -> FamilyId {
        self.word(at).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn set_owner(&self, at: u32, family: FamilyId) {
        if let Some(word) = self.word(at) {
            word.store(family, Ordering::Release);
        }
    }

    fn word(&self, at: u32) -> Option<&AtomicU64> {
        self.owners.at_u64(u64::from(at) * 8)
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The checksums of all slots: CRC-32C of each [`SUM_BYTES`], in a state file.
#[derive(Debug)]
pub struct Sums {
    file: SharedFile,
}

impl Sums {
    /// Bytes of the state file for `slots` slots.
    #[must_use]
    pub fn file_bytes(slots: u32) -> u64 {
        u64::from(slots) * SLOT_SUM_BYTES
    }

    /// The checksums in `file`.
    #[must_use]
    pub const fn new(file: SharedFile) -> Self {
        Self { file }
    }

    /// Records the checksums of `bytes`, whole extents, for the slots from `first` on. `false`, and
    /// nothing recorded, where the slots do not exist.
    #[must_use]
    pub fn record(&self, first: SlotId, bytes: &[u8]) -> bool {
        let Some(words) = self.words(first, bytes.len()) else { return false };
        for (word, pair) in words.iter().zip(bytes.chunks(2 * SUM_PIECE)) {
            word.store(sum_pair(pair), Ordering::Release);
        }
        true
    }

    /// The pages of `bytes`, whole extents, that are not what was recorded for the slots from `first`
    /// on: bit 0 stands for the first page of any of the extents. All of them where the slots do not
    /// exist.
    #[must_use]
    pub fn damaged(&self, first: SlotId, bytes: &[u8], geometry: Geometry) -> PageMask {
        let Some(words) = self.words(first, bytes.len()) else { return PageMask::MAX };
        let mut damaged = 0;
        for (at, (word, pair)) in words.iter().zip(bytes.chunks(2 * SUM_PIECE)).enumerate() {
            let difference = word.load(Ordering::Acquire) ^ sum_pair(pair);
            for (half, wrong) in
                [difference & 0xffff_ffff, difference >> 32].into_iter().enumerate()
            {
                if wrong != 0 {
                    let offset = (2 * at + half) as u64 * SUM_BYTES % EXTENT_BYTES;
                    damaged |= 1 << (offset / geometry.page_bytes);
                }
            }
        }
        damaged
    }

    /// Takes memory for the checksums of `count` slots.
    ///
    /// # Errors
    /// ENOSPC.
    pub fn reserve(&self, first: SlotId, count: u32) -> io::Result<()> {
        let offset = u64::from(first.0.saturating_sub(1)) * SLOT_SUM_BYTES;
        self.file.allocate(offset, u64::from(count) * SLOT_SUM_BYTES)
    }

    /// Forgets the checksums of `count` slots: nothing that lies there verifies any more.
    pub fn scrub(&self, first: SlotId, count: u32) {
        let bytes = usize::try_from(u64::from(count) * EXTENT_BYTES).unwrap_or(0);
        for word in self.words(first, bytes).unwrap_or_default() {
            word.store(0, Ordering::Release);
        }
    }

    fn words(&self, first: SlotId, bytes: usize) -> Option<&[AtomicU64]> {
        let offset = u64::from(first.0.checked_sub(1)?) * SLOT_SUM_BYTES;
        self.file.words(offset, bytes / (2 * SUM_PIECE))
    }
}

const SUM_PIECE: usize = 4096;
const _: () = assert!(SUM_PIECE as u64 == SUM_BYTES && SLOT_SUMS.is_multiple_of(2));

/// The checksums of two neighbouring pieces in one word, the first in the low half.
fn sum_pair(pair: &[u8]) -> u64 {
    let (low, high) = pair.split_at(pair.len().min(SUM_PIECE));
    u64::from(crc32c::crc32c(low)) | u64::from(crc32c::crc32c(high)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::scratch::Scratch;

    fn slots(segments: u32) -> (Scratch, Slots) {
        let scratch = Scratch::new();
        let file =
            SharedFile::create(&scratch.path("segments"), Slots::file_bytes(segments)).unwrap();
        (scratch, Slots::open(file, segments).unwrap())
    }

    #[test]
    fn the_last_segment_is_given_and_a_waiter_is_woken_by_the_next_return() {
        let (_scratch, slots) = slots(2);
        let (a, b) = (Arc::new(Wake::silent()), Arc::new(Wake::silent()));
        assert_eq!(slots.take(7, &a), Some(SlotId(1)));
        assert_eq!(slots.take(8, &b), Some(SlotId(129)));
        assert_eq!(slots.take(7, &a), None);
        assert!(!a.is_raised());
        assert!(slots.give_back(8, SlotId(129)));
        assert!(a.take());
        assert_eq!(slots.take(7, &a), Some(SlotId(129)));
    }

    #[test]
    fn only_the_owner_gives_back_and_only_whole_segments() {
        let (_scratch, slots) = slots(2);
        let wake = Arc::new(Wake::silent());
        slots.take(7, &wake).unwrap();
        assert!(!slots.give_back(8, SlotId(1)));
        assert!(!slots.give_back(7, SlotId(2)));
        assert!(!slots.give_back(7, SlotId(0)));
        assert!(!slots.give_back(7, SlotId(u32::MAX)));
        assert!(slots.give_back(7, SlotId(1)));
        assert!(!slots.give_back(7, SlotId(1)));
    }

    #[test]
    fn a_restart_finds_the_same_owners() {
        let scratch = Scratch::new();
        let path = scratch.path("segments");
        let wake = Arc::new(Wake::silent());
        let slots =
            Slots::open(SharedFile::create(&path, Slots::file_bytes(4)).unwrap(), 4).unwrap();
        slots.take(7, &wake).unwrap();
        slots.take(8, &wake).unwrap();
        drop(slots);
        let slots = Slots::open(SharedFile::open(&path).unwrap(), 4).unwrap();
        assert_eq!(slots.held_by(8), [SlotId(129)]);
        assert_eq!(slots.free_segments(), 2);
        slots.give_back_dead(|family| family == 8);
        assert_eq!(slots.free_segments(), 3);
        assert_eq!(slots.take(9, &wake), Some(SlotId(1)));
    }

    #[test]
    fn no_segment_has_two_owners_whatever_the_order() {
        for seed in 0..50 {
            let mut random = Random::new(seed);
            let (_scratch, slots) = slots(8);
            let wake = Arc::new(Wake::silent());
            let mut held: BTreeMap<u32, FamilyId> = BTreeMap::new();
            for _ in 0..200 {
                let family = random.below(3) + 1;
                match random.below(4) {
                    0 | 1 => match slots.take(family, &wake) {
                        Some(first) => {
                            assert_eq!(held.insert(first.0, family), None, "seed {seed}")
                        }
                        None => assert_eq!(held.len(), 8, "seed {seed}"),
                    },
                    2 => {
                        let first = u32::try_from(random.below(8)).unwrap() * SEGMENT_SLOTS + 1;
                        let mine = held.get(&first) == Some(&family);
                        assert_eq!(slots.give_back(family, SlotId(first)), mine, "seed {seed}");
                        if mine {
                            held.remove(&first);
                        }
                    }
                    _ => {
                        slots.give_back_all(family);
                        held.retain(|_, owner| *owner != family);
                    }
                }
                assert_eq!(slots.free_segments() as usize, 8 - held.len(), "seed {seed}");
            }
        }
    }

    #[test]
    fn one_flipped_bit_is_damage_of_its_page_alone() {
        let scratch = Scratch::new();
        let sums =
            Sums::new(SharedFile::create(&scratch.path("sums"), Sums::file_bytes(256)).unwrap());
        let mut bytes = vec![0x5a; 32 << 16];
        let damaged = |bytes: &[u8]| sums.damaged(SlotId(5), bytes, Geometry { page_bytes: 4096 });
        assert_eq!(damaged(&bytes), PageMask::MAX);
        assert!(sums.record(SlotId(5), &bytes));
        assert_eq!(damaged(&bytes), 0);
        bytes[(7 << 16) + 3 * 4096 + 45] ^= 4;
        bytes[(8 << 16) + 15 * 4096 + 4095] ^= 1;
        assert_eq!(damaged(&bytes), 1 << 3 | 1 << 15);
        let wide = Geometry { page_bytes: 1 << 16 };
        assert_eq!(sums.damaged(SlotId(5), &bytes, wide), 1);
        sums.scrub(SlotId(5), 1);
        assert_eq!(damaged(&bytes), PageMask::MAX);
        assert!(!sums.record(SlotId(256), &bytes));
        assert!(!sums.record(SlotId(0), &bytes));
    }
}
