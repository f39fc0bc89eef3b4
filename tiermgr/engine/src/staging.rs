//! Staging memory of all families: what passes between programs and the store lies here meanwhile.
//!
//! **Problem.** Large buffers make the store fast, but programs are many and each needs them for moments
//! only; a family must not wait for one that another keeps.
//! **Approach.** A few large buffers are lent to whoever asks first. While somebody waits, everybody gives
//! back after one use. Small ones are each family's own: reserved when it begins, touched when they are
//! first used, and packed densely, so that programs that fit cost nothing here. The core goes on with
//! its small buffers where it is lent nothing. Nobody finds what another family has left in one: not
//! that anybody looks, but a mistake elsewhere is not to show it.
//! **Not here.** What buffers are used for (`core`), and that the device is done with one
//! ([`tiermgr_sys::uring`]).

use crate::room::FamilyId;
use crate::wake::Wake;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tiermgr_core::limits::{DEMAND_BUFFERS, DEMAND_BUFFERS_LEAST, STREAM_BUFFERS};
use tiermgr_core::units::{CHUNK_BYTES, EXTENT_BYTES, low_u32};
use tiermgr_sys::pool::{BufferPool, Lease};

/// One large buffer for so many bytes of the DRAM limit, within the bounds below.
const BYTES_PER_STREAM: u64 = 256 << 20;
/// As many as one family can use.
const STREAMS_MIN: u64 = STREAM_BUFFERS as u64;
/// Together 32 MiB in flight.
const STREAMS_MAX: u64 = 16;
/// Of the DRAM limit, what small buffers above the least number may take in all.
const EXTRA_SHARE: u64 = 16;

/// The buffers, and who waits for one.
#[derive(Debug)]
pub struct Staging {
    large: Arc<BufferPool>,
    small: Arc<BufferPool>,
    /// Small buffers that families may have yet above their least number.
    extra: AtomicU16,
    queue: Mutex<Queue>,
    /// Somebody waits.
    short: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiter>,
    /// Who had which large buffer last.
    last: BTreeMap<usize, FamilyId>,
}

#[derive(Debug)]
struct Waiter {
    family: FamilyId,
    wake: Arc<Wake>,
}

impl Staging {
    /// Buffers for a DRAM limit of so many bytes, mapped and not touched.
    ///
    /// # Errors
    /// As mmap.
    pub fn new(dram_bytes: u64) -> io::Result<Arc<Self>> {
        let streams = (dram_bytes / BYTES_PER_STREAM).clamp(STREAMS_MIN, STREAMS_MAX);
        let large = BufferPool::new(low_u32(CHUNK_BYTES) as usize)?;
        large.reserve(low_u32(streams) as usize)?;
        let small = BufferPool::new(low_u32(EXTENT_BYTES) as usize)?;
        let (queue, short) = (Mutex::default(), AtomicBool::new(false));
        let extra = dram_bytes / EXTRA_SHARE / EXTENT_BYTES;
        let extra = AtomicU16::new(u16::try_from(extra).unwrap_or(u16::MAX));
        Ok(Arc::new(Self { large, small, extra, queue, short }))
    }

    /// Bytes that buffers may take yet and that are not in memory.
    #[must_use]
    pub fn to_come_bytes(&self) -> u64 {
        self.large.untouched_bytes() + self.small.unused_bytes()
    }

    /// A family begins. It gets as many small buffers as one may have, or fewer where there are many
    /// families.
    ///
    /// # Errors
    /// As mmap; nothing is taken then.
    pub fn seat(self: &Arc<Self>, family: FamilyId) -> io::Result<Seat> {
        let most = DEMAND_BUFFERS - DEMAND_BUFFERS_LEAST;
        let left = |left: u16| Some(left - left.min(most));
        let before = match self.extra.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left) {
            Ok(before) | Err(before) => before,
        };
        let extra = before.min(most);
        if let Err(error) = self.small.reserve(usize::from(DEMAND_BUFFERS_LEAST + extra)) {
            self.extra.fetch_add(extra, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Seat { staging: Arc::clone(self), family, extra })
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Each change is one push, insert or remove.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, queue: &mut Queue, family: FamilyId) {
        queue.waiting.retain(|waiter| waiter.family != family);
        self.short.store(!queue.waiting.is_empty(), Ordering::Release);
    }

    /// Tells those whose turn it is.
    fn call_next(&self, queue: &Queue) {
        for waiter in queue.waiting.iter().take(self.large.free_pieces()) {
            waiter.wake.wake();
        }
    }
}

/// What one family has of it. Dropped after everything that was taken from it.
#[derive(Debug)]
pub struct Seat {
    staging: Arc<Staging>,
    family: FamilyId,
    extra: u16,
}

impl Seat {
    /// How many small buffers there are.
    #[must_use]
    pub const fn small_count(&self) -> u16 {
        DEMAND_BUFFERS_LEAST + self.extra
    }

    /// A small buffer of zeros, for good. There are [`Seat::small_count`].
    #[must_use]
    pub fn small(&self) -> Option<Lease> {
        let mut lease = self.staging.small.take()?;
        lease.as_mut_slice().fill(0);
        Some(lease)
    }

    /// A large buffer, of zeros or as we have left it. With none free, or others before us, `wake` is used
    /// when it is our turn.
    #[must_use]
    pub fn borrow(&self, wake: &Arc<Wake>) -> Option<Lease> {
        let staging = &self.staging;
        let mut queue = staging.lock();
        let found = queue.waiting.iter().position(|waiter| waiter.family == self.family);
        let before = found.unwrap_or(queue.waiting.len());
        let lease = match before < staging.large.free_pieces() {
            true => staging.large.take(),
            false => None,
        };
        let Some(mut lease) = lease else {
            if found.is_none() {
                let wake = Arc::clone(wake);
                queue.waiting.push_back(Waiter { family: self.family, wake });
                staging.short.store(true, Ordering::Release);
            }
            return None;
        };
        if found.is_some() {
            staging.forget(&mut queue, self.family);
        }
        let last = queue.last.insert(lease.piece(), self.family);
        drop(queue);
        if last.is_some_and(|last| last != self.family) {
            lease.as_mut_slice().fill(0);
        }
        Some(lease)
    }

    /// Gives a large buffer back.
    pub fn give_back(&self, lease: Lease) {
        drop(lease);
        self.staging.call_next(&self.staging.lock());
    }

    /// Whether somebody waits: large buffers are to be given back after one use.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.staging.short.load(Ordering::Acquire)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut queue = self.staging.lock();
        self.staging.forget(&mut queue, self.family);
        self.staging.call_next(&queue);
        drop(queue);
        self.staging.small.release(usize::from(self.small_count()));
        self.staging.extra.fetch_add(self.extra, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wakes<const N: usize>() -> [Arc<Wake>; N] {
        std::array::from_fn(|_| Arc::new(Wake::silent()))
    }

    fn take_all(seat: &Seat, wake: &Arc<Wake>) -> Vec<Lease> {
        (0..STREAMS_MIN).map(|_| seat.borrow(wake).expect("free")).collect()
    }

    #[test]
    fn those_who_wait_are_served_in_their_order() {
        let staging = Staging::new(64 << 20).expect("8 MiB");
        let [holder, first, second] = [1, 2, 3].map(|n| staging.seat(n).expect("1 MiB"));
        let [holders, firsts, seconds] = wakes();
        let mut held = take_all(&holder, &holders);
        assert!(!holder.is_short());
        assert!(first.borrow(&firsts).is_none() && second.borrow(&seconds).is_none());
        assert!(holder.is_short() && !firsts.is_raised());
        holder.give_back(held.pop().expect("four"));
        assert!(firsts.is_raised() && !seconds.is_raised());
        assert!(second.borrow(&seconds).is_none() && holder.borrow(&holders).is_none());
        let lent = first.borrow(&firsts).expect("its turn");
        first.give_back(lent);
        assert!(seconds.is_raised());
        assert!(second.borrow(&seconds).is_some());
        // The holder waits itself by now; its turn is next.
        assert!(holder.is_short() && holder.borrow(&holders).is_some());
        assert!(!holder.is_short());
    }

    #[test]
    fn one_that_ends_or_does_not_come_keeps_nobody_waiting() {
        let staging = Staging::new(64 << 20).expect("8 MiB");
        let [holder, absent, other] = [1, 2, 3].map(|n| staging.seat(n).expect("1 MiB"));
        let [holders, absents, others] = wakes();
        let mut held = take_all(&holder, &holders);
        assert!(absent.borrow(&absents).is_none() && other.borrow(&others).is_none());
        holder.give_back(held.pop().expect("four"));
        holder.give_back(held.pop().expect("four"));
        assert!(others.is_raised() && other.borrow(&others).is_some(), "two are free");
        let again = wakes::<1>();
        let lent = holder.borrow(&holders);
        assert!(lent.is_some(), "one is free beside the one that is kept for the absent");
        assert!(other.borrow(&again[0]).is_none());
        drop(absent);
        assert!(again[0].is_raised() && other.borrow(&again[0]).is_some());
    }

    #[test]
    fn nobody_finds_the_bytes_of_another() {
        let staging = Staging::new(64 << 20).expect("8 MiB");
        let [one, other] = [1, 2].map(|n| staging.seat(n).expect("1 MiB"));
        let [wake] = wakes();
        let mut lent = one.borrow(&wake).expect("free");
        lent.as_mut_slice().fill(7);
        one.give_back(lent);
        let lent = one.borrow(&wake).expect("free");
        assert_eq!(lent.as_slice()[0], 7, "its own are no secret");
        one.give_back(lent);
        let lent = other.borrow(&wake).expect("free");
        assert!(lent.as_slice().iter().all(|&byte| byte == 0));
        let mut small = one.small().expect("reserved");
        small.as_mut_slice().fill(7);
        drop((small, one));
        assert!(other.small().expect("reserved").as_slice().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn what_may_come_is_known_beforehand_and_goes_with_its_family() {
        let staging = Staging::new(64 << 20).expect("8 MiB");
        let large = STREAMS_MIN * CHUNK_BYTES;
        assert_eq!(staging.to_come_bytes(), large);
        let seats: Vec<Seat> = (0..100).map(|n| staging.seat(n).expect("1 MiB")).collect();
        assert_eq!(seats[0].small_count(), DEMAND_BUFFERS);
        assert_eq!(seats[99].small_count(), DEMAND_BUFFERS_LEAST);
        let small = 100 * u64::from(DEMAND_BUFFERS_LEAST) + (64 << 20) / EXTRA_SHARE / EXTENT_BYTES;
        assert_eq!(staging.to_come_bytes(), large + small * EXTENT_BYTES);
        let taken: Vec<Lease> = seats.iter().map(|seat| seat.small().expect("reserved")).collect();
        assert_eq!(staging.to_come_bytes(), large + (small - 100) * EXTENT_BYTES);
        drop((taken, seats));
        assert_eq!(staging.to_come_bytes(), large);
        assert_eq!(staging.seat(7).expect("1 MiB").small_count(), DEMAND_BUFFERS);
        let big = Staging::new(1 << 40).expect("32 MiB");
        assert_eq!(big.to_come_bytes(), STREAMS_MAX * CHUNK_BYTES);
    }
}
