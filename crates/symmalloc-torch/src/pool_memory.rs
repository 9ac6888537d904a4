//! Allocations in mempools: selection by scopes, and memory that the program's own allocator provides.

use crate::device::{DeviceAllocator, Target, Tracing};
use crate::error::Error;
use crate::guard::guarded;
use crate::mempools::{ForeignPool, MempoolId, PoolTarget};
use crate::scopes::{ScopePurpose, StreamFilter};
use crate::streams::RawStream;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::{PoolId, SegmentPosition, SharedAllocator};
use symmalloc_cuda::{CudaBackend, CudaDevice, CudaError, MemorySource};

/// `true` once a scope may have belonged to a capture.
static HAS_CAPTURED: AtomicBool = AtomicBool::new(false);

/// Returns `true` if this process may have captured a graph.
pub(crate) fn has_captured() -> bool {
    HAS_CAPTURED.load(Ordering::Relaxed)
}

impl DeviceAllocator {
    /// Allocates from the pool of the innermost scope that covers the stream. Propagates exceptions of PyTorch's filters, so it is called
    /// outside of a guard. `allocate` runs inside a guard.
    ///
    /// Another thread can end that scope and release its pool between the selection of the pool and the allocation. The scopes are then
    /// resolved again, so the memory comes from the pool that is selected after the end of the scope. Ids are not reused, so each
    /// repetition is due to the end of a different pool. If a scope is still open but its pool is gone, the call returns an error.
    #[cold]
    pub(crate) fn allocate_in_scope(
        &self,
        stream: RawStream,
        inherited: Option<u64>,
        allocate: impl Fn(Target) -> Result<*mut c_void, Error>,
    ) -> Result<*mut c_void, Error> {
        let mut destroyed = None;
        loop {
            let target = self.scopes().target_for(stream, inherited);
            match guarded(|| allocate(target.clone())) {
                Err(error) if error.is_destroyed_pool() && destroyed.as_ref() != Some(&target) => {
                    destroyed = Some(target);
                }
                outcome => return outcome,
            }
        }
    }

    /// Allocates from a pool.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    pub(crate) unsafe fn allocate_at(
        &self,
        target: Target,
        stream: RawStream,
        size_bytes: u64,
        name: Option<&str>,
    ) -> Result<*mut c_void, Error> {
        match target {
            // SAFETY: the caller's contract.
            PoolTarget::Own(pool) => unsafe { self.allocate(pool, stream, size_bytes, name) },
            // SAFETY: the caller's contract; the other allocator belongs to the same device.
            PoolTarget::Foreign(other) => unsafe { other.allocate(DeviceAllocator::POOL, stream, size_bytes, name) },
        }
    }

    /// As the last resort, allocates from the free memory of mempools that may serve allocations outside of them.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    pub(crate) unsafe fn allocate_from_helpers(&self, stream: RawStream, size_bytes: u64) -> Option<*mut c_void> {
        let helpers = self.mempools().list().into_iter().filter(|known| known.wishes.helps_out);
        helpers.filter_map(|known| known.target).find_map(|target| {
            // SAFETY: the caller's contract.
            unsafe { self.allocate_at(target, stream, size_bytes, None) }.ok()
        })
    }

    /// Returns the allocator over the program's memory in which the pointer is a live allocation.
    #[cold]
    pub(crate) fn foreign_owner(&self, pointer: *const c_void) -> Option<Arc<DeviceAllocator>> {
        self.mempools().foreign().into_iter().map(|(_, allocator)| allocator).find(|other| other.owns(pointer))
    }

    /// Returns `true` if the pointer is a live allocation here, or in the program's memory.
    pub(crate) fn knows(&self, pointer: *const c_void) -> bool {
        self.owns(pointer) || self.foreign_owner(pointer).is_some()
    }

    /// Returns the segment that contains an address, here or in the program's memory.
    pub(crate) fn segment_at(&self, address: DeviceAddress) -> Option<SegmentPosition> {
        let foreign = || self.mempools().foreign().into_iter().find_map(|(_, other)| other.segment_at(address));
        self.core().segment_at(address).or_else(foreign)
    }

    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    #[cold]
    pub(crate) unsafe fn record_foreign_use(&self, pointer: *const c_void, stream: RawStream) -> Result<(), Error> {
        match self.foreign_owner(pointer) {
            // SAFETY: the caller's contract; the other allocator belongs to the same device.
            Some(other) => unsafe { other.record_use(pointer, stream) },
            None => Err(self.unknown_pointer(pointer as u64)),
        }
    }

    /// Releases the free memory of one mempool without uses. Returns the bytes released.
    pub(crate) fn trim_pool(&self, id: MempoolId) -> Result<u64, Error> {
        let given = self.mempools().give_back(self.core(), Some(id), || self.allocator().is_capturing());
        given.failure.map_or(Ok(given.released_bytes), |failure| Err(failure.into()))
    }

    /// Directs allocations on the streams that the filter accepts to a mempool. Propagates exceptions of the filter. Returns the
    /// number of the scope.
    pub(crate) fn begin_mempool(&self, id: MempoolId, filter: StreamFilter) -> Result<u64, Error> {
        let watch = self.allocator().device().watch_captures();
        // SAFETY: the streams of allocations live as long as the allocator.
        self.scopes().end_failed(|stream| unsafe { watch.is_captured(stream.handle().cast()) }.unwrap_or(true));
        // A filter for this thread accepts any stream. A capture's filter accepts none before the capture has begun.
        let mut known: Vec<_> = self.known_streams().into_iter().map(|(_, raw)| raw.handle()).collect();
        known.retain(|stream| !stream.is_null());
        let may_capture = !known.iter().any(|stream| filter.accepts(*stream));
        if may_capture {
            HAS_CAPTURED.store(true, Ordering::Relaxed);
            // Earlier work is not part of the graph, so the graph must not wait for it.
            self.allocator().synchronize_uncaptured()?;
        }
        let purpose = if may_capture && !known.is_empty() { ScopePurpose::Capture } else { ScopePurpose::Unknown };
        let target = self.mempools().begin(self.core(), id)?;
        Ok(self.scopes().begin((id, target), filter, purpose, watch))
    }

    pub(crate) fn end_mempool(&self, id: MempoolId) -> Result<(), Error> {
        let error = Error::NoScope { device: self.ordinal(), scope: "mempool" };
        if self.scopes().end(id) { Ok(()) } else { Err(error) }
    }

    pub(crate) fn release_mempool(&self, id: MempoolId) -> Result<(), Error> {
        let error = Error::NoScope { device: self.ordinal(), scope: "use of a mempool" };
        if self.mempools().release(id) { Ok(()) } else { Err(error) }
    }
}

impl ForeignPool for DeviceAllocator {
    /// The first pool that an allocator creates.
    const POOL: PoolId = PoolId(1);

    fn over(ordinal: usize, source: Arc<dyn MemorySource>, conf: &str) -> Result<Self, Error> {
        let backend = CudaBackend::builder(&CudaDevice::new(ordinal)?).source(source);
        let allocator = DeviceAllocator::with_backend(backend, conf.parse()?, Tracing::OnRequest)?;
        let core = allocator.core();
        let pool = core.create_pool(core.config().default_pool().clone()).map_err(CudaError::from)?;
        assert_eq!(pool, Self::POOL, "a new allocator has only the default pool");
        Ok(allocator)
    }

    fn core(&self) -> &SharedAllocator<CudaBackend> {
        DeviceAllocator::core(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;
    use crate::pytorch::{
        symmalloc_source, symmalloc_torch_begin_scope, symmalloc_torch_end_scope, symmalloc_torch_release_use,
        symmalloc_torch_retain_pool, symmalloc_torch_trim,
    };
    use crate::status::symmalloc_status::SYMMALLOC_OK;
    use std::cell::Cell;
    use std::ptr::{null, null_mut};
    use stub_process::stub_test;

    /// The kind of a mempool.
    #[derive(Clone, Copy, Debug)]
    enum Kind {
        Graph,
        MemPool,
        /// A `MemPool` over the program's allocator.
        Source,
    }

    fn stream() -> RawStream {
        RawStream::new(null_mut())
    }

    /// Begins a scope that covers all streams. Creates the pool.
    fn begin(kind: Kind, id: MempoolId) {
        let source = symmalloc_source { allocate: None, free: None, context: null_mut(), destroy: None };
        let mut number = 0;
        let retained = match kind {
            Kind::Graph => SYMMALLOC_OK,
            // SAFETY: no source.
            Kind::MemPool => unsafe { symmalloc_torch_retain_pool(0, id.0, id.1, null()) },
            // SAFETY: a source without functions, which has no memory.
            Kind::Source => unsafe { symmalloc_torch_retain_pool(0, id.0, id.1, &raw const source) },
        };
        // SAFETY: no filter, and an output pointer.
        let begun = unsafe { symmalloc_torch_begin_scope(0, id.0, id.1, None, null_mut(), None, &raw mut number) };
        assert_eq!([retained, begun], [SYMMALLOC_OK; 2]);
    }

    /// Ends the scope, and releases the pool and its memory.
    fn end(id: MempoolId) {
        assert_eq!(symmalloc_torch_end_scope(0, id.0, id.1), SYMMALLOC_OK);
        let pools = process::existing(0).expect("used above").mempools();
        while pools.uses(id) > 0 {
            assert_eq!(symmalloc_torch_release_use(0, id.0, id.1), SYMMALLOC_OK);
        }
        assert_eq!(symmalloc_torch_trim(id.0, id.1), SYMMALLOC_OK);
    }

    // Between the selection of the pool and the allocation, other threads may end scopes and pools. In this test, the same thread does so.
    stub_test!(an_allocation_whose_scope_and_pool_end_meanwhile_is_placed_as_after_their_end, {
        let allocator = process::allocator(0).expect("the stub has a device");
        let mut number = 0;
        let mut next = || {
            number += 1;
            (1, number)
        };
        for kind in [Kind::Graph, Kind::MemPool, Kind::Source] {
            // The number of scopes that end meanwhile, one after the other.
            for scopes in [1, 3] {
                for outer in [PoolId::DEFAULT, allocator.create_pool(None, None).expect("a pool")] {
                    allocator.scopes().push_pool(outer);
                    let mut ids: Vec<MempoolId> = (0..scopes).map(|_| next()).collect();
                    begin(kind, ids[scopes - 1]);
                    let (ids, attempts) = (Cell::new(std::mem::take(&mut ids)), Cell::new(0));
                    let allocated = allocator.allocate_in_scope(stream(), None, |target| {
                        attempts.set(attempts.get() + 1);
                        let mut left = ids.take();
                        left.pop().into_iter().for_each(end);
                        left.last().into_iter().for_each(|id| begin(kind, *id));
                        ids.set(left);
                        // SAFETY: the default stream.
                        unsafe { allocator.allocate_at(target, stream(), 512, None) }
                    });
                    let pointer = allocated.expect("placed as after the end");
                    assert_eq!(attempts.get(), scopes + 1, "{kind:?}");
                    assert_eq!(allocator.find(pointer).expect("live").pool, outer, "{kind:?}");
                    allocator.free(pointer).expect("live");
                    allocator.scopes().pop_pool(0).expect("pushed above");
                }
            }
        }
    });

    stub_test!(a_scope_that_stays_open_without_its_pool_is_an_error, {
        let allocator = process::allocator(0).expect("the stub has a device");
        begin(Kind::Graph, (1, 1));
        let allocated = allocator.allocate_in_scope(stream(), None, |target| {
            // The second attempt finds the pool destroyed.
            let _destroyed = allocator.core().destroy_pool(target.own().expect("a pool of the device"));
            // SAFETY: the default stream.
            unsafe { allocator.allocate_at(target, stream(), 512, None) }
        });
        let error = allocated.expect_err("the scope has no pool");
        assert!(error.is_destroyed_pool() && error.to_string().contains("was destroyed"), "{error}");
    });
}
