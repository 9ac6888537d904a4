//! Sleep and wake on the stub, whose device memory is real: kept contents are restored even if one of the calls fails.

mod images;

use crate::process::{calls, device, fail, heal, live, stub_test};
use cudarc::driver::CudaStream;
use cudarc::driver::result::{memcpy_dtoh_async, memset_d8_async};
use std::sync::Arc;
use symmalloc_core::PoolId;
use symmalloc_core::backend::{Backend, Part, Reason};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::{Phase, SleepCause};
use symmalloc_core::units::MIB;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError, CudaMemory, DeviceBuffer, GraphPool, Pool};

fn policy(text: &str) -> PoolConfig {
    text.parse().expect("valid")
}

/// A pool with buffers of many sizes, each filled with a different pattern.
pub(crate) struct Job {
    pub(crate) allocator: CudaAllocator,
    pool: Pool<CudaBackend>,
    stream: Arc<CudaStream>,
    pub(crate) buffers: Vec<(DeviceBuffer<u8>, Vec<u8>)>,
}

impl Job {
    /// Creates buffers that need more than one chunk of an image, some of which end in the middle of a chunk.
    fn new(backend: CudaBackend, text: &str) -> Self {
        Job::of(backend, text, &[100, 3 << 20, 20 << 20, 5000, 41 << 20, 9 << 20])
    }

    pub(crate) fn of(backend: CudaBackend, text: &str, lens: &[usize]) -> Self {
        let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
        let pool = allocator.create_pool(policy(text)).expect("made");
        let stream = allocator.device().context().new_stream().expect("a stream");
        let mut job = Job { allocator, pool, stream, buffers: Vec::new() };
        lens.iter().for_each(|len| job.add(*len));
        job.buffers.remove(1);
        job
    }

    pub(crate) fn add(&mut self, len: usize) {
        let inside = self.allocator.with_pool(&self.pool);
        let mut buffer = inside.alloc_zeroed::<u8>(&self.stream, len).expect("memory");
        let salt = self.buffers.len() as u8 * 31;
        let pattern: Vec<u8> = (0..len).map(|at| (at / 4096) as u8 ^ (at % 251) as u8 ^ salt).collect();
        self.stream.memcpy_htod(&pattern, &mut buffer).expect("copied");
        self.buffers.push((buffer, pattern));
    }

    pub(crate) fn id(&self) -> PoolId {
        self.pool.id()
    }

    fn phase(&self) -> Phase {
        self.allocator.phase(self.id()).expect("known")
    }

    #[track_caller]
    fn holds_what_it_held(&self) {
        for (buffer, pattern) in &self.buffers {
            let held = self.stream.clone_dtoh(buffer).expect("copied");
            assert!(held == *pattern, "{} bytes at {}", pattern.len(), buffer.placement());
        }
        self.allocator.core().check().expect("consistent");
    }

    pub(crate) fn end(self) {
        let Job { allocator, pool, stream, buffers } = self;
        drop((buffers, pool));
        allocator.trim_all().expect("trimmed");
        drop((allocator, stream));
        let left = live();
        assert_eq!((left.device_bytes, left.ranges, left.mappings, left.host_bytes), (0, 0, 0, 0));
    }
}

pub(crate) fn backend() -> CudaBackend {
    CudaBackend::builder(&device()).build().expect("the stub supports it")
}

pub(crate) const POLICIES: [&str; 4] = [
    "segments:expandable",
    "segments:fixed",
    "segments:reserved,segment_mb:128",
    "segments:expandable,stitching:true,stitching_granule_mb:2,stitching_least_mb:4",
];

stub_test!(kept_contents_are_restored_from_the_host_and_their_memory_is_free_during_sleep, {
    for text in POLICIES {
        let job = Job::new(backend(), text);
        let (before, locked) = (live().device_bytes, calls("cuMemHostAlloc"));
        assert!(before > 64 << 20, "{text}");
        for round in 0..3 {
            let slept = job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
            assert_eq!((live().device_bytes, live().mappings, slept.released_bytes), (0, 0, before), "{text}");
            // About 70 MiB, in chunks of 32 MiB that are reused.
            assert_eq!((live().host_bytes, job.allocator.host_bytes()), (96 << 20, 96 << 20), "round {round}");
            let woken = job.allocator.wake(job.id()).expect("woken");
            assert_eq!((woken.remapped_bytes, woken.loaded_bytes), (before, slept.kept_bytes));
            job.holds_what_it_held();
        }
        assert_eq!(calls("cuMemHostAlloc") - locked, 3, "pages are locked only once");
        assert_eq!(job.allocator.release_host_memory().expect("released"), 96 << 20);
        assert_eq!(live().host_bytes, 0);
        job.allocator.reserve_host_memory(33 << 20).expect("memory");
        assert_eq!(live().host_bytes, 64 << 20);
        job.end();
    }
});

stub_test!(dropped_and_zeroed_contents_take_no_host_memory, {
    let job = Job::new(backend(), "segments:expandable");
    job.allocator.sleep(job.id(), Contents::Zero).expect("slept");
    assert_eq!((live().device_bytes, live().host_bytes), (0, 0));
    job.allocator.wake(job.id()).expect("woken");
    for (buffer, _) in &job.buffers {
        assert!(job.stream.clone_dtoh(buffer).expect("copied").iter().all(|byte| *byte == 0));
    }
    job.allocator.sleep(job.id(), Contents::Drop).expect("slept");
    job.allocator.wake(job.id()).expect("woken");
    assert_eq!(calls("cuMemHostAlloc"), 0);
    job.end();
});

#[track_caller]
fn cause_of(error: CudaError) -> SleepCause {
    let CudaError::Sleep(error) = error else { panic!("{error}") };
    error.cause
}

stub_test!(a_wake_on_a_full_device_is_a_typed_error_and_can_be_repeated, {
    let job = Job::new(backend(), "segments:expandable");
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    fail("cuMemCreate", 0, 2);
    for _ in 0..3 {
        let error = job.allocator.wake(job.id()).expect_err("the device is full");
        let SleepCause::Memory { cause: OutOfMemoryCause::Driver(error), .. } = cause_of(error) else {
            panic!("the driver call must fail")
        };
        assert_eq!((error.call, error.reason), ("cuMemCreate", Reason::OutOfMemory));
        assert_eq!((job.phase(), live().device_bytes), (Phase::Asleep, 0));
        let inside = job.allocator.with_pool(&job.pool);
        let refused = inside.alloc_zeroed::<u8>(&job.stream, 1).expect_err("the pool is asleep");
        assert!(matches!(refused, CudaError::Allocate(AllocateError::Sleeps(_))), "{refused}");
    }
    heal();
    job.allocator.wake(job.id()).expect("woken");
    job.holds_what_it_held();
    job.end();
});

stub_test!(contents_are_copied_while_memory_is_mapped_and_before_it_is_released, {
    // There are four chunks, and creating the last one fails.
    let backend = || CudaBackend::builder(&device()).chunk_bytes(20 << 20).build().expect("the stub supports it");
    let mut job = Job::new(backend(), "segments:expandable");
    let streams = live().streams;
    let made = || ["cuMemcpyHtoDAsync_v2", "cuStreamSynchronize", "cuMemCreate"].map(calls);
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    let before = made();
    for _ in 0..2 {
        fail("cuMemCreate", 4, 2);
        job.allocator.wake(job.id()).expect_err("the device is full");
        assert_eq!((job.phase(), live().device_bytes), (Phase::Asleep, 0));
    }
    heal();
    let [copies, waits, chunks] = [0, 1, 2].map(|at| made()[at] - before[at]);
    assert_eq!((chunks, copies), (2 * 4, 2 * 2));
    assert!(waits >= 2, "the copies are waited for");
    let [copied, ..] = made();
    let woken = job.allocator.wake(job.id()).expect("woken");
    assert!(woken.loaded_bytes > 64 << 20);
    assert_eq!(made()[0] - copied, 4, "each piece is copied once: two parts, one of them in three chunks of the image");
    job.holds_what_it_held();
    // A pool that is destroyed while asleep also leaves nothing behind.
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    fail("cuMemCreate", 4, 2);
    job.allocator.wake(job.id()).expect_err("the device is full");
    heal();
    job.buffers.clear();
    drop(job.pool);
    job.allocator.trim_all().expect("trimmed");
    assert_eq!((live().device_bytes, live().ranges, live().streams), (0, 0, streams));
    drop((job.allocator, job.stream));
    // An allocator that is dropped while its pool is asleep leaves nothing behind, either.
    let mut job = Job::new(backend(), "segments:expandable");
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    fail("cuMemCreate", 1, 2);
    job.allocator.wake(job.id()).expect_err("the device is full");
    heal();
    let streams = live().streams;
    job.buffers.clear();
    let Job { allocator, pool, stream, .. } = job;
    // SAFETY: null resets the current context.
    unsafe { cudarc::driver::result::ctx::set_current(std::ptr::null_mut()) }.expect("set");
    drop((pool, allocator));
    assert_eq!((live().device_bytes, live().host_bytes, live().streams), (0, 0, streams - 1));
    drop(stream);
});

stub_test!(pools_of_one_allocator_wake_concurrently, {
    let allocator = CudaAllocator::with_backend(backend(), Config::default()).expect("made");
    let others = [1_u8, 2, 3].map(|number| {
        let allocator = allocator.clone();
        std::thread::spawn(move || {
            let stream = allocator.device().context().new_stream().expect("a stream");
            let pool = allocator.create_pool(policy("segments:expandable")).expect("made");
            let inside = allocator.with_pool(&pool);
            let filled = |len: usize| {
                let mut buffer = inside.alloc_zeroed::<u8>(&stream, len).expect("memory");
                stream.memcpy_htod(&vec![number; len], &mut buffer).expect("copied");
                buffer
            };
            let mut buffers: Vec<_> = [33 << 20, 5 << 20, 20 << 20, 3 << 20].map(filled).into();
            for round in 0..6 {
                allocator.sleep(pool.id(), Contents::Keep).expect("slept");
                // Buffers that are freed during sleep need no bytes.
                buffers.truncate(4 - round / 2);
                allocator.wake(pool.id()).expect("woken");
                for buffer in &buffers {
                    let held = stream.clone_dtoh(buffer).expect("copied");
                    assert!(held.iter().all(|byte| *byte == number), "pool {number}, round {round}");
                }
            }
        })
    });
    for other in others {
        other.join().expect("the thread found all bytes");
    }
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 0);
});

stub_test!(contents_unmapped_before_the_load_are_copied_again, {
    let (backend, device) = (backend(), device());
    let stream = device.context().new_stream().expect("a stream");
    let range = backend.reserve(64 * MIB).expect("reserved");
    backend.map(range, 0, 48 * MIB).expect("mapped");
    let len = 48 << 20;
    // SAFETY: the memory is mapped.
    unsafe { memset_d8_async(range.base.0, 7, len, stream.cu_stream()) }.expect("set");
    stream.synchronize().expect("done");
    let parts = [Part { address: range.base, size_bytes: 48 * MIB, image_offset_bytes: 0 }];
    let image = backend.save(PoolId::DEFAULT, &parts).expect("saved");
    backend.unmap(range, 0, 48 * MIB).expect("unmapped");
    backend.expect_load(image, &parts);
    for _ in 0..2 {
        backend.map(range, 0, 48 * MIB).expect("mapped");
        backend.unmap(range, 0, 48 * MIB).expect("unmapped");
    }
    backend.map(range, 0, 48 * MIB).expect("mapped");
    backend.load(image, &parts).expect("loaded");
    let mut bytes = vec![0_u8; len];
    // SAFETY: the memory is mapped, and the bytes stay alive until the wait.
    unsafe { memcpy_dtoh_async(&mut bytes, range.base.0, stream.cu_stream()) }.expect("copied");
    stream.synchronize().expect("done");
    assert!(bytes.iter().all(|byte| *byte == 7));
    backend.discard(image);
    backend.unmap(range, 0, 48 * MIB).expect("unmapped");
    backend.release(range).expect("released");
});

stub_test!(a_graph_is_refused_during_sleep_and_replays_unchanged_after_wake, {
    let allocator = CudaAllocator::with_backend(backend(), Config::default()).expect("made");
    let weights = allocator.create_pool(policy("segments:fixed,tag:weights")).expect("made");
    let stream = allocator.device().context().new_stream().expect("a stream");
    let inside = allocator.with_pool(&weights);
    let mut source = inside.alloc_zeroed::<u8>(&stream, 3 << 20).expect("memory");
    stream.memcpy_htod(&vec![7; 3 << 20], &mut source).expect("copied");
    let graphs = GraphPool::new(&allocator, policy("segments:reserved,segment_mb:32,tag:activations")).expect("made");
    let capture = graphs.begin(&stream).expect("begun");
    let temporary = {
        let mut temporary = allocator.alloc_zeroed::<u8>(&stream, 3 << 20).expect("memory");
        stream.memcpy_dtod(&source, &mut temporary).expect("captured");
        temporary
    };
    let mut target = allocator.alloc_zeroed::<u8>(&stream, 3 << 20).expect("memory");
    stream.memcpy_dtod(&temporary, &mut target).expect("captured");
    drop(temporary);
    let graph = capture.end().expect("the capture is valid").using([weights.id()]);
    graph.launch(&stream).expect("launched");
    stream.synchronize().expect("done");

    for contents in [Contents::Keep, Contents::Drop] {
        let slept = graphs.sleep(contents).expect("only its own graphs observe it");
        assert_eq!(
            (slept.released_bytes, slept.kept_bytes),
            (32 << 20, if contents == Contents::Keep { 3 << 20 } else { 0 })
        );
        let pool = graphs.id();
        assert_eq!(graph.launch(&stream).expect_err("asleep"), CudaError::GraphSleeps { pool });
        allocator.sleep_tagged("weights", Contents::Keep).expect("slept");
        assert_eq!(live().device_bytes, 0);
        allocator.wake_tagged("activations").expect("woken");
        let pool = weights.id();
        assert_eq!(graph.launch(&stream).expect_err("a used pool is asleep"), CudaError::GraphSleeps { pool });
        allocator.wake_tagged("weights").expect("woken");
        stream.memset_zeros(&mut target).expect("set");
        graph.launch(&stream).expect("launched");
        assert!(stream.clone_dtoh(&target).expect("copied").iter().all(|byte| *byte == 7));
    }
    // Another observer may have windows.
    let (observer, _) = allocator.core().observe(graphs.id()).expect("known");
    let refused = graphs.sleep(Contents::Drop).expect_err("the pool is observed");
    assert!(matches!(cause_of(refused), SleepCause::Observed { observers: 1 }));
    allocator.core().forget(observer).expect("known");
    // Sleeping is not possible during a capture.
    let capture = graphs.begin(&stream).expect("begun");
    let error = allocator.sleep(weights.id(), Contents::Drop).expect_err("its stream is being captured");
    assert!(matches!(cause_of(error), SleepCause::Synchronize { .. }));
    drop(capture);
    allocator.sleep(weights.id(), Contents::Drop).expect("slept");
    allocator.wake(weights.id()).expect("woken");
});

stub_test!(sleep_releases_prefetched_memory_and_is_refused_without_virtual_memory, {
    let ahead = CudaBackend::builder(&device()).prefetch_bytes(64 * MIB).build().expect("made");
    let job = Job::new(ahead, "segments:expandable,growth_mb:16");
    job.allocator.sleep(job.id(), Contents::Keep).expect("slept");
    assert_eq!((live().device_bytes, job.allocator.core().backend().spare_bytes()), (0, 0));
    job.allocator.wake(job.id()).expect("woken");
    job.holds_what_it_held();
    job.end();

    let plain = CudaBackend::builder(&device()).plain().build().expect("made");
    let allocator = CudaAllocator::with_backend(plain, Config::default()).expect("made");
    assert_eq!(allocator.sleep(PoolId::DEFAULT, Contents::Drop).expect_err("no virtual memory"), CudaError::NoSleep);
});
