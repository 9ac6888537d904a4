//! Pools and streams of an allocator: what its names and its buffers share.

mod pool;
mod pool_stream;
mod state;
mod stream_table;

pub use pool::Pool;
pub(crate) use pool::PoolLease;
pub(crate) use pool_stream::PoolStream;
pub(crate) use state::{AbandonedPool, AllocatorState, lock};
