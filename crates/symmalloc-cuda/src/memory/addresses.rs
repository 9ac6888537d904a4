//! Sources of addresses for ranges: one driver reservation per range, or parts of a single reservation in descending order.
//!
//! ```text
//!  base                                          end
//!   ├──────────── free ────────────┬─ 3rd ─┬─2nd┬─1st─┤
//! ```
//!
//! The second source reverses the order of addresses. If one rank runs a program with the driver's addresses and another rank runs it with
//! reversed ones, any difference in behavior comes from code that depends on addresses.

use crate::device::CudaDevice;
use crate::error::{DriverError, INVALID_VALUE, OUT_OF_MEMORY};
use cudarc::driver::sys::CUdeviceptr;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A source of addresses. The caller has entered the device's context.
pub(crate) enum AddressSource {
    /// Reserves each range separately.
    Driver(Arc<CudaDevice>),
    /// Allocates parts of one reservation, the highest first.
    Descending(Descending),
}

impl AddressSource {
    pub(crate) fn reserve(&self, size_bytes: u64, alignment_bytes: u64) -> Result<u64, DriverError> {
        match self {
            AddressSource::Driver(device) => reserve(device, size_bytes, alignment_bytes),
            AddressSource::Descending(space) => space.take(size_bytes),
        }
    }

    pub(crate) fn free(&self, base: u64, size_bytes: u64) -> Result<(), DriverError> {
        match self {
            // SAFETY: reserved with this size, and by the contract of `BackendMemory` nothing is mapped there anymore.
            AddressSource::Driver(device) => unsafe { device.driver().address_free(base, size_bytes as usize) },
            AddressSource::Descending(space) => space.give_back(base),
        }
    }
}

fn reserve(device: &CudaDevice, size_bytes: u64, alignment_bytes: u64) -> Result<u64, DriverError> {
    let mut base: CUdeviceptr = 0;
    // SAFETY: `base` is valid for writing.
    unsafe {
        device.driver().address_reserve(&raw mut base, size_bytes as usize, alignment_bytes as usize, 0, 0)?;
    }
    Ok(base)
}

/// One reservation whose parts are allocated from its end.
pub(crate) struct Descending {
    device: Arc<CudaDevice>,
    base: u64,
    size_bytes: u64,
    /// Parts in use, as start to end; disjoint.
    taken: Mutex<BTreeMap<u64, u64>>,
}

impl Descending {
    pub(crate) fn new(device: Arc<CudaDevice>, size_bytes: u64, alignment_bytes: u64) -> Result<Self, DriverError> {
        let base = {
            let _current = device.enter()?;
            let _relaxed = device.driver().relax_capture();
            reserve(&device, size_bytes, alignment_bytes)?
        };
        Ok(Descending { device, base, size_bytes, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates the highest free part of this size.
    fn take(&self, size_bytes: u64) -> Result<u64, DriverError> {
        let mut taken = self.taken();
        let mut end = self.base + self.size_bytes;
        for (&start, &after) in taken.iter().rev() {
            if end - after >= size_bytes {
                break;
            }
            end = start;
        }
        match end.checked_sub(size_bytes).filter(|start| *start >= self.base) {
            Some(start) => {
                taken.insert(start, end);
                Ok(start)
            }
            None => Err(DriverError { call: "cuMemAddressReserve", code: OUT_OF_MEMORY }),
        }
    }

    fn give_back(&self, base: u64) -> Result<(), DriverError> {
        let error = DriverError { call: "cuMemAddressFree", code: INVALID_VALUE };
        self.taken().remove(&base).map(|_| ()).ok_or(error)
    }
}

impl Drop for Descending {
    fn drop(&mut self) {
        let freed = self.device.enter().and_then(|_current| {
            let _relaxed = self.device.driver().relax_capture();
            // SAFETY: reserved with this size. If a range was not returned, the call fails.
            unsafe { self.device.driver().address_free(self.base, self.size_bytes as usize) }
        });
        if let Err(error) = freed {
            tracing::warn!(name: "memory.addresses_kept", target: "symmalloc", size_bytes = self.size_bytes, %error);
        }
    }
}
