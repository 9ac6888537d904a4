//! The thread that queries the driver and NCCL for the progress of the device. It can hang in such a query, and the watchdog does not wait
//! for it.
//!
//! In a stream with unfinished collectives, an event is recorded after them. When the event completes, so have the collectives. The thread
//! uses the relaxed capture mode: in the global one, any query would invalidate another thread's capture. An event that became part of a
//! capture is never queried, because the query would invalidate the capture as well.

use crate::ffi::driver::{self, refused};
use crate::watchdog::clock::{POLL_INTERVAL, Tick};
use crate::watchdog::failure::FailureCause;
use crate::watchdog::flight::Unmarked;
use crate::watchdog::watched::{self, Mark, Watched};
use cudarc::driver::CudaEvent;
use std::io;
use std::sync::{Mutex, PoisonError};
use symmalloc_cuda::{DriverError, RelaxedCapture};

/// Starts the thread once. After an error, the next call tries again.
///
/// # Errors
/// Returns an error if the system cannot create a thread.
pub(super) fn start() -> io::Result<()> {
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
        for watched in watched::all() {
            relaxed = relaxed.or_else(|| Some(watched.communicator()?.relax_capture()));
            if relaxed.is_none() || watched.is_closed() {
                drop(std::mem::take(&mut *watched.marks()));
                continue;
            }
            poll_marks(&watched);
            for unmarked in watched.flight().unmarked() {
                mark(&watched, &unmarked);
            }
            if let Some(error) = watched.communicator().and_then(|communicator| communicator.poll_error()) {
                watched.record_error(error);
            }
        }
    }
}

/// Queries which marks the device has passed. No other thread waits for the driver's answers.
fn poll_marks(watched: &Watched) {
    let waiting = watched.marks().take_waiting();
    for mark in waiting {
        match is_past(&mark.event) {
            Ok(true) => {
                watched.flight().done(mark.upto, Tick::now());
                watched.marks().keep(mark.event);
            }
            Ok(false) => watched.marks().add(mark),
            Err(error) if is_temporary(&error) => watched.marks().add(mark),
            Err(error) => watched.record_error(FailureCause::Driver(error)),
        }
    }
}

/// Returns `true` if a driver call failed temporarily, because of a lack of memory (2) or a capture. The device is not lost.
fn is_temporary(error: &DriverError) -> bool {
    error.code == 2 || driver::is_capture_in_the_way(error)
}

fn is_past(event: &CudaEvent) -> Result<bool, DriverError> {
    event.context().bind_to_thread().map_err(refused("cuCtxSetCurrent"))?;
    event.try_is_complete().map_err(refused("cuEventQuery"))
}

/// Marks the end of a stream. Changes the thread's current context.
pub(crate) fn mark(watched: &Watched, unmarked: &Unmarked) {
    let Unmarked { upto, .. } = *unmarked;
    let free = watched.marks().free_event();
    match record_event(unmarked, free) {
        Ok(Some(event)) => watched.marks().add(Mark { upto, event }),
        Ok(None) => watched.flight().mark_failed(upto),
        Err(error) => {
            watched.flight().mark_failed(upto);
            if !is_temporary(&error) {
                watched.record_error(FailureCause::Driver(error));
            }
        }
    }
}

/// Records an event in the stream of the unmarked collectives, after them. Returns `None` while the stream is being captured.
fn record_event(Unmarked { stream, .. }: &Unmarked, free: Option<CudaEvent>) -> Result<Option<CudaEvent>, DriverError> {
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
    // If a capture began in between, it contains the event, which must not be queried.
    Ok((!driver::is_captured(stream)?).then_some(event))
}
