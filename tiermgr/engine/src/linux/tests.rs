//! The host alone: effects by hand, on memory of this process.

use super::{HostConfig, LinuxHost, Prepared};
use crate::executor::NewProcess;
use crate::host::Host;
use crate::mailbox::{Claim, Mail, Mailbox};
use crate::room::Room;
use crate::scratch::Scratch;
use crate::slots::SEGMENT_BYTES;
use crate::staging::Staging;
use crate::state::FamilyState;
use crate::state::procs::FamilyInfo;
use crate::store::{DATA_OFFSET, Store, StoreConfig};
use crate::wake::Wake;
use std::fs::OpenOptions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_core::effect::{BufRange, Buffer, Command, Effect, Reply};
use tiermgr_core::event::{CommandOutcome, Event, IoctlOutcome, Request};
use tiermgr_core::limits::STREAM_BUFFERS;
use tiermgr_core::page::PageMask;
use tiermgr_core::units::{
    Addr, CHUNK_BYTES, EXTENT_BYTES, LeaseId, OpId, ProcId, RequestId, SlotId, Span, Tick, low_u32,
};
use tiermgr_sys::abi;
use tiermgr_sys::helper::{self, HelperConfig, HelperHandle};
use tiermgr_sys::probe::KernelFeatures;
use tiermgr_sys::process::page_size;
use tiermgr_sys::ring::RingOwner;
use tiermgr_sys::uffd::{DeviceFd, Mode, Uffd, handshake, new_from_device};
use tiermgr_sys::{pidfd, shm};
use tiermgr_wire::hello::Class;

const FAMILY: u64 = 41;
/// No test waits longer for any one thing.
const PATIENCE: Duration = Duration::from_secs(10);
const CHUNK: usize = low_u32(CHUNK_BYTES) as usize;
const EXTENT: u32 = low_u32(EXTENT_BYTES);

/// Anonymous memory of this process, a multiple of chunks, never unmapped: a userfaultfd of another
/// test may be asked about it otherwise.
#[derive(Clone, Copy, Debug)]
struct Area {
    base: u64,
}

impl Area {
    #[expect(unsafe_code, reason = "the standard library maps no memory")]
    fn new(chunks: usize) -> Self {
        let len = (chunks + 1) * CHUNK;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nobody's memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        let base = (at.expose_provenance() as u64).next_multiple_of(CHUNK_BYTES);
        Self { base }
    }

    #[expect(unsafe_code, reason = "the memory is known by address only")]
    fn word(self, offset: u64) -> &'static AtomicU64 {
        let at = std::ptr::with_exposed_provenance::<AtomicU64>(
            usize::try_from(self.base + offset).unwrap(),
        );
        // SAFETY: the word lies in a mapping that is never unmapped, is aligned, and is only ever used
        // as an atomic or by the kernel.
        unsafe { &*at }
    }

    fn span(self, offset: u64, len: u64) -> Span {
        Span::new(Addr(self.base + offset), len)
    }

    /// One word of each page.
    fn fill(self, offset: u64, len: u64, seed: u64) {
        for at in (offset..offset + len).step_by(512) {
            self.word(at).store(at ^ seed, Ordering::Relaxed);
        }
    }

    fn check(self, offset: u64, len: u64, seed: u64) {
        for at in (offset..offset + len).step_by(512) {
            assert_eq!(self.word(at).load(Ordering::Relaxed), at ^ seed, "at {at:#x}");
        }
    }
}

struct World {
    host: LinuxHost,
    proc: ProcId,
    region: Area,
    limbo: Area,
    helper: HelperHandle,
    store_path: std::path::PathBuf,
    mailbox: Arc<Mailbox>,
    next_op: u64,
    _files: (Scratch, Scratch),
}

fn skip(why: &str) -> Option<World> {
    assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "skipped: {why}");
    eprintln!("skipped: {why}");
    None
}

impl World {
    fn new() -> Option<Self> {
        Self::with_budget(8 << 20)
    }

    /// A world whose share is 8 MiB, and whose manager was told `budget_bytes`.
    fn with_budget(budget_bytes: u64) -> Option<Self> {
        let Ok(device) = DeviceFd::open() else { return skip("no /dev/userfaultfd") };
        let features = KernelFeatures::probe(&[]).unwrap();
        if !features.uffd_move || !features.io_uring {
            return skip("the kernel lacks UFFDIO_MOVE or io_uring");
        }
        let (disk, state_dir) = (Scratch::on_disk(), Scratch::new());
        let store_path = disk.path("store");
        let store = Store::open(&StoreConfig {
            path: store_path.clone(),
            size_bytes: Some(DATA_OFFSET + 4 * SEGMENT_BYTES),
            create: true,
            state_dir: state_dir.path(""),
        })
        .unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let mailbox = Arc::new(Mailbox::new(Arc::clone(&wake)));
        let room = Arc::new(Room::new(64 << 20));
        let share = room.join(FAMILY, Class::Standard, 8 << 20, wake);
        let info = FamilyInfo { family: FAMILY, has_move: true, ..FamilyInfo::default() };
        let state = FamilyState::create(&state_dir.path("family"), &info).unwrap();
        let config = HostConfig {
            family: FAMILY,
            features,
            store,
            room,
            seat: Arc::new(Staging::new(64 << 20).unwrap().seat(FAMILY).unwrap()),
            share,
            budget_bytes,
            table: 1,
            mailbox: Arc::clone(&mailbox),
        };
        let mut host = LinuxHost::new(config, state).unwrap();

        let (region, limbo, nonce) = (Area::new(4), Area::new(2), Area::new(1));
        let (new, helper) = candidate(&device, limbo, nonce);
        let mut events = Vec::new();
        let proc = host.attach(Prepared::open(new).unwrap(), &mut events).unwrap();
        assert_eq!(events, [Event::ProcReady { proc, limbo: limbo.span(0, 2 * CHUNK_BYTES) }]);
        for n in 0..STREAM_BUFFERS {
            host.start(&Effect::WantStream);
            assert_eq!(host.outcomes.pop(), Some(Event::StreamLent { stream: n }));
        }
        let files = (disk, state_dir);
        Some(Self {
            host,
            proc,
            region,
            limbo,
            helper,
            store_path,
            mailbox,
            next_op: 1,
            _files: files,
        })
    }

    fn op(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op)
    }

    /// Turns until `wanted` picks an event; others are dropped.
    fn wait<T>(&mut self, wanted: impl Fn(&Event) -> Option<T>) -> T {
        let begun = Instant::now();
        let mut events = Vec::new();
        while begun.elapsed() < PATIENCE {
            let deadline = self.host.now().after_ns(20_000_000);
            self.host.collect(deadline, &mut events);
            if let Some(found) = events.drain(..).find_map(|event| wanted(&event)) {
                return found;
            }
        }
        panic!("what was waited for did not come in {PATIENCE:?}");
    }

    fn copied(&mut self, effect: &Effect) -> (u64, IoctlOutcome) {
        self.host.start(effect);
        self.wait(|event| match *event {
            Event::Copied { bytes, outcome, .. } => Some((bytes, outcome)),
            _ => None,
        })
    }

    fn commanded(&mut self, command: Command) -> (u64, CommandOutcome) {
        let op = self.op();
        self.host.start(&Effect::Command { op, proc: self.proc, command });
        self.wait_commanded(op)
    }

    fn wait_commanded(&mut self, wanted: OpId) -> (u64, CommandOutcome) {
        self.wait(|event| match *event {
            Event::Commanded { op, bytes, outcome } if op == wanted => Some((bytes, outcome)),
            _ => None,
        })
    }

    fn arm(&mut self, span: Span, on: bool) -> IoctlOutcome {
        let op = self.op();
        self.host.start(&Effect::Arm { op, proc: self.proc, span, on });
        self.wait(|event| match *event {
            Event::Armed { outcome, .. } => Some(outcome),
            _ => None,
        })
    }

    fn present(&mut self, at: Addr) -> u16 {
        let op = self.op();
        self.host.start(&Effect::ReadMap { op, proc: self.proc, at });
        self.wait(|event| match *event {
            Event::Mapped { present, known: true, .. } => Some(present),
            _ => None,
        })
    }

    fn written(&mut self, from: BufRange, slot: SlotId) -> bool {
        let op = self.op();
        self.host.start(&Effect::WriteSlots { op, from, slot });
        self.wait(|event| match *event {
            Event::Written { ok, .. } => Some(ok),
            _ => None,
        })
    }

    fn slots_read(&mut self, slot: SlotId, to: BufRange) -> (bool, PageMask) {
        let op = self.op();
        self.host.start(&Effect::ReadSlots { op, slot, to, demand: true });
        self.wait(|event| match *event {
            Event::SlotsRead { ok, damaged, .. } => Some((ok, damaged)),
            _ => None,
        })
    }

    fn slots_granted(&mut self) -> SlotId {
        self.host.start(&Effect::WantSlots);
        self.wait(|event| match *event {
            Event::SlotsGranted { first, .. } => Some(first),
            _ => None,
        })
    }

    /// Releases the process and sees the family end.
    fn end(mut self) {
        self.host.start(&Effect::Release { proc: self.proc });
        let mut events = Vec::new();
        let begun = Instant::now();
        while !self.host.is_finished() {
            assert!(begun.elapsed() < PATIENCE);
            self.host.collect(Tick(0), &mut events);
        }
        assert!(self.host.state().procs.all().is_empty());
        self.helper.reap(PATIENCE).unwrap();
    }
}

/// This process as one that is to be attached, and its helper.
fn candidate(device: &DeviceFd, limbo: Area, nonce: Area) -> (NewProcess, HelperHandle) {
    let new_uffd = |features| -> OwnedFd {
        let fd = new_from_device(device.as_fd()).unwrap();
        handshake(fd.as_fd(), features).unwrap();
        fd
    };
    let arena = new_uffd(abi::FEATURE_EVENT_UNMAP | abi::FEATURE_PAGEFAULT_FLAG_WP);
    let limbo_fd = Uffd::from_fd(new_uffd(abi::FEATURE_SIGBUS));
    limbo_fd.register(limbo.base, 2 * CHUNK_BYTES, Mode::MISSING).unwrap();
    let limbo_fd = limbo_fd.into_fd();
    let ring = RingOwner::create().unwrap();
    let helper = helper::spawn(&HelperConfig {
        ring: ring.memfd(),
        event: ring.eventfd(),
        arena: Some(arena.as_fd()),
        limbo: limbo_fd.as_fd(),
        hold: &[],
    })
    .unwrap();
    let pid = std::process::id().cast_signed();
    let new = NewProcess {
        pid,
        pidfd: pidfd::open(pid).unwrap(),
        helper_pid: helper.pid(),
        arena: Some(arena),
        limbo_fd,
        limbo: limbo.span(0, 2 * CHUNK_BYTES),
        nonce_page: Addr(nonce.base),
        ring,
    };
    (new, helper)
}

fn stream(n: u16, extents: u32) -> BufRange {
    BufRange { buf: Buffer::Stream(n), offset: 0, len: extents * EXTENT }
}

fn demand(n: u16) -> BufRange {
    BufRange { buf: Buffer::Demand(n), offset: 0, len: EXTENT }
}

#[test]
fn a_fault_is_served_and_a_write_to_a_protected_page_is_heard() {
    let Some(mut world) = World::new() else { return };
    let (region, proc) = (world.region, world.proc);
    assert_eq!(world.arm(region.span(0, CHUNK_BYTES), true), IoctlOutcome::Done);
    let page = page_size();

    let reader = thread::spawn(move || region.word(5 * page).load(Ordering::Relaxed));
    let fault = world.wait(|event| match *event {
        Event::Faulted { proc, at, write, protected } => Some((proc, at, write, protected)),
        _ => None,
    });
    assert_eq!(fault, (proc, Addr(region.base + 5 * page), false, false));
    let staged = world.host.io.staged_mut(demand(0)).unwrap();
    for (at, byte) in staged.iter_mut().enumerate() {
        *byte = u8::try_from(at % 251).unwrap();
    }
    let first = usize::try_from(5 * page).unwrap();
    let wanted = u64::from_ne_bytes(staged[first..first + 8].try_into().unwrap());
    let op = world.op();
    let copy = Effect::Copy { op, proc, from: demand(0), to: Addr(region.base), protect: true };
    assert_eq!(world.copied(&copy), (EXTENT_BYTES, IoctlOutcome::Done));
    assert_eq!(reader.join().unwrap(), wanted);
    assert_eq!(world.copied(&copy), (0, IoctlOutcome::Exists));

    let writer = thread::spawn(move || region.word(5 * page).store(9, Ordering::Relaxed));
    let write = world.wait(|event| match *event {
        Event::Faulted { at, write, protected, .. } => Some((at, write, protected)),
        _ => None,
    });
    assert_eq!(write, (Addr(region.base + 5 * page), true, true));
    let op = world.op();
    world.host.start(&Effect::Protect { op, proc, span: region.span(0, EXTENT_BYTES), on: false });
    let outcome = world.wait(|event| match *event {
        Event::Protected { outcome, .. } => Some(outcome),
        _ => None,
    });
    assert_eq!(outcome, IoctlOutcome::Done);
    writer.join().unwrap();

    let op = world.op();
    let zero = Effect::Zero { op, proc, to: region.span(EXTENT_BYTES, CHUNK_BYTES - EXTENT_BYTES) };
    assert_eq!(world.copied(&zero), (CHUNK_BYTES - EXTENT_BYTES, IoctlOutcome::Done));
    assert_eq!(region.word(CHUNK_BYTES - 8).load(Ordering::Relaxed), 0);
    assert_eq!(world.arm(region.span(0, CHUNK_BYTES), false), IoctlOutcome::Done);
    assert_eq!(world.arm(region.span(8 * CHUNK_BYTES, 0), true), IoctlOutcome::NoRange);
    world.end();
}

#[test]
fn a_chunk_goes_through_limbo_to_the_store_and_comes_back() {
    let Some(mut world) = World::new() else { return };
    let (region, limbo, proc) = (world.region, world.limbo, world.proc);
    let place = region.span(0, CHUNK_BYTES);
    region.fill(0, CHUNK_BYTES, 77);
    assert_eq!(world.arm(place, true), IoctlOutcome::Done);
    assert_eq!(world.present(Addr(region.base)), 0xffff);

    let (from, to) = (Addr(region.base), Addr(limbo.base));
    let moved = world.commanded(Command::Move { from, to, len: CHUNK_BYTES });
    assert_eq!(moved, (CHUNK_BYTES, CommandOutcome::Done));
    assert_eq!(world.present(from), 0);
    assert_eq!(world.present(to), 0xffff);

    let op = world.op();
    world.host.start(&Effect::ReadLimbo { op, proc, from: to, to: stream(0, 32) });
    let read = world.wait(|event| match *event {
        Event::LimboRead { bytes, .. } => Some(bytes),
        _ => None,
    });
    assert_eq!(read, CHUNK_BYTES);

    let first = world.slots_granted();
    assert!(world.written(stream(0, 32), first));
    let drop = Command::Drop(limbo.span(0, CHUNK_BYTES));
    assert_eq!(world.commanded(drop), (CHUNK_BYTES, CommandOutcome::Done));
    assert_eq!(world.present(to), 0);

    // Absent limbo reads short instead of hanging the reader.
    let op = world.op();
    world.host.start(&Effect::ReadLimbo { op, proc, from: to, to: stream(1, 32) });
    let read = world.wait(|event| match *event {
        Event::LimboRead { bytes, .. } => Some(bytes),
        _ => None,
    });
    assert_eq!(read, 0);

    let reader = thread::spawn(move || region.check(0, CHUNK_BYTES, 77));
    world.wait(|event| matches!(event, Event::Faulted { .. }).then_some(()));
    assert_eq!(world.slots_read(first, demand(3)), (true, 0));
    let op = world.op();
    let copy = Effect::Copy { op, proc, from: demand(3), to: from, protect: true };
    assert_eq!(world.copied(&copy), (EXTENT_BYTES, IoctlOutcome::Done));
    assert_eq!(world.slots_read(first.plus(1), stream(2, 31)), (true, 0));
    let op = world.op();
    let to = from.plus(EXTENT_BYTES);
    let copy = Effect::Copy { op, proc, from: stream(2, 31), to, protect: false };
    assert_eq!(world.copied(&copy), (31 * EXTENT_BYTES, IoctlOutcome::Done));
    reader.join().unwrap();
    world.end();
}

#[test]
fn what_the_device_changed_is_damaged_and_what_is_not_leased_is_refused() {
    let Some(mut world) = World::new() else { return };
    let first = world.slots_granted();
    for (at, byte) in world.host.io.staged_mut(stream(0, 8)).unwrap().iter_mut().enumerate() {
        *byte = u8::try_from(at % 253).unwrap();
    }
    assert!(world.written(stream(0, 8), first));
    assert_eq!(world.slots_read(first, stream(1, 8)), (true, 0));

    let file = OpenOptions::new().write(true).open(&world.store_path).unwrap();
    let offset = DATA_OFFSET + u64::from(first.0 - 1) * EXTENT_BYTES + 5 * EXTENT_BYTES + 4096;
    file.write_all_at(&[0xee; 4096], offset).unwrap();
    file.sync_all().unwrap();
    assert_eq!(world.slots_read(first, stream(1, 8)), (true, 1 << 1));
    assert_eq!(world.slots_read(first.plus(5), demand(0)), (true, 1 << 1));
    assert_eq!(world.slots_read(first.plus(6), stream(1, 2)), (true, 0));
    // Slots that were never written verify as nothing.
    assert_eq!(world.slots_read(first.plus(8), demand(0)), (true, PageMask::MAX));

    assert!(!world.written(stream(0, 8), first.plus(124)));
    assert_eq!(world.slots_read(SlotId(0), demand(0)), (false, 0));
    world.host.start(&Effect::ReturnSlots { first });
    assert_eq!(world.slots_read(first, demand(0)), (false, 0));
    world.end();
}

#[test]
fn commands_beyond_the_ring_wait_and_those_not_begun_can_be_cancelled() {
    let Some(mut world) = World::new() else { return };
    let (region, proc) = (world.region, world.proc);
    let ops: Vec<OpId> = (0..200).map(|_| world.op()).collect();
    for &op in &ops {
        let command = Command::Drop(region.span(0, CHUNK_BYTES));
        world.host.start(&Effect::Command { op, proc, command });
    }
    let last = ops[199];
    world.host.start(&Effect::Cancel { op: last, proc });
    let mut outcomes = Vec::new();
    let mut events = Vec::new();
    let begun = Instant::now();
    while outcomes.len() < ops.len() {
        assert!(begun.elapsed() < PATIENCE, "{} of {}", outcomes.len(), ops.len());
        let deadline = world.host.now().after_ns(20_000_000);
        world.host.collect(deadline, &mut events);
        outcomes.extend(events.drain(..).filter_map(|event| match event {
            Event::Commanded { op, outcome, .. } => Some((op, outcome)),
            _ => None,
        }));
    }
    let done: Vec<OpId> = outcomes
        .iter()
        .filter(|&&(_, outcome)| outcome == CommandOutcome::Done)
        .map(|&(op, _)| op)
        .collect();
    assert_eq!(done, ops[..199], "in the order in which they were ordered");
    assert!(outcomes.contains(&(last, CommandOutcome::Cancelled)));
    world.end();
}

#[test]
fn a_dead_helper_answers_everything_and_takes_nothing_more() {
    let Some(mut world) = World::new() else { return };
    let span = world.region.span(0, CHUNK_BYTES);
    let helper = pidfd::open(world.helper.pid()).unwrap();
    pidfd::send_signal(helper.as_fd(), libc::SIGKILL).unwrap();
    assert!(pidfd::wait(helper.as_fd(), PATIENCE).unwrap());
    let op = world.op();
    world.host.start(&Effect::Command { op, proc: world.proc, command: Command::Drop(span) });
    let (_, outcome) = world.wait_commanded(op);
    assert!(matches!(outcome, CommandOutcome::Stopped | CommandOutcome::NoHelper), "{outcome:?}");
    assert_eq!(world.commanded(Command::Drop(span)), (0, CommandOutcome::NoHelper));
    world.end();
}

/// The client writes to the ring as it likes. What has been moved is then in limbo, whatever it says.
#[test]
fn behind_a_damaged_entry_nothing_counts_as_not_done() {
    let Some(mut world) = World::new() else { return };
    let (region, limbo, proc) = (world.region, world.limbo, world.proc);
    region.fill(0, CHUNK_BYTES, 3);
    assert_eq!(world.arm(region.span(0, CHUNK_BYTES), true), IoctlOutcome::Done);
    let moves: Vec<OpId> = (0..4)
        .map(|n| {
            let at = n * EXTENT_BYTES;
            let op = world.op();
            let (from, to) = (Addr(region.base + at), Addr(limbo.base + at));
            let command = Command::Move { from, to, len: EXTENT_BYTES };
            world.host.start(&Effect::Command { op, proc, command });
            op
        })
        .collect();
    // The words of the entries, whose layout is that of the ring.
    let attached = world.host.procs.get(proc).and_then(|known| known.attached.as_ref()).unwrap();
    let ring = shm::SharedFile::map(attached.ring.memfd().try_clone_to_owned().unwrap(), 65536);
    let ring = ring.unwrap();
    let word = |entry: u64| ring.at_u64(4096 + 64 * entry).unwrap();
    let begun = Instant::now();
    while (0..4).any(|entry| word(entry).load(Ordering::SeqCst) & 0xff != 3) {
        assert!(begun.elapsed() < PATIENCE, "the helper does not move");
        thread::sleep(Duration::from_millis(1));
    }
    word(0).store(u64::MAX, Ordering::SeqCst);
    let mut answers = Vec::new();
    while answers.len() < moves.len() {
        assert!(begun.elapsed() < PATIENCE, "{answers:?}");
        let deadline = world.host.now().after_ns(20_000_000);
        world.host.collect(deadline, &mut answers);
    }
    for (answer, op) in answers.into_iter().zip(moves) {
        let outcome = CommandOutcome::Stopped;
        assert_eq!(answer, Event::Commanded { op, bytes: 0, outcome });
    }
    assert_eq!(world.present(Addr(region.base + EXTENT_BYTES)), 0);
    assert_ne!(world.present(Addr(limbo.base + EXTENT_BYTES)), 0);
    world.end();
}

#[test]
fn a_letter_ends_a_sleep_and_a_stopping_host_returns() {
    let Some(mut world) = World::new() else { return };
    let mailbox = Arc::clone(&world.mailbox);
    let poster = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        assert!(mailbox.post(crate::mailbox::Mail::Stop));
    });
    let begun = Instant::now();
    let mut events = Vec::new();
    world.host.collect(Tick::NEVER, &mut events);
    assert!(begun.elapsed() >= Duration::from_millis(40));
    assert!(begun.elapsed() < PATIENCE);
    assert!(world.host.is_finished() && events.is_empty());
    poster.join().unwrap();
    world.end();
}

/// Whoever waited was told that it took too long, and nobody knows the number of the lease.
#[test]
fn a_pin_that_nobody_waits_for_is_undone() {
    let Some(mut world) = World::new() else { return };
    let (proc, request) = (world.proc, RequestId(1));
    let (answer, reply) = sync_channel(1);
    let claim = Claim::default();
    let what = Request::Pin { span: world.region.span(0, EXTENT_BYTES) };
    let letter = Mail::Ask { request, proc, what, claim: claim.clone(), answer };
    assert!(world.mailbox.post(letter));
    world.wait(|event| matches!(event, Event::Asked { .. }).then_some(()));
    assert!(claim.take());
    let lease = LeaseId(7);
    world.host.start(&Effect::Reply { request, reply: Reply::Lease(lease) });
    let asked = world.wait(|event| match event {
        Event::Asked { proc: of, what, .. } if *of == proc => Some(*what),
        _ => None,
    });
    assert_eq!(asked, Request::Unpin { lease });
    assert!(reply.try_recv().is_err());
    world.end();
}

#[test]
fn a_process_is_looked_at_while_it_has_no_connection() {
    let Some(mut world) = World::new() else { return };
    let proc = world.proc;
    for (letter, is_looked_at) in [(Mail::Gone { proc }, true), (Mail::Back { proc }, false)] {
        assert_ne!(world.host.needs_looks(), is_looked_at);
        assert!(world.mailbox.post(letter));
        world.host.collect(Tick(0), &mut Vec::new());
        assert_eq!(world.host.needs_looks(), is_looked_at);
    }
    world.end();
}

#[test]
fn what_was_withdrawn_is_not_attached() {
    let Some(mut world) = World::new() else { return };
    let device = DeviceFd::open().unwrap();
    let (new, mut helper) = candidate(&device, Area::new(2), Area::new(1));
    let (answer, reply) = sync_channel(1);
    let claim = Claim::default();
    assert!(claim.take());
    let new = Box::new(Prepared::open(new).unwrap());
    assert!(world.mailbox.post(Mail::Attach { new, claim, answer }));
    world.host.collect(Tick(0), &mut Vec::new());
    assert!(reply.try_recv().is_err());
    assert_eq!(world.host.state().procs.all().len(), 1);
    helper.stop();
    helper.reap(PATIENCE).unwrap();
    world.end();
}

#[test]
fn a_share_that_shrank_before_the_host_began_is_heard_of() {
    let Some(mut world) = World::with_budget(16 << 20) else { return };
    world.mailbox.wake().wake();
    let bytes = world.wait(|event| match event {
        Event::Budget { bytes } => Some(*bytes),
        _ => None,
    });
    assert_eq!(bytes, 8 << 20);
    world.end();
}

#[test]
fn a_message_stays_in_the_state_file_until_its_effects_have_begun() {
    let Some(mut world) = World::new() else { return };
    let (region, proc) = (world.region, world.proc);
    assert_eq!(world.arm(region.span(0, CHUNK_BYTES), true), IoctlOutcome::Done);
    let reader = thread::spawn(move || region.word(0).load(Ordering::Relaxed));
    world.wait(|event| matches!(event, Event::Faulted { .. }).then_some(()));
    let dir = world.host.state().dir().to_path_buf();
    let (state, found) = FamilyState::load(&dir).unwrap();
    assert_eq!(state.messages.pending(proc).len(), 1);
    assert_eq!(found.procs.len(), 1);
    assert_eq!(found.procs[0].helper_pid, world.helper.pid());
    let op = world.op();
    let zero = Effect::Zero { op, proc, to: region.span(0, EXTENT_BYTES) };
    assert_eq!(world.copied(&zero), (EXTENT_BYTES, IoctlOutcome::Done));
    assert_eq!(reader.join().unwrap(), 0);
    let (state, _found) = FamilyState::load(&dir).unwrap();
    assert!(state.messages.pending(proc).is_empty());
    world.end();
}

#[test]
fn a_helper_of_somebody_else_is_refused() {
    let Some(world) = World::new() else { return };
    let parent = std::os::unix::process::parent_id().cast_signed();
    let limbo_fd = shm::eventfd().unwrap();
    let pid = std::process::id().cast_signed();
    let new = NewProcess {
        pid,
        pidfd: pidfd::open(pid).unwrap(),
        helper_pid: parent,
        arena: None,
        limbo_fd,
        limbo: Span::default(),
        nonce_page: Addr(0),
        ring: RingOwner::create().unwrap(),
    };
    assert!(Prepared::open(new).is_err());
    world.end();
}

#[test]
fn a_helper_that_serves_another_ring_is_refused() {
    let Some(world) = World::new() else { return };
    let pid = std::process::id().cast_signed();
    let new = NewProcess {
        pid,
        pidfd: pidfd::open(pid).unwrap(),
        helper_pid: world.helper.pid(),
        arena: None,
        limbo_fd: shm::eventfd().unwrap(),
        limbo: Span::default(),
        nonce_page: Addr(0),
        ring: RingOwner::create().unwrap(),
    };
    let error = Prepared::open(new).unwrap_err();
    assert!(error.to_string().contains("another ring"), "{error}");
    world.end();
}
