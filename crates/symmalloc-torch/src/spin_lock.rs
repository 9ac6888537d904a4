//! A lock that is held for a few nanoseconds: taking it is one atomic exchange, giving it back a store. A mutex of the system's
//! needs a second exchange, to learn whether anybody sleeps; nobody sleeps here. Who finds it taken spins, and lets other
//! threads run if that takes longer than it should.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// So often a thread looks before it lets others run: longer than the lock is held, if its holder runs.
const SPINS: u32 = 100;

#[derive(Default)]
pub(crate) struct SpinLock<T> {
    is_taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time has the value, which may be sent to it.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    #[inline]
    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        if self.is_taken.swap(true, Ordering::Acquire) {
            self.wait();
        }
        SpinGuard { lock: self, value: PhantomData }
    }

    #[cold]
    fn wait(&self) {
        let mut spins = 0;
        while self.is_taken.load(Ordering::Relaxed) || self.is_taken.swap(true, Ordering::Acquire) {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

/// The lock is taken as long as this lives.
pub(crate) struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
    value: PhantomData<&'a mut T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread took the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread took the lock, and nobody else borrows the guard.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.is_taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn one_thread_at_a_time_has_the_value() {
        let lock = SpinLock::<u64>::default();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| *lock.lock() += 1));
            }
        });
        assert_eq!(*lock.lock(), 40_000);
    }
}
