//! The debugging options: what each of them finds, and that none of them changes more than it says.

#[path = "debugging/poison.rs"]
mod poison;
#[path = "debugging/robustness.rs"]
mod robustness;

use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use symmalloc_core::backend::{Backend, DeviceAddress};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::debug::{DebugOptions, MemoryDamage};
use symmalloc_core::errors::{FreeError, HandleError, RecordUseError};
use symmalloc_core::lock::Exclusive;
use symmalloc_core::op::Contents;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::restore::LayoutError;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, AllocationId, Allocator, Op, Placement, PoolId, StreamId};
use symmalloc_harness::checker::decisions;
use symmalloc_harness::generate::{Scenario, scenario_bytes};
use symmalloc_harness::memory::Memory;
use symmalloc_harness::oracle::Outcome;
use symmalloc_sim::{Delays, Fault, FaultRule, SimBackend};
use symmalloc_trace::replay::{Program, Replay};

const NEW: u64 = 0x7FFF_7FFF;
const FREED: u64 = 0xFFFF_7FFF;

/// An allocator with these options in its default pool, and two streams.
fn allocator<'d>(device: &'d SimBackend, options: &str) -> (Allocator<&'d SimBackend>, [StreamId; 2]) {
    let config: Config = format!("pointer_lookup:exact,{options}").parse().unwrap_or_else(|error| panic!("{error}"));
    let allocator = Allocator::new(device, config).expect("a valid granularity");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("an id"));
    (allocator, streams)
}

fn named(allocator: &Allocator<&SimBackend>, stream: StreamId, bytes: u64, name: &str) -> Allocation {
    allocator.allocate_named(PoolId::DEFAULT, stream, bytes, name).expect("there is memory")
}

/// Overwrites four bytes at an offset from the start of an allocation.
fn overwrite(device: &SimBackend, allocation: &Allocation, offset: i64) {
    device.write(DeviceAddress(allocation.address.0.wrapping_add_signed(offset)), 4, 7);
}

fn options(text: &str) -> DebugOptions {
    text.parse::<PoolConfig>().unwrap_or_else(|error| panic!("{error}")).debug()
}

#[test]
fn new_and_freed_memory_holds_patterns_that_are_nan() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:poison");
    let block = named(&allocator, stream, 3 * MIB, "block");
    assert_eq!(device.read(block.address, block.size_bytes), Some(NEW));
    let _after = named(&allocator, stream, MIB, "after");
    allocator.free(block.handle).expect("live");
    let _next = named(&allocator, stream, 32 * MIB, "next");
    assert_eq!(device.read(block.address, block.size_bytes), Some(FREED));
    for pattern in [NEW as u32, FREED as u32] {
        assert!(f32::from_bits(pattern).is_nan());
        assert!(f64::from_bits(u64::from(pattern) << 32 | u64::from(pattern)).is_nan());
        for half in [pattern as u16, (pattern >> 16) as u16] {
            assert!(half & 0x7C00 == 0x7C00 && half & 0x03FF != 0, "NaN as f16");
            assert!(half & 0x7F80 == 0x7F80 && half & 0x007F != 0, "NaN as bf16");
        }
    }
}

/// The poison of a freed block must not reach work of another stream that still reads the block.
#[test]
fn freed_memory_is_poisoned_after_all_streams_that_used_it() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "debug:poison");
    let block = named(&allocator, stream, MIB, "block");
    let event = device.record(stream).expect("it works");
    device.wait(other, event).expect("it works");
    device.recycle(event);
    device.submit(other, block.address, MIB).expect("ordered");
    allocator.record_use(block.handle, other).expect("live");
    let _after = named(&allocator, stream, MIB, "after");
    allocator.free(block.handle).expect("live");
    // The simulator panics at an unordered fill.
    let _next = named(&allocator, stream, 32 * MIB, "next");
    assert_eq!(device.read(block.address, MIB), Some(FREED));
}

#[test]
fn an_overrun_is_found_at_the_free_and_names_the_block_and_its_neighbor() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:canary");
    let scores = named(&allocator, stream, 4000, "scores");
    let _weights = named(&allocator, stream, 4000, "weights");
    assert_eq!(scores.size_bytes, 4000, "the guard is not the program's");
    overwrite(&device, &scores, 4000);
    allocator.free(scores.handle).expect("live");
    device.synchronize(stream).expect("it works");
    let damage = allocator.check_memory().expect_err("the byte was overwritten");
    let MemoryDamage::Guard { block, next, offset_bytes: 0, .. } = &*damage else { panic!("{damage:?}") };
    assert_eq!((block.name.as_deref(), block.requested_bytes, block.stream), (Some("scores"), 4000, stream));
    assert_eq!(next.as_ref().and_then(|next| next.name.as_deref()), Some("weights"));
    let text = damage.to_string();
    for part in ["\"scores\"", "3.91 KiB", "p0, s0", "\"weights\"", "check the bounds"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(allocator.check_memory(), Ok(1), "it is returned once");
}

#[test]
fn an_overrun_is_found_while_the_block_is_live_and_when_the_allocator_ends() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:canary");
    let blocks = [4000, 4096, 5, 1].map(|bytes| named(&allocator, stream, bytes, "block"));
    assert_eq!(allocator.check_memory(), Ok(4));
    for (block, bytes) in blocks.iter().zip([4000, 4096, 5, 1]) {
        overwrite(&device, block, bytes);
        assert!(matches!(
            &*allocator.check_memory().expect_err("damaged"),
            MemoryDamage::Guard { offset_bytes: 0, .. }
        ));
    }
    assert_eq!(allocator.check_memory(), Ok(4), "each is reported once");
}

#[test]
fn an_underrun_damages_the_guard_of_the_block_in_front() {
    for frees in ["weights", "scores"] {
        let device = SimBackend::builder().build();
        let (allocator, [stream, _]) = allocator(&device, "debug:[canary,quarantine_mb:1]");
        let scores = named(&allocator, stream, 4000, "scores");
        let weights = named(&allocator, stream, 4000, "weights");
        overwrite(&device, &weights, -4);
        // The guard stays as long as its block is in the quarantine.
        allocator.free(if frees == "weights" { weights.handle } else { scores.handle }).expect("live");
        let damage = allocator.check_memory().expect_err("damaged");
        let MemoryDamage::Guard { block, next, offset_bytes, .. } = &*damage else { panic!("{damage:?}") };
        assert_eq!(block.name.as_deref(), Some("scores"));
        assert_eq!(next.as_ref().and_then(|next| next.name.as_deref()), Some("weights"));
        assert_eq!(scores.address.0 + 4000 + offset_bytes, weights.address.0 - 4);
    }
}

#[test]
fn reused_and_released_memory_raises_no_alarm() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:canary");
    // Its guard ends at a granule, and is released with it.
    let first = named(&allocator, stream, 4 * MIB - 512, "first");
    let second = named(&allocator, stream, 3 * MIB, "second");
    let _third = named(&allocator, stream, 3 * MIB, "third");
    allocator.free(first.handle).expect("live");
    allocator.trim_all().expect("it works");
    let again = named(&allocator, stream, MIB, "again");
    device.write(again.address, MIB, 1);
    allocator.free(second.handle).expect("live");
    assert_eq!(allocator.check_memory(), Ok(2));
}

#[test]
fn a_write_after_free_is_found_in_the_quarantine_and_when_the_block_leaves_it() {
    for (offset, leaves) in [(0, false), (0, true), (8 * MIB as i64 - 4, false), (8 * MIB as i64 - 4, true)] {
        let device = SimBackend::builder().build();
        let (allocator, [stream, _]) = allocator(&device, "debug:[poison,quarantine_mb:16]");
        let scores = named(&allocator, stream, 8 * MIB, "scores");
        allocator.free(scores.handle).expect("live");
        let _next = named(&allocator, stream, MIB, "next");
        overwrite(&device, &scores, offset);
        if leaves {
            for _ in 0..2 {
                let other = named(&allocator, stream, 8 * MIB, "other");
                assert_ne!(other.placement, scores.placement, "it is still in the quarantine");
                allocator.free(other.handle).expect("live");
            }
            device.write(named(&allocator, stream, 8 * MIB, "reused").address, 8 * MIB, 0);
        }
        let damage = allocator.check_memory().expect_err("damaged");
        let MemoryDamage::WrittenAfterFree { block, .. } = &*damage else { panic!("{damage:?}") };
        assert_eq!(block.name.as_deref(), Some("scores"));
        assert!(block.freed_at_op.is_some());
    }
}

#[test]
fn a_quarantined_block_is_not_live() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "debug:[quarantine_mb:16]");
    let block = named(&allocator, stream, MIB, "block");
    allocator.free(block.handle).expect("live");
    let stale = HandleError::Stale { handle: block.handle };
    assert_eq!(allocator.free(block.handle), Err(FreeError::Handle(stale)));
    let unknown = HandleError::InteriorAddress { address: block.address };
    assert_eq!(allocator.free_at(block.address), Err(FreeError::Handle(unknown)));
    assert_eq!(allocator.record_use(block.handle, other), Err(RecordUseError::Handle(stale)));
    assert_eq!(allocator.record_use_at(block.address, other), Err(RecordUseError::Handle(unknown)));
    assert_eq!(allocator.handle_at(block.address), Err(unknown));
    assert_eq!(allocator.allocation(block.handle), Err(stale));
    assert!(!allocator.is_live(block.handle));
    let report = allocator.explain_address(block.address);
    assert!(matches!(report.block.map(|block| block.state), Some(BlockStateSnapshot::Free { .. })));
    allocator.check().expect("consistent");
    assert_eq!(allocator.save_layout(PoolId::DEFAULT), Err(LayoutError::Quarantined { pool: PoolId::DEFAULT }));
}

#[test]
fn a_pool_with_a_quarantine_can_be_reset_and_destroyed() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:canary");
    let pool = allocator.create_pool("debug:[canary,quarantine_mb:64]".parse().expect("valid")).expect("valid");
    let first = allocator.allocate(pool, stream, MIB).expect("there is memory");
    let second = allocator.allocate(pool, stream, MIB).expect("there is memory");
    allocator.free(first.handle).expect("live");
    assert_eq!(allocator.reset_pool(pool).map(|emptied| emptied.allocations), Ok(1));
    assert!(allocator.free(second.handle).is_err());
    let third = allocator.allocate(pool, stream, MIB).expect("there is memory");
    assert_eq!(third.placement, first.placement);
    allocator.free(third.handle).expect("live");
    allocator.destroy_pool(pool).map(drop).expect("nothing is live");
}

#[test]
fn damage_of_a_destroyed_pool_is_still_reported() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "");
    let pool = allocator.create_pool("debug:[canary,poison,quarantine_mb:8]".parse().expect("valid")).expect("valid");
    let block = allocator.allocate_named(pool, stream, MIB, "late").expect("there is memory");
    allocator.free(block.handle).expect("live");
    let next = allocator.allocate(pool, stream, MIB).expect("there is memory");
    allocator.free(next.handle).expect("live");
    overwrite(&device, &block, 4096);
    allocator.destroy_pool(pool).map(drop).expect("nothing is live");
    let damage = allocator.check_memory().expect_err("damaged").to_string();
    assert!(damage.contains("\"late\"") && damage.contains("written after its free"), "{damage}");
    assert_eq!(allocator.check_memory(), Ok(0));
    let report = allocator.explain_address(DeviceAddress(block.address.0 + 8));
    assert_eq!(report.freed.len(), 1, "{report}");
}

#[test]
fn the_error_after_a_fault_names_what_was_freed_and_what_sleeps() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "debug:poison");
    let pool = allocator.create_pool(PoolConfig::default()).expect("valid");
    drop(allocator.allocate(pool, stream, MIB));
    allocator.sleep(pool, Contents::Drop).map(drop).expect("it works");
    let block = named(&allocator, stream, MIB, "block");
    let freed = named(&allocator, stream, MIB, "scores");
    allocator.free(freed.handle).expect("live");
    allocator.record_use(block.handle, other).expect("live");
    device.inject(None, FaultRule::Every { calls: 1 }, Fault::DeviceLost);
    for text in [
        allocator.free(block.handle).expect_err("the device is lost").to_string(),
        allocator.allocate(PoolId::DEFAULT, stream, 64 * MIB).expect_err("the device is lost").to_string(),
    ] {
        for part in ["the device is lost", "freed last, newest first: \"scores\"", "asleep, without memory: p1"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

/// Work of one thread must not reach memory that another one releases meanwhile. The simulator panics at an access to memory
/// that is not mapped, and when memory is unmapped before the streams that use it have completed.
#[test]
fn freed_memory_is_unmapped_in_whole_granules() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:unmap");
    let _first = named(&allocator, stream, MIB, "first");
    let second = named(&allocator, stream, 8 * MIB, "second");
    let _third = named(&allocator, stream, MIB, "third");
    let before = device.mapped_bytes();
    device.submit(stream, second.address, 8 * MIB).expect("ordered");
    allocator.free(second.handle).expect("live");
    assert_eq!(device.mapped_bytes(), before - 6 * MIB);
    let fault = std::panic::catch_unwind(|| device.read(DeviceAddress(second.address.0 + 4 * MIB), 4));
    assert!(fault.is_err(), "the memory is still mapped");
}

#[test]
fn a_pool_that_keeps_its_memory_cannot_unmap() {
    for text in ["segments:reserved,segment_mb:64,debug:unmap", "growth_mb:0,streams:shared,debug:unmap"] {
        let error = text.parse::<PoolConfig>().expect_err("it keeps its memory").to_string();
        assert!(error.contains("debug:unmap has no effect"), "{error}");
    }
}

#[test]
fn guards_survive_a_sleep_and_are_written_again_if_contents_are_dropped() {
    for contents in Contents::ALL {
        let device = SimBackend::builder().build();
        let (allocator, [stream, _]) = allocator(&device, "debug:[canary,poison,quarantine_mb:4]");
        let [first, second, third] = ["first", "second", "third"].map(|name| named(&allocator, stream, MIB, name));
        allocator.free(first.handle).expect("live");
        allocator.sleep(PoolId::DEFAULT, contents).map(drop).expect("it works");
        allocator.free(second.handle).expect("a sleeping pool accepts frees");
        allocator.wake(PoolId::DEFAULT).map(drop).expect("it works");
        assert_eq!(allocator.check_memory(), Ok(3), "with the blocks in the quarantine: {contents:?}");
        overwrite(&device, &third, MIB as i64);
        allocator.free(third.handle).expect("live");
        assert!(allocator.check_memory().is_err(), "{contents:?}");
    }
}

#[test]
fn an_address_is_explained_by_its_block_its_neighbors_and_its_history() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "debug:[canary,poison]");
    let [first, second, third] = ["first", "second", "third"].map(|name| named(&allocator, stream, 4000, name));
    allocator.record_use(second.handle, other).expect("live");
    let text = allocator.explain_address(DeviceAddress(second.address.0 + 16)).to_string();
    for part in ["byte 16 of the allocation \"second\"", "for s0", "used by s1", "before it", "\"first\"", "\"third\""]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = allocator.explain_address(DeviceAddress(first.address.0 + 4600)).to_string();
    assert!(text.contains("the address lies past"), "{text}");
    allocator.free(third.handle).expect("live");
    let report = allocator.explain_address(DeviceAddress(third.address.0 + 1));
    assert_eq!(report.freed.first().and_then(|freed| freed.name.as_deref()), Some("third"));
    assert!(report.to_string().contains("freed at op"), "{report}");
    assert_eq!(allocator.freed_last(8).len(), 1);
    let nowhere = allocator.explain_address(DeviceAddress(64));
    assert!(nowhere.to_string().contains("in no segment"), "{nowhere}");
}

/// A failed fill or comparison leaves memory unchecked, and fails no op.
#[test]
fn a_recording_with_debugging_options_replays_alike() {
    let text = "debug:[poison,canary,quarantine_mb:1,unmap]";
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, text);
    let memory = Memory::new();
    allocator.start_recording(memory.clone()).expect("unused");
    let mut live = VecDeque::new();
    for round in 0..60_u64 {
        live.push_back(named(&allocator, stream, 700 * (round * 7 % 11 + 1) * 512, "block"));
        if round % 3 != 0 {
            allocator.free(live.pop_front().expect("live").handle).expect("live");
        }
    }
    let digest = allocator.digest(PoolId::DEFAULT).expect("it exists");
    allocator.stop_recording().map(drop).expect("complete");
    let program = Program::new(&memory.records()).expect("valid");
    let other = SimBackend::builder().seed(5).build();
    let again = Allocator::new(&other, allocator.config().clone()).expect("valid");
    let mut replay = Replay::new(&again, &program);
    for op in program.ops() {
        replay.step(op).map(drop).expect("it replays");
    }
    assert_eq!(again.digest(PoolId::DEFAULT), Ok(digest));
}

#[test]
fn options_are_text_and_part_of_the_digest() {
    for text in
        ["debug:poison", "debug:[poison]", "debug:[canary,quarantine_mb:64]", "debug:[quarantine_bytes:1000,unmap]"]
    {
        let config: Config = text.parse().expect("valid");
        assert_eq!(config.to_string().parse::<Config>().as_ref(), Ok(&config), "{config}");
        assert_ne!(config.digest(), Config::default().digest());
    }
    assert_eq!("debug:[]".parse::<Config>(), Ok(Config::default()));
    let error = "debug:[poison,canari]".parse::<Config>().expect_err("no such option").to_string();
    assert_eq!(
        error,
        "byte 14: debug must be a list of poison, canary, quarantine_mb:N and unmap, as in [poison,canary]"
    );
    let error = "debug:quarantine_mb:99999999".parse::<Config>().expect_err("punctuation");
    assert!(error.to_string().contains("expected a comma"), "{error}");
}

fn placements(outcomes: &[Outcome]) -> Vec<Option<Placement>> {
    let placement = |outcome: &Outcome| match outcome {
        Outcome::Placed { placement, .. } => Some(*placement),
        _ => None,
    };
    outcomes.iter().map(placement).collect()
}

/// Executes a correct program, and checks that no option raises an alarm.
fn run(scenario: &Scenario, seed: u64) -> (Vec<Option<Placement>>, Vec<u64>) {
    let device = scenario.device_builder(seed).delays(Delays::default()).build();
    let mut alarm = None;
    let decided = decisions::<Exclusive>(scenario, &device, |index, op, _, allocator| {
        if index % 16 == 0 {
            alarm = alarm.take().or(allocator.check_memory().err().map(|damage| (op.clone(), damage)));
        }
    });
    assert!(alarm.is_none(), "a false alarm: {alarm:?}");
    (placements(&decided.outcomes), decided.digests.iter().map(|(_, digest)| digest.value).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_rank_places_alike_and_a_correct_program_raises_no_alarm(
        bytes in scenario_bytes(100),
        which in 1_usize..16,
        seeds in any::<[u64; 2]>(),
    ) {
        let mut chosen = DebugOptions::default();
        chosen.poison = which & 1 != 0;
        chosen.canary = which & 2 != 0;
        chosen.quarantine_bytes = if which & 4 != 0 { 3 * MIB } else { 0 };
        chosen.unmap = which & 8 != 0;
        let scenario = Scenario::from_bytes(&bytes).with_debug(chosen);
        prop_assert_eq!(run(&scenario, seeds[0]), run(&scenario, seeds[1]));
    }

    #[test]
    fn poison_changes_no_placement(bytes in scenario_bytes(100), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        let plain = run(&scenario, seed).0;
        prop_assert_eq!(run(&scenario.with_debug(options("debug:poison")), seed).0, plain);
    }

    /// A canary is the same program with larger requests.
    #[test]
    fn a_canary_only_enlarges_requests(bytes in scenario_bytes(100), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        let ops = scenario.ops().map(|(op, access)| match op {
            Op::Allocate { id, pool, stream, size_bytes } if size_bytes > 0 => {
                (Op::Allocate { id, pool, stream, size_bytes: size_bytes.saturating_add(512) }, access)
            }
            other => (other, access),
        });
        let grown = Scenario::new(scenario.config.clone(), scenario.granularity_bytes, ops.collect::<Vec<_>>());
        let expected = run(&grown, seed).0;
        prop_assert_eq!(run(&scenario.with_debug(options("debug:canary")), seed).0, expected);
    }

    /// A quarantine is the same program with later frees.
    #[test]
    fn a_quarantine_only_delays_frees(bytes in scenario_bytes(100), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        // A threshold is checked once for all blocks that an op frees.
        let has_no_threshold = |config: &PoolConfig| config.release_threshold_bytes().is_none();
        prop_assume!(has_no_threshold(scenario.config.default_pool()));
        prop_assume!(scenario.program.ops().iter().all(|op| match op {
            Op::CreatePool { config, .. } => has_no_threshold(config),
            _ => true,
        }));
        let expected = delayed(&scenario, seed, 3 * MIB);
        prop_assert_eq!(run(&scenario.with_debug(options("debug:[quarantine_mb:3]")), seed).0, expected);
    }
}

/// The naive quarantine: executes the frees of each heap later, in order, once more than `bytes_max` wait.
fn delayed(scenario: &Scenario, seed: u64, bytes_max: u64) -> Vec<Option<Placement>> {
    type Waiting = VecDeque<(AllocationId, u64)>;
    let device = scenario.device(seed);
    let allocator = Allocator::new(&device, scenario.config.clone()).expect("valid");
    let mut replay = Replay::new(&allocator, &scenario.program);
    let mut live: BTreeMap<AllocationId, (PoolId, StreamId, u64)> = BTreeMap::new();
    let mut waiting: BTreeMap<_, Waiting> = BTreeMap::new();
    let leave = |replay: &mut Replay<'_, _, _>, queue: &mut Waiting, bytes_max: u64| {
        while queue.iter().map(|(_, bytes)| bytes).sum::<u64>() > bytes_max {
            let (id, _) = queue.pop_front().expect("not empty");
            replay.step(&Op::Free { id }).map(drop).expect("it is live");
        }
    };
    let mut placed = Vec::new();
    for op in scenario.program.ops() {
        let mut placement = None;
        match op {
            Op::Free { id } => {
                let Some((pool, stream, bytes)) = live.remove(id) else {
                    placed.push(None);
                    continue;
                };
                if bytes == 0 {
                    replay.step(op).map(drop).expect("it is live");
                } else {
                    let streams = allocator.pool_config(pool).expect("live").streams();
                    let heap = (pool, streams.group_of(stream, &allocator.groups()));
                    let queue = waiting.entry(heap).or_default();
                    queue.push_back((*id, bytes));
                    leave(&mut replay, queue, bytes_max);
                }
            }
            Op::RecordUse { id, .. } if !live.contains_key(id) => {}
            Op::DestroyPool { pool }
                if allocator.observer_count(*pool) > 0
                    || live.values().any(|(of, _, bytes)| of == pool && *bytes > 0) =>
            {
                assert!(replay.step(op).is_err(), "it is in use");
            }
            Op::ResetPool { pool } | Op::DestroyPool { pool } => {
                for (_, queue) in waiting.iter_mut().filter(|((of, _), _)| of == pool) {
                    leave(&mut replay, queue, 0);
                }
                if replay.step(op).is_ok() && matches!(op, Op::ResetPool { .. }) {
                    live.retain(|_, (of, _, bytes)| of != pool || *bytes == 0);
                }
            }
            Op::Allocate { id, pool, stream, .. } => {
                if let Ok(Some(allocation)) = replay.step(op) {
                    placement = Some(allocation.placement);
                    live.insert(*id, (*pool, *stream, allocation.size_bytes));
                }
            }
            other => drop(replay.step(other)),
        }
        placed.push(placement);
    }
    placed
}
