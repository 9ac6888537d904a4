//! The outcome of a job: whether its ranks agree, and the memory it needs.

use super::{Order, Segments};
use symmalloc_core::config::{SegmentPolicy, StreamPolicy};
use symmalloc_core::ids::Placement;

/// A rank's decision about an allocation: its placement, [`Placement::NOWHERE`] if it has no bytes, or `None` if the
/// allocator refused it.
pub type Decision = Option<Placement>;

/// The outcome of a job on its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Placement rule of the ranks.
    pub order: Order,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of passes on rank 0.
    pub passes: u32,
    /// Segments of the default pool; `None` if it was reserved up front.
    pub segments: Option<Segments>,
    /// The policy that determines whether the streams of the default pool share free blocks.
    pub streams: StreamPolicy,
    /// Number of the program's allocations whose placement differs between ranks in any compared pass.
    pub differing_placements: usize,
    /// The first placement that differs.
    pub first_divergence: Option<Divergence>,
    /// Number of ranks whose digest differs from rank 0's after the last pass. If this number is not 0 although no placement differs, a
    /// rank refused memory for a different reason than rank 0.
    pub differing_digests: usize,
    /// Peaks over all passes of rank 0.
    pub peaks: Peaks,
    /// Peaks of rank 0's first pass.
    pub first_pass: Peaks,
    /// Number of segments at the end of the last pass.
    pub segment_count: u64,
    /// Number of allocations that rank 0 refused, in the pass with the most refusals.
    pub refused: usize,
    /// Number of allocations that rank 0 refused in the first pass.
    pub first_pass_refused: usize,
    /// Digest of all ops and decisions of rank 0's first pass, in all pools, including destroyed ones. `None` if blocks are placed in
    /// address order.
    pub digest: Option<u64>,
    /// Rank 0's decisions in the first pass, by allocation.
    pub decisions: Vec<Decision>,
    /// Number of rank 0's requests for at least one byte, in all passes, and how many of them a plan placed. `None` if no plan is followed.
    pub planned: Option<PlannedOps>,
}

/// Number of requests, and how many of them a plan placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedOps {
    /// Requests placed by the plan.
    pub planned: u64,
    /// All requests.
    pub all: u64,
}

impl PlannedOps {
    /// Returns the planned share of all requests, or 1 if there are no requests.
    pub fn share(self) -> f64 {
        if self.all == 0 { 1.0 } else { self.planned as f64 / self.all as f64 }
    }
}

impl Outcome {
    /// Returns `true` if all ranks made the same placements, with equal digests.
    pub fn is_aligned(&self) -> bool {
        self.differing_placements == 0 && self.differing_digests == 0
    }
}

/// Peaks of memory over some passes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Bytes that the program had requested and not freed.
    pub live_bytes: u64,
    /// Device memory reserved.
    pub reserved_bytes: u64,
}

impl Peaks {
    /// Returns the peak of live bytes divided by the peak of reserved bytes, or 1 if nothing was reserved.
    pub fn efficiency(&self) -> f64 {
        if self.reserved_bytes == 0 { 1.0 } else { self.live_bytes as f64 / self.reserved_bytes as f64 }
    }
}

/// Results of one rank over all of its passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Steady {
    pub(crate) peaks: Peaks,
    pub(crate) passes: u32,
    /// Requests refused by a limit or a full segment.
    pub(crate) refused: u64,
    /// Number of requests that are refused in each pass; `None` if the number differs between passes.
    pub(crate) refused_each: Option<u64>,
    /// Allocations placed by a plan.
    pub(crate) planned: u64,
    /// Map and unmap calls in the last pass.
    pub(crate) maps: u64,
    /// Number of times in the last pass that one stream had to wait for another before it could reuse memory.
    pub(crate) waits: u64,
}

/// An allocation that ranks placed differently.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Divergence {
    /// The pass, counted from 0.
    pub pass: u32,
    /// Index of the op that makes the allocation, counted from 0.
    pub op: usize,
    /// Ordinal of the allocation, counted from 0.
    pub allocation: usize,
    /// Name of the allocation, if the program named it.
    pub name: Option<Box<str>>,
    /// Decision of each rank, by rank.
    pub decisions: Vec<Decision>,
}

impl Segments {
    /// Returns the kind of a policy, or `None` if the policy is neither expandable nor fixed.
    pub(crate) fn of(policy: &SegmentPolicy) -> Option<Self> {
        match policy {
            SegmentPolicy::Expandable(_) => Some(Segments::Expandable),
            SegmentPolicy::Fixed(_) => Some(Segments::Fixed),
            _ => None,
        }
    }
}
