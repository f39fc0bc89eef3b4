//! Exploration of all states that can be reached, breadth first, so that the first trace that is found
//! is a shortest one.
//!
//! Two kinds of properties:
//! - no state is wrong ([`Model::check`]);
//! - everybody is served. Of the steps, some are choices of the environment (a touch, a kill, a fork) and
//!   the rest is bound to happen. If, along steps that are bound to happen, no state leads back to itself,
//!   and none is last in which somebody waits, then whoever waits is served once the environment stops
//!   making choices, in whatever order things happen. So: that graph must have no cycle, and its last
//!   states nobody who waits.

use crate::broken::Broken;
use crate::model::{Model, Out};
use crate::state::State;
use crate::step::Step;
use std::hash::{Hash, Hasher};

/// States after which an exploration gives up: a scenario that large is not small.
pub const STATES_MAX: usize = 6_000_000;

/// What an exploration found.
#[derive(Debug)]
pub struct Exploration {
    /// Different states.
    pub states: usize,
    /// Steps between them.
    pub steps: usize,
    /// The first thing that is wrong.
    pub violation: Option<Violation>,
}

/// A way into something that is wrong.
#[derive(Debug)]
pub struct Violation {
    /// What is wrong.
    pub broken: Broken,
    /// A shortest way there from the beginning.
    pub trace: Vec<Step>,
    /// The state at its end.
    pub state: Box<State>,
}

struct Explored {
    states: Vec<State>,
    /// Where each state was first reached from.
    parents: Vec<u32>,
    /// Open addressing: index of a state plus one, 0 where free.
    table: Vec<u32>,
}

impl Explored {
    fn new() -> Self {
        Self { states: Vec::new(), parents: Vec::new(), table: vec![0; 1 << 16] }
    }

    /// The index of `state`, and whether it is new.
    fn insert(&mut self, state: &State, parent: u32) -> (u32, bool) {
        if self.states.len() * 2 >= self.table.len() {
            self.grow();
        }
        let mask = self.table.len() - 1;
        let mut at = hash(state) & mask;
        loop {
            match self.table[at] {
                0 => break,
                index if self.states[index as usize - 1] == *state => return (index - 1, false),
                _ => at = (at + 1) & mask,
            }
        }
        let index = index_of(self.states.len());
        self.table[at] = index + 1;
        self.states.push(*state);
        self.parents.push(parent);
        (index, true)
    }

    fn grow(&mut self) {
        let len = self.table.len() * 2;
        self.table.clear();
        self.table.resize(len, 0);
        let mask = len - 1;
        for (index, state) in self.states.iter().enumerate() {
            let mut at = hash(state) & mask;
            while self.table[at] != 0 {
                at = (at + 1) & mask;
            }
            self.table[at] = index_of(index) + 1;
        }
    }

    fn violation(&self, model: &Model, at: u32, broken: Broken) -> Violation {
        let mut way = vec![at];
        let mut first = at;
        while first != 0 {
            first = self.parents[first as usize];
            way.push(first);
        }
        way.reverse();
        let mut out = Out::default();
        let trace = way
            .windows(2)
            .filter_map(|pair| {
                let after = self.states[pair[1] as usize];
                model.successors(&self.states[pair[0] as usize], &mut out);
                out.next.iter().find(|(_, state)| *state == after).map(|(step, _)| *step)
            })
            .collect();
        Violation { broken, trace, state: Box::new(self.states[at as usize]) }
    }
}

/// Explores everything, or until something is wrong.
///
/// # Errors
/// The number of states where there are more than [`STATES_MAX`].
pub fn explore(model: &Model) -> Result<Exploration, usize> {
    let mut seen = Explored::new();
    let mut first = model.scenario.first();
    model.canonize(&mut first);
    seen.insert(&first, 0);
    // Steps that are bound to happen: those of state n are `bound[starts[n]..starts[n + 1]]`.
    let mut bound: Vec<u32> = Vec::new();
    let mut starts: Vec<u32> = vec![0];
    let mut out = Out::default();
    let mut steps = 0;
    let mut at = 0;
    while at < seen.states.len() {
        let state = seen.states[at];
        let found = move |broken, seen: &Explored, steps| Exploration {
            states: seen.states.len(),
            steps,
            violation: Some(seen.violation(model, index_of(at), broken)),
        };
        if let Some(broken) = model.check(&state) {
            return Ok(found(broken, &seen, steps));
        }
        model.successors(&state, &mut out);
        let mut last = true;
        for (step, next) in &out.next {
            steps += 1;
            let (index, _) = seen.insert(next, index_of(at));
            if !step.what.is_choice() {
                last = false;
                bound.push(index);
            }
        }
        if last && !model.is_served(&state) {
            return Ok(found(Broken::Stuck, &seen, steps));
        }
        starts.push(index_of(bound.len()));
        at += 1;
        if seen.states.len() > STATES_MAX {
            return Err(seen.states.len());
        }
    }
    let violation =
        first_on_cycle(&starts, &bound).map(|index| seen.violation(model, index, Broken::Livelock));
    Ok(Exploration { states: seen.states.len(), steps, violation })
}

/// The first state that lies on a cycle, or between two, of steps that are bound to happen.
fn first_on_cycle(starts: &[u32], bound: &[u32]) -> Option<u32> {
    let count = starts.len() - 1;
    let after = |n: usize| &bound[starts[n] as usize..starts[n + 1] as usize];
    let mut before = vec![0_u32; count];
    for &next in bound {
        before[next as usize] += 1;
    }
    let mut free: Vec<usize> = (0..count).filter(|&n| before[n] == 0).collect();
    let mut left = count;
    while let Some(n) = free.pop() {
        left -= 1;
        for &next in after(n) {
            let next = next as usize;
            before[next] -= 1;
            if before[next] == 0 {
                free.push(next);
            }
        }
    }
    // What is left lies on a cycle or behind one. Of that, what leads to nothing left is behind.
    let mut ahead: Vec<usize> =
        (0..count).map(|n| after(n).iter().filter(|&&m| before[m as usize] > 0).count()).collect();
    let mut order: Vec<usize> = (0..count).filter(|&n| before[n] > 0).collect();
    while left > 0 {
        let kept: Vec<usize> = order.iter().copied().filter(|&n| ahead[n] > 0).collect();
        if kept.len() == order.len() {
            return kept.first().map(|&n| index_of(n));
        }
        for &n in order.iter().filter(|&&n| ahead[n] == 0) {
            before[n] = 0;
            left -= 1;
        }
        for &n in &kept {
            ahead[n] = after(n).iter().filter(|&&m| before[m as usize] > 0).count();
        }
        order = kept;
    }
    None
}

fn index_of(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Fast, and good enough for a table that compares what it finds.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn write_isize(&mut self, n: isize) {
        self.write_u64(n.unsigned_abs() as u64);
    }
}

fn hash(state: &State) -> usize {
    let mut mixer = Mixer::default();
    state.hash(&mut mixer);
    usize::try_from(mixer.finish() >> 8).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_no_cycle() {
        assert_eq!(first_on_cycle(&[0, 2, 3, 3, 3], &[1, 2, 3]), None);
    }

    #[test]
    fn a_state_that_leads_to_itself_is_a_cycle() {
        assert_eq!(first_on_cycle(&[0, 1, 2], &[1, 1]), Some(1));
    }

    #[test]
    fn what_lies_behind_a_cycle_is_not_on_it() {
        // 0 -> 1, 1 -> 3, 3 -> 4, 4 -> 3, 3 -> 2: state 2 comes before 3 and is only behind.
        assert_eq!(first_on_cycle(&[0, 1, 2, 2, 4, 5], &[1, 3, 4, 2, 3]), Some(3));
    }

    #[test]
    fn equal_states_are_found_again_after_growth() {
        let mut seen = Explored::new();
        let state = |n: u32| State {
            version: n.to_le_bytes()[0],
            late: Some((n.to_le_bytes()[1], [n.to_le_bytes()[2], 0])),
            ..State::default()
        };
        for n in 0..100_000 {
            assert_eq!(seen.insert(&state(n), 0), (n, true));
        }
        for n in 0..100_000 {
            assert_eq!(seen.insert(&state(n), 0), (n, false));
        }
    }
}
