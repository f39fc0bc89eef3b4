//! The userfaultfd interface of the kernel: numbers and layouts, and nothing else.
//!
//! Taken from `include/uapi/linux/userfaultfd.h` of Linux 6.18. Numbers are given as the header's macros
//! come out and are checked at compile time against the formula that makes them; `tests/header.rs` compares
//! them with the header that is installed where the tests run.

/// The only version of the API that there is.
pub const UFFD_API: u64 = 0xAA;

/// `_IOC` of `asm-generic/ioctl.h`: direction, type 0xAA, number, size of the argument.
const fn ioc(direction: u32, number: u32, size: usize) -> u32 {
    assert!(size < 1 << 14, "the size field has 14 bits");
    #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
    let size = size as u32;
    direction << 30 | size << 16 | 0xAA << 8 | number
}

const NONE: u32 = 0;
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// On `/dev/userfaultfd`: makes a userfaultfd; the argument is its flags (`O_CLOEXEC | O_NONBLOCK`).
pub const USERFAULTFD_IOC_NEW: u32 = 0x0000_aa00;
/// Handshake; argument [`UffdioApi`].
pub const UFFDIO_API: u32 = 0xc018_aa3f;
/// Argument [`UffdioRegister`].
pub const UFFDIO_REGISTER: u32 = 0xc020_aa00;
/// Argument [`UffdioRange`].
pub const UFFDIO_UNREGISTER: u32 = 0x8010_aa01;
/// Argument [`UffdioRange`].
pub const UFFDIO_WAKE: u32 = 0x8010_aa02;
/// Argument [`UffdioCopy`].
pub const UFFDIO_COPY: u32 = 0xc028_aa03;
/// Argument [`UffdioMove`]. Since Linux 6.8.
pub const UFFDIO_MOVE: u32 = 0xc028_aa05;
/// Argument [`UffdioWriteprotect`].
pub const UFFDIO_WRITEPROTECT: u32 = 0xc018_aa06;
/// Argument [`UffdioContinue`].
pub const UFFDIO_CONTINUE: u32 = 0xc020_aa07;
/// Argument [`UffdioPoison`]. Since Linux 6.6.
pub const UFFDIO_POISON: u32 = 0xc020_aa08;

const _: () = assert!(USERFAULTFD_IOC_NEW == ioc(NONE, 0x00, 0));
const _: () = assert!(UFFDIO_API == ioc(READ_WRITE, 0x3f, size_of::<UffdioApi>()));
const _: () = assert!(UFFDIO_REGISTER == ioc(READ_WRITE, 0x00, size_of::<UffdioRegister>()));
const _: () = assert!(UFFDIO_UNREGISTER == ioc(READ, 0x01, size_of::<UffdioRange>()));
const _: () = assert!(UFFDIO_WAKE == ioc(READ, 0x02, size_of::<UffdioRange>()));
const _: () = assert!(UFFDIO_COPY == ioc(READ_WRITE, 0x03, size_of::<UffdioCopy>()));
const _: () = assert!(UFFDIO_MOVE == ioc(READ_WRITE, 0x05, size_of::<UffdioMove>()));
const _: () =
    assert!(UFFDIO_WRITEPROTECT == ioc(READ_WRITE, 0x06, size_of::<UffdioWriteprotect>()));
const _: () = assert!(UFFDIO_CONTINUE == ioc(READ_WRITE, 0x07, size_of::<UffdioContinue>()));
const _: () = assert!(UFFDIO_POISON == ioc(READ_WRITE, 0x08, size_of::<UffdioPoison>()));

/// Write-protect faults are reported.
pub const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// A fork sends a message with the child's descriptor. Needs CAP_SYS_PTRACE at the handshake.
pub const FEATURE_EVENT_FORK: u64 = 1 << 1;
/// mremap sends a message.
pub const FEATURE_EVENT_REMAP: u64 = 1 << 2;
/// MADV_DONTNEED, MADV_REMOVE and MADV_FREE send a message, before the pages go.
pub const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// MISSING works on hugetlb.
pub const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
/// MISSING works on shmem.
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// munmap sends a message, after the pages went.
pub const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
/// An absent page answers SIGBUS (a system call: EFAULT) and sends no message.
pub const FEATURE_SIGBUS: u64 = 1 << 7;
/// Fault messages carry the thread id, in the namespace of the thread itself.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
/// MINOR works on hugetlb.
pub const FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;
/// MINOR works on shmem.
pub const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// Fault addresses are not rounded down to a page.
pub const FEATURE_EXACT_ADDRESS: u64 = 1 << 11;
/// WP works on hugetlb and shmem.
pub const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// WRITEPROTECT marks also pages of anonymous memory that are absent. Since Linux 6.4.
pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
/// [`UFFDIO_POISON`] exists. Since Linux 6.6.
pub const FEATURE_POISON: u64 = 1 << 14;
/// The kernel answers WP faults itself. Since Linux 6.7.
pub const FEATURE_WP_ASYNC: u64 = 1 << 15;
/// [`UFFDIO_MOVE`] exists. Since Linux 6.8.
pub const FEATURE_MOVE: u64 = 1 << 16;

/// Registers for absent pages.
pub const REGISTER_MODE_MISSING: u64 = 1 << 0;
/// Registers for writes to protected pages.
pub const REGISTER_MODE_WP: u64 = 1 << 1;
/// Registers for pages that are in the page cache and not mapped.
pub const REGISTER_MODE_MINOR: u64 = 1 << 2;

/// Do not wake who waits for the page.
pub const COPY_MODE_DONTWAKE: u64 = 1 << 0;
/// Install the page write-protected.
pub const COPY_MODE_WP: u64 = 1 << 1;
/// Absent pages of the source are skipped and count as moved.
pub const MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;
/// Protect; without it, unprotect.
pub const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
/// As [`COPY_MODE_DONTWAKE`]; only without [`WRITEPROTECT_MODE_WP`].
pub const WRITEPROTECT_MODE_DONTWAKE: u64 = 1 << 1;

/// Kind of a message: a fault.
pub const EVENT_PAGEFAULT: u8 = 0x12;
/// Kind of a message: fork.
pub const EVENT_FORK: u8 = 0x13;
/// Kind of a message: mremap.
pub const EVENT_REMAP: u8 = 0x14;
/// Kind of a message: madvise that drops pages.
pub const EVENT_REMOVE: u8 = 0x15;
/// Kind of a message: munmap.
pub const EVENT_UNMAP: u8 = 0x16;

/// Fault flag: the access is a write.
pub const PAGEFAULT_FLAG_WRITE: u64 = 1 << 0;
/// Fault flag: the page is there and write-protected.
pub const PAGEFAULT_FLAG_WP: u64 = 1 << 1;
/// Fault flag: the page is in the page cache.
pub const PAGEFAULT_FLAG_MINOR: u64 = 1 << 2;

/// `struct uffdio_api`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioApi {
    /// In: [`UFFD_API`].
    pub api: u64,
    /// In: what is wanted. Out: everything that the kernel has, so never use the struct twice.
    pub features: u64,
    /// Out: bit per ioctl number.
    pub ioctls: u64,
}

/// `struct uffdio_range`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioRange {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// `struct uffdio_register`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioRegister {
    /// What to register.
    pub range: UffdioRange,
    /// `REGISTER_MODE_*`.
    pub mode: u64,
    /// Out: bit per ioctl number that works on the range.
    pub ioctls: u64,
}

/// `struct uffdio_copy`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioCopy {
    /// Address in the memory that the descriptor belongs to.
    pub dst: u64,
    /// Address in the caller's memory.
    pub src: u64,
    /// Bytes.
    pub len: u64,
    /// `COPY_MODE_*`.
    pub mode: u64,
    /// Out: bytes done, or a negative errno.
    pub copy: i64,
}

/// `struct uffdio_move`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioMove {
    /// Where to; registered with the descriptor.
    pub dst: u64,
    /// Where from; same memory as `dst`.
    pub src: u64,
    /// Bytes.
    pub len: u64,
    /// `MOVE_MODE_*`.
    pub mode: u64,
    /// Out: bytes done, or a negative errno.
    pub moved: i64,
}

/// `struct uffdio_writeprotect`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioWriteprotect {
    /// Where.
    pub range: UffdioRange,
    /// `WRITEPROTECT_MODE_*`.
    pub mode: u64,
}

/// `struct uffdio_continue`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioContinue {
    /// Where.
    pub range: UffdioRange,
    /// Mode bits.
    pub mode: u64,
    /// Out: bytes done, or a negative errno.
    pub mapped: i64,
}

/// `struct uffdio_poison`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct UffdioPoison {
    /// Where.
    pub range: UffdioRange,
    /// Mode bits.
    pub mode: u64,
    /// Out: bytes done, or a negative errno.
    pub updated: i64,
}

/// Bytes of a `struct uffd_msg`.
pub const MSG_BYTES: usize = 32;

const _: () = assert!(size_of::<crate::uffd::Msg>() == MSG_BYTES);
