//! Trace files of running allocators: a [`Sink`] for production.
//!
//! ```text
//!   threads of the program                     a separate thread per file
//!   record ──► push ──► │ pending records │ ──take all──► text ──► zstd, gzip or plain ──► file
//!                       at most a bound                    flushed once a second, and at the end
//! ```
//!
//! An op costs the program one push. A separate thread per file does the rest. It takes the pending records when a chunk is full, and at
//! least once a second. If the disk is slower than the program, records wait. Once
//! [`pending_records_max`](TraceFileOptions::pending_records_max) records are waiting, the program waits too. No record is ever dropped.
//!
//! If the program is killed, its trace is readable up to the last flush ([`ReadOptions::accept_torn`](crate::ReadOptions::accept_torn)). A
//! flush passes the data to the operating system: the data survives the end of the process, but not necessarily a crash of the machine.
//!
//! A forked child does not have this thread and does not own the file. In the child, the next full chunk ends the
//! recording with [`TraceFileError::Forked`], and nothing is written.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use symmalloc_core::config::Config;
use symmalloc_core::op::Record;
use symmalloc_core::recording::{Sink, SinkError};
use symmalloc_files::without_signals;
use symmalloc_trace::{TraceWriteError, TraceWriter};

use crate::compression::Compressor;

/// Number of pending records at which the thread is woken.
const CHUNK_RECORDS: usize = 4096;

/// Options for writing a trace file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceFileOptions {
    /// Maximum number of records that wait to be written. If there are more, the program waits. Each record takes 80 bytes plus its name.
    /// The writing thread may hold as many again.
    pub pending_records_max: usize,
    /// Maximum age of the records that a crash of the process can lose, because older records have been flushed. The
    /// minimum is one millisecond.
    pub flush_interval: Duration,
}

impl Default for TraceFileOptions {
    /// Returns options for a million records (72 MiB), flushed once a second.
    fn default() -> Self {
        TraceFileOptions { pending_records_max: 1 << 20, flush_interval: Duration::from_secs(1) }
    }
}

/// Error writing a trace file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceFileError {
    /// The file cannot be created.
    #[error("{}: cannot be created: {source}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The writing thread cannot be started.
    #[error(
        "{}: the thread that writes it cannot be started, raise the limit on threads (ulimit -u, cgroup pids): {source}",
        path.display()
    )]
    Thread {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Writing failed; for example, the disk may be full. Data that was flushed earlier is readable.
    #[error("{}: cannot be written; read the part written so far as a torn trace: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: TraceWriteError,
    },
    /// The writing thread has exited. Data that was flushed earlier is readable.
    #[error("{}: the thread that writes it has exited; read the part written so far as a torn trace", path.display())]
    Gone {
        /// The file.
        path: PathBuf,
    },
    /// This process was forked from the process that records, which owns the file.
    #[error("{}: belongs to process {owner}, from which this one was forked", path.display())]
    Forked {
        /// The file.
        path: PathBuf,
        /// The id of the recording process.
        owner: u32,
    },
}

/// A trace file being written. Pass it to [`Allocator::start_recording`](symmalloc_core::Allocator::start_recording).
///
/// A separate thread writes the file. No record is ever dropped: if the disk is slower than the program, the program waits. The
/// [module documentation](self) describes when records reach the disk, and what remains if the program is killed.
///
/// # Examples
/// ```
/// use symmalloc_core::{Allocator, Config, PoolId};
/// use symmalloc_sim::SimBackend;
/// use symmalloc_import::{ReadOptions, TraceFile, TraceFileOptions, read_path};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("job.trace.zst");
/// let allocator = Allocator::new(SimBackend::builder().build(), Config::default())?;
/// allocator.start_recording(TraceFile::create(&path, TraceFileOptions::default())?)?;
/// let stream = allocator.register_stream()?;
/// let a = allocator.allocate_named(PoolId::DEFAULT, stream, 3 << 20, "weights")?;
/// allocator.free(a.handle)?;
/// assert_eq!(allocator.stop_recording()?.records, 3);
///
/// let recording = read_path(&path, &ReadOptions::default())?;
/// assert_eq!(recording.records[1].placement, Some(a.placement));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TraceFile {
    path: PathBuf,
    options: TraceFileOptions,
    state: FileState,
}

#[derive(Debug)]
enum FileState {
    Opened(File),
    Writing(Writing),
    Done,
}

#[derive(Debug)]
struct Writing {
    shared: Arc<SharedRecords>,
    thread: JoinHandle<Result<(), TraceWriteError>>,
    /// The id of the process that contains the thread.
    owner: u32,
}

#[derive(Debug)]
struct SharedRecords {
    pending: Mutex<PendingRecords>,
    /// Signals a full chunk, or the end of the recording.
    news: Condvar,
    /// Signals that the thread has taken records.
    room: Condvar,
    /// Number of pending records at which the thread is woken.
    chunk_records: usize,
}

#[derive(Debug)]
struct PendingRecords {
    records: Vec<Record>,
    /// Number of records at which the program next wakes the thread. It is 0 once the thread has exited, so that the
    /// program notices.
    wake_at: usize,
    /// `true` once the recording has ended.
    is_over: bool,
    /// `true` once the thread has exited, so that no one takes records anymore.
    is_abandoned: bool,
}

impl SharedRecords {
    fn new(chunk_records: usize) -> Self {
        SharedRecords {
            pending: Mutex::new(PendingRecords {
                records: Vec::with_capacity(chunk_records),
                wake_at: chunk_records,
                is_over: false,
                is_abandoned: false,
            }),
            news: Condvar::new(),
            room: Condvar::new(),
            chunk_records,
        }
    }

    /// Waits until there is a chunk of pending records, the recording has ended, or `patience` has passed. Then takes all pending records.
    /// Returns `true` if the recording has ended.
    fn take(&self, records: &mut Vec<Record>, patience: Duration) -> bool {
        let is_to_wait = |pending: &mut PendingRecords| pending.records.len() < self.chunk_records && !pending.is_over;
        let waited = self.news.wait_timeout_while(self.lock(), patience, is_to_wait);
        let (mut pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut pending.records, records);
        pending.wake_at = self.chunk_records;
        self.room.notify_one();
        pending.is_over
    }

    fn lock(&self) -> MutexGuard<'_, PendingRecords> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writing {
    /// Adds a record. Returns `true` if it is time to hand the records over. Returns `None` if the lock is unavailable in a forked process.
    #[inline]
    fn push(&self, record: Record) -> Option<bool> {
        let Ok(mut pending) = self.shared.pending.try_lock() else { return self.push_later(record) };
        pending.records.push(record);
        Some(pending.records.len() >= pending.wake_at)
    }

    /// Slow path of [`push`](Self::push) for a contended lock.
    #[cold]
    fn push_later(&self, record: Record) -> Option<bool> {
        // In a forked child, the lock may stay locked indefinitely.
        if process::id() != self.owner {
            return None;
        }
        let mut pending = self.shared.lock();
        pending.records.push(record);
        Some(pending.records.len() >= pending.wake_at)
    }
}

impl TraceFile {
    /// Creates a file, or opens an existing file to replace its contents. The extension selects the compression: zstd (`.zst`), gzip
    /// (`.gz`), or none.
    ///
    /// The previous contents are lost only when the recording begins. If a recording is rejected, for example because another recording is
    /// writing the file, the file therefore stays intact.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn create(path: impl AsRef<Path>, options: TraceFileOptions) -> Result<Self, TraceFileError> {
        let path = path.as_ref().to_path_buf();
        match OpenOptions::new().write(true).create(true).truncate(false).open(&path) {
            Ok(file) => Ok(TraceFile { path, options, state: FileState::Opened(file) }),
            Err(source) => Err(TraceFileError::Create { path, source }),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Wakes the thread, and waits if too many records are pending.
    #[cold]
    fn hand_over(&mut self) -> Result<(), SinkError> {
        let FileState::Writing(Writing { shared, owner, .. }) = &self.state else { return Ok(()) };
        if process::id() != *owner {
            return Err(self.give_up());
        }
        shared.news.notify_one();
        let records_max = self.options.pending_records_max.max(1);
        let is_to_wait = |pending: &mut PendingRecords| pending.records.len() >= records_max && !pending.is_abandoned;
        let mut pending = shared.room.wait_while(shared.lock(), is_to_wait).unwrap_or_else(PoisonError::into_inner);
        let is_abandoned = pending.is_abandoned;
        if pending.records.len() >= pending.wake_at {
            pending.wake_at = (pending.records.len() + shared.chunk_records).min(records_max);
        }
        drop(pending);
        if is_abandoned { Err(self.give_up()) } else { Ok(()) }
    }

    /// Returns the error that ended the recording.
    #[cold]
    fn give_up(&mut self) -> SinkError {
        match self.close() {
            Ok(()) => TraceFileError::Gone { path: self.path.clone() }.into(),
            Err(error) => error.into(),
        }
    }

    /// Completes the file. Does nothing if no thread is writing it.
    fn close(&mut self) -> Result<(), TraceFileError> {
        let FileState::Writing(Writing { shared, thread, owner }) = mem::replace(&mut self.state, FileState::Done)
        else {
            return Ok(());
        };
        let path = self.path.clone();
        if process::id() != owner {
            // The thread belongs to the parent process, and so do the locks that the thread held during the fork.
            mem::forget((shared, thread));
            return Err(TraceFileError::Forked { path, owner });
        }
        shared.lock().is_over = true;
        shared.news.notify_one();
        match thread.join() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(TraceFileError::Write { path, source }),
            Err(_panic) => Err(TraceFileError::Gone { path }),
        }
    }
}

impl Sink for TraceFile {
    fn begin(&mut self, config: &Config) -> Result<(), SinkError> {
        let FileState::Opened(file) = mem::replace(&mut self.state, FileState::Done) else {
            return Err(TraceFileError::Gone { path: self.path.clone() }.into());
        };
        let file = emptied(file).and_then(|file| Compressor::of_file(file, &self.path));
        let file = file.map_err(|source| TraceFileError::Create { path: self.path.clone(), source })?;
        let shared = Arc::new(SharedRecords::new(CHUNK_RECORDS.min(self.options.pending_records_max).max(1)));
        let (taken, config, flush_interval) =
            (Arc::clone(&shared), config.clone(), self.options.flush_interval.max(Duration::from_millis(1)));
        let body = move || {
            let _leave = Leave(&taken);
            without_signals(|| write(&taken, file, &config, flush_interval))
        };
        let thread = thread::Builder::new().name("symmalloc-trace".to_owned()).spawn(body);
        let thread = thread.map_err(|source| TraceFileError::Thread { path: self.path.clone(), source })?;
        self.state = FileState::Writing(Writing { shared, thread, owner: process::id() });
        Ok(())
    }

    #[inline]
    fn record(&mut self, record: Record) -> Result<(), SinkError> {
        let FileState::Writing(writing) = &self.state else { return Err(self.give_up()) };
        match writing.push(record) {
            Some(false) => Ok(()),
            Some(true) => self.hand_over(),
            None => Err(self.give_up()),
        }
    }

    fn finish(&mut self) -> Result<(), SinkError> {
        Ok(self.close()?)
    }
}

impl Drop for TraceFile {
    /// Completes the file, if this process owns it. Errors are ignored, because no one can receive them.
    fn drop(&mut self) {
        let _error = self.close();
    }
}

/// Truncates the file, unless it is a pipe or a device.
fn emptied(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// A guard that notifies the program when the thread exits, for any reason.
struct Leave<'a>(&'a SharedRecords);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut pending = self.0.lock();
        pending.is_abandoned = true;
        pending.wake_at = 0;
        self.0.room.notify_one();
    }
}

/// Body of the thread: writes records until the recording ends.
fn write(
    shared: &SharedRecords,
    file: Compressor<File>,
    config: &Config,
    flush_interval: Duration,
) -> Result<(), TraceWriteError> {
    let mut trace = TraceWriter::new(file, Some(config))?;
    trace.flush()?;
    let (mut records, mut flushed_at, mut is_flushed) = (Vec::new(), Instant::now(), true);
    loop {
        let patience = if is_flushed { flush_interval } else { flush_interval.saturating_sub(flushed_at.elapsed()) };
        let is_over = shared.take(&mut records, patience);
        is_flushed &= records.is_empty();
        for record in records.drain(..) {
            trace.write(&record)?;
        }
        if is_over {
            trace.finish()?.finish()?;
            return Ok(());
        }
        if !is_flushed && flushed_at.elapsed() >= flush_interval {
            trace.flush()?;
            (flushed_at, is_flushed) = (Instant::now(), true);
        }
    }
}
