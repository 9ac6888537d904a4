//! One sync of a communicator: reads the changes to the segments, agrees on the actions with the other ranks, executes them, and
//! acknowledges the changes, which releases the memory of dead segments.

use super::{Attachment, SyncState};
use crate::communicator::error::CommError;
use crate::communicator::registration::Registered;
use crate::communicator::{CommState, Stage};
use crate::registrar::stats::Counters;
use crate::sync::actions::{ChangeKind, SyncAction, SyncActions, invalidated_keys};
use crate::sync::agreement::agree_on_sync;
use crate::sync::changes::SegmentChanges;
use crate::sync::error::SyncError;
use crate::sync::message::{SyncContext, SyncMessage};
use crate::sync::settings::{Registration, Settings, Synced};
use crate::windows::keys::SegmentKey;
use crate::windows::segment::{HeapSegment, SymmetricSegment};
use crate::windows::symmetric_space::SymmetricSpace;
use crate::windows::window::{Entry, RegisteredAs};
use std::time::Instant;
use symmalloc_agreement::RankHistory;
use symmalloc_core::Backend;
use symmalloc_core::segment_log::SegmentEventKind;
use symmalloc_cuda::CudaAllocator;

/// The inputs that a registrar passes to a sync.
pub(crate) struct SyncJob<'a> {
    pub(crate) allocator: &'a CudaAllocator,
    pub(crate) settings: &'a Settings,
    pub(crate) counters: &'a Counters,
}

impl Attachment {
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
        if history.is_some() || !actions.list.is_empty() || !buffers.is_empty() {
            self.check_active()?;
        }
        if history.is_some() || !actions.list.is_empty() {
            synced.rounds = self.agree(state, job, history, &actions)?;
        }
        let dead: Vec<SegmentKey> = [&windows, &buffers]
            .into_iter()
            .flat_map(|changes| invalidated_keys(&state.segments, &changes.events, &changes.leaving))
            .collect();
        if !actions.list.is_empty() || !buffers.is_empty() {
            if actions.removes_registrations() || buffers.removes_registrations() {
                self.quiesce(job.allocator)?;
            }
            for action in &actions.list {
                self.execute(state, action, &mut synced)?;
            }
            self.update_buffers(state, &buffers, &mut synced)?;
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

    /// Agrees on the actions with the other ranks and checks that NCCL has space for the windows. Returns the number of collectives used.
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
        let agreed = agree_on_sync(self.transport(state)?, self.comm.name(), history, actions, &message)?;
        state.rounds += 1;
        if !actions.list.is_empty() {
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
        for action in &actions.list {
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
            self.deregister(state, action, synced).map_err(|error| self.failed(error))?;
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
        let kind = match &registered {
            Registered::Window(window) => RegisteredAs::Window(window.handle()),
            Registered::Plain(_) => RegisteredAs::Plain,
        };
        let key = SegmentKey { base: action.base, size_bytes: action.change.size_bytes, segment: action.segment };
        self.view_mut().windows.insert(Entry { segment: key, name: Some(action.change.segment), kind });
        state.windows.insert(action.segment, registered);
        state.order.push(action.segment);
        state.window_bytes += action.change.size_bytes;
        synced.registrations += 1;
        trace_step(self.comm.name(), action, true);
        Ok(())
    }

    pub(super) fn deregister(
        &self,
        state: &mut SyncState,
        action: &SyncAction,
        synced: &mut Synced,
    ) -> Result<(), CommError> {
        let Some(registered) = state.windows.remove(&action.segment) else { return Ok(()) };
        state.order.retain(|segment| *segment != action.segment);
        self.view_mut().windows.remove(action.base);
        state.window_bytes -= registered.size_bytes();
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

    /// Registers and deregisters the pieces of pools that are attached for buffers. Local to this rank.
    fn update_buffers(
        &self,
        state: &mut SyncState,
        changes: &SegmentChanges,
        synced: &mut Synced,
    ) -> Result<(), SyncError> {
        let mut gone: Vec<HeapSegment> = Vec::new();
        for event in &changes.events {
            let segment = HeapSegment::of(event);
            match event.kind {
                SegmentEventKind::Birth | SegmentEventKind::Growth if !changes.leaving.contains(&event.heap.pool) => {
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
                    let key = SegmentKey { base: event.base.0, size_bytes, segment };
                    view.windows.insert(Entry { segment: key, name: None, kind: RegisteredAs::Plain });
                }
                SegmentEventKind::Death => gone.push(segment),
                _ => {}
            }
        }
        gone.extend(state.buffers.keys().filter(|segment| changes.leaving.contains(&segment.heap.pool)));
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
}

/// Emits a `tracing` event. Its names and fields are stable.
fn trace_step(communicator: &str, action: &SyncAction, is_registered: bool) {
    let SymmetricSegment { pool, group, id } = action.change.segment;
    macro_rules! window {
        ($name:literal) => {
            tracing::debug!(
                name: $name,
                target: "symmalloc",
                communicator,
                symmetric_pool = pool,
                stream = group.stream().map(|stream| stream.0),
                segment = id.0,
                size_bytes = action.change.size_bytes,
            )
        };
    }
    if is_registered { window!("window.registered") } else { window!("window.deregistered") }
}
