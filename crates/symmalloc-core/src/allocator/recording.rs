//! Recording: the ops and decisions of a running allocator, as [`Record`]s for a [`Sink`].
//!
//! A recording can be replayed: the same ops on an allocator of the same configuration get the same placements and
//! digests. To guarantee this for a program with many threads, ops pass one at a time while a recording is active:
//!
//! ```text
//!   thread 1 ── allocate ──┐ gate                       heaps, as usual          sink
//!   thread 2 ── free ──────┤  ║══ one op, from its first lock to its decision ══► Record, Record, Record ...
//!   thread 3 ── wait ──────┘  ║
//! ```
//!
//! The records are therefore in an order in which the ops took effect, within each heap and across heaps, including
//! limits that heaps share. Ops that failed without changing any digest (an unknown stream, a stale handle) are not
//! recorded.
//!
//! The gate comes before all other locks. While nothing is recorded it is open, and an op reads one flag, which
//! debugging shares.
//!
//! | event | records |
//! |---|---|
//! | an allocation | `Allocate` with its placement and its name |
//! | a refused allocation or reservation | a `Reclaim` for each attempt to release memory for it, then `Refuse` |
//! | a call of the failure callback | a `Reclaim` for each earlier attempt, the callback's own ops, then as above |
//! | memory released by a free above the threshold, or for an allocation that then fits | none: replay does the same |
//!
//! A failed sink ends the recording but fails no op: [`Allocator::stop_recording`] returns the error, and `tracing`
//! gets one event (`recording.ended`). The same happens at an event that no record can represent, see [`RecordingEnd`].

pub use super::recorder::{Recorded, RecordingEnd, RecordingError, Sink, SinkError, StartRecordingError};

use super::Allocator;
use super::gate::Gate;
use super::recorder::Recording;
use crate::config::op::{Op, Record};
use crate::history::segment_log::Observers;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::{ObserverId, PoolId, StreamId};
use crate::types::look_up::LookUp;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Starts to record every op and its decision into the sink, beginning with the existing streams, pools and
    /// observers. Begin before the first allocation. No other thread may use the allocator during the call.
    ///
    /// While a recording is on, the ops of all threads pass one at a time, from their first lock to their decision.
    /// Statistics, digests and placements are the same as without.
    ///
    /// # Errors
    /// See [`StartRecordingError`]; nothing has changed then.
    pub fn start_recording(&self, sink: impl Sink + 'static) -> Result<(), StartRecordingError> {
        let mut gate = self.recorder.prepare()?;
        // From now on no pool, heap or stream is created without a record.
        let observers = self.observers.lock();
        let open_scopes = self.open_scopes.lock();
        let heaps: Vec<_> = self.all_heaps().map(LockCell::lock).collect();
        let clocks = self.context.clocks.lock();
        if let Some(heap) = heaps.iter().find(|heap| !heap.is_fresh()) {
            return Err(StartRecordingError::InUse { pool: heap.id().pool, ops: heap.ledger().digest().ops });
        }
        // The recording begins with the current limit.
        let config = self.config().to_builder().total_limit_bytes(self.total_limit_bytes()).build();
        let config = config.expect("the current limit should be in range");
        let standing = self.standing(&observers);
        let recording = Recording {
            sink: Box::new(sink),
            records: 0,
            next_id: 0,
            ids: LookUp::default(),
            observers: observers.iter().map(|(observer, _)| Some(observer)).collect(),
        };
        drop((clocks, heaps, open_scopes, observers));
        gate.begin(&config, standing, recording)
    }

    /// Stops the recording, at any time. The sink then has a complete recording. Dropping the allocator does the same.
    ///
    /// # Errors
    /// See [`RecordingError`]: the reason why it ended before, or the sink's failure to finish. The recording is off in
    /// either case.
    pub fn stop_recording(&self) -> Result<Recorded, RecordingError> {
        let Recording { mut sink, records, .. } = *self.recorder.stop()?;
        let ended = |error| RecordingError::Ended { records, source: RecordingEnd::Sink(error) };
        sink.finish().map_err(ended)?;
        Ok(Recorded { records })
    }

    /// Stops a recording, if one is active, in a context that cannot return an error.
    pub(crate) fn end_recording(&self) {
        if self.is_recording()
            && let Err(error) = self.stop_recording()
        {
            tracing::warn!(name: "recording.unfinished", target: "symmalloc", %error);
        }
    }

    /// Returns `true` while ops are recorded; `false` after the recording ended early.
    pub fn is_recording(&self) -> bool {
        self.recorder.is_on()
    }

    /// Returns the existing streams, pools and observers as the ops that create them.
    fn standing(&self, observers: &Observers) -> Vec<Record> {
        let groups = self.groups.lock();
        let streams = (0..self.stream_count()).map(|id| StreamId(id as u16));
        let streams = streams.map(|stream| Op::RegisterStream { stream, group: groups.first_of(stream) });
        let mut ops: Vec<Op> = streams.collect();
        drop(groups);
        for (index, slot) in self.pools.iter().skip(1) {
            let pool = PoolId(index as u32);
            ops.push(Op::CreatePool { pool, config: Box::new(slot.config().clone()) });
            if slot.live().is_none() {
                ops.push(Op::DestroyPool { pool });
            }
        }
        let observing = observers.iter().zip(0..);
        ops.extend(observing.map(|((_, pool), id)| Op::Observe { observer: ObserverId(id), pool }));
        ops.into_iter().map(Record::from).collect()
    }

    /// Passes the gate if a recording is active. Must be called before any other lock is taken.
    pub(super) fn gate(&self) -> Gate<'_, L> {
        self.recorder.gate()
    }
}
