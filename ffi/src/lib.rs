//! libtiermgr: the client side of tiermgr.
//!
//! Two libraries are made of this: `libtiermgr` with the C ABI of `include/tiermgr.h` (`capi`,
//! behind the feature of that name), and `libtiermgr_preload`, which puts malloc on top. Both may
//! live in one process; each is then a client of its own, and what the program asks the first about
//! memory of the second is passed on ([`preloaded`]).
//!
//! From the bottom up: [`space`] reserves address ranges, [`arena`] and [`arenas`] cut them into
//! blocks, [`heap`] grows and trims arenas, [`changes`] knows what the program did to its pages, [`link`](mod@link) talks with the daemon, [`client`] joins the two,
//! [`fork`] carries clients into forked children, [`sandbox`] knows what seccomp filters forbid, and
//! [`cancel`] keeps cancelled threads from ending in the middle.

pub mod arena;
pub mod arenas;
pub mod cancel;
#[cfg(feature = "capi")]
pub mod capi;
pub mod changes;
pub mod client;
pub mod fds;
pub mod fork;
pub mod heap;
pub mod link;
pub mod lock;
pub mod preloaded;
pub mod sandbox;
pub mod space;
pub mod status;

pub use tiermgr_sys::process::nap;
pub use tiermgr_wire::rules;
pub use tiermgr_wire::size;
