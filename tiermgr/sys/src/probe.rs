//! What this kernel can do, found out by trying; never by its version.

use crate::uffd::{DeviceError, DeviceFd, handshake, new_from_device};
use crate::{abi, pidfd, uring};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd};

/// What the kernel offers. Found once at start, then passed around.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "a list of facts that have nothing to do with each other"
)]
pub struct KernelFeatures {
    /// UFFDIO_MOVE (Linux 6.8): private pages leave without a copy.
    pub uffd_move: bool,
    /// UFFDIO_POISON (6.6): a lost page raises SIGBUS.
    pub uffd_poison: bool,
    /// Absent pages may answer SIGBUS.
    pub uffd_sigbus: bool,
    /// A fork may be followed; needs CAP_SYS_PTRACE.
    pub uffd_event_fork: bool,
    /// io_uring with registered files.
    pub io_uring: bool,
    /// Descriptors of another process may be fetched.
    pub pidfd_getfd: bool,
    /// MADV_POPULATE_WRITE (5.14).
    pub populate_write: bool,
    /// `/proc/PID/pagemap` may be read.
    pub pagemap: bool,
    /// close_range (5.9), which helpers begin with.
    pub close_range: bool,
    /// Whether two processes share their memory can be asked.
    pub kcmp: bool,
    /// The memory of another process may be read.
    pub process_vm_readv: bool,
}

/// Why the probe could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// No userfaultfd at all.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device is there but does not serve.
    #[error("making a userfaultfd")]
    Userfaultfd(#[source] std::io::Error),
    /// A name to be assumed missing is unknown.
    #[error("no kernel feature is named `{name}`; the names are {}", KernelFeatures::NAMES.join(", "))]
    UnknownFeature {
        /// As given.
        name: String,
    },
}

/// One feature: its name and its place.
type Field = (&'static str, fn(&mut KernelFeatures) -> &mut bool);

const FIELDS: [Field; KernelFeatures::NAMES.len()] = [
    ("uffd_move", |f| &mut f.uffd_move),
    ("uffd_poison", |f| &mut f.uffd_poison),
    ("uffd_sigbus", |f| &mut f.uffd_sigbus),
    ("uffd_event_fork", |f| &mut f.uffd_event_fork),
    ("io_uring", |f| &mut f.io_uring),
    ("pidfd_getfd", |f| &mut f.pidfd_getfd),
    ("populate_write", |f| &mut f.populate_write),
    ("pagemap", |f| &mut f.pagemap),
    ("close_range", |f| &mut f.close_range),
    ("kcmp", |f| &mut f.kcmp),
    ("process_vm_readv", |f| &mut f.process_vm_readv),
];

impl KernelFeatures {
    /// Their names, as configuration and `doctor` spell them.
    pub const NAMES: &'static [&'static str] = &[
        "uffd_move",
        "uffd_poison",
        "uffd_sigbus",
        "uffd_event_fork",
        "io_uring",
        "pidfd_getfd",
        "populate_write",
        "pagemap",
        "close_range",
        "kcmp",
        "process_vm_readv",
    ];

    /// Those without which no page can be served or parked.
    pub const INDISPENSABLE: &'static [&'static str] = &[
        "uffd_sigbus",
        "uffd_event_fork",
        "io_uring",
        "pidfd_getfd",
        "populate_write",
        "pagemap",
        "close_range",
        "kcmp",
        "process_vm_readv",
    ];

    /// Tries everything, and then takes away what `assume_missing` names, so that an old kernel can be
    /// tried on a new one.
    ///
    /// # Errors
    /// [`ProbeError`]: there is no userfaultfd, or a name is unknown.
    pub fn probe(assume_missing: &[String]) -> Result<Self, ProbeError> {
        let mut features = Self::default();
        features.probe_userfaultfd()?;
        features.io_uring = uring::Ring::new(2, 0).is_ok();
        features.pidfd_getfd = can_fetch_descriptors();
        features.populate_write = can_populate();
        features.pagemap = can_read_pagemap();
        // SAFETY: the range holds no descriptor: numbers end far below.
        features.close_range =
            unsafe { libc::syscall(libc::SYS_close_range, u32::MAX, u32::MAX, 0) } == 0;
        let me = std::process::id().cast_signed();
        features.process_vm_readv = can_read_memory(me);
        features.kcmp = pidfd::same_memory(me, me).is_ok_and(|same| same);
        for name in assume_missing {
            let (_, field) = FIELDS
                .iter()
                .find(|(known, _)| known == name)
                .ok_or_else(|| ProbeError::UnknownFeature { name: name.clone() })?;
            *field(&mut features) = false;
        }
        Ok(features)
    }

    fn probe_userfaultfd(&mut self) -> Result<(), ProbeError> {
        let device = DeviceFd::open()?;
        let fd = new_from_device(device.as_fd()).map_err(ProbeError::Userfaultfd)?;
        let api = handshake(fd.as_fd(), 0).map_err(ProbeError::Userfaultfd)?;
        let has = |bit| api.features & bit != 0;
        self.uffd_move = has(abi::FEATURE_MOVE);
        self.uffd_poison = has(abi::FEATURE_POISON);
        self.uffd_sigbus = has(abi::FEATURE_SIGBUS);
        // The kernel lists this one even for whoever may not have it.
        let fd = new_from_device(device.as_fd()).map_err(ProbeError::Userfaultfd)?;
        self.uffd_event_fork = handshake(fd.as_fd(), abi::FEATURE_EVENT_FORK).is_ok();
        Ok(())
    }

    /// Names of what this kernel lacks, or forbids.
    pub fn missing(&self) -> Vec<&'static str> {
        self.rows().filter(|(_, there)| !there).map(|(name, _)| name).collect()
    }

    /// Names of what is missing and cannot be done without.
    pub fn lacking(&self) -> Vec<&'static str> {
        self.missing().into_iter().filter(|name| Self::INDISPENSABLE.contains(name)).collect()
    }

    /// Whether it has the feature of this name; `None` for a name that is unknown.
    pub fn has(&self, name: &str) -> Option<bool> {
        self.rows().find(|(known, _)| *known == name).map(|(_, there)| there)
    }

    fn rows(&self) -> impl Iterator<Item = (&'static str, bool)> + '_ {
        FIELDS.iter().map(|(name, field)| (*name, *field(&mut self.clone())))
    }
}

impl fmt::Display for KernelFeatures {
    /// One line each: the name, and `yes` or `no`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, there) in self.rows() {
            writeln!(f, "{name:<20} {}", if there { "yes" } else { "no" })?;
        }
        Ok(())
    }
}

fn can_fetch_descriptors() -> bool {
    let Ok(me) = pidfd::open(std::process::id().cast_signed()) else { return false };
    pidfd::getfd(me.as_fd(), me.as_raw_fd()).is_ok()
}

/// Whether the kernel knows MADV_POPULATE_WRITE. An empty range is a valid one of any advice that it knows.
fn can_populate() -> bool {
    let page = crate::process::page_size();
    let at = std::ptr::without_provenance_mut(usize::try_from(page).unwrap_or(4096));
    // SAFETY: a range of no bytes has no content.
    unsafe { libc::madvise(at, 0, libc::MADV_POPULATE_WRITE) == 0 }
}

fn can_read_memory(me: i32) -> bool {
    let here = 7u8;
    let address = crate::uffd::bytes((&raw const here).expose_provenance());
    let mut found = [0];
    crate::memory::read_memory(me, &[(address, 1)], &mut found).is_ok() && found == [here]
}

fn can_read_pagemap() -> bool {
    let here = 0u64;
    let address = crate::uffd::bytes((&raw const here).expose_provenance());
    let mut entry = [crate::memory::PageEntry::default()];
    crate::memory::Pagemap::open(std::process::id().cast_signed())
        .and_then(|map| map.read(address, &mut entry))
        .is_ok_and(|n| n == 1 && entry[0].present())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_places_agree() {
        for (name, (field, place)) in KernelFeatures::NAMES.iter().zip(FIELDS) {
            assert_eq!(*name, field);
            let mut features = KernelFeatures::default();
            *place(&mut features) = true;
            assert_eq!(features.has(name), Some(true));
            assert_eq!(features.missing().len(), FIELDS.len() - 1);
        }
        assert_eq!(KernelFeatures::default().has("warp"), None);
        for name in KernelFeatures::INDISPENSABLE {
            assert!(KernelFeatures::default().lacking().contains(name), "{name}");
        }
    }

    #[test]
    fn a_name_that_is_unknown_is_refused_and_a_known_one_taken_away() {
        if DeviceFd::open().is_err() {
            assert!(std::env::var_os("TIERMGR_CI_STRICT").is_none(), "no userfaultfd");
            return;
        }
        let unknown = KernelFeatures::probe(&["warp".to_owned()]).expect_err("no such feature");
        assert!(unknown.to_string().contains("uffd_move"));
        let without = KernelFeatures::probe(&["uffd_move".to_owned()]).expect("probe");
        assert!(!without.uffd_move);
        assert!(without.missing().contains(&"uffd_move"));
        assert!(without.to_string().contains("uffd_move            no"));
    }
}
