//! Faults: one driver call fails, for every call in turn. The op returns a typed error, the allocator stays consistent and unchanged,
//! a second attempt proceeds as if nothing had happened, and nothing leaks.

use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::backend::Reason;
use symmalloc_core::config::{DebugOptions, Reclaim};
use symmalloc_core::errors::{AllocateError, FreeError, OutOfMemoryCause, PoolError, TrimError};
use symmalloc_core::sleep::SleepCause;
use symmalloc_core::{Allocator, Config, Digest, Op, Placement, PoolConfig, PoolId, Retry};
use symmalloc_harness::checker::{DeviceWork, PrintOnPanic, outcome};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::jobs;
use symmalloc_harness::oracle::{Outcome, Refusal};
use symmalloc_harness::run::Run;
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend};
use symmalloc_trace::replay::{Replay, StepError};

const OPS: usize = 40;

/// Result of a run with one fault.
struct Outcomes {
    /// Outcome of each op, from its first attempt without a failed driver call.
    outcomes: Vec<Outcome>,
    /// Errors of the refused ops.
    errors: Vec<StepError>,
    fallible_calls: u64,
    /// `true` if an op failed because of the failed driver call.
    is_noticed: bool,
}

/// Runs a scenario. A refused op is retried once.
fn run(scenario: &Scenario, device: &SimBackend) -> Outcomes {
    let _report = PrintOnPanic(scenario);
    let mut seen = Outcomes { outcomes: Vec::new(), errors: Vec::new(), fallible_calls: 0, is_noticed: false };
    {
        let allocator: Allocator<_> =
            Allocator::new(device, scenario.config.clone()).expect("the arguments should be valid");
        let mut run = Run::new(&allocator, scenario);
        let mut work = DeviceWork::new(device);
        for (index, op) in scenario.program.ops().iter().enumerate() {
            let mut result = run.step(index);
            allocator.check().unwrap_or_else(|violation| panic!("op {index}, {op:?}: {violation}"));
            if outcome(result.clone()) == Outcome::Refused(Refusal::Driver) {
                seen.errors.push(result.expect_err("refused"));
                result = run.step(index);
                allocator.check().unwrap_or_else(|violation| panic!("op {index} again, {op:?}: {violation}"));
            }
            work.submit(op, &result);
            seen.outcomes.push(outcome(result));
        }
        seen.fallible_calls = device.calls().fallible();
        seen.is_noticed = device.calls().failed() > 0;
    }
    assert!(device.leaks().is_empty(), "leaked: {}", device.leaks());
    seen
}

/// Returns the scenario without limits and thresholds, which release memory during other ops. If the driver fails to
/// release the memory, such an op still succeeds, and later decisions find more memory.
fn that_trims_only_when_told(scenario: &Scenario) -> Scenario {
    let plain = |pool: &PoolConfig| {
        pool.to_builder().limit_bytes(None).release_threshold_bytes(None).build().expect("fewer knobs are valid")
    };
    let config = scenario
        .config
        .to_builder()
        .default_pool(plain(scenario.config.default_pool()))
        .total_limit_bytes(None)
        .build()
        .expect("the configuration should be valid");
    // A pool is destroyed even if its memory cannot be released, so a second attempt would not find the pool.
    let ops = scenario.ops().filter(|(op, _)| !matches!(op, Op::DestroyPool { .. })).map(|(op, access)| match op {
        Op::CreatePool { pool, config } => (Op::CreatePool { pool, config: Box::new(plain(&config)) }, access),
        other => (other, access),
    });
    Scenario::new(config, scenario.granularity_bytes, ops)
}

#[test]
fn a_refused_call_does_not_affect_later_placements() {
    let (mut compared, mut kinds) = (0, BTreeSet::new());
    for seed in 0..120 {
        let mut scenario = Scenario::from_seed(seed, OPS);
        let is_compared = seed % 2 == 0;
        if is_compared {
            scenario = that_trims_only_when_told(&scenario);
        }
        let expected = run(&scenario, &scenario.device(seed));
        assert!(expected.errors.is_empty());
        for ordinal in 0..expected.fallible_calls {
            for fault in [Fault::OutOfMemory, Fault::Refused] {
                let run = run(&scenario, &scenario.device_builder(seed).fail_at(ordinal, fault).build());
                assert!(run.is_noticed, "seed {seed}: call {ordinal} was not made");
                run.errors.iter().for_each(|error| {
                    kinds.insert(kind(error, fault));
                });
                if is_compared {
                    let differs = run.outcomes.iter().zip(&expected.outcomes).position(|(one, other)| one != other);
                    assert_eq!(differs, None, "seed {seed}, call {ordinal}: the first op with a different decision");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 1000, "{compared}");
    let sleeps = ["sleep: save", "sleep: unmap", "sleep: wait"];
    let all = [
        &["allocate: memory", "allocate: wait", "destroy", "free", "program"][..],
        &sleeps,
        &["trim", "wake: load", "wake: map"],
    ];
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), all.concat(), "the kinds of refused ops");
}

/// Returns the kind of a refused op's error, and checks that its cause is the injected fault.
fn kind(error: &StepError, fault: Fault) -> &'static str {
    let (kind, cause) = match error {
        StepError::Allocate(AllocateError::OutOfMemory(error)) => match &error.cause {
            OutOfMemoryCause::Driver(cause) => ("allocate: memory", cause),
            cause => panic!("the driver call failed, but the error states {cause:?}"),
        },
        StepError::Allocate(AllocateError::Fence { error, .. }) => ("allocate: wait", error),
        StepError::Free(FreeError::Fence(error)) => ("free", error),
        StepError::Trim(TrimError::Backend { error, .. }) => ("trim", error),
        StepError::Pool(PoolError::Backend(error)) => ("destroy", error),
        StepError::Sleep(error) => match &error.cause {
            SleepCause::Synchronize { error, .. } => ("sleep: wait", error),
            SleepCause::Save { error, .. } => ("sleep: save", error),
            SleepCause::Held { error, .. } => ("sleep: unmap", error),
            SleepCause::Memory { cause: OutOfMemoryCause::Driver(error), .. } => ("wake: map", error),
            SleepCause::Load(error) => ("wake: load", error),
            cause => panic!("the driver call failed, but the error states {cause}"),
        },
        StepError::Backend(error) => ("program", error),
        other => panic!("{other:?} is not a possible result of a failed driver call"),
    };
    let reason = if fault == Fault::OutOfMemory { Reason::OutOfMemory } else { Reason::Refused };
    assert_eq!(cause.reason, reason, "{error}");
    kind
}

#[test]
fn with_many_refused_calls_the_allocator_stays_consistent_and_leaks_nothing() {
    for seed in 0..300 {
        let scenario = Scenario::from_seed(seed, 80);
        let rule = FaultRule::Chance { per_million: 200_000 };
        let device = scenario.device_builder(seed).fail(None, rule, Fault::Refused).build();
        let _report = PrintOnPanic(&scenario);
        {
            let allocator: Allocator<_> =
                Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
            let mut run = Run::new(&allocator, &scenario);
            let mut work = DeviceWork::new(&device);
            for (index, op) in scenario.program.ops().iter().enumerate() {
                let result = run.step(index);
                allocator.check().unwrap_or_else(|violation| panic!("op {index}, {op:?}: {violation}"));
                work.submit(op, &result);
            }
            device.heal();
            // Liveness: once the driver works again, everything can be freed and released.
            run.free_all().expect("the driver works again");
            allocator.trim_all().expect("the driver works again");
            let stats = allocator.stats();
            assert_eq!(stats.usage.all.allocations.current, 0, "seed {seed}");
            assert_eq!(stats.retired_bytes, 0, "seed {seed}");
        }
        assert!(device.leaks().is_empty(), "seed {seed}, leaked: {}", device.leaks());
    }
}

#[test]
fn a_lost_device_fails_every_call_without_a_panic() {
    for seed in 0..60 {
        let scenario = Scenario::from_seed(seed, OPS);
        let calls = run(&scenario, &scenario.device(seed)).fallible_calls;
        for ordinal in (0..calls).step_by(5) {
            let device = scenario.device_builder(seed).fail_at(ordinal, Fault::DeviceLost).build();
            let _report = PrintOnPanic(&scenario);
            let allocator: Allocator<_> =
                Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
            let mut run = Run::new(&allocator, &scenario);
            for (index, op) in scenario.program.ops().iter().enumerate() {
                let _refused_or_not = run.step(index);
                allocator
                    .check()
                    .unwrap_or_else(|violation| panic!("seed {seed}, call {ordinal}, {op:?}: {violation}"));
            }
        }
    }
}

/// Rule D4: when the driver is out of memory on one rank, nothing is released behind the program's back.
#[test]
fn a_refusal_of_the_driver_releases_nothing() {
    let pool = PoolConfig::builder().fixed().reclaim(Reclaim::Pool).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let device = SimBackend::builder().memory_bytes(64 << 20).build();
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("the first stream should be registered");
    let cached = allocator.allocate(PoolId::DEFAULT, stream, 40 << 20).expect("the allocation should fit");
    allocator.free(cached.handle).expect("the allocation should be live");
    let error = allocator.allocate(PoolId::DEFAULT, stream, 50 << 20).expect_err("24 MiB are left");
    let AllocateError::OutOfMemory(error) = error else { panic!("{error}") };
    assert!(matches!(error.cause, OutOfMemoryCause::Driver(_)));
    assert_eq!((error.reserved_bytes, error.largest_free_bytes), (40 << 20, 40 << 20));
    assert_eq!((device.mapped_bytes(), device.calls().of(Call::Unmap)), (40 << 20, 0));
    let again = allocator.allocate(PoolId::DEFAULT, stream, 40 << 20).expect("as before");
    assert_eq!(again.placement, cached.placement);
}

/// A trim reports exactly the bytes that were released to the device, no matter how many of its calls failed.
#[test]
fn a_failed_trim_reports_all_released_bytes() {
    let mut failed = 0;
    for (segments, every) in [("fixed", 2), ("fixed", 3), ("expandable", 2), ("expandable", 3)] {
        let device = SimBackend::builder().build();
        let config: Config = format!("segments:{segments}").parse().expect("the text should be valid");
        let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
        for stream in [(); 3].map(|()| allocator.register_stream().expect("a stream id is available")) {
            let allocate = |mib: u64| {
                allocator.allocate(PoolId::DEFAULT, stream, mib << 20).expect("the allocation should fit").handle
            };
            // Every second allocation is freed, which leaves whole segments, or holes in one.
            let made = [24, 26, 28, 30, 32, 34].map(allocate);
            made.into_iter()
                .step_by(2)
                .for_each(|handle| allocator.free(handle).expect("the allocation should be live"));
        }
        device.inject(Some(Call::Unmap), FaultRule::Every { calls: every }, Fault::Refused);
        for pool in [None, Some(PoolId::DEFAULT), None] {
            let before = device.mapped_bytes();
            let trimmed = pool.map_or_else(|| allocator.trim_all(), |pool| allocator.trim_pool(pool));
            let released = before - device.mapped_bytes();
            match trimmed {
                Ok(bytes) => assert_eq!(bytes, released),
                Err(TrimError::Backend { released_bytes, .. }) => {
                    assert_eq!(released_bytes, released, "{segments}, every {every}");
                    failed += u32::from(released > 0);
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
    assert!(failed >= 4, "{failed} trims gave something back and failed");
}

/// Rule D4: a rank whose driver ran out of memory differs from the others from then on, regardless of later ops.
#[test]
fn a_refusal_by_the_driver_changes_the_digest() {
    let digest = |is_refused: bool| {
        let device = SimBackend::builder().build();
        let allocator: Allocator<_> =
            Allocator::new(&device, Config::default()).expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("the first stream should be registered");
        if is_refused {
            device.inject(Some(Call::Map), FaultRule::At { ordinal: 0 }, Fault::OutOfMemory);
            allocator.allocate(PoolId::DEFAULT, stream, 1 << 20).expect_err("refused");
        }
        let _live = allocator.allocate(PoolId::DEFAULT, stream, 1 << 20).expect("memory should suffice");
        allocator.digest(PoolId::DEFAULT).expect("the default pool should always exist")
    };
    assert_eq!(digest(false), digest(false));
    assert_ne!(digest(false), digest(true));
}

/// Runs a program that makes every kind of call: with observers that are added and removed, event queries, a failure
/// callback that trims, and destroyed pools. Each op is retried until no driver call fails, at most `attempts` times.
/// Afterward the driver works again: everything is freed and released, and nothing leaks. Returns the number of refused
/// ops.
fn everything(scenario: &Scenario, device: &SimBackend, attempts: usize) -> usize {
    let _report = PrintOnPanic(scenario);
    let mut refused = 0;
    {
        let allocator: Allocator<_> =
            Allocator::new(device, scenario.config.clone()).expect("the arguments should be valid");
        allocator.set_failure_callback(|allocator, _| match allocator.trim_all() {
            Ok(0) | Err(_) => Retry::GiveUp,
            Ok(_) => Retry::Again,
        });
        let check = |what: &dyn std::fmt::Debug| {
            allocator.check().unwrap_or_else(|violation| panic!("{what:?}: {violation}"));
        };
        let mut run = Run::new(&allocator, scenario);
        let mut work = DeviceWork::new(device);
        let mut observer = None;
        for (index, op) in scenario.program.ops().iter().enumerate() {
            for _ in 0..attempts {
                let result = run.step(index);
                check(op);
                let is_refused = outcome(result.clone()) == Outcome::Refused(Refusal::Driver);
                work.submit(op, &result);
                if !is_refused {
                    break;
                }
                refused += 1;
            }
            match (index % 7, observer) {
                (0, _) => refused += usize::from(allocator.drop_completed_fences().is_err()),
                (3, None) => observer = allocator.observe(PoolId::DEFAULT).ok().map(|(observer, _)| observer),
                (4, Some(observer)) => {
                    refused += usize::from(allocator.acknowledge(observer, &allocator.unread(observer)).is_err());
                }
                (5, Some(forgotten)) => {
                    refused += usize::from(allocator.forget(forgotten).is_err());
                    observer = None;
                }
                _ => {}
            }
            check(&"observers and fences");
        }
        device.heal();
        if let Some(observer) = observer {
            allocator.forget(observer).expect("the driver works again");
        }
        run.free_all().expect("the driver works again");
        allocator.trim_all().expect("the driver works again");
        let stats = allocator.stats();
        assert_eq!((stats.usage.all.allocations.current, stats.retired_bytes), (0, 0));
        check(&"at the end");
    }
    assert!(device.leaks().is_empty(), "leaked: {}", device.leaks());
    refused
}

/// Returns options that fill and compare memory.
fn debugging() -> DebugOptions {
    let pool: PoolConfig = "debug:[poison,canary]".parse().expect("valid");
    pool.debug()
}

#[test]
fn every_kind_of_call_fails_at_every_occurrence_once_and_twice_in_a_row() {
    let mut made: BTreeMap<Call, u64> = BTreeMap::new();
    for seed in 0..40 {
        let mut scenario = Scenario::from_seed(seed, OPS);
        if seed % 10 == 0 {
            scenario = scenario.with_debug(debugging());
        }
        let device = scenario.device(seed);
        assert_eq!(everything(&scenario, &device, 1), 0, "without a fault nothing is refused");
        for call in Call::ALL {
            let occurrences = device.calls().of(call);
            *made.entry(call).or_default() += occurrences;
            for ordinal in 0..occurrences {
                let failing = |count: u64| {
                    let builder = scenario.device_builder(seed);
                    (ordinal..ordinal + count)
                        .fold(builder, |builder, ordinal| {
                            builder.fail(Some(call), FaultRule::At { ordinal }, Fault::Refused)
                        })
                        .build()
                };
                for count in [1, 2] {
                    everything(&scenario, &failing(count), 3);
                }
            }
        }
    }
    let enough = |call: &Call| if matches!(call, Call::Save | Call::Load | Call::Zero) { 3 } else { 20 };
    assert!(Call::ALL.iter().all(|call| made[call] > enough(call)), "not every kind of call was made: {made:?}");
}

#[test]
fn the_allocator_recovers_from_calls_that_always_failed() {
    let mut refused = BTreeMap::new();
    for seed in 0..60 {
        let scenario = Scenario::from_seed(seed, 2 * OPS);
        for call in Call::ALL {
            for (rule, fault) in [
                (FaultRule::Every { calls: 1 }, Fault::Refused),
                (FaultRule::Every { calls: 1 }, Fault::OutOfMemory),
                (FaultRule::Every { calls: 2 }, Fault::Refused),
                (FaultRule::At { ordinal: seed % 5 }, Fault::DeviceLost),
            ] {
                let device = scenario.device_builder(seed).fail(Some(call), rule, fault).build();
                *refused.entry(call).or_insert(0) += everything(&scenario, &device, 2);
            }
        }
    }
    // A failed fill or comparison refuses no op: its bytes are not checked.
    let refuses = |call: &&Call| !matches!(call, Call::Fill | Call::Compare);
    assert!(
        Call::ALL.iter().filter(refuses).all(|call| refused[call] > 0),
        "some kinds of calls were never refused: {refused:?}"
    );
}

/// The driver keeps the memory that it fails to release, but there is no panic, and no event leaks.
#[test]
fn the_allocator_is_dropped_while_calls_fail() {
    for seed in 0..40 {
        let scenario = Scenario::from_seed(seed, OPS);
        let drop_with = |rule: Option<FaultRule>, fault: Fault| {
            let device = scenario.device(seed);
            let allocator: Allocator<_> =
                Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
            let mut run = Run::new(&allocator, &scenario);
            (0..scenario.program.ops().len()).for_each(|op| drop(run.step(op)));
            let before = device.calls().fallible();
            if let Some(FaultRule::At { ordinal }) = rule {
                device.inject(None, FaultRule::At { ordinal: before + ordinal }, fault);
            }
            drop(allocator);
            assert_eq!(device.leaks().events, 0, "seed {seed}, {rule:?}");
            (device.calls().fallible() - before, device.leaks())
        };
        let (calls, leaks) = drop_with(None, Fault::Refused);
        assert!(leaks.is_empty());
        for ordinal in 0..calls {
            drop_with(Some(FaultRule::At { ordinal }), Fault::Refused);
            drop_with(Some(FaultRule::At { ordinal }), Fault::DeviceLost);
        }
    }
}

/// Runs a recorded job in which the driver call with this number fails. Returns all placements, and the digest.
fn job_with_fault(
    program: &symmalloc_trace::replay::Program,
    pool: &PoolConfig,
    ordinal: Option<u64>,
) -> (Vec<Placement>, Digest, u64) {
    let mut builder = SimBackend::builder().seed(11);
    if let Some(ordinal) = ordinal {
        builder = builder.fail_at(ordinal, Fault::Refused);
    }
    let device = builder.build();
    let config = Config::builder().default_pool(pool.clone()).build().expect("the configuration should be valid");
    let mut placements = Vec::new();
    let (digest, calls) = {
        let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
        let mut replay = Replay::new(&allocator, program);
        for op in program.ops() {
            let mut result = replay.step(op);
            if result.is_err() {
                allocator.check().expect("sound after the refusal");
                result = replay.step(op);
            }
            placements.extend(result.expect("one call failed").map(|made| made.placement));
        }
        allocator.check().expect("sound at the end");
        (allocator.digest(PoolId::DEFAULT).expect("the default pool should always exist"), device.calls().fallible())
    };
    assert!(device.leaks().is_empty(), "call {ordinal:?}, leaked: {}", device.leaks());
    (placements, digest, calls)
}

#[test]
fn recorded_jobs_continue_after_a_refused_call_at_any_op() {
    for (job, runs) in [("fsdp1_train_rank0", 24), ("fsdp_train_rank0", 12), ("moe_train", 12)] {
        let program = jobs::program(job);
        for pool in
            [PoolConfig::default(), PoolConfig::builder().fixed().build().expect("the configuration should be valid")]
        {
            let (expected, digest, calls) = job_with_fault(&program, &pool, None);
            for run in 0..runs {
                let ordinal = calls * run / runs;
                let (placements, refused, _) = job_with_fault(&program, &pool, Some(ordinal));
                assert!(placements == expected, "{job}, {pool}: call {ordinal} moved a block");
                // Only a refused request for memory is part of the digest: other refused ops leave no trace.
                assert!(refused == digest || refused.ops == digest.ops + 1, "{job}: call {ordinal}");
            }
        }
    }
}
