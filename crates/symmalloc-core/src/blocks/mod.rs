//! Blocks: what lies where in a heap, and what of it is free.

mod free_index;
mod free_key;
pub(crate) mod stitched;
pub(crate) mod table;

pub(crate) use free_index::FreeIndex;
pub(crate) use free_key::FreeKey;
