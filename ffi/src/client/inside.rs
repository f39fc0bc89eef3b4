//! The way in to what is connected, and the way out.

use super::{Client, Connected};
use crate::lock::Entered;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, compiler_fence};

/// The right to use what is connected. A child that a signal handler has forked meanwhile joins its family as it
/// leaves, if it has not done so by a request: until then the pages that it shares with its parent are kept by
/// its parent and the daemon only.
pub(super) struct Inside<'a> {
    entered: ManuallyDrop<Entered<'a, Connected>>,
    client: &'a Client,
}

impl Client {
    /// See [`Guarded::enter`](crate::lock::Guarded::enter).
    pub(super) fn inside(&self) -> Option<Inside<'_>> {
        self.connected.enter().map(|entered| self.as_inside(entered))
    }

    /// See [`Guarded::try_enter`](crate::lock::Guarded::try_enter).
    pub(super) fn try_inside(&self) -> Option<Inside<'_>> {
        self.connected.try_enter().map(|entered| self.as_inside(entered))
    }

    const fn as_inside<'a>(&'a self, entered: Entered<'a, Connected>) -> Inside<'a> {
        Inside { entered: ManuallyDrop::new(entered), client: self }
    }

    /// To be called after each release of the lock: whoever is forked before it is noted, and is seen here; whoever
    /// is forked after it finds the lock free, and has joined when fork returns.
    pub(super) fn join_if_newborn(&self) {
        // The processor keeps this order for its own thread, and so must the compiler: the note is looked at last.
        compiler_fence(Ordering::SeqCst);
        while self.birth.is_newborn() {
            // In the handler, whose fork has just noted it, there is no entry yet.
            let Some(mut connected) = self.connected.enter() else { return };
            // By now this may be a child of that one.
            if self.birth.is_newborn() {
                connected.link.join_family_after_fork();
            }
            drop(connected);
            compiler_fence(Ordering::SeqCst);
        }
    }
}

impl Deref for Inside<'_> {
    type Target = Connected;

    fn deref(&self) -> &Connected {
        &self.entered
    }
}

impl DerefMut for Inside<'_> {
    fn deref_mut(&mut self) -> &mut Connected {
        &mut self.entered
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        // SAFETY: once, and nothing uses it after this.
        unsafe { ManuallyDrop::drop(&mut self.entered) };
        self.client.join_if_newborn();
    }
}
