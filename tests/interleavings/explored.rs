//! An allocator for exploring thread interleavings: its lock and its device are points at which the scheduler may
//! switch threads. Also contains helpers that use it as a correct program does.

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicBool, Ordering::SeqCst};
use shuttle::sync::{Arc, Mutex, MutexGuard};
use shuttle::{Config as ShuttleConfig, Runner};
use std::sync::PoisonError;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::{Config, PointerLookup, PoolConfig};
use symmalloc_core::lock::{Lock, LockCell};
use symmalloc_core::{Allocation, StreamId, generic};
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_sim::SimBackend;

/// A third kind of lock, from shuttle, at which the scheduler may switch threads.
#[derive(Debug)]
pub(crate) enum Shuttled {}

#[derive(Debug)]
pub(crate) struct ShuttledCell<T>(Mutex<T>);

impl Lock for Shuttled {
    const IS_EXCLUSIVE: bool = false;
    type Cell<T> = ShuttledCell<T>;
}

impl<T> LockCell<T> for ShuttledCell<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        ShuttledCell(Mutex::new(value))
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device at whose calls the scheduler may switch threads.
pub(crate) type Device = Hooked<SimBackend, Box<dyn Fn(DeviceCall) + Send + Sync>>;
pub(crate) type Shared = Arc<generic::Allocator<Device, Shuttled>>;

/// Runs `test` on `schedules` schedules of each of two kinds: random ones, and ones with few preemptions at arbitrary
/// points.
pub(crate) fn explore(schedules: usize, test: impl Fn() + Send + Sync + Clone + 'static) {
    let mut config = ShuttleConfig::new();
    config.stack_size = 256 << 10;
    let random = RandomScheduler::new_from_seed(0x5eed, schedules);
    assert_eq!(Runner::new(random, config.clone()).run(test.clone()), schedules);
    let rare = PctScheduler::new_from_seed(0x5eed, 3, schedules);
    assert_eq!(Runner::new(rare, config).run(test), schedules);
}

pub(crate) const STREAMS: u16 = 3;

/// Creates an allocator with three streams, each the first of a group of two, that finds allocations by address.
pub(crate) fn allocator<L: Lock>(config: &Config, seed: u64) -> generic::Allocator<Device, L> {
    // The scheduler may switch threads at an atomic access. A yield would force a switch instead.
    let turn = (!L::IS_EXCLUSIVE).then(|| AtomicBool::new(false));
    let give_way = move |_| _ = turn.as_ref().map(|turn| turn.load(SeqCst));
    let device = Hooked { inner: SimBackend::builder().seed(seed).build(), hook: Box::new(give_way) as Box<_> };
    let config =
        config.to_builder().pointer_lookup(PointerLookup::Exact).build().expect("the configuration should be valid");
    let allocator = generic::Allocator::with_lock(device, config).expect("the device should be created");
    (0..STREAMS).for_each(|stream| assert_eq!(allocator.register_stream(), Ok(StreamId(stream))));
    for stream in (0..STREAMS).map(StreamId) {
        assert_eq!(allocator.register_stream_in(stream), Ok(second_of(stream)));
    }
    allocator
}

/// Returns the other stream of the group with this first stream.
pub(crate) fn second_of(group: StreamId) -> StreamId {
    StreamId(group.0 + STREAMS)
}

pub(crate) fn of_pool(pool: PoolConfig) -> Config {
    Config::builder().default_pool(pool).build().expect("the configuration should be valid")
}

pub(crate) fn shared(config: &Config, seed: u64) -> Shared {
    Arc::new(allocator(config, seed))
}

/// Submits work that uses all of an allocation.
pub(crate) fn use_it<L: Lock>(allocator: &generic::Allocator<Device, L>, stream: StreamId, made: &Allocation) {
    let used = allocator.backend().inner.submit(stream, made.address, made.size_bytes);
    used.unwrap_or_else(|race| panic!("missing wait at {}: {race}", made.placement));
}

/// Submits work of another stream on an allocation, after making that stream wait for the owner.
pub(crate) fn lend<L: Lock>(
    allocator: &generic::Allocator<Device, L>,
    owner: StreamId,
    other: StreamId,
    made: &Allocation,
) {
    let device = allocator.backend();
    let event = device.record(owner).expect("no fault should be injected");
    device.wait(other, event).expect("no fault should be injected");
    device.recycle(event);
    use_it(allocator, other, made);
    match by_address(made) {
        true => allocator.record_use_at(made.address, other).expect("the allocation should be live"),
        false => allocator.record_use(made.handle, other).expect("the allocation should be live"),
    }
}

/// Frees an allocation, either by handle or by address.
pub(crate) fn free<L: Lock>(allocator: &generic::Allocator<Device, L>, made: &Allocation) {
    match by_address(made) {
        true => drop(allocator.free_at(made.address).expect("the allocation should be live")),
        false => allocator.free(made.handle).expect("the allocation should be live"),
    }
}

/// Returns `true` if the allocation is identified by its address. Depends only on its placement and size.
pub(crate) fn by_address(made: &Allocation) -> bool {
    (made.placement.offset_bytes / 512 + made.size_bytes / 512).is_multiple_of(2)
}

/// Checks, after everything was freed, that neither the device nor the statistics show any remaining memory.
pub(crate) fn assert_nothing_is_left(allocator: &Shared) {
    allocator.check().expect("the invariants should hold");
    assert_eq!(allocator.stats().usage.all.allocations.current, 0, "an allocation is still live");
    allocator.trim_all().expect("no fault should be injected");
    assert_eq!(allocator.stats().reserved_bytes.current, 0);
    assert!(allocator.backend().inner.leaks().is_empty(), "{}", allocator.backend().inner.leaks());
}
