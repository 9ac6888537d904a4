//! The argument that names a byte of device memory.

use std::fmt;
use std::str::FromStr;
use symmalloc_core::SegmentId;

/// An address in the recorded process, or a place that is equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Address(u64),
    Place { segment: SegmentId, offset_bytes: u64 },
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected an address as in 0x7f1234567000, or SEGMENT@OFFSET as in 3@4096";
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        let parsed = match text.split_once('@') {
            Some((segment, offset)) => segment
                .parse()
                .ok()
                .zip(number(offset).ok())
                .map(|(segment, offset_bytes)| Location::Place { segment: SegmentId(segment), offset_bytes }),
            None => number(text).ok().map(Location::Address),
        };
        parsed.ok_or_else(|| expected.to_owned())
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Address(address) => write!(f, "{address:#x}"),
            Location::Place { segment, offset_bytes } => write!(f, "{}@{offset_bytes}", segment.0),
        }
    }
}
