//! Memory operations while another thread captures in the global mode, in which the driver forbids calls that are not stream work on every
//! thread. The operations still succeed, and the capture stays valid.

use crate::process::{device, fail, heal, live, stub_test};
use cudarc::driver::sys::{CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use stub_process::{Captured, while_captured};
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::op::Contents;
use symmalloc_cuda::{Access, CudaAllocator, CudaBackend, CudaDevice, Import, PinnedAllocator};

const MIB: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// Performs every memory operation of an allocator, from creation to drop.
fn life(allocator: &CudaAllocator) {
    let stream = allocator.device().context().default_stream();
    let other = allocator.register_host_stream().expect("ids are left");
    let small = allocator.alloc_zeroed::<u8>(&stream, MIB).expect("memory");
    let large = allocator.allocate(&stream, 50 << 20).expect("memory");
    allocator.core().record_use(large.handle, other).expect("live");
    allocator.free(large.handle).expect("live");
    // Waits for the fence of the freed block.
    let again = allocator.allocate(&stream, 50 << 20).expect("memory");
    allocator.free(again.handle).expect("live");
    allocator.core().trim_all().expect("nothing fails");
    for contents in [Contents::Keep, Contents::Drop] {
        allocator.sleep(PoolId::DEFAULT, contents).expect("the pool can sleep");
        allocator.wake(PoolId::DEFAULT).expect("memory");
    }
    allocator.synchronize(&stream).expect("the stream is not captured");
    drop(small);
}

fn fixed() -> Config {
    Config::builder().default_pool(PoolConfig::builder().fixed().build().expect("valid")).build().expect("valid")
}

/// Creates and drops each kind of backend.
fn lives(device: &Arc<CudaDevice>) {
    life(&CudaAllocator::new(device, Config::default()).expect("an allocator"));
    life(&CudaAllocator::new(device, fixed()).expect("an allocator"));
    let descending = CudaBackend::builder(device).descending_addresses(1 << 40).build().expect("a backend");
    life(&CudaAllocator::with_backend(descending, Config::default()).expect("an allocator"));
    let ahead = CudaBackend::builder(device).prefetch_bytes(64 << 20).build().expect("a backend");
    life(&CudaAllocator::with_backend(ahead, Config::default()).expect("an allocator"));
    let pinned = PinnedAllocator::pinned(device, Config::default()).expect("an allocator");
    drop(pinned.alloc_host_zeroed::<u8>(MIB).expect("memory"));
}

stub_test!(memory_is_mapped_and_released_during_a_capture_on_any_device, ["STUB_DEVICES" = "2"], {
    let device = device();
    for captured in [0, 1] {
        let before = live().device_bytes;
        assert_eq!(while_captured(captured, || lives(&device)), ((), Captured::Graph), "device {captured}");
        assert_eq!(live().device_bytes, before);
    }
});

stub_test!(imported_memory_is_mapped_and_unmapped_during_a_capture_on_another_device, ["STUB_DEVICES" = "2"], {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("an allocator");
    let stream = device.context().default_stream();
    let _weights = allocator.alloc_zeroed_named::<u8>(&stream, MIB, "weights").expect("memory");
    stream.synchronize().expect("idle");
    let mappings = live().mappings;
    let share = || {
        let export = allocator.export().expect("exported");
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        thread::scope(|scope| {
            let importer = scope.spawn(|| Import::attach(&device, &theirs, Access::ReadWrite, LONG));
            let _peer = export.serve(&ours, Access::ReadWrite, LONG).expect("served");
            let import = importer.join().expect("no panic").expect("attached");
            assert!(live().mappings > mappings);
            drop(import);
        });
    };
    assert_eq!(while_captured(1, share), ((), Captured::Graph));
    assert_eq!(live().mappings, mappings);
});

/// Sets this thread's capture mode, and returns the previous one.
fn exchange(mut mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    // SAFETY: valid for reading and writing.
    unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().expect("exchanged");
    mode
}

stub_test!(the_capture_mode_of_a_thread_is_restored_even_after_failed_calls, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("an allocator");
    let stream = device.context().default_stream();
    let _kept = allocator.alloc_zeroed::<u8>(&stream, MIB).expect("memory");
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    exchange(mode);
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        fail(call, 0, 999);
        allocator.allocate(&stream, 50 << 20).expect_err(call);
        heal();
        assert_eq!(exchange(mode), mode, "{call}");
    }
    fail("cuMemHostAlloc", 0, 999);
    allocator.sleep(PoolId::DEFAULT, Contents::Keep).expect_err("no host memory");
    fail("cuStreamSynchronize", 0, 999);
    allocator.synchronize(&stream).expect_err("the driver call fails");
    fail("cuCtxSynchronize", 0, 999);
    device.synchronize().expect_err("the driver call fails");
    heal();
    {
        let _relaxed = device.relax_capture();
        let _again = device.relax_capture();
    }
    assert_eq!(exchange(mode), mode);
});
