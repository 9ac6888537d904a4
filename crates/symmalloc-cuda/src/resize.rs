//! Resizing a pool with a quota: it holds as much memory as the program says, at addresses that stay.
//!
//! ```text
//!  range     |live|free|live|live|free          |                    to the range's end
//!  smaller   |live|    |live|live|              |    trim p1          all that is free goes back
//!            |live|free|live|live|              |    reserve q p1     the lowest holes first, then the end
//! ```
//! Nothing here decides a placement: a resize is the ops `trim` and `reserve`, which a recording has as any others.

use symmalloc_core::config::SegmentPolicy;
use symmalloc_core::errors::{PoolSleeps, ReserveError, TrimError, UnknownError};
use symmalloc_core::lock::Lock;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::sleep::Phase;
use symmalloc_core::{Allocator, Backend, PoolId, StreamId};
use thiserror::Error;

/// Why a pool was not resized.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool sleeps. It is as it was.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// The pool grows by itself. It is as it was.
    #[error(
        "{pool} has no quota: make it with growth_mb:0 and a range_mb of the most that it will hold, on a device with virtual memory"
    )]
    NoQuota {
        /// The pool.
        pool: PoolId,
    },
    /// The pool has not so many addresses. It is as it was.
    #[error("{pool} cannot hold {quota_bytes} bytes: its range has {range_bytes}, make it with a larger one")]
    OutOfRange {
        /// The pool.
        pool: PoolId,
        /// Bytes asked for.
        quota_bytes: u64,
        /// Bytes of its range.
        range_bytes: u64,
    },
    /// More than that is in use. The pool is as it was.
    #[error(
        "{pool} cannot hold as little as {quota_bytes} bytes: {needed_bytes} are under live allocations, free some first"
    )]
    InUse {
        /// The pool.
        pool: PoolId,
        /// Bytes asked for.
        quota_bytes: u64,
        /// Bytes of the granules under live allocations.
        needed_bytes: u64,
    },
    /// Somebody may have windows on the memory, so that none of it can go back. The pool is as it was.
    #[error("{pool} has {observers} observers, which may hold its memory: deregister it before it gets smaller")]
    Observed {
        /// The pool.
        pool: PoolId,
        /// Number of observers.
        observers: u32,
    },
    /// Memory could not go back. The pool holds no less than what is live; call it again.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// Memory was refused. The pool holds less than its quota, and all that is live; call it again.
    #[error("{pool} holds {held_bytes} of {quota_bytes} bytes, resize it again when there is memory: {error}")]
    Reserve {
        /// The pool.
        pool: PoolId,
        /// Bytes that it holds now.
        held_bytes: u64,
        /// Bytes asked for.
        quota_bytes: u64,
        /// Why it holds no more.
        error: Box<ReserveError>,
    },
}

/// What a pool with one heap holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    bytes: u64,
    /// Of the granules under live allocations.
    needed_bytes: u64,
    /// The lowest hole between its blocks.
    hole_bytes: Option<u64>,
}

impl Held {
    fn of<B: Backend, L: Lock>(core: &Allocator<B, L>, pool: PoolId) -> Held {
        let granule = core.backend().granularity_bytes();
        let mut held = Held::default();
        for segment in core.snapshot().segments.into_iter().filter(|segment| segment.pool == pool) {
            held.bytes += segment.mapped_bytes;
            let mut free_bytes = 0;
            for block in &segment.blocks {
                let (from, to) = (block.offset_bytes, block.offset_bytes + block.size_bytes);
                match block.state {
                    BlockStateSnapshot::Free { .. } => {
                        free_bytes += (to / granule * granule).saturating_sub(from.next_multiple_of(granule));
                    }
                    BlockStateSnapshot::Hole => held.hole_bytes = held.hole_bytes.or(Some(block.size_bytes)),
                    _ => {}
                }
            }
            held.needed_bytes += segment.mapped_bytes - free_bytes;
        }
        held
    }
}

/// Makes a pool with a [quota](symmalloc_core::PoolConfig::has_quota) hold so many bytes, rounded up to granules: no more and no less,
/// whatever is allocated and freed in it until the next call. [`CudaAllocator::resize`](crate::CudaAllocator::resize) is the same with a stream of CUDA's.
///
/// A pool that shall hold less gives all of its free memory back, waiting on the host for the streams that used it, and takes what the quota
/// leaves. Live allocations stay where they are. Memory is taken for the lowest addresses first.
///
/// Returns the bytes that it holds.
///
/// # Determinism
/// It consists of the ops `trim` and `reserve`: call it at the same point of the program on every rank.
///
/// # Errors
/// See [`ResizeError`]. Where it says that the pool is as it was, no op was carried out.
pub fn resize<B: Backend, L: Lock>(
    core: &Allocator<B, L>,
    pool: PoolId,
    stream: StreamId,
    quota_bytes: u64,
) -> Result<u64, ResizeError> {
    let config = core.pool_config(pool)?;
    let range_bytes = match config.segments() {
        SegmentPolicy::Expandable(knobs) if config.has_quota() => knobs.range_bytes,
        _ => return Err(ResizeError::NoQuota { pool }),
    };
    if core.phase(pool)? != Phase::Awake {
        return Err(PoolSleeps { pool }.into());
    }
    let granule = core.backend().granularity_bytes();
    let quota_bytes = quota_bytes
        .checked_next_multiple_of(granule)
        .filter(|bytes| *bytes <= range_bytes)
        .ok_or(ResizeError::OutOfRange { pool, quota_bytes, range_bytes })?;
    let mut held = Held::of(core, pool);
    if held.needed_bytes > quota_bytes {
        return Err(ResizeError::InUse { pool, quota_bytes, needed_bytes: held.needed_bytes });
    }
    if held.bytes > quota_bytes {
        let observers = core.observer_count(pool);
        if observers > 0 {
            return Err(ResizeError::Observed { pool, observers });
        }
        core.trim(Some(pool))?;
        held = Held::of(core, pool);
    }
    while held.bytes < quota_bytes {
        let missing = quota_bytes - held.bytes;
        let step = held.hole_bytes.map_or(missing, |hole| hole.min(missing));
        if let Err(error) = core.reserve(pool, stream, held.bytes + step) {
            let held_bytes = Held::of(core, pool).bytes;
            return Err(ResizeError::Reserve { pool, held_bytes, quota_bytes, error: Box::new(error) });
        }
        held = Held::of(core, pool);
    }
    Ok(held.bytes)
}
