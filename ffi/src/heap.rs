//! The heap of a client: arenas behind a lock, grown and trimmed by messages to the daemon.
//!
//! The lock is never held across a message: other threads go on allocating meanwhile. The question
//! that `free` of every block asks, "is this address ours?", is answered without a lock.

mod mapping;

pub use crate::arenas::Discarded;
use crate::arenas::{ARENAS_MAX, Allocated, Arenas, First, NotLive, Tables};
use crate::cancel::Uncancelled;
use crate::changes::{Changes, UNMAPPED};
use crate::link::AWAY;
use crate::lock::{Entered, Guarded};
use crate::space::{CHUNK, Table, ZeroIsValid, page_bytes};
use crate::status::{Error, Result, Status};
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tiermgr_core::units::low_u32;

/// First arena. Address space costs nothing, and fewer arenas mean fewer messages.
///
/// Where the daemon says nothing else; it says less where it has little memory itself.
pub const ARENA_BYTES_FIRST: usize = 4 << 30;
const ARENA_BYTES_MAX: usize = 64 << 30;
/// Below this a process with little address space gets just what it asks for.
const ARENA_BYTES_MIN: usize = 64 << 20;
/// Pieces that one `free` may have forgotten. It frees one: what is left is for the next.
const DISCARDS_MAX: usize = 16;
/// How often, and after which pauses, the daemon is asked about discards that it has not answered, before an
/// allocation is refused: a second in all where it is away.
const DOUBT_TRIES_MAX: usize = 200;
const DOUBT_PAUSE: Duration = Duration::from_millis(5);
/// How long an allocation waits for a daemon that has been asked and works, or waits for its device.
const DOUBT_OWED_MAX: Duration = Duration::from_secs(30);
/// Largest alignment that is served.
pub const ALIGN_MAX: usize = 1 << 30;

/// Where a heap gets memory, and who forgets it.
pub trait Source {
    /// A fresh range of `bytes`, a multiple of a chunk, that reads as zeros and stays for good.
    ///
    /// # Errors
    /// `NoMemory` and `NoRoom` make the heap ask for less; everything else is passed on.
    fn add_arena(&self, bytes: usize) -> Result<usize>;

    /// Makes a range read as zeros and cost nothing. `free` waits for this: no longer than a moment.
    fn discard(&self, address: usize, bytes: usize) -> Discarded;

    /// What the first arena should be, unless more is needed.
    fn first_arena_bytes(&self) -> usize {
        ARENA_BYTES_FIRST
    }

    /// Whether the daemon has been asked for something and has still to answer.
    fn is_answer_owed(&self) -> bool {
        false
    }

    /// Whether nobody is there who could give an arena: for a while it is of no use to ask.
    fn is_away(&self) -> bool {
        false
    }

    /// Gives access again to a range that a program had unmapped.
    ///
    /// # Errors
    /// `ENOMEM` where the process has as many mappings as it may have.
    fn open(&self, range: &Range<usize>) -> io::Result<()>;
}

#[derive(Debug)]
pub(crate) struct Bounds {
    pub(crate) start: AtomicUsize,
    pub(crate) end: AtomicUsize,
    /// One bit for each page, in a heap with extents: a block of [`Heap::allocate`] begins there, or a
    /// mapping has it.
    not_extents: OnceLock<&'static [AtomicU64]>,
}

/// Whose an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// It lies in no arena.
    Nobody,
    /// It is the first byte of a block of [`Heap::allocate`], or lies in one of a heap without extents; or it
    /// lies in a mapping of the program's, which is no block, and no extent either.
    Block,
    /// It lies in an extent.
    Extent,
}

/// A heap.
#[derive(Debug)]
pub struct Heap {
    arenas: Guarded<Arenas>,
    /// Held while an arena is being made, so that one is made where several threads need one. Holds
    /// the size of the next.
    growth: Guarded<usize>,
    pub(crate) bounds: [Bounds; ARENAS_MAX],
    pub(crate) bounds_len: AtomicUsize,
    has_extents: bool,
    pub(crate) changes: Changes,
    /// In mappings of the program's.
    mapped_bytes: AtomicUsize,
    /// There has been one.
    has_mappings: AtomicBool,
    /// What was unmapped last could not be discarded.
    is_refused: AtomicBool,
}

// SAFETY: the bits of an integer.
unsafe impl ZeroIsValid for AtomicU64 {}

/// What an arena that is being made needs beside its memory.
struct ArenaTables {
    of_arena: Tables,
    /// For [`Bounds::not_extents`].
    not_extents: Option<Table<AtomicU64>>,
}

impl ArenaTables {
    fn unmap(self) {
        self.of_arena.unmap();
        if let Some(bits) = self.not_extents {
            bits.unmap();
        }
    }
}

impl Heap {
    /// A heap without arenas, which has freed memory forgotten in whole pieces of `piece_bytes`.
    #[must_use]
    pub fn new(piece_bytes: usize) -> Self {
        let piece = low_u32((piece_bytes / page_bytes()) as u64);
        Self {
            arenas: Guarded::new(Arenas::new(page_bytes(), piece)),
            growth: Guarded::new(0),
            bounds: [const {
                Bounds {
                    start: AtomicUsize::new(0),
                    end: AtomicUsize::new(0),
                    not_extents: OnceLock::new(),
                }
            }; ARENAS_MAX],
            bounds_len: AtomicUsize::new(0),
            has_extents: false,
            changes: Changes::new(),
            mapped_bytes: AtomicUsize::new(0),
            has_mappings: AtomicBool::new(false),
            is_refused: AtomicBool::new(false),
        }
    }

    /// As [`Self::new`], for a heap from which another allocator takes extents. Blocks and extents lie
    /// among each other, since the daemon promises room for whole arenas: two kinds of them would each
    /// keep room from the other.
    #[must_use]
    pub fn with_extents(piece_bytes: usize) -> Self {
        Self { has_extents: true, ..Self::new(piece_bytes) }
    }

    /// Whether an address lies in an arena. Lock-free.
    #[must_use]
    pub fn owns(&self, address: usize) -> bool {
        self.arena_of(address).is_some()
    }

    fn arena_of(&self, address: usize) -> Option<usize> {
        let known = self.bounds_len.load(Ordering::Acquire);
        self.bounds.iter().take(known).position(|bounds| {
            address >= bounds.start.load(Ordering::Relaxed)
                && address < bounds.end.load(Ordering::Relaxed)
        })
    }

    /// Whose an address is that was given out and not given back. Lock-free.
    #[must_use]
    pub fn owner_of(&self, address: usize) -> Owner {
        let Some(arena) = self.arena_of(address) else { return Owner::Nobody };
        if !self.has_extents {
            return Owner::Block;
        }
        // Small blocks begin anywhere: where there are no mappings, only the first bytes of pages can be
        // anything but theirs.
        let is_first = address.is_multiple_of(page_bytes());
        if !is_first && !self.has_mappings.load(Ordering::Relaxed) {
            return Owner::Extent;
        }
        match self.bit_of(arena, address) {
            // Whoever has this address got it after the bit was changed for it, and nobody changes that
            // bit again before it is given back.
            Some((bits, mask)) if bits.load(Ordering::Relaxed) & mask != 0 => Owner::Block,
            _ => Owner::Extent,
        }
    }

    /// The word and the bit of the page in which `address` lies.
    fn bit_of(&self, arena: usize, address: usize) -> Option<(&'static AtomicU64, u64)> {
        let bounds = &self.bounds[arena];
        let page = (address - bounds.start.load(Ordering::Relaxed)) / page_bytes();
        let word = bounds.not_extents.get()?.get(page / 64)?;
        Some((word, 1 << (page % 64)))
    }

    fn set_owner(&self, address: usize, is_block: bool) {
        if self.has_extents
            && let Some((bits, mask)) =
                self.arena_of(address).and_then(|arena| self.bit_of(arena, address))
        {
            if is_block {
                bits.fetch_or(mask, Ordering::Relaxed);
            } else {
                bits.fetch_and(!mask, Ordering::Relaxed);
            }
        }
    }

    /// A block of at least `bytes` on a multiple of `align`.
    ///
    /// # Errors
    /// `InvalidArgument` for an alignment that is no power of two up to [`ALIGN_MAX`]; `NoMemory`
    /// where the size is absurd; `Inside` where this thread is inside the heap already; and what
    /// [`Source`] gives.
    pub fn allocate(&self, source: &impl Source, bytes: usize, align: usize) -> Result<Allocated> {
        let block = self.take(source, bytes, align, First::Dirty)?;
        self.set_owner(block.address, true);
        Ok(block)
    }

    /// An extent of at least `bytes` on a multiple of `align`.
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_extent(
        &self,
        source: &impl Source,
        bytes: usize,
        align: usize,
    ) -> Result<Allocated> {
        self.take(source, bytes, align, First::Dirty)
    }

    fn take(
        &self,
        source: &impl Source,
        bytes: usize,
        align: usize,
        first: First,
    ) -> Result<Allocated> {
        if !align.is_power_of_two() || align > ALIGN_MAX {
            return Err(Error::new(
                Status::InvalidArgument,
                "an alignment must be a power of two of at most 1 GiB",
            ));
        }
        if bytes > isize::MAX.unsigned_abs() - 2 * ALIGN_MAX {
            return Err(Error::new(Status::NoMemory, "more bytes than there are addresses"));
        }
        let allocate = || -> Result<Option<Allocated>> {
            Ok(self.arenas.enter().ok_or_else(inside)?.allocate(bytes, align, first))
        };
        let block = loop {
            if let Some(block) = allocate()? {
                break block;
            }
            let grown = if source.is_away() {
                // Not even behind the thread that may be looking for it.
                Err(AWAY)
            } else {
                let mut growth = self.growth.enter().ok_or_else(inside)?;
                // Another thread may have made an arena while this one waited.
                if let Some(block) = allocate()? {
                    break block;
                }
                self.grow(source, bytes, align, &mut growth)
            };
            if let Err(error) = grown {
                if self.free_doubtful(source) {
                    continue;
                }
                let mut arenas = self.arenas.enter().ok_or_else(inside)?;
                // Others have freed memory since this thread looked for it.
                let freed = arenas.allocate(bytes, align, first);
                break freed.or_else(|| arenas.allocate_across(bytes, align)).ok_or(error)?;
            }
        };
        let range = block.address..block.address + bytes.next_multiple_of(page_bytes());
        self.open(source, &range).map_or_else(
            |error| {
                let mut arenas = self.arenas.enter().ok_or_else(inside)?;
                arenas.put_back(block, bytes);
                // The kernel splits no more mappings for this process. What was never used is open.
                arenas
                    .allocate(bytes, align, First::Fresh)
                    .ok_or_else(|| Error::system("opening memory that was unmapped", &error))
            },
            |()| Ok(block),
        )
    }

    /// Gives access again to what of a range, which is this thread's alone, had been unmapped.
    fn open(&self, source: &impl Source, range: &Range<usize>) -> io::Result<()> {
        if self.is_unchanged(range.start) {
            return Ok(());
        }
        let unmapped = |flags| flags & UNMAPPED != 0;
        for run in self.runs(range.clone(), unmapped).filter(|run| run.kind) {
            source.open(&run.range)?;
            self.change(run.range, 0, UNMAPPED)?;
        }
        Ok(())
    }

    /// Frees the block at `address`. Pages of it that are changed still ([`Heap::change`]) are nobody's
    /// from here on.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn free(&self, source: &impl Source, address: usize) -> std::result::Result<(), NotLive> {
        // A thread that is inside already came here from a signal handler; its block is lost.
        let Some(mut arenas) = self.arenas.enter() else { return Ok(()) };
        if self.is_mapped(address) {
            return Err(NotLive);
        }
        arenas.free_but(address, |at, end| self.changed_run(at, end))?;
        // While the lock is held: nobody has got these pages anew.
        self.set_owner(address, false);
        self.discard_excess(source, arenas);
        Ok(())
    }

    /// Frees pages of extents, whole ones and parts. False: this thread is inside the heap already,
    /// and the pages are as they were.
    ///
    /// # Errors
    /// [`NotLive`], and nothing is changed.
    pub fn release_extent(
        &self,
        source: &impl Source,
        address: usize,
        bytes: usize,
    ) -> std::result::Result<bool, NotLive> {
        let Some(mut arenas) = self.arenas.enter() else { return Ok(false) };
        arenas.release_but(address, bytes, |at, end| self.changed_run(at, end))?;
        self.discard_excess(source, arenas);
        Ok(true)
    }

    fn discard_excess(&self, source: &impl Source, mut arenas: Entered<'_, Arenas>) {
        let mut next = arenas.take_doubtful().or_else(|| arenas.take_excess());
        drop(arenas);
        let mut discards = 0;
        while let Some(piece) = next {
            let outcome = source.discard(piece.address, piece.bytes);
            discards += 1;
            let Some(mut arenas) = self.arenas.enter() else { break };
            arenas.give_back(&piece, outcome);
            // Where the daemon is away or busy the next free tries again.
            next = match outcome {
                _ if discards == DISCARDS_MAX => None,
                Discarded::Done => arenas.take_doubtful().or_else(|| arenas.take_excess()),
                Discarded::Refused if piece.is_doubtful() => arenas.take_excess(),
                Discarded::Refused | Discarded::Unknown => None,
            };
        }
    }

    /// Where there is no other memory: waits for what became of discards that were not answered in time, for
    /// until then nobody can have what they were about. Whether any of that is free now.
    fn free_doubtful(&self, source: &impl Source) -> bool {
        let _uncancelled = Uncancelled::new();
        let mut is_any_free = false;
        let begun = Instant::now();
        let mut tries = 0;
        while tries < DOUBT_TRIES_MAX {
            if !source.is_answer_owed() || begun.elapsed() > DOUBT_OWED_MAX {
                tries += 1;
            }
            let taken = self.arenas.enter().and_then(|mut arenas| arenas.take_doubtful());
            let Some(piece) = taken else { break };
            let outcome = source.discard(piece.address, piece.bytes);
            if let Some(mut arenas) = self.arenas.enter() {
                arenas.give_back(&piece, outcome);
            }
            if outcome == Discarded::Done {
                is_any_free = true;
            } else if source.is_away() {
                break;
            } else {
                tiermgr_sys::process::nap(DOUBT_PAUSE);
            }
        }
        is_any_free
    }

    /// Has all freed memory forgotten, also what is kept otherwise, and gives the number of its bytes.
    /// Ends where the daemon is away or busy.
    pub fn trim(&self, source: &impl Source) -> usize {
        let mut forgotten = 0;
        loop {
            let taken = self.arenas.enter().and_then(|mut arenas| arenas.take_dirty());
            let Some(piece) = taken else { return forgotten };
            let outcome = source.discard(piece.address, piece.bytes);
            if let Some(mut arenas) = self.arenas.enter() {
                arenas.give_back(&piece, outcome);
            }
            if outcome != Discarded::Done {
                return forgotten;
            }
            forgotten += piece.bytes;
        }
    }

    /// Whether both addresses lie in one arena. Lock-free.
    #[must_use]
    pub fn is_one_arena(&self, a: usize, b: usize) -> bool {
        self.arena_of(a).is_some_and(|arena| self.arena_of(b) == Some(arena))
    }

    /// Bytes of live blocks.
    #[must_use]
    pub fn live_bytes(&self) -> usize {
        self.arenas.enter().map_or(0, |arenas| arenas.live_bytes())
    }

    /// Whether this thread is inside the heap: a signal handler that interrupted it asks.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.arenas.is_inside()
    }

    /// What may be used of the block at `address`.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn usable_bytes(&self, address: usize) -> std::result::Result<usize, NotLive> {
        let arenas = self.arenas.enter().ok_or(NotLive)?;
        if self.is_mapped(address) { Err(NotLive) } else { arenas.usable_bytes(address) }
    }

    /// Makes a block hold `bytes` where it stands; false if something is in the way.
    ///
    /// # Errors
    /// [`NotLive`].
    pub fn resize(&self, address: usize, bytes: usize) -> std::result::Result<bool, NotLive> {
        let Some(mut arenas) = self.arenas.enter() else { return Ok(false) };
        if self.is_mapped(address) {
            return Err(NotLive);
        }
        let end = address + arenas.usable_bytes(address)?;
        let wanted = address.saturating_add(bytes);
        // What was unmapped would have to be opened first.
        if wanted > end && self.changed_run(end, wanted) != (wanted, false) {
            return Ok(false);
        }
        // A part that the program has changed stays with the whole: it is put right when that is freed.
        if bytes < end - address
            && let rest = (address + bytes).next_multiple_of(page_bytes())
            && rest < end
            && self.changed_run(rest, end) != (end, false)
        {
            return Ok(true);
        }
        arenas.resize(address, bytes)
    }

    /// A discard of a range of live blocks may still happen: [`Arenas::doubt`].
    pub fn doubt(&self, start: usize, bytes: usize) {
        if self.owns(start)
            && let Some(mut arenas) = self.arenas.enter()
        {
            arenas.doubt(start, bytes);
        }
    }

    /// A discard of a range was confirmed: [`Arenas::settle`].
    pub fn settle(&self, start: usize, bytes: usize) {
        if self.owns(start)
            && let Some(mut arenas) = self.arenas.enter()
        {
            arenas.settle(start, bytes);
        }
    }

    /// See [`Arenas::is_held`].
    pub(crate) fn is_held(&self, address: usize, bytes: usize) -> bool {
        self.arenas.enter().is_some_and(|arenas| arenas.is_held(address, bytes))
    }

    /// In a forked child: [`Arenas::forget_discards`].
    pub(crate) fn forget_discards(&self) {
        if let Some(mut arenas) = self.arenas.enter() {
            arenas.forget_discards();
        }
    }

    fn grow(
        &self,
        source: &impl Source,
        bytes: usize,
        align: usize,
        next: &mut usize,
    ) -> Result<()> {
        let slack = align.max(CHUNK);
        let needed = (bytes + slack).next_multiple_of(CHUNK);
        let mut wanted = needed.max(match *next {
            0 => {
                let told = source.first_arena_bytes().clamp(ARENA_BYTES_MIN, ARENA_BYTES_FIRST);
                told.next_multiple_of(CHUNK)
            }
            next => next,
        });
        // Of those that have waited for their turn the first has asked.
        if source.is_away() {
            return Err(AWAY);
        }
        // What can fail fails before the daemon has promised anything.
        if self.arenas.enter().ok_or_else(inside)?.is_full() {
            return Err(Error::new(
                Status::NoMemory,
                "64 ranges of memory are all that a program can have",
            ));
        }
        let (start, tables) = loop {
            let made = self.tables(wanted).and_then(|tables| match source.add_arena(wanted) {
                Ok(start) => Ok((start, tables)),
                Err(error) => {
                    tables.unmap();
                    Err(error)
                }
            });
            match made {
                Ok(made) => break made,
                Err(error)
                    if matches!(error.status, Status::NoMemory | Status::NoRoom)
                        && wanted > needed =>
                {
                    let half = (wanted / 2).next_multiple_of(CHUNK);
                    wanted = if half < ARENA_BYTES_MIN { needed } else { half.max(needed) };
                }
                Err(error) => return Err(error),
            }
        };
        let mut arenas = self.arenas.enter().ok_or_else(inside)?;
        let index = arenas.count();
        // There is a slot: whoever adds one has the lock of growth, which this thread holds.
        arenas
            .add(start, tables.of_arena)
            .ok_or(Error::new(Status::Internal, "an arena was made for which there is no slot"))?;
        // While the lock is held: whoever gets a block of this arena must find it to be ours when it
        // frees it a moment later.
        if let Some(bits) = tables.not_extents {
            self.bounds[index].not_extents.get_or_init(|| bits.leak());
        }
        self.bounds[index].start.store(start, Ordering::Relaxed);
        self.bounds[index].end.store(start + wanted, Ordering::Relaxed);
        self.bounds_len.store(index + 1, Ordering::Release);
        drop(arenas);
        *next = (wanted * 2).clamp(ARENA_BYTES_MIN, ARENA_BYTES_MAX);
        Ok(())
    }

    fn tables(&self, bytes: usize) -> Result<ArenaTables> {
        let make = || -> io::Result<ArenaTables> {
            let of_arena = Tables::new(bytes, page_bytes())?;
            if !self.has_extents {
                return Ok(ArenaTables { of_arena, not_extents: None });
            }
            match Table::zeroed((bytes / page_bytes()).div_ceil(64)) {
                Ok(bits) => Ok(ArenaTables { of_arena, not_extents: Some(bits) }),
                Err(error) => {
                    of_arena.unmap();
                    Err(error)
                }
            }
        };
        make().map_err(|error| Error::system("tables for more memory; see `ulimit -v`", &error))
    }

    /// First half of a fork, first step: no arena is being made.
    pub(crate) fn hold_growth_for_fork(&self) {
        let _held = self.growth.hold_for_fork();
    }

    /// First half of a fork, last step: no block is being cut.
    pub(crate) fn hold_arenas_for_fork(&self) {
        let _held = self.arenas.hold_for_fork();
    }

    /// Second half of a fork.
    pub(crate) fn release_after_fork(&self) {
        drop(self.arenas.end_fork());
        drop(self.growth.end_fork());
    }
}

#[cold]
fn inside() -> Error {
    Error::new(Status::Inside, "this thread is inside the allocator already")
}

#[cfg(test)]
mod tests;
