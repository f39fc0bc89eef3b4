//! Userfaultfd messages, from the read to their effects.
//!
//! The kernel gives a message once: who reads it and dies has lost a sleeping thread, or the only
//! descriptor of a forked child. So the kernel writes straight into the state file, one page of it
//! for each process; a message counts from the moment at which it is there (its first byte, the kind, is
//! never 0) until it is retired, which is after its effects have begun. A new daemon steps what it
//! finds again: faults are asked again anyway, an unmap twice is an unmap, and a fork is known by its
//! descriptor.

use crate::error::EngineError;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use tiermgr_core::limits::PROCS_MAX;
use tiermgr_core::units::ProcId;
use tiermgr_sys::process::page_size;
use tiermgr_sys::shm::{SharedFile, SharedSlice};
use tiermgr_sys::uffd::{Message, Msg, Uffd};

/// Messages of one process that can be under way.
pub const MESSAGES_MAX: usize = 128;
const MESSAGE_BYTES: u64 = 32;
const BATCH_BYTES: u64 = MESSAGES_MAX as u64 * MESSAGE_BYTES;

/// Bytes of the file.
#[must_use]
pub fn file_bytes() -> u64 {
    (PROCS_MAX as u64 + 1) * stride()
}

fn stride() -> u64 {
    BATCH_BYTES.max(page_size())
}

/// The message buffers of a family.
#[derive(Debug)]
pub struct Messages {
    file: SharedFile,
    path: PathBuf,
}

impl Messages {
    pub(crate) const fn new(file: SharedFile, path: PathBuf) -> Self {
        Self { file, path }
    }

    /// Locks the buffer of `proc` in memory, empty. Before the first read.
    ///
    /// # Errors
    /// [`EngineError::State`] where the memory cannot be had.
    pub fn prepare(&self, proc: ProcId) -> Result<(), EngineError> {
        self.allocate(proc)?;
        self.retire(proc, MESSAGES_MAX);
        self.lock(proc)
    }

    /// Locks the buffer of `proc` in memory as it is.
    ///
    /// # Errors
    /// [`EngineError::State`] where the memory cannot be had.
    pub fn lock(&self, proc: ProcId) -> Result<(), EngineError> {
        self.allocate(proc)?;
        self.file
            .lock(offset(proc), stride())
            .map_err(EngineError::state("locking the message buffers", &self.path))
    }

    /// Takes memory for the buffer of `proc`: to look at one that is not there takes it too.
    ///
    /// # Errors
    /// [`EngineError::State`] where there is none.
    pub(crate) fn allocate(&self, proc: ProcId) -> Result<(), EngineError> {
        self.file
            .allocate(offset(proc), stride())
            .map_err(EngineError::state("making room for message buffers in", &self.path))
    }

    /// Reads what is queued on `uffd`, at most [`MESSAGES_MAX`] messages. All earlier ones must have
    /// been retired.
    ///
    /// # Errors
    /// What the kernel says; nothing queued is 0 messages, not an error.
    pub fn read(&self, proc: ProcId, uffd: &Uffd) -> io::Result<usize> {
        let slice = self.slice(proc).ok_or(io::ErrorKind::InvalidInput)?;
        uffd.read_messages_into(&slice)
    }

    /// A message that was read and not retired.
    #[must_use]
    pub fn get(&self, proc: ProcId, at: usize) -> Option<Msg> {
        let message = self.slice(proc)?.message(at)?;
        (message.words()[0] != 0).then_some(message)
    }

    /// All messages that were read and not retired.
    #[must_use]
    pub fn pending(&self, proc: ProcId) -> Vec<Msg> {
        (0..MESSAGES_MAX).filter_map(|at| self.get(proc, at)).collect()
    }

    /// Forgets the first `count` messages: their effects have begun.
    pub fn retire(&self, proc: ProcId, count: usize) {
        let Some(slice) = self.slice(proc) else { return };
        for at in 0..count.min(MESSAGES_MAX) {
            if let Some(word) = slice.word(at * 4) {
                word.store(0, Ordering::Release);
            }
        }
    }

    /// Forgets the forks among the messages of `proc`, whose descriptors are in a table that is gone.
    /// Gives how many there were.
    pub fn forget_forks(&self, proc: ProcId) -> usize {
        let forks = (0..MESSAGES_MAX).filter(|&at| {
            let message = self.get(proc, at).and_then(|message| message.parse());
            let word = self.slice(proc).and_then(|slice| {
                let word = slice.word(at * 4)?;
                matches!(message, Some(Message::Fork { .. }))
                    .then(|| word.store(0, Ordering::Release))
            });
            word.is_some()
        });
        forks.count()
    }

    fn slice(&self, proc: ProcId) -> Option<SharedSlice<'_>> {
        self.file.slice(offset(proc), BATCH_BYTES)
    }
}

fn offset(proc: ProcId) -> u64 {
    u64::from(proc.0) * stride()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn messages_are_pending_until_they_are_retired() {
        let scratch = Scratch::new();
        let path = scratch.path("messages");
        let messages =
            Messages::new(SharedFile::create(&path, file_bytes()).unwrap(), path.clone());
        messages.prepare(ProcId(3)).unwrap();
        for at in 0..5_u64 {
            let slice = messages.slice(ProcId(3)).unwrap();
            let first = usize::try_from(at).unwrap() * 4;
            slice.word(first + 1).unwrap().store(at, Ordering::Release);
            slice.word(first).unwrap().store(0x12, Ordering::Release);
        }
        let reloaded = Messages::new(SharedFile::open(&path).unwrap(), path);
        let seen: Vec<u64> =
            reloaded.pending(ProcId(3)).iter().map(|message| message.words()[1]).collect();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        assert!(reloaded.pending(ProcId(2)).is_empty());
        messages.retire(ProcId(3), 5);
        assert!(reloaded.pending(ProcId(3)).is_empty());
    }
}
