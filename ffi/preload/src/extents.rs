//! jemalloc on managed memory: its settings, and the hooks through which its extents come and go.
//!
//! - `retain:false`: free extents that were not reused for a while go back to the client's heap. That
//!   knows what a discard may still reach and keeps it out of use: a discard that the daemon has not
//!   answered may happen later, and jemalloc reuses what it could not purge at once. So there is no purge
//!   hook, and jemalloc never holds memory that a discard is on its way to.
//! - `dirty_decay_ms:10000`: for ten seconds freed extents are reused without a word. After that they are
//!   garbage, which is better forgotten than written to the store.
//! - `narenas:16`: arenas that jemalloc made later, one by one, would have its own hooks. So all are
//!   made at the start, and cost some tens of kilobytes each.
//! - `oversize_threshold:0`, and no `hpa`: both take memory past the hooks.
//! - `cache_oblivious:false`: it adds a page to blocks from 16 KiB up.
//! - `metadata_thp:auto`: the caches of threads are then metadata. Else that of the first thread, which is
//!   there before the hooks, would be a block of the first arena; once freed, it would be given out again,
//!   and nobody would know whose it is.
//!
//! jemalloc describes its extents in memory that it maps itself. Each arena's hooks for that are those
//! which it was made with (`base_t.ehooks_base` in its `base.c`), and these are replaced afterwards: a
//! parked table would have to come back for each malloc and free. `tests/malloc/small_border.c`
//! says so of this version.

use crate::{chunks, errno, held_locks, log, route, vm};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use tikv_jemalloc_sys as je;

const SETTINGS: &CStr =
    c"narenas:16,retain:false,dirty_decay_ms:10000,oversize_threshold:0,cache_oblivious:false,metadata_thp:auto";

/// Bytes that jemalloc has.
static EXTENT_BYTES: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    /// jemalloc reads it when it is first used.
    #[link_name = "_rjem_malloc_conf"]
    static mut SETTINGS_USED: *const c_char;
}

/// Where jemalloc tells how many pages an arena has.
const OWN_MEMORY: [&CStr; 4] = [
    c"stats.arenas.0.pactive",
    c"stats.arenas.0.pdirty",
    c"stats.arenas.0.pmuzzy",
    c"stats.arenas.0.retained",
];

static HOOKS: je::extent_hooks_t = je::extent_hooks_t {
    alloc: Some(alloc),
    dalloc: Some(dalloc),
    destroy: None,
    commit: None,
    decommit: None,
    purge_lazy: None,
    purge_forced: None,
    split: Some(split),
    merge: Some(merge),
};

unsafe extern "C" fn alloc(
    _hooks: *mut je::extent_hooks_t,
    place: *mut c_void,
    bytes: usize,
    align: usize,
    zero: *mut bool,
    commit: *mut bool,
    _arena: c_uint,
) -> *mut c_void {
    // A certain place is asked for to grow a block where it stands. Its neighbour is somebody else's.
    let Some(client) = route::client().filter(|_| place.is_null()) else { return ptr::null_mut() };
    let before = errno::get();
    let extent = client.allocate_extent(bytes, align);
    errno::set(before);
    let Ok(extent) = extent else { return ptr::null_mut() };
    EXTENT_BYTES.fetch_add(bytes, Ordering::Relaxed);
    chunks::note_extent(extent.address, bytes);
    let address = extent.address as *mut c_void;
    // SAFETY: jemalloc passes pointers to two variables of its own.
    let must_be_zero = unsafe { zero.read() };
    if must_be_zero && !extent.is_zero {
        // SAFETY: the extent is new, nobody else's, and `bytes` long.
        unsafe { address.write_bytes(0, bytes) };
    }
    // SAFETY: as above.
    unsafe { zero.write(must_be_zero || extent.is_zero) };
    // SAFETY: as above.
    unsafe { commit.write(true) };
    address
}

unsafe extern "C" fn dalloc(
    _hooks: *mut je::extent_hooks_t,
    extent: *mut c_void,
    bytes: usize,
    _is_committed: bool,
    _arena: c_uint,
) -> bool {
    let Some(client) = route::client() else { return true };
    let before = errno::get();
    vm::before_release(client, extent as usize, bytes);
    let released = client.release_extent(extent as usize, bytes);
    errno::set(before);
    match released {
        Ok(true) => {
            EXTENT_BYTES.fetch_sub(bytes, Ordering::Relaxed);
            false
        }
        Ok(false) => true,
        Err(_) => log::fatal(format_args!("{extent:p} of {bytes} bytes is not a live extent")),
    }
}

unsafe extern "C" fn split(
    _hooks: *mut je::extent_hooks_t,
    _extent: *mut c_void,
    _bytes: usize,
    _bytes_first: usize,
    _bytes_second: usize,
    _is_committed: bool,
    _arena: c_uint,
) -> bool {
    false
}

unsafe extern "C" fn merge(
    _hooks: *mut je::extent_hooks_t,
    first: *mut c_void,
    _bytes_first: usize,
    second: *mut c_void,
    _bytes_second: usize,
    _is_committed: bool,
    _arena: c_uint,
) -> bool {
    // Two regions may lie side by side; an extent of both could not be given back.
    let is_one = |client: &tiermgr::client::Client| {
        client.heap().is_one_arena(first as usize, second as usize)
    };
    !route::client().is_some_and(is_one)
}

/// Starts jemalloc and has all its extents come from the hooks, which give none before there is a client.
///
/// # Errors
/// What keeps it from being used: it would give blocks that are not known to be its own.
pub(crate) fn set_up() -> Result<(), &'static str> {
    // SAFETY: called once, from the constructor of this library, before jemalloc is used: it has not
    // read the variable, and nobody else knows of it.
    unsafe { SETTINGS_USED = SETTINGS.as_ptr() };
    held_locks::begin();
    without_huge_pages(make_arenas)
}

/// Does something in small pages. The tables of each arena begin on a huge page of their own, of which a
/// small program needs a few kilobytes: where the kernel makes huge pages unasked, all of it would be there.
fn without_huge_pages<T>(act: impl FnOnce() -> T) -> T {
    let disable = |how: c_int| {
        // SAFETY: it changes how this process' later page faults are served, and no memory.
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, how, 0, 0, 0) }
    };
    // SAFETY: it has no preconditions.
    let before = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
    if before != 0 || disable(1) != 0 {
        return act();
    }
    let outcome = act();
    if disable(0) != 0 {
        log::warn(format_args!("huge pages stay off: {}", std::io::Error::last_os_error()));
    }
    outcome
}

fn make_arenas() -> Result<(), &'static str> {
    if read::<bool>(c"opt.hpa") != Some(false)
        || read::<usize>(c"opt.oversize_threshold") != Some(0)
    {
        return Err(
            "_RJEM_MALLOC_CONF or /etc/_rjem_malloc.conf asks for hpa or oversize_threshold",
        );
    }
    let arenas: c_uint = read(c"arenas.narenas").ok_or("it cannot be started")?;
    let hooks: *const je::extent_hooks_t = &raw const HOOKS;
    for arena in 0..arenas {
        // A thread's change to an arena makes that.
        write(&mib(c"thread.arena")?, arena).ok_or("an arena cannot be made")?;
        let mut hooks_of = mib(c"arena.0.extent_hooks")?;
        hooks_of.parts[1] = arena as usize;
        write(&hooks_of, hooks).ok_or("an arena takes no hooks")?;
    }
    write(&mib(c"thread.arena")?, 0 as c_uint).ok_or("the first arena is gone")?;
    write(&mib(c"epoch")?, 1_u64).ok_or("it counts nothing")?;
    for arena in 0..arenas {
        for name in OWN_MEMORY {
            let mut own = mib(name)?;
            own.parts[2] = arena as usize;
            if read_at::<usize>(&own) != Some(0) {
                return Err("an arena had memory before it had the hooks");
            }
        }
    }
    Ok(())
}

/// A name of jemalloc's, looked up.
struct Mib {
    parts: [usize; 4],
    length: usize,
}

fn mib(name: &CStr) -> Result<Mib, &'static str> {
    let mut mib = Mib { parts: [0; 4], length: 4 };
    // SAFETY: the name ends with a zero byte, and there is room for as many parts as `length` says.
    let outcome =
        unsafe { je::mallctlnametomib(name.as_ptr(), mib.parts.as_mut_ptr(), &raw mut mib.length) };
    if outcome == 0 { Ok(mib) } else { Err("it does not know a name that it should") }
}

/// Types that jemalloc's values have; all bit patterns that it writes are valid ones.
pub(crate) trait Plain: Copy + Default {}
impl Plain for bool {}
impl Plain for c_uint {}
impl Plain for usize {}

fn read_at<T: Plain>(mib: &Mib) -> Option<T> {
    let mut value = T::default();
    let mut bytes = size_of::<T>();
    // SAFETY: jemalloc writes `bytes` bytes at most, a value of the type that it has under this name,
    // and answers with an error where that has another length.
    let outcome = unsafe {
        je::mallctlbymib(
            mib.parts.as_ptr(),
            mib.length,
            (&raw mut value).cast(),
            &raw mut bytes,
            ptr::null_mut(),
            0,
        )
    };
    (outcome == 0).then_some(value)
}

/// What jemalloc has under a name.
pub(crate) fn read<T: Plain>(name: &CStr) -> Option<T> {
    read_at(&mib(name).ok()?)
}

fn write<T: Copy>(mib: &Mib, value: T) -> Option<()> {
    let mut value = value;
    // SAFETY: jemalloc reads `size_of::<T>()` bytes of the value, or answers with an error where it wants
    // another number of them.
    let outcome = unsafe {
        je::mallctlbymib(
            mib.parts.as_ptr(),
            mib.length,
            ptr::null_mut(),
            ptr::null_mut(),
            (&raw mut value).cast(),
            size_of::<T>(),
        )
    };
    (outcome == 0).then_some(())
}

/// Bytes of all extents.
pub(crate) fn bytes() -> usize {
    EXTENT_BYTES.load(Ordering::Relaxed)
}

/// Bytes in live small blocks.
pub(crate) fn allocated_bytes() -> usize {
    let counted = mib(c"epoch").ok().and_then(|epoch| write(&epoch, 1_u64));
    counted.and_then(|()| read(c"stats.allocated")).unwrap_or(0)
}

/// Has jemalloc give back all extents that are free.
pub(crate) fn purge() {
    for name in [c"thread.tcache.flush", c"arena.4096.purge"] {
        // SAFETY: the name ends with a zero byte, and there is nothing to read or to write. Neither has
        // an answer that matters: what cannot be given back stays.
        let _outcome: c_int = unsafe {
            je::mallctl(name.as_ptr(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0)
        };
    }
}
