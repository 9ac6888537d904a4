//! The CUDA backend on a device. Without a device, every test prints a message and passes. Commands: `docs/testing.md`; measured results:
//! `docs/measured/gpu.md`.
//!
//! Run with `--test-threads=1`: some tests measure the device's free memory.

mod collectives;
mod conformance;
mod costs;
mod devices;
mod dma_buf;
mod jobs;
mod kernels;
mod memory;
mod pools;
mod races;
mod raw;
mod sleep;
mod slices;
#[path = "../soak/mod.rs"]
mod soak;

use std::sync::Arc;
use symmalloc_cuda::CudaDevice;

/// Returns the first device. If there is none, prints the reason.
fn device() -> Option<Arc<CudaDevice>> {
    match CudaDevice::new(0) {
        Ok(device) => Some(device),
        Err(error) => {
            println!("skipped, no device: {error}");
            None
        }
    }
}

/// Returns the first two devices. If there are fewer, prints the reason.
fn two_devices() -> Option<[Arc<CudaDevice>; 2]> {
    let first = device()?;
    match CudaDevice::new(1) {
        Ok(second) => Some([first, second]),
        Err(error) => {
            println!("skipped, no second device: {error}");
            None
        }
    }
}

#[test]
fn memory_descriptors_and_threads_do_not_leak() {
    let Some(device) = device() else { return };
    // The driver does not count its objects.
    soak::run(&device, || 0);
}
