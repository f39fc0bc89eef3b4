//! Another process' memory as seen from outside, and buffers of our own.

use crate::process::page_size;
use crate::task::with_memory;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use syscalls::{Sysno, raw};

/// Ranges in one call of [`read_memory`] at most.
pub const RANGES_MAX: usize = 64;

/// Reads ranges (address, bytes) of a process, one after the other, into `into` and gives how many bytes
/// came; fewer than asked where a page cannot be read.
///
/// An absent page that a userfaultfd serves *blocks* the call until it is filled, unless that descriptor has
/// `FEATURE_SIGBUS`: then the count is short. The number may be that of any thread; a program's may have lost
/// its memory ([`with_memory`]).
///
/// # Errors
/// EFAULT: not even the first byte. ESRCH: no such process, or none with memory. EPERM: it may not be read. EINVAL: more
/// than [`RANGES_MAX`] ranges.
pub fn read_memory(pid: i32, from: &[(u64, u64)], into: &mut [u8]) -> io::Result<usize> {
    const NONE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    if from.len() > RANGES_MAX {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut remote = [NONE; RANGES_MAX];
    for (place, &(address, len)) in remote.iter_mut().zip(from) {
        let address = usize::try_from(address).map_err(io::Error::other)?;
        place.iov_base = std::ptr::without_provenance_mut(address);
        place.iov_len = usize::try_from(len).map_err(io::Error::other)?;
    }
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let count = from.len() as libc::c_ulong;
    // SAFETY: process_vm_readv reads `count` entries of `remote`, all initialised, and one of `local`, and
    // writes at most `into.len()` bytes to `into`. The remote addresses are not dereferenced here.
    let n = unsafe { libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), count, 0) };
    usize::try_from(n).map_err(|_negative| io::Error::last_os_error())
}

/// Reads `into.len()` bytes of process `pid` at `at`, without ever waiting for a userfaultfd: what is absent,
/// and armed by anybody, cannot be read.
///
/// # Errors
/// EIO: not all of it is there. ESRCH, or `NotFound`: no such process, or none with memory. EACCES: it may not be read.
pub fn read_present(pid: i32, at: u64, into: &mut [u8]) -> io::Result<()> {
    with_memory(pid, |task| File::open(format!("/proc/{task}/mem"))?.read_exact_at(into, at))
}

/// Whether a thread has memory: one that ends has none, long before it is gone.
pub fn has_memory(tid: i32) -> bool {
    // The last page of all is the kernel's: nobody has anything there, and nobody waits for it.
    const NOWHERE: u64 = u64::MAX - 4095;
    match read_memory(tid, &[(NOWHERE, 1)], &mut [0]) {
        Ok(_) => true,
        Err(error) => error.raw_os_error() == Some(libc::EFAULT),
    }
}

/// What of the addresses from `start` to `end` is mapped in a process, mapping by mapping.
///
/// # Errors
/// Of reading `/proc/PID/maps`; `InvalidData` where a line of it is no mapping.
pub fn mappings_in(pid: i32, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
    let text = with_memory(pid, |task| std::fs::read_to_string(format!("/proc/{task}/maps")))?;
    let mut found = Vec::new();
    for line in text.lines() {
        let (from, to) = addresses_of(line).ok_or(io::ErrorKind::InvalidData)?;
        let part = (from.max(start), to.min(end));
        if part.0 < part.1 {
            found.push(part);
        }
    }
    Ok(found)
}

/// Whether the page at `address` is registered for missing faults with some userfaultfd.
///
/// # Errors
/// Of reading `/proc/PID/smaps`, which takes as long as the process has pages.
pub fn is_registered(pid: i32, address: u64) -> io::Result<bool> {
    let text = with_memory(pid, |task| std::fs::read_to_string(format!("/proc/{task}/smaps")))?;
    let mut inside = false;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if inside {
                return Ok(flags.split_whitespace().any(|flag| flag == "um"));
            }
        } else if let Some((from, to)) = addresses_of(line) {
            inside = (from..to).contains(&address);
        }
    }
    Ok(false)
}

/// From and to in the first line of a mapping.
fn addresses_of(line: &str) -> Option<(u64, u64)> {
    let (from, to) = line.split_once(' ')?.0.split_once('-')?;
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
}

/// One page of `/proc/PID/pagemap`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct PageEntry(pub u64);

impl PageEntry {
    const fn bit(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// The page is mapped.
    pub const fn present(self) -> bool {
        self.bit(63)
    }

    /// The page is in swap, or a marker (write-protected and absent) is in its place.
    pub const fn swapped(self) -> bool {
        self.bit(62)
    }

    /// userfaultfd protects it against writes.
    pub const fn write_protected(self) -> bool {
        self.bit(57)
    }
}

/// `/proc/PID/pagemap`. Goes on to show the memory that the process had when it was opened.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Opens it.
    ///
    /// # Errors
    /// `NotFound`: no such process. `PermissionDenied`: it may not be read.
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self { file: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// Reads the entries of the pages from address `start` on, and gives how many came: fewer than asked at
    /// the end of the address space, none when the memory is gone.
    ///
    /// # Errors
    /// Of read.
    pub fn read(&self, start: u64, entries: &mut [PageEntry]) -> io::Result<usize> {
        let len = size_of_val(entries);
        let at = entries.as_mut_ptr().cast::<u8>();
        // SAFETY: `PageEntry` is a transparent u64: any bytes are a valid one, and a slice of them may be
        // written as bytes for as long as it is borrowed.
        let buffer = unsafe { std::slice::from_raw_parts_mut(at, len) };
        let from = start / page_size() * 8;
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, from + crate::uffd::bytes(done)) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done / 8)
    }
}

/// Changes the protection of memory of this process. The system call itself: a library that stands in front of
/// libc's function calls this.
///
/// # Safety
/// mprotect(2): whoever uses the range must be ready for it.
///
/// # Errors
/// Of mprotect; ENOMEM also where the process has as many mappings as it may have.
pub unsafe fn protect(address: usize, bytes: usize, access: i32) -> io::Result<()> {
    let access = usize::try_from(access).map_err(io::Error::other)?;
    // SAFETY: by contract.
    let result = unsafe { raw::syscall3(Sysno::mprotect as usize, address, bytes, access) };
    match i32::try_from(result.cast_signed()) {
        Ok(0) => Ok(()),
        Ok(error) => Err(io::Error::from_raw_os_error(-error)),
        Err(_) => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Private memory for I/O: aligned to 2 MiB, backed by huge pages where there are any, touched throughout,
/// and not inherited by children. Disks read twice as fast into it as into scattered pages.
#[derive(Debug)]
pub struct AnonBuffer {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its memory as a `Vec<u8>` does; nothing about it is bound to a thread.
unsafe impl Send for AnonBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for AnonBuffer {}

/// Bytes of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;

impl AnonBuffer {
    /// Maps and touches `len` bytes, rounded up to 2 MiB. Takes about 0.5 ms for each MiB.
    ///
    /// # Errors
    /// ENOMEM; EINVAL for no bytes.
    pub fn new(len: usize) -> io::Result<Self> {
        let buffer = Self::untouched(len)?;
        match buffer.madvise(libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => buffer.touch(),
            other => other?,
        }
        Ok(buffer)
    }

    /// The same, touched by whoever uses it.
    pub(crate) fn untouched(len: usize) -> io::Result<Self> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let len =
            len.checked_next_multiple_of(HUGE_PAGE).filter(|&len| len > 0).ok_or_else(invalid)?;
        let with_slack = len.checked_add(HUGE_PAGE).ok_or_else(invalid)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                with_slack,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let raw = raw.cast::<u8>();
        let before = raw.addr().next_multiple_of(HUGE_PAGE) - raw.addr();
        let base = raw.wrapping_add(before);
        let trim = |at: *mut u8, len: usize| {
            if len > 0 {
                // SAFETY: a part of the mapping just made, outside of what the buffer keeps.
                unsafe { libc::munmap(at.cast(), len) };
            }
        };
        trim(raw, before);
        trim(base.wrapping_add(len), HUGE_PAGE - before);
        let base = NonNull::new(base).ok_or_else(invalid)?;
        let buffer = Self { base, len };
        // Huge pages are a wish; without them the buffer is only slower.
        buffer.madvise(libc::MADV_HUGEPAGE).ok();
        buffer.madvise(libc::MADV_DONTFORK)?;
        buffer.madvise(libc::MADV_DONTDUMP)?;
        Ok(buffer)
    }

    fn madvise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: the range is the buffer's own, and none of the advices used here changes content, but for
        // `empty`, whose caller has the only use of it.
        let rc = unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, advice) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives its memory back, if the kernel can: what is touched then reads as zeros.
    pub(crate) fn empty(&self) {
        // A process that locks what it touches needs the second, which is of Linux 5.18. Without it the buffer
        // only keeps its memory.
        if self.madvise(libc::MADV_DONTNEED).is_err() {
            self.madvise(libc::MADV_DONTNEED_LOCKED).ok();
        }
    }

    /// For kernels without MADV_POPULATE_WRITE (before 5.14).
    fn touch(&self) {
        for offset in (0..self.len).step_by(4096) {
            let at = self.base.as_ptr().wrapping_add(offset);
            // SAFETY: inside the mapping, which nobody else knows of yet.
            unsafe { at.write_volatile(0) };
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped, initialised (zeros at least) and owned by `self`, which is borrowed.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// Its bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Where it lies.
    pub fn as_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for AnonBuffer {
    fn drop(&mut self) {
        // SAFETY: the range is the buffer's own, and every borrow of it has ended.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_and_writable() {
        let mut buffer = AnonBuffer::new(1).expect("2 MiB");
        assert_eq!(buffer.len(), HUGE_PAGE);
        assert!(buffer.as_ptr().addr().is_multiple_of(HUGE_PAGE));
        buffer.as_mut_slice().fill(7);
        assert!(buffer.as_slice().iter().all(|&b| b == 7));
        assert!(AnonBuffer::new(0).is_err());
        assert!(AnonBuffer::new(usize::MAX).is_err());
    }

    #[test]
    fn own_memory_is_read_in_pieces() {
        let (a, b) = ([1u8; 10], [2u8; 6]);
        let at = |slice: &[u8]| crate::uffd::bytes(slice.as_ptr().expose_provenance());
        let mut into = [0u8; 16];
        let pid = std::process::id().cast_signed();
        let n = read_memory(pid, &[(at(&a), 10), (at(&b), 6)], &mut into).expect("own memory");
        assert_eq!(n, 16);
        assert_eq!(into[..10], a);
        assert_eq!(into[10..], b);
        let gone = read_memory(pid, &[(4096, 16)], &mut into).expect_err("nothing is mapped there");
        assert_eq!(gone.raw_os_error(), Some(libc::EFAULT));
    }

    #[test]
    fn what_is_there_is_read_and_nothing_else() {
        let mut buffer = AnonBuffer::new(HUGE_PAGE).expect("2 MiB");
        let at = crate::uffd::bytes(buffer.as_ptr().expose_provenance());
        let pid = std::process::id().cast_signed();
        buffer.as_mut_slice()[..8].fill(7);
        let mut seen = [0; 8];
        read_present(pid, at, &mut seen).expect("it is there");
        assert_eq!(seen, [7; 8]);
        assert!(read_present(pid, 4096, &mut seen).is_err(), "nothing is mapped there");
    }

    #[test]
    fn pagemap_tells_present_pages_from_absent_ones() {
        let mut buffer = AnonBuffer::new(HUGE_PAGE).expect("2 MiB");
        buffer.as_mut_slice().fill(1);
        let pid = std::process::id().cast_signed();
        let map = Pagemap::open(pid).expect("own pagemap");
        let mut entries = [PageEntry::default(); 4];
        let at = crate::uffd::bytes(buffer.as_ptr().expose_provenance());
        assert_eq!(map.read(at, &mut entries).expect("read"), 4);
        assert!(entries.iter().all(|e| e.present() && !e.write_protected()));
        assert_eq!(map.read(0, &mut entries).expect("read"), 4);
        assert!(entries.iter().all(|e| !e.present()));
    }

    #[test]
    fn mappings_are_those_of_the_range_and_cut_to_it() {
        let buffer = AnonBuffer::new(8 << 20).expect("mmap");
        let start = buffer.as_slice().as_ptr().addr() as u64;
        let page = page_size();
        let me = std::process::id().cast_signed();
        let found = mappings_in(me, start + page, start + 4 * page).expect("maps");
        assert_eq!(found, [(start + page, start + 4 * page)]);
        assert_eq!(mappings_in(me, 0, 4096).expect("maps"), []);
        assert!(!is_registered(me, start + page).expect("smaps"));
        assert!(mappings_in(0, 0, u64::MAX).is_err());
    }
}
