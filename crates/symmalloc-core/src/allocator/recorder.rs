//! The parts of a recording: the sink that receives the records, and the reasons why a recording ends.

use crate::config::Config;
use crate::config::op::Record;
use crate::types::backend::BackendError;
use crate::types::handle::Handle;
use crate::types::ids::{AllocationId, ObserverId, PoolId};
use crate::types::look_up::LookUp;
use crate::types::units::Counted;
use std::error::Error;

/// An error returned by a sink.
pub type SinkError = Box<dyn Error + Send + Sync>;

/// The receiver of records. Every call is made under a lock that all recorded ops need, so implementations must return
/// quickly and must not use the allocator. If an implementation uses the allocator, its ops are executed without
/// records, and the recording ends with [`RecordingEnd::Reentered`].
pub trait Sink: Send {
    /// Begins the recording of an allocator with this configuration.
    ///
    /// # Errors
    /// Returns an error if the sink cannot begin.
    fn begin(&mut self, config: &Config) -> Result<(), SinkError>;

    /// Receives the next record. The records are consistent, like those of a trace: for example, a free refers to an
    /// earlier allocation.
    ///
    /// # Errors
    /// Returns an error if the record cannot be stored. The recording ends, this record is lost, and no further call is
    /// made.
    fn record(&mut self, record: Record) -> Result<(), SinkError>;

    /// Completes the recording. Also called when the allocator is dropped while it is recorded. Not called after an
    /// error.
    ///
    /// # Errors
    /// Returns an error if the records could not be stored.
    fn finish(&mut self) -> Result<(), SinkError>;
}

/// A completed recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// Number of records that the sink received.
    pub records: u64,
}

/// An error returned when a recording is started. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartRecordingError {
    /// A recording is already active.
    #[error("the allocator is already being recorded: call stop_recording first")]
    AlreadyRecording,
    /// The allocator was used before.
    #[error(
        "{pool} has had {}: a recording replays only from the start, so begin it before the first allocation, \
         right after creating the allocator", Counted(*ops, "op")
    )]
    InUse {
        /// The first pool that was used.
        pool: PoolId,
        /// Number of ops in its digest.
        ops: u64,
    },
    /// The sink used the allocator.
    #[error("the sink used the allocator while the recording began: keep records in host memory or in a file")]
    Reentered,
    /// The sink failed to begin.
    #[error("the sink failed to begin the recording: {0}")]
    Sink(#[source] SinkError),
}

/// An error of a recording that ended early or could not be stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// No recording is active.
    #[error("the allocator is not being recorded: call start_recording first")]
    NotRecording,
    /// The sink itself made the call.
    #[error("the sink called stop_recording: return an error from the sink to end the recording")]
    InSink,
    /// The recording ended before it was stopped.
    #[error("the recording ended after {}, because {source}", Counted(*records, "record"))]
    Ended {
        /// Number of records that the sink had received.
        records: u64,
        /// The reason why the recording ended.
        source: RecordingEnd,
    },
}

/// The reason why a recording ended. The records before the end are complete, except where noted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingEnd {
    /// The sink failed. The recording is incomplete.
    #[error("its sink failed: {0}")]
    Sink(#[source] SinkError),
    /// The driver failed in the middle of an op and left a state that no op can reproduce.
    #[error("the driver failed in the middle of an op: {0}")]
    Driver(#[source] BackendError),
    /// A pool was restored, and no op can reproduce its state.
    #[error(
        "the program restored {pool}: a recording cannot contain a restore, because no op reproduces the restored state"
    )]
    Restored {
        /// The pool that was restored.
        pool: PoolId,
    },
    /// A plan was adopted or dropped, which no op represents.
    #[error(
        "the program adopted or dropped plans of {pool}, which no op represents: use a pool with `plan:learn`, which can be recorded"
    )]
    Planned {
        /// The pool whose plans changed.
        pool: PoolId,
    },
    /// The limit over all pools was changed, which no op represents.
    #[error("the program changed the limit over all pools: set it before the recording begins")]
    LimitChanged,
    /// A segment was removed between an observer's `unread` and its `acknowledge`: no trace can represent which entries
    /// the observer had read.
    #[error(
        "the heap removed a segment between an observer's `unread` and its `acknowledge`: trim observed pools at a different moment"
    )]
    LateDeath,
    /// A sink or a backend panicked in the middle of an op. The recording may be incomplete, and the sink's `finish`
    /// was not called.
    #[error("the sink or the backend panicked in the middle of an op: the recording may be incomplete")]
    Panicked,
    /// The sink used the allocator that it records. Such a use cannot be recorded, so the current record is the last
    /// one.
    #[error("the sink used the allocator that it records: keep records in host memory or in a file")]
    Reentered,
}

/// A running recording.
pub(super) struct Recording {
    pub(super) sink: Box<dyn Sink>,
    pub(super) records: u64,
    pub(super) next_id: u64,
    /// The ids of live allocations in the records.
    pub(super) ids: LookUp<Handle, AllocationId>,
    /// The observers so far, in the order of their ids in the records; `None` for removed ones.
    pub(super) observers: Vec<Option<ObserverId>>,
}

impl Recording {
    /// Returns the id that an existing observer has in the records.
    pub(super) fn observer(&self, observer: ObserverId) -> Option<ObserverId> {
        let id = self.observers.iter().position(|known| *known == Some(observer))?;
        Some(ObserverId(id as u32))
    }
}
