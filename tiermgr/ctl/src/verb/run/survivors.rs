//! Processes of a run that live on when CMD has ended.
//!
//! Nobody waits for them, and so what they have had is in no count of ended children: their peaks are read from
//! `/proc`, and that they go on is said. Known are the programs of a private daemon, and all with as much memory
//! as matters that were seen while CMD ran.

use crate::connect::Link;
use crate::render::bytes;
use serde::Serialize;
use std::fs;
use std::path::Path;
use tiermgr_sys::{pidfd, proc, process};
use tiermgr_wire::control::{ControlReply, ControlRequest};

/// A process that CMD, or one that it started, has left behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Survivor {
    /// Its process.
    pid: i32,
    /// As `ps` shows it.
    name: String,
    /// Most memory that it had until the report was made.
    peak_rss_bytes: u64,
    /// With `pid` it is this process and no later one.
    #[serde(skip)]
    start_time: u64,
}

/// The programs that a private daemon serves. It may not answer; then they are not known.
pub(super) fn served_by(socket: &Path) -> Vec<i32> {
    let rows = Link::open(Some(socket)).and_then(|link| {
        link.list(
            |skip| ControlRequest::Clients { skip },
            |reply| match reply {
                ControlReply::Clients(rows) => Some(rows),
                _ => None,
            },
        )
    });
    rows.unwrap_or_default().iter().map(|row| row.pid).filter(|&pid| pid > 0).collect()
}

/// Those of `pids`, and of `seen` by process and start time, that live.
pub(super) fn among(pids: &[i32], seen: impl Iterator<Item = (i32, u64)>) -> Vec<Survivor> {
    let known = pids.iter().filter_map(|&pid| look(pid));
    let mut living: Vec<_> = known
        .chain(seen.filter_map(|(pid, start)| look(pid).filter(|now| now.start_time == start)))
        .collect();
    living.sort_by_key(|survivor| survivor.pid);
    living.dedup_by_key(|survivor| survivor.pid);
    living
}

/// Those that live still, with what they have had by now.
pub(super) fn living(before: &[Survivor]) -> Vec<Survivor> {
    among(&[], before.iter().map(|survivor| (survivor.pid, survivor.start_time)))
}

fn look(pid: i32) -> Option<Survivor> {
    let start_time = pidfd::start_time(pid).ok()?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned();
    // One that has ended, and that nobody has waited for, has no memory.
    let peak_rss_bytes = proc::status_bytes(pid, "VmHWM")?;
    process::is_running(pid).then_some(Survivor { pid, name, peak_rss_bytes, start_time })
}

/// Most memory that any of them had.
pub(super) fn peak(survivors: &[Survivor]) -> u64 {
    survivors.iter().map(|survivor| survivor.peak_rss_bytes).max().unwrap_or(0)
}

/// The line of a summary. `is_served`: there is a daemon that holds the limit.
pub(super) fn warning(survivors: &[Survivor], is_served: bool) -> Option<String> {
    let largest = survivors.iter().max_by_key(|survivor| survivor.peak_rss_bytes)?;
    let Survivor { pid, name, .. } = largest;
    let peak = bytes(largest.peak_rss_bytes);
    let (who, they) = match survivors.len() {
        1 => (
            format!("a process of this run lives on: {name} (pid {pid}, {peak} at most so far)"),
            "it",
        ),
        more => (
            format!(
                "{more} processes of this run live on, of which {name} (pid {pid}) had most, {peak}"
            ),
            "they",
        ),
    };
    let limit =
        if is_served { "" } else { ", and is no longer limited: the private daemon has ended" };
    Some(format!("{who}; what {they} may take from now on is not in this summary{limit}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_ended_or_is_another_does_not_live_on() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        let start = pidfd::start_time(pid).unwrap();
        let found = among(&[pid], [(pid, start)].into_iter());
        assert!(found.len() == 1 && peak(&found) > 0, "{found:?}");
        assert_eq!(among(&[], [(pid, start + 1)].into_iter()), []);
        child.kill().unwrap();
        // It stays a zombie until it is waited for.
        while process::is_running(pid) {
            std::thread::yield_now();
        }
        assert_eq!(living(&found), []);
        child.wait().unwrap();
        assert_eq!(living(&found), []);
    }

    #[test]
    fn the_largest_is_named_and_the_others_are_counted() {
        assert_eq!(warning(&[], true), None);
        let survivor = |pid, peak_rss_bytes| Survivor {
            pid,
            name: format!("n{pid}"),
            peak_rss_bytes,
            start_time: 0,
        };
        let one = warning(&[survivor(7, 30 << 20)], false).unwrap();
        assert!(one.contains("n7 (pid 7, 30.0 MiB") && one.contains("no longer limited"), "{one}");
        let two = warning(&[survivor(7, 30 << 20), survivor(8, 90 << 20)], true).unwrap();
        assert!(two.contains("2 processes") && two.contains("n8 (pid 8)"), "{two}");
        assert!(!two.contains("limited"), "{two}");
    }
}
