//! Two small models take turns on one GPU. Only one of them has device memory at a time: the weights of the other are kept on the host, and
//! its KV cache is dropped. Graphs with all-reduces in windows are captured once. Every turn checks every number of every answer.
//!
//! ```sh
//! cargo run --release -p symmalloc-nccl --example take_turns -- 50 32     # turns, MiB of each model's weights
//! torchrun --no-python --nproc-per-node 2 target/release/examples/take_turns 50
//! ```
//! `cargo test -p symmalloc-nccl --test stub take_turns` runs the same example on the stubs, with 1, 2 and 4 ranks.

mod model;

use model::{Model, Passes, Size, allocator_for};
use std::error::Error;
use std::time::{Duration, Instant};
use symmalloc_cuda::CudaDevice;
use symmalloc_nccl::{Communicator, Launch, LaunchError, Registrar, UniqueId};

const DEADLINE: Duration = Duration::from_secs(60);
/// Tokens per answer.
const TOKENS: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let number = |at: usize, otherwise: usize| std::env::args().nth(at).map_or(Ok(otherwise), |text| text.parse());
    let (turns, weights) = (number(1, 20)?, number(2, 64)? << 20);
    let (device, world) = match Launch::from_env() {
        Ok(launch) => {
            let device = CudaDevice::for_local_rank(launch.local_rank)?;
            let world = Communicator::builder(&device).deadline(DEADLINE).connect_env()?;
            (device, world)
        }
        Err(LaunchError::NotLaunched) => {
            let device = CudaDevice::new(0)?;
            let world = Communicator::builder(&device).deadline(DEADLINE).connect(UniqueId::new()?, 0, 1)?;
            (device, world)
        }
        Err(error) => return Err(error.into()),
    };
    let size = Size::with_weights(weights, TOKENS);
    let allocator = allocator_for(&device, size)?;
    let registrar = Registrar::builder(&allocator).build()?;
    let mut models = Vec::new();
    for seed in [3, 5] {
        let mut model = Model::load(&allocator, &registrar, &world, size, (seed, Passes::Captured))?;
        model.sleep()?; // releases memory for the other model
        models.push(model);
    }
    let (mut asleep, mut awake) = (Duration::ZERO, Duration::ZERO);
    let free_bytes = device.memory_info()?.free_bytes;
    for turn in 0..turns {
        let model = &mut models[turn % 2];
        let begun = Instant::now();
        model.wake()?;
        awake += begun.elapsed();
        model.answer(turn as u32)?;
        let begun = Instant::now();
        model.sleep()?;
        asleep += begun.elapsed();
    }
    let left_bytes = device.memory_info()?.free_bytes;
    assert!(left_bytes >= free_bytes, "{} bytes were not released after {turns} turns", free_bytes - left_bytes);
    if world.rank() == 0 {
        let each = |sum: Duration| sum / turns.max(1) as u32;
        println!(
            "{} ranks, NCCL {}: {turns} turns of 2 models of {} MiB, every answer right, the same graphs and windows",
            world.ranks(),
            world.nccl().version(),
            size.device_bytes() >> 20,
        );
        println!("sleep {:.2?}, wake {:.2?} on average", each(asleep), each(awake));
    }
    models.into_iter().try_for_each(Model::end)?;
    world.destroy()?;
    Ok(())
}
