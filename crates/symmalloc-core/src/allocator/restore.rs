//! Restores the allocations of a [`Layout`].
//!
//! | call | pool | effect | used by |
//! |---|---|---|---|
//! | [`restore_layout`](Allocator::restore_layout) | fresh: no op yet | **rejoin**: acquires the segments, makes the saved allocations live, and continues the saved history | a rank that restarts, on a new device |
//! | [`revive_layout`](Allocator::revive_layout) | used | **revival**: carves the saved allocations out of free memory; memory acquired since and the pool's own history stay | a graph tree that returns to a checkpoint |
//!
//! All checks that can refuse a call run before any change. The driver calls come next. The changes of the tables come
//! last and cannot fail. A rejoin in which a driver call fails leaves the pool fresh. A revival makes only the driver
//! calls that order streams.
//!
//! The memory of a revived allocation contains whatever was written there in the meantime. The allocation's stream
//! waits on the device for the earlier users of this memory, as in `allocate`.

use super::Allocator;
use super::gate::Gate;
use super::pool::PoolRef;
use super::recorder::RecordingEnd;
use crate::config::StreamPolicy;
use crate::config::restore_error::RestoreError;
use crate::heap::Heap;
use crate::heap::debug::report_block;
use crate::heap::revive::Revived;
use crate::history::layout::{HeapLayout, Layout};
use crate::stats::budget::Charge;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::groups::Groups;
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{Placement, PoolId, SegmentId, StreamGroup, StreamId};
use crate::types::units::units;
use std::borrow::Cow;

/// The placement of a revived allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RevivedPlace {
    /// Its placement in the heap.
    pub placement: Placement,
    /// Size of its block in bytes: a multiple of 512, and at least the requested bytes.
    pub block_bytes: u64,
}

/// The allocations of a restored pool, with their handles.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// The pool's heaps, by stream.
    pub heaps: Vec<RestoredHeap>,
    streams: StreamPolicy,
    groups: Groups,
}

/// One heap of a [`Restored`] pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoredHeap {
    /// The streams that share it.
    pub group: StreamGroup,
    /// A handle that represents every live allocation of zero bytes; such allocations have no placement.
    pub nothing: Handle,
    /// The live allocations, by placement.
    pub allocations: Vec<RestoredAllocation>,
}

/// One live allocation of a [`Restored`] pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoredAllocation {
    /// Its handle and its position. The handle is new unless the allocation was live all the time.
    pub allocation: Allocation,
    /// The stream it was allocated for.
    pub stream: StreamId,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The program's name for the allocation.
    pub name: Option<Box<str>>,
}

impl Restored {
    /// Returns the allocation of a stream at a placement.
    pub fn find(&self, stream: StreamId, placement: Placement) -> Option<&RestoredAllocation> {
        let heap = self.heap_of(stream)?;
        let at = heap.allocations.binary_search_by_key(&placement, |restored| restored.allocation.placement).ok()?;
        Some(&heap.allocations[at])
    }

    /// Returns the handle that represents a stream's allocations of zero bytes.
    pub fn nothing(&self, stream: StreamId) -> Option<Handle> {
        Some(self.heap_of(stream)?.nothing)
    }

    /// Returns all allocations in (stream, placement) order.
    pub fn allocations(&self) -> impl Iterator<Item = &RestoredAllocation> {
        self.heaps.iter().flat_map(|heap| &heap.allocations)
    }

    fn heap_of(&self, stream: StreamId) -> Option<&RestoredHeap> {
        self.heaps.iter().find(|heap| heap.group == self.streams.group_of(stream, &self.groups))
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Brings a fresh pool of a restarted rank into the state of a layout. First register the program's streams and
    /// create its pools. Then restore the pools in the order of their ids. See the [module
    /// documentation](crate::restore).
    ///
    /// Afterward, the pool's digest is the saved one, and the same ops get the same placements on this rank and on the
    /// ranks that did not restart.
    ///
    /// No other thread may use the pool during the call. Observers are not part of a layout: observe the pool again.
    ///
    /// # Errors
    /// See [`RestoreError`]. For example, returns [`RestoreError::Used`] if the pool has executed an op. After any
    /// error, a fresh pool is still fresh and can be restored again.
    pub fn restore_layout(&self, pool: PoolId, layout: &Layout) -> Result<Restored, RestoreError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        self.check_it_fits(entry, layout)?;
        if !entry.heaps().all(|heap| heap.lock().is_fresh()) {
            return Err(RestoreError::Used { pool });
        }
        for saved in layout.heaps() {
            self.heap_for(pool, saved.group.first().unwrap_or_default())?;
        }
        // Locks all heaps together, so that the checks of every heap are still valid when the heaps change.
        let mut guards: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        let mut heaps: Vec<_> = guards.iter_mut().map(|heap| Saved::find(heap, layout)).collect();
        let outcome = self.rejoin(&mut heaps);
        let restored =
            outcome.map(|()| heaps.into_iter().map(|Saved { heap, .. }| restored_heap(heap)).collect::<Vec<_>>());
        drop(guards);
        if matches!(restored, Ok(_) | Err(RestoreError::Backend(_))) {
            gate.end(RecordingEnd::Restored { pool });
        }
        let heaps = restored?;
        for restored in heaps.iter().flat_map(|heap| &heap.allocations) {
            report_block(&self.context, restored.stream, &restored.allocation, restored.name.as_deref());
        }
        tracing::debug!(name: "pool.restored", target: "symmalloc", pool = pool.0, heaps = heaps.len());
        Ok(self.restored(entry, heaps))
    }

    /// Makes exactly the allocations of a layout live again, in memory that the pool still holds. Free all other
    /// allocations first. Handles of allocations that were live all the time stay valid.
    ///
    /// Memory acquired in the meantime stays, because captured graphs on other branches of a graph tree may use it. The
    /// pool's history continues: each allocation that becomes live, and each of its uses by other streams, counts as an
    /// op of the program and is recorded.
    ///
    /// No other thread may use the pool during the call.
    ///
    /// # Errors
    /// See [`RestoreError`]. For example, returns an error if the pool no longer holds the layout's memory. After an
    /// error, nothing has changed, except that a heap without ops may have been created. After [`RestoreError::Fence`],
    /// some streams may also have waited, and the pool can be revived again.
    pub fn revive_layout(&self, pool: PoolId, layout: &Layout) -> Result<Restored, RestoreError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        self.check_it_fits(entry, layout)?;
        for saved in layout.heaps().iter().filter(|saved| !saved.segments.is_empty()) {
            // Creates heaps that the pool lacks, so that the check below reports their missing memory.
            self.heap_for(pool, saved.group.first().unwrap_or_default())?;
        }
        let mut guards: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        let mut heaps: Vec<_> = guards.iter_mut().map(|heap| Saved::find(heap, layout)).collect();
        let waits = heaps.iter().map(|saved| saved.heap.plan_revival(&saved.layout)).collect::<Result<Vec<_>, _>>()?;
        for (Saved { heap, .. }, waits) in heaps.iter_mut().zip(waits) {
            heap.wait_for_revival(&self.context, waits)?;
        }
        let mut revived = Vec::new();
        for Saved { heap, layout } in &mut heaps {
            revived.extend(heap.revive_layout(&self.context, layout));
        }
        let restored = heaps.into_iter().map(|Saved { heap, .. }| restored_heap(heap)).collect();
        drop(guards);
        revived.iter().for_each(|revived| self.note_revived(pool, revived, &mut gate));
        Ok(self.restored(entry, restored))
    }

    fn restored(&self, entry: PoolRef<'_, L>, heaps: Vec<RestoredHeap>) -> Restored {
        Restored { heaps, streams: entry.config().streams(), groups: self.groups() }
    }

    pub(super) fn note_revived(&self, pool: PoolId, revived: &Revived, gate: &mut Gate<'_, L>) {
        if revived.is_made {
            self.count_allocation(units(revived.allocation.size_bytes), revived.requested_bytes);
            report_block(&self.context, revived.stream, &revived.allocation, revived.name.as_deref());
        }
        gate.note_revival(pool, revived);
    }

    /// Performs the checks that do not depend on blocks.
    fn check_it_fits(&self, entry: PoolRef<'_, L>, layout: &Layout) -> Result<(), RestoreError> {
        entry.check_layout_holds()?;
        if *layout.config() != *entry.config() {
            let (saved, here) = (Box::new(layout.config().clone()), Box::new(entry.config().clone()));
            return Err(RestoreError::Config { saved, here });
        }
        let granularity = (Some(layout.granularity_bytes()), Some(self.granularity_bytes));
        let total_limit = (layout.total_limit_bytes(), self.total_limit_bytes());
        for (key, (saved_bytes, here_bytes)) in [("granularity", granularity), ("total_limit", total_limit)] {
            if saved_bytes != here_bytes {
                return Err(RestoreError::Input { key, saved_bytes, here_bytes });
            }
        }
        for heap in layout.heaps() {
            // The free memory of a shared heap needs an owner, which is the first stream of the heap's group.
            self.check_group(entry, heap.group.first().unwrap_or_default(), heap.group)?;
            for allocation in heap.segments.iter().flat_map(|segment| &segment.allocations) {
                self.check_group(entry, allocation.stream, heap.group)?;
                allocation.used_by.iter().try_for_each(|stream| self.known_stream(*stream))?;
            }
        }
        Ok(())
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Checks that a stream is known, and that here too it belongs to the group of the saved heap.
    fn check_group(&self, entry: PoolRef<'_, L>, stream: StreamId, saved: StreamGroup) -> Result<(), RestoreError> {
        self.known_stream(stream)?;
        let (pool, here) = (entry.id(), self.heap_group(entry, stream));
        if here == saved { Ok(()) } else { Err(RestoreError::Group { pool, stream, saved, here }) }
    }
}

/// A heap and its saved layout.
struct Saved<'a, L: Lock> {
    heap: &'a mut Heap<L>,
    layout: Cow<'a, HeapLayout>,
}

impl<'a, L: Lock> Saved<'a, L> {
    fn find(heap: &'a mut Heap<L>, layout: &'a Layout) -> Self {
        let group = heap.id().group;
        let saved = layout.heaps().iter().find(|saved| saved.group == group);
        let (digest, next_segment) = (heap.first_digest(), SegmentId(0));
        let fresh = || Cow::Owned(HeapLayout { group, digest, next_segment, segments: Vec::new() });
        let layout = saved.map_or_else(fresh, Cow::Borrowed);
        Saved { heap, layout }
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Acquires the saved memory in every heap of a fresh pool, or in none.
    fn rejoin(&self, heaps: &mut [Saved<'_, L>]) -> Result<(), RestoreError> {
        for Saved { heap, .. } in &mut *heaps {
            // Memory that an earlier attempt could not release is still charged, so release it first.
            heap.release_retired(&self.context).error.map_or(Ok(()), Err)?;
        }
        // Dropping a charge before `leave_charged` refunds it. This happens at a limit or if the backend panics.
        let mut charges = Vec::new();
        for Saved { heap, layout } in heaps.iter() {
            let needed_bytes = layout.reserved_bytes();
            let charge = heap.budgets(&self.context).charge(needed_bytes);
            charges.push(charge.map_err(|cause| RestoreError::Limit { needed_bytes, cause })?);
        }
        let mut acquired = Vec::new();
        let outcome = heaps.iter().try_for_each(|Saved { heap, layout }| {
            acquired.push(Vec::new());
            heap.acquire_layout(
                &self.context,
                layout,
                acquired.last_mut().expect("an element should have been pushed above"),
            )
        });
        charges.into_iter().for_each(Charge::leave_charged);
        let mut acquired = acquired.into_iter();
        for Saved { heap, layout } in heaps {
            let ranges = acquired.next().unwrap_or_default();
            if outcome.is_ok() {
                heap.confirm_layout(&self.context, layout, layout.reserved_bytes());
                let made = heap.restore_layout(&self.context, layout, ranges);
                made.iter().for_each(|(size, requested_bytes)| self.count_allocation(*size, *requested_bytes));
            } else {
                let stray_bytes = heap.release_acquired(&self.context, ranges);
                heap.confirm_layout(&self.context, layout, stray_bytes);
            }
        }
        Ok(outcome?)
    }
}

fn restored_heap<L: Lock>(heap: &mut Heap<L>) -> RestoredHeap {
    let (nothing, debug) = (heap.restored_nothing(), heap.debug_options());
    let live = heap.live_allocations().map(|(allocation, stream, requested_bytes, name)| RestoredAllocation {
        allocation,
        stream,
        requested_bytes: debug.program_bytes(requested_bytes),
        name: name.map(Into::into),
    });
    RestoredHeap { group: heap.id().group, nothing, allocations: live.collect() }
}
