//! Layouts: a restarted rank continues like the others.

#[path = "layout/rejoin.rs"]
mod rejoin;

use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::layout::Layout;
use symmalloc_core::lock::{Exclusive, Lock};
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Digest, Op, Placement, PoolId, StreamId, generic};
use symmalloc_harness::checker::{DeviceWork, outcome};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::oracle::Outcome;
use symmalloc_harness::restart::Checkpoint;
use symmalloc_sim::{Delays, Fault, FaultRule, SimBackend};
use symmalloc_trace::replay::{Program, Replay};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// Results of later ops: every decision, and the bytes reserved after it.
type Future = Vec<(Outcome, u64)>;

fn digests<L: Lock>(allocator: &generic::Allocator<&SimBackend, L>) -> Vec<Option<Digest>> {
    (0..allocator.pool_count()).map(|pool| allocator.digest(PoolId(pool)).ok()).collect()
}

/// Executes the ops from `first` on.
fn go_on<L: Lock>(
    allocator: &generic::Allocator<&SimBackend, L>,
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
    allocator.check().expect("the invariants should hold");
    future
}

/// Restarts a rank at `checkpoint` and continues.
fn restarted<L: Lock>(scenario: &Scenario, checkpoint: &Checkpoint, seed: u64) -> (Future, Vec<Option<Digest>>) {
    let device = scenario.device_builder(seed).rank(9).delays(Delays::UntilSynchronized).build();
    let (future, digests) = {
        let allocator = generic::Allocator::<_, L>::with_lock(&device, scenario.config.clone())
            .expect("the configuration should be valid");
        let mut work = DeviceWork::new(&device);
        let adopt = |id, stream, allocation| work.adopt(id, stream, allocation);
        let mut replay = checkpoint.resume(&allocator, &scenario.program, adopt);
        allocator.check().expect("the invariants should hold");
        let again = Checkpoint::take(checkpoint.op, &allocator, &scenario.program, &replay);
        assert_eq!(&again, checkpoint, "the restored state equals the saved one");
        let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, checkpoint.op);
        (future, digests(&allocator))
    };
    assert!(device.leaks().is_empty(), "leaked: {}", device.leaks());
    (future, digests)
}

/// Registers four streams: those of the program in their groups, and others.
fn register_streams(allocator: &Allocator<&SimBackend>, program: &Program) {
    let groups = program.groups();
    for stream in (0..4).map(StreamId) {
        let group = groups.first_of(stream);
        let registered =
            if group == stream { allocator.register_stream() } else { allocator.register_stream_in(group) };
        assert_eq!(registered, Ok(stream));
    }
}

/// Returns the scenario with all ops in the default pool.
fn in_one_pool(scenario: &Scenario) -> Scenario {
    let ops = scenario.ops().filter_map(|(op, access)| match op {
        Op::CreatePool { .. } | Op::DestroyPool { .. } => None,
        Op::Allocate { id, stream, size_bytes, .. } => {
            Some((Op::Allocate { id, pool: POOL, stream, size_bytes }, access))
        }
        Op::Reserve { stream, size_bytes, .. } => Some((Op::Reserve { pool: POOL, stream, size_bytes }, access)),
        Op::Trim { .. } => Some((Op::Trim { pool: Some(POOL) }, access)),
        other => Some((other, access)),
    });
    Scenario::new(scenario.config.clone(), scenario.granularity_bytes, ops)
}

/// Returns the state that a rejected restore must leave unchanged.
fn state<L: Lock>(allocator: &generic::Allocator<&SimBackend, L>) -> impl PartialEq + std::fmt::Debug + use<L> {
    allocator.check().expect("the invariants should hold");
    (allocator.snapshot(), allocator.stats(), digests(allocator))
}

/// Runs the first part of the scenario and returns the checkpoint after it.
fn first_part<'a, 'd>(
    scenario: &'a Scenario,
    allocator: &'a Allocator<&'d SimBackend>,
    work: &mut DeviceWork<'_>,
) -> (Replay<'a, &'d SimBackend, Exclusive>, Checkpoint) {
    let at = scenario.program.ops().len() / 2;
    let mut replay = Replay::new(allocator, &scenario.program);
    for op in &scenario.program.ops()[..at] {
        let result = replay.step(op);
        work.submit(op, &result);
    }
    let checkpoint = Checkpoint::take(at, allocator, &scenario.program, &replay);
    (replay, checkpoint)
}

/// Makes the driver call after the next `calls` calls fail.
fn refuse_after(device: &SimBackend, calls: u64) {
    let ordinal = device.calls().fallible() + calls;
    device.inject(None, FaultRule::At { ordinal }, Fault::Refused);
}

fn pool(segments: &str) -> PoolConfig {
    segments.parse().expect("the text should be valid")
}

fn rank<'a>(device: &'a SimBackend, pool: &PoolConfig, limit_bytes: Option<u64>) -> Allocator<&'a SimBackend> {
    let config = Config::builder()
        .default_pool(pool.clone())
        .total_limit_bytes(limit_bytes)
        .build()
        .expect("the configuration should be valid");
    let allocator = Allocator::new(device, config).expect("the arguments should be valid");
    allocator.register_stream().expect("the first stream should be registered");
    allocator.register_stream().expect("the second");
    allocator
}

/// Expects an error, and checks that nothing changed.
fn refusal(allocator: &Allocator<&SimBackend>, pool: PoolId, layout: &Layout) -> RestoreError {
    let before = state(allocator);
    let error = allocator.restore_layout(pool, layout).expect_err("the layout does not fit");
    assert_eq!(state(allocator), before, "{error}");
    error
}

#[test]
fn a_layout_fits_only_if_all_inputs_of_decisions_are_equal() {
    let device = SimBackend::builder().build();
    let policy = pool("streams:shared");
    let old = rank(&device, &policy, None);
    let made = old.allocate(POOL, S0, MIB).expect("the allocation should fit");
    old.record_use(made.handle, S1).expect("the allocation should be live");
    let layout = old.save_layout(POOL).expect("no segment should be retired");

    let error = refusal(&rank(&device, &pool("streams:separate"), None), POOL, &layout);
    assert!(matches!(error, RestoreError::Config { .. }), "{error}");
    let other = SimBackend::builder().granularity_bytes(4 * MIB).build();
    let error = refusal(&rank(&other, &policy, None), POOL, &layout);
    assert_eq!(
        error,
        RestoreError::Input { key: "granularity", saved_bytes: Some(2 * MIB), here_bytes: Some(4 * MIB) }
    );
    let error = refusal(&rank(&device, &policy, Some(9)), POOL, &layout);
    assert_eq!(error, RestoreError::Input { key: "total_limit", saved_bytes: None, here_bytes: Some(9) });
    let error = refusal(&rank(&device, &policy, None), PoolId(1), &layout);
    assert!(matches!(error, RestoreError::Unknown(_)), "{error}");
    let config = Config::builder().default_pool(policy).build().expect("the configuration should be valid");
    let one_stream: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    one_stream.register_stream().expect("the first stream should be registered");
    let error = refusal(&one_stream, POOL, &layout);
    assert_eq!(error.to_string(), "s1 is unknown, after 1 registered stream: call register_stream first");
}

#[test]
fn the_text_names_live_allocations_and_zero_byte_ones_can_still_be_freed() {
    let device = SimBackend::builder().build();
    let policy = pool("streams:shared,limit_mb:64");
    let old = rank(&device, &policy, Some(100 * MIB));
    let weights = old.allocate_named(POOL, S0, 3 * MIB, "weights \"0\"").expect("the allocation should fit");
    old.record_use(weights.handle, S1).expect("the allocation should be live");
    let nothing = old.allocate(POOL, S1, 0).expect("takes no memory");
    let text = symmalloc_trace::layout::to_text(&old.save_layout(POOL).expect("no segment should be retired"));
    let digest = old.heap_digests(POOL).expect("the pool should exist")[0].1;
    let expected = format!(
        "symmalloc-layout 1\n\
         pool segments:expandable,range_mb:524288,growth_mb:2,streams:shared,symmetric:false,limit_mb:64,reclaim:heap\n\
         granularity 2097152\n\
         total_limit 104857600\n\
         heap shared 4 {digest} 1\n\
         segment 0 large\n\
         memory 0 4194304\n\
         a 0 3145728 3145728 s0 \"weights \\\"0\\\"\"\n\
         u s1\n\
         end 8\n"
    );
    assert_eq!(text, expected);

    let new = rank(&device, &policy, Some(100 * MIB));
    let restored = new
        .restore_layout(POOL, &symmalloc_trace::layout::parse(&text).expect("the layout should be valid"))
        .expect("the pool should be unused");
    old.free(nothing.handle).expect("the allocation should be live");
    new.free(restored.nothing(S1).expect("its heap has a history")).expect("one handle for all of them");
    assert_eq!(new.digest(POOL), old.digest(POOL));
    assert_eq!(restored.allocations().next().expect("one is live").name.as_deref(), Some("weights \"0\""));
    assert_eq!(restored.find(S1, Placement::NOWHERE), None);
}

#[test]
fn a_name_that_exceeds_a_line_is_truncated_at_a_character_boundary() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    let _live = allocator.allocate_named(POOL, S0, 1, &"\u{1f600}x".repeat(1000)).expect("the allocation should fit");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    let name = layout.heaps()[0].segments[0].allocations[0].name.clone().expect("it is named");
    assert_eq!((name.len(), &name[4090..]), (4095, "\u{1f600}x"));
    assert_eq!(
        symmalloc_trace::layout::parse(&symmalloc_trace::layout::to_text(&layout)).expect("the layout should be valid"),
        layout
    );
}

/// The peak over all heaps ends with the same value as if nothing had been restored.
#[test]
fn restored_allocations_count_in_the_peak_over_all_heaps() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, None);
    for stream in [S0, S1] {
        let _live = old.allocate(POOL, stream, 10 * MIB).expect("the allocation should fit");
    }
    let layout = old.save_layout(POOL).expect("no segment should be retired");
    let new = rank(&device, &policy, None);
    new.restore_layout(POOL, &layout).expect("a fresh pool");
    for (mib, peak) in [(5, 25), (7, 32)] {
        let _live = new.allocate(POOL, S0, mib * MIB).expect("the allocation should fit");
        let usage = new.stats().usage.all;
        assert_eq!((usage.allocated_bytes.current, usage.allocated_bytes.peak), (peak * MIB, peak * MIB));
        assert_eq!(usage.allocations.current, usage.allocations.peak);
    }
    new.check().expect("the invariants should hold");
}

#[test]
fn a_used_pool_cannot_restore_a_layout() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    let made = allocator.allocate(POOL, S0, 0).expect("takes no memory");
    allocator.free(made.handle).expect("the allocation should be live");
    let error = refusal(&allocator, POOL, &layout);
    assert_eq!(error, RestoreError::Used { pool: POOL });
    assert!(error.to_string().contains("revive_layout"), "{error}");
}

/// Dead segments that an observer holds count toward the limits.
#[test]
fn a_pool_with_retired_segments_has_no_layout() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    let (observer, _) = allocator.observe(POOL).expect("the pool should exist");
    let made = allocator.allocate(POOL, S0, 20 * MIB).expect("the allocation should fit");
    allocator.free(made.handle).expect("the allocation should be live");
    allocator.trim_all().expect("no fault should be injected");
    let retired_bytes = 20 * MIB;
    assert_eq!(allocator.save_layout(POOL), Err(LayoutError::Retired { pool: POOL, retired_bytes }));
    allocator.forget(observer).expect("no fault should be injected");
    allocator.save_layout(POOL).expect("the memory was released");
}
