//! Stitching on the stub, whose addresses really share memory: bytes written through one range are visible through the other.

use crate::process::{calls, device, live, stub_test};
use cudarc::driver::CudaStream;
use std::sync::Arc;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::Config;
use symmalloc_core::units::MIB;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError, DeviceBuffer};

const PIECE: usize = 4 << 20;

fn config() -> Config {
    "stitching:true,stitching_granule_mb:2,stitching_least_mb:4".parse().expect("valid")
}

/// Allocates four adjacent buffers and frees the second and the fourth.
fn in_pieces(allocator: &CudaAllocator, stream: &Arc<CudaStream>) -> Result<[DeviceBuffer<u8>; 2], CudaError> {
    let [first, _second, third, _fourth] = [
        allocator.alloc_zeroed(stream, PIECE)?,
        allocator.alloc_zeroed(stream, PIECE)?,
        allocator.alloc_zeroed(stream, PIECE)?,
        allocator.alloc_zeroed(stream, PIECE)?,
    ];
    Ok([first, third])
}

stub_test!(a_stitched_buffer_is_the_memory_of_its_pieces, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let allocator = CudaAllocator::new(&device, config()).expect("made");
    let kept = in_pieces(&allocator, &stream).expect("memory");
    let (bytes, aliases) = (live().device_bytes, calls("cuMemRetainAllocationHandle"));
    let mut whole = allocator.alloc_zeroed::<u8>(&stream, 2 * PIECE).expect("memory");
    assert_eq!(live().device_bytes, bytes, "no memory is allocated");
    assert_eq!((whole.placement().segment.0, calls("cuMemRetainAllocationHandle") - aliases), (1, 4));
    let pattern: Vec<u8> = (0..2 * PIECE).map(|at| (at / 4096) as u8 ^ (at % 251) as u8).collect();
    stream.memcpy_htod(&pattern, &mut whole).expect("copied");
    drop(whole);
    // A block that spans the stitched range is reused as it is; two of half the size use the original ranges.
    let again = allocator.alloc_zeroed::<u8>(&stream, 2 * PIECE).expect("memory");
    assert_eq!(calls("cuMemRetainAllocationHandle") - aliases, 4, "nothing is mapped a second time");
    drop(again);
    let mut whole = allocator.alloc_zeroed::<u8>(&stream, 2 * PIECE).expect("memory");
    stream.memcpy_htod(&pattern, &mut whole).expect("copied");
    drop(whole);
    // 8 MiB and one granule do not fit. Before the heap grows, free stitched memory returns to its original ranges, and is found there.
    let large = allocator.alloc_zeroed::<u8>(&stream, 3 * PIECE).expect("memory");
    drop(large);
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 2 * PIECE as u64);
    let zero = vec![0; PIECE];
    for buffer in &kept {
        assert_eq!(stream.clone_dtoh(buffer).expect("copied"), zero, "only its neighbors were written");
    }
    drop(kept);
    drop(allocator);
    assert_eq!((live().mappings, live().device_bytes, live().ranges), (0, 0, 0));
});

fn write(address: u64, byte: u8) {
    // SAFETY: the stub's device memory is memory of this process, and the address is mapped.
    unsafe { (address as *mut u8).write(byte) };
}

fn read(address: u64) -> u8 {
    // SAFETY: as above.
    unsafe { (address as *const u8).read() }
}

stub_test!(bytes_written_at_one_address_are_read_at_the_alias, {
    let device = device();
    let backend = CudaBackend::builder(&device).build().expect("made");
    assert!(backend.can_alias());
    let (home, range) = (backend.reserve(64 * MIB).expect("addresses"), backend.reserve(16 * MIB).expect("addresses"));
    // A piece of many granules is one chunk, wherever growth begins.
    backend.map_pieces((home, 0), 16 * MIB, 8 * MIB).expect("memory");
    backend.map_pieces((home, 16 * MIB), 8 * MIB, 8 * MIB).expect("memory");
    assert_eq!(live().mappings, 3);
    backend.alias((range, 0), (home, 16 * MIB), 2 * MIB).expect_err("not a whole piece");
    backend.alias((range, 0), (home, 16 * MIB), 8 * MIB).expect("mapped");
    backend.alias((range, 8 * MIB), (home, 0), 8 * MIB).expect("mapped");
    assert_eq!((live().mappings, live().device_bytes), (5, 24 * MIB));
    write(range.base.0 + 5, 7);
    write(home.base.0 + 3 * MIB, 8);
    assert_eq!([read(home.base.0 + 16 * MIB + 5), read(range.base.0 + 11 * MIB)], [7, 8]);
    backend.unmap(range, 0, 16 * MIB).expect("unmapped");
    assert_eq!(live().device_bytes, 24 * MIB, "an alias uses no additional memory");
    backend.unmap(home, 0, 24 * MIB).expect("unmapped");
    [home, range].into_iter().for_each(|range| backend.release(range).expect("released"));
    assert_eq!((live().mappings, live().device_bytes, live().ranges), (0, 0, 0));
});

stub_test!(prefetched_memory_is_not_stitched, {
    let device = device();
    let backend = CudaBackend::builder(&device).prefetch_bytes(40 * MIB).build().expect("made");
    assert!(!backend.can_alias());
    let allocator = CudaAllocator::with_backend(backend, config()).expect("made");
    let default_pool = symmalloc_core::PoolId::DEFAULT;
    assert_eq!(allocator.core().pool_config(default_pool).expect("the pool exists").stitching(), None);
});
