//! Digests and recordings of sleeps and wakes, successful and failed.

use super::*;
use symmalloc_harness::memory::Memory;

#[test]
fn equal_sleep_calls_have_equal_digests_even_if_some_fail() {
    let run = |seed: u64, fault: Option<(Call, u64)>| {
        let device = SimBackend::builder().seed(seed).rank(seed as u32).build();
        let mut job: Job = Job::busy(&device, "segments:fixed");
        if let Some((call, after)) = fault {
            let ordinal = device.calls().of(call) + after;
            device.inject(Some(call), FaultRule::At { ordinal }, Fault::OutOfMemory);
        }
        let slept = job.allocator.sleep(job.pool, Contents::Keep).is_ok();
        let woken = job.allocator.wake(job.pool).is_ok();
        let again = (job.allocator.sleep(job.pool, Contents::Keep), job.allocator.wake(job.pool));
        assert!(again.0.is_ok() && again.1.is_ok());
        let placed = job.allocate(0, 7 * MIB).placement;
        job.holds_what_it_held();
        (job.allocator.digest(job.pool).expect("the pool should exist"), placed, [slept, woken])
    };
    let (digest, placed, all) = run(1, None);
    assert_eq!(all, [true, true]);
    for (seed, fault, done) in [
        (2, None, [true, true]),
        (3, Some((Call::Save, 0)), [false, true]),
        (4, Some((Call::Unmap, 1)), [false, true]),
        (5, Some((Call::Map, 1)), [true, false]),
        (6, Some((Call::Load, 0)), [true, false]),
    ] {
        assert_eq!(run(seed, fault), (digest, placed, done), "{fault:?}");
    }
    let other = {
        let device = SimBackend::builder().seed(1).rank(1).build();
        let job: Job = Job::busy(&device, "segments:fixed");
        job.allocator.sleep(job.pool, Contents::Drop).expect("no work is pending");
        job.allocator.digest(job.pool).expect("the pool should exist")
    };
    assert_ne!(other.value, digest.value);
}

#[test]
fn a_recording_replays_successful_and_failed_sleeps() {
    let device = SimBackend::builder().seed(5).memory_bytes(256 * MIB).build();
    let allocator: Allocator<_> = Allocator::new(&device, Config::default()).expect("the arguments should be valid");
    let memory = Memory::new();
    allocator.start_recording(memory.clone()).expect("no op should precede the recording");
    let stream = allocator.register_stream().expect("a stream id is available");
    let pool = allocator.create_pool(policy("segments:fixed")).expect("the configuration should be valid");
    let blocks: Vec<Allocation> =
        (0..4).map(|_| allocator.allocate(pool, stream, 15 * MIB).expect("memory should suffice")).collect();
    device.inject(Some(Call::Save), FaultRule::At { ordinal: 0 }, Fault::OutOfMemory);
    assert!(matches!(allocator.sleep(pool, Contents::Keep), Err(SleepError { cause: SleepCause::Save { .. }, .. })));
    allocator.sleep(pool, Contents::Keep).expect("no work is pending");
    let other = allocator.allocate(PoolId::DEFAULT, stream, 210 * MIB).expect("memory should suffice");
    assert!(matches!(allocator.wake(pool), Err(SleepError { cause: SleepCause::Memory { .. }, .. })));
    allocator.free(blocks[1].handle).expect("the allocation should be live");
    allocator.free(other.handle).expect("the allocation should be live");
    allocator.trim_all().expect("the driver should release memory");
    drop(allocator.remap(pool).expect("memory should suffice"));
    allocator.wake(pool).expect("memory should suffice");
    let _live = allocator.allocate(pool, stream, 3 * MIB).expect("memory should suffice");
    allocator.stop_recording().expect("it succeeded");
    let records = memory.records();
    let ops: Vec<&Op> = records
        .iter()
        .map(|record| &record.op)
        .filter(|op| matches!(op, Op::Sleep { .. } | Op::Wake { .. } | Op::Stay { .. }))
        .collect();
    let (keep, stay) = (Some(Contents::Keep), |asked| Op::Stay { pool, asked });
    let expected =
        [&stay(keep), &Op::Sleep { pool, contents: Contents::Keep }, &stay(None), &stay(None), &Op::Wake { pool }];
    assert_eq!(ops, expected);
    let text = symmalloc_trace::Trace::new(Some(Config::default()), records.clone())
        .expect("the records should be consistent")
        .to_text();
    for line in ["\nstay keep p1\n", "\nsleep keep p1\n", "\nstay wake p1\n", "\nwake p1\n"] {
        assert!(text.contains(line), "{text}");
    }
    let read = symmalloc_trace::Trace::parse(&text).expect("as written");
    assert_eq!(read.records(), records);
    let program = Program::new(read.records()).expect("the records should be consistent");
    let idle = SimBackend::builder().seed(77).build();
    let again: Allocator<_> = Allocator::new(&idle, Config::default()).expect("the arguments should be valid");
    Replay::new(&again, &program).run(|_, _| {}).expect("the program should replay");
    for pool in [PoolId::DEFAULT, pool] {
        assert_eq!(again.digest(pool), allocator.digest(pool));
    }
}
