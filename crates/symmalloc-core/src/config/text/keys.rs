//! The keys: every spelling, what it says, which values it takes and where it may stand.

use super::reason::{IgnoredReason, KeyRefusal};
use crate::config::nearest::nearest;
use crate::types::units::MIB;

/// What a key says, whatever the unit it is spelt in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Segments,
    ExpandableSegments,
    SegmentSize,
    Range,
    Growth,
    Stitching,
    StitchingGranule,
    StitchingLeast,
    StitchingMaps,
    StitchingAliases,
    LargeSegmentSize,
    MaxSplitSize,
    MaxNonSplitRounding,
    RoundupPower2Divisions,
    Streams,
    Symmetric,
    Limit,
    ReleaseThreshold,
    Reclaim,
    Plan,
    Tag,
    Backend,
    TotalLimit,
    RetriesMax,
    PointerLookup,
    HistoryOps,
    /// PyTorch's, and without a meaning here.
    Ignored(IgnoredReason),
    /// PyTorch's, and never taken.
    Refused(KeyRefusal),
}

/// Which values a key takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// A number of so many bytes each.
    Bytes(u64),
    /// A number.
    Count,
    /// `true` or `false`, also as PyTorch spells them.
    Flag,
    /// One of these words; the value is its position.
    Word { words: &'static [&'static str], allowed: &'static str },
    /// A [`Tag`](crate::config::Tag).
    Tag,
    /// PyTorch's `roundup_power2_divisions`.
    Divisions,
    /// Anything; it is not read.
    Anything,
}

/// A spelling of a key.
#[derive(Debug)]
pub(super) struct Spelling {
    pub(super) name: &'static str,
    pub(super) key: Key,
    pub(super) takes: Takes,
}

pub(super) const FIXED: usize = 0;
pub(super) const EXPANDABLE: usize = 1;
pub(super) const RESERVED: usize = 2;

/// The words of `segments`, in the order of the three constants above.
pub(super) const SEGMENTS: &[&str] = &["fixed", "expandable", "reserved"];
/// The words of `streams`.
pub(super) const STREAMS: &[&str] = &["separate", "shared"];
/// The words of `reclaim`.
pub(super) const RECLAIM: &[&str] = &["never", "heap", "pool"];
/// The words of `plan`.
pub(super) const PLAN: &[&str] = &["off", "learn"];
/// The words of `pointer_lookup`.
pub(super) const POINTER_LOOKUP: &[&str] = &["off", "exact"];
/// The words of `backend`; the second is refused.
pub(super) const BACKENDS: &[&str] = &["native", "cudaMallocAsync"];

const fn spelling(name: &'static str, key: Key, takes: Takes) -> Spelling {
    Spelling { name, key, takes }
}

const fn word(words: &'static [&'static str], allowed: &'static str) -> Takes {
    Takes::Word { words, allowed }
}

/// Keys that this library knows a meaning for.
static MEANT: [Spelling; 37] = {
    use Key::*;
    [
        spelling("segments", Segments, word(SEGMENTS, "fixed, expandable or reserved")),
        spelling("expandable_segments", ExpandableSegments, Takes::Flag),
        spelling("segment_mb", SegmentSize, Takes::Bytes(MIB)),
        spelling("segment_bytes", SegmentSize, Takes::Bytes(1)),
        spelling("range_mb", Range, Takes::Bytes(MIB)),
        spelling("range_bytes", Range, Takes::Bytes(1)),
        spelling("growth_mb", Growth, Takes::Bytes(MIB)),
        spelling("growth_bytes", Growth, Takes::Bytes(1)),
        spelling("stitching", Stitching, Takes::Flag),
        spelling("stitching_granule_mb", StitchingGranule, Takes::Bytes(MIB)),
        spelling("stitching_granule_bytes", StitchingGranule, Takes::Bytes(1)),
        spelling("stitching_least_mb", StitchingLeast, Takes::Bytes(MIB)),
        spelling("stitching_least_bytes", StitchingLeast, Takes::Bytes(1)),
        spelling("stitching_maps", StitchingMaps, Takes::Count),
        spelling("stitching_aliases", StitchingAliases, Takes::Count),
        spelling("large_segment_size_mb", LargeSegmentSize, Takes::Bytes(MIB)),
        spelling("large_segment_size_bytes", LargeSegmentSize, Takes::Bytes(1)),
        spelling("max_split_size_mb", MaxSplitSize, Takes::Bytes(MIB)),
        spelling("max_split_size_bytes", MaxSplitSize, Takes::Bytes(1)),
        spelling("max_non_split_rounding_mb", MaxNonSplitRounding, Takes::Bytes(MIB)),
        spelling("max_non_split_rounding_bytes", MaxNonSplitRounding, Takes::Bytes(1)),
        spelling("roundup_power2_divisions", RoundupPower2Divisions, Takes::Divisions),
        spelling("streams", Streams, word(STREAMS, "separate or shared")),
        spelling("symmetric", Symmetric, Takes::Flag),
        spelling("limit_mb", Limit, Takes::Bytes(MIB)),
        spelling("limit_bytes", Limit, Takes::Bytes(1)),
        spelling("release_threshold_mb", ReleaseThreshold, Takes::Bytes(MIB)),
        spelling("release_threshold_bytes", ReleaseThreshold, Takes::Bytes(1)),
        spelling("reclaim", Reclaim, word(RECLAIM, "never, heap or pool")),
        spelling("plan", Plan, word(PLAN, "off or learn")),
        spelling("tag", Tag, Takes::Tag),
        spelling("backend", Backend, word(BACKENDS, "native")),
        spelling("total_limit_mb", TotalLimit, Takes::Bytes(MIB)),
        spelling("total_limit_bytes", TotalLimit, Takes::Bytes(1)),
        spelling("retries_max", RetriesMax, Takes::Count),
        spelling("pointer_lookup", PointerLookup, word(POINTER_LOOKUP, "off or exact")),
        spelling("history_ops", HistoryOps, Takes::Count),
    ]
};

/// PyTorch's other keys, as of its version 2.14.
static FOREIGN: [Spelling; 14] = {
    const DRIVER: Key = Key::Ignored(IgnoredReason::NotPlacement);
    const FRACTION: Key = Key::Ignored(IgnoredReason::DeviceFraction);
    [
        spelling("garbage_collection_threshold", Key::Refused(KeyRefusal::LocalAge), Takes::Anything),
        spelling("per_process_memory_fraction", FRACTION, Takes::Anything),
        spelling("throw_on_cudamalloc_oom", FRACTION, Takes::Anything),
        spelling("expandable_segments_reserve", FRACTION, Takes::Anything),
        spelling("expandable_segments_reserve_by_class", FRACTION, Takes::Anything),
        spelling("graph_capture_record_stream_reuse", DRIVER, Takes::Anything),
        spelling("release_lock_on_cudamalloc", DRIVER, Takes::Anything),
        spelling("release_lock_on_hipmalloc", DRIVER, Takes::Anything),
        spelling("pinned_use_cuda_host_register", DRIVER, Takes::Anything),
        spelling("pinned_use_hip_host_register", DRIVER, Takes::Anything),
        spelling("pinned_num_register_threads", DRIVER, Takes::Anything),
        spelling("pinned_use_background_threads", DRIVER, Takes::Anything),
        spelling("pinned_reserve_segment_size_mb", DRIVER, Takes::Anything),
        spelling("pinned_free_catch_all", DRIVER, Takes::Anything),
    ]
};

/// The spelling of this name.
pub(super) fn find(name: &str) -> Option<&'static Spelling> {
    MEANT.iter().chain(&FOREIGN).find(|spelling| spelling.name == name)
}

/// The name nearest to a misspelt one.
pub(super) fn nearest_name(name: &str) -> Option<&'static str> {
    nearest(name, MEANT.iter().chain(&FOREIGN).map(|spelling| spelling.name))
}

/// The names of all keys that have a meaning here.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    MEANT.iter().map(|spelling| spelling.name)
}

impl Key {
    /// The segments that the key is for, when it is for one kind only.
    pub(super) fn segments(self) -> Option<usize> {
        match self {
            Key::LargeSegmentSize | Key::MaxSplitSize | Key::MaxNonSplitRounding => Some(FIXED),
            Key::Range
            | Key::Growth
            | Key::Stitching
            | Key::StitchingGranule
            | Key::StitchingLeast
            | Key::StitchingMaps
            | Key::StitchingAliases => Some(EXPANDABLE),
            Key::SegmentSize => Some(RESERVED),
            _ => None,
        }
    }

    /// Whether the key holds for the whole allocator, so that a pool cannot state it.
    pub(super) fn is_for_the_allocator(self) -> bool {
        matches!(self, Key::TotalLimit | Key::RetriesMax | Key::PointerLookup | Key::HistoryOps)
    }
}
