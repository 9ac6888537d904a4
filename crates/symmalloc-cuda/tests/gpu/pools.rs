//! Pools, limits and the failure callback, compared with the driver's memory numbers.

use crate::device;
use cudarc::driver::result;
use std::sync::{Arc, Mutex};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemory, OutOfMemoryCause};
use symmalloc_core::{LimitScope, PoolId, Retry};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError};

const MIB: usize = 1 << 20;

fn out_of_memory(error: CudaError) -> Box<OutOfMemory> {
    match error {
        CudaError::Allocate(AllocateError::OutOfMemory(error)) => error,
        error => panic!("unexpected error: {error:?}"),
    }
}

#[test]
fn a_pool_enforces_its_limit_and_releases_its_memory() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let outside = allocator.alloc_zeroed::<u8>(&stream, 8 * MIB).expect("allocated");
    let before = free();
    let config = PoolConfig::builder().limit_bytes(Some(256 << 20)).build().expect("valid");
    let pool = allocator.create_pool(config).expect("made");
    let inside = allocator.with_pool(&pool);
    let id = pool.id();
    let first = inside.alloc_zeroed::<u8>(&stream, 200 * MIB).expect("allocated");
    assert_eq!(before - free(), 200 << 20);
    let error = out_of_memory(inside.alloc_zeroed::<u8>(&stream, 100 * MIB).expect_err("above the limit"));
    println!("{error}");
    assert_eq!(error.cause, OutOfMemoryCause::Limit { scope: LimitScope::Pool, limit_bytes: 256 << 20 });
    assert_eq!((error.pool, before - free()), (id, 200 << 20), "a failed request allocates nothing");
    drop(allocator.alloc_zeroed::<u8>(&stream, 400 * MIB).expect("the limit applies only to the pool"));
    drop((pool, inside));
    allocator.trim_all().expect("trimmed");
    assert_eq!(before - free(), 200 << 20, "a live buffer keeps the pool");
    assert_eq!(stream.clone_dtoh(&first.slice(199 * MIB..)).expect("copied"), vec![0; MIB]);
    drop(first);
    assert_eq!(before - free(), 200 << 20, "dropping never releases memory to the device");
    allocator.trim_all().expect("trimmed");
    assert_eq!(free(), before);
    assert!(allocator.core().pool_stats(id).is_err(), "destroyed");
    assert_eq!(stream.clone_dtoh(&outside).expect("copied"), vec![0; 8 * MIB]);
}

#[test]
fn the_failure_callback_makes_room_on_a_full_device() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let pool = allocator.create_pool(PoolConfig::default()).expect("made");
    let cache = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..4 {
        let buffer = allocator.with_pool(&pool).alloc_zeroed::<u8>(&stream, 512 * MIB).expect("allocated");
        cache.lock().expect("not poisoned").push(buffer);
    }
    device.context().bind_to_thread().expect("current");
    // SAFETY: freed below, and not used.
    let others = unsafe { result::malloc_sync(free() as usize - 1024 * MIB) }.expect("allocated");
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (theirs, notes, id) = (Arc::clone(&cache), Arc::clone(&asked), pool.id());
    allocator.set_failure_callback(move |core, error| {
        notes.lock().expect("not poisoned").push(error.clone());
        if theirs.lock().expect("not poisoned").pop().is_none() {
            return Retry::GiveUp;
        }
        core.trim_pool(id).expect("trimmed");
        Retry::Again
    });
    let large = allocator.alloc_zeroed::<u8>(&stream, 2048 * MIB).expect("the callback frees memory");
    let asked = || asked.lock().expect("not poisoned").clone();
    println!(
        "the callback ran {} times, {} of 4 buffers left, {} bytes free",
        asked().len(),
        cache.lock().expect("not poisoned").len(),
        free()
    );
    assert!(asked().iter().all(|error| error.pool == PoolId::DEFAULT && error.requested_bytes == 2048 << 20));
    assert!(asked().iter().all(|error| matches!(error.cause, OutOfMemoryCause::Driver(_))), "{:?}", asked());
    assert!((1..4).contains(&cache.lock().expect("not poisoned").len()), "the callback runs as often as necessary");
    assert_eq!(stream.clone_dtoh(&large.slice(2047 * MIB..)).expect("copied"), vec![0; MIB]);
    cache.lock().expect("not poisoned").clear();
    allocator.trim_all().expect("trimmed");
    let (before, times) = (free(), asked().len());
    let error = out_of_memory(
        allocator.alloc_zeroed::<u8>(&stream, 8192 * MIB).expect_err("the callback has nothing left to free"),
    );
    println!("{error}");
    assert_eq!((free(), asked().len()), (before, times + 1), "the callback ran once more, and nothing was allocated");
    // SAFETY: allocated above.
    unsafe { result::free_sync(others) }.expect("freed");
    assert_eq!(allocator.drop_errors().count, 0);
}

#[test]
fn two_pools_with_quotas_pass_memory_to_each_other() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let backend = CudaBackend::builder(&device).chunk_bytes(2 << 20).build().expect("made");
    let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let policy: PoolConfig =
        "segments:expandable,growth_mb:0,streams:shared,range_mb:4096".parse().expect("a configuration");
    let [one, other] = [policy.clone(), policy].map(|config| allocator.create_pool(config).expect("made"));
    let before = free();
    let held = |pool: PoolId, mib: u64| allocator.resize(pool, &stream, mib << 20).expect("resized");
    assert_eq!((held(one.id(), 3072), before - free()), (3072 << 20, 3072 << 20));
    // Pages of a cache: one in a hundred stays, spread over the pool.
    let mut pages: Vec<_> = (0..1536_u32)
        .map(|page| {
            let mut buffer =
                allocator.with_pool(&one).alloc_zeroed::<u32>(&stream, MIB / 2).expect("the quota is not exhausted");
            stream.memcpy_htod(&[page; 1024], &mut buffer.slice_mut(..1024)).expect("copied");
            (page, buffer)
        })
        .collect();
    assert!(allocator.with_pool(&one).alloc_zeroed::<u8>(&stream, 2 * MIB).is_err(), "the quota is exhausted");
    pages.retain(|(page, _)| page % 100 == 7);
    let live = pages.len() as u64 * 2;
    for round in 0..10 {
        let large = if round % 2 == 0 { 1024 } else { live };
        let begun = std::time::Instant::now();
        held(one.id(), large);
        held(other.id(), 3072 - large);
        let took = begun.elapsed();
        assert_eq!(before - free(), 3072 << 20, "round {round}");
        let filled = allocator.with_pool(&other).alloc_zeroed::<u8>(&stream, (3072 - large as usize) * MIB);
        drop(filled.expect("the other pool released memory"));
        for (page, buffer) in &pages {
            assert_eq!(stream.clone_dtoh(&buffer.slice(..1024)).expect("copied"), [*page; 1024], "round {round}");
        }
        println!("{large} MiB and {} MiB: {took:.1?}", 3072 - large);
        held(other.id(), 0);
        held(one.id(), 3072);
    }
    drop(pages);
    held(one.id(), 0);
    assert_eq!(free(), before);
}
