//! Lazily armed memory: native as long as there is room for all of it to be touched.
//!
//! The front part of a region may be unarmed; all of it counts as used, since the kernel serves its
//! first touches without a word. Under pressure it is armed, and the kernel's page table then tells
//! what was really touched. While the map is being read, faults in that part are forgotten and woken
//! at the end.

use super::op::{ArmThen, Kind, Op};
use super::refuse;
use super::reply;
use super::space::Arming;
use super::{Manager, Proof};
use crate::effect::{Effect, Refusal, Reply};
use crate::event::IoctlOutcome;
use crate::page::{PageEvent, PageMask, PageState};
use crate::record::Records;
use crate::units::{Addr, EXTENT_BYTES, OpId, ProcId, Span};

/// How long to wait where the kernel could not arm now: the first time, and how often that doubles.
const ARM_RETRY_NS: u64 = 1_000_000;
const ARM_BACKOFF_MAX: u8 = 7;
/// Times that arming a new region is tried: half a second.
const ARM_TRIES_MAX: u8 = 10;
/// Maps ordered at once.
const MAPS_IN_FLIGHT_MAX: u32 = 512;

impl<R: Records> Manager<R> {
    /// Arms the unarmed part of a region.
    pub(super) fn arm_region(
        &mut self,
        proc: ProcId,
        base: Addr,
        then: ArmThen,
        effects: &mut Vec<Effect>,
    ) {
        let Some(space) = self.spaces.get_mut(&proc) else {
            return;
        };
        if space.drained {
            // It is native for good.
            return;
        }
        let Some(region) = space.region_at_mut(base).filter(|region| !region.is_given_up()) else {
            return;
        };
        let span = Span::new(base, u64::from(region.record.unarmed_extents) * EXTENT_BYTES);
        region.arming = Some(Arming {
            registered: false,
            is_gone: false,
            next: 0,
            outstanding: 0,
            mapped: 0,
            proof: Proof::Needed,
        });
        let kind = Kind::Arm { span, on: true, then, tries: 0 };
        let id = self.shared.begin(space, Op { proc, at: base, kind });
        self.issue(id, effects);
    }

    pub(super) fn on_armed(&mut self, id: OpId, outcome: IoctlOutcome, effects: &mut Vec<Effect>) {
        let Some(Op { kind: Kind::Arm { then, tries, .. }, .. }) = self.shared.ops.get_mut(id)
        else {
            return;
        };
        if outcome == IoctlOutcome::NoMemory {
            *tries = tries.saturating_add(1);
        }
        // A program with as many mappings as it may have stays so: whoever asks for a region is told,
        // and goes on without it. What was promised already is tried for ever, more and more slowly.
        let hopeless = matches!(then, ArmThen::ReplyRegion(_)) && *tries >= ARM_TRIES_MAX;
        let delay_ns = ARM_RETRY_NS << ((*tries).clamp(1, ARM_BACKOFF_MAX + 1) - 1);
        if outcome == IoctlOutcome::EventsPending || outcome == IoctlOutcome::NoMemory && !hopeless
        {
            self.retry_later(id, delay_ns);
            return;
        }
        let Some(Op { proc, at, kind: Kind::Arm { span, then, .. } }) = self.end_plain_op(id)
        else {
            return;
        };
        let ok = outcome == IoctlOutcome::Done;
        let is_gone = outcome == IoctlOutcome::NoRange;
        match then {
            ArmThen::ReplyRegion(request) => {
                let region = self.spaces.get(&proc).and_then(|s| s.region_at(at));
                match region.map(|r| r.record.region) {
                    Some(_) if ok => {
                        if let Some(region) =
                            self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at))
                        {
                            region.armed_proof = Proof::Needed;
                            region.adding = Some(request);
                        }
                    }
                    Some(number) => {
                        self.close_region(proc, number, None);
                        let why = match outcome {
                            IoctlOutcome::NoMemory => Refusal::NoMappings,
                            _ => Refusal::NotManaged,
                        };
                        refuse(effects, request, why);
                    }
                    None => refuse(effects, request, Refusal::NotAttached),
                }
            }
            ArmThen::Map => {
                let region = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at));
                if let Some(arming) = region.and_then(|r| r.arming.as_mut()) {
                    arming.registered = true;
                    arming.is_gone = is_gone;
                }
            }
            ArmThen::Shield if is_gone => self.leave_to_child(proc, span),
            ArmThen::Shield => {
                if let Some(mut child) = self.spaces.remove(&proc) {
                    let region = child.region_at_mut(at);
                    let span = region.map(|region| {
                        region.armed_proof = Proof::Needed;
                        region.span()
                    });
                    if let Some(span) = span.filter(|_| ok) {
                        self.shield(&mut child, span, effects);
                    }
                    self.spaces.insert(proc, child);
                }
            }
            ArmThen::Rearmed => {}
            ArmThen::Ended | ArmThen::Drained => self.end_disarmed(proc, at),
        }
    }

    /// The region of that base is the kernel's from here on.
    fn end_disarmed(&mut self, proc: ProcId, base: Addr) {
        if let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(base)) {
            region.ending = super::space::Ending::Disarmed;
            region.proof = Proof::Needed;
            region.closing.get_or_insert(crate::units::RequestId(0));
        }
    }

    /// What its parent had not armed when it was forked cannot be armed in a child: nothing of it is mapped there,
    /// or something else is as well. The fork began before the parent had mapped it, and was told after, or the
    /// child was faster. What is present there is its own, and must never be moved.
    fn leave_to_child(&mut self, child: ProcId, span: Span) {
        let Some(space) = self.spaces.get_mut(&child) else { return };
        for unarmed in space.to_arm.iter_mut().filter(|unarmed| unarmed.start == span.start) {
            unarmed.len = 0;
        }
        let Some(region) = space.region_at(span.start) else { return };
        let is_here = |extent| !self.shared.record(region, extent).states.any(PageState::is_away);
        if region.span() == span && (0..region.record.extents).all(is_here) {
            self.end_disarmed(child, span.start);
        }
    }

    /// Asks whether forks are pending that may have copied memory before it was armed.
    fn advance_proofs(&mut self, effects: &mut Vec<Effect>) {
        let mut wanted = Vec::new();
        let settled = |s: &&super::space::Space| !s.unborn && s.recovering.is_none();
        for space in self.spaces.values().filter(settled) {
            for region in &space.regions {
                let arming = region.arming.filter(|a| a.registered).map(|a| a.proof);
                let asks = [Some(region.armed_proof), arming];
                if asks.iter().flatten().any(|&proof| proof != Proof::Given) {
                    wanted.push((space.id, region.record.base, region.armed_proof, arming));
                }
            }
        }
        for (proc, base, armed, arming) in wanted {
            let armed = self.prove(proc, armed, effects);
            let arming = arming.map(|proof| self.prove(proc, proof, effects));
            let region = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(base));
            let Some(region) = region else {
                continue;
            };
            region.armed_proof = armed;
            if let (Some(entry), Some(proof)) = (&mut region.arming, arming) {
                entry.proof = proof;
            }
            if armed == Proof::Given
                && let Some(request) = region.adding.take()
            {
                reply(effects, request, Reply::Region(region.record.region));
            }
        }
    }

    /// Orders maps of regions that have just been armed, and ends their arming.
    pub(super) fn advance_arming(&mut self, effects: &mut Vec<Effect>) {
        self.advance_proofs(effects);
        let shared = &mut self.shared;
        for space in self.spaces.values_mut() {
            let proc = space.id;
            for index in 0..space.regions.len() {
                let region = &mut space.regions[index];
                let total = region.record.unarmed_extents;
                let Some(mut arming) = region.arming.filter(|a| a.registered) else {
                    continue;
                };
                while arming.next < total && arming.outstanding < MAPS_IN_FLIGHT_MAX {
                    let at = space.regions[index].extent_addr(arming.next);
                    let id = shared.begin(space, Op { proc, at, kind: Kind::MapArmed });
                    effects.push(Effect::ReadMap { op: id, proc, at });
                    arming.next += 1;
                    arming.outstanding += 1;
                }
                let region = &mut space.regions[index];
                region.arming = Some(arming);
                if arming.next >= total && arming.outstanding == 0 && arming.proof == Proof::Given {
                    region.arming = None;
                    region.record.unarmed_extents = 0;
                    shared.records.put_region(region.record);
                    let span = Span::new(region.record.base, u64::from(total) * EXTENT_BYTES);
                    effects.push(Effect::Wake { proc, span });
                }
            }
        }
    }

    pub(super) fn on_mapped(
        &mut self,
        id: OpId,
        present: PageMask,
        known: bool,
        effects: &mut Vec<Effect>,
    ) {
        match self.shared.ops.get(id).map(|op| &op.kind) {
            // What cannot be looked up counts as there.
            Some(Kind::MapArmed) => {
                self.on_armed_map(id, if known { present } else { PageMask::MAX });
            }
            Some(Kind::Look { .. }) => self.on_looked(id, present, known, effects),
            Some(Kind::Prepare(_)) => self.on_prepare_looked(id, present, effects),
            Some(Kind::StaleLook { .. }) => self.on_stale_looked(id, present, known),
            Some(Kind::Fill(_)) => {
                self.on_loss_looked(id, if known { present } else { 0 }, effects)
            }
            Some(Kind::KeptLook) => self.on_kept_looked(id, if known { present } else { 0 }),
            Some(Kind::MoveCheck { .. }) => self.on_move_checked(id, present, known, effects),
            Some(Kind::Rescue(_)) => self.on_rescue_checked(id, present, known, effects),
            Some(Kind::Write(_)) => self.on_write_checked(id, present, known, effects),
            _ => {}
        }
    }

    fn on_armed_map(&mut self, id: OpId, present: PageMask) {
        let Some(Op { proc, at, .. }) = self.end_plain_op(id) else {
            return;
        };
        let shared = &mut self.shared;
        let pages = u64::from(shared.extent_pages());
        let Some(region) = self.spaces.get_mut(&proc).and_then(|s| s.region_at_mut(at)) else {
            return;
        };
        let Some(arming) = &mut region.arming else {
            return;
        };
        arming.outstanding -= 1;
        arming.mapped += 1;
        let ours = if arming.is_gone { 0 } else { present };
        shared.gauges.credit_pages -= pages;
        let extent = region.extent_of(at);
        let record = shared.record(region, extent);
        let present = ours & super::space::page_mask(0, shared.extent_pages());
        if let Some(states) = record.states.after(present, PageEvent::FoundPresent)
            && present != 0
        {
            shared.update(proc, region, extent, states, record.slot, None);
            if states.any(PageState::is_resident) {
                shared.became_resident(proc, region, extent);
            }
        }
    }
}
