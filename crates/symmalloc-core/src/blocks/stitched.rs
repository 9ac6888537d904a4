//! Stitched ranges: addresses that map memory a second time.
//!
//! A heap's memory lies in ordinary segments, its *home*. A stitched range is a segment without memory: its granules
//! are mapped onto home granules, in any order.
//!
//! ```text
//!  home      │ a │ 1 │ 2 │   b   │ 3 │ 4 │ 5 │ c │
//!                └───┴───────────┴───┴───┴───┴─────── blocks that are elsewhere, a granule each
//!  stitched  │ 3   4   5   1   2 │                    one block, free or in use
//! ```
//! A granule of memory may be mapped into any number of stitched ranges. It is allocated or free at exactly one of its
//! addresses. At the others, it is covered by an [`Elsewhere`](crate::blocks::table::BlockState::Elsewhere) block.

use crate::types::ids::StreamId;
use crate::types::units::{Units, bytes};
use smallvec::SmallVec;
use std::ops::Range;

/// The position of a granule of memory, ordered by segment slot and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Granule {
    /// Slot of the segment in the table; never a stitched one.
    pub(crate) segment: u32,
    pub(crate) offset: Units,
}

/// One stitched range.
#[derive(Debug)]
pub(crate) struct StitchedRange {
    /// Slot of its segment in the table.
    pub(crate) segment: u32,
    /// The memory to which each granule of its addresses is mapped; `None` if the granule was unmapped.
    pub(crate) granules: Vec<Option<Granule>>,
    /// Streams that used its addresses, in addition to those of its blocks.
    pub(crate) users: SmallVec<[StreamId; 2]>,
}

impl StitchedRange {
    /// Returns the memory to which a part of the addresses is mapped, in order. Returns `None` if some of it is
    /// unmapped or out of range.
    pub(crate) fn home(&self, part: Range<usize>) -> Option<Vec<Granule>> {
        self.granules.get(part)?.iter().copied().collect()
    }

    /// Returns the number of mapped granules.
    pub(crate) fn aliases(&self) -> usize {
        self.granules.iter().flatten().count()
    }

    /// Returns the mapped parts of the addresses, as offset and size in bytes.
    pub(crate) fn mapped(&self, granule: Units) -> SmallVec<[(u64, u64); 1]> {
        let mut mapped: SmallVec<[(u64, u64); 1]> = SmallVec::new();
        for at in (0..self.granules.len()).filter(|at| self.granules[*at].is_some()) {
            let offset_bytes = at as u64 * bytes(granule);
            match mapped.last_mut() {
                Some((offset, size)) if *offset + *size == offset_bytes => *size += bytes(granule),
                _ => mapped.push((offset_bytes, bytes(granule))),
            }
        }
        mapped
    }
}
