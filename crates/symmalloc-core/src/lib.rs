//! A deterministic caching device allocator: the same program gets the same places on every rank.
//!
//! GPU runtimes cache device memory, because the driver is slow. The usual caching allocator picks free blocks by
//! *address* and polls events to see what is free. So the n-th allocation of one program lands elsewhere on other ranks,
//! and what relies on equal offsets (NCCL's symmetric windows, captured graphs, a bug that should reproduce) breaks.
//! This allocator decides from the program alone: by size, by the age of the backing memory, and by offset. No answer
//! that could differ between machines plays a part.
//!
//! The crate knows no CUDA and contains no `unsafe`. It takes memory from a [`Backend`]; `symmalloc-sim` simulates one.
//!
//! # Examples
//! Two ranks whose devices hand out addresses in different orders, and what the program sees of that:
//!
//! ```
//! use symmalloc_core::{Allocator, Config, PoolId};
//! use symmalloc_sim::SimBackend;
//! let mut placements = Vec::new();
//! for rank in 0..2 {
//!     let device = SimBackend::builder().seed(7).rank(rank).build();
//!     let allocator: Allocator<_> = Allocator::new(device, Config::default())?;
//!     let compute = allocator.register_stream()?;
//!     let communication = allocator.register_stream()?;
//!
//!     let weights = allocator.allocate_named(PoolId::DEFAULT, compute, 48 << 20, "weights")?;
//!     let bucket = allocator.allocate(PoolId::DEFAULT, compute, 5 << 20)?;
//!     allocator.record_use(bucket.handle, communication)?;
//!     allocator.free(bucket.handle)?; // its next user waits on the device for `communication`
//!     let next = allocator.allocate(PoolId::DEFAULT, compute, 3 << 20)?;
//!
//!     assert_eq!(next.placement, bucket.placement);
//!     placements.push((weights.placement, next.placement, allocator.digest(PoolId::DEFAULT)?));
//! }
//! assert_eq!(placements[0], placements[1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Words
//! | word | meaning |
//! |---|---|
//! | segment | one reservation of device memory from the backend |
//! | block | a contiguous part of one segment, allocated or free |
//! | stream | a logical [`StreamId`], numbered in the order in which the program registers streams |
//! | pool | a policy domain made by the program, like PyTorch's `MemPool` |
//! | heap | one (pool, stream), or one pool whose streams share: its own segments, free index, fences, digest and lock |
//! | sequence | the age of backing memory: the ordinal of the segment, which every block split from it inherits |
//! | fence | what a block's next user waits for on the device |
//! | op | one call of the vocabulary, see [`Op`] |
//! | digest | a rolling hash of (op, decision): equal on all ranks exactly when placements are |
//!
//! # Rules
//! The rules D1 to D8 that the documentation names stand in `docs/determinism.md`. In short: a decision depends on the
//! configuration and the ops of its heap (D1); free blocks are ordered by (size, sequence, offset) within the stream (D2);
//! uses by other streams are waited for on the device and never polled (D3); limits are configured bytes (D4); memory goes
//! back only when told to, in order (D5); the allocator calls no collective (D6); ranks compare digests (D7, with the crate
//! `symmalloc-agreement`); heaps are independent (D8).
//!
//! # Limits
//! A segment has at most 1 TiB, blocks are multiples of 512 bytes, an allocator has at most 65,535 streams. If
//! threads race for one heap, placements depend on the race: give each thread its stream.
//!
//! # Implementation
//! The rooms form a line; each uses only those before it. `types` and `sync`; `config`, with the size rules; `streams`, the
//! clocks and fences; `blocks`, where the block table says what lies where and the free index what is free; `history`, with
//! digests and layouts; `stats`; `pointers`. Then `heap` composes them and makes every decision (read `heap/mod.rs` first),
//! and `allocator` finds the heap and walks the out-of-memory path. `docs/one-allocation.md` lists the functions between a
//! call and the free index.
#![forbid(unsafe_code)]

// The rooms, in the order in which each may use those above it. A test reads the imports and holds it.
mod types;

mod sync;

pub mod config;

mod streams;

mod blocks;

mod history;

pub mod stats;

mod pointers;

pub mod plans;

pub mod sleep;

mod heap;

mod allocator;

// What every program names.
pub use allocator::{Allocator, SharedAllocator};
pub use config::{Config, PoolConfig};
pub use types::handle::{Allocation, Handle};
#[doc(no_inline)]
pub use types::{
    backend::{Backend, BackendError, DeviceAddress},
    ids::{AllocationId, ObserverId, Placement, PoolId, SegmentId, StreamId},
};

// What some need: what goes wrong, what is told, what is kept.
pub use allocator::{Quiesced, Remapped, Retry, SegmentPosition, StepGuard, Unread, recording, report};
pub use config::errors::{self, LimitScope};
pub use config::op::{self, Op, Record};
pub use config::size_rules::SizeClass;
pub use config::text as config_text;
pub use heap::invariants::Violation;
pub use history::digest::Digest;
#[doc(no_inline)]
pub use history::layout::Layout;
pub use history::{layout, segment_log};
pub use sync::lock;
pub use types::{backend, ids, units};

/// Restoring a [`Layout`]: the pool becomes what it was when the layout was saved.
pub mod restore {
    pub use crate::allocator::{Restored, RestoredAllocation, RestoredHeap, RevivedPlace};
    pub use crate::config::restore_error::{LayoutError, RestoreError};
}

// For the crates beside this one.
#[doc(hidden)]
pub use allocator::histories;
