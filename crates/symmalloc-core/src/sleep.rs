//! Sleep and wake: a pool releases its memory and keeps its addresses, blocks, handles and digests.
//!
//! ```text
//!  quiesce   refuse allocations ─► wait for the streams ─► save the contents      dropped: awake, unchanged
//!  unmap     release the memory                                                   asleep
//!  remap     map memory at the old addresses ─► load the contents                 dropped: asleep again
//!  resume    serve allocations                                                    awake
//! ```
//! The allocator's `sleep` is quiesce followed by unmap, and its `wake` is remap followed by resume. A component that
//! holds windows on the memory, such as a registrar, acts between these steps; see `docs/sleep-protocol.md`.

pub(crate) mod mappings;

use crate::config::errors::{OutOfMemoryCause, UnknownError};
use crate::config::op::Contents;
use crate::types::backend::{BackendError, Image, Part};
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
    /// The pool sleeps, but some of its memory is still held: the driver failed to release this memory, or there is a
    /// window on it that cannot be removed. Another sleep tries again to release it. A wake reuses it. Before a wake
    /// through a registrar, put the pool to sleep again.
    Held,
}

/// The result of a sleep, for one pool or summed over several pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slept {
    /// Released bytes.
    pub released_bytes: u64,
    /// Bytes of contents that were saved.
    pub kept_bytes: u64,
}

/// The result of a wake, for one pool or summed over several pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Woken {
    /// Mapped bytes.
    pub remapped_bytes: u64,
    /// Bytes of contents that were restored.
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
    /// An observer follows the pool's segments and may have windows on the pool's memory. These windows must be removed
    /// first.
    #[error("{} may hold its memory: put it to sleep through the registrar that observes it", Counted((*observers).into(), "observer"))]
    Observed {
        /// Number of observers.
        observers: u32,
    },
    /// Removed stitched ranges still alias the pool's memory.
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

/// The sleep state of a pool.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The saved contents; `None` while the pool is awake.
    pub(crate) saved: Option<SavedContents>,
    /// `true` while a sleep or a wake is in progress.
    pub(crate) is_changing: bool,
}

impl State {
    /// Returns `true` if the pool's heaps serve requests.
    pub(crate) fn is_awake(&self) -> bool {
        self.saved.is_none() && !self.is_changing
    }
}

/// The saved contents of a sleeping pool.
#[derive(Debug)]
pub(crate) struct SavedContents {
    contents: Contents,
    /// The image that contains them; `None` if there was nothing to save.
    image: Option<Image>,
    /// The saved parts, in the order of streams, segments and offsets.
    parts: Vec<Part>,
}

impl SavedContents {
    /// Creates the record of these parts. If there is an image, it contains them.
    pub(crate) fn new(contents: Contents, image: Option<Image>, parts: Vec<Part>) -> Self {
        SavedContents { contents, image, parts }
    }

    pub(crate) fn image(&self) -> Option<Image> {
        self.image
    }

    /// Returns the parts of `live` that must be filled: to restore them, with their positions in the image, or to zero
    /// them. Each live part lies within one of the saved parts, because nothing is allocated while a pool sleeps.
    pub(crate) fn parts_to_fill(&self, live: Vec<Part>) -> Vec<Part> {
        let mut saved = self.parts.iter().peekable();
        let find = |Part { address, size_bytes, .. }: Part| {
            let holds = |part: &Part| part.address <= address && address.0 - part.address.0 < part.size_bytes;
            while saved.next_if(|part| !holds(part)).is_some() {}
            let part = saved.peek().expect("live memory was saved");
            Part { address, size_bytes, image_offset_bytes: part.image_offset_bytes + (address.0 - part.address.0) }
        };
        match self.contents {
            Contents::Keep => live.into_iter().map(find).collect(),
            Contents::Zero => live,
            Contents::Drop => Vec::new(),
        }
    }
}
