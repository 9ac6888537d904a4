//! The lock around each heap, chosen by a type parameter.
//!
//! With [`Exclusive`], one thread owns the allocator and a lock is a flag. With [`Shared`], many threads use it and
//! every heap has its own mutex, so threads that drive different streams share no lock in `allocate` and `free`. Tests
//! that explore interleavings of threads supply a third kind of lock.
//!
//! Threads that share a heap hold its lock for less than a microsecond, and take it again soon. Parking and waking a
//! thread takes longer than that, and so does moving the heap's state to another processor. A thread that finds the
//! lock taken therefore pauses before it tries again, each time twice as long. Meanwhile, the other threads take the
//! lock several times.

use parking_lot::{Mutex, MutexGuard};
use std::cell::{RefCell, RefMut};
use std::fmt::Debug;
use std::hint::spin_loop;
use std::ops::DerefMut;

/// The maximum number of pause instructions between two attempts to take a lock: about 50 us on recent Intel
/// processors, less on others.
const PAUSES_BETWEEN: u32 = 1024;
/// The number of pauses after which a waiting thread parks: about a millisecond on the same processors. A lock that is
/// held for so long is held during a slow driver call, such as growth, or by a thread that has no processor.
const PAUSES_MAX: u32 = 20_000;

/// A kind of lock.
pub trait Lock: Debug + Sized + 'static {
    /// `true` if only one thread can use the allocator.
    const IS_EXCLUSIVE: bool;
    /// The lock that guards a `T`.
    type Cell<T>: LockCell<T>;
}

/// Access to a `T` behind a lock of this kind.
pub(crate) type Guard<'a, L, T> = <<L as Lock>::Cell<T> as LockCell<T>>::Guard<'a>;

/// A `T` behind a lock.
#[doc(hidden)]
pub trait LockCell<T> {
    /// A guard: access to the `T` until it is dropped.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a;

    /// Puts a `T` behind a lock.
    fn new(value: T) -> Self;

    /// Acquires the lock. The allocator never acquires a lock that the same thread already holds.
    ///
    /// # Panics
    /// [`Exclusive`]'s lock panics if the same thread already holds it. With [`Shared`], that thread deadlocks.
    fn lock(&self) -> Self::Guard<'_>;
}

/// One thread drives the allocator.
#[derive(Clone, Copy, Debug)]
pub enum Exclusive {}

impl Lock for Exclusive {
    const IS_EXCLUSIVE: bool = true;
    type Cell<T> = UseSharedAllocator<T>;
}

/// A cell for one thread. Its name is chosen for the compiler's error message, because Rust has no way to attach a
/// message to `Sync`. When a program shares an [`Allocator`](crate::Allocator) between threads, the compiler lists the
/// types that prevent it, this one among them: "required because it appears within the type `UseSharedAllocator<...>`".
#[derive(Debug)]
#[doc(hidden)]
pub struct UseSharedAllocator<T>(RefCell<T>);

impl<T> LockCell<T> for UseSharedAllocator<T> {
    type Guard<'a>
        = RefMut<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        UseSharedAllocator(RefCell::new(value))
    }

    #[inline]
    fn lock(&self) -> RefMut<'_, T> {
        self.0.borrow_mut()
    }
}

/// Many threads drive the allocator.
#[derive(Clone, Copy, Debug)]
pub enum Shared {}

impl Lock for Shared {
    const IS_EXCLUSIVE: bool = false;
    type Cell<T> = PaddedMutex<T>;
}

/// A mutex padded to whole pairs of cache lines. Processors fetch lines in pairs, and threads that use different locks
/// must not slow each other down. A panic under the lock does not poison it: other threads can still lock it, and the
/// next assertion stops a thread that finds inconsistent state.
#[derive(Debug)]
#[doc(hidden)]
#[repr(align(128))]
pub struct PaddedMutex<T>(Mutex<T>);

impl<T> LockCell<T> for PaddedMutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        PaddedMutex(Mutex::new(value))
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.try_lock().unwrap_or_else(|| wait_for(&self.0))
    }
}

/// Acquires a lock that another thread holds.
#[cold]
fn wait_for<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    let (mut paused, mut pauses) = (0, 1);
    while paused < PAUSES_MAX {
        (0..pauses).for_each(|_| spin_loop());
        if let Some(guard) = mutex.try_lock() {
            return guard;
        }
        paused += pauses;
        pauses = (2 * pauses).min(PAUSES_BETWEEN);
    }
    mutex.lock()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_long_wait_ends_and_threads_exclude_each_other() {
        const THREADS: u32 = 8;
        const TURNS: u32 = 200;
        let mutex = PaddedMutex::new(0_u32);
        let held = mutex.lock();
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..TURNS {
                        let mut count = mutex.lock();
                        let before = *count;
                        thread::yield_now();
                        *count = before + 1;
                    }
                });
            }
            (0..4 * PAUSES_MAX).for_each(|_| spin_loop());
            drop(held);
        });
        assert_eq!(*mutex.lock(), THREADS * TURNS);
    }
}
