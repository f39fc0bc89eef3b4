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

/// Room that makes it worth while to let a family grow again.
const WORTH_BYTES: u64 = 4 * RESERVE_BYTES;
/// How far a family shrinks below what it used when its cgroup was full.
const STEP_BYTES: u64 = 2 * RESERVE_BYTES;
/// How often a cgroup that was full is looked at.
const LOOK_NS: u64 = 100_000_000;

/// What a family may use where its cgroups take less than its share of the room.
///
/// **Problem.** A family is told of the DRAM that the daemon has, and its cgroup may have less, together
/// with all that the program uses beside us. Nothing is parked then, and every page that is to come in
/// waits for one to leave.
/// **Approach.** A family begins with no more than its cgroups have room for, since what it touches of
/// native memory is not ours to refuse. A refusal lowers the budget to a little less than what is used;
/// room that shows later raises it, to half of that above what is known to be touched.
/// **Not here.** Which cgroup a page is charged to: that of whoever touches it.
#[derive(Debug)]
pub(super) struct Cap {
    bytes: u64,
    next_look: Tick,
}

impl Cap {
    pub(super) const NONE: Self = Self { bytes: u64::MAX, next_look: Tick(0) };

    /// The most that the family may use.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A process joins whose cgroup has `room`, while `touched_bytes` are known to be there.
    pub(super) fn joined(&mut self, now: Tick, room: u64, touched_bytes: u64, share_bytes: u64) {
        let spare = room.saturating_sub(room / 8).saturating_sub(RESERVE_BYTES);
        let most = touched_bytes.saturating_add(spare);
        if most < share_bytes.min(self.bytes) {
            self.bytes = most;
            self.next_look = now.after_ns(LOOK_NS);
        }
    }

    /// A cgroup took no more while the family used `used_bytes`. True where there was no cap before.
    pub(super) fn refused(&mut self, now: Tick, used_bytes: u64) -> bool {
        let first = self.bytes == u64::MAX;
        self.bytes = self.bytes.min(used_bytes.saturating_sub(STEP_BYTES));
        self.next_look = now.after_ns(LOOK_NS);
        first
    }

    /// When the cgroups are to be looked at again.
    pub(super) const fn next_look(&self) -> Tick {
        if self.bytes == u64::MAX { Tick::NEVER } else { self.next_look }
    }

    /// The cgroups have `room` (`None`: no limit) while `touched_bytes` are known to be there.
    pub(super) fn looked(
        &mut self,
        now: Tick,
        room: Option<u64>,
        touched_bytes: u64,
        share_bytes: u64,
    ) {
        self.next_look = now.after_ns(LOOK_NS);
        match room {
            None => self.bytes = u64::MAX,
            Some(room) if room > WORTH_BYTES => {
                self.bytes = self.bytes.max(touched_bytes.saturating_add(room / 2));
                if self.bytes >= share_bytes {
                    self.bytes = u64::MAX;
                }
            }
            Some(_) => {}
        }
    }
}

impl Headroom {
    pub(super) const fn new(gauge: Option<MemoryGauge>) -> Self {
        Self { gauge, allowance: 0, until: Tick(0) }
    }

    /// What the cgroup can still take; `None` where there is no limit or nothing is known.
    pub(super) fn room(&self) -> Option<u64> {
        self.gauge.as_ref()?.headroom()
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
                self.allowance = if spare > WORTH_BYTES { spare / 2 } else { spare };
                self.until = now.after_ns(FRESH_NS);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_follows_a_full_cgroup_down_and_its_room_up() {
        const MIB: u64 = 1 << 20;
        let mut cap = Cap::NONE;
        assert_eq!(cap.next_look(), Tick::NEVER);
        assert!(cap.refused(Tick(0), 60 * MIB));
        assert_eq!(cap.bytes(), 52 * MIB);
        assert!(!cap.refused(Tick(1), 56 * MIB));
        assert_eq!(cap.bytes(), 48 * MIB);
        let now = cap.next_look();
        cap.looked(now, Some(8 * MIB), 40 * MIB, 500 * MIB);
        assert_eq!(cap.bytes(), 48 * MIB, "too little to be worth while");
        cap.looked(now, Some(40 * MIB), 40 * MIB, 500 * MIB);
        assert_eq!(cap.bytes(), 60 * MIB);
        cap.looked(now, Some(40 * MIB), 40 * MIB, 50 * MIB);
        assert_eq!(cap.next_look(), Tick::NEVER, "more than its share needs no cap");
        cap.joined(now, 1024 * MIB, 0, 500 * MIB);
        assert_eq!(cap.bytes(), u64::MAX);
        cap.joined(now, 96 * MIB, 0, 500 * MIB);
        assert_eq!(cap.bytes(), 80 * MIB);
    }

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
