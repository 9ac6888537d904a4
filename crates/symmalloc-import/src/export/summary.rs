//! Summary of an export.

/// Counts over an exported snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportSummary {
    /// Entries of the trace.
    pub entries: u64,
    /// Allocations of at least one byte.
    pub allocations: u64,
    /// Requests that a limit refused, or that the recording shows as refused.
    pub refused: u64,
    /// Frees whose memory stayed in use for a while, as recorded.
    pub pending_frees: u64,
    /// Segments live at the end, in PyTorch's sense: one per contiguous range of mapped memory.
    pub segments: u64,
    /// Blocks of these segments.
    pub blocks: u64,
    /// Ops without an entry, because PyTorch has no such call.
    pub ops_without_entry: u64,
}
