//! Checks of a configuration against the machine that it is for.

use super::{Config, ConfigError, StoreSize};
use nix::sys::statfs;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::{fs, io};
use tiermgr_engine::store::{self, StoreError};
use tiermgr_sys::{disk, proc};
use tiermgr_wire::chain;
use tiermgr_wire::size::Size;

impl Config {
    /// Checks what this machine has to have, and changes nothing. Gives what a daemon would put up with, or
    /// what may be mended before it starts.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for what no daemon could start with.
    pub fn check_machine(&self) -> Result<Vec<String>, ConfigError> {
        let mut warnings = Vec::new();
        self.group_id()?;
        if !is_on_tmpfs(&self.state_dir) {
            warnings.push(not_on_tmpfs(&self.state_dir));
        }
        if let Ok(Some(entry)) = entry_of_others(&self.state_dir) {
            warnings.push(format!("`state_dir`: {}", not_ours(&self.state_dir, &entry)));
        }
        let machine_bytes = proc::meminfo_bytes("MemTotal").unwrap_or(u64::MAX);
        warnings.extend(self.beyond_the_machine(machine_bytes));
        match store::check(&self.store.path, self.store.size_bytes(), self.store.create) {
            // The daemon that uses this configuration may be running.
            Ok(_) | Err(StoreError::Open(disk::StoreError::Locked { .. })) => {}
            Err(error) => warnings.push(format!("`store`: {}", chain(&error))),
        }
        Ok(warnings)
    }

    /// The group of the socket, where one is named.
    ///
    /// # Errors
    /// [`ConfigError::Value`] where there is no such group.
    pub fn group_id(&self) -> Result<Option<u32>, ConfigError> {
        let name = self.socket_group.as_str();
        if name.is_empty() {
            return Ok(None);
        }
        let wrong = |reason| ConfigError::Value { key: "socket_group", reason };
        match nix::unistd::Group::from_name(name) {
            Ok(Some(group)) => Ok(Some(group.gid.as_raw())),
            Ok(None) => Err(wrong(format!("there is no group `{name}`; make it with groupadd"))),
            Err(error) => Err(wrong(format!("looking up the group `{name}`: {error}"))),
        }
    }

    /// What to say where programs may have more DRAM than there is.
    #[must_use]
    pub fn beyond_the_machine(&self, machine_bytes: u64) -> Option<String> {
        let dram_bytes = self.dram.bytes(machine_bytes);
        (dram_bytes > machine_bytes).then(|| {
            format!(
                "a DRAM limit of {} is more than the machine has ({}): nothing will ever be parked",
                Size(dram_bytes),
                Size(machine_bytes).rounded()
            )
        })
    }
}

impl super::StoreSettings {
    /// Bytes to use, or `None` for all that is there.
    #[must_use]
    pub const fn size_bytes(&self) -> Option<u64> {
        match self.size {
            StoreSize::All => None,
            StoreSize::Bytes(size) => Some(size.0),
        }
    }
}

/// Who holds a lock on this file of a state directory uses the directory.
pub const LOCK_NAME: &str = "lock";
/// Which boot a state directory is of. Of the files that a daemon makes there only the lock is older.
pub const BOOT_NAME: &str = "boot";

/// Something in a folder that no daemon has made its state directory. A daemon removes what is in that.
///
/// # Errors
/// Of listing it; `NotFound` if there is none.
pub fn entry_of_others(state_dir: &Path) -> io::Result<Option<OsString>> {
    let mut other = None;
    for entry in fs::read_dir(state_dir)? {
        let name = entry?.file_name();
        if name == BOOT_NAME {
            return Ok(None);
        }
        if name != LOCK_NAME {
            other = Some(name);
        }
    }
    Ok(other)
}

/// What to say where there is something.
#[must_use]
pub fn not_ours(state_dir: &Path, entry: &OsStr) -> String {
    format!(
        "the folder {} holds {}, which is not tiermgrd's; name an empty folder, or one that is not there",
        state_dir.display(),
        Path::new(entry).display()
    )
}

/// Whether a folder is, or would be made, on a tmpfs.
#[must_use]
pub fn is_on_tmpfs(folder: &Path) -> bool {
    folder
        .ancestors()
        .find_map(|path| statfs::statfs(path).ok())
        .is_none_or(|facts| facts.filesystem_type() == statfs::TMPFS_MAGIC)
}

/// What to say where it is not.
#[must_use]
pub fn not_on_tmpfs(state_dir: &Path) -> String {
    format!(
        "the state directory {} is not on a tmpfs: keeping records there is slow, and wears the disk",
        state_dir.display()
    )
}
