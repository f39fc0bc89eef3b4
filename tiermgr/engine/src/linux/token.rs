//! What a completion is about, in the 64 bits that io_uring hands through.

use tiermgr_core::units::ProcId;

/// Counts the lives of a process number, so that a late completion of an earlier life is known.
pub(super) type Generation = u32;

const GENERATION_MASK: u32 = 0x00ff_ffff;

/// Names the thing that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// The executor's own eventfd.
    Wake,
    /// Messages on a userfaultfd.
    Arena(ProcId, Generation),
    /// A helper answered while we slept.
    Ring(ProcId, Generation),
    /// The process exited.
    Exit(ProcId, Generation),
    /// The helper exited.
    HelperExit(ProcId, Generation),
    /// A read or write of the store, by its place in the table of operations.
    Store(u32),
}

impl Token {
    pub(super) fn encode(self) -> u64 {
        let (kind, generation, low) = match self {
            Self::Wake => (1, 0, 0),
            Self::Arena(proc, generation) => (2, generation, proc.0),
            Self::Ring(proc, generation) => (3, generation, proc.0),
            Self::Exit(proc, generation) => (4, generation, proc.0),
            Self::HelperExit(proc, generation) => (5, generation, proc.0),
            Self::Store(at) => (6, 0, at),
        };
        kind << 56 | u64::from(generation & GENERATION_MASK) << 32 | u64::from(low)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the fields of the word are what is wanted"
    )]
    pub(super) fn decode(word: u64) -> Option<Self> {
        let proc = ProcId(word as u32);
        let generation = (word >> 32) as u32 & GENERATION_MASK;
        Some(match word >> 56 {
            1 => Self::Wake,
            2 => Self::Arena(proc, generation),
            3 => Self::Ring(proc, generation),
            4 => Self::Exit(proc, generation),
            5 => Self::HelperExit(proc, generation),
            6 => Self::Store(word as u32),
            _ => return None,
        })
    }

    pub(super) const fn generation_after(generation: Generation) -> Generation {
        generation.wrapping_add(1) & GENERATION_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_as_they_went() {
        let (proc, last) = (ProcId(1024), GENERATION_MASK);
        for token in [
            Token::Wake,
            Token::Arena(proc, last),
            Token::Ring(proc, 0),
            Token::Exit(ProcId(1), 77),
            Token::HelperExit(proc, last),
            Token::Store(u32::MAX),
        ] {
            assert_eq!(Token::decode(token.encode()), Some(token));
        }
        assert_eq!(Token::decode(0), None);
        assert_eq!(Token::decode(u64::MAX), None);
        assert_eq!(Token::generation_after(last), 0);
    }
}
