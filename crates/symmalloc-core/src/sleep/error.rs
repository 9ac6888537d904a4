//! What a sleep and a wake did, and what can stand in their way.

use crate::config::errors::{LimitScope, UnknownError};
use crate::types::backend::BackendError;
use crate::types::ids::{PoolId, StreamId};
use crate::types::units::Amount;
use thiserror::Error;

/// What a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It has its memory.
    Awake,
    /// It has no memory, and all of its addresses.
    Asleep,
    /// It sleeps, but some of its memory is held: by the driver, or by a window that nobody can take away. Sleeping again tries to
    /// give that back; waking makes use of it.
    Failed,
}

/// A pool sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slept {
    /// Bytes that went back to the device.
    pub released_bytes: u64,
    /// Bytes that were saved.
    pub kept_bytes: u64,
}

/// A pool is awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Woken {
    /// Bytes that were mapped.
    pub remapped_bytes: u64,
    /// Bytes that were copied back.
    pub loaded_bytes: u64,
}

/// Why a pool did not fall asleep. It is as it was, except after [`Held`](Self::Held).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SleepError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// A step is open.
    #[error("a step of {pool} is open: sleep between end_step and begin_step")]
    StepOpen {
        /// The pool.
        pool: PoolId,
    },
    /// Somebody follows the pool's segments, who may have windows on its memory: they must be taken away first.
    #[error(
        "{pool} has {observers} observers, which may hold its memory: sleep by way of the registrar that observes it"
    )]
    Observed {
        /// The pool.
        pool: PoolId,
        /// Number of observers.
        observers: u32,
    },
    /// Another sleep or wake of the pool is under way.
    #[error("another sleep or wake of {pool} is under way: wait for its end")]
    Busy {
        /// The pool.
        pool: PoolId,
    },
    /// Dead stitched ranges name the pool's memory.
    #[error("dead stitched ranges of {pool} are not given back: let the observers acknowledge, and trim")]
    Retired {
        /// The pool.
        pool: PoolId,
    },
    /// The work of a stream that uses the pool could not be waited for.
    #[error("the work of {stream} in {pool} cannot be waited for, a capture of it may be under way: {error}")]
    Synchronize {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
        /// What the driver said.
        error: BackendError,
    },
    /// The contents could not be saved.
    #[error("{} of {pool} cannot be saved: {error}", Amount(*live_bytes))]
    Save {
        /// The pool.
        pool: PoolId,
        /// Bytes in live blocks.
        live_bytes: u64,
        /// What the backend said.
        error: BackendError,
    },
    /// The pool sleeps, and the driver did not take all of its memory.
    #[error("{pool} sleeps, but the driver holds {} of it: sleep again to give them back: {error}", Amount(*held_bytes))]
    Held {
        /// The pool.
        pool: PoolId,
        /// Bytes that are back on the device.
        released_bytes: u64,
        /// Bytes that are not.
        held_bytes: u64,
        /// What the driver said.
        error: BackendError,
    },
}

/// Why a pool did not wake. It sleeps, nothing is lost, and another attempt may succeed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WakeError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// Another sleep or wake of the pool is under way.
    #[error("another sleep or wake of {pool} is under way: wait for its end")]
    Busy {
        /// The pool.
        pool: PoolId,
    },
    /// A configured limit: the same on every rank.
    #[error("{pool} sleeps on: it needs {}, and the limit is {}: free or put to sleep what others hold, or raise it",
        Amount(*needed_bytes), Amount(*limit_bytes))]
    Limit {
        /// The pool.
        pool: PoolId,
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// Which limit.
        scope: LimitScope,
        /// Its value in bytes.
        limit_bytes: u64,
    },
    /// The device has not enough memory, or the driver failed. Other ranks may have been served.
    #[error("{pool} sleeps on: it needs {} of device memory: free memory, and wake it again: {error}", Amount(*needed_bytes))]
    Map {
        /// The pool.
        pool: PoolId,
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// What the driver said.
        error: BackendError,
    },
    /// The contents could not be copied back, or made zero.
    #[error("{pool} sleeps on: its contents cannot be copied back: {error}")]
    Load {
        /// The pool.
        pool: PoolId,
        /// What the backend said.
        error: BackendError,
    },
}
