//! The processes of a family, by number.

use super::proc::Proc;
use super::token::{Generation, Token};
use std::os::fd::RawFd;
use tiermgr_core::limits::PROCS_MAX;
use tiermgr_core::units::ProcId;

/// All processes that are served, each under a number from 1 to `PROCS_MAX`.
#[derive(Debug)]
pub(super) struct Procs {
    places: Vec<Place>,
    live: Vec<ProcId>,
    /// Where to look for a free number: one that was just given up rests for as long as it can.
    next: usize,
}

#[derive(Debug, Default)]
struct Place {
    generation: Generation,
    proc: Option<Box<Proc>>,
}

impl Procs {
    pub(super) fn new() -> Self {
        let mut places = Vec::new();
        places.resize_with(PROCS_MAX + 1, Place::default);
        Self { places, live: Vec::with_capacity(PROCS_MAX), next: 1 }
    }

    pub(super) fn get(&self, id: ProcId) -> Option<&Proc> {
        self.places.get(id.0 as usize)?.proc.as_deref()
    }

    pub(super) fn get_mut(&mut self, id: ProcId) -> Option<&mut Proc> {
        self.places.get_mut(id.0 as usize)?.proc.as_deref_mut()
    }

    /// The process, if it is still the one that `generation` meant.
    pub(super) fn of_generation(
        &mut self,
        id: ProcId,
        generation: Generation,
    ) -> Option<&mut Proc> {
        self.get_mut(id).filter(|proc| proc.generation == generation)
    }

    /// The numbers of all processes, in no order that means anything.
    pub(super) fn live(&self) -> &[ProcId] {
        &self.live
    }

    /// The process at a place in [`Procs::live`].
    pub(super) fn live_at(&mut self, at: usize) -> Option<&mut Proc> {
        let id = *self.live.get(at)?;
        self.get_mut(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Proc> {
        self.live.iter().filter_map(|&id| self.get(id))
    }

    /// A number that nobody has.
    pub(super) fn next_id(&mut self) -> Option<ProcId> {
        let order = (self.next..=PROCS_MAX).chain(1..self.next);
        let free = order.into_iter().find(|&at| self.places[at].proc.is_none())?;
        self.next = free % PROCS_MAX + 1;
        u32::try_from(free).ok().map(ProcId)
    }

    /// The generation that the next process of this number has.
    pub(super) fn generation(&self, id: ProcId) -> Generation {
        self.places.get(id.0 as usize).map_or(0, |place| place.generation)
    }

    pub(super) fn insert(&mut self, proc: Proc) {
        if let Some(place) = self.places.get_mut(proc.id.0 as usize) {
            debug_assert!(place.proc.is_none());
            self.live.push(proc.id);
            place.proc = Some(Box::new(proc));
        }
    }

    pub(super) fn remove(&mut self, id: ProcId) -> Option<Proc> {
        let place = self.places.get_mut(id.0 as usize)?;
        let proc = place.proc.take()?;
        place.generation = Token::generation_after(place.generation);
        self.live.retain(|&live| live != id);
        Some(*proc)
    }

    /// The child of `parent` that is served through descriptor `fd`.
    pub(super) fn child_with(&self, parent: ProcId, fd: RawFd) -> Option<ProcId> {
        self.iter()
            .find(|proc| proc.entry.parent == parent && proc.entry.arena_fd == fd)
            .map(|proc| proc.id)
    }

    /// A process that has shown itself.
    pub(super) fn first_attached(&self) -> Option<ProcId> {
        self.iter().find(|proc| proc.attached.is_some()).map(|proc| proc.id)
    }
}
