//! The pools that are watched for one communicator: an observer each, and what their logs say since the last sync.

use crate::registrar::error::AttachError;
use crate::registrar::plan::{fold, generation};
use crate::registrar::segment_key::Generation;
use crate::registrar::settings::{Registration, Synced};
use smallvec::SmallVec;
use symmalloc_core::errors::UnknownError;
use symmalloc_core::segment_log::{SegmentEvent, SegmentEventKind};
use symmalloc_core::sleep::Phase;
use symmalloc_core::{ObserverId, PoolId, Unread};
use symmalloc_cuda::CudaAllocator;

#[derive(Default)]
pub(super) struct Watchlist {
    /// Ascending by pool.
    pools: Vec<WatchedPool>,
}

/// A pool that is watched for one communicator.
struct WatchedPool {
    pool: PoolId,
    /// Among symmetric pools; 0 for a private one, which no other rank hears of.
    ordinal: u32,
    registration: Registration,
    observer: ObserverId,
    /// The segments that lived when it was attached, until the first sync.
    births: Vec<SegmentEvent>,
    /// Entries of the pool's log that syncs have dealt with.
    seen: u64,
    /// It is to be let go of at the next sync.
    is_leaving: bool,
}

/// A pool's log as a sync found it.
pub(super) struct Reading {
    /// Entries of the log.
    entries: u64,
    unread: Unread,
    /// The pool sleeps: nothing is registered until it wakes.
    is_asleep: bool,
}

/// What happened to the pools of one kind since the last sync.
pub(super) struct News {
    pub(super) events: Vec<SegmentEvent>,
    pub(super) leaving: Vec<PoolId>,
}

impl Watchlist {
    /// Watches pools from now on; all of them or none.
    pub(super) fn watch(
        &mut self,
        allocator: &CudaAllocator,
        communicator: &str,
        pools: &[PoolId],
        registration: Registration,
    ) -> Result<(), AttachError> {
        let mut added: SmallVec<[WatchedPool; 4]> = SmallVec::new();
        for &pool in pools {
            let is_known = |watched: &WatchedPool| watched.pool == pool;
            let watched = if self.pools.iter().any(is_known) || added.iter().any(is_known) {
                Err(AttachError::Already { pool, communicator: communicator.to_owned() })
            } else {
                WatchedPool::new(allocator, pool, registration).map_err(AttachError::from)
            };
            match watched {
                Ok(watched) => added.push(watched),
                Err(error) => {
                    for watched in added {
                        // Nothing died since it began to watch, so there is nothing that could fail to go back.
                        let _released = allocator.core().forget(watched.observer);
                    }
                    return Err(error);
                }
            }
        }
        self.pools.extend(added);
        self.pools.sort_by_key(|watched| watched.pool);
        Ok(())
    }

    /// How a pool is watched, if it is.
    pub(super) fn registration_of(&self, pool: PoolId) -> Option<Registration> {
        self.pools.iter().find(|watched| watched.pool == pool).map(|watched| watched.registration)
    }

    /// The pools that are watched so.
    pub(super) fn of(&self, registration: Registration) -> impl Iterator<Item = PoolId> {
        self.pools.iter().filter(move |watched| watched.registration == registration).map(|watched| watched.pool)
    }

    /// All pools that are watched.
    pub(super) fn all(&self) -> impl Iterator<Item = PoolId> {
        self.pools.iter().map(|watched| watched.pool)
    }

    /// Lets go of a pool at the next sync. Whether it was watched.
    pub(super) fn leave(&mut self, pool: PoolId) -> bool {
        let found = self.pools.iter_mut().find(|watched| watched.pool == pool);
        found.map(|watched| watched.is_leaving = true).is_some()
    }

    /// Whether there is certainly nothing to read: no log has grown, and no pool leaves.
    #[inline]
    pub(super) fn is_read(&self, allocator: &CudaAllocator) -> bool {
        let is_read = |watched: &WatchedPool| {
            let is_read = || allocator.core().segment_log_entries(watched.pool) == watched.seen;
            !watched.is_leaving && (is_read() || !is_awake(allocator, watched.pool))
        };
        self.pools.iter().all(is_read)
    }

    /// What keeps dead memory from going back.
    pub(super) fn into_observers(self) -> Vec<ObserverId> {
        self.pools.into_iter().map(|watched| watched.observer).collect()
    }

    /// Reads the logs of all pools, in order. They are new until they are [acknowledged](Self::acknowledge): a sync that fails
    /// before has dealt with nothing.
    pub(super) fn read(&self, allocator: &CudaAllocator) -> Vec<Reading> {
        let core = allocator.core();
        let read = |watched: &WatchedPool| {
            // Before the log is read: what comes later shows as new next time.
            let entries = core.segment_log_entries(watched.pool);
            let is_asleep = !watched.is_leaving && !is_awake(allocator, watched.pool);
            Reading { entries, unread: core.unread(watched.observer), is_asleep }
        };
        self.pools.iter().map(read).collect()
    }

    pub(super) fn news(&self, readings: &[Reading], registration: Registration) -> News {
        let mut news = News { events: Vec::new(), leaving: Vec::new() };
        for (watched, reading) in self.pools.iter().zip(readings) {
            if watched.registration == registration && !reading.is_asleep {
                news.events.extend(watched.births.iter().chain(&reading.unread.events));
                news.leaving.extend(watched.is_leaving.then_some(watched.pool));
            }
        }
        news
    }

    pub(super) fn ordinal(&self, pool: PoolId) -> u32 {
        self.pools.iter().find(|watched| watched.pool == pool).map_or(0, |watched| watched.ordinal)
    }

    /// Which symmetric pools are attached for windows, and which of them leave.
    pub(super) fn digest(&self) -> u64 {
        let pools = self.pools.iter().filter(|watched| watched.registration == Registration::Windows);
        pools.fold(0, |digest, watched| fold(digest, (u64::from(watched.ordinal) << 1) | u64::from(watched.is_leaving)))
    }

    /// Everything that was read is dealt with: memory that no observer holds any more goes back.
    pub(super) fn acknowledge(&mut self, allocator: &CudaAllocator, readings: Vec<Reading>, synced: &mut Synced) {
        let core = allocator.core();
        for (watched, Reading { entries, unread, is_asleep }) in self.pools.iter_mut().zip(readings) {
            if is_asleep {
                continue;
            }
            watched.births.clear();
            watched.seen = entries;
            let outcome = if watched.is_leaving {
                core.forget(watched.observer)
            } else {
                core.acknowledge(watched.observer, &unread)
            };
            match outcome {
                Ok(released_bytes) => synced.released_bytes += released_bytes,
                Err(error) => {
                    tracing::warn!(name: "sync.memory_kept", target: "symmalloc", %error);
                    synced.not_released.get_or_insert(error);
                }
            }
        }
        self.pools.retain(|watched| !watched.is_leaving);
    }
}

fn is_awake(allocator: &CudaAllocator, pool: PoolId) -> bool {
    allocator.core().phase(pool).is_ok_and(|phase| phase == Phase::Awake)
}

impl WatchedPool {
    fn new(allocator: &CudaAllocator, pool: PoolId, registration: Registration) -> Result<Self, UnknownError> {
        let core = allocator.core();
        let seen = core.segment_log_entries(pool);
        let (observer, births) = core.observe(pool)?;
        Ok(WatchedPool {
            pool,
            ordinal: core.symmetric_ordinal(pool).unwrap_or(0),
            registration,
            observer,
            // With births to tell of, the first sync reads the log whatever it says.
            seen: if births.is_empty() { seen } else { u64::MAX },
            births,
            is_leaving: false,
        })
    }
}

impl News {
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.leaving.is_empty()
    }

    /// Whether something that work on the device may use is to be deregistered.
    pub(super) fn takes_away(&self) -> bool {
        !self.leaving.is_empty() || self.events.iter().any(|event| event.kind == SegmentEventKind::Death)
    }

    pub(super) fn dies(&self, segment: Generation) -> bool {
        self.events.iter().any(|event| event.kind == SegmentEventKind::Death && generation(event) == segment)
    }
}
