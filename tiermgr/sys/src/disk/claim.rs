//! A store before it is one: opened, locked, looked at, and not changed yet.

use super::{ALIGN_MAX, Opener, StoreError, StoreFile};
use crate::memory::AnonBuffer;
use crate::uffd::bytes;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A file or device that is open and locked, and in which nothing was changed yet. One that had to be made
/// is removed again where it is dropped before [`Claim::prepare`] was through.
#[derive(Debug)]
pub struct Claim {
    /// Goes first: nobody else is to lock a file that is about to be removed.
    made: Made,
    file: File,
    path: PathBuf,
    /// Bytes that are there.
    found: u64,
    /// Bytes that are to be there.
    needed: u64,
    size: u64,
    device: bool,
}

/// A file that was made for a claim, if one was, until it is a store.
#[derive(Debug)]
struct Made(Option<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Whoever refuses it says why; that it cannot be removed either comes from the same cause.
            drop(std::fs::remove_file(path));
        }
    }
}

/// What was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// A block device or a file.
    pub path: &'a Path,
    /// Bytes to use of it; `None` for all of an existing one.
    pub size: Option<u64>,
    /// Make a file that is missing, and make a shorter one longer.
    pub create: bool,
    /// What is smaller is refused.
    pub least: u64,
}

/// Opens and locks what is to be a store, and changes nothing of it, so that its content can be judged
/// before [`Claim::prepare`] gives it its size.
///
/// # Errors
/// [`StoreError`].
pub fn claim(wanted: Wanted<'_>) -> Result<Claim, StoreError> {
    let Wanted { path, size, create, least } = wanted;
    let opener = Opener { path };
    let existing = opener.examine(wanted)?;
    let device = existing.as_ref().is_some_and(|meta| meta.file_type().is_block_device());
    let is_new = existing.is_none();
    let file = opener.open(device, is_new)?;
    let made = Made(is_new.then(|| path.to_owned()));
    if device && opener.is_read_only(&file)? {
        return Err(StoreError::ReadOnly { path: path.to_owned() });
    }
    opener.lock(&file)?;
    let found = opener.size_of(&file, device)?;
    let needed = size.unwrap_or(found).max(least);
    // A file that is to be used as it is does not grow.
    if found < needed && (device || !create || size.is_none()) {
        return Err(StoreError::TooSmall { path: path.to_owned(), size: found, needed });
    }
    let size = size.unwrap_or(found);
    Ok(Claim { file, made, path: path.to_owned(), found, needed, size, device })
}

/// Looks whether a file that is not there could be made: its folder, direct I/O in it, and room. Makes a
/// file of another name for it, which is removed at once.
///
/// # Errors
/// [`StoreError`], about `wanted.path`; `AlreadyExists` inside where it is there.
pub fn check_absent(wanted: Wanted<'_>) -> Result<(), StoreError> {
    let opener = Opener { path: wanted.path };
    if opener.examine(wanted)?.is_some() {
        return Err(opener.io("making")(io::ErrorKind::AlreadyExists.into()));
    }
    let name = format!(".tiermgr-probe-{}", std::process::id());
    let path = opener.folder().join(name);
    let probe = Opener { path: &path };
    let tried = probe.open(false, true).and_then(|file| {
        let tried = probe.preallocate(&file, 4096).and_then(|()| probe.alignment(&file, false));
        // The error at hand says what is wrong with this file system.
        drop(std::fs::remove_file(&path));
        tried.map(drop)
    });
    tried.map_err(|error| error.about(wanted.path))?;
    opener.find_room(wanted.size.unwrap_or(0))
}

/// Whether the file system of an existing, shorter file has room for it to grow to `needed`.
///
/// # Errors
/// [`StoreError`].
pub fn check_room(claim: &Claim) -> Result<(), StoreError> {
    Opener { path: &claim.path }.find_room(claim.needed.saturating_sub(claim.found))
}

/// Waits until nobody has the store locked or, if it is a device, open: the kernel may take a while to close
/// what a process had in flight at its end. `false` if that takes longer than `patience`.
pub fn wait_until_free(path: &Path, patience: Duration) -> bool {
    const LOOK_EVERY: Duration = Duration::from_millis(5);
    let opener = Opener { path };
    let deadline = Instant::now() + patience;
    loop {
        let is_busy = match opener.look() {
            Ok(Some(meta)) => {
                let device = meta.file_type().is_block_device();
                let locked = opener.open(device, false).and_then(|file| opener.lock(&file));
                matches!(locked, Err(StoreError::Locked { .. }))
            }
            _ => false,
        };
        if !is_busy || Instant::now() >= deadline {
            return !is_busy;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

impl Claim {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a block device.
    pub fn is_device(&self) -> bool {
        self.device
    }

    /// Bytes of it that will be used.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that are there.
    pub fn found(&self) -> u64 {
        self.found
    }

    /// Fills `buffer`, which is aligned to pages and a multiple of them long, from `offset` on, and says how
    /// many bytes there were before the end.
    ///
    /// # Errors
    /// EIO and the like.
    pub fn read_up_to(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        loop {
            let at = offset + bytes(filled);
            let part = buffer.get_mut(filled..).unwrap_or_default();
            if part.is_empty() {
                return Ok(filled);
            }
            let len = self.file.read_at(part, at)?;
            filled += len;
            // A direct read that is not whole blocks long has met the end.
            if len == 0 || !filled.is_multiple_of(SECTOR_BYTES) {
                return Ok(filled);
            }
        }
    }

    /// Whether there is nothing in it that somebody could miss: of a file, whether it is empty or all of it is
    /// holes and zeros; of a device, whether the first and the last MiB are zeros, where file systems,
    /// partition tables, volume managers and arrays have their marks.
    ///
    /// # Errors
    /// EIO and the like.
    pub fn is_blank(&self) -> io::Result<bool> {
        let mut buffer = AnonBuffer::new(LOOK_BYTES)?;
        let buffer = buffer.as_mut_slice();
        let buffer = buffer.get_mut(..LOOK_BYTES).unwrap_or_default();
        let mut is_zero = |offset| -> io::Result<(bool, usize)> {
            let len = self.read_up_to(buffer, offset)?;
            let read = buffer.get(..len).unwrap_or_default();
            Ok((read.iter().all(|&byte| byte == 0), len))
        };
        let step = bytes(LOOK_BYTES);
        let align = |offset: u64| offset - offset % bytes(ALIGN_MAX);
        if self.device {
            let last = align(self.found.saturating_sub(step));
            for offset in [0, last, last + step] {
                if offset < self.found && !is_zero(offset)?.0 {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let mut offset = 0;
        while let Some(data) = next_data(&self.file, offset)? {
            let (zero, len) = is_zero(align(data))?;
            if !zero {
                return Ok(false);
            }
            offset = align(data) + bytes(len);
            if len < LOOK_BYTES {
                break;
            }
        }
        Ok(true)
    }

    /// Gives a file its size, with the space set aside. Blocks for the time that takes.
    ///
    /// # Errors
    /// [`StoreError`]; a file that was there is as long as it was.
    pub fn prepare(self) -> Result<StoreFile, StoreError> {
        let Self { file, mut made, path, found, needed, size, device } = self;
        let opener = Opener { path: &path };
        if found < needed {
            opener.preallocate(&file, needed).inspect_err(|_| {
                // What could be set aside would fill the disk for nothing. Should that fail too, the error
                // at hand says what is wrong with this file system.
                drop(file.set_len(found));
            })?;
        }
        let align = opener.alignment(&file, device)?;
        made.0 = None;
        Ok(StoreFile { file, path, size, align, device })
    }
}

/// What [`Claim::is_blank`] reads at once.
const LOOK_BYTES: usize = 1 << 20;
/// No device has smaller blocks.
const SECTOR_BYTES: usize = 512;

/// Where the next bytes that are not a hole begin, at `offset` or behind it.
fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    let from = i64::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: lseek takes integers. Its effect, the position, is used by nobody.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from, libc::SEEK_DATA) };
    if let Ok(at) = u64::try_from(at) {
        return Ok(Some(at));
    }
    let error = io::Error::last_os_error();
    // Nothing but holes, or beyond the end.
    if error.raw_os_error() == Some(libc::ENXIO) { Ok(None) } else { Err(error) }
}
