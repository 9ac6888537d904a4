//! A key for whatever is cached per segment: channels, contexts, captured graphs.
//!
//! A tensor's address and size change from step to step, and so do split sizes; the segment they lie in does not. What a
//! program sets up for peers to reach memory belongs to the segment, so that is what it should be cached by:
//!
//! ```text
//!   segment   ├─────────────┬──────────┬────────────────────┤   one key
//!   tensors   │   x[0..n]   │  x[n..]  │      experts       │   any number, any sizes
//! ```

use std::fmt;
use symmalloc_core::{PoolId, SegmentId, StreamId};

/// Names a segment as it is now. Equal keys mean: the same memory at the same address, all of it. Only of use in the process
/// that made it: the address differs between ranks.
///
/// The key changes when the segment grows, because what covered it covers it no more, and never comes back after the segment
/// has died, even if another one gets its address. See [`Registrar::invalidations`](crate::Registrar::invalidations) for the
/// keys that are dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct SegmentKey {
    /// Address of the segment's first byte.
    pub base: u64,
    /// Bytes of the segment that memory backs.
    pub size_bytes: u64,
    /// Which of the segments that had this address.
    pub generation: Generation,
}

/// Which segment of an allocator: none of its parts is ever used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct Generation {
    /// Its pool.
    pub pool: PoolId,
    /// The stream of its heap; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
    /// Its birth ordinal in the heap.
    pub segment: SegmentId,
}

impl fmt::Display for Generation {
    /// `p1 s0 g7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Generation { pool, stream, segment } = self;
        match stream {
            Some(stream) => write!(f, "{pool} {stream} {segment}"),
            None => write!(f, "{pool} {segment}"),
        }
    }
}

impl fmt::Display for SegmentKey {
    /// `p1 s0 g7 (2097152 bytes at 0x7f0000000000)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes at {:#x})", self.generation, self.size_bytes, self.base)
    }
}
