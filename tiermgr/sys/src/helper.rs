//! The helper: a process of its own that shares a client's memory.
//!
//! UFFDIO_MOVE works only from inside the memory that it changes. A *thread* of the program would be in
//! its way (unshare, setuid, a wait for all threads) and would die with it; so the helper is a process made
//! with `CLONE_VM` alone. It has its own descriptor table with nothing but the userfaultfds, the eventfd
//! and the ring in it, its own credentials without a capability, all signals blocked, a session of its own,
//! a seccomp filter that leaves it eight calls, and exit signal 0, so that the program's `wait` never sees
//! it. It holds duplicates of the userfaultfds that no `close` of the program can reach.
//!
//! It also keeps the memory of a program that was served readable when that exits right after a fork, until it is
//! stopped, or for half a minute. After an *exec* of the program it would keep the old memory alive without noticing, for its
//! parent stays the same process: the daemon sees the socket close (or [`crate::pidfd::same_memory`] say no)
//! and stops the ring.
//!
//! It runs with the thread-local storage of the thread that made it; `ring_helper.rs` says what follows.

use crate::process::{nap, page_size};
use crate::ring::layout;
use crate::ring_helper::{Loop, errno_of, fd_arg};
use crate::shm::{Mapping, check_sealed};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use syscalls::{Sysno, raw};

/// Number of the arena userfaultfd in every helper: what [`crate::pidfd::getfd`] can fetch.
pub const FD_ARENA: i32 = 3;
/// Number of the limbo userfaultfd in every helper.
pub const FD_LIMBO: i32 = 4;
/// Number of the eventfd in every helper.
pub const FD_EVENT: i32 = 5;
/// Number of the ring's memfd in every helper.
pub const FD_RING: i32 = 6;
/// Number of the first of [`HelperConfig::hold`] in every helper.
pub const FD_HOLD: i32 = 7;
/// Descriptors in [`HelperConfig::hold`] at most.
pub const HOLD_MAX: usize = 8;

const FDS_MAX: usize = 4 + HOLD_MAX;
/// Above every number that the descriptors end at, and below every sensible RLIMIT_NOFILE.
const FD_PARKING: usize = 32;
const STACK_BYTES: usize = 64 * 1024;
/// How long [`spawn`] waits for the helper: on a busy machine a new process gets its turn late. A daemon waits longer
/// for the handshake that this is a part of.
pub const SERVE_WAIT: Duration = Duration::from_secs(10);
const NAME: &std::ffi::CStr = c"tiermgr-helper";

const _: () = assert!(FD_HOLD.unsigned_abs() as usize + HOLD_MAX <= FD_PARKING);

/// What a helper is given.
#[derive(Clone, Copy, Debug)]
pub struct HelperConfig<'a> {
    /// The ring's memory, [`crate::ring::RingOwner::memfd`].
    pub ring: BorrowedFd<'a>,
    /// Signalled after completions, [`crate::ring::RingOwner::eventfd`].
    pub event: BorrowedFd<'a>,
    /// The userfaultfd of the arenas, of which it only holds a duplicate.
    pub arena: Option<BorrowedFd<'a>>,
    /// The userfaultfd of limbo.
    pub limbo: BorrowedFd<'a>,
    /// More userfaultfds to hold a duplicate of, [`HOLD_MAX`] at most.
    pub hold: &'a [BorrowedFd<'a>],
}

/// A helper that was made. Dropping this neither ends it nor frees its stack. In a forked child the
/// handle means nothing: the stack and the ring are not mapped there.
#[derive(Debug)]
pub struct HelperHandle {
    pid: i32,
    stack: *mut u8,
    stack_bytes: usize,
    ring: *mut u8,
}

// SAFETY: the pointers are address ranges of the process, bound to no thread: the ring is reached through
// atomics only, and the stack only by munmap once its user is dead.
unsafe impl Send for HelperHandle {}
// SAFETY: as above; `stop` only stores to atomics.
unsafe impl Sync for HelperHandle {}

/// Lies at the top of the helper's stack.
#[repr(C)]
struct Start {
    serve: Loop,
    /// Descriptors in the maker's table, by the order of the `FD_*` numbers; -1 for none.
    fds: [i32; FDS_MAX],
    count: usize,
}

/// Makes a helper for the calling process and waits, no longer than ten seconds, until it serves.
///
/// May be called by any thread; all signals of the caller are blocked for some microseconds.
///
/// # Errors
/// `InvalidData`: the ring's memory is not a ring's. EAGAIN or ENOMEM: no process or no memory left.
/// `TimedOut`: it did not start. Else the errno of the step that the helper could not do.
pub fn spawn(config: &HelperConfig<'_>) -> io::Result<HelperHandle> {
    if config.hold.len() > HOLD_MAX {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    check_sealed(config.ring, crate::uffd::bytes(layout::BYTES))?;
    let ring = Mapping::shared(config.ring, layout::BYTES)?;
    ring.madvise(libc::MADV_DONTFORK)?;
    ring.madvise(libc::MADV_DONTDUMP)?;
    let stack = Stack::new()?;

    let mut fds = [-1; FDS_MAX];
    let given = [config.arena, Some(config.limbo), Some(config.event), Some(config.ring)];
    let all = given.into_iter().chain(config.hold.iter().copied().map(Some));
    for (place, fd) in fds.iter_mut().zip(all) {
        *place = fd.map_or(-1, |fd| fd.as_raw_fd());
    }
    let start = Start {
        serve: Loop {
            ring: ring.as_ptr(),
            client: std::process::id().cast_signed(),
            limbo: FD_LIMBO,
            event: FD_EVENT,
        },
        fds,
        count: 4 + config.hold.len(),
    };
    let pid = clone_helper(&stack, start)?;
    let ring = ring.leak();
    let mut handle = HelperHandle { pid, stack: stack.base, stack_bytes: stack.bytes, ring };
    stack.leak();
    if let Err(error) = handle.wait_until_it_serves() {
        handle.stop();
        // One that does not even end keeps what it stands on.
        handle.reap(Duration::from_secs(1)).ok();
        return Err(error);
    }
    Ok(handle)
}

impl HelperHandle {
    /// Its process id, in the caller's pid namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Tells it to end.
    pub fn stop(&self) {
        self.head(layout::STOP).store(1, Ordering::SeqCst);
        let bell = self.head(layout::DOORBELL);
        bell.fetch_add(1, Ordering::SeqCst);
        crate::ring::wake(bell);
    }

    /// Waits until it has ended and frees what it used. Does nothing when called again.
    ///
    /// # Errors
    /// `TimedOut`: it still runs, and nothing is freed.
    pub fn reap(&mut self, timeout: Duration) -> io::Result<()> {
        if self.stack.is_null() {
            return Ok(());
        }
        let deadline = Instant::now() + timeout;
        while !self.has_ended() {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            nap(Duration::from_micros(200));
        }
        // SAFETY: the stack was mapped by `Stack::new`, and its only user is dead.
        unsafe { libc::munmap(self.stack.cast(), self.stack_bytes) };
        // SAFETY: the ring was mapped by `spawn`; the helper is dead, and no method uses it afterwards, as
        // `stack` is null from here on.
        unsafe { libc::munmap(self.ring.cast(), layout::BYTES) };
        self.stack = std::ptr::null_mut();
        self.ring = std::ptr::null_mut();
        Ok(())
    }

    /// Collects it when it is dead; a helper that somebody else has collected is dead as well.
    fn has_ended(&self) -> bool {
        let mut status = 0;
        // SAFETY: waitpid writes one int. __WCLONE is for children whose exit signal is not SIGCHLD.
        let rc =
            unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG | libc::__WCLONE) };
        rc == self.pid || rc < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD)
    }

    fn wait_until_it_serves(&self) -> io::Result<()> {
        let deadline = Instant::now() + SERVE_WAIT;
        loop {
            match self.head(layout::HELPER_STATE).load(Ordering::SeqCst) {
                layout::STATE_FAILED => {
                    let errno = self.head(layout::HELPER_ERRNO).load(Ordering::SeqCst);
                    return Err(io::Error::from_raw_os_error(errno.cast_signed()));
                }
                layout::STATE_RUNNING => return Ok(()),
                _ if Instant::now() >= deadline => return Err(io::ErrorKind::TimedOut.into()),
                _ => nap(Duration::from_micros(50)),
            }
        }
    }

    fn head(&self, offset: usize) -> &AtomicU32 {
        static GONE: AtomicU32 = AtomicU32::new(0);
        if self.ring.is_null() {
            return &GONE;
        }
        let at = self.ring.wrapping_add(offset);
        // SAFETY: the ring is mapped until `reap`, which sets the pointer to null; `offset` is one of
        // `layout`'s, aligned and inside.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }
}

/// A mapping with a guard page below, not inherited by children.
struct Stack {
    base: *mut u8,
    bytes: usize,
}

impl Stack {
    fn new() -> io::Result<Self> {
        let guard = usize::try_from(page_size()).map_err(io::Error::other)?;
        let bytes = guard + STACK_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self { base: base.cast(), bytes };
        // SAFETY: the first page of the mapping just made, which nothing uses yet.
        if unsafe { libc::mprotect(base, guard, libc::PROT_NONE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the whole mapping just made; DONTFORK changes no content.
        if unsafe { libc::madvise(base, bytes, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stack)
    }

    /// Where `Start` goes: at the top, aligned for a call.
    fn top(&self) -> *mut Start {
        let room = size_of::<Start>().next_multiple_of(64);
        self.base.wrapping_add(self.bytes - room).cast()
    }

    fn leak(self) {
        let _kept = std::mem::ManuallyDrop::new(self);
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and no helper runs on it: `spawn` leaks it once one does.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// Blocks every signal, clones, and restores the caller's mask.
fn clone_helper(stack: &Stack, start: Start) -> io::Result<i32> {
    let top = stack.top();
    // SAFETY: `top` is aligned (64) and has room for a `Start` inside the mapping, which nothing else uses.
    unsafe { top.write(start) };

    // The kernel's signal set, not libc's: libc keeps two signals of its own out of every set.
    let every = u64::MAX;
    let mut before = 0u64;
    let set_mask = |new: *const u64, old: *mut u64| {
        // SAFETY: rt_sigprocmask reads and writes one kernel signal set, eight bytes on 64-bit machines;
        // both pointers are null or live u64s.
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, new, old, 8usize) }
    };
    if set_mask(&raw const every, &raw mut before) != 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = (libc::CLONE_VM | libc::CLONE_UNTRACED).unsigned_abs() as usize;
    // SAFETY: the child runs `helper_main` on a stack of its own that outlives it (`spawn` leaks it before
    // it can return), with `top` pointing to an initialised `Start`; `helper_main` does not return.
    let result = unsafe { clone_on(flags, top.cast(), helper_main, top.cast_const()) };
    // The outcome of this call is known: it set the same mask moments ago.
    set_mask(&raw const before, std::ptr::null_mut());
    match errno_of(result) {
        0 => i32::try_from(result).map_err(io::Error::other),
        errno => Err(io::Error::from_raw_os_error(errno.cast_signed())),
    }
}

/// `clone` with `flags`; the child calls `entry(arg)` with its stack below `top`.
///
/// # Safety
/// `top` must be 16-byte aligned, with a writable stack below it that nothing else uses while the child
/// lives; `entry` must not return.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_on(
    flags: usize,
    top: *mut u8,
    entry: extern "C" fn(*const Start) -> !,
    arg: *const Start,
) -> usize {
    let result: usize;
    // SAFETY: the kernel's convention: number in rax, arguments in rdi rsi rdx r10 r8; rax, rcx and r11 are
    // clobbered. The child starts at the same place with rax = 0, rsp = `top` and all other registers
    // copied, so r12 and r13 still hold `entry` and `arg`; it never reaches the label 2.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") Sysno::clone as usize => result,
            in("rdi") flags,
            in("rsi") top,
            in("rdx") 0usize,
            in("r10") 0usize,
            in("r8") 0usize,
            in("r12") entry,
            in("r13") arg,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// As for x86-64.
///
/// # Safety
/// As for x86-64.
#[cfg(target_arch = "aarch64")]
unsafe fn clone_on(
    flags: usize,
    top: *mut u8,
    entry: extern "C" fn(*const Start) -> !,
    arg: *const Start,
) -> usize {
    let result: usize;
    // SAFETY: the kernel's convention: number in x8, arguments in x0 to x4, result in x0. The child starts
    // at the same place with x0 = 0, sp = `top` and all other registers copied, so x20 and x21 still hold
    // `entry` and `arg`; it never reaches the label 2.
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x21",
            "blr x20",
            "brk 1",
            "2:",
            in("x8") Sysno::clone as usize,
            inlateout("x0") flags => result,
            in("x1") top,
            in("x2") 0usize,
            in("x3") 0usize,
            in("x4") 0usize,
            in("x20") entry,
            in("x21") arg,
        );
    }
    result
}

/// The helper's life.
extern "C" fn helper_main(start: *const Start) -> ! {
    // SAFETY: `clone_helper` initialised it on this very stack, above everything that this function uses.
    let start = unsafe { &*start };
    let errno = settle(start);
    if errno == 0 {
        start.serve.run();
    } else {
        let head = |offset| {
            let at = start.serve.ring.wrapping_add(offset);
            // SAFETY: the ring is mapped while the helper runs, and `offset` is one of `layout`'s.
            unsafe { AtomicU32::from_ptr(at.cast()) }
        };
        head(layout::HELPER_ERRNO).store(errno, Ordering::SeqCst);
        head(layout::HELPER_STATE).store(layout::STATE_FAILED, Ordering::SeqCst);
    }
    loop {
        // SAFETY: exit_group takes an integer. libc's exit must not run: its handlers are the program's.
        unsafe { raw::syscall1(Sysno::exit_group as usize, usize::from(errno != 0)) };
    }
}

/// Puts the descriptors where they belong, closes all others, and gives up every right. The errno of the
/// step that failed, or 0.
fn settle(start: &Start) -> u32 {
    let errno = settle_files(start);
    if errno != 0 {
        return errno;
    }
    let name = NAME.as_ptr().expose_provenance();
    // SAFETY: PR_SET_NAME reads a C string of at most 16 bytes. A name is not worth failing for.
    unsafe { raw::syscall2(Sysno::prctl as usize, libc::PR_SET_NAME as usize, name) };
    // SAFETY: setsid takes nothing: a stop signal to the program's process group no longer reaches us.
    unsafe { raw::syscall0(Sysno::setsid as usize) };
    // SAFETY: PR_SET_NO_NEW_PRIVS takes integers.
    let result = unsafe {
        raw::syscall5(Sysno::prctl as usize, libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0)
    };
    if errno_of(result) != 0 {
        return errno_of(result);
    }
    drop_capabilities_and_filter()
}

fn settle_files(start: &Start) -> u32 {
    let mut parked = [usize::MAX; FDS_MAX];
    for (fd, place) in start.fds.iter().zip(parked.iter_mut()).take(start.count) {
        if *fd < 0 {
            continue;
        }
        // SAFETY: F_DUPFD takes integers and works on a descriptor table that is ours alone.
        let result = unsafe {
            raw::syscall3(Sysno::fcntl as usize, fd_arg(*fd), libc::F_DUPFD as usize, FD_PARKING)
        };
        match errno_of(result) {
            0 => {}
            // So the kernel calls a number that RLIMIT_NOFILE does not allow.
            errno if errno == libc::EINVAL.unsigned_abs() => return libc::EMFILE.unsigned_abs(),
            errno => return errno,
        }
        *place = result;
    }
    let first = fd_arg(FD_ARENA);
    for (i, fd) in parked.iter().enumerate().take(start.count) {
        let at = first + i;
        if *fd == usize::MAX {
            // SAFETY: close takes an integer and works on a descriptor table that is ours alone.
            unsafe { raw::syscall1(Sysno::close as usize, at) };
            continue;
        }
        // SAFETY: dup3 takes integers and works on a descriptor table that is ours alone.
        let result =
            unsafe { raw::syscall3(Sysno::dup3 as usize, *fd, at, libc::O_CLOEXEC as usize) };
        if errno_of(result) != 0 {
            return errno_of(result);
        }
    }
    // SAFETY: close_range takes integers.
    unsafe { raw::syscall3(Sysno::close_range as usize, 0, first - 1, 0) };
    let from = first + start.count;
    // SAFETY: as above.
    let result = unsafe { raw::syscall3(Sysno::close_range as usize, from, u32::MAX as usize, 0) };
    errno_of(result)
}

/// Version 3 of the capability interface: two sets of three words.
#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

const CAP_VERSION_3: u32 = 0x2008_0522;

fn drop_capabilities_and_filter() -> u32 {
    let header = CapHeader { version: CAP_VERSION_3, pid: 0 };
    let none = [0u32; 6];
    // SAFETY: capset reads a header and, for this version, six words. A capability set is per thread, and
    // giving up never changes whether the shared memory may be dumped.
    let result = unsafe {
        raw::syscall2(
            Sysno::capset as usize,
            (&raw const header).expose_provenance(),
            (&raw const none).expose_provenance(),
        )
    };
    if errno_of(result) != 0 {
        return errno_of(result);
    }
    let program = libc::sock_fprog {
        len: FILTER_LEN,
        filter: (&raw const FILTER).cast::<libc::sock_filter>().cast_mut(),
    };
    // SAFETY: seccomp reads the program, whose length is that of the constant, and does not write it.
    let result = unsafe {
        raw::syscall3(
            Sysno::seccomp as usize,
            libc::SECCOMP_SET_MODE_FILTER as usize,
            0,
            (&raw const program).expose_provenance(),
        )
    };
    errno_of(result)
}

/// Calls that the loop makes; every other one answers EPERM.
const ALLOWED: [Sysno; 8] = [
    Sysno::ioctl,
    Sysno::madvise,
    Sysno::futex,
    Sysno::write,
    Sysno::getppid,
    Sysno::clock_gettime,
    Sysno::exit,
    Sysno::exit_group,
];

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xc000_00b7;

const FILTER_LEN: u16 = 17;
static FILTER: [libc::sock_filter; FILTER_LEN as usize] = filter();

const fn op(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    assert!(code <= 0xffff, "codes of classic BPF have 16 bits");
    libc::sock_filter { code: (code & 0xffff) as u16, jt, jf, k }
}

/// The filter, in classic BPF:
///
/// ```text
///  0 load arch          1 other machine: deny
///  2 load number        3.. each allowed number jumps to `allow`; ioctl goes on to its request
/// 11 deny
/// 12 load low half of the second argument   13 UFFDIO_MOVE: allow   14 deny
/// 15 allow             16 deny
/// ```
const fn filter() -> [libc::sock_filter; FILTER_LEN as usize] {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    // Offsets in `struct seccomp_data`, on little-endian machines.
    const NUMBER: u32 = 0;
    const ARCH: u32 = 4;
    const SECOND_ARGUMENT: u32 = 24;
    const ALLOW_AT: u8 = 15;
    let deny = op(RETURN, libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs(), 0, 0);
    let mut program = [deny; FILTER_LEN as usize];
    program[0] = op(LOAD, ARCH, 0, 0);
    program[1] = op(EQUAL, AUDIT_ARCH, 0, 14);
    program[2] = op(LOAD, NUMBER, 0, 0);
    // ioctl comes first in `ALLOWED` and goes on at 12.
    program[3] = op(EQUAL, ALLOWED[0] as u32, 8, 0);
    let mut at = 4u8;
    while at < 11 {
        program[at as usize] = op(EQUAL, ALLOWED[at as usize - 3] as u32, ALLOW_AT - at - 1, 0);
        at += 1;
    }
    program[12] = op(LOAD, SECOND_ARGUMENT, 0, 0);
    program[13] = op(EQUAL, crate::abi::UFFDIO_MOVE, 1, 0);
    program[15] = op(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the filter on one call, as the kernel would.
    fn verdict(arch: u32, number: u32, second: u32) -> u32 {
        let program = filter();
        let (mut at, mut accumulator) = (0usize, 0u32);
        loop {
            let step = program[at];
            at += 1;
            match u32::from(step.code) & 7 {
                libc::BPF_LD => {
                    accumulator = match step.k {
                        0 => number,
                        4 => arch,
                        24 => second,
                        other => panic!("loads from {other}"),
                    }
                }
                libc::BPF_JMP => {
                    at += usize::from(if accumulator == step.k { step.jt } else { step.jf });
                }
                _ => return step.k,
            }
        }
    }

    #[test]
    fn a_helper_that_gets_its_turn_late_is_waited_for() {
        let ring: Vec<AtomicU32> = (0..layout::BYTES / 4).map(|_| AtomicU32::new(0)).collect();
        let state = &ring[layout::HELPER_STATE / 4];
        let at = ring.as_ptr().cast_mut().cast();
        let handle = HelperHandle { pid: 0, stack: std::ptr::null_mut(), stack_bytes: 0, ring: at };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(2));
                state.store(layout::STATE_RUNNING, Ordering::SeqCst);
            });
            handle.wait_until_it_serves().expect("it serves in the end");
        });
    }

    #[test]
    fn the_filter_leaves_only_what_the_loop_needs() {
        let deny = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
        for number in 0..600 {
            let allowed = ALLOWED[1..].iter().any(|&call| call as u32 == number);
            let expected = if allowed { libc::SECCOMP_RET_ALLOW } else { deny };
            assert_eq!(verdict(AUDIT_ARCH, number, 0), expected, "call {number}");
            assert_eq!(verdict(AUDIT_ARCH ^ 1, number, 0), deny, "call {number}, other machine");
        }
        let ioctl = Sysno::ioctl as u32;
        assert_eq!(verdict(AUDIT_ARCH, ioctl, crate::abi::UFFDIO_MOVE), libc::SECCOMP_RET_ALLOW);
        assert_eq!(verdict(AUDIT_ARCH, ioctl, crate::abi::UFFDIO_COPY), deny);
    }
}
