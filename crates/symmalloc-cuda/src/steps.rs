//! Steps of a pool, which follow plans: see [`symmalloc_core::plans`].

use crate::allocator::CachingAllocator;
use crate::backend::CudaMemory;
use std::fmt;
use symmalloc_core::StepGuard;
use symmalloc_core::lock::Shared;
use symmalloc_core::plans::{Plan, PlanError, StepError, StepReport};

impl<B: CudaMemory> CachingAllocator<B> {
    /// A step of this allocator's pool: what the program repeats, for example a training step or a batch. It ends when the
    /// returned step is dropped or [ended](Step::end). `key` says which steps are alike, such as the shape of a batch; 0 when all
    /// are. In a pool with `plan:learn` a step that comes twice alike is planned when it ends, and followed from then on: what
    /// is reserved is then what is live at the peak.
    ///
    /// Begin and end steps at the same points on every rank, outside of captures, while no other thread uses the pool. The end of a
    /// step that is planned takes up to some seconds, and gives free memory back, for which the host waits.
    ///
    /// # Errors
    /// When a step of the pool is open.
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
    /// When it does not fit the pool, or there is no memory for it.
    pub fn adopt_plan(&self, plan: Plan) -> Result<(), PlanError> {
        self.core().adopt_plan(self.pool(), plan)
    }

    /// Gives the plans of this allocator's pool up.
    ///
    /// # Errors
    /// When a step of the pool is open.
    pub fn drop_plans(&self) -> Result<(), PlanError> {
        self.core().drop_plans(self.pool())
    }
}

/// A step that is open until this is dropped. See [`CachingAllocator::step`].
#[must_use = "the step ends when this is dropped"]
pub struct Step<'a, B: CudaMemory> {
    guard: StepGuard<'a, B, Shared>,
}

impl<B: CudaMemory> Step<'_, B> {
    /// Ends the step. Says how far it went as planned.
    ///
    /// # Errors
    /// When the step was ended by another call meanwhile.
    pub fn end(self) -> Result<StepReport, StepError> {
        self.guard.end()
    }
}

impl<B: CudaMemory> fmt::Debug for Step<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Step")
    }
}
