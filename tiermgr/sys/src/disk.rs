//! Opening what parked pages are written to: a block device, a partition, or one preallocated file.
//!
//! The store is opened O_DIRECT and locked *on the very description that does the I/O*: a write that a
//! dead daemon left in flight holds that description, and so the lock, until it has landed. Whoever gets
//! the lock may therefore reuse every slot.

mod claim;

pub use claim::{Claim, Wanted, check_absent, check_room, claim, wait_until_free};

use crate::process::is_root;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Largest alignment that is tried where the kernel does not tell.
const ALIGN_MAX: usize = 65536;

/// Why a store cannot be used. Each says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Nothing there, and not asked to create it.
    #[error(
        "{path} does not exist; name a device or file that does, or have a file made: give a size, and leave out \
         `create = false`"
    )]
    NotFound {
        /// The store.
        path: PathBuf,
    },
    /// Nowhere to create it.
    #[error("the folder of {path} does not exist; make it first")]
    NoFolder {
        /// The store.
        path: PathBuf,
    },
    /// The user may not open it.
    #[error("{path} may not be opened for reading and writing by this user")]
    NotPermitted {
        /// The store.
        path: PathBuf,
    },
    /// The device or the file system takes no writes.
    #[error("{path} is read-only, or lies on a read-only file system; choose another store")]
    ReadOnly {
        /// The store.
        path: PathBuf,
    },
    /// A folder, a terminal and the like.
    #[error("{path} is neither a file nor a block device")]
    NotAStore {
        /// The store.
        path: PathBuf,
    },
    /// It would park memory in memory.
    #[error("{path} lies on {kind}, which is memory itself; choose a path on a disk")]
    InMemory {
        /// The store.
        path: PathBuf,
        /// What kind of file system.
        kind: &'static str,
    },
    /// The file system cannot bypass the page cache.
    #[error(
        "{path} lies on a file system without O_DIRECT; choose another one (ext4, xfs), or a device"
    )]
    NoDirectIo {
        /// The store.
        path: PathBuf,
    },
    /// Smaller than asked for, or than a store can be.
    #[error("{path} has {}, and {} are needed", Bytes(*size), Bytes(*needed))]
    TooSmall {
        /// The store.
        path: PathBuf,
        /// What it has.
        size: u64,
        /// What it should have.
        needed: u64,
    },
    /// A size was named that no store can have.
    #[error("a store of {} is too small for {path}: at least {} are needed", Bytes(*asked), Bytes(*needed))]
    AskedTooLittle {
        /// The store.
        path: PathBuf,
        /// What was asked for.
        asked: u64,
        /// What would do.
        needed: u64,
    },
    /// The file system cannot hold a file of that size.
    #[error("the file system of {path} has no room for {}", Bytes(*needed))]
    NoSpace {
        /// The store.
        path: PathBuf,
        /// What it should have.
        needed: u64,
    },
    /// Space cannot be set aside, and a store that runs full while it is written loses nothing but stalls.
    #[error(
        "the file system of {path} cannot preallocate; choose another one (ext4, xfs), or a device"
    )]
    NoPreallocation {
        /// The store.
        path: PathBuf,
    },
    /// Another daemon, or the writes that a dead one left in flight.
    #[error("{path} is in use{by}", by = match pid {
        Some(pid) => format!(" by process {pid}; stop it, or choose another store"),
        None => " (mounted, or locked by another process); choose another store".to_owned(),
    })]
    Locked {
        /// The store.
        path: PathBuf,
        /// Who locked it; it may be dead, with writes still in flight.
        pid: Option<i32>,
    },
    /// Anything else.
    #[error("{doing} {path}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The store.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl StoreError {
    /// The same about another file of the same folder.
    fn about(mut self, other: &Path) -> Self {
        match &mut self {
            Self::NotFound { path }
            | Self::NoFolder { path }
            | Self::NotPermitted { path }
            | Self::ReadOnly { path }
            | Self::NotAStore { path }
            | Self::InMemory { path, .. }
            | Self::NoDirectIo { path }
            | Self::TooSmall { path, .. }
            | Self::AskedTooLittle { path, .. }
            | Self::NoSpace { path, .. }
            | Self::NoPreallocation { path }
            | Self::Locked { path, .. }
            | Self::Io { path, .. } => other.clone_into(path),
        }
        self
    }
}

/// A number of bytes for people, exact: in the largest unit of which it is a whole multiple.
#[derive(Debug)]
struct Bytes(u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let whole =
            |&&(factor, _): &&(u64, &str)| self.0 >= factor && self.0.is_multiple_of(factor);
        match units.iter().find(whole) {
            Some((factor, name)) => write!(f, "{}{name}", self.0 / factor),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// An open, locked store.
#[derive(Debug)]
pub struct StoreFile {
    file: File,
    path: PathBuf,
    size: u64,
    align: u32,
    device: bool,
}

struct Opener<'a> {
    path: &'a Path,
}

impl Opener<'_> {
    fn io(&self, doing: &'static str) -> impl FnOnce(io::Error) -> StoreError {
        let path = self.path.to_owned();
        move |source| StoreError::Io { doing, path, source }
    }

    fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        }
    }

    /// What is there, if it may be opened at all.
    fn examine(&self, wanted: Wanted<'_>) -> Result<Option<std::fs::Metadata>, StoreError> {
        let path = self.path;
        let existing = self.look()?;
        if let Some(meta) = &existing
            && !meta.file_type().is_file()
            && !meta.file_type().is_block_device()
        {
            return Err(StoreError::NotAStore { path: path.to_owned() });
        }
        if existing.is_none() && !(wanted.create && wanted.size.is_some()) {
            return Err(StoreError::NotFound { path: path.to_owned() });
        }
        if !existing.as_ref().is_some_and(|meta| meta.file_type().is_block_device()) {
            // Before anything is created where it must not be.
            self.refuse_memory(if existing.is_some() { path } else { self.folder() })?;
        }
        if let Some(asked) = wanted.size.filter(|&asked| asked < wanted.least) {
            let path = path.to_owned();
            return Err(StoreError::AskedTooLittle { path, asked, needed: wanted.least });
        }
        Ok(existing)
    }

    fn find_room(&self, needed: u64) -> Result<(), StoreError> {
        let at = if self.look()?.is_some() { self.path } else { self.folder() };
        let facts = facts_of_file_system(at).map_err(self.io("looking at the file system of"))?;
        // The type of the block size differs between architectures.
        let block = u64::try_from(facts.f_bsize).unwrap_or(0);
        if facts.f_bavail.saturating_mul(block) < needed {
            return Err(StoreError::NoSpace { path: self.path.to_owned(), needed });
        }
        Ok(())
    }

    fn look(&self) -> Result<Option<std::fs::Metadata>, StoreError> {
        match std::fs::metadata(self.path) {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.io("looking at")(error)),
        }
    }

    fn refuse_memory(&self, at: &Path) -> Result<(), StoreError> {
        let kind = file_system_of(at).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StoreError::NoFolder { path: self.path.to_owned() },
            _ => self.io("looking at the file system of")(error),
        })?;
        let kind = match kind {
            libc::TMPFS_MAGIC => "tmpfs",
            RAMFS_MAGIC => "ramfs",
            libc::HUGETLBFS_MAGIC => "hugetlbfs",
            _ => return Ok(()),
        };
        Err(StoreError::InMemory { path: self.path.to_owned(), kind })
    }

    fn open(&self, device: bool, create: bool) -> Result<File, StoreError> {
        let mut options = OpenOptions::new();
        // On a device O_EXCL means: not mounted, not part of an array, not claimed by anyone else.
        let exclusive = if device { libc::O_EXCL } else { 0 };
        options.read(true).write(true).mode(0o600).create_new(create);
        options.custom_flags(libc::O_DIRECT | libc::O_CLOEXEC | exclusive);
        options.open(self.path).map_err(|error| {
            let path = self.path.to_owned();
            match error.raw_os_error() {
                Some(libc::EROFS) => StoreError::ReadOnly { path },
                // The superuser is refused only by a device that is set read-only.
                Some(libc::EACCES | libc::EPERM) if device && is_root() => {
                    StoreError::ReadOnly { path }
                }
                Some(libc::EACCES | libc::EPERM) => StoreError::NotPermitted { path },
                Some(libc::EBUSY) => StoreError::Locked { path, pid: None },
                Some(libc::EINVAL) => {
                    // The file is created before O_DIRECT is refused.
                    if create {
                        std::fs::remove_file(&path).ok();
                    }
                    StoreError::NoDirectIo { path }
                }
                _ => self.io("opening")(error),
            }
        })
    }

    fn lock(&self, file: &File) -> Result<(), StoreError> {
        // SAFETY: flock takes integers. Like the I/O it belongs to the open file description.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::WouldBlock {
            return Err(StoreError::Locked { path: self.path.to_owned(), pid: lock_holder(file) });
        }
        Err(self.io("locking")(error))
    }

    fn size_of(&self, file: &File, device: bool) -> Result<u64, StoreError> {
        const BLKGETSIZE64: u32 = 0x8008_1272;
        if !device {
            return Ok(file.metadata().map_err(self.io("looking at"))?.len());
        }
        let mut size = 0u64;
        // SAFETY: BLKGETSIZE64 writes one u64.
        let rc = unsafe {
            libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(BLKGETSIZE64), &raw mut size)
        };
        if rc == 0 {
            Ok(size)
        } else {
            Err(self.io("asking the size of")(io::Error::last_os_error()))
        }
    }

    /// Some kernels let root open a read-only device for writing, and refuse the writes.
    fn is_read_only(&self, file: &File) -> Result<bool, StoreError> {
        const BLKROGET: u32 = 0x125e;
        let mut flag = 0i32;
        // SAFETY: BLKROGET writes one int.
        let rc =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(BLKROGET), &raw mut flag) };
        if rc == 0 {
            Ok(flag != 0)
        } else {
            Err(self.io("asking whether writes are allowed to")(io::Error::last_os_error()))
        }
    }

    fn preallocate(&self, file: &File, needed: u64) -> Result<(), StoreError> {
        let path = || self.path.to_owned();
        let Ok(len) = i64::try_from(needed) else {
            return Err(StoreError::NoSpace { path: path(), needed });
        };
        // SAFETY: fallocate takes integers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EFBIG | libc::EDQUOT) => {
                Err(StoreError::NoSpace { path: path(), needed })
            }
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => {
                Err(StoreError::NoPreallocation { path: path() })
            }
            _ => Err(self.io("setting space aside for")(error)),
        }
    }

    /// What addresses, offsets and lengths must be multiples of.
    fn alignment(&self, file: &File, device: bool) -> Result<u32, StoreError> {
        if let Some(align) = told_alignment(file) {
            return Ok(align);
        }
        if device {
            let mut sector = 0i32;
            // SAFETY: BLKSSZGET writes one int.
            let rc = unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET, &raw mut sector) };
            if let (0, Ok(sector @ 1..)) = (rc, u32::try_from(sector)) {
                return Ok(sector);
            }
        }
        let mut memory = vec![0u8; 2 * ALIGN_MAX];
        let skip = memory.as_ptr().align_offset(ALIGN_MAX);
        for align in [512, 4096, ALIGN_MAX] {
            let Some(buffer) = memory.get_mut(skip..skip + align) else { continue };
            // At an offset of itself: 0 would be aligned to anything.
            if file.read_at(buffer, crate::uffd::bytes(align)).is_ok() {
                return u32::try_from(align).map_err(io::Error::other).map_err(self.io("probing"));
            }
        }
        Err(StoreError::NoDirectIo { path: self.path.to_owned() })
    }
}

const RAMFS_MAGIC: libc::c_long = 0x8584_58f6;

fn file_system_of(path: &Path) -> io::Result<libc::c_long> {
    Ok(facts_of_file_system(path)?.f_type)
}

fn facts_of_file_system(path: &Path) -> io::Result<libc::statfs> {
    let path = std::ffi::CString::new(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()))?;
    // SAFETY: all zeros is a statfs.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: statfs reads a C string and writes one statfs.
    let rc = unsafe { libc::statfs(path.as_ptr(), &raw mut stat) };
    if rc == 0 { Ok(stat) } else { Err(io::Error::last_os_error()) }
}

/// The alignment that the kernel tells (since Linux 6.1, some file systems).
fn told_alignment(file: &File) -> Option<u32> {
    const STATX_DIOALIGN: u32 = 0x2000;
    // SAFETY: all zeros is a statx.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: with AT_EMPTY_PATH and an empty path statx looks at the descriptor; it writes one statx.
    let rc = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    if rc != 0 || stat.stx_mask & STATX_DIOALIGN == 0 {
        return None;
    }
    let align = stat.stx_dio_offset_align.max(stat.stx_dio_mem_align);
    (align > 0).then_some(align)
}

/// Removes a file, and frees its blocks at once. Else they are taken until the kernel has taken down the last ring that
/// wrote to it, which comes after the end of whoever made that.
///
/// # Errors
/// Of removing it. Blocks that cannot be freed now are freed later.
pub fn remove_with_blocks(path: &Path) -> io::Result<()> {
    let open =
        OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    if let Ok(file) = open
        && file.metadata().is_ok_and(|facts| facts.is_file())
    {
        let _freed_now = file.set_len(0).is_ok();
    }
    std::fs::remove_file(path)
}

/// Who holds a lock on the file, as `/proc/locks` has it.
#[must_use]
pub fn lock_holder(file: &File) -> Option<i32> {
    let meta = file.metadata().ok()?;
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| parse_lock(line, meta.dev(), meta.ino()))
}

/// A line such as `1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF`.
fn parse_lock(line: &str, device: u64, inode: u64) -> Option<i32> {
    let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK");
    let pid = words.nth(3)?.parse().ok()?;
    let mut place = words.next()?.split(':');
    let major = u32::from_str_radix(place.next()?, 16).ok()?;
    let minor = u32::from_str_radix(place.next()?, 16).ok()?;
    let number: u64 = place.next()?.parse().ok()?;
    (number == inode && libc::makedev(major, minor) == device).then_some(pid)
}

impl StoreFile {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that may be used.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Addresses, offsets and lengths of I/O must be multiples of this.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Whether it is a block device.
    pub fn is_device(&self) -> bool {
        self.device
    }

    /// Fills `buffer` from `offset` on. Blocks.
    ///
    /// # Errors
    /// EINVAL: not aligned. `UnexpectedEof`: beyond the end. EIO and the like from the device.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    /// Writes all of `buffer` at `offset`. Blocks until the device has it; it may still be in its cache.
    ///
    /// # Errors
    /// EINVAL: not aligned. EIO, ENOSPC and the like from the device.
    pub fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(buffer, offset)
    }

    /// The descriptor with its lock.
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }
}

impl AsFd for StoreFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
