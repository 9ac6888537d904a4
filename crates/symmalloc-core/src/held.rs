//! How a heap is held: what its lock guards, and what becomes of the lock when the allocator is gone.
//!
//! Beside each heap lies a *keepsake*, under the same lock, of whoever owns the allocator: what belongs to allocations of the
//! heap and changes with them is there for no second lock and no atomic count. The core never looks at it.
//!
//! ```text
//!  HeapCell:  lock │ keepsake │ heap          mail
//! ```
//!
//! Threads that do not wait for the lock leave mail (`mail.rs`), and whoever enters does that first.
//!
//! A keepsake may hold the very thing that keeps the allocator alive. Then a thread that leaves the lock may have left its
//! last hold on the allocator inside, and another thread may end the allocator at that moment. So a lock of [`Shared`]
//! outlives its allocator: it is never given back to the system. It waits, empty, among the [`Vacant`] ones for the next
//! heap, and there are never more of them than there were heaps at a time.

use crate::budget::Budget;
use crate::config::{PointerLookup, PoolConfig};
use crate::handle::Handle;
pub use crate::heap::Heap;
use crate::heap::{Freed, HeapIdentity};
use crate::ids::{HeapId, PoolId};
use crate::lock::{Guard, Lock, LockCell, Shared};
use crate::mail::{Letter, Mail};
use crate::plain::Way;
use crate::units::UNIT_BYTES;
use std::convert::Infallible;
use std::fmt::{self, Debug};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// A heap behind its lock, with its mail.
#[repr(C)]
pub struct HeapCell<L: Lock> {
    cell: L::Cell<Guarded<L>>,
    pub(crate) mail: Mail<Held<L>>,
}

/// What comes with an allocation that is freed.
pub(crate) type Held<L> = <<L as Lock>::Keepsake as Keepsake>::Held;

/// Access to a heap and its keepsake.
pub(crate) type HeapGuard<'a, L> = Guard<'a, L, Guarded<L>>;

impl<L: Lock> HeapCell<L> {
    fn new(guarded: Guarded<L>) -> Self {
        HeapCell { cell: LockCell::new(guarded), mail: Mail::new() }
    }

    /// Enters the heap, and finds its mail done.
    #[inline]
    pub(crate) fn lock(&self) -> HeapGuard<'_, L> {
        let mut guarded = self.cell.lock();
        self.look_for_mail(&mut guarded);
        guarded
    }

    /// As [`lock`](Self::lock), if that takes no waiting.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<HeapGuard<'_, L>> {
        let mut guarded = self.cell.try_lock()?;
        self.look_for_mail(&mut guarded);
        Some(guarded)
    }

    #[inline(always)]
    fn look_for_mail(&self, guarded: &mut Guarded<L>) {
        if !L::IS_EXCLUSIVE && self.mail.is_waiting() {
            self.do_mail(guarded);
        }
    }

    #[cold]
    #[inline(never)]
    fn do_mail(&self, guarded: &mut Guarded<L>) {
        for Letter { handle, held } in self.mail.take() {
            if !matches!(guarded.free_at_hand(handle, |_, _| {}), Freed::Now) {
                L::Keepsake::free_late(&held, &mut guarded.heap, handle);
            }
            // This thread came with a hold of its own on the allocator: what is dropped here is not the last one.
            drop(guarded.keepsake.keep(held));
        }
    }
}

impl<L: Lock> Debug for HeapCell<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapCell").finish_non_exhaustive()
    }
}

/// What a heap's lock guards: the heap, and a keepsake.
// The keepsake lies beside the lock, on a line that whoever enters has anyway.
#[derive(Debug)]
#[repr(C)]
pub struct Guarded<L: Lock> {
    pub(crate) keepsake: L::Keepsake,
    pub(crate) heap: Heap,
}

impl<L: Lock> Guarded<L> {
    pub(crate) fn new(heap: Heap) -> Self {
        Guarded { keepsake: L::Keepsake::default(), heap }
    }

    /// Frees an allocation if that is nothing but to free its block; else nothing has changed. `tally` is told allocated and
    /// requested bytes.
    #[inline(always)]
    pub(crate) fn free_at_hand(&mut self, handle: Handle, tally: impl FnOnce(u64, u64)) -> Freed {
        let heap = &mut self.heap;
        match heap.way {
            Way::Plain => heap.free_at_once(handle, tally),
            _ if heap.is_recorded => Freed::NotYet,
            _ => heap.free_at_once_by_rule(handle, tally),
        }
    }

    /// A heap of no allocator.
    fn vacant() -> Self {
        let identity = HeapIdentity { id: HeapId(u32::MAX), pool: PoolId::DEFAULT, stream: None, owner: 0 };
        let budget = Arc::new(Budget::new(None));
        Self::new(Heap::new(identity, PoolConfig::default(), budget, UNIT_BYTES, PointerLookup::Off))
    }
}

impl<L: Lock> Deref for Guarded<L> {
    type Target = Heap;

    #[inline(always)]
    fn deref(&self) -> &Heap {
        &self.heap
    }
}

impl<L: Lock> DerefMut for Guarded<L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Heap {
        &mut self.heap
    }
}

/// How those who use a heap hold it: in an [`Arc`], or, behind a lock of [`Shared`], by a plain reference.
pub trait HeapRef<L: Lock>: Clone + Debug + Deref<Target = HeapCell<L>> {
    /// Puts a heap behind a lock.
    fn new(guarded: Guarded<L>) -> Self;

    /// The allocator is gone: nobody uses the heap any more.
    fn end(self);
}

impl<L: Lock> HeapRef<L> for Arc<HeapCell<L>> {
    fn new(guarded: Guarded<L>) -> Self {
        Arc::new(HeapCell::new(guarded))
    }

    fn end(self) {}
}

/// Locks without a heap, for the next heaps with such a keepsake.
pub type Vacant<K> = Mutex<Vec<&'static HeapCell<Shared<K>>>>;

/// A keepsake of heaps that many threads use.
pub trait Keepsake: Debug + Default + Send + 'static {
    /// What comes with an allocation that is freed through an [`Entrance`](crate::Entrance), and keeps the allocator alive.
    type Held: Send + 'static;

    /// Keeps it, or returns it.
    fn keep(&mut self, held: Self::Held) -> Option<Self::Held>;

    /// Frees an allocation that another thread left for the heap, and that takes more than its block: with
    /// [`Allocator::free_late`](crate::Allocator::free_late) of the allocator that `held` keeps alive. The heap is locked.
    fn free_late(held: &Self::Held, heap: &mut Heap, handle: Handle);

    /// The process's one list for this type.
    fn vacant() -> &'static Vacant<Self>;
}

/// Nothing is kept.
impl Keepsake for () {
    type Held = Infallible;

    fn keep(&mut self, held: Infallible) -> Option<Infallible> {
        Some(held)
    }

    fn free_late(held: &Infallible, _: &mut Heap, _: Handle) {
        match *held {}
    }

    fn vacant() -> &'static Vacant<()> {
        static VACANT: Vacant<()> = Mutex::new(Vec::new());
        &VACANT
    }
}

impl<K: Keepsake> HeapRef<Shared<K>> for &'static HeapCell<Shared<K>> {
    fn new(guarded: Guarded<Shared<K>>) -> Self {
        let vacant = K::vacant().lock().unwrap_or_else(PoisonError::into_inner).pop();
        match vacant {
            Some(cell) => {
                *cell.lock() = guarded;
                cell.mail.renew();
                cell
            }
            None => Box::leak(Box::new(HeapCell::new(guarded))),
        }
    }

    fn end(self) {
        let ended = std::mem::replace(&mut *self.lock(), Guarded::vacant());
        // What a keepsake drops may be anything: not under the lock, which the line above has left.
        drop(ended);
        K::vacant().lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }
}
