//! An index of blocks by location, for revivals, which name memory by its offset.
//!
//! The block table links the blocks of a segment in offset order, but cannot find a block by offset. The index remembers blocks that
//! earlier searches passed, called *anchors*. A search starts at the last anchor at or before the wanted offset, and walks from there:
//!
//! ```text
//! blocks    ├──┬─────┬──┬────┬───┬─────────┬──┬───┤
//! anchors   ▲     ▲       ▲                            the wanted offset is in the block after the third one
//!                         └──► ──►
//! ```
//!
//! To keep splits and merges cheap, they do not update the index. A search that meets an anchor whose block has moved or no longer exists
//! drops the anchor. Each block that a search walks over becomes an anchor. An op adds at most a few blocks, so all searches together walk
//! over at most a few blocks per op, after one pass over the heap.

use crate::blocks::table::{BlockState, BlockTable, Location, Slot};
use crate::types::units::Units;
use crate::types::work;
use std::collections::BTreeMap;

/// Blocks by location. Some entries may be out of date.
#[derive(Debug, Default)]
pub(crate) struct OffsetIndex {
    anchors: BTreeMap<Location, Slot>,
}

impl OffsetIndex {
    /// Returns the block that contains an offset of a segment.
    pub(crate) fn find(&mut self, table: &BlockTable, segment: u32, offset: Units) -> Option<Slot> {
        let there = table.segment(segment);
        if offset >= there.end {
            return None;
        }
        let (start, wanted) = (Location::new(there.id, 0), Location::new(there.id, offset));
        let mut slot = table.first(segment);
        while let Some((&location, &anchor)) = self.anchors.range(start..=wanted).next_back() {
            let is_current = table.find(anchor).is_some_and(|block| {
                block.location == location
                    && block.segment == segment
                    && block.state != BlockState::Vacant
                    && !block.is_place()
            });
            work::count(1);
            if is_current {
                slot = anchor;
                break;
            }
            self.anchors.remove(&location);
        }
        while table.block(slot).end() <= offset {
            slot = table.block(slot).next;
            self.anchors.insert(table.block(slot).location, slot);
            work::count(1);
        }
        Some(slot)
    }
}
