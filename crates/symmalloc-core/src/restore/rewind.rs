//! Rewind: a used pool goes back to what it was.
//!
//! ```text
//!  plan       walk the blocks beside the layout; refuse what does not fit          nothing changes
//!  wait       streams wait for the earlier users of what they get again            nothing that a decision could see
//!  give back  segments and memory obtained since, in (stream, sequence) order      the driver may stop it: restore again
//!  carve      saved allocations out of free blocks; take up the saved history      nothing fails here
//! ```

use super::{RestoreError, Saved};
use crate::allocator::Allocator;
use crate::backend::{Backend, BackendError};
use crate::block_table::{BlockState, Slot};
use crate::fence::{Fence, FenceSetId};
use crate::heap::{Heap, Shortage, Surroundings};
use crate::ids::StreamId;
use crate::layout::{AllocationLayout, Extent, SegmentLayout};
use crate::lock::Lock;
use crate::tally::Tally;
use crate::trim::synchronize;
use crate::units::{Units, bytes, units};
use smallvec::SmallVec;

/// What a rewind does to a heap. Slots are those before anything was given back.
#[derive(Debug, Default)]
struct Plan {
    /// Free blocks of which a stream gets a part: it waits for the earlier users.
    waits: Vec<(Slot, StreamId)>,
    /// Segments that the layout lacks, and parts of free blocks in those that it has, in sequence order.
    surplus: Vec<Surplus>,
}

#[derive(Clone, Copy, Debug)]
enum Surplus {
    Segment(u32),
    /// From and to, in units of the segment.
    Part(Slot, Units, Units),
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    pub(super) fn rewind(&self, observers: u32, heaps: &mut [Saved<'_>]) -> Result<(), RestoreError> {
        let plans: Vec<Plan> = heaps.iter().map(|saved| saved.plan(observers)).collect::<Result<_, _>>()?;
        for (Saved { heap, .. }, plan) in heaps.iter_mut().zip(&plans) {
            for (slot, stream) in &plan.waits {
                heap.wait_for_earlier_users(&self.around, *slot, *stream).map_err(|shortage| match *shortage {
                    Shortage::Fence(error) => RestoreError::Fence { stream: *stream, error },
                    other => unreachable!("a wait takes no memory: {other:?}"),
                })?;
            }
        }
        for (Saved { heap, .. }, plan) in heaps.iter_mut().zip(&plans) {
            let outcome = heap.give_surplus_back(&self.around, &plan.surplus);
            heap.recycle_spent(&self.around);
            outcome?;
        }
        for saved in heaps {
            let segments = saved.heap.table.segment_count();
            assert_eq!(segments, saved.layout.segments.len(), "what the layout lacks was given back");
            for (segment, layout) in saved.heap.table.segments_in_order().into_iter().zip(&saved.layout.segments) {
                self.carve_segment(saved.heap, segment, layout);
            }
            saved.heap.recycle_spent(&self.around);
            saved.take_up_history();
        }
        Ok(())
    }

    /// Makes every saved allocation of a segment live that is not. All memory of the layout is there, no other is.
    fn carve_segment(&self, heap: &mut Heap, segment: u32, saved: &SegmentLayout) {
        let mut slot = heap.table.segment(segment).first;
        for allocation in &saved.allocations {
            let (offset, end) = (units(allocation.offset_bytes), units(allocation.end_bytes()));
            while heap.table.block(slot).end() < end {
                slot = heap.table.block(slot).next;
            }
            if heap.table.block(slot).is_free() {
                slot = heap.carve(slot, offset, end);
                heap.make_live(slot, allocation);
                self.tally(|tally| tally.allocate(allocation.size_bytes, allocation.requested_bytes));
            } else {
                heap.note_uses_and_name(slot, allocation);
            }
        }
    }
}

impl Saved<'_> {
    /// What has to be done, or why it cannot be.
    fn plan(&self, observers: u32) -> Result<Plan, RestoreError> {
        let heap = &self.heap;
        let mut plan = Plan::default();
        let retired_bytes = heap.log.retired_bytes();
        if observers > 0 && retired_bytes > 0 {
            return Err(RestoreError::Retired { pool: heap.pool, retired_bytes });
        }
        let mut saved = self.layout.segments.iter().peekable();
        for segment in heap.table.segments_in_order() {
            let id = heap.table.segment(segment).id;
            if let Some(gone) = saved.next_if(|saved| saved.id < id) {
                return Err(self.gone(gone, gone.extents[0]));
            }
            match saved.next_if(|saved| saved.id == id) {
                Some(saved) => self.plan_segment(segment, saved, &mut plan)?,
                None => {
                    let live = heap.table.blocks_of(segment).find(|slot| is_live(heap, *slot));
                    live.map_or(Ok(()), |slot| Err(self.unknown_live(slot)))?;
                    plan.surplus.push(Surplus::Segment(segment));
                }
            }
        }
        if let Some(gone) = saved.next() {
            return Err(self.gone(gone, gone.extents[0]));
        }
        match plan.surplus.first() {
            Some(surplus) if observers > 0 => {
                let segment = match *surplus {
                    Surplus::Segment(segment) => segment,
                    Surplus::Part(slot, ..) => heap.table.block(slot).segment,
                };
                let segment = heap.table.segment(segment).id;
                Err(RestoreError::Observed { pool: heap.pool, stream: heap.stream, segment, observers })
            }
            _ => Ok(plan),
        }
    }

    /// Walks a segment's blocks, its saved extents and its saved allocations side by side.
    fn plan_segment(&self, segment: u32, saved: &SegmentLayout, plan: &mut Plan) -> Result<(), RestoreError> {
        let heap = &self.heap;
        let mut allocations = saved.allocations.iter().peekable();
        for slot in heap.table.blocks_of(segment) {
            let block = heap.table.block(slot);
            let (from, to) = (bytes(block.offset()), bytes(block.end()));
            match block.state {
                BlockState::Hole => {
                    let lost = lost(&saved.extents, from, to);
                    lost.map_or(Ok(()), |lost| Err(self.gone(saved, lost)))?;
                }
                BlockState::Allocated { stream, requested, .. } => {
                    let is_saved = |saved: &&AllocationLayout| {
                        (saved.offset_bytes, saved.end_bytes()) == (from, to)
                            && (saved.stream, saved.requested_bytes) == (stream, requested)
                    };
                    if allocations.next_if(is_saved).is_none() {
                        return Err(self.unknown_live(slot));
                    }
                }
                BlockState::Free { .. } => {
                    while let Some(allocation) = allocations.next_if(|saved| saved.end_bytes() <= to) {
                        if plan.waits.last() != Some(&(slot, allocation.stream)) {
                            plan.waits.push((slot, allocation.stream));
                        }
                    }
                    plan.surplus.extend(
                        outside(&saved.extents, from, to).map(|(from, to)| Surplus::Part(slot, units(from), units(to))),
                    );
                }
                BlockState::Vacant => unreachable!("a vacant slot is in no segment"),
            }
        }
        let end_bytes = bytes(heap.table.segment(segment).end);
        let lost = lost(&saved.extents, end_bytes, u64::MAX);
        lost.map_or(Ok(()), |lost| Err(self.gone(saved, lost)))
    }

    fn gone(&self, saved: &SegmentLayout, lost: Extent) -> RestoreError {
        RestoreError::Gone {
            pool: self.heap.pool,
            stream: self.heap.stream,
            segment: saved.id,
            offset_bytes: lost.offset_bytes,
            size_bytes: lost.size_bytes,
        }
    }

    fn unknown_live(&self, slot: Slot) -> RestoreError {
        let BlockState::Allocated { stream, requested, .. } = self.heap.table.block(slot).state else {
            unreachable!("the block is live");
        };
        RestoreError::UnknownLive {
            pool: self.heap.pool,
            stream,
            placement: self.heap.placement(slot),
            requested_bytes: requested,
            name: self.heap.names.find(slot).map(Into::into),
        }
    }
}

impl Heap {
    /// Gives back what the layout lacks. Every step leaves the heap sound, and shows in the digest.
    fn give_surplus_back<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        surplus: &[Surplus],
    ) -> Result<(), BackendError> {
        for surplus in surplus {
            match *surplus {
                Surplus::Segment(segment) => self.retire(around, segment),
                // What is behind a part keeps the slot, so later parts of the same block are found by it.
                Surplus::Part(slot, from, to) => {
                    for stream in self.streams_of(slot) {
                        synchronize(around, stream)?;
                    }
                    self.give_memory_back(around, slot, from, to)?;
                }
            }
        }
        let (_, failure) = self.release_retired(around);
        failure.map_or(Ok(()), Err)
    }

    /// Cuts `offset..end` out of a free block, and returns it, in no index. What is left on both sides stays free, with
    /// the same earlier users.
    fn carve(&mut self, slot: Slot, offset: Units, end: Units) -> Slot {
        self.unlink(slot);
        let free = self.table.block(slot).state;
        let start = self.table.block(slot).offset();
        if start < offset {
            let front = self.table.cut_front(slot, offset - start, free);
            self.table.block_mut(front).fences = self.without_events(self.table.block(slot).fences);
            self.link(front);
        }
        if end == self.table.block(slot).end() {
            let fences = std::mem::replace(&mut self.table.block_mut(slot).fences, FenceSetId::EMPTY);
            self.fences.clear(fences);
            return slot;
        }
        let carved = self.table.cut_front(slot, end - offset, free);
        self.link(slot);
        carved
    }

    /// Another set of the same fences. An event belongs to one fence, so whoever takes this set waits for its streams as
    /// they stand then, which is a little more.
    fn without_events(&mut self, set: FenceSetId) -> FenceSetId {
        let fences: SmallVec<[Fence; 2]> = self.fences.fences(set).collect();
        let copy = |set, fence: Fence| self.fences.add(set, Fence { event: None, ..fence });
        fences.into_iter().fold(FenceSetId::EMPTY, copy)
    }
}

fn is_live(heap: &Heap, slot: Slot) -> bool {
    matches!(heap.table.block(slot).state, BlockState::Allocated { .. })
}

/// The first part of `from..to` that lies in an extent.
fn lost(extents: &[Extent], from: u64, to: u64) -> Option<Extent> {
    let extent = extents.get(extents.partition_point(|extent| extent.end_bytes() <= from))?;
    let (from, to) = (from.max(extent.offset_bytes), to.min(extent.end_bytes()));
    (from < to).then(|| Extent { offset_bytes: from, size_bytes: to - from })
}

/// The parts of `from..to` that lie in no extent, in order.
fn outside(extents: &[Extent], from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
    let first = extents.partition_point(|extent| extent.end_bytes() <= from);
    let extents = extents[first..].iter().take_while(move |extent| extent.offset_bytes < to);
    let ends = extents.clone().map(|extent| extent.end_bytes());
    let starts = extents.map(|extent| extent.offset_bytes);
    let gaps = std::iter::once(from).chain(ends).zip(starts.chain(std::iter::once(to)));
    gaps.filter(|(start, end)| start < end)
}
