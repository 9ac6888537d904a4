//! What became of a job: whether its ranks agree, and what memory it took.

use super::{Order, Segments};
use symmalloc_core::config::{SegmentPolicy, StreamPolicy};
use symmalloc_core::ids::Placement;

/// What a rank decided about an allocation: where it lies, [`Placement::NOWHERE`] if it has no bytes, or `None` if the
/// allocator refused it.
pub type Decision = Option<Placement>;

/// The outcome of a job on its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The rule by which the ranks placed.
    pub order: Order,
    /// Number of ranks.
    pub ranks: u32,
    /// How often rank 0 carried the program out.
    pub passes: u32,
    /// How the default pool obtained memory; `None` if it was reserved up front.
    pub segments: Option<Segments>,
    /// Whether the default pool's streams shared free blocks.
    pub streams: StreamPolicy,
    /// Number of allocations of the program whose placement is not the same on all ranks, in any pass that is compared.
    pub differing_placements: usize,
    /// The first of them.
    pub first_divergence: Option<Divergence>,
    /// Ranks whose digest differs from rank 0's after the last pass. Without a differing placement: a rank was
    /// refused memory for another reason.
    pub differing_digests: usize,
    /// Over all passes of rank 0.
    pub peaks: Peaks,
    /// In its first pass.
    pub first_pass: Peaks,
    /// Segments at the end of the last pass.
    pub segment_count: u64,
    /// Allocations that rank 0 refused, in the pass in which it refused most.
    pub refused: usize,
    /// Those that it refused in the first pass.
    pub first_pass_refused: usize,
    /// Over all (op, decision) of rank 0's first pass, in all pools that exist at its end; `None` for address order.
    pub digest: Option<u64>,
    /// Rank 0's decisions in the first pass, by allocation.
    pub decisions: Vec<Decision>,
    /// Of rank 0's requests for at least one byte, in all passes; `None` where no plan is followed.
    pub planned: Option<PlannedOps>,
}

/// How many requests went where a plan says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedOps {
    /// Those that did.
    pub planned: u64,
    /// All.
    pub all: u64,
}

impl PlannedOps {
    /// Those that did over all; 1 where there is none.
    pub fn share(self) -> f64 {
        if self.all == 0 { 1.0 } else { self.planned as f64 / self.all as f64 }
    }
}

impl Outcome {
    /// Whether all ranks placed every allocation alike, with equal digests.
    pub fn is_aligned(&self) -> bool {
        self.differing_placements == 0 && self.differing_digests == 0
    }
}

/// The most memory at any time of some passes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// What the program had requested and not freed.
    pub live_bytes: u64,
    /// Device memory held.
    pub reserved_bytes: u64,
}

impl Peaks {
    /// Peak live over peak reserved; 1 where nothing was reserved.
    pub fn efficiency(&self) -> f64 {
        if self.reserved_bytes == 0 { 1.0 } else { self.live_bytes as f64 / self.reserved_bytes as f64 }
    }
}

/// What one rank of a job takes, over all of its passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Steady {
    pub(crate) peaks: Peaks,
    pub(crate) passes: u32,
    /// Requests that a limit or a full segment refused.
    pub(crate) refused: u64,
    /// Allocations that went where a plan says.
    pub(crate) planned: u64,
    /// Calls that map or unmap memory in the last pass.
    pub(crate) maps: u64,
    /// Waits of one stream for another one that reuse of memory needed in the last pass.
    pub(crate) waits: u64,
}

/// An allocation that ranks placed differently.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Divergence {
    /// The pass, counted from 0.
    pub pass: u32,
    /// The op, counted from 0.
    pub op: usize,
    /// The allocation, counted from 0.
    pub allocation: usize,
    /// What the program calls it.
    pub name: Option<Box<str>>,
    /// What each rank decided, by rank.
    pub decisions: Vec<Decision>,
}

impl Segments {
    /// The kind of a policy, where it is one of these two.
    pub(crate) fn of(policy: &SegmentPolicy) -> Option<Self> {
        match policy {
            SegmentPolicy::Expandable(_) => Some(Segments::Expandable),
            SegmentPolicy::Fixed(_) => Some(Segments::Fixed),
            _ => None,
        }
    }
}
