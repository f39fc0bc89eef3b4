//! One thread for each family: the handle that the daemon's sessions use.
//!
//! Every call of the handle is safe from any thread. Those that need the executor's answer wait for
//! it, never longer than they say; none takes a lock that the fault path takes.

mod drain;

use crate::driver::Driver;
use crate::error::EngineError;
use crate::host::Host;
use crate::linux::{HostConfig, LinuxHost, Prepared};
use crate::mailbox::{Claim, Mail, Mailbox, answer};
use crate::room::{Room, Share};
use crate::staging::Staging;
use crate::state::procs::FamilyInfo;
use crate::state::procs::ProcDirectory;
use crate::state::records::StateRecords;
use crate::state::regions::RegionDirectory;
use crate::state::{self, FamilyState, Recovered};
use crate::stats::family_stats;
use crate::store::Store;
use crate::wake::Wake;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tiermgr_core::effect::{Refusal, Reply};
use tiermgr_core::event::Request;
use tiermgr_core::manager::{Manager, ManagerConfig};
use tiermgr_core::units::{Addr, EXTENT_BYTES, Geometry, ProcId, RequestId, Span};
use tiermgr_sys::memory::read_present;
use tiermgr_sys::nowait;
use tiermgr_sys::probe::KernelFeatures;
use tiermgr_sys::process::{page_size, random_bytes, set_io_flusher, set_name};
use tiermgr_sys::ring::{Command, Completion, RingOwner};
use tiermgr_wire::control::{FamilyStats, RegionRow};
use tiermgr_wire::hello::Class;

/// What is promised to be all that a program and its daemon may take beyond their limit; see `promises.md`.
const BEYOND_BYTES_ALLOWED: u64 = 16 << 20;
/// Least time that pages rest in limbo while room is not short: as long as a program takes to come
/// back to what it has just left, and short against a phase of a program.
const PROBATION_NS: u64 = 200_000_000;
/// The same on a kernel that cannot move pages. There it is the only guard against a device that was
/// writing into a page before the page was write-protected, so nothing shortens it.
const PROBATION_IN_PLACE_NS: u64 = 100_000_000;
/// What a family asks for to begin with where nothing is free.
const FIRST_WISH_BYTES: u64 = 64 << 20;
/// How long an executor may take to answer what it answers at once: an ioctl on a dying address space
/// of many GiB takes hundreds of milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a forked child may take to be known: its FORK message comes before it runs.
const CHILD_TIMEOUT: Duration = Duration::from_secs(2);
/// How old the counters may be that stand in for those of an executor which does not answer.
const NOTE_STATS_EVERY: Duration = Duration::from_secs(1);
/// How long a helper may take for one command on one page.
const HELPER_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_PAUSE: Duration = Duration::from_micros(200);

/// What is left free in the state directory, beside the records of a new region twice.
const FORK_ROOM_BYTES: u64 = 16 << 20;

/// After this the log says what a request waits for.
const LONG_WAIT: Duration = Duration::from_secs(5);

/// What an executor needs to begin.
#[derive(Debug)]
pub struct ExecutorConfig {
    /// Number of the family.
    pub family: u64,
    /// Who gives way when room is short.
    pub class: Class,
    /// Its folder in the state directory; must not exist for a new family.
    pub state_dir: PathBuf,
    /// The store that all families share.
    pub store: Arc<Store>,
    /// The DRAM that all families share.
    pub room: Arc<Room>,
    /// The staging memory that all families share.
    pub staging: Arc<Staging>,
    /// What the kernel can do.
    pub features: KernelFeatures,
    /// Limbo of each process, in bytes; a multiple of a chunk.
    pub limbo_bytes: u64,
    /// Tells the descriptor table from those of earlier daemons: the same as theirs exactly where what
    /// they had open is open here, under the same numbers.
    pub table: u64,
}

/// A process to serve.
#[derive(Debug)]
pub struct NewProcess {
    /// As the daemon's pid namespace numbers it.
    pub pid: i32,
    /// Pollable: readable when the process has exited.
    pub pidfd: OwnedFd,
    /// Its helper, as the daemon's pid namespace numbers it.
    pub helper_pid: i32,
    /// Userfaultfd of the arenas, handshake done. `None` for a forked child: it came with the event.
    pub arena: Option<OwnedFd>,
    /// Userfaultfd of limbo, handshake done, limbo registered.
    pub limbo_fd: OwnedFd,
    /// The limbo range.
    pub limbo: Span,
    /// The nonce page.
    pub nonce_page: Addr,
    /// The ring to its helper.
    pub ring: RingOwner,
}

/// One process, for lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessView {
    /// Its number in the family.
    pub proc: ProcId,
    /// As the daemon's pid namespace numbers it; 0 where a forked child has not shown itself.
    pub pid: i32,
    /// When it started, as [`tiermgr_sys::pidfd::start_time`] tells; 0 as above.
    pub start_time: u64,
    /// Whether it is known to have ended. Its pages may be needed yet.
    pub gone: bool,
    /// Its helper; 0 where there is none.
    pub helper_pid: i32,
    /// Whether it was forked from another process of the family.
    pub forked: bool,
    /// Regions that it has.
    pub regions: u32,
}

/// A family's thread.
#[derive(Debug)]
pub struct Executor {
    family: u64,
    mailbox: Arc<Mailbox>,
    ended: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
    next_request: AtomicU64,
    last_stats: Arc<Mutex<FamilyStats>>,
    regions: Arc<RegionDirectory>,
    procs: Arc<ProcDirectory>,
    state_dir: PathBuf,
    /// DRAM and store together.
    capacity_bytes: u64,
}

impl Executor {
    /// Starts the thread of a new family. Blocks until it is ready.
    ///
    /// # Errors
    /// [`EngineError`]; nothing is left behind then.
    pub fn spawn(config: ExecutorConfig) -> Result<Arc<Self>, EngineError> {
        let geometry = Geometry { page_bytes: page_size() };
        if !geometry.is_supported() {
            return Err(EngineError::PageSize { bytes: geometry.page_bytes });
        }
        let info = FamilyInfo {
            family: config.family,
            limbo_bytes: config.limbo_bytes,
            has_move: config.features.uffd_move,
            class: match config.class {
                Class::Bulk => 0,
                Class::Standard => 1,
                Class::Latency => 2,
            },
        };
        let state = FamilyState::create(&config.state_dir, &info)?;
        let state_dir = config.state_dir.clone();
        // All that is free is of use to begin with: memory that fits is left to the kernel. Others
        // that need it get it back.
        let wish = config.room.usage().free.max(FIRST_WISH_BYTES);
        Self::start(config, geometry, state, None, wish).inspect_err(|_| {
            if let Err(error) = FamilyState::remove(&state_dir) {
                tracing::warn!(%error, "after a family could not be started");
            }
        })
    }

    /// Goes on with a family that an earlier daemon served, from its folder and the descriptors that
    /// the keeper held. To be called for all families before any new one begins: room and slots are
    /// theirs. Blocks until the helpers have acknowledged, and ends by itself where no process of the
    /// family lives any more.
    ///
    /// # Errors
    /// [`EngineError`]; the folder stays as it is, and no userfaultfd is closed.
    pub fn recover(mut config: ExecutorConfig) -> Result<Arc<Self>, EngineError> {
        let geometry = Geometry { page_bytes: page_size() };
        if !geometry.is_supported() {
            return Err(EngineError::PageSize { bytes: geometry.page_bytes });
        }
        let (state, found) = FamilyState::load(&config.state_dir)?;
        if found.family.has_move && !config.features.uffd_move {
            return Err(EngineError::NeedsMove { path: config.state_dir });
        }
        // Records say where pages rest by how they left. A family that began without moves goes on so.
        config.features.uffd_move = found.family.has_move;
        for entry in found.procs.iter().filter(|entry| !entry.born) {
            state.forget_table_of(entry.proc);
        }
        // What is in DRAM already, and a little to work with.
        let held = state.regions.all().into_iter().map(|region| {
            let residency = state.regions.residency(&region, geometry.page_bytes);
            residency.resident_bytes + residency.unarmed_bytes
        });
        let wish = held.sum::<u64>().saturating_add(FIRST_WISH_BYTES);
        Self::start(config, geometry, state, Some(found), wish)
    }

    fn start(
        config: ExecutorConfig,
        geometry: Geometry,
        state: FamilyState,
        found: Option<Recovered>,
        wish: u64,
    ) -> Result<Arc<Self>, EngineError> {
        let wake = Arc::new(Wake::new().map_err(EngineError::kernel("making an eventfd"))?);
        let mailbox = Arc::new(Mailbox::new(Arc::clone(&wake)));
        let seat = config.staging.seat(config.family);
        let seat = Arc::new(seat.map_err(EngineError::kernel("mapping the staging buffers"))?);
        let share = config.room.join(config.family, config.class, wish, wake);
        let manager_config = ManagerConfig {
            geometry,
            budget_bytes: share.budget(),
            demand_buffers: seat.small_count(),
            probation_ns: match config.features.uffd_move {
                true => PROBATION_NS,
                false => PROBATION_IN_PLACE_NS,
            },
            has_move: config.features.uffd_move,
        };
        let executor = Arc::new(Self {
            family: config.family,
            mailbox: Arc::clone(&mailbox),
            ended: Arc::new(AtomicBool::new(false)),
            thread: Mutex::new(None),
            next_request: AtomicU64::new(1),
            last_stats: Arc::default(),
            regions: Arc::clone(&state.regions),
            procs: Arc::clone(&state.procs),
            state_dir: config.state_dir.clone(),
            capacity_bytes: config.room.usage().total + config.store.usage().capacity_bytes,
        });
        let ended = Ended {
            family: config.family,
            room: Arc::clone(&config.room),
            share: Arc::clone(&share),
            store: Arc::clone(&config.store),
            mailbox: Arc::clone(&mailbox),
            flag: Arc::clone(&executor.ended),
            last_stats: Arc::clone(&executor.last_stats),
            state_dir: config.state_dir,
            page_bytes: geometry.page_bytes,
        };
        let host_config = HostConfig {
            family: config.family,
            features: config.features,
            store: config.store,
            room: config.room,
            seat,
            share,
            budget_bytes: manager_config.budget_bytes,
            table: config.table,
            mailbox,
        };
        let (ready, is_ready) = sync_channel(1);
        // Of a family that an earlier daemon served, programs hold what it was granted.
        let unused = found.is_none().then(|| (Arc::clone(&ended.room), Arc::clone(&ended.share)));
        let thread = thread::Builder::new()
            .name("tiermgr-exec".to_owned())
            .spawn(move || {
                let begin = Begin { host_config, manager_config, state, found };
                serve(begin, &ended, &ready);
            })
            .map_err(|error| {
                if let Some((room, share)) = unused {
                    room.leave(&share);
                }
                EngineError::kernel("starting a thread")(error)
            })?;
        let started = is_ready.recv().unwrap_or(Err(EngineError::Ended));
        if let Err(error) = started {
            drop(thread.join());
            return Err(error);
        }
        *executor.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(executor)
    }

    /// Number of the family.
    #[must_use]
    pub const fn family(&self) -> u64 {
        self.family
    }

    /// Takes a process into service: a client with its userfaultfd, or a forked child that is to show
    /// which of the family's children it is. Blocks for milliseconds; for a child up to two seconds.
    ///
    /// A child also gets its userfaultfd, which the kernel gave to us alone: it is to hold a reference
    /// of its own, or it would read zeros where pages are parked once all of ours are closed.
    ///
    /// # Errors
    /// [`EngineError::Attach`] where the process is not what it says, and others.
    pub fn attach(&self, new: NewProcess) -> Result<(ProcId, Option<OwnedFd>), EngineError> {
        let is_child = new.arena.is_none();
        let prepared = Prepared::open(new)?;
        if is_child {
            return self.attach_child(prepared);
        }
        let new = Box::new(prepared);
        let proc = self.call_or_withdraw(|claim, answer| Mail::Attach { new, claim, answer })?;
        Ok((proc, None))
    }

    /// The child empties its nonce page, each child that has not shown itself gets a nonce of its own,
    /// and the one that the candidate holds says which it is.
    fn attach_child(
        &self,
        mut prepared: Prepared,
    ) -> Result<(ProcId, Option<OwnedFd>), EngineError> {
        let pid = prepared.process().pid;
        let nonce_page = prepared.process().nonce_page;
        let begun = Instant::now();
        loop {
            empty_page(&mut prepared, nonce_page)?;
            let seed = random_seed()?;
            let placed = self.call(|answer| Mail::Prove { seed, answer })?;
            let mut held = [0; 16];
            let read = read_present(pid, nonce_page.0, &mut held);
            let held = u128::from_ne_bytes(held);
            let found = placed.iter().find(|&&(_, nonce)| nonce == held).map(|&(child, _)| child);
            if let (Ok(()), Some(child)) = (read, found) {
                empty_page(&mut prepared, nonce_page)?;
                let new = Box::new(prepared);
                let letter = |claim, answer| Mail::Adopt { child, new, claim, answer };
                return Ok((child, Some(self.call_or_withdraw(letter)?)));
            }
            if begun.elapsed() > CHILD_TIMEOUT {
                let reason = "it is no forked child of this family";
                return Err(EngineError::Attach { pid, reason });
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Another descriptor of the userfaultfd of a process, for itself: it is to hold one for as long as it lives.
    ///
    /// # Errors
    /// [`EngineError::NoProcess`], and others.
    pub fn arena_of(&self, proc: ProcId) -> Result<OwnedFd, EngineError> {
        self.call(|answer| Mail::Arena { proc, answer })?
    }

    /// Puts a request of a client to the manager and waits for its reply, at most `timeout`.
    ///
    /// # Errors
    /// [`EngineError::TimedOut`]: it may still be carried out. [`EngineError::NoProcess`]: the process
    /// is not, or no longer, of the family.
    pub fn ask(
        &self,
        proc: ProcId,
        what: Request,
        timeout: Duration,
    ) -> Result<Reply, EngineError> {
        if let Request::AddRegion { span } = what {
            self.check_capacity(proc, span.len)?;
            self.check_state_room(span.len)?;
        }
        let Some((claim, reply)) = self.post_request(proc, what) else {
            return Err(EngineError::Ended);
        };
        let mut received = reply.recv_timeout(timeout.min(LONG_WAIT));
        if timeout > LONG_WAIT && matches!(received, Err(RecvTimeoutError::Timeout)) {
            self.mailbox.post(Mail::Explain);
            received = reply.recv_timeout(timeout.saturating_sub(LONG_WAIT));
        }
        if matches!(received, Err(RecvTimeoutError::Timeout)) && !claim.take() {
            // It is being answered right now.
            received = reply.recv().map_err(Into::into);
        }
        match (received, what) {
            (Ok(Reply::Refused(Refusal::NoStateRoom)), Request::AddRegion { span }) => {
                Err(self.state_full(span.len))
            }
            (Ok(reply), _) => Ok(reply),
            (Err(RecvTimeoutError::Timeout), _) => Err(EngineError::TimedOut),
            (Err(RecvTimeoutError::Disconnected), _) if self.is_idle() => Err(EngineError::Ended),
            (Err(RecvTimeoutError::Disconnected), _) => Err(EngineError::NoProcess(proc)),
        }
    }

    fn state_full(&self, len: u64) -> EngineError {
        let needed_bytes = len / EXTENT_BYTES * state::records::RECORD_BYTES;
        EngineError::StateFull { path: self.state_dir.clone(), needed_bytes }
    }

    /// Puts a request to the manager. `None`: the executor has ended.
    fn post_request(&self, proc: ProcId, what: Request) -> Option<(Claim, Receiver<Reply>)> {
        let (answer, reply) = sync_channel(1);
        let claim = Claim::default();
        let request = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let letter = Mail::Ask { request, proc, what, claim: claim.clone(), answer };
        self.mailbox.post(letter).then_some((claim, reply))
    }

    /// A program that could never fit is told so here, where it can still do something about it.
    /// Several programs may together promise more than there is: not all of them touch all of it.
    fn check_capacity(&self, proc: ProcId, len: u64) -> Result<(), EngineError> {
        let held = self.regions.all().into_iter().filter(|region| region.proc == proc);
        let held: u64 = held.map(|region| u64::from(region.extents) * EXTENT_BYTES).sum();
        let wanted_bytes = held.saturating_add(len);
        if wanted_bytes > self.capacity_bytes {
            let capacity_bytes = self.capacity_bytes;
            return Err(EngineError::BeyondCapacity { wanted_bytes, capacity_bytes });
        }
        Ok(())
    }

    /// A region's own records are taken when it is made. What a child that is forked later needs is only
    /// known then, and nobody can be refused any more: so much is left for it.
    fn check_state_room(&self, len: u64) -> Result<(), EngineError> {
        let needed = 2 * (len / EXTENT_BYTES) * state::records::RECORD_BYTES + FORK_ROOM_BYTES;
        let free = state::space::free_bytes(&self.state_dir)
            .map_err(EngineError::state("looking for room in", &self.state_dir))?;
        if free < needed {
            return Err(self.state_full(len));
        }
        Ok(())
    }

    /// The connection of a process has ended. Whether its address space has, the executor finds out.
    pub fn gone(&self, proc: ProcId) {
        self.mailbox.post(Mail::Gone { proc });
    }

    /// The process has connected again.
    pub fn back(&self, proc: ProcId) {
        self.mailbox.post(Mail::Back { proc });
    }

    /// Counters. The last ones where the family has ended or is slow to answer.
    #[must_use]
    pub fn stats(&self) -> FamilyStats {
        let (answer, reply) = sync_channel(1);
        if self.mailbox.post(Mail::Stats { answer })
            && let Ok(stats) = reply.recv_timeout(Duration::from_millis(500))
        {
            return stats;
        }
        *self.last_stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All regions, without names. Read beside the executor, which is not held up: a page that moves
    /// meanwhile is counted in one of its places.
    #[must_use]
    pub fn regions(&self) -> Vec<(ProcId, RegionRow)> {
        let page_bytes = page_size();
        let rows = self.regions.all().into_iter().map(|region| {
            let residency = self.regions.residency(&region, page_bytes);
            let row = RegionRow {
                family: self.family,
                pid: self.procs.get(region.proc).map_or(0, |entry| entry.pid),
                region: region.region.0,
                name: String::new(),
                start: region.base.0,
                len_bytes: u64::from(region.extents) * EXTENT_BYTES,
                resident_bytes: residency.resident_bytes,
                parked_bytes: residency.parked_bytes,
                unarmed_bytes: residency.unarmed_bytes,
            };
            (region.proc, row)
        });
        rows.collect()
    }

    /// All processes.
    #[must_use]
    pub fn processes(&self) -> Vec<ProcessView> {
        let views = self.procs.all().into_iter().map(|entry| ProcessView {
            proc: entry.proc,
            pid: entry.pid,
            start_time: entry.start_time,
            gone: entry.gone,
            helper_pid: entry.helper_pid,
            forked: entry.parent != ProcId(0),
            regions: u32::try_from(self.regions.count_of(entry.proc)).unwrap_or(u32::MAX),
        });
        views.collect()
    }

    /// Whether the family has ended: the last of its processes is gone and nothing is kept for it.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn call<T>(&self, letter: impl FnOnce(SyncSender<T>) -> Mail) -> Result<T, EngineError> {
        let (answer, reply) = sync_channel(1);
        if !self.mailbox.post(letter(answer)) {
            return Err(EngineError::Ended);
        }
        reply.recv_timeout(ANSWER_TIMEOUT).map_err(|error| match error {
            RecvTimeoutError::Timeout => EngineError::TimedOut,
            RecvTimeoutError::Disconnected => EngineError::Ended,
        })
    }

    /// The same of what is not to be done once nobody waits for it. After an error it was not done, and will
    /// not be.
    fn call_or_withdraw<T>(
        &self,
        letter: impl FnOnce(Claim, SyncSender<Result<T, EngineError>>) -> Mail,
    ) -> Result<T, EngineError> {
        let (answer, reply) = sync_channel(1);
        let claim = Claim::default();
        if !self.mailbox.post(letter(claim.clone(), answer)) {
            return Err(EngineError::Ended);
        }
        match reply.recv_timeout(ANSWER_TIMEOUT) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) if claim.take() => Err(EngineError::TimedOut),
            // It is being done right now.
            Err(RecvTimeoutError::Timeout) => reply.recv().unwrap_or(Err(EngineError::Ended)),
            Err(RecvTimeoutError::Disconnected) => Err(EngineError::Ended),
        }
    }
}

/// Has the helper of a process drop its nonce page.
fn empty_page(prepared: &mut Prepared, page: Addr) -> Result<(), EngineError> {
    let pid = prepared.process().pid;
    let refuse = |reason| EngineError::Attach { pid, reason };
    let ring = &mut prepared.process_mut().ring;
    let ticket = ring
        .push(Command::Drop { start: page.0, len: page_size() })
        .map_err(|_full_or_broken| refuse("the ring of its helper takes no command"))?;
    let begun = Instant::now();
    while begun.elapsed() < HELPER_TIMEOUT {
        match ring.poll() {
            Ok(Some((done, Completion::Done { errno: 0, .. }))) if done == ticket => return Ok(()),
            Ok(Some(_)) => return Err(refuse("its helper cannot drop the nonce page")),
            Ok(None) => thread::sleep(POLL_PAUSE),
            Err(_) => return Err(refuse("the ring of its helper is broken")),
        }
    }
    Err(refuse("its helper does not answer"))
}

fn random_seed() -> Result<u128, EngineError> {
    random_bytes().map(u128::from_ne_bytes).map_err(EngineError::kernel("drawing a nonce"))
}

/// What the thread of a family leaves behind.
struct Ended {
    family: u64,
    room: Arc<Room>,
    share: Arc<Share>,
    store: Arc<Store>,
    mailbox: Arc<Mailbox>,
    flag: Arc<AtomicBool>,
    last_stats: Arc<Mutex<FamilyStats>>,
    state_dir: PathBuf,
    page_bytes: u64,
}

impl Ended {
    /// The family has no process left: gives back what it held.
    fn settle(&self) {
        self.store.give_back_all(self.family);
        self.room.leave(&self.share);
        if let Err(error) = FamilyState::remove(&self.state_dir) {
            tracing::warn!(%error, family = self.family, "after the end of a family");
        }
        self.flag.store(true, Ordering::Release);
        self.mailbox.close();
    }
}

/// A panic must not unwind through the host: that would close userfaultfds, and close the last copy of
/// one turns a program's parked pages into zeros. A daemon that is dead is replaced; its descriptors
/// live on with the keeper.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

/// What the thread begins with.
struct Begin {
    host_config: HostConfig,
    manager_config: ManagerConfig,
    state: FamilyState,
    /// What an earlier daemon left.
    found: Option<Recovered>,
}

impl Begin {
    fn driver(self) -> Result<Driver<LinuxHost, StateRecords>, EngineError> {
        nowait::prepare_thread().map_err(EngineError::kernel("making a timer for reads"))?;
        let records = self.state.records();
        let Some(found) = self.found else {
            let host = LinuxHost::new(self.host_config, self.state)?;
            return Ok(Driver::new(host, Manager::new(self.manager_config, records)));
        };
        let segments = self.host_config.store.held_by(self.host_config.family);
        let host = LinuxHost::recover(self.host_config, self.state, &found)?;
        Ok(Driver::new(host, Manager::recover(self.manager_config, records, &segments)))
    }
}

fn serve(begin: Begin, ended: &Ended, ready: &SyncSender<Result<(), EngineError>>) {
    if let Err(error) = set_name("tiermgr-exec") {
        tracing::debug!(%error, "naming a thread");
    }
    // Keeps the kernel from waiting for our own write-back when it needs memory for us.
    set_io_flusher();
    let recovering = begin.found.is_some();
    let mut driver = match begin.driver() {
        Ok(driver) => driver,
        Err(error) => {
            if recovering {
                ended.mailbox.close();
            } else {
                ended.settle();
            }
            answer(ready, Err(error));
            return;
        }
    };
    let guard = AbortOnUnwind;
    answer(ready, Ok(()));
    let mut noted = Instant::now();
    while !driver.host.is_finished() {
        driver.turn();
        let gauges = driver.manager.gauges();
        let bytes = |pages: u64| pages * ended.page_bytes;
        driver.host.report_use(bytes(gauges.used_pages()), bytes(gauges.credit_pages));
        answer_stats(&mut driver, ended);
        // For whoever asks while a turn takes longer than they wait.
        if noted.elapsed() > NOTE_STATS_EVERY {
            noted = Instant::now();
            let stats = stats_of(&mut driver);
            *ended.last_stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
        }
    }
    let stats = stats_of(&mut driver);
    *ended.last_stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    let beyond = driver.manager.stats().overcommitted_faults;
    // Each brought one extent at most, and gave it up again as soon as something could be parked.
    let most_bytes = beyond.saturating_mul(EXTENT_BYTES);
    if most_bytes > BEYOND_BYTES_ALLOWED {
        tracing::warn!(
            family = ended.family,
            "the program went beyond its limit {beyond} times, by 64 KiB each, since nothing else of it could \
             be parked at that moment; what is parked next makes up for it. A larger limit (--dram), a faster disk, or \
             a larger store where it was full, ends it"
        );
    } else if beyond > 0 {
        tracing::debug!(family = ended.family, faults = beyond, "served beyond the limit");
    }
    if driver.host.is_empty() {
        drop(driver);
        ended.settle();
    } else {
        // Whoever comes next finds the descriptors under the numbers in the state files: nothing may
        // be closed here.
        ended.mailbox.close();
        Box::leak(Box::new(driver));
    }
    drop(guard);
}

fn stats_of(driver: &mut Driver<LinuxHost, StateRecords>) -> FamilyStats {
    let now = driver.host.now();
    let without_helper_now = driver.host.without_helper();
    FamilyStats { without_helper_now, ..family_stats(&driver.manager, &driver.watch, now) }
}

fn answer_stats(driver: &mut Driver<LinuxHost, StateRecords>, ended: &Ended) {
    if driver.host.take_explanation_wanted() {
        tracing::warn!(waiting = driver.manager.describe(), "a request takes too long");
    }
    let wanted = driver.host.take_stats_wanted();
    if wanted.is_empty() {
        return;
    }
    let stats = stats_of(driver);
    for to in &wanted {
        answer(to, stats);
    }
    *ended.last_stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
}
