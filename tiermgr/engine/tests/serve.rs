//! An executor and a real client: another process, its helper, its forked children.
//!
//! The client is this test binary again, started with the name of a scenario in the environment. It
//! speaks a few words of text with the test over a socket, which stands in for the daemon's protocol.

#![expect(clippy::unwrap_used, reason = "a step of a test that fails is a test that fails")]

mod client;

use std::fs;
use std::io::{self, BufRead};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_core::effect::{Refusal, Reply};
use tiermgr_core::event::Request;
use tiermgr_core::units::{Addr, ProcId, RegionId, Span};
use tiermgr_engine::error::EngineError;
use tiermgr_engine::executor::{Executor, ExecutorConfig, NewProcess};
use tiermgr_engine::room::Room;
use tiermgr_engine::staging::Staging;
use tiermgr_engine::state::FamilyState;
use tiermgr_engine::store::{Store, StoreConfig};
use tiermgr_sys::probe::KernelFeatures;
use tiermgr_sys::process::page_size;
use tiermgr_sys::ring::RingOwner;
use tiermgr_sys::sock::{Listener, Stream};
use tiermgr_sys::uffd::{DeviceFd, Mode, Uffd, handshake};
use tiermgr_sys::{abi, pidfd};
use tiermgr_wire::hello::Class;

const MIB: u64 = 1 << 20;
const LIMBO_BYTES: u64 = 16 * MIB;
/// A whole scenario.
const PATIENCE: Duration = Duration::from_secs(60);

/// Folders of one test.
struct Folders {
    state: PathBuf,
    disk: PathBuf,
}

impl Folders {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("tiermgr-serve-{}-{number}", std::process::id());
        let exe = std::env::current_exe().unwrap();
        let folders =
            Self { state: Path::new("/dev/shm").join(&name), disk: exe.with_file_name(&name) };
        fs::create_dir(&folders.state).unwrap();
        fs::create_dir(&folders.disk).unwrap();
        folders
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.state));
        drop(fs::remove_dir_all(&self.disk));
    }
}

/// What a daemon would be.
struct World {
    executor: Arc<Executor>,
    room: Arc<Room>,
    store: Arc<Store>,
    features: KernelFeatures,
    folders: Folders,
    table: u64,
}

impl World {
    fn new(dram: u64) -> Option<Self> {
        let features = match KernelFeatures::probe(&[]) {
            Ok(features) if features.uffd_move && features.uffd_event_fork && features.io_uring => {
                features
            }
            other => {
                let strict = std::env::var_os("TIERMGR_CI_STRICT").is_some();
                assert!(!strict, "skipped: this kernel or user cannot: {other:?}");
                eprintln!("skipped: this kernel or user cannot: {other:?}");
                return None;
            }
        };
        let folders = Folders::new();
        let room = Arc::new(Room::new(dram));
        let store = Store::open(&StoreConfig {
            path: folders.disk.join("store"),
            size_bytes: Some(512 * MIB),
            create: true,
            state_dir: folders.state.clone(),
        })
        .unwrap();
        let executor = Executor::spawn(config(&folders, &store, &room, &features, 1)).unwrap();
        Some(Self { executor, room, store, features, folders, table: 1 })
    }

    /// Ends the executor as it is and begins another from its state files. Descriptors stay open, as a
    /// keeper would keep them.
    fn restart(&mut self) {
        self.executor.stop(false).unwrap();
        self.room = Arc::new(Room::new(self.room.usage().total));
        let config = config(&self.folders, &self.store, &self.room, &self.features, self.table);
        self.executor = Executor::recover(config).unwrap();
    }

    /// Waits until the client has got that far.
    fn wait_for_file(&self, name: &str) {
        let begun = Instant::now();
        while !self.folders.state.join(name).exists() {
            assert!(begun.elapsed() < PATIENCE, "{:#?}", self.executor.stats());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts the client on `scenario` and serves it.
    fn start(&self, scenario: &str) -> Child {
        let path = self.folders.state.join("socket");
        let listener = Listener::bind(&path, 0o600, None).unwrap();
        let executor = Arc::clone(&self.executor);
        thread::spawn(move || {
            while let Ok(stream) = listener.accept() {
                let executor = Arc::clone(&executor);
                thread::spawn(move || {
                    if let Err(error) = serve(&executor, &stream) {
                        eprintln!("a session ended: {error}");
                    }
                });
            }
        });
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "client_process", "--nocapture"])
            .env("TIERMGR_ENGINE_SCENARIO", scenario)
            .env("TIERMGR_ENGINE_SOCKET", &path)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Waits for the client, which must end well, and for the family to have left nothing behind.
    fn finish(&self, client: Child) {
        self.wait_for(client);
        let begun = Instant::now();
        while !self.executor.is_idle() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", self.executor.processes());
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(self.room.usage().free, self.room.usage().total);
        assert_eq!(self.store.usage().used_bytes, 0);
        assert!(!self.folders.state.join("family-7").exists());
        self.executor.stop(false).unwrap();
    }

    fn wait_for(&self, mut client: Child) {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = client.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > PATIENCE {
                let pid = client.id();
                let wchan = fs::read_to_string(format!("/proc/{pid}/wchan"));
                client.kill().unwrap();
                panic!("the client hangs: {wchan:?} {:#?}", self.executor.stats());
            }
            thread::sleep(Duration::from_millis(5));
        };
        let said: Vec<String> = io::BufReader::new(client.stderr.take().unwrap())
            .lines()
            .map_while(Result::ok)
            .collect();
        assert!(status.success(), "{status}: {said:#?} {:#?}", self.executor.stats());
    }
}

fn config(
    folders: &Folders,
    store: &Arc<Store>,
    room: &Arc<Room>,
    features: &KernelFeatures,
    table: u64,
) -> ExecutorConfig {
    ExecutorConfig {
        family: 7,
        class: Class::Standard,
        state_dir: folders.state.join("family-7"),
        store: Arc::clone(store),
        room: Arc::clone(room),
        staging: Staging::new(64 << 20).unwrap(),
        features: features.clone(),
        limbo_bytes: LIMBO_BYTES,
        table,
    }
}

/// One connection.
fn serve(executor: &Executor, stream: &Stream) -> io::Result<()> {
    let mut buffer = [0; 256];
    let mut next = |stream: &Stream| -> io::Result<_> {
        let (len, fds) = stream.recv_with_fds(&mut buffer)?;
        let text = String::from_utf8_lossy(&buffer[..len]).into_owned();
        Ok((text.split(' ').map(str::to_owned).collect::<Vec<_>>(), fds))
    };
    let (hello, _) = next(stream)?;
    let is_child = hello[0] == "child";
    let device = DeviceFd::open().map_err(io::Error::other)?;
    let ring = RingOwner::create()?;
    let fds: [BorrowedFd<'_>; 3] = [device.as_fd(), ring.memfd(), ring.eventfd()];
    stream.send_with_fds(b"welcome", &fds)?;

    let (attach, fds) = next(stream)?;
    let number = |at: usize| attach[at].parse::<u64>().map_err(io::Error::other);
    let mut fds = fds.into_iter();
    let mut take = || fds.next().ok_or(io::ErrorKind::InvalidData);
    let arena = if is_child { None } else { Some(take()?) };
    let limbo_fd = take()?;
    if let Some(arena) = &arena {
        let features = abi::FEATURE_EVENT_FORK
            | abi::FEATURE_EVENT_REMAP
            | abi::FEATURE_EVENT_UNMAP
            | abi::FEATURE_PAGEFAULT_FLAG_WP;
        handshake(arena.as_fd(), features)?;
    }
    handshake(limbo_fd.as_fd(), abi::FEATURE_SIGBUS)?;
    let limbo = Span::new(Addr(number(1)?), LIMBO_BYTES);
    let limbo_fd = Uffd::from_fd(limbo_fd);
    limbo_fd.register(limbo.start.0, limbo.len, Mode::MISSING)?;
    let pid = stream.peer_cred()?.pid;
    let (proc, _) = executor
        .attach(NewProcess {
            pid,
            pidfd: pidfd::open(pid)?,
            helper_pid: number(3)?.try_into().map_err(io::Error::other)?,
            arena,
            limbo_fd: limbo_fd.into_fd(),
            limbo,
            nonce_page: Addr(number(2)?),
            ring,
        })
        .map_err(io::Error::other)?;
    // What it would be given another time is its own: with any other the page could not be armed.
    let arena = executor.arena_of(proc).map_err(io::Error::other)?;
    Uffd::from_fd(arena).register(number(2)?, page_size(), Mode::MISSING)?;
    stream.send_with_fds(b"attached", &[])?;
    loop {
        let (words, _) = next(stream)?;
        if words[0].is_empty() {
            executor.gone(proc);
            return Ok(());
        }
        let answer = answer(executor, proc, &words);
        stream.send_with_fds(answer.as_bytes(), &[])?;
    }
}

fn answer(executor: &Executor, proc: ProcId, words: &[String]) -> String {
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let span = || Span::new(Addr(number(1)), number(2));
    let request = match words[0].as_str() {
        "add" => Request::AddRegion { span: span() },
        "drop" => Request::DropRegion { region: RegionId(u32::try_from(number(1)).unwrap()) },
        "discard" => Request::Discard { span: span() },
        "residency" => Request::Residency { span: span() },
        "prefetch" => Request::Prefetch { span: span() },
        "stats" => return format!("{:?}", executor.stats()),
        other => return format!("what is {other}?"),
    };
    match executor.ask(proc, request, Duration::from_secs(20)) {
        Ok(Reply::Region(region)) => region.0.to_string(),
        Ok(Reply::Residency(found)) => {
            format!("{} {}", found.resident_bytes + found.unarmed_bytes, found.parked_bytes)
        }
        Ok(Reply::Done) => "done".to_owned(),
        other => format!("{other:?}"),
    }
}

/// The client; see the top of the file. By itself it does nothing.
#[test]
fn client_process() {
    if let Some(scenario) = std::env::var_os("TIERMGR_ENGINE_SCENARIO") {
        let socket = std::env::var_os("TIERMGR_ENGINE_SOCKET").unwrap();
        client::run(scenario.to_str().unwrap(), Path::new(&socket));
    }
}

#[test]
fn a_client_that_fits_keeps_its_memory_and_leaves_nothing() {
    let Some(world) = World::new(256 * MIB) else { return };
    let client = world.start("fits");
    world.finish(client);
    assert_eq!(world.executor.stats().parked_pages, 0);
}

#[test]
fn a_client_twice_as_large_as_its_room_reads_what_it_wrote() {
    let Some(world) = World::new(32 * MIB) else { return };
    let client = world.start("scan");
    world.finish(client);
    let stats = world.executor.stats();
    assert!(stats.parked_pages > 10_000 && stats.recalled_pages > 1_000, "{stats:#?}");
    assert_eq!(stats.store_errors + stats.poisoned_pages, 0, "{stats:#?}");
}

#[test]
fn discarded_memory_reads_as_zeros_and_a_dropped_region_can_be_unmapped() {
    let Some(world) = World::new(32 * MIB) else { return };
    let client = world.start("discard");
    world.finish(client);
}

#[test]
fn a_forked_child_reads_what_its_parent_had_parked_and_neither_sees_the_others_writes() {
    let Some(world) = World::new(32 * MIB) else { return };
    let client = world.start("fork");
    world.finish(client);
    assert!(world.executor.stats().forks >= 1);
}

#[test]
fn a_forked_child_that_shows_itself_is_known_and_parks() {
    let Some(world) = World::new(32 * MIB) else { return };
    let client = world.start("fork_attach");
    world.finish(client);
}

#[test]
fn a_stranger_is_no_child_of_the_family() {
    let Some(world) = World::new(32 * MIB) else { return };
    let client = world.start("stranger");
    world.wait_for(client);
    assert!(world.executor.processes().is_empty());
    world.executor.stop(false).unwrap();
    assert!(world.executor.is_idle());
}

#[test]
fn a_killed_client_gives_everything_back() {
    let Some(world) = World::new(32 * MIB) else { return };
    let mut client = world.start("linger");
    wait_until_parked(&world, 32 * MIB);
    client.kill().unwrap();
    client.wait().unwrap();
    let begun = Instant::now();
    while !world.executor.is_idle() {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", world.executor.processes());
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(world.room.usage().free, world.room.usage().total);
    assert_eq!(world.store.usage().used_bytes, 0);
}

/// Waits until the client has everything in its place: it cannot have more than its room in DRAM.
fn wait_until_parked(world: &World, bytes: u64) {
    let begun = Instant::now();
    while world.executor.stats().parked_now_bytes < bytes {
        assert!(begun.elapsed() < PATIENCE, "{:#?}", world.executor.stats());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_drain_is_refused_where_everything_does_not_fit_and_the_client_is_served_on() {
    let Some(world) = World::new(32 * MIB) else { return };
    let mut client = world.start("linger");
    wait_until_parked(&world, 32 * MIB);
    let error = world.executor.stop(true).unwrap_err();
    assert!(matches!(error, EngineError::Refused(Refusal::DoesNotFit)), "{error}");
    assert!(!world.executor.is_idle());
    let rows = world.executor.regions();
    let [(_, row)] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!(row.len_bytes, 64 * MIB);
    assert!(row.parked_bytes >= 32 * MIB, "{row:?}");
    client.kill().unwrap();
    client.wait().unwrap();
}

#[test]
fn a_drain_brings_everything_back_where_it_fits() {
    let Some(world) = World::new(32 * MIB) else { return };
    let client = world.start("drain");
    world.wait_for_file("ready");
    world.executor.stop(true).unwrap();
    fs::write(world.folders.state.join("go"), "").unwrap();
    world.finish(client);
}

#[test]
fn a_drain_takes_along_what_is_forked_meanwhile() {
    for _ in 0..3 {
        let Some(world) = World::new(32 * MIB) else { return };
        let client = world.start("drain_forks");
        world.wait_for_file("ready");
        world.executor.stop(true).unwrap();
        fs::write(world.folders.state.join("go"), "").unwrap();
        world.finish(client);
    }
}

/// A client goes on with `scenario` while what serves it is replaced, now at once and now after a while.
fn endure(scenario: &str) {
    let Some(mut world) = World::new(32 * MIB) else { return };
    let client = world.start(scenario);
    wait_until_parked(&world, MIB);
    for pause_ms in [0, 1, 3, 10, 50, 100, 200, 5, 2] {
        thread::sleep(Duration::from_millis(pause_ms));
        world.restart();
    }
    thread::sleep(Duration::from_millis(300));
    fs::write(world.folders.state.join("go"), "").unwrap();
    world.finish(client);
}

#[test]
fn a_client_survives_restarts_at_any_time() {
    endure("endure");
}

/// Opens a descriptor under the number of another, which nobody owns any more.
#[expect(unsafe_code, reason = "descriptors known by their numbers")]
fn give_number(fd: RawFd, to: RawFd) {
    // SAFETY: dup2 takes numbers; the owner of `to` has ended without closing it.
    assert_eq!(unsafe { libc::dup2(fd, to) }, to);
}

#[test]
fn the_numbers_of_another_descriptor_table_are_not_believed() {
    let Some(mut world) = World::new(32 * MIB) else { return };
    let client = world.start("endure");
    wait_until_parked(&world, MIB);
    for _ in 0..3 {
        world.executor.stop(false).unwrap();
        let (_, found) = FamilyState::load(&world.folders.state.join("family-7")).unwrap();
        let [entry] = found.procs.as_slice() else { panic!("{found:?}") };
        let kept = fs::File::open("/dev/null").unwrap().into_raw_fd();
        give_number(entry.arena_fd, kept);
        give_number(entry.limbo_fd, entry.arena_fd);
        give_number(kept, entry.limbo_fd);
        world.table += 1;
        world.restart();
        thread::sleep(Duration::from_millis(100));
    }
    fs::write(world.folders.state.join("go"), "").unwrap();
    world.finish(client);
}

#[test]
fn a_family_whose_pages_were_moved_is_not_taken_up_without_moves() {
    let Some(mut world) = World::new(32 * MIB) else { return };
    let client = world.start("endure");
    wait_until_parked(&world, MIB);
    world.executor.stop(false).unwrap();
    let features = KernelFeatures { uffd_move: false, ..world.features.clone() };
    let config = config(&world.folders, &world.store, &world.room, &features, world.table);
    let error = Executor::recover(config).unwrap_err();
    assert!(matches!(error, EngineError::NeedsMove { .. }), "{error}");
    world.restart();
    fs::write(world.folders.state.join("go"), "").unwrap();
    world.finish(client);
}

/// As if the helper had another ring in its place: nobody could tell what it is still to carry out.
#[test]
fn a_helper_without_its_ring_is_ended_at_a_restart() {
    let Some(mut world) = World::new(32 * MIB) else { return };
    let client = world.start("endure");
    wait_until_parked(&world, MIB);
    world.executor.stop(false).unwrap();
    let (state, found) = FamilyState::load(&world.folders.state.join("family-7")).unwrap();
    let [mut entry] = <[_; 1]>::try_from(found.procs).unwrap();
    entry.ring_id.inode += 1;
    state.procs.put(&entry);
    let helper = pidfd::open(entry.helper_pid).unwrap();
    world.restart();
    assert!(pidfd::wait(helper.as_fd(), Duration::from_secs(5)).unwrap(), "it lives");
    fs::write(world.folders.state.join("go"), "").unwrap();
    world.finish(client);
}

#[test]
fn a_family_survives_restarts_while_it_forks() {
    endure("endure_forks");
}

#[test]
fn a_client_that_ended_while_nobody_looked_leaves_nothing() {
    let Some(mut world) = World::new(32 * MIB) else { return };
    let mut client = world.start("linger");
    wait_until_parked(&world, 32 * MIB);
    world.executor.stop(false).unwrap();
    client.kill().unwrap();
    client.wait().unwrap();
    world.restart();
    let begun = Instant::now();
    while !world.executor.is_idle() {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", world.executor.processes());
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(world.store.usage().used_bytes, 0);
}
