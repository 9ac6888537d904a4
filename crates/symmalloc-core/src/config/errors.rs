//! What can go wrong, an enum per operation, with fields to act on and a message that says what to do.
//!
//! Three kinds, treated differently. *Misuse* (a stale handle, an unknown stream) and *circumstances* (a limit, a driver
//! that refuses) are returned as values of these types, and the allocator is as it was before the call. *Corruption* is
//! an assertion: an allocator that is wrong about its own blocks must not go on.

use crate::types::backend::{BackendError, DeviceAddress};
use crate::types::handle::Handle;
use crate::types::ids::{ObserverId, PoolId, StreamId};
use crate::types::units::{Amount, SEGMENT_BYTES_MAX};
use thiserror::Error;

/// A pool or stream that does not exist: what every operation checks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UnknownError {
    /// No pool has this id.
    #[error("{pool} is unknown; there are {pools} pools: create it with create_pool first")]
    Pool {
        /// The id given.
        pool: PoolId,
        /// Number of pools created so far.
        pools: u32,
    },
    /// The pool was destroyed.
    #[error("{pool} was destroyed; ids are not reused: create a new pool")]
    DestroyedPool {
        /// The id given.
        pool: PoolId,
    },
    /// No stream has this id.
    #[error("{stream} is unknown; {streams} streams are registered: call register_stream first")]
    Stream {
        /// The id given.
        stream: StreamId,
        /// Number of streams registered so far.
        streams: u32,
    },
}

/// A pool sleeps, or is falling asleep or waking in another thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{pool} sleeps: wake it first")]
pub struct PoolSleeps {
    /// The pool.
    pub pool: PoolId,
}

/// Why `register_stream` failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// All 65,535 ids are taken.
    #[error("all {streams} stream ids are taken: register a stream once and reuse it")]
    TooManyStreams {
        /// Number of streams registered.
        streams: u32,
    },
}

/// Why `create_pool` or `destroy_pool` failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool cannot be destroyed while allocations of it are live.
    #[error(
        "{pool} still has {allocations} live allocations ({}): free them first, see leak_report",
        Amount(*allocated_bytes)
    )]
    InUse {
        /// The pool.
        pool: PoolId,
        /// Live allocations in it.
        allocations: u64,
        /// Bytes of their blocks.
        allocated_bytes: u64,
    },
    /// The pool's windows or other dependants have not let go of it.
    #[error("{pool} has {observers} observers: let them acknowledge or forget them first")]
    Observed {
        /// The pool.
        pool: PoolId,
        /// Number of observers.
        observers: u32,
    },
    /// The pool is falling asleep, or waking.
    #[error("a sleep or wake of {pool} is under way: wait for its end")]
    Sleeping {
        /// The pool.
        pool: PoolId,
    },
    /// The default pool stays.
    #[error("the default pool cannot be destroyed: trim it instead")]
    Default,
    /// The driver failed. What it had not taken back yet is kept for the next `trim`.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Why `allocate` failed. Nothing was allocated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// The pool or stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool sleeps.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// No segment can be that large.
    #[error("{} is more than a segment can have ({})", Amount(*requested_bytes), Amount(SEGMENT_BYTES_MAX))]
    TooLarge {
        /// Bytes asked for.
        requested_bytes: u64,
    },
    /// No memory within the limits, or the driver refused.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemory>),
    /// The stream could not be told to wait for the block's earlier users, or the block could not be put together from pieces. What
    /// it would consist of is still free.
    #[error("the block cannot be made ready for {stream}: {error}")]
    Fence {
        /// The stream that was to wait.
        stream: StreamId,
        /// What the driver said.
        error: BackendError,
    },
}

/// Why `reserve` failed. The heap holds what it held before.
pub type ReserveError = AllocateError;

/// An allocation that could not be served, with what there was.
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
    /// The pool asked.
    pub pool: PoolId,
    /// The stream asked for.
    pub stream: StreamId,
    /// Bytes asked for.
    pub requested_bytes: u64,
    /// Bytes that had to be obtained for it.
    pub missing_bytes: u64,
    /// Bytes of device memory the pool holds.
    pub reserved_bytes: u64,
    /// Bytes of the pool's live allocations, rounding included.
    pub allocated_bytes: u64,
    /// Bytes of the largest free block that the request could have used.
    pub largest_free_bytes: u64,
    /// The way to make use of free memory of the pool. `None` where it has less than the request.
    pub remedy: Option<Remedy>,
    /// What stood in the way.
    pub cause: OutOfMemoryCause,
}

/// Which limit was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitScope {
    /// `limit` of the pool.
    Pool,
    /// `limit` of the allocator, over all pools.
    Allocator,
}

/// What stood in the way of an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OutOfMemoryCause {
    /// A configured limit: the same on every rank.
    #[error("the {} limit is {}: raise it{}",
        match scope { LimitScope::Pool => "pool's", LimitScope::Allocator => "allocator's" },
        Amount(*limit_bytes),
        match scope { LimitScope::Pool => "", LimitScope::Allocator => ", or trim other pools" })]
    Limit {
        /// Which one.
        scope: LimitScope,
        /// Its value in bytes.
        limit_bytes: u64,
    },
    /// The heap's reserved segment or address range is full: the same on every rank.
    #[error("its segment of {} cannot grow: configure a larger one, or resize a pool with a quota", Amount(*segment_bytes))]
    SegmentFull {
        /// Its size in bytes; of a pool with a quota what it holds.
        segment_bytes: u64,
    },
    /// The driver refused. Other ranks may have been served.
    #[error("the driver refused ({0}): trim, free what is not needed, or set a limit")]
    Driver(BackendError),
}

/// A way to make use of memory of a pool that has enough free bytes for a request, and does not have them where the request needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Remedy {
    /// Other streams' heaps have them.
    #[error("{} are free in heaps of other streams: try `streams:shared`, or trim at a quiet point", Amount(*free_bytes))]
    ShareStreams {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
    /// They lie in several fixed segments, or in several pieces of them.
    #[error("{} are free in pieces: try expandable segments, or trim at a quiet point", Amount(*free_bytes))]
    Expand {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
    /// They lie in several pieces of an expandable segment.
    #[error("{} are free in pieces: try `stitching:true`, or trim at a quiet point", Amount(*free_bytes))]
    Stitch {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
    /// They lie in several pieces of segments that can be neither expanded nor stitched.
    #[error("{} are free in pieces: trim at a quiet point, or allocate what lives long first", Amount(*free_bytes))]
    Trim {
        /// Free bytes of the pool.
        free_bytes: u64,
    },
}

/// Why a call with a handle (or a pointer) failed. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The allocation was freed before this call. From `free`, this is a double free.
    #[error("{handle} was freed already: drop the handle when you free it")]
    Stale {
        /// The handle given.
        handle: Handle,
    },
    /// The handle was never given by this allocator.
    #[error("{handle} is not of this allocator: use the allocator that gave it")]
    Foreign {
        /// The handle given.
        handle: Handle,
    },
    /// No live allocation is at this address.
    #[error("no live allocation at {:#x}: it was freed already, or is not this allocator's", .address.0)]
    UnknownAddress {
        /// The address given.
        address: DeviceAddress,
    },
    /// The address lies in a segment of this allocator, but no live allocation starts there.
    #[error("{:#x} lies in a segment, but no allocation starts there: pass the address that allocate returned", .address.0)]
    InteriorAddress {
        /// The address given.
        address: DeviceAddress,
    },
    /// Pointers cannot be looked up.
    #[error("allocations cannot be found by pointer: configure pointer_lookup:exact")]
    LookupOff,
}

/// Why `free` failed. The allocation is still live, if it was.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The handle is no live allocation of this allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The uses on other streams could not be fenced; the allocation is still live: free it again later.
    #[error("cannot fence the uses on other streams, the allocation is still live: {0}")]
    Fence(#[from] BackendError),
}

/// Why `record_use` failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecordUseError {
    /// The handle is no live allocation of this allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
}

/// Why `trim`, `acknowledge` or `forget` failed. What went back before the failure is back; the rest can be trimmed again.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TrimError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The driver failed after so many bytes went back.
    #[error("the driver failed after {} went back, trim again later: {error}", Amount(*released_bytes))]
    Backend {
        /// Bytes that are back on the device.
        released_bytes: u64,
        /// What the driver said.
        error: BackendError,
    },
    /// Another observer read the events, or they are of another allocator. Nothing is acknowledged.
    #[error("these events were not read by {observer} of this allocator: acknowledge what its own `unread` returned")]
    NotRead {
        /// The observer that was to acknowledge them.
        observer: ObserverId,
    },
}
