//! Errors of an import: each has a cause, and the path of the file if it is known.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use symmalloc_core::units::Amount;
use symmalloc_trace::{LineError, TraceError};

use crate::compression::{Compression, CompressionError};
use crate::pickle::PickleError;
use crate::pytorch::SnapshotError;
use crate::rmm::RmmError;

/// Error reading a recording. The message suggests a remedy; [`kind`](ImportError::kind) is for programs.
#[derive(Debug)]
pub struct ImportError {
    path: Option<PathBuf>,
    kind: Box<ImportErrorKind>,
}

/// Cause of an [`ImportError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportErrorKind {
    /// The file cannot be opened.
    #[error("cannot be opened")]
    Open(#[source] io::Error),
    /// The data cannot be read.
    #[error("cannot be read")]
    Read(#[source] io::Error),
    /// The data cannot be decompressed.
    #[error(transparent)]
    Compression(#[from] CompressionError),
    /// The data is empty.
    #[error("is empty: nothing was recorded, or nothing was written yet")]
    Empty,
    /// The format is not supported.
    #[error(
        "is not a recording that this version can read: give a symmalloc trace (first line `symmalloc-trace` and its version), a PyTorch memory \
         snapshot (torch.cuda.memory._dump_snapshot) or an RMM log (first line \
         `Thread,Time,Action,Pointer,Size,Stream`), each plain, gzip or zstd"
    )]
    UnknownFormat,
    /// The debug log of RMM, whose lines are meant for people.
    #[error(
        "is RMM's debug log: give its event log, which rmm.mr.LoggingResourceAdaptor or rmm.enable_logging() writes (first line \
         `Thread,Time,Action,Pointer,Size,Stream`)"
    )]
    RmmDebugLog,
    /// A zip archive, which `torch.save` produces.
    #[error(
        "is a zip archive, as torch.save writes it: save the snapshot with torch.cuda.memory._dump_snapshot or \
         pickle.dump, or unpack the archive"
    )]
    ZipArchive,
    /// A PyTorch snapshot that cannot be converted to ops.
    #[error(transparent)]
    Snapshot(SnapshotError),
    /// An RMM log that cannot be converted to ops.
    #[error(transparent)]
    Rmm(RmmError),
    /// A trace that cannot be read.
    #[error(transparent)]
    Trace(TraceError),
    /// A compressed trace that ends early: the file was truncated, or the recorder was interrupted.
    #[error(
        "line {line}: the {compression} data ends early, after {records} whole records: copy the file again, or read it with \
         accept_torn to keep these"
    )]
    TornTrace {
        /// The compression of the trace.
        compression: Compression,
        /// Number of whole records that can be read.
        records: u64,
        /// The line at which the data ends.
        line: u64,
    },
    /// The caller chose a device, but the recording is not a PyTorch snapshot.
    #[error("has no devices to choose from: only a PyTorch snapshot has several; do not select one")]
    NoDevices,
    /// The records of a trace exceed the memory limit.
    #[error("takes more than {} of memory: raise the limit if it is a trace that you trust", Amount(*limit_bytes))]
    TooLarge {
        /// The limit.
        limit_bytes: u64,
    },
}

impl ImportError {
    /// Creates an error of this kind. For callers that open the source themselves.
    pub fn new(path: Option<&Path>, kind: impl Into<ImportErrorKind>) -> Self {
        ImportError { path: path.map(Path::to_path_buf), kind: Box::new(kind.into()) }
    }

    /// Sets the path. The error message begins with it.
    #[must_use]
    pub fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// Returns the path of the file, if known.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the cause.
    pub fn kind(&self) -> &ImportErrorKind {
        &self.kind
    }
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{}: {}", path.display(), self.kind),
            None => write!(f, "the recording: {}", self.kind),
        }
    }
}

impl Error for ImportError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.kind.source()
    }
}

// An I/O error deep inside a reader may come from the decompressor. In this case, the cause is the compressed data, not the line or opcode
// at which the reader stopped.

impl From<io::Error> for ImportErrorKind {
    fn from(error: io::Error) -> Self {
        CompressionError::of(&error).map_or(ImportErrorKind::Read(error), ImportErrorKind::Compression)
    }
}

impl From<SnapshotError> for ImportErrorKind {
    fn from(error: SnapshotError) -> Self {
        match &error {
            SnapshotError::Pickle(PickleError::Read { source, .. }) => CompressionError::of(source),
            _ => None,
        }
        .map_or(ImportErrorKind::Snapshot(error), ImportErrorKind::Compression)
    }
}

impl From<RmmError> for ImportErrorKind {
    fn from(error: RmmError) -> Self {
        match &error {
            RmmError::Read { source, .. } => CompressionError::of(source),
            _ => None,
        }
        .map_or(ImportErrorKind::Rmm(error), ImportErrorKind::Compression)
    }
}

impl From<TraceError> for ImportErrorKind {
    fn from(error: TraceError) -> Self {
        match &error {
            TraceError::Line(LineError::Io { source, .. }) => CompressionError::of(source),
            _ => None,
        }
        .map_or(ImportErrorKind::Trace(error), ImportErrorKind::Compression)
    }
}
