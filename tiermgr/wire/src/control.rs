//! What `tiermgrctl` asks and is told. The same structures are its `--json` output, so a field's name
//! is an interface.

use serde::{Deserialize, Serialize};

/// Requests of `tiermgrctl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ControlRequest {
    /// Answer: `ControlReply::Status`.
    Status,
    /// Answer: `ControlReply::Tiers`.
    Tiers,
    /// Answer: `ControlReply::Clients`, at most [`ROWS_MAX`] from `skip` on.
    Clients {
        /// Rows to leave out.
        skip: u32,
    },
    /// Answer: `ControlReply::Regions`, at most [`ROWS_MAX`] from `skip` on.
    Regions {
        /// Rows to leave out.
        skip: u32,
    },
    /// Bring everything back, disarm, and end. Refused with the reason where it does not fit.
    /// Needs the daemon's own uid or root. Answer: `ControlReply::Done`.
    Shutdown,
}

/// Most rows in one list.
pub const ROWS_MAX: usize = 128;

/// Answers to `tiermgrctl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ControlReply {
    /// Done.
    Done,
    /// The daemon as a whole.
    Status(Box<Status>),
    /// The tiers.
    Tiers(Vec<TierRow>),
    /// The clients.
    Clients(Vec<ClientRow>),
    /// The regions.
    Regions(Vec<RegionRow>),
}

/// The daemon as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Process that serves faults.
    pub daemon_pid: i32,
    /// Process that keeps descriptors open across a restart.
    pub keeper_pid: i32,
    /// Times that the daemon was restarted by its keeper.
    pub restarts: u32,
    /// Seconds since this daemon started.
    pub uptime_s: u64,
    /// Families attached.
    pub families: u32,
    /// Clients that have attached to this serving process, or that it took up from an earlier one. A
    /// process may be several: the preload library is one, each connection of the C interface another.
    pub attached_total: u64,
    /// Sum over all families, those that have gone included.
    pub totals: FamilyStats,
    /// DRAM that all clients together may have.
    pub dram_limit_bytes: u64,
    /// DRAM lent to families now.
    pub dram_granted_bytes: u64,
    /// DRAM that the daemon keeps for itself, before anything is lent.
    pub dram_own_bytes: u64,
    /// Most memory that the daemon was seen to have, its state files included, at looks a second apart.
    pub own_peak_bytes: u64,
    /// Slots of the store that are in use, in bytes.
    pub store_used_bytes: u64,
    /// Capacity of the store.
    pub store_capacity_bytes: u64,
    /// Things that an operator should know, one a line; empty when all is well.
    pub warnings: Vec<String>,
    /// Kernel features that are missing, by name.
    pub features_missing: Vec<String>,
}

/// Counters of one family. All of them only grow, except those named `*_now_*`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FamilyStats {
    /// Faults read from userfaultfds.
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
    /// Of these, pages whose slot copy was still valid: no write was needed.
    pub parked_clean_pages: u64,
    /// Bytes written to the store.
    pub store_written_bytes: u64,
    /// Bytes read from the store.
    pub store_read_bytes: u64,
    /// Reads or writes of the store that failed.
    pub store_errors: u64,
    /// Pages that were lost, and raise SIGBUS.
    pub poisoned_pages: u64,
    /// Forks followed.
    pub forks: u64,
    /// Moves that the kernel refused because a page was pinned or shared.
    pub moves_refused: u64,
    /// Ioctls that had to be tried again because a layout change was queued.
    pub ioctl_retries: u64,
    /// Bytes in DRAM now, limbo and credit included.
    pub dram_now_bytes: u64,
    /// Of these, bytes in limbo now.
    pub limbo_now_bytes: u64,
    /// Bytes granted but not armed now.
    pub credit_now_bytes: u64,
    /// Bytes whose only copy is in the store now.
    pub parked_now_bytes: u64,
    /// Bytes of slots held now.
    pub slots_now_bytes: u64,
    /// What the family may have in DRAM now.
    pub budget_now_bytes: u64,
    /// Bytes held by leases now.
    pub pinned_now_bytes: u64,
    /// Pages at which threads have slept for more than five seconds now.
    pub late_faults_now: u64,
    /// Programs whose helper has gone: their memory moves no more, and the limit does not hold for it.
    pub without_helper_now: u64,
}

impl FamilyStats {
    /// Adds the counters of `other`.
    pub fn add(&mut self, other: &Self) {
        self.faults += other.faults;
        self.recalled_pages += other.recalled_pages;
        self.prefetched_pages += other.prefetched_pages;
        self.zeroed_pages += other.zeroed_pages;
        self.rescued_pages += other.rescued_pages;
        self.parked_pages += other.parked_pages;
        self.parked_clean_pages += other.parked_clean_pages;
        self.store_written_bytes += other.store_written_bytes;
        self.store_read_bytes += other.store_read_bytes;
        self.store_errors += other.store_errors;
        self.poisoned_pages += other.poisoned_pages;
        self.forks += other.forks;
        self.moves_refused += other.moves_refused;
        self.ioctl_retries += other.ioctl_retries;
        self.dram_now_bytes += other.dram_now_bytes;
        self.limbo_now_bytes += other.limbo_now_bytes;
        self.credit_now_bytes += other.credit_now_bytes;
        self.parked_now_bytes += other.parked_now_bytes;
        self.slots_now_bytes += other.slots_now_bytes;
        self.budget_now_bytes += other.budget_now_bytes;
        self.pinned_now_bytes += other.pinned_now_bytes;
        self.late_faults_now += other.late_faults_now;
        self.without_helper_now += other.without_helper_now;
    }
}

/// One tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierRow {
    /// `dram` or `nvme`.
    pub name: String,
    /// What it is made of: a path, or "memory".
    pub backing: String,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes promised to work in flight or lent to families and not in use.
    pub reserved_bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// `ok`, or what is wrong.
    pub state: String,
}

/// One process of a family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientRow {
    /// Family, as a short decimal for display.
    pub family: u64,
    /// Its process id as the daemon sees it; 0 where a forked child has not shown itself.
    pub pid: i32,
    /// Its helper's process id; 0 where there is none.
    pub helper_pid: i32,
    /// Name given at the hello.
    pub name: String,
    /// `latency`, `standard` or `bulk`.
    pub class: String,
    /// User id.
    pub uid: u32,
    /// Whether it was forked from another process of the family.
    pub forked: bool,
    /// Managed regions.
    pub regions: u32,
    /// Counters of the whole family (the same in each row of a family).
    pub stats: FamilyStats,
}

/// One region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegionRow {
    /// Family.
    pub family: u64,
    /// Its process id as the daemon sees it.
    pub pid: i32,
    /// Number of the region in its family.
    pub region: u32,
    /// Name given by the client.
    pub name: String,
    /// First address.
    pub start: u64,
    /// Length.
    pub len_bytes: u64,
    /// In DRAM.
    pub resident_bytes: u64,
    /// In the store.
    pub parked_bytes: u64,
    /// Native memory, touched or not.
    pub unarmed_bytes: u64,
}
