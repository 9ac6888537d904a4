//! Control calls that run concurrently: one thread puts a pool to sleep or wakes it while others destroy it, query it, trim it, read its
//! segments or make it grow. Each call takes effect as a whole or returns a typed error.

use super::explored::{Shared, assert_nothing_is_left, explore, shared};
use shuttle::sync::Arc;
use shuttle::thread;
use std::sync::atomic::{AtomicUsize, Ordering};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, PoolError, UnknownError};
use symmalloc_core::op::Contents;
use symmalloc_core::segment_log::{SegmentEvent, SegmentEventKind};
use symmalloc_core::sleep::{Phase, SleepCause};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, PoolId, StreamId};

const VALUE: u64 = 7;

/// Creates a pool that holds one block with contents, and free memory.
fn pool_with_a_block(allocator: &Shared, config: PoolConfig) -> (PoolId, Allocation) {
    let pool = allocator.create_pool(config).expect("the pool is created");
    let [kept, freed] =
        [0, 1].map(|stream| allocator.allocate(pool, StreamId(stream), 3 * MIB).expect("no limit should be reached"));
    allocator.backend().inner.write(kept.address, kept.size_bytes, VALUE);
    allocator.free(freed.handle).expect("the allocation should be live");
    (pool, kept)
}

#[track_caller]
fn holds(allocator: &Shared, kept: &Allocation) {
    assert_eq!(allocator.backend().inner.read(kept.address, kept.size_bytes), Some(VALUE));
}

#[test]
fn a_pool_that_one_thread_destroys_sleeps_and_wakes_as_a_whole_or_not_at_all() {
    explore(700, || {
        let allocator = shared(&Config::default(), 21);
        let (pool, kept) = pool_with_a_block(&allocator, PoolConfig::default());
        let sleepers = [Contents::Keep, Contents::Zero].map(|contents| {
            let allocator = Arc::clone(&allocator);
            thread::spawn(move || {
                let outcomes = [allocator.sleep(pool, contents).err(), allocator.wake(pool).err()];
                for error in outcomes.into_iter().flatten() {
                    let gone = SleepCause::Unknown(UnknownError::DestroyedPool { pool });
                    assert!([SleepCause::Busy, gone].contains(&error.cause), "{error}");
                }
            })
        });
        allocator.free(kept.handle).expect("a block can be freed during a sleep");
        let destroyed = allocator.destroy_pool(pool);
        sleepers.into_iter().for_each(|sleeper| sleeper.join().expect("the thread should not panic"));
        if let Err(error) = destroyed {
            assert_eq!(error, PoolError::Sleeping { pool });
            allocator.destroy_pool(pool).expect("nothing changes its phase");
        }
        assert_eq!(allocator.phase(pool), Err(UnknownError::DestroyedPool { pool }));
        assert_eq!(allocator.backend().inner.mapped_bytes(), 0, "a destroyed pool holds memory");
        assert_nothing_is_left(&allocator);
    });
}

/// Two sleeps, and two wakes, exclude each other: the second one finds the first one in progress, or nothing to do.
#[test]
fn of_two_sleeps_or_wakes_one_does_the_work() {
    explore(400, || {
        let allocator = shared(&Config::default(), 22);
        let (pool, kept) = pool_with_a_block(
            &allocator,
            PoolConfig::builder().fixed().build().expect("the configuration should be valid"),
        );
        let other = Arc::clone(&allocator);
        let second = thread::spawn(move || other.sleep(pool, Contents::Zero));
        let slept = [allocator.sleep(pool, Contents::Keep), second.join().expect("the thread should not panic")];
        let is_kept = slept[0].as_ref().is_ok_and(|slept| slept.kept_bytes > 0);
        let mut released = 0;
        for outcome in slept {
            match outcome {
                Ok(slept) => released += slept.released_bytes,
                Err(error) => assert_eq!(error.cause, SleepCause::Busy),
            }
        }
        assert_eq!((released, allocator.phase(pool)), (40 * MIB, Ok(Phase::Asleep)));
        let other = Arc::clone(&allocator);
        let second = thread::spawn(move || other.wake(pool));
        let woken = [allocator.wake(pool), second.join().expect("the thread should not panic")];
        let remapped: u64 = woken.iter().flatten().map(|woken| woken.remapped_bytes).sum();
        assert!(woken.iter().flatten().count() > 0 && remapped == 40 * MIB, "{woken:?}");
        let expected = if is_kept { VALUE } else { 0 };
        assert_eq!(allocator.backend().inner.read(kept.address, kept.size_bytes), Some(expected));
        allocator.free(kept.handle).expect("the allocation should be live");
        allocator.destroy_pool(pool).expect("nothing should be live in the pool");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn of_a_step_and_a_sleep_one_begins() {
    explore(400, || {
        let allocator = shared(&Config::default(), 26);
        let (pool, kept) = pool_with_a_block(&allocator, PoolConfig::default());
        let stepping = Arc::clone(&allocator);
        let stepper = thread::spawn(move || stepping.begin_step(pool, 0));
        let slept = allocator.sleep(pool, Contents::Keep);
        let begun = stepper.join().expect("the thread should not panic");
        match slept {
            Ok(_) => {
                begun.expect_err("the pool falls asleep");
                allocator.wake(pool).expect("memory should suffice");
            }
            Err(error) => {
                assert_eq!((error.cause, begun), (SleepCause::StepOpen, Ok(())));
                allocator.end_step(pool).expect("a step should be open");
            }
        }
        holds(&allocator, &kept);
        allocator.free(kept.handle).expect("the allocation should be live");
        allocator.destroy_pool(pool).expect("nothing should be live in the pool");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn a_pool_counts_as_asleep_until_it_is_awake() {
    explore(400, || {
        let allocator = shared(&Config::default(), 23);
        let (pool, kept) = pool_with_a_block(&allocator, PoolConfig::default());
        let changing = Arc::clone(&allocator);
        let changer = thread::spawn(move || {
            changing.sleep(pool, Contents::Keep).expect("no other thread should change the phase");
            changing.wake(pool).expect("memory should suffice");
        });
        let mut phases: Vec<Phase> = (0..4).map(|_| allocator.phase(pool).expect("the pool should exist")).collect();
        match allocator.allocate(pool, StreamId(2), MIB) {
            Ok(made) => allocator.free(made.handle).expect("the allocation should be live"),
            Err(error) => assert!(matches!(error, AllocateError::Sleeps(_)), "{error}"),
        }
        changer.join().expect("the thread should not panic");
        phases.dedup();
        let (awake, asleep) = (Phase::Awake, Phase::Asleep);
        let expected =
            [vec![awake], vec![asleep], vec![awake, asleep], vec![asleep, awake], vec![awake, asleep, awake]];
        assert!(expected.contains(&phases), "{phases:?}");
        holds(&allocator, &kept);
        allocator.free(kept.handle).expect("the allocation should be live");
        allocator.destroy_pool(pool).expect("nothing should be live in the pool");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn a_trim_during_a_sleep_or_wake_releases_no_memory_that_is_in_use() {
    explore(400, || {
        let allocator = shared(&Config::default(), 24);
        let (pool, kept) = pool_with_a_block(&allocator, PoolConfig::default());
        let changing = Arc::clone(&allocator);
        let changer = thread::spawn(move || {
            changing.sleep(pool, Contents::Keep).expect("no other thread should change the phase");
            changing.wake(pool).expect("memory should suffice");
        });
        allocator.trim_all().expect("no fault should be injected");
        allocator.trim_pool(pool).expect("no fault should be injected");
        changer.join().expect("the thread should not panic");
        allocator.check().expect("the invariants should hold");
        holds(&allocator, &kept);
        allocator.free(kept.handle).expect("the allocation should be live");
        allocator.destroy_pool(pool).expect("nothing should be live in the pool");
        assert_nothing_is_left(&allocator);
    });
}

/// Reads and acknowledges a pool's segments while it grows, shrinks, sleeps and wakes, as a registrar does. Another observer that reads
/// everything at the end gets the same events.
#[test]
fn an_observer_gets_every_event_once_while_the_pool_grows_sleeps_and_wakes() {
    /// Number of segments that were added, over all schedules.
    static BIRTHS: AtomicUsize = AtomicUsize::new(0);
    for is_fixed in [false, true] {
        explore(300, move || {
            let allocator = shared(&Config::default(), 25);
            let config = if is_fixed { PoolConfig::builder().fixed() } else { PoolConfig::builder() };
            let pool = allocator
                .create_pool(config.build().expect("the configuration should be valid"))
                .expect("the pool is created");
            let [reading, late] = [(); 2].map(|()| allocator.observe(pool).expect("the pool should exist").0);
            let growing = Arc::clone(&allocator);
            let grower = thread::spawn(move || {
                for stream in [StreamId(0), StreamId(1)] {
                    let made = [3, 30].map(|size| growing.allocate(pool, stream, size * MIB));
                    for made in made {
                        match made {
                            Ok(made) => growing.free(made.handle).expect("the allocation should be live"),
                            Err(error) => assert!(matches!(error, AllocateError::Sleeps(_)), "{error}"),
                        }
                    }
                    growing.trim_pool(pool).expect("no fault should be injected");
                }
            });
            let sleeping = Arc::clone(&allocator);
            let sleeper = thread::spawn(move || {
                sleeping
                    .quiesce(pool, Contents::Keep)
                    .expect("no other thread should change the phase")
                    .unmap()
                    .expect("no fault should be injected");
                sleeping.wake(pool).expect("memory should suffice");
            });
            let mut events = Vec::new();
            let mut read = |observer| {
                let unread = allocator.unread(observer);
                events.extend(unread.events.iter().cloned());
                allocator.acknowledge(observer, &unread).expect("no fault should be injected");
            };
            (0..3).for_each(|_| read(reading));
            [grower, sleeper].into_iter().for_each(|thread| thread.join().expect("the thread should not panic"));
            allocator.trim_pool(pool).expect("no fault should be injected");
            read(reading);
            let all = allocator.unread(late);
            let count = |kind| all.events.iter().filter(|event| event.kind == kind).count();
            let births = count(SegmentEventKind::Birth);
            assert_eq!(births, count(SegmentEventKind::Death), "every segment that was added is removed by the trim");
            BIRTHS.fetch_add(births, Ordering::Relaxed);
            let of = |stream| move |event: &&SegmentEvent| event.heap.stream() == Some(StreamId(stream));
            for stream in [0, 1] {
                let (one, other): (Vec<_>, Vec<_>) =
                    (events.iter().filter(of(stream)).collect(), all.events.iter().filter(of(stream)).collect());
                assert_eq!(one, other, "the events of {stream}");
            }
            allocator.acknowledge(late, &all).expect("no fault should be injected");
            for observer in [reading, late] {
                allocator.forget(observer).expect("no fault should be injected");
            }
            allocator.trim_pool(pool).expect("no fault should be injected");
            assert_eq!(allocator.stats().retired_bytes, 0);
            allocator.destroy_pool(pool).expect("nothing should be live in the pool");
            assert_nothing_is_left(&allocator);
        });
        assert!(BIRTHS.swap(0, Ordering::Relaxed) > 0, "segments were added");
    }
}

/// A trim that finds a destroyed pool releases its addresses at most once, and never those of a later pool that reuses the
/// destroyed pool's object.
#[test]
fn a_trim_releases_only_the_addresses_of_the_destroyed_pool() {
    explore(3000, || {
        let based: PoolConfig = "base:slot:0".parse().expect("valid");
        let allocator = shared(&Config::default(), 27);
        let old = allocator.create_pool(based.clone()).expect("free");
        let trimming = Arc::clone(&allocator);
        let trimmer = thread::spawn(move || trimming.trim_all().map(|_| ()));
        allocator.destroy_pool(old).expect("nothing is live");
        let new = allocator.create_pool(based).expect("the slot is free again");
        trimmer.join().expect("no panic").expect("no faults");
        let made = allocator.allocate(new, StreamId(0), MIB).expect("the pool has its addresses");
        assert_eq!(made.address.0, 0x1000_0000_0000);
        allocator.free(made.handle).expect("live");
        allocator.destroy_pool(new).expect("nothing is live");
        assert_nothing_is_left(&allocator);
    });
}
