//! Lent streams, which other code owns: an id outlives its stream, and its work stays ordered.

use crate::process::{device, hold, live, stub_test};
use cudarc::driver::sys::CUstream;
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::{PoolId, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaDevice, LentStream};

fn allocator(device: &Arc<CudaDevice>, streams: StreamPolicy) -> CudaAllocator {
    let pool = PoolConfig::builder().streams(streams).build().expect("valid");
    let config = Config::builder().default_pool(pool).build().expect("valid");
    CudaAllocator::new(device, config).expect("made")
}

fn lend(allocator: &CudaAllocator, stream: CUstream) -> StreamId {
    // SAFETY: a stream of the test, which is returned before it is destroyed.
    unsafe { allocator.lend_stream(LentStream::of(stream)) }.expect("lent")
}

stub_test!(the_next_stream_with_an_id_waits_for_the_previous_one, {
    let device = device();
    let (first, second) =
        (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    let allocator = allocator(&device, StreamPolicy::Separate);
    let id = lend(&allocator, first.cu_stream());
    let block = allocator.core().allocate(PoolId::DEFAULT, id, 1 << 20).expect("memory");
    let work = hold(first.cu_stream() as u64);
    allocator.core().free(block.handle).expect("freed");
    allocator.return_stream(id).expect("returned");
    drop(first);
    // SAFETY: a stream of this device, alive until the end of the test.
    unsafe { allocator.relend_stream(id, LentStream::of(second.cu_stream())) }.expect("lent again");
    let again = allocator.core().allocate(PoolId::DEFAULT, id, 1 << 20).expect("memory");
    assert_eq!(again.address, block.address, "the id keeps its heap");
    let waiting = std::thread::spawn({
        let second = Arc::clone(&second);
        move || second.synchronize()
    });
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(!waiting.is_finished(), "the second stream did not wait");
    drop(work);
    waiting.join().expect("no panic").expect("synchronized");
});

stub_test!(memory_of_a_returned_stream_in_a_shared_heap_is_reused_after_its_work, {
    let device = device();
    let (gone, other) =
        (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    let allocator = allocator(&device, StreamPolicy::Shared);
    let (gone_id, other_id) = (lend(&allocator, gone.cu_stream()), lend(&allocator, other.cu_stream()));
    let block = allocator.core().allocate(PoolId::DEFAULT, gone_id, 1 << 20).expect("memory");
    let work = hold(gone.cu_stream() as u64);
    allocator.core().free(block.handle).expect("freed");
    allocator.return_stream(gone_id).expect("returned");
    drop(gone);
    let again = allocator.core().allocate(PoolId::DEFAULT, other_id, 1 << 20).expect("memory");
    assert_eq!(again.address, block.address);
    let waiting = std::thread::spawn({
        let other = Arc::clone(&other);
        move || other.synchronize()
    });
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(!waiting.is_finished(), "nothing waited for the returned stream");
    drop(work);
    waiting.join().expect("no panic").expect("synchronized");
});

stub_test!(only_lent_streams_are_returned, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let allocator = allocator(&device, StreamPolicy::Separate);
    let id = lend(&allocator, stream.cu_stream());
    let host = allocator.register_host_stream().expect("registered");
    assert!(allocator.return_stream(host).is_err(), "the host was not lent");
    allocator.return_stream(id).expect("returned");
    drop(allocator);
    assert_eq!(live().streams, 1, "the stream that waits for returned streams is destroyed");
});
