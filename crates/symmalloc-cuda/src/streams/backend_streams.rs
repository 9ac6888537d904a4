//! Streams and events of one backend: what orders work. The other half of a backend is its memory.
//!
//! The host is a stream as well, for memory that it reads and writes: it waits for an event by blocking until the work
//! before the event is done, and its own work is done when it is submitted.
//!
//! Calls about streams in captures follow the table in `captures.rs`.

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

/// How often an event is asked while the host waits with a deadline: a question costs 1.2 us.
const POLL: Duration = Duration::from_micros(20);

/// Streams and events of one backend.
#[doc(hidden)]
pub struct BackendStreams {
    device: Arc<CudaDevice>,
    /// By [`StreamId`]. Kept alive, so that the driver gives none of their handles to another stream.
    registered: boxcar::Vec<RegisteredStream>,
    events: EventPool,
    captured: CapturedEvents,
    calls: CallCounters,
    /// The handle of a stream that waits for the work of lent streams that are gone. Made when the first one goes.
    returned: Mutex<Option<usize>>,
}

/// What a [`StreamId`] stands for.
enum RegisteredStream {
    Host,
    Device(Arc<CudaStream>),
    /// Locked while the driver is called about it, so that its owner cannot destroy it meanwhile.
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

    /// Counts a call, and measures it where metrics are wanted.
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

    /// Appends a stream; returns its index. The caller makes sure that indices are the ids that the allocator gives.
    pub(crate) fn add_stream(&self, stream: Arc<CudaStream>) -> usize {
        self.registered.push(RegisteredStream::Device(stream))
    }

    /// The id of a registered stream.
    #[inline]
    pub(crate) fn find(&self, stream: &CudaStream) -> Option<StreamId> {
        self.iter().find(|(_, known)| is_same(known, stream)).map(|(id, _)| id)
    }

    /// A registered stream of the device.
    #[inline]
    pub(crate) fn stream(&self, stream: StreamId) -> Option<&Arc<CudaStream>> {
        match self.registered.get(stream.index()) {
            Some(RegisteredStream::Device(stream)) => Some(stream),
            Some(RegisteredStream::Host | RegisteredStream::Lent(_)) | None => None,
        }
    }

    /// The registered streams of the device, without those that are lent.
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

    /// The owner is about to destroy the stream: from now on the id stands for what is left of its work.
    pub(crate) fn return_lent(&self, stream: StreamId) -> Result<(), DriverError> {
        let returned = self.returned()?;
        let mut lent = self.lent(stream)?.lock().unwrap_or_else(PoisonError::into_inner);
        self.follow(returned, lent.raw())?;
        *lent = LentStream::of(returned);
        Ok(())
    }

    /// Gives the id to another stream, whose later work waits for what is left of the work of those before.
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

    /// Makes later work on `stream` wait for the work of `on` so far.
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
        // SAFETY: valid for writing. cudarc's own call waits for the context.
        unsafe { self.device.driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING) }?;
        *returned = Some(stream as usize);
        Ok(stream)
    }

    #[inline]
    fn get(&self, stream: StreamId, call: &'static str) -> Result<&RegisteredStream, DriverError> {
        self.registered.get(stream.index()).ok_or(DriverError { call, code: INVALID_HANDLE })
    }

    /// The capture that a living stream is part of, if any capture is under way.
    #[inline]
    pub(crate) fn capture_of(&self, stream: CUstream) -> Result<Option<CaptureId>, DriverError> {
        if !self.device.is_capturing() {
            return Ok(None);
        }
        // SAFETY: registered streams are kept alive, and others by the caller.
        unsafe { capture_of(self.device.driver(), stream) }
    }

    /// Records an event on a stream after its work so far.
    pub(crate) fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        let event = match self.get(stream, "cuEventRecord")? {
            RegisteredStream::Device(stream) => self.record_raw(stream.cu_stream()),
            RegisteredStream::Lent(stream) => {
                self.record_raw(stream.lock().unwrap_or_else(PoisonError::into_inner).raw())
            }
            // An event that was never recorded is done.
            RegisteredStream::Host => self.events.create(),
        };
        Ok(event?)
    }

    /// As [`record`](Self::record), on a stream that is alive but may not be registered.
    pub(crate) fn record_raw(&self, stream: CUstream) -> Result<Event, DriverError> {
        let event = self.events.take()?;
        self.calls.count(DeviceCall::Record);
        let recorded = self.capture_of(stream).and_then(|capture| {
            let raw = event.0 as CUevent;
            // SAFETY: the event is this pool's and the stream is alive, both of one context.
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

    /// As [`wait`](Self::wait), on a stream that is alive but may not be registered.
    pub(crate) fn wait_raw(&self, stream: CUstream, event: Event) -> Result<(), DriverError> {
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
        // SAFETY: the event is this pool's and the stream is alive.
        self.device.call_about(stream, || unsafe { self.device.driver().stream_wait(stream, event.0 as CUevent, 0) })
    }

    fn wait_on_host(&self, event: Event) -> Result<(), DriverError> {
        if self.captured.capture_of(event).is_some() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        // SAFETY: the event is this pool's.
        unsafe { self.device.driver().event_synchronize(event.0 as CUevent) }
    }

    /// Makes later work on `stream` wait for all work of `on` so far, because the program wants it. Unlike a fence, this
    /// may make a stream part of a capture.
    pub(crate) fn order_behind(&self, stream: StreamId, on: StreamId) -> Result<(), BackendError> {
        let unknown = DriverError { call: "cuStreamWaitEvent", code: INVALID_HANDLE };
        let raw = self.stream(stream).ok_or(unknown)?.cu_stream();
        let event = self.record(on)?;
        let is_captured = self.captured.capture_of(event).is_some();
        let waited = if is_captured { self.wait_on_device(raw, event) } else { self.wait_raw(raw, event) };
        self.recycle(event);
        Ok(waited?)
    }

    /// Whether the work before the event is done. Captured work never is: it has no moment.
    pub(crate) fn query(&self, event: Event) -> Result<bool, BackendError> {
        if self.captured.capture_of(event).is_some() {
            return Ok(false);
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        self.calls.count(DeviceCall::Query);
        // SAFETY: the event is this pool's.
        match unsafe { self.device.driver().event_query(event.0 as CUevent) } {
            Ok(()) => Ok(true),
            Err(DriverError { code: NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes an event back.
    #[inline]
    pub(crate) fn recycle(&self, event: Event) {
        self.captured.remove(event);
        self.events.put_back(event);
    }

    /// Blocks the host until the stream's work so far is done.
    pub(crate) fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        let call = "cuStreamSynchronize";
        match self.get(stream, call)? {
            RegisteredStream::Host => Ok(()),
            RegisteredStream::Device(stream) => self.synchronize_raw(stream.cu_stream()),
            // The host waits for an event, so that the stream is not locked meanwhile.
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
            // The driver would refuse as well, and end the capture.
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

    /// Blocks the host until the work given to every stream so far is done, but not beyond the deadline. Whether it is done.
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

    /// Whether a registered stream is part of a capture, of this crate or of other code.
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

/// Whether two names are of one stream. The default streams of all contexts have one handle.
#[inline]
pub(crate) fn is_same(one: &CudaStream, other: &CudaStream) -> bool {
    one.cu_stream() == other.cu_stream() && one.context().cu_ctx() == other.context().cu_ctx()
}

impl Drop for BackendStreams {
    fn drop(&mut self) {
        // Streams that are dropped here would leave their context current.
        let _restore = RestoreCurrent::of(self.device.driver());
        self.registered = boxcar::Vec::new();
        if let Some(stream) = self.returned.get_mut().unwrap_or_else(PoisonError::into_inner).take()
            && let Ok(_current) = self.device.enter()
        {
            // SAFETY: made by `returned`, and not used any more. A context that is lost refuses, and takes it along.
            let _refused = unsafe { self.device.driver().stream_destroy(std::ptr::without_provenance_mut(stream)) };
        }
    }
}
