//! The backend contract, tested on the device.

use crate::device;
use std::sync::Arc;
use symmalloc_cuda::{CudaBackend, CudaBackendBuilder, CudaDevice, CudaMemory};
use symmalloc_harness::conformance::conformance;

fn with_streams(device: &Arc<CudaDevice>, builder: CudaBackendBuilder) -> CudaBackend {
    let backend = builder.build().expect("the device supports it");
    for _ in 0..4 {
        backend.add_stream(device.context().new_stream().expect("a stream"));
    }
    backend
}

#[test]
fn the_device_keeps_the_contract() {
    let Some(device) = device() else { return };
    println!("{:?}", CudaBackend::builder(&device).build().expect("supported").traits());
    conformance(|| with_streams(&device, CudaBackend::builder(&device)));
}

#[test]
fn the_device_keeps_the_contract_with_chunks_of_32_mib() {
    let Some(device) = device() else { return };
    conformance(|| with_streams(&device, CudaBackend::builder(&device).chunk_bytes(32 << 20)));
}

#[test]
fn the_device_keeps_the_contract_with_prefetching() {
    let Some(device) = device() else { return };
    conformance(|| with_streams(&device, CudaBackend::builder(&device).chunk_bytes(8 << 20).prefetch_bytes(64 << 20)));
}
