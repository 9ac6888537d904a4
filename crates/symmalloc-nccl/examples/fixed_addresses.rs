//! Checks pools with a base on a GPU. Each part prints lines that start with PASS, FAIL or NOTE, and the exit code is 1 after a FAIL.
//!
//! ```sh
//! cargo run --release -p symmalloc-nccl --example fixed_addresses -- addresses     # 10,000 ops, and a digest of all addresses
//! cargo run --release -p symmalloc-nccl --example fixed_addresses -- segments      # windows, registrations and exports of segments
//! cargo run --release -p symmalloc-nccl --example fixed_addresses -- graph         # a graph over memory that was released and restored
//! cargo run --release -p symmalloc-nccl --example fixed_addresses -- errors        # bases that cannot be used
//! cargo run --release -p symmalloc-nccl --example fixed_addresses -- sizes         # reservations of several sizes, with and without effect
//! cargo run --release -p symmalloc-nccl --example fixed_addresses -- checkpoint 60 # checks its memory for a minute; for cuda-checkpoint
//! ```
//! `benches/jobs/fixed_addresses.sh` runs all parts, and compares the digests of many processes.

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use std::error::Error;
use std::fmt::Display;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::base::{Base, SLOT_BYTES, SLOT_COUNT};
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{Access, CudaAllocator, CudaBackend, CudaDevice, CudaError, DeviceBuffer, ImportedMemory, Pool};
use symmalloc_nccl::{Communicator, ReduceOp, Registrar, Registration, UniqueId};
use symmalloc_trace::layout;

const MIB: u64 = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;

const KERNEL: &str = r#"
extern "C" __global__ void scale(unsigned int* to, const unsigned int* from, unsigned int factor, unsigned int count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i] * factor + i;
}
"#;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, otherwise: u64| arguments.get(at).map_or(Ok(otherwise), |text| text.parse());
    let device = CudaDevice::new(0)?;
    let mut checks = Checks::default();
    match arguments.first().map(String::as_str) {
        Some("addresses") => addresses(&device, number(1, 10_000)?)?,
        Some("segments") => segments(&device, &mut checks)?,
        Some("graph") => graph(&device, &mut checks)?,
        Some("errors") => errors(&device, &mut checks)?,
        Some("sizes") => sizes(&device, &mut checks)?,
        Some("checkpoint") => checkpoint(&device, Duration::from_secs(number(1, 60)?), &mut checks)?,
        _ => return Err("usage: fixed_addresses addresses|segments|graph|errors|sizes|checkpoint".into()),
    }
    if checks.failed > 0 { Err(format!("{} checks failed", checks.failed).into()) } else { Ok(()) }
}

/// Prints the result of each check.
#[derive(Default)]
struct Checks {
    failed: usize,
}

impl Checks {
    fn check(&mut self, what: &str, is_right: bool, details: impl Display) {
        self.failed += usize::from(!is_right);
        println!("{} {what}: {details}", if is_right { "PASS" } else { "FAIL" });
    }

    /// Checks a step that can fail as a whole.
    fn attempt<T>(&mut self, what: &str, step: impl FnOnce() -> Outcome<T>) -> Option<T> {
        let outcome = step();
        match &outcome {
            Ok(_) => self.check(what, true, "done"),
            Err(error) => self.check(what, false, error),
        }
        outcome.ok()
    }
}

fn based(text: &str) -> PoolConfig {
    text.parse().expect("a valid configuration")
}

fn address(buffer: &DeviceBuffer<u32>) -> u64 {
    buffer.device_ptr(buffer.stream()).0
}

/// A generator of the same numbers in every process.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Runs generated ops in pools with a base, and prints a digest of the addresses.
fn addresses(device: &Arc<CudaDevice>, ops: u64) -> Outcome<()> {
    let allocator = CudaAllocator::new(device, Config::default())?;
    let streams = [device.context().new_stream()?, device.context().new_stream()?];
    let configs = [
        "base:slot:0,stitching_granule_mb:2,stitching_least_mb:8,streams:shared",
        "base:slot:1,segments:fixed,symmetric:true",
        "base:slot:2,segments:reserved,segment_mb:256",
        "base:0x200040000000,growth_mb:8",
    ];
    let pools: Vec<Pool<CudaBackend>> =
        configs.into_iter().map(|text| allocator.create_pool(based(text))).collect::<Result<_, _>>()?;
    let other = allocator.create_pool(PoolConfig::builder().fixed().build()?)?;
    let mut numbers = Numbers(7);
    let mut live: Vec<DeviceBuffer<u32>> = Vec::new();
    let (mut live_bytes, mut hash, mut made) = (0, 0xcbf2_9ce4_8422_2325_u64, 0_u64);
    for op in 0..ops {
        match numbers.below(20) {
            0..12 if live_bytes < 2048 * MIB => {
                let pool = &pools[numbers.below(pools.len() as u64) as usize];
                let stream = &streams[numbers.below(2) as usize];
                let largest = [64 << 10, 4 * MIB, 48 * MIB][numbers.below(3) as usize];
                let size_bytes = 512 + numbers.below(largest);
                match allocator.with_pool(pool).alloc_zeroed(stream, size_bytes.div_ceil(4) as usize) {
                    Ok(buffer) => {
                        hash = (hash ^ address(&buffer)).wrapping_mul(0x0000_0100_0000_01b3);
                        (live_bytes, made) = (live_bytes + size_bytes, made + 1);
                        live.push(buffer);
                    }
                    // The reserved pool is full, in every process at the same op.
                    Err(CudaError::Allocate(_)) => hash = (hash ^ op).wrapping_mul(0x0000_0100_0000_01b3),
                    Err(error) => return Err(error.into()),
                }
            }
            // Memory without a base, whose addresses and timing do not matter.
            12 => drop(allocator.with_pool(&other).alloc_zeroed::<u32>(&streams[0], 1 << 20)?),
            13 if numbers.below(20) == 0 => drop(allocator.trim_all()?),
            _ if !live.is_empty() => {
                let freed = live.swap_remove(numbers.below(live.len() as u64) as usize);
                live_bytes = live_bytes.saturating_sub(freed.len() as u64 * 4);
            }
            _ => {}
        }
    }
    streams.iter().try_for_each(|stream| stream.synchronize())?;
    println!("DIGEST {hash:016x} {ops} ops, {made} allocations, device {}", device.ordinal());
    Ok(())
}

/// Windows, registrations and exports of segments that are parts of a larger reservation.
fn segments(device: &Arc<CudaDevice>, checks: &mut Checks) -> Outcome<()> {
    let allocator = CudaAllocator::new(device, Config::default())?;
    let stream = device.context().new_stream()?;
    allocator.register_stream(&stream)?;
    let world = Communicator::builder(device).deadline(DEADLINE).connect(UniqueId::new()?, 0, 1)?;
    println!("NOTE NCCL {}", world.nccl().version());
    let registrar = Registrar::builder(&allocator).build()?;
    let configs = [
        ("fixed", "segments:fixed"),
        ("reserved", "segments:reserved,segment_mb:128"),
        ("expandable", "segments:expandable"),
    ];
    for (slot, (name, text)) in configs.into_iter().enumerate() {
        for (kind, registration) in [("windows", Registration::Windows), ("buffers", Registration::Buffers)] {
            // NCCL before 2.30.3 cannot register a window over a segment that grows.
            if (name, kind) == ("expandable", "windows") {
                continue;
            }
            let pool = allocator.create_pool(based(&format!("base:slot:{},symmetric:true,{text}", 10 + slot)))?;
            let of_pool = allocator.with_pool(&pool);
            let mut buffers: Vec<DeviceBuffer<u32>> =
                (0..3).map(|_| of_pool.alloc_zeroed(&stream, (8 * MIB) as usize)).collect::<Result<_, _>>()?;
            let what = format!("{kind} of {name} segments");
            checks.attempt(&what, || {
                registrar.attach(&world, &[pool.id()], registration)?;
                registrar.sync(&[&world])?;
                for (index, buffer) in buffers.iter_mut().enumerate() {
                    let bytes = vec![index as u32 + 5; buffer.len()];
                    stream.memcpy_htod(&bytes, buffer)?;
                    if kind == "windows" {
                        println!("NOTE {name}: {:#x} in {:?}", address(buffer), registrar.window_of(&world, buffer));
                    }
                    world.all_reduce_in_place(buffer, ReduceOp::Sum, &stream)?;
                    world.synchronize(&stream)?;
                    if stream.clone_dtoh(buffer)? != bytes {
                        return Err("wrong elements after an all-reduce".into());
                    }
                }
                registrar.detach(&world, &[pool.id()])?;
                registrar.sync(&[&world])?;
                Ok(())
            });
            drop(buffers);
            drop((of_pool, pool));
            allocator.trim_all()?;
        }
    }
    let pool = allocator.create_pool(based("base:slot:14,segments:fixed"))?;
    let mut buffer = allocator.with_pool(&pool).alloc_zeroed::<u32>(&stream, (16 * MIB) as usize)?;
    let bytes: Vec<u32> = (0..buffer.len() as u32).collect();
    stream.memcpy_htod(&bytes, &mut buffer)?;
    stream.synchronize()?;
    let (start, size_bytes) = (address(&buffer), buffer.len() as u64 * 4);
    checks.attempt("a descriptor of a segment, imported at other addresses", || {
        export(&allocator, &stream, start, &bytes)
    });
    if device.features().dma_buf {
        checks.attempt("a dma-buf of a segment", || {
            let dma_buf = allocator.dma_buf(start, size_bytes)?;
            let file_bytes = File::from(dma_buf.as_fd().try_clone_to_owned()?).seek(SeekFrom::End(0))?;
            if file_bytes == dma_buf.size_bytes() {
                Ok(())
            } else {
                Err(format!("a file of {file_bytes} bytes").into())
            }
        });
    } else {
        println!("NOTE the device has no dma-bufs");
    }
    world.destroy()?;
    Ok(())
}

/// Exports the memory of a buffer as descriptors, maps them again, and compares the contents.
fn export(allocator: &CudaAllocator, stream: &CudaStream, start: u64, bytes: &[u32]) -> Outcome<()> {
    let (backend, size_bytes) = (allocator.core().backend(), bytes.len() as u64 * 4);
    let chunks = backend.chunks_behind(start, size_bytes);
    if chunks.is_empty() {
        return Err("the memory cannot be exported".into());
    }
    for (address, chunk_bytes) in chunks {
        let file = backend.export_chunk(address, chunk_bytes)?;
        let mut imported = ImportedMemory::reserve(allocator.device(), chunk_bytes)?;
        imported.map_file(&(0..chunk_bytes), &file)?;
        imported.set_access(Access::Read)?;
        let count = chunk_bytes.min(start + size_bytes - address) as usize / 4;
        let mut found = vec![0_u32; count];
        // SAFETY: the memory is mapped with this size, and the vector has room for it.
        unsafe { cudarc::driver::result::memcpy_dtoh_async(&mut found, imported.address(), stream.cu_stream()) }?;
        stream.synchronize()?;
        let from = ((address - start) / 4) as usize;
        if found != bytes[from..from + count] {
            return Err("the imported memory has other contents".into());
        }
    }
    Ok(())
}

/// Captures a graph, releases the memory of its pool, restores it at the base, and replays the graph.
fn graph(device: &Arc<CudaDevice>, checks: &mut Checks) -> Outcome<()> {
    const COUNT: u32 = 4 << 20;
    const CYCLES: u32 = 10;
    let stream = device.context().new_stream()?;
    let module = device.context().load_module(cudarc::nvrtc::compile_ptx(KERNEL)?)?;
    let scale = module.load_function("scale")?;
    let allocator = CudaAllocator::new(device, Config::default())?;
    allocator.register_stream(&stream)?;
    let config = based("base:slot:20");
    let pool = allocator.create_pool(config.clone())?;
    let of_pool = allocator.with_pool(&pool);
    let gap = of_pool.alloc_zeroed::<u32>(&stream, 1 << 20)?;
    let [input, middle, output] = [0; 3].map(|_| of_pool.alloc_zeroed::<u32>(&stream, COUNT as usize));
    let (input, middle, output) = (input?, middle?, output?);
    drop(gap);
    let [from, through, to] = [&input, &middle, &output].map(address);
    stream.synchronize()?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let grid = LaunchConfig::for_num_elems(COUNT);
    for (to, from, factor) in [(through, from, 3_u32), (to, through, 5_u32)] {
        // SAFETY: the kernel's parameters are two addresses and two numbers. The buffers have COUNT elements.
        unsafe { stream.launch_builder(&scale).arg(&to).arg(&from).arg(&factor).arg(&COUNT).launch(grid) }?;
    }
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?.ok_or("the capture has no graph")?;
    let is_right = |round: u32| -> Outcome<bool> {
        let numbers: Vec<u32> = (0..COUNT).map(|at| at ^ round).collect();
        // SAFETY: the buffers are live and have COUNT elements.
        unsafe { cudarc::driver::result::memcpy_htod_sync(from, &numbers) }?;
        graph.launch()?;
        stream.synchronize()?;
        let mut found = vec![0_u32; COUNT as usize];
        // SAFETY: as above.
        unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut found, to) }?;
        let wanted = |at: u32| (at ^ round).wrapping_mul(3).wrapping_add(at).wrapping_mul(5).wrapping_add(at);
        Ok(found.iter().zip(0..).all(|(value, at)| *value == wanted(at)))
    };
    checks.check("the graph before the release", is_right(1)?, "compared");
    let text = layout::to_text(&allocator.core().save_layout(pool.id())?);
    let free_before = device.memory_info()?.free_bytes;
    drop((input, middle, output, of_pool));
    pool.destroy()?;
    let free_after = device.memory_info()?.free_bytes;
    let released_bytes = free_after.saturating_sub(free_before);
    checks.check(
        "the memory is released",
        released_bytes >= 3 * u64::from(COUNT) * 4,
        format!("{} MiB", released_bytes / MIB),
    );
    let saved = layout::parse(&text)?;
    let mut right = 0;
    for cycle in 1..=CYCLES {
        // Other memory takes the physical pages in between.
        let shuffled = allocator.alloc_zeroed::<u32>(&stream, ((cycle as usize) << 20) + 512)?;
        let pool = allocator.create_pool(config.clone())?;
        let restored = allocator.core().restore_layout(pool.id(), &saved)?;
        let found: Vec<u64> = restored.allocations().map(|restored| restored.allocation.address.0).collect();
        let is_same = [from, through, to].iter().all(|wanted| found.contains(wanted));
        right += u32::from(is_same && is_right(cycle + 1)?);
        for restored in restored.allocations() {
            allocator.free(restored.allocation.handle)?;
        }
        pool.destroy()?;
        drop(shuffled);
    }
    checks.check("the graph after each restore", right == CYCLES, format!("{right} of {CYCLES} cycles"));
    Ok(())
}

/// Bases that cannot be used.
fn errors(device: &Arc<CudaDevice>, checks: &mut Checks) -> Outcome<()> {
    for text in [
        "base:0x1000",
        "base:0x200000200000",
        "base:0x7f0040000000",
        "base:0xfffff00000000000",
        "base:slot:64",
        "base:slot",
    ] {
        let parsed = text.parse::<PoolConfig>();
        let details = parsed.as_ref().map_or_else(ToString::to_string, |_| "accepted".into());
        checks.check(text, parsed.is_err(), details);
    }
    let allocator = CudaAllocator::new(device, Config::default())?;
    let free_before = device.memory_info()?.free_bytes;
    let refusal = |allocator: &CudaAllocator, text: &str| allocator.create_pool(based(text)).map(|_| ()).err();
    let mut expect = |what: &str, error: Option<CudaError>, word: &str| {
        let details = error.map_or("no error".to_owned(), |error| error.to_string());
        checks.check(what, details.contains(word), &details);
    };
    let pool = allocator.create_pool(based("base:slot:30"))?;
    expect("a slot of another pool", refusal(&allocator, "base:slot:30"), "is occupied: p");
    expect("an address in the slot of another pool", refusal(&allocator, "base:0x2e8000000000"), "is occupied: p");
    let second = CudaAllocator::new(device, Config::default())?;
    expect("a slot of another allocator", refusal(&second, "base:slot:30"), "is occupied: p");
    if let Ok(other) = CudaDevice::new(1) {
        let other = CudaAllocator::new(&other, Config::default())?;
        expect("a slot of a pool on another device", refusal(&other, "base:slot:30"), "of device 0");
    } else {
        println!("NOTE there is no second device");
    }
    pool.destroy()?;
    let reused = refusal(&second, "base:slot:30");
    checks.check(
        "a slot of a destroyed pool",
        reused.is_none(),
        reused.map_or("free".into(), |error| error.to_string()),
    );
    // Another library reserves addresses in a slot.
    let slot = Base::slot(31)?;
    let _current = device.enter()?;
    for size_bytes in [64 << 30, SLOT_BYTES] {
        let mut taken = 0;
        // SAFETY: `taken` is valid for writing.
        let code = unsafe { sys::cuMemAddressReserve(&raw mut taken, size_bytes as usize, 0, slot.address(), 0) };
        println!("NOTE cuMemAddressReserve of {} GiB at {:#x}: {code:?}, {taken:#x}", size_bytes >> 30, slot.address());
        let error = refusal(&allocator, "base:slot:31").map_or("no error".to_owned(), |error| error.to_string());
        checks.check("a slot in which another library reserved addresses", error.contains("is occupied"), &error);
        // SAFETY: reserved above.
        let freed = unsafe { sys::cuMemAddressFree(taken, size_bytes as usize) };
        checks.check(
            "the other library's addresses are released",
            freed == CUresult::CUDA_SUCCESS,
            format!("{freed:?}"),
        );
    }
    let granted = refusal(&allocator, "base:slot:31");
    checks.check("the slot afterwards", granted.is_none(), granted.map_or("free".into(), |error| error.to_string()));
    let lost_bytes = free_before.saturating_sub(device.memory_info()?.free_bytes);
    checks.check("no device memory is lost", lost_bytes < 64 * MIB, format!("{} MiB", lost_bytes / MIB));
    Ok(())
}

/// Reservations of several sizes at every slot. Only those of a slot's size must be granted.
fn sizes(device: &Arc<CudaDevice>, checks: &mut Checks) -> Outcome<()> {
    let _current = device.enter()?;
    for size_bytes in [2 * MIB, 1 << 30, 64 << 30, SLOT_BYTES, 4 * SLOT_BYTES, 16 * SLOT_BYTES] {
        let (mut granted, mut moved, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for slot in
            (0..SLOT_COUNT).filter(|slot| Base::slot(*slot).is_ok_and(|base| base.address() + size_bytes <= 1 << 47))
        {
            let (hint, mut taken) = (Base::slot(slot)?.address(), 0);
            // SAFETY: `taken` is valid for writing.
            let code = unsafe { sys::cuMemAddressReserve(&raw mut taken, size_bytes as usize, 2 << 20, hint, 0) };
            match code {
                CUresult::CUDA_SUCCESS if taken == hint => granted.push(slot),
                CUresult::CUDA_SUCCESS => moved.push(slot),
                _ => failed.push(slot),
            }
            if code == CUresult::CUDA_SUCCESS {
                // SAFETY: reserved above.
                unsafe { sys::cuMemAddressFree(taken, size_bytes as usize) }.result()?;
            }
        }
        let details = format!("{} granted, moved {moved:?}, failed {failed:?}", granted.len());
        if size_bytes == SLOT_BYTES {
            checks.check("reservations of 1 TiB at every slot", granted.len() == SLOT_COUNT as usize, details);
        } else {
            println!("NOTE reservations of {} MiB: {details}", size_bytes / MIB);
        }
    }
    Ok(())
}

/// Checks memory in a pool with a base again and again, while another process may checkpoint this one.
fn checkpoint(device: &Arc<CudaDevice>, duration: Duration, checks: &mut Checks) -> Outcome<()> {
    let stream: Arc<CudaStream> = device.context().new_stream()?;
    let allocator = CudaAllocator::new(device, Config::default())?;
    let pool = allocator.create_pool(based("base:slot:40"))?;
    let mut buffer = allocator.with_pool(&pool).alloc_zeroed::<u32>(&stream, 4 << 20)?;
    let numbers: Vec<u32> = (0..4 << 20).map(|at| at * 7).collect();
    stream.memcpy_htod(&numbers, &mut buffer)?;
    stream.synchronize()?;
    let before = address(&buffer);
    println!("READY {} {before:#x}", std::process::id());
    std::io::stdout().flush()?;
    let (begun, mut rounds, mut wrong) = (Instant::now(), 0, 0);
    while begun.elapsed() < duration {
        wrong += u32::from(stream.clone_dtoh(&buffer)? != numbers || address(&buffer) != before);
        rounds += 1;
        std::thread::sleep(Duration::from_millis(200));
    }
    checks.check("contents at the base", wrong == 0, format!("{rounds} rounds, {wrong} wrong"));
    Ok(())
}
