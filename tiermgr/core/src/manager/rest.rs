//! Until when an extent is not to be moved.
//!
//! There is one of these for each extent that was ever in use, so it has four bytes and counts milliseconds
//! that wrap after seven weeks. No rest is longer than [`REST_MAX_MS`]: an end that lies further ahead than
//! that lies in the past.

use crate::units::{Tick, low_u32};

/// Longest rest.
const REST_MAX_MS: u32 = 1 << 14;

fn millis(now: Tick) -> u32 {
    low_u32((now.0 / 1_000_000) & u64::from(u32::MAX))
}

/// The end of a rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rest {
    until_ms: u32,
}

impl Rest {
    fn left_ms(self, now: Tick) -> u32 {
        let left = self.until_ms.wrapping_sub(millis(now));
        if left > REST_MAX_MS { 0 } else { left }
    }

    /// Whether it has not ended.
    pub(crate) fn lasts(self, now: Tick) -> bool {
        self.left_ms(now) > 0
    }

    /// Ends no sooner than `ms` from now, and no later than it would have or `ms`, whichever is later.
    pub(crate) fn at_least(&mut self, now: Tick, ms: u32) {
        if self.left_ms(now) < ms {
            self.until_ms = millis(now).wrapping_add(ms.min(REST_MAX_MS));
        }
    }

    /// Ends `ms` from now.
    pub(crate) fn set(&mut self, now: Tick, ms: u32) {
        self.until_ms = millis(now).wrapping_add(ms.min(REST_MAX_MS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRAP_MS: u64 = 1 << 32;

    fn at(ms: u64) -> Tick {
        Tick(ms * 1_000_000)
    }

    #[test]
    fn a_rest_ends_at_any_time_of_a_long_life() {
        for begin in [0, 1, WRAP_MS - 3, WRAP_MS - 1, WRAP_MS, 3 * WRAP_MS / 2, 900 * WRAP_MS - 1] {
            let mut rest = Rest::default();
            rest.set(at(begin), 4);
            assert!(rest.lasts(at(begin)) && rest.lasts(at(begin + 3)), "{begin}");
            assert!(!rest.lasts(at(begin + 4)), "{begin}");
            assert!(!rest.lasts(at(begin + WRAP_MS / 2 + 4)), "{begin}");
            rest.at_least(at(begin + 1), 1);
            assert!(rest.lasts(at(begin + 3)), "shortened");
            rest.at_least(at(begin + 1), 9);
            assert!(rest.lasts(at(begin + 9)) && !rest.lasts(at(begin + 10)), "{begin}");
        }
    }

    #[test]
    fn who_never_rested_does_not_rest() {
        for now in [WRAP_MS / 2, WRAP_MS, WRAP_MS + 1, 7 * WRAP_MS] {
            assert!(!Rest::default().lasts(at(now)), "{now}");
        }
    }

    #[test]
    fn no_rest_is_longer_than_the_longest() {
        let mut rest = Rest::default();
        rest.set(at(5), u32::MAX);
        assert!(rest.lasts(at(5)) && !rest.lasts(at(6 + u64::from(REST_MAX_MS))));
    }
}
