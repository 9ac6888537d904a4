//! Restoring a [`Layout`]: the pool becomes what it was when the layout was saved, with the same future.
//!
//! | the pool | what a restore does | what it is for |
//! |---|---|---|
//! | fresh: no op yet | **rejoin**: obtains the segments and makes the saved allocations live | a rank that restarts, on a new device |
//! | used | **rewind**: carves the saved allocations out of what is free again, gives back what was obtained since | a graph tree that goes back |
//!
//! ```text
//!  rewind   saved   │ a │  b  │ free │ c │ free │
//!           now     │ a │      free    │ d │ free │ grown since │        d is not saved: UnknownLive, nothing changes
//!           now     │ a │      free                             │
//!           then    │ a │  b  │ free │ c │ free │
//! ```
//!
//! Everything that can be refused is refused before anything changes. The driver comes after that, and only then the
//! books, which cannot fail. A rejoin that the driver refuses leaves the pool fresh. A rewind cannot undo what it gave
//! back, so a driver that fails in the middle leaves a sound pool that says so in its digests, and can be restored again.
//!
//! The memory of an allocation that is carved again holds whatever was written there since. Who gets it waits for the
//! earlier users on the device, as in `allocate`, and nothing is unmapped before its users are synchronized.

mod error;
mod rejoin;
mod rewind;

pub use error::RestoreError;

use crate::allocator::{Allocator, NO_SLOT};
use crate::backend::Backend;
use crate::block_table::{BlockState, Slot};
use crate::fence::Fence;
use crate::handle::{Allocation, Handle};
use crate::heap::Heap;
use crate::held::HeapCell;
use crate::ids::{Placement, PoolId, StreamId};
use crate::layout::{AllocationLayout, HeapLayout, Layout};
use crate::lock::{Lock, LockCell};
use crate::pool::Pool;
use crate::units::bytes;
use std::borrow::Cow;

/// What a restored pool holds: the handles of a new beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// The pool's heaps, by stream.
    pub heaps: Vec<RestoredHeap>,
}

/// One heap of a [`Restored`] pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoredHeap {
    /// Its stream; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
    /// Stands for every allocation of zero bytes that was live: they have no place by which to find them.
    pub nothing: Handle,
    /// The live allocations, by placement.
    pub allocations: Vec<RestoredAllocation>,
}

/// One live allocation of a [`Restored`] pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoredAllocation {
    /// Its handle, new unless it was live all the time, and where it is.
    pub allocation: Allocation,
    /// The stream it was allocated for.
    pub stream: StreamId,
    /// Bytes that the program asked for.
    pub requested_bytes: u64,
    /// What the program called it.
    pub name: Option<Box<str>>,
}

impl Restored {
    /// The allocation that a stream's work had at a placement.
    pub fn find(&self, stream: StreamId, placement: Placement) -> Option<&RestoredAllocation> {
        let heap = self.heap_of(stream)?;
        let at = heap.allocations.binary_search_by_key(&placement, |restored| restored.allocation.placement).ok()?;
        Some(&heap.allocations[at])
    }

    /// The handle that stands for a stream's allocations of zero bytes.
    pub fn nothing(&self, stream: StreamId) -> Option<Handle> {
        Some(self.heap_of(stream)?.nothing)
    }

    /// All allocations, in (stream, placement) order.
    pub fn allocations(&self) -> impl Iterator<Item = &RestoredAllocation> {
        self.heaps.iter().flat_map(|heap| &heap.allocations)
    }

    fn heap_of(&self, stream: StreamId) -> Option<&RestoredHeap> {
        self.heaps.iter().find(|heap| heap.stream.is_none_or(|own| own == stream))
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Makes a pool what it was when the layout was saved: a fresh one of a restarted rank (*rejoin*), or the same one
    /// later (*rewind*). Register the program's streams first, create its pools, and restore them in the order of their
    /// ids. See the [module documentation](crate::restore).
    ///
    /// Afterwards the pool's digest is the saved one, and the same ops get the same placements, on this rank and on those
    /// that did not restart. Handles of allocations that were live all the time stay valid.
    ///
    /// No other thread may use the pool meanwhile. Observers are not part of a layout: observe the pool anew.
    ///
    /// # Errors
    /// See [`RestoreError`]. Nothing has changed then, unless it is [`RestoreError::Backend`] or
    /// [`RestoreError::Fence`]: then the pool is sound, and can be restored again.
    pub fn restore_layout(&self, pool: PoolId, layout: &Layout) -> Result<Restored, RestoreError> {
        let mut tape = self.tape();
        let entry = self.pool(pool)?;
        self.check_it_fits(entry, layout)?;
        let is_fresh = entry.heaps().all(|heap| heap.lock().is_fresh());
        for saved in &layout.heaps {
            self.route_or_make(pool, saved.stream.unwrap_or_default())?;
        }
        let observers = self.observers.lock().count(pool);
        // All heaps at once: what was found out about one still holds when the last one changes.
        let mut guards: Vec<_> = entry.heaps().map(HeapCell::lock).collect();
        let mut heaps: Vec<_> = guards.iter_mut().map(|heap| Saved::find(heap, layout)).collect();
        let outcome = if is_fresh { self.rejoin(&mut heaps) } else { self.rewind(observers, &mut heaps) };
        let restored =
            outcome.map(|()| heaps.into_iter().map(|Saved { heap, .. }| restored_heap(heap)).collect::<Vec<_>>());
        drop(guards);
        if matches!(restored, Ok(_) | Err(RestoreError::Backend { .. } | RestoreError::Fence { .. })) {
            tape.restored(pool);
        }
        let heaps = restored?;
        tracing::debug!(name: "pool.restored", target: "symmalloc", pool = pool.0, heaps = heaps.len(), is_fresh);
        Ok(Restored { heaps })
    }

    /// What can be told without looking at blocks.
    fn check_it_fits(&self, entry: &Pool<L>, layout: &Layout) -> Result<(), RestoreError> {
        if layout.config != entry.config {
            let (saved, here) = (Box::new(layout.config.clone()), Box::new(entry.config.clone()));
            return Err(RestoreError::Config { saved, here });
        }
        if layout.granularity_bytes != self.granularity_bytes {
            let (saved_bytes, here_bytes) = (layout.granularity_bytes, self.granularity_bytes);
            return Err(RestoreError::Granularity { saved_bytes, here_bytes });
        }
        if layout.total_limit_bytes != self.limit_bytes() {
            let (saved_bytes, here_bytes) = (layout.total_limit_bytes, self.limit_bytes());
            return Err(RestoreError::TotalLimit { saved_bytes, here_bytes });
        }
        for heap in &layout.heaps {
            // Free memory of a shared heap needs an owner, too.
            self.known_stream(heap.stream.unwrap_or_default())?;
            for allocation in heap.segments.iter().flat_map(|segment| &segment.allocations) {
                self.known_stream(allocation.stream)?;
                allocation.used_by.iter().try_for_each(|stream| self.known_stream(*stream))?;
            }
        }
        Ok(())
    }
}

/// A heap, and what it is to become.
struct Saved<'a> {
    heap: &'a mut Heap,
    layout: Cow<'a, HeapLayout>,
}

impl<'a> Saved<'a> {
    fn find(heap: &'a mut Heap, layout: &'a Layout) -> Self {
        let saved = layout.heaps.iter().find(|saved| saved.stream == heap.stream);
        let layout = saved.map_or_else(|| Cow::Owned(HeapLayout::of_fresh(heap)), Cow::Borrowed);
        Saved { heap, layout }
    }

    /// The blocks are in place: so is the rest.
    fn take_up_history(&mut self) {
        self.heap.next_segment = self.layout.next_segment;
        self.heap.begin_history(self.layout.digest);
    }
}

impl Heap {
    /// A saved allocation is live in a block that has its place and size: all books but the segment's learn of it.
    /// Returns the bytes of its block.
    fn make_live(&mut self, slot: Slot, saved: &AllocationLayout) -> u64 {
        let (stream, requested) = (saved.stream, saved.requested_bytes);
        let tag = self.tags.next();
        self.table.block_mut(slot).state = BlockState::Allocated { stream, requested, tag };
        if !self.pointers.is_off() {
            let table = &self.table;
            self.pointers.insert(table.address(slot), slot, |slot| table.address(slot));
        }
        let size = self.table.block(slot).size;
        self.usage.allocate(size, requested);
        self.note_uses_and_name(slot, saved);
        bytes(size)
    }

    /// Other streams use a live allocation as when it was saved, and maybe more do by now.
    fn note_uses_and_name(&mut self, slot: Slot, saved: &AllocationLayout) {
        let mut fences = self.table.block(slot).fences;
        for stream in &saved.used_by {
            fences = self.fences.add(fences, Fence::of(*stream));
        }
        self.table.block_mut(slot).fences = fences;
        match &saved.name {
            Some(name) => self.names.insert(slot, name),
            None => drop(self.names.take(slot)),
        }
        self.note_books();
    }
}

fn restored_heap(heap: &mut Heap) -> RestoredHeap {
    let nothing = Handle::new(heap.id, NO_SLOT, heap.tags.next());
    let segments = heap.table.segments_in_order().into_iter();
    let slots = segments.flat_map(|segment| heap.table.blocks_of(segment));
    let live = slots.filter_map(|slot| match heap.table.block(slot).state {
        BlockState::Allocated { stream, requested, tag } => Some(RestoredAllocation {
            allocation: Allocation {
                handle: Handle::new(heap.id, slot, tag),
                address: heap.address(slot),
                placement: heap.placement(slot),
                size_bytes: bytes(heap.table.block(slot).size),
            },
            stream,
            requested_bytes: requested,
            name: heap.names.find(slot).map(Into::into),
        }),
        _ => None,
    });
    RestoredHeap { stream: heap.stream, nothing, allocations: live.collect() }
}
