//! `tiermgrctl clients`.

use super::VerbError;
use crate::connect::Link;
use crate::render::{self, Table, bytes, count, pages};
use std::path::Path;
use tiermgr_wire::control::{ClientRow, ControlReply, ControlRequest};

/// Asks and prints.
pub(crate) fn run(socket: Option<&Path>, json: bool) -> Result<(), VerbError> {
    let rows = Link::open(socket)?.list(
        |skip| ControlRequest::Clients { skip },
        |reply| match reply {
            ControlReply::Clients(rows) => Some(rows),
            _ => None,
        },
    )?;
    if json {
        return Ok(render::json(&rows)?);
    }
    Ok(render::print(&text(&rows))?)
}

fn text(rows: &[ClientRow]) -> String {
    if rows.is_empty() {
        return "no programs are attached\n".to_owned();
    }
    let mut table = Table::new(&[
        ">family",
        ">pid",
        "name",
        "class",
        ">uid",
        ">regions",
        ">dram",
        ">parked",
        ">faults",
        ">recalled",
    ]);
    for row in rows {
        table.row(vec![
            row.family.to_string(),
            if row.pid == 0 { "?".to_owned() } else { row.pid.to_string() },
            if row.forked { format!("{} (forked)", row.name) } else { row.name.clone() },
            row.class.clone(),
            row.uid.to_string(),
            row.regions.to_string(),
            bytes(row.stats.dram_now_bytes),
            bytes(row.stats.parked_now_bytes),
            count(row.stats.faults),
            pages(row.stats.recalled_pages),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tiermgr_wire::control::FamilyStats;

    #[test]
    fn forked_children_and_unknown_pids_are_told_apart() {
        let row = ClientRow {
            family: 1,
            pid: 0,
            helper_pid: 0,
            name: "redis".to_owned(),
            class: "standard".to_owned(),
            uid: 0,
            forked: true,
            regions: 2,
            stats: FamilyStats::default(),
        };
        let text = text(&[row]);
        assert!(text.contains("redis (forked)") && text.contains(" ?  "), "{text}");
        assert_eq!(super::text(&[]), "no programs are attached\n");
    }
}
