//! Observers: whoever must know about a pool's segments. See [`crate::segment_log`] for what they are told and when.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::errors::{TrimError, UnknownError};
use crate::heap::Heap;
use crate::held::HeapCell;
use crate::ids::{HeapId, ObserverId, PoolId};
use crate::lock::{Lock, LockCell};
use crate::pool::Pool;
use crate::segment_log::{SegmentEvent, SegmentEventKind, SegmentLog};
use crate::units::{Units, bytes};
use std::sync::atomic::Ordering;

/// What an observer has not acknowledged yet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unread {
    /// The events, in (stream, order of happening): the same on every rank at the same op.
    pub events: Vec<SegmentEvent>,
    /// How far these events reach in the log of each heap.
    ends: Vec<(HeapId, u64)>,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Starts observing a pool. Returns the observer and, as births, the segments that live already.
    ///
    /// From now on dead segments of the pool keep their memory until the observer has acknowledged their death, and
    /// expandable segments are not shrunk.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn observe(&self, pool: PoolId) -> Result<(ObserverId, Vec<SegmentEvent>), UnknownError> {
        let mut tape = self.tape();
        let mut observers = self.observers.lock();
        let entry = self.pool(pool)?;
        let observer = observers.add(pool);
        let mut births = Vec::new();
        for heap in entry.heaps() {
            let mut heap = heap.lock();
            heap.log.observe(observer);
            for segment in heap.table.segments_in_order() {
                births.extend(events_of_live_segment(&heap, segment));
            }
        }
        drop(observers);
        tape.note_observer(observer, pool);
        Ok((observer, births))
    }

    /// Number of entries that the segment logs of a pool have had so far; 0 for a pool that does not exist. While it stays
    /// the same, an observer has nothing new to read. Takes no lock and costs a few nanoseconds.
    #[inline]
    pub fn segment_log_entries(&self, pool: PoolId) -> u64 {
        self.pools.get(pool.index()).map_or(0, |entry| entry.log_entries.load(Ordering::Acquire))
    }

    /// What the observer has not acknowledged, in (stream, order of happening). Empty for an observer that was forgotten.
    pub fn unread(&self, observer: ObserverId) -> Unread {
        let mut unread = Unread { events: Vec::new(), ends: Vec::new() };
        let pool = self.observers.lock().pool_of(observer);
        if let Some(entry) = pool.and_then(|pool| self.pool(pool).ok()) {
            for heap in entry.heaps() {
                let heap = heap.lock();
                unread.events.extend(heap.log.unread(observer));
                unread.ends.push((heap.id, heap.log.next()));
            }
        }
        unread
    }

    /// The observer has dealt with these events. Memory of dead segments that no observer holds any more goes back to
    /// the device; returns how many bytes.
    ///
    /// # Errors
    /// When the driver fails to take memory back; the events are acknowledged, and the next trim tries again.
    pub fn acknowledge(&self, observer: ObserverId, unread: &Unread) -> Result<u64, TrimError> {
        let mut tape = self.tape();
        // Replay acknowledges everything that happened so far: more than this observer has read, if something came in between.
        let is_late = tape.is_recording() && self.has_death_since(observer, &unread.ends);
        let released = self.let_go(&unread.ends, |log, end| log.acknowledge(observer, end));
        if is_late {
            tape.late_death();
        }
        tape.note_acknowledgement(observer);
        tape.note_failed_trim(&released);
        released
    }

    /// Ends an observer, as if it had acknowledged everything; returns how many bytes went back to the device.
    ///
    /// # Errors
    /// When the driver fails to take memory back; the observer is gone, and the next trim tries again.
    pub fn forget(&self, observer: ObserverId) -> Result<u64, TrimError> {
        let mut tape = self.tape();
        let mut observers = self.observers.lock();
        let ends = self.ends_of(observers.pool_of(observer));
        observers.remove(observer);
        drop(observers);
        let released = self.let_go(&ends, |log, _| log.forget(observer));
        tape.note_forgotten(observer);
        tape.note_failed_trim(&released);
        released
    }

    /// Whether a segment of the observer's pool died that these ends of logs do not cover. A heap that was made since has none.
    fn has_death_since(&self, observer: ObserverId, ends: &[(HeapId, u64)]) -> bool {
        let pool = self.observers.lock().pool_of(observer);
        pool.and_then(|pool| self.pool(pool).ok()).into_iter().flat_map(Pool::heaps).map(HeapCell::lock).any(|heap| {
            let end = ends.iter().find(|(id, _)| *id == heap.id).map_or(0, |(_, end)| *end);
            heap.log.has_death_since(end)
        })
    }

    /// The heaps of a pool, with how far their logs reach.
    fn ends_of(&self, pool: Option<PoolId>) -> Vec<(HeapId, u64)> {
        let heaps = pool.and_then(|pool| self.pool(pool).ok()).into_iter().flat_map(Pool::heaps);
        heaps.map(HeapCell::lock).map(|heap| (heap.id, heap.log.next())).collect()
    }

    fn let_go(&self, ends: &[(HeapId, u64)], change: impl Fn(&mut SegmentLog, u64)) -> Result<u64, TrimError> {
        let (mut released_bytes, mut first_error) = (0, None);
        for (id, end) in ends {
            let Some(heap) = self.heaps.get(id.index()) else { continue };
            let mut heap = heap.lock();
            change(&mut heap.log, *end);
            let (released, error) = heap.release_retired(&self.around);
            released_bytes += released;
            first_error = first_error.or(error);
        }
        first_error.map_or(Ok(released_bytes), |error| Err(TrimError::Backend { released_bytes, error }))
    }
}

/// What an observer that was there from the start would know of a live segment: a birth with the memory at its start,
/// and growths for what lies behind holes.
pub(crate) fn events_of_live_segment(heap: &Heap, segment: u32) -> Vec<SegmentEvent> {
    let mut runs: Vec<(Units, Units)> = vec![(0, 0)];
    for block in heap.table.blocks_of(segment).map(|slot| heap.table.block(slot)).filter(|block| !block.is_hole()) {
        match runs.last_mut() {
            Some((from, size)) if *from + *size == block.offset() => *size += block.size,
            _ => runs.push((block.offset(), block.size)),
        }
    }
    let kinds = std::iter::once(SegmentEventKind::Birth).chain(std::iter::repeat(SegmentEventKind::Growth));
    let event = |(kind, (from, size))| heap.segment_event(kind, segment, bytes(from), bytes(size));
    kinds.zip(runs).map(event).collect()
}
