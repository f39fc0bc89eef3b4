//! Local sockets that keep message boundaries and carry descriptors (`SOCK_SEQPACKET`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FDS_MAX_U32: u32 = 8;

/// Descriptors in one message at most.
pub const FDS_MAX: usize = FDS_MAX_U32 as usize;

const BACKLOG: i32 = 128;

/// Who is at the other end, as the kernel recorded it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCred {
    /// Process id in the caller's namespace; 0 where it has none there.
    pub pid: i32,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

/// Waits for connections at a path. Dropping it leaves the path.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
}

/// One connection.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
}

fn new_socket() -> io::Result<OwnedFd> {
    // SAFETY: socket takes integers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The address of a path and its length.
fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let mut address = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
    let bytes = path.as_os_str().as_bytes();
    // One byte stays for the NUL.
    if bytes.len() >= address.sun_path.len() || bytes.is_empty() || bytes.contains(&0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "the socket path {} has {} bytes; 1 to 107 are possible",
                path.display(),
                bytes.len()
            ),
        ));
    }
    for (place, byte) in address.sun_path.iter_mut().zip(bytes) {
        // Signed on one machine, unsigned on another.
        *place = libc::c_char::from_ne_bytes([*byte]);
    }
    let len = u32::try_from(size_of::<libc::sockaddr_un>()).map_err(io::Error::other)?;
    Ok((address, len))
}

const _: () = assert!(libc::AF_UNIX == 1);

fn check(rc: i32) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether there is a socket.
///
/// # Errors
/// `AlreadyExists`: something else is there, which is nobody's to remove (to a connect it looks like a socket on which
/// nobody listens).
fn is_socket(path: &Path) -> io::Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => Ok(true),
        Ok(_) => {
            let text = format!(
                "{} is there and is no socket; name another path, or move it away",
                path.display()
            );
            Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A socket that listens at a path where there is nothing.
fn bound(path: &Path, mode: u32, group: Option<u32>) -> io::Result<OwnedFd> {
    let fd = new_socket()?;
    // The socket file gets the mode of the descriptor. It is opened to others once its group is right.
    // SAFETY: fchmod takes integers.
    check(unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) })?;
    let (address, len) = address(path)?;
    // SAFETY: bind reads one sockaddr_un of `len` bytes.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) })?;
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    // SAFETY: listen takes integers.
    check(unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) })?;
    Ok(fd)
}

impl Listener {
    /// Listens at `path` with the permissions `mode`, for a group if there is one. A socket file on which nobody
    /// listens is replaced.
    ///
    /// # Errors
    /// `AddrInUse`: somebody listens there. `AlreadyExists`: what is there is no socket. `InvalidInput`: the path is too
    /// long. What chown says of the group.
    pub fn bind(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Self> {
        address(path)?;
        let is_taken = || match Stream::connect_within(path, Duration::ZERO) {
            Err(refused) => refused.kind() != io::ErrorKind::ConnectionRefused,
            Ok(_) => true,
        };
        // Whoever lets others wait to be accepted listens, too.
        if is_socket(path)? && is_taken() {
            return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
        }
        // A client must find a socket at any instant, and one that is ready: where there is none, or one that is not
        // for it, no daemon is to come.
        let mut aside = path.as_os_str().to_owned();
        aside.push("~");
        let aside = PathBuf::from(aside);
        let fits = address(&aside).is_ok();
        let place = if fits { &aside } else { path };
        if is_socket(place)? {
            std::fs::remove_file(place)?;
        }
        let fd = bound(place, mode, group)?;
        if fits {
            std::fs::rename(&aside, path)?;
        }
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Takes the next connection; blocks until there is one.
    ///
    /// # Errors
    /// EMFILE, ENFILE: wait a little before trying again, or the loop turns in vain.
    pub fn accept(&self) -> io::Result<Stream> {
        loop {
            let none = std::ptr::null_mut();
            // SAFETY: accept4 takes null where no address is wanted.
            let fd = unsafe {
                libc::accept4(self.fd.as_raw_fd(), none, std::ptr::null_mut(), libc::SOCK_CLOEXEC)
            };
            if fd >= 0 {
                // SAFETY: the call has just made this descriptor.
                return Ok(Stream { fd: unsafe { OwnedFd::from_raw_fd(fd) } });
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                _ => return Err(error),
            }
        }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Room for the control message: aligned as a `cmsghdr`, which starts with a length.
#[repr(C, align(8))]
struct Control([u8; 128]);

const CONTROL_LEN: usize = {
    // Descriptors have four bytes.
    // SAFETY: CMSG_SPACE only computes.
    unsafe { libc::CMSG_SPACE(FDS_MAX_U32 * 4) as usize }
};
const _: () = assert!(CONTROL_LEN <= size_of::<Control>());
const _: () = assert!(align_of::<libc::cmsghdr>() <= align_of::<Control>());

impl Stream {
    /// Connects to a listener. Where too many wait to be accepted it waits so long for room among them, also
    /// where signal handlers are called.
    ///
    /// # Errors
    /// `NotFound`: no such path. `ConnectionRefused`: nobody listens. `PermissionDenied`. EAGAIN: the time
    /// is up.
    pub fn connect_within(path: &Path, wait: Duration) -> io::Result<Self> {
        let stream = Self { fd: new_socket()? };
        let (address, len) = address(path)?;
        let began = Instant::now();
        let mut left = wait;
        loop {
            // The limit of a send is also that of a connect, which has none without it. No time left: it is
            // asked once.
            stream.set_send_timeout(Some(left.max(Duration::from_micros(1))))?;
            // SAFETY: connect reads one sockaddr_un of `len` bytes.
            let outcome = check(unsafe {
                libc::connect(stream.fd.as_raw_fd(), (&raw const address).cast(), len)
            });
            match outcome {
                Ok(()) => break,
                // The socket is as it was before.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    left = wait.saturating_sub(began.elapsed());
                    if left.is_zero() {
                        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        stream.set_send_timeout(None)?;
        Ok(stream)
    }

    /// Two ends, connected.
    ///
    /// # Errors
    /// EMFILE.
    pub fn pair() -> io::Result<(Self, Self)> {
        let mut fds = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: socketpair writes two ints.
        check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
        // SAFETY: the call has just made the descriptors.
        let own = |fd| Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } };
        Ok((own(fds[0]), own(fds[1])))
    }

    /// Takes a descriptor of a connected socket.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Gives the descriptor.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Sends one message with duplicates of `fds`.
    ///
    /// # Errors
    /// `InvalidInput`: no bytes (that would read as an end), or more than [`FDS_MAX`] descriptors.
    /// EMSGSIZE: too long for the socket. EPIPE: the other end is closed; no signal is raised. EAGAIN: the
    /// time is up ([`Stream::set_send_timeout`]).
    pub fn send_with_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if bytes.is_empty() || fds.len() > FDS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut control = Control([0; 128]);
        let mut vector =
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut header = empty_header();
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        if !fds.is_empty() {
            let payload =
                u32::try_from(fds.len() * size_of::<RawFd>()).map_err(io::Error::other)?;
            header.msg_control = (&raw mut control).cast();
            // SAFETY: CMSG_SPACE only computes.
            header.msg_controllen = unsafe { libc::CMSG_SPACE(payload) } as _;
            // SAFETY: `header` has a control buffer that is long enough for one header.
            let first = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
            // SAFETY: CMSG_LEN only computes.
            let len = unsafe { libc::CMSG_LEN(payload) } as _;
            // SAFETY: `first` points into `control`, which is aligned for it and zeroed.
            let first = unsafe { &mut *first };
            first.cmsg_len = len;
            first.cmsg_level = libc::SOL_SOCKET;
            first.cmsg_type = libc::SCM_RIGHTS;
            // SAFETY: the data of the header just filled in lies inside `control`.
            let data = unsafe { libc::CMSG_DATA(first) }.cast::<RawFd>();
            for (i, fd) in fds.iter().enumerate() {
                let at = data.wrapping_add(i);
                // SAFETY: `i < FDS_MAX`, and `control` has room for that many (CONTROL_LEN).
                unsafe { at.write_unaligned(fd.as_raw_fd()) };
            }
        }
        loop {
            // SAFETY: the header's pointers are to live objects of the lengths given; the kernel only
            // reads them.
            let n = unsafe {
                libc::sendmsg(self.fd.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL)
            };
            if n >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Receives one message and the descriptors with it, close-on-exec. No bytes: the other end is closed.
    ///
    /// # Errors
    /// `InvalidData`: the message is longer than `buffer`, or brings more than [`FDS_MAX`] descriptors, or
    /// more than this process can have; what came is closed. EAGAIN: the time is up
    /// ([`Stream::set_recv_timeout`]). `Interrupted`: a signal handler was called, or the process was stopped
    /// and goes on. Whoever tries again begins with the whole time anew.
    pub fn recv_with_fds(&self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut control = Control([0; 128]);
        let mut vector =
            libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut header = empty_header();
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = CONTROL_LEN as _;
        // SAFETY: the header's pointers are to live, writable objects of the lengths given.
        let n =
            unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
        let len = usize::try_from(n).map_err(|_negative| io::Error::last_os_error())?;
        // First of all, so that nothing leaks on the way out.
        let fds = take_fds(&header);
        let lost_some = header.msg_flags & libc::MSG_CTRUNC != 0;
        if lost_some && fds.len() < FDS_MAX {
            // There was room for more in the message, and so none in the table.
            return Err(io::Error::other(
                "this process may not have more files open: raise RLIMIT_NOFILE (`ulimit -n`)",
            ));
        }
        if lost_some || header.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a message is too long, or brings too many descriptors",
            ));
        }
        Ok((len, fds))
    }

    /// How long [`Stream::recv_with_fds`] waits; `None`: for ever.
    ///
    /// # Errors
    /// `InvalidInput`: no time at all.
    pub fn set_recv_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_timeout(libc::SO_RCVTIMEO, timeout)
    }

    /// How long [`Stream::send_with_fds`] waits for room; `None`: for ever.
    ///
    /// # Errors
    /// `InvalidInput`: no time at all.
    pub fn set_send_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_timeout(libc::SO_SNDTIMEO, timeout)
    }

    fn set_timeout(&self, option: i32, timeout: Option<Duration>) -> io::Result<()> {
        // To the kernel, no time means for ever.
        let micros = match timeout {
            None => 0,
            Some(time) if time.is_zero() => return Err(io::ErrorKind::InvalidInput.into()),
            Some(time) => i64::try_from(time.as_micros()).unwrap_or(i64::MAX).max(1),
        };
        let time = libc::timeval { tv_sec: micros / 1_000_000, tv_usec: micros % 1_000_000 };
        let len = u32::try_from(size_of_val(&time)).map_err(io::Error::other)?;
        // SAFETY: these options read one timeval of `len` bytes.
        check(unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const time).cast(),
                len,
            )
        })
    }

    /// Whether calls answer EAGAIN instead of blocking.
    ///
    /// # Errors
    /// Of ioctl.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        let mut on = i32::from(on);
        // SAFETY: FIONBIO reads one int.
        check(unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::FIONBIO, &raw mut on) })
    }

    /// Who connected, or, on the connecting side, who listens.
    ///
    /// # Errors
    /// Of getsockopt.
    pub fn peer_cred(&self) -> io::Result<PeerCred> {
        let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = u32::try_from(size_of_val(&cred)).map_err(io::Error::other)?;
        // SAFETY: SO_PEERCRED writes at most `len` bytes, one ucred.
        check(unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut cred).cast(),
                &raw mut len,
            )
        })?;
        Ok(PeerCred { pid: cred.pid, uid: cred.uid, gid: cred.gid })
    }
}

fn empty_header() -> libc::msghdr {
    // SAFETY: all zeros is a msghdr without address, data and control.
    unsafe { std::mem::zeroed() }
}

/// Takes ownership of every descriptor that a received header brought.
fn take_fds(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the header and its control buffer, which both live.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: not null, so it points to a whole header inside the control buffer.
        let control = unsafe { &*next };
        if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: CMSG_LEN only computes.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (control.cmsg_len as usize).saturating_sub(head) / size_of::<RawFd>();
            // SAFETY: the data of a header that the kernel filled.
            let data = unsafe { libc::CMSG_DATA(control) }.cast::<RawFd>();
            for i in 0..count {
                let at = data.wrapping_add(i);
                // SAFETY: `i < count`, the number of descriptors that the header says it has.
                let fd = unsafe { at.read_unaligned() };
                // SAFETY: the kernel has just made this descriptor for us, and named it once.
                fds.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: `control` is a header of this message.
        next = unsafe { libc::CMSG_NXTHDR(header, control) };
    }
    fds
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
#[path = "sock_tests.rs"]
mod tests;
