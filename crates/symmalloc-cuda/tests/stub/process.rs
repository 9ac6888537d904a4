//! A test on the stub runs in a process of its own, see `stub_process`.

use std::sync::Arc;
pub(crate) use stub_process::cuda::{LongWork, all_calls, calls, fail, fail_elsewhere, heal, hold, live, own_calls};
pub(crate) use stub_process::{Library, stub_test};
use symmalloc_cuda::CudaDevice;

/// The stub's device.
pub(crate) fn device() -> Arc<CudaDevice> {
    CudaDevice::new(0).expect("the stub has a device")
}
