//! How an allocator guards its heaps: a kind of lock, chosen by a type parameter.
//!
//! One program text serves both ways of driving an allocator. With [`Exclusive`] one thread owns it, and a lock is a
//! flag that is checked and set; with [`Shared`] many threads use it, and every heap has a mutex of its own, so threads
//! that drive different streams meet no lock in common on the way through `allocate` and `free`. A test that explores
//! interleavings brings a third kind.

use std::cell::{RefCell, RefMut};
use std::fmt::Debug;
use std::ops::DerefMut;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A kind of lock.
pub trait Lock: Debug + 'static {
    /// Whether only one thread can use the allocator, so that totals over all heaps can be kept exactly for nothing.
    const IS_EXCLUSIVE: bool;
    /// The lock around a `T`.
    type Cell<T>: LockCell<T>;
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

    /// Locks.
    ///
    /// # Panics
    /// When the same thread holds this lock already: the allocator never does that.
    fn lock(&self) -> Self::Guard<'_>;
}

/// One thread drives the allocator.
#[derive(Clone, Copy, Debug)]
pub enum Exclusive {}

impl Lock for Exclusive {
    const IS_EXCLUSIVE: bool = true;
    type Cell<T> = RefCell<T>;
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

/// Many threads drive the allocator.
#[derive(Clone, Copy, Debug)]
pub enum Shared {}

impl Lock for Shared {
    const IS_EXCLUSIVE: bool = false;
    type Cell<T> = Mutex<T>;
}

impl<T> LockCell<T> for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        Mutex::new(value)
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, T> {
        // A panic under the lock is a failed assertion about this heap. Others still learn what they can (and Drop
        // must not panic); the next assertion on the way stops whoever meets the damage.
        Mutex::lock(self).unwrap_or_else(PoisonError::into_inner)
    }
}
