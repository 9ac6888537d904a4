//! What can be wrong with the text of a configuration.
//!
//! Every error names the byte of the text at which it was found, counted from 0, so that a program can point there.

use std::fmt;

use super::keys;
use crate::config::ConfigError;
use crate::nearest::DidYouMean;

/// Why a text is not a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigTextError {
    /// No key has this name.
    #[error("byte {offset}: unknown key{}; the keys are {}", DidYouMean(*nearest), KnownKeys)]
    UnknownKey {
        /// Where the key starts.
        offset: usize,
        /// Length of the key in bytes.
        bytes: usize,
        /// The key that was probably meant.
        nearest: Option<&'static str>,
    },
    /// The key is known, and refused for a reason.
    #[error("byte {offset}: {key} is refused: {reason}")]
    Refused {
        /// Where the key starts.
        offset: usize,
        /// The key.
        key: &'static str,
        /// Why.
        reason: Refusal,
    },
    /// The key is stated twice, perhaps in another unit.
    #[error("byte {offset}: {key} is stated already at byte {first}; keep one of them")]
    Duplicate {
        /// Where the key starts the second time.
        offset: usize,
        /// The key.
        key: &'static str,
        /// Where it starts the first time.
        first: usize,
    },
    /// The punctuation is not `key:value,key:value`.
    #[error("byte {offset}: expected {expected}")]
    Expected {
        /// Where.
        offset: usize,
        /// What must stand there.
        expected: &'static str,
    },
    /// The value is none that the key takes.
    #[error("byte {offset}: {key} must be {allowed}")]
    Value {
        /// Where the value starts.
        offset: usize,
        /// The key.
        key: &'static str,
        /// What the key takes.
        allowed: &'static str,
    },
    /// The value is a number too large to hold.
    #[error("byte {offset}: {key} is too large; the largest number here is {max}")]
    NumberTooLarge {
        /// Where the number starts.
        offset: usize,
        /// The key.
        key: &'static str,
        /// The largest number.
        max: u64,
    },
    /// The key means something for other segments only.
    #[error("byte {offset}: {key} has a meaning for segments:{segments} only; state that, or remove the key")]
    OtherSegments {
        /// Where the key starts.
        offset: usize,
        /// The key.
        key: &'static str,
        /// The segments that have this key.
        segments: &'static str,
    },
    /// `segments` and PyTorch's `expandable_segments` contradict each other.
    #[error("byte {offset}: expandable_segments contradicts segments; remove it")]
    Contradiction {
        /// Where `expandable_segments` starts.
        offset: usize,
    },
    /// Reserved segments need a size.
    #[error("byte {offset}: segments:reserved needs segment_mb (or segment_bytes), the size of each heap's segment")]
    MissingSegmentSize {
        /// Where `segments` starts.
        offset: usize,
    },
    /// The value is out of its range, or not a multiple of what it must be.
    #[error("byte {offset}: {source}")]
    OutOfRange {
        /// Where the key starts.
        offset: usize,
        /// The value and its range, in bytes.
        source: ConfigError,
    },
}

/// Why a known key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The key would make ranks differ.
    #[error(
        "it frees by each block's local age and by what the device reports, so ranks would differ; use release_threshold_mb"
    )]
    LocalAge,
    /// The value asks for the driver's own allocator.
    #[error("cudaMallocAsync is another allocator, whose addresses the driver chooses; use backend:native")]
    OtherAllocator,
    /// The key is PyTorch's and has no effect here.
    #[error("{0}")]
    NoEffect(IgnoredReason),
    /// The key belongs to the whole allocator.
    #[error("it holds for the whole allocator; state it in the allocator's configuration, not in a pool's")]
    WholeAllocator,
}

/// A key of PyTorch's that was read and has no effect here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset}: {key} has no effect: {reason}")]
#[non_exhaustive]
pub struct IgnoredKey {
    /// Where the key starts.
    pub offset: usize,
    /// The key.
    pub key: &'static str,
    /// Why it has no effect.
    pub reason: IgnoredReason,
}

/// Why a key of PyTorch's has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IgnoredReason {
    /// It configures PyTorch's driver calls, locks or host memory.
    #[error("it configures driver calls, locks or host memory, none of which decides a placement")]
    NotPlacement,
    /// It is a share of what the device has, which may differ from rank to rank.
    #[error(
        "it is a share of the device's memory, which is not the same everywhere; state bytes with total_limit_mb or range_mb"
    )]
    DeviceFraction,
    /// It is for other segments than the ones chosen.
    #[error("it is for fixed segments, but expandable ones are chosen")]
    OtherSegments,
}

/// The names of all keys that have a meaning here, separated by commas.
struct KnownKeys;

impl fmt::Display for KnownKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, name) in keys::names().enumerate() {
            write!(f, "{}{name}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
