//! The client side: what the library of a program does, in a few lines, and the scenarios.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use tiermgr_sys::helper::{self, HelperConfig, HelperHandle};
use tiermgr_sys::process::page_size;
use tiermgr_sys::sock::Stream;
use tiermgr_sys::uffd::new_from_device;

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 2 * MIB;
/// A client that hangs ends itself.
const ALARM_S: u32 = 55;

/// Memory of this process, unmapped by [`Area::unmap`] alone.
#[derive(Clone, Copy, Debug)]
struct Area {
    base: u64,
    len: u64,
}

impl Area {
    fn new(len: u64) -> Self {
        let whole = usize::try_from(len + CHUNK).unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nobody's memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), whole, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        let base = (at.expose_provenance() as u64).next_multiple_of(CHUNK);
        Self { base, len }
    }

    /// The same in a child that was forked, or none there.
    fn dont_fork(self) -> Self {
        let len = usize::try_from(self.len).unwrap();
        let at = std::ptr::with_exposed_provenance_mut(usize::try_from(self.base).unwrap());
        // SAFETY: the range is part of a mapping made by `new`, and only its inheritance changes.
        assert_eq!(unsafe { libc::madvise(at, len, libc::MADV_DONTFORK) }, 0);
        self
    }

    /// Nobody may use a word of it any more.
    fn unmap(self) {
        let len = usize::try_from(self.len).unwrap();
        let at = std::ptr::with_exposed_provenance_mut(usize::try_from(self.base).unwrap());
        // SAFETY: the range is part of a mapping made by `new`, and the caller has no word of it left.
        assert_eq!(unsafe { libc::munmap(at, len) }, 0);
    }

    fn word(self, offset: u64) -> &'static AtomicU64 {
        assert!(offset < self.len && offset.is_multiple_of(8));
        let at = usize::try_from(self.base + offset).unwrap();
        // SAFETY: the word lies in a mapping that is never unmapped, is aligned, and is only ever used
        // as an atomic.
        unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(at) }
    }

    /// Two words of each page.
    fn words(self) -> impl Iterator<Item = u64> {
        let page = page_size();
        (0..self.len / page).flat_map(move |at| [at * page, at * page + page - 8])
    }

    fn fill(self, seed: u64) {
        for at in self.words() {
            self.word(at).store(at.wrapping_mul(31) ^ seed, Ordering::Relaxed);
        }
    }

    fn check(self, seed: u64, who: &str) {
        for at in self.words() {
            let found = self.word(at).load(Ordering::Relaxed);
            assert_eq!(found, at.wrapping_mul(31) ^ seed, "{who}: at {at:#x}");
        }
    }
}

/// An attached process.
struct Client {
    stream: Stream,
    _helper: HelperHandle,
    _fds: Vec<OwnedFd>,
    nonce_page: Area,
}

impl Client {
    fn attach(socket: &Path, nonce_page: Option<Area>) -> io::Result<Self> {
        let stream = Stream::connect_within(socket, std::time::Duration::from_secs(10))?;
        let is_child = nonce_page.is_some();
        stream.send_with_fds(if is_child { b"child" } else { b"hello" }, &[])?;
        let mut buffer = [0; 64];
        let (_, fds) = stream.recv_with_fds(&mut buffer)?;
        let [device, ring, event] =
            fds.try_into().map_err(|_other_number| io::ErrorKind::InvalidData)?;
        let arena = if is_child { None } else { Some(new_from_device(device.as_fd())?) };
        let limbo_fd = new_from_device(device.as_fd())?;
        let limbo = Area::new(super::LIMBO_BYTES).dont_fork();
        let nonce_page = nonce_page.unwrap_or_else(|| Area::new(CHUNK));
        let helper = helper::spawn(&HelperConfig {
            ring: ring.as_fd(),
            event: event.as_fd(),
            arena: arena.as_ref().map(AsFd::as_fd),
            limbo: limbo_fd.as_fd(),
            hold: &[],
        })?;
        let attach = format!("attach {} {} {}", limbo.base, nonce_page.base, helper.pid());
        let given: Vec<_> =
            arena.as_ref().map(AsFd::as_fd).into_iter().chain([limbo_fd.as_fd()]).collect();
        stream.send_with_fds(attach.as_bytes(), &given)?;
        let (len, _) = stream.recv_with_fds(&mut buffer)?;
        if &buffer[..len] != b"attached" {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let fds = arena.into_iter().chain([limbo_fd, device, ring, event]).collect();
        Ok(Self { stream, _helper: helper, _fds: fds, nonce_page })
    }

    fn ask(&self, what: &str, area: Area) -> String {
        self.say(&format!("{what} {} {}", area.base, area.len))
    }

    fn say(&self, text: &str) -> String {
        self.stream.send_with_fds(text.as_bytes(), &[]).unwrap();
        let mut buffer = [0; 4096];
        let (len, _) = self.stream.recv_with_fds(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..len]).into_owned()
    }

    fn region(&self, len: u64) -> (Area, u32) {
        let area = Area::new(len);
        let number = self.ask("add", area);
        (area, number.parse().unwrap_or_else(|_| panic!("adding a region: {number}")))
    }
}

/// Forks; the child runs `child` and exits. The parent gets its pid.
fn fork(child: impl FnOnce()) -> i32 {
    // SAFETY: the child uses this thread's stack, atomics, system calls and malloc, which glibc makes
    // usable after fork; it never returns into the test harness.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: alarm takes an integer. A panic in the child unwinds at most to here.
        unsafe { libc::alarm(ALARM_S) };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        // SAFETY: ends the child at once, without the harness' handlers.
        unsafe { libc::_exit(i32::from(result.is_err())) };
    }
    assert!(pid > 0);
    pid
}

fn wait_for(pid: i32) {
    let mut status = 0;
    // SAFETY: `status` is a place for the one integer that the call writes.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child failed");
}

/// Carries out a scenario; panics where something is wrong.
pub(super) fn run(scenario: &str, socket: &Path) {
    // SAFETY: alarm takes an integer; its signal ends this process, as is meant.
    unsafe { libc::alarm(ALARM_S) };
    match scenario {
        "fits" => fits(socket),
        "scan" => scan(socket),
        "discard" => discard(socket),
        "fork" => fork_unseen(socket),
        "fork_attach" => fork_attach(socket),
        "stranger" => stranger(socket),
        "linger" => linger(socket),
        "drain" => drain(socket),
        "drain_forks" => drain_forks(socket),
        "endure" => endure(socket),
        "endure_forks" => endure_forks(socket),
        other => panic!("no scenario {other}"),
    }
}

fn fits(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    area.fill(1);
    area.check(1, "client");
}

fn scan(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    for round in 0..3 {
        area.fill(round);
        area.check(round, "client");
        area.check(round, "client again");
    }
    let mut random = 12345_u64;
    for _ in 0..20_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = (random >> 20) % (area.len / page_size()) * page_size();
        let value = area.word(at).load(Ordering::Relaxed);
        assert_eq!(value, at.wrapping_mul(31) ^ 2, "at {at:#x}");
        if random & 1 << 62 != 0 {
            area.word(at).store(value, Ordering::Relaxed);
        }
    }
    area.check(2, "client after random access");
}

fn discard(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, number) = client.region(64 * MIB);
    area.fill(3);
    let hole = Area { base: area.base + 10 * MIB, len: 20 * MIB };
    assert_eq!(client.ask("discard", hole), "done");
    for at in hole.words() {
        assert_eq!(hole.word(at).load(Ordering::Relaxed), 0, "at {at:#x}");
    }
    let rest = Area { base: area.base, len: 10 * MIB };
    rest.check(3, "beside the hole");
    assert_eq!(client.say(&format!("drop {number}")), "done");
    area.unmap();
    let (other, _) = client.region(8 * MIB);
    other.fill(10);
    other.check(10, "after an unmap");
}

fn fork_unseen(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    area.fill(4);
    let child = fork(|| {
        area.check(4, "child");
        let part = Area { base: area.base, len: 8 * MIB };
        part.fill(5);
        part.check(5, "child after its writes");
    });
    area.check(4, "parent beside its child");
    wait_for(child);
    area.check(4, "parent");
    area.fill(6);
    area.check(6, "parent after its writes");
}

fn fork_attach(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    area.fill(7);
    let nonce_page = client.nonce_page;
    let child = fork(|| {
        let own = Client::attach(socket, Some(nonce_page)).unwrap();
        area.check(7, "child");
        area.fill(8);
        area.check(8, "child after its writes");
        // A grandchild has a page with a nonce in it to get rid of.
        let grandchild = fork(|| {
            let own = Client::attach(socket, Some(nonce_page)).unwrap();
            area.check(8, "grandchild");
            drop(own);
        });
        wait_for(grandchild);
        drop(own);
    });
    area.check(7, "parent");
    wait_for(child);
    area.check(7, "parent");
}

fn stranger(socket: &Path) {
    let nonce_page = Area::new(CHUNK);
    assert!(Client::attach(socket, Some(nonce_page)).is_err());
}

fn linger(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    area.fill(9);
    loop {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

fn drain(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    area.fill(11);
    leave_little(&client, area, socket);
    while !socket.with_file_name("go").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    check_rest(area);
    // Native again: more than the room, and nobody is there to serve it.
    area.fill(12);
    area.check(12, "after a drain");
}

/// What is kept before a drain: it was written first, so that most of it is parked, and fits three
/// times into the room.
const KEPT: u64 = 10 * MIB;

fn leave_little(client: &Client, area: Area, socket: &Path) {
    let part = Area { base: area.base + KEPT, len: area.len - KEPT };
    assert_eq!(client.ask("discard", part), "done");
    std::fs::write(socket.with_file_name("ready"), "").unwrap();
}

fn check_rest(area: Area) {
    let page = page_size();
    for at in (0..KEPT).step_by(8).filter(|at| at % page == 0 || at % page == page - 8) {
        assert_eq!(area.word(at).load(Ordering::Relaxed), at.wrapping_mul(31) ^ 11, "at {at:#x}");
    }
}

fn drain_forks(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    area.fill(11);
    leave_little(&client, area, socket);
    while !socket.with_file_name("go").exists() {
        wait_for(fork(|| check_rest(area)));
    }
    check_rest(area);
}

fn endure(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    let mut round = 0;
    while round < 2 || !socket.with_file_name("go").exists() {
        area.fill(round);
        area.check(round, "client");
        round += 1;
    }
}

fn endure_forks(socket: &Path) {
    let client = Client::attach(socket, None).unwrap();
    let (area, _) = client.region(64 * MIB);
    let mut round = 0;
    while round < 2 || !socket.with_file_name("go").exists() {
        area.fill(round);
        let child = fork(|| {
            area.check(round, "child");
            let part = Area { base: area.base, len: 4 * MIB };
            part.fill(round + 1000);
            part.check(round + 1000, "child after its writes");
        });
        area.check(round, "parent");
        wait_for(child);
        round += 1;
    }
}
