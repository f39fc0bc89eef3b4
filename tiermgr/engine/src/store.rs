//! The store: one block device or preallocated file that all families share.
//!
//! Byte map and state files are in `tiermgr/docs/on-disk.md`. The store itself says nothing about
//! what lies in it: records and checksums are in the state directory, and without them its bytes
//! mean nothing. A generation in both tells whether they belong together.

use crate::room::FamilyId;
use crate::slots::{SEGMENT_BYTES, SEGMENT_SLOTS, Slots, Sums};
use crate::wake::Wake;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tiermgr_core::units::{EXTENT_BYTES, SlotId};
use tiermgr_sys::disk::{self, Claim, StoreFile, Wanted};
use tiermgr_sys::memory::AnonBuffer;
use tiermgr_sys::process::random_bytes;
use tiermgr_sys::shm::SharedFile;

/// Where slot 1 begins in the store.
pub const DATA_OFFSET: u64 = 1 << 20;
/// Bytes of the header at the beginning of the store.
const HEADER_BYTES: usize = 4096;
const MAGIC: [u8; 8] = *b"tiermgr\0";
const FORMAT: u32 = 1;
/// The identity file of the state directory: magic with format, generation, segments.
const IDENTITY_BYTES: u64 = 24;
/// What does not even hold one segment is no store.
const STORE_BYTES_LEAST: u64 = DATA_OFFSET + SEGMENT_BYTES;
/// Slots have 32-bit numbers, and 0 is none of them.
const SEGMENTS_MAX: u64 = (u32::MAX / SEGMENT_SLOTS - 1) as u64;

/// Which store, and where its state is kept.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// A block device or a file.
    pub path: PathBuf,
    /// Bytes to use. A file is given this length; of a device it is the most that is used. `None`:
    /// all that is there.
    pub size_bytes: Option<u64>,
    /// Make the file if it does not exist.
    pub create: bool,
    /// The daemon's state directory, on a tmpfs that only root can read.
    pub state_dir: PathBuf,
}

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Opening, locking or measuring it.
    #[error(transparent)]
    Open(#[from] disk::StoreError),
    /// Reading or writing its header.
    #[error("{what} of the store {path}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// The store.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It holds something, and that is not a store of ours.
    #[error(
        "{path} is not a tiermgr store, and it is not blank: it may hold somebody's data, and nothing of \
         it was changed; {}, if that may be destroyed, or choose another store",
        how_to_blank(path, *device)
    )]
    Foreign {
        /// The store.
        path: PathBuf,
        /// It is a block device.
        device: bool,
    },
    /// The state directory has leases of another store, or of this one before it was changed.
    #[error(
        "clients of an earlier daemon have memory in another store than {path} (state: {state}); \
         configure that store, or end all clients and remove the state"
    )]
    Mismatch {
        /// The store.
        path: PathBuf,
        /// The state directory.
        state: PathBuf,
    },
    /// A file of the state directory.
    #[error("{what} {path}")]
    State {
        /// What was being done.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

fn how_to_blank(path: &Path, device: bool) -> String {
    let path = path.display();
    if device {
        // The second alone may refuse while the marks of a file system are there, and the first removes no
        // more than those.
        format!("run `wipefs -a {path} && blkdiscard -z {path}`")
    } else {
        format!("remove it (`rm {path}`)")
    }
}

/// What [`check`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// A file that can be made.
    Absent,
    /// Nothing is in it.
    Blank {
        /// Bytes that are there.
        bytes: u64,
    },
    /// It is a store already.
    Store {
        /// Bytes that are there.
        bytes: u64,
    },
}

/// Looks whether [`Store::open`] would take a store, and changes nothing of it. Whether the state directory
/// belongs to another one is not looked at.
///
/// # Errors
/// See [`StoreError`].
pub fn check(path: &Path, size_bytes: Option<u64>, create: bool) -> Result<Fit, StoreError> {
    let wanted = Wanted { path, size: size_bytes, create, least: STORE_BYTES_LEAST };
    if !path.exists() && create && size_bytes.is_some() {
        disk::check_absent(wanted)?;
        return Ok(Fit::Absent);
    }
    let claim = disk::claim(wanted)?;
    let header = Header::read(&claim)?;
    disk::check_room(&claim)?;
    let bytes = claim.found();
    Ok(if header.is_some() { Fit::Store { bytes } } else { Fit::Blank { bytes } })
}

/// How the store's bytes are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUse {
    /// Bytes of segments that families hold.
    pub used_bytes: u64,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
}

/// The store. Cheap to share; leasing takes a lock for a few instructions, I/O takes none.
#[derive(Debug)]
pub struct Store {
    file: StoreFile,
    slots: Slots,
    sums: Sums,
    /// The last lease failed for want of room in the state directory.
    lacks_sums: AtomicBool,
}

impl Store {
    /// Opens the store under its exclusive lock, with the leases that the state directory knows.
    /// Blocks for the time that the file system takes to set the space aside and, where there is no header
    /// yet, that it takes to see that a file is blank.
    ///
    /// # Errors
    /// See [`StoreError`]; nothing of the store was changed.
    pub fn open(config: &StoreConfig) -> Result<Arc<Self>, StoreError> {
        let claim = disk::claim(Wanted {
            path: &config.path,
            size: config.size_bytes,
            create: config.create,
            least: STORE_BYTES_LEAST,
        })?;
        let segments = claim.size().saturating_sub(DATA_OFFSET) / SEGMENT_BYTES;
        let segments = u32::try_from(segments.min(SEGMENTS_MAX)).unwrap_or(0);
        // All that can be refused is refused before the store is grown or written to.
        let header = Header::read(&claim)?;
        let state = config.state_dir.join("store");
        let mismatch = || StoreError::Mismatch { path: config.path.clone(), state: state.clone() };
        let identity = state.join("identity");
        let (file, owners, sums) = if identity.exists() && has_leases(&state)? {
            let known = read_identity(&identity)?;
            let header = header.ok_or_else(mismatch)?;
            if known != header || known.segments > segments {
                return Err(mismatch());
            }
            let open = |name| {
                let path = state.join(name);
                SharedFile::open(&path).map_err(in_state("opening", path))
            };
            let (owners, sums) = (open("segments")?, open("sums")?);
            (claim.prepare()?, owners, sums)
        } else {
            let generation = random_bytes()
                .map(u64::from_le_bytes)
                .map_err(in_state("drawing the generation in", identity.clone()))?;
            let header = Header { generation, segments };
            let (owners, sums) = make_state(&state, header)?;
            let file = claim.prepare()?;
            header.write(&file)?;
            (file, owners, sums)
        };
        let segments = u32::try_from(owners.len() / 8).unwrap_or(0).min(segments);
        let slots =
            Slots::open(owners, segments).map_err(in_state("reading", state.join("segments")))?;
        let lacks_sums = AtomicBool::new(false);
        Ok(Arc::new(Self { file, slots, sums: Sums::new(sums), lacks_sums }))
    }

    /// What it was opened from.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// How the bytes are divided now.
    #[must_use]
    pub fn usage(&self) -> StoreUse {
        let used = self.slots.segments() - self.slots.free_segments().min(self.slots.segments());
        StoreUse {
            used_bytes: u64::from(used) * SEGMENT_BYTES,
            capacity_bytes: u64::from(self.slots.segments()) * SEGMENT_BYTES,
        }
    }

    /// Gives back what families hold that `is_alive` denies. For after a restart.
    pub fn give_back_dead(&self, is_alive: impl Fn(FamilyId) -> bool) {
        self.slots.give_back_dead(is_alive);
    }

    /// Leases a segment: its first slot and its length. With none free, `wake` is used when one is.
    pub fn take(&self, family: FamilyId, wake: &Arc<Wake>) -> Option<(SlotId, u32)> {
        let first = self.slots.take(family, wake)?;
        if let Err(error) = self.sums.reserve(first, SEGMENT_SLOTS) {
            if !self.lacks_sums.swap(true, Ordering::Relaxed) {
                tracing::error!(
                    %error,
                    "the state directory has no room for the checksums of more slots: the store counts as full"
                );
            }
            self.slots.give_back(family, first);
            return None;
        }
        self.lacks_sums.store(false, Ordering::Relaxed);
        self.sums.scrub(first, SEGMENT_SLOTS);
        Some((first, SEGMENT_SLOTS))
    }

    /// Ends the lease of one segment. `false` where the family does not hold it.
    pub fn give_back(&self, family: FamilyId, first: SlotId) -> bool {
        self.slots.give_back(family, first)
    }

    /// Ends all leases of `family`.
    pub fn give_back_all(&self, family: FamilyId) {
        self.slots.give_back_all(family);
    }

    /// The segments that `family` holds, by their first slots, ascending.
    #[must_use]
    pub fn held_by(&self, family: FamilyId) -> Vec<SlotId> {
        self.slots.held_by(family)
    }

    /// Where the slots from `slot` on lie, if all `bytes` (whole extents) are leased to `family`.
    #[must_use]
    pub fn offset_of(&self, family: FamilyId, slot: SlotId, bytes: u64) -> Option<u64> {
        let count = u32::try_from(bytes / EXTENT_BYTES).ok()?;
        let whole = bytes.is_multiple_of(EXTENT_BYTES);
        (whole && self.slots.are_held(family, slot, count))
            .then(|| DATA_OFFSET + u64::from(slot.0 - 1) * EXTENT_BYTES)
    }

    /// The checksums.
    #[must_use]
    pub const fn sums(&self) -> &Sums {
        &self.sums
    }

    /// The description that carries the lock; all I/O must go through it.
    #[must_use]
    pub const fn file(&self) -> &StoreFile {
        &self.file
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    generation: u64,
    segments: u32,
}

impl Header {
    fn encode(self, block: &mut [u8]) {
        block.fill(0);
        for (place, bytes) in [
            (0, MAGIC.as_slice()),
            (8, &FORMAT.to_le_bytes()),
            (12, &self.segments.to_le_bytes()),
            (16, &self.generation.to_le_bytes()),
        ] {
            block[place..place + bytes.len()].copy_from_slice(bytes);
        }
        let sum = crc32c::crc32c(&block[..24]);
        block[24..28].copy_from_slice(&sum.to_le_bytes());
    }

    /// `None` where the block is not ours.
    fn decode(block: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(block.get(at..at + 4)?.try_into().ok()?));
        let ours = block.get(..8)? == MAGIC.as_slice()
            && word(8)? == FORMAT
            && word(24)? == crc32c::crc32c(block.get(..24)?);
        let generation = u64::from_le_bytes(block.get(16..24)?.try_into().ok()?);
        ours.then_some(Self { generation, segments: word(12)? })
    }

    /// The header, or `None` where there is nothing in the store yet.
    fn read(claim: &Claim) -> Result<Option<Self>, StoreError> {
        let path = claim.path();
        let failed = |what| in_store(path, what);
        let mut buffer =
            AnonBuffer::new(HEADER_BYTES).map_err(failed("allocating a buffer for the header"))?;
        let block = &mut buffer.as_mut_slice()[..HEADER_BYTES];
        let len = claim.read_up_to(block, 0).map_err(failed("reading the header"))?;
        if let Some(header) = Self::decode(&block[..len]) {
            return Ok(Some(header));
        }
        if claim.is_blank().map_err(failed("reading what is in"))? {
            return Ok(None);
        }
        Err(StoreError::Foreign { path: path.to_path_buf(), device: claim.is_device() })
    }

    fn write(self, file: &StoreFile) -> Result<(), StoreError> {
        let mut buffer = AnonBuffer::new(HEADER_BYTES)
            .map_err(in_store(file.path(), "allocating a buffer for the header"))?;
        let block = &mut buffer.as_mut_slice()[..HEADER_BYTES];
        self.encode(block);
        file.write_at(block, 0).map_err(in_store(file.path(), "writing the header"))
    }
}

fn in_store(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> StoreError + use<> {
    let path = path.to_path_buf();
    move |source| StoreError::Io { what, path, source }
}

fn in_state(what: &'static str, path: PathBuf) -> impl FnOnce(io::Error) -> StoreError {
    move |source| StoreError::State { what, path, source }
}

fn read_identity(path: &Path) -> Result<Header, StoreError> {
    let file = SharedFile::open(path).map_err(in_state("opening", path.to_path_buf()))?;
    let words = file.words(0, 3).unwrap_or_default();
    let word = |at: usize| words.get(at).map_or(0, |word| word.load(Ordering::Acquire));
    if word(0) != identity_mark() {
        let source = io::Error::new(io::ErrorKind::InvalidData, "not an identity file");
        return Err(in_state("reading", path.to_path_buf())(source));
    }
    Ok(Header { generation: word(1), segments: u32::try_from(word(2)).unwrap_or(u32::MAX) })
}

fn identity_mark() -> u64 {
    u64::from_le_bytes(MAGIC) ^ u64::from(FORMAT) << 56
}

/// Whether any family of an earlier daemon holds a segment. Where none does, nothing binds the state to
/// the store that it was made for.
fn has_leases(state: &Path) -> Result<bool, StoreError> {
    let path = state.join("segments");
    let owners = SharedFile::open(&path).map_err(in_state("opening", path.clone()))?;
    owners.allocate(0, owners.len()).map_err(in_state("making room for", path))?;
    let words = usize::try_from(owners.len() / 8).unwrap_or(usize::MAX);
    let is_leased = |owner: &AtomicU64| owner.load(Ordering::Acquire) != 0;
    Ok(owners.words(0, words).is_none_or(|owners| owners.iter().any(is_leased)))
}

/// Makes the state files of a store that has none. The identity comes last: without it the others
/// count for nothing.
fn make_state(state: &Path, header: Header) -> Result<(SharedFile, SharedFile), StoreError> {
    if state.exists() {
        fs::remove_dir_all(state).map_err(in_state("removing", state.to_path_buf()))?;
    }
    fs::create_dir_all(state).map_err(in_state("making", state.to_path_buf()))?;
    let create = |name, bytes| {
        let path = state.join(name);
        SharedFile::create(&path, bytes).map_err(in_state("creating", path))
    };
    let owners = create("segments", Slots::file_bytes(header.segments))?;
    let sums = create("sums", Sums::file_bytes(header.segments.saturating_mul(SEGMENT_SLOTS)))?;
    let identity = create("identity.new", IDENTITY_BYTES)?;
    identity
        .allocate(0, IDENTITY_BYTES)
        .map_err(in_state("making room for", state.join("identity.new")))?;
    let words = [identity_mark(), header.generation, u64::from(header.segments)];
    for (at, value) in (0..).step_by(8).zip(words) {
        if let Some(word) = identity.at_u64(at) {
            word.store(value, Ordering::Release);
        }
    }
    fs::rename(state.join("identity.new"), state.join("identity"))
        .map_err(in_state("renaming", state.join("identity.new")))?;
    Ok((owners, sums))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn config(disk: &Scratch, state: &Scratch) -> StoreConfig {
        StoreConfig {
            path: disk.path("store"),
            size_bytes: Some(DATA_OFFSET + 4 * SEGMENT_BYTES + 4096),
            create: true,
            state_dir: state.path(""),
        }
    }

    #[test]
    fn a_header_reads_as_it_was_written_and_one_bit_spoils_it() {
        let mut block = [0; HEADER_BYTES];
        let header = Header { generation: 0x1234_5678_9abc, segments: 77 };
        header.encode(&mut block);
        assert_eq!(Header::decode(&block), Some(header));
        for bit in 0..28 * 8 {
            let mut bad = block;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&bad), None, "bit {bit}");
        }
    }

    #[test]
    fn leases_survive_a_reopen_and_a_foreign_store_is_refused() {
        let (disk, state) = (Scratch::on_disk(), Scratch::new());
        let config = config(&disk, &state);
        let wake = Arc::new(Wake::silent());
        let store = Store::open(&config).unwrap();
        assert_eq!(store.take(5, &wake), Some((SlotId(1), 128)));
        assert_eq!(store.usage().used_bytes, SEGMENT_BYTES);
        assert_eq!(store.usage().capacity_bytes, 4 * SEGMENT_BYTES);
        drop(store);

        let store = Store::open(&config).unwrap();
        assert_eq!(store.held_by(5), [SlotId(1)]);
        drop(store);

        let other = Scratch::new();
        let fresh = StoreConfig { state_dir: other.path(""), ..config.clone() };
        drop(Store::open(&fresh).unwrap());
        assert!(matches!(Store::open(&config), Err(StoreError::Mismatch { .. })));

        fs::write(&config.path, vec![7; 64 << 20]).unwrap();
        assert!(matches!(Store::open(&fresh), Err(StoreError::Foreign { .. })));
    }

    /// Wherever it lies in the file, and whatever the file's length.
    #[test]
    fn what_holds_data_is_refused_and_stays_as_it_was() {
        let (disk, state) = (Scratch::on_disk(), Scratch::new());
        let config = config(&disk, &state);
        let kept: [(u64, &[u8]); 6] = [
            (3, b"three"),
            (4096, b"behind a block of zeros"),
            (65536, b"where btrfs has its mark"),
            (5 << 20, b"far behind a hole"),
            (config.size_bytes.unwrap() - 5, b"ends."),
            (config.size_bytes.unwrap() + 77, b"beyond what would be used"),
        ];
        for (offset, data) in kept {
            use std::os::unix::fs::FileExt;
            let file = fs::File::create(&config.path).unwrap();
            file.write_all_at(data, offset).unwrap();
            let before = fs::read(&config.path).unwrap();
            assert!(matches!(Store::open(&config), Err(StoreError::Foreign { .. })), "{offset}");
            let checked = check(&config.path, config.size_bytes, true);
            assert!(matches!(checked, Err(StoreError::Foreign { .. })), "{offset}");
            assert!(fs::read(&config.path).unwrap() == before, "{offset}: it has changed");
        }
        // Zeros that were written are as good as a hole.
        fs::write(&config.path, vec![0; 12345]).unwrap();
        assert_eq!(
            check(&config.path, config.size_bytes, true).unwrap(),
            Fit::Blank { bytes: 12345 }
        );
        drop(Store::open(&config).unwrap());
        let bytes = config.size_bytes.unwrap();
        assert_eq!(check(&config.path, None, false).unwrap(), Fit::Store { bytes });
    }

    #[test]
    fn a_store_that_does_not_belong_to_the_leases_is_refused_at_its_old_length() {
        let (disk, state, other) = (Scratch::on_disk(), Scratch::new(), Scratch::new());
        let config = config(&disk, &state);
        let store = Store::open(&config).unwrap();
        store.take(5, &Arc::new(Wake::silent())).unwrap();
        drop(store);
        let path = disk.path("other");
        let small = StoreConfig {
            path: path.clone(),
            size_bytes: Some(DATA_OFFSET + SEGMENT_BYTES),
            state_dir: other.path(""),
            ..config.clone()
        };
        drop(Store::open(&small).unwrap());
        let before = fs::metadata(&path).unwrap().len();
        let larger = StoreConfig { path: path.clone(), ..config.clone() };
        assert!(matches!(Store::open(&larger), Err(StoreError::Mismatch { .. })));
        assert_eq!(fs::metadata(&path).unwrap().len(), before);
        let absent = StoreConfig { path: disk.path("absent"), ..config };
        assert!(matches!(Store::open(&absent), Err(StoreError::Mismatch { .. })));
        assert!(!absent.path.exists());
    }

    #[test]
    fn a_file_that_can_be_made_is_not_made_by_looking() {
        let disk = Scratch::on_disk();
        let path = disk.path("absent");
        assert_eq!(check(&path, Some(64 << 20), true).unwrap(), Fit::Absent);
        assert!(check(&path, Some(1 << 60), true).is_err());
        assert!(check(&path, Some(STORE_BYTES_LEAST - 1), true).is_err());
        assert!(check(&path, None, true).is_err());
        assert_eq!(fs::read_dir(disk.path("")).unwrap().count(), 0);
    }

    #[test]
    fn without_leases_another_store_is_taken_and_a_larger_one_is_used_whole() {
        let (disk, state) = (Scratch::on_disk(), Scratch::new());
        let config = config(&disk, &state);
        let wake = Arc::new(Wake::silent());
        let store = Store::open(&config).unwrap();
        store.take(5, &wake).unwrap();
        store.give_back_all(5);
        drop(store);

        let size_bytes = Some(DATA_OFFSET + 9 * SEGMENT_BYTES);
        let other = StoreConfig { path: disk.path("other"), size_bytes, ..config.clone() };
        let store = Store::open(&other).unwrap();
        assert_eq!(store.usage().capacity_bytes, 9 * SEGMENT_BYTES);
        store.take(6, &wake).unwrap();
        drop(store);
        assert!(matches!(Store::open(&config), Err(StoreError::Mismatch { .. })));
        assert_eq!(Store::open(&other).unwrap().held_by(6), [SlotId(1)]);
    }

    #[test]
    fn slots_have_places_only_where_they_are_leased() {
        let (disk, state) = (Scratch::on_disk(), Scratch::new());
        let store = Store::open(&config(&disk, &state)).unwrap();
        let wake = Arc::new(Wake::silent());
        store.take(5, &wake).unwrap();
        assert_eq!(store.offset_of(5, SlotId(1), EXTENT_BYTES), Some(DATA_OFFSET));
        assert_eq!(
            store.offset_of(5, SlotId(128), EXTENT_BYTES),
            Some(DATA_OFFSET + 127 * EXTENT_BYTES)
        );
        assert_eq!(store.offset_of(5, SlotId(128), 2 * EXTENT_BYTES), None);
        assert_eq!(store.offset_of(6, SlotId(1), EXTENT_BYTES), None);
        assert_eq!(store.offset_of(5, SlotId(1), 4096), None);
        assert_eq!(store.offset_of(5, SlotId(0), EXTENT_BYTES), None);
    }

    #[test]
    fn a_store_without_room_for_one_segment_is_refused() {
        let (disk, state) = (Scratch::on_disk(), Scratch::new());
        let small = StoreConfig {
            size_bytes: Some(DATA_OFFSET + SEGMENT_BYTES - 4096),
            ..config(&disk, &state)
        };
        assert!(Store::open(&small).is_err());
        let enough =
            StoreConfig { size_bytes: Some(DATA_OFFSET + SEGMENT_BYTES), ..config(&disk, &state) };
        assert!(Store::open(&enough).is_ok());
    }
}
