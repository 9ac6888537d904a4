//! The registrar's state for one communicator: the observed pools, and their registrations.
//!
//! ```text
//!  AttachedComm ── Communicator
//!    ├── State, behind the sync lock: one sync at a time per communicator
//!    │     ├── pools         one observer each: its cursor in the segment log, which also retains dead memory
//!    │     ├── segments      the live segments as of the last sync
//!    │     ├── saved         registrations to restore when a pool wakes
//!    │     └── space         NCCL's symmetric address space
//!    └── View, behind a separate lock, which lookups read during a sync
//!          └── registered    the segments with windows or registered buffers
//! ```
//!
//! The memory of a dead segment is released after its last observer acknowledges the death. An attachment acknowledges it only after it has
//! deregistered its windows, so a segment outlives its windows on every communicator, in any order of events.

mod sleep;
mod sync;

pub(crate) use sync::SyncJob;

use crate::collectives::transport::NcclTransport;
use crate::communicator::error::CommError;
use crate::communicator::{CommState, Communicator};
use crate::ffi::handles::WindowHandle;
use crate::registrar::stats::CommunicatorStats;
use crate::sync::actions::SyncAction;
use crate::sync::error::{AttachError, SyncError};
use crate::sync::fold;
use crate::sync::observed::ObservedPools;
use crate::sync::settings::{Attachment, Registration};
use crate::windows::keys::{Invalidations, SegmentKey};
use crate::windows::registrations::Registrations;
use crate::windows::segment::HeapSegment;
use crate::windows::symmetric_space::SymmetricSpace;
use crate::windows::table::{Extent, Piece, SegmentTable};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use symmalloc_core::{ObserverId, PoolId};
use symmalloc_cuda::CudaAllocator;

pub(crate) struct AttachedComm {
    pub(crate) comm: Communicator,
    state: Mutex<SyncState>,
    view: RwLock<View>,
}

/// The state that a sync modifies, together with the registrations in the [`View`].
///
/// # Invariants
/// - **S1**: Every registered segment is in `segments`, and is no larger than its extent there. A segment that dies stays in the table
///   until a sync has deregistered it.
/// - **S2**: After a sync, if a pool is awake and attached for windows, each of its segments without holes has a window over the whole
///   segment.
/// - **S3**: `space` holds the windows of [`View::registered`] and no others.
/// - **S4**: A pool in `saved` is observed and has no registrations.
/// - **S5**: Once the communicator has ended, the state is empty except for `ended`.
#[derive(Default)]
pub(crate) struct SyncState {
    pools: ObservedPools,
    segments: SegmentTable,
    /// Sleeping pools, with the registrations to restore on wake.
    saved: BTreeMap<PoolId, SavedRegistrations>,
    /// `None` until the first window is registered.
    space: Option<SymmetricSpace>,
    exchanges: Exchanges,
    /// Set once the communicator has ended and its registrations are gone.
    ended: Option<Ended>,
}

/// The exchanges of messages over a communicator.
#[derive(Default)]
struct Exchanges {
    transport: Option<NcclTransport>,
    /// Number of syncs in which the ranks agreed: equal on all ranks.
    syncs: u64,
    /// Number of sleeps and wakes over this communicator: equal on all ranks.
    sleeps: u64,
}

/// The state that remains after a communicator has ended.
#[derive(Default)]
struct Ended {
    /// Pools that had registrations when the communicator ended.
    pools: Vec<PoolId>,
    /// Observers that are kept because an NCCL call on the communicator may still run.
    held: Vec<ObserverId>,
}

/// The state that can be read at any time, even during a sync.
#[derive(Default)]
pub(crate) struct View {
    /// Pools that are attached for windows, whose histories must be equal.
    pub(crate) window_pools: SmallVec<[PoolId; 4]>,
    /// Pools that are attached for windows or buffers, or were attached when the communicator ended.
    pub(crate) pools: SmallVec<[PoolId; 4]>,
    /// Modified only by the holder of the sync lock.
    pub(crate) registered: Registrations,
    pub(crate) invalidations: Invalidations,
    space_used_bytes: u64,
    space_limit_bytes: u64,
}

impl View {
    pub(crate) fn stats(&self) -> CommunicatorStats {
        CommunicatorStats {
            windows: self.registered.windows(),
            window_bytes: self.registered.window_bytes(),
            buffers: self.registered.buffers(),
            space_used_bytes: self.space_used_bytes,
            space_budget_bytes: self.space_limit_bytes,
        }
    }
}

impl AttachedComm {
    pub(crate) fn new(comm: &Communicator) -> Self {
        AttachedComm { comm: comm.clone(), state: Mutex::default(), view: RwLock::default() }
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
        self.is_ready(&state) && state.pools.has_no_changes(allocator)
    }

    /// Starts to observe these pools. After an error, none of them is observed.
    ///
    /// Creates the transport now and not at the first sync: creating the context's first stream waits for the device, which may hang in a
    /// collective by the time of the first sync.
    pub(crate) fn observe(
        &self,
        allocator: &CudaAllocator,
        pools: &[PoolId],
        attachment: Attachment,
    ) -> Result<(), AttachError> {
        let mut state = self.lock();
        self.create_transport(&mut state)?;
        state.pools.observe(allocator, self.comm.name(), pools, attachment)?;
        self.publish_view(&state);
        Ok(())
    }

    /// Counts a sync. Returns the pools whose histories the ranks compare in this sync (`None` if they exchange no messages), and `true` if
    /// there is [nothing to do](Self::is_current).
    pub(crate) fn begin_sync(&self, allocator: &CudaAllocator) -> (Option<SmallVec<[PoolId; 4]>>, bool) {
        let mut state = self.lock();
        let compared = state.pools.count_sync();
        (compared, self.is_ready(&state) && state.pools.has_no_changes(allocator))
    }

    /// Returns the kind of registration for which a pool is observed, or `None` if it is not observed.
    pub(crate) fn registration_of(&self, pool: PoolId) -> Option<Registration> {
        self.lock().pools.registration_of(pool)
    }

    /// Marks a pool for detachment at the next sync. Returns `true` if it was observed.
    pub(crate) fn leave(&self, pool: PoolId) -> bool {
        self.lock().pools.leave(pool)
    }

    /// Returns the transport of the ranks' messages. It already exists, unless no pool could be attached.
    pub(crate) fn transport<'s>(&self, state: &'s mut SyncState) -> Result<&'s NcclTransport, SyncError> {
        self.create_transport(state).map_err(|error| self.failed(error))
    }

    /// Creates the transport if it does not exist yet.
    fn create_transport<'s>(&self, state: &'s mut SyncState) -> Result<&'s NcclTransport, CommError> {
        let transport = match state.exchanges.transport.take() {
            Some(transport) => transport,
            None => NcclTransport::new(&self.comm)?,
        };
        Ok(state.exchanges.transport.insert(transport))
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
        if !self.is_ready(&state) {
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
        state.ended.as_ref().is_none_or(|ended| ended.held.is_empty())
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

    /// Drops all state of an ended communicator. The windows ended with the communicator and are not touched. The segments are released.
    /// However, if the communicator is lost, an NCCL call on it may still run, so the memory of the segments is kept.
    pub(crate) fn drop_everything(&self, state: &mut SyncState, allocator: &CudaAllocator) {
        if state.ended.is_none() {
            let pools = self.view().registered.pools();
            tracing::warn!(
                name: "communicator.dropped",
                target: "symmalloc",
                communicator = self.comm.name(),
                state = %self.comm.state(),
                windows = self.view().registered.windows(),
            );
            let held = std::mem::take(&mut state.pools).into_observers();
            *state = SyncState { ended: Some(Ended { pools, held }), ..SyncState::default() };
            let mut view = self.view_mut();
            view.registered = Registrations::default();
            view.invalidations.invalidate_all();
            drop(view);
            self.publish_view(state);
            self.check(state);
        }
        if self.comm.state() == CommState::Lost {
            return;
        }
        for observer in state.ended.iter_mut().flat_map(|ended| ended.held.drain(..)) {
            if let Err(error) = allocator.core().forget(observer) {
                tracing::warn!(name: "sync.memory_kept", target: "symmalloc", %error);
            }
        }
    }

    /// Deregisters everything locally, without the other ranks, because the registrar is dropped while the communicator remains. Aborts
    /// the communicator if work that may use the windows does not complete in time.
    pub(crate) fn close(&self, allocator: &CudaAllocator) {
        let mut state = self.lock();
        if state.ended.is_some() {
            return;
        }
        if self.comm.state() == CommState::Ready && !self.view().registered.is_empty() {
            let outcome = self.quiesce(allocator).and_then(|()| {
                let all = self.view_mut().registered.take();
                let mut all = all.into_iter();
                all.try_for_each(|registered| self.deregister_any(registered)).map_err(|error| self.failed(error))
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
        if state.ended.is_none() {
            view.pools = state.pools.all().collect();
        }
        view.space_used_bytes = state.space.as_ref().map_or(0, SymmetricSpace::used_bytes);
        view.space_limit_bytes = state.space.as_ref().map_or(0, SymmetricSpace::limit_bytes);
    }

    /// Checks the invariants of the state.
    fn check(&self, state: &SyncState) {
        debug_assert_eq!(state.violation(&self.view().registered), None, "communicator \"{}\"", self.comm.name());
    }
}

impl SyncState {
    /// Returns the first invariant that does not hold. Does not check S2, which holds only [after a sync](Self::uncovered).
    fn violation(&self, registered: &Registrations) -> Option<&'static str> {
        let windows = registered.in_order();
        let is_live = |key: &SegmentKey| {
            self.segments
                .get(key.segment)
                .is_some_and(|extent| extent.base == key.base && key.size_bytes <= extent.end_bytes)
        };
        let in_space: BTreeSet<HeapSegment> = windows.iter().map(|(key, _)| key.segment).collect();
        let space = self.space.iter().flat_map(SymmetricSpace::segments).collect::<BTreeSet<_>>();
        let is_empty = self.segments.iter().next().is_none() && self.saved.is_empty() && self.space.is_none();
        let checks = [
            ("S1", registered.keys().all(is_live)),
            ("S3", space == in_space),
            (
                "S4",
                self.saved
                    .keys()
                    .all(|pool| self.pools.registration_of(*pool).is_some() && !registered.pools().contains(pool)),
            ),
            ("S5", self.ended.is_none() || is_empty && registered.is_empty()),
        ];
        registered.violation().or_else(|| checks.into_iter().find(|(_, holds)| !holds).map(|(name, _)| name))
    }

    /// Returns a segment that violates S2: a sync should have registered a window over it.
    fn uncovered(&self, registered: &Registrations) -> Option<SegmentKey> {
        let needs_window = |segment: &HeapSegment, extent: &Extent| {
            self.pools.registration_of(segment.heap.pool) == Some(Registration::Windows)
                && !self.saved.contains_key(&segment.heap.pool)
                && extent.is_whole()
                && extent.end_bytes > 0
        };
        let expected = self
            .segments
            .iter()
            .filter(|(segment, extent)| needs_window(segment, extent))
            .map(|(segment, extent)| extent.key(segment));
        expected.into_iter().find(|key| registered.get(key.segment, key.base).is_none_or(|entry| entry.key != *key))
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

/// The registered pieces of a segment.
#[derive(Debug)]
pub(crate) struct SavedBuffers {
    pub(crate) key: SegmentKey,
    pub(crate) pieces: Vec<Piece>,
}

/// Returns a digest of the windows and their order, for comparison across ranks.
pub(crate) fn digest(windows: &[SavedWindow]) -> u64 {
    let words = windows.iter().flat_map(|window| window.action.change.words());
    words.fold(windows.len() as u64, fold)
}
