//! Windows over segments: lookup by address, cache keys and their invalidation, and NCCL's symmetric address space.

pub(crate) mod keys;
mod lookup;
pub(crate) mod symmetric_space;
pub(crate) mod window;
