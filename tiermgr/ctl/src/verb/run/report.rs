//! What happened in a run: some lines for people, JSON for programs.

use super::RunError;
use super::rules::{self, LeftOut};
use super::strays::{self, MATTERS_BYTES, Stray};
use super::survivors::{self, Survivor};
use crate::cli::RunArgs;
use crate::complain;
use crate::render::{bytes, count, pages};
use nix::sys::resource::{UsageWho, getrusage};
use serde::Serialize;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tiermgr_sys::proc;
use tiermgr_wire::control::{FamilyStats, Status};

/// Lines of a summary at most, warnings included.
const LINES_MAX: usize = 14;
/// Code, stacks and the like.
const BEYOND_BYTES_ALLOWED: u64 = 64 << 20;
/// Said where a daemon that serves others too has come and gone.
const RESTARTED: &str = "the daemon was restarted meanwhile: what it counts began anew, and how many programs \
                         of this run it managed is not known";

/// The content of `--report`. Field names do not change within a major version.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Program and arguments.
    command: Vec<String>,
    /// As `tiermgrctl run` returns it.
    exit_status: u8,
    /// From the start of the program to its end.
    wall_seconds: f64,
    /// A private daemon served the run. Otherwise `totals` is what the daemon did meanwhile, for all of
    /// its programs.
    private_daemon: bool,
    /// Clients that attached to the daemon during the run: processes, where one that uses the preload
    /// library and the C interface counts twice. 0: none was limited or parked.
    /// `null`: the daemon was restarted, and does not know.
    attached_processes: Option<u64>,
    /// Programs with much memory that were seen to run without the library, at looks about a second apart.
    unreached_programs: Vec<Stray>,
    /// Programs that lived on when CMD had ended: those of a private daemon, and others with much memory that were
    /// seen. Their peaks until then are counted, what they take later is not.
    surviving_processes: Vec<Survivor>,
    /// What all programs of the daemon together, and the daemon itself, may have in DRAM.
    dram_limit_bytes: u64,
    /// Capacity of the store.
    store_capacity_bytes: u64,
    /// Counters.
    totals: FamilyStats,
    /// Most memory that any one process of the run had, what tiermgr does not manage included.
    largest_process_peak_rss_bytes: u64,
    /// Most memory that the serving process had, with its state files as seen about once a second.
    daemon_peak_rss_bytes: Option<u64>,
    /// Times that the daemon died and was started again.
    daemon_restarts: u32,
    /// What an operator should know.
    warnings: Vec<String>,
}

/// What was seen of the programs themselves.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Who was not reached.
    pub(super) unreached: Vec<Stray>,
    /// The largest that the rules leave out.
    pub(super) left_out: Option<LeftOut>,
    /// Who lives on.
    pub(super) survivors: Vec<Survivor>,
}

impl Report {
    pub(super) fn new(
        args: &RunArgs,
        exit_status: u8,
        wall: Duration,
        status: &Status,
        before: Option<&Status>,
        seen: Seen,
    ) -> Self {
        // What a serving process counts ends with it; a new one begins with the programs that it finds.
        let same = before.filter(|before| before.daemon_pid == status.daemon_pid);
        let is_whole = match before {
            Some(_) => same.is_some(),
            None => status.restarts == 0 || status.attached_total > 0,
        };
        let attached_before = same.map_or(0, |before| before.attached_total);
        let attached_processes =
            is_whole.then(|| status.attached_total.saturating_sub(attached_before));
        let peak = peak_of_programs().max(survivors::peak(&seen.survivors));
        let unmanaged = Unmanaged {
            small: args.small,
            mmap: args.mmap,
            rules: rules::source(args),
            left_out: seen.left_out.as_ref(),
        };
        let mut warnings = status.warnings.clone();
        if !is_whole {
            warnings.insert(0, RESTARTED.to_owned());
        }
        if let Some(warning) = strays::warning(&seen.unreached) {
            warnings.insert(0, warning);
        } else if attached_processes == Some(0) && peak >= MATTERS_BYTES {
            warnings.insert(0, unmanaged.all());
        } else if before.is_none()
            && let Some(warning) = unmanaged.beyond(peak, status.dram_limit_bytes)
        {
            // Of a daemon that serves others too nobody knows what this program's share is.
            warnings.insert(0, warning);
        }
        Self {
            command: args.command.iter().map(|arg| arg.to_string_lossy().into_owned()).collect(),
            exit_status,
            wall_seconds: wall.as_secs_f64(),
            private_daemon: before.is_none(),
            attached_processes,
            unreached_programs: seen.unreached,
            surviving_processes: seen.survivors,
            dram_limit_bytes: status.dram_limit_bytes,
            store_capacity_bytes: status.store_capacity_bytes,
            totals: same.map_or(status.totals, |before| since(&before.totals, &status.totals)),
            largest_process_peak_rss_bytes: peak,
            daemon_peak_rss_bytes: proc::status_bytes(status.daemon_pid, "VmHWM")
                .map(|peak| peak.max(status.own_peak_bytes)),
            daemon_restarts: status
                .restarts
                .saturating_sub(before.map_or(0, |before| before.restarts)),
            warnings,
        }
    }

    /// Warns of the processes that live on still, now that the private daemon, if there is one, was asked to end.
    /// `is_served`: there is a daemon all the same.
    pub(super) fn tell_of_survivors(&mut self, is_served: bool) {
        self.surviving_processes = survivors::living(&self.surviving_processes);
        self.largest_process_peak_rss_bytes =
            self.largest_process_peak_rss_bytes.max(survivors::peak(&self.surviving_processes));
        if let Some(warning) = survivors::warning(&self.surviving_processes, is_served) {
            self.warnings.insert(0, warning);
        }
    }

    /// Prints the summary, and writes the file.
    pub(super) fn publish(&self, file: Option<ReportFile>) {
        // With stderr closed there is nobody left to tell.
        drop(io::stderr().write_all(self.summary().as_bytes()));
        let Some(mut file) = file else { return };
        let written = serde_json::to_string_pretty(self)
            .map_err(io::Error::from)
            .and_then(|text| file.write(&(text + "\n")));
        if let Err(error) = written {
            complain(&format!("writing {}: {error}", file.path.display()));
        }
    }

    fn managed(&self) -> String {
        match self.attached_processes {
            Some(1) => "1 client".to_owned(),
            Some(clients) => format!("{} clients", count(clients)),
            None => "unknown".to_owned(),
        }
    }

    fn summary(&self) -> String {
        let totals = &self.totals;
        let name = self.command.first().map_or("", String::as_str);
        let peak = self
            .daemon_peak_rss_bytes
            .map_or_else(String::new, |peak| format!(", of which the daemon took {}", bytes(peak)));
        let mut lines = vec![
            format!("{name}: status {} after {:.2} s", self.exit_status, self.wall_seconds),
            format!(
                "  managed {}, {} at most in one process",
                self.managed(),
                bytes(self.largest_process_peak_rss_bytes)
            ),
            format!("  dram    {} allowed{peak}", bytes(self.dram_limit_bytes)),
            format!("  disk    {} set aside for what is parked", bytes(self.store_capacity_bytes)),
            format!(
                "  out     {} parked, {} of it without a write",
                pages(totals.parked_pages),
                pages(totals.parked_clean_pages)
            ),
            format!(
                "  in      {} recalled, {} prefetched, {} rescued",
                pages(totals.recalled_pages),
                pages(totals.prefetched_pages),
                pages(totals.rescued_pages)
            ),
            format!("  faults  {}", count(totals.faults)),
            format!(
                "  store   {} written, {} read, {} errors",
                bytes(totals.store_written_bytes),
                bytes(totals.store_read_bytes),
                count(totals.store_errors)
            ),
        ];
        if totals.poisoned_pages > 0 {
            lines.push(format!("  LOST    {} pages", count(totals.poisoned_pages)));
        }
        // Of a daemon that began to count anew a warning speaks.
        if self.daemon_restarts > 0 && self.attached_processes.is_some() {
            let times = match self.daemon_restarts {
                1 => "once".to_owned(),
                times => format!("{times} times"),
            };
            lines.push(format!(
                "  the daemon died and was started again {times}, and then counted anew"
            ));
        }
        if !self.private_daemon {
            lines.push("  (of all programs of the system's daemon meanwhile)".to_owned());
        }
        lines.extend(self.warnings.iter().map(|warning| format!("  warning: {warning}")));
        lines.truncate(LINES_MAX);
        lines.iter().map(|line| format!("tiermgr: {line}\n")).collect()
    }
}

/// What may keep memory from being managed.
#[derive(Clone, Copy, Debug, Default)]
struct Unmanaged<'a> {
    small: bool,
    mmap: bool,
    /// Where rules are named, if there are any.
    rules: Option<&'static str>,
    left_out: Option<&'a LeftOut>,
}

impl Unmanaged<'_> {
    /// Said where the whole run went by without tiermgr.
    fn all(&self) -> String {
        let none = "no program attached, so that nothing was limited or parked";
        if let Some(left_out) = self.left_out {
            return format!("{none}: {}", left_out.text());
        }
        let rules = self
            .rules
            .map_or_else(String::new, |rules| format!("or of programs that {rules} leaves out, "));
        format!(
            "{none}: all allocations were below --min-size (see --small), or mapped by the programs (see --mmap), \
             {rules}or tiermgr did not reach the program (README: What can go wrong)"
        )
    }

    /// Of a program that had far more in memory than the limit: managed memory alone would not have.
    fn beyond(&self, peak_bytes: u64, limit_bytes: u64) -> Option<String> {
        let allowed =
            limit_bytes.saturating_add(limit_bytes / 50).saturating_add(BEYOND_BYTES_ALLOWED);
        if peak_bytes <= allowed {
            return None;
        }
        let peak = bytes(peak_bytes);
        // Only of one that was beyond the limit itself is known that this was the cause.
        if let Some(left_out) = self.left_out.filter(|one| one.resident_bytes > allowed) {
            return Some(format!(
                "a process had {peak} in memory, more than --dram: {}",
                left_out.text()
            ));
        }
        let parts = [
            self.rules.map(|rules| format!("programs and blocks that {rules} leaves out")),
            (!self.small).then(|| "small blocks (see --small)".to_owned()),
            (!self.mmap).then(|| "what it maps itself (see --mmap)".to_owned()),
            Some("files that it maps".to_owned()),
            Some("stacks".to_owned()),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        Some(format!(
            "a process had {peak} in memory, more than --dram: the limit does not hold for what tiermgr does not \
             manage, such as {}",
            parts.join(", ")
        ))
    }
}

/// Most memory that any of the programs that have ended had.
fn peak_of_programs() -> u64 {
    getrusage(UsageWho::RUSAGE_CHILDREN)
        .ok()
        .and_then(|usage| u64::try_from(usage.max_rss()).ok())
        .map_or(u64::MAX, |kib| kib.saturating_mul(1024))
}

/// The file of `--report`, opened before the program starts so that a wrong name is not found out at the end
/// of a long run. One that was made, and in which nothing was written, is removed.
#[derive(Debug)]
pub(super) struct ReportFile {
    file: File,
    path: PathBuf,
    is_unused: bool,
}

impl ReportFile {
    pub(super) fn open(path: &Path) -> Result<Self, RunError> {
        let is_new = !path.exists();
        // What is in it stays there until there is something better.
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        match opened {
            Ok(file) => Ok(Self { file, path: path.to_owned(), is_unused: is_new }),
            Err(source) => Err(RunError::Report { path: path.to_owned(), source }),
        }
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        self.is_unused = false;
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        self.file.write_all(text.as_bytes())
    }
}

impl Drop for ReportFile {
    fn drop(&mut self) {
        if self.is_unused {
            // It says nothing, and whoever looks for it finds that there is no report.
            drop(fs::remove_file(&self.path));
        }
    }
}

/// What `after` has more than `before`; gauges as they are.
fn since(before: &FamilyStats, after: &FamilyStats) -> FamilyStats {
    let more = |of: fn(&FamilyStats) -> u64| of(after).saturating_sub(of(before));
    FamilyStats {
        faults: more(|s| s.faults),
        recalled_pages: more(|s| s.recalled_pages),
        prefetched_pages: more(|s| s.prefetched_pages),
        zeroed_pages: more(|s| s.zeroed_pages),
        rescued_pages: more(|s| s.rescued_pages),
        parked_pages: more(|s| s.parked_pages),
        parked_clean_pages: more(|s| s.parked_clean_pages),
        store_written_bytes: more(|s| s.store_written_bytes),
        store_read_bytes: more(|s| s.store_read_bytes),
        store_errors: more(|s| s.store_errors),
        poisoned_pages: more(|s| s.poisoned_pages),
        forks: more(|s| s.forks),
        moves_refused: more(|s| s.moves_refused),
        ioctl_retries: more(|s| s.ioctl_retries),
        ..*after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(warnings: usize) -> Report {
        Report {
            command: vec!["prog".to_owned()],
            exit_status: 0,
            wall_seconds: 1.5,
            private_daemon: false,
            attached_processes: Some(2),
            unreached_programs: Vec::new(),
            surviving_processes: Vec::new(),
            dram_limit_bytes: 1 << 30,
            store_capacity_bytes: 1 << 34,
            totals: FamilyStats { poisoned_pages: 1, ..FamilyStats::default() },
            largest_process_peak_rss_bytes: 90 << 20,
            daemon_peak_rss_bytes: Some(20 << 20),
            daemon_restarts: 1,
            warnings: vec!["w".to_owned(); warnings],
        }
    }

    #[test]
    fn a_summary_is_short_whatever_there_is_to_warn_of() {
        assert_eq!(report(0).summary().lines().count(), 11);
        assert_eq!(report(100).summary().lines().count(), LINES_MAX);
        assert!(report(0).summary().contains("LOST"));
    }

    #[test]
    fn a_process_far_beyond_the_limit_is_named() {
        const MIB: u64 = 1 << 20;
        let nothing = Unmanaged::default();
        assert_eq!(nothing.beyond(120 * MIB, 64 * MIB), None);
        let warning = Unmanaged { mmap: true, ..nothing }.beyond(479 * MIB, 64 * MIB).unwrap();
        assert!(warning.contains("479 MiB") && warning.contains("--small"), "{warning}");
        assert!(!warning.contains("--mmap") && !warning.contains("--only"), "{warning}");
        assert_eq!(nothing.beyond(u64::MAX, u64::MAX), None);
        let with_rules = Unmanaged { rules: Some("--only"), ..nothing };
        assert!(with_rules.beyond(479 * MIB, 64 * MIB).unwrap().contains("--only"));
        assert!(with_rules.all().contains("--only") && !nothing.all().contains("--only"));
    }

    #[test]
    fn counters_are_of_the_run_and_gauges_of_now() {
        let before = FamilyStats { faults: 10, dram_now_bytes: 5, ..FamilyStats::default() };
        let after = FamilyStats { faults: 13, dram_now_bytes: 7, ..FamilyStats::default() };
        let run = since(&before, &after);
        assert_eq!((run.faults, run.dram_now_bytes), (3, 7));
        assert_eq!(since(&after, &before).faults, 0);
    }

    #[test]
    fn the_report_has_the_promised_fields() {
        let json = serde_json::to_value(report(1)).unwrap();
        for field in [
            "command",
            "exit_status",
            "attached_processes",
            "unreached_programs",
            "surviving_processes",
            "wall_seconds",
            "dram_limit_bytes",
            "totals",
            "largest_process_peak_rss_bytes",
            "daemon_peak_rss_bytes",
        ] {
            assert!(json.get(field).is_some(), "{field}");
        }
    }
}
