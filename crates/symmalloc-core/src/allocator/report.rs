//! Reports of the memory that the allocator holds, for programs and people. The functions here change only peaks and
//! scopes.

pub use crate::heap::view::{BlockSnapshot, BlockStateSnapshot, MemoryStats, SegmentSnapshot};

use super::Allocator;
use super::pool::{HeapCell, PoolRef};
use crate::config::errors::UnknownError;
use crate::history::digest::Digest;
use crate::stats::usage::{ClassStats, Stat};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::{HeapId, PoolId, SegmentId, StreamGroup, StreamId};
use crate::types::units::Counted;
use std::fmt;
use std::ops::Add;

/// A part of a program whose statistics are collected. Scopes can be nested; close them in reverse order.
///
/// The type is deliberately not `Copy`, because closing a scope consumes it.
#[derive(Debug)]
#[must_use = "close the scope to get its statistics"]
pub struct StatScope(());

/// The memory of an allocator, block by block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Live segments in (pool, stream, sequence) order.
    pub segments: Vec<SegmentSnapshot>,
}

/// Live allocations, largest first. At the end of a program, these are leaks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakReport {
    /// The allocations by decreasing size, then in snapshot order.
    pub leaks: Vec<Leak>,
    /// Sum of the requested bytes of these allocations.
    pub requested_bytes: u64,
}

/// A live allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leak {
    /// Its pool.
    pub pool: PoolId,
    /// The stream it was allocated for.
    pub stream: StreamId,
    /// Its segment, by ordinal in the heap.
    pub segment: SegmentId,
    /// Offset in its segment, in bytes.
    pub offset_bytes: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The program's name for the allocation.
    pub name: Option<Box<str>>,
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (leaks, requested) = (self.leaks.len() as u64, self.requested_bytes);
        write!(f, "{}, {} requested", Counted(leaks, "live allocation"), Counted(requested, "byte"))?;
        for leak in &self.leaks {
            let Leak { pool, stream, segment, offset_bytes, requested_bytes, .. } = leak;
            let name = leak.name.as_deref().unwrap_or("(unnamed)");
            write!(f, "\n  {requested_bytes:>14} bytes  {name}  {pool} {stream} {}@{offset_bytes}", segment.0)?;
        }
        Ok(())
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Returns the digest of a pool's history. It is equal on two ranks exactly when their ops and placements in the
    /// pool are equal.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn digest(&self, pool: PoolId) -> Result<Digest, UnknownError> {
        let mut digest = Digest::new(self.pool(pool)?.config_digest());
        self.heap_digests(pool)?.into_iter().for_each(|(_, heap)| digest.fold_digest(heap));
        Ok(digest)
    }

    /// Returns the digests of a pool's heaps that have executed an op, in stream order.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn heap_digests(&self, pool: PoolId) -> Result<Vec<(StreamGroup, Digest)>, UnknownError> {
        let heaps = self.pool(pool)?.heaps().map(LockCell::lock).filter(|heap| heap.ledger().has_history());
        Ok(heaps.map(|heap| (heap.id().group, heap.ledger().digest())).collect())
    }

    /// Returns statistics over all pools.
    pub fn stats(&self) -> MemoryStats {
        let mut stats = stats_of::<L, _>(self.context.budget.stat(), self.all_heaps());
        self.destroyed.lock().add_to(&mut stats);
        if L::IS_EXCLUSIVE {
            self.usage.lock().correct_peaks(&mut stats.usage.all);
            stats.peaks_are_exact = true;
        }
        stats
    }

    /// Returns statistics of a pool.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn pool_stats(&self, pool: PoolId) -> Result<MemoryStats, UnknownError> {
        let entry = self.pool(pool)?;
        Ok(stats_of::<L, _>(entry.budget().stat(), entry.heaps()))
    }

    /// Returns statistics of the heap that serves a stream in a pool; all zero before the heap's first op.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn heap_stats(&self, pool: PoolId, stream: StreamId) -> Result<MemoryStats, UnknownError> {
        let entry = self.pool(pool)?;
        let heap = entry.heap(self.heap_group(entry, stream));
        Ok(stats_of::<L, _>(heap.map_or_else(Stat::default, |heap| heap.lock().budget().stat()), heap))
    }

    /// Returns statistics of every heap of a live pool that has executed an op, in (pool, stream) order.
    pub fn stats_by_heap(&self) -> Vec<(HeapId, MemoryStats)> {
        let heaps = self.all_heaps().filter_map(|cell| {
            let heap = cell.lock();
            let (id, reserved_bytes) = (heap.id(), heap.budget().stat());
            let has_history = heap.ledger().has_history();
            drop(heap);
            has_history.then(|| (id, stats_of::<L, _>(reserved_bytes, [cell])))
        });
        heaps.collect()
    }

    /// Resets all peaks to the current values.
    pub fn reset_peak_stats(&self) {
        self.context.budget.reset_peak();
        self.usage.lock().reset_peaks();
        self.destroyed.lock().usage.reset_peaks();
        self.listed_pools().for_each(|entry| entry.budget().reset_peak());
        for heap in self.all_heaps() {
            heap.lock().reset_peaks();
        }
    }

    /// Opens a statistics scope inside the innermost open one, if any.
    pub fn open_stat_scope(&self) -> StatScope {
        let mut open_scopes = self.open_scopes.lock();
        *open_scopes += 1;
        self.usage.lock().open_scope();
        self.destroyed.lock().usage.open_scope();
        self.all_heaps().for_each(|heap| heap.lock().open_stat_scope());
        StatScope(())
    }

    /// Closes the innermost scope and returns its statistics. `allocated`, `freed` and the peaks count from the opening
    /// of the scope. The peaks of the outer scope include this scope, as if it had never been opened. If several
    /// threads drive several heaps, peaks are upper bounds.
    #[allow(clippy::needless_pass_by_value, reason = "a scope is closed once")]
    pub fn close_stat_scope(&self, scope: StatScope) -> ClassStats {
        let StatScope(()) = scope;
        let mut open_scopes = self.open_scopes.lock();
        *open_scopes -= 1;
        let heaps = self.all_heaps().map(|heap| heap.lock().close_stat_scope());
        let mut stats = heaps.fold(ClassStats::default(), ClassStats::add);
        stats = stats + self.destroyed.lock().usage.close_scope();
        if L::IS_EXCLUSIVE {
            self.usage.lock().close_scope(&mut stats.all);
        }
        stats
    }

    /// Returns every live segment and block, in (pool, stream, sequence, offset) order.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { segments: self.all_heaps().flat_map(|heap| heap.lock().snapshot()).collect() }
    }

    /// Returns the live allocations, largest first.
    pub fn leak_report(&self) -> LeakReport {
        let mut leaks = Vec::new();
        for segment in self.snapshot().segments {
            for block in segment.blocks {
                if let BlockStateSnapshot::Allocated { stream, requested_bytes, name, .. } = block.state {
                    leaks.push(Leak {
                        pool: segment.heap.pool,
                        stream,
                        segment: segment.segment,
                        offset_bytes: block.offset_bytes,
                        requested_bytes,
                        name: name.as_deref().map(Into::into),
                    });
                }
            }
        }
        leaks.sort_by_key(|leak| std::cmp::Reverse(leak.requested_bytes));
        LeakReport { requested_bytes: leaks.iter().map(|leak| leak.requested_bytes).sum(), leaks }
    }

    /// Returns a table of the memory in use, in total and per pool.
    pub fn summary(&self) -> String {
        let mut out = format!(
            "{:<10} {:>16} {:>16} {:>16} {:>16} {:>12} {:>9}\n",
            "bytes of", "requested", "allocated", "reserved", "peak reserved", "allocations", "segments"
        );
        let mut row = |name: &str, stats: &MemoryStats| {
            let all = &stats.usage.all;
            out.push_str(&format!(
                "{name:<10} {:>16} {:>16} {:>16} {:>16} {:>12} {:>9}\n",
                all.requested_bytes.current,
                all.allocated_bytes.current,
                stats.reserved_bytes.current,
                stats.reserved_bytes.peak,
                all.allocations.current,
                stats.segment_count,
            ));
        };
        row("all pools", &self.stats());
        for pool in self.listed_pools().map(PoolRef::id) {
            if let Ok(stats) = self.pool_stats(pool) {
                row(&pool.to_string(), &stats);
            }
        }
        out
    }
}

fn stats_of<'a, L: Lock, H: IntoIterator<Item = &'a HeapCell<L>>>(reserved_bytes: Stat, heaps: H) -> MemoryStats
where
    HeapCell<L>: 'a,
{
    let mut stats = MemoryStats { reserved_bytes, ..MemoryStats::default() };
    let mut heap_count = 0;
    for heap in heaps {
        heap.lock().add_to(&mut stats);
        heap_count += 1;
    }
    stats.peaks_are_exact = heap_count <= 1;
    stats
}
