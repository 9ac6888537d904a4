//! The vocabulary of a snapshot: the text that its reader needs.

use crate::pickle::Word;

/// Defines the vocabulary and the index of each word.
macro_rules! words {
    ($($name:ident = $text:literal),* $(,)?) => {
        #[allow(clippy::upper_case_acronyms, non_camel_case_types)]
        enum Position { $($name),* }
        $(pub(super) const $name: Word = Word(Position::$name as u8);)*
        pub(super) const VOCABULARY: &[&str] = &[$($text),*];
    };
}

words! {
    DEVICE_TRACES = "device_traces",
    ACTION = "action",
    ADDR = "addr",
    SIZE = "size",
    STREAM = "stream",
    ALLOC = "alloc",
    FREE_REQUESTED = "free_requested",
    FREE_COMPLETED = "free_completed",
    SEGMENT_ALLOC = "segment_alloc",
    SEGMENT_FREE = "segment_free",
    SEGMENT_MAP = "segment_map",
    SEGMENT_UNMAP = "segment_unmap",
    OOM = "oom",
    SNAPSHOT = "snapshot",
    RECORD_USE = "record_use",
    USER_METADATA = "user_metadata",
    SYMMALLOC_POOL = "symmalloc_pool",
    POOL_ID = "pool_id",
    SEGMENT_POOL_ID = "segment_pool_id",
    FRAMES = "frames",
    FILENAME = "filename",
    NAME = "name",
    LINE = "line",
    SEGMENTS = "segments",
    DEVICE = "device",
    ADDRESS = "address",
    TOTAL_SIZE = "total_size",
    BLOCKS = "blocks",
    STATE = "state",
    REQUESTED_SIZE = "requested_size",
    ACTIVE_ALLOCATED = "active_allocated",
    INACTIVE = "inactive",
    IS_EXPANDABLE = "is_expandable",
    DEVICE_FREE = "device_free",
    ALLOCATOR_SETTINGS = "allocator_settings",
    TRACE_ALLOC_OVERFLOWED = "trace_alloc_overflowed",
}

/// Returns the text of a word.
pub(super) fn text(word: Word) -> &'static str {
    VOCABULARY[usize::from(word.0)]
}
