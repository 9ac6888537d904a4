//! Forked children that drop what belongs to the parent.

use super::graphs;
use super::sharing::attach;
use crate::process::{device, stub_test};
use cudarc::driver::{CudaStream, DevicePtr};
use std::sync::Arc;
use std::thread;
use stub_process::cuda::{is_paused, pause, resume};
use stub_process::{in_child, until};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_cuda::{Access, CudaAllocator, CudaDevice, GraphPool, PinnedAllocator};

const MIB: usize = 1 << 20;

/// One value of each kind that releases something when it is dropped.
fn everything(allocator: &CudaAllocator, [a, b]: &[Arc<CudaStream>; 2]) -> Vec<Box<dyn FnOnce()>> {
    let device = allocator.device();
    let private = allocator.create_pool(PoolConfig::default()).expect("a pool");
    let buffer = allocator.with_pool(&private).alloc_zeroed::<u8>(a, MIB).expect("memory");
    let used = allocator.alloc_zeroed::<u8>(a, MIB).expect("memory");
    drop(used.device_ptr(b));
    let pinned = PinnedAllocator::pinned(device, Config::default()).expect("an allocator");
    let host = pinned.alloc_host_zeroed::<u8>(MIB).expect("host memory");
    let graph_pool = GraphPool::new(allocator, PoolConfig::default()).expect("a pool");
    let graph = graphs::capture(allocator, &graph_pool, &(Arc::clone(a), Arc::clone(b)));
    let dma_buf = allocator.dma_buf(used.device_ptr(a).0, MIB as u64);
    let capture = graph_pool.begin(a).expect("a capture");
    vec![
        Box::new(move || drop(capture)),
        Box::new(move || drop((graph, graph_pool))),
        Box::new(move || drop((buffer, private))),
        Box::new(move || drop(used)),
        Box::new(move || drop((host, pinned))),
        Box::new(move || drop(dma_buf)),
    ]
}

// Regression test: a child's drops marked exports as ended, made driver calls, and blocked on locks.
stub_test!(the_drops_of_a_child_return_and_change_nothing_of_the_parent, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("an allocator");
    let streams = [(); 2].map(|()| device.context().new_stream().expect("a stream"));
    let shared = allocator.create_pool(PoolConfig::default()).expect("a pool");
    let exporter = allocator.with_pool(&shared);
    let exported = exporter.alloc_zeroed_named::<u8>(&streams[0], MIB, "weights").expect("memory");
    let export = exporter.export().expect("exported");
    let import = attach(&export, &device, Access::Read).expect("attached");
    let mut drops = everything(&allocator, &streams);

    let exports = exporter.exports().len();

    // Another thread holds the locks of the default pool's heap, which the child never sees released.
    pause("cuMemCreate", 1);
    let (growing, stream) = (allocator.clone(), Arc::clone(&streams[1]));
    let grows = thread::spawn(move || {
        // SAFETY: never read.
        let grown = unsafe { growing.alloc::<u8>(&stream, 512 * MIB) };
        grown.map(drop).expect("memory");
    });
    until(is_paused);
    let code = in_child(|| {
        let before = CudaDevice::driver_calls();
        drops.drain(..).for_each(|release| release());
        // SAFETY: the child exits without using the originals.
        let copies = unsafe { (std::ptr::read(&import), std::ptr::read(&export), std::ptr::read(&exported)) };
        drop(copies);
        // SAFETY: as above.
        let copies = unsafe { (std::ptr::read(&exporter), std::ptr::read(&shared), std::ptr::read(&allocator)) };
        drop(copies);
        assert_eq!(CudaDevice::driver_calls(), before, "a child makes no driver call");
    });
    resume();
    grows.join().expect("no panic");
    assert_eq!(code, Some(0), "the child's drops return");
    export.check().expect("the parent still exports it");
    import.check().expect("the parent still imports it");
    assert_eq!((export.report().peers.len(), exporter.exports().len()), (1, exports));
    drops.drain(..).for_each(|release| release());
    let again = allocator.alloc_zeroed::<u8>(&streams[0], MIB).expect("the parent's allocator works");
    drop(again);
    drop((import, export, exported));
});
