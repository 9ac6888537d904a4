//! The C interface: the effects of each call, and its errors.

use crate::library::*;
use std::ptr::{null, null_mut};
use stub_process::until;
use symmalloc_torch::*;

stub_test!(a_loop_repeats_its_placements_without_driver_calls, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(2));
    let (a, b) = (streams.get(0), streams.get(1));
    let step = || {
        let (weights, bucket) = (allocator.allocate(0, 48 * MIB, a), allocator.allocate(0, 5 * MIB, a));
        let other = allocator.allocate(0, 700, b);
        let places = [weights, bucket, other].map(|pointer| allocator.placement(pointer));
        for pointer in [bucket, weights, other] {
            allocator.free(pointer);
        }
        places
    };
    let first = step();
    assert_eq!(first.map(|place| (place.stream, place.offset_bytes)), [(0, 0), (0, 48 << 20), (1, 0)]);
    assert_eq!((first[2].size_bytes, first[2].requested_bytes, first[2].pool), (1024, 700, 0));
    let before = allocator.stats()["driver_calls"].clone();
    assert!((0..100).all(|_| step() == first));
    assert_eq!(allocator.stats()["driver_calls"], before);
    allocator.destroy();
    assert_eq!((live().device_bytes, live().ranges), (0, 0), "all memory was released");
    assert_eq!(live().streams, 2, "streams of other code are not destroyed");
});

stub_test!(a_stream_gets_its_number_at_its_first_use, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(40));
    for (index, expected) in [(7, 0), (3, 1), (7, 0), (20, 2)] {
        let pointer = allocator.allocate(0, 512, streams.get(index));
        assert_eq!(allocator.placement(pointer).stream, expected);
    }
    // 1 is an alias of the default stream, and 2 is a different stream in each thread.
    let [zero, legacy] = [0, 1].map(|handle| allocator.allocate(0, 512, handle as *mut _));
    assert_eq!(allocator.placement(zero).stream, allocator.placement(legacy).stream);
    assert_eq!(allocator.try_allocate(0, 512, 2 as *mut _), Err(SYMMALLOC_CUDA));
    assert!(message().contains("per-thread default stream"), "{}", message());
    // More streams than the cache has slots.
    let many: Vec<_> = (0..40).map(|index| allocator.allocate(0, 512, streams.get(index))).collect();
    let mut numbers: Vec<_> = many.iter().map(|pointer| allocator.placement(*pointer).stream).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 40);
});

stub_test!(a_pointer_is_freed_once_and_only_by_its_allocator, {
    let (allocator, other) = (Allocator::new(""), Allocator::new(""));
    let pointer = allocator.allocate(0, 4096, null_mut());
    assert_eq!(other.try_free(pointer), SYMMALLOC_UNKNOWN_POINTER);
    assert!(message().contains(&format!("{pointer:#x} is not a live allocation of device 0")), "{}", message());
    assert_eq!(allocator.try_free(pointer + 512), SYMMALLOC_UNKNOWN_POINTER);
    allocator.free(pointer);
    assert_eq!(allocator.try_free(pointer), SYMMALLOC_UNKNOWN_POINTER);
    assert_eq!(allocator.try_record_use(pointer, null_mut()), SYMMALLOC_UNKNOWN_POINTER);
    assert_eq!(allocator.try_placement(pointer), Err(SYMMALLOC_UNKNOWN_POINTER));
    allocator.free(0);
    assert_eq!(allocator.allocate(0, 0, null_mut()), 0);
    assert_eq!(allocator.total("allocation/all/allocated"), 1);
});

stub_test!(a_use_on_another_stream_is_waited_for_on_the_device, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(2));
    let (a, b) = (streams.get(0), streams.get(1));
    let pointer = allocator.allocate(0, MIB, a);
    done(allocator.try_record_use(pointer, b));
    done(allocator.try_record_use(0, b));
    let before = (calls("cuEventRecord"), calls("cuStreamWaitEvent"));
    allocator.free(pointer);
    assert_eq!(calls("cuEventRecord") - before.0, 1);
    assert_eq!(allocator.allocate(0, MIB, a), pointer, "the block is free immediately");
    assert_eq!(calls("cuStreamWaitEvent") - before.1, 1);
    assert_eq!(calls("cuEventQuery"), 0);
});

stub_test!(a_fence_that_fails_leaves_the_allocation_live, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(2));
    let pointer = allocator.allocate(0, MIB, streams.get(0));
    done(allocator.try_record_use(pointer, streams.get(1)));
    fail("cuEventRecord", 1, 999);
    assert_eq!(allocator.try_free(pointer), SYMMALLOC_CUDA);
    assert!(message().contains("still live"), "{}", message());
    heal();
    allocator.free(pointer);
});

stub_test!(the_cache_is_released_if_the_driver_refuses_memory, ["STUB_MEMORY_BYTES" = "268435456"], {
    let (allocator, streams) = (Allocator::new(""), Streams::new(2));
    let symmetric = allocator.create_pool(Some("symmetric:true"));
    let kept = allocator.allocate(symmetric, 20 * MIB, streams.get(0));
    allocator.free(kept);
    let cached = allocator.allocate(0, 200 * MIB, streams.get(0));
    allocator.free(cached);
    // The other stream's memory is released. The symmetric pool's memory is not.
    let pointer = allocator.allocate(0, 150 * MIB, streams.get(1));
    assert_eq!((allocator.total("num_alloc_retries"), allocator.total("num_ooms")), (1, 0));
    assert_eq!(allocator.stats()["pools"][1]["stats"]["reserved_bytes"]["all"]["current"], 20 << 20);
    assert_eq!(allocator.try_allocate(0, 150 * MIB, streams.get(0)), Err(SYMMALLOC_OUT_OF_MEMORY));
    assert!(message().contains("the driver refused (cuMemCreate failed"), "{}", message());
    assert_eq!(allocator.total("num_ooms"), 1);
    allocator.free(pointer);
});

stub_test!(out_of_memory_fail_releases_nothing_implicitly, ["STUB_MEMORY_BYTES" = "268435456"], {
    let (allocator, streams) = (Allocator::new("out_of_memory:fail,stitching:false"), Streams::new(2));
    let cached = allocator.allocate(0, 200 * MIB, streams.get(0));
    allocator.free(cached);
    assert_eq!(allocator.try_allocate(0, 150 * MIB, streams.get(1)), Err(SYMMALLOC_OUT_OF_MEMORY));
    assert_eq!(live().device_bytes, 200 << 20);
    assert_eq!(allocator.trim(), 200 << 20);
    allocator.allocate(0, 150 * MIB, streams.get(1));
});

stub_test!(statistics_have_pytorchs_names, {
    let (allocator, streams) = (Allocator::new("stitching:false"), Streams::new(1));
    let small = allocator.allocate(0, 700, streams.get(0));
    let large = allocator.allocate(0, 5 * MIB, streams.get(0));
    allocator.free(large);
    for (path, expected) in [
        ("allocated_bytes/all/current", 1024),
        ("allocated_bytes/small_pool/current", 1024),
        ("allocated_bytes/large_pool/current", 0),
        ("allocated_bytes/all/peak", 1024 + 5 * 1048576),
        ("requested_bytes/all/current", 700),
        ("active_bytes/all/current", 1024),
        ("allocation/all/allocated", 2),
        ("allocation/large_pool/freed", 1),
        ("reserved_bytes/all/current", 6 << 20),
        ("segment/all/current", 1),
        ("inactive_split_bytes/all/current", (6 << 20) - 1024),
        ("num_ooms", 0),
    ] {
        assert_eq!(allocator.total(path), expected, "{path}");
    }
    // SAFETY: a live allocator.
    done(unsafe { symmalloc_reset_peaks(allocator.0) });
    assert_eq!(allocator.total("allocated_bytes/all/peak"), 1024);
    allocator.free(small);
    let pool = &allocator.stats()["pools"][0];
    assert_eq!((pool["kind"].as_str(), pool["symmetric"].as_bool()), (Some("default"), Some(false)));
    assert_eq!(pool["digest"].as_str().map(|text| u64::from_str_radix(text, 16)), Some(Ok(allocator.digest(0))));
});

stub_test!(the_peak_over_all_heaps_is_exact, {
    let (allocator, streams) = (Allocator::new("stitching:false"), Streams::new(2));
    for stream in [streams.get(0), streams.get(1)] {
        let pointer = allocator.allocate(0, 8 * MIB, stream);
        allocator.free(pointer);
    }
    assert_eq!(allocator.total("allocated_bytes/all/peak"), 8 << 20, "the two blocks were not live at the same time");
    assert_eq!(allocator.total("requested_bytes/all/peak"), 16 << 20);
    assert_eq!(allocator.stats()["total"]["peaks_are_sums"], true);
    assert_eq!(allocator.total("reserved_bytes/all/peak"), 16 << 20);
});

/// Numbers below `end` from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }
}

stub_test!(current_and_peak_bytes_of_generated_programs_are_exact, {
    let streams = Streams::new(2);
    for seed in 0..20 {
        let (allocator, mut random) = (Allocator::new("stitching:false"), Random(seed));
        let pools = [0, allocator.create_pool(None), allocator.create_pool(Some("segments:expandable"))];
        // Live blocks with their pools and sizes, and the largest sum of the sizes.
        let (mut blocks, mut peak) = (Vec::<(u32, Pointer, u64)>::new(), 0);
        for step in 0..120 {
            let pool = pools[random.below(3)];
            let what = random.below(12);
            match what {
                0..5 => {
                    let pointer = allocator.allocate(pool, 1 + random.below(3 * MIB), streams.get(random.below(2)));
                    blocks.push((pool, pointer, allocator.placement(pointer).size_bytes));
                }
                5..9 if !blocks.is_empty() => {
                    let (_, pointer, _) = blocks.swap_remove(random.below(blocks.len()));
                    allocator.free(pointer);
                }
                9 => {
                    let mut freed = 0;
                    // SAFETY: a live allocator, and an output pointer. Nothing uses the allocations afterwards.
                    done(unsafe { symmalloc_pool_reset(allocator.0, pool, &raw mut freed) });
                    let before = blocks.len();
                    blocks.retain(|(of, ..)| *of != pool);
                    assert_eq!(freed, (before - blocks.len()) as u64);
                }
                10 => {
                    // SAFETY: a live allocator.
                    done(unsafe { symmalloc_reset_peaks(allocator.0) });
                    peak = 0;
                }
                11 => _ = allocator.trim(),
                _ => {}
            }
            let current: u64 = blocks.iter().map(|(.., size_bytes)| size_bytes).sum();
            peak = current.max(peak);
            let counted = ["allocated_bytes/all/current", "allocated_bytes/all/peak"].map(|path| allocator.total(path));
            assert_eq!(counted, [current, peak], "seed {seed}, step {step}, op {what}");
        }
        allocator.destroy();
    }
});

stub_test!(memory_that_the_driver_cannot_release_yet_is_counted, {
    let allocator = Allocator::new("stitching:false");
    let whole = allocator.allocate(0, 10 * MIB, null_mut());
    allocator.free(whole);
    let part = allocator.allocate(0, 2 * MIB, null_mut());
    assert_eq!(allocator.trim(), 8 << 20);
    assert_eq!((allocator.total("reserved_bytes/all/current"), live().device_bytes), (2 << 20, 10 << 20));
    assert_eq!(allocator.stats()["idle_bytes"], 8 << 20, "one chunk is partially mapped");
    allocator.free(part);
    allocator.trim();
    assert_eq!((&allocator.stats()["idle_bytes"], live().device_bytes), (&0.into(), 0));
});

stub_test!(prefetched_memory_is_counted_and_released_by_a_trim, {
    let allocator = Allocator::new("prefetch_mb:40");
    let pointer = allocator.allocate(0, 20 * MIB, null_mut());
    let spare_bytes = || allocator.stats()["spare_bytes"].as_u64();
    until(|| spare_bytes() == Some(20 << 20));
    assert_eq!((allocator.total("reserved_bytes/all/current"), live().device_bytes), (20 << 20, 40 << 20));
    assert_eq!(allocator.trim(), 20 << 20, "the prefetched memory returns to the device");
    assert_eq!((spare_bytes(), live().device_bytes), (Some(0), 20 << 20));
    allocator.free(pointer);
});

stub_test!(reports_are_returned_as_owned_strings, {
    let (allocator, streams) = (Allocator::new("out_of_memory:fail,total_limit_mb:64"), Streams::new(1));
    let (name, mut pointer) = (c_text("weights"), null_mut());
    // SAFETY: a live allocator and stream, a C string, and an output pointer.
    done(unsafe { symmalloc_allocate_named(allocator.0, 0, streams.get(0), MIB, name.as_ptr(), &raw mut pointer) });
    let (mut leaks, mut config) = (null_mut(), null_mut());
    // SAFETY: a live allocator, and an output pointer.
    done(unsafe { symmalloc_leak_report(allocator.0, &raw mut leaks) });
    assert!(taken(leaks).contains("1048576 bytes  weights  p0 s0 0@0"));
    // SAFETY: as above.
    done(unsafe { symmalloc_config(allocator.0, &raw mut config) });
    let config = taken(config);
    assert!(config.contains("total_limit_mb:64") && config.ends_with("out_of_memory:fail"), "{config}");
    let (mut bytes, mut len) = (null_mut(), 0);
    // SAFETY: as above.
    done(unsafe { symmalloc_snapshot(allocator.0, &raw mut bytes, &raw mut len) });
    // SAFETY: the library wrote that many bytes.
    let pickle = unsafe { std::slice::from_raw_parts(bytes, len) };
    let has = |key: &str| pickle.windows(key.len()).any(|window| window == key.as_bytes());
    assert!(pickle.starts_with(b"\x80") && has("segments") && has("active_allocated") && has("weights"));
    // SAFETY: from the library, and not used after this.
    unsafe { symmalloc_release_bytes(bytes.cast()) };
});

stub_test!(damaged_memory_is_reported_with_the_name_of_its_allocation, {
    let (allocator, streams) = (Allocator::new("debug:[canary,poison]"), Streams::new(1));
    let (name, mut pointer) = (c_text("scores"), null_mut());
    // SAFETY: a live allocator and stream, a C string, and an output pointer.
    done(unsafe { symmalloc_allocate_named(allocator.0, 0, streams.get(0), 4000, name.as_ptr(), &raw mut pointer) });
    let (mut checked, mut text) = (0, null_mut());
    // SAFETY: a live allocator, and an output pointer.
    done(unsafe { symmalloc_check_memory(allocator.0, &raw mut checked) });
    assert_eq!(checked, 1);
    // SAFETY: the stub's device memory is host memory, and the test damages the byte on purpose.
    unsafe { pointer.cast::<u8>().add(4000).write(1) };
    // SAFETY: as above.
    let status = unsafe { symmalloc_check_memory(allocator.0, &raw mut checked) };
    assert_eq!(status, SYMMALLOC_INVALID_STATE);
    assert!(message().contains("\"scores\""), "{}", message());
    let address = pointer as u64;
    allocator.free(pointer as Pointer);
    // SAFETY: as above.
    done(unsafe { symmalloc_explain_address(allocator.0, address + 8, &raw mut text) });
    let text = taken(text);
    assert!(text.contains("earlier: \"scores\""), "{text}");
    let mut json = null_mut();
    // SAFETY: as above.
    done(unsafe { symmalloc_memory_record(allocator.0, &raw mut json) });
    let json = taken(json);
    assert!(json.contains("\"name\":\"scores\"") && json.contains("\"freed_at_op\":"), "{json}");
});

stub_test!(invalid_settings_are_reported_with_the_byte, {
    for (conf, expected) in [
        ("segments:fixed,pears:[1]", "byte 15: unknown key, did you mean `peers`?"),
        ("out_of_memory:flush", "byte 14: out_of_memory must be trim or fail"),
        ("expandable_segments:maybe", "byte 20:"),
        ("chunk_mb:3", "use a positive multiple of 2097152"),
        ("prefetch_mb:4", "use a multiple of 2097152 that is at least the chunk size, 33554432"),
    ] {
        let (conf, mut out) = (c_text(conf), null_mut());
        // SAFETY: a C string, and an output pointer.
        let status = unsafe { symmalloc_create(0, conf.as_ptr(), &raw mut out) };
        assert_eq!(status, SYMMALLOC_INVALID_SETTINGS);
        assert!(out.is_null() && message().contains(expected), "{}", message());
    }
});

stub_test!(invalid_arguments_are_refused, {
    let allocator = Allocator::new("");
    let mut out = null_mut();
    // SAFETY: null where a pointer is checked, and output pointers.
    let statuses = unsafe {
        [
            symmalloc_create(-1, null(), &raw mut out),
            symmalloc_create(0, null(), null_mut()),
            symmalloc_create(0, c"\xff".as_ptr(), &raw mut out),
            symmalloc_allocate(null_mut(), 0, null_mut(), 512, null_mut()),
            symmalloc_allocate(allocator.0, 0, null_mut(), 512, null_mut()),
            symmalloc_free(null_mut(), null_mut()),
            symmalloc_agree(allocator.0, 2, 2, None, null_mut()),
            symmalloc_registrar_create(allocator.0, 0, null_mut(), 0, null(), null_mut()),
            symmalloc_registrar_sync(null_mut(), null_mut(), null_mut()),
        ]
    };
    assert_eq!(statuses, [SYMMALLOC_INVALID_ARGUMENT; 9]);
    // SAFETY: an output pointer.
    assert_eq!(unsafe { symmalloc_create(9, null(), &raw mut out) }, SYMMALLOC_CUDA);
    assert!(message().contains("device 9 does not exist"), "{}", message());
    assert_eq!(allocator.try_allocate(5, 512, null_mut()), Err(SYMMALLOC_UNKNOWN_POOL));
    // SAFETY: null has no effect.
    done(unsafe { symmalloc_destroy(null_mut()) });
    // SAFETY: null has no effect.
    done(unsafe { symmalloc_registrar_destroy(null_mut()) });
    // SAFETY: null has no effect.
    unsafe { symmalloc_release_bytes(null_mut()) };
    assert_eq!(allocator.total("allocation/all/allocated"), 0, "failed calls change nothing");
});

#[test]
fn the_version_is_the_packages() {
    // SAFETY: a static C string.
    let version = unsafe { std::ffi::CStr::from_ptr(symmalloc_version()) };
    assert_eq!(version.to_str(), Ok(env!("CARGO_PKG_VERSION")));
}
