//! Pools of the program: created, pushed, popped, destroyed.

use crate::library::*;
use std::ptr::null_mut;
use std::thread;
use symmalloc_torch::*;

stub_test!(a_pool_has_its_own_policy_and_history, {
    let (allocator, streams) = (Allocator::new("total_limit_mb:64"), Streams::new(1));
    let stream = streams.get(0);
    let reserved = allocator.create_pool(Some("segments:reserved,segment_mb:32,symmetric:true"));
    // SAFETY: a live allocator and stream.
    done(unsafe { symmalloc_reserve(allocator.0, reserved, stream, 32 * MIB) });
    let digest = allocator.digest(0);
    let (one, two) = (allocator.allocate(reserved, MIB, stream), allocator.allocate(reserved, MIB, stream));
    assert_eq!((allocator.placement(one).offset_bytes, allocator.placement(two).offset_bytes), (0, 1 << 20));
    assert_eq!(allocator.placement(two).pool, reserved);
    assert_eq!(allocator.digest(0), digest, "the default pool is unaffected");
    let like_default = allocator.create_pool(None);
    let stats = allocator.stats();
    assert_eq!(stats["pools"][reserved as usize]["symmetric"], true);
    assert_eq!(stats["pools"][like_default as usize]["symmetric"], false);
    assert_eq!(stats["pools"][like_default as usize]["kind"], "user");
    assert_eq!(stats["reserved_limit_bytes"], 64 << 20);
    let mut out = 0;
    // SAFETY: a live allocator, a C string, and an output pointer.
    let status = unsafe { symmalloc_pool_create(allocator.0, c"total_limit_mb:1".as_ptr(), &raw mut out) };
    assert_eq!(status, SYMMALLOC_INVALID_SETTINGS, "{}", message());
});

stub_test!(a_dropped_pool_is_destroyed_with_its_last_block, {
    let (allocator, streams) = (Allocator::new("stitching:false"), Streams::new(1));
    let pool = allocator.create_pool(None);
    let pointer = allocator.allocate(pool, 8 * MIB, streams.get(0));
    done(allocator.destroy_pool(pool));
    assert_eq!(allocator.destroy_pool(pool), SYMMALLOC_UNKNOWN_POOL);
    assert_eq!(allocator.try_allocate(pool, MIB, streams.get(0)), Err(SYMMALLOC_UNKNOWN_POOL));
    allocator.trim();
    assert_eq!(live().device_bytes, 8 << 20, "a live block keeps the memory");
    assert_eq!(allocator.placement(pointer).pool, pool);
    allocator.free(pointer);
    allocator.trim();
    assert_eq!((live().device_bytes, live().ranges), (0, 0));
    assert_eq!(allocator.destroy_pool(0), SYMMALLOC_UNKNOWN_POOL, "the default pool cannot be destroyed");
});

stub_test!(a_pushed_pool_serves_the_allocations_of_its_thread, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
    let (stream, id) = (streams.get(0) as usize, |pointer| allocator.placement(pointer).pool);
    let (outer, inner) = (allocator.create_pool(None), allocator.create_pool(None));
    let take = || torch::allocate(MIB, stream as *mut _);
    done(symmalloc_torch_push_pool(0, outer));
    done(symmalloc_torch_push_pool(0, inner));
    assert_eq!(id(take()), inner);
    // Another thread is not in the scope, and its own scopes end with it.
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(id(take()), 0);
            done(symmalloc_torch_push_pool(0, outer));
            assert_eq!(id(take()), outer);
        });
    });
    // The innermost scope applies.
    torch::begin((1, 0));
    assert_eq!(allocator.stats()["pools"][id(take()) as usize]["kind"], "graph");
    done(symmalloc_torch_push_pool(0, outer));
    assert_eq!(id(take()), outer);
    torch::end((1, 0));
    assert_eq!(id(take()), outer);
    done(symmalloc_torch_pop_pool(0));
    assert_eq!(id(take()), inner);
    done(symmalloc_torch_pop_pool(0));
    assert_eq!(id(take()), outer);
    done(symmalloc_torch_pop_pool(0));
    assert_eq!(id(take()), 0);
    assert_eq!(symmalloc_torch_pop_pool(0), SYMMALLOC_INVALID_STATE);
    assert!(message().contains("pair begin with end, push with pop"), "{}", message());
    assert_eq!(symmalloc_torch_push_pool(0, 99), SYMMALLOC_UNKNOWN_POOL);
});

stub_test!(a_pool_of_another_allocator_is_not_pushed_here, {
    let (torch_one, own) = (Allocator::of_torch(), Allocator::new(""));
    let pool = torch_one.create_pool(None);
    done(symmalloc_torch_push_pool(0, pool));
    let pointer = own.allocate(0, MIB, null_mut());
    assert_eq!(own.placement(pointer).pool, 0);
    done(symmalloc_torch_pop_pool(0));
    own.destroy();
});

stub_test!(a_pushed_name_applies_to_allocations_of_its_thread, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
    let stream = streams.get(0) as usize;
    let take = |size: usize| torch::allocate(size * MIB, stream as *mut _);
    let push = |name: &str| {
        let name = c_text(name);
        // SAFETY: a C string.
        done(unsafe { symmalloc_torch_push_name(0, name.as_ptr()) });
    };
    let pool = allocator.create_pool(None);
    take(1);
    push("model");
    push("layer 3");
    // Pops of names and pools are independent.
    done(symmalloc_torch_push_pool(0, pool));
    let named = take(2);
    done(symmalloc_torch_pop_name(0));
    let outer = take(3);
    done(symmalloc_torch_pop_pool(0));
    thread::scope(|scope| scope.spawn(|| take(4)).join().expect("no panic"));
    take(5);
    done(symmalloc_torch_pop_name(0));
    take(6);
    assert_eq!([named, outer].map(|pointer| allocator.placement(pointer).pool), [pool; 2]);
    let mut text = null_mut();
    // SAFETY: a live allocator, and an output pointer.
    done(unsafe { symmalloc_leak_report(allocator.0, &raw mut text) });
    let report = taken(text);
    let names = |size: usize| {
        let start = format!("{} bytes  ", size * MIB);
        let line = report.lines().find(|line| line.trim_start().starts_with(&start)).expect("live");
        ["model", "layer 3"].into_iter().find(|name| line.contains(name))
    };
    assert_eq!(
        (1..7).map(names).collect::<Vec<_>>(),
        [None, Some("layer 3"), Some("model"), None, Some("model"), None]
    );
    assert_eq!(symmalloc_torch_pop_name(0), SYMMALLOC_INVALID_STATE);
    assert!(message().contains("no pushed name to end"), "{}", message());
});

stub_test!(a_reset_frees_everything_in_a_pool_and_keeps_its_memory, {
    let (allocator, streams) = (Allocator::new("stitching:false"), Streams::new(2));
    let arena = allocator.create_pool(None);
    let reset = || {
        let mut freed = 0;
        // SAFETY: a live allocator, and an output pointer. Nothing uses the allocations afterwards.
        done(unsafe { symmalloc_pool_reset(allocator.0, arena, &raw mut freed) });
        freed
    };
    let serve = || [0, 1].map(|stream| allocator.allocate(arena, 3 * MIB, streams.get(stream)));
    let first = serve();
    let (held, calls) = (live().device_bytes, all_calls());
    assert_eq!(reset(), 2);
    assert_eq!((live().device_bytes, all_calls()), (held, calls), "the memory stays, and no driver call is made");
    assert_eq!(allocator.try_free(first[0]), SYMMALLOC_UNKNOWN_POINTER);
    assert_eq!(serve(), first);
    assert_eq!((reset(), reset()), (2, 0));
    // SAFETY: a live allocator.
    let unknown = unsafe { symmalloc_pool_reset(allocator.0, 99, null_mut()) };
    assert_eq!(unknown, SYMMALLOC_UNKNOWN_POOL);
});

stub_test!(a_key_is_the_number_of_its_pool, {
    let allocator = Allocator::new("");
    // SAFETY: a live allocator.
    let with_key = |key| unsafe { symmalloc_pool_create_with_key(allocator.0, key, std::ptr::null()) };
    done(with_key(7));
    let pointer = allocator.allocate(7, MIB, null_mut());
    assert_eq!(allocator.placement(pointer).pool, 7);
    for refused in [0, 7, 65_536] {
        assert_eq!(with_key(refused), SYMMALLOC_INVALID_ARGUMENT, "{}", message());
    }
    assert_eq!(allocator.create_pool(None), 8);
});
