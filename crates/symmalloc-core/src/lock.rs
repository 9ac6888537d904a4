//! How an allocator guards its heaps: a kind of lock, chosen by a type parameter.
//!
//! One program text serves both ways of driving an allocator. With [`Exclusive`] one thread owns it, and a lock is a
//! flag that is checked and set; with [`Shared`] many threads use it, and every heap has a mutex of its own, so threads
//! that drive different streams meet no lock in common on the way through `allocate` and `free`. A test that explores
//! interleavings brings a third kind.
//!
//! The mutex of [`Shared`] is a [`BiasedLock`]: a heap is entered millions of times a second, nearly always by the thread that
//! drives its stream, for a few dozen nanoseconds. That thread enters and leaves with plain stores. When another thread
//! comes, the lock is a spin lock for as long as they take turns.

use crate::held::{HeapCell, HeapRef, Keepsake};
use crate::tally::{ExclusiveTally, Tally};
use std::cell::{RefCell, RefMut};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::DerefMut;
use std::sync::Arc;
use symmalloc_lock::{BiasedMutex, BiasedMutexGuard};

/// A kind of lock.
pub trait Lock: Debug + Sized + 'static {
    /// Whether only one thread can use the allocator.
    const IS_EXCLUSIVE: bool;
    /// What counts usage over all heaps.
    type Tally: Tally;
    /// The lock around a `T`.
    type Cell<T>: LockCell<T>;
    /// What lies beside each heap under its lock, for whoever owns the allocator.
    type Keepsake: Keepsake;
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

    /// Locks if that takes no waiting.
    fn try_lock(&self) -> Option<Self::Guard<'_>>;
}

/// One thread drives the allocator.
#[derive(Clone, Copy, Debug)]
pub enum Exclusive {}

impl Lock for Exclusive {
    const IS_EXCLUSIVE: bool = true;
    type Tally = ExclusiveTally;
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

    #[inline]
    fn try_lock(&self) -> Option<RefMut<'_, T>> {
        self.try_borrow_mut().ok()
    }
}

/// Many threads drive the allocator. Beside each heap lies a `K`.
#[derive(Clone, Copy, Debug)]
pub struct Shared<K = ()>(PhantomData<K>);

impl<K: Keepsake> Lock for Shared<K> {
    const IS_EXCLUSIVE: bool = false;
    type Tally = ();
    type Cell<T> = BiasedLock<T>;
    type Keepsake = K;
    type HeapRef = &'static HeapCell<Self>;
}

/// A [`BiasedMutex`] that fills whole pairs of cache lines: processors fetch lines in pairs, and threads that use different
/// locks must not take them from each other.
#[derive(Debug)]
#[repr(align(128))]
pub struct BiasedLock<T>(BiasedMutex<T>);

impl<T> LockCell<T> for BiasedLock<T> {
    type Guard<'a>
        = BiasedMutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        BiasedLock(BiasedMutex::new(value))
    }

    /// A panic under the lock is a failed assertion about this heap. Others still learn what they can (and Drop must not
    /// panic); the next assertion on the way stops whoever meets the damage.
    #[inline]
    fn lock(&self) -> BiasedMutexGuard<'_, T> {
        self.0.lock()
    }

    #[inline]
    fn try_lock(&self) -> Option<BiasedMutexGuard<'_, T>> {
        self.0.try_lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_share_no_pair_of_cache_lines() {
        assert_eq!((align_of::<BiasedLock<u8>>(), size_of::<BiasedLock<u8>>()), (128, 128));
    }
}
