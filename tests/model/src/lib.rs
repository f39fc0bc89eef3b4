//! The page protocol as a model, explored exhaustively.
//!
//! **What is explored.** The private backing, as the manager of `tiermgr-core` plays it: a page leaves its
//! place by MOVE into limbo, rests, is written to a slot, and comes back by COPY from limbo or from the
//! slot. Records go through [`PageState::next`](tiermgr_core::page::PageState::next), the table that the
//! product uses. Everything that runs at the same time is a small machine of its own: threads of the
//! parent and its child, the helper, the kernel's page tables and messages, the disk, a device that
//! pins pages, and the daemon, which may be killed between any record and the effect beside it. All
//! interleavings of their steps are gone through ([`explore`]), and in every state
//! - no page shows a byte that it must not show: to the parent, to the child, after a device wrote to
//!   it, or in a foreign mapping that took over the addresses; and
//! - whoever waits is served, in whatever order the steps that are bound to happen do happen, once the
//!   environment makes no more choices (kills, forks, touches, parks).
//!
//! **How small.** Two pages, in one extent or in two; one limbo block; three slots; two threads in the
//! parent and one in the child; one fork; a ring of two commands, which the helper may carry out in any
//! order; two faults read ahead and looked at in any order. What may happen how often is bounded in each
//! [`Scenario`], since the product of everything would not end. States reached under all rules:
//!
//! | scenario | thousands | bounds |
//! |---|---|---|
//! | `base` | 347 | 2 accesses, 3 parks, 1 kill |
//! | `extent` | 323 | 2 accesses, 2 parks, 1 kill; an extent half clean, half untouched |
//! | `dma` | 401 | 2 accesses, 2 parks, 1 pin, 2 writes by the device |
//! | `fork` | 627 | 1 access each, 2 parks, 1 extent made exclusive; the parent may exit |
//! | `fork-holes` | 82 | 2 accesses, 1 park, 1 extent made exclusive |
//! | `fork-slots` | 971 | as `fork`, with two extents and a slot that is used again |
//! | `fork-crash` | 130 | 1 and 2 accesses, 1 park, 1 kill |
//! | `discard` | 647 | 2 accesses, 2 parks, 1 kill, 1 discard |
//! | `discard-fork` | 382 | 1 access each, 1 park, 1 discard |
//! | `reuse` | 123 | 2 accesses, 2 parks, 1 kill, 1 unmap |
//! | `reuse-fork` | 243 | 1 access each, 2 parks, 1 unmap |
//! | `crash` | 450 | 2 accesses, 3 parks, 2 kills |
//!
//! **What makes it smaller without losing anything.** Bytes, slots and like threads have no names of
//! their own (`canon.rs`). A step that changes only what the daemon alone can see is taken at once where
//! no kill is left that could fall behind it. A read of a page that is there is no step: every state
//! is checked.
//!
//! **Errors of ioctls.** EAGAIN comes wherever the kernel gives it, while a FORK is unread; one more of
//! it changes nothing, since the operation waits where it is. EEXIST comes wherever a page is there. It
//! is never invented: COPY into private memory fails so for no other reason.
//!
//! **Not here.** The shared backing; the way of parking on kernels without MOVE; memory armed late;
//! lost bytes (`Poisoned`); room, buffers and the order of what waits for them; a second
//! fork, a fork by the child, and parking in the child; events of raw system calls (REMOVE, REMAP,
//! UNMAP). The look at all page tables at a restart, and the copy of the table for a child, are one
//! step each: nobody else can change there what they look at. Of the table's arrows this leaves out
//! those of `Poisoned`.
//!
//! **How we know that it sees anything.** Each [`Rule`] can be left out, and something must go wrong then
//! (`scripts/mutants` shows what). Two things that one might take for rules are none, says the model.
//! `Filling` need not be durable: a restart finds the same out for a page that is recorded as parked.
//! And the WAKE after EEXIST serves nobody on private memory, where whatever installs a page wakes too;
//! it stays, as it costs nothing and the shared backing needs it.

mod broken;
mod canon;
mod daemon;
mod explore;
mod hunt;
mod kernel;
mod life;
mod limbo;
mod model;
mod op;
mod operations;
mod rules;
mod scenario;
mod state;
mod step;

pub use broken::Broken;
pub use explore::{Exploration, STATES_MAX, Violation, explore};
pub use hunt::{Caught, hunt};
pub use model::{Model, Out};
pub use rules::{Rule, Rules};
pub use scenario::{Budget, SCENARIOS, Scenario};
pub use state::State;
pub use step::{Step, What};
