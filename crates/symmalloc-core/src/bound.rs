//! Bound heaps: the heap of (pool, stream), found once and used many times.
//!
//! A runtime drives few streams and allocates for each of them again and again. [`Allocator::bind`] finds the heap that
//! serves a stream in a pool; a [`BoundHeap`] then allocates and frees without looking for it. Both ways lead to the same
//! heap and mix freely: what is decided, counted and folded into digests is the same.
//!
//! A [`BoundHeap`] borrows the allocator. Whoever owns the allocator as well, and so cannot borrow it, keeps a [`Binding`]
//! and shows it with each call.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::errors::{AllocateError, FreeError, UnknownError};
use crate::handle::{Allocation, Handle};
use crate::ids::{HeapId, PoolId, StreamId};
use crate::lock::{Exclusive, Lock};
use crate::routes::Route;
use std::fmt;

/// The heap that serves a stream in a pool, for programs that allocate from it often. Keep one beside each stream, and a
/// copy in whatever frees.
///
/// # Determinism
/// As through the [`Allocator`]: binding is no op, and leaves no trace in a digest.
///
/// # Examples
/// ```
/// use symmalloc_core::{Allocator, Config, PoolId};
/// use symmalloc_sim::SimBackend;
///
/// let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), Config::default())?;
/// let stream = allocator.register_stream()?;
/// let heap = allocator.bind(PoolId::DEFAULT, stream)?;
/// let a = heap.allocate(3 << 20)?;
/// heap.free(a.handle)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BoundHeap<'a, B: Backend, L: Lock = Exclusive> {
    route: Route<'a, B, L>,
    id: HeapId,
}

/// What a [`BoundHeap`] knows, for those who cannot borrow the allocator: see [`Allocator::binding`].
pub struct Binding<L: Lock = Exclusive> {
    pub(crate) heap: L::HeapRef,
    pub(crate) id: HeapId,
    pool: PoolId,
    stream: StreamId,
    /// The allocator's number.
    pub(crate) owner: u16,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// As [`bind`](Self::bind), without borrowing the allocator.
    ///
    /// # Errors
    /// When the pool or the stream is unknown.
    pub fn binding(&self, pool: PoolId, stream: StreamId) -> Result<Binding<L>, UnknownError> {
        let (entry, _) = self.route_or_make(pool, stream)?;
        let heap = entry.routes.get(entry.route_index(stream)).expect("it is made");
        let id = heap.lock().id;
        Ok(Binding { heap: heap.clone(), id, pool, stream, owner: self.owner })
    }

    /// As [`allocate`](Self::allocate) for the binding's pool and stream.
    ///
    /// # Errors
    /// As [`BoundHeap::allocate`].
    ///
    /// # Panics
    /// When the binding is another allocator's.
    #[inline(never)]
    pub fn allocate_in(&self, binding: &Binding<L>, size_bytes: u64) -> Result<Allocation, AllocateError> {
        self.route_of(binding).allocate(size_bytes)
    }

    /// Does something with what is [kept beside the heap](crate::held).
    ///
    /// # Panics
    /// When the binding is another allocator's.
    pub fn with_keepsake<R>(&self, binding: &Binding<L>, visit: impl FnOnce(&mut L::Keepsake) -> R) -> R {
        visit(&mut self.route_of(binding).heap.lock().keepsake)
    }

    /// Lets threads that free through an [`Entrance`](crate::Entrance) of the heap leave their frees there from now on, when
    /// they would have to wait. Whoever enters the heap next, in whatever call, carries them out first: for everybody who
    /// comes after the thread that left it, the memory is free.
    ///
    /// The heap has one stream and nothing to note of frees (no journal, look-up by pointer, release threshold, or name at
    /// present), and is not recorded; else nothing is left there. Mail that was closed stays closed:
    /// by [`close_mail`](Self::close_mail), by [`record_use`](Self::record_use) of an allocation of the heap, or because a
    /// recording began.
    ///
    /// What came with a free that is left keeps the allocator alive, for as long as nobody enters the heap: close the mail
    /// before the last hold on the allocator goes.
    ///
    /// # Panics
    /// When the binding is another allocator's.
    pub fn open_mail(&self, binding: &Binding<L>) {
        let cell = self.route_of(binding).heap;
        let heap = cell.lock();
        if !heap.keeps_books && !heap.is_recorded {
            cell.mail.open();
        }
    }

    /// No frees are left for the binding's heap any more: threads wait. What was left is done by the next call that enters
    /// the heap.
    ///
    /// # Panics
    /// When the binding is another allocator's.
    pub fn close_mail(&self, binding: &Binding<L>) {
        self.route_of(binding).heap.mail.close();
    }

    /// As [`free`](Self::free), the shorter way when the allocation is of the binding's heap.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    ///
    /// # Panics
    /// When the binding is another allocator's.
    #[inline(never)]
    pub fn free_in(&self, binding: &Binding<L>, handle: Handle) -> Result<(), FreeError> {
        let Route { heap, .. } = self.route_of(binding);
        if handle.heap() == binding.id { self.free_from(heap, handle) } else { self.free_elsewhere(handle) }
    }

    /// Frees an allocation of another heap than the bound one.
    #[cold]
    #[inline(never)]
    fn free_elsewhere(&self, handle: Handle) -> Result<(), FreeError> {
        self.free(handle)
    }

    #[inline(always)]
    fn route_of<'a>(&'a self, binding: &'a Binding<L>) -> Route<'a, B, L> {
        assert!(binding.owner == self.owner, "a binding of another allocator");
        let &Binding { ref heap, pool, stream, .. } = binding;
        Route { allocator: self, heap, pool, stream }
    }

    /// Finds the heap that serves a stream in a pool, and makes it if this is the first request.
    ///
    /// # Errors
    /// When the pool or the stream is unknown.
    pub fn bind(&self, pool: PoolId, stream: StreamId) -> Result<BoundHeap<'_, B, L>, UnknownError> {
        let (_, heap) = self.route_or_make(pool, stream)?;
        let id = heap.lock().id;
        Ok(BoundHeap { route: Route { allocator: self, heap, pool, stream }, id })
    }
}

impl<B: Backend, L: Lock> BoundHeap<'_, B, L> {
    /// As [`Allocator::allocate`] for this pool and stream.
    ///
    /// # Errors
    /// See [`AllocateError`]; nothing is allocated then. After the pool was destroyed, it is unknown.
    #[inline(never)]
    pub fn allocate(&self, size_bytes: u64) -> Result<Allocation, AllocateError> {
        self.route.allocate(size_bytes)
    }

    /// As [`Allocator::free`]. An allocation of another heap of the same allocator is freed as well, the longer way.
    ///
    /// # Errors
    /// When the handle is not live here, or the driver cannot fence the uses; the allocation is still live then.
    #[inline(never)]
    pub fn free(&self, handle: Handle) -> Result<(), FreeError> {
        let Route { allocator, heap, .. } = self.route;
        if handle.heap() == self.id { allocator.free_from(heap, handle) } else { allocator.free_elsewhere(handle) }
    }

    #[inline(always)]
    pub(crate) fn route(&self) -> &Route<'_, B, L> {
        &self.route
    }

    /// The pool that it allocates from.
    pub fn pool(&self) -> PoolId {
        self.route.pool
    }

    /// The stream that it allocates for.
    pub fn stream(&self) -> StreamId {
        self.route.stream
    }
}

impl<B: Backend, L: Lock> Clone for BoundHeap<'_, B, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, L: Lock> Copy for BoundHeap<'_, B, L> {}

impl<L: Lock> Binding<L> {
    /// The pool that it allocates from.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// The stream that it allocates for.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl<L: Lock> fmt::Debug for Binding<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Binding").field("pool", &self.pool).field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl<B: Backend, L: Lock> fmt::Debug for BoundHeap<'_, B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundHeap").field("pool", &self.pool()).field("stream", &self.stream()).finish_non_exhaustive()
    }
}
