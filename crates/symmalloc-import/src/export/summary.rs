//! What was written.

/// What was exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportSummary {
    /// Entries of the trace.
    pub entries: u64,
    /// Allocations of at least one byte.
    pub allocations: u64,
    /// Allocations that a limit refused.
    pub refused: u64,
    /// Frees whose memory stayed taken for a while, as recorded.
    pub pending_frees: u64,
    /// Segments that are live at the end, as PyTorch counts them: each stretch of mapped memory.
    pub segments: u64,
    /// Blocks of these.
    pub blocks: u64,
    /// Ops that leave no entry because PyTorch has no such call.
    pub ops_without_entry: u64,
}
