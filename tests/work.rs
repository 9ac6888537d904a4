//! The work of ops, as the core counts it: which ops cost more the more memory a pool has, and where a replay ends because of that.

use symmalloc_core::ids::{Placement, PoolId, SegmentId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_core::restore::RevivedPlace;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Backend, Handle, work};
use symmalloc_harness::hostile::{self, HostileTrace};
use symmalloc_harness::jobs;
use symmalloc_import::{ReadOptions, read_bytes};
use symmalloc_sim::{IdleBackend, SimBackend};
use symmalloc_trace::replay::{Program, Replay, StepError};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);

/// Returns an allocator with a stream, on a device without kernels.
fn allocator(config: &str) -> Allocator<SimBackend> {
    let device = SimBackend::builder().memory_bytes(u64::MAX).without_kernels().build();
    let allocator =
        Allocator::new(device, config.parse().expect("the configuration should be valid")).expect("a valid allocator");
    allocator.register_stream().expect("the first stream");
    allocator
}

/// Returns the units of work that a call does.
fn work_of<T>(call: impl FnOnce() -> T) -> u64 {
    let before = work::so_far();
    let _done = call();
    work::so_far() - before
}

fn allocate(allocator: &Allocator<SimBackend>, size_bytes: u64) -> Handle {
    allocator.allocate(POOL, S0, size_bytes).expect("there is no limit").handle
}

/// Regression test: every trim visited every block of every heap.
#[test]
fn a_trim_does_not_visit_live_blocks() {
    let allocator = allocator("segments:expandable");
    let blocks: Vec<Handle> = (0..20_000).map(|_| allocate(&allocator, 512)).collect();
    for block in blocks.iter().step_by(2) {
        allocator.free(*block).expect("the allocation should be live");
    }
    allocator.trim_all().expect("the device does not fail");
    let units = work_of(|| allocator.trim_all());
    assert!(units < 100, "{units} units");
}

/// Regression test: a revival walked from the start of its segment.
#[test]
fn revivals_in_any_order_find_their_blocks_with_little_work() {
    const BLOCKS: u64 = 20_000;
    let allocator = allocator("segments:expandable");
    let blocks: Vec<Handle> = (0..2 * BLOCKS).map(|_| allocate(&allocator, 512)).collect();
    for block in blocks.iter().step_by(2) {
        allocator.free(*block).expect("the allocation should be live");
    }
    let units = work_of(|| {
        for number in 0..BLOCKS {
            // 7919 is prime, so this visits each gap once.
            let gap = number * 7919 % BLOCKS;
            let placement = Placement { segment: SegmentId(0), offset_bytes: gap * 1024 };
            let place = RevivedPlace { placement, block_bytes: 512 };
            let revived = allocator.replay().revive(POOL, S0, 512, place, None).expect("the gap is free");
            assert_eq!(revived.placement, placement);
            if number % 3 == 0 {
                allocator.free(revived.handle).expect("the allocation should be live");
            }
        }
    });
    assert!(units < 20 * BLOCKS, "{units} units");
}

/// A search that starts at a remembered block must find the same block as one from the start, whatever happened in between.
#[test]
fn revivals_after_splits_and_merges_are_placed_as_on_a_fresh_allocator() {
    let (one, other) = (allocator("segments:expandable"), allocator("segments:expandable"));
    let mut random = symmalloc_sim::SplitMix64::new(7);
    let (mut live, mut others): (Vec<Handle>, Vec<Handle>) = Default::default();
    for _ in 0..5000 {
        if live.len() > 64 || !live.is_empty() && random.below(3) == 0 {
            let at = random.below(live.len() as u64) as usize;
            one.free(live.swap_remove(at)).expect("the allocation should be live");
            other.free(others.swap_remove(at)).expect("the allocation should be live");
        } else if random.below(2) == 0 {
            let size_bytes = 512 * (1 + random.below(8));
            live.push(allocate(&one, size_bytes));
            others.push(allocate(&other, size_bytes));
        } else {
            let offset_bytes = 512 * random.below(512);
            let placement = Placement { segment: SegmentId(0), offset_bytes };
            let block_bytes = 512 * (1 + random.below(4));
            let place = RevivedPlace { placement, block_bytes };
            let revived = one.replay().revive(POOL, S0, 1, place, None);
            // The other allocator answers from its snapshot, without an index.
            let is_free = other.snapshot().segments.iter().flat_map(|segment| &segment.blocks).any(|block| {
                matches!(block.state, symmalloc_core::report::BlockStateSnapshot::Free { .. })
                    && block.offset_bytes <= offset_bytes
                    && offset_bytes + block_bytes <= block.offset_bytes + block.size_bytes
            });
            assert_eq!(revived.is_ok(), is_free, "{placement:?}");
            if let Ok(revived) = revived {
                live.push(revived.handle);
                others.push(other.replay().revive(POOL, S0, 1, place, None).expect("free there too").handle);
            }
        }
    }
    assert_eq!(one.digest(POOL), other.digest(POOL));
}

/// Regression test: each growth into a new range sorted all segments.
#[test]
fn growth_does_not_visit_all_segments() {
    let allocator = allocator("segments:expandable,range_mb:2,growth_mb:2");
    for _ in 0..5000 {
        allocate(&allocator, 2 * MIB);
    }
    let units = work_of(|| allocate(&allocator, 2 * MIB));
    assert!(units < 100, "{units} units");
}

/// Regression test: each request that could be stitched listed and sorted all free granules, of which a free block has up to half a million.
#[test]
fn a_stitched_request_does_not_visit_the_granules_of_free_blocks() {
    let allocator = allocator("segments:expandable,range_mb:1048576,stitching_granule_mb:2,stitching_least_mb:4");
    let (large, stays) = (allocate(&allocator, 256 << 30), allocate(&allocator, 2 * MIB));
    let blocks: Vec<Handle> = (0..64).map(|_| allocate(&allocator, 2 * MIB)).collect();
    blocks
        .iter()
        .step_by(2)
        .chain([&large])
        .for_each(|block| allocator.free(*block).expect("the allocation should be live"));
    for _ in 0..4 {
        // The free blocks cannot serve it, so the heap looks for granules and grows.
        let units = work_of(|| allocate(&allocator, 300 << 30));
        assert!(units < 2000, "{units} units");
    }
    allocator.free(stays).expect("the allocation should be live");
}

/// Regression test: the device's clocks had an entry for each stream.
#[test]
fn a_device_without_kernels_orders_streams_in_constant_time() {
    let device = SimBackend::builder().without_kernels().build();
    for stream in (0..2000).map(StreamId) {
        let event = device.record(stream).expect("no fault should be injected");
        device.wait(StreamId(stream.0 + 1), event).expect("no fault should be injected");
    }
    let units = work_of(|| {
        let event = device.record(StreamId(2000)).expect("no fault should be injected");
        device.wait(StreamId(0), event).expect("no fault should be injected");
        device.synchronize(StreamId(0)).expect("no fault should be injected");
    });
    assert!(units < 10, "{units} units");
}

#[test]
#[should_panic(expected = "without kernels")]
fn a_device_without_kernels_runs_none() {
    let device = SimBackend::builder().without_kernels().build();
    let range = device.reserve(2 * MIB).expect("there is space");
    device.map(range, 0, 2 * MIB).expect("memory should suffice");
    let _panics = device.submit(S0, range.base, 512);
}

/// Replays a trace to its end, or until it has done too much work. Returns the number of its ops and its work.
fn replayed(trace: &HostileTrace) -> (u64, u64) {
    let recording = read_bytes(trace.text.as_bytes(), &ReadOptions::default());
    let recording = recording.unwrap_or_else(|error| panic!("{}: {error}", trace.name));
    let program = Program::new(&recording.records).expect("the reader checked it");
    let config = recording.config.unwrap_or_default();
    let allocator: Allocator<_> = Allocator::new(IdleBackend::default(), config).expect("a valid allocator");
    let mut replay = Replay::new(&allocator, &program);
    let units = work_of(|| {
        for (number, op) in program.ops().iter().enumerate() {
            match replay.step(op) {
                Err(StepError::TooMuchWork(_)) => break,
                Ok(_) | Err(StepError::Allocate(_) | StepError::NotLive { .. } | StepError::Pool(_)) => {}
                Err(error) => panic!("{}: op {number}: {error}", trace.name),
            }
        }
    });
    (program.ops().len() as u64, units)
}

/// Lines whose work grows with the state, because their effect concerns all memory, heaps, streams or observers that exist. The allowance
/// of a replay bounds them. All other lines do little work, whatever preceded them.
const GROWING: [(&str, &[&str]); 15] = [
    (ANY, &["sleep keep wake", "sleep drop wake", "observe", "observe forget"]),
    ("holes", &["a huge"]),
    ("segments", TRIMS),
    ("gaps of segments", TRIMS),
    ("ranges", TRIMS),
    ("heaps", TRIMS),
    ("pools", TRIMS),
    ("heaps", &["begin_step end_step", "stay", "a f revived"]),
    ("stitched", &["a granules", "a huge", "a f trim"]),
    ("gaps of stitched granules", &["a huge", "a f stitched sizes", "a stitched sizes f"]),
    // The state itself consists of expensive lines.
    ("stitched ranges in use", &[ANY]),
    ("streams of a shared heap", &[ANY]),
    ("users of one block", &["a f on every stream"]),
    ("observers", &["a granules", "a sizes", "a stitched sizes f", "reserve", "a f trim", "acknowledge"]),
    ("observers", &["pool a", "pool a f pending reset", "pool destroy"]),
];
const TRIMS: &[&str] = &["trim", "trim p0", "a f trim", "reclaim refuse"];
const ANY: &str = "any";

#[test]
fn only_known_lines_cost_more_after_more_lines() {
    const WORK_PER_OP_MAX: u64 = 150;
    let mut unknown = Vec::new();
    for trace in hostile::traces(48 << 10) {
        let (ops, units) = replayed(&trace);
        let (state, line) = trace.name.split_once(", ").expect("a state and a line");
        let has = |names: &[&str], name: &str| names.contains(&name) || names.contains(&ANY);
        let is_known = GROWING.iter().any(|(known, lines)| has(&[known], state) && has(lines, line));
        if units > WORK_PER_OP_MAX * ops && !is_known {
            unknown.push(format!("{}: {} units per op", trace.name, units / ops));
        }
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

#[test]
fn a_program_that_takes_too_much_work_ends_with_an_error() {
    let trace = hostile::trace("live blocks", "sleep drop wake", 2 << 20);
    let (_, units) = replayed(&trace);
    let program_ops = trace.text.lines().count() as u64;
    assert!(units > work::WORK_AT_ONCE, "it ends too early");
    assert!(
        units < work::WORK_AT_ONCE + work::WORK_PER_OP * program_ops + 1_000_000,
        "it ends too late: {units} units"
    );
}

/// Returns the work that ops of a program do beyond [`work::WORK_PER_OP`] each, at most at any time.
fn debt_max(program: &Program, config: &str) -> u64 {
    let allocator: Allocator<_> =
        Allocator::new(IdleBackend::default(), config.parse().expect("the configuration should be valid"))
            .expect("the arguments should be valid");
    let mut replay = Replay::new(&allocator, program).with_allowance(work::Allowance::of(u64::MAX));
    let (mut debt, mut most) = (0_u64, 0);
    for op in program.ops() {
        // The recorded settings of pools replace those that are tried.
        if !matches!(op, Op::CreatePool { pool: PoolId::DEFAULT, .. }) {
            debt = (debt + work_of(|| replay.step(op))).saturating_sub(work::WORK_PER_OP);
            most = debt.max(most);
        }
    }
    most
}

/// The bound is for hostile recordings: recorded jobs must stay far below it, under all settings that commands try.
#[test]
fn recorded_jobs_take_a_small_part_of_their_allowance() {
    for job in jobs::JOBS.into_iter().chain(["gnn_sampled"]) {
        let program = jobs::program(job);
        for config in
            ["segments:expandable", "segments:fixed", "streams:shared", "stitching:true", "stitching_granule_mb:2"]
        {
            let debt = debt_max(&program, config);
            assert!(debt < work::WORK_AT_ONCE / 8, "{job}, {config}: {debt} units");
        }
    }
}

/// Regression test: a recording of another allocator contains requests of any size. Those above the size of a segment had no room in a
/// digest.
#[test]
fn sizes_beyond_a_segment_can_be_replayed() {
    let digest_of = |line: &str| {
        let text = format!("symmalloc-trace 1\nstream s0\na 0 512 s0\n{line}\nend 3\n");
        let recording = read_bytes(text.as_bytes(), &ReadOptions::default()).expect("a valid trace");
        let program = Program::new(&recording.records).expect("a valid program");
        let allocator = allocator("segments:expandable");
        let mut replay = Replay::new(&allocator, &program);
        for op in program.ops() {
            let _refused = replay.step(op);
        }
        allocator.digest(POOL).expect("the pool should exist")
    };
    let lines = ["a 1 SIZE s0", "reserve SIZE s0", "reclaim SIZE s0"].map(str::to_owned).into_iter();
    let refusals = ["limit", "segment", "driver"].map(|cause| format!("refuse SIZE s0 {cause}"));
    let unchanged = digest_of("sync");
    for line in lines.chain(refusals) {
        let is_refusal = line.starts_with("refuse");
        for size_bytes in [1 << 40, (1 << 40) + 1, 1 << 42, 1 << 58, u64::MAX] {
            let digest = digest_of(&line.replace("SIZE", &size_bytes.to_string()));
            if size_bytes > 1 << 40 {
                assert_eq!(digest, unchanged, "{line}, {size_bytes}: it is rejected before it is an op");
            } else if is_refusal {
                assert_ne!(digest, unchanged, "{line}, {size_bytes}");
            }
        }
    }
}
