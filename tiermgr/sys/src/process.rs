//! The calling process: its page size, name, limits and clock.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// Bytes of a page: 4 KiB on x86-64, up to 64 KiB on aarch64.
pub fn page_size() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY: sysconf takes an integer and touches no memory of ours.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        u64::try_from(size).unwrap_or(4096)
    })
}

/// Names the calling thread, as `ps` and `top` show it; at most 15 bytes are kept.
///
/// # Errors
/// EINVAL for a name with a NUL.
pub fn set_name(name: &str) -> io::Result<()> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: PR_SET_NAME reads a C string, which lives until the call returns.
    check(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) })
}

/// Tells the kernel that the calling thread must not wait for write-back when it allocates. Threads made
/// afterwards inherit it. `false` where that is not permitted; nothing depends on it.
pub fn set_io_flusher() -> bool {
    const PR_SET_IO_FLUSHER: i32 = 57;
    // SAFETY: takes integers.
    unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) == 0 }
}

/// Keeps every page of this process in memory once it has been touched, now and in future.
///
/// # Errors
/// EPERM or ENOMEM where RLIMIT_MEMLOCK is in the way.
pub fn lock_memory_on_fault() -> io::Result<()> {
    // SAFETY: takes integers and changes no content.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) })
}

/// Raises the number of descriptors that this process may have to `want`, or as far as the hard limit
/// allows, and gives what it is now.
///
/// # Errors
/// Of getrlimit.
pub fn raise_open_files(want: u64) -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    if limit.rlim_cur >= want {
        return Ok(limit.rlim_cur);
    }
    let wish = libc::rlimit { rlim_cur: want, rlim_max: limit.rlim_max.max(want) };
    let modest = libc::rlimit { rlim_cur: want.min(limit.rlim_max), rlim_max: limit.rlim_max };
    for new in [wish, modest] {
        // SAFETY: setrlimit reads one rlimit.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const new) } == 0 {
            return Ok(new.rlim_cur);
        }
    }
    Ok(limit.rlim_cur)
}

/// Bytes that nobody can guess.
///
/// # Errors
/// Of getrandom: ENOSYS, or the generator is not ready yet.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    const { assert!(N <= 256, "up to here getrandom gives all or nothing") };
    let mut bytes = [0; N];
    // SAFETY: getrandom writes `N` bytes.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, libc::GRND_NONBLOCK) };
    if usize::try_from(n) == Ok(N) { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}

/// Sleeps for so long, or for less: until a signal handler has run, or not at all where a filter refuses the call,
/// for which the sleep of the standard library would end the program.
pub fn nap(time: std::time::Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    // SAFETY: nanosleep reads one `timespec`, and is to write none.
    if unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) } != 0 {
        std::thread::yield_now();
    }
}

/// Nanoseconds of the monotonic clock.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes one timespec; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// Whether a process is there and has not ended: one that nobody has waited for yet is not running.
pub fn is_running(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_alive(&stat))
}

fn is_alive(stat: &str) -> bool {
    !matches!(state_in(stat), None | Some('Z' | 'X'))
}

/// The state of a process stands behind its name, which may hold anything.
fn state_in(stat: &str) -> Option<char> {
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

/// Whether a process runs no more for as long as somebody has it so: by SIGSTOP, a debugger, or the freezer of its
/// cgroup, of which the state says nothing.
pub fn is_stopped(pid: i32) -> bool {
    let read = |name| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let frozen = || matches!(read("wchan").trim(), "do_freezer_trap" | "__refrigerator");
    matches!(state_in(&read("stat")), Some('T' | 't')) || frozen()
}

/// Whether the effective user is root.
pub fn is_root() -> bool {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Whether whoever starts the file gets capabilities by that.
pub fn has_file_capabilities(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: getxattr reads two C strings, and writes nothing where it is given no room.
    let bytes = unsafe {
        libc::getxattr(path.as_ptr(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0)
    };
    bytes > 0
}

/// Has ended children wait to be asked for, and say so by SIGCHLD, even if whoever started us ignores that.
///
/// # Errors
/// Of sigaction.
pub fn keep_ended_children() -> io::Result<()> {
    // SAFETY: all zeros are a valid sigaction: the default one, without flags, above all not SA_NOCLDWAIT.
    let action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: reads one sigaction, which names no handler.
    check(unsafe { libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut()) })
}

fn check(rc: i32) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_ended_is_not_running() {
        assert!(is_running(std::process::id().cast_signed()));
        assert!(!is_running(i32::MAX));
        assert!(is_alive("7 (a ) Z) S 1 7"));
        assert!(!is_alive("7 (a ) S) Z 1 7"));
        assert!(!is_alive("7 (a"));
    }

    #[test]
    fn who_is_stopped_is_known_for_it() {
        let mut sleeper = std::process::Command::new("sleep").arg("20").spawn().expect("sleep");
        let pid = sleeper.id().cast_signed();
        let signal = |number| {
            // SAFETY: kill takes integers; the process is a child of ours that nobody has waited for.
            assert_eq!(unsafe { libc::kill(pid, number) }, 0);
            std::thread::sleep(std::time::Duration::from_millis(200));
            is_stopped(pid)
        };
        let seen = (is_stopped(pid), signal(libc::SIGSTOP), signal(libc::SIGCONT));
        sleeper.kill().expect("a child of ours");
        sleeper.wait().expect("ended");
        assert_eq!(seen, (false, true, false));
    }

    #[test]
    fn the_page_size_is_a_power_of_two() {
        assert!(page_size().is_power_of_two());
        assert!(page_size() >= 4096);
    }

    #[test]
    fn a_limit_that_is_high_enough_is_kept() {
        let now = raise_open_files(1).expect("read the limit");
        assert_eq!(raise_open_files(now).expect("read the limit"), now);
    }
}
