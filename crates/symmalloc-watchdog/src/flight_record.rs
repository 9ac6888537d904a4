//! What a process knew of its communicators, as a file: the last collectives of each, and how far it was.
//!
//! A file is JSON, version 1. Nothing in it decides anything: it is read by people and by [`Findings`](crate::Findings).

use crate::ids::{CommunicatorId, Progress};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The version that is written, and the only one that is read.
const VERSION: u32 = 1;

/// A larger file is none of ours.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// What one process knew of its communicators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The version of the format.
    #[serde(rename = "symmalloc_flight_record")]
    version: u32,
    /// The machine's name; empty where the system does not say.
    pub host: String,
    /// The process's number on its machine.
    pub process: u32,
    /// Why it was written.
    pub reason: String,
    /// In the order in which they were connected.
    pub communicators: Vec<CommunicatorRecord>,
}

/// A communicator as one rank saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommunicatorRecord {
    /// Equal on all its ranks.
    pub id: CommunicatorId,
    /// What the program calls it.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// What became of it: "ready", "aborted".
    pub state: String,
    /// The error that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// How far this rank was.
    pub progress: Progress,
    /// What this rank knew of the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerRecord>,
    /// The last collectives, oldest first.
    pub collectives: Vec<CollectiveRecord>,
}

/// Another rank as this one saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerRecord {
    /// The rank.
    pub rank: u32,
    /// How far it was.
    pub progress: Progress,
    /// What it was doing: "alive", "silent for 4,250 ms", "gone: its process ended".
    pub condition: String,
}

/// What all ranks must give alike to one collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signature {
    /// NCCL's name for it: "ncclAllReduce". Of what the program announced, the program's.
    pub kind: String,
    /// Elements, as NCCL counts them; `None` where ranks may differ, as in an all-to-all-v.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elements: Option<u64>,
    /// The elements' type: "float32".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_type: Option<String>,
    /// Reduction or root: "sum", "root 3".
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

/// One collective as one rank saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveRecord {
    /// Its number on the communicator, from 1: the n-th of one rank meets the n-th of every other. Of a send or receive, the number
    /// of the last collective before it.
    pub number: u64,
    /// Whether it is a send or receive, which other ranks need not call.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_point_to_point: bool,
    /// What all ranks must give alike.
    #[serde(flatten)]
    pub signature: Signature,
    /// The stream that it was given to, by number: the first that was used with the communicator is 0. `None` for what has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<u32>,
    /// How far it was.
    pub state: CollectiveState,
    /// Milliseconds since it was submitted.
    pub age_ms: u64,
}

/// How far a collective is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CollectiveState {
    /// The host gives it to NCCL: the call has not returned.
    Submitting,
    /// In its stream, behind other collectives of this communicator.
    Submitted,
    /// The next in its stream: it runs, or waits for other work of the stream.
    Running,
    /// Done on the device.
    Finished,
    /// Part of a graph that was captured: it runs when the graph does.
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

/// Why a flight record cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FlightRecordError {
    /// The file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is no flight record.
    #[error("{} is no flight record: {source}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where it stops being one.
        source: serde_json::Error,
    },
    /// The file is larger than any flight record.
    #[error("{} has more than {FILE_BYTES_MAX} bytes, which no flight record has", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// No folder is safe to write to.
    #[error("no folder for flight records: {0}; or set SYMMALLOC_FLIGHT_RECORDS")]
    Folder(#[from] symmalloc_files::PrivateFolderError),
    /// The file is of another version.
    #[error("{} is a flight record of version {version}, and this program reads version {VERSION}", .path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

impl FlightRecord {
    /// A record of this process.
    pub fn new(host: String, reason: String, communicators: Vec<CommunicatorRecord>) -> Self {
        FlightRecord { version: VERSION, host, process: std::process::id(), reason, communicators }
    }

    /// The record as text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and numbers alone")
    }

    /// Writes it to a file, whole or not at all: an older record of that name stays until the new one is complete. Only this user
    /// can read the file, and a symbolic link of that name is replaced.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), FlightRecordError> {
        let written = symmalloc_files::write_whole(path, self.to_json().as_bytes());
        written.map_err(|source| FlightRecordError::Io { path: path.to_owned(), source })
    }

    /// Reads one from a file.
    ///
    /// # Errors
    /// When the file cannot be read, or is no flight record of this version.
    pub fn read(path: &Path) -> Result<Self, FlightRecordError> {
        let file = File::open(path).map_err(|source| FlightRecordError::Io { path: path.to_owned(), source })?;
        Self::from_reader(file, path)
    }

    /// Reads one from anything; errors call it `path`. No more than 64 MiB are read.
    ///
    /// # Errors
    /// As [`read`](Self::read).
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

/// What every version begins with.
#[derive(Deserialize)]
struct Head {
    #[serde(rename = "symmalloc_flight_record")]
    version: u32,
}
