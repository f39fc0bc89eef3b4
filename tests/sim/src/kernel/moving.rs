//! What the helper asks of the kernel, a page at a time.

use super::frames::{FrameId, Frames};
use super::mm::{Mm, Place, Pte, Vma};
use tiermgr_core::units::Addr;

/// What became of one page of a `UFFDIO_MOVE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveStep {
    /// It is at the destination.
    Moved,
    /// There was nothing to move.
    Hole,
    /// `EBUSY`: a device holds it, or a forked process shares it.
    Busy,
    /// `EEXIST`, `EFAULT`, `ENOENT`: something else is in the way.
    Stopped,
}

/// What became of one page of a `MADV_POPULATE_WRITE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PopulateStep {
    /// It is there and exclusive.
    Done,
    /// The helper sleeps in a fault; its message is queued.
    Asleep {
        /// Because of write protection.
        protected: bool,
    },
    /// `EFAULT`, `ENOMEM`: no mapping, or a poisoned page.
    Stopped,
}

impl Mm {
    /// One page of a `UFFDIO_MOVE` with `ALLOW_SRC_HOLES`. Only the destination has to be registered.
    /// Write protection is lost on the way.
    pub fn move_page(&mut self, frames: &Frames, from: Addr, to: Addr) -> MoveStep {
        let is_limbo = matches!(self.layout.place(to), Some(Place::Limbo(_)));
        let (Some(source), Some(target)) = (self.page(from), self.page(to)) else {
            return MoveStep::Stopped;
        };
        if !is_limbo || source.vma == Vma::Hole || target.vma == Vma::Hole {
            return MoveStep::Stopped;
        }
        // A marker is in the way as much as a page is.
        if target.pte != Pte::NONE {
            return MoveStep::Stopped;
        }
        let (frame, exclusive) = match source.pte {
            Pte::Absent { marker: false } => return MoveStep::Hole,
            Pte::Absent { marker: true } | Pte::Poison => return MoveStep::Stopped,
            Pte::Present { frame, exclusive, .. } => (frame, exclusive),
        };
        if frame != FrameId::ZERO && (!exclusive || frames.is_pinned(frame)) {
            return MoveStep::Busy;
        }
        if let Some(page) = self.page_mut(from) {
            page.pte = Pte::NONE;
        }
        if let Some(page) = self.page_mut(to) {
            page.pte = Pte::Present { frame, wp: false, exclusive };
        }
        MoveStep::Moved
    }

    /// One page of a `MADV_DONTNEED`. False where nothing is mapped.
    pub fn drop_page(&mut self, frames: &mut Frames, at: Addr) -> bool {
        let Some(page) = self.page_mut(at) else { return false };
        if page.vma == Vma::Hole {
            return false;
        }
        if let Some(frame) = page.pte.frame() {
            frames.unmap(frame);
        }
        page.pte = Pte::NONE;
        true
    }

    /// One page of a `MADV_POPULATE_WRITE`.
    pub fn populate_page(&mut self, frames: &mut Frames, at: Addr) -> PopulateStep {
        let Some(page) = self.page(at) else { return PopulateStep::Stopped };
        match (page.vma, page.pte) {
            (Vma::Hole, _) | (_, Pte::Poison) => PopulateStep::Stopped,
            (Vma::Managed { armed: true }, Pte::Absent { .. }) => {
                PopulateStep::Asleep { protected: false }
            }
            (Vma::Managed { armed: true }, Pte::Present { wp: true, .. }) => {
                PopulateStep::Asleep { protected: true }
            }
            (_, Pte::Absent { .. }) => {
                let frame = frames.alloc(0);
                self.set_exclusive(at, frame);
                PopulateStep::Done
            }
            (_, Pte::Present { .. }) => {
                self.make_exclusive(frames, at);
                PopulateStep::Done
            }
        }
    }

    fn set_exclusive(&mut self, at: Addr, frame: FrameId) {
        if let Some(page) = self.page_mut(at) {
            let wp = matches!(page.pte, Pte::Present { wp: true, .. });
            page.pte = Pte::Present { frame, wp, exclusive: true };
        }
    }

    /// Copy-on-write of a present page: afterwards its frame is its own, write protection as before.
    pub(super) fn make_exclusive(&mut self, frames: &mut Frames, at: Addr) -> Option<FrameId> {
        let Pte::Present { frame, exclusive, .. } = self.page(at)?.pte else { return None };
        if exclusive && frame != FrameId::ZERO {
            return Some(frame);
        }
        let own = if frame != FrameId::ZERO && frames.maps(frame) == 1 {
            frame
        } else {
            let own = frames.alloc(frames.generation(frame));
            frames.unmap(frame);
            own
        };
        self.set_exclusive(at, own);
        Some(own)
    }
}
