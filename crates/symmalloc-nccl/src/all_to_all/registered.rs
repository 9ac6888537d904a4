//! The cache of registered segments, for calls that require registered memory.
//!
//! ```text
//!  call ── address ──► known segments ── miss ──► registrar: is it registered? ──► known from now on
//!                           ▲
//!                           └── invalidated keys, in log order ◄── registrar, at each sync
//! ```
//! The registrar invalidates a key only after the device has completed all work submitted so far, so no call in flight uses a segment that
//! the cache drops.

use crate::all_to_all::error::AllToAllError;
use crate::all_to_all::splits::Side;
use crate::all_to_all::transfers::Region;
use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::sync::error::LookupError;
use crate::windows::keys::{Invalidated, InvalidationCursor, SegmentKey};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The registered segments of one communicator that calls have used.
pub(super) struct RegisteredSegments {
    registrar: Arc<Registrar>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    segments: SegmentList,
    cursor: InvalidationCursor,
}

/// A list of segments that do not overlap.
#[derive(Debug, Default)]
struct SegmentList {
    /// Ascending by base address.
    keys: Vec<SegmentKey>,
}

impl RegisteredSegments {
    pub(super) fn new(registrar: &Arc<Registrar>) -> Self {
        RegisteredSegments { registrar: Arc::clone(registrar), known: Mutex::default() }
    }

    /// Returns an error if the buffer is not registered on the communicator, as a window or for this rank only.
    pub(super) fn check(&self, comm: &Communicator, side: Side, region: Region) -> Result<(), AllToAllError> {
        if region.size_bytes == 0 {
            return Ok(());
        }
        let mut known = self.lock();
        let Known { segments, cursor } = &mut *known;
        segments.forget(self.registrar.invalidations(comm, cursor));
        if segments.hold(region) {
            return Ok(());
        }
        let segment = match self.registrar.window_at(comm, region.address, region.size_bytes) {
            Ok(span) => span.segment,
            Err(LookupError::Plain { segment, .. }) => segment,
            Err(error) => return Err(AllToAllError::NotRegistered { side, error }),
        };
        segments.insert(segment);
        Ok(())
    }

    /// Returns the keys of the cached segments, in ascending order of addresses.
    pub(super) fn keys(&self) -> Vec<SegmentKey> {
        self.lock().segments.keys.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SegmentList {
    fn forget(&mut self, dead: Invalidated) {
        match dead {
            Invalidated::Keys(dead) if dead.is_empty() => {}
            Invalidated::Keys(dead) => self.keys.retain(|key| !dead.contains(key)),
            Invalidated::Everything => self.keys.clear(),
        }
    }

    /// Returns `true` if one of the segments contains the whole region.
    fn hold(&self, region: Region) -> bool {
        let behind = self.keys.partition_point(|key| key.base <= region.address);
        let Some(key) = behind.checked_sub(1).map(|at| self.keys[at]) else { return false };
        let offset_bytes = region.address - key.base;
        key.size_bytes.checked_sub(offset_bytes).is_some_and(|room| region.size_bytes <= room)
    }

    /// Adds a segment. If the segment has grown, replaces its previous entry.
    fn insert(&mut self, key: SegmentKey) {
        let at = self.keys.partition_point(|other| other.base < key.base);
        match self.keys.get_mut(at) {
            Some(other) if other.base == key.base => *other = key,
            _ => self.keys.insert(at, key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::windows::segment::HeapSegment;
    use symmalloc_core::ids::HeapId;
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::{PoolId, SegmentId};

    fn key(segment: u32, base: u64) -> SegmentKey {
        let segment =
            HeapSegment { heap: HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All }, id: SegmentId(segment) };
        SegmentKey { base, size_bytes: 0x1000, segment }
    }

    fn region(address: u64, size_bytes: u64) -> Region {
        Region { address, size_bytes }
    }

    #[test]
    fn a_buffer_is_known_when_one_segment_holds_all_of_it() {
        let mut segments = SegmentList::default();
        assert!(!segments.hold(region(0x1000, 1)));
        segments.insert(key(0, 0x3000));
        segments.insert(key(1, 0x1000));
        assert!(segments.hold(region(0x1000, 0x1000)) && segments.hold(region(0x3fff, 1)));
        assert!(
            !segments.hold(region(0xfff, 1)) && !segments.hold(region(0x1fff, 2)) && !segments.hold(region(0x2000, 1))
        );
    }

    #[test]
    fn invalidated_segments_are_removed() {
        let mut segments = SegmentList::default();
        (0..4_u32).for_each(|at| segments.insert(key(at, 0x1000 * u64::from(at))));
        segments.forget(Invalidated::Keys(vec![]));
        assert_eq!(segments.keys.len(), 4);
        // The key of a different segment at the address of a cached one.
        segments.forget(Invalidated::Keys(vec![key(2, 0x2000), key(9, 0x1000)]));
        assert_eq!(segments.keys, [key(0, 0), key(1, 0x1000), key(3, 0x3000)]);
        segments.forget(Invalidated::Everything);
        assert!(segments.keys.is_empty());
    }
}
