//! The layout of a pool: everything that its future depends on, and nothing else.
//!
//! A saved layout serves two ends. A **restarted rank** restores it into the same pool of a new process, on whatever device
//! it finds, and from then on places as the ranks that did not restart. A **graph tree** restores it into the same pool later,
//! and finds every allocation of that moment at its place. What a restore does stands in [`crate::restore`].
//!
//! ```text
//!  Layout ── configuration, granularity, total limit
//!    └── HeapLayout, by stream ── digest, next segment
//!          └── SegmentLayout, by id ── extents that memory backs, live allocations
//!
//!   segment   ┌───────────┬──────┬───────────┬╌╌╌╌╌╌┬──────┬───────────┬──────┐
//!             │ allocated │      │ allocated │      │      │ allocated │      │
//!             └───────────┴──────┴───────────┴╌╌╌╌╌╌┴──────┴───────────┴──────┘
//!   extents   ├──────────────────────────────┤      ├─────────────────────────┤
//!   free = within an extent, and not allocated          hole = between extents
//! ```
//!
//! It is small because the tiling of a segment is canonical (invariant I2): no two neighbours are both free or both holes, so
//! live allocations and extents say where every block is. The free index follows from the blocks, budgets and thresholds
//! from the sums. Fences are not part of it: they decide who waits, never who lies where.
//!
//! A `Layout` is consistent by construction: it comes from [`save_layout`](crate::Allocator::save_layout) or from a
//! [`LayoutBuilder`], which refuses what no heap could look like. The crate `symmalloc-trace` writes and reads it as text.
//!
//! # Examples
//! ```
//! use symmalloc_core::{Allocator, Config, PoolId};
//! use symmalloc_sim::SimBackend;
//!
//! let rank = |device| Allocator::<_>::new(SimBackend::builder().rank(device).build(), Config::default());
//! let old = rank(0)?;
//! let stream = old.register_stream()?;
//! let weights = old.allocate_named(PoolId::DEFAULT, stream, 48 << 20, "weights")?;
//! let layout = old.save_layout(PoolId::DEFAULT)?;
//!
//! // The rank restarts, on another device.
//! let new = rank(1)?;
//! let stream = new.register_stream()?;
//! let restored = new.restore_layout(PoolId::DEFAULT, &layout)?;
//! let again = restored.find(stream, weights.placement).expect("it was live");
//! assert_eq!(again.name.as_deref(), Some("weights"));
//!
//! // Both go on alike.
//! for allocator in [&old, &new] {
//!     allocator.allocate(PoolId::DEFAULT, stream, 5 << 20)?;
//! }
//! assert_eq!(old.digest(PoolId::DEFAULT)?, new.digest(PoolId::DEFAULT)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod contradiction;
mod parts;
mod rules;

pub use contradiction::Contradiction;
pub(crate) use parts::Content;
pub use parts::{AllocationLayout, Extent, HeapLayout, Layout, SegmentLayout};
pub use rules::{LayoutBuilder, LayoutItem, Misfit};

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::block_table::BlockState;
use crate::errors::UnknownError;
use crate::heap::Heap;
use crate::held::HeapCell;
use crate::ids::{PoolId, SegmentId};
use crate::lock::Lock;
use crate::op::NAME_BYTES_MAX;
use crate::units::bytes;
use thiserror::Error;

impl HeapLayout {
    /// Of a heap in which nothing happened yet.
    pub(crate) fn of_fresh(heap: &Heap) -> Self {
        HeapLayout {
            stream: heap.stream,
            digest: heap.first_digest(),
            next_segment: SegmentId(0),
            segments: Vec::new(),
        }
    }

    fn of(heap: &Heap) -> Self {
        HeapLayout {
            stream: heap.stream,
            digest: heap.digest,
            next_segment: heap.next_segment,
            segments: heap.table.segments_in_order().into_iter().map(|slot| SegmentLayout::of(heap, slot)).collect(),
        }
    }
}

impl SegmentLayout {
    fn of(heap: &Heap, segment: u32) -> Self {
        let first = heap.table.block(heap.table.segment(segment).first);
        let mut layout = SegmentLayout {
            id: heap.table.segment(segment).id,
            class: first.home,
            extents: Vec::new(),
            allocations: Vec::new(),
        };
        for slot in heap.table.blocks_of(segment) {
            let block = heap.table.block(slot);
            let (offset_bytes, size_bytes) = (bytes(block.offset()), bytes(block.size));
            if block.is_hole() {
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
                    used_by: heap.fences.fences(block.fences).map(|fence| fence.stream).collect(),
                    name: heap.names.find(slot).map(|name| beginning(name).into()),
                });
            }
        }
        layout
    }
}

/// As much of a name as its text can hold.
fn beginning(name: &str) -> &str {
    let end = (0..=name.len().min(NAME_BYTES_MAX)).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}

/// Why `save_layout` failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
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
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// The layout of a pool as it is now. Allocations of zero bytes lie nowhere and are not in it; of a name longer than
    /// 4,096 bytes, the beginning is.
    ///
    /// With several threads, call it when none of them is in the pool: a layout is of one moment, and its place in each
    /// heap's history should be the same on every rank.
    ///
    /// # Errors
    /// When the pool is unknown, or holds memory of dead segments.
    pub fn save_layout(&self, pool: PoolId) -> Result<Layout, LayoutError> {
        let entry = self.pool(pool)?;
        // All heaps at once, so that the layout is of one moment.
        let heaps: Vec<_> = entry.heaps().map(HeapCell::lock).collect();
        let retired_bytes = heaps.iter().map(|heap| heap.log.retired_bytes()).sum();
        if retired_bytes > 0 {
            return Err(LayoutError::Retired { pool, retired_bytes });
        }
        Ok(Layout {
            config: entry.config.clone(),
            granularity_bytes: self.granularity_bytes,
            total_limit_bytes: self.limit_bytes(),
            heaps: heaps.iter().filter(|heap| !heap.is_fresh()).map(|heap| HeapLayout::of(heap)).collect(),
        })
    }
}
