//! `sim`: runs seeds and prints, for each that breaks a promise, the line that repeats it.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tiermgr_sim::scenario::Bias;
use tiermgr_sim::{Failure, Plan, run_plan};

const USAGE: &str = "\
usage: sim [--seed N] [--count N] [--turns N] [--until T] [--trace] [--from T]

  --seed N    first seed (1)
  --count N   seeds to run (1 with --trace or --until, else 200)
  --turns N   turns with faults, before the world comes to rest (1500)
  --until T   stop after turn T
  --trace     print what happens
  --from T    print only from turn T on
  --fail N    a plain world in which only the Nth thing that can fail fails
  --bias B    more of something: Ends, DeadStore, Unmaps, FullGroup, Splits";

struct Options {
    seed: u64,
    count: Option<u64>,
    turns: u64,
    until: Option<u64>,
    trace: bool,
    from: u64,
    fail: Option<u64>,
    bias: Bias,
}

fn parse() -> Result<Options, String> {
    let mut options = Options {
        seed: 1,
        count: None,
        turns: 1500,
        until: None,
        trace: false,
        from: 0,
        fail: None,
        bias: Bias::None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--trace" {
            options.trace = true;
            continue;
        }
        if argument == "--bias" {
            let name = arguments.next().unwrap_or_default();
            options.bias = Bias::named(&name).ok_or(format!("{name:?} is no bias"))?;
            continue;
        }
        let mut number = || {
            let text = arguments.next().ok_or(format!("{argument} wants a number"))?;
            text.parse::<u64>().map_err(|error| format!("{argument} {text}: {error}"))
        };
        match argument.as_str() {
            "--seed" => options.seed = number()?,
            "--count" => options.count = Some(number()?),
            "--turns" => options.turns = number()?,
            "--until" => options.until = Some(number()?),
            "--from" => options.from = number()?,
            "--fail" => options.fail = Some(number()?),
            other => return Err(format!("{other} is not an option")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match parse() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let single = options.trace || options.until.is_some();
    let count = options.count.unwrap_or(if single { 1 } else { 200 });
    let next = AtomicU64::new(0);
    let failures: Mutex<Vec<Failure>> = Mutex::new(Vec::new());
    let totals = [const { AtomicU64::new(0) }; 6];
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    if nth >= count {
                        break;
                    }
                    let mut plan = Plan::new(options.seed + nth, options.turns);
                    plan.until = options.until;
                    plan.fail_nth = options.fail;
                    plan.bias = options.bias;
                    plan.trace_from = options.trace.then_some(options.from);
                    let outcome = run_plan(plan);
                    let counts = outcome.counts;
                    let sums = [
                        counts.faults,
                        counts.written,
                        counts.read,
                        counts.forks,
                        counts.injected,
                        outcome.turns,
                    ];
                    for (total, sum) in totals.iter().zip(sums) {
                        total.fetch_add(sum, Ordering::Relaxed);
                    }
                    if let Some(failure) = outcome.failure {
                        eprintln!("{failure}");
                        if let Ok(mut failures) = failures.lock() {
                            failures.push(failure);
                        }
                    }
                }
            });
        }
    });
    let failed = failures.lock().map_or(0, |failures| failures.len());
    let [faults, written, read, forks, injected, turns] =
        totals.map(|total| total.load(Ordering::Relaxed));
    eprintln!(
        "{count} seeds, {turns} turns, {faults} faults, {written} extents written, {read} read, \
         {forks} forks, {injected} failures injected: {failed} seeds failed"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
