//! Folders for one test, gone with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// On a tmpfs.
    pub(crate) fn new() -> Self {
        Self::beneath(Path::new("/dev/shm"))
    }

    /// On the disk that holds the build, where `O_DIRECT` works.
    pub(crate) fn on_disk() -> Self {
        let exe = std::env::current_exe().expect("finding the test");
        Self::beneath(exe.parent().expect("finding the folder of the test"))
    }

    fn beneath(parent: &Path) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("tiermgr-engine-{}-{number}", std::process::id()));
        fs::create_dir(&path).expect("making a folder for a test");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}
