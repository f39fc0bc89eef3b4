//! Exit statuses of `tiermgrd`.

/// Everything was brought back, or nobody was left.
pub const OK: u8 = 0;
/// The command line or the configuration is wrong.
pub const USAGE: u8 = 2;
/// The daemon could not start: kernel, store, state directory or socket.
pub const START: u8 = 3;
/// The serving process died again and again; no program was attached.
pub const DIED: u8 = 4;
