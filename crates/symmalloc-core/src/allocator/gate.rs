//! The gate through which recorded ops pass one at a time, and the recording behind it. See [`super::recording`].

use super::recorder::{Recording, RecordingEnd, RecordingError, StartRecordingError};
use crate::config::Config;
use crate::config::op::{NAME_BYTES_MAX, Op, Record};
use crate::heap::revive::Revived;
use crate::heap::trim::Released;
use crate::history::journal::cut_name;
use crate::sync::lock::{Guard, Lock, LockCell};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{AllocationId, ObserverId, PoolId, StreamId};
use std::cell::RefCell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// The state that the gate guards.
enum RecorderState {
    Off,
    On(Box<Recording>),
    /// The recording ended before it was stopped.
    Ended(RecordingError),
}

/// The recording of an allocator, if there is one.
pub(super) struct Recorder<L: Lock> {
    state: L::Cell<RecorderState>,
    /// [`RECORDING`] while ops are recorded, which changes only while the gate is held, and [`DEBUGGING`] once a pool has
    /// debugging options. An op reads one flag for both, so neither costs an instruction while it is off.
    watchers: AtomicU8,
    /// The allocator's number. With it, a thread recognizes the recording whose sink it is running.
    number: u64,
    /// `true` if the sink used the allocator.
    was_reentered: AtomicBool,
}

/// Ops are recorded.
const RECORDING: u8 = 1;
/// A pool has debugging options.
const DEBUGGING: u8 = 2;

thread_local! {
    /// The allocators whose sinks this thread is running. The thread holds their gates, so another call to one of these
    /// allocators would deadlock at the gate.
    static IN_SINKS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// A guard that marks the thread as running a sink until it is dropped.
struct InSink;

impl InSink {
    fn enter(number: u64) -> Self {
        // The thread-local list may already be destroyed while a thread exits. A sink that uses the allocator then
        // deadlocks.
        let _ending = IN_SINKS.try_with(|sinks| sinks.borrow_mut().push(number));
        InSink
    }
}

impl Drop for InSink {
    fn drop(&mut self) {
        let _ending = IN_SINKS.try_with(|sinks| sinks.borrow_mut().pop());
    }
}

/// A request for memory, as recordings and errors report it.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) pool: PoolId,
    pub(super) stream: StreamId,
    pub(super) size_bytes: u64,
}

/// A pass through the gate. While a thread holds it, no other thread executes a recorded op.
pub(super) struct Gate<'a, L: Lock> {
    recorder: &'a Recorder<L>,
    /// `None` while nothing is recorded, and while the failure callback runs.
    state: Option<Guard<'a, L, RecorderState>>,
    /// `true` if the thread was already unwinding, which means that a `Drop` called the op.
    was_panicking: bool,
}

impl<L: Lock> Recorder<L> {
    pub(super) fn new(number: u64) -> Self {
        Recorder {
            state: L::Cell::new(RecorderState::Off),
            watchers: AtomicU8::new(0),
            number,
            was_reentered: AtomicBool::new(false),
        }
    }

    /// Returns `true` if the calling thread is running the sink of this recording, and holds the gate.
    fn is_in_sink(&self) -> bool {
        IN_SINKS.try_with(|sinks| sinks.borrow().contains(&self.number)).unwrap_or(false)
    }

    /// Calls the sink. Calls from the sink to the allocator pass the gate unrecorded.
    fn with_sink<T>(&self, call: impl FnOnce() -> T) -> T {
        let _in_sink = InSink::enter(self.number);
        call()
    }

    /// Returns `true` if the sink used the allocator since this function was last called.
    fn take_reentered(&self) -> bool {
        self.was_reentered.swap(false, Ordering::Relaxed)
    }

    #[inline(always)]
    pub(super) fn is_on(&self) -> bool {
        self.watchers.load(Ordering::Acquire) & RECORDING != 0
    }

    /// Returns `true` if ops take the path that records and debugs them.
    #[inline(always)]
    pub(super) fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::Acquire) != 0
    }

    /// Returns `true` if a pool has, or had, debugging options.
    pub(super) fn is_debugged(&self) -> bool {
        self.watchers.load(Ordering::Acquire) & DEBUGGING != 0
    }

    /// Notes that a pool has debugging options. This stays so.
    pub(super) fn begin_debugging(&self) {
        self.watchers.fetch_or(DEBUGGING, Ordering::Release);
    }

    fn begin_recording(&self) {
        self.watchers.fetch_or(RECORDING, Ordering::Release);
    }

    fn end_recording(&self) {
        self.watchers.fetch_and(!RECORDING, Ordering::Release);
    }

    /// Passes the gate if a recording is active.
    pub(super) fn gate(&self) -> Gate<'_, L> {
        if !self.is_on() {
            return self.open_gate();
        }
        if self.is_in_sink() {
            self.was_reentered.store(true, Ordering::Relaxed);
            return self.open_gate();
        }
        Gate { recorder: self, state: Some(self.state.lock()), was_panicking: std::thread::panicking() }
    }

    /// Returns a gate that holds no lock, for ops that are not recorded.
    pub(super) fn open_gate(&self) -> Gate<'_, L> {
        Gate { recorder: self, state: None, was_panicking: false }
    }

    /// Passes the gate to begin a recording.
    pub(super) fn prepare(&self) -> Result<Gate<'_, L>, StartRecordingError> {
        if self.is_in_sink() {
            return Err(StartRecordingError::AlreadyRecording);
        }
        let state = self.state.lock();
        if !matches!(*state, RecorderState::Off) {
            return Err(StartRecordingError::AlreadyRecording);
        }
        Ok(Gate { recorder: self, state: Some(state), was_panicking: std::thread::panicking() })
    }

    /// Ends the recording.
    pub(super) fn stop(&self) -> Result<Box<Recording>, RecordingError> {
        if self.is_in_sink() {
            return Err(RecordingError::InSink);
        }
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, RecorderState::Off) {
            RecorderState::Off => Err(RecordingError::NotRecording),
            RecorderState::Ended(error) => Err(error),
            RecorderState::On(recording) => {
                self.end_recording();
                Ok(recording)
            }
        }
    }
}

impl<L: Lock> Gate<'_, L> {
    /// Begins a recording. No op passes the gate before the sink has received the existing state. The caller holds no
    /// lock.
    pub(super) fn begin(
        &mut self,
        config: &Config,
        standing: Vec<Record>,
        mut recording: Recording,
    ) -> Result<(), StartRecordingError> {
        self.recorder.begin_recording();
        let begun = self.recorder.with_sink(|| {
            recording.sink.begin(config)?;
            standing.into_iter().try_for_each(|record| {
                recording.records += 1;
                recording.sink.record(record)
            })
        });
        let begun = match (begun, self.recorder.take_reentered()) {
            (Err(error), _) => Err(StartRecordingError::Sink(error)),
            (Ok(()), true) => Err(StartRecordingError::Reentered),
            (Ok(()), false) => Ok(()),
        };
        match begun {
            Ok(()) => {
                let state = self.state.as_deref_mut().expect("the gate was prepared");
                *state = RecorderState::On(Box::new(recording));
            }
            Err(_) => {
                self.recorder.with_sink(|| drop(recording));
                self.recorder.take_reentered();
                self.recorder.end_recording();
            }
        }
        begun
    }

    /// Returns `true` if this pass records ops.
    pub(super) fn is_recording(&mut self) -> bool {
        self.recording().is_some()
    }

    fn recording(&mut self) -> Option<&mut Recording> {
        match self.state.as_deref_mut() {
            Some(RecorderState::On(recording)) => Some(recording),
            _ => None,
        }
    }

    /// Records an executed op. No heap is locked.
    pub(super) fn note(&mut self, op: Op) {
        self.note_record(Record::from(op));
    }

    fn note_record(&mut self, record: Record) {
        let recorder = self.recorder;
        let Some(recording) = self.recording() else { return };
        match recorder.with_sink(|| recording.sink.record(record)) {
            Ok(()) => recording.records += 1,
            Err(error) => self.end(RecordingEnd::Sink(error)),
        }
        if recorder.take_reentered() {
            self.end(RecordingEnd::Reentered);
        }
    }

    /// Records an allocation.
    pub(super) fn note_allocation(&mut self, made: &Allocation, request: Request, name: Option<&str>) {
        self.note_made(made, request, name, None);
    }

    fn note_made(
        &mut self,
        made: &Allocation,
        request: Request,
        name: Option<&str>,
        revived_bytes: Option<NonZeroU64>,
    ) {
        let Request { pool, stream, size_bytes } = request;
        let Some(recording) = self.recording() else { return };
        let id = AllocationId(recording.next_id);
        recording.next_id += 1;
        recording.ids.insert(made.handle, id);
        let op = Op::Allocate { id, pool, stream, size_bytes };
        let placement = (made.size_bytes > 0).then_some(made.placement);
        let name = name.map(|name| cut_name(name, NAME_BYTES_MAX).into());
        self.note_record(Record { op, name, placement, pending: None, revived_bytes });
    }

    /// Records a revived allocation, or additional uses of a live one.
    pub(super) fn note_revival(&mut self, pool: PoolId, revived: &Revived) {
        let Revived { allocation, stream, requested_bytes: size_bytes, .. } = *revived;
        if revived.is_made {
            let request = Request { pool, stream, size_bytes };
            self.note_made(&allocation, request, revived.name.as_deref(), NonZeroU64::new(allocation.size_bytes));
        }
        revived.uses.iter().for_each(|stream| self.note_use(allocation.handle, *stream));
    }

    /// Records the free of an allocation that was live.
    pub(super) fn note_free(&mut self, handle: Handle) {
        let Some(recording) = self.recording() else { return };
        // Zero-byte allocations of a pool that was destroyed before the recording began have no id in the recording.
        if let Some(id) = recording.ids.take(handle) {
            self.note(Op::Free { id });
        }
    }

    /// Records the use of an allocation by another stream.
    pub(super) fn note_use(&mut self, handle: Handle, stream: StreamId) {
        let Some(recording) = self.recording() else { return };
        if let Some(id) = recording.ids.find(handle).copied() {
            self.note(Op::RecordUse { id, stream });
        }
    }

    /// Records a new observer.
    pub(super) fn note_observer(&mut self, observer: ObserverId, pool: PoolId) {
        let Some(recording) = self.recording() else { return };
        let id = ObserverId(recording.observers.len() as u32);
        recording.observers.push(Some(observer));
        self.note(Op::Observe { observer: id, pool });
    }

    /// Records that an observer acknowledged everything so far.
    pub(super) fn note_acknowledgement(&mut self, observer: ObserverId) {
        if let Some(id) = self.recording().and_then(|recording| recording.observer(observer)) {
            self.note(Op::Acknowledge { observer: id });
        }
    }

    /// Records that an observer was removed.
    pub(super) fn note_forgotten(&mut self, observer: ObserverId) {
        let Some(recording) = self.recording() else { return };
        if let Some(id) = recording.observer(observer) {
            recording.observers[id.index()] = None;
            self.note(Op::Forget { observer: id });
        }
    }

    /// Ends the recording if the driver failed to release memory.
    pub(super) fn note_released(&mut self, released: &Released) {
        released.error.clone().into_iter().for_each(|error| self.end(RecordingEnd::Driver(error)));
    }

    /// Ends the recording early. The allocator continues.
    #[cold]
    pub(super) fn end(&mut self, end: RecordingEnd) {
        let Some(state) = self.state.as_deref_mut() else { return };
        let RecorderState::On(recording) = state else { return };
        let Recording { sink, records, .. } = &mut **recording;
        let (records, mut source) = (*records, end);
        // The records so far are complete, unless the sink failed.
        if !matches!(source, RecordingEnd::Sink(_) | RecordingEnd::Panicked)
            && let Err(error) = self.recorder.with_sink(|| sink.finish())
        {
            source = RecordingEnd::Sink(error);
        }
        let error = RecordingError::Ended { records, source };
        tracing::warn!(name: "recording.ended", target: "symmalloc", records, %error);
        let ended = std::mem::replace(state, RecorderState::Ended(error));
        self.recorder.with_sink(|| drop(ended));
        // The recording has ended, so reentrant calls of the sink no longer matter.
        self.recorder.take_reentered();
        self.recorder.end_recording();
    }

    /// Opens the gate to other threads while `during` runs.
    pub(super) fn pause<T>(&mut self, during: impl FnOnce() -> T) -> T {
        let was_closed = self.state.take().is_some();
        let result = during();
        if was_closed {
            self.state = Some(self.recorder.state.lock());
        }
        result
    }
}

impl<L: Lock> Drop for Gate<'_, L> {
    /// Ends the recording if the op panicked, because the op is recorded only in part.
    fn drop(&mut self) {
        if self.state.is_some() && !self.was_panicking && std::thread::panicking() {
            self.end(RecordingEnd::Panicked);
        }
    }
}
