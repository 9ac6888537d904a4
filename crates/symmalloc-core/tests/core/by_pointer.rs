//! Tests of access by address: it places like access by handle, and accepts only the first address of a live
//! allocation.

use std::collections::BTreeMap;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::config::{Config, PointerLookup, PoolConfig};
use symmalloc_core::errors::{FreeError, HandleError};
use symmalloc_core::{Allocation, PoolId, SharedAllocator, StreamId};
use symmalloc_sim::SimBackend;

const SIZES: [u64; 6] = [1, 4096, 3 << 20, 700, 64 << 20, 21 << 20];

fn allocator(config: &Config, streams: u16) -> SharedAllocator<SimBackend> {
    let backend = SimBackend::builder().seed(1).build();
    let allocator = SharedAllocator::new(backend, config.clone()).expect("the arguments should be valid");
    for _ in 0..streams {
        allocator.register_stream().expect("the program should register few streams");
    }
    allocator
}

fn by_pointer() -> Config {
    Config::builder().pointer_lookup(PointerLookup::Exact).build().expect("the configuration should be valid")
}

fn symmetric() -> Config {
    let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
    Config::builder()
        .default_pool(pool)
        .pointer_lookup(PointerLookup::Exact)
        .build()
        .expect("the configuration should be valid")
}

/// Allocates and returns the address.
fn allocate(allocator: &SharedAllocator<SimBackend>, stream: u16, size_bytes: u64) -> DeviceAddress {
    allocator.allocate(PoolId::DEFAULT, StreamId(stream), size_bytes).expect("memory should suffice").address
}

#[test]
fn frees_and_uses_by_address_equal_those_by_handle() {
    for config in [by_pointer(), symmetric()] {
        let (by_handle, by_address) = (allocator(&config, 2), allocator(&config, 2));
        let (mut handles, mut addresses) = (BTreeMap::new(), BTreeMap::new());
        for turn in 0..600 {
            let stream = turn % 2;
            let size = SIZES[usize::from(turn) * 7 % 6] + u64::from(turn % 5) * 512;
            handles.insert(
                turn,
                by_handle.allocate(PoolId::DEFAULT, StreamId(stream), size).expect("memory should suffice").handle,
            );
            addresses.insert(turn, allocate(&by_address, stream, size));
            let victim = turn * 31 % (turn + 1);
            if turn % 7 == 3
                && let (Some(handle), Some(address)) = (handles.get(&victim), addresses.get(&victim))
            {
                by_handle.record_use(*handle, StreamId(1)).expect("the allocation should be live");
                by_address.record_use_at(*address, StreamId(1)).expect("the allocation should be live");
            }
            if turn % 3 != 0
                && let (Some(handle), Some(address)) = (handles.remove(&victim), addresses.remove(&victim))
            {
                by_handle.free(handle).expect("the allocation should be live");
                by_address.free_at(address).expect("the allocation should be live");
                assert!(by_address.free_at(address).is_err(), "once");
            }
        }
        assert_eq!(by_handle.digest(PoolId::DEFAULT), by_address.digest(PoolId::DEFAULT));
        assert_eq!(by_handle.stats(), by_address.stats());
        for (turn, address) in addresses {
            let handle = by_address.handle_at(address).expect("the allocation should be live");
            let [one, other] = [(&by_handle, handles[&turn]), (&by_address, handle)];
            let place_of = |(it, handle): (&SharedAllocator<_>, _)| {
                it.allocation(handle).expect("the allocation should be live").placement
            };
            assert_eq!(place_of(one), place_of(other));
            by_address.free(handle).expect("a free by handle also succeeds");
            assert!(by_address.free_at(address).is_err(), "once");
        }
        by_address.check().expect("the invariants should hold");
        assert_eq!(by_address.stats().usage.all.allocations.current, 0);
    }
}

#[test]
fn an_address_that_starts_no_live_allocation_is_refused() {
    let allocator = allocator(&by_pointer(), 1);
    let [kept, freed] = [3 << 20, 512].map(|size| allocate(&allocator, 0, size));
    allocator.free_at(freed).expect("the allocation should be live");
    for address in [0, 512, kept.0 + 1, kept.0 + 512, freed.0, 1 << 60, u64::MAX] {
        assert!(matches!(allocator.free_at(DeviceAddress(address)), Err(FreeError::Handle(_))), "{address:#x}");
        assert!(allocator.record_use_at(DeviceAddress(address), StreamId(0)).is_err(), "{address:#x}");
    }
    let unknown = FreeError::Handle(HandleError::UnknownAddress { address: DeviceAddress(0) });
    assert_eq!(allocator.free_at(DeviceAddress(0)), Err(unknown));
    assert_eq!(allocator.free_at(kept).map(drop), Ok(()));
}

#[test]
fn without_pointer_lookup_an_address_is_refused() {
    let allocator = allocator(&Config::default(), 1);
    assert_eq!(allocator.free_at(DeviceAddress(512)), Err(FreeError::Handle(HandleError::LookupOff)));
}

#[test]
fn threads_that_exchange_addresses_free_each_once() {
    const TURNS: usize = 2000;
    let allocator = allocator(&by_pointer(), 3);
    let (sender, receiver) = std::sync::mpsc::channel::<DeviceAddress>();
    let receiver = std::sync::Mutex::new(receiver);
    std::thread::scope(|scope| {
        for stream in 0..3 {
            let (allocator, sender) = (&allocator, sender.clone());
            scope.spawn(move || {
                for turn in 0..TURNS {
                    let address = allocate(allocator, stream, SIZES[turn % 4]);
                    if turn % 2 == 0 {
                        sender.send(address).expect("somebody listens");
                    } else {
                        allocator.free_at(address).expect("the allocation should be live");
                    }
                }
            });
        }
        drop(sender);
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Ok(address) = receiver.lock().expect("no thread should panic").recv() else { return };
                    allocator.record_use_at(address, StreamId(0)).expect("the allocation should be live");
                    allocator.free_at(address).expect("the allocation should be live");
                }
            });
        }
    });
    allocator.check().expect("the invariants should hold");
    let usage = allocator.stats().usage.all.allocations;
    assert_eq!((usage.current, usage.allocated), (0, 3 * TURNS as u64));
}

#[test]
fn only_one_of_the_threads_that_free_an_address_succeeds() {
    let allocator = allocator(&by_pointer(), 1);
    for _ in 0..200 {
        let address = allocate(&allocator, 0, 4096);
        let freed = std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(|| allocator.free_at(address).is_ok()));
            threads
                .map(|thread| thread.join().expect("the thread should not panic"))
                .into_iter()
                .filter(|freed| *freed)
                .count()
        });
        assert_eq!(freed, 1);
    }
    allocator.check().expect("the invariants should hold");
}

#[test]
fn a_hint_of_another_heap_hides_no_allocation() {
    // More 2 MiB granules than hints, so that the two heaps overwrite each other's hints.
    let allocator = allocator(&by_pointer(), 2);
    let addresses: Vec<_> = (0..20_000).map(|turn| allocate(&allocator, turn % 2, 2 << 20)).collect();
    for address in addresses.iter().chain(&addresses) {
        allocator.handle_at(*address).expect("the allocation should be live");
    }
    for address in addresses {
        assert_eq!(allocator.free_at(address), Ok(2 << 20));
    }
    allocator.check().expect("the invariants should hold");
}

/// An expandable segment's range is longer than its memory; a fixed one's is not.
#[test]
fn a_segment_is_found_from_its_first_byte_to_its_last_and_not_beyond() {
    const MIB: u64 = 1 << 20;
    let fixed = PoolConfig::builder().fixed().build().expect("the configuration should be valid");
    for pool in [PoolConfig::default(), fixed] {
        let is_fixed = pool != PoolConfig::default();
        let allocator =
            allocator(&Config::builder().default_pool(pool).build().expect("the configuration should be valid"), 1);
        let take =
            |size_bytes| allocator.allocate(PoolId::DEFAULT, StreamId(0), size_bytes).expect("memory should suffice");
        let found_around = |first: &Allocation, size_bytes: u64| {
            for offset_bytes in [0, 1, size_bytes / 2, size_bytes - 1] {
                let found = allocator.segment_at(DeviceAddress(first.address.0 + offset_bytes)).expect("inside");
                assert_eq!(
                    (found.base, found.offset_bytes, found.size_bytes),
                    (first.address, offset_bytes, size_bytes)
                );
                assert_eq!((found.heap.pool, found.heap.stream()), (PoolId::DEFAULT, Some(StreamId(0))));
                assert_eq!(found.segment, first.placement.segment);
            }
            for outside in [first.address.0 - 1, first.address.0 + size_bytes, first.address.0 + size_bytes + 1] {
                assert_eq!(allocator.segment_at(DeviceAddress(outside)), None, "{outside:#x}");
            }
        };
        let first = take(11 * MIB);
        found_around(&first, 12 * MIB);
        let second = take(15 * MIB);
        if is_fixed {
            found_around(&second, 16 * MIB);
        } else {
            found_around(&first, 26 * MIB);
        }
        allocator.free(second.handle).expect("the allocation should be live");
        allocator.trim_all().expect("no fault should be injected");
        found_around(&first, 12 * MIB);
    }
}
