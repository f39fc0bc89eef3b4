use super::*;
use crate::memory::AnonBuffer;

const MIB: u64 = 1 << 20;

/// A store, whatever is in it.
fn open_store(path: &Path, size: Option<u64>, create: bool) -> Result<StoreFile, StoreError> {
    claim(Wanted { path, size, create, least: 2 * MIB })?.prepare()
}

/// A folder on a disk: the build folder, since the one for temporary files may be memory.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp");
        let base = if std::fs::create_dir_all(&base).is_ok() { base } else { std::env::temp_dir() };
        let path = base.join(format!("tiermgr-disk-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).expect("folder");
        Self(path)
    }

    fn store(&self) -> PathBuf {
        self.0.join("store")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("clean");
    }
}

#[test]
fn a_file_is_created_preallocated_and_serves() {
    let folder = Folder::new("create");
    let store = open_store(&folder.store(), Some(8 * MIB), true).expect("create");
    assert_eq!(store.size(), 8 * MIB);
    assert!(store.align().is_power_of_two() && store.align() <= 65536);
    assert!(!store.is_device());
    let meta = std::fs::metadata(folder.store()).expect("stat");
    assert!(meta.blocks() * 512 >= 8 * MIB, "its space is set aside");
    assert_eq!(meta.mode() & 0o777, 0o600);
    let mut buffer = AnonBuffer::new(1).expect("2 MiB");
    buffer.as_mut_slice().fill(0xa5);
    store.write_at(buffer.as_slice(), 4 * MIB).expect("write");
    buffer.as_mut_slice().fill(0);
    store.read_at(buffer.as_mut_slice(), 4 * MIB).expect("read");
    assert!(buffer.as_slice().iter().all(|&b| b == 0xa5));
    assert!(store.read_at(buffer.as_mut_slice(), 7 * MIB).is_err(), "beyond the end");
}

#[test]
fn a_store_in_use_is_refused_with_the_pid_of_its_user() {
    let folder = Folder::new("locked");
    let first = open_store(&folder.store(), Some(2 * MIB), true).expect("create");
    let error = open_store(&folder.store(), None, false).expect_err("locked");
    let StoreError::Locked { pid, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(pid, Some(pid) if *pid == std::process::id().cast_signed()) || pid.is_none());
    drop(first);
    open_store(&folder.store(), None, false).expect("free again");
}

#[test]
fn sizes_at_the_edge() {
    let folder = Folder::new("size");
    let path = folder.store();
    drop(open_store(&path, Some(4 * MIB), true).expect("create"));
    assert_eq!(open_store(&path, Some(4 * MIB), false).expect("exact").size(), 4 * MIB);
    assert_eq!(open_store(&path, Some(3 * MIB), false).expect("part of it").size(), 3 * MIB);
    let error = open_store(&path, Some(4 * MIB + 4096), false).expect_err("too small");
    assert!(matches!(error, StoreError::TooSmall { size, .. } if size == 4 * MIB), "{error}");
    assert_eq!(open_store(&path, Some(6 * MIB), true).expect("made longer").size(), 6 * MIB);
    let error = open_store(&path, Some(1 << 62), true).expect_err("no disk is as large");
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
}

#[test]
fn what_is_no_store_is_refused_by_its_reason() {
    let folder = Folder::new("refuse");
    let error = open_store(&folder.store(), None, true).expect_err("no size to create with");
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    let error = open_store(&folder.store(), Some(4 * MIB), false).expect_err("not to be created");
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    let error = open_store(&folder.0, None, false).expect_err("a folder");
    assert!(matches!(error, StoreError::NotAStore { .. }), "{error}");
    let error = open_store(Path::new("/dev/null"), None, false).expect_err("a character device");
    assert!(matches!(error, StoreError::NotAStore { .. }), "{error}");
}

#[test]
fn memory_is_no_place_to_park_memory() {
    let path = PathBuf::from(format!("/dev/shm/tiermgr-disk-{}", std::process::id()));
    if !matches!(file_system_of(Path::new("/dev/shm")), Ok(libc::TMPFS_MAGIC)) {
        eprintln!("skipped: /dev/shm is no tmpfs");
        assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none());
        return;
    }
    let error = open_store(&path, Some(4 * MIB), true).expect_err("tmpfs");
    assert!(matches!(error, StoreError::InMemory { kind: "tmpfs", .. }), "{error}");
    assert!(!path.exists(), "nothing is left behind");
    std::fs::write(&path, vec![0; 4 << 20]).expect("file");
    let error = open_store(&path, None, false).expect_err("tmpfs");
    assert!(matches!(error, StoreError::InMemory { .. }), "{error}");
    std::fs::remove_file(&path).expect("clean");
}

#[test]
fn lines_of_the_lock_table_are_understood() {
    let line = "1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF";
    assert_eq!(parse_lock(line, libc::makedev(0xfe, 1), 5678), Some(1234));
    assert_eq!(parse_lock(line, libc::makedev(0xfe, 1), 5679), None);
    assert_eq!(parse_lock(line, libc::makedev(0xfe, 2), 5678), None);
    let waiting = "2: -> FLOCK  ADVISORY  WRITE 99 fe:01:5678 0 EOF";
    assert_eq!(parse_lock(waiting, libc::makedev(0xfe, 1), 5678), Some(99));
    assert_eq!(parse_lock("3: POSIX  ADVISORY  READ 7 fe:01:5678 0 0", 0, 5678), None);
}
