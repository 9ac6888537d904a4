//! Errors in a snapshot.

use std::fmt;

use symmalloc_core::units::{Amount, SEGMENT_BYTES_MAX};

use crate::pickle::{PickleError, Value};

/// Kind of an unexpected value in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Found {
    /// No value: the field is missing.
    Missing,
    /// Text.
    Text,
    /// A number.
    Number,
    /// A negative number, or one of more than 64 bits.
    NumberOutOfRange,
    /// A dict.
    Dict,
    /// A list.
    List,
    /// A list that contains items of an unexpected kind.
    ListOfOthers,
    /// `None`, a boolean, a float, bytes or a set.
    Other,
}

impl Found {
    pub(crate) fn of(value: Option<Value>) -> Self {
        match value {
            None => Found::Missing,
            Some(Value::Word(_) | Value::Text(_) | Value::UnusedText) => Found::Text,
            Some(Value::Integer(_)) => Found::Number,
            Some(Value::OutOfRange) => Found::NumberOutOfRange,
            Some(Value::Dict(_)) => Found::Dict,
            Some(Value::List(_) | Value::Pair(..)) => Found::List,
            Some(Value::Nothing | Value::True) => Found::Other,
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Found::Missing => "missing",
            Found::Text => "text",
            Found::Number => "a number",
            Found::NumberOutOfRange => "negative, or a number of more than 64 bits",
            Found::Dict => "a dict",
            Found::List => "a list",
            Found::ListOfOthers => "a list of other things",
            Found::Other => "None, a boolean, a float, bytes or a set",
        })
    }
}

/// Error converting a PyTorch memory snapshot to ops.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The pickle cannot be read.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// The pickle does not contain a snapshot.
    #[error(
        "the pickle is not a memory snapshot: it has no list 'device_traces' of lists; save one with \
         torch.cuda.memory._dump_snapshot of PyTorch 2.0 or later"
    )]
    NotASnapshot,
    /// The snapshot contains no recorded history.
    #[error(
        "the snapshot has {devices} devices, but no recorded allocation: call \
         torch.cuda.memory._record_memory_history() before the job runs"
    )]
    NothingRecorded {
        /// Number of devices.
        devices: usize,
    },
    /// The snapshot shows several devices, and the caller chose none.
    #[error("the snapshot shows several devices ({}): choose the one to read", Devices(devices))]
    SeveralDevices {
        /// The contents of the snapshot, by device.
        devices: Vec<DeviceContents>,
    },
    /// The requested device was not recorded.
    #[error("the snapshot shows nothing of device {device}; it has {}", Devices(devices))]
    NoSuchTrace {
        /// The requested device.
        device: usize,
        /// The contents of the snapshot, by device.
        devices: Vec<DeviceContents>,
    },
    /// A trace contains an item that is not a trace entry.
    #[error("the trace of device {device} holds something that is not a trace entry: the snapshot is damaged")]
    NotAnEntry {
        /// The device.
        device: usize,
    },
    /// A field of a trace entry is missing or has the wrong type.
    #[error(
        "'{field}' of entry {entry} of device {device} (counted from 0) is {found}, but must be {}: the snapshot is damaged",
        if *field == "action" { "text" } else { "a number" }
    )]
    Field {
        /// The device.
        device: usize,
        /// The entry's position in the trace, from 0.
        entry: u64,
        /// The field.
        field: &'static str,
        /// The kind of value found.
        found: Found,
    },
    /// `segments` is not a list of dicts.
    #[error("'segments' is {found}, but must be a list of segments, which are dicts: the snapshot is damaged")]
    Segments {
        /// The kind of value found.
        found: Found,
    },
    /// A field of a segment or of one of its blocks is missing or has the wrong type.
    #[error(
        "'{field}' of segment {segment} (counted from 0) or of one of its blocks is {found}, but must be {}: the snapshot is \
         damaged",
        if *field == "blocks" { "a list of dicts" } else { "a number" }
    )]
    SegmentField {
        /// The segment's position in the list, from 0.
        segment: u64,
        /// The field.
        field: &'static str,
        /// The kind of value found.
        found: Found,
    },
    /// An allocation is larger than any device.
    #[error(
        "entry {entry} of device {device} (counted from 0) allocates {}, but the maximum is {}: the snapshot is \
         damaged",
        Amount(*size_bytes),
        Amount(SEGMENT_BYTES_MAX)
    )]
    Size {
        /// The device.
        device: usize,
        /// The entry's position in the trace, from 0.
        entry: u64,
        /// Size of the allocation in bytes.
        size_bytes: u64,
    },
    /// The trace has more streams than there are ids.
    #[error("entry {entry} of device {device} uses stream number 65,536; a trace can hold 65,535")]
    TooManyStreams {
        /// The device.
        device: usize,
        /// The entry's position in the trace, from 0.
        entry: u64,
    },
    /// The Python stacks exceed the memory limit.
    #[error(
        "the Python stacks up to entry {entry} of device {device} take more than {} of memory: raise the limit if you trust \
         the file",
        Amount(*limit_bytes)
    )]
    StacksTooLarge {
        /// The device.
        device: usize,
        /// The entry's position in the trace, from 0.
        entry: u64,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The records of the trace exceed the memory limit.
    #[error(
        "the ops up to entry {entry} of device {device} take more than {} of memory: raise the limit if you trust the \
         file",
        Amount(*limit_bytes)
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

/// Maximum number of devices listed in a message: more than any machine has.
const DEVICES_LISTED_MAX: usize = 64;

/// The contents of a snapshot for one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceContents {
    /// Length of the device's trace, in entries.
    pub entries: u64,
    /// Bytes of the allocations that are live at the end.
    pub live_bytes: u64,
}

/// The devices that a snapshot shows, formatted for an error message.
struct Devices<'a>(&'a [DeviceContents]);

impl fmt::Display for Devices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let shown = self.0.iter().enumerate().filter(|(_, contents)| **contents != DeviceContents::default());
        for (device, DeviceContents { entries, live_bytes }) in shown.take(DEVICES_LISTED_MAX) {
            write!(f, "{separator}device {device}: ")?;
            separator = ", ";
            match entries {
                0 => write!(f, "no history")?,
                1 => write!(f, "1 entry")?,
                entries => write!(f, "{entries} entries")?,
            }
            write!(f, " and {} live", Amount(*live_bytes))?;
        }
        if separator.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}
