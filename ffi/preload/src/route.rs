//! Who serves a large request, and the connection that is made for the first managed one.

use crate::settings::{self, Settings};
use crate::{chunks, errno, extents, introspection, log, malloc, neighbours, small, vm};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use tiermgr::client::Client;
use tiermgr::fork;
use tiermgr::lock::Guarded;
use tiermgr::status::{Error, Status};

/// Sizes from here up are large. Until the settings are read, and where this library has nothing to
/// do, no size is.
static MIN_SIZE: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The same for mappings that the program makes.
static MMAP_MIN: AtomicUsize = AtomicUsize::new(usize::MAX);
static CLIENT: AtomicPtr<Client> = AtomicPtr::new(std::ptr::null_mut());
/// What the one attempt to connect needs, and why it failed.
static ATTEMPT: Guarded<Attempt> = Guarded::new(Attempt::None);
static REQUIRE: AtomicBool = AtomicBool::new(false);
/// Of what this process was told already: a bit for each status. A program that is refused memory is to be told
/// so, whatever libc has served before.
static REFUSALS_TOLD: AtomicU64 = AtomicU64::new(0);
static FALLBACKS_TOLD: AtomicU64 = AtomicU64::new(0);

enum Attempt {
    /// There is nothing to connect for, or a client.
    None,
    /// It is to be made.
    With(Settings),
    Failed(Error),
}

/// More is refused by every C library without a word: no machine has so much, and most have no such addresses.
pub(crate) const BYTES_MAX: usize = 1 << 46;

/// What becomes of a request.
pub(crate) enum Outcome {
    /// Here it is.
    Block {
        /// Its first byte.
        address: *mut u8,
        /// It reads as zeros.
        is_zero: bool,
    },
    /// `ENOMEM`.
    Refused,
    /// libc serves it.
    Libc,
}

/// Whether a size is large.
pub(crate) fn is_large(bytes: usize) -> bool {
    bytes >= MIN_SIZE.load(Ordering::Relaxed)
}

/// Whether a mapping of this size is to be managed.
pub(crate) fn is_large_mapping(bytes: usize) -> bool {
    bytes >= MMAP_MIN.load(Ordering::Relaxed)
}

/// Sizes from here up are large.
pub(crate) fn min_size() -> usize {
    MIN_SIZE.load(Ordering::Relaxed)
}

/// Whether a block of this size, managed already, may stay managed. Less than the smallest managed
/// size, so that a block whose size goes up and down does not move each time.
pub(crate) fn may_stay(bytes: usize) -> bool {
    bytes >= MIN_SIZE.load(Ordering::Relaxed) / 2
}

/// The client, once there is one.
pub(crate) fn client() -> Option<&'static Client> {
    // SAFETY: the client, once published, is never freed.
    unsafe { CLIENT.load(Ordering::Acquire).as_ref() }
}

/// The client in whose arenas an address lies.
pub(crate) fn owner(address: usize) -> Option<&'static Client> {
    client().filter(|client| client.heap().owns(address))
}

/// The client, which is made where there is none yet.
pub(crate) fn connected() -> Result<&'static Client, Outcome> {
    client().map_or_else(connect, Ok)
}

/// Serves a large request.
pub(crate) fn allocate(bytes: usize, align: usize) -> Outcome {
    let client = match connected() {
        Ok(client) => client,
        Err(outcome) => return outcome,
    };
    let allocated = client.allocate(bytes, align).or_else(|error| {
        let is_short = matches!(error.status, Status::NoMemory | Status::NoRoom);
        if !is_short || !small::is_on() || !small::is_free_to_use() {
            return Err(error);
        }
        // What jemalloc keeps of small blocks that were freed may lie between free ones.
        extents::purge();
        client.allocate(bytes, align)
    });
    match allocated {
        Ok(block) => {
            chunks::note_block(block.address);
            Outcome::Block { address: block.address as *mut u8, is_zero: block.is_zero }
        }
        Err(error) => without(bytes, &error),
    }
}

fn without(bytes: usize, error: &Error) -> Outcome {
    match error.status {
        // An allocation from within the client, or in a signal handler.
        Status::Inside => Outcome::Libc,
        Status::NoMemory if bytes > BYTES_MAX => Outcome::Refused,
        Status::NoMemory | Status::NoRoom => {
            refused(error, format_args!("{bytes} bytes were refused: {error}"))
        }
        _ if REQUIRE.load(Ordering::Relaxed) => refused(
            error,
            format_args!("{bytes} bytes were refused, as TIERMGR_REQUIRE is set: {error}"),
        ),
        _ => left_to_libc(error, format_args!("{error}; new memory comes from libc")),
    }
}

/// What becomes of a mapping for which there is no managed memory.
pub(crate) fn without_mapping(bytes: usize, error: &Error) -> Outcome {
    match error.status {
        // In a signal handler.
        Status::Inside => Outcome::Libc,
        _ if REQUIRE.load(Ordering::Relaxed) => refused(
            error,
            format_args!(
                "a mapping of {bytes} bytes was refused, as TIERMGR_REQUIRE is set: {error}"
            ),
        ),
        _ => left_to_libc(
            error,
            format_args!(
                "a mapping of {bytes} bytes is not managed, and others may not be: {error}"
            ),
        ),
    }
}

/// A block that is to be resized cannot be looked at: a signal handler has interrupted this thread in the heap.
pub(crate) fn note_refused_inside(bytes: usize) {
    let error = Error::new(Status::Inside, "a signal handler has interrupted the allocator");
    refused(&error, format_args!("resizing a block to {bytes} bytes was refused: {error}"));
}

fn refused(error: &Error, text: std::fmt::Arguments<'_>) -> Outcome {
    tell_once(&REFUSALS_TOLD, error.status, text);
    Outcome::Refused
}

fn left_to_libc(error: &Error, text: std::fmt::Arguments<'_>) -> Outcome {
    tell_once(&FALLBACKS_TOLD, error.status, text);
    Outcome::Libc
}

fn tell_once(told: &AtomicU64, status: Status, text: std::fmt::Arguments<'_>) {
    let bit = 1 << (status.code().unsigned_abs() % 64);
    if told.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        log::warn(text);
    }
}

/// Connects, once in the life of a process.
#[cold]
fn connect() -> Result<&'static Client, Outcome> {
    // A thread that is inside already allocates for the connection itself.
    let mut attempt = ATTEMPT.enter().ok_or(Outcome::Libc)?;
    if let Some(client) = client() {
        return Ok(client);
    }
    let settings = match std::mem::replace(&mut *attempt, Attempt::None) {
        Attempt::With(settings) => settings,
        Attempt::Failed(error) => {
            let outcome = without_client(&error);
            *attempt = Attempt::Failed(error);
            return Err(outcome);
        }
        Attempt::None => return Err(Outcome::Libc),
    };
    let Settings { config, min_size, small, .. } = settings;
    let socket = config.socket.clone();
    match Client::connect(config) {
        Ok(client) => {
            let client = Box::leak(client);
            CLIENT.store(client, Ordering::Release);
            small::go_on();
            let least = if small { 1 } else { min_size };
            log::info(format_args!(
                "connected to {}; blocks of {least} bytes and more are managed",
                socket.display()
            ));
            Ok(client)
        }
        Err(error) => {
            let outcome = without_client(&error);
            if matches!(outcome, Outcome::Libc) {
                MIN_SIZE.store(usize::MAX, Ordering::Relaxed);
                MMAP_MIN.store(usize::MAX, Ordering::Relaxed);
                small::give_up();
            }
            *attempt = Attempt::Failed(error);
            Err(outcome)
        }
    }
}

fn without_client(error: &Error) -> Outcome {
    if REQUIRE.load(Ordering::Relaxed) {
        refused(
            error,
            format_args!("{error}; as TIERMGR_REQUIRE is set, managed blocks are refused"),
        )
    } else {
        left_to_libc(error, format_args!("{error}; all memory comes from libc"))
    }
}

extern "C" fn before_fork() {
    if ATTEMPT.hold_for_fork() {
        small::before_fork();
    }
}

extern "C" fn after_fork() {
    let outermost = ATTEMPT.end_fork();
    if outermost.is_some() {
        small::after_fork();
    }
}

/// The child is a process of its own: whoever looks for its lines has not seen its parent's.
extern "C" fn in_child() {
    REFUSALS_TOLD.store(0, Ordering::Relaxed);
    FALLBACKS_TOLD.store(0, Ordering::Relaxed);
    after_fork();
}

extern "C" fn start() {
    // A program finds zero there when it begins.
    let before = errno::get();
    malloc::look_up();
    introspection::look_up();
    prepare();
    errno::set(before);
}

fn prepare() {
    let Some(mut settings) = settings::read() else { return };
    if let Some(obstacle) = neighbours::obstacle() {
        if settings.mmap_min.is_none() || !obstacle.leaves_mappings() {
            let required = settings.require && !obstacle.is_too_late();
            return log::refuse(required, format_args!("{obstacle}"));
        }
        log::warn(format_args!("{obstacle}; of this program only what it maps is managed"));
        settings.min_size = usize::MAX;
        settings.small = false;
        settings.config.extents = false;
    }
    // All of these are among this library's own (`atfork`), so whoever else has handlers is outside of them.
    // Prepare handlers run in reverse. The lock here, inside which a client is made, must be taken before
    // those of the client, and so must jemalloc's, whose hooks call the client. jemalloc installs its
    // handlers when it is started; the one here goes before them and ends after them, so that it knows
    // when this thread cannot use jemalloc.
    if let Err(error) = vm::keep_lock_across_forks().and_then(|()| fork::install()) {
        log::warn(format_args!("{error}; all memory comes from libc"));
        return;
    }
    if settings.small
        && let Err(why) = extents::set_up()
    {
        log::warn(format_args!("jemalloc is not used: {why}; small blocks come from libc"));
        settings.small = false;
    }
    if let Err(error) = fork::call_around(before_fork, after_fork, in_child) {
        log::warn(format_args!("{error}; all memory comes from libc"));
        return;
    }
    if let Err(error) = vm::follow_forks() {
        log::warn(format_args!("{error}; all memory comes from libc"));
        return;
    }
    chunks::begin();
    REQUIRE.store(settings.require, Ordering::Relaxed);
    let Settings { min_size, small, mmap_min, .. } = settings;
    if let Some(mut attempt) = ATTEMPT.enter() {
        *attempt = Attempt::With(settings);
        MIN_SIZE.store(min_size, Ordering::Release);
        MMAP_MIN.store(mmap_min.unwrap_or(usize::MAX), Ordering::Release);
        if small {
            small::begin();
        }
    }
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

#[cfg(test)]
const _: extern "C" fn() = start;
