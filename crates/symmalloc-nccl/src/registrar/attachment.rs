//! The registrar's state for one communicator: the observed pools, and their registrations.
//!
//! ```text
//!  Attachment ── Communicator
//!    ├── State, behind the sync lock: one sync at a time per communicator
//!    │     ├── pools         one observer each: its cursor in the segment log, which also retains dead memory
//!    │     ├── segments      the live segments as of the last sync
//!    │     ├── windows, buffers          NCCL registrations to be released
//!    │     └── space         NCCL's symmetric address space
//!    └── View, behind a separate lock: the state that lookups read during a sync
//! ```
//!
//! The memory of a dead segment is released after its last observer acknowledges the death. An attachment does so only after it has
//! deregistered its windows, so a segment outlives its windows on every communicator, in any order of events.

mod sleep;

use crate::communicator::error::CommError;
use crate::communicator::registration::{BufferRegistration, Registered};
use crate::communicator::{CommState, Communicator, Stage};
use crate::registrar::settings::{Registration, Settings, Synced};
use crate::registrar::stats::{CommunicatorStats, Counters};
use crate::sleep::saved_registrations::SavedRegistrations;
use crate::sync::actions::{ChangeKind, SegmentName, SegmentTable, SyncAction, SyncActions, dead_keys, generation};
use crate::sync::agreement::agree_on_sync;
use crate::sync::changes::{ObservedPools, SegmentChanges};
use crate::sync::error::{AttachError, SyncError};
use crate::sync::message::{SyncContext, SyncMessage};
use crate::transport::NcclTransport;
use crate::windows::invalidation::Invalidations;
use crate::windows::segment_key::{Generation, SegmentKey};
use crate::windows::symmetric_space::SymmetricSpace;
use crate::windows::window::{Entry, RegisteredAs, WindowMap};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::Instant;
use symmalloc_agreement::RankHistory;
use symmalloc_core::segment_log::SegmentEventKind;
use symmalloc_core::{Backend, ObserverId, PoolId};
use symmalloc_cuda::CudaAllocator;

pub(crate) struct Attachment {
    pub(crate) comm: Communicator,
    state: Mutex<SyncState>,
    view: RwLock<View>,
}

/// The state that a sync modifies.
#[derive(Default)]
pub(crate) struct SyncState {
    pools: ObservedPools,
    segments: SegmentTable,
    /// Registrations of pools that are attached for windows.
    windows: BTreeMap<Generation, Registered>,
    window_bytes: u64,
    /// Segments with windows, in registration order.
    order: Vec<Generation>,
    /// Sleeping pools, with the registrations to restore on wake.
    saved: BTreeMap<PoolId, SavedRegistrations>,
    /// Number of sleeps and wakes that the ranks agreed on over this communicator: equal on all ranks.
    sleeps: u64,
    /// Registrations of pools that are attached for buffers, one per piece of memory.
    buffers: BTreeMap<Generation, SmallVec<[BufferRegistration; 1]>>,
    /// `None` until the first window is registered.
    space: Option<SymmetricSpace>,
    transport: Option<NcclTransport>,
    /// Number of sync collectives so far: equal on all ranks.
    rounds: u64,
    /// `true` if the communicator has ended and its registrations are gone.
    is_dropped: bool,
    /// Pools that had registrations when the communicator ended.
    kept: Vec<PoolId>,
    /// Observers that are kept because an NCCL call on the communicator may still run.
    held: Vec<ObserverId>,
}

/// The state that can be read at any time, even during a sync.
#[derive(Default)]
pub(crate) struct View {
    /// Pools that are attached for windows, whose histories must be equal.
    pub(crate) window_pools: SmallVec<[PoolId; 4]>,
    /// Pools that are attached for windows or buffers, or were when the communicator ended.
    pub(crate) pools: SmallVec<[PoolId; 4]>,
    pub(crate) windows: WindowMap,
    pub(crate) invalidations: Invalidations,
    pub(crate) space_used_bytes: u64,
    pub(crate) space_limit_bytes: u64,
    pub(crate) window_count: u64,
    pub(crate) window_bytes: u64,
    pub(crate) buffer_count: u64,
}

impl View {
    pub(crate) fn stats(&self) -> CommunicatorStats {
        CommunicatorStats {
            windows: self.window_count,
            window_bytes: self.window_bytes,
            buffers: self.buffer_count,
            space_used_bytes: self.space_used_bytes,
            space_budget_bytes: self.space_limit_bytes,
        }
    }
}

/// The inputs that a registrar passes to a sync.
pub(crate) struct SyncJob<'a> {
    pub(crate) allocator: &'a CudaAllocator,
    pub(crate) settings: &'a Settings,
    pub(crate) counters: &'a Counters,
}

impl Attachment {
    pub(crate) fn new(comm: &Communicator) -> Self {
        Attachment { comm: comm.clone(), state: Mutex::default(), view: RwLock::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, SyncState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn view(&self) -> RwLockReadGuard<'_, View> {
        self.view.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn view_mut(&self) -> RwLockWriteGuard<'_, View> {
        self.view.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> String {
        self.comm.name().to_owned()
    }

    fn failed(&self, error: CommError) -> SyncError {
        SyncError::Communicator { communicator: self.name(), error }
    }

    pub(crate) fn gone(&self) -> SyncError {
        SyncError::Gone { communicator: self.name(), state: self.comm.state(), cause: self.comm.end_cause() }
    }

    /// Returns `true` if there is nothing to do: no log has grown, no pool is being detached, and the communicator is ready.
    #[inline]
    pub(crate) fn is_current(&self, allocator: &CudaAllocator) -> bool {
        let state = self.lock();
        !state.is_dropped && self.comm.state() == CommState::Ready && state.pools.is_read(allocator)
    }

    /// Registers new segments and deregisters dead ones, in the same order as all other ranks. Compares histories if `history` is given.
    pub(crate) fn sync(&self, job: &SyncJob<'_>, history: Option<&RankHistory<'_>>) -> Result<Synced, SyncError> {
        let name = self.comm.name();
        let _entered = tracing::debug_span!(target: "symmalloc", "communicator.sync", communicator = name).entered();
        let mut state = self.lock();
        if state.is_dropped || self.comm.state() != CommState::Ready {
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
        let (windows, buffers) = (
            state.pools.changes(&snapshots, Registration::Windows),
            state.pools.changes(&snapshots, Registration::Buffers),
        );
        let actions =
            SyncActions::new(&state.segments, &windows.events, &windows.leaving, |pool| state.pools.ordinal(pool));
        let mut synced = Synced::default();
        if history.is_some() || !actions.actions.is_empty() {
            synced.rounds = self.agree(state, job, history, &actions)?;
        }
        let dead: Vec<SegmentKey> = [&windows, &buffers]
            .into_iter()
            .flat_map(|changes| dead_keys(&state.segments, &changes.events, &changes.leaving))
            .collect();
        if !actions.actions.is_empty() || !buffers.is_empty() {
            if actions.takes_away() || buffers.takes_away() {
                self.quiesce(job.allocator)?;
            }
            for action in &actions.actions {
                self.carry_out(state, action, &mut synced)?;
            }
            self.follow(state, &buffers, &mut synced)?;
        }
        actions.write_to(&mut state.segments);
        SyncActions::new(&state.segments, &buffers.events, &buffers.leaving, |_| 0).write_to(&mut state.segments);
        self.view_mut().invalidations.extend(dead);
        state.pools.acknowledge(job.allocator, snapshots, &mut synced);
        let SyncState { saved, pools, .. } = &mut *state;
        saved.retain(|pool, _| pools.registration_of(*pool).is_some());
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

    /// Agrees on the actions with the other ranks and checks that NCCL has space for it. Returns the number of collectives used.
    fn agree(
        &self,
        state: &mut SyncState,
        job: &SyncJob<'_>,
        history: Option<&RankHistory<'_>>,
        actions: &SyncActions,
    ) -> Result<u64, SyncError> {
        let library = self.comm.nccl().version();
        let context = SyncContext {
            mode: job.settings.mode_word(),
            offset_checks: job.settings.check_offsets,
            library: u64::from(library.major) * 10_000 + u64::from(library.minor) * 100 + u64::from(library.patch),
            sync_number: state.rounds,
            attached: state.pools.digest(),
            windows: state.windows.len() as u64,
            window_bytes: state.window_bytes,
            space_bytes: job.settings.space_bytes,
        };
        let message = SyncMessage::new(actions, &context);
        let transport = match state.transport.take() {
            Some(transport) => transport,
            None => NcclTransport::new(&self.comm).map_err(|error| self.failed(error))?,
        };
        let agreed = agree_on_sync(state.transport.insert(transport), self.comm.name(), history, actions, &message)?;
        state.rounds += 1;
        if !actions.actions.is_empty() {
            let granularity_bytes = job.allocator.core().backend().granularity_bytes();
            let space = state.space.clone();
            let space =
                space.unwrap_or_else(|| SymmetricSpace::new(agreed.space_bytes, granularity_bytes, self.comm.ranks()));
            state.space = Some(self.place(space, actions)?);
        }
        Ok(agreed.rounds)
    }

    /// Returns the address space as it will be after the actions, or an error if a window does not fit.
    fn place(&self, mut space: SymmetricSpace, actions: &SyncActions) -> Result<SymmetricSpace, SyncError> {
        for action in &actions.actions {
            if action.change.kind != ChangeKind::Register {
                space.give_back(action.segment);
            }
            if action.change.kind != ChangeKind::Deregister && !space.take(action.segment, action.change.size_bytes) {
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
    fn quiesce(&self, allocator: &CudaAllocator) -> Result<(), SyncError> {
        let waited = self.comm.deadline();
        let done = allocator.synchronize_all(Instant::now() + waited);
        if done.map_err(|error| SyncError::Cuda { communicator: self.name(), error })? {
            return Ok(());
        }
        Err(self.failed(self.comm.give_up(Stage::Run, waited)))
    }

    fn carry_out(&self, state: &mut SyncState, action: &SyncAction, synced: &mut Synced) -> Result<(), SyncError> {
        if action.change.kind != ChangeKind::Register {
            self.deregister(state, action, synced).map_err(|error| self.failed(error))?;
        }
        if action.change.kind != ChangeKind::Deregister {
            self.register(state, action, synced).map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    fn register(&self, state: &mut SyncState, action: &SyncAction, synced: &mut Synced) -> Result<(), CommError> {
        let registered = self.comm.register_window(action.base, action.change.size_bytes)?;
        let kind = match &registered {
            Registered::Window(window) => RegisteredAs::Window(window.handle()),
            Registered::Plain(_) => RegisteredAs::Plain,
        };
        let key = SegmentKey { base: action.base, size_bytes: action.change.size_bytes, generation: action.segment };
        self.view_mut().windows.insert(Entry { segment: key, name: Some(action.change.segment), kind });
        state.windows.insert(action.segment, registered);
        state.order.push(action.segment);
        state.window_bytes += action.change.size_bytes;
        synced.registrations += 1;
        trace_step(self.comm.name(), action, true);
        Ok(())
    }

    fn deregister(&self, state: &mut SyncState, action: &SyncAction, synced: &mut Synced) -> Result<(), CommError> {
        let Some(registered) = state.windows.remove(&action.segment) else { return Ok(()) };
        state.order.retain(|segment| *segment != action.segment);
        self.view_mut().windows.remove(action.base);
        state.window_bytes -= registered.size_bytes();
        self.give_back(registered)?;
        synced.deregistrations += 1;
        trace_step(self.comm.name(), action, false);
        Ok(())
    }

    fn give_back(&self, registered: Registered) -> Result<(), CommError> {
        match registered {
            Registered::Window(window) => self.comm.deregister_window(window),
            Registered::Plain(registration) => self.comm.deregister_buffer(registration),
        }
    }

    /// Registers and deregisters the pieces of pools that are attached for buffers. Local to this rank.
    fn follow(&self, state: &mut SyncState, changes: &SegmentChanges, synced: &mut Synced) -> Result<(), SyncError> {
        let mut gone: Vec<Generation> = Vec::new();
        for event in &changes.events {
            let segment = generation(event);
            match event.kind {
                SegmentEventKind::Birth | SegmentEventKind::Growth if !changes.leaving.contains(&event.pool) => {
                    if changes.dies(segment) {
                        continue;
                    }
                    let base = event.base.0 + event.offset_bytes;
                    let registration =
                        self.comm.register_buffer(base, event.size_bytes).map_err(|error| self.failed(error))?;
                    state.buffers.entry(segment).or_default().push(registration);
                    synced.registrations += 1;
                    let mut view = self.view_mut();
                    let known = view.windows.find(event.base.0, 0).map_or(0, |entry| entry.segment.size_bytes);
                    let size_bytes = known.max(event.offset_bytes + event.size_bytes);
                    let key = SegmentKey { base: event.base.0, size_bytes, generation: segment };
                    view.windows.insert(Entry { segment: key, name: None, kind: RegisteredAs::Plain });
                }
                SegmentEventKind::Death => gone.push(segment),
                _ => {}
            }
        }
        gone.extend(state.buffers.keys().filter(|segment| changes.leaving.contains(&segment.pool)));
        for segment in gone {
            let Some(registrations) = state.buffers.remove(&segment) else { continue };
            for registration in registrations {
                let base = registration.base();
                self.view_mut().windows.remove(base);
                self.comm.deregister_buffer(registration).map_err(|error| self.failed(error))?;
                synced.deregistrations += 1;
            }
        }
        Ok(())
    }

    /// Starts to observe these pools. After an error, none of them is observed.
    pub(crate) fn observe(
        &self,
        allocator: &CudaAllocator,
        pools: &[PoolId],
        registration: Registration,
    ) -> Result<(), AttachError> {
        let mut state = self.lock();
        state.pools.observe(allocator, self.comm.name(), pools, registration)?;
        self.publish_view(&state);
        Ok(())
    }

    /// Returns the kind of registration for which a pool is observed, or `None` if it is not observed.
    pub(crate) fn registration_of(&self, pool: PoolId) -> Option<Registration> {
        self.lock().pools.registration_of(pool)
    }

    /// Marks a pool for detachment at the next sync. Returns `true` if it was observed.
    pub(crate) fn leave(&self, pool: PoolId) -> bool {
        self.lock().pools.leave(pool)
    }

    /// Runs an exchange of messages over the communicator, between two syncs.
    pub(crate) fn with_transport<T>(
        &self,
        allocator: &CudaAllocator,
        exchange: impl FnOnce(&NcclTransport) -> Result<T, SyncError>,
    ) -> Result<T, SyncError> {
        let mut state = self.lock();
        if state.is_dropped || self.comm.state() != CommState::Ready {
            return Err(self.gone());
        }
        let transport = match state.transport.take() {
            Some(transport) => transport,
            None => NcclTransport::new(&self.comm).map_err(|error| self.failed(error))?,
        };
        let outcome = exchange(state.transport.insert(transport));
        if outcome.as_ref().is_err_and(SyncError::is_fatal) {
            self.end(&mut state, allocator);
        }
        outcome
    }

    /// Drops all state if the communicator has ended. Returns `true` if nothing remains. Does nothing while a sync is in progress, because
    /// the sync then drops the state itself.
    pub(crate) fn sweep(&self, allocator: &CudaAllocator) -> bool {
        if self.comm.state() == CommState::Ready {
            return false;
        }
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        self.drop_everything(&mut state, allocator);
        state.held.is_empty()
    }

    /// Aborts the communicator and drops all state.
    pub(crate) fn end(&self, state: &mut SyncState, allocator: &CudaAllocator) {
        if self.comm.state() == CommState::Ready
            && let Err(error) = self.comm.abort_for_error()
        {
            tracing::warn!(name: "communicator.abort_failed", target: "symmalloc", communicator = self.comm.name(), %error);
        }
        self.drop_everything(state, allocator);
    }

    /// Drops all state of an ended communicator. Its windows ended with it and are not touched; its segments are released. If the
    /// communicator is lost, an NCCL call on it may still run, so their memory is kept.
    pub(crate) fn drop_everything(&self, state: &mut SyncState, allocator: &CudaAllocator) {
        if !state.is_dropped {
            tracing::warn!(
                name: "communicator.dropped",
                target: "symmalloc",
                communicator = self.comm.name(),
                state = %self.comm.state(),
                windows = state.windows.len(),
            );
            let registered = state.windows.keys().chain(state.buffers.keys());
            let kept = registered.map(|segment| segment.pool).collect::<BTreeSet<_>>().into_iter().collect();
            let held = std::mem::take(&mut state.pools).into_observers();
            *state = SyncState { is_dropped: true, held, kept, ..SyncState::default() };
            let mut view = self.view_mut();
            view.windows.clear();
            view.invalidations.everything();
            drop(view);
            self.publish_view(state);
        }
        if self.comm.state() == CommState::Lost {
            return;
        }
        for observer in state.held.drain(..) {
            if let Err(error) = allocator.core().forget(observer) {
                tracing::warn!(name: "sync.memory_kept", target: "symmalloc", %error);
            }
        }
    }

    /// Deregisters everything locally, without the other ranks, because the registrar is dropped while the communicator remains. Aborts
    /// the communicator if work that may use the windows does not complete in time.
    pub(crate) fn close(&self, allocator: &CudaAllocator) {
        let mut state = self.lock();
        if state.is_dropped {
            return;
        }
        if self.comm.state() == CommState::Ready && !(state.windows.is_empty() && state.buffers.is_empty()) {
            let outcome = self.quiesce(allocator).and_then(|()| {
                let windows = std::mem::take(&mut state.windows).into_values();
                let buffers = std::mem::take(&mut state.buffers).into_values().flatten();
                windows
                    .chain(buffers.map(Registered::Plain))
                    .try_for_each(|registered| self.give_back(registered))
                    .map_err(|error| self.failed(error))
            });
            if let Err(error) = outcome {
                tracing::error!(name: "registrar.close_failed", target: "symmalloc", communicator = self.comm.name(), %error);
                return self.end(&mut state, allocator);
            }
        }
        self.drop_everything(&mut state, allocator);
    }

    /// Publishes the state that lookups and statistics read.
    fn publish_view(&self, state: &SyncState) {
        let mut view = self.view_mut();
        view.window_pools = state.pools.of(Registration::Windows).collect();
        if !state.is_dropped {
            view.pools = state.pools.all().collect();
        }
        view.space_used_bytes = state.space.as_ref().map_or(0, SymmetricSpace::used_bytes);
        view.space_limit_bytes = state.space.as_ref().map_or(0, SymmetricSpace::limit_bytes);
        view.window_count = state.windows.len() as u64;
        view.window_bytes = state.window_bytes;
        view.buffer_count = state.buffers.values().map(|pieces| pieces.len() as u64).sum();
    }
}

/// Emits a `tracing` event. Its names and fields are stable.
fn trace_step(communicator: &str, action: &SyncAction, is_registered: bool) {
    let SegmentName { pool, stream, segment } = action.change.segment;
    macro_rules! window {
        ($name:literal) => {
            tracing::debug!(
                name: $name,
                target: "symmalloc",
                communicator,
                symmetric_pool = pool,
                stream = stream.map(|stream| stream.0),
                segment = segment.0,
                size_bytes = action.change.size_bytes,
            )
        };
    }
    if is_registered { window!("window.registered") } else { window!("window.deregistered") }
}
