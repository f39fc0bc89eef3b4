//! Answers to `tiermgrctl`.
//!
//! Whoever may open the socket may see the totals. Processes and regions are shown to their own user,
//! to root and to the daemon's user: addresses of another's memory are nobody's business. Only root
//! and the daemon's user may end the daemon.

use crate::daemon::Daemon;
use crate::protocol::Refused;
use tiermgr_wire::control::{ControlReply, ControlRequest, ROWS_MAX, Status, TierRow};
use tiermgr_wire::reply::ErrorCode;
use tiermgr_wire::size::Size;

/// Share of the store, in percent, above which status warns.
const STORE_WARN_PERCENT: u64 = 90;

/// Carries out `request` for `uid`.
///
/// Blocks for a shutdown only: as long as it takes to bring everything back.
///
/// # Errors
/// Where `uid` may not do this, or a shutdown is impossible now.
pub fn answer(daemon: &Daemon, uid: u32, request: ControlRequest) -> Result<ControlReply, Refused> {
    let privileged = uid == 0 || uid == daemon.identity().uid;
    let visible_to = (!privileged).then_some(uid);
    Ok(match request {
        ControlRequest::Status => ControlReply::Status(Box::new(status(daemon))),
        ControlRequest::Tiers => ControlReply::Tiers(tiers(daemon)),
        ControlRequest::Clients { skip } => {
            let rows = daemon.families().list();
            ControlReply::Clients(page(
                rows.iter().flat_map(|family| family.client_rows(visible_to)),
                skip,
            ))
        }
        ControlRequest::Regions { skip } => {
            let rows = daemon.families().list();
            ControlReply::Regions(page(
                rows.iter().flat_map(|family| family.region_rows(visible_to)),
                skip,
            ))
        }
        ControlRequest::Shutdown => {
            if !privileged {
                return Err(Refused::new(
                    ErrorCode::NotPermitted,
                    format!("only root and user {} may end the daemon", daemon.identity().uid),
                ));
            }
            daemon
                .end_orderly("a shutdown request")
                .map_err(|reasons| Refused::new(ErrorCode::NoRoom, reasons))?;
            ControlReply::Done
        }
    })
}

fn page<T>(rows: impl Iterator<Item = T>, skip: u32) -> Vec<T> {
    rows.skip(usize::try_from(skip).unwrap_or(usize::MAX)).take(ROWS_MAX).collect()
}

fn status(daemon: &Daemon) -> Status {
    let shared = daemon.families().shared();
    let totals = daemon.families().totals();
    let room = shared.room.usage();
    let store = shared.store.usage();
    let mut warnings = daemon.warnings();
    warnings.extend(daemon.families().not_taken_up());
    if totals.store_errors > 0 {
        warnings.push(format!(
            "{} reads or writes of the store failed; check the device (dmesg)",
            totals.store_errors
        ));
    }
    if totals.poisoned_pages > 0 {
        warnings.push(format!(
            "{} pages were lost by the store; programs that touch them get SIGBUS",
            totals.poisoned_pages
        ));
    }
    if totals.late_faults_now > 0 {
        warnings.push(format!(
            "threads have slept at {} pages for more than five seconds: the log says where, and what for",
            totals.late_faults_now
        ));
    }
    if totals.without_helper_now > 0 {
        let who = match totals.without_helper_now {
            1 => "a program has".to_owned(),
            programs => format!("{programs} programs have"),
        };
        warnings.push(format!(
            "{who} lost their helper, as the log says: their memory moves no more, and the limit does not hold for \
             it until they are started again"
        ));
    }
    let store_percent = store.used_bytes.saturating_mul(100) / store.capacity_bytes.max(1);
    if store_percent >= STORE_WARN_PERCENT {
        warnings.push(format!(
            "the store is {store_percent} % full; when it is full, programs can use no more than DRAM"
        ));
    }
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        daemon_pid: std::process::id().cast_signed(),
        keeper_pid: daemon.identity().keeper_pid,
        restarts: daemon.identity().restarts,
        uptime_s: daemon.uptime().as_secs(),
        families: u32::try_from(daemon.families().count()).unwrap_or(u32::MAX),
        attached_total: daemon.families().attached_total(),
        totals,
        dram_limit_bytes: room.total,
        dram_granted_bytes: daemon.families().lent_bytes(),
        dram_own_bytes: room.kept,
        own_peak_bytes: daemon.families().own_peak_bytes(),
        store_used_bytes: store.used_bytes,
        store_capacity_bytes: store.capacity_bytes,
        warnings,
        features_missing: shared.features.missing().into_iter().map(str::to_owned).collect(),
    }
}

fn tiers(daemon: &Daemon) -> Vec<TierRow> {
    let shared = daemon.families().shared();
    let room = shared.room.usage();
    let store = shared.store.usage();
    let store_free_bytes = store.capacity_bytes.saturating_sub(store.used_bytes);
    vec![
        TierRow {
            name: "dram".to_owned(),
            backing: "memory".to_owned(),
            used_bytes: room.used,
            reserved_bytes: room.reserved,
            free_bytes: room.free,
            total_bytes: room.total,
            state: match room.beyond {
                0 => "ok".to_owned(),
                beyond => format!("{} beyond what was lent", Size(beyond)),
            },
        },
        TierRow {
            name: "nvme".to_owned(),
            backing: shared.store.path().display().to_string(),
            used_bytes: store.used_bytes,
            reserved_bytes: 0,
            free_bytes: store_free_bytes,
            total_bytes: store.capacity_bytes,
            state: if store_free_bytes == 0 { "full" } else { "ok" }.to_owned(),
        },
    ]
}
