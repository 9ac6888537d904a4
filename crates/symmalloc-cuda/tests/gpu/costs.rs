//! Measures the cost of memory per MiB, compared with `cuMemAlloc` and `cuMemAllocAsync`. Prints the results, and only asserts that the
//! calls succeed.
//!
//! `pytorch_costs.py` in the same folder measures PyTorch on the same machine.

use crate::device;
use cudarc::driver::result;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::Config;
use symmalloc_core::backend::Backend;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice};

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 1280 * MIB;

fn us_per_mib(elapsed: Duration, size_bytes: u64) -> f64 {
    elapsed.as_secs_f64() * 1e6 / (size_bytes / MIB) as f64
}

/// Grows a range to [`TOTAL`] and releases it; returns the microseconds per MiB of both, the best of three runs.
fn growth(device: &Arc<CudaDevice>, chunk: u64, step: u64) -> (f64, f64) {
    let backend = CudaBackend::builder(device).chunk_bytes(chunk).build().expect("supported");
    let mut best = (f64::MAX, f64::MAX);
    for _ in 0..3 {
        // The range has twice the size, so it is never mapped as a whole, as in a pool.
        let range = backend.reserve(2 * TOTAL).expect("reserve");
        let start = Instant::now();
        let mut at = 0;
        while at < TOTAL {
            backend.map(range, at, step.min(TOTAL - at)).expect("map");
            at += step;
        }
        let grown = us_per_mib(start.elapsed(), TOTAL);
        let start = Instant::now();
        backend.unmap(range, 0, TOTAL).expect("unmap");
        backend.release(range).expect("release");
        best = (best.0.min(grown), best.1.min(us_per_mib(start.elapsed(), TOTAL)));
    }
    best
}

/// Creates and releases a segment; returns the microseconds of both, the best of ten runs.
fn birth(device: &Arc<CudaDevice>, size: u64) -> (f64, f64) {
    let backend = CudaBackend::builder(device).build().expect("supported");
    let mut best = (f64::MAX, f64::MAX);
    for _ in 0..10 {
        let start = Instant::now();
        let range = backend.reserve(size).expect("reserve");
        backend.map(range, 0, size).expect("map");
        let born = start.elapsed().as_secs_f64() * 1e6;
        let start = Instant::now();
        backend.unmap(range, 0, size).expect("unmap");
        backend.release(range).expect("release");
        best = (best.0.min(born), best.1.min(start.elapsed().as_secs_f64() * 1e6));
    }
    best
}

#[test]
fn the_cost_of_growth_compared_with_the_driver() {
    let Some(device) = device() else { return };
    let stream = device.context().new_stream().expect("a stream");
    device.context().bind_to_thread().expect("current");
    println!("growing to 1280 MiB, us per MiB (and releasing it):");
    for (chunk, step) in [(2, 2), (2, 20), (2, 64), (20, 20), (64, 64), (32, 128)] {
        let (grown, back) = growth(&device, chunk * MIB, step * MIB);
        println!("  steps of {step} MiB in chunks of {chunk} MiB: {grown:.2} ({back:.2})");
    }
    println!(
        "one segment, us to create it (and release it); cuMemAlloc (cuMemFree); cuMemAllocAsync, cold (free, and trim):"
    );
    for size in [2, 20, 64, 256, 1280] {
        let (born, died) = birth(&device, size * MIB);
        let bytes = (size * MIB) as usize;
        let (mut plain, mut pooled) = ((f64::MAX, f64::MAX), (f64::MAX, f64::MAX));
        for _ in 0..10 {
            let start = Instant::now();
            // SAFETY: freed below, and not used.
            let pointer = unsafe { result::malloc_sync(bytes) }.expect("allocated");
            plain.0 = plain.0.min(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            // SAFETY: just allocated.
            unsafe { result::free_sync(pointer) }.expect("freed");
            plain.1 = plain.1.min(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            // SAFETY: freed below, and not used.
            let pointer = unsafe { result::malloc_async(stream.cu_stream(), bytes) }.expect("allocated");
            stream.synchronize().expect("done");
            pooled.0 = pooled.0.min(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            // SAFETY: just allocated; with the default threshold the pool releases the memory when the stream is synchronized.
            unsafe { result::free_async(pointer, stream.cu_stream()) }.expect("freed");
            stream.synchronize().expect("done");
            pooled.1 = pooled.1.min(start.elapsed().as_secs_f64() * 1e6);
        }
        println!(
            "  {size} MiB: {born:.0} ({died:.0}); {:.0} ({:.0}); {:.0} ({:.0})",
            plain.0, plain.1, pooled.0, pooled.1
        );
    }
}

/// Grows a range to [`TOTAL`] with a pause after each step, during which memsets are submitted. Returns the median microseconds on the
/// calling thread for a growth step and for a memset.
fn paused_growth(device: &Arc<CudaDevice>, prefetch: u64, step: u64) -> (f64, f64) {
    let backend = CudaBackend::builder(device).chunk_bytes(step).prefetch_bytes(prefetch).build().expect("supported");
    let stream = device.context().new_stream().expect("a stream");
    let mut target = stream.alloc_zeros::<u8>(4096).expect("allocated");
    let range = backend.reserve(2 * TOTAL).expect("reserve");
    let (mut steps, mut memsets) = (Vec::new(), Vec::new());
    for at in (0..TOTAL).step_by(step as usize) {
        let begun = Instant::now();
        backend.map(range, at, step).expect("map");
        steps.push(begun.elapsed());
        let pause = Instant::now();
        while pause.elapsed() < Duration::from_millis(1) {
            let begun = Instant::now();
            stream.memset_zeros(&mut target).expect("submitted");
            memsets.push(begun.elapsed());
        }
        stream.synchronize().expect("done");
    }
    backend.unmap(range, 0, TOTAL).expect("unmap");
    backend.release(range).expect("release");
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e6
    };
    (median(&mut steps), median(&mut memsets))
}

#[test]
fn the_cost_of_growth_with_and_without_prefetching() {
    let Some(device) = device() else { return };
    println!("a step of growth after a pause of 1 ms, us of the calling thread (and a memset submitted in the pause):");
    for step in [2, 20, 64] {
        for prefetch in [0, 64, 128] {
            let (grown, memset) = paused_growth(&device, prefetch * MIB, step * MIB);
            println!("  steps of {step} MiB, up to {prefetch} MiB ahead: {grown:.1} ({memset:.2})");
        }
    }
}

#[test]
fn the_cost_of_a_cached_pair_compared_with_cu_mem_alloc_async() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let (a, b) = (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    let (main, side) = (allocator.register_stream(&a).expect("an id"), allocator.register_stream(&b).expect("an id"));
    let pairs = 100_000_u32;
    let ns = |pair: &mut dyn FnMut()| {
        (0..1000).for_each(|_| pair());
        let start = Instant::now();
        (0..pairs).for_each(|_| pair());
        start.elapsed().as_nanos() as f64 / f64::from(pairs)
    };
    let core = allocator.core();
    let own = ns(&mut || {
        let block = core.allocate(allocator.pool(), main, 1 << 20).expect("cached");
        core.free(block.handle).expect("freed");
    });
    let buffer = ns(&mut || {
        // SAFETY: never read.
        drop(unsafe { allocator.alloc::<u8>(&a, 1 << 20) }.expect("cached"));
    });
    let calls_before = CudaDevice::driver_calls();
    let fenced = ns(&mut || {
        let block = core.allocate(allocator.pool(), main, 1 << 20).expect("cached");
        core.record_use(block.handle, side).expect("known");
        core.free(block.handle).expect("freed");
    });
    let calls = (CudaDevice::driver_calls() - calls_before) as f64 / f64::from(pairs + 1000);
    device.context().bind_to_thread().expect("current");
    let pooled = ns(&mut || {
        // SAFETY: freed immediately, and not used.
        let pointer = unsafe { result::malloc_async(a.cu_stream(), 1 << 20) }.expect("allocated");
        // SAFETY: just allocated.
        unsafe { result::free_async(pointer, a.cu_stream()) }.expect("freed");
    });
    println!(
        "allocate and free 1 MiB, ns: core {own:.0}, DeviceBuffer {buffer:.0}, with a use on another stream {fenced:.0} \
         ({calls:.2} driver calls), cuMemAllocAsync {pooled:.0}"
    );
}
