//! Limits that apply to a request: those of its heap, of its pool and of all pools, each with the memory that is live under it.

use crate::quantity::{count, memory};
use crate::recorded::Recorded;
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::config::{PoolConfig, SegmentPolicy};
use symmalloc_core::errors::OutOfMemoryCause;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_core::units::MIB;

/// The scope of a limit, from the narrowest to the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// The only segment of a heap, its range, or a quota.
    Segment,
    /// A pool's limit.
    Pool,
    /// The allocator's limit over all pools.
    Total,
    /// The memory that the recorded allocator held, and what was free on the device.
    Device,
}

impl Scope {
    /// Returns the word for the scope in JSON.
    pub(super) fn word(self) -> &'static str {
        match self {
            Scope::Segment => "segment",
            Scope::Pool => "pool",
            Scope::Total => "total",
            Scope::Device => "device",
        }
    }
}

/// A limit that applies to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) scope: Scope,
    pub(super) capacity_bytes: u64,
    /// Bytes under the limit that the program had requested and not freed.
    pub(super) live_bytes: u64,
}

/// Bytes that the program had requested and not freed before an op.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LiveBytes {
    /// By pool and stream.
    pub(super) by_heap: BTreeMap<(PoolId, StreamId), u64>,
    /// Pools that sleep. Their memory is not on the device and counts toward no limit.
    pub(super) asleep: BTreeSet<PoolId>,
}

impl LiveBytes {
    /// Returns the bytes that are live after these ops.
    pub(super) fn after(ops: &[Op]) -> Self {
        let (mut allocations, mut live) = (Vec::new(), LiveBytes::default());
        for op in ops {
            match op {
                Op::Allocate { pool, stream, size_bytes, .. } => {
                    allocations.push(((*pool, *stream), *size_bytes));
                    let heap = live.by_heap.entry((*pool, *stream)).or_default();
                    *heap = heap.saturating_add(*size_bytes);
                }
                Op::Free { id } => {
                    if let Some((heap, size_bytes)) = allocations.get(id.index())
                        && let Some(heap) = live.by_heap.get_mut(heap)
                    {
                        *heap = heap.saturating_sub(*size_bytes);
                    }
                }
                Op::Sleep { pool, .. } => _ = live.asleep.insert(*pool),
                Op::Wake { pool } => _ = live.asleep.remove(pool),
                _ => {}
            }
        }
        live
    }

    pub(super) fn all(&self) -> u64 {
        self.sum(|_, _| true)
    }

    pub(super) fn of_pool(&self, pool: PoolId) -> u64 {
        self.sum(|of, _| of == pool)
    }

    fn sum(&self, includes: impl Fn(PoolId, StreamId) -> bool) -> u64 {
        let is_awake = |pool: &PoolId| !self.asleep.contains(pool);
        let included = self.by_heap.iter().filter(|((pool, stream), _)| is_awake(pool) && includes(*pool, *stream));
        included.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

/// Returns the configuration of a pool at an op.
pub(super) fn pool_config(recorded: &Recorded, pool: PoolId, op: usize) -> PoolConfig {
    let ops = &recorded.program().ops()[..op];
    let stated = ops.iter().rev().find_map(|op| match op {
        Op::CreatePool { pool: of, config } if *of == pool => Some(PoolConfig::clone(config)),
        _ => None,
    });
    stated.unwrap_or_else(|| recorded.config.default_pool().clone())
}

/// Returns the limits that apply to a request in a pool, the narrowest first. `cause` is the reason of symmalloc's refusal, and
/// `device_bytes` the memory available to the recorded allocator.
pub(super) fn bounds(
    recorded: &Recorded,
    (pool, stream): (PoolId, StreamId),
    op: usize,
    live: &LiveBytes,
    cause: Option<&OutOfMemoryCause>,
    device_bytes: Option<u64>,
) -> Vec<Bound> {
    let config = pool_config(recorded, pool, op);
    let groups = recorded.program().groups();
    let heap = |stream| config.streams().group_of(stream, &groups);
    let of_heap = || live.sum(|of, on| of == pool && heap(on) == heap(stream));
    let segment_bytes = match cause {
        Some(OutOfMemoryCause::SegmentFull { segment_bytes }) => Some(*segment_bytes),
        _ => None,
    };
    let limits = [
        (Scope::Segment, segment_bytes, of_heap()),
        (Scope::Pool, config.limit_bytes(), live.of_pool(pool)),
        (Scope::Total, recorded.config.total_limit_bytes(), live.all()),
        (Scope::Device, device_bytes, live.all()),
    ];
    let bound = |(scope, capacity, live_bytes): (Scope, Option<u64>, u64)| {
        capacity.map(|capacity_bytes| Bound { scope, capacity_bytes, live_bytes })
    };
    limits.into_iter().filter_map(bound).collect()
}

impl Bound {
    /// Returns the bytes that live memory and a request need.
    pub(super) fn needed_bytes(&self, size_bytes: u64) -> u64 {
        self.live_bytes.saturating_add(size_bytes)
    }

    /// Returns the bytes by which live memory and a request exceed the limit.
    pub(super) fn missing_bytes(&self, size_bytes: u64) -> u64 {
        self.needed_bytes(size_bytes).saturating_sub(self.capacity_bytes)
    }

    /// Names the memory that counts toward the limit.
    pub(super) fn live_memory(&self, pool: PoolId) -> String {
        match self.scope {
            Scope::Segment => format!("live memory of this heap of pool {}", pool.0),
            Scope::Pool => format!("live memory of pool {}", pool.0),
            Scope::Total => "live memory of all pools".to_owned(),
            Scope::Device => "live memory".to_owned(),
        }
    }

    /// Names the limit.
    pub(super) fn limit(&self) -> String {
        let capacity = memory(self.capacity_bytes);
        match self.scope {
            Scope::Segment => format!("the heap's segment ({capacity})"),
            Scope::Pool => format!("the pool's limit ({capacity})"),
            Scope::Total => format!("the limit of all pools ({capacity})"),
            Scope::Device => format!("the memory available to the allocator ({capacity})"),
        }
    }

    /// States the limit.
    pub(super) fn capacity(&self) -> String {
        let capacity = memory(self.capacity_bytes);
        match self.scope {
            Scope::Segment => format!("the heap's segment has {capacity}"),
            Scope::Pool => format!("the pool's limit is {capacity}"),
            Scope::Total => format!("the limit of all pools is {capacity}"),
            Scope::Device => format!("only {capacity} is available to the allocator"),
        }
    }

    /// Describes the setting to raise so that a request fits, with its value and the minimum new value. Returns `None` for a device.
    pub(super) fn setting(&self, pool: PoolId, config: &PoolConfig, size_bytes: u64) -> Option<String> {
        let mib = self.needed_bytes(size_bytes).div_ceil(MIB);
        let raised = format!("to at least {} ({})", count(mib), memory(mib.saturating_mul(MIB)));
        let change = format!("from {} {raised}", count(self.capacity_bytes / MIB));
        let pool = pool.0;
        Some(match (self.scope, config.segments()) {
            (Scope::Segment, SegmentPolicy::Reserved { .. }) => format!("segment_mb of pool {pool} {change}"),
            (Scope::Segment, _) if config.has_quota() => format!("the quota of pool {pool} (in MiB) {raised}"),
            (Scope::Segment, _) => format!("range_mb of pool {pool} {change}"),
            (Scope::Pool, _) => format!("limit_mb of pool {pool} {change}"),
            (Scope::Total, _) => format!("total_limit_mb {change}"),
            (Scope::Device, _) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::AllocationId;
    use symmalloc_core::op::Contents;

    #[test]
    fn memory_of_a_sleeping_pool_counts_toward_no_limit() {
        let (pool, stream) = (PoolId(1), StreamId(0));
        let allocate = |id, pool, size_bytes| Op::Allocate { id: AllocationId(id), pool, stream, size_bytes };
        let mut ops = vec![allocate(0, pool, 50 * MIB), allocate(1, PoolId::DEFAULT, 5 * MIB)];
        let live = |ops: &[Op]| {
            let live = LiveBytes::after(ops);
            (live.all() / MIB, live.of_pool(pool) / MIB)
        };
        assert_eq!(live(&ops), (55, 50));
        ops.push(Op::Sleep { pool, contents: Contents::Keep });
        assert_eq!(live(&ops), (5, 0));
        ops.extend([Op::Free { id: AllocationId(1) }, Op::Wake { pool }]);
        assert_eq!(live(&ops), (50, 50));
    }
}
