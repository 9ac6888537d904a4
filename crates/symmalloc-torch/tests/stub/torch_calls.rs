//! PyTorch's calls: allocations, graph pools, `empty_cache`, limits.

use crate::library::*;
use std::ptr::null_mut;
use symmalloc_torch::*;

stub_test!(tensors_are_allocated_and_freed, {
    let streams = Streams::new(2);
    let (a, b) = (streams.get(0), streams.get(1));
    let tensor = torch::allocate(5 * MIB, a);
    torch::record_use(tensor, b);
    // Null pointers and pointers of other allocators are ignored.
    torch::record_use(0, b);
    torch::record_use(tensor + 512, b);
    assert_eq!(torch::base(tensor + 4096), (tensor, 6 * MIB));
    assert_eq!(torch::base(64), (64, 0));
    torch::free(tensor);
    assert_eq!(torch::allocate(5 * MIB, a), tensor);
    assert_eq!(calls("cuStreamWaitEvent"), 1);
    assert_eq!(torch::allocate(0, a), 0);
    torch::free(0);
    assert_eq!(live().device_bytes, 6 << 20, "the first segment of the heap");
    torch::free(tensor);
    torch::empty_cache();
    assert_eq!(live().device_bytes, 0);
});

stub_test!(free_never_fails_and_reports_misuse, {
    torch::free(4096);
    let (allocator, tensor) = (Allocator::of_torch(), torch::allocate(512, null_mut()));
    torch::free(tensor);
    torch::free(tensor);
    let errors = &allocator.stats()["errors"];
    assert_eq!((&errors["unknown_frees"], &errors["failed_calls"]), (&1.into(), &1.into()));
    assert!(errors["last"].as_str().expect("text").contains("not a live allocation of device 0"));
});

stub_test!(settings_of_the_program_precede_those_of_the_environment, ["SYMMALLOC_CONF" = "total_limit_mb:64"], {
    // SAFETY: a C string.
    done(unsafe { symmalloc_torch_configure(c"total_limit_mb:32".as_ptr()) });
    let allocator = Allocator::of_torch();
    assert_eq!(allocator.stats()["reserved_limit_bytes"], 32 << 20);
    // SAFETY: a C string.
    assert_eq!(unsafe { symmalloc_torch_configure(c"total_limit_mb:16".as_ptr()) }, SYMMALLOC_INVALID_STATE);
    assert!(message().contains("before the first use"), "{}", message());
});

stub_test!(invalid_settings_in_the_environment_are_an_error, ["SYMMALLOC_CONF" = "total_limit:64"], {
    let mut out = null_mut();
    // SAFETY: an output pointer.
    assert_eq!(unsafe { symmalloc_process_allocator(0, &raw mut out) }, SYMMALLOC_INVALID_SETTINGS);
    assert!(message().contains("byte 0: unknown key") && out.is_null(), "{}", message());
});

stub_test!(properties_are_those_of_the_parsed_settings, {
    for (conf, properties) in [
        (c"", (true, false)),
        (c"segments:fixed,plan : learn", (false, true)),
        (c"segments:fixed,plan:off", (false, false)),
        (c"expandable_segments:True, plan:learn", (true, true)),
    ] {
        // SAFETY: a C string.
        done(unsafe { symmalloc_torch_configure(conf.as_ptr()) });
        let mut out = symmalloc_properties { is_expandable: false, learns_plans: false };
        // SAFETY: an output pointer.
        done(unsafe { symmalloc_torch_properties(&raw mut out) });
        assert_eq!((out.is_expandable, out.learns_plans), properties, "{conf:?}");
    }
});

stub_test!(a_memory_fraction_is_a_limit_in_bytes, {
    let allocator = Allocator::of_torch();
    done(symmalloc_torch_set_fraction(0, 0.25));
    assert_eq!(allocator.stats()["reserved_limit_bytes"], 256 << 20);
    let half = torch::allocate(200 * MIB, null_mut());
    assert_eq!(allocator.try_allocate(0, 100 * MIB, null_mut()), Err(SYMMALLOC_OUT_OF_MEMORY));
    assert!(message().contains("the allocator's limit is 256.00 MiB"), "{}", message());
    assert_eq!(allocator.try_allocate(0, usize::MAX / 2, null_mut()), Err(SYMMALLOC_OUT_OF_MEMORY));
    assert_eq!(allocator.total("num_ooms"), 2, "both kinds of failure are counted");
    done(symmalloc_torch_set_fraction(0, 1.0));
    allocator.allocate(0, 100 * MIB, null_mut());
    torch::free(half);
});

stub_test!(two_graph_pools_keep_their_memory_until_they_are_released, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
    let stream = streams.get(0);
    let pool = |pointer| allocator.placement(pointer).pool;
    let take_and_free = |id| {
        torch::begin(id);
        let pointer = torch::allocate(8 * MIB, stream);
        let taken = pool(pointer);
        torch::free(pointer);
        torch::end(id);
        (pointer, taken)
    };
    let (first, second) = (take_and_free((1, 0)), take_and_free((2, 0)));
    assert_ne!(first.1, second.1);
    let outside = torch::allocate(8 * MIB, stream);
    assert_eq!(pool(outside), 0);
    torch::free(outside);
    torch::empty_cache();
    assert_eq!(live().device_bytes, 16 << 20, "the memory of both graphs is kept");
    // A second graph of the first pool gets the same address.
    assert_eq!(take_and_free((1, 0)), first);
    torch::release((1, 0));
    torch::empty_cache();
    assert_eq!(live().device_bytes, 16 << 20, "the first pool has one graph left");
    torch::release((1, 0));
    assert_eq!(live().device_bytes, 16 << 20, "the device may still run the graph");
    torch::empty_cache();
    assert_eq!(live().device_bytes, 8 << 20);
    // If the id is used again before the memory is released, it is still the same pool.
    torch::release((2, 0));
    assert_eq!(take_and_free((2, 0)), second);
    torch::release((2, 0));
    torch::empty_cache();
    assert_eq!(live().device_bytes, 0);
    // An excess release is counted.
    assert_eq!(symmalloc_torch_release_use(0, 2, 0), SYMMALLOC_INVALID_STATE);
    assert_eq!(allocator.stats()["errors"]["failed_calls"], 1);
});

stub_test!(
    the_largest_block_is_what_the_device_has_left_or_the_largest_free_block_beyond_it,
    ["SYMMALLOC_CONF" = "stitching:false"],
    {
        let allocator = Allocator::of_torch();
        let largest = |known: usize| {
            let mut largest = known;
            // SAFETY: an output pointer.
            done(unsafe { symmalloc_torch_largest_block(0, &raw mut largest) });
            largest
        };
        assert_eq!(largest(0), 1 << 30, "the stub's device");
        let _kept = torch::allocate(8 * MIB, null_mut());
        torch::free(torch::allocate(6 * MIB, null_mut()));
        assert_eq!(allocator.stats()["total"]["reserved_bytes"]["all"]["current"], 14 << 20);
        assert_eq!(largest(0), (1 << 30) - 8 * MIB);
        assert_eq!(largest(2 << 30), 2 << 30, "a larger known value stays");
        done(symmalloc_torch_set_fraction(0, 0.25));
        assert_eq!(largest(0), (256 - 8) * MIB);
    }
);

stub_test!(
    a_graph_pool_releases_nothing_when_memory_is_exhausted,
    ["STUB_MEMORY_BYTES" = "268435456", "SYMMALLOC_CONF" = "stitching:false"],
    {
        let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
        torch::begin((1, 0));
        let tensor = torch::allocate(200 * MIB, streams.get(0));
        torch::free(tensor);
        torch::end((1, 0));
        assert_eq!(allocator.try_allocate(0, 100 * MIB, streams.get(0)), Err(SYMMALLOC_OUT_OF_MEMORY));
        assert_eq!(live().device_bytes, 200 << 20);
        torch::release((1, 0));
        allocator.allocate(0, 100 * MIB, streams.get(0));
        assert_eq!(live().device_bytes, 100 << 20, "no graph uses the pool any more");
    }
);

// An allocation for which the device lacks memory. It succeeds if enough memory of private pools was released, no matter which calls failed.
stub_test!(
    memory_released_before_a_failed_call_counts,
    ["STUB_MEMORY_BYTES" = "268435456", "SYMMALLOC_CONF" = "segments:fixed"],
    {
        const SEGMENT: usize = 40 * MIB;
        let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
        for (pools, segments) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)] {
            for failed in 1..=pools * segments {
                // One call fails, or all from this one on.
                for times in [1, 16] {
                    let all: Vec<_> = (0..pools as u64)
                        .flat_map(|id| {
                            torch::begin((1 + id, 0));
                            let made: Vec<_> =
                                (0..segments).map(|_| torch::allocate(SEGMENT, streams.get(0))).collect();
                            torch::end((1 + id, 0));
                            torch::release((1 + id, 0));
                            made
                        })
                        .collect();
                    all.into_iter().for_each(torch::free);
                    let context = format!("{pools} pools of {segments} segments, call {failed} fails, {times} times");
                    assert_eq!(live().device_bytes, (pools * segments * SEGMENT) as u64, "{context}");
                    (0..times).for_each(|_| fail("cuMemUnmap", failed as u64, 999));
                    // One segment would be enough.
                    let missing = 256 * MIB - pools * segments * SEGMENT + 30 * MIB;
                    let made = allocator.try_allocate(0, missing, streams.get(0));
                    heal();
                    // The end of a pool tries again what its trim failed to release.
                    let is_enough = failed > 1 || times == 1;
                    assert_eq!(made.is_ok(), is_enough, "{context}: {made:?}");
                    made.into_iter().for_each(|pointer| allocator.free(pointer));
                    torch::empty_cache();
                    assert_eq!(live().device_bytes, 0, "{context}");
                }
            }
        }
    }
);

// Ranks capture different graphs, whose addresses must stay: their pools are private, and keep their memory.
stub_test!(
    pools_of_graphs_are_private_whatever_the_default_pool_is,
    ["SYMMALLOC_CONF" = "symmetric:true,reclaim:pool,release_threshold_mb:1"],
    {
        let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
        torch::begin((1, 0));
        torch::free(torch::allocate(8 * MIB, streams.get(0)));
        torch::end((1, 0));
        let stats = allocator.stats();
        let [default, graph] = [0, 1].map(|pool| &stats["pools"][pool]);
        assert_eq!(
            (&default["symmetric"], &graph["kind"], &graph["symmetric"]),
            (&true.into(), &"graph".into(), &false.into())
        );
        assert_ne!(graph["stats"]["reserved_bytes"]["all"]["current"], 0, "no threshold releases its memory");
    }
);

stub_test!(a_large_tensor_is_stitched_without_settings, {
    let (allocator, stream) = (Allocator::of_torch(), null_mut());
    let size = 128 * MIB;
    let blocks: Vec<_> = (0..4).map(|_| torch::allocate(size, stream)).collect();
    torch::free(blocks[0]);
    torch::free(blocks[2]);
    let large = torch::allocate(2 * size, stream);
    assert_eq!(live().device_bytes, 4 * (size as u64), "the free blocks are not adjacent");
    torch::free(large);
    // Memory of a graph is not stitched, because its addresses are captured.
    torch::begin((1, 0));
    torch::free(torch::allocate(5 * MIB, stream));
    torch::end((1, 0));
    assert_eq!(allocator.stats()["pools"][1]["stats"]["reserved_bytes"]["all"]["current"], 6 << 20);
});
