//! What the simulator's machines do not offer, step by step: kernels and address spaces that lack
//! something, and records as they stand at certain instants.

use super::*;
use crate::effect::Command;
use crate::event::CommandOutcome;
use crate::page::{PageMask, PageStates};
use crate::record::{ExtentRecord, RegionRecord};
use crate::slots::SEGMENT_SLOTS;
use crate::units::{CHUNK_BYTES, CHUNK_EXTENTS, EXTENT_BYTES, RecordIndex, SlotId, low_u32};
use std::cell::RefCell;
use std::rc::Rc;

mod forks;
mod full;
mod restarts;
mod staging;

const PAGE: u64 = 4096;
const PROC: ProcId = ProcId(1);
const BASE: Addr = Addr(1 << 30);
const LIMBO: Addr = Addr(1 << 40);

/// Records that outlive a manager.
#[derive(Clone, Debug)]
struct Kept {
    /// Most records for which there is room.
    room: u32,
    extents: Rc<RefCell<BTreeMap<u32, ExtentRecord>>>,
    regions: Rc<RefCell<BTreeMap<(ProcId, RegionId), RegionRecord>>>,
}

impl Records for Kept {
    fn get(&self, at: RecordIndex) -> ExtentRecord {
        self.extents.borrow().get(&at.0).copied().unwrap_or_default()
    }

    fn set(&mut self, at: RecordIndex, record: ExtentRecord) {
        self.extents.borrow_mut().insert(at.0, record);
    }

    fn reserve(&mut self, _: RecordIndex, count: u32) -> bool {
        count <= self.room
    }

    fn clear(&mut self, first: RecordIndex, count: u32) {
        self.extents.borrow_mut().retain(|&at, _| at < first.0 || at - first.0 >= count);
    }

    fn put_region(&mut self, region: RegionRecord) {
        self.regions.borrow_mut().insert((region.proc, region.region), region);
    }

    fn drop_region(&mut self, proc: ProcId, region: RegionId) {
        self.regions.borrow_mut().remove(&(proc, region));
    }

    fn regions(&self) -> Vec<RegionRecord> {
        self.regions.borrow().values().copied().collect()
    }
}

/// A manager on a machine on which everything ends well and no page is there, except as set.
/// All of it is one address space, but for a second process that can be forked off.
struct Machine {
    manager: Manager<Kept>,
    now: Tick,
    /// Everything that was ordered, in order.
    orders: Vec<Effect>,
    /// How arming ends.
    arming: IoctlOutcome,
    /// Disarming stays unanswered.
    holds_disarming: bool,
    /// Whose address space has nothing of ours where it is to be armed.
    foreign_to: Option<ProcId>,
    /// Others have this page.
    foreign_page: Option<Addr>,
    /// Probes stay unanswered, as while a message is unread.
    holds_probes: bool,
    /// How the next copies end, those of zeros too; `None` stays unanswered. Further ones end well.
    copies: VecDeque<Option<(u64, IoctlOutcome)>>,
    /// Large buffers that are not lent.
    streams: Vec<u16>,
    /// Writes to the store end well.
    store_works: bool,
    /// Pages that each read from the store finds damaged.
    damaged: PageMask,
    /// But not this one.
    bad_slot: Option<SlotId>,
    /// How long they take.
    writes_take_ns: u64,
    /// Those under way, and when they end.
    writing: VecDeque<(Tick, OpId)>,
    /// The address space of `PROC` has ended.
    ended: bool,
    /// What page tables show, by process and extent. Nothing is there but in these.
    maps: BTreeMap<(ProcId, Addr), PageMask>,
}

/// Rounds that one event may cause.
const ROUNDS_MAX: u32 = 200;

impl Machine {
    fn config() -> ManagerConfig {
        let geometry = Geometry { page_bytes: PAGE };
        // Without room everything is armed at birth.
        let demand_buffers = crate::limits::DEMAND_BUFFERS;
        ManagerConfig { geometry, budget_bytes: 0, demand_buffers, probation_ns: 0, has_move: true }
    }

    fn over(manager: Manager<Kept>, maps: BTreeMap<(ProcId, Addr), PageMask>) -> Self {
        let now = Tick(1_000_000);
        let mut machine = Self {
            manager,
            now,
            orders: Vec::new(),
            arming: IoctlOutcome::Done,
            foreign_to: None,
            foreign_page: None,
            holds_disarming: false,
            holds_probes: false,
            copies: VecDeque::new(),
            streams: (0..crate::limits::STREAM_BUFFERS).collect(),
            store_works: true,
            damaged: 0,
            bad_slot: None,
            writes_take_ns: 0,
            writing: VecDeque::new(),
            ended: false,
            maps,
        };
        let limbo = Span::new(LIMBO, 4 * CHUNK_BYTES);
        machine.turn(Event::ProcReady { proc: PROC, limbo });
        machine
    }

    fn new() -> Self {
        let room = crate::limits::RECORDS_MAX;
        let kept = Kept { room, extents: Rc::default(), regions: Rc::default() };
        Self::over(Manager::new(Self::config(), kept), BTreeMap::new())
    }

    /// One extent is on its way to limbo, in no slot.
    fn with_move() -> Self {
        let mut machine = Self::new();
        machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
        assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
        machine.touch(BASE);
        // There is room: it is not written without a need.
        machine.turn(Event::Budget { bytes: 1 << 30 });
        machine
    }

    /// One extent rests there.
    fn with_limbo() -> Self {
        let mut machine = Self::with_move();
        let moved = machine.command(|command| matches!(command, Command::Move { .. })).unwrap();
        machine.carried_out(moved, EXTENT_BYTES);
        assert_eq!(machine.manager.state_of(PROC, BASE), Some(PageState::LimboDirty));
        machine
    }

    /// Another daemon after this one's death.
    fn restarted(self) -> Self {
        let manager = Manager::recover(Self::config(), self.manager.into_records(), &[]);
        Self::over(manager, self.maps)
    }

    /// Feeds an event and then all that comes of it. Commands to the helper stay unanswered.
    fn turn(&mut self, event: Event) {
        let mut events = vec![event];
        for round in 0.. {
            if events.is_empty() {
                break;
            }
            assert!(round < ROUNDS_MAX, "one thing leads to another for ever");
            let mut effects = Vec::new();
            for event in events.drain(..) {
                self.manager.step(self.now, event, &mut effects);
            }
            self.manager.settle(self.now, &mut effects);
            for effect in &effects {
                events.extend(self.answer(effect));
            }
            self.orders.append(&mut effects);
        }
        self.manager.check_deeply().unwrap();
    }

    fn answer(&mut self, effect: &Effect) -> Option<Event> {
        let outcome = if self.ended { IoctlOutcome::NoProcess } else { IoctlOutcome::Done };
        Some(match *effect {
            Effect::Arm { on: false, .. } if self.holds_disarming => return None,
            Effect::Arm { op, proc, .. } if self.foreign_to == Some(proc) => {
                Event::Armed { op, outcome: IoctlOutcome::NoRange }
            }
            Effect::Arm { op, on, .. } => {
                Event::Armed { op, outcome: if on { self.arming } else { outcome } }
            }
            Effect::Probe { .. } if self.holds_probes => return None,
            Effect::Protect { op, span, .. }
                if self.foreign_page.is_some_and(|page| span.contains(page)) =>
            {
                Event::Protected { op, outcome: IoctlOutcome::NoRange }
            }
            Effect::Protect { op, .. } | Effect::Probe { op, .. } => {
                Event::Protected { op, outcome }
            }
            Effect::Zero { op, to, .. } => self.copied(op, to.len, outcome)?,
            Effect::Copy { op, from, .. } => self.copied(op, u64::from(from.len), outcome)?,
            Effect::ReadMap { op, proc, at } => {
                let present = self.maps.get(&(proc, at)).copied().unwrap_or_default();
                Event::Mapped { op, present, known: !self.ended || proc != PROC }
            }
            Effect::ReadLimbo { op, to, .. } => {
                Event::LimboRead { op, bytes: if self.ended { 0 } else { u64::from(to.len) } }
            }
            Effect::WantStream => Event::StreamLent { stream: self.streams.pop()? },
            Effect::ReturnStream { stream } => {
                self.streams.push(stream);
                return None;
            }
            Effect::WriteSlots { op, .. } if self.writes_take_ns > 0 => {
                self.writing.push_back((self.now.after_ns(self.writes_take_ns), op));
                return None;
            }
            Effect::ReadSlots { op, .. } => {
                Event::SlotsRead { op, ok: true, damaged: self.damaged }
            }
            Effect::WriteSlots { op, slot, from } => {
                let end = slot.0 + low_u32(u64::from(from.len) / EXTENT_BYTES);
                let is_bad = self.bad_slot.is_some_and(|bad| (slot.0..end).contains(&bad.0));
                Event::Written { op, ok: self.store_works && !is_bad }
            }
            _ => return None,
        })
    }

    fn copied(&mut self, op: OpId, len: u64, outcome: IoctlOutcome) -> Option<Event> {
        let (bytes, outcome) = self.copies.pop_front().unwrap_or(Some((len, outcome)))?;
        Some(Event::Copied { op, bytes, outcome })
    }

    fn ask(&mut self, request: u64, what: Request) -> Option<Reply> {
        let request = RequestId(request);
        self.turn(Event::Asked { request, proc: PROC, what });
        self.reply_to(request)
    }

    fn reply_to(&self, wanted: RequestId) -> Option<Reply> {
        self.orders.iter().find_map(|effect| match *effect {
            Effect::Reply { request, reply } if request == wanted => Some(reply),
            _ => None,
        })
    }

    /// Answers the probes that were held.
    fn release_probes(&mut self) {
        self.holds_probes = false;
        let probes: Vec<OpId> = self
            .orders
            .iter()
            .filter_map(|effect| match *effect {
                Effect::Probe { op, .. } => Some(op),
                _ => None,
            })
            .collect();
        for op in probes {
            self.turn(Event::Protected { op, outcome: IoctlOutcome::Done });
        }
    }

    /// The last command that `wanted` names.
    fn command(&self, wanted: impl Fn(Command) -> bool) -> Option<OpId> {
        self.orders.iter().rev().find_map(|effect| match *effect {
            Effect::Command { op, command, .. } if wanted(command) => Some(op),
            _ => None,
        })
    }

    /// The helper has carried a command out.
    fn carried_out(&mut self, op: OpId, bytes: u64) {
        self.turn(Event::Commanded { op, bytes, outcome: CommandOutcome::Done });
    }

    /// Lets time pass until something happens.
    fn pass(&mut self) {
        let written = self.writing.front().map_or(Tick::NEVER, |&(at, _)| at);
        self.now = self.now.max(self.manager.deadline().min(written));
        assert_ne!(self.now, Tick::NEVER, "nothing is waited for");
        if written <= self.now
            && let Some((_, op)) = self.writing.pop_front()
        {
            self.turn(Event::Written { op, ok: self.store_works });
        } else {
            self.turn(Event::TimerFired);
        }
    }

    /// Touches a page and lets time pass until it may leave again.
    fn touch(&mut self, at: Addr) {
        self.turn(Event::Faulted { proc: PROC, at, write: true, protected: false });
        self.now = self.now.after_ns(10_000_000);
        self.turn(Event::TimerFired);
    }

    /// A region of `chunks` chunks at `at`.
    fn add(&mut self, request: u64, at: Addr, chunks: u32) -> Option<Reply> {
        let span = Span::new(at, u64::from(chunks) * CHUNK_BYTES);
        self.ask(request, Request::AddRegion { span })
    }

    /// Records the states of the pages of an extent. Those that need a slot get one.
    fn record(&mut self, at: Addr, states: PageStates) {
        let space = self.manager.spaces.get_mut(&PROC).unwrap();
        let region = space.region_at_mut(at).unwrap();
        let extent = region.extent_of(at);
        let slots = &mut self.manager.shared.slots;
        let slot = match states.any(PageState::needs_slot) {
            true => slots.allocate(1).expect("no slot").0,
            false => SlotId::NONE,
        };
        self.manager.shared.update(PROC, region, extent, states, slot, None);
    }
}

/// One extent lies in a slot.
fn with_parked() -> Machine {
    let mut machine = Machine::new();
    machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    machine.record(BASE, PageStates::all(PageState::Parked, 16));
    machine
}

#[test]
fn records_serve_regions_of_ever_other_sizes() {
    let mut shared = Machine::new().manager.shared;
    let half = crate::limits::RECORDS_MAX / 2;
    for round in 0..100 {
        // Each size once, and together far more than there is.
        let count = half - round * CHUNK_EXTENTS;
        let first = shared.take_records(count).unwrap();
        let beside = shared.take_records(CHUNK_EXTENTS).unwrap();
        shared.give_back_records(first, count);
        shared.give_back_records(beside, CHUNK_EXTENTS);
    }
    assert!(shared.take_records(crate::limits::RECORDS_MAX).is_ok());
    assert_eq!(shared.take_records(1), Err(Refusal::TooMany));
}

#[test]
fn after_a_restart_all_records_are_free_that_no_region_has() {
    let mut machine = Machine::new();
    machine.add(1, BASE, 1);
    let mut records = machine.manager.into_records();
    let mut last = records.regions()[0];
    last.first = RecordIndex(crate::limits::RECORDS_MAX - CHUNK_EXTENTS);
    records.put_region(last);
    let mut shared = Manager::recover(Machine::config(), records, &[]).shared;
    assert_eq!(shared.take_records(last.first.0), Ok(RecordIndex(0)));
    assert_eq!(shared.take_records(1), Err(Refusal::TooMany));
}

#[test]
fn records_without_a_region_are_gone_after_a_restart() {
    let mut machine = Machine::new();
    machine.add(1, BASE, 1);
    // As a kill leaves it between the copy of a child's records and that of its region.
    let stray =
        ExtentRecord { states: PageStates::all(PageState::Parked, 16), ..Default::default() };
    machine.manager.shared.records.set(RecordIndex(CHUNK_EXTENTS + 3), stray);
    let machine = machine.restarted();
    let stray = machine.manager.shared.records.get(RecordIndex(CHUNK_EXTENTS + 3));
    assert_eq!(stray, ExtentRecord::default());
}

#[test]
fn the_helper_gets_no_zeros_where_bytes_were_lost() {
    let mut machine = Machine::new();
    machine.add(1, BASE, 1);
    let mut states = PageStates::default();
    states.set(0, PageState::Dirty);
    states.set(1, PageState::Poisoned);
    machine.record(BASE, states);
    // The extent is being made exclusive: the helper writes to its pages.
    let manager = &mut machine.manager;
    let space = manager.spaces.get_mut(&PROC).unwrap();
    let kind = Kind::Prepare(Prepare::Populating { rest: 0 });
    let id = manager.shared.begin(space, op::Op { proc: PROC, at: BASE, kind });
    Shared::<Kept>::lock(space.region_at_mut(BASE).unwrap(), 0, id);
    machine.orders.clear();
    let touch = |page: u64| {
        let at = BASE.plus(page * PAGE);
        Event::Faulted { proc: PROC, at, write: true, protected: false }
    };
    machine.turn(touch(1));
    let span = Span::new(BASE.plus(PAGE), PAGE);
    let proc = PROC;
    assert_eq!(machine.orders, [Effect::Poison { proc, span }]);
    machine.turn(touch(2));
    assert!(machine.orders.iter().any(|order| matches!(order, Effect::Zero { .. })));
}

#[test]
fn a_process_whose_bytes_were_lost_is_not_left_to_the_kernel() {
    let mut machine = Machine::new();
    machine.add(1, BASE, 1);
    machine.record(BASE, PageStates::all(PageState::Poisoned, 16));
    let refused = Some(Reply::Refused(Refusal::StaysForLost));
    assert_eq!(machine.ask(2, Request::Drain), refused);
    // Lost on its way back.
    let space = machine.manager.spaces.get_mut(&PROC).unwrap();
    space.draining.push(RequestId(3));
    machine.turn(Event::TimerFired);
    assert_eq!(machine.reply_to(RequestId(3)), refused);
    let disarms = |order: &Effect| matches!(order, Effect::Arm { on: false, .. });
    assert!(!machine.orders.iter().any(disarms));
    assert_eq!(machine.manager.state_of(PROC, BASE), Some(PageState::Poisoned));
    // Given up, nothing stands against it any more.
    machine.record(BASE, PageStates::default());
    assert_eq!(machine.ask(4, Request::Drain), Some(Reply::Done));
    assert!(machine.orders.iter().any(disarms));
}

#[test]
fn a_region_that_cannot_be_armed_is_refused_and_forgotten() {
    let mut machine = Machine::new();
    machine.arming = IoctlOutcome::NoMemory;
    assert_eq!(machine.add(1, BASE, 1), None);
    let begun = machine.now;
    while machine.reply_to(RequestId(1)).is_none() {
        let deadline = machine.manager.deadline();
        assert!(deadline < begun.after_ns(1_000_000_000), "it is tried for ever");
        machine.now = machine.now.max(deadline);
        machine.turn(Event::TimerFired);
    }
    let refused = Some(Reply::Refused(Refusal::NoMappings));
    assert_eq!(machine.reply_to(RequestId(1)), refused);
    assert!(machine.manager.regions().is_empty());
    // The same place can be asked for again.
    machine.arming = IoctlOutcome::Done;
    assert!(matches!(machine.add(2, BASE, 1), Some(Reply::Region(_))));
}

#[test]
fn a_region_without_room_for_its_records_is_refused_and_takes_none() {
    let mut machine = Machine::new();
    machine.manager.shared.records.room = CHUNK_EXTENTS;
    assert_eq!(machine.add(1, BASE, 2), Some(Reply::Refused(Refusal::NoStateRoom)));
    assert!(matches!(machine.add(2, BASE, 1), Some(Reply::Region(_))));
    let records = machine.manager.into_records();
    assert_eq!(records.regions()[0].first, RecordIndex(0));
}

/// Otherwise they would be asked for again at once: nothing would ever move, and no turn be the last.
#[test]
fn slots_that_limbo_needs_are_not_given_back() {
    let mut machine = Machine::new();
    machine.manager.shared.unslotted_extents = u64::from(4 * SEGMENT_SLOTS);
    // The first segment was asked for when the process came.
    let (mut granted, mut returned) = (0, 0);
    let mut is_wanted = machine.orders.contains(&Effect::WantSlots);
    for _ in 0..20 {
        let mut effects = Vec::new();
        if is_wanted {
            let first = SlotId(1 + granted * SEGMENT_SLOTS);
            let event = Event::SlotsGranted { first, count: SEGMENT_SLOTS };
            machine.manager.step(machine.now, event, &mut effects);
            granted += 1;
        }
        machine.manager.settle(machine.now, &mut effects);
        is_wanted = effects.contains(&Effect::WantSlots);
        returned += effects.iter().filter(|e| matches!(e, Effect::ReturnSlots { .. })).count();
    }
    assert_eq!((granted, returned), (5, 0));
    // What it does not need any more goes back, but for a spare segment.
    machine.manager.shared.unslotted_extents = 0;
    let mut effects = Vec::new();
    machine.manager.settle(machine.now, &mut effects);
    let given_back = effects.iter().filter(|effect| matches!(effect, Effect::ReturnSlots { .. }));
    assert_eq!(given_back.count(), 3);
}

/// What was asked of a region that has ended must not reach whoever got its addresses.
#[test]
fn a_late_discard_reaches_no_later_region() {
    for later_chunks in [1, 2] {
        let mut machine = Machine::new();
        let Some(Reply::Region(region)) = machine.add(1, BASE, 2) else { panic!("no region") };
        machine.holds_probes = true;
        let span = Span::new(BASE, 2 * CHUNK_BYTES);
        assert_eq!(machine.ask(2, Request::Discard { span }), None);
        let held = machine.orders.len();
        machine.holds_probes = false;
        let dropped = machine.ask(3, Request::DropRegion { region });
        assert_eq!(dropped, Some(Reply::Done));
        assert!(matches!(machine.add(4, BASE, later_chunks), Some(Reply::Region(_))));
        machine.orders.truncate(held);
        machine.release_probes();
        let refused = Some(Reply::Refused(Refusal::NotManaged));
        assert_eq!(machine.reply_to(RequestId(2)), refused);
        assert_eq!(machine.command(|_| true), None, "the later region was to be zapped");
    }
}

/// The drop of what a region left in limbo may end when another region has its addresses: that one
/// must not end under its own commands for that.
#[test]
fn a_region_waits_for_its_own_commands_whatever_ends_at_its_addresses() {
    let mut machine = Machine::new();
    let first = SlotId(1);
    machine.turn(Event::SlotsGranted { first, count: SEGMENT_SLOTS });
    let is_move = |command| matches!(command, Command::Move { .. });
    let Some(Reply::Region(region)) = machine.add(1, BASE, 1) else { panic!("no region") };
    machine.touch(BASE);
    let moved = machine.command(is_move).unwrap();
    // With room enough it rests in limbo until its region ends.
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.carried_out(moved, EXTENT_BYTES);
    assert_eq!(machine.ask(2, Request::DropRegion { region }), Some(Reply::Done));
    let dropped = machine.command(|command| matches!(command, Command::Drop(_))).unwrap();
    // Room for what waits to be dropped, and for one extent more.
    machine.turn(Event::Budget { bytes: 2 * EXTENT_BYTES });
    let Some(Reply::Region(region)) = machine.add(3, BASE, 1) else { panic!("no region") };
    machine.touch(BASE);
    let moving = machine.command(is_move).unwrap();
    assert_ne!(moving, moved);
    machine.carried_out(dropped, 0);
    assert_eq!(machine.ask(4, Request::DropRegion { region }), None, "under a move");
    machine.turn(Event::Budget { bytes: 1 << 30 });
    machine.carried_out(moving, EXTENT_BYTES);
    assert_eq!(machine.reply_to(RequestId(4)), Some(Reply::Done));
}

/// A discard waits until nobody works on any of its extents: the policy must not keep it waiting, and
/// not write what is given up.
#[test]
fn what_is_about_to_be_discarded_is_not_parked() {
    let mut machine = Machine::new();
    machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
    assert!(matches!(machine.add(1, BASE, 2), Some(Reply::Region(_))));
    machine.turn(Event::Budget { bytes: 1 << 30 });
    let second = BASE.plus(CHUNK_BYTES);
    machine.touch(BASE);
    machine.touch(second);
    machine.holds_probes = true;
    // To the middle of an extent.
    let span = Span::new(BASE, CHUNK_BYTES + PAGE);
    let kept = second.plus(EXTENT_BYTES);
    machine.touch(kept);
    assert_eq!(machine.ask(2, Request::Discard { span }), None);
    machine.turn(Event::Budget { bytes: 0 });
    machine.now = machine.now.after_ns(10_000_000);
    machine.turn(Event::TimerFired);
    let moved: Vec<Addr> = machine
        .orders
        .iter()
        .filter_map(|order| match *order {
            Effect::Command { command: Command::Move { from, .. }, .. } => Some(from),
            _ => None,
        })
        .collect();
    assert_eq!(moved, [kept]);
    machine.release_probes();
    assert!(machine.command(|command| command == Command::Drop(span)).is_some());
}

/// One of several faults on an extent waits for room on behalf of all: where it needs no operation,
/// nobody would wake the others.
#[test]
fn each_of_several_lost_pages_is_answered() {
    let mut machine = Machine::new();
    machine.turn(Event::SlotsGranted { first: SlotId(1), count: SEGMENT_SLOTS });
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    machine.record(BASE, PageStates::all(PageState::Poisoned, 16));
    machine.touch(BASE.plus(EXTENT_BYTES));
    assert!(machine.command(|_| true).is_some(), "room is on its way");
    machine.orders.clear();
    for at in [BASE.plus(2 * EXTENT_BYTES), BASE, BASE.plus(PAGE)] {
        machine.turn(Event::Faulted { proc: PROC, at, write: false, protected: false });
    }
    let proc = PROC;
    let answered = |machine: &Machine, page: u64| {
        machine.orders.iter().any(|order| match *order {
            Effect::Poison { span, .. } | Effect::Wake { span, .. } => {
                span.contains(BASE.plus(page * PAGE))
            }
            _ => false,
        })
    };
    assert!(!answered(&machine, 0), "it was to wait");
    machine.turn(Event::Budget { bytes: 1 << 30 });
    assert!(machine.orders.contains(&Effect::Poison { proc, span: Span::new(BASE, PAGE) }));
    assert!(answered(&machine, 1), "the second sleeps for ever");
}

/// A family that was told to shrink is not known any longer to want room once it has.
#[test]
fn room_that_does_not_come_is_asked_for_again() {
    let mut machine = Machine::new();
    assert!(matches!(machine.add(1, BASE, 1), Some(Reply::Region(_))));
    let asked = |machine: &Machine| {
        machine.orders.iter().filter(|order| matches!(order, Effect::WantRoom { .. })).count()
    };
    machine.touch(BASE);
    assert_eq!(asked(&machine), 1);
    machine.touch(BASE.plus(EXTENT_BYTES));
    assert_eq!(asked(&machine), 1, "an answer may be on its way");
    machine.now = machine.now.after_ns(2_000_000_000);
    machine.touch(BASE.plus(2 * EXTENT_BYTES));
    assert_eq!(asked(&machine), 2);
}

/// A record may say that pages are there that a forked child never had, or that the program dropped: whoever
/// leases them must find them, also where somebody was at work on them when it asked.
#[test]
fn a_lease_on_what_is_worked_on_is_looked_at_afterwards() {
    let mut machine = Machine::with_move();
    let op = machine.command(|command| matches!(command, Command::Move { .. })).unwrap();
    machine.orders.clear();
    let span = Span::new(BASE, 2 * PAGE);
    assert_eq!(machine.ask(2, Request::Pin { span }), None, "under a move");
    let outcome = CommandOutcome::Cancelled;
    machine.turn(Event::Commanded { op, bytes: 0, outcome });
    let position = |wanted: &dyn Fn(&Effect) -> bool| machine.orders.iter().position(wanted);
    let looked = position(&|order| matches!(*order, Effect::ReadMap { at, .. } if at == BASE));
    let zeroed = position(&|order| matches!(*order, Effect::Zero { to, .. } if to.contains(BASE)));
    let leased = position(&|order| matches!(*order, Effect::Reply { reply: Reply::Lease(_), .. }));
    assert!(looked.is_some() && looked < zeroed && zeroed < leased, "{:?}", machine.orders);
}

/// A lease moves whole extents, and promises what was asked for.
#[test]
fn a_page_beside_a_pin_may_be_mapped_no_longer() {
    for (first, is_lost) in [(0, false), (1, true), (4, false)] {
        let mut machine = with_parked();
        machine.turn(Event::Budget { bytes: 1 << 30 });
        let no_range = IoctlOutcome::NoRange;
        machine.copies = [Some((3 * PAGE, no_range)), Some((0, no_range))].into();
        let span = Span::new(BASE.plus(first * PAGE), 3 * PAGE);
        let answer = machine.ask(2, Request::Pin { span });
        if is_lost {
            assert_eq!(answer, Some(Reply::Refused(Refusal::Lost)));
        } else {
            assert!(matches!(answer, Some(Reply::Lease(_))), "{first}: {answer:?}");
            let page = span.end().0 - PAGE;
            assert!(machine.manager.state_of(PROC, Addr(page)).is_some_and(PageState::is_resident));
        }
    }
}

/// The kernel stops at what is not registered: a write behind it would fault for ever.
#[test]
fn a_write_behind_a_page_of_others_goes_on() {
    let mut machine = with_parked();
    machine.turn(Event::Budget { bytes: 1 << 30 });
    let fault = |page, write| Event::Faulted {
        proc: PROC,
        at: BASE.plus(page * PAGE),
        write,
        protected: write,
    };
    machine.turn(fault(12, false));
    machine.foreign_page = Some(BASE.plus(8 * PAGE));
    machine.orders.clear();
    machine.turn(fault(12, true));
    for page in (0..16).filter(|&page| page != 8) {
        let span = Span::new(BASE.plus(page * PAGE), PAGE);
        let clears = |order: &Effect| matches!(*order, Effect::Protect { span: of, on: false, .. } if of == span);
        assert!(machine.orders.iter().any(clears), "page {page}: {:?}", machine.orders);
    }
    assert_eq!(machine.manager.state_of(PROC, BASE.plus(12 * PAGE)), Some(PageState::Dirty));
}
