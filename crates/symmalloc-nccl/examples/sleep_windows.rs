//! A pool with windows sleeps and wakes on all ranks, and a graph that was captured before replays right: no capture again, the same
//! windows. In between another allocator has the memory. Everything is checked in every cycle.
//!
//! ```sh
//! cargo run --release -p symmalloc-nccl --example sleep_windows -- 100 64    # cycles, MiB of each segment
//! torchrun --no-python --nproc-per-node 2 target/release/examples/sleep_windows 100
//! ```

use cudarc::driver::CudaStream;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::op::Contents;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice, DeviceBuffer, GraphPool};
use symmalloc_nccl::{Communicator, Launch, LaunchError, ReduceOp, Registrar, Registration, UniqueId};

const SEGMENTS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let number = |at: usize, otherwise: usize| std::env::args().nth(at).map_or(Ok(otherwise), |text| text.parse());
    let (cycles, segment) = (number(1, 20)? as u32, number(2, 64)? << 20);
    let (device, world) = match Launch::from_env() {
        Ok(launch) => {
            let device = CudaDevice::new(launch.local_rank as usize)?;
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
    let stream = device.context().new_stream()?;
    let allocator = CudaAllocator::new(&device, Config::default())?;
    allocator.register_stream(&stream)?;
    let registrar = Registrar::builder(&allocator).build()?;
    let config = PoolConfig::builder().symmetric(true).fixed().build()?;
    let pool = allocator.create_pool(config)?;
    registrar.attach(&world, &[pool.id()], Registration::Windows)?;
    let mut buffers: Vec<DeviceBuffer<f32>> = (0..SEGMENTS)
        .map(|_| allocator.with_pool(&pool).alloc_zeroed(&stream, segment / 4))
        .collect::<Result<_, _>>()?;
    registrar.sync(&[&world])?;
    let windows = |buffers: &[DeviceBuffer<f32>]| -> Vec<String> {
        let text = |buffer| match registrar.window_of(&world, buffer) {
            Ok(span) => format!("{:?}", span.window),
            Err(error) => format!("no window ({error})"),
        };
        buffers.iter().map(text).collect()
    };
    let before = windows(&buffers);
    // Once as it is, so that NCCL has connected the ranks; then into a graph.
    reduce_all(&world, &mut buffers, &stream)?;
    world.synchronize(&stream)?;
    let graphs = GraphPool::new(&allocator, PoolConfig::default())?;
    let capture = graphs.begin(&stream)?;
    reduce_all(&world, &mut buffers, &stream)?;
    let graph = capture.end()?;
    check(&world, &mut buffers, &stream, 0, |_| Ok(graph.launch(&stream)?))?;

    let other = CudaAllocator::new(&device, Config::default())?;
    let (mut asleep, mut awake, mut back) = (Duration::ZERO, Duration::ZERO, 0);
    for cycle in 1..=cycles {
        let contents = if cycle % 2 == 0 { Contents::Keep } else { Contents::Drop };
        let kept: Vec<f32> = (0..1024).map(|at| (at * cycle) as f32).collect();
        stream.memcpy_htod(&kept, &mut buffers[0].slice_mut(0..1024))?;
        world.synchronize(&stream)?;
        let free = device.memory_info()?.free_bytes;
        let begun = Instant::now();
        let slept = registrar.sleep(&world, pool.id(), contents)?;
        asleep += begun.elapsed();
        back = device.memory_info()?.free_bytes - free;
        assert_eq!(slept.released_bytes, (SEGMENTS * segment) as u64);
        // Somebody else has the memory, and other bytes in it.
        let mut others = other.alloc_zeroed::<u8>(&stream, SEGMENTS * segment)?;
        stream.memcpy_htod(&vec![0xab; SEGMENTS * segment], &mut others)?;
        stream.synchronize()?;
        drop(others);
        other.trim()?;
        let begun = Instant::now();
        let woken = registrar.wake(&world, pool.id())?;
        awake += begun.elapsed();
        assert_eq!((woken.changed.len(), woken.lost.len()), (0, 0), "cycle {cycle}: {woken:?}");
        assert_eq!(windows(&buffers), before, "cycle {cycle}");
        if contents == Contents::Keep {
            assert_eq!(stream.clone_dtoh(&buffers[0].slice(0..1024))?, kept, "cycle {cycle}");
        }
        check(&world, &mut buffers, &stream, cycle, |_| Ok(graph.launch(&stream)?))?;
        check(&world, &mut buffers, &stream, cycle, |buffers| reduce_all(&world, buffers, &stream))?;
    }
    if world.rank() == 0 {
        let (ranks, nccl) = (world.ranks(), world.nccl().version());
        println!(
            "{ranks} ranks, NCCL {nccl}, {cycles} cycles: the same windows, graph and eager calls right in every one"
        );
        println!("windows: {}", before.join(", "));
        let each = |sum: Duration| sum / cycles.max(1);
        println!(
            "{} MiB back on the device; sleep {:.2?}, wake {:.2?}, half of them with contents",
            back >> 20,
            each(asleep),
            each(awake)
        );
    }
    drop((graph, graphs, buffers));
    registrar.detach(&world, &[pool.id()])?;
    registrar.sync(&[&world])?;
    world.destroy()?;
    Ok(())
}

fn reduce_all(
    world: &Communicator,
    buffers: &mut [DeviceBuffer<f32>],
    stream: &Arc<CudaStream>,
) -> Result<(), Box<dyn Error>> {
    buffers.iter_mut().try_for_each(|buffer| Ok(world.all_reduce_in_place(buffer, ReduceOp::Sum, stream)?))
}

/// Fills all buffers, reduces, and looks at every element.
fn check(
    world: &Communicator,
    buffers: &mut [DeviceBuffer<f32>],
    stream: &Arc<CudaStream>,
    cycle: u32,
    reduce: impl FnOnce(&mut [DeviceBuffer<f32>]) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let value =
        |rank: u32, buffer: usize, at: usize| ((rank + 1) as usize * (at % 251) + buffer + cycle as usize) as f32;
    for (index, buffer) in buffers.iter_mut().enumerate() {
        let input: Vec<f32> = (0..buffer.len()).map(|at| value(world.rank(), index, at)).collect();
        stream.memcpy_htod(&input, buffer)?;
    }
    reduce(buffers)?;
    world.synchronize(stream)?;
    for (index, buffer) in buffers.iter().enumerate() {
        let output = stream.clone_dtoh(buffer)?;
        let expected = |at: usize| (0..world.ranks()).map(|rank| value(rank, index, at)).sum::<f32>();
        let wrong = output.iter().enumerate().filter(|(at, sum)| **sum != expected(*at)).count();
        assert_eq!(wrong, 0, "cycle {cycle}, buffer {index}: wrong elements");
    }
    Ok(())
}
