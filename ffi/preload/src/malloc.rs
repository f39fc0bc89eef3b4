//! The exported functions. Results, `errno` and corner cases are those of glibc's manual.

use crate::chunks::{self, Seen};
use crate::libc_next::{Next, Optional, next};
use crate::neighbours::in_front;
use crate::route::{self, Outcome};
use crate::small::{self, Who};
use crate::{bootstrap, errno, log, vm};
use std::ffi::{c_int, c_void};
use std::ptr;
use tikv_jemalloc_sys as je;

/// What malloc promises on 64-bit machines.
const ALIGN: usize = 16;
/// Alignments above are left to libc: the addresses left out for them would count as memory that the program
/// is to have room for.
const ALIGN_MAX: usize = 64 << 20;

static FREE_IN_FRONT: Optional = in_front(c"free");
static REALLOC_IN_FRONT: Optional = in_front(c"realloc");

/// Looks up what may not be there.
pub(crate) fn look_up() {
    for function in [&FREE_IN_FRONT, &REALLOC_IN_FRONT] {
        let _found = function.get();
    }
}

fn no_memory() -> *mut c_void {
    errno::set(libc::ENOMEM);
    ptr::null_mut()
}

fn page_bytes() -> usize {
    tiermgr::space::page_bytes()
}

/// Asks for a large block. `Ok(null)`: refused, `errno` is set. `Err`: libc is to serve it.
fn large(bytes: usize, align: usize, zeroed: bool) -> Result<*mut c_void, ()> {
    if align > ALIGN_MAX || !align.is_power_of_two() {
        return Err(());
    }
    let before = errno::get();
    let outcome = route::allocate(bytes, align);
    errno::set(before);
    match outcome {
        Outcome::Libc => Err(()),
        Outcome::Refused => Ok(no_memory()),
        Outcome::Block { address, is_zero } => {
            if zeroed && !is_zero {
                // SAFETY: the block is new, nobody else's, and at least `bytes` long.
                unsafe { address.write_bytes(0, bytes) };
            }
            Ok(address.cast())
        }
    }
}

/// Asks for a small block; as [`large`]. jemalloc would give blocks of eight bytes on multiples of eight
/// only: so it is never asked for less than [`ALIGN`].
fn small(
    bytes: usize,
    align: usize,
    zeroed: bool,
    from_jemalloc: impl FnOnce() -> *mut c_void,
) -> Result<*mut c_void, ()> {
    if align > ALIGN_MAX || !align.is_power_of_two() {
        return Err(());
    }
    match small::who() {
        Who::Next => Err(()),
        Who::Nobody => Ok(no_memory()),
        Who::Jemalloc => {
            let block = from_jemalloc();
            // Where jemalloc gets no extent, the rules for large blocks say what is to be done.
            if block.is_null() { large(bytes, align, zeroed) } else { Ok(block) }
        }
    }
}

/// A new block from whoever is responsible for its size.
fn allocate(
    bytes: usize,
    align: usize,
    from_jemalloc: impl FnOnce() -> *mut c_void,
    from_libc: impl FnOnce(&Next) -> *mut c_void,
) -> *mut c_void {
    let managed = if route::is_large(bytes) {
        large(bytes, align, false)
    } else {
        small(bytes, align, false, from_jemalloc)
    };
    if let Ok(block) = managed {
        return block;
    }
    match next() {
        Some(next) => from_libc(next),
        None => early(bytes, align),
    }
}

fn early(bytes: usize, align: usize) -> *mut c_void {
    let block = bootstrap::allocate(bytes, align);
    if block.is_null() { no_memory() } else { block.cast() }
}

#[cold]
fn invalid(function: &str, block: *mut c_void) -> ! {
    log::fatal(format_args!("{function}(): {block:p} is not the address of a live block"))
}

/// # Safety
/// As ISO C 7.24.3 says; the same holds for every function here.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    if small::serves(bytes) {
        // SAFETY: it has no preconditions.
        let block = unsafe { je::malloc(bytes.max(ALIGN)) };
        if !block.is_null() {
            return block;
        }
    }
    malloc_otherwise(bytes)
}

#[inline(never)]
fn malloc_otherwise(bytes: usize) -> *mut c_void {
    allocate(
        bytes,
        ALIGN,
        // SAFETY: malloc has no preconditions.
        || unsafe { je::malloc(bytes.max(ALIGN)) },
        // SAFETY: as above.
        |next| unsafe { (next.malloc)(bytes) },
    )
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return no_memory() };
    if small::serves(bytes) {
        // SAFETY: it has no preconditions.
        let block = unsafe { je::calloc(1, bytes.max(ALIGN)) };
        if !block.is_null() {
            return block;
        }
    }
    calloc_otherwise(count, size, bytes)
}

#[inline(never)]
fn calloc_otherwise(count: usize, size: usize, bytes: usize) -> *mut c_void {
    let managed = if route::is_large(bytes) {
        large(bytes, ALIGN, true)
    } else {
        // SAFETY: it has the contract of this one.
        small(bytes, ALIGN, true, || unsafe { je::calloc(1, bytes.max(ALIGN)) })
    };
    if let Ok(block) = managed {
        return block;
    }
    match next() {
        // SAFETY: the next function has the contract of this one.
        Some(next) => unsafe { (next.calloc)(count, size) },
        None => early(bytes, ALIGN),
    }
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free(block: *mut c_void) {
    match chunks::look(block as usize) {
        // SAFETY: what lies in extents was given out by jemalloc.
        Seen::Extent if small::is_free_to_use() => unsafe { je::free(block) },
        // SAFETY: by contract.
        Seen::Foreign => unsafe { free_foreign(block) },
        // SAFETY: by contract.
        _ => unsafe { free_otherwise(block) },
    }
}

/// # Safety
/// See [`free`]; the block lies in no arena.
#[inline(always)]
unsafe fn free_foreign(block: *mut c_void) {
    if !bootstrap::owns(block as usize)
        && let Some(next) = next()
    {
        // SAFETY: neither ours nor an early one: libc's.
        unsafe { (next.free)(block) };
    }
}

/// # Safety
/// See [`free`].
#[inline(never)]
unsafe fn free_otherwise(block: *mut c_void) {
    if small::owns(block as usize) {
        // SAFETY: by contract.
        unsafe { small::free(block) };
    } else if let Some(client) = route::owner(block as usize) {
        let before = errno::get();
        vm::before_free(client, block as usize);
        if client.free(block as usize).is_err() {
            invalid("free", block);
        }
        errno::set(before);
    } else {
        // SAFETY: whose the block is was asked above; the rest is libc's.
        unsafe { free_foreign(block) };
    }
}

/// # Safety
/// As [`free`], where somebody in front of us may have given the block.
unsafe fn free_in_front(block: *mut c_void) {
    match FREE_IN_FRONT.get() {
        // SAFETY: by contract.
        None => unsafe { free(block) },
        Some(theirs) => {
            // SAFETY: the C function of that name has this type.
            let theirs = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(
                    theirs.as_ptr(),
                )
            };
            // SAFETY: by contract.
            unsafe { theirs(block) };
        }
    }
}

/// # Safety
/// C23 7.24.3.4: `block` was given by `malloc`, `calloc` or `realloc` for this size, or is null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free_sized(block: *mut c_void, _bytes: usize) {
    // SAFETY: by contract.
    unsafe { free_in_front(block) };
}

/// # Safety
/// C23 7.24.3.5: `block` was given by `aligned_alloc` for this alignment and size, or is null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free_aligned_sized(
    block: *mut c_void,
    _align: usize,
    _bytes: usize,
) {
    // SAFETY: by contract.
    unsafe { free_in_front(block) };
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    if bytes > 0
        && small::serves(bytes)
        && chunks::look(block as usize) == Seen::Extent
        && small::is_free_to_use()
    {
        // SAFETY: what lies in extents was given out by jemalloc.
        let resized = unsafe { je::realloc(block, bytes.max(ALIGN)) };
        if !resized.is_null() {
            return resized;
        }
    }
    // SAFETY: by contract.
    unsafe { realloc_otherwise(block, bytes) }
}

/// # Safety
/// See [`realloc`].
#[inline(never)]
unsafe fn realloc_otherwise(block: *mut c_void, bytes: usize) -> *mut c_void {
    if block.is_null() {
        // SAFETY: same contract.
        return unsafe { malloc(bytes) };
    }
    if small::owns(block as usize) {
        // SAFETY: by contract.
        return unsafe { realloc_small(block, bytes) };
    }
    if let Some(client) = route::owner(block as usize) {
        let before = errno::get();
        let usable = client.heap().usable_bytes(block as usize);
        errno::set(before);
        let Ok(usable) = usable else {
            // A signal handler that has interrupted this thread in the heap cannot look there.
            if client.heap().is_inside() {
                route::note_refused_inside(bytes);
                return no_memory();
            }
            invalid("realloc", block)
        };
        if bytes == 0 {
            // SAFETY: a live block, which the caller gives up.
            unsafe { free(block) };
            return ptr::null_mut();
        }
        if route::may_stay(bytes) {
            let resized = client.heap().resize(block as usize, bytes);
            errno::set(before);
            if resized == Ok(true) {
                return block;
            }
        }
        // SAFETY: a live block of `usable` bytes.
        return unsafe { moved(block, usable, bytes) };
    }
    if bootstrap::owns(block as usize) {
        let usable = bootstrap::bytes_of(block.cast());
        // SAFETY: a live block of `usable` bytes.
        return unsafe { moved(block, usable, bytes) };
    }
    let Some(next) = next() else { return no_memory() };
    if route::is_large(bytes) {
        // SAFETY: neither ours nor an early one: libc's.
        let usable = unsafe { (next.malloc_usable_size)(block) };
        if let Ok(new) = large(bytes, ALIGN, false) {
            if !new.is_null() {
                // SAFETY: both have that many bytes, and the new one is nobody else's.
                unsafe {
                    ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), usable.min(bytes))
                };
                // SAFETY: libc's, and given up by the caller.
                unsafe { (next.free)(block) };
            }
            return new;
        }
    }
    // SAFETY: the next function has the contract of this one.
    unsafe { (next.realloc)(block, bytes) }
}

/// # Safety
/// A live block of jemalloc's.
unsafe fn realloc_small(block: *mut c_void, bytes: usize) -> *mut c_void {
    if bytes == 0 {
        // SAFETY: a live block, which the caller gives up.
        unsafe { free(block) };
        return ptr::null_mut();
    }
    if !route::is_large(bytes) {
        // SAFETY: by contract.
        let resized = unsafe { small::resize(block, bytes.max(ALIGN)) };
        if !resized.is_null() {
            return resized;
        }
    }
    // SAFETY: by contract.
    let usable = unsafe { small::usable_bytes(block) };
    // SAFETY: a live block of `usable` bytes.
    unsafe { moved(block, usable, bytes) }
}

/// # Safety
/// `block` is live, has `usable` bytes, and is given up by the caller if the result is not null.
unsafe fn moved(block: *mut c_void, usable: usize, bytes: usize) -> *mut c_void {
    // SAFETY: malloc has no preconditions.
    let new = unsafe { malloc(bytes) };
    if !new.is_null() {
        // SAFETY: both have that many bytes, and the new one is nobody else's.
        unsafe { ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), usable.min(bytes)) };
        // SAFETY: by contract.
        unsafe { free(block) };
    }
    new
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn reallocarray(
    block: *mut c_void,
    count: usize,
    size: usize,
) -> *mut c_void {
    type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
    match (count.checked_mul(size), REALLOC_IN_FRONT.get()) {
        // SAFETY: same contract.
        (Some(bytes), None) => unsafe { realloc(block, bytes) },
        (Some(bytes), Some(theirs)) => {
            // SAFETY: the C function of that name has this type.
            let theirs = unsafe { std::mem::transmute::<*mut c_void, Realloc>(theirs.as_ptr()) };
            // SAFETY: same contract; the block is theirs.
            unsafe { theirs(block, bytes) }
        }
        (None, _) => no_memory(),
    }
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_memalign(
    block_out: *mut *mut c_void,
    align: usize,
    bytes: usize,
) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    // POSIX leaves errno alone here: the result is the error.
    let before = errno::get();
    let managed = if route::is_large(bytes) {
        large(bytes, align, false)
    } else {
        // SAFETY: it has no preconditions.
        small(bytes, align, false, || unsafe {
            je::aligned_alloc(align.max(ALIGN), bytes.max(ALIGN))
        })
    };
    if let Ok(block) = managed {
        errno::set(before);
        if block.is_null() {
            return libc::ENOMEM;
        }
        // SAFETY: by contract.
        unsafe { block_out.write(block) };
        return 0;
    }
    match next() {
        // SAFETY: the next function has the contract of this one.
        Some(next) => unsafe { (next.posix_memalign)(block_out, align, bytes) },
        None => {
            let block = early(bytes, align);
            errno::set(before);
            if block.is_null() {
                return libc::ENOMEM;
            }
            // SAFETY: by contract.
            unsafe { block_out.write(block) };
            0
        }
    }
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    let from_jemalloc = || {
        // SAFETY: it has no preconditions.
        unsafe { je::aligned_alloc(align.max(ALIGN), bytes.max(ALIGN)) }
    };
    // SAFETY: the next function has the contract of this one.
    allocate(bytes, align, from_jemalloc, |next| unsafe { (next.aligned_alloc)(align, bytes) })
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    let from_jemalloc = || {
        // SAFETY: it has no preconditions.
        unsafe { je::aligned_alloc(align.max(ALIGN), bytes.max(ALIGN)) }
    };
    // SAFETY: the next function has the contract of this one.
    allocate(bytes, align, from_jemalloc, |next| unsafe { (next.memalign)(align, bytes) })
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn valloc(bytes: usize) -> *mut c_void {
    // SAFETY: same contract.
    unsafe { memalign(page_bytes(), bytes) }
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    match bytes.checked_next_multiple_of(page_bytes()) {
        // SAFETY: same contract.
        Some(whole) => unsafe { memalign(page_bytes(), whole) },
        None => no_memory(),
    }
}

/// # Safety
/// See [`malloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    if block.is_null() {
        return 0;
    }
    if small::owns(block as usize) {
        // SAFETY: by contract.
        return unsafe { small::usable_bytes(block) };
    }
    if let Some(client) = route::owner(block as usize) {
        let before = errno::get();
        let usable = client.heap().usable_bytes(block as usize).unwrap_or(0);
        errno::set(before);
        return usable;
    }
    if bootstrap::owns(block as usize) {
        return bootstrap::bytes_of(block.cast());
    }
    // SAFETY: the next function has the contract of this one.
    next().map_or(0, |next| unsafe { (next.malloc_usable_size)(block) })
}

// What malloc and its kin promise is tested from C (`tests/malloc/conformance.c`): in a Rust test
// the compiler knows functions of these names, and leaves out calls whose outcome it foresees.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "a program that uses malloc")]
    fn early_blocks_can_be_resized_and_freed() {
        // SAFETY: the contract of malloc, kept here.
        unsafe {
            let early = early(10, ALIGN);
            early.cast::<u8>().write_bytes(7, 10);
            assert_eq!(malloc_usable_size(early), 10);
            let block = realloc(early, 1000).cast::<u8>();
            assert_eq!(block.add(9).read(), 7);
            free(early);
            free(block.cast());
        }
    }
}
