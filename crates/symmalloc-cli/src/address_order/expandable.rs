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
use super::blocks::{List, ModelBlock, ModelState};
use symmalloc_core::backend::{Backend, BackendError};
use symmalloc_core::units::GIB;

/// Address range of one expandable segment, in bytes: 9/8 of a device's memory, as in PyTorch, for a device of about
/// 142 GiB. It is a multiple of both page sizes.
const RANGE_BYTES: u64 = 160 * GIB;

impl AddressOrder {
    /// Maps pages until there is a free block of at least `size` bytes, and returns its address.
    pub(super) fn expanded_block(&mut self, list: List, size: u64) -> Result<u64, BackendError> {
        let mut address = match self.room_for(list, size) {
            Some(address) => address,
            None => {
                let range = self.device.reserve(RANGE_BYTES.max(size.next_multiple_of(list.class.page_bytes())))?;
                self.add_segment(list, range, ModelState::Unmapped)
            }
        };
        if self.blocks.at(address).state == ModelState::Unmapped {
            address = self.map_pages(address, size)?;
        }
        loop {
            let missing = size.saturating_sub(self.blocks.at(address).size_bytes);
            if missing == 0 {
                return Ok(address);
            }
            address = self.map_pages(address + self.blocks.at(address).size_bytes, missing)?;
        }
    }

    /// Returns the start of a run of free and unmapped blocks of at least `size` bytes in total.
    fn room_for(&self, list: List, size: u64) -> Option<u64> {
        let usable = |block: &ModelBlock| matches!(block.state, ModelState::Free | ModelState::Unmapped);
        self.blocks.unmapped_of(list).find_map(|unmapped| {
            let block = self.blocks.at(unmapped);
            let before = self.blocks.previous(unmapped, &block).filter(|(_, before)| usable(before));
            let (start, block) = before.unwrap_or((unmapped, block));
            let mut run = std::iter::successors(Some((start, block)), |(address, block)| {
                self.blocks.next(*address, block).filter(|(_, next)| usable(next))
            });
            let mut room = 0;
            run.any(|(_, block)| {
                room += block.size_bytes;
                room >= size
            })
            .then_some(start)
        })
    }

    /// Maps whole pages for at least `size` bytes at the start of an unmapped block, or for all of it. Returns the start of the
    /// resulting free block.
    fn map_pages(&mut self, address: u64, size: u64) -> Result<u64, BackendError> {
        let block = self.blocks.at(address);
        let range = self.born[block.segment.index()].range;
        let mapped = size.min(block.size_bytes).next_multiple_of(block.list.class.page_bytes());
        self.device.map(range, address - range.base.0, mapped)?;
        self.note(true, &block, address - range.base.0, mapped);
        self.blocks.take(address);
        if mapped < block.size_bytes {
            self.blocks.put(address + mapped, ModelBlock { size_bytes: block.size_bytes - mapped, ..block });
        }
        Ok(self.blocks.put(address, ModelBlock { size_bytes: mapped, state: ModelState::Free, ..block }))
    }

    /// Unmaps the pages that lie entirely inside a free block. Releases the segment if it has no memory left.
    pub(super) fn unmap_whole_pages(&mut self, address: u64) -> Result<(), BackendError> {
        let block = self.blocks.at(address);
        let range = self.born[block.segment.index()].range;
        let (page, base) = (block.list.class.page_bytes(), range.base.0);
        let end = address + block.size_bytes;
        let (from, to) = (base + (address - base).next_multiple_of(page), end - (end - base) % page);
        if from >= to {
            return Ok(());
        }
        self.device.unmap(range, from - base, to - from)?;
        self.note(false, &block, from - base, to - from);
        self.blocks.take(address);
        for (start, end) in [(address, from), (to, end)] {
            if start < end {
                self.blocks.put(start, ModelBlock { size_bytes: end - start, ..block });
            }
        }
        let unmapped =
            self.blocks.put(from, ModelBlock { size_bytes: to - from, state: ModelState::Unmapped, ..block });
        if self.blocks.at(unmapped).size_bytes == range.size_bytes {
            self.device.release(range)?;
            self.blocks.take(unmapped);
            self.born[block.segment.index()].alive = false;
        }
        Ok(())
    }
}
