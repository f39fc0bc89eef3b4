//! A client: one connection, its regions, and a heap of its own.

mod inside;
mod mapping;
mod regions;

use crate::arenas::{Allocated, NotLive};
use crate::cancel::Uncancelled;
use crate::fds;
use crate::fork;
use crate::heap::{ARENA_BYTES_FIRST, Discarded, Heap, Source};
use crate::link::{Birth, Config, FILTERED, Failed, Link, Patience, Undisturbed};
use crate::lock::Guarded;
use crate::sandbox::{self, Deed};
use crate::space::{CHUNK, Locking, Reserved, leave_unless, page_bytes};
use crate::status::{Error, Result, Status};
use inside::Inside;
use regions::{add_region, drop_region};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tiermgr_sys::process::{monotonic_ns, nap};
use tiermgr_wire::control::FamilyStats;
use tiermgr_wire::hello::Class;
use tiermgr_wire::reply::FromDaemon;
use tiermgr_wire::request::{Advice, Kind, ToDaemon};

/// A managed range. Its address in memory is the handle that C programs hold.
#[derive(Debug)]
pub struct Region {
    range: Reserved,
    number: u32,
    client: *const Client,
    /// The daemon was told to drop it and did not answer: it may be gone there, or going.
    drop_unanswered: bool,
}

// SAFETY: the pointer is only handed out; whoever follows it answers for it.
unsafe impl Send for Region {}

impl Region {
    /// First byte.
    #[must_use]
    pub const fn start(&self) -> usize {
        self.range.start()
    }

    /// The client that made it. It outlives its regions.
    #[must_use]
    pub const fn client(&self) -> *const Client {
        self.client
    }

    /// Length.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.range.bytes()
    }
}

/// Where the bytes of a range are. Also a part of [`crate::preloaded::Table`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Residency {
    /// In memory.
    pub resident_bytes: u64,
    /// On another tier only.
    pub parked_bytes: u64,
    /// Never touched.
    pub absent_bytes: u64,
    /// Native memory, touched or not.
    pub unarmed_bytes: u64,
    /// Lost.
    pub poisoned_bytes: u64,
}

#[derive(Debug)]
struct Connected {
    link: Link,
    /// Boxed, since handles point to them.
    #[expect(clippy::vec_box, reason = "C programs hold the addresses of the elements")]
    regions: Vec<Box<Region>>,
    /// Ranges that the daemon was told to manage and did not answer. It may still arm them: whatever the
    /// program had there next would be moved out. So they stay reserved, and are first to be asked for
    /// again.
    unanswered: Vec<Reserved>,
}

/// So long after a discard has found the daemon away others do not wait for it.
const AWAY_NS: u64 = 20_000_000_000;
/// Longer than a look for a daemon that is gone takes.
const LOOK_NS: u64 = 5_000_000_000;
/// Between two attempts to learn what became of a discard.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// More than these stay reserved for good. They are address space only.
const UNANSWERED_MAX: usize = 16;

/// Where small blocks are managed too, memory is given back in huge pages only. Small blocks die one by one
/// and leave holes: the kernel would split a huge page for each of them, and keep all of it until it is
/// short of memory.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// One connection with all that hangs on it.
#[derive(Debug)]
pub struct Client {
    connected: Guarded<Connected>,
    birth: Arc<Birth>,
    heap: Heap,
    class: Class,
    /// When a discard last found the daemon away.
    last_away_ns: AtomicU64,
    /// When whoever needs an arena looks again for a daemon that is gone; 0: it is not gone.
    next_look_ns: AtomicU64,
}

impl Client {
    /// Connects this process. The client is followed across forks from here on.
    ///
    /// # Errors
    /// As [`Link::connect`], and `TooManyClients`.
    pub fn connect(config: Config) -> Result<Box<Self>> {
        fork::install()?;
        // A child that a signal handler forks meanwhile would speak for its parent, and lacks what the helper stands on.
        let _undisturbed = Undisturbed::new();
        let heap = if config.extents {
            Heap::with_extents(HUGE_PAGE_BYTES)
        } else {
            Heap::new(page_bytes())
        };
        let link = Link::connect(config)?;
        let (class, birth) = (link.class(), link.birth());
        let client = Box::new(Self {
            connected: Guarded::new(Connected {
                link,
                regions: Vec::new(),
                unanswered: Vec::new(),
            }),
            birth,
            heap,
            class,
            last_away_ns: AtomicU64::new(0),
            next_look_ns: AtomicU64::new(0),
        });
        if fork::follow(&client) {
            return Ok(client);
        }
        if let Some(mut connected) = client.connected.enter() {
            connected.link.end(true);
        }
        Err(Error::new(Status::TooManyClients, "this process has 16 clients already"))
    }

    /// Drops all regions and arenas, then ends the connection and the helper.
    ///
    /// # Errors
    /// Where the daemon could not confirm, `ConnectionLost` above all: the ranges stay reserved then.
    pub fn disconnect(self: Box<Self>) -> Result<()> {
        fork::forget(&self);
        let mut connected = self.enter()?;
        let mut outcome = Ok(());
        while let Some(mut region) = connected.regions.pop() {
            match drop_region(&mut connected.link, &mut region) {
                Ok(()) => region.range.unmap(),
                Err(error) => outcome = Err(error),
            }
        }
        connected.link.end(outcome.is_ok());
        outcome
    }

    /// Class of the client.
    #[must_use]
    pub const fn class(&self) -> Class {
        self.class
    }

    /// Makes a region of at least `bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, `NoMemory` without address space, and what the daemon refuses.
    pub fn create_region(&self, bytes: usize, kind: Kind, name: &str) -> Result<*const Region> {
        let mut connected = self.enter()?;
        self.make_region(&mut connected, bytes, (kind, name), Patience::Restart)
    }

    fn make_region(
        &self,
        connected: &mut Connected,
        bytes: usize,
        what: (Kind, &str),
        patience: Patience,
    ) -> Result<*const Region> {
        let bytes =
            bytes.checked_next_multiple_of(CHUNK).filter(|&bytes| bytes > 0).ok_or(Error::new(
                Status::InvalidArgument,
                "a region needs at least one byte, and less than all",
            ))?;
        let Connected { link, regions, unanswered } = connected;
        if !sandbox::may(Deed::Grow) {
            return Err(FILTERED);
        }
        loop {
            let known = unanswered.iter().position(|range| range.bytes() == bytes);
            let is_known = known.is_some();
            let range = match known {
                Some(index) => unanswered.swap_remove(index),
                None => reserve(bytes)?,
            };
            match add_region(link, &range, what, patience) {
                Ok(number) => {
                    let region =
                        Region { range, number, client: &raw const *self, drop_unanswered: false };
                    let region = Box::new(region);
                    let handle = &raw const *region;
                    regions.push(region);
                    return Ok(handle);
                }
                // For its parent the daemon may have managed it already, and then for this child, too.
                Err(failed) if failed.is_newborn => {
                    if unanswered.len() < UNANSWERED_MAX {
                        unanswered.push(range);
                    }
                }
                // The daemon has managed it since the time before, under a number that nobody was told:
                // it stays where it is.
                Err(failed) if is_known && failed.error.status == Status::InvalidArgument => {}
                // That this message was refused says nothing of the one before.
                Err(failed) if failed.may_happen || is_known => {
                    if unanswered.len() < UNANSWERED_MAX {
                        unanswered.push(range);
                    }
                    return Err(failed.error);
                }
                Err(failed) => {
                    range.unmap();
                    return Err(failed.error);
                }
            }
        }
    }

    /// Frees a region, whose handle must not be used any more.
    ///
    /// # Errors
    /// `InvalidArgument` for a handle that is not this client's. With every other error the range stays
    /// and the handle is good: where the daemon did not answer, its bytes may be gone, and it is to be
    /// freed again.
    pub fn destroy_region(&self, handle: *const Region) -> Result<()> {
        let mut connected = self.enter()?;
        let Connected { link, regions, .. } = &mut *connected;
        let index = regions
            .iter()
            .position(|region| std::ptr::eq(&raw const **region, handle))
            .ok_or(Error::new(Status::InvalidArgument, "no such region of this client"))?;
        // The range is ours until the daemon says that nothing is on its way to it: a late move would
        // take pages from whatever is mapped there next.
        drop_region(link, &mut regions[index])?;
        regions.swap_remove(index).range.unmap();
        Ok(())
    }

    /// A block of the client's heap.
    ///
    /// # Errors
    /// As [`Heap::allocate`].
    pub fn allocate(&self, bytes: usize, align: usize) -> Result<Allocated> {
        self.heap.allocate(self, bytes, align)
    }

    /// An extent for an allocator of small blocks, given back by [`Self::release_extent`].
    ///
    /// # Errors
    /// As [`Heap::allocate`].
    pub fn allocate_extent(&self, bytes: usize, align: usize) -> Result<Allocated> {
        self.heap.allocate_extent(self, bytes, align)
    }

    /// Takes back pages of extents: parts and neighbours as well as whole ones.
    ///
    /// # Errors
    /// As [`Heap::release_extent`].
    pub fn release_extent(
        &self,
        address: usize,
        bytes: usize,
    ) -> std::result::Result<bool, NotLive> {
        self.heap.release_extent(self, address, bytes)
    }

    /// Has all freed memory forgotten that the daemon can forget now, and gives its bytes.
    pub fn trim(&self) -> usize {
        self.heap.trim(self)
    }

    /// Frees a block.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn free(&self, address: usize) -> std::result::Result<(), NotLive> {
        self.heap.free(self, address)
    }

    /// The heap.
    #[must_use]
    pub const fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Tells how a range will be used. `advice` is a `tiermgr_advice` of the C header.
    ///
    /// # Errors
    /// `InvalidArgument` for another number; else as [`Self::discard_range`].
    pub fn advise(&self, start: usize, len: usize, advice: i32) -> Result<()> {
        if advice == DONTNEED {
            return self.discard_range(start, len);
        }
        let advice = advice_of(advice)
            .ok_or(Error::new(Status::InvalidArgument, "no such tiermgr_advice"))?;
        self.ask_done(&ToDaemon::Advise { start: start as u64, len: len as u64, advice })
    }

    /// Drops the bytes of a range.
    ///
    /// # Errors
    /// `NotManaged`; `Unsupported` where nobody can drop them: the range is locked, or this process has
    /// no helper. With `ConnectionLost`, `ShuttingDown` and `Internal` they may be dropped later, at any
    /// time until this succeeds.
    pub fn discard_range(&self, start: usize, len: usize) -> Result<()> {
        Ok(self.try_discard(start, len, Patience::Restart)?)
    }

    /// Drops the bytes of a range, or changes nothing. Once the daemon has been asked this waits until it
    /// is known which of the two: as a touch of a parked page does, for a daemon that comes back too.
    ///
    /// # Errors
    /// As [`Self::discard_range`]; but nothing of what failed happens later.
    pub fn discard_surely(&self, start: usize, len: usize) -> Result<()> {
        let _uncancelled = Uncancelled::new();
        // By whom: a child that is forked meanwhile has asked nothing.
        let mut asked_by = None;
        loop {
            let is_asked = asked_by.is_some_and(|by| by == fds::own_pid());
            // Programs discard often: of a daemon that stays away not every call may wait.
            let away = monotonic_ns().saturating_sub(self.last_away_ns.load(Ordering::Relaxed));
            let patience =
                if is_asked || away > AWAY_NS { Patience::Restart } else { Patience::Brief };
            match self.try_discard(start, len, patience) {
                Ok(()) => return Ok(()),
                // A daemon that ends as it was told to has carried out what it had begun, and all bytes are
                // in their place: nothing is left that could happen, and nobody comes back.
                Err(failed) if failed.error.status == Status::ShuttingDown => {
                    return Err(failed.error);
                }
                Err(Failed { may_happen: true, .. }) => asked_by = Some(fds::own_pid()),
                // A daemon that is away says nothing of what it was asked before.
                Err(Failed { error, .. }) if is_asked && error.status == Status::ConnectionLost => {
                }
                Err(failed) => {
                    let status = failed.error.status;
                    if matches!(status, Status::ConnectionLost | Status::NotPermitted) {
                        self.last_away_ns.store(monotonic_ns(), Ordering::Relaxed);
                    }
                    return Err(failed.error);
                }
            }
            // Without the lock: others, and a fork, may need it meanwhile.
            nap(ASK_AGAIN);
        }
    }

    /// Drops the bytes of a range that nobody can look at, if that takes but a moment. Whatever is to be
    /// seen there next needs [`Self::discard_surely`] before.
    pub fn discard_soon(&self, start: usize, len: usize) {
        // What failed is tried again then, or when the block is freed.
        let _dropped = self.try_discard(start, len, Patience::Brief).is_ok();
    }

    fn try_discard(&self, start: usize, len: usize, patience: Patience) -> Answered<()> {
        let message = ToDaemon::Discard { start: start as u64, len: len as u64 };
        // Kept until the heap knows of the outcome: of two discards of one range the later one has the last
        // word.
        let mut connected = self.enter().map_err(Failed::never)?;
        match done(connected.link.request(&message, patience)) {
            Ok(()) => {
                self.heap.settle(start, len);
                Ok(())
            }
            Err(failed @ Failed { may_happen: true, .. }) => {
                self.heap.doubt(start, len);
                Err(failed)
            }
            Err(Failed { error, .. }) if error.status == Status::Protocol => {
                Err(Failed::never(Error::new(
                    Status::Unsupported,
                    "nobody can drop these bytes: the range is locked (mlock), or the helper of this \
                     process has ended; overwrite them instead",
                )))
            }
            Err(failed) => Err(failed),
        }
    }

    /// Gives advice that may be lost: this waits for a moment at most. `advice` is a `tiermgr_advice` but `DONTNEED`.
    pub fn hint(&self, start: usize, len: usize, advice: i32) {
        let Some(advice) = advice_of(advice) else { return };
        let message = ToDaemon::Advise { start: start as u64, len: len as u64, advice };
        if let Some(mut connected) = self.try_inside() {
            // Whether it was taken is of no consequence to the program.
            let _taken = connected.link.request(&message, Patience::Brief).is_ok();
        }
    }

    /// To be called after the program has locked all its memory: where pages wait before they are parked must
    /// not be locked, or what the program has locked would be parked all the same. Gives where that is.
    ///
    /// # Errors
    /// `Inside`, in a signal handler that interrupts a call.
    pub fn unlock_limbo(&self) -> Result<Option<Range<usize>>> {
        loop {
            let asked_by = fds::own_pid();
            let limbo = self.enter()?.link.unlock_limbo();
            // A child that was forked meanwhile has one of its own by now.
            if fds::own_pid() == asked_by {
                return Ok(limbo);
            }
        }
    }

    /// Starts to bring a range in.
    ///
    /// # Errors
    /// `NotManaged`, `ConnectionLost`.
    pub fn prefetch(&self, start: usize, len: usize) -> Result<()> {
        self.ask_done(&ToDaemon::Prefetch { start: start as u64, len: len as u64 })
    }

    /// Brings a range in, waits for it, and holds it.
    ///
    /// # Errors
    /// `NotManaged`, `NoRoom`, `DataLost`, `ConnectionLost`.
    pub fn pin(&self, start: usize, len: usize) -> Result<u64> {
        match self.ask(&ToDaemon::Pin { start: start as u64, len: len as u64 })? {
            FromDaemon::Lease(lease) => Ok(lease),
            _ => Err(Failed::odd().error),
        }
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// `InvalidArgument`, `ConnectionLost`.
    pub fn unpin(&self, lease: u64) -> Result<()> {
        self.ask_done(&ToDaemon::Unpin { lease })
    }

    /// Where a range is.
    ///
    /// # Errors
    /// `NotManaged`, `ConnectionLost`.
    pub fn residency(&self, start: usize, len: usize) -> Result<Residency> {
        match self.ask(&ToDaemon::Residency { start: start as u64, len: len as u64 })? {
            FromDaemon::Residency {
                resident_bytes,
                parked_bytes,
                absent_bytes,
                unarmed_bytes,
                poisoned_bytes,
            } => Ok(Residency {
                resident_bytes,
                parked_bytes,
                absent_bytes,
                unarmed_bytes,
                poisoned_bytes,
            }),
            _ => Err(Failed::odd().error),
        }
    }

    /// Counters of the family.
    ///
    /// # Errors
    /// `ConnectionLost`.
    pub fn statistics(&self) -> Result<FamilyStats> {
        match self.ask(&ToDaemon::Stats)? {
            FromDaemon::Stats(stats) => Ok(stats),
            _ => Err(Failed::odd().error),
        }
    }

    fn ask(&self, message: &ToDaemon) -> Result<FromDaemon> {
        Ok(self.enter()?.link.request(message, Patience::Restart)?)
    }

    fn ask_done(&self, message: &ToDaemon) -> Result<()> {
        Ok(done(self.enter()?.link.request(message, Patience::Restart))?)
    }

    /// A signal handler that has interrupted its thread in the heap is refused too: whoever has this lock may
    /// wait for the heap's, and the heap could not be told what became of a discard.
    fn enter(&self) -> Result<Inside<'_>> {
        let inside = Error::new(Status::Inside, "this thread is inside a call of tiermgr already");
        if self.heap.is_inside() {
            return Err(inside);
        }
        self.inside().ok_or(inside)
    }

    /// Discards what the heap has set aside for this thread. In a child that a signal handler has forked since
    /// then it is free, and may be somebody's.
    fn discard_held(&self, connected: Inside<'_>, address: usize, bytes: usize) -> Discarded {
        if self.heap.is_held(address, bytes) {
            tell_to_discard(connected, address, bytes)
        } else {
            Discarded::Refused
        }
    }

    /// First half of a fork: nobody is inside, so that the child's copy is whole. The order is that
    /// in which the locks nest.
    pub(crate) fn hold_for_fork(&self) {
        self.heap.hold_growth_for_fork();
        let _held = self.connected.hold_for_fork();
        self.birth.note_armed();
        self.heap.hold_arenas_for_fork();
    }

    /// Second half of a fork, in the parent and, after [`Self::join_family_after_fork`], in the child.
    pub(crate) fn release_after_fork(&self) {
        drop(self.connected.end_fork());
        self.heap.release_after_fork();
        // A handler may have forked as the lock was taken, or given back.
        self.join_if_newborn();
    }

    /// In a forked child.
    pub(crate) fn join_family_after_fork(&self) {
        if self.connected.is_inside() {
            // A signal handler has forked. The call that it interrupted goes on here, too: it joins, at its next request
            // or as it leaves. Where the handler never returns nobody can.
            self.birth.begin_inside();
        } else if let Some(mut connected) = self.connected.enter() {
            connected.link.join_family_after_fork();
        }
        self.heap.forget_discards();
    }
}

impl Drop for Client {
    /// One that was never disconnected may be followed yet.
    fn drop(&mut self) {
        fork::forget(self);
    }
}

impl Source for Client {
    fn add_arena(&self, bytes: usize) -> Result<usize> {
        let looks_ns = self.next_look_ns.load(Ordering::Relaxed);
        if looks_ns != 0 {
            // To all others it is away until this one has looked.
            self.next_look_ns.store(monotonic_ns() + LOOK_NS, Ordering::Relaxed);
        }
        let entered =
            self.enter().inspect_err(|_| self.next_look_ns.store(looks_ns, Ordering::Relaxed));
        let mut connected = entered?;
        let what = (Kind::Heap, "arena");
        let region = self.make_region(&mut connected, bytes, what, Patience::Growth);
        let next_look_ns = connected.link.looks_again_ns().unwrap_or(0);
        self.next_look_ns.store(next_look_ns, Ordering::Relaxed);
        let region = region?;
        connected
            .regions
            .iter()
            .find(|known| std::ptr::eq(&raw const ***known, region))
            .map(|region| region.start())
            .ok_or(Error::new(Status::Internal, "a region that was just made is gone"))
    }

    fn first_arena_bytes(&self) -> usize {
        let told = self.try_inside().map(|connected| connected.link.arena_bytes());
        told.unwrap_or(ARENA_BYTES_FIRST)
    }

    fn is_away(&self) -> bool {
        let next_look_ns = self.next_look_ns.load(Ordering::Relaxed);
        next_look_ns != 0 && monotonic_ns() < next_look_ns
    }

    fn discard(&self, address: usize, bytes: usize) -> Discarded {
        // Another thread may be waiting there for a device.
        match self.try_inside() {
            Some(connected) => self.discard_held(connected, address, bytes),
            None => Discarded::Refused,
        }
    }

    fn is_answer_owed(&self) -> bool {
        self.try_inside().is_some_and(|connected| connected.link.owes_answer())
    }

    fn open(&self, range: &Range<usize>) -> io::Result<()> {
        leave_unless(Deed::Protect)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: memory of the heap that is in nobody's hands but this thread's.
        unsafe { tiermgr_sys::memory::protect(range.start, range.len(), access) }
    }
}

fn tell_to_discard(mut connected: Inside<'_>, address: usize, bytes: usize) -> Discarded {
    let message = ToDaemon::Discard { start: address as u64, len: bytes as u64 };
    match done(connected.link.request_as_same(&message, Patience::Brief)) {
        Ok(()) => Discarded::Done,
        Err(failed) if failed.may_happen => Discarded::Unknown,
        Err(_) => Discarded::Refused,
    }
}

fn reserve(bytes: usize) -> Result<Reserved> {
    let range = Reserved::new(bytes, Locking::OnTouch).map_err(|error| {
        Error::because(
            Status::NoMemory,
            format!("reserving {bytes} bytes of address space: {error}; see `ulimit -v`, and `ulimit -l` after mlockall"),
        )
    })?;
    range.advise(libc::MADV_HUGEPAGE);
    Ok(range)
}

/// `TIERMGR_ADVICE_DONTNEED`.
const DONTNEED: i32 = 7;

const fn advice_of(number: i32) -> Option<Advice> {
    Some(match number {
        0 => Advice::Normal,
        1 => Advice::WillNeed,
        2 => Advice::Cold,
        3 => Advice::Sequential,
        4 => Advice::Random,
        5 => Advice::Cyclic,
        6 => Advice::ReadMostly,
        _ => return None,
    })
}

type Answered<T> = std::result::Result<T, Failed>;

fn done(answer: Answered<FromDaemon>) -> Answered<()> {
    match answer? {
        FromDaemon::Done => Ok(()),
        _ => Err(Failed::odd()),
    }
}
