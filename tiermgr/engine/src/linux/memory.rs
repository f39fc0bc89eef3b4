//! What the host does to the memory of a process: ioctls on its userfaultfds, its page table, its limbo.

use super::LinuxHost;
use super::proc::{Attached, Proc, TouchedLost};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;
use tiermgr_core::effect::BufRange;
use tiermgr_core::event::{Event, IoctlOutcome};
use tiermgr_core::limits::COPY_PIECE_BYTES;
use tiermgr_core::page::PageMask;
use tiermgr_core::units::{Addr, EXTENT_PAGES_MAX, OpId, ProcId, Span, Tick, low_u32};
use tiermgr_sys::memory::{PageEntry, mappings_in, read_memory};
use tiermgr_sys::pidfd;
use tiermgr_sys::uffd::{Installed, Mode, Outcome, Uffd};

const PIECE: usize = low_u32(COPY_PIECE_BYTES) as usize;
/// Never written, so all of it is one frame of the kernel's and stays in the processor's cache.
static ZEROS: [u8; PIECE] = [0; PIECE];

/// How long a program has to end by SIGBUS before it is killed: a handler may want to say something.
const SIGBUS_GRACE_NS: u64 = 1_000_000_000;

/// What the manager is to make of it.
pub(super) fn outcome_of(outcome: Outcome) -> IoctlOutcome {
    match outcome {
        Outcome::Done => IoctlOutcome::Done,
        // A page that is under migration or pinned for a moment: the same cure.
        Outcome::EventsPending | Outcome::Busy => IoctlOutcome::EventsPending,
        Outcome::Exists => IoctlOutcome::Exists,
        Outcome::NoRange => IoctlOutcome::NoRange,
        Outcome::NoProcess => IoctlOutcome::NoProcess,
        Outcome::NoMemory => IoctlOutcome::NoMemory,
        Outcome::Other(errno) => {
            tracing::error!(error = %io::Error::from_raw_os_error(errno), "a userfaultfd ioctl");
            IoctlOutcome::NoMemory
        }
    }
}

/// Registers a span for faults. Where something in it cannot be registered, the kernel refuses all of it:
/// then what can be is, mapping by mapping, and the rest stays in DRAM.
fn register(known: &Proc, span: Span) -> io::Result<()> {
    let whole = known.arena.register(span.start.0, span.len, Mode::MISSING_WP).map(drop);
    let refused = whole.as_ref().err().and_then(io::Error::raw_os_error);
    if !matches!(refused, Some(libc::EINVAL | libc::EBUSY | libc::EPERM)) {
        return whole;
    }
    let mut registered = false;
    let mut left_out = 0;
    for (start, end) in mappings_in(known.entry.pid, span.start.0, span.end().0)? {
        match known.arena.register(start, end - start, Mode::MISSING_WP) {
            Ok(_) => registered = true,
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => return Err(error),
            Err(_) => left_out += end - start,
        }
    }
    tracing::warn!(
        pid = known.entry.pid,
        start = format_args!("{:?}", span.start),
        bytes = span.len,
        left_out_bytes = left_out,
        "another mapping lies in the memory of a program, or it has registered it with a userfaultfd of \
         its own: that part stays in DRAM"
    );
    if registered { Ok(()) } else { whole }
}

/// Installs `len` bytes in pieces, each from where `source` says, until one does not end well.
fn install<'a>(
    uffd: &Uffd,
    to: Addr,
    len: u64,
    protect: bool,
    source: impl Fn(usize, usize) -> &'a [u8],
) -> (u64, IoctlOutcome) {
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(COPY_PIECE_BYTES);
        let (Ok(from), Ok(count)) = (usize::try_from(done), usize::try_from(piece)) else { break };
        let Installed { bytes, outcome } =
            uffd.copy(to.plus(done).0, source(from, count), protect, true);
        done += bytes.min(piece);
        match outcome_of(outcome) {
            // A short copy without a reason would never end.
            IoctlOutcome::Done if bytes == 0 => return (done, IoctlOutcome::EventsPending),
            IoctlOutcome::Done => {}
            other => return (done, other),
        }
    }
    (done, IoctlOutcome::Done)
}

impl LinuxHost {
    pub(super) fn copy(&mut self, op: OpId, proc: ProcId, from: BufRange, to: Addr, protect: bool) {
        let len = u64::from(from.len);
        let (bytes, outcome) = if self.has_headroom(proc, len) {
            match (self.procs.get(proc), self.io.staged(from)) {
                (Some(known), Some(staged)) => install(&known.arena, to, len, protect, |at, n| {
                    staged.get(at..at + n).unwrap_or_default()
                }),
                (None, _) => (0, IoctlOutcome::NoProcess),
                (_, None) => {
                    tracing::error!(?from, "copying from staging that is in use or does not exist");
                    (0, IoctlOutcome::NoMemory)
                }
            }
        } else {
            (0, IoctlOutcome::NoMemory)
        };
        self.copied(op, proc, bytes, outcome);
    }

    pub(super) fn zero(&mut self, op: OpId, proc: ProcId, to: Span) {
        let (bytes, outcome) = if self.has_headroom(proc, to.len) {
            match self.procs.get(proc) {
                Some(known) => install(&known.arena, to.start, to.len, false, |_, n| {
                    ZEROS.get(..n).unwrap_or_default()
                }),
                None => (0, IoctlOutcome::NoProcess),
            }
        } else {
            (0, IoctlOutcome::NoMemory)
        };
        self.copied(op, proc, bytes, outcome);
    }

    fn copied(&mut self, op: OpId, proc: ProcId, bytes: u64, outcome: IoctlOutcome) {
        self.read_if_pending(proc, outcome);
        self.outcomes.push(Event::Copied { op, bytes, outcome });
    }

    /// Until a queued event is read the kernel refuses every try. Whoever tries again at once never sleeps,
    /// and no poll tells of the event.
    pub(super) fn read_if_pending(&mut self, proc: ProcId, outcome: IoctlOutcome) {
        if outcome == IoctlOutcome::EventsPending
            && let Some(known) = self.procs.get_mut(proc)
        {
            known.readable = true;
        }
    }

    /// Gives a page of zeros to whoever touches the nonce page: it is nobody's memory, and only a
    /// stray reader or our own proof of a child's identity ever looks.
    pub(super) fn serve_nonce_page(&self, proc: &Proc) {
        let page = self.page_bytes;
        let zeros = usize::try_from(page).ok().and_then(|page| ZEROS.get(..page));
        proc.arena.copy(proc.nonce_page.0, zeros.unwrap_or_default(), false, true);
        proc.arena.wake(proc.nonce_page.0, page);
    }

    pub(super) fn protect(&mut self, op: OpId, proc: ProcId, span: Span, on: bool) {
        let outcome = self.procs.get(proc).map_or(IoctlOutcome::NoProcess, |known| {
            outcome_of(known.arena.protect(span.start.0, span.len, on, !on))
        });
        self.protected(op, proc, outcome);
    }

    fn protected(&mut self, op: OpId, proc: ProcId, outcome: IoctlOutcome) {
        self.read_if_pending(proc, outcome);
        self.outcomes.push(Event::Protected { op, outcome });
    }

    pub(super) fn probe(&mut self, op: OpId, proc: ProcId) {
        let outcome = self.procs.get(proc).map_or(IoctlOutcome::NoProcess, |known| {
            match self.look(known) {
                // The nonce page is not registered for write protection: the kernel came as far as to
                // see that, so nothing was queued and the address space is there.
                Outcome::NoRange => IoctlOutcome::Done,
                other => outcome_of(other),
            }
        });
        self.protected(op, proc, outcome);
    }

    /// An ioctl that never changes anything, whatever the answer.
    pub(super) fn look(&self, proc: &Proc) -> Outcome {
        proc.arena.protect(proc.nonce_page.0, self.page_bytes, false, false)
    }

    pub(super) fn wake(&self, proc: ProcId, span: Span) {
        if let Some(known) = self.procs.get(proc) {
            // A wake has no one to fail for: with the process gone nobody sleeps.
            known.arena.wake(span.start.0, span.len);
        }
    }

    pub(super) fn poison(&mut self, proc: ProcId, span: Span) {
        if !self.config.features.uffd_poison {
            self.end_for_lost_bytes(proc, span);
            return;
        }
        if let Some(known) = self.procs.get_mut(proc) {
            known.to_poison.push(span);
            self.poison_now(proc);
        }
    }

    /// Poisons what is still to be poisoned, as far as the kernel lets us now.
    pub(super) fn poison_now(&mut self, proc: ProcId) {
        let page = self.page_bytes;
        let Some(known) = self.procs.get_mut(proc) else { return };
        let mut delayed = false;
        let spans = std::mem::take(&mut known.to_poison);
        for span in spans {
            let mut rest = span;
            while rest.len > 0 {
                let Installed { bytes, outcome } = known.arena.poison(rest.start.0, rest.len);
                let done = match outcome {
                    Outcome::Done => rest.len,
                    // Somebody's page is there: it is not lost.
                    Outcome::Exists => bytes + page,
                    Outcome::EventsPending | Outcome::Busy | Outcome::NoMemory => {
                        rest = Span::new(rest.start.plus(bytes), rest.len - bytes.min(rest.len));
                        known.to_poison.push(rest);
                        delayed = true;
                        break;
                    }
                    Outcome::NoRange | Outcome::NoProcess | Outcome::Other(_) => rest.len,
                };
                let done = done.min(rest.len);
                rest = Span::new(rest.start.plus(done), rest.len - done);
            }
            known.arena.wake(span.start.0, span.len);
        }
        if delayed {
            self.read_if_pending(proc, IoctlOutcome::EventsPending);
        }
        self.poison_delayed |= delayed;
    }

    /// Without POISON a thread that touches lost bytes sleeps on. Ending the program with the signal that
    /// it would have got is the one honest answer left.
    fn end_for_lost_bytes(&mut self, proc: ProcId, span: Span) {
        let now = self.tick();
        let Some(known) = self.procs.get_mut(proc) else { return };
        // Whatever else wakes the sleeper makes it ask again.
        if known.touched_lost.is_some() || known.entry.gone {
            return;
        }
        tracing::error!(
            family = self.config.family,
            pid = known.entry.pid,
            start = format_args!("{:#x}", span.start.0),
            bytes = span.len,
            "a program touched bytes that the store has lost, and this kernel cannot poison pages \
             (Linux 6.6 or later can)"
        );
        known.touched_lost = Some(TouchedLost::Waits);
        self.signal_for_lost_bytes(proc, now);
    }

    /// Signals a program that waits for lost bytes, if it is known which it is.
    pub(super) fn signal_for_lost_bytes(&mut self, proc: ProcId, now: Tick) {
        let family = self.config.family;
        let Some(known) = self.procs.get_mut(proc) else { return };
        if known.touched_lost != Some(TouchedLost::Waits) {
            return;
        }
        let pid = known.entry.pid;
        let attached = known.attached.as_ref().filter(|attached| !attached.exited);
        let Some(process) = attached.and_then(|attached| attached.pidfd.as_ref()) else {
            tracing::error!(
                family,
                "its thread waits: it is a forked process that has not shown itself, so it cannot be \
                 ended from here; end it, or the programs of the family"
            );
            return;
        };
        match pidfd::send_signal(process.as_fd(), libc::SIGBUS) {
            Ok(()) => tracing::error!(family, pid, "the program was sent SIGBUS"),
            Err(error) => tracing::error!(%error, family, pid, "sending SIGBUS to the program"),
        }
        let kill_at = now.after_ns(SIGBUS_GRACE_NS);
        known.touched_lost = Some(TouchedLost::Signalled(kill_at));
        self.next_kill = self.next_kill.min(kill_at);
    }

    /// Kills the programs that outlived their SIGBUS: the thread that touched lost bytes would sleep for
    /// ever.
    pub(super) fn kill_for_lost_bytes(&mut self, now: Tick) {
        self.next_kill = Tick::NEVER;
        for at in 0..self.procs.live().len() {
            let Some(known) = self.procs.live_at(at) else { continue };
            let Some(TouchedLost::Signalled(kill_at)) = known.touched_lost else { continue };
            if kill_at > now {
                self.next_kill = self.next_kill.min(kill_at);
                continue;
            }
            known.touched_lost = Some(TouchedLost::Killed);
            // After an exec the process is another program.
            let (pid, gone) = (known.entry.pid, known.entry.gone);
            let Some(attached) = &known.attached else { continue };
            if !attached.running.is_empty() {
                // The helper may sleep on the lost bytes as well, and would keep their memory for ever.
                attached.kill_helper();
            }
            let Some(process) = attached.pidfd.as_ref().filter(|_| !attached.exited && !gone)
            else {
                continue;
            };
            if matches!(pidfd::wait(process.as_fd(), Duration::ZERO), Ok(true)) {
                continue;
            }
            match pidfd::send_signal(process.as_fd(), libc::SIGKILL) {
                Ok(()) => tracing::error!(pid, "the program lived on after SIGBUS: it was killed"),
                Err(error) => tracing::error!(%error, pid, "killing a program that lives on"),
            }
        }
    }

    pub(super) fn arm(&mut self, op: OpId, proc: ProcId, span: Span, on: bool) {
        let outcome = self.procs.get(proc).map_or(IoctlOutcome::NoProcess, |known| {
            let (start, len) = (span.start.0, span.len);
            let result = if on {
                register(known, span)
            } else {
                let result = known.arena.unregister(start, len);
                // UNREGISTER wakes who waits for a missing page, not who waits to write.
                known.arena.wake(start, len);
                result
            };
            match result {
                Ok(()) => IoctlOutcome::Done,
                Err(error) => match error.raw_os_error() {
                    // REGISTER says ENOMEM also for an address space that is gone.
                    Some(libc::ENOMEM) if self.look(known) == Outcome::NoProcess => {
                        IoctlOutcome::NoProcess
                    }
                    Some(libc::ENOMEM) => IoctlOutcome::NoMemory,
                    Some(libc::ESRCH) => IoctlOutcome::NoProcess,
                    Some(libc::EAGAIN | libc::EINTR) => IoctlOutcome::EventsPending,
                    _ => IoctlOutcome::NoRange,
                },
            }
        });
        self.outcomes.push(Event::Armed { op, outcome });
    }

    pub(super) fn read_map(&mut self, op: OpId, proc: ProcId, at: Addr) {
        let pages = self.extent_pages.min(EXTENT_PAGES_MAX as usize);
        let mut entries = [PageEntry::default(); EXTENT_PAGES_MAX as usize];
        let wanted = entries.get_mut(..pages).unwrap_or_default();
        let attached = self.procs.get(proc).and_then(|known| known.attached.as_ref());
        let known = attached
            .and_then(|attached| attached.pagemap.read(at.0, wanted).ok())
            .is_some_and(|read| read == pages);
        let mut present: PageMask = 0;
        for (page, entry) in entries.iter().take(pages).enumerate() {
            // A swap entry is the page too: it may be on its way between nodes, or in the host's swap.
            // Markers are not met here: anonymous memory gets none without WP_UNPOPULATED.
            present |= PageMask::from(entry.present() || entry.swapped()) << page;
        }
        let present = if known { present } else { 0 };
        self.outcomes.push(Event::Mapped { op, present, known });
    }

    pub(super) fn read_limbo(&mut self, op: OpId, proc: ProcId, from: Addr, to: BufRange) {
        let attached = self.procs.get(proc).and_then(|known| known.attached.as_ref());
        let pid = self.procs.get(proc).map_or(0, |known| known.entry.pid);
        let bytes = match (attached, self.io.staged_mut(to)) {
            // Without a move pages are read where they are.
            (Some(attached), Some(staged)) if !self.config.features.uffd_move => {
                read_through_descriptor(attached, from, staged)
            }
            (Some(attached), Some(staged)) if inside(attached.limbo, from, to.len) => {
                read_limbo(attached, pid, from, staged)
            }
            _ => 0,
        };
        self.outcomes.push(Event::LimboRead { op, bytes });
    }

    /// Whether the process' memory cgroup takes `bytes` more. The kernel would kill it rather than
    /// refuse (cgroup v1).
    fn has_headroom(&mut self, proc: ProcId, bytes: u64) -> bool {
        let now = self.tick();
        // A child that has not shown itself is where its family is, as far as anybody knows.
        let is_attached = self.procs.get(proc).is_some_and(|known| known.attached.is_some());
        let whose = if is_attached { Some(proc) } else { self.procs.first_attached() };
        let attached = whose
            .and_then(|whose| self.procs.get_mut(whose))
            .and_then(|known| known.attached.as_mut());
        let admitted = attached.is_none_or(|attached| attached.headroom.admit(now, bytes));
        if !admitted {
            self.stats.cgroup_refusals += 1;
            if self.cap.refused(now, self.used_bytes) {
                tracing::warn!(
                    family = self.config.family,
                    used_bytes = self.used_bytes,
                    "the memory cgroup of a program is full: its family is held below its share of \
                     DRAM, and parks (raise the limit of the cgroup, or lower the daemon's)"
                );
            }
            self.tell_budget();
        }
        admitted
    }

    /// Looks whether cgroups that were full have room again.
    pub(super) fn look_at_cap(&mut self, now: Tick) {
        let rooms = self.procs.iter().filter_map(|known| known.attached.as_ref());
        let room = rooms.filter_map(|attached| attached.headroom.room()).min();
        self.cap.looked(now, room, self.touched_bytes, self.config.share.budget());
        self.tell_budget();
    }
}

fn inside(limbo: Span, from: Addr, len: u32) -> bool {
    from.0 >= limbo.start.0
        && from.0.checked_add(u64::from(len)).is_some_and(|end| end <= limbo.end().0)
}

/// Reads limbo by the fast way, `process_vm_readv`, if both the program and its helper still are who
/// they were after the read; else through the descriptor of the address space itself, which is slower
/// and cannot be mistaken.
fn read_limbo(attached: &Attached, pid: i32, from: Addr, staged: &mut [u8]) -> u64 {
    if let (Some(process), Some(helper)) = (&attached.pidfd, &attached.helper_pidfd)
        && !attached.exited
        && attached.helper_alive
    {
        let len = u64::try_from(staged.len()).unwrap_or(0);
        let read = read_memory(attached.helper_pid, &[(from.0, len)], staged);
        // The helper last: while it lives, its number is nobody else's.
        let still_there = lives(process)
            && pidfd::threads_share_memory(pid, attached.helper_pid)
            && lives(helper);
        if still_there {
            return read.ok().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
        }
    }
    read_through_descriptor(attached, from, staged)
}

fn lives(process: &OwnedFd) -> bool {
    matches!(pidfd::wait(process.as_fd(), Duration::ZERO), Ok(false))
}

/// Reads through `/proc/PID/mem`, which never waits for a userfaultfd: an absent page ends it. Where the
/// program zaps a page between the look at its page table and this read, `process_vm_readv` would wait for
/// this very thread.
fn read_through_descriptor(attached: &Attached, from: Addr, staged: &mut [u8]) -> u64 {
    let mut done = 0;
    while done < staged.len() {
        let Some(rest) = staged.get_mut(done..) else { break };
        match attached.memory.read_at(rest, from.0 + done as u64) {
            Ok(0) | Err(_) => break,
            Ok(bytes) => done += bytes,
        }
    }
    done as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limbo_reads_stay_inside_limbo() {
        let limbo = Span::new(Addr(0x20_0000), 0x40_0000);
        assert!(inside(limbo, Addr(0x20_0000), 0x40_0000));
        assert!(!inside(limbo, Addr(0x20_0000), 0x40_0001));
        assert!(!inside(limbo, Addr(0x1f_ffff), 1));
        assert!(!inside(limbo, Addr(u64::MAX), 2));
        assert!(!inside(Span::default(), Addr(0), 1));
    }
}
