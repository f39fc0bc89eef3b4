//! A thread of a process that can speak for it.
//!
//! A process goes on when its first thread has ended (`pthread_exit` in `main`). That one keeps the number of
//! the process, as a zombie without memory and without descriptors. Whoever asks the kernel by that number for
//! the memory (`/proc/PID/maps`, kcmp, `process_vm_readv`) or for a descriptor (pidfd_getfd) hears that there
//! is none. So another thread is asked.

use crate::pidfd::stat_number;
use std::io;
use std::path::Path;

/// How often the list of threads is read again: one that begins while another ends can be missing in it.
const ROUNDS: usize = 3;
/// Field of `/proc/PID/stat`, counted from the first after the name: 0 without memory.
const STAT_VSIZE: usize = 20;

/// Asks a thread of process `pid` that has the memory of the process, by the number that `ask` is given: the
/// first thread if it can be asked. What `ask` finds counts only where that thread still has its memory
/// afterwards; else it is asked again, with another one.
///
/// Says nothing of whether `pid` still is the process that the caller means.
///
/// # Errors
/// Those of `ask`. ESRCH: no thread has memory; the process ends, or has ended.
pub fn with_memory<T>(pid: i32, mut ask: impl FnMut(i32) -> io::Result<T>) -> io::Result<T> {
    for _ in 0..ROUNDS {
        // Most processes have their first thread, and need no list.
        if let Some(found) = ask_one(pid, pid, &mut ask)? {
            return found;
        }
        let tasks = match std::fs::read_dir(format!("/proc/{pid}/task")) {
            Err(error) if is_gone(&error) => break,
            tasks => tasks?,
        };
        for task in tasks {
            let name = task?.file_name();
            let Some(tid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            if let Some(found) = ask_one(pid, tid, &mut ask)? {
                return found;
            }
        }
    }
    Err(io::Error::from_raw_os_error(libc::ESRCH))
}

/// The outer error is that of a look at the thread.
fn ask_one<T>(
    pid: i32,
    tid: i32,
    ask: &mut impl FnMut(i32) -> io::Result<T>,
) -> io::Result<Option<io::Result<T>>> {
    if !has_memory(pid, tid)? {
        return Ok(None);
    }
    let found = ask(tid);
    Ok(has_memory(pid, tid)?.then_some(found))
}

/// Whether the thread is of that process and has memory. Once it has none it never has any again.
fn has_memory(pid: i32, tid: i32) -> io::Result<bool> {
    match stat_number(Path::new(&format!("/proc/{pid}/task/{tid}/stat")), STAT_VSIZE) {
        Ok(bytes) => Ok(bytes > 0),
        Err(error) if is_gone(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_thread_is_asked_where_it_lives() {
        let me = std::process::id().cast_signed();
        assert_eq!(with_memory(me, Ok).expect("alive"), me);
        let refused = with_memory(me, |_| Err::<(), _>(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(refused.expect_err("its own").kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn who_has_ended_is_not_asked() {
        let mut child = std::process::Command::new("true").spawn().expect("true");
        let pid = child.id().cast_signed();
        let fd = crate::pidfd::open(pid).expect("pidfd");
        let limit = std::time::Duration::from_secs(10);
        assert!(crate::pidfd::wait(std::os::fd::AsFd::as_fd(&fd), limit).expect("poll"));
        let asked = |pid| with_memory(pid, Ok).expect_err("a zombie, then nobody").raw_os_error();
        assert_eq!(asked(pid), Some(libc::ESRCH));
        child.wait().expect("reap");
        assert_eq!(asked(pid), Some(libc::ESRCH));
    }
}
