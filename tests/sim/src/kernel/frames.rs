//! Physical memory: frames, who maps them, and which devices hold them.

/// A frame. Frame 0 is the kernel's page of zeros, which is never written and costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrameId(pub u32);

impl FrameId {
    /// The page of zeros.
    pub const ZERO: Self = Self(0);
}

#[derive(Clone, Copy, Debug, Default)]
struct Frame {
    generation: u64,
    maps: u32,
    pins: u32,
}

/// All frames.
#[derive(Debug)]
pub struct Frames {
    all: Vec<Frame>,
    free: Vec<FrameId>,
}

impl Default for Frames {
    fn default() -> Self {
        Self { all: vec![Frame::default()], free: Vec::new() }
    }
}

impl Frames {
    fn at(&self, frame: FrameId) -> &Frame {
        &self.all[crate::ix(u64::from(frame.0))]
    }

    fn at_mut(&mut self, frame: FrameId) -> &mut Frame {
        &mut self.all[crate::ix(u64::from(frame.0))]
    }

    /// A new frame, mapped once.
    pub fn alloc(&mut self, generation: u64) -> FrameId {
        let fresh = Frame { generation, maps: 1, pins: 0 };
        if let Some(frame) = self.free.pop() {
            *self.at_mut(frame) = fresh;
            return frame;
        }
        let frame = FrameId(crate::n32(self.all.len()));
        self.all.push(fresh);
        frame
    }

    /// One more mapping.
    pub fn map(&mut self, frame: FrameId) {
        if frame != FrameId::ZERO {
            self.at_mut(frame).maps += 1;
        }
    }

    /// One mapping fewer.
    pub fn unmap(&mut self, frame: FrameId) {
        if frame != FrameId::ZERO {
            self.at_mut(frame).maps -= 1;
            self.free_if_unused(frame);
        }
    }

    /// A device takes hold of it (`FOLL_PIN`).
    pub fn pin(&mut self, frame: FrameId) {
        self.at_mut(frame).pins += 1;
    }

    /// The device lets go.
    pub fn unpin(&mut self, frame: FrameId) {
        self.at_mut(frame).pins -= 1;
        self.free_if_unused(frame);
    }

    fn free_if_unused(&mut self, frame: FrameId) {
        let unused = self.at(frame).maps == 0 && self.at(frame).pins == 0;
        if unused {
            self.free.push(frame);
        }
    }

    /// How many page tables map it. The page of zeros counts as its own.
    #[must_use]
    pub fn maps(&self, frame: FrameId) -> u32 {
        self.at(frame).maps
    }

    /// Whether a device holds it.
    #[must_use]
    pub fn is_pinned(&self, frame: FrameId) -> bool {
        self.at(frame).pins > 0
    }

    /// What it holds.
    #[must_use]
    pub fn generation(&self, frame: FrameId) -> u64 {
        self.at(frame).generation
    }

    /// Writes it. Not for the page of zeros.
    pub fn write(&mut self, frame: FrameId, generation: u64) {
        debug_assert!(frame != FrameId::ZERO);
        self.at_mut(frame).generation = generation;
    }

    /// Frames in use.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.all.len() - 1 - self.free.len()
    }

    /// One more than the highest number ever given out.
    #[must_use]
    pub fn high_water(&self) -> usize {
        self.all.len()
    }
}
