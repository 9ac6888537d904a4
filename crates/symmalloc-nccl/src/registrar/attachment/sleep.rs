//! One communicator's part in a pool's sleep: deregisters its windows and restores them, in the same order on all ranks.

use crate::communicator::CommState;
use crate::communicator::registration::Registered;
use crate::registrar::attachment::{Attachment, SavedBuffers, SavedRegistrations, SavedWindow, SyncState, digest};
use crate::sync::actions::{ChangeKind, SyncAction, WindowChange};
use crate::sync::error::SyncError;
use crate::sync::settings::{Registration, Synced};
use crate::windows::keys::SegmentKey;
use crate::windows::segment::{HeapSegment, SymmetricSegment};
use crate::windows::symmetric_space::SymmetricSpace;
use std::collections::BTreeSet;
use symmalloc_core::PoolId;
use symmalloc_core::segment_log::SegmentEventKind;
use symmalloc_cuda::CudaAllocator;

/// Windows that were restored for a pool.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    pub(crate) registrations: u64,
    /// Windows whose handle differs from the one before the sleep.
    pub(crate) changed: Vec<SymmetricSegment>,
}

impl Attachment {
    pub(crate) fn is_ready(&self, state: &SyncState) -> bool {
        !state.is_dropped && self.comm.state() == CommState::Ready
    }

    /// Returns `true` if the communicator ended with windows of the pool and an NCCL call on it still runs.
    pub(crate) fn holds(&self, state: &SyncState, pool: PoolId) -> bool {
        self.comm.state() == CommState::Lost && (state.kept.contains(&pool) || state.has_registered(pool))
    }

    /// Returns the number of this sleep or wake: equal on all ranks of the communicator.
    pub(crate) fn next_sleep(&self, state: &mut SyncState) -> u64 {
        state.sleeps += 1;
        state.sleeps
    }

    /// Returns a digest of the windows that the pool has once it is awake, for comparison across ranks.
    pub(crate) fn windows_digest(&self, state: &SyncState, allocator: &CudaAllocator, pool: PoolId) -> u64 {
        match state.saved.get(&pool) {
            Some(saved) => digest(&saved.windows),
            None => digest(&state.restorable_windows(allocator, pool)),
        }
    }

    /// Deregisters and records all registrations of the pool. Returns the number of deregistrations.
    pub(crate) fn save_and_deregister(
        &self,
        state: &mut SyncState,
        allocator: &CudaAllocator,
        pool: PoolId,
    ) -> Result<u64, SyncError> {
        if state.saved.contains_key(&pool) {
            return Ok(0);
        }
        let mut saved = SavedRegistrations { windows: state.restorable_windows(allocator, pool), buffers: Vec::new() };
        let mut synced = Synced::default();
        // This includes dead segments with windows, which are not restored.
        for segment in state.order.iter().filter(|segment| segment.heap.pool == pool).copied().collect::<Vec<_>>() {
            let Some(registered) = state.windows.get(&segment) else { continue };
            let action = action_of(state.pools.ordinal(pool), segment, registered);
            if let Some(space) = &mut state.space {
                space.free(segment);
            }
            self.deregister(state, &action, &mut synced).map_err(|error| self.failed(error))?;
        }
        let segments: Vec<HeapSegment> =
            state.buffers.keys().filter(|segment| segment.heap.pool == pool).copied().collect();
        for segment in segments {
            let registrations = state.buffers.remove(&segment).unwrap_or_default();
            let pieces: Vec<(u64, u64)> =
                registrations.iter().map(|piece| (piece.base(), piece.size_bytes())).collect();
            let entry = pieces.first().and_then(|(base, _)| self.view().windows.find(*base, 0).copied());
            for registration in registrations {
                self.view_mut().windows.remove(registration.base());
                self.comm.deregister_buffer(registration).map_err(|error| self.failed(error))?;
                synced.deregistrations += 1;
            }
            saved.buffers.push(SavedBuffers { segment, pieces, entry });
        }
        state.saved.insert(pool, saved);
        self.publish_view(state);
        Ok(synced.deregistrations)
    }

    /// Checks that the pool's windows fit into the symmetric space. Returns the size in bytes of the first one that does not fit.
    pub(crate) fn room_for(&self, state: &SyncState, pool: PoolId) -> Result<(), u64> {
        let (Some(space), Some(saved)) = (&state.space, state.saved.get(&pool)) else { return Ok(()) };
        let mut space: SymmetricSpace = space.clone();
        let actions = saved.windows.iter().map(|window| window.action);
        actions.into_iter().try_for_each(|SyncAction { change, segment, .. }| {
            if space.allocate(segment, change.size_bytes) { Ok(()) } else { Err(change.size_bytes) }
        })
    }

    /// Restores the recorded registrations together with the other ranks, in their original order.
    pub(crate) fn restore(&self, state: &mut SyncState, pool: PoolId) -> Result<Restored, SyncError> {
        let SavedRegistrations { windows, buffers } = state.saved.remove(&pool).unwrap_or_default();
        let (mut back, mut synced) = (Restored::default(), Synced::default());
        for SavedWindow { action, handle } in windows {
            let has_room =
                state.space.as_mut().is_none_or(|space| space.allocate(action.segment, action.change.size_bytes));
            debug_assert!(has_room, "checked before the decision");
            self.register(state, &action, &mut synced).map_err(|error| self.failed(error))?;
            if state.windows.get(&action.segment).and_then(handle_of) != handle {
                back.changed.push(action.change.segment);
            }
        }
        for SavedBuffers { segment, pieces, entry } in buffers {
            for (base, size_bytes) in pieces {
                let registration = self.comm.register_buffer(base, size_bytes).map_err(|error| self.failed(error))?;
                state.buffers.entry(segment).or_default().push(registration);
                synced.registrations += 1;
            }
            if let Some(entry) = entry {
                self.view_mut().windows.insert(entry);
            }
        }
        back.registrations = synced.registrations;
        self.publish_view(state);
        Ok(back)
    }

    /// Invalidates the keys of these segments.
    pub(crate) fn invalidate(&self, state: &SyncState, segments: &BTreeSet<SymmetricSegment>) {
        let named = |segment: &HeapSegment| SymmetricSegment::of(state.pools.ordinal(segment.heap.pool), *segment);
        let keys: Vec<SegmentKey> = state
            .order
            .iter()
            .filter(|segment| segments.contains(&named(segment)))
            .filter_map(|segment| {
                let registered = state.windows.get(segment)?;
                let (base, size_bytes) = (registered.base(), registered.size_bytes());
                Some(SegmentKey { base, size_bytes, segment: *segment })
            })
            .collect();
        self.view_mut().invalidations.extend(keys);
    }
}

impl SyncState {
    /// Returns `true` if any memory of the pool is registered.
    fn has_registered(&self, pool: PoolId) -> bool {
        self.windows.keys().chain(self.buffers.keys()).any(|segment| segment.heap.pool == pool)
    }

    /// Returns the number of NCCL's registrations of the pool.
    pub(crate) fn registrations_of(&self, pool: PoolId) -> usize {
        let windows = self.windows.iter().filter(|(segment, _)| segment.heap.pool == pool);
        let windows = windows.filter(|(_, registered)| registered.has_handle()).count();
        let buffers = self.buffers.iter().filter(|(segment, _)| segment.heap.pool == pool);
        windows + buffers.flat_map(|(_, pieces)| pieces).filter(|piece| piece.has_handle()).count()
    }

    /// Returns the windows of the pool's live segments, in registration order.
    fn restorable_windows(&self, allocator: &CudaAllocator, pool: PoolId) -> Vec<SavedWindow> {
        let snapshots = self.pools.read(allocator);
        let dead: BTreeSet<HeapSegment> = self
            .pools
            .changes(&snapshots, Registration::Windows)
            .events
            .iter()
            .filter(|event| event.kind == SegmentEventKind::Death)
            .map(HeapSegment::of)
            .collect();
        let ordinal = self.pools.ordinal(pool);
        let live = self.order.iter().filter(|segment| segment.heap.pool == pool && !dead.contains(segment));
        live.filter_map(|segment| {
            let registered = self.windows.get(segment)?;
            Some(SavedWindow { action: action_of(ordinal, *segment, registered), handle: handle_of(registered) })
        })
        .collect()
    }
}

fn action_of(ordinal: u32, segment: HeapSegment, registered: &Registered) -> SyncAction {
    let name = SymmetricSegment::of(ordinal, segment);
    let change = WindowChange { kind: ChangeKind::Register, segment: name, size_bytes: registered.size_bytes() };
    SyncAction { change, segment, base: registered.base() }
}

fn handle_of(registered: &Registered) -> Option<crate::ffi::handles::WindowHandle> {
    match registered {
        Registered::Window(window) => Some(window.handle()),
        Registered::Plain(_) => None,
    }
}
