//! What seccomp filters that the program installs leave to this library.
//!
//! A filter may end the program for a system call. What was allowed when the program connected, and is not any
//! more, must not be tried then: natively the program would have gone on. So each filter is run here on the
//! calls that this library makes, before it is installed; what it would end the program for is left from then
//! on. Refusals with an errno are met like those of the kernel.
//!
//! Filters are seen where they are installed through libc, under the preload library. Of others only that there
//! are some, and only if there was none at first: then all is left.

use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

/// Something that this library does by system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
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
}

const ALL: [Deed; 5] = [Deed::Ask, Deed::Grow, Deed::Join, Deed::Look, Deed::Reconnect];
const EVERYTHING: u8 = 31;

static LEFT: AtomicU8 = AtomicU8::new(0);
/// Of [`seccomp_mode`] when the program connected.
static MODE_AT_FIRST: AtomicI32 = AtomicI32::new(UNKNOWN);
const UNKNOWN: i32 = -1;

/// One system call: its number, and of its arguments those that filters look at.
type Call = (libc::c_long, [u64; 3]);

#[cfg(target_arch = "x86_64")]
const POLL: libc::c_long = libc::SYS_poll;
#[cfg(not(target_arch = "x86_64"))]
const POLL: libc::c_long = libc::SYS_ppoll;

/// What [`seccomp_mode`] asks.
const MODE: Call = (libc::SYS_prctl, [libc::PR_GET_SECCOMP as u64, 0, 0]);

const ASK: &[Call] = &[
    MODE,
    (libc::SYS_getpid, [0; 3]),
    (libc::SYS_fstat, [0; 3]),
    (libc::SYS_sendmsg, [0; 3]),
    (libc::SYS_recvmsg, [0; 3]),
    (POLL, [0; 3]),
    (libc::SYS_futex, [0; 3]),
    (libc::SYS_rt_sigprocmask, [0; 3]),
    (libc::SYS_clock_nanosleep, [0; 3]),
];
const GROW: &[Call] = &[
    (libc::SYS_mmap, [0, 0, 3]),
    (libc::SYS_munmap, [0; 3]),
    (libc::SYS_madvise, [0, 0, libc::MADV_HUGEPAGE as u64]),
    (libc::SYS_madvise, [0, 0, libc::MADV_DONTFORK as u64]),
];
const LOOK: &[Call] = &[
    MODE,
    (libc::SYS_close, [0; 3]),
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
    (libc::SYS_close, [0; 3]),
];
/// Also what the helper does before it has a filter of its own: it inherits the program's.
const JOIN: &[Call] = &[
    (libc::SYS_fcntl, [0, libc::F_DUPFD as u64, 0]),
    (libc::SYS_ioctl, [0, tiermgr_sys::abi::USERFAULTFD_IOC_NEW as u64, 0]),
    (libc::SYS_ioctl, [0, tiermgr_sys::abi::UFFDIO_MOVE as u64, 0]),
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
    fn calls(self) -> impl Iterator<Item = &'static Call> {
        let sets: &[&[Call]] = match self {
            Self::Ask => &[ASK],
            Self::Grow => &[ASK, GROW],
            Self::Join => &[ASK, GROW, RECONNECT, JOIN],
            Self::Look => &[LOOK],
            Self::Reconnect => &[ASK, RECONNECT],
        };
        sets.iter().copied().flatten()
    }
}

/// Whether the program goes on if this library does that.
#[must_use]
pub fn may(deed: Deed) -> bool {
    let left = LEFT.load(Ordering::Relaxed);
    if left != 0 {
        return left & deed as u8 == 0;
    }
    let first = MODE_AT_FIRST.load(Ordering::Relaxed);
    first == UNKNOWN || seccomp_mode() == first
}

/// The filters that there are now are those of whoever started the program.
pub(crate) fn note_start() {
    if LEFT.load(Ordering::Relaxed) == 0 {
        MODE_AT_FIRST.store(seccomp_mode(), Ordering::Relaxed);
    }
}

fn seccomp_mode() -> i32 {
    // SAFETY: PR_GET_SECCOMP takes nothing.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP) }
}

/// What the program is about to install.
#[derive(Clone, Copy, Debug)]
pub enum Filter<'a> {
    /// A filter.
    Program(&'a [libc::sock_filter]),
    /// Strict mode: hardly anything is left.
    Strict,
}

/// To be called before a filter is installed, with what installs it; gives what that gives. Where it fails,
/// all is as it was.
pub fn around(filter: Filter<'_>, install: impl FnOnce() -> libc::c_long) -> libc::c_long {
    let ended = match filter {
        Filter::Strict => EVERYTHING,
        Filter::Program(steps) => ALL
            .into_iter()
            .filter(|deed| deed.calls().any(|call| ends_program(steps, call)))
            .fold(0, |set, deed| set | deed as u8),
    };
    let before = LEFT.fetch_or(ended, Ordering::Relaxed);
    let outcome = install();
    if outcome < 0 {
        LEFT.store(before, Ordering::Relaxed);
    } else if LEFT.load(Ordering::Relaxed) == 0 {
        // A harmless one: from here on there are filters, and they are known.
        MODE_AT_FIRST.store(seccomp_mode(), Ordering::Relaxed);
    }
    outcome
}

fn ends_program(steps: &[libc::sock_filter], (number, arguments): &Call) -> bool {
    let mut data = [0; 16];
    data[0] = u32::try_from(*number).unwrap_or(u32::MAX);
    data[1] = ARCH;
    for (at, argument) in arguments.iter().enumerate() {
        let [low, high] = [*argument & 0xffff_ffff, *argument >> 32];
        data[4 + 2 * at] = u32::try_from(low).unwrap_or(0);
        data[5 + 2 * at] = u32::try_from(high).unwrap_or(0);
    }
    // What cannot be told may be the worst.
    let verdict = verdict(steps, &data).unwrap_or(libc::SECCOMP_RET_KILL_PROCESS);
    !matches!(
        verdict & libc::SECCOMP_RET_ACTION_FULL,
        libc::SECCOMP_RET_ALLOW | libc::SECCOMP_RET_LOG | libc::SECCOMP_RET_ERRNO
    )
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
            assert_eq!(ended(&against(libc::SYS_connect, action)), [Deed::Join, Deed::Reconnect]);
            assert_eq!(ended(&against(libc::SYS_clone, action)), [Deed::Join]);
            assert_eq!(ended(&against(libc::SYS_madvise, action)), [Deed::Grow, Deed::Join]);
            assert_eq!(ended(&against(libc::SYS_ioctl, action)), [Deed::Join, Deed::Look]);
            assert_eq!(
                ended(&against(libc::SYS_sendmsg, action)),
                [Deed::Ask, Deed::Grow, Deed::Join, Deed::Reconnect]
            );
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

    #[test]
    fn what_is_no_filter_counts_as_the_worst() {
        assert_eq!(ended(&[]), ALL);
        assert_eq!(ended(&[op(0xffff, 0, 0, 0)]), ALL);
    }
}
