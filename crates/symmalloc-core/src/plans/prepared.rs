//! Plans that a heap can adopt: checked, and with the memory that they need.

use super::error::PlanError;
use super::plan::Plan;
use crate::config::PoolConfig;
use crate::config::size_rules::SizeRules;
use crate::types::ids::{HeapId, StreamId};
use crate::types::units::{Units, bytes};
use smallvec::SmallVec;
use std::sync::Arc;
use symmalloc_plan::Schedule;

/// The properties of a heap on which its plans depend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanInputs<'a> {
    pub(crate) heap: HeapId,
    pub(crate) config: &'a PoolConfig,
    pub(crate) rules: &'a SizeRules,
}

/// Plans that a heap can adopt.
#[derive(Debug)]
pub(crate) struct PreparedPlans {
    /// The plans; at least one.
    plans: Vec<Arc<Plan>>,
    /// The schedule of each plan.
    schedules: Vec<Schedule>,
    /// The memory that the largest of them needs.
    size: Units,
    /// The streams for which they allocate, ascending.
    streams: SmallVec<[StreamId; 2]>,
}

impl PreparedPlans {
    /// Checks plans for a heap.
    pub(super) fn new(plans: Vec<Arc<Plan>>, inputs: PlanInputs<'_>) -> Result<Self, PlanError> {
        let (mut schedules, mut size, mut streams) = (Vec::new(), 1, SmallVec::new());
        for plan in &plans {
            if plan.group() != inputs.heap.group {
                return Err(PlanError::Streams { pool: inputs.heap.pool, group: plan.group() });
            }
            streams.extend(plan.allocations().iter().map(|planned| planned.wanted.stream));
            let schedule = plan.schedule(inputs.rules)?;
            size = schedule.places().iter().map(|place| place.offset + place.size).fold(size, Units::max);
            schedules.push(schedule);
        }
        streams.sort_unstable();
        streams.dedup();
        Ok(PreparedPlans { plans, schedules, size, streams })
    }

    pub(crate) fn plans(&self) -> &[Arc<Plan>] {
        &self.plans
    }

    /// Returns the schedule of each plan.
    pub(super) fn schedules(&self) -> &[Schedule] {
        &self.schedules
    }

    /// Returns the units of memory that all plans share.
    pub(crate) fn size(&self) -> Units {
        self.size
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        bytes(self.size)
    }

    /// Returns the streams for which the plans allocate, ascending; at least one.
    pub(crate) fn streams(&self) -> &[StreamId] {
        &self.streams
    }

    /// Returns a hash of the plans, for the digest of the heap that adopts them.
    pub(crate) fn digest(&self) -> u64 {
        self.plans.iter().fold(0, |all: u64, plan| all.rotate_left(7) ^ plan.digest())
    }
}
