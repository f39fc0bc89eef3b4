//! Takes the rules of the protocol away one by one, and shows how each is missed.
//!
//! `TIERMGR_MUTANT=NAME` looks at one rule only. Fails where a rule can go without being missed: then
//! either the model is blind for what the rule protects, or the rule protects nothing.

use std::io::Write;
use std::process::ExitCode;
use tiermgr_model::{Rule, hunt};

fn main() -> std::io::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let rules = match std::env::var("TIERMGR_MUTANT") {
        Err(_) => Rule::ALL.to_vec(),
        Ok(name) => match Rule::named(&name) {
            Some(rule) => vec![rule],
            None => {
                writeln!(out, "TIERMGR_MUTANT={name} is no rule. The rules are:")?;
                for rule in Rule::ALL {
                    writeln!(out, "  {rule:?}")?;
                }
                return Ok(ExitCode::FAILURE);
            }
        },
    };
    let mut missing = 0;
    for rule in rules {
        match hunt(rule) {
            Ok(Some(caught)) => {
                let steps = caught.violation.trace.len();
                let scenario = caught.scenario.name;
                writeln!(
                    out,
                    "rule {rule:?} removed: caught in scenario {scenario} after {steps} steps"
                )?;
                for step in &caught.violation.trace {
                    writeln!(out, "    {step}")?;
                }
                writeln!(out, "    => {}", caught.violation.broken)?;
            }
            Ok(None) => {
                missing += 1;
                writeln!(out, "rule {rule:?} removed: NOT caught in any scenario")?;
            }
            Err(scenario) => {
                missing += 1;
                writeln!(
                    out,
                    "rule {rule:?} removed: scenario {scenario} is too large to explore"
                )?;
            }
        }
    }
    Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
