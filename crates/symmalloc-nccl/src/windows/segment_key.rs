//! Keys for state that is cached per segment: channels, contexts, captured graphs.
//!
//! A tensor's address and size change from step to step, and so do split sizes, but its segment stays the same. Peer access is set up per
//! segment, so cache it by segment:
//!
//! ```text
//!   segment   ├─────────────┬──────────┬────────────────────┤   one key
//!   tensors   │   x[0..n]   │  x[n..]  │      experts       │   any number, any sizes
//! ```

use std::fmt;
use symmalloc_core::{PoolId, SegmentId, StreamId};

/// The identity of a segment in its current extent. Equal keys denote the same memory at the same address and of the same size. A key is
/// valid only in the process that created it, because addresses differ between ranks.
///
/// The key changes when the segment grows, because state that covered the segment no longer covers all of it. A key is never reused after
/// the segment is released, even if another segment gets its address. [`Registrar::invalidations`](crate::Registrar::invalidations) reports
/// the invalidated keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct SegmentKey {
    /// Address of the segment's first byte.
    pub base: u64,
    /// Bytes of the segment that are backed by memory.
    pub size_bytes: u64,
    /// Identity of the segment, which distinguishes it from earlier segments at this address.
    pub generation: Generation,
}

/// The identity of a segment in an allocator. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct Generation {
    /// The segment's pool.
    pub pool: PoolId,
    /// The stream of its heap; `None` if the pool's streams share one heap.
    pub stream: Option<StreamId>,
    /// Its birth ordinal in the heap.
    pub segment: SegmentId,
}

impl fmt::Display for Generation {
    /// Writes `p1 s0 g7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Generation { pool, stream, segment } = self;
        match stream {
            Some(stream) => write!(f, "{pool} {stream} {segment}"),
            None => write!(f, "{pool} {segment}"),
        }
    }
}

impl fmt::Display for SegmentKey {
    /// Writes `p1 s0 g7 (2097152 bytes at 0x7f0000000000)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes at {:#x})", self.generation, self.size_bytes, self.base)
    }
}
