//! Rejoin: a fresh heap acquires the memory that a saved heap held. A part of [`Heap`]. The allocator performs a rejoin
//! for all heaps of a pool or for none.
//!
//! ```text
//!  charge every heap ─► reserve and map every segment, in (stream, sequence) order ─► create the blocks, log the births
//!         │ limit                      │ driver                                            cannot fail
//!         └► refund                    └► release acquired memory, refund
//! ```

use super::acquire::{back, release_range, trace_segment};
use super::{DynContext, Heap};
use crate::arena::addresses::FixedAddresses;
use crate::arena::fresh;
use crate::blocks::table::{BlockState, Slot};
use crate::config::SegmentPolicy;
use crate::history::layout::{AllocationLayout, HeapLayout, SegmentLayout};
use crate::history::segment_log::Extents;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError, Range};
use crate::types::units::{UNIT_BYTES, Units, bytes, units};

/// A range for a segment, and the parts of it that are mapped so far.
pub(crate) struct AcquiredRange {
    range: Range,
    mapped: Extents,
}

impl<L: Lock> Heap<L> {
    /// Confirms that `there_bytes` of a layout's memory exist, and refunds the rest of the charge.
    pub(crate) fn confirm_layout(&self, context: &DynContext<'_, L>, layout: &HeapLayout, there_bytes: u64) {
        self.budgets(context).release(layout.reserved_bytes() - there_bytes);
        self.budgets(context).confirm(there_bytes);
    }

    /// Reserves and maps the segments of a layout, whose memory is already charged. After an error, `acquired` lists
    /// the acquired ranges.
    pub(crate) fn acquire_layout(
        &self,
        context: &DynContext<'_, L>,
        layout: &HeapLayout,
        acquired: &mut Vec<AcquiredRange>,
    ) -> Result<(), BackendError> {
        for segment in &layout.segments {
            let range_bytes = match self.config.segments() {
                SegmentPolicy::Expandable(knobs) if !self.arena.rules().is_tight(units(segment.end_bytes())) => {
                    bytes(self.arena.rules().whole_granules(units(knobs.range_bytes.next_multiple_of(UNIT_BYTES))))
                }
                _ => segment.end_bytes(),
            };
            let range = self.reserve_saved(context, range_bytes, segment.base_offset_bytes)?;
            acquired.push(AcquiredRange { range, mapped: Extents::new() });
            for extent in &segment.extents {
                back(context, (&self.config, self.arena.rules()), (range, extent.offset_bytes), extent.size_bytes)?;
                let newest = acquired.last_mut().expect("an element should have been pushed above");
                newest.mapped.push((extent.offset_bytes, extent.size_bytes));
            }
        }
        Ok(())
    }

    /// Undoes [`acquire_layout`](Self::acquire_layout). Memory that the driver fails to release stays until a trim
    /// succeeds in releasing it. Returns the bytes of this memory, which stay charged.
    pub(crate) fn release_acquired(&mut self, context: &DynContext<'_, L>, acquired: Vec<AcquiredRange>) -> u64 {
        let mut stray_bytes = 0;
        for AcquiredRange { range, mut mapped } in acquired {
            if give_back(&context.backend, self.addresses.as_deref(), range, &mut mapped).is_err() {
                stray_bytes += mapped.iter().map(|(_, size)| size).sum::<u64>();
                self.log.add_stray(range, mapped, false);
            }
        }
        stray_bytes
    }

    /// Adds segments with their memory to the tables and adopts the saved history. Returns the size and requested bytes
    /// of the live allocations.
    pub(crate) fn restore_layout(
        &mut self,
        context: &DynContext<'_, L>,
        layout: &HeapLayout,
        acquired: Vec<AcquiredRange>,
    ) -> Vec<(Units, u64)> {
        let mut made = Vec::new();
        for (saved, AcquiredRange { range, .. }) in layout.segments.iter().zip(acquired) {
            let segment = self.restore_segment(context, saved, range);
            let mut slot = self.arena.first_block(segment);
            for allocation in &saved.allocations {
                let (offset, end) = (units(allocation.offset_bytes), units(allocation.end_bytes()));
                while self.arena.block(slot).end() < end {
                    slot = self.arena.block(slot).next;
                }
                slot = self.make_live(slot, allocation);
                made.push((end - offset, allocation.requested_bytes));
            }
        }
        self.arena.restore_numbering(layout.next_segment);
        self.ledger.begin_history(layout.digest);
        made
    }

    /// Turns the memory of a saved segment into free blocks with holes between them. Returns the segment.
    fn restore_segment(&mut self, context: &DynContext<'_, L>, saved: &SegmentLayout, range: Range) -> u32 {
        let free = fresh(self.id.group.first().unwrap_or_default());
        let mut end_bytes = 0;
        let parts = saved.extents.iter().flat_map(|extent| {
            let hole_bytes = extent.offset_bytes - end_bytes;
            end_bytes = extent.end_bytes();
            [(BlockState::Hole, hole_bytes), (free, extent.size_bytes)]
        });
        let parts =
            parts.filter(|(_, size_bytes)| *size_bytes > 0).map(|(state, size_bytes)| (state, units(size_bytes)));
        let segment = self.arena.restore_segment(saved.id, range, saved.class, parts);
        context.directory.lock().insert(range, self.number, segment);
        for event in self.events_of_live_segment(segment) {
            trace_segment(&event);
            self.ledger.count_growth();
            self.log.append(event);
        }
        segment
    }

    /// Makes a saved allocation live, carved out of the free block around it. Returns its block.
    pub(super) fn make_live(&mut self, free: Slot, saved: &AllocationLayout) -> Slot {
        let (stream, requested) = (saved.stream, saved.requested_bytes);
        let (offset, end) = (units(saved.offset_bytes), units(saved.end_bytes()));
        let state = BlockState::Allocated { stream, requested, serial: self.ledger.next_serial() };
        let slot = self.arena.carve(free, offset, end, state);
        self.ledger.note_restored(end - offset, requested);
        self.ledger.note_pointer(slot, || self.arena.address(slot));
        self.note_uses_and_name(slot, saved);
        slot
    }

    /// Records the saved uses of a live allocation by other streams, in addition to later ones, and its saved name.
    pub(super) fn note_uses_and_name(&mut self, slot: Slot, saved: &AllocationLayout) {
        for stream in &saved.used_by {
            self.arena.add_use(slot, *stream);
        }
        self.ledger.restore_name(slot, saved.name.as_deref());
    }
}

/// Releases a range. If the driver fails, `mapped` contains the remaining parts.
pub(super) fn give_back<L: Lock>(
    backend: &dyn Backend,
    addresses: Option<&FixedAddresses<L>>,
    range: Range,
    mapped: &mut Extents,
) -> Result<(), BackendError> {
    while let Some((offset_bytes, size_bytes)) = mapped.last().copied() {
        backend.unmap(range, offset_bytes, size_bytes)?;
        mapped.pop();
    }
    release_range(backend, addresses, range)
}
