//! Blocks: the layout of a heap's memory, and the index of its free blocks.

mod free_index;
mod free_key;
pub(crate) mod offsets;
pub(crate) mod table;

pub(crate) use free_index::FreeIndex;
pub(crate) use free_key::FreeKey;
