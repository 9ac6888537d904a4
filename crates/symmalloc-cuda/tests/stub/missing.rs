//! Machines without a driver, with an old one, or without a device.

use crate::process::{Library, stub_test};
use symmalloc_cuda::{CudaDevice, CudaError, LoadError};

stub_test!(without_libcuda_the_error_lists_the_names, Library::Named("libsomething.so"), [], {
    match CudaDevice::new(0) {
        Err(CudaError::Load(error @ LoadError::LibraryMissing { .. })) => {
            let text = error.to_string();
            assert!(text.contains("libcuda.so") && text.contains("LD_LIBRARY_PATH"), "{text}");
        }
        _ if std::path::Path::new("/dev/nvidiactl").exists() => println!("skipped: this machine has a driver"),
        other => panic!("{other:?}"),
    }
});

stub_test!(a_library_of_another_name_is_found_under_the_names_that_are_tried, Library::Named("libcuda.so.1"), [], {
    CudaDevice::new(0).expect("libcuda.so.1 is one of the names");
});

stub_test!(an_old_driver_is_named_by_the_call_it_lacks, Library::StubWithout("cuMemAddressReserve"), [], {
    let error = CudaDevice::new(0).expect_err("a call is missing");
    assert_eq!(error, CudaError::Load(LoadError::SymbolMissing { symbol: "cuMemAddressReserve" }));
    assert!(error.to_string().contains("too old"), "{error}");
    // And again: the answer is remembered.
    assert_eq!(CudaDevice::count().expect_err("a call is missing"), error);
});

stub_test!(what_cudarc_needs_is_looked_up_too, Library::StubWithout("cuDevicePrimaryCtxRetain"), [], {
    let error = CudaDevice::new(0).expect_err("a call is missing");
    assert_eq!(error, CudaError::Load(LoadError::SymbolMissing { symbol: "cuDevicePrimaryCtxRetain" }));
});

stub_test!(without_a_device_the_error_says_where_to_look, ["STUB_NO_DEVICE" = "1"], {
    let error = CudaDevice::new(0).expect_err("there is no device").to_string();
    assert_eq!(error, "cuInit failed with 100 (CUDA_ERROR_NO_DEVICE): check nvidia-smi and CUDA_VISIBLE_DEVICES");
});

stub_test!(an_ordinal_beyond_the_devices_is_refused, ["STUB_DEVICES" = "2"], {
    CudaDevice::new(1).expect("the second device");
    assert_eq!(CudaDevice::new(2).expect_err("no third"), CudaError::NoSuchDevice { ordinal: 2, devices: 2 });
});
