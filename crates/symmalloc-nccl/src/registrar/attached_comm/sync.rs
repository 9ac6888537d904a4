//! One sync of a communicator: reads the changes to the segments, agrees on the actions with the other ranks, executes them, and
//! acknowledges the changes, which releases the memory of dead segments.

use super::{AttachedComm, SyncState};
use crate::communicator::Stage;
use crate::communicator::error::CommError;
use crate::communicator::registration::Registered;
use crate::registrar::stats::Counters;
use crate::sync::actions::{BufferActions, ChangeKind, SyncAction, SyncActions};
use crate::sync::agreement::agree_on_sync;
use crate::sync::error::SyncError;
use crate::sync::message::{SyncContext, SyncMessage};
use crate::sync::settings::{Registration, Settings, Synced};
use crate::windows::keys::SegmentKey;
use crate::windows::segment::SymmetricSegment;
use crate::windows::symmetric_space::SymmetricSpace;
use crate::windows::table::Piece;
use std::time::Instant;
use symmalloc_agreement::RankHistory;
use symmalloc_core::Backend;
use symmalloc_cuda::CudaAllocator;

/// The inputs that a registrar passes to a sync.
pub(crate) struct SyncJob<'a> {
    pub(crate) allocator: &'a CudaAllocator,
    pub(crate) settings: &'a Settings,
    pub(crate) counters: &'a Counters,
}

impl AttachedComm {
    /// Registers new segments and deregisters dead ones, in the same order as all other ranks. Compares histories if `history` is given.
    pub(crate) fn sync(&self, job: &SyncJob<'_>, history: Option<&RankHistory<'_>>) -> Result<Synced, SyncError> {
        let name = self.comm.name();
        let _entered = tracing::debug_span!(target: "symmalloc", "communicator.sync", communicator = name).entered();
        let mut state = self.lock();
        if !self.is_ready(&state) {
            self.drop_everything(&mut state, job.allocator);
            return Err(self.gone());
        }
        let outcome = self.sync_ready(&mut state, job, history);
        self.publish_view(&state);
        if let Err(error) = &outcome
            && error.is_fatal()
        {
            tracing::error!(name: "sync.failed", target: "symmalloc", communicator = self.comm.name(), %error);
            job.counters.failures.add(1);
            self.end(&mut state, job.allocator);
        }
        outcome
    }

    fn sync_ready(
        &self,
        state: &mut SyncState,
        job: &SyncJob<'_>,
        history: Option<&RankHistory<'_>>,
    ) -> Result<Synced, SyncError> {
        let snapshots = state.pools.read(job.allocator);
        let actions = SyncActions::new(
            &state.segments,
            &self.view().registered,
            &state.pools.events(&snapshots, Registration::Windows),
            &state.pools.events(&snapshots, Registration::Buffers),
            |pool| state.pools.ordinal(pool),
        );
        let mut synced = Synced::default();
        let communicates = history.is_some() || !actions.windows.is_empty();
        if communicates || !actions.buffers.is_empty() {
            self.check_active()?;
        }
        if communicates {
            synced.rounds = self.agree(state, job, history, &actions)?;
        }
        if actions.removes_registrations() {
            self.quiesce(job.allocator)?;
        }
        for action in &actions.windows {
            self.execute(state, action, &mut synced)?;
        }
        self.update_buffers(&actions.buffers, &mut synced)?;
        state.segments = actions.segments.unwrap_or_else(|| std::mem::take(&mut state.segments));
        self.view_mut().invalidations.extend(actions.invalidated);
        state.pools.acknowledge(job.allocator, snapshots, &mut synced);
        let SyncState { saved, pools, .. } = &mut *state;
        saved.retain(|pool, _| pools.registration_of(*pool).is_some());
        self.check(state);
        debug_assert_eq!(state.uncovered(&self.view().registered), None, "S2 of communicator \"{}\"", self.comm.name());
        job.counters.registrations.add(synced.registrations);
        job.counters.deregistrations.add(synced.deregistrations);
        job.counters.rounds.add(synced.rounds);
        if synced.registrations + synced.deregistrations + synced.released_bytes > 0 {
            tracing::debug!(
                name: "sync.done",
                target: "symmalloc",
                communicator = self.comm.name(),
                registrations = synced.registrations,
                deregistrations = synced.deregistrations,
                released_bytes = synced.released_bytes,
                rounds = synced.rounds,
            );
        }
        Ok(synced)
    }

    /// Agrees on the actions with the other ranks and checks that NCCL has space for the windows. Returns the number of collectives used.
    fn agree(
        &self,
        state: &mut SyncState,
        job: &SyncJob<'_>,
        history: Option<&RankHistory<'_>>,
        actions: &SyncActions,
    ) -> Result<u64, SyncError> {
        let library = self.comm.nccl().version();
        let (windows, window_bytes) = {
            let view = self.view();
            (view.registered.windows(), view.registered.window_bytes())
        };
        let context = SyncContext {
            mode: state.pools.mode_word(),
            compared: history.is_some(),
            offset_checks: job.settings.check_offsets,
            library: u64::from(library.major) * 10_000 + u64::from(library.minor) * 100 + u64::from(library.patch),
            sync_number: state.exchanges.syncs,
            attached: state.pools.digest(),
            windows,
            window_bytes,
            space_bytes: job.settings.space_bytes,
        };
        let message = SyncMessage::new(actions, &context);
        let agreed = agree_on_sync(self.transport(state)?, self.comm.name(), history, actions, &message)?;
        state.exchanges.syncs += 1;
        if !actions.windows.is_empty() {
            let granularity_bytes = job.allocator.core().backend().granularity_bytes();
            let space = state.space.clone();
            let space =
                space.unwrap_or_else(|| SymmetricSpace::new(agreed.space_bytes, granularity_bytes, self.comm.ranks()));
            state.space = Some(self.plan_space(space, actions)?);
        }
        Ok(agreed.rounds)
    }

    /// Returns the address space as it will be after the actions, or an error if a window does not fit.
    fn plan_space(&self, mut space: SymmetricSpace, actions: &SyncActions) -> Result<SymmetricSpace, SyncError> {
        for action in &actions.windows {
            if action.change.kind != ChangeKind::Register {
                space.free(action.segment);
            }
            if action.change.kind != ChangeKind::Deregister && !space.allocate(action.segment, action.change.size_bytes)
            {
                return Err(SyncError::SymmetricSpace {
                    communicator: self.name(),
                    needed_bytes: action.change.size_bytes,
                    used_bytes: space.used_bytes(),
                    budget_bytes: space.limit_bytes(),
                });
            }
        }
        Ok(space)
    }

    /// Waits until all work that may use the memory to be deregistered has completed.
    pub(super) fn quiesce(&self, allocator: &CudaAllocator) -> Result<(), SyncError> {
        let waited = self.comm.deadline();
        let done = allocator.synchronize_all(Instant::now() + waited);
        if done.map_err(|error| SyncError::Cuda { communicator: self.name(), error })? {
            return Ok(());
        }
        Err(self.failed(self.comm.end_overdue(Stage::Run, waited)))
    }

    fn execute(&self, state: &mut SyncState, action: &SyncAction, synced: &mut Synced) -> Result<(), SyncError> {
        if action.change.kind != ChangeKind::Register {
            self.deregister(action, synced).map_err(|error| self.failed(error))?;
        }
        if action.change.kind != ChangeKind::Deregister {
            self.register(state, action, synced).map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    pub(super) fn register(
        &self,
        state: &mut SyncState,
        action: &SyncAction,
        synced: &mut Synced,
    ) -> Result<(), CommError> {
        let flags = state.pools.flags(action.segment.heap.pool);
        let registered = self.comm.register_window_with(action.base, action.change.size_bytes, flags)?;
        let key = SegmentKey { base: action.base, size_bytes: action.change.size_bytes, segment: action.segment };
        self.view_mut().registered.insert_window(key, action.change.segment, registered);
        synced.registrations += 1;
        trace_step(self.comm.name(), action, true);
        Ok(())
    }

    pub(super) fn deregister(&self, action: &SyncAction, synced: &mut Synced) -> Result<(), CommError> {
        // From here on, lookups no longer find the window. The view is not locked during the call to NCCL.
        let removed = self.view_mut().registered.remove_window(action.segment, action.base);
        let Some(registered) = removed else { return Ok(()) };
        self.deregister_any(registered)?;
        synced.deregistrations += 1;
        trace_step(self.comm.name(), action, false);
        Ok(())
    }

    pub(super) fn deregister_any(&self, registered: Registered) -> Result<(), CommError> {
        match registered {
            Registered::Window(window) => self.comm.deregister_window(window),
            Registered::Plain(registration) => self.comm.deregister_buffer(registration),
        }
    }

    /// Registers and deregisters the pieces of pools that are attached for buffers. Does not involve other ranks.
    fn update_buffers(&self, actions: &BufferActions, synced: &mut Synced) -> Result<(), SyncError> {
        for (key, piece) in &actions.register {
            self.register_piece(*key, *piece, synced)?;
        }
        for key in &actions.deregister {
            self.deregister_pieces(*key, synced)?;
        }
        Ok(())
    }

    pub(super) fn register_piece(&self, key: SegmentKey, piece: Piece, synced: &mut Synced) -> Result<(), SyncError> {
        let buffer = self.comm.register_buffer(piece.base, piece.size_bytes).map_err(|error| self.failed(error))?;
        self.view_mut().registered.insert_buffer(key, buffer);
        synced.registrations += 1;
        Ok(())
    }

    pub(super) fn deregister_pieces(&self, key: SegmentKey, synced: &mut Synced) -> Result<(), SyncError> {
        let pieces = self.view_mut().registered.remove_buffers(key.segment, key.base);
        for piece in pieces {
            self.comm.deregister_buffer(piece).map_err(|error| self.failed(error))?;
            synced.deregistrations += 1;
        }
        Ok(())
    }
}

/// Emits a `tracing` event. The names and fields of the events are stable.
fn trace_step(communicator: &str, action: &SyncAction, is_registered: bool) {
    let SymmetricSegment { pool, group, id } = action.change.segment;
    macro_rules! window {
        ($name:literal) => {
            tracing::debug!(
                name: $name,
                target: "symmalloc",
                communicator,
                symmetric_pool = pool,
                stream = group.first().map(|stream| stream.0),
                segment = id.0,
                size_bytes = action.change.size_bytes,
            )
        };
    }
    if is_registered { window!("window.registered") } else { window!("window.deregistered") }
}
