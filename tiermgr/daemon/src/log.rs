//! The log: lines on stderr that never hold up whoever has something to say.
//!
//! Executors log, and whoever reads stderr may stop: a terminal with Ctrl-S, a pager, a pipe to a program
//! that hangs. So the serving process hands its lines to a thread that does nothing but write them, through
//! a queue that drops what does not fit and counts it. The keeper, which can have no thread, writes what
//! can be written without waiting.

use crate::config::LogLevel;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;
use tiermgr_sys::nowait::write_now;
use tracing_subscriber::fmt::MakeWriter;

/// Lines that wait for the reader at most.
const LINES_MAX: usize = 1024;
/// What the last words of a panic may wait.
const PANIC_PATIENCE: Duration = Duration::from_millis(500);

/// Set in the serving process only: threads do not come along with the clone that makes it.
static QUEUE: OnceLock<SyncSender<Entry>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

enum Entry {
    Line(Vec<u8>),
    /// To be answered once all before it is written.
    Flush(SyncSender<()>),
}

/// Begins to log, without a thread.
pub fn begin(level: LogLevel) {
    let log = tracing_subscriber::fmt()
        .with_max_level(level.filter())
        .with_writer(Lines)
        .with_ansi(false)
        .with_target(false);
    // The journal has the time already.
    if std::env::var_os("JOURNAL_STREAM").is_some() {
        log.without_time().init();
    } else {
        log.init();
    }
    // The hook of the standard library writes to stderr and waits.
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!("{panic}");
        flush(PANIC_PATIENCE);
    }));
}

/// Starts the thread that writes. For the serving process, once.
///
/// # Errors
/// Where the kernel has no thread to give; lines are then written as the keeper does.
pub fn begin_thread() -> io::Result<()> {
    let (queue, entries) = sync_channel(LINES_MAX);
    thread::Builder::new().name("log".to_owned()).spawn(move || write_all(&entries))?;
    // Nobody else sets it.
    drop(QUEUE.set(queue));
    Ok(())
}

/// Waits until everything that was logged is written, no longer than `patience`.
pub fn flush(patience: Duration) {
    let Some(queue) = QUEUE.get() else { return };
    let (answer, written) = sync_channel(1);
    if queue.try_send(Entry::Flush(answer)).is_ok() {
        // When time is up, the lines are lost with the process.
        let _in_time = written.recv_timeout(patience);
    }
}

fn write_all(entries: &Receiver<Entry>) {
    let mut stderr = io::stderr();
    for entry in entries {
        match entry {
            Entry::Line(line) => {
                let dropped = DROPPED.swap(0, Ordering::Relaxed);
                if dropped > 0 {
                    // With stderr closed there is nobody left to tell.
                    drop(writeln!(
                        stderr,
                        "{dropped} lines of the log were dropped: nobody read them"
                    ));
                }
                drop(stderr.write_all(&line));
            }
            Entry::Flush(answer) => drop(answer.try_send(())),
        }
    }
}

/// Where the logging library writes: each line in one call.
struct Lines;

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let Some(queue) = QUEUE.get() else {
            // What is not taken is dropped; there is nobody to tell of an error.
            drop(write_now(io::stderr().as_fd(), line));
            return Ok(line.len());
        };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            queue.try_send(Entry::Line(line.to_vec()))
        {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
