//! Traces: `SYMMALLOC_TRACE`, and recordings that a program starts.
//!
//! A recording must contain the first op, so `SYMMALLOC_TRACE` starts it at the first use of a stream. Every device of every rank
//! writes a separate file:
//!
//! | in the pattern | replaced by |
//! |---|---|
//! | `%r` | the rank (`RANK`; 0 if it is not set) |
//! | `%d` | the device's number |
//! | `%p` | the process id |
//! | `%%` | a percent sign |
//!
//! If the pattern has neither `%r` nor `%p`, a job of several ranks (`WORLD_SIZE`) adds `.rankN` before the file's suffix. If it has
//! neither `%d` nor `%p`, a second device adds `.deviceN`. No two recordings write the same file.

use crate::error::Error;
use crate::guard::guarded;
use std::env::{self, VarError};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use symmalloc_core::recording::{RecordingError, SinkError, StartRecordingError};
use symmalloc_cuda::CudaAllocator;
use symmalloc_files::say;
use symmalloc_import::{TraceFile, TraceFileOptions, TraceNaming};

/// The environment variable with the pattern of the file names.
pub(crate) const TRACE_VARIABLE: &str = "SYMMALLOC_TRACE";

/// Records every later op of the allocator.
pub(crate) fn start(allocator: &CudaAllocator, path: &Path) -> Result<(), Error> {
    let file = TraceFile::create(path, TraceFileOptions::default()).map_err(SinkError::from);
    let file = file.map_err(StartRecordingError::Sink)?;
    allocator.core().start_recording(file)?;
    Ok(())
}

/// Ends the recording and writes the rest of it to disk.
pub(crate) fn stop(allocator: &CudaAllocator) -> Result<(), Error> {
    allocator.core().stop_recording()?;
    Ok(())
}

/// The allocators whose trace the environment started. Locked while a trace starts, so that two devices do not both use the file name
/// of the first device.
static STARTED: Mutex<Vec<CudaAllocator>> = Mutex::new(Vec::new());

/// The id of the process that owns these allocators. A forked child has none.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Begins the recording of `SYMMALLOC_TRACE`, if it is set.
pub(crate) fn start_from_environment(allocator: &CudaAllocator) -> Result<(), Error> {
    let pattern = match env::var(TRACE_VARIABLE) {
        Ok(pattern) => pattern,
        Err(VarError::NotPresent) => return Ok(()),
        Err(VarError::NotUnicode(_)) => return Err(Error::NotText { argument: TRACE_VARIABLE }),
    };
    if pattern.is_empty() {
        return Ok(());
    }
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let launch = TraceNaming {
        rank: number("RANK").unwrap_or(0),
        ranks: number("WORLD_SIZE").unwrap_or(1),
        device: allocator.device().ordinal(),
        is_first_device: started.is_empty(),
        process: std::process::id(),
        is_first_process: true,
    };
    start(allocator, Path::new(&launch.path_of(&pattern)))?;
    started.push(allocator.clone());
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    stop_at_exit();
    Ok(())
}

/// Completes the traces at process exit, because the allocators are never dropped.
fn stop_at_exit() {
    static IS_ASKED: Once = Once::new();
    IS_ASKED.call_once(|| {
        // SAFETY: the function takes no arguments, and lives as long as the library, which is not closed while in use.
        let refused = unsafe { libc::atexit(stop_all) };
        if refused != 0 {
            tracing::warn!(name: "trace.unended", target: "symmalloc", "out of memory: traces are not completed at exit");
        }
    });
}

extern "C" fn stop_all() {
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    for allocator in STARTED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let stopped = guarded(|| Ok(allocator.core().stop_recording()));
        if let Ok(Err(error)) = stopped
            && !matches!(error, RecordingError::NotRecording)
        {
            say(format_args!("the trace of device {} is incomplete: {error}", allocator.device().ordinal()));
        }
    }
}
