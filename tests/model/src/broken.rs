//! What can be wrong.

use crate::state::PARENT;

/// What went wrong in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Broken {
    /// A page shows bytes that it must not show.
    WrongByte {
        /// In which process.
        proc: u8,
        /// Which page.
        page: u8,
    },
    /// A foreign mapping lost its bytes.
    Foreign {
        /// Which page.
        page: u8,
    },
    /// The table of page states has no arrow for what happened.
    NoArrow {
        /// Which page.
        page: u8,
    },
    /// Somebody waits, and nothing that is bound to happen serves him.
    Stuck,
    /// Things that are bound to happen can go round for ever.
    Livelock,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::WrongByte { proc, page } => {
                let who = if usize::from(*proc) == PARENT { "parent" } else { "child" };
                write!(f, "page {page} of the {who} shows wrong bytes")
            }
            Self::Foreign { page } => write!(f, "page {page} of a foreign mapping lost its bytes"),
            Self::NoArrow { page } => write!(f, "no arrow for what happened to page {page}"),
            Self::Stuck => write!(f, "somebody waits for ever"),
            Self::Livelock => write!(f, "the daemon can go round for ever"),
        }
    }
}
