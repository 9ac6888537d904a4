//! Results and errors of sleep and wake.

use crate::config::errors::{OutOfMemoryCause, UnknownError};
use crate::types::backend::BackendError;
use crate::types::ids::{PoolId, StreamId};
use crate::types::units::{Amount, Counted};
use std::ops::AddAssign;
use thiserror::Error;

/// The phase of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The pool has its memory.
    Awake,
    /// The pool has all of its addresses and no memory.
    Asleep,
    /// The pool sleeps, but some of its memory is held: the driver failed to release it, or there is a window on it that
    /// cannot be removed. Another sleep tries to release it. A wake reuses it; a wake through a registrar needs a sleep first.
    Held,
}

/// The result of a sleep: the memory of a pool, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slept {
    /// Released bytes.
    pub released_bytes: u64,
    /// Saved bytes.
    pub kept_bytes: u64,
}

/// The result of a wake: the memory of a pool, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Woken {
    /// Mapped bytes.
    pub remapped_bytes: u64,
    /// Restored bytes.
    pub loaded_bytes: u64,
}

impl AddAssign for Slept {
    fn add_assign(&mut self, other: Self) {
        self.released_bytes += other.released_bytes;
        self.kept_bytes += other.kept_bytes;
    }
}

impl AddAssign for Woken {
    fn add_assign(&mut self, other: Self) {
        self.remapped_bytes += other.remapped_bytes;
        self.loaded_bytes += other.loaded_bytes;
    }
}

/// An error returned by a sleep or a wake. Nothing is lost, and another attempt may succeed. The pool is unchanged,
/// except after [`Held`](SleepCause::Held).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{pool}: {cause}")]
pub struct SleepError {
    /// The pool.
    pub pool: PoolId,
    /// The cause.
    pub cause: SleepCause,
}

/// The cause of a failed sleep or wake.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SleepCause {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// Another sleep or wake of the pool is in progress.
    #[error("another sleep or wake is in progress: wait until it ends")]
    Busy,
    /// A step is open.
    #[error("a step is open: sleep between end_step and begin_step")]
    StepOpen,
    /// An observer follows the pool's segments and may have windows on its memory. They must be removed first.
    #[error("{} may hold its memory: put it to sleep through the registrar that observes it", Counted((*observers).into(), "observer"))]
    Observed {
        /// Number of observers.
        observers: u32,
    },
    /// Dead stitched ranges alias the pool's memory.
    #[error("retired stitched ranges are not released yet: let the observers acknowledge, and trim")]
    Retired,
    /// Waiting for the work of a stream that uses the pool failed.
    #[error("cannot wait for the work of {stream}, which may be in a graph capture: {error}")]
    Synchronize {
        /// The stream.
        stream: StreamId,
        /// The driver's error.
        error: BackendError,
    },
    /// The contents could not be saved.
    #[error("{} cannot be saved: {error}", Amount(*live_bytes))]
    Save {
        /// Bytes in live blocks.
        live_bytes: u64,
        /// The backend's error.
        error: BackendError,
    },
    /// The pool sleeps, but the driver failed to release some of its memory.
    #[error("it sleeps, but the driver still holds {} of it: put it to sleep again to release them: {error}", Amount(*held_bytes))]
    Held {
        /// Released bytes.
        released_bytes: u64,
        /// Bytes still held.
        held_bytes: u64,
        /// The driver's error.
        error: BackendError,
    },
    /// There is not enough memory to wake. Free memory or put another pool to sleep, and wake the pool again.
    #[error("it stays asleep, because waking needs {}: free and trim memory of other pools, or put them to sleep, and wake it again: {cause}", Amount(*needed_bytes))]
    Memory {
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// The cause.
        cause: OutOfMemoryCause,
    },
    /// The contents could not be restored or zeroed.
    #[error("it stays asleep, because its contents cannot be restored: {0}")]
    Load(BackendError),
}
