//! The cost of a `DeviceBuffer` that is allocated on a stream through a shared [`CudaAllocator`] and dropped.
//!
//! Runs on the stub of libcuda, so it needs no device. In steady state there are no driver calls, so the results
//! measure symmalloc alone: the lookup of the stream's heap, the heap's lock, the placement, the buffer, and its drop.
//! Only a buffer that a second stream uses causes driver calls; instructions in the stub are not counted.
//!
//! Callgrind counts instructions as in `ratios`, minus those of the loop over the steps. Times are processor time of
//! the threads. Two more tables show threads that each use their own stream, and the host cost of ten million live
//! blocks. Exits with 1 if a limit on instructions is exceeded. `cargo bench -p symmalloc-benches --bench buffers`

use cudarc::driver::{CudaStream, DevicePtr};
use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Barrier};
use std::{env, fs, thread};
use stub_process::stub_of_libcuda;
use symmalloc_benches::clock::{median, nanoseconds};
use symmalloc_benches::micro;
use symmalloc_benches::workload::{Step, Workload};
use symmalloc_benches::{Segments, ours};
use symmalloc_core::config::{Config, ExpandableSegments, PoolConfig, SegmentPolicy, StreamPolicy};
use symmalloc_core::{Handle, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer};
use symmalloc_harness::jobs;

/// Maximum instructions per op, without the walk, for a recorded job without cross-stream uses. In the bench profile.
const INSTRUCTIONS_MAX: f64 = 380.0;

const REPEATS: usize = 15;
/// Number of replacements that each thread makes in the table of threads.
const THREAD_PAIRS: u32 = 400_000;

/// Address space in bytes that all heaps of a case share. valgrind leaves little address space to a process.
const ADDRESS_BYTES: u64 = 30 << 30;

/// Prefix of a case's name that selects the walk alone.
const WALK: &str = "walk through ";
const PAIR: &str = "pair on one stream";
const SECOND: &str = "pair used by a second stream";
const REPLACEMENT: &str = "replacement among 1,000";

/// The cases that `--test` runs.
const TEST_CASES: [&str; 3] = ["resnet50_multiscale", PAIR, SECOND];

/// Environment variable that is set once the stub is on the library path.
const ON_STUB: &str = "SYMMALLOC_BUFFERS_ON_STUB";
/// Environment variable that is set under callgrind and names the case.
const CASE: &str = "SYMMALLOC_BUFFERS_CASE";

fn main() -> ExitCode {
    if env::var_os(ON_STUB).is_none() {
        return start_on_stub();
    }
    if let Ok(case) = env::var(CASE) {
        count_this(&case);
        return ExitCode::SUCCESS;
    }
    let filter = env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let mut misses = Vec::new();
    println!("{:<30}{:>10}{:>14}{:>10}{:>10}{:>10}", "case", "ops", "instructions", "walk", "ours", "ours ns");
    let cases = jobs::JOBS.into_iter().chain([PAIR, SECOND, REPLACEMENT]);
    let is_test = env::args().any(|arg| arg == "--test");
    for case in cases.filter(|case| case.contains(&filter) && (!is_test || TEST_CASES.contains(case))) {
        let ops = workload_of(case).len() as f64;
        let mut bench = Buffers::warm(case);
        let times = (0..REPEATS).map(|_| nanoseconds(|| bench.repeat()) / ops).collect();
        let [in_all, walk] = [case.to_owned(), format!("{WALK}{case}")]
            .map(|case| count_under_callgrind(&case).map(|count| count / ops));
        let ours = in_all.zip(walk).map(|(in_all, walk)| in_all - walk);
        let [in_all, walk, shown] =
            [in_all, walk, ours].map(|count| count.map_or("-".into(), |count| format!("{count:.1}")));
        println!("{case:<30}{ops:>10}{in_all:>14}{walk:>10}{shown:>10}{:>10.1}", median(times));
        if let Some(count) = ours.filter(|count| is_judged(case) && *count > INSTRUCTIONS_MAX) {
            misses.push(format!("{case} takes {count:.1} instructions per op, more than {INSTRUCTIONS_MAX}"));
        }
    }
    if cfg!(debug_assertions) {
        println!("no instructions: the limit applies to builds without debug assertions");
    }
    if (filter.is_empty() && !is_test) || filter == "threads" {
        threads_table();
    }
    if (filter.is_empty() && !is_test) || filter == "live blocks" {
        live_blocks_table();
    }
    misses.iter().for_each(|miss| println!("missed: {miss}"));
    if misses.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns `true` if the limit applies. Cross-stream uses and free lists of a thousand sizes cost more than a buffer
/// alone.
fn is_judged(case: &str) -> bool {
    let uses_streams = |step: &Step| matches!(step, Step::RecordUse { .. });
    case != REPLACEMENT && !workload_of(case).steps().iter().any(uses_streams)
}

/// Restarts this program with the stub on its library path.
fn start_on_stub() -> ExitCode {
    let folder = stub_of_libcuda();
    let status = Command::new(env::current_exe().expect("this program"))
        .args(env::args().skip(1))
        .env(ON_STUB, "1")
        .env("LD_LIBRARY_PATH", folder.path())
        .env("STUB_MEMORY_BYTES", ADDRESS_BYTES.to_string())
        .env("STUB_ADDRESS_BYTES", (ADDRESS_BYTES + (1 << 30)).to_string())
        .status();
    if status.is_ok_and(|status| status.success()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn workload_of(case: &str) -> Workload {
    match case {
        PAIR => micro::pair(64 << 10),
        SECOND => micro::cross_stream(64 << 10),
        REPLACEMENT => micro::replacement(),
        job => Workload::from(&jobs::program(job)),
    }
}

/// Creates an allocator on the stub for `streams` streams. Its chunks are large, so that mapping takes few calls.
fn allocator(streams: usize) -> CudaAllocator {
    let mut expandable = ExpandableSegments::default();
    expandable.range_bytes = (ADDRESS_BYTES / streams as u64) & !(expandable.growth_bytes - 1);
    let pool = PoolConfig::builder()
        .segments(SegmentPolicy::Expandable(expandable))
        .build()
        .expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let device = CudaDevice::new(0).expect("the stub should have a device");
    let backend = CudaBackend::builder(&device).chunk_bytes(64 << 20).build().expect("virtual memory");
    CudaAllocator::with_backend(backend, config).expect("the configuration should be valid")
}

fn new_stream(allocator: &CudaAllocator) -> Arc<CudaStream> {
    allocator.device().context().new_stream().expect("the driver should create a stream")
}

/// A workload on buffers in steady state.
struct Buffers {
    allocator: CudaAllocator,
    streams: Vec<Arc<CudaStream>>,
    workload: Workload,
    buffers: Vec<Option<DeviceBuffer<u8>>>,
}

impl Buffers {
    fn warm(case: &str) -> Self {
        let workload = workload_of(case);
        let allocator = allocator(workload.streams().into());
        let streams: Vec<_> = (0..workload.streams()).map(|_| new_stream(&allocator)).collect();
        for stream in &streams {
            allocator.register_stream(stream).expect("the program should register few streams");
        }
        let buffers = (0..workload.allocations()).map(|_| None).collect();
        let mut bench = Buffers { allocator, streams, workload, buffers };
        bench.repeat();
        bench
    }

    #[inline]
    fn repeat(&mut self) {
        for step in self.workload.steps() {
            match *step {
                Step::Allocate { number, stream, size_bytes } => {
                    let stream = &self.streams[stream.index()];
                    // SAFETY: nothing reads the bytes, and every bit pattern is a valid `u8`.
                    let buffer = unsafe { self.allocator.alloc::<u8>(stream, size_bytes as usize) };
                    self.buffers[number as usize] = Some(buffer.expect("memory should suffice"));
                }
                Step::Free { number, .. } => self.buffers[number as usize] = None,
                Step::RecordUse { number, stream } => {
                    if let Some(buffer) = &self.buffers[number as usize] {
                        drop(black_box(buffer.device_ptr(&self.streams[stream.index()])));
                    }
                }
            }
        }
        black_box(&mut self.buffers);
    }
}

/// A stand-in for a buffer, of the same size, with a cheap drop that does nothing.
struct Nothing {
    _words: [usize; size_of::<DeviceBuffer<u8>>() / size_of::<usize>()],
}

impl Drop for Nothing {
    #[inline]
    fn drop(&mut self) {
        black_box(self);
    }
}

/// The steps of a workload without an allocator.
struct Walk {
    streams: Vec<usize>,
    workload: Workload,
    buffers: Vec<Option<Nothing>>,
}

impl Walk {
    fn warm(case: &str) -> Self {
        let workload = workload_of(case);
        let buffers = (0..workload.allocations()).map(|_| None).collect();
        let mut walk = Walk { streams: vec![1; workload.streams().into()], workload, buffers };
        walk.repeat();
        walk
    }

    #[inline]
    fn repeat(&mut self) {
        for step in self.workload.steps() {
            match *step {
                Step::Allocate { number, stream, size_bytes } => {
                    let stream = black_box(&self.streams[stream.index()]);
                    self.buffers[number as usize] = Some(Nothing {
                        _words: [size_bytes as usize + stream; size_of::<DeviceBuffer<u8>>() / size_of::<usize>()],
                    });
                }
                Step::Free { number, .. } => self.buffers[number as usize] = None,
                Step::RecordUse { number, stream } => {
                    black_box((&self.buffers[number as usize], &self.streams[stream.index()]));
                }
            }
        }
        black_box(&mut self.buffers);
    }
}

/// Prints the table for threads that replace random buffers of 1,000, each on a separate stream. Contention for cache
/// lines and locks increases their processor time.
fn threads_table() {
    println!("\n{:<30}{:>14}{:>14}", "threads with own streams", "ns per pair", "of linear");
    let mut one = 0.0;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    for count in [1, 2, 4, 8, 16].into_iter().filter(|count| *count <= cores) {
        let time = median((0..5).map(|_| nanoseconds_per_pair(count)).collect());
        if count == 1 {
            one = time;
        }
        println!("{count:<30}{time:>14.1}{:>14.2}", one / time);
    }
}

/// Returns the time of a pair in nanoseconds. As in a program, one thread creates the allocator and many use it, which
/// preserves the memory layout.
fn nanoseconds_per_pair(threads: usize) -> f64 {
    let allocator = allocator(threads);
    let streams: Vec<_> = (0..threads).map(|_| new_stream(&allocator)).collect();
    for stream in &streams {
        drop(buffer(&allocator, stream, 0));
    }
    let ready = Barrier::new(threads);
    let times: Vec<f64> = thread::scope(|scope| {
        let work = |stream| {
            let mut live: Vec<_> = (0..1000).map(|at| buffer(&allocator, stream, at)).collect();
            let mut replace = |pairs: u32| {
                let mut random = 1_u32;
                for _ in 0..pairs {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let at = (random >> 8) as usize % live.len();
                    drop(live[at].take());
                    live[at] = buffer(&allocator, stream, random >> 4);
                }
            };
            replace(THREAD_PAIRS / 8);
            ready.wait();
            nanoseconds(|| replace(THREAD_PAIRS)) / f64::from(THREAD_PAIRS)
        };
        let threads: Vec<_> = streams.iter().map(|stream| scope.spawn(move || work(stream))).collect();
        threads.into_iter().map(|thread| thread.join().expect("the thread should not panic")).collect()
    });
    times.iter().sum::<f64>() / threads as f64
}

/// Prints the host cost of ten million live blocks, and checks that a trim then returns all device memory.
fn live_blocks_table() {
    let count = 10_000_000;
    let allocator = ours(Segments::Expandable, StreamPolicy::Separate);
    let stream = allocator.register_stream().expect("the program should register few streams");
    let allocate =
        |size_bytes| allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("memory is unlimited").handle;
    // Initialized to touch the pages, so that they do not count as new resident memory.
    let first = allocate(512);
    let mut handles: Vec<Handle> = vec![first; count];
    allocator.free(first).expect("the allocation should be live");
    let before = resident_bytes();
    let allocating = nanoseconds(|| {
        for (number, handle) in handles.iter_mut().enumerate() {
            *handle = allocate(512 * (1 + number as u64 % 8));
        }
    });
    let host_bytes = (resident_bytes() - before) / count as f64;
    let freeing = nanoseconds(|| {
        handles.iter().for_each(|handle| allocator.free(*handle).expect("the allocation should be live"));
    });
    allocator.trim_all().expect("the device releases the memory");
    assert_eq!(allocator.stats().reserved_bytes.current, 0, "all memory is returned");
    let [allocating, freeing] = [allocating, freeing].map(|time| time / count as f64);
    println!("\n{:<30}{:>14}{:>14}{:>14}", "live blocks", "ns to allocate", "ns to free", "host bytes");
    println!("{count:<30}{allocating:>14.1}{freeing:>14.1}{host_bytes:>14.1}");
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> f64 {
    let pages = fs::read_to_string("/proc/self/statm").expect("this test should run on Linux");
    let pages: f64 = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("it should be a number");
    pages * 4096.0
}

/// Allocates a buffer of 512 B to 512 KiB.
fn buffer(allocator: &CudaAllocator, stream: &Arc<CudaStream>, random: u32) -> Option<DeviceBuffer<u8>> {
    let len = (1 + random as usize % 1024) * 512;
    // SAFETY: nothing reads the bytes, and every bit pattern is a valid `u8`.
    Some(unsafe { allocator.alloc(stream, len) }.expect("memory should suffice"))
}

/// Runs the measured work. Callgrind counts the instructions between entry and exit of this function.
#[inline(never)]
fn measured_part(work: &mut dyn FnMut()) {
    work();
}

/// Runs the measured part of a case once, in steady state.
fn count_this(case: &str) {
    if let Some(case) = case.strip_prefix(WALK) {
        let mut walk = Walk::warm(case);
        measured_part(&mut || walk.repeat());
    } else {
        let mut bench = Buffers::warm(case);
        measured_part(&mut || bench.repeat());
    }
}

/// Returns the instructions of the measured part of a case, without those of the stub. Returns `None` without valgrind
/// and in a build with debug assertions, to which the limit does not apply.
fn count_under_callgrind(case: &str) -> Option<f64> {
    if cfg!(debug_assertions) {
        return None;
    }
    let out = env::temp_dir().join(format!("symmalloc-buffers-{}-{}", std::process::id(), case.replace(' ', "_")));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*measured_part*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(env::current_exe().ok()?)
        .env(CASE, case)
        .output()
        .ok()?;
    let profile = fs::read_to_string(&out).ok()?;
    if env::var_os("SYMMALLOC_KEEP_PROFILE").is_none() {
        fs::remove_file(&out).ok()?;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(own_cost(&profile))
}

/// Returns the cost of all objects except the stub. A profile names an object once, `ob=(3) path`, and refers to it by
/// number afterward. A line of numbers is a cost. After `calls=` it is the cost of the callee, which is also listed
/// there.
fn own_cost(profile: &str) -> f64 {
    let (mut stub, mut is_stub, mut is_callee, mut sum) = (None, false, false, 0_u64);
    for line in profile.lines() {
        let object = line.strip_prefix("ob=").or_else(|| line.strip_prefix("cob="));
        if let Some((number, path)) = object.and_then(|object| object.split_once(')')) {
            if path.ends_with("libcuda.so") {
                stub = Some(number.to_owned());
            }
            if line.starts_with("ob=") {
                is_stub = stub.as_deref() == Some(number);
            }
        } else if line.starts_with("calls=") {
            is_callee = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost = line.rsplit(' ').next().and_then(|cost| cost.parse::<u64>().ok());
            if !is_callee && !is_stub {
                sum += cost.unwrap_or(0);
            }
            is_callee = false;
        }
    }
    sum as f64
}
