//! What the helper does: take commands, carry them out, answer.
//!
//! This code runs in a process that shares its memory *and its thread-local storage* with the program that
//! made it. So here, and in everything called from here: raw system calls only (libc's would write the
//! program's `errno`), no allocation, no lock, no panic, no standard library beyond `core`.

use crate::abi;
use crate::ring::{ENTRIES, layout};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use syscalls::{Sysno, raw};

/// How long a helper keeps the memory of a client that was served and has ended, when no daemon tells it to go. A
/// forked child of that client may need pages that only this memory holds.
const LINGER_NS: u64 = 30_000_000_000;
/// How long a wait for a command is before the helper looks whether its client lives.
const WAIT_NS: u64 = 100_000_000;
/// Longest time of looking for a next command before sleeping.
const SPIN_NS_MAX: u64 = 20_000;

/// All that the loop needs, by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Loop {
    /// Base of the mapped ring: `layout::BYTES` long, mapped until the helper has ended.
    pub(crate) ring: *mut u8,
    /// The client's process id.
    pub(crate) client: i32,
    pub(crate) limbo: i32,
    pub(crate) event: i32,
}

// Registers, addresses and lengths are the same size here.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// The errno in a raw result; 0 for success.
#[expect(clippy::cast_possible_truncation, reason = "errnos are below 4096")]
pub(crate) const fn errno_of(result: usize) -> u32 {
    if result > usize::MAX - 4096 { result.wrapping_neg() as u32 } else { 0 }
}

/// An address or length as a register.
#[expect(clippy::cast_possible_truncation, reason = "asserted above: both have 64 bits")]
const fn register(value: u64) -> usize {
    value as usize
}

impl Loop {
    fn head(&self, offset: usize) -> &AtomicU32 {
        let at = self.ring.wrapping_add(offset);
        // SAFETY: the ring is mapped while the helper runs; `offset` is one of `layout`'s, a multiple of 4
        // below `layout::BYTES`; all access to the memory is atomic.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    fn field(&self, sequence: u32, field: usize) -> &AtomicU64 {
        let index = sequence as usize & (ENTRIES - 1);
        let at = self.ring.wrapping_add(layout::FIRST_ENTRY + index * layout::ENTRY_BYTES + field);
        // SAFETY: as in `head`; `index` is below ENTRIES and `field` is a multiple of 8 inside an entry.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// Serves until it is told to stop, or the client has gone: for long, where anybody served it.
    pub(crate) fn run(&self) {
        let mut epoch = 0;
        let mut next = 0u32;
        let mut spin_ns = SPIN_NS_MAX;
        let mut linger_until = 0;
        self.head(layout::HELPER_STATE).store(layout::STATE_RUNNING, Ordering::SeqCst);
        while self.head(layout::STOP).load(Ordering::SeqCst) == 0 {
            let now = self.head(layout::EPOCH).load(Ordering::SeqCst);
            if now != epoch {
                // Between two commands: none of the former epoch runs, and none is looked at again.
                epoch = now;
                next = 0;
                self.head(layout::EPOCH_ACK).store(epoch, Ordering::SeqCst);
            }
            let bell = self.head(layout::DOORBELL).load(Ordering::SeqCst);
            if self.step(epoch, &mut next) || self.spin(bell, &mut spin_ns) {
                continue;
            }
            if self.sleep(bell) {
                spin_ns = (spin_ns + SPIN_NS_MAX / 4).min(SPIN_NS_MAX);
            } else if self.client_is_gone(&mut linger_until) {
                break;
            }
        }
    }

    /// Looks at the entry of `next`; `true` when it got past it.
    fn step(&self, epoch: u32, next: &mut u32) -> bool {
        let word = self.field(*next, layout::WORD);
        let seen = word.load(Ordering::SeqCst);
        if seen >> 32 != u64::from(epoch) {
            return false;
        }
        let queued = layout::word(epoch, *next, layout::QUEUED);
        let taken = layout::word(epoch, *next, layout::TAKEN);
        if seen == queued {
            if word.compare_exchange(queued, taken, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                self.carry_out(*next);
                word.store(layout::word(epoch, *next, layout::DONE), Ordering::SeqCst);
                self.tell_owner();
            }
            *next = next.wrapping_add(1);
            return true;
        }
        // The owner may have cancelled this one, reported it, and given the entry to a later command.
        let cancelled = seen == layout::word(epoch, *next, layout::CANCELLED);
        let ahead = (seen >> 8).wrapping_sub(u64::from(*next)) & 0x00ff_ffff;
        let given_on = ahead != 0 && ahead < 1 << 23;
        if cancelled || given_on {
            *next = next.wrapping_add(1);
        }
        cancelled || given_on
    }

    fn carry_out(&self, sequence: u32) {
        let read = |field| self.field(sequence, field).load(Ordering::Relaxed);
        let (op, a, b, len) =
            (read(layout::OP), read(layout::A), read(layout::B), read(layout::LEN));
        let (bytes, errno) = match op {
            layout::OP_MOVE_TO_LIMBO => move_pages(self.limbo, a, b, len),
            layout::OP_DROP => advise(a, len, libc::MADV_DONTNEED),
            layout::OP_POPULATE => advise(a, len, libc::MADV_POPULATE_WRITE),
            _ => (0, libc::EINVAL.unsigned_abs()),
        };
        self.field(sequence, layout::RESULT_BYTES).store(bytes, Ordering::Relaxed);
        self.field(sequence, layout::RESULT_ERRNO).store(u64::from(errno), Ordering::Relaxed);
    }

    fn tell_owner(&self) {
        if self.head(layout::OWNER_SLEEPS).swap(0, Ordering::SeqCst) != 0 {
            let one = 1u64;
            let at = (&raw const one).expose_provenance();
            // SAFETY: write reads eight bytes of `one`. A full counter is as good as a signal.
            unsafe { raw::syscall3(Sysno::write as usize, fd_arg(self.event), at, 8) };
        }
    }

    /// Looks at the doorbell for a while; `true` when it rang. The time adapts: a spin that was in vain
    /// halves it, one that paid restores it.
    fn spin(&self, bell: u32, spin_ns: &mut u64) -> bool {
        let begun = monotonic_ns();
        loop {
            let mut pause = 0;
            while pause < 32 {
                if self.head(layout::DOORBELL).load(Ordering::Relaxed) != bell {
                    *spin_ns = SPIN_NS_MAX;
                    return true;
                }
                std::hint::spin_loop();
                pause += 1;
            }
            if monotonic_ns().wrapping_sub(begun) >= *spin_ns {
                *spin_ns /= 2;
                return false;
            }
        }
    }

    /// Waits for the doorbell; `false` when the time is up.
    fn sleep(&self, bell: u32) -> bool {
        self.head(layout::HELPER_SLEEPS).store(1, Ordering::SeqCst);
        let doorbell = self.head(layout::DOORBELL);
        let mut rang = doorbell.load(Ordering::SeqCst) != bell;
        if !rang {
            let timeout = [0i64, WAIT_NS.cast_signed()];
            // SAFETY: FUTEX_WAIT reads the four bytes at the doorbell, which are mapped, and a timespec,
            // which on 64-bit machines is two i64.
            let result = unsafe {
                raw::syscall4(
                    Sysno::futex as usize,
                    doorbell.as_ptr().expose_provenance(),
                    libc::FUTEX_WAIT as usize,
                    bell as usize,
                    (&raw const timeout).expose_provenance(),
                )
            };
            rang = errno_of(result) != libc::ETIMEDOUT.unsigned_abs();
        }
        self.head(layout::HELPER_SLEEPS).store(0, Ordering::SeqCst);
        rang
    }

    /// Whether the client ended and its time of grace is over.
    fn client_is_gone(&self, linger_until: &mut u64) -> bool {
        // SAFETY: getppid takes nothing and touches nothing.
        let parent = unsafe { raw::syscall0(Sysno::getppid as usize) };
        if parent == fd_arg(self.client) {
            return false;
        }
        if self.head(layout::IN_SERVICE).load(Ordering::SeqCst) == 0 {
            return true;
        }
        let now = monotonic_ns();
        if *linger_until == 0 {
            *linger_until = now.wrapping_add(LINGER_NS);
        }
        now >= *linger_until
    }
}

/// A non-negative descriptor or process id as a register; a negative one becomes a number that no call
/// accepts.
pub(crate) const fn fd_arg(fd: i32) -> usize {
    if fd < 0 { i32::MAX as usize } else { fd.unsigned_abs() as usize }
}

/// UFFDIO_MOVE, repeated while it makes progress (a partial move is reported as EAGAIN whatever ended it).
fn move_pages(fd: i32, dst: u64, src: u64, len: u64) -> (u64, u32) {
    let mut done = 0u64;
    loop {
        let mut arg = abi::UffdioMove {
            dst: dst.wrapping_add(done),
            src: src.wrapping_add(done),
            len: len.wrapping_sub(done),
            mode: abi::MOVE_MODE_ALLOW_SRC_HOLES,
            moved: 0,
        };
        // SAFETY: UFFDIO_MOVE reads and writes one `UffdioMove`. Which pages lie where is what the daemon
        // decides for memory that it manages; nothing else is registered with these descriptors.
        let result = unsafe {
            raw::syscall3(
                Sysno::ioctl as usize,
                fd_arg(fd),
                abi::UFFDIO_MOVE as usize,
                (&raw mut arg).expose_provenance(),
            )
        };
        let errno = errno_of(result);
        if errno == 0 {
            return (len, 0);
        }
        let moved = arg.moved.cast_unsigned();
        let progress =
            errno == libc::EAGAIN.unsigned_abs() && arg.moved > 0 && moved < len.wrapping_sub(done);
        if !progress {
            return (done, errno);
        }
        done = done.wrapping_add(moved);
    }
}

fn advise(start: u64, len: u64, advice: i32) -> (u64, u32) {
    if len == 0 {
        return (0, libc::EINVAL.unsigned_abs());
    }
    // SAFETY: madvise takes integers. DONTNEED and POPULATE_WRITE are asked for by the daemon on memory
    // that it manages and that no Rust object lies in.
    let result = unsafe {
        raw::syscall3(Sysno::madvise as usize, register(start), register(len), fd_arg(advice))
    };
    match errno_of(result) {
        0 => (len, 0),
        errno => (0, errno),
    }
}

fn monotonic_ns() -> u64 {
    let mut time = [0i64; 2];
    // SAFETY: clock_gettime writes a timespec, which on 64-bit machines is two i64.
    unsafe {
        raw::syscall2(
            Sysno::clock_gettime as usize,
            libc::CLOCK_MONOTONIC as usize,
            (&raw mut time).expose_provenance(),
        )
    };
    let [seconds, nanos] = time;
    seconds.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(nanos.cast_unsigned())
}
