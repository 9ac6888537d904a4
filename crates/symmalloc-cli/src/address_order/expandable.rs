//! PyTorch's expandable segments: a range of addresses per (pool, stream, class), mapped page by page.
//!
//! ```text
//! request of 3 pages      │ allocated │ free ½ │ ········ unmapped ········ │
//!                                     └─ map 3 pages (2½, rounded up to pages) ┐
//!                         │ allocated │ the request │ free ½ │ ·· unmapped ·· │
//! ```
//!
//! The lowest unmapped addresses are mapped first, together with a free block directly before them. This order fills
//! the holes that `emptyCache` leaves before the range grows at its end.

use super::AddressOrder;
use super::blocks::{BlockKey, List, ModelBlock, ModelState};
use symmalloc_core::backend::{Backend, BackendError};
use symmalloc_core::units::GIB;

/// Address range of one expandable segment, in bytes: 9/8 of a device's memory, as in PyTorch, for a device of about
/// 142 GiB. It is a multiple of both page sizes.
const RANGE_BYTES: u64 = 160 * GIB;

impl AddressOrder {
    /// Maps pages until there is a free block of at least `size` bytes, and returns it.
    pub(super) fn expanded_block(&mut self, list: List, size: u64) -> Result<BlockKey, BackendError> {
        let mut key = match self.room_for(list, size) {
            Some(key) => key,
            None => {
                let range = self.device.reserve(RANGE_BYTES.max(size.next_multiple_of(list.class.page_bytes())))?;
                self.add_segment(list, range, ModelState::Unmapped)
            }
        };
        if self.blocks.at(key).state == ModelState::Unmapped {
            key = self.map_pages(key, size)?;
        }
        loop {
            let missing = size.saturating_sub(self.blocks.at(key).size_bytes);
            if missing == 0 {
                return Ok(key);
            }
            let (unmapped, _) = self.blocks.next(key).expect("the run of free and unmapped blocks is long enough");
            key = self.map_pages(unmapped, missing)?;
        }
    }

    /// Returns the start of a run of free and unmapped blocks of at least `size` bytes in total.
    fn room_for(&self, list: List, size: u64) -> Option<BlockKey> {
        let usable = |block: &ModelBlock| matches!(block.state, ModelState::Free | ModelState::Unmapped);
        self.blocks.unmapped_of(list).find_map(|unmapped| {
            let before = self.blocks.previous(unmapped).filter(|(_, before)| usable(before));
            let start = before.map_or(unmapped, |(before, _)| before);
            let mut run = std::iter::successors(Some((start, self.blocks.at(start))), |(key, _)| {
                self.blocks.next(*key).filter(|(_, next)| usable(next))
            });
            let mut room = 0;
            run.any(|(_, block)| {
                room += block.size_bytes;
                room >= size
            })
            .then_some(start)
        })
    }

    /// Maps whole pages for at least `size` bytes at the start of an unmapped block, or the whole block if it is smaller. Returns the
    /// resulting free block.
    fn map_pages(&mut self, key: BlockKey, size: u64) -> Result<BlockKey, BackendError> {
        let block = self.blocks.at(key);
        let range = self.born[block.segment.index()].range;
        let mapped = size.min(block.size_bytes).next_multiple_of(block.list.class.page_bytes());
        let offset_bytes = block.address - range.base.0;
        self.device.map(range, offset_bytes, mapped)?;
        self.note(true, &block, offset_bytes, mapped);
        if mapped < block.size_bytes {
            self.blocks.split(key, mapped);
        }
        Ok(self.blocks.set_state(key, ModelState::Free))
    }

    /// Unmaps the pages that lie entirely inside a free block. Releases the segment if it has no memory left.
    pub(super) fn unmap_whole_pages(&mut self, mut key: BlockKey) -> Result<(), BackendError> {
        let block = self.blocks.at(key);
        let range = self.born[block.segment.index()].range;
        let (page, base) = (block.list.class.page_bytes(), range.base.0);
        let end = block.address + block.size_bytes;
        let (from, to) = (base + (block.address - base).next_multiple_of(page), end - (end - base) % page);
        if from >= to {
            return Ok(());
        }
        self.device.unmap(range, from - base, to - from)?;
        self.note(false, &block, from - base, to - from);
        if block.address < from {
            key = self.blocks.split(key, from - block.address);
        }
        if to < end {
            self.blocks.split(key, to - from);
        }
        let unmapped = self.blocks.set_state(key, ModelState::Unmapped);
        if self.blocks.at(unmapped).size_bytes == range.size_bytes {
            self.device.release(range)?;
            self.blocks.remove(unmapped);
            self.born[block.segment.index()].alive = false;
        }
        Ok(())
    }
}
