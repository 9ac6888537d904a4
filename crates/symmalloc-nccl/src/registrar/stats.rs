//! Statistics of a registrar.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a [`Registrar`](crate::Registrar) over all of its communicators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegistrarStats {
    /// Live communicators that pools are attached to.
    pub communicators: u64,
    /// Calls of `sync`.
    pub syncs: u64,
    /// Syncs that found nothing to do and ran no collective.
    pub quiet_syncs: u64,
    /// Collectives run by syncs.
    pub rounds: u64,
    /// Windows and buffers that were registered.
    pub registrations: u64,
    /// Windows and buffers that were deregistered, except those that ended with their communicators.
    pub deregistrations: u64,
    /// Syncs that ended a communicator.
    pub failures: u64,
    /// Live windows.
    pub windows: u64,
    /// Bytes of live windows: a segment counts once per communicator.
    pub window_bytes: u64,
    /// Live registrations of buffers.
    pub buffers: u64,
    /// Bytes of dead segments that are not yet released to the device, because some communicator has not deregistered them or the driver
    /// failed to release them.
    pub dead_bytes: u64,
}

/// Registrations on one communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommunicatorStats {
    /// Live windows.
    pub windows: u64,
    /// Bytes of live windows.
    pub window_bytes: u64,
    /// Live registrations of buffers.
    pub buffers: u64,
    /// Bytes of the symmetric address space in use by windows and NCCL itself; 0 before the first window.
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

/// A counter that several threads can increment.
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
