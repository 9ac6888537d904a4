//! Saving a [`Layout`]: everything that a pool's future depends on.

use super::Allocator;
use crate::blocks::table::BlockState;
use crate::config::errors::{PoolSleeps, UnknownError};
use crate::config::op::NAME_BYTES_MAX;
use crate::heap::Heap;
use crate::history::layout::{AllocationLayout, Extent, HeapLayout, Layout, SegmentLayout};
use crate::history::names::cut_name;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::PoolId;
use thiserror::Error;

/// Why `save_layout` failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool sleeps.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// Large blocks are put together from pieces, and a layout cannot hold that.
    #[error("{pool} has stitched ranges: free what lies in them, and trim the pool")]
    Stitched {
        /// The pool.
        pool: PoolId,
    },
    /// Dead segments still count towards the limits, and a layout cannot hold them.
    #[error(
        "{retired_bytes} bytes of dead segments of {pool} are not back on the device: let the observers acknowledge, or trim"
    )]
    Retired {
        /// The pool.
        pool: PoolId,
        /// Bytes of dead segments that observers hold, or that the driver did not take back.
        retired_bytes: u64,
    },
    /// The pool is in a step, or has plans or learns some: a layout cannot hold that.
    #[error(
        "{pool} is in a step, has plans or learns some, which a layout cannot hold: end the step, and call drop_plans"
    )]
    Planned {
        /// The pool.
        pool: PoolId,
    },
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// The layout of a pool as it is now. Allocations of zero bytes lie nowhere and are not in it; of a name longer than
    /// 4,096 bytes, the beginning is.
    ///
    /// With several threads, call it when none of them is in the pool: a layout is of one moment, and its place in each
    /// heap's history should be the same on every rank.
    ///
    /// # Errors
    /// When the pool is unknown, has plans or learns some, is in a step, has stitched ranges, or holds memory of dead segments.
    pub fn save_layout(&self, pool: PoolId) -> Result<Layout, LayoutError> {
        let entry = self.pool(pool)?;
        entry.check_awake(pool)?;
        // All heaps at once, so that the layout is of one moment.
        let heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        if entry.step.lock().is_some() || heaps.iter().any(|heap| heap.remembers_steps()) {
            return Err(LayoutError::Planned { pool });
        }
        if heaps.iter().any(|heap| heap.has_stitched()) {
            return Err(LayoutError::Stitched { pool });
        }
        let retired_bytes = heaps.iter().map(|heap| heap.log().retired_bytes()).sum();
        if retired_bytes > 0 {
            return Err(LayoutError::Retired { pool, retired_bytes });
        }
        Ok(Layout {
            config: entry.config.clone(),
            granularity_bytes: self.granularity_bytes,
            total_limit_bytes: self.limit_bytes(),
            heaps: heaps.iter().filter(|heap| !heap.is_fresh()).map(|heap| heap_layout(heap)).collect(),
        })
    }
}

fn heap_layout<L: Lock>(heap: &Heap<L>) -> HeapLayout {
    HeapLayout {
        stream: heap.identity().stream,
        digest: heap.digest(),
        next_segment: heap.next_segment(),
        segments: heap.segments().into_iter().map(|segment| segment_layout(heap, segment)).collect(),
    }
}

fn segment_layout<L: Lock>(heap: &Heap<L>, segment: u32) -> SegmentLayout {
    let there = heap.segment(segment);
    let mut layout = SegmentLayout { id: there.id, class: there.class, extents: Vec::new(), allocations: Vec::new() };
    for block in heap.blocks(segment) {
        let (offset_bytes, size_bytes) = (block.offset_bytes, block.size_bytes);
        if block.state == BlockState::Hole {
            continue;
        }
        match layout.extents.last_mut() {
            Some(extent) if extent.end_bytes() == offset_bytes => extent.size_bytes += size_bytes,
            _ => layout.extents.push(Extent { offset_bytes, size_bytes }),
        }
        if let BlockState::Allocated { stream, requested, .. } = block.state {
            layout.allocations.push(AllocationLayout {
                offset_bytes,
                size_bytes,
                requested_bytes: requested,
                stream,
                used_by: block.other_streams.into(),
                name: block.name.map(|name| cut_name(name, NAME_BYTES_MAX).into()),
            });
        }
    }
    layout
}
