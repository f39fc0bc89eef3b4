//! How long to look before sleeping.
//!
//! A wake-up costs tens of microseconds on a virtual machine, a look costs one; but whoever looks
//! takes a processor from the programs that we serve. So: look longer while looking pays, and stop
//! while it does not.

/// The longest spin. About what a sleep and a wake-up cost.
const LIMIT_NS_MAX: u64 = 40_000;
/// A spin that is shorter than a few looks says nothing.
const LIMIT_NS_MIN: u64 = 4_000;

/// The spin before the next sleep.
#[derive(Debug)]
pub(super) struct Spin {
    limit_ns: u64,
    allowed: bool,
}

impl Spin {
    /// With one processor, whoever spins delays the one it waits for: then `allowed` is false.
    pub(super) const fn new(allowed: bool) -> Self {
        Self { limit_ns: 0, allowed }
    }

    /// Nanoseconds to look for, at most.
    pub(super) const fn limit_ns(&self) -> u64 {
        if self.allowed { self.limit_ns } else { 0 }
    }

    /// Something came while spinning.
    pub(super) fn hit(&mut self) {
        self.limit_ns = (self.limit_ns * 2).clamp(LIMIT_NS_MIN, LIMIT_NS_MAX);
    }

    /// Nothing came while spinning, and then something ended a sleep of `slept_ns`.
    pub(super) fn slept(&mut self, slept_ns: u64) {
        if slept_ns <= LIMIT_NS_MAX {
            // A longer spin would have caught it.
            self.limit_ns = (self.limit_ns * 2).clamp(LIMIT_NS_MIN, LIMIT_NS_MAX);
        } else {
            self.limit_ns /= 2;
            if self.limit_ns < LIMIT_NS_MIN {
                self.limit_ns = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_family_does_not_spin_and_a_busy_one_does() {
        let mut spin = Spin::new(true);
        assert_eq!(spin.limit_ns(), 0);
        for _ in 0..10 {
            spin.slept(10_000);
        }
        assert_eq!(spin.limit_ns(), LIMIT_NS_MAX);
        for _ in 0..10 {
            spin.slept(1_000_000);
        }
        assert_eq!(spin.limit_ns(), 0);
        spin.hit();
        assert_eq!(spin.limit_ns(), LIMIT_NS_MIN);
        assert_eq!(Spin { allowed: false, limit_ns: LIMIT_NS_MAX }.limit_ns(), 0);
    }
}
