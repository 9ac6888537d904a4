//! Observers of a pool's segments. [`crate::history::segment_log`] describes the events that observers read, and when
//! they can read them.

use super::Allocator;
use super::pool::{HeapCell, HeapGuard, PoolRef, PoolSlot};
use super::recorder::RecordingEnd;
use crate::config::errors::{TrimError, UnknownError};
use crate::heap::Heap;
use crate::heap::trim::Released;
use crate::history::segment_log::SegmentEvent;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::{HeapNumber, ObserverId, PoolId};
use std::sync::atomic::Ordering;

/// The entries that an observer has not acknowledged yet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unread {
    /// The events by stream and order of occurrence: equal on every rank at the same op.
    pub events: Vec<SegmentEvent>,
    /// The allocator and the observer that read them.
    reader: (u64, ObserverId),
    /// For each heap, the index in its log after the last of these events; ascending by heap.
    ends: Vec<(HeapNumber, u64)>,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Starts to observe a pool. Returns the observer and, as births, the existing segments.
    ///
    /// From then on, removed segments of the pool keep their memory until the observer has acknowledged their death,
    /// and expandable segments do not shrink.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn observe(&self, pool: PoolId) -> Result<(ObserverId, Vec<SegmentEvent>), UnknownError> {
        let mut gate = self.gate();
        let mut observers = self.observers.lock();
        let entry = self.pool(pool)?;
        let observer = observers.add(pool);
        let mut births = Vec::new();
        for heap in entry.heaps() {
            let mut heap = heap.lock();
            heap.observe(observer);
            for segment in heap.segments() {
                births.extend(heap.events_of_live_segment(segment));
            }
        }
        drop(observers);
        gate.note_observer(observer, pool);
        Ok((observer, births))
    }

    /// Returns the number of entries so far in the segment logs of a pool; 0 for a pool that does not exist. While this
    /// number does not change, an observer has nothing new to read. The call takes no lock and costs a few nanoseconds.
    #[inline]
    pub fn segment_log_entries(&self, pool: PoolId) -> u64 {
        self.pools
            .get(pool.index())
            .and_then(PoolSlot::pool)
            .map_or(0, |entry| entry.log_entries().load(Ordering::Acquire))
    }

    /// Returns the events that the observer has not acknowledged, by stream and order of occurrence. Returns no events
    /// for a removed observer.
    pub fn unread(&self, observer: ObserverId) -> Unread {
        let mut unread = Unread { events: Vec::new(), reader: (self.number, observer), ends: Vec::new() };
        let pool = self.observers.lock().pool_of(observer);
        for heap in self.observed_heaps(pool) {
            let heap = heap.lock();
            unread.events.extend(heap.log().unread(observer));
            unread.ends.push((heap.number(), heap.log().next()));
        }
        unread.ends.sort_unstable();
        unread
    }

    /// Acknowledges events: the observer has processed them. Memory of removed segments is released once no observer
    /// holds it any more. Returns the released bytes.
    ///
    /// # Errors
    /// Returns an error if another observer read the events, or they belong to another allocator: nothing is
    /// acknowledged then. Also returns an error if the driver fails to release memory: the events are acknowledged, and
    /// the next trim tries again.
    pub fn acknowledge(&self, observer: ObserverId, unread: &Unread) -> Result<u64, TrimError> {
        if unread.reader != (self.number, observer) {
            return Err(TrimError::NotRead { observer });
        }
        let mut gate = self.gate();
        let pool = self.observers.lock().pool_of(observer);
        // A heap that was created after the read has no entry in `ends`.
        let end_of = |id| unread.ends.binary_search_by_key(&id, |(read, _)| *read).map_or(0, |at| unread.ends[at].1);
        let has_death = |heap: HeapGuard<'_, L>| heap.log().has_death_since(end_of(heap.number()));
        // A replay acknowledges every event so far. If a segment was removed after the read, this observer has not read
        // the segment's death.
        let is_late = gate.is_recording() && self.observed_heaps(pool).map(LockCell::lock).any(has_death);
        let released = self.change_observed(pool, |heap| {
            let end = end_of(heap.number());
            heap.acknowledge(&self.context, observer, end)
        });
        if is_late {
            gate.end(RecordingEnd::LateDeath);
        }
        gate.note_acknowledgement(observer);
        gate.note_released(&released);
        released.into_result()
    }

    /// Removes an observer as if it had acknowledged everything. Returns the released bytes.
    ///
    /// # Errors
    /// Returns an error if the driver fails to release memory; the observer is removed, and the next trim tries again.
    pub fn forget(&self, observer: ObserverId) -> Result<u64, TrimError> {
        let mut gate = self.gate();
        let mut observers = self.observers.lock();
        let pool = observers.pool_of(observer);
        observers.remove(observer);
        drop(observers);
        let released = self.change_observed(pool, |heap| heap.forget(&self.context, observer));
        gate.note_forgotten(observer);
        gate.note_released(&released);
        released.into_result()
    }

    /// Returns the heaps of an observer's pool, if the pool still exists.
    fn observed_heaps(&self, pool: Option<PoolId>) -> impl Iterator<Item = &HeapCell<L>> {
        pool.and_then(|pool| self.pool(pool).ok()).into_iter().flat_map(PoolRef::heaps)
    }

    /// Changes the heaps of an observer's pool, and returns what they released.
    fn change_observed(&self, pool: Option<PoolId>, change: impl Fn(&mut Heap<L>) -> Released) -> Released {
        let released = self.observed_heaps(pool).map(|heap| change(&mut heap.lock()));
        released.fold(Released::default(), Released::plus)
    }
}
