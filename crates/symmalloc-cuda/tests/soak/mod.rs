//! A soak test: runs mixed workloads for a configurable time, and checks that resource usage stays level.
//!
//! Each round creates pools with different settings, uses them from several streams and threads, and destroys them: buffers with checked
//! contents, steps that learn plans, stitching, sleep and wake, captured graphs, an export, and a stream that its owner destroys. The
//! process is sampled at regular intervals. The level is the maximum over the second sixth of the run (of a long run, the second minute).
//! Later samples may exceed it only by the slack. A leak in each round soon exceeds the slack.

use cudarc::driver::{CudaContext, CudaStream};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::op::Contents;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, GraphPool, LentStream, Pool};

/// Environment variable with the duration of the soak in seconds.
const SECONDS_VARIABLE: &str = "SYMMALLOC_SOAK_SECONDS";
const SECONDS_DEFAULT: u64 = 3;
/// Number of samples per run.
const SAMPLES: u32 = 60;
/// Start-up ends after this time, or after a sixth of a short run.
const WARM_UP: Duration = Duration::from_secs(60);
/// Resident memory varies with the C library's arenas, and more so with more threads.
const SLACK_BYTES: u64 = 8 << 20;
/// Number of reads of the thread count per sample, of which the minimum counts.
const THREAD_READS: u32 = 10;
/// The event pool grows slightly when threads interleave in a new way.
const SLACK_OBJECTS: u64 = 32;

/// Settings of the pools that a round creates, in `SYMMALLOC_CONF`'s syntax.
const POOLS: [&str; 6] = [
    "segments:expandable",
    "segments:fixed",
    "segments:reserved,segment_mb:32",
    "segments:expandable,streams:shared",
    "segments:expandable,stitching_granule_mb:2",
    "segments:expandable,plan:learn",
];

/// Resources of the process that must not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    resident_bytes: u64,
    descriptors: u64,
    threads: u64,
    /// Objects that the driver holds for the process, if it can be queried.
    driver_objects: u64,
}

impl Sample {
    fn take(driver_objects: u64) -> Self {
        let status = || std::fs::read_to_string("/proc/self/status").expect("Linux");
        let field = |status: &str, name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field of every process");
            line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).expect("a number")
        };
        // The system may still count a joined thread for a moment.
        let threads = |_| {
            std::thread::sleep(Duration::from_millis(1));
            field(&status(), "Threads:")
        };
        Sample {
            resident_bytes: field(&status(), "VmRSS:") << 10,
            descriptors: std::fs::read_dir("/proc/self/fd").expect("Linux").count() as u64,
            threads: (0..THREAD_READS).map(threads).min().expect("at least one read"),
            driver_objects,
        }
    }

    fn max(self, other: Self) -> Self {
        Sample {
            resident_bytes: self.resident_bytes.max(other.resident_bytes),
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
            driver_objects: self.driver_objects.max(other.driver_objects),
        }
    }

    /// Returns `true` if no resource exceeds the level.
    fn is_within(self, level: Self) -> bool {
        self.resident_bytes <= level.resident_bytes + SLACK_BYTES
            && self.descriptors <= level.descriptors
            && self.threads <= level.threads
            && self.driver_objects <= level.driver_objects + SLACK_OBJECTS
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sample { resident_bytes, descriptors, threads, driver_objects } = self;
        let kib = resident_bytes >> 10;
        write!(f, "{kib} KiB resident, {descriptors} descriptors, {threads} threads, {driver_objects} driver objects")
    }
}

/// Runs the soak. `driver_objects` returns the number of objects that the driver holds, or 0 if it cannot be queried.
pub(crate) fn run(device: &Arc<CudaDevice>, driver_objects: impl Fn() -> u64) {
    let seconds = std::env::var(SECONDS_VARIABLE).map_or(SECONDS_DEFAULT, |text| text.parse().expect("seconds"));
    let whole = Duration::from_secs(seconds);
    let (begun, warm_up) = (Instant::now(), WARM_UP.min(whole / 6));
    let mut soak = Soak::new(device);
    let (mut level, mut rounds): (Option<Sample>, u64) = (None, 0);
    for number in 1..=SAMPLES {
        while begun.elapsed() < whole * number / SAMPLES {
            soak.round();
            rounds += 1;
        }
        // In a short run, an interval may be shorter than a round: each interval has at least one round.
        soak.round();
        soak.settle();
        let (elapsed, sample) = (begun.elapsed(), Sample::take(driver_objects()));
        println!("{:6.1} s, {rounds} rounds: {sample}", elapsed.as_secs_f64());
        match level {
            _ if elapsed < warm_up => {}
            Some(level) if elapsed > 2 * warm_up => {
                assert!(
                    sample.is_within(level),
                    "after {rounds} rounds:\n  {sample}\n  above the level of the start:\n  {level}"
                );
            }
            known => level = Some(known.map_or(sample, |known| known.max(sample))),
        }
    }
    assert!(level.is_some(), "no sample was taken after the start");
    println!("{rounds} rounds in {:.0} s", begun.elapsed().as_secs_f64());
}

/// Objects that live for the whole run.
struct Soak {
    allocator: CudaAllocator,
    streams: Vec<Arc<CudaStream>>,
    random: SplitMix,
    /// The id of the lent streams, once there is one.
    lent: Option<symmalloc_core::StreamId>,
    rounds: u64,
}

impl Soak {
    fn new(device: &Arc<CudaDevice>) -> Self {
        let allocator = CudaAllocator::new(device, Config::default()).expect("an allocator");
        let streams = (0..3).map(|_| device.context().new_stream().expect("a stream")).collect();
        Soak { allocator, streams, random: SplitMix(1), lent: None, rounds: 0 }
    }

    fn round(&mut self) {
        let policy: PoolConfig = POOLS[self.rounds as usize % POOLS.len()].parse().expect("valid settings");
        let pool = self.allocator.create_pool(policy.clone()).expect("a pool");
        self.steps(&pool, policy.plan() == symmalloc_core::config::PlanPolicy::Learn);
        self.sleep(&pool);
        match self.rounds % 4 {
            0 => self.capture(),
            1 => self.export(&pool),
            2 => self.threads(&pool),
            _ => self.lend_stream(&pool),
        }
        drop(pool);
        if self.rounds % 8 == 7 {
            self.allocator.trim_all().expect("trimmed");
        }
        self.rounds += 1;
    }

    /// Waits for all work and trims, so that only objects that live for the whole run remain.
    fn settle(&mut self) {
        self.streams.iter().for_each(|stream| self.allocator.synchronize(stream).expect("synchronized"));
        self.allocator.trim_all().expect("trimmed");
        assert_eq!(self.allocator.stats().usage.all.allocated_bytes.current, 0, "everything is freed between rounds");
    }

    /// Runs steps that randomly replace buffers. Every buffer is read before it is freed, sometimes on another stream.
    fn steps(&mut self, pool: &Pool<CudaBackend>, are_alike: bool) {
        let inside = self.allocator.with_pool(pool);
        let seed = self.random.next();
        for step in 0..4 {
            let open = are_alike.then(|| inside.step(0).expect("a step"));
            let mut random = SplitMix(if are_alike { seed } else { seed + step });
            let mut live: Vec<Filled> = Vec::new();
            for _ in 0..24 {
                if live.len() > 6 || (random.below(3) == 0 && !live.is_empty()) {
                    let filled = live.swap_remove(random.below(live.len() as u64) as usize);
                    filled.check(&self.streams[random.below(3) as usize]);
                } else {
                    let stream = &self.streams[random.below(3) as usize];
                    live.push(Filled::new(&inside, stream, random.size(), random.next() as u8));
                }
            }
            drop(live);
            if let Some(open) = open {
                open.end().expect("the step was open");
            }
        }
    }

    fn sleep(&mut self, pool: &Pool<CudaBackend>) {
        let inside = self.allocator.with_pool(pool);
        let kept: Vec<Filled> =
            (0..3_u8).map(|salt| Filled::new(&inside, &self.streams[0], self.random.size(), salt)).collect();
        self.allocator.sleep(pool.id(), Contents::Keep).expect("asleep");
        self.allocator.wake(pool.id()).expect("awake");
        kept.iter().for_each(|filled| filled.check(&self.streams[1]));
    }

    fn capture(&mut self) {
        let pool =
            GraphPool::new(&self.allocator, "segments:reserved,segment_mb:16".parse().expect("valid")).expect("a pool");
        let capture = pool.begin(&self.streams[0]).expect("a capture");
        let output = self.allocator.alloc_zeroed::<u8>(&self.streams[0], 1 << 20).expect("memory of the graph");
        drop(self.allocator.alloc_zeroed::<u8>(&self.streams[0], 2 << 20).expect("memory of the graph"));
        let graph = capture.end().expect("a graph");
        graph.launch(&self.streams[1]).expect("launched");
        assert_eq!(self.streams[1].clone_dtoh(&output.slice(..8)).expect("copied"), [0; 8]);
    }

    fn export(&mut self, pool: &Pool<CudaBackend>) {
        let inside = self.allocator.with_pool(pool);
        let filled = Filled::new(&inside, &self.streams[0], 3 << 20, 7);
        let export = inside.export().expect("exportable");
        assert_eq!(export.allocation_count(), 1);
        filled.check(&self.streams[0]);
        export.withdraw();
    }

    /// Runs three threads with one stream each on the same pool.
    fn threads(&mut self, pool: &Pool<CudaBackend>) {
        let inside = self.allocator.with_pool(pool);
        std::thread::scope(|scope| {
            for stream in &self.streams {
                let (inside, mut random) = (&inside, SplitMix(self.random.next()));
                scope.spawn(move || {
                    for salt in 0..8 {
                        Filled::new(inside, stream, random.size(), salt).check(stream);
                    }
                });
            }
        });
    }

    /// Lends a stream that its owner destroys while the allocator is alive.
    fn lend_stream(&mut self, pool: &Pool<CudaBackend>) {
        let context: &Arc<CudaContext> = self.allocator.device().context();
        let stream = context.new_stream().expect("a stream");
        let lent = LentStream::of(stream.cu_stream());
        // SAFETY: the stream belongs to the device's context, and is returned below before it is dropped.
        let id = unsafe {
            match self.lent {
                None => self.allocator.lend_stream(lent).expect("lent"),
                Some(id) => self.allocator.relend_stream(id, lent).map(|()| id).expect("lent again"),
            }
        };
        self.lent = Some(id);
        let core = self.allocator.core();
        let allocation = core.allocate(pool.id(), id, self.random.size() as u64).expect("memory");
        core.free(allocation.handle).expect("live");
        self.allocator.return_stream(id).expect("returned");
    }
}

/// A buffer with known contents.
struct Filled {
    buffer: DeviceBuffer<u8>,
    salt: u8,
}

impl Filled {
    /// Number of bytes that are checked at each end.
    const EDGE: usize = 256;

    fn new(allocator: &CudaAllocator, stream: &Arc<CudaStream>, len: usize, salt: u8) -> Self {
        let mut buffer = allocator.alloc_zeroed::<u8>(stream, len).expect("memory");
        let edge = vec![salt; Self::EDGE];
        stream.memcpy_htod(&edge, &mut buffer.slice_mut(..Self::EDGE)).expect("copied");
        stream.memcpy_htod(&edge, &mut buffer.slice_mut(len - Self::EDGE..)).expect("copied");
        Filled { buffer, salt }
    }

    fn check(&self, stream: &Arc<CudaStream>) {
        let len = self.buffer.len();
        for part in [self.buffer.slice(..Self::EDGE), self.buffer.slice(len - Self::EDGE..)] {
            assert_eq!(stream.clone_dtoh(&part).expect("copied"), vec![self.salt; Self::EDGE]);
        }
    }
}

/// SplitMix64, by Steele, Lea and Flood: the same sequence in every run.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Returns a size from 512 bytes to 4 MiB; small sizes are more frequent.
    fn size(&mut self) -> usize {
        512 << self.below(14)
    }
}
