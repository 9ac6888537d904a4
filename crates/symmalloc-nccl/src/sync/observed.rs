//! The pools observed for one communicator, each with an observer and the log entries since the last sync.

use crate::ffi::window_flags::WindowFlags;
use crate::sync::actions::PoolEvents;
use crate::sync::error::AttachError;
use crate::sync::fold;
use crate::sync::settings::{Attachment, Registration, Synced, mode_word};
use smallvec::SmallVec;
use symmalloc_agreement::Mode;
use symmalloc_core::errors::UnknownError;
use symmalloc_core::segment_log::SegmentEvent;
use symmalloc_core::sleep::Phase;
use symmalloc_core::{ObserverId, PoolId, Unread};
use symmalloc_cuda::CudaAllocator;

/// The pools observed for one communicator.
#[derive(Default)]
pub(crate) struct ObservedPools {
    /// In ascending order of pools.
    pools: Vec<ObservedPool>,
    /// Agreement mode of the first pool that was attached for buffers, kept until no pool is left. If no pool has windows, this mode
    /// decides when ranks exchange messages. Modes of later pools do not count, because ranks may attach different pools for buffers.
    fallback_mode: Option<Mode>,
    /// Number of syncs so far.
    syncs: u32,
}

/// A pool that is observed for one communicator.
struct ObservedPool {
    pool: PoolId,
    /// Ordinal among symmetric pools; 0 for a private pool, which never appears in messages to other ranks.
    ordinal: u32,
    attachment: Attachment,
    /// Syncs since the pool was attached: equal on all ranks that attached it.
    syncs: u32,
    observer: ObserverId,
    /// Segments that were live when the pool was attached. Empty after the first sync.
    births: Vec<SegmentEvent>,
    /// Number of entries of the pool's log that syncs have processed.
    seen: u64,
    /// `true` if the next sync detaches the pool.
    is_leaving: bool,
}

/// A pool's log, as read by a sync.
pub(crate) struct LogSnapshot {
    /// Number of entries in the log.
    entries: u64,
    unread: Unread,
    /// `true` if the pool sleeps: nothing is registered until it wakes.
    is_asleep: bool,
}

impl ObservedPools {
    /// Starts to observe these pools. After an error, none of them is observed.
    pub(crate) fn observe(
        &mut self,
        allocator: &CudaAllocator,
        communicator: &str,
        pools: &[PoolId],
        attachment: Attachment,
    ) -> Result<(), AttachError> {
        let mut added: SmallVec<[ObservedPool; 4]> = SmallVec::new();
        for &pool in pools {
            let is_known = |observed: &ObservedPool| observed.pool == pool;
            let observed = if self.pools.iter().any(is_known) || added.iter().any(is_known) {
                Err(AttachError::Already { pool, communicator: communicator.to_owned() })
            } else {
                ObservedPool::new(allocator, pool, attachment).map_err(AttachError::from)
            };
            match observed {
                Ok(observed) => added.push(observed),
                Err(error) => {
                    for observed in added {
                        // No segment was released since the pool was first observed, so the release cannot fail.
                        let _released = allocator.core().forget(observed.observer);
                    }
                    return Err(error);
                }
            }
        }
        if attachment.registration == Registration::Buffers && !added.is_empty() {
            self.fallback_mode.get_or_insert(attachment.agreement);
        }
        self.pools.extend(added);
        self.pools.sort_by_key(|observed| observed.pool);
        Ok(())
    }

    /// Returns the kind of registration for which a pool is observed, or `None` if it is not observed.
    pub(crate) fn registration_of(&self, pool: PoolId) -> Option<Registration> {
        self.pools.iter().find(|observed| observed.pool == pool).map(|observed| observed.attachment.registration)
    }

    /// Returns the pools that are observed for this kind of registration.
    pub(crate) fn of(&self, registration: Registration) -> impl Iterator<Item = PoolId> {
        let of_kind = self.pools.iter().filter(move |observed| observed.attachment.registration == registration);
        of_kind.map(|observed| observed.pool)
    }

    /// Returns all observed pools.
    pub(crate) fn all(&self) -> impl Iterator<Item = PoolId> {
        self.pools.iter().map(|observed| observed.pool)
    }

    /// Returns when the ranks compare the histories of a pool.
    pub(crate) fn agreement_of(&self, pool: PoolId) -> Mode {
        self.pools
            .iter()
            .find(|observed| observed.pool == pool)
            .map_or(Mode::Off, |observed| observed.attachment.agreement)
    }

    /// Counts a sync. Returns the pools whose histories the ranks compare in this sync. The list is empty if the ranks only check that they
    /// sync at the same point. Returns `None` if they exchange no messages for either purpose.
    pub(crate) fn count_sync(&mut self) -> Option<SmallVec<[PoolId; 4]>> {
        self.syncs = self.syncs.wrapping_add(1);
        let mut compared = None;
        let mut has_windows = false;
        for observed in self.pools.iter_mut().filter(|observed| observed.has_windows()) {
            has_windows = true;
            observed.syncs = observed.syncs.wrapping_add(1);
            if observed.attachment.agreement.compares_at_sync(observed.syncs) {
                compared.get_or_insert_with(SmallVec::new).push(observed.pool);
            }
        }
        let fallback = self.fallback_mode.filter(|_| !has_windows);
        if fallback.is_some_and(|mode| mode.compares_at_sync(self.syncs)) { Some(SmallVec::new()) } else { compared }
    }

    /// Returns the agreement modes as a word, for comparison across ranks.
    pub(crate) fn mode_word(&self) -> u64 {
        let windows = self.pools.iter().filter(|observed| observed.has_windows());
        let mut words = windows.map(|observed| mode_word(observed.attachment.agreement));
        let first = words.next().unwrap_or_else(|| mode_word(self.fallback_mode.unwrap_or(Mode::Off)));
        // If all pools have the same mode, the word is the number of that mode, which is readable in a report of a difference.
        words.filter(|word| *word != first).fold(first, fold)
    }

    /// Marks a pool for detachment at the next sync. Returns `true` if it was observed.
    pub(crate) fn leave(&mut self, pool: PoolId) -> bool {
        let found = self.pools.iter_mut().find(|observed| observed.pool == pool);
        found.map(|observed| observed.is_leaving = true).is_some()
    }

    /// Returns `true` if there is nothing to read: no log has grown, and no pool is being detached.
    #[inline]
    pub(crate) fn has_no_changes(&self, allocator: &CudaAllocator) -> bool {
        let has_no_changes = |observed: &ObservedPool| {
            let has_no_changes = || allocator.core().segment_log_entries(observed.pool) == observed.seen;
            !observed.is_leaving && (has_no_changes() || !is_awake(allocator, observed.pool))
        };
        self.pools.iter().all(has_no_changes)
    }

    /// Returns the observers, which retain the memory of dead segments.
    pub(crate) fn into_observers(self) -> Vec<ObserverId> {
        self.pools.into_iter().map(|observed| observed.observer).collect()
    }

    /// Reads the logs of all pools, in order. The entries remain unread until they are [acknowledged](Self::acknowledge), so a sync that
    /// fails before then has no effect on the entries.
    pub(crate) fn read(&self, allocator: &CudaAllocator) -> Vec<LogSnapshot> {
        let core = allocator.core();
        let read = |observed: &ObservedPool| {
            // The count is read before the log, so that the next sync detects entries that are added in between.
            let entries = core.segment_log_entries(observed.pool);
            let is_asleep = !observed.is_leaving && !is_awake(allocator, observed.pool);
            LogSnapshot { entries, unread: core.unread(observed.observer), is_asleep }
        };
        self.pools.iter().map(read).collect()
    }

    /// Returns the events of the pools that are attached for this kind of registration. Skips pools that sleep.
    pub(crate) fn events(&self, snapshots: &[LogSnapshot], registration: Registration) -> PoolEvents {
        let mut pools = PoolEvents::default();
        for (observed, snapshot) in self.pools.iter().zip(snapshots) {
            if observed.attachment.registration == registration && !snapshot.is_asleep {
                pools.events.extend(observed.births.iter().chain(&snapshot.unread.events));
                pools.leaving.extend(observed.is_leaving.then_some(observed.pool));
            }
        }
        pools
    }

    pub(crate) fn ordinal(&self, pool: PoolId) -> u32 {
        self.pools.iter().find(|observed| observed.pool == pool).map_or(0, |observed| observed.ordinal)
    }

    /// Returns the flags of a pool's windows.
    pub(crate) fn flags(&self, pool: PoolId) -> WindowFlags {
        self.pools
            .iter()
            .find(|observed| observed.pool == pool)
            .map_or(WindowFlags::NONE, |observed| observed.attachment.flags)
    }

    /// Returns a digest of the symmetric pools that are attached for windows, of the windows' flags, and of which pools are being detached.
    pub(crate) fn digest(&self) -> u64 {
        let pools = self.pools.iter().filter(|observed| observed.has_windows());
        pools.fold(0, |digest, observed| {
            let flags = (observed.attachment.flags.raw() as u64) << 40;
            fold(digest, flags | (u64::from(observed.ordinal) << 1) | u64::from(observed.is_leaving))
        })
    }

    /// Acknowledges all entries that were read. The allocator then releases dead memory that no other observer retains.
    pub(crate) fn acknowledge(&mut self, allocator: &CudaAllocator, snapshots: Vec<LogSnapshot>, synced: &mut Synced) {
        let core = allocator.core();
        for (observed, LogSnapshot { entries, unread, is_asleep }) in self.pools.iter_mut().zip(snapshots) {
            if is_asleep {
                continue;
            }
            observed.births.clear();
            observed.seen = entries;
            let outcome = if observed.is_leaving {
                core.forget(observed.observer)
            } else {
                core.acknowledge(observed.observer, &unread)
            };
            match outcome {
                Ok(released_bytes) => synced.released_bytes += released_bytes,
                Err(error) => {
                    tracing::warn!(name: "sync.memory_kept", target: "symmalloc", %error);
                    synced.not_released.get_or_insert(error);
                }
            }
        }
        self.pools.retain(|observed| !observed.is_leaving);
        if self.pools.is_empty() {
            self.fallback_mode = None;
        }
    }
}

fn is_awake(allocator: &CudaAllocator, pool: PoolId) -> bool {
    allocator.core().phase(pool).is_ok_and(|phase| phase == Phase::Awake)
}

impl ObservedPool {
    fn has_windows(&self) -> bool {
        self.attachment.registration == Registration::Windows
    }

    fn new(allocator: &CudaAllocator, pool: PoolId, attachment: Attachment) -> Result<Self, UnknownError> {
        let core = allocator.core();
        let seen = core.segment_log_entries(pool);
        let (observer, births) = core.observe(pool)?;
        Ok(ObservedPool {
            pool,
            ordinal: core.symmetric_ordinal(pool).unwrap_or(0),
            attachment,
            syncs: 0,
            observer,
            // The maximum forces the first sync to read the log if there are births.
            seen: if births.is_empty() { seen } else { u64::MAX },
            births,
            is_leaving: false,
        })
    }
}
