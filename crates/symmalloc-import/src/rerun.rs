//! Reruns: a rerun executes a recorded program on this allocator, and lets the caller observe it op by op.
//!
//! ```text
//! Program ──► Rerun ──► each op: its outcome, and the memory mapped and unmapped
//!               └─────► a snapshot of every segment and block, at any time
//! ```
//!
//! Reruns serve everything that displays a job, such as a snapshot for PyTorch's viewer or a chart. A rerun keeps only the live
//! allocations. An observer may therefore stop anywhere and start a second rerun: by rule D1, every rerun is the same, and matches the job
//! itself on this allocator.
//!
//! If a recording states how long freed memory stayed [pending](symmalloc_core::op::Pending), a rerun can [keep it in
//! use](Rerun::with_pending_frees) for as long as the recorded allocator did.
//!
//! The simulated device grants every request, at ascending addresses. Placements do not depend on the device, and configured limits still
//! apply.
//!
//! ```
//! use symmalloc_core::config::Config;
//! use symmalloc_core::op::{Op, Record};
//! use symmalloc_trace::replay::Program;
//! use symmalloc_core::{AllocationId, PoolId, StreamId};
//! use symmalloc_import::rerun::{Rerun, RerunError};
//!
//! let allocate = Op::Allocate { id: AllocationId(0), pool: PoolId::DEFAULT, stream: StreamId(0), size_bytes: 1000 };
//! let records = [Op::register(StreamId(0)), allocate].map(Record::from);
//! let program = Program::new(&records)?;
//! let mut rerun = Rerun::new(&program, &Config::default())?;
//! let mut obtained_bytes = 0;
//! rerun.run::<RerunError>(program.ops().len(), |moment| {
//!     obtained_bytes += moment.memory.iter().map(|change| change.size_bytes).sum::<u64>();
//!     Ok(())
//! })?;
//! assert_eq!((obtained_bytes, rerun.snapshot().segments.len()), (2 << 20, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device;
mod live;
mod pending;

pub use device::MemoryChange;
pub use live::Live;

use std::borrow::Cow;

use symmalloc_core::Allocator;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::config::{Config, ConfigError, PoolConfig, SegmentPolicy, StreamPolicy};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{HeapId, Placement, PoolId, StreamGroup, StreamId};
use symmalloc_core::lock::Exclusive;
use symmalloc_core::op::Op;
use symmalloc_core::report::{SegmentSnapshot, Snapshot};
use symmalloc_core::sleep::Phase;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::{Program, Replay, StepError};

use device::NotingDevice;
use pending::PendingFrees;

/// A program on its own allocator. See the [module documentation](self).
#[derive(Debug)]
pub struct Rerun<'p> {
    program: &'p Program,
    allocator: Allocator<NotingDevice>,
    /// Configuration of each pool, by id.
    pools: Vec<Cow<'p, PoolConfig>>,
    /// If `true`, memory stays in use while its free is pending.
    with_pending_frees: bool,
    /// Plans that the run follows.
    plans: Option<&'p PlanFile>,
}

/// Outcome of an op.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Happened {
    /// The allocation is live.
    Allocated(Live),
    /// The allocation is free.
    Freed(Live),
    /// The program freed the allocation, but its memory stays in use. Only with [`Rerun::with_pending_frees`].
    FreeRequested(Live),
    /// An allocation that the program freed earlier is now free. Only with [`Rerun::with_pending_frees`].
    FreeCompleted(Live),
    /// Another stream also uses the allocation.
    Used {
        /// The allocation.
        live: Live,
        /// The other stream.
        stream: StreamId,
    },
    /// A configured limit refused the allocation, or its size exceeds the maximum size of a segment.
    Refused {
        /// Requested bytes.
        requested_bytes: u64,
        /// The allocation's stream.
        stream: StreamId,
        /// Bytes that remained under the limit; 0 if no limit refused the allocation.
        left_bytes: u64,
    },
    /// The program contains a refused request: [`Op::Refuse`].
    WasRefused {
        /// Requested bytes.
        requested_bytes: u64,
        /// The request's stream.
        stream: StreamId,
        /// Bytes that remained under the pool's limit or under the total limit, whichever is less. `None` without a
        /// limit.
        left_bytes: Option<u64>,
    },
    /// None of the above: an allocation of zero bytes, an op on a refused allocation, or an op on streams or pools.
    Nothing,
}

/// The execution of one op, or the completion of an earlier free.
#[derive(Debug)]
#[non_exhaustive]
pub struct Moment<'a> {
    /// Index of the op in the program, from 0. For a completion, the index of the last op before it.
    pub number: usize,
    /// The op. For a completion, the op that requested the free.
    pub op: &'a Op,
    /// Outcome of the op.
    pub happened: Happened,
    /// Memory that was mapped and unmapped, in order.
    pub memory: &'a [MemoryChange],
}

/// Error executing a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RerunError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An op failed.
    #[error("op {op}: {error}")]
    Step {
        /// Index of the op in the program, from 0.
        op: usize,
        /// The cause.
        error: StepError,
    },
}

impl<'p> Rerun<'p> {
    /// Creates a rerun of the program. The configuration replaces the program's settings for the default pool.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid for the device, whose granularity is 2 MiB.
    pub fn new(program: &'p Program, config: &Config) -> Result<Self, RerunError> {
        let allocator = Allocator::new(NotingDevice::new(), config.clone())?;
        let pools = vec![Cow::Owned(config.default_pool().clone())];
        Ok(Rerun { program, allocator, pools, with_pending_frees: false, plans: None })
    }

    /// Creates a rerun that follows plans, under the configuration of the plans. The program must create its pools with the configuration
    /// that the plans state.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid for the device, whose granularity is 2 MiB.
    pub fn following(program: &'p Program, plans: &'p PlanFile) -> Result<Self, RerunError> {
        Ok(Rerun { plans: Some(plans), ..Rerun::new(program, plans.config())? })
    }

    /// Keeps memory in use for as long as its free was pending in the recording. PyTorch's allocator behaves like this, because it waits
    /// for the device. The rerun may then need more memory. Destroying or resetting a pool completes the pending frees of all pools.
    #[must_use]
    pub fn with_pending_frees(mut self) -> Self {
        self.with_pending_frees = true;
        self
    }

    /// Executes the first `ops` ops of the program, and passes each of them to `watch`.
    ///
    /// # Errors
    /// Returns the first error of `watch` or of an op. A refused allocation is not an error.
    ///
    /// # Panics
    /// Panics if it is called a second time.
    pub fn run<E: From<RerunError>>(
        &mut self,
        ops: usize,
        mut watch: impl FnMut(&Moment<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        assert_eq!(self.allocator.stream_count(), 0, "a rerun runs once");
        let Rerun { program, allocator, pools, with_pending_frees, plans } = self;
        let mut replay = match plans {
            None => Replay::new(allocator, program),
            Some(plans) => started(allocator, program, plans).map_err(|error| RerunError::Step { op: 0, error })?,
        };
        let mut live: Vec<Option<Live>> = vec![None; program.allocation_count()];
        let mut refused = vec![false; program.allocation_count()];
        let (mut pending, groups) = (PendingFrees::default(), program.groups());
        for (number, op) in program.ops().iter().take(ops).enumerate() {
            let last = number.saturating_sub(1);
            while let Some(free) = pending.pop(matches!(op, Op::DestroyPool { .. } | Op::ResetPool { .. })) {
                complete(allocator, &mut replay, last, &program.ops()[free.op], free.live, &mut watch)?;
            }
            if let Op::CreatePool { pool, config } = op
                && pool.index() == pools.len()
            {
                pools.push(Cow::Borrowed(&**config));
            }
            allocator.backend().begin(heap_of(op, pools, &groups), is_expandable(op, pools));
            let stays = if *with_pending_frees { program.pending(number) } else { None };
            let taken = match (op, stays) {
                (Op::Free { id }, Some(stays)) => live[id.0 as usize].take().map(|live| (live, stays)),
                _ => None,
            };
            let happened = if let Op::Refuse { pool, stream, size_bytes, .. } = *op {
                replay.step(op).map_err(|error| RerunError::Step { op: number, error })?;
                let left_bytes = bytes_left(allocator, pool, pools);
                Happened::WasRefused { requested_bytes: size_bytes, stream, left_bytes }
            } else if let Some((live, stays)) = taken {
                pending.push(number, live, stays);
                Happened::FreeRequested(live)
            } else {
                carried_out(allocator, &mut replay, number, op, (&mut live, &mut refused), pools, &groups)?
            };
            if allocator.backend().has_ownerless() {
                let segments = allocator.snapshot().segments;
                allocator.backend().assign(|base| heap_of_segment(base, &segments, pools));
            }
            let memory = allocator.backend().end();
            watch(&Moment { number, op, happened, memory: &memory })?;
            pending.entry();
        }
        let last = ops.min(program.ops().len()).saturating_sub(1);
        while let Some(free) = pending.pop(false) {
            complete(allocator, &mut replay, last, &program.ops()[free.op], free.live, &mut watch)?;
        }
        Ok(())
    }

    /// Returns the current segments and blocks.
    pub fn snapshot(&self) -> Snapshot {
        self.allocator.snapshot()
    }

    /// Returns `true` if a pool is asleep. Its segments then have addresses but no memory.
    pub fn is_asleep(&self, pool: PoolId) -> bool {
        self.allocator.phase(pool).is_ok_and(|phase| phase == Phase::Asleep)
    }

    /// Returns the configuration of a pool that the program has created.
    pub fn pool_config(&self, pool: PoolId) -> Option<&PoolConfig> {
        self.pools.get(pool.index()).map(|config| &**config)
    }
}

/// Returns a replay that has begun its first pass.
fn started<'a>(
    allocator: &'a Allocator<NotingDevice>,
    program: &'a Program,
    plans: &'a PlanFile,
) -> Result<Replay<'a, NotingDevice, Exclusive>, StepError> {
    let mut replay = Replay::following(allocator, program, plans)?;
    replay.begin_pass()?;
    Ok(replay)
}

/// Returns the heap of the segment at this address, the segment's stream, and `true` if the segment is expandable.
fn heap_of_segment(
    base: DeviceAddress,
    segments: &[SegmentSnapshot],
    pools: &[Cow<'_, PoolConfig>],
) -> (HeapId, StreamId, bool) {
    let Some(segment) = segments.iter().find(|segment| segment.base == base) else {
        return (HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All }, StreamId(0), false);
    };
    let config = pools.get(segment.heap.pool.index());
    let is_expandable = config.is_some_and(|config| matches!(config.segments(), SegmentPolicy::Expandable(_)));
    (segment.heap, segment.heap.group.first().unwrap_or_default(), is_expandable)
}

/// Executes an op and returns its outcome.
fn carried_out(
    allocator: &Allocator<NotingDevice>,
    replay: &mut Replay<'_, NotingDevice, Exclusive>,
    number: usize,
    op: &Op,
    (live, refused): (&mut [Option<Live>], &mut [bool]),
    pools: &[Cow<'_, PoolConfig>],
    groups: &Groups,
) -> Result<Happened, RerunError> {
    let happened = match (replay.step(op), op) {
        (Ok(Some(made)), Op::Allocate { id, pool, stream, size_bytes }) if made.placement != Placement::NOWHERE => {
            let live_now = Live {
                id: *id,
                heap: heap_in(*pool, *stream, pools, groups),
                stream: *stream,
                placement: made.placement,
                address: made.address,
                requested_bytes: *size_bytes,
                block_bytes: made.size_bytes,
            };
            live[id.0 as usize] = Some(live_now);
            Happened::Allocated(live_now)
        }
        (Ok(_), Op::Free { id }) => live[id.0 as usize].take().map_or(Happened::Nothing, Happened::Freed),
        (Ok(_), Op::RecordUse { id, stream }) => {
            live[id.0 as usize].map_or(Happened::Nothing, |live| Happened::Used { live, stream: *stream })
        }
        (Ok(_), _) => Happened::Nothing,
        (Err(StepError::Allocate(error)), op) if is_refusal(&error) => match op {
            Op::Allocate { id, pool, stream, size_bytes } => {
                refused[id.0 as usize] = true;
                let left_bytes = bytes_left(allocator, *pool, pools).filter(|_| is_of_limit(&error)).unwrap_or(0);
                Happened::Refused { requested_bytes: *size_bytes, stream: *stream, left_bytes }
            }
            _ => Happened::Nothing,
        },
        (Err(StepError::NotLive { id }), _) if refused[id.0 as usize] => Happened::Nothing,
        (Err(error), _) => return Err(RerunError::Step { op: number, error }),
    };
    Ok(happened)
}

/// Completes a pending free. `number` is the index of the last op before it.
fn complete<E: From<RerunError>>(
    allocator: &Allocator<NotingDevice>,
    replay: &mut Replay<'_, NotingDevice, Exclusive>,
    number: usize,
    free: &Op,
    live: Live,
    watch: &mut impl FnMut(&Moment<'_>) -> Result<(), E>,
) -> Result<(), E> {
    allocator.backend().begin(None, false);
    replay.step(free).map_err(|error| RerunError::Step { op: number, error })?;
    let memory = allocator.backend().end();
    watch(&Moment { number, op: free, happened: Happened::FreeCompleted(live), memory: &memory })
}

/// Returns `true` if the allocator decided to refuse memory.
fn is_refusal(error: &AllocateError) -> bool {
    matches!(error, AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. })
}

/// Returns `true` if a limit refused the request. The device itself never refuses a request.
fn is_of_limit(error: &AllocateError) -> bool {
    matches!(error, AllocateError::OutOfMemory(refusal) if matches!(refusal.cause, OutOfMemoryCause::Limit { .. }))
}

/// Returns the bytes that remain under the limits that apply to a pool. They are computed from the bytes that the device counts, because a
/// job may be refused at every second op, and the allocator's statistics would examine all free blocks each time.
/// allocator's statistics would look at all free blocks.
fn bytes_left(allocator: &Allocator<NotingDevice>, pool: PoolId, pools: &[Cow<'_, PoolConfig>]) -> Option<u64> {
    let left = |limit: Option<u64>, reserved: u64| limit.map(|limit| limit.saturating_sub(reserved));
    let device = allocator.backend();
    let of_pool = pools.get(pool.index()).and_then(|config| left(config.limit_bytes(), device.mapped_bytes_of(pool)));
    let of_all = left(allocator.config().total_limit_bytes(), device.mapped_bytes());
    of_pool.into_iter().chain(of_all).min()
}

/// Returns the heap in which an op may obtain memory, and the stream of the op.
fn heap_of(op: &Op, pools: &[Cow<'_, PoolConfig>], groups: &Groups) -> Option<(HeapId, StreamId)> {
    match *op {
        Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => {
            Some((heap_in(pool, stream, pools, groups), stream))
        }
        _ => None,
    }
}

fn heap_in(pool: PoolId, stream: StreamId, pools: &[Cow<'_, PoolConfig>], groups: &Groups) -> HeapId {
    let streams = pools.get(pool.index()).map_or_else(StreamPolicy::default, |config| config.streams());
    HeapId { pool, group: streams.group_of(stream, groups) }
}

fn is_expandable(op: &Op, pools: &[Cow<'_, PoolConfig>]) -> bool {
    let (Op::Allocate { pool, .. } | Op::Reserve { pool, .. }) = op else { return false };
    pools.get(pool.index()).is_some_and(|config| matches!(config.segments(), SegmentPolicy::Expandable(_)))
}

#[cfg(test)]
mod tests;
