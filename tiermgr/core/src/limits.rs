//! Every maximum, and how they fit together.

use crate::units::CHUNK_EXTENTS;

/// Pieces of a `COPY`: a demand fault never waits behind a longer one.
pub const COPY_PIECE_BYTES: u64 = 256 << 10;
/// Commands that one process' helper can hold at once.
pub const COMMANDS_IN_FLIGHT_MAX: u32 = 64;
/// Chunks in the limbo range of one process, at most.
pub const LIMBO_BLOCKS_MAX: u32 = 512;
/// Processes of one family, the client and its forked descendants.
pub const PROCS_MAX: usize = 1024;
/// Regions of one process.
pub const REGIONS_MAX: usize = 4096;
/// Leases of one process.
pub const LEASES_MAX: usize = 4096;
/// Records of one family: 16 TiB of managed address space.
pub const RECORDS_MAX: u32 = 1 << 28;
/// Large staging buffers, one chunk each, that a family is lent at most: reads ahead and writes.
pub const STREAM_BUFFERS: u16 = 4;
/// Small staging buffers of a family at most, one extent each: the faulting extent comes first through these.
pub const DEMAND_BUFFERS: u16 = 16;
/// Small staging buffers of a family at least.
pub const DEMAND_BUFFERS_LEAST: u16 = 4;

// A write and a read ahead can be under way at once. Of the small ones one is for writes alone, and they
// leave half of all.
const _: () = assert!(STREAM_BUFFERS >= 2);
const _: () = assert!(DEMAND_BUFFERS_LEAST >= 2 && DEMAND_BUFFERS_LEAST <= DEMAND_BUFFERS);
// A mask of the extents of a chunk fits a `u32`.
const _: () = assert!(CHUNK_EXTENTS <= u32::BITS);
