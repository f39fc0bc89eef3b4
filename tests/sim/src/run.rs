//! One run of one seed: turns with faults, then rest, then a last look at everything, then the end.

use crate::checkers;
use crate::host::SimHost;
use crate::records::SimRecords;
use crate::rng::Rng;
use crate::scenario::{Bias, Scenario};
use crate::trace::Trace;
use crate::watchdog::Running;
use crate::world::{Counts, Violation, World};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tiermgr_core::manager::Manager;
use tiermgr_engine::driver::Driver;

/// Turns that anything may take once faults are over: a fault, a reply, a command. A fault that finds no room waits until
/// a dozen processes have written what they have, 2,000 extents in one or two turns each, and a pin until 30,000 pages
/// came back one by one.
pub const TURNS_TO_WAIT_MAX: u64 = 12_000;

/// Turns at rest that count as rest.
const STILL_TURNS: u32 = 8;

/// What to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// Turns with faults.
    pub turns: u64,
    /// Stop here, wherever that is.
    pub until: Option<u64>,
    /// Print what happens from this turn on.
    pub trace_from: Option<u64>,
    /// Let this thing that can fail fail, counted from 0, in a plain world without other faults.
    pub fail_nth: Option<u64>,
    /// The deep checks run every so many turns.
    pub check_every: u64,
    /// More of something than the seed draws.
    pub bias: Bias,
}

impl Plan {
    /// A run of `turns` turns of `seed`.
    #[must_use]
    pub const fn new(seed: u64, turns: u64) -> Self {
        Self {
            seed,
            turns,
            until: None,
            trace_from: None,
            fail_nth: None,
            check_every: 8,
            bias: Bias::None,
        }
    }
}

/// A run that broke a promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What was run.
    pub plan: Plan,
    /// The turn.
    pub turn: u64,
    /// What was broken.
    pub violation: Violation,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, turn, violation } = self;
        let Plan { seed, turns, fail_nth, bias, .. } = plan;
        let Violation { checker, what } = violation;
        writeln!(f, "seed {seed} failed at turn {turn}: {checker}: {what}")?;
        write!(f, "replay: scripts/sim --seed {seed} --turns {turns} --until {turn} --trace")?;
        if let Some(nth) = fail_nth {
            write!(f, " --fail {nth}")?;
        }
        if *bias != Bias::None {
            write!(f, " --bias {bias:?}")?;
        }
        write!(f, " --from {}", turn.saturating_sub(40))
    }
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Turns taken.
    pub turns: u64,
    /// Hash of all events and effects: equal for two runs of one plan.
    pub hash: u64,
    /// How much happened.
    pub counts: Counts,
    /// The failure that the plan asked for has come.
    pub failure_was_reached: bool,
    /// What was broken.
    pub failure: Option<Failure>,
}

/// Runs `turns` turns of `seed`, then lets the world come to rest and end.
#[must_use]
pub fn run(seed: u64, turns: u64) -> Outcome {
    run_plan(Plan::new(seed, turns))
}

/// Runs a plan.
#[must_use]
pub fn run_plan(plan: Plan) -> Outcome {
    let _running = Running::new(plan.seed);
    let mut rng = Rng::new(plan.seed);
    let mut scenario =
        if plan.fail_nth.is_some() { Scenario::plain() } else { Scenario::draw(&mut rng) };
    scenario.lean(plan.bias);
    let trace = Trace::new(plan.trace_from);
    trace.say(0, 0, format_args!("{scenario:?}"));
    let mut world = World::new(scenario, rng, trace);
    if let Some(nth) = plan.fail_nth {
        world.fail_nth(nth);
    }
    let records = world.records.clone();
    let manager = Manager::new(scenario.config, records);
    let mut run = Run { driver: Driver::new(SimHost { world }, manager), plan };
    // A panic of the production code is a broken promise like any other, with a seed to repeat it.
    let result = catch_unwind(AssertUnwindSafe(|| run.all()));
    let violation = match result {
        Ok(Ok(())) | Ok(Err(Stop::Reached)) => None,
        Ok(Err(Stop::Broken(violation))) => Some(violation),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("a panic without words");
            Some(Violation { checker: "no panics", what: text.to_owned() })
        }
    };
    let world = &run.driver.host.world;
    Outcome {
        seed: plan.seed,
        turns: world.turn,
        hash: world.trace.hash(),
        counts: world.counts,
        failure_was_reached: world.failure_was_reached(),
        failure: violation.map(|violation| Failure { plan, turn: world.turn, violation }),
    }
}

enum Stop {
    /// The turn that the plan stops at.
    Reached,
    Broken(Violation),
}

impl From<Violation> for Stop {
    fn from(violation: Violation) -> Self {
        Self::Broken(violation)
    }
}

struct Run {
    driver: Driver<SimHost, SimRecords>,
    plan: Plan,
}

impl Run {
    fn all(&mut self) -> Result<(), Stop> {
        for _ in 0..self.plan.turns {
            let kills = self.driver.host.world.scenario.kills;
            if self.world().rng.chance(kills) {
                self.world().doom();
            }
            self.turn(self.plan.check_every)?;
        }
        self.world().stop_faults();
        self.settle()?;
        self.end()
    }

    fn world(&mut self) -> &mut World {
        &mut self.driver.host.world
    }

    fn turn(&mut self, check_every: u64) -> Result<(), Stop> {
        let deadline = self.driver.manager.deadline();
        self.world().advance(deadline);
        self.driver.turn();
        if self.world().doomed.is_some() {
            self.restart();
        }
        let world = &self.driver.host.world;
        if let Some(violation) = world.violation() {
            return Err(violation.clone().into());
        }
        let replaying = self.plan.until.is_some_and(|until| world.turn + 200 > until);
        if replaying || world.turn.is_multiple_of(check_every) {
            checkers::check_all(world, &self.driver.manager)?;
            checkers::sleepers_are_watched(world, &self.driver.watch)?;
        }
        if self.plan.until == Some(world.turn) { Err(Stop::Reached) } else { Ok(()) }
    }

    /// The daemon is dead; a new one finds the records.
    fn restart(&mut self) {
        let nowhere = World::new(Scenario::plain(), Rng::new(0), Trace::new(None));
        let mut host = std::mem::replace(&mut self.driver.host, SimHost { world: nowhere });
        let segments = host.world.restart();
        let mut config = host.world.scenario.config;
        config.budget_bytes = host.world.budget_bytes;
        let records = host.world.records.clone();
        self.driver = Driver::new(host, Manager::recover(config, records, &segments));
    }

    /// Every fault ends. Once nothing goes wrong any more nobody may wait for ever: a thread that does
    /// is a program that hangs.
    fn settle(&mut self) -> Result<(), Stop> {
        let mut still = 0;
        let mut waiting = 0;
        let mut steps = self.driver.host.world.steps_to_rest();
        loop {
            self.turn(64)?;
            if self.world().unrest_of_programs().is_none() {
                // Nobody waited for the store. Now let it have what is still to be written.
                self.world().store_is_dead = false;
            }
            let world = &self.driver.host.world;
            let Some(what) = world.unrest() else {
                still += 1;
                if still == STILL_TURNS {
                    checkers::nobody_is_watched(&self.driver.watch)?;
                    return Ok(checkers::check_all(world, &self.driver.manager)?);
                }
                continue;
            };
            still = 0;
            waiting += 1;
            if world.steps_to_rest() != steps {
                steps = world.steps_to_rest();
                waiting = 0;
            }
            if waiting == TURNS_TO_WAIT_MAX {
                let what = format!("{what}; {}", self.driver.manager.describe());
                return Err(Violation { checker: "every fault ends", what }.into());
            }
        }
    }

    fn end(&mut self) -> Result<(), Stop> {
        for proc in 0..self.driver.host.world.procs.len() {
            let process = &self.driver.host.world.procs[proc];
            if process.known && !process.exited {
                self.world().exit(proc);
            }
        }
        self.settle()?;
        Ok(checkers::nothing_is_left(&self.driver.host.world, &self.driver.manager)?)
    }
}
