//! Who else serves `malloc` in this process. With some of them there is no living: then this library does
//! nothing, and says so, instead of mixing its blocks with theirs.

use crate::libc_next::Optional;
use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::ptr::NonNull;

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
    if let Some((_, name)) = SANITIZERS.iter().find(|(symbol, _)| called(symbol).is_some()) {
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
/// one that was called. There is none where this library has it.
pub(crate) const fn in_front(name: &'static CStr) -> Optional {
    Optional::new(name, theirs)
}

fn theirs(name: &CStr) -> Option<NonNull<c_void>> {
    let found = called(name)?;
    let place = place_of(found)?;
    if Some(place.base) == own_base() { None } else { NonNull::new(found) }
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

/// Of all functions of this name the one that the program calls, or a stub of the program that leads to it.
fn called(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Of all functions of this name the one that the program calls. Only before it begins.
fn first(name: &CStr) -> Option<*mut c_void> {
    called(name)
        .and_then(|found| if is_stub(found) { first_of_libraries(name) } else { Some(found) })
}

/// A program at a fixed place that takes the address of a function has a stub for it, and `dlsym` gives that.
fn is_stub(address: *mut c_void) -> bool {
    const RTLD_DL_SYMENT: c_int = 1;
    const SHN_UNDEF: u16 = 0;
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    let mut symbol = std::ptr::null_mut();
    // SAFETY: dladdr1 writes a `Dl_info` and a pointer, and does not follow the address.
    let known =
        unsafe { libc::dladdr1(address, info.as_mut_ptr(), &raw mut symbol, RTLD_DL_SYMENT) } != 0;
    if !known || symbol.is_null() {
        return false;
    }
    // SAFETY: with this flag it is the entry in the symbol table of a file that is loaded.
    unsafe { (*symbol.cast::<libc::Elf64_Sym>()).st_shndx == SHN_UNDEF }
}

/// `struct link_map`, as far as it is public.
#[repr(C)]
struct LinkMap {
    _bias: usize,
    name: *const c_char,
    _dynamic: *mut c_void,
    next: *const LinkMap,
}

/// The first library with a function of this name, in the order in which the dynamic linker looks.
fn first_of_libraries(name: &CStr) -> Option<*mut c_void> {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: null stands for the program, which is loaded.
    let program = unsafe { libc::dlopen(std::ptr::null(), flags) };
    // SAFETY: the request writes one pointer.
    if unsafe { libc::dlinfo(program, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0 {
        return None;
    }
    // SAFETY: the list is that of what is loaded, and nothing is unloaded before the program begins.
    while let Some(entry) = unsafe { map.as_ref() } {
        map = entry.next;
        // SAFETY: the name of a file that is loaded; that of the program is empty.
        let file = unsafe { CStr::from_ptr(entry.name) };
        // SAFETY: the name ends with a zero byte, and nothing is loaded.
        let library = unsafe { libc::dlopen(entry.name, flags) };
        if file.is_empty() || library.is_null() {
            continue;
        }
        // SAFETY: as above. It looks in what the library needs, too.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        // SAFETY: it was opened above, and is needed by whoever loaded it.
        unsafe { libc::dlclose(library) };
        if !found.is_null() && place_of(found).is_some_and(|place| place.name == file) {
            return Some(found);
        }
    }
    None
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
