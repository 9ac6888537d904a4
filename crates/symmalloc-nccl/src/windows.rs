//! Windows over segments: lookup by address, cache keys and their invalidation, and NCCL's symmetric address space.

pub(crate) mod invalidation;
mod lookup;
pub(crate) mod segment_key;
pub(crate) mod symmetric_space;
pub(crate) mod window;
