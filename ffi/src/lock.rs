//! A lock that malloc and fork can live with.
//!
//! `std::sync::Mutex` has no answer to two questions that an allocator is asked: "does this very
//! thread hold it already?" (our own code allocates, and a signal handler may), and "may the thread
//! that forks keep it across the fork and give it back on both sides?". This one knows its owner, and
//! does so from the very instruction that takes it: a signal handler may come behind each. And it can be
//! dead: a raw `clone` copies one thread and every lock, also those that other threads are inside.
//! It allocates nothing and uses no thread-local storage of ours, whose set-up may itself allocate.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Nobody is inside.
const FREE: usize = 0;
/// Beside the holder's key: somebody sleeps. Keys are addresses of threads' control blocks, and even.
const CONTENDED: usize = 1;

/// In the place of a key: whoever was inside stayed behind in the process of which this is a copy, and the data may
/// be half changed. Nobody enters for good, as if each were inside already.
const DEAD: usize = usize::MAX & !CONTENDED;

/// Tells threads apart; never zero. A forked child's thread has the key of the thread that forked.
#[must_use]
pub fn thread_key() -> usize {
    // SAFETY: pthread_self has no preconditions.
    let key = unsafe { libc::pthread_self() };
    usize::try_from(key).unwrap_or(usize::MAX)
}

/// Data behind a lock.
pub struct Guarded<T> {
    /// Key of the holder, or [`FREE`].
    word: AtomicUsize,
    /// The holder is between the two halves of a fork: the data is whole, and the holder may enter.
    across_fork: AtomicBool,
    /// Forks that the holder is in the middle of: a signal handler that interrupts one may fork too. Only the
    /// holder reads and changes it.
    forks: AtomicUsize,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached only through `Entered`, of which one exists at a time (see `enter`).
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> std::fmt::Debug for Guarded<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guarded").finish_non_exhaustive()
    }
}

/// The right to use the data.
pub struct Entered<'a, T> {
    lock: &'a Guarded<T>,
    /// False for an entry between the two halves of a fork.
    releases: bool,
}

impl<T> std::fmt::Debug for Entered<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entered").finish_non_exhaustive()
    }
}

impl<T> Guarded<T> {
    /// Puts `data` behind a lock.
    pub const fn new(data: T) -> Self {
        Self {
            word: AtomicUsize::new(FREE),
            across_fork: AtomicBool::new(false),
            forks: AtomicUsize::new(0),
            data: UnsafeCell::new(data),
        }
    }

    /// Whether this thread is inside, or as if it were, and so gets no entry.
    pub fn is_inside(&self) -> bool {
        let key = thread_key();
        if self.is_held_by(key) {
            return !self.across_fork.load(Ordering::Relaxed);
        }
        self.is_dead()
    }

    /// Waits for the lock. `None` if this thread is already inside, or whoever is has not come along into this
    /// process: the caller does without.
    pub fn enter(&self) -> Option<Entered<'_, T>> {
        let key = thread_key();
        if self.is_held_by(key) {
            // Only this thread stores this key, so what it reads here is its own doing.
            if self.across_fork.load(Ordering::Relaxed) {
                // One entry at a time also here: a nested one finds the flag down.
                self.across_fork.store(false, Ordering::Relaxed);
                return Some(Entered { lock: self, releases: false });
            }
            return None;
        }
        self.enter_free(self.acquire(key))
    }

    /// Takes the lock if that needs no sleep. `None`: somebody is inside.
    pub fn try_enter(&self) -> Option<Entered<'_, T>> {
        let key = thread_key();
        if self.is_held_by(key) {
            return self.enter();
        }
        self.enter_free(self.spin(key))
    }

    fn enter_free(&self, is_taken: bool) -> Option<Entered<'_, T>> {
        // Made only where the lock was taken: dropped, an entry releases it, whoever holds it.
        is_taken.then(|| Entered { lock: self, releases: true })
    }

    /// First half of a fork: takes the lock and keeps it. A thread that is inside already (a fork in
    /// a signal handler), or that finds the lock dead, goes on without: its child must not use the data. One that a signal handler has
    /// interrupted in the middle of a fork has it already, and keeps it until the outer fork ends.
    ///
    /// Gives whether the lock is kept across this fork.
    pub fn hold_for_fork(&self) -> bool {
        let key = thread_key();
        if !self.is_held_by(key) {
            if !self.acquire(key) {
                return false;
            }
            // The handler of a signal that comes before the second of these is refused as one inside.
            self.forks.store(1, Ordering::Relaxed);
            self.across_fork.store(true, Ordering::Release);
            return true;
        }
        let is_whole = self.across_fork.load(Ordering::Relaxed);
        if is_whole {
            self.forks.store(self.forks.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        is_whole
    }

    /// Second half of a fork, in parent and child, also where [`Self::hold_for_fork`] gave false: a signal
    /// handler ends the forks that it began, so a fork that was refused finds the lock as it was then.
    ///
    /// At the end of the outermost fork this gives the entry with which the lock is released.
    pub fn end_fork(&self) -> Option<Entered<'_, T>> {
        if !self.is_across_fork() {
            return None;
        }
        let left = self.forks.load(Ordering::Relaxed) - 1;
        if left > 0 {
            self.forks.store(left, Ordering::Relaxed);
            return None;
        }
        self.across_fork.store(false, Ordering::Relaxed);
        Some(Entered { lock: self, releases: true })
    }

    /// Whether this thread keeps the lock across a fork, and nobody has interrupted it inside.
    #[must_use]
    pub fn is_across_fork(&self) -> bool {
        self.is_held_by(thread_key()) && self.across_fork.load(Ordering::Relaxed)
    }

    fn is_held_by(&self, key: usize) -> bool {
        self.word.load(Ordering::Relaxed) & !CONTENDED == key
    }

    /// False if the lock is dead.
    fn acquire(&self, key: usize) -> bool {
        self.spin(key) || self.sleep(key)
    }

    /// Finds out, at the price of a load, whether whoever is inside can ever leave. In the child of a raw clone
    /// each holder passes for one that stayed behind, also a thread of its own: that one gives the lock back
    /// whole, and it lives again.
    fn is_dead(&self) -> bool {
        let word = self.word.load(Ordering::Relaxed);
        if word & !CONTENDED == DEAD {
            return true;
        }
        let is_left_behind = word != FREE && crate::fds::is_copy();
        is_left_behind
            && self.word.compare_exchange(word, DEAD, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn take(&self, key: usize) -> bool {
        self.word.compare_exchange(FREE, key, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Most holders are out again in less time than it takes to fall asleep.
    fn spin(&self, key: usize) -> bool {
        self.take(key)
            || (0..100).any(|_| {
                std::hint::spin_loop();
                self.word.load(Ordering::Relaxed) == FREE && self.take(key)
            })
    }

    /// False if the lock is dead.
    #[cold]
    fn sleep(&self, key: usize) -> bool {
        loop {
            if self.is_dead() {
                return false;
            }
            let word = self.word.load(Ordering::Relaxed);
            // Whoever has slept does not know whether others do.
            let wanted = if word == FREE { key | CONTENDED } else { word | CONTENDED };
            let is_set = self
                .word
                .compare_exchange(word, wanted, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
            match (is_set, word) {
                (true, FREE) => return true,
                (true, _) => self.futex(libc::FUTEX_WAIT, half(wanted)),
                (false, _) => {}
            }
        }
    }

    fn release(&self) {
        debug_assert!(
            self.is_held_by(thread_key()) || self.is_held_by(DEAD),
            "only its holder releases a lock"
        );
        if self.word.swap(FREE, Ordering::Release) & CONTENDED != 0 {
            self.futex(libc::FUTEX_WAKE, 1);
        }
    }

    /// On the lower half of the word, where all changes between free and contended show.
    fn futex(&self, operation: i32, value: u32) {
        let at = self.word.as_ptr().cast::<u32>();
        let at = if cfg!(target_endian = "big") { at.wrapping_add(1) } else { at };
        // SAFETY: the word lives as long as `self`; a null timeout means none. Errors (a value that
        // changed, a signal) send the caller round its loop.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                at,
                operation | libc::FUTEX_PRIVATE_FLAG,
                value,
                std::ptr::null::<libc::timespec>(),
            );
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
const fn half(word: usize) -> u32 {
    word as u32
}

impl<T> Deref for Entered<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this entry is the only one: another thread waits for the lock, and this thread
        // gets none while `across_fork` is down.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Entered<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `&mut self` makes this the only reference made from the entry.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Entered<'_, T> {
    fn drop(&mut self) {
        if self.releases {
            self.lock.release();
        } else {
            self.lock.across_fork.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_right_under_contention() {
        let lock = Guarded::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        *lock.enter().expect("not inside") += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.enter().expect("not inside"), 40_000);
    }

    #[test]
    fn who_does_not_want_to_wait_does_not() {
        let lock = Guarded::new(());
        let inside = lock.enter().expect("free");
        assert!(lock.try_enter().is_none(), "the holder itself");
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let turned_away = scope.spawn(|| lock.try_enter().is_none());
                assert!(turned_away.join().expect("no panic"), "the lock is held all the same");
            }
        });
        assert!(lock.is_inside());
        drop(inside);
        drop(lock.try_enter().expect("free"));
        drop(lock.enter().expect("free again"));
    }

    /// A raw clone copies the lock, and not the thread inside.
    #[test]
    fn nobody_waits_for_a_thread_that_stayed_behind() {
        crate::fds::settle();
        let (lock, other) = (Guarded::new(()), Guarded::new(()));
        std::thread::scope(|scope| {
            let (inside, is_inside) = std::sync::mpsc::channel();
            let (leave, may_leave) = std::sync::mpsc::channel::<()>();
            let lock = &lock;
            scope.spawn(move || {
                let _entered = lock.enter().expect("free");
                inside.send(()).expect("it is waited for");
                let _left = may_leave.recv();
            });
            is_inside.recv().expect("a thread inside");
            // SAFETY: the child makes system calls only.
            let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            if child == 0 {
                // SAFETY: ends the child where it waits for ever.
                unsafe { libc::alarm(20) };
                // As one that connects anew: the thread inside is not here for that.
                crate::fds::settle();
                let as_it_should_be = [
                    !lock.hold_for_fork(),
                    lock.enter().is_none(),
                    lock.try_enter().is_none(),
                    lock.is_inside(),
                    !other.is_inside(),
                    other.enter().is_some(),
                ];
                let wrong = as_it_should_be.iter().position(|is_right| !is_right);
                // SAFETY: ends the child.
                unsafe { libc::_exit(wrong.map_or(0, |at| 2 + i32::try_from(at).unwrap_or(0))) };
            }
            let mut status = 0;
            let child = i32::try_from(child).expect("a pid");
            // SAFETY: waitpid writes one int.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "14: it waited");
            leave.send(()).expect("it waits");
        });
        assert!(lock.enter().is_some(), "it is the child's alone that is dead");
    }

    #[test]
    fn the_holder_is_turned_away_but_not_between_the_halves_of_a_fork() {
        let lock = Guarded::new(());
        let inside = lock.enter().expect("free");
        assert!(lock.enter().is_none());
        assert!(!lock.hold_for_fork());
        drop(inside);

        assert!(lock.hold_for_fork());
        let inside = lock.enter().expect("whole between the halves");
        assert!(lock.enter().is_none());
        drop(inside);
        drop(lock.enter().expect("again"));
        drop(lock.end_fork().expect("the outermost"));
        drop(lock.enter().expect("free"));
    }

    fn is_free(lock: &Guarded<()>) -> bool {
        std::thread::scope(|scope| {
            scope.spawn(|| lock.try_enter().is_some()).join().expect("no panic")
        })
    }

    #[test]
    fn a_fork_that_interrupts_another_leaves_the_lock_to_that() {
        let lock = Guarded::new(());
        assert!(lock.hold_for_fork());
        for _ in 0..2 {
            assert!(lock.hold_for_fork(), "whole in the middle of a fork");
            assert!(lock.hold_for_fork(), "and of two");
            drop(lock.enter().expect("whole"));
            assert!(lock.end_fork().is_none() && lock.end_fork().is_none());
            assert!(lock.is_across_fork() && !is_free(&lock));
        }
        let inside = lock.enter().expect("whole");
        assert!(!lock.hold_for_fork(), "it is being changed");
        assert!(lock.end_fork().is_none(), "what was refused ends nothing");
        drop(inside);
        let ended = lock.end_fork().expect("the outermost");
        assert!(!lock.hold_for_fork() && !is_free(&lock));
        assert!(lock.end_fork().is_none());
        drop(ended);
        assert!(is_free(&lock) && lock.end_fork().is_none());
        let inside = lock.enter().expect("free");
        assert!(!lock.hold_for_fork() && lock.end_fork().is_none());
        drop(inside);
        assert!(is_free(&lock));
    }
}
