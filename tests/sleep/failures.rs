//! Failures of sleep and wake: failing driver calls, devices without free memory, and memory that is held.

use super::*;

#[test]
fn a_wake_that_the_device_refuses_can_be_repeated() {
    for text in POLICIES {
        let sized = SimBackend::builder().seed(3).memory_bytes(256 * MIB).build();
        let job: Job = Job::busy(&sized, text);
        let needed_bytes = job.reserved_bytes();
        job.allocator.sleep(job.pool, Contents::Keep).expect(text);
        let digest = job.allocator.digest(job.pool).expect("the pool should exist");
        let other =
            job.allocator.allocate(PoolId::DEFAULT, job.streams[0], 256 * MIB - needed_bytes / 2).expect("it is free");
        for _ in 0..2 {
            let error = job.allocator.wake(job.pool).unwrap_err();
            let SleepCause::Memory { needed_bytes: output, cause: OutOfMemoryCause::Driver(error) } = error.cause
            else {
                panic!("{text}: {error}")
            };
            assert_eq!((output, error.reason), (needed_bytes, Reason::OutOfMemory));
            assert_eq!((job.phase(), job.reserved_bytes()), (Phase::Asleep, 0), "{text}");
        }
        assert_eq!(
            job.allocator.digest(job.pool).expect("the pool should exist").ops,
            digest.ops + 2 * heaps(&job),
            "each request was recorded"
        );
        job.allocator.free(other.handle).expect("the allocation should be live");
        job.allocator.trim_all().expect("the driver should release memory");
        job.allocator.wake(job.pool).expect(text);
        job.holds_what_it_held();
        job.end();
    }
}

#[test]
fn a_wake_that_a_limit_refuses_maps_nothing() {
    let device = device();
    let config: Config = "total_limit_mb:40".parse().expect("the text should be valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
    let pool = allocator.create_pool(policy("segments:expandable")).expect("the configuration should be valid");
    let allocate =
        |pool, stream| allocator.allocate(pool, stream, 10 * MIB).expect("the request should stay within the limit");
    let live = streams.map(|stream| allocate(pool, stream));
    allocator.sleep(pool, Contents::Keep).expect("the pool can sleep");
    // One of the two heaps fits.
    let others = [(); 3].map(|()| allocate(PoolId::DEFAULT, streams[0]));
    let (maps, reserved) = (device.calls().of(Call::Map), allocator.stats().reserved_bytes);
    let error = allocator.wake(pool).expect_err("the limit leaves 10 MiB");
    assert!(
        matches!(error.cause, SleepCause::Memory { needed_bytes, cause: OutOfMemoryCause::Limit { .. } } if needed_bytes == 20 * MIB),
        "{error}"
    );
    assert_eq!((device.calls().of(Call::Map), allocator.stats().reserved_bytes), (maps, reserved));
    others.into_iter().for_each(|other| allocator.free(other.handle).expect("the allocation should be live"));
    let make_room = || allocator.trim_all().expect("no fault should be injected");
    let woken = allocator.remap_with(pool, make_room).expect("there is room").resume();
    assert_eq!(woken.remapped_bytes, 20 * MIB);
    live.into_iter().for_each(|live| allocator.free(live.handle).expect("the allocation should be live"));
    allocator.check().expect("the invariants should hold");
}

/// Sleeps and wakes until both succeed, despite failures. Each failure leaves the pool awake or asleep.
fn there_and_back(job: &Job<'_>, contents: Contents) -> usize {
    let mut failures = 0;
    while let Err(error) = job.allocator.sleep(job.pool, contents) {
        failures += 1;
        match error.cause {
            SleepCause::Held { held_bytes, .. } => {
                assert_eq!((job.phase(), job.reserved_bytes()), (Phase::Held, held_bytes));
                assert!(matches!(job.allocator.allocate(job.pool, job.streams[0], 1), Err(AllocateError::Sleeps(_))));
            }
            SleepCause::Synchronize { .. } | SleepCause::Save { .. } => {
                assert_eq!(job.phase(), Phase::Awake);
                job.holds_what_it_held();
            }
            other => panic!("{other}"),
        }
        assert!(failures < 5, "one call fails, once");
    }
    assert_eq!((job.phase(), job.reserved_bytes()), (Phase::Asleep, 0));
    assert_eq!(job.device.mapped_bytes(), 0);
    while let Err(error) = job.allocator.wake(job.pool) {
        failures += 1;
        assert!(matches!(error.cause, SleepCause::Memory { .. } | SleepCause::Load(_)), "{error}");
        assert_eq!((job.phase(), job.reserved_bytes()), (Phase::Asleep, 0), "an undone wake has no memory");
        assert!(failures < 5, "one call fails, once");
    }
    assert_eq!(job.phase(), Phase::Awake);
    job.allocator.check().expect("the invariants should hold");
    failures
}

#[test]
fn after_any_failed_call_the_pool_is_awake_or_asleep_and_loses_nothing() {
    let mut failed = std::collections::BTreeSet::new();
    for text in POLICIES {
        for contents in [Contents::Keep, Contents::Zero] {
            let plain = device();
            let job: Job = Job::busy(&plain, text);
            let before = plain.calls().fallible();
            assert_eq!(there_and_back(&job, contents), 0);
            let after = plain.calls().fallible();
            for ordinal in before..after {
                let device = SimBackend::builder().seed(5).fail_at(ordinal, Fault::Refused).build();
                let job: Job = Job::busy(&device, text);
                assert_eq!(there_and_back(&job, contents), 1, "{text}, call {ordinal}");
                match contents {
                    Contents::Keep => job.holds_what_it_held(),
                    _ => assert!(job.contents().iter().all(|held| *held == Some(0))),
                }
                failed.extend(Call::ALL.into_iter().filter(|call| device.calls().of(*call) > plain.calls().of(*call)));
                job.end();
            }
        }
    }
    for call in [Call::Synchronize, Call::Save, Call::Unmap, Call::Map, Call::Load, Call::Zero] {
        assert!(failed.contains(&call), "{call} was never refused: {failed:?}");
    }
}

#[test]
fn a_later_wake_uses_the_memory_of_one_that_could_not_be_undone() {
    let device = device();
    let job: Job = Job::busy(&device, "segments:fixed");
    let whole = job.reserved_bytes();
    job.allocator.sleep(job.pool, Contents::Keep).expect("nothing should prevent the sleep");
    let maps = device.calls().of(Call::Map);
    device.inject(Some(Call::Map), FaultRule::At { ordinal: maps + 2 }, Fault::OutOfMemory);
    device.inject(Some(Call::Unmap), FaultRule::Every { calls: 1 }, Fault::Refused);
    assert!(matches!(job.allocator.wake(job.pool), Err(SleepError { cause: SleepCause::Memory { .. }, .. })));
    assert_eq!(job.phase(), Phase::Held);
    let held = job.reserved_bytes();
    assert!(held > 0 && held == device.mapped_bytes() && held < whole);
    device.heal();
    let woken = job.allocator.wake(job.pool).expect("healed");
    assert_eq!(
        (woken.remapped_bytes, device.calls().of(Call::Map) - maps),
        (whole - held, 3 + (job_segments(&job) - 2))
    );
    job.holds_what_it_held();
    job.end();
}

/// The result of a wake.
struct Retried {
    digest: Digest,
    phase: Phase,
    rooms: u32,
}

/// Wakes a pool while `fault` affects every map. `make_room` releases `room_bytes`, and ends the fault if `helps`.
fn wake_with_room(text: &str, fault: Option<Fault>, room_bytes: u64, helps: bool) -> Retried {
    let device = device();
    let job: Job = Job::busy(&device, text);
    job.allocator.sleep(job.pool, Contents::Keep).expect(text);
    if let Some(fault) = fault {
        device.inject(Some(Call::Map), FaultRule::Every { calls: 1 }, fault);
    }
    let mut rooms = 0;
    let make_room = || {
        rooms += 1;
        if helps {
            device.heal();
        }
        room_bytes
    };
    match job.allocator.remap_with(job.pool, make_room) {
        Ok(remapped) => drop(remapped.resume()),
        Err(error) => assert!(matches!(error.cause, SleepCause::Memory { .. }), "{error}"),
    };
    let (digest, phase) = (job.allocator.digest(job.pool).expect("the pool should exist"), job.phase());
    device.heal();
    job.allocator.wake(job.pool).expect("healed");
    job.holds_what_it_held();
    job.end();
    Retried { digest, phase, rooms }
}

#[test]
fn a_wake_makes_room_only_once_and_only_if_memory_is_full() {
    for text in POLICIES {
        let plain = wake_with_room(text, None, 1, true);
        assert_eq!((plain.phase, plain.rooms), (Phase::Awake, 0), "{text}: nothing was refused");
        let retried = wake_with_room(text, Some(Fault::OutOfMemory), 1, true);
        assert_eq!((retried.phase, retried.rooms), (Phase::Awake, 1), "{text}");
        assert_eq!(retried.digest, plain.digest, "{text}: a wake is one op, however often it tries");
        let no_room = wake_with_room(text, Some(Fault::OutOfMemory), 0, true);
        assert_eq!((no_room.phase, no_room.rooms), (Phase::Asleep, 1), "{text}: nothing was released");
        let still_full = wake_with_room(text, Some(Fault::OutOfMemory), 1, false);
        assert_eq!((still_full.phase, still_full.rooms), (Phase::Asleep, 1), "{text}: one more attempt");
        let refused = wake_with_room(text, Some(Fault::Refused), 1, true);
        assert_eq!((refused.phase, refused.rooms), (Phase::Asleep, 0), "{text}: memory does not help");
    }
}

fn job_segments(job: &Job<'_>) -> u64 {
    let pool = job.pool;
    job.allocator.snapshot().segments.iter().filter(|segment| segment.heap.pool == pool).count() as u64
}

#[test]
fn a_lost_device_leaves_the_pool_asleep_or_awake_and_the_allocator_ends() {
    for ordinal in 0.. {
        let device = SimBackend::builder().seed(5).build();
        let job: Job = Job::busy(&device, "segments:fixed");
        let from = device.calls().fallible();
        device.inject(None, FaultRule::At { ordinal: from + ordinal }, Fault::DeviceLost);
        let slept = job.allocator.sleep(job.pool, Contents::Keep);
        let woken = job.allocator.wake(job.pool);
        job.allocator.check().expect("the invariants should hold");
        if slept.is_ok() && woken.is_ok() {
            assert!(ordinal > 8);
            break;
        }
    }
}

#[test]
fn a_trim_releases_the_unreleased_memory_of_a_destroyed_pool() {
    for text in POLICIES {
        let device = device();
        let mut job: Job = Job::busy(&device, text);
        let refuse = |at: u64| {
            let ordinal = device.calls().of(Call::Unmap) + at;
            device.inject(Some(Call::Unmap), FaultRule::At { ordinal }, Fault::Refused);
        };
        refuse(1);
        let error = job.allocator.sleep(job.pool, Contents::Keep).unwrap_err();
        assert!(matches!(error.cause, SleepCause::Held { .. }), "{text}: {error}");
        while !job.live.is_empty() {
            job.free(0);
        }
        refuse(0);
        assert!(job.reserved_bytes() > 0, "{text}");
        assert!(matches!(job.allocator.destroy_pool(job.pool), Err(PoolError::Backend(_))), "{text}");
        // Like a pool that is awake, a sleeping pool is destroyed on every rank, regardless of any single rank's
        // driver.
        let gone = job.allocator.phase(job.pool);
        assert!(matches!(gone, Err(UnknownError::DestroyedPool { .. })), "{text}: {gone:?}");
        job.allocator.check().expect("the invariants should hold");
        job.allocator.trim_all().expect("no call is refused anymore");
        assert_eq!(job.allocator.stats().reserved_bytes.current, 0, "{text}");
        drop(job.allocator);
        assert!(device.leaks().is_empty(), "{text}: {}", device.leaks());
    }
}

#[test]
fn memory_held_by_a_window_is_released_by_the_next_sleep() {
    let device = device();
    let job: Job = Job::busy(&device, "segments:reserved,segment_mb:128");
    let whole = job.reserved_bytes();
    job.allocator.quiesce(job.pool, Contents::Keep).expect("no work is pending").hold();
    assert_eq!((job.phase(), job.reserved_bytes(), device.mapped_bytes()), (Phase::Held, whole, whole));
    assert!(matches!(job.allocator.allocate(job.pool, job.streams[0], 1), Err(AllocateError::Sleeps(_))));
    drop(job.allocator.quiesce(job.pool, Contents::Keep).expect("the pool should fall asleep"));
    assert_eq!(job.phase(), Phase::Held, "unchanged");
    assert_eq!(
        job.allocator.sleep(job.pool, Contents::Keep).expect("the driver should release memory").released_bytes,
        whole
    );
    assert_eq!((job.phase(), device.mapped_bytes()), (Phase::Asleep, 0));
    job.allocator.wake(job.pool).expect("memory should suffice");
    job.holds_what_it_held();
    job.end();
}
