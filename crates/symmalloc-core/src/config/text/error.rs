//! What can be wrong with the text of a configuration.
//!
//! Every error names the byte of the text at which it was found, counted from 0, so that a program can point there.

use super::keys;
use super::reason::KeyRefusal;
use crate::config::nearest::did_you_mean;
use crate::config::policy::ConfigError;

/// Why a text is not a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigTextError {
    /// No key has this name.
    #[error("byte {offset}: unknown key{}; the keys are {}", did_you_mean(*nearest), keys::names().collect::<Vec<_>>().join(", "))]
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
        reason: KeyRefusal,
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
