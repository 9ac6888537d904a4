//! Recording: what a running allocator is asked and what it decides, op by op, as [`Record`]s for a [`Sink`].
//!
//! What is recorded replays: the same ops on an allocator of the same configuration get the same placements and the same
//! digests. For that to be true of a program with many threads, ops pass one at a time while a recording is on:
//!
//! ```text
//!   thread 1 ── allocate ──┐ gate                       heaps as always          sink
//!   thread 2 ── free ──────┤  ║══ one op, from its first lock to its decision ══► Record, Record, Record ...
//!   thread 3 ── wait ──────┘  ║
//! ```
//!
//! So the order of the records is one in which the ops really took effect, in each heap and between heaps, limits that heaps
//! share included. Ops that were refused without a trace in any digest (an unknown stream, a stale handle) are no records.
//!
//! The gate is a lock before all others. While nothing is recorded it stays open, and an op looks at one flag.
//!
//! | what happens | its records |
//! |---|---|
//! | an allocation | `Allocate` with its placement and its name |
//! | an allocation or a reservation that is refused | what was given back for it (`Reclaim`), then `Refuse` |
//! | the failure callback is asked | what was given back before (`Reclaim`), the callback's own ops, then as above |
//! | a free that crosses the release threshold, memory given back for an allocation that then fits | nothing more: replay does the same |
//!
//! A sink that fails ends the recording, never an op: the error waits for [`Allocator::stop_recording`], and `tracing` gets
//! one event (`recording.ended`). The same happens when something comes that no record can say, see [`RecordingError`].

pub use super::recorder::{Recorded, RecordingError, Sink, SinkError, StartRecordingError};

use super::Allocator;
use super::observer_list::Observers;
use super::recorder::{Recorder, Recording};
use super::request::Request;
use crate::config::Config;
use crate::config::errors::TrimError;
use crate::config::op::{NAME_BYTES_MAX, Op, Record};
use crate::history::names::{cut_name, slot_map};
use crate::sync::lock::{Guard, Lock, LockCell};
use crate::types::backend::{Backend, BackendError};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{AllocationId, ObserverId, PoolId, StreamId};
use std::sync::atomic::Ordering;

/// The way through the gate. While a thread holds it, no other carries out a recorded op.
pub(crate) struct Gate<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    /// `None` while nothing is recorded, and while the failure callback is asked.
    recorder: Option<Guard<'a, L, Recorder>>,
    /// The thread was unwinding already: the op is one of a `Drop`.
    was_panicking: bool,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Records every op from now on, and the decision about it, into the sink: first the streams, pools and observers that there
    /// are already. Begin before the first allocation. No other thread may use the allocator meanwhile.
    ///
    /// While it lasts, ops of all threads pass one at a time, from their first lock to their decision. Statistics, digests and
    /// placements are the same as without.
    ///
    /// # Errors
    /// See [`StartRecordingError`]; nothing has changed then.
    pub fn start_recording(&self, mut sink: impl Sink + 'static) -> Result<(), StartRecordingError> {
        let mut gate = self.recorder.lock();
        if !matches!(*gate, Recorder::Off) {
            return Err(StartRecordingError::AlreadyRecording);
        }
        // From here on no pool, heap or stream is made without a record.
        let observers = self.observers.lock();
        let open_scopes = self.open_scopes.lock();
        let heaps: Vec<_> = self.all_heaps().map(LockCell::lock).collect();
        let clocks = self.context.clocks.lock();
        if let Some(heap) = heaps.iter().find(|heap| !heap.is_fresh()) {
            return Err(StartRecordingError::InUse { pool: heap.identity().pool, ops: heap.digest().ops });
        }
        // With the limit that holds now: the same configuration, and so nothing to check.
        let config = Config { limit_bytes: self.limit_bytes(), ..self.config().clone() };
        sink.begin(&config).map_err(StartRecordingError::Sink)?;
        let mut records = 0;
        for record in self.standing(&observers) {
            sink.record(record).map_err(StartRecordingError::Sink)?;
            records += 1;
        }
        *gate = Recorder::On(Box::new(Recording {
            sink: Box::new(sink),
            records,
            next_id: 0,
            ids: slot_map(),
            observers: observers.iter().map(|(observer, _)| Some(observer)).collect(),
        }));
        self.is_recording.store(true, Ordering::Release);
        drop((clocks, heaps, open_scopes, observers));
        Ok(())
    }

    /// Ends the recording, at any time. What the sink got is whole then. Dropping the allocator does the same.
    ///
    /// # Errors
    /// See [`RecordingError`]: what ended it before, or kept the sink from finishing. Nothing is recorded any more.
    pub fn stop_recording(&self) -> Result<Recorded, RecordingError> {
        let mut gate = self.recorder.lock();
        match std::mem::replace(&mut *gate, Recorder::Off) {
            Recorder::Off => Err(RecordingError::NotRecording),
            Recorder::Ended(error) => Err(error),
            Recorder::On(recording) => {
                self.is_recording.store(false, Ordering::Release);
                drop(gate);
                let Recording { mut sink, records, .. } = *recording;
                sink.finish().map_err(|source| RecordingError::Sink { records, source })?;
                Ok(Recorded { records })
            }
        }
    }

    /// As [`stop_recording`](Self::stop_recording), if there is one, where no error can be returned.
    pub(crate) fn end_recording(&self) {
        if self.is_recording()
            && let Err(error) = self.stop_recording()
        {
            tracing::warn!(name: "recording.unfinished", target: "symmalloc", %error);
        }
    }

    /// Whether ops are recorded: not any more after the recording ended early.
    pub fn is_recording(&self) -> bool {
        self.is_recording.load(Ordering::Acquire)
    }

    /// The streams, pools and observers that there are before the first op, as the ops that made them.
    fn standing(&self, observers: &Observers) -> Vec<Record> {
        let streams = (0..self.stream_count()).map(|id| Op::RegisterStream { stream: StreamId(id as u16) });
        let mut ops: Vec<Op> = streams.collect();
        for (index, entry) in self.pools.iter().skip(1) {
            let pool = PoolId(index as u32);
            ops.push(Op::CreatePool { pool, config: Box::new(entry.config.clone()) });
            if entry.is_destroyed() {
                ops.push(Op::DestroyPool { pool });
            }
        }
        let observing = observers.iter().zip(0..);
        ops.extend(observing.map(|((_, pool), id)| Op::Observe { observer: ObserverId(id), pool }));
        ops.into_iter().map(Record::from).collect()
    }

    /// Through the gate, when something is recorded. Call it before any other lock is taken.
    #[inline]
    pub(super) fn gate(&self) -> Gate<'_, B, L> {
        let (mut recorder, mut was_panicking) = (None, false);
        if self.is_recording() {
            (recorder, was_panicking) = (Some(self.recorder.lock()), std::thread::panicking());
        }
        Gate { allocator: self, recorder, was_panicking }
    }
}

impl<B: Backend, L: Lock> Gate<'_, B, L> {
    /// Whether what is noted goes anywhere.
    pub(crate) fn is_recording(&mut self) -> bool {
        self.recording().is_some()
    }

    #[inline]
    fn recording(&mut self) -> Option<&mut Recording> {
        match self.recorder.as_deref_mut() {
            Some(Recorder::On(recording)) => Some(recording),
            _ => None,
        }
    }

    /// Records an op that was carried out. No heap is locked.
    #[inline]
    pub(crate) fn note(&mut self, op: Op) {
        self.note_record(Record::from(op));
    }

    #[inline]
    fn note_record(&mut self, record: Record) {
        let Some(recording) = self.recording() else { return };
        match recording.sink.record(record) {
            Ok(()) => recording.records += 1,
            Err(source) => self.end(|records| RecordingError::Sink { records, source }),
        }
    }

    /// Records an allocation.
    #[inline]
    pub(super) fn note_allocation(&mut self, made: &Allocation, request: Request, name: Option<&str>) {
        let Request { pool, stream, size_bytes } = request;
        let Some(recording) = self.recording() else { return };
        let id = AllocationId(recording.next_id);
        recording.next_id += 1;
        recording.ids.insert(made.handle, id);
        let op = Op::Allocate { id, pool, stream, size_bytes };
        let placement = (made.size_bytes > 0).then_some(made.placement);
        let name = name.map(|name| cut_name(name, NAME_BYTES_MAX).into());
        self.note_record(Record { op, name, placement, pending: None });
    }

    /// Records the free of an allocation that was live.
    #[inline]
    pub(super) fn note_free(&mut self, handle: Handle) {
        let Some(recording) = self.recording() else { return };
        match recording.ids.remove(&handle) {
            Some(id) => self.note(Op::Free { id }),
            // No handle says whether an allocation of zero bytes was freed before.
            None => self.end(|records| RecordingError::FreedTwice { records, handle }),
        }
    }

    /// Records the use of an allocation by another stream.
    pub(crate) fn note_use(&mut self, handle: Handle, stream: StreamId) {
        let Some(recording) = self.recording() else { return };
        if let Some(id) = recording.ids.get(&handle).copied() {
            self.note(Op::RecordUse { id, stream });
        }
    }

    /// Records that an observer came.
    pub(crate) fn note_observer(&mut self, observer: ObserverId, pool: PoolId) {
        let Some(recording) = self.recording() else { return };
        let id = ObserverId(recording.observers.len() as u32);
        recording.observers.push(Some(observer));
        self.note(Op::Observe { observer: id, pool });
    }

    /// Records that an observer acknowledged everything so far.
    pub(crate) fn note_acknowledgement(&mut self, observer: ObserverId) {
        if let Some(id) = self.recording().and_then(|recording| recording.observer(observer)) {
            self.note(Op::Acknowledge { observer: id });
        }
    }

    /// Records that an observer is gone.
    pub(crate) fn note_forgotten(&mut self, observer: ObserverId) {
        let Some(recording) = self.recording() else { return };
        if let Some(id) = recording.observer(observer) {
            recording.observers[id.index()] = None;
            self.note(Op::Forget { observer: id });
        }
    }

    /// A segment was removed between an observer's `unread` and its `acknowledge`.
    #[cold]
    pub(crate) fn late_death(&mut self) {
        self.end(|records| RecordingError::LateDeath { records });
    }

    /// Ends the recording where the driver kept what a trim was to give back.
    pub(crate) fn note_failed_trim(&mut self, outcome: &Result<u64, TrimError>) {
        if let Err(TrimError::Backend { error, .. }) = outcome {
            self.driver_failed(error.clone());
        }
    }

    /// The driver failed in the middle of an op: whether it left what no op leads to is not known.
    #[cold]
    pub(crate) fn driver_failed(&mut self, source: BackendError) {
        self.end(|records| RecordingError::Driver { records, source });
    }

    /// A pool was restored.
    #[cold]
    pub(crate) fn restored(&mut self, pool: PoolId) {
        self.end(|records| RecordingError::Restored { records, pool });
    }

    /// The limit over all pools is another one from here on.
    pub(crate) fn note_limit(&mut self) {
        self.end(|records| RecordingError::LimitChanged { records });
    }

    /// Ends the recording early. The allocator goes on.
    #[cold]
    fn end(&mut self, error: impl FnOnce(u64) -> RecordingError) {
        let Some(recorder) = self.recorder.as_deref_mut() else { return };
        let Recorder::On(recording) = recorder else { return };
        let Recording { sink, records, .. } = &mut **recording;
        let records = *records;
        let mut error = error(records);
        // What was recorded before is whole, unless the sink failed.
        if !matches!(error, RecordingError::Sink { .. } | RecordingError::Panicked { .. })
            && let Err(source) = sink.finish()
        {
            error = RecordingError::Sink { records, source };
        }
        tracing::warn!(name: "recording.ended", target: "symmalloc", records, %error);
        *recorder = Recorder::Ended(error);
        self.allocator.is_recording.store(false, Ordering::Release);
    }

    /// Lets others through the gate, and calls `during`.
    pub(crate) fn open<T>(&mut self, during: impl FnOnce() -> T) -> T {
        let was_closed = self.recorder.take().is_some();
        let result = during();
        if was_closed {
            self.recorder = Some(self.allocator.recorder.lock());
        }
        result
    }
}

impl<B: Backend, L: Lock> Drop for Gate<'_, B, L> {
    /// An op that panics is half recorded: the recording ends, and says so.
    fn drop(&mut self) {
        if self.recorder.is_some() && !self.was_panicking && std::thread::panicking() {
            self.end(|records| RecordingError::Panicked { records });
        }
    }
}
