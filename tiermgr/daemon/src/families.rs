//! The families that the daemon serves: who belongs to which, and what is shared among them.
//!
//! A *family* is a client and its forked descendants; it has one executor. Its *number* is for lists,
//! its *secret* is what a forked child says to be let in (the engine then has it prove by a nonce that
//! it is what it says). Both are kept beside the family's folder in the state directory, so that a
//! daemon that was restarted knows them again.
//!
//! Not here: when the memory of a process is released. The executor finds out by itself that an
//! address space is gone; what happens here follows from that.

mod own;
mod places;
mod recover;

use own::Own;
pub use places::{BeginError, FAMILIES_MAX};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_core::units::ProcId;
use tiermgr_engine::executor::{Executor, ExecutorConfig, ProcessView};
use tiermgr_engine::room::Room;
use tiermgr_engine::staging::Staging;
use tiermgr_engine::state::FamilyState;
use tiermgr_engine::store::Store;
use tiermgr_sys::probe::KernelFeatures;
use tiermgr_sys::{pidfd, process};
use tiermgr_wire::chain;
use tiermgr_wire::control::{ClientRow, FamilyStats, RegionRow};
use tiermgr_wire::hello::Class;

/// How often, and after what pauses, a place is looked for.
const PLACE_TRIES: u32 = 10;
const PLACE_PAUSE: Duration = Duration::from_millis(5);
/// How long those that begin are waited for before everything is brought back.
const BEGIN_PATIENCE: Duration = Duration::from_secs(10);

/// What all executors share.
#[derive(Debug)]
pub struct Shared {
    /// Where parked pages are kept.
    pub store: Arc<Store>,
    /// The DRAM ledger.
    pub room: Arc<Room>,
    /// Staging memory.
    pub staging: Arc<Staging>,
    /// What the kernel can do.
    pub features: KernelFeatures,
    /// Root-only folder on a tmpfs.
    pub state_dir: PathBuf,
    /// Limbo of each process.
    pub limbo_bytes: u64,
    /// The descriptor table ([`ExecutorConfig::table`]).
    pub table: u64,
    /// Families that one user may have.
    pub families_per_uid: u32,
}

/// What is written down of a family beside the engine's files.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FamilyFacts {
    /// What a forked child says.
    secret: Secret,
    /// Given at the hello.
    name: String,
    /// Who gives way.
    class: Class,
    /// Of the process that said hello.
    uid: u32,
}

impl FamilyFacts {
    /// For a family of which nothing is known but that it exists. Its children cannot be let in.
    fn unknown() -> io::Result<Self> {
        let secret = Secret(draw_secret()?);
        Ok(Self { secret, name: "unknown".to_owned(), class: Class::default(), uid: 0 })
    }
}

/// 64 random bits, written as text: TOML has no unsigned numbers of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Secret(u64);

impl serde::Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0))
    }
}

impl<'de> serde::Deserialize<'de> for Secret {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <String as serde::Deserialize>::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(Self).map_err(serde::de::Error::custom)
    }
}

/// One family.
#[derive(Debug)]
pub struct Family {
    number: u64,
    secret: u64,
    name: String,
    class: Class,
    uid: u32,
    executor: Arc<Executor>,
    members: Mutex<BTreeMap<ProcId, Member>>,
}

/// A process that has shown itself.
#[derive(Clone, Debug)]
struct Member {
    uid: u32,
    regions: BTreeMap<u32, String>,
}

/// All families.
#[derive(Debug)]
pub struct Families {
    shared: Shared,
    own: Mutex<Own>,
    /// What it will take with the first program, which is granted all that is free: were that less a moment later,
    /// all of the program's memory would have to be armed.
    own_least: u64,
    attached_total: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    last_number: u64,
    /// Everything is being brought back, or the daemon leaves: nothing begins and nothing is taken up.
    closed: bool,
    families: BTreeMap<u64, Arc<Family>>,
    /// Whose families are being begun, by number: they have their places already.
    beginning: BTreeMap<u64, u32>,
    /// Counters of families that have ended.
    ended: FamilyStats,
    /// Families of an earlier daemon that could not be taken up yet.
    waiting: Vec<recover::Waiting>,
}

impl Families {
    /// No families yet.
    #[must_use]
    pub fn new(shared: Shared) -> Self {
        let own_least = own::least_bytes(&shared);
        let families = Self {
            shared,
            own: Mutex::new(Own::default()),
            own_least,
            attached_total: AtomicU64::new(0),
            inner: Mutex::default(),
        };
        families.keep_own();
        families
    }

    /// What all executors share.
    #[must_use]
    pub const fn shared(&self) -> &Shared {
        &self.shared
    }

    /// What is written down of families, by number. What a death cut short is removed.
    fn find_facts(&self) -> io::Result<BTreeMap<u64, FamilyFacts>> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&self.shared.state_dir)? {
            let name = entry?.file_name();
            let Some(number) = number_of(&name.to_string_lossy()) else { continue };
            let path = self.facts_path(number);
            if !FamilyState::was_begun(&self.state_dir_of(number))? {
                // Nothing was ever kept for it.
                self.forget_files(number);
                continue;
            }
            let facts = fs::read_to_string(&path)
                .and_then(|text| toml::from_str(&text).map_err(io::Error::other))
                .or_else(|error| {
                    tracing::warn!(path = %path.display(), %error, "a family without a name");
                    FamilyFacts::unknown()
                })?;
            found.insert(number, facts);
        }
        Ok(found)
    }

    /// Begins a family. Its place is taken, and the facts are written down, before the executor starts: so
    /// no limit is passed by many at once, and whatever it leaves in the state directory has an owner.
    /// Blocks for the milliseconds that an executor takes to start, and for 50 more before it refuses.
    ///
    /// # Errors
    /// [`BeginError`]; nothing is left behind then.
    pub fn begin(
        &self,
        secret: u64,
        name: &str,
        class: Class,
        uid: u32,
    ) -> Result<Arc<Family>, BeginError> {
        let facts = FamilyFacts { secret: Secret(secret), name: name.to_owned(), class, uid };
        // Who is refused has no other chance. Some may have ended that nobody has looked at since, or be about to end;
        // others begin, and take less than is counted for them until then.
        for _ in 0..PLACE_TRIES {
            let lacks_dram = match self.check_places(&self.lock(), uid) {
                Ok(()) | Err(BeginError::Ending) => break,
                Err(error) => matches!(error, BeginError::TooLittleDram { .. }),
            };
            thread::sleep(PLACE_PAUSE);
            self.end_idle();
            if lacks_dram {
                self.keep_own_again();
            }
        }
        let mut inner = self.lock();
        self.check_places(&inner, uid)?;
        let number = inner.last_number + 1;
        inner.last_number = number;
        let path = self.facts_path(number);
        if let Err(source) = write_facts(&path, &facts) {
            drop(inner);
            self.forget_files(number);
            return Err(BeginError::State { path, source });
        }
        inner.beginning.insert(number, uid);
        drop(inner);
        let spawned = Executor::spawn(self.executor_config(number, class));
        // It counts as one that begins until it is known what it takes.
        self.keep_own();
        let mut inner = self.lock();
        inner.beginning.remove(&number);
        match spawned {
            Ok(executor) => {
                let family = Arc::new(Family::new(number, facts, executor));
                inner.families.insert(number, Arc::clone(&family));
                Ok(family)
            }
            Err(error) => {
                drop(inner);
                self.forget_files(number);
                Err(error.into())
            }
        }
    }

    /// The family with this secret.
    #[must_use]
    pub fn find(&self, secret: u64) -> Option<Arc<Family>> {
        self.lock().families.values().find(|family| family.secret == secret).cloned()
    }

    /// Whether nobody is served, and nobody waits to be. If so, nobody begins from now on: the caller leaves.
    #[must_use]
    pub fn close_if_idle(&self) -> bool {
        let mut inner = self.lock();
        let is_idle = inner.is_idle();
        inner.closed |= is_idle;
        is_idle
    }

    /// Families that are served now.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().families.len()
    }

    /// Notes that so many clients have attached.
    pub fn attached(&self, clients: u64) {
        self.attached_total.fetch_add(clients, Ordering::Relaxed);
    }

    /// Clients that have attached, or were taken up.
    #[must_use]
    pub fn attached_total(&self) -> u64 {
        self.attached_total.load(Ordering::Relaxed)
    }

    /// Counters of all families, those included that have ended.
    #[must_use]
    pub fn totals(&self) -> FamilyStats {
        let (mut totals, families) = {
            let inner = self.lock();
            (inner.ended, inner.families.values().cloned().collect::<Vec<_>>())
        };
        for family in families {
            totals.add(&family.executor.stats());
        }
        totals
    }

    /// DRAM that is lent to families.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        let room = self.shared.room.usage();
        (room.used + room.reserved).saturating_sub(room.kept)
    }

    /// All families, by number.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Family>> {
        self.lock().families.values().cloned().collect()
    }

    /// Takes out the families of which no process is left, and corrects what the daemon itself takes
    /// from the room. To be called about once a second.
    pub fn tidy(&self) {
        self.retry_waiting();
        self.end_idle();
        for family in self.list() {
            family.forget_gone();
        }
        self.keep_own();
    }

    fn check_places(&self, inner: &Inner, uid: u32) -> Result<(), BeginError> {
        if inner.closed {
            return Err(BeginError::Ending);
        }
        inner.check_room(uid, self.shared.families_per_uid)?;
        inner.check_dram(self.shared.room.usage())
    }

    fn end_idle(&self) {
        for family in self.list() {
            if family.executor.is_idle() {
                self.end(&family);
            }
        }
    }

    /// Ends a family of which no process is left.
    pub fn end(&self, family: &Family) {
        let stats = family.executor.stats();
        {
            // In one step: at no moment are its counters nowhere.
            let mut inner = self.lock();
            if inner.families.remove(&family.number).is_none() {
                return;
            }
            inner.ended.add(&history_of(stats));
        }
        if let Err(error) = family.executor.stop(false) {
            tracing::warn!(family = family.number, error = %chain(&error), "ending a family");
        }
        self.forget_files(family.number);
        tracing::info!(family = family.number, name = family.name, "the last process has gone");
    }

    /// Brings everything of all families back and disarms it. From then on none begins.
    ///
    /// # Errors
    /// What stands against it, one line for each family. Those families are still served, and others may
    /// begin.
    pub fn drain(&self) -> Result<(), Vec<String>> {
        self.lock().closed = true;
        // Those that begin, or are about to be taken up, are nowhere else yet. It takes them milliseconds, mostly.
        let patience = Instant::now() + BEGIN_PATIENCE;
        while self.lock().is_under_way() && Instant::now() < patience {
            thread::sleep(PLACE_PAUSE);
        }
        // Why one could not be taken up a minute ago is no reason now.
        self.retry_all_waiting();
        let mut reasons = self.not_taken_up();
        for family in self.list() {
            match family.executor.stop(true) {
                Ok(()) => {
                    let stats = family.executor.stats();
                    let mut inner = self.lock();
                    if inner.families.remove(&family.number).is_some() {
                        inner.ended.add(&history_of(stats));
                        drop(inner);
                        self.forget_files(family.number);
                    }
                }
                Err(error) => reasons.push(format!(
                    "family {} ({}): {}",
                    family.number,
                    family.name,
                    chain(&error)
                )),
            }
        }
        let mut inner = self.lock();
        if reasons.is_empty() && !inner.is_idle() {
            reasons.push("a program has just been taken into service".to_owned());
        }
        inner.closed = reasons.is_empty();
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }

    fn executor_config(&self, number: u64, class: Class) -> ExecutorConfig {
        ExecutorConfig {
            family: number,
            class,
            state_dir: self.state_dir_of(number),
            store: Arc::clone(&self.shared.store),
            room: Arc::clone(&self.shared.room),
            staging: Arc::clone(&self.shared.staging),
            features: self.shared.features.clone(),
            limbo_bytes: self.shared.limbo_bytes,
            table: self.shared.table,
        }
    }

    fn state_dir_of(&self, number: u64) -> PathBuf {
        self.shared.state_dir.join(format!("family-{number}"))
    }

    fn facts_path(&self, number: u64) -> PathBuf {
        self.shared.state_dir.join(format!("family-{number}.toml"))
    }

    fn forget_files(&self, number: u64) {
        for result in [
            fs::remove_dir_all(self.state_dir_of(number)),
            fs::remove_file(self.facts_path(number)),
        ] {
            if let Err(error) = result
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(family = number, %error, "removing the state of a family");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change is one insert or remove: the map is whole even if somebody panicked.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Family {
    fn new(number: u64, facts: FamilyFacts, executor: Arc<Executor>) -> Self {
        let FamilyFacts { secret: Secret(secret), name, class, uid } = facts;
        Self { number, secret, name, class, uid, executor, members: Mutex::default() }
    }

    /// For lists.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Its executor.
    #[must_use]
    pub const fn executor(&self) -> &Arc<Executor> {
        &self.executor
    }

    /// The attached process that has this pid now: one that had it before may be kept for a while.
    #[must_use]
    pub fn find_process(&self, pid: i32) -> Option<ProcId> {
        let start_time = pidfd::start_time(pid).ok()?;
        find_living(&self.executor.processes(), pid, start_time)
    }

    /// Notes a process that has shown itself, perhaps again.
    pub fn joined(&self, proc: ProcId, uid: u32) {
        self.lock().entry(proc).or_insert(Member { uid, regions: BTreeMap::new() });
    }

    /// Forgets processes that are no more. A connection's end alone does not mean that.
    fn forget_gone(&self) {
        // Locked first: whoever attaches after the look is noted after it, too.
        let mut members = self.lock();
        let living: BTreeSet<ProcId> =
            self.executor.processes().iter().map(|process| process.proc).collect();
        members.retain(|proc, _| living.contains(proc));
    }

    /// Notes the name of a region.
    pub fn named(&self, proc: ProcId, region: u32, name: String) {
        if let Some(member) = self.lock().get_mut(&proc)
            && !name.is_empty()
        {
            member.regions.insert(region, name);
        }
    }

    /// Forgets the name of a region.
    pub fn dropped(&self, proc: ProcId, region: u32) {
        if let Some(member) = self.lock().get_mut(&proc) {
            member.regions.remove(&region);
        }
    }

    /// Its processes, those that `uid` may see (`None`: all).
    #[must_use]
    pub fn client_rows(&self, uid: Option<u32>) -> Vec<ClientRow> {
        let stats = self.executor.stats();
        let members = self.lock().clone();
        self.executor
            .processes()
            .into_iter()
            .filter_map(|process| {
                // A child that has not shown itself is its family's.
                let owner = members.get(&process.proc).map_or(self.uid, |member| member.uid);
                uid.is_none_or(|uid| uid == owner).then(|| ClientRow {
                    family: self.number,
                    pid: process.pid,
                    helper_pid: process.helper_pid,
                    name: self.name.clone(),
                    class: class_name(self.class).to_owned(),
                    uid: owner,
                    forked: process.forked,
                    regions: process.regions,
                    stats,
                })
            })
            .collect()
    }

    /// Its regions, those that `uid` may see (`None`: all): addresses are nobody else's business.
    #[must_use]
    pub fn region_rows(&self, uid: Option<u32>) -> Vec<RegionRow> {
        let members = self.lock().clone();
        self.executor
            .regions()
            .into_iter()
            .filter_map(|(proc, mut row)| {
                let member = members.get(&proc);
                let owner = member.map_or(self.uid, |member| member.uid);
                if let Some(name) = member.and_then(|member| member.regions.get(&row.region)) {
                    row.name.clone_from(name);
                }
                uid.is_none_or(|uid| uid == owner).then_some(row)
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ProcId, Member>> {
        // Each change is one insert or remove: the map is whole even if somebody panicked.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find_living(processes: &[ProcessView], pid: i32, start_time: u64) -> Option<ProcId> {
    processes
        .iter()
        .find(|known| !known.gone && (known.pid, known.start_time) == (pid, start_time))
        .map(|found| found.proc)
}

/// Counters without the gauges: what a family held it holds no more.
const fn history_of(stats: FamilyStats) -> FamilyStats {
    FamilyStats {
        dram_now_bytes: 0,
        limbo_now_bytes: 0,
        credit_now_bytes: 0,
        parked_now_bytes: 0,
        slots_now_bytes: 0,
        budget_now_bytes: 0,
        pinned_now_bytes: 0,
        late_faults_now: 0,
        without_helper_now: 0,
        ..stats
    }
}

/// How a class is written.
#[must_use]
pub const fn class_name(class: Class) -> &'static str {
    match class {
        Class::Latency => "latency",
        Class::Standard => "standard",
        Class::Bulk => "bulk",
    }
}

/// A number that nobody can guess.
///
/// # Errors
/// When the kernel's generator cannot be read.
pub fn draw_secret() -> io::Result<u64> {
    Ok(u64::from_ne_bytes(process::random_bytes()?))
}

/// `N` of `family-N` and `family-N.toml`.
fn number_of(name: &str) -> Option<u64> {
    let number = name.strip_prefix("family-")?;
    number.strip_suffix(".toml").unwrap_or(number).parse().ok()
}

fn write_facts(path: &Path, facts: &FamilyFacts) -> io::Result<()> {
    let text = toml::to_string(facts).map_err(io::Error::other)?;
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_read_back() {
        let facts = FamilyFacts {
            secret: Secret(u64::MAX - 1),
            name: "a \"b\"\u{fffd}".to_owned(),
            class: Class::Bulk,
            uid: u32::MAX,
        };
        let text = toml::to_string(&facts).unwrap();
        assert_eq!(toml::from_str::<FamilyFacts>(&text).unwrap(), facts);
        assert!(toml::from_str::<FamilyFacts>(&format!("{text}x = 1\n")).is_err());
    }

    #[test]
    fn only_our_names_are_numbers() {
        assert_eq!(number_of("family-17"), Some(17));
        assert_eq!(number_of("family-17.toml"), Some(17));
        for name in ["family-", "family-x", "family-1.txt", "store", "lock", "xfamily-1"] {
            assert_eq!(number_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_pid_that_another_process_had_before_is_not_taken_for_it() {
        let view = |proc, pid, start_time, gone| ProcessView {
            proc: ProcId(proc),
            pid,
            start_time,
            gone,
            helper_pid: 1,
            forked: true,
            regions: 1,
        };
        let [past, unseen, living] =
            [view(1, 7, 100, true), view(2, 7, 200, false), view(3, 7, 300, false)];
        // One that has ended is kept while its pages are needed, and may be known to live for a moment yet.
        assert_eq!(find_living(&[past, unseen], 7, 300), None);
        assert_eq!(find_living(&[past, unseen, living], 7, 300), Some(ProcId(3)));
        assert_eq!(find_living(&[view(4, 7, 300, true)], 7, 300), None);
        assert_eq!(find_living(&[view(5, 8, 300, false)], 7, 300), None);
    }

    #[test]
    fn gauges_of_an_ended_family_are_not_carried_on() {
        let stats = FamilyStats { faults: 3, dram_now_bytes: 5, ..FamilyStats::default() };
        let history = history_of(stats);
        assert_eq!((history.faults, history.dram_now_bytes), (3, 0));
    }
}
