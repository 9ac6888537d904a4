//! Spares: lanes that no buffer holds just now, beside the heap that they lead to.
//!
//! A buffer holds its lane, and the lane holds the allocator. Counting that atomically takes two locked instructions for each
//! buffer, where entering the heap takes none while one thread does. So it is rarely counted: the lane of a buffer that is
//! dropped goes to the spares of its heap, and the next buffer takes it from there. Both are under the heap's lock, which is
//! held anyway.
//!
//! ```text
//!  alloc   lock ─ block out of the heap ─ lane out of the spares ─ leave        none there: the lane is counted
//!  drop    lock ─ block into the heap  ─ lane into the spares  ─ leave        no room: the lane is counted down
//! ```
//!
//! A spare lane keeps the allocator alive, and the allocator the heap with its spares. So there are spares only while a
//! [`Lease`](crate::pool::Lease) of the pool lives: it opens them for a lane that it keeps, and closes them when it is
//! dropped. Where the streams of a pool share a heap, it has several lanes and no spares.

use crate::allocator::DropError;
use crate::backend::CudaMemory;
use crate::lane::Lane;
use std::fmt;
use std::mem;
use std::sync::Arc;
use symmalloc_core::held::{Heap, Keepsake, Vacant};
use symmalloc_core::lock::Shared;
use symmalloc_core::{Allocator, Handle};

/// Lanes that are kept per heap, a word of the host's memory each. A buffer that is dropped beyond them counts.
const SPARES_MAX: usize = 4096;

/// What the core keeps beside each heap of a [`CachingAllocator`](crate::CachingAllocator). All lanes in it are of one (pool,
/// stream). There is room for 4,096 while it is open, and for none while it is closed.
pub struct Spares<B: CudaMemory>(Vec<Arc<Lane<B>>>);

/// The kind of lock of a [`CachingAllocator`](crate::CachingAllocator)'s core.
pub type CoreLock<B> = Shared<Spares<B>>;

/// The core of a [`CachingAllocator`](crate::CachingAllocator): a [`SharedAllocator`](symmalloc_core::SharedAllocator) that
/// keeps [`Spares`] beside its heaps.
pub type CoreAllocator<B> = Allocator<B, CoreLock<B>>;

impl<B: CudaMemory> Spares<B> {
    /// Makes room.
    pub(crate) fn open(&mut self) {
        if self.0.capacity() == 0 {
            self.0 = Vec::with_capacity(SPARES_MAX);
        }
    }

    /// Leaves no room, and returns what was there: to be dropped when the heap's lock is left, as the allocator may go with
    /// it.
    #[must_use]
    pub(crate) fn close(&mut self) -> Vec<Arc<Lane<B>>> {
        mem::take(&mut self.0)
    }

    /// A lane, if there is one.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Option<Arc<Lane<B>>> {
        self.0.pop()
    }
}

impl<B: CudaMemory> Keepsake for Spares<B> {
    type Held = Arc<Lane<B>>;

    /// Keeps the lane, or returns it if there is no room.
    #[inline(always)]
    fn keep(&mut self, lane: Arc<Lane<B>>) -> Option<Arc<Lane<B>>> {
        if self.0.len() == self.0.capacity() {
            return Some(lane);
        }
        self.0.push(lane);
        None
    }

    fn free_late(lane: &Arc<Lane<B>>, heap: &mut Heap, handle: Handle) {
        if let Err(error) = lane.state.core.free_late(heap, handle) {
            lane.state.note_drop_error(DropError::Free(error));
        }
    }

    fn vacant() -> &'static Vacant<Self> {
        B::vacant()
    }
}

impl<B: CudaMemory> Default for Spares<B> {
    fn default() -> Self {
        Spares(Vec::new())
    }
}

impl<B: CudaMemory> fmt::Debug for Spares<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Spares").field(&self.0.len()).finish()
    }
}
