//! The loop: collect, step, start. The same code in the product and in simulation.

use crate::host::Host;
use tiermgr_core::effect::Effect;
use tiermgr_core::event::Event;
use tiermgr_core::manager::Manager;
use tiermgr_core::record::Records;
use tiermgr_core::watch::Watch;

/// A manager joined to a host.
#[derive(Debug)]
pub struct Driver<H, R> {
    /// The world.
    pub host: H,
    /// The brain.
    pub manager: Manager<R>,
    /// Who sleeps.
    pub watch: Watch,
    events: Vec<Event>,
    effects: Vec<Effect>,
}

impl<H: Host, R: Records> Driver<H, R> {
    /// Joins the two.
    pub fn new(host: H, manager: Manager<R>) -> Self {
        let watch = Watch::new(manager.page_bytes());
        let (events, effects) = (Vec::with_capacity(256), Vec::with_capacity(256));
        Self { host, manager, watch, events, effects }
    }

    /// One turn: waits for something to happen (or for the manager's deadline), and does what follows.
    pub fn turn(&mut self) {
        let deadline = self.manager.deadline().min(self.watch.deadline());
        self.host.collect(deadline, &mut self.events);
        let now = self.host.now();
        if self.manager.deadline() <= now {
            self.events.push(Event::TimerFired);
        }
        // What a fork saw missing must not appear in its parent before the child has its share, so
        // the manager must hear of forks before it hears of anything that it would answer with a fill.
        self.events.sort_by_key(|event| !matches!(event, Event::Forked { .. }));
        for event in self.events.drain(..) {
            self.watch.hear(now, &event);
            self.manager.step(now, event, &mut self.effects);
        }
        self.manager.settle(now, &mut self.effects);
        for effect in self.effects.drain(..) {
            self.watch.see(&effect);
            self.host.start(&effect);
        }
        while let Some(overdue) = self.watch.overdue(now) {
            self.host.overdue(&overdue, self.manager.waits_on(overdue.proc, overdue.page));
        }
    }
}
