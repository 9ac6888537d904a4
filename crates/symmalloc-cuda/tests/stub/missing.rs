//! Behavior without a driver, with an old driver, or without a device.

use crate::process::{Library, all_calls, stub_test};
use symmalloc_cuda::{CudaDevice, CudaError, LoadError};

stub_test!(without_libcuda_the_error_lists_the_attempts, Library::Named("libsomething.so"), [], {
    match CudaDevice::new(0) {
        Err(CudaError::Load(error @ LoadError::LibraryMissing { .. })) => {
            let text = error.to_string();
            assert!(text.contains("libcuda.so: ") && text.contains("libcuda.so.1: "), "{text}");
            assert!(text.contains("LD_LIBRARY_PATH") && text.contains("SYMMALLOC_CUDA_LIBRARY"), "{text}");
            assert_eq!(CudaDevice::library().expect_err("missing"), error, "the result is cached");
        }
        _ if std::path::Path::new("/dev/nvidiactl").exists() => println!("skipped: this machine has a driver"),
        other => panic!("{other:?}"),
    }
});

stub_test!(a_configured_library_is_the_only_one_tried, ["SYMMALLOC_CUDA_LIBRARY" = "/nowhere/libcuda.so.1"], {
    let Err(LoadError::LibraryMissing { tried }) = CudaDevice::library() else { panic!("opened a missing library") };
    assert!(tried.len() == 1 && tried[0].contains("/nowhere/libcuda.so.1"), "{tried:?}");
});

stub_test!(a_configured_library_that_cudarc_cannot_find_is_an_error, Library::Named("libsomething.so"), [], {
    let folder = std::env::var_os("LD_LIBRARY_PATH").expect("set by the test");
    let file = std::path::Path::new(&folder).join("libsomething.so");
    // SAFETY: only one thread of this process reads the environment.
    unsafe { std::env::set_var("SYMMALLOC_CUDA_LIBRARY", &file) };
    match CudaDevice::new(0) {
        Err(CudaError::Load(LoadError::LibraryMissing { tried })) => assert_eq!(tried.len(), 2, "{tried:?}"),
        _ if std::path::Path::new("/dev/nvidiactl").exists() => println!("skipped: this machine has a driver"),
        other => panic!("{other:?}"),
    }
});

stub_test!(the_path_of_the_library_is_reported, {
    let folder = std::env::var_os("LD_LIBRARY_PATH").expect("set by the test");
    let before = all_calls();
    assert_eq!(CudaDevice::library().expect("found"), std::path::Path::new(&folder).join("libcuda.so"));
    assert_eq!(all_calls(), before, "no call is made");
});

stub_test!(an_open_libcuda_takes_precedence, Library::Named("libcuda.so.1"), [], {
    let folder = std::env::var_os("LD_LIBRARY_PATH").expect("set by the test");
    let before = all_calls(); // opens libcuda.so.1
    let folder = std::path::Path::new(&folder);
    std::fs::copy(folder.join("libcuda.so.1"), folder.join("libcuda.so")).expect("copied");
    assert_eq!(CudaDevice::library().expect("found"), folder.join("libcuda.so.1"));
    assert_eq!(all_calls(), before);
});

stub_test!(libraries_are_found_under_every_known_name, Library::Named("libcuda.so.1"), [], {
    CudaDevice::new(0).expect("libcuda.so.1 is one of the names");
});

/// Returns the error for a call that the stub lacks.
fn lacks(symbol: &'static str) -> LoadError {
    let folder = std::env::var_os("LD_LIBRARY_PATH").expect("set by the test");
    let path = std::path::Path::new(&folder).join("libcuda.so").display().to_string();
    LoadError::SymbolMissing { path, symbol }
}

stub_test!(an_old_driver_is_reported_with_the_missing_call, Library::StubWithout("cuMemAddressReserve"), [], {
    let error = CudaDevice::new(0).expect_err("a call is missing");
    assert_eq!(error, CudaError::Load(lacks("cuMemAddressReserve")));
    assert!(error.to_string().contains("too old"), "{error}");
    // A second call returns the cached result.
    assert_eq!(CudaDevice::count().expect_err("a call is missing"), error);
});

stub_test!(calls_that_cudarc_needs_are_looked_up_too, Library::StubWithout("cuDevicePrimaryCtxRetain"), [], {
    let error = CudaDevice::new(0).expect_err("a call is missing");
    assert_eq!(error, CudaError::Load(lacks("cuDevicePrimaryCtxRetain")));
});

stub_test!(without_a_device_the_error_states_the_remedy, ["STUB_NO_DEVICE" = "1"], {
    let error = CudaDevice::new(0).expect_err("there is no device").to_string();
    assert_eq!(error, "cuInit failed with 100 (CUDA_ERROR_NO_DEVICE): check nvidia-smi and CUDA_VISIBLE_DEVICES");
});

stub_test!(an_ordinal_beyond_the_devices_is_refused, ["STUB_DEVICES" = "2"], {
    CudaDevice::new(1).expect("the second device");
    assert_eq!(CudaDevice::new(2).expect_err("no third"), CudaError::NoSuchDevice { ordinal: 2, devices: 2 });
});

stub_test!(the_current_device_is_that_of_the_current_context, ["STUB_DEVICES" = "2"], {
    assert_eq!(CudaDevice::current().expect("queried"), None);
    let [first, second] = [0, 1].map(|ordinal| CudaDevice::new(ordinal).expect("the stub has two"));
    assert_eq!(
        CudaDevice::current().expect("queried"),
        None,
        "creating a device leaves the thread's context unchanged"
    );
    let _outer = first.enter().expect("entered");
    {
        let _inner = second.enter().expect("entered");
        assert_eq!(CudaDevice::current().expect("queried"), Some(1));
    }
    assert_eq!(CudaDevice::current().expect("queried"), Some(0));
});
