//! Recording: the recorded ops of a running allocator replay to the same placements and digests, including limits, refusals, failure
//! callbacks, observers and threads. A failed sink has no effect on the allocator.

use proptest::prelude::*;
use std::io;
use std::sync::{Arc, Mutex};
use symmalloc_agreement::{Point, RankHistory, agree_in_lockstep};
use symmalloc_core::config::{Config, PoolConfig, Reclaim, StreamPolicy};
use symmalloc_core::errors::HandleError;
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::op::{Pending, Record};
use symmalloc_core::recording::{RecordingEnd, RecordingError, Sink, SinkError, StartRecordingError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Backend, Digest, Handle, Op, PoolId, Retry, SharedAllocator, StreamId, generic};
use symmalloc_harness::checker::{PrintOnPanic, outcome};
use symmalloc_harness::generate::{Scenario, scenario_bytes};
use symmalloc_harness::jobs;
use symmalloc_harness::memory::Memory;
use symmalloc_harness::run::Run;
use symmalloc_import::export::{ExportError, export};
use symmalloc_import::rerun::RerunError;
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay, StepError};
use symmalloc_trace::{RecordLine, Trace};

fn digests<B: Backend, L: Lock>(allocator: &generic::Allocator<B, L>) -> Vec<Option<Digest>> {
    (0..allocator.pool_count()).map(|pool| allocator.digest(PoolId(pool)).ok()).collect()
}

/// Replays a recording on another rank. Every placement and every digest equals the recorded one, and recording the replay produces the
/// same recording.
fn replays(records: &[Record], config: &Config, granularity_bytes: u64, expected: &[Option<Digest>]) {
    let trace = Trace::new(Some(config.clone()), records.to_vec()).expect("a recording is a trace");
    assert_eq!(Trace::parse(&trace.to_text()).expect("the contents should be UTF-8"), trace);
    let program = Program::new(records).expect("a recording is a program");
    let device = SimBackend::builder().seed(77).granularity_bytes(granularity_bytes).memory_bytes(1 << 50).build();
    let allocator: Allocator<_> = Allocator::new(&device, config.clone()).expect("the arguments should be valid");
    let again = Memory::new();
    allocator.start_recording(again.clone()).expect("nothing should have been allocated");
    let mut replay = Replay::new(&allocator, &program);
    for (index, (op, record)) in program.ops().iter().zip(records).enumerate() {
        let made = replay.step(op).unwrap_or_else(|error| panic!("record {index}, {}: {error}", RecordLine(record)));
        let placement = made.filter(|made| made.size_bytes > 0).map(|made| made.placement);
        assert_eq!(placement, record.placement, "record {index}: {}", RecordLine(record));
    }
    allocator.check().expect("the invariants should hold");
    assert_eq!(digests(&allocator), expected);
    assert_eq!(allocator.stop_recording().expect("the sink has space").records, records.len() as u64);
    let again = again.records();
    let differs = again.iter().zip(records).position(|(one, other)| one != other);
    assert_eq!(differs.map(|index| (&again[index], &records[index])), None);
    assert_eq!(again.len(), records.len());
}

/// Runs a program that makes every kind of call, with a driver that sometimes has no memory: observers are added and
/// removed, fences are dropped, and a failure callback frees everything it can.
fn adverse_run<L: Lock>(scenario: &Scenario, seed: u64, refusals_per_million: u32) -> Vec<Record> {
    let _report = PrintOnPanic(scenario);
    let rule = FaultRule::Chance { per_million: refusals_per_million };
    let device = scenario.device_builder(seed).fail(Some(Call::Map), rule, Fault::OutOfMemory).build();
    let allocator = generic::Allocator::<_, L>::with_lock(&device, scenario.config.clone())
        .expect("the configuration should be valid");
    let spare = Arc::new(Mutex::new(Vec::<Handle>::new()));
    let freed = Arc::clone(&spare);
    allocator.set_failure_callback(move |allocator, error| {
        // A reset of the pool may have freed it before.
        if let Some(handle) = freed.lock().unwrap().pop()
            && allocator.free(handle).is_ok()
        {
            return Retry::Again;
        }
        match error.requested_bytes % 3 {
            0 => Retry::GiveUp,
            _ if allocator.trim_all().expect("only calls that map should fail") > 0 => Retry::Again,
            _ => Retry::GiveUp,
        }
    });
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    let mut run = Run::new(&allocator, scenario);
    let mut random = SplitMix64::new(seed);
    let mut observer = None;
    for op in 0..scenario.program.ops().len() {
        let _refused_or_not = run.step(op);
        match (random.below(12), observer) {
            (0, _) => drop(allocator.drop_completed_fences()),
            (1..3, None) => observer = allocator.observe(PoolId::DEFAULT).ok().map(|(observer, _)| observer),
            (3, Some(observer)) => {
                allocator.acknowledge(observer, &allocator.unread(observer)).expect("only calls that map should fail");
            }
            (4, Some(forgotten)) => {
                allocator.forget(forgotten).expect("only calls that map should fail");
                observer = None;
            }
            (5, _) if allocator.stream_count() > 0 => {
                let size_bytes = MIB << random.below(5);
                let made = allocator.allocate_named(PoolId::DEFAULT, StreamId(0), size_bytes, "spare \"one\"\n");
                spare.lock().unwrap().extend(made.map(|made| made.handle));
            }
            _ => {}
        }
    }
    allocator.check().expect("the invariants should hold");
    if !allocator.is_recording() {
        // The driver failed in the middle of a stitched allocation.
        assert!(refusals_per_million > 0);
        return sink.records();
    }
    let recorded = allocator.stop_recording().expect("the sink has space");
    let records = sink.records();
    assert_eq!(recorded.records, records.len() as u64);
    assert!(sink.is_finished());
    replays(&records, &scenario.config, scenario.granularity_bytes, &digests(&allocator));
    records
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn recordings_replay_to_the_same_placements_and_digests(bytes in scenario_bytes(120), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        adverse_run::<Exclusive>(&scenario, seed, 0);
        adverse_run::<Shared>(&scenario, seed, 150_000);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]
    /// Recordings of PyTorch state how long the memory of a free stays in use. An export keeps it for as long, whatever op follows.
    #[test]
    fn recordings_with_pending_frees_can_be_exported(
        bytes in scenario_bytes(120),
        seed in any::<u64>(),
        pending in proptest::collection::vec(0_u64..40, 1..50),
    ) {
        let scenario = Scenario::from_bytes(&bytes);
        let mut records = adverse_run::<Exclusive>(&scenario, seed, 100_000);
        let frees = records.iter_mut().filter(|record| matches!(record.op, Op::Free { .. }));
        for (record, entries) in frees.zip(pending.iter().cycle()) {
            record.pending = match entries {
                0..10 => None,
                10..20 => Some(Pending::TO_THE_END),
                entries => Pending::new(entries - 19),
            };
        }
        let program = Program::new(&records).expect("a recording is a program");
        match export(&program, &scenario.config, io::sink()) {
            Ok(_) => {}
            // Memory that stays in use counts for limits, and a wake may then exceed one.
            Err(ExportError::Rerun(RerunError::Step { error: StepError::Sleep(_), .. })) => {}
            Err(error) => panic!("a recording can be exported: {error}"),
        }
    }
}

/// The test above is meaningful only if the generated programs produce every kind of record.
#[test]
fn generated_programs_produce_every_kind_of_record() {
    let mut words = std::collections::BTreeMap::new();
    for seed in 0..400 {
        for record in adverse_run::<Exclusive>(&Scenario::from_seed(seed, 120), seed, 100_000) {
            let line = RecordLine(&record).to_string();
            let word = line.split(' ').next().unwrap_or_default();
            let cause = line.rsplit(' ').next().filter(|_| word == "refuse").unwrap_or_default();
            *words.entry(format!("{word} {cause}")).or_insert(0) += 1;
        }
    }
    let common: Vec<&str> = words.iter().filter(|(_, count)| **count > 20).map(|(word, _)| word.trim_end()).collect();
    let all = [
        "a",
        "acknowledge",
        "destroy",
        "f",
        "forget",
        "observe",
        "pool",
        "reclaim",
        "refuse driver",
        "refuse limit",
        "refuse segment",
        "reserve",
        "reset",
        "sleep",
        "stay",
        "stream",
        "synchronize",
        "trim",
        "u",
        "wait",
        "wake",
    ];
    assert_eq!(common, all, "{words:?}");
}

/// A request that runs short twice records the released memory both times. The second time, this includes the end of its own heap.
#[test]
fn each_reclaim_for_a_refused_request_is_recorded() {
    let config: Config = "segments:expandable,limit_mb:6,reclaim:pool".parse().expect("the text should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), config.clone()).expect("the arguments should be valid");
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    let [first, second] = [0, 1].map(|_| allocator.register_stream().expect("a stream id is available"));
    let allocate = |stream, mib: u64| allocator.allocate(PoolId::DEFAULT, stream, mib * MIB);
    let [_, end] = [0, 1].map(|_| allocate(first, 2).expect("below the limit"));
    // Its heap has a free end of 1.5 MiB, too little to release.
    let other = allocator.allocate(PoolId::DEFAULT, second, MIB / 2).expect("below the limit");
    allocator.free(end.handle).expect("the allocation should be live");
    allocate(first, 4).expect_err("2 MiB are live on each stream's granules");
    allocator.free(other.handle).expect("the allocation should be live");
    let served = allocate(first, 4).expect("enough memory is free");
    assert_eq!(served.placement.offset_bytes, 2 * MIB);
    allocator.stop_recording().expect("the sink has space");
    let records = sink.records();
    let lines: Vec<String> = records.iter().map(|record| RecordLine(record).to_string()).collect();
    let refused =
        ["reclaim 2097152 s0", "reclaim 4194304 s0", "refuse 4194304 s0 limit", "f 2", "a 3 4194304 s0 -> 0@2097152"];
    assert_eq!(lines[lines.len() - refused.len()..], refused);
    replays(&records, &config, 2 * MIB, &digests(&allocator));
}

/// Runs four threads on separate heaps and a shared one, near a limit over all heaps. They free each other's allocations and trim, and a
/// failure callback frees and trims.
fn threads_run(config: &Config, seed: u64) {
    const THREADS: u16 = 4;
    const OPS: usize = 400;
    let device = SimBackend::builder().seed(seed).build();
    let allocator: SharedAllocator<_> =
        SharedAllocator::new(&device, config.clone()).expect("the arguments should be valid");
    let shared =
        PoolConfig::builder().streams(StreamPolicy::Shared).build().expect("the configuration should be valid");
    let shared = allocator.create_pool(shared).expect("the configuration should be valid");
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    let live = Arc::new(Mutex::new(Vec::<Handle>::new()));
    let others = Arc::clone(&live);
    allocator.set_failure_callback(move |allocator, _| {
        let freed = others.lock().unwrap().pop();
        match freed {
            Some(handle) => allocator.free(handle).map_or(Retry::GiveUp, |()| Retry::Again),
            None => Retry::GiveUp,
        }
    });
    let streams: Vec<StreamId> =
        (0..THREADS).map(|_| allocator.register_stream().expect("a stream id is available")).collect();
    std::thread::scope(|scope| {
        for stream in streams {
            let (allocator, live) = (&allocator, &live);
            scope.spawn(move || {
                let mut random = SplitMix64::new(seed ^ (u64::from(stream.0) << 32));
                for _ in 0..OPS {
                    let pool = if random.below(3) == 0 { shared } else { PoolId::DEFAULT };
                    match random.below(16) {
                        0..8 => {
                            let made = allocator.allocate(pool, stream, 512 << random.below(14));
                            live.lock().unwrap().extend(made.map(|made| made.handle));
                        }
                        8..13 => {
                            let handle = live.lock().unwrap().pop();
                            if let Some(handle) = handle {
                                allocator.free(handle).expect("only this caller holds the handle");
                            }
                        }
                        13 => {
                            let handle = live.lock().unwrap().first().copied();
                            // Another thread may have freed it in the meantime.
                            let _stale = handle.map(|handle| allocator.record_use(handle, stream));
                        }
                        14 if random.below(2) == 0 => drop(allocator.trim_pool(pool)),
                        14 => drop(allocator.trim_all()),
                        _ => drop(allocator.reserve(pool, stream, random.below(8) << 20)),
                    }
                }
            });
        }
    });
    allocator.check().expect("the invariants should hold");
    allocator.stop_recording().expect("the sink has space");
    replays(&sink.records(), config, 2 << 20, &digests(&allocator));
}

#[test]
fn a_recording_of_several_threads_replays_on_one() {
    for seed in 0..8 {
        for pool in [PoolConfig::builder().expandable(), PoolConfig::builder().fixed()] {
            let pool = pool.reclaim(Reclaim::Pool).build().expect("the configuration should be valid");
            let config = Config::builder()
                .default_pool(pool)
                .total_limit_bytes(Some(90 * MIB))
                .build()
                .expect("the configuration should be valid");
            threads_run(&config, seed);
        }
    }
}

/// A program is recorded with and without a sink that fails after a number of records: the outcomes are equal, and the error states the
/// number.
#[test]
fn a_failing_sink_does_not_affect_the_allocator() {
    for seed in 0..6 {
        let scenario = Scenario::from_seed(seed, 60);
        let run = |sink: Option<Memory>| {
            let allocator: Allocator<_> =
                Allocator::new(scenario.device(seed), scenario.config.clone()).expect("the arguments should be valid");
            let started = sink.map(|sink| allocator.start_recording(sink));
            let mut run = Run::new(&allocator, &scenario);
            let outcomes: Vec<_> = (0..scenario.program.ops().len()).map(|op| outcome(run.step(op))).collect();
            allocator.check().expect("the invariants should hold");
            let was_recording = allocator.is_recording();
            let stopped = allocator.stop_recording();
            assert!(matches!(allocator.stop_recording(), Err(RecordingError::NotRecording)));
            assert!(!allocator.is_recording());
            (outcomes, digests(&allocator), started, was_recording, stopped)
        };
        let (outcomes, expected, ..) = run(None);
        let whole = Memory::new();
        let (_, _, _, _, stopped) = run(Some(whole.clone()));
        let length = whole.records().len();
        assert_eq!(stopped.expect("the sink has space").records, length as u64);
        for room in 0..=length {
            let sink = Memory::with_room(room);
            let (others, digests, started, was_recording, stopped) = run(Some(sink.clone()));
            assert!(
                others == outcomes && digests == expected,
                "seed {seed}: a sink with capacity {room} changed the outcome"
            );
            match started.expect("a sink was given") {
                Err(StartRecordingError::Sink(error)) => {
                    assert_eq!((room, error.to_string().as_str()), (0, "the sink is full"));
                    assert!(matches!(stopped, Err(RecordingError::NotRecording)));
                }
                Err(other) => panic!("{other}"),
                Ok(()) if room == length => assert_eq!(stopped.expect("the sink has space").records, length as u64),
                Ok(()) => {
                    assert!(!was_recording);
                    let Err(RecordingError::Ended { records, source: RecordingEnd::Sink(_) }) = stopped else {
                        panic!("{stopped:?}")
                    };
                    assert_eq!(records, room as u64);
                    assert_eq!(sink.records(), whole.records()[..room]);
                    assert!(!sink.is_finished(), "a failed sink is not called again");
                }
            }
        }
    }
}

/// If a driver call fails, the recording either continues and replays, or ends with an error. In that case, the earlier
/// records replay up to the failure.
#[test]
fn a_driver_that_fails_in_the_middle_of_an_op_ends_the_recording() {
    let (mut ended, mut went_on) = (0, 0);
    for seed in 0..40 {
        let scenario = Scenario::from_seed(seed, 60);
        let calls = {
            let device = scenario.device(seed);
            let allocator: Allocator<_> =
                Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
            let mut run = Run::new(&allocator, &scenario);
            (0..scenario.program.ops().len()).for_each(|op| drop(run.step(op)));
            device.calls().fallible()
        };
        for ordinal in 0..calls {
            let _report = PrintOnPanic(&scenario);
            let device = scenario.device_builder(seed).fail_at(ordinal, Fault::Refused).build();
            let allocator: Allocator<_> =
                Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
            let sink = Memory::new();
            allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
            let mut run = Run::new(&allocator, &scenario);
            (0..scenario.program.ops().len()).for_each(|op| drop(run.step(op)));
            let whole = digests(&allocator);
            match allocator.stop_recording() {
                Ok(_) => {
                    replays(&sink.records(), &scenario.config, scenario.granularity_bytes, &whole);
                    went_on += 1;
                }
                Err(RecordingError::Ended { records, source: RecordingEnd::Driver(_) }) => {
                    assert_eq!(records, sink.records().len() as u64);
                    assert!(sink.is_finished(), "the earlier records are complete");
                    ended += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
    assert!(ended > 50 && went_on > 500, "{ended} {went_on}");
}

#[test]
fn a_recording_begins_before_the_first_allocation_and_once() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let pool = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let gone = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    allocator.destroy_pool(gone).expect("the pool should be empty");
    let (observer, _) = allocator.observe(pool).expect("the pool should exist");
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    assert!(matches!(allocator.start_recording(Memory::new()), Err(StartRecordingError::AlreadyRecording)));
    let a = allocator.allocate(pool, stream, 1 << 20).expect("memory should suffice");
    allocator.forget(observer).expect("no fault should be injected");
    allocator.forget(observer).expect("a repeated call is not recorded");
    assert_eq!(allocator.stop_recording().expect("the sink has space").records, 7);
    let lines: Vec<String> = sink.records().iter().map(|record| RecordLine(record).to_string()).collect();
    let pool_line = |id: u32| format!("pool p{id} {}", PoolConfig::default());
    let expected = [
        "stream s0",
        &pool_line(1),
        &pool_line(2),
        "destroy p2",
        "observe o0 p1",
        "a 0 1048576 s0 p1 -> 0@0",
        "forget o0",
    ];
    assert_eq!(lines, expected);
    allocator.free(a.handle).expect("the allocation should be live");
    let late = allocator.start_recording(Memory::new()).expect_err("the pool was used");
    assert!(matches!(late, StartRecordingError::InUse { pool: used, .. } if used == pool), "{late}");
    assert_eq!(sink.records().len(), 7);
}

#[test]
fn a_restored_pool_ends_the_recording() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let sink = Memory::new();
    let layout = allocator.save_layout(PoolId::DEFAULT).expect("the pool should exist");
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    let pool = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let _live = allocator.allocate(pool, stream, 1 << 20).expect("memory should suffice");
    allocator.restore_layout(PoolId::DEFAULT, &layout).expect("the pool is fresh");
    assert!(!allocator.is_recording());
    let _live = allocator.allocate(PoolId::DEFAULT, stream, 1 << 20).expect("memory should suffice");
    let Err(RecordingError::Ended { records: 3, source: RecordingEnd::Restored { pool: PoolId::DEFAULT } }) =
        allocator.stop_recording()
    else {
        panic!("the default pool was restored after three records");
    };
    assert_eq!(sink.records().len(), 3);
}

/// A limit that was changed earlier is part of the recording's configuration.
#[test]
fn a_change_of_the_limit_ends_the_recording() {
    #[derive(Clone, Default)]
    struct Begun(Arc<Mutex<Option<Config>>>);
    impl Sink for Begun {
        fn begin(&mut self, config: &Config) -> Result<(), SinkError> {
            *self.0.lock().unwrap() = Some(config.clone());
            Ok(())
        }
        fn record(&mut self, _: Record) -> Result<(), SinkError> {
            Ok(())
        }
        fn finish(&mut self) -> Result<(), SinkError> {
            Ok(())
        }
    }

    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let (stream, sink) = (allocator.register_stream().expect("a stream id is available"), Begun::default());
    allocator.set_total_limit_bytes(Some(64 * MIB));
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    assert_eq!(sink.0.lock().unwrap().as_ref().and_then(Config::total_limit_bytes), Some(64 * MIB));
    let _live = allocator.allocate(PoolId::DEFAULT, stream, MIB).expect("memory should suffice");
    allocator.set_total_limit_bytes(Some(64 * MIB));
    assert!(allocator.is_recording(), "nothing has changed");
    allocator.set_total_limit_bytes(Some(32 * MIB));
    assert!(!allocator.is_recording());
    assert!(allocator.allocate(PoolId::DEFAULT, stream, 40 * MIB).is_err());
    assert!(matches!(
        allocator.stop_recording(),
        Err(RecordingError::Ended { records: 2, source: RecordingEnd::LimitChanged })
    ));
}

#[test]
fn a_segment_that_dies_under_its_observer_ends_the_recording() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
    let a = allocator.allocate(PoolId::DEFAULT, stream, 1 << 20).expect("memory should suffice");
    let unread = allocator.unread(observer);
    allocator.free(a.handle).expect("the allocation should be live");
    allocator.trim_all().expect("no fault should be injected");
    allocator.acknowledge(observer, &unread).expect("no fault should be injected");
    assert!(matches!(
        allocator.stop_recording(),
        Err(RecordingError::Ended { records: 5, source: RecordingEnd::LateDeath })
    ));
}

/// Events already read by the observer do not include a heap that is created later.
#[test]
fn a_segment_that_dies_in_a_heap_the_observer_has_not_seen_ends_the_recording() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    allocator.start_recording(Memory::new()).expect("nothing should have been allocated");
    let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
    let unread = allocator.unread(observer);
    let a = allocator.allocate(PoolId::DEFAULT, stream, 1 << 20).expect("memory should suffice");
    allocator.free(a.handle).expect("the allocation should be live");
    allocator.trim_all().expect("no fault should be injected");
    allocator.acknowledge(observer, &unread).expect("no fault should be injected");
    assert!(matches!(
        allocator.stop_recording(),
        Err(RecordingError::Ended { records: 5, source: RecordingEnd::LateDeath })
    ));
}

/// An agreement counts as a sync, and is recorded as one.
#[test]
fn ranks_that_agree_record_a_sync() {
    let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), config).expect("the arguments should be valid");
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    let stream = allocator.register_stream().expect("a stream id is available");
    let _live = allocator.allocate(PoolId::DEFAULT, stream, 1 << 20).expect("memory should suffice");
    agree_in_lockstep(&[RankHistory::new(&allocator, Point::Sync)]).expect("one rank should suffice");
    agree_in_lockstep(&[RankHistory::new(&allocator, Point::Op)]).expect("one rank should suffice");
    allocator.stop_recording().expect("the sink has space");
    assert_eq!(sink.records().iter().filter(|record| record.op == Op::Sync).count(), 1);
}

/// Recording a recorded job again produces the same ops and names, with this allocator's placements. Recording that recording again
/// produces the same bytes.
#[test]
fn recorded_jobs_are_recorded_again_byte_for_byte() {
    for job in jobs::JOBS {
        let original = jobs::records(job);
        let record = |records: &[Record]| {
            let program = Program::new(records).expect("a recorded job");
            let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), Config::default())
                .expect("the arguments should be valid");
            let sink = Memory::new();
            allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
            let mut replay = Replay::new(&allocator, &program);
            replay.run(|_, _| {}).expect("the job fits");
            allocator.stop_recording().expect("the sink has space");
            Trace::new(Some(Config::default()), sink.records()).expect("the records should be consistent")
        };
        let once = record(&original);
        let dense = Program::new(&original).expect("a recorded job");
        let ops: Vec<&Op> = once.records().iter().map(|record| &record.op).collect();
        assert!(ops.iter().copied().eq(dense.ops()), "{job}: ops differ from the job's");
        let names = |records: &[Record]| records.iter().map(|record| record.name.clone()).collect::<Vec<_>>();
        assert!(names(once.records()) == names(&original), "{job}: names differ from the job's");
        assert!(record(once.records()).to_text() == once.to_text(), "{job}: recording it again changes the text");
    }
}

/// A trace cannot contain a double free, and an allocator rejects it.
#[test]
fn an_allocation_of_zero_bytes_that_is_freed_twice_is_refused_and_recorded_once() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    allocator.start_recording(Memory::new()).expect("nothing should have been allocated");
    let handle = allocator.allocate(PoolId::DEFAULT, stream, 0).expect("no memory").handle;
    allocator.free(handle).expect("the allocation should be live");
    assert_eq!(allocator.free(handle), Err(HandleError::Stale { handle }.into()));
    assert_eq!(allocator.stop_recording().expect("the recording should be complete").records, 3);
}

/// The recording does not contain the allocations, because it began after their pool was destroyed.
#[test]
fn zero_bytes_of_a_destroyed_pool_are_freed_without_a_record() {
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let pool = allocator.create_pool(PoolConfig::default()).expect("the pool should be created");
    let nothing = allocator.allocate(pool, stream, 0).expect("it needs no memory").handle;
    allocator.destroy_pool(pool).expect("no memory is allocated");
    allocator.start_recording(Memory::new()).expect("nothing should be live in the pool");
    let _either = allocator.free(nothing);
    allocator.stop_recording().expect("the recording should be complete");
}
