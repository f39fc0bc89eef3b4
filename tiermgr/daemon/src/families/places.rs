//! Who may begin: how many programs one user, the daemon and its DRAM have room for.

use super::Inner;
use std::io;
use std::path::PathBuf;
use tiermgr_core::limits::DEMAND_BUFFERS_LEAST;
use tiermgr_core::units::EXTENT_BYTES;
use tiermgr_engine::error::EngineError;
use tiermgr_engine::room::RoomUse;
use tiermgr_wire::size::Size;

/// Families at once. Each has a thread.
pub const FAMILIES_MAX: usize = 512;
/// What a family takes in the daemon itself: a thread, an io_uring and tables as measured, and its small buffers.
pub(super) const FAMILY_OWN_BYTES: u64 = (512 << 10) + DEMAND_BUFFERS_LEAST as u64 * EXTENT_BYTES;
/// Below this a program would do little but wait for its pages.
const FAMILY_DRAM_LEAST: u64 = 512 << 10;

/// Why a family could not be begun.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// There are as many as there may be.
    #[error("the daemon already serves {FAMILIES_MAX} programs")]
    TooMany,
    /// This user has as many as one user may have.
    #[error(
        "user {uid} already has {max} programs attached (`families_per_uid` in the configuration)"
    )]
    TooManyOfUser {
        /// Who.
        uid: u32,
        /// How many.
        max: u32,
    },
    /// DRAM is too small for one more.
    #[error(
        "a DRAM limit of {total} has no room for another program: {families} are served, and the daemon \
         itself takes {own}; end programs, or raise the limit (`--dram`, `dram` in the configuration)"
    )]
    TooLittleDram {
        /// The limit.
        total: Size,
        /// Families that are served, or about to be.
        families: usize,
        /// The daemon's own.
        own: Size,
    },
    /// Everything is being brought back.
    #[error("the daemon is ending")]
    Ending,
    /// What is to be written down cannot be.
    #[error("writing down the family in {}", path.display())]
    State {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The engine could not.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl Inner {
    /// Whether one begins, or is about to be taken up: it is served in a moment, or not at all.
    pub(super) fn is_under_way(&self) -> bool {
        !self.beginning.is_empty() || self.is_trying()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.families.is_empty() && self.waiting.is_empty() && self.beginning.is_empty()
    }

    /// Whether the DRAM that is left serves one more family, beside all that there are.
    pub(super) fn check_dram(&self, room: RoomUse) -> Result<(), BeginError> {
        let families = self.families.len() + self.waiting.len() + self.beginning.len();
        // Of those that begin it is not known yet what they take.
        let coming = (self.beginning.len() as u64 + 1) * FAMILY_OWN_BYTES;
        let least = coming + FAMILY_DRAM_LEAST * (families as u64 + 1);
        if room.kept.saturating_add(least) <= room.total {
            return Ok(());
        }
        let (total, own) = (Size(room.total), Size(room.kept.next_multiple_of(1 << 20)));
        Err(BeginError::TooLittleDram { total, families, own })
    }

    /// Whether `uid` may have one more family. Root is bound by the total only: it could end the daemon.
    pub(super) fn check_room(&self, uid: u32, per_uid_max: u32) -> Result<(), BeginError> {
        let served = self.families.values().map(|family| family.uid);
        let waiting = self.waiting.iter().map(super::recover::Waiting::uid);
        let owners = served.chain(waiting).chain(self.beginning.values().copied());
        check_room(owners, uid, per_uid_max)
    }
}

fn check_room(
    owners: impl Iterator<Item = u32>,
    uid: u32,
    per_uid_max: u32,
) -> Result<(), BeginError> {
    let (mut all, mut own) = (0, 0);
    for owner in owners {
        all += 1;
        own += u32::from(owner == uid);
    }
    if all >= FAMILIES_MAX {
        return Err(BeginError::TooMany);
    }
    if uid != 0 && own >= per_uid_max {
        return Err(BeginError::TooManyOfUser { uid, max: per_uid_max });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_all_places() {
        let full = [7, 7, 8];
        let room = |uid, max| check_room(full.into_iter(), uid, max);
        assert!(room(8, 2).is_ok() && room(0, 1).is_ok());
        let refused = room(7, 2).unwrap_err();
        assert!(matches!(refused, BeginError::TooManyOfUser { uid: 7, max: 2 }));
        assert!(refused.to_string().contains("families_per_uid"));
        let all = std::iter::repeat_n(0, FAMILIES_MAX);
        assert!(matches!(check_room(all, 0, 9), Err(BeginError::TooMany)));
    }

    #[test]
    fn a_program_for_which_there_is_no_dram_is_refused() {
        let mut inner = Inner::default();
        let room = |kept| RoomUse { kept, total: 32 << 20, ..RoomUse::default() };
        assert!(inner.check_dram(room(30 << 20)).is_ok());
        for number in 0..16 {
            inner.beginning.insert(number, 0);
        }
        assert!(inner.check_dram(room(10 << 20)).is_ok());
        let refused = inner.check_dram(room(11 << 20)).unwrap_err().to_string();
        for part in ["32MiB", "16 are served", "11MiB", "--dram"] {
            assert!(refused.contains(part), "{refused}");
        }
    }
}
