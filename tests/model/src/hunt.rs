//! The hunt for mutants: every rule must be missed when it is gone.

use crate::explore::{Violation, explore};
use crate::model::Model;
use crate::rules::{Rule, Rules};
use crate::scenario::{SCENARIOS, Scenario};

/// A mutant that was caught.
#[derive(Debug)]
pub struct Caught {
    /// Where.
    pub scenario: &'static Scenario,
    /// How.
    pub violation: Violation,
}

/// Explores the scenarios without `rule` until something goes wrong, those first in which the rule is
/// most likely to be missed.
///
/// # Errors
/// The name of a scenario that has become too large to explore.
pub fn hunt(rule: Rule) -> Result<Option<Caught>, &'static str> {
    let first = rule.likely();
    let rest = SCENARIOS.iter().filter(|s| s.name != first);
    for scenario in Scenario::named(first).into_iter().chain(rest) {
        let model = Model { scenario: *scenario, rules: Rules::without(rule) };
        let found = explore(&model).map_err(|_states| scenario.name)?;
        if let Some(violation) = found.violation {
            return Ok(Some(Caught { scenario, violation }));
        }
    }
    Ok(None)
}
