//! Layouts: a rank that restarts goes on as the others do, and a pool goes back to what it was.

use std::collections::BTreeSet;
use symmalloc_core::config::{Config, PoolConfig, SegmentPolicy, StreamPolicy};
use symmalloc_core::layout::{Layout, LayoutError};
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::replay::{Program, Replay};
use symmalloc_core::restore::RestoreError;
use symmalloc_core::segment_log::SegmentEventKind;
use symmalloc_core::sim::{Call, Delays, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, AllocationId, Allocator, Digest, LimitScope, Op, Placement, PoolId, SegmentId, StreamId};
use symmalloc_harness::checker::{DeviceWork, PrintOnPanic, outcome};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::jobs;
use symmalloc_harness::oracle::Outcome;
use symmalloc_harness::restart::Checkpoint;

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// What later ops come to: every decision, and what is reserved after it.
type Future = Vec<(Outcome, u64)>;

fn digests<L: Lock>(allocator: &Allocator<&SimBackend, L>) -> Vec<Option<Digest>> {
    (0..allocator.pool_count()).map(|pool| allocator.digest(PoolId(pool)).ok()).collect()
}

/// Carries the ops from `first` on out.
fn go_on<L: Lock>(
    allocator: &Allocator<&SimBackend, L>,
    program: &Program,
    replay: &mut Replay<'_, &SimBackend, L>,
    work: &mut DeviceWork<'_>,
    first: usize,
) -> Future {
    let mut future = Vec::new();
    for op in &program.ops()[first..] {
        let result = replay.step(op);
        work.submit(op, &result);
        future.push((outcome(result), allocator.stats().reserved_bytes.current));
    }
    allocator.check().expect("sound");
    future
}

/// A rank restarts after `checkpoint` and goes on.
fn restarted<L: Lock>(scenario: &Scenario, checkpoint: &Checkpoint, seed: u64) -> (Future, Vec<Option<Digest>>) {
    let device = scenario.device_builder(seed).rank(9).delays(Delays::UntilSynchronized).build();
    let (future, digests) = {
        let allocator = Allocator::<_, L>::new(&device, scenario.config.clone()).expect("valid");
        let mut work = DeviceWork::new(&device);
        let adopt = |id, stream, allocation| work.adopt(id, stream, allocation);
        let mut replay = checkpoint.resume(&allocator, &scenario.program, adopt);
        allocator.check().expect("sound");
        let again = Checkpoint::take(checkpoint.op, &allocator, &scenario.program, &replay);
        assert_eq!(&again, checkpoint, "what was restored is what was saved");
        let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, checkpoint.op);
        (future, digests(&allocator))
    };
    assert!(device.leaks().is_empty(), "left behind: {}", device.leaks());
    (future, digests)
}

#[test]
fn a_restarted_rank_has_the_same_future() {
    let (mut live, mut holes, mut heaps) = (0, 0, 0);
    for seed in 0..400 {
        let scenario = Scenario::from_seed(seed, 140);
        let _report = PrintOnPanic(&scenario);
        let at = SplitMix64::new(seed).below(scenario.program.ops().len() as u64) as usize;
        let device = scenario.device(seed);
        let allocator: Allocator<_> = Allocator::new(&device, scenario.config.clone()).expect("valid");
        let mut replay = Replay::new(&allocator, &scenario.program);
        let mut work = DeviceWork::new(&device);
        for op in &scenario.program.ops()[..at] {
            let result = replay.step(op);
            work.submit(op, &result);
        }
        let checkpoint = Checkpoint::take(at, &allocator, &scenario.program, &replay);
        for (pool, _) in &checkpoint.layouts {
            let layout = checkpoint.layout(*pool);
            let segments = layout.heaps().iter().flat_map(|heap| &heap.segments);
            holes += segments.filter(|segment| segment.extents.len() > 1).count();
            (live, heaps) = (live + layout.allocation_count(), heaps + layout.heaps().len());
        }
        let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, at);
        let expected = (future, digests(&allocator));
        assert_eq!(restarted::<Exclusive>(&scenario, &checkpoint, seed), expected, "seed {seed}, op {at}");
        assert_eq!(restarted::<Shared>(&scenario, &checkpoint, seed + 1), expected, "seed {seed}, op {at}, with locks");
    }
    assert!(live > 2000 && holes > 50 && heaps > 500, "{live} allocations, {holes} holes, {heaps} heaps");
}

/// The scenario in the default pool alone: what is done with other pools is done there.
fn in_one_pool(scenario: &Scenario) -> Scenario {
    let ops = scenario.program.ops().iter().filter_map(|op| match op.clone() {
        Op::CreatePool { .. } | Op::DestroyPool { .. } => None,
        Op::Allocate { id, stream, size_bytes, .. } => Some(Op::Allocate { id, pool: POOL, stream, size_bytes }),
        Op::Reserve { stream, size_bytes, .. } => Some(Op::Reserve { pool: POOL, stream, size_bytes }),
        Op::Trim { .. } => Some(Op::Trim { pool: Some(POOL) }),
        other => Some(other),
    });
    Scenario::new(scenario.config.clone(), scenario.granularity_bytes, ops)
}

/// The state that a refused restore must leave alone.
fn state<L: Lock>(allocator: &Allocator<&SimBackend, L>) -> impl PartialEq + std::fmt::Debug + use<L> {
    allocator.check().expect("sound");
    (allocator.snapshot(), allocator.stats(), digests(allocator))
}

/// Allocates, uses and frees at random, and frees what it made. Some of `live` is freed as well.
fn stray(
    allocator: &Allocator<&SimBackend>,
    work: &mut DeviceWork<'_>,
    live: &mut Vec<(AllocationId, symmalloc_core::Handle)>,
    random: &mut SplitMix64,
) {
    let streams = u64::from(allocator.stream_count());
    let mut made = Vec::new();
    for step in 0..random.below(60) {
        let stream = StreamId(random.below(streams) as u16);
        match random.below(4) {
            0 | 1 => {
                let id = AllocationId(1_000_000 + step);
                let size_bytes = [512, 100_000, MIB, 3 * MIB, 17 * MIB][random.below(5) as usize];
                let op = Op::Allocate { id, pool: POOL, stream, size_bytes };
                if let Ok(allocation) = allocator.allocate(POOL, stream, size_bytes) {
                    work.submit(&op, &Ok(Some(allocation)));
                    made.push((id, allocation.handle));
                }
            }
            2 => {
                let from = if random.below(2) == 0 || made.is_empty() { &mut *live } else { &mut made };
                if let Some(at) = random.below(from.len() as u64 + 1).checked_sub(1) {
                    let (id, handle) = from.swap_remove(at as usize);
                    allocator.free(handle).expect("no faults");
                    work.submit(&Op::Free { id }, &Ok(None));
                }
            }
            _ => {
                if let Some((id, handle)) = made.last().or(live.last()) {
                    allocator.record_use(*handle, stream).expect("live");
                    work.submit(&Op::RecordUse { id: *id, stream }, &Ok(None));
                }
            }
        }
    }
    for (id, handle) in made {
        allocator.free(handle).expect("no faults");
        work.submit(&Op::Free { id }, &Ok(None));
    }
}

#[test]
fn a_pool_goes_back_to_what_it_was_and_has_the_same_future_again() {
    let (mut rewound, mut gone, mut carved, mut kept) = (0, 0, 0, 0);
    for seed in 0..400 {
        let scenario = in_one_pool(&Scenario::from_seed(seed, 140));
        let _report = PrintOnPanic(&scenario);
        let program = &scenario.program;
        let mut random = SplitMix64::new(seed);
        let at = program.ops().len() / 3 + random.below(program.ops().len() as u64 / 3) as usize;
        let device = scenario.device(seed);
        {
            let allocator: Allocator<_> = Allocator::new(&device, scenario.config.clone()).expect("valid");
            let mut replay = Replay::new(&allocator, program);
            let mut work = DeviceWork::new(&device);
            for op in &program.ops()[..at] {
                let result = replay.step(op);
                work.submit(op, &result);
            }
            let checkpoint = Checkpoint::take(at, &allocator, program, &replay);
            let (expected, ends) = restarted::<Exclusive>(&scenario, &checkpoint, seed);
            for _ in 0..3 {
                // Whatever happens in between, what the layout does not know is freed.
                let ids = checkpoint.live.iter().map(|(id, ..)| *id);
                let mut live: Vec<_> = ids.filter_map(|id| Some((id, replay.handle(id)?))).collect();
                live.retain(|(_, handle)| allocator.allocation(*handle).is_ok());
                stray(&allocator, &mut work, &mut live, &mut random);
                let before = state(&allocator);
                if let Err(error) = allocator.restore_layout(POOL, &checkpoint.layout(POOL)) {
                    // Memory went back at a limit, at a threshold, or by a trim.
                    assert!(matches!(error, RestoreError::Gone { .. }), "seed {seed}: {error}");
                    assert_eq!(state(&allocator), before, "seed {seed}: a refused restore changes nothing");
                    gone += 1;
                    break;
                }
                replay = Replay::new(&allocator, program);
                let still: BTreeSet<_> = live.iter().map(|(id, _)| *id).collect();
                // To restore once more changes nothing, and gives the handles.
                checkpoint.restore_pool(POOL, &allocator, &mut replay, |id, stream, allocation| {
                    if still.contains(&id) {
                        kept += 1;
                    } else {
                        work.adopt(id, stream, allocation);
                        carved += 1;
                    }
                });
                for (id, handle) in &live {
                    assert_eq!(replay.handle(*id), Some(*handle), "a handle that was live all the time is good");
                }
                let future = go_on(&allocator, program, &mut replay, &mut work, at);
                assert_eq!((future, digests(&allocator)), (expected.clone(), ends.clone()), "seed {seed}, op {at}");
                rewound += 1;
                free_what_was_made_since(&allocator, program, &replay, &mut work, at);
            }
        }
        assert!(device.leaks().is_empty(), "seed {seed}, left behind: {}", device.leaks());
    }
    assert!(rewound > 300 && gone > 50, "{rewound} went back, {gone} could not");
    assert!(carved > 1000 && kept > 1000, "{carved} carved, {kept} kept");
}

fn free_what_was_made_since(
    allocator: &Allocator<&SimBackend>,
    program: &Program,
    replay: &Replay<'_, &SimBackend, Exclusive>,
    work: &mut DeviceWork<'_>,
    at: usize,
) {
    for op in &program.ops()[at..] {
        let Op::Allocate { id, .. } = *op else { continue };
        if let Some(handle) = replay.handle(id) {
            allocator.free(handle).expect("no faults");
            work.submit(&Op::Free { id }, &Ok(None));
        }
    }
}
