//! Takes up what an earlier daemon left.
//!
//! Userfaultfds lie open under the numbers that the state files name; processes and helpers are known
//! by number and start time; rings are fetched from the helpers. No command of the earlier daemon may
//! run once the records are compared with the kernel. So each helper acknowledges a new epoch first. One that
//! is stopped cannot: what it has not taken is taken back, and it acknowledges when it goes on. Where it was
//! stopped in the middle of a command and its program is stopped too, the family is taken up later; a helper
//! that keeps programs waiting which run is ended.

use super::headroom::Headroom;
use super::proc::{Attached, Proc};
use super::{HostConfig, LinuxHost};
use crate::error::EngineError;
use crate::state::procs::{NO_FD, ProcEntry};
use crate::state::{FamilyState, Recovered};
use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_core::event::Event;
use tiermgr_core::units::ProcId;
use tiermgr_sys::cgroup::MemoryGauge;
use tiermgr_sys::helper::{FD_ARENA, FD_EVENT, FD_LIMBO, FD_RING};
use tiermgr_sys::keeper::{list_uffds, uffds_of};
use tiermgr_sys::memory::{Pagemap, is_registered};
use tiermgr_sys::pidfd;
use tiermgr_sys::process::{self, page_size};
use tiermgr_sys::ring::RingOwner;
use tiermgr_sys::shm::FileId;
use tiermgr_sys::task::with_memory;
use tiermgr_sys::uffd::{Mode, Uffd};

/// A helper answers within a timer tick of its own, unless somebody has stopped it.
const EPOCH_TIMEOUT: Duration = Duration::from_secs(1);
/// Before what it was told is taken back from it.
const EPOCH_PATIENCE: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(200);

impl LinuxHost {
    /// A host that goes on where an earlier one was killed. Blocks until no command of the earlier
    /// one can run any more, up to a second or two where a helper does not answer.
    ///
    /// # Errors
    /// [`EngineError::Kernel`] where io_uring or memory cannot be had, [`EngineError::Stopped`]. No userfaultfd is
    /// closed then.
    pub fn recover(
        config: HostConfig,
        state: FamilyState,
        found: &Recovered,
    ) -> Result<Self, EngineError> {
        let open: BTreeSet<RawFd> = list_uffds()
            .map_err(EngineError::kernel("looking for userfaultfds"))?
            .into_iter()
            .collect();
        let nothing = BTreeSet::new();
        let mut host = Self::new(config, state)?;
        host.served = true;
        let mut lost = Vec::new();
        for entry in &found.procs {
            let mut entry = *entry;
            // Numbers of another table are those of anything by now.
            let ours = entry.table == host.config.table;
            let open = if ours { &open } else { &nothing };
            if !ours {
                host.forget_forks(&entry, &found.procs);
            }
            let attached = reattach(&entry, open)?;
            let arena = match (take_fd(entry.arena_fd, open), &attached) {
                (None, Some(attached)) => fetch_arena(&entry, attached)?,
                (arena, _) => arena,
            };
            let Some(arena) = arena else {
                tracing::error!(
                    process = who(&entry, &found.procs),
                    "the userfaultfd of a process is gone: it waits until it is ended where it touches what \
                     was parked, or reads zeros where nobody else holds that userfaultfd; end it"
                );
                lost.push(entry.proc);
                continue;
            };
            entry.arena_fd = arena.as_fd().as_raw_fd();
            entry.limbo_fd =
                attached.as_ref().map_or(NO_FD, |known| known.limbo_fd.as_fd().as_raw_fd());
            entry.table = host.config.table;
            // Before anything is served, and before anything can fail: what was fetched is found again.
            host.state.procs.put(&entry);
            let mut proc = Proc::bare(entry, host.procs.generation(entry.proc), arena);
            proc.attached = attached;
            // The connection has ended with the earlier daemon: an exec since then shows to a look alone.
            proc.disconnected = true;
            host.procs.insert(proc);
            host.state.messages.lock(entry.proc)?;
        }
        host.settle_epochs()?;
        host.announce(found, &lost);
        Ok(host)
    }

    fn forget_forks(&self, entry: &ProcEntry, all: &[ProcEntry]) {
        let forks = self.state.messages.forget_forks(entry.proc);
        if forks > 0 {
            tracing::error!(
                process = child_of(entry, all),
                forks,
                "processes were being forked when keeper and daemon ended together: what they touch of \
                 memory that was parked reads as zeros, or they wait there until they are ended; end them"
            );
        }
    }

    /// Waits until no helper runs a command of an earlier daemon.
    fn settle_epochs(&mut self) -> Result<(), EngineError> {
        let begun = Instant::now();
        for at in 0..self.procs.live().len() {
            while let Some(known) = self.procs.live_at(at)
                && let Some(attached) = known.attached.as_mut().filter(|known| known.helper_alive)
                && !attached.ring.epoch_acknowledged()
            {
                let waited = begun.elapsed();
                if waited < EPOCH_PATIENCE {
                    thread::sleep(PAUSE);
                    continue;
                }
                if attached.ring.revoke_former() {
                    self.epochs_pending = true;
                    break;
                }
                if waited >= EPOCH_TIMEOUT {
                    let helper = attached.helper_pid;
                    tracing::error!(helper, "a helper does not answer; ending it");
                    let process = attached.helper_pidfd.as_ref();
                    if process.is_some_and(|process| !end_helper(process, helper)) {
                        // A kill does not reach who is frozen, and who is killed may end with what it has begun.
                        return Err(EngineError::Stopped { pid: known.entry.pid });
                    }
                    attached.helper_alive = false;
                    break;
                }
                let (pid, helper, exited) = (known.entry.pid, attached.helper_pid, attached.exited);
                if !exited && process::is_stopped(helper) && self.procs.iter().all(is_still) {
                    return Err(EngineError::Stopped { pid });
                }
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Whether a helper has work that it cannot be told of yet. It wakes nobody when it can.
    pub(super) fn awaits_epoch(&mut self) -> bool {
        if self.epochs_pending {
            self.epochs_pending = self.procs.iter().any(|known| {
                known.attached.as_ref().is_some_and(|attached| {
                    attached.helper_alive && !attached.ring.epoch_acknowledged()
                })
            });
        }
        self.epochs_pending
    }

    /// Prepares what the manager is told first.
    fn announce(&mut self, found: &Recovered, lost: &[ProcId]) {
        let mut events = Vec::new();
        let mut unborn: Vec<&ProcEntry> = found.procs.iter().filter(|entry| !entry.born).collect();
        // A child of an unborn child comes after it.
        while let Some(at) =
            unborn.iter().position(|entry| !unborn.iter().any(|other| other.proc == entry.parent))
        {
            let entry = unborn.remove(at);
            events.push(Event::Forked { parent: entry.parent, child: entry.proc });
        }
        for entry in &found.procs {
            let proc = entry.proc;
            let is_attached = self.procs.get(proc).is_some_and(|known| known.attached.is_some());
            if is_attached {
                self.tell_ready(proc, &mut events);
            } else if entry.born {
                // One that has vanished had a limbo, of which its records speak; another has none yet.
                events.push(Event::ProcReady { proc, limbo: entry.limbo });
            }
            let exited = self.procs.get(proc).is_some_and(|known| {
                known.attached.as_ref().is_some_and(|attached| attached.exited)
            });
            // A process that showed itself and is nowhere now has ended.
            let vanished = entry.pid > 0 && !is_attached;
            if entry.gone || exited || vanished || lost.contains(&proc) {
                if let Some(known) = self.procs.get_mut(proc) {
                    known.entry.gone = true;
                    self.state.procs.put(&known.entry);
                }
                events.push(Event::ProcGone { proc });
            }
        }
        self.to_replay = self.procs.live().to_vec();
        self.caps_due = true;
        self.outcomes = events;
    }
}

/// Whether nothing of a process can wait for us: it has ended, or somebody has stopped it. Of one that has not
/// shown itself nobody knows.
fn is_still(known: &Proc) -> bool {
    match &known.attached {
        Some(attached) => attached.exited || process::is_stopped(known.entry.pid),
        None => known.entry.gone || known.entry.pid > 0,
    }
}

/// A process in words.
fn who(entry: &ProcEntry, all: &[ProcEntry]) -> String {
    match all.iter().find(|other| other.proc == entry.parent) {
        _ if entry.pid > 0 => entry.pid.to_string(),
        Some(parent) => child_of(parent, all),
        None => "a forked one".to_owned(),
    }
}

/// A child that had not shown its number, in words: it is among those that nobody knows.
fn child_of(parent: &ProcEntry, all: &[ProcEntry]) -> String {
    let is_known = |pid: &i32| all.iter().any(|other| [other.pid, other.helper_pid].contains(pid));
    let lives = matches!(alive(parent.pid, parent.start_time), Ok(Some(_)));
    let children = pidfd::children_of(parent.pid).ok().filter(|_| lives).unwrap_or_default();
    let unknown: Vec<String> =
        children.iter().filter(|pid| !is_known(pid)).map(i32::to_string).collect();
    match unknown.is_empty() {
        true => format!("a child of {}", parent.pid),
        false => format!("a child of {}: {}", parent.pid, unknown.join(" or ")),
    }
}

/// What is left of a process that had shown itself; `None` where neither it nor its helper lives.
///
/// # Errors
/// [`EngineError::Kernel`] where that cannot be found out. Only evidence ends a process: whoever counts
/// as ended has its userfaultfd closed.
fn reattach(entry: &ProcEntry, open: &BTreeSet<RawFd>) -> Result<Option<Attached>, EngineError> {
    if entry.pid <= 0 {
        return Ok(None);
    }
    let looking = EngineError::kernel("looking at a process of an earlier daemon");
    match look_at(entry, open) {
        Ok(attached) => Ok(attached),
        // It may have ended between two looks; the second one shows.
        Err(_) => look_at(entry, open).map_err(looking),
    }
}

fn look_at(entry: &ProcEntry, open: &BTreeSet<RawFd>) -> io::Result<Option<Attached>> {
    let process = alive(entry.pid, entry.start_time)?;
    let helper = alive(entry.helper_pid, entry.helper_start_time)?;
    if process.is_none() && helper.is_none() {
        return Ok(None);
    }
    let is_program =
        process.is_some() && (helper.is_none() || may_share_memory(entry.pid, entry.helper_pid)?);
    // Fetched before a helper may be ended. Of those that are ours already none is taken up before all else has
    // succeeded: an error would close it, here and in the keeper.
    let fetched = match &helper {
        _ if open.contains(&entry.limbo_fd) => None,
        Some(helper) => Some(Uffd::from_fd(pidfd::getfd(helper.as_fd(), FD_LIMBO)?)),
        // Nobody is left who could move anything, but what lies in limbo can be brought back.
        None => {
            let Some(process) = &process else { return Ok(None) };
            match fetch_from_program(entry.pid, process, entry.limbo.start.0)? {
                Some(limbo_fd) => Some(limbo_fd),
                None => return Ok(None),
            }
        }
    };
    let ring = match &helper {
        Some(helper) => fetch_ring(helper, entry.ring_id)?,
        None => None,
    };
    if let (Some(helper), None) = (&helper, &ring) {
        // It would go on with what it was told by an earlier daemon, and nobody could tell.
        tracing::error!(helper = entry.helper_pid, "a helper has given its ring away; ending it");
        end_helper(helper, entry.helper_pid);
    }
    let helper_alive = ring.is_some();
    if !helper_alive && !is_program {
        // The memory goes with the helper that has just been ended.
        return Ok(None);
    }
    let living = if helper_alive { entry.helper_pid } else { entry.pid };
    let (pagemap, memory) = with_memory(living, |task| {
        Ok((Pagemap::open(task)?, File::open(format!("/proc/{task}/mem"))?))
    })?;
    // Without a helper nobody listens at the other end.
    let ring = match ring {
        Some(ring) => ring,
        None => RingOwner::create()?,
    };
    let Some(limbo_fd) = fetched.or_else(|| take_fd(entry.limbo_fd, open)) else { return Ok(None) };
    Ok(Some(Attached {
        pidfd: process.filter(|_| is_program),
        exited: !is_program,
        helper_pid: entry.helper_pid,
        helper_pidfd: helper,
        helper_alive,
        ring_broken: false,
        limbo_fd: ManuallyDrop::new(limbo_fd),
        limbo: entry.limbo,
        ring,
        ring_polled: false,
        exit_polled: false,
        helper_exit_polled: false,
        queue: VecDeque::new(),
        running: VecDeque::new(),
        pagemap,
        memory,
        headroom: Headroom::new(MemoryGauge::open(living).ok()),
    }))
}

/// False only where the process has become another program. Where one of the two has no memory any more, it
/// is ending, and that is heard of soon enough.
fn may_share_memory(pid: i32, helper: i32) -> io::Result<bool> {
    match pidfd::same_memory(pid, helper) {
        Err(error) if is_no_process(&error) => Ok(true),
        known => known,
    }
}

/// The process of that number, if it is still the one that started then.
fn alive(pid: i32, start_time: u64) -> io::Result<Option<OwnedFd>> {
    if pid <= 0 {
        return Ok(None);
    }
    let found = pidfd::open(pid).and_then(|process| {
        let ended = pidfd::wait(process.as_fd(), Duration::ZERO)?;
        Ok((!ended && pidfd::start_time(pid)? == start_time).then_some(process))
    });
    match found {
        Err(error) if is_no_process(&error) => Ok(None),
        other => other,
    }
}

fn is_no_process(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH) || error.kind() == io::ErrorKind::NotFound
}

/// The userfaultfd of the arenas, from whoever holds a duplicate that no accident of ours can close.
fn fetch_arena(entry: &ProcEntry, attached: &Attached) -> Result<Option<Uffd>, EngineError> {
    if let Some(helper) = &attached.helper_pidfd
        && let Some(arena) = fetch_uffd(helper, FD_ARENA)?
    {
        return Ok(Some(arena));
    }
    // The helper is dead, or that of a forked child, which was made before the child had one.
    let Some(process) = &attached.pidfd else { return Ok(None) };
    fetch_from_program(entry.pid, process, entry.nonce_page)
        .map_err(EngineError::kernel("fetching a userfaultfd of a program"))
}

/// The helper's duplicate of a userfaultfd; `None` where it has none, or has ended.
fn fetch_uffd(helper: &OwnedFd, number: RawFd) -> Result<Option<Uffd>, EngineError> {
    match pidfd::getfd(helper.as_fd(), number) {
        Ok(fd) => Ok(Some(Uffd::from_fd(fd))),
        Err(error) if is_no_process(&error) || error.raw_os_error() == Some(libc::EBADF) => {
            Ok(None)
        }
        Err(error) => Err(EngineError::kernel("fetching a userfaultfd of a helper")(error)),
    }
}

/// The program's own copy of the userfaultfd with which the page at `address` is registered.
fn fetch_from_program(pid: i32, process: &OwnedFd, address: u64) -> io::Result<Option<Uffd>> {
    if !is_registered(pid, address)? {
        return Ok(None);
    }
    let fetched = with_memory(pid, |task| {
        let first = (task == pid).then(|| process.try_clone());
        // A first thread that has ended has no descriptors either.
        let thread = first.unwrap_or_else(|| pidfd::open_thread(task))?;
        fetch_from_thread(task, &thread, address)
    });
    // Of this process, if it has kept its number until now.
    if pidfd::wait(process.as_fd(), Duration::ZERO)? {
        return Ok(None);
    }
    match fetched {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            tracing::error!(
                pid,
                "before Linux 6.9 nothing can be fetched from a program whose first thread has ended"
            );
            Ok(None)
        }
        fetched => fetched,
    }
}

fn fetch_from_thread(tid: i32, thread: &OwnedFd, address: u64) -> io::Result<Option<Uffd>> {
    for number in uffds_of(tid)? {
        let uffd = match pidfd::getfd(thread.as_fd(), number) {
            Ok(fd) => Uffd::from_fd(fd),
            // Closed meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => continue,
            Err(error) => return Err(error),
        };
        // What is registered with one descriptor cannot be registered with another.
        if uffd.register(address, page_size(), Mode::MISSING).is_ok() {
            return Ok(Some(uffd));
        }
    }
    Ok(None)
}

/// Kills a helper and waits until nothing of it runs; `false` where that takes too long.
fn end_helper(helper: &OwnedFd, pid: i32) -> bool {
    if let Err(error) = pidfd::send_signal(helper.as_fd(), libc::SIGKILL) {
        tracing::error!(%error, helper = pid, "ending a helper");
    }
    let ended = matches!(pidfd::wait(helper.as_fd(), EPOCH_TIMEOUT), Ok(true));
    if !ended {
        tracing::error!(helper = pid, "a helper does not end");
    }
    ended
}

/// The ring of a helper, in a new epoch; `None` where it is not the one that the helper was attached with.
fn fetch_ring(helper: &OwnedFd, id: FileId) -> io::Result<Option<RingOwner>> {
    let fetch = |number| match pidfd::getfd(helper.as_fd(), number) {
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(None),
        found => found.map(Some),
    };
    let (Some(memfd), Some(event)) = (fetch(FD_RING)?, fetch(FD_EVENT)?) else { return Ok(None) };
    if FileId::of(memfd.as_fd())? != id {
        return Ok(None);
    }
    RingOwner::open(memfd, event).map(Some)
}

/// Takes up a userfaultfd that an earlier daemon left open.
#[expect(unsafe_code, reason = "the descriptor is known by the number in a state file")]
fn take_fd(fd: RawFd, open: &BTreeSet<RawFd>) -> Option<Uffd> {
    if !open.contains(&fd) {
        return None;
    }
    // SAFETY: the number is in a state file that only we write, it stands in the table that we share
    // (or `open` would be empty), and it is open as a userfaultfd. The daemon that owned it is dead,
    // each number is in one entry only, and an entry is removed before its descriptor is closed: nobody
    // else in this table owns it.
    unsafe { Uffd::adopt(fd) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;
    use tiermgr_sys::keeper::list_uffds;
    use tiermgr_sys::uffd::{DeviceFd, new_from_device};

    /// What is closed in the table that is shared with the keeper is lost for the second look, too.
    #[test]
    fn a_look_that_fails_closes_no_userfaultfd() {
        let Ok(device) = DeviceFd::open() else {
            eprintln!("skipped: no /dev/userfaultfd");
            assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "skipped");
            return;
        };
        let uffd = new_from_device(device.as_fd()).expect("a userfaultfd");
        // Looks like a helper that has given its ring away.
        let mut helper = std::process::Command::new("sleep").arg("20").spawn().expect("sleep");
        let number = |child: &std::process::Child| child.id().cast_signed();
        let started = |pid| pidfd::start_time(pid).expect("alive");
        let (pid, helper_pid) = (std::process::id().cast_signed(), number(&helper));
        let entry = ProcEntry {
            pid,
            start_time: started(pid),
            helper_pid,
            helper_start_time: started(helper_pid),
            limbo_fd: uffd.into_raw_fd(),
            ..ProcEntry::default()
        };
        let is_open = || list_uffds().expect("/proc").contains(&entry.limbo_fd);
        let found = look_at(&entry, &BTreeSet::from([entry.limbo_fd]));
        helper.kill().expect("a child of ours");
        helper.wait().expect("ended");
        assert!(is_open(), "{found:?}");
    }

    /// A number of nobody helps nobody.
    #[test]
    fn a_child_without_a_number_is_named_by_its_parent() {
        let mut child = std::process::Command::new("sleep").arg("20").spawn().expect("sleep");
        let me = std::process::id().cast_signed();
        let parent = ProcEntry {
            proc: ProcId(1),
            pid: me,
            start_time: pidfd::start_time(me).expect("alive"),
            ..ProcEntry::default()
        };
        let unborn = ProcEntry { proc: ProcId(2), parent: ProcId(1), ..ProcEntry::default() };
        let known = ProcEntry { proc: ProcId(3), pid: child.id().cast_signed(), ..unborn };
        let named = who(&unborn, &[parent, unborn]);
        let not_named = who(&unborn, &[parent, unborn, known]);
        child.kill().expect("a child of ours");
        child.wait().expect("ended");
        assert!(named.starts_with(&format!("a child of {me}: ")), "{named}");
        let is_named =
            |text: &str| text.split([' ', ':']).any(|word| word == known.pid.to_string());
        assert!(is_named(&named) && !is_named(&not_named), "{named}, {not_named}");
        assert_eq!(who(&known, &[parent, known]), known.pid.to_string());
    }
}
