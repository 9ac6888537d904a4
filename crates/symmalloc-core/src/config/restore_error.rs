//! Errors of saving and restoring a layout.

use crate::config::errors::{OutOfMemoryCause, PoolSleeps, UnknownError};
use crate::config::policy::PoolConfig;
use crate::types::backend::BackendError;
use crate::types::ids::{HeapId, Placement, PoolId, SegmentId, StreamGroup, StreamId};
use thiserror::Error;

/// An error returned by `save_layout`: a layout cannot represent the pool's state.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool sleeps.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// The pool has stitched blocks, which a layout cannot represent.
    #[error("{pool} has stitched ranges: free the allocations in them, and trim the pool")]
    Stitched {
        /// The pool.
        pool: PoolId,
    },
    /// Dead segments still count toward the limits, and a layout cannot represent them.
    #[error(
        "{retired_bytes} bytes of dead segments of {pool} are not released yet: let the observers acknowledge, or trim"
    )]
    Retired {
        /// The pool.
        pool: PoolId,
        /// Bytes of dead segments that observers hold or that the driver failed to release.
        retired_bytes: u64,
    },
    /// The pool delays frees, which a layout cannot represent.
    #[error("{pool} has debug:quarantine, which a layout cannot represent: use another pool, or remove the option")]
    Quarantined {
        /// The pool.
        pool: PoolId,
    },
    /// The pool is in a step, or has plans or is learning some, which a layout cannot represent.
    #[error(
        "{pool} is in a step, has plans or learns them, which a layout cannot represent: end the step, and call drop_plans"
    )]
    Planned {
        /// The pool.
        pool: PoolId,
    },
}

/// An error returned by `restore_layout` and `revive_layout`. Nothing has changed, except after
/// [`Fence`](Self::Fence).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The pool, or a stream of the layout, does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool's configuration differs from the saved one.
    #[error(
        "the layout was saved from a pool with `{saved}`, but this pool has `{here}`: create it with the saved configuration"
    )]
    Config {
        /// The saved pool's configuration.
        saved: Box<PoolConfig>,
        /// This pool's configuration.
        here: Box<PoolConfig>,
    },
    /// The backend has another granularity, or the allocator has another limit over all pools.
    #[error(
        "the layout was saved with a {key} of {}, but here it is {}: use the saved value",
        limit(saved_bytes),
        limit(here_bytes)
    )]
    Input {
        /// `granularity`, or `total_limit`.
        key: &'static str,
        /// Its value when the layout was saved, in bytes.
        saved_bytes: Option<u64>,
        /// Its value now, in bytes.
        here_bytes: Option<u64>,
    },
    /// A stream is in another group than when the layout was saved.
    #[error(
        "{stream} has the heap {saved} in the layout, but {here} in {pool}: register the streams in the same groups"
    )]
    Group {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// The streams of the saved heap.
        saved: StreamGroup,
        /// The streams of the heap that serves the stream here.
        here: StreamGroup,
    },
    /// A layout cannot represent the pool's state.
    #[error(transparent)]
    State(#[from] LayoutError),
    /// The pool has executed ops, so it cannot take over the history of a layout.
    #[error(
        "{pool} was used before: restore its layout before its first op, or return to a checkpoint with revive_layout"
    )]
    Used {
        /// The pool.
        pool: PoolId,
    },
    /// A live allocation is not in the layout, or has another size, request or stream there.
    #[error(
        "an allocation of {requested_bytes} bytes at {placement} on {stream} in {pool}{} is live but differs from \
         the layout: free it first",
        name.as_ref().map_or_else(String::new, |name| format!(", {name:?},"))
    )]
    UnknownLive {
        /// The pool.
        pool: PoolId,
        /// The stream it was allocated for.
        stream: StreamId,
        /// Its placement.
        placement: Placement,
        /// Requested bytes.
        requested_bytes: u64,
        /// The program's name for the allocation.
        name: Option<Box<str>>,
    },
    /// Memory of the layout was released to the device, so its old addresses are no longer valid.
    #[error(
        "{size_bytes} bytes at {segment}@{offset_bytes} in {} ({}) are no longer mapped: do not trim a pool \
         before reviving its allocations",
        heap.pool,
        heap.group
    )]
    Gone {
        /// The heap.
        heap: HeapId,
        /// The segment.
        segment: SegmentId,
        /// Offset of the first missing memory in it, in bytes.
        offset_bytes: u64,
        /// Number of missing bytes at this offset.
        size_bytes: u64,
    },
    /// A configured limit is lower than the memory of the layout and of the other pools together.
    #[error(
        "the layout needs {needed_bytes} bytes, and {cause}, or restore every pool before anything else is allocated"
    )]
    Limit {
        /// Bytes of the heap that did not fit.
        needed_bytes: u64,
        /// The limit.
        cause: OutOfMemoryCause,
    },
    /// The stream cannot be made to wait for the earlier users of its revived memory.
    #[error("cannot order {stream} after the earlier users of its memory: {error}; revive it again later")]
    Fence {
        /// The stream that had to wait.
        stream: StreamId,
        /// The driver's error.
        error: BackendError,
    },
    /// The driver failed. The pool is fresh again.
    #[error("the driver failed, restore again later: {0}")]
    Backend(#[from] BackendError),
}

fn limit(bytes: &Option<u64>) -> String {
    bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"))
}
