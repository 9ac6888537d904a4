//! Memory from plain allocations: `cuMemAlloc` on a device without virtual memory, pinned host memory, or a source that the program
//! supplies.
//!
//! `reserve` allocates the memory of a whole range. This memory stays allocated until the range is released, so unmapped parts are idle
//! until then.

use super::chunks::Chunks;
use super::interface::BackendMemory;
use super::spare::with_spare;
use crate::device::CudaDevice;
use crate::driver::HOST_PORTABLE;
use crate::error::{CudaError, DriverError, INVALID_VALUE, OUT_OF_MEMORY};
use cudarc::driver::sys::CUdeviceptr;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{BackendError, DeviceAddress, Range};

/// A source of device memory that the program manages: a library's allocator, `ncclMemAlloc`, or another framework.
///
/// The methods are called with the device's context current and the relaxed capture mode set. Calls may come from any thread; calls of one
/// heap are sequential.
pub trait MemorySource: fmt::Debug + Send + Sync {
    /// Allocates device memory and returns its address, or `None` if there is no memory.
    fn allocate(&self, size_bytes: u64) -> Option<u64>;
    /// Frees memory that [`allocate`](Self::allocate) returned. No stream uses it anymore.
    fn free(&self, address: u64);
}

/// The kind of memory to allocate.
#[derive(Clone, Debug)]
pub(crate) enum AllocationKind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemHostAlloc`: page-locked for every context.
    PinnedHost,
    /// Memory from a source that the program supplies.
    Source(Arc<dyn MemorySource>),
}

pub(crate) struct DriverAllocations {
    device: Arc<CudaDevice>,
    kind: AllocationKind,
    granularity_bytes: u64,
    ranges: Mutex<BTreeMap<u64, AllocatedRange>>,
    /// Addresses of misaligned allocations that the driver did not free. The next [`reserve`](BackendMemory::reserve) retries.
    unfreed: Mutex<Vec<u64>>,
}

struct AllocatedRange {
    /// The address that the driver returned, at or before the range's base.
    allocation: u64,
    chunks: Chunks,
}

impl DriverAllocations {
    pub(crate) fn new(device: Arc<CudaDevice>, kind: AllocationKind, granularity_bytes: u64) -> Self {
        DriverAllocations { device, kind, granularity_bytes, ranges: Mutex::default(), unfreed: Mutex::default() }
    }

    fn ranges(&self) -> MutexGuard<'_, BTreeMap<u64, AllocatedRange>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unfreed(&self) -> MutexGuard<'_, Vec<u64>> {
        self.unfreed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(&self, size_bytes: u64) -> Result<u64, DriverError> {
        match &self.kind {
            AllocationKind::Source(source) => {
                let missing = DriverError { call: "MemorySource::allocate", code: OUT_OF_MEMORY };
                source.allocate(size_bytes).filter(|address| *address != 0).ok_or(missing)
            }
            AllocationKind::Device => {
                let mut address: CUdeviceptr = 0;
                // SAFETY: `address` is valid for writing, and a context is current.
                unsafe { self.device.driver().allocate(&raw mut address, size_bytes as usize) }?;
                Ok(address)
            }
            AllocationKind::PinnedHost => {
                let mut address: *mut c_void = std::ptr::null_mut();
                // SAFETY: `address` is valid for writing, and a context is current.
                unsafe { self.device.driver().host_allocate(&raw mut address, size_bytes as usize, HOST_PORTABLE) }?;
                Ok(address as u64)
            }
        }
    }

    fn free(&self, address: u64) -> Result<(), DriverError> {
        match &self.kind {
            AllocationKind::Source(source) => {
                source.free(address);
                Ok(())
            }
            // SAFETY: allocated by `allocate`, freed only once, and by the contract of `Backend` no stream uses it.
            AllocationKind::Device => unsafe { self.device.driver().free(address) },
            // SAFETY: as above.
            AllocationKind::PinnedHost => unsafe { self.device.driver().host_free(address as *mut c_void) },
        }
    }

    /// Returns the address of an allocation, and the aligned base address within it.
    fn allocate_aligned(&self, size_bytes: u64) -> Result<(u64, u64), DriverError> {
        let allocation = self.allocate(size_bytes)?;
        if allocation.is_multiple_of(self.granularity_bytes) {
            return Ok((allocation, allocation));
        }
        // Not aligned: allocate an additional granule, and skip the bytes before the boundary.
        if let Err(error) = self.free(allocation) {
            self.unfreed().push(allocation);
            return Err(error);
        }
        let allocation = self.allocate(size_bytes.saturating_add(self.granularity_bytes))?;
        Ok((allocation, allocation.next_multiple_of(self.granularity_bytes)))
    }

    fn change<T>(
        &self,
        range: Range,
        call: &'static str,
        change: impl FnOnce(&mut Chunks) -> T,
    ) -> Result<T, BackendError> {
        let mut ranges = self.ranges();
        let found = ranges.get_mut(&range.base.0).ok_or(DriverError { call, code: INVALID_VALUE })?;
        Ok(change(&mut found.chunks))
    }
}

impl BackendMemory for DriverAllocations {
    fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        self.unfreed().retain(|allocation| self.free(*allocation).is_err());
        let (allocation, base) = match &self.kind {
            AllocationKind::Device | AllocationKind::Source(_) => {
                with_spare(&self.device, || self.allocate_aligned(size_bytes))
            }
            AllocationKind::PinnedHost => self.allocate_aligned(size_bytes),
        }?;
        let mut chunks = Chunks::default();
        chunks.add_chunk(&(0..size_bytes));
        self.ranges().insert(base, AllocatedRange { allocation, chunks });
        Ok(Range { base: DeviceAddress(base), size_bytes })
    }

    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.change(range, "map", |chunks| chunks.map(&(offset_bytes..offset_bytes + size_bytes)))
    }

    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.change(range, "unmap", |chunks| chunks.unmap(&(offset_bytes..offset_bytes + size_bytes)))
    }

    fn release(&self, range: Range) -> Result<(), BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        // Remove the range first: once the driver has the memory back, it may return the same address to another thread's `reserve`.
        let removed = self.ranges().remove(&range.base.0);
        let removed = removed.ok_or(DriverError { call: "release", code: INVALID_VALUE })?;
        let freed = self.free(removed.allocation);
        if freed.is_err() {
            self.ranges().insert(range.base.0, removed);
        }
        Ok(freed?)
    }

    fn grant_access(&self, peer: usize) -> Result<(), CudaError> {
        let ordinal = self.device.ordinal();
        if peer == ordinal { Ok(()) } else { Err(CudaError::NoPeerAccess { ordinal, peer }) }
    }

    fn idle_bytes(&self) -> u64 {
        self.ranges().values().map(|range| range.chunks.idle_bytes()).sum()
    }
}
