//! `tiermgrctl tiers`.

use super::VerbError;
use crate::connect::{ConnectError, Link};
use crate::render::{self, Table, bytes};
use std::path::Path;
use tiermgr_wire::control::{ControlReply, ControlRequest, TierRow};

/// Asks and prints.
pub(crate) fn run(socket: Option<&Path>, json: bool) -> Result<(), VerbError> {
    let rows = match Link::open(socket)?.ask(ControlRequest::Tiers)? {
        ControlReply::Tiers(rows) => rows,
        other => return Err(ConnectError::Unexpected(format!("{other:?}")).into()),
    };
    if json {
        return Ok(render::json(&rows)?);
    }
    Ok(render::print(&text(&rows))?)
}

fn text(rows: &[TierRow]) -> String {
    let mut table =
        Table::new(&["tier", ">used", ">promised", ">free", ">total", "state", "backing"]);
    for row in rows {
        table.row(vec![
            row.name.clone(),
            bytes(row.used_bytes),
            bytes(row.reserved_bytes),
            bytes(row.free_bytes),
            bytes(row.total_bytes),
            row.state.clone(),
            row.backing.clone(),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tier_has_a_line() {
        let row = |name: &str| TierRow {
            name: name.to_owned(),
            backing: "memory".to_owned(),
            used_bytes: 1 << 20,
            reserved_bytes: 0,
            free_bytes: 0,
            total_bytes: 1 << 20,
            state: "ok".to_owned(),
        };
        let text = text(&[row("dram"), row("nvme")]);
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("nvme  1.0 MiB"), "{text}");
    }
}
