//! Rejoin: a fresh pool obtains what the saved one held. All or nothing.
//!
//! ```text
//!  charge every heap ─► reserve and map every segment, in (stream, sequence) order ─► lay the blocks, log the births
//!         │ limit                      │ driver                                            nothing fails here
//!         └► refund                    └► give back what was obtained, refund
//! ```

use super::{RestoreError, Saved};
use crate::allocator::Allocator;
use crate::backend::{Backend, BackendError, Range};
use crate::block_table::BlockState;
use crate::config::SegmentPolicy;
use crate::heap::{Heap, Surroundings};
use crate::layout::{Content, SegmentLayout};
use crate::lock::{Lock, LockCell};
use crate::observe::events_of_live_segment;
use crate::obtain::{fresh, trace_segment};
use crate::tally::Tally;
use crate::units::{UNIT_BYTES, bytes, units};
use smallvec::SmallVec;

/// A range for a segment, with what is mapped of it so far: (offset, size) in bytes.
struct Obtained {
    range: Range,
    mapped: SmallVec<[(u64, u64); 1]>,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    pub(super) fn rejoin(&self, heaps: &mut [Saved<'_>]) -> Result<(), RestoreError> {
        for Saved { heap, .. } in &mut *heaps {
            // What an earlier attempt could not give back is still charged.
            let (_, failure) = heap.release_retired(&self.around);
            failure.map_or(Ok(()), Err)?;
        }
        self.charge_all(heaps)?;
        let mut obtained: Vec<Vec<Obtained>> = Vec::new();
        for at in 0..heaps.len() {
            let mut ranges = Vec::new();
            let outcome = obtain_heap(&self.around, &heaps[at], &mut ranges);
            obtained.push(ranges);
            if let Err(error) = outcome {
                self.give_all_back(heaps, obtained);
                return Err(error.into());
            }
        }
        for (saved, ranges) in heaps.iter_mut().zip(obtained) {
            saved.heap.budgets(&self.around).confirm(saved.layout.reserved_bytes());
            for (segment, Obtained { range, .. }) in saved.layout.segments.iter().zip(ranges) {
                self.lay(saved.heap, segment, range);
            }
            saved.take_up_history();
        }
        Ok(())
    }

    fn charge_all(&self, heaps: &[Saved<'_>]) -> Result<(), RestoreError> {
        for (at, saved) in heaps.iter().enumerate() {
            let needed_bytes = saved.layout.reserved_bytes();
            if let Err(met) = saved.heap.budgets(&self.around).charge(needed_bytes) {
                for earlier in &heaps[..at] {
                    earlier.heap.budgets(&self.around).refund(earlier.layout.reserved_bytes());
                }
                return Err(RestoreError::Limit { scope: met.scope, limit_bytes: met.limit_bytes, needed_bytes });
            }
        }
        Ok(())
    }

    /// Undoes what was obtained and charged. What the driver does not take back stays charged until a trim succeeds.
    fn give_all_back(&self, heaps: &mut [Saved<'_>], obtained: Vec<Vec<Obtained>>) {
        let mut obtained = obtained.into_iter();
        for Saved { heap, layout } in heaps {
            let mut kept_bytes = 0;
            for Obtained { range, mut mapped } in obtained.next().into_iter().flatten() {
                if give_back(&self.around.backend, range, &mut mapped).is_err() {
                    kept_bytes += mapped.iter().map(|(_, size)| size).sum::<u64>();
                    heap.log.keep_stray(range, mapped);
                }
            }
            heap.budgets(&self.around).confirm(kept_bytes);
            heap.budgets(&self.around).refund(layout.reserved_bytes() - kept_bytes);
        }
    }

    /// Puts a segment whose memory is there into all books.
    fn lay(&self, heap: &mut Heap, saved: &SegmentLayout, range: Range) {
        let free = fresh(heap.stream.unwrap_or_default());
        let mut segment = None;
        for piece in saved.pieces() {
            let size = units(piece.size_bytes);
            let slot = match segment {
                None => heap.table.add_segment(saved.id, range, saved.class, size, free),
                Some(segment) => heap.table.extend(segment, size, free),
            };
            let segment = *segment.insert(heap.table.block(slot).segment);
            match piece.content {
                Content::Free => heap.link(slot),
                Content::Allocated(allocation) => {
                    heap.make_live(slot, allocation);
                    self.tally(|tally| tally.allocate(piece.size_bytes, allocation.requested_bytes));
                }
                Content::Hole => {
                    heap.table.block_mut(slot).state = BlockState::Hole;
                    heap.table.segment_mut(segment).mapped -= size;
                    heap.hole_count += 1;
                }
            }
        }
        let segment = segment.expect("a saved segment has an extent");
        heap.mapped += bytes(heap.table.segment(segment).mapped);
        self.around.directory.lock().insert(range, heap.id, segment);
        for event in events_of_live_segment(heap, segment) {
            trace_segment(&event);
            heap.rare.growths += 1;
            heap.log.append(event);
        }
    }
}

/// Reserves and maps the segments of a heap.
fn obtain_heap<B: Backend, L: Lock>(
    around: &Surroundings<B, L>,
    saved: &Saved<'_>,
    obtained: &mut Vec<Obtained>,
) -> Result<(), BackendError> {
    for segment in &saved.layout.segments {
        let range_bytes = match saved.heap.config.segments() {
            SegmentPolicy::Expandable(knobs) => {
                bytes(saved.heap.rules.whole_granules(units(knobs.range_bytes.next_multiple_of(UNIT_BYTES))))
            }
            SegmentPolicy::Fixed(_) | SegmentPolicy::Reserved { .. } => segment.end_bytes(),
        };
        let range = around.backend.reserve(range_bytes)?;
        obtained.push(Obtained { range, mapped: SmallVec::new() });
        for extent in &segment.extents {
            around.backend.map(range, extent.offset_bytes, extent.size_bytes)?;
            let newest = obtained.last_mut().expect("just pushed");
            newest.mapped.push((extent.offset_bytes, extent.size_bytes));
        }
    }
    Ok(())
}

/// Gives a range back, and tells in `mapped` what is left of it when the driver fails.
fn give_back<B: Backend>(
    backend: &B,
    range: Range,
    mapped: &mut SmallVec<[(u64, u64); 1]>,
) -> Result<(), BackendError> {
    while let Some((offset_bytes, size_bytes)) = mapped.last().copied() {
        backend.unmap(range, offset_bytes, size_bytes)?;
        mapped.pop();
    }
    backend.release(range)
}
