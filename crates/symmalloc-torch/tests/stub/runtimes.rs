//! Memory for runtimes that do not name a stream.

use crate::library::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Duration;
use stub_process::cuda::hold;
use symmalloc_torch::*;

impl Allocator {
    fn try_allocate_unordered(self, bytes: usize) -> Result<Pointer, symmalloc_status> {
        let mut out = null_mut();
        // SAFETY: a live allocator, and an output pointer.
        match unsafe { symmalloc_allocate_unordered(self.0, bytes, &raw mut out) } {
            SYMMALLOC_OK => Ok(out as Pointer),
            status => Err(status),
        }
    }

    fn try_free_unordered(self, pointer: Pointer) -> symmalloc_status {
        // SAFETY: a live allocator.
        unsafe { symmalloc_free_unordered(self.0, pointer as *mut c_void) }
    }
}

fn ort_alloc(bytes: usize) -> Pointer {
    symmalloc_ort_alloc(bytes) as Pointer
}

fn ort_free(pointer: Pointer) {
    // SAFETY: from `ort_alloc`, or refused.
    unsafe { symmalloc_ort_free(pointer as *mut c_void) };
}

fn device_waits() -> u64 {
    calls("cuCtxSynchronize")
}

stub_test!(memory_without_a_stream_is_free_when_the_device_is_idle, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(1));
    // Stream-ordered memory is not reused for work on other streams.
    let ordered = allocator.allocate(0, 4 * MIB, null_mut());
    allocator.free(ordered);
    let pointer = allocator.try_allocate_unordered(4 * MIB).expect("allocated");
    assert_ne!(pointer, ordered);
    assert_ne!(allocator.placement(pointer).pool, 0);
    let work = hold(streams.get(0) as u64);
    let freed = std::thread::spawn(move || allocator.try_free_unordered(pointer));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!freed.is_finished(), "the free waits for work that was not recorded");
    assert!(allocator.try_placement(pointer).is_ok(), "the allocation is live meanwhile");
    drop(work);
    assert_eq!(freed.join().expect("no panic"), SYMMALLOC_OK);
    assert_eq!(allocator.try_allocate_unordered(4 * MIB), Ok(pointer), "the memory is cached");
    assert_eq!(allocator.try_allocate_unordered(0), Ok(0));
    assert_eq!(allocator.try_free_unordered(0), SYMMALLOC_OK);
});

stub_test!(a_free_with_a_stream_is_ordered_after_that_stream, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(2));
    let (a, b) = (streams.get(0), streams.get(1));
    // SAFETY: a live allocator and stream.
    let free_on = |pointer, stream| unsafe { symmalloc_free_on(allocator.0, pointer as *mut c_void, stream) };
    let pointer = allocator.allocate(0, MIB, a);
    let records = calls("cuEventRecord");
    done(free_on(pointer, a));
    assert_eq!(calls("cuEventRecord"), records, "a free on the allocation's stream records no event");
    assert_eq!(allocator.allocate(0, MIB, a), pointer);
    done(free_on(pointer, b));
    assert_eq!(calls("cuEventRecord"), records + 1);
    let waits = calls("cuStreamWaitEvent");
    assert_eq!((allocator.allocate(0, MIB, a), calls("cuStreamWaitEvent")), (pointer, waits + 1));
    assert_eq!(free_on(pointer + 512, a), SYMMALLOC_UNKNOWN_POINTER);
    done(free_on(0, a));
    let unordered = allocator.try_allocate_unordered(MIB).expect("allocated");
    let before = device_waits();
    done(free_on(unordered, a));
    assert_eq!(device_waits(), before + 1);
});

stub_test!(memory_without_a_stream_is_kept_if_the_device_cannot_be_synchronized, {
    let allocator = Allocator::new("total_limit_mb:20");
    let pointer = allocator.try_allocate_unordered(4 * MIB).expect("allocated");
    let before = device_waits();
    assert_eq!(allocator.try_free_unordered(pointer + 512), SYMMALLOC_UNKNOWN_POINTER);
    assert_eq!(device_waits(), before, "an unknown pointer causes no wait");
    fail("cuCtxSynchronize", 1, 900);
    assert_eq!(allocator.try_free_unordered(pointer), SYMMALLOC_CUDA);
    assert!(message().contains("cuCtxSynchronize failed with 900"), "{}", message());
    heal();
    assert!(allocator.try_placement(pointer).is_ok());
    assert_eq!(allocator.try_allocate_unordered(64 * MIB), Err(SYMMALLOC_OUT_OF_MEMORY));
    assert_eq!(allocator.try_free_unordered(pointer), SYMMALLOC_OK);
    // SAFETY: null where it is checked.
    let refused = unsafe { symmalloc_allocate_unordered(allocator.0, 1, null_mut()) };
    assert_eq!(refused, SYMMALLOC_INVALID_ARGUMENT);
    // SAFETY: as above.
    assert_eq!(unsafe { symmalloc_free_unordered(null_mut(), null_mut()) }, SYMMALLOC_INVALID_ARGUMENT);
});

stub_test!(onnx_runtimes_memory_waits_unless_its_stream_is_known, ["STUB_DEVICES" = "2"], {
    let streams = Streams::new(1);
    let allocator = Allocator::of_torch();
    let before = device_waits();
    let unordered = ort_alloc(3 * MIB);
    ort_free(unordered);
    assert_eq!((ort_alloc(3 * MIB), device_waits()), (unordered, before + 1));
    // SAFETY: a stream of the device that outlives the test.
    done(unsafe { symmalloc_ort_use_stream(0, streams.get(0)) });
    let ordered = ort_alloc(3 * MIB);
    let place = allocator.placement(ordered);
    assert_eq!(place.pool, 0, "the memory comes from the pool of PyTorch's tensors");
    ort_free(ordered);
    assert_eq!(device_waits(), before + 1);
    ort_free(unordered);
    assert_eq!(device_waits(), before + 2, "frees of memory without a stream wait for the device");
    assert_eq!(ort_alloc(0), 0);
    ort_free(0);
    assert_eq!(allocator.total("allocated_bytes/all/current"), 0);
    symmalloc_ort_empty_cache();
    assert_eq!(live().device_bytes, 0);
    // SAFETY: a number that is checked.
    assert_eq!(unsafe { symmalloc_ort_use_stream(-1, null_mut()) }, SYMMALLOC_INVALID_ARGUMENT);
});

stub_test!(onnx_runtimes_memory_comes_from_the_device_of_the_current_context, ["STUB_DEVICES" = "2"], {
    let second = symmalloc_cuda::CudaDevice::new(1).expect("the stub has two devices");
    let _current = second.enter().expect("entered");
    let pointer = ort_alloc(MIB);
    let mut allocator = null_mut();
    // SAFETY: an output pointer.
    done(unsafe { symmalloc_process_allocator(1, &raw mut allocator) });
    assert_eq!(Allocator(allocator).placement(pointer).requested_bytes, MIB as u64);
    ort_free(pointer);
    assert_eq!(Allocator(allocator).try_placement(pointer), Err(SYMMALLOC_UNKNOWN_POINTER));
});

stub_test!(onnx_runtime_gets_null_if_memory_is_exhausted, ["SYMMALLOC_CONF" = "total_limit_mb:20"], {
    let allocator = Allocator::of_torch();
    assert_eq!(ort_alloc(64 * MIB), 0);
    ort_free(0x1000);
    assert_eq!(allocator.stats()["errors"]["failed_calls"], 1);
    let pointer = ort_alloc(MIB);
    ort_free(pointer);
    ort_free(pointer);
    assert_eq!(allocator.total("allocated_bytes/all/current"), 0);
});
