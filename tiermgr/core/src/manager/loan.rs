//! Frames that a fork left shared: who counts them.
//!
//! A frame that several processes map is one frame. Of all processes that may share the frames of an
//! extent one counts them, the *lender*; each of the others names it in its notes and counts nothing
//! there. Always: what a borrower has in place, its lender has in place as well. So
//!
//! - a page more at a borrower is one of its own: from then on it counts the whole extent;
//! - a page fewer at a lender may be one fewer only there: a borrower becomes the lender;
//! - a write makes a copy: the writer counts for itself, and where it was the lender, another lends.
//!
//! Counting whole extents counts too much as soon as one of their pages is written; too little would
//! break a limit. [`Shared::update`] notices the first two by itself, the third is [`Manager::part`].

use super::Manager;
use super::shared::{Shared, in_place};
use super::space::Region;
use crate::page::PageMask;
use crate::record::Records;
use crate::units::{Addr, EXTENT_BYTES, ProcId, Span};

impl<R: Records> Manager<R> {
    /// The frames of an extent are, or are about to be, the process' own.
    pub(super) fn part(&mut self, proc: ProcId, at: Addr) {
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) else {
            return;
        };
        let extent = region.extent_of(at);
        if !std::mem::take(&mut region.note_mut(extent).cow) {
            return;
        }
        self.shared.unshare(region, extent);
        self.hand_on(proc, at);
    }

    /// The same for all extents that `span` touches.
    pub(super) fn part_span(&mut self, proc: ProcId, span: Span) {
        let mut at = span.start.align_down(EXTENT_BYTES);
        while at < span.end() {
            self.part(proc, at);
            at = at.plus(EXTENT_BYTES);
        }
    }

    /// `proc` lends the frames of an extent no longer: the first who has all that another has lends
    /// them to it, and whoever finds nobody counts for itself.
    fn hand_on(&mut self, proc: ProcId, at: Addr) {
        let mut heir: Option<(ProcId, PageMask)> = None;
        for space in self.spaces.values_mut() {
            let id = space.id;
            let Some(region) = space.region_at_mut(at) else {
                continue;
            };
            let extent = region.extent_of(at);
            if region.note(extent).lender != Some(proc) {
                continue;
            }
            let held = in_place(self.shared.record(region, extent).states);
            match heir {
                Some((lender, pages)) if held & !pages == 0 => {
                    region.note_mut(extent).lender = Some(lender);
                }
                _ => {
                    self.shared.unshare(region, extent);
                    heir.get_or_insert((id, held));
                }
            }
        }
    }

    /// Finds other lenders for what lenders have given up since the last call.
    pub(super) fn settle_loans(&mut self) {
        for (proc, at) in std::mem::take(&mut self.shared.ended_loans) {
            self.hand_on(proc, at);
        }
    }

    /// Whether each lender counts all that its borrowers have in place.
    pub(super) fn check_loans(&self) -> Result<(), String> {
        for space in self.spaces.values() {
            for region in &space.regions {
                for extent in 0..region.record.extents {
                    let Some(lender) = region.note(extent).lender else {
                        continue;
                    };
                    let at = region.extent_addr(extent);
                    let held = in_place(self.shared.record(region, extent).states);
                    let lent = self.spaces.get(&lender).and_then(|s| s.region_at(at));
                    let counted = lent.map_or(0, |lent| {
                        let extent = lent.extent_of(at);
                        match lent.note(extent).lender {
                            None => in_place(self.shared.record(lent, extent).states),
                            Some(_) => 0,
                        }
                    });
                    if held & !counted != 0 {
                        return Err(format!(
                            "{:?} has {held:#x} of {at:?} in place, and {lender:?} counts {counted:#x}",
                            space.id
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

impl<R: Records> Shared<R> {
    /// Leaves the counting of an extent's frames to `lender`, who has all of them in place.
    pub(crate) fn borrow_frames(&mut self, region: &mut Region, extent: u32, lender: ProcId) {
        debug_assert!(region.note(extent).lender.is_none(), "borrowed twice");
        let states = self.record(region, extent).states;
        self.gauges.resident_pages -= u64::from(in_place(states).count_ones());
        region.note_mut(extent).lender = Some(lender);
    }

    /// Counts frames that were borrowed and no longer are.
    pub(crate) fn unshare(&mut self, region: &mut Region, extent: u32) {
        if region.note(extent).lender.is_some() {
            region.note_mut(extent).lender = None;
            let states = self.record(region, extent).states;
            self.gauges.resident_pages += u64::from(in_place(states).count_ones());
        }
    }
}
