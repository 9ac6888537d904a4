//! How an allocator guards its heaps: a kind of lock, chosen by a type parameter.
//!
//! One program text serves both ways of driving an allocator. With [`Exclusive`] one thread owns it, and a lock is a
//! flag that is checked and set; with [`Shared`] many threads use it, and every heap has a mutex of its own, so threads
//! that drive different streams meet no lock in common on the way through `allocate` and `free`. A test that explores
//! interleavings brings a third kind.
//!
//! The mutex of [`Shared`] is a [`SpinLock`]: one atomic exchange to enter, a plain store to leave. A heap is entered millions
//! of times a second, nearly always by the thread that drives its stream, for a few dozen nanoseconds; a mutex of the
//! operating system takes a second exchange to leave, in case somebody sleeps on it.
//!
//! ```text
//!  enter ── free? ── exchange ──► inside ── store ──► free
//!             │ no                    ▲
//!             └─ spin ─ yield ─ sleep ┘      whoever waits looks again, in longer and longer turns
//! ```

use crate::held::{HeapCell, HeapRef, Keepsake};
use spin::mutex::{SpinMutex, SpinMutexGuard};
use std::cell::{RefCell, RefMut};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;
use std::{hint, thread};

/// A kind of lock.
pub trait Lock: Debug + Sized + 'static {
    /// Whether only one thread can use the allocator, so that totals over all heaps can be kept exactly for nothing.
    const IS_EXCLUSIVE: bool;
    /// The lock around a `T`.
    type Cell<T>: LockCell<T>;
    /// What lies beside each heap under its lock, for whoever owns the allocator.
    type Keepsake: Debug + Default;
    /// How a heap is held.
    type HeapRef: HeapRef<Self>;
}

/// Access to a `T` behind a lock of this kind.
pub(crate) type Guard<'a, L, T> = <<L as Lock>::Cell<T> as LockCell<T>>::Guard<'a>;

/// A `T` behind a lock.
pub trait LockCell<T> {
    /// Access to the `T` for as long as it lives.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a;

    /// Puts a `T` behind a lock.
    fn new(value: T) -> Self;

    /// Locks. The allocator never locks twice in one thread.
    ///
    /// # Panics
    /// When the same thread holds this lock already and it is [`Exclusive`]'s. With [`Shared`] that thread waits for itself,
    /// for ever.
    fn lock(&self) -> Self::Guard<'_>;
}

/// One thread drives the allocator.
#[derive(Clone, Copy, Debug)]
pub enum Exclusive {}

impl Lock for Exclusive {
    const IS_EXCLUSIVE: bool = true;
    type Cell<T> = RefCell<T>;
    type Keepsake = ();
    type HeapRef = Arc<HeapCell<Self>>;
}

impl<T> LockCell<T> for RefCell<T> {
    type Guard<'a>
        = RefMut<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        RefCell::new(value)
    }

    #[inline]
    fn lock(&self) -> RefMut<'_, T> {
        self.borrow_mut()
    }
}

/// Many threads drive the allocator. Beside each heap lies a `K`.
#[derive(Clone, Copy, Debug)]
pub struct Shared<K = ()>(PhantomData<K>);

impl<K: Keepsake> Lock for Shared<K> {
    const IS_EXCLUSIVE: bool = false;
    type Cell<T> = SpinLock<T>;
    type Keepsake = K;
    type HeapRef = &'static HeapCell<Self>;
}

/// A mutex for short stays. No fairness is promised, and a panic inside leaves it free.
///
/// It fills whole pairs of cache lines: processors fetch lines in pairs, and threads that use different locks must not
/// take them from each other.
#[derive(Debug)]
#[repr(align(128))]
pub struct SpinLock<T>(SpinMutex<T>);

/// How often a thread looks again without letting another one run, and then how often in between. Whoever is inside for
/// longer than that calls the driver, or lost its processor.
const SPINS: u32 = 200;
const YIELDS: u32 = 20;
/// How long a thread sleeps then, at first and at most: mapping memory takes tens of microseconds.
const SLEEP: Duration = Duration::from_micros(20);
const SLEEP_MAX: Duration = Duration::from_millis(1);

impl<T> SpinLock<T> {
    #[cold]
    #[inline(never)]
    #[allow(clippy::disallowed_methods, reason = "time decides when a waiting thread looks again, and nothing else")]
    fn wait(&self) -> SpinMutexGuard<'_, T> {
        let mut sleep = SLEEP;
        for turn in 0_u32.. {
            if let Some(guard) = self.0.try_lock() {
                return guard;
            }
            if turn < SPINS {
                hint::spin_loop();
            } else if turn < SPINS + YIELDS {
                thread::yield_now();
            } else {
                thread::sleep(sleep);
                sleep = SLEEP_MAX.min(2 * sleep);
            }
        }
        unreachable!("four billion turns take two months")
    }
}

impl<T> LockCell<T> for SpinLock<T> {
    type Guard<'a>
        = SpinMutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        SpinLock(SpinMutex::new(value))
    }

    /// A panic under the lock is a failed assertion about this heap. Others still learn what they can (and Drop must not
    /// panic); the next assertion on the way stops whoever meets the damage.
    #[inline]
    fn lock(&self) -> SpinMutexGuard<'_, T> {
        match self.0.try_lock() {
            Some(guard) => guard,
            None => self.wait(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_lets_one_in_at_a_time_however_long_each_stays() {
        let lock = SpinLock::new((0, 0));
        thread::scope(|scope| {
            for thread in 0..4 {
                let lock = &lock;
                scope.spawn(move || {
                    for turn in 0..50 {
                        let mut inside = lock.lock();
                        inside.0 += 1;
                        if (turn + thread) % 25 == 0 {
                            (0..1000).for_each(|_| thread::yield_now());
                        }
                        inside.1 += 1;
                        assert_eq!(inside.0, inside.1);
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (200, 200));
    }

    #[test]
    fn a_panic_inside_leaves_a_lock_free() {
        let lock = SpinLock::new(1);
        thread::scope(|scope| {
            let panicked = scope.spawn(|| {
                let _inside = lock.lock();
                panic!("on purpose");
            });
            assert!(panicked.join().is_err());
        });
        assert_eq!(*lock.lock(), 1);
    }

    #[test]
    fn locks_share_no_pair_of_cache_lines() {
        assert_eq!((align_of::<SpinLock<u8>>(), size_of::<SpinLock<u8>>()), (128, 128));
    }
}
