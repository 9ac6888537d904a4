//! Summary of a recording: counts of its ops, and of the parts that could not be converted.

use crate::held_memory::HeldMemory;
use std::collections::BTreeMap;
use symmalloc_core::op::{Op, Record};

/// Maximum number of unknown kinds of entries whose names are kept.
const UNKNOWN_KINDS_MAX: usize = 16;

/// Counts over one recording. Every omitted part is counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// The device whose trace was read (PyTorch snapshots only).
    pub device: Option<usize>,
    /// Number of streams registered.
    pub streams: u64,
    /// Number of allocations.
    pub allocations: u64,
    /// Number of allocations with a recorded placement.
    pub placements: u64,
    /// Number of frees, including those that the reader added ([`frees_supplied`](Self::frees_supplied)).
    pub frees: u64,
    /// Number of uses by a stream other than the allocation's own.
    pub record_uses: u64,
    /// Number of frees that are missing in the recording but must have happened, because the same address was allocated again. The reader
    /// adds these frees to the records, each directly before the second allocation.
    pub frees_supplied: u64,
    /// Number of omitted frees whose allocation is not in the recording (RMM logs).
    pub frees_of_unknown: u64,
    /// Number of omitted uses whose allocation is not in the recording (exported snapshots).
    pub uses_of_unknown: u64,
    /// Number of allocations that are live at the beginning of the recording, because it started late or its beginning was overwritten
    /// (`max_entries`). They are the first records.
    pub lived_before: u64,
    /// Bytes of these allocations.
    pub lived_before_bytes: u64,
    /// `true` if the recording lost its oldest entries, because there were more than it can keep (`max_entries`). Only newer PyTorch
    /// snapshots state this.
    pub is_overwritten: bool,
    /// Peak of the device memory that the recorded allocator held, in bytes, if the recording states it (PyTorch snapshots).
    pub recorded_reserved_bytes_peak: Option<u64>,
    /// Number of requests that the recorded allocator refused. Each is a [`Refuse`](Op::Refuse) record.
    pub failed_allocations: u64,
    /// The memory that the allocator held at the end, if the recording shows only this state and no history (PyTorch snapshots).
    pub state_only: Option<HeldMemory>,
    /// Number of omitted allocations and frees of zero bytes (the null pointer).
    pub empty_allocations: u64,
    /// Number of omitted marks that show when a snapshot was taken.
    pub snapshot_marks: u64,
    /// Number of omitted entries of a kind that this version does not support.
    pub unknown_actions: u64,
    /// The first 16 of these kinds in alphabetical order, each with its number of entries.
    pub unknown_kinds: BTreeMap<String, u64>,
    /// Line at which the text is truncated. Only with [`accept_torn`](crate::ReadOptions::accept_torn).
    pub torn_at_line: Option<u64>,
}

impl Summary {
    /// Counts a record.
    pub(crate) fn count(&mut self, record: &Record) {
        match record.op {
            Op::RegisterStream { .. } => self.streams += 1,
            Op::Allocate { .. } => {
                self.allocations += 1;
                self.placements += u64::from(record.placement.is_some());
            }
            Op::Free { .. } => self.frees += 1,
            Op::RecordUse { .. } => self.record_uses += 1,
            Op::Refuse { .. } => self.failed_allocations += 1,
            _ => {}
        }
    }

    /// Counts an omitted entry of a kind that this version does not support.
    pub(crate) fn count_unknown(&mut self, kind: &str) {
        self.unknown_actions += 1;
        *self.unknown_kinds.entry(kind.to_owned()).or_default() += 1;
        if self.unknown_kinds.len() > UNKNOWN_KINDS_MAX {
            self.unknown_kinds.pop_last();
        }
    }
}
