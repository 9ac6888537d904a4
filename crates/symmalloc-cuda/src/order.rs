//! What orders work on streams: the registered streams, and a pool of events. Half of every backend of this crate.
//!
//! The host is a stream as well, for memory that it reads and writes: it waits for an event by blocking until the work
//! before the event is done, and its own work is done when it is submitted.
//!
//! Events come from a pool and go back to it: making one costs a driver call, recording one costs 109 ns. Timing is off.
//! Recording an event again does not disturb streams that were told to wait for what it stood for before. Frees in a row share
//! one; `rows.rs` has the pool, too.
//!
//! During a stream capture an event records a place in the graph and not a moment of the device. Such an event means
//! something in its own capture only:
//!
//! | recorded in | waited for in | what happens |
//! |---|---|---|
//! | no capture | no capture | `cuStreamWaitEvent` |
//! | a capture | the same capture | `cuStreamWaitEvent`: an edge of the graph |
//! | a capture | anything else | nothing: captured work runs when the graph is launched, which the program orders |
//! | no capture | a capture | the host waits: the graph runs later, and then that work is over |

use crate::calls::{Call, CallCounters};
use crate::capture::{CaptureId, capture_of};
use crate::device::{CudaDevice, RestoreCurrent};
use crate::driver::EVENT_DISABLE_TIMING;
use crate::error::{CAPTURE_UNSUPPORTED, DriverError, INVALID_HANDLE, NOT_READY};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUevent, CUstream};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_core::backend::{BackendError, Event};
use symmalloc_core::ids::StreamId;

/// How often an event is asked while the host waits with a deadline: a question costs 1.2 us.
const POLL: Duration = Duration::from_micros(20);

/// Streams and events of one backend.
#[doc(hidden)]
pub struct Order {
    pub(crate) device: Arc<CudaDevice>,
    /// By [`StreamId`]. Kept alive, so that the driver gives none of their handles to another stream.
    streams: boxcar::Vec<Lane>,
    captured: Mutex<BTreeMap<u64, CaptureId>>,
    /// Size of `captured`, readable without its lock.
    captured_count: AtomicUsize,
    pub(crate) calls: CallCounters,
    /// Under which the device's books have its events.
    pub(crate) number: usize,
}

/// What a [`StreamId`] stands for.
enum Lane {
    Host,
    Device(Arc<CudaStream>),
}

/// An event that nobody uses.
#[derive(Debug)]
pub(crate) struct SpareEvent(pub(crate) CUevent);

// SAFETY: the driver lets any thread use any event.
unsafe impl Send for SpareEvent {}

impl Order {
    pub(crate) fn new(device: Arc<CudaDevice>) -> Self {
        Order {
            number: Self::enter_books(&device),
            device,
            streams: boxcar::Vec::new(),
            captured: Mutex::default(),
            captured_count: AtomicUsize::new(0),
            calls: CallCounters::default(),
        }
    }

    /// Appends the host as a stream, see [`add_stream`](Self::add_stream).
    pub(crate) fn add_host(&self) -> usize {
        self.streams.push(Lane::Host)
    }

    /// Appends a stream; returns its index. The caller sees to it that indices are the ids that the allocator gives.
    pub(crate) fn add_stream(&self, stream: Arc<CudaStream>) -> usize {
        self.streams.push(Lane::Device(stream))
    }

    /// The id of a registered stream.
    #[inline]
    pub(crate) fn find(&self, stream: &CudaStream) -> Option<StreamId> {
        self.streams().find(|(_, known)| is_same(known, stream)).map(|(id, _)| id)
    }

    /// A registered stream of the device.
    #[inline]
    pub(crate) fn stream(&self, stream: StreamId) -> Option<&Arc<CudaStream>> {
        match self.streams.get(stream.index()) {
            Some(Lane::Device(stream)) => Some(stream),
            Some(Lane::Host) | None => None,
        }
    }

    /// The registered streams of the device.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (StreamId, &Arc<CudaStream>)> {
        self.streams.iter().filter_map(|(index, lane)| match lane {
            Lane::Device(stream) => Some((StreamId(index as u16), stream)),
            Lane::Host => None,
        })
    }

    #[inline]
    fn lane(&self, stream: StreamId, call: &'static str) -> Result<&Lane, DriverError> {
        self.streams.get(stream.index()).ok_or(DriverError { call, code: INVALID_HANDLE })
    }

    fn raw(&self, stream: StreamId, call: &'static str) -> Result<CUstream, DriverError> {
        let stream = self.stream(stream).ok_or(DriverError { call, code: INVALID_HANDLE })?;
        Ok(stream.cu_stream())
    }

    /// The capture that a registered stream is part of.
    pub(crate) fn capture_of(&self, stream: CUstream) -> Result<Option<CaptureId>, DriverError> {
        // SAFETY: registered streams are kept alive.
        unsafe { self.device.captures.of(self.device.driver, stream) }
    }

    /// Records an event on a stream after its work so far.
    pub(crate) fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        let event = match self.lane(stream, "cuEventRecord")? {
            Lane::Device(stream) => self.record_raw(stream.cu_stream()),
            // An event that was never recorded is done.
            Lane::Host => self.new_event().map(|event| Event(event.0 as u64)),
        };
        Ok(event?)
    }

    /// As [`record`](Self::record), on a stream that is alive but may not be registered.
    pub(crate) fn record_raw(&self, stream: CUstream) -> Result<Event, DriverError> {
        let event = self.take_event()?;
        let capture = self.capture_of(stream);
        match capture.and_then(|capture| self.record_now(stream, &event).map(|()| capture)) {
            Ok(capture) => {
                let event = Event(event.0 as u64);
                if let Some(capture) = capture {
                    self.captured().insert(event.0, capture);
                    self.captured_count.fetch_add(1, Ordering::Release);
                }
                Ok(event)
            }
            Err(error) => {
                self.keep(event);
                Err(error)
            }
        }
    }

    /// Records an event of this pool on a stream that is alive.
    #[inline]
    pub(crate) fn record_now(&self, stream: CUstream, event: &SpareEvent) -> Result<(), DriverError> {
        // SAFETY: the event is this pool's and the stream is alive, both of one context.
        self.device.call_about(stream, || unsafe { self.device.driver.event_record(event.0, stream) })
    }

    /// Makes later work on the stream wait for the event on the device.
    pub(crate) fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        let waited = match self.lane(stream, "cuStreamWaitEvent")? {
            Lane::Device(stream) => self.wait_raw(stream.cu_stream(), event),
            Lane::Host => self.settled(event).and_then(|event| self.wait_on_host(event)),
        };
        Ok(waited?)
    }

    /// See [`Backend::wait_last`](symmalloc_core::backend::Backend::wait_last).
    pub(crate) fn wait_last(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        match self.stream(stream) {
            Some(stream) if self.is_free_of_captures() => {
                let stream = stream.cu_stream();
                self.wait_settled(stream, self.settled_for_wait(event)?)?;
                self.put_back(event);
            }
            _ => {
                self.wait(stream, event)?;
                self.recycle(event);
            }
        }
        Ok(())
    }

    /// As [`wait`](Self::wait), on a stream that is alive but may not be registered.
    pub(crate) fn wait_raw(&self, stream: CUstream, event: Event) -> Result<(), DriverError> {
        if self.is_free_of_captures() {
            return self.wait_settled(stream, self.settled_for_wait(event)?);
        }
        self.wait_beside_captures(stream, event)
    }

    /// As [`wait_raw`](Self::wait_raw), where the stream may be part of a capture, or the event.
    #[cold]
    fn wait_beside_captures(&self, stream: CUstream, event: Event) -> Result<(), DriverError> {
        let event = self.settled(event)?;
        match (self.capture_at(event), self.capture_of(stream)?) {
            (None, None) => {}
            (Some(recorded), Some(waiting)) if recorded == waiting => {}
            (Some(_), _) => return Ok(()),
            (None, Some(_)) => return self.wait_on_host(event),
        }
        self.wait_now(stream, event)
    }

    fn wait_now(&self, stream: CUstream, event: Event) -> Result<(), DriverError> {
        self.wait_settled(stream, self.settled_for_wait(event)?)
    }

    #[inline(always)]
    fn wait_settled(&self, stream: CUstream, event: Event) -> Result<(), DriverError> {
        // SAFETY: the event is this pool's and the stream is alive.
        self.device.call_about(stream, || unsafe { self.device.driver.stream_wait(stream, event.0 as CUevent, 0) })
    }

    /// Makes later work on `stream` wait for all work of `on` so far, because the program wants it. Unlike a fence, this
    /// may make a stream part of a capture.
    pub(crate) fn order_behind(&self, stream: StreamId, on: StreamId) -> Result<(), BackendError> {
        let raw = self.raw(stream, "cuStreamWaitEvent")?;
        let event = self.record(on)?;
        let waited =
            if self.capture_at(event).is_some() { self.wait_now(raw, event) } else { self.wait_raw(raw, event) };
        self.recycle(event);
        Ok(waited?)
    }

    fn wait_on_host(&self, event: Event) -> Result<(), DriverError> {
        if self.capture_at(event).is_some() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        // SAFETY: the event is this pool's.
        unsafe { self.device.driver.event_synchronize(event.0 as CUevent) }
    }

    /// Whether the work before the event is done. Captured work never is: it has no moment.
    pub(crate) fn query(&self, event: Event) -> Result<bool, BackendError> {
        let event = self.settled(event)?;
        if self.capture_at(event).is_some() {
            return Ok(false);
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        self.calls.count(Call::Query);
        // SAFETY: the event is this pool's.
        match unsafe { self.device.driver.event_query(event.0 as CUevent) } {
            Ok(()) => Ok(true),
            Err(DriverError { code: NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes an event back.
    pub(crate) fn recycle(&self, event: Event) {
        if self.has_captured() && self.captured().remove(&event.0).is_some() {
            self.captured_count.fetch_sub(1, Ordering::Release);
        }
        self.put_back(event);
    }

    /// Blocks the host until the stream's work so far is done.
    pub(crate) fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        let Lane::Device(stream) = self.lane(stream, "cuStreamSynchronize")? else { return Ok(()) };
        let raw = stream.cu_stream();
        if self.capture_of(raw)?.is_some() {
            // The driver would refuse as well, and end the capture.
            return Err(DriverError { call: "cuStreamSynchronize", code: CAPTURE_UNSUPPORTED }.into());
        }
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        let wait = || {
            // SAFETY: registered streams are kept alive.
            unsafe { self.device.driver.stream_synchronize(raw) }
        };
        Ok(self.calls.watch(Call::Synchronize, self.device.ordinal(), wait)?)
    }

    /// Blocks the host until the work given to every stream so far is done, but not beyond the deadline. Whether it is done.
    pub(crate) fn synchronize_all(&self, deadline: Instant) -> Result<bool, BackendError> {
        let mut events = Vec::new();
        let recorded = self.streams().try_for_each(|(_, stream)| {
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

    /// Whether a registered stream is part of a capture, whoever began it.
    pub(crate) fn is_capturing(&self) -> Result<bool, DriverError> {
        if self.device.captures.any() {
            return Ok(true);
        }
        let _current = self.device.enter()?;
        for (_, stream) in self.streams() {
            // SAFETY: registered streams are kept alive.
            if unsafe { capture_of(self.device.driver, stream.cu_stream()) }?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether an event of a capture is in use.
    #[inline]
    fn has_captured(&self) -> bool {
        self.captured_count.load(Ordering::Acquire) > 0
    }

    /// Whether neither a stream can be part of a capture, nor an event.
    #[inline]
    fn is_free_of_captures(&self) -> bool {
        !self.device.captures.any() && !self.has_captured()
    }

    fn capture_at(&self, event: Event) -> Option<CaptureId> {
        if !self.has_captured() {
            return None;
        }
        self.captured().get(&event.0).copied()
    }

    #[cold]
    pub(crate) fn new_event(&self) -> Result<SpareEvent, DriverError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: `event` is valid for writing, and a context is current.
        unsafe { self.device.driver.event_create(&raw mut event, EVENT_DISABLE_TIMING) }?;
        Ok(SpareEvent(event))
    }

    fn captured(&self) -> MutexGuard<'_, BTreeMap<u64, CaptureId>> {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether two names are of one stream. The default streams of all contexts have one handle.
#[inline]
pub(crate) fn is_same(one: &CudaStream, other: &CudaStream) -> bool {
    one.cu_stream() == other.cu_stream() && one.context().cu_ctx() == other.context().cu_ctx()
}

impl Drop for Order {
    /// Destroys the spare events; the driver keeps what streams still wait for. A lost device has lost them already.
    fn drop(&mut self) {
        // Streams that are dropped here would leave their context current.
        let _restore = RestoreCurrent::of(self.device.driver);
        let events = self.leave_books();
        let Ok(_current) = self.device.enter() else { return };
        for event in events {
            // SAFETY: made by this pool and used by nobody else.
            let _destroyed = unsafe { self.device.driver.event_destroy(event.0) };
        }
        self.streams = boxcar::Vec::new();
    }
}
