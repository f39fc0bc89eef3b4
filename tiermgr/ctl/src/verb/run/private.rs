//! A daemon for one run: started, watched until it is ready, ended, and its traces removed.

use super::child::{Signals, Wakeup, Watch, ignore_absent};
use super::progress::Progress;
use super::{RunError, find, place};
use crate::cli::RunArgs;
use crate::complain;
use crate::connect::{ConnectError, Link};
use nix::sys::signal::{Signal, kill};
use nix::sys::statfs;
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tiermgr_sys::{cgroup, disk, pidfd, proc};
use tiermgr_wire::control::ControlRequest;
use tiermgr_wire::size::{PathAndSize, Size};
use tiermgr_wire::{DRAM_BYTES_MIN, STORE_BYTES_MIN, chain};

/// How often is looked whether something is done.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// From "done" to the end of the process.
const EXIT_WAIT: Duration = Duration::from_secs(30);
/// From the end of the process to the end of what the kernel still did for it.
const STORE_WAIT: Duration = Duration::from_secs(10);
/// Where nobody has said how much: less would hold nothing worth parking.
const DEFAULT_STORE_BYTES_MIN: u64 = 64 << 20;
/// Most that a store takes of a disk where nobody has said how much.
const DEFAULT_STORE_BYTES_MAX: u64 = 64 << 30;
/// Whole chunks.
const ROUND_BYTES: u64 = 2 << 20;
/// Longer answers of a starting daemon are not read.
const READY_BYTES_MAX: usize = 4096;

/// A private daemon. To be ended by [`Private::end`]; its folders are removed when this is dropped.
#[derive(Debug)]
pub(super) struct Private {
    daemon: Child,
    folders: Folders,
    socket: PathBuf,
    store: PathBuf,
    /// The daemon made it, and removes it if it can.
    store_is_new: bool,
    /// Readable when the keeper has ended, or, after it, the serving process.
    watched: Option<OwnedFd>,
}

/// Folders of one run, removed when dropped.
#[derive(Debug)]
struct Folders {
    /// For socket and state, in memory.
    runtime: PathBuf,
    /// For the store, on disk, if we made one.
    store: Option<PathBuf>,
    /// The store, where it was not there before and its daemon can no longer remove it.
    store_file: Option<PathBuf>,
    keep: bool,
}

impl Private {
    /// Starts a daemon and waits until it serves.
    pub(super) fn start(args: &RunArgs, signals: &Signals) -> Result<Self, RunError> {
        let path = find::daemon()?;
        if !nix::unistd::geteuid().is_root() {
            return Err(RunError::NotRoot);
        }
        let dram = choose_dram(args)?;
        let mut folders =
            Folders { runtime: make_runtime_folder()?, store: None, store_file: None, keep: false };
        let store = choose_store(args.nvme.as_ref(), &mut folders)?;
        let socket = folders.runtime.join(place::SOCKET_NAME);
        let store_is_new = !store.path.exists();
        let daemon = Command::new(&path)
            .arg("--embedded")
            .arg("--socket")
            .arg(&socket)
            .arg("--state-dir")
            .arg(folders.runtime.join("state"))
            .arg("--dram")
            .arg(dram.to_string())
            .arg("--store")
            .arg(text_of(&store))
            .args(folders.all().flat_map(|folder| [OsStr::new("--remove-dir"), folder.as_os_str()]))
            .args(["--ready-fd", "1"])
            .args(args.assume_missing.iter().flat_map(|name| ["--assume-missing", name]))
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // A key on the terminal must not end it before the program that it serves.
            .process_group(0)
            .spawn()
            .map_err(|source| RunError::Daemon { path: path.clone(), source })?;
        let watched = pidfd::open(daemon.id().cast_signed())
            .map_err(|error| RunError::System("watching the private daemon", error));
        let mut private =
            Self { daemon, folders, socket, store: store.path, store_is_new, watched: None };
        match watched.and_then(|watched| {
            private.watched = Some(watched);
            private.wait_until_ready(signals)
        }) {
            Ok(()) => Ok(private),
            Err(error) => {
                private.abandon();
                Err(error)
            }
        }
    }

    /// Where it listens.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether it was not seen to be gone for good.
    pub(super) fn is_watched(&self) -> bool {
        self.watched.is_some()
    }

    fn wait_until_ready(&mut self, signals: &Signals) -> Result<(), RunError> {
        let system = |error| RunError::System("waiting for the private daemon", error);
        let mut progress = Progress::new("preparing the private daemon and its store");
        let Some(mut pipe) = self.daemon.stdout.take() else {
            return Err(system(io::ErrorKind::BrokenPipe.into()));
        };
        let mut line = Vec::new();
        loop {
            match signals.wait_readable(pipe.as_fd(), LOOK_EVERY).map_err(system)? {
                Wakeup::Timeout => progress.tick(),
                Wakeup::Signal(signal) => return Err(RunError::Interrupted(signal)),
                Wakeup::Readable => {
                    let mut part = [0; 512];
                    let len = pipe.read(&mut part).map_err(system)?;
                    line.extend_from_slice(part.get(..len).unwrap_or_default());
                    if len == 0 || line.contains(&b'\n') || line.len() > READY_BYTES_MAX {
                        break;
                    }
                }
            }
        }
        let line = String::from_utf8_lossy(&line);
        match line.trim_end() {
            "ready" => Ok(()),
            "" => Err(RunError::DaemonRefuses("it ended without a word".to_owned())),
            reason => Err(RunError::DaemonRefuses(reason.to_owned())),
        }
    }

    /// Ends the daemon. Where programs that CMD started still need it, it stays for as long as they do.
    pub(super) fn end(mut self, signals: &Signals) {
        match self.ask_to_end(signals) {
            Ok(()) => self.wait_for_exit(),
            // It ended before, and was waited for then.
            Err(_) if matches!(self.daemon.try_wait(), Ok(Some(_))) => {}
            Err(error @ ConnectError::Refused(_)) => {
                complain(&format!(
                    "{}; the private daemon stays until the programs that it serves have ended",
                    chain(&error)
                ));
                self.folders.keep = true;
            }
            Err(error) => {
                complain(&format!("ending the private daemon: {}", chain(&error)));
                self.abandon();
            }
        }
        // Whoever was killed has removed nothing. What ended in order has, and somebody else may have made a
        // file of the same name since.
        let was_killed =
            matches!(self.daemon.try_wait(), Ok(Some(status)) if status.code().is_none());
        if was_killed && self.store_is_new {
            self.folders.store_file = Some(self.store.clone());
        }
        // The lock lives until the kernel has taken down what the daemon had in flight: whoever runs
        // something with the same store next would find it in use.
        if !self.folders.keep && self.folders.store.is_none() {
            disk::wait_until_free(&self.store, STORE_WAIT);
        }
    }

    fn ask_to_end(&self, signals: &Signals) -> Result<(), ConnectError> {
        let mut progress = Progress::new("ending the private daemon");
        let link = Link::open(Some(&self.socket))?;
        link.begin(ControlRequest::Shutdown)?;
        // Signals are read and dropped meanwhile: there is nobody left to pass them to, and the end
        // is under way.
        while signals.wait_readable(link.as_fd(), LOOK_EVERY).map_err(ConnectError::Broken)?
            != Wakeup::Readable
        {
            progress.tick();
        }
        link.finish(Some(LOOK_EVERY)).map(drop)
    }

    fn wait_for_exit(&mut self) {
        let mut progress = Progress::new("ending the private daemon");
        let deadline = Instant::now() + EXIT_WAIT;
        while matches!(self.daemon.try_wait(), Ok(None)) {
            if Instant::now() >= deadline {
                complain(&format!("the private daemon (pid {}) does not end", self.daemon.id()));
                self.folders.keep = true;
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
            progress.tick();
        }
    }

    /// Ends a daemon that serves nobody or does not answer.
    fn abandon(&mut self) {
        if matches!(self.daemon.try_wait(), Ok(None)) {
            // It ends by itself once it sees that nobody is left; this only hurries it.
            let pid = Pid::from_raw(self.daemon.id().cast_signed());
            if let Err(error) = kill(pid, Signal::SIGTERM).or_else(ignore_absent) {
                complain(&format!("ending the private daemon (pid {pid}): {error}"));
            }
            self.wait_for_exit();
        }
    }
}

/// A private daemon whose keeper is killed is not started again, and when both are gone nobody can bring back
/// what was parked: the program waits where it touches that, and shows nothing. So it is said at once.
impl Watch for Private {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watched.as_ref().map(AsFd::as_fd)
    }

    fn react(&mut self, program: Pid) {
        self.watched = None;
        // Its keeper is our child, and stays a zombie until it is waited for.
        let ended_in_order = matches!(self.daemon.try_wait(), Ok(Some(status)) if status.success());
        if ended_in_order {
            complain(
                "the private daemon was asked to end, and has brought everything back: from now on nothing \
                 is limited or parked",
            );
            return;
        }
        let serving = Link::open(Some(&self.socket)).and_then(|link| link.status());
        let serving = serving.ok().and_then(|status| pidfd::open(status.daemon_pid).ok());
        if serving.is_some() {
            complain(
                "warning: the keeper of the private daemon has died; the daemon serves on, but if it dies \
                 too nothing can start it again",
            );
            self.watched = serving;
            return;
        }
        complain(&format!(
            "the private daemon and its keeper have died: what is parked cannot be brought back, and \
             the program waits for ever where it touches that; end it (kill {program})"
        ));
    }
}

impl Folders {
    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.runtime).chain(&self.store)
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Some(file) = &self.store_file {
            // It may never have come to be.
            drop(disk::remove_with_blocks(file));
        }
        for folder in self.all() {
            if let Err(error) = fs::remove_dir_all(folder)
                && error.kind() != io::ErrorKind::NotFound
            {
                complain(&format!("removing {}: {error}", folder.display()));
            }
        }
    }
}

/// Half of what is available, or three quarters of what a memory cgroup leaves, if that is less: CMD
/// and the daemon have memory that is not managed, too.
fn choose_dram(args: &RunArgs) -> Result<Size, RunError> {
    let machine = proc::meminfo_bytes("MemTotal").unwrap_or(u64::MAX);
    let chosen = match args.dram {
        Some(limit) => Size(limit.bytes(machine)),
        None => {
            let available = proc::meminfo_bytes("MemAvailable").unwrap_or(u64::MAX) / 2;
            let in_cgroup = cgroup::headroom(std::process::id().cast_signed())
                .map_or(u64::MAX, |headroom| headroom / 4 * 3);
            let bytes = available.min(in_cgroup);
            Size(bytes - bytes % ROUND_BYTES)
        }
    };
    if chosen.0 < DRAM_BYTES_MIN {
        return Err(RunError::TooLittleDram { given: chosen, least: Size(DRAM_BYTES_MIN) });
    }
    Ok(chosen)
}

/// On a tmpfs where there is one: the state is written with every page that moves.
fn make_runtime_folder() -> Result<PathBuf, RunError> {
    let is_tmpfs = |path: &Path| {
        statfs::statfs(path).is_ok_and(|fs| fs.filesystem_type() == statfs::TMPFS_MAGIC)
    };
    let [memory @ .., disk] = place::runtime_parents();
    for parent in memory {
        // One that is there may be read-only, in a container.
        if is_tmpfs(&parent)
            && let Ok(folder) = place::fresh_folder(&parent)
        {
            return Ok(folder);
        }
    }
    make_folder(&disk)
}

fn make_folder(parent: &Path) -> Result<PathBuf, RunError> {
    place::fresh_folder(parent)
        .map_err(|source| RunError::Folder { path: parent.to_owned(), source })
}

/// What --nvme says, else a file in a fresh folder.
fn choose_store(
    named: Option<&PathAndSize>,
    folders: &mut Folders,
) -> Result<PathAndSize, RunError> {
    if let Some(named) = named {
        return named_store(named);
    }
    let place = place::choose()?;
    let size = default_store_size(&place.folder, place.free_bytes)?;
    let folder = make_folder(&place.folder)?;
    let path = folder.join("store");
    folders.store = Some(folder);
    Ok(PathAndSize { path, size: Some(size) })
}

/// As the daemon is told.
pub(crate) fn text_of(store: &PathAndSize) -> OsString {
    let mut text = store.path.clone().into_os_string();
    if let Some(size) = store.size {
        text.push(format!(":{size}"));
    }
    text
}

/// The store that `named` comes to.
pub(crate) fn named_store(named: &PathAndSize) -> Result<PathAndSize, RunError> {
    let path = std::path::absolute(&named.path)
        .map_err(|source| RunError::Folder { path: named.path.clone(), source })?;
    let size = match (named.size, fs::metadata(&path)) {
        (Some(given), _) if given.0 < STORE_BYTES_MIN => {
            return Err(RunError::TooLittleStore { path, given, least: Size(STORE_BYTES_MIN) });
        }
        (Some(size), _) => Some(size),
        // All of a device, and a file as it is.
        (None, Ok(facts)) if facts.file_type().is_block_device() || facts.len() > 0 => None,
        (None, _) => {
            let folder = path.parent().unwrap_or(Path::new("/"));
            let free = place::free_bytes(folder)
                .map_err(|source| RunError::Folder { path: folder.to_owned(), source })?;
            Some(default_store_size(folder, free)?)
        }
    };
    Ok(PathAndSize { path, size })
}

/// Twice the machine's memory, but never more than half of what is free, nor than what is polite to take
/// from a disk without being asked: all of it is allocated at once.
fn default_store_size(folder: &Path, free_bytes: u64) -> Result<Size, RunError> {
    let machine = proc::meminfo_bytes("MemTotal").unwrap_or(u64::MAX);
    let bytes = (free_bytes / 2).min(machine.saturating_mul(2)).min(DEFAULT_STORE_BYTES_MAX);
    if bytes < DEFAULT_STORE_BYTES_MIN {
        return Err(RunError::TooLittleDisk {
            path: folder.to_owned(),
            given: Size(free_bytes),
            least: Size(2 * DEFAULT_STORE_BYTES_MIN),
        });
    }
    Ok(Size(bytes - bytes % ROUND_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_takes_half_of_what_is_free_and_no_more_than_is_polite() {
        let size = |free| default_store_size(Path::new("/x"), free);
        assert_eq!(size(1 << 30).unwrap(), Size(512 << 20));
        assert!(size((2 * DEFAULT_STORE_BYTES_MIN) - 2).is_err());
        assert!(size(u64::MAX).unwrap().0 <= DEFAULT_STORE_BYTES_MAX);
    }

    #[test]
    fn folders_are_removed_unless_kept() {
        for keep in [false, true] {
            let runtime = make_folder(&std::env::temp_dir()).unwrap();
            fs::write(runtime.join("x"), "y").unwrap();
            drop(Folders { runtime: runtime.clone(), store: None, store_file: None, keep });
            assert_eq!(runtime.exists(), keep);
            if keep {
                fs::remove_dir_all(&runtime).unwrap();
            }
        }
    }
}
