//! Puts a pool to sleep and wakes it: measures the released memory and the speed, and checks a captured graph afterwards.
//!
//! ```text
//! cargo run --release -p symmalloc-cuda --example sleep -- [GiB to sleep, 8] [cycles with a graph, 200]
//! ```
//! Compares sleeps and wakes with plain copies of the same bytes to pinned memory, prints the device memory that the driver reports, and
//! measures other chunk sizes. Fails if a byte, an address or a digest has changed.

use cudarc::driver::{CudaStream, DevicePtr};
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::op::{Contents, Record};
use symmalloc_core::recording::{Sink, SinkError};
use symmalloc_core::{Allocator, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, GraphPool, PinnedAllocator, PinnedBuffer};
use symmalloc_sim::SimBackend;
use symmalloc_trace::replay::{Program, Replay};

const MIB: usize = 1 << 20;
const BUFFER_BYTES: usize = 128 * MIB;
/// Number of sleeps and wakes that keep contents.
const ROUNDS: usize = 9;
/// Time between sleep and wake in every second round. In the other rounds, the pool wakes immediately.
const AWAY: Duration = Duration::from_millis(200);

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A sink that keeps records in memory, to be replayed without a device.
#[derive(Clone, Default)]
struct Records(Arc<Mutex<Vec<Record>>>);

impl Sink for Records {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        Ok(())
    }
    fn record(&mut self, record: Record) -> Result<(), SinkError> {
        self.0.lock().map_err(|_| "poisoned")?.push(record);
        Ok(())
    }
    fn finish(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let gib: usize = arguments.next().map_or(Ok(8), |text| text.parse())?;
    let cycles: usize = arguments.next().map_or(Ok(200), |text| text.parse())?;
    let device = CudaDevice::new(0)?;
    // SAFETY: everything here runs on one stream.
    unsafe { device.context().disable_event_tracking() };
    copies(&device, gib)?;
    chunk_sizes(&device, gib)?;
    graphs(&device, cycles)
}

/// Returns the bytes of one MiB of the buffer with this number.
fn pattern(number: usize) -> Vec<u8> {
    let mut state = number as u64 * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as u32
    };
    (0..MIB / 4).flat_map(|_| next().to_le_bytes()).collect()
}

struct Weights {
    buffers: Vec<DeviceBuffer<u8>>,
    addresses: Vec<u64>,
}

impl Weights {
    fn new(allocator: &CudaAllocator, stream: &Arc<CudaStream>, bytes: usize) -> Outcome<Self> {
        let mut buffers = Vec::new();
        for number in 0..bytes / BUFFER_BYTES {
            let mut buffer = allocator.alloc_zeroed::<u8>(stream, BUFFER_BYTES)?;
            let one = pattern(number);
            for at in (0..BUFFER_BYTES).step_by(MIB) {
                stream.memcpy_htod(&one, &mut buffer.slice_mut(at..at + MIB))?;
            }
            buffers.push(buffer);
        }
        stream.synchronize()?;
        let addresses = buffers.iter().map(|buffer| buffer.device_ptr(stream).0).collect();
        Ok(Weights { buffers, addresses })
    }

    /// Checks that every `step`-th MiB has its original contents, and every buffer its original address.
    fn check(&self, stream: &Arc<CudaStream>, step: usize) -> Outcome<()> {
        for (number, buffer) in self.buffers.iter().enumerate() {
            assert_eq!(buffer.device_ptr(stream).0, self.addresses[number], "buffer {number} moved");
            let one = pattern(number);
            for at in (0..BUFFER_BYTES).step_by(step * MIB) {
                assert!(
                    stream.clone_dtoh(&buffer.slice(at..at + MIB))? == one,
                    "the contents of buffer {number} at {at} have changed"
                );
            }
        }
        Ok(())
    }
}

fn seconds(work: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn print(what: &str, bytes: u64, seconds: f64) {
    println!("{what:44} {:9.3} ms {:7.2} GB/s", seconds * 1e3, bytes as f64 / seconds / 1e9);
}

/// Measures sleep and wake with and without contents, compared with copies of the same bytes.
fn copies(device: &Arc<CudaDevice>, gib: usize) -> Outcome<()> {
    let bytes = gib << 30;
    let stream = device.context().new_stream()?;
    let allocator = CudaAllocator::new(device, Config::default())?;
    let pool = allocator.create_pool("segments:expandable,growth_mb:64,tag:weights".parse::<PoolConfig>()?)?;
    let inside = allocator.with_pool(&pool);
    let before = device.memory_info()?.free_bytes;
    let weights = Weights::new(&inside, &stream, bytes)?;
    let full = device.memory_info()?.free_bytes;
    println!("{gib} GiB in buffers of 128 MiB; free on the device: {before} before, {full} with them");

    let pinned = PinnedAllocator::pinned(device, Config::default())?;
    let mut host: Vec<PinnedBuffer<u8>> = Vec::new();
    let locked = seconds(|| {
        for _ in &weights.buffers {
            host.push(pinned.alloc_host_zeroed(BUFFER_BYTES)?);
        }
        Ok(())
    })?;
    print("plain: locking pinned memory", bytes as u64, locked);
    let mut copied = [f64::INFINITY; 2];
    for _ in 0..3 {
        let out = seconds(|| {
            for (buffer, host) in weights.buffers.iter().zip(&mut host) {
                stream.memcpy_dtoh(buffer, host)?;
            }
            Ok(stream.synchronize()?)
        })?;
        print("plain: copy to pinned memory", bytes as u64, out);
        copied[0] = copied[0].min(out);
    }
    let mut scratch = allocator.alloc_zeroed::<u8>(&stream, BUFFER_BYTES)?;
    stream.synchronize()?;
    for _ in 0..3 {
        let back = seconds(|| {
            for host in &host {
                stream.memcpy_htod(host, &mut scratch)?;
            }
            Ok(stream.synchronize()?)
        })?;
        print("plain: copy from pinned memory", bytes as u64, back);
        copied[1] = copied[1].min(back);
    }
    drop((scratch, host));
    allocator.trim_all()?;
    pinned.trim_all()?;

    let locked = seconds(|| Ok(allocator.reserve_host_memory(bytes as u64)?))?;
    print("symmalloc: reserve_host_memory", bytes as u64, locked);
    let (mut sleeps, mut wakes) = (Vec::new(), [Vec::new(), Vec::new()]);
    for round in 0..ROUNDS {
        let is_away = round % 2 == 0;
        let full = device.memory_info()?.free_bytes;
        let mut saved = 0.0;
        let slept = seconds(|| {
            let begun = Instant::now();
            let quiesced = allocator.core().quiesce(pool.id(), Contents::Keep)?;
            saved = begun.elapsed().as_secs_f64();
            quiesced.unmap()?;
            Ok(())
        })?;
        let asleep = device.memory_info()?.free_bytes;
        if is_away {
            std::thread::sleep(AWAY);
        }
        let woken = seconds(|| allocator.wake(pool.id()).map(drop).map_err(Into::into))?;
        let awake = device.memory_info()?.free_bytes;
        print("symmalloc: sleep, contents kept", bytes as u64, slept);
        print("  time until contents are saved", bytes as u64, saved);
        print(if is_away { "symmalloc: wake, contents kept" } else { "  the same, immediately" }, bytes as u64, woken);
        sleeps.push(slept);
        wakes[usize::from(is_away)].push(woken);
        println!(
            "  free on the device: {full} awake, {asleep} asleep ({} MiB released), {awake} awake again",
            (asleep - full) >> 20
        );
        weights.check(&stream, if round % 4 == 0 { 1 } else { 16 })?;
    }
    let [at_once, wakes] = wakes;
    let rounds = [("sleep", sleeps, copied[0]), ("wake", wakes, copied[1]), ("immediate wake", at_once, copied[1])];
    for (what, mut kept, copied) in rounds {
        let first = copied / kept.remove(0);
        kept.sort_by(f64::total_cmp);
        let [median, last] = [kept[kept.len() / 2], kept[kept.len() - 1]].map(|seconds| copied / seconds);
        println!(
            "{what}: {first:.2} of the fastest copy's speed at first, then {median:.2} (median) and {last:.2} (minimum)"
        );
    }
    for _ in 0..4 {
        let slept = seconds(|| allocator.sleep(pool.id(), Contents::Drop).map(drop).map_err(Into::into))?;
        let woken = seconds(|| allocator.wake(pool.id()).map(drop).map_err(Into::into))?;
        print("symmalloc: sleep, contents dropped", bytes as u64, slept);
        print("symmalloc: wake, contents dropped", bytes as u64, woken);
    }
    let slept = seconds(|| allocator.sleep(pool.id(), Contents::Zero).map(drop).map_err(Into::into))?;
    let woken = seconds(|| allocator.wake(pool.id()).map(drop).map_err(Into::into))?;
    print("symmalloc: sleep, contents zeroed", bytes as u64, slept);
    print("symmalloc: wake, contents zeroed", bytes as u64, woken);
    let head = stream.clone_dtoh(&weights.buffers[0].slice(0..MIB))?;
    assert!(head.iter().all(|byte| *byte == 0));
    Ok(())
}

/// Measures the additional cost of sleeping by the chunk size of device memory.
fn chunk_sizes(device: &Arc<CudaDevice>, gib: usize) -> Outcome<()> {
    let stream = device.context().new_stream()?;
    for chunk in [2, 20, 64, 128, 512, 1024] {
        let backend = CudaBackend::builder(device).chunk_bytes((chunk * MIB) as u64).build()?;
        let allocator = CudaAllocator::with_backend(backend, Config::default())?;
        let pool = allocator.create_pool("segments:expandable".parse::<PoolConfig>()?)?;
        let _buffer = allocator.with_pool(&pool).alloc_zeroed::<u8>(&stream, gib << 30)?;
        let mut least = [f64::INFINITY; 2];
        for _ in 0..3 {
            let slept = seconds(|| allocator.sleep(pool.id(), Contents::Drop).map(drop).map_err(Into::into))?;
            let woken = seconds(|| allocator.wake(pool.id()).map(drop).map_err(Into::into))?;
            least = [least[0].min(slept), least[1].min(woken)];
        }
        let [slept, woken] = least.map(|seconds| seconds * 1e3);
        println!("chunks of {chunk:4} MiB, contents dropped: sleep {slept:7.2} ms, wake {woken:7.2} ms");
    }
    Ok(())
}

/// Puts pools to sleep and wakes them, and launches a captured graph immediately after each wake.
fn graphs(device: &Arc<CudaDevice>, cycles: usize) -> Outcome<()> {
    let stream = device.context().new_stream()?;
    let allocator = CudaAllocator::new(device, Config::default())?;
    let records = Records::default();
    allocator.core().start_recording(records.clone())?;
    allocator.register_stream(&stream)?;
    let pool = allocator.create_pool("segments:expandable,tag:weights".parse::<PoolConfig>()?)?;
    let weights = Weights::new(&allocator.with_pool(&pool), &stream, 4 * BUFFER_BYTES)?;
    let graph_pool = GraphPool::new(&allocator, "segments:reserved,segment_mb:256,tag:activations".parse()?)?;
    let capture = graph_pool.begin(&stream)?;
    let mut output = allocator.alloc_zeroed::<u8>(&stream, 4 * MIB)?;
    let mut temporary = allocator.alloc_zeroed::<u8>(&stream, 4 * MIB)?;
    for (number, weights) in weights.buffers.iter().enumerate() {
        let at = number * MIB;
        stream.memcpy_dtod(&weights.slice(64 * MIB..65 * MIB), &mut temporary.slice_mut(at..at + MIB))?;
    }
    stream.memcpy_dtod(&temporary, &mut output)?;
    drop(temporary);
    let graph = capture.end()?.using([pool.id()]);
    let expected: Vec<u8> = (0..4).flat_map(pattern).collect();
    let free = device.memory_info()?.free_bytes;
    let begun = Instant::now();
    for cycle in 0..cycles {
        graph_pool.sleep(Contents::Drop)?;
        allocator.sleep(pool.id(), Contents::Keep)?;
        assert!(graph.launch(&stream).is_err(), "the pool is asleep");
        allocator.wake(pool.id())?;
        graph_pool.wake()?;
        stream.memset_zeros(&mut output)?;
        graph.launch(&stream)?;
        assert!(stream.clone_dtoh(&output)? == expected, "cycle {cycle}: the graph's output has changed");
        weights.check(&stream, if cycle % 50 == 0 { 1 } else { 32 })?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let left = device.memory_info()?.free_bytes;
    println!(
        "{cycles} cycles of 512 MiB with a graph: all bytes correct, {:.1} ms each; free: {free} before, {left} after",
        seconds * 1e3 / cycles as f64
    );
    let digests = [pool.id(), graph_pool.id()].map(|pool| allocator.digest(pool));
    allocator.core().stop_recording()?;
    let records = records.0.lock().map_err(|_| "poisoned")?.clone();
    let program = Program::new(&records)?;
    let again = Allocator::new(SimBackend::builder().seed(1).build(), Config::default())?;
    Replay::new(&again, &program).run(|_, _| {})?;
    for (pool, digest) in [pool.id(), graph_pool.id()].into_iter().zip(digests) {
        assert_eq!(again.digest(pool)?, digest?, "{pool}");
    }
    println!("{} ops replayed on the simulator: digests are equal ({:?})", records.len(), again.digest(PoolId(1))?);
    Ok(())
}
