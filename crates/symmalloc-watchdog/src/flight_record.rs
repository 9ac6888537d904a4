//! Flight records: files that contain a process's view of its communicators, including the last collectives and the progress of each
//! communicator.
//!
//! A file contains JSON, in version 1 of the format. It is read by people and by [`Findings`](crate::Findings); the library itself never
//! bases a decision on it.

use crate::ids::{CommunicatorId, Progress};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The format version that this crate writes, and the only one that it reads.
const VERSION: u32 = 1;

/// Size limit of a file: a larger one is not a flight record.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// One process's view of its communicators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The version of the format.
    #[serde(rename = "symmalloc_flight_record")]
    version: u32,
    /// The machine's name; empty if the system does not provide one.
    pub host: String,
    /// The process id on its machine.
    pub process: u32,
    /// The event that caused the record to be written.
    pub reason: String,
    /// The communicators, in the order in which they were connected.
    pub communicators: Vec<CommunicatorRecord>,
    /// The allocations of the process, live and freed. The watchdog records none, because an allocator's lock may be held by the thread that
    /// is stuck.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<MemoryRecord>,
}

/// An allocation, live or freed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRecord {
    /// The number of the device.
    pub device: u32,
    /// Address of the first byte.
    pub address: u64,
    /// Requested bytes.
    pub size_bytes: u64,
    /// The program's name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The pool.
    pub pool: u32,
    /// The stream for which it was allocated.
    pub stream: u16,
    /// Other streams that use it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub used_by: Vec<u16>,
    /// The number of ops of its heap up to the allocation; `None` if its pool has no debugging options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated_at_op: Option<u64>,
    /// The number of ops of its heap when it was freed; `None` if it is live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed_at_op: Option<u64>,
}

/// A communicator as seen by one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommunicatorRecord {
    /// The communicator's id, equal on all its ranks.
    pub id: CommunicatorId,
    /// The name that the program gave it.
    pub name: String,
    /// The number of the rank that wrote the record.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// The communicator's state, such as "ready" or "aborted".
    pub state: String,
    /// The error that ended the communicator, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// This rank's progress.
    pub progress: Progress,
    /// This rank's view of the other ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerRecord>,
    /// The last collectives, oldest first.
    pub collectives: Vec<CollectiveRecord>,
}

/// Another rank as seen by this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerRecord {
    /// The other rank's number in the communicator.
    pub rank: u32,
    /// The rank's progress.
    pub progress: Progress,
    /// The rank's condition, such as "alive", "silent for 4,250 ms" or "gone: its process ended".
    pub condition: String,
}

/// The arguments of a collective that must be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signature {
    /// NCCL's name of the call, such as "ncclAllReduce"; for a collective that the program announced, the name that the program gave it.
    pub kind: String,
    /// Number of elements as NCCL counts them; `None` if ranks may differ, as in an all-to-all-v.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elements: Option<u64>,
    /// The type of the elements, such as "float32".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_type: Option<String>,
    /// The reduction or the root, such as "sum" or "root 3".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind)?;
        if let Some(elements) = self.elements {
            write!(f, " of {elements}")?;
        }
        for word in [&self.data_type, &self.detail].into_iter().flatten() {
            write!(f, " {word}")?;
        }
        Ok(())
    }
}

/// One collective as seen by one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveRecord {
    /// Number of the collective on the communicator, from 1: the n-th collective of one rank matches the n-th of every other rank. A send
    /// or receive has the number of the last collective before it.
    pub number: u64,
    /// `true` for a send or receive, which other ranks need not call.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_point_to_point: bool,
    /// The arguments that must be equal on all ranks.
    #[serde(flatten)]
    pub signature: Signature,
    /// The number of the collective's stream; `None` if the collective has no stream. Streams are numbered from 0, in the order of their
    /// first use with the communicator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<u32>,
    /// The collective's state.
    pub state: CollectiveState,
    /// Milliseconds since the collective was submitted.
    pub age_ms: u64,
}

/// The progress of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CollectiveState {
    /// The host is submitting it to NCCL: the call has not returned.
    Submitting,
    /// In its stream, queued after other collectives of this communicator.
    Submitted,
    /// Next in its stream: it runs, or waits for other work in the stream.
    Running,
    /// Finished on the device.
    Finished,
    /// Captured as part of a graph: it runs when the graph does.
    Captured,
}

impl fmt::Display for CollectiveState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CollectiveState::Submitting => "being submitted",
            CollectiveState::Submitted => "submitted",
            CollectiveState::Running => "running",
            CollectiveState::Finished => "finished",
            CollectiveState::Captured => "captured",
        })
    }
}

/// An error returned when reading or writing a flight record.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FlightRecordError {
    /// The file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not a flight record.
    #[error("{} is not a flight record: {source}", .path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// The first syntax or format error.
        source: serde_json::Error,
    },
    /// The file is larger than any flight record.
    #[error("{} exceeds {FILE_BYTES_MAX} bytes, the limit for a flight record", .path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
    /// No folder for flight records is safe to write to.
    #[error("no folder for flight records: {0}; or set SYMMALLOC_FLIGHT_RECORDS")]
    Folder(#[from] symmalloc_files::PrivateFolderError),
    /// The file has an unsupported version.
    #[error("{} is a flight record of version {version}, but this program reads only version {VERSION}", .path.display())]
    Version {
        /// Path of the file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

impl FlightRecord {
    /// Creates a record of this process.
    pub fn new(host: String, reason: String, communicators: Vec<CommunicatorRecord>) -> Self {
        FlightRecord { version: VERSION, host, process: std::process::id(), reason, communicators, memory: Vec::new() }
    }

    /// Returns the record as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a flight record contains only strings and numbers")
    }

    /// Writes the record to a file atomically: an older record with the same name remains until the new one is complete. Only the current
    /// user can read the file. A symbolic link of that name is replaced, not followed.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), FlightRecordError> {
        let written = symmalloc_files::write_whole(path, self.to_json().as_bytes());
        written.map_err(|source| FlightRecordError::Io { path: path.to_owned(), source })
    }

    /// Reads a record from a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or is not a flight record of this version.
    pub fn read(path: &Path) -> Result<Self, FlightRecordError> {
        let file = File::open(path).map_err(|source| FlightRecordError::Io { path: path.to_owned(), source })?;
        Self::from_reader(file, path)
    }

    /// Reads a record of at most 64 MiB from a reader. Errors refer to it as `path`.
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn from_reader(reader: impl Read, path: &Path) -> Result<Self, FlightRecordError> {
        let io = |source| FlightRecordError::Io { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        reader.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(FlightRecordError::TooLarge { path: path.to_owned() });
        }
        let malformed = |source| FlightRecordError::Malformed { path: path.to_owned(), source };
        let head: Head = serde_json::from_slice(&bytes).map_err(malformed)?;
        if head.version != VERSION {
            return Err(FlightRecordError::Version { path: path.to_owned(), version: head.version });
        }
        serde_json::from_slice(&bytes).map_err(malformed)
    }
}

/// The part of a file that all versions have in common.
#[derive(Deserialize)]
struct Head {
    #[serde(rename = "symmalloc_flight_record")]
    version: u32,
}
