//! Pools with a quota: on simulated devices with arbitrary programs, and on the stub with failing driver calls.

use crate::process::{device, live, stub_test};
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_core::op::Contents;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, PoolId, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError, CudaMemory, DeviceBuffer, ResizeError, resize};
use symmalloc_harness::memory::Memory;
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay};

const RANGE: u64 = 96 * MIB;

fn quota() -> PoolConfig {
    "segments:expandable,growth_mb:0,streams:shared,range_mb:96".parse().expect("valid")
}

/// One rank of a program with a pool that has a quota.
struct Rank<'a> {
    device: &'a SimBackend,
    allocator: Allocator<&'a SimBackend>,
    pool: PoolId,
    streams: [StreamId; 2],
    live: Vec<Allocation>,
    held: u64,
}

/// The outcome of an op, without addresses.
#[derive(Debug, PartialEq)]
enum Came {
    Placed(symmalloc_core::Placement),
    Full,
    Freed,
    Resized(Result<u64, ResizeError>),
}

impl<'a> Rank<'a> {
    fn new(device: &'a SimBackend, symmetric: bool) -> Self {
        let allocator: Allocator<_> = Allocator::new(device, Config::default()).expect("valid");
        let streams = [(); 2].map(|()| allocator.register_stream().expect("stream ids are left"));
        let config = quota().to_builder().symmetric(symmetric).build().expect("valid");
        let pool = allocator.create_pool(config).expect("valid");
        Rank { device, allocator, pool, streams, live: Vec::new(), held: 0 }
    }

    fn step(&mut self, random: &mut SplitMix64) -> Came {
        let (kind, what, size) = (random.below(10), random.next_u64(), random.below(9 * MIB) + 1);
        let stream = self.streams[(what % 2) as usize];
        let digest = self.allocator.digest(self.pool).expect("known");
        match kind {
            0..5 => match self.allocator.allocate(self.pool, stream, size) {
                Ok(made) => {
                    self.live.push(made);
                    Came::Placed(made.placement)
                }
                Err(AllocateError::OutOfMemory(error)) => {
                    assert!(matches!(error.cause, OutOfMemoryCause::SegmentFull { .. }), "{error}");
                    Came::Full
                }
                Err(error) => panic!("{error}"),
            },
            5..8 if !self.live.is_empty() => {
                let freed = self.live.swap_remove((what % self.live.len() as u64) as usize);
                self.allocator.free(freed.handle).expect("live");
                Came::Freed
            }
            8 => {
                self.allocator.trim_all().expect("no faults");
                Came::Freed
            }
            _ => {
                let asked = what % (RANGE + 4 * MIB);
                let outcome = resize(&self.allocator, self.pool, stream, asked);
                match &outcome {
                    Ok(held) => {
                        assert_eq!(*held, asked.next_multiple_of(2 * MIB));
                        self.held = *held;
                    }
                    Err(ResizeError::InUse { needed_bytes, .. }) => {
                        assert!(*needed_bytes <= self.held && *needed_bytes > asked, "{outcome:?}");
                        assert_eq!(
                            self.allocator.digest(self.pool).expect("known"),
                            digest,
                            "a failed resize changes nothing"
                        );
                    }
                    Err(ResizeError::OutOfRange { .. }) => assert!(asked > RANGE),
                    Err(error) => panic!("{error}"),
                }
                Came::Resized(outcome)
            }
        }
    }

    /// Checks that the pool holds its quota regardless of what was allocated, freed and trimmed, and that addresses are stable.
    fn check(&self) {
        self.allocator.check().expect("consistent");
        let stats = self.allocator.pool_stats(self.pool).expect("known");
        assert_eq!((stats.reserved_bytes.current, self.device.leaks().mapped_bytes), (self.held, self.held));
        for made in &self.live {
            let at = self.allocator.allocation(made.handle).expect("live");
            assert_eq!((at.address, at.placement), (made.address, made.placement));
        }
        let snapshot = self.allocator.snapshot();
        let spans: Vec<u64> =
            snapshot.segments.iter().filter(|segment| segment.heap.pool == self.pool).map(|it| it.size_bytes).collect();
        assert!(spans.iter().all(|bytes| *bytes <= RANGE) && spans.len() <= 1, "one range: {spans:?}");
    }
}

/// Addresses, timing and memory differ between the devices, but the ranks have equal placements, and the recording replays.
#[test]
fn a_pool_holds_its_quota_and_ranks_place_alike() {
    let (mut resized, mut refused, mut full) = (0, 0, 0);
    for seed in 0..150 {
        let devices: Vec<_> = (0..3).map(|rank| SimBackend::builder().seed(seed).rank(rank).build()).collect();
        let mut ranks: Vec<_> = devices.iter().map(|device| Rank::new(device, seed % 2 == 0)).collect();
        let memory = Memory::new();
        ranks[0].allocator.start_recording(memory.clone()).expect("the allocator is unused");
        for step in 0..80 {
            let random = || SplitMix64::new(seed << 16 | step);
            let came: Vec<_> = ranks.iter_mut().map(|rank| rank.step(&mut random())).collect();
            assert!(came.iter().all(|other| *other == came[0]), "seed {seed}, step {step}: {came:?}");
            ranks.iter().for_each(Rank::check);
            let digest = |rank: &Rank<'_>| rank.allocator.digest(rank.pool).expect("known");
            assert!(ranks.iter().all(|rank| digest(rank) == digest(&ranks[0])), "seed {seed}, step {step}");
            resized += u64::from(matches!(came[0], Came::Resized(Ok(_))));
            refused += u64::from(matches!(came[0], Came::Resized(Err(_))));
            full += u64::from(came[0] == Came::Full);
        }
        ranks[0].allocator.stop_recording().expect("the recording is complete");
        let records = memory.records();
        let again = SimBackend::builder().seed(!seed).build();
        let again: Allocator<_> = Allocator::new(&again, Config::default()).expect("valid");
        let program = Program::new(&records).expect("consistent");
        Replay::new(&again, &program).run(|_, _| {}).expect("the replay succeeds");
        assert_eq!(again.digest(ranks[0].pool), ranks[0].allocator.digest(ranks[0].pool), "seed {seed}");
    }
    assert!(resized > 600 && refused > 60 && full > 900, "{resized} {refused} {full}");
}

/// When another process takes the memory, a request fails, and live allocations are unaffected.
#[test]
fn a_refused_resize_keeps_live_memory_and_can_be_repeated() {
    for seed in 0..60 {
        let device = SimBackend::builder().seed(seed).build();
        let mut rank = Rank::new(&device, false);
        resize(&rank.allocator, rank.pool, rank.streams[0], 60 * MIB).expect("memory");
        rank.held = 60 * MIB;
        let mut random = SplitMix64::new(seed);
        for _ in 0..40 {
            if let Came::Resized(Ok(_)) = rank.step(&mut random) {}
        }
        let (call, fault) = match seed % 3 {
            0 => (Call::Map, Fault::OutOfMemory),
            1 => (Call::Unmap, Fault::Refused),
            _ => (Call::Map, Fault::Refused),
        };
        device.inject(Some(call), FaultRule::Every { calls: seed / 3 % 3 + 1 }, fault);
        let needed = rank.live.iter().map(|made| made.size_bytes).sum::<u64>();
        for target in [RANGE, needed.max(20 * MIB), RANGE / 2] {
            let outcome = resize(&rank.allocator, rank.pool, rank.streams[1], target);
            let held = rank.allocator.pool_stats(rank.pool).expect("known").reserved_bytes.current;
            match &outcome {
                Ok(bytes) => assert_eq!(*bytes, held),
                Err(ResizeError::Reserve { reserved_bytes, quota_bytes, .. }) => {
                    assert!(*reserved_bytes == held && held < *quota_bytes, "{outcome:?}");
                }
                Err(ResizeError::Trim(_) | ResizeError::InUse { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            rank.held = held;
            rank.check();
        }
        device.heal();
        let held = resize(&rank.allocator, rank.pool, rank.streams[0], RANGE).expect("memory");
        rank.held = held;
        rank.check();
        assert_eq!(held, RANGE);
    }
}

#[test]
fn a_quota_excludes_settings_that_resize_the_pool() {
    for text in
        ["", ",streams:shared,stitching:true", ",streams:shared,plan:learn", ",streams:shared,release_threshold_mb:2"]
    {
        let error = format!("segments:expandable,growth_mb:0{text}").parse::<PoolConfig>().expect_err("refused");
        assert!(error.to_string().contains("streams:shared"), "{error}");
    }
    let config = quota();
    assert_eq!(config.to_string().parse::<PoolConfig>().as_ref(), Ok(&config), "{config}");
}

#[test]
fn an_observer_keeps_the_memory_of_its_pool() {
    let device = SimBackend::builder().build();
    let mut rank = Rank::new(&device, true);
    rank.held = resize(&rank.allocator, rank.pool, rank.streams[0], 8 * MIB).expect("memory");
    let (observer, _) = rank.allocator.observe(rank.pool).expect("known");
    let refused = resize(&rank.allocator, rank.pool, rank.streams[0], 4 * MIB);
    assert_eq!(refused, Err(ResizeError::Observed { pool: rank.pool, observers: 1 }));
    rank.check();
    rank.held = resize(&rank.allocator, rank.pool, rank.streams[0], 10 * MIB).expect("an observed pool can grow");
    rank.check();
    rank.allocator.forget(observer).expect("no faults");
    rank.held = resize(&rank.allocator, rank.pool, rank.streams[0], 4 * MIB).expect("no observer holds the memory");
    rank.check();
}

/// Two caches in one allocator: memory that one releases is available to the other, also while one is asleep.
#[test]
fn caches_of_two_models_pass_memory_to_each_other_under_one_limit() {
    let device = SimBackend::builder().memory_bytes(64 * MIB).build();
    let config: Config = "total_limit_mb:64".parse().expect("valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("valid");
    let stream = allocator.register_stream().expect("stream ids are left");
    let [one, other] = [(); 2].map(|()| allocator.create_pool(quota()).expect("valid"));
    for turn in 0..10 {
        let (grows, shrinks) = if turn % 2 == 0 { (one, other) } else { (other, one) };
        resize(&allocator, shrinks, stream, 16 * MIB).expect("nothing is live");
        resize(&allocator, grows, stream, 48 * MIB).expect("under the limit");
        let blocks: Vec<_> =
            (0..24).map(|_| allocator.allocate(grows, stream, 2 * MIB).expect("within the quota")).collect();
        let refused = resize(&allocator, shrinks, stream, 18 * MIB);
        assert!(
            matches!(&refused, Err(ResizeError::Reserve { reserved_bytes, .. }) if *reserved_bytes == 16 * MIB),
            "{refused:?}"
        );
        allocator.sleep(shrinks, Contents::Drop).expect("the pool can sleep");
        assert!(matches!(resize(&allocator, shrinks, stream, MIB), Err(ResizeError::Sleeps(_))));
        assert_eq!(device.leaks().mapped_bytes, 48 * MIB);
        allocator.wake(shrinks).expect("memory");
        blocks.into_iter().for_each(|made| allocator.free(made.handle).expect("live"));
        assert_eq!(device.leaks().mapped_bytes, 64 * MIB);
    }
}

const KEPT: usize = 5 << 20;

/// A pool of 40 MiB with three buffers, of which the middle one was freed.
struct Cache {
    allocator: CudaAllocator,
    pool: symmalloc_cuda::Pool<CudaBackend>,
    stream: Arc<cudarc::driver::CudaStream>,
    kept: Vec<DeviceBuffer<u8>>,
}

impl Cache {
    fn new() -> Self {
        let backend = CudaBackend::builder(&device()).chunk_bytes(2 << 20).build().expect("the stub supports it");
        let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
        let pool = allocator.create_pool(quota()).expect("made");
        let stream = allocator.device().context().new_stream().expect("a stream");
        assert_eq!(allocator.resize(pool.id(), &stream, 40 << 20).expect("memory"), 40 << 20);
        let inside = allocator.with_pool(&pool);
        let mut kept: Vec<_> =
            (0..3).map(|_| inside.alloc_zeroed::<u8>(&stream, KEPT).expect("within the quota")).collect();
        for (buffer, byte) in kept.iter_mut().zip(1..) {
            stream.memcpy_htod(&vec![byte; KEPT], buffer).expect("copied");
        }
        drop(kept.remove(1));
        Cache { allocator, pool, stream, kept }
    }

    fn resize(&self, bytes: u64) -> Result<u64, CudaError> {
        self.allocator.resize(self.pool.id(), &self.stream, bytes)
    }

    #[track_caller]
    fn is_whole(&self) {
        for (buffer, byte) in self.kept.iter().zip([1, 3]) {
            assert!(self.stream.clone_dtoh(buffer).expect("copied").iter().all(|is| *is == byte));
        }
        let held = self.allocator.core().pool_stats(self.pool.id()).expect("known").reserved_bytes.current;
        assert_eq!(live().device_bytes - self.allocator.core().backend().idle_bytes(), held);
        self.allocator.core().check().expect("consistent");
    }

    fn end(self) {
        let Cache { allocator, pool, stream, kept } = self;
        drop((kept, pool));
        allocator.trim_all().expect("trimmed");
        drop((allocator, stream));
        let left = live();
        assert_eq!((left.device_bytes, left.ranges, left.mappings), (0, 0, 0));
    }
}

stub_test!(a_smaller_quota_releases_memory_to_the_device, {
    let cache = Cache::new();
    for (asked, held) in [(16, 16), (40, 40), (14, 14), (96, 96), (13, 14)] {
        assert_eq!(cache.resize(asked << 20).expect("memory"), held << 20);
        assert_eq!(live().device_bytes, held << 20);
        cache.is_whole();
    }
    assert!(
        matches!(cache.resize(10 << 20), Err(CudaError::Resize(error)) if matches!(*error, ResizeError::InUse { .. }))
    );
    assert_eq!(live().device_bytes, 14 << 20, "unchanged");
    cache.allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 14 << 20, "only a resize releases a quota");
    cache.end();
});

/// Fills the lowest holes first, even if a higher hole has room for all of the missing memory.
#[test]
fn a_growing_quota_fills_the_lowest_hole_first() {
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, Config::default()).expect("valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let pool = allocator.create_pool(quota()).expect("valid");
    resize(&allocator, pool, stream, 14 * MIB).expect("there is memory");
    let blocks = [2, 2, 2, 6, 2].map(|mib| allocator.allocate(pool, stream, mib * MIB).expect("its quota"));
    for at in [1, 3] {
        allocator.free(blocks[at].handle).expect("live");
    }
    assert_eq!(resize(&allocator, pool, stream, 6 * MIB), Ok(6 * MIB));
    assert_eq!(resize(&allocator, pool, stream, 10 * MIB), Ok(10 * MIB));
    let again = [(); 2].map(|()| allocator.allocate(pool, stream, 2 * MIB).expect("its quota").placement);
    assert_eq!(again.map(|place| place.offset_bytes), [2 * MIB, 6 * MIB]);
}
