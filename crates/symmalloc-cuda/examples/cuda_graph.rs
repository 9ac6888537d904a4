//! Captures a CUDA graph with memory from a graph pool on two streams, launches it many times, and captures it again with the same
//! placements.
//!
//! `cargo run --release -p symmalloc-cuda --example cuda_graph`

use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use std::error::Error;
use std::sync::Arc;
use symmalloc_core::Placement;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice, DeviceBuffer, DeviceGraph, GraphPool};

const COUNT: u32 = 1 << 20;

const KERNEL: &str = r#"
extern "C" __global__ void add(float* to, const float* a, const float* b, unsigned int count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = a[i] + b[i];
}
"#;

/// A captured program and the buffers that outlive the capture.
struct Program {
    graph: DeviceGraph,
    output: DeviceBuffer<f32>,
    places: Vec<Placement>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = match CudaDevice::new(0) {
        Ok(device) => device,
        Err(error) => {
            println!("no device: {error}");
            return Ok(());
        }
    };
    let (main, side) = (device.context().new_stream()?, device.context().new_stream()?);
    let module = device.context().load_module(cudarc::nvrtc::compile_ptx(KERNEL)?)?;
    let add = module.load_function("add")?;
    let allocator = CudaAllocator::new(&device, Config::default())?;
    let pool = GraphPool::new(&allocator, PoolConfig::builder().reserved(64 << 20).build()?)?;

    // The inputs are allocated outside the graph's pool. The graph stores their addresses, so they must outlive it.
    let mut input = allocator.alloc_zeroed::<f32>(&main, COUNT as usize)?;

    let first = capture(&allocator, &pool, &main, &side, &add, &input)?;
    for round in 1..=100_u16 {
        main.memcpy_htod(&vec![f32::from(round); COUNT as usize], &mut input)?;
        first.graph.launch(&main)?;
        let found = main.clone_dtoh(&first.output)?;
        main.synchronize()?;
        assert!(found.iter().all(|value| *value == 4.0 * f32::from(round)), "round {round}");
    }

    let Program { graph, output, places } = first;
    drop(output);
    let second = capture(&allocator, &pool, &main, &side, &add, &input)?;
    assert_eq!(second.places, places);
    // The graphs share their memory, so they run one after the other.
    graph.launch(&main)?;
    second.graph.launch(&main)?;
    let found = main.clone_dtoh(&second.output)?;
    main.synchronize()?;
    assert!(found.iter().all(|value| *value == 400.0));
    println!("100 launches are correct; the second capture has the same placements:");
    for (name, place) in ["left, first stream", "right, second stream", "output, first stream"].iter().zip(&places) {
        println!("  {name}: {place}");
    }
    assert_eq!(allocator.drop_errors().count, 0);
    Ok(())
}

/// Captures a graph that computes 4 × input: two concurrent sums, and their sum.
fn capture(
    allocator: &CudaAllocator,
    pool: &GraphPool,
    main: &Arc<CudaStream>,
    side: &Arc<CudaStream>,
    add: &CudaFunction,
    input: &DeviceBuffer<f32>,
) -> Result<Program, Box<dyn Error>> {
    let grid = LaunchConfig::for_num_elems(COUNT);
    let capture = pool.begin(main)?;
    let mut left = allocator.alloc_zeroed::<f32>(main, COUNT as usize)?;
    allocator.wait(side, main)?;
    let mut right = allocator.alloc_zeroed::<f32>(side, COUNT as usize)?;
    // SAFETY: the arguments match the kernel's parameters, and the buffers have COUNT elements; each is written by its own stream.
    unsafe { main.launch_builder(add).arg(&mut left).arg(input).arg(input).arg(&COUNT).launch(grid) }?;
    {
        let (to, from) = (right.on(side), input.read_on(side));
        // SAFETY: as above; the arguments were created for this stream.
        unsafe { side.launch_builder(add).arg(&to).arg(&from).arg(&from).arg(&COUNT).launch(grid) }?;
    }
    allocator.wait(main, side)?;
    let mut output = allocator.alloc_zeroed::<f32>(main, COUNT as usize)?;
    {
        let from = right.read_on(main);
        // SAFETY: as above.
        unsafe { main.launch_builder(add).arg(&mut output).arg(&left).arg(&from).arg(&COUNT).launch(grid) }?;
    }
    let places = vec![left.placement(), right.placement(), output.placement()];
    drop((left, right)); // reusable by the rest of the capture and by other graphs of the pool
    Ok(Program { graph: capture.end()?, output, places })
}
