//! What the daemon itself takes, which comes off the room first.

use super::{Families, PLACE_PAUSE, Shared, number_of};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;
use tiermgr_sys::proc;

/// No less than what the first family takes in the daemon, with records and notes of an arena of 4 GiB.
const FIRST_FAMILY_BYTES: u64 = 8 << 20;
/// What the daemon keeps for itself is counted by this, so that it does not change all the time.
const OWN_STEP_BYTES: u64 = 256 << 10;

/// What the daemon itself takes.
#[derive(Debug, Default)]
pub(super) struct Own {
    bytes: u64,
    /// Most that there ever was, without what is yet to come.
    peak_bytes: u64,
    /// When that was last looked at.
    seen: Option<Instant>,
}

/// What is kept at least: what there is already, and what comes with a first program.
pub(super) fn least_bytes(shared: &Shared) -> u64 {
    // Programs that an earlier daemon has served end some day, and what it wrote down of them goes.
    let resident = own_resident_bytes(&shared.state_dir)
        .unwrap_or(0)
        .saturating_sub(families_bytes(&shared.state_dir));
    resident + shared.staging.to_come_bytes() + FIRST_FAMILY_BYTES
}

impl Families {
    /// Keeps what the daemon itself has in memory, and what its buffers may take yet.
    pub(super) fn keep_own(&self) {
        // One look at a time, or an older one could come last.
        self.look_at_own(&mut self.lock_own());
    }

    /// The same, unless somebody has just looked.
    pub(super) fn keep_own_again(&self) {
        let mut own = self.lock_own();
        if own.seen.is_none_or(|seen| seen.elapsed() >= PLACE_PAUSE) {
            self.look_at_own(&mut own);
        }
    }

    /// Most that the daemon itself was seen to have in memory.
    #[must_use]
    pub fn own_peak_bytes(&self) -> u64 {
        self.lock_own().peak_bytes
    }

    fn lock_own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_at_own(&self, own: &mut Own) {
        // Before what is in memory: what becomes of the one between the two looks is counted twice.
        let to_come = self.shared.staging.to_come_bytes();
        match own_resident_bytes(&self.shared.state_dir) {
            Some(resident) => {
                own.bytes = (resident + to_come).max(self.own_least);
                own.peak_bytes = own.peak_bytes.max(resident);
            }
            None => tracing::warn!("the daemon cannot see what it has in memory itself"),
        }
        own.seen = Some(Instant::now());
        self.shared.room.keep(own.bytes.next_multiple_of(OWN_STEP_BYTES));
    }
}

/// Bytes that this process has in memory now, the state files included: those that it has not looked at, too.
fn own_resident_bytes(state_dir: &Path) -> Option<u64> {
    let of = |name| proc::status_bytes(std::process::id().cast_signed(), name);
    // Rings are small beside the state files, which nearly all shared memory is.
    let shared = of("RssShmem")?.max(allocated_bytes(state_dir));
    Some(of("RssAnon")? + of("RssFile")? + shared)
}

/// What the files of a folder take. Those that go meanwhile take nothing.
fn allocated_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let each = entries.flatten().map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => allocated_bytes(&entry.path()),
        Ok(found) => found.blocks() * 512,
        Err(_) => 0,
    });
    each.sum()
}

/// What is written down of families.
fn families_bytes(state_dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(state_dir) else { return 0 };
    let names = entries.flatten().map(|entry| entry.file_name());
    let families = names.filter(|name| number_of(&name.to_string_lossy()).is_some());
    families.map(|name| allocated_bytes(&state_dir.join(name))).sum()
}
