//! Deterministic interleavings of two threads: one thread stops after each of its driver calls in turn, and another one runs a whole
//! operation meanwhile, or waits for a lock.

use crate::process::{device, live, stub_test};
use cudarc::driver::CudaStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use stub_process::cuda::{calls_by_name, is_paused, pause, resume};
use stub_process::until;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_core::{Allocation, Handle, PoolId, StreamId};
use symmalloc_cuda::{
    CudaAllocator, CudaBackend, GraphPool, ImageStorage, LentStream, PinnedAllocator, PinnedBackend, Pool,
};

const MIB: u64 = 1 << 20;
/// Time for the second operation, before it counts as waiting for a lock.
const GRACE: Duration = Duration::from_millis(4);
const VALUE: u8 = 7;
/// The stream of pinned memory.
const HOST: StreamId = StreamId(0);

/// An allocator that both threads use.
struct Shared {
    allocator: CudaAllocator,
    streams: [Arc<CudaStream>; 3],
    /// A pool with contents, which one operation puts to sleep.
    pool: Pool<CudaBackend>,
    kept: Allocation,
    lent: StreamId,
    /// Allocators of whole driver allocations, each with a pool whose memory one operation keeps.
    plain: (CudaAllocator, Pool<CudaBackend>),
    pinned: (PinnedAllocator, Pool<PinnedBackend>),
    kept_plain: Mutex<Vec<Handle>>,
    kept_pinned: Mutex<Vec<Handle>>,
}

/// An operation. A typed error is possible if the other operation is in its way.
type Operation = fn(&Shared) -> Result<(), Box<dyn std::error::Error>>;

const OPERATIONS: &[(&str, Operation)] = &[
    // First, because the operations that release memory wait for each other.
    ("keep plain memory", |it| {
        let made = it.plain.0.with_pool(&it.plain.1).allocate(&it.streams[1], 9 * MIB)?;
        it.kept_plain.lock().expect("no panic").push(made.handle);
        Ok(())
    }),
    ("keep pinned memory", |it| {
        let made = it.pinned.0.core().allocate(it.pinned.1.id(), HOST, 9 * MIB)?;
        it.kept_pinned.lock().expect("no panic").push(made.handle);
        Ok(())
    }),
    ("release plain memory", |it| {
        let made = it.plain.0.allocate(&it.streams[0], 9 * MIB)?;
        it.plain.0.free(made.handle)?;
        it.plain.0.trim_all()?;
        Ok(())
    }),
    ("release pinned memory of a buffer", |it| {
        let made = it.pinned.0.core().allocate(PoolId::DEFAULT, HOST, 9 * MIB)?;
        it.pinned.0.free(made.handle)?;
        it.pinned.0.trim_all()?;
        Ok(())
    }),
    ("grow", |it| {
        let made = it.allocator.allocate(&it.streams[0], 9 * MIB)?;
        Ok(it.allocator.free(made.handle)?)
    }),
    ("use on two streams", |it| {
        let made = it.allocator.allocate(&it.streams[0], MIB)?;
        it.allocator.core().record_use(made.handle, it.allocator.register_stream(&it.streams[1])?)?;
        it.allocator.free(made.handle)?;
        let again = it.allocator.allocate(&it.streams[0], MIB)?;
        Ok(it.allocator.free(again.handle)?)
    }),
    ("trim", |it| {
        it.allocator.trim_all()?;
        Ok(())
    }),
    ("sleep and wake", |it| {
        it.allocator.sleep(it.pool.id(), Contents::Keep)?;
        it.allocator.wake(it.pool.id())?;
        Ok(())
    }),
    ("allocate in the pool that sleeps", |it| {
        let made = it.allocator.with_pool(&it.pool).allocate(&it.streams[1], 3 * MIB)?;
        Ok(it.allocator.free(made.handle)?)
    }),
    ("create and drop a pool", |it| {
        let pool = it.allocator.create_pool(PoolConfig::default())?;
        let made = it.allocator.with_pool(&pool).allocate(&it.streams[0], MIB)?;
        it.allocator.free(made.handle)?;
        drop(pool);
        it.allocator.trim_all()?;
        Ok(())
    }),
    ("release pinned memory", |it| {
        it.allocator.reserve_host_memory(40 << 20)?;
        it.allocator.release_host_memory()?;
        Ok(())
    }),
    ("lend and return a stream", |it| {
        let stream = LentStream::of(it.streams[2].cu_stream());
        it.allocator.return_stream(it.lent)?;
        // SAFETY: alive until the end of the test.
        Ok(unsafe { it.allocator.relend_stream(it.lent, stream) }?)
    }),
    ("capture", |it| {
        let graphs = GraphPool::new(&it.allocator, "segments:reserved,segment_mb:8".parse().expect("valid"))?;
        let capture = graphs.begin(&it.streams[0])?;
        let made = it.allocator.allocate(&it.streams[0], MIB)?;
        it.allocator.free(made.handle)?;
        drop(capture.end()?);
        Ok(())
    }),
    ("change the place of contents", |it| {
        it.allocator.save_in(it.pool.id(), ImageStorage::Pageable);
        it.allocator.save_in(it.pool.id(), ImageStorage::Pinned);
        Ok(())
    }),
];

impl Shared {
    fn new() -> Self {
        let pool = PoolConfig::builder().streams(StreamPolicy::Separate).build().expect("valid");
        let config = Config::builder().default_pool(pool).build().expect("valid");
        let allocator = CudaAllocator::new(&device(), config).expect("made");
        let context = Arc::clone(allocator.device().context());
        let streams = [(); 3].map(|()| context.new_stream().expect("a stream"));
        for stream in &streams[..2] {
            allocator.register_stream(stream).expect("registered");
        }
        let pool = allocator.create_pool("segments:expandable".parse().expect("valid")).expect("made");
        let kept = allocator.with_pool(&pool).allocate(&streams[0], MIB).expect("memory");
        // SAFETY: the stub's device memory is memory of this process.
        unsafe { std::ptr::write_bytes(kept.address.0 as *mut u8, VALUE, MIB as usize) };
        // SAFETY: alive until the end of the test.
        let lent = unsafe { allocator.lend_stream(LentStream::of(streams[2].cu_stream())) }.expect("lent");
        let block = allocator.core().allocate(PoolId::DEFAULT, lent, MIB).expect("memory");
        allocator.core().free(block.handle).expect("freed");
        let fixed = || Config::builder().default_pool("segments:fixed".parse().expect("valid")).build().expect("valid");
        let plain = CudaBackend::builder(allocator.device()).plain().build().expect("made");
        let plain = CudaAllocator::with_backend(plain, fixed()).expect("made");
        let pinned = PinnedAllocator::pinned(allocator.device(), fixed()).expect("made");
        let of_plain = plain.create_pool("segments:fixed".parse().expect("valid")).expect("made");
        let of_pinned = pinned.create_pool("segments:fixed".parse().expect("valid")).expect("made");
        let (plain, pinned) = ((plain, of_plain), (pinned, of_pinned));
        let (kept_plain, kept_pinned) = (Mutex::default(), Mutex::default());
        Shared { allocator, streams, pool, kept, lent, plain, pinned, kept_plain, kept_pinned }
    }

    /// Checks that nothing is lost, and ends the allocator.
    fn end(self, context: &str) {
        let check = || self.allocator.core().check().unwrap_or_else(|violation| panic!("{context}: {violation}"));
        check();
        if self.allocator.phase(self.pool.id()).expect("known") != Phase::Awake {
            self.allocator.wake(self.pool.id()).unwrap_or_else(|error| panic!("{context}: {error}"));
        }
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(self.kept.address.0 as *const u8, MIB as usize) };
        assert!(bytes.iter().all(|byte| *byte == VALUE), "{context}: contents of the pool");
        // Each operation works again.
        for (what, operation) in OPERATIONS {
            operation(&self).unwrap_or_else(|error| panic!("{context}, then {what}: {error}"));
        }
        check();
        self.allocator.free(self.kept.handle).expect("live");
        let Shared { allocator, streams, pool, kept_plain, kept_pinned, .. } = self;
        let ((plain, plain_pool), (pinned, pinned_pool)) = (self.plain, self.pinned);
        for handle in kept_plain.into_inner().expect("no panic") {
            plain.free(handle).expect("live");
        }
        for handle in kept_pinned.into_inner().expect("no panic") {
            pinned.free(handle).expect("live");
        }
        plain.core().check().unwrap_or_else(|violation| panic!("{context}: {violation}"));
        pinned.core().check().unwrap_or_else(|violation| panic!("{context}: {violation}"));
        drop((plain_pool, pinned_pool, pool));
        for trimmed in [allocator.trim_all(), plain.trim_all(), pinned.trim_all()] {
            trimmed.unwrap_or_else(|error| panic!("{context}: {error}"));
        }
        assert_eq!(allocator.stats().usage.all.allocations.current, 0, "{context}");
        drop((allocator, plain, pinned, streams));
        let left = live();
        let left = (left.device_bytes, left.ranges, left.mappings, left.events, left.streams, left.host_bytes);
        assert_eq!(left, (0, 0, 0, 0, 0, 0), "{context}");
    }
}

/// Returns the driver calls of an operation that is repeated.
fn calls_of(operation: Operation) -> Vec<(String, u64)> {
    let shared = Shared::new();
    operation(&shared).expect("nothing is in its way");
    let before = calls_by_name();
    operation(&shared).expect("nothing is in its way");
    let after = calls_by_name();
    shared.end("nothing stops");
    let made = after.into_iter().map(|(name, count)| {
        let count = count - before.get(&name).copied().unwrap_or(0);
        (name, count)
    });
    made.filter(|(_, count)| *count > 0).collect()
}

/// Calls that only look up or set the thread's state.
fn is_local(name: &str) -> bool {
    name.starts_with("cuCtx") && name != "cuCtxSynchronize" || name == "cuThreadExchangeStreamCaptureMode"
}

stub_test!(an_operation_that_runs_between_two_driver_calls_of_another_one_breaks_nothing, {
    for (first, one) in OPERATIONS {
        for (name, count) in calls_of(*one).into_iter().filter(|(name, _)| !is_local(name)) {
            for nth in [1, count] {
                let shared = Shared::new();
                one(&shared).expect("nothing is in its way");
                let context = format!("{first} stops after call {nth} of {name}");
                pause(&name, nth);
                thread::scope(|scope| {
                    let stopped = scope.spawn(|| one(&shared).map_err(|error| error.to_string()));
                    until(|| is_paused() || stopped.is_finished());
                    // All other operations, one after the other; each may wait for the first one.
                    let others = scope.spawn(|| {
                        for (_, other) in OPERATIONS {
                            let _refused = other(&shared).map_err(|error| error.to_string());
                        }
                    });
                    let begun = Instant::now();
                    while !others.is_finished() && begun.elapsed() < GRACE {
                        thread::sleep(GRACE / 16);
                    }
                    resume();
                    let _refused = stopped.join().expect("no panic");
                    others.join().expect("no panic");
                });
                shared.end(&context);
            }
        }
    }
});
