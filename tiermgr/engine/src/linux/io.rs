//! The executor's io_uring: the store, the staging buffers, and everything that ends a sleep.
//!
//! The ring has a place for each staging buffer: the stream buffers first, a chunk each, that are lent for a
//! while; then the demand buffers, an extent each, that are put there when they are first used. What an
//! operation uses cannot be borrowed, or given back.

use super::token::Token;
use crate::error::EngineError;
use crate::room::FamilyId;
use crate::staging::Seat;
use crate::store::Store;
use crate::wake::Wake;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use tiermgr_core::effect::{BufRange, Buffer};
use tiermgr_core::event::Event;
use tiermgr_core::limits::{DEMAND_BUFFERS, STREAM_BUFFERS};
use tiermgr_core::units::{CHUNK_BYTES, EXTENT_BYTES, Geometry, OpId, SlotId, Tick, low_u32};
use tiermgr_sys::uring::{BufferRange, Completed, FileIndex, PushError, Ring};

/// Entries of the submission queue. When it is full, what is in it is submitted and there is room.
const ENTRIES: u32 = 256;
/// Tries of one read or write, the first included.
const TRIES_MAX: u8 = 4;
/// The pause before each further try.
const BACKOFF_NS: [u64; TRIES_MAX as usize - 1] = [5_000_000, 50_000_000, 250_000_000];
/// Pauses that the kernel asks for (EAGAIN, EINTR) are short and do not count as failures of the
/// device, but not without end either.
const BUSY_TRIES_MAX: u8 = 50;
const BUSY_BACKOFF_NS: u64 = 200_000;

const STREAM_BYTES: usize = low_u32(CHUNK_BYTES) as usize;
const DEMAND_BYTES: usize = low_u32(EXTENT_BYTES) as usize;
const PLACES: u16 = STREAM_BUFFERS + DEMAND_BUFFERS;
const _: () = assert!(DEMAND_BUFFERS as u32 <= u32::BITS);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

/// A read or write of the store that has not been answered.
#[derive(Clone, Debug)]
struct StoreOp {
    op: OpId,
    kind: Kind,
    slot: SlotId,
    range: BufferRange,
    offset: u64,
    failures: u8,
    pauses: u8,
    /// When to try again; `Tick::NEVER` while the device has it.
    again: Tick,
}

/// The io_uring of one executor.
#[derive(Debug)]
pub(super) struct Io {
    // Before the seat: it gives back what it was lent.
    ring: Ring,
    seat: Arc<Seat>,
    /// Demand buffers that are in their places.
    placed: u32,
    /// The manager has asked for one more stream buffer.
    wants_stream: bool,
    /// What it was told of others that wait for them.
    told_short: bool,
    file: FileIndex,
    store: Arc<Store>,
    family: FamilyId,
    geometry: Geometry,
    ops: Vec<Option<StoreOp>>,
    /// Operations that wait for another try.
    paused: usize,
    completed: Vec<Completed>,
    /// Failures that were followed by another try.
    pub(super) retries: u64,
}

impl Io {
    pub(super) fn new(
        store: Arc<Store>,
        family: FamilyId,
        geometry: Geometry,
        seat: Arc<Seat>,
    ) -> Result<Self, EngineError> {
        let mut ring =
            Ring::new(ENTRIES, PLACES).map_err(EngineError::kernel("setting up an io_uring"))?;
        let file = ring
            .register_file(store.file().as_fd())
            .map_err(EngineError::kernel("registering the store"))?;
        Ok(Self {
            ring,
            seat,
            placed: 0,
            wants_stream: false,
            told_short: false,
            file,
            store,
            family,
            geometry,
            ops: vec![None; usize::from(PLACES)],
            paused: 0,
            completed: Vec::with_capacity(ENTRIES as usize),
            retries: 0,
        })
    }

    /// The staged bytes; `None` where there is no such range, or an operation uses it.
    pub(super) fn staged(&self, range: BufRange) -> Option<&[u8]> {
        self.ring.buffer(&place(range)?).ok()
    }

    /// The same, to write to.
    pub(super) fn staged_mut(&mut self, range: BufRange) -> Option<&mut [u8]> {
        self.have(range.buf);
        self.ring.buffer_mut(&place(range)?).ok()
    }

    /// Puts a demand buffer into its place, unless it is there.
    fn have(&mut self, buffer: Buffer) {
        let Buffer::Demand(n) = buffer else { return };
        if n >= DEMAND_BUFFERS || self.placed & 1 << n != 0 {
            return;
        }
        let place = usize::from(STREAM_BUFFERS + n);
        match self.seat.small().map(|lease| self.ring.put(place..place + 1, lease)) {
            Some(Ok(_)) => self.placed |= 1 << n,
            refused => tracing::error!(n, ?refused, "a reserved buffer is not to be had"),
        }
    }

    /// The manager wants one more stream buffer. The event, if there is one; else `wake` says when to try
    /// again.
    pub(super) fn want_stream(&mut self, wake: &Arc<Wake>) -> Option<Event> {
        self.wants_stream = true;
        self.try_stream(wake)
    }

    /// The same, where it still wants one.
    pub(super) fn try_stream(&mut self, wake: &Arc<Wake>) -> Option<Event> {
        if !self.wants_stream {
            return None;
        }
        let lease = self.seat.borrow(wake)?;
        match self.ring.put(0..usize::from(STREAM_BUFFERS), lease) {
            Ok(place) => {
                self.wants_stream = false;
                Some(Event::StreamLent { stream: u16::try_from(place).unwrap_or(u16::MAX) })
            }
            Err(lease) => {
                tracing::error!("the manager wants more buffers than one family is lent");
                self.seat.give_back(lease);
                None
            }
        }
    }

    /// Gives a stream buffer back.
    pub(super) fn return_stream(&mut self, stream: u16) {
        match self.ring.take_out(usize::from(stream)) {
            Ok(lease) => self.seat.give_back(lease),
            // Kept: whoever got it would share it with the device.
            Err(error) => tracing::error!(%error, stream, "giving a buffer back"),
        }
    }

    /// Whether others wait for stream buffers, where that has changed since it was last asked.
    pub(super) fn short_changed(&mut self) -> Option<Event> {
        let short = self.seat.is_short();
        if short == self.told_short {
            return None;
        }
        self.told_short = short;
        Some(Event::StreamsShort { short })
    }

    /// Starts a write of whole extents, checksums first. `false`: not started, and never will be.
    pub(super) fn write(&mut self, op: OpId, from: BufRange, slot: SlotId) -> bool {
        self.have(from.buf);
        let Some(bytes) = self.staged(from) else { return false };
        if !self.store.sums().record(slot, bytes) {
            return false;
        }
        self.begin(op, Kind::Write, from, slot)
    }

    /// Starts a read of whole extents. `false`: not started, and never will be.
    pub(super) fn read(&mut self, op: OpId, slot: SlotId, to: BufRange) -> bool {
        self.have(to.buf);
        self.begin(op, Kind::Read, to, slot)
    }

    fn begin(&mut self, op: OpId, kind: Kind, range: BufRange, slot: SlotId) -> bool {
        let offset = self.store.offset_of(self.family, slot, u64::from(range.len));
        let (Some(offset), Some(range)) = (offset, place(range)) else {
            tracing::error!(?kind, ?slot, ?range, "no such slots or buffer");
            return false;
        };
        let at = self.ops.iter().position(Option::is_none).unwrap_or(self.ops.len());
        let again = Tick::NEVER;
        let entry = StoreOp { op, kind, slot, range, offset, failures: 0, pauses: 0, again };
        if at == self.ops.len() {
            self.ops.push(None);
        }
        self.ops[at] = Some(entry);
        if self.submit_op(at) {
            true
        } else {
            self.ops[at] = None;
            false
        }
    }

    /// Hands operation `at` to the device at once: whoever starts work next may keep us for long.
    fn submit_op(&mut self, at: usize) -> bool {
        let Some(Some(entry)) = self.ops.get(at) else { return false };
        let token = Token::Store(u32::try_from(at).unwrap_or(u32::MAX)).encode();
        let (kind, range, offset) = (entry.kind, entry.range.clone(), entry.offset);
        let file = self.file;
        let pushed = self.with_room(|ring| match kind {
            Kind::Read => ring.read(file, range.clone(), offset, token),
            Kind::Write => ring.write(file, range.clone(), offset, token),
        });
        match pushed {
            Ok(()) => {
                self.submit();
                true
            }
            Err(error) => {
                tracing::error!(%error, "queueing store i/o");
                false
            }
        }
    }

    /// Whether the device has nothing of ours.
    pub(super) fn is_idle(&self) -> bool {
        self.ops.iter().all(Option::is_none)
    }

    /// Polls once; the completion carries `token`.
    pub(super) fn poll(&mut self, fd: BorrowedFd<'_>, token: Token) -> bool {
        let pushed = self.with_room(|ring| ring.poll_once(fd, token.encode()));
        if let Err(error) = &pushed {
            tracing::error!(%error, ?token, "queueing a poll");
        }
        pushed.is_ok()
    }

    /// Ends a poll, if it has not completed.
    pub(super) fn poll_cancel(&mut self, token: Token) {
        if let Err(error) = self.with_room(|ring| ring.poll_cancel(token.encode())) {
            tracing::error!(%error, ?token, "cancelling a poll");
        }
    }

    fn with_room(
        &mut self,
        mut push: impl FnMut(&mut Ring) -> Result<(), PushError>,
    ) -> Result<(), PushError> {
        match push(&mut self.ring) {
            Err(PushError::Full) => {
                self.submit();
                push(&mut self.ring)
            }
            done => done,
        }
    }

    pub(super) fn submit(&mut self) {
        if let Err(error) = self.ring.submit() {
            tracing::error!(%error, "submitting to io_uring");
        }
    }

    /// Submits and sleeps until something completes, no longer than `timeout`.
    pub(super) fn sleep(&mut self, timeout: Option<Duration>) {
        if let Err(error) = self.ring.wait(timeout) {
            tracing::error!(%error, "waiting in io_uring");
            // Whatever it is, it must not make a loop without a pause of it.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes what has completed: store operations become events, the rest go to `other`.
    pub(super) fn reap(&mut self, now: Tick, events: &mut Vec<Event>, others: &mut Vec<Token>) {
        let mut completed = std::mem::take(&mut self.completed);
        self.ring.completions(&mut completed);
        for done in completed.drain(..) {
            match Token::decode(done.user_data) {
                Some(Token::Store(at)) => {
                    events.extend(self.store_done(now, at as usize, done.result));
                }
                Some(token) => others.push(token),
                None => {}
            }
        }
        self.completed = completed;
        if self.paused > 0 {
            self.resume(now);
        }
    }

    /// When a paused operation is to be tried again.
    pub(super) fn deadline(&self) -> Tick {
        if self.paused == 0 {
            return Tick::NEVER;
        }
        self.ops.iter().flatten().map(|op| op.again).min().unwrap_or(Tick::NEVER)
    }

    fn resume(&mut self, now: Tick) {
        for at in 0..self.ops.len() {
            let Some(Some(entry)) = self.ops.get_mut(at) else { continue };
            if entry.again > now {
                continue;
            }
            entry.again = Tick::NEVER;
            if self.submit_op(at) {
                self.paused -= 1;
            } else if let Some(Some(entry)) = self.ops.get_mut(at) {
                // The queue had no room even after a submit: look again a little later.
                entry.again = now.after_ns(BUSY_BACKOFF_NS);
            }
        }
    }

    fn store_done(&mut self, now: Tick, at: usize, result: Result<u32, i32>) -> Option<Event> {
        let entry = self.ops.get_mut(at)?.as_mut()?;
        let wanted = entry.range.bytes.len();
        let failure = match result {
            Ok(bytes) if bytes as usize == wanted => None,
            Ok(_) => Some(libc::EIO),
            Err(errno) => Some(errno),
        };
        if let Some(errno) = failure {
            let busy = matches!(errno, libc::EAGAIN | libc::EINTR | libc::EBUSY);
            let pause = if busy && entry.pauses < BUSY_TRIES_MAX {
                entry.pauses += 1;
                Some(BUSY_BACKOFF_NS)
            } else {
                entry.failures += 1;
                BACKOFF_NS.get(usize::from(entry.failures) - 1).copied()
            };
            if let Some(pause) = pause {
                entry.again = now.after_ns(pause);
                self.paused += 1;
                self.retries += u64::from(!busy);
                return None;
            }
            let error = std::io::Error::from_raw_os_error(errno);
            tracing::error!(
                %error, kind = ?entry.kind, slot = entry.slot.0, bytes = wanted,
                store = %self.store.path().display(), "store i/o failed {TRIES_MAX} times"
            );
        }
        let mut ok = failure.is_none();
        let entry = self.ops.get_mut(at)?.take()?;
        Some(match entry.kind {
            Kind::Write => Event::Written { op: entry.op, ok },
            Kind::Read => {
                let damaged = match self.ring.buffer(&entry.range) {
                    Ok(bytes) if ok => self.store.sums().damaged(entry.slot, bytes, self.geometry),
                    Ok(_) => 0,
                    Err(error) => {
                        tracing::error!(%error, "what was read is not to be seen");
                        ok = false;
                        0
                    }
                };
                if damaged != 0 {
                    tracing::error!(
                        slot = entry.slot.0, damaged = format_args!("{damaged:#x}"),
                        store = %self.store.path().display(),
                        "the store gave other bytes than were written"
                    );
                }
                Event::SlotsRead { op: entry.op, ok, damaged }
            }
        })
    }
}

/// The place of a staging buffer, and which bytes there.
fn place(range: BufRange) -> Option<BufferRange> {
    let (index, size) = match range.buf {
        Buffer::Stream(n) if n < STREAM_BUFFERS => (n, STREAM_BYTES),
        Buffer::Demand(n) if n < DEMAND_BUFFERS => (STREAM_BUFFERS + n, DEMAND_BYTES),
        _ => return None,
    };
    let (offset, len) = (range.offset as usize, range.len as usize);
    let end = offset.checked_add(len)?;
    let bytes = offset..end;
    (len > 0 && end <= size).then(|| BufferRange { index: usize::from(index), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_buffer_has_its_place_and_ranges_stay_inside() {
        let range = |buf, offset, len| {
            place(BufRange { buf, offset, len }).map(|range| (range.index, range.bytes))
        };
        let last_stream = Buffer::Stream(STREAM_BUFFERS - 1);
        let (chunk, last) = (u32::try_from(STREAM_BYTES).unwrap(), usize::from(STREAM_BUFFERS) - 1);
        assert_eq!(range(Buffer::Stream(0), 0, chunk), Some((0, 0..STREAM_BYTES)));
        assert_eq!(range(last_stream, chunk - 1, 1), Some((last, STREAM_BYTES - 1..STREAM_BYTES)));
        assert_eq!(range(last_stream, chunk - 1, 2), None);
        assert_eq!(range(Buffer::Stream(STREAM_BUFFERS), 0, 1), None);
        assert_eq!(range(Buffer::Demand(0), 0, 4096), Some((last + 1, 0..4096)));
        assert_eq!(range(Buffer::Demand(DEMAND_BUFFERS), 0, 1), None);
        assert_eq!(range(Buffer::Demand(0), u32::MAX, 1), None);
        assert_eq!(range(Buffer::Demand(0), 0, 0), None);
    }
}
