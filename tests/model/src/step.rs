//! What can happen next, in words.

use crate::state::CHILD;

/// Something that happens in one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// What.
    pub what: What,
    /// In which process, where that matters.
    pub proc: u8,
    /// Which page, extent or thread, where that matters.
    pub at: u8,
}

/// Kinds of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the sentences of `text` say it")]
pub enum What {
    // What programs, devices, policies and fate are free to do.
    TouchBegins,
    WriteBegins,
    DaemonKilled,
    Forked,
    ParentExits,
    DiscardAsked,
    UnmapAsked,
    PagePinned,
    DeviceWrites,
    PageUnpinned,
    MoveBegun,
    PrepareBegun,
    ParkBegun,
    // What is bound to happen then.
    ThreadRuns,
    FaultRead,
    FaultLookedAt,
    ForkRead,
    ForkFollowed,
    ChildBorn,
    ParentReleased,
    HelperTakes,
    HelperWorks,
    SlotWritten,
    LateSlotWritten,
    MoveOrdered,
    MoveAnswered,
    RescueCopied,
    RescueRecorded,
    RescueGivenUp,
    SlotRead,
    FillCopied,
    FillRecorded,
    FillGivenUp,
    ZeroCopied,
    ZeroRecorded,
    Unprotected,
    UnprotectRecorded,
    PrepareAdvanced,
    LimboWriteOrdered,
    Parked,
    DropOrdered,
    DropAnswered,
    DiscardBegun,
    DiscardProven,
    DiscardRecorded,
    DiscardOrdered,
    DiscardAnswered,
    ZapRefused,
    DiscardRefused,
    DiscardPutOff,
    RegionEnded,
    Unmapped,
    ForeignMapped,
    Restarted,
}

impl What {
    /// Whether the environment may do this or leave it. The rest is bound to happen.
    #[must_use]
    pub const fn is_choice(self) -> bool {
        (self as u8) < What::ThreadRuns as u8
    }

    const fn text(self) -> &'static str {
        match self {
            What::TouchBegins => "a thread is about to read page",
            What::WriteBegins => "a thread is about to write page",
            What::DaemonKilled => "the daemon is killed",
            What::Forked => "fork: the kernel copies the page tables",
            What::ParentExits => "the parent exits",
            What::DiscardAsked => "the program asks to discard extent",
            What::UnmapAsked => "the program asks to unmap the region",
            What::PagePinned => "a device pins page",
            What::DeviceWrites => "the device writes page",
            What::PageUnpinned => "the device lets go of page",
            What::MoveBegun => "the policy sends to limbo extent",
            What::PrepareBegun => "the policy makes exclusive extent",
            What::ParkBegun => "the policy writes out extent",
            What::ThreadRuns => "the access goes on, thread",
            What::FaultRead => "the daemon reads the fault of thread",
            What::FaultLookedAt => "the daemon looks at a fault on page",
            What::ForkRead => "the daemon reads the FORK message",
            What::ForkFollowed => "the daemon holds the parent for the fork",
            What::ChildBorn => "the daemon copies the table for the child",
            What::ParentReleased => "the daemon lets go of the parent's address space",
            What::HelperTakes => "the helper takes the command on extent",
            What::HelperWorks => "the helper works on extent",
            What::SlotWritten => "the device has written slot",
            What::LateSlotWritten => "a dead daemon's write lands in slot",
            What::MoveOrdered => "MOVE is ordered for extent",
            What::MoveAnswered => "the answer to MOVE is looked at, extent",
            What::RescueCopied => "COPY from limbo to page",
            What::RescueRecorded => "what came of that COPY is recorded, page",
            What::RescueGivenUp => "a rescue is given up for the fork, extent",
            What::SlotRead => "the device has read the slot of extent",
            What::FillCopied => "COPY of the slot's bytes to page",
            What::FillRecorded => "what came of that COPY is recorded, page",
            What::FillGivenUp => "a fill is given up for the fork, extent",
            What::ZeroCopied => "COPY of zeros to page",
            What::ZeroRecorded => "what came of the zeros is recorded, page",
            What::Unprotected => "write protection is cleared, extent",
            What::UnprotectRecorded => "the first write is recorded, extent",
            What::PrepareAdvanced => "making exclusive goes on, extent",
            What::LimboWriteOrdered => "limbo is written for the fork, extent",
            What::Parked => "the write's end is recorded, extent",
            What::DropOrdered => "the drop of limbo is ordered, extent",
            What::DropAnswered => "limbo has been dropped, extent",
            What::DiscardBegun => "the daemon takes up the discard of extent",
            What::DiscardProven => "an ioctl proves that no FORK is pending, extent",
            What::DiscardRecorded => "the discard is recorded, extent",
            What::DiscardOrdered => "the zap is ordered, extent",
            What::DiscardAnswered => "the discard is answered, extent",
            What::ZapRefused => "the kernel refuses a zap, extent",
            What::DiscardRefused => "the discard is refused, extent",
            What::DiscardPutOff => "the discard waits for the fork, extent",
            What::RegionEnded => "the daemon ends the region and answers",
            What::Unmapped => "the program unmaps",
            What::ForeignMapped => "foreign memory is mapped at the same addresses",
            What::Restarted => "a new daemon takes over",
        }
    }

    const fn has_number(self) -> bool {
        !matches!(
            self,
            What::DaemonKilled
                | What::Forked
                | What::ParentExits
                | What::UnmapAsked
                | What::ForkRead
                | What::ForkFollowed
                | What::ChildBorn
                | What::ParentReleased
                | What::RegionEnded
                | What::Unmapped
                | What::ForeignMapped
                | What::Restarted
        )
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let child = if usize::from(self.proc) == CHILD { " (child)" } else { "" };
        if self.what.has_number() {
            write!(f, "{} {}{child}", self.what.text(), self.at)
        } else {
            write!(f, "{}{child}", self.what.text())
        }
    }
}
