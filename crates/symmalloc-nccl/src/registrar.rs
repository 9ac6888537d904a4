//! The registrar, which keeps the NCCL registrations of an allocator's segments up to date and in the same order on all ranks.
//!
//! ```text
//!  allocator ── segment log ──► Registrar ── one attachment per communicator ──► windows
//!      ▲                           │ sync: every rank, at the same point
//!      └── memory released ◄───────┘ after its last window is deregistered
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `stats.rs` | counters |
//! | `attached_comm.rs` | state of one communicator |
//! | `attached_comm/sync.rs` | one sync of a communicator; see `sync/` |
//! | `attached_comm/sleep.rs` | deregistering and restoring a pool's windows on one communicator; see `sleep/` |
//! | `lookups.rs` | windows and cache keys of buffers |
//! | `checked.rs` | offset checks before collectives |
//! | `ended.rs` | communicators that ended on this rank |
//!
//! The allocator never calls the registrar. A program attaches pools to communicators, allocates and frees freely, and calls
//! [`sync`](Registrar::sync) on every rank wherever windows must be current: after a warm-up, at the end of a scope, before a capture. A
//! sync with nothing to register or deregister costs one small collective, which compares histories. With [`Mode::Off`], such a sync costs
//! 0.1 to 0.2 microseconds and makes no NCCL call. In every mode, a sync is cheap enough to run before every step.

pub(crate) mod attached_comm;
pub(crate) mod checked;
pub(crate) mod ended;
mod lookups;
#[cfg(feature = "metrics")]
pub mod metrics;
pub(crate) mod stats;
#[cfg(feature = "metrics")]
mod sync_time;

use crate::communicator::error::CommError;
use crate::communicator::{CommState, Communicator};
use crate::ffi::version::{Capability, NcclVersion};
use crate::registrar::attached_comm::{AttachedComm, SyncJob};
use crate::registrar::ended::{EndedComm, EndedComms, id_of};
use crate::registrar::stats::{CommunicatorStats, Counters, RegistrarStats};
use crate::sync::error::{AttachError, SyncError};
use crate::sync::settings::{Attachment, Registration, Settings, Synced};
use crate::windows::symmetric_space::configured_bytes;
use smallvec::SmallVec;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(doc)]
use symmalloc_agreement::Mode;
use symmalloc_agreement::{Point, RankHistory};
use symmalloc_core::PoolId;
use symmalloc_core::config::SegmentPolicy;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError, DeviceMemory, Pool};
use symmalloc_files::is_forked;

/// A registrar, which registers the memory of an allocator's pools on communicators. Use one registrar per allocator. Threads can share it.
///
/// # Examples
/// ```no_run
/// use symmalloc_core::{Config, PoolConfig};
/// use symmalloc_cuda::{CudaAllocator, CudaDevice};
/// use symmalloc_nccl::{Communicator, Launch, ReduceOp, Registrar, Registration};
///
/// let device = CudaDevice::new(Launch::from_env()?.local_rank as usize)?;
/// let world = Communicator::builder(&device).connect_env()?;
/// let tp = world.split(Some(world.rank() / 2), world.rank())?.expect("every rank has a color");
/// let allocator = CudaAllocator::new(&device, Config::default())?;
/// let stream = device.context().new_stream()?;
///
/// // One pool for both communicators: each has a separate window on every segment.
/// let registrar = Registrar::builder(&allocator).build()?;
/// let pool = allocator.create_pool(PoolConfig::builder().symmetric(true).reserved(1 << 30).build()?)?;
/// registrar.attach(&world, &[pool.id()], Registration::Windows)?;
/// registrar.attach(&tp, &[pool.id()], Registration::Windows)?;
///
/// let mut gradients = allocator.with_pool(&pool).alloc_zeroed::<f32>(&stream, 1 << 20)?;
/// registrar.sync(&[&world, &tp])?;
/// assert_eq!(registrar.window_of(&tp, &gradients)?.offset_bytes, 0);
/// tp.all_reduce_in_place(&mut gradients, ReduceOp::Sum, &stream)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The registrar keeps an attached communicator alive until the communicator is destroyed or aborted, or the registrar is dropped. Dropping
/// the registrar waits for the device's work for at most the communicator's deadline and then deregisters everything locally, without the
/// other ranks. Nothing remains to be deregistered if the pools were [detached](Self::detach) and synced, or if the communicators were
/// destroyed.
pub struct Registrar {
    allocator: CudaAllocator,
    settings: Settings,
    attachments: RwLock<Vec<Arc<AttachedComm>>>,
    counters: Counters,
    /// Communicators that ended and were removed from `attachments`, but that other ranks may still name in their messages.
    ended: EndedComms,
}

type Attachments = SmallVec<[Arc<AttachedComm>; 4]>;

/// A communicator that takes part in a sync.
struct SyncedComm {
    attachment: Arc<AttachedComm>,
    /// Pools whose histories the ranks compare. Empty if they only check that they sync at the same point; `None` if they exchange no
    /// messages for either purpose.
    compared: Option<SmallVec<[PoolId; 4]>>,
    /// `true` if this rank has nothing to register or deregister.
    is_current: bool,
}

type SyncedComms = SmallVec<[SyncedComm; 4]>;

impl SyncedComm {
    fn quiet(attachment: &Arc<AttachedComm>) -> Self {
        SyncedComm { attachment: Arc::clone(attachment), compared: None, is_current: true }
    }

    /// Returns `true` if the sync has nothing to do on this rank and nothing to compare.
    fn is_quiet(&self) -> bool {
        self.compared.is_none() && self.is_current
    }
}

impl Registrar {
    /// Returns the allocator whose memory this registrar registers.
    pub fn allocator(&self) -> &CudaAllocator {
        &self.allocator
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(crate) fn ended(&self) -> &EndedComms {
        &self.ended
    }

    /// Registers the memory of these pools on a communicator, starting with the next [`sync`](Self::sync). This call is local and does not
    /// involve other ranks. Every rank must attach the same symmetric pools in the same way; private pools may differ.
    ///
    /// From now on, a segment that the allocator gives up (a dead segment) keeps its memory until a sync has deregistered it, and
    /// expandable segments are not shrunk. A pool can be attached to any number of communicators and has separate windows on each of them,
    /// so a program can use one pool for all communicators or one pool per communicator. The pools of a
    /// [`GraphPool`](symmalloc_cuda::GraphPool) can also be attached.
    ///
    /// The [`Attachment`] states the kind of registration, the flags of the windows, and when ranks compare histories. To use the defaults
    /// for everything but the kind of registration, pass a [`Registration`].
    ///
    /// The first attachment to a communicator creates a stream. If this stream is the first of the device's context, the call waits for the
    /// device's work. Syncs create no stream.
    ///
    /// # Errors
    /// See [`AttachError`]. After an error, none of the pools is attached.
    pub fn attach(
        &self,
        comm: &Communicator,
        pools: &[PoolId],
        attachment: impl Into<Attachment>,
    ) -> Result<(), AttachError> {
        let attachment = attachment.into();
        self.check(comm, pools, attachment.registration)?;
        if attachment.registration == Registration::Windows {
            attachment.flags.required().try_for_each(|capability| comm.require(capability))?;
        }
        self.add(comm).observe(&self.allocator, pools, attachment)
    }

    fn check(&self, comm: &Communicator, pools: &[PoolId], registration: Registration) -> Result<(), AttachError> {
        comm.check()?;
        let (expected, actual) = (self.allocator.device().ordinal(), comm.device().ordinal());
        if expected != actual {
            return Err(AttachError::DeviceMismatch { communicator: comm.name().to_owned(), expected, actual });
        }
        let capability = match registration {
            Registration::Windows => Capability::Windows,
            Registration::Buffers => Capability::BufferRegistration,
        };
        let version = comm.nccl().version();
        if !comm.nccl().supports(capability) {
            return Err(CommError::Unsupported { capability, version }.into());
        }
        if registration == Registration::Windows && !self.allocator.core().backend().traits().posix_fd {
            return Err(AttachError::NotShareable);
        }
        for &pool in pools {
            let config = self.allocator.core().pool_config(pool)?;
            if registration == Registration::Buffers {
                continue;
            }
            if !config.symmetric() {
                return Err(AttachError::NotSymmetric { pool });
            }
            if matches!(config.segments(), SegmentPolicy::Expandable(_)) && version < GROWING_WINDOWS {
                return Err(AttachError::Growing { pool, version });
            }
        }
        Ok(())
    }

    /// Detaches pools from a communicator: the next sync, on every rank, deregisters their memory. Detach a pool before you drop it, or
    /// its memory is not returned to the device.
    ///
    /// # Errors
    /// [`SyncError::NotAttached`] if one of the pools is not attached. The others are still detached.
    pub fn detach(&self, comm: &Communicator, pools: &[PoolId]) -> Result<(), SyncError> {
        let attachment = self.attachment(comm)?;
        let missing = pools.iter().filter(|pool| !attachment.leave(**pool)).count();
        let pool = pools.iter().copied().find(|pool| missing > 0 && attachment.registration_of(*pool).is_none());
        pool.map_or(Ok(()), |pool| {
            Err(SyncError::NotAttached { communicator: comm.name().to_owned(), pool: Some(pool) })
        })
    }

    /// Returns how a pool is attached to a communicator, or `None` if it is not attached.
    pub fn registration(&self, comm: &Communicator, pool: PoolId) -> Option<Registration> {
        self.find(comm)?.registration_of(pool)
    }

    /// Brings the registrations of these communicators up to date. Every rank of each communicator must call it at the same point of the
    /// program, with the same communicators. The order of `comms` does not matter: all ranks process communicators in the same global
    /// order.
    ///
    /// On each communicator, one small collective checks that the ranks have equal histories and the same windows to register and
    /// deregister. Each new segment is then registered once, in log order, with one window over the whole segment. Dead segments are
    /// deregistered in log order, after the work already submitted to the device completes. Their memory is released unless another
    /// communicator still has windows on it.
    ///
    /// # Errors
    /// If a communicator has ended, returns the error of that communicator. Otherwise, returns the error of the first communicator that
    /// failed, in the global order. In both cases, the remaining communicators are still brought up to date, because their ranks wait for
    /// this one. If a communicator is not attached or a capture is in progress, the call does nothing, and the other ranks wait until the
    /// deadline. See [`SyncError`] for the state of the communicator that failed.
    pub fn sync(&self, comms: &[&Communicator]) -> Result<Synced, SyncError> {
        self.counters.syncs.add(1);
        let (attachments, gone) = self.attached(comms)?;
        let outcome = self.run_sync(self.begin_sync(&attachments));
        gone.map_or(outcome, Err)
    }

    /// Like [`sync`](Self::sync), for the end of a scope that may be part of a graph capture. During a capture, ranks can neither register
    /// segments nor communicate, so this call succeeds without comparing histories if there is nothing to register.
    ///
    /// # Errors
    /// Same as [`sync`](Self::sync).
    pub fn sync_at_scope_end(&self, comms: &[&Communicator]) -> Result<Synced, SyncError> {
        self.counters.syncs.add(1);
        let (attachments, gone) = self.attached(comms)?;
        let mut comms = self.begin_sync(&attachments);
        // A driver error is reported by the sync.
        let is_current = !comms.is_empty() && comms.iter().all(|comm| comm.is_current);
        if is_current && self.allocator.is_capturing().unwrap_or(false) {
            comms.iter_mut().for_each(|comm| comm.compared = None);
        }
        let outcome = self.run_sync(comms);
        gone.map_or(outcome, Err)
    }

    /// Like [`sync`](Self::sync), but compares histories in every mode. With [`Mode::Off`], use it to compare histories on demand.
    ///
    /// # Errors
    /// Same as [`sync`](Self::sync).
    pub fn agree(&self, comms: &[&Communicator]) -> Result<Synced, SyncError> {
        self.counters.syncs.add(1);
        let (attachments, gone) = self.attached(comms)?;
        let compare_all = |attachment: Arc<AttachedComm>| {
            let compared = Some(attachment.view().window_pools.clone());
            SyncedComm { attachment, compared, is_current: false }
        };
        let outcome = self.sync_all(attachments.into_iter().map(compare_all).collect());
        gone.map_or(outcome, Err)
    }

    /// Counts a sync of these communicators, and determines which histories the sync compares. Returns an empty list if all communicators
    /// are [quiet](SyncedComm::is_quiet). Most syncs are quiet, and building the list would take a fifth of the time of such a sync.
    fn begin_sync(&self, attachments: &[Arc<AttachedComm>]) -> SyncedComms {
        let mut comms = SyncedComms::new();
        for (number, attachment) in attachments.iter().enumerate() {
            let (compared, is_current) = attachment.begin_sync(&self.allocator);
            if comms.is_empty() {
                if compared.is_none() && is_current {
                    continue;
                }
                comms.extend(attachments[..number].iter().map(SyncedComm::quiet));
            }
            comms.push(SyncedComm { attachment: Arc::clone(attachment), compared, is_current });
        }
        comms
    }

    fn run_sync(&self, comms: SyncedComms) -> Result<Synced, SyncError> {
        if comms.iter().all(SyncedComm::is_quiet) {
            self.counters.quiet_syncs.add(1);
            return Ok(Synced::default());
        }
        self.sync_all(comms)
    }

    /// Returns the attachments of communicators, and the error of a communicator that has ended. Such a communicator may have been swept on
    /// this rank only, while all ranks must still sync the remaining communicators. The error is therefore returned next to their
    /// attachments.
    fn attached(&self, comms: &[&Communicator]) -> Result<(Attachments, Option<SyncError>), SyncError> {
        let (mut attachments, mut gone) = (Attachments::new(), None);
        let all = self.read();
        for comm in comms {
            match all.iter().find(|other| other.comm.serial() == comm.serial()) {
                // A communicator that is passed twice is synced once.
                Some(found) if attachments.iter().any(|known| Arc::ptr_eq(known, found)) => {}
                Some(found) => attachments.push(Arc::clone(found)),
                None if comm.state() == CommState::Ready => return Err(not_attached(comm)),
                None => gone = gone.or_else(|| Some(not_attached(comm))),
            }
        }
        Ok((attachments, gone))
    }

    /// Returns `true` if a sync of this communicator has nothing to do on this rank: every live segment of the pools is registered, and
    /// every dead segment is deregistered. Never waits for other ranks.
    ///
    /// # Errors
    /// Returns an error if no pool is attached to the communicator, or the communicator has ended.
    pub fn is_current(&self, comm: &Communicator) -> Result<bool, SyncError> {
        let attachment = self.attachment(comm)?;
        Ok(attachment.is_current(&self.allocator))
    }

    #[cold]
    fn sync_all(&self, mut comms: SyncedComms) -> Result<Synced, SyncError> {
        comms.sort_by(|one, other| one.attachment.comm.order().cmp(other.attachment.comm.order()));
        let Some(SyncedComm { attachment: first, .. }) = comms.first() else { return Ok(Synced::default()) };
        let communicators = comms.len();
        let _entered = tracing::debug_span!(target: "symmalloc", "registrar.sync", communicators).entered();
        #[cfg(feature = "metrics")]
        let _timed = sync_time::TimedSync::begin(self.allocator.device().ordinal());
        let is_capturing = self.allocator.is_capturing();
        if is_capturing.map_err(|error| SyncError::Cuda { communicator: first.comm.name().to_owned(), error })? {
            return Err(SyncError::Capturing);
        }
        // All communicators must compare histories up to the same point.
        let history = |comm: &SyncedComm| {
            comm.compared.as_ref().map(|pools| RankHistory::of_pools(self.allocator.core(), Point::Sync, pools))
        };
        let histories: SmallVec<[Option<RankHistory<'_>>; 4]> = comms.iter().map(history).collect();
        let job = SyncJob { allocator: &self.allocator, settings: &self.settings, counters: &self.counters };
        let mut total = Ok(Synced::default());
        for (comm, history) in comms.iter().zip(&histories) {
            match (comm.attachment.sync(&job, history.as_ref()), &mut total) {
                (Ok(synced), Ok(total)) => total.add(synced),
                (Err(error), Ok(_)) => total = Err(error),
                (_, Err(_)) => {}
            }
        }
        self.sweep();
        if total.is_ok() {
            self.settle(&comms, &histories);
        }
        total
    }

    /// Discards the history that all ranks agree on. Keeps the history of pools that are also attached to other communicators, because the
    /// ranks of those communicators may not have reached this point.
    fn settle(&self, synced: &[SyncedComm], histories: &[Option<RankHistory<'_>>]) {
        let is_synced =
            |attachment: &Arc<AttachedComm>| synced.iter().any(|other| Arc::ptr_eq(attachment, &other.attachment));
        let elsewhere: Vec<u32> = {
            let all = self.read();
            let others = all.iter().filter(|attachment| !is_synced(attachment));
            let pools = others.flat_map(|attachment| attachment.view().window_pools.clone());
            pools.filter_map(|pool| self.allocator.core().symmetric_ordinal(pool)).collect()
        };
        for history in histories.iter().flatten() {
            history.settle_pools(|ordinal| !elsewhere.contains(&ordinal));
        }
    }

    /// Detaches communicators that were destroyed, aborted or lost, without touching their windows, and releases the memory that was kept
    /// for their windows. A sync does this as well. Returns the number of detached communicators.
    pub fn sweep(&self) -> usize {
        let all: Attachments = self.read().iter().map(Arc::clone).collect();
        let gone: Attachments = all.into_iter().filter(|attachment| attachment.sweep(&self.allocator)).collect();
        self.write().retain(|attachment| !gone.iter().any(|other| Arc::ptr_eq(attachment, other)));
        let ended = gone.iter().map(|attachment| EndedComm {
            name: attachment.comm.name().to_owned(),
            id: id_of(&attachment.comm),
            ranks: attachment.comm.ranks(),
            pools: attachment.view().pools.to_vec(),
        });
        self.ended.add(ended, |pool| self.allocator.core().phase(pool).is_ok());
        gone.len()
    }

    /// Returns the used memory of the device by owner, including this registrar's communicators. Waits for NCCL calls that other threads
    /// make with these communicators.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn device_memory(&self) -> Result<DeviceMemory, CudaError> {
        let comms: Vec<Communicator> = self.read().iter().map(|attachment| attachment.comm.clone()).collect();
        let memory = self.allocator.device_memory()?;
        Ok(memory.with_communicators(Communicator::held_bytes(&comms)))
    }

    /// Returns the registrar's counters, summed over all communicators.
    pub fn stats(&self) -> RegistrarStats {
        let mut stats = RegistrarStats {
            syncs: self.counters.syncs.get(),
            quiet_syncs: self.counters.quiet_syncs.get(),
            rounds: self.counters.rounds.get(),
            registrations: self.counters.registrations.get(),
            deregistrations: self.counters.deregistrations.get(),
            failures: self.counters.failures.get(),
            dead_bytes: self.allocator.stats().retired_bytes,
            ..RegistrarStats::default()
        };
        for attachment in self.read().iter().filter(|attachment| attachment.comm.state() == CommState::Ready) {
            let view = attachment.view();
            stats.communicators += 1;
            stats.windows += view.registered.windows();
            stats.window_bytes += view.registered.window_bytes();
            stats.buffers += view.registered.buffers();
        }
        stats
    }

    /// Returns the registrations on one communicator, or `None` if no pool was ever attached to the communicator or it has ended.
    pub fn communicator_stats(&self, comm: &Communicator) -> Option<CommunicatorStats> {
        Some(self.find(comm)?.view().stats())
    }

    /// Returns the registrations on each live communicator, with the communicator's name, in the order in which pools were first attached.
    pub fn stats_by_communicator(&self) -> Vec<(String, CommunicatorStats)> {
        let all = self.read();
        let live = all.iter().filter(|attachment| attachment.comm.state() == CommState::Ready);
        live.map(|attachment| (attachment.comm.name().to_owned(), attachment.view().stats())).collect()
    }

    pub(crate) fn attachment(&self, comm: &Communicator) -> Result<Arc<AttachedComm>, SyncError> {
        self.find(comm).ok_or_else(|| not_attached(comm))
    }

    /// Returns the attachments of a pool.
    pub(crate) fn attachments_of(&self, pool: PoolId) -> Vec<Arc<AttachedComm>> {
        self.read().iter().filter(|attachment| attachment.view().pools.contains(&pool)).map(Arc::clone).collect()
    }

    pub(crate) fn find(&self, comm: &Communicator) -> Option<Arc<AttachedComm>> {
        self.read().iter().find(|attachment| attachment.comm.serial() == comm.serial()).map(Arc::clone)
    }

    fn add(&self, comm: &Communicator) -> Arc<AttachedComm> {
        let mut all = self.write();
        if let Some(attachment) = all.iter().find(|attachment| attachment.comm.serial() == comm.serial()) {
            return Arc::clone(attachment);
        }
        let attachment = Arc::new(AttachedComm::new(comm));
        all.push(Arc::clone(&attachment));
        attachment
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<AttachedComm>>> {
        self.attachments.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Arc<AttachedComm>>> {
        self.attachments.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// First version that supports windows over memory that grew piece by piece.
const GROWING_WINDOWS: NcclVersion = NcclVersion::new(2, 30, 3);

/// Returns the error for a communicator without attached pools.
pub(crate) fn not_attached(comm: &Communicator) -> SyncError {
    let communicator = comm.name().to_owned();
    match comm.state() {
        CommState::Ready => SyncError::NotAttached { communicator, pool: None },
        state => SyncError::Gone { communicator, state, cause: comm.end_cause() },
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        let attachments = std::mem::take(&mut *self.write());
        attachments.iter().for_each(|attachment| attachment.close(&self.allocator));
    }
}

impl fmt::Debug for Registrar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrar")
            .field("allocator", &self.allocator)
            .field("settings", &self.settings)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Registrar {
    /// Runs `work` with an allocator that allocates from `pool`, and syncs the communicators when `work` returns, so that the buffers that
    /// `work` returns are in windows. Every rank must call this function.
    ///
    /// The sync also runs if the result of `work` is an error, because the other ranks wait for it. It does not run if `work` panics:
    /// nothing is registered, and the other ranks fail at the deadline.
    ///
    /// # Errors
    /// [`SyncError::NotAttached`], before `work` runs, if the pool is not attached to all of the communicators for windows; otherwise the
    /// errors of [`sync`](Self::sync). If the sync fails, the result of `work` is dropped.
    pub fn with_symmetric<R>(
        &self,
        comms: &[&Communicator],
        pool: &Pool<CudaBackend>,
        work: impl FnOnce(&CudaAllocator) -> R,
    ) -> Result<R, SyncError> {
        for comm in comms {
            if self.attachment(comm)?.registration_of(pool.id()) != Some(Registration::Windows) {
                return Err(SyncError::NotAttached { communicator: comm.name().to_owned(), pool: Some(pool.id()) });
            }
        }
        let result = work(&self.allocator().with_pool(pool));
        self.sync(comms)?;
        Ok(result)
    }
}

/// A builder for a [`Registrar`]. All ranks must use the same configuration.
#[derive(Clone, Debug)]
#[must_use]
pub struct RegistrarBuilder {
    allocator: CudaAllocator,
    check_offsets: bool,
    symmetric_space_bytes: Option<u64>,
}

impl Registrar {
    /// Returns a builder with the default configuration: no offset checks.
    pub fn builder(allocator: &CudaAllocator) -> RegistrarBuilder {
        let allocator = allocator.clone();
        RegistrarBuilder { allocator, check_offsets: false, symmetric_space_bytes: None }
    }
}

impl RegistrarBuilder {
    /// Sets whether [`Registrar::checked`] compares offsets across all ranks before each collective. This is a debugging aid and off by
    /// default.
    pub fn check_offsets(mut self, check_offsets: bool) -> Self {
        self.check_offsets = check_offsets;
        self
    }

    /// Overrides the size in bytes of each communicator's symmetric address space. Use it if NCCL does not follow its documented rule
    /// (`NCCL_WIN_STRIDE`, otherwise the memory of the largest device). The size is rounded up to 4 GiB, and all ranks use the largest
    /// value of any rank.
    pub fn symmetric_space_bytes(mut self, bytes: u64) -> Self {
        self.symmetric_space_bytes = Some(bytes);
        self
    }

    /// Builds the registrar.
    ///
    /// # Errors
    /// Returns an error if the driver does not report the size of the device's memory.
    pub fn build(self) -> Result<Registrar, CudaError> {
        let space_bytes = match self.symmetric_space_bytes {
            Some(bytes) => bytes,
            None => {
                let stride = std::env::var("NCCL_WIN_STRIDE").ok();
                configured_bytes(self.allocator.device().memory_info()?.total_bytes, stride.as_deref())
            }
        };
        Ok(Registrar {
            settings: Settings { check_offsets: self.check_offsets, space_bytes },
            allocator: self.allocator,
            attachments: RwLock::default(),
            counters: Counters::default(),
            ended: EndedComms::default(),
        })
    }
}
