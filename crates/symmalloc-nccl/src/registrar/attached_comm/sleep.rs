//! One communicator's part in a pool's sleep: deregisters its windows and restores them, in the same order on all ranks.

use crate::communicator::CommState;
use crate::registrar::attached_comm::{AttachedComm, SavedBuffers, SavedRegistrations, SavedWindow, SyncState, digest};
use crate::sync::actions::{ChangeKind, SyncAction, WindowChange};
use crate::sync::error::SyncError;
use crate::sync::settings::{Registration, Synced};
use crate::windows::keys::SegmentKey;
use crate::windows::registrations::{Entry, WindowEntry};
use crate::windows::segment::SymmetricSegment;
use crate::windows::symmetric_space::SymmetricSpace;
use std::collections::BTreeSet;
use symmalloc_agreement::Mode;
use symmalloc_core::PoolId;
use symmalloc_cuda::CudaAllocator;

/// Windows that were restored for a pool.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    pub(crate) registrations: u64,
    /// Windows whose handle differs from their handle before the sleep.
    pub(crate) changed: Vec<SymmetricSegment>,
}

impl AttachedComm {
    pub(crate) fn is_ready(&self, state: &SyncState) -> bool {
        state.ended.is_none() && self.comm.state() == CommState::Ready
    }

    /// Returns `true` if the ranks compare the pool's history before they put it to sleep or wake it.
    pub(crate) fn compares(&self, state: &SyncState, pool: PoolId) -> bool {
        state.pools.agreement_of(pool) != Mode::Off
    }

    /// Returns `true` if the communicator ended while it had windows of the pool, and an NCCL call on it still runs.
    pub(crate) fn holds(&self, state: &SyncState, pool: PoolId) -> bool {
        self.comm.state() == CommState::Lost
            && (state.ended.as_ref().is_some_and(|ended| ended.pools.contains(&pool))
                || self.view().registered.pools().contains(&pool))
    }

    /// Counts a sleep or wake and returns its number, which is equal on all ranks of the communicator.
    pub(crate) fn next_sleep(&self, state: &mut SyncState) -> u64 {
        state.exchanges.sleeps += 1;
        state.exchanges.sleeps
    }

    /// Returns a digest of the windows that the pool has once it is awake, for comparison across ranks.
    pub(crate) fn windows_digest(&self, state: &SyncState, allocator: &CudaAllocator, pool: PoolId) -> u64 {
        match state.saved.get(&pool) {
            Some(saved) => digest(&saved.windows),
            None => digest(&self.restorable_windows(state, allocator, pool)),
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
        let windows = self.restorable_windows(state, allocator, pool);
        let (buffers, mut synced) = (self.view().registered.buffers_of(pool), Synced::default());
        // This includes dead segments with windows, which are not restored.
        for SavedWindow { action, .. } in self.windows_of(pool) {
            if let Some(space) = &mut state.space {
                space.free(action.segment);
            }
            self.deregister(&action, &mut synced).map_err(|error| self.failed(error))?;
        }
        for (key, _) in &buffers {
            self.deregister_pieces(*key, &mut synced)?;
        }
        let buffers = buffers.into_iter().map(|(key, pieces)| SavedBuffers { key, pieces }).collect();
        state.saved.insert(pool, SavedRegistrations { windows, buffers });
        self.publish_view(state);
        self.check(state);
        Ok(synced.deregistrations)
    }

    /// Checks that the pool's windows fit into the symmetric space. Otherwise, returns the size in bytes of the first window that does not
    /// fit.
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
            let restored = self.view().registered.get(action.segment, action.base).and_then(Entry::handle);
            if restored != handle {
                back.changed.push(action.change.segment);
            }
        }
        for SavedBuffers { key, pieces } in buffers {
            for piece in pieces {
                self.register_piece(key, piece, &mut synced)?;
            }
        }
        back.registrations = synced.registrations;
        self.publish_view(state);
        self.check(state);
        Ok(back)
    }

    /// Invalidates the keys of these segments.
    pub(crate) fn invalidate(&self, segments: &BTreeSet<SymmetricSegment>) {
        let mut view = self.view_mut();
        let windows = view.registered.in_order().into_iter();
        let keys: Vec<SegmentKey> =
            windows.filter(|(_, window)| segments.contains(&window.name)).map(|(key, _)| *key).collect();
        view.invalidations.extend(keys);
    }

    /// Returns the number of NCCL registrations of the pool's memory.
    pub(crate) fn registrations_of(&self, pool: PoolId) -> usize {
        self.view().registered.handles_of(pool)
    }

    /// Returns the windows of the pool, in registration order.
    fn windows_of(&self, pool: PoolId) -> Vec<SavedWindow> {
        let view = self.view();
        let windows = view.registered.in_order().into_iter().filter(|(key, _)| key.segment.heap.pool == pool);
        let saved = |(key, window): (&SegmentKey, &WindowEntry)| SavedWindow {
            action: SyncAction {
                change: WindowChange { kind: ChangeKind::Register, segment: window.name, size_bytes: key.size_bytes },
                segment: key.segment,
                base: key.base,
            },
            handle: window.handle(),
        };
        windows.map(saved).collect()
    }

    /// Returns the windows of the pool's live segments, in registration order.
    fn restorable_windows(&self, state: &SyncState, allocator: &CudaAllocator, pool: PoolId) -> Vec<SavedWindow> {
        let mut segments = state.segments.clone();
        state.pools.events(&state.pools.read(allocator), Registration::Windows).apply_to(&mut segments);
        let mut windows = self.windows_of(pool);
        windows.retain(|window| segments.get(window.action.segment).is_some());
        windows
    }
}
