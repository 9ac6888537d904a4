//! Windows over segments: the names of segments, cache keys and their invalidation, lookup, and NCCL's symmetric address space.

pub(crate) mod keys;
pub(crate) mod segment;
pub(crate) mod symmetric_space;
pub(crate) mod window;
