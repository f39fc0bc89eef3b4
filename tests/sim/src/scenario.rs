//! What a seed decides before the first turn: sizes, habits of the clients, and which faults may
//! happen. Each seed leaves a random subset out (swarm testing), so that what only shows in the
//! absence of something else is found too.

use crate::kernel::Layout;
use crate::rng::Rng;
use tiermgr_core::limits::{DEMAND_BUFFERS, DEMAND_BUFFERS_LEAST, STREAM_BUFFERS};
use tiermgr_core::manager::ManagerConfig;
use tiermgr_core::units::{CHUNK_BYTES, Geometry};

/// How often, in a thousand chances, each thing goes wrong.
///
/// The atlas: what stands here never destroys the only true copy of a page, but for `ruin`, after
/// which exactly the ruined pages may be reported as lost, `helper_dies` together with an exit, and
/// `ends_after_fork`, which end an address space whose limbo a forked child may still need, and
/// `store_dies`, after which what a parent has in limbo cannot reach its children.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultPlan {
    /// A copy finds no memory.
    pub copy_no_memory: u32,
    /// A copy installs a part and then meets a change of layout.
    pub copy_cut: u32,
    /// Arming finds no memory.
    pub arm_no_memory: u32,
    /// A move stops early for no lasting reason (`EAGAIN`).
    pub move_stops: u32,
    /// A read of limbo comes back short.
    pub limbo_short: u32,
    /// A page table cannot be read.
    pub map_unknown: u32,
    /// A write to the store fails.
    pub write_fails: u32,
    /// A read from the store fails.
    pub read_fails: u32,
    /// A read from the store finds a wrong checksum that is gone the next time.
    pub read_damaged: u32,
    /// A page of the store goes bad for good.
    pub ruin: u32,
    /// The helper stops for a while.
    pub helper_stalls: u32,
    /// The helper dies.
    pub helper_dies: u32,
    /// Messages are left unread for a turn.
    pub messages_late: u32,
    /// The world moves on between two effects of one turn.
    pub interleave: u32,
    /// A process and its helper end when the message of a fork has been read.
    pub ends_after_fork: u32,
    /// From now on each write to the store fails, for good.
    pub store_dies: u32,
    /// A thread that forks is held up between the copy and its message.
    pub forks_late: u32,
}

/// How often clients do what. Weights, not chances.
#[derive(Clone, Copy, Debug, Default)]
pub struct Habits {
    /// Loads.
    pub read: u32,
    /// Stores.
    pub write: u32,
    /// A device reads or writes memory.
    pub dma: u32,
    /// Take memory under management.
    pub add: u32,
    /// Give a region up.
    pub drop_region: u32,
    /// Give bytes up.
    pub discard: u32,
    /// Leases.
    pub pin: u32,
    /// Reads ahead.
    pub prefetch: u32,
    /// Advice.
    pub advise: u32,
    /// Questions.
    pub residency: u32,
    /// Leave management.
    pub drain: u32,
    /// Fork.
    pub fork: u32,
    /// Unmap without a word.
    pub raw_unmap: u32,
    /// Requests that make no sense.
    pub nonsense: u32,
    /// Change the protection of a part. Not drawn: see [`Bias::Splits`].
    pub split: u32,
    /// Exit. A chance in a thousand turns, not a weight.
    pub exit: u32,
}

/// What a run has more of than its seed drew: what chance alone brings together too seldom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bias {
    /// Nothing.
    #[default]
    None,
    /// Processes that end with their helpers just after a fork.
    Ends,
    /// Forks with a store that writes no more.
    DeadStore,
    /// Forks whose messages come after those of later unmaps.
    Unmaps,
    /// A memory cgroup smaller than the share of DRAM, and others who have all large buffers.
    FullGroup,
    /// Memory in many small mappings, forked while it comes and goes.
    Splits,
}

impl Bias {
    /// All but none.
    pub const ALL: [Self; 5] =
        [Self::Ends, Self::DeadStore, Self::Unmaps, Self::FullGroup, Self::Splits];

    /// The one with that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|bias| format!("{bias:?}") == name)
    }
}

/// Everything that a seed decides.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Pages and chunks.
    pub layout: Layout,
    /// What the manager is told.
    pub config: ManagerConfig,
    /// What the memory cgroup of the programs takes. The daemon learns of it when it is full.
    pub group_bytes: u64,
    /// The budget moves between this and the first one.
    pub budget_min_bytes: u64,
    /// How often, in a thousand actions, an operator changes the budget.
    pub budget_moves: u32,
    /// Segments of the store.
    pub segments: u32,
    /// Large buffers that the family is lent at most. None is enough to go on with.
    pub streams: u16,
    /// How often, in a thousand times, others have them all for a while.
    pub streams_late: u32,
    /// Threads of the client.
    pub threads: usize,
    /// Processes at most, over the whole run.
    pub procs_max: usize,
    /// Chunks of the largest region.
    pub region_chunks_max: u64,
    /// Longest that time moves in one turn.
    pub tick_ns_max: u64,
    /// Actions of the world in one turn, at most.
    pub actions_max: u64,
    /// Clients touch mostly a window of so many pages.
    pub window_pages: u64,
    /// How often a thread goes on with the page after the last one.
    pub sequential: u32,
    /// Forked children without a helper (raw `clone`), in a thousand.
    pub raw_children: u32,
    /// Protecting absent pages leaves markers.
    pub wp_unpopulated: bool,
    /// The kernel has `UFFDIO_POISON`. Without it a program that touches lost bytes is ended, or its
    /// thread waits where nobody knows which program that is.
    pub has_poison: bool,
    /// How often, in a thousand turns, the daemon is killed.
    pub kills: u32,
    /// How readily threads, helpers, the store, devices, processes and operators go next.
    pub actors: [u32; 6],
    /// What clients do.
    pub habits: Habits,
    /// What goes wrong.
    pub faults: FaultPlan,
}

impl Scenario {
    /// What `rng` makes of it.
    pub fn draw(rng: &mut Rng) -> Self {
        let page_bytes = rng.pick(&[4096, 4096, 16384, 65536, 65536]);
        let layout =
            Layout { page_bytes, arena_chunks: rng.range(4, 12), limbo_chunks: rng.range(1, 4) };
        let budget_chunks = rng.range(2, 6);
        let budget_bytes = budget_chunks * CHUNK_BYTES + rng.pick(&[0, 0, 65536, 1 << 20]);
        let probation_ns = rng.pick(&[0, 1_000, 100_000, 10_000_000]);
        let mut config = ManagerConfig {
            geometry: Geometry { page_bytes },
            budget_bytes,
            demand_buffers: DEMAND_BUFFERS,
            probation_ns,
            has_move: rng.chance(850),
        };
        let plentiful = rng.chance(600);
        // From a stream of its own: the seeds of the regressions stay what they were.
        let mut apart = rng.clone();
        let has_poison = apart.chance(600);
        config.demand_buffers = apart.pick(&[DEMAND_BUFFERS_LEAST, DEMAND_BUFFERS]);
        Self {
            layout,
            config,
            group_bytes: u64::MAX,
            budget_min_bytes: rng.range(2, budget_chunks) * CHUNK_BYTES,
            budget_moves: rng.pick(&[0, 0, 2, 20]),
            segments: if plentiful { 32 } else { crate::low32(rng.range(1, 3)) },
            streams: apart.pick(&[0, 1, 2, STREAM_BUFFERS, STREAM_BUFFERS]),
            streams_late: apart.pick(&[0, 0, 300, 1000]),
            threads: crate::ix(rng.range(1, 3)),
            procs_max: rng.pick(&[1, 2, 3, 5]),
            region_chunks_max: rng.range(1, 4),
            tick_ns_max: rng.pick(&[100, 2_000, 50_000, 1_000_000]),
            actions_max: rng.pick(&[1, 3, 8]),
            window_pages: rng.pick(&[8, 64, 512, 4096]),
            sequential: rng.pick(&[0, 300, 900]),
            raw_children: rng.pick(&[0, 0, 500]),
            wp_unpopulated: rng.chance(500),
            has_poison,
            kills: if rng.chance(250) { rng.pick(&[2, 10]) } else { 0 },
            actors: [
                60,
                rng.pick(&[2, 20, 100]),
                rng.pick(&[1, 15, 100]),
                rng.pick(&[1, 10]),
                3,
                4,
            ],
            habits: Habits::draw(rng),
            faults: FaultPlan::draw(rng),
        }
    }

    /// The same with more of something.
    pub const fn lean(&mut self, bias: Bias) {
        match bias {
            Bias::None => return,
            Bias::Ends => self.faults.ends_after_fork = 300,
            Bias::DeadStore => self.faults.store_dies = 5,
            Bias::Unmaps => {
                self.faults.forks_late = 980;
                self.habits.raw_unmap = 60;
                self.threads = 3;
            }
            Bias::FullGroup => return self.fill_group(),
            Bias::Splits => return self.split(),
        }
        self.procs_max = 5;
        self.habits.fork = 10;
        self.config.has_move = true;
        // Pages rest for long in limbo, where no slot has them.
        self.config.probation_ns = 10_000_000;
    }

    /// A fill is refused whole where its extent lies in two mappings, and a fork comes before that is known.
    const fn split(&mut self) {
        self.layout.page_bytes = 4096;
        self.config.geometry.page_bytes = 4096;
        self.habits.split = 60;
        self.habits.fork = 30;
        self.habits.prefetch = 300;
        self.threads = 6;
        self.procs_max = 12;
        self.actions_max = 16;
        self.faults.interleave = 900;
        // Most of what is touched is parked.
        self.config.budget_bytes = 3 * CHUNK_BYTES;
    }

    /// Room comes from what is written out, and from nothing else. Frames that a fork left shared leave only
    /// as copies, for which there is no room.
    const fn fill_group(&mut self) {
        self.group_bytes = self.config.budget_bytes / 2;
        self.config.demand_buffers = DEMAND_BUFFERS_LEAST;
        self.streams = 0;
        self.threads = 3;
        // The least that a daemon gives: more blocks than rescues have buffers.
        self.layout.limbo_chunks = 4;
        // What cannot leave is not to fill the group.
        self.segments = 32;
        self.habits.pin = 0;
        self.habits.dma = 0;
        self.habits.drain = 0;
        self.habits.fork = 0;
        self.faults.helper_dies = 0;
    }

    /// A plain world in which nothing goes wrong: one process, two chunks of memory for six.
    #[must_use]
    pub fn plain() -> Self {
        let layout = Layout { page_bytes: 65536, arena_chunks: 8, limbo_chunks: 3 };
        Self {
            layout,
            config: ManagerConfig {
                geometry: Geometry { page_bytes: 65536 },
                budget_bytes: 3 * CHUNK_BYTES,
                demand_buffers: DEMAND_BUFFERS,
                probation_ns: 1_000,
                has_move: true,
            },
            group_bytes: u64::MAX,
            budget_min_bytes: 3 * CHUNK_BYTES,
            budget_moves: 0,
            segments: 64,
            streams: STREAM_BUFFERS,
            streams_late: 0,
            threads: 1,
            procs_max: 1,
            region_chunks_max: 3,
            tick_ns_max: 2_000,
            actions_max: 3,
            window_pages: 4096,
            sequential: 500,
            raw_children: 0,
            wp_unpopulated: true,
            has_poison: true,
            kills: 0,
            actors: [60, 20, 20, 0, 3, 4],
            habits: Habits { read: 50, write: 40, add: 4, discard: 1, ..Habits::default() },
            faults: FaultPlan::default(),
        }
    }
}

/// One of `levels`, or nothing in a part of the seeds.
fn sometimes(rng: &mut Rng, levels: &[u32]) -> u32 {
    if rng.chance(500) { rng.pick(levels) } else { 0 }
}

impl Habits {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            read: rng.pick(&[200, 500]),
            write: rng.pick(&[50, 300, 500]),
            dma: sometimes(rng, &[5, 30]),
            add: 20,
            drop_region: sometimes(rng, &[3, 15]),
            discard: sometimes(rng, &[5, 40]),
            pin: sometimes(rng, &[5, 20]),
            prefetch: sometimes(rng, &[5, 40]),
            advise: sometimes(rng, &[5, 20]),
            residency: sometimes(rng, &[3]),
            drain: sometimes(rng, &[1]),
            fork: sometimes(rng, &[3, 15]),
            raw_unmap: sometimes(rng, &[1, 4]),
            nonsense: sometimes(rng, &[10]),
            split: 0,
            exit: sometimes(rng, &[1, 3]),
        }
    }
}

impl FaultPlan {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            copy_no_memory: sometimes(rng, &[5, 50]),
            copy_cut: sometimes(rng, &[5, 50]),
            arm_no_memory: sometimes(rng, &[20, 200]),
            move_stops: sometimes(rng, &[5, 100]),
            limbo_short: sometimes(rng, &[5, 50]),
            map_unknown: 0,
            write_fails: sometimes(rng, &[5, 100]),
            read_fails: sometimes(rng, &[5, 100]),
            read_damaged: sometimes(rng, &[5, 100]),
            ruin: if rng.chance(100) { 3 } else { 0 },
            helper_stalls: sometimes(rng, &[5, 50]),
            helper_dies: if rng.chance(200) { rng.pick(&[1, 5]) } else { 0 },
            messages_late: sometimes(rng, &[50, 500]),
            interleave: sometimes(rng, &[50, 500]),
            ends_after_fork: 0,
            store_dies: 0,
            forks_late: 0,
        }
    }
}
