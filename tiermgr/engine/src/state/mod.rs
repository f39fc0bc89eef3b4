//! What survives the daemon: the state files of one family, on a tmpfs that only root can read.
//!
//! | file | holds |
//! |---|---|
//! | `records` | 16 bytes for each extent ([`records`]) |
//! | `regions` | one entry for each region ([`regions`]) |
//! | `procs` | the family, and one entry for each process ([`procs`]) |
//! | `messages` | userfaultfd messages, from the read to their effects ([`messages`]) |
//!
//! All of it is mapped shared and changed by atomic stores in program order, so that whoever maps the
//! files after a kill sees a prefix of the stores. Entries of more than one word carry a checksum in
//! the word that is stored last. The byte map is in `tiermgr/docs/on-disk.md`.

pub mod messages;
pub mod procs;
pub mod records;
pub mod regions;
pub(crate) mod space;

use crate::error::EngineError;
use messages::Messages;
use procs::{FamilyInfo, ProcDirectory, ProcEntry};
use records::StateRecords;
use regions::RegionDirectory;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tiermgr_core::record::Records;
use tiermgr_core::units::ProcId;
use tiermgr_sys::shm::SharedFile;

/// Version of all state files. A daemon loads only its own.
pub const FORMAT: u64 = 3;

/// Bytes of the directory of regions that are there from the beginning.
const ENTRIES_ALLOCATED: u64 = 4096;

/// The state files of one family.
#[derive(Debug)]
pub struct FamilyState {
    dir: PathBuf,
    /// Regions, and through them the records; shared with whoever lists them.
    pub regions: Arc<RegionDirectory>,
    /// Processes; shared with whoever lists them.
    pub procs: Arc<ProcDirectory>,
    /// Messages.
    pub messages: Messages,
    records: Arc<SharedFile>,
}

/// What an earlier daemon left of a family.
#[derive(Debug)]
pub struct Recovered {
    /// The family, as it was created.
    pub family: FamilyInfo,
    /// Its processes, by ascending number.
    pub procs: Vec<ProcEntry>,
}

impl FamilyState {
    /// Makes the folder and the files of a new family.
    ///
    /// # Errors
    /// [`EngineError::State`]; what was made stays, for the caller to remove.
    pub fn create(dir: &Path, family: &FamilyInfo) -> Result<Self, EngineError> {
        fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(dir)
            .map_err(EngineError::state("making the state folder", dir))?;
        let create = |name, bytes| {
            let path = dir.join(name);
            SharedFile::create(&path, bytes).map_err(EngineError::state("creating", path))
        };
        let records = create("records", records::FILE_BYTES)?;
        let regions = create("regions", regions::FILE_BYTES)?;
        let messages = create("messages", messages::file_bytes())?;
        // The family's own entry is the last store: a folder without it is one whose making was cut
        // short, and nothing was ever kept in it.
        let procs = create("procs", procs::FILE_BYTES)?;
        allocate(&regions, ENTRIES_ALLOCATED, dir)?;
        let state = Self::over(dir, records, regions, procs, messages)?;
        state.procs.put_family(family);
        Ok(state)
    }

    /// Whether a folder was ever more than begun: one whose making was cut short has kept nothing.
    ///
    /// # Errors
    /// Where that cannot be read.
    pub fn was_begun(dir: &Path) -> io::Result<bool> {
        let path = dir.join("procs");
        match fs::metadata(&path) {
            Ok(found) if found.len() == 0 => Ok(false),
            Ok(_) => {
                let file = SharedFile::open(&path)?;
                procs::has_family_entry(&file)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Opens the files that an earlier daemon left, and reads what they say.
    ///
    /// # Errors
    /// [`EngineError::State`], or [`EngineError::Damaged`] where they are none of ours.
    pub fn load(dir: &Path) -> Result<(Self, Recovered), EngineError> {
        let open = |name, bytes| {
            let path = dir.join(name);
            let file =
                SharedFile::open(&path).map_err(EngineError::state("opening", path.clone()))?;
            if file.len() == bytes {
                Ok(file)
            } else {
                Err(EngineError::Damaged { path, reason: "its length is not that of this version" })
            }
        };
        let (regions, procs) =
            (open("regions", regions::FILE_BYTES)?, open("procs", procs::FILE_BYTES)?);
        // What an earlier daemon has taken is there; a hole is filled by the first look at it, and must
        // not be what ends us.
        allocate(&regions, ENTRIES_ALLOCATED, dir)?;
        let state = Self::over(
            dir,
            open("records", records::FILE_BYTES)?,
            regions,
            procs,
            open("messages", messages::file_bytes())?,
        )?;
        let no_room = |needed_bytes| {
            move |_full| EngineError::StateFull { path: dir.to_path_buf(), needed_bytes }
        };
        state.regions.reserve().map_err(no_room(ENTRIES_ALLOCATED))?;
        for region in state.regions.all() {
            records::allocate(&state.records, region.first, region.extents)
                .map_err(no_room(records::bytes_of(region.extents)))?;
        }
        for entry in state.procs.all() {
            state.messages.allocate(entry.proc)?;
        }
        let family = state.procs.family().ok_or_else(|| EngineError::Damaged {
            path: dir.join("procs"),
            reason: "it names no family",
        })?;
        let procs = state.procs.all();
        Ok((state, Recovered { family, procs }))
    }

    fn over(
        dir: &Path,
        records: SharedFile,
        regions: SharedFile,
        procs: SharedFile,
        messages: SharedFile,
    ) -> Result<Self, EngineError> {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
            .map_err(EngineError::state("restricting the state folder", dir))?;
        let records = Arc::new(records);
        let needed_bytes = procs::FILE_BYTES;
        let procs = ProcDirectory::new(procs)
            .map_err(|_full| EngineError::StateFull { path: dir.to_path_buf(), needed_bytes })?;
        Ok(Self {
            dir: dir.to_path_buf(),
            regions: Arc::new(RegionDirectory::new(regions, Arc::clone(&records))),
            procs: Arc::new(procs),
            messages: Messages::new(messages, dir.join("messages")),
            records,
        })
    }

    /// The records, for the manager.
    #[must_use]
    pub fn records(&self) -> StateRecords {
        StateRecords::new(Arc::clone(&self.records), Arc::clone(&self.regions), self.dir.clone())
    }

    /// Takes memory for the entry and the message buffer of a process, before anything of it is noted.
    ///
    /// # Errors
    /// [`EngineError::State`] or [`EngineError::StateFull`] where there is none.
    pub fn reserve(&self, proc: ProcId) -> Result<(), EngineError> {
        self.procs.reserve(proc).map_err(|_full| EngineError::StateFull {
            path: self.dir.clone(),
            needed_bytes: procs::FILE_BYTES,
        })?;
        self.messages.allocate(proc)
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Takes out what there is of a child's table: its copying may have been cut short. The fork is
    /// told again, and what there is of the first table must not pass for the whole.
    pub fn forget_table_of(&self, proc: ProcId) {
        let mut records = self.records();
        for region in self.regions.all().iter().filter(|region| region.proc == proc) {
            records.clear(region.first, region.extents);
            self.regions.drop_region(proc, region.region);
        }
    }

    /// Removes the folder of a family that has ended.
    ///
    /// # Errors
    /// [`EngineError::State`].
    pub fn remove(dir: &Path) -> Result<(), EngineError> {
        fs::remove_dir_all(dir).map_err(EngineError::state("removing the state folder", dir))
    }
}

/// Takes memory for the first `bytes` of a file of ours in `dir`.
fn allocate(file: &SharedFile, bytes: u64, dir: &Path) -> Result<(), EngineError> {
    file.allocate(0, bytes)
        .map_err(|_full| EngineError::StateFull { path: dir.to_path_buf(), needed_bytes: bytes })
}

/// Writes an entry so that it counts only when it is whole: the first word, a checksum of the others,
/// is zeroed first and stored last.
fn put_entry(words: &[AtomicU64], values: &[u64]) {
    let Some((seal, rest)) = words.split_first() else { return };
    seal.store(0, Ordering::Release);
    for (word, value) in rest.iter().zip(values) {
        word.store(*value, Ordering::Release);
    }
    seal.store(seal_of(values), Ordering::Release);
}

/// Reads an entry; `None` where there is none, or one whose writing was cut short.
fn get_entry<const N: usize>(words: &[AtomicU64]) -> Option<[u64; N]> {
    let (seal, rest) = words.split_first()?;
    let before = seal.load(Ordering::Acquire);
    let mut values = [0; N];
    if rest.len() < N {
        return None;
    }
    for (value, word) in values.iter_mut().zip(rest) {
        *value = word.load(Ordering::Acquire);
    }
    (before == seal_of(&values)).then_some(values)
}

fn clear_entry(words: &[AtomicU64]) {
    if let Some(seal) = words.first() {
        seal.store(0, Ordering::Release);
    }
}

/// A checksum that is never zero, and that no file of another format has.
fn seal_of(values: &[u64]) -> u64 {
    let sum = values.iter().fold(0, |sum, value| crc32c::crc32c_append(sum, &value.to_le_bytes()));
    u64::from(sum) | (0x7469_6500 + FORMAT) << 32
}

const fn join(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a word are what is wanted")]
const fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn an_entry_cut_short_anywhere_is_no_entry() {
        let scratch = Scratch::new();
        let file = SharedFile::create(&scratch.path("entry"), 4096).unwrap();
        let words = file.words(0, 8).unwrap();
        assert_eq!(get_entry::<7>(words), None);
        put_entry(words, &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(get_entry::<7>(words), Some([1, 2, 3, 4, 5, 6, 7]));
        for cut in 1..8 {
            put_entry(words, &[1, 2, 3, 4, 5, 6, 7]);
            words[0].store(0, Ordering::Release);
            for (word, value) in words[1..cut].iter().zip([9, 8, 7, 6, 5, 4, 3]) {
                word.store(value, Ordering::Release);
            }
            assert_eq!(get_entry::<7>(words), None, "cut after {cut} words");
        }
        clear_entry(words);
        assert_eq!(get_entry::<7>(words), None);
    }

    #[test]
    fn a_new_family_loads_as_it_was_made() {
        let scratch = Scratch::new();
        let dir = scratch.path("family");
        let info = FamilyInfo { family: 77, limbo_bytes: 4 << 20, has_move: true, class: 1 };
        assert!(!FamilyState::was_begun(&dir).unwrap());
        drop(FamilyState::create(&dir, &info).unwrap());
        assert!(FamilyState::was_begun(&dir).unwrap());
        let (_state, found) = FamilyState::load(&dir).unwrap();
        assert_eq!(found.family, info);
        assert!(found.procs.is_empty());
        assert!(FamilyState::create(&dir, &info).is_err());
        FamilyState::remove(&dir).unwrap();
        assert!(FamilyState::load(&dir).is_err());
    }
}
