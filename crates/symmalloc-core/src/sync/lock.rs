//! The lock around each heap, chosen by a type parameter.
//!
//! With [`Exclusive`], one thread owns the allocator and a lock is a flag. With [`Shared`], many threads use it and
//! every heap has its own mutex, so threads that drive different streams share no lock in `allocate` and `free`. A test
//! that explores interleavings supplies a third kind.

use parking_lot::{Mutex, MutexGuard};
use std::cell::{RefCell, RefMut};
use std::fmt::Debug;
use std::ops::DerefMut;

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

    /// Acquires the lock. The allocator never locks twice in one thread.
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

/// A cell for one thread, named for the compiler's message. The language has no way to attach a message to `Sync`. When a
/// program shares an [`Allocator`](crate::Allocator) between threads, the compiler lists the types that prevent it, this
/// one among them: "required because it appears within the type `UseSharedAllocator<...>`".
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
        self.0.lock()
    }
}
