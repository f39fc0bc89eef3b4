//! The kernel, its settings, and the installation.

use super::Finding;
use crate::connect::{ConnectError, Link, how_to_start};
use crate::render;
use crate::verb::run::find;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statfs;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tiermgr_sys::cgroup;
use tiermgr_sys::probe::KernelFeatures;
use tiermgr_sys::uffd::DeviceFd;
use tiermgr_wire::{DEFAULT_SOCKET, chain};

/// Enough for many clients with many children.
const OPEN_FILES_ENOUGH: u64 = 1 << 14;

/// The kernel and its settings.
pub(super) fn machine() -> Vec<Finding> {
    let mut findings = vec![kernel()];
    findings.extend(userfaultfd());
    findings.extend([
        huge_pages(),
        swap(),
        overcommit(),
        memory_cgroup(),
        open_files(),
        state_dir(),
    ]);
    findings
}

/// What of tiermgr is where.
pub(super) fn installation(socket: Option<&Path>) -> Vec<Finding> {
    vec![found("tiermgrd", find::daemon()), found("preload", find::preload()), daemon(socket)]
}

fn kernel() -> Finding {
    let release = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    match version_of(&release) {
        Some(version) if version >= (6, 8) => Finding::ok("kernel", release),
        Some(version) if version >= (6, 1) => Finding::warn(
            "kernel",
            format!("{release} works, without moving whole pages"),
            "Linux 6.8 or later parks pages that need not wait in place before",
        ),
        _ => Finding::fail(
            "kernel",
            format!("{release} is too old or unknown"),
            "boot Linux 6.1 or later, better 6.8",
        ),
    }
}

fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn userfaultfd() -> Vec<Finding> {
    if let Err(error) = DeviceFd::open() {
        let fix = if nix::unistd::geteuid().is_root() {
            "build the kernel with CONFIG_USERFAULTFD=y; in a container --device /dev/userfaultfd, or run tiermgrd \
             outside and pass its socket in"
        } else {
            "run as root: `sudo tiermgrctl doctor`; programs of a system daemon need no rights"
        };
        return vec![Finding::fail("userfaultfd", chain(&error), fix)];
    }
    let mut findings = vec![Finding::ok("userfaultfd", "/dev/userfaultfd can be opened")];
    let features = match KernelFeatures::probe(&[]) {
        Ok(features) => features,
        Err(error) => {
            findings.push(Finding::fail(
                "features",
                chain(&error),
                "run as root, outside of containers that forbid userfaultfd or io_uring",
            ));
            return findings;
        }
    };
    for name in KernelFeatures::NAMES {
        if features.has(name) == Some(true) {
            findings.push(Finding::ok(name, "works"));
        } else if KernelFeatures::INDISPENSABLE.contains(name) {
            findings.push(Finding::fail(name, "does not work", fix_for(name)));
        } else {
            findings.push(Finding::warn(
                name,
                "does not work; tiermgr does without",
                fix_for(name),
            ));
        }
    }
    findings
}

/// What allows a feature, where the kernel has it and somebody forbids it.
fn fix_for(feature: &str) -> &'static str {
    match feature {
        "io_uring" => {
            "sysctl kernel.io_uring_disabled=0; in a container a seccomp profile that allows io_uring_setup, \
             io_uring_enter and io_uring_register (--security-opt seccomp=FILE)"
        }
        "uffd_event_fork" | "pagemap" => {
            "give the daemon CAP_SYS_PTRACE: run it as root; in a container --cap-add SYS_PTRACE"
        }
        "pidfd_getfd" | "kcmp" | "process_vm_readv" => {
            "give the daemon CAP_SYS_PTRACE: run it as root; in a container --cap-add SYS_PTRACE, and a seccomp \
             profile that allows pidfd_getfd, kcmp and process_vm_readv (--security-opt seccomp=FILE)"
        }
        _ => "boot a newer kernel: 6.8 has everything that tiermgr uses",
    }
}

fn huge_pages() -> Finding {
    const NAME: &str = "huge pages";
    match fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled") {
        Ok(text) if text.contains("[never]") => Finding::warn(
            NAME,
            "transparent huge pages are off",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Ok(text) => Finding::ok(NAME, text.trim().to_owned()),
        Err(error) => Finding::warn(
            NAME,
            format!("cannot be told: {error}"),
            "build the kernel with CONFIG_TRANSPARENT_HUGEPAGE=y",
        ),
    }
}

fn swap() -> Finding {
    const NAME: &str = "swap";
    let areas = fs::read_to_string("/proc/swaps").map_or(0, |text| text.lines().skip(1).count());
    if areas == 0 {
        Finding::ok(NAME, "off")
    } else {
        Finding::warn(
            NAME,
            format!("{areas} areas in use: the kernel may swap out what tiermgr keeps in DRAM"),
            "swapoff -a, or set memory.swap.max=0 for the programs' cgroup",
        )
    }
}

fn overcommit() -> Finding {
    const NAME: &str = "overcommit";
    match fs::read_to_string("/proc/sys/vm/overcommit_memory").as_deref().map(str::trim) {
        Ok("2") => Finding::warn(
            NAME,
            "strict: allocations larger than the commit limit fail, tiermgr or not",
            "sysctl vm.overcommit_memory=0",
        ),
        Ok(mode) => Finding::ok(NAME, format!("mode {mode}")),
        Err(error) => Finding::warn(NAME, format!("cannot be told: {error}"), "mount /proc"),
    }
}

fn memory_cgroup() -> Finding {
    const NAME: &str = "cgroup";
    match cgroup::memory_of(std::process::id().cast_signed()) {
        Some(memory) => Finding::ok(
            NAME,
            format!(
                "{} of {} used; programs started here share that limit, and --dram must fit in it",
                render::bytes(memory.used),
                render::bytes(memory.limit)
            ),
        ),
        None => Finding::ok(NAME, "no memory limit"),
    }
}

fn open_files() -> Finding {
    const NAME: &str = "open files";
    const FIX: &str = "LimitNOFILE=1048576 in the service, or `ulimit -Hn 1048576`";
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((_, hard)) if hard >= OPEN_FILES_ENOUGH => {
            Finding::ok(NAME, format!("up to {hard} for a process"))
        }
        Ok((_, hard)) => {
            Finding::warn(NAME, format!("at most {hard}: programs that fork much may hang"), FIX)
        }
        Err(error) => Finding::warn(NAME, format!("cannot be told: {error}"), FIX),
    }
}

fn state_dir() -> Finding {
    const NAME: &str = "tmpfs";
    const FIX: &str = "mount a tmpfs at /dev/shm or /run";
    let is_tmpfs = |path: &str| {
        statfs::statfs(path).is_ok_and(|fs| fs.filesystem_type() == statfs::TMPFS_MAGIC)
    };
    match ["/run", "/dev/shm"].into_iter().find(|path| is_tmpfs(path)) {
        Some(path) => Finding::ok(NAME, format!("{path} can hold the daemon's state")),
        None => Finding::warn(NAME, "neither /run nor /dev/shm is one", FIX),
    }
}

fn found(name: &'static str, result: Result<std::path::PathBuf, find::NotFound>) -> Finding {
    match result {
        Ok(path) => Finding::ok(name, path.display().to_string()),
        Err(error) => Finding::warn(name, error.what(), error.fix()),
    }
}

fn daemon(socket: Option<&Path>) -> Finding {
    const NAME: &str = "daemon";
    let path = socket.unwrap_or(Path::new(DEFAULT_SOCKET));
    match Link::open(socket).and_then(|link| link.status()) {
        Ok(status) => Finding::ok(
            NAME,
            format!(
                "version {} at {}; programs served: {}",
                status.version,
                path.display(),
                status.families
            ),
        ),
        // `run` starts its own, so none of this is a failure, for root.
        Err(error @ ConnectError::Forbidden { .. }) => Finding::warn(
            NAME,
            format!("{} is not open to this user", path.display()),
            join(path, &error),
        ),
        Err(ConnectError::Absent { .. }) => Finding::warn(
            NAME,
            format!("none answers at {}", path.display()),
            format!("{}; as root `tiermgrctl run` does without", how_to_start()),
        ),
        Err(error) => Finding::warn(
            NAME,
            chain(&error),
            "see the daemon's log; as root `tiermgrctl run` does without",
        ),
    }
}

/// How this user comes to be served.
fn join(socket: &Path, error: &ConnectError) -> String {
    let group = fs::metadata(socket).ok().map(|facts| facts.gid()).filter(|&gid| gid != 0);
    let group = group.and_then(|gid| nix::unistd::Group::from_gid(gid.into()).ok().flatten());
    match group {
        Some(group) => {
            format!("sudo usermod -aG {} USER, then log in anew; or use sudo", group.name)
        }
        None => chain(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_all_kinds_are_understood() {
        assert_eq!(version_of("6.18.5"), Some((6, 18)));
        assert_eq!(version_of("6.1.0-13-amd64"), Some((6, 1)));
        assert_eq!(version_of("7.3-rc1"), Some((7, 3)));
        assert_eq!(version_of("x"), None);
    }
}
