//! One record for each extent, 16 bytes, and the order of stores that keeps each of them true.
//!
//! A record is two words: the states of its pages, and where its bytes are besides their place (slot
//! and limbo chunk). Both are stored atomically. [`StateRecords::set`] orders the stores so that after
//! any of them the states never need a slot or a limbo chunk that the other word does not name yet, or
//! does not name any more.

use crate::state::regions::RegionDirectory;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tiermgr_core::limits::RECORDS_MAX;
use tiermgr_core::page::{PageState, PageStates};
use tiermgr_core::record::{ExtentRecord, Records, RegionRecord};
use tiermgr_core::units::{ProcId, RecordIndex, RegionId, SlotId};
use tiermgr_sys::shm::SharedFile;

/// Bytes of a record.
pub const RECORD_BYTES: u64 = 16;
/// Bytes of the file, all but the used part of it a hole.
pub const FILE_BYTES: u64 = RECORDS_MAX as u64 * RECORD_BYTES;

/// The records of one family in its state file.
#[derive(Debug)]
pub struct StateRecords {
    file: Arc<SharedFile>,
    regions: Arc<RegionDirectory>,
    dir: PathBuf,
}

impl StateRecords {
    pub(crate) const fn new(
        file: Arc<SharedFile>,
        regions: Arc<RegionDirectory>,
        dir: PathBuf,
    ) -> Self {
        Self { file, regions, dir }
    }
}

/// Takes memory for the records of a region.
pub(crate) fn allocate(file: &SharedFile, first: RecordIndex, count: u32) -> io::Result<()> {
    file.allocate(u64::from(first.0) * RECORD_BYTES, bytes_of(count))
}

/// Bytes of `count` records.
pub(crate) fn bytes_of(count: u32) -> u64 {
    u64::from(count) * RECORD_BYTES
}

/// The two words of the record at `at`.
fn words(file: &SharedFile, at: RecordIndex) -> Option<(&AtomicU64, &AtomicU64)> {
    match file.words(u64::from(at.0) * RECORD_BYTES, 2)? {
        [states, places] => Some((states, places)),
        _ => None,
    }
}

/// Reads one record. One that does not exist is all zeros.
#[must_use]
pub fn read(file: &SharedFile, at: RecordIndex) -> ExtentRecord {
    let Some((states, places)) = words(file, at) else { return ExtentRecord::default() };
    let states = PageStates(states.load(Ordering::Acquire));
    let (slot, limbo_plus_one) = unpack(places.load(Ordering::Acquire));
    ExtentRecord { states, slot, limbo_plus_one }
}

const fn pack(slot: SlotId, limbo_plus_one: u16) -> u64 {
    slot.0 as u64 | (limbo_plus_one as u64) << 32
}

#[expect(clippy::cast_possible_truncation, reason = "the fields of the word are what is wanted")]
const fn unpack(places: u64) -> (SlotId, u16) {
    (SlotId(places as u32), (places >> 32) as u16)
}

impl Records for StateRecords {
    fn get(&self, at: RecordIndex) -> ExtentRecord {
        debug_assert!(at.0 < RECORDS_MAX);
        read(&self.file, at)
    }

    fn set(&mut self, at: RecordIndex, record: ExtentRecord) {
        let Some((states, places)) = words(&self.file, at) else {
            debug_assert!(false, "{at:?} is no record");
            return;
        };
        let old_places = places.load(Ordering::Acquire);
        let (old_slot, old_limbo) = unpack(old_places);
        // What the new states need is named before they are stored; what only the old ones need stays
        // named until they are gone.
        let slot = if record.holds_slot() { record.slot } else { old_slot };
        let limbo =
            if record.states.any(PageState::is_limbo) { record.limbo_plus_one } else { old_limbo };
        let between = pack(slot, limbo);
        let after = pack(record.slot, record.limbo_plus_one);
        if between != old_places {
            places.store(between, Ordering::Release);
        }
        states.store(record.states.0, Ordering::Release);
        if after != between {
            places.store(after, Ordering::Release);
        }
    }

    fn reserve(&mut self, first: RecordIndex, count: u32) -> bool {
        let allocated = self.regions.reserve().and_then(|()| allocate(&self.file, first, count));
        let Err(error) = allocated else { return true };
        tracing::error!(
            %error,
            bytes = bytes_of(count),
            path = %self.dir.display(),
            "no room for the records of a region: make the file system of the state directory larger. \
             A region is refused; where it is of a process that was forked just now, its threads wait \
             where they touch what was not in memory"
        );
        false
    }

    fn clear(&mut self, first: RecordIndex, count: u32) {
        let end = u64::from(first.0) + u64::from(count);
        let page = tiermgr_sys::process::page_size() / RECORD_BYTES;
        let whole_first = u64::from(first.0).next_multiple_of(page).min(end);
        let whole_end = (end - end % page).max(whole_first);
        for at in (u64::from(first.0)..whole_first).chain(whole_end..end) {
            if let Some([states, places]) = self.file.words(at * RECORD_BYTES, 2) {
                states.store(0, Ordering::Release);
                places.store(0, Ordering::Release);
            }
        }
        let bytes = (whole_end - whole_first) * RECORD_BYTES;
        if bytes > 0
            && let Err(error) = self.file.punch(whole_first * RECORD_BYTES, bytes)
        {
            tracing::warn!(%error, "giving back the memory of records; zeroing them instead");
            for at in whole_first..whole_end {
                if let Some([states, places]) = self.file.words(at * RECORD_BYTES, 2) {
                    states.store(0, Ordering::Release);
                    places.store(0, Ordering::Release);
                }
            }
        }
    }

    fn put_region(&mut self, region: RegionRecord) {
        self.regions.put(region);
    }

    fn drop_region(&mut self, proc: ProcId, region: RegionId) {
        self.regions.drop_region(proc, region);
    }

    fn regions(&self) -> Vec<RegionRecord> {
        self.regions.all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::scratch::Scratch;
    use crate::state::regions;
    use std::collections::BTreeMap;
    use std::os::unix::fs::MetadataExt;

    fn fresh(scratch: &Scratch) -> StateRecords {
        let file = Arc::new(SharedFile::create(&scratch.path("records"), FILE_BYTES).unwrap());
        let directory = SharedFile::create(&scratch.path("regions"), regions::FILE_BYTES).unwrap();
        let regions = Arc::new(RegionDirectory::new(directory, Arc::clone(&file)));
        StateRecords::new(file, regions, scratch.path(""))
    }

    fn record(states: PageState, slot: u32, limbo_plus_one: u16) -> ExtentRecord {
        ExtentRecord { states: PageStates::all(states, 16), slot: SlotId(slot), limbo_plus_one }
    }

    #[test]
    fn records_agree_with_a_plain_map() {
        let scratch = Scratch::new();
        let mut records = fresh(&scratch);
        let mut plain: BTreeMap<u32, ExtentRecord> = BTreeMap::new();
        let mut random = Random::new(11);
        for _ in 0..2000 {
            let at = u32::try_from(random.below(2000)).unwrap();
            if random.below(20) == 0 {
                let count = u32::try_from(random.below(900)).unwrap();
                records.clear(RecordIndex(at), count);
                plain.retain(|&index, _| index < at || index >= at + count);
            } else {
                let states = PageState::ALL;
                let state = states[usize::try_from(random.below(states.len() as u64)).unwrap()];
                let wanted = record(
                    state,
                    u32::try_from(random.below(1 << 30)).unwrap(),
                    u16::try_from(random.below(512)).unwrap(),
                );
                records.set(RecordIndex(at), wanted);
                plain.insert(at, wanted);
            }
        }
        for at in 0..3000 {
            let wanted = plain.get(&at).copied().unwrap_or_default();
            assert_eq!(records.get(RecordIndex(at)), wanted, "{at}");
        }
        assert_eq!(records.get(RecordIndex(RECORDS_MAX - 1)), ExtentRecord::default());
    }

    #[test]
    fn records_are_taken_as_a_whole_and_given_back() {
        let scratch = Scratch::new();
        let mut records = fresh(&scratch);
        let held = || std::fs::metadata(scratch.path("records")).unwrap().blocks() * 512;
        let (first, count) = (RecordIndex(32), 100_000);
        assert!(records.reserve(first, count));
        assert!(held() >= bytes_of(count));
        let wanted = record(PageState::Dirty, 0, 0);
        records.set(RecordIndex(40), wanted);
        assert!(records.reserve(first, count));
        assert_eq!(records.get(RecordIndex(40)), wanted, "what is there stays");
        records.clear(first, count);
        // The first and the last page may have records of others.
        assert!(held() <= 2 * tiermgr_sys::process::page_size(), "{}", held());
        assert_eq!(records.get(RecordIndex(40)), ExtentRecord::default());
    }

    /// A reader beside the writer stands for the restart after a kill: whatever it sees between the
    /// stores must name the slot and the limbo chunk that the states need.
    #[test]
    fn a_reader_between_two_stores_never_sees_states_without_their_places() {
        let scratch = Scratch::new();
        let mut records = fresh(&scratch);
        let file = Arc::clone(&records.file);
        let cycle = [
            record(PageState::LimboDirty, 0, 3),
            record(PageState::LimboClean, 9, 3),
            record(PageState::Parked, 9, 0),
            record(PageState::Filling, 9, 0),
            record(PageState::Clean, 9, 0),
            record(PageState::LimboClean, 9, 4),
            record(PageState::Clean, 9, 0),
            record(PageState::Dirty, 0, 0),
        ];
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let (states, places) = words(&file, RecordIndex(7)).unwrap();
                    // Equal states before and after the read of the places: one instant.
                    let before = states.load(Ordering::SeqCst);
                    let (slot, limbo) = unpack(places.load(Ordering::SeqCst));
                    if states.load(Ordering::SeqCst) != before {
                        continue;
                    }
                    let seen = PageStates(before);
                    assert!(!seen.any(PageState::needs_slot) || slot == SlotId(9), "{seen:?}");
                    assert!(!seen.any(PageState::is_limbo) || limbo == 3 || limbo == 4, "{seen:?}");
                }
            });
            for _ in 0..50_000 {
                for wanted in cycle {
                    records.set(RecordIndex(7), wanted);
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
