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
    /// Returns PyTorch's `kSmallBuffer` or `kLargeBuffer`, in bytes: the page size of an expandable segment, which is also the size of a
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
    /// Freed by the program. The block becomes free once this number of events has completed.
    Pending {
        events: u32,
    },
    /// Addresses without memory.
    Unmapped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelBlock {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    pub(super) segment: SegmentId,
    pub(super) list: List,
    pub(super) state: ModelState,
}

/// Identifies a block. A key is valid until the block merges into its predecessor. Only free and unmapped blocks merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockKey(u32);

/// A block and its neighbors in the segment.
#[derive(Clone, Copy, Debug)]
struct Linked {
    block: ModelBlock,
    previous: Option<BlockKey>,
    next: Option<BlockKey>,
}

/// All blocks of a rank.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Blocks by key.
    linked: Vec<Linked>,
    /// Keys that no block has, for reuse.
    vacant: Vec<BlockKey>,
    /// (size, address) of the free blocks of each list.
    free: BTreeMap<List, BTreeSet<(u64, u64, BlockKey)>>,
    /// (list, address) of each unmapped block.
    unmapped: BTreeSet<(List, u64, BlockKey)>,
}

impl Blocks {
    /// Returns a block.
    pub(super) fn at(&self, key: BlockKey) -> ModelBlock {
        self.linked[key.0 as usize].block
    }

    /// Adds a new segment as one block.
    pub(super) fn add(&mut self, block: ModelBlock) -> BlockKey {
        let key = self.insert(Linked { block, previous: None, next: None });
        self.list(key);
        key
    }

    /// Removes a segment that consists of a single block.
    pub(super) fn remove(&mut self, key: BlockKey) {
        self.unlist(key);
        self.vacant.push(key);
    }

    /// Shrinks a block to `size_bytes`. The rest becomes a new block in the same state.
    pub(super) fn split(&mut self, key: BlockKey, size_bytes: u64) -> BlockKey {
        self.unlist(key);
        let Linked { block, next, .. } = self.linked[key.0 as usize];
        let (address, rest_bytes) = (block.address + size_bytes, block.size_bytes - size_bytes);
        let rest = ModelBlock { address, size_bytes: rest_bytes, ..block };
        let rest = self.insert(Linked { block: rest, previous: Some(key), next });
        if let Some(next) = next {
            self.linked[next.0 as usize].previous = Some(rest);
        }
        let own = &mut self.linked[key.0 as usize];
        (own.block.size_bytes, own.next) = (size_bytes, Some(rest));
        self.list(key);
        self.list(rest);
        rest
    }

    /// Changes the state of a block. Merges a free or unmapped block with neighbors in the same state. Returns the resulting block.
    pub(super) fn set_state(&mut self, mut key: BlockKey, state: ModelState) -> BlockKey {
        self.unlist(key);
        self.linked[key.0 as usize].block.state = state;
        if matches!(state, ModelState::Free | ModelState::Unmapped) {
            if let Some((next, _)) = self.next(key).filter(|(_, next)| next.state == state) {
                self.unlist(next);
                self.merge_next(key, next);
            }
            if let Some((previous, _)) = self.previous(key).filter(|(_, previous)| previous.state == state) {
                self.unlist(previous);
                self.merge_next(previous, key);
                key = previous;
            }
        }
        self.list(key);
        key
    }

    /// Adds the bytes of the next block to a block. Neither block may be in a list.
    fn merge_next(&mut self, key: BlockKey, next: BlockKey) {
        let Linked { block, next: after, .. } = self.linked[next.0 as usize];
        let own = &mut self.linked[key.0 as usize];
        own.block.size_bytes += block.size_bytes;
        own.next = after;
        if let Some(after) = after {
            self.linked[after.0 as usize].previous = Some(key);
        }
        self.vacant.push(next);
    }

    fn insert(&mut self, linked: Linked) -> BlockKey {
        if let Some(key) = self.vacant.pop() {
            self.linked[key.0 as usize] = linked;
            return key;
        }
        self.linked.push(linked);
        BlockKey(self.linked.len() as u32 - 1)
    }

    /// Adds a free or unmapped block to its list.
    fn list(&mut self, key: BlockKey) {
        let ModelBlock { address, size_bytes, list, state, .. } = self.at(key);
        match state {
            ModelState::Free => _ = self.free.entry(list).or_default().insert((size_bytes, address, key)),
            ModelState::Unmapped => _ = self.unmapped.insert((list, address, key)),
            ModelState::Allocated | ModelState::Pending { .. } => {}
        }
    }

    /// Removes a free or unmapped block from its list.
    fn unlist(&mut self, key: BlockKey) {
        let ModelBlock { address, size_bytes, list, state, .. } = self.at(key);
        match state {
            ModelState::Free => {
                let free = self.free.get_mut(&list).expect("the block is listed");
                free.remove(&(size_bytes, address, key));
                if free.is_empty() {
                    self.free.remove(&list);
                }
            }
            ModelState::Unmapped => _ = self.unmapped.remove(&(list, address, key)),
            ModelState::Allocated | ModelState::Pending { .. } => {}
        }
    }

    /// Returns the next block in the same segment.
    pub(super) fn next(&self, key: BlockKey) -> Option<(BlockKey, ModelBlock)> {
        self.linked[key.0 as usize].next.map(|next| (next, self.at(next)))
    }

    /// Returns the previous block in the same segment.
    pub(super) fn previous(&self, key: BlockKey) -> Option<(BlockKey, ModelBlock)> {
        self.linked[key.0 as usize].previous.map(|previous| (previous, self.at(previous)))
    }

    /// Returns the smallest free block that fits, and among equal sizes the one with the lowest address.
    pub(super) fn best_fit(&self, list: List, size: u64) -> Option<BlockKey> {
        self.fitting(list, size).next()
    }

    fn fitting(&self, list: List, size: u64) -> impl Iterator<Item = BlockKey> {
        let free = self.free.get(&list).into_iter();
        free.flat_map(move |free| free.range((size, 0, BlockKey(0))..)).map(|&(_, _, key)| key)
    }

    /// Returns the best fit in an expandable segment. A block before unmapped addresses counts with the size to which it can grow, so that
    /// blocks that cannot grow, or can grow less, are preferred.
    pub(super) fn best_fit_expandable(&self, list: List, size: u64) -> Option<BlockKey> {
        let room = |key: BlockKey| {
            let behind = self.next(key).filter(|(_, next)| next.state == ModelState::Unmapped);
            self.at(key).size_bytes + behind.map_or(0, |(_, next)| next.size_bytes)
        };
        let mut fitting = self.fitting(list, size);
        let mut best = fitting.next()?;
        for key in fitting {
            work::count(1);
            if room(key) >= room(best) {
                break;
            }
            best = key;
        }
        Some(best)
    }

    /// Returns the unmapped blocks of a list, in ascending order of address.
    pub(super) fn unmapped_of(&self, list: List) -> impl Iterator<Item = BlockKey> {
        let of_list = (list, 0, BlockKey(0))..=(list, u64::MAX, BlockKey(u32::MAX));
        self.unmapped.range(of_list).inspect(|_| work::count(1)).map(|&(_, _, key)| key)
    }

    /// Returns the free blocks of a pool or of all pools.
    pub(super) fn free_of(&self, pool: Option<PoolId>) -> Vec<BlockKey> {
        let of_pool = |list: &List| pool.is_none_or(|pool| pool == list.pool);
        let free = self.free.iter().flat_map(|(list, free)| free.iter().map(move |&(_, _, key)| (list, key)));
        free.inspect(|_| work::count(1)).filter(|(list, _)| of_pool(list)).map(|(_, key)| key).collect()
    }

    /// Counts a completed event of a pending block, and frees the block after the last one.
    pub(super) fn event_done(&mut self, key: BlockKey) {
        let state = match self.at(key).state {
            ModelState::Pending { events } if events > 1 => ModelState::Pending { events: events - 1 },
            _ => ModelState::Free,
        };
        self.set_state(key, state);
    }
}
