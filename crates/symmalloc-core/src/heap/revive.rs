//! Revival: freed allocations become live again at their placements. A part of [`Heap`].
//!
//! A heap is revived when a graph tree returns to a checkpoint. The graphs that the tree replays from there write to
//! memory that the allocator counts as free, so exactly the allocations of the checkpoint must become live again. The
//! heap continues its own history, in which each revived allocation counts as an allocation.
//!
//! ```text
//!   checkpoint  │ a │  b  │ free │ c │        │ grown since │
//!   now         │ a │      free          │ d │
//!   d is freed  │ a │         free           │ free        │
//!   revived     │ a │  b  │ free │ c │  free  │ free        │     b and c: an `Allocate` each in the digest, and in a recording
//! ```
//!
//! ```text
//!  plan       compare the blocks with the layout; refuse a mismatch                nothing changes
//!  wait       streams wait for the earlier users of their revived memory           nothing that affects decisions
//!  revive     carve the saved allocations out of free blocks                       cannot fail
//! ```

use super::{DynContext, Heap};
use crate::blocks::table::{BlockState, Slot};
use crate::config::restore_error::{LayoutError, RestoreError};
use crate::history::digest::{Mark, op_word};
use crate::history::layout::{AllocationLayout, Extent, HeapLayout, SegmentLayout};
use crate::streams::fences::Fence;
use crate::sync::lock::Lock;
use crate::types::handle::Allocation;
use crate::types::ids::{Placement, StreamId};
use crate::types::units::{UNIT_BYTES, Units, bytes, units};
use crate::types::work;
use smallvec::SmallVec;

/// A live allocation of a revived layout.
#[derive(Debug)]
pub(crate) struct Revived {
    pub(crate) allocation: Allocation,
    pub(crate) stream: StreamId,
    pub(crate) requested_bytes: u64,
    pub(crate) name: Option<Box<str>>,
    /// `true` if the revival made it live; `false` if it was live before.
    pub(crate) is_made: bool,
    /// Streams that use it and that were not recorded as its users before.
    pub(crate) uses: SmallVec<[StreamId; 2]>,
}

impl<L: Lock> Heap<L> {
    /// Returns the free blocks from which a revival carves allocations, each with the stream that must wait for the
    /// block's earlier users. Returns an error if the layout cannot be revived.
    pub(crate) fn plan_revival(&self, layout: &HeapLayout) -> Result<Vec<(Slot, StreamId)>, RestoreError> {
        if self.has_stitched() {
            return Err(LayoutError::Stitched { pool: self.id.pool }.into());
        }
        let mut waits = Vec::new();
        let mut saved = layout.segments.iter().peekable();
        for segment in self.arena.segments_in_order() {
            let id = self.arena.segment(segment).id;
            if let Some(gone) = saved.next_if(|saved| saved.id < id) {
                return Err(self.gone(gone, gone.extents[0]));
            }
            match saved.next_if(|saved| saved.id == id) {
                Some(saved) => self.plan_segment(segment, saved, &mut waits)?,
                None => {
                    let live = self.arena.blocks_of(segment).find(|slot| self.is_live(*slot));
                    live.map_or(Ok(()), |slot| Err(self.unknown_live(slot)))?;
                }
            }
        }
        saved.next().map_or(Ok(waits), |gone| Err(self.gone(gone, gone.extents[0])))
    }

    /// Walks a segment's blocks, its saved extents and its saved allocations in parallel.
    fn plan_segment(
        &self,
        segment: u32,
        saved: &SegmentLayout,
        waits: &mut Vec<(Slot, StreamId)>,
    ) -> Result<(), RestoreError> {
        let mut allocations = saved.allocations.iter().peekable();
        for slot in self.arena.blocks_of(segment) {
            let block = self.arena.block(slot);
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
                        if waits.last() != Some(&(slot, allocation.stream)) {
                            waits.push((slot, allocation.stream));
                        }
                    }
                }
                BlockState::Planned | BlockState::Elsewhere | BlockState::Vacant => {
                    unreachable!("a revived heap has no plans and no stitched ranges")
                }
            }
        }
        let end_bytes = bytes(self.arena.segment(segment).end);
        let lost = lost(&saved.extents, end_bytes, u64::MAX);
        lost.map_or(Ok(()), |lost| Err(self.gone(saved, lost)))
    }

    /// Makes streams wait for the earlier users of their revived memory.
    pub(crate) fn wait_for_revival(
        &mut self,
        context: &DynContext<'_, L>,
        waits: Vec<(Slot, StreamId)>,
    ) -> Result<(), RestoreError> {
        for (slot, stream) in waits {
            let waited = self.arena.wait_for_earlier_users(context, slot, stream);
            waited.map_err(|error| RestoreError::Fence { stream, error })?;
        }
        Ok(())
    }

    /// Makes live every saved allocation that is not live yet. The heap may have more memory than the layout. Returns
    /// all saved allocations in (sequence, offset) order.
    pub(crate) fn revive_layout(&mut self, context: &DynContext<'_, L>, layout: &HeapLayout) -> Vec<Revived> {
        let mut revived = Vec::new();
        let mut saved = layout.segments.iter().peekable();
        for segment in self.arena.segments_in_order() {
            let id = self.arena.segment(segment).id;
            let Some(saved) = saved.next_if(|saved| saved.id == id) else { continue };
            let mut slot = self.arena.first_block(segment);
            for allocation in &saved.allocations {
                while self.arena.block(slot).end() < units(allocation.end_bytes()) {
                    slot = self.arena.block(slot).next;
                }
                slot = self.revive_in(slot, allocation, &mut revived);
            }
        }
        assert!(saved.next().is_none(), "all memory of the layout exists");
        self.arena.recycle_spent(context);
        revived
    }

    /// Makes one allocation live at its placement, which is free. After an error nothing has changed, except that its
    /// stream may have waited.
    pub(crate) fn revive(
        &mut self,
        context: &DynContext<'_, L>,
        placement: Placement,
        saved: &AllocationLayout,
    ) -> Result<Revived, RestoreError> {
        let slot = self.free_block_around(placement, saved)?;
        let waited = self.arena.wait_for_earlier_users(context, slot, saved.stream);
        waited.map_err(|error| RestoreError::Fence { stream: saved.stream, error })?;
        let mut revived = Vec::with_capacity(1);
        self.revive_in(slot, saved, &mut revived);
        self.arena.recycle_spent(context);
        Ok(revived.pop().expect("an element should have been pushed above"))
    }

    /// Makes a saved allocation live in the free block around it, or notes its uses if it is live. Returns its block.
    fn revive_in(&mut self, slot: Slot, saved: &AllocationLayout, revived: &mut Vec<Revived>) -> Slot {
        let is_made = self.arena.block(slot).is_free();
        let mut uses = saved.used_by.clone();
        let slot = if is_made {
            let slot = self.make_live(slot, saved);
            self.fold_at(slot, op_word(Mark::Allocate, saved.stream, saved.requested_bytes));
            slot
        } else {
            let known = self.arena.fences_of(slot);
            uses.retain(|stream| !known.iter().any(|fence: &Fence| fence.stream == *stream));
            self.note_uses_and_name(slot, saved);
            slot
        };
        for stream in &uses {
            self.fold_at(slot, op_word(Mark::RecordUse, *stream, 0));
        }
        let BlockState::Allocated { serial, .. } = self.arena.block(slot).state else {
            unreachable!("a saved allocation is live");
        };
        revived.push(Revived {
            allocation: self.allocation_in(slot, self.handle(slot, serial)),
            stream: saved.stream,
            requested_bytes: saved.requested_bytes,
            name: saved.name.clone(),
            is_made,
            uses,
        });
        slot
    }

    fn fold_at(&mut self, slot: Slot, op: u64) {
        let placed = self.arena.block(slot).location.word();
        self.ledger.fold(op, placed);
    }

    /// Returns the free block that contains a placement, or an error that names what occupies the placement.
    fn free_block_around(&mut self, placement: Placement, saved: &AllocationLayout) -> Result<Slot, RestoreError> {
        let heap = self.id;
        let gone = || RestoreError::Gone {
            heap,
            segment: placement.segment,
            offset_bytes: saved.offset_bytes,
            size_bytes: saved.size_bytes,
        };
        let is_whole = |bytes: u64| bytes.is_multiple_of(UNIT_BYTES);
        let end_bytes = saved.offset_bytes.checked_add(saved.size_bytes).ok_or_else(gone)?;
        if !is_whole(saved.offset_bytes)
            || !is_whole(end_bytes)
            || !(1..=saved.size_bytes).contains(&saved.requested_bytes)
        {
            return Err(gone());
        }
        let (from, to) = (saved.offset_bytes / UNIT_BYTES, end_bytes / UNIT_BYTES);
        let offset = Units::try_from(from).map_err(|_| gone())?;
        let slot = self.arena.block_at(placement.segment, offset).ok_or_else(gone)?;
        let block = self.arena.block(slot);
        match block.state {
            BlockState::Free { .. } if to <= u64::from(block.end()) => Ok(slot),
            BlockState::Free { .. } => {
                let behind = std::iter::successors(Some(block.next), |slot| Some(self.arena.block(*slot).next));
                let is_touched = |slot: &Slot| {
                    let block = self.arena.block(*slot);
                    block.state != BlockState::Vacant && u64::from(block.offset()) < to
                };
                let mut touched = behind.take_while(is_touched).inspect(|_| work::count(1));
                Err(touched.find(|slot| self.is_live(*slot)).map_or_else(gone, |slot| self.unknown_live(slot)))
            }
            BlockState::Allocated { .. } => Err(self.unknown_live(slot)),
            _ => Err(gone()),
        }
    }

    fn gone(&self, saved: &SegmentLayout, lost: Extent) -> RestoreError {
        RestoreError::Gone {
            heap: self.id,
            segment: saved.id,
            offset_bytes: lost.offset_bytes,
            size_bytes: lost.size_bytes,
        }
    }

    fn unknown_live(&self, slot: Slot) -> RestoreError {
        let BlockState::Allocated { stream, requested, .. } = self.arena.block(slot).state else {
            unreachable!("the block is live");
        };
        RestoreError::UnknownLive {
            pool: self.id.pool,
            stream,
            placement: self.placement(slot),
            requested_bytes: requested,
            name: self.ledger.name_of(slot).map(|name| (&**name).into()),
        }
    }

    fn is_live(&self, slot: Slot) -> bool {
        matches!(self.arena.block(slot).state, BlockState::Allocated { .. })
    }
}

/// Returns the first part of `from..to` that lies in an extent.
fn lost(extents: &[Extent], from: u64, to: u64) -> Option<Extent> {
    let extent = extents.get(extents.partition_point(|extent| extent.end_bytes() <= from))?;
    let (from, to) = (from.max(extent.offset_bytes), to.min(extent.end_bytes()));
    (from < to).then(|| Extent { offset_bytes: from, size_bytes: to - from })
}
