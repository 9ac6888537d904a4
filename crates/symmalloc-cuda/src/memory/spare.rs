//! Memory that was made ahead, when the device has none left.
//!
//! Spare memory is nobody's, but the device counts it. So nobody is told that there is none left while there is some to
//! spare: a request that the driver refuses for want of memory is made again once all spare memory of the process on this device
//! went back, and while none is made.
//!
//! ```text
//!  attempt ── refused ── no more is made ── spare memory goes back ── attempt ── its outcome
//! ```
//!
//! What another process or library asks for is not seen here.

use super::Virtual;
use crate::device::CudaDevice;
use crate::error::{DriverError, OUT_OF_MEMORY};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Who makes memory ahead in this process.
static MAKERS: Mutex<Vec<Weak<Virtual>>> = Mutex::new(Vec::new());

fn makers() -> MutexGuard<'static, Vec<Weak<Virtual>>> {
    MAKERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes known that this memory may have some to spare, until it is dropped.
pub(crate) fn announce(memory: &Arc<Virtual>) {
    let mut makers = makers();
    makers.retain(|maker| maker.strong_count() > 0);
    makers.push(Arc::downgrade(memory));
}

/// Attempts what takes device memory, a second time where spare memory may have been in its way. The caller holds no lock of a
/// range.
pub(crate) fn with_spare<T>(
    device: &CudaDevice,
    mut attempt: impl FnMut() -> Result<T, DriverError>,
) -> Result<T, DriverError> {
    let outcome = attempt();
    if !matches!(outcome, Err(DriverError { code: OUT_OF_MEMORY, .. })) {
        return outcome;
    }
    let makers: Vec<Arc<Virtual>> = makers().iter().filter_map(Weak::upgrade).collect();
    let makers: Vec<&Arc<Virtual>> = makers.iter().filter(|maker| maker.is_on(device)).collect();
    if makers.is_empty() {
        return outcome;
    }
    let _none_is_made: Vec<_> = makers.iter().map(|maker| maker.hold_off()).collect();
    let released_bytes: u64 = makers.iter().map(|maker| maker.release_ahead()).sum();
    tracing::debug!(name: "memory.spare_released", target: "symmalloc", released_bytes);
    attempt()
}
