//! Who else serves `malloc` in this process. With some of them there is no living: then this library does
//! nothing, and says so, instead of mixing its blocks with theirs.

use std::env;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Why this library does nothing in this process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Obstacle {
    /// A sanitizer, which knows every block and must be asked for each.
    Sanitizer(&'static str),
    /// valgrind, which knows neither the helper nor userfaultfd.
    Valgrind,
    /// Somebody else's `malloc` stands in front of ours.
    Malloc(Place),
    /// The library was loaded by `dlopen`, when `malloc` was chosen already.
    TooLate,
}

/// The file in which a function lies, as the dynamic linker names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    name: &'static CStr,
    base: usize,
}

/// Functions that only the runtime of a sanitizer has.
const SANITIZERS: [(&CStr, &str); 5] = [
    (c"__asan_init", "AddressSanitizer"),
    (c"__tsan_init", "ThreadSanitizer"),
    (c"__msan_init", "MemorySanitizer"),
    (c"__hwasan_init", "HWAddressSanitizer"),
    (c"__lsan_init", "LeakSanitizer"),
];

/// What stands against managing anything here.
pub(crate) fn obstacle() -> Option<Obstacle> {
    let preloads = env::var_os("LD_PRELOAD").unwrap_or_default();
    if contains(preloads.as_bytes(), b"/vgpreload_") {
        return Some(Obstacle::Valgrind);
    }
    if let Some((_, name)) = SANITIZERS.iter().find(|(symbol, _)| first(symbol).is_some()) {
        return Some(Obstacle::Sanitizer(name));
    }
    let malloc = place_of(first(c"malloc")?)?;
    let own = place_of((&raw const OWN).cast_mut().cast())?;
    if malloc.base == own.base {
        return None;
    }
    let own_name = own.name.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    if contains(preloads.as_bytes(), own_name) {
        Some(Obstacle::Malloc(malloc))
    } else {
        Some(Obstacle::TooLate)
    }
}

/// A function that has to come from whoever serves `malloc`, where that is somebody in front of us who lacks the
/// one that was called.
#[derive(Debug)]
pub(crate) struct InFront {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

static NOBODY: u8 = 0;

impl InFront {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// `None`: this library has it.
    pub(crate) fn get(&self) -> Option<*mut c_void> {
        let nobody = (&raw const NOBODY).cast_mut().cast::<c_void>();
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            let theirs = first(self.name).filter(|&address| {
                place_of(address).is_some_and(|place| Some(place.base) != own_base())
            });
            found = theirs.unwrap_or(nobody);
            self.found.store(found, Ordering::Relaxed);
        }
        (found != nobody).then_some(found)
    }
}

fn own_base() -> Option<usize> {
    Some(place_of((&raw const OWN).cast_mut().cast())?.base)
}

/// Something that lies in this library for certain: the address of a function that others have too could be
/// that of theirs.
static OWN: u8 = 0;

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Of all functions of this name the one that the program gets.
fn first(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

fn place_of(address: *mut c_void) -> Option<Place> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: dladdr writes one `Dl_info`, and does not follow the address.
    let known = unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0;
    if !known {
        return None;
    }
    // SAFETY: dladdr has filled it in, as it said.
    let info = unsafe { info.assume_init() };
    // SAFETY: the name of a file that is loaded, which stays as long as that does. Who has malloc is never
    // unloaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(Place { name, base: info.dli_fbase as usize })
}

impl Obstacle {
    /// Whether the program's own mappings can be managed all the same: those of its allocator, too.
    pub(crate) const fn leaves_mappings(self) -> bool {
        matches!(self, Self::Malloc(_))
    }

    /// Whether the program runs already.
    pub(crate) const fn is_too_late(self) -> bool {
        matches!(self, Self::TooLate)
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sanitizer(name) => write!(
                f,
                "{name} needs malloc to itself; build the program without it, or set TIERMGR_DISABLE=1"
            ),
            Self::Valgrind => f.write_str(
                "valgrind cannot follow what managed memory does; run the program without it, or set \
                 TIERMGR_DISABLE=1",
            ),
            Self::Malloc(place) => write!(
                f,
                "malloc is that of {}; put libtiermgr_preload.so in front of it in LD_PRELOAD, or, if it is \
                 the program's own, build it without",
                place.name.to_string_lossy()
            ),
            Self::TooLate => f.write_str(
                "libtiermgr_preload.so was loaded by dlopen, when malloc was chosen already; name it in \
                 LD_PRELOAD",
            ),
        }
    }
}
