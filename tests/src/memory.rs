//! Memory of the test process that userfaultfd serves, and the ways to touch it.
//!
//! The tests play both parts: threads of the test are the client, the test itself is the daemon. Areas are
//! never unmapped behind a borrower's back: they live as long as the process, and are reached through raw
//! volatile accesses only, so that a page may come, go and change by the kernel's hand at any time.

use crate::harness::skip;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use tiermgr_sys::abi;
use tiermgr_sys::memory::{PageEntry, Pagemap};
use tiermgr_sys::nowait;
use tiermgr_sys::process::page_size;
use tiermgr_sys::uffd::{DeviceFd, Installed, Message, Msg, Uffd, handshake, new_from_device};

/// An anonymous private mapping, aligned to 2 MiB, for the life of the process.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    start: u64,
    pages: u64,
}

/// Bytes as a length of this machine.
///
/// # Panics
/// Never on 64-bit machines.
pub fn length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("64-bit machine")
}

fn result(rc: i32) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Area {
    /// Maps `pages` pages without touching them; small pages only, so that a test sees each for itself.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn new(pages: u64) -> Self {
        const ALIGN: usize = 2 << 20;
        let len = length(pages * page_size());
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Far below where the kernel looks first: a thread that starts would else put its signal stack into what a
        // test unmaps, and means to map again.
        static NEXT: AtomicUsize = AtomicUsize::new(1 << 44);
        let hint = NEXT.fetch_add((len + ALIGN).next_multiple_of(1 << 30), Ordering::Relaxed);
        let hint = std::ptr::without_provenance_mut(hint);
        // SAFETY: a new mapping where there was none aliases nothing; without MAP_FIXED the address is a hint.
        let base = unsafe { libc::mmap(hint, len + ALIGN, access, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        let start = base.expose_provenance().next_multiple_of(ALIGN);
        let area = Self { start: start as u64, pages };
        area.advise(0, pages, libc::MADV_NOHUGEPAGE).expect("madvise");
        area
    }

    /// Maps, and writes `first + page number` into the first word of each page.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn filled(pages: u64, first: u64) -> Self {
        let area = Self::new(pages);
        area.fill(first);
        area
    }

    /// Writes `first + page number` into the first word of each page.
    pub fn fill(&self, first: u64) {
        for page in 0..self.pages {
            self.write(page, first + page);
        }
    }

    /// Address of a page.
    pub fn at(&self, page: u64) -> u64 {
        self.start + page * page_size()
    }

    /// Pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.pages * page_size()
    }

    /// Whether it has no page.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    fn word(&self, page: u64) -> *mut u64 {
        assert!(page < self.pages);
        std::ptr::with_exposed_provenance_mut(length(self.at(page)))
    }

    /// The first word of a page. Blocks while the page is absent and served.
    pub fn read(&self, page: u64) -> u64 {
        // SAFETY: inside a mapping that lives as long as the process, aligned; nothing is ever borrowed
        // from it.
        unsafe { self.word(page).read_volatile() }
    }

    /// Writes the first word of a page. Blocks while the page is absent or protected, and served.
    pub fn write(&self, page: u64, value: u64) {
        // SAFETY: as in `read`.
        unsafe { self.word(page).write_volatile(value) };
    }

    /// madvise of some pages.
    ///
    /// # Errors
    /// That of madvise.
    pub fn advise(&self, page: u64, pages: u64, advice: i32) -> io::Result<()> {
        assert!(page + pages <= self.pages);
        let at = self.word(page.min(self.pages - 1)).cast();
        // SAFETY: inside the area, from which nothing is borrowed.
        result(unsafe { libc::madvise(at, length(pages * page_size()), advice) })
    }

    /// mprotect of some pages.
    ///
    /// # Errors
    /// That of mprotect.
    pub fn set_access(&self, page: u64, pages: u64, access: i32) -> io::Result<()> {
        // SAFETY: as in `advise`.
        result(unsafe {
            libc::mprotect(self.word(page).cast(), length(pages * page_size()), access)
        })
    }

    /// mlock of some pages.
    ///
    /// # Errors
    /// That of mlock.
    pub fn lock(&self, page: u64, pages: u64) -> io::Result<()> {
        // SAFETY: as in `advise`.
        result(unsafe { libc::mlock(self.word(page).cast(), length(pages * page_size())) })
    }

    /// munmap of some pages: they must not be touched afterwards.
    ///
    /// # Errors
    /// That of munmap.
    pub fn unmap(&self, page: u64, pages: u64) -> io::Result<()> {
        // SAFETY: as in `advise`; touching what is gone ends the test by a signal, and nothing worse, as
        // long as the address is used again only through `map_again`.
        result(unsafe { libc::munmap(self.word(page).cast(), length(pages * page_size())) })
    }

    /// Maps new anonymous memory where [`Area::unmap`] left a gap.
    ///
    /// # Errors
    /// EEXIST: something else lies there by now.
    pub fn map_again(&self, page: u64, pages: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let len = length(pages * page_size());
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: MAP_FIXED_NOREPLACE replaces nothing.
        let base = unsafe { libc::mmap(self.word(page).cast(), len, access, flags, -1, 0) };
        if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// mremap of some pages to where another area lies, which is gone afterwards; gives the new address.
    ///
    /// # Errors
    /// That of mremap.
    pub fn move_to(&self, page: u64, pages: u64, to: &Self) -> io::Result<u64> {
        assert!(page + pages <= self.pages && pages <= to.pages);
        let len = length(pages * page_size());
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let target = to.word(0).cast::<libc::c_void>();
        // SAFETY: both ranges lie inside areas, from which nothing is borrowed.
        let base = unsafe { libc::mremap(self.word(page).cast(), len, len, flags, target) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(base.expose_provenance() as u64)
    }

    /// What pagemap says of a page.
    ///
    /// # Panics
    /// When pagemap cannot be read.
    pub fn entry(&self, page: u64) -> PageEntry {
        entry_of(std::process::id().cast_signed(), self.at(page))
    }

    /// Whether a page is mapped.
    pub fn present(&self, page: u64) -> bool {
        self.entry(page).present()
    }

    /// How many of its pages are mapped.
    pub fn present_pages(&self) -> u64 {
        (0..self.pages).map(|page| u64::from(self.present(page))).sum()
    }
}

/// What pagemap says of one page of a process.
///
/// # Panics
/// When pagemap cannot be read.
pub fn entry_of(pid: i32, address: u64) -> PageEntry {
    let mut entry = [PageEntry::default()];
    let map = Pagemap::open(pid).expect("pagemap");
    assert_eq!(map.read(address, &mut entry).expect("pagemap"), 1);
    entry[0]
}

/// UFFDIO_MOVE of `pages` pages between two areas of this process.
pub fn move_pages(
    uffd: &Uffd,
    (to, to_page): (&Area, u64),
    (from, from_page): (&Area, u64),
    pages: u64,
    allow_holes: bool,
) -> Installed {
    assert!(to_page + pages <= to.pages && from_page + pages <= from.pages);
    let len = pages * page_size();
    // SAFETY: both ranges lie inside areas, in which there is no object.
    unsafe { uffd.move_pages(to.at(to_page), from.at(from_page), len, allow_holes) }
}

/// A page of bytes whose first word is `value`.
pub fn page_of(value: u64) -> Vec<u8> {
    let mut page = vec![0; length(page_size())];
    page[..8].copy_from_slice(&value.to_ne_bytes());
    page
}

/// Features of the descriptor that serves arenas.
pub const ARENA: u64 = abi::FEATURE_PAGEFAULT_FLAG_WP
    | abi::FEATURE_EVENT_FORK
    | abi::FEATURE_EVENT_REMAP
    | abi::FEATURE_EVENT_UNMAP;

/// Features of the descriptor that serves limbo, where pages move.
pub const LIMBO: u64 = abi::FEATURE_SIGBUS | abi::FEATURE_MOVE;

/// A userfaultfd of this process with these features; where there is none, says so and gives `None`.
///
/// # Panics
/// In strict mode where there is none.
pub fn userfaultfd(features: u64) -> Option<Uffd> {
    let made = || -> io::Result<Uffd> {
        // Whoever reads a FORK message must not allocate: the C library keeps malloc locked until the fork
        // is through.
        nowait::prepare_thread()?;
        let device = DeviceFd::open().map_err(io::Error::other)?;
        let fd = new_from_device(device.as_fd())?;
        handshake(fd.as_fd(), features)?;
        Ok(Uffd::from_fd(fd))
    };
    match made() {
        Ok(uffd) => Some(uffd),
        Err(error) => {
            skip(format_args!("no userfaultfd with features {features:#x}: {error}"));
            None
        }
    }
}

/// Waits for the next message, ten seconds at most.
///
/// # Panics
/// When none comes, or the descriptor fails.
pub fn next_message(uffd: &Uffd) -> Message {
    let mut messages = [Msg::default()];
    let mut got = None;
    crate::harness::eventually(std::time::Duration::from_secs(10), || {
        if uffd.read_messages(&mut messages).expect("read") == 1 {
            got = messages[0].parse();
        }
        got.is_some()
    });
    got.expect("a message within ten seconds")
}

/// A message, if there is one now.
///
/// # Panics
/// When the descriptor fails.
pub fn message_now(uffd: &Uffd) -> Option<Message> {
    let mut messages = [Msg::default()];
    match uffd.read_messages(&mut messages).expect("read") {
        0 => None,
        _ => messages[0].parse(),
    }
}

/// Takes the descriptor that a FORK message brought.
///
/// # Panics
/// When the message is another one.
pub fn take_child(message: Message) -> Uffd {
    let Message::Fork { fd } = message else { panic!("not a fork: {message:?}") };
    // SAFETY: the message has just installed this descriptor, and each message is taken once.
    unsafe { Uffd::adopt(fd) }.expect("the child's userfaultfd")
}

/// How a child ended that ran a closure.
#[derive(Debug)]
pub struct Child {
    /// Its process id.
    pub pid: i32,
}

impl Child {
    /// Waits for the end and gives the exit status, or 128 + signal.
    ///
    /// # Panics
    /// When it is no child any more.
    pub fn wait(self) -> i32 {
        wait_for(self.pid)
    }

    /// Kills it at once.
    pub fn kill(&self) {
        // SAFETY: kill takes integers; the child was not waited for, so its number is its own.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }
}

/// Waits until a child has ended, and gives its exit status, or 128 + signal.
///
/// # Panics
/// When it is no child, or was waited for before.
pub fn wait_for(child: i32) -> i32 {
    let mut status = 0;
    loop {
        // SAFETY: waitpid writes one int.
        let pid = unsafe { libc::waitpid(child, &raw mut status, 0) };
        if pid == child {
            break;
        }
        let error = io::Error::last_os_error();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted, "waiting for {child}: {error}");
    }
    if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}

/// Forks; the child runs `body` and exits with what it gives. The child must not take a lock that another
/// thread of the test may hold: no printing, no assertion; memory from malloc is allowed, as the C library
/// takes care of its own locks. It ends at the latest after `SECONDS_MAX`.
///
/// # Panics
/// When there is no process left.
pub fn fork(body: impl FnOnce() -> i32) -> Child {
    /// Longer than any child of a test should live.
    const SECONDS_MAX: u32 = 60;
    // SAFETY: the child calls what is documented above and then ends without running destructors.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: takes an integer.
        unsafe { libc::alarm(SECONDS_MAX) };
        let status = body();
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(status) };
    }
    Child { pid }
}
