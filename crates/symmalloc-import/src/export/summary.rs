//! Summary of an export.

/// Counts over an exported snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportSummary {
    /// Number of entries in the trace.
    pub entries: u64,
    /// Number of allocations of at least one byte.
    pub allocations: u64,
    /// Number of requests that a limit refused, or that the recording shows as refused.
    pub refused: u64,
    /// Number of frees whose memory stayed in use for a while, as the recording states.
    pub pending_frees: u64,
    /// Number of segments that are live at the end. As in PyTorch, each contiguous range of mapped memory is one
    /// segment.
    pub segments: u64,
    /// Number of blocks in these segments.
    pub blocks: u64,
    /// Number of ops without an entry, because PyTorch has no corresponding call.
    pub ops_without_entry: u64,
}
