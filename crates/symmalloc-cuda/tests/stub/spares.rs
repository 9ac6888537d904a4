//! The lanes beside a heap keep nothing alive: whatever of an allocator goes last, takes it along.

use crate::process::{device, live, stub_test};
use cudarc::driver::CudaStream;
use std::sync::{Arc, Barrier};
use std::thread;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_cuda::{CudaAllocator, DeviceBuffer, PinnedAllocator};

fn buffers(allocator: &CudaAllocator, stream: &Arc<CudaStream>, count: usize) -> Vec<DeviceBuffer<u8>> {
    // SAFETY: never read.
    (0..count).map(|at| unsafe { allocator.alloc(stream, 512 + at) }.expect("allocated")).collect()
}

/// Nothing is left of any allocator.
fn assert_gone(what: &str) {
    let left = live();
    let left = (left.device_bytes, left.ranges, left.events, left.streams, left.host_bytes);
    assert_eq!(left, (0, 0, 0, 0, 0), "{what}");
}

stub_test!(whatever_is_dropped_last_takes_the_allocator_along, {
    let device = device();
    for order in 0..60_u64 {
        let streams = if order % 3 == 0 { StreamPolicy::Shared } else { StreamPolicy::Separate };
        let config = PoolConfig::builder().streams(streams).build().expect("valid");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
        let [a, b] = [0, 1].map(|_| device.context().new_stream().expect("a stream"));
        let pool = allocator.create_pool(config).expect("made");
        let inside = allocator.with_pool(&pool);
        let mut things: Vec<Box<dyn Send>> = Vec::new();
        for (name, stream) in [(&allocator, &a), (&allocator, &b), (&inside, &a), (&inside, &b)] {
            // The first round grows the heap, the second leaves lanes beside it, the third takes some of them.
            drop((buffers(name, stream, 3), buffers(name, stream, 5)));
            buffers(name, stream, 4).into_iter().for_each(|buffer| things.push(Box::new(buffer)));
        }
        let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
        drop([0, 1].map(|_| pinned.alloc_host_zeroed::<u8>(100).expect("allocated")));
        things.push(Box::new(pinned.alloc_host_zeroed::<u8>(100).expect("allocated")));
        things.extend([Box::new(allocator.clone()) as Box<dyn Send>, Box::new(allocator), Box::new(pinned)]);
        things.extend([Box::new(inside.clone()) as Box<dyn Send>, Box::new(inside), Box::new(pool)]);
        drop((a, b));
        let mut at = order;
        while !things.is_empty() {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let thing = things.swap_remove((at >> 33) as usize % things.len());
            if at & 1 << 40 == 0 {
                drop(thing);
            } else {
                thread::scope(|scope| drop(scope.spawn(|| drop(thing))));
            }
        }
        assert_gone(&format!("order {order}"));
    }
});

stub_test!(buffers_that_are_dropped_while_the_last_name_goes_leave_nothing_behind, {
    let device = device();
    for round in 0..200 {
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
        let stream = device.context().new_stream().expect("a stream");
        drop(buffers(&allocator, &stream, 10));
        let shares = [0, 1].map(|_| buffers(&allocator, &stream, 10));
        drop(stream);
        let start = Barrier::new(3);
        thread::scope(|scope| {
            for share in shares {
                scope.spawn(|| {
                    start.wait();
                    drop(share);
                });
            }
            start.wait();
            drop(allocator);
        });
        assert_gone(&format!("round {round}"));
    }
});

stub_test!(more_buffers_than_lanes_are_kept_for_come_and_go, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
    let stream = device.context().new_stream().expect("a stream");
    for _ in 0..2 {
        let all = buffers(&allocator, &stream, 10_000);
        assert_eq!(allocator.stats().usage.all.allocations.current, 10_000);
        drop(all);
        assert_eq!(allocator.stats().usage.all.allocations.current, 0);
    }
    let last = buffers(&allocator, &stream, 1);
    drop((allocator, stream));
    assert!(live().device_bytes > 0, "the buffer keeps it");
    drop(last);
    assert_gone("all dropped");
});
