//! A plan lists the allocations of one heap's step in order, each with its offset.
//!
//! A step is a part of the program that repeats, such as a training step or a batch. Its allocations are numbered from
//! 0 in order, excluding those of zero bytes. Time is counted in these numbers, and frees happen between them:
//!
//! ```text
//!  offset ▲  ┌─────────┐   ┌────────────        an allocation lives from its own number up to `until`,
//!         │  │ 0       │   │ 3                  the number of the allocation before which it is free;
//!         │  └────┬────┴───┴──┐                 allocation 3 lives on in the next step: its `until` is
//!         │       │ 1         │                 more than the number of all allocations
//!         └──┬────┴┬───┬──────┴───► number
//!            0     1   2   3
//! ```
//!
//! Offsets are relative to the plan's memory, which the heap acquires when it adopts the plan. [`PreparedPlans`] holds
//! all plans of one heap after they were checked, and the size of the memory that they need.

use super::error::PlanError;
use crate::config::PoolConfig;
use crate::config::size_rules::SizeRules;
use crate::history::digest::{Digest, Mark, op_word};
use crate::types::ids::{HeapId, StreamGroup, StreamId};
use crate::types::units::{SEGMENT_BYTES_MAX, UNIT_BYTES, Units, bytes, units};
use smallvec::SmallVec;
use std::sync::Arc;
use symmalloc_plan::{Overlap, Place, PlacedAllocation, Problem, Rectangle, Schedule, SearchBudget, solve};

/// Maximum number of allocations in a step of a plan.
pub const ALLOCATIONS_MAX: usize = 1 << 24;

/// One request of a step, before it has an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepAllocation {
    /// The stream whose work uses the allocation first.
    pub stream: StreamId,
    /// Requested bytes, not rounded; not 0.
    pub requested_bytes: u64,
    /// Number of the allocation before which it is freed, at most one step later; `None` if it outlives the next step,
    /// so that no plan can place it.
    pub until: Option<u32>,
}

/// One allocation of a planned step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedAllocation {
    /// The request.
    pub wanted: StepAllocation,
    /// Offset in the plan's memory, in bytes; `None` for an allocation that is placed by best fit.
    pub offset_bytes: Option<u64>,
}

/// A planned step of one heap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    key: u64,
    group: StreamGroup,
    allocations: Vec<PlannedAllocation>,
}

impl Plan {
    /// Creates a plan for steps with this key. `group` is that of the plan's heap. Overlaps of allocations are checked
    /// only when a heap adopts the plan, because they depend on how the pool rounds sizes.
    ///
    /// # Errors
    /// Returns an error if there are no allocations or too many, or if an allocation is impossible: zero bytes, an end
    /// before its start or more than a step later, an offset that is not a multiple of 512 or exceeds the largest
    /// segment, or a stream that is not the heap's or does not exist. The adoption checks that each stream is a member
    /// of the group, because only the allocator knows the members.
    pub fn new(key: u64, group: StreamGroup, allocations: Vec<PlannedAllocation>) -> Result<Self, PlanError> {
        let count = allocations.len();
        if count == 0 || count > ALLOCATIONS_MAX {
            return Err(PlanError::Count { allocations: count, most: ALLOCATIONS_MAX });
        }
        for (number, planned) in (0..).zip(&allocations) {
            let PlannedAllocation { wanted: StepAllocation { stream: of, requested_bytes, until }, offset_bytes } =
                *planned;
            let last = number + count as u32;
            let is_time = until.map_or(offset_bytes.is_none(), |until| until > number && until <= last);
            let end = offset_bytes.unwrap_or(0).checked_add(requested_bytes);
            let is_place = offset_bytes.is_none_or(|offset| offset.is_multiple_of(UNIT_BYTES));
            let is_size = requested_bytes > 0 && end.is_some_and(|end| end <= SEGMENT_BYTES_MAX);
            let is_stream = of <= StreamId::MAX && group.may_include(of);
            if !is_time || !is_place || !is_size || !is_stream {
                return Err(PlanError::Allocation { number });
            }
        }
        Ok(Plan { key, group, allocations })
    }

    /// Computes an offset for every allocation of a step that can be planned, for a pool with this configuration on a
    /// backend with this granularity. The result has the lowest peak that the search of `symmalloc-plan` finds within
    /// `budget`. Sizes are rounded up to blocks as in the pool.
    ///
    /// # Determinism
    /// The plan is a function of the arguments: ranks that pass equal arguments get equal plans.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), and an error if the sum of the sizes overflows.
    pub fn solve(
        config: &PoolConfig,
        granularity_bytes: u64,
        group: StreamGroup,
        key: u64,
        wanted: &[StepAllocation],
        budget: SearchBudget,
    ) -> Result<Self, PlanError> {
        Self::solve_within(config, granularity_bytes, group, key, wanted, budget).map(|(plan, _)| plan)
    }

    /// Computes the same plan as [`solve`](Self::solve), and also returns the work of the search, which is less than
    /// its budget if the search finds a plan of the least possible size.
    ///
    /// # Errors
    /// Returns the errors of [`solve`](Self::solve).
    pub fn solve_within(
        config: &PoolConfig,
        granularity_bytes: u64,
        group: StreamGroup,
        key: u64,
        wanted: &[StepAllocation],
        budget: SearchBudget,
    ) -> Result<(Self, u64), PlanError> {
        let rules = SizeRules::new(config, granularity_bytes);
        let unplaced = |wanted: &StepAllocation| PlannedAllocation { wanted: *wanted, offset_bytes: None };
        let mut plan = Plan::new(key, group, wanted.iter().map(unplaced).collect())?;
        let numbers: Vec<usize> = (0..wanted.len()).filter(|number| wanted[*number].until.is_some()).collect();
        if numbers.is_empty() {
            return Ok((plan, 0));
        }
        let rectangle = |number: &usize| {
            rectangle(*number, &wanted[*number], &rules)
                .expect("allocations without an end should have been filtered out")
        };
        let problem = Problem::periodic(wanted.len() as u64, numbers.iter().map(rectangle).collect());
        let solution = solve(&problem.map_err(PlanError::Solver)?, budget);
        for (number, offset) in numbers.into_iter().zip(solution.offsets()) {
            plan.allocations[number].offset_bytes = Some(offset * UNIT_BYTES);
        }
        Ok((plan, solution.work()))
    }

    /// Returns the key of the plan's steps, which the program passes to `begin_step`.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Returns the streams that share the plan's heap.
    pub fn group(&self) -> StreamGroup {
        self.group
    }

    /// Returns the step's allocations.
    pub fn allocations(&self) -> &[PlannedAllocation] {
        &self.allocations
    }

    /// Returns the bytes of memory that the plan needs in a pool with this configuration on a backend with this
    /// granularity.
    pub fn memory_bytes(&self, config: &PoolConfig, granularity_bytes: u64) -> u64 {
        let rules = SizeRules::new(config, granularity_bytes);
        self.ends(&rules).max().unwrap_or(0)
    }

    /// Returns the number of each planned allocation, its rectangle and its offset, for a pool with this configuration
    /// on a backend with this granularity. Sizes are those of blocks, in bytes. Times are numbers of allocations; an
    /// allocation whose `upper` exceeds the number of allocations lives on into the next step.
    pub fn rectangles(&self, config: &PoolConfig, granularity_bytes: u64) -> Vec<(u32, Rectangle, u64)> {
        let rules = SizeRules::new(config, granularity_bytes);
        let planned = |(number, it): (u32, &PlannedAllocation)| {
            let Rectangle { lower, upper, size } = rectangle(number as usize, &it.wanted, &rules)?;
            Some((number, Rectangle { lower, upper, size: size * UNIT_BYTES }, it.offset_bytes?))
        };
        (0..).zip(&self.allocations).filter_map(planned).collect()
    }

    fn ends<'a>(&'a self, rules: &'a SizeRules) -> impl Iterator<Item = u64> + 'a {
        self.allocations
            .iter()
            .filter_map(|it| Some(it.offset_bytes? + bytes(rules.block_size(it.wanted.requested_bytes))))
    }

    /// Returns the places of the step for a heap with these rules.
    pub(crate) fn schedule(&self, rules: &SizeRules) -> Result<Schedule, PlanError> {
        if self.ends(rules).any(|end| end > SEGMENT_BYTES_MAX) {
            return Err(PlanError::TooLarge);
        }
        let placed = self.allocations.iter().map(|PlannedAllocation { wanted, offset_bytes }| {
            let place = Place { offset: units((*offset_bytes)?), size: rules.block_size(wanted.requested_bytes) };
            Some(PlacedAllocation { place, stream: wanted.stream.0, until: wanted.until? })
        });
        let overlap = |Overlap { first, second }| PlanError::Overlap { first, second };
        Schedule::new(&placed.collect::<Vec<_>>()).map_err(overlap)
    }

    /// Returns a hash of the plan, for the digest of the heap that adopts it.
    pub(crate) fn digest(&self) -> u64 {
        let mut digest = Digest::new(self.key);
        for PlannedAllocation { wanted, offset_bytes } in &self.allocations {
            digest.fold(
                op_word(Mark::Allocate, wanted.stream, wanted.requested_bytes),
                offset_bytes.map_or(u64::MAX, |offset| offset / UNIT_BYTES)
                    ^ u64::from(wanted.until.unwrap_or(u32::MAX)).rotate_left(32),
            );
        }
        digest.value
    }
}

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
    /// The memory that the largest plan needs.
    size: Units,
    /// The streams for which the plans allocate, ascending.
    streams: SmallVec<[StreamId; 2]>,
}

impl PreparedPlans {
    /// Checks plans for a heap.
    pub(super) fn new(plans: Vec<Arc<Plan>>, inputs: PlanInputs<'_>) -> Result<Self, PlanError> {
        let (mut schedules, mut size, mut streams) = (Vec::new(), 1, SmallVec::new());
        for plan in &plans {
            if plan.group() != inputs.heap.group {
                let (pool, streams) = (inputs.heap.pool, inputs.config.streams());
                return Err(PlanError::Streams { pool, group: plan.group(), streams });
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

/// Returns the rectangle of an allocation, in units; `None` if it outlives the next step.
fn rectangle(number: usize, wanted: &StepAllocation, rules: &SizeRules) -> Option<Rectangle> {
    let size = u64::from(rules.block_size(wanted.requested_bytes));
    Some(Rectangle { lower: number as u64, upper: wanted.until?.into(), size })
}
