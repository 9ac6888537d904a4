//! Sleep and wake on a device: kept contents are restored at the same addresses, and while the pool sleeps, its memory is available to
//! other allocations. For measurements see the example `sleep`.

use crate::device;
use cudarc::driver::DevicePtr;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::{SleepCause, SleepError};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError};

const MIB: usize = 1 << 20;

fn sleeps_on(backend: CudaBackend) {
    let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
    let device = allocator.device();
    let stream = device.context().new_stream().expect("a stream");
    let pool = allocator.create_pool("segments:expandable".parse::<PoolConfig>().expect("valid")).expect("made");
    let inside = allocator.with_pool(&pool);
    let pattern: Vec<u8> = (0..70 * MIB).map(|at| (at / 4096) as u8 ^ (at % 251) as u8).collect();
    let mut buffers = [1000, 70 * MIB, 3 * MIB + 1].map(|len| inside.alloc_zeroed::<u8>(&stream, len).expect("memory"));
    for buffer in &mut buffers {
        let len = buffer.len();
        stream.memcpy_htod(&pattern[..len], buffer).expect("copied");
    }
    let address_of = |at: usize| buffers[at].device_ptr(&stream).0;
    let addresses = [0, 1, 2].map(address_of);
    for _ in 0..3 {
        let before = device.memory_info().expect("the query succeeds").free_bytes;
        let slept = allocator.sleep(pool.id(), Contents::Keep).expect("slept");
        let asleep = device.memory_info().expect("the query succeeds").free_bytes;
        // The driver allocates a granule or two internally for the first copies.
        assert!((asleep - before).abs_diff(slept.released_bytes) <= 8 << 20);
        // Other allocations take all free memory, and fill it with other bytes.
        let mut taken = Vec::new();
        for chunk_mib in [1 << 10, 64, 2] {
            while let Ok(other) = allocator.alloc_zeroed::<u8>(&stream, chunk_mib * MIB) {
                taken.push(other);
            }
        }
        stream.synchronize().expect("done");
        let refused = allocator.wake(pool.id()).expect_err("the device is full");
        assert!(matches!(refused, CudaError::Sleep(SleepError { cause: SleepCause::Memory { .. }, .. })), "{refused}");
        drop(taken);
        allocator.trim_all().expect("trimmed");
        allocator.wake(pool.id()).expect("woken");
        assert_eq!([0, 1, 2].map(address_of), addresses);
        for buffer in &buffers {
            assert!(stream.clone_dtoh(buffer).expect("copied") == pattern[..buffer.len()]);
        }
        allocator.core().check().expect("consistent");
    }
}

#[test]
fn a_pool_wakes_with_its_contents_after_others_used_its_memory() {
    let Some(device) = device() else { return };
    sleeps_on(CudaBackend::builder(&device).build().expect("supported"));
    let folder = tempfile::tempdir().expect("a folder");
    sleeps_on(CudaBackend::builder(&device).images_in(folder.path()).build().expect("supported"));
}
