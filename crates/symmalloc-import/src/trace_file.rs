//! A trace file that a running allocator writes: the [`Sink`] for production.
//!
//! ```text
//!   threads of the program                     one thread of the file's own
//!   record ──► push ──► │ pending records │ ──take all──► text ──► zstd, gzip or plain ──► file
//!                       at most a bound                    flushed once a second, and at the end
//! ```
//!
//! An op costs the program a push. Everything else happens on the file's own thread, which takes what is pending when a chunk
//! is full, and once a second anyway. When the disk is slower than the program, records wait, and when
//! [`pending_records_max`](TraceFileOptions::pending_records_max) of them do, so does the program: no record is ever left out.
//!
//! What a program leaves that is killed can be read up to the last flush
//! ([`ReadOptions::accept_torn`](crate::ReadOptions::accept_torn)). What is flushed is the operating system's: the end of
//! the process does not lose it, the loss of the machine may.
//!
//! A child that the program forks has no such thread and does not own the file: there, the next full chunk ends the recording
//! with [`TraceFileError::Forked`], and nothing is written.

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
use symmalloc_trace::{TraceWriteError, TraceWriter};

use crate::compression::Compressor;

/// So many records are worth waking the thread for.
const CHUNK_RECORDS: usize = 4096;

/// How a trace file is written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceFileOptions {
    /// The most records that wait to be written, at 72 bytes each and their names; as many again may be in the hands of the
    /// thread that writes. The program waits when it has more.
    pub pending_records_max: usize,
    /// How long a record may be lost by a crash: what is older has been flushed. At least a millisecond.
    pub flush_interval: Duration,
}

impl Default for TraceFileOptions {
    /// A million records (72 MiB), flushed once a second.
    fn default() -> Self {
        TraceFileOptions { pending_records_max: 1 << 20, flush_interval: Duration::from_secs(1) }
    }
}

/// Why a trace file could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceFileError {
    /// The file cannot be created.
    #[error("{}: cannot be created: {source}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The thread that writes it cannot be started.
    #[error("{}: no thread to write it can be started: {source}", path.display())]
    Thread {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Writing failed: the disk may be full. What was flushed before can be read.
    #[error("{}: cannot be written, what is there can be read as a torn trace: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        source: TraceWriteError,
    },
    /// The thread that writes it is gone. What was flushed before can be read.
    #[error("{}: the thread that writes it is gone", path.display())]
    Gone {
        /// The file.
        path: PathBuf,
    },
    /// This process was forked from the one that records. The file is the other one's.
    #[error("{}: belongs to process {owner}, which this one was forked from", path.display())]
    Forked {
        /// The file.
        path: PathBuf,
        /// The process that records.
        owner: u32,
    },
}

/// A trace file that is being written. Give it to
/// [`Allocator::start_recording`](symmalloc_core::Allocator::start_recording).
///
/// # Examples
/// ```
/// use symmalloc_core::{Allocator, Config, PoolId};
/// use symmalloc_sim::SimBackend;
/// use symmalloc_import::{ReadOptions, TraceFile, TraceFileOptions, read_path};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("job.trace.zst");
/// let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), Config::default())?;
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
    /// The process that the thread is in.
    owner: u32,
}

#[derive(Debug)]
struct SharedRecords {
    pending: Mutex<PendingRecords>,
    /// A chunk is full, or the end has come.
    news: Condvar,
    /// Records were taken.
    room: Condvar,
    /// So many records are worth waking the thread for.
    chunk_records: usize,
}

#[derive(Debug)]
struct PendingRecords {
    records: Vec<Record>,
    /// With so many records the program takes note: at a full chunk, and at once when the thread is gone.
    wake_at: usize,
    /// No more records come.
    is_over: bool,
    /// The thread is gone: nobody takes records any more.
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

    /// Takes all pending records: when there is a chunk of them, when no more come, or after a while. Whether no more come.
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
    /// Adds a record. Whether it is time to hand them over; `None` in another process, where the lock is not to be had.
    #[inline]
    fn push(&self, record: Record) -> Option<bool> {
        let Ok(mut pending) = self.shared.pending.try_lock() else { return self.push_later(record) };
        pending.records.push(record);
        Some(pending.records.len() >= pending.wake_at)
    }

    /// As [`push`](Self::push), where the lock is not to be had at once.
    #[cold]
    fn push_later(&self, record: Record) -> Option<bool> {
        // In a forked child it may stay locked for ever.
        if process::id() != self.owner {
            return None;
        }
        let mut pending = self.shared.lock();
        pending.records.push(record);
        Some(pending.records.len() >= pending.wake_at)
    }
}

impl TraceFile {
    /// Creates a file, or opens one to replace it, compressed as its name says: zstd (`.zst`), gzip (`.gz`), or not at all.
    ///
    /// What a file holds is lost when the recording begins, and not before: a recording that is refused, because another one
    /// writes that file already, say, does no harm to it.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn create(path: impl AsRef<Path>, options: TraceFileOptions) -> Result<Self, TraceFileError> {
        let path = path.as_ref().to_path_buf();
        match OpenOptions::new().write(true).create(true).truncate(false).open(&path) {
            Ok(file) => Ok(TraceFile { path, options, state: FileState::Opened(file) }),
            Err(source) => Err(TraceFileError::Create { path, source }),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Wakes the thread, and waits when too much is pending.
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

    /// Why it cannot go on.
    #[cold]
    fn give_up(&mut self) -> SinkError {
        match self.close() {
            Ok(()) => TraceFileError::Gone { path: self.path.clone() }.into(),
            Err(error) => error.into(),
        }
    }

    /// Makes the file whole. Without a thread there is nothing to do.
    fn close(&mut self) -> Result<(), TraceFileError> {
        let FileState::Writing(Writing { shared, thread, owner }) = mem::replace(&mut self.state, FileState::Done)
        else {
            return Ok(());
        };
        let path = self.path.clone();
        if process::id() != owner {
            // The thread is the other process's, and so are the locks it may have held when this one was forked.
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
            write(&taken, file, &config, flush_interval)
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
    /// Makes the file whole, in the process that owns it. An error has nobody to go to.
    fn drop(&mut self) {
        let _error = self.close();
    }
}

/// The file without what it held. Pipes and devices hold nothing.
fn emptied(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Tells the program that the thread is gone, however it went.
struct Leave<'a>(&'a SharedRecords);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut pending = self.0.lock();
        pending.is_abandoned = true;
        pending.wake_at = 0;
        self.0.room.notify_one();
    }
}

/// The thread: writes what comes, until no more does.
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
