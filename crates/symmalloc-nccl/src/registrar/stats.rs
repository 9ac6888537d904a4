//! What a registrar did and has.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a [`Registrar`](crate::Registrar) over all of its communicators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegistrarStats {
    /// Live communicators that pools are attached to.
    pub communicators: u64,
    /// Calls of `sync`.
    pub syncs: u64,
    /// Those that found nothing to do and made no collective.
    pub quiet_syncs: u64,
    /// Collectives of syncs.
    pub rounds: u64,
    /// Windows and buffers that were registered.
    pub registrations: u64,
    /// Windows and buffers that were deregistered; those that went with their communicators do not count.
    pub deregistrations: u64,
    /// Syncs that ended a communicator.
    pub failures: u64,
    /// Live windows.
    pub windows: u64,
    /// Bytes of live windows: a segment counts once per communicator.
    pub window_bytes: u64,
    /// Live registrations of buffers.
    pub buffers: u64,
    /// Bytes of dead segments that are not back on the device: some communicator has not deregistered them, or the driver did
    /// not take them.
    pub dead_bytes: u64,
}

/// What a registrar has on one communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommunicatorStats {
    /// Live windows.
    pub windows: u64,
    /// Bytes of live windows.
    pub window_bytes: u64,
    /// Live registrations of buffers.
    pub buffers: u64,
    /// Bytes of the symmetric address space that windows and NCCL itself have; 0 before the first window.
    pub space_used_bytes: u64,
    /// Bytes of the symmetric address space; 0 before the first window.
    pub space_budget_bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) syncs: AtomicCounter,
    pub(crate) quiet_syncs: AtomicCounter,
    pub(crate) rounds: AtomicCounter,
    pub(crate) registrations: AtomicCounter,
    pub(crate) deregistrations: AtomicCounter,
    pub(crate) failures: AtomicCounter,
}

/// A number that threads add to.
#[derive(Debug, Default)]
pub(crate) struct AtomicCounter(AtomicU64);

impl AtomicCounter {
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
