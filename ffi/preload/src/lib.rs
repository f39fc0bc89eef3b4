//! The malloc family for `LD_PRELOAD`.
//!
//! Three ages of a process, one rule each:
//!
//! 1. before libc's functions are known: the dynamic linker and `dlsym` already call malloc; a fixed
//!    bump arena (`bootstrap`) answers, and is never freed;
//! 2. normal life: sizes below `TIERMGR_MIN_SIZE` (128 KiB unless said otherwise) go to libc, or with
//!    `TIERMGR_SMALL=1` to jemalloc, which takes its memory from managed arenas (`small`, `extents`); others
//!    go to managed arenas directly. The first managed request connects to the daemon;
//! 3. daemon absent: everything comes from libc, and one line on standard error says so (with
//!    `TIERMGR_REQUIRE=1`: what would be managed fails with `ENOMEM`). Daemon gone later: a touch of a parked
//!    page waits for its return. We keep our own copies of the userfaultfds open for that reason:
//!    were the daemon's the last, the kernel would forget what is armed and answer with zeros.
//!
//! Where memory is refused (`ENOMEM`) each process says why, once for each cause; and apart from that, once for
//! each cause, that libc serves something instead.
//!
//! A pointer belongs to whom its address says (`chunks`): to an arena of large blocks, to one of jemalloc's, to
//! the bump arena, or else to libc. What this library allocates for itself always comes from libc (`own`), and a
//! thread that is inside the client already is sent there too. Small requests touch no lock and no thread-local
//! storage of ours, whose set-up could allocate.
//!
//! A program may also use libtiermgr, from C or from Python. What it asks there about memory that malloc
//! gave it comes here (`answers`): it can pin it, prefetch it and give advice as for its own regions.
//!
//! `close` and its kin are interposed as well (`descriptors`): a program that closes all descriptors
//! it does not know must not cut us off.
//!
//! So are the calls by which a program changes its memory, `madvise`, `mmap`, `mprotect` and their like
//! (`vm`): on managed memory they must mean what they mean everywhere. libc's `syscall` is, since it makes
//! them too. What libc does inside itself, and system calls made by an instruction of the program's own, do
//! not come here.
//!
//! Where somebody else serves malloc, or must (`neighbours`), this library does nothing and says so. Of the
//! program's seccomp filters it is to know what they forbid (`sandbox`).
//!
//! | variable | meaning |
//! |---|---|
//! | `TIERMGR_SOCKET` | socket of the daemon |
//! | `TIERMGR_MIN_SIZE` | smallest managed size: bytes, or with `K`, `M`, `G`; at least 16K |
//! | `TIERMGR_SMALL` | `1`: smaller ones are managed too |
//! | `TIERMGR_MMAP` | `1`: large mappings of the program's are managed too |
//! | `TIERMGR_MMAP_MIN` | smallest of them, 1M unless said otherwise; at least 64K |
//! | `TIERMGR_CLASS` | `latency`, `standard` or `bulk` |
//! | `TIERMGR_REQUIRE` | `1`: no memory from libc in place of managed memory |
//! | `TIERMGR_RULES` | file that says which programs are managed, and how (`tiermgrctl run --only`), or its text, if that has a line break |
//! | `TIERMGR_DISABLE` | `1`: this library does nothing |
//! | `TIERMGR_LOG` | `off`, `warn` (the default) or `info`: lines on standard error |

mod answers;
mod atfork;
mod bootstrap;
mod chunks;
mod descriptors;
mod errno;
mod extents;
mod held_locks;
mod introspection;
mod libc_next;
mod log;
mod malloc;
mod neighbours;
mod own;
mod route;
mod sandbox;
mod settings;
mod small;
mod vm;
