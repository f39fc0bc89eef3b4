//! A set of numbers that come in runs.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges, by where they begin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges {
    ends: BTreeMap<u32, u32>,
}

impl Ranges {
    /// Whether `number` is in the set.
    pub(crate) fn contains(&self, number: u32) -> bool {
        self.ends.range(..=number).next_back().is_some_and(|(_, &end)| number < end)
    }

    /// Where the first run of at least `count` numbers begins.
    pub(crate) fn first_run(&self, count: u32) -> Option<u32> {
        self.ends.iter().find(|&(start, end)| end - start >= count).map(|(&start, _)| start)
    }

    /// The runs, in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u32>> {
        self.ends.iter().map(|(&start, &end)| start..end)
    }

    /// Puts all numbers of `range` in, or takes them out.
    pub(crate) fn set(&mut self, range: Range<u32>, is_in: bool) {
        let (mut first, mut last) = (range.start, range.end);
        if first >= last {
            return;
        }
        // All that touch it are replaced by what they and it come to.
        let touched: Vec<(u32, u32)> = self
            .ends
            .range(..=last)
            .rev()
            .map(|(&start, &end)| (start, end))
            .take_while(|&(_, end)| end >= first)
            .collect();
        for (start, end) in touched {
            self.ends.remove(&start);
            if is_in {
                first = first.min(start);
                last = last.max(end);
                continue;
            }
            if start < range.start {
                self.ends.insert(start, range.start);
            }
            if end > range.end {
                self.ends.insert(range.end, end);
            }
        }
        if is_in {
            self.ends.insert(first, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_is_the_set_that_a_plain_set_is_and_its_ranges_never_touch() {
        let mut state = 7_u32;
        let mut next = |below: u32| {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            (state >> 8) % below
        };
        let mut ranges = Ranges::default();
        let mut plain = BTreeSet::new();
        for _ in 0..2_000 {
            let first = next(60);
            let last = first + next(8);
            let is_in = next(2) == 0;
            ranges.set(first..last, is_in);
            for number in first..last {
                if is_in {
                    plain.insert(number)
                } else {
                    plain.remove(&number)
                };
            }
            for number in 0..70 {
                assert_eq!(ranges.contains(number), plain.contains(&number), "{number} {ranges:?}");
            }
            let count = 1 + next(6);
            let whole = |first: &u32| (*first..first + count).all(|n| plain.contains(&n));
            assert_eq!(ranges.first_run(count), (0..70).find(whole), "{count} {ranges:?}");
            let held: Vec<u32> = ranges.iter().flatten().collect();
            assert!(held.iter().eq(&plain), "{ranges:?}");
            let pairs: Vec<_> = ranges.ends.iter().collect();
            assert!(pairs.iter().all(|(start, end)| start < end), "{ranges:?}");
            assert!(pairs.windows(2).all(|two| two[0].1 < two[1].0), "{ranges:?}");
        }
    }
}
