//! One address space: its page table, its registrations, and who sleeps on it.

use super::frames::{FrameId, Frames};
use tiermgr_core::event::IoctlOutcome;
use tiermgr_core::page::PageMask;
use tiermgr_core::units::{Addr, CHUNK_BYTES, EXTENT_BYTES, Span};

/// A page table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pte {
    /// Nothing, or a write-protect marker.
    Absent {
        /// `PTE_MARKER_UFFD_WP`.
        marker: bool,
    },
    /// `UFFDIO_POISON`: accesses raise SIGBUS.
    Poison,
    /// Mapped.
    Present {
        /// To here.
        frame: FrameId,
        /// Write-protected by userfaultfd.
        wp: bool,
        /// `PageAnonExclusive`: not shared with a forked process. Stays clear after the other has
        /// gone, until somebody writes.
        exclusive: bool,
    },
}

impl Pte {
    /// Nothing at all.
    pub const NONE: Self = Self::Absent { marker: false };

    /// The frame, where one is mapped.
    #[must_use]
    pub const fn frame(self) -> Option<FrameId> {
        match self {
            Self::Present { frame, .. } => Some(frame),
            _ => None,
        }
    }
}

/// What kind of mapping a page lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vma {
    /// None.
    Hole,
    /// Private anonymous memory that was given to tiermgr.
    Managed {
        /// Registered for missing and write-protect faults.
        armed: bool,
    },
    /// A mapping that is none of ours, at an address that may once have been.
    Foreign,
}

/// A page of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// The entry.
    pub pte: Pte,
    /// The mapping.
    pub vma: Vma,
    /// A fork has shared it, and nobody has protected it since: a write copies it without a word.
    pub unshielded: bool,
    /// The page before it lies in another mapping, be it one with other protection.
    pub edge: bool,
}

impl Page {
    const HOLE: Self = Self { pte: Pte::NONE, vma: Vma::Hole, unshielded: false, edge: false };
    const LIMBO: Self = Self { vma: Vma::Managed { armed: true }, ..Self::HOLE };
}

/// Where things lie: an arena of chunks, and limbo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Chunks of the arena.
    pub arena_chunks: u64,
    /// Chunks of limbo.
    pub limbo_chunks: u64,
}

/// A page by its place in the two arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Page of the arena.
    Arena(usize),
    /// Page of limbo.
    Limbo(usize),
}

const ARENA: Addr = Addr(0x5000_0000_0000);
const LIMBO: Addr = Addr(0x6000_0000_0000);

impl Layout {
    /// Pages in a chunk.
    #[must_use]
    pub const fn chunk_pages(self) -> u64 {
        CHUNK_BYTES / self.page_bytes
    }

    /// Pages in an extent.
    #[must_use]
    pub const fn extent_pages(self) -> u64 {
        EXTENT_BYTES / self.page_bytes
    }

    /// Pages of the arena.
    #[must_use]
    pub const fn arena_pages(self) -> u64 {
        self.arena_chunks * self.chunk_pages()
    }

    /// The address of an arena page.
    #[must_use]
    pub const fn arena_addr(self, page: usize) -> Addr {
        ARENA.plus(page as u64 * self.page_bytes)
    }

    /// `pages` pages of the arena.
    #[must_use]
    pub const fn arena_span(self, page: usize, pages: u64) -> Span {
        Span::new(self.arena_addr(page), pages * self.page_bytes)
    }

    /// The limbo range.
    #[must_use]
    pub const fn limbo_span(self) -> Span {
        Span::new(LIMBO, self.limbo_chunks * CHUNK_BYTES)
    }

    /// Which page `at` lies in.
    #[must_use]
    pub fn place(self, at: Addr) -> Option<Place> {
        let arena = Span::new(ARENA, self.arena_chunks * CHUNK_BYTES);
        if arena.contains(at) {
            return Some(Place::Arena(crate::ix((at.0 - ARENA.0) / self.page_bytes)));
        }
        let limbo = self.limbo_span();
        limbo.contains(at).then(|| Place::Limbo(crate::ix((at.0 - LIMBO.0) / self.page_bytes)))
    }
}

/// Who sleeps in a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleeper {
    /// A thread of the program.
    Thread(usize),
    /// The helper, inside `MADV_POPULATE_WRITE`.
    Helper,
}

/// A fault that waits for its answer. Its message is unread until a `read` took it; a wake takes the
/// message away with the sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Who.
    pub who: Sleeper,
    /// Where, rounded down to the page.
    pub at: Addr,
    /// For writing.
    pub write: bool,
    /// Because of write protection.
    pub protected: bool,
    /// The message was read.
    pub read: bool,
}

/// A change of layout whose message is not read yet, or whose thread has not gone on yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutMessage {
    /// A fork. The number is the child's.
    Fork(u32),
    /// Memory was unmapped.
    Unmap(Span),
}

/// One address space.
#[derive(Debug)]
pub struct Mm {
    /// Where things lie.
    pub layout: Layout,
    arena: Vec<Page>,
    limbo: Vec<Page>,
    /// `mmap_changing`: fills are refused while it is not 0. Counts from the start of the change
    /// until the thread that made it has gone on.
    pub changing: u32,
    /// Messages that can be read, with the thread that waits for that.
    pub messages: Vec<(LayoutMessage, usize)>,
    /// Faults that sleep.
    pub waiters: Vec<Waiter>,
    /// Copies of shared pages that no message announced: a device's read-only pin, the pages that a
    /// device held at a fork, and writes between a fork and the protection that follows it.
    pub silent_copies: u64,
    /// A fork has made it share pages, and nobody has protected them yet.
    pub unshielded: bool,
    /// Protecting an absent page leaves a marker (`UFFD_FEATURE_WP_UNPOPULATED`).
    pub wp_unpopulated: bool,
    gone: bool,
}

impl Mm {
    /// An empty address space with a limbo.
    #[must_use]
    pub fn new(layout: Layout, wp_unpopulated: bool) -> Self {
        Self {
            layout,
            arena: vec![Page::HOLE; crate::ix(layout.arena_pages())],
            limbo: vec![Page::LIMBO; crate::ix(layout.limbo_chunks * layout.chunk_pages())],
            changing: 0,
            messages: Vec::new(),
            waiters: Vec::new(),
            silent_copies: 0,
            unshielded: false,
            wp_unpopulated,
            gone: false,
        }
    }

    /// Whether every ioctl answers ESRCH.
    #[must_use]
    pub const fn is_gone(&self) -> bool {
        self.gone
    }

    /// The page at `at`, mapped or not.
    #[must_use]
    pub fn page(&self, at: Addr) -> Option<Page> {
        match self.layout.place(at)? {
            Place::Arena(index) => self.arena.get(index).copied(),
            Place::Limbo(index) => self.limbo.get(index).copied(),
        }
    }

    /// The same, to change.
    pub fn page_mut(&mut self, at: Addr) -> Option<&mut Page> {
        match self.layout.place(at)? {
            Place::Arena(index) => self.arena.get_mut(index),
            Place::Limbo(index) => self.limbo.get_mut(index),
        }
    }

    /// Pages of the arena.
    #[must_use]
    pub fn arena(&self) -> &[Page] {
        &self.arena
    }

    /// Pages of limbo.
    #[must_use]
    pub fn limbo(&self) -> &[Page] {
        &self.limbo
    }

    /// The addresses of the pages of `span`.
    pub fn pages_of(&self, span: Span) -> impl Iterator<Item = Addr> + use<> {
        let bytes = self.layout.page_bytes;
        (0..span.len / bytes).map(move |index| span.start.plus(index * bytes))
    }

    fn is_aligned(&self, span: Span) -> bool {
        span.len > 0
            && span.start.0.is_multiple_of(self.layout.page_bytes)
            && span.len.is_multiple_of(self.layout.page_bytes)
            && span.start.0.checked_add(span.len).is_some()
    }

    fn is_all(&self, span: Span, wanted: impl Fn(Page) -> bool) -> bool {
        self.is_aligned(span) && self.pages_of(span).all(|at| self.page(at).is_some_and(&wanted))
    }

    /// Whether some page of `span` is not mapped.
    #[must_use]
    pub fn has_hole(&self, span: Span) -> bool {
        !self.is_all(span, |page| page.vma != Vma::Hole)
    }

    fn is_registered(&self, span: Span) -> bool {
        self.is_all(span, |page| page.vma == Vma::Managed { armed: true })
    }

    fn refusal(&self, span: Span) -> Option<IoctlOutcome> {
        if self.gone {
            Some(IoctlOutcome::NoProcess)
        } else if self.changing > 0 {
            Some(IoctlOutcome::EventsPending)
        } else if !self.is_registered(span) {
            Some(IoctlOutcome::NoRange)
        } else {
            None
        }
    }

    /// `UFFDIO_COPY`. Wakes what it installed; never overwrites. Returns the bytes installed.
    pub fn copy(
        &mut self,
        frames: &mut Frames,
        to: Addr,
        generations: &[u64],
        protect: bool,
    ) -> (u64, IoctlOutcome) {
        let span = Span::new(to, generations.len() as u64 * self.layout.page_bytes);
        if let Some(refusal) = self.refusal(span) {
            return (0, refusal);
        }
        let has_edge = |at| self.page(at).is_some_and(|page| page.edge);
        if self.pages_of(span).skip(1).any(has_edge) {
            return (0, IoctlOutcome::NoRange);
        }
        let mut bytes = 0;
        let mut outcome = IoctlOutcome::Done;
        for (at, &generation) in self.pages_of(span).zip(generations) {
            let Some(page) = self.page_mut(at) else { break };
            if page.pte.frame().is_some() {
                outcome = IoctlOutcome::Exists;
                break;
            }
            let frame = frames.alloc(generation);
            page.pte = Pte::Present { frame, wp: protect, exclusive: true };
            bytes += self.layout.page_bytes;
        }
        self.wake(Span::new(to, bytes));
        (bytes, outcome)
    }

    /// `mprotect`: mappings begin and end where a range has other protection than what lies beside it.
    pub fn split(&mut self, first: usize, pages: u64, apart: bool) {
        let end = first + crate::ix(pages);
        for page in first..=end.min(self.arena.len() - 1) {
            self.arena[page].edge = apart && (page == first || page == end);
        }
    }

    /// `UFFDIO_WRITEPROTECT`. Clearing wakes.
    pub fn protect(&mut self, span: Span, on: bool) -> IoctlOutcome {
        match self.refusal(span) {
            // Holes are passed over; a mapping that is not registered stops it, after a prefix.
            None | Some(IoctlOutcome::NoRange) => {}
            Some(refusal) => return refusal,
        }
        let markers = self.wp_unpopulated;
        // Whole chunks are protected only after a fork.
        self.unshielded &= !(on && span.len >= CHUNK_BYTES);
        let mut outcome = IoctlOutcome::NoRange;
        for at in self.pages_of(span) {
            let Some(page) = self.page_mut(at) else { return IoctlOutcome::NoRange };
            match page.vma {
                Vma::Hole => continue,
                Vma::Managed { armed: true } => outcome = IoctlOutcome::Done,
                Vma::Managed { armed: false } | Vma::Foreign => return IoctlOutcome::NoRange,
            }
            match &mut page.pte {
                Pte::Present { wp, .. } => *wp = on,
                Pte::Absent { marker } => *marker = on && markers,
                Pte::Poison => {}
            }
            page.unshielded &= !on;
        }
        if !on && outcome == IoctlOutcome::Done {
            self.wake(span);
        }
        outcome
    }

    /// `UFFDIO_WAKE`.
    pub fn wake(&mut self, span: Span) {
        self.waiters.retain(|waiter| !span.contains(waiter.at));
    }

    /// `UFFDIO_POISON`. Pages that are there stay. False where it must be tried again.
    pub fn poison(&mut self, span: Span) -> bool {
        if self.refusal(span) == Some(IoctlOutcome::EventsPending) {
            return false;
        }
        if self.refusal(span).is_none() {
            for at in self.pages_of(span) {
                if let Some(page) = self.page_mut(at)
                    && page.pte.frame().is_none()
                {
                    page.pte = Pte::Poison;
                }
            }
            self.wake(span);
        }
        true
    }

    /// `UFFDIO_REGISTER` or `UFFDIO_UNREGISTER`. The latter clears write protection and wakes.
    pub fn arm(&mut self, span: Span, on: bool) -> IoctlOutcome {
        if self.gone {
            return IoctlOutcome::NoProcess;
        }
        // Holes are passed over, as long as there is something in the range.
        let is_fit = self.is_all(span, |page| page.vma != Vma::Foreign);
        if !is_fit || self.is_all(span, |page| page.vma == Vma::Hole) {
            return IoctlOutcome::NoRange;
        }
        for at in self.pages_of(span) {
            let Some(page) = self.page_mut(at) else { break };
            if page.vma == Vma::Hole {
                continue;
            }
            page.vma = Vma::Managed { armed: on };
            if !on {
                match &mut page.pte {
                    Pte::Present { wp, .. } => *wp = false,
                    Pte::Absent { marker } => *marker = false,
                    Pte::Poison => {}
                }
            }
        }
        if !on {
            self.wake(span);
        }
        IoctlOutcome::Done
    }

    /// The last descriptor closes: everything is disarmed, and all sleepers go on.
    pub fn close_descriptors(&mut self) {
        for page in &mut self.arena {
            if let Vma::Managed { armed } = &mut page.vma {
                *armed = false;
            }
            if let Pte::Present { wp, .. } = &mut page.pte {
                *wp = false;
            }
        }
        self.waiters.clear();
    }

    /// `/proc/PID/pagemap` for one extent. `None` where the address space is gone.
    #[must_use]
    pub fn present(&self, extent: Addr) -> Option<PageMask> {
        if self.gone {
            return None;
        }
        let span = Span::new(extent, EXTENT_BYTES);
        let mut mask = 0;
        for (bit, at) in self.pages_of(span).enumerate() {
            if self.page(at).is_some_and(|page| page.pte.frame().is_some()) {
                mask |= 1 << bit;
            }
        }
        Some(mask)
    }

    /// `process_vm_readv` of limbo, whose descriptor has `UFFD_FEATURE_SIGBUS`: stops at the first
    /// page that is not there.
    #[must_use]
    pub fn read(&self, frames: &Frames, span: Span) -> Vec<u64> {
        if self.gone {
            return Vec::new();
        }
        self.pages_of(span)
            .map_while(|at| self.page(at)?.pte.frame())
            .map(|frame| frames.generation(frame))
            .collect()
    }

    /// Maps `pages` of the arena from `first`.
    pub fn map(&mut self, first: usize, pages: u64, vma: Vma) {
        for page in &mut self.arena[first..first + crate::ix(pages)] {
            debug_assert!(page.vma == Vma::Hole);
            page.vma = vma;
        }
    }

    /// `munmap`. Returns whether somebody must be told: some of it was registered.
    pub fn unmap(&mut self, frames: &mut Frames, first: usize, pages: u64) -> bool {
        let mut registered = false;
        for page in &mut self.arena[first..first + crate::ix(pages)] {
            registered |= page.vma == Vma::Managed { armed: true };
            if let Some(frame) = page.pte.frame() {
                frames.unmap(frame);
            }
            *page = Page::HOLE;
        }
        // Whoever slept there finds no mapping and gets SIGSEGV; the simulated client sees to it
        // that nobody does.
        let span = self.layout.arena_span(first, pages);
        self.wake(span);
        registered
    }

    /// `fork`: the child's copy. Limbo is `MADV_DONTFORK`; what a device holds is copied at once.
    pub fn fork(&mut self, frames: &mut Frames) -> Self {
        let mut child = Self::new(self.layout, self.wp_unpopulated);
        child.limbo.clear();
        let managed = self.arena.iter().any(|page| matches!(page.vma, Vma::Managed { .. }));
        child.unshielded = managed;
        self.unshielded |= managed;
        for (mine, copy) in self.arena.iter_mut().zip(&mut child.arena) {
            if let Pte::Present { frame, wp, exclusive } = &mut mine.pte {
                if frames.is_pinned(*frame) && *exclusive {
                    let own = frames.alloc(frames.generation(*frame));
                    child.silent_copies += 1;
                    let pte = Pte::Present { frame: own, wp: *wp, exclusive: true };
                    *copy = Page { pte, unshielded: false, ..*mine };
                    continue;
                }
                frames.map(*frame);
                *exclusive = false;
                mine.unshielded = true;
            }
            *copy = *mine;
        }
        child
    }

    /// A process that was forked makes a limbo of its own.
    pub fn make_limbo(&mut self) {
        let pages = self.layout.limbo_chunks * self.layout.chunk_pages();
        self.limbo = vec![Page::LIMBO; crate::ix(pages)];
    }

    /// The last task that uses it has ended.
    pub fn destroy(&mut self, frames: &mut Frames) {
        for page in self.arena.iter_mut().chain(&mut self.limbo) {
            if let Some(frame) = page.pte.frame() {
                frames.unmap(frame);
            }
            *page = Page::HOLE;
        }
        self.waiters.clear();
        self.messages.clear();
        self.gone = true;
    }
}
