//! Plans: offsets for the allocations of steps that repeat, computed in advance. This module is independent of the
//! heap; `heap/follow.rs` acquires the memory of plans and serves requests in it.
//!
//! A program marks its steps with [`begin_step`](crate::Allocator::begin_step) and
//! [`end_step`](crate::Allocator::end_step). A heap that has a plan for a step places the step's allocations as
//! planned. Plans come from a program ([`Plan::solve`], [`adopt_plan`](crate::Allocator::adopt_plan)), or from the heap
//! itself if its pool is configured with `plan:learn`.
//!
//! # Examples
//! The heap plans a step that occurs twice. From then on, the step needs no more memory than its live peak:
//!
//! ```
//! use symmalloc::config::PlanPolicy;
//! use symmalloc::{Allocator, Config, PoolConfig, PoolId};
//! use symmalloc::sim::SimBackend;
//!
//! let pool = PoolConfig::builder().plan(PlanPolicy::Learn).build()?;
//! let config = Config::builder().default_pool(pool).build()?;
//! let allocator = Allocator::new(SimBackend::builder().seed(1).build(), config)?;
//! let stream = allocator.register_stream()?;
//! let mut last = None;
//! for _ in 0..3 {
//!     allocator.begin_step(PoolId::DEFAULT, 0)?;
//!     let activations = allocator.allocate(PoolId::DEFAULT, stream, 4 << 20)?;
//!     let loss = allocator.allocate(PoolId::DEFAULT, stream, 512)?;
//!     allocator.free(activations.handle)?;
//!     let gradients = allocator.allocate(PoolId::DEFAULT, stream, 6 << 20)?;
//!     allocator.free(loss.handle)?;
//!     allocator.free(gradients.handle)?;
//!     last = Some(allocator.end_step(PoolId::DEFAULT)?);
//! }
//! let last = last.expect("three steps");
//! assert_eq!((last.allocations, last.planned, last.difference), (3, 3, None));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod error;
pub(crate) mod heap_plans;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod step;

pub use error::{PlanError, StepError};
pub use plan::{ALLOCATIONS_MAX, Plan, PlannedAllocation, StepAllocation};
pub use report::{DifferenceCause, StepDifference, StepReport, StepStats};
pub use symmalloc_plan::SearchBudget;
