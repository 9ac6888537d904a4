//! Safe code cannot free memory of others, corrupt the allocator's state, or make it hold unused memory. Errors are typed, and failed calls
//! change nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Range};
use symmalloc_core::config::{Config, PointerLookup, PoolConfig, StreamPolicy};
use symmalloc_core::recording::{Sink, SinkError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, AllocationId, Allocator, Op, PoolId, Record, SharedAllocator, StreamId};
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_sim::{IdleBackend, SimBackend};
use symmalloc_trace::replay::{Program, Replay};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);

fn fixed() -> Config {
    let pool = PoolConfig::builder().fixed().build().expect("the configuration should be valid");
    Config::builder().default_pool(pool).build().expect("the configuration should be valid")
}

/// Each allocator has an allocation with the same placement, so that only the owner distinguishes the handles.
#[test]
fn a_handle_is_rejected_by_every_later_allocator() {
    let made = || {
        let allocator: Allocator<_> =
            Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
        allocator.register_stream().expect("a stream id is available");
        let made = allocator.allocate(POOL, S0, 512).expect("memory should suffice");
        (allocator, made)
    };
    let (first, of_first) = made();
    for number in 1..70_000 {
        let (allocator, own) = made();
        assert!(allocator.free(of_first.handle).is_err(), "allocator {number} freed an allocation of the first one");
        assert!(allocator.record_use(of_first.handle, S0).is_err(), "allocator {number}");
        assert!(allocator.allocation(of_first.handle).is_err(), "allocator {number}");
        allocator.free(own.handle).expect("the allocation should be live");
    }
    first.free(of_first.handle).expect("the allocation should be live");
}

/// Creates a dead segment and an observer that has not read its death.
fn dead_segment(allocator: &Allocator<&SimBackend>) {
    allocator.register_stream().expect("a stream id is available");
    let made = allocator.allocate(POOL, S0, 30 * MIB).expect("memory should suffice");
    allocator.free(made.handle).expect("the allocation should be live");
}

#[test]
fn an_observer_cannot_acknowledge_events_read_by_another() {
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, fixed()).expect("the arguments should be valid");
    dead_segment(&allocator);
    let (one, _) = allocator.observe(POOL).expect("the pool should exist");
    let (other, _) = allocator.observe(POOL).expect("the pool should exist");
    allocator.trim_all().expect("no fault should be injected");
    let read = allocator.unread(one);
    assert!(allocator.acknowledge(other, &read).is_err(), "the other one has read nothing");
    assert_eq!(allocator.acknowledge(one, &read), Ok(0), "the other one has not acknowledged");
    assert_eq!((device.mapped_bytes(), allocator.unread(other).events.len()), (30 * MIB, 1));
    assert_eq!(allocator.acknowledge(other, &allocator.unread(other)), Ok(30 * MIB));
}

#[test]
fn events_of_one_allocator_cannot_be_acknowledged_at_another() {
    let devices = [(); 2].map(|()| SimBackend::builder().build());
    let [one, other] =
        devices.each_ref().map(|device| Allocator::new(device, fixed()).expect("the arguments should be valid"));
    let observers = [&one, &other].map(|allocator| {
        dead_segment(allocator);
        let (observer, _) = allocator.observe(POOL).expect("the pool should exist");
        allocator.trim_all().expect("no fault should be injected");
        observer
    });
    assert!(other.acknowledge(observers[1], &one.unread(observers[0])).is_err(), "read elsewhere");
    assert_eq!((devices[1].mapped_bytes(), other.unread(observers[1]).events.len()), (30 * MIB, 1));
    assert_eq!(other.acknowledge(observers[1], &other.unread(observers[1])), Ok(30 * MIB));
}

/// A sink that panics once it is full.
struct Panicking {
    room: usize,
}

impl Sink for Panicking {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        Ok(())
    }
    fn record(&mut self, _: Record) -> Result<(), SinkError> {
        self.room = self.room.checked_sub(1).expect("this sink panics when it is full");
        Ok(())
    }
    fn finish(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

#[test]
fn a_recording_whose_sink_panicked_is_not_whole() {
    let allocator =
        SharedAllocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    allocator.start_recording(Panicking { room: 4 }).expect("nothing should have been allocated");
    allocator.register_stream().expect("a stream id is available");
    let mut panics = 0;
    for _ in 0..6 {
        panics += u32::from(catch_unwind(AssertUnwindSafe(|| allocator.allocate(POOL, S0, MIB))).is_err());
    }
    assert!(panics >= 1, "the program sees the panic");
    let stopped = allocator.stop_recording();
    assert!(stopped.is_err(), "{stopped:?}, though ops are missing");
    allocator.check().expect("the invariants should hold");
    let _live = allocator.allocate(POOL, S0, MIB).expect("the allocator continues");
}

fn a_panic_in_a_call_leaves_no_charge(panics_in: fn(DeviceCall) -> bool) {
    let device = SimBackend::builder().build();
    let is_armed = AtomicBool::new(true);
    let hook = |call| assert!(!panics_in(call) || !is_armed.swap(false, Ordering::Relaxed), "this backend panics once");
    let pool =
        PoolConfig::builder().fixed().limit_bytes(Some(20 * MIB)).build().expect("the configuration should be valid");
    let config = Config::builder()
        .default_pool(pool)
        .total_limit_bytes(Some(20 * MIB))
        .build()
        .expect("the configuration should be valid");
    let allocator =
        SharedAllocator::new(Hooked { inner: &device, hook }, config).expect("the arguments should be valid");
    allocator.register_stream().expect("a stream id is available");
    catch_unwind(AssertUnwindSafe(|| allocator.allocate(POOL, S0, 5 * MIB))).expect_err("the backend panicked");
    let stats = allocator.stats();
    assert_eq!(
        (stats.reserved_bytes.current, stats.usage.all.allocations.current),
        (0, 0),
        "the failed call stays charged"
    );
    allocator.check().expect("the invariants should hold");
    let _live = allocator.allocate(POOL, S0, 5 * MIB).expect("the whole limit is available");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    is_armed.store(true, Ordering::Relaxed);
    let again = SharedAllocator::new(Hooked { inner: &device, hook }, allocator.config().clone())
        .expect("the arguments should be valid");
    again.register_stream().expect("a stream id is available");
    catch_unwind(AssertUnwindSafe(|| again.restore_layout(POOL, &layout))).expect_err("the backend panicked");
    assert_eq!(again.stats().reserved_bytes.current, 0, "the failed call stays charged");
    again.restore_layout(POOL, &layout).expect("the whole limit is available");
    again.check().expect("the invariants should hold");
}

#[test]
fn a_backend_that_panics_in_map_leaves_no_charge() {
    a_panic_in_a_call_leaves_no_charge(|call| matches!(call, DeviceCall::Map { .. }));
}

#[test]
fn a_backend_that_panics_in_reserve_leaves_no_charge() {
    a_panic_in_a_call_leaves_no_charge(|call| matches!(call, DeviceCall::Reserve { .. }));
}

/// An allocation whose free panicked stays live. The program frees it by its address, which it still has.
#[test]
fn a_panic_in_record_leaves_the_allocation_live() {
    let device = SimBackend::builder().build();
    let is_armed = AtomicBool::new(true);
    let hook = |call| {
        let panics = matches!(call, DeviceCall::Record { .. }) && is_armed.swap(false, Ordering::Relaxed);
        assert!(!panics, "this backend panics once");
    };
    let config =
        Config::builder().pointer_lookup(PointerLookup::Exact).build().expect("the configuration should be valid");
    let allocator =
        SharedAllocator::new(Hooked { inner: &device, hook }, config).expect("the arguments should be valid");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
    let made = allocator.allocate(POOL, streams[0], MIB).expect("the allocation should fit");
    allocator.record_use(made.handle, streams[1]).expect("the allocation should be live");
    catch_unwind(AssertUnwindSafe(|| allocator.free_at(made.address))).expect_err("the backend panicked");
    allocator.check().expect("the invariants should hold");
    assert_eq!(allocator.handle_at(made.address), Ok(made.handle));
    assert_eq!(allocator.free_at(made.address), Ok(MIB));
    allocator.check().expect("the invariants should hold");
}

/// A backend that returns a forged range from one call of `reserve`.
struct Lying<'a> {
    device: &'a SimBackend,
    /// Index of the call that returns the forged range.
    at: u64,
    calls: AtomicU64,
    lie: fn(&Range, u64) -> Range,
    /// The first range returned.
    first: AtomicU64,
}

impl Backend for Lying<'_> {
    fn granularity_bytes(&self) -> u64 {
        self.device.granularity_bytes()
    }
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        if self.calls.fetch_add(1, Ordering::Relaxed) == self.at {
            let first = DeviceAddress(self.first.load(Ordering::Relaxed));
            return Ok((self.lie)(&Range { base: first, size_bytes: 20 * MIB }, size_bytes));
        }
        let range = self.device.reserve(size_bytes)?;
        self.first.store(range.base.0, Ordering::Relaxed);
        Ok(range)
    }
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        assert!(!self.has_just_lied(), "the forged range was mapped");
        self.device.map(range, offset_bytes, size_bytes)
    }
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.device.unmap(range, offset_bytes, size_bytes)
    }
    /// The device never returned the forged range, so it does not have to be released.
    fn release(&self, range: Range) -> Result<(), BackendError> {
        if self.has_just_lied() { Ok(()) } else { self.device.release(range) }
    }
    fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        self.device.record(stream)
    }
    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        self.device.wait(stream, event)
    }
    fn query(&self, event: Event) -> Result<bool, BackendError> {
        self.device.query(event)
    }
    fn recycle(&self, event: Event) {
        self.device.recycle(event);
    }
    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        self.device.synchronize(stream)
    }
}

impl Lying<'_> {
    fn has_just_lied(&self) -> bool {
        self.calls.load(Ordering::Relaxed) == self.at + 1
    }
}

/// Makes the second segment's range a forged one: the request is refused, nothing changes, and the next request succeeds.
fn invalid_range_is_refused(lie: fn(&Range, u64) -> Range) {
    let device = SimBackend::builder().build();
    {
        let lying = Lying { device: &device, at: 1, calls: AtomicU64::new(0), lie, first: AtomicU64::new(0) };
        let allocator: Allocator<_> = Allocator::new(lying, fixed()).expect("the arguments should be valid");
        allocator.register_stream().expect("a stream id is available");
        let kept = allocator.allocate(POOL, S0, 20 * MIB).expect("memory should suffice");
        let before = (allocator.snapshot(), allocator.stats().reserved_bytes.current, device.mapped_bytes());
        let refused = allocator.allocate(POOL, S0, 30 * MIB);
        assert!(refused.is_err(), "{refused:?}");
        allocator.check().expect("the invariants should hold");
        assert_eq!((allocator.snapshot(), allocator.stats().reserved_bytes.current, device.mapped_bytes()), before);
        let Allocation { handle, .. } =
            allocator.allocate(POOL, S0, 30 * MIB).expect("the backend returns valid ranges again");
        allocator.free(handle).expect("the allocation should be live");
        allocator.free(kept.handle).expect("the allocation should be live");
        allocator.trim_all().expect("no fault should be injected");
        assert_eq!(allocator.stats().reserved_bytes.current, 0);
    }
    assert!(device.leaks().is_empty(), "{}", device.leaks());
}

#[test]
fn a_range_that_overlaps_a_live_one_is_refused() {
    invalid_range_is_refused(|first, size_bytes| Range { base: first.base, size_bytes });
    invalid_range_is_refused(|first, size_bytes| Range { base: DeviceAddress(first.base.0 + 18 * MIB), size_bytes });
    invalid_range_is_refused(|first, size_bytes| Range {
        base: DeviceAddress(first.base.0 - size_bytes + 2 * MIB),
        size_bytes,
    });
}

#[test]
fn a_range_that_is_not_aligned_is_refused() {
    invalid_range_is_refused(|_, size_bytes| Range { base: DeviceAddress((1 << 46) + 512), size_bytes });
    invalid_range_is_refused(|_, bytes| Range { base: DeviceAddress(1 << 46), size_bytes: bytes + 512 });
}

/// The end of a range determines where growth continues.
#[test]
fn a_range_that_is_longer_than_requested_is_refused() {
    invalid_range_is_refused(|_, bytes| Range { base: DeviceAddress(1 << 46), size_bytes: bytes + 20 * MIB });
}

#[test]
fn a_range_that_is_too_short_is_refused() {
    invalid_range_is_refused(|_, _| Range { base: DeviceAddress(1 << 46), size_bytes: 28 * MIB });
    invalid_range_is_refused(|_, _| Range { base: DeviceAddress(1 << 46), size_bytes: 0 });
}

#[test]
fn a_range_that_wraps_around_is_refused() {
    let base = DeviceAddress(0_u64.wrapping_sub(16 * MIB));
    assert_eq!(base.0 % (2 * MIB), 0);
    invalid_range_is_refused(|_, size_bytes| Range { base: DeviceAddress(0_u64.wrapping_sub(16 * MIB)), size_bytes });
}

/// Returns the resident memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux provides it");
    let pages: u64 =
        text.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).expect("it should be a number");
    pages * 4096
}

/// Creates records of streams that each take the block of the preceding one, and wait for another one.
fn streams_that_each_wait_once(streams: u16, on: fn(u16, u16) -> u16) -> Vec<Record> {
    let pool = PoolConfig::builder().streams(StreamPolicy::Shared).build().expect("the configuration should be valid");
    let mut ops: Vec<Op> = (0..streams).map(|stream| Op::register(StreamId(stream))).collect();
    ops.push(Op::CreatePool { pool: PoolId(1), config: Box::new(pool) });
    for stream in 0..streams {
        let id = AllocationId(stream.into());
        let (stream, on) = (StreamId(stream), StreamId(on(stream, streams)));
        ops.push(Op::Allocate { id, pool: PoolId(1), stream, size_bytes: 2 * MIB });
        ops.push(Op::Free { id });
        ops.push(Op::Wait { stream, on });
    }
    ops.into_iter().map(Record::from).collect()
}

fn waits_cost_little(streams: u16, on: fn(u16, u16) -> u16) {
    let (before, begun) = (resident_bytes(), std::time::Instant::now());
    let records = streams_that_each_wait_once(streams, on);
    let program = Program::new(&records).expect("the arguments should be valid");
    let allocator: Allocator<_> =
        Allocator::new(IdleBackend::default(), Config::default()).expect("the arguments should be valid");
    Replay::new(&allocator, &program).run(|_, _| ()).expect("no limit should be reached");
    let taken_bytes = resident_bytes().saturating_sub(before);
    println!("{streams} streams: {taken_bytes} bytes, {:?}", begun.elapsed());
    assert!(
        taken_bytes < 32 * MIB + u64::from(streams) * 1024,
        "{streams} streams that wait once take {taken_bytes} bytes"
    );
    assert!(begun.elapsed().as_secs() < 2, "{:?}", begun.elapsed());
}

#[test]
fn waits_of_four_thousand_streams_take_little_time_and_memory() {
    waits_cost_little(4096, |stream, _| stream.saturating_sub(1));
    waits_cost_little(4096, |_, streams| streams - 1);
}

#[test]
fn waits_of_the_maximum_number_of_streams_are_cheap() {
    waits_cost_little(u16::MAX, |stream, _| stream.saturating_sub(1));
    waits_cost_little(u16::MAX, |_, streams| streams - 1);
}
