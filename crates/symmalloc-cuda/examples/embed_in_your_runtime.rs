//! A minimal embedding: a runtime with its own context and streams allocates all of its memory through this crate.
//!
//! `cargo run -p symmalloc-cuda --example embed_in_your_runtime`

use cudarc::driver::CudaContext;
use symmalloc_core::Config;
use symmalloc_cuda::{CudaAllocator, CudaDevice, CudaError};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Check before using cudarc, which panics if there is no driver. This call returns an error instead.
    if let Err(error @ (CudaError::Load(_) | CudaError::Driver(_))) = CudaDevice::count() {
        println!("no device: {error}");
        return Ok(());
    }
    // Your runtime already has these.
    let context = CudaContext::new(0)?;
    let (compute, copies) = (context.new_stream()?, context.new_stream()?);

    // Create one allocator per device. Register streams in the same order on every rank.
    let device = CudaDevice::with_context(context)?;
    let allocator = CudaAllocator::new(&device, Config::default())?;
    allocator.register_stream(&compute)?;
    allocator.register_stream(&copies)?;

    // Buffers can be used wherever a `CudaSlice` can, on any stream, and are freed when dropped.
    let mut tensor = allocator.alloc_zeroed_named::<f32>(&compute, 1 << 20, "activations")?;
    copies.memcpy_htod(&vec![1.0_f32; 1 << 20], &mut tensor)?;
    let host = compute.clone_dtoh(&tensor)?;
    compute.synchronize()?;
    assert_eq!(host, vec![1.0_f32; 1 << 20]);
    println!("{} at {:?}", tensor.placement(), tensor);
    drop(tensor);

    // Tensors that track their memory themselves use bytes and handles.
    let raw = allocator.allocate(&compute, 3 << 20)?;
    println!("{} bytes at {:#x}", raw.size_bytes, raw.address.0);
    allocator.free(raw.handle)?;

    println!("{}", allocator.core().summary());
    println!("{} bytes returned to the device", allocator.trim_all()?);
    Ok(())
}
