//! The client against a daemon that does as a script says: refuses, talks nonsense, vanishes, comes
//! back, does not answer a forked child. It hands out the real descriptors and starts real helpers, but
//! manages nothing.

#![cfg(test)]

mod attaching;
mod away;
mod confined;
mod inside;
mod preloaded;
mod unanswered;

use attaching::OnAttach;
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tiermgr::client::Client;
use tiermgr::fork::CLIENTS_MAX;
use tiermgr::link::{Class, Config};
use tiermgr::status::Status;
use tiermgr_sys::ring::RingOwner;
use tiermgr_sys::sock::{Listener, Stream};
use tiermgr_sys::uffd::{DeviceFd, Uffd};
use tiermgr_wire::hello::{Role, Welcome};
use tiermgr_wire::reply::{ErrorCode, FromDaemon};
use tiermgr_wire::request::{Kind, ToDaemon};

const FAMILY: u64 = 0x1234_5678_9abc_def0;

/// How greetings are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Manner {
    Polite,
    Refuses,
    /// Processes that it served before it was restarted.
    NotYet,
    TalksNonsense,
    GivesTwoDescriptors,
    OddLimbo,
    ClosesAtOnce,
    SaysNothing,
    GreetsLate,
    /// When the test says so.
    GreetsOnCue,
}

const GREETED_LATE: Duration = Duration::from_millis(1500);

const MANNERS: [Manner; 10] = [
    Manner::Polite,
    Manner::Refuses,
    Manner::NotYet,
    Manner::TalksNonsense,
    Manner::GivesTwoDescriptors,
    Manner::OddLimbo,
    Manner::ClosesAtOnce,
    Manner::SaysNothing,
    Manner::GreetsLate,
    Manner::GreetsOnCue,
];

/// What becomes of a request of an attached program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    /// It is answered as if it had been carried out.
    Usual,
    /// It is answered with an error.
    Refuse(ErrorCode),
    /// The daemon dies of it.
    Vanish,
    /// It is carried out when the test says so.
    Stall,
}

type Script = Box<dyn Fn(&ToDaemon) -> Act + Send>;

#[derive(Default)]
struct Book {
    seen: Mutex<Vec<ToDaemon>>,
    connections: Mutex<Vec<RawFd>>,
    manner: AtomicU32,
    last_region: AtomicU32,
    script: Mutex<Option<Script>>,
    /// What becomes of the next attaches; none: they are answered.
    attaches: Mutex<VecDeque<OnAttach>>,
    /// Processes that are served.
    served: Mutex<BTreeSet<i32>>,
    /// Userfaultfds that nobody reads.
    kept: Mutex<Vec<Uffd>>,
    /// Requests that stalled may go on.
    goes_on: (Mutex<bool>, Condvar),
    /// Whoever connects waits to be accepted, but for one.
    is_closed: AtomicBool,
}

impl Book {
    fn seen(&self, wanted: impl Fn(&ToDaemon) -> bool) -> usize {
        self.seen.lock().expect("not poisoned").iter().filter(|message| wanted(message)).count()
    }

    fn behave(&self, manner: Manner) {
        self.manner.store(manner as u32, Ordering::SeqCst);
    }

    fn act(&self, script: impl Fn(&ToDaemon) -> Act + Send + 'static) {
        *self.script.lock().expect("not poisoned") = Some(Box::new(script));
    }

    fn on_attach(&self, acts: impl IntoIterator<Item = OnAttach>) {
        self.attaches.lock().expect("not poisoned").extend(acts);
    }

    fn act_as_usual(&self) {
        self.act(|_| Act::Usual);
    }

    fn go_on(&self) {
        *self.goes_on.0.lock().expect("not poisoned") = true;
        self.goes_on.1.notify_all();
    }

    fn wait_for_cue(&self) {
        let (goes_on, bell) = &self.goes_on;
        let goes_on = goes_on.lock().expect("not poisoned");
        drop(bell.wait_while(goes_on, |goes_on| !*goes_on).expect("not poisoned"));
    }

    /// The start of the range that was to be added last.
    fn last_added(&self) -> usize {
        let seen = self.seen.lock().expect("not poisoned");
        let start = seen.iter().rev().find_map(|message| match message {
            ToDaemon::AddRegion { start, .. } => Some(*start),
            _ => None,
        });
        usize::try_from(start.expect("a region was to be added")).expect("an address")
    }

    fn discards_of(&self, start: usize) -> usize {
        self.seen(|message| {
            matches!(message, ToDaemon::Discard { start: seen, .. } if *seen == start as u64)
        })
    }

    /// Ends all connections, as the end of a process does.
    fn vanish(&self) {
        for fd in self.connections.lock().expect("not poisoned").drain(..) {
            // SAFETY: at worst the number is another socket of this test's by now.
            unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
        }
    }
}

struct Scripted {
    socket: PathBuf,
    book: Arc<Book>,
    _turn: MutexGuard<'static, ()>,
}

/// A fork takes along the clients of all tests of this process: one at a time.
static TURN: Mutex<()> = Mutex::new(());

impl Scripted {
    /// `None` where the machine has no userfaultfd for us; says so.
    fn new(name: &str) -> Option<Self> {
        let device = match DeviceFd::open() {
            Ok(device) => Arc::new(device),
            Err(error) => {
                assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "skipped: {error}");
                eprintln!("skipped: {error}");
                return None;
            }
        };
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let socket = folder.join(format!("{name}.{}", std::process::id()));
        // Left behind where an earlier run was killed.
        let _removed = fs::remove_file(&socket).is_ok();
        let listener = Listener::bind(&socket, 0o600, None).expect("a socket in the target folder");
        let book = Arc::new(Book::default());
        let own = Arc::clone(&book);
        thread::spawn(move || {
            while let Ok(stream) = listener.accept() {
                while own.is_closed.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
                let (book, device) = (Arc::clone(&own), Arc::clone(&device));
                book.connections.lock().expect("not poisoned").push(stream.as_fd().as_raw_fd());
                thread::spawn(move || serve(&stream, &book, &device));
            }
        });
        Some(Self { socket, book, _turn: turn })
    }

    fn config(&self) -> Config {
        let socket = self.socket.clone();
        Config { socket, name: "scripted".into(), class: Class::Standard, extents: false }
    }

    /// Accepts nobody any more, and has no room for others who wait for it.
    fn close(&self) {
        self.book.is_closed.store(true, Ordering::SeqCst);
        while Stream::connect_within(&self.socket, Duration::from_millis(20)).is_ok() {}
    }

    fn open(&self) {
        self.book.is_closed.store(false, Ordering::SeqCst);
    }

    fn client(&self) -> Box<Client> {
        Client::connect(self.config()).expect("the daemon is polite")
    }
}

fn serve(stream: &Stream, book: &Book, device: &DeviceFd) {
    let mut packet = vec![0; 8192];
    let mut ring = None;
    let peer = stream.peer_cred().expect("a peer").pid;
    while let Ok((length, descriptors)) = stream.recv_with_fds(&mut packet) {
        let Ok(message) = tiermgr_wire::decode::<ToDaemon>(&packet[..length]) else { return };
        book.seen.lock().expect("not poisoned").push(message.clone());
        let manner = MANNERS[book.manner.load(Ordering::SeqCst) as usize];
        let act = match message {
            ToDaemon::Hello(_) | ToDaemon::Attach(_) => Act::Usual,
            _ => {
                let script = book.script.lock().expect("not poisoned");
                script.as_ref().map_or(Act::Usual, |script| script(&message))
            }
        };
        match act {
            Act::Usual => {}
            Act::Refuse(code) => {
                say(stream, &refusal(code));
                continue;
            }
            Act::Vanish => {
                book.vanish();
                return;
            }
            Act::Stall => book.wait_for_cue(),
        }
        let reply = match message {
            ToDaemon::Hello(hello) => {
                let own = match manner {
                    Manner::SaysNothing => continue,
                    Manner::ClosesAtOnce => return,
                    Manner::TalksNonsense => {
                        stream.send_with_fds(b"\xff\xff\xff", &[]).expect("sends");
                        continue;
                    }
                    Manner::Refuses => {
                        say(stream, &refusal(ErrorCode::NotPermitted));
                        continue;
                    }
                    Manner::NotYet => {
                        say(stream, &refusal(ErrorCode::ShuttingDown));
                        continue;
                    }
                    _ => RingOwner::create().expect("a ring"),
                };
                match manner {
                    Manner::GreetsLate => thread::sleep(GREETED_LATE),
                    Manner::GreetsOnCue => book.wait_for_cue(),
                    _ => {}
                }
                if let Role::ForkedChild { lacks_arena, .. } = hello.role {
                    let served = book.served.lock().expect("not poisoned");
                    if served.is_empty() {
                        say(stream, &refusal(ErrorCode::NotPermitted));
                        continue;
                    }
                    if served.contains(&peer) {
                        let arena = attaching::some_uffd(device);
                        let given = if lacks_arena { &[arena.as_fd()][..] } else { &[] };
                        say_with(stream, &FromDaemon::Ready, given);
                        continue;
                    }
                }
                let welcome = Welcome {
                    family: FAMILY,
                    limbo_bytes: if manner == Manner::OddLimbo { 4096 } else { 8 << 20 },
                    arena_bytes: 4 << 30,
                    ring_bytes: 65536,
                    has_move: true,
                };
                let all = [device.as_fd(), own.memfd(), own.eventfd()];
                let given =
                    if manner == Manner::GivesTwoDescriptors { &all[..2] } else { &all[..] };
                let bytes = tiermgr_wire::encode(&FromDaemon::Welcome(welcome), &mut packet);
                stream.send_with_fds(bytes.expect("fits"), given).expect("sends");
                ring = Some(own);
                continue;
            }
            ToDaemon::Attach(attach) => {
                assert!(ring.is_some() && attach.helper_pid > 0);
                assert!(attach.limbo_start.is_multiple_of(2 << 20));
                check_uffds(&descriptors);
                let act = book.attaches.lock().expect("not poisoned").pop_front();
                if !act.unwrap_or(OnAttach::Serve).carry_out(stream, book, peer, &descriptors) {
                    return;
                }
                continue;
            }
            ToDaemon::AddRegion { .. } => {
                FromDaemon::Region(book.last_region.fetch_add(1, Ordering::SeqCst) + 1)
            }
            ToDaemon::Pin { .. } => refusal(ErrorCode::NoRoom),
            _ => FromDaemon::Done,
        };
        say(stream, &reply);
    }
}

const fn is_discard(message: &ToDaemon) -> bool {
    matches!(message, ToDaemon::Discard { .. })
}

fn check_uffds(descriptors: &[OwnedFd]) {
    assert!((1..=2).contains(&descriptors.len()));
    for fd in descriptors {
        let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("open");
        assert_eq!(link.as_os_str(), "anon_inode:[userfaultfd]");
    }
}

fn refusal(code: ErrorCode) -> FromDaemon {
    FromDaemon::Error { code, message: "the script says no".into() }
}

fn say(stream: &Stream, reply: &FromDaemon) {
    say_with(stream, reply, &[]);
}

fn say_with(stream: &Stream, reply: &FromDaemon, given: &[BorrowedFd<'_>]) {
    let mut packet = vec![0; 8192];
    let bytes = tiermgr_wire::encode(reply, &mut packet).expect("fits");
    // A peer that has gone is what some scripts are about.
    let _heard = stream.send_with_fds(bytes, given).is_ok();
}

const fn says_child(message: &ToDaemon) -> bool {
    matches!(message, ToDaemon::Hello(hello) if matches!(hello.role, Role::ForkedChild { .. }))
}

/// Runs `body` in a forked child and gives its exit status. The child is ended if it takes longer than
/// ten seconds.
fn in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child uses only this client, whose fork handlers are what is tested, and libc's
    // heap, which glibc makes usable there.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        // SAFETY: no preconditions; ends a child that hangs.
        unsafe { libc::alarm(10) };
        let status = body();
        // SAFETY: ends the child without the handlers of the test's own process.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: a child of ours, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

#[test]
fn regions_and_blocks_come_and_go() {
    let Some(daemon) = Scripted::new("come-and-go") else { return };
    let client = daemon.client();
    let region = client.create_region(5 << 20, Kind::Weights, "weights").expect("a region");
    // SAFETY: a live region's handle.
    let region_ref = unsafe { &*region };
    assert_eq!(region_ref.bytes(), 6 << 20);
    let block = client.allocate(1 << 20, 4096).expect("a block");
    let bytes = block.address as *mut u8;
    // SAFETY: a live block of 1 MiB.
    unsafe { bytes.write_bytes(7, 1 << 20) };
    client.free(block.address).expect("live");
    assert!(client.free(block.address).is_err());
    let error = client.pin(region_ref.start(), 4096).expect_err("the script says no");
    assert_eq!((error.status, &*error.message), (Status::NoRoom, "the script says no"));
    client.destroy_region(region).expect("destroyed");
    let error = client.destroy_region(std::ptr::null()).expect_err("no such region");
    assert_eq!(error.status, Status::InvalidArgument);
    client.disconnect().expect("all regions are dropped");
    assert_eq!(daemon.book.seen(|message| matches!(message, ToDaemon::AddRegion { .. })), 2);
    assert_eq!(daemon.book.seen(|message| matches!(message, ToDaemon::DropRegion { .. })), 2);
}

/// The daemon restarts in the very instant in which a program connects for the first time.
#[test]
fn a_daemon_that_is_away_for_a_moment_gets_its_new_client() {
    let Some(daemon) = Scripted::new("first-instant") else { return };
    daemon.book.behave(Manner::ClosesAtOnce);
    let book = Arc::clone(&daemon.book);
    let back = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        book.behave(Manner::Polite);
    });
    let client = Client::connect(daemon.config()).expect("it is back");
    back.join().expect("no panic");
    client.disconnect().expect("ends in order");
    // Not for ever: nobody listens at the socket that a killed daemon left.
    let stale = daemon.socket.with_extension("stale");
    drop(Listener::bind(&stale, 0o600, None).expect("binds"));
    let began = Instant::now();
    let config = Config { socket: stale, ..daemon.config() };
    assert_eq!(Client::connect(config).expect_err("nobody").status, Status::NoDaemon);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn a_bad_greeting_is_an_error_and_leaves_nothing_behind() {
    let Some(daemon) = Scripted::new("bad-greeting") else { return };
    let open_files = || fs::read_dir("/proc/self/fd").expect("proc").count();
    let table = [
        (Manner::Refuses, Status::NotPermitted),
        (Manner::TalksNonsense, Status::Protocol),
        (Manner::GivesTwoDescriptors, Status::Protocol),
        (Manner::OddLimbo, Status::Protocol),
        (Manner::ClosesAtOnce, Status::ConnectionLost),
    ];
    for (manner, status) in table {
        daemon.book.behave(manner);
        let error = Client::connect(daemon.config()).expect_err("a bad greeting");
        assert_eq!(error.status, status, "{manner:?}: {error}");
    }
    daemon.book.behave(Manner::OddLimbo);
    let mappings = || fs::read_to_string("/proc/self/maps").expect("proc").lines().count();
    let (before, mappings_before) = (open_files(), mappings());
    for _ in 0..20 {
        let refused = Client::connect(daemon.config()).is_err();
        assert!(refused);
    }
    // Others are threads of the script.
    assert!(mappings() < mappings_before + 40, "{mappings_before} mappings became {}", mappings());
    // The script's own side of the connections closes a little later.
    let deadline = Instant::now() + Duration::from_secs(5);
    while open_files() > before + 2 {
        assert!(Instant::now() < deadline, "descriptors were left open");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_daemon_that_comes_back_is_found_again() {
    let Some(daemon) = Scripted::new("comes-back") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block");
    daemon.book.vanish();
    // The next request finds the daemon again by itself.
    client.prefetch(block.address, 4096).expect("back within the wait");
    let returned = |message: &ToDaemon| {
        matches!(message, ToDaemon::Hello(hello)
            if hello.role == Role::ForkedChild { family: FAMILY, lacks_arena: false })
    };
    assert_eq!(daemon.book.seen(returned), 1);

    // Away for good: an error in time, and blocks that are there already are served.
    daemon.book.behave(Manner::Refuses);
    daemon.book.vanish();
    let began = Instant::now();
    let error = client.prefetch(block.address, 4096).expect_err("away");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(matches!(error.status, Status::ConnectionLost | Status::NotPermitted), "{error}");
    let more = client.allocate(1 << 20, 4096).expect("the arena has room");
    client.free(more.address).expect("live");
    assert!(client.disconnect().is_err(), "nobody confirmed that the regions are quiet");
}

#[test]
fn a_forked_child_joins_the_family_on_its_own_connection() {
    let Some(daemon) = Scripted::new("forked-child") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block");
    let bytes = block.address as *mut u8;
    // SAFETY: a live block.
    unsafe { bytes.write(5) };
    let status = in_child(|| {
        // SAFETY: the child's copy of a live block.
        if unsafe { bytes.read() } != 5 {
            return 1;
        }
        if client.prefetch(block.address, 4096).is_err() {
            return 2;
        }
        match client.allocate(2 << 20, 4096) {
            Ok(block) if client.free(block.address).is_ok() => {}
            _ => return 3,
        }
        // A child of the child, too.
        if in_child(|| i32::from(client.prefetch(block.address, 4096).is_err())) != 0 {
            return 4;
        }
        0
    });
    assert_eq!(status, 0);
    client.prefetch(block.address, 4096).expect("the parent's connection is as before");
    assert_eq!(daemon.book.seen(says_child), 2);
    assert_eq!(daemon.book.seen(|message| matches!(message, ToDaemon::Attach(_))), 3);
    client.disconnect().expect("quiet");
}

#[test]
fn a_client_that_was_dropped_is_not_followed_across_forks() {
    let Some(daemon) = Scripted::new("dropped-client") else { return };
    for _ in 0..=CLIENTS_MAX {
        drop(daemon.client());
    }
    assert_eq!(in_child(|| 0), 0);
    assert_eq!(daemon.book.seen(says_child), 0);
}

#[test]
fn a_child_that_the_daemon_does_not_answer_goes_on() {
    let Some(daemon) = Scripted::new("silent") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block");
    daemon.book.behave(Manner::SaysNothing);
    let began = Instant::now();
    let status = in_child(|| {
        let bytes = block.address as *mut u8;
        // SAFETY: the child's copy of a live block.
        unsafe { bytes.write_bytes(1, 1 << 20) };
        match client.free(block.address) {
            Ok(()) => 0,
            Err(_) => 1,
        }
    });
    assert_eq!(status, 0);
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    client.disconnect().expect("the parent's connection is as before");
}
