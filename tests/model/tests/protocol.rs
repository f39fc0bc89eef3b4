//! The protocol holds in every scenario, and every rule of it is needed.

use std::sync::mpsc;
use std::time::Duration;
use tiermgr_model::{
    Exploration, Model, Rule, Rules, SCENARIOS, Scenario, Violation, explore, hunt,
};

/// More than ten times what the slowest exploration takes on a busy machine of two cores.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs `work`, and fails when it takes too long. A thread that does is left to the end of the tests.
fn within_limit<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    match wait.recv_timeout(LIMIT) {
        Ok(result) => result,
        Err(why) => panic!("the exploration took too long or panicked: {why}"),
    }
}

fn explore_whole(name: &'static str) -> Exploration {
    let Some(scenario) = Scenario::named(name) else {
        panic!("{name} is no scenario");
    };
    let model = Model { scenario: *scenario, rules: Rules::all() };
    match within_limit(move || explore(&model)) {
        Ok(found) => found,
        Err(states) => panic!("{name} has more than {states} states"),
    }
}

fn told(violation: &Violation) -> String {
    let steps = violation.trace.iter().map(|step| format!("  {step}\n")).collect::<String>();
    format!("{} after\n{steps}{:?}", violation.broken, violation.state)
}

macro_rules! holds {
    ($($test:ident: $name:literal,)*) => {
        $(
            #[test]
            fn $test() {
                let found = explore_whole($name);
                if let Some(violation) = &found.violation {
                    panic!("{}", told(violation));
                }
                assert!(found.states > 10_000, "only {} states: hardly a world", found.states);
            }
        )*

        #[test]
        fn every_scenario_is_explored() {
            let tested = [$($name),*];
            assert_eq!(tested.as_slice(), SCENARIOS.iter().map(|s| s.name).collect::<Vec<_>>());
        }
    };
}

holds! {
    the_protocol_holds_at_its_base: "base",
    the_protocol_holds_inside_an_extent: "extent",
    the_protocol_holds_with_dma: "dma",
    the_protocol_holds_with_fork: "fork",
    the_protocol_holds_with_fork_and_untouched_pages: "fork-holes",
    the_protocol_holds_with_fork_and_slots_reused: "fork-slots",
    the_protocol_holds_with_fork_and_a_kill: "fork-crash",
    the_protocol_holds_with_discard: "discard",
    the_protocol_holds_with_discard_refused: "discard-refused",
    the_protocol_holds_with_discard_and_fork: "discard-fork",
    the_protocol_holds_with_addresses_reused: "reuse",
    the_protocol_holds_with_addresses_reused_and_fork: "reuse-fork",
    the_protocol_holds_with_two_kills: "crash",
}

#[test]
fn every_rule_is_missed_when_it_is_gone() {
    let mut unmissed = Vec::new();
    for rule in Rule::ALL {
        let caught = within_limit(move || hunt(rule)).expect("every scenario is small");
        if caught.is_none() {
            unmissed.push(rule);
        }
    }
    assert_eq!(unmissed, [], "rules that nothing depends on");
}

#[test]
fn every_rule_can_be_named() {
    for rule in Rule::ALL {
        assert_eq!(Rule::named(&format!("{rule:?}")), Some(rule));
        assert!(!Rules::without(rule).holds(rule));
        assert!(
            Rule::ALL.into_iter().filter(|&r| r != rule).all(|r| Rules::without(rule).holds(r))
        );
    }
}
