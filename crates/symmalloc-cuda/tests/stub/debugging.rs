//! The debugging options on the stub, whose device memory is real.

use crate::process::{device, fail, heal, live, reported, stub_test};
use cudarc::driver::result::{memcpy_dtoh_async, memset_d8_async};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DevicePtr};
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::debug::MemoryDamage;
use symmalloc_core::{Allocation, PoolId};
use symmalloc_cuda::{CudaAllocator, GraphPool};

fn allocator(options: &str) -> (CudaAllocator, Arc<CudaStream>) {
    let config: Config = options.parse().expect("valid");
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    (CudaAllocator::new(&device, config).expect("made"), stream)
}

fn read(stream: &CudaStream, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: the device memory is mapped, and the host waits for the copy.
    unsafe { memcpy_dtoh_async(&mut bytes, address, stream.cu_stream()) }.expect("copied");
    stream.synchronize().expect("it works");
    bytes
}

/// Sets bytes at an offset from the start of an allocation, which may lie outside of it.
fn write(stream: &CudaStream, made: &Allocation, offset: i64, len: usize) {
    // SAFETY: the memory is mapped; the test damages it on purpose.
    unsafe { memset_d8_async(made.address.0.wrapping_add_signed(offset), 3, len, stream.cu_stream()) }.expect("set");
}

stub_test!(new_and_freed_memory_is_poisoned, {
    let (allocator, stream) = allocator("debug:poison");
    let made = allocator.allocate(&stream, 3 << 20).expect("memory");
    let is_all =
        |pattern: u32| read(&stream, made.address.0, 3 << 20).chunks(4).all(|word| word == pattern.to_le_bytes());
    assert!(is_all(0x7FFF_7FFF));
    write(&stream, &made, 0, 1 << 20);
    let _after = allocator.allocate(&stream, 1 << 20).expect("memory");
    allocator.free(made.handle).expect("live");
    let _next = allocator.allocate(&stream, 32 << 20).expect("memory");
    assert!(is_all(0xFFFF_7FFF));
});

stub_test!(every_byte_behind_a_block_is_guarded, {
    let (allocator, stream) = allocator("debug:canary");
    for size_bytes in [1, 2, 3, 5, 511, 512, 513, 4096, 5000] {
        for offset in [0, 1, 511] {
            let made = allocator.allocate(&stream, size_bytes).expect("memory");
            assert_eq!(made.size_bytes, size_bytes);
            write(&stream, &made, 0, size_bytes as usize);
            assert!(allocator.core().check_memory().is_ok(), "{size_bytes}");
            write(&stream, &made, size_bytes as i64 + offset, 1);
            allocator.free(made.handle).expect("live");
            let damage = allocator.core().check_memory().expect_err("damaged");
            let MemoryDamage::Guard { offset_bytes, .. } = *damage else { panic!("{damage}") };
            assert_eq!(offset_bytes, offset as u64, "{size_bytes}");
        }
    }
});

stub_test!(a_write_after_free_is_found_at_both_ends_of_a_large_block, {
    let (allocator, stream) = allocator("debug:[poison,quarantine_mb:16]");
    for offset in [0, 1, (8 << 20) - 1] {
        let made = allocator.allocate(&stream, 8 << 20).expect("memory");
        allocator.free(made.handle).expect("live");
        let next = allocator.allocate(&stream, 512).expect("memory");
        allocator.free(next.handle).expect("live");
        write(&stream, &made, offset, 1);
        for _ in 0..3 {
            let other = allocator.allocate(&stream, 8 << 20).expect("memory");
            allocator.free(other.handle).expect("live");
        }
        let damage = allocator.core().check_memory().expect_err("damaged");
        let MemoryDamage::WrittenAfterFree { offset_bytes, .. } = *damage else { panic!("{damage}") };
        assert_eq!(offset_bytes as i64, offset);
    }
});

// Captured work is repeated by every launch, when the memory may belong to another block.
stub_test!(a_capture_contains_no_work_of_the_debugger, {
    let (allocator, stream) = allocator("debug:[poison,canary]");
    let policy: PoolConfig = "debug:[poison,canary,quarantine_bytes:1]".parse().expect("valid");
    let pool = GraphPool::new(&allocator, policy).expect("made");
    let before = allocator.alloc_zeroed::<u8>(&stream, 1 << 20).expect("memory");
    let (address, _synchronized) = before.device_ptr(&stream);
    drop(_synchronized);
    let capture = pool.begin(&stream).expect("begun");
    let inside = allocator.alloc_zeroed::<u8>(&stream, 1 << 20).expect("memory");
    let output = allocator.alloc_zeroed::<u8>(&stream, 1 << 20).expect("memory");
    drop(inside);
    drop(before);
    let graph = capture.end().expect("a valid capture");
    // Its memory stays the graph's: launches write to it.
    drop(output);
    assert_eq!(read(&stream, address, 4), [0; 4], "memory that was freed in the capture is not filled");
    for _ in 0..3 {
        graph.launch(&stream).expect("launched");
        stream.synchronize().expect("it works");
        assert!(allocator.core().check_memory().is_ok());
    }
});

stub_test!(a_freed_block_is_unmapped_although_chunks_are_larger, {
    let (allocator, stream) = allocator("debug:unmap");
    let _first = allocator.allocate(&stream, 1 << 20).expect("memory");
    let block = allocator.allocate(&stream, 8 << 20).expect("memory");
    let _last = allocator.allocate(&stream, 1 << 20).expect("memory");
    let before = live().device_bytes;
    allocator.free(block.handle).expect("live");
    assert_eq!(before - live().device_bytes, 6 << 20);
});

stub_test!(slots_are_reused_and_freed_with_the_allocator, {
    let before = live();
    let (made, stream) = allocator("debug:[poison,canary,quarantine_mb:1]");
    for _ in 0..5000 {
        let block = made.allocate(&stream, 100 << 10).expect("memory");
        made.free(block.handle).expect("live");
    }
    // Slabs of 1 MiB, for at most 16 MiB of comparisons.
    assert!(live().host_allocations - before.host_allocations <= 18, "{}", live().host_allocations);
    made.core().check_memory().map(drop).expect("no damage");
    drop(made);
    drop(stream);
    assert_eq!(live().host_allocations, before.host_allocations);
    assert_eq!(live().streams, before.streams);
});

stub_test!(a_failed_call_leaves_memory_unchecked, {
    for call in ["cuMemsetD32Async", "cuMemsetD8Async", "cuMemcpyDtoHAsync_v2", "cuMemHostAlloc", "cuEventRecord"] {
        let (allocator, stream) = allocator("debug:[poison,canary]");
        for round in 0..4 {
            heal();
            fail(call, round + 1, 1);
            let made = allocator.allocate(&stream, 4099).expect("memory");
            write(&stream, &made, 0, 4099);
            allocator.free(made.handle).expect("live");
        }
        heal();
        assert!(allocator.core().check_memory().is_ok(), "{call}");
    }
});

stub_test!(blocks_are_reported_to_a_tool, ["NVTX_INJECTION64_PATH" = "libcuda.so", "SYMMALLOC_PLAIN_MEMORY" = "1"], {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let made = allocator.allocate_named(&stream, 5000, "scores").expect("memory");
    assert_eq!((reported(0, 0), reported(1, 0)), (1, 1));
    assert_eq!((reported(2, made.address.0), reported(3, made.address.0)), (made.size_bytes, 1));
    let odd = allocator.allocate_named(&stream, 512, "a\0b\u{7}\u{20ac}").expect("memory");
    assert_eq!(reported(4, odd.address.0), 1, "the name is printable");
    allocator.free(odd.handle).expect("live");
    let other = allocator.allocate(&stream, 3 << 20).expect("memory");
    assert_eq!((reported(1, 0), reported(3, other.address.0)), (2, 0));
    allocator.free(made.handle).expect("live");
    assert!(allocator.free(made.handle).is_err());
    assert_eq!((reported(1, 0), reported(2, made.address.0)), (1, 0));
    allocator.core().reset_pool(PoolId::DEFAULT).expect("it exists");
    assert_eq!(reported(1, 0), 0);
    drop(allocator);
    assert_eq!(reported(0, 0), 0, "the ranges are released");
});

// A launch uses the memory after its free in the capture, so the tool must still accept it.
stub_test!(
    memory_of_a_graph_stays_reported_until_its_pool_ends,
    ["NVTX_INJECTION64_PATH" = "libcuda.so", "SYMMALLOC_PLAIN_MEMORY" = "1"],
    {
        let device = device();
        let stream = device.context().new_stream().expect("a stream");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
        let pool = GraphPool::new(&allocator, PoolConfig::default()).expect("made");
        let capture = pool.begin(&stream).expect("begun");
        let inside = allocator.alloc_zeroed::<u8>(&stream, 1 << 20).expect("memory");
        drop(inside);
        // Uses the same memory, and more.
        let output = allocator.alloc_zeroed::<u8>(&stream, 2 << 20).expect("memory");
        let graph = capture.end().expect("a valid capture");
        let blocks = reported(1, 0);
        assert!(blocks >= 2, "the rest of the second block is reported too");
        drop(output);
        assert_eq!(reported(1, 0), blocks);
        graph.launch(&stream).expect("launched");
        stream.synchronize().expect("it works");
        drop((graph, pool, allocator));
        assert_eq!((reported(0, 0), reported(1, 0)), (0, 0));
    }
);

stub_test!(
    a_tool_without_these_functions_is_ignored,
    ["NVTX_INJECTION64_PATH" = "libcuda.so", "STUB_NVTX_EMPTY" = "1"],
    {
        let device = device();
        let stream = device.context().new_stream().expect("a stream");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
        let made = allocator.allocate_named(&stream, 5000, "scores").expect("memory");
        assert_eq!((reported(0, 0), reported(1, 0)), (0, 0));
        allocator.free(made.handle).expect("live");
    }
);

stub_test!(mapped_memory_is_not_reported, ["NVTX_INJECTION64_PATH" = "libcuda.so"], {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let made = allocator.allocate_named(&stream, 5000, "scores").expect("memory");
    assert_eq!((reported(0, 0), reported(1, 0)), (0, 0));
    allocator.free(made.handle).expect("live");
});

// Memory of `cudaMalloc` has no stream. The host waits for each fill.
stub_test!(memory_of_the_host_as_a_stream_is_filled_and_guarded, {
    let (allocator, stream) = allocator("debug:[poison,canary]");
    let host = allocator.register_host_stream().expect("an id");
    let made = allocator.core().allocate(PoolId::DEFAULT, host, 4000).expect("memory");
    let holds = |pattern: u32| read(&stream, made.address.0, 4000).chunks(4).all(|word| word == pattern.to_le_bytes());
    assert!(holds(0x7FFF_7FFF));
    assert_eq!(allocator.core().check_memory(), Ok(1));
    write(&stream, &made, 4000, 1);
    stream.synchronize().expect("it works");
    let _after = allocator.core().allocate(PoolId::DEFAULT, host, 1 << 20).expect("memory");
    allocator.free(made.handle).expect("live");
    let _next = allocator.core().allocate(PoolId::DEFAULT, host, 32 << 20).expect("memory");
    assert!(holds(0xFFFF_7FFF));
    let damage = allocator.core().check_memory().expect_err("damaged");
    assert!(matches!(*damage, MemoryDamage::Guard { offset_bytes: 0, .. }), "{damage}");
});

// A copy in a capture is done when the graph runs. Results of other work must not wait for it.
stub_test!(a_capture_that_nobody_announced_delays_no_result, {
    let (allocator, stream) = allocator("debug:[poison,canary]");
    let other = allocator.device().context().new_stream().expect("a stream");
    let first = allocator.allocate(&stream, 4000).expect("memory");
    let block = allocator.allocate(&other, 4000).expect("memory");
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).expect("begun");
    let inside = allocator.allocate(&stream, 4000).expect("memory");
    allocator.free(first.handle).expect("live");
    allocator.free(inside.handle).expect("live");
    write(&other, &block, 4000, 1);
    allocator.free(block.handle).expect("live");
    allocator.core().check_memory().expect_err("damaged");
    stream.end_capture(CUgraphInstantiate_flags(0)).map(drop).expect("the capture is valid");
    assert!(allocator.core().check_memory().is_ok());
});

stub_test!(memory_of_a_graph_pool_is_unmapped_when_the_pool_ends, {
    let (allocator, stream) = allocator("debug:unmap");
    let pool = GraphPool::new(&allocator, allocator.core().config().default_pool().clone()).expect("a pool");
    let capture = pool.begin(&stream).expect("a capture");
    let inside = allocator.allocate(&stream, 4 << 20).expect("memory");
    allocator.free(inside.handle).expect("a live block");
    let graph = capture.end().expect("a graph");
    let reserved = || allocator.core().stats().reserved_bytes.current;
    let during = reserved();
    assert!(during >= 4 << 20, "launches use the freed block, so it stays mapped: {during} bytes");
    graph.launch(&stream).expect("a launch");
    drop(pool);
    assert_eq!(reserved(), during, "the graph keeps its pool");
    drop(graph);
    assert_eq!(reserved(), 0, "the pool's memory is unmapped at once");
});
