//! Blocks: the layout of a heap's memory, and the index of its free blocks.

mod free_index;
pub(crate) mod offsets;
pub(crate) mod table;

pub(crate) use free_index::{FreeIndex, FreeKey};
