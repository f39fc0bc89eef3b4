//! The only source of chance of a run. Splitmix64: one word of state, so a seed is the whole of it.

/// A stream of numbers that depends on nothing but its seed.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// The stream of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = Self { state: seed ^ 0x5851_f42d_4c95_7f2d };
        rng.word();
        rng
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0);
        // The bias of the remainder is far below what any seed could show.
        self.word() % bound
    }

    /// A number from `low` to `high`, both included.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// An index below `len`, which is not 0.
    pub fn index(&mut self, len: usize) -> usize {
        crate::ix(self.below(len as u64))
    }

    /// True `per_mille` times in a thousand.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// One of `choices`, which is not empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    /// An index into `weights`, as often as its weight says. All weights 0 gives 0.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let total: u64 = weights.iter().map(|&weight| u64::from(weight)).sum();
        if total == 0 {
            return 0;
        }
        let mut left = self.below(total);
        for (index, &weight) in weights.iter().enumerate() {
            if left < u64::from(weight) {
                return index;
            }
            left -= u64::from(weight);
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn the_same_seed_gives_the_same_stream_and_another_seed_another() {
        let stream = |seed| {
            let mut rng = Rng::new(seed);
            (0..8).map(|_| rng.word()).collect::<Vec<_>>()
        };
        assert_eq!(stream(1), stream(1));
        assert_ne!(stream(1), stream(2));
    }

    #[test]
    fn weights_of_zero_are_never_drawn() {
        let mut rng = Rng::new(3);
        assert!((0..1000).all(|_| rng.weighted(&[0, 5, 0, 1]) % 2 == 1));
    }
}
