//! The thread that queries the driver and NCCL for the progress of the device. It can hang in such a query, and the watchdog does not wait
//! for it.
//!
//! In each stream with unfinished collectives, an event is recorded after the collectives. When the event completes, the collectives have
//! completed, too. The thread uses the relaxed capture mode: in the global mode, any query would invalidate another thread's capture. An
//! event that became part of a capture is never queried, because the query would invalidate the capture as well.

use crate::ffi::driver::{self, refused};
use crate::watchdog::observed::{self, Mark, Observed};
use cudarc::driver::{CudaEvent, CudaStream};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use symmalloc_cuda::{DriverError, RelaxedCapture};
use symmalloc_watchdog::{FailureCause, LocalError, POLL_INTERVAL, Tick, Unmarked, WatchSettings, WatchdogMode};

impl Observed {
    /// Watches the communicator, and polls its streams, until the communicator is dropped.
    pub(crate) fn watch(self: &Arc<Self>) {
        self.watched().watch();
        if symmalloc_watchdog::is_running() {
            observed::add(self);
        }
    }
}

/// Starts the watchdog and the marker, unless they are already running.
///
/// # Errors
/// Returns an error if the system cannot create a thread or a descriptor, unless the program turned the watchdog off. A communicator
/// without a watchdog can hang indefinitely. After an error, the next call tries again.
pub(crate) fn start(settings: &WatchSettings) -> io::Result<()> {
    // Start the marker first, because without the device's progress all work would seem to be late.
    let started = start_marker().and_then(|()| symmalloc_watchdog::start());
    if settings.mode() == WatchdogMode::Off { Ok(()) } else { started }
}

/// Starts the thread once. After an error, the next call tries again.
fn start_marker() -> io::Result<()> {
    static IS_STARTED: Mutex<bool> = Mutex::new(false);
    let mut is_started = IS_STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*is_started {
        std::thread::Builder::new().name("symmalloc-marker".to_owned()).spawn(run)?;
        *is_started = true;
    }
    Ok(())
}

fn run() {
    let mut relaxed: Option<RelaxedCapture> = None;
    loop {
        std::thread::sleep(POLL_INTERVAL);
        for observed in observed::all() {
            relaxed = relaxed.or_else(|| Some(observed.communicator()?.relax_capture()));
            if relaxed.is_none() || observed.is_closed() {
                drop(std::mem::take(&mut *observed.marks()));
                continue;
            }
            poll_marks(&observed);
            for unmarked in observed.flight().unmarked() {
                mark(&observed, &unmarked);
            }
            if let Some(error) = observed.communicator().and_then(|communicator| communicator.poll_error()) {
                observed.record_error(error);
            }
        }
    }
}

/// Queries which marks the device has passed. No other thread waits for the driver's answers.
fn poll_marks(observed: &Observed) {
    let waiting = observed.marks().take_waiting();
    for mark in waiting {
        match is_past(&mark.event) {
            Ok(true) => {
                observed.flight().done(mark.upto, Tick::now());
                observed.marks().keep(mark.event);
            }
            Ok(false) => observed.marks().add(mark),
            Err(error) if is_temporary(&error) => observed.marks().add(mark),
            Err(error) => observed.record_error(lost(error)),
        }
    }
}

/// Returns the failure of a device that is lost.
fn lost(error: DriverError) -> FailureCause {
    FailureCause::Driver(LocalError::new(error))
}

/// Returns `true` if a driver call failed temporarily, because of a lack of memory (2) or a capture. The device is not lost.
fn is_temporary(error: &DriverError) -> bool {
    error.code == 2 || driver::is_capture_in_the_way(error)
}

fn is_past(event: &CudaEvent) -> Result<bool, DriverError> {
    event.context().bind_to_thread().map_err(refused("cuCtxSetCurrent"))?;
    event.try_is_complete().map_err(refused("cuEventQuery"))
}

/// Marks the end of the work in a stream with an event. Changes the thread's current context.
pub(crate) fn mark(observed: &Observed, unmarked: &Unmarked<Arc<CudaStream>>) {
    let Unmarked { upto, .. } = *unmarked;
    let free = observed.marks().free_event();
    match record_event(unmarked, free) {
        Ok(Some(event)) => observed.marks().add(Mark { upto, event }),
        Ok(None) => observed.flight().mark_failed(upto),
        Err(error) => {
            observed.flight().mark_failed(upto);
            if !is_temporary(&error) {
                observed.record_error(lost(error));
            }
        }
    }
}

/// Records an event in the stream of the unmarked collectives, after these collectives. Returns `None` while the stream is being captured.
fn record_event(
    Unmarked { stream, .. }: &Unmarked<Arc<CudaStream>>,
    free: Option<CudaEvent>,
) -> Result<Option<CudaEvent>, DriverError> {
    let context = stream.context();
    context.bind_to_thread().map_err(refused("cuCtxSetCurrent"))?;
    if driver::is_captured(stream)? {
        return Ok(None);
    }
    let event = match free {
        Some(event) => event,
        None => context.new_event(None).map_err(refused("cuEventCreate"))?,
    };
    event.record(stream).map_err(refused("cuEventRecord"))?;
    // If a capture began in between, the capture contains the event, which must then not be queried.
    Ok((!driver::is_captured(stream)?).then_some(event))
}
