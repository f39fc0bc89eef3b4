//! Buffers for I/O that many users share, each of one user at a time.
//!
//! Memory is mapped in blocks of a huge page when somebody reserves it, and touched when somebody first
//! takes it. The lowest free piece is taken first, so that few users touch little. A block that holds
//! several pieces is emptied when the last of them is given back; what was registered of it before is another
//! [`Epoch`]'s. No block is unmapped or moved as long as the pool lives.

use crate::memory::{AnonBuffer, HUGE_PAGE};
use std::collections::BTreeSet;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Pieces of one size.
#[derive(Debug)]
pub struct BufferPool {
    piece_bytes: usize,
    inner: Mutex<Inner>,
}

/// Tells the memory that a piece has from what it had before its block was emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch(u64);

#[derive(Debug)]
struct Block {
    memory: AnonBuffer,
    epoch: Epoch,
}

#[derive(Debug, Default)]
struct Inner {
    blocks: Vec<Block>,
    /// Pieces that may be taken at once.
    reserved: usize,
    /// Pieces that are mapped and that nobody has.
    free: BTreeSet<usize>,
    /// No piece from here on was ever taken.
    reached: usize,
}

impl BufferPool {
    /// A pool of nothing yet.
    ///
    /// # Errors
    /// EINVAL where pieces do not divide a huge page evenly.
    pub fn new(piece_bytes: usize) -> io::Result<Arc<Self>> {
        if piece_bytes == 0 || !HUGE_PAGE.is_multiple_of(piece_bytes) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(Arc::new(Self { piece_bytes, inner: Mutex::default() }))
    }

    /// Makes sure that so many more pieces can be taken at once.
    ///
    /// # Errors
    /// ENOMEM, EAGAIN: as mmap; nothing is reserved then.
    pub fn reserve(&self, pieces: usize) -> io::Result<()> {
        let mut inner = self.lock();
        let wanted = inner.reserved + pieces;
        let each = HUGE_PAGE / self.piece_bytes;
        while inner.blocks.len() * each < wanted {
            let block = AnonBuffer::untouched(HUGE_PAGE)?;
            let first = inner.blocks.len() * each;
            inner.blocks.push(Block { memory: block, epoch: Epoch::default() });
            inner.free.extend(first..first + each);
        }
        inner.reserved = wanted;
        Ok(())
    }

    /// Undoes a [`BufferPool::reserve`]. The addresses stay for others.
    pub fn release(&self, pieces: usize) {
        let mut inner = self.lock();
        inner.reserved = inner.reserved.saturating_sub(pieces);
    }

    /// Takes a piece; its bytes are zeros or what its last user left. `None`: all that is mapped is taken, which
    /// cannot be where each user takes no more than it has reserved.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<Lease> {
        let mut inner = self.lock();
        let piece = inner.free.pop_first()?;
        let at = piece * self.piece_bytes;
        let block = inner.blocks.get(at / HUGE_PAGE)?;
        let (base, epoch) = (block.memory.as_mut_ptr(), block.epoch);
        let base = NonNull::new(base.wrapping_add(at % HUGE_PAGE))?;
        inner.reached = inner.reached.max(piece + 1);
        drop(inner);
        Some(Lease { pool: Arc::clone(self), piece, base, epoch })
    }

    /// Pieces that nobody has.
    #[must_use]
    pub fn free_pieces(&self) -> usize {
        self.lock().free.len()
    }

    /// Bytes of pieces that are reserved and were never taken.
    #[must_use]
    pub fn untouched_bytes(&self) -> u64 {
        let inner = self.lock();
        (inner.reserved.saturating_sub(inner.reached) * self.piece_bytes) as u64
    }

    /// Bytes of pieces that are reserved and that nobody has.
    #[must_use]
    pub fn unused_bytes(&self) -> u64 {
        let inner = self.lock();
        let mapped = inner.blocks.len() * (HUGE_PAGE / self.piece_bytes);
        let used = mapped - inner.free.len();
        (inner.reserved.saturating_sub(used) * self.piece_bytes) as u64
    }

    fn give_back(&self, piece: usize) {
        let each = HUGE_PAGE / self.piece_bytes;
        let mut inner = self.lock();
        inner.free.insert(piece);
        let first = piece / each * each;
        if each > 1 && inner.free.range(first..first + each).count() == each {
            let Some(block) = inner.blocks.get_mut(piece / each) else { return };
            block.epoch.0 += 1;
            block.memory.empty();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change leaves it whole: a block is pushed before its pieces are free, and has a new epoch before
        // it is emptied.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of a pool, its holder's alone until it is dropped.
#[derive(Debug)]
pub struct Lease {
    pool: Arc<BufferPool>,
    piece: usize,
    base: NonNull<u8>,
    epoch: Epoch,
}

// SAFETY: the bytes are the lease's alone, as those of a `Box<[u8]>` are; nothing about them is bound to
// a thread.
unsafe impl Send for Lease {}
// SAFETY: shared access only reads.
unsafe impl Sync for Lease {}

impl Lease {
    /// Whose it is.
    #[must_use]
    pub const fn pool(&self) -> &Arc<BufferPool> {
        &self.pool
    }

    /// Its number in the pool.
    #[must_use]
    pub const fn piece(&self) -> usize {
        self.piece
    }

    /// Which memory it is at its address.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pool.piece_bytes
    }

    /// Never.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Its bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `base` is the first of `piece_bytes` bytes of a mapping that lives as long as the pool,
        // which `self` keeps; anonymous memory is initialised. The piece is out of the free set until
        // `self` is dropped, so no other lease names these bytes, the pool itself never looks at them, and
        // their block is not emptied.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len()) }
    }

    /// Its bytes, to be written.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len()) }
    }

    /// For bytes that the kernel may still write when nobody hears of it any more.
    pub(crate) fn never_free(self) {
        let _for_ever = ManuallyDrop::new(self);
    }

    pub(crate) const fn as_mut_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.give_back(self.piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_their_holders_alone_and_the_lowest_go_first() {
        let pool = BufferPool::new(1 << 20).expect("two in a block");
        assert!(pool.take().is_none(), "nothing is reserved");
        pool.reserve(1).expect("2 MiB");
        pool.reserve(2).expect("2 MiB");
        let mut leases: Vec<Lease> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(leases.len(), 4, "whole blocks are mapped");
        assert_eq!((pool.untouched_bytes(), pool.unused_bytes()), (0, 0));
        for (n, lease) in (0..).zip(&mut leases) {
            lease.as_mut_slice().fill(n);
        }
        for (n, lease) in (0..).zip(&leases) {
            assert!(lease.as_slice().iter().all(|&byte| byte == n), "piece {n}");
        }
        let second = leases.swap_remove(1).as_slice().as_ptr();
        drop(leases);
        let (_first, again) = (pool.take(), pool.take().expect("free"));
        assert_eq!(again.as_slice().as_ptr(), second);
    }

    #[test]
    fn nothing_is_touched_before_it_is_taken() {
        let pool = BufferPool::new(HUGE_PAGE).expect("one in a block");
        pool.reserve(3).expect("6 MiB");
        let lease = pool.take().expect("reserved");
        assert_eq!(pool.untouched_bytes(), 4 << 20);
        assert!(!is_present(&lease));
    }

    fn is_present(lease: &Lease) -> bool {
        let at = crate::uffd::bytes(lease.as_slice().as_ptr().expose_provenance());
        let map = crate::memory::Pagemap::open(std::process::id().cast_signed()).expect("own");
        let mut entry = [crate::memory::PageEntry::default()];
        map.read(at, &mut entry).expect("read");
        entry[0].present()
    }

    #[test]
    fn a_block_that_nobody_uses_any_more_is_emptied() {
        let pool = BufferPool::new(1 << 20).expect("two in a block");
        pool.reserve(2).expect("2 MiB");
        let (mut one, mut other) = (pool.take().expect("one"), pool.take().expect("two"));
        one.as_mut_slice().fill(7);
        other.as_mut_slice().fill(7);
        let epoch = one.epoch();
        drop(one);
        let one = pool.take().expect("again");
        assert!(is_present(&one) && one.epoch() == epoch, "the other one is in use");
        drop((one, other));
        let one = pool.take().expect("again");
        assert!(!is_present(&one) && one.epoch() != epoch);
        assert!(one.as_slice().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn what_is_released_serves_the_next() {
        let pool = BufferPool::new(64 << 10).expect("32 in a block");
        for _ in 0..100 {
            pool.reserve(16).expect("mapped once");
            pool.release(16);
        }
        let pieces: Vec<Lease> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(pieces.len(), 32);
        assert!(BufferPool::new(0).is_err() && BufferPool::new(3 << 20).is_err());
    }
}
