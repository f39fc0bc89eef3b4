//! `tiermgrctl status`.

use super::VerbError;
use crate::connect::Link;
use crate::render::{self, bytes, count, pages};
use std::fmt::Write as _;
use std::path::Path;
use tiermgr_wire::control::Status;

/// Asks and prints.
pub(crate) fn run(socket: Option<&Path>, json: bool) -> Result<(), VerbError> {
    let status = Link::open(socket)?.status()?;
    if json {
        return Ok(render::json(&status)?);
    }
    Ok(render::print(&text(&status))?)
}

fn text(status: &Status) -> String {
    let totals = &status.totals;
    let mut text = format!(
        "tiermgrd {} up {}, pid {}, restarted {}\n",
        status.version,
        render::duration(status.uptime_s),
        status.daemon_pid,
        times(status.restarts),
    );
    let mut line = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _infallible = writeln!(text, "{name:<10} {value}");
    };
    line(
        "dram",
        format!(
            "{} lent of {}, {} for the daemon, {} in use ({} attached; {} in limbo, {} pinned)",
            bytes(status.dram_granted_bytes),
            bytes(status.dram_limit_bytes),
            bytes(status.dram_own_bytes),
            bytes(totals.dram_now_bytes),
            status.families,
            bytes(totals.limbo_now_bytes),
            bytes(totals.pinned_now_bytes),
        ),
    );
    line(
        "store",
        format!(
            "{} used of {}; {} written, {} read, {} errors",
            bytes(status.store_used_bytes),
            bytes(status.store_capacity_bytes),
            bytes(totals.store_written_bytes),
            bytes(totals.store_read_bytes),
            count(totals.store_errors),
        ),
    );
    line(
        "faults",
        format!(
            "{}; recalled {}, rescued {}, zeroed {}",
            count(totals.faults),
            pages(totals.recalled_pages),
            pages(totals.rescued_pages),
            pages(totals.zeroed_pages),
        ),
    );
    line(
        "moved",
        format!(
            "parked {} (clean {}), prefetched {}, now parked {}",
            pages(totals.parked_pages),
            pages(totals.parked_clean_pages),
            pages(totals.prefetched_pages),
            bytes(totals.parked_now_bytes),
        ),
    );
    line(
        "trouble",
        format!(
            "{} pages lost, {} moves refused, {} retries; {} forks",
            count(totals.poisoned_pages),
            count(totals.moves_refused),
            count(totals.ioctl_retries),
            count(totals.forks),
        ),
    );
    if !status.features_missing.is_empty() {
        line("kernel", format!("lacks {}", status.features_missing.join(", ")));
    }
    for warning in &status.warnings {
        line("warning", warning.clone());
    }
    text
}

fn times(count: u32) -> String {
    match count {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        count => format!("{count} times"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_warnings_and_no_empty_line() {
        let status = Status {
            version: "1".to_owned(),
            warnings: vec!["the store is 95 % full".to_owned()],
            features_missing: vec!["poison".to_owned()],
            ..Status::default()
        };
        let text = text(&status);
        assert!(text.contains("warning    the store is 95 % full\n"), "{text}");
        assert!(text.contains("kernel     lacks poison\n"), "{text}");
        assert!(text.lines().all(|line| !line.is_empty()), "{text}");
    }
}
