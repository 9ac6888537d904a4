//! Traces: `SYMMALLOC_TRACE`, and recordings that a program asks for.
//!
//! A recording holds from the first op on, so the environment's begins when the first stream of an allocator is used. Every
//! device of every rank writes a file of its own:
//!
//! | in the pattern | stands for |
//! |---|---|
//! | `%r` | the rank (`RANK`; 0 without) |
//! | `%d` | the device's number |
//! | `%p` | the process |
//! | `%%` | a percent sign |
//!
//! Without `%r` and `%p`, a job of several ranks (`WORLD_SIZE`) gets `.rankN` before the file's suffix, and without `%d` and `%p`
//! a second device `.deviceN`: no two write one file.

use crate::complaints::say;
use crate::error::Error;
use crate::guard::guarded;
use std::env::{self, VarError};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use symmalloc_core::recording::{RecordingError, SinkError, StartRecordingError};
use symmalloc_cuda::CudaAllocator;
use symmalloc_import::{TraceFile, TraceFileOptions};

/// The environment's pattern.
pub(crate) const TRACE_VARIABLE: &str = "SYMMALLOC_TRACE";

/// Records every op of the allocator from now on.
pub(crate) fn start(allocator: &CudaAllocator, path: &Path) -> Result<(), Error> {
    let file = TraceFile::create(path, TraceFileOptions::default()).map_err(SinkError::from);
    let file = file.map_err(StartRecordingError::Sink)?;
    allocator.core().start_recording(file)?;
    Ok(())
}

/// Ends the recording: what was recorded is on disk then.
pub(crate) fn stop(allocator: &CudaAllocator) -> Result<(), Error> {
    allocator.core().stop_recording()?;
    Ok(())
}

/// The allocators that have a trace of the environment's. Held while one begins: two devices that are used first at the same
/// time do not both take the name that the first one has.
static STARTED: Mutex<Vec<CudaAllocator>> = Mutex::new(Vec::new());

/// The process that they are of. A forked child has none.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Begins what `SYMMALLOC_TRACE` asks for, if it does.
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
    };
    start(allocator, Path::new(&launch.path_of(&pattern)))?;
    started.push(allocator.clone());
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    stop_at_exit();
    Ok(())
}

/// What a pattern can ask for.
struct TraceNaming {
    rank: u64,
    ranks: u64,
    device: usize,
    is_first_device: bool,
    process: u32,
}

impl TraceNaming {
    fn path_of(&self, pattern: &str) -> String {
        let mut path = String::new();
        let (mut has_rank, mut has_device) = (self.ranks <= 1, self.is_first_device);
        let mut rest = pattern.chars().peekable();
        while let Some(letter) = rest.next() {
            let next = if letter == '%' { rest.peek().copied() } else { None };
            match next {
                Some('r') => path.push_str(&self.rank.to_string()),
                Some('d') => path.push_str(&self.device.to_string()),
                Some('p') => path.push_str(&self.process.to_string()),
                Some('%') => path.push('%'),
                _ => {
                    path.push(letter);
                    continue;
                }
            }
            rest.next();
            has_rank |= matches!(next, Some('r' | 'p'));
            has_device |= next == Some('d');
        }
        let rank = if has_rank { String::new() } else { format!(".rank{}", self.rank) };
        let device = if has_device { String::new() } else { format!(".device{}", self.device) };
        let name_at = path.rfind('/').map_or(0, |slash| slash + 1);
        // `job.trace.zst` has its suffix from the first dot on, which is not the first letter.
        let dot = path[name_at..].char_indices().skip(1).find(|(_, letter)| *letter == '.');
        let suffix_at = dot.map_or(path.len(), |(at, _)| name_at + at);
        path.insert_str(suffix_at, &(rank + &device));
        path
    }
}

/// Python ends without dropping what lives for ever; the last second of a trace and its end are written here.
fn stop_at_exit() {
    static IS_ASKED: Once = Once::new();
    IS_ASKED.call_once(|| {
        // SAFETY: the function takes nothing, and lives as long as the library, which is never closed while it is in use.
        let refused = unsafe { libc::atexit(stop_all) };
        if refused != 0 {
            tracing::warn!(name: "trace.unended", target: "symmalloc", "the system has no memory to end traces at exit");
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
            say(format_args!("the trace of device {} is not whole: {error}", allocator.device().ordinal()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_of(pattern: &str, ranks: u64, is_first_device: bool) -> String {
        TraceNaming { rank: 3, ranks, device: 1, is_first_device, process: 77 }.path_of(pattern)
    }

    #[test]
    fn no_two_ranks_and_no_two_devices_write_one_file() {
        assert_eq!(path_of("/tmp/job.trace.zst", 1, true), "/tmp/job.trace.zst");
        assert_eq!(path_of("/tmp/job.trace.zst", 8, true), "/tmp/job.rank3.trace.zst");
        assert_eq!(path_of("/tmp/job.trace.zst", 8, false), "/tmp/job.rank3.device1.trace.zst");
        assert_eq!(path_of("/tmp.d/job", 8, true), "/tmp.d/job.rank3");
        assert_eq!(path_of(".hidden", 8, true), ".hidden.rank3");
        assert_eq!(path_of("job-%r-%d.gz", 8, false), "job-3-1.gz");
        assert_eq!(path_of("job-%p.gz", 8, true), "job-77.gz");
        assert_eq!(path_of("100%%%x%", 1, true), "100%%x%");
    }
}
