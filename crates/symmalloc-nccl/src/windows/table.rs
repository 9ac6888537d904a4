//! The table of live segments, which interprets the segment log.
//!
//! An event changes the extent of one segment. Windows, registered buffers and invalidated keys follow from the change alone, so a new kind
//! of event that only adds memory needs one more arm in [`SegmentTable::apply`]:
//!
//! ```text
//!   event                      before    after     window             buffers           cache key
//!   birth, 16 MiB              -         16 MiB    register           register 16 MiB
//!   growth by 4 MiB at 16 MiB  16 MiB    20 MiB    grow               register 4 MiB    invalidate
//!   growth by 4 MiB at 24 MiB  20 MiB    28 MiB    wait for the hole  register 4 MiB    invalidate
//!   growth by 4 MiB at 20 MiB  28 MiB    28 MiB    grow               register 4 MiB
//!   death, detachment          28 MiB    -         deregister         deregister all    invalidate
//! ```
//! `sync/actions.rs` derives the actions. A sync applies its events to a copy of the table and stores the copy once the actions are done,
//! so a sync that fails leaves the table unchanged.

use crate::windows::keys::SegmentKey;
use crate::windows::segment::HeapSegment;
use std::collections::BTreeMap;
use symmalloc_core::PoolId;
use symmalloc_core::segment_log::{SegmentEvent, SegmentEventKind};

/// The memory of a live segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Address of the segment's first byte.
    pub(crate) base: u64,
    /// End of the segment's last memory, as an offset in bytes from `base`.
    pub(crate) end_bytes: u64,
    /// Number of bytes before the end that are backed by memory. The remaining bytes are holes.
    pub(crate) mapped_bytes: u64,
}

/// A contiguous part of a segment that is backed by memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Address of its first byte.
    pub(crate) base: u64,
    pub(crate) size_bytes: u64,
}

/// The change of one segment by one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentChange {
    pub(crate) segment: HeapSegment,
    /// `None` for a birth.
    pub(crate) before: Option<Extent>,
    /// `None` for a death or a detachment.
    pub(crate) after: Option<Extent>,
    /// The memory that the event added.
    pub(crate) added: Option<Piece>,
}

/// The live segments of the pools that an attachment observes.
///
/// # Invariants
/// - **T1**: The table contains the segments that the observed pools had in the allocator at the last applied event.
/// - **T2**: `mapped_bytes <= end_bytes` in every extent.
/// - **T3**: Extents do not overlap. A dead segment keeps its addresses until its death is acknowledged, which happens after the death was
///   applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentTable {
    live: BTreeMap<HeapSegment, Extent>,
}

impl Extent {
    /// Returns `true` if memory backs the whole segment. A window cannot cover a hole.
    pub(crate) fn is_whole(&self) -> bool {
        self.mapped_bytes == self.end_bytes
    }

    /// Returns the cache key of a segment with this extent.
    pub(crate) fn key(&self, segment: HeapSegment) -> SegmentKey {
        SegmentKey { base: self.base, size_bytes: self.end_bytes, segment }
    }
}

impl SegmentChange {
    /// Returns the cache key that the change invalidates: the key of a segment that ended or whose end moved.
    pub(crate) fn invalidated_key(&self) -> Option<SegmentKey> {
        let before = self.before?;
        let is_invalid = self.after.is_none_or(|after| after.end_bytes > before.end_bytes);
        is_invalid.then(|| before.key(self.segment))
    }
}

impl SegmentTable {
    /// Applies an event. Returns the change, or `None` if the event changes nothing that is registered.
    pub(crate) fn apply(&mut self, event: &SegmentEvent) -> Option<SegmentChange> {
        let segment = HeapSegment::of(event);
        let before = self.live.get(&segment).copied();
        // A segment that begins with a hole is born without memory.
        let added = (event.size_bytes > 0)
            .then_some(Piece { base: event.base.0 + event.offset_bytes, size_bytes: event.size_bytes });
        match event.kind {
            SegmentEventKind::Birth => {
                debug_assert_eq!(before, None, "{segment} was born twice");
                let extent = Extent { base: event.base.0, end_bytes: event.size_bytes, mapped_bytes: event.size_bytes };
                self.live.insert(segment, extent);
                Some(SegmentChange { segment, before: None, after: Some(extent), added })
            }
            SegmentEventKind::Growth => {
                let extent = self.live.get_mut(&segment)?;
                extent.end_bytes = extent.end_bytes.max(event.offset_bytes + event.size_bytes);
                extent.mapped_bytes += event.size_bytes;
                debug_assert!(extent.mapped_bytes <= extent.end_bytes, "{segment} has memory twice at one address");
                Some(SegmentChange { segment, before, after: Some(*extent), added })
            }
            SegmentEventKind::Death => self.remove(segment),
            // A segment of an observed pool does not shrink.
            kind => {
                debug_assert_eq!(kind, SegmentEventKind::Shrink, "the table knows every kind of event");
                None
            }
        }
    }

    /// Removes all segments of a pool that is being detached. Returns the changes.
    pub(crate) fn detach(&mut self, pool: PoolId) -> Vec<SegmentChange> {
        let segments: Vec<HeapSegment> =
            self.live.keys().filter(|segment| segment.heap.pool == pool).copied().collect();
        segments.into_iter().filter_map(|segment| self.remove(segment)).collect()
    }

    fn remove(&mut self, segment: HeapSegment) -> Option<SegmentChange> {
        let before = self.live.remove(&segment)?;
        Some(SegmentChange { segment, before: Some(before), after: None, added: None })
    }

    /// Returns the extent of a live segment.
    pub(crate) fn get(&self, segment: HeapSegment) -> Option<&Extent> {
        self.live.get(&segment)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (HeapSegment, &Extent)> {
        self.live.iter().map(|(segment, extent)| (*segment, extent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::config::{Config, PoolConfig};
    use symmalloc_core::units::MIB;
    use symmalloc_core::{Allocator, Handle, ObserverId, StreamId};
    use symmalloc_sim::SimBackend;

    /// An allocator of the simulator, and a table that follows its default pool.
    struct Followed {
        allocator: Allocator<SimBackend>,
        observer: ObserverId,
        table: SegmentTable,
        live: Vec<Handle>,
        seed: u64,
    }

    impl Followed {
        fn new(pool: PoolConfig, seed: u64) -> Self {
            let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
            let allocator = Allocator::new(SimBackend::builder().seed(seed).build(), config)
                .expect("the arguments should be valid");
            for _ in 0..2 {
                allocator.register_stream().expect("stream ids are available");
            }
            let (observer, births) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
            assert!(births.is_empty());
            Followed { allocator, observer, table: SegmentTable::default(), live: Vec::new(), seed }
        }

        /// Returns a pseudorandom number less than `end`.
        fn below(&mut self, end: u64) -> u64 {
            self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.seed >> 33) % end
        }

        /// Allocates, frees or trims, or stops observing the pool and starts again.
        fn step(&mut self) {
            match self.below(8) {
                0..4 => {
                    let (stream, size_bytes) = (StreamId(self.below(2) as u16), (1 + self.below(24)) * MIB);
                    let allocation = self
                        .allocator
                        .allocate(PoolId::DEFAULT, stream, size_bytes)
                        .expect("the allocation should fit");
                    self.live.push(allocation.handle);
                }
                4 | 5 if !self.live.is_empty() => {
                    let at = self.below(self.live.len() as u64) as usize;
                    self.allocator.free(self.live.swap_remove(at)).expect("the allocation should be live");
                }
                6 => drop(self.allocator.trim_all().expect("a trim should succeed without injected faults")),
                // Without an observer, a trim makes holes in growing segments.
                7 => {
                    self.allocator.forget(self.observer).expect("the driver should not fail without injected faults");
                    self.allocator.trim_all().expect("a trim should succeed without injected faults");
                    let (observer, births) = self.allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
                    self.observer = observer;
                    self.table = SegmentTable::default();
                    self.follow(&births);
                }
                _ => {}
            }
        }

        /// Applies events and checks each change against the table before and after it.
        fn follow(&mut self, events: &[SegmentEvent]) {
            for event in events {
                let before = self.table.clone();
                let change = self.table.apply(event).expect("every event of an observed pool changes something");
                assert_eq!(change.before.as_ref(), before.get(change.segment));
                assert_eq!(change.after.as_ref(), self.table.get(change.segment));
                let mapped = |extent: Option<Extent>| extent.map_or(0, |extent| extent.mapped_bytes);
                let added_bytes = mapped(change.after).saturating_sub(mapped(change.before));
                assert_eq!(change.added.map_or(0, |piece| piece.size_bytes), added_bytes);
                assert_ne!(change.added.map(|piece| piece.size_bytes), Some(0), "NCCL registers no empty buffer");
                let others =
                    |table: &SegmentTable| table.iter().filter(|(segment, _)| *segment != change.segment).count();
                assert_eq!(others(&before), others(&self.table), "an event changes one segment");
            }
        }

        /// Reads the log, and compares the table with the allocator (T1). Returns the number of segments with holes.
        fn check(&mut self) -> usize {
            let unread = self.allocator.unread(self.observer);
            self.follow(&unread.events);
            let snapshot = self.allocator.snapshot();
            let expected: BTreeMap<HeapSegment, (u64, u64)> = snapshot
                .segments
                .iter()
                .map(|segment| {
                    let name = HeapSegment { heap: segment.heap, id: segment.segment };
                    (name, (segment.base.0, segment.mapped_bytes))
                })
                .collect();
            let found = self.table.iter().map(|(segment, extent)| (segment, (extent.base, extent.mapped_bytes)));
            assert_eq!(found.collect::<BTreeMap<_, _>>(), expected, "T1");
            let mut extents: Vec<Extent> = self.table.iter().map(|(_, extent)| *extent).collect();
            extents.sort_by_key(|extent| extent.base);
            assert!(extents.iter().all(|extent| extent.mapped_bytes <= extent.end_bytes), "T2");
            assert!(extents.windows(2).all(|pair| pair[0].base + pair[0].end_bytes <= pair[1].base), "T3");
            self.allocator
                .acknowledge(self.observer, &unread)
                .expect("the driver should not fail without injected faults");
            extents.iter().filter(|extent| !extent.is_whole()).count()
        }
    }

    #[test]
    fn the_table_equals_the_allocator_on_random_programs() {
        let (mut holes, mut segments) = (0, 0);
        for seed in 0..60 {
            let pool = PoolConfig::builder().symmetric(true);
            let pool = if seed % 2 == 0 { pool.fixed() } else { pool };
            let mut followed = Followed::new(pool.build().expect("the configuration should be valid"), seed);
            for _ in 0..120 {
                followed.step();
                if followed.below(3) == 0 {
                    holes += followed.check();
                    segments += followed.table.iter().count();
                }
            }
            followed.check();
            let removed = followed.table.detach(PoolId::DEFAULT);
            assert!(removed.iter().all(|change| change.before.is_some() && change.after.is_none()));
            assert_eq!(followed.table, SegmentTable::default());
        }
        assert!(holes > 50 && segments > 1000, "{holes} holes in {segments} segments");
    }

    #[test]
    fn a_key_is_invalidated_when_its_segment_ends_or_becomes_larger() {
        let mut followed =
            Followed::new(PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid"), 0);
        let mut keys = Vec::new();
        let mut take = |followed: &mut Followed, size_bytes| {
            let taken = followed
                .allocator
                .allocate(PoolId::DEFAULT, StreamId(0), size_bytes)
                .expect("the allocation should fit");
            let unread = followed.allocator.unread(followed.observer);
            let changes = unread.events.iter().filter_map(|event| followed.table.apply(event));
            keys.extend(changes.filter_map(|change| change.invalidated_key()).map(|key| key.size_bytes));
            followed
                .allocator
                .acknowledge(followed.observer, &unread)
                .expect("the driver should not fail without injected faults");
            taken.handle
        };
        take(&mut followed, 2 * MIB);
        take(&mut followed, 4 * MIB);
        take(&mut followed, 2 * MIB);
        keys.extend(
            followed
                .table
                .detach(PoolId::DEFAULT)
                .iter()
                .filter_map(SegmentChange::invalidated_key)
                .map(|key| key.size_bytes),
        );
        assert_eq!(keys, [2 * MIB, 6 * MIB, 8 * MIB]);
    }
}
