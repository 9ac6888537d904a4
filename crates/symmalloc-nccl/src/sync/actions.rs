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
//! [`SegmentTable`] interprets the events. The actions are a function of the resulting changes and the existing windows, so equal histories
//! lead to equal actions on every rank. Computing the actions changes nothing: a sync that fails leaves the log and the table unchanged,
//! and the next sync computes the actions of the failed sync again.

use crate::sync::fold;
use crate::windows::keys::SegmentKey;
use crate::windows::registrations::Registrations;
use crate::windows::segment::{HeapSegment, SymmetricSegment};
use crate::windows::table::{Extent, Piece, SegmentChange, SegmentTable};
use std::collections::BTreeSet;
use std::fmt;
use symmalloc_core::PoolId;
use symmalloc_core::segment_log::SegmentEvent;

/// The effect of a change on a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ChangeKind {
    /// Registers a window on a new segment.
    Register,
    /// Replaces the window of a grown segment by a window over the whole segment.
    Grow,
    /// Deregisters the window of a dead segment.
    Deregister,
}

/// A change to one window of a communicator, in terms that are equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct WindowChange {
    /// The effect on the window of `segment`.
    pub kind: ChangeKind,
    /// The segment whose window changes.
    pub segment: SymmetricSegment,
    /// Size of the window in bytes: the new size if a window is registered or grows.
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

/// The events since the last sync, in all pools that are attached with one kind of registration (windows or buffers).
#[derive(Debug, Default)]
pub(crate) struct PoolEvents {
    /// Ordered by pool, and within a pool by the position in its log.
    pub(crate) events: Vec<SegmentEvent>,
    /// Pools that the sync detaches, in ascending order.
    pub(crate) leaving: Vec<PoolId>,
}

/// A change to a window, with the segment and its address on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SyncAction {
    pub(crate) change: WindowChange,
    pub(crate) segment: HeapSegment,
    pub(crate) base: u64,
}

/// The buffers to register and deregister on this rank.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct BufferActions {
    /// Pieces of live segments, in log order, each with the key of its segment.
    pub(crate) register: Vec<(SegmentKey, Piece)>,
    /// Registered segments that ended, in log order.
    pub(crate) deregister: Vec<SegmentKey>,
}

/// The actions of a sync and the resulting segments.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SyncActions {
    /// Registrations in log order, then deregistrations in log order; equal on all ranks.
    pub(crate) windows: Vec<SyncAction>,
    /// Registrations and deregistrations of buffers, which are local to this rank.
    pub(crate) buffers: BufferActions,
    /// Keys to invalidate, in log order.
    pub(crate) invalidated: Vec<SegmentKey>,
    /// The table after the sync; `None` if the sync does not change it.
    pub(crate) segments: Option<SegmentTable>,
}

impl SyncActions {
    /// Computes the actions that follow from the events of the pools whose segments are registered as windows and of those whose memory is
    /// registered as buffers. Pools that are being detached lose all registrations.
    pub(crate) fn new(
        segments: &SegmentTable,
        registered: &Registrations,
        windows: &PoolEvents,
        buffers: &PoolEvents,
        ordinal: impl Fn(PoolId) -> u32,
    ) -> Self {
        if windows.is_empty() && buffers.is_empty() {
            return SyncActions::default();
        }
        let mut next = segments.clone();
        let (windows, buffers) = (windows.apply_to(&mut next), buffers.apply_to(&mut next));
        SyncActions {
            invalidated: windows.iter().chain(&buffers).filter_map(SegmentChange::invalidated_key).collect(),
            windows: window_actions(&windows, &next, registered, ordinal),
            buffers: BufferActions::new(&buffers, &next, registered),
            segments: Some(next),
        }
    }

    /// Returns the number of actions that add a window, and the number of actions that only remove a window.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let deregistrations = self.windows.iter().filter(|action| action.change.kind == ChangeKind::Deregister).count();
        ((self.windows.len() - deregistrations) as u64, deregistrations as u64)
    }

    /// Returns `true` if an action removes a registration that work on the device may use.
    pub(crate) fn removes_registrations(&self) -> bool {
        self.windows.iter().any(|action| action.change.kind != ChangeKind::Register)
            || !self.buffers.deregister.is_empty()
    }

    /// Returns a digest of the actions on windows, for comparison across ranks.
    pub(crate) fn digest(&self) -> u64 {
        let words = self.windows.iter().flat_map(|action| action.change.words());
        words.fold(self.windows.len() as u64, fold)
    }
}

impl BufferActions {
    fn new(changes: &[SegmentChange], next: &SegmentTable, registered: &Registrations) -> Self {
        let register = changes.iter().filter_map(|change| {
            let extent = next.get(change.segment)?;
            Some((extent.key(change.segment), change.added?))
        });
        let deregister = ended(changes).filter_map(|(segment, extent)| Some(registered.get(segment, extent.base)?.key));
        BufferActions { register: register.collect(), deregister: deregister.collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.register.is_empty() && self.deregister.is_empty()
    }
}

impl PoolEvents {
    /// Applies the events to the table, and then removes the segments of the pools that are detached. Returns the changes in the order in
    /// which they were made.
    pub(crate) fn apply_to(&self, table: &mut SegmentTable) -> Vec<SegmentChange> {
        let mut changes: Vec<SegmentChange> = self.events.iter().filter_map(|event| table.apply(event)).collect();
        for &pool in &self.leaving {
            changes.extend(table.detach(pool));
        }
        changes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.leaving.is_empty()
    }
}

/// Returns the actions on windows that follow from these changes. `next` is the table after the changes.
fn window_actions(
    changes: &[SegmentChange],
    next: &SegmentTable,
    registered: &Registrations,
    ordinal: impl Fn(PoolId) -> u32,
) -> Vec<SyncAction> {
    let action = |kind, key: SegmentKey| SyncAction {
        change: WindowChange {
            kind,
            segment: SymmetricSegment::of(ordinal(key.segment.heap.pool), key.segment),
            size_bytes: key.size_bytes,
        },
        segment: key.segment,
        base: key.base,
    };
    let (mut actions, mut seen) = (Vec::new(), BTreeSet::new());
    for change in changes {
        let Some(extent) = next.get(change.segment).filter(|_| seen.insert(change.segment)) else { continue };
        let window_bytes = registered.get(change.segment, extent.base).map(|entry| entry.key.size_bytes);
        if extent.is_whole() && window_bytes.unwrap_or(0) < extent.end_bytes {
            let kind = if window_bytes.is_none() { ChangeKind::Register } else { ChangeKind::Grow };
            actions.push(action(kind, extent.key(change.segment)));
        }
    }
    for (segment, extent) in ended(changes) {
        if let Some(entry) = registered.get(segment, extent.base) {
            actions.push(action(ChangeKind::Deregister, entry.key));
        }
    }
    actions
}

/// Returns the segments that ended, with their last extents.
fn ended(changes: &[SegmentChange]) -> impl Iterator<Item = (HeapSegment, Extent)> {
    let ended = changes.iter().filter(|change| change.after.is_none());
    ended.filter_map(|change| Some((change.segment, change.before?)))
}

impl WindowChange {
    /// Returns the change as words, for digests.
    pub(crate) fn words(&self) -> [u64; 3] {
        let kind = match self.kind {
            ChangeKind::Register => 1,
            ChangeKind::Grow => 2,
            ChangeKind::Deregister => 3,
        };
        [
            (u64::from(self.segment.pool) << 32) | u64::from(self.segment.group.code()),
            (u64::from(self.segment.id.0) << 32) | kind,
            self.size_bytes,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::registration::Registered;
    use crate::windows::registrations::buffer_without_handle;
    use symmalloc_core::StreamId;
    use symmalloc_core::config::{Config, PoolConfig};
    use symmalloc_core::units::MIB;
    use symmalloc_core::{Allocator, ObserverId};
    use symmalloc_sim::SimBackend;

    /// An allocator with an observed default pool, its segment table and its registrations.
    struct Watched {
        allocator: Allocator<SimBackend>,
        observer: ObserverId,
        segments: SegmentTable,
        registered: Registrations,
        /// Births of the segments that were live when the pool was first observed.
        births: Vec<SegmentEvent>,
        invalidated: Vec<SegmentKey>,
    }

    impl Watched {
        fn new(pool: PoolConfig) -> Self {
            let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
            let allocator =
                Allocator::new(SimBackend::builder().build(), config).expect("the arguments should be valid");
            allocator.register_stream().expect("stream ids are available");
            let (observer, births) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
            let (registered, invalidated) = (Registrations::default(), Vec::new());
            Watched { allocator, observer, segments: SegmentTable::default(), registered, births, invalidated }
        }

        fn events(&self) -> PoolEvents {
            let unread = self.allocator.unread(self.observer).events;
            PoolEvents { events: self.births.iter().copied().chain(unread).collect(), leaving: Vec::new() }
        }

        fn actions(&self) -> SyncActions {
            SyncActions::new(&self.segments, &self.registered, &self.events(), &PoolEvents::default(), |_| 0)
        }

        /// Syncs, with the pool attached for windows.
        fn sync(&mut self) -> Vec<(ChangeKind, u32, u64)> {
            let actions = self.actions();
            assert_eq!(actions, self.actions(), "computing them changes nothing");
            self.execute(&actions);
            assert!(self.actions().windows.is_empty(), "never twice");
            let seen = |action: &SyncAction| (action.change.kind, action.change.segment.id.0, action.change.size_bytes);
            actions.windows.iter().map(seen).collect()
        }

        fn execute(&mut self, actions: &SyncActions) {
            for SyncAction { change, segment, base } in &actions.windows {
                if change.kind != ChangeKind::Register {
                    assert!(self.registered.remove_window(*segment, *base).is_some(), "it has a window");
                }
                if change.kind != ChangeKind::Deregister {
                    let key = SegmentKey { base: *base, size_bytes: change.size_bytes, segment: *segment };
                    let registered = Registered::Plain(buffer_without_handle(*base, change.size_bytes));
                    self.registered.insert_window(key, change.segment, registered);
                }
            }
            for (key, piece) in &actions.buffers.register {
                self.registered.insert_buffer(*key, buffer_without_handle(piece.base, piece.size_bytes));
            }
            for key in &actions.buffers.deregister {
                assert!(!self.registered.remove_buffers(key.segment, key.base).is_empty());
            }
            assert_eq!(self.registered.violation(), None);
            self.invalidated.extend(&actions.invalidated);
            self.segments = actions.segments.clone().unwrap_or_else(|| self.segments.clone());
            self.births.clear();
            self.allocator
                .acknowledge(self.observer, &self.allocator.unread(self.observer))
                .expect("the driver should not fail without injected faults");
        }

        fn take(&self, size_bytes: u64) -> symmalloc_core::Handle {
            self.allocator.allocate(PoolId::DEFAULT, StreamId(0), size_bytes).expect("the allocation should fit").handle
        }

        fn free(&self, handle: symmalloc_core::Handle) {
            self.allocator.free(handle).expect("the allocation is live");
        }

        fn trim(&self) {
            self.allocator.trim_all().expect("a trim should succeed without injected faults");
        }
    }

    fn fixed() -> PoolConfig {
        PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid")
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
        let dead: Vec<_> = watched.invalidated.iter().map(|key| (key.segment.id.0, key.size_bytes)).collect();
        assert_eq!(dead, [(1, 40 * MIB), (0, 30 * MIB)]);
    }

    #[test]
    fn a_segment_that_is_born_and_dies_between_two_syncs_is_never_registered() {
        let mut watched = Watched::new(fixed());
        let a = watched.take(30 * MIB);
        watched.free(a);
        watched.trim();
        assert_eq!(watched.sync(), []);
        assert_eq!(watched.segments, SegmentTable::default());
    }

    #[test]
    fn a_growing_segment_gets_one_window_at_a_time_over_all_of_it() {
        let mut watched =
            Watched::new(PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid"));
        watched.take(2 * MIB);
        watched.take(4 * MIB);
        assert_eq!(watched.sync(), [(ChangeKind::Register, 0, 6 * MIB)], "birth and growth are one registration");
        watched.take(2 * MIB);
        watched.take(2 * MIB);
        assert_eq!(watched.sync(), [(ChangeKind::Grow, 0, 10 * MIB)]);
        let dead: Vec<_> = watched.invalidated.iter().map(|key| key.size_bytes).collect();
        assert_eq!(dead, [2 * MIB, 6 * MIB, 8 * MIB], "a lookup in between returned one of these");
    }

    #[test]
    fn a_segment_with_holes_gets_its_window_when_the_holes_are_filled() {
        let mut watched =
            Watched::new(PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid"));
        watched.allocator.forget(watched.observer).expect("the driver should not fail without injected faults");
        let (hole, _kept) = (watched.take(4 * MIB), watched.take(2 * MIB));
        watched.free(hole);
        watched.trim();
        let (observer, births) = watched.allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
        watched.observer = observer;
        watched.births = births;
        assert_eq!(watched.sync(), []);
        watched.take(4 * MIB);
        assert_eq!(watched.sync(), [(ChangeKind::Register, 0, 6 * MIB)]);
    }

    #[test]
    fn a_detached_pool_loses_all_windows() {
        let mut watched = Watched::new(fixed());
        watched.take(30 * MIB);
        watched.sync();
        watched.take(40 * MIB);
        let leaving = PoolEvents { leaving: vec![PoolId::DEFAULT], ..watched.events() };
        let actions = SyncActions::new(&watched.segments, &watched.registered, &leaving, &PoolEvents::default(), |_| 0);
        assert_eq!(actions.counts(), (0, 1));
        watched.execute(&actions);
        assert_eq!(watched.segments, SegmentTable::default());
        let keys: Vec<_> = watched.invalidated.iter().map(|key| key.size_bytes).collect();
        assert_eq!(keys, [30 * MIB, 40 * MIB], "a lookup returned the key of the new segment, too");
    }

    #[test]
    fn buffers_are_registered_piece_by_piece_and_deregistered_together() {
        let mut watched = Watched::new(PoolConfig::builder().build().expect("the configuration should be valid"));
        let actions = |watched: &Watched, leaving: &[PoolId]| {
            let buffers = PoolEvents { leaving: leaving.to_vec(), ..watched.events() };
            SyncActions::new(&watched.segments, &watched.registered, &PoolEvents::default(), &buffers, |_| 0)
        };
        watched.allocator.forget(watched.observer).expect("the driver should not fail without injected faults");
        let (hole, _kept) = (watched.take(4 * MIB), watched.take(2 * MIB));
        watched.free(hole);
        watched.trim();
        (watched.observer, watched.births) = watched.allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
        for (taken, expected) in
            [(0, vec![(4 * MIB, 2 * MIB)]), (4 * MIB, vec![(0, 4 * MIB)]), (8 * MIB, vec![(6 * MIB, 8 * MIB)])]
        {
            if taken > 0 {
                watched.take(taken);
            }
            let next = actions(&watched, &[]);
            let pieces: Vec<_> =
                next.buffers.register.iter().map(|(key, piece)| (piece.base - key.base, piece.size_bytes)).collect();
            assert_eq!((pieces, next.windows.len(), next.removes_registrations()), (expected, 0, false));
            watched.execute(&next);
        }
        assert_eq!((watched.registered.buffers(), watched.registered.windows()), (3, 0));
        let last = actions(&watched, &[PoolId::DEFAULT]);
        assert!(last.removes_registrations());
        watched.execute(&last);
        assert!(watched.registered.is_empty());
    }

    #[test]
    fn the_order_of_the_changes_is_in_the_digest() {
        let watched = Watched::new(fixed());
        watched.take(30 * MIB);
        let one = watched.actions();
        watched.take(30 * MIB);
        let two = watched.actions();
        assert_ne!(one.digest(), two.digest());
        let swapped = SyncActions { windows: vec![two.windows[1], two.windows[0]], ..SyncActions::default() };
        assert_ne!(two.digest(), swapped.digest(), "the order matters");
        assert_eq!(
            one.windows[0].change.to_string(),
            "register segment 0 of symmetric pool 0, stream 0 (31457280 bytes)"
        );
    }
}
