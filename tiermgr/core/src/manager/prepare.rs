//! Making the frames that a fork left shared a process' own, so that they can leave.
//!
//! `UFFDIO_MOVE` refuses a frame that two page tables show. The helper writes to it without changing
//! it (`MADV_POPULATE_WRITE`), on ranges that have been unprotected and looked at first: on a missing
//! or a protected page it would sleep, and wait for us.
//!
//! **Each extent is a copy at first**: more memory, in order to have less. So with no room a few at a
//! time are on their way, from here through limbo to the store, and what has been copied leaves before
//! anything else does.

use super::op::{Kind, Op, Piece, Prepare, Zero};
use super::shared::Shared;
use super::space::{Space, first_run, page_mask, runs};
use super::{Manager, Waiting};
use crate::effect::{Command, Effect};
use crate::event::{CommandOutcome, IoctlOutcome};
use crate::page::{PageMask, PageState};
use crate::record::Records;
use crate::units::{Addr, CHUNK_BYTES, EXTENT_BYTES, OpId, ProcId, Span, low_u32};

/// Extents that may be between their copy and the store although there is no room for them: one
/// request to the store.
const PIPELINE_MIN: u64 = 32;

impl<R: Records> Manager<R> {
    /// How many more extents may be copied now.
    fn prepares_allowed(&self) -> u32 {
        let shared = &self.shared;
        let extent_pages = u64::from(shared.extent_pages());
        let preparing = shared.ops.iter().filter(|(_, op)| matches!(op.kind, Kind::Prepare(_)));
        let preparing = preparing.count() as u64;
        let free = shared.budget_pages.saturating_sub(shared.gauges.used_pages()) / extent_pages;
        // What rests in limbo makes room soon; what is copied beyond that is copied in vain.
        let leaving = preparing + shared.gauges.limbo_pages / extent_pages;
        low_u32((free / 2).saturating_sub(preparing).max(PIPELINE_MIN.saturating_sub(leaving)))
    }

    /// Makes shared extents of a chunk exclusive, as many as may be now. False: none.
    pub(super) fn start_prepare(
        &mut self,
        proc: ProcId,
        at: Addr,
        mask: u32,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let mut allowed = self.prepares_allowed();
        if allowed == 0 {
            return false;
        }
        for (first, count) in runs(mask) {
            for n in first..first + count {
                if allowed == 0 {
                    return true;
                }
                allowed -= 1;
                let at = at.plus(u64::from(n) * EXTENT_BYTES);
                self.part(proc, at);
                self.dirty_extent(proc, at);
                let shared = &mut self.shared;
                let Some(space) = self.spaces.get_mut(&proc) else {
                    return true;
                };
                let kind = Kind::Prepare(Prepare::Unprotecting);
                let id = shared.begin(space, Op { proc, at, kind });
                if let Some(region) = space.region_at_mut(at) {
                    let extent = region.extent_of(at);
                    Shared::<R>::lock(region, extent, id);
                }
                self.issue(id, effects);
            }
        }
        true
    }

    /// What the helper copies after a fork is the parent's alone, and the child's table would say that both
    /// have the same frame. So nothing is copied from here on; gives the extents of which a copy may be
    /// under way.
    pub(super) fn give_up_prepares(
        &mut self,
        proc: ProcId,
        effects: &mut Vec<Effect>,
    ) -> Vec<Addr> {
        let ops = self.shared.ops.iter().filter(|(_, op)| op.proc == proc);
        let under_way: Vec<_> = ops
            .filter_map(|(id, op)| match op.kind {
                Kind::Prepare(step) => Some((id, op.at, step)),
                _ => None,
            })
            .collect();
        let mut copied = Vec::new();
        for (id, at, step) in under_way {
            match step {
                Prepare::Unprotecting if self.retries.iter().any(|&(retry, _)| retry == id) => {
                    self.retries.retain(|&(retry, _)| retry != id);
                    self.end_prepare(id, effects);
                }
                // Its outcome ends it.
                Prepare::Unprotecting | Prepare::Looking => {}
                Prepare::Populating { .. } => {
                    effects.push(Effect::Cancel { op: id, proc });
                    copied.push(at);
                }
            }
        }
        copied
    }

    fn is_held(&self, proc: ProcId) -> bool {
        self.spaces.get(&proc).is_none_or(Space::is_held)
    }

    /// The extent can leave, and does so next: nothing is younger for having been copied.
    fn end_prepare(&mut self, id: OpId, effects: &mut Vec<Effect>) {
        let Some(Op { proc, at, .. }) = self.end_plain_op(id) else {
            return;
        };
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) else {
            return;
        };
        let extent = region.extent_of(at);
        region.note_mut(extent).wake = true;
        Shared::<R>::unlock(proc, region, extent, id, effects);
        let chunk = (proc, at.align_down(CHUNK_BYTES));
        if self.prepared.back() != Some(&chunk) {
            self.prepared.push_back(chunk);
        }
    }

    /// Unprotected: now the helper can write to the pages without changing them.
    pub(super) fn on_prepared(
        &mut self,
        id: OpId,
        outcome: IoctlOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let Some(&Op { proc, at, .. }) = self.shared.ops.get(id) else {
            return;
        };
        if outcome != IoctlOutcome::Done || self.is_held(proc) {
            self.end_prepare(id, effects);
            return;
        }
        if let Some(op) = self.shared.ops.get_mut(id) {
            op.kind = Kind::Prepare(Prepare::Looking);
        }
        effects.push(Effect::ReadMap { op: id, proc, at });
    }

    /// Only what is there is populated: the helper would sleep on a missing page, and wait for us.
    pub(super) fn on_prepare_looked(
        &mut self,
        id: OpId,
        present: PageMask,
        effects: &mut Vec<Effect>,
    ) {
        let page_bytes = self.shared.page_bytes();
        let Some(proc) = self.shared.ops.get(id).map(|op| op.proc) else {
            return;
        };
        let present = if self.is_held(proc) { 0 } else { present };
        let Some((first, count)) = first_run(present) else {
            self.end_prepare(id, effects);
            return;
        };
        let Some(op) = self.shared.ops.get_mut(id) else {
            return;
        };
        let at = op.at;
        op.kind = Kind::Prepare(Prepare::Populating { rest: present & !page_mask(first, count) });
        let start = at.plus(u64::from(first) * page_bytes);
        let span = Span::new(start, u64::from(count) * page_bytes);
        effects.push(Effect::Command { op: id, proc, command: Command::Populate(span) });
    }

    pub(super) fn on_populated(
        &mut self,
        id: OpId,
        outcome: CommandOutcome,
        effects: &mut Vec<Effect>,
    ) {
        let Some(&Op { proc, at, kind: Kind::Prepare(Prepare::Populating { ref rest }) }) =
            self.shared.ops.get(id)
        else {
            return;
        };
        if let Some(space) = self.spaces.get_mut(&proc) {
            space.parted.push((self.shared.ops.next(), at));
        }
        let rest = if outcome == CommandOutcome::Done { *rest } else { 0 };
        self.on_prepare_looked(id, rest, effects);
    }

    /// A fault inside an extent that the helper populates. It may be the helper's own, on a page that
    /// the client dropped a moment ago, or that a shield which came late has protected again; it is
    /// answered at once, or the helper would never end.
    pub(super) fn unblock_helper(&mut self, fault: Waiting, effects: &mut Vec<Effect>) {
        let page_bytes = self.shared.page_bytes();
        let start = fault.at.align_down(page_bytes);
        let Some(space) = self.spaces.get_mut(&fault.proc) else {
            return;
        };
        let at = start.align_down(EXTENT_BYTES);
        let lost = space.region_at(start).is_some_and(|region| {
            let states = self.shared.record(region, region.extent_of(start)).states;
            states.get(self.shared.page_of(start)) == PageState::Poisoned
        });
        if lost {
            // The mark is not in this page table: the kernel has none, or a fork took the record along
            // and not the mark. Zeros would stand for what was lost.
            let span = Span::new(start, page_bytes);
            effects.push(Effect::Poison { proc: fault.proc, span });
            return;
        }
        if fault.protected {
            let op = Op { proc: fault.proc, at, kind: Kind::Unprotect { page: None } };
            let id = self.shared.begin(space, op);
            self.issue(id, effects);
            return;
        }
        let mask = page_mask(self.shared.page_of(start), 1);
        let zero = Zero { mask, piece: Piece { start, len: page_bytes }, recheck: true };
        let id = self.shared.begin(space, Op { proc: fault.proc, at, kind: Kind::Zero(zero) });
        self.shared.gauges.reserved_pages += 1;
        self.issue(id, effects);
    }
}
