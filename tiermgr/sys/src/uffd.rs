//! userfaultfd: the device, descriptors, fills, and messages.
//!
//! A descriptor belongs to the memory of the process that made it, whoever holds it; every address below
//! is an address *there*. Calls on the memory of a process that is just being torn down can take hundreds
//! of milliseconds, because the last reference to that memory may end in the caller.
//!
//! The crate `userfaultfd` is not used: it has neither MOVE nor POISON nor write-protected COPY, and it casts
//! negative results to huge lengths.

use crate::abi;
use crate::nowait;
use crate::shm::SharedSlice;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Bytes from a length of this machine.
pub(crate) fn bytes(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

/// The descriptor of `/dev/userfaultfd`.
///
/// Whoever holds it can make userfaultfds that also serve faults in kernel mode; it may be passed to an
/// unprivileged process.
#[derive(Debug)]
pub struct DeviceFd(OwnedFd);

/// Why `/dev/userfaultfd` could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no such device.
    #[error(
        "/dev/userfaultfd does not exist: it needs Linux 6.1 or later built with CONFIG_USERFAULTFD \
         (in a container: pass the device in)"
    )]
    Missing,
    /// The device may not be opened.
    #[error(
        "opening /dev/userfaultfd is not permitted: run as root, or grant read-write access to the device"
    )]
    NotPermitted,
    /// Something else.
    #[error("opening /dev/userfaultfd")]
    Open(#[source] io::Error),
}

impl DeviceFd {
    /// Opens the device.
    ///
    /// # Errors
    /// [`DeviceError`] names the cause and what helps.
    pub fn open() -> Result<Self, DeviceError> {
        let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
        match file {
            Ok(file) => Ok(Self(file.into())),
            Err(error) => Err(match error.kind() {
                io::ErrorKind::NotFound => DeviceError::Missing,
                io::ErrorKind::PermissionDenied => DeviceError::NotPermitted,
                _ => DeviceError::Open(error),
            }),
        }
    }

    /// Takes a descriptor that was received.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for DeviceFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes a userfaultfd for the *calling process'* memory, non-blocking and close-on-exec.
///
/// # Errors
/// That of the ioctl; EMFILE where the process has no descriptor left.
pub fn new_from_device(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: USERFAULTFD_IOC_NEW takes its flags by value and touches no memory.
    let fd = unsafe {
        libc::ioctl(device.as_raw_fd(), libc::Ioctl::from(abi::USERFAULTFD_IOC_NEW), flags)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What the handshake told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiInfo {
    /// Every feature that the kernel has (`abi::FEATURE_*`), asked for or not.
    pub features: u64,
    /// Bit per ioctl number that works on the descriptor itself.
    pub ioctls: u64,
}

/// Enables a descriptor with exactly `features`. Once per descriptor.
///
/// # Errors
/// EINVAL: a feature is not known here, or the handshake was done before. EPERM: EVENT_FORK without
/// CAP_SYS_PTRACE.
pub fn handshake(fd: BorrowedFd<'_>, features: u64) -> io::Result<ApiInfo> {
    // The kernel writes all that it has into the struct: a struct used twice would ask for EVENT_REMOVE
    // and the like, and a plain madvise of the client would then block.
    let mut arg = abi::UffdioApi { api: abi::UFFD_API, features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `UffdioApi`, which `arg` is.
    unsafe { ioctl(fd, abi::UFFDIO_API, &mut arg) }.map_err(io::Error::from_raw_os_error)?;
    Ok(ApiInfo { features: arg.features, ioctls: arg.ioctls })
}

/// How a call on client memory ended, by what the caller must do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of it is done.
    Done,
    /// EAGAIN: a change of the layout is under way or its message unread: read messages, then try the
    /// rest again.
    EventsPending,
    /// EEXIST: a page is there already. Who waits for it still needs a wake.
    Exists,
    /// ENOENT, EINVAL: the range is gone, or it crosses a split of the mapping: look at the maps before
    /// believing that it is gone. For a move also: nothing is there to move.
    NoRange,
    /// ESRCH: the memory is gone for good.
    NoProcess,
    /// ENOMEM: the client may take no more memory, or the machine has none.
    NoMemory,
    /// EBUSY: the page is pinned, or shared since a fork.
    Busy,
    /// Some other errno.
    Other(i32),
}

impl Outcome {
    /// From an errno; 0 is success.
    pub const fn from_errno(errno: i32) -> Self {
        match errno {
            0 => Self::Done,
            libc::EAGAIN => Self::EventsPending,
            libc::EEXIST => Self::Exists,
            libc::ENOENT | libc::EINVAL => Self::NoRange,
            libc::ESRCH => Self::NoProcess,
            libc::ENOMEM => Self::NoMemory,
            libc::EBUSY => Self::Busy,
            other => Self::Other(other),
        }
    }
}

/// How far a fill came, and why it stopped there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Bytes done, counted from the start of the range.
    pub bytes: u64,
    /// What happened at `start + bytes`; [`Outcome::Done`] if and only if all bytes are done.
    pub outcome: Outcome,
}

/// What a range is registered for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    /// Touches of absent pages.
    pub missing: bool,
    /// Writes to protected pages.
    pub write_protect: bool,
    /// Touches of pages that are in the page cache only.
    pub minor: bool,
}

impl Mode {
    /// Absent pages and writes to protected ones.
    pub const MISSING_WP: Self = Self { missing: true, write_protect: true, minor: false };
    /// Absent pages.
    pub const MISSING: Self = Self { missing: true, write_protect: false, minor: false };

    const fn bits(self) -> u64 {
        let mut bits = 0;
        if self.missing {
            bits |= abi::REGISTER_MODE_MISSING;
        }
        if self.write_protect {
            bits |= abi::REGISTER_MODE_WP;
        }
        if self.minor {
            bits |= abi::REGISTER_MODE_MINOR;
        }
        bits
    }
}

/// One ioctl whose argument is a struct; `Err` is the errno.
///
/// # Safety
/// `number` must be a request whose argument is exactly one `T`, and the addresses inside `arg` that the
/// request reads in the caller's memory must be readable.
unsafe fn ioctl<T>(fd: BorrowedFd<'_>, number: u32, arg: &mut T) -> Result<(), i32> {
    // SAFETY: the descriptor is open while it is borrowed; `arg` is live, writable and, as the caller
    // promises, what the request takes.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::Ioctl::from(number), &raw mut *arg) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Repeats a fill for the rest while it makes progress, so that the outcome is the true reason of the
/// place where it stopped: the kernel reports a partial fill as EAGAIN whatever ended it.
///
/// `step(done)` fills from `done` on and gives the errno and the kernel's count.
fn fill(len: u64, mut step: impl FnMut(u64) -> (i32, i64)) -> Installed {
    let mut done = 0;
    while done < len {
        let (errno, count) = step(done);
        if errno == 0 {
            return Installed { bytes: len, outcome: Outcome::Done };
        }
        match u64::try_from(count) {
            Ok(count) if count > 0 && count <= len - done && errno == libc::EAGAIN => done += count,
            _ => return Installed { bytes: done, outcome: Outcome::from_errno(errno) },
        }
    }
    Installed { bytes: len, outcome: Outcome::Done }
}

/// [`Uffd::unregister`], for a descriptor whose handshake may be somebody else's.
///
/// # Errors
/// The same; EINVAL too where there was no handshake.
pub fn unregister(fd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    let mut arg = abi::UffdioRange { start, len };
    // SAFETY: UFFDIO_UNREGISTER takes one `UffdioRange`.
    unsafe { ioctl(fd, abi::UFFDIO_UNREGISTER, &mut arg) }.map_err(io::Error::from_raw_os_error)
}

/// A userfaultfd that had its handshake.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl Uffd {
    /// Takes a descriptor. Calls on one that is no userfaultfd end in [`Outcome::Other`].
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Gives the descriptor back.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Takes a descriptor by its number: one that a FORK message named, or that was recorded before a
    /// restart and survived in the shared descriptor table. Its description is made non-blocking: that of a
    /// forked child has the flags with which the parent's was made.
    ///
    /// # Errors
    /// EBADF where the number is not open, EINVAL where it is no userfaultfd; nothing is closed then.
    ///
    /// # Safety
    /// Nothing else in the process may own the number.
    pub unsafe fn adopt(fd: RawFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}"))
            .map_err(|_closed| io::Error::from_raw_os_error(libc::EBADF))?;
        if link.as_os_str() != crate::keeper::UFFD_LINK {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: it is open, as its link was just read, and stays so: the caller promises that nobody
        // else owns it.
        nowait::make_nonblocking(unsafe { BorrowedFd::borrow_raw(fd) })?;
        // SAFETY: it is open, as its link was just read, and the caller promises that nobody owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Another descriptor of the same userfaultfd.
    ///
    /// # Errors
    /// EMFILE where the process has none left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    /// Registers a range and gives the bit set of ioctls that work on it. A range that is registered
    /// already gets the new mode.
    ///
    /// # Errors
    /// EBUSY: another userfaultfd has part of it. EINVAL: no mapping there, or one of the wrong kind.
    /// EPERM: a shared mapping that cannot become writable. ENOMEM: the process is gone (here the kernel does
    /// not say ESRCH), or its limit of mappings is reached.
    pub fn register(&self, start: u64, len: u64, mode: Mode) -> io::Result<u64> {
        let mut arg = abi::UffdioRegister {
            range: abi::UffdioRange { start, len },
            mode: mode.bits(),
            ioctls: 0,
        };
        // SAFETY: UFFDIO_REGISTER takes one `UffdioRegister`.
        unsafe { ioctl(self.as_fd(), abi::UFFDIO_REGISTER, &mut arg) }
            .map_err(io::Error::from_raw_os_error)?;
        Ok(arg.ioctls)
    }

    /// Takes a range out of service: absent pages read as zeros from here on, and whoever waits for one
    /// goes on.
    ///
    /// # Errors
    /// EINVAL: no mapping there. ENOMEM: the process is gone, or its limit of mappings is reached.
    pub fn unregister(&self, start: u64, len: u64) -> io::Result<()> {
        unregister(self.as_fd(), start, len)
    }

    /// Installs the bytes of `src` at `dst`, where nothing may be yet; `protect`: so that the first write
    /// faults.
    pub fn copy(&self, dst: u64, src: &[u8], protect: bool, wake: bool) -> Installed {
        let len = bytes(src.len());
        let from = bytes(src.as_ptr().expose_provenance());
        let mode = if protect { abi::COPY_MODE_WP } else { 0 }
            | if wake { 0 } else { abi::COPY_MODE_DONTWAKE };
        fill(len, |done| {
            let mut arg = abi::UffdioCopy {
                dst: dst.wrapping_add(done),
                src: from + done,
                len: len - done,
                mode,
                copy: 0,
            };
            // SAFETY: UFFDIO_COPY takes one `UffdioCopy`; it reads `src..src + len` of our memory, which
            // is borrowed as `src` until this call returns.
            let rc = unsafe { ioctl(self.as_fd(), abi::UFFDIO_COPY, &mut arg) };
            (rc.err().unwrap_or(0), arg.copy)
        })
    }

    /// Marks pages so that every access ends in SIGBUS. Absent pages only.
    pub fn poison(&self, start: u64, len: u64) -> Installed {
        fill(len, |done| {
            let range = abi::UffdioRange { start: start.wrapping_add(done), len: len - done };
            let mut arg = abi::UffdioPoison { range, mode: 0, updated: 0 };
            // SAFETY: UFFDIO_POISON takes one `UffdioPoison`.
            let rc = unsafe { ioctl(self.as_fd(), abi::UFFDIO_POISON, &mut arg) };
            (rc.err().unwrap_or(0), arg.updated)
        })
    }

    /// Moves pages inside the *caller's own* memory and wakes whoever waits at `dst`. The destination must
    /// be registered with this descriptor; that is all that the kernel checks.
    ///
    /// # Safety
    /// No Rust object may lie in either range.
    pub unsafe fn move_pages(&self, dst: u64, src: u64, len: u64, allow_holes: bool) -> Installed {
        let mode = if allow_holes { abi::MOVE_MODE_ALLOW_SRC_HOLES } else { 0 };
        fill(len, |done| {
            let mut arg = abi::UffdioMove {
                dst: dst.wrapping_add(done),
                src: src.wrapping_add(done),
                len: len - done,
                mode,
                moved: 0,
            };
            // SAFETY: UFFDIO_MOVE takes one `UffdioMove`. It changes which pages lie at two ranges of our
            // own address space, in which no object lies, as the caller promises.
            let rc = unsafe { ioctl(self.as_fd(), abi::UFFDIO_MOVE, &mut arg) };
            (rc.err().unwrap_or(0), arg.moved)
        })
    }

    /// Protects (`on`) or unprotects a range that is registered for it; `wake` counts when unprotecting.
    pub fn protect(&self, start: u64, len: u64, on: bool, wake: bool) -> Outcome {
        let mode = match (on, wake) {
            (true, _) => abi::WRITEPROTECT_MODE_WP,
            (false, true) => 0,
            (false, false) => abi::WRITEPROTECT_MODE_DONTWAKE,
        };
        let mut arg = abi::UffdioWriteprotect { range: abi::UffdioRange { start, len }, mode };
        // SAFETY: UFFDIO_WRITEPROTECT takes one `UffdioWriteprotect`.
        let rc = unsafe { ioctl(self.as_fd(), abi::UFFDIO_WRITEPROTECT, &mut arg) };
        Outcome::from_errno(rc.err().unwrap_or(0))
    }

    /// Lets whoever waits in the range look again.
    pub fn wake(&self, start: u64, len: u64) -> Outcome {
        let mut arg = abi::UffdioRange { start, len };
        // SAFETY: UFFDIO_WAKE takes one `UffdioRange`.
        let rc = unsafe { ioctl(self.as_fd(), abi::UFFDIO_WAKE, &mut arg) };
        Outcome::from_errno(rc.err().unwrap_or(0))
    }

    /// Reads messages that are there and gives their number; 0 when there are none. Never blocks, whatever
    /// the flags of the description are; before Linux 6.10, and where a FORK message brought the descriptor,
    /// never longer than some milliseconds.
    ///
    /// A FORK message installs a descriptor in this process at this moment.
    ///
    /// # Errors
    /// EMFILE: a FORK message waits and there is no descriptor left: the fork hangs until there is one.
    pub fn read_messages(&self, messages: &mut [Msg]) -> io::Result<usize> {
        let len = size_of_val(messages);
        // SAFETY: `messages` is writable for `len` bytes, and any bytes make a valid `Msg`.
        let n = unsafe { nowait::read_now(self.as_fd(), messages.as_mut_ptr().cast(), len) };
        Ok(n? / abi::MSG_BYTES)
    }

    /// As [`Uffd::read_messages`], straight into memory that survives this process. Look at them with
    /// [`SharedSlice::message`].
    ///
    /// # Errors
    /// As [`Uffd::read_messages`].
    pub fn read_messages_into(&self, buffer: &SharedSlice<'_>) -> io::Result<usize> {
        let len = buffer.len() / abi::MSG_BYTES * abi::MSG_BYTES;
        // SAFETY: `buffer` is mapped and writable for its length while it is borrowed, and only ever read
        // through atomics, so that a write by the kernel cannot be a data race with a Rust reference.
        let n = unsafe { nowait::read_now(self.as_fd(), buffer.as_mut_ptr().cast(), len) };
        Ok(n? / abi::MSG_BYTES)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// One raw message, `struct uffd_msg`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Msg {
    words: [u64; 4],
}

impl Msg {
    /// From its words as they lie in memory.
    pub const fn from_words(words: [u64; 4]) -> Self {
        Self { words }
    }

    /// Its words as they lie in memory.
    pub const fn words(&self) -> [u64; 4] {
        self.words
    }

    /// What it says; `None` for a kind that no feature used here sends.
    pub fn parse(&self) -> Option<Message> {
        let [head, a, b, c] = self.words;
        match head.to_ne_bytes()[0] {
            abi::EVENT_PAGEFAULT => Some(Message::Pagefault {
                address: b,
                write: a & abi::PAGEFAULT_FLAG_WRITE != 0,
                wp: a & abi::PAGEFAULT_FLAG_WP != 0,
                minor: a & abi::PAGEFAULT_FLAG_MINOR != 0,
            }),
            abi::EVENT_FORK => {
                let [b0, b1, b2, b3, ..] = a.to_ne_bytes();
                Some(Message::Fork { fd: RawFd::from_ne_bytes([b0, b1, b2, b3]) })
            }
            abi::EVENT_REMAP => Some(Message::Remap { from: a, to: b, len: c }),
            abi::EVENT_REMOVE => Some(Message::Remove { start: a, end: b }),
            abi::EVENT_UNMAP => Some(Message::Unmap { start: a, end: b }),
            _ => None,
        }
    }
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A thread waits for a page.
    Pagefault {
        /// Rounded down to a page.
        address: u64,
        /// The access is a write.
        write: bool,
        /// The page is there and protected.
        wp: bool,
        /// The page is in the page cache only.
        minor: bool,
    },
    /// The process forked.
    Fork {
        /// The child's userfaultfd, now open in the process that read the message; take it with
        /// [`Uffd::adopt`].
        fd: RawFd,
    },
    /// A mapping moved.
    Remap {
        /// Where it was.
        from: u64,
        /// Where it is.
        to: u64,
        /// Bytes of the old place.
        len: u64,
    },
    /// Pages are about to be dropped.
    Remove {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A range was unmapped.
    Unmap {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_fill_goes_on_and_ends_with_the_true_reason() {
        let mut calls = vec![(libc::EEXIST, 0), (libc::EAGAIN, 8192)];
        let end = fill(16384, |_| calls.pop().expect("no third call"));
        assert_eq!(end, Installed { bytes: 8192, outcome: Outcome::Exists });
    }

    #[test]
    fn a_negative_count_is_no_progress() {
        let end = fill(8192, |_| (libc::EAGAIN, -i64::from(libc::EAGAIN)));
        assert_eq!(end, Installed { bytes: 0, outcome: Outcome::EventsPending });
    }

    #[test]
    fn a_count_beyond_the_range_is_not_believed() {
        let end = fill(4096, |_| (libc::EAGAIN, 8192));
        assert_eq!(end, Installed { bytes: 0, outcome: Outcome::EventsPending });
    }

    #[test]
    fn messages_are_read_as_the_kernel_lays_them_out() {
        let head = |kind: u8| u64::from_ne_bytes([kind, 0, 0, 0, 0, 0, 0, 0]);
        let fork =
            Msg::from_words([head(0x13), u64::from_ne_bytes([7, 0, 0, 0, 9, 9, 9, 9]), 0, 0]);
        assert_eq!(fork.parse(), Some(Message::Fork { fd: 7 }));
        let fault = Msg::from_words([head(0x12), 3, 0x1000, 0]);
        assert_eq!(
            fault.parse(),
            Some(Message::Pagefault { address: 0x1000, write: true, wp: true, minor: false })
        );
        assert_eq!(Msg::from_words([head(0x77), 0, 0, 0]).parse(), None);
    }
}
