//! What a recording consists of: the sink that records go to, and what can end it.

use crate::config::Config;
use crate::config::op::Record;
use crate::types::backend::BackendError;
use crate::types::handle::Handle;
use crate::types::ids::{AllocationId, ObserverId, PoolId};
use crate::types::look_up::LookUp;
use std::error::Error;

/// Why a sink failed, in its own words.
pub type SinkError = Box<dyn Error + Send + Sync>;

/// Where records go. Every call is made under a lock that all recorded ops need: it must be quick, and must not use the
/// allocator. If it does, its ops are carried out without records, and the recording ends with
/// [`RecordingEnd::Reentered`].
pub trait Sink: Send {
    /// A recording begins, of an allocator of this configuration.
    ///
    /// # Errors
    /// When it cannot begin.
    fn begin(&mut self, config: &Config) -> Result<(), SinkError>;

    /// The next record. Records are consistent, as those of a trace are.
    ///
    /// # Errors
    /// When the record cannot be kept: the recording ends with this record lost, and nothing is called any more.
    fn record(&mut self, record: Record) -> Result<(), SinkError>;

    /// The recording is over, and what was recorded is whole. Also called when the allocator is dropped while it is recorded.
    /// Not called after an error.
    ///
    /// # Errors
    /// When what was recorded could not be kept.
    fn finish(&mut self) -> Result<(), SinkError>;
}

/// A recording that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// Records that the sink got.
    pub records: u64,
}

/// Why a recording could not begin. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartRecordingError {
    /// There is one already.
    #[error("the allocator is recorded already: stop that recording first")]
    AlreadyRecording,
    /// Memory was asked for before.
    #[error(
        "{pool} has had {ops} ops: a recording replays only from the start, so begin it before the first allocation, \
         right after the allocator was made"
    )]
    InUse {
        /// The first pool that was used.
        pool: PoolId,
        /// Ops in its digest.
        ops: u64,
    },
    /// The sink used the allocator.
    #[error("the sink used the allocator that it is to record: keep records in host memory or in a file")]
    Reentered,
    /// The sink refused.
    #[error("the recording's sink cannot begin: {0}")]
    Sink(#[source] SinkError),
}

/// Why a recording ended early, or could not be stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// There is none.
    #[error("nothing is recorded: call start_recording first")]
    NotRecording,
    /// The sink itself asked for it.
    #[error("the sink of the recording cannot stop it: return an error from the sink instead")]
    InSink,
    /// It ended before it was stopped.
    #[error("the recording ended after {records} records, because {source}")]
    Ended {
        /// Records that the sink had got.
        records: u64,
        /// Why.
        source: RecordingEnd,
    },
}

/// What ends a recording. What was recorded before is whole, except where it says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingEnd {
    /// The sink failed: what was recorded is not whole.
    #[error("its sink failed: {0}")]
    Sink(#[source] SinkError),
    /// The driver failed in the middle of an op, and left a state that no op leads to.
    #[error("the driver failed in the middle of an op: {0}")]
    Driver(#[source] BackendError),
    /// A pool was restored: no op leads to its state.
    #[error("{pool} was restored: no op leads to a restored state")]
    Restored {
        /// The pool.
        pool: PoolId,
    },
    /// A plan was adopted or dropped: no op says which.
    #[error("plans of {pool} were adopted or dropped: no op says which; a pool with `plan:learn` records and replays")]
    Planned {
        /// The pool.
        pool: PoolId,
    },
    /// The limit over all pools was changed: no op says so.
    #[error("the limit over all pools was changed: set it before the recording begins")]
    LimitChanged,
    /// A segment was removed between an observer's `unread` and its `acknowledge`: no trace can say which entries the
    /// observer had read.
    #[error("a segment died between an observer's `unread` and its `acknowledge`: trim observed pools at another time")]
    LateDeath,
    /// A sink or a backend panicked in the middle of an op: what was recorded may not be whole. The sink was not told to finish.
    #[error("an op panicked: what the sink has may be incomplete")]
    Panicked,
    /// The sink used the allocator that it records, for which there are no records. The record in hand is the last.
    #[error("the sink used the allocator that it records: keep records in host memory or in a file")]
    Reentered,
}

/// A recording that is on.
pub(super) struct Recording {
    pub(super) sink: Box<dyn Sink>,
    pub(super) records: u64,
    pub(super) next_id: u64,
    /// What records call the live allocations.
    pub(super) ids: LookUp<Handle, AllocationId>,
    /// The observers that came so far, and are there still. Their place is their id in the records.
    pub(super) observers: Vec<Option<ObserverId>>,
}

impl Recording {
    /// The id of an observer that is there.
    pub(super) fn observer(&self, observer: ObserverId) -> Option<ObserverId> {
        let id = self.observers.iter().position(|known| *known == Some(observer))?;
        Some(ObserverId(id as u32))
    }
}
