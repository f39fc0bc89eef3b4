//! The kernel, as thin safe calls: userfaultfd, io_uring, pidfd, pagemap.
//!
//! Nothing here knows of tiers, regions or policy; addresses and lengths are plain `u64` bytes, and a
//! wrapper can be reviewed against the man page of the call that it wraps. For every function:
//!
//! - addresses and lengths that go to userfaultfd, madvise or mmap are multiples of [`process::page_size`];
//! - nothing blocks unless its documentation says so, and nothing allocates in a call that the fault
//!   path makes (`uffd`, `ring`, `uring` after set-up, `memory::read_memory`);
//! - what another process can write is never borrowed as `&[u8]` and never believed: shared memory is
//!   read through atomics and each value is checked ([`shm`], [`ring`]);
//! - errors that the caller acts on have names ([`uffd::Outcome`], [`disk::StoreError`]); the rest is
//!   [`std::io::Error`] with the errno of the kernel.

pub mod abi;
pub mod cgroup;
pub mod disk;
pub mod helper;
pub mod keeper;
pub mod memory;
pub mod nowait;
pub mod pidfd;
pub mod pool;
pub mod probe;
pub mod proc;
pub mod process;
pub mod ring;
mod ring_helper;
pub mod shm;
pub mod sock;
pub mod task;
pub mod uffd;
pub mod uring;
