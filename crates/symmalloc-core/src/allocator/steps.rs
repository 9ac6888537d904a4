//! Steps and plans: what a program repeats, and where it goes each time. See [`crate::plans`].

use super::Allocator;
use super::recorder::RecordingEnd;
use super::request::Request;
use crate::config::errors::UnknownError;
use crate::config::op::Op;
use crate::plans::error::{PlanError, StepError};
use crate::plans::plan::Plan;
use crate::plans::report::StepReport;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::PoolId;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// A step of a pool begins: what the program repeats, for example a training step. From now on each heap of the pool compares its
    /// requests with the plan of this key, if it has one, and a heap that learns logs them, if it has none. Call it at the same
    /// point of the program on every rank, while no other thread uses the pool.
    ///
    /// `key` says which steps are alike: the shape of a batch, a bucket of sequence lengths; 0 when all are.
    ///
    /// # Errors
    /// When the pool is unknown, or a step of it is open.
    pub fn begin_step(&self, pool: PoolId, key: u64) -> Result<(), StepError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        let mut step = entry.step.lock();
        if let Some(key) = *step {
            return Err(StepError::Open { pool, key });
        }
        entry.check_awake(pool)?;
        *step = Some(key);
        entry.heaps().for_each(|heap| heap.lock().begin_step(&self.context, key));
        drop(step);
        gate.note(Op::BeginStep { pool, key });
        Ok(())
    }

    /// The step of a pool ends. Says how far it went as planned. In a pool with `plan:learn` it may take seconds, when a step that
    /// came twice alike is planned now.
    ///
    /// # Errors
    /// When the pool is unknown, or no step of it is open.
    pub fn end_step(&self, pool: PoolId) -> Result<StepReport, StepError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        let mut step = entry.step.lock();
        let key = step.take().ok_or(StepError::NotOpen { pool })?;
        let mut report = StepReport::default();
        entry.heaps().for_each(|heap| report.add(heap.lock().end_step(key)));
        drop(step);
        gate.note(Op::EndStep { pool });
        Ok(report)
    }

    /// A step that ends when the guard is dropped.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step).
    pub fn step(&self, pool: PoolId, key: u64) -> Result<StepGuard<'_, B, L>, StepError> {
        self.begin_step(pool, key)?;
        Ok(StepGuard { allocator: self, pool })
    }

    /// Adopts a plan: the heap obtains its memory now, and steps of the plan's key follow it from the next one on. It replaces the
    /// heap's plan of the same key. All plans of a heap place in the same memory, as large as the largest of them needs. Where no
    /// free block is large enough, free memory is given back first, as in [`trim`](Self::trim). A step without a plan has that
    /// memory for itself.
    ///
    /// # Determinism
    /// The plan is part of the heap's digest: ranks that adopt other plans learn so when they agree.
    ///
    /// # Errors
    /// See [`PlanError`]. A plan that does not fit this pool changes nothing. When there is no memory for it, the heap has no plans any
    /// more, and goes on without.
    pub fn adopt_plan(&self, pool: PoolId, plan: Plan) -> Result<(), PlanError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        plan.allocations().iter().try_for_each(|planned| self.known_stream(planned.wanted.stream))?;
        let stream = plan.allocations().first().map_or_else(Default::default, |planned| planned.wanted.stream);
        let heap = self.heap_for(pool, stream)?;
        let step = entry.step.lock();
        if step.is_some() {
            return Err(PlanError::StepOpen { pool });
        }
        entry.check_awake(pool)?;
        let plans = heap.lock().prepare_plan(plan)?;
        gate.end(RecordingEnd::Planned { pool });
        let adopted = heap.lock().adopt(&self.context, &plans);
        if let Err(shortage) = adopted {
            let request = Request { pool, stream, size_bytes: plans.memory_bytes() };
            // The failure callback may allocate, for which a heap of this pool may have to be made.
            drop(step);
            self.retry(request, heap, shortage, Some(&mut gate), |heap| heap.adopt(&self.context, &plans))?;
        }
        Ok(())
    }

    /// Gives all plans of a pool up, and forgets the steps from which it learns. What is live at their places stays where it is,
    /// and the rest of their memory is free.
    ///
    /// # Errors
    /// When the pool is unknown, or a step of it is open.
    pub fn drop_plans(&self, pool: PoolId) -> Result<(), PlanError> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        let step = entry.step.lock();
        if step.is_some() {
            return Err(PlanError::StepOpen { pool });
        }
        gate.end(RecordingEnd::Planned { pool });
        entry.heaps().for_each(|heap| heap.lock().drop_plans(&self.context));
        Ok(())
    }

    /// The plans of a pool, in stream order, those of one heap in the order in which they were adopted.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn plans(&self, pool: PoolId) -> Result<Vec<Plan>, UnknownError> {
        let plans = self.pool(pool)?.heaps().flat_map(|heap| heap.lock().plans());
        Ok(plans.map(|plan| Plan::clone(&plan)).collect())
    }
}

/// A step that is open until this is dropped.
#[must_use = "the step ends when this is dropped"]
pub struct StepGuard<'a, B: Backend, L: Lock> {
    allocator: &'a Allocator<B, L>,
    pool: PoolId,
}

impl<B: Backend, L: Lock> StepGuard<'_, B, L> {
    /// Ends the step. Says how far it went as planned.
    ///
    /// # Errors
    /// When the step was ended, or its pool destroyed, meanwhile.
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
