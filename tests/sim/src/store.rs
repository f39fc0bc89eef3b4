//! The store device and the staging memory: what was written, what is on its way, who uses which
//! buffer.

use crate::rng::Rng;
use std::collections::{BTreeMap, BTreeSet};
use tiermgr_core::effect::{BufRange, Buffer};
use tiermgr_core::event::Event;
use tiermgr_core::limits::{DEMAND_BUFFERS, STREAM_BUFFERS};
use tiermgr_core::slots::SEGMENT_SLOTS;
use tiermgr_core::units::{CHUNK_BYTES, EXTENT_BYTES, OpId, SlotId};

/// What a page holds that nobody was meant to see: a torn write, an unverified read, an old buffer.
pub const GARBAGE: u64 = u64::MAX;

/// A request to the device that has not ended.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// Answered with this.
    pub op: OpId,
    /// A write.
    pub write: bool,
    /// First slot.
    pub slot: SlotId,
    /// Slots.
    pub count: u32,
    /// Staged here.
    pub buf: BufRange,
    /// A read that a fault waits for.
    pub demand: bool,
}

impl Io {
    fn overlaps_slots(&self, other: &Self) -> bool {
        self.slot.0 < other.slot.0 + other.count && other.slot.0 < self.slot.0 + self.count
    }
}

fn overlaps(a: BufRange, b: BufRange) -> bool {
    a.buf == b.buf && a.offset < b.offset + b.len && b.offset < a.offset + a.len
}

/// The device and the buffers.
#[derive(Debug)]
pub struct Store {
    page_bytes: u64,
    stream: Vec<Vec<u64>>,
    /// Which of them the daemon has, and how many it may have.
    lent: BTreeSet<u16>,
    streams: u16,
    demand: Vec<Vec<u64>>,
    slots: BTreeMap<u32, Vec<u64>>,
    /// Pages of slots whose bytes went bad for good.
    bad: BTreeSet<(u32, usize)>,
    /// How often in a row reads of a slot failed, so that chance alone never loses data.
    failed_reads: BTreeMap<u32, u32>,
    /// Segments that were granted: first slot and count.
    granted: BTreeMap<u32, u32>,
    /// Segments left to grant.
    segments_left: u32,
    next_segment: u32,
    free_segments: Vec<u32>,
    /// Requests that have not ended.
    pub pending: Vec<Io>,
}

/// How the device is to treat a request. Drawn by the fault plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// As it should.
    Well,
    /// It reports an error. A write may have reached some pages.
    Fails,
    /// A read that reports wrong checksums for some extents, this time.
    Damages,
}

impl Store {
    /// An empty device with room for `segments`. At most so many `streams` are lent at once.
    #[must_use]
    pub fn new(page_bytes: u64, segments: u32, streams: u16) -> Self {
        let chunk = crate::ix(CHUNK_BYTES / page_bytes);
        let extent = crate::ix(EXTENT_BYTES / page_bytes);
        Self {
            page_bytes,
            stream: vec![vec![GARBAGE; chunk]; usize::from(STREAM_BUFFERS)],
            lent: BTreeSet::new(),
            streams,
            demand: vec![vec![GARBAGE; extent]; usize::from(DEMAND_BUFFERS)],
            slots: BTreeMap::new(),
            bad: BTreeSet::new(),
            failed_reads: BTreeMap::new(),
            granted: BTreeMap::new(),
            segments_left: segments,
            next_segment: 1,
            free_segments: Vec::new(),
            pending: Vec::new(),
        }
    }

    fn buffer(&mut self, buf: Buffer) -> Option<&mut Vec<u64>> {
        match buf {
            Buffer::Stream(index) if !self.lent.contains(&index) => None,
            Buffer::Stream(index) => self.stream.get_mut(usize::from(index)),
            Buffer::Demand(index) => self.demand.get_mut(usize::from(index)),
        }
    }

    /// The generations staged in `range`, to read or to write. An error where the range is not one.
    ///
    /// # Errors
    ///
    /// The range does not lie in one of the daemon's buffers, on page boundaries.
    pub fn staged(&mut self, range: BufRange) -> Result<&mut [u64], String> {
        let page = self.page_bytes;
        let (offset, len) = (u64::from(range.offset), u64::from(range.len));
        if len == 0 || !offset.is_multiple_of(page) || !len.is_multiple_of(page) {
            return Err(format!("{range:?} is empty or not on page boundaries"));
        }
        let (first, end) = (crate::ix(offset / page), crate::ix((offset + len) / page));
        self.buffer(range.buf)
            .and_then(|buffer| buffer.get_mut(first..end))
            .ok_or_else(|| format!("{range:?} is not inside a staging buffer that the daemon has"))
    }

    /// Lends a large buffer, if one is left. Others have had it meanwhile.
    pub fn lend_stream(&mut self) -> Option<Event> {
        if self.lent.len() >= usize::from(self.streams) {
            return None;
        }
        let stream = (0..STREAM_BUFFERS).find(|n| !self.lent.contains(n))?;
        self.lent.insert(stream);
        self.buffer(Buffer::Stream(stream))?.fill(GARBAGE);
        Some(Event::StreamLent { stream })
    }

    /// Takes a large buffer back.
    ///
    /// # Errors
    ///
    /// It was not lent, or the device works on it.
    pub fn return_stream(&mut self, stream: u16) -> Result<(), String> {
        let whole =
            BufRange { buf: Buffer::Stream(stream), offset: 0, len: crate::low32(CHUNK_BYTES) };
        if let Some(conflict) = self.conflict(whole, true) {
            return Err(conflict);
        }
        if self.lent.remove(&stream) {
            Ok(())
        } else {
            Err(format!("stream {stream} was not lent"))
        }
    }

    /// Why the daemon's CPU may not touch `range` now: the device does. `filling` is true where the
    /// CPU would change the bytes.
    #[must_use]
    pub fn conflict(&self, range: BufRange, filling: bool) -> Option<String> {
        self.pending
            .iter()
            .find(|io| overlaps(io.buf, range) && (filling || !io.write))
            .map(|io| format!("{range:?} is used while {io:?} is under way"))
    }

    /// Starts a request.
    ///
    /// # Errors
    ///
    /// What is wrong with it: not whole extents, slots that were never granted, a slot or a buffer
    /// that another request is still working on.
    pub fn start(&mut self, io: Io) -> Result<(), String> {
        if u64::from(io.buf.len) != u64::from(io.count) * EXTENT_BYTES || io.count == 0 {
            return Err(format!("{io:?} is not a number of whole extents"));
        }
        self.staged(io.buf)?;
        if let Some(conflict) = self.conflict(io.buf, !io.write) {
            return Err(conflict);
        }
        for slot in io.slot.0..io.slot.0 + io.count {
            let granted =
                self.granted.range(..=slot).next_back().is_some_and(|(&f, &n)| slot < f + n);
            if !granted {
                return Err(format!("slot {slot} of {io:?} was never granted, or was returned"));
            }
        }
        if let Some(other) =
            self.pending.iter().find(|other| other.overlaps_slots(&io) && (io.write || other.write))
        {
            return Err(format!("{io:?} begins while {other:?} is under way on the same slot"));
        }
        self.pending.push(io);
        Ok(())
    }

    /// Ends request `index` of [`Self::pending`]. `reads_may_fail` bounds how many reads of one slot
    /// fail in a row.
    pub fn finish(&mut self, index: usize, wish: Fate, rng: &mut Rng) -> Event {
        let io = self.pending.swap_remove(index);
        if io.write { self.finish_write(io, wish, rng) } else { self.finish_read(io, wish, rng) }
    }

    fn extent_pages(&self) -> usize {
        crate::ix(EXTENT_BYTES / self.page_bytes)
    }

    fn finish_write(&mut self, io: Io, fate: Fate, rng: &mut Rng) -> Event {
        let pages = self.extent_pages();
        let staged = self.staged(io.buf).map(|staged| staged.to_vec()).unwrap_or_default();
        let ok = fate == Fate::Well;
        for (slot, bytes) in (io.slot.0..).zip(staged.chunks(pages)) {
            let kept = self.slots.entry(slot).or_insert_with(|| vec![GARBAGE; pages]);
            for (page, (kept, &new)) in kept.iter_mut().zip(bytes).enumerate() {
                if ok {
                    *kept = new;
                    self.bad.remove(&(slot, page));
                } else if rng.chance(500) {
                    *kept = if rng.chance(500) { new } else { GARBAGE };
                }
            }
            self.failed_reads.remove(&slot);
        }
        Event::Written { op: io.op, ok }
    }

    /// How many reads of one slot may fail in a row by chance. The engine tries more often.
    const FAILED_READS_MAX: u32 = 1;

    fn finish_read(&mut self, io: Io, wish: Fate, rng: &mut Rng) -> Event {
        let pages = self.extent_pages();
        let slots = io.slot.0..io.slot.0 + io.count;
        let tired = slots.clone().any(|slot| {
            self.failed_reads.get(&slot).is_some_and(|&count| count >= Self::FAILED_READS_MAX)
        });
        let fate = if tired { Fate::Well } else { wish };
        let mut damaged = 0;
        let mut bytes = Vec::with_capacity(pages * crate::ix(u64::from(io.count)));
        for slot in slots.clone() {
            let is_damaged = fate == Fate::Damages && rng.chance(500);
            if fate == Fate::Well {
                self.failed_reads.remove(&slot);
            } else {
                *self.failed_reads.entry(slot).or_default() += 1;
            }
            let kept = self.slots.get(&slot);
            for page in 0..pages {
                let bad = self.bad.contains(&(slot, page));
                // The first page of a damaged extent is always hit, the others by chance.
                let hit = bad || (is_damaged && (page == 0 || rng.chance(300)));
                if hit {
                    damaged |= 1 << page;
                }
                let good = kept.and_then(|kept| kept.get(page)).copied().unwrap_or(GARBAGE);
                bytes.push(if hit || fate == Fate::Fails { GARBAGE } else { good });
            }
        }
        if let Ok(staged) = self.staged(io.buf) {
            staged.copy_from_slice(&bytes);
        }
        let ok = fate != Fate::Fails;
        Event::SlotsRead { op: io.op, ok, damaged: if ok { damaged } else { 0 } }
    }

    /// What a page of a slot holds.
    #[must_use]
    pub fn slot_page(&self, slot: SlotId, page: usize) -> Option<u64> {
        if self.bad.contains(&(slot.0, page)) {
            return None;
        }
        self.slots.get(&slot.0).and_then(|pages| pages.get(page)).copied()
    }

    /// Ruins one page of one slot for good and tells what it held. Pages of zeros are let alone: their
    /// generation does not tell whose they are.
    pub fn ruin(&mut self, rng: &mut Rng) -> Option<u64> {
        if self.slots.is_empty() {
            return None;
        }
        let nth = rng.index(self.slots.len());
        let (&slot, pages) = self.slots.iter().nth(nth)?;
        let page = rng.index(pages.len());
        let held = pages[page];
        if held == 0 || held == GARBAGE {
            return None;
        }
        self.bad.insert((slot, page));
        Some(held)
    }

    /// Grants a segment, if one is left.
    pub fn grant(&mut self) -> Option<Event> {
        if self.segments_left == 0 {
            return None;
        }
        self.segments_left -= 1;
        let first = self.free_segments.pop().unwrap_or_else(|| {
            let first = self.next_segment;
            self.next_segment += SEGMENT_SLOTS;
            first
        });
        self.granted.insert(first, SEGMENT_SLOTS);
        Some(Event::SlotsGranted { first: SlotId(first), count: SEGMENT_SLOTS })
    }

    /// Takes a segment back.
    ///
    /// # Errors
    ///
    /// It was never granted, or something still works on it.
    pub fn take_back(&mut self, first: SlotId) -> Result<(), String> {
        let Some(count) = self.granted.remove(&first.0) else {
            return Err(format!("segment {} was returned and is not granted", first.0));
        };
        if let Some(io) = self
            .pending
            .iter()
            .find(|io| io.slot.0 < first.0 + count && first.0 < io.slot.0 + io.count)
        {
            return Err(format!("segment {} was returned while {io:?} is under way", first.0));
        }
        for slot in first.0..first.0 + count {
            // The next owner must not read it.
            self.slots.remove(&slot);
            self.failed_reads.remove(&slot);
            for page in 0..self.extent_pages() {
                self.bad.remove(&(slot, page));
            }
        }
        self.free_segments.push(first.0);
        self.segments_left += 1;
        Ok(())
    }

    /// The daemon has died: what it read goes nowhere, and what it was writing lands, or not. Gives the
    /// segments that were granted to it.
    pub fn daemon_died(&mut self, rng: &mut Rng) -> Vec<SlotId> {
        while let Some(io) = self.pending.pop() {
            if io.write {
                let fate = if rng.chance(500) { Fate::Well } else { Fate::Fails };
                self.finish_write(io, fate, rng);
            }
        }
        self.lent.clear();
        self.stream.iter_mut().chain(&mut self.demand).for_each(|buffer| buffer.fill(GARBAGE));
        self.granted.keys().copied().map(SlotId).collect()
    }

    /// From now on there is always another segment.
    pub fn make_plentiful(&mut self) {
        self.segments_left = u32::MAX / 2;
    }

    /// Slots granted and not returned.
    #[must_use]
    pub fn slots_granted(&self) -> u32 {
        self.granted.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn io(op: u64, write: bool, slot: u32, buf: Buffer) -> Io {
        Io {
            op: OpId(op),
            write,
            slot: SlotId(slot),
            count: 1,
            buf: BufRange { buf, offset: 0, len: 65536 },
            demand: false,
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let mut store = Store::new(4096, 1, 1);
        let mut rng = Rng::new(1);
        assert!(store.grant().is_some());
        assert!(store.grant().is_none(), "one segment was all");
        let write = io(1, true, 1, Buffer::Demand(0));
        store.staged(write.buf).unwrap().fill(7);
        store.start(write).unwrap();
        assert_eq!(store.finish(0, Fate::Well, &mut rng), Event::Written { op: OpId(1), ok: true });
        let read = io(2, false, 1, Buffer::Demand(1));
        store.start(read).unwrap();
        store.finish(0, Fate::Well, &mut rng);
        assert!(store.staged(read.buf).unwrap().iter().all(|&generation| generation == 7));
    }

    #[test]
    fn a_slot_is_not_written_while_it_is_read_and_a_buffer_has_one_user() {
        let mut store = Store::new(4096, 1, 1);
        store.grant();
        store.start(io(1, false, 1, Buffer::Demand(0))).unwrap();
        assert!(store.start(io(2, true, 1, Buffer::Demand(1))).is_err());
        assert!(store.start(io(3, false, 2, Buffer::Demand(0))).is_err());
        assert!(store.start(io(4, false, 140, Buffer::Demand(2))).is_err(), "never granted");
        assert!(store.take_back(SlotId(1)).is_err(), "still being read");
    }

    #[test]
    fn chance_alone_fails_a_slot_only_so_often() {
        let mut store = Store::new(4096, 1, 1);
        let mut rng = Rng::new(1);
        store.grant();
        let mut outcomes = Vec::new();
        for op in 0..4 {
            store.start(io(op, false, 1, Buffer::Demand(0))).unwrap();
            let Event::SlotsRead { ok, .. } = store.finish(0, Fate::Fails, &mut rng) else {
                panic!("a read ends as a read")
            };
            outcomes.push(ok);
        }
        assert_eq!(outcomes, [false, true, false, true]);
    }
}
