//! Errors in the text of a configuration.
//!
//! Every error contains the byte offset of the problem in the text, so that a program can point there.

use super::keys;
use super::reason::KeyRefusal;
use crate::config::nearest::did_you_mean;
use crate::config::policy::ConfigError;
use crate::types::base::BaseError;

/// An error returned for a text that is not a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigTextError {
    /// No key has this name.
    #[error("byte {offset}: unknown key{}; the keys are {}", did_you_mean(*nearest), keys::names().collect::<Vec<_>>().join(", "))]
    UnknownKey {
        /// Offset of the key.
        offset: usize,
        /// Length of the key in bytes.
        bytes: usize,
        /// The key that was probably meant.
        nearest: Option<&'static str>,
    },
    /// The key is known, but cannot be used here.
    #[error("byte {offset}: {key} is refused: {reason}")]
    Refused {
        /// Offset of the key.
        offset: usize,
        /// The key.
        key: &'static str,
        /// The reason.
        reason: KeyRefusal,
    },
    /// The key is given twice, possibly in different units.
    #[error("byte {offset}: {key} is already set at byte {first}; keep one of the two")]
    Duplicate {
        /// Offset of the second key.
        offset: usize,
        /// The key.
        key: &'static str,
        /// Offset of the first key.
        first: usize,
    },
    /// The punctuation is not `key:value,key:value`.
    #[error("byte {offset}: expected {expected}")]
    Expected {
        /// Offset of the unexpected text.
        offset: usize,
        /// The expected text.
        expected: &'static str,
    },
    /// The key does not accept the value.
    #[error("byte {offset}: {key} must be {allowed}")]
    Value {
        /// Offset of the value.
        offset: usize,
        /// The key.
        key: &'static str,
        /// The accepted values.
        allowed: &'static str,
    },
    /// The value is not a valid base.
    #[error("byte {offset}: {source}")]
    Base {
        /// Offset of the value.
        offset: usize,
        /// The reason.
        source: Box<BaseError>,
    },
    /// The value is a number too large to hold.
    #[error("byte {offset}: {key} is too large; the largest number here is {max}")]
    NumberTooLarge {
        /// Offset of the number.
        offset: usize,
        /// The key.
        key: &'static str,
        /// The largest number.
        max: u64,
    },
    /// The key applies only to a different kind of segment.
    #[error("byte {offset}: {key} applies only to segments:{segments}; add that, or remove the key")]
    WrongSegments {
        /// Offset of the key.
        offset: usize,
        /// The key.
        key: &'static str,
        /// The segments to which the key applies.
        segments: &'static str,
    },
    /// `segments` and PyTorch's `expandable_segments` contradict each other.
    #[error("byte {offset}: expandable_segments contradicts segments; remove it")]
    Contradiction {
        /// Offset of `expandable_segments`.
        offset: usize,
    },
    /// Reserved segments need a size.
    #[error("byte {offset}: segments:reserved needs segment_mb (or segment_bytes), the size of each heap's segment")]
    MissingSegmentSize {
        /// Offset of `segments`.
        offset: usize,
    },
    /// The value is out of its range, or not a multiple of the required unit.
    #[error("byte {offset}: {source}")]
    OutOfRange {
        /// Offset of the key.
        offset: usize,
        /// The value and its range, in bytes.
        source: ConfigError,
    },
}
