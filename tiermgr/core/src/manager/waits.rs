//! What a fault waits for: looked up for the watchdog, when it has waited for long.

use super::Manager;
use super::op::{Kind, Prepare};
use crate::record::Records;
use crate::units::{Addr, EXTENT_BYTES, ProcId};
use crate::watch::WaitsOn;

impl<R: Records> Manager<R> {
    /// What keeps a thread waiting that sleeps at `at`.
    #[must_use]
    pub fn waits_on(&self, proc: ProcId, at: Addr) -> WaitsOn {
        let Some(space) = self.spaces.get(&proc) else { return WaitsOn::Nobody };
        if space.is_held() {
            return WaitsOn::Table;
        }
        let Some(region) = space.region_at(at) else { return WaitsOn::Nobody };
        let extent = region.extent_of(at);
        let base = region.extent_addr(extent);
        let note = region.note(extent);
        if let Some(op) = self.shared.ops.get(note.busy) {
            return waits_on(&op.kind);
        }
        if note.leaving {
            return WaitsOn::Helper;
        }
        if region.closing.is_some() || region.arming.is_some() {
            return WaitsOn::Kernel;
        }
        let queued = |w: &super::Waiting| w.proc == proc && w.at.align_down(EXTENT_BYTES) == base;
        if self.waiting.iter().any(queued) { WaitsOn::Room } else { WaitsOn::Nobody }
    }
}

const fn waits_on(kind: &Kind) -> WaitsOn {
    match kind {
        Kind::Fill(fill) if fill.piece.is_none() => WaitsOn::StoreRead,
        Kind::Write(_) => WaitsOn::StoreWrite,
        Kind::Move { .. }
        | Kind::DropLimbo { .. }
        | Kind::Discard { .. }
        | Kind::Prepare(Prepare::Populating { .. }) => WaitsOn::Helper,
        Kind::Fill(_)
        | Kind::Zero(_)
        | Kind::Rescue(_)
        | Kind::Unprotect { .. }
        | Kind::Shield { .. }
        | Kind::Guard { .. }
        | Kind::MoveCheck { .. }
        | Kind::Prepare(_)
        | Kind::Arm { .. }
        | Kind::MapArmed
        | Kind::Look { .. }
        | Kind::StaleLook { .. }
        | Kind::KeptLook
        | Kind::Probe => WaitsOn::Kernel,
    }
}
