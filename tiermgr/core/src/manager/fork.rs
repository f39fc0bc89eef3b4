//! Following a fork.
//!
//! When the FORK message is read, the child already runs on a copy of the parent's page tables. What
//! was in its place is there in both; what was not is missing in both, and the child must be given the
//! same bytes as the parent had. So, before anything else happens to the parent: what is on its way
//! back is given up (it is still parked), what is in limbo is written to slots (limbo is not copied),
//! and then the table is copied, with one holder more for each slot. Faults of both wait meanwhile,
//! asleep in the kernel, and are woken at the end. Where each write fails, or limbo can be read no more
//! (its address space has ended), they do not wait for ever: the pages concerned are lost to the child.
//!
//! The frames that both now share are counted once until one of them writes (`loan.rs`). They are
//! write-protected, so that the write is announced.

use super::Manager;
use super::op::{ArmThen, Kind, Op};
use super::shared::Shared;
use super::space::{Ending, Region, Space, runs};
use crate::effect::Effect;
use crate::page::{PageMask, PageState, PageStates};
use crate::record::{Records, RegionRecord};
use crate::units::{Addr, EXTENT_BYTES, OpId, ProcId, SlotId, Span};
use std::collections::BTreeMap;

/// What a child has of an extent.
#[derive(Clone, Copy)]
struct Heir {
    child: ProcId,
    /// What is in its place is one frame for it and its parent, and counted once.
    lent: bool,
    /// Pages in their place of those that its parent has on their way to limbo.
    kept: PageMask,
}

impl<R: Records> Manager<R> {
    pub(super) fn on_forked(&mut self, parent: ProcId, child: ProcId, effects: &mut Vec<Effect>) {
        self.shared.stats.forks += 1;
        // A restart in the middle of copying the table left a part of it: begin again.
        while self.spaces.get(&child).is_some_and(|s| !s.regions.is_empty() && s.ops == 0) {
            self.end_region(child, 0, effects);
        }
        let mut newborn = Space::new(child);
        newborn.unborn = true;
        newborn.parent = Some(parent);
        let Some(space) = self.spaces.get_mut(&parent) else {
            // Told again after a restart, and there is nothing that the child could have of it.
            newborn.unborn = false;
            self.spaces.entry(child).or_insert(newborn);
            effects.push(Effect::Born { proc: child });
            return;
        };
        space.note_fork(child);
        space.ahead.clear();
        // What is not armed in the parent, or was not when it began to be, is not in the child. Told
        // again after a restart, nobody knows what was armed when the child was forked.
        let told_again = space.recovering.is_some();
        newborn.to_arm = space
            .regions
            .iter()
            .filter_map(|r| {
                let extents = match r.armed_proof {
                    super::Proof::Given if !told_again => r.record.unarmed_extents,
                    _ => r.record.extents,
                };
                let span = Span::new(r.record.base, u64::from(extents) * EXTENT_BYTES);
                (extents > 0).then_some(span)
            })
            .collect();
        for &span in &space.to_arm {
            if newborn.to_arm.iter().all(|other| other.start != span.start) {
                newborn.to_arm.push(span);
            }
        }
        newborn.to_look = space.zapped.iter().map(|&(_, span)| span).collect();
        // What the parent has yet to look at, or is looking at: it may end before it knows.
        newborn.to_look.extend(&space.to_look);
        newborn.to_look.extend(self.shared.ops.iter().filter_map(|(_, op)| match op.kind {
            Kind::Discard { span, .. } if op.proc == parent => Some(span),
            Kind::Look { .. } if op.proc == parent => Some(Span::new(op.at, EXTENT_BYTES)),
            Kind::Move { count, .. } if op.proc == parent => {
                Some(Span::new(op.at, u64::from(count) * EXTENT_BYTES))
            }
            _ => None,
        }));
        for block in space.blocks.iter().filter(|_| space.in_place) {
            for (first, count) in runs(block.stale) {
                let start = block.home.plus(u64::from(first) * EXTENT_BYTES);
                newborn.to_look.push(Span::new(start, u64::from(count) * EXTENT_BYTES));
            }
        }
        newborn.apart = space.parted.iter().map(|&(_, at)| at).collect();
        newborn.apart.extend(self.give_up_prepares(parent, effects));
        self.spaces.insert(child, newborn);
        self.give_up_fills(parent, effects);
        self.shield_early(parent, child, effects);
    }

    /// Both run on already, and each write copies a frame of which nobody hears: what is armed is
    /// write-protected before anything that takes time. Once more when the table is copied, for what
    /// was native until then.
    fn shield_early(&mut self, parent: ProcId, child: ProcId, effects: &mut Vec<Effect>) {
        let Some(space) = self.spaces.get(&parent) else {
            return;
        };
        let armed: Vec<Span> = space
            .regions
            .iter()
            .filter(|r| r.record.unarmed_extents < r.record.extents)
            .map(|r| {
                let native = u64::from(r.record.unarmed_extents) * EXTENT_BYTES;
                Span::new(r.record.base.plus(native), r.span().len - native)
            })
            .collect();
        for proc in [parent, child] {
            if let Some(mut space) = self.spaces.remove(&proc) {
                for &span in &armed {
                    self.shield(&mut space, span, effects);
                }
                self.spaces.insert(proc, space);
            }
        }
    }

    /// Nothing that the fork saw missing may appear in the parent before the child has its share.
    fn give_up_fills(&mut self, proc: ProcId, effects: &mut Vec<Effect>) {
        let under_way: Vec<OpId> = self
            .shared
            .ops
            .iter()
            .filter(|(_, op)| op.proc == proc && matches!(op.kind, Kind::Fill(_) | Kind::Rescue(_)))
            .map(|(id, _)| id)
            .collect();
        for id in under_way {
            let waits = self.retries.iter().any(|&(retry, _)| retry == id);
            self.retries.retain(|&(retry, _)| retry != id);
            let fill = match self.shared.ops.get_mut(id).map(|op| &mut op.kind) {
                Some(Kind::Fill(fill)) => {
                    fill.cancelled = true;
                    true
                }
                _ => false,
            };
            // With an ioctl or a read outstanding, its outcome ends the operation.
            if waits && fill {
                self.cancel_fill(id, effects);
            } else if waits {
                self.end_rescue(id, false, effects);
            }
        }
    }

    pub(super) fn advance_forks(&mut self, effects: &mut Vec<Effect>) {
        let parents: Vec<ProcId> = self
            .spaces
            .values()
            .filter(|s| !s.forks.is_empty() && !s.unborn)
            .map(|s| s.id)
            .collect();
        for parent in parents {
            let unarmed: Vec<Addr> = self.spaces[&parent]
                .regions
                .iter()
                .filter(|r| r.record.unarmed_extents > 0 && r.arming.is_none())
                .map(|r| r.record.base)
                .collect();
            for base in unarmed {
                self.arm_region(parent, base, ArmThen::Map, effects);
            }
            if self.spaces[&parent].in_place {
                self.all_stay(parent, effects);
            }
            let resting: Vec<_> = self.spaces[&parent].resting.iter().copied().collect();
            for block in resting {
                self.start_write(parent, block, effects);
            }
            while self.spaces.get(&parent).is_some_and(|s| {
                let known =
                    s.regions.iter().all(|r| r.record.unarmed_extents == 0 || r.is_given_up());
                // The records of one that nobody will look into are all there is.
                let looked = s.recovering.is_none() || s.gone && !s.ready;
                let written = s.resting.is_empty() || s.keeps_limbo;
                let quiet = s.ops == 0 && written && looked;
                quiet && (known || s.drained) && !s.forks.is_empty()
            }) {
                if !self.look_at_kept(parent, effects) {
                    break;
                }
                self.bear_child(parent, effects);
            }
        }
    }

    /// Whether it is known what the oldest child without a table has of what its parent has in no slot. A
    /// move that was ordered after the fork took it from the parent alone, or was refused and nobody could
    /// look any more: only what is missing in the child too is lost to it.
    fn look_at_kept(&mut self, parent: ProcId, effects: &mut Vec<Effect>) -> bool {
        let Some(mother) = self.spaces.get(&parent) else {
            return true;
        };
        let Some(&proc) = mother.forks.front() else {
            return true;
        };
        let Some(child) = self.spaces.get(&proc) else {
            return true;
        };
        if child.kept.is_some() {
            let looks = |op: &Op| op.proc == proc && matches!(op.kind, Kind::KeptLook);
            return !self.shared.ops.iter().any(|(_, op)| looks(op));
        }
        if self.shared.unslotted_extents == 0 {
            return true;
        }
        let mut unsaved = Vec::new();
        for region in &mother.regions {
            for extent in region.record.unarmed_extents..region.record.extents {
                let states = self.shared.record(region, extent).states;
                if states.any(|state| state == PageState::LimboDirty) {
                    unsaved.push(region.extent_addr(extent));
                }
            }
        }
        let Some(child) = self.spaces.get_mut(&proc) else {
            return true;
        };
        child.kept = Some(BTreeMap::new());
        for &at in &unsaved {
            let id = self.shared.begin(child, Op { proc, at, kind: Kind::KeptLook });
            effects.push(Effect::ReadMap { op: id, proc, at });
        }
        unsaved.is_empty()
    }

    pub(super) fn on_kept_looked(&mut self, id: OpId, present: PageMask) {
        let Some(Op { proc, at, .. }) = self.end_plain_op(id) else {
            return;
        };
        let kept = self.spaces.get_mut(&proc).and_then(|child| child.kept.as_mut());
        if let Some(kept) = kept.filter(|_| present != 0) {
            kept.insert(at, present);
        }
    }

    /// Copies the parent's table for its oldest child without one.
    fn bear_child(&mut self, parent: ProcId, effects: &mut Vec<Effect>) {
        let Some(mut mother) = self.spaces.remove(&parent) else {
            return;
        };
        let born = mother.forks.pop_front().and_then(|id| self.spaces.remove(&id));
        if let Some(mut child) = born {
            let used = self.shared.gauges.used_pages();
            self.copy_table(&mut mother, &mut child, effects);
            let took_room = self.shared.gauges.used_pages() != used;
            let has_own =
                !child.apart.is_empty() || child.kept.as_ref().is_some_and(|kept| !kept.is_empty());
            debug_assert!(!took_room || has_own, "a copied table took room");
            child.apart = Vec::new();
            child.kept = None;
            child.unborn = false;
            child.copied = true;
            effects.push(Effect::Born { proc: child.id });
            self.spaces.insert(child.id, child);
        }
        mother.copied = true;
        self.spaces.insert(parent, mother);
        self.timer = self.shared.now;
    }

    /// The host has taken note of the births of the last turn: parents and children go on.
    pub(super) fn end_births(&mut self, effects: &mut Vec<Effect>) {
        for space in self.spaces.values_mut().filter(|s| s.copied) {
            space.copied = false;
            if !space.is_held() {
                wake_all(space, effects);
            }
        }
    }

    fn copy_table(&mut self, mother: &mut Space, child: &mut Space, effects: &mut Vec<Effect>) {
        for index in 0..mother.regions.len() {
            let source = mother.regions[index].record;
            // What the parent gives up meanwhile is the child's still, and armed there or not.
            let span = mother.regions[index].span();
            if mother.regions[index].ending == Ending::Disarmed {
                self.arm_at_birth(child, span);
            }
            let Ok(first) = self.shared.take_records(source.extents) else {
                // More address space than records, or than room for them: the child's touches of it will
                // wait for ever, which is the one thing that shows no wrong byte.
                continue;
            };
            let record = RegionRecord { proc: child.id, first, unarmed_extents: 0, ..source };
            // Before its extents: what a kill leaves of them must not lie in records that nobody has.
            self.shared.records.put_region(record);
            let mut copy = Region::new(record);
            copy.random.clone_from(&mother.regions[index].random);
            for extent in 0..source.extents {
                let at = copy.extent_addr(extent);
                let kept = child.kept.as_ref().and_then(|kept| kept.get(&at)).copied();
                let heir = Heir {
                    child: child.id,
                    lent: !child.apart.contains(&at),
                    kept: kept.unwrap_or_default(),
                };
                self.copy_extent(&mut mother.regions[index], &mut copy, extent, heir);
            }
            child.regions.push(copy);
            self.shield(mother, span, effects);
            if !child.to_arm.iter().any(|unarmed| unarmed.start == span.start) {
                self.shield(child, span, effects);
            }
        }
        if child.to_arm.is_empty() {
            self.look_at_zapped(child, effects);
        }
        // Memory that was native when the child began is so still: whatever it touches before it is
        // armed must be found and counted before anything else happens to it.
        for span in child.to_arm.clone() {
            child.recovering = Some(super::recover::Recovery::default());
            let kind = Kind::Arm { span, on: true, then: ArmThen::Shield, tries: 0 };
            let id = self.shared.begin(child, Op { proc: child.id, at: span.start, kind });
            effects.push(Effect::Arm { op: id, proc: child.id, span, on: true });
        }
    }

    /// Whoever was forked by the child before it had its table has what the child has: a grandchild that took
    /// it for armed would lose to a move what it touches there.
    fn arm_at_birth(&mut self, child: &mut Space, span: Span) {
        let mut forked: Vec<ProcId> = child.forks.iter().copied().collect();
        child.note_to_arm(span);
        while let Some(proc) = forked.pop() {
            if let Some(heir) = self.spaces.get_mut(&proc) {
                heir.note_to_arm(span);
                forked.extend(&heir.forks);
            }
        }
    }

    /// The parent's table says that these pages are gone, and they may have been there when the child
    /// was forked.
    fn look_at_zapped(&mut self, child: &mut Space, effects: &mut Vec<Effect>) {
        let proc = child.id;
        for span in std::mem::take(&mut child.to_look) {
            let mut at = span.start.align_down(EXTENT_BYTES);
            while at < span.end() {
                let region = child.region_at(at);
                if region.is_some_and(|region| !region.note(region.extent_of(at)).is_busy()) {
                    let kind = Kind::Look { in_place: None, strict: false, held_pages: 0 };
                    let id = self.shared.begin(child, Op { proc, at, kind });
                    if let Some(region) = child.region_at_mut(at) {
                        let extent = region.extent_of(at);
                        Shared::<R>::lock(region, extent, id);
                    }
                    effects.push(Effect::ReadMap { op: id, proc, at });
                }
                at = at.plus(EXTENT_BYTES);
            }
        }
    }

    /// Write-protects what a fork left shared.
    pub(super) fn shield(&mut self, space: &mut Space, span: Span, effects: &mut Vec<Effect>) {
        let op = Op { proc: space.id, at: span.start, kind: Kind::Shield { span } };
        let id = self.shared.begin(space, op);
        effects.push(Effect::Protect { op: id, proc: space.id, span, on: true });
    }

    fn copy_extent(&mut self, from: &mut Region, to: &mut Region, extent: u32, heir: Heir) {
        let record = self.shared.record(from, extent);
        let mut states = record.states;
        if states == PageStates::default() {
            return;
        }
        // What the parent has in its place no longer it cannot count for the child.
        let mut lent = heir.lent;
        for page in 0..self.shared.extent_pages() {
            let state = match states.get(page) {
                PageState::LimboClean | PageState::Filling => PageState::Parked,
                // It was there still when the child was forked.
                PageState::LimboDirty if heir.kept & (1 << page) != 0 => {
                    lent = false;
                    PageState::Dirty
                }
                // The store took it from nobody, and limbo is not inherited. The parent has it still,
                // unless its address space has ended.
                PageState::LimboDirty => {
                    self.shared.stats.poisoned_pages += 1;
                    PageState::Poisoned
                }
                other => other,
            };
            states.set(page, state);
        }
        let holds = record.slot.is_some() && states.any(PageState::needs_slot);
        if holds {
            self.shared.slots.retain(record.slot);
        }
        let slot = if holds { record.slot } else { SlotId::NONE };
        self.shared.update(heir.child, to, extent, states, slot, None);
        if states.any(PageState::is_resident) {
            let lender = from.note(extent).lender.unwrap_or(from.record.proc);
            if lent {
                self.shared.borrow_frames(to, extent, lender);
            }
            to.note_mut(extent).cow = true;
            from.note_mut(extent).cow = true;
            self.shared.enqueue(heir.child, to, extent);
        }
    }
}

fn wake_all(space: &Space, effects: &mut Vec<Effect>) {
    for region in &space.regions {
        effects.push(Effect::Wake { proc: space.id, span: region.span() });
    }
}
