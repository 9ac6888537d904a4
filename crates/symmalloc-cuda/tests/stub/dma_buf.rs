//! Dma-bufs: descriptors that cover a range, and the memory that stays until they are dropped.

use crate::process::{Library, calls, device, fail, heal, live, stub_test};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::AsFd;
use std::sync::Arc;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::op::Contents;
use symmalloc_core::{Allocation, PoolId};
use symmalloc_cuda::{
    CudaAllocator, CudaBackend, CudaDevice, CudaError, DmaBuf, DriverError, ExportState, Pool, ShareError,
};

const MIB: u64 = 1 << 20;
const CALL: &str = "cuMemGetHandleForAddressRange";

/// Creates an allocator whose expandable pools grow in chunks of 2 MiB.
fn allocator(device: &Arc<CudaDevice>) -> CudaAllocator {
    let backend = CudaBackend::builder(device).chunk_bytes(2 * MIB).build().expect("a backend");
    CudaAllocator::with_backend(backend, Default::default()).expect("an allocator")
}

/// Returns a pool with this text of a configuration, and an allocation of 10 MiB in it.
fn pool_of(allocator: &CudaAllocator, text: &str) -> (Pool<CudaBackend>, Allocation) {
    let config: PoolConfig = text.parse().expect("a configuration");
    let pool = allocator.create_pool(config).expect("a pool");
    let stream = allocator.device().context().new_stream().expect("a stream");
    let allocation = allocator.with_pool(&pool).allocate(&stream, 10 * MIB).expect("memory");
    (pool, allocation)
}

fn dma_buf_of(allocator: &CudaAllocator, allocation: &Allocation) -> Result<DmaBuf, ShareError> {
    allocator.dma_buf(allocation.address.0, allocation.size_bytes)
}

/// Returns the size of the file behind a dma-buf.
fn file_bytes(dma_buf: &DmaBuf) -> u64 {
    let mut file = File::from(dma_buf.as_fd().try_clone_to_owned().expect("a copy of the descriptor"));
    file.seek(SeekFrom::End(0)).expect("a file with a size")
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("listed").count() - 1
}

stub_test!(a_dma_buf_covers_its_range_in_whole_pages, {
    let allocator = allocator(&device());
    let (_pool, allocation) = pool_of(&allocator, "segments:reserved,segment_mb:16");
    let (address, size_bytes) = (allocation.address.0, allocation.size_bytes);
    let whole = dma_buf_of(&allocator, &allocation).expect("a dma-buf");
    assert_eq!((whole.offset_bytes(), whole.size_bytes(), whole.chunk_count()), (0, size_bytes, 1));
    assert_eq!((file_bytes(&whole), whole.state()), (size_bytes, ExportState::Live));

    let part = allocator.dma_buf(address + 5000, 4000).expect("a dma-buf of a part");
    assert_eq!((part.offset_bytes(), part.size_bytes(), file_bytes(&part)), (904, 8192, 8192));
    let segment = allocator.dma_buf(address, 16 * MIB).expect("a dma-buf of a segment with free memory");
    assert_eq!(file_bytes(&segment), 16 * MIB);
    let mut kept = File::from(whole.as_fd().try_clone_to_owned().expect("a copy"));
    drop(whole);
    assert_eq!(kept.seek(SeekFrom::End(0)).expect("a file"), size_bytes, "a copy of the descriptor stays valid");
});

stub_test!(memory_stays_until_its_dma_buf_is_dropped, {
    let device = device();
    let allocator = allocator(&device);
    // A trim does not release a reserved segment.
    let reserved: &[&str] = &["sleep", "destroy"];
    for (text, ends) in
        [("segments:reserved,segment_mb:16", reserved), ("segments:fixed", &["trim", "sleep", "destroy"])]
    {
        for &end in ends {
            let before = live().device_bytes;
            let (pool, allocation) = pool_of(&allocator, text);
            let taken = live().device_bytes;
            assert!(taken >= before + 10 * MIB, "{text}");
            let first = dma_buf_of(&allocator, &allocation).expect("a dma-buf");
            let second = dma_buf_of(&allocator, &allocation).expect("another one");
            let (id, mut pool) = (pool.id(), Some(pool));
            match end {
                "sleep" => {
                    let slept = allocator.sleep(id, Contents::Drop).expect("a dma-buf does not prevent sleep");
                    assert!(slept.released_bytes >= 10 * MIB, "{text}");
                    assert_eq!(first.state(), ExportState::Unmapped, "{text}");
                }
                _ => {
                    allocator.free(allocation.handle).expect("freed");
                    assert_eq!(first.state(), ExportState::Freed(0), "{text}");
                    pool.take_if(|_| end == "destroy");
                    allocator.trim_all().expect("trimmed");
                }
            }
            assert_eq!(live().device_bytes, taken, "{text}, {end}: the device has not got the memory back");
            let asleep = if end == "sleep" { taken - before } else { 0 };
            assert_eq!(allocator.device_memory().expect("queried").exported_bytes, asleep, "{text}, {end}");
            drop(first);
            assert_eq!(live().device_bytes, taken, "{text}, {end}: the second dma-buf holds it");
            drop(second);
            assert_eq!(live().device_bytes, before, "{text}, {end}");
            assert_eq!(allocator.exports(), []);
            drop(pool);
        }
    }
});

stub_test!(a_pool_that_woke_needs_a_new_dma_buf, {
    let allocator = allocator(&device());
    let (pool, allocation) = pool_of(&allocator, "segments:reserved,segment_mb:16");
    let stale = dma_buf_of(&allocator, &allocation).expect("a dma-buf");
    allocator.sleep(pool.id(), Contents::Keep).expect("asleep");
    let refused = dma_buf_of(&allocator, &allocation).expect_err("the pool has no memory");
    let (address, size_bytes) = (allocation.address.0, allocation.size_bytes);
    assert_eq!(refused, ShareError::NotMapped { address, size_bytes });
    allocator.wake(pool.id()).expect("awake");
    assert_eq!(stale.state(), ExportState::Unmapped);
    let again = dma_buf_of(&allocator, &allocation).expect("a dma-buf");
    assert_eq!((again.state(), again.chunk_count()), (ExportState::Live, 1), "a woken segment is one chunk, too");
    assert_eq!(live().device_bytes, 32 * MIB, "the old memory and the new one");
    drop(stale);
    assert_eq!(live().device_bytes, 16 * MIB);
});

stub_test!(memory_stays_mapped_while_a_dma_buf_comes_and_goes, {
    let allocator = allocator(&device());
    let (pool, allocation) = pool_of(&allocator, "segments:reserved,segment_mb:16");
    let digest = allocator.digest(pool.id()).expect("a digest");
    dma_buf_of(&allocator, &allocation).map(drop).expect("a dma-buf");
    assert_eq!((live().device_bytes, live().mappings), (16 * MIB, 1));
    assert_eq!(allocator.digest(pool.id()), Ok(digest), "a dma-buf is not part of the history");
    allocator.free(allocation.handle).expect("freed");
    drop(pool);
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 0);
});

// NCCL's windows and RDMA transports rely on this (docs/sharing.md).
stub_test!(reserved_and_fixed_segments_are_one_chunk_and_expandable_ranges_are_not, {
    let device = device();
    let count = |allocator: &CudaAllocator, text| {
        let (_pool, allocation) = pool_of(allocator, text);
        allocator.core().backend().chunks_behind(allocation.address.0, allocation.size_bytes).len()
    };
    let small = allocator(&device);
    for one in ["segments:reserved,segment_mb:256", "segments:fixed", "segments:fixed,unsplit:true"] {
        assert_eq!(count(&small, one), 1, "{one}");
    }
    assert_eq!(count(&small, "segments:expandable"), 5);
    assert_eq!(count(&small, "range_mb:64,growth_mb:64"), 1, "the first growth takes the whole range");
    let backend = CudaBackend::builder(&device).chunk_bytes(16 * MIB).build().expect("a backend");
    let large = CudaAllocator::with_backend(backend, Default::default()).expect("an allocator");
    assert_eq!(count(&large, "growth_mb:16"), 1, "a growth up to the chunk size is one chunk");
});

stub_test!(a_range_across_chunks_that_the_driver_refuses_names_the_pools_to_use, {
    let allocator = allocator(&device());
    let (_pool, allocation) = pool_of(&allocator, "segments:expandable");
    let before = (live(), descriptors());
    let error = dma_buf_of(&allocator, &allocation).expect_err("five chunks");
    let driver = DriverError { call: CALL, code: 1 };
    assert_eq!(error, ShareError::ManyChunks { chunks: 5, error: driver });
    assert!(error.to_string().contains("segments:reserved or segments:fixed"), "{error}");
    assert_eq!((live(), descriptors(), allocator.exports()), (before.0, before.1, vec![]));
    let chunk = allocator.dma_buf(allocation.address.0 + 2 * MIB, 2 * MIB).expect("one chunk of it");
    assert_eq!(file_bytes(&chunk), 2 * MIB);
});

stub_test!(failures_leave_nothing_open_and_nothing_held, {
    let allocator = allocator(&device());
    let (pool, allocation) = pool_of(&allocator, "segments:reserved,segment_mb:16");
    let (address, size_bytes) = (allocation.address.0, allocation.size_bytes);
    let before = (live(), descriptors());
    let (too_long, to_the_end) = ((address, u64::MAX), (address, u64::MAX - address));
    let ranges = [(address, 0), (address, 17 * MIB), (address - 1, 2), (u64::MAX, 2), (1, 1), too_long, to_the_end];
    for (address, size_bytes) in ranges {
        let error = allocator.dma_buf(address, size_bytes).expect_err("not memory of a segment");
        assert_eq!(error, ShareError::NotMapped { address, size_bytes });
    }
    assert_eq!(calls(CALL), 0);
    for call in [CALL, "cuMemRetainAllocationHandle", "cuCtxGetCurrent"] {
        fail(call, 1, 999);
        let error = allocator.dma_buf(address, size_bytes).expect_err("the call fails");
        assert_eq!(error, ShareError::Cuda(CudaError::Driver(DriverError { call, code: 999 })));
        heal();
    }
    assert_eq!((live(), descriptors(), allocator.exports()), (before.0, before.1, vec![]));

    // A handle that the driver does not release at first is released with later memory.
    let dma_buf = allocator.dma_buf(address, size_bytes).expect("a dma-buf");
    fail("cuMemRelease", 1, 999);
    drop(dma_buf);
    assert_eq!(descriptors(), before.1);
    allocator.free(allocation.handle).expect("freed");
    drop(pool);
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 0);
});

stub_test!(a_thousand_dma_bufs_leak_nothing, {
    let allocator = allocator(&device());
    let (pool, allocation) = pool_of(&allocator, "segments:reserved,segment_mb:16");
    dma_buf_of(&allocator, &allocation).map(drop).expect("a dma-buf");
    let before = (live(), descriptors());
    for round in 0..1000 {
        let dma_buf = dma_buf_of(&allocator, &allocation).expect("a dma-buf");
        if round % 100 == 0 {
            allocator.sleep(pool.id(), Contents::Drop).expect("asleep");
            allocator.wake(pool.id()).expect("awake");
        }
        drop(dma_buf);
    }
    assert_eq!((live(), descriptors()), before);
    assert_eq!(calls(CALL), 1001);
});

stub_test!(a_dma_buf_works_with_prefetching, {
    let backend = CudaBackend::builder(&device()).chunk_bytes(2 * MIB).prefetch_bytes(4 * MIB).build();
    let allocator = CudaAllocator::with_backend(backend.expect("a backend"), Default::default()).expect("an allocator");
    let (_pool, allocation) = pool_of(&allocator, "segments:fixed");
    assert_eq!(file_bytes(&dma_buf_of(&allocator, &allocation).expect("a dma-buf")), 10 * MIB);
    let before = live().device_bytes;
    let held = dma_buf_of(&allocator, &allocation).expect("a dma-buf");
    allocator.free(allocation.handle).expect("freed");
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, before);
    drop(held);
    assert!(live().device_bytes < before);
});

fn not_supported() {
    let device = device();
    assert!(!device.features().dma_buf);
    let allocator = allocator(&device);
    let (_pool, allocation) = pool_of(&allocator, "segments:fixed");
    let error = dma_buf_of(&allocator, &allocation).expect_err("not supported");
    assert_eq!(error, ShareError::NoDmaBuf { ordinal: 0 });
    assert!(error.to_string().contains("nvidia-peermem"), "{error}");
    assert_eq!(calls(CALL), 0);
}

stub_test!(a_device_without_dma_buf_is_an_error_with_a_remedy, ["STUB_NO_DMA_BUF" = "1"], {
    not_supported();
});

stub_test!(a_driver_without_the_call_is_an_error_with_a_remedy, Library::StubWithout(CALL), [], {
    not_supported();
});

stub_test!(plain_memory_has_no_dma_bufs, {
    let backend = CudaBackend::builder(&device()).plain().build().expect("a backend");
    let allocator = CudaAllocator::with_backend(backend, Default::default()).expect("an allocator");
    let stream = allocator.device().context().new_stream().expect("a stream");
    let allocation = allocator.allocate(&stream, 10 * MIB).expect("memory");
    assert_eq!(dma_buf_of(&allocator, &allocation).expect_err("nothing holds it"), ShareError::NotExportable);
    assert_eq!(allocator.pool(), PoolId::DEFAULT);
});
