//! Steps of a pool, which can follow plans: see [`symmalloc_core::plans`].

use crate::allocator::CachingAllocator;
use crate::backend::CudaMemory;
use std::fmt;
use symmalloc_core::StepGuard;
use symmalloc_core::lock::Shared;
use symmalloc_core::plans::{Plan, PlanError, StepError, StepReport};

impl<B: CudaMemory> CachingAllocator<B> {
    /// Begins a step of this allocator's pool: a unit that the program repeats, such as a training step or a batch. The step ends when the
    /// returned guard is dropped or [ended](Step::end). Steps with the same `key` are expected to be alike, so it may encode the shape of a
    /// batch; use 0 if all steps are alike. In a pool with `plan:learn`, a step that occurs twice in the same form is planned when it ends,
    /// and later steps follow the plan. The reserved memory then equals the peak of live memory.
    ///
    /// Begin and end steps at the same points on every rank, outside of captures, while no other thread uses the pool. Ending a step that
    /// gets planned can take several seconds, and releases free memory, for which the host waits.
    ///
    /// # Errors
    /// Returns an error if a step of the pool is already open.
    ///
    /// # Examples
    /// ```no_run
    /// use symmalloc_core::Config;
    /// use symmalloc_cuda::{CudaAllocator, CudaDevice};
    ///
    /// let device = CudaDevice::new(0)?;
    /// let allocator = CudaAllocator::new(&device, "plan:learn".parse::<Config>()?)?;
    /// let stream = device.context().new_stream()?;
    /// for _ in 0..100 {
    ///     let step = allocator.step(0)?;
    ///     let activations = allocator.alloc_zeroed::<f32>(&stream, 1 << 20)?;
    ///     drop(activations);
    ///     let report = step.end()?;
    ///     if let Some(difference) = report.difference {
    ///         eprintln!("{difference}");
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn step(&self, key: u64) -> Result<Step<'_, B>, StepError> {
        Ok(Step { guard: self.core().step(self.pool(), key)? })
    }

    /// Adopts a plan for steps of this allocator's pool. See [`symmalloc_core::Allocator::adopt_plan`].
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the pool, or there is no memory for it.
    pub fn adopt_plan(&self, plan: Plan) -> Result<(), PlanError> {
        self.core().adopt_plan(self.pool(), plan)
    }

    /// Discards the plans of this allocator's pool.
    ///
    /// # Errors
    /// Returns an error if a step of the pool is open.
    pub fn drop_plans(&self) -> Result<(), PlanError> {
        self.core().drop_plans(self.pool())
    }
}

/// Guard of an open step, which ends when the guard is dropped. See [`CachingAllocator::step`].
#[must_use = "the step ends when the guard is dropped"]
pub struct Step<'a, B: CudaMemory> {
    guard: StepGuard<'a, B, Shared>,
}

impl<B: CudaMemory> Step<'_, B> {
    /// Ends the step. Reports how far it followed the plan.
    ///
    /// # Errors
    /// Returns an error if another call has already ended the step.
    pub fn end(self) -> Result<StepReport, StepError> {
        self.guard.end()
    }
}

impl<B: CudaMemory> fmt::Debug for Step<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Step")
    }
}
