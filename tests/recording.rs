//! Recording: what a running allocator was asked replays to the same placements and the same digests, whatever it went
//! through: limits, refusals, failure callbacks, observers, threads. A sink that fails disturbs nothing.

use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use symmalloc_core::config::{Config, PoolConfig, Reclaim, StreamPolicy};
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::op::Record;
use symmalloc_core::recording::{RecordingError, Sink, SinkError, StartRecordingError};
use symmalloc_core::replay::{Program, Replay};
use symmalloc_core::sim::{Call, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_core::trace::Trace;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Backend, Digest, Handle, Op, PoolId, Retry, SharedAllocator, StreamId};
use symmalloc_harness::checker::PrintOnPanic;
use symmalloc_harness::generate::{Scenario, scenario_bytes};
use symmalloc_harness::jobs;

/// Records in memory, up to a number of them.
#[derive(Clone)]
struct Memory {
    records: Arc<Mutex<Vec<Record>>>,
    room: usize,
    is_finished: Arc<Mutex<bool>>,
}

impl Memory {
    fn new() -> Self {
        Memory::with_room(usize::MAX)
    }

    fn with_room(room: usize) -> Self {
        Memory { records: Arc::default(), room, is_finished: Arc::default() }
    }

    fn records(&self) -> Vec<Record> {
        self.records.lock().unwrap().clone()
    }
}

impl Sink for Memory {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        if self.room == 0 { Err("no room".into()) } else { Ok(()) }
    }

    fn record(&mut self, record: Record) -> Result<(), SinkError> {
        assert!(!*self.is_finished.lock().unwrap(), "a record after the end");
        let mut records = self.records.lock().unwrap();
        if records.len() == self.room {
            return Err("no room".into());
        }
        records.push(record);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SinkError> {
        *self.is_finished.lock().unwrap() = true;
        Ok(())
    }
}

fn digests<B: Backend, L: Lock>(allocator: &Allocator<B, L>) -> Vec<Option<Digest>> {
    (0..allocator.pool_count()).map(|pool| allocator.digest(PoolId(pool)).ok()).collect()
}

/// Replays what was recorded on another rank. Every placement is the recorded one, and so is every digest; recorded again,
/// it is the same recording.
fn replays(records: &[Record], config: &Config, granularity_bytes: u64, expected: &[Option<Digest>]) {
    let trace = Trace::new(Some(config.clone()), records.to_vec()).expect("a recording is a trace");
    assert_eq!(Trace::parse(&trace.to_text()).expect("text"), trace);
    let program = Program::new(records).expect("a recording is a program");
    let device = SimBackend::builder().seed(77).granularity_bytes(granularity_bytes).memory_bytes(1 << 50).build();
    let allocator: Allocator<_> = Allocator::new(&device, config.clone()).expect("valid");
    let again = Memory::new();
    allocator.start_recording(again.clone()).expect("nothing was allocated");
    let mut replay = Replay::new(&allocator, &program);
    for (index, (op, record)) in program.ops().iter().zip(records).enumerate() {
        let made = replay.step(op).unwrap_or_else(|error| panic!("record {index}, {record}: {error}"));
        let placement = made.filter(|made| made.size_bytes > 0).map(|made| made.placement);
        assert_eq!(placement, record.placement, "record {index}: {record}");
    }
    allocator.check().expect("sound");
    assert_eq!(digests(&allocator), expected);
    assert_eq!(allocator.stop_recording().expect("a sink with room").records, records.len() as u64);
    let again = again.records();
    let differs = again.iter().zip(records).position(|(one, other)| one != other);
    assert_eq!(differs.map(|index| (&again[index], &records[index])), None);
    assert_eq!(again.len(), records.len());
}

/// A program that makes every kind of call, with a driver that sometimes has no memory: observers that come and go, fences
/// that are dropped, a failure callback that frees what it can.
fn adverse_run<L: Lock>(scenario: &Scenario, seed: u64, refusals_per_million: u32) -> usize {
    let _report = PrintOnPanic(scenario);
    let rule = FaultRule::Chance { per_million: refusals_per_million };
    let device = scenario.device_builder(seed).fail(Some(Call::Map), rule, Fault::OutOfMemory).build();
    let allocator = Allocator::<_, L>::new(&device, scenario.config.clone()).expect("valid");
    let spare = Arc::new(Mutex::new(Vec::<Handle>::new()));
    let freed = Arc::clone(&spare);
    allocator.set_failure_callback(move |allocator, error| {
        if let Some(handle) = freed.lock().unwrap().pop() {
            allocator.free(handle).expect("nobody else has it");
            return Retry::Again;
        }
        match error.requested_bytes % 3 {
            0 => Retry::GiveUp,
            _ if allocator.trim(None).expect("only maps fail") > 0 => Retry::Again,
            _ => Retry::GiveUp,
        }
    });
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing was allocated");
    let mut replay = Replay::new(&allocator, &scenario.program);
    let mut random = SplitMix64::new(seed);
    let mut observer = None;
    for op in scenario.program.ops() {
        let _refused_or_not = replay.step(op);
        match (random.below(12), observer) {
            (0, _) => drop(allocator.drop_completed_fences()),
            (1..3, None) => observer = allocator.observe(PoolId::DEFAULT).ok().map(|(observer, _)| observer),
            (3, Some(observer)) => {
                drop(allocator.acknowledge(observer, &allocator.unread(observer)).expect("no fault"))
            }
            (4, Some(forgotten)) => {
                allocator.forget(forgotten).expect("no fault");
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
    allocator.check().expect("sound");
    assert!(allocator.is_recording());
    let recorded = allocator.stop_recording().expect("a sink with room");
    let records = sink.records();
    assert_eq!(recorded.records, records.len() as u64);
    assert!(*sink.is_finished.lock().unwrap());
    replays(&records, &scenario.config, scenario.granularity_bytes, &digests(&allocator));
    records.iter().filter(|record| matches!(record.op, Op::Refuse { .. } | Op::Reclaim { .. })).count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_is_recorded_replays_to_the_same_placements_and_digests(bytes in scenario_bytes(120), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        adverse_run::<Exclusive>(&scenario, seed, 0);
        adverse_run::<Shared>(&scenario, seed, 150_000);
    }
}
