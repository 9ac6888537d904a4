//! A small network that answers requests of varying sizes on three streams. cuBLAS multiplies, and a custom kernel adds the bias. Weights,
//! activations, cuBLAS workspaces and the pinned input and output buffers all come from the allocator. Every answer is compared with a
//! computation on the host.
//!
//! `cargo run --release -p symmalloc-cuda --example inference_loop [REQUESTS]`

use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, sys as cublas};
use cudarc::driver::{CudaFunction, CudaStream, DevicePtrMut, LaunchConfig, PushKernelArg};
use std::error::Error;
use std::sync::Arc;
use symmalloc_core::{Config, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaDevice, DeviceBuffer, PinnedAllocator};

const WIDTHS: [usize; 4] = [96, 256, 192, 64];
const WORKSPACE_BYTES: usize = 4 << 20;
const STREAMS: usize = 3;

const KERNEL: &str = r#"
extern "C" __global__ void bias_relu(float* x, const float* bias, unsigned int rows, unsigned int columns) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * columns) x[i] = fmaxf(x[i] + bias[i % columns], 0.0f);
}
"#;

/// A layer, on the host and on the device. Values are small integers, so sums are exact in any order.
struct Layer {
    inputs: usize,
    outputs: usize,
    weights: Vec<f32>,
    bias: Vec<f32>,
    device_weights: DeviceBuffer<f32>,
    device_bias: DeviceBuffer<f32>,
}

/// The resources of one stream.
struct Lane {
    stream: Arc<CudaStream>,
    blas: CudaBlas,
    _workspace: DeviceBuffer<u8>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = match CudaDevice::new(0) {
        Ok(device) => device,
        Err(error) => {
            println!("no device: {error}");
            return Ok(());
        }
    };
    let requests = std::env::args().nth(1).map_or(Ok(600), |text| text.parse())?;
    let allocator = CudaAllocator::new(&device, Config::default())?;
    let pinned = PinnedAllocator::pinned(&device, Config::default())?;
    let lanes = (0..STREAMS).map(|_| lane(&device, &allocator, &pinned)).collect::<Result<Vec<_>, _>>()?;
    let module = device.context().load_module(cudarc::nvrtc::compile_ptx(KERNEL)?)?;
    let bias_relu = module.load_function("bias_relu")?;
    let layers = layers(&allocator, &lanes[0].stream)?;

    let mut driver_calls = 0;
    for request in 0..requests {
        let lane = &lanes[request % STREAMS];
        let rows = 1 + (request * 37) % 64;
        let input: Vec<f32> = (0..rows * WIDTHS[0]).map(|at| ((at + request) % 5) as f32 - 2.0).collect();
        let before = CudaDevice::driver_calls();
        let found = answer(&allocator, &pinned, lane, &bias_relu, &layers, &input, rows)?;
        driver_calls = CudaDevice::driver_calls() - before;
        assert_eq!(found, expected(&layers, &input, rows), "request {request}");
    }
    println!(
        "{requests} answers on {STREAMS} streams are correct; the allocator made {driver_calls} driver calls for the last one"
    );
    println!("digest {}, {} segments", allocator.digest(PoolId::DEFAULT)?, allocator.stats().segments_born);
    assert_eq!((allocator.drop_errors().count, pinned.drop_errors().count), (0, 0));
    drop((layers, lanes));
    println!("{} bytes returned to the device", allocator.trim_all()? + pinned.trim_all()?);
    Ok(())
}

fn lane(device: &Arc<CudaDevice>, allocator: &CudaAllocator, pinned: &PinnedAllocator) -> Result<Lane, Box<dyn Error>> {
    let stream = device.context().new_stream()?;
    allocator.register_stream(&stream)?;
    pinned.register_stream(&stream)?;
    let blas = CudaBlas::new(Arc::clone(&stream))?;
    let mut workspace = allocator.alloc_zeroed_named::<u8>(&stream, WORKSPACE_BYTES, "cuBLAS workspace")?;
    let pointer = workspace.device_ptr_mut(&stream).0;
    // SAFETY: the workspace has WORKSPACE_BYTES bytes, is used by this handle alone, and outlives it.
    unsafe { cublas::cublasSetWorkspace_v2(*blas.handle(), pointer as *mut _, WORKSPACE_BYTES) }.result()?;
    Ok(Lane { stream, blas, _workspace: workspace })
}

fn layers(allocator: &CudaAllocator, stream: &Arc<CudaStream>) -> Result<Vec<Layer>, Box<dyn Error>> {
    let mut layers = Vec::new();
    for (index, pair) in WIDTHS.windows(2).enumerate() {
        let (inputs, outputs) = (pair[0], pair[1]);
        let weights: Vec<f32> = (0..inputs * outputs).map(|at| ((at * 7 + index) % 3) as f32 - 1.0).collect();
        let bias: Vec<f32> = (0..outputs).map(|at| (at % 4) as f32 - 1.0).collect();
        let mut device_weights = allocator.alloc_zeroed_named(stream, weights.len(), "weights")?;
        let mut device_bias = allocator.alloc_zeroed_named(stream, bias.len(), "bias")?;
        stream.memcpy_htod(&weights, &mut device_weights)?;
        stream.memcpy_htod(&bias, &mut device_bias)?;
        layers.push(Layer { inputs, outputs, weights, bias, device_weights, device_bias });
    }
    Ok(layers)
}

/// Answers one request on one stream, with buffers of the request's size.
fn answer(
    allocator: &CudaAllocator,
    pinned: &PinnedAllocator,
    lane: &Lane,
    bias_relu: &CudaFunction,
    layers: &[Layer],
    input: &[f32],
    rows: usize,
) -> Result<Vec<f32>, Box<dyn Error>> {
    let stream = &lane.stream;
    let mut staged = pinned.alloc_host_zeroed::<f32>(input.len())?;
    staged.as_mut_slice()?.copy_from_slice(input);
    let mut x = allocator.alloc_zeroed::<f32>(stream, input.len())?;
    stream.memcpy_htod(&staged, &mut x)?;
    for layer in layers {
        let mut y = allocator.alloc_zeroed::<f32>(stream, rows * layer.outputs)?;
        // Row-major y = x · w is column-major yᵀ = wᵀ · xᵀ.
        let config = GemmConfig {
            transa: cublas::cublasOperation_t::CUBLAS_OP_N,
            transb: cublas::cublasOperation_t::CUBLAS_OP_N,
            m: layer.outputs as i32,
            n: rows as i32,
            k: layer.inputs as i32,
            alpha: 1.0,
            lda: layer.outputs as i32,
            ldb: layer.inputs as i32,
            beta: 0.0,
            ldc: layer.outputs as i32,
        };
        // SAFETY: the sizes match the buffers. Another stream wrote the weights; taking their pointer makes cuBLAS's stream wait for it.
        unsafe { lane.blas.gemm(config, &layer.device_weights, &x, &mut y) }?;
        let (row_count, columns) = (rows as u32, layer.outputs as u32);
        let bias = layer.device_bias.read_on(stream);
        let elements = LaunchConfig::for_num_elems(row_count * columns);
        // SAFETY: the arguments match the kernel's parameters; `y` was allocated on this stream.
        unsafe {
            stream.launch_builder(bias_relu).arg(&mut y).arg(&bias).arg(&row_count).arg(&columns).launch(elements)
        }?;
        x = y;
    }
    let mut result = pinned.alloc_host_zeroed::<f32>(x.len())?;
    stream.memcpy_dtoh(&x, &mut result)?;
    Ok(result.as_slice()?.to_vec())
}

fn expected(layers: &[Layer], input: &[f32], rows: usize) -> Vec<f32> {
    layers.iter().fold(input.to_vec(), |x, layer| {
        let mut y: Vec<f32> = layer.bias.iter().copied().cycle().take(rows * layer.outputs).collect();
        for (row, y) in y.chunks_exact_mut(layer.outputs).enumerate() {
            for (x, weights) in x[row * layer.inputs..].iter().zip(layer.weights.chunks_exact(layer.outputs)) {
                y.iter_mut().zip(weights).for_each(|(y, weight)| *y += x * weight);
            }
            y.iter_mut().for_each(|y| *y = y.max(0.0));
        }
        y
    })
}
