//! The memory cgroup of the programs: what it takes, and how the host holds the family below that.

use crate::kernel::{FrameId, Page, Vma};
use crate::world::World;
use tiermgr_core::event::Event;
use tiermgr_core::units::CHUNK_BYTES;

impl World {
    /// Whether the group takes `pages` more. Where it does not, the family gets a smaller budget than it uses:
    /// it would never park otherwise. The kernel is not asked, and says nothing of messages that wait.
    pub(crate) fn group_takes(&mut self, pages: usize) -> bool {
        if self.scenario.group_bytes == u64::MAX {
            return true;
        }
        let page_bytes = self.scenario.layout.page_bytes;
        let used_bytes = self.used_bytes();
        if used_bytes + pages as u64 * page_bytes <= self.scenario.group_bytes {
            return true;
        }
        let cap_bytes = used_bytes.saturating_sub(CHUNK_BYTES);
        if cap_bytes < self.cap_bytes {
            self.cap_bytes = cap_bytes;
            self.tell_budget(self.share_bytes);
        }
        false
    }

    /// Managed memory. What else the programs have does not count: it could fill the group, and never leave.
    fn used_bytes(&self) -> u64 {
        let managed = |page: &&Page| matches!(page.vma, Vma::Managed { .. });
        let pages = self.procs.iter().flat_map(|process| {
            process.mm.limbo().iter().chain(process.mm.arena().iter().filter(managed))
        });
        let frames = pages.filter(|page| page.pte.frame().is_some_and(|f| f != FrameId::ZERO));
        frames.count() as u64 * self.scenario.layout.page_bytes
    }

    /// The host looks whether the group has room again. False where nothing came of it.
    pub(crate) fn look_at_group(&mut self) -> bool {
        if self.cap_bytes == u64::MAX {
            return false;
        }
        let used_bytes = self.used_bytes();
        let room = self.scenario.group_bytes.saturating_sub(used_bytes);
        let cap_bytes = used_bytes + room / 2;
        if room <= CHUNK_BYTES || cap_bytes <= self.cap_bytes {
            return false;
        }
        self.cap_bytes = cap_bytes;
        self.tell_budget(self.share_bytes);
        true
    }

    /// The family's share of DRAM is `share_bytes` from now on.
    pub(crate) fn tell_budget(&mut self, share_bytes: u64) {
        self.share_bytes = share_bytes;
        self.budget_bytes = share_bytes.min(self.cap_bytes);
        self.tell(Event::Budget { bytes: self.budget_bytes });
    }
}
