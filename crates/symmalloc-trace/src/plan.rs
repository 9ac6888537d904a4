//! Plans as text: one process computes a plan and writes it to a file, and other processes follow it.
//!
//! [`symmalloc_core::plans`] defines plans and their semantics; `docs/plan-format.md` specifies the format.
//!
//! ```
//! use symmalloc::plans::{Plan, StepAllocation, SearchBudget};
//! use symmalloc::ids::StreamGroup;
//! use symmalloc::{Allocator, Config, PoolId, StreamId};
//! use symmalloc::sim::SimBackend;
//! use symmalloc::trace::plan::{self, PlanFile};
//!
//! let config = Config::default();
//! let stream = StreamId(0);
//! let wanted = |requested_bytes, until| StepAllocation { stream, requested_bytes, until: Some(until) };
//! let step = [wanted(4 << 20, 2), wanted(512, 3), wanted(6 << 20, 3)];
//! let solved = Plan::solve(config.default_pool(), 2 << 20, StreamGroup::One(stream), 0, &step, SearchBudget::default())?;
//! let mut file = PlanFile::new(config);
//! file.add_plan(PoolId::DEFAULT, solved)?;
//! let text = plan::to_text(&file);
//! assert!(text.starts_with("symmalloc-plan 1\nconfig segments:expandable,"));
//! assert!(text.ends_with("plan p0 s0 key 0 allocations 3\na 4194304 s0 2 @512\na 512 s0 3 @0\na 6291456 s0 3 @512\nend 5\n"));
//!
//! // Another process follows it.
//! let file = plan::parse(&text)?;
//! let allocator = Allocator::new(SimBackend::builder().seed(1).build(), file.config().clone())?;
//! allocator.register_stream()?;
//! for (heap, plan) in file.plans() {
//!     allocator.adopt_plan(heap.pool, plan.clone())?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod contradiction;
mod file;
mod line;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use contradiction::PlanContradiction;
pub use file::PlanFile;
pub use line::{MAGIC, VERSION};
pub use reader::{PlanTextError, parse, read};
pub use writer::to_text;
