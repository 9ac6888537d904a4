//! Dma-bufs on the device. Skipped, with the reason, on a device without them.

use crate::device;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::AsFd;
use std::sync::Arc;
use symmalloc_core::Allocation;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::op::Contents;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DmaBuf, ExportState, Pool, ShareError};

const MIB: u64 = 1 << 20;

/// Returns the first device with dma-bufs. If there is none, prints the reason.
fn device_with_dma_buf() -> Option<Arc<CudaDevice>> {
    let device = device()?;
    if !device.features().dma_buf {
        println!("skipped, the device or its driver has no dma-bufs: {:?}", device.features());
        return None;
    }
    Some(device)
}

fn allocator(device: &Arc<CudaDevice>, chunk_bytes: u64) -> CudaAllocator {
    let backend = CudaBackend::builder(device).chunk_bytes(chunk_bytes).build().expect("a backend");
    CudaAllocator::with_backend(backend, Default::default()).expect("an allocator")
}

/// Returns a pool with this text of a configuration, and an allocation in it.
fn pool_of(allocator: &CudaAllocator, text: &str, size_bytes: u64) -> (Pool<CudaBackend>, Allocation) {
    let config: PoolConfig = text.parse().expect("a configuration");
    let pool = allocator.create_pool(config).expect("a pool");
    let stream = allocator.device().context().new_stream().expect("a stream");
    let allocation = allocator.with_pool(&pool).allocate(&stream, size_bytes).expect("memory");
    (pool, allocation)
}

fn file_bytes(dma_buf: &DmaBuf) -> u64 {
    let mut file = File::from(dma_buf.as_fd().try_clone_to_owned().expect("a valid descriptor"));
    file.seek(SeekFrom::End(0)).expect("a file with a size")
}

#[test]
fn a_dma_buf_covers_its_range_in_whole_pages() {
    let Some(device) = device_with_dma_buf() else { return };
    let allocator = allocator(&device, 32 * MIB);
    for text in ["segments:reserved,segment_mb:1024", "segments:fixed"] {
        let (_pool, allocation) = pool_of(&allocator, text, 512 * MIB);
        let (address, size_bytes) = (allocation.address.0, allocation.size_bytes);
        let whole = allocator.dma_buf(address, size_bytes).expect("a dma-buf");
        println!("{text}: {whole:?}, a file of {} bytes", file_bytes(&whole));
        assert_eq!((whole.offset_bytes(), whole.chunk_count(), file_bytes(&whole)), (0, 1, size_bytes));
        let part = allocator.dma_buf(address + 3 * MIB + 100, 5000).expect("a dma-buf of a part");
        assert!(part.offset_bytes() > 0 && part.size_bytes() >= part.offset_bytes() + 5000, "{part:?}");
        assert_eq!(file_bytes(&part), part.size_bytes());
    }
}

#[test]
fn memory_stays_until_its_dma_buf_is_dropped() {
    let Some(device) = device_with_dma_buf() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let allocator = allocator(&device, 32 * MIB);
    // The first dma-buf of a process may make the driver retain memory.
    let (_warm, small) = pool_of(&allocator, "segments:fixed", 2 * MIB);
    drop(allocator.dma_buf(small.address.0, small.size_bytes).expect("a dma-buf"));
    const SIZE: u64 = 2048 * MIB;
    const SLACK: u64 = 64 * MIB;
    for end in ["trim", "sleep", "destroy"] {
        let before = free();
        // A trim does not release a reserved segment.
        let text = if end == "trim" { "segments:fixed" } else { "segments:reserved,segment_mb:2048" };
        let (pool, allocation) = pool_of(&allocator, text, SIZE);
        let taken = free();
        assert!(before - taken >= SIZE - SLACK, "{end}: {before} and {taken} bytes are free");
        let dma_buf = allocator.dma_buf(allocation.address.0, SIZE).expect("a dma-buf");
        let (id, mut pool) = (pool.id(), Some(pool));
        if end == "sleep" {
            allocator.sleep(id, Contents::Drop).expect("a dma-buf does not prevent sleep");
        } else {
            allocator.free(allocation.handle).expect("freed");
            pool.take_if(|_| end == "destroy");
            allocator.trim_all().expect("trimmed");
        }
        assert_ne!(dma_buf.state(), ExportState::Live);
        let held = free();
        let copy = dma_buf.as_fd().try_clone_to_owned().expect("a copy of the descriptor");
        drop(dma_buf);
        let copied = free();
        drop(copy);
        let after = free();
        println!(
            "{end}: MiB free, before {}, allocated {}, released by the pool {}, a copied descriptor {}, closed {}",
            before / MIB,
            taken / MIB,
            held / MIB,
            copied / MIB,
            after / MIB
        );
        assert!(held <= taken + SLACK, "{end}: the device got {} bytes back too early", held - taken);
        assert!(after + SLACK >= before, "{end}: {} bytes did not return", before - after);
        drop(pool);
    }
}

#[test]
fn a_range_across_chunks_is_one_dma_buf_or_a_typed_error() {
    let Some(device) = device_with_dma_buf() else { return };
    let allocator = allocator(&device, 32 * MIB);
    let (_pool, allocation) = pool_of(&allocator, "segments:expandable", 256 * MIB);
    match allocator.dma_buf(allocation.address.0, allocation.size_bytes) {
        Ok(dma_buf) => {
            println!("the driver accepts {} chunks in a dma-buf", dma_buf.chunk_count());
            assert_eq!((dma_buf.chunk_count(), file_bytes(&dma_buf)), (8, allocation.size_bytes));
        }
        Err(ShareError::ManyChunks { chunks, error }) => {
            println!("the driver refuses {chunks} chunks in a dma-buf: {error}");
            assert_eq!(chunks, 8);
        }
        Err(error) => panic!("{error}"),
    }
    let chunk = allocator.dma_buf(allocation.address.0 + 32 * MIB, 32 * MIB).expect("a dma-buf of one chunk");
    assert_eq!((chunk.chunk_count(), file_bytes(&chunk)), (1, 32 * MIB));
}

#[test]
fn a_thousand_dma_bufs_leak_nothing() {
    let Some(device) = device_with_dma_buf() else { return };
    let allocator = allocator(&device, 32 * MIB);
    let (_pool, allocation) = pool_of(&allocator, "segments:reserved,segment_mb:64", 64 * MIB);
    let open = || std::fs::read_dir("/proc/self/fd").expect("listed").count();
    let make = || allocator.dma_buf(allocation.address.0, allocation.size_bytes).expect("a dma-buf");
    drop(make());
    let before = (open(), device.memory_info().expect("queried").free_bytes);
    let begun = std::time::Instant::now();
    (0..1000).for_each(|_| drop(make()));
    println!("a dma-buf of 64 MiB is created and closed in {:?}", begun.elapsed() / 1000);
    let after = (open(), device.memory_info().expect("queried").free_bytes);
    assert_eq!(after.0, before.0);
    assert!(after.1 + 16 * MIB >= before.1, "{} bytes are gone", before.1 - after.1);
}
