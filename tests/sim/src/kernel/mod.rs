//! The simulated kernel: as much of Linux' memory management as tiermgr can see.
//!
//! What stands here is what `tiermgr/docs` and `tests/kernel` say of the real one, surprises included: a
//! copy never overwrites, a move loses write protection, a fork refuses copies before its message
//! can be read. A page's contents are one number, its *generation*; 0 is a page of zeros.

mod frames;
mod mm;
mod moving;
mod touch;

pub use frames::{FrameId, Frames};
pub use mm::{Layout, LayoutMessage, Mm, Page, Place, Pte, Sleeper, Vma, Waiter};
pub use moving::{MoveStep, PopulateStep};
pub use touch::{Access, Touch};
