//! Stitched ranges: addresses that name memory a second time.
//!
//! A heap's memory lies in its own segments: that is its *home*. A stitched range is a segment too, but without memory of its
//! own: its granules are mapped onto granules at home, in any order.
//!
//! ```text
//!  home      │ a │ 1 │ 2 │   b   │ 3 │ 4 │ 5 │ c │
//!                └───┴───────────┴───┴───┴───┴─────── blocks that are elsewhere, a granule each
//!  stitched  │ 3   4   5   1   2 │                    one block, free or in use
//! ```
//! A granule of memory may be mapped into any number of stitched ranges. It is in use, or free, under exactly one of its names:
//! under the others a block covers it that is [`Elsewhere`](crate::blocks::table::BlockState::Elsewhere).

use crate::types::ids::StreamId;
use crate::types::units::{Units, bytes};
use smallvec::SmallVec;
use std::ops::Range;

/// Where a granule of memory lies. In order of segment slot and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Granule {
    /// Slot of the segment in the table, which is no stitched one.
    pub(crate) segment: u32,
    pub(crate) offset: Units,
}

/// One stitched range.
#[derive(Debug)]
pub(crate) struct StitchedRange {
    /// Slot of its segment in the table.
    pub(crate) segment: u32,
    /// What each granule of its addresses is mapped onto; `None` when that was given up.
    pub(crate) granules: Vec<Option<Granule>>,
    /// Streams that used its addresses, besides those of its blocks.
    pub(crate) users: SmallVec<[StreamId; 2]>,
}

impl StitchedRange {
    /// What a part of its addresses is mapped onto, in that order; `None` when some of it is mapped onto nothing, or not there.
    pub(crate) fn home(&self, part: Range<usize>) -> Option<Vec<Granule>> {
        self.granules.get(part)?.iter().copied().collect()
    }

    /// How many of its granules are mapped.
    pub(crate) fn aliases(&self) -> usize {
        self.granules.iter().flatten().count()
    }

    /// The mapped parts of its addresses, as offset and size in bytes.
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
