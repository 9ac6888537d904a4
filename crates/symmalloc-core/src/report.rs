//! Reports: what the allocator holds, for programs and for people. Nothing here changes anything but peaks and scopes.

use crate::allocator::Allocator;
use crate::backend::{Backend, DeviceAddress};
use crate::block_table::BlockState;
use crate::digest::Digest;
use crate::errors::UnknownError;
use crate::heap::Heap;
use crate::held::HeapCell;
use crate::ids::{PoolId, SegmentId, StreamId};
use crate::lock::{Lock, LockCell};
use crate::size_rules::SizeClass;
use crate::stats::{ClassStats, Stat};
use crate::tally::Tally;
use crate::units::bytes;
use std::fmt;

/// Statistics of an allocator, a pool or a heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// What programs hold, by size class.
    pub usage: ClassStats,
    /// Bytes of device memory held, dead segments that observers hold included.
    pub reserved_bytes: Stat,
    /// Bytes of dead segments that observers hold, or that the driver did not take back yet.
    pub retired_bytes: u64,
    /// Number of live segments.
    pub segment_count: u64,
    /// Number of segments ever born.
    pub segments_born: u64,
    /// Number of free blocks.
    pub free_block_count: u64,
    /// Bytes of the largest free block.
    pub largest_free_bytes: u64,
    /// Number of times that memory was obtained from the device: births and growths of segments.
    pub growth_count: u64,
    /// Number of trims of heaps, asked for or by themselves.
    pub trim_count: u64,
    /// Number of times that a request was tried again, after a trim by itself or a failure callback.
    pub retry_count: u64,
    /// Number of requests that ended with [`OutOfMemory`](crate::errors::OutOfMemory).
    pub out_of_memory_count: u64,
    /// Whether the peaks of `usage.all` are exact: of one heap, or of all heaps when one thread drives the allocator.
    /// Otherwise, and by class, they are sums of the heaps' peaks, which need not have been at the same time: upper bounds.
    pub peaks_are_exact: bool,
}

impl MemoryStats {
    fn add_heap(&mut self, heap: &Heap) {
        self.usage = self.usage.plus(heap.usage.stats());
        self.retired_bytes += heap.log.retired_bytes();
        self.segment_count += heap.table.segment_count() as u64;
        self.segments_born += u64::from(heap.next_segment.0);
        let free_blocks = |home| heap.free.keys(heap.table.blocks(), home).count() as u64;
        self.free_block_count += free_blocks(SizeClass::Small) + free_blocks(SizeClass::Large);
        self.largest_free_bytes = self.largest_free_bytes.max(heap.largest_free_bytes());
        self.growth_count += heap.rare.growths;
        self.trim_count += heap.rare.trims;
        self.retry_count += heap.rare.retries;
        self.out_of_memory_count += heap.rare.refusals;
    }
}

/// A part of a program over which statistics are wanted. Scopes nest; close them in reverse order.
///
/// Deliberately not `Copy`: closing takes the scope.
#[derive(Debug)]
#[must_use = "close the scope to learn what happened in it"]
pub struct StatScope(());

/// What an allocator holds, block by block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Live segments in (pool, stream, sequence) order.
    pub segments: Vec<SegmentSnapshot>,
}

/// A live segment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentSnapshot {
    /// Its pool.
    pub pool: PoolId,
    /// The stream of its heap; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
    /// Birth ordinal in its heap.
    pub segment: SegmentId,
    /// Address of its first byte. Differs between ranks.
    pub base: DeviceAddress,
    /// Bytes that its blocks tile.
    pub size_bytes: u64,
    /// Bytes of them that are backed by memory.
    pub mapped_bytes: u64,
    /// Its blocks in offset order.
    pub blocks: Vec<BlockSnapshot>,
}

/// A block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockSnapshot {
    /// Where it starts in its segment, in bytes.
    pub offset_bytes: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// What it is.
    pub state: BlockStateSnapshot,
}

/// What a block is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockStateSnapshot {
    /// A live allocation.
    Allocated {
        /// The stream it was allocated for.
        stream: StreamId,
        /// Bytes that the program asked for.
        requested_bytes: u64,
        /// What the program called it.
        name: Option<Box<str>>,
        /// Other streams that use it.
        used_by: Vec<StreamId>,
    },
    /// Free.
    Free {
        /// Streams that its next user may have to wait for.
        fenced_by: Vec<StreamId>,
    },
    /// Memory that went back to the device; the addresses are kept.
    Hole,
}

/// Live allocations, largest first: what a program forgot to free, if it believes to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakReport {
    /// The allocations, by falling size, then in snapshot order.
    pub leaks: Vec<Leak>,
    /// Bytes of all of them, as requested.
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
    /// Its segment, by birth ordinal in its heap.
    pub segment: SegmentId,
    /// Where it starts in its segment, in bytes.
    pub offset_bytes: u64,
    /// Bytes that the program asked for.
    pub requested_bytes: u64,
    /// What the program called it.
    pub name: Option<Box<str>>,
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} live allocations, {} bytes requested", self.leaks.len(), self.requested_bytes)?;
        for leak in &self.leaks {
            let Leak { pool, stream, segment, offset_bytes, requested_bytes, .. } = leak;
            let name = leak.name.as_deref().unwrap_or("(unnamed)");
            write!(f, "\n  {requested_bytes:>14} bytes  {name}  {pool} {stream} {}@{offset_bytes}", segment.0)?;
        }
        Ok(())
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// The digest of a pool's history: equal on two ranks exactly when their ops and placements in it are.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn digest(&self, pool: PoolId) -> Result<Digest, UnknownError> {
        let entry = self.pool(pool)?;
        let mut digest = Digest::new(entry.config_digest);
        for heap in entry.heaps() {
            let heap = heap.lock();
            if heap.digest.ops > 0 {
                digest.fold_digest(heap.digest);
            }
        }
        Ok(digest)
    }

    /// The digests of a pool's heaps that have carried out an op, in stream order; the stream is `None` when streams share.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn heap_digests(&self, pool: PoolId) -> Result<Vec<(Option<StreamId>, Digest)>, UnknownError> {
        let heaps = self.pool(pool)?.heaps().map(|heap| {
            let heap = heap.lock();
            (heap.stream, heap.digest)
        });
        Ok(heaps.filter(|(_, digest)| digest.ops > 0).collect())
    }

    /// Statistics over all pools.
    pub fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats { reserved_bytes: self.around.budget.stat(), ..MemoryStats::default() };
        self.heaps.iter().for_each(|(_, heap)| stats.add_heap(&heap.lock()));
        self.set_exact_peaks(&mut stats, self.heaps.len());
        stats
    }

    /// Statistics of a pool.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn pool_stats(&self, pool: PoolId) -> Result<MemoryStats, UnknownError> {
        let entry = self.pool(pool)?;
        let mut stats = MemoryStats { reserved_bytes: entry.budget.stat(), ..MemoryStats::default() };
        entry.heaps().for_each(|heap| stats.add_heap(&heap.lock()));
        self.set_exact_peaks(&mut stats, entry.heaps().count());
        Ok(stats)
    }

    /// Statistics of the heap that serves a stream in a pool; all zero before its first op.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn heap_stats(&self, pool: PoolId, stream: StreamId) -> Result<MemoryStats, UnknownError> {
        let entry = self.pool(pool)?;
        let mut stats = MemoryStats { peaks_are_exact: true, ..MemoryStats::default() };
        if let Some(heap) = self.existing_heap(entry, stream) {
            let heap = heap.lock();
            stats.add_heap(&heap);
            stats.reserved_bytes = heap.budget.stat();
        }
        Ok(stats)
    }

    /// Statistics of every heap that has carried out an op, in (pool, stream) order; the stream is `None` when a pool's
    /// streams share.
    pub fn stats_by_heap(&self) -> Vec<(PoolId, Option<StreamId>, MemoryStats)> {
        let stats_of = |heap: &HeapCell<L>| {
            let heap = heap.lock();
            let mut stats = MemoryStats { reserved_bytes: heap.budget.stat(), ..MemoryStats::default() };
            stats.peaks_are_exact = true;
            stats.add_heap(&heap);
            heap.has_history().then_some((heap.pool, heap.stream, stats))
        };
        self.pools.iter().flat_map(|(_, entry)| entry.heaps()).filter_map(stats_of).collect()
    }

    /// The peaks over all heaps, of all sizes, come from the tally. Those over several heaps of many stay sums.
    fn set_exact_peaks(&self, stats: &mut MemoryStats, heaps: usize) {
        let is_tallied = self.is_tallied() && heaps == self.heaps.len();
        stats.peaks_are_exact = heaps <= 1 || is_tallied;
        if is_tallied {
            stats.usage.all = self.tally.stats(stats.usage.all);
        }
    }

    /// Starts all peaks anew at the current values.
    pub fn reset_peak_stats(&self) {
        self.around.budget.reset_peak();
        self.tally.reset_peaks();
        self.reset_shared_peak();
        for (_, entry) in self.pools.iter() {
            entry.budget.reset_peak();
        }
        for (_, heap) in self.heaps.iter() {
            let mut heap = heap.lock();
            heap.usage.reset_peaks();
            heap.budget.reset_peak();
        }
    }

    /// Opens a statistic scope inside the one that is open, if any.
    pub fn open_stat_scope(&self) -> StatScope {
        let mut open_scopes = self.open_scopes.lock();
        *open_scopes += 1;
        self.tally.open_scope();
        self.heaps.iter().for_each(|(_, heap)| heap.lock().usage.open_scope());
        StatScope(())
    }

    /// Closes the innermost scope. Its `allocated` and `freed` count from its opening, and so do its peaks; the outer
    /// scope's peaks are what they would be without it. Over several heaps driven by several threads, peaks are upper
    /// bounds.
    #[allow(clippy::needless_pass_by_value, reason = "a scope is closed once")]
    pub fn close_stat_scope(&self, scope: StatScope) -> ClassStats {
        let StatScope(()) = scope;
        let mut open_scopes = self.open_scopes.lock();
        *open_scopes -= 1;
        let mut stats = ClassStats::default();
        self.heaps.iter().for_each(|(_, heap)| stats = stats.plus(heap.lock().usage.close_scope()));
        let exact = self.tally.close_scope(stats.all);
        if self.is_tallied() {
            stats.all = exact;
        }
        stats
    }

    /// Every live segment and block, in (pool, stream, sequence, offset) order.
    pub fn snapshot(&self) -> Snapshot {
        let pools = self.pools.iter().flat_map(|(_, entry)| entry.heaps());
        Snapshot { segments: pools.flat_map(|heap| segments_of(&heap.lock())).collect() }
    }

    /// The live allocations, largest first.
    pub fn leak_report(&self) -> LeakReport {
        let mut leaks = Vec::new();
        for segment in self.snapshot().segments {
            for block in segment.blocks {
                if let BlockStateSnapshot::Allocated { stream, requested_bytes, name, .. } = block.state {
                    leaks.push(Leak {
                        pool: segment.pool,
                        stream,
                        segment: segment.segment,
                        offset_bytes: block.offset_bytes,
                        requested_bytes,
                        name,
                    });
                }
            }
        }
        leaks.sort_by_key(|leak| std::cmp::Reverse(leak.requested_bytes));
        LeakReport { requested_bytes: leaks.iter().map(|leak| leak.requested_bytes).sum(), leaks }
    }

    /// A table for people: what is held, in all and per pool.
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
        for pool in (0..self.pool_count()).map(PoolId) {
            if let Ok(stats) = self.pool_stats(pool) {
                row(&pool.to_string(), &stats);
            }
        }
        out
    }
}

fn segments_of(heap: &Heap) -> Vec<SegmentSnapshot> {
    let snapshot = |slot: u32| {
        let segment = heap.table.segment(slot);
        SegmentSnapshot {
            pool: heap.pool,
            stream: heap.stream,
            segment: segment.id,
            base: segment.range.base,
            size_bytes: bytes(segment.end),
            mapped_bytes: bytes(segment.mapped),
            blocks: heap.table.blocks_of(slot).map(|block| block_snapshot(heap, block)).collect(),
        }
    };
    heap.table.segments_in_order().into_iter().map(snapshot).collect()
}

fn block_snapshot(heap: &Heap, slot: u32) -> BlockSnapshot {
    let block = heap.table.block(slot);
    let fenced = heap.fences.fences(block.fences).map(|fence| fence.stream).collect();
    let state = match block.state {
        BlockState::Allocated { stream, requested, .. } => BlockStateSnapshot::Allocated {
            stream,
            requested_bytes: requested,
            name: heap.names.find(slot).map(Into::into),
            used_by: fenced,
        },
        BlockState::Free { .. } => BlockStateSnapshot::Free { fenced_by: fenced },
        BlockState::Hole => BlockStateSnapshot::Hole,
        BlockState::Vacant => unreachable!("a vacant slot is in no segment"),
    };
    BlockSnapshot { offset_bytes: bytes(block.offset()), size_bytes: bytes(block.size), state }
}
