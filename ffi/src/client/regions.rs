//! Regions as the daemon is told of them.

use super::{Answered, Region, done};
use crate::link::{Failed, Link, Patience};
use crate::space::Reserved;
use crate::status::{Error, Result, Status};
use tiermgr_wire::reply::FromDaemon;
use tiermgr_wire::request::{Kind, RegionOptions, ToDaemon};

pub(super) fn add_region(
    link: &mut Link,
    range: &Reserved,
    (kind, name): (Kind, &str),
    patience: Patience,
) -> Answered<u32> {
    let message = ToDaemon::AddRegion {
        start: range.start() as u64,
        len: range.bytes() as u64,
        options: RegionOptions { kind },
        name: name.to_owned(),
    };
    match link.request(&message, patience)? {
        FromDaemon::Region(number) => Ok(number),
        _ => Err(Failed::odd()),
    }
}

/// Has the daemon forget a region; afterwards nothing of it happens in the range.
pub(super) fn drop_region(link: &mut Link, region: &mut Region) -> Result<()> {
    let drop = |link: &mut Link, region: &mut Region| {
        let message = ToDaemon::DropRegion { region: region.number };
        loop {
            let outcome = done(link.request(&message, Patience::Restart));
            region.drop_unanswered |= outcome.as_ref().is_err_and(|failed| failed.may_happen);
            if !outcome.as_ref().is_err_and(|failed| failed.is_newborn) {
                return outcome;
            }
        }
    };
    match drop(link, region) {
        // The daemon took the earlier message: the region is gone, or going and busy yet. The range can
        // be added anew exactly if it is gone.
        Err(failed) if region.drop_unanswered && failed.error.status == Status::NotManaged => {
            let added = add_region(link, &region.range, (Kind::Heap, ""), Patience::Restart);
            region.number = added.map_err(|failed| {
                if failed.error.status == Status::InvalidArgument {
                    Error::new(
                        Status::Internal,
                        "the daemon is still dropping the region; try again later",
                    )
                } else {
                    failed.error
                }
            })?;
            Ok(drop(link, region)?)
        }
        outcome => Ok(outcome?),
    }
}
