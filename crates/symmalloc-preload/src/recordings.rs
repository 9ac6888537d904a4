//! The traces that this process writes: one for each device, named by the pattern of `SYMMALLOC_RUN_RECORD`.
//!
//! A recording holds from the first op on, so it begins when a device's allocator is made, or when its first allocation is watched.

use crate::settings::{self, Settings, say};
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use symmalloc_core::recording::{SinkError, StartRecordingError};
use symmalloc_cuda::CudaAllocator;
use symmalloc_import::{TraceFile, TraceFileOptions, TraceNaming};

/// Devices with a trace, and its name.
static FILES: Mutex<Vec<(usize, PathBuf)>> = Mutex::new(Vec::new());

/// The trace of a device, if it has one.
pub(crate) fn file_of(device: usize) -> Option<PathBuf> {
    let files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    files.iter().rev().find(|(known, _)| *known == device).map(|(_, file)| file.clone())
}

/// Begins a trace of a device, if one is asked for. What goes wrong is said, and the program goes on.
pub(crate) fn create(device: usize, settings: &Settings) -> Option<TraceFile> {
    let pattern = settings.record.as_deref()?;
    let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let rank = settings::rank();
    let naming = TraceNaming {
        rank: rank.unwrap_or(0),
        // A rank of a job of unknown size is one of several.
        ranks: settings::ranks().unwrap_or(if rank.is_some() { 2 } else { 1 }),
        device,
        is_first_device: files.is_empty(),
        process: std::process::id(),
        is_first_process: is_first_process(settings),
    };
    let mut path = PathBuf::from(naming.path_of(pattern));
    if files.iter().any(|(_, known)| *known == path) {
        // The device was reset, and is recorded anew.
        path.set_extension(format!("{}.{}", files.len(), path.extension().unwrap_or_default().to_string_lossy()));
    }
    match TraceFile::create(&path, TraceFileOptions::default()) {
        Ok(file) => {
            files.push((device, path));
            Some(file)
        }
        Err(error) => {
            say(format_args!("nothing is recorded: {error}"));
            None
        }
    }
}

/// Records an allocator from now on, if that is asked for.
pub(crate) fn start(allocator: &CudaAllocator, settings: &Settings) {
    let Some(file) = create(allocator.device().ordinal(), settings) else { return };
    let started = allocator.core().start_recording(file);
    if let Err(error) = started {
        say(format_args!("nothing is recorded: {error}"));
    }
}

/// Why a sink could not begin, as the core says it.
pub(crate) fn refused(error: SinkError) -> StartRecordingError {
    StartRecordingError::Sink(error)
}

/// Whether this process is the first of its rank in this run that records. One of them gets to make the file that says so.
fn is_first_process(settings: &Settings) -> bool {
    static IS_FIRST: OnceLock<bool> = OnceLock::new();
    *IS_FIRST.get_or_init(|| {
        let Some(folder) = &settings.folder else { return true };
        let name = format!("recorded.rank{}", settings::rank().unwrap_or(0));
        File::create_new(folder.join(name)).is_ok()
    })
}
