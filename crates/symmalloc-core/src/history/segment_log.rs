//! The segment log: births, growths, shrinks and deaths of one heap's segments, in the order in which they happened.
//!
//! An **observer** must know about segments: a registrar of NCCL windows, for example, or a profiler. The allocator never
//! calls it. An observer reads what is new since its cursor, when it wants to, and acknowledges what it has dealt with. So
//! no observer ever runs under a lock that `allocate` needs, and a collective never runs by surprise (rule D6).
//!
//! ```text
//!   dropped (all have passed)      entries                         next
//!  ──────────────────────────┬───────┬───────┬───────┬───────┬──────┐
//!                            │ birth │growth │ death │ birth │      │
//!                            └───────┴───────┴───────┴───────┴──────┘
//!                            ▲ base          ▲ cursor of one observer
//! ```
//!
//! The log is append-only and its indices are never reused. Entries that every observer has acknowledged are dropped, so
//! a heap without observers keeps none. A removed segment's memory goes back to the device only after every observer
//! has acknowledged the death: a window on it is gone by then.
//!
//! An observer learns without a lock whether there is anything to ask for: each pool counts the entries of its heaps' logs.
//!
//! There is a log per heap, and observers read a pool's logs in stream order. One log over all heaps would record how
//! threads interleaved, and ranks would register in different orders (rule D8).

use crate::types::backend::{DeviceAddress, Range};
use crate::types::ids::{ObserverId, PoolId, SegmentId, StreamId};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What happened to a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SegmentEventKind {
    /// The segment exists; its first `size_bytes` are backed by memory.
    Birth,
    /// `size_bytes` more, from `offset_bytes` on, are backed by memory.
    Growth,
    /// The memory of `size_bytes` from `offset_bytes` on went back to the device. Never happens in an observed pool.
    Shrink,
    /// The segment is removed. Its memory goes back once every observer has acknowledged this.
    Death,
}

/// An entry of the segment log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentEvent {
    /// What happened.
    pub kind: SegmentEventKind,
    /// The pool of the segment.
    pub pool: PoolId,
    /// The stream of its heap; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
    /// The segment, by birth ordinal in its heap.
    pub segment: SegmentId,
    /// Address of the segment's first byte. Differs between ranks.
    pub base: DeviceAddress,
    /// Where in the segment, in bytes.
    pub offset_bytes: u64,
    /// How much, in bytes.
    pub size_bytes: u64,
}

/// Parts of a range, as offset and size in bytes.
pub(crate) type Extents = SmallVec<[(u64, u64); 1]>;

/// A removed segment whose memory is not back on the device yet.
#[derive(Debug)]
pub(crate) struct Retired {
    /// Length of the log after the death: free to go when all cursors have come so far.
    held_until: u64,
    pub(crate) range: Range,
    /// What is still backed by memory.
    pub(crate) mapped: Extents,
    /// Addresses that name memory of other segments: it does not go back with them.
    pub(crate) is_stitched: bool,
    /// Streams whose work may still use the memory.
    pub(crate) streams: SmallVec<[StreamId; 2]>,
}

#[derive(Debug, Default)]
pub(crate) struct SegmentLog {
    base: u64,
    entries: VecDeque<SegmentEvent>,
    /// One cursor per observer of the pool: the index of the first entry it has not acknowledged.
    cursors: SmallVec<[(ObserverId, u64); 2]>,
    /// In order of death.
    retired: VecDeque<Retired>,
    /// Entries so far in the logs of all heaps of the pool.
    pool_entries: Arc<AtomicU64>,
}

impl SegmentLog {
    /// The log of a heap of the pool that counts its entries here.
    pub(crate) fn new(pool_entries: Arc<AtomicU64>) -> Self {
        SegmentLog { pool_entries, ..SegmentLog::default() }
    }

    /// Index of the next entry; the number of entries so far.
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
        self.retired.push_back(Retired { held_until: self.next() + 1, range, mapped, is_stitched, streams });
        self.append(event);
    }

    /// Keeps a range that never became a segment, and that the driver did not take back: no observer knows of it.
    pub(crate) fn keep_stray(&mut self, range: Range, mapped: Extents, is_stitched: bool) {
        self.retired.push_front(Retired { held_until: 0, range, mapped, is_stitched, streams: SmallVec::new() });
    }

    /// A new observer starts at the end; what lives already it is told separately.
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
        self.entries.iter().skip((cursor - self.base) as usize).copied()
    }

    /// The observer has dealt with every entry before `index`.
    pub(crate) fn acknowledge(&mut self, observer: ObserverId, index: u64) {
        let next = self.next();
        if let Some((_, cursor)) = self.cursors.iter_mut().find(|(id, _)| *id == observer) {
            *cursor = (*cursor).max(index.min(next));
        }
        self.drop_acknowledged();
    }

    /// Whether a segment died at this entry or later.
    pub(crate) fn has_death_since(&self, index: u64) -> bool {
        let later = self.entries.iter().skip(index.saturating_sub(self.base) as usize);
        later.into_iter().any(|event| event.kind == SegmentEventKind::Death)
    }

    /// Whether a removed segment names memory of others still.
    pub(crate) fn has_stitched(&self) -> bool {
        self.retired.iter().any(|retired| retired.is_stitched)
    }

    /// The oldest removed segment that every observer has let go.
    pub(crate) fn first_released(&mut self) -> Option<&mut Retired> {
        let base = self.base;
        self.retired.front_mut().filter(|retired| retired.held_until <= base)
    }

    /// The memory of [`first_released`](Self::first_released) is back on the device.
    pub(crate) fn drop_first_released(&mut self) {
        self.retired.pop_front();
    }

    /// Returns `true` if memory of a removed segment is not back on the device yet.
    pub(crate) fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// Bytes of removed segments that are not back on the device yet.
    pub(crate) fn retired_bytes(&self) -> u64 {
        let with_memory = self.retired.iter().filter(|retired| !retired.is_stitched);
        with_memory.flat_map(|retired| &retired.mapped).map(|(_, size)| size).sum()
    }

    fn drop_acknowledged(&mut self) {
        let least = self.cursors.iter().map(|(_, cursor)| *cursor).min().unwrap_or(self.next());
        while self.base < least {
            self.entries.pop_front();
            self.base += 1;
        }
    }
}
