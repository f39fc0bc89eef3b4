//! Counters of one family, kept by the manager.

/// What the manager counted. Names and meanings are those of `FamilyStats` in `tiermgr-wire`, which
/// is what people see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Faults stepped.
    pub faults: u64,
    /// Pages brought in because a program touched them.
    pub recalled_pages: u64,
    /// Pages brought in ahead of a touch.
    pub prefetched_pages: u64,
    /// Pages installed as zeros.
    pub zeroed_pages: u64,
    /// Pages brought back from limbo.
    pub rescued_pages: u64,
    /// Pages whose bytes left DRAM.
    pub parked_pages: u64,
    /// Of these, pages whose slot copy was still valid.
    pub parked_clean_pages: u64,
    /// Bytes written to the store.
    pub store_written_bytes: u64,
    /// Bytes read from the store.
    pub store_read_bytes: u64,
    /// Reads or writes of the store that failed.
    pub store_errors: u64,
    /// Pages that were lost.
    pub poisoned_pages: u64,
    /// Forks followed.
    pub forks: u64,
    /// Moves that the kernel refused.
    pub moves_refused: u64,
    /// Ioctls that had to be tried again because a layout change was queued.
    pub ioctl_retries: u64,
    /// Faults served although the budget was used up, because nothing could be parked.
    pub overcommitted_faults: u64,
}

/// Pages by place. A gauge, kept in step with every change of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// In their place, or about to be.
    pub resident_pages: u64,
    /// In limbo, or about to be.
    pub limbo_pages: u64,
    /// In limbo still, but with their bytes elsewhere: about to be dropped.
    pub dropping_pages: u64,
    /// Room kept for zeros and rescues under way.
    pub reserved_pages: u64,
    /// Memory that is not armed: all of it may be touched without a word.
    pub credit_pages: u64,
    /// Only in the store.
    pub parked_pages: u64,
    /// Held by leases.
    pub pinned_pages: u64,
}

impl Gauges {
    /// Pages that take room in DRAM.
    #[must_use]
    pub const fn used_pages(&self) -> u64 {
        self.resident_pages
            + self.limbo_pages
            + self.dropping_pages
            + self.reserved_pages
            + self.credit_pages
    }
}
