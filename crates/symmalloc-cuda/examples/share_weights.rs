//! Shares a trainer's weights with an inference engine without a copy. The two processes use a Unix socket; the engine attaches and
//! detaches many times, and continues after the trainer has exited. Every number is asserted.
//!
//! `cargo run --release -p symmalloc-cuda --example share_weights [MIB] [ATTACHMENTS]`
//!
//! With `write` as a third argument, the engine finally writes to read-only memory and prints the driver's result.

use cudarc::driver::{CudaStream, DevicePtr};
use std::error::Error;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::config::PoolConfig;
use symmalloc_cuda::{Access, CudaAllocator, CudaDevice, DeviceBuffer, Import};

const LAYERS: usize = 16;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Number of attachments to the small pool, whose memory has many chunks.
const SMALL_ATTACHMENTS: usize = 100;
const SMALL_BUFFERS: usize = 15;
type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, otherwise: usize| arguments.get(at).map_or(Ok(otherwise), |text| text.parse());
    let (mib, attachments) = (number(0, 4096)?, number(1, 10_000)?);
    let writes = arguments.get(2).is_some_and(|word| word == "write");
    match (std::env::var("SHARE_ROLE").as_deref(), std::env::var_os("SHARE_SOCKET")) {
        (Ok("trainer"), Some(socket)) => trainer(Path::new(&socket), mib, attachments),
        (Ok("engine"), Some(socket)) => engine(Path::new(&socket), mib, attachments, writes),
        _ => launch(&arguments),
    }
}

/// Starts both processes and waits for them.
fn launch(arguments: &[String]) -> Outcome {
    if let Err(error) = CudaDevice::count() {
        println!("no device: {error}");
        return Ok(());
    }
    let socket = std::env::temp_dir().join(format!("share-weights-{}", std::process::id()));
    let start = |role: &str| -> std::io::Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).env("SHARE_ROLE", role).env("SHARE_SOCKET", &socket).spawn()
    };
    let (mut trainer, mut engine) = (start("trainer")?, start("engine")?);
    let (trained, served) = (trainer.wait()?, engine.wait()?);
    std::fs::remove_file(&socket)?;
    if trained.success() && served.success() {
        Ok(())
    } else {
        Err(format!("trainer {trained}, engine {served}").into())
    }
}

/// Returns the contents of a layer, which differ between layers.
fn content(layer: usize, words: usize) -> Vec<u64> {
    (0..words as u64).map(|at| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 + 2 * layer as u64)).collect()
}

fn checksum(words: &[u64], sum: u64) -> u64 {
    words.iter().fold(sum, |sum, word| (sum.rotate_left(5) ^ word).wrapping_mul(0x2545_f491_4f6c_dd1d))
}

fn trainer(socket: &Path, mib: usize, attachments: usize) -> Outcome {
    let device = CudaDevice::new(0)?;
    let stream = device.context().new_stream()?;
    let allocator = CudaAllocator::new(&device, Default::default())?;
    // All weights are in one segment, which is one chunk of memory.
    let pool = allocator.create_pool(PoolConfig::builder().reserved((mib as u64) << 20).build()?)?;
    let weights = allocator.with_pool(&pool);
    let words = (mib << 20) / LAYERS / 8;
    let mut layers = Vec::new();
    let mut sum = 0;
    for layer in 0..LAYERS {
        let mut buffer = weights.alloc_zeroed_named::<u64>(&stream, words, &format!("layer {layer}"))?;
        let written = content(layer, words);
        stream.memcpy_htod(&written, &mut buffer)?;
        sum = checksum(&written, sum);
        layers.push(buffer);
    }
    // A second pool that grows chunk by chunk.
    let growing = allocator.with_pool(&allocator.create_pool(PoolConfig::builder().build()?)?);
    let mut small: Vec<DeviceBuffer<u8>> = (0..SMALL_BUFFERS)
        .map(|at| growing.alloc_zeroed_named(&stream, 20 << 20, &format!("small {at}")))
        .collect::<Result<_, _>>()?;
    stream.synchronize()?;
    let (export, small_export) = (weights.export()?, growing.export()?);
    let listening = socket.with_extension("new");
    let listener = UnixListener::bind(&listening)?;
    std::fs::rename(&listening, socket)?;
    println!("trainer: {} MiB exported, checksum {sum:016x}", export.mapped_bytes() >> 20);

    let serve = |export: &symmalloc_cuda::Export| -> Result<u32, Box<dyn Error>> {
        Ok(export.serve(&listener.accept()?.0, Access::Read, TIMEOUT)?.pid)
    };
    let descriptors = open_descriptors()?;
    for _ in 0..2 + attachments {
        serve(&export)?;
    }
    wait_until(|| export.report().peers.is_empty());
    assert_eq!(open_descriptors()?, descriptors, "the exporter leaked a descriptor");
    for _ in 0..1 + SMALL_ATTACHMENTS {
        serve(&small_export)?;
    }
    let peer = serve(&export)?;
    assert_eq!(export.report().peers.len(), 1);
    println!("trainer: {peer} has {:?}", weights.exports()[0]);
    drop(small.pop()); // notifies processes that have that pool mapped
    wait_until(|| small_export.report().peers.is_empty());
    println!("trainer: exits");
    std::process::exit(0); // frees nothing: the engine keeps the weights alive
}

fn engine(path: &Path, mib: usize, attachments: usize, writes: bool) -> Outcome {
    let device = CudaDevice::new(0)?;
    let stream = device.context().new_stream()?;
    let mut host = vec![0_u64; (mib << 20) / LAYERS / 8];
    let path: PathBuf = path.into();
    wait_until(|| path.exists());
    let attach = || -> Result<Import, Box<dyn Error>> {
        Ok(Import::attach(&device, &UnixStream::connect(&path)?, Access::Read, TIMEOUT)?)
    };
    let free = || device.memory_info().map(|info| info.free_bytes as i64);

    let before = free()?;
    let started = Instant::now();
    let import = attach()?;
    let took = started.elapsed();
    let taken = before - free()?;
    let sum = checksum_of(&import, &stream, &mut host)?;
    println!("engine: {} MiB attached in {took:.2?}, checksum {sum:016x}", import.report().mapped_bytes >> 20);
    println!("engine: attaching took {taken} bytes of device memory for {} layers", import.len());
    let expected = (0..LAYERS).fold(0, |sum, layer| checksum(&content(layer, host.len()), sum));
    assert_eq!(sum, expected, "the weights must equal the trainer's");
    assert!(taken < 32 << 20, "attaching must not copy");
    drop(import);

    drop(attach()?);
    let (before, descriptors, resident, started) = (free()?, open_descriptors()?, resident_bytes()?, Instant::now());
    for _ in 0..attachments {
        attach()?.detach()?;
    }
    let each = started.elapsed() / attachments.max(1) as u32;
    let grown = resident_bytes()? as i64 - resident as i64;
    println!("engine: attached and detached {attachments} times, {each:.2?} each");
    println!(
        "engine: {} bytes of the device, {} descriptors and {grown} bytes of the host were not released",
        before - free()?,
        open_descriptors()? as i64 - descriptors as i64
    );
    assert_eq!((free()?, open_descriptors()?), (before, descriptors));

    let started = Instant::now();
    for _ in 0..SMALL_ATTACHMENTS {
        attach()?.detach()?;
    }
    let each = started.elapsed() / SMALL_ATTACHMENTS as u32;
    let small = attach()?;
    println!("engine: 300 MiB in chunks of 20 MiB, {SMALL_ATTACHMENTS} times, {each:.2?} each");
    let import = attach()?;
    wait_until(|| small.check().is_err());
    println!("engine: {}", small.check().expect_err("stale"));
    drop(small);
    wait_until(|| !import.report().exporter_is_alive);
    std::thread::sleep(Duration::from_secs(1)); // until the driver has destroyed the trainer's context
    let after = free()?;
    assert_eq!(checksum_of(&import, &stream, &mut host)?, expected, "the weights must outlive the trainer");
    println!("engine: the trainer has exited, the weights are unchanged, {:?}", import.report().state);
    if writes {
        // SAFETY: plain bytes; the pointer is only used for a write that the device must reject.
        let layer = unsafe { import.view::<u64>("layer 3", &stream) }?;
        // SAFETY: the address is mapped; the write is expected to fail.
        let written =
            unsafe { cudarc::driver::result::memset_d8_async(layer.device_ptr(&stream).0, 1, 8, stream.cu_stream()) };
        println!("engine: a write to read-only memory: submitted {written:?}, done {:?}", stream.synchronize());
        std::process::exit(0);
    }
    drop(import);
    let back = free()? - after;
    println!("engine: {} MiB returned to the device", back >> 20);
    assert!(back >= (mib as i64) << 20);
    Ok(())
}

fn checksum_of(import: &Import, stream: &Arc<CudaStream>, host: &mut [u64]) -> Result<u64, Box<dyn Error>> {
    (0..LAYERS).try_fold(0, |sum, layer| {
        // SAFETY: the trainer allocated them as `u64`, and does not write to them anymore.
        let view = unsafe { import.view::<u64>(&format!("layer {layer}"), stream) }?;
        stream.memcpy_dtoh(&view, host)?;
        stream.synchronize()?;
        Ok(checksum(host, sum))
    })
}

fn wait_until(what: impl Fn() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !what() {
        assert!(Instant::now() < until, "timed out");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn open_descriptors() -> std::io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

fn resident_bytes() -> Result<u64, Box<dyn Error>> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    Ok(pages.split(' ').nth(1).ok_or("statm")?.parse::<u64>()? * 4096)
}
