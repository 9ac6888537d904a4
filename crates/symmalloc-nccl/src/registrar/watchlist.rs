//! The pools observed for one communicator, each with an observer and the log entries since the last sync.

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
    /// In ascending order of pools.
    pools: Vec<WatchedPool>,
}

/// A pool that is observed for one communicator.
struct WatchedPool {
    pool: PoolId,
    /// Ordinal among symmetric pools; 0 for a private pool, which is never mentioned to other ranks.
    ordinal: u32,
    registration: Registration,
    observer: ObserverId,
    /// Segments that were live when the pool was attached. Empty after the first sync.
    births: Vec<SegmentEvent>,
    /// Entries of the pool's log that syncs have processed.
    seen: u64,
    /// Set if the next sync detaches the pool.
    is_leaving: bool,
}

/// A pool's log, as read by a sync.
pub(super) struct Reading {
    /// Number of entries in the log.
    entries: u64,
    unread: Unread,
    /// Set if the pool sleeps: nothing is registered until it wakes.
    is_asleep: bool,
}

/// Changes since the last sync to the pools of one registration kind.
pub(super) struct News {
    pub(super) events: Vec<SegmentEvent>,
    pub(super) leaving: Vec<PoolId>,
}

impl Watchlist {
    /// Starts to observe these pools, all of them or none.
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
                        // No segment was released since the pool was first observed, so the release cannot fail.
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

    /// Returns how a pool is observed, or `None`.
    pub(super) fn registration_of(&self, pool: PoolId) -> Option<Registration> {
        self.pools.iter().find(|watched| watched.pool == pool).map(|watched| watched.registration)
    }

    /// Returns the pools that are observed for this kind of registration.
    pub(super) fn of(&self, registration: Registration) -> impl Iterator<Item = PoolId> {
        self.pools.iter().filter(move |watched| watched.registration == registration).map(|watched| watched.pool)
    }

    /// Returns all observed pools.
    pub(super) fn all(&self) -> impl Iterator<Item = PoolId> {
        self.pools.iter().map(|watched| watched.pool)
    }

    /// Marks a pool for detachment at the next sync. Returns `true` if it was observed.
    pub(super) fn leave(&mut self, pool: PoolId) -> bool {
        let found = self.pools.iter_mut().find(|watched| watched.pool == pool);
        found.map(|watched| watched.is_leaving = true).is_some()
    }

    /// Returns `true` if there is certainly nothing to read: no log has grown, and no pool leaves.
    #[inline]
    pub(super) fn is_read(&self, allocator: &CudaAllocator) -> bool {
        let is_read = |watched: &WatchedPool| {
            let is_read = || allocator.core().segment_log_entries(watched.pool) == watched.seen;
            !watched.is_leaving && (is_read() || !is_awake(allocator, watched.pool))
        };
        self.pools.iter().all(is_read)
    }

    /// Returns the observers, which retain dead memory.
    pub(super) fn into_observers(self) -> Vec<ObserverId> {
        self.pools.into_iter().map(|watched| watched.observer).collect()
    }

    /// Reads the logs of all pools, in order. The entries remain unread until they are [acknowledged](Self::acknowledge), so a sync that
    /// fails before that has no effect on them.
    pub(super) fn read(&self, allocator: &CudaAllocator) -> Vec<Reading> {
        let core = allocator.core();
        let read = |watched: &WatchedPool| {
            // Read before the log, so that later entries are detected by the next sync.
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

    /// Returns a digest of the symmetric pools that are attached for windows, and of those that leave.
    pub(super) fn digest(&self) -> u64 {
        let pools = self.pools.iter().filter(|watched| watched.registration == Registration::Windows);
        pools.fold(0, |digest, watched| fold(digest, (u64::from(watched.ordinal) << 1) | u64::from(watched.is_leaving)))
    }

    /// Acknowledges all entries that were read. Memory without remaining observers is released.
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
            // If there are births, forces the first sync to read the log.
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

    /// Returns `true` if the changes include a deregistration of memory that work on the device may use.
    pub(super) fn takes_away(&self) -> bool {
        !self.leaving.is_empty() || self.events.iter().any(|event| event.kind == SegmentEventKind::Death)
    }

    pub(super) fn dies(&self, segment: Generation) -> bool {
        self.events.iter().any(|event| event.kind == SegmentEventKind::Death && generation(event) == segment)
    }
}
