//! Saves a [`Layout`]: all state on which a pool's later decisions depend.

use super::Allocator;
use crate::config::op::NAME_BYTES_MAX;
use crate::config::restore_error::LayoutError;
use crate::config::{DebugOptions, PoolConfig};
use crate::heap::Heap;
use crate::heap::view::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot};
use crate::history::journal::cut_name;
use crate::history::layout::{AllocationLayout, Extent, HeapLayout, Layout, SegmentLayout};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::PoolId;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Returns the current layout of a pool. It does not include allocations of zero bytes, which have no placement,
    /// and it truncates names to 4,096 bytes.
    ///
    /// In a program with several threads, call this while no thread uses the pool. A layout represents one moment, and
    /// in each heap this moment should be at the same op on every rank.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown, has or learns plans, is in a step, has stitched ranges, or holds memory
    /// of dead segments.
    pub fn save_layout(&self, pool: PoolId) -> Result<Layout, LayoutError> {
        let entry = self.pool(pool)?;
        entry.check_layout_holds()?;
        // Locks all heaps together, so that the layout represents one moment.
        let heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        if heaps.iter().any(|heap| heap.has_stitched()) {
            return Err(LayoutError::Stitched { pool });
        }
        let retired_bytes = heaps.iter().map(|heap| heap.log().retired_bytes()).sum();
        if retired_bytes > 0 {
            return Err(LayoutError::Retired { pool, retired_bytes });
        }
        let heaps =
            heaps.iter().filter(|heap| !heap.is_fresh()).map(|heap| heap_layout(heap, entry.config())).collect();
        Ok(Layout::of_parts(entry.config().clone(), self.granularity_bytes, self.total_limit_bytes(), heaps))
    }
}

fn heap_layout<L: Lock>(heap: &Heap<L>, config: &PoolConfig) -> HeapLayout {
    HeapLayout {
        group: heap.id().group,
        digest: heap.ledger().digest(),
        next_segment: heap.next_segment(),
        segments: heap
            .snapshot()
            .into_iter()
            .map(|segment| segment_layout(segment, config, heap.debug_options()))
            .collect(),
    }
}

fn segment_layout(segment: SegmentSnapshot, config: &PoolConfig, debug: DebugOptions) -> SegmentLayout {
    let mut layout = SegmentLayout {
        id: segment.segment,
        class: segment.class,
        base_offset_bytes: config.base().map(|base| segment.base.0 - base.address()),
        extents: Vec::new(),
        allocations: Vec::new(),
    };
    for BlockSnapshot { offset_bytes, size_bytes, state } in segment.blocks {
        if state == BlockStateSnapshot::Hole {
            continue;
        }
        match layout.extents.last_mut() {
            Some(extent) if extent.end_bytes() == offset_bytes => extent.size_bytes += size_bytes,
            _ => layout.extents.push(Extent { offset_bytes, size_bytes }),
        }
        if let BlockStateSnapshot::Allocated { stream, requested_bytes, name, used_by } = state {
            let name = name.map(|name| cut_name(&name, NAME_BYTES_MAX).into());
            let used_by = used_by.into();
            layout.allocations.push(AllocationLayout {
                offset_bytes,
                size_bytes,
                // The heap's requests contain the guards.
                requested_bytes: debug.grown_bytes(requested_bytes),
                stream,
                used_by,
                name,
            });
        }
    }
    layout
}
