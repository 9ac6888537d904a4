//! The debugging options while driver calls fail, streams are captured, and threads sleep, trim and reset pools.

use super::{NEW, allocator, named, overwrite};
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use symmalloc_core::config::Config;
use symmalloc_core::debug::MemoryDamage;
use symmalloc_core::errors::PoolError;
use symmalloc_core::op::Contents;
use symmalloc_core::units::MIB;
use symmalloc_core::{PoolId, SharedAllocator, StreamId};
use symmalloc_sim::{Call, Delays, Fault, FaultRule, SimBackend, SplitMix64};

#[test]
fn a_failed_destroy_or_reset_keeps_the_quarantine() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:canary");
    let pool = allocator.create_pool("debug:[quarantine_mb:64]".parse().expect("valid")).expect("valid");
    let freed = allocator.allocate(pool, stream, MIB).expect("there is memory");
    let live = allocator.allocate(pool, stream, MIB).expect("there is memory");
    allocator.free(freed.handle).expect("live");
    let digest = allocator.digest(pool);
    assert!(matches!(allocator.destroy_pool(pool), Err(PoolError::InUse { .. })));
    assert!(matches!(allocator.reset_unused_pool(pool), Err(PoolError::InUse { .. })));
    assert_eq!(allocator.digest(pool), digest);
    let next = allocator.allocate(pool, stream, MIB).expect("there is memory");
    assert_ne!(next.placement, freed.placement, "the block is still in the quarantine");
    allocator.free(next.handle).expect("live");
    allocator.free(live.handle).expect("live");
    allocator.destroy_pool(pool).map(drop).expect("nothing is live");
}

#[test]
fn a_failing_driver_does_not_change_when_blocks_leave_the_quarantine() {
    let run = |failing: Option<Call>| {
        let device = SimBackend::builder().build();
        let (allocator, [stream, other]) = allocator(&device, "debug:[poison,quarantine_mb:2]");
        let mut placements = Vec::new();
        for round in 0..12 {
            let block = named(&allocator, stream, MIB, "block");
            placements.push(block.placement);
            allocator.record_use(block.handle, other).expect("live");
            if let (6, Some(call)) = (round, failing) {
                device.inject(Some(call), FaultRule::Every { calls: 1 }, Fault::Refused);
            }
            let freed = allocator.free(block.handle);
            device.heal();
            if freed.is_err() {
                assert_eq!(device.read(block.address, block.size_bytes), Some(NEW), "a failed free changes nothing");
                allocator.free(block.handle).expect("still live");
            }
            allocator.check().expect("consistent");
        }
        (placements, allocator.digest(PoolId::DEFAULT))
    };
    let expected = run(None);
    for call in [Call::Record, Call::Wait, Call::Fill, Call::Compare, Call::Synchronize] {
        assert_eq!(run(Some(call)), expected, "{call}");
    }
}

#[test]
fn a_reset_empties_the_quarantine_also_if_events_fail() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "debug:canary");
    let pool = allocator.create_pool("debug:[poison,quarantine_mb:1]".parse().expect("valid")).expect("valid");
    for _ in 0..3 {
        let blocks = [(); 3].map(|()| allocator.allocate(pool, stream, MIB).expect("there is memory"));
        blocks.iter().for_each(|block| allocator.record_use(block.handle, other).expect("live"));
        allocator.free(blocks[0].handle).expect("live");
        device.inject(Some(Call::Record), FaultRule::Every { calls: 1 }, Fault::Refused);
        allocator.reset_pool(pool).map(drop).expect("it exists");
        device.heal();
    }
    // Blocks leave as in a new pool.
    let mut seen = BTreeSet::new();
    for _ in 0..8 {
        let block = allocator.allocate(pool, stream, MIB).expect("there is memory");
        seen.insert(block.placement);
        allocator.free(block.handle).expect("live");
    }
    assert_eq!(seen.len(), 2, "one block is in the quarantine, and one is used: {seen:?}");
    allocator.check().expect("consistent");
}

#[test]
fn reported_damage_does_not_depend_on_when_comparisons_complete() {
    let run = |seed: u64, slow: bool| {
        let delays = if slow { Delays::UpTo { ticks: 1000 } } else { Delays::Immediate };
        let device = SimBackend::builder().seed(seed).delays(delays).build();
        let (allocator, [stream, _]) = allocator(&device, "debug:[canary,poison,quarantine_mb:4]");
        let pool = allocator.create_pool("debug:canary".parse().expect("valid")).expect("valid");
        let mut reports = Vec::new();
        for round in 0..40_u64 {
            let blocks = ["a", "b", "c"].map(|name| named(&allocator, stream, 4000, name));
            let other = allocator.allocate(pool, stream, 4000).expect("there is memory");
            overwrite(&device, &blocks[(round % 3) as usize], 4000);
            overwrite(&device, &other, 4004);
            blocks.iter().for_each(|block| allocator.free(block.handle).expect("live"));
            let next = named(&allocator, stream, 4000, "next");
            overwrite(&device, &blocks[0], 16);
            allocator.free(next.handle).expect("live");
            allocator.free(other.handle).expect("live");
            if round % 9 == 8 {
                reports.push(allocator.check_memory().map_err(|damage| {
                    let (MemoryDamage::Guard { block, offset_bytes, .. }
                    | MemoryDamage::WrittenAfterFree { block, offset_bytes, .. }) = &*damage
                    else {
                        panic!("{damage:?}")
                    };
                    (block.pool, block.name.clone(), block.allocated_at_op, *offset_bytes)
                }));
            }
        }
        while let Err(damage) = allocator.check_memory() {
            let (MemoryDamage::Guard { block, offset_bytes, .. }
            | MemoryDamage::WrittenAfterFree { block, offset_bytes, .. }) = &*damage
            else {
                panic!("{damage:?}")
            };
            reports.push(Err((block.pool, block.name.clone(), block.allocated_at_op, *offset_bytes)));
        }
        reports
    };
    let expected = run(1, false);
    assert!(expected.len() > 80, "{expected:?}");
    for seed in 2..6 {
        assert_eq!(run(seed, true), expected);
    }
}

#[test]
fn nothing_is_submitted_to_a_captured_stream() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "debug:[poison,canary,quarantine_mb:1]");
    let [before, used, idle] = ["before", "used", "idle"].map(|name| named(&allocator, stream, MIB, name));
    device.set_captured(stream, true);
    let inside = named(&allocator, stream, MIB, "inside");
    allocator.free(before.handle).expect("live");
    assert_eq!(allocator.check_memory(), Ok(0), "the guards of a captured stream cannot be read");
    allocator.sleep(PoolId::DEFAULT, Contents::Drop).map(drop).expect("it works");
    allocator.wake(PoolId::DEFAULT).map(drop).expect("it works");
    device.set_captured(stream, false);
    assert_eq!(allocator.check_memory(), Ok(0), "guards that were not written are not checked");
    // Launches of the graph write to this block at any time.
    overwrite(&device, &inside, MIB as i64);
    allocator.free(inside.handle).expect("live");
    overwrite(&device, &inside, 0);
    allocator.free(idle.handle).expect("live");
    allocator.record_use(used.handle, other).expect("live");
    device.write(used.address, MIB, 3);
    device.set_captured(other, true);
    allocator.free(used.handle).expect("live");
    device.set_captured(other, false);
    let _next = named(&allocator, stream, MIB, "next");
    assert_eq!(device.read(used.address, MIB), Some(3), "a captured use cannot be waited for");
    allocator.check_memory().map(drop).expect("no damage");
}

#[test]
fn a_capture_delays_only_the_checks_of_its_own_heap() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "debug:canary");
    let first = named(&allocator, stream, 4000, "first");
    let kept = named(&allocator, stream, 4000, "kept");
    allocator.free(first.handle).expect("live");
    device.set_captured(stream, true);
    let block = named(&allocator, other, 4000, "block");
    overwrite(&device, &block, 4000);
    allocator.free(block.handle).expect("live");
    assert!(allocator.check_memory().is_err());
    device.set_captured(stream, false);
    overwrite(&device, &kept, 4000);
    // The guard is compared: the block was allocated before the capture.
    assert!(allocator.check_memory().is_err());
}

#[test]
fn threads_can_free_while_others_sleep_trim_reset_and_check() {
    const THREADS: u16 = 3;
    for (options, seed) in
        [("poison,canary", 1), ("poison,canary,quarantine_mb:3", 2), ("poison,quarantine_mb:1,unmap", 3)]
    {
        let device = SimBackend::builder().seed(seed).delays(Delays::default()).build();
        let config: Config = format!("pointer_lookup:exact,debug:[{options}]").parse().expect("valid");
        let allocator = SharedAllocator::new(device, config.clone()).expect("valid");
        for _ in 0..THREADS {
            allocator.register_stream().map(drop).expect("an id");
        }
        let pool = allocator.create_pool(config.default_pool().clone()).expect("valid");
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let work = |stream: u16| {
                let allocator = &allocator;
                move || {
                    let mut random = SplitMix64::new(seed ^ u64::from(stream));
                    let mut live = VecDeque::new();
                    for _ in 0..1500 {
                        let pool = if random.below(2) == 0 { pool } else { PoolId::DEFAULT };
                        // The pool may sleep.
                        if let Ok(block) = allocator.allocate(pool, StreamId(stream), 1 + random.below(3 * MIB)) {
                            if random.below(3) == 0 {
                                let other = StreamId(random.below(THREADS.into()) as u16);
                                // A reset may have freed it.
                                let _stale = allocator.record_use(block.handle, other);
                            }
                            live.push_back(block.handle);
                        }
                        if live.len() > 6 {
                            let _stale = allocator.free(live.pop_front().expect("not empty"));
                        }
                    }
                }
            };
            let workers = [0, 1, 2].map(|stream| scope.spawn(work(stream)));
            let disturbing = scope.spawn(|| {
                let mut random = SplitMix64::new(seed);
                while !is_done.load(Ordering::Relaxed) {
                    match random.below(6) {
                        0 => drop(allocator.trim_all()),
                        1 => drop(allocator.reset_pool(pool)),
                        2 | 3 => {
                            drop(allocator.sleep(PoolId::DEFAULT, Contents::ALL[random.below(3) as usize]));
                            drop(allocator.wake(PoolId::DEFAULT));
                        }
                        _ => assert!(allocator.check_memory().is_ok(), "a false alarm"),
                    }
                }
            });
            let outcomes = workers.map(std::thread::ScopedJoinHandle::join);
            is_done.store(true, Ordering::Relaxed);
            outcomes.into_iter().for_each(|outcome| outcome.expect("no violation"));
            disturbing.join().expect("no violation");
        });
        allocator.check().expect("consistent");
        allocator.check_memory().map(drop).expect("no damage");
    }
}

#[test]
fn a_failed_check_raises_no_alarm_and_fails_no_op() {
    for call in [Call::Fill, Call::Compare, Call::Record, Call::Wait] {
        for ordinal in 0..8 {
            let device = SimBackend::builder().fail(Some(call), FaultRule::At { ordinal }, Fault::Refused).build();
            let (allocator, [stream, other]) = allocator(&device, "debug:[poison,canary,quarantine_mb:2]");
            for round in 0..6_u64 {
                // The allocation itself may have to wait for another stream.
                let allocate = || allocator.allocate(PoolId::DEFAULT, stream, MIB + round);
                let block = allocate().or_else(|_| allocate()).expect("the device works again");
                device.write(block.address, block.size_bytes, round);
                allocator.record_use(block.handle, other).expect("live");
                if allocator.free(block.handle).is_err() {
                    allocator.free(block.handle).expect("still live");
                }
            }
            assert!(allocator.check_memory().is_ok(), "{call}, {ordinal}");
        }
    }
}

#[test]
fn waking_an_awake_pool_keeps_the_damage() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:canary");
    let block = named(&allocator, stream, 4000, "block");
    overwrite(&device, &block, 4000);
    let _refused_or_unneeded = allocator.wake(PoolId::DEFAULT);
    allocator.check_memory().expect_err("the guard was overwritten");
}

#[test]
fn a_sleep_does_not_save_what_the_program_freed() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:[poison,quarantine_mb:64]");
    let freed = named(&allocator, stream, 8 * MIB, "freed");
    let _live = named(&allocator, stream, MIB, "live");
    allocator.free(freed.handle).expect("the allocation should be live");
    let slept = allocator.sleep(PoolId::DEFAULT, Contents::Keep).expect("the pool should sleep");
    assert_eq!(slept.kept_bytes, MIB);
    allocator.wake(PoolId::DEFAULT).expect("the pool should wake");
    assert_eq!(allocator.check_memory(), Ok(0), "no alarm for contents that were not saved");
}
