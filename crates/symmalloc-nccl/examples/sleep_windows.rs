//! Puts a pool with windows and a pool of weights to sleep on all ranks, and wakes them. A graph that was captured before the sleep replays
//! correctly without another capture, with the same windows. While the pools sleep, another process uses the memory. Every cycle checks all
//! buffers and, in turn, one of 64 parts of the weights.
//!
//! ```sh
//! cargo run --release -p symmalloc-nccl --example sleep_windows -- 100 64    # cycles, MiB of each segment
//! torchrun --no-python --nproc-per-node 2 target/release/examples/sleep_windows 200 64 90
//! ```
//! With `--suspend`, the communicator sleeps too (NCCL 2.29.7 or later). With `--full N`, the last rank's device is full when the pool is to
//! wake, N times for each way in which that rank can make room, or for one of them: `--only free`, `trim`, `destroy`, `sleep`,
//! `limit` or `import`. At the end, each rank prints how the used memory of its device changed from stage to stage. The last stages destroy the graphs, the pools
//! and the communicator: the process retains the rest, such as the code of kernels, until it ends.
//!
//! The third argument is the share of the device that the other process allocates, in percent. This much memory is available only while the
//! weights sleep.

use cudarc::driver::{CudaStream, DevicePtr};
use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::op::Contents;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{
    Access, CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, DeviceMemory, GraphPool, Import, Pool,
};
use symmalloc_nccl::{
    CollectiveSleepError, Communicator, Launch, LaunchError, ReduceOp, Registrar, Registration, UniqueId,
};

const SEGMENTS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(60);
/// Maximum number of bytes that may remain on the device during a sleep.
const LEFT_MAX: u64 = 64 << 20;
/// Number of parts of the weights. Each cycle checks one.
const PARTS: usize = 64;
type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut arguments: Vec<String> = std::env::args().collect();
    let suspends = take_flag(&mut arguments, "--suspend").is_some();
    let refusals: u32 = match take_flag(&mut arguments, "--full") {
        Some(at) if at < arguments.len() => arguments.remove(at).parse()?,
        Some(_) => return Err("--full needs a number of rounds".into()),
        None => 0,
    };
    let recoveries = match take_flag(&mut arguments, "--only") {
        Some(at) if at < arguments.len() => vec![arguments.remove(at).parse()?],
        Some(_) => return Err("--only needs a way to make room".into()),
        None => Recovery::ALL.to_vec(),
    };
    let number = |at: usize, otherwise: usize| arguments.get(at).map_or(Ok(otherwise), |text| text.parse());
    if let Ok(device) = std::env::var(OTHER) {
        return be_the_other(device.parse()?);
    }
    let (cycles, segment, percent) = (number(1, 20)? as u32, number(2, 64)? << 20, number(3, 0)?);
    let launch = match Launch::from_env() {
        Ok(launch) => Some(launch),
        Err(LaunchError::NotLaunched) => None,
        Err(error) => return Err(error.into()),
    };
    let device = CudaDevice::for_local_rank(launch.as_ref().map_or(0, |launch| launch.local_rank))?;
    let context_bytes = used_bytes(&device)?;
    let mut stages = Stages::new(&device)?;
    let builder = Communicator::builder(&device).deadline(DEADLINE);
    let world = match launch {
        Some(_) => builder.connect_env()?,
        None => builder.connect(UniqueId::new()?, 0, 1)?,
    };
    stages.record("communicator")?;
    let stream = device.context().new_stream()?;
    let allocator = CudaAllocator::new(&device, Config::default())?;
    allocator.register_stream(&stream)?;
    let registrar = Registrar::builder(&allocator).build()?;
    let config = PoolConfig::builder().symmetric(true).fixed().build()?;
    let pool = allocator.create_pool(config)?;
    registrar.attach(&world, &[pool.id()], Registration::Windows)?;
    let windows_bytes = SEGMENTS * segment;
    let total = device.memory_info()?.total_bytes as usize;
    // The other process allocates this size. The weights are large enough that both do not fit on the device.
    let wanted = (total / 100 * percent).max(windows_bytes);
    let weights = Weights::new(&allocator, &stream, (total - wanted).min(wanted).next_multiple_of(PARTS << 20))?;
    let asleep_bytes = (windows_bytes + weights.bytes()) as u64;
    let mut buffers: Vec<DeviceBuffer<f32>> = (0..SEGMENTS)
        .map(|_| allocator.with_pool(&pool).alloc_zeroed(&stream, segment / 4))
        .collect::<Result<_, _>>()?;
    stages.record("pools")?;
    registrar.sync(&[&world])?;
    stages.record("windows")?;
    let windows = |buffers: &[DeviceBuffer<f32>]| -> Vec<String> {
        let text = |buffer| match registrar.window_of(&world, buffer) {
            Ok(span) => format!("{:?}", span.window),
            Err(error) => format!("no window ({error})"),
        };
        buffers.iter().map(text).collect()
    };
    let before = windows(&buffers);
    let nccl_bytes = |world: &Communicator| world.memory().unwrap_or_default().held_bytes();
    let at_start = nccl_bytes(&world);
    let sleep = |contents| match suspends {
        true => registrar.sleep_and_suspend(&world, pool.id(), contents),
        false => registrar.sleep(&world, pool.id(), contents),
    };
    // Run once eagerly, so that NCCL connects the ranks, then capture a graph.
    reduce_all(&world, &mut buffers, &stream)?;
    world.synchronize(&stream)?;
    stages.record("first all-reduce")?;
    let graphs = GraphPool::new(&allocator, PoolConfig::default())?;
    let capture = graphs.begin(&stream)?;
    reduce_all(&world, &mut buffers, &stream)?;
    let mut graph = capture.end()?;
    check(&world, &mut buffers, &stream, 0, |_| Ok(graph.launch(&stream)?))?;
    stages.record("graph")?;
    let connected = nccl_bytes(&world);
    let (mut lost_captures, mut suspended_bytes, mut left_by_nccl) = (0, 0, 0);

    let before_other = used_bytes(&device)?;
    let mut other = ForeignProcess::start(device.ordinal())?;
    let other_bytes = used_bytes(&device)?.saturating_sub(before_other);
    let mut remains = DeviceMemory::default();
    let (mut asleep, mut awake, mut least_back) = (Duration::ZERO, Duration::ZERO, u64::MAX);
    for cycle in 1..=cycles {
        let contents = if cycle % 2 == 0 { Contents::Keep } else { Contents::Drop };
        let kept: Vec<f32> = (0..1024).map(|at| (at * cycle) as f32).collect();
        stream.memcpy_htod(&kept, &mut buffers[0].slice_mut(0..1024))?;
        world.synchronize(&stream)?;
        let free = device.memory_info()?.free_bytes;
        let begun = Instant::now();
        let slept = sleep(contents)?;
        suspended_bytes = slept.suspended_bytes;
        asleep += begun.elapsed();
        assert_eq!(slept.memory.released_bytes, windows_bytes as u64);
        allocator.sleep(weights.pool.id(), Contents::Keep)?;
        // Each rank has a separate device, which windows require.
        let back = device.memory_info()?.free_bytes.saturating_sub(free);
        assert!(back + LEFT_MAX >= asleep_bytes, "cycle {cycle}: {back} of {asleep_bytes} bytes were released");
        least_back = least_back.min(back);
        left_by_nccl = nccl_bytes(&world);
        remains = registrar.device_memory()?;
        other.take(wanted)?;
        other.give_back()?;
        allocator.wake(weights.pool.id())?;
        let begun = Instant::now();
        let woken = registrar.wake(&world, pool.id())?;
        awake += begun.elapsed();
        assert_eq!(woken.lost.len(), 0, "cycle {cycle}: {woken:?}");
        assert_eq!(woken.resumed.len(), usize::from(suspends), "cycle {cycle}: {woken:?}");
        if woken.changed.is_empty() {
            assert!(lost_captures > 0 || windows(&buffers) == before, "cycle {cycle}: other windows");
        } else {
            lost_captures += 1;
            let capture = graphs.begin(&stream)?;
            reduce_all(&world, &mut buffers, &stream)?;
            graph = capture.end()?;
        }
        if contents == Contents::Keep {
            assert_eq!(stream.clone_dtoh(&buffers[0].slice(0..1024))?, kept, "cycle {cycle}");
        }
        weights.check(&stream, cycle as usize % PARTS)?;
        check(&world, &mut buffers, &stream, cycle, |_| Ok(graph.launch(&stream)?))?;
        check(&world, &mut buffers, &stream, cycle, |buffers| reduce_all(&world, buffers, &stream))?;
    }
    if cycles > 0 {
        let own_bytes = remains.used_bytes.saturating_sub(context_bytes + other_bytes);
        let mib = |bytes: u64| bytes >> 20;
        println!(
            "rank {}: {} MiB remain beyond the context ({} MiB) and the other process ({} MiB): pools {}, asleep {}, graphs {}, idle {}, \
             communicators {}, other {}",
            world.rank(),
            mib(own_bytes),
            mib(context_bytes),
            mib(other_bytes),
            mib(remains.awake_bytes),
            mib(remains.asleep_bytes),
            mib(remains.graph_bytes),
            mib(remains.idle_bytes),
            mib(remains.communicators_bytes),
            mib(remains.other_bytes.saturating_sub(context_bytes + other_bytes)),
        );
    }
    for kind in recoveries {
        let begun = Instant::now();
        for round in 1..=refusals {
            sleep(Contents::Keep)?;
            let mut attempts = 0;
            if world.rank() + 1 == world.ranks() {
                let full = Full::new(&allocator, &stream, kind, &mut other)?;
                wake_until_awake(&registrar, &world, &pool, Some(full), &allocator, &mut attempts)?;
            } else {
                wake_until_awake(&registrar, &world, &pool, None, &allocator, &mut attempts)?;
            }
            check(&world, &mut buffers, &stream, round, |_| Ok(graph.launch(&stream)?))?;
        }
        if world.rank() == 0 && refusals > 0 {
            println!("{kind:?}: {refusals} of {refusals} recovered, {:.2?} each", begun.elapsed() / refusals);
        }
    }
    if world.rank() == 0 {
        let (ranks, nccl) = (world.ranks(), world.nccl().version());
        println!(
            "{ranks} ranks, NCCL {nccl}, {cycles} cycles: the same windows, graph and eager calls right in every one"
        );
        println!("windows: {}", before.join(", "));
        println!("{lost_captures} cycles in which a capture was reported as lost");
        println!(
            "NCCL's memory: {} MiB at first, {} MiB connected, {} MiB while asleep; {} MiB suspended",
            at_start >> 20,
            connected >> 20,
            left_by_nccl >> 20,
            suspended_bytes >> 20
        );
        if cycles > 0 {
            let each = |sum: Duration| sum / cycles;
            println!(
                "{} MiB of {} back on the device at least, of which another process took {} MiB",
                least_back >> 20,
                asleep_bytes >> 20,
                wanted >> 20
            );
            let mib = windows_bytes >> 20;
            println!(
                "{mib} MiB of windows: sleep {:.2?}, wake {:.2?}, half of them with contents",
                each(asleep),
                each(awake)
            );
        }
    }
    other.end()?;
    stages.record("cycles")?;
    drop((graph, graphs));
    stages.record("no graph")?;
    drop((buffers, weights));
    registrar.detach(&world, &[pool.id()])?;
    registrar.sync(&[&world])?;
    drop(pool);
    allocator.trim_all()?;
    stages.record("no pools")?;
    let rank = world.rank();
    world.destroy()?;
    stages.record("no communicator")?;
    println!("rank {rank}: used MiB by stage: {stages}");
    Ok(())
}

/// The used memory of the device at each stage of the program.
struct Stages<'a> {
    device: &'a CudaDevice,
    used: Vec<(&'static str, u64)>,
}

impl<'a> Stages<'a> {
    fn new(device: &'a CudaDevice) -> Outcome<Self> {
        Ok(Stages { device, used: vec![("context", used_bytes(device)?)] })
    }

    fn record(&mut self, stage: &'static str) -> Outcome<()> {
        self.used.push((stage, used_bytes(self.device)?));
        Ok(())
    }
}

impl Display for Stages<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (stage, bytes) in &self.used {
            write!(out, "{separator}{stage} {}", bytes >> 20)?;
            separator = ", ";
        }
        Ok(())
    }
}

/// Returns the bytes of the device that are in use.
fn used_bytes(device: &CudaDevice) -> Outcome<u64> {
    let info = device.memory_info()?;
    Ok(info.total_bytes - info.free_bytes)
}

/// Removes a flag from the arguments. Returns its position.
fn take_flag(arguments: &mut Vec<String>, flag: &str) -> Option<usize> {
    let at = arguments.iter().position(|argument| argument == flag)?;
    arguments.remove(at);
    Some(at)
}

/// A way in which one rank makes room on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recovery {
    /// Frees memory, and leaves the rest to the wake.
    Free,
    /// Frees memory, and trims all pools.
    Trim,
    /// Drops a private pool.
    Destroy,
    /// Puts a private pool to sleep.
    Sleep,
    /// Raises the allocator's limit, which left no room for the pool.
    Limit,
    /// Detaches from the memory of another process, which released it in the meantime.
    Import,
}

impl Recovery {
    const ALL: [Recovery; 6] =
        [Recovery::Free, Recovery::Trim, Recovery::Destroy, Recovery::Sleep, Recovery::Limit, Recovery::Import];
}

impl FromStr for Recovery {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_named = |kind: &Recovery| format!("{kind:?}").eq_ignore_ascii_case(text);
        let unknown = || format!("unknown way to make room {text:?}: use free, trim, destroy, sleep, limit or import");
        Recovery::ALL.into_iter().find(is_named).ok_or_else(unknown)
    }
}

/// The obstacle to a wake: nearly all memory of the device is in use, or a limit is reached.
struct Full {
    kind: Recovery,
    pool: Pool<CudaBackend>,
    buffers: Vec<DeviceBuffer<u8>>,
    import: Option<Import>,
}

impl Full {
    fn new(
        allocator: &CudaAllocator,
        stream: &Arc<CudaStream>,
        kind: Recovery,
        other: &mut ForeignProcess,
    ) -> Outcome<Self> {
        let pool = allocator.create_pool(PoolConfig::builder().fixed().build()?)?;
        let (mut buffers, mut import) = (Vec::new(), None);
        match kind {
            Recovery::Limit => allocator.core().set_total_limit_bytes(Some(1)),
            Recovery::Import => import = Some(other.share(allocator.device())?),
            _ => buffers = fill(allocator, stream, &pool)?,
        }
        Ok(Full { kind, pool, buffers, import })
    }

    /// Makes room on the device.
    fn recover(self, allocator: &CudaAllocator) -> Outcome<Option<Pool<CudaBackend>>> {
        let Full { kind, pool, buffers, import } = self;
        if kind == Recovery::Sleep {
            allocator.sleep(pool.id(), Contents::Drop)?;
        }
        drop(buffers);
        match kind {
            Recovery::Free | Recovery::Sleep => {}
            Recovery::Limit => allocator.core().set_total_limit_bytes(None),
            Recovery::Import => drop(import),
            Recovery::Trim => {
                allocator.trim_all()?;
            }
            Recovery::Destroy => {
                drop(pool);
                return Ok(None);
            }
        }
        Ok(Some(pool))
    }
}

/// Allocates nearly all free memory of the device from the pool.
fn fill(
    allocator: &CudaAllocator,
    stream: &Arc<CudaStream>,
    pool: &Pool<CudaBackend>,
) -> Outcome<Vec<DeviceBuffer<u8>>> {
    let mut buffers = Vec::new();
    for mib in [1 << 14, 1 << 11, 1 << 8, 1 << 5, 2] {
        while let Ok(buffer) = allocator.with_pool(pool).alloc_zeroed(stream, mib << 20) {
            buffers.push(buffer);
        }
    }
    stream.synchronize()?;
    Ok(buffers)
}

/// Wakes the pool. A rank whose device is full makes room after the first refusal.
fn wake_until_awake(
    registrar: &Registrar,
    world: &Communicator,
    pool: &Pool<CudaBackend>,
    mut full: Option<Full>,
    allocator: &CudaAllocator,
    attempts: &mut u32,
) -> Outcome<()> {
    let mut _recovered = None;
    loop {
        *attempts += 1;
        match registrar.wake(world, pool.id()) {
            Ok(_) if full.is_some() => return Err("the pool woke on a full device".into()),
            Ok(_) => return Ok(()),
            Err(CollectiveSleepError::Refused { .. } | CollectiveSleepError::NoRoom { .. }) if *attempts == 1 => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(full) = full.take() {
            _recovered = full.recover(allocator)?;
        }
    }
}

/// The environment variable with the device for the other process.
const OTHER: &str = "SLEEP_WINDOWS_OTHER";

/// The request that the other process shares its memory.
const SHARE: &str = "share";

/// Another process on the same device.
struct ForeignProcess {
    process: Child,
    printed: BufReader<ChildStdout>,
}

impl ForeignProcess {
    fn start(device: usize) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(OTHER, device.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let printed = BufReader::new(process.stdout.take().ok_or("no output")?);
        let mut other = ForeignProcess { process, printed };
        // The context of the other process now exists, which takes half a gigabyte.
        other.give_back()?;
        Ok(other)
    }

    fn take(&mut self, bytes: usize) -> Outcome<()> {
        self.request(&bytes.to_string())
    }

    fn give_back(&mut self) -> Outcome<()> {
        self.request("0")
    }

    /// Lets the other process allocate nearly all free memory of the device, attaches to that memory, and lets the other release it.
    fn share(&mut self, device: &Arc<CudaDevice>) -> Outcome<Import> {
        self.request(SHARE)?;
        let socket = UnixStream::connect(socket_of(self.process.id()))?;
        let import = Import::attach(device, &socket, Access::Read, DEADLINE)?;
        self.give_back()?;
        Ok(import)
    }

    fn request(&mut self, request: &str) -> Outcome<()> {
        writeln!(self.process.stdin.as_mut().ok_or("no input")?, "{request}")?;
        let mut answer = String::new();
        self.printed.read_line(&mut answer)?;
        if answer.trim() == request {
            Ok(())
        } else {
            Err(format!("unexpected answer of the other process: {answer:?}").into())
        }
    }

    fn end(mut self) -> Outcome<()> {
        drop(self.process.stdin.take());
        if self.process.wait()?.success() { Ok(()) } else { Err("the other process failed".into()) }
    }
}

/// The path of the socket over which the other process shares memory.
fn socket_of(process: u32) -> PathBuf {
    std::env::temp_dir().join(format!("sleep_windows-{process}.socket"))
}

/// Runs the other process. For each number of input, allocates and writes that many bytes, and then echoes the line. For `SHARE`, allocates
/// nearly all free memory, echoes the line, and shares the memory until an importer has attached.
fn be_the_other(device: usize) -> Outcome<()> {
    let device = CudaDevice::new(device)?;
    let stream = device.context().new_stream()?;
    let allocator = CudaAllocator::new(&device, Config::default())?;
    for line in std::io::stdin().lines() {
        let line = line?;
        if line == SHARE {
            share(&allocator, &stream)?;
            continue;
        }
        match line.parse()? {
            0 => {
                allocator.trim_all()?;
            }
            bytes => {
                let held = allocator.alloc_zeroed::<u8>(&stream, bytes)?;
                stream.synchronize()?;
                drop(held);
            }
        }
        println!("{line}");
    }
    Ok(())
}

fn share(allocator: &CudaAllocator, stream: &Arc<CudaStream>) -> Outcome<()> {
    let pool = allocator.create_pool(PoolConfig::builder().fixed().build()?)?;
    let buffers = fill(allocator, stream, &pool)?;
    let export = allocator.with_pool(&pool).export()?;
    let path = socket_of(std::process::id());
    let listener = UnixListener::bind(&path)?;
    println!("{SHARE}");
    let (socket, _) = listener.accept()?;
    std::fs::remove_file(path)?;
    export.serve(&socket, Access::Read, DEADLINE)?;
    drop(buffers);
    Ok(())
}

/// Memory without windows, which sleeps and wakes with its contents: each word holds its own index.
struct Weights {
    pool: Pool<CudaBackend>,
    words: DeviceBuffer<u32>,
    address: u64,
}

impl Weights {
    fn new(allocator: &CudaAllocator, stream: &Arc<CudaStream>, size_bytes: usize) -> Outcome<Self> {
        let pool = allocator.create_pool(PoolConfig::builder().expandable().build()?)?;
        let mut words = allocator.with_pool(&pool).alloc_zeroed::<u32>(stream, size_bytes / 4)?;
        let part = words.len() / PARTS;
        for at in (0..words.len()).step_by(part) {
            let numbers: Vec<u32> = (at as u32..).take(part).collect();
            stream.memcpy_htod(&numbers, &mut words.slice_mut(at..at + part))?;
        }
        stream.synchronize()?;
        let address = words.device_ptr(stream).0;
        Ok(Weights { pool, words, address })
    }

    fn bytes(&self) -> usize {
        self.words.len() * 4
    }

    fn check(&self, stream: &Arc<CudaStream>, part: usize) -> Outcome<()> {
        assert_eq!(self.words.device_ptr(stream).0, self.address, "the weights moved");
        let size = self.words.len() / PARTS;
        let found = stream.clone_dtoh(&self.words.slice(part * size..(part + 1) * size))?;
        let wrong = found.iter().zip(part as u32 * size as u32..).filter(|(word, place)| **word != *place).count();
        assert_eq!(wrong, 0, "part {part} of the weights has other words");
        Ok(())
    }
}

fn reduce_all(world: &Communicator, buffers: &mut [DeviceBuffer<f32>], stream: &Arc<CudaStream>) -> Outcome<()> {
    buffers.iter_mut().try_for_each(|buffer| Ok(world.all_reduce_in_place(buffer, ReduceOp::Sum, stream)?))
}

/// Fills all buffers, reduces, and checks every element.
fn check(
    world: &Communicator,
    buffers: &mut [DeviceBuffer<f32>],
    stream: &Arc<CudaStream>,
    cycle: u32,
    reduce: impl FnOnce(&mut [DeviceBuffer<f32>]) -> Outcome<()>,
) -> Outcome<()> {
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
