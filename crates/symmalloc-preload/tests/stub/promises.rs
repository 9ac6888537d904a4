//! The driver's guarantees beyond allocation: attributes, pools, captures, peers, resets, forks.

use crate::driver::*;
use crate::environment::preload;
use std::ffi::{c_int, c_void};
use stub_process::cuda::{calls, live};
use stub_process::stub_test;

fn attribute<T: Default>(number: c_int, address: u64) -> Result<T, c_int> {
    let mut value = T::default();
    match pointer_attribute((&raw mut value).cast(), number, address) {
        0 => Ok(value),
        code => Err(code),
    }
}

stub_test!(attributes_are_those_of_the_allocation, ["LD_PRELOAD" = &preload()], {
    let context = begin(0);
    let (a, b) = (alloc(100_000).expect("memory should suffice"), alloc(100_000).expect("memory should suffice"));
    let stream = stream();
    let pooled = alloc_async(5000, stream).expect("memory should suffice");
    let mut pool = 0_u64;
    assert_eq!(default_pool(&raw mut pool, 0), 0);
    for (pointer, size, of_pool) in [(a, 100_000_u64, 0), (b, 100_000, 0), (pooled, 5000, pool)] {
        let inside = pointer + size - 1;
        assert_eq!(attribute::<usize>(1, inside), Ok(context));
        assert_eq!(attribute::<u64>(11, inside), Ok(pointer));
        assert_eq!(attribute::<u64>(12, inside), Ok(size));
        assert_eq!(attribute::<u64>(17, inside), Ok(of_pool));
        assert_eq!(attribute::<u8>(10, inside), Ok(0), "legacy IPC is not supported");
        assert_eq!(attribute::<u32>(2, inside), Ok(2), "the driver reports device memory");
        let (mut base, mut bytes) = (0, 0);
        assert_eq!(address_range(&raw mut base, &raw mut bytes, inside), 0);
        assert_eq!((base, bytes as u64), (pointer, size));
        let (mut start, mut kind) = (0_u64, 0_u32);
        let values = [(&raw mut start).cast::<c_void>(), (&raw mut kind).cast()];
        assert_eq!(pointer_attributes(2, [11, 2].as_ptr(), values.as_ptr(), inside), 0);
        assert_eq!(start, pointer);
    }
    assert_ne!(attribute::<u64>(7, a), attribute::<u64>(7, b), "every allocation has a unique id");
    assert_eq!(ipc_handle([0_u8; 64].as_mut_ptr().cast(), a), 801);
    assert_eq!([mem_free(a), mem_free(b), mem_free_async(pooled, stream)], [0; 3]);
    assert_ne!(address_range(&raw mut pool, std::ptr::null_mut(), a), 0, "freed");
});

stub_test!(memory_for_other_processes_comes_from_the_driver, ["LD_PRELOAD" = &preload(), "SYMMALLOC_RUN_IPC" = "1"], {
    begin(0);
    let (stream, pointer) = (stream(), alloc(MIB).expect("memory should suffice"));
    assert_eq!((ipc_handle([0_u8; 64].as_mut_ptr().cast(), pointer), calls("cuMemAlloc_v2")), (0, 1));
    let pooled = alloc_async(MIB, stream).expect("memory should suffice");
    assert_eq!((mem_free_async(pooled, stream), mem_free(pointer), calls("cuMemAllocAsync")), (0, 0, 0));
});

stub_test!(free_memory_includes_cached_memory, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (mut free, mut total, mut before) = (0, 0, 0);
    assert_eq!(mem_info(&raw mut before, &raw mut total), 0);
    let pointer = alloc(64 * MIB).expect("memory should suffice");
    assert_eq!(mem_info(&raw mut free, &raw mut total), 0);
    assert_eq!(before - free, 64 * MIB);
    assert_eq!(mem_free(pointer), 0);
    assert_eq!(mem_info(&raw mut free, &raw mut total), 0);
    assert_eq!(free, before, "the cache is free memory");
    assert!(live().device_bytes >= 64 << 20);
});

/// `CUmemPoolProps`: kind, handle types, kind of location, device, security, size, usage.
#[repr(C)]
struct Properties([c_int; 4], *mut c_void, usize, [u8; 56]);

fn make_pool(handle_types: c_int) -> u64 {
    let properties = Properties([1, handle_types, 1, 0], std::ptr::null_mut(), 0, [0; 56]);
    let mut pool = 0;
    assert_eq!(pool_create(&raw mut pool, (&raw const properties).cast()), 0);
    pool
}

fn from_pool(size: usize, pool: u64, stream: u64) -> u64 {
    let mut address = 0;
    assert_eq!(mem_alloc_from_pool(&raw mut address, size, pool, stream), 0);
    address
}

fn pool_bytes(pool: u64, number: c_int) -> u64 {
    let mut value = 0_u64;
    assert_eq!(pool_attribute(pool, number, (&raw mut value).cast()), 0);
    value
}

stub_test!(each_memory_pool_is_served_by_its_own_pool, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (stream, pool, exported) = (stream(), make_pool(0), make_pool(1));
    let pointer = from_pool(30 * MIB, pool, stream);
    assert_eq!(attribute::<u64>(17, pointer), Ok(pool));
    assert!(pool_bytes(pool, 5) >= 30 << 20);
    assert_eq!((pool_bytes(pool, 7), pool_bytes(pool, 8)), (30 << 20, 30 << 20));
    assert_eq!(mem_free_async(pointer, stream), 0);
    assert_eq!((pool_bytes(pool, 7), pool_bytes(pool, 8)), (0, 30 << 20));
    let mut zero = 0_u64;
    assert_eq!(set_pool_attribute(pool, 8, (&raw mut zero).cast()), 0);
    assert_eq!(pool_bytes(pool, 8), 0);
    // Release threshold: the driver stores the program's value.
    let mut threshold = u64::MAX;
    assert_eq!(set_pool_attribute(pool, 4, (&raw mut threshold).cast()), 0);
    assert_eq!(pool_bytes(pool, 4), u64::MAX);
    assert_eq!(pool_trim(pool, 0), 0);
    assert_eq!((pool_bytes(pool, 5), live().device_bytes), (0, 0), "all memory was released");
    assert_eq!(calls("cuMemAllocFromPoolAsync"), 0);
    // The driver serves a pool for export, even when it is the device's current pool.
    let pointer = from_pool(MIB, exported, stream);
    assert_eq!((mem_free_async(pointer, stream), calls("cuMemAllocFromPoolAsync")), (0, 1));
    assert_eq!(set_pool(0, exported), 0);
    let pointer = alloc_async(MIB, stream).expect("memory should suffice");
    assert_eq!((mem_free_async(pointer, stream), calls("cuMemAllocAsync")), (0, 1));
    assert_eq!(set_pool(0, pool), 0);
    let pointer = alloc_async(MIB, stream).expect("memory should suffice");
    assert_eq!(attribute::<u64>(17, pointer), Ok(pool));
    // Allocations outlive their pool.
    assert_eq!(pool_destroy(pool), 0);
    assert_eq!(memset_async(pointer, 1, MIB, stream), 0);
    assert_eq!(mem_free_async(pointer, stream), 0);
    let pointer = alloc_async(MIB, stream).expect("the default pool is served again");
    assert_eq!((mem_free_async(pointer, stream), calls("cuMemAllocAsync")), (0, 1));
});

stub_test!(memory_allocated_during_a_capture_belongs_to_the_graph, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (captured, other) = (stream(), stream());
    let before = alloc_async(MIB, captured).expect("memory should suffice");
    let fenced = alloc_async(MIB, other).expect("memory should suffice");
    assert_eq!(begin_capture(captured, 0), 0);
    let inside = alloc_async(MIB, captured).expect("memory of the graph");
    assert_eq!(calls("cuMemAllocAsync"), 1);
    // Memory on an uncaptured stream is served, including growth, and the capture stays valid.
    let beside = alloc_async(100 * MIB, other).expect("memory should suffice");
    assert_eq!([memset_async(inside, 1, MIB, captured), mem_free_async(inside, captured)], [0; 2]);
    assert_eq!((mem_free_async(beside, other), calls("cuMemFreeAsync")), (0, 1));
    // A graph can only free memory that a graph allocated. The block stays allocated.
    assert_ne!(mem_free_async(before, captured), 0);
    assert_eq!(calls("cuMemFreeAsync"), 2);
    let mut graph = 0;
    assert_eq!((end_capture(captured, &raw mut graph), graph != 0), (0, true));
    assert_eq!(graph_destroy(graph), 0);
    assert_eq!(mem_free_async(before, captured), 0, "no capture is in progress");
    assert_eq!(mem_free_async(fenced, captured), 0);
    assert_eq!(calls("cuMemFreeAsync"), 2);
    assert!(alloc_async(MIB, captured).is_ok() && calls("cuMemAllocAsync") == 1);
});

stub_test!(the_end_of_a_capture_that_never_began_leaves_the_others, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (captured, other) = (stream(), stream());
    let mut graph = 0;
    assert_eq!(begin_capture(captured, 0), 0);
    assert_ne!(end_capture(other, &raw mut graph), 0);
    assert!(alloc_async(MIB, captured).is_ok() && calls("cuMemAllocAsync") == 1, "memory of the graph");
    assert_eq!((end_capture(captured, &raw mut graph), graph != 0), (0, true));
    assert_eq!(graph_destroy(graph), 0);
});

stub_test!(a_reset_releases_everything, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (stream, kept) = (stream(), alloc(10 * MIB).expect("memory should suffice"));
    let pooled = alloc_async(MIB, stream).expect("memory should suffice");
    assert_eq!(mem_free_async(pooled, stream), 0);
    assert_eq!((reset(0), live().device_bytes), (0, 0));
    assert_eq!(mem_free(kept), 1, "the memory was released with its context");
    let context = begin(0);
    let pointer = alloc(MIB).expect("memory of the new context");
    assert_eq!((attribute::<usize>(1, pointer), calls("cuMemAlloc_v2")), (Ok(context), 0));
    // Releasing the last reference also releases the memory, as with the driver.
    assert_eq!((release(0), live().device_bytes > 0), (0, true), "one of two references");
    assert_eq!((release(0), live().device_bytes), (0, 0));
});

stub_test!(enabled_peers_have_access, ["LD_PRELOAD" = &preload(), "STUB_DEVICES" = "2"], {
    let (first, second) = (begin(0), begin(1));
    // Before and after the first allocation in the context.
    assert_eq!(enable_peer(first, 0), 0);
    assert_eq!(set_current(first), 0);
    let before = calls("cuMemSetAccess");
    let pointer = alloc(MIB).expect("memory should suffice");
    assert!(calls("cuMemSetAccess") > before);
    let mapped = calls("cuDeviceCanAccessPeer");
    assert!(mapped > 0, "the memory was mapped for the peer");
    let mut pool = 0;
    assert_eq!(default_pool(&raw mut pool, 0), 0);
    assert_eq!(pool_access(pool, [[1, 1, 3]].as_ptr(), 1), 0);
    assert_eq!(mem_free(pointer), 0);
    assert_eq!(set_current(second), 0);
});

stub_test!(every_listed_device_gets_access_to_a_pool, ["LD_PRELOAD" = &preload(), "STUB_DEVICES" = "4"], {
    begin(0);
    let pool = make_pool(0);
    let pointer = from_pool(MIB, pool, stream());
    // The memory is mapped again for each device that is new.
    for (entries, new) in [(&[[1, 1, 3]][..], 1), (&[[1, 1, 3], [1, 2, 3], [1, 3, 3]], 2), (&[[1, 3, 3], [1, 2, 3]], 0)]
    {
        let before = calls("cuMemSetAccess");
        assert_eq!(pool_access(pool, entries.as_ptr(), entries.len()), 0);
        assert_eq!(calls("cuMemSetAccess") - before, new, "{entries:?}");
    }
    assert_eq!(memset_async(pointer, 1, MIB, 0), 0);
});

stub_test!(a_forked_child_is_not_served, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let pointer = alloc(MIB).expect("memory should suffice");
    // SAFETY: the child only makes driver calls, for which no locks are held here, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let before = calls("cuMemAlloc_v2");
        let served = alloc(MIB);
        let is_right = served.is_ok() && calls("cuMemAlloc_v2") == before + 1 && mem_free(pointer) == 1;
        // SAFETY: exits the child without running the parent's destructors.
        unsafe { libc::_exit(if is_right { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child was served by the driver");
    assert_eq!(mem_free(pointer), 0);
});

stub_test!(a_trim_keeps_what_the_program_keeps, ["LD_PRELOAD" = &preload()], {
    begin(0);
    let (stream, pool) = (stream(), make_pool(0));
    // For each number of bytes to keep, in relation to those that are reserved: whether free memory stays.
    for (more, stays) in [(1 << 40, true), (1, true), (0, true), (-1, false), (i64::MIN, false)] {
        let live = from_pool(MIB, pool, stream);
        let free = from_pool(70 * MIB, pool, stream);
        assert_eq!(mem_free_async(free, stream), 0);
        let reserved = pool_bytes(pool, 5);
        assert_eq!(pool_trim(pool, reserved.saturating_add_signed(more) as usize), 0);
        assert_eq!(pool_bytes(pool, 5) == reserved, stays, "{reserved} bytes are reserved, and {more} more are kept");
        assert_eq!(mem_free_async(live, stream), 0);
    }
});

stub_test!(an_allocation_has_exactly_its_own_addresses, ["LD_PRELOAD" = &preload()], {
    begin(0);
    // Around the sizes and addresses at which the way to look up an allocation changes.
    let region = 32 * MIB;
    let sizes = [512, 2 * MIB, region - 512, region, region + 512, 3 * region];
    let mut blocks: Vec<(u64, usize)> =
        sizes.iter().chain(&sizes).map(|size| (alloc(*size).expect("memory should suffice"), *size)).collect();
    // Neighbors on both sides are live, then free.
    for _ in 0..2 {
        for (start, size) in &blocks {
            let (start, end) = (*start, start + *size as u64);
            for inside in [start, start + 1, start + *size as u64 / 2, end - 1] {
                assert_eq!((attribute::<u64>(11, inside), attribute::<u64>(12, inside)), (Ok(start), Ok(*size as u64)));
            }
            for outside in [start - 1, end] {
                assert_ne!(
                    attribute::<u64>(11, outside),
                    Ok(start),
                    "{outside:#x} is outside of {size} bytes at {start:#x}"
                );
            }
        }
        let mut is_kept = false;
        blocks.retain(|(start, _)| {
            is_kept = !is_kept;
            is_kept || mem_free(*start) != 0
        });
    }
});
