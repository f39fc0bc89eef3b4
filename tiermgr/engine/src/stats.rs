//! Counters of a family, put together from the manager's and the host's.

use tiermgr_core::manager::Manager;
use tiermgr_core::record::Records;
use tiermgr_core::units::{EXTENT_BYTES, Tick};
use tiermgr_core::watch::Watch;
use tiermgr_wire::control::FamilyStats;

/// What the host counts, because the manager cannot see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// Reads and writes of the store that failed and were tried again.
    pub store_retries: u64,
    /// Installs that were refused because the client's memory cgroup has no head-room.
    pub cgroup_refusals: u64,
    /// Sleeps of the executor: each costs a wake-up of some tens of microseconds.
    pub sleeps: u64,
}

/// The counters of one family as people see them.
pub fn family_stats<R: Records>(manager: &Manager<R>, watch: &Watch, now: Tick) -> FamilyStats {
    let page_bytes = manager.page_bytes();
    let stats = manager.stats();
    let gauges = manager.gauges();
    FamilyStats {
        faults: stats.faults,
        recalled_pages: stats.recalled_pages,
        prefetched_pages: stats.prefetched_pages,
        zeroed_pages: stats.zeroed_pages,
        rescued_pages: stats.rescued_pages,
        parked_pages: stats.parked_pages,
        parked_clean_pages: stats.parked_clean_pages,
        store_written_bytes: stats.store_written_bytes,
        store_read_bytes: stats.store_read_bytes,
        store_errors: stats.store_errors,
        poisoned_pages: stats.poisoned_pages,
        forks: stats.forks,
        moves_refused: stats.moves_refused,
        ioctl_retries: stats.ioctl_retries,
        dram_now_bytes: gauges.used_pages() * page_bytes,
        limbo_now_bytes: gauges.limbo_pages * page_bytes,
        credit_now_bytes: gauges.credit_pages * page_bytes,
        parked_now_bytes: gauges.parked_pages * page_bytes,
        slots_now_bytes: u64::from(manager.slots_held()) * EXTENT_BYTES,
        budget_now_bytes: manager.budget_bytes(),
        pinned_now_bytes: gauges.pinned_pages * page_bytes,
        late_faults_now: watch.late(now),
        // Only a host knows.
        without_helper_now: 0,
    }
}
