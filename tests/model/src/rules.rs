//! The rules of the protocol, one by one, and how to leave one out.
//!
//! A model that cannot fail proves nothing. So each rule can be taken away, and the exploration must
//! then find a wrong byte or somebody who waits for ever. The switch is a value and not a `cfg`: one
//! build then holds all variants, they can be compared in one run, and a test can go through all of
//! them.
//!
//! Facts of the kernel that a rule rests on are named by their tests, in `tests/kernel`.

/// A rule of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Rule {
    /// `LimboDirty` or `LimboClean` is recorded before the MOVE is ordered. Protects pages that moved
    /// while the daemon was killed: the record would say that they are in place, and a touch would be
    /// answered with zeros. Fact: after a MOVE the old place is absent (`moves.rs`: a_move_takes_pages_away_whole).
    LimboBeforeMove,
    /// The slot is written before `Parked` is recorded. Protects against a kill, and against a fill
    /// that overtakes the write. Fact: what a dead daemon has ordered lands late, if at all
    /// (`store.rs`: the_lock_of_a_dead_daemon_holds_until_its_writes_have_landed).
    SlotBeforeParked,
    /// `Parked` is recorded before the limbo page is dropped. Protects the only other copy.
    ParkedBeforeDrop,
    /// `Dirty` is recorded before write protection is cleared. Protects a page that is written between
    /// the ioctl and a kill: recorded as clean it would be parked without being written. Fact: WP
    /// faults are the only sign of a write (`faults.rs`: the_first_write_to_a_protected_page_is_reported).
    DirtyBeforeUnprotect,
    /// `Dirty` is recorded before the slot is free for others. Protects a record, found by a restart,
    /// that names a slot which somebody else has filled.
    DirtyBeforeFree,
    /// A page whose slot copy stays valid is installed write-protected. Protects the slot copy from
    /// going stale unnoticed. Fact: COPY can install a protected page
    /// (`faults.rs`: the_first_write_to_a_protected_page_is_reported).
    CleanIsProtected,
    /// Where a new slot takes the place of an old one, pages of the extent that are not in the new one
    /// and have relied on the old one become dirty. Protects an extent that lies half in its place,
    /// clean, and half in limbo.
    NewSlotHoldsAll,
    /// EAGAIN means that nothing was done. Protects a page that would be recorded as resident and is
    /// not. Fact: `forks.rs`: fills_are_refused_while_a_fork_is_unread.
    EagainRetries,
    /// A page that is found in place (EEXIST) is never replaced: it is newer than what we have.
    /// Fact: COPY never overwrites (`faults.rs`: a_copy_onto_a_page_is_refused_and_a_wake_still_needed).
    ExistsKeeps,
    /// A fault on a busy extent is forgotten, and the extent woken when the operation ends. Fact: a
    /// fault that was read is not delivered again (`zeros.rs`:
    /// with_a_duplicate_the_waiter_waits_for_a_new_daemon).
    BusyWakes,
    /// The extent is woken at the end also where the operation that a fault began brings other pages
    /// of the extent than the one that somebody sleeps on. Fact: COPY wakes its own range only.
    OtherPageWakes,
    /// A write-protect fault clears the protection also where the record does not show the page in its
    /// place: a child can hold a page that its parent discarded around the fork. A mere WAKE would send
    /// the thread round for ever. Fact: fork copies the protection.
    ProtectionAlwaysClears,
    /// One operation an extent: faults and discards wait for whoever owns it, the helper's commands
    /// included. Fact: a MOVE queued before a discard takes what was filled after it
    /// (`moves.rs`: a_late_move_after_a_discard_takes_the_new_content).
    OneOwner,
    /// Discards of our memory come as messages, not as madvise. Protects the program from bytes that it
    /// gave up: what only a slot holds is not zapped by DONTNEED, and on the arenas' descriptor nobody
    /// hears of it. Fact: `faults.rs`: without_remove_a_discard_goes_through_at_once.
    DiscardByMessage,
    /// What no zap reaches, for it lies in a slot or in limbo, is forgotten after the zap has been carried
    /// out. Protects the bytes of a discard that is refused. Fact: DONTNEED of locked memory is refused.
    ForgetAfterZap,
    /// A discard is answered after its zap has been carried out. Protects what the program writes
    /// after the answer. Fact: DONTNEED looks at nothing but the address.
    AnswerAfterZap,
    /// An unmap is answered after every command on the region has been answered. Fact: MOVE looks at
    /// the destination only and takes foreign memory (`moves.rs`:
    /// a_late_move_steals_from_whatever_lies_at_the_address).
    AnswerAfterCommands,
    /// A limbo block is used again after its drop has been answered. Protects the next pages there.
    ReuseAfterDrop,
    /// What came of a MOVE that stopped is looked up page by page. Fact: MOVE stops in the middle
    /// (`moves.rs`: a_hole_stops_a_move_and_what_has_moved_has_moved).
    ResultsByPage,
    /// Pages are taken by MOVE, which refuses pinned ones; never by copying and zapping. Protects what
    /// a device writes. Fact: MOVE answers EBUSY for a page that FOLL_PIN holds.
    PinnedStays,
    /// FORK is looked at before anything else that was read with it. Protects the child: what a COPY
    /// brings after the FORK was read is in the parent alone. Fact: EAGAIN ends with the read
    /// (`forks.rs`: fills_are_refused_while_a_fork_is_unread).
    ForkFirst,
    /// On FORK, what is on its way back is given up. Protects the child in the same way.
    ForkEndsFills,
    /// The child's table is made after limbo has been written. Protects pages in limbo, which the
    /// child does not inherit (`forks.rs`: memory_that_is_not_inherited_is_not_in_the_child).
    ForkWritesLimbo,
    /// The child's table holds its slots too. Protects a parked page of the child when the parent
    /// writes, discards or exits.
    SlotsCounted,
    /// Bytes are forgotten on request only after an ioctl, ordered after the request, that did not end
    /// with EAGAIN. Protects a child whose FORK is unread: what its parent forgets meanwhile could not
    /// be copied into its table. Fact: the page tables are copied before the message can be read.
    ForgetAfterProof,
    /// The helper is a process of its own that keeps the address space when the program exits. Fact:
    /// `helper.rs`: a_helper_keeps_the_memory_of_a_client_that_has_exited.
    HelperKeepsSpace,
    /// Pages that a fork left shared are unprotected before the helper touches them, or it waits for
    /// itself. Fact: `forks.rs`: pages_shared_by_fork_move_after_populate.
    UnprotectBeforePopulate,
    /// The helper touches only pages that are there: an absent page raises a fault on an extent that
    /// the daemon has locked for the helper, and both wait. Fact: MADV_POPULATE_WRITE faults like a
    /// write.
    PopulatePresent,
    /// Messages are read into memory that survives the daemon, and replayed. Fact: a message is
    /// delivered once (`survival.rs`: messages_read_into_shared_memory_survive).
    MessagesSurvive,
    /// A keeper holds the descriptors when the daemon dies. Fact: the last close disarms the region and
    /// absent pages read as zeros (`zeros.rs`: the_last_close_turns_parked_pages_into_zeros; `survival.rs`:
    /// a_keeper_holds_a_childs_descriptor).
    KeeperHolds,
    /// A restart waits until the helper has let go of the dead daemon's commands. Fact: a late MOVE
    /// steals from whatever is there (`moves.rs`: a_late_move_steals_from_whatever_lies_at_the_address;
    /// `helper.rs`: a_new_epoch_ends_the_commands_of_the_old_one).
    RestartWaitsForHelper,
    /// A restart waits for the store's lock, which lasts as long as a write is under way. Fact:
    /// `store.rs`: the_lock_of_a_dead_daemon_holds_until_its_writes_have_landed.
    RestartWaitsForStore,
    /// At a restart a page recorded in limbo is where the kernel's page table shows it.
    RestartLooksAtLimbo,
    /// At a restart a page recorded as `Filling` that is not in place is parked: nobody fills it any
    /// more.
    RestartEndsFills,
    /// A restart wakes all ranges. Fact: faults that the dead daemon had read are not delivered again
    /// (`zeros.rs`: with_a_duplicate_the_waiter_waits_for_a_new_daemon).
    RestartWakesAll,
}

use Rule as R;

impl Rule {
    /// All rules.
    pub const ALL: [Self; 35] = [
        R::LimboBeforeMove,
        R::SlotBeforeParked,
        R::ParkedBeforeDrop,
        R::DirtyBeforeUnprotect,
        R::DirtyBeforeFree,
        R::CleanIsProtected,
        R::NewSlotHoldsAll,
        R::EagainRetries,
        R::ExistsKeeps,
        R::BusyWakes,
        R::OtherPageWakes,
        R::ProtectionAlwaysClears,
        R::OneOwner,
        R::DiscardByMessage,
        R::ForgetAfterZap,
        R::AnswerAfterZap,
        R::AnswerAfterCommands,
        R::ReuseAfterDrop,
        R::ResultsByPage,
        R::PinnedStays,
        R::ForkFirst,
        R::ForkEndsFills,
        R::ForkWritesLimbo,
        R::SlotsCounted,
        R::ForgetAfterProof,
        R::HelperKeepsSpace,
        R::UnprotectBeforePopulate,
        R::PopulatePresent,
        R::MessagesSurvive,
        R::KeeperHolds,
        R::RestartWaitsForHelper,
        R::RestartWaitsForStore,
        R::RestartLooksAtLimbo,
        R::RestartEndsFills,
        R::RestartWakesAll,
    ];

    /// The scenario in which the rule is most likely to be missed.
    pub(crate) const fn likely(self) -> &'static str {
        match self {
            R::LimboBeforeMove
            | R::DirtyBeforeUnprotect
            | R::DirtyBeforeFree
            | R::CleanIsProtected
            | R::SlotBeforeParked
            | R::ParkedBeforeDrop
            | R::BusyWakes
            | R::OneOwner
            | R::ReuseAfterDrop
            | R::KeeperHolds
            | R::RestartLooksAtLimbo
            | R::RestartEndsFills
            | R::RestartWakesAll => "base",
            R::OtherPageWakes | R::NewSlotHoldsAll => "extent",
            R::ResultsByPage | R::PinnedStays => "dma",
            R::EagainRetries
            | R::ForkEndsFills
            | R::ForkWritesLimbo
            | R::HelperKeepsSpace
            | R::UnprotectBeforePopulate => "fork",
            R::PopulatePresent => "fork-holes",
            R::SlotsCounted => "fork-slots",
            R::ForkFirst | R::MessagesSurvive => "fork-crash",
            R::AnswerAfterZap | R::DiscardByMessage => "discard",
            R::ForgetAfterZap => "discard-refused",
            R::ForgetAfterProof | R::ProtectionAlwaysClears | R::ExistsKeeps => "discard-fork",
            R::AnswerAfterCommands | R::RestartWaitsForHelper => "reuse",
            R::RestartWaitsForStore => "crash",
        }
    }

    /// The rule with that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| format!("{rule:?}") == name)
    }
}

/// The rules that hold in an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules(u64);

impl Rules {
    /// All of them: the protocol.
    #[must_use]
    pub const fn all() -> Self {
        Self(u64::MAX)
    }

    /// All but one.
    #[must_use]
    pub const fn without(rule: Rule) -> Self {
        Self(!(1 << rule as u8))
    }

    /// Whether a rule holds.
    #[must_use]
    pub const fn holds(self, rule: Rule) -> bool {
        self.0 & (1 << rule as u8) != 0
    }
}
