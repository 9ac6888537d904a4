//! The segment log: births, growths, shrinks and deaths of one heap's segments, in order.
//!
//! An **observer**, for example a registrar of NCCL windows or a profiler, follows segments. The allocator never calls
//! an observer. Instead, an observer reads the entries after its cursor when it chooses to, and acknowledges those that
//! it has processed. Therefore no observer runs under a lock that `allocate` needs, and no collective runs unexpectedly
//! (rule D6).
//!
//! ```text
//!   dropped (all have passed)      entries                         next
//!  ──────────────────────────┬───────┬───────┬───────┬───────┬──────┐
//!                            │ birth │growth │ death │ birth │      │
//!                            └───────┴───────┴───────┴───────┴──────┘
//!                            ▲ base          ▲ cursor of one observer
//! ```
//!
//! The log is append-only, and its indices are never reused. Entries that every observer has acknowledged are dropped,
//! so a heap without observers keeps none. The memory of a removed segment is released only after every observer has
//! acknowledged the death. By then, any window on the segment is deregistered.
//!
//! An observer finds out without a lock whether there are new entries: each pool counts the entries of its heaps' logs.
//!
//! There is a log per heap, and observers read a pool's logs in stream order. One log over all heaps would record the
//! interleaving of threads, so ranks would register windows in different orders (rule D8).

use crate::types::backend::{DeviceAddress, Range};
use crate::types::ids::{HeapId, ObserverId, PoolId, SegmentId, StreamId};
use crate::types::work;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The kind of a segment event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SegmentEventKind {
    /// The segment exists; its first `size_bytes` are backed by memory.
    Birth,
    /// `size_bytes` more, from `offset_bytes` on, are backed by memory.
    Growth,
    /// The memory of `size_bytes` from `offset_bytes` on was released. Never happens in an observed pool.
    Shrink,
    /// The segment is removed. Its memory is released once every observer has acknowledged this.
    Death,
}

/// An entry of the segment log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentEvent {
    /// The kind.
    pub kind: SegmentEventKind,
    /// The heap of the segment.
    pub heap: HeapId,
    /// The segment, by its ordinal in the heap.
    pub segment: SegmentId,
    /// Address of the segment's first byte. Differs between ranks.
    pub base: DeviceAddress,
    /// Offset in the segment, in bytes.
    pub offset_bytes: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// Parts of a range, as offset and size in bytes.
pub(crate) type Extents = SmallVec<[(u64, u64); 1]>;

/// A removed segment whose memory has not been released yet.
#[derive(Debug)]
pub(crate) struct Retired {
    /// Index of the log entry after the death. The memory is released when all cursors have reached this index.
    released_after: u64,
    pub(crate) range: Range,
    /// The parts that are still backed by memory.
    pub(crate) mapped: Extents,
    /// `true` if its addresses alias memory of other segments. This memory is not released with the addresses.
    pub(crate) is_stitched: bool,
    /// Streams whose work may still use the memory.
    pub(crate) streams: SmallVec<[StreamId; 2]>,
}

#[derive(Debug, Default)]
pub(crate) struct SegmentLog {
    base: u64,
    entries: VecDeque<SegmentEvent>,
    /// One cursor per observer of the pool: the index of its first unacknowledged entry.
    cursors: SmallVec<[(ObserverId, u64); 2]>,
    /// Removed segments whose memory has not been released yet, in order of death.
    retired: VecDeque<Retired>,
    /// Number of entries so far in the logs of all heaps of the pool.
    pool_entries: Arc<AtomicU64>,
}

impl SegmentLog {
    /// Creates the log of a heap whose pool counts entries in `pool_entries`.
    pub(crate) fn new(pool_entries: Arc<AtomicU64>) -> Self {
        SegmentLog { pool_entries, ..SegmentLog::default() }
    }

    /// Returns the index of the next entry, which is the number of entries so far.
    pub(crate) fn next(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    pub(crate) fn is_observed(&self) -> bool {
        !self.cursors.is_empty()
    }

    pub(crate) fn append(&mut self, event: SegmentEvent) {
        self.entries.push_back(event);
        self.pool_entries.fetch_add(1, Ordering::Release);
        self.drop_acknowledged();
    }

    /// Appends a death and keeps its memory until every observer has acknowledged it.
    pub(crate) fn append_death(
        &mut self,
        event: SegmentEvent,
        range: Range,
        mapped: Extents,
        is_stitched: bool,
        streams: SmallVec<[StreamId; 2]>,
    ) {
        self.retired.push_back(Retired { released_after: self.next() + 1, range, mapped, is_stitched, streams });
        self.append(event);
    }

    /// Keeps a range that never became a segment and that the driver failed to release. No observer knows of it.
    pub(crate) fn add_stray(&mut self, range: Range, mapped: Extents, is_stitched: bool) {
        self.retired.push_front(Retired { released_after: 0, range, mapped, is_stitched, streams: SmallVec::new() });
    }

    /// Adds an observer at the end of the log. It learns of the existing segments separately.
    pub(crate) fn observe(&mut self, observer: ObserverId) {
        self.cursors.push((observer, self.next()));
    }

    pub(crate) fn forget(&mut self, observer: ObserverId) {
        self.cursors.retain(|(id, _)| *id != observer);
        self.drop_acknowledged();
    }

    pub(crate) fn forget_all(&mut self) {
        self.cursors.clear();
        self.drop_acknowledged();
    }

    pub(crate) fn unread(&self, observer: ObserverId) -> impl Iterator<Item = SegmentEvent> + '_ {
        let cursor = self.cursors.iter().find(|(id, _)| *id == observer).map_or(self.next(), |(_, cursor)| *cursor);
        self.entries.iter().skip((cursor - self.base) as usize).inspect(|_| work::count(1)).copied()
    }

    /// Records that the observer has processed every entry before `index`.
    pub(crate) fn acknowledge(&mut self, observer: ObserverId, index: u64) {
        let next = self.next();
        if let Some((_, cursor)) = self.cursors.iter_mut().find(|(id, _)| *id == observer) {
            *cursor = (*cursor).max(index.min(next));
        }
        self.drop_acknowledged();
    }

    /// Returns `true` if a segment was removed at this entry or later.
    pub(crate) fn has_death_since(&self, index: u64) -> bool {
        let later = self.entries.iter().skip(index.saturating_sub(self.base) as usize);
        later.into_iter().any(|event| event.kind == SegmentEventKind::Death)
    }

    /// Returns `true` if a removed segment still aliases memory of other segments.
    pub(crate) fn has_stitched(&self) -> bool {
        self.retired.iter().any(|retired| retired.is_stitched)
    }

    /// Returns the oldest removed segment if every observer has acknowledged its death.
    pub(crate) fn first_released(&mut self) -> Option<&mut Retired> {
        let base = self.base;
        self.retired.front_mut().filter(|retired| retired.released_after <= base)
    }

    /// Removes [`first_released`](Self::first_released), whose memory was released.
    pub(crate) fn drop_first_released(&mut self) {
        self.retired.pop_front();
    }

    /// Returns `true` if memory of a removed segment has not been released yet.
    pub(crate) fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// Returns the bytes of removed segments that have not been released yet.
    pub(crate) fn retired_bytes(&self) -> u64 {
        let with_memory = self.retired.iter().filter(|retired| !retired.is_stitched);
        with_memory.flat_map(|retired| &retired.mapped).map(|(_, size)| size).sum()
    }

    fn drop_acknowledged(&mut self) {
        work::count(self.cursors.len());
        let least = self.cursors.iter().map(|(_, cursor)| *cursor).min().unwrap_or(self.next());
        while self.base < least {
            self.entries.pop_front();
            self.base += 1;
        }
    }
}

/// The observers and their pools.
#[derive(Debug, Default)]
pub(crate) struct Observers {
    next: u32,
    live: Vec<(ObserverId, PoolId)>,
}

impl Observers {
    pub(crate) fn add(&mut self, pool: PoolId) -> ObserverId {
        let observer = ObserverId(self.next);
        self.next += 1;
        self.live.push((observer, pool));
        observer
    }

    pub(crate) fn remove(&mut self, observer: ObserverId) {
        work::count(self.live.len());
        self.live.retain(|(id, _)| *id != observer);
    }

    /// Returns all observers in the order of their registration.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ObserverId, PoolId)> + '_ {
        self.live.iter().inspect(|_| work::count(1)).copied()
    }

    pub(crate) fn count(&self, pool: PoolId) -> u32 {
        self.of_pool(pool).count() as u32
    }

    pub(crate) fn of_pool(&self, pool: PoolId) -> impl Iterator<Item = ObserverId> + '_ {
        self.iter().filter(move |(_, watched)| *watched == pool).map(|(observer, _)| observer)
    }

    pub(crate) fn pool_of(&self, observer: ObserverId) -> Option<PoolId> {
        self.iter().find(|(id, _)| *id == observer).map(|(_, pool)| pool)
    }
}
