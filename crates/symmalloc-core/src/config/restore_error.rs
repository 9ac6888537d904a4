//! What stands in the way of a layout that is saved, or restored.

use crate::config::errors::{OutOfMemoryCause, PoolSleeps, UnknownError};
use crate::config::policy::PoolConfig;
use crate::types::backend::BackendError;
use crate::types::ids::{Placement, PoolId, SegmentId, StreamId};
use thiserror::Error;

/// Why `save_layout` failed: the pool is not as a layout can be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool sleeps.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// Large blocks are put together from pieces, and a layout cannot hold that.
    #[error("{pool} has stitched ranges: free what lies in them, and trim the pool")]
    Stitched {
        /// The pool.
        pool: PoolId,
    },
    /// Dead segments still count towards the limits, and a layout cannot hold them. In a restore only where observers hold them.
    #[error(
        "{retired_bytes} bytes of dead segments of {pool} are not back on the device: let the observers acknowledge, or trim"
    )]
    Retired {
        /// The pool.
        pool: PoolId,
        /// Bytes of dead segments that observers hold, or that the driver did not take back.
        retired_bytes: u64,
    },
    /// The pool is in a step, or has plans or learns some: a layout cannot hold that.
    #[error(
        "{pool} is in a step, has plans or learns some, which a layout cannot hold: end the step, and call drop_plans"
    )]
    Planned {
        /// The pool.
        pool: PoolId,
    },
}

/// Why `restore_layout` failed. Nothing has changed, except after [`Backend`](Self::Backend) and [`Fence`](Self::Fence).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The pool, or a stream that the layout names, does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool has another configuration than the saved one: its future is another.
    #[error("the layout is of a pool `{saved}`, this one is `{here}`: create it with the saved configuration")]
    Config {
        /// Of the saved pool.
        saved: Box<PoolConfig>,
        /// Of this one.
        here: Box<PoolConfig>,
    },
    /// The backend maps in other steps, or the allocator has another limit over all pools.
    #[error(
        "the layout was saved with a {key} of {}, here it is {}: use the saved one",
        limit(saved_bytes),
        limit(here_bytes)
    )]
    Input {
        /// `granularity`, or `total_limit`.
        key: &'static str,
        /// When the layout was saved, in bytes.
        saved_bytes: Option<u64>,
        /// Here, in bytes.
        here_bytes: Option<u64>,
    },
    /// The pool is not as a layout can be.
    #[error(transparent)]
    State(#[from] LayoutError),
    /// A live allocation is not in the layout, or is there with another size, request or stream.
    #[error(
        "an allocation of {requested_bytes} bytes at {placement} on {stream} in {pool}{} is live, but not as the layout \
         has it: free it first",
        name.as_ref().map_or_else(String::new, |name| format!(", {name:?},"))
    )]
    UnknownLive {
        /// The pool.
        pool: PoolId,
        /// The stream it was allocated for.
        stream: StreamId,
        /// Where it lies in its heap.
        placement: Placement,
        /// Bytes that the program asked for.
        requested_bytes: u64,
        /// What the program called it.
        name: Option<Box<str>>,
    },
    /// Memory that the layout has went back to the device, so its old addresses mean nothing any more.
    #[error(
        "{size_bytes} bytes at {segment}@{offset_bytes} in {pool} ({}) are not there any more: do not trim a pool \
         that is to be restored; a restarted rank restores before its first op",
        heap(stream)
    )]
    Gone {
        /// The pool.
        pool: PoolId,
        /// The stream of the heap; `None` when the pool's streams share.
        stream: Option<StreamId>,
        /// The segment.
        segment: SegmentId,
        /// Where the first missing memory starts in it, in bytes.
        offset_bytes: u64,
        /// How much is missing there, in bytes.
        size_bytes: u64,
    },
    /// Memory was obtained since, and an observer knows of it: what was logged cannot be taken back.
    #[error(
        "{segment} of {pool} ({}) was born or grew since the layout was saved, and {observers} observers know of it: \
         forget them first, and observe the pool anew afterwards",
        heap(stream)
    )]
    Observed {
        /// The pool.
        pool: PoolId,
        /// The stream of the heap; `None` when the pool's streams share.
        stream: Option<StreamId>,
        /// The segment.
        segment: SegmentId,
        /// Number of observers of the pool.
        observers: u32,
    },
    /// A configured limit is lower than what the layout and the other pools hold.
    #[error(
        "the layout needs {needed_bytes} bytes, and {cause}, or restore every pool before anything else is allocated"
    )]
    Limit {
        /// Bytes of the heap that did not fit.
        needed_bytes: u64,
        /// Which limit.
        cause: OutOfMemoryCause,
    },
    /// A stream cannot be told to wait for the earlier users of memory that becomes its own again.
    #[error("cannot order {stream} behind the earlier users of its memory, restore again later: {error}")]
    Fence {
        /// The stream that was to wait.
        stream: StreamId,
        /// What the driver said.
        error: BackendError,
    },
    /// The driver failed. A fresh pool is fresh again; a used one is sound, and restoring it again goes on.
    #[error("the driver failed, restore again later: {0}")]
    Backend(#[from] BackendError),
}

/// What an error calls a heap.
fn heap(stream: &Option<StreamId>) -> String {
    stream.map_or_else(|| "shared".to_owned(), |stream| stream.to_string())
}

fn limit(bytes: &Option<u64>) -> String {
    bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"))
}
