//! Errors of replaying a job.

use symmalloc_core::backend::BackendError;
use symmalloc_core::config::ConfigError;
use symmalloc_core::errors::FreeError;
use symmalloc_core::ids::PoolId;
use symmalloc_core::units::Amount;
use symmalloc_core::work::{TooMuchWork, WORK_PER_OP};
use symmalloc_sim::job::STRETCH_MAX;
use symmalloc_trace::replay::StepError;

/// Maximum number of blocks and heaps that comparisons may scan, in addition to [`WORK_PER_OP`] for each op. A rank takes about 30 seconds
/// for them.
pub(super) const SCANNED_MAX: u64 = 250_000_000;

/// Maximum number of ops between two comparisons of the ranks of a simulation, even without a sync.
pub(super) const OPS_PER_COMPARISON: usize = STRETCH_MAX;

/// Maximum number of streams that use a shared heap: those that allocate from it, and those that use its allocations. Every free block
/// of such a heap may have to wait for each of them. Frameworks use at most a few dozen streams per device.
pub const STREAMS_PER_HEAP_MAX: usize = 256;

/// Error that prevents the replay of a job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The combination of the recording's configuration and the options is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An op fails.
    #[error("op {op} on rank {rank}: {error}")]
    Step {
        /// The rank.
        rank: u32,
        /// The op, counted from 0.
        op: usize,
        /// The cause.
        error: StepError,
    },
    /// The heaps of the job exceed the address space of a device.
    #[error(
        "{heaps} heaps reserve {} of address space at the same time, more than a device has: lower range_mb, \
         let streams share, or use segments:fixed", Amount(*addresses)
    )]
    Addresses {
        /// Number of heaps that exist at the same time, including the first that does not fit.
        heaps: usize,
        /// Address space that these heaps reserve, in bytes.
        addresses: u64,
    },
    /// More than [`STREAMS_PER_HEAP_MAX`] streams use one shared heap.
    #[error(
        "more than {STREAMS_PER_HEAP_MAX} streams share a heap of pool {pool}, and each of its free blocks may have to wait \
         for all of them"
    )]
    SharedStreams {
        /// The pool of the heap.
        pool: PoolId,
    },
    /// The job repeats ops whose work grows with its live memory, and exceeds the allowance for this work.
    #[error("op {op} on rank {rank}, in the model of address order: {source}")]
    TooMuchWork {
        /// The rank.
        rank: u32,
        /// The op, counted from 0.
        op: usize,
        /// The exhausted allowance.
        source: TooMuchWork,
    },
    /// A simulation compares its ranks so often that the comparisons scan too many blocks and heaps.
    #[error(
        "op {op}: {comparisons} comparisons of the ranks, at syncs and after every {OPS_PER_COMPARISON} ops, scan more than {SCANNED_MAX} \
         blocks and heaps in addition to {WORK_PER_OP} for each op"
    )]
    Comparisons {
        /// The op, counted from 0.
        op: usize,
        /// Number of comparisons up to the op.
        comparisons: usize,
    },
    /// A pool cannot adopt its plan.
    #[error("the plan cannot be followed on rank {rank}: {error}")]
    Plan {
        /// The rank.
        rank: u32,
        /// The cause.
        error: StepError,
    },
    /// A rank cannot begin the next pass.
    #[error("the next pass cannot begin on rank {rank}: {error}")]
    Pass {
        /// The rank.
        rank: u32,
        /// The cause.
        error: StepError,
    },
    /// The allocations that are live at the end of the program cannot be freed.
    #[error("leftover allocations cannot be freed on rank {rank}: {error}")]
    Free {
        /// The rank.
        rank: u32,
        /// The cause.
        error: FreeError,
    },
    /// A call to the simulated device of the address-order model fails.
    #[error("op {op} on rank {rank}, in the model of address order: {error}")]
    Model {
        /// The rank.
        rank: u32,
        /// The op, counted from 0.
        op: usize,
        /// The cause.
        error: BackendError,
    },
}
