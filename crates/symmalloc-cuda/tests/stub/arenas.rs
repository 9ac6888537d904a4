//! Arenas: pools that are dropped, reset or destroyed, with the bytes that they return.

use crate::process::{all_calls, calls, device, live, stub_test};
use symmalloc_core::config::PoolConfig;
use symmalloc_core::errors::{AllocateError, PoolError, UnknownError};
use symmalloc_cuda::{CudaAllocator, CudaDevice, CudaError};

#[path = "../../examples/arenas.rs"]
#[allow(dead_code, reason = "the test does not run its `main`")]
mod example;

const MIB: usize = 1 << 20;

fn allocator(text: &str) -> CudaAllocator {
    CudaAllocator::new(&device(), text.parse().expect("a valid configuration")).expect("the stub supports it")
}

stub_test!(ten_thousand_requests_hold_constant_memory_and_make_constant_calls, {
    for mode in [example::Mode::Dropped, example::Mode::Reset] {
        let [first, last] = example::serve(&device(), mode, 10_000).expect("the limit has room for one request");
        assert_eq!(first.reserved_bytes_peak, last.reserved_bytes_peak, "{mode:?}");
        assert!(first.driver_calls.abs_diff(last.driver_calls) <= 1, "{mode:?}: {first:?}, {last:?}");
        if matches!(mode, example::Mode::Reset) {
            assert_eq!(last.driver_calls, 0, "the arena keeps its memory");
        }
    }
    assert_eq!(live().device_bytes, 0);
});

stub_test!(dropped_private_arenas_leave_no_shortage, {
    let allocator = allocator("total_limit_mb:64");
    let stream = allocator.device().context().new_stream().expect("a stream");
    for request in 0..32 {
        let arena = allocator.create_pool(PoolConfig::default()).expect("valid");
        let made = allocator.with_pool(&arena).alloc_zeroed::<u8>(&stream, 4 * MIB);
        made.unwrap_or_else(|error| panic!("request {request}: {error}"));
    }
    assert_eq!(allocator.drop_errors().count, 0);
});

stub_test!(dropped_symmetric_arenas_are_destroyed_explicitly, {
    let allocator = allocator("total_limit_mb:64");
    let stream = allocator.device().context().new_stream().expect("a stream");
    let config: PoolConfig = "symmetric:true".parse().expect("valid");
    let serve = |drops: bool| -> Result<u64, CudaError> {
        let arena = allocator.create_pool(config.clone())?;
        drop(allocator.with_pool(&arena).alloc_zeroed::<u8>(&stream, 40 * MIB)?);
        if drops { Ok(0) } else { arena.destroy() }
    };
    for _ in 0..10 {
        assert!(serve(false).expect("destroyed explicitly") >= 40 << 20);
    }
    serve(true).expect("the first fits");
    let refused = serve(true).expect_err("the memory of the first stays");
    assert!(matches!(refused, CudaError::Allocate(AllocateError::OutOfMemory(_))), "{refused}");
    assert!(allocator.trim_all().expect("trimmed") >= 40 << 20, "the trim destroys the pool, and counts its memory");
});

stub_test!(a_reset_needs_dropped_buffers_and_calls_no_driver, {
    let allocator = allocator("");
    let stream = allocator.device().context().new_stream().expect("a stream");
    let pool = allocator.create_pool(PoolConfig::default()).expect("valid");
    let arena = allocator.with_pool(&pool);
    let buffer = arena.alloc_zeroed::<u8>(&stream, 3 * MIB).expect("allocated");
    let place = buffer.placement();
    let Err(CudaError::Pool(error)) = pool.reset() else { panic!("a buffer is alive") };
    assert_eq!(error, PoolError::InUse { pool: pool.id(), allocations: 1, allocated_bytes: 3 << 20 });
    assert!(error.to_string().contains("1 live allocation (3.00 MiB): free it first"), "{error}");
    drop(buffer);
    let (held, before) = (allocator.stats().reserved_bytes.current, CudaDevice::driver_calls());
    let all = all_calls();
    pool.reset().expect("no buffer is alive");
    assert_eq!((CudaDevice::driver_calls(), all_calls()), (before, all));
    assert_eq!(allocator.stats().reserved_bytes.current, held);
    let again = arena.alloc_zeroed::<u8>(&stream, 3 * MIB).expect("allocated");
    assert_eq!(again.placement(), place);
    // Allocations without an owner are freed by the core's reset, and buffers then report a stale handle.
    drop(again);
    let raw = arena.allocate(&stream, 1000).expect("allocated");
    assert_eq!(allocator.core().reset_pool(pool.id()).expect("the pool exists").allocations, 1);
    assert!(arena.free(raw.handle).is_err());
});

stub_test!(a_destroyed_pool_returns_its_memory_once, {
    let allocator = allocator("");
    let stream = allocator.device().context().new_stream().expect("a stream");
    let reserved: PoolConfig = "segments:reserved,segment_mb:32".parse().expect("valid");
    let pool = allocator.create_pool(reserved).expect("valid");
    let arena = allocator.with_pool(&pool);
    let buffer = arena.alloc_zeroed::<u8>(&stream, MIB).expect("allocated");
    assert!(matches!(pool.destroy(), Err(CudaError::Pool(PoolError::InUse { allocations: 1, .. }))));
    drop(buffer);
    assert_eq!(pool.destroy().expect("nothing is live"), 32 << 20);
    let gone = UnknownError::DestroyedPool { pool: pool.id() };
    let refused = arena.alloc_zeroed::<u8>(&stream, MIB).expect_err("the pool is gone");
    assert!(matches!(refused, CudaError::Allocate(AllocateError::Unknown(error)) if error == gone), "{refused}");
    assert!(matches!(pool.destroy(), Err(CudaError::Pool(PoolError::Unknown(error))) if error == gone));
    drop((pool, arena));
    assert_eq!(allocator.trim_all().expect("trimmed"), 0);
    assert_eq!((live().device_bytes, calls("cuMemUnmap")), (0, 1));
});

stub_test!(a_trim_counts_all_bytes_that_return_to_the_device, {
    for text in ["", "stitching:true", "segments:fixed"] {
        let allocator = allocator(text);
        let stream = allocator.device().context().new_stream().expect("a stream");
        let before = live().device_bytes;
        for size in [8 * MIB, 4 * MIB] {
            let arena = allocator.create_pool(PoolConfig::default()).expect("valid");
            drop(allocator.with_pool(&arena).alloc_zeroed::<u8>(&stream, size).expect("allocated"));
        }
        drop(allocator.alloc_zeroed::<u8>(&stream, 6 * MIB).expect("allocated"));
        let held = live().device_bytes - before;
        assert!(held >= 18 << 20);
        assert_eq!(allocator.trim_all().expect("trimmed"), held, "{text}");
        assert_eq!(live().device_bytes, before, "{text}");
    }
});

stub_test!(pools_with_keys_have_these_ids_on_every_thread, {
    let allocator = allocator("");
    std::thread::scope(|scope| {
        for worker in 1..=4 {
            let allocator = &allocator;
            scope.spawn(move || {
                let pool = allocator.create_pool_with_key(worker, PoolConfig::default()).expect("unused");
                assert_eq!(pool.id().0, worker);
            });
        }
    });
    let used = allocator.create_pool_with_key(2, PoolConfig::default());
    assert!(matches!(used, Err(CudaError::Pool(PoolError::KeyInUse { .. }))));
    assert_eq!(allocator.create_pool(PoolConfig::default()).expect("valid").id().0, 5);
});
