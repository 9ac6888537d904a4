//! A deterministic caching device allocator: every placement is a function of the program.
#![forbid(unsafe_code)]
#![doc = ""]

pub mod allocator;
pub mod backend;
mod block_table;
mod budget;
pub mod config;
pub mod config_text;
mod digest;
pub mod errors;
mod fence;
mod free_index;
mod handle;
mod heap;
pub mod ids;
mod invariants;
pub mod lock;
mod lookup;
mod names;
mod nearest;
mod observe;
mod obtain;
pub mod op;
mod pointer_index;
mod registry;
pub mod replay;
pub mod report;
pub mod segment_log;
pub mod sim;
mod size_rules;
mod sorted_run;
pub mod stats;
pub mod trace;
mod trim;
pub mod units;

pub use allocator::{Allocator, Retry, SharedAllocator};
pub use backend::{Backend, BackendError, DeviceAddress};
pub use budget::LimitScope;
pub use config::{Config, PoolConfig};
pub use digest::Digest;
pub use handle::{Allocation, Handle};
pub use ids::{AllocationId, Placement, PoolId, SegmentId, StreamId};
pub use invariants::Violation;
pub use lookup::SegmentPosition;
pub use observe::Unread;
pub use op::{Op, Record};
pub use size_rules::{SMALL_BYTES_MAX, SizeClass};
