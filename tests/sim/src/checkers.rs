//! What must hold after every turn. Each checker is a function with the promise it guards; what a
//! program sees while it runs ("wrong byte", "a pinned page stays", "one reply for each request") is
//! checked where it happens, in `workload.rs` and `host.rs`.

use crate::client::{Call, Expect, Process, RegionState, State};
use crate::kernel::{FrameId, Frames, Pte, Vma};
use crate::records::SimRecords;
use crate::world::{Violation, World};
use std::collections::BTreeMap;
use tiermgr_core::manager::{Manager, RegionView};
use tiermgr_core::page::PageState;
use tiermgr_core::record::{ExtentRecord, Records, RegionRecord};
use tiermgr_core::units::{Addr, CHUNK_BYTES, EXTENT_BYTES, ProcId, RecordIndex, Span};
use tiermgr_core::watch::Watch;

/// Turns after which a new daemon has looked at everything.
const TURNS_TO_LOOK: u64 = 500;

/// Turns after which a fork has been followed to the end, its child's memory armed and looked at.
const TURNS_TO_FOLLOW: u64 = 600;

type Checked = Result<(), Violation>;

fn broken(checker: &'static str, what: String) -> Checked {
    Err(Violation { checker, what })
}

/// Everything that can be checked between any two turns.
///
/// # Errors
///
/// The first promise that does not hold.
pub fn check_all(world: &World, manager: &Manager<SimRecords>) -> Checked {
    one_true_copy(world)?;
    leased_pages_stay(world)?;
    foreign_memory_is_left_alone(world)?;
    // A new daemon counts what it finds as it looks at it.
    let looks = world.counts.kills > 0 && world.turn < world.daemon_since + TURNS_TO_LOOK;
    if looks {
        return Ok(());
    }
    own_invariants(world, manager)?;
    ledger(world, manager)
}

/// The watchdog knows of everybody who sleeps in a fault that was read. If not, a program hangs and
/// nobody says so.
///
/// # Errors
///
/// Who sleeps unnoticed.
pub fn sleepers_are_watched(world: &World, watch: &Watch) -> Checked {
    let served = world.procs.iter().filter(|proc| proc.known && !proc.released && !proc.exited);
    for process in served {
        if process.waits_for_lost {
            // It is about to be ended.
            continue;
        }
        for waiter in process.mm.waiters.iter().filter(|waiter| waiter.read) {
            // The answer is on its way: only the kernel holds it up, until a message has been read.
            let poisoned =
                |&(proc, span): &(ProcId, Span)| proc == process.id && span.contains(waiter.at);
            if !watch.sleeps(process.id, waiter.at) && !world.poisons.iter().any(poisoned) {
                let what = format!("{:?} at {:?}: {waiter:?}", process.id, waiter.at);
                return broken("sleepers are watched", what);
            }
        }
    }
    Ok(())
}

/// Once all is done nobody is thought to sleep. If not, the watchdog cries wolf.
///
/// # Errors
///
/// What the watchdog believes.
pub fn nobody_is_watched(watch: &Watch) -> Checked {
    if watch.is_empty() { Ok(()) } else { broken("nobody is watched", format!("{watch:?}")) }
}

/// The manager's own books balance, and what it stored durably is well formed. If not, it would run
/// out of room, slots or buffers that nobody uses, or a restart would find nonsense.
fn own_invariants(world: &World, manager: &Manager<SimRecords>) -> Checked {
    if let Some(what) = world.records.take_broken() {
        return broken("records are well formed", what);
    }
    manager.check_deeply().or_else(|what| broken("the manager's books balance", what))
}

/// Every page has one true copy, and the durable record leads to it. If not, the program is going to
/// read something it never wrote, now or after the next restart of the daemon.
fn one_true_copy(world: &World) -> Checked {
    let mut regions: BTreeMap<ProcId, Vec<RegionRecord>> = BTreeMap::new();
    for region in world.records.regions() {
        regions.entry(region.proc).or_default().push(region);
    }
    for process in world.procs.iter().filter(|process| process.runs()) {
        let own = regions.get(&process.id).map_or(&[][..], Vec::as_slice);
        for region in process.regions.iter() {
            let end = region.first + crate::ix(region.pages);
            let mut known = None;
            for page in region.first..end {
                let at = process.addr(page);
                if at.0.is_multiple_of(EXTENT_BYTES) || page == region.first {
                    known = record_of(world, own, at);
                }
                page_has_a_true_copy(world, process, page, known)?;
            }
        }
    }
    Ok(())
}

fn record_of(world: &World, regions: &[RegionRecord], at: Addr) -> Option<ExtentRecord> {
    let region = regions.iter().find(|region| {
        at >= region.base && at.0 - region.base.0 < u64::from(region.extents) * EXTENT_BYTES
    })?;
    let extent = crate::low32((at.0 - region.base.0) / EXTENT_BYTES);
    if extent < region.unarmed_extents {
        return None;
    }
    Some(world.records.get(RecordIndex(region.first.0 + extent)))
}

fn page_has_a_true_copy(
    world: &World,
    process: &Process,
    page: usize,
    record: Option<ExtentRecord>,
) -> Checked {
    let expect = process.expect[page];
    if expect.undefined || expect.loss_ok || expect.lost {
        return Ok(());
    }
    let entry = process.mm.arena()[page];
    let Vma::Managed { armed } = entry.vma else { return Ok(()) };
    let at = process.addr(page);
    let describe = |found: &str| {
        let state = record.map(|record| {
            let index = crate::low32(at.0 % EXTENT_BYTES / world.scenario.layout.page_bytes);
            (record.states.get(index), record.slot, record.limbo())
        });
        format!(
            "page {page} of {:?} ({at:?}) must be {expect:?}; record {state:?}, entry {entry:?}: \
             {found}",
            process.id
        )
    };
    match entry.pte {
        Pte::Present { frame, wp, .. } => {
            let held = world.frames.generation(frame);
            if !expect.allows(held) {
                return broken("one true copy", describe(&format!("it holds {held}")));
            }
            record.map_or(Ok(()), |record| {
                clean_page_matches_slot(world, at, record, held, armed && wp)
                    .or_else(|what| broken("one true copy", describe(&what)))
            })
        }
        Pte::Poison if expect.zero_ok() => Ok(()),
        Pte::Poison => broken("one true copy", describe("it is poisoned and was not lost")),
        Pte::Absent { .. } if expect.zero_ok() => Ok(()),
        Pte::Absent { .. } if !armed => {
            broken("one true copy", describe("a touch gives zeros: it is not armed"))
        }
        Pte::Absent { .. } => record.map_or(Ok(()), |record| {
            absent_page_is_elsewhere(world, process, at, record, expect)
                .or_else(|what| broken("one true copy", describe(&what)))
        }),
    }
}

fn index_in_extent(world: &World, at: Addr) -> usize {
    crate::ix(at.0 % EXTENT_BYTES / world.scenario.layout.page_bytes)
}

/// A page that is recorded as clean is what its slot holds, and a write to it would be noticed: the
/// next park skips the write to the store.
fn clean_page_matches_slot(
    world: &World,
    at: Addr,
    record: ExtentRecord,
    held: u64,
    protected: bool,
) -> Result<(), String> {
    let index = index_in_extent(world, at);
    match record.states.get(crate::n32(index)) {
        PageState::Clean if !protected => {
            return Err("it is recorded clean and a write would go unseen".to_owned());
        }
        PageState::Clean => {}
        // On its way back from limbo: whatever is in place is the newest, at a restart too.
        _ => return Ok(()),
    }
    match world.store.slot_page(record.slot, index) {
        Some(slot) if slot != held => {
            Err(format!("it holds {held}, and its slot {slot}: recorded clean"))
        }
        _ => Ok(()),
    }
}

fn absent_page_is_elsewhere(
    world: &World,
    process: &Process,
    at: Addr,
    record: ExtentRecord,
    expect: Expect,
) -> Result<(), String> {
    let index = index_in_extent(world, at);
    let state = record.states.get(crate::n32(index));
    match state {
        PageState::LimboDirty | PageState::LimboClean => {
            let Some(block) = record.limbo() else {
                return Err("it is in limbo, in no block".to_owned());
            };
            let limbo = process.mm.layout.limbo_span().start;
            let there = limbo.plus(u64::from(block.0) * CHUNK_BYTES + at.0 % CHUNK_BYTES);
            match generation_at(&world.frames, process, there) {
                Some(held) if expect.allows(held) => {
                    let slot = world.store.slot_page(record.slot, index);
                    match slot {
                        Some(slot) if state == PageState::LimboClean && slot != held => {
                            Err(format!("limbo holds {held}, and its slot {slot}"))
                        }
                        _ => Ok(()),
                    }
                }
                found => Err(format!("limbo {there:?} holds {found:?}")),
            }
        }
        PageState::Parked | PageState::Filling => match world.store.slot_page(record.slot, index) {
            Some(held) if expect.allows(held) => Ok(()),
            found => Err(format!("its slot holds {found:?}")),
        },
        _ => Err(format!("it is not there, and {state:?} leads nowhere")),
    }
}

fn generation_at(frames: &Frames, process: &Process, at: Addr) -> Option<u64> {
    process.mm.page(at)?.pte.frame().map(|frame| frames.generation(frame))
}

/// A leased page is in its place as long as the lease lasts. If not, a GPU or a network card that was
/// promised the memory fails fatally, or works on memory that is somebody else's.
fn leased_pages_stay(world: &World) -> Checked {
    for process in world.procs.iter().filter(|process| process.runs()) {
        for held in &process.leases {
            for page in held.first..held.first + crate::ix(held.pages) {
                let entry = process.mm.arena()[page];
                let is_armed = entry.vma == Vma::Managed { armed: true };
                let is_lost = process.expect[page].loss_ok || process.expect[page].lost;
                if is_armed && entry.pte.frame().is_none() && !is_lost {
                    let what = format!(
                        "page {page} of {:?} is absent under {:?}: {entry:?}",
                        process.id, held.lease
                    );
                    return broken("a leased page stays", what);
                }
            }
        }
    }
    Ok(())
}

/// A mapping that took the place of a region is none of ours. If not, a program that never heard of
/// tiermgr loses data because its allocator reused an address.
fn foreign_memory_is_left_alone(world: &World) -> Checked {
    for process in world.procs.iter().filter(|process| process.runs()) {
        for (page, entry) in process.mm.arena().iter().enumerate() {
            if entry.vma != Vma::Foreign {
                continue;
            }
            let held = entry.pte.frame().map_or(0, |frame| world.frames.generation(frame));
            let value = process.expect[page].value;
            let protected = matches!(entry.pte, Pte::Present { wp: true, .. });
            if held != value || protected || entry.pte == Pte::Poison {
                let what = format!(
                    "page {page} of {:?} is not ours, held {value}, and is now {entry:?} with {held}",
                    process.id
                );
                return broken("foreign memory is left alone", what);
            }
        }
    }
    Ok(())
}

/// Frames that the family takes, as the kernel counts them.
fn frames_used(world: &World, manager: &Manager<SimRecords>) -> u64 {
    let views = manager.regions();
    let mut seen = vec![false; world.frames.high_water()];
    let mut used = 0;
    // A child has no table yet where its parent is held up by its helper: what is its alone counts later.
    let has_table = |process: &Process| views.iter().any(|view| view.proc == process.id);
    let is_managed = |process: &&Process| {
        process.known && !process.drained && !process.perhaps_drained && has_table(process)
    };
    for process in world.procs.iter().filter(is_managed) {
        // The regions of one that leaves management become its own one by one.
        let is_draining = process
            .threads
            .iter()
            .any(|thread| matches!(thread.state, State::Calling(_, Call::Drain)));
        let owned = process.mm.arena().iter().enumerate().filter(|&(page, entry)| {
            // What a process was giving up when it ended goes with it: as soon as the daemon hears of
            // that, the last task of the address space is ended.
            let given_up = |state| {
                state == RegionState::Abandoned || process.exited && state == RegionState::Leaving
            };
            let managed = process.regions.iter().any(|region| {
                let is_known =
                    |view: &RegionView| view.proc == process.id && Some(view.region) == region.id;
                region.id.is_some()
                    && !given_up(region.state)
                    && (!is_draining || views.iter().any(is_known))
                    && region.first <= page
                    && page < region.first + crate::ix(region.pages)
            });
            managed && matches!(entry.vma, Vma::Managed { .. })
        });
        for frame in owned
            .map(|(_, entry)| entry)
            .chain(process.mm.limbo())
            .filter_map(|entry| entry.pte.frame())
        {
            let slot = &mut seen[crate::ix(u64::from(frame.0))];
            if frame != FrameId::ZERO && !*slot {
                *slot = true;
                used += 1;
            }
        }
    }
    used
}

/// The ledger counts at least what the kernel holds for the family. If not, the family takes memory
/// that somebody else was promised, up to the out-of-memory killer.
fn ledger(world: &World, manager: &Manager<SimRecords>) -> Checked {
    let used = frames_used(world, manager);
    let counted = manager.gauges().used_pages();
    // A fork doubles what may be written before its message is read and the copies are protected, and
    // a layout change that is not read yet is not counted yet.
    let unread = world.procs.iter().any(|process| {
        // What one without a table has touched shows when it gets that, after all that its parent is about.
        let unheard = !(process.exited || process.known && process.born);
        let unshielded = process.runs() && process.mm.unshielded;
        unheard || unshielded || process.mm.changing > 0 || !process.mm.messages.is_empty()
    });
    // What a child touched before it was armed is counted once its map is read.
    let follows = world.forked_at.is_some_and(|turn| world.turn < turn + TURNS_TO_FOLLOW);
    let silent: u64 = world.procs.iter().map(|process| process.mm.silent_copies).sum();
    if !unread && !follows && used > counted + silent {
        let gauges = manager.gauges();
        let example = uncounted_pages(world);
        let what = format!(
            "{used} frames in use, {counted} counted, {silent} unannounced: {gauges:?}; {example}"
        );
        return broken("ledger", what);
    }
    Ok(())
}

/// Which frames no record names, for the words of a failure.
fn uncounted_pages(world: &World) -> String {
    let regions = world.records.regions();
    let mut named = vec![false; world.frames.high_water()];
    let mut example = vec![None; world.frames.high_water()];
    let mut in_limbo = 0;
    for process in world.procs.iter().filter(|process| process.known && !process.drained) {
        let own: Vec<RegionRecord> =
            regions.iter().filter(|region| region.proc == process.id).copied().collect();
        in_limbo += process.mm.limbo().iter().filter(|page| page.pte.frame().is_some()).count();
        for (page, entry) in process.mm.arena().iter().enumerate() {
            let Some(frame) = entry.pte.frame().filter(|&frame| frame != FrameId::ZERO) else {
                continue;
            };
            let at = process.addr(page);
            let state = record_of(world, &own, at)
                .map(|record| record.states.get(crate::n32(index_in_extent(world, at))));
            let counted = state.is_some_and(|state| {
                state.is_resident() || state.is_limbo() || state == PageState::Filling
            });
            let index = crate::ix(u64::from(frame.0));
            named[index] |= counted;
            if matches!(entry.vma, Vma::Managed { .. }) {
                example[index].get_or_insert((page, process.id, state));
            }
        }
    }
    let unnamed: Vec<_> = (0..named.len())
        .filter(|&frame| !named[frame])
        .filter_map(|frame| example[frame])
        .collect();
    let in_place = example.iter().flatten().count();
    let first = unnamed.first();
    format!(
        "{in_place} in place, {in_limbo} in limbo; no record names {} in place: {first:?}",
        unnamed.len()
    )
}

/// What must hold once every process is gone and everything has settled: the daemon holds nothing for
/// a family that is no more. If not, it leaks memory, slots or records with every client.
///
/// # Errors
///
/// What is still held.
pub fn nothing_is_left(world: &World, manager: &Manager<SimRecords>) -> Checked {
    let held = manager.slots_held();
    if held > 0 {
        return broken("nothing is left", format!("{held} slots are held for nobody"));
    }
    let gauges = manager.gauges();
    if *gauges != tiermgr_core::stats::Gauges::default() {
        return broken("nothing is left", format!("the ledger still shows {gauges:?}"));
    }
    if !world.records.is_empty() {
        return broken("nothing is left", "records of regions that are gone".to_owned());
    }
    if let Some(proc) = manager.procs().next() {
        return broken("nothing is left", format!("{proc:?} is gone and still served"));
    }
    if let Some(process) = world.procs.iter().find(|process| process.known && !process.released) {
        return broken("nothing is left", format!("{:?} was never released", process.id));
    }
    let frames = world.frames.in_use();
    if frames > 0 {
        return broken("nothing is left", format!("{frames} frames are in use by nobody"));
    }
    Ok(())
}
