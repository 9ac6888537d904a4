//! Allocations in private pools: selection by scopes, and memory that the program's own allocator provides.

use crate::device::{DeviceAllocator, Place, Tracing};
use crate::error::Error;
use crate::filter::StreamFilter;
use crate::private_pools::{ForeignPool, MempoolId, PoolPlace};
use crate::scopes::ScopePurpose;
use crate::streams::RawStream;
use std::ffi::c_void;
use std::sync::Arc;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::errors::TrimError;
use symmalloc_core::{PoolId, SegmentPosition};
use symmalloc_cuda::{CudaBackend, CudaDevice, MemorySource};

impl DeviceAllocator {
    /// Allocates from the pool of the innermost scope.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    pub(crate) unsafe fn allocate_at(
        &self,
        place: Place,
        size_bytes: u64,
        stream: RawStream,
        name: Option<&str>,
    ) -> Result<*mut c_void, Error> {
        let pool = match place {
            PoolPlace::Foreign(other) => {
                // SAFETY: the caller's contract; the allocator is of the same device.
                return unsafe { other.allocate_at(PoolPlace::Own(PoolId::DEFAULT), size_bytes, stream, name) };
            }
            PoolPlace::Own(pool) => pool,
        };
        match name {
            // SAFETY: the caller's contract.
            Some(name) => unsafe { self.allocate_named(pool, size_bytes, stream, name) },
            // SAFETY: the caller's contract.
            None => unsafe { self.allocate(pool, size_bytes, stream) },
        }
    }

    /// Allocates from the free memory of private pools that may help out, as the last resort.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    pub(crate) unsafe fn allocate_from_helpers(&self, size_bytes: u64, stream: RawStream) -> Option<*mut c_void> {
        let helpers = self.private_pools().list().into_iter().filter(|known| known.wishes.helps_out);
        helpers.filter_map(|known| known.place).find_map(|place| {
            // SAFETY: the caller's contract.
            unsafe { self.allocate_at(place, size_bytes, stream, None) }.ok()
        })
    }

    /// Returns the allocator over the program's memory in which the pointer is a live allocation.
    #[cold]
    pub(crate) fn foreign_owner(&self, pointer: *const c_void) -> Option<Arc<DeviceAllocator>> {
        self.private_pools().foreign().into_iter().map(|(_, allocator)| allocator).find(|other| other.owns(pointer))
    }

    /// Returns `true` if the pointer is a live allocation here, or in the program's memory.
    pub(crate) fn knows(&self, pointer: *const c_void) -> bool {
        self.owns(pointer) || self.foreign_owner(pointer).is_some()
    }

    /// Returns the segment that contains an address, here or in the program's memory.
    pub(crate) fn segment_at(&self, address: DeviceAddress) -> Option<SegmentPosition> {
        let foreign = || self.private_pools().foreign().into_iter().find_map(|(_, other)| other.segment_at(address));
        self.core().segment_at(address).or_else(foreign)
    }

    /// # Safety
    /// As [`allocate`](Self::allocate).
    #[cold]
    pub(crate) unsafe fn record_foreign_use(&self, pointer: *const c_void, stream: RawStream) -> Result<(), Error> {
        match self.foreign_owner(pointer) {
            // SAFETY: the caller's contract; the allocator is of the same device.
            Some(other) => unsafe { other.record_use(pointer, stream) },
            None => Err(self.unknown_pointer(pointer as u64)),
        }
    }

    /// Releases the free memory of one private pool without uses. Returns the bytes released.
    pub(crate) fn trim_pool(&self, id: MempoolId) -> Result<u64, Error> {
        let given = self.private_pools().give_back(self.core(), Some(id), || self.allocator().is_capturing());
        given.failure.map_or(Ok(given.released_bytes), |failure| Err(failure.into()))
    }

    /// Directs allocations on the streams that the filter accepts to a private pool. Propagates exceptions of the filter. Returns the
    /// number of the scope.
    pub(crate) fn begin_private(&self, id: MempoolId, filter: StreamFilter) -> Result<u64, Error> {
        let watch = self.allocator().device().watch_captures();
        // SAFETY: the streams of allocations live as long as the allocator.
        self.scopes().end_failed(|stream| unsafe { watch.is_captured(stream.handle().cast()) }.unwrap_or(true));
        // A filter for this thread accepts any stream. A capture's filter accepts none before the capture has begun.
        let mut known: Vec<_> = self.known_streams().into_iter().map(|(_, raw)| raw.handle()).collect();
        known.retain(|stream| !stream.is_null());
        let may_capture = !known.iter().any(|stream| filter.accepts(*stream));
        if may_capture {
            // Earlier work is not part of the graph, so the graph must not wait for it.
            self.allocator().synchronize_uncaptured()?;
        }
        let purpose = if may_capture && !known.is_empty() { ScopePurpose::Capture } else { ScopePurpose::Unknown };
        let place = self.private_pools().begin(self.core(), id)?;
        Ok(self.scopes().begin((id, place), filter, purpose, watch))
    }

    pub(crate) fn end_private(&self, id: MempoolId) -> Result<(), Error> {
        let error = Error::NoScope { device: self.ordinal(), scope: "private pool" };
        if self.scopes().end(id) { Ok(()) } else { Err(error) }
    }

    pub(crate) fn release_private(&self, id: MempoolId) -> Result<(), Error> {
        let error = Error::NoScope { device: self.ordinal(), scope: "use of a private pool" };
        if self.private_pools().release(id) { Ok(()) } else { Err(error) }
    }
}

impl ForeignPool for DeviceAllocator {
    fn over(ordinal: usize, source: Arc<dyn MemorySource>, conf: &str) -> Result<Self, Error> {
        let backend = CudaBackend::builder(&CudaDevice::new(ordinal)?).source(source);
        DeviceAllocator::with_backend(backend, conf.parse()?, Tracing::OnRequest)
    }

    fn trim_all(&self) -> Result<u64, TrimError> {
        self.core().trim(None)
    }

    fn is_empty(&self) -> bool {
        let stats = self.core().stats();
        stats.usage.all.allocations.current == 0 && stats.reserved_bytes.current == 0
    }
}
