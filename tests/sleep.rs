//! Sleep and wake: memory is released and mapped again at the same addresses, and kept contents survive any failure on the way.

#[path = "sleep/failures.rs"]
mod failures;
#[path = "sleep/histories.rs"]
mod histories;

use std::cell::RefCell;
use symmalloc_core::backend::{Backend, DeviceAddress, Reason};
use symmalloc_core::config::{Config, ConfigError, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause, PoolError, PoolSleeps, UnknownError};
use symmalloc_core::lock::{Exclusive, Lock};
use symmalloc_core::op::Contents;
use symmalloc_core::plans::StepError;
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::sleep::{Phase, SleepCause, SleepError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, Digest, Op, PoolId, StreamId, generic};
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_sim::{Addresses, Call, Fault, FaultRule, SimBackend};
use symmalloc_trace::replay::{Program, Replay};

const POLICIES: [&str; 8] = [
    "segments:expandable",
    "segments:expandable,streams:shared",
    "segments:expandable,release_threshold_mb:4",
    "segments:fixed",
    "segments:fixed,streams:shared",
    "segments:reserved,segment_mb:128",
    "segments:expandable,stitching:true,stitching_granule_mb:2,stitching_least_mb:4",
    "segments:expandable,streams:shared,stitching:true,stitching_granule_mb:2,stitching_least_mb:4",
];

fn policy(text: &str) -> PoolConfig {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A pool whose live blocks hold distinct values, on a device with two streams.
struct Job<'d, L: Lock = Exclusive> {
    device: &'d SimBackend,
    allocator: generic::Allocator<&'d SimBackend, L>,
    pool: PoolId,
    streams: [StreamId; 2],
    /// Live blocks, each with the value that it holds.
    live: Vec<(Allocation, u64)>,
    next: u64,
}

impl<'d, L: Lock> Job<'d, L> {
    fn new(device: &'d SimBackend, text: &str) -> Self {
        let allocator: generic::Allocator<&SimBackend, L> =
            generic::Allocator::with_lock(device, Config::default()).expect("the configuration should be valid");
        let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
        let pool = allocator.create_pool(policy(text)).expect("the configuration should be valid");
        Job { device, allocator, pool, streams, live: Vec::new(), next: 0 }
    }

    /// Creates a job with blocks of many sizes, some of them freed, holes, and work on other streams.
    fn busy(device: &'d SimBackend, text: &str) -> Self {
        let mut job = Job::new(device, text);
        for round in 0..12 {
            for stream in [0, 1] {
                let _live = job.allocate(stream, [512, 3 * 512, MIB, 5 * MIB][(round + stream) % 4]);
            }
        }
        let (used, _) = job.live[4];
        job.allocator.record_use(used.handle, job.streams[1]).expect("the allocation should be live");
        let event = device.record(job.streams[0]).expect("the driver should work");
        device.wait(job.streams[1], event).expect("the driver should work");
        device.recycle(event);
        job.allocator.note_stream_wait(job.streams[1], job.streams[0]).expect("the streams should be registered");
        job.device.submit(job.streams[1], used.address, used.size_bytes).expect("no race should be found");
        for at in [18, 15, 12, 9, 6, 4, 3] {
            job.free(at);
        }
        job.allocator.trim_pool(job.pool).expect("the device releases the memory");
        // The next block consists of free pieces if the pool stitches.
        let _live = job.allocate(0, 10 * MIB);
        job.allocator.check().expect("the invariants should hold");
        job
    }

    fn allocate(&mut self, stream: usize, size_bytes: u64) -> Allocation {
        let allocation =
            self.allocator.allocate(self.pool, self.streams[stream], size_bytes).expect("memory should suffice");
        self.next += 1;
        self.device.submit(self.streams[stream], allocation.address, size_bytes).expect("no race should be found");
        self.device.write(allocation.address, allocation.size_bytes, self.next);
        self.live.push((allocation, self.next));
        allocation
    }

    fn free(&mut self, at: usize) {
        let (allocation, _) = self.live.remove(at);
        self.allocator.free(allocation.handle).expect("the allocation should be live");
    }

    fn phase(&self) -> Phase {
        self.allocator.phase(self.pool).expect("the pool should exist")
    }

    fn reserved_bytes(&self) -> u64 {
        self.allocator.check().expect("the invariants should hold");
        self.allocator.pool_stats(self.pool).expect("the pool should exist").reserved_bytes.current
    }

    /// Returns the values in the live blocks, in order.
    fn contents(&self) -> Vec<Option<u64>> {
        self.live.iter().map(|(block, _)| self.device.read(block.address, block.size_bytes)).collect()
    }

    #[track_caller]
    fn holds_what_it_held(&self) {
        let expected: Vec<_> = self.live.iter().map(|(_, value)| Some(*value)).collect();
        assert_eq!(self.contents(), expected);
        for (block, _) in &self.live {
            let found = self.allocator.allocation(block.handle).expect("the allocation should be live");
            assert_eq!((found.address, found.placement), (block.address, block.placement));
        }
        self.allocator.check().expect("the invariants should hold");
    }

    fn end(mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
        self.allocator.trim_all().expect("the device releases the memory");
        self.allocator.destroy_pool(self.pool).expect("nothing should be live in the pool");
        drop(self.allocator);
        assert!(self.device.leaks().is_empty(), "{}", self.device.leaks());
    }
}

/// Returns the number of heaps of the pool that have a history.
fn heaps(job: &Job<'_>) -> u64 {
    let config = job.allocator.pool_config(job.pool).expect("the pool should exist");
    if config.streams() == symmalloc_core::config::StreamPolicy::Shared { 1 } else { 2 }
}

fn device() -> SimBackend {
    SimBackend::builder().seed(5).build()
}

#[test]
fn kept_contents_are_restored_at_the_same_addresses() {
    for text in POLICIES {
        let device = device();
        let mut job: Job = Job::busy(&device, text);
        let before = (job.reserved_bytes(), device.mapped_bytes(), device.calls().of(Call::Reserve));
        assert!(before.0 > 0 && before.0 == before.1, "{text}");
        for _ in 0..3 {
            let slept = job.allocator.sleep(job.pool, Contents::Keep).expect(text);
            assert_eq!(
                (job.phase(), slept.released_bytes, device.mapped_bytes()),
                (Phase::Asleep, before.0, 0),
                "{text}"
            );
            let live_bytes: u64 = job.live.iter().map(|(block, _)| block.size_bytes).sum();
            assert_eq!(slept.kept_bytes, live_bytes, "{text}: free memory is not copied");
            assert_eq!(job.reserved_bytes(), 0, "{text}");
            let woken = job.allocator.wake(job.pool).expect(text);
            assert_eq!((woken.remapped_bytes, woken.loaded_bytes), (before.0, live_bytes), "{text}");
            assert_eq!((job.phase(), device.mapped_bytes()), (Phase::Awake, before.1), "{text}");
            assert_eq!(device.leaks().images, 0, "{text}");
            job.holds_what_it_held();
        }
        assert_eq!(device.calls().of(Call::Reserve), before.2, "no addresses are obtained");
        let _live = job.allocate(1, 3 * MIB);
        job.holds_what_it_held();
        job.end();
    }
}

#[test]
fn dropped_contents_are_lost_and_zeroed_contents_are_zero() {
    for text in POLICIES {
        let device = device();
        let job: Job = Job::busy(&device, text);
        job.allocator.sleep(job.pool, Contents::Drop).expect(text);
        job.allocator.wake(job.pool).expect(text);
        assert!(job.contents().iter().all(Option::is_none), "{text}");
        assert_eq!(device.calls().of(Call::Save) + device.calls().of(Call::Load) + device.calls().of(Call::Zero), 0);
        job.allocator.sleep(job.pool, Contents::Zero).expect(text);
        job.allocator.wake(job.pool).expect(text);
        assert!(job.contents().iter().all(|held| *held == Some(0)), "{text}");
        job.end();
    }
}

#[test]
fn adjacent_blocks_are_copied_as_one_part_within_a_range() {
    let calls = RefCell::new(Vec::new());
    // Includes ranges that are directly adjacent.
    let inner = SimBackend::builder().seed(1).addresses(Addresses::Ascending).build();
    let device = Hooked { inner, hook: |call: DeviceCall| calls.borrow_mut().push(call) };
    let allocator: Allocator<_> = Allocator::new(&device, "segments:fixed".parse().expect("the text should be valid"))
        .expect("the arguments should be valid");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
    let allocate =
        |at: usize| allocator.allocate(PoolId::DEFAULT, streams[at], 5 * MIB).expect("memory should suffice");
    let blocks: Vec<Allocation> = [0, 0, 0, 0, 0, 0, 1].map(allocate).into();
    allocator.free(blocks[1].handle).expect("the allocation should be live");
    allocator.sleep(PoolId::DEFAULT, Contents::Keep).expect("no work is pending");
    // Four blocks fill a segment. The parts are block 0, blocks 2 and 3, blocks 4 and 5 of the directly following
    // segment, and block 6.
    assert!(calls.borrow().contains(&DeviceCall::Save { parts: 4 }), "{:?}", calls.borrow());
    allocator.free(blocks[2].handle).expect("the allocation should be live");
    allocator.wake(PoolId::DEFAULT).expect("memory should suffice");
    assert!(calls.borrow().contains(&DeviceCall::Load { parts: 4 }), "{:?}", calls.borrow());
}

#[test]
fn a_sleeping_pool_refuses_requests() {
    for text in POLICIES {
        let device = device();
        let mut job: Job = Job::busy(&device, text);
        let layout =
            if text.contains("stitching") { None } else { Some(job.allocator.save_layout(job.pool).expect("saved")) };
        job.allocator.sleep(job.pool, Contents::Keep).expect(text);
        let before = job.allocator.digest(job.pool).expect("the pool should exist");
        let (pool, sleeps) = (job.pool, PoolSleeps { pool: job.pool });
        let third = job.allocator.register_stream().expect("a stream id is available");
        for (stream, size_bytes) in
            [(job.streams[0], 512), (job.streams[1], 20 * MIB), (third, MIB), (job.streams[0], 0)]
        {
            assert_eq!(job.allocator.allocate(pool, stream, size_bytes), Err(AllocateError::Sleeps(sleeps)), "{text}");
        }
        let reserved = job.allocator.reserve(pool, job.streams[0], 500 * MIB);
        assert_eq!(reserved.unwrap_err().to_string(), "p1 sleeps: wake it first");
        assert_eq!(job.allocator.begin_step(pool, 0), Err(StepError::Sleeps(sleeps)));
        assert_eq!(job.allocator.save_layout(pool).unwrap_err(), LayoutError::Sleeps(sleeps));
        if let Some(layout) = &layout {
            assert_eq!(
                job.allocator.restore_layout(pool, layout).unwrap_err(),
                RestoreError::State(LayoutError::Sleeps(sleeps))
            );
        }
        assert_eq!(
            job.allocator.digest(pool).expect("the pool should exist"),
            before,
            "{text}: misuse leaves no trace"
        );
        assert_eq!(job.allocator.trim_pool(pool).expect("there should be nothing to release"), 0);
        assert_eq!(job.allocator.trim_all().expect("there should be nothing to release"), 0);
        // Frees are allowed, and the freed blocks affect decisions once the pool is awake.
        let first = job.live[0].0;
        job.free(0);
        while job.live.len() > 4 {
            job.free(3);
        }
        job.allocator.check().expect("the invariants should hold");
        assert_eq!(device.mapped_bytes(), 0);
        let other = job.allocator.allocate(PoolId::DEFAULT, job.streams[0], MIB).expect("other pools serve");
        job.allocator.free(other.handle).expect("the allocation should be live");
        job.allocator.wake(pool).expect(text);
        job.holds_what_it_held();
        let again = job.allocate(0, 512);
        assert_eq!(again.placement.segment, first.placement.segment, "{text}");
        job.allocator
            .allocate(pool, third, MIB)
            .map(|there| job.allocator.free(there.handle))
            .expect("memory should suffice")
            .expect("it should be live");
        job.allocator.trim_all().expect("the device releases the memory");
        job.end();
    }
}

#[test]
fn an_empty_sleeping_pool_can_be_destroyed() {
    for text in POLICIES {
        for is_destroyed in [false, true] {
            let device = device();
            let mut job: Job = Job::busy(&device, text);
            job.allocator.sleep(job.pool, Contents::Keep).expect(text);
            assert!(matches!(job.allocator.destroy_pool(job.pool), Err(PoolError::InUse { .. })));
            if is_destroyed {
                while !job.live.is_empty() {
                    job.free(0);
                }
                job.allocator.destroy_pool(job.pool).expect("nothing should be live in the pool");
                job.allocator.check().expect("the invariants should hold");
                let unknown = UnknownError::DestroyedPool { pool: job.pool };
                let refused = SleepError { pool: job.pool, cause: unknown.into() };
                assert_eq!(job.allocator.wake(job.pool), Err(refused.clone()));
                assert_eq!(job.allocator.sleep(job.pool, Contents::Keep), Err(refused));
                assert_eq!(job.allocator.allocate(job.pool, job.streams[0], 1), Err(unknown.into()));
                assert_eq!(device.leaks().images, 0, "the unneeded saved contents were not discarded");
            }
            drop(job.allocator);
            assert!(device.leaks().is_empty(), "{text}: {}", device.leaks());
        }
    }
}

#[test]
fn a_sleeping_pool_does_not_count_toward_limits_until_it_wakes() {
    let device = device();
    let config = "total_limit_mb:64".parse().expect("the text should be valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let pools = [(); 2]
        .map(|()| allocator.create_pool(policy("segments:expandable")).expect("the configuration should be valid"));
    let first = allocator.allocate(pools[0], stream, 60 * MIB).expect("memory should suffice");
    device.write(first.address, first.size_bytes, 9);
    assert!(allocator.allocate(pools[1], stream, 60 * MIB).is_err());
    allocator.sleep(pools[0], Contents::Keep).expect("nothing should prevent the sleep");
    let second = allocator.allocate(pools[1], stream, 60 * MIB).expect("memory should suffice");
    let error = allocator.wake(pools[0]).unwrap_err();
    let text = "p1: it stays asleep, because waking needs 60.00 MiB: free and trim memory of other pools, or put them to sleep, and wake it again: the allocator's limit is 64.00 MiB: raise it, or trim other pools";
    assert_eq!(error.to_string(), text);
    allocator.check().expect("the invariants should hold");
    allocator.sleep(pools[1], Contents::Drop).expect("nothing should prevent the sleep");
    allocator.wake(pools[0]).expect("memory should suffice");
    assert_eq!(device.read(first.address, first.size_bytes), Some(9));
    allocator.check().expect("the invariants should hold");
    allocator.free(second.handle).expect("the allocation should be live");
}

#[test]
fn a_guard_that_is_dropped_undoes_its_step() {
    for text in POLICIES {
        let device = device();
        let mut job: Job = Job::busy(&device, text);
        let digest = |job: &Job<'_>| job.allocator.digest(job.pool).expect("the pool should exist");
        let (before, heaps) = (digest(&job).ops, heaps(&job));
        let quiesced = job.allocator.quiesce(job.pool, Contents::Keep).expect("no work is pending");
        assert!(matches!(job.allocator.allocate(job.pool, job.streams[0], 1), Err(AllocateError::Sleeps(_))));
        assert!(matches!(
            job.allocator.sleep(job.pool, Contents::Keep),
            Err(SleepError { cause: SleepCause::Busy, .. })
        ));
        assert!(matches!(job.allocator.wake(job.pool), Err(SleepError { cause: SleepCause::Busy, .. })));
        assert!(matches!(job.allocator.destroy_pool(job.pool), Err(PoolError::Sleeping { .. })));
        job.allocator.free(job.live.remove(0).0.handle).expect("freeing is allowed");
        assert_eq!(job.phase(), Phase::Awake, "its memory is mapped");
        drop(quiesced);
        assert_eq!((job.phase(), device.leaks().images), (Phase::Awake, 0));
        assert_eq!(digest(&job).ops, before + heaps + 1, "a request was recorded, and a block was freed");
        let _live = job.allocate(0, MIB);
        job.holds_what_it_held();

        job.allocator.sleep(job.pool, Contents::Keep).expect(text);
        let remapped = job.allocator.remap(job.pool).expect("memory should suffice");
        assert!(device.mapped_bytes() > 0);
        assert!(matches!(job.allocator.allocate(job.pool, job.streams[0], 1), Err(AllocateError::Sleeps(_))));
        assert!(matches!(
            job.allocator.quiesce(job.pool, Contents::Drop),
            Err(SleepError { cause: SleepCause::Busy, .. })
        ));
        drop(remapped);
        assert_eq!((job.phase(), device.mapped_bytes(), job.reserved_bytes()), (Phase::Asleep, 0, 0));
        job.allocator.wake(job.pool).expect(text);
        job.holds_what_it_held();
        job.end();
    }
}

#[test]
fn repeated_sleeps_and_wakes_are_only_recorded() {
    let device = device();
    let job: Job = Job::busy(&device, "segments:expandable");
    let whole = job.reserved_bytes();
    assert_eq!(job.allocator.wake(job.pool).expect("awake").remapped_bytes, 0);
    job.holds_what_it_held();
    job.allocator.sleep(job.pool, Contents::Keep).expect("no work is pending");
    let again = job.allocator.sleep(job.pool, Contents::Drop).expect("the pool should fall asleep");
    assert_eq!((again.released_bytes, again.kept_bytes, device.leaks().images), (0, 0, 1), "the saved contents stay");
    drop(job.allocator.quiesce(job.pool, Contents::Zero).expect("the pool should fall asleep"));
    assert_eq!(job.phase(), Phase::Asleep);
    assert_eq!(job.allocator.wake(job.pool).expect("memory should suffice").remapped_bytes, whole);
    drop(job.allocator.remap(job.pool).expect("awake"));
    assert_eq!(job.phase(), Phase::Awake);
    job.holds_what_it_held();
    job.end();
}

#[test]
fn waking_a_pool_that_is_awake_leaves_its_open_step_alone() {
    let device = device();
    let mut job: Job = Job::new(&device, "segments:expandable,plan:learn");
    let mut step = |wakes: bool| {
        job.allocator.begin_step(job.pool, 0).expect("no step should be open");
        if wakes {
            job.allocator.wake(job.pool).expect("it is awake");
            drop(job.allocator.remap(job.pool).expect("it is awake"));
        }
        let _live = job.allocate(0, 5 * MIB);
        job.free(0);
        job.allocator.end_step(job.pool).expect("a step should be open").planned
    };
    assert_eq!([false, false, false, true, false].map(&mut step), [0, 0, 1, 1, 1]);
    job.end();
}

#[test]
fn an_observed_pool_sleeps_only_stepwise_and_keeps_its_retired_segments() {
    for text in ["segments:expandable", "segments:fixed"] {
        let device = device();
        let mut job: Job = Job::busy(&device, text);
        let (observer, births) = job.allocator.observe(job.pool).expect("the pool should exist");
        assert!(!births.is_empty());
        while job.live.iter().any(|(block, _)| block.placement.segment.0 == 0) {
            let at = job
                .live
                .iter()
                .position(|(block, _)| block.placement.segment.0 == 0)
                .expect("a block of segment 0 is live");
            job.free(at);
        }
        job.allocator.trim_pool(job.pool).expect("the driver should release memory");
        let dead_bytes = job.allocator.pool_stats(job.pool).expect("the pool should exist").retired_bytes;
        assert!(dead_bytes > 0, "{text}");
        let refused = job.allocator.sleep(job.pool, Contents::Keep);
        assert_eq!(refused, Err(SleepError { pool: job.pool, cause: SleepCause::Observed { observers: 1 } }));
        job.allocator
            .quiesce(job.pool, Contents::Keep)
            .expect("no work is pending")
            .unmap()
            .expect("the driver should release memory");
        assert_eq!((job.phase(), job.reserved_bytes()), (Phase::Asleep, dead_bytes), "{text}");
        let unread = job.allocator.unread(observer);
        job.allocator.acknowledge(observer, &unread).expect("the driver should release memory");
        assert_eq!(job.reserved_bytes(), 0, "{text}");
        job.allocator.wake(job.pool).expect("memory should suffice");
        job.holds_what_it_held();
        job.allocator.forget(observer).expect("the driver should release memory");
        job.end();
    }
}

#[test]
fn an_open_step_prevents_sleep_and_learned_plans_survive_it() {
    let device = device();
    let mut job: Job = Job::new(&device, "segments:expandable,plan:learn");
    let step = |job: &mut Job<'_>| {
        job.allocator.begin_step(job.pool, 0).expect("no step should be open");
        let blocks: Vec<Allocation> = [5, 3, 9].map(|mib| job.allocate(0, mib * MIB)).into();
        let refused = job.allocator.sleep(job.pool, Contents::Keep);
        assert_eq!(refused, Err(SleepError { pool: job.pool, cause: SleepCause::StepOpen }));
        let count = job.live.len();
        job.free(count - 2);
        (job.allocator.end_step(job.pool).expect("a step should be open"), blocks)
    };
    for _ in 0..3 {
        step(&mut job);
        while !job.live.is_empty() {
            job.free(0);
        }
    }
    let (report, blocks) = step(&mut job);
    assert_eq!(report.planned, 3);
    job.allocator.sleep(job.pool, Contents::Keep).expect("no step is open");
    assert_eq!(device.mapped_bytes(), 0);
    job.allocator.wake(job.pool).expect("memory should suffice");
    job.holds_what_it_held();
    while !job.live.is_empty() {
        job.free(0);
    }
    let (report, again) = step(&mut job);
    assert_eq!(report.planned, 3);
    let places = |blocks: &[Allocation]| blocks.iter().map(|block| block.address).collect::<Vec<_>>();
    assert_eq!(places(&again), places(&blocks));
    job.holds_what_it_held();
    job.end();
}

/// An allocation in the memory of a plan was used by another stream, whose work may still run when the pool falls asleep. The simulated
/// device refuses to unmap memory that pending work uses.
#[test]
fn a_sleep_waits_for_the_streams_that_used_planned_places() {
    for is_live in [false, true] {
        let device = device();
        let mut job: Job = Job::new(&device, "segments:expandable,plan:learn");
        for number in 0..4 {
            job.allocator.begin_step(job.pool, 0).expect("no step should be open");
            let made = job.allocate(0, 5 * MIB);
            if number == 3 {
                let [owner, user] = job.streams;
                let event = device.record(owner).expect("the driver should work");
                device.wait(user, event).expect("the driver should work");
                device.recycle(event);
                job.allocator.record_use(made.handle, user).expect("the allocation should be live");
                device.submit(user, made.address, made.size_bytes).expect("no race should be found");
            }
            if number < 3 || !is_live {
                job.free(0);
            }
            let report = job.allocator.end_step(job.pool).expect("a step should be open");
            assert_eq!(report.planned, u64::from(number > 1));
        }
        job.allocator.sleep(job.pool, Contents::Keep).expect("no step is open");
        assert_eq!(device.mapped_bytes(), 0);
        job.allocator.wake(job.pool).expect("memory should suffice");
        job.holds_what_it_held();
        job.end();
    }
}

#[test]
fn pools_of_a_tag_are_found_in_order() {
    let device = device();
    let allocator: Allocator<_> =
        Allocator::new(&device, "tag:activations".parse::<Config>().expect("the text should be valid"))
            .expect("the arguments should be valid");
    let tagged = |tag: &str| allocator.pools_tagged(tag);
    let make = |text: &str| allocator.create_pool(policy(text)).expect("the configuration should be valid");
    let pools = ["tag:weights", "tag:kv_cache", "segments:fixed,tag:weights", "segments:fixed"].map(make);
    assert_eq!(tagged("weights"), [pools[0], pools[2]]);
    assert_eq!(tagged("activations"), [PoolId::DEFAULT]);
    assert_eq!(tagged("other"), []);
    allocator.destroy_pool(pools[0]).expect("the pool should be empty");
    assert_eq!(tagged("weights"), [pools[2]]);
    assert_eq!(
        allocator.pool_config(pools[2]).expect("the pool should exist").to_string().matches("tag:weights").count(),
        1
    );
    for wrong in ["", "Weights", "a b", "a_name_of_twenty_five_bytes", "kv:cache"] {
        assert_eq!(PoolConfig::builder().tag(Some(wrong)).build(), Err(ConfigError::NotATag), "{wrong}");
    }
    let error = "tag:KV".parse::<PoolConfig>().unwrap_err().to_string();
    assert!(error.contains("1 to 24 lower-case letters"), "{error}");
}

#[test]
fn a_pool_without_memory_sleeps_and_keeping_contents_needs_a_backend_that_copies() {
    let device = device();
    let allocator: Allocator<_> = Allocator::new(&device, Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    assert_eq!(
        allocator.sleep(PoolId::DEFAULT, Contents::Keep).expect("there should be nothing to release").kept_bytes,
        0
    );
    assert!(matches!(allocator.allocate(PoolId::DEFAULT, stream, 1), Err(AllocateError::Sleeps(_))));
    allocator.wake(PoolId::DEFAULT).expect("nothing is needed");
    assert_eq!(
        allocator.digest(PoolId::DEFAULT).expect("the pool should exist").ops,
        0,
        "a heap without ops has no history"
    );
    let _live = allocator.allocate(PoolId::DEFAULT, stream, 1).expect("memory should suffice");

    struct CannotCopy(SimBackend);
    impl Backend for CannotCopy {
        fn granularity_bytes(&self) -> u64 {
            self.0.granularity_bytes()
        }
        fn reserve(&self, size_bytes: u64) -> Result<symmalloc_core::backend::Range, symmalloc_core::BackendError> {
            self.0.reserve(size_bytes)
        }
        fn map(
            &self,
            range: symmalloc_core::backend::Range,
            at: u64,
            size: u64,
        ) -> Result<(), symmalloc_core::BackendError> {
            self.0.map(range, at, size)
        }
        fn unmap(
            &self,
            range: symmalloc_core::backend::Range,
            at: u64,
            size: u64,
        ) -> Result<(), symmalloc_core::BackendError> {
            self.0.unmap(range, at, size)
        }
        fn release(&self, range: symmalloc_core::backend::Range) -> Result<(), symmalloc_core::BackendError> {
            self.0.release(range)
        }
        fn record(&self, stream: StreamId) -> Result<symmalloc_core::backend::Event, symmalloc_core::BackendError> {
            self.0.record(stream)
        }
        fn wait(
            &self,
            stream: StreamId,
            event: symmalloc_core::backend::Event,
        ) -> Result<(), symmalloc_core::BackendError> {
            self.0.wait(stream, event)
        }
        fn query(&self, event: symmalloc_core::backend::Event) -> Result<bool, symmalloc_core::BackendError> {
            self.0.query(event)
        }
        fn recycle(&self, event: symmalloc_core::backend::Event) {
            self.0.recycle(event);
        }
        fn synchronize(&self, stream: StreamId) -> Result<(), symmalloc_core::BackendError> {
            self.0.synchronize(stream)
        }
    }
    let plain: Allocator<_> = Allocator::new(CannotCopy(SimBackend::builder().build()), Config::default())
        .expect("the arguments should be valid");
    let stream = plain.register_stream().expect("a stream id is available");
    let block = plain.allocate(PoolId::DEFAULT, stream, MIB).expect("memory should suffice");
    let error = plain.sleep(PoolId::DEFAULT, Contents::Keep).unwrap_err();
    assert!(matches!(error.cause, SleepCause::Save { live_bytes: MIB, .. }), "{error}");
    plain.sleep(PoolId::DEFAULT, Contents::Drop).expect("nothing is copied");
    plain.wake(PoolId::DEFAULT).expect("memory should suffice");
    assert_eq!(plain.allocation(block.handle).expect("the allocation should be live").address, block.address);
    assert_ne!(block.address, DeviceAddress(0));
}
