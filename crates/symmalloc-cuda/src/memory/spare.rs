//! Memory that was made ahead of growth, when the device has none left.
//!
//! No allocation has spare memory yet, but the device counts it. So no request fails while there is spare memory: when the
//! driver refuses memory, all spare memory of the process on this device goes back, prefetching pauses, and the request is
//! made again. What another process or library asks for is not seen here.

use crate::device::CudaDevice;
use crate::error::{DriverError, OUT_OF_MEMORY};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Memory that is made ahead of growth.
pub(super) trait Prefetched: Send + Sync {
    fn is_on(&self, device: &CudaDevice) -> bool;
    /// Nothing is made ahead until [`resume`](Self::resume), and until memory went back.
    fn pause(&self);
    fn resume(&self);
    /// Gives everything back that is ahead. Nothing is wanted there until ranges grow. Returns the bytes.
    fn release_prefetched(&self) -> u64;
}

/// The memory in this process that is made ahead.
static PREFETCHED: Mutex<Vec<Weak<dyn Prefetched>>> = Mutex::new(Vec::new());

fn prefetched() -> MutexGuard<'static, Vec<Weak<dyn Prefetched>>> {
    PREFETCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets [`with_spare`] find this memory until it is dropped.
pub(super) fn announce(memory: &Arc<impl Prefetched + 'static>) {
    let memory: Arc<dyn Prefetched> = memory.clone();
    let mut all = prefetched();
    all.retain(|memory| memory.strong_count() > 0);
    all.push(Arc::downgrade(&memory));
}

/// Tries to take device memory, a second time where spare memory may have been in the way. The caller holds no lock of a range.
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
