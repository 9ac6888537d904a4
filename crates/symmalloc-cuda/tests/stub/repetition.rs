//! Repetition: after many sleeps, captures, streams and pools, current values, peaks and driver objects are those of the first round.

use crate::graphs;
use crate::process::{descriptors, device, live, steady, stub_test};
use crate::sleep::{Job, POLICIES, backend};
use cudarc::driver::DevicePtr;
use std::sync::Arc;
use stub_process::cuda::Live;
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::op::Contents;
use symmalloc_core::report::MemoryStats;
use symmalloc_cuda::{CudaAllocator, DeviceBuffer, GraphPool, ImageStorage, LentStream};
use symmalloc_harness::levels::levels;

const ROUNDS: usize = 5;
const MIB: usize = 1 << 20;

/// Everything that must be equal after every round.
#[derive(Debug, PartialEq)]
struct Held {
    live: Live,
    descriptors: usize,
    host_bytes: u64,
    stats: MemoryStats,
    addresses: Vec<u64>,
}

fn addresses<'b>(buffers: impl IntoIterator<Item = &'b DeviceBuffer<u8>>) -> Vec<u64> {
    buffers.into_iter().map(|buffer| buffer.device_ptr(buffer.stream()).0).collect()
}

fn held<'b>(allocator: &CudaAllocator, buffers: impl IntoIterator<Item = &'b DeviceBuffer<u8>>) -> Held {
    allocator.core().check().expect("consistent");
    assert_eq!(allocator.drop_errors().count, 0);
    let addresses = addresses(buffers);
    let (stats, host_bytes) = (levels(allocator.stats()), allocator.host_bytes());
    Held { live: live(), descriptors: descriptors(), host_bytes, stats, addresses }
}

fn allocator(streams: StreamPolicy) -> CudaAllocator {
    let pool = PoolConfig::builder().streams(streams).build().expect("valid");
    let config = Config::builder().default_pool(pool).build().expect("valid");
    CudaAllocator::new(&device(), config).expect("the stub supports it")
}

fn sleep_and_wake(text: &str, place: ImageStorage) {
    let mut job = Job::of(backend(), text, &[100, MIB, 3 * MIB, 5000]);
    job.allocator.save_in(job.id(), place);
    steady(ROUNDS, |_| {
        let slept = [Contents::Keep, Contents::Zero, Contents::Drop, Contents::Keep].map(|contents| {
            // Memory that is freed during a sleep is not loaded.
            job.add(5000);
            let slept = job.allocator.sleep(job.id(), contents).expect("slept");
            job.buffers.pop();
            (slept, job.allocator.wake(job.id()).expect("woken"))
        });
        let awake = held(&job.allocator, job.buffers.iter().map(|(buffer, _)| buffer));
        job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
        let asleep = held(&job.allocator, []);
        job.allocator.wake(job.id()).expect("woken");
        (slept, awake, asleep)
    });
    job.end();
}

stub_test!(sleeps_and_wakes_hold_what_the_first_one_held, {
    POLICIES.into_iter().for_each(|text| sleep_and_wake(text, ImageStorage::Pinned));
    let folder = tempfile::tempdir().expect("a temporary folder");
    sleep_and_wake(POLICIES[0], ImageStorage::Pageable);
    sleep_and_wake(POLICIES[0], ImageStorage::Folder(folder.path().into()));
});

stub_test!(captures_hold_what_the_first_one_held, {
    let allocator = allocator(StreamPolicy::Separate);
    let streams = graphs::streams(&allocator);
    let kept = GraphPool::new(&allocator, graphs::reserved()).expect("made");
    steady(ROUNDS, |_| {
        // Peaks of destroyed pools add up.
        allocator.core().reset_peak_stats();
        let fresh = GraphPool::new(&allocator, PoolConfig::default()).expect("made");
        let captured = [&kept, &fresh].map(|pool| {
            let (graph, output, places) = graphs::capture(&allocator, pool, &streams);
            graph.launch(&streams.0).expect("launched");
            graph.launch(&streams.1).expect("launched");
            drop(pool.begin(&streams.0).expect("begun"));
            (addresses([&output]), places)
        });
        drop(fresh);
        allocator.trim_all().expect("trimmed");
        (captured, held(&allocator, []))
    });
});

stub_test!(uses_by_all_kinds_of_streams_hold_what_the_first_ones_held, {
    for policy in [StreamPolicy::Separate, StreamPolicy::Shared] {
        let allocator = allocator(policy);
        let context = Arc::clone(allocator.device().context());
        let [own, other, unknown] = [(); 3].map(|()| context.new_stream().expect("a stream"));
        allocator.register_stream(&other).expect("registered");
        let mut id = None;
        steady(ROUNDS, |_| {
            let mut buffers = [1, 2, 3].map(|size| allocator.alloc_zeroed::<u8>(&own, size * MIB).expect("memory"));
            for buffer in &mut buffers {
                for stream in [&other, &unknown, &own, &unknown] {
                    own.memset_zeros(buffer).expect("submitted");
                    let _front = stream.clone_dtoh(&buffer.slice(..8)).expect("copied");
                    drop(buffer.lend_on(stream).expect("lent"));
                }
            }
            let addresses = addresses(&buffers);
            drop(buffers);
            // A stream that its owner destroys.
            let short = context.new_stream().expect("a stream");
            let lent = LentStream::of(short.cu_stream());
            match id {
                // SAFETY: the stream is returned before it is destroyed.
                None => id = Some(unsafe { allocator.lend_stream(lent) }.expect("lent")),
                // SAFETY: as above.
                Some(id) => unsafe { allocator.relend_stream(id, lent) }.expect("lent again"),
            }
            let id = id.expect("just set");
            let block = allocator.core().allocate(PoolId::DEFAULT, id, 2 << 20).expect("memory");
            allocator.core().free(block.handle).expect("freed");
            allocator.return_stream(id).expect("returned");
            drop(short);
            context.synchronize().expect("done");
            (addresses, block.address, held(&allocator, []))
        });
    }
});

stub_test!(pools_that_learn_steps_hold_what_the_first_one_held, {
    let allocator = allocator(StreamPolicy::Separate);
    let stream = allocator.device().context().new_stream().expect("a stream");
    steady(ROUNDS, |_| {
        allocator.core().reset_peak_stats();
        let pool = allocator.create_pool("segments:expandable,plan:learn".parse().expect("valid")).expect("made");
        let inside = allocator.with_pool(&pool);
        let (mut places, mut last) = (Vec::new(), None);
        for _ in 0..4 {
            allocator.core().begin_step(pool.id(), 0).expect("begun");
            let buffers = [3, 1, 2].map(|size| inside.alloc_zeroed::<u8>(&stream, size * MIB).expect("memory"));
            places.push(addresses(&buffers));
            drop(buffers);
            last = Some(allocator.core().end_step(pool.id()).expect("ended"));
        }
        let last = last.expect("four steps");
        assert_eq!((last.planned, last.difference), (3, None), "the last step follows the plan");
        drop((inside, pool));
        allocator.trim_all().expect("trimmed");
        (places, held(&allocator, []))
    });
});
