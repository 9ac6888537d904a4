//! The keys: their spellings, values and scopes.

use super::reason::{IgnoredReason, KeyRefusal};
use crate::config::nearest::nearest;
use crate::config::policy::StreamPolicy;
use crate::types::units::MIB;

/// A key.
#[derive(Debug)]
pub(super) struct Key {
    /// The name without its unit, as it appears in errors of values out of range.
    pub(super) name: &'static str,
    /// Each spelling, with the size of its unit.
    spellings: &'static [(&'static str, u64)],
    pub(super) takes: Takes,
    pub(super) of: Of,
}

/// The values that a key accepts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Takes {
    /// A number of bytes, or of MiB.
    Bytes,
    /// A 32-bit number.
    Count,
    /// `true` or `false`, also as PyTorch spells them.
    Flag,
    /// One of these words. The string lists them for error messages.
    Word(&'static [&'static str], &'static str),
    /// Any text, which the builder checks.
    Text,
    /// `slot:N`, or an address.
    Base,
    /// PyTorch's `roundup_power2_divisions`.
    Divisions,
    /// A list of debugging options.
    Debug,
    /// Anything; it is not parsed.
    Anything,
}

/// The scope of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    /// A pool.
    Pool,
    /// A pool with these segments.
    Segments(usize),
    /// The whole allocator: a pool's configuration cannot contain it.
    Allocator,
    /// None: the key belongs to PyTorch and has no meaning here.
    Nothing(IgnoredReason),
    /// None: the key belongs to PyTorch and is always refused.
    Never(KeyRefusal),
}

pub(super) const FIXED: usize = 0;
pub(super) const EXPANDABLE: usize = 1;
pub(super) const RESERVED: usize = 2;

/// The words of `segments`, in the order of the three constants above.
pub(super) const SEGMENTS: &[&str] = &["fixed", "expandable", "reserved"];
// The words of the other keys, in the order of their values.
pub(super) const STREAMS: &[&str] =
    &[StreamPolicy::Separate.word(), StreamPolicy::Grouped.word(), StreamPolicy::Shared.word()];
pub(super) const RECLAIM: &[&str] = &["never", "heap", "pool"];
pub(super) const PLAN: &[&str] = &["off", "learn"];
pub(super) const POINTER_LOOKUP: &[&str] = &["off", "exact"];
/// The second word is refused.
const BACKENDS: &[&str] = &["native", "cudaMallocAsync"];

macro_rules! key {
    ($name:literal, Bytes, $of:expr) => {
        Key {
            name: $name,
            spellings: &[(concat!($name, "_mb"), MIB), (concat!($name, "_bytes"), 1)],
            takes: Takes::Bytes,
            of: $of,
        }
    };
    ($name:literal, $takes:expr, $of:expr) => {
        Key { name: $name, spellings: &[($name, 1)], takes: $takes, of: $of }
    };
}

/// All keys, including those of PyTorch 2.14.
static KEYS: [Key; 43] = {
    use {Of::*, Takes::*};
    const DRIVER: Of = Nothing(IgnoredReason::NotPlacement);
    const FRACTION: Of = Nothing(IgnoredReason::DeviceFraction);
    [
        key!("segments", Word(SEGMENTS, "fixed, expandable or reserved"), Pool),
        key!("expandable_segments", Flag, Pool),
        key!("segment", Bytes, Segments(RESERVED)),
        key!("range", Bytes, Segments(EXPANDABLE)),
        key!("growth", Bytes, Segments(EXPANDABLE)),
        key!("stitching", Flag, Segments(EXPANDABLE)),
        key!("stitching_granule", Bytes, Segments(EXPANDABLE)),
        key!("stitching_least", Bytes, Segments(EXPANDABLE)),
        key!("stitching_maps", Count, Segments(EXPANDABLE)),
        key!("stitching_aliases", Count, Segments(EXPANDABLE)),
        key!("large_segment_size", Bytes, Segments(FIXED)),
        key!("max_split_size", Bytes, Segments(FIXED)),
        key!("max_non_split_rounding", Bytes, Segments(FIXED)),
        key!("unsplit", Flag, Segments(FIXED)),
        key!("roundup_power2_divisions", Divisions, Pool),
        key!("streams", Word(STREAMS, "separate, grouped or shared"), Pool),
        key!("symmetric", Flag, Pool),
        key!("limit", Bytes, Pool),
        key!("release_threshold", Bytes, Pool),
        key!("reclaim", Word(RECLAIM, "never, heap or pool"), Pool),
        key!("plan", Word(PLAN, "off or learn"), Pool),
        key!("tag", Text, Pool),
        key!("base", Base, Pool),
        key!("debug", Debug, Pool),
        key!("backend", Word(BACKENDS, "native"), Pool),
        key!("total_limit", Bytes, Allocator),
        key!("retries_max", Count, Allocator),
        key!("pointer_lookup", Word(POINTER_LOOKUP, "off or exact"), Allocator),
        key!("history_ops", Count, Allocator),
        key!("garbage_collection_threshold", Anything, Never(KeyRefusal::LocalAge)),
        key!("per_process_memory_fraction", Anything, FRACTION),
        key!("throw_on_cudamalloc_oom", Anything, Nothing(IgnoredReason::DeviceTotal)),
        key!("expandable_segments_reserve", Anything, FRACTION),
        key!("expandable_segments_reserve_by_class", Anything, FRACTION),
        key!("graph_capture_record_stream_reuse", Anything, DRIVER),
        key!("release_lock_on_cudamalloc", Anything, DRIVER),
        key!("release_lock_on_hipmalloc", Anything, DRIVER),
        key!("pinned_use_cuda_host_register", Anything, DRIVER),
        key!("pinned_use_hip_host_register", Anything, DRIVER),
        key!("pinned_num_register_threads", Anything, DRIVER),
        key!("pinned_use_background_threads", Anything, DRIVER),
        key!("pinned_reserve_segment_size_mb", Anything, DRIVER),
        key!("pinned_free_catch_all", Anything, DRIVER),
    ]
};

/// Returns `true` if a key has this name.
pub(super) fn is_name(name: &str) -> bool {
    KEYS.iter().any(|key| key.name == name)
}

/// Iterates over all spellings with their keys and units.
fn spellings() -> impl Iterator<Item = (&'static Key, &'static str, u64)> {
    KEYS.iter().flat_map(|key| key.spellings.iter().map(move |(spelling, unit)| (key, *spelling, *unit)))
}

/// Returns the key with this spelling, the spelling, and its unit.
pub(super) fn find(name: &str) -> Option<(&'static Key, &'static str, u64)> {
    spellings().find(|(_, spelling, _)| *spelling == name)
}

/// Returns `true` if the value of this key may contain a colon.
pub(super) fn takes_colon(name: &str) -> bool {
    find(name).is_some_and(|(key, ..)| matches!(key.takes, Takes::Base))
}

/// Returns the spelling nearest to a misspelled one.
pub(super) fn nearest_name(name: &str) -> Option<&'static str> {
    nearest(name, spellings().map(|(_, spelling, _)| spelling))
}

/// Iterates over the spellings of all keys that have a meaning here.
pub fn names() -> impl Iterator<Item = &'static str> {
    let is_meant = |of: Of| !matches!(of, Of::Nothing(_) | Of::Never(_));
    spellings().filter(move |(key, ..)| is_meant(key.of)).map(|(_, spelling, _)| spelling)
}
