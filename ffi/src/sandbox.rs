//! What seccomp filters that the program installs leave to this library.
//!
//! A filter may end the program for a system call. What was allowed when the program connected, and is not any
//! more, must not be tried then: natively the program would have gone on. So each filter is run here on the
//! calls that this library makes, before it is installed; what it would end the program for is left from then
//! on. Refusals with an errno are met like those of the kernel.
//!
//! A filter is its thread's, and that of the threads and processes which that makes from then on; only one
//! that is installed with `SECCOMP_FILTER_FLAG_TSYNC` is everybody's. The thread that has installed one
//! remembers it. Of the others those without any filter are told by the kernel, and do what they did; those
//! with one may have inherited each that was seen.
//!
//! Filters are seen where they are installed through libc, under the preload library. Of others only that there
//! are some, and only if there was none at first: then all is left. What calls need memory of libc's own heap is
//! not looked at: the program needs it too.

use crate::fds;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU16, Ordering};

/// Something that this library does by system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Deed {
    /// Sends a request and waits for its answer.
    Ask = 1,
    /// Maps memory, and has it managed.
    Grow = 2,
    /// Connects: at first, or in a forked child.
    Join = 4,
    /// Looks whether memory is armed, before a fork.
    Look = 8,
    /// Greets a daemon that has come back.
    Reconnect = 16,
    /// Learns whose process this is, and closes descriptors.
    Leave = 32,
    /// Reserves memory, and makes it accessible.
    Map = 64,
    /// Changes access to memory.
    Protect = 128,
    /// The same where there is a protection key.
    Key = 256,
    /// Locks memory, and unlocks it.
    Lock = 512,
    /// Takes back what the program has advised, and asks what it has locked.
    Advise = 1024,
    /// Moves a mapping.
    Move = 2048,
    /// Reads the list of mappings.
    List = 4096,
    /// Says what is wrong.
    Say = 8192,
}

const ALL: [Deed; 14] = [
    Deed::Ask,
    Deed::Grow,
    Deed::Join,
    Deed::Look,
    Deed::Reconnect,
    Deed::Leave,
    Deed::Map,
    Deed::Protect,
    Deed::Key,
    Deed::Lock,
    Deed::Advise,
    Deed::Move,
    Deed::List,
    Deed::Say,
];
const EVERYTHING: u16 = KNOWN - 1;
/// Beside the deeds that a thread leaves: it knows all its filters.
const KNOWN: u16 = 1 << 15;

/// Left by every thread.
static BY_ALL: AtomicU16 = AtomicU16::new(0);
/// Left by a thread that has a filter and does not know which.
static BY_HEIRS: AtomicU16 = AtomicU16::new(0);
/// Some thread knows its filters.
static ARE_KNOWN: AtomicBool = AtomicBool::new(false);
/// Some thread may have inherited a filter that was seen.
static ARE_INHERITED: AtomicBool = AtomicBool::new(false);
/// A thread that has inherited a filter may be ended for asking the kernel whether it has one.
static IS_ASKING_DEADLY: AtomicBool = AtomicBool::new(false);
/// Of [`seccomp_mode`] when the program connected.
static MODE_AT_FIRST: AtomicI32 = AtomicI32::new(UNKNOWN);
const UNKNOWN: i32 = -1;

thread_local! {
    /// What this thread leaves, if it knows. Touched only once there is such a thread: whoever asks may be inside
    /// of malloc, and in a library that was loaded late the first touch allocates.
    static OWN: Cell<u16> = const { Cell::new(0) };
}

/// One system call: its number, and of its arguments those that filters look at.
type Call = (libc::c_long, [u64; 3]);

#[cfg(target_arch = "x86_64")]
const POLL: libc::c_long = libc::SYS_poll;
#[cfg(not(target_arch = "x86_64"))]
const POLL: libc::c_long = libc::SYS_ppoll;
#[cfg(target_arch = "x86_64")]
const READLINK: libc::c_long = libc::SYS_readlink;
#[cfg(not(target_arch = "x86_64"))]
const READLINK: libc::c_long = libc::SYS_readlinkat;

/// What [`seccomp_mode`] asks.
const MODE: &[Call] = &[(libc::SYS_prctl, [libc::PR_GET_SECCOMP as u64, 0, 0])];
/// How threads are made, of which a filter is known to be theirs only if they make none. A forked child knows
/// what its thread knew.
const MAKE: &[Call] = &[(libc::SYS_clone, [OF_PTHREAD, 0, 0]), (libc::SYS_clone3, [0; 3])];
const OF_PTHREAD: u64 = 0x003d_0f00;

const LEAVE: &[Call] =
    &[(libc::SYS_getpid, [0; 3]), (libc::SYS_fstat, [0; 3]), (libc::SYS_close, [0; 3])];
const ASK: &[Call] = &[
    (libc::SYS_sendmsg, [0; 3]),
    (libc::SYS_recvmsg, [0; 3]),
    (POLL, [0; 3]),
    (libc::SYS_futex, [0; 3]),
    (libc::SYS_rt_sigprocmask, [0; 3]),
    (libc::SYS_clock_nanosleep, [0; 3]),
    (libc::SYS_sched_yield, [0; 3]),
];
const MAP: &[Call] = &[
    (libc::SYS_mmap, [0, 0, 0]),
    (libc::SYS_mmap, [0, 0, 3]),
    (libc::SYS_munmap, [0; 3]),
    (libc::SYS_madvise, [0, 0, libc::MADV_DONTNEED as u64]),
    (libc::SYS_mprotect, [0, 0, 3]),
];
const GROW: &[Call] = &[(libc::SYS_madvise, [0, 0, libc::MADV_HUGEPAGE as u64])];
const PROTECT: &[Call] = &[
    (libc::SYS_mprotect, [0, 0, 0]),
    (libc::SYS_mprotect, [0, 0, 1]),
    (libc::SYS_mprotect, [0, 0, 3]),
];
const KEY: &[Call] = &[(libc::SYS_pkey_mprotect, [0, 0, 0]), (libc::SYS_pkey_mprotect, [0, 0, 3])];
const LOCK: &[Call] = &[
    (libc::SYS_mlock, [0; 3]),
    (libc::SYS_mlock2, [0, 0, libc::MLOCK_ONFAULT as u64]),
    (libc::SYS_munlock, [0; 3]),
];
const ADVISE: &[Call] = &[
    (libc::SYS_madvise, [0, 0, libc::MADV_HUGEPAGE as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_UNMERGEABLE as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_DODUMP as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_KEEPONFORK as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_DOFORK as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_COLD as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_POPULATE_READ as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_POPULATE_WRITE as u64]),
];
const MOVE: &[Call] = &[(libc::SYS_mremap, [0; 3])];
const LIST: &[Call] = &[
    (libc::SYS_openat, [libc::AT_FDCWD.cast_unsigned() as u64, 0, 0]),
    (libc::SYS_read, [0; 3]),
    (libc::SYS_close, [0; 3]),
];
const SAY: &[Call] = &[(libc::SYS_getpid, [0; 3]), (libc::SYS_write, [2, 0, 0])];
const LOOK: &[Call] = &[
    (libc::SYS_ioctl, [0, tiermgr_sys::abi::USERFAULTFD_IOC_NEW as u64, 0]),
    (libc::SYS_ioctl, [0, tiermgr_sys::abi::UFFDIO_API as u64, 0]),
    (libc::SYS_ioctl, [0, tiermgr_sys::abi::UFFDIO_REGISTER as u64, 0]),
];
const RECONNECT: &[Call] = &[
    (
        libc::SYS_socket,
        [libc::AF_UNIX as u64, (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64, 0],
    ),
    (libc::SYS_connect, [0; 3]),
    (libc::SYS_setsockopt, [0; 3]),
    (libc::SYS_fcntl, [0, libc::F_DUPFD_CLOEXEC as u64, 0]),
];
/// Also what the helper does before it has a filter of its own: it inherits the program's.
const JOIN: &[Call] = &[
    (READLINK, [0; 3]),
    (libc::SYS_statx, [0; 3]),
    (libc::SYS_fcntl, [0, libc::F_DUPFD as u64, 0]),
    (libc::SYS_fcntl, [0, libc::F_GET_SEALS as u64, 0]),
    (libc::SYS_ioctl, [0, tiermgr_sys::abi::UFFDIO_UNREGISTER as u64, 0]),
    (libc::SYS_ioctl, [0, tiermgr_sys::abi::UFFDIO_MOVE as u64, 0]),
    (libc::SYS_madvise, [0, 0, libc::MADV_WIPEONFORK as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_DONTFORK as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_DONTDUMP as u64]),
    (libc::SYS_mprotect, [0; 3]),
    (libc::SYS_clone, [libc::CLONE_VM as u64, 0, 0]),
    (libc::SYS_wait4, [0; 3]),
    (libc::SYS_dup3, [0; 3]),
    (libc::SYS_close_range, [0; 3]),
    (libc::SYS_prctl, [libc::PR_SET_NAME as u64, 0, 0]),
    (libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0]),
    (libc::SYS_setsid, [0; 3]),
    (libc::SYS_capset, [0; 3]),
    (libc::SYS_seccomp, [libc::SECCOMP_SET_MODE_FILTER as u64, 0, 0]),
    (libc::SYS_write, [0; 3]),
    (libc::SYS_getppid, [0; 3]),
    (libc::SYS_exit_group, [0; 3]),
];

impl Deed {
    /// Numbers of the system calls that it takes, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn numbers(self) -> Vec<libc::c_long> {
        self.calls().map(|&(number, _)| number).collect()
    }

    fn calls(self) -> impl Iterator<Item = &'static Call> {
        let sets: &[&[Call]] = match self {
            Self::Ask => &[LEAVE, ASK],
            Self::Grow => &[LEAVE, ASK, MAP, GROW],
            Self::Join => &[LEAVE, ASK, MAP, GROW, LOOK, RECONNECT, JOIN],
            Self::Look => &[LEAVE, LOOK],
            Self::Reconnect => &[LEAVE, ASK, RECONNECT],
            Self::Leave => &[LEAVE],
            Self::Map => &[MAP],
            Self::Protect => &[PROTECT],
            Self::Key => &[KEY],
            Self::Lock => &[LOCK],
            Self::Advise => &[ADVISE],
            Self::Move => &[MOVE],
            Self::List => &[LIST],
            Self::Say => &[SAY],
        };
        sets.iter().copied().flatten()
    }
}

/// Whether the program goes on if this thread does that.
#[must_use]
pub fn may(deed: Deed) -> bool {
    left() & deed as u16 == 0
}

/// What this thread leaves.
fn left() -> u16 {
    let by_all = BY_ALL.load(Ordering::Relaxed);
    let are_known = ARE_KNOWN.load(Ordering::Relaxed);
    if are_known {
        let own = OWN.get();
        if own & KNOWN != 0 {
            return by_all | (own & EVERYTHING);
        }
    }
    let first = MODE_AT_FIRST.load(Ordering::Relaxed);
    if by_all == EVERYTHING || !are_known && first == UNKNOWN {
        return by_all;
    }
    let by_heirs = by_all | BY_HEIRS.load(Ordering::Relaxed);
    if IS_ASKING_DEADLY.load(Ordering::Relaxed) {
        return by_heirs;
    }
    match seccomp_mode() {
        0 => by_all,
        mode if mode == first || first == UNKNOWN => by_heirs,
        _ if ARE_INHERITED.load(Ordering::Relaxed) => by_heirs,
        _ => EVERYTHING,
    }
}

/// The filters that there are now are those of whoever started the program, but for those that were seen.
pub(crate) fn note_start() {
    if may(Deed::Ask) && !IS_ASKING_DEADLY.load(Ordering::Relaxed) && !is_own_known() {
        MODE_AT_FIRST.store(seccomp_mode(), Ordering::Relaxed);
    }
}

fn is_own_known() -> bool {
    ARE_KNOWN.load(Ordering::Relaxed) && OWN.get() & KNOWN != 0
}

fn seccomp_mode() -> i32 {
    // SAFETY: PR_GET_SECCOMP takes nothing.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP) }
}

/// What the program is about to install.
#[derive(Clone, Copy, Debug)]
pub enum Filter<'a> {
    /// A filter of this thread.
    Program(&'a [libc::sock_filter]),
    /// A filter of all threads, those filters included that this one has already.
    ForAll(&'a [libc::sock_filter]),
    /// Strict mode: hardly anything is left.
    Strict,
}

/// To be called before a filter is installed, with what installs it; gives what that gives. Where it fails,
/// all is as it was.
pub fn around(filter: Filter<'_>, install: impl FnOnce() -> libc::c_long) -> libc::c_long {
    let before = left();
    // The child of a vfork has a filter of its own, and our memory.
    if before & Deed::Leave as u16 == 0 && fds::is_borrowed() {
        return install();
    }
    let ends = |calls: &[Call]| match filter {
        Filter::Strict => true,
        Filter::Program(steps) | Filter::ForAll(steps) => {
            calls.iter().any(|call| ends_program(steps, call))
        }
    };
    let ended = ALL
        .into_iter()
        .filter(|deed| deed.calls().any(|call| ends(std::slice::from_ref(call))))
        .fold(0, |set, deed| set | deed as u16);
    let now = before | ended;
    let is_for_all = matches!(filter, Filter::ForAll(_));
    let is_inherited = is_for_all
        || match filter {
            Filter::Strict => false,
            Filter::Program(steps) | Filter::ForAll(steps) => {
                MAKE.iter().any(|call| may_succeed(steps, call))
            }
        };
    // Before it is there: a signal handler, or another thread, may come in between.
    ARE_KNOWN.store(true, Ordering::Relaxed);
    let own_before = OWN.replace(KNOWN | now);
    let by_all = if is_for_all { BY_ALL.fetch_or(now, Ordering::Relaxed) } else { now };
    let by_heirs = if is_inherited { BY_HEIRS.fetch_or(now, Ordering::Relaxed) } else { now };
    let makes_asking_deadly = is_inherited && ends(MODE);
    let was_deadly = makes_asking_deadly && !IS_ASKING_DEADLY.swap(true, Ordering::Relaxed);
    let were_inherited = is_inherited && !ARE_INHERITED.swap(true, Ordering::Relaxed);
    let outcome = install();
    // One that could not be given to a thread gives the number of that.
    if outcome < 0 || is_for_all && outcome > 0 {
        OWN.set(own_before);
        BY_ALL.fetch_and(by_all | !now, Ordering::Relaxed);
        BY_HEIRS.fetch_and(by_heirs | !now, Ordering::Relaxed);
        if was_deadly {
            IS_ASKING_DEADLY.store(false, Ordering::Relaxed);
        }
        if were_inherited {
            ARE_INHERITED.store(false, Ordering::Relaxed);
        }
    }
    outcome
}

/// Whether the program may go on from a call, with what that is for done.
fn may_succeed(steps: &[libc::sock_filter], call: &Call) -> bool {
    let refused =
        [libc::SECCOMP_RET_KILL_PROCESS, libc::SECCOMP_RET_KILL_THREAD, libc::SECCOMP_RET_ERRNO];
    !action(steps, call).is_some_and(|action| refused.contains(&action))
}

fn ends_program(steps: &[libc::sock_filter], call: &Call) -> bool {
    // What cannot be told may be the worst.
    !matches!(
        action(steps, call),
        Some(libc::SECCOMP_RET_ALLOW | libc::SECCOMP_RET_LOG | libc::SECCOMP_RET_ERRNO)
    )
}

fn action(steps: &[libc::sock_filter], (number, arguments): &Call) -> Option<u32> {
    let mut data = [0; 16];
    data[0] = u32::try_from(*number).unwrap_or(u32::MAX);
    data[1] = ARCH;
    for (at, argument) in arguments.iter().enumerate() {
        let [low, high] = [*argument & 0xffff_ffff, *argument >> 32];
        data[4 + 2 * at] = u32::try_from(low).unwrap_or(0);
        data[5 + 2 * at] = u32::try_from(high).unwrap_or(0);
    }
    Some(verdict(steps, &data)? & libc::SECCOMP_RET_ACTION_FULL)
}

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// Runs a filter, as the kernel does, on the words of a `seccomp_data`; `None` for a step that is in no filter
/// that the kernel takes.
fn verdict(steps: &[libc::sock_filter], data: &[u32; 16]) -> Option<u32> {
    let (mut a, mut x, mut memory, mut at) = (0_u32, 0_u32, [0_u32; 16], 0_usize);
    loop {
        let step = steps.get(at)?;
        at += 1;
        let (code, k) = (u32::from(step.code), step.k);
        let place = k as usize;
        let operand = if code & libc::BPF_X != 0 { x } else { k };
        match code & 7 {
            libc::BPF_LD | libc::BPF_LDX => {
                let value = match code & 0xe0 {
                    libc::BPF_IMM => k,
                    libc::BPF_ABS => *data.get(place / 4)?,
                    libc::BPF_MEM => *memory.get(place)?,
                    libc::BPF_LEN => 64,
                    _ => return None,
                };
                *(if code & 7 == libc::BPF_LD { &mut a } else { &mut x }) = value;
            }
            libc::BPF_ST => *memory.get_mut(place)? = a,
            libc::BPF_STX => *memory.get_mut(place)? = x,
            libc::BPF_ALU => a = calculate(code & 0xf0, a, operand)?,
            libc::BPF_JMP => {
                let holds = match code & 0xf0 {
                    libc::BPF_JA => {
                        at = at.checked_add(place)?;
                        continue;
                    }
                    libc::BPF_JEQ => a == operand,
                    libc::BPF_JGT => a > operand,
                    libc::BPF_JGE => a >= operand,
                    libc::BPF_JSET => a & operand != 0,
                    _ => return None,
                };
                at += usize::from(if holds { step.jt } else { step.jf });
            }
            libc::BPF_RET => return Some(if code & 0x18 == libc::BPF_A { a } else { k }),
            libc::BPF_MISC if code & 0xf8 == libc::BPF_TAX => x = a,
            libc::BPF_MISC => a = x,
            _ => return None,
        }
    }
}

fn calculate(operation: u32, a: u32, b: u32) -> Option<u32> {
    Some(match operation {
        libc::BPF_ADD => a.wrapping_add(b),
        libc::BPF_SUB => a.wrapping_sub(b),
        libc::BPF_MUL => a.wrapping_mul(b),
        libc::BPF_DIV => a.checked_div(b)?,
        libc::BPF_OR => a | b,
        libc::BPF_AND => a & b,
        libc::BPF_XOR => a ^ b,
        libc::BPF_LSH => a.checked_shl(b).unwrap_or(0),
        libc::BPF_RSH => a.checked_shr(b).unwrap_or(0),
        libc::BPF_NEG => a.wrapping_neg(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
        libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k }
    }

    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

    /// Answers one call with `action`.
    fn against(number: libc::c_long, action: u32) -> Vec<libc::sock_filter> {
        vec![
            op(LOAD, 0, 0, 0),
            op(EQUAL, u32::try_from(number).unwrap(), 0, 1),
            op(RETURN, action, 0, 0),
            op(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        ]
    }

    fn ended(steps: &[libc::sock_filter]) -> Vec<Deed> {
        ALL.into_iter().filter(|deed| deed.calls().any(|call| ends_program(steps, call))).collect()
    }

    #[test]
    fn what_a_filter_ends_the_program_for_is_known() {
        for action in [
            libc::SECCOMP_RET_KILL_PROCESS,
            libc::SECCOMP_RET_KILL_THREAD,
            libc::SECCOMP_RET_TRAP,
            libc::SECCOMP_RET_TRACE,
        ] {
            use Deed::{Advise, Ask, Grow, Join, Look, Map, Protect, Reconnect};
            assert_eq!(ended(&against(libc::SYS_connect, action)), [Join, Reconnect]);
            assert_eq!(ended(&against(libc::SYS_clone, action)), [Join]);
            assert_eq!(ended(&against(libc::SYS_madvise, action)), [Grow, Join, Map, Advise]);
            assert_eq!(ended(&against(libc::SYS_mprotect, action)), [Grow, Join, Map, Protect]);
            assert_eq!(ended(&against(libc::SYS_mlock2, action)), [Deed::Lock]);
            assert_eq!(ended(&against(libc::SYS_ioctl, action)), [Join, Look]);
            assert_eq!(ended(&against(libc::SYS_sendmsg, action)), [Ask, Grow, Join, Reconnect]);
            assert_eq!(ended(&against(libc::SYS_userfaultfd, action)), []);
        }
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
        for action in [refused, libc::SECCOMP_RET_LOG] {
            assert_eq!(ended(&against(libc::SYS_connect, action)), []);
        }
    }

    #[test]
    fn arguments_and_arithmetic() {
        // Sockets that are not local end the program, by a detour through X, memory and a mask.
        let filter = [
            op(LOAD, 0, 0, 0),
            op(EQUAL, u32::try_from(libc::SYS_socket).unwrap(), 1, 0),
            op(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
            op(LOAD, 16, 0, 0),
            op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0xff, 0, 0),
            op(libc::BPF_ST, 3, 0, 0),
            op(libc::BPF_LDX | libc::BPF_W | libc::BPF_MEM, 3, 0, 0),
            op(libc::BPF_LD | libc::BPF_W | libc::BPF_IMM, libc::AF_UNIX.unsigned_abs(), 0, 0),
            op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_X, 0, 0, 1),
            op(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
            op(RETURN, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        ];
        assert_eq!(ended(&filter), []);
        let other = (libc::SYS_socket, [2, 0, 0]);
        assert!(ends_program(&filter, &other));
    }

    /// In a thread of its own: what it knows ends with it.
    fn in_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(body).join().expect("no panic"))
    }

    #[test]
    fn a_filter_is_its_threads() {
        let forbidding = against(libc::SYS_sendmsg, libc::SECCOMP_RET_KILL_PROCESS);
        let after = |filter, outcome: libc::c_long| {
            in_thread(|| {
                assert_eq!(around(filter, || outcome), outcome);
                may(Deed::Ask)
            })
        };
        assert!(!after(Filter::Program(&forbidding), 0));
        assert!(after(Filter::Program(&forbidding), -1), "it was not installed");
        assert!(after(Filter::ForAll(&forbidding), 7), "thread 7 could not have it");
        assert!(!after(Filter::Strict, 0));
        let harmless = against(libc::SYS_reboot, libc::SECCOMP_RET_KILL_PROCESS);
        assert!(after(Filter::Program(&harmless), 0));
        assert!(may(Deed::Ask), "this thread has none");
    }

    #[test]
    fn what_is_no_filter_counts_as_the_worst() {
        assert_eq!(ended(&[]), ALL);
        assert_eq!(ended(&[op(0xffff, 0, 0, 0)]), ALL);
    }
}
