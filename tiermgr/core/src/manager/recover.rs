//! After a restart: the records against what the kernel shows.
//!
//! The records are true but may be a step behind: an ioctl may have ended of which nobody took note.
//! Each process is held (its faults sleep on) until every extent with a record has been looked at:
//!
//! - a page that is in its place is the newest, whatever the record says, since only its program can
//!   have written there: it counts as dirty;
//! - a page that was to go to limbo is where the page table shows it; in neither place: zapped;
//! - a page that was being filled and is not there is still parked.
//!
//! What limbo holds beyond that is stale and dropped. Leases do not survive; frames that forks left
//! shared count for each process from now on.

use super::limbo::note_stale;
use super::op::{ArmThen, Kind, Op};
use super::shared::{Shared, weigh};
use super::space::{Block, Region, Space, Stage, position};
use super::{Manager, ManagerConfig};
use crate::effect::Effect;
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::{ExtentRecord, Records};
use crate::units::{Addr, CHUNK_BYTES, EXTENT_BYTES, OpId, ProcId, SlotId, Span};

/// Extents looked at at once.
const LOOKS_IN_FLIGHT_MAX: u32 = 512;

/// How far a process has come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recovery {
    /// Everything has been registered again: the daemon before may have ended before it did.
    rearmed: bool,
    region: usize,
    extent: u32,
    outstanding: u32,
}

impl<R: Records> Manager<R> {
    /// A manager that goes on from `records`. `segments` are the segments of slots that the family
    /// held. Each process in the records is served once its `ProcReady` has come; for one that did
    /// not survive, `ProcGone` is to follow.
    pub fn recover(config: ManagerConfig, records: R, segments: &[SlotId]) -> Self {
        let mut manager = Self::new(config, records);
        for &first in segments {
            manager.shared.slots.add_segment(first);
        }
        let regions = manager.shared.records.regions();
        for record in regions {
            let space = manager.spaces.entry(record.proc).or_insert_with(|| {
                let mut space = Space::new(record.proc);
                space.recovering = Some(Recovery::default());
                space
            });
            manager.next_region = manager.next_region.max(record.region.0);
            manager.shared.adopt_region(&Region::new(record));
            let at = space.regions.partition_point(|r| r.record.base < record.base);
            let mut region = Region::new(record);
            region.armed_proof = super::Proof::Needed;
            space.regions.insert(at, region);
        }
        manager.shared.clear_free_records();
        // Frames may be shared with any other process of the family: made exclusive before a move.
        if manager.spaces.len() > 1 {
            for space in manager.spaces.values_mut() {
                for region in &mut space.regions {
                    for extent in 0..region.record.extents {
                        let states = manager.shared.record(region, extent).states;
                        if states.any(PageState::is_resident) {
                            region.note_mut(extent).cow = true;
                        }
                    }
                }
            }
        }
        manager
    }

    /// Takes up the limbo of a process that was there before the restart.
    pub(super) fn resume(&mut self, proc: ProcId) {
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        if space.in_place {
            return;
        }
        for block in &mut space.blocks {
            // Until proven otherwise everything there is stale. It takes no room in the ledger: what
            // the records say is in limbo is counted there.
            block.stale = u32::MAX;
            block.uncounted = u32::MAX;
            block.stage = Stage::Dropping;
        }
        for index in 0..space.regions.len() {
            let region = &space.regions[index];
            for extent in 0..region.record.extents {
                let record = shared.record(region, extent);
                let Some(limbo) = record.limbo() else {
                    continue;
                };
                let at = region.extent_addr(extent);
                if let Some(block) = space.blocks.get_mut(limbo.0 as usize) {
                    block.home = at.align_down(CHUNK_BYTES);
                    block.mask |= 1 << position(at);
                    block.stale &= !(1 << position(at));
                    block.stage = Stage::Moving;
                }
            }
        }
        // Nothing of limbo is dropped before the records have been compared with it.
        for block in &mut space.blocks {
            block.ops += 1;
        }
    }

    /// Looks at further extents of processes that are being recovered.
    pub(super) fn advance_recovery(&mut self, effects: &mut Vec<Effect>) {
        let procs: Vec<ProcId> = self
            .spaces
            .values()
            .filter(|s| s.recovering.is_some() && (s.ready || !s.to_arm.is_empty()))
            .map(|s| s.id)
            .collect();
        for proc in procs {
            self.look_further(proc, effects);
        }
    }

    fn look_further(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(mut at) = space.recovering else {
            return;
        };
        if space.to_arm.is_empty() && !at.rearmed {
            at.rearmed = true;
            space.recovering = Some(at);
            for index in 0..space.regions.len() {
                let record = space.regions[index].record;
                let native = u64::from(record.unarmed_extents) * EXTENT_BYTES;
                let len = u64::from(record.extents) * EXTENT_BYTES - native;
                if len == 0 {
                    continue;
                }
                let span = Span::new(record.base.plus(native), len);
                let kind = Kind::Arm { span, on: true, then: ArmThen::Rearmed, tries: 0 };
                let id = shared.begin(space, Op { proc, at: span.start, kind });
                effects.push(Effect::Arm { op: id, proc, span, on: true });
            }
        }
        let is_first = at.outstanding == 0 && at.region == 0 && at.extent == 0;
        let arms = |op: &Op| op.proc == proc && matches!(op.kind, Kind::Arm { .. });
        if is_first && shared.ops.iter().any(|(_, op)| arms(op)) {
            // Not armed yet: what is touched between the look and the arming would be in no record.
            return;
        }
        while at.region < space.regions.len() && at.outstanding < LOOKS_IN_FLIGHT_MAX {
            let region = &space.regions[at.region];
            if at.extent >= region.record.extents {
                at.region += 1;
                at.extent = 0;
                continue;
            }
            let extent = at.extent;
            at.extent += 1;
            let home = region.extent_addr(extent);
            let mut unsure = space.to_arm.iter().chain(&space.to_look);
            let extent_span = Span::new(home, EXTENT_BYTES);
            let native = unsure.any(|span| span.overlaps(extent_span));
            let recorded = shared.record(region, extent) != ExtentRecord::default();
            let newborn = !space.to_arm.is_empty();
            // After a restart also where nothing is recorded: zeros may have been installed of which
            // nobody took note, and a move would take them along as if they were holes.
            if !native && (newborn || region.is_unarmed(extent) && !recorded) {
                continue;
            }
            let kind = Kind::Look { in_place: None, strict: false, held_pages: 0 };
            let id = shared.begin(space, Op { proc, at: home, kind });
            effects.push(Effect::ReadMap { op: id, proc, at: home });
            at.outstanding += 1;
        }
        space.recovering = Some(at);
        if at.region >= space.regions.len() && at.outstanding == 0 {
            self.end_recovery(proc, effects);
        }
    }

    pub(super) fn on_looked(
        &mut self,
        id: OpId,
        present: PageMask,
        known: bool,
        effects: &mut Vec<Effect>,
    ) {
        let shared = &mut self.shared;
        let Some(&Op { proc, at, kind: Kind::Look { in_place, strict, held_pages } }) =
            shared.ops.get(id)
        else {
            return;
        };
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        let Some(index) = space.region_index(at) else {
            return;
        };
        let extent = space.regions[index].extent_of(at);
        let record = shared.record(&space.regions[index], extent);
        if known
            && in_place.is_none()
            && let Some(block) = record.limbo()
        {
            if let Some(op) = shared.ops.get_mut(id) {
                op.kind = Kind::Look { in_place: Some(present), strict, held_pages };
            }
            let at = space.limbo_addr(block, at);
            effects.push(Effect::ReadMap { op: id, proc, at });
            return;
        }
        let (in_place, in_limbo) = match in_place {
            Some(in_place) => (in_place, present),
            None => (present, 0),
        };
        let filling = record.states.mask(|state| state == PageState::Filling);
        if known {
            let strict = strict || !space.to_arm.is_empty();
            compare(shared, space, index, extent, (in_place, in_limbo), strict);
        } else if let Some(states) = record.states.after(filling, PageEvent::FillCancelled) {
            shared.update(
                proc,
                &mut space.regions[index],
                extent,
                states,
                record.slot,
                record.limbo(),
            );
        }
        shared.end(space, id);
        shared.gauges.dropping_pages -= held_pages;
        let region = &mut space.regions[index];
        region.note_mut(extent).wake = true;
        Shared::<R>::unlock(proc, region, extent, id, effects);
        if let Some(recovery) = &mut space.recovering {
            recovery.outstanding -= 1;
        }
        if !known && filling != 0 {
            // Nobody can look into this process: filling again tells what is there, by EEXIST.
            let fault = super::Waiting { proc, at, write: false, protected: false };
            self.serve(fault, true, effects);
        }
    }

    fn end_recovery(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let shared = &mut self.shared;
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        space.recovering = None;
        let newborn = !std::mem::take(&mut space.to_arm).is_empty();
        space.to_look.clear();
        for index in 0..space.blocks.len() {
            if space.in_place || newborn {
                break;
            }
            space.blocks[index].ops -= 1;
            if let Ok(block) = u16::try_from(index) {
                super::limbo::settle_block(shared, space, crate::units::LimboBlock(block));
            }
        }
        for index in 0..space.regions.len() {
            let region = &mut space.regions[index];
            for extent in 0..region.record.extents {
                if shared.record(region, extent).states.any(PageState::is_resident) {
                    shared.became_resident(proc, region, extent);
                }
            }
        }
        // Faults that the daemon before us had read are not delivered again by themselves.
        for region in &space.regions {
            effects.push(Effect::Wake { proc, span: region.span() });
        }
    }
}

/// Brings one record up to what the kernel shows.
fn compare<R: Records>(
    shared: &mut Shared<R>,
    space: &mut Space,
    index: usize,
    extent: u32,
    (in_place, in_limbo): (PageMask, PageMask),
    strict: bool,
) {
    let proc = space.id;
    let region = &space.regions[index];
    let at: Addr = region.extent_addr(extent);
    let record = shared.record(region, extent);
    let mut states = record.states;
    for page in 0..shared.extent_pages() {
        let bit = 1 << page;
        let state = states.get(page);
        let missing = strict && in_place & bit == 0 && state.is_resident();
        let event = if missing {
            // A forked child never had what its parent made after the fork; or the client zapped it.
            PageEvent::Discarded
        } else if in_place & bit != 0 {
            PageEvent::FoundPresent
        } else if state == PageState::Filling {
            PageEvent::FillCancelled
        } else if state.is_limbo() && in_limbo & bit == 0 {
            PageEvent::LimboEmpty
        } else {
            continue;
        };
        if let Some(next) = state.next(event) {
            states.set(page, next);
        }
    }
    let region = &mut space.regions[index];
    shared.update(proc, region, extent, states, record.slot, record.limbo());
    let held = states.mask(PageState::is_limbo);
    if let Some(block) = record.limbo()
        && !space.in_place
        && let Some(entry) = space.blocks.get_mut(block.0 as usize)
    {
        if held == 0 {
            entry.mask &= !(1 << position(at));
            entry.stale |= 1 << position(at);
            entry.uncounted |= 1 << position(at);
        } else {
            // What was given up, or had been copied, lies there until all of the extent leaves.
            let kept = std::mem::take(&mut entry.stale_pages[position(at) as usize]);
            shared.gauges.dropping_pages -= u64::from(kept);
            note_stale(shared, space, block, at, (in_limbo & !held).count_ones());
        }
    }
}

impl<R: Records> Shared<R> {
    /// Looks whether the pages of an extent that is to be leased are there, unless somebody works on it.
    pub(super) fn look_for_lease(
        &mut self,
        space: &mut Space,
        index: usize,
        extent: u32,
        effects: &mut Vec<Effect>,
    ) {
        let (proc, region) = (space.id, &mut space.regions[index]);
        if region.note(extent).is_busy() {
            return;
        }
        region.note_mut(extent).unseen = false;
        let at = region.extent_addr(extent);
        let kind = Kind::Look { in_place: None, strict: true, held_pages: 0 };
        let look = self.begin(space, Op { proc, at, kind });
        Self::lock(&mut space.regions[index], extent, look);
        effects.push(Effect::ReadMap { op: look, proc, at });
    }

    /// Counts a region whose records were there before us, and holds its slots.
    fn adopt_region(&mut self, region: &Region) {
        let record = region.record;
        self.reserve_records(record.first, record.extents);
        self.gauges.credit_pages +=
            u64::from(record.unarmed_extents) * u64::from(self.extent_pages());
        for extent in 0..record.extents {
            let entry = self.record(region, extent);
            let weight = weigh(entry.states, false);
            self.gauges.resident_pages += weight.resident;
            self.gauges.limbo_pages += weight.limbo;
            self.gauges.parked_pages += weight.parked;
            self.unslotted_extents += weight.unslotted;
            if entry.holds_slot() {
                self.slots.adopt(entry.slot);
            }
        }
    }
}

/// The limbo range of a process, for the host's bookkeeping.
pub(super) fn empty_blocks(limbo: Span) -> Vec<Block> {
    let blocks = (limbo.len / CHUNK_BYTES).min(u64::from(crate::limits::LIMBO_BLOCKS_MAX));
    (0..blocks).map(|_| Block::FREE).collect()
}
