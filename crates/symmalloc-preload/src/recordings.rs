//! The traces that this process writes: one per device, named by the pattern in `SYMMALLOC_RUN_RECORD`.
//!
//! A recording must start with the first op. It therefore begins when a device's allocator is created or, if the program is only watched,
//! at the first allocation on a device.

use crate::settings::{self, Settings};
use std::error::Error;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use symmalloc_core::recording::{RecordingError, SinkError, StartRecordingError};
use symmalloc_cuda::CudaAllocator;
use symmalloc_files::say;
use symmalloc_import::{TraceFile, TraceFileOptions, TraceNaming};

/// Devices that have a trace, with the trace's path.
static FILES: Mutex<Vec<(usize, PathBuf)>> = Mutex::new(Vec::new());
/// Incomplete traces, each with the cause.
static FAILURES: Mutex<Vec<(PathBuf, String)>> = Mutex::new(Vec::new());

/// Returns the path of a device's trace, if it has one.
pub(crate) fn file_of(device: usize) -> Option<PathBuf> {
    let files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    files.iter().rev().find(|(known, _)| *known == device).map(|(_, file)| file.clone())
}

/// Prints that a device's trace is incomplete and why, and records this for the report at exit. The program continues.
pub(crate) fn failed(device: usize, error: &dyn Error) {
    let trace = file_of(device).or_else(|| Some(settings::settings()?.record.as_deref()?.into())).unwrap_or_default();
    let mut cause = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        // Some errors repeat their source.
        let text = error.to_string();
        if !cause.ends_with(&text) {
            cause = format!("{cause}: {text}");
        }
        source = error.source();
    }
    say(format_args!("the recording is incomplete: {cause}"));
    FAILURES.lock().unwrap_or_else(PoisonError::into_inner).push((trace, cause));
}

/// Removes and returns the incomplete traces, each with the cause.
pub(crate) fn take_failures() -> Vec<(PathBuf, String)> {
    std::mem::take(&mut *FAILURES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Stops the recording of an allocator, if there is one. If the trace is incomplete, reports the reason as [`failed`] does.
pub(crate) fn stop(allocator: &CudaAllocator) {
    match allocator.core().stop_recording() {
        Ok(_) | Err(RecordingError::NotRecording) => {}
        Err(error) => failed(allocator.device().ordinal(), &error),
    }
}

/// Creates a trace for a device, if recording is requested. Errors are printed, and the program continues.
pub(crate) fn create(device: usize, settings: &Settings) -> Option<TraceFile> {
    let pattern = settings.record.as_deref()?;
    let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let rank = settings::rank();
    let naming = TraceNaming {
        rank: rank.unwrap_or(0),
        // If the size of the job is unknown, a process with a rank is assumed to be one of several.
        ranks: settings::ranks().unwrap_or(if rank.is_some() { 2 } else { 1 }),
        device,
        is_first_device: files.is_empty(),
        process: std::process::id(),
        is_first_process: is_first_process(settings),
    };
    let mut path = PathBuf::from(naming.path_of(pattern));
    if files.iter().any(|(_, known)| *known == path) {
        // The device was reset, so a new recording starts.
        path.set_extension(format!("{}.{}", files.len(), path.extension().unwrap_or_default().to_string_lossy()));
    }
    match TraceFile::create(&path, TraceFileOptions::default()) {
        Ok(file) => {
            files.push((device, path));
            Some(file)
        }
        Err(error) => {
            drop(files);
            failed(device, &error);
            None
        }
    }
}

/// Starts recording an allocator, if recording is requested.
pub(crate) fn start(allocator: &CudaAllocator, settings: &Settings) {
    let Some(file) = create(allocator.device().ordinal(), settings) else { return };
    let started = allocator.core().start_recording(file);
    if let Err(error) = started {
        failed(allocator.device().ordinal(), &error);
    }
}

/// Converts a sink's error into the core's error type.
pub(crate) fn refused(error: SinkError) -> StartRecordingError {
    StartRecordingError::Sink(error)
}

/// Returns `true` if this process is the first process of its rank that records in this run. Only one process can create the marker file.
fn is_first_process(settings: &Settings) -> bool {
    static IS_FIRST: OnceLock<bool> = OnceLock::new();
    *IS_FIRST.get_or_init(|| {
        let Some(folder) = &settings.folder else { return true };
        let name = format!("recorded.rank{}", settings::rank().unwrap_or(0));
        File::create_new(folder.join(name)).is_ok()
    })
}
