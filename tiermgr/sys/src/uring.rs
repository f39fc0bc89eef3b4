//! io_uring with registered buffers and files.
//!
//! The ring owns its buffers, so that a range that an operation in flight reads or writes cannot be
//! touched meanwhile: [`Ring::buffer`] and [`Ring::buffer_mut`] refuse it, and so do operations that would
//! overlap. Ranges in flight are few (at most the entries of the ring), so a look through them costs less
//! than the copy that follows.
//!
//! When a ring is dropped, or its process killed, operations in flight still end: a write to a disk may
//! land seconds later. The lock on the store says when that is over ([`crate::disk`]).

use crate::memory::AnonBuffer;
use io_uring::{IoUring, opcode, squeue, types};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

/// Files that a ring can have at most.
pub const FILES_MAX: u32 = 16;

/// Completions of operations that the caller does not hear of.
const QUIET: u64 = u64::MAX;

/// A registered file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIndex(u32);

/// Part of a registered buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// Which buffer, in the order of registration.
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

#[derive(Debug)]
struct Operation {
    user_data: u64,
    uses: Use,
}

/// An io_uring.
pub struct Ring {
    // Dropped before the buffers: the kernel's claim on them ends with the ring.
    ring: IoUring,
    buffers: Vec<AnonBuffer>,
    files: u32,
    /// By the number that the kernel knows an operation by.
    operations: Vec<Option<Operation>>,
    free: Vec<usize>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("buffers", &self.buffers)
            .field("files", &self.files)
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes a ring for `entries` operations a submission (a power of two) and four times as many in flight.
    ///
    /// # Errors
    /// A [`SetupError`] inside where the cause is known; else the errno of io_uring_setup.
    pub fn new(entries: u32) -> io::Result<Self> {
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
        let in_flight = usize::try_from(entries).map_err(io::Error::other)? * 4;
        Ok(Self {
            ring,
            buffers: Vec::new(),
            files: 0,
            operations: (0..in_flight).map(|_| None).collect(),
            free: (0..in_flight).rev().collect(),
        })
    }

    /// Registers buffers, once. The kernel pins them.
    ///
    /// # Errors
    /// ENOMEM: RLIMIT_MEMLOCK is in the way. EBUSY: done before.
    pub fn register_buffers(&mut self, buffers: Vec<AnonBuffer>) -> io::Result<()> {
        if !self.buffers.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let vectors: Vec<libc::iovec> = buffers
            .iter()
            .map(|b| libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: b.len() })
            .collect();
        // SAFETY: the buffers are mapped for as long as the ring lives, since it owns them and is dropped
        // first.
        unsafe { self.ring.submitter().register_buffers(&vectors) }?;
        self.buffers = buffers;
        Ok(())
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
        let buffer = self.buffers.get(range.index).ok_or(PushError::NoSuchRange)?;
        buffer.as_slice().get(range.bytes.clone()).ok_or(PushError::NoSuchRange)
    }

    /// Bytes of a buffer, to be written.
    ///
    /// # Errors
    /// [`PushError::Busy`] while an operation uses part of them; [`PushError::NoSuchRange`].
    pub fn buffer_mut(&mut self, range: &BufferRange) -> Result<&mut [u8], PushError> {
        if self.is_being_filled(range) || self.is_being_drained(range) {
            return Err(PushError::Busy);
        }
        let buffer = self.buffers.get_mut(range.index).ok_or(PushError::NoSuchRange)?;
        buffer.as_mut_slice().get_mut(range.bytes.clone()).ok_or(PushError::NoSuchRange)
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
    pub fn read_fixed(
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
        let entry = opcode::ReadFixed::new(types::Fixed(file.0), pointer, len, index)
            .offset(offset)
            .build();
        self.push(entry, user_data, Use::Fills(into))
    }

    /// Writes a buffer to `offset` of a file. May end short.
    ///
    /// # Errors
    /// [`PushError`]; nothing is in flight then.
    pub fn write_fixed(
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
        let entry = opcode::WriteFixed::new(types::Fixed(file.0), pointer.cast_const(), len, index)
            .offset(offset)
            .build();
        self.push(entry, user_data, Use::Drains(from))
    }

    fn place(&self, range: &BufferRange) -> Result<(*mut u8, u32, u16), PushError> {
        let buffer = self.buffers.get(range.index).ok_or(PushError::NoSuchRange)?;
        let Range { start, end } = range.bytes;
        if start >= end || end > buffer.len() {
            return Err(PushError::NoSuchRange);
        }
        let len = u32::try_from(end - start).map_err(|_too_long| PushError::NoSuchRange)?;
        let index = u16::try_from(range.index).map_err(|_too_many| PushError::NoSuchRange)?;
        Ok((buffer.as_mut_ptr().wrapping_add(start), len, index))
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
        // SAFETY: a buffer that the entry names is owned by this ring, lies at the address given for as
        // long as the ring lives, and is neither read nor written by us in a way that conflicts until the
        // completion was taken (`operations`). Other entries name descriptors and integers only; a
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

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring keeps its descriptor open for as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

#[cfg(test)]
#[path = "uring_tests.rs"]
mod tests;
