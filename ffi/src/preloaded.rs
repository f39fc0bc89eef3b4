//! What libtiermgr asks of libtiermgr_preload in a process that has both.
//!
//! A program, and NumPy above all, gets memory from malloc and does not see whose it is. With the preload
//! library that is managed memory too, but of another client: the daemon would answer the client of
//! libtiermgr that the range is not its. So the preload library exports one table of C functions, and
//! libtiermgr takes what concerns its ranges there. The two are built apart and share no Rust type, only
//! this table, which begins with its size.

use crate::client::Residency;
use crate::status::{Error, Result, Status, cut};
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Name of the table.
pub const TABLE_NAME: &CStr = c"tiermgr_preload_table";
const WHY_BYTES: usize = 512;
/// Leases of the preload library's client have this bit towards the program. The daemon counts them from
/// one.
const LEASE_BIT: u64 = 1 << 63;

/// Why a call failed, in words that end with a zero byte.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct Why([u8; WHY_BYTES]);

/// The functions. Each gives zero, or a `tiermgr_status` and says why. Advice is a `tiermgr_advice`.
/// They wait as the functions of `include/tiermgr.h` do.
#[derive(Debug)]
#[repr(C)]
pub struct Table {
    /// Bytes of this struct.
    pub size: u32,
    /// Whether an address lies in an arena of the preload library. The others take only such ranges.
    pub owns: extern "C" fn(usize) -> bool,
    /// Start, length, advice.
    pub advise: extern "C" fn(usize, usize, i32, &mut Why) -> i32,
    /// Start, length.
    pub prefetch: extern "C" fn(usize, usize, &mut Why) -> i32,
    /// Start, length, the lease.
    pub pin: extern "C" fn(usize, usize, &mut u64, &mut Why) -> i32,
    /// The lease.
    pub unpin: extern "C" fn(u64, &mut Why) -> i32,
    /// Start, length, where the bytes are.
    pub residency: extern "C" fn(usize, usize, &mut Residency, &mut Why) -> i32,
}

impl Why {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self([0; WHY_BYTES])
    }

    /// Keeps what became of a call, for the other side's `outcome`.
    pub fn answer<T>(&mut self, outcome: Result<T>, to: &mut T) -> i32 {
        match outcome {
            Ok(value) => {
                *to = value;
                0
            }
            Err(error) => {
                let length = cut(&error.message, WHY_BYTES - 1);
                self.0.fill(0);
                self.0[..length].copy_from_slice(&error.message.as_bytes()[..length]);
                error.status.code()
            }
        }
    }

    fn outcome(&self, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let known = Status::NAMES.iter().find(|(status, _)| status.code() == code);
        let words = CStr::from_bytes_until_nul(&self.0).unwrap_or(c"");
        Err(Error::because(
            known.map_or(Status::Internal, |(status, _)| *status),
            words.to_string_lossy().into_owned(),
        ))
    }
}

impl Default for Why {
    fn default() -> Self {
        Self::new()
    }
}

static FOUND: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
static LOOKED: AtomicBool = AtomicBool::new(false);

fn table() -> Option<&'static Table> {
    if !LOOKED.load(Ordering::Acquire) {
        // Threads that come at once find the same. A lock would not survive a fork.
        // SAFETY: the name ends with a zero byte.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, TABLE_NAME.as_ptr()) };
        FOUND.store(found.cast(), Ordering::Relaxed);
        LOOKED.store(true, Ordering::Release);
    }
    // SAFETY: null, or the table of the preload library, which is never unloaded.
    let table = unsafe { FOUND.load(Ordering::Relaxed).as_ref() }?;
    (table.size as usize >= size_of::<Table>()).then_some(table)
}

/// The preload library, for its own ranges and leases.
#[derive(Clone, Copy, Debug)]
pub struct Preloaded(&'static Table);

impl Preloaded {
    /// If `address` lies in its memory.
    #[must_use]
    pub fn of_range(address: usize) -> Option<Self> {
        table().filter(|table| (table.owns)(address)).map(Self)
    }

    /// If it gave `lease`.
    #[must_use]
    pub fn of_lease(lease: u64) -> Option<Self> {
        if lease & LEASE_BIT == 0 { None } else { table().map(Self) }
    }

    /// As [`crate::client::Client::advise`].
    ///
    /// # Errors
    /// The same.
    pub fn advise(self, start: usize, bytes: usize, advice: i32) -> Result<()> {
        let mut why = Why::new();
        let code = (self.0.advise)(start, bytes, advice, &mut why);
        why.outcome(code)
    }

    /// As [`crate::client::Client::prefetch`].
    ///
    /// # Errors
    /// The same.
    pub fn prefetch(self, start: usize, bytes: usize) -> Result<()> {
        let mut why = Why::new();
        let code = (self.0.prefetch)(start, bytes, &mut why);
        why.outcome(code)
    }

    /// As [`crate::client::Client::pin`].
    ///
    /// # Errors
    /// The same.
    pub fn pin(self, start: usize, bytes: usize) -> Result<u64> {
        let (mut lease, mut why) = (0, Why::new());
        let code = (self.0.pin)(start, bytes, &mut lease, &mut why);
        why.outcome(code)?;
        Ok(lease | LEASE_BIT)
    }

    /// As [`crate::client::Client::unpin`].
    ///
    /// # Errors
    /// The same.
    pub fn unpin(self, lease: u64) -> Result<()> {
        let mut why = Why::new();
        let code = (self.0.unpin)(lease & !LEASE_BIT, &mut why);
        why.outcome(code)
    }

    /// As [`crate::client::Client::residency`].
    ///
    /// # Errors
    /// The same.
    pub fn residency(self, start: usize, bytes: usize) -> Result<Residency> {
        let (mut found, mut why) = (Residency::default(), Why::new());
        let code = (self.0.residency)(start, bytes, &mut found, &mut why);
        why.outcome(code)?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_cross_with_code_and_words() {
        let (mut why, mut lease) = (Why::new(), 0);
        assert_eq!(why.answer(Ok(7), &mut lease), 0);
        assert_eq!(lease, 7);
        assert!(why.outcome(0).is_ok());
        let long = Error::because(Status::NoRoom, "x".repeat(2 * WHY_BYTES));
        let code = why.answer(Err(long), &mut lease);
        let error = why.outcome(code).expect_err("a failure");
        assert_eq!((error.status, error.message.len()), (Status::NoRoom, WHY_BYTES - 1));
        assert_eq!(lease, 7);
        assert_eq!(why.outcome(-999).expect_err("a failure").status, Status::Internal);
    }

    #[test]
    fn without_the_preload_library_nobody_answers() {
        assert!(Preloaded::of_range(4096).is_none());
        assert!(Preloaded::of_lease(LEASE_BIT | 1).is_none());
    }
}
