//! Memory that several processes, or several lives of one, have in common.
//!
//! Nothing of it is ever borrowed as `&[u8]`: another process may write it at any moment, so it is reached
//! through atomics only, and whoever reads a value checks it.

use crate::abi::MSG_BYTES;
use crate::uffd::{Msg, bytes};
use std::fs::OpenOptions;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A shared mapping of anything, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a `Mapping` is an address range that belongs to no thread; everything that reads or writes it does
// so through atomics or hands the pointer to the kernel.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method gives a plain reference to its bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` shared, readable and writable.
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::Other))?;
        Ok(Self { base, len })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Gives the range up without unmapping it.
    pub(crate) fn leak(self) -> *mut u8 {
        let this = std::mem::ManuallyDrop::new(self);
        this.base.as_ptr()
    }

    pub(crate) fn u64(&self, offset: usize) -> Option<&AtomicU64> {
        let end = offset.checked_add(8)?;
        if end > self.len || !offset.is_multiple_of(8) {
            return None;
        }
        // SAFETY: `offset + 8 <= len`, so the result stays inside the mapping.
        let at = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: mapped, readable and writable for as long as `self` lives; aligned, since the base is
        // page-aligned and `offset` a multiple of 8; only ever reached through atomics.
        Some(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    pub(crate) fn u32(&self, offset: usize) -> Option<&AtomicU32> {
        let end = offset.checked_add(4)?;
        if end > self.len || !offset.is_multiple_of(4) {
            return None;
        }
        // SAFETY: `offset + 4 <= len`, so the result stays inside the mapping.
        let at = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: as in `u64`, with an offset that is a multiple of 4.
        Some(unsafe { AtomicU32::from_ptr(at.cast()) })
    }

    pub(crate) fn madvise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: the range is ours; the advices used here (DONTFORK, DONTDUMP) change no content.
        let rc = unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, advice) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `shared`, and every reference into it borrows `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A file mapped as a whole, shared and writable.
///
/// Meant for files that only this daemon can open: whoever can truncate the file can end the process by
/// SIGBUS. For memory shared with a client use [`sealed_memfd`].
#[derive(Debug)]
pub struct SharedFile {
    fd: OwnedFd,
    map: Mapping,
}

impl SharedFile {
    /// Creates a sparse file of `len` bytes, mode 0600.
    ///
    /// # Errors
    /// `AlreadyExists` where the path is taken; else of open, ftruncate or mmap.
    pub fn create(path: &Path, len: u64) -> io::Result<Self> {
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(len)?;
        Self::map(file.into(), len)
    }

    /// Opens a file and maps all of it.
    ///
    /// # Errors
    /// Of open or mmap; EINVAL for an empty file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        let len = file.metadata()?.len();
        Self::map(file.into(), len)
    }

    /// Maps the first `len` bytes of a file or memfd.
    ///
    /// # Errors
    /// EINVAL where the file is shorter; else of mmap.
    pub fn map(fd: OwnedFd, len: u64) -> io::Result<Self> {
        let file = std::fs::File::from(fd);
        let size =
            usize::try_from(len).map_err(|_too_long| io::Error::from_raw_os_error(libc::EINVAL))?;
        if file.metadata()?.len() < len {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let fd = OwnedFd::from(file);
        let map = Mapping::shared(fd.as_fd(), size)?;
        Ok(Self { fd, map })
    }

    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        bytes(self.map.len())
    }

    /// Never: an empty file cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// The eight bytes at `offset`; `None` where they are not inside or not aligned.
    pub fn at_u64(&self, offset: u64) -> Option<&AtomicU64> {
        self.map.u64(usize::try_from(offset).ok()?)
    }

    /// The four bytes at `offset`; `None` where they are not inside or not aligned.
    pub fn at_u32(&self, offset: u64) -> Option<&AtomicU32> {
        self.map.u32(usize::try_from(offset).ok()?)
    }

    /// `count` words from `offset` on; `None` where they are not inside or not aligned.
    pub fn words(&self, offset: u64, count: usize) -> Option<&[AtomicU64]> {
        let offset = usize::try_from(offset).ok()?;
        let end = count.checked_mul(8)?.checked_add(offset)?;
        if end > self.map.len() || !offset.is_multiple_of(8) {
            return None;
        }
        // SAFETY: `offset <= end <= len`: inside the mapping or one past its end.
        let at = unsafe { self.map.as_ptr().add(offset) };
        // SAFETY: `count` words lie inside the mapping, which lives as long as `self`; they are aligned,
        // and `AtomicU64` may be shared with anyone who writes them.
        Some(unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), count) })
    }

    /// `len` bytes from `offset` on; `None` where they are not inside, or `offset` is no multiple of 8.
    pub fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice<'_>> {
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        if offset.checked_add(len)? > self.map.len() || !offset.is_multiple_of(8) {
            return None;
        }
        Some(SharedSlice { map: &self.map, offset, len, of: PhantomData })
    }

    /// Takes memory for a range now: without it a touch of a page that is not there yet ends the process
    /// (SIGBUS) where the file system is full. What is there stays as it is.
    ///
    /// # Errors
    /// Of fallocate: ENOSPC where there is no room, and nothing is taken then.
    pub fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        loop {
            // SAFETY: fallocate on an open descriptor changes no byte that is there, and touches no memory
            // of ours otherwise.
            let rc = unsafe {
                libc::fallocate(self.fd.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, offset, len)
            };
            if rc == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Gives the pages of a range back to the system; they read as zeros afterwards.
    ///
    /// # Errors
    /// Of fallocate: EOPNOTSUPP where the file system has no holes.
    pub fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: fallocate on an open descriptor touches no memory of ours except what the mapping
        // shows, which is read through atomics only.
        let rc = unsafe { libc::fallocate(self.fd.as_raw_fd(), mode, offset, len) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Keeps a range in memory, so that a write to it never waits for a disk.
    ///
    /// # Errors
    /// EINVAL where the range is not inside; ENOMEM or EPERM where RLIMIT_MEMLOCK is in the way.
    pub fn lock(&self, offset: u64, len: u64) -> io::Result<()> {
        let slice =
            self.slice(offset, len).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        // SAFETY: the range lies inside the mapping; locking changes no content.
        let rc = unsafe { libc::mlock(slice.as_mut_ptr().cast(), slice.len) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Part of a [`SharedFile`]: a place that the kernel may fill.
#[derive(Clone, Copy, Debug)]
pub struct SharedSlice<'a> {
    map: &'a Mapping,
    offset: usize,
    len: usize,
    of: PhantomData<&'a SharedFile>,
}

impl SharedSlice<'_> {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Word number `index`; `None` beyond the end.
    pub fn word(&self, index: usize) -> Option<&AtomicU64> {
        let at = index.checked_mul(8)?;
        if at.checked_add(8)? > self.len {
            return None;
        }
        self.map.u64(self.offset + at)
    }

    /// Message number `index`; `None` beyond the end.
    pub fn message(&self, index: usize) -> Option<Msg> {
        let first = index.checked_mul(MSG_BYTES / 8)?;
        let mut words = [0; MSG_BYTES / 8];
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.word(first.checked_add(i)?)?.load(Ordering::Acquire);
        }
        Some(Msg::from_words(words))
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        // SAFETY: `offset + len` lies inside the mapping: `SharedFile::slice` checked it.
        unsafe { self.map.as_ptr().add(self.offset) }
    }
}

const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A memfd of `len` bytes whose size nobody can change, close-on-exec.
///
/// # Errors
/// Of memfd_create, ftruncate or fcntl; EINVAL for a name with a NUL.
pub fn sealed_memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    let name = std::ffi::CString::new(name)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `name` is a C string that lives until the call returns.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len)?;
    // SAFETY: F_ADD_SEALS takes an integer and touches no memory.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file.into())
}

/// Checks that `fd` is a memfd of exactly `len` bytes whose size nobody can change.
///
/// # Errors
/// `InvalidData` where it is not; else of fstat or fcntl.
pub fn check_sealed(fd: BorrowedFd<'_>, len: u64) -> io::Result<()> {
    // SAFETY: F_GET_SEALS takes no argument and touches no memory.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 {
        return Err(io::Error::last_os_error());
    }
    let size = std::fs::File::from(fd.try_clone_to_owned()?).metadata()?.len();
    let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    if seals & needed != needed || size != len {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the memory is not sealed against a change of size, or has another size",
        ));
    }
    Ok(())
}

/// Which file a descriptor is open on. Two descriptors with the same id, both open, are of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileId {
    /// Device.
    pub device: u64,
    /// Inode on that device.
    pub inode: u64,
}

impl FileId {
    /// That of an open descriptor.
    ///
    /// # Errors
    /// Of fstat.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let facts = std::fs::File::from(fd.try_clone_to_owned()?).metadata()?;
        Ok(Self { device: facts.dev(), inode: facts.ino() })
    }
}

/// An eventfd, non-blocking and close-on-exec.
///
/// # Errors
/// EMFILE, ENFILE, ENOMEM.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes two integers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes the count of an eventfd; 0 when it was not signalled. Never blocks, whatever the flags of the
/// description are.
///
/// # Errors
/// Of read, except EAGAIN.
pub fn eventfd_drain(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut count = [0u8; 8];
    // SAFETY: `count` is writable for eight bytes and not borrowed elsewhere.
    let n = unsafe { crate::nowait::read_now(fd, count.as_mut_ptr(), count.len()) }?;
    Ok(if n == count.len() { u64::from_ne_bytes(count) } else { 0 })
}

/// Signals an eventfd. A counter that is full already counts as signalled.
///
/// # Errors
/// Of write, except EAGAIN.
pub fn eventfd_signal(fd: BorrowedFd<'_>) -> io::Result<()> {
    let one = 1u64.to_ne_bytes();
    // SAFETY: `one` is readable for eight bytes.
    let n = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), 8) };
    if n == 8 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_outside_or_askew_are_refused() {
        let fd = sealed_memfd("tiermgr-test", 4096).expect("memfd");
        let file = SharedFile::map(fd, 4096).expect("map");
        assert!(file.at_u64(4088).is_some());
        assert!(file.at_u64(4089).is_none());
        assert!(file.at_u64(4096).is_none());
        assert!(file.at_u64(u64::MAX).is_none());
        assert!(file.at_u32(4094).is_none());
        assert!(file.words(8, 511).is_some());
        assert!(file.words(8, 512).is_none());
        assert!(
            file.slice(4032, 64).is_some_and(|s| s.message(1).is_some() && s.message(2).is_none())
        );
    }

    #[test]
    fn a_sealed_memfd_keeps_its_size() {
        let fd = sealed_memfd("tiermgr-test", 8192).expect("memfd");
        check_sealed(fd.as_fd(), 8192).expect("sealed");
        assert!(check_sealed(fd.as_fd(), 4096).is_err());
        assert!(std::fs::File::from(fd).set_len(0).is_err());
        let tmp = std::fs::File::open("/proc/self/exe").expect("a plain file");
        assert!(check_sealed(tmp.as_fd(), 8192).is_err());
    }

    #[test]
    fn a_punched_range_reads_as_zeros() {
        let fd = sealed_memfd("tiermgr-test", 65536 * 2).expect("memfd");
        let file = SharedFile::map(fd, 65536 * 2).expect("map");
        let word = file.at_u64(65536).expect("inside");
        word.store(7, Ordering::Relaxed);
        file.punch(65536, 65536).expect("punch");
        assert_eq!(word.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_eventfd_counts_and_drains() {
        let fd = eventfd().expect("eventfd");
        assert_eq!(eventfd_drain(fd.as_fd()).expect("drain"), 0);
        eventfd_signal(fd.as_fd()).expect("signal");
        eventfd_signal(fd.as_fd()).expect("signal");
        assert_eq!(eventfd_drain(fd.as_fd()).expect("drain"), 2);
    }
}
