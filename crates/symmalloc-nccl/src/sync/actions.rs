//! The actions of one sync on one communicator, computed before anything changes.
//!
//! ```text
//!   segment log since the last sync      action                    why
//!   birth  g0                            register   g0             new and live
//!   birth  g1, growth g1                 register   g1, whole      once, at its current size
//!   growth g2                            grow       g2             a larger window replaces the old one
//!   birth  g3, death g3                  nothing                   no rank ever observes it
//!   death  g4                            deregister g4             last, in order of death
//! ```
//!
//! The actions are a function of the log and the existing windows, so equal histories lead to equal actions on every rank. Computing them
//! changes nothing: a sync that fails leaves the log and the segment table unchanged, and the next sync computes its actions again.

use crate::sync::fold;
use crate::windows::keys::SegmentKey;
use crate::windows::segment::{HeapSegment, SymmetricSegment};
use std::collections::BTreeMap;
use std::fmt;
use symmalloc_core::PoolId;
use symmalloc_core::segment_log::{SegmentEvent, SegmentEventKind};

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ChangeKind {
    /// Registers a window on a new segment.
    Register,
    /// Replaces the window of a segment that grew with one over the whole segment.
    Grow,
    /// Deregisters the window of a dead segment.
    Deregister,
}

/// A change to the windows of a communicator, in terms that all ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct WindowChange {
    /// The kind of change.
    pub kind: ChangeKind,
    /// The affected segment.
    pub segment: SymmetricSegment,
    /// Size of the window in bytes.
    pub size_bytes: u64,
}

impl fmt::Display for WindowChange {
    /// Writes `register segment 3 of symmetric pool 0, stream 1 (2097152 bytes)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.kind {
            ChangeKind::Register => "register",
            ChangeKind::Grow => "grow",
            ChangeKind::Deregister => "deregister",
        };
        write!(f, "{verb} {} ({} bytes)", self.segment, self.size_bytes)
    }
}

/// A change, with the segment and its address on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SyncAction {
    pub(crate) change: WindowChange,
    pub(crate) segment: HeapSegment,
    pub(crate) base: u64,
}

/// The state of a live segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveSegment {
    pub(crate) base: u64,
    /// End of its last mapped memory, as an offset in bytes.
    pub(crate) end_bytes: u64,
    mapped_bytes: u64,
    /// Bytes that its window covers; 0 without a window.
    pub(crate) window_bytes: u64,
}

impl LiveSegment {
    /// Returns `true` if memory backs the whole segment. A window cannot cover a hole.
    pub(crate) fn is_whole(&self) -> bool {
        self.mapped_bytes == self.end_bytes
    }
}

/// The live segments of the pools that an attachment observes.
pub(crate) type SegmentTable = BTreeMap<HeapSegment, LiveSegment>;

/// The actions of a sync and the resulting changes to the segment table.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SyncActions {
    /// Registrations in log order, then deregistrations in log order.
    pub(crate) list: Vec<SyncAction>,
    /// Changed segments; `None` if dead.
    segments: BTreeMap<HeapSegment, Option<LiveSegment>>,
}

impl SyncActions {
    /// Computes the actions for the events since the table was last updated. All windows of the `leaving` pools are deregistered.
    pub(crate) fn new(
        segments: &SegmentTable,
        events: &[SegmentEvent],
        leaving: &[PoolId],
        ordinal: impl Fn(PoolId) -> u32,
    ) -> Self {
        let mut changes: BTreeMap<HeapSegment, Option<LiveSegment>> = BTreeMap::new();
        let (mut touched, mut dead) = (Vec::new(), Vec::new());
        for event in events {
            let segment = HeapSegment::of(event);
            let now = changes.entry(segment).or_insert_with(|| {
                touched.push(segment);
                segments.get(&segment).copied()
            });
            match event.kind {
                SegmentEventKind::Birth => {
                    *now = Some(LiveSegment {
                        base: event.base.0,
                        end_bytes: event.size_bytes,
                        mapped_bytes: event.size_bytes,
                        window_bytes: 0,
                    });
                }
                SegmentEventKind::Growth => {
                    if let Some(now) = now {
                        now.end_bytes = now.end_bytes.max(event.offset_bytes + event.size_bytes);
                        now.mapped_bytes += event.size_bytes;
                    }
                }
                SegmentEventKind::Death => {
                    *now = None;
                    dead.push(segment);
                }
                // Other events do not occur in an observed pool.
                _ => {}
            }
        }
        let leaves = |segment: &HeapSegment| leaving.contains(&segment.heap.pool);
        let gone = segments.keys().filter(|segment| leaves(segment) && !dead.contains(segment)).copied();
        dead.extend(gone.collect::<Vec<_>>());
        touched.retain(|segment| !leaves(segment));
        changes.retain(|segment, _| !leaves(segment));

        let action = |kind, segment: HeapSegment, size_bytes, base| SyncAction {
            change: WindowChange {
                kind,
                segment: SymmetricSegment::of(ordinal(segment.heap.pool), segment),
                size_bytes,
            },
            segment,
            base,
        };
        let mut actions = Vec::new();
        for segment in touched {
            let Some(Some(now)) = changes.get_mut(&segment) else { continue };
            if now.is_whole() && now.window_bytes < now.end_bytes {
                let kind = if now.window_bytes == 0 { ChangeKind::Register } else { ChangeKind::Grow };
                actions.push(action(kind, segment, now.end_bytes, now.base));
                now.window_bytes = now.end_bytes;
            }
        }
        for segment in dead {
            if let Some(old) = segments.get(&segment) {
                if old.window_bytes > 0 {
                    actions.push(action(ChangeKind::Deregister, segment, old.window_bytes, old.base));
                }
                changes.insert(segment, None);
            }
        }
        SyncActions { list: actions, segments: changes }
    }

    /// Applies the changes to the segment table, once the actions are executed.
    pub(crate) fn write_to(&self, segments: &mut SegmentTable) {
        for (segment, now) in &self.segments {
            match now {
                Some(now) => segments.insert(*segment, *now),
                None => segments.remove(segment),
            };
        }
    }

    /// Returns the number of actions that add a window, and the number of those that only remove one.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let deregistrations = self.list.iter().filter(|action| action.change.kind == ChangeKind::Deregister).count();
        ((self.list.len() - deregistrations) as u64, deregistrations as u64)
    }

    /// Returns `true` if an action removes a window that work on the device may use.
    pub(crate) fn removes_registrations(&self) -> bool {
        self.list.iter().any(|action| action.change.kind != ChangeKind::Register)
    }

    /// Returns a digest of the actions, for comparison across ranks.
    pub(crate) fn digest(&self) -> u64 {
        let words = self.list.iter().flat_map(|action| action.change.words());
        words.fold(self.list.len() as u64, fold)
    }
}

/// Returns the keys that these events invalidate, in order: those of released segments, and the old keys of segments that grew. All keys
/// of leaving pools come last.
pub(crate) fn invalidated_keys(
    segments: &SegmentTable,
    events: &[SegmentEvent],
    leaving: &[PoolId],
) -> Vec<SegmentKey> {
    let key = |segment, base, size_bytes| SegmentKey { base, size_bytes, segment };
    let mut ends: BTreeMap<HeapSegment, u64> =
        segments.iter().map(|(segment, now)| (*segment, now.end_bytes)).collect();
    let mut dead = Vec::new();
    for event in events {
        let (segment, base) = (HeapSegment::of(event), event.base.0);
        match event.kind {
            SegmentEventKind::Birth => {
                ends.insert(segment, event.size_bytes);
            }
            SegmentEventKind::Growth => {
                let end = ends.entry(segment).or_default();
                let grown = (*end).max(event.offset_bytes + event.size_bytes);
                if *end < grown {
                    dead.push(key(segment, base, *end));
                    *end = grown;
                }
            }
            SegmentEventKind::Death => dead.extend(ends.remove(&segment).map(|end| key(segment, base, end))),
            _ => {}
        }
    }
    let left =
        segments.iter().filter(|(segment, _)| leaving.contains(&segment.heap.pool) && ends.contains_key(segment));
    dead.extend(left.map(|(segment, now)| key(*segment, now.base, ends[segment])));
    dead
}

impl WindowChange {
    /// Returns the change as words, for digests.
    pub(crate) fn words(&self) -> [u64; 3] {
        let stream = self.segment.group.stream().map_or(u32::MAX, |stream| stream.0.into());
        let kind = match self.kind {
            ChangeKind::Register => 1,
            ChangeKind::Grow => 2,
            ChangeKind::Deregister => 3,
        };
        [
            (u64::from(self.segment.pool) << 32) | u64::from(stream),
            (u64::from(self.segment.id.0) << 32) | kind,
            self.size_bytes,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::StreamId;
    use symmalloc_core::config::{Config, PoolConfig};
    use symmalloc_core::units::MIB;
    use symmalloc_core::{Allocator, ObserverId};
    use symmalloc_sim::SimBackend;

    /// An allocator with an observed default pool, and its segment table.
    struct Watched {
        allocator: Allocator<SimBackend>,
        observer: ObserverId,
        segments: SegmentTable,
        dead: Vec<SegmentKey>,
    }

    impl Watched {
        fn new(pool: PoolConfig) -> Self {
            let config = Config::builder().default_pool(pool).build().expect("valid");
            let allocator = Allocator::new(SimBackend::builder().build(), config).expect("valid");
            allocator.register_stream().expect("stream ids are available");
            let (observer, births) = allocator.observe(PoolId::DEFAULT).expect("the pool exists");
            assert!(births.is_empty());
            Watched { allocator, observer, segments: SegmentTable::new(), dead: Vec::new() }
        }

        fn actions(&self) -> SyncActions {
            SyncActions::new(&self.segments, &self.allocator.unread(self.observer).events, &[], |_| 0)
        }

        fn sync(&mut self) -> Vec<(ChangeKind, u32, u64)> {
            let actions = self.actions();
            assert_eq!(actions, self.actions(), "computing them changes nothing");
            let mut dead: Vec<_> = invalidated_keys(&self.segments, &self.allocator.unread(self.observer).events, &[]);
            self.dead.append(&mut dead);
            actions.write_to(&mut self.segments);
            self.allocator.acknowledge(self.observer, &self.allocator.unread(self.observer)).expect("no faults");
            assert!(self.actions().list.is_empty(), "never twice");
            let seen = |action: &SyncAction| (action.change.kind, action.change.segment.id.0, action.change.size_bytes);
            actions.list.iter().map(seen).collect()
        }

        fn take(&self, size_bytes: u64) -> symmalloc_core::Handle {
            self.allocator.allocate(PoolId::DEFAULT, StreamId(0), size_bytes).expect("the allocation fits").handle
        }

        fn free(&self, handle: symmalloc_core::Handle) {
            self.allocator.free(handle).expect("the allocation is live");
        }

        fn trim(&self) {
            self.allocator.trim_all().expect("no faults");
        }
    }

    fn fixed() -> PoolConfig {
        PoolConfig::builder().fixed().symmetric(true).build().expect("valid")
    }

    #[test]
    fn new_segments_are_registered_once_and_dead_ones_deregistered_in_order_of_death() {
        let mut watched = Watched::new(fixed());
        let (a, b) = (watched.take(30 * MIB), watched.take(40 * MIB));
        assert_eq!(watched.sync(), [(ChangeKind::Register, 0, 30 * MIB), (ChangeKind::Register, 1, 40 * MIB)]);
        watched.free(b);
        watched.trim();
        watched.free(a);
        watched.trim();
        watched.take(50 * MIB);
        let expected = [
            (ChangeKind::Register, 2, 50 * MIB),
            (ChangeKind::Deregister, 1, 40 * MIB),
            (ChangeKind::Deregister, 0, 30 * MIB),
        ];
        assert_eq!(watched.sync(), expected);
        let dead: Vec<_> = watched.dead.iter().map(|key| (key.segment.id.0, key.size_bytes)).collect();
        assert_eq!(dead, [(1, 40 * MIB), (0, 30 * MIB)]);
    }

    #[test]
    fn a_segment_that_is_born_and_dies_between_two_syncs_is_never_registered() {
        let mut watched = Watched::new(fixed());
        let a = watched.take(30 * MIB);
        watched.free(a);
        watched.trim();
        assert_eq!(watched.sync(), []);
        assert!(watched.segments.is_empty());
    }

    #[test]
    fn a_growing_segment_gets_one_window_at_a_time_over_all_of_it() {
        let mut watched = Watched::new(PoolConfig::builder().symmetric(true).build().expect("valid"));
        watched.take(2 * MIB);
        watched.take(4 * MIB);
        assert_eq!(watched.sync(), [(ChangeKind::Register, 0, 6 * MIB)], "birth and growth are one registration");
        watched.take(2 * MIB);
        watched.take(2 * MIB);
        assert_eq!(watched.sync(), [(ChangeKind::Grow, 0, 10 * MIB)]);
        let dead: Vec<_> = watched.dead.iter().map(|key| key.size_bytes).collect();
        assert_eq!(dead, [2 * MIB, 6 * MIB, 8 * MIB], "a lookup in between returned one of these");
    }

    #[test]
    fn a_segment_with_holes_gets_its_window_when_the_holes_are_filled() {
        let mut watched = Watched::new(PoolConfig::builder().symmetric(true).build().expect("valid"));
        watched.allocator.forget(watched.observer).expect("no faults");
        let (hole, _kept) = (watched.take(4 * MIB), watched.take(2 * MIB));
        watched.free(hole);
        watched.trim();
        let (observer, births) = watched.allocator.observe(PoolId::DEFAULT).expect("the pool exists");
        watched.observer = observer;
        let actions = SyncActions::new(&watched.segments, &births, &[], |_| 0);
        assert!(actions.list.is_empty());
        actions.write_to(&mut watched.segments);
        watched.take(4 * MIB);
        assert_eq!(watched.sync(), [(ChangeKind::Register, 0, 6 * MIB)]);
    }

    #[test]
    fn a_detached_pool_loses_all_windows() {
        let mut watched = Watched::new(fixed());
        watched.take(30 * MIB);
        watched.sync();
        watched.take(40 * MIB);
        let events = watched.allocator.unread(watched.observer).events;
        let actions = SyncActions::new(&watched.segments, &events, &[PoolId::DEFAULT], |_| 0);
        assert_eq!(actions.counts(), (0, 1));
        actions.write_to(&mut watched.segments);
        assert!(watched.segments.is_empty());
    }

    #[test]
    fn the_order_of_the_changes_is_in_the_digest() {
        let watched = Watched::new(fixed());
        watched.take(30 * MIB);
        let one = watched.actions();
        watched.take(30 * MIB);
        let two = watched.actions();
        assert_ne!(one.digest(), two.digest());
        let swapped = SyncActions { list: vec![two.list[1], two.list[0]], segments: BTreeMap::new() };
        assert_ne!(two.digest(), swapped.digest(), "the order matters");
        assert_eq!(one.list[0].change.to_string(), "register segment 0 of symmetric pool 0, stream 0 (31457280 bytes)");
    }
}
