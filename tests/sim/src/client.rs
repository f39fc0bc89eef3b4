//! Client processes: what they hold, what their threads are doing, and what they must read.

use crate::helper::Helper;
use crate::kernel::{Access, FrameId, Mm, Sleeper, Vma};
use tiermgr_core::units::{Addr, LeaseId, ProcId, RegionId, RequestId, Span};

/// What a page must hold, as its process sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expect {
    /// The last generation written.
    pub value: u64,
    /// Zeros are right as well: a discard is under way, or was while somebody wrote.
    pub maybe_zero: bool,
    /// A discard is under way.
    pub discarding: bool,
    /// Written since the discard that is under way began.
    pub written: bool,
    /// It may be reported as lost (SIGBUS), for a reason that the fault plan knows.
    pub loss_ok: bool,
    /// It was reported as lost: the client leaves it alone.
    pub lost: bool,
    /// Nobody may say what it holds: a forked copy of memory that was being given up.
    pub undefined: bool,
    /// Devices that hold it.
    pub dma: u8,
    /// Leases on it.
    pub leases: u8,
}

impl Expect {
    /// Whether a read of `generation` is right.
    #[must_use]
    pub const fn allows(&self, generation: u64) -> bool {
        self.undefined || generation == self.value || (generation == 0 && self.zero_ok())
    }

    /// Whether zeros are right.
    #[must_use]
    pub const fn zero_ok(&self) -> bool {
        self.value == 0 || self.maybe_zero || self.discarding || self.undefined
    }

    /// A write of `generation` happened.
    pub const fn write(&mut self, generation: u64) {
        self.value = generation;
        if self.discarding {
            self.written = true;
        } else {
            self.maybe_zero = false;
        }
    }

    /// A read saw `generation`, which was right: from now on it is that and nothing else.
    pub const fn settle(&mut self, generation: u64) {
        if self.maybe_zero && !self.discarding {
            self.value = generation;
            self.maybe_zero = false;
        }
    }

    /// The discard that was under way was answered.
    pub const fn discarded(&mut self) {
        self.discarding = false;
        if self.written {
            self.maybe_zero = true;
        } else {
            self.value = 0;
            self.maybe_zero = false;
            self.lost = false;
            self.loss_ok = false;
        }
    }
}

/// How a client sees one of its regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionState {
    /// Asked for; not touched yet.
    Adding,
    /// In use.
    Live,
    /// Being given up.
    Leaving,
    /// In use, and no longer (or never) managed.
    Native,
    /// A forked copy of what was being given up.
    Abandoned,
}

/// A region of a client.
#[derive(Clone, Copy, Debug)]
pub struct OwnRegion {
    /// The client's own name for it.
    pub key: u32,
    /// The daemon's.
    pub id: Option<RegionId>,
    /// First page of the arena.
    pub first: usize,
    /// Pages.
    pub pages: u64,
    /// How the client sees it.
    pub state: RegionState,
}

/// A request that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `AddRegion` for the region of this key.
    Add(u32),
    /// `DropRegion` for it.
    Drop(u32),
    /// `Discard` of these pages.
    Discard(usize, u64),
    /// `Pin` of these pages.
    Pin(usize, u64),
    /// `Unpin`.
    Unpin,
    /// `Residency` of so many bytes.
    Residency(u64),
    /// `Advise` or `Prefetch`.
    Hint,
    /// `Drain`.
    Drain,
    /// Something that must be refused.
    Nonsense,
}

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// About to choose.
    Ready,
    /// About to touch a page (again).
    Touching(usize, Access),
    /// Asleep in a fault.
    Asleep(usize, Access),
    /// Waiting for a reply.
    Calling(RequestId, Call),
    /// In `fork`: the tables are copied, the message cannot be read yet.
    Forking(u32),
    /// In `fork`: waits until its message is read.
    ForkTold,
    /// In `munmap`: the pages are gone, the message cannot be read yet.
    Unmapping(Span, Option<u32>),
    /// In `munmap`: waits until its message is read. The region of this key ends with it.
    UnmapTold(Option<u32>),
    /// Its message was read; it is about to go on.
    Told(Option<u32>),
    /// Ended.
    Ended,
}

/// A thread of a client.
#[derive(Clone, Copy, Debug)]
pub struct Thread {
    /// What it does.
    pub state: State,
    /// The page it touched last.
    pub cursor: usize,
    /// The turn in which it began to wait.
    pub since: u64,
}

impl Thread {
    const NEW: Self = Self { state: State::Ready, cursor: 0, since: 0 };
}

/// A lease that a client holds.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The daemon's name for it.
    pub lease: LeaseId,
    /// First page.
    pub first: usize,
    /// Pages.
    pub pages: u64,
}

/// A device at work on a client's memory.
#[derive(Clone, Copy, Debug)]
pub struct Dma {
    /// Whose memory.
    pub proc: usize,
    /// Which page.
    pub page: usize,
    /// The frame that the device holds.
    pub frame: FrameId,
    /// It will write.
    pub write: bool,
}

/// A process of the family.
#[derive(Debug)]
pub struct Process {
    /// The daemon's name for it.
    pub id: ProcId,
    /// Its address space.
    pub mm: Mm,
    /// Its helper.
    pub helper: Helper,
    /// What each page of the arena must hold.
    pub expect: Vec<Expect>,
    /// Its regions.
    pub regions: Vec<OwnRegion>,
    /// Its threads.
    pub threads: Vec<Thread>,
    /// Its leases.
    pub leases: Vec<Held>,
    /// The daemon has read of it.
    pub known: bool,
    /// Its parent, where it was forked.
    pub parent: Option<ProcId>,
    /// Its table is in the records, as far as the host has looked.
    pub born: bool,
    /// `ProcReady` was sent.
    pub ready: bool,
    /// It never will be: made by a raw `clone`.
    pub raw: bool,
    /// It touched lost bytes that the kernel cannot poison, and waits until it can be ended.
    pub waits_for_lost: bool,
    /// The program has ended.
    pub exited: bool,
    /// `ProcGone` was sent.
    pub gone_told: bool,
    /// The daemon forgot it.
    pub released: bool,
    /// It is no longer managed.
    pub drained: bool,
    /// It asked for that, and the daemon died before it answered: some regions may be its own again.
    pub perhaps_drained: bool,
    /// Next page that the last look at everything reads.
    pub sweep: usize,
    next_key: u32,
}

impl Process {
    /// A process without regions.
    #[must_use]
    pub fn new(id: ProcId, mm: Mm, threads: usize) -> Self {
        let pages = mm.arena().len();
        Self {
            id,
            mm,
            helper: Helper::default(),
            expect: vec![Expect::default(); pages],
            regions: Vec::new(),
            threads: vec![Thread::NEW; threads],
            leases: Vec::new(),
            known: false,
            parent: None,
            born: false,
            ready: false,
            raw: false,
            waits_for_lost: false,
            exited: false,
            gone_told: false,
            released: false,
            drained: false,
            perhaps_drained: false,
            sweep: 0,
            next_key: 1,
        }
    }

    /// The child of a fork that has just copied `mm`.
    #[must_use]
    pub fn forked(&self, id: ProcId, mm: Mm, threads: usize) -> Self {
        let mut child = Self::new(id, mm, threads);
        child.expect.clone_from(&self.expect);
        for page in &mut child.expect {
            page.maybe_zero |= page.discarding;
            page.discarding = false;
            page.written = false;
            page.dma = 0;
            page.leases = 0;
        }
        child.regions.clone_from(&self.regions);
        for region in &mut child.regions {
            match region.state {
                // The child never learns whether it became one.
                RegionState::Adding => region.state = RegionState::Native,
                RegionState::Leaving => {
                    region.state = RegionState::Abandoned;
                    let end = region.first + crate::ix(region.pages);
                    for page in &mut child.expect[region.first..end] {
                        page.undefined = true;
                    }
                }
                RegionState::Live | RegionState::Native | RegionState::Abandoned => {}
            }
        }
        child.parent = Some(self.id);
        child.drained = self.drained;
        let drains = |thread: &Thread| matches!(thread.state, State::Calling(_, Call::Drain));
        child.perhaps_drained = self.perhaps_drained || self.threads.iter().any(drains);
        child.next_key = self.next_key;
        child
    }

    /// A new key for a region.
    pub fn new_key(&mut self) -> u32 {
        self.next_key += 1;
        self.next_key
    }

    /// The region of this key.
    pub fn region_mut(&mut self, key: u32) -> Option<&mut OwnRegion> {
        self.regions.iter_mut().find(|region| region.key == key)
    }

    /// Whether its threads run.
    #[must_use]
    pub const fn runs(&self) -> bool {
        self.known && !self.exited
    }

    /// Whether it may send requests.
    #[must_use]
    pub const fn may_ask(&self) -> bool {
        self.ready && !self.exited && !self.drained
    }

    /// The address of an arena page.
    #[must_use]
    pub const fn addr(&self, page: usize) -> Addr {
        self.mm.layout.arena_addr(page)
    }

    /// Whether thread `index` sleeps in a fault that has not been answered.
    #[must_use]
    pub fn is_asleep(&self, index: usize) -> bool {
        self.mm.waiters.iter().any(|waiter| waiter.who == Sleeper::Thread(index))
    }

    /// Whether thread `index` could go on.
    #[must_use]
    pub fn can_go_on(&self, index: usize) -> bool {
        self.runs()
            && match self.threads[index].state {
                State::Ready
                | State::Touching(..)
                | State::Forking(_)
                | State::Unmapping(..)
                | State::Told(_) => true,
                State::Asleep(..) => !self.is_asleep(index),
                State::Calling(..) | State::ForkTold | State::UnmapTold(_) | State::Ended => false,
            }
    }

    /// Whether nobody in the program works on these pages, so that they can be given up.
    #[must_use]
    pub fn is_quiet(&self, first: usize, pages: u64) -> bool {
        let range = first..first + crate::ix(pages);
        let touched = self.threads.iter().any(|thread| match thread.state {
            State::Touching(page, _) | State::Asleep(page, _) => range.contains(&page),
            State::Calling(_, Call::Discard(at, len) | Call::Pin(at, len)) => {
                at < range.end && range.start < at + crate::ix(len)
            }
            _ => false,
        });
        !touched
            && self.expect[range.clone()]
                .iter()
                .all(|page| page.dma == 0 && page.leases == 0 && !page.discarding)
            && self.mm.arena()[range].iter().all(|page| page.vma != Vma::Foreign)
    }
}
