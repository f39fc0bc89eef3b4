//! Seeds: whether the production engine keeps its promises under any order and any fault.
//!
//! `TIERMGR_SIM_SEEDS` is the number of seeds (200 by default); `scripts/sim` runs more, and replays one.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tiermgr_sim::scenario::Bias;
use tiermgr_sim::watchdog::Watchdog;
use tiermgr_sim::{Plan, run, run_plan};

const TURNS: u64 = 1500;
/// No test here may take longer. A run that does hangs, which is a failure as well.
const LIMIT: Duration = Duration::from_secs(300);

fn seeds() -> u64 {
    std::env::var("TIERMGR_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

/// Runs `plans` on all cores and returns the words of those that failed.
fn failures_of(plans: &[Plan]) -> Vec<String> {
    let next = AtomicU64::new(0);
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    let mut failures = Vec::new();
                    loop {
                        let nth = tiermgr_sim::ix(next.fetch_add(1, Ordering::Relaxed));
                        let Some(&plan) = plans.get(nth) else { return failures };
                        failures.extend(run_plan(plan).failure.map(|failure| failure.to_string()));
                    }
                })
            })
            .collect();
        handles
            .into_iter()
            .flat_map(|handle| handle.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

#[test]
fn no_seed_breaks_a_promise() {
    let _limit = Watchdog::new(LIMIT);
    let plans: Vec<_> = (1..=seeds()).map(|seed| Plan::new(seed, TURNS)).collect();
    let failures = failures_of(&plans);
    assert!(
        failures.is_empty(),
        "{} of {} seeds failed:\n{}",
        failures.len(),
        plans.len(),
        failures.join("\n")
    );
}

/// Each bias for some of the seeds: what ends at bad moments, a store that dies, messages out of order.
#[test]
fn no_bias_breaks_a_promise() {
    let _limit = Watchdog::new(LIMIT);
    let biased = |seed| Bias::ALL.map(|bias| Plan { bias, ..Plan::new(seed, TURNS) });
    let plans: Vec<_> = (1..=50).flat_map(biased).collect();
    let failures = failures_of(&plans);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let _limit = Watchdog::new(LIMIT);
    for seed in 1..=10 {
        let (first, second) = (run(seed, 400), run(seed, 400));
        assert_eq!(first.hash, second.hash, "seed {seed} is not deterministic");
        assert_eq!(first.turns, second.turns);
    }
}

#[test]
fn another_seed_gives_another_run() {
    let _limit = Watchdog::new(LIMIT);
    assert_ne!(run(1, 400).hash, run(2, 400).hash);
}

#[test]
fn seeds_do_something() {
    let _limit = Watchdog::new(LIMIT);
    let mut faults = 0;
    let mut written = 0;
    let mut read = 0;
    for seed in 1..=20 {
        let counts = run(seed, TURNS).counts;
        faults += counts.faults;
        written += counts.written;
        read += counts.read;
    }
    assert!(faults > 1000, "{faults} faults");
    assert!(written > 500, "{written} extents written");
    assert!(read > 200, "{read} extents read");
}

/// Fails the first thing that can fail (an ioctl, a command, a read or write of the store), then the
/// second, and so on, until a run gets through without reaching the failure.
#[test]
fn nothing_is_lost_whichever_step_fails() {
    const BATCH: u64 = 64;
    let _limit = Watchdog::new(LIMIT);
    let plan = |nth| Plan { fail_nth: Some(nth), ..Plan::new(1, 300) };
    let mut first = 0;
    loop {
        let plans: Vec<_> = (first..first + BATCH).map(plan).collect();
        let failures = failures_of(&plans);
        assert!(failures.is_empty(), "failing step {first} and on:\n{}", failures.join("\n"));
        first += BATCH;
        if !run_plan(plan(first)).failure_was_reached {
            return;
        }
    }
}
