//! Whether a path can hold a store. Nothing that is there is changed.

use super::Finding;
use crate::render;
use crate::verb::run::place::{self, Unfit};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use tiermgr_wire::chain;

const NAME: &str = "store";

/// Looks at `path`: a block device, an existing file, or a file that is to be made.
pub(super) fn check(path: &Path) -> Vec<Finding> {
    match fs::metadata(path) {
        Ok(facts) if facts.file_type().is_block_device() => vec![device(path)],
        Ok(facts) if facts.is_file() => vec![file(path, facts.len())],
        Ok(facts) if facts.is_dir() => vec![Finding::fail(
            NAME,
            format!("{} is a folder", path.display()),
            format!("name a file in it: {}", path.join("store").display()),
        )],
        Ok(_) => vec![Finding::fail(
            NAME,
            format!("{} is neither a file nor a block device", path.display()),
            "name a file or a block device",
        )],
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => vec![folder(path)],
        Err(error) => vec![Finding::fail(
            NAME,
            format!("{}: {error}", path.display()),
            "check the permissions of its folders, or use sudo",
        )],
    }
}

fn device(path: &Path) -> Finding {
    if let Some(user) = mounted_at(path) {
        return Finding::fail(
            NAME,
            format!("{} is mounted at {user}", path.display()),
            format!("umount {user}, if its content may be destroyed"),
        );
    }
    match place::try_direct_read(path) {
        Ok(()) => Finding::ok(NAME, format!("{} reads directly", path.display())),
        Err(error) => Finding::fail(
            NAME,
            format!("{} cannot be read directly: {error}", path.display()),
            "check that it is a disk and that you may open it (sudo)",
        ),
    }
}

fn file(path: &Path, len: u64) -> Finding {
    match place::try_direct_read(path) {
        Ok(()) => Finding::ok(
            NAME,
            format!("{} of {} reads directly", path.display(), render::bytes(len)),
        ),
        Err(error) => unfit(path, &Unfit::NoDirectIo(error)),
    }
}

fn folder(path: &Path) -> Finding {
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => Path::new("/"),
    };
    if !folder.exists() {
        return Finding::fail(
            NAME,
            format!("the folder {} does not exist", folder.display()),
            format!("mkdir -p {}", folder.display()),
        );
    }
    match place::check_folder(folder) {
        Ok(free) => Finding::ok(
            NAME,
            format!("{} can be made; {} are free there", path.display(), render::bytes(free)),
        ),
        Err(error) => unfit(folder, &error),
    }
}

fn unfit(path: &Path, error: &Unfit) -> Finding {
    Finding::fail(
        NAME,
        format!("{}: {}", path.display(), chain(error)),
        "name a file on a local disk (ext4, xfs, btrfs), or a block device",
    )
}

/// Where the device is mounted, if it is.
fn mounted_at(path: &Path) -> Option<String> {
    let real = fs::canonicalize(path).ok()?;
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (source, target) = (words.next()?, words.next()?);
        (fs::canonicalize(source).ok()? == real).then(|| target.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn memory_is_no_place_for_a_store() {
        if nix::sys::statfs::statfs("/dev/shm")
            .is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC)
        {
            let findings = check(Path::new("/dev/shm/store"));
            assert!(findings.iter().any(|finding| finding.state == State::Fail), "{findings:?}");
        }
        assert_eq!(check(Path::new("/"))[0].state, State::Fail);
        assert_eq!(check(Path::new("/nonexistent/store"))[0].state, State::Fail);
        assert_eq!(check(Path::new("/dev/null"))[0].state, State::Fail);
    }
}
