//! Processes by descriptor, and what `/proc` tells of them.

use crate::memory::has_memory;
use crate::task::with_memory;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// A descriptor of a process; readable once the process has ended. Close-on-exec.
///
/// # Errors
/// ESRCH: no such process. EINVAL: no thread group leader.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes integers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// A descriptor of one thread, whichever it is of its process, for [`getfd`]. Close-on-exec.
///
/// # Errors
/// ESRCH: no such thread. EINVAL: a kernel before 6.9.
pub fn open_thread(tid: i32) -> io::Result<OwnedFd> {
    const PIDFD_THREAD: i32 = libc::O_EXCL;
    // SAFETY: pidfd_open takes integers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, tid, PIDFD_THREAD) })
}

/// A duplicate of descriptor `fd` of the process. Needs the right to trace it.
///
/// # Errors
/// EBADF: not open there. EPERM. ESRCH: it has ended. Where only the first thread has ended, ESRCH or (older kernels)
/// EBADF.
pub fn getfd(pidfd: BorrowedFd<'_>, fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_getfd takes integers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0) })
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(fd) {
        // SAFETY: the call has just made this descriptor, and nobody else knows of it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a signal; 0 only asks whether the process lives.
///
/// # Errors
/// ESRCH: it has ended. EPERM.
pub fn send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: pidfd_send_signal takes integers and a pointer that may be null.
    let rc =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, info, 0) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits for the end of the process, no longer than `timeout`; `true` when it has ended.
///
/// # Errors
/// Of poll.
pub fn wait(pidfd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up: a wait of the last part of a millisecond must not become a busy loop.
        let millis = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        // SAFETY: poll reads and writes one pollfd.
        match unsafe { libc::poll(&raw mut poll, 1, millis) } {
            1.. => return Ok(true),
            0 if left.is_zero() || Instant::now() >= deadline => return Ok(false),
            0 => {}
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// The processes that `pid` is the parent of.
///
/// # Errors
/// `NotFound`: no such process.
pub fn children_of(pid: i32) -> io::Result<Vec<i32>> {
    let mut children = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        match std::fs::read_to_string(task?.path().join("children")) {
            Ok(list) => {
                children.extend(list.split_whitespace().filter_map(|p| p.parse::<i32>().ok()))
            }
            // A thread that has just ended, or a kernel without CONFIG_PROC_CHILDREN.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return scan_children_of(pid),
            Err(error) => return Err(error),
        }
    }
    children.sort_unstable();
    Ok(children)
}

fn scan_children_of(pid: i32) -> io::Result<Vec<i32>> {
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(candidate) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process that has ended meanwhile is nobody's child.
        if stat_field(candidate, STAT_PARENT).is_ok_and(|p| p == pid.unsigned_abs().into()) {
            children.push(candidate);
        }
    }
    children.sort_unstable();
    Ok(children)
}

/// The number of `pid` in the pid namespace that `viewer` lives in: what `viewer` knows it by. `None`
/// where it has none there.
///
/// # Errors
/// `NotFound`: one of them is no process.
pub fn number_seen_by(viewer: i32, pid: i32) -> io::Result<Option<i32>> {
    // One number for each namespace, from ours down to the process' own.
    let depth = namespace_numbers(viewer)?.len();
    let numbers = namespace_numbers(pid)?;
    Ok(depth.checked_sub(1).and_then(|at| numbers.get(at).copied()))
}

fn namespace_numbers(pid: i32) -> io::Result<Vec<i32>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or("");
    Ok(line.split_whitespace().filter_map(|number| number.parse().ok()).collect())
}

/// When the process started, in clock ticks since boot: with the pid, it names a process for good.
///
/// # Errors
/// `NotFound`: no such process.
pub fn start_time(pid: i32) -> io::Result<u64> {
    stat_field(pid, STAT_START)
}

/// Fields of `/proc/PID/stat`, counted from the first after the name.
const STAT_PARENT: usize = 1;
const STAT_START: usize = 19;

fn stat_field(pid: i32, field: usize) -> io::Result<u64> {
    stat_number(Path::new(&format!("/proc/{pid}/stat")), field)
}

/// A number in the `stat` file of a process or thread.
pub(crate) fn stat_number(path: &Path, field: usize) -> io::Result<u64> {
    let stat = std::fs::read(path)?;
    let stat = String::from_utf8_lossy(&stat);
    // The name may hold spaces and parentheses: what follows the last one is plain.
    let after = stat.rfind(')').and_then(|at| stat.get(at + 1..)).unwrap_or("");
    after.split_whitespace().nth(field).and_then(|value| value.parse().ok()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "unexpected format of /proc/PID/stat")
    })
}

/// Whether two processes have the same memory (as a client and its helper do, until the client execs).
///
/// # Errors
/// ESRCH: no thread of one of them has memory any more, so nobody can tell. EPERM: they may not be traced.
/// ENOSYS: the kernel lacks CONFIG_KCMP.
pub fn same_memory(a: i32, b: i32) -> io::Result<bool> {
    with_memory(a, |of_a| with_memory(b, |of_b| compare_memory(of_a, of_b)))
}

/// Whether two threads have the same memory; `false` also where one has none, or nobody may tell. Costs two
/// system calls, and no look at /proc.
pub fn threads_share_memory(a: i32, b: i32) -> bool {
    // Two without memory are equal: that one of them still has it afterwards shows that both had.
    compare_memory(a, b).is_ok_and(|same| same) && has_memory(b)
}

/// Of two threads. Those without memory are equal, and differ from all others.
fn compare_memory(a: i32, b: i32) -> io::Result<bool> {
    const KCMP_VM: i32 = 1;
    // SAFETY: kcmp takes integers.
    match unsafe { libc::syscall(libc::SYS_kcmp, a, b, KCMP_VM, 0, 0) } {
        0 => Ok(true),
        1.. => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_child_is_found_named_and_seen_to_end() {
        let me = std::process::id().cast_signed();
        let mut child = std::process::Command::new("sleep").arg("20").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let fd = open(pid).expect("pidfd");
        assert!(children_of(me).expect("children").contains(&pid));
        assert!(scan_children_of(me).expect("children").contains(&pid));
        assert!(start_time(pid).expect("stat") >= start_time(me).expect("stat"));
        assert_eq!(number_seen_by(me, pid).expect("status"), Some(pid));
        assert!(!wait(fd.as_fd(), Duration::from_millis(5)).expect("poll"));
        assert!(matches!(same_memory(me, pid), Ok(false) | Err(_)));
        assert!(threads_share_memory(me, me) && !threads_share_memory(me, pid));
        send_signal(fd.as_fd(), libc::SIGKILL).expect("kill");
        assert!(wait(fd.as_fd(), Duration::from_secs(10)).expect("poll"));
        assert!(!threads_share_memory(pid, pid), "neither has any");
        child.wait().expect("reap");
        assert!(send_signal(fd.as_fd(), 0).is_err());
        assert!(open(pid).is_err());
        assert_eq!(number_seen_by(me, pid).expect_err("gone").kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_descriptor_of_a_process_can_be_fetched() {
        let event = crate::shm::eventfd().expect("eventfd");
        let me = open(std::process::id().cast_signed()).expect("pidfd");
        let twin = getfd(me.as_fd(), event.as_raw_fd()).expect("getfd");
        crate::shm::eventfd_signal(twin.as_fd()).expect("signal");
        assert_eq!(crate::shm::eventfd_drain(event.as_fd()).expect("drain"), 1);
        assert_eq!(
            getfd(me.as_fd(), 1 << 20).expect_err("not open").raw_os_error(),
            Some(libc::EBADF)
        );
    }
}
