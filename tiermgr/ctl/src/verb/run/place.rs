//! Where a store can be: a folder on a file system that does direct I/O.
//!
//! O_DIRECT opens even on a tmpfs, where parking would move memory into memory; so the kind of the
//! file system is looked at first, and then a block is really written.

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::statfs::{self, FsType};
use nix::sys::statvfs;
use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use tiermgr_wire::chain;

/// Suits every device that Linux knows.
const BLOCK_BYTES: usize = 4096;
/// `RAMFS_MAGIC`, for which nix has no name.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// Why a folder or file is no place for a store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    /// It cannot be looked at or written to.
    #[error("cannot be used")]
    Unusable(#[source] io::Error),
    /// Its files are in memory.
    #[error("is in memory (tmpfs): parking there would free nothing")]
    Memory,
    /// No direct I/O.
    #[error("has no direct I/O")]
    NoDirectIo(#[source] io::Error),
}

/// No folder will do.
#[derive(Debug, thiserror::Error)]
#[error("there is no place for parked pages: {reasons}; name a file on a disk with --nvme")]
pub(crate) struct NoPlace {
    reasons: String,
}

/// A folder for a store.
#[derive(Debug)]
pub(crate) struct Place {
    /// Where.
    pub(crate) folder: PathBuf,
    /// Bytes that are free there.
    pub(crate) free_bytes: u64,
}

/// The first of TMPDIR, /var/tmp and the current directory that will do.
pub(crate) fn choose() -> Result<Place, NoPlace> {
    let folders = env::var_os("TMPDIR")
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
        .into_iter()
        .chain(["/var/tmp".into()])
        .chain(env::current_dir().ok());
    let mut reasons = Vec::new();
    for folder in folders {
        match check_folder(&folder) {
            Ok(free_bytes) => return Ok(Place { folder, free_bytes }),
            Err(error) => {
                reasons.push(format!("{} {}", folder.display(), chain(&error)));
            }
        }
    }
    Err(NoPlace { reasons: reasons.join("; ") })
}

/// Tries direct I/O in a folder, with a file that is removed at once. How many bytes are free there.
pub(crate) fn check_folder(folder: &Path) -> Result<u64, Unfit> {
    let kind = statfs::statfs(folder).map_err(|error| Unfit::Unusable(error.into()))?;
    if [statfs::TMPFS_MAGIC, RAMFS_MAGIC].contains(&kind.filesystem_type()) {
        return Err(Unfit::Memory);
    }
    let path = folder.join(format!(".tiermgr-probe-{}", std::process::id()));
    let outcome = try_direct_write(&path);
    // Where it could not be made there is nothing to remove.
    drop(fs::remove_file(&path));
    outcome?;
    free_bytes(folder).map_err(Unfit::Unusable)
}

/// Folders of runs begin so.
pub(crate) const FOLDER_PREFIX: &str = "tiermgr-run-";
/// The socket of a private daemon, in its folder.
pub(crate) const SOCKET_NAME: &str = "sock";

/// Where the folder for socket and state is made, in this order.
pub(crate) fn runtime_parents() -> [PathBuf; 3] {
    ["/dev/shm".into(), "/run".into(), env::temp_dir()]
}

/// Makes a folder that only we can enter.
pub(crate) fn fresh_folder(parent: &Path) -> io::Result<PathBuf> {
    // What mkdtemp fills in.
    let blank = "X".repeat(6);
    Ok(nix::unistd::mkdtemp(&parent.join(format!("{FOLDER_PREFIX}{blank}")))?)
}

/// Bytes that an ordinary user can still write to the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let facts = statvfs::statvfs(path)?;
    Ok(facts.blocks_available().saturating_mul(facts.fragment_size()))
}

fn try_direct_write(path: &Path) -> Result<(), Unfit> {
    let open = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(OFlag::O_DIRECT.bits())
        .open(path);
    let is_invalid = |error: &io::Error| error.raw_os_error() == Some(Errno::EINVAL as i32);
    let mut file: File = match open {
        Ok(file) => file,
        Err(error) if is_invalid(&error) => return Err(Unfit::NoDirectIo(error)),
        Err(error) => return Err(Unfit::Unusable(error)),
    };
    let mut buffer = vec![0; 2 * BLOCK_BYTES];
    file.write_all(aligned(&mut buffer)).map_err(|error| {
        if is_invalid(&error) { Unfit::NoDirectIo(error) } else { Unfit::Unusable(error) }
    })
}

/// An aligned block inside `buffer`, which is two blocks long.
fn aligned(buffer: &mut [u8]) -> &mut [u8] {
    let skip = buffer.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
    &mut buffer[skip..skip + BLOCK_BYTES]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tmpfs_is_refused_by_name() {
        let shm = Path::new("/dev/shm");
        let is_tmpfs =
            statfs::statfs(shm).is_ok_and(|fs| fs.filesystem_type() == statfs::TMPFS_MAGIC);
        if is_tmpfs {
            assert!(matches!(check_folder(shm), Err(Unfit::Memory)));
        } else {
            eprintln!("skipped: /dev/shm is not a tmpfs here");
            assert!(env::var_os("TIERMGR_CI_STRICT").is_none(), "/dev/shm is not a tmpfs");
        }
    }

    #[test]
    fn a_probe_leaves_nothing_behind() {
        let folder = fresh_folder(&env::temp_dir()).unwrap();
        // Whether there is direct I/O depends on the machine; that nothing stays does not.
        drop(check_folder(&folder));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir(&folder).unwrap();
        assert!(matches!(check_folder(&folder), Err(Unfit::Unusable(_))));
    }

    #[test]
    fn blocks_are_aligned() {
        let mut buffer = vec![0; 2 * BLOCK_BYTES];
        let block = aligned(&mut buffer);
        assert_eq!(block.len(), BLOCK_BYTES);
        assert_eq!(block.as_ptr().align_offset(BLOCK_BYTES), 0);
    }
}
