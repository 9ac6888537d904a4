//! Misuse: every invalid call returns a typed error that states the problem, and changes nothing.

use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Range};
use symmalloc_core::config::{Config, ConfigError, FixedSegments, PointerLookup, PoolConfig, SegmentPolicy};
use symmalloc_core::errors::{
    AllocateError, FreeError, HandleError, OutOfMemoryCause, PoolError, RecordUseError, TrimError, UnknownError,
};
use symmalloc_core::units::{MIB, SEGMENT_BYTES_MAX};
use symmalloc_core::{Allocator, Handle, LimitScope, Placement, PoolId, Retry, StreamId};
use symmalloc_sim::{Call, SimBackend};

const S0: StreamId = StreamId(0);
const POOL: PoolId = PoolId::DEFAULT;

fn with(config: Config) -> Allocator<SimBackend> {
    let allocator = Allocator::new(SimBackend::builder().memory_bytes(1 << 50).build(), config)
        .expect("the arguments should be valid");
    allocator.register_stream().expect("the first stream should be registered");
    allocator
}

fn allocator() -> Allocator<SimBackend> {
    with(Config::default())
}

/// Returns the state that an error must leave unchanged.
fn state(allocator: &Allocator<SimBackend>) -> impl PartialEq + std::fmt::Debug + use<> {
    allocator.check().expect("the invariants should hold");
    (allocator.snapshot(), allocator.stats(), allocator.digest(POOL), allocator.backend().calls())
}

#[test]
fn a_double_free_is_stale_even_when_the_memory_is_in_use_again() {
    let allocator = allocator();
    let first = allocator.allocate(POOL, S0, 4096).expect("the allocation should fit");
    allocator.free(first.handle).expect("the allocation should be live");
    let stale = FreeError::Handle(HandleError::Stale { handle: first.handle });
    assert_eq!(allocator.free(first.handle), Err(stale.clone()));
    let second = allocator.allocate(POOL, S0, 4096).expect("the allocation should fit");
    assert_eq!(second.placement, first.placement);
    let before = state(&allocator);
    assert_eq!(allocator.free(first.handle), Err(stale));
    assert_eq!(allocator.record_use(first.handle, S0), Err(HandleError::Stale { handle: first.handle }.into()));
    assert_eq!(allocator.allocation(first.handle), Err(HandleError::Stale { handle: first.handle }));
    assert_eq!(state(&allocator), before);
    allocator.free(second.handle).expect("the allocation should still be live");
}

#[test]
fn a_handle_is_stale_when_its_segment_is_gone() {
    let allocator = allocator();
    let made = allocator.allocate(POOL, S0, 4096).expect("the allocation should fit");
    allocator.free(made.handle).expect("the allocation should be live");
    allocator.trim_all().expect("no fault should be injected");
    assert_eq!(allocator.free(made.handle), Err(HandleError::Stale { handle: made.handle }.into()));
}

#[test]
fn another_allocators_handle_is_foreign() {
    let (one, other) = (allocator(), allocator());
    let handle = one.allocate(POOL, S0, 4096).expect("the allocation should fit").handle;
    let twin = other.allocate(POOL, S0, 4096).expect("the allocation should fit").handle;
    assert_eq!(other.free(handle), Err(HandleError::Foreign { handle }.into()));
    assert_eq!(other.record_use(handle, S0), Err(HandleError::Foreign { handle }.into()));
    other.free(twin).expect("not touched");
    one.free(handle).expect("not touched");
}

#[test]
fn forged_handles_are_refused() {
    let allocator = allocator();
    let given = allocator.allocate(POOL, S0, 4096).expect("the allocation should fit").handle;
    let (place, serial) = given.into_raw();
    assert_eq!(Handle::from_raw((place, serial)), given);
    let before = state(&allocator);
    let places = [0, 1, place + 1, place | 1 << 32, u64::MAX, u64::from(u32::MAX)].map(|place| (place, serial));
    let range = 1 << 32;
    let serials = [0, serial - 1, serial + 1, serial - range, serial + range, serial ^ (1 << 63), u64::MAX];
    for wrong in places.into_iter().chain(serials.map(|serial| (place, serial))) {
        if wrong == (place, serial) {
            continue;
        }
        let handle = Handle::from_raw(wrong);
        let refused = allocator.allocation(handle).expect_err("never given");
        assert!(matches!(refused, HandleError::Foreign { .. } | HandleError::Stale { .. }), "{wrong:x?}: {refused}");
        // Words that look like an allocation of zero bytes may be accepted as one: it owns nothing.
        if place_slot(wrong.0) != u32::MAX {
            assert!(allocator.free(handle).is_err(), "{wrong:x?}");
            assert!(allocator.record_use(handle, S0).is_err(), "{wrong:x?}");
            assert_eq!(state(&allocator), before, "{wrong:x?}");
        }
    }
    allocator.check().expect("the invariants should hold");
    allocator.free(given).expect("the allocation should still be live");
}

fn place_slot(place: u64) -> u32 {
    place as u32
}

#[test]
fn unknown_streams_and_pools_are_named() {
    let allocator = allocator();
    let live = allocator.allocate(POOL, S0, 512).expect("the allocation should fit").handle;
    let before = state(&allocator);
    let (stream, pool) = (StreamId(1), PoolId(1));
    let unknown_stream = UnknownError::Stream { stream, streams: 1 };
    let unknown_pool = UnknownError::Pool { pool, pools: 1 };
    assert_eq!(allocator.allocate(POOL, stream, 512), Err(unknown_stream.into()));
    assert_eq!(allocator.allocate(pool, S0, 512), Err(unknown_pool.into()));
    assert_eq!(allocator.allocate(POOL, stream, 0), Err(unknown_stream.into()));
    assert_eq!(allocator.reserve(pool, S0, 512), Err(unknown_pool.into()));
    assert_eq!(allocator.record_use(live, stream), Err(RecordUseError::Unknown(unknown_stream)));
    assert_eq!(allocator.note_stream_wait(S0, stream), Err(unknown_stream));
    assert_eq!(allocator.note_synchronized(stream), Err(unknown_stream));
    assert_eq!(allocator.trim_pool(pool), Err(TrimError::Unknown(unknown_pool)));
    assert_eq!(allocator.destroy_pool(pool), Err(unknown_pool.into()));
    assert_eq!(allocator.digest(pool), Err(unknown_pool));
    assert_eq!(allocator.pool_stats(pool).map(drop), Err(unknown_pool));
    assert_eq!(allocator.observe(pool).map(drop), Err(unknown_pool));
    assert_eq!(state(&allocator), before);
    assert!(unknown_stream.to_string().contains("register_stream"));
    assert!(unknown_pool.to_string().contains("create_pool"));
}

#[test]
fn a_pool_in_use_cannot_be_destroyed_and_a_destroyed_one_cannot_be_used() {
    let allocator = allocator();
    let pool = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let made = allocator.allocate(pool, S0, 1000).expect("the allocation should fit");
    let in_use = PoolError::InUse { pool, allocations: 1, allocated_bytes: 1024 };
    assert_eq!(allocator.destroy_pool(pool), Err(in_use));
    allocator.free(made.handle).expect("the pool is unchanged");
    assert_eq!(allocator.destroy_pool(POOL), Err(PoolError::Default));
    allocator.destroy_pool(pool).expect("the pool should be empty");
    assert!(allocator.backend().leaks().is_empty());
    let gone = UnknownError::DestroyedPool { pool };
    assert_eq!(allocator.allocate(pool, S0, 512), Err(gone.into()));
    assert_eq!(allocator.destroy_pool(pool), Err(gone.into()));
    assert_eq!(allocator.free(made.handle), Err(HandleError::Stale { handle: made.handle }.into()));
    assert_ne!(allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid"), pool);
}

#[test]
fn zero_bytes_take_no_memory_and_never_reach_the_driver() {
    let allocator = allocator();
    let nothing = allocator.allocate(POOL, S0, 0).expect("zero bytes never fail");
    assert_eq!((nothing.address, nothing.size_bytes), (DeviceAddress(0), 0));
    assert_eq!(nothing.placement, Placement::NOWHERE);
    allocator.record_use(nothing.handle, S0).expect("the call should have nothing to do");
    allocator.free(nothing.handle).expect("the call should have nothing to do");
    assert_eq!(allocator.backend().calls().fallible(), 0);
    assert_eq!(allocator.stats().usage.all.allocations.allocated, 0);
    assert_ne!(allocator.digest(POOL).map(|digest| digest.ops), Ok(0));
}

#[test]
fn huge_sizes_are_refused_without_overflow() {
    let allocator = allocator();
    let before = state(&allocator);
    for requested_bytes in [SEGMENT_BYTES_MAX + 1, u64::MAX - 511, u64::MAX] {
        assert_eq!(allocator.allocate(POOL, S0, requested_bytes), Err(AllocateError::TooLarge { requested_bytes }));
        assert_eq!(allocator.reserve(POOL, S0, requested_bytes), Err(AllocateError::TooLarge { requested_bytes }));
    }
    assert_eq!(state(&allocator), before);
    // The default range is smaller than the largest segment.
    let allocated = allocator.allocate(POOL, S0, SEGMENT_BYTES_MAX).map(|_| ());
    for refused in [allocated, allocator.reserve(POOL, S0, SEGMENT_BYTES_MAX)] {
        let error = refused.expect_err("512 GiB of addresses");
        let AllocateError::OutOfMemory(error) = error else { panic!("{error}") };
        assert_eq!(error.cause, OutOfMemoryCause::SegmentFull { segment_bytes: 512 << 30 });
    }
    allocator.check().expect("the invariants should hold");
}

#[test]
fn the_largest_block_is_reused_with_maximum_rounding_of_oversize_blocks() {
    let mut knobs = FixedSegments::default();
    knobs.max_split_size_bytes = Some(SEGMENT_BYTES_MAX);
    knobs.max_non_split_rounding_bytes = SEGMENT_BYTES_MAX;
    let pool =
        PoolConfig::builder().segments(SegmentPolicy::Fixed(knobs)).build().expect("the configuration should be valid");
    let allocator = with(Config::builder().default_pool(pool).build().expect("the configuration should be valid"));
    let first = allocator.allocate(POOL, S0, SEGMENT_BYTES_MAX).expect("the allocation should fit");
    allocator.free(first.handle).expect("the allocation should be live");
    let second = allocator.allocate(POOL, S0, SEGMENT_BYTES_MAX).expect("the allocation should fit");
    assert_eq!(second.placement, first.placement);
}

#[test]
fn an_error_at_a_limit_states_the_memory_in_use() {
    let pool = PoolConfig::builder().limit_bytes(Some(8 * MIB)).build().expect("the configuration should be valid");
    let allocator = with(Config::builder().default_pool(pool).build().expect("the configuration should be valid"));
    let _live = allocator.allocate(POOL, S0, 5 * MIB).expect("the allocation should fit");
    let error = allocator.allocate(POOL, S0, 4 * MIB).expect_err("beyond the limit");
    let AllocateError::OutOfMemory(error) = error else { panic!("{error}") };
    assert_eq!((error.pool, error.stream, error.requested_bytes), (POOL, S0, 4 * MIB));
    assert_eq!((error.reserved_bytes, error.allocated_bytes, error.largest_free_bytes), (6 * MIB, 5 * MIB, MIB));
    assert_eq!(error.missing_bytes, 4 * MIB);
    assert_eq!(error.cause, OutOfMemoryCause::Limit { scope: LimitScope::Pool, limit_bytes: 8 * MIB });
    let text = error.to_string();
    assert!(text.contains("raise it") && text.contains("8.00 MiB"), "{text}");
}

#[test]
fn a_failure_callback_frees_and_the_allocation_succeeds() {
    let pool = PoolConfig::builder().limit_bytes(Some(8 * MIB)).build().expect("the configuration should be valid");
    let allocator =
        with(Config::builder().default_pool(pool).retries_max(2).build().expect("the configuration should be valid"));
    let held = allocator.allocate(POOL, S0, 8 * MIB).expect("the allocation should fit").handle;
    let held = std::sync::Mutex::new(Some(held));
    let calls = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let count = std::sync::Arc::clone(&calls);
    allocator.set_failure_callback(move |allocator, error| {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(error.requested_bytes, 4 * MIB);
        if let Some(handle) = held.lock().expect("only one thread should use it").take() {
            allocator.free(handle).expect("the allocation should be live");
        }
        Retry::Again
    });
    let _live = allocator.allocate(POOL, S0, 4 * MIB).expect("the callback freed memory");
    assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 1);
    let _live = allocator.allocate(POOL, S0, 4 * MIB).expect("the allocation should fit");
    allocator.allocate(POOL, S0, 4 * MIB).expect_err("nothing more to free");
    assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 3, "retries are bounded");
}

/// Memory that a callback frees without a trim only serves the request: other memory was released before the callback ran.
#[test]
fn memory_freed_by_a_failure_callback_stays_in_the_cache() {
    let pool =
        PoolConfig::builder().fixed().limit_bytes(Some(60 * MIB)).build().expect("the configuration should be valid");
    let allocator =
        with(Config::builder().default_pool(pool).retries_max(2).build().expect("the configuration should be valid"));
    let [held, ..] = [0; 3].map(|_| allocator.allocate(POOL, S0, 20 * MIB).expect("the allocation should fit").handle);
    let held = std::sync::Mutex::new(Some(held));
    allocator.set_failure_callback(move |allocator, _| {
        match held.lock().expect("only one thread should use it").take() {
            Some(handle) => {
                allocator.free(handle).expect("the allocation should be live");
                Retry::Again
            }
            None => Retry::GiveUp,
        }
    });
    allocator.allocate(POOL, S0, 30 * MIB).expect_err("20 MiB are free");
    assert_eq!(allocator.stats().reserved_bytes.current, 60 * MIB);
    assert_eq!(allocator.backend().calls().of(Call::Unmap), 0);
    let _live = allocator.allocate(POOL, S0, 20 * MIB).expect("the freed memory was not released");
}

#[test]
fn pointers_are_found_as_configured() {
    let made = |lookup| {
        let allocator =
            with(Config::builder().pointer_lookup(lookup).build().expect("the configuration should be valid"));
        let made = allocator.allocate(POOL, S0, 4096).expect("the allocation should fit");
        (allocator, made)
    };
    let inside = |address: DeviceAddress| DeviceAddress(address.0 + 100);
    let (allocator, off) = made(PointerLookup::Off);
    assert_eq!(allocator.handle_at(off.address), Err(HandleError::LookupOff));
    assert_eq!(allocator.free_at(off.address), Err(HandleError::LookupOff.into()));
    assert_eq!(allocator.record_use_at(off.address, S0), Err(HandleError::LookupOff.into()));
    let (allocator, exact) = made(PointerLookup::Exact);
    assert_eq!(allocator.handle_at(exact.address), Ok(exact.handle));
    let address = inside(exact.address);
    assert_eq!(allocator.handle_at(address), Err(HandleError::InteriorAddress { address }));
    for address in [DeviceAddress(0), DeviceAddress(u64::MAX)] {
        assert_eq!(allocator.handle_at(address), Err(HandleError::UnknownAddress { address }));
    }
    allocator.free(exact.handle).expect("the allocation should be live");
    assert!(allocator.handle_at(exact.address).is_err(), "it was freed");
    assert!(allocator.free_at(exact.address).is_err(), "it was freed");
    assert!(allocator.record_use_at(exact.address, S0).is_err(), "it was freed");
}

#[test]
fn a_backend_with_an_impossible_granularity_is_refused() {
    /// A backend that has the given granularity and does nothing.
    struct Odd(u64);
    impl Backend for Odd {
        fn granularity_bytes(&self) -> u64 {
            self.0
        }
        fn reserve(&self, _: u64) -> Result<Range, BackendError> {
            unreachable!()
        }
        fn map(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
            unreachable!()
        }
        fn unmap(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
            unreachable!()
        }
        fn release(&self, _: Range) -> Result<(), BackendError> {
            unreachable!()
        }
        fn record(&self, _: StreamId) -> Result<Event, BackendError> {
            unreachable!()
        }
        fn wait(&self, _: StreamId, _: Event) -> Result<(), BackendError> {
            unreachable!()
        }
        fn query(&self, _: Event) -> Result<bool, BackendError> {
            unreachable!()
        }
        fn recycle(&self, _: Event) {}
        fn synchronize(&self, _: StreamId) -> Result<(), BackendError> {
            unreachable!()
        }
    }
    let made = |granularity| Allocator::<_>::new(Odd(granularity), Config::default()).map(drop);
    assert!(matches!(made(3 << 20), Err(ConfigError::NotAPowerOfTwo { value: 0x30_0000, .. })));
    assert!(matches!(made(0), Err(ConfigError::NotAPowerOfTwo { .. })));
    assert!(matches!(made(256), Err(ConfigError::OutOfRange { value: 256, .. })));
    assert!(matches!(made(2 << 30), Err(ConfigError::OutOfRange { .. })));
    assert_eq!(made(512), Ok(()));
}

/// The heaps of a destroyed pool still exist, but contain nothing that a request could use.
#[test]
fn a_destroyed_pool_serves_no_kind_of_request() {
    let allocator = allocator();
    let pool = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let made = allocator.allocate(pool, S0, 4096).expect("the allocation should fit");
    allocator.free(made.handle).expect("the allocation should be live");
    allocator.destroy_pool(pool).expect("the pool should be empty");
    let before = state(&allocator);
    let gone = UnknownError::DestroyedPool { pool };
    assert_eq!(allocator.allocate(pool, S0, 0), Err(gone.into()));
    assert_eq!(allocator.allocate(pool, S0, 512), Err(gone.into()));
    assert_eq!(allocator.reserve(pool, S0, 1 << 20), Err(gone.into()));
    assert_eq!(state(&allocator), before);
}

/// A forged handle of zero bytes cannot be freed.
#[test]
fn only_zero_bytes_that_were_allocated_are_freed() {
    let allocator = allocator();
    let (place, serial) = allocator.allocate(POOL, S0, 0).expect("zero bytes never fail").handle.into_raw();
    let handle = Handle::from_raw((place, serial + 1));
    assert_eq!(allocator.free(handle), Err(HandleError::Foreign { handle }.into()));
    assert_eq!(allocator.record_use(handle, S0), Err(HandleError::Foreign { handle }.into()));
}

#[test]
fn an_allocation_of_zero_bytes_is_freed_once_and_not_used_afterward() {
    let allocator = allocator();
    let [first, second] = [0, 1].map(|_| allocator.allocate(POOL, S0, 0).expect("zero bytes never fail").handle);
    allocator.free(first).expect("the allocation should be live");
    let before = state(&allocator);
    let stale = HandleError::Stale { handle: first };
    assert_eq!(allocator.free(first), Err(stale.into()));
    assert_eq!(allocator.record_use(first, S0), Err(stale.into()));
    assert_eq!(state(&allocator), before);
    allocator.record_use(second, S0).expect("the allocation should be live");
    allocator.free(second).expect("the allocation should be live");
}

/// Allocations of zero bytes take no memory, so their pool can be destroyed.
#[test]
fn zero_bytes_of_a_destroyed_pool_are_freed_once() {
    let allocator = allocator();
    let pool = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let handle = allocator.allocate(pool, S0, 0).expect("zero bytes never fail").handle;
    allocator.destroy_pool(pool).expect("nothing has bytes");
    let next = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let other = allocator.allocate(next, S0, 0).expect("zero bytes never fail").handle;
    let digest = allocator.digest(next).expect("it should be live");
    allocator.free(handle).expect("the allocation should be live");
    assert_eq!(allocator.digest(next), Ok(digest), "the free is not an op of the next pool");
    assert_eq!(allocator.free(handle), Err(HandleError::Stale { handle }.into()));
    allocator.free(other).expect("the allocation should be live");
}

/// A later pool reuses a destroyed one's slot, but none of its state.
#[test]
fn a_handle_of_a_destroyed_pool_stays_stale_in_later_pools() {
    let allocator = allocator();
    let mut stale: Vec<(PoolId, Handle)> = Vec::new();
    for _ in 0..5 {
        let pool = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
        let fresh = allocator.pool_stats(pool).expect("it should be live");
        assert_eq!((fresh.reserved_bytes.peak, fresh.usage.all.allocations.allocated, fresh.segments_born), (0, 0, 0));
        assert_eq!(allocator.heap_digests(pool).expect("it should be live"), []);
        assert_eq!(allocator.segment_log_entries(pool), 0);
        let made = allocator.allocate(pool, S0, 1 << 20).expect("memory should suffice");
        assert_eq!((made.placement.segment.0, made.placement.offset_bytes), (0, 0));
        for (gone, handle) in stale.iter().copied() {
            assert_eq!(allocator.free(handle), Err(HandleError::Stale { handle }.into()));
            assert_eq!(allocator.allocation(handle), Err(HandleError::Stale { handle }));
            let destroyed = UnknownError::DestroyedPool { pool: gone };
            assert_eq!(allocator.allocate(gone, S0, 1 << 20), Err(destroyed.into()));
            assert_eq!(allocator.trim_pool(gone), Err(destroyed.into()));
            assert_eq!(allocator.pool_stats(gone), Err(destroyed));
            assert_eq!(allocator.segment_log_entries(gone), 0);
        }
        allocator.free(made.handle).expect("the allocation should be live");
        allocator.destroy_pool(pool).expect("the pool should be empty");
        stale.push((pool, made.handle));
    }
    allocator.check().expect("the invariants should hold");
}

/// A failure callback may end the pool of the request. The request fails then, and whatever the callback created is unchanged: a new pool
/// takes over the heap of the destroyed one.
#[test]
fn a_request_whose_pool_ends_in_the_callback_changes_nothing_else() {
    type Request = fn(&Allocator<SimBackend>, PoolId) -> Result<(), AllocateError>;
    let requests: [Request; 2] = [
        |allocator, pool| allocator.allocate(pool, S0, 20 * MIB).map(drop),
        |allocator, pool| allocator.reserve(pool, S0, 20 * MIB),
    ];
    for policy in ["segments:expandable", "segments:fixed", "segments:expandable,reclaim:pool"] {
        for request in requests {
            for creates in [false, true] {
                let config: PoolConfig = policy.parse().expect("the text should be valid");
                let allocator = with("total_limit_mb:36".parse().expect("the text should be valid"));
                let pool = allocator.create_pool(config.clone()).expect("the configuration should be valid");
                // The request would fit if the program freed the memory of another pool.
                let _live = allocator.allocate(PoolId::DEFAULT, S0, 20 * MIB).expect("the allocation should fit");
                let held = allocator.allocate(pool, S0, 10 * MIB).expect("the allocation should fit").handle;
                let during = std::sync::Arc::new(std::sync::Mutex::new(None));
                let after = std::sync::Arc::clone(&during);
                allocator.set_failure_callback(move |allocator, _| {
                    allocator.free(held).expect("the allocation should be live");
                    allocator.destroy_pool(pool).expect("the pool should be empty");
                    let successor = creates
                        .then(|| allocator.create_pool(config.clone()).expect("the configuration should be valid"));
                    if let Some(successor) = successor {
                        let _live = allocator.allocate(successor, S0, MIB).expect("the allocation should fit");
                    }
                    *after.lock().expect("only one thread should use it") = Some((successor, everything(allocator)));
                    Retry::Again
                });
                let refused = request(&allocator, pool).expect_err("its pool is gone");
                assert_eq!(refused, UnknownError::DestroyedPool { pool }.into(), "{policy}");
                let (successor, state) =
                    during.lock().expect("only one thread should use it").take().expect("the callback ran");
                assert_eq!(everything(&allocator), state, "{policy}, a new pool: {successor:?}");
            }
        }
    }
}

/// Returns the state of all pools.
fn everything(allocator: &Allocator<SimBackend>) -> impl PartialEq + std::fmt::Debug + use<> {
    allocator.check().expect("the invariants should hold");
    let digests: Vec<_> = (0..4).map(|pool| allocator.digest(PoolId(pool))).collect();
    (allocator.snapshot(), allocator.stats(), digests, allocator.backend().calls())
}
