//! How much memory a process may still take before its cgroup is at its limit.
//!
//! UFFDIO_COPY charges the *client's* cgroup, and on cgroup v1 a charge at the limit makes the kernel kill
//! the client. Both versions are read; the limit that counts is the tightest one on the way up to the root.

use crate::task::with_memory;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Limit and use of the tightest cgroup above a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// What it may use.
    pub limit: u64,
    /// What it uses, page cache included.
    pub used: u64,
    /// Page cache within `used` that the kernel can drop at once.
    pub reclaimable: u64,
}

impl MemoryUse {
    /// Bytes that may still be taken.
    pub const fn headroom(&self) -> u64 {
        self.limit.saturating_sub(self.used.saturating_sub(self.reclaimable))
    }
}

/// Names of the files of one version.
#[derive(Debug)]
struct Names {
    limit: &'static str,
    used: &'static str,
    /// Keys of `memory.stat` that count as reclaimable.
    cache: [&'static str; 2],
}

const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
const V2: Names =
    Names { limit: "memory.max", used: "memory.current", cache: ["inactive_file", "active_file"] };

/// One cgroup on the way up, its files kept open.
#[derive(Debug)]
struct Level {
    limit: File,
    used: File,
    stat: File,
    names: &'static Names,
}

/// The cgroups above one process, opened once so that asking costs a few reads and no path.
///
/// A process that moves to another cgroup afterwards is not followed.
#[derive(Debug)]
pub struct MemoryGauge {
    levels: Vec<Level>,
}

impl MemoryGauge {
    /// Opens the memory cgroups of a process; without any, the gauge knows no limit.
    ///
    /// # Errors
    /// ESRCH: no such process, or it is ending.
    pub fn open(pid: i32) -> std::io::Result<Self> {
        // Version 1 shows the root to whoever asks of a thread that has ended.
        let memberships =
            with_memory(pid, |task| std::fs::read_to_string(format!("/proc/{task}/cgroup")))?;
        let mut levels = Vec::new();
        for (mount, path, names) in places(&memberships) {
            for folder in path.ancestors() {
                let folder = mount.join(folder.strip_prefix("/").unwrap_or(folder));
                // The root of version 2 has no limit, and what a namespace hides is not there.
                if let Some(level) = Level::open(&folder, names) {
                    levels.push(level);
                }
            }
        }
        Ok(Self { levels })
    }

    /// The tightest limit and its use; `None` where nothing is limited.
    pub fn read(&self) -> Option<MemoryUse> {
        self.levels.iter().filter_map(Level::read).min_by_key(MemoryUse::headroom)
    }

    /// Bytes that the process may still take; `None` where nothing is limited.
    pub fn headroom(&self) -> Option<u64> {
        self.read().map(|memory| memory.headroom())
    }
}

/// Where to look, from the text of `/proc/PID/cgroup` (`number:controllers:path` a line).
fn places(memberships: &str) -> Vec<(PathBuf, &Path, &'static Names)> {
    let mut places = Vec::new();
    for line in memberships.lines() {
        let mut words = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        if controllers.split(',').any(|c| c == "memory") {
            places.push((PathBuf::from("/sys/fs/cgroup/memory"), Path::new(path), &V1));
        } else if controllers.is_empty() {
            for mount in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
                places.push((PathBuf::from(mount), Path::new(path), &V2));
            }
        }
    }
    places
}

impl Level {
    fn open(folder: &Path, names: &'static Names) -> Option<Self> {
        let open = |name| File::open(folder.join(name)).ok();
        Some(Self {
            limit: open(names.limit)?,
            used: open(names.used)?,
            stat: open("memory.stat")?,
            names,
        })
    }

    fn read(&self) -> Option<MemoryUse> {
        /// No machine has as much: version 1 writes such a number for "no limit".
        const UNLIMITED: u64 = 1 << 60;
        let mut buffer = [0; 8192];
        let limit = number(text(&self.limit, &mut buffer)?)?;
        if limit >= UNLIMITED {
            return None;
        }
        let used = number(text(&self.used, &mut buffer)?)?;
        let stat = text(&self.stat, &mut buffer)?;
        let reclaimable = self.names.cache.iter().filter_map(|key| value_of(stat, key)).sum();
        Some(MemoryUse { limit, used, reclaimable })
    }
}

/// The beginning of a file, as far as it fits; these files are short.
fn text<'a>(file: &File, buffer: &'a mut [u8]) -> Option<&'a str> {
    let n = file.read_at(buffer, 0).ok()?;
    str::from_utf8(buffer.get(..n)?).ok()
}

/// `max` is no number.
fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn value_of(stat: &str, key: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok())
}

/// The tightest limit above a process; `None` where there is none, or no such process.
pub fn memory_of(pid: i32) -> Option<MemoryUse> {
    MemoryGauge::open(pid).ok()?.read()
}

/// Bytes that a process may still take before a cgroup above it is at its limit; `None` where there is no
/// limit. Opens files: keep a [`MemoryGauge`] to ask often.
pub fn headroom(pid: i32) -> Option<u64> {
    memory_of(pid).map(|memory| memory.headroom())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_in_the_membership_list() {
        let list = "4:memory:/a/b\n3:cpuset:/\n0::/user.slice\n";
        let found: Vec<_> = places(list)
            .into_iter()
            .map(|(mount, path, names)| (mount.join(path.strip_prefix("/").unwrap()), names.limit))
            .collect();
        assert_eq!(
            found,
            [
                (PathBuf::from("/sys/fs/cgroup/memory/a/b"), "memory.limit_in_bytes"),
                (PathBuf::from("/sys/fs/cgroup/user.slice"), "memory.max"),
                (PathBuf::from("/sys/fs/cgroup/unified/user.slice"), "memory.max"),
            ]
        );
    }

    #[test]
    fn cache_counts_as_room_and_max_as_no_limit() {
        let memory = MemoryUse { limit: 100, used: 90, reclaimable: 30 };
        assert_eq!(memory.headroom(), 40);
        assert_eq!(MemoryUse { limit: 100, used: 130, reclaimable: 10 }.headroom(), 0);
        assert_eq!(number("max\n"), None);
        assert_eq!(number("4096\n"), Some(4096));
        let stat = "cache 5\ninactive_file 7\ntotal_inactive_file 9\n";
        assert_eq!(value_of(stat, "inactive_file"), Some(7));
        assert_eq!(value_of(stat, "total_inactive_file"), Some(9));
    }

    #[test]
    fn a_process_that_is_gone_has_no_limit() {
        assert_eq!(headroom(i32::MAX), None);
    }
}
