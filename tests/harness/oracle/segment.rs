//! A segment of the oracle: a list of blocks that tiles it.

use std::collections::BTreeSet;
use symmalloc_core::{AllocationId, StreamId};

/// Content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A live allocation.
    Allocated(AllocationId),
    /// Free memory.
    Free,
    /// No memory.
    Hole,
    /// Memory that is in use, or free, under other addresses.
    Elsewhere,
}

/// A part of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset from the start of the segment, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
    /// Content of the block.
    pub content: Content,
    /// Every stream that may have used any byte of the block since its memory was obtained.
    pub users: BTreeSet<StreamId>,
}

impl Block {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.size
    }

    pub(super) fn is_free(&self) -> bool {
        self.content == Content::Free
    }
}

/// A segment; its blocks tile it.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Creation ordinal of the segment in its heap.
    pub ordinal: u32,
    /// Blocks in offset order.
    pub blocks: Vec<Block>,
    /// Size of the address range.
    pub(super) range: u64,
    /// `true` if the segment serves only small blocks (fixed segments).
    pub(super) is_small: bool,
    /// Location of each granule of a stitched range: the segment's ordinal and the offset; `None` once unmapped.
    pub(super) stitched: Option<Vec<Option<(u32, u64)>>>,
}

impl Segment {
    /// Returns `true` if the segment may grow: it has memory of its own, in whole granules.
    pub(super) fn grows(&self, granularity: u64) -> bool {
        self.stitched.is_none() && self.end().is_multiple_of(granularity)
    }

    /// Returns the number of bytes that the blocks tile.
    pub fn end(&self) -> u64 {
        self.blocks.last().map_or(0, Block::end)
    }

    /// Returns the bytes that are backed by memory.
    pub fn mapped(&self) -> u64 {
        if self.stitched.is_some() {
            return 0;
        }
        self.blocks.iter().filter(|block| block.content != Content::Hole).map(|block| block.size).sum()
    }

    pub(super) fn has_live(&self) -> bool {
        self.blocks.iter().any(|block| matches!(block.content, Content::Allocated(_)))
    }

    /// Returns `true` if a trim may remove the segment.
    pub(super) fn is_unused(&self) -> bool {
        !self.has_live() && !self.blocks.iter().any(|block| block.content == Content::Elsewhere)
    }

    /// Replaces a block by parts that cover it, and merges adjacent blocks of the same kind.
    pub(super) fn replace(&mut self, index: usize, parts: impl IntoIterator<Item = Block>) {
        self.blocks.splice(index..=index, parts.into_iter().filter(|part| part.size > 0));
        self.normalize();
    }

    pub(super) fn normalize(&mut self) {
        let mut merged: Vec<Block> = Vec::new();
        for block in self.blocks.drain(..) {
            match merged.last_mut() {
                Some(last)
                    if last.content == block.content
                        && matches!(block.content, Content::Free | Content::Hole | Content::Elsewhere) =>
                {
                    last.size += block.size;
                    last.users.extend(block.users);
                }
                _ => merged.push(block),
            }
        }
        while merged.last().is_some_and(|block| block.content == Content::Hole) {
            merged.pop();
        }
        self.blocks = merged;
    }

    pub(super) fn extend(&mut self, size: u64) {
        let (offset, users) = (self.end(), BTreeSet::new());
        self.blocks.push(Block { offset, size, content: Content::Free, users });
        self.normalize();
    }

    /// Unmaps whole free granules.
    pub(super) fn shrink(&mut self, granularity: u64) {
        let mut parts = Vec::new();
        for block in self.blocks.drain(..) {
            let from = block.offset.next_multiple_of(granularity);
            let to = block.end() / granularity * granularity;
            if !block.is_free() || from >= to {
                parts.push(block);
                continue;
            }
            let part = |offset, end, content, users| Block { offset, size: end - offset, content, users };
            parts.push(part(block.offset, from, Content::Free, block.users.clone()));
            parts.push(part(from, to, Content::Hole, BTreeSet::new()));
            parts.push(part(to, block.end(), Content::Free, block.users));
        }
        self.blocks = parts.into_iter().filter(|block| block.size > 0).collect();
        self.normalize();
    }
}
