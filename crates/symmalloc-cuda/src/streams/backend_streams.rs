//! Streams and events of one backend, which order work. The other part of a backend is its memory.
//!
//! The host is also a stream, for memory that it reads and writes. It waits for an event by blocking until the work before the event is
//! done. Its own work is done when it is submitted.
//!
//! Calls on streams in captures follow the table in `captures.rs`.

use super::captures::{CaptureId, CapturedEvents, capture_of};
use super::event_pool::EventPool;
use super::lent::LentStream;
use crate::call_counters::{CallCounters, DeviceCall, DeviceCalls};
use crate::device::{CudaDevice, RestoreCurrent};
use crate::driver::STREAM_NON_BLOCKING;
use crate::error::{CAPTURE_UNSUPPORTED, DriverError, INVALID_HANDLE, NOT_READY};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUevent, CUstream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_core::backend::{BackendError, Event};
use symmalloc_core::ids::StreamId;

/// Polling interval for events while the host waits with a deadline: a query costs 1.2 us.
const POLL: Duration = Duration::from_micros(20);

/// The event of all work of the host, which is done when it is submitted. The driver has no event with this handle.
const HOST_EVENT: Event = Event(0);

/// Streams and events of one backend.
#[doc(hidden)]
pub struct BackendStreams {
    device: Arc<CudaDevice>,
    /// Indexed by [`StreamId`]. Streams stay alive, so the driver cannot reuse their handles for other streams.
    registered: boxcar::Vec<RegisteredStream>,
    events: EventPool,
    captured: CapturedEvents,
    calls: CallCounters,
    /// The handle of a stream that waits for the remaining work of returned streams. Created when the first stream is returned.
    returned: Mutex<Option<usize>>,
}

/// The stream behind a [`StreamId`].
enum RegisteredStream {
    Host,
    Device(Arc<CudaStream>),
    /// Locked during driver calls, so that its owner cannot destroy the stream during the call.
    Lent(Mutex<LentStream>),
}

impl BackendStreams {
    pub(crate) fn new(device: Arc<CudaDevice>) -> Self {
        BackendStreams {
            events: EventPool::new(Arc::clone(&device)),
            device,
            registered: boxcar::Vec::new(),
            captured: CapturedEvents::default(),
            calls: CallCounters::default(),
            returned: Mutex::default(),
        }
    }

    #[inline]
    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Counts a call, and times it if metrics are enabled.
    pub(crate) fn watch<T>(&self, call: DeviceCall, work: impl FnOnce() -> T) -> T {
        self.calls.watch(call, self.device.ordinal(), work)
    }

    pub(crate) fn device_calls(&self) -> DeviceCalls {
        self.calls.read()
    }

    /// Appends the host as a stream, see [`add_stream`](Self::add_stream).
    pub(crate) fn add_host(&self) -> usize {
        self.registered.push(RegisteredStream::Host)
    }

    /// Appends a stream and returns its index. The caller ensures that indices equal the ids of the core's allocator.
    pub(crate) fn add_stream(&self, stream: Arc<CudaStream>) -> usize {
        self.registered.push(RegisteredStream::Device(stream))
    }

    /// Returns the id of a registered stream.
    #[inline]
    pub(crate) fn find(&self, stream: &CudaStream) -> Option<StreamId> {
        self.iter().find(|(_, known)| is_same(known, stream)).map(|(id, _)| id)
    }

    /// Returns the device stream of an id, unless it is lent.
    #[inline]
    pub(crate) fn stream(&self, stream: StreamId) -> Option<&Arc<CudaStream>> {
        match self.registered.get(stream.index()) {
            Some(RegisteredStream::Device(stream)) => Some(stream),
            Some(RegisteredStream::Host | RegisteredStream::Lent(_)) | None => None,
        }
    }

    /// Returns the registered device streams, except lent streams.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamId, &Arc<CudaStream>)> {
        self.registered.iter().filter_map(|(index, registered)| match registered {
            RegisteredStream::Device(stream) => Some((StreamId(index as u16), stream)),
            RegisteredStream::Host | RegisteredStream::Lent(_) => None,
        })
    }

    /// Appends a lent stream, see [`add_stream`](Self::add_stream).
    pub(crate) fn add_lent(&self, stream: LentStream) -> usize {
        self.registered.push(RegisteredStream::Lent(Mutex::new(stream)))
    }

    /// Returns a lent stream before its owner destroys it. From now on the id stands for the stream's remaining work.
    pub(crate) fn return_lent(&self, stream: StreamId) -> Result<(), DriverError> {
        let returned = self.returned()?;
        let mut lent = self.lent(stream)?.lock().unwrap_or_else(PoisonError::into_inner);
        self.follow(returned, lent.raw())?;
        *lent = LentStream::of(returned);
        Ok(())
    }

    /// Assigns the id to another stream, whose later work waits for the remaining work of the id's earlier streams.
    pub(crate) fn relend(&self, stream: StreamId, next: LentStream) -> Result<(), DriverError> {
        let mut lent = self.lent(stream)?.lock().unwrap_or_else(PoisonError::into_inner);
        self.follow(next.raw(), lent.raw())?;
        *lent = next;
        Ok(())
    }

    fn lent(&self, stream: StreamId) -> Result<&Mutex<LentStream>, DriverError> {
        let call = "cuStreamWaitEvent";
        match self.get(stream, call)? {
            RegisteredStream::Lent(lent) => Ok(lent),
            RegisteredStream::Host | RegisteredStream::Device(_) => Err(DriverError { call, code: INVALID_HANDLE }),
        }
    }

    /// Makes later work on `stream` wait for all work submitted to `on` so far.
    fn follow(&self, stream: CUstream, on: CUstream) -> Result<(), DriverError> {
        let event = self.record_raw(on)?;
        let waited = self.wait_raw(stream, event);
        self.recycle(event);
        waited
    }

    fn returned(&self) -> Result<CUstream, DriverError> {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = *returned {
            return Ok(std::ptr::without_provenance_mut(stream));
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: `stream` is valid for writing. cudarc's function is not used, because it waits for the context.
        unsafe { self.device.driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING) }?;
        *returned = Some(stream as usize);
        Ok(stream)
    }

    #[inline]
    fn get(&self, stream: StreamId, call: &'static str) -> Result<&RegisteredStream, DriverError> {
        self.registered.get(stream.index()).ok_or(DriverError { call, code: INVALID_HANDLE })
    }

    /// Returns the capture that a live stream is part of, if a capture is in progress.
    #[inline]
    pub(crate) fn capture_of(&self, stream: CUstream) -> Result<Option<CaptureId>, DriverError> {
        if !self.device.is_capturing() {
            return Ok(None);
        }
        // SAFETY: registered streams are kept alive here, and other streams by the caller.
        unsafe { capture_of(self.device.driver(), stream) }
    }

    /// Records an event on a stream after the work submitted so far.
    pub(crate) fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        let event = match self.get(stream, "cuEventRecord")? {
            RegisteredStream::Device(stream) => self.record_raw(stream.cu_stream()),
            RegisteredStream::Lent(stream) => {
                self.record_raw(stream.lock().unwrap_or_else(PoisonError::into_inner).raw())
            }
            RegisteredStream::Host => Ok(HOST_EVENT),
        };
        Ok(event?)
    }

    /// Like [`record`](Self::record), for a stream that is alive but not necessarily registered.
    pub(crate) fn record_raw(&self, stream: CUstream) -> Result<Event, DriverError> {
        let event = self.events.take()?;
        self.calls.count(DeviceCall::Record);
        let recorded = self.capture_of(stream).and_then(|capture| {
            let raw = event.0 as CUevent;
            // SAFETY: the event belongs to this pool and the stream is alive; both have the same context.
            self.device.call_about(stream, || unsafe { self.device.driver().event_record(raw, stream) })?;
            Ok(capture)
        });
        match recorded {
            Ok(None) => Ok(event),
            Ok(Some(capture)) => {
                self.captured.insert(event, capture);
                Ok(event)
            }
            Err(error) => {
                self.events.put_back(event);
                Err(error)
            }
        }
    }

    /// Passes the handle of a device stream to `submit`. A lent stream is locked during the call.
    pub(super) fn with_raw<T>(
        &self,
        stream: StreamId,
        call: &'static str,
        submit: impl FnOnce(CUstream) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        match self.get(stream, call)? {
            RegisteredStream::Device(stream) => submit(stream.cu_stream()),
            RegisteredStream::Lent(stream) => submit(stream.lock().unwrap_or_else(PoisonError::into_inner).raw()),
            RegisteredStream::Host => Err(DriverError { call, code: INVALID_HANDLE }),
        }
    }

    /// Returns `true` if a stream is part of a capture, begun by this crate or by other code. Also if the driver cannot tell: no work must
    /// then be submitted. The host is never captured.
    pub(crate) fn is_captured(&self, stream: StreamId) -> bool {
        let call = "cuStreamGetCaptureInfo_v2";
        if let Ok(RegisteredStream::Host) = self.get(stream, call) {
            return false;
        }
        let captured = self.with_raw(stream, call, |raw| {
            let _current = self.device.enter()?;
            // SAFETY: registered streams are kept alive, and a lent one is locked during the call.
            unsafe { capture_of(self.device.driver(), raw) }
        });
        !matches!(captured, Ok(None))
    }

    /// Returns `true` if an event was recorded in a capture: it never completes.
    pub(super) fn is_of_capture(&self, event: Event) -> bool {
        self.captured.capture_of(event).is_some()
    }

    /// Blocks the host until the work before an event is done.
    pub(super) fn wait_for(&self, event: Event) -> Result<(), DriverError> {
        self.watch(DeviceCall::Synchronize, || self.wait_on_host(event))
    }

    /// Returns `true` if the id is the host.
    pub(super) fn is_host(&self, stream: StreamId) -> bool {
        matches!(self.registered.get(stream.index()), Some(RegisteredStream::Host))
    }

    /// Makes later work on the stream wait for the event on the device.
    pub(crate) fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        let waited = match self.get(stream, "cuStreamWaitEvent")? {
            RegisteredStream::Device(stream) => self.wait_raw(stream.cu_stream(), event),
            RegisteredStream::Lent(stream) => {
                self.wait_raw(stream.lock().unwrap_or_else(PoisonError::into_inner).raw(), event)
            }
            RegisteredStream::Host => self.wait_on_host(event),
        };
        Ok(waited?)
    }

    /// Like [`wait`](Self::wait), for a stream that is alive but not necessarily registered.
    pub(crate) fn wait_raw(&self, stream: CUstream, event: Event) -> Result<(), DriverError> {
        if event == HOST_EVENT {
            return Ok(());
        }
        if self.device.is_capturing() || !self.captured.is_empty() {
            match (self.captured.capture_of(event), self.capture_of(stream)?) {
                (None, None) => {}
                (Some(recorded), Some(waiting)) if recorded == waiting => {}
                (Some(_), _) => return Ok(()),
                (None, Some(_)) => return self.wait_on_host(event),
            }
        }
        self.wait_on_device(stream, event)
    }

    fn wait_on_device(&self, stream: CUstream, event: Event) -> Result<(), DriverError> {
        self.calls.count(DeviceCall::Wait);
        // SAFETY: the event belongs to this pool and the stream is alive.
        self.device.call_about(stream, || unsafe { self.device.driver().stream_wait(stream, event.0 as CUevent, 0) })
    }

    fn wait_on_host(&self, event: Event) -> Result<(), DriverError> {
        if event == HOST_EVENT || self.captured.capture_of(event).is_some() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        // SAFETY: the event belongs to this pool.
        unsafe { self.device.driver().event_synchronize(event.0 as CUevent) }
    }

    /// Makes later work on `stream` wait for all work submitted to `on` so far, at the program's request. Unlike a fence, this may make a
    /// stream join a capture.
    pub(crate) fn order_behind(&self, stream: StreamId, on: StreamId) -> Result<(), BackendError> {
        let unknown = DriverError { call: "cuStreamWaitEvent", code: INVALID_HANDLE };
        let raw = self.stream(stream).ok_or(unknown)?.cu_stream();
        let event = self.record(on)?;
        let is_captured = self.captured.capture_of(event).is_some();
        let waited = if is_captured { self.wait_on_device(raw, event) } else { self.wait_raw(raw, event) };
        self.recycle(event);
        Ok(waited?)
    }

    /// Returns `true` if the work before the event is done. Captured work is never done, because it does not run when it is captured.
    pub(crate) fn query(&self, event: Event) -> Result<bool, BackendError> {
        if event == HOST_EVENT {
            return Ok(true);
        }
        if self.captured.capture_of(event).is_some() {
            return Ok(false);
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        self.calls.count(DeviceCall::Query);
        // SAFETY: the event belongs to this pool.
        match unsafe { self.device.driver().event_query(event.0 as CUevent) } {
            Ok(()) => Ok(true),
            Err(DriverError { code: NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns an event to the pool.
    #[inline]
    pub(crate) fn recycle(&self, event: Event) {
        if event == HOST_EVENT {
            return;
        }
        self.captured.remove(event);
        self.events.put_back(event);
    }

    /// Blocks the host until all work submitted to the stream so far is done.
    pub(crate) fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        let call = "cuStreamSynchronize";
        match self.get(stream, call)? {
            RegisteredStream::Host => Ok(()),
            RegisteredStream::Device(stream) => self.synchronize_raw(stream.cu_stream()),
            // The host waits for an event, so that the stream is not locked during the wait.
            RegisteredStream::Lent(stream) => {
                let event = self.record_raw(stream.lock().unwrap_or_else(PoisonError::into_inner).raw())?;
                let waited = self.watch(DeviceCall::Synchronize, || self.wait_on_host(event));
                self.recycle(event);
                Ok(waited?)
            }
        }
    }

    fn synchronize_raw(&self, raw: CUstream) -> Result<(), BackendError> {
        let call = "cuStreamSynchronize";
        if self.capture_of(raw)?.is_some() {
            // The driver call would fail too, and invalidate the capture.
            return Err(DriverError { call, code: CAPTURE_UNSUPPORTED }.into());
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let wait = || {
            // SAFETY: registered streams are kept alive.
            unsafe { self.device.driver().stream_synchronize(raw) }
        };
        Ok(self.watch(DeviceCall::Synchronize, wait)?)
    }

    /// Blocks the host until the work submitted to every stream so far is done or the deadline passes. Returns `true` if it is done.
    pub(crate) fn synchronize_all(&self, deadline: Instant) -> Result<bool, BackendError> {
        let mut events = Vec::new();
        let recorded = self.iter().try_for_each(|(_, stream)| {
            events.push(self.record_raw(stream.cu_stream())?);
            Ok::<_, DriverError>(())
        });
        let done = recorded.map_err(BackendError::from).and_then(|()| self.wait_for_all(&events, deadline));
        events.into_iter().for_each(|event| self.recycle(event));
        done
    }

    fn wait_for_all(&self, events: &[Event], deadline: Instant) -> Result<bool, BackendError> {
        for event in events {
            while !self.query(*event)? {
                if Instant::now() >= deadline {
                    return Ok(false);
                }
                thread::sleep(POLL);
            }
        }
        Ok(true)
    }

    /// Returns `true` if a registered stream is part of a capture, begun by this crate or by other code.
    pub(crate) fn is_capturing(&self) -> Result<bool, DriverError> {
        if self.device.is_capturing() {
            return Ok(true);
        }
        let _current = self.device.enter()?;
        for (_, stream) in self.iter() {
            // SAFETY: registered streams are kept alive.
            if unsafe { capture_of(self.device.driver(), stream.cu_stream()) }?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns `true` if both values refer to the same stream. The default streams of all contexts have the same handle.
#[inline]
pub(crate) fn is_same(one: &CudaStream, other: &CudaStream) -> bool {
    one.cu_stream() == other.cu_stream() && one.context().cu_ctx() == other.context().cu_ctx()
}

impl Drop for BackendStreams {
    fn drop(&mut self) {
        // Dropping streams would leave their context current.
        let _restore = RestoreCurrent::of(self.device.driver());
        self.registered = boxcar::Vec::new();
        if let Some(stream) = self.returned.get_mut().unwrap_or_else(PoisonError::into_inner).take()
            && let Ok(_current) = self.device.enter()
        {
            // SAFETY: created by `returned`, and not used anymore. If the context is lost, the call fails, and the stream is destroyed
            // with it.
            let _refused = unsafe { self.device.driver().stream_destroy(std::ptr::without_provenance_mut(stream)) };
        }
    }
}
