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
mod sync;

pub(crate) use sync::SyncJob;

use crate::collectives::transport::NcclTransport;
use crate::communicator::error::CommError;
use crate::communicator::registration::{BufferRegistration, Registered};
use crate::communicator::{CommState, Communicator};
use crate::ffi::handles::WindowHandle;
use crate::ffi::window_flags::WindowFlags;
use crate::registrar::stats::CommunicatorStats;
use crate::sync::actions::{SegmentTable, SyncAction};
use crate::sync::changes::ObservedPools;
use crate::sync::error::{AttachError, SyncError};
use crate::sync::fold;
use crate::sync::settings::Registration;
use crate::windows::keys::Invalidations;
use crate::windows::segment::HeapSegment;
use crate::windows::symmetric_space::SymmetricSpace;
use crate::windows::window::{Entry, WindowMap};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use symmalloc_core::{ObserverId, PoolId};
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
    windows: BTreeMap<HeapSegment, Registered>,
    window_bytes: u64,
    /// Segments with windows, in registration order.
    order: Vec<HeapSegment>,
    /// Sleeping pools, with the registrations to restore on wake.
    saved: BTreeMap<PoolId, SavedRegistrations>,
    /// Number of sleeps and wakes that the ranks agreed on over this communicator: equal on all ranks.
    sleeps: u64,
    /// Registrations of pools that are attached for buffers, one per piece of memory.
    buffers: BTreeMap<HeapSegment, SmallVec<[BufferRegistration; 1]>>,
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

    pub(crate) fn failed(&self, error: CommError) -> SyncError {
        SyncError::Communicator { communicator: self.name(), error }
    }

    pub(crate) fn gone(&self) -> SyncError {
        SyncError::Gone { communicator: self.name(), state: self.comm.state(), cause: self.comm.end_cause() }
    }

    /// Returns `true` if there is nothing to do: no log has grown, no pool is being detached, and the communicator is ready.
    #[inline]
    pub(crate) fn is_current(&self, allocator: &CudaAllocator) -> bool {
        let state = self.lock();
        !state.is_dropped && self.comm.state() == CommState::Ready && state.pools.has_no_changes(allocator)
    }

    /// Starts to observe these pools. After an error, none of them is observed.
    pub(crate) fn observe(
        &self,
        allocator: &CudaAllocator,
        pools: &[PoolId],
        registration: Registration,
        flags: WindowFlags,
    ) -> Result<(), AttachError> {
        let mut state = self.lock();
        state.pools.observe(allocator, self.comm.name(), pools, registration, flags)?;
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

    /// Returns the transport of the ranks' messages, creating it if needed.
    pub(crate) fn transport<'s>(&self, state: &'s mut SyncState) -> Result<&'s NcclTransport, SyncError> {
        let transport = match state.transport.take() {
            Some(transport) => transport,
            None => NcclTransport::new(&self.comm).map_err(|error| self.failed(error))?,
        };
        Ok(state.transport.insert(transport))
    }

    /// Checks that the communicator is not suspended.
    pub(crate) fn check_active(&self) -> Result<(), SyncError> {
        if self.comm.is_suspended() {
            return Err(SyncError::Suspended { communicator: self.comm.name().to_owned() });
        }
        Ok(())
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
        self.check_active()?;
        let outcome = exchange(self.transport(&mut state)?);
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
            let kept = registered.map(|segment| segment.heap.pool).collect::<BTreeSet<_>>().into_iter().collect();
            let held = std::mem::take(&mut state.pools).into_observers();
            *state = SyncState { is_dropped: true, held, kept, ..SyncState::default() };
            let mut view = self.view_mut();
            view.windows.clear();
            view.invalidations.invalidate_all();
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
                    .try_for_each(|registered| self.deregister_any(registered))
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

/// The saved registrations of a sleeping pool on one communicator.
#[derive(Debug, Default)]
pub(crate) struct SavedRegistrations {
    /// Windows in registration order.
    pub(crate) windows: Vec<SavedWindow>,
    pub(crate) buffers: Vec<SavedBuffers>,
}

/// A window that was deregistered for sleep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedWindow {
    pub(crate) action: SyncAction,
    /// Previous handle; `None` if it was a plain registration.
    pub(crate) handle: Option<WindowHandle>,
}

/// The pieces of a segment, each with a registration local to this rank.
#[derive(Debug)]
pub(crate) struct SavedBuffers {
    pub(crate) segment: HeapSegment,
    /// Address and size in bytes of each piece.
    pub(crate) pieces: Vec<(u64, u64)>,
    pub(crate) entry: Option<Entry>,
}

/// Returns a digest of the windows and their order, for comparison across ranks.
pub(crate) fn digest(windows: &[SavedWindow]) -> u64 {
    let words = windows.iter().flat_map(|window| window.action.change.words());
    words.fold(windows.len() as u64, fold)
}
