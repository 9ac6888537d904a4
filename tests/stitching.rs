//! Stitching: large blocks made of free pieces. Covers the oracle's decisions, and what the oracle does not model: waits, calls, names,
//! errors.

use std::collections::BTreeSet;
use std::path::Path;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::{Config, ConfigError, PoolConfig, Stitching};
use symmalloc_core::config_text::ConfigTextError;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::lock::Shared;
use symmalloc_core::report::{BlockStateSnapshot, SegmentSnapshot};
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, Op, PoolId, SegmentId, StreamId};
use symmalloc_harness::checker::{compare_with_oracle, decisions};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_import::{ReadOptions, read_path};
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay};

const POOL: PoolId = PoolId::DEFAULT;

fn config(more: &str) -> Config {
    let text = format!("stitching:true,stitching_granule_mb:2,stitching_least_mb:4{more}");
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

struct Job<B: Backend> {
    allocator: Allocator<B>,
    streams: Vec<StreamId>,
}

impl<B: Backend> Job<B> {
    fn new(backend: B, more: &str) -> Self {
        let allocator: Allocator<B> = Allocator::new(backend, config(more)).expect("the arguments should be valid");
        let streams = (0..3).map(|_| allocator.register_stream().expect("a stream id is available")).collect();
        Job { allocator, streams }
    }

    fn allocate(&self, stream: usize, mib: u64) -> Allocation {
        self.allocator.allocate(POOL, self.streams[stream], mib * MIB).expect("memory should suffice")
    }

    fn free(&self, allocation: Allocation) {
        self.allocator.free(allocation.handle).expect("the allocation should be live");
        self.allocator.check().expect("the invariants should hold");
    }

    /// Allocates adjacent blocks of 4 MiB and frees every second one.
    fn pieces(&self, stream: usize, free: usize) -> Vec<Allocation> {
        let blocks: Vec<Allocation> = (0..2 * free).map(|_| self.allocate(stream, 4)).collect();
        let (free, kept): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 1);
        free.into_iter().for_each(|(_, block)| self.free(block));
        kept.into_iter().map(|(_, block)| block).collect()
    }

    fn reserved_mib(&self) -> u64 {
        self.allocator.stats().reserved_bytes.current / MIB
    }

    fn stitched(&self) -> Vec<SegmentSnapshot> {
        let segments = self.allocator.snapshot().segments.into_iter();
        segments.filter(|segment| segment.mapped_bytes == 0).collect()
    }
}

fn device() -> SimBackend {
    SimBackend::builder().build()
}

#[test]
fn a_stitched_block_takes_no_memory_and_a_repeated_one_no_map_call() {
    let device = device();
    let job = Job::new(&device, "");
    let _kept = job.pieces(0, 4);
    let maps = || device.calls().of(Call::Map);
    let before = maps();
    let mut whole = job.allocate(0, 12);
    assert_eq!((whole.placement.segment.0, whole.placement.offset_bytes), (1, 0));
    assert_eq!((job.reserved_mib(), device.mapped_bytes() / MIB, maps() - before), (32, 32, 6));
    for round in 0..20 {
        job.free(whole);
        if round % 2 == 1 {
            // This block consists of the same pieces and one more. The second range is created once.
            let larger = job.allocate(0, 14);
            assert_eq!(larger.placement.segment.0, 2, "round {round}");
            job.free(larger);
        }
        whole = job.allocate(0, 11);
        assert_eq!(whole.placement.segment.0, 1, "round {round}: the oldest range fits");
        device.submit(job.streams[0], whole.address, 11 * MIB).expect("no race should be found");
    }
    assert_eq!((job.reserved_mib(), maps() - before), (32, 6 + 7), "nothing was mapped twice");
}

/// A program frees everything that a step allocated, so each step begins with the same free memory. A step that does not
/// grow adds the ranges that it needs, and the next one finds the same ranges at the same requests.
#[test]
fn a_repeated_step_maps_nothing_after_one_that_does_not_grow() {
    let mut again = 0;
    for seed in 0..60 {
        let device = device();
        let job = Job::new(&device, if seed % 2 == 0 { "" } else { ",streams:shared" });
        let mut random = SplitMix64::new(seed);
        let _kept: Vec<Allocation> = (0..8).map(|at| job.allocate(at % 3, 1 + random.below(6))).collect();
        let draw = |_| (random.below(8), random.below(3) as usize, 1 + random.below(24));
        let step: Vec<(u64, usize, u64)> = (0..60).map(draw).collect();
        let mut last: Option<(bool, Vec<_>)> = None;
        for round in 0..8 {
            let (reserved, maps) = (job.reserved_mib(), device.calls().of(Call::Map));
            let (mut live, mut placements) = (Vec::new(), Vec::new());
            for (choice, stream, mib) in &step {
                if *choice < 5 || live.is_empty() {
                    live.push(job.allocate(*stream, *mib));
                    placements.push(live[live.len() - 1].placement);
                } else {
                    job.free(live.swap_remove(*mib as usize % live.len()));
                }
            }
            live.into_iter().for_each(|allocation| job.free(allocation));
            if let Some((false, placed)) = &last {
                assert_eq!(&placements, placed, "seed {seed}, round {round}");
                assert_eq!(device.calls().of(Call::Map), maps, "seed {seed}, round {round}");
                again += placements.iter().filter(|placement| placement.segment.0 > 0).count();
            }
            last = Some((job.reserved_mib() > reserved, placements));
        }
    }
    assert!(again > 500, "{again} stitched blocks in repeated steps");
}

#[test]
fn the_oldest_range_with_free_pieces_is_reused() {
    let device = device();
    let job = Job::new(&device, "");
    let blocks: Vec<Allocation> = [4; 8].into_iter().chain([2; 12]).map(|mib| job.allocate(0, mib)).collect();
    let _end = job.allocate(0, 2);
    [0, 2, 4, 6].into_iter().for_each(|at| job.free(blocks[at]));
    let ranges = [job.allocate(0, 8), job.allocate(0, 8)];
    (8..20).step_by(2).for_each(|at| job.free(blocks[at]));
    ranges.into_iter().for_each(|range| job.free(range));
    // The smallest pieces are used first, and all others return home.
    let other = job.allocate(0, 12);
    let maps = device.calls().of(Call::Map);
    let again = job.allocate(0, 7);
    assert_eq!((other.placement.segment.0, again.placement), (3, ranges[0].placement));
    assert_eq!(device.calls().of(Call::Map), maps);
}

#[test]
fn memory_grows_by_what_is_missing_and_no_more() {
    let job = Job::new(device(), "");
    let _kept = job.pieces(0, 3);
    assert_eq!(job.reserved_mib(), 24);
    // 12 MiB are free, 4 of them at the end.
    let _whole = job.allocate(0, 17);
    assert_eq!(job.reserved_mib(), 24 + 6);
    let segments = job.stitched();
    assert_eq!(segments.len(), 1);
    let sizes: Vec<(u64, bool)> = segments[0]
        .blocks
        .iter()
        .map(|block| (block.size_bytes / MIB, matches!(block.state, BlockStateSnapshot::Allocated { .. })))
        .collect();
    assert_eq!(sizes, [(17, true), (1, false)], "the rest of the last granule is free");
    // It can be allocated like any other free memory.
    let small = job.allocate(0, 1);
    assert_eq!((small.placement.segment.0, job.reserved_mib()), (1, 30));
}

#[test]
fn requests_that_growth_serves_as_well_are_not_stitched() {
    let device = device();
    let job = Job::new(&device, "");
    let first = job.allocate(0, 8);
    job.free(first);
    let second = job.allocate(0, 20);
    assert_eq!((second.placement.segment.0, job.stitched().len(), job.reserved_mib()), (0, 0, 20));
    let _kept = job.pieces(0, 2);
    // Fewer bytes than `stitching_least`, and more granules than `stitching_maps`.
    let little = job.allocator.allocate(POOL, job.streams[0], 4 * MIB - 512).expect("memory should suffice");
    assert_eq!(little.placement.segment.0, 0);
    let bounded = Job::new(&device, ",stitching_maps:3");
    let _kept = bounded.pieces(0, 4);
    let large = bounded.allocate(0, 8);
    assert_eq!((large.placement.segment.0, bounded.reserved_mib()), (0, 36));
}

#[test]
fn a_stitched_block_waits_for_the_users_of_all_its_pieces() {
    for streams in ["separate", "shared"] {
        let device = device();
        let job = Job::new(&device, &format!(",streams:{streams}"));
        let blocks: Vec<Allocation> = (0..6).map(|_| job.allocate(0, 4)).collect();
        for (at, block) in blocks.iter().enumerate() {
            device.submit(job.streams[0], block.address, 4 * MIB).expect("first use");
            let user = job.streams[1 + at % 2];
            let event = device.record(job.streams[0]).expect("no fault should be injected");
            device.wait(user, event).expect("no fault should be injected");
            device.recycle(event);
            job.allocator.record_use(block.handle, user).expect("the allocation should be live");
            device.submit(user, block.address, 4 * MIB).expect("it waited");
        }
        [1, 3, 4].into_iter().for_each(|at| job.free(blocks[at]));
        let taker = usize::from(streams == "shared") * 2;
        let whole = job.allocate(taker, 12);
        assert_eq!(whole.placement.segment.0, 1, "{streams}");
        device.submit(job.streams[taker], whole.address, 12 * MIB).expect("the stream waits for all users");
        // The reverse: the next user of a piece at home waits for the user of the whole block.
        job.free(whole);
        let larger = job.allocate(0, 40);
        let pieces = [job.allocate(0, 4), job.allocate(0, 7)];
        for piece in pieces {
            device.submit(job.streams[0], piece.address, piece.size_bytes).expect("it waits");
        }
        assert_eq!(larger.placement.segment.0, 2);
    }
}

#[test]
fn a_trim_unmaps_unused_ranges_and_releases_all_memory() {
    let device = device();
    let job = Job::new(&device, "");
    let kept = job.pieces(0, 3);
    let whole = job.allocate(0, 10);
    device.submit(job.streams[0], whole.address, 10 * MIB).expect("no race should be found");
    job.free(whole);
    // A small block holds one granule of the range, and of the memory.
    let small = job.allocator.allocate(POOL, job.streams[0], 10 * MIB - 512).expect("memory should suffice");
    let rest = job.allocator.allocate(POOL, job.streams[0], 512).expect("memory should suffice");
    assert_eq!((small.placement.segment.0, rest.placement.segment.0), (1, 1));
    job.free(small);
    assert_eq!(job.allocator.trim_all().expect("no fault should be injected") / MIB, 10);
    assert_eq!((job.reserved_mib(), device.mapped_bytes() / MIB, job.stitched().len()), (14, 14, 1));
    job.free(rest);
    kept.into_iter().for_each(|block| job.free(block));
    assert_eq!(job.allocator.trim_all().expect("no fault should be injected") / MIB, 14);
    assert_eq!((job.reserved_mib(), device.leaks().is_empty()), (0, true));
}

#[test]
fn the_host_waits_only_in_a_trim_and_with_too_many_ranges() {
    let device = device();
    let job = Job::new(&device, ",stitching_maps:8,stitching_aliases:24");
    let _kept = job.pieces(0, 6);
    let waits = || device.calls().of(Call::Synchronize);
    let mut made = BTreeSet::new();
    let mut waited = 0;
    for round in 0..12 {
        let before = waits();
        // The blocks that stay in between make each range different.
        let spacer = job.allocate(0, 1 + round % 4);
        let whole = job.allocate(0, 6 + 2 * (round % 6));
        device.submit(job.streams[0], whole.address, whole.size_bytes).expect("no race should be found");
        made.insert(whole.placement.segment);
        job.free(whole);
        job.free(spacer);
        waited += u64::from(waits() > before);
        let aliases: u64 = job.stitched().iter().map(|segment| segment.size_bytes / (2 * MIB)).sum();
        assert!(aliases <= 24, "round {round}: {aliases}");
    }
    assert!(made.len() > 4 && waited > 0 && waited < 6, "{made:?}, {waited}");
}

#[test]
fn a_refused_map_changes_only_the_digest() {
    let run = |fail: Option<u64>| {
        let device = device();
        let job = Job::new(&device, "");
        let _kept = job.pieces(0, 3);
        let maps = device.calls().of(Call::Map);
        if let Some(nth) = fail {
            device.inject(Some(Call::Map), FaultRule::At { ordinal: maps + nth }, Fault::Refused);
        }
        let made = job.allocator.allocate(POOL, job.streams[0], 10 * MIB);
        job.allocator.check().expect("the invariants should hold");
        let digest = job.allocator.digest(POOL).expect("the pool should exist");
        assert_eq!((job.reserved_mib(), device.mapped_bytes() / MIB), (24, 24));
        let made = made.or_else(|error| {
            assert!(matches!(error, AllocateError::Fence { .. }), "{error}");
            assert_eq!(job.stitched().len(), 0);
            job.allocator.allocate(POOL, job.streams[0], 10 * MIB)
        });
        (made.expect("the second attempt").placement, digest)
    };
    let (placement, digest) = run(None);
    for nth in 0..5 {
        let (again, other) = run(Some(nth));
        assert_eq!(again, placement);
        assert_ne!(other, digest);
    }
}

#[test]
fn a_backend_that_cannot_alias_serves_requests_without_stitching() {
    let plain = |backend| {
        let job = Job::new(backend, "");
        let _kept = job.pieces(0, 3);
        let whole = job.allocate(0, 10);
        let config = job.allocator.pool_config(POOL).expect("the pool should exist").clone();
        (
            whole.placement.segment.0,
            config.stitching().cloned(),
            job.allocator.digest(POOL).expect("the pool should exist"),
        )
    };
    let (segment, stitching, digest) = plain(SimBackend::builder().can_alias(false).build());
    assert_eq!((segment, stitching), (0, None));
    let (segment, stitching, other) = plain(device());
    assert_eq!((segment, stitching.is_some()), (1, true));
    assert_ne!(digest, other, "the digest covers the backend's capabilities");
}

#[test]
fn symmetric_and_fixed_pools_cannot_stitch() {
    let stitching = Some(Stitching::default());
    let symmetric = PoolConfig::builder().symmetric(true).stitching(stitching.clone()).build();
    assert_eq!(symmetric, Err(ConfigError::NotStitched { symmetric: true }));
    for builder in [PoolConfig::builder().fixed(), PoolConfig::builder().reserved(MIB)] {
        let refused = builder.stitching(stitching.clone()).build();
        assert_eq!(refused, Err(ConfigError::NotStitched { symmetric: false }));
    }
    let refused = |text: &str| text.parse::<PoolConfig>().expect_err(text);
    assert!(matches!(refused("stitching:true,symmetric:true"), ConfigTextError::OutOfRange { offset: 0, .. }));
    assert!(matches!(refused("segments:fixed,stitching:true"), ConfigTextError::WrongSegments { offset: 15, .. }));
    let asked = |text: &str| text.parse::<PoolConfig>().expect("the text should be valid").stitching().cloned();
    assert_eq!(asked("stitching_least_mb:8").map(|stitching| stitching.least_bytes), Some(8 * MIB));
    assert_eq!((asked("stitching:false,stitching_least_mb:8"), asked("")), (None, None));
    assert!(matches!(refused("stitching:true,stitching_maps:0"), ConfigTextError::OutOfRange { offset: 15, .. }));
    let text = "segments:expandable,range_mb:524288,growth_mb:2,streams:separate,symmetric:false,reclaim:heap,stitching:true,\
                stitching_granule_mb:20,stitching_least_mb:160,stitching_maps:16384,stitching_aliases:65536";
    assert_eq!(
        "stitching:true,stitching_granule_mb:20".parse::<PoolConfig>().expect("the text should be valid").to_string(),
        text
    );
    assert_eq!(text.parse::<PoolConfig>().expect("canonical").to_string(), text);
}

#[test]
fn a_pool_with_stitched_ranges_has_no_layout_until_it_is_trimmed() {
    let job = Job::new(device(), "");
    let _kept = job.pieces(0, 3);
    let saved = job.allocator.save_layout(POOL).expect("nothing is stitched yet");
    let whole = job.allocate(0, 10);
    assert_eq!(job.allocator.save_layout(POOL).expect_err("stitched"), LayoutError::Stitched { pool: POOL });
    job.free(whole);
    assert_eq!(job.allocator.save_layout(POOL).expect_err("kept"), LayoutError::Stitched { pool: POOL });
    let refused = job.allocator.revive_layout(POOL, &saved).expect_err("kept");
    assert_eq!(refused, RestoreError::State(LayoutError::Stitched { pool: POOL }));
    job.allocator.trim_all().expect("no fault should be injected");
    job.allocator.save_layout(POOL).expect("forgotten");
}

#[test]
fn nothing_is_stitched_while_the_pool_is_observed() {
    let device = device();
    let job = Job::new(&device, "");
    let _kept = job.pieces(0, 3);
    let (observer, _) = job.allocator.observe(POOL).expect("the pool should exist");
    let whole = job.allocate(0, 10);
    assert_eq!(whole.placement.segment.0, 0);
    job.free(whole);
    job.allocator.forget(observer).expect("no fault should be injected");
    let whole = job.allocate(0, 20);
    assert_eq!(whole.placement.segment.0, 1);
    // The stitched range exists before the next observer, which is notified only of memory at home.
    let (observer, births) = job.allocator.observe(POOL).expect("the pool should exist");
    assert_eq!(births.iter().map(|event| event.size_bytes / MIB).collect::<Vec<_>>(), [job.reserved_mib(), 0]);
    job.free(whole);
    job.allocator.trim_all().expect("no fault should be injected");
    job.allocator.check().expect("the invariants should hold");
    job.allocator.forget(observer).expect("no fault should be injected");
    job.allocator.trim_all().expect("no fault should be injected");
    assert_eq!((job.reserved_mib(), job.stitched().len()), (12, 0));
}

#[test]
fn an_observed_pool_uses_its_ranges_again() {
    let device = device();
    let job = Job::new(&device, "");
    let _kept = job.pieces(0, 4);
    let whole = job.allocate(0, 12);
    job.free(whole);
    let (observer, _) = job.allocator.observe(POOL).expect("the pool should exist");
    let (reserved, maps) = (job.reserved_mib(), device.calls().of(Call::Map));
    for _ in 0..3 {
        let again = job.allocate(0, 12);
        assert_eq!((again.placement, job.reserved_mib()), (whole.placement, reserved));
        job.free(again);
    }
    assert_eq!(device.calls().of(Call::Map), maps);
    job.allocator.forget(observer).expect("no fault should be injected");
}

/// A use by another stream records an event at the free. The next user of a piece waits for that event, and not
/// for what the stream does later.
#[test]
fn the_events_of_a_stitched_block_go_home_with_its_pieces() {
    let device = device();
    let job = Job::new(&device, ",streams:shared");
    let _kept = job.pieces(0, 4);
    let whole = job.allocate(0, 12);
    job.allocator.record_use(whole.handle, job.streams[1]).expect("the allocation should be live");
    let records = device.calls().of(Call::Record);
    job.free(whole);
    assert_eq!(device.calls().of(Call::Record), records + 1);
    let pieces: Vec<Allocation> = (0..4).map(|_| job.allocate(0, 4)).collect();
    assert_eq!(device.calls().of(Call::Record), records + 1, "no further event is recorded");
    pieces.into_iter().for_each(|piece| job.free(piece));
    job.allocator.trim_all().expect("no fault should be injected");
}

/// Programs with large blocks in a pool that stitches: decisions match the oracle's, on ranks with different addresses, timing and locks.
#[test]
fn generated_programs_are_stitched_alike_everywhere() {
    let (mut stitched, mut again, mut forgotten) = (0, 0, 0);
    for seed in 0..200 {
        let mut bytes: Vec<u8> = (0..).map(|at| SplitMix64::new(seed << 20 | at).next_u64() as u8).take(1200).collect();
        // Granules of 512 bytes to 4 MiB, no limit over all pools, expandable segments, stitching, not symmetric.
        (bytes[2], bytes[3], bytes[6]) = (0, bytes[3] | 0x80, 0);
        bytes[7] &= 0b0011_0001;
        let scenario = Scenario::from_bytes(&bytes);
        assert!(scenario.config.default_pool().stitching().is_some());
        let device = scenario.device(seed);
        let expected = compare_with_oracle(&scenario, &device);
        let other = scenario.device(seed + 1000);
        assert_eq!(decisions::<Shared>(&scenario, &other, |_, _, _, _| {}), expected, "seed {seed}");
        let mut seen: BTreeSet<(StreamGroup, u32)> = BTreeSet::new();
        let calls = std::cell::Cell::new(0);
        let count = |call| calls.set(calls.get() + u64::from(matches!(call, DeviceCall::Alias { .. })));
        let hooked = Hooked { inner: scenario.device(seed), hook: count };
        let allocator: Allocator<_> =
            Allocator::new(&hooked, scenario.config.clone()).expect("the arguments should be valid");
        let mut run = symmalloc_harness::run::Run::new(&allocator, &scenario);
        for index in 0..scenario.program.ops().len() {
            let before = calls.get();
            let placed = run.step(index).ok().flatten();
            let snapshot = allocator.snapshot();
            let live: BTreeSet<_> = snapshot
                .segments
                .iter()
                .filter(|segment| segment.heap.pool == POOL && segment.mapped_bytes == 0)
                .map(|segment| (segment.heap.group, segment.segment.0))
                .collect();
            forgotten += seen.difference(&live).count();
            stitched += live.difference(&seen).count();
            let is_stitched =
                |placement: symmalloc_core::Placement| seen.iter().any(|(_, id)| *id == placement.segment.0);
            again += usize::from(before == calls.get() && placed.is_some_and(|made| is_stitched(made.placement)));
            seen = live;
        }
    }
    assert!(stitched > 300 && again > 300 && forgotten > 100, "{stitched} {again} {forgotten}");
}

/// Regression test: the default limit of 1,024 granules (2 GiB) per request made this job's tensors of up to 3.4 GiB grow the range
/// instead, and the job held more than without stitching (a live-to-reserved ratio of 0.630 instead of 0.691).
#[test]
fn a_recorded_job_with_tensors_of_gigabytes_reserves_what_is_live() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/gnn_sampled.trace.zst");
    let recording = read_path(&path, &ReadOptions::default()).expect("the trace should be readable");
    let program = Program::new(&recording.records).expect("the records should be consistent");
    for (settings, least, most) in [
        ("streams:shared", 0.65, 0.75),
        ("stitching_granule_mb:2,stitching_aliases:1000000", 0.99, 1.0),
        ("stitching:true", 0.98, 1.0),
    ] {
        let config: Config = settings.parse().expect("the text should be valid");
        let allocator: Allocator<_> = Allocator::new(SimBackend::builder().memory_bytes(1 << 50).build(), config)
            .expect("the arguments should be valid");
        // Ignore the recorded settings of the default pool.
        let ops = || program.ops().iter().filter(|op| !matches!(op, Op::CreatePool { pool: PoolId::DEFAULT, .. }));
        let mut maps = Vec::new();
        for _pass in 0..4 {
            let before = allocator.backend().calls().of(Call::Map);
            let mut replay = Replay::new(&allocator, &program);
            for op in ops() {
                replay.step(op).expect("memory should suffice");
            }
            replay.free_all().expect("it should be live");
            maps.push(allocator.backend().calls().of(Call::Map) - before);
        }
        assert_eq!(maps[2..], [0, 0], "{settings}: {maps:?}");
        let stats = allocator.stats();
        let efficiency = stats.usage.all.requested_bytes.peak as f64 / stats.reserved_bytes.peak as f64;
        assert!((least..=most).contains(&efficiency), "{settings}: {efficiency:.3}");
    }
}

/// Observers that come and go between stitched blocks. A trim removes no segment whose memory a stitched range still names, because an
/// observer may have windows on it. The simulated device reports memory that is unmapped too early.
#[test]
fn a_trim_of_an_observed_pool_keeps_the_segments_that_stitched_ranges_name() {
    let mut kept = 0;
    for seed in 0..300 {
        let mut random = SplitMix64::new(seed);
        let device = device();
        {
            let job = Job::new(&device, ",range_mb:16");
            let (mut live, mut observer) = (Vec::new(), None);
            for _ in 0..40 {
                match random.below(10) {
                    0..5 => live.push(job.allocate(0, 2 * (1 + random.below(6)))),
                    5..8 if !live.is_empty() => job.free(live.swap_remove(random.below(live.len() as u64) as usize)),
                    8 => {
                        observer = match observer {
                            None => Some(job.allocator.observe(POOL).expect("the pool should exist").0),
                            Some(observer) => {
                                job.allocator.forget(observer).expect("no fault should be injected");
                                None
                            }
                        }
                    }
                    _ => {
                        let backed = || -> BTreeSet<SegmentId> {
                            let segments = job.allocator.snapshot().segments.into_iter();
                            segments.filter(|segment| segment.mapped_bytes > 0).map(|segment| segment.segment).collect()
                        };
                        let before = backed();
                        job.allocator.trim_all().expect("no fault should be injected");
                        // Ranges without allocations end first.
                        if observer.is_some() && !job.stitched().is_empty() {
                            assert_eq!(backed(), before, "seed {seed}: observed segments");
                            kept += before.len();
                        }
                    }
                }
                job.allocator.check().unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
            }
            live.into_iter().for_each(|block| job.free(block));
            if let Some(observer) = observer {
                job.allocator.forget(observer).expect("no fault should be injected");
            }
            job.allocator.trim_all().expect("no fault should be injected");
            assert_eq!((job.reserved_mib(), device.mapped_bytes()), (0, 0), "seed {seed}");
        }
        assert!(device.leaks().is_empty(), "seed {seed}: {}", device.leaks());
    }
    assert!(kept > 20, "{kept} segments");
}
