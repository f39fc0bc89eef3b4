//! Records that outlive the simulated daemon.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use tiermgr_core::record::{ExtentRecord, Records, RegionRecord};
use tiermgr_core::units::{ProcId, RecordIndex, RegionId};

#[derive(Clone, Debug, Default)]
struct Kept {
    extents: Vec<ExtentRecord>,
    regions: BTreeMap<(ProcId, RegionId), RegionRecord>,
    /// A rule of the records that a `set` broke.
    broken: Option<String>,
}

/// A handle to durable records. Clones share one store, as two mappings of one file would.
#[derive(Clone, Debug, Default)]
pub struct SimRecords {
    kept: Rc<RefCell<Kept>>,
    doom: Rc<RefCell<Doom>>,
}

/// A kill that is to come between two stores.
#[derive(Debug, Default)]
struct Doom {
    /// Stores that still reach the records.
    stores_left: Option<u64>,
    /// The records as the kill found them. The doomed daemon goes on to the end of its turn with
    /// copies of its own, which are thrown away.
    found: Option<Kept>,
}

impl SimRecords {
    /// Takes the first rule that a store broke, if one did.
    #[must_use]
    pub fn take_broken(&self) -> Option<String> {
        self.kept.borrow_mut().broken.take()
    }

    /// Kills the daemon after `stores` more stores: what it stores then reaches nobody.
    pub fn kill_after(&self, stores: u64) {
        self.doom.borrow_mut().stores_left = Some(stores);
    }

    /// The records as a new daemon finds them.
    pub fn reopen(&self) {
        let mut doom = self.doom.borrow_mut();
        if let Some(found) = doom.found.take() {
            *self.kept.borrow_mut() = found;
        }
        doom.stores_left = None;
    }

    fn before_store(&self) {
        let mut doom = self.doom.borrow_mut();
        match doom.stores_left {
            Some(0) => {
                doom.stores_left = None;
                doom.found = Some(self.kept.borrow().clone());
            }
            left => doom.stores_left = left.map(|left| left - 1),
        }
    }

    /// Whether every record is all zeros and no region is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let kept = self.kept.borrow();
        kept.regions.is_empty() && kept.extents.iter().all(|&at| at == ExtentRecord::default())
    }
}

fn slot_of(at: RecordIndex) -> usize {
    crate::ix(u64::from(at.0))
}

impl Records for SimRecords {
    fn get(&self, at: RecordIndex) -> ExtentRecord {
        self.kept.borrow().extents.get(slot_of(at)).copied().unwrap_or_default()
    }

    fn set(&mut self, at: RecordIndex, record: ExtentRecord) {
        self.before_store();
        let mut kept = self.kept.borrow_mut();
        if record.states.any(tiermgr_core::page::PageState::needs_slot) && !record.slot.is_some() {
            kept.broken.get_or_insert_with(|| format!("record {} needs a slot and has none", at.0));
        }
        if record.states.any(tiermgr_core::page::PageState::is_limbo) && record.limbo().is_none() {
            kept.broken
                .get_or_insert_with(|| format!("record {} is in limbo and names no block", at.0));
        }
        let index = slot_of(at);
        if kept.extents.len() <= index {
            kept.extents.resize(index + 1, ExtentRecord::default());
        }
        kept.extents[index] = record;
    }

    fn reserve(&mut self, _: RecordIndex, _: u32) -> bool {
        true
    }

    fn clear(&mut self, first: RecordIndex, count: u32) {
        self.before_store();
        let mut kept = self.kept.borrow_mut();
        let end = (slot_of(first) + crate::ix(u64::from(count))).min(kept.extents.len());
        for record in kept.extents.iter_mut().take(end).skip(slot_of(first)) {
            *record = ExtentRecord::default();
        }
    }

    fn put_region(&mut self, region: RegionRecord) {
        self.before_store();
        self.kept.borrow_mut().regions.insert((region.proc, region.region), region);
    }

    fn drop_region(&mut self, proc: ProcId, region: RegionId) {
        self.before_store();
        self.kept.borrow_mut().regions.remove(&(proc, region));
    }

    fn regions(&self) -> Vec<RegionRecord> {
        self.kept.borrow().regions.values().copied().collect()
    }
}
