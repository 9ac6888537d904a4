//! Which streams used a device buffer: what keeps its content and its memory safe across streams without a call by the user.
//!
//! When the pointer of a buffer is taken on another stream than its own, two things happen:
//! 1. The use is recorded with the allocator: the next owner of the memory waits for that stream.
//! 2. While cudarc's event tracking is on (its default, see `CudaContext::disable_event_tracking`), the stream is made to wait
//!    for the buffer's last writer, and a writer for all readers as well: what `CudaSlice` does, but with events that are
//!    recorded when a stream changes and not at each use.
//!
//! A kernel on the buffer's own stream that takes the buffer itself as its argument is ordered like any other use.
//!
//! An unregistered stream has no id. Its use is covered by an event that cudarc records when the pointer's guard is dropped, and
//! for which the buffer's own stream waits before the buffer is freed.
//!
//! # Forgotten guards
//! `std::mem::forget` is safe, so memory must not depend on a guard's `drop`. Uses by registered streams do not: the allocator
//! records an event on each of them at `free`. For the others, [`Uses::settle`] detects guards that may still be open: a
//! [`LentSlice`](super::lent::LentSlice) counts itself, and an event that was never recorded belongs to a guard that was never
//! dropped. If there is one, the host waits for the context before the block is freed.
//!
//! In a stream capture only streams of the same capture are ordered. The program orders what came before, before it launches
//! the graph.

use crate::device::{CudaDevice, RestoreCurrent};
use crate::error::{CAPTURE_UNSUPPORTED, DriverError, DropError, INVALID_HANDLE};
use crate::pools::StreamAllocator;
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, SyncOnDrop};
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use symmalloc_core::backend::{BackendError, Event};
use symmalloc_core::{Handle, StreamId};

/// How a pointer will be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessMode {
    Read,
    Write,
}

/// The uses of a buffer that several streams use.
#[derive(Debug)]
pub(super) struct Uses {
    registered: Mutex<RegisteredUses>,
    /// Grows only, so that guards may borrow from it. Boxed, because it is large and rarely there.
    foreign: OnceLock<Box<boxcar::Vec<ForeignUse>>>,
    /// Lent slices that were not dropped.
    lends: AtomicU32,
    /// Contexts of uses whose guards may have been forgotten without a trace.
    unwatched: Mutex<SmallVec<[Arc<CudaContext>; 1]>>,
}

/// Number of uses by unregistered streams that have an event each. A later use records an earlier event again, which hides a
/// forgotten guard, so it counts as unwatched.
const WATCHED_USES_MAX: usize = 8;

/// Uses by registered streams since the last write.
#[derive(Debug)]
struct RegisteredUses {
    writer: StreamId,
    /// Streams that read what the writer wrote, or are ordered behind it.
    readers: SmallVec<[StreamId; 2]>,
}

/// A use by a stream that is not registered.
#[derive(Debug)]
struct ForeignUse {
    stream: usize,
    /// Always `Some`: in the form that cudarc's guard takes.
    event: Option<CudaEvent>,
}

impl Uses {
    pub(super) fn new(owner: StreamId) -> Self {
        let registered = Mutex::new(RegisteredUses { writer: owner, readers: SmallVec::new() });
        Uses { registered, foreign: OnceLock::new(), lends: AtomicU32::new(0), unwatched: Mutex::default() }
    }

    /// Counts a lent slice until [`end_lend`](Self::end_lend).
    pub(super) fn begin_lend(&self) {
        self.lends.fetch_add(1, Ordering::Relaxed);
    }

    /// The stream of a lent slice is ordered behind all of its uses.
    pub(super) fn end_lend(&self) {
        self.lends.fetch_sub(1, Ordering::Relaxed);
    }

    /// Orders the block's own stream behind every use that freeing the block does not cover. Waits for the device if a guard may
    /// have been forgotten.
    pub(super) fn settle(&self, allocator: &StreamAllocator, own: &CudaStream) -> Result<(), BackendError> {
        let device = allocator.state().device();
        let mut contexts = self.unwatched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if self.has_open_guard(allocator) {
            contexts.push(Arc::clone(device.context()));
        }
        if !contexts.is_empty() {
            tracing::debug!(name: "guard.unwatched", target: "symmalloc", "waits for the context before the memory is freed");
        }
        contexts.iter().try_for_each(|context| wait_for_context(device, context))?;
        self.order_behind_foreign(allocator, own)
    }

    /// Returns `true` if a lent slice, or the guard of an event, was not dropped.
    fn has_open_guard(&self, allocator: &StreamAllocator) -> bool {
        if self.lends.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let Some(foreign) = self.foreign.get() else { return false };
        let driver = allocator.state().device().driver();
        let _relaxed = driver.relax_capture();
        let is_open = |event: &CudaEvent| {
            let (event, mut milliseconds) = (event.cu_event(), 0.0);
            // SAFETY: an event of this driver that is alive, and room for a number.
            let elapsed = unsafe { driver.event_elapsed(&raw mut milliseconds, event, event) };
            elapsed.is_err_and(|error| error.code == INVALID_HANDLE)
        };
        foreign.iter().filter_map(|(_, entry)| entry.event.as_ref()).any(is_open)
    }

    /// Notes a use whose end leaves no trace.
    fn note_unwatched(&self, context: &Arc<CudaContext>) {
        let mut unwatched = self.unwatched.lock().unwrap_or_else(PoisonError::into_inner);
        if !unwatched.iter().any(|known| known.cu_ctx() == context.cu_ctx()) {
            unwatched.push(Arc::clone(context));
        }
    }

    /// Notes a use by work that is submitted to the stream while the guard lives.
    #[cold]
    pub(super) fn begin<'a>(
        &'a self,
        allocator: &StreamAllocator,
        block: Handle,
        stream: &'a CudaStream,
        access: AccessMode,
    ) -> SyncOnDrop<'a> {
        let begun = match allocator.state().streams().find(stream) {
            Some(id) => self.begin_registered(allocator, block, stream, id, access),
            None => self.begin_foreign(allocator, stream),
        };
        begun.unwrap_or_else(|error| {
            allocator.state().note_drop_error(DropError::Order(error));
            // The host waits, before and after: slow and safe. What the driver refuses even then is a lost device.
            self.note_unwatched(stream.context());
            let _waited = allocator.state().device().synchronize();
            SyncOnDrop::sync_stream(stream)
        })
    }

    fn begin_registered<'a>(
        &self,
        allocator: &StreamAllocator,
        block: Handle,
        stream: &'a CudaStream,
        id: StreamId,
        access: AccessMode,
    ) -> Result<SyncOnDrop<'a>, BackendError> {
        if id != allocator.stream_id() {
            allocator.record_use(block, id);
        }
        if stream.context().is_event_tracking() {
            self.order_registered(allocator, id, access)?;
        }
        self.order_behind_foreign(allocator, stream)?;
        Ok(SyncOnDrop::Record(None))
    }

    /// Makes a registered stream wait for whom it must. The use is noted also when that fails: the host waits then.
    fn order_registered(
        &self,
        allocator: &StreamAllocator,
        stream: StreamId,
        access: AccessMode,
    ) -> Result<(), BackendError> {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let is_behind_writer = registered.writer == stream || registered.readers.contains(&stream);
        let mut behind: SmallVec<[StreamId; 3]> = SmallVec::new();
        if !is_behind_writer {
            behind.push(registered.writer);
        }
        match access {
            AccessMode::Read if !is_behind_writer => registered.readers.push(stream),
            AccessMode::Read => {}
            AccessMode::Write => {
                behind.extend(registered.readers.iter().copied().filter(|reader| *reader != stream));
                *registered = RegisteredUses { writer: stream, readers: SmallVec::new() };
            }
        }
        behind.into_iter().try_for_each(|on| order_behind(allocator, stream, on))
    }

    /// Makes a stream wait for all uses by streams that are not registered.
    pub(super) fn order_behind_foreign(
        &self,
        allocator: &StreamAllocator,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let Some(foreign) = self.foreign.get() else { return Ok(()) };
        for event in foreign.iter().filter_map(|(_, entry)| entry.event.as_ref()) {
            allocator.state().streams().wait_raw(stream.cu_stream(), Event(event.cu_event() as u64))?;
        }
        Ok(())
    }

    fn begin_foreign<'a>(
        &'a self,
        allocator: &StreamAllocator,
        stream: &'a CudaStream,
    ) -> Result<SyncOnDrop<'a>, BackendError> {
        let streams = allocator.state().streams();
        if stream.context().cu_ctx() != streams.device().context().cu_ctx() {
            // Events of this context cannot be recorded on a stream of another one: the host waits, before and after.
            streams.device().synchronize()?;
            self.note_unwatched(stream.context());
            return Ok(SyncOnDrop::sync_stream(stream));
        }
        if stream.context().is_event_tracking() {
            let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
            for &user in std::iter::once(&registered.writer).chain(&registered.readers) {
                let event = streams.record(user)?;
                let waited = streams.wait_raw(stream.cu_stream(), event);
                streams.recycle(event);
                waited?;
            }
        }
        // Also its own earlier uses: recording its event again must not lose them.
        self.order_behind_foreign(allocator, stream)?;
        if !stream.context().is_managing_stream_synchronization() {
            // cudarc would not record the event: the host waits.
            self.note_unwatched(stream.context());
            return Ok(SyncOnDrop::sync_stream(stream));
        }
        Ok(SyncOnDrop::record_event(self.foreign_event(allocator, stream)?, stream))
    }

    fn foreign_event(
        &self,
        allocator: &StreamAllocator,
        stream: &CudaStream,
    ) -> Result<&Option<CudaEvent>, BackendError> {
        let uses = self.foreign.get_or_init(Box::default);
        let raw = stream.cu_stream() as usize;
        if uses.count() >= WATCHED_USES_MAX
            && let Some((_, entry)) = uses.iter().find(|(_, entry)| entry.stream == raw)
        {
            self.note_unwatched(stream.context());
            return Ok(&entry.event);
        }
        let device = allocator.state().device();
        let _restore = RestoreCurrent::of(device.driver())?;
        // The driver answers whether an event was recorded only for events with times.
        let event = device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let event = event.map_err(|error| DriverError { call: "cuEventCreate", code: error.0 as i32 })?;
        let index = uses.push(ForeignUse { stream: raw, event: Some(event) });
        Ok(&uses[index].event)
    }
}

/// Waits for a context. While a stream of it is captured this is an error, and the capture stays valid.
pub(super) fn wait_for_context(device: &CudaDevice, context: &Arc<CudaContext>) -> Result<(), DriverError> {
    if device.is_capturing() {
        return Err(DriverError { call: "cuCtxSynchronize", code: CAPTURE_UNSUPPORTED });
    }
    let driver = device.driver();
    let _restore = RestoreCurrent::of(driver)?;
    let _relaxed = driver.relax_capture();
    context.synchronize().map_err(|error| DriverError { call: "cuCtxSynchronize", code: error.0 as i32 })
}

/// Orders `stream` behind `on`, unless a capture separates them.
fn order_behind(allocator: &StreamAllocator, stream: StreamId, on: StreamId) -> Result<(), BackendError> {
    let streams = allocator.state().streams();
    if streams.device().is_capturing() {
        let capture_of = |id| match streams.stream(id) {
            Some(stream) => streams.capture_of(stream.cu_stream()),
            None => Ok(None),
        };
        if capture_of(stream)? != capture_of(on)? {
            return Ok(());
        }
    }
    allocator.state().wait(stream, on)
}
