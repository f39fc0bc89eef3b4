//! What the store's guards rest on: memory file systems that take O_DIRECT, and writes that land late.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tiermgr_sys::disk::{StoreError, StoreFile, Wanted, claim};
use tiermgr_sys::memory::{AnonBuffer, HUGE_PAGE};
use tiermgr_sys::pool::BufferPool;
use tiermgr_sys::uring::{BufferRange, Ring};
use tiermgr_tests::harness::{begin, eventually, skip};
use tiermgr_tests::memory::fork;

/// A store, whatever is in it.
fn open_store(path: &Path, size: Option<u64>, create: bool) -> Result<StoreFile, StoreError> {
    claim(Wanted { path, size, create, least: 2 << 20 })?.prepare()
}

/// O_DIRECT opens on tmpfs, so it cannot tell memory from a disk: the kind of file system must.
#[test]
fn tmpfs_takes_o_direct_and_is_refused_by_its_kind() {
    let _begun = begin("tmpfs");
    let path = PathBuf::from(format!("/dev/shm/tiermgr-direct-{}", std::process::id()));
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    std::fs::remove_file(&path).ok();
    if opened.is_err() {
        // Before Linux 6.6 it was refused; then the store would be too.
        return skip("tmpfs refuses O_DIRECT here");
    }
    let error = open_store(&path, Some(4 << 20), true).expect_err("memory");
    assert!(matches!(error, StoreError::InMemory { .. }), "{error}");
}

/// A cgroup of version 1 in which writes to one disk are slow.
struct SlowDisk(PathBuf);

impl SlowDisk {
    fn new(of: &Path, bytes_per_second: u64) -> Result<Self, String> {
        let device = std::fs::metadata(of).map_err(|e| e.to_string())?.dev();
        // The limit is for whole disks; the partition's number would be refused.
        let number = format!("{}:{}", libc::major(device), libc::minor(device));
        let group = PathBuf::from(format!("/sys/fs/cgroup/blkio/tiermgr-{}", std::process::id()));
        std::fs::create_dir(&group).map_err(|e| format!("no blkio cgroup: {e}"))?;
        let slow = Self(group);
        let limit = format!("{number} {bytes_per_second}");
        std::fs::write(slow.0.join("blkio.throttle.write_bps_device"), limit)
            .map_err(|e| format!("no write limit on disk {number}: {e}"))?;
        Ok(slow)
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // Busy until the last process in it is reaped and its I/O is done.
        eventually(Duration::from_secs(10), || std::fs::remove_dir(&self.0).is_ok());
    }
}

const LEN: u64 = 2 << 20;

/// A daemon that is killed with a write in flight is reaped at once; the write lands later, and the lock on
/// its open file description is held until then. So whoever has the lock may reuse every slot.
#[test]
fn the_lock_of_a_dead_daemon_holds_until_its_writes_have_landed() {
    let _begun = begin("late write");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tmp");
    let folder =
        if std::fs::create_dir_all(&folder).is_ok() { folder } else { std::env::temp_dir() };
    let path = folder.join(format!("tiermgr-late-{}", std::process::id()));
    match open_store(&path, Some(LEN), true) {
        Ok(store) => {
            let mut zeros = AnonBuffer::new(HUGE_PAGE).expect("2 MiB");
            zeros.as_mut_slice().fill(1);
            store.write_at(zeros.as_slice(), 0).expect("write");
        }
        Err(error) => return skip(format_args!("no store on this disk: {error}")),
    }
    let slow = match SlowDisk::new(&path, 1 << 20) {
        Ok(slow) => slow,
        Err(reason) => {
            std::fs::remove_file(&path).ok();
            return skip(reason);
        }
    };
    let (ready, daemon_end) = tiermgr_sys::sock::Stream::pair().expect("pair");
    let procs = slow.0.join("cgroup.procs");
    let store_path = path.clone();
    let daemon = fork(move || {
        let begun = || -> Result<(), Box<dyn std::error::Error>> {
            std::fs::write(&procs, std::process::id().to_string())?;
            let store = open_store(&store_path, None, false)?;
            let mut ring = Ring::new(4, 1)?;
            let pool = BufferPool::new(HUGE_PAGE)?;
            pool.reserve(1)?;
            ring.put(0..1, pool.take().ok_or("reserved")?).map_err(|_lease| "a place")?;
            let file = ring.register_file(std::os::fd::AsFd::as_fd(&store))?;
            let whole = BufferRange { index: 0, bytes: 0..HUGE_PAGE };
            ring.buffer_mut(&whole)?.fill(2);
            ring.write(file, whole, 0, 1)?;
            ring.submit()?;
            daemon_end.send_with_fds(b"r", &[])?;
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        };
        i32::from(begun().is_err())
    });
    ready.set_recv_timeout(Some(Duration::from_secs(20))).expect("timeout");
    ready.recv_with_fds(&mut [0; 8]).expect("the write is in flight");
    daemon.kill();
    assert_eq!(daemon.wait(), 128 + libc::SIGKILL);

    let mut refused = 0;
    let mut store = None;
    let landed = eventually(Duration::from_secs(30), || match open_store(&path, None, false) {
        Ok(got) => {
            store = Some(got);
            true
        }
        Err(StoreError::Locked { .. }) => {
            refused += 1;
            false
        }
        Err(error) => panic!("{error}"),
    });
    assert!(landed, "the lock is free in the end");
    let store = store.expect("open");
    let mut buffer = AnonBuffer::new(HUGE_PAGE).expect("2 MiB");
    store.read_at(buffer.as_mut_slice(), 0).expect("read");
    let old = buffer.as_slice().iter().filter(|&&b| b != 2).count();
    std::fs::remove_file(&path).expect("clean");
    assert_eq!(old, 0, "all of the write had landed when the lock was free");
    if refused == 0 {
        skip("the disk was too fast to see the lock held");
    }
    assert!(store_fd_is_open(&store));
}

fn store_fd_is_open(store: &tiermgr_sys::disk::StoreFile) -> bool {
    let fd = std::os::fd::AsFd::as_fd(store).as_raw_fd();
    // SAFETY: F_GETFD takes no argument.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}
