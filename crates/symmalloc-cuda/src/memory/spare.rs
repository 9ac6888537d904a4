//! Release of prefetched memory when the device is full.
//!
//! Spare memory belongs to no allocation yet, but it occupies the device. When the driver is out of memory, all spare memory of the process
//! on this device is released, prefetching pauses, and the request is retried. No request of this process therefore fails because of spare
//! memory. Requests that other processes or libraries make to the driver can still fail.

use crate::device::CudaDevice;
use crate::error::{DriverError, OUT_OF_MEMORY};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Memory that can be prefetched.
pub(super) trait Prefetched: Send + Sync {
    fn is_on(&self, device: &CudaDevice) -> bool;
    /// Pauses prefetching until [`resume`](Self::resume) is called and memory has been released.
    fn pause(&self);
    fn resume(&self);
    /// Releases all prefetched memory, and stops prefetching for its ranges until they grow. Returns the number of bytes released.
    fn release_prefetched(&self) -> u64;
}

/// The sources of prefetched memory in this process.
static PREFETCHED: Mutex<Vec<Weak<dyn Prefetched>>> = Mutex::new(Vec::new());

fn prefetched() -> MutexGuard<'static, Vec<Weak<dyn Prefetched>>> {
    PREFETCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers `memory` as a source that [`with_spare`] can release, until `memory` is dropped.
pub(super) fn announce(memory: &Arc<impl Prefetched + 'static>) {
    let memory: Arc<dyn Prefetched> = memory.clone();
    let mut all = prefetched();
    all.retain(|memory| memory.strong_count() > 0);
    all.push(Arc::downgrade(&memory));
}

/// Attempts to allocate device memory, and retries after releasing spare memory if the device is full. The caller must not hold the lock of
/// a range.
pub(super) fn with_spare<T>(
    device: &CudaDevice,
    mut attempt: impl FnMut() -> Result<T, DriverError>,
) -> Result<T, DriverError> {
    let outcome = attempt();
    if !matches!(outcome, Err(DriverError { code: OUT_OF_MEMORY, .. })) {
        return outcome;
    }
    let mut owners: Vec<Arc<dyn Prefetched>> = prefetched().iter().filter_map(Weak::upgrade).collect();
    owners.retain(|owner| owner.is_on(device));
    if owners.is_empty() {
        return outcome;
    }
    owners.iter().for_each(|owner| owner.pause());
    let released_bytes: u64 = owners.iter().map(|owner| owner.release_prefetched()).sum();
    tracing::debug!(name: "memory.spare_released", target: "symmalloc", released_bytes);
    let outcome = attempt();
    owners.iter().for_each(|owner| owner.resume());
    outcome
}
