//! The states of a page, and what may follow what.
//!
//! The table is data: [`PageState::next`] answers for every pair of state and event, the whole
//! matrix is a reviewed snapshot, and the exhaustive model in `tests/model` walks it together with a
//! model of the kernel. The reasons for each arrow stand in `tiermgr/docs/page-states.md`.

use crate::units::EXTENT_PAGES_MAX;

/// Where the one true copy of a page is, as far as the record tells.
///
/// Four bits each, sixteen to a record, so that one store of a `u64` changes a whole extent at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PageState {
    /// Never written, or discarded: reads as zeros.
    #[default]
    Absent = 0,
    /// In its place; no valid copy elsewhere.
    Dirty = 1,
    /// In its place, write-protected; the slot holds the same bytes.
    Clean = 2,
    /// In limbo, or in its place with a move there outstanding; no valid copy elsewhere.
    LimboDirty = 3,
    /// As `LimboDirty`, and the slot holds the same bytes.
    LimboClean = 4,
    /// Only in the slot.
    Parked = 5,
    /// In the slot, and on its way to its place.
    Filling = 6,
    /// Lost by a device; an access raises SIGBUS.
    Poisoned = 7,
}

/// What can happen to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageEvent {
    /// Zeros were installed for an absent page.
    ZeroInstalled,
    /// A move to limbo is about to be ordered.
    LimboBegun,
    /// A move to limbo was refused, or cancelled: the page is still in its place.
    LimboRefused,
    /// The page was found neither in limbo nor in its place: the client had dropped it.
    LimboEmpty,
    /// The bytes came back from limbo into the page's place, and stay the same as the slot's.
    RescuedClean,
    /// The bytes came back from limbo into the page's place.
    RescuedDirty,
    /// The bytes in limbo reached the slot.
    SlotWritten,
    /// The limbo page is about to be dropped: from here on the slot is the only copy.
    ParkRecorded,
    /// A read from the slot is about to fill the page's place.
    FillBegun,
    /// The fill ended, write-protected: slot and place hold the same bytes.
    FilledClean,
    /// The fill ended for a write: the slot is to be forgotten.
    FilledDirty,
    /// The fill was given up before a byte was installed.
    FillCancelled,
    /// Somebody wrote to a write-protected page.
    Written,
    /// The device lost the slot's bytes.
    Lost,
    /// The client gave the bytes up.
    Discarded,
    /// At a restart: the page is in its place although the record says otherwise.
    FoundPresent,
}

use PageEvent as E;
use PageState as S;

impl PageState {
    /// All states, in the order of their codes.
    pub const ALL: [Self; 8] = [
        S::Absent,
        S::Dirty,
        S::Clean,
        S::LimboDirty,
        S::LimboClean,
        S::Parked,
        S::Filling,
        S::Poisoned,
    ];

    /// The state after `event`, or `None` where the event cannot happen.
    #[must_use]
    pub const fn next(self, event: PageEvent) -> Option<Self> {
        Some(match (self, event) {
            (S::Absent, E::ZeroInstalled) => S::Dirty,

            (S::Dirty, E::LimboBegun) => S::LimboDirty,
            (S::Clean, E::LimboBegun) => S::LimboClean,
            (S::LimboDirty, E::LimboRefused | E::RescuedDirty) => S::Dirty,
            (S::LimboClean, E::LimboRefused | E::RescuedClean) => S::Clean,
            (S::LimboClean, E::RescuedDirty) => S::Dirty,
            // The client zapped it behind our back: it asked for zeros.
            (S::LimboDirty | S::LimboClean, E::LimboEmpty) => S::Absent,

            (S::LimboDirty, E::SlotWritten) => S::LimboClean,
            (S::LimboClean, E::ParkRecorded) => S::Parked,

            (S::Parked, E::FillBegun) => S::Filling,
            (S::Filling, E::FilledClean) => S::Clean,
            (S::Filling, E::FilledDirty) => S::Dirty,
            (S::Filling, E::FillCancelled) => S::Parked,
            (S::Filling, E::Lost) => S::Poisoned,

            (S::Clean | S::Dirty, E::Written) => S::Dirty,

            // Nobody but the client can have put bytes there since: they are the newest.
            (
                S::Absent | S::Parked | S::Filling | S::LimboDirty | S::LimboClean,
                E::FoundPresent,
            ) => S::Dirty,
            (S::Dirty | S::Clean, E::FoundPresent) => self,

            (_, E::Discarded) => S::Absent,
            _ => return None,
        })
    }

    /// Whether the slot's bytes are this page's bytes.
    #[must_use]
    pub const fn needs_slot(self) -> bool {
        matches!(self, S::Clean | S::LimboClean | S::Parked | S::Filling)
    }

    /// Whether the page takes room in its place.
    #[must_use]
    pub const fn is_resident(self) -> bool {
        matches!(self, S::Dirty | S::Clean)
    }

    /// Whether the page is, or is about to be, in limbo.
    #[must_use]
    pub const fn is_limbo(self) -> bool {
        matches!(self, S::LimboDirty | S::LimboClean)
    }

    /// Whether the page's bytes are, or may be, somewhere else than in its place.
    #[must_use]
    pub const fn is_away(self) -> bool {
        self.is_limbo() || matches!(self, S::Parked | S::Filling)
    }

    const fn from_code(code: u8) -> Self {
        match code {
            1 => S::Dirty,
            2 => S::Clean,
            3 => S::LimboDirty,
            4 => S::LimboClean,
            5 => S::Parked,
            6 => S::Filling,
            7 => S::Poisoned,
            // A code that was never written: a damaged record must not read as anything that
            // could release bytes to a program, and `Poisoned` releases none.
            0 => S::Absent,
            _ => S::Poisoned,
        }
    }
}

/// A set of pages of one extent, bit 0 the first.
pub type PageMask = u16;

/// The states of all pages of an extent in one word.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PageStates(pub u64);

impl PageStates {
    /// All `pages` first pages in `state`, the rest `Absent`.
    #[must_use]
    pub fn all(state: PageState, pages: u32) -> Self {
        let mut states = Self::default();
        for page in 0..pages {
            states.set(page, state);
        }
        states
    }

    /// The state of page `page` of the extent.
    #[must_use]
    pub fn get(self, page: u32) -> PageState {
        debug_assert!(page < EXTENT_PAGES_MAX);
        PageState::from_code(((self.0 >> (page * 4)) & 0xf) as u8)
    }

    /// Changes the state of one page.
    pub fn set(&mut self, page: u32, state: PageState) {
        debug_assert!(page < EXTENT_PAGES_MAX);
        let shift = page * 4;
        self.0 = self.0 & !(0xf << shift) | u64::from(state as u8) << shift;
    }

    /// The pages whose state satisfies `wanted`.
    #[must_use]
    pub fn mask(self, wanted: impl Fn(PageState) -> bool) -> PageMask {
        (0..EXTENT_PAGES_MAX)
            .filter(|&page| wanted(self.get(page)))
            .fold(0, |mask, page| mask | 1 << page)
    }

    /// How many pages satisfy `wanted`.
    #[must_use]
    pub fn count(self, wanted: impl Fn(PageState) -> bool) -> u32 {
        self.mask(wanted).count_ones()
    }

    /// Whether any page satisfies `wanted`.
    #[must_use]
    pub fn any(self, wanted: impl Fn(PageState) -> bool) -> bool {
        self.mask(wanted) != 0
    }

    /// Applies `event` to the pages of `mask`. `None`, and nothing changed, where the event cannot
    /// happen to one of them.
    #[must_use]
    pub fn after(self, mask: PageMask, event: PageEvent) -> Option<Self> {
        let mut states = self;
        for page in (0..EXTENT_PAGES_MAX).filter(|page| mask & (1 << page) != 0) {
            states.set(page, self.get(page).next(event)?);
        }
        Some(states)
    }
}

impl std::fmt::Debug for PageStates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries((0..EXTENT_PAGES_MAX).map(|page| self.get(page))).finish()
    }
}

#[cfg(test)]
mod tests;
