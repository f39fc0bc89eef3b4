//! The directory of regions: fixed entries of 64 bytes, each whole or not there at all.
//!
//! A region that is put again (its unarmed part shrank) gets a new entry with a higher number before
//! the old one goes, so that a kill in between leaves both, and the higher one counts.

use crate::state::{clear_entry, get_entry, halves, join, put_entry, records};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tiermgr_core::effect::Residency;
use tiermgr_core::limits::{PROCS_MAX, REGIONS_MAX};
use tiermgr_core::page::PageState;
use tiermgr_core::record::RegionRecord;
use tiermgr_core::units::{Addr, EXTENT_BYTES, ProcId, RecordIndex, RegionId};
use tiermgr_sys::shm::SharedFile;

const ENTRY_BYTES: u64 = 64;
const ENTRY_WORDS: usize = 8;
/// One entry for each region that can exist, a second for the one that is being put, and the first,
/// whose first word counts the entries that were ever used.
const ENTRIES: u64 = (PROCS_MAX * REGIONS_MAX + 2) as u64;
/// Bytes of the file, all but the used part of it a hole.
pub const FILE_BYTES: u64 = (ENTRIES * ENTRY_BYTES).next_multiple_of(64 << 10);

/// All regions of a family.
#[derive(Debug)]
pub struct RegionDirectory {
    file: SharedFile,
    records: Arc<SharedFile>,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    /// Where the entry of a region lies, and what it says.
    known: BTreeMap<(ProcId, RegionId), (u64, RegionRecord)>,
    /// Entries below `next` that are free.
    free: Vec<u64>,
    /// No entry at or above it was ever used.
    next: u64,
    /// The number of the last put.
    number: u64,
}

impl RegionDirectory {
    /// The directory in `file`, with whatever is there already.
    ///
    /// Its first page must be there already.
    pub(crate) fn new(file: SharedFile, records: Arc<SharedFile>) -> Self {
        let directory = Self { file, records, index: Mutex::new(Index::default()) };
        directory.load();
        directory
    }

    fn load(&self) {
        let mut index = self.lock();
        let mut numbers: BTreeMap<(ProcId, RegionId), u64> = BTreeMap::new();
        index.next = self.used().map_or(1, |used| used.load(Ordering::Acquire)).clamp(1, ENTRIES);
        for at in 1..index.next {
            let Some(words) = self.words(at) else { break };
            let Some((region, number)) = decode(words) else {
                index.free.push(at);
                continue;
            };
            let key = (region.proc, region.region);
            if numbers.get(&key).is_none_or(|&known| known < number) {
                numbers.insert(key, number);
                if let Some((older, _)) = index.known.insert(key, (at, region)) {
                    self.clear(older);
                    index.free.push(older);
                }
            } else {
                clear_entry(words);
                index.free.push(at);
            }
            index.number = index.number.max(number);
        }
    }

    /// Makes sure that one more region can be put, and any of those that are there again.
    ///
    /// # Errors
    /// ENOSPC.
    pub fn reserve(&self) -> std::io::Result<()> {
        // The one that is put again takes a second entry for a moment, which the next time is free.
        self.file.allocate(0, ENTRY_BYTES)?;
        self.file.allocate(self.lock().next * ENTRY_BYTES, 2 * ENTRY_BYTES)
    }

    /// Adds a region, or replaces the one with the same process and number.
    pub fn put(&self, region: RegionRecord) {
        let mut index = self.lock();
        let at = index.free.pop().unwrap_or(index.next);
        let Some(words) = self.words(at) else {
            // More regions than all processes may have: the core refuses them earlier.
            tracing::error!(?region, "the directory of regions is full");
            return;
        };
        if at == index.next {
            index.next += 1;
            if let Some(used) = self.used() {
                used.store(index.next, Ordering::Release);
            }
        }
        index.number += 1;
        put_entry(words, &encode(&region, index.number));
        if let Some((older, _)) = index.known.insert((region.proc, region.region), (at, region)) {
            self.clear(older);
            index.free.push(older);
        }
    }

    /// Takes a region out.
    pub fn drop_region(&self, proc: ProcId, region: RegionId) {
        let mut index = self.lock();
        if let Some((at, _)) = index.known.remove(&(proc, region)) {
            self.clear(at);
            index.free.push(at);
        }
    }

    /// All regions, in ascending order of process and number.
    #[must_use]
    pub fn all(&self) -> Vec<RegionRecord> {
        self.lock().known.values().map(|&(_, region)| region).collect()
    }

    /// How many regions `proc` has.
    #[must_use]
    pub fn count_of(&self, proc: ProcId) -> usize {
        let all = (proc, RegionId(0))..=(proc, RegionId(u32::MAX));
        self.lock().known.range(all).count()
    }

    /// Where the bytes of a region are, read from its records beside their owner: pages that change
    /// meanwhile are counted in one of their places.
    #[must_use]
    pub fn residency(&self, region: &RegionRecord, page_bytes: u64) -> Residency {
        let pages = u32::try_from(EXTENT_BYTES / page_bytes.max(1)).unwrap_or(1);
        let mut residency = Residency {
            unarmed_bytes: u64::from(region.unarmed_extents) * EXTENT_BYTES,
            ..Residency::default()
        };
        for extent in region.unarmed_extents..region.extents {
            let record = records::read(&self.records, RecordIndex(region.first.0 + extent));
            for page in 0..pages {
                let place = match record.states.get(page) {
                    PageState::Absent => &mut residency.absent_bytes,
                    PageState::Parked => &mut residency.parked_bytes,
                    PageState::Poisoned => &mut residency.poisoned_bytes,
                    _ => &mut residency.resident_bytes,
                };
                *place += page_bytes;
            }
        }
        residency
    }

    fn used(&self) -> Option<&AtomicU64> {
        self.file.at_u64(0)
    }

    fn words(&self, at: u64) -> Option<&[AtomicU64]> {
        self.file.words(at.checked_mul(ENTRY_BYTES)?, ENTRY_WORDS)
    }

    fn clear(&self, at: u64) {
        if let Some(words) = self.words(at) {
            clear_entry(words);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encode(region: &RegionRecord, number: u64) -> [u64; ENTRY_WORDS - 1] {
    [
        join(region.proc.0, region.region.0),
        region.base.0,
        join(region.extents, region.first.0),
        u64::from(region.unarmed_extents),
        number,
        0,
        0,
    ]
}

fn decode(words: &[AtomicU64]) -> Option<(RegionRecord, u64)> {
    let [ids, base, extents_first, unarmed, number, ..]: [u64; ENTRY_WORDS - 1] = get_entry(words)?;
    let (proc, region) = halves(ids);
    let (extents, first) = halves(extents_first);
    let record = RegionRecord {
        proc: ProcId(proc),
        region: RegionId(region),
        base: Addr(base),
        extents,
        first: RecordIndex(first),
        unarmed_extents: halves(unarmed).1,
    };
    Some((record, number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::scratch::Scratch;

    fn region(proc: u32, region: u32, unarmed: u32) -> RegionRecord {
        RegionRecord {
            proc: ProcId(proc),
            region: RegionId(region),
            base: Addr(u64::from(region) << 30),
            extents: 64,
            first: RecordIndex(region * 64),
            unarmed_extents: unarmed,
        }
    }

    fn open(scratch: &Scratch) -> RegionDirectory {
        let path = scratch.path("regions");
        let file = SharedFile::open(&path)
            .unwrap_or_else(|_| SharedFile::create(&path, FILE_BYTES).unwrap());
        let path = scratch.path("records");
        let records = SharedFile::open(&path)
            .unwrap_or_else(|_| SharedFile::create(&path, records::FILE_BYTES).unwrap());
        RegionDirectory::new(file, Arc::new(records))
    }

    #[test]
    fn the_directory_agrees_with_a_plain_map_and_survives_a_reload() {
        let scratch = Scratch::new();
        let mut directory = open(&scratch);
        let mut plain: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        let mut random = Random::new(3);
        for step in 0..3000 {
            let key =
                (u32::try_from(random.below(3)).unwrap(), u32::try_from(random.below(40)).unwrap());
            if random.below(3) == 0 {
                directory.drop_region(ProcId(key.0), RegionId(key.1));
                plain.remove(&key);
            } else {
                let unarmed = u32::try_from(random.below(64)).unwrap();
                directory.put(region(key.0, key.1, unarmed));
                plain.insert(key, unarmed);
            }
            if step % 500 == 499 {
                directory = open(&scratch);
            }
            let wanted: Vec<RegionRecord> =
                plain.iter().map(|(key, &unarmed)| region(key.0, key.1, unarmed)).collect();
            assert_eq!(directory.all(), wanted);
        }
        assert_eq!(directory.count_of(ProcId(1)), plain.range((1, 0)..(2, 0)).count());
    }

    #[test]
    fn of_two_entries_of_one_region_the_later_counts() {
        let scratch = Scratch::new();
        let directory = open(&scratch);
        directory.put(region(1, 1, 60));
        directory.used().unwrap().store(3, Ordering::Release);
        put_entry(directory.words(2).unwrap(), &encode(&region(1, 1, 30), 2));
        drop(directory);
        let directory = open(&scratch);
        assert_eq!(directory.all(), [region(1, 1, 30)]);
        directory.drop_region(ProcId(1), RegionId(1));
        drop(directory);
        assert!(open(&scratch).all().is_empty());
    }
}
