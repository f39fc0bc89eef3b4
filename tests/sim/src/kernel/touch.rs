//! What happens when a thread, or a device on its behalf, touches a page.

use super::frames::{FrameId, Frames};
use super::mm::{Mm, Pte, Vma};
use tiermgr_core::units::Addr;

/// Why a page is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store of this generation.
    Write(u64),
    /// `FOLL_PIN` for a device that will read memory: no write, but the page becomes exclusive.
    PinRead,
    /// `FOLL_PIN | FOLL_WRITE` for a device that will write memory: faults as a store would, and
    /// changes nothing yet.
    PinWrite,
}

impl Access {
    /// Whether it faults as a store.
    #[must_use]
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write(_) | Self::PinWrite)
    }
}

/// How a touch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// The access was made, to this frame, which holds this generation now.
    Done(FrameId, u64),
    /// A message was queued; the thread sleeps.
    Asleep {
        /// Because of write protection.
        protected: bool,
    },
    /// SIGBUS.
    Bus,
    /// SIGSEGV.
    Segv,
}

impl Mm {
    /// Touches the page at `at`. Pins are taken here.
    pub fn touch(&mut self, frames: &mut Frames, at: Addr, access: Access) -> Touch {
        let Some(page) = self.page(at) else { return Touch::Segv };
        let armed = match page.vma {
            Vma::Hole => return Touch::Segv,
            Vma::Managed { armed } => armed,
            Vma::Foreign => false,
        };
        match page.pte {
            Pte::Poison => return Touch::Bus,
            Pte::Absent { .. } if armed => return Touch::Asleep { protected: false },
            // Write protection is looked at before copy-on-write.
            Pte::Present { wp: true, .. } if access.is_write() && armed => {
                return Touch::Asleep { protected: true };
            }
            Pte::Absent { .. } => {
                let frame = if access == Access::Read { FrameId::ZERO } else { frames.alloc(0) };
                if let Some(page) = self.page_mut(at) {
                    let exclusive = frame != FrameId::ZERO;
                    page.pte = Pte::Present { frame, wp: false, exclusive };
                }
            }
            Pte::Present { .. } => {}
        }
        let shared = match page.pte {
            Pte::Present { frame, exclusive, .. } => !exclusive && frames.maps(frame) > 1,
            _ => false,
        };
        if shared && access != Access::Read && (page.unshielded || access == Access::PinRead) {
            self.silent_copies += 1;
        }
        let frame = if access == Access::Read {
            self.page(at).and_then(|page| page.pte.frame())
        } else {
            self.make_exclusive(frames, at)
        };
        let Some(frame) = frame else { return Touch::Segv };
        match access {
            Access::Read => {}
            Access::Write(generation) => frames.write(frame, generation),
            Access::PinRead | Access::PinWrite => frames.pin(frame),
        }
        Touch::Done(frame, frames.generation(frame))
    }
}
