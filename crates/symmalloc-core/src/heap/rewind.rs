//! Rewind: a used heap returns to an earlier state. A part of [`Heap`].
//!
//! ```text
//!  plan       compare the blocks with the layout; refuse a mismatch                nothing changes
//!  wait       streams wait for the earlier users of their restored memory          nothing that affects decisions
//!  release    segments and memory acquired since, in (stream, sequence) order      the driver may fail: restore again
//!  carve      saved allocations out of free blocks; continue the saved history     cannot fail
//! ```
//!
//! A *revival* plans, waits and carves, but releases nothing and continues the heap's own history, see `revive.rs`.

use super::fencing::synchronize;
use super::{DynContext, Heap};
use crate::blocks::table::{BlockState, Slot};
use crate::config::restore_error::{LayoutError, RestoreError};
use crate::history::layout::{AllocationLayout, Extent, HeapLayout, SegmentLayout};
use crate::streams::fences::{Fence, FenceSetId, Fences};
use crate::sync::lock::Lock;
use crate::types::backend::BackendError;
use crate::types::ids::StreamId;
use crate::types::units::{Units, bytes, units};

/// The actions of a rewind. Slots are valid before the first release.
#[derive(Debug, Default)]
pub(crate) struct RewindPlan {
    /// Free blocks from which a stream's allocations are carved. The stream waits for their earlier users.
    waits: Vec<(Slot, StreamId)>,
    /// Segments and parts of free blocks that are not in the layout, in sequence order.
    surplus: Vec<Surplus>,
}

#[derive(Clone, Copy, Debug)]
enum Surplus {
    Segment(u32),
    /// Start and end in units of the segment.
    Part(Slot, Units, Units),
}

impl<L: Lock> Heap<L> {
    /// Returns the actions that lead to the layout, or the reason why it cannot be reached.
    pub(crate) fn plan_rewind(&self, layout: &HeapLayout, observers: u32) -> Result<RewindPlan, RestoreError> {
        let pool = self.identity.pool;
        let mut plan = RewindPlan::default();
        let retired_bytes = self.log.retired_bytes();
        if observers > 0 && retired_bytes > 0 {
            return Err(LayoutError::Retired { pool, retired_bytes }.into());
        }
        if self.has_stitched() {
            return Err(LayoutError::Stitched { pool }.into());
        }
        let mut saved = layout.segments.iter().peekable();
        for segment in self.table.segments_in_order() {
            let id = self.table.segment(segment).id;
            if let Some(gone) = saved.next_if(|saved| saved.id < id) {
                return Err(self.gone(gone, gone.extents[0]));
            }
            match saved.next_if(|saved| saved.id == id) {
                Some(saved) => self.plan_segment(segment, saved, &mut plan)?,
                None => {
                    let live = self.table.blocks_of(segment).find(|slot| self.is_live(*slot));
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
                    Surplus::Part(slot, ..) => self.table.block(slot).segment,
                };
                let segment = self.table.segment(segment).id;
                Err(RestoreError::Observed { pool, stream: self.identity.stream, segment, observers })
            }
            _ => Ok(plan),
        }
    }

    /// Makes streams wait for the earlier users of their restored memory.
    pub(crate) fn wait_for_rewind(
        &mut self,
        context: &DynContext<'_, L>,
        plan: &RewindPlan,
    ) -> Result<(), RestoreError> {
        for &(slot, stream) in &plan.waits {
            let waited = self.wait_for_earlier_users(context, slot, stream);
            waited.map_err(|error| RestoreError::Fence { stream, error })?;
        }
        Ok(())
    }

    /// Recreates every saved allocation that is not live, and restores the saved history. The heap must have exactly the
    /// memory of the layout. Returns the size and requested bytes of each new live allocation.
    pub(crate) fn carve_layout(&mut self, context: &DynContext<'_, L>, layout: &HeapLayout) -> Vec<(Units, u64)> {
        let segments = self.table.segments_in_order();
        assert_eq!(segments.len(), layout.segments.len(), "surplus segments were released");
        let mut made = Vec::new();
        for (segment, saved) in segments.into_iter().zip(&layout.segments) {
            self.carve_segment(segment, saved, &mut made);
        }
        self.recycle_spent(context);
        self.next_segment = layout.next_segment;
        self.begin_history(layout.digest);
        made
    }

    /// Recreates the saved allocations of a segment that are not live, and adds their sizes to `made`.
    fn carve_segment(&mut self, segment: u32, saved: &SegmentLayout, made: &mut Vec<(Units, u64)>) {
        let mut slot = self.table.first(segment);
        for allocation in &saved.allocations {
            let (offset, end) = (units(allocation.offset_bytes), units(allocation.end_bytes()));
            while self.table.block(slot).end() < end {
                slot = self.table.block(slot).next;
            }
            if self.table.block(slot).is_free() {
                slot = self.carve(slot, offset, end);
                made.push(self.make_live(slot, allocation));
            } else {
                self.note_uses_and_name(slot, allocation);
            }
        }
    }

    /// Walks a segment's blocks, its saved extents and its saved allocations in parallel.
    fn plan_segment(&self, segment: u32, saved: &SegmentLayout, plan: &mut RewindPlan) -> Result<(), RestoreError> {
        let mut allocations = saved.allocations.iter().peekable();
        for slot in self.table.blocks_of(segment) {
            let block = self.table.block(slot);
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
                BlockState::Planned | BlockState::Elsewhere | BlockState::Vacant => {
                    unreachable!("a rewind has no plans and no stitched ranges")
                }
            }
        }
        let end_bytes = bytes(self.table.segment(segment).end);
        let lost = lost(&saved.extents, end_bytes, u64::MAX);
        lost.map_or(Ok(()), |lost| Err(self.gone(saved, lost)))
    }

    fn gone(&self, saved: &SegmentLayout, lost: Extent) -> RestoreError {
        RestoreError::Gone {
            pool: self.identity.pool,
            stream: self.identity.stream,
            segment: saved.id,
            offset_bytes: lost.offset_bytes,
            size_bytes: lost.size_bytes,
        }
    }

    pub(super) fn unknown_live(&self, slot: Slot) -> RestoreError {
        let BlockState::Allocated { stream, requested, .. } = self.table.block(slot).state else {
            unreachable!("the block is live");
        };
        RestoreError::UnknownLive {
            pool: self.identity.pool,
            stream,
            placement: self.placement(slot),
            requested_bytes: requested,
            name: self.names.find(slot).cloned(),
        }
    }

    /// Releases the memory that is not in the layout. Every step leaves the heap consistent and is in the digest.
    pub(crate) fn give_surplus_back(
        &mut self,
        context: &DynContext<'_, L>,
        plan: &RewindPlan,
    ) -> Result<(), BackendError> {
        for surplus in &plan.surplus {
            match *surplus {
                Surplus::Segment(segment) => self.retire(context, segment),
                // The remainder after a part keeps the slot, so later parts of the same block are found by it.
                Surplus::Part(slot, from, to) => {
                    for stream in self.streams_of(slot) {
                        synchronize(context, stream)?;
                    }
                    self.give_memory_back(context, slot, from, to)?;
                }
            }
        }
        self.release_retired(context).error.map_or(Ok(()), Err)
    }

    pub(super) fn is_live(&self, slot: Slot) -> bool {
        matches!(self.table.block(slot).state, BlockState::Allocated { .. })
    }

    /// Cuts `offset..end` out of a free block and returns it without adding it to the free index. The remainders on both
    /// sides stay free, with the same earlier users.
    pub(super) fn carve(&mut self, slot: Slot, offset: Units, end: Units) -> Slot {
        self.unlink(slot);
        let free = self.table.block(slot).state;
        let start = self.table.block(slot).offset();
        if start < offset {
            let front = self.table.tiling().cut_front(slot, offset - start, free);
            self.table.block_mut(front).fences = self.without_events(self.table.block(slot).fences);
            self.link(front);
        }
        if end == self.table.block(slot).end() {
            let fences = std::mem::replace(&mut self.table.block_mut(slot).fences, FenceSetId::EMPTY);
            self.fences.clear(fences);
            return slot;
        }
        let carved = self.table.tiling().cut_front(slot, end - offset, free);
        self.link(slot);
        carved
    }

    /// Copies a set of fences without their events, since an event belongs to one fence. Returns the copy. The next
    /// user of the new set waits for all work on the streams at the time of its allocation, which is slightly more than
    /// necessary.
    pub(super) fn without_events(&mut self, set: FenceSetId) -> FenceSetId {
        let copies: Fences = self.fences.fences(set).iter().map(|fence| Fence { event: None, ..*fence }).collect();
        self.fences.insert(copies)
    }
}

/// Returns the first part of `from..to` that lies in an extent.
fn lost(extents: &[Extent], from: u64, to: u64) -> Option<Extent> {
    let extent = extents.get(extents.partition_point(|extent| extent.end_bytes() <= from))?;
    let (from, to) = (from.max(extent.offset_bytes), to.min(extent.end_bytes()));
    (from < to).then(|| Extent { offset_bytes: from, size_bytes: to - from })
}

/// Returns the parts of `from..to` that lie in no extent, in order.
fn outside(extents: &[Extent], from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
    let first = extents.partition_point(|extent| extent.end_bytes() <= from);
    let extents = extents[first..].iter().take_while(move |extent| extent.offset_bytes < to);
    let ends = extents.clone().map(|extent| extent.end_bytes());
    let starts = extents.map(|extent| extent.offset_bytes);
    let gaps = std::iter::once(from).chain(ends).zip(starts.chain(std::iter::once(to)));
    gaps.filter(|(start, end)| start < end)
}
