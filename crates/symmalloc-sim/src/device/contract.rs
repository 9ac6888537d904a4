//! The rules of the backend's contract, and the report of a violation.

use super::fault::{Call, Fault};
use std::fmt;
use symmalloc_core::backend::BackendError;

/// Reports a violation of the contract by panicking with the rule, or returns an error if the thread is unwinding.
#[track_caller]
pub(super) fn violation(call: Call, rule: &str, what: fmt::Arguments<'_>) -> BackendError {
    if !std::thread::panicking() {
        panic!("violation of the backend contract in `{call}`: {rule} ({what})");
    }
    Fault::Refused.of(call)
}

pub(super) const ALIGNED: &str = "offsets and sizes must be nonzero multiples of the granularity";
pub(super) const RESERVED: &str = "a range must be one that `reserve` returned and that is not released";
pub(super) const CARVED: &str =
    "parts of a space must lie inside of it, must be disjoint, and must be released before the space";
pub(super) const INSIDE: &str = "mapped and unmapped bytes must lie inside their range";
pub(super) const MAPPED_ONCE: &str = "a granule must be mapped at most once";
pub(super) const MAPPED: &str = "only mapped bytes may be unmapped or used";
pub(super) const UNMAPPED_FIRST: &str = "a range must be unmapped completely before it is released";
pub(super) const PIECE: &str = "the source of an alias must be mapped and must not be an alias";
pub(super) const ALIASES_FIRST: &str = "all aliases must be unmapped before their memory";
pub(super) const SYNCHRONIZED_FIRST: &str =
    "every stream that may still use the bytes must be synchronized before they are unmapped";
pub(super) const ORDERED: &str = "bytes must not be filled or compared while another stream may use them";
pub(super) const NOT_CAPTURED: &str = "nothing must be filled or compared on a stream that is being captured";
pub(super) const QUIET: &str = "bytes must not be in use by a stream while they are copied";
pub(super) const IMAGE: &str =
    "parts must be sorted by offset, must not overlap, and must lie in an image that is not discarded";
pub(super) const LIVE_EVENT: &str = "an event must be recycled once and not used afterward";
