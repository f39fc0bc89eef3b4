//! Seeds that once broke a promise, and what they showed. A seed repeats its run only as long as
//! nothing draws from it in another order; the words tell what to look for when one fails again.

use std::time::Duration;
use tiermgr_sim::scenario::Bias;
use tiermgr_sim::watchdog::Watchdog;
use tiermgr_sim::{Plan, run_plan};

const TURNS: u64 = 1500;
const LIMIT: Duration = Duration::from_secs(120);

const SEEDS: &[(u64, &str)] = &[
    (44, "more frames in use than counted, with pages that rest in their place"),
    (53, "more frames in use than counted after forks"),
    (106, "more frames in use than counted after forks, all of them with a record"),
    (185, "more frames in use than counted after forks, all of them with a record"),
    (187, "more frames in use than counted, among them pages recorded as absent"),
    (
        213,
        "pages of a discard that no helper carried out were not counted before they were looked at",
    ),
    (260, "what a fork left shared and a write unprotected was moved in vain for ever"),
    (271, "a child kept pages that its parent recorded as given up and zapped after the fork"),
    (342, "a kill while a table was copied left the child a part of it"),
    (347, "a child of a child was forked before the latter's memory was armed"),
    (349, "zeros installed for the helper on an absent page were recorded nowhere"),
    (365, "waiting for pages to rest out in their place kept the daemon spinning"),
    (398, "stale pages of one extent in limbo were uncounted when another was dropped"),
    (426, "parked pages whose helper died before the drop could never be filled or looked at"),
    (454, "a block in place whose page the client had dropped was never left"),
    (464, "a block all of whose pages were zeros was never left, and a fork waited for it"),
    (524, "a shield that came late protected what the helper was about to populate"),
    (532, "a child kept pages that its parent parked in their place after the fork"),
    (570, "pages still counted for a family of which nothing was left, after kills"),
    (593, "a discard without a helper, as in seed 213"),
    (783, "two kills while a table was copied made a part of it pass for the whole"),
    (991, "stale pages in limbo were uncounted after a restart without a helper"),
    (1024, "a fork that was told again brought its parent back to life"),
    (1127, "a process ended while its memory was being armed for a fork: neither went on"),
    (1211, "a child forked just before a drain was left armed and unmanaged"),
    (1355, "a child forked just before its parent dropped a region hung in it"),
    (
        1564,
        "frames of a region whose drop was asked for when the daemon died: the simulator's own mistake",
    ),
    (1610, "pages that rested in limbo next to an unmapped one were left there by a drain"),
    (1694, "a child of a parent without regions was never taken for born"),
    (1744, "a process ended while its memory was being armed, as in seed 1127"),
    (2429, "a fork that was told again forgot that the child was not armed"),
    (3315, "marks of protection on missing pages stopped a move for ever"),
    (2687, "no extent's rest ended on a machine that was up for seven weeks"),
    (6026, "a kill in the middle of copying a child's table left extents of no region"),
    (7693, "a block in place whose pages all turned out to be missing, as in seed 454"),
    (11350, "the helper made a copy after a fork that both sides' records took for one frame"),
    (15921, "a child's page of zeros, recorded as parked, was not counted when it was written"),
    (9466, "a read that failed on its way made pages pass for lost that were whole the try before"),
];

const BIASED: &[(Bias, u64, &str)] = &[
    (Bias::DeadStore, 671, "what lay beside a resting page in limbo was uncounted after a restart"),
    (Bias::Ends, 686, "a child's page was taken for lost while it was in its place"),
    (
        Bias::Ends,
        318,
        "nobody looked for the pages of a lease that was asked for under an operation",
    ),
    (
        Bias::Ends,
        101_171,
        "a grandchild's pages were not looked for that its grandparent gave up while its parent was forked and ended",
    ),
    (Bias::Unmaps, 1173, "a child's pages that its parent moved after the fork were not counted"),
    (
        Bias::Unmaps,
        185,
        "what a child had mapped itself was moved: its fork was told after its parent had mapped a region",
    ),
    (
        Bias::Splits,
        47,
        "what a grandchild had mapped itself was moved: it was told before its parent gave the region up",
    ),
    (
        Bias::Splits,
        2902,
        "a child of a parent without regions was told again when that had some, and given them",
    ),
    (Bias::DeadStore, 189, "zeros in a lost parent's limbo: the simulator's own mistake"),
];

#[test]
fn seeds_that_failed_once_pass() {
    let _limit = Watchdog::new(LIMIT);
    let plain = SEEDS.iter().map(|&(seed, showed)| (Bias::None, seed, showed));
    let failures: Vec<String> = plain
        .chain(BIASED.iter().copied())
        .filter_map(|(bias, seed, showed)| {
            let outcome = run_plan(Plan { bias, ..Plan::new(seed, TURNS) });
            outcome.failure.map(|failure| format!("{showed}:\n{failure}"))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
