//! The family and its processes: what a new daemon must know to serve them on.
//!
//! Descriptors are numbers in the table that the daemon shares with its keeper; they stay open when a
//! daemon dies. When the keeper dies as well the numbers mean something else: each entry says of which
//! table it speaks. Each process has two copies of its entry, written in turn, each whole or not there; of
//! two the later counts.

use crate::state::{clear_entry, get_entry, halves, join, put_entry};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tiermgr_core::limits::PROCS_MAX;
use tiermgr_core::units::{Addr, ProcId, Span};
use tiermgr_sys::shm::{FileId, SharedFile};

/// Bytes before the first process.
const HEADER_BYTES: u64 = 4096;
const COPY_BYTES: u64 = 128;
const COPY_WORDS: usize = 16;
const ENTRY_BYTES: u64 = 2 * COPY_BYTES;
const FAMILY_WORDS: usize = 8;
/// Where the count of processes stands whose entries have memory.
const PLACES_OFFSET: u64 = 64;
/// Processes whose entries get memory at once: a page of them.
const PLACES_STEP: usize = 16;
/// Bytes of the file, all but the used part of it a hole.
pub const FILE_BYTES: u64 =
    (HEADER_BYTES + (PROCS_MAX as u64 + 1) * ENTRY_BYTES).next_multiple_of(64 << 10);

/// What is to be known of a family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FamilyInfo {
    /// Its number.
    pub family: u64,
    /// Limbo of each of its processes, in bytes.
    pub limbo_bytes: u64,
    /// Its pages leave by `UFFDIO_MOVE`.
    pub has_move: bool,
    /// 0 bulk, 1 standard, 2 latency.
    pub class: u32,
}

/// No descriptor.
pub const NO_FD: RawFd = -1;

/// What is to be known of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcEntry {
    /// Its number, from 1 to `PROCS_MAX`.
    pub proc: ProcId,
    /// Who forked it; 0 for the client itself.
    pub parent: ProcId,
    /// As the daemon's pid namespace numbers it; 0 where a forked child has not shown itself.
    pub pid: i32,
    /// When `pid` started, in clock ticks since boot: tells a process from a later one of its number.
    pub start_time: u64,
    /// Its helper, 0 where there is none.
    pub helper_pid: i32,
    /// When the helper started.
    pub helper_start_time: u64,
    /// Userfaultfd of the arenas.
    pub arena_fd: RawFd,
    /// Userfaultfd of limbo.
    pub limbo_fd: RawFd,
    /// The ring's memfd.
    pub ring_fd: RawFd,
    /// The ring's eventfd.
    pub ring_event_fd: RawFd,
    /// The ring itself, whatever number it is open under.
    pub ring_id: FileId,
    /// The nonce page.
    pub nonce_page: u64,
    /// Limbo; empty where there is none.
    pub limbo: Span,
    /// Its end has been told to the manager.
    pub gone: bool,
    /// It has its parent's table: its fork has been followed to the end. Always for a client.
    pub born: bool,
    /// The descriptor table in which the numbers above stand
    /// ([`ExecutorConfig::table`](crate::executor::ExecutorConfig::table)).
    pub table: u64,
}

/// All processes of a family.
#[derive(Debug)]
pub struct ProcDirectory {
    file: SharedFile,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    /// Number of the last put.
    number: u64,
    /// Processes up to this number have memory for their entries; beyond it nothing may be touched.
    places: usize,
}

/// Whether anything stands where the family does, be it damaged.
///
/// # Errors
/// ENOSPC where to look at it takes memory that is not there.
pub(crate) fn has_family_entry(file: &SharedFile) -> io::Result<bool> {
    file.allocate(0, HEADER_BYTES)?;
    let words = file.words(0, FAMILY_WORDS).unwrap_or_default();
    Ok(words.first().is_some_and(|seal| seal.load(Ordering::Acquire) != 0))
}

/// Bytes up to the end of the entry of the process in `place`.
const fn bytes_up_to(place: usize) -> u64 {
    HEADER_BYTES + (place as u64 + 1) * ENTRY_BYTES
}

impl ProcDirectory {
    /// The directory in `file`, with whatever is there already.
    ///
    /// # Errors
    /// ENOSPC.
    pub(crate) fn new(file: SharedFile) -> io::Result<Self> {
        file.allocate(0, HEADER_BYTES)?;
        let directory = Self { file, index: Mutex::default() };
        let mut index = directory.lock();
        let counted = directory.counted().map_or(0, |word| word.load(Ordering::Acquire));
        let counted = usize::try_from(counted).unwrap_or(PROCS_MAX);
        directory.take(&mut index, counted.clamp(PLACES_STEP, PROCS_MAX))?;
        let entries = (1..=index.places).filter_map(|at| directory.latest(&index, at));
        let last = entries.map(|(_, number, _)| number).max();
        index.number = last.unwrap_or(0);
        drop(index);
        Ok(directory)
    }

    /// Takes memory for the entry of `proc`, before its first put, and as far as there is any for some
    /// that come after it: the child of a fork has nobody to refuse it to.
    ///
    /// # Errors
    /// ENOSPC where there is none for `proc` itself.
    pub fn reserve(&self, proc: ProcId) -> io::Result<()> {
        let Some(at) = place(proc) else { return Err(io::ErrorKind::InvalidInput.into()) };
        let mut index = self.lock();
        let wanted = (at + PLACES_STEP).min(PROCS_MAX);
        if index.places >= wanted {
            return Ok(());
        }
        let taken = self.take(&mut index, wanted.next_multiple_of(PLACES_STEP).min(PROCS_MAX));
        if index.places < at { taken } else { Ok(()) }
    }

    fn take(&self, index: &mut Index, places: usize) -> io::Result<()> {
        self.file.allocate(0, bytes_up_to(places))?;
        // Counted before anything is put there: a new daemon looks no further.
        if let Some(word) = self.counted() {
            word.store(places as u64, Ordering::Release);
        }
        index.places = places;
        Ok(())
    }

    fn counted(&self) -> Option<&AtomicU64> {
        self.file.at_u64(PLACES_OFFSET)
    }

    pub(crate) fn put_family(&self, info: &FamilyInfo) {
        if let Some(words) = self.file.words(0, FAMILY_WORDS) {
            let mut values = [0; FAMILY_WORDS - 1];
            values[0] = info.family;
            values[1] = info.limbo_bytes;
            values[2] = join(info.class, u32::from(info.has_move));
            put_entry(words, &values);
        }
    }

    /// The family; `None` where its making was cut short.
    #[must_use]
    pub fn family(&self) -> Option<FamilyInfo> {
        let [family, limbo_bytes, class_move, ..]: [u64; FAMILY_WORDS - 1] =
            get_entry(self.file.words(0, FAMILY_WORDS)?)?;
        let (class, has_move) = halves(class_move);
        Some(FamilyInfo { family, limbo_bytes, has_move: has_move != 0, class })
    }

    /// Adds a process, for whose entry memory has been taken ([`ProcDirectory::reserve`]), or replaces what is
    /// known of it.
    pub fn put(&self, entry: &ProcEntry) {
        let Some(at) = place(entry.proc) else {
            debug_assert!(false, "{:?} has no place", entry.proc);
            return;
        };
        let mut index = self.lock();
        debug_assert!(at <= index.places, "no memory was taken for {:?}", entry.proc);
        index.number += 1;
        // The copy that does not count now.
        let copy = self.latest(&index, at).map_or(0, |(copy, ..)| 1 - copy);
        if let Some(words) = self.words(&index, at, copy) {
            put_entry(words, &encode(entry, index.number));
        }
    }

    /// Takes a process out.
    pub fn remove(&self, proc: ProcId) {
        let Some(at) = place(proc) else { return };
        let index = self.lock();
        let latest = self.latest(&index, at).map_or(0, |(copy, ..)| copy);
        // The older copy first: in the other order a kill in between would bring it back.
        for copy in [1 - latest, latest] {
            if let Some(words) = self.words(&index, at, copy) {
                clear_entry(words);
            }
        }
    }

    /// What is known of a process.
    #[must_use]
    pub fn get(&self, proc: ProcId) -> Option<ProcEntry> {
        self.latest(&self.lock(), place(proc)?).map(|(.., entry)| entry)
    }

    /// All processes, by ascending number.
    #[must_use]
    pub fn all(&self) -> Vec<ProcEntry> {
        let index = self.lock();
        let entries = (1..=index.places).filter_map(|at| self.latest(&index, at));
        entries.map(|(.., entry)| entry).collect()
    }

    /// Which copy counts, its number, and what it says.
    fn latest(&self, index: &Index, at: usize) -> Option<(u64, u64, ProcEntry)> {
        (0..2)
            .filter_map(|copy| {
                let (entry, number) = decode(self.words(index, at, copy)?)?;
                Some((copy, number, entry))
            })
            .max_by_key(|&(_, number, _)| number)
    }

    fn words(&self, index: &Index, at: usize, copy: u64) -> Option<&[AtomicU64]> {
        if at > index.places {
            return None;
        }
        let offset = HEADER_BYTES + at as u64 * ENTRY_BYTES + copy * COPY_BYTES;
        self.file.words(offset, COPY_WORDS)
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn place(proc: ProcId) -> Option<usize> {
    usize::try_from(proc.0).ok().filter(|at| (1..=PROCS_MAX).contains(at))
}

const fn join_fds(high: RawFd, low: RawFd) -> u64 {
    join(high.cast_unsigned(), low.cast_unsigned())
}

const fn split_fds(word: u64) -> (RawFd, RawFd) {
    let (high, low) = halves(word);
    (high.cast_signed(), low.cast_signed())
}

fn encode(entry: &ProcEntry, number: u64) -> [u64; COPY_WORDS - 1] {
    [
        number,
        join(entry.proc.0, entry.parent.0),
        join_fds(entry.pid, entry.helper_pid),
        entry.start_time,
        entry.helper_start_time,
        join_fds(entry.arena_fd, entry.limbo_fd),
        join_fds(entry.ring_fd, entry.ring_event_fd),
        entry.nonce_page,
        entry.limbo.start.0,
        entry.limbo.len,
        u64::from(entry.gone) | u64::from(entry.born) << 1,
        entry.table,
        entry.ring_id.device,
        entry.ring_id.inode,
        0,
    ]
}

fn decode(words: &[AtomicU64]) -> Option<(ProcEntry, u64)> {
    let values: [u64; COPY_WORDS - 1] = get_entry(words)?;
    let [
        number,
        ids,
        pids,
        start,
        helper_start,
        uffds,
        ring,
        nonce,
        limbo,
        limbo_len,
        flags,
        table,
        device,
        inode,
        _,
    ] = values;
    let (proc, parent) = halves(ids);
    let (pid, helper_pid) = split_fds(pids);
    let (arena_fd, limbo_fd) = split_fds(uffds);
    let (ring_fd, ring_event_fd) = split_fds(ring);
    let entry = ProcEntry {
        proc: ProcId(proc),
        parent: ProcId(parent),
        pid,
        start_time: start,
        helper_pid,
        helper_start_time: helper_start,
        arena_fd,
        limbo_fd,
        ring_fd,
        ring_event_fd,
        ring_id: FileId { device, inode },
        nonce_page: nonce,
        limbo: Span::new(Addr(limbo), limbo_len),
        gone: flags & 1 != 0,
        born: flags & 2 != 0,
        table,
    };
    Some((entry, number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::os::unix::fs::MetadataExt;

    fn entry(proc: u32, pid: i32) -> ProcEntry {
        ProcEntry {
            proc: ProcId(proc),
            parent: ProcId(1),
            pid,
            start_time: 99,
            helper_pid: 12,
            helper_start_time: 100,
            arena_fd: 7,
            limbo_fd: NO_FD,
            ring_fd: 9,
            ring_event_fd: 10,
            ring_id: FileId { device: 1, inode: u64::MAX },
            nonce_page: 0x7fff_0000,
            limbo: Span::new(Addr(1 << 40), 8 << 20),
            gone: false,
            born: true,
            table: 77,
        }
    }

    fn open(scratch: &Scratch) -> ProcDirectory {
        let path = scratch.path("procs");
        let file = SharedFile::open(&path)
            .unwrap_or_else(|_| SharedFile::create(&path, FILE_BYTES).unwrap());
        ProcDirectory::new(file).unwrap()
    }

    fn held(scratch: &Scratch) -> u64 {
        std::fs::metadata(scratch.path("procs")).unwrap().blocks() * 512
    }

    #[test]
    fn memory_is_taken_for_those_that_are_there_and_some_more() {
        let scratch = Scratch::new();
        let directory = open(&scratch);
        // Each end of what is taken is rounded up to a page.
        let rounding = 3 * tiermgr_sys::process::page_size();
        assert!(held(&scratch) <= rounding, "{} bytes for nobody", held(&scratch));
        for number in 1..=40 {
            directory.reserve(ProcId(number)).unwrap();
            directory.put(&entry(number, 7));
        }
        let taken = bytes_up_to(56);
        assert!((taken..taken + rounding).contains(&held(&scratch)), "{}", held(&scratch));
        drop(directory);
        let before = held(&scratch);
        let directory = open(&scratch);
        assert_eq!(directory.all().len(), 40);
        assert_eq!(directory.get(ProcId(1000)), None);
        directory.remove(ProcId(1001));
        assert_eq!(held(&scratch), before, "to look at what is not there takes no memory");
        assert!(directory.reserve(ProcId(0)).is_err());
    }

    #[test]
    fn what_was_put_last_is_what_a_reload_finds() {
        let scratch = Scratch::new();
        let directory = open(&scratch);
        let last = u32::try_from(PROCS_MAX).unwrap();
        directory.reserve(ProcId(last)).unwrap();
        for pid in 1..6 {
            directory.put(&entry(1, pid));
            directory.put(&entry(last, pid + 100));
        }
        drop(directory);
        let directory = open(&scratch);
        assert_eq!(directory.all(), [entry(1, 5), entry(last, 105)]);
        directory.put(&entry(1, 6));
        directory.remove(ProcId(last));
        drop(directory);
        assert_eq!(open(&scratch).all(), [entry(1, 6)]);
    }

    #[test]
    fn a_put_cut_short_leaves_the_one_before() {
        let scratch = Scratch::new();
        let directory = open(&scratch);
        directory.put(&entry(3, 1));
        directory.put(&entry(3, 2));
        let index = directory.lock();
        let (copy, ..) = directory.latest(&index, 3).unwrap();
        clear_entry(directory.words(&index, 3, copy).unwrap());
        drop(index);
        assert_eq!(directory.get(ProcId(3)), Some(entry(3, 1)));
    }

    #[test]
    fn the_numbers_beside_the_first_and_the_last_have_no_place() {
        assert_eq!(place(ProcId(0)), None);
        assert_eq!(place(ProcId(1)), Some(1));
        assert_eq!(place(ProcId(u32::try_from(PROCS_MAX).unwrap())), Some(PROCS_MAX));
        assert_eq!(place(ProcId(u32::try_from(PROCS_MAX).unwrap() + 1)), None);
    }
}
