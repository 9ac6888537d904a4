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
//! The gate is a lock before all others. Heaps that are recorded leave the plain path, as heaps with journals do; while
//! nothing is recorded, allocations and frees do not know of any of this.
//!
//! | what happens | its records |
//! |---|---|
//! | an allocation | `Allocate` with its placement and its name |
//! | an allocation or a reservation that is refused | what was given back for it (`Reclaim`), then `Refuse` |
//! | the failure callback is asked | what was given back before (`Reclaim`), the callback's own ops, then as above |
//! | a free that crosses the release threshold, memory given back for an allocation that then fits | nothing more: replay does the same |
//!
//! A sink that fails ends the recording, never an op: the error waits for [`Allocator::stop_recording`], and `tracing` hears of
//! it once (`recording.ended`). The same happens when something comes that no record can say, see [`RecordingError`].

use crate::allocator::{Allocator, NO_SLOT};
use crate::backend::{Backend, BackendError};
use crate::config::Config;
use crate::errors::TrimError;
use crate::handle::{Allocation, Handle};
use crate::held::HeapCell;
use crate::ids::{AllocationId, HeapId, ObserverId, PoolId, StreamId};
use crate::lock::{Guard, Lock, LockCell};
use crate::names::{SlotMap, slot_map};
use crate::observers::Observers;
use crate::op::NAME_BYTES_MAX;
use crate::op::{Op, Record};
use std::error::Error;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering;

/// Why a sink failed, in its own words.
pub type SinkError = Box<dyn Error + Send + Sync>;

/// Where records go. Every call is made under a lock that all recorded ops need: it must be quick, and must not call the
/// allocator.
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
    /// The sink failed.
    #[error("the recording ended after {records} records, because its sink failed: {source}")]
    Sink {
        /// Records that the sink had got.
        records: u64,
        /// What the sink said.
        source: SinkError,
    },
    /// The driver failed in the middle of an op, and left a state that no op leads to. What was recorded before is whole.
    #[error("the recording ended after {records} records, because the driver failed in the middle of an op: {source}")]
    Driver {
        /// Records that the sink had got.
        records: u64,
        /// What the driver said.
        source: BackendError,
    },
    /// A pool was restored: no op leads to its state. What was recorded before is whole.
    #[error(
        "the recording ended after {records} records, because {pool} was restored: no op leads to a restored state"
    )]
    Restored {
        /// Records that the sink had got.
        records: u64,
        /// The pool.
        pool: PoolId,
    },
    /// The limit over all pools was changed: no op says so. What was recorded before is whole.
    #[error(
        "the recording ended after {records} records, because the limit over all pools was changed: set it before the \
         recording begins"
    )]
    LimitChanged {
        /// Records that the sink had got.
        records: u64,
    },
    /// A segment died while its observer was dealing with what had happened before: no trace can say which of it the observer
    /// let go. What was recorded before is whole.
    #[error(
        "the recording ended after {records} records, because a segment died between an observer's `unread` and its \
         `acknowledge`: trim observed pools at another time"
    )]
    LateDeath {
        /// Records that the sink had got.
        records: u64,
    },
    /// An allocation of zero bytes was freed twice, which no handle tells and no trace can say. What was recorded before is
    /// whole.
    #[error("the recording ended after {records} records, because {handle}, of zero bytes, was freed twice")]
    FreedTwice {
        /// Records that the sink had got.
        records: u64,
        /// Its handle.
        handle: Handle,
    },
}

/// What the gate guards.
pub(crate) enum Recorder {
    Off,
    On(Box<Recording>),
    /// Ended before it was stopped.
    Ended(RecordingError),
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recorder::Off => f.write_str("Off"),
            Recorder::On(recording) => write!(f, "On({} records)", recording.records),
            Recorder::Ended(error) => write!(f, "Ended({error})"),
        }
    }
}

pub(crate) struct Recording {
    sink: Box<dyn Sink>,
    records: u64,
    next_id: u64,
    /// The live allocations' ids by heap and slot. What is not live has the id of some earlier allocation.
    ids: Vec<Vec<AllocationId>>,
    /// Those of zero bytes, by heap and tag: they share a slot.
    nothings: SlotMap<(HeapId, NonZeroU64), AllocationId>,
    /// The observers that came so far, and are there still. Their place is their id in the records.
    observers: Vec<Option<ObserverId>>,
}

impl Recording {
    #[inline(always)]
    fn name_allocation(&mut self, handle: Handle) -> AllocationId {
        let id = AllocationId(self.next_id);
        self.next_id += 1;
        let (heap, slot) = (handle.heap().index(), handle.slot() as usize);
        match self.ids.get_mut(heap).and_then(|ids| ids.get_mut(slot)) {
            Some(place) => *place = id,
            None => self.name_in_new_place(handle, id),
        }
        id
    }

    #[cold]
    fn name_in_new_place(&mut self, handle: Handle, id: AllocationId) {
        if handle.slot() == NO_SLOT {
            self.nothings.insert((handle.heap(), handle.tag()), id);
            return;
        }
        let (heap, slot) = (handle.heap().index(), handle.slot() as usize);
        if self.ids.len() <= heap {
            self.ids.resize_with(heap + 1, Vec::new);
        }
        let ids = &mut self.ids[heap];
        ids.resize(slot + 1, AllocationId(u64::MAX));
        ids[slot] = id;
    }

    /// The id of an allocation that is live, or was when the op began.
    #[inline(always)]
    fn id_of(&self, handle: Handle) -> Option<AllocationId> {
        let id = self.ids.get(handle.heap().index()).and_then(|ids| ids.get(handle.slot() as usize)).copied();
        id.or_else(|| self.id_of_nothing(handle))
    }

    #[cold]
    fn id_of_nothing(&self, handle: Handle) -> Option<AllocationId> {
        self.nothings.get(&(handle.heap(), handle.tag())).copied()
    }

    /// The id of an observer that is there.
    fn observer(&self, observer: ObserverId) -> Option<ObserverId> {
        let id = self.observers.iter().position(|known| *known == Some(observer))?;
        Some(ObserverId(id as u32))
    }
}

/// The way through the gate: who has it is the only one who carries out a recorded op.
pub(crate) struct Tape<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    /// `None` for an op of a heap that is not recorded, and while the failure callback is asked.
    gate: Option<Guard<'a, L, Recorder>>,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Records every op from now on, and the decision about it, into the sink: first the streams, pools and observers that there
    /// are already. Begin before the first allocation. No other thread may use the allocator meanwhile.
    ///
    /// While it lasts, ops of all threads pass one at a time, from their first lock to their decision, and heaps take their
    /// longer way. Statistics, digests and placements are the same as without.
    ///
    /// # Errors
    /// See [`StartRecordingError`]; nothing has changed then.
    pub fn start_recording(&self, mut sink: impl Sink + 'static) -> Result<(), StartRecordingError> {
        let mut gate = self.recorder.lock();
        if !matches!(*gate, Recorder::Off) {
            return Err(StartRecordingError::AlreadyRecording);
        }
        // From here on no pool, heap or stream is made beside the recording.
        let observers = self.observers.lock();
        let open_scopes = self.open_scopes.lock();
        let mut heaps: Vec<_> = self.pools.iter().flat_map(|(_, pool)| pool.heaps()).map(HeapCell::lock).collect();
        let clocks = self.around.clocks.lock();
        if let Some(heap) = heaps.iter().find(|heap| !heap.is_fresh()) {
            return Err(StartRecordingError::InUse { pool: heap.pool, ops: heap.digest.ops });
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
            ids: Vec::new(),
            nothings: slot_map(),
            observers: observers.iter().map(|(observer, _)| Some(observer)).collect(),
        }));
        self.is_recording.store(true, Ordering::Release);
        heaps.iter_mut().for_each(|heap| heap.set_recorded(true));
        // The gate comes before a heap, so who comes to a recorded one cannot free for others: they wait from here on. Of heaps
        // that are fresh nothing can be in the mail.
        self.heaps.iter().for_each(|(_, heap)| heap.mail.close());
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
                self.leave_recorded_ways();
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
            if entry.is_destroyed.load(Ordering::Acquire) {
                ops.push(Op::DestroyPool { pool });
            }
        }
        let observing = observers.iter().zip(0..);
        ops.extend(observing.map(|((_, pool), id)| Op::Observe { observer: ObserverId(id), pool }));
        ops.into_iter().map(Record::from).collect()
    }

    /// No heap is recorded any more. Called behind the gate, and without the lock of a heap.
    fn leave_recorded_ways(&self) {
        let _no_heap_is_made = (self.observers.lock(), self.open_scopes.lock());
        self.is_recording.store(false, Ordering::Release);
        self.heaps.iter().for_each(|(_, heap)| heap.lock().set_recorded(false));
    }

    /// Through the gate, when something is recorded. Call it before any other lock is taken.
    pub(crate) fn tape(&self) -> Tape<'_, B, L> {
        if self.is_recording() { self.tape_of_recorded() } else { self.blank_tape() }
    }

    /// Through the gate, for an op of a recorded heap.
    pub(crate) fn tape_of_recorded(&self) -> Tape<'_, B, L> {
        Tape { allocator: self, gate: Some(self.recorder.lock()) }
    }

    /// For an op of a heap that is not recorded.
    pub(crate) fn blank_tape(&self) -> Tape<'_, B, L> {
        Tape { allocator: self, gate: None }
    }
}

impl<B: Backend, L: Lock> Tape<'_, B, L> {
    /// Whether what is noted goes anywhere.
    pub(crate) fn is_recording(&mut self) -> bool {
        self.recording().is_some()
    }

    #[inline]
    fn recording(&mut self) -> Option<&mut Recording> {
        match self.gate.as_deref_mut() {
            Some(Recorder::On(recording)) => Some(recording),
            _ => None,
        }
    }

    /// Records an op that was carried out. No heap is locked.
    #[inline(always)]
    pub(crate) fn note(&mut self, op: Op) {
        self.note_record(Record::from(op));
    }

    #[inline(always)]
    fn note_record(&mut self, record: Record) {
        let Some(recording) = self.recording() else { return };
        match recording.sink.record(record) {
            Ok(()) => recording.records += 1,
            Err(source) => self.end(|records| RecordingError::Sink { records, source }),
        }
    }

    /// Records an allocation.
    #[inline]
    pub(crate) fn note_allocation(
        &mut self,
        made: &Allocation,
        (pool, stream, size_bytes): (PoolId, StreamId, u64),
        name: Option<&str>,
    ) {
        let Some(recording) = self.recording() else { return };
        let id = recording.name_allocation(made.handle);
        let op = Op::Allocate { id, pool, stream, size_bytes };
        let placement = (made.size_bytes > 0).then_some(made.placement);
        self.note_record(Record { op, name: name.map(whole_characters), placement, pending: None });
    }

    /// Records the free of an allocation that was live.
    #[inline(always)]
    pub(crate) fn note_free(&mut self, handle: Handle) {
        let Some(recording) = self.recording() else { return };
        match recording.id_of(handle) {
            Some(id) => {
                if handle.slot() == NO_SLOT {
                    recording.nothings.remove(&(handle.heap(), handle.tag()));
                }
                self.note(Op::Free { id });
            }
            None => self.end(|records| RecordingError::FreedTwice { records, handle }),
        }
    }

    /// Records the use of an allocation by another stream.
    pub(crate) fn note_use(&mut self, handle: Handle, stream: StreamId) {
        let Some(recording) = self.recording() else { return };
        if let Some(id) = recording.id_of(handle) {
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

    /// A segment died behind the back of an observer.
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

    /// Ends the recording before its time. The allocator goes on.
    #[cold]
    fn end(&mut self, error: impl FnOnce(u64) -> RecordingError) {
        let Some(gate) = self.gate.as_deref_mut() else { return };
        let Recorder::On(recording) = gate else { return };
        let Recording { sink, records, .. } = &mut **recording;
        let records = *records;
        let mut error = error(records);
        // What came before the end is whole, unless it is the sink that is at its end.
        if !matches!(error, RecordingError::Sink { .. })
            && let Err(source) = sink.finish()
        {
            error = RecordingError::Sink { records, source };
        }
        tracing::warn!(name: "recording.ended", target: "symmalloc", records, %error);
        *gate = Recorder::Ended(error);
        self.allocator.leave_recorded_ways();
    }

    /// Lets others through the gate, and calls `during`.
    pub(crate) fn open<T>(&mut self, during: impl FnOnce() -> T) -> T {
        let was_closed = self.gate.take().is_some();
        let result = during();
        if was_closed {
            self.gate = Some(self.allocator.recorder.lock());
        }
        result
    }
}

/// As much of a name as a trace can hold.
fn whole_characters(name: &str) -> Box<str> {
    let end = (0..=NAME_BYTES_MAX.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    name[..end.unwrap_or(0)].into()
}
