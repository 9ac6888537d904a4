//! A model without kernels, so that it also runs on the stubs: it only computes sums over the ranks.
//!
//! ```text
//!  token ─► embedding ─► all-reduce ─┐            a layer: the rank's weights are copied into the window and reduced
//!  weights of layer n ─► all-reduce ─┴─► cache[token]   ─► next token, out of the sums
//! ```
//! If a rank reads another rank's stale window, weights are not restored, or a graph's addresses are no longer valid, the results differ
//! from those of the host, with which [`Model::answer`] compares them.

use cudarc::driver::CudaStream;
use std::error::Error;
use std::sync::Arc;
use symmalloc_core::op::Contents;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, DeviceGraph, GraphPool, Pool};
use symmalloc_nccl::{Communicator, ReduceOp, Registrar, Registration};

type Failure = Box<dyn Error>;

const LAYERS: usize = 4;
/// Number of distinct tokens.
const VOCABULARY: u32 = 1000;
const MIB: usize = 1 << 20;

/// The size of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Numbers per layer.
    width: usize,
    /// Tokens per answer.
    tokens: usize,
}

impl Size {
    /// Returns a size with about this many bytes of weights over all layers.
    pub(crate) fn with_weights(bytes: usize, tokens: usize) -> Self {
        Size { width: (bytes / LAYERS / 4).max(1024), tokens }
    }

    /// Returns the bytes of the three pools: weights, windows, cache.
    fn pool_bytes(self) -> [usize; 3] {
        // For each token, one number of each layer and the whole embedding are cached.
        [LAYERS * self.width * 4, (LAYERS + 1) * self.width * 4, self.tokens * self.width * 4]
    }

    /// Returns the bytes that an awake model uses on the device, without the rounding to granules.
    pub(crate) fn device_bytes(self) -> usize {
        self.pool_bytes().iter().sum()
    }
}

/// The method of submitting passes to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passes {
    /// A graph that is captured once.
    Captured,
    /// Individual calls. The stub of libnccl identifies the windows of a captured collective by their registration rather than by their
    /// handles, so on the stub a sleep invalidates the graph.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the stubs"))]
    Submitted,
}

/// Returns an allocator with memory for one and a half models, so that one model must sleep while the other is awake.
pub(crate) fn allocator_for(device: &Arc<CudaDevice>, size: Size) -> Result<CudaAllocator, Failure> {
    let limit = size.device_bytes() * 3 / 2 + 16 * MIB;
    Ok(CudaAllocator::new(device, format!("total_limit_bytes:{limit}").parse::<Config>()?)?)
}

/// The model; see the module documentation.
pub(crate) struct Model<'a> {
    allocator: &'a CudaAllocator,
    registrar: &'a Registrar,
    world: &'a Communicator,
    stream: Arc<CudaStream>,
    size: Size,
    seed: u32,
    /// Weights, windows and cache.
    pools: [Pool<CudaBackend>; 3],
    windows: Vec<DeviceBuffer<f32>>,
    cache: DeviceBuffer<f32>,
    weights: Vec<DeviceBuffer<f32>>,
    /// A captured pass over all layers, with the memory of the graph.
    pass: Option<(DeviceGraph, GraphPool)>,
}

impl<'a> Model<'a> {
    /// Allocates memory, writes the weights, registers the windows and captures a pass.
    pub(crate) fn load(
        allocator: &'a CudaAllocator,
        registrar: &'a Registrar,
        world: &'a Communicator,
        size: Size,
        (seed, passes): (u32, Passes),
    ) -> Result<Self, Failure> {
        let stream = allocator.device().context().new_stream()?;
        let private = |tag: &str| Ok::<_, Failure>(allocator.create_pool(format!("tag:{tag}").parse::<PoolConfig>()?)?);
        let windows = PoolConfig::builder().symmetric(true).fixed().build()?;
        let pools = [private("weights")?, allocator.create_pool(windows)?, private("kv_cache")?];
        registrar.attach(world, &[pools[1].id()], Registration::Windows)?;
        let buffers = |pool: usize, count: usize, len: usize| -> Result<Vec<DeviceBuffer<f32>>, Failure> {
            let inside = allocator.with_pool(&pools[pool]);
            (0..count).map(|_| Ok(inside.alloc_zeroed::<f32>(&stream, len)?)).collect()
        };
        let mut weights = buffers(0, LAYERS, size.width)?;
        for (layer, weights) in weights.iter_mut().enumerate() {
            let numbers: Vec<f32> = (0..size.width).map(|at| weight(seed, world.rank(), layer, at)).collect();
            stream.memcpy_htod(&numbers, weights)?;
        }
        let mut windows = buffers(1, LAYERS + 1, size.width)?;
        let cache = buffers(2, 1, size.tokens * size.width)?.remove(0);
        registrar.sync(&[world])?;
        // Run once eagerly, so that NCCL connects the ranks, then capture a graph.
        pass_over(world, &weights, &mut windows, &stream)?;
        world.synchronize(&stream)?;
        let mut pass = None;
        if passes == Passes::Captured {
            let graphs = GraphPool::new(allocator, PoolConfig::default())?;
            let capture = graphs.begin(&stream)?;
            pass_over(world, &weights, &mut windows, &stream)?;
            pass = Some((capture.end()?, graphs));
        }
        Ok(Model { allocator, registrar, world, stream, size, seed, pools, windows, cache, weights, pass })
    }

    /// Releases all device memory except the graph's: windows first, on all ranks. The contents of the weights are kept.
    pub(crate) fn sleep(&mut self) -> Result<(), Failure> {
        self.world.synchronize(&self.stream)?;
        let [weights, windows, cache] = self.pools.each_ref().map(Pool::id);
        self.registrar.sleep(self.world, windows, Contents::Drop)?;
        self.allocator.sleep(weights, Contents::Keep)?;
        self.allocator.sleep(cache, Contents::Drop)?;
        Ok(())
    }

    /// Restores the memory and the windows.
    pub(crate) fn wake(&mut self) -> Result<(), Failure> {
        let [weights, windows, cache] = self.pools.each_ref().map(Pool::id);
        self.allocator.wake(weights)?;
        self.allocator.wake(cache)?;
        let woken = self.registrar.wake(self.world, windows)?;
        if !woken.changed.is_empty() || !woken.lost.is_empty() {
            return Err(format!("the captured pass uses other windows: {woken:?}").into());
        }
        Ok(())
    }

    /// Answers a prompt, token by token, and compares the answer and the whole cache with the host's results.
    pub(crate) fn answer(&mut self, prompt: u32) -> Result<Vec<u32>, Failure> {
        let (width, ranks) = (self.size.width, self.world.ranks());
        let (mut answer, mut token) = (Vec::new(), prompt % VOCABULARY);
        for place in 0..self.size.tokens {
            let embedding: Vec<f32> = (0..width).map(|at| embedded(self.seed, self.world.rank(), token, at)).collect();
            self.stream.memcpy_htod(&embedding, &mut self.windows[0])?;
            match &self.pass {
                Some((graph, _)) => graph.launch(&self.stream)?,
                None => pass_over(self.world, &self.weights, &mut self.windows, &self.stream)?,
            }
            self.world.synchronize(&self.stream)?;
            let row = place * width;
            self.stream.memcpy_dtod(&self.windows[0], &mut self.cache.slice_mut(row..row + width))?;
            // Read one number of each layer, at a different position for each token.
            let at = (place * 37 + token as usize) % width;
            let mut sum = 0.0;
            for window in &self.windows {
                sum += self.stream.clone_dtoh(&window.slice(at..at + 1))?[0];
            }
            answer.push(token);
            token = (sum as u32 + place as u32) % VOCABULARY;
        }
        let cache = self.stream.clone_dtoh(&self.cache)?;
        let mut expected = prompt % VOCABULARY;
        for (place, token) in answer.iter().enumerate() {
            if *token != expected {
                return Err(format!("token {place} of prompt {prompt} is {token} and not {expected}").into());
            }
            let over_ranks = |of: &dyn Fn(u32) -> f32| (0..ranks).map(of).sum::<f32>();
            let row = &cache[place * width..][..width];
            let is_right = |at: usize| row[at] == over_ranks(&|rank| embedded(self.seed, rank, expected, at));
            if let Some(at) = (0..width).find(|at| !is_right(*at)) {
                return Err(format!("number {at} of token {place} in the cache is {}", row[at]).into());
            }
            let at = (place * 37 + expected as usize) % width;
            let layers = (0..LAYERS).map(|layer| over_ranks(&|rank| weight(self.seed, rank, layer, at))).sum::<f32>();
            expected = ((row[at] + layers) as u32 + place as u32) % VOCABULARY;
        }
        Ok(answer)
    }

    /// Wakes the model, detaches its windows from the communicator, and drops everything.
    pub(crate) fn end(mut self) -> Result<(), Failure> {
        self.wake()?;
        let windows = self.pools[1].id();
        self.registrar.detach(self.world, &[windows])?;
        self.registrar.sync(&[self.world])?;
        let allocator = self.allocator;
        drop(self);
        // The next model that wakes needs the memory.
        allocator.trim_all()?;
        Ok(())
    }
}

/// Submits a pass; the embedding is in the first window.
fn pass_over(
    world: &Communicator,
    weights: &[DeviceBuffer<f32>],
    windows: &mut [DeviceBuffer<f32>],
    stream: &Arc<CudaStream>,
) -> Result<(), Failure> {
    for (weights, window) in weights.iter().zip(&mut windows[1..]) {
        stream.memcpy_dtod(weights, window)?;
    }
    windows.iter_mut().try_for_each(|window| Ok(world.all_reduce_in_place(window, ReduceOp::Sum, stream)?))
}

/// Returns a rank's part of a weight: small integers, whose sums are exact in any order.
fn weight(seed: u32, rank: u32, layer: usize, at: usize) -> f32 {
    ((seed as usize * 31 + rank as usize * 17 + layer * 7 + at) % 127) as f32
}

fn embedded(seed: u32, rank: u32, token: u32, at: usize) -> f32 {
    ((seed + rank * 13 + token) as usize % 101 + at % 23) as f32
}
