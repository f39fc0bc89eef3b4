//! One instant of the modelled world: kernel, clients, helper, device, records and daemon.
//!
//! Everything is a small number, so that millions of instants fit into memory and two equal ones are
//! found by comparing them. Which part survives what:
//! - the kernel's part (page tables, limbo, sleeping threads) survives the daemon;
//! - records, slot numbers, the store and the message buffer survive it too;
//! - operations, the inbox of faults and the block table are the daemon's memory and die with it.

use crate::broken::Broken;
use crate::op::Op;
use crate::scenario::Budget;
use tiermgr_core::page::PageState;

/// Pages in a world.
pub(crate) const PAGES: usize = 2;
/// Slots in the store. Slot numbers begin at 1; 0 is "no slot".
pub(crate) const SLOTS: usize = 3;
/// Commands that the helper's ring holds.
pub(crate) const COMMANDS: usize = 2;
/// Faults that the daemon has read and not looked at yet.
pub(crate) const INBOX: usize = 2;
/// Threads: the first two belong to the parent, the last to its child.
pub(crate) const THREADS: usize = 3;
/// The process that is there from the beginning.
pub(crate) const PARENT: usize = 0;
/// The process that a fork makes.
pub(crate) const CHILD: usize = 1;
/// What a foreign mapping holds.
pub(crate) const FOREIGN_VALUE: u8 = 99;

/// A page table entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pte {
    /// A page is mapped.
    pub present: bool,
    /// Write-protected by userfaultfd.
    pub protected: bool,
    /// A fork left the page shared, and this side has not written since.
    pub shared: bool,
    /// The bytes, as one number; 0 is a page of zeros.
    pub value: u8,
}

/// One address space and what the daemon knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Space {
    /// The kernel's page table.
    pub ptes: [Pte; PAGES],
    /// What a read must give.
    pub truth: [u8; PAGES],
    /// A discard is under way: a read may give zeros as well.
    pub or_zero: [bool; PAGES],
    /// Durable: the states of the pages.
    pub records: [PageState; PAGES],
    /// Durable: the slot of each extent.
    pub slots: [u8; PAGES],
    /// The daemon's operations, one an extent.
    pub ops: [Op; PAGES],
    /// A fault on the busy extent was forgotten: wake it when the operation ends.
    pub wakes: [bool; PAGES],
}

impl Default for Space {
    fn default() -> Self {
        Self {
            ptes: [Pte::default(); PAGES],
            truth: [0; PAGES],
            or_zero: [false; PAGES],
            records: [PageState::Absent; PAGES],
            slots: [0; PAGES],
            ops: [Op::None; PAGES],
            wakes: [false; PAGES],
        }
    }
}

/// A thread of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Thread {
    /// Does something that does not matter here.
    #[default]
    Idle,
    /// About to access a page, for the first time or again.
    Ready {
        /// Which page.
        page: u8,
        /// It writes.
        write: bool,
    },
    /// Sleeps; nobody has read its fault.
    Faulted {
        /// Which page.
        page: u8,
        /// It writes.
        write: bool,
        /// The page is there and write-protected.
        protected: bool,
    },
    /// Sleeps; its fault has been read, so the kernel will not tell again.
    Asleep {
        /// Which page.
        page: u8,
        /// It writes.
        write: bool,
    },
}

/// A fault that the daemon has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fault {
    /// Whose.
    pub proc: u8,
    /// Where.
    pub page: u8,
    /// It was a write.
    pub write: bool,
    /// The page was there and write-protected.
    pub protected: bool,
}

/// What a command to the helper does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// UFFDIO_MOVE of an extent into limbo, page by page.
    Move,
    /// MADV_DONTNEED of an extent's pages in limbo.
    Drop,
    /// MADV_DONTNEED of an extent in its place.
    Zap,
    /// MADV_POPULATE_WRITE of an extent in its place.
    Populate,
}

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// In the ring; may still be cancelled.
    Queued,
    /// The helper works on it; `page` comes next.
    Taken {
        /// Next page.
        page: u8,
    },
    /// All of it is done.
    Done,
    /// It stopped early.
    Stopped,
    /// Cancelled before it was begun.
    Cancelled,
}

/// A command in the helper's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Command {
    /// What.
    pub verb: Verb,
    /// On which extent.
    pub extent: u8,
    /// How far it has come.
    pub progress: Progress,
    /// Nobody waits for the answer (a daemon that died ordered it, or a rule is gone).
    pub orphan: bool,
}

/// The limbo block and what the daemon knows of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Limbo {
    /// The kernel's page table, by position in the extent.
    pub ptes: [Option<u8>; PAGES],
    /// The daemon's: what the block is used for.
    pub stage: Stage,
    /// The daemon's: the extent it holds.
    pub extent: u8,
    /// The daemon's: a write of it.
    pub write: Write,
}

/// What the limbo block is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Nothing.
    #[default]
    Free,
    /// It holds, or is about to hold, pages of an extent.
    Used,
    /// The helper has been ordered to drop what is there.
    Dropping,
}

/// A write of the limbo block to a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Write {
    /// None.
    #[default]
    None,
    /// The device has it.
    Flying {
        /// Where to.
        slot: u8,
        /// What.
        values: [u8; PAGES],
    },
    /// The device says that it is done.
    Landed {
        /// Where to.
        slot: u8,
    },
    /// Only without a rule: the drop was ordered before the record.
    Unrecorded {
        /// Where to.
        slot: u8,
    },
}

/// The one fork of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fork {
    /// Not yet.
    #[default]
    None,
    /// The page tables are copied; the message is unread, and every COPY fails with EAGAIN.
    Started,
    /// Durable: the message lies in the daemon's buffer. The child runs.
    Read,
    /// The parent is held until it is quiet.
    Held,
    /// The child has its table.
    Born,
    /// Only without a rule: the message died with the daemon.
    Lost,
}

/// What the program asks the daemon for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Request {
    /// Nothing.
    #[default]
    None,
    /// To discard an extent. The thread that asked waits.
    Discard {
        /// Which.
        extent: u8,
    },
    /// To end the region. The thread that asked waits.
    Unmap,
    /// The region has been ended: the program may unmap.
    Unmappable,
}

/// What is at the region's addresses in the parent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mapping {
    /// The armed region.
    #[default]
    Managed,
    /// Nothing.
    Nothing,
    /// Memory that is none of ours.
    Foreign,
    /// Only without a rule: the last descriptor was closed, and the kernel disarmed the region.
    Disarmed,
}

/// A page pinned for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pin {
    /// Which page.
    pub page: u8,
    /// The pinned frame has gone to limbo.
    pub in_limbo: bool,
    /// The pinned frame is mapped nowhere any more.
    pub detached: bool,
}

/// The world at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct State {
    /// Parent and child.
    pub spaces: [Space; 2],
    /// All threads.
    pub threads: [Thread; THREADS],
    /// The parent's limbo.
    pub limbo: Limbo,
    /// The helper's ring, oldest first.
    pub commands: [Option<Command>; COMMANDS],
    /// The daemon is alive.
    pub alive: bool,
    /// Faults that it has read.
    pub inbox: [Option<Fault>; INBOX],
    /// The fork.
    pub fork: Fork,
    /// The parent's program has exited; its helper keeps the address space.
    pub exited: bool,
    /// The parent's address space is gone.
    pub released: bool,
    /// The program's request.
    pub request: Request,
    /// What is at the parent's addresses.
    pub mapping: Mapping,
    /// The store, by slot (less one) and position in the extent.
    pub store: [[u8; PAGES]; SLOTS],
    /// A write of a dead daemon that has not landed yet.
    pub late: Option<(u8, [u8; PAGES])>,
    /// A pinned page.
    pub pin: Option<Pin>,
    /// The number of the newest write.
    pub version: u8,
    /// What the environment may still do.
    pub budget: Budget,
    /// What went wrong on the way here.
    pub broken: Option<Broken>,
}

impl State {
    /// Whether the daemon holds the parent for the fork. It does not yet where the message has been read
    /// and not looked at.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.fork == Fork::Held
    }

    /// Whether the child has a table.
    #[must_use]
    pub fn has_child_table(&self) -> bool {
        self.fork == Fork::Born
    }

    /// Room in the helper's ring.
    #[must_use]
    pub fn ring_has_room(&self) -> bool {
        self.commands.iter().any(Option::is_none)
    }

    /// Appends a command; the caller has looked for room.
    pub fn order(&mut self, verb: Verb, extent: usize) {
        let extent = small(extent);
        if let Some(free) = self.commands.iter_mut().find(|c| c.is_none()) {
            *free = Some(Command { verb, extent, progress: Progress::Queued, orphan: false });
        }
    }

    /// Takes the answer of the command of that kind on that extent, where there is one.
    pub fn take_answer(&mut self, verb: Verb, extent: usize) -> Option<Progress> {
        let at = self.commands.iter().position(|c| {
            c.is_some_and(|c| {
                c.verb == verb && usize::from(c.extent) == extent && !c.orphan && c.is_answered()
            })
        })?;
        let answer = self.commands[at].map(|c| c.progress);
        self.commands.copy_within(at + 1.., at);
        self.commands[COMMANDS - 1] = None;
        answer
    }

    /// Forgets answers that nobody waits for.
    pub fn sweep_orphans(&mut self) {
        let left = self.commands;
        self.commands = [None; COMMANDS];
        let mut next = 0;
        for command in left.into_iter().flatten() {
            if !(command.orphan && command.is_answered()) {
                self.commands[next] = Some(command);
                next += 1;
            }
        }
    }

    /// Wakes whoever sleeps on the page.
    pub fn wake(&mut self, proc: usize, page: usize) {
        for (index, thread) in self.threads.iter_mut().enumerate() {
            let (at, write) = match *thread {
                Thread::Faulted { page, write, .. } | Thread::Asleep { page, write } => {
                    (page, write)
                }
                Thread::Idle | Thread::Ready { .. } => continue,
            };
            if usize::from(at) == page && owner(index) == proc {
                *thread = Thread::Ready { page: at, write };
            }
        }
    }
}

impl Command {
    /// Whether the helper is through with it.
    #[must_use]
    pub const fn is_answered(&self) -> bool {
        matches!(self.progress, Progress::Done | Progress::Stopped | Progress::Cancelled)
    }
}

/// Whose a thread is.
#[must_use]
pub(crate) const fn owner(thread: usize) -> usize {
    if thread == THREADS - 1 { CHILD } else { PARENT }
}

/// An index as it is kept in a state.
#[must_use]
pub(crate) fn small(index: usize) -> u8 {
    u8::try_from(index).unwrap_or(u8::MAX)
}
