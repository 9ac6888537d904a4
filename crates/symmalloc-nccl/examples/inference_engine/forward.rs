//! The model on the device: its weights, and the forward pass.

use super::Failure;
use super::memory::{Memory, Span};
use super::model::{
    EPSILON, HEAD, HEADS, HIDDEN, INNER, LAYERS, Matrix, Model, PARTS, POSITIONS, SCORE_SCALE, STEPS, VOCABULARY,
};
use cudarc::driver::{CudaFunction, CudaStream, DevicePtrMut, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use std::sync::Arc;
use symmalloc_nccl::{Communicator, ReduceOp};

/// Positions per page.
pub(crate) const PAGE: usize = 16;
/// Maximum number of pages per request.
pub(crate) const PAGES: usize = POSITIONS / PAGE;
/// The position in a row without a request.
pub(crate) const NO_POSITION: u64 = u64::MAX;

/// A token of a request, in the layout that the kernels read.
pub(crate) type Row = [u64; 2 + PAGES];

/// The kernels, compiled for this rank's share.
struct Kernels {
    embed: CudaFunction,
    norm: CudaFunction,
    product: CudaFunction,
    product_in_parts: CudaFunction,
    keep: CudaFunction,
    attention: CudaFunction,
    add: CudaFunction,
    largest: CudaFunction,
}

/// A matrix on the device.
struct Weights<M: Memory> {
    address: u64,
    outputs: usize,
    inputs: usize,
    _buffer: M::Buffer<f32>,
}

/// A layer on the device.
struct DeviceLayer<M: Memory> {
    qkv: Weights<M>,
    out: Weights<M>,
    up: Weights<M>,
    down: Weights<M>,
}

/// This rank's part of the model on the device. All streams read the model, and must complete before it is dropped.
pub(crate) struct DeviceModel<'a, M: Memory> {
    kernels: Kernels,
    tokens: Weights<M>,
    positions: Weights<M>,
    layers: Vec<DeviceLayer<M>>,
    head: Weights<M>,
    comm: &'a Communicator,
}

/// The buffers of a pass over at most `rows_max` rows. Supports one pass at a time.
pub(crate) struct Workspace<M: Memory> {
    /// Start of the buffers: hidden states, normalized hidden states, queries with keys and values, outputs of heads or inner units,
    /// scores.
    address: u64,
    rows_max: usize,
    reduced: u64,
    _buffers: (M::Buffer<f32>, M::Buffer<f32>),
}

impl<M: Memory> Workspace<M> {
    /// Creates a workspace for passes on this stream.
    pub(crate) fn new(memory: &M, stream: &Arc<CudaStream>, rows_max: usize) -> Result<Self, Failure> {
        let mut buffer = memory.take::<f32>(stream, rows_max * (5 * HIDDEN + INNER + VOCABULARY))?;
        let mut reduced = memory.take_reduced(stream, rows_max * HIDDEN)?;
        let (address, reduced_address) = (buffer.device_ptr_mut(stream).0, reduced.device_ptr_mut(stream).0);
        Ok(Workspace { address, rows_max, reduced: reduced_address, _buffers: (buffer, reduced) })
    }

    /// Returns the address after `numbers` numbers of each row.
    fn behind(&self, numbers: usize) -> u64 {
        self.address + (self.rows_max * numbers * size_of::<f32>()) as u64
    }
}

/// An argument of a kernel.
enum Arg {
    Address(u64),
    Number(i32),
}

impl<'a, M: Memory> DeviceModel<'a, M> {
    /// Compiles the kernels and copies this rank's part of the model to the device.
    pub(crate) fn new(
        memory: &M,
        comm: &'a Communicator,
        stream: &Arc<CudaStream>,
        model: &Model,
    ) -> Result<Self, Failure> {
        let (rank, ranks) = (comm.rank() as usize, comm.ranks() as usize);
        let part = model.part(rank, ranks);
        let upload = |matrix: &Matrix| -> Result<Weights<M>, Failure> {
            let mut buffer = memory.take::<f32>(stream, matrix.weights.len())?;
            stream.memcpy_htod(&matrix.weights, &mut buffer)?;
            let address = buffer.device_ptr_mut(stream).0;
            Ok(Weights { address, outputs: matrix.outputs(), inputs: matrix.inputs, _buffer: buffer })
        };
        let mut layers = Vec::new();
        for layer in &part.layers {
            let [qkv, out, up, down] = [&layer.qkv, &layer.out, &layer.up, &layer.down].map(upload);
            layers.push(DeviceLayer { qkv: qkv?, out: out?, up: up?, down: down? });
        }
        let (tokens, positions, head) = (upload(&part.tokens)?, upload(&part.positions)?, upload(&part.head)?);
        // Other streams read the weights without waiting for an event.
        stream.synchronize()?;
        Ok(DeviceModel { kernels: kernels(stream, ranks)?, tokens, positions, layers, head, comm })
    }

    /// Returns the number of elements in this rank's heads.
    fn width(&self) -> usize {
        HIDDEN / self.comm.ranks() as usize
    }

    /// Returns the number of elements of a page: keys and values of its positions in every layer.
    pub(crate) fn page_len(&self) -> usize {
        LAYERS * 2 * PAGE * self.width()
    }

    /// Runs one pass: stores keys and values of all rows, and writes the next token of each row from `first_scored` on.
    pub(crate) fn forward(
        &self,
        stream: &Arc<CudaStream>,
        work: &Workspace<M>,
        rows: (u64, usize),
        first_scored: usize,
        tokens: u64,
    ) -> Result<(), Failure> {
        use Arg::{Address, Number};
        let (rows, count) = rows;
        assert!(count <= work.rows_max);
        let (ranks, heads) = (self.comm.ranks() as usize, HEADS / self.comm.ranks() as usize);
        let (x, normed, qkv) = (work.behind(0), work.behind(HIDDEN), work.behind(2 * HIDDEN));
        let (found, scores, reduced) = (work.behind(5 * HIDDEN), work.behind(5 * HIDDEN + INNER), work.reduced);
        let kernels = &self.kernels;
        let launch = |kernel: &CudaFunction, grid: (usize, usize), threads: usize, arguments: &[Arg]| {
            let mut builder = stream.launch_builder(kernel);
            for argument in arguments {
                match argument {
                    Address(address) => builder.arg(address),
                    Number(number) => builder.arg(number),
                };
            }
            let grid_dim = (grid.0 as u32, grid.1 as u32, 1);
            let config = LaunchConfig { grid_dim, block_dim: (threads as u32, 1, 1), shared_mem_bytes: 0 };
            // SAFETY: the arguments match the kernels' parameters, and the buffers have the sizes that the kernels index: those of the
            // workspace, of the weights, and of the pages in the rows.
            unsafe { builder.launch(config) }.map(drop)
        };
        let norm = || launch(&kernels.norm, (count, 1), 32, &[Address(normed), Address(x)]);
        // The last argument is specific to the kernel.
        let multiply = |kernel: &CudaFunction, to: u64, from: u64, weights: &Weights<M>, rows: usize, last: usize| {
            let numbers = [weights.outputs, weights.inputs, last].map(|it| Number(it as i32));
            let addresses = [Address(to), Address(from), Address(weights.address)];
            let arguments: Vec<Arg> = addresses.into_iter().chain(numbers).collect();
            launch(kernel, (weights.outputs / 8, rows), 256, &arguments)
        };
        let product = |to: u64, from: u64, weights: &Weights<M>, is_silu: bool, rows: usize| {
            multiply(&kernels.product, to, from, weights, rows, usize::from(is_silu))
        };
        // Computes a product that ranks share: reduces this rank's sums over all ranks, and adds them to the hidden states.
        let shared = |weights: &Weights<M>| -> Result<(), Failure> {
            multiply(&kernels.product_in_parts, reduced, found, weights, count, PARTS / ranks)?;
            if ranks > 1 {
                let mut sums = Span { address: reduced, len: count * HIDDEN, stream };
                self.comm.all_reduce_in_place(&mut sums, ReduceOp::Sum, stream)?;
            }
            Ok(launch(&kernels.add, (count, 1), HIDDEN, &[Address(x), Address(reduced)])?)
        };
        let embedding = [x, rows, self.tokens.address, self.positions.address].map(Address);
        launch(&kernels.embed, (count, 1), HIDDEN, &embedding)?;
        for (layer, number) in self.layers.iter().zip(0..) {
            norm()?;
            product(qkv, normed, &layer.qkv, false, count)?;
            launch(&kernels.keep, (count, 1), self.width(), &[Address(qkv), Address(rows), Number(number)])?;
            let attention = [Address(found), Address(qkv), Address(rows), Number(number)];
            launch(&kernels.attention, (heads, count), 32, &attention)?;
            shared(&layer.out)?;
            norm()?;
            product(found, normed, &layer.up, true, count)?;
            shared(&layer.down)?;
        }
        norm()?;
        let scored = normed + (first_scored * HIDDEN * size_of::<f32>()) as u64;
        product(scores, scored, &self.head, false, count - first_scored)?;
        Ok(launch(&kernels.largest, (count - first_scored, 1), 256, &[Address(tokens), Address(scores)])?)
    }
}

fn kernels(stream: &Arc<CudaStream>, ranks: usize) -> Result<Kernels, Failure> {
    let numbers = [
        ("HIDDEN", HIDDEN),
        ("HEAD", HEAD),
        ("WIDTH", HIDDEN / ranks),
        ("VOCABULARY", VOCABULARY),
        ("POSITIONS", POSITIONS),
        ("PAGE", PAGE),
        ("PAGES", PAGES),
    ];
    let mut options: Vec<String> = numbers.iter().map(|(name, number)| format!("-D{name}={number}")).collect();
    for (name, number) in [("EPSILON", EPSILON), ("SCORE_SCALE", SCORE_SCALE), ("STEPS", STEPS)] {
        options.push(format!("-D{name}={number:e}f"));
    }
    // Round each operation separately, as on the host.
    let options = CompileOptions { fmad: Some(false), options, ..CompileOptions::default() };
    let module = stream.context().load_module(compile_ptx_with_opts(include_str!("kernels.cu"), options)?)?;
    Ok(Kernels {
        embed: module.load_function("embed")?,
        norm: module.load_function("normalize")?,
        product: module.load_function("product")?,
        product_in_parts: module.load_function("product_in_parts")?,
        keep: module.load_function("keep")?,
        attention: module.load_function("attention")?,
        add: module.load_function("add")?,
        largest: module.load_function("largest")?,
    })
}
