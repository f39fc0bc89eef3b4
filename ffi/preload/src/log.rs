//! Lines on standard error, without allocating.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use tiermgr::cancel::Uncancelled;
use tiermgr::sandbox::{Deed, may};

/// What is worth a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    /// Nothing.
    Off = 0,
    /// Something that was asked for did not happen.
    Warn = 1,
    /// Rare things that somebody may want to see.
    Info = 2,
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Warn as u8);

/// From now on lines of this level and more important ones are written.
pub(crate) fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Something that was asked for did not happen.
pub(crate) fn warn(text: fmt::Arguments<'_>) {
    line(Level::Warn, text);
}

/// What `tiermgrctl run` gives where it cannot do its work.
const NOT_RUN: libc::c_int = 125;

/// Nothing of this program is managed, for a reason that there is no way around. With `required` it does not
/// run.
pub(crate) fn refuse(required: bool, text: fmt::Arguments<'_>) {
    if !required {
        return warn(format_args!("{text}; nothing of this program is managed"));
    }
    warn(format_args!("{text}; as TIERMGR_REQUIRE is set, the program is not run"));
    // SAFETY: ends the process before its `main`.
    unsafe { libc::_exit(NOT_RUN) }
}

/// Rare things that somebody may want to see.
pub(crate) fn info(text: fmt::Arguments<'_>) {
    line(Level::Info, text);
}

/// The program has a defect (or this library has), and going on would corrupt memory.
pub(crate) fn fatal(text: fmt::Arguments<'_>) -> ! {
    write(text);
    // SAFETY: abort has no preconditions.
    unsafe { libc::abort() }
}

fn line(level: Level, text: fmt::Arguments<'_>) {
    if LEVEL.load(Ordering::Relaxed) >= level as u8 && may(Deed::Say) {
        write(text);
    }
}

fn write(text: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], used: 0 };
    // A text that does not fit is cut off: the line's own `write_str` never fails.
    let _complete = write!(line, "tiermgr[{}]: {text}", std::process::id()).is_ok();
    let end = line.used.min(line.bytes.len() - 1);
    line.bytes[end] = b'\n';
    // Whoever writes may be inside `malloc`.
    let _uncancelled = Uncancelled::new();
    // SAFETY: the buffer holds `end + 1` bytes. A standard error that takes nothing is no error.
    unsafe { libc::write(2, line.bytes.as_ptr().cast(), end + 1) };
}

struct Line {
    bytes: [u8; 512],
    used: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - 1 - self.used;
        let taken = text.len().min(room);
        self.bytes[self.used..self.used + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.used += taken;
        Ok(())
    }
}
