//! Whether the client's memory cgroup can take more pages.
//!
//! On cgroup v1 a `COPY` into a group at its limit makes the kernel kill the client. Reading the
//! group's files costs more than a small copy, so one reading serves for several milliseconds and half
//! of what it showed: the client allocates too.

use tiermgr_core::units::Tick;
use tiermgr_sys::cgroup::MemoryGauge;

/// Left to the client whatever happens.
const RESERVE_BYTES: u64 = 4 << 20;
/// How long a reading counts.
const FRESH_NS: u64 = 5_000_000;
/// How long it counts that there is no limit.
const UNLIMITED_NS: u64 = 1_000_000_000;

/// What one process' cgroup can still take.
#[derive(Debug)]
pub(super) struct Headroom {
    /// `None`: nothing is known, and so nothing is refused.
    gauge: Option<MemoryGauge>,
    allowance: u64,
    until: Tick,
}

impl Headroom {
    pub(super) const fn new(gauge: Option<MemoryGauge>) -> Self {
        Self { gauge, allowance: 0, until: Tick(0) }
    }

    /// Whether `bytes` can be installed now.
    pub(super) fn admit(&mut self, now: Tick, bytes: u64) -> bool {
        let Some(gauge) = &self.gauge else { return true };
        if now >= self.until || self.allowance < bytes {
            let room = gauge.headroom();
            self.refresh(now, room);
        }
        self.take(now, bytes)
    }

    fn take(&mut self, now: Tick, bytes: u64) -> bool {
        if self.allowance < bytes {
            // The next try looks again: it is the client that may have given memory back.
            self.until = now;
            return false;
        }
        if self.allowance != u64::MAX {
            self.allowance -= bytes;
        }
        true
    }

    fn refresh(&mut self, now: Tick, room: Option<u64>) {
        match room {
            None => {
                self.allowance = u64::MAX;
                self.until = now.after_ns(UNLIMITED_NS);
            }
            Some(room) => {
                let spare = room.saturating_sub(RESERVE_BYTES);
                self.allowance = if spare > 4 * RESERVE_BYTES { spare / 2 } else { spare };
                self.until = now.after_ns(FRESH_NS);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_left_to_the_client() {
        let mut headroom = Headroom::new(None);
        headroom.refresh(Tick(0), Some(RESERVE_BYTES + 4096));
        assert!(headroom.take(Tick(1), 4096));
        assert!(!headroom.take(Tick(1), 1));
        assert_eq!(headroom.until, Tick(1), "the next try looks again");
        headroom.refresh(Tick(0), Some(RESERVE_BYTES - 1));
        assert!(!headroom.take(Tick(0), 1));
        headroom.refresh(Tick(0), None);
        assert!(headroom.take(Tick(0), u64::MAX - 1));
        assert!(headroom.take(Tick(0), u64::MAX - 1));
    }
}
