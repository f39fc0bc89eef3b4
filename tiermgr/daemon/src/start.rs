//! From settings to a daemon that serves: everything that can fail before the first client.
//!
//! Runs in the serving process, after the keeper made it, and again after each restart: what is opened
//! here (the store with its lock above all) is closed by the keeper when the serving process dies.

use crate::admit::{Admission, CONNECTIONS_MAX};
use crate::config::machine::{
    BOOT_NAME, LOCK_NAME, entry_of_others, is_on_tmpfs, not_on_tmpfs, not_ours,
};
use crate::config::{Config, ConfigError, LIMBO_BYTES_MIN};
use crate::daemon::{Daemon, Identity};
use crate::families::{Families, Shared};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tiermgr_core::units::CHUNK_BYTES;
use tiermgr_engine::room::Room;
use tiermgr_engine::staging::Staging;
use tiermgr_engine::store::{self, Store, StoreConfig};
use tiermgr_sys::probe::{KernelFeatures, ProbeError};
use tiermgr_sys::sock::Listener;
use tiermgr_sys::uffd::{DeviceError, DeviceFd};
use tiermgr_sys::{disk, pidfd, proc, process};
use tiermgr_wire::size::Size;
use tiermgr_wire::{DRAM_BYTES_MIN, chain};

/// Each process of a family costs up to four descriptors; forks are bounded by what there is, since a
/// FORK event that finds no free descriptor comes back for ever.
const OPEN_FILES_WANTED: u64 = 1 << 20;
/// Below this not even a start is sure to succeed, and what fails may not be the descriptor itself.
const OPEN_FILES_LEAST: u64 = 64;
/// Below this, many clients with many children may not fit.
const OPEN_FILES_ENOUGH: u64 = 1 << 14;
/// What the daemon takes with its first program, rounded up.
const OWN_BYTES: u64 = 20 << 20;
/// Limbo is at most this share of the DRAM limit.
const LIMBO_SHARE: u64 = 4;

/// Why the daemon cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Making, reading or protecting a folder.
    #[error("{what} {}", path.display())]
    Folder {
        /// What was being done.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Others could read or write the state.
    #[error(
        "the state directory {} belongs to user {uid} with mode {mode:04o}; it must belong to user \
         {wanted} with mode 0700 (chown and chmod it, or remove it)",
        path.display()
    )]
    Exposed {
        /// Where.
        path: PathBuf,
        /// Its owner.
        uid: u32,
        /// Its permissions.
        mode: u32,
        /// Who should own it.
        wanted: u32,
    },
    /// It is somebody's, whose files would be removed.
    #[error("{}", not_ours(path, entry))]
    NotOurs {
        /// Where.
        path: PathBuf,
        /// Something that is there.
        entry: OsString,
    },
    /// Another daemon.
    #[error("another tiermgrd uses the state directory {} (`tiermgrctl status` shows it)", .0.display())]
    InUse(PathBuf),
    /// The DRAM limit cannot hold the daemon itself.
    #[error(
        "a DRAM limit of {limit} leaves nothing for programs: the daemon itself takes {own}; allow at \
         least {least}"
    )]
    TooLittleDram {
        /// The limit.
        limit: Size,
        /// Taken by the daemon.
        own: Size,
        /// What would do.
        least: Size,
    },
    /// `/dev/userfaultfd`.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The kernel lacks what cannot be done without, or a feature's name is wrong.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// The kernel lacks what cannot be done without.
    #[error(
        "{0} does not work here, and tiermgrd cannot do without: the kernel lacks it, or a container or service \
         forbids it; `tiermgrctl doctor` says how to allow it"
    )]
    Lacking(String),
    /// The store.
    #[error(transparent)]
    Store(#[from] store::StoreError),
    /// The socket.
    #[error("listening on {}{}", path.display(), guess(source))]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// What the configuration names is not there.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A descriptor or a signal.
    #[error("{0}")]
    Kernel(&'static str, #[source] io::Error),
}

/// How long writes of a dead daemon may take to land.
const WAIT_FOR_DEAD: Duration = Duration::from_secs(60);
const WAIT_FOR_UNKNOWN: Duration = Duration::from_secs(3);
const STORE_WAIT_FOR_LIVING: Duration = Duration::from_millis(500);
/// Nobody only looks at the state directory: whoever has it and runs yet may have been killed a moment ago.
const STATE_WAIT_FOR_LIVING: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What is probably wrong where the daemon cannot listen.
fn guess(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => " (is another tiermgrd running?)",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            " (is the folder writable?)"
        }
        _ => "",
    }
}

/// An error with its causes, and with what to do where it is for want of descriptors, which may show
/// wherever the daemon opens something.
#[must_use]
pub fn explain(error: &StartError) -> String {
    let text = chain(error);
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    if !(limit < OPEN_FILES_LEAST || is_for_want_of_files(error)) {
        return text;
    }
    format!(
        "{text}; only {limit} open files are allowed, and the daemon needs more: raise LimitNOFILE in its \
         service, or `ulimit -n`"
    )
}

fn is_for_want_of_files(error: &StartError) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let errno = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if errno == Some(Errno::EMFILE as i32) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Prepares the process, opens everything and listens.
///
/// # Errors
/// [`StartError`]; what was opened is closed.
pub fn start(config: &Config, identity: Identity) -> Result<(Arc<Daemon>, Listener), StartError> {
    let mut warnings = Vec::new();
    prepare_process(&mut warnings);
    let machine_bytes = proc::meminfo_bytes("MemTotal").unwrap_or(u64::MAX);
    let dram_bytes = config.dram.bytes(machine_bytes);
    if dram_bytes < DRAM_BYTES_MIN {
        return Err(StartError::TooLittleDram {
            limit: Size(dram_bytes),
            own: Size(OWN_BYTES),
            least: Size(DRAM_BYTES_MIN),
        });
    }
    if let Some(text) = config.beyond_the_machine(machine_bytes) {
        tracing::warn!("{text}");
        warnings.push(text);
    }
    // Before anything is made that a refusal would leave behind.
    let group = config.group_id()?;
    let state_lock = prepare_state_dir(&config.state_dir, identity, &mut warnings)?;
    let device = DeviceFd::open()?;
    let features = KernelFeatures::probe(&config.assume_missing)?;
    let lacking = features.lacking();
    if !lacking.is_empty() {
        return Err(StartError::Lacking(lacking.join(" and ")));
    }
    let store = open_store(config, identity)?;
    let table = table_of(identity.keeper_pid)
        .map_err(|error| StartError::Kernel("looking at the keeper", error))?;
    let staging = Staging::new(dram_bytes)
        .map_err(|error| StartError::Kernel("mapping the staging buffers", error))?;
    let room = Arc::new(Room::new(dram_bytes));
    // Where pages cannot move they rest in their place, in as many chunks as limbo would have had.
    let limbo_bytes = limbo_bytes(config.limbo.0, dram_bytes);
    let families = Families::new(Shared {
        store,
        room,
        staging,
        features,
        state_dir: config.state_dir.clone(),
        limbo_bytes,
        table,
        families_per_uid: config.families_per_uid,
    });
    families.recover().map_err(|source| StartError::Folder {
        what: "reading",
        path: config.state_dir.clone(),
        source,
    })?;
    let admission = Admission::new(config.connections_per_uid, CONNECTIONS_MAX);
    let daemon = Daemon::new(identity, families, device, admission, state_lock, warnings)
        .map_err(|error| StartError::Kernel("making an eventfd", error))?;
    let listener = listen(config, group)?;
    tracing::info!(
        socket = %config.socket.display(),
        dram = %Size(dram_bytes),
        limbo = %Size(limbo_bytes),
        store = %config.store.path.display(),
        restarts = identity.restarts,
        "serving"
    );
    Ok((Arc::new(daemon), listener))
}

/// What a process that holds others' memory needs of the kernel. Each is worth a warning, none a
/// refusal.
fn prepare_process(warnings: &mut Vec<String>) {
    let mut warn = |text: String| {
        tracing::warn!("{text}");
        warnings.push(text);
    };
    match process::raise_open_files(OPEN_FILES_WANTED) {
        Ok(limit) if limit >= OPEN_FILES_ENOUGH => {}
        Ok(limit) => warn(format!(
            "only {limit} open files are allowed (LimitNOFILE): programs that fork much may hang"
        )),
        Err(error) => warn(format!("the limit of open files cannot be raised: {error}")),
    }
    if let Err(error) = process::lock_memory_on_fault() {
        warn(format!(
            "the daemon's memory cannot be locked ({error}; raise LimitMEMLOCK): under memory \
             pressure a fault may wait for the daemon to be paged in"
        ));
    }
    if !process::set_io_flusher() {
        tracing::info!("the kernel does not let the daemon be an I/O flusher");
    }
}

/// A chunk-aligned part of the DRAM limit.
fn limbo_bytes(wanted: u64, dram_bytes: u64) -> u64 {
    let share = dram_bytes / LIMBO_SHARE;
    wanted.min(share - share % CHUNK_BYTES).max(LIMBO_BYTES_MIN)
}

fn open_store(config: &Config, identity: Identity) -> Result<Arc<Store>, StartError> {
    let settings = StoreConfig {
        path: config.store.path.clone(),
        size_bytes: config.store.size_bytes(),
        create: config.store.create,
        state_dir: config.state_dir.clone(),
    };
    let began = Instant::now();
    loop {
        match Store::open(&settings) {
            Err(store::StoreError::Open(disk::StoreError::Locked { pid, .. }))
                if began.elapsed() < patience_with(pid, STORE_WAIT_FOR_LIVING, identity) =>
            {
                thread::sleep(LOOK_EVERY);
            }
            opened => return Ok(opened?),
        }
    }
}

/// How long to wait for whoever has a lock. A daemon that died may have writes under way for seconds,
/// which must have landed before a slot of theirs is used again. One that has ended keeps the lock until
/// the kernel has taken its rings down; by then it may be without a number, or the lock be free before its
/// holder was looked up. One that lives may be about to end, or only be looking.
fn patience_with(holder: Option<i32>, living: Duration, identity: Identity) -> Duration {
    match holder {
        Some(pid) if process::is_running(pid) => living,
        None if identity.restarts == 0 => WAIT_FOR_UNKNOWN,
        Some(_) | None => WAIT_FOR_DEAD,
    }
}

/// Makes the state directory, or makes sure that it is ours alone and of this boot.
fn prepare_state_dir(
    path: &Path,
    identity: Identity,
    warnings: &mut Vec<String>,
) -> Result<StateLock, StartError> {
    let folder = |what| {
        let path = path.to_owned();
        move |source| StartError::Folder { what, path, source }
    };
    if let Some(parent) = path.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)
            .map_err(folder("making"))?;
    }
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(folder("making")(error)),
    }
    let facts = fs::symlink_metadata(path).map_err(folder("looking at"))?;
    let mode = facts.permissions().mode() & 0o7777;
    if !facts.is_dir() || facts.uid() != identity.uid || mode & 0o077 != 0 {
        return Err(StartError::Exposed {
            path: path.to_owned(),
            uid: facts.uid(),
            mode,
            wanted: identity.uid,
        });
    }
    if let Some(entry) = entry_of_others(path).map_err(folder("looking into"))? {
        return Err(StartError::NotOurs { path: path.to_owned(), entry });
    }
    if !is_on_tmpfs(path) {
        let text = not_on_tmpfs(path);
        tracing::warn!("{text}");
        warnings.push(text);
    }
    let lock = lock_state_dir(path, identity)?;
    forget_earlier_boot(path).map_err(folder("clearing"))?;
    Ok(lock)
}

/// A number for the descriptor table that a keeper shares with its serving processes. A pid has 22 bits
/// at most (`PID_MAX_LIMIT` in Linux' `threads.h`).
fn table_of(keeper_pid: i32) -> io::Result<u64> {
    Ok(pidfd::start_time(keeper_pid)? << 22 | u64::from(keeper_pid.unsigned_abs()))
}

/// Held for as long as a serving process lives; the keeper closes it with everything else.
pub type StateLock = Flock<File>;

fn lock_state_dir(path: &Path, identity: Identity) -> Result<StateLock, StartError> {
    let name = path.join(LOCK_NAME);
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&name)
        .map_err(|source| StartError::Folder { what: "making", path: name.clone(), source })?;
    let began = Instant::now();
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, Errno::EWOULDBLOCK)) => file,
            Err((_, error)) => {
                return Err(StartError::Folder {
                    what: "locking",
                    path: name,
                    source: error.into(),
                });
            }
        };
        let holder = disk::lock_holder(&file);
        if began.elapsed() >= patience_with(holder, STATE_WAIT_FOR_LIVING, identity) {
            return Err(StartError::InUse(path.to_owned()));
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Records are of address spaces, and none of those outlives the boot; on a tmpfs the records do not
/// either.
fn forget_earlier_boot(path: &Path) -> io::Result<()> {
    let name = path.join(BOOT_NAME);
    let current = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    if fs::read_to_string(&name).is_ok_and(|recorded| recorded == current) {
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        // Without the boot's file, which is written again below, what is left would be another's.
        if entry.file_name() == LOCK_NAME || entry.file_name() == BOOT_NAME {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    fs::write(&name, current)
}

fn listen(config: &Config, group: Option<u32>) -> Result<Listener, StartError> {
    let path = &config.socket;
    let fail = |source| StartError::Listen { path: path.clone(), source };
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(fail)?;
    }
    Listener::bind(path, config.socket_mode.0, group).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limbo_is_a_part_of_dram_in_whole_chunks() {
        assert_eq!(limbo_bytes(256 << 20, 24 << 30), 256 << 20);
        assert_eq!(limbo_bytes(256 << 20, 129 << 20), 32 << 20);
        assert_eq!(limbo_bytes(256 << 20, DRAM_BYTES_MIN), LIMBO_BYTES_MIN);
        assert!(limbo_bytes(256 << 20, (100 << 20) + 12345).is_multiple_of(CHUNK_BYTES));
    }

    #[test]
    fn the_state_directory_of_a_daemon_that_is_ending_is_waited_for() {
        let folder = std::env::temp_dir().join(format!("tiermgr-lock-{}", std::process::id()));
        fs::create_dir(&folder).expect("a new folder");
        let identity = Identity { keeper_pid: 0, restarts: 0, uid: 0, embedded: false };
        let held = lock_state_dir(&folder, identity).expect("nobody has it");
        let second = lock_state_dir(&folder, identity);
        assert!(matches!(second, Err(StartError::InUse(_))), "{second:?}");
        let ending = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            drop(held);
        });
        let second = lock_state_dir(&folder, identity);
        assert!(second.is_ok(), "{second:?}");
        ending.join().expect("it only sleeps");
        fs::remove_dir_all(&folder).expect("ours");
    }

    #[test]
    fn only_a_folder_of_a_daemon_is_cleared() {
        let folder = std::env::temp_dir().join(format!("tiermgr-state-{}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&folder).expect("a new folder");
        let uid = nix::unistd::geteuid().as_raw();
        let identity = Identity { keeper_pid: 0, restarts: 0, uid, embedded: false };
        let prepare = || prepare_state_dir(&folder, identity, &mut Vec::new());
        let letter = folder.join("letter");
        fs::write(&letter, "dear").expect("write");
        let refused = prepare().expect_err("it is somebody's");
        assert!(
            matches!(&refused, StartError::NotOurs { entry, .. } if entry == "letter"),
            "{refused}"
        );
        assert_eq!(fs::read_to_string(&letter).expect("it is there"), "dear");
        assert!(!folder.join(LOCK_NAME).exists());

        fs::write(folder.join(BOOT_NAME), "another boot").expect("write");
        drop(prepare().expect("a daemon's of an earlier boot"));
        assert!(!letter.exists());
        fs::write(&letter, "records of this boot").expect("write");
        drop(prepare().expect("a daemon's of this boot"));
        assert!(letter.exists());
        fs::remove_dir_all(&folder).expect("ours");
    }
}
