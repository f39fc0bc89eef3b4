//! io_uring with registered buffers and files.
//!
//! The ring holds the leases of its buffers, so that a range that an operation in flight reads or writes
//! cannot be touched meanwhile: [`Ring::buffer`] and [`Ring::buffer_mut`] refuse it, and so do operations
//! that would overlap. Ranges in flight are few (at most the entries of the ring), so a look through them
//! costs less than the copy that follows.
//!
//! A buffer is registered where it is first placed, if the kernel and the limit of locked memory allow:
//! that makes operations faster, and nothing else depends on it.
//!
//! When a ring is dropped, or its process killed, operations in flight still end: a write to a disk may
//! land seconds later. The lock on the store says when that is over ([`crate::disk`]). A lease that such an
//! operation uses is never given back.

use crate::pool::{BufferPool, Epoch, Lease};
use io_uring::{IoUring, opcode, squeue, types};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Files that a ring can have at most.
pub const FILES_MAX: u32 = 16;

/// Completions of operations that the caller does not hear of.
const QUIET: u64 = u64::MAX;

/// A registered file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIndex(u32);

/// Part of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// The place of the buffer.
    pub index: usize,
    /// Which bytes of it.
    pub bytes: Range<usize>,
}

impl BufferRange {
    fn overlaps(&self, other: &Self) -> bool {
        self.index == other.index
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

/// An operation that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// As given.
    pub user_data: u64,
    /// Bytes, or the mask of a poll; else the errno.
    pub result: Result<u32, i32>,
}

/// Why io_uring is not to be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The kernel was built without it.
    #[error("this kernel has no io_uring (CONFIG_IO_URING)")]
    Unsupported,
    /// An administrator or a container runtime forbids it.
    #[error(
        "io_uring is forbidden: set `sysctl kernel.io_uring_disabled=0`, or allow io_uring_setup in the \
         container's seccomp profile"
    )]
    Forbidden,
}

/// Why an operation was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// Take completions first.
    #[error("as many operations are in flight as the ring can hold")]
    Full,
    /// The caller's mistake.
    #[error("no such buffer, or a range outside of it")]
    NoSuchRange,
    /// The bytes belong to the kernel until the operation ends.
    #[error("the range is in use by an operation in flight")]
    Busy,
    /// The kernel refuses.
    #[error("submitting to io_uring")]
    Submit(#[source] io::Error),
}

#[derive(Debug)]
enum Use {
    /// The kernel writes these bytes of a buffer.
    Fills(BufferRange),
    /// The kernel reads these bytes of a buffer.
    Drains(BufferRange),
    Poll,
}

impl Use {
    const fn range(&self) -> Option<&BufferRange> {
        match self {
            Self::Fills(range) | Self::Drains(range) => Some(range),
            Self::Poll => None,
        }
    }
}

#[derive(Debug)]
struct Operation {
    user_data: u64,
    uses: Use,
}

/// Where a buffer can be.
#[derive(Debug, Default)]
struct Place {
    lease: Option<Lease>,
    /// What the kernel knows under this number: the address and its epoch, and whose memory it is, so that
    /// nothing else can be there as long as we compare these.
    registered: Option<(usize, Epoch, Arc<BufferPool>)>,
}

impl Place {
    fn knows(&self, lease: &Lease) -> bool {
        let wanted = (lease.as_mut_ptr().addr(), lease.epoch());
        self.registered.as_ref().is_some_and(|&(at, epoch, _)| (at, epoch) == wanted)
    }
}

/// An io_uring.
pub struct Ring {
    ring: IoUring,
    places: Vec<Place>,
    files: u32,
    /// By the number that the kernel knows an operation by.
    operations: Vec<Option<Operation>>,
    free: Vec<usize>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("places", &self.places)
            .field("files", &self.files)
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes a ring for `entries` operations a submission (a power of two) and four times as many in flight,
    /// with so many `places` for buffers.
    ///
    /// # Errors
    /// A [`SetupError`] inside where the cause is known; else the errno of io_uring_setup.
    pub fn new(entries: u32, places: u16) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(entries).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::ENOSYS) => {
                    io::Error::new(io::ErrorKind::Unsupported, SetupError::Unsupported)
                }
                Some(libc::EPERM) => {
                    io::Error::new(io::ErrorKind::PermissionDenied, SetupError::Forbidden)
                }
                _ => error,
            }
        })?;
        let none = [-1; FILES_MAX as usize];
        ring.submitter().register_files(&none)?;
        // Before Linux 5.19 there is no empty table: operations then name addresses.
        ring.submitter().register_buffers_sparse(u32::from(places)).ok();
        let in_flight = usize::try_from(entries).map_err(io::Error::other)? * 4;
        Ok(Self {
            ring,
            places: (0..places).map(|_| Place::default()).collect(),
            files: 0,
            operations: (0..in_flight).map(|_| None).collect(),
            free: (0..in_flight).rev().collect(),
        })
    }

    /// Puts a buffer into one of these places, into one where it was before if it can, and gives the
    /// place. May touch its memory.
    ///
    /// # Errors
    /// The lease, where no place of these is empty.
    pub fn put(&mut self, places: Range<usize>, lease: Lease) -> Result<usize, Lease> {
        let empty = |place: &Place| place.lease.is_none();
        let among = self.places.get(places.clone()).unwrap_or_default();
        let found = among
            .iter()
            .position(|place| empty(place) && place.knows(&lease))
            .or_else(|| among.iter().position(|place| empty(place) && place.registered.is_none()))
            .or_else(|| among.iter().position(empty));
        let Some(index) = found.map(|at| places.start + at) else { return Err(lease) };
        let Some(place) = self.places.get_mut(index) else { return Err(lease) };
        if !place.knows(&lease) {
            let vector = libc::iovec { iov_base: lease.as_mut_ptr().cast(), iov_len: lease.len() };
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            // SAFETY: the memory is mapped, and not moved, for as long as the pool lives, which `registered`
            // keeps until something else is registered in this place.
            let done =
                unsafe { self.ring.submitter().register_buffers_update(number, &[vector], None) };
            let pool = Arc::clone(lease.pool());
            let known = (lease.as_mut_ptr().addr(), lease.epoch(), pool);
            place.registered = done.is_ok().then_some(known);
        }
        place.lease = Some(lease);
        Ok(index)
    }

    /// Takes a buffer out of its place.
    ///
    /// # Errors
    /// [`PushError::Busy`] while an operation uses it; [`PushError::NoSuchRange`] where there is none.
    pub fn take_out(&mut self, index: usize) -> Result<Lease, PushError> {
        let is_it = |range: &BufferRange| range.index == index;
        if self.in_use().any(|uses| uses.range().is_some_and(is_it)) {
            return Err(PushError::Busy);
        }
        let place = self.places.get_mut(index).ok_or(PushError::NoSuchRange)?;
        place.lease.take().ok_or(PushError::NoSuchRange)
    }

    /// Whether the kernel knows the buffer in this place.
    #[must_use]
    pub fn is_registered(&self, index: usize) -> bool {
        let place = self.places.get(index);
        place.is_some_and(|place| place.lease.as_ref().is_some_and(|lease| place.knows(lease)))
    }

    fn lease(&self, index: usize) -> Result<&Lease, PushError> {
        let place = self.places.get(index).ok_or(PushError::NoSuchRange)?;
        place.lease.as_ref().ok_or(PushError::NoSuchRange)
    }

    /// Registers a file. The ring has its own reference: the caller may close `fd`.
    ///
    /// # Errors
    /// EMFILE: [`FILES_MAX`] are registered.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> io::Result<FileIndex> {
        if self.files == FILES_MAX {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        self.ring.submitter().register_files_update(self.files, &[fd.as_raw_fd()])?;
        self.files += 1;
        Ok(FileIndex(self.files - 1))
    }

    /// Bytes of a buffer.
    ///
    /// # Errors
    /// [`PushError::Busy`] while an operation fills part of them; [`PushError::NoSuchRange`].
    pub fn buffer(&self, range: &BufferRange) -> Result<&[u8], PushError> {
        if self.is_being_filled(range) {
            return Err(PushError::Busy);
        }
        let bytes = self.lease(range.index)?.as_slice();
        bytes.get(range.bytes.clone()).ok_or(PushError::NoSuchRange)
    }

    /// Bytes of a buffer, to be written.
    ///
    /// # Errors
    /// [`PushError::Busy`] while an operation uses part of them; [`PushError::NoSuchRange`].
    pub fn buffer_mut(&mut self, range: &BufferRange) -> Result<&mut [u8], PushError> {
        if self.is_being_filled(range) || self.is_being_drained(range) {
            return Err(PushError::Busy);
        }
        let place = self.places.get_mut(range.index).ok_or(PushError::NoSuchRange)?;
        let lease = place.lease.as_mut().ok_or(PushError::NoSuchRange)?;
        lease.as_mut_slice().get_mut(range.bytes.clone()).ok_or(PushError::NoSuchRange)
    }

    fn in_use(&self) -> impl Iterator<Item = &Use> {
        self.operations.iter().flatten().map(|operation| &operation.uses)
    }

    fn is_being_filled(&self, range: &BufferRange) -> bool {
        self.in_use().any(|uses| matches!(uses, Use::Fills(other) if range.overlaps(other)))
    }

    fn is_being_drained(&self, range: &BufferRange) -> bool {
        self.in_use().any(|uses| matches!(uses, Use::Drains(other) if range.overlaps(other)))
    }

    /// Reads from `offset` of a file into a buffer. May end short.
    ///
    /// # Errors
    /// [`PushError`]; nothing is in flight then.
    pub fn read(
        &mut self,
        file: FileIndex,
        into: BufferRange,
        offset: u64,
        user_data: u64,
    ) -> Result<(), PushError> {
        let (pointer, len, index) = self.place(&into)?;
        if self.is_being_filled(&into) || self.is_being_drained(&into) {
            return Err(PushError::Busy);
        }
        let (file, known) = (types::Fixed(file.0), self.is_registered(into.index));
        let entry = match known {
            true => opcode::ReadFixed::new(file, pointer, len, index).offset(offset).build(),
            false => opcode::Read::new(file, pointer, len).offset(offset).build(),
        };
        self.push(entry, user_data, Use::Fills(into))
    }

    /// Writes a buffer to `offset` of a file. May end short.
    ///
    /// # Errors
    /// [`PushError`]; nothing is in flight then.
    pub fn write(
        &mut self,
        file: FileIndex,
        from: BufferRange,
        offset: u64,
        user_data: u64,
    ) -> Result<(), PushError> {
        let (pointer, len, index) = self.place(&from)?;
        if self.is_being_filled(&from) {
            return Err(PushError::Busy);
        }
        let (file, known) = (types::Fixed(file.0), self.is_registered(from.index));
        let pointer = pointer.cast_const();
        let entry = match known {
            true => opcode::WriteFixed::new(file, pointer, len, index).offset(offset).build(),
            false => opcode::Write::new(file, pointer, len).offset(offset).build(),
        };
        self.push(entry, user_data, Use::Drains(from))
    }

    fn place(&self, range: &BufferRange) -> Result<(*mut u8, u32, u16), PushError> {
        let lease = self.lease(range.index)?;
        let Range { start, end } = range.bytes;
        if start >= end || end > lease.len() {
            return Err(PushError::NoSuchRange);
        }
        let len = u32::try_from(end - start).map_err(|_too_long| PushError::NoSuchRange)?;
        let index = u16::try_from(range.index).map_err(|_too_many| PushError::NoSuchRange)?;
        Ok((lease.as_mut_ptr().wrapping_add(start), len, index))
    }

    /// Completes once `fd` is readable.
    ///
    /// # Errors
    /// [`PushError`].
    pub fn poll_once(&mut self, fd: BorrowedFd<'_>, user_data: u64) -> Result<(), PushError> {
        let mask = u32::from(libc::POLLIN.unsigned_abs());
        let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), mask).build();
        self.push(entry, user_data, Use::Poll)
    }

    /// Ends all polls with this `user_data`; each completes with ECANCELED.
    ///
    /// # Errors
    /// [`PushError`].
    pub fn poll_cancel(&mut self, user_data: u64) -> Result<(), PushError> {
        for number in 0..self.operations.len() {
            let is_it = self
                .operations
                .get(number)
                .and_then(Option::as_ref)
                .is_some_and(|o| o.user_data == user_data && matches!(o.uses, Use::Poll));
            if is_it {
                let entry = opcode::PollRemove::new(crate::uffd::bytes(number)).build();
                self.enqueue(&entry.user_data(QUIET))?;
            }
        }
        Ok(())
    }

    fn push(&mut self, entry: squeue::Entry, user_data: u64, uses: Use) -> Result<(), PushError> {
        let number = self.free.pop().ok_or(PushError::Full)?;
        if let Some(place) = self.operations.get_mut(number) {
            *place = Some(Operation { user_data, uses });
        }
        let pushed = self.enqueue(&entry.user_data(crate::uffd::bytes(number)));
        if pushed.is_err() {
            self.release(number);
        }
        pushed
    }

    fn enqueue(&mut self, entry: &squeue::Entry) -> Result<(), PushError> {
        if self.ring.submission().is_full() {
            self.submit().map_err(PushError::Submit)?;
        }
        // SAFETY: a buffer that the entry names is leased to this ring, and stays so until the completion was
        // taken (`take_out`, `drop`); it lies at the address given, and is neither read nor written by us
        // in a way that conflicts meanwhile (`operations`). Other entries name descriptors and integers only; a
        // descriptor that is closed meanwhile makes the operation fail.
        unsafe { self.ring.submission().push(entry) }.map_err(|_full| PushError::Full)
    }

    fn release(&mut self, number: usize) -> Option<Operation> {
        let operation = self.operations.get_mut(number)?.take()?;
        self.free.push(number);
        Some(operation)
    }

    /// Operations that have not ended.
    pub fn in_flight(&self) -> usize {
        self.operations.len() - self.free.len()
    }

    /// Hands what was pushed to the kernel. Does not block.
    ///
    /// # Errors
    /// Of io_uring_enter; a queue of completions that is full is no error: take them.
    pub fn submit(&mut self) -> io::Result<()> {
        harmless(self.ring.submit())
    }

    /// Submits, and blocks until there is a completion, no longer than `timeout` (`None`: for ever).
    ///
    /// # Errors
    /// Of io_uring_enter; the end of the time and a signal are none.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let Some(timeout) = timeout else { return harmless(self.ring.submit_and_wait(1)) };
        if timeout.is_zero() {
            return self.submit();
        }
        let time = types::Timespec::new().sec(timeout.as_secs()).nsec(timeout.subsec_nanos());
        let args = types::SubmitArgs::new().timespec(&time);
        harmless(self.ring.submitter().submit_with_args(1, &args))
    }

    /// Appends what has ended to `out` and gives how many that were. Never blocks.
    pub fn completions(&mut self, out: &mut Vec<Completed>) -> usize {
        let before = out.len();
        let Self { ring, operations, free, .. } = self;
        for entry in ring.completion() {
            let Ok(number) = usize::try_from(entry.user_data()) else { continue };
            let Some(operation) = operations.get_mut(number).and_then(Option::take) else {
                continue;
            };
            free.push(number);
            let result = u32::try_from(entry.result()).map_err(|_negative| -entry.result());
            out.push(Completed { user_data: operation.user_data, result });
        }
        out.len() - before
    }
}

/// What is no failure of a submission: time is up, a signal came, completions must be taken first.
fn harmless(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Ok(_) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
            _ => Err(error),
        },
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel goes on with what is in flight after the ring has gone: nobody may get these bytes.
        let Self { operations, places, .. } = self;
        for range in operations.iter().flatten().filter_map(|operation| operation.uses.range()) {
            if let Some(lease) = places.get_mut(range.index).and_then(|place| place.lease.take()) {
                lease.never_free();
            }
        }
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring keeps its descriptor open for as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

#[cfg(test)]
#[path = "uring_tests.rs"]
mod tests;
