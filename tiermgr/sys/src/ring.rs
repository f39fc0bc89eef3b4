//! The command ring between an executor and the helper inside a client.
//!
//! One page of head and [`ENTRIES`] entries in a sealed memfd that the daemon makes and both map. The owner
//! writes commands in order; the helper takes them in order. Each entry has one state word, changed by
//! compare-and-swap only:
//!
//! ```text
//! word = epoch (32 bits) | sequence (24 bits) | state (8 bits)
//! Queued -> Taken -> Done          by the helper
//! Queued -> Cancelled              by the owner
//! ```
//!
//! A command either ran and is answered, or was cancelled before it was taken; there is no third way, and
//! that is what makes it safe to reuse an address afterwards. An *epoch* begins when a new daemon attaches:
//! once the helper has acknowledged it, no command of an earlier epoch runs or will run.
//!
//! **What the owner believes.** The client can write anything into this memory. The owner keeps its own
//! copy of every command, never takes an index from the ring, and answers [`RingError::Broken`] to values
//! that no helper writes. A client that lies about results harms its own memory only.
//!
//! **Sleeping.** The helper waits on the doorbell, a futex. The owner is told through an eventfd, and only
//! while it says that it sleeps: set that, [`RingOwner::poll`] once more, then sleep.

use crate::process::page_size;
use crate::shm::{Mapping, check_sealed, eventfd, sealed_memfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Commands in flight at most.
pub const ENTRIES: usize = 64;

/// Offsets and values that both sides agree on.
pub(crate) mod layout {
    /// Bytes of the memfd: a multiple of every page size that Linux has.
    pub(crate) const BYTES: usize = 65536;
    /// u32, written by the owner; never 0.
    pub(crate) const EPOCH: usize = 8;
    /// u32, written by the helper.
    pub(crate) const EPOCH_ACK: usize = 12;
    /// u32, a futex; the owner adds 1 for each thing that the helper should look at.
    pub(crate) const DOORBELL: usize = 64;
    /// u32, 1 while the helper waits on the doorbell.
    pub(crate) const HELPER_SLEEPS: usize = 68;
    /// u32, 1: the helper is to end.
    pub(crate) const STOP: usize = 72;
    /// u32, 1 while the owner sleeps and wants the eventfd written.
    pub(crate) const OWNER_SLEEPS: usize = 128;
    /// u32, 1 from when an executor serves the client: its memory may hold what others need.
    pub(crate) const IN_SERVICE: usize = 132;
    /// u32, `STATE_*`.
    pub(crate) const HELPER_STATE: usize = 192;
    /// u32, the errno of a helper that could not start.
    pub(crate) const HELPER_ERRNO: usize = 196;
    /// The first entry.
    pub(crate) const FIRST_ENTRY: usize = 4096;
    /// Bytes of an entry.
    pub(crate) const ENTRY_BYTES: usize = 64;

    /// u64 each, inside an entry.
    pub(crate) const WORD: usize = 0;
    pub(crate) const OP: usize = 8;
    pub(crate) const A: usize = 16;
    pub(crate) const B: usize = 24;
    pub(crate) const LEN: usize = 32;
    pub(crate) const RESULT_BYTES: usize = 40;
    pub(crate) const RESULT_ERRNO: usize = 48;

    pub(crate) const QUEUED: u64 = 1;
    pub(crate) const TAKEN: u64 = 2;
    pub(crate) const DONE: u64 = 3;
    pub(crate) const CANCELLED: u64 = 4;

    pub(crate) const STATE_RUNNING: u32 = 1;
    pub(crate) const STATE_FAILED: u32 = 4;

    pub(crate) const OP_MOVE_TO_LIMBO: u64 = 1;
    pub(crate) const OP_DROP: u64 = 3;
    pub(crate) const OP_POPULATE: u64 = 4;

    const _: () = assert!(FIRST_ENTRY + super::ENTRIES * ENTRY_BYTES <= BYTES);

    /// The state word.
    pub(crate) const fn word(epoch: u32, sequence: u32, state: u64) -> u64 {
        (epoch as u64) << 32 | ((sequence & 0x00ff_ffff) as u64) << 8 | state
    }
}

/// What a helper is asked to do; all of it inside the client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// UFFDIO_MOVE into limbo. Absent pages are skipped and count as moved.
    Move {
        /// To where; nothing may be there.
        dst: u64,
        /// From where.
        src: u64,
        /// Bytes.
        len: u64,
    },
    /// MADV_DONTNEED.
    Drop {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
    },
    /// MADV_POPULATE_WRITE: makes pages exclusive that fork left shared. Never on a write-protected or
    /// absent armed page: the helper would wait for an answer from the very daemon that waits for it.
    Populate {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
    },
}

impl Command {
    /// Bytes that it is about.
    pub const fn len(&self) -> u64 {
        match *self {
            Self::Move { len, .. } | Self::Drop { len, .. } | Self::Populate { len, .. } => len,
        }
    }

    /// Whether it is about no bytes; such a command is answered with EINVAL.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    const fn encode(&self) -> [u64; 4] {
        match *self {
            Self::Move { dst, src, len } => [layout::OP_MOVE_TO_LIMBO, dst, src, len],
            Self::Drop { start, len } => [layout::OP_DROP, start, 0, len],
            Self::Populate { start, len } => [layout::OP_POPULATE, start, 0, len],
        }
    }
}

/// Names one command; never used again by the same owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RingTicket(u64);

impl RingTicket {
    const fn new(epoch: u32, sequence: u32) -> Self {
        Self((epoch as u64) << 32 | sequence as u64)
    }

    /// As a number, for tables of the caller.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// It ran.
    Done {
        /// How far it came, from the start of the range; all of it if and only if `errno` is 0.
        bytes: u64,
        /// Why it came no farther; 0 when it came all the way.
        errno: i32,
    },
    /// It never ran and never will.
    Cancelled,
}

/// Why the ring refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// Poll for completions first.
    #[error("all {ENTRIES} entries of the helper ring are in use")]
    Full,
    /// Treat the client as hostile.
    #[error("the helper ring holds values that no helper writes")]
    Broken,
    /// Commands of the former epoch may still run.
    #[error("the helper has not acknowledged the new epoch")]
    EpochPending,
}

/// The executor's end.
#[derive(Debug)]
pub struct RingOwner {
    memfd: OwnedFd,
    event: OwnedFd,
    map: Mapping,
    epoch: u32,
    /// Sequence of the oldest command not yet reported.
    oldest: u32,
    /// Sequence of the next command.
    next: u32,
    /// The owner's own copy of what it asked for, by sequence modulo [`ENTRIES`].
    commands: [Option<Command>; ENTRIES],
}

impl RingOwner {
    /// Makes a ring: its memory and the eventfd.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn create() -> io::Result<Self> {
        let memfd = sealed_memfd("tiermgr-ring", crate::uffd::bytes(layout::BYTES))?;
        let map = Mapping::shared(memfd.as_fd(), layout::BYTES)?;
        let ring = Self::new(memfd, eventfd()?, map, 1);
        ring.head(layout::EPOCH).store(1, Ordering::SeqCst);
        Ok(ring)
    }

    /// Attaches to a ring whose former owner is dead. Begins a new epoch: nothing can be pushed before the
    /// helper has acknowledged it.
    ///
    /// # Errors
    /// `InvalidData` where the memory is not a ring's; else of mmap.
    pub fn open(memfd: OwnedFd, event: OwnedFd) -> io::Result<Self> {
        check_sealed(memfd.as_fd(), crate::uffd::bytes(layout::BYTES))?;
        let map = Mapping::shared(memfd.as_fd(), layout::BYTES)?;
        let mut ring = Self::new(memfd, event, map, 0);
        ring.epoch = ring.head(layout::EPOCH).load(Ordering::SeqCst);
        // Its owner may have been killed over saying so.
        ring.begin_service();
        ring.new_epoch();
        Ok(ring)
    }

    fn new(memfd: OwnedFd, event: OwnedFd, map: Mapping, epoch: u32) -> Self {
        Self { memfd, event, map, epoch, oldest: 0, next: 0, commands: [None; ENTRIES] }
    }

    /// The memory, to be sent to the client.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    /// The eventfd, to be sent to the client and polled; drain it with [`crate::shm::eventfd_drain`].
    pub fn eventfd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Asks for a command.
    ///
    /// # Errors
    /// [`RingError::Full`], [`RingError::EpochPending`].
    pub fn push(&mut self, command: Command) -> Result<RingTicket, RingError> {
        if self.free() == 0 {
            return Err(RingError::Full);
        }
        if self.head(layout::EPOCH_ACK).load(Ordering::SeqCst) != self.epoch && self.epoch != 1 {
            return Err(RingError::EpochPending);
        }
        let index = slot(self.next);
        let [op, a, b, len] = command.encode();
        self.field(index, layout::OP).store(op, Ordering::Relaxed);
        self.field(index, layout::A).store(a, Ordering::Relaxed);
        self.field(index, layout::B).store(b, Ordering::Relaxed);
        self.field(index, layout::LEN).store(len, Ordering::Relaxed);
        let word = layout::word(self.epoch, self.next, layout::QUEUED);
        self.field(index, layout::WORD).store(word, Ordering::Release);
        if let Some(place) = self.commands.get_mut(index) {
            *place = Some(command);
        }
        let ticket = RingTicket::new(self.epoch, self.next);
        self.next = self.next.wrapping_add(1);
        self.ring_doorbell(false);
        Ok(ticket)
    }

    /// Takes a command back. `true`: it will never run, and [`RingOwner::poll`] reports it as cancelled.
    /// `false`: it runs, has run, or is not outstanding.
    pub fn cancel(&mut self, ticket: RingTicket) -> bool {
        let Some(sequence) = self.sequence(ticket) else { return false };
        let queued = layout::word(self.epoch, sequence, layout::QUEUED);
        let cancelled = layout::word(self.epoch, sequence, layout::CANCELLED);
        self.field(slot(sequence), layout::WORD)
            .compare_exchange(queued, cancelled, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// The next command that has ended, if any.
    ///
    /// # Errors
    /// [`RingError::Broken`]: the memory holds what no helper writes. The command stays outstanding.
    pub fn poll(&mut self) -> Result<Option<(RingTicket, Completion)>, RingError> {
        let mut sequence = self.oldest;
        while sequence != self.next {
            let index = slot(sequence);
            if let Some(command) = self.commands.get(index).copied().flatten()
                && let Some(completion) = self.look(sequence, &command)?
            {
                if let Some(place) = self.commands.get_mut(index) {
                    *place = None;
                }
                self.skip_reported();
                return Ok(Some((RingTicket::new(self.epoch, sequence), completion)));
            }
            sequence = sequence.wrapping_add(1);
        }
        Ok(None)
    }

    fn look(&self, sequence: u32, command: &Command) -> Result<Option<Completion>, RingError> {
        let index = slot(sequence);
        let word = self.field(index, layout::WORD).load(Ordering::SeqCst);
        let state = word & 0xff;
        if word != layout::word(self.epoch, sequence, state) {
            return Err(RingError::Broken);
        }
        match state {
            layout::QUEUED | layout::TAKEN => Ok(None),
            layout::CANCELLED => Ok(Some(Completion::Cancelled)),
            layout::DONE => {
                let bytes = self.field(index, layout::RESULT_BYTES).load(Ordering::Relaxed);
                let errno = self.field(index, layout::RESULT_ERRNO).load(Ordering::Relaxed);
                match i32::try_from(errno) {
                    Ok(errno)
                        if errno < 4096
                            && bytes <= command.len()
                            && bytes.is_multiple_of(page_size())
                            && (errno == 0) == (bytes == command.len()) =>
                    {
                        Ok(Some(Completion::Done { bytes, errno }))
                    }
                    _ => Err(RingError::Broken),
                }
            }
            _ => Err(RingError::Broken),
        }
    }

    fn skip_reported(&mut self) {
        while self.oldest != self.next
            && self.commands.get(slot(self.oldest)).is_some_and(Option::is_none)
        {
            self.oldest = self.oldest.wrapping_add(1);
        }
    }

    /// What was asked for, while it is outstanding.
    pub fn command(&self, ticket: RingTicket) -> Option<Command> {
        self.commands.get(slot(self.sequence(ticket)?)).copied().flatten()
    }

    /// Commands that were not reported yet, oldest first.
    pub fn outstanding(&self) -> impl Iterator<Item = (RingTicket, Command)> + '_ {
        let count = self.next.wrapping_sub(self.oldest);
        (0..count).filter_map(|i| {
            let sequence = self.oldest.wrapping_add(i);
            let command = self.commands.get(slot(sequence)).copied().flatten()?;
            Some((RingTicket::new(self.epoch, sequence), command))
        })
    }

    /// Entries that [`RingOwner::push`] can take.
    pub fn free(&self) -> usize {
        let used = usize::try_from(self.next.wrapping_sub(self.oldest)).unwrap_or(ENTRIES);
        ENTRIES.saturating_sub(used)
    }

    /// While set, the helper signals the eventfd after a completion, once for each time it is set.
    pub fn set_sleeping(&self, sleeping: bool) {
        self.head(layout::OWNER_SLEEPS).store(u32::from(sleeping), Ordering::SeqCst);
    }

    /// Begins a new epoch. Outstanding commands are forgotten; whether they ran, pagemap must tell once
    /// the epoch is acknowledged.
    pub fn new_epoch(&mut self) {
        // 0 is what a helper starts with, and 1 what a ring starts with.
        self.epoch = self.epoch.wrapping_add(1).max(2);
        self.forget();
        self.head(layout::EPOCH).store(self.epoch, Ordering::SeqCst);
        self.ring_doorbell(true);
    }

    /// Takes back what was asked for in former epochs and nobody has taken: a helper that is stopped cannot
    /// acknowledge. `true`: no command of a former epoch runs or will run, as after an acknowledgement, but for
    /// which nothing can be pushed. `false`: one was taken, and is unanswered.
    pub fn revoke_former(&self) -> bool {
        (0..ENTRIES).all(|index| {
            let word = self.field(index, layout::WORD);
            let mut seen = word.load(Ordering::SeqCst);
            while seen & 0xff == layout::QUEUED && seen >> 32 != u64::from(self.epoch) {
                let cancelled = seen & !0xff | layout::CANCELLED;
                match word.compare_exchange(seen, cancelled, Ordering::SeqCst, Ordering::SeqCst) {
                    Ok(_) => seen = cancelled,
                    Err(now) => seen = now,
                }
            }
            seen & 0xff != layout::TAKEN
        })
    }

    /// Whether no command of a former epoch runs or will run, and new ones can be pushed.
    pub fn epoch_acknowledged(&self) -> bool {
        self.head(layout::EPOCH_ACK).load(Ordering::SeqCst) == self.epoch
    }

    /// Forgets all outstanding commands and gives them back, once the helper is known to be dead. A command
    /// given back may have run, wholly or in part.
    pub fn forget_all(&mut self) -> Vec<(RingTicket, Command)> {
        let all = self.outstanding().collect();
        self.forget();
        all
    }

    fn forget(&mut self) {
        self.commands = [None; ENTRIES];
        self.oldest = 0;
        self.next = 0;
    }

    /// From now on the helper keeps the client's memory for a while when the client ends: until then nobody
    /// else can need it, and a daemon that was killed over an attach knows of no helper to stop.
    pub fn begin_service(&self) {
        self.head(layout::IN_SERVICE).store(1, Ordering::SeqCst);
    }

    /// Tells the helper to end; the ring is of no use afterwards.
    pub fn stop(&self) {
        self.head(layout::STOP).store(1, Ordering::SeqCst);
        self.ring_doorbell(true);
    }

    fn ring_doorbell(&self, always: bool) {
        let doorbell = self.head(layout::DOORBELL);
        doorbell.fetch_add(1, Ordering::SeqCst);
        let slept = self.head(layout::HELPER_SLEEPS).swap(0, Ordering::SeqCst) != 0;
        if slept || always {
            wake(doorbell);
        }
    }

    /// The sequence of a ticket that is outstanding.
    fn sequence(&self, ticket: RingTicket) -> Option<u32> {
        let sequence = u32::try_from(ticket.0 & u64::from(u32::MAX)).ok()?;
        let of_epoch = ticket.0 >> 32 == u64::from(self.epoch);
        let age = sequence.wrapping_sub(self.oldest);
        let inside = age < self.next.wrapping_sub(self.oldest);
        let held = self.commands.get(slot(sequence)).is_some_and(Option::is_some);
        (of_epoch && inside && held).then_some(sequence)
    }

    fn head(&self, offset: usize) -> &AtomicU32 {
        match self.map.u32(offset) {
            Some(word) => word,
            None => unreachable!("offsets of the head are constants below the size of the ring"),
        }
    }

    fn field(&self, index: usize, field: usize) -> &AtomicU64 {
        let offset = layout::FIRST_ENTRY + index % ENTRIES * layout::ENTRY_BYTES + field;
        match self.map.u64(offset) {
            Some(word) => word,
            None => unreachable!("entries lie below the size of the ring, asserted in `layout`"),
        }
    }
}

/// Wakes everyone who waits on a futex in shared memory.
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE reads nothing; `word` is a live, aligned address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// The entry of a sequence.
const fn slot(sequence: u32) -> usize {
    sequence as usize % ENTRIES
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
