//! Resizing a pool with a quota: the pool holds as much memory as the program requests, at stable addresses.
//!
//! ```text
//!  range     |live|free|live|live|free          |                    to the range's end
//!  smaller   |live|    |live|live|              |    trim p1          releases all free memory
//!            |live|free|live|live|              |    reserve q p1     the lowest holes first, then the end
//! ```
//! A resize decides no placement. It consists of the ops `trim` and `reserve`, which are recorded like any others.

use symmalloc_core::config::SegmentPolicy;
use symmalloc_core::errors::{PoolSleeps, ReserveError, TrimError, UnknownError};
use symmalloc_core::lock::Lock;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::sleep::Phase;
use symmalloc_core::units::Counted;
use symmalloc_core::{Backend, PoolId, StreamId, generic};
use thiserror::Error;

/// The reason a pool could not be resized.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool is asleep. It is unchanged.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// The pool grows automatically. It is unchanged.
    #[error(
        "{pool} has no quota: create it with growth_mb:0 and a range_mb of its maximum size, on a device with virtual memory"
    )]
    NoQuota {
        /// The pool that was to be resized.
        pool: PoolId,
    },
    /// The pool's address range is too small. The pool is unchanged.
    #[error(
        "{pool} cannot hold {quota_bytes} bytes: its address range has {range_bytes} bytes; create it with a larger one"
    )]
    OutOfRange {
        /// The pool that was to be resized.
        pool: PoolId,
        /// Requested size in bytes.
        quota_bytes: u64,
        /// Size of the pool's address range in bytes.
        range_bytes: u64,
    },
    /// Live allocations need more memory. The pool is unchanged.
    #[error("{pool} cannot shrink to {quota_bytes} bytes: live allocations need {needed_bytes} bytes; free some first")]
    InUse {
        /// The pool that was to be resized.
        pool: PoolId,
        /// Requested size in bytes.
        quota_bytes: u64,
        /// Size in bytes of the granules under live allocations.
        needed_bytes: u64,
    },
    /// Observers may have windows on the memory, so none of it can be released. The pool is unchanged.
    #[error("{pool} has {}, which may use its memory: deregister it before reducing its size", Counted((*observers).into(), "observer"))]
    Observed {
        /// The pool that was to be resized.
        pool: PoolId,
        /// Number of observers.
        observers: u32,
    },
    /// Memory could not be released. The pool holds at least its live allocations. The call can be repeated.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// Memory could not be allocated. The pool holds less than its quota, but at least its live allocations. The call can be repeated.
    #[error("{pool} holds {reserved_bytes} of {quota_bytes} bytes; resize it again when memory is available: {error}")]
    Reserve {
        /// The pool that was to be resized.
        pool: PoolId,
        /// Number of bytes that the pool holds now.
        reserved_bytes: u64,
        /// Requested size in bytes.
        quota_bytes: u64,
        /// The cause.
        error: Box<ReserveError>,
    },
}

/// Amounts of memory in a pool with one heap.
#[derive(Clone, Copy, Debug, Default)]
struct Reserved {
    bytes: u64,
    /// Size in bytes of the granules under live allocations.
    needed_bytes: u64,
    /// Size in bytes of the lowest hole between the heap's blocks.
    hole_bytes: Option<u64>,
}

impl Reserved {
    fn of<B: Backend, L: Lock>(core: &generic::Allocator<B, L>, pool: PoolId) -> Reserved {
        let granule = core.backend().granularity_bytes();
        let mut reserved = Reserved::default();
        for segment in core.snapshot().segments.into_iter().filter(|segment| segment.heap.pool == pool) {
            reserved.bytes += segment.mapped_bytes;
            let mut free_bytes = 0;
            for block in &segment.blocks {
                let (from, to) = (block.offset_bytes, block.offset_bytes + block.size_bytes);
                match block.state {
                    BlockStateSnapshot::Free { .. } => {
                        free_bytes += (to / granule * granule).saturating_sub(from.next_multiple_of(granule));
                    }
                    BlockStateSnapshot::Hole => reserved.hole_bytes = reserved.hole_bytes.or(Some(block.size_bytes)),
                    _ => {}
                }
            }
            reserved.needed_bytes += segment.mapped_bytes - free_bytes;
        }
        reserved
    }
}

/// Makes a pool with a [quota](symmalloc_core::PoolConfig::has_quota) hold exactly `quota_bytes` bytes, rounded up to granules, until the
/// next call, regardless of later allocations and frees. [`CudaAllocator::resize`](crate::CudaAllocator::resize) is the same function for a
/// CUDA stream.
///
/// To shrink, the pool releases all of its free memory, and the host waits until the streams that used this memory are done with it. The
/// pool then allocates memory up to the quota. Live allocations stay at their addresses. The lowest addresses are backed first.
///
/// Returns the number of bytes that the pool holds.
///
/// # Determinism
/// A resize consists of the ops `trim` and `reserve`: call it at the same point of the program on every rank.
///
/// # Errors
/// See [`ResizeError`]. For variants that leave the pool unchanged, no op was carried out.
pub fn resize<B: Backend, L: Lock>(
    core: &generic::Allocator<B, L>,
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
    let mut reserved = Reserved::of(core, pool);
    if reserved.needed_bytes > quota_bytes {
        return Err(ResizeError::InUse { pool, quota_bytes, needed_bytes: reserved.needed_bytes });
    }
    let observers = core.observer_count(pool);
    if reserved.bytes > quota_bytes && observers > 0 {
        return Err(ResizeError::Observed { pool, observers });
    }
    // The driver may not have released a segment that an earlier resize removed.
    if reserved.bytes > quota_bytes || observers == 0 && core.has_retired_segments(pool)? {
        core.trim_pool(pool)?;
        reserved = Reserved::of(core, pool);
    }
    while reserved.bytes < quota_bytes {
        let missing = quota_bytes - reserved.bytes;
        let step = reserved.hole_bytes.map_or(missing, |hole| hole.min(missing));
        if let Err(error) = core.reserve(pool, stream, reserved.bytes + step) {
            let reserved_bytes = Reserved::of(core, pool).bytes;
            return Err(ResizeError::Reserve { pool, reserved_bytes, quota_bytes, error: Box::new(error) });
        }
        reserved = Reserved::of(core, pool);
    }
    Ok(reserved.bytes)
}
