//! What became of a step.

use crate::stats::usage::add_fields;
use crate::types::ids::StreamId;

/// A step that ended. Over the heaps of a pool, numbers are sums, and the difference is that of the first heap in stream order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Allocations in the step, of at least one byte.
    pub allocations: u64,
    /// How many of them went where a plan says.
    pub planned: u64,
    /// Where the step was another one than the plan's; `None` also when there was no plan.
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

/// Steps of a heap or of several so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepStats {
    /// Steps that ended. Of several heaps, those of all of them.
    pub steps: u64,
    /// Steps that followed a plan to its end.
    pub followed: u64,
    /// Allocations in steps.
    pub allocations: u64,
    /// How many of them went where a plan says.
    pub planned: u64,
    /// Plans that are adopted.
    pub plans: u64,
    /// Times that plans were taken up: adopted, or learned.
    pub learned: u64,
    /// Times that plans got memory.
    pub placed: u64,
    /// Bytes of memory that plans hold.
    pub plan_bytes: u64,
}

add_fields!(StepStats { steps, followed, allocations, planned, plans, learned, placed, plan_bytes });

/// The first allocation of a step that was not as planned. What came after it in the step was placed the ordinary way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("allocation {number} of the step {cause}")]
#[non_exhaustive]
pub struct StepDifference {
    /// The number of the allocation in the step.
    pub number: u32,
    /// What was different.
    pub cause: DifferenceCause,
}

/// How a step differed from its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DifferenceCause {
    /// Something else was asked for: stream and bytes.
    #[error("asks for {} bytes on {}, and the plan expects {}", requested.1, requested.0, planned.map_or_else(
        || "no more".to_owned(),
        |(stream, bytes)| format!("{bytes} on {stream}"),
    ))]
    Request {
        /// What the plan expects; `None` behind its last allocation.
        planned: Option<(StreamId, u64)>,
        /// What was asked for.
        requested: (StreamId, u64),
    },
    /// The place was not free: an allocation is live that the plan expects to be freed by then.
    #[error("has its place taken at {offset_bytes}, by one that the plan expects to be freed")]
    Occupied {
        /// Where it lies in the plan's memory, in bytes.
        offset_bytes: u64,
    },
    /// The step ended before the plan did.
    #[error("did not come before the step ended")]
    Ended,
    /// There was no memory for the plans. None is followed any more.
    #[error("has no place: there was no memory for the plans, and none is followed any more")]
    Memory,
    /// The driver could not order the plan's streams behind each other: this rank alone went the ordinary way.
    #[error("has no place: the driver could not order the plan's streams")]
    Driver,
}
