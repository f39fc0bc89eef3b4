//! What happened, as lines for a person and as a hash that two runs of one seed must share.

use std::fmt::{self, Write};

/// The record of a run.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Lines are printed from this turn on.
    pub from: Option<u64>,
    hash: u64,
}

struct Fold<'a>(&'a mut u64);

impl Write for Fold<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            *self.0 = (*self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}

impl Trace {
    /// An empty one, printed from turn `from` where that is given.
    #[must_use]
    pub const fn new(from: Option<u64>) -> Self {
        Self { from, hash: 0xcbf2_9ce4_8422_2325 }
    }

    /// Something that must be the same in every run of the seed.
    pub fn note(&mut self, turn: u64, now: u64, what: fmt::Arguments<'_>) {
        // Folding bytes cannot fail.
        let folded = Fold(&mut self.hash).write_fmt(what);
        debug_assert!(folded.is_ok());
        self.say(turn, now, what);
    }

    /// A line for a person only.
    pub fn say(&self, turn: u64, now: u64, what: fmt::Arguments<'_>) {
        if self.from.is_some_and(|from| turn >= from) {
            eprintln!("{turn:>6} {:>12}.{:03}us  {what}", now / 1000, now % 1000);
        }
    }

    /// The hash of all notes.
    #[must_use]
    pub const fn hash(&self) -> u64 {
        self.hash
    }
}
