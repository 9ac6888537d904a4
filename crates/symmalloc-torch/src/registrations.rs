//! Registrations of pools on communicators that another library owns, such as PyTorch's `ProcessGroupNCCL` or an engine.
//!
//! ```text
//!  Registrations ── a registrar of symmalloc-nccl
//!       └── open: pool 3 on "tp" │ pool 3 on "dp" │ pool 4 on "tp"      in the order of registration, equal on all ranks
//! ```
//!
//! A pool can be registered on many communicators. The end of a scope syncs all registrations of its pool in the order of registration. The
//! registrar's own order cannot be used: it follows the names of borrowed communicators, which a program may choose differently on each
//! rank.

use crate::error::Error;
use crate::streams::RawStream;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::ops::AddAssign;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_cuda::CudaAllocator;
use symmalloc_nccl::{
    AllToAll, Announcement, Attachment, Communicator, CommunicatorBuilder, Registrar, Slept, SyncError, Synced,
    WindowSpan, Woken,
};

/// The registrations of one allocator.
pub(crate) struct Registrations {
    allocator: CudaAllocator,
    /// Created on first use.
    registrar: OnceLock<Arc<Registrar>>,
    open: Arc<OpenRegistrations>,
}

/// In order of registration, which is the same on every rank.
#[derive(Default)]
struct OpenRegistrations(RwLock<Vec<Arc<OpenRegistration>>>);

/// Options of a registration.
pub(crate) struct RegistrationOptions<'a> {
    pub(crate) deadline: Duration,
    pub(crate) rendezvous: Option<&'a str>,
    pub(crate) name: Option<&'a str>,
    pub(crate) attachment: Attachment,
    /// The expected rank and number of ranks, if the program states them.
    pub(crate) rank_and_world: Option<(u32, u32)>,
}

/// The memory that an all-to-all accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Any memory.
    Any,
    /// Memory that is registered on its communicator.
    Registered,
}

/// The comparison between ranks that precedes each all-to-all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    /// No comparison.
    Trusted,
    /// The ranks compare each call.
    Checked,
}

/// The counts of one or more syncs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SyncCounts {
    pub(crate) registered: u64,
    pub(crate) deregistered: u64,
}

impl From<Synced> for SyncCounts {
    fn from(synced: Synced) -> Self {
        SyncCounts { registered: synced.registrations, deregistered: synced.deregistrations }
    }
}

impl AddAssign for SyncCounts {
    fn add_assign(&mut self, other: Self) {
        self.registered += other.registered;
        self.deregistered += other.deregistered;
    }
}

impl Registrations {
    pub(crate) fn new(allocator: &CudaAllocator) -> Self {
        Registrations { allocator: allocator.clone(), registrar: OnceLock::new(), open: Arc::default() }
    }

    fn registrar(&self) -> Result<&Arc<Registrar>, Error> {
        if let Some(registrar) = self.registrar.get() {
            return Ok(registrar);
        }
        let registrar = Arc::new(Registrar::builder(&self.allocator).build()?);
        Ok(self.registrar.get_or_init(|| registrar))
    }

    /// Syncs all registrations of a pool. Continues after a failure, because the other ranks of each communicator wait for this one.
    /// Returns the first error.
    pub(crate) fn sync(&self, pool: PoolId) -> Result<SyncCounts, Error> {
        self.for_each(pool, Registrar::sync)
    }

    /// Syncs like [`sync`](Self::sync), and also compares the ranks' histories.
    pub(crate) fn agree(&self, pool: PoolId) -> Result<SyncCounts, Error> {
        self.for_each(pool, Registrar::agree)
    }

    /// Syncs like [`sync`](Self::sync), except that during a capture it does not communicate, and succeeds only if there are no new
    /// segments.
    pub(crate) fn sync_at_scope_end(&self, pool: PoolId) -> Result<SyncCounts, Error> {
        self.for_each(pool, Registrar::sync_at_scope_end)
    }

    fn for_each(
        &self,
        pool: PoolId,
        act: impl Fn(&Registrar, &[&Communicator]) -> Result<Synced, SyncError>,
    ) -> Result<SyncCounts, Error> {
        // The lock is not held during waits for other ranks.
        let of_pool: SmallVec<[Arc<OpenRegistration>; 4]> = self.open.of(pool);
        let mut outcome = Ok(SyncCounts::default());
        for OpenRegistration { registrar, communicator, .. } in of_pool.iter().map(|open| &**open) {
            match (act(registrar, &[communicator]), &mut outcome) {
                (Ok(synced), Ok(total)) => *total += synced.into(),
                (Err(error), Ok(_)) => outcome = Err(error),
                (_, Err(_)) => {}
            }
        }
        Ok(outcome?)
    }

    /// Puts a pool to sleep on all ranks of its communicators. Returns `None` if the pool has no communicators.
    pub(crate) fn sleep(&self, pool: PoolId, contents: Contents) -> Result<Option<Slept>, Error> {
        let Some(over) = self.over(pool)? else { return Ok(None) };
        Ok(Some(over.registrar.sleep(&over.communicator, pool, contents)?))
    }

    /// Puts a pool to sleep like [`sleep`](Self::sleep), and suspends its communicators.
    pub(crate) fn sleep_and_suspend(&self, pool: PoolId, contents: Contents) -> Result<Option<Slept>, Error> {
        let Some(over) = self.over(pool)? else { return Ok(None) };
        Ok(Some(over.registrar.sleep_and_suspend(&over.communicator, pool, contents)?))
    }

    /// Suspends the communicators of sleeping pools, on all ranks. Skips a pool if an awake pool uses one of its communicators. Returns the
    /// bytes that NCCL released.
    ///
    /// The choice follows from the registrations and the phases of pools, which are the same on all ranks.
    pub(crate) fn suspend(&self, is_asleep: impl Fn(PoolId) -> bool) -> Result<u64, Error> {
        let all = self.open.all();
        let comms_of = |pool: PoolId| -> BTreeSet<usize> {
            all.iter().filter(|open| open.pool == pool).map(|open| open.address).collect()
        };
        let in_use: BTreeSet<usize> =
            all.iter().filter(|open| !is_asleep(open.pool)).map(|open| open.address).collect();
        let mut pools: Vec<PoolId> = Vec::new();
        for open in &all {
            // Skips pools whose communicators are suspended, so that a second call has nothing to do.
            let is_suspended =
                || Ok::<_, Error>(self.over(open.pool)?.is_some_and(|over| over.communicator.is_suspended()));
            if !pools.contains(&open.pool) && comms_of(open.pool).is_disjoint(&in_use) && !is_suspended()? {
                pools.push(open.pool);
            }
        }
        // Pools that share a communicator resume and suspend it again, so the sum of their bytes would count it twice.
        let suspended_bytes = || -> u64 {
            let distinct: BTreeMap<usize, u64> =
                all.iter().filter_map(|open| Some((open.address, open.communicator.suspended_bytes()?))).collect();
            distinct.values().sum()
        };
        let (before, mut done) = (suspended_bytes(), BTreeSet::new());
        for pool in pools {
            let comms = comms_of(pool);
            if !comms.is_subset(&done) {
                // The argument has no effect, because the contents were decided when the pool fell asleep.
                self.sleep_and_suspend(pool, Contents::Drop)?;
                done.extend(comms);
            }
        }
        Ok(suspended_bytes().saturating_sub(before))
    }

    /// Returns the bytes that NCCL holds for the communicators, if it reports them.
    pub(crate) fn held_bytes(&self) -> u64 {
        let comms: Vec<Communicator> = self.open.all().iter().map(|open| open.communicator.clone()).collect();
        Communicator::held_bytes(&comms)
    }

    /// Wakes a pool on all ranks of its communicators. Returns `None` if the pool has no communicators.
    pub(crate) fn wake(&self, pool: PoolId) -> Result<Option<Woken>, Error> {
        let Some(over) = self.over(pool)? else { return Ok(None) };
        Ok(Some(over.registrar.wake(&over.communicator, pool)?))
    }

    /// Returns the communicator for a pool's collective operations: the one with the most ranks. If several have the most ranks, it is the
    /// one that was registered last, because an earlier one may have failed. The choice is the same on every rank.
    fn over(&self, pool: PoolId) -> Result<Option<Arc<OpenRegistration>>, Error> {
        let of_pool: SmallVec<[Arc<OpenRegistration>; 4]> = self.open.of(pool);
        let over = of_pool.iter().max_by_key(|registration| registration.communicator.ranks());
        let mut names: SmallVec<[&str; 4]> =
            of_pool.iter().map(|registration| registration.communicator.name()).collect();
        names.sort_unstable();
        // Ranks identify a borrowed communicator only by its name.
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(Error::SameName { pool: pool.0, name: pair[0].to_owned() }),
            None => Ok(over.map(Arc::clone)),
        }
    }
}

impl OpenRegistrations {
    fn of(&self, pool: PoolId) -> SmallVec<[Arc<OpenRegistration>; 4]> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|registration| registration.pool == pool).map(Arc::clone).collect()
    }

    fn all(&self) -> Vec<Arc<OpenRegistration>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, registration: &Arc<OpenRegistration>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(registration));
    }

    fn remove(&self, registration: &Arc<OpenRegistration>) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| !Arc::ptr_eq(other, registration));
    }
}

/// A pool on a communicator.
struct OpenRegistration {
    registrar: Arc<Registrar>,
    communicator: Communicator,
    /// Address of the `ncclComm_t`, which other registrations may borrow, too.
    address: usize,
    pool: PoolId,
}

impl OpenRegistration {
    fn sync(&self) -> Result<SyncCounts, SyncError> {
        self.registrar.sync(&[&self.communicator]).map(SyncCounts::from)
    }

    fn agree(&self) -> Result<SyncCounts, SyncError> {
        self.registrar.agree(&[&self.communicator]).map(SyncCounts::from)
    }
}

/// An announced collective that the program submits itself.
pub struct RankAnnouncement {
    _open: Announcement,
}

/// The registration of one pool on one communicator.
pub struct PoolRegistration {
    of: Arc<OpenRegistration>,
    all: Arc<OpenRegistrations>,
}

impl PoolRegistration {
    /// Attaches a pool. The first sync registers its segments.
    ///
    /// # Safety
    /// `communicator` is a live `ncclComm_t` of the NCCL library of this process, ready, and on the allocator's device. It
    /// outlives the returned registration, and no other code calls NCCL with it while a method of the registration runs.
    pub(crate) unsafe fn new(
        registrations: &Registrations,
        pool: PoolId,
        communicator: *mut c_void,
        options: &RegistrationOptions<'_>,
    ) -> Result<Self, Error> {
        let builder = Communicator::builder(registrations.allocator.device());
        let builder = builder.name(options.name.unwrap_or("borrowed")).deadline(options.deadline);
        let builder = options.rendezvous.into_iter().fold(builder, CommunicatorBuilder::rendezvous);
        let address = communicator.addr();
        // SAFETY: the caller's contract.
        let communicator = unsafe { builder.borrow(communicator) }?;
        if let Some((rank, world)) = options.rank_and_world {
            check(
                "rank",
                rank,
                communicator.rank(),
                "the value that NCCL reports; the communicator may belong to another group",
            )?;
            check(
                "world",
                world,
                communicator.ranks(),
                "the value that NCCL reports; the communicator may belong to another group",
            )?;
        }
        let registrar = Arc::clone(registrations.registrar()?);
        registrar.attach(&communicator, &[pool], options.attachment)?;
        let of = Arc::new(OpenRegistration { registrar, communicator, address, pool });
        registrations.open.add(&of);
        Ok(PoolRegistration { of, all: Arc::clone(&registrations.open) })
    }

    /// Registers new segments and deregisters released ones, on every rank of the communicator.
    pub(crate) fn sync(&self) -> Result<SyncCounts, Error> {
        Ok(self.of.sync()?)
    }

    /// Syncs like [`sync`](Self::sync), and also compares the ranks' histories.
    pub(crate) fn agree(&self) -> Result<SyncCounts, Error> {
        Ok(self.of.agree()?)
    }

    /// Returns this rank, and the number of ranks.
    pub(crate) fn rank_and_world(&self) -> (u32, u32) {
        (self.of.communicator.rank(), self.of.communicator.ranks())
    }

    /// Returns the window that contains all of these bytes.
    pub(crate) fn window_at(&self, pointer: *const c_void, size_bytes: u64) -> Result<WindowSpan, Error> {
        Ok(self.of.registrar.window_at(&self.of.communicator, pointer as u64, size_bytes)?)
    }

    /// Creates an all-to-all-v on the communicator.
    pub(crate) fn all_to_all(&self, memory: Memory, calls: Calls) -> Result<AllToAll, Error> {
        let OpenRegistration { registrar, communicator, .. } = &*self.of;
        let mut builder = AllToAll::builder(communicator);
        if memory == Memory::Registered {
            builder = builder.require_registered(registrar);
        }
        if calls == Calls::Checked {
            builder = builder.check_calls();
        }
        Ok(builder.build()?)
    }

    /// Notifies the watchdog of a collective that the program itself submits to `stream`. Keep the returned guard until the collective is
    /// submitted.
    ///
    /// # Safety
    /// `stream` belongs to the allocator's device, and lives as long as the communicator is watched.
    pub(crate) unsafe fn announce(
        &self,
        kind: &str,
        elements: Option<u64>,
        stream: *mut c_void,
    ) -> Result<RankAnnouncement, Error> {
        let communicator = &self.of.communicator;
        let raw = RawStream::new(stream).handle();
        // SAFETY: the caller's contract. Only events are recorded on the stream.
        let stream = unsafe { communicator.device().context().wrap_borrowed_stream(raw.cast()) };
        Ok(RankAnnouncement { _open: communicator.announcement(kind.to_owned(), elements, &stream)? })
    }

    /// Deregisters all segments on every rank of the communicator, and stops watching the communicator. The communicator itself is not
    /// destroyed.
    pub(crate) fn end(self) -> Result<(), Error> {
        self.all.remove(&self.of);
        let OpenRegistration { registrar, communicator, pool, .. } = &*self.of;
        let ended = match registrar.detach(communicator, &[*pool]) {
            Ok(()) => registrar.sync(&[communicator]).map(|_| ()),
            // The communicator was destroyed together with its windows.
            Err(SyncError::NotAttached { .. } | SyncError::Gone { .. }) => Ok(()),
            Err(error) => Err(error),
        };
        // Drops this process's own handle. The owner's handle stays valid.
        let left = communicator.destroy();
        registrar.sweep();
        ended?;
        Ok(left?)
    }
}

fn check(argument: &'static str, given: u32, is: u32, expected: &'static str) -> Result<(), Error> {
    if given == is { Ok(()) } else { Err(Error::Argument { argument, value: given.into(), expected }) }
}
