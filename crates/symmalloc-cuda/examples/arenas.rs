//! Serves requests that each use an arena on two streams, under a limit of 1.2 times the memory of one request, in two ways: with a new arena
//! for each request, which is dropped afterwards, and with one arena, which is reset. Prints memory, time and driver calls per request of the
//! first and the last thousand requests, which are equal. Fails if the limit refuses a request, memory grows, or a request reads other data
//! than it wrote.
//!
//! `cargo run --release -p symmalloc-cuda --example arenas [REQUESTS]`, on the first device of `CUDA_VISIBLE_DEVICES`.

use cudarc::driver::CudaStream;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice};

const MIB: u64 = 1 << 20;
/// Bytes that a request uses on each of its two streams.
const BYTES: u64 = 16 * MIB;
const LIMIT_BYTES: u64 = 2 * BYTES * 12 / 10;
/// Number of words that a request writes into each buffer and reads back.
const WORDS: usize = 256;
/// Number of requests at the beginning and at the end that are compared.
const WINDOW: usize = 1000;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// The use of arenas by requests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode {
    /// Each request creates an arena and drops it. The allocator destroys dropped arenas before the limit refuses a request.
    Dropped,
    /// All requests use one arena, which is reset after each of them and keeps its memory.
    Reset,
}

/// The costs of a number of consecutive requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Costs {
    /// Most device memory that the allocator held, in bytes.
    pub(crate) reserved_bytes_peak: u64,
    /// Time for each request.
    pub(crate) each: Duration,
    /// Driver calls of the allocator for each request, rounded down.
    pub(crate) driver_calls: u64,
}

fn main() -> Outcome<()> {
    let requests = std::env::args().nth(1).map_or(Ok(10_000), |text| text.parse())?;
    let device = match CudaDevice::new(0) {
        Ok(device) => device,
        Err(error) => {
            println!("no device: {error}");
            return Ok(());
        }
    };
    for mode in [Mode::Dropped, Mode::Reset] {
        let [first, last] = serve(&device, mode, requests)?;
        println!("{mode:?}: {requests} requests of {} MiB under a limit of {} MiB", 2 * BYTES / MIB, LIMIT_BYTES / MIB);
        for (which, costs) in [("first", first), ("last", last)] {
            let Costs { reserved_bytes_peak, each, driver_calls } = costs;
            let held = reserved_bytes_peak / MIB;
            println!("  {which:5} {WINDOW}: {held} MiB held at most, {each:.2?} and {driver_calls} driver calls each");
        }
    }
    Ok(())
}

/// Serves requests. Returns the costs of the first and of the last thousand, or of each half of fewer requests.
pub(crate) fn serve(device: &Arc<CudaDevice>, mode: Mode, requests: usize) -> Outcome<[Costs; 2]> {
    let allocator = CudaAllocator::new(device, Config::builder().total_limit_bytes(Some(LIMIT_BYTES)).build()?)?;
    let streams = [device.context().new_stream()?, device.context().new_stream()?];
    let kept = match mode {
        Mode::Reset => Some(allocator.create_pool(PoolConfig::default())?),
        Mode::Dropped => None,
    };
    let window = WINDOW.min(requests / 2);
    let mut costs = [Costs::default(); 2];
    for (which, range) in [0..window, window..requests - window, requests - window..requests].into_iter().enumerate() {
        allocator.core().reset_peak_stats();
        let (begun, calls) = (Instant::now(), CudaDevice::driver_calls());
        let count = range.len().max(1) as u32;
        for request in range {
            match &kept {
                Some(arena) => {
                    answer(&allocator.with_pool(arena), &streams, request as u32)?;
                    arena.reset()?;
                }
                None => {
                    let arena = allocator.create_pool(PoolConfig::default())?;
                    answer(&allocator.with_pool(&arena), &streams, request as u32)?;
                }
            }
        }
        if which != 1 {
            costs[which / 2] = Costs {
                reserved_bytes_peak: allocator.stats().reserved_bytes.peak,
                each: begun.elapsed() / count,
                driver_calls: (CudaDevice::driver_calls() - calls) / u64::from(count),
            };
        }
    }
    if costs[1].reserved_bytes_peak > costs[0].reserved_bytes_peak {
        return Err(format!("the memory grows: {costs:?}").into());
    }
    println!(
        "  {} bytes returned to the device at the end",
        kept.map_or(Ok(0), |arena| arena.destroy())? + allocator.trim_all()?
    );
    Ok(costs)
}

/// Answers a request: writes its number into a buffer on each stream, and reads it back.
fn answer(arena: &CudaAllocator, streams: &[Arc<CudaStream>; 2], request: u32) -> Outcome<()> {
    let mut buffers = Vec::new();
    for stream in streams {
        // SAFETY: only the words that are written here are read.
        let mut buffer = unsafe { arena.alloc::<u32>(stream, (BYTES / 4) as usize) }?;
        stream.memcpy_htod(&[request; WORDS], &mut buffer.slice_mut(..WORDS))?;
        buffers.push(buffer);
    }
    for (stream, buffer) in streams.iter().zip(&buffers) {
        let read = stream.clone_dtoh(&buffer.slice(..WORDS))?;
        if read != [request; WORDS] {
            return Err(format!("request {request} reads other data than it wrote").into());
        }
    }
    Ok(())
}
