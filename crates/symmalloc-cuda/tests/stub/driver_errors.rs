//! Errors of the driver: a lost device, idle memory, messages. `single_failures.rs` fails each call once.

use crate::process::{device, fail, live, stub_test};
use cudarc::driver::DevicePtr;
use symmalloc_core::config::Config;
use symmalloc_cuda::{CudaAllocator, CudaError, CudaMemory, DriverError};

/// The calls that fail on a lost device.
const LOST: [&str; 12] = [
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuMemsetD8Async",
];

stub_test!(a_lost_device_is_reported_without_a_panic, {
    let device = device();
    let (a, b) = (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let buffer = allocator.alloc_zeroed::<u8>(&a, 1 << 20).expect("allocated");
    drop(buffer.device_ptr(&b));
    for call in LOST {
        fail(call, 0, 700);
    }
    let error = allocator.alloc_zeroed::<u8>(&a, 50 << 20).expect_err("the device is lost");
    assert!(error.to_string().contains("the device is lost"), "{error}");
    drop(buffer);
    let error = allocator.synchronize(&a).expect_err("the device is lost");
    assert_eq!(error, CudaError::Driver(DriverError { call: "cuStreamSynchronize", code: 700 }));
    assert!(error.to_string().contains("its context is lost"), "{error}");
    drop(allocator);
});

stub_test!(idle_memory_without_access_gets_access_before_its_reuse, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let kept = allocator.alloc_zeroed::<u8>(&stream, 2 << 20).expect("memory");
    fail("cuMemSetAccess", 1, 719);
    fail("cuMemUnmap", 1, 719);
    assert!(allocator.alloc_zeroed::<u8>(&stream, 3 << 20).is_err());
    assert_eq!(
        (allocator.core().backend().idle_bytes(), live().device_bytes),
        (4 << 20, 6 << 20),
        "the chunk stays mapped"
    );
    // While the chunk cannot be made accessible, the allocation fails.
    fail("cuMemSetAccess", 1, 719);
    assert!(allocator.alloc_zeroed::<u8>(&stream, 3 << 20).is_err());
    let mut buffer = allocator.alloc_zeroed::<u8>(&stream, 3 << 20).expect("opened");
    stream.memcpy_htod(&[7_u8; 3 << 20], &mut buffer).expect("accessible");
    assert_eq!((allocator.core().backend().idle_bytes(), live().device_bytes), (0, 6 << 20));
    drop((buffer, kept));
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 0);
});

stub_test!(a_message_names_the_code_as_the_driver_does_and_otherwise_states_the_number, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    // The crate knows 906, the driver knows 912, and neither knows 9999.
    let messages = [
        (
            906,
            "cuStreamSynchronize failed with 906 (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT): the call is not allowed during a stream capture: make it before the capture begins",
        ),
        (912, "cuStreamSynchronize failed with 912 (CUDA_ERROR_EXTERNAL_DEVICE): see the documentation of the call"),
        (9999, "cuStreamSynchronize failed with 9999: see the documentation of the call"),
    ];
    drop(allocator.alloc_zeroed::<u8>(&stream, 512).expect("memory"));
    for (code, message) in messages {
        fail("cuStreamSynchronize", 1, code);
        let error = allocator.synchronize(&stream).expect_err("the call fails");
        assert_eq!(error.to_string(), message);
    }
});
