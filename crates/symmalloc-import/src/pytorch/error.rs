//! What can be wrong with a snapshot.

use std::fmt;

use crate::pickle::PickleError;

/// Why a PyTorch memory snapshot could not be made into ops.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The pickle cannot be read.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// A pickle, but of something else.
    #[error(
        "the pickle is no memory snapshot: it has no list 'device_traces' of lists; save one with \
         torch.cuda.memory._dump_snapshot of PyTorch 2.0 or later"
    )]
    NotASnapshot,
    /// A snapshot taken without a recorded history.
    #[error(
        "the snapshot has {devices} devices, but no recorded allocation: call \
         torch.cuda.memory._record_memory_history() before the job runs"
    )]
    NothingRecorded {
        /// How many devices there are.
        devices: usize,
    },
    /// More than one device was recorded and none was chosen.
    #[error("the snapshot holds the traces of several devices ({}): say which one to read", Devices(entries))]
    SeveralDevices {
        /// The length of each device's trace, in entries.
        entries: Vec<u64>,
    },
    /// The device asked for was not recorded.
    #[error("the snapshot has no trace of device {device}; it has {}", Devices(entries))]
    NoSuchTrace {
        /// The device asked for.
        device: usize,
        /// The length of each device's trace, in entries.
        entries: Vec<u64>,
    },
    /// A trace holds something that is not a trace entry.
    #[error("the trace of device {device} holds something that is not a trace entry: the snapshot is damaged")]
    NotAnEntry {
        /// The device.
        device: usize,
    },
    /// A field of a trace entry is missing, or is not what it must be.
    #[error("entry {entry} of device {device} (counted from 0) has no valid '{field}': the snapshot is damaged")]
    Field {
        /// The device.
        device: usize,
        /// The entry's position in the trace, from 0.
        entry: u64,
        /// The field.
        field: &'static str,
    },
    /// More streams than ids.
    #[error("entry {entry} of device {device} uses stream number 65,537; a trace has room for 65,536")]
    TooManyStreams {
        /// The device.
        device: usize,
        /// The entry's position in the trace, from 0.
        entry: u64,
    },
    /// The records made of the trace take more memory than the caller allows.
    #[error(
        "the ops up to entry {entry} of device {device} take more than {limit_bytes} bytes of memory: raise the limit \
         if you trust the file"
    )]
    TooLarge {
        /// The device.
        device: usize,
        /// The entry's position in the trace, from 0.
        entry: u64,
        /// The limit.
        limit_bytes: u64,
    },
}

/// How many devices a message lists: more than any machine has.
const DEVICES_LISTED_MAX: usize = 64;

/// Devices with a trace, for people.
struct Devices<'a>(&'a [u64]);

impl fmt::Display for Devices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (device, entries) in self.0.iter().enumerate().filter(|(_, entries)| **entries > 0).take(DEVICES_LISTED_MAX)
        {
            write!(f, "{separator}device {device}: {entries} entries")?;
            separator = ", ";
        }
        if separator.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}
