//! What a sleep and a wake did, and what can stand in their way.

use crate::config::errors::{OutOfMemoryCause, UnknownError};
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Woken {
    /// Bytes that were mapped.
    pub remapped_bytes: u64,
    /// Bytes that were copied back.
    pub loaded_bytes: u64,
}

/// A pool did not fall asleep, or did not wake. It is as it was, except after [`Held`](SleepCause::Held): nothing is lost, and another
/// attempt may succeed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{pool}: {cause}")]
pub struct SleepError {
    /// The pool.
    pub pool: PoolId,
    /// Why.
    pub cause: SleepCause,
}

/// Why a pool did not fall asleep, or did not wake.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SleepCause {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// Another sleep or wake of the pool is under way.
    #[error("another sleep or wake is under way: wait for its end")]
    Busy,
    /// A step is open.
    #[error("a step is open: sleep between end_step and begin_step")]
    StepOpen,
    /// Somebody follows the pool's segments, who may have windows on its memory: they must be taken away first.
    #[error("{observers} observers may hold its memory: sleep by way of the registrar that observes it")]
    Observed {
        /// Number of observers.
        observers: u32,
    },
    /// Dead stitched ranges name the pool's memory.
    #[error("dead stitched ranges are not given back: let the observers acknowledge, and trim")]
    Retired,
    /// The work of a stream that uses the pool could not be waited for.
    #[error("the work of {stream} cannot be waited for, a capture of it may be under way: {error}")]
    Synchronize {
        /// The stream.
        stream: StreamId,
        /// What the driver said.
        error: BackendError,
    },
    /// The contents could not be saved.
    #[error("{} cannot be saved: {error}", Amount(*live_bytes))]
    Save {
        /// Bytes in live blocks.
        live_bytes: u64,
        /// What the backend said.
        error: BackendError,
    },
    /// The pool sleeps, and the driver did not take all of its memory.
    #[error("it sleeps, but the driver holds {} of it: sleep again to give them back: {error}", Amount(*held_bytes))]
    Held {
        /// Bytes that are back on the device.
        released_bytes: u64,
        /// Bytes that are not.
        held_bytes: u64,
        /// What the driver said.
        error: BackendError,
    },
    /// There is no memory to wake with: free it, or put to sleep what others hold, and wake the pool again.
    #[error("it sleeps on, as it needs {}: free memory, or put other pools to sleep, and wake it again: {cause}", Amount(*needed_bytes))]
    Memory {
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// What stood in the way.
        cause: OutOfMemoryCause,
    },
    /// The contents could not be copied back, or made zero.
    #[error("it sleeps on: its contents cannot be copied back: {0}")]
    Load(BackendError),
}
