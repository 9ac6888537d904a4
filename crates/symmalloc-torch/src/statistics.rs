//! Statistics as JSON, under the keys of PyTorch's `torch.cuda.memory_stats_as_nested_dict`.
//!
//! | PyTorch's key | here |
//! |---|---|
//! | `allocation`, `allocated_bytes`, `requested_bytes` | the core's, in total and by size class |
//! | `active`, `active_bytes` | as `allocation` and `allocated_bytes`: a freed block never waits for an event before it is free (rule D3) |
//! | `reserved_bytes` | reserved device memory, only in total: an expandable range serves both classes |
//! | `segment` | segments, only in total and without a peak |
//! | `inactive_split`, `inactive_split_bytes` | free blocks, and their bytes |
//! | `num_alloc_retries`, `num_ooms` | allocations that were retried, and that failed |
//! | `num_device_alloc`, `num_device_free` | segments created and destroyed |
//!
//! `steps` counts steps and how far they followed plans. PyTorch has no such key.
//!
//! The peaks of `allocated_bytes`, `active_bytes` (`.all`, of the total) and `reserved_bytes` are exact, except that the
//! first two may include blocks that other threads are freeing. If `peaks_are_sums` is true, the other peaks are sums of the heaps' peaks.
//! The heaps may have their peaks at different times, so the sums are upper bounds.
//!
//! Keys of PyTorch without a counter here are omitted.

use crate::device::DeviceAllocator;
use serde_json::{Map, Value, json};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use symmalloc_core::PoolId;
use symmalloc_core::report::MemoryStats;
use symmalloc_core::sleep::Phase;
use symmalloc_core::stats::{Stat, UsageStats};
use symmalloc_cuda::{CudaDevice, CudaMemory};

/// Returns all statistics of an allocator.
pub(crate) fn as_json(allocator: &DeviceAllocator) -> Value {
    let core = allocator.core();
    let mut total = nested(&core.stats());
    for quantity in ["allocated_bytes", "active_bytes"] {
        total[quantity]["all"]["peak"] = allocator.peak_bytes().into();
    }
    let (retries, failures) = (allocator.refusals().retries(), allocator.refusals().failures());
    total.insert("num_alloc_retries".into(), retries.into());
    total.insert("num_ooms".into(), failures.into());
    let errors = &allocator.failures;
    let last = errors.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
    json!({
        "device": allocator.ordinal(),
        "total": total,
        "pools": pools(allocator),
        "streams": core.stream_count(),
        "reserved_limit_bytes": core.total_limit_bytes(),
        "history_bytes": core.history_bytes(),
        "idle_bytes": core.backend().idle_bytes(),
        "spare_bytes": core.backend().spare_bytes(),
        "errors": {
            "unknown_frees": errors.unknown_frees.load(Ordering::Relaxed),
            "failed_calls": errors.failed_calls.load(Ordering::Relaxed),
            "last": last,
        },
        "driver_calls": CudaDevice::driver_calls(),
    })
}

/// Returns the statistics of the existing pools, by id.
fn pools(allocator: &DeviceAllocator) -> Vec<Value> {
    let core = allocator.core();
    let (mempools, user) = (allocator.mempools().list(), allocator.user_pool_ids());
    let describe = |pool: PoolId| {
        let (config, stats, digest) =
            (core.pool_config(pool).ok()?, core.pool_stats(pool).ok()?, core.digest(pool).ok()?);
        let graph = mempools.iter().find(|entry| entry.own() == Some(pool));
        let kind = match graph {
            _ if pool == PoolId::DEFAULT => "default",
            Some(_) => "graph",
            None if user.contains(&pool) => "user",
            None => "given up",
        };
        Some(json!({
            "pool": pool.0,
            "kind": kind,
            "symmetric": config.symmetric(),
            "config": config.to_string(),
            "digest": digest.to_string(),
            "ops": digest.ops,
            "tag": config.tag(),
            "phase": core.phase(pool).ok().map(phase),
            "has_quota": config.has_quota(),
            "graph_uses": graph.map_or(0, |graph| graph.uses),
            "stats": nested(&stats),
        }))
    };
    core.pools().into_iter().filter_map(describe).collect()
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Awake => "awake",
        Phase::Asleep => "asleep",
        Phase::Held => "held",
    }
}

/// Statistics with the keys of `torch.cuda.memory_stats_as_nested_dict`.
fn nested(stats: &MemoryStats) -> Map<String, Value> {
    let classes = [("all", &stats.usage.all), ("small_pool", &stats.usage.small), ("large_pool", &stats.usage.large)];
    let by_class = |quantity: fn(&UsageStats) -> &Stat| {
        let entries = classes.iter().map(|(class, usage)| ((*class).to_owned(), stat(quantity(usage))));
        Value::Object(entries.collect())
    };
    let dead = stats.segments_born - stats.segment_count;
    let free_bytes = stats.reserved_bytes.current.saturating_sub(stats.usage.all.allocated_bytes.current);
    let map = json!({
        "allocation": by_class(|usage| &usage.allocations),
        "active": by_class(|usage| &usage.allocations),
        "allocated_bytes": by_class(|usage| &usage.allocated_bytes),
        "active_bytes": by_class(|usage| &usage.allocated_bytes),
        "requested_bytes": by_class(|usage| &usage.requested_bytes),
        "reserved_bytes": { "all": stat(&stats.reserved_bytes) },
        "segment": { "all": { "current": stats.segment_count, "allocated": stats.segments_born, "freed": dead } },
        "inactive_split": { "all": { "current": stats.free_block_count } },
        "inactive_split_bytes": { "all": { "current": free_bytes } },
        "num_device_alloc": stats.segments_born,
        "num_device_free": dead,
        "steps": {
            "ended": stats.steps.steps,
            "followed": stats.steps.followed,
            "allocations": stats.steps.allocations,
            "planned": stats.steps.planned,
            "plans": stats.steps.plans,
            "learned": stats.steps.learned,
            "placed": stats.steps.placed,
            "plan_bytes": stats.steps.plan_bytes,
        },
        "largest_free_bytes": stats.largest_free_bytes,
        "retired_bytes": stats.retired_bytes,
        "peaks_are_sums": !stats.peaks_are_exact,
    });
    match map {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn stat(stat: &Stat) -> Value {
    let Stat { current, peak, allocated, freed, .. } = *stat;
    json!({ "current": current, "peak": peak, "allocated": allocated, "freed": freed })
}
