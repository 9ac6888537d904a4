//! A deterministic caching device allocator: the same program gets the same placements on every rank.
//!
//! GPU runtimes cache device memory because the driver is slow. A typical caching allocator polls events to find out what
//! is free, and many pick free blocks by *address*: RMM's pool, and PyTorch up to 2.11. The n-th allocation of a program can
//! therefore get a different placement on each rank, which breaks everything that relies on equal offsets: NCCL's symmetric
//! windows, captured graphs, reproducible bugs. This allocator decides from the program alone: by size, by the age of the
//! backing memory, and by offset. Nothing that can differ between machines influences a decision.
//! The crate does not depend on CUDA and contains no `unsafe`. It takes memory from a [`Backend`]; `symmalloc-sim`
//! simulates one.
//!
//! # Examples
//! Two ranks whose devices return addresses in different orders get the same placements:
//!
//! ```
//! use symmalloc::{Allocator, Config, PoolId};
//! use symmalloc::sim::SimBackend;
//! let mut placements = Vec::new();
//! for rank in 0..2 {
//!     let device = SimBackend::builder().seed(7).rank(rank).build();
//!     let allocator = Allocator::new(device, Config::default())?;
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
//! | group | streams that share a heap in pools with `streams:grouped`, named after its first stream |
//! | heap | the memory of a pool for one stream, for a group of streams, or for all: its own segments, free index, fences, digest and lock |
//! | sequence | the age of backing memory: the ordinal of the segment, which every block split from it inherits |
//! | fence | a use of a block by another stream, for which the block's next user waits on the device |
//! | op | one recordable call to the allocator, see [`Op`] |
//! | digest | a rolling hash of (op, decision): equal on all ranks exactly when placements are |
//!
//! # Rules
//! `docs/determinism.md` contains the rules D1 to D8. In short: a decision depends on the configuration and the ops of
//! its heap (D1); free blocks are ordered by (size, sequence, offset) within the stream (D2); the next user waits
//! for other streams on the device, and nothing is polled (D3); limits are configured bytes (D4); memory is released only on
//! request, in order (D5); the allocator calls no collective (D6); ranks compare digests (D7, with the crate
//! `symmalloc-agreement`); heaps are independent (D8).
//!
//! # Limits
//! A segment has at most 1 TiB, blocks are multiples of 512 bytes, and an allocator has at most 65,535 streams. If
//! threads race for one heap, placements depend on the race: use a stream, or a group of streams, per thread.
//!
//! # Implementation
//! The modules form a line; each uses only those before it. `types` and `sync`; `config`, with the size rules;
//! `streams`, with clocks and fences; `blocks`, with the block table and the free index; `history`, with digests and
//! layouts; `stats`; `pointers`. Then the parts of a heap, each of which owns its state: `ledger` records decisions,
//! `arena` knows the place of memory, and `plans`, `stitching` and `sleep` are optional. `heap` composes them and makes
//! every decision (read `heap.rs` first), and `allocator` finds the heap and handles the out-of-memory path. `metrics`,
//! behind a feature, publishes its statistics.
//! `docs/architecture.md` describes the steps of an allocation and of a free.
#![forbid(unsafe_code)]

// The modules. Each uses only those above it, which a test checks.
mod types;

mod sync;

pub mod config;

mod streams;

mod blocks;

mod history;

pub mod stats;

mod pointers;

mod ledger;

mod arena;

mod stitching;

pub mod plans;

pub mod sleep;

mod heap;

mod allocator;

#[cfg(feature = "metrics")]
pub mod metrics;

// Types that every program uses.

/// A caching device allocator over a backend, for one thread. Its methods are those of [`generic::Allocator`]:
///
/// | to | call |
/// |---|---|
/// | register a stream | [`register_stream`](generic::Allocator::register_stream), [`register_stream_in`](generic::Allocator::register_stream_in) |
/// | allocate and free | [`allocate`](generic::Allocator::allocate), [`allocate_named`](generic::Allocator::allocate_named), [`allocate_guard`](generic::Allocator::allocate_guard), [`free`](generic::Allocator::free) |
/// | use an allocation on another stream | [`record_use`](generic::Allocator::record_use), [`note_stream_wait`](generic::Allocator::note_stream_wait), [`note_synchronized`](generic::Allocator::note_synchronized) |
/// | separate memory by policy | [`create_pool`](generic::Allocator::create_pool), [`destroy_pool`](generic::Allocator::destroy_pool) |
/// | follow a plan | [`begin_step`](generic::Allocator::begin_step), [`end_step`](generic::Allocator::end_step), [`adopt_plan`](generic::Allocator::adopt_plan) |
/// | return memory to the device | [`trim_pool`](generic::Allocator::trim_pool), [`trim_all`](generic::Allocator::trim_all), [`sleep`](generic::Allocator::sleep), [`wake`](generic::Allocator::wake) |
/// | see what happens | [`stats`](generic::Allocator::stats), [`snapshot`](generic::Allocator::snapshot), [`digest`](generic::Allocator::digest), [`start_recording`](generic::Allocator::start_recording) |
///
/// # Determinism
/// Every placement is a function of the configuration and of the ops on its heap so far. With one host thread, a heap's
/// ops are in program order. With several ([`SharedAllocator`]), each heap must receive the same ops in the same order
/// on every rank: use a stream per thread, or synchronize the threads.
///
/// # Examples
/// ```
/// use symmalloc::{Allocator, Config, PoolId};
/// use symmalloc::sim::SimBackend;
///
/// let allocator = Allocator::new(SimBackend::builder().seed(7).build(), Config::default())?;
/// let stream = allocator.register_stream()?;
/// let a = allocator.allocate(PoolId::DEFAULT, stream, 3 << 20)?;
/// allocator.free(a.handle)?;
/// let b = allocator.allocate(PoolId::DEFAULT, stream, 1 << 20)?;
/// assert_eq!(b.placement, a.placement);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The compiler rejects sharing it between threads, and lists the type `UseSharedAllocator` among the reasons:
/// ```compile_fail,E0277
/// # use symmalloc::{Allocator, Config};
/// # use symmalloc::sim::SimBackend;
/// let allocator = Allocator::new(SimBackend::builder().build(), Config::default()).unwrap();
/// std::thread::scope(|scope| {
///     scope.spawn(|| allocator.register_stream());
/// });
/// ```
pub type Allocator<B> = generic::Allocator<B, lock::Exclusive>;

/// An [`Allocator`] for many threads. Put it into an `Arc`. Its methods are those of [`generic::Allocator`].
///
/// # Examples
/// ```
/// use std::{sync::Arc, thread};
/// use symmalloc::{Config, PoolId, SharedAllocator};
/// use symmalloc::sim::SimBackend;
///
/// let allocator = Arc::new(SharedAllocator::new(SimBackend::builder().build(), Config::default())?);
/// let stream = allocator.register_stream()?;
/// let other = Arc::clone(&allocator);
/// let placed = thread::spawn(move || other.allocate(PoolId::DEFAULT, stream, 3 << 20)).join().expect("the thread should not panic")?;
/// allocator.free(placed.handle)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type SharedAllocator<B> = generic::Allocator<B, lock::Shared>;

pub use config::{Config, PoolConfig};
pub use types::handle::{Allocation, Handle};
#[doc(no_inline)]
pub use types::{
    backend::{Backend, BackendError, DeviceAddress},
    ids::{AllocationId, ObserverId, Placement, PoolId, SegmentId, StreamId},
};

/// The allocator with any lock, for code that supports [`Allocator`] and [`SharedAllocator`].
pub mod generic {
    pub use crate::allocator::Allocator;
}

pub use allocator::{
    AllocationGuard, Emptied, Quiesced, Remapped, ReplayOps, Retry, SegmentPosition, StepGuard, Unread, recording,
    report,
};
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
pub use types::{backend, base, groups, ids, units};

/// The results of debugging options: damage that they found, and reports on addresses. `docs/memory-errors.md` shows their use.
pub mod debug {
    pub use crate::allocator::{AddressBlock, AddressReport};
    pub use crate::config::DebugOptions;
    pub use crate::config::damage::{DebugRecord, MemoryDamage, MemoryFault};
}

/// Results and errors of restoring and reviving a [`Layout`].
pub mod restore {
    pub use crate::allocator::{Restored, RestoredAllocation, RestoredHeap, RevivedPlace};
    pub use crate::config::restore_error::{LayoutError, RestoreError};
}

// For the other crates of the workspace.
#[doc(hidden)]
pub use allocator::histories;
#[doc(hidden)]
pub use types::work;
