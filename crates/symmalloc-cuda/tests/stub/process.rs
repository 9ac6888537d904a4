//! Support for tests on the stub, which run in separate processes: see `stub_process`.

use std::sync::Arc;
pub(crate) use stub_process::cuda::{
    Logged, LongWork, advance, all_calls, begin_log, calls, fail, fail_elsewhere, heal, hold, live, move_hints,
    own_calls, reported, take_log,
};
pub(crate) use stub_process::{Library, descriptors, steady, stub_test};
use symmalloc_cuda::CudaDevice;

/// Returns the stub's device.
pub(crate) fn device() -> Arc<CudaDevice> {
    CudaDevice::new(0).expect("the stub has a device")
}
