//! The address space of one process, as the manager sees it: regions, chunks, extents, limbo.

use super::rest::Rest;
use crate::page::PageMask;
use crate::ranges::Ranges;
use crate::record::RegionRecord;
use crate::stream::Streams;
use crate::units::{
    Addr, CHUNK_BYTES, CHUNK_EXTENTS, EXTENT_BYTES, LimboBlock, OpId, ProcId, RecordIndex,
    RequestId, Span, Tick, low_u32,
};
use std::collections::VecDeque;

/// Rest of a store that failed to write, and of blocks that could not be read.
pub(crate) const WRITE_REST_NS: u64 = 100_000_000;
/// A fork does without a store that has failed to write for this long.
const FORK_PATIENCE_NS: u64 = 2_000_000_000;

/// What is known of an extent beside its record, and forgotten at a restart.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExtentNote {
    /// The operation that owns the extent; none where it is 0.
    pub busy: OpId,
    /// When it last became resident, in fills of the family.
    pub stamp: u32,
    /// Leases on it.
    pub pins: u16,
    /// A fault was forgotten while it was busy: wake it when the operation ends.
    pub wake: bool,
    /// Its frames are shared with this process, and counted there.
    pub lender: Option<ProcId>,
    /// A fork left its frames shared and write-protected: the first write makes a copy.
    pub cow: bool,
    /// Moves refused in a row: the policy comes back to it later and later.
    pub refusals: u8,
    /// Not to be moved before it ends.
    pub rest: Rest,
    /// Pages of it that turned out to be mapped no longer.
    pub holes: PageMask,
    /// Parked without a move: its pages are still in their place and about to be dropped.
    pub leaving: bool,
    /// A lease on it was asked for while an operation had it: whether its pages are there has yet to be
    /// looked at.
    pub unseen: bool,
}

impl ExtentNote {
    pub(crate) const fn is_busy(&self) -> bool {
        self.busy.0 != 0 || self.leaving
    }
}

/// Notes on the extents of a chunk. Made at the chunk's first fault.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chunk {
    pub extents: [ExtentNote; CHUNK_EXTENTS as usize],
    /// It stands in the policy's queue.
    pub queued: bool,
}

/// How far a closing region has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// A fork that began before the request may not have been read yet.
    Proving,
    /// None is pending.
    Proven,
    /// The disarming has been ordered.
    Disarming,
    /// Disarmed: nothing can fault there any more.
    Disarmed,
}

/// A managed region.
#[derive(Debug)]
pub(crate) struct Region {
    pub record: RegionRecord,
    pub chunks: Vec<Option<Box<Chunk>>>,
    /// Operations in flight on it.
    pub ops: u32,
    /// Answer this when it is gone; nothing new begins.
    pub closing: Option<RequestId>,
    pub ending: Ending,
    pub proof: super::Proof,
    /// How far the arming of the unarmed part has come, in extents, while it is under way.
    pub arming: Option<Arming>,
    /// That no fork was pending once the region was armed. Until then a child may have a copy of it
    /// that is not.
    pub armed_proof: super::Proof,
    /// Answer this once the proof is given.
    pub adding: Option<RequestId>,
    /// Extents that are touched in no order.
    pub random: Ranges,
}

/// The unarmed part of a region on its way to being armed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arming {
    /// The ioctl has ended.
    pub registered: bool,
    /// It found nothing of ours: what is present there is somebody else's.
    pub is_gone: bool,
    /// Next extent whose map is to be read.
    pub next: u32,
    /// Maps ordered and not answered.
    pub outstanding: u32,
    /// Maps answered: these extents no longer count as credit.
    pub mapped: u32,
    /// That no fork was pending once it was armed.
    pub proof: super::Proof,
}

impl Region {
    pub(crate) fn new(record: RegionRecord) -> Self {
        let chunks = record.extents / CHUNK_EXTENTS;
        Self {
            record,
            chunks: (0..chunks).map(|_| None).collect(),
            ops: 0,
            closing: None,
            ending: Ending::Proving,
            proof: super::Proof::Needed,
            arming: None,
            armed_proof: super::Proof::Given,
            adding: None,
            random: Ranges::default(),
        }
    }

    /// It is the kernel's from here on: armed again it would stay so, and a touch there sleep for ever.
    pub(crate) const fn is_given_up(&self) -> bool {
        matches!(self.ending, Ending::Disarming | Ending::Disarmed)
    }

    pub(crate) const fn span(&self) -> Span {
        Span::new(self.record.base, self.record.extents as u64 * EXTENT_BYTES)
    }

    pub(crate) fn extent_of(&self, at: Addr) -> u32 {
        low_u32((at.0 - self.record.base.0) / EXTENT_BYTES)
    }

    pub(crate) const fn extent_addr(&self, extent: u32) -> Addr {
        self.record.base.plus(extent as u64 * EXTENT_BYTES)
    }

    pub(crate) const fn record_index(&self, extent: u32) -> RecordIndex {
        RecordIndex(self.record.first.0 + extent)
    }

    pub(crate) const fn is_unarmed(&self, extent: u32) -> bool {
        extent < self.record.unarmed_extents
    }

    pub(crate) fn note(&self, extent: u32) -> ExtentNote {
        self.chunks[(extent / CHUNK_EXTENTS) as usize]
            .as_ref()
            .map_or_else(ExtentNote::default, |c| c.extents[(extent % CHUNK_EXTENTS) as usize])
    }

    pub(crate) fn note_mut(&mut self, extent: u32) -> &mut ExtentNote {
        let chunk = self.chunk_mut(extent / CHUNK_EXTENTS);
        &mut chunk.extents[(extent % CHUNK_EXTENTS) as usize]
    }

    pub(crate) fn chunk_mut(&mut self, chunk: u32) -> &mut Chunk {
        self.chunks[chunk as usize].get_or_insert_default()
    }
}

/// What a chunk of limbo is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Free,
    /// Moves are under way.
    Moving,
    /// Pages rest: a touch brings them back.
    Resting,
    /// The bytes are on their way to the store. A touch still brings pages back.
    Writing,
    /// Nothing of it is needed any more.
    Dropping,
}

/// One chunk of limbo: it holds extents of one chunk of memory, each at its own position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub stage: Stage,
    /// The chunk it holds extents of.
    pub home: Addr,
    /// Extents with pages in limbo.
    pub mask: u32,
    /// Extents whose pages here are stale and wait to be dropped.
    pub stale: u32,
    /// Of the stale ones, those of which nobody knows how much is there.
    pub uncounted: u32,
    /// Pages of each extent that take room here although no record counts them.
    pub stale_pages: [u8; CHUNK_EXTENTS as usize],
    /// Of the stale ones, those whose drop has been ordered.
    pub dropping: u32,
    /// Commands and reads of it in flight, other than rescues.
    pub ops: u32,
    /// Extents that are being rescued. What else is here does not wait for that: in a full memory cgroup a
    /// rescue ends when something has left.
    pub rescued: u32,
    /// In this stage since.
    pub since: Tick,
}

impl Block {
    pub(crate) const FREE: Self = Self {
        stage: Stage::Free,
        home: Addr(0),
        mask: 0,
        stale: 0,
        uncounted: 0,
        stale_pages: [0; CHUNK_EXTENTS as usize],
        dropping: 0,
        ops: 0,
        rescued: 0,
        since: Tick(0),
    };

    /// Pages of all extents that take room here although no record counts them.
    pub(crate) fn all_stale_pages(&self) -> u64 {
        self.stale_pages.iter().map(|&pages| u64::from(pages)).sum()
    }
}

/// A lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub span: Span,
    /// Answer this once everything is there.
    pub pending: Option<RequestId>,
}

/// One process.
#[derive(Debug)]
pub(crate) struct Space {
    pub id: ProcId,
    /// Regions in ascending order of address.
    pub regions: Vec<Region>,
    pub limbo: Span,
    /// The kernel cannot move pages: they rest, write-protected, where they are.
    pub in_place: bool,
    pub blocks: Vec<Block>,
    /// Resting blocks, oldest first.
    pub resting: VecDeque<LimboBlock>,
    /// No write of its blocks has ended well since, while a fork waited.
    failing_since: Option<Tick>,
    /// That has lasted: what is in limbo can be written to no slot, as far as anybody can tell, and
    /// no child is to wait for that.
    pub keeps_limbo: bool,
    /// No write of its blocks begins before.
    pub writes_rest_until: Tick,
    pub streams: Streams,
    /// Spans to read ahead, in order: first address, extents.
    pub ahead: VecDeque<(Addr, u32)>,
    pub leases: std::collections::BTreeMap<u64, Lease>,
    /// Operations in flight.
    pub ops: u32,
    /// Children whose FORK has been read and whose tables are not made yet.
    pub forks: VecDeque<ProcId>,
    /// A child whose table is not made yet.
    pub unborn: bool,
    /// Its table was copied in this turn, from it or to it. A restart before the next turn copies it
    /// again, so nothing of it may change until then.
    pub copied: bool,
    /// Ranges that were zapped, or moved to limbo, since no fork was known to be pending, each with the
    /// first operation that can prove it: a child may have been forked while they were still there.
    pub zapped: Vec<(OpId, Span)>,
    /// Extents of which the helper has made copies since, in the same way: a child may have been forked
    /// before, and have other frames than its parent.
    pub parted: Vec<(OpId, Addr)>,
    /// What its parent recorded as given up and may have left to it.
    pub to_look: Vec<Span>,
    /// Of a child without a table: extents of which the parent's helper was making copies when it was
    /// forked. Nobody knows of them which frames both have.
    pub apart: Vec<Addr>,
    /// Of a child without a table: by extent, which pages are in their place of those that its parent has
    /// on their way to limbo, in no slot. Nothing where nobody has looked yet.
    pub kept: Option<std::collections::BTreeMap<Addr, PageMask>>,
    /// It was there before a restart, and its records are being compared with the kernel.
    pub recovering: Option<super::recover::Recovery>,
    /// The host has made it known.
    pub ready: bool,
    /// Memory that was not armed when it was forked off.
    pub to_arm: Vec<Span>,
    /// The process it was forked from.
    pub parent: Option<ProcId>,
    /// It has exited or replaced its image.
    pub gone: bool,
    /// Its helper answers.
    pub has_helper: bool,
    /// Answer this once everything is back and disarmed.
    pub draining: Vec<RequestId>,
    /// The disarming of a drain has been ordered.
    pub drained: bool,
}

impl Space {
    pub(crate) fn new(id: ProcId) -> Self {
        Self {
            id,
            regions: Vec::new(),
            limbo: Span::default(),
            in_place: false,
            blocks: Vec::new(),
            resting: VecDeque::new(),
            failing_since: None,
            keeps_limbo: false,
            writes_rest_until: Tick(0),
            streams: Streams::default(),
            ahead: VecDeque::new(),
            leases: std::collections::BTreeMap::new(),
            ops: 0,
            forks: VecDeque::new(),
            unborn: false,
            copied: false,
            zapped: Vec::new(),
            parted: Vec::new(),
            to_look: Vec::new(),
            apart: Vec::new(),
            kept: None,
            recovering: None,
            ready: false,
            to_arm: Vec::new(),
            parent: None,
            gone: false,
            has_helper: false,
            draining: Vec::new(),
            drained: false,
        }
    }

    /// Whether a rescue from `block` leaves another one that nothing is rescued from, where there are several: short
    /// of memory, rescues end when something has left, and what leaves goes through a block.
    pub(crate) fn spares(&self, block: LimboBlock) -> bool {
        let is_other = |index| index != usize::from(block.0);
        let mut others = self.blocks.iter().enumerate().filter(|&(index, _)| is_other(index));
        self.blocks.len() < 2 || others.any(|(_, other)| other.rescued == 0)
    }

    /// Nothing new may begin: a fork is being followed, or the process is ending.
    pub(crate) fn is_held(&self) -> bool {
        self.unborn
            || self.copied
            || self.gone
            || self.recovering.is_some()
            || !self.forks.is_empty()
    }

    /// A write of one of its blocks has failed, or a read of it.
    pub(crate) fn note_failed_write(&mut self, now: Tick) {
        if !self.forks.is_empty() {
            let since = *self.failing_since.get_or_insert(now);
            self.keeps_limbo |= since.after_ns(FORK_PATIENCE_NS) <= now;
        }
        self.writes_rest_until = now.after_ns(WRITE_REST_NS);
    }

    /// A write of one of its blocks has ended well.
    pub(crate) fn note_written(&mut self) {
        self.failing_since = None;
        self.keeps_limbo = false;
    }

    /// Another child waits for its table.
    pub(crate) fn note_fork(&mut self, child: ProcId) {
        // A store that the last one did without may have got well since: one more try, for which
        // nobody else is made to wait.
        if self.forks.is_empty() && !std::mem::take(&mut self.keeps_limbo) {
            self.failing_since = None;
        }
        self.forks.push_back(child);
    }

    /// That region was not armed when it was forked off, all of it.
    pub(crate) fn note_to_arm(&mut self, span: Span) {
        self.to_arm.retain(|unarmed| unarmed.start != span.start);
        self.to_arm.push(span);
    }

    /// No write of its blocks begins: a child that is to go on without would wait for its end.
    pub(crate) fn writes_no_more(&self) -> bool {
        self.keeps_limbo && !self.forks.is_empty()
    }

    pub(crate) fn region_index(&self, at: Addr) -> Option<usize> {
        let after = self.regions.partition_point(|r| r.record.base <= at);
        let index = after.checked_sub(1)?;
        self.regions[index].span().contains(at).then_some(index)
    }

    pub(crate) fn region_at(&self, at: Addr) -> Option<&Region> {
        self.region_index(at).map(|index| &self.regions[index])
    }

    pub(crate) fn region_at_mut(&mut self, at: Addr) -> Option<&mut Region> {
        self.region_index(at).map(|index| &mut self.regions[index])
    }

    /// Where the bytes of `at` lie while their extent is in `block`: in limbo, or where they always
    /// were on a kernel that cannot move them.
    pub(crate) fn limbo_addr(&self, block: LimboBlock, at: Addr) -> Addr {
        if self.in_place {
            return at;
        }
        self.limbo.start.plus(u64::from(block.0) * CHUNK_BYTES + at.0 % CHUNK_BYTES)
    }

    pub(crate) fn block(&mut self, block: LimboBlock) -> &mut Block {
        &mut self.blocks[block.0 as usize]
    }

    pub(crate) fn free_block(&self) -> Option<LimboBlock> {
        let index = self.blocks.iter().position(|b| b.stage == Stage::Free)?;
        u16::try_from(index).ok().map(LimboBlock)
    }
}

/// Position of an extent in its chunk.
pub(crate) fn position(at: Addr) -> u32 {
    low_u32(at.0 % CHUNK_BYTES / EXTENT_BYTES)
}

/// Contiguous runs of set bits: `(first, count)`, ascending.
pub(crate) fn runs(mask: u32) -> impl Iterator<Item = (u32, u32)> {
    let mut rest = mask;
    let mut base = 0;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let skip = rest.trailing_zeros();
        rest >>= skip;
        base += skip;
        let count = rest.trailing_ones();
        let run = (base, count);
        base += count;
        rest = rest.checked_shr(count).unwrap_or(0);
        Some(run)
    })
}

/// The first contiguous run of pages in `mask`: `(first, count)`.
pub(crate) fn first_run(mask: PageMask) -> Option<(u32, u32)> {
    runs(u32::from(mask)).next()
}

/// The pages `first..first + count` as a mask.
pub(crate) fn page_mask(first: u32, count: u32) -> PageMask {
    let ones = if count >= 16 { PageMask::MAX } else { (1 << count) - 1 };
    ones << first
}

/// The extents `first..first + count` of a chunk as a mask.
pub(crate) fn extent_mask(first: u32, count: u32) -> u32 {
    let ones = if count >= 32 { u32::MAX } else { (1 << count) - 1 };
    ones << first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_in_order() {
        assert_eq!(runs(0b1101_1000).collect::<Vec<_>>(), [(3, 2), (6, 2)]);
        assert_eq!(runs(u32::MAX).collect::<Vec<_>>(), [(0, 32)]);
        assert_eq!(runs(1 << 31).collect::<Vec<_>>(), [(31, 1)]);
        assert_eq!(runs(0).count(), 0);
    }

    #[test]
    fn masks_reach_the_last_bit() {
        assert_eq!(page_mask(0, 16), u16::MAX);
        assert_eq!(page_mask(15, 1), 1 << 15);
        assert_eq!(extent_mask(0, 32), u32::MAX);
        assert_eq!(extent_mask(31, 1), 1 << 31);
    }
}
