//! The layout of a pool: everything that determines the pool's future decisions.
//!
//! A saved layout has two uses. A **restarted rank** restores it into the same pool of a new process, on any device,
//! and from then on makes the same placements as the ranks that did not restart. A **graph tree** restores it into the
//! same pool later, and finds every allocation of the saved moment at its placement. [`crate::restore`] describes a
//! restore.
//!
//! ```text
//!  Layout ── configuration, granularity, total limit
//!    └── HeapLayout, by stream ── digest, next segment
//!          └── SegmentLayout, by id ── extents that memory backs, live allocations
//!
//!   segment   ┌───────────┬──────┬───────────┬╌╌╌╌╌╌┬──────┬───────────┬──────┐
//!             │ allocated │      │ allocated │      │      │ allocated │      │
//!             └───────────┴──────┴───────────┴╌╌╌╌╌╌┴──────┴───────────┴──────┘
//!   extents   ├──────────────────────────────┤      ├─────────────────────────┤
//!   free = within an extent, and not allocated          hole = between extents
//! ```
//!
//! A layout is small because the tiling of a segment is canonical (invariant I2): no two neighbors are both free or
//! both holes, so live allocations and extents determine every block. The free index follows from the blocks, and the
//! bytes that budgets and thresholds count follow from the sizes. Fences are not included: they decide which stream
//! waits, never a placement.
//!
//! A `Layout` is consistent by construction: it comes from [`save_layout`](crate::Allocator::save_layout) or from its
//! text. The crate `symmalloc-trace` reads and writes the text, and rejects impossible layouts.
//!
//! # Examples
//! ```
//! use symmalloc::{Allocator, Config, PoolId};
//! use symmalloc::sim::SimBackend;
//!
//! let rank = |device| Allocator::new(SimBackend::builder().rank(device).build(), Config::default());
//! let old = rank(0)?;
//! let stream = old.register_stream()?;
//! let weights = old.allocate_named(PoolId::DEFAULT, stream, 48 << 20, "weights")?;
//! let layout = old.save_layout(PoolId::DEFAULT)?;
//!
//! // The rank restarts, on another device.
//! let new = rank(1)?;
//! let stream = new.register_stream()?;
//! let restored = new.restore_layout(PoolId::DEFAULT, &layout)?;
//! let again = restored.find(stream, weights.placement).expect("the allocation should have been live");
//! assert_eq!(again.name.as_deref(), Some("weights"));
//!
//! // Both continue identically.
//! for allocator in [&old, &new] {
//!     allocator.allocate(PoolId::DEFAULT, stream, 5 << 20)?;
//! }
//! assert_eq!(old.digest(PoolId::DEFAULT)?, new.digest(PoolId::DEFAULT)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod parts;

pub use parts::{AllocationLayout, Extent, HeapLayout, Layout, SegmentLayout};
