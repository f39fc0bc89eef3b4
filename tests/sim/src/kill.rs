//! The daemon is killed at any instruction, and another one begins with what survives: records,
//! messages that were read and not yet dealt with, the store, the clients.

use crate::client::{Call, RegionState, State};
use crate::world::World;
use tiermgr_core::event::Event;
use tiermgr_core::record::Records;
use tiermgr_core::units::{SlotId, Span};

impl World {
    /// The daemon will die in the coming turn: between two stores to the records, or between two
    /// effects.
    pub fn doom(&mut self) {
        if self.rng.chance(500) {
            let stores = self.rng.below(12);
            self.records.kill_after(stores);
            self.doomed = Some(0);
        } else {
            self.doomed = Some(self.rng.below(8));
        }
    }

    /// What the host does before a new daemon goes on, as far as the manager can see. Gives the
    /// segments of slots that the family holds.
    pub fn restart(&mut self) -> Vec<SlotId> {
        self.say(format_args!("the daemon is killed, and begins again"));
        self.counts.kills += 1;
        self.doomed = None;
        self.daemon_since = self.turn;
        self.records.reopen();
        self.forget_half_born();
        self.outbox.clear();
        self.ops.clear();
        self.poisons.clear();
        self.wants_slots = false;
        self.wants_stream = false;
        self.wants_room = 0;
        self.requests.clear();
        let segments = self.store.daemon_died(&mut self.rng);
        for proc in 0..self.procs.len() {
            self.sessions_are_lost(proc);
            let process = &mut self.procs[proc];
            process.helper.new_epoch(&mut process.mm, &mut self.frames);
            // Faults that the dead one had read are not delivered again: everybody looks again.
            process.mm.waiters.clear();
        }
        self.announce();
        segments
    }

    /// A table that the kill cut short in the copying is copied again, from nothing: a part of it would
    /// pass for the whole at the next look, and a second kill make that last.
    fn forget_half_born(&mut self) {
        for region in self.records.regions() {
            let born = self.proc_index(region.proc).is_none_or(|index| self.procs[index].born);
            if !born {
                self.records.drop_region(region.proc, region.region);
                self.records.clear(region.first, region.extents);
            }
        }
    }

    /// Forks that were not followed to the end come again, parents first; then what was read and not
    /// dealt with, and each process is announced.
    fn announce(&mut self) {
        let known = self.procs.iter().filter(|process| process.known && !process.released);
        let forks: Vec<Event> = known
            .filter(|process| !process.born)
            .filter_map(|process| Some((process.parent?, process.id)))
            .map(|(parent, child)| Event::Forked { parent, child })
            .collect();
        self.outbox.extend(forks);
        self.outbox.extend(std::mem::take(&mut self.last_messages));
        for proc in 0..self.procs.len() {
            let process = &self.procs[proc];
            if !process.known || process.released {
                continue;
            }
            let id = process.id;
            // Limbo outlives a helper: what lies there is still the only copy.
            if process.ready {
                let limbo = process.mm.layout.limbo_span();
                self.tell(Event::ProcReady { proc: id, limbo });
            } else if process.born {
                self.tell(Event::ProcReady { proc: id, limbo: Span::default() });
            }
            if self.procs[proc].exited {
                self.procs[proc].gone_told = true;
                self.tell(Event::ProcGone { proc: id });
            }
        }
    }

    /// What a client waits for will not come; it cannot know how far it went.
    fn sessions_are_lost(&mut self, proc: usize) {
        while !self.procs[proc].leases.is_empty() {
            self.forget_lease(proc, 0);
        }
        for thread in 0..self.procs[proc].threads.len() {
            let State::Calling(_, call) = self.procs[proc].threads[thread].state else { continue };
            self.procs[proc].threads[thread].state = State::Ready;
            match call {
                Call::Add(key) => {
                    if let Some(region) = self.procs[proc].region_mut(key) {
                        region.state = RegionState::Native;
                    }
                }
                Call::Drop(key) => {
                    let Some(region) = self.procs[proc].region_mut(key) else { continue };
                    region.state = RegionState::Abandoned;
                    let range = region.first..region.first + crate::ix(region.pages);
                    for page in &mut self.procs[proc].expect[range] {
                        page.undefined = true;
                    }
                }
                Call::Discard(first, pages) => {
                    for page in &mut self.procs[proc].expect[first..first + crate::ix(pages)] {
                        page.maybe_zero = true;
                        page.discarding = false;
                    }
                }
                Call::Pin(..) | Call::Unpin | Call::Residency(_) | Call::Hint | Call::Nonsense => {}
                Call::Drain => self.procs[proc].perhaps_drained = true,
            }
        }
    }
}
