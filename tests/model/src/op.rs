//! Operations of the daemon, and how far each has come.

use crate::state::PAGES;

/// An operation of the daemon on one extent. It owns the extent until it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Op {
    /// None.
    #[default]
    None,
    /// To limbo. `ordered`: the helper has the command.
    Move {
        /// The command has been ordered.
        ordered: bool,
    },
    /// Back from limbo, page by page.
    Rescue {
        /// The page that is being copied.
        page: u8,
        /// A thread wants to write.
        write: bool,
        /// How the COPY of `page` ended.
        copied: Copied,
    },
    /// Waits for the device to read the slot.
    FillRead {
        /// A thread wants to write.
        write: bool,
    },
    /// Installs what was read, page by page.
    Fill {
        /// The page that is being copied.
        page: u8,
        /// A thread wants to write.
        write: bool,
        /// How the COPY of `page` ended.
        copied: Copied,
        /// What the device gave.
        buffer: [u8; PAGES],
    },
    /// Installs zeros in one page.
    Zero {
        /// Which.
        page: u8,
        /// The record said that the page was there.
        recheck: bool,
        /// How the COPY ended.
        copied: Copied,
    },
    /// Clears write protection after a first write.
    Unprotect(UnprotectStep),
    /// Makes pages that a fork left shared exclusive.
    Prepare(PrepareStep),
    /// Gives the extent up.
    Discard(DiscardStep),
}

/// How far a COPY has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Copied {
    /// To be ordered.
    #[default]
    No,
    /// Our bytes are in place.
    Done,
    /// A page was there already.
    Exists,
}

/// Steps of [`Op::Unprotect`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnprotectStep {
    /// Only without a rule: the slot counts as free and the record still names it.
    SlotFreed,
    /// Only without a rule: the ioctl comes before the record.
    Unrecorded,
    /// Recorded as dirty: the ioctl comes next.
    Recorded,
    /// Only without a rule: unprotected, not recorded.
    Cleared,
}

/// Steps of [`Op::Prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrepareStep {
    /// Recorded as dirty: unprotect next.
    Recorded,
    /// Unprotected: order the helper to touch the pages.
    Cleared,
    /// The helper has the command.
    Ordered,
}

/// Steps of [`Op::Discard`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiscardStep {
    /// To be proven: no FORK is pending.
    Unproven,
    /// To be recorded.
    Proven,
    /// Recorded: order the zap.
    Recorded,
    /// The helper has the command.
    Ordered,
}
