//! The metrics of an allocator: one series per heap for additive values, and one per allocator for the others.

use super::{Metric, Publisher, Source};
use crate::allocator::Allocator;
use crate::errors::UnknownError;
use crate::lock::Lock;
use crate::report::MemoryStats;
use crate::types::ids::{HeapId, StreamGroup};
use crate::{Backend, PoolConfig, PoolId};
use ::metrics::Unit;

const BYTES: Option<Unit> = Some(Unit::Bytes);
const COUNT: Option<Unit> = Some(Unit::Count);

const RESERVED: Metric = Metric::gauge("symmalloc_reserved_bytes", BYTES, "reserved device memory");
const RESERVED_PEAK: Metric = Metric::gauge("symmalloc_reserved_bytes_peak", BYTES, "peak of reserved device memory");
const ALLOCATED: Metric = Metric::gauge("symmalloc_allocated_bytes", BYTES, "bytes in blocks of live allocations");
const ALLOCATED_PEAK: Metric =
    Metric::gauge("symmalloc_allocated_bytes_peak", BYTES, "peak of bytes in blocks of live allocations");
const REQUESTED: Metric = Metric::gauge("symmalloc_requested_bytes", BYTES, "bytes requested by live allocations");
const REQUESTED_PEAK: Metric =
    Metric::gauge("symmalloc_requested_bytes_peak", BYTES, "peak of bytes requested by live allocations");
const RETIRED: Metric =
    Metric::gauge("symmalloc_retired_bytes", BYTES, "bytes of dead segments not yet returned to the device");
const LARGEST_FREE: Metric = Metric::gauge("symmalloc_largest_free_bytes", BYTES, "size of the largest free block");
const FRAGMENTATION: Metric =
    Metric::gauge("symmalloc_fragmentation_ratio", None, "1 - largest free block / free bytes; 0 if no bytes are free");
const SEGMENTS: Metric = Metric::gauge("symmalloc_segments", COUNT, "live segments");
const FREE_BLOCKS: Metric = Metric::gauge("symmalloc_free_blocks", COUNT, "free blocks");
const LIVE: Metric = Metric::gauge("symmalloc_live_allocations", COUNT, "live allocations of at least one byte");
const ALLOCATIONS: Metric = Metric::counter("symmalloc_allocations_total", COUNT, "allocations of at least one byte");
const FREES: Metric = Metric::counter("symmalloc_frees_total", COUNT, "frees of allocations of at least one byte");
const OBTAINED: Metric = Metric::counter("symmalloc_obtained_bytes_total", BYTES, "bytes obtained from the device");
const RELEASED: Metric = Metric::counter("symmalloc_released_bytes_total", BYTES, "bytes returned to the device");
const GROWTHS: Metric = Metric::counter("symmalloc_growths_total", COUNT, "times memory was obtained");
const TRIMS: Metric = Metric::counter("symmalloc_trims_total", COUNT, "trims of the heap");
const RETRIES: Metric =
    Metric::counter("symmalloc_retries_total", COUNT, "requests retried after an automatic trim or a failure callback");
const OUT_OF_MEMORY: Metric =
    Metric::counter("symmalloc_out_of_memory_total", COUNT, "requests that failed for lack of memory");
const OPS: Metric = Metric::counter(
    "symmalloc_ops_total",
    COUNT,
    "ops in the heap's history; equal on ranks that performed the same ops",
);

const TOTAL_RESERVED_PEAK: Metric =
    Metric::gauge("symmalloc_total_reserved_bytes_peak", BYTES, "peak of reserved device memory over all pools");
const TOTAL_ALLOCATED_PEAK: Metric = Metric::gauge(
    "symmalloc_total_allocated_bytes_peak",
    BYTES,
    "peak of bytes in blocks over all pools, or an upper bound",
);
const TOTAL_REQUESTED_PEAK: Metric = Metric::gauge(
    "symmalloc_total_requested_bytes_peak",
    BYTES,
    "peak of requested bytes over all pools, or an upper bound",
);
const LIMIT: Metric = Metric::gauge("symmalloc_limit_bytes", BYTES, "current limit over all pools");
const POOL_LIMIT: Metric = Metric::gauge("symmalloc_pool_limit_bytes", BYTES, "configured limit of the pool");

/// Gauges that are set to zero when a heap's pool is destroyed. Peaks keep their values.
const HEAP_GAUGES: [&Metric; 9] =
    [&RESERVED, &ALLOCATED, &REQUESTED, &RETIRED, &LARGEST_FREE, &FRAGMENTATION, &SEGMENTS, &FREE_BLOCKS, &LIVE];

impl<B: Backend, L: Lock> Source for Allocator<B, L> {
    /// Publishes the memory metrics of every heap, labeled `pool` and `stream` (`all` if the pool's streams share a
    /// heap), and those of the whole allocator. Locks one heap at a time while it counts that heap's free blocks.
    fn publish(&self, to: &Publisher) {
        for (id, stats) in self.stats_by_heap() {
            let heap = of_heap(to, id);
            to.note_heap(&heap, id.pool.0);
            publish_heap(&heap, &stats);
        }
        let is_gone = |pool| matches!(self.pool_config(PoolId(pool)), Err(UnknownError::DestroyedPool { .. }));
        for heap in to.take_gone(is_gone) {
            for gauge in HEAP_GAUGES {
                heap.record(gauge, 0.0);
            }
        }
        for pool in self.pools() {
            for (group, digest) in self.heap_digests(pool).unwrap_or_default() {
                of_heap(to, HeapId { pool, group }).record(&OPS, digest.ops as f64);
            }
            if let Some(limit_bytes) = self.pool_config(pool).ok().and_then(PoolConfig::limit_bytes) {
                to.with_label("pool", pool.0.to_string()).record(&POOL_LIMIT, limit_bytes as f64);
            }
        }
        let stats = self.stats();
        to.record(&TOTAL_RESERVED_PEAK, stats.reserved_bytes.peak as f64);
        to.record(&TOTAL_ALLOCATED_PEAK, stats.usage.all.allocated_bytes.peak as f64);
        to.record(&TOTAL_REQUESTED_PEAK, stats.usage.all.requested_bytes.peak as f64);
        if let Some(limit_bytes) = self.total_limit_bytes() {
            to.record(&LIMIT, limit_bytes as f64);
        }
    }
}

fn of_heap(to: &Publisher, heap: HeapId) -> Publisher {
    let stream = match heap.group {
        StreamGroup::All => "all".to_owned(),
        StreamGroup::One(stream) => stream.0.to_string(),
        StreamGroup::Group(first) => format!("{}+", first.0),
    };
    to.with_label("pool", heap.pool.0.to_string()).with_label("stream", stream)
}

fn publish_heap(to: &Publisher, stats: &MemoryStats) {
    let usage = &stats.usage.all;
    let unavailable_bytes = stats.retired_bytes + usage.allocated_bytes.current;
    let free_bytes = stats.reserved_bytes.current.saturating_sub(unavailable_bytes);
    let largest_share = if free_bytes > 0 { stats.largest_free_bytes as f64 / free_bytes as f64 } else { 1.0 };
    to.record(&FRAGMENTATION, 1.0 - largest_share);
    for (metric, value) in [
        (&RESERVED, stats.reserved_bytes.current),
        (&RESERVED_PEAK, stats.reserved_bytes.peak),
        (&ALLOCATED, usage.allocated_bytes.current),
        (&ALLOCATED_PEAK, usage.allocated_bytes.peak),
        (&REQUESTED, usage.requested_bytes.current),
        (&REQUESTED_PEAK, usage.requested_bytes.peak),
        (&RETIRED, stats.retired_bytes),
        (&LARGEST_FREE, stats.largest_free_bytes),
        (&SEGMENTS, stats.segment_count),
        (&FREE_BLOCKS, stats.free_block_count),
        (&LIVE, usage.allocations.current),
        (&ALLOCATIONS, usage.allocations.allocated),
        (&FREES, usage.allocations.freed),
        (&OBTAINED, stats.reserved_bytes.allocated),
        (&RELEASED, stats.reserved_bytes.freed),
        (&GROWTHS, stats.growth_count),
        (&TRIMS, stats.trim_count),
        (&RETRIES, stats.retry_count),
        (&OUT_OF_MEMORY, stats.out_of_memory_count),
    ] {
        to.record(metric, value as f64);
    }
}
