//! Errors: one enum per operation, with fields for programs and a message that states the remedy.
//!
//! There are three kinds. *Misuse* (a stale handle, an unknown stream) and *circumstances* (a limit, a failed driver
//! call) are returned as values of these types, and the allocator is in the same state as before the call. *Corruption*
//! is an assertion: an allocator with inconsistent blocks must stop.

use crate::config::damage::MemoryFault;
use crate::types::backend::{BackendError, DeviceAddress};
use crate::types::base::BaseError;
use crate::types::handle::Handle;
use crate::types::ids::{ObserverId, PoolId, StreamId};
use crate::types::units::{Amount, Counted, SEGMENT_BYTES_MAX, them};
use thiserror::Error;

/// An unknown pool or stream. Every operation checks this first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UnknownError {
    /// No pool has this id.
    #[error("{pool} is unknown; the ids in use are below p{pools}: create it with create_pool first")]
    Pool {
        /// The given id.
        pool: PoolId,
        /// One more than the highest id of a pool so far.
        pools: u32,
    },
    /// The pool was destroyed.
    #[error("{pool} was destroyed; ids are not reused: create a new pool")]
    DestroyedPool {
        /// The given id.
        pool: PoolId,
    },
    /// No stream has this id.
    #[error("{stream} is unknown, after {}: call register_stream first", Counted((*streams).into(), "registered stream"))]
    Stream {
        /// The given id.
        stream: StreamId,
        /// Number of streams registered so far.
        streams: u32,
    },
}

/// The pool sleeps, or another thread is putting it to sleep or waking it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{pool} sleeps: wake it first")]
pub struct PoolSleeps {
    /// The pool.
    pub pool: PoolId,
}

/// An error returned by `register_stream` and `register_stream_in`. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// All 65,535 ids are in use.
    #[error("all {streams} stream ids are in use: register a stream once and reuse it")]
    TooManyStreams {
        /// Number of registered streams.
        streams: u32,
    },
    /// No group of streams has this name.
    #[error("{group} names no group of streams: give the first stream of a group")]
    UnknownGroup {
        /// The given name.
        group: StreamId,
    },
}

/// An error returned by `create_pool` and `destroy_pool`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool cannot be destroyed while allocations of it are live.
    #[error(
        "{pool} still has {} ({}): free {} first, see leak_report",
        Counted(*allocations, "live allocation"),
        Amount(*allocated_bytes),
        them(*allocations)
    )]
    InUse {
        /// The pool.
        pool: PoolId,
        /// Number of live allocations in it.
        allocations: u64,
        /// Bytes of their blocks.
        allocated_bytes: u64,
    },
    /// Windows or other dependents of the pool are still registered.
    #[error("{pool} has {}: acknowledge its events or forget {} first", Counted((*observers).into(), "observer"), them((*observers).into()))]
    Observed {
        /// The pool.
        pool: PoolId,
        /// Number of observers.
        observers: u32,
    },
    /// The key of a new pool is not in the range of keys.
    #[error("{key} cannot be the key of a pool: use p1 to {}", PoolId::KEY_MAX)]
    KeyOutOfRange {
        /// The given key.
        key: PoolId,
    },
    /// A pool has, or had, the key of a new pool.
    #[error(
        "{key} is or was the id of another pool: choose another key, or reset the pool instead of creating it again"
    )]
    KeyInUse {
        /// The given key.
        key: PoolId,
    },
    /// The addresses of a pool with a base cannot be reserved. There is no pool.
    #[error(transparent)]
    Base(Box<BaseError>),
    /// Another thread is putting the pool to sleep or waking it.
    #[error("a sleep or wake of {pool} is in progress: wait until it ends")]
    Sleeping {
        /// The pool.
        pool: PoolId,
    },
    /// The default pool cannot be destroyed.
    #[error("the default pool cannot be destroyed: trim it instead")]
    Default,
    /// The driver failed. The next `trim` retries to release the remaining memory.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// An error returned by `allocate`. Nothing was allocated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// The pool or stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool sleeps.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// The request exceeds the largest segment.
    #[error("{} exceeds the maximum size of a segment ({})", Amount(*requested_bytes), Amount(SEGMENT_BYTES_MAX))]
    TooLarge {
        /// Requested bytes.
        requested_bytes: u64,
    },
    /// There is not enough memory within the limits, or a driver call failed.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemory>),
    /// The stream could not be made to wait for the block's earlier users, or the block could not be stitched from
    /// pieces. Its parts are still free.
    #[error("the block cannot be made ready for {stream}: {error}")]
    Fence {
        /// The stream that had to wait.
        stream: StreamId,
        /// The driver's error.
        error: BackendError,
    },
    /// The device is lost, and the pool has debugging options, which know what was freed before.
    #[error(transparent)]
    Fault(Box<MemoryFault>),
}

/// An error returned by `reserve`. The heap's memory is unchanged.
pub type ReserveError = AllocateError;

/// A failed allocation, with the state of the memory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "out of memory: {} on {stream} in {pool} needs {} more of device memory; the pool holds {} ({} allocated, largest free \
     block {}); {cause}{}",
    Amount(*requested_bytes),
    Amount(*missing_bytes),
    Amount(*reserved_bytes),
    Amount(*allocated_bytes),
    Amount(*largest_free_bytes),
    self.remedy.map_or_else(String::new, |remedy| format!("; {remedy}"))
)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The requested pool.
    pub pool: PoolId,
    /// The requested stream.
    pub stream: StreamId,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Bytes that the pool had to acquire for it.
    pub missing_bytes: u64,
    /// Bytes of device memory that the pool holds.
    pub reserved_bytes: u64,
    /// Bytes of the pool's live allocations, including rounding.
    pub allocated_bytes: u64,
    /// Bytes of the largest free block that was usable for the request.
    pub largest_free_bytes: u64,
    /// A way to use the pool's free memory. `None` if there is less of it than the request needs.
    pub remedy: Option<Remedy>,
    /// The cause.
    pub cause: OutOfMemoryCause,
}

/// The scope of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitScope {
    /// The pool's `limit`.
    Pool,
    /// The allocator's `limit`, over all pools.
    Allocator,
}

/// The cause of a failed allocation.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OutOfMemoryCause {
    /// A configured limit, equal on every rank.
    #[error("the {} limit is {}: raise it{}",
        match scope { LimitScope::Pool => "pool's", LimitScope::Allocator => "allocator's" },
        Amount(*limit_bytes),
        match scope { LimitScope::Pool => "", LimitScope::Allocator => ", or trim other pools" })]
    Limit {
        /// The scope of the limit.
        scope: LimitScope,
        /// Its value in bytes.
        limit_bytes: u64,
    },
    /// The heap's reserved segment or address range is full, on every rank alike.
    #[error("its segment of {} cannot grow: configure a larger one, or resize a pool with a quota", Amount(*segment_bytes))]
    SegmentFull {
        /// Its size in bytes; for a pool with a quota, the quota.
        segment_bytes: u64,
    },
    /// The pool has a base, and no free part of its addresses is large enough, on every rank alike.
    #[error(
        "the pool's fixed addresses have no room for a range of {} (largest free part {}): set a smaller range_mb, trim the \
         pool, or give some allocations another pool",
        Amount(*needed_bytes),
        Amount(*largest_free_bytes)
    )]
    AddressesFull {
        /// Size of the range.
        needed_bytes: u64,
        /// Size of the largest free part.
        largest_free_bytes: u64,
    },
    /// A driver call failed. Other ranks may have succeeded.
    #[error("the driver refused ({0}): trim, free unused memory, or set a limit")]
    Driver(BackendError),
}

/// A way to use the free memory of a pool that has enough free bytes for a request, but not in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Remedy {
    /// The free bytes are in other streams' heaps.
    #[error("{} are free in heaps of other streams: try `streams:shared`, or trim at a quiet point", Amount(*free_bytes))]
    ShareStreams {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
    /// The free bytes are in several fixed segments, or in several parts of them.
    #[error("{} are free in pieces: try expandable segments, or trim at a quiet point", Amount(*free_bytes))]
    Expand {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
    /// The free bytes are in several parts of an expandable segment.
    #[error("{} are free in pieces: try `stitching:true`, or trim at a quiet point", Amount(*free_bytes))]
    Stitch {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
    /// The free bytes are in several parts of segments that can be neither expanded nor stitched.
    #[error("{} are free in pieces: trim at a quiet point, or allocate long-lived memory first", Amount(*free_bytes))]
    Trim {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
}

/// An error returned by a call with a handle or a pointer. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The allocation was freed before this call. In `free`, this is a double free.
    #[error("{handle} was freed already: drop the handle when you free it")]
    Stale {
        /// The given handle.
        handle: Handle,
    },
    /// The handle does not belong to this allocator.
    #[error("{handle} does not belong to this allocator: use the allocator that returned it")]
    Foreign {
        /// The given handle.
        handle: Handle,
    },
    /// No live allocation is at this address.
    #[error("no live allocation at {:#x}: it was freed already or belongs to another allocator", .address.0)]
    UnknownAddress {
        /// The given address.
        address: DeviceAddress,
    },
    /// The address is in a segment of this allocator, but no live allocation starts there.
    #[error("{:#x} lies in a segment, but no allocation starts there: pass the address that allocate returned", .address.0)]
    InteriorAddress {
        /// The given address.
        address: DeviceAddress,
    },
    /// Look-up by pointer is disabled.
    #[error("allocations cannot be found by pointer: configure pointer_lookup:exact")]
    LookupOff,
}

/// An error returned by `free`. An allocation that was live still is.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The handle is not a live allocation of this allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The uses on other streams could not be fenced. The allocation is still live: free it again later.
    #[error("cannot fence the uses on other streams, the allocation is still live: {0}")]
    Fence(#[from] BackendError),
    /// The device is lost, and the pool has debugging options, which know what was freed before. The allocation is still
    /// live.
    #[error(transparent)]
    Fault(Box<MemoryFault>),
}

/// An error returned by `record_use`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecordUseError {
    /// The handle is not a live allocation of this allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
}

/// An error returned by `trim`, `acknowledge` and `forget`. Memory released before the failure stays released. A later
/// trim can release the rest.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TrimError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The driver failed after `released_bytes` were released.
    #[error("the driver failed after {} were released, trim again later: {error}", Amount(*released_bytes))]
    Backend {
        /// Released bytes.
        released_bytes: u64,
        /// The driver's error.
        error: BackendError,
    },
    /// Another observer read the events, or they belong to another allocator. Nothing is acknowledged.
    #[error("{observer} of this allocator did not read these events: pass the events that its `unread` returned")]
    NotRead {
        /// The observer that had to acknowledge them.
        observer: ObserverId,
    },
}
