//! Tracks the streams that use a device buffer, so that the buffer's contents and memory are safe across streams without explicit calls.
//!
//! Taking the pointer of a buffer on a stream other than the buffer's stream has two effects:
//! 1. The allocator records the use, so the next owner of the memory waits for the stream that used the buffer.
//! 2. While cudarc's event tracking is on (its default, see `CudaContext::disable_event_tracking`), a reader waits for the last writer's
//!    stream. A new writer waits for the last writer's stream and for all readers' streams, even if it has already waited for the last
//!    writer. `CudaSlice` orders uses in the same way, but records an event at each use. This module records an event only when the stream
//!    changes.
//!
//! All views of a buffer share one record of uses. If guards of several writable views are open at once, only the last one counts as the
//! writer. The program must therefore submit the work on each view before it takes the pointer of the next one.
//!
//! A kernel on the buffer's stream that takes the buffer itself as its argument is ordered like any other use.
//!
//! An unregistered stream has no id. cudarc records an event for its use when the pointer's guard is dropped, and the buffer's stream waits
//! for that event before the buffer is freed.
//!
//! # Forgotten guards
//! `std::mem::forget` is safe, so memory safety must not depend on a guard's `drop`. For registered streams it does not: the allocator
//! records an event on each of these streams at `free`. For unregistered streams, [`Uses::settle`] detects guards that may still be open: a
//! [`LentSlice`](super::lent::LentSlice) counts itself, and an event that was never recorded belongs to a guard that was never dropped. If
//! such a guard exists, the host synchronizes the context before the block is freed.
//!
//! # Captures
//! During a stream capture, a stream can wait only for streams of the same capture. Before the program launches the graph, it must make the
//! launching stream wait for earlier work on streams outside the capture. A stream for which nothing waited remains recorded, so uses after
//! the capture wait for it.

use crate::device::{CudaDevice, RestoreCurrent};
use crate::error::{CAPTURE_UNSUPPORTED, DriverError, DropError, INVALID_HANDLE};
use crate::pools::StreamAllocator;
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, SyncOnDrop};
use smallvec::SmallVec;
use std::iter;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use symmalloc_core::backend::{BackendError, Event};
use symmalloc_core::{Handle, StreamId};

/// The kind of access through a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessMode {
    Read,
    Write,
}

/// The uses of a buffer by several streams.
#[derive(Debug)]
pub(super) struct Uses {
    registered: Mutex<RegisteredUses>,
    /// Append-only, so that guards may borrow from it. Boxed, because it is large and rarely needed.
    foreign: OnceLock<Box<boxcar::Vec<ForeignUse>>>,
    /// Number of lent slices that have not been dropped.
    lends: AtomicU32,
    /// Contexts of the uses for which a forgotten guard would go unnoticed.
    unwatched: Mutex<SmallVec<[Arc<CudaContext>; 1]>>,
}

/// Maximum number of uses by unregistered streams that each get a separate event. Beyond it, a stream that already has an event records
/// this event again. This can hide a forgotten guard, so such a use counts as unwatched.
const WATCHED_USES_MAX: usize = 8;

/// Uses by registered streams since the last write.
#[derive(Debug)]
struct RegisteredUses {
    writer: StreamId,
    /// Earlier users for which the writer did not wait, because the two streams were not part of the same capture or a wait failed.
    skipped: SmallVec<[StreamId; 1]>,
    readers: SmallVec<[Reader; 2]>,
}

/// A stream that reads the writer's data.
#[derive(Clone, Copy, Debug)]
struct Reader {
    stream: StreamId,
    /// `true` if the stream waited for the writer and for the skipped users.
    is_ordered: bool,
}

impl RegisteredUses {
    fn new(writer: StreamId) -> Self {
        RegisteredUses { writer, skipped: SmallVec::new(), readers: SmallVec::new() }
    }

    /// Returns the streams whose writes a reader must see: the writer, and the users for which it did not wait.
    fn writers(&self) -> impl Iterator<Item = StreamId> {
        iter::once(self.writer).chain(self.skipped.iter().copied())
    }

    /// Returns all streams that use the buffer.
    fn users(&self) -> impl Iterator<Item = StreamId> {
        self.writers().chain(self.readers.iter().map(|reader| reader.stream))
    }
}

/// A use by an unregistered stream.
#[derive(Debug)]
struct ForeignUse {
    stream: usize,
    /// Always `Some`: cudarc's guard takes a reference to an `Option`.
    event: Option<CudaEvent>,
}

impl Uses {
    pub(super) fn new(owner: StreamId) -> Self {
        Self::with(RegisteredUses::new(owner))
    }

    fn with(registered: RegisteredUses) -> Self {
        let registered = Mutex::new(registered);
        Uses { registered, foreign: OnceLock::new(), lends: AtomicU32::new(0), unwatched: Mutex::default() }
    }

    /// Returns the initial record of uses for a part that is split off from the buffer, after the part's stream, `owner`, has waited for
    /// all uses of the buffer. Returns `None` if `owner` is the only user.
    pub(super) fn of_part(&self, owner: StreamId) -> Option<Self> {
        let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let skipped = registered.skipped.clone();
        (!skipped.is_empty()).then(|| Self::with(RegisteredUses { skipped, ..RegisteredUses::new(owner) }))
    }

    /// Counts a lent slice until [`end_lend`](Self::end_lend).
    pub(super) fn begin_lend(&self) {
        self.lends.fetch_add(1, Ordering::Relaxed);
    }

    /// Stops counting a lent slice. The caller has ordered the slice's stream after all uses of the slice.
    pub(super) fn end_lend(&self) {
        self.lends.fetch_sub(1, Ordering::Relaxed);
    }

    /// Makes the block's own stream wait for every use that the allocator does not track: freeing a block waits only for uses by registered
    /// streams. Blocks the host until the context's work is done if a guard may have been forgotten.
    pub(super) fn settle(&self, allocator: &StreamAllocator, own: &CudaStream) -> Result<(), BackendError> {
        let device = allocator.state().device();
        let mut contexts = self.unwatched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if self.has_open_guard(allocator) {
            contexts.push(Arc::clone(device.context()));
        }
        if !contexts.is_empty() {
            tracing::debug!(name: "guard.unwatched", target: "symmalloc", "waiting for the context before the memory is freed");
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
            // SAFETY: a live event of this driver, and a pointer that is valid for writing.
            let elapsed = unsafe { driver.event_elapsed(&raw mut milliseconds, event, event) };
            elapsed.is_err_and(|error| error.code == INVALID_HANDLE)
        };
        foreign.iter().filter_map(|(_, entry)| entry.event.as_ref()).any(is_open)
    }

    /// Records a use whose end cannot be detected.
    fn note_unwatched(&self, context: &Arc<CudaContext>) {
        let mut unwatched = self.unwatched.lock().unwrap_or_else(PoisonError::into_inner);
        if !unwatched.iter().any(|known| known.cu_ctx() == context.cu_ctx()) {
            unwatched.push(Arc::clone(context));
        }
    }

    /// Records a use by work that is submitted to the stream while the guard is alive.
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
            // Slow but safe fallback: the host waits before and after the use. If even that fails, the device is lost.
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

    /// Makes a registered stream wait for conflicting uses. Records the stream's use even if a wait fails. In that case, the users for
    /// which the stream did not wait remain recorded, because the caller's fallback, a wait on the host, may fail too.
    fn order_registered(
        &self,
        allocator: &StreamAllocator,
        stream: StreamId,
        access: AccessMode,
    ) -> Result<(), BackendError> {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        match access {
            AccessMode::Read => {
                let known = registered.readers.iter().position(|reader| reader.stream == stream);
                if registered.writers().all(|writer| writer == stream)
                    || known.is_some_and(|index| registered.readers[index].is_ordered)
                {
                    return Ok(());
                }
                let (skipped, waited) = wait_for_all(allocator, stream, registered.writers());
                let reader = Reader { stream, is_ordered: skipped.is_empty() };
                match known {
                    Some(index) => registered.readers[index] = reader,
                    None => registered.readers.push(reader),
                }
                waited
            }
            AccessMode::Write => {
                // The readers waited for the writer, but not for reads that the writer's stream has submitted since, so wait for that
                // stream too.
                let (skipped, waited) = wait_for_all(allocator, stream, registered.users());
                *registered = RegisteredUses { skipped, ..RegisteredUses::new(stream) };
                waited
            }
        }
    }

    /// Makes a stream wait for all uses by unregistered streams.
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
            // Events of this context cannot be recorded on a stream of another context, so the host waits before and after the use.
            streams.device().synchronize()?;
            self.note_unwatched(stream.context());
            return Ok(SyncOnDrop::sync_stream(stream));
        }
        if stream.context().is_event_tracking() {
            let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
            for user in registered.users() {
                let event = streams.record(user)?;
                let waited = streams.wait_raw(stream.cu_stream(), event);
                streams.recycle(event);
                waited?;
            }
        }
        // Also waits for the stream's own earlier uses, so that recording the stream's event again does not lose them.
        self.order_behind_foreign(allocator, stream)?;
        if !stream.context().is_managing_stream_synchronization() {
            // cudarc would not record the event, so the host waits.
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
        // The driver reports whether an event was ever recorded only for events with timing.
        let event = device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let event = event.map_err(|error| DriverError { call: "cuEventCreate", code: error.0 as i32 })?;
        let index = uses.push(ForeignUse { stream: raw, event: Some(event) });
        Ok(&uses[index].event)
    }
}

/// Blocks the host until all work of a context is done. Returns an error while a stream of the device is being captured; the capture stays
/// valid.
pub(super) fn wait_for_context(device: &CudaDevice, context: &Arc<CudaContext>) -> Result<(), DriverError> {
    if device.is_capturing() {
        return Err(DriverError { call: "cuCtxSynchronize", code: CAPTURE_UNSUPPORTED });
    }
    let driver = device.driver();
    let _restore = RestoreCurrent::of(driver)?;
    let _relaxed = driver.relax_capture();
    context.synchronize().map_err(|error| DriverError { call: "cuCtxSynchronize", code: error.0 as i32 })
}

/// Makes a stream wait for other streams, up to the first wait that fails. Returns the streams for which it did not wait, because an
/// earlier wait failed or because they belong to a different capture.
fn wait_for_all(
    allocator: &StreamAllocator,
    stream: StreamId,
    others: impl Iterator<Item = StreamId>,
) -> (SmallVec<[StreamId; 1]>, Result<(), BackendError>) {
    let (mut skipped, mut outcome) = (SmallVec::new(), Ok(()));
    for other in others.filter(|other| *other != stream) {
        if skipped.contains(&other) {
            continue;
        }
        let waited = if outcome.is_ok() { wait_for(allocator, stream, other) } else { Ok(false) };
        if !matches!(waited, Ok(true)) {
            skipped.push(other);
        }
        outcome = outcome.and(waited.map(drop));
    }
    (skipped, outcome)
}

/// Makes `stream` wait for `on`. Returns `false`, without a wait, if the two streams belong to different captures.
fn wait_for(allocator: &StreamAllocator, stream: StreamId, on: StreamId) -> Result<bool, BackendError> {
    let streams = allocator.state().streams();
    if streams.device().is_capturing() {
        let capture_of = |id| match streams.stream(id) {
            Some(stream) => streams.capture_of(stream.cu_stream()),
            None => Ok(None),
        };
        if capture_of(stream)? != capture_of(on)? {
            return Ok(false);
        }
    }
    allocator.state().wait(stream, on)?;
    Ok(true)
}
