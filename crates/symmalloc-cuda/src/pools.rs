//! Pools and streams of an allocator: the state that its clones and its buffers share.

mod pool;
mod state;
mod stream_allocator;
mod stream_table;

pub use pool::Pool;
pub(crate) use pool::PoolLease;
pub use state::trim_private_pools;
pub(crate) use state::{AbandonedPool, AllocatorState, lock};
pub use stream_allocator::{StreamAllocator, StreamAllocatorRef};
