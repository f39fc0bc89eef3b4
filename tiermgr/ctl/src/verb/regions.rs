//! `tiermgrctl regions`.

use super::VerbError;
use crate::connect::Link;
use crate::render::{self, Table, bytes};
use std::path::Path;
use tiermgr_wire::control::{ControlReply, ControlRequest, RegionRow};

/// Asks and prints.
pub(crate) fn run(socket: Option<&Path>, json: bool) -> Result<(), VerbError> {
    let rows = Link::open(socket)?.list(
        |skip| ControlRequest::Regions { skip },
        |reply| match reply {
            ControlReply::Regions(rows) => Some(rows),
            _ => None,
        },
    )?;
    if json {
        return Ok(render::json(&rows)?);
    }
    Ok(render::print(&text(&rows))?)
}

fn text(rows: &[RegionRow]) -> String {
    if rows.is_empty() {
        return "no regions are managed\n".to_owned();
    }
    let mut table = Table::new(&[
        ">family",
        ">pid",
        ">region",
        ">start",
        ">length",
        ">resident",
        ">parked",
        ">unarmed",
        "name",
    ]);
    for row in rows {
        table.row(vec![
            row.family.to_string(),
            row.pid.to_string(),
            row.region.to_string(),
            format!("{:#x}", row.start),
            bytes(row.len_bytes),
            bytes(row.resident_bytes),
            bytes(row.parked_bytes),
            bytes(row.unarmed_bytes),
            row.name.clone(),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_hexadecimal() {
        let row = RegionRow {
            family: 1,
            pid: 17,
            region: 3,
            name: "weights".to_owned(),
            start: 0x7f00_0020_0000,
            len_bytes: 2 << 20,
            resident_bytes: 0,
            parked_bytes: 2 << 20,
            unarmed_bytes: 0,
        };
        assert!(text(&[row]).contains("0x7f0000200000  2.0 MiB"));
        assert_eq!(text(&[]), "no regions are managed\n");
    }
}
