//! The functions that ours stand in front of.
//!
//! `dlsym` may allocate, and so may whoever asks while it runs: until it has answered, callers are
//! sent to [`crate::bootstrap`].

use crate::atfork::Handler;
use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int, c_ulong, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

const UNKNOWN: u8 = 0;
const ASKING: u8 = 1;
const KNOWN: u8 = 2;

static STAGE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Written once, before `STAGE` is `KNOWN`, and only read after that.
struct Found(UnsafeCell<MaybeUninit<Next>>);

// SAFETY: one thread writes, the one that took `STAGE` from `UNKNOWN` to `ASKING`; nobody reads meanwhile.
unsafe impl Sync for Found {}

static FOUND: Found = Found(UnsafeCell::new(MaybeUninit::uninit()));

pub(crate) type RegisterAtfork =
    unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

macro_rules! next {
    ($($find:ident { $($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)* })*) => {
        /// The functions behind ours. All are there.
        pub(crate) struct Next {
            $($(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*)*
        }

        fn look_up() -> Next {
            Next {
                $($($field: {
                    let function = $find($symbol);
                    // SAFETY: that is the address of the C function of that name, whose type is this one.
                    unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) -> $result,
                        >(function)
                    }
                },)*)*
            }
        }
    };
}

next! {
    symbol {
        malloc = c"malloc": fn(usize) -> *mut c_void;
        calloc = c"calloc": fn(usize, usize) -> *mut c_void;
        realloc = c"realloc": fn(*mut c_void, usize) -> *mut c_void;
        free = c"free": fn(*mut c_void) -> ();
        memalign = c"memalign": fn(usize, usize) -> *mut c_void;
        posix_memalign = c"posix_memalign": fn(*mut *mut c_void, usize, usize) -> c_int;
        aligned_alloc = c"aligned_alloc": fn(usize, usize) -> *mut c_void;
        malloc_usable_size = c"malloc_usable_size": fn(*mut c_void) -> usize;
        close = c"close": fn(c_int) -> c_int;
        dup2 = c"dup2": fn(c_int, c_int) -> c_int;
        dup3 = c"dup3": fn(c_int, c_int, c_int) -> c_int;
        prctl = c"prctl": fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int;
        register_atfork = c"__register_atfork": fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    }
    libc_symbol {
        libc_malloc = c"malloc": fn(usize) -> *mut c_void;
        libc_memalign = c"memalign": fn(usize, usize) -> *mut c_void;
        libc_free = c"free": fn(*mut c_void) -> ();
    }
}

/// The functions, or `None` while they are being looked for.
#[inline]
pub(crate) fn next() -> Option<&'static Next> {
    if STAGE.load(Ordering::Acquire) == KNOWN { Some(collect()) } else { find() }
}

#[inline]
fn collect() -> &'static Next {
    // SAFETY: callers have seen `KNOWN`, after which nobody writes.
    let found = unsafe { &*FOUND.0.get() };
    // SAFETY: it was written before `KNOWN` was.
    unsafe { found.assume_init_ref() }
}

#[cold]
fn find() -> Option<&'static Next> {
    if STAGE.compare_exchange(UNKNOWN, ASKING, Ordering::Acquire, Ordering::Acquire).is_ok() {
        let found = look_up();
        // SAFETY: only one thread comes here, and nobody reads before `KNOWN`.
        unsafe { FOUND.0.get().write(MaybeUninit::new(found)) };
        crate::vm::look_up(symbol);
        STAGE.store(KNOWN, Ordering::Release);
    }
    (STAGE.load(Ordering::Acquire) == KNOWN).then(collect)
}

/// A function that may be there or not. It is looked for once, best by our constructor: `dlsym` waits for the `dlopen`
/// of another thread, and that may wait for a thread which calls the function (a constructor, for one it has made).
#[derive(Debug)]
pub(crate) struct Optional {
    name: &'static CStr,
    find: fn(&CStr) -> Option<NonNull<c_void>>,
    /// The function, [`NOBODY`], or null before it was looked for.
    found: AtomicPtr<c_void>,
}

static NOBODY: u8 = 0;

impl Optional {
    pub(crate) const fn new(
        name: &'static CStr,
        find: fn(&CStr) -> Option<NonNull<c_void>>,
    ) -> Self {
        Self { name, find, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Of the libraries behind this one.
    pub(crate) const fn next(name: &'static CStr) -> Self {
        Self::new(name, next_of)
    }

    pub(crate) fn get(&self) -> Option<NonNull<c_void>> {
        let nobody = (&raw const NOBODY).cast_mut().cast::<c_void>();
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            found = (self.find)(self.name).map_or(nobody, NonNull::as_ptr);
            self.found.store(found, Ordering::Relaxed);
        }
        if found == nobody { None } else { NonNull::new(found) }
    }
}

fn next_of(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the name ends with a zero byte. RTLD_NEXT: in the libraries behind this one.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) })
}

/// `__register_atfork`, for who cannot wait until all functions are known.
pub(crate) fn register_atfork() -> RegisterAtfork {
    let function = symbol(c"__register_atfork");
    // SAFETY: the C function of that name has this type.
    unsafe { std::mem::transmute::<*mut c_void, RegisterAtfork>(function) }
}

/// A function of libc's, whoever else has one of that name behind us. An allocator that a program brings
/// gives no versions to its functions.
fn libc_symbol(name: &CStr) -> *mut c_void {
    const VERSION: Option<&CStr> = if cfg!(target_arch = "x86_64") {
        Some(c"GLIBC_2.2.5")
    } else if cfg!(target_arch = "aarch64") {
        Some(c"GLIBC_2.17")
    } else {
        None
    };
    let found = VERSION.map_or(std::ptr::null_mut(), |version| {
        // SAFETY: both names end with a zero byte. RTLD_NEXT: in the libraries behind this one.
        unsafe { libc::dlvsym(libc::RTLD_NEXT, name.as_ptr(), version.as_ptr()) }
    });
    if found.is_null() { symbol(name) } else { found }
}

fn symbol(name: &CStr) -> *mut c_void {
    next_of(name).map_or_else(
        || crate::log::fatal(format_args!("no library provides {}", name.to_string_lossy())),
        NonNull::as_ptr,
    )
}
