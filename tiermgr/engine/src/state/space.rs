//! Room on the file system of the state directory.

use nix::sys::statvfs::statvfs;
use std::io;
use std::path::Path;

/// Bytes that are free on the file system of `path`.
///
/// # Errors
/// Of statvfs.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = statvfs(path)?;
    Ok(found.blocks_available().saturating_mul(found.fragment_size()))
}
