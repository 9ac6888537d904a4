//! Steps and plans: the repeated parts of a program, and the planned placements in them. See [`crate::plans`].

use super::Allocator;
use super::gate::Request;
use super::recorder::RecordingEnd;
use crate::config::errors::UnknownError;
use crate::config::op::Op;
use crate::heap::trim::Released;
use crate::plans::error::{PlanError, StepError};
use crate::plans::plan::Plan;
use crate::plans::report::StepReport;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::PoolId;
use std::fmt;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Begins a step of a pool: a part of the program that repeats, for example a training step. From then on, each
    /// heap of the pool compares its requests with its plan for this key. In a pool with `plan:learn`, a heap without a
    /// plan for this key logs its requests instead, and so does a heap whose last two steps with this key differed from
    /// the plan. Call this at the same point of the program on every rank, while no other thread uses the pool.
    ///
    /// Steps that make the same requests have the same `key`. The key can be the shape of a batch or a bucket of
    /// sequence lengths; use 0 if all steps are alike.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown or sleeps, or a step of it is open.
    pub fn begin_step(&self, pool: PoolId, key: u64) -> Result<(), StepError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        let mut step = entry.step().lock();
        self.pool(pool)?; // The pool may have been destroyed, and its entry reused, before the lock was taken.
        if let Some(key) = *step {
            return Err(StepError::Open { pool, key });
        }
        entry.check_awake()?;
        *step = Some(key);
        let begun = entry.heaps().map(|heap| heap.lock().begin_step(&self.context, key));
        let released = begun.fold(Released::default(), Released::plus);
        drop(step);
        gate.note(Op::BeginStep { pool, key });
        gate.note_released(&released);
        Ok(())
    }

    /// Ends the step of a pool and reports how far it followed its plan. In a pool with `plan:learn`, the call may take
    /// seconds if it computes the plan of a step that has now occurred twice.
    ///
    /// After the first step that followed a new plan to its end, the call also releases the pool's free memory, as
    /// [`trim_pool`](Self::trim_pool) does, because the plan does not need this memory. Observed pools and pools with a
    /// quota keep it.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown, or no step of it is open.
    pub fn end_step(&self, pool: PoolId) -> Result<StepReport, StepError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        let mut step = entry.step().lock();
        self.pool(pool)?; // As in `begin_step`.
        let key = step.take().ok_or(StepError::NotOpen { pool })?;
        let (mut report, mut released) = (StepReport::default(), Released::default());
        for heap in entry.heaps() {
            let (heap_report, heap_released) = heap.lock().end_step(&self.context, key);
            report.add(heap_report);
            released = released.plus(heap_released);
        }
        drop(step);
        gate.note(Op::EndStep { pool });
        // Memory that the driver fails to release counts as reserved, and the next trim tries again to release it.
        gate.note_released(&released);
        Ok(report)
    }

    /// Begins a step that ends when the guard is dropped.
    ///
    /// # Errors
    /// See [`begin_step`](Self::begin_step).
    pub fn step(&self, pool: PoolId, key: u64) -> Result<StepGuard<'_, B, L>, StepError> {
        self.begin_step(pool, key)?;
        Ok(StepGuard { allocator: self, pool })
    }

    /// Adopts a plan: the heap acquires the plan's memory now, and follows the plan in steps with its key, starting
    /// with the next one. The plan replaces the heap's plan of the same key. All plans of a heap use the same memory,
    /// whose size is that of the largest plan. If no free block is large enough, free memory is released first, as in
    /// [`trim_pool`](Self::trim_pool). A step without a plan uses the memory of plans as ordinary memory.
    ///
    /// # Determinism
    /// The plan is part of the heap's digest: agreement detects ranks that adopt different plans.
    ///
    /// # Errors
    /// See [`PlanError`]. If the plan does not fit this pool, nothing changes. If there is no memory for the plan, the
    /// heap drops all of its plans and continues without them.
    pub fn adopt_plan(&self, pool: PoolId, plan: Plan) -> Result<(), PlanError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        plan.allocations().iter().try_for_each(|planned| self.known_stream(planned.wanted.stream))?;
        let (group, streams) = (plan.group(), entry.config().streams());
        if plan.allocations().iter().any(|planned| self.heap_group(entry, planned.wanted.stream) != group) {
            return Err(PlanError::Streams { pool, group, streams });
        }
        let stream = plan.allocations().first().map_or_else(Default::default, |planned| planned.wanted.stream);
        let heap = self.heap_for(pool, stream)?;
        let step = entry.step().lock();
        self.pool(pool)?; // As in `begin_step`.
        if step.is_some() {
            return Err(PlanError::StepOpen { pool });
        }
        entry.check_awake()?;
        let plans = heap.lock().prepare_plan(plan)?;
        gate.end(RecordingEnd::Planned { pool });
        let adopted = heap.lock().adopt(&self.context, &plans);
        if let Err(shortage) = adopted {
            let request = Request { pool, stream, size_bytes: plans.memory_bytes() };
            // The failure callback may allocate, which may create a heap of this pool.
            drop(step);
            self.retry(request, heap, shortage, Some(&mut gate), |heap| heap.adopt(&self.context, &plans))?;
        }
        Ok(())
    }

    /// Drops all plans of a pool, and the logged steps from which it would learn new ones. Live allocations in the
    /// memory of the plans stay where they are, and the rest of this memory becomes free.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown, or a step of it is open.
    pub fn drop_plans(&self, pool: PoolId) -> Result<(), PlanError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        let step = entry.step().lock();
        self.pool(pool)?; // As in `begin_step`.
        if step.is_some() {
            return Err(PlanError::StepOpen { pool });
        }
        gate.end(RecordingEnd::Planned { pool });
        entry.heaps().for_each(|heap| heap.lock().drop_plans(&self.context));
        Ok(())
    }

    /// Returns the plans of a pool in stream order, and those of one heap in the order of their adoption.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn plans(&self, pool: PoolId) -> Result<Vec<Plan>, UnknownError> {
        let plans = self.pool(pool)?.heaps().flat_map(|heap| heap.lock().plans());
        Ok(plans.map(|plan| Plan::clone(&plan)).collect())
    }
}

/// A guard that ends its step when it is dropped.
#[must_use = "the step ends when this is dropped"]
pub struct StepGuard<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    pool: PoolId,
}

impl<B: Backend, L: Lock> StepGuard<'_, B, L> {
    /// Ends the step and reports how far it followed its plan.
    ///
    /// # Errors
    /// Returns an error if the step has already ended, or its pool was destroyed.
    pub fn end(self) -> Result<StepReport, StepError> {
        let (allocator, pool) = (self.allocator, self.pool);
        std::mem::forget(self);
        allocator.end_step(pool)
    }
}

impl<B: Backend, L: Lock> Drop for StepGuard<'_, B, L> {
    fn drop(&mut self) {
        let _ended_or_not_open = self.allocator.end_step(self.pool);
    }
}

impl<B: Backend, L: Lock> fmt::Debug for StepGuard<'_, B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepGuard").field("pool", &self.pool).finish_non_exhaustive()
    }
}
