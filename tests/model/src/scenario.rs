//! The worlds that are explored, each small enough to be explored whole.

use crate::state::{PAGES, Pte, State, small};
use tiermgr_core::page::PageState;

/// How many more of each choice the environment may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Accesses by threads of the parent.
    pub touches: u8,
    /// Accesses by the thread of the child.
    pub child_touches: u8,
    /// Of all accesses, writes.
    pub writes: u8,
    /// Parks that the policy begins.
    pub parks: u8,
    /// Extents that the policy makes exclusive after a fork.
    pub prepares: u8,
    /// Kills of the daemon.
    pub crashes: u8,
    /// Forks, 0 or 1.
    pub forks: u8,
    /// The parent may exit after the fork.
    pub exits: u8,
    /// Discards.
    pub discards: u8,
    /// Zaps that the kernel refuses, for memory that is locked.
    pub refusals: u8,
    /// Unmaps of the region, 0 or 1.
    pub unmaps: u8,
    /// Pins for a device.
    pub pins: u8,
    /// Writes by the device.
    pub device_writes: u8,
}

/// A world: how its pages are grouped, how it begins, and what may happen in it.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// What it is about.
    pub about: &'static str,
    /// Both pages belong to one extent; else each is an extent of its own.
    pub one_extent: bool,
    /// The page states at the beginning.
    pub begin: [PageState; PAGES],
    /// What may happen.
    pub budget: Budget,
}

impl Scenario {
    /// The extent of a page.
    #[must_use]
    pub const fn extent_of(&self, page: usize) -> usize {
        if self.one_extent { 0 } else { page }
    }

    /// The pages of an extent.
    #[must_use]
    pub const fn pages_of(&self, extent: usize) -> std::ops::Range<usize> {
        if self.one_extent { 0..PAGES } else { extent..extent + 1 }
    }

    /// The position of a page in its extent.
    #[must_use]
    pub const fn position(&self, page: usize) -> usize {
        if self.one_extent { page } else { 0 }
    }

    /// How many extents there are.
    #[must_use]
    pub const fn extents(&self) -> usize {
        if self.one_extent { 1 } else { PAGES }
    }

    /// The world at the beginning. Only `Absent`, `Dirty`, `Clean` and `Parked` can be begun with.
    #[must_use]
    pub fn first(&self) -> State {
        let mut state = State { alive: true, budget: self.budget, ..State::default() };
        let space = &mut state.spaces[0];
        for page in 0..PAGES {
            let extent = self.extent_of(page);
            let value = if self.begin[page] == PageState::Absent { 0 } else { small(page) + 1 };
            space.records[page] = self.begin[page];
            space.truth[page] = value;
            if self.begin[page].is_resident() {
                let protected = self.begin[page] == PageState::Clean;
                space.ptes[page] = Pte { present: true, protected, shared: false, value };
            }
            if self.begin[page].needs_slot() {
                space.slots[extent] = small(extent) + 1;
                state.store[extent][self.position(page)] = value;
            }
        }
        state.version = small(PAGES);
        state
    }
}

const NOTHING: Budget = Budget {
    touches: 0,
    child_touches: 0,
    writes: 0,
    parks: 0,
    prepares: 0,
    crashes: 0,
    forks: 0,
    exits: 0,
    discards: 0,
    refusals: 0,
    unmaps: 0,
    pins: 0,
    device_writes: 0,
};

use PageState::{Absent, Clean, Dirty, Parked};

/// All scenarios.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "base",
        about: "two extents of a page each, two threads, one limbo block, one kill",
        one_extent: false,
        begin: [Dirty, Clean],
        budget: Budget { touches: 2, writes: 2, parks: 3, crashes: 1, ..NOTHING },
    },
    Scenario {
        name: "extent",
        about: "one extent of two pages, one clean and one absent",
        one_extent: true,
        begin: [Clean, Absent],
        budget: Budget { touches: 2, writes: 1, parks: 2, crashes: 1, ..NOTHING },
    },
    Scenario {
        name: "dma",
        about: "a device pins a page and writes to it at any later time",
        one_extent: true,
        begin: [Dirty, Dirty],
        budget: Budget { touches: 2, writes: 1, parks: 2, pins: 1, device_writes: 2, ..NOTHING },
    },
    Scenario {
        name: "fork",
        about: "a fork at any time; the parent may exit; one extent of two pages",
        one_extent: true,
        begin: [Clean, Dirty],
        budget: Budget {
            touches: 1,
            child_touches: 1,
            writes: 1,
            parks: 2,
            prepares: 1,
            forks: 1,
            exits: 1,
            ..NOTHING
        },
    },
    Scenario {
        name: "fork-holes",
        about: "a fork, and an extent of which a page was never touched",
        one_extent: true,
        begin: [Dirty, Absent],
        budget: Budget { touches: 2, parks: 1, prepares: 1, forks: 1, ..NOTHING },
    },
    Scenario {
        name: "fork-slots",
        about: "a fork with a page in a slot that is then reused; two extents",
        one_extent: false,
        begin: [Parked, Dirty],
        budget: Budget {
            touches: 1,
            child_touches: 1,
            writes: 1,
            parks: 2,
            prepares: 1,
            forks: 1,
            exits: 1,
            ..NOTHING
        },
    },
    Scenario {
        name: "fork-crash",
        about: "a fork and a kill at any time",
        one_extent: true,
        begin: [Dirty, Parked],
        budget: Budget {
            touches: 1,
            child_touches: 2,
            writes: 1,
            parks: 1,
            crashes: 1,
            forks: 1,
            ..NOTHING
        },
    },
    Scenario {
        name: "discard",
        about: "a discard while commands are half done, and a kill",
        one_extent: true,
        begin: [Dirty, Clean],
        budget: Budget { touches: 2, writes: 1, parks: 2, crashes: 1, discards: 1, ..NOTHING },
    },
    Scenario {
        name: "discard-refused",
        about: "a discard of a page in its place and one in a slot, which is refused",
        one_extent: true,
        begin: [Parked, Dirty],
        budget: Budget {
            touches: 2,
            writes: 1,
            parks: 1,
            crashes: 1,
            discards: 1,
            refusals: 1,
            ..NOTHING
        },
    },
    Scenario {
        name: "discard-fork",
        about: "a discard while a FORK may be unread",
        one_extent: true,
        begin: [Parked, Dirty],
        budget: Budget {
            touches: 1,
            child_touches: 1,
            writes: 1,
            parks: 1,
            forks: 1,
            discards: 1,
            ..NOTHING
        },
    },
    Scenario {
        name: "reuse",
        about: "an unmap, and foreign memory at the same addresses",
        one_extent: false,
        begin: [Dirty, Dirty],
        budget: Budget { touches: 2, writes: 1, parks: 2, crashes: 1, unmaps: 1, ..NOTHING },
    },
    Scenario {
        name: "reuse-fork",
        about: "an unmap while a FORK may be unread",
        one_extent: false,
        begin: [Parked, Dirty],
        budget: Budget {
            touches: 1,
            child_touches: 1,
            writes: 1,
            parks: 2,
            forks: 1,
            unmaps: 1,
            ..NOTHING
        },
    },
    Scenario {
        name: "crash",
        about: "two kills; writes of the dead land late",
        one_extent: false,
        begin: [Dirty, Dirty],
        budget: Budget { touches: 2, writes: 1, parks: 3, crashes: 2, ..NOTHING },
    },
];

impl Scenario {
    /// The scenario with that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        SCENARIOS.iter().find(|s| s.name == name)
    }
}
