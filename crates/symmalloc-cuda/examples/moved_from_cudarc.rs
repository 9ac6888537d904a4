//! A program ported from `CudaSlice`: calls that allocate get the prefix `allocator.`, and the rest is unchanged.
//!
//! ```text
//!  stream.alloc_zeros::<f32>(n)?        allocator.alloc_zeros::<f32>(&stream, n)?
//!  stream.clone_htod(&numbers)?         allocator.clone_htod(&stream, &numbers)?
//!  stream.clone_dtod(&slice)?           allocator.clone_dtod(&stream, &buffer)?
//!  stream.clone_dtoh(&slice)?           stream.clone_dtoh(&buffer)?                      likewise for all other copies
//!  slice.try_clone()?                   buffer.try_clone()?
//!  slice.slice(..), .split_at_mut(n)    buffer.slice(..), .split_at_mut(n)
//!  builder.arg(&slice)                  builder.arg(&buffer)                             on the buffer's stream
//!  f(&slice)                            f(&*buffer.lend_on(&stream)?)                    where `f` takes a `&CudaSlice`
//! ```
//! `cargo run -p symmalloc-cuda --example moved_from_cudarc`

use cudarc::driver::{CudaSlice, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::compile_ptx;
use symmalloc_cuda::{CudaAllocator, CudaDevice, CudaError};

const SAXPY: &str = r#"
extern "C" __global__ void saxpy(float a, const float* x, float* y, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"#;

/// Stands in for a library function that accepts only a `CudaSlice`.
fn sum(numbers: &CudaSlice<f32>) -> Result<f32, cudarc::driver::DriverError> {
    Ok(numbers.stream().clone_dtoh(numbers)?.iter().sum())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match CudaDevice::new(0) {
        Err(error @ (CudaError::Load(_) | CudaError::Driver(_))) => {
            println!("no device: {error}");
            return Ok(());
        }
        device => device?,
    };
    let stream = device.context().new_stream()?;
    let allocator = CudaAllocator::new(&device, Default::default())?;

    let len = 1 << 20;
    let x = allocator.clone_htod(&stream, &vec![1.0_f32; len])?;
    let mut y = allocator.alloc_zeros::<f32>(&stream, len)?;
    let module = device.context().load_module(compile_ptx(SAXPY)?)?;
    let saxpy = module.load_function("saxpy")?;
    let (a, n) = (2.0_f32, len as u32);
    // SAFETY: the arguments match the kernel's signature, with `n` elements in both buffers, on the stream of both.
    unsafe {
        stream.launch_builder(&saxpy).arg(&a).arg(&x).arg(&mut y).arg(&n).launch(LaunchConfig::for_num_elems(n))?;
    }
    assert_eq!(stream.clone_dtoh(&y.slice(..4))?, [2.0; 4]);

    let copy = y.try_clone()?;
    stream.memset_zeros(&mut y.slice_mut(len / 2..))?;
    let (before, after) = (sum(&*copy.lend_on(&stream)?)?, sum(&*y.lend_on(&stream)?)?);
    println!("the sum is {before}, and {after} after one half is set to zero");
    assert_eq!((before, after), (2.0 * len as f32, len as f32));

    // Parts can outlive the buffer's variable. Here, each of two threads gets one.
    let mut low = y.into_part();
    let mut high = low.split_off(len / 2);
    let filled = std::thread::scope(|scope| {
        let fill = |part, value: f32| stream.memcpy_htod(&vec![value; len / 2], part);
        let threads = [(&mut low, 3.0), (&mut high, 4.0)].map(|(part, value)| scope.spawn(move || fill(part, value)));
        threads.map(|thread| thread.join().expect("no panic"))
    });
    filled.into_iter().collect::<Result<Vec<()>, _>>()?;
    assert_eq!((stream.clone_dtoh(&low)?[0], stream.clone_dtoh(&high)?[0]), (3.0, 4.0));
    println!("{}", allocator.core().summary());
    Ok(())
}
