//! The blocks of PyTorch's rule: a partition of each segment, and the free blocks in the order (stream, size, address).
//!
//! ```text
//! segment   │ allocated │ free │ allocated │ pending │ free │ ···· unmapped ···· │      (unmapped: expandable only)
//!             blocks partition the segment; no two neighbors are both free or both unmapped
//! ```

use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::ids::{PoolId, SegmentId, StreamId};
use symmalloc_core::units::MIB;
use symmalloc_core::work;

/// Size class of a request. Small and large requests never share a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Small,
    Large,
}

impl Class {
    /// Returns PyTorch's `kSmallBuffer` or `kLargeBuffer`: the page size of an expandable segment, in bytes, and the size of a
    /// fixed segment that several blocks share.
    pub(super) fn page_bytes(self) -> u64 {
        match self {
            Class::Small => 2 * MIB,
            Class::Large => 20 * MIB,
        }
    }
}

/// Key of a free list. A block serves only requests with the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct List {
    pub(super) pool: PoolId,
    pub(super) class: Class,
    pub(super) stream: StreamId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelState {
    Free,
    Allocated,
    /// Freed by the program. Becomes free after this number of events.
    Pending {
        events: u32,
    },
    /// Addresses without memory.
    Unmapped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelBlock {
    pub(super) size_bytes: u64,
    pub(super) segment: SegmentId,
    pub(super) list: List,
    pub(super) state: ModelState,
}

/// All blocks of a rank.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    by_address: BTreeMap<u64, ModelBlock>,
    /// (list, size, address) of each free block.
    free: BTreeSet<(List, u64, u64)>,
    /// (list, address) of each unmapped block.
    unmapped: BTreeSet<(List, u64)>,
}

impl Blocks {
    /// Returns the block that starts at `address`.
    ///
    /// # Panics
    /// Panics if no block starts there.
    pub(super) fn at(&self, address: u64) -> ModelBlock {
        self.by_address[&address]
    }

    /// Removes and returns the block that starts at `address`.
    ///
    /// # Panics
    /// Panics if no block starts there.
    pub(super) fn take(&mut self, address: u64) -> ModelBlock {
        let block = self.by_address.remove(&address).expect("a block starts here");
        match block.state {
            ModelState::Free => _ = self.free.remove(&(block.list, block.size_bytes, address)),
            ModelState::Unmapped => _ = self.unmapped.remove(&(block.list, address)),
            ModelState::Allocated | ModelState::Pending { .. } => {}
        }
        block
    }

    /// Inserts a block. Merges a free or unmapped block with neighbors in the same state, and returns the start of the result.
    pub(super) fn put(&mut self, mut address: u64, mut block: ModelBlock) -> u64 {
        if matches!(block.state, ModelState::Free | ModelState::Unmapped) {
            if let Some((next, neighbor)) = self.next(address, &block)
                && neighbor.state == block.state
            {
                block.size_bytes += self.take(next).size_bytes;
            }
            if let Some((previous, neighbor)) = self.previous(address, &block)
                && neighbor.state == block.state
            {
                block.size_bytes += self.take(previous).size_bytes;
                address = previous;
            }
        }
        match block.state {
            ModelState::Free => _ = self.free.insert((block.list, block.size_bytes, address)),
            ModelState::Unmapped => _ = self.unmapped.insert((block.list, address)),
            ModelState::Allocated | ModelState::Pending { .. } => {}
        }
        self.by_address.insert(address, block);
        address
    }

    /// Returns the next block in the same segment.
    pub(super) fn next(&self, address: u64, block: &ModelBlock) -> Option<(u64, ModelBlock)> {
        let next = address + block.size_bytes;
        let neighbor = *self.by_address.get(&next)?;
        (neighbor.segment == block.segment).then_some((next, neighbor))
    }

    /// Returns the previous block in the same segment.
    pub(super) fn previous(&self, address: u64, block: &ModelBlock) -> Option<(u64, ModelBlock)> {
        let (&previous, &neighbor) = self.by_address.range(..address).next_back()?;
        let touches = previous + neighbor.size_bytes == address && neighbor.segment == block.segment;
        touches.then_some((previous, neighbor))
    }

    /// Returns the smallest free block that fits, and among equal sizes the one with the lowest address.
    pub(super) fn best_fit(&self, list: List, size: u64) -> Option<u64> {
        self.fitting(list, size).next()
    }

    fn fitting(&self, list: List, size: u64) -> impl Iterator<Item = u64> {
        self.free.range((list, size, 0)..=(list, u64::MAX, u64::MAX)).map(|&(_, _, address)| address)
    }

    /// Returns the best fit, where a block before unmapped addresses counts with the size to which it can grow. Blocks that
    /// cannot grow, or can grow less, are preferred.
    pub(super) fn best_fit_expandable(&self, list: List, size: u64) -> Option<u64> {
        let room = |address: u64| {
            let block = self.at(address);
            let behind = self.next(address, &block).filter(|(_, next)| next.state == ModelState::Unmapped);
            block.size_bytes + behind.map_or(0, |(_, next)| next.size_bytes)
        };
        let mut fitting = self.fitting(list, size);
        let mut best = fitting.next()?;
        for address in fitting {
            work::count(1);
            if room(address) >= room(best) {
                break;
            }
            best = address;
        }
        Some(best)
    }

    /// Returns the unmapped blocks of a list, in ascending order of address.
    pub(super) fn unmapped_of(&self, list: List) -> impl Iterator<Item = u64> {
        self.unmapped.range((list, 0)..=(list, u64::MAX)).inspect(|_| work::count(1)).map(|&(_, address)| address)
    }

    /// Returns the free blocks of a pool or of all pools.
    pub(super) fn free_of(&self, pool: Option<PoolId>) -> Vec<u64> {
        let of_pool = |list: &List| pool.is_none_or(|pool| pool == list.pool);
        self.free
            .iter()
            .inspect(|_| work::count(1))
            .filter(|(list, ..)| of_pool(list))
            .map(|&(_, _, address)| address)
            .collect()
    }

    /// Counts a completed event of a pending block, and frees the block after the last one.
    pub(super) fn event_done(&mut self, address: u64) {
        let block = self.take(address);
        let state = match block.state {
            ModelState::Pending { events } if events > 1 => ModelState::Pending { events: events - 1 },
            _ => ModelState::Free,
        };
        self.put(address, ModelBlock { state, ..block });
    }
}
