//! What a recording turned out to hold, and what of it could not be made into ops.

use symmalloc_core::op::{Op, Record};

/// Counts over one recording. Nothing that was left out goes uncounted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// The device whose trace was read (PyTorch snapshots).
    pub device: Option<usize>,
    /// Streams registered.
    pub streams: u64,
    /// Allocations.
    pub allocations: u64,
    /// Allocations of which the recording says where they were placed.
    pub placements: u64,
    /// Frees, the supplied ones included.
    pub frees: u64,
    /// Uses by another stream than the allocation's own.
    pub record_uses: u64,
    /// Frees that the recording lacks but must have happened, because the same address was allocated again. They are
    /// in the records, right before that allocation.
    pub frees_supplied: u64,
    /// Frees of addresses whose allocation is not in the recording, left out (RMM logs).
    pub frees_of_unknown: u64,
    /// Uses of addresses whose allocation is not in the recording, left out (exported snapshots).
    pub uses_of_unknown: u64,
    /// Allocations that lived when the recording began, because it was switched on late or its beginning was overwritten
    /// (`max_entries`). They are in the records, before all else.
    pub lived_before: u64,
    /// Their bytes.
    pub lived_before_bytes: u64,
    /// The most device memory that the recorded allocator held at any time, in bytes, where the recording says it (PyTorch
    /// snapshots).
    pub recorded_reserved_bytes_peak: Option<u64>,
    /// Allocations that the recorded allocator refused, left out.
    pub failed_allocations: u64,
    /// Allocations and frees of no memory (the null pointer), left out.
    pub empty_allocations: u64,
    /// Marks of a snapshot being taken, left out.
    pub snapshot_marks: u64,
    /// Entries of a kind that this version does not know, left out.
    pub unknown_actions: u64,
    /// The text ended in the middle, at this line, and [`accept_torn`](crate::ReadOptions::accept_torn) was set.
    pub torn_at_line: Option<u64>,
}

impl Summary {
    /// Takes a record into account.
    pub(crate) fn count(&mut self, record: &Record) {
        match record.op {
            Op::RegisterStream { .. } => self.streams += 1,
            Op::Allocate { .. } => {
                self.allocations += 1;
                self.placements += u64::from(record.placement.is_some());
            }
            Op::Free { .. } => self.frees += 1,
            Op::RecordUse { .. } => self.record_uses += 1,
            _ => {}
        }
    }
}
