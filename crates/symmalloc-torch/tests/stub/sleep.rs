//! Pools that sleep and wake, and pools with a quota, through the C interface: alone, by tags, and with windows over two ranks.

use crate::library::*;
use crate::registrar::{POOL, Windows, allocator_of_torch, ranks, ranks_of};
use std::ffi::c_void;
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use stub_process::{nccl, nccl_test};
use symmalloc_nccl::{Communicator, UniqueId};
use symmalloc_torch::*;

const KEEP: u32 = SYMMALLOC_CONTENTS_KEEP;
const DROP: u32 = SYMMALLOC_CONTENTS_DROP;
const ZERO: u32 = SYMMALLOC_CONTENTS_ZERO;

impl Allocator {
    fn try_sleep(self, pool: u32, contents: u32) -> Result<symmalloc_slept, symmalloc_status> {
        let mut out = symmalloc_slept::default();
        // SAFETY: a live allocator, and an output pointer.
        match unsafe { symmalloc_sleep(self.0, pool, contents, &raw mut out) } {
            SYMMALLOC_OK => Ok(out),
            status => Err(status),
        }
    }

    #[track_caller]
    fn sleep(self, pool: u32, contents: u32) -> symmalloc_slept {
        self.try_sleep(pool, contents).unwrap_or_else(|status| panic!("{status:?}: {}", message()))
    }

    fn try_wake(self, pool: u32) -> Result<symmalloc_woken, symmalloc_status> {
        let mut out = symmalloc_woken::default();
        // SAFETY: a live allocator, and an output pointer.
        match unsafe { symmalloc_wake(self.0, pool, &raw mut out) } {
            SYMMALLOC_OK => Ok(out),
            status => Err(status),
        }
    }

    #[track_caller]
    fn wake(self, pool: u32) -> symmalloc_woken {
        self.try_wake(pool).unwrap_or_else(|status| panic!("{status:?}: {}", message()))
    }

    fn try_sleep_and_suspend(self, pool: u32, contents: u32) -> Result<symmalloc_slept, symmalloc_status> {
        let mut out = symmalloc_slept::default();
        // SAFETY: a live allocator, and an output pointer.
        match unsafe { symmalloc_sleep_and_suspend(self.0, pool, contents, &raw mut out) } {
            SYMMALLOC_OK => Ok(out),
            status => Err(status),
        }
    }

    fn suspend(self) -> Result<u64, symmalloc_status> {
        let mut out = 0;
        // SAFETY: a live allocator, and an output pointer.
        match unsafe { symmalloc_suspend(self.0, &raw mut out) } {
            SYMMALLOC_OK => Ok(out),
            status => Err(status),
        }
    }

    #[track_caller]
    fn device_memory(self) -> symmalloc_memory {
        let mut out = symmalloc_memory::default();
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_device_memory(self.0, &raw mut out) });
        let parts = [out.awake_bytes, out.graph_bytes, out.asleep_bytes, out.exported_bytes, out.idle_bytes];
        let sum = parts.into_iter().sum::<u64>() + out.communicators_bytes + out.other_bytes;
        assert!(sum >= out.used_bytes, "{out:?}");
        out
    }

    #[track_caller]
    fn phase(self, pool: u32) -> u32 {
        let mut out = u32::MAX;
        // SAFETY: a live allocator, and an output pointer.
        done(unsafe { symmalloc_phase(self.0, pool, &raw mut out) });
        out
    }

    fn sleep_tagged(self, tag: &str, contents: u32) -> symmalloc_status {
        let tag = c_text(tag);
        // SAFETY: a live allocator and a C string; null outputs.
        unsafe { symmalloc_sleep_tagged(self.0, tag.as_ptr(), contents, null_mut()) }
    }

    fn wake_tagged(self, tag: &str) -> symmalloc_status {
        let tag = c_text(tag);
        // SAFETY: a live allocator and a C string; null outputs.
        unsafe { symmalloc_wake_tagged(self.0, tag.as_ptr(), null_mut()) }
    }

    fn try_resize(self, pool: u32, bytes: usize, stream: *mut c_void) -> Result<u64, symmalloc_status> {
        let mut out = 0;
        // SAFETY: a live allocator and stream, and an output pointer.
        match unsafe { symmalloc_resize(self.0, pool, stream, bytes, &raw mut out) } {
            SYMMALLOC_OK => Ok(out),
            status => Err(status),
        }
    }
}

/// Returns device memory as host memory, which it is on the stub.
fn bytes(pointer: Pointer, size: usize) -> &'static mut [u8] {
    // SAFETY: a live allocation of that many bytes whose pool is awake, used by one thread.
    unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut(pointer), size) }
}

stub_test!(a_pool_sleeps_and_wakes_with_kept_contents, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(1));
    let pool = allocator.create_pool(Some("segments:expandable"));
    let pointer = allocator.allocate(pool, 6 * MIB, streams.get(0));
    let freed = allocator.allocate(pool, 4 * MIB, streams.get(0));
    for contents in [KEEP, ZERO, DROP] {
        bytes(pointer, 6 * MIB).fill(7);
        let slept = allocator.sleep(pool, contents);
        let kept = if contents == KEEP { 10 << 20 } else { 0 };
        let expected = symmalloc_slept { released_bytes: 10 << 20, kept_bytes: kept, ..symmalloc_slept::default() };
        assert_eq!(slept, expected);
        assert_eq!((allocator.phase(pool), live().device_bytes), (SYMMALLOC_PHASE_ASLEEP, 0));
        assert_eq!(allocator.stats()["pools"][pool as usize]["phase"], "asleep");
        assert_eq!(allocator.try_allocate(pool, MIB, streams.get(0)), Err(SYMMALLOC_INVALID_STATE));
        assert!(message().contains("sleeps"), "{}", message());
        assert_eq!(allocator.placement(pointer).offset_bytes, 0, "an address is found during sleep");
        let woken = allocator.wake(pool);
        assert_eq!(woken, symmalloc_woken { remapped_bytes: 10 << 20, ..symmalloc_woken::default() });
        assert_eq!(allocator.phase(pool), SYMMALLOC_PHASE_AWAKE);
        let expected = [Some(7), Some(0), None][[KEEP, ZERO, DROP].iter().position(|of| *of == contents).expect("one")];
        assert!(expected.is_none_or(|byte| bytes(pointer, 6 * MIB).iter().all(|is| *is == byte)), "{contents}");
    }
    allocator.free(freed);
    allocator.free(pointer);
    assert_eq!(allocator.try_sleep(pool, 3), Err(SYMMALLOC_INVALID_ARGUMENT));
    assert!(message().contains("SYMMALLOC_CONTENTS_KEEP"), "{}", message());
    assert_eq!(allocator.try_sleep(99, KEEP), Err(SYMMALLOC_UNKNOWN_POOL));
    assert_eq!(allocator.try_wake(99), Err(SYMMALLOC_UNKNOWN_POOL));
    // SAFETY: a live allocator, or none; null outputs.
    unsafe {
        assert_eq!(symmalloc_phase(allocator.0, pool, null_mut()), SYMMALLOC_INVALID_ARGUMENT);
        assert_eq!(symmalloc_sleep(null_mut(), 0, KEEP, null_mut()), SYMMALLOC_INVALID_ARGUMENT);
        done(symmalloc_sleep(allocator.0, pool, KEEP, null_mut()));
        done(symmalloc_wake(allocator.0, pool, null_mut()));
    }
    allocator.destroy();
    assert_eq!((live().device_bytes, live().ranges, live().host_bytes), (0, 0, 0));
});

stub_test!(sleeps_and_wakes_hold_what_the_first_one_held, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(1));
    let pool = allocator.create_pool(Some("segments:expandable"));
    let kept = [1, 6].map(|size| allocator.allocate(pool, size * MIB, streams.get(0)));
    steady(5, |_| {
        let slept = [KEEP, ZERO, DROP].map(|contents| {
            // Memory that is freed during a sleep is not loaded.
            let freed = allocator.allocate(pool, 3 * MIB, streams.get(0));
            let slept = allocator.sleep(pool, contents);
            allocator.free(freed);
            (slept, allocator.wake(pool))
        });
        (slept, allocator.held(&kept))
    });
});

stub_test!(pools_of_a_tag_sleep_together, {
    let (allocator, streams) = (Allocator::new("tag:model"), Streams::new(1));
    let stream = streams.get(0);
    let [first, other, second] =
        ["tag:kv_cache", "tag:weights", "segments:fixed,tag:kv_cache"].map(|conf| allocator.create_pool(Some(conf)));
    for pool in [0, first, other, second] {
        allocator.allocate(pool, 2 * MIB, stream);
    }
    done(allocator.sleep_tagged("kv_cache", DROP));
    assert_eq!([0, first, other, second].map(|pool| allocator.phase(pool)), [0, 1, 0, 1]);
    assert_eq!(allocator.stats()["pools"][second as usize]["tag"], "kv_cache");
    done(allocator.sleep_tagged("kv_cache", KEEP));
    done(allocator.sleep_tagged("model", KEEP));
    assert_eq!(allocator.try_allocate(0, MIB, stream), Err(SYMMALLOC_INVALID_STATE));
    done(allocator.wake_tagged("model"));
    done(allocator.wake_tagged("kv_cache"));
    assert_eq!([0, first, other, second].map(|pool| allocator.phase(pool)), [0; 4]);
    assert_eq!(allocator.wake_tagged("unknown"), SYMMALLOC_UNKNOWN_POOL);
    assert!(message().contains("tag:unknown"), "{}", message());
});

stub_test!(a_tag_counts_the_bytes_of_all_its_pools, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(1));
    for (size, conf) in [(2, "tag:kv_cache"), (4, "segments:fixed,tag:kv_cache"), (8, "")] {
        let pool = allocator.create_pool(Some(conf));
        allocator.allocate(pool, size * MIB, streams.get(0));
    }
    let (tag, mut slept, mut woken) = (c_text("kv_cache"), symmalloc_slept::default(), symmalloc_woken::default());
    // SAFETY: a live allocator, a C string, and an output.
    done(unsafe { symmalloc_sleep_tagged(allocator.0, tag.as_ptr(), KEEP, &raw mut slept) });
    assert_eq!((slept.kept_bytes, slept.released_bytes), (6 << 20, 22 << 20), "a segment of 20 MiB");
    // SAFETY: as above.
    done(unsafe { symmalloc_wake_tagged(allocator.0, tag.as_ptr(), &raw mut woken) });
    assert_eq!(woken.remapped_bytes, slept.released_bytes);
});

stub_test!(a_graphs_pool_has_the_tag_of_the_default_pool, ["SYMMALLOC_CONF" = "tag:model"], {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
    torch::begin((1, 0));
    let pointer = torch::allocate(MIB, streams.get(0));
    torch::end((1, 0));
    let pool = allocator.placement(pointer).pool;
    assert_eq!(allocator.stats()["pools"][pool as usize]["kind"], "graph");
    bytes(pointer, MIB).fill(3);
    done(allocator.sleep_tagged("model", KEEP));
    assert_eq!((allocator.phase(pool), live().device_bytes), (SYMMALLOC_PHASE_ASLEEP, 0));
    done(allocator.wake_tagged("model"));
    assert!(bytes(pointer, MIB).iter().all(|byte| *byte == 3));
});

stub_test!(a_wake_on_a_full_device_leaves_the_pool_asleep, ["STUB_MEMORY_BYTES" = "268435456"], {
    let (allocator, streams) = (Allocator::new(""), Streams::new(1));
    let pool = allocator.create_pool(None);
    let pointer = allocator.allocate(pool, 160 * MIB, streams.get(0));
    bytes(pointer, 160 * MIB).fill(9);
    allocator.sleep(pool, KEEP);
    let taken = allocator.allocate(0, 160 * MIB, streams.get(0));
    assert_eq!(allocator.try_wake(pool), Err(SYMMALLOC_OUT_OF_MEMORY));
    assert!(message().contains("stays asleep") && message().contains("wake it again"), "{}", message());
    assert_eq!(allocator.phase(pool), SYMMALLOC_PHASE_ASLEEP);
    allocator.free(taken);
    allocator.trim();
    allocator.wake(pool);
    assert!(bytes(pointer, 160 * MIB).iter().all(|byte| *byte == 9));
});

stub_test!(a_wake_keeps_the_free_memory_of_graphs, ["STUB_MEMORY_BYTES" = "268435456"], {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(1));
    torch::begin((1, 0));
    let inside = torch::allocate(100 * MIB, streams.get(0));
    let graph = allocator.placement(inside).pool;
    torch::free(inside);
    torch::end((1, 0));
    let pool = allocator.create_pool(None);
    allocator.allocate(pool, 120 * MIB, streams.get(0));
    allocator.sleep(pool, DROP);
    let taken = allocator.allocate(0, 60 * MIB, streams.get(0));
    assert_eq!(allocator.try_wake(pool), Err(SYMMALLOC_OUT_OF_MEMORY));
    let reserved = || allocator.stats()["pools"][graph as usize]["stats"]["reserved_bytes"]["all"]["current"].clone();
    assert_eq!(reserved(), 100 << 20, "the graph uses it when it runs");
    allocator.free(taken);
    allocator.wake(pool);
    assert_eq!(reserved(), 100 << 20);
});

stub_test!(host_memory_can_be_reserved_and_released, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(1));
    let pool = allocator.create_pool(None);
    allocator.allocate(pool, 8 * MIB, streams.get(0));
    // SAFETY: a live allocator, and an output pointer.
    unsafe {
        done(symmalloc_reserve_host_memory(allocator.0, 8 * MIB));
        let before = calls("cuMemHostAlloc");
        allocator.sleep(pool, KEEP);
        assert_eq!(calls("cuMemHostAlloc"), before, "the first sleep uses the reserved memory");
        allocator.wake(pool);
        let mut bytes = 0;
        done(symmalloc_release_host_memory(allocator.0, &raw mut bytes));
        assert!(bytes >= 8 << 20, "{bytes}");
    }
    assert_eq!(live().host_bytes, 0);
});

stub_test!(a_pool_holds_exactly_its_quota, {
    let (allocator, streams) = (Allocator::new("chunk_mb:2"), Streams::new(1));
    let stream = streams.get(0);
    let pool = allocator.create_pool(Some("segments:expandable,growth_mb:0,streams:shared,range_mb:64"));
    assert_eq!(allocator.stats()["pools"][pool as usize]["has_quota"], true);
    assert_eq!(allocator.try_allocate(pool, MIB, stream), Err(SYMMALLOC_OUT_OF_MEMORY));
    assert!(message().contains("resize"), "{}", message());
    assert_eq!(allocator.try_resize(pool, 11 * MIB, stream), Ok(12 << 20));
    let blocks: Vec<_> = (0..6).map(|_| allocator.allocate(pool, 2 * MIB, stream)).collect();
    assert_eq!(allocator.try_allocate(pool, MIB, stream), Err(SYMMALLOC_OUT_OF_MEMORY));
    bytes(blocks[4], 2 * MIB).fill(5);
    allocator.free(blocks[0]);
    allocator.free(blocks[2]);
    allocator.trim();
    assert_eq!(live().device_bytes, 12 << 20, "trim keeps the memory of a quota");
    assert_eq!(allocator.try_resize(pool, 6 * MIB, stream), Err(SYMMALLOC_INVALID_STATE));
    assert!(message().contains("free some first"), "{}", message());
    assert_eq!(live().device_bytes, 12 << 20, "the size is unchanged");
    assert_eq!(allocator.try_resize(pool, 10 * MIB, stream), Ok(10 << 20));
    assert_eq!(live().device_bytes, 10 << 20);
    assert_eq!(allocator.allocate(pool, 2 * MIB, stream), blocks[0], "the lowest addresses are mapped");
    assert_eq!(allocator.try_resize(pool, 64 * MIB, stream), Ok(64 << 20));
    assert_eq!(allocator.allocate(pool, 2 * MIB, stream), blocks[2]);
    assert!(bytes(blocks[4], 2 * MIB).iter().all(|byte| *byte == 5));
    assert_eq!(allocator.try_resize(pool, 65 * MIB, stream), Err(SYMMALLOC_INVALID_ARGUMENT));
    assert_eq!(allocator.try_resize(0, 65 * MIB, stream), Err(SYMMALLOC_INVALID_STATE));
    assert!(message().contains("growth_mb:0"), "{}", message());
    allocator.sleep(pool, KEEP);
    assert_eq!(allocator.try_resize(pool, 64 * MIB, stream), Err(SYMMALLOC_INVALID_STATE));
    allocator.wake(pool);
    assert!(bytes(blocks[4], 2 * MIB).iter().all(|byte| *byte == 5));
    assert_eq!(allocator.stats()["pools"][pool as usize]["stats"]["reserved_bytes"]["all"]["current"], 64 << 20);
});

nccl_test!(a_pool_sleeps_on_all_ranks_and_gets_its_windows_back, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = Windows::new(allocator, pool, comm.raw());
        let pointer = allocator.allocate(pool, 4 * MIB, null_mut());
        assert_eq!(windows.sync(), (1, 0));
        bytes(pointer, 4 * MIB).fill(rank as u8 + 1);
        barrier.wait();
        let slept = allocator.sleep(pool, KEEP);
        assert_eq!((slept.kept_bytes, slept.deregistrations), (4 << 20, 1));
        barrier.wait();
        assert_eq!((nccl::live().windows, live().device_bytes), (0, 0), "all ranks released their windows and memory");
        barrier.wait();
        let woken = allocator.wake(pool);
        assert_eq!((woken.registrations, woken.changed, woken.lost), (1, 0, 0));
        assert!(bytes(pointer, 4 * MIB).iter().all(|byte| *byte == rank as u8 + 1));
        assert_eq!(windows.sync(), (0, 0), "there are no new segments");
        barrier.wait();
        assert_eq!(nccl::live().windows, 2);
        barrier.wait();
        done(windows.destroy());
    });
    nccl::assert_clean();
});

nccl_test!(sleeps_with_windows_hold_what_the_first_one_held, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = Windows::new(allocator, pool, comm.raw());
        let kept = [4, 30].map(|size| allocator.allocate(pool, size * MIB, null_mut()));
        windows.sync();
        // One rank reads what both hold, because reading the list of descriptors opens one.
        let held = |addresses: &[usize]| {
            barrier.wait();
            let held = (rank == 0).then(|| (nccl::live(), allocator.held(addresses).without_threads()));
            barrier.wait();
            held
        };
        steady(5, |_| {
            let temporary = allocator.allocate(pool, 50 * MIB, null_mut());
            let grown = windows.sync();
            allocator.free(temporary);
            allocator.trim();
            let shrunk = windows.sync();
            let slept = [KEEP, ZERO, DROP].map(|contents| {
                let slept = allocator.sleep(pool, contents);
                let asleep = held(&[]);
                (slept, asleep, allocator.wake(pool))
            });
            (grown, shrunk, slept, held(&kept))
        });
        // The next registrar of the pool registers the same memory.
        done(windows.destroy());
        steady(5, |_| {
            let windows = Windows::new(allocator, pool, comm.raw());
            let synced = windows.sync();
            let during = held(&kept);
            done(windows.destroy());
            (synced, during, held(&kept))
        });
    });
    nccl::assert_clean();
});

nccl_test!(a_pool_with_a_communicator_of_some_ranks_sleeps_on_all_ranks, {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let alone = alone_of(comm);
        let world = named(allocator, pool, comm, "world", 0);
        let unnamed = named(allocator, pool, &alone, "world", 0);
        allocator.allocate(pool, 4 * MIB, null_mut());
        assert_eq!(allocator.try_sleep(pool, DROP), Err(SYMMALLOC_INVALID_STATE), "rank {rank}");
        assert!(message().contains("register it with different names"), "{}", message());
        done(unnamed.destroy());
        let alone = alone_of(comm);
        let part = named(allocator, pool, &alone, &format!("part {rank}"), 0);
        assert_eq!((world.sync(), part.sync()), ((1, 0), (1, 0)));
        assert_eq!(allocator.sleep(pool, DROP).deregistrations, 2);
        barrier.wait();
        assert_eq!(allocator.wake(pool).registrations, 2);
        assert_eq!((part.sync(), world.sync()), ((0, 0), (0, 0)));
        done(part.destroy());
        done(world.destroy());
        barrier.wait();
    });
    nccl::assert_clean();
});

nccl_test!(one_rank_alone_releases_private_memory_while_symmetric_pools_are_awake, {
    ranks(|rank, allocator, comm, barrier| {
        let pools = [0, 1].map(|_| allocator.create_pool(Some(POOL)));
        let windows = pools.map(|pool| named(allocator, pool, comm, "world", 1));
        for pool in pools {
            let block = allocator.allocate(pool, 4 * MIB, null_mut());
            allocator.allocate(pool, 4 * MIB, null_mut());
            allocator.free(block);
        }
        let private = allocator.create_pool(None);
        allocator.free(allocator.allocate(private, 6 * MIB, null_mut()));
        windows.iter().for_each(|windows| _ = windows.sync());
        allocator.sleep(pools[0], KEEP);
        if rank == 1 {
            assert_eq!(allocator.trim_private(), 6 << 20, "the first segment of the heap");
            assert_eq!(allocator.trim_private(), 0);
        }
        allocator.wake(pools[0]);
        windows.iter().for_each(|windows| _ = windows.sync());
        barrier.wait();
        windows.into_iter().for_each(|windows| done(windows.destroy()));
    });
    nccl::assert_clean();
});

nccl_test!(
    communicators_of_sleeping_pools_are_suspended_until_one_wakes,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_SUSPENDABLE_MB" = "64", "STUB_NCCL_REUSE_WINDOWS" = "1"],
    {
        ranks(|rank, allocator, comm, barrier| {
            let pools = [0, 1].map(|_| allocator.create_pool(Some(POOL)));
            // Both borrow the same communicator.
            let windows = pools.map(|pool| Windows::new(allocator, pool, comm.raw()));
            let pointers = pools.map(|pool| allocator.allocate(pool, 4 * MIB, null_mut()));
            windows.iter().for_each(|windows| assert_eq!(windows.sync(), (1, 0)));
            bytes(pointers[1], 4 * MIB).fill(rank as u8 + 1);
            let held = |allocator: Allocator| allocator.device_memory().communicators_bytes;
            assert_eq!(held(allocator), 64 << 20);
            assert_eq!(allocator.try_sleep_and_suspend(pools[0], KEEP), Err(SYMMALLOC_INVALID_STATE));
            assert!(message().contains("windows of other pools"), "{}", message());
            assert_eq!(allocator.phase(pools[0]), SYMMALLOC_PHASE_AWAKE);
            for round in 0..3 {
                barrier.wait();
                assert_eq!(allocator.suspend(), Ok(0), "no pool sleeps");
                allocator.sleep(pools[0], KEEP);
                assert_eq!(allocator.suspend(), Ok(0), "another pool is awake");
                if round == 0 {
                    allocator.sleep(pools[1], KEEP);
                    assert_eq!(allocator.suspend(), Ok(64 << 20));
                } else {
                    let slept = allocator.try_sleep_and_suspend(pools[1], KEEP).expect("the other pool sleeps");
                    assert_eq!((slept.suspended_bytes, slept.deregistrations), (64 << 20, 1));
                }
                assert_eq!((held(allocator), allocator.suspend()), (0, Ok(0)));
                assert_eq!(windows[0].try_sync(), SYMMALLOC_INVALID_STATE);
                assert!(message().contains("suspended"), "{}", message());
                let woken = allocator.wake(pools[1]);
                // The stub gives the first pool that wakes the first place, so the handle may differ.
                assert_eq!((woken.registrations, woken.lost, woken.resumed), (1, 0, 1));
                assert!(bytes(pointers[1], 4 * MIB).iter().all(|byte| *byte == rank as u8 + 1));
                assert_eq!((windows[1].sync(), held(allocator)), ((0, 0), 64 << 20));
                assert_eq!(allocator.wake(pools[0]).resumed, 0);
            }
            barrier.wait();
            windows.into_iter().for_each(|windows| done(windows.destroy()));
        });
        nccl::assert_clean();
    }
);

nccl_test!(an_older_nccl_does_not_suspend, ["STUB_NCCL_VERSION" = "22906", "STUB_NCCL_REUSE_WINDOWS" = "1"], {
    ranks(|_, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = Windows::new(allocator, pool, comm.raw());
        allocator.allocate(pool, 4 * MIB, null_mut());
        windows.sync();
        barrier.wait();
        assert_eq!(allocator.try_sleep_and_suspend(pool, KEEP), Err(SYMMALLOC_INVALID_STATE));
        assert!(message().contains("2.29.7"), "{}", message());
        assert_eq!((allocator.phase(pool), allocator.suspend()), (SYMMALLOC_PHASE_AWAKE, Ok(0)));
        allocator.sleep(pool, KEEP);
        assert_eq!(allocator.suspend(), Err(SYMMALLOC_INVALID_STATE));
        assert!(message().contains("2.29.7"), "{}", message());
        assert_eq!(allocator.device_memory().communicators_bytes, 0, "this NCCL does not report it");
        allocator.wake(pool);
        done(windows.destroy());
    });
    nccl::assert_clean();
});

nccl_test!(
    a_communicator_of_two_suspended_pools_counts_once,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_SUSPENDABLE_MB" = "64", "STUB_NCCL_REUSE_WINDOWS" = "1"],
    {
        ranks(|rank, allocator, comm, barrier| {
            let pools = [0, 1].map(|_| allocator.create_pool(Some(POOL)));
            let parts = [0, 1].map(|_| alone_of(comm));
            let windows: Vec<Windows> = (0..2)
                .flat_map(|at| {
                    let world = named(allocator, pools[at], comm, "world", 0);
                    [world, named(allocator, pools[at], &parts[at], &format!("part {rank} {at}"), 0)]
                })
                .collect();
            pools.iter().for_each(|pool| _ = allocator.allocate(*pool, 4 * MIB, null_mut()));
            windows.iter().for_each(|windows| assert_eq!(windows.sync(), (1, 0)));
            pools.iter().for_each(|pool| _ = allocator.sleep(*pool, DROP));
            assert_eq!(allocator.suspend(), Ok(3 * (64 << 20)));
            assert_eq!(allocator.suspend(), Ok(0));
            assert_eq!(pools.map(|pool| allocator.wake(pool).resumed), [2, 1]);
            barrier.wait();
            windows.into_iter().for_each(|windows| done(windows.destroy()));
        });
        nccl::assert_clean();
    }
);

stub_test!(the_memory_of_a_device_is_listed_by_owner, {
    let (allocator, streams) = (Allocator::new("stitching:false"), Streams::new(1));
    let before = allocator.device_memory();
    let [kept, asleep] = [0, 1].map(|_| allocator.create_pool(Some("segments:expandable")));
    for pool in [0, kept, asleep] {
        allocator.allocate(pool, 6 * MIB, streams.get(0));
    }
    let awake = allocator.device_memory();
    assert_eq!((awake.awake_bytes - before.awake_bytes, awake.other_bytes), (18 << 20, before.other_bytes));
    let slept = allocator.sleep(asleep, DROP);
    assert_eq!(slept.suspended_bytes, 0);
    let during = allocator.device_memory();
    assert_eq!((during.awake_bytes, during.asleep_bytes), (awake.awake_bytes - (6 << 20), 0));
    assert_eq!((awake.used_bytes - during.used_bytes, during.other_bytes), (6 << 20, before.other_bytes));
    assert_eq!(allocator.try_sleep_and_suspend(kept, DROP).expect("a pool without communicators").suspended_bytes, 0);
    // SAFETY: a live allocator, or none; null outputs.
    unsafe {
        assert_eq!(symmalloc_device_memory(allocator.0, null_mut()), SYMMALLOC_INVALID_ARGUMENT);
        assert_eq!(symmalloc_suspend(null_mut(), null_mut()), SYMMALLOC_INVALID_ARGUMENT);
        done(symmalloc_suspend(allocator.0, null_mut()));
    }
    allocator.destroy();
});

/// Returns a communicator of one rank.
fn alone_of(comm: &Communicator) -> Communicator {
    let id = UniqueId::new().expect("the stub gives ids");
    Communicator::builder(comm.device()).connect(id, 0, 1).expect("connected")
}

fn named(allocator: Allocator, pool: u32, comm: &Communicator, name: &str, agree_every: u32) -> Windows {
    let name = c_text(name);
    let options = symmalloc_registrar_options {
        deadline_ms: 5000,
        registration: SYMMALLOC_REGISTER_WINDOWS,
        agree_every,
        rank: 0,
        world: 0,
        rendezvous: null(),
        name: name.as_ptr(),
    };
    let mut out = null_mut();
    // SAFETY: a live allocator and communicator, options with a C string, and an output pointer.
    done(unsafe { symmalloc_registrar_create_with(allocator.0, pool, comm.raw(), &raw const options, &raw mut out) });
    Windows(out)
}

nccl_test!(ranks_that_differ_stay_awake_and_get_an_error, {
    ranks(|rank, allocator, comm, barrier| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = Windows::new(allocator, pool, comm.raw());
        allocator.allocate(pool, 4 * MIB, null_mut());
        windows.sync();
        barrier.wait();
        let status = allocator.try_sleep(pool, if rank == 0 { KEEP } else { DROP });
        assert_eq!(status, Err(SYMMALLOC_MISALIGNED), "{}", message());
        assert!(message().contains("the ranks differ in the call"), "{}", message());
        assert_eq!(allocator.phase(pool), SYMMALLOC_PHASE_AWAKE);
        assert_eq!(windows.destroy(), SYMMALLOC_MISALIGNED, "the histories of the ranks differ");
        barrier.wait();
    });
});

nccl_test!(a_pool_with_two_modes_of_agreement_sleeps_on_all_communicators, {
    ranks_of(1, allocator_of_torch, |_, allocator, comm, _| {
        let pool = allocator.create_pool(Some(POOL));
        let windows = Windows::new(allocator, pool, comm.raw());
        let other = alone_of(comm);
        let by_hand = named(allocator, pool, &other, "other", SYMMALLOC_AGREE_BY_HAND);
        let memory = allocator.allocate(pool, 4 * MIB, null_mut());
        windows.sync();
        by_hand.sync();
        allocator.sleep(pool, KEEP);
        assert_eq!(allocator.phase(pool), SYMMALLOC_PHASE_ASLEEP);
        assert!(windows.window(memory, 4 * MIB).is_err() && by_hand.window(memory, 4 * MIB).is_err());
        allocator.wake(pool);
        assert!(windows.window(memory, 4 * MIB).is_ok() && by_hand.window(memory, 4 * MIB).is_ok());
        done(by_hand.destroy());
        done(windows.destroy());
    });
});
