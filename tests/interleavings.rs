//! Interleavings: threads on one allocator under shuttle, which runs one thread at a time and may switch threads at every lock and in every
//! call of the backend. A failure prints its schedule, which `shuttle::replay` runs again.
//!
//! Every thread works on the simulated device like a correct program, so if an interleaving loses a wait, the simulator reports a race.

#[path = "interleavings/control.rs"]
mod control;
#[path = "interleavings/explored.rs"]
mod explored;
#[path = "interleavings/observers.rs"]
mod observers;

use explored::{
    Device, STREAMS, Shared, Shuttled, allocator, assert_nothing_is_left, explore, free, lend, of_pool, second_of,
    shared, use_it,
};
use shuttle::sync::{Arc, Mutex, mpsc};
use shuttle::thread;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use symmalloc_core::config::{Config, PoolConfig, Reclaim, StreamPolicy};
use symmalloc_core::errors::{AllocateError, PoolError};
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::lock::{Exclusive, Lock};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::SleepCause;
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocation, Allocator, Digest, PoolId, Retry, StreamId, generic};
use symmalloc_harness::memory::Memory;
use symmalloc_sim::{SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay};

/// Runs a thread on its own group of two streams. Passes about a third of its allocations to `leave` instead of freeing them.
fn drive<L: Lock>(allocator: &generic::Allocator<Device, L>, group: StreamId, seed: u64, leave: impl Fn(Allocation)) {
    let mut random = SplitMix64::new(seed ^ u64::from(group.0) << 32);
    let mut live: Vec<(StreamId, Allocation)> = Vec::new();
    let mut lent = Vec::new();
    let give_back =
        |made: Allocation| if (made.size_bytes / 512).is_multiple_of(3) { leave(made) } else { free(allocator, &made) };
    for _ in 0..14 {
        let stream = if random.below(3) > 0 { group } else { second_of(group) };
        match random.below(8) {
            0..=3 => {
                let size_bytes = [512, 3 * KIB, 700 * KIB, 3 * MIB][random.below(4) as usize];
                let made = allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("no limit should be reached");
                use_it(allocator, stream, &made);
                live.push((stream, made));
            }
            4 | 5 if !live.is_empty() => give_back(live.swap_remove(random.below(live.len() as u64) as usize).1),
            6 if !live.is_empty() => {
                let other = StreamId(random.below(STREAMS.into()) as u16);
                let (owner, made) = &live[random.below(live.len() as u64) as usize];
                // A third user would also have to wait for the second one.
                if other != *owner && !lent.contains(&made.handle) {
                    lend(allocator, *owner, other, made);
                    lent.push(made.handle);
                }
            }
            _ => allocator
                .reserve(PoolId::DEFAULT, stream, random.below(3) * 2 * MIB)
                .expect("no limit should be reached"),
        }
    }
    live.into_iter().for_each(|(_, made)| give_back(made));
}

/// Makes calls that other threads may make concurrently without moving anything in the default pool (rule D8).
fn disturb(allocator: &generic::Allocator<Device, Shuttled>) {
    let pool = allocator.create_pool(PoolConfig::default()).expect("the pool is created");
    let (observer, _) = allocator.observe(pool).expect("the pool should exist");
    let made = allocator.allocate(pool, StreamId(0), MIB).expect("no limit should be reached");
    use_it(allocator, StreamId(0), &made);
    allocator.drop_completed_fences().expect("no fault should be injected");
    let stats = allocator.stats();
    assert!(stats.usage.all.allocations.current >= 1 && stats.reserved_bytes.current >= 2 * MIB);
    assert_eq!(allocator.segment_at(made.address).map(|position| position.heap.pool), Some(pool));
    allocator.free(made.handle).expect("the allocation should be live");
    allocator.trim_pool(pool).expect("no fault should be injected");
    assert_eq!(allocator.segment_at(made.address).filter(|position| position.heap.pool == pool), None);
    allocator.acknowledge(observer, &allocator.unread(observer)).expect("no fault should be injected");
    allocator.forget(observer).expect("no fault should be injected");
    allocator.destroy_pool(pool).expect("the pool should be empty");
    assert!(matches!(allocator.allocate(pool, StreamId(1), 1), Err(AllocateError::Unknown(_))));
    allocator.snapshot();
}

type HeapDigests = Vec<(StreamGroup, Digest)>;

fn heaps_decide_as_if_alone(pool: &PoolConfig, schedules: usize) {
    for seed in 0..6 {
        let alone = allocator::<Exclusive>(&of_pool(pool.clone()), seed);
        for stream in (0..STREAMS).map(StreamId) {
            drive(&alone, stream, seed, |made| free(&alone, &made));
        }
        let expected: HeapDigests = alone.heap_digests(PoolId::DEFAULT).expect("the default pool should always exist");
        let pool = pool.clone();
        explore(schedules, move || {
            let together = shared(&of_pool(pool.clone()), seed + 1);
            let mut threads = Vec::new();
            for stream in (0..STREAMS).map(StreamId) {
                let (left, theirs) = mpsc::channel::<Allocation>();
                let (done, freed) = mpsc::channel();
                let freeing = Arc::clone(&together);
                threads.push(thread::spawn(move || {
                    for made in theirs {
                        free(&freeing, &made);
                        done.send(()).expect("it waits");
                    }
                }));
                let driving = Arc::clone(&together);
                threads.push(thread::spawn(move || {
                    drive(&driving, stream, seed, |made| {
                        left.send(made).expect("a process should listen");
                        freed.recv().expect("it replies");
                    });
                }));
            }
            let disturbing = Arc::clone(&together);
            threads.push(thread::spawn(move || disturb(&disturbing)));
            threads.into_iter().for_each(|thread| thread.join().expect("the thread should not panic"));
            assert_eq!(together.heap_digests(PoolId::DEFAULT).expect("the default pool should always exist"), expected);
            assert_nothing_is_left(&together);
        });
    }
}

#[test]
fn expandable_heaps_do_not_depend_on_interleaving() {
    heaps_decide_as_if_alone(&PoolConfig::default(), 250);
}

#[test]
fn heaps_of_groups_do_not_depend_on_interleaving() {
    for policy in ["streams:grouped", "streams:grouped,segments:fixed"] {
        heaps_decide_as_if_alone(&policy.parse().expect("the text should be valid"), 200);
    }
}

#[test]
fn fixed_heaps_do_not_depend_on_interleaving() {
    heaps_decide_as_if_alone(&PoolConfig::builder().fixed().build().expect("the configuration should be valid"), 250);
}

/// Runs a thread on a heap that it shares with others, and frees allocations that the others made.
fn share(allocator: &Shared, stream: StreamId, seed: u64, bag: &Mutex<Vec<Allocation>>) {
    let mut random = SplitMix64::new(seed ^ u64::from(stream.0) << 32);
    for _ in 0..12 {
        match random.below(10) {
            0..=4 => {
                let size_bytes = [512, 700 * KIB, 3 * MIB][random.below(3) as usize];
                match allocator.allocate(PoolId::DEFAULT, stream, size_bytes) {
                    Ok(made) => {
                        use_it(allocator, stream, &made);
                        bag.lock().expect("no thread should panic").push(made);
                    }
                    Err(AllocateError::OutOfMemory(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            5..=7 => {
                let taken = bag.lock().expect("no thread should panic").pop();
                if let Some(made) = taken {
                    free(allocator, &made);
                    assert!(allocator.free(made.handle).is_err(), "it was freed");
                }
            }
            8 => {
                allocator.trim_all().expect("no fault should be injected");
            }
            _ => {
                allocator.drop_completed_fences().expect("no fault should be injected");
            }
        }
    }
}

/// The order of ops in the heap, and therefore the placements, depend on the threads. All other properties hold.
#[test]
fn a_shared_heap_with_a_limit_stays_consistent_and_loses_no_free() {
    for seed in 0..4 {
        explore(300, move || {
            let pool = PoolConfig::builder()
                .streams(StreamPolicy::Shared)
                .limit_bytes(Some(8 * MIB))
                .reclaim(Reclaim::Pool)
                .build()
                .expect("the configuration should be valid");
            let allocator = shared(&of_pool(pool), seed);
            let asked = Arc::new(AtomicU64::new(0));
            let asking = Arc::clone(&asked);
            allocator.set_failure_callback(move |allocator, error| {
                asking.fetch_add(1, Relaxed);
                assert!(error.reserved_bytes <= 8 * MIB);
                allocator.trim_all().expect("no fault should be injected");
                if asking.load(Relaxed).is_multiple_of(2) { Retry::Again } else { Retry::GiveUp }
            });
            let bag = Arc::new(Mutex::new(Vec::new()));
            let threads = (0..STREAMS).map(StreamId).map(|stream| {
                let (allocator, bag) = (Arc::clone(&allocator), Arc::clone(&bag));
                thread::spawn(move || share(&allocator, stream, seed, &bag))
            });
            let threads: Vec<_> = threads.collect();
            for _ in 0..3 {
                let stats = allocator.pool_stats(PoolId::DEFAULT).expect("the default pool should always exist");
                assert!(stats.reserved_bytes.current <= 8 * MIB, "over the limit: {stats:?}");
                let scope = allocator.open_stat_scope();
                allocator.reset_peak_stats();
                allocator.close_stat_scope(scope);
            }
            threads.into_iter().for_each(|thread| thread.join().expect("the thread should not panic"));
            for made in bag.lock().expect("no thread should panic").drain(..) {
                allocator.free(made.handle).expect("the allocation should be live");
            }
            assert_nothing_is_left(&allocator);
        });
    }
}

/// Threads that run out of memory together are all served from what one of them releases, whichever trims first.
#[test]
fn threads_that_run_out_together_share_what_one_releases() {
    let config: Config = "segments:fixed,total_limit_mb:8".parse().expect("the text should be valid");
    explore(2000, move || {
        let allocator = shared(&config, 3);
        let cached = allocator.create_pool(PoolConfig::default()).expect("the pool is created");
        let made = allocator.allocate(cached, StreamId(0), 8 * MIB).expect("the request should stay within the limit");
        allocator.free(made.handle).expect("the allocation should be live");
        allocator.set_failure_callback(|allocator, _| {
            allocator.trim_all().expect("no fault should be injected");
            Retry::IfReleased
        });
        let threads = (0..STREAMS).map(StreamId).map(|stream| {
            let allocator = Arc::clone(&allocator);
            thread::spawn(move || allocator.allocate(PoolId::DEFAULT, stream, 512).expect("the cache can be released"))
        });
        for made in
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().expect("the thread should not panic"))
        {
            allocator.free(made.handle).expect("the allocation should be live");
        }
        allocator.allocate(PoolId::DEFAULT, StreamId(0), 8 * MIB + 1).expect_err("nothing can help");
        assert_nothing_is_left(&allocator);
    });
}

/// Threads free allocations of other threads, which map memory at the same time. The threads do not synchronize, so the
/// order of ops depends on the schedule. No free may be lost, and no memory may be reused before its uses complete.
#[test]
fn threads_free_allocations_of_others_by_handle_and_by_address() {
    let (one, other) = (StreamId(0), StreamId(1));
    explore(1000, move || {
        let allocator = shared(&Config::default(), 9);
        let (to_other, of_one) = mpsc::channel::<Allocation>();
        let (to_one, of_other) = mpsc::channel::<Allocation>();
        let threads = [(one, other, to_other, of_other), (other, one, to_one, of_one)];
        let threads = threads.map(|(stream, user, gives, takes)| {
            let allocator = Arc::clone(&allocator);
            thread::spawn(move || {
                for size_bytes in [MIB, 3 * MIB, 512, 5 * MIB] {
                    let made =
                        allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("no limit should be reached");
                    use_it(&allocator, stream, &made);
                    if size_bytes > MIB {
                        lend(&allocator, stream, user, &made);
                    }
                    gives.send(made).expect("the receiver listens until everything is freed");
                    if let Ok(theirs) = takes.try_recv() {
                        free(&allocator, &theirs);
                    }
                }
                drop(gives);
                for theirs in takes {
                    free(&allocator, &theirs);
                }
            })
        });
        allocator.stats();
        threads.into_iter().for_each(|thread| thread.join().expect("the thread should not panic"));
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn only_one_of_two_threads_that_free_an_address_succeeds() {
    explore(1000, || {
        let allocator = shared(&Config::default(), 10);
        let made = allocator.allocate(PoolId::DEFAULT, StreamId(0), MIB).expect("no limit should be reached");
        use_it(&allocator, StreamId(0), &made);
        lend(&allocator, StreamId(0), StreamId(1), &made);
        let freeing = Arc::clone(&allocator);
        let other = thread::spawn(move || freeing.free_at(made.address).is_ok());
        let is_freed_here = allocator.free_at(made.address).is_ok();
        assert_ne!(is_freed_here, other.join().expect("the thread should not panic"));
        assert_nothing_is_left(&allocator);
    });
}

/// Two threads lend blocks to one stream and free them. Of the two events, the one with the later tick comes later, so
/// a stream that waits for it has waited for both.
#[test]
fn fences_of_one_stream_have_events_in_the_order_of_their_ticks() {
    let (one, other, user) = (StreamId(0), StreamId(1), StreamId(2));
    for order in [[0, 1], [1, 0]] {
        explore(1000, move || {
            let allocator = shared(&Config::default(), 11);
            let pool =
                PoolConfig::builder().streams(StreamPolicy::Shared).build().expect("the configuration should be valid");
            let pools = [(); 2].map(|()| allocator.create_pool(pool.clone()).expect("the pool is created"));
            let threads = [(pools[0], one), (pools[1], other)].map(|(pool, stream)| {
                let lending = Arc::clone(&allocator);
                thread::spawn(move || {
                    let made = lending.allocate(pool, stream, MIB).expect("no limit should be reached");
                    use_it(&lending, stream, &made);
                    lend(&lending, stream, user, &made);
                    free(&lending, &made);
                })
            });
            threads.into_iter().for_each(|thread| thread.join().expect("the thread should not panic"));
            for pool in order.map(|index| pools[index]) {
                let taken = allocator.allocate(pool, one, MIB).expect("no limit should be reached");
                use_it(&allocator, one, &taken);
                free(&allocator, &taken);
            }
            assert_nothing_is_left(&allocator);
        });
    }
}

/// Two threads obtain memory under a limit that only one of them fits.
#[test]
fn heaps_that_charge_one_limit_never_hold_more() {
    // Memory is obtained as a segment, or as a segment and its growth.
    for (is_of_pool, is_fixed) in [(true, true), (true, false), (false, true), (false, false)] {
        explore(1000, move || {
            let limit_bytes = Some(8 * MIB);
            let pool = PoolConfig::builder().reclaim(Reclaim::Never);
            let pool = if is_fixed { pool.fixed() } else { pool };
            let pool = if is_of_pool { pool.limit_bytes(limit_bytes) } else { pool };
            let config = Config::builder().default_pool(pool.build().expect("the configuration should be valid"));
            let config = if is_of_pool { config } else { config.total_limit_bytes(limit_bytes) };
            let allocator = shared(&config.build().expect("the configuration should be valid"), 12);
            let threads = (0..STREAMS).map(StreamId).map(|stream| {
                let allocator = Arc::clone(&allocator);
                thread::spawn(move || {
                    for _ in 0..2 {
                        if !is_fixed {
                            let _may_be_refused = allocator.reserve(PoolId::DEFAULT, stream, 2 * MIB);
                        }
                        let reserved = allocator.reserve(PoolId::DEFAULT, stream, 6 * MIB);
                        let mapped_bytes = allocator.backend().inner.mapped_bytes();
                        assert!(mapped_bytes <= 8 * MIB, "{mapped_bytes} bytes are mapped");
                        if reserved.is_ok() {
                            allocator.trim_all().expect("no fault should be injected");
                        }
                    }
                })
            });
            threads
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|thread| thread.join().expect("the thread should not panic"));
            assert_nothing_is_left(&allocator);
        });
    }
}

/// One thread releases memory, and therefore waits for a stream to which another thread submits more work.
#[test]
fn a_host_wait_does_not_cover_concurrently_submitted_work() {
    let (one, other) = (StreamId(0), StreamId(1));
    explore(2000, move || {
        let allocator = shared(&Config::default(), 3);
        let cached = allocator.allocate(PoolId::DEFAULT, other, 6 * MIB).expect("no limit should be reached");
        use_it(&allocator, other, &cached);
        allocator.free(cached.handle).expect("the allocation should be live");
        let trimming = Arc::clone(&allocator);
        let trimmer = thread::spawn(move || {
            trimming.trim_all().expect("no fault should be injected");
        });
        let lending = Arc::clone(&allocator);
        let lender = thread::spawn(move || {
            let made = lending.allocate(PoolId::DEFAULT, one, MIB).expect("no limit should be reached");
            use_it(&lending, one, &made);
            lend(&lending, one, other, &made);
            lending.free(made.handle).expect("the allocation should be live");
            let again = lending.allocate(PoolId::DEFAULT, one, MIB).expect("no limit should be reached");
            use_it(&lending, one, &again);
            lending.free(again.handle).expect("the allocation should be live");
        });
        [trimmer, lender].into_iter().for_each(|thread| thread.join().expect("the thread should not panic"));
        assert_nothing_is_left(&allocator);
    });
}

/// One thread takes a block of a shared heap, which makes its stream wait for another one, to which a third thread
/// submits more work.
#[test]
fn a_stream_wait_does_not_cover_concurrently_submitted_work() {
    let (one, other) = (StreamId(0), StreamId(1));
    explore(2000, move || {
        let allocator = shared(&Config::default(), 4);
        let pool =
            PoolConfig::builder().streams(StreamPolicy::Shared).build().expect("the configuration should be valid");
        let pool = allocator.create_pool(pool).expect("the pool is created");
        let left = allocator.allocate(pool, other, MIB).expect("no limit should be reached");
        use_it(&allocator, other, &left);
        allocator.free(left.handle).expect("the allocation should be live");
        let taking = Arc::clone(&allocator);
        let taker = thread::spawn(move || {
            let taken = taking.allocate(pool, one, MIB).expect("no limit should be reached");
            use_it(&taking, one, &taken);
            taking.free(taken.handle).expect("the allocation should be live");
        });
        let lent = allocator.allocate(PoolId::DEFAULT, one, MIB).expect("no limit should be reached");
        use_it(&allocator, one, &lent);
        lend(&allocator, one, other, &lent);
        allocator.free(lent.handle).expect("the allocation should be live");
        taker.join().expect("the thread should not panic");
        let again = allocator.allocate(PoolId::DEFAULT, one, MIB).expect("no limit should be reached");
        use_it(&allocator, one, &again);
        allocator.free(again.handle).expect("the allocation should be live");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn a_pool_is_destroyed_by_one_thread_and_used_by_another() {
    explore(2000, || {
        let allocator = shared(&Config::default(), 5);
        let pool = allocator.create_pool(PoolConfig::default()).expect("the pool is created");
        // The pool has its heaps when it is destroyed.
        for stream in (0..STREAMS).map(StreamId) {
            let made = allocator.allocate(pool, stream, MIB).expect("no limit should be reached");
            allocator.free(made.handle).expect("the allocation should be live");
        }
        let using = Arc::clone(&allocator);
        let user = thread::spawn(move || {
            // A step that begins in a pool that is being destroyed does not reopen it.
            let _begun = using.begin_step(pool, 0);
            for stream in (0..STREAMS).map(StreamId) {
                match using.allocate(pool, stream, MIB) {
                    Ok(made) => {
                        use_it(&using, stream, &made);
                        assert!(matches!(using.destroy_pool(pool), Err(PoolError::InUse { .. })));
                        using.free(made.handle).expect("the allocation should be live");
                    }
                    Err(error) => assert!(matches!(error, AllocateError::Unknown(_)), "{error}"),
                }
            }
        });
        let destroyed = allocator.destroy_pool(pool);
        user.join().expect("the thread should not panic");
        if destroyed.is_err() {
            allocator.destroy_pool(pool).expect("nothing should be live in the pool");
        }
        assert_eq!(allocator.backend().inner.mapped_bytes(), 0, "a destroyed pool holds memory");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn a_recording_orders_sleep_and_wake_with_concurrent_frees() {
    explore(300, || {
        let allocator = shared(&Config::default(), 3);
        let records = Memory::new();
        allocator.start_recording(records.clone()).expect("no op should precede the recording");
        let allocate = |stream| {
            allocator.allocate(PoolId::DEFAULT, StreamId(stream), 3 * MIB).expect("no limit should be reached")
        };
        let made = [0, 1, 0, 1].map(allocate);
        let kept = made[2];
        allocator.backend().inner.write(kept.address, kept.size_bytes, 7);
        let sleepers = [Contents::Keep, Contents::Keep].map(|contents| {
            let allocator = Arc::clone(&allocator);
            thread::spawn(move || {
                let outcomes =
                    [allocator.sleep(PoolId::DEFAULT, contents).err(), allocator.wake(PoolId::DEFAULT).err()];
                outcomes.into_iter().flatten().for_each(|error| assert_eq!(error.cause, SleepCause::Busy));
            })
        });
        let freer = {
            let allocator = Arc::clone(&allocator);
            thread::spawn(move || {
                made[..2].iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
                // On a stream that has no heap yet.
                match allocator.allocate(PoolId::DEFAULT, StreamId(2), 512) {
                    Ok(made) => allocator.free(made.handle).expect("the allocation should be live"),
                    Err(error) => assert!(matches!(error, AllocateError::Sleeps(_)), "{error}"),
                }
            })
        };
        sleepers.into_iter().chain([freer]).for_each(|thread| thread.join().expect("the thread should not panic"));
        allocator.check().expect("the invariants should hold");
        allocator.wake(PoolId::DEFAULT).expect("memory should suffice");
        assert_eq!(allocator.backend().inner.read(kept.address, kept.size_bytes), Some(7));
        made[2..].iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
        allocator.stop_recording().expect("it succeeded");
        let digest = allocator.digest(PoolId::DEFAULT);
        let records = records.records();
        let again: Allocator<_> =
            Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
        let program = Program::new(&records).expect("the records should be consistent");
        Replay::new(&again, &program).run(|_, _| {}).expect("the program should replay");
        assert_eq!(again.digest(PoolId::DEFAULT), digest, "frees, sleeps and wakes are recorded in their order");
        assert_nothing_is_left(&allocator);
    });
}

/// A lookup returns the placement of the address or nothing, never a stale result.
#[test]
fn an_address_is_looked_up_while_its_segment_dies() {
    explore(1000, || {
        let allocator = shared(&Config::default(), 8);
        let made = allocator.allocate(PoolId::DEFAULT, StreamId(0), MIB).expect("no limit should be reached");
        allocator.free(made.handle).expect("the allocation should be live");
        let trimming = Arc::clone(&allocator);
        let trimmer = thread::spawn(move || {
            trimming.trim_all().expect("no fault should be injected");
        });
        if let Some(position) = allocator.segment_at(made.address) {
            assert_eq!(position.base, made.address);
        }
        trimmer.join().expect("the thread should not panic");
        assert_eq!(allocator.segment_at(made.address), None);
    });
}
