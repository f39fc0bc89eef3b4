//! What programs ask about their allocator: what the next library says, and ours on top of it.
//!
//! `mallopt` is left to libc, whose malloc serves this library: what it sets has no meaning here.

use crate::libc_next::Optional;
use crate::{extents, route, small};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write;
use tiermgr::cancel::Uncancelled;
use tikv_jemalloc_sys as je;

static MALLOC_TRIM: Optional = Optional::next(c"malloc_trim");
static MALLINFO: Optional = Optional::next(c"mallinfo");
static MALLINFO2: Optional = Optional::next(c"mallinfo2");
static MALLOC_INFO: Optional = Optional::next(c"malloc_info");
static MALLOC_STATS: Optional = Optional::next(c"malloc_stats");
static MALLCTL: Optional = Optional::next(c"mallctl");
static MALLCTLNAMETOMIB: Optional = Optional::next(c"mallctlnametomib");
static MALLCTLBYMIB: Optional = Optional::next(c"mallctlbymib");

/// Looks up what the next libraries have of these.
pub(crate) fn look_up() {
    let all = [
        &MALLOC_TRIM,
        &MALLINFO,
        &MALLINFO2,
        &MALLOC_INFO,
        &MALLOC_STATS,
        &MALLCTL,
        &MALLCTLNAMETOMIB,
        &MALLCTLBYMIB,
    ];
    for function in all {
        let _found = function.get();
    }
}

/// Calls a function of the next library; gives `$else` where it has none of that name.
macro_rules! forward {
    ($name:ident as fn($($type:ty),*) -> $result:ty, ($($argument:expr),*), $else:expr) => {
        match $name.get() {
            Some(function) => {
                // SAFETY: the C function of that name has this type.
                let function = unsafe {
                    std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn($($type),*) -> $result,
                    >(function.as_ptr())
                };
                // SAFETY: the next function has the contract of this one.
                unsafe { function($($argument),*) }
            }
            None => $else,
        }
    };
}

/// Bytes of managed blocks and of the memory that they lie in.
#[derive(Default)]
struct Use {
    small_bytes: usize,
    extent_bytes: usize,
    large_bytes: usize,
}

/// What is in use of ours, beside what the next library has.
fn in_use() -> Use {
    let Some(client) = route::client() else { return Use::default() };
    let extent_bytes = if small::is_on() { extents::bytes() } else { 0 };
    // Whoever is in the middle of a fork learns only how much there is at most.
    let small_bytes = if small::may_ask() { extents::allocated_bytes() } else { extent_bytes };
    let large_bytes =
        client.heap().live_bytes().saturating_sub(extent_bytes + client.heap().mapped_bytes());
    Use { small_bytes, extent_bytes, large_bytes }
}

/// # Safety
/// malloc_trim(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc_trim(pad: usize) -> c_int {
    let trimmed = forward!(MALLOC_TRIM as fn(usize) -> c_int, (pad), 0);
    let Some(client) = route::client() else { return trimmed };
    let before = crate::errno::get();
    if small::may_ask() {
        extents::purge();
    }
    let forgotten = client.trim();
    crate::errno::set(before);
    c_int::from(trimmed != 0 || forgotten > 0)
}

/// # Safety
/// mallinfo(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mallinfo() -> libc::mallinfo {
    // SAFETY: integers only.
    let nothing: libc::mallinfo = unsafe { std::mem::zeroed() };
    let mut info = forward!(MALLINFO as fn() -> libc::mallinfo, (), nothing);
    let add = |to: &mut c_int, bytes: usize| {
        *to = to.saturating_add(c_int::try_from(bytes).unwrap_or(c_int::MAX));
    };
    let ours = in_use();
    add(&mut info.arena, ours.extent_bytes);
    add(&mut info.hblkhd, ours.large_bytes);
    add(&mut info.uordblks, ours.small_bytes);
    add(&mut info.fordblks, ours.extent_bytes.saturating_sub(ours.small_bytes));
    info
}

/// As glibc has it: small blocks and what they lie in, and large blocks apart.
///
/// # Safety
/// mallinfo2(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mallinfo2() -> libc::mallinfo2 {
    // SAFETY: integers only.
    let nothing: libc::mallinfo2 = unsafe { std::mem::zeroed() };
    let mut info = forward!(MALLINFO2 as fn() -> libc::mallinfo2, (), nothing);
    let ours = in_use();
    info.arena += ours.extent_bytes;
    info.hblkhd += ours.large_bytes;
    info.uordblks += ours.small_bytes;
    info.fordblks += ours.extent_bytes.saturating_sub(ours.small_bytes);
    info
}

/// # Safety
/// malloc_info(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc_info(options: c_int, stream: *mut libc::FILE) -> c_int {
    let _uncancelled = Uncancelled::new();
    if route::client().is_none() {
        let missing = || {
            crate::errno::set(libc::ENOSYS);
            -1
        };
        return forward!(
            MALLOC_INFO as fn(c_int, *mut libc::FILE) -> c_int,
            (options, stream),
            missing()
        );
    }
    if options != 0 {
        return libc::EINVAL;
    }
    // SAFETY: integers only.
    let nothing: libc::mallinfo2 = unsafe { std::mem::zeroed() };
    let libc = forward!(MALLINFO2 as fn() -> libc::mallinfo2, (), nothing);
    let ours = in_use();
    let mut text = [0_u8; 512];
    let written = write!(
        &mut text[..511],
        "<malloc version=\"1\">\n<total type=\"libc\" size=\"{}\"/>\n\
         <total type=\"small\" size=\"{}\"/>\n<system type=\"extents\" size=\"{}\"/>\n\
         <total type=\"large\" size=\"{}\"/>\n</malloc>\n",
        libc.uordblks + libc.hblkhd,
        ours.small_bytes,
        ours.extent_bytes,
        ours.large_bytes,
    );
    // SAFETY: a text of ASCII characters that ends with a zero byte, and the caller's stream.
    let outcome = unsafe { libc::fputs(text.as_ptr().cast(), stream) };
    if written.is_ok() && outcome >= 0 { 0 } else { -1 }
}

/// # Safety
/// malloc_stats(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc_stats() {
    let _uncancelled = Uncancelled::new();
    if small::may_ask() {
        // SAFETY: no function and no options are jemalloc's defaults: all of it, on standard error.
        unsafe { je::malloc_stats_print(None, std::ptr::null_mut(), std::ptr::null()) };
    } else {
        forward!(MALLOC_STATS as fn() -> (), (), ());
    }
}

/// Names that would make arenas without our hooks, or take the hooks from ours: blocks of theirs would
/// not be known as jemalloc's when they are freed.
fn is_hidden(name: &CStr) -> bool {
    let name = name.to_bytes();
    name == b"arenas.create"
        || name == b"experimental.arenas_create_ext"
        || (name.starts_with(b"arena.") && name.ends_with(b".extent_hooks"))
}

/// # Safety
/// jemalloc(3), but for `EAGAIN` in the middle of a fork; as there are programs that look for this function to learn
/// whether jemalloc is their malloc, `ENOENT` says that it is not.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mallctl(
    name: *const c_char,
    old: *mut c_void,
    old_bytes: *mut usize,
    new: *mut c_void,
    new_bytes: usize,
) -> c_int {
    if !small::is_on() {
        return forward!(
            MALLCTL as fn(*const c_char, *mut c_void, *mut usize, *mut c_void, usize) -> c_int,
            (name, old, old_bytes, new, new_bytes),
            libc::ENOENT
        );
    }
    if !small::may_ask() {
        return libc::EAGAIN;
    }
    // SAFETY: by contract.
    if is_hidden(unsafe { CStr::from_ptr(name) }) {
        return libc::ENOENT;
    }
    // SAFETY: the same contract.
    unsafe { je::mallctl(name, old, old_bytes, new, new_bytes) }
}

/// # Safety
/// See [`mallctl`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mallctlnametomib(
    name: *const c_char,
    mib: *mut usize,
    length: *mut usize,
) -> c_int {
    if !small::is_on() {
        return forward!(
            MALLCTLNAMETOMIB as fn(*const c_char, *mut usize, *mut usize) -> c_int,
            (name, mib, length),
            libc::ENOENT
        );
    }
    if !small::may_ask() {
        return libc::EAGAIN;
    }
    // SAFETY: by contract.
    if is_hidden(unsafe { CStr::from_ptr(name) }) {
        return libc::ENOENT;
    }
    // SAFETY: the same contract.
    unsafe { je::mallctlnametomib(name, mib, length) }
}

/// # Safety
/// See [`mallctl`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mallctlbymib(
    mib: *const usize,
    length: usize,
    old: *mut c_void,
    old_bytes: *mut usize,
    new: *mut c_void,
    new_bytes: usize,
) -> c_int {
    if !small::is_on() {
        return forward!(
            MALLCTLBYMIB
                as fn(*const usize, usize, *mut c_void, *mut usize, *mut c_void, usize) -> c_int,
            (mib, length, old, old_bytes, new, new_bytes),
            libc::ENOENT
        );
    }
    if !small::may_ask() {
        return libc::EAGAIN;
    }
    // SAFETY: the same contract.
    unsafe { je::mallctlbymib(mib, length, old, old_bytes, new, new_bytes) }
}
