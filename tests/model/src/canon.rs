//! One name for states that differ in names only.
//!
//! Bytes are compared and copied, never computed with, so which number stands for which bytes does not
//! matter; nor does which slot is which, nor which of two threads that are alike does what. Bytes that
//! nobody may ever read again become [`GARBAGE`], which differs from all bytes: whoever does read them
//! is caught at once.

use crate::model::Model;
use crate::op::Op;
use crate::state::{CHILD, FOREIGN_VALUE, PAGES, PARENT, SLOTS, Space, State, Write};

/// What stands where nobody may look.
pub(crate) const GARBAGE: u8 = 98;

impl Model {
    /// Gives `state` the name that all states like it have.
    pub(crate) fn canonize(&self, state: &mut State) {
        state.threads[..2].sort_unstable();
        state.inbox.sort_unstable_by(|a, b| b.cmp(a));
        if state.exited {
            let space = &mut state.spaces[PARENT];
            space.truth = [0; PAGES];
            space.or_zero = [false; PAGES];
        }
        self.name_slots(state);
        self.spoil(state);
        name_values(state);
    }

    /// Numbers the slots in the order in which they are met.
    fn name_slots(&self, state: &mut State) {
        let mut names = [0; SLOTS + 1];
        let mut next = 1;
        for_each_slot(state, |slot| {
            let name = &mut names[usize::from(*slot)];
            if *slot != 0 && *name == 0 {
                *name = next;
                next += 1;
            }
        });
        for name in &mut names[1..] {
            if *name == 0 {
                *name = next;
                next += 1;
            }
        }
        for_each_slot(state, |slot| *slot = names[usize::from(*slot)]);
        let store = state.store;
        for (index, values) in store.into_iter().enumerate() {
            state.store[usize::from(names[index + 1]) - 1] = values;
        }
    }

    /// Spoils what lies in slots for pages that do not need it.
    fn spoil(&self, state: &mut State) {
        let mut needed = [[false; PAGES]; SLOTS];
        for space in &state.spaces {
            for page in 0..PAGES {
                let slot = usize::from(space.slots[self.scenario.extent_of(page)]);
                if slot != 0 && space.records[page].needs_slot() {
                    needed[slot - 1][self.scenario.position(page)] = true;
                }
            }
        }
        if let Write::Landed { slot } | Write::Unrecorded { slot } = state.limbo.write {
            needed[usize::from(slot) - 1] = [true; PAGES];
        }
        for (values, needed) in state.store.iter_mut().zip(needed) {
            for (value, needed) in values.iter_mut().zip(needed) {
                if !needed {
                    *value = GARBAGE;
                }
            }
        }
    }
}

fn for_each_slot(state: &mut State, mut each: impl FnMut(&mut u8)) {
    for proc in [PARENT, CHILD] {
        state.spaces[proc].slots.iter_mut().for_each(&mut each);
    }
    match &mut state.limbo.write {
        Write::None => {}
        Write::Flying { slot, .. } | Write::Landed { slot } | Write::Unrecorded { slot } => {
            each(slot);
        }
    }
    if let Some((slot, _)) = &mut state.late {
        each(slot);
    }
}

/// Numbers the bytes in the order in which they are met.
fn name_values(state: &mut State) {
    let mut names = [0_u8; 32];
    let mut next = 1;
    for_each_value(state, |value| {
        if *value == 0 || *value == GARBAGE || *value == FOREIGN_VALUE {
            return;
        }
        let name = &mut names[usize::from(*value) % 32];
        if *name == 0 {
            *name = next;
            next += 1;
        }
        *value = *name;
    });
    state.version = next - 1;
}

fn for_each_value(state: &mut State, mut each: impl FnMut(&mut u8)) {
    for Space { ptes, truth, ops, .. } in &mut state.spaces {
        truth.iter_mut().for_each(&mut each);
        ptes.iter_mut().filter(|pte| pte.present).for_each(|pte| each(&mut pte.value));
        for op in ops {
            if let Op::Fill { buffer, .. } = op {
                buffer.iter_mut().for_each(&mut each);
            }
        }
    }
    state.limbo.ptes.iter_mut().flatten().for_each(&mut each);
    if let Write::Flying { values, .. } = &mut state.limbo.write {
        values.iter_mut().for_each(&mut each);
    }
    if let Some((_, values)) = &mut state.late {
        values.iter_mut().for_each(&mut each);
    }
    state.store.iter_mut().flatten().for_each(&mut each);
}
