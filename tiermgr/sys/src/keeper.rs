//! Two processes with one descriptor table.
//!
//! The last close of a userfaultfd turns parked pages into zeros. A FORK message installs the only
//! descriptor of a child in the process that reads it: killed at the next instruction, it would take that
//! descriptor along. So the daemon is made by [`clone_sharing_files`]: its parent, the *keeper*, has the same
//! table, and whatever the daemon had open is still open, under the same number, when the daemon is dead.
//! The keeper then closes all that a successor must open anew (the store with its lock above all) with
//! [`close_all_but`] and makes the next one. An exec unshares the table.

use std::io;
use std::os::fd::{IntoRawFd, RawFd};

/// What `/proc/PID/fd/N` of a userfaultfd points to.
pub const UFFD_LINK: &str = "anon_inode:[userfaultfd]";

/// On which side of [`clone_sharing_files`] the caller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForkResult {
    /// In the process that called.
    Parent {
        /// The new process.
        child: i32,
    },
    /// In the new process.
    Child,
}

/// As fork, but with one descriptor table for both; the child's end sends SIGCHLD.
///
/// Both sides must know that closing a descriptor closes it for the other one too: whatever owns one that
/// was open before belongs to one side from here on.
///
/// # Errors
/// EBUSY: the process has more than one thread. No handler that libc keeps for fork runs here, so a lock
/// that another thread holds would stay locked in the child for ever. EAGAIN, ENOMEM.
pub fn clone_sharing_files() -> io::Result<ForkResult> {
    check_single_threaded()?;
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: without CLONE_VM and with no stack given, the child runs on its own copy of this stack, as
    // after fork; no other thread exists, as was just checked, and only this one could make one. The order of the three pointers differs
    // between machines, and all are null.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) };
    match i32::try_from(pid) {
        Ok(0) => Ok(ForkResult::Child),
        Ok(child) if child > 0 => Ok(ForkResult::Parent { child }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn check_single_threaded() -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads == 1 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EBUSY)) }
}

/// Descriptors that the keeper holds only to have room: whoever shares the table may have used up all
/// numbers, and looking at it takes one.
///
/// They are closed by [`Spares::release`] and [`close_all_but`], never by dropping this, which the other side
/// of the clone does too.
#[derive(Debug, Default)]
pub struct Spares {
    fds: Vec<RawFd>,
}

impl Spares {
    /// A folder to list and one more.
    const COUNT: usize = 2;

    /// Takes what is missing. What cannot be had now may be had later.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn refill(&mut self) -> io::Result<()> {
        while self.fds.len() < Self::COUNT {
            self.fds.push(crate::shm::eventfd()?.into_raw_fd());
        }
        Ok(())
    }

    /// Gives them up.
    pub fn release(&mut self) {
        for fd in self.fds.drain(..) {
            // SAFETY: `refill` has opened it, and nothing else uses the number: it is told to nobody.
            unsafe { libc::close(fd) };
        }
    }
}

/// Every open descriptor of this process with what it is open on, in the order of their numbers.
///
/// # Errors
/// Of reading `/proc/self/fd`.
pub fn open_files() -> io::Result<Vec<(RawFd, String)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // What cannot be read is gone: the descriptor of this very directory, at the end.
        if let (Some(fd), Ok(link)) = (number, std::fs::read_link(entry.path())) {
            files.push((fd, link.to_string_lossy().into_owned()));
        }
    }
    files.retain(|(fd, _)| is_open(*fd));
    files.sort_unstable();
    Ok(files)
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: F_GETFD takes no argument and touches no memory.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// Numbers of the userfaultfds that a process holds.
///
/// # Errors
/// Of reading `/proc/PID/fd`.
pub fn uffds_of(pid: i32) -> io::Result<Vec<RawFd>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        // What cannot be read was closed meanwhile.
        let is_uffd = std::fs::read_link(entry.path()).is_ok_and(|link| link == *UFFD_LINK);
        let name = entry.file_name();
        let number: Option<RawFd> = name.to_str().and_then(|name| name.parse().ok());
        found.extend(number.filter(|_| is_uffd));
    }
    Ok(found)
}

/// The userfaultfds that this process holds.
///
/// # Errors
/// Of reading `/proc/self/fd`.
pub fn list_uffds() -> io::Result<Vec<RawFd>> {
    let files = open_files()?;
    Ok(files.into_iter().filter(|(_, link)| link == UFFD_LINK).map(|(fd, _)| fd).collect())
}

/// Closes every descriptor above 2 for which `keep(number, link)` says no, and gives how many that were.
///
/// For a keeper whose daemon is dead. Nothing that the keeper goes on to use may own what is closed here;
/// its [`Spares`] have been released.
///
/// # Errors
/// EBUSY: the process has more than one thread, so it is no keeper. Else of reading `/proc/self/fd`;
/// nothing is closed then.
pub fn close_all_but(keep: impl Fn(RawFd, &str) -> bool) -> io::Result<usize> {
    check_single_threaded()?;
    let mut closed = 0;
    for (fd, link) in open_files()? {
        if fd > 2 && !keep(fd, &link) {
            // SAFETY: the descriptors were opened by a process that is dead, or are not used any more,
            // as the documentation of this function demands; no other thread can be using one.
            unsafe { libc::close(fd) };
            closed += 1;
        }
    }
    Ok(closed)
}
