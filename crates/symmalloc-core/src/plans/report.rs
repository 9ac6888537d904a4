//! Reports of steps.

use crate::stats::usage::add_fields;
use crate::types::ids::StreamId;

/// The report of a step. For a pool, the numbers are sums over its heaps, and the difference is that of the first heap,
/// in stream order, that differed from its plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Allocations in the step, of at least one byte.
    pub allocations: u64,
    /// Number of those allocations that the plan placed.
    pub planned: u64,
    /// The first difference from the plan; `None` if there was no difference, or no plan.
    pub difference: Option<StepDifference>,
    /// Bytes of memory that plans hold.
    pub plan_bytes: u64,
}

impl StepReport {
    pub(crate) fn add(&mut self, heap: StepReport) {
        self.allocations += heap.allocations;
        self.planned += heap.planned;
        self.plan_bytes += heap.plan_bytes;
        self.difference = self.difference.or(heap.difference);
    }
}

/// Step statistics of one heap or of several heaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepStats {
    /// Number of steps that ended, summed over the heaps.
    pub steps: u64,
    /// Steps that followed a plan to its end.
    pub followed: u64,
    /// Allocations in steps.
    pub allocations: u64,
    /// Number of those allocations that a plan placed.
    pub planned: u64,
    /// Number of plans, adopted or learned.
    pub plans: u64,
    /// Number of times that plans were adopted or learned.
    pub learned: u64,
    /// Number of times that plans acquired memory.
    pub placed: u64,
    /// Bytes of memory that plans hold.
    pub plan_bytes: u64,
}

add_fields!(StepStats { steps, followed, allocations, planned, plans, learned, placed, plan_bytes });

/// The first allocation of a step that differed from the plan. The rest of the step was placed by best fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("allocation {number} of the step {cause}")]
#[non_exhaustive]
pub struct StepDifference {
    /// Number of the allocation in the step.
    pub number: u32,
    /// The cause.
    pub cause: DifferenceCause,
}

/// The cause of a difference from a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DifferenceCause {
    /// The request differs in its stream or size.
    #[error("requests {} bytes on {}, but the plan expects {}", requested.1, requested.0, planned.map_or_else(
        || "no more".to_owned(),
        |(stream, bytes)| format!("{bytes} on {stream}"),
    ))]
    Request {
        /// The expected request; `None` after the plan's last allocation.
        planned: Option<(StreamId, u64)>,
        /// The actual request.
        requested: (StreamId, u64),
    },
    /// The place was occupied by a live allocation that the plan expects to be freed.
    #[error("finds its place at offset {offset_bytes} occupied by an allocation that the plan expects to be freed")]
    Occupied {
        /// Offset of the place in the plan's memory, in bytes.
        offset_bytes: u64,
    },
    /// The step ended before the plan.
    #[error("did not occur before the step ended")]
    Ended,
    /// There was no memory for the plans, which are no longer followed.
    #[error("has no place: there was no memory for the plans, which are no longer followed")]
    Memory,
    /// The driver could not order the plan's streams, so this rank alone placed the step by best fit.
    #[error("has no place: the driver could not order the plan's streams")]
    Driver,
}
