//! The seam between the core and a world: the real one ([`crate::linux`]) or the simulated one
//! (`tests/sim`).

use tiermgr_core::effect::Effect;
use tiermgr_core::event::Event;
use tiermgr_core::units::Tick;
use tiermgr_core::watch::{Overdue, WaitsOn};

/// All that the driver needs from outside.
pub trait Host {
    /// Monotonic time.
    fn now(&mut self) -> Tick;

    /// Appends events that are ready; with none ready, waits no longer than `deadline`.
    ///
    /// Among the messages of one process, FORK comes before UNMAP and REMAP, and these before faults.
    /// All that an earlier call gave has been stepped and its effects started by now: a host whose
    /// messages must survive a kill forgets them here and not before.
    fn collect(&mut self, deadline: Tick, events: &mut Vec<Event>);

    /// Starts the work, in the order of the calls. The outcome always comes back as an event, never
    /// from this call.
    fn start(&mut self, effect: &Effect);

    /// Is told of a fault that nobody has answered for [`tiermgr_core::watch::OVERDUE_NS`], once.
    fn overdue(&mut self, overdue: &Overdue, waits_on: WaitsOn);
}
