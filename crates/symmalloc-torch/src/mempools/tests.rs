//! Long runs of mempools on the stub of libcuda, compared with a model after every step: a pool stays as long as it has uses,
//! allocations or observers, and its memory returns with the next release.

use super::{ForeignPool, Mempools, PoolTarget};
use crate::error::Error;
use std::collections::BTreeMap;
use std::sync::Arc;
use stub_process::cuda::{calls, fail, heal, live};
use stub_process::stub_test;
use symmalloc_core::{Config, Handle, ObserverId, PoolId, SharedAllocator, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, MemorySource};

const STEPS: usize = 1000;
const POOLS: u64 = 4;

/// No pool of these tests has memory of the program.
enum Never {}

impl ForeignPool for Never {
    const POOL: PoolId = PoolId::DEFAULT;

    fn over(ordinal: usize, _: Arc<dyn MemorySource>, _: &str) -> Result<Self, Error> {
        Err(Error::UnknownTag { tag: "a source that fails".to_owned(), device: ordinal })
    }

    fn core(&self) -> &SharedAllocator<CudaBackend> {
        match *self {}
    }
}

/// A source of memory, over which no allocator can be created.
#[derive(Debug)]
struct Failing;

impl MemorySource for Failing {
    fn allocate(&self, _: u64) -> Option<u64> {
        None
    }

    fn free(&self, _: u64) {}
}

/// A mempool of the model.
struct Known {
    pool: PoolId,
    uses: u32,
    blocks: Vec<Handle>,
    /// What a registration of the pool is for the core.
    observer: Option<ObserverId>,
}

impl Known {
    fn is_needed(&self) -> bool {
        self.uses > 0 || !self.blocks.is_empty() || self.observer.is_some()
    }
}

/// A generator of pseudorandom numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// The real pools and their model.
struct Run {
    allocator: CudaAllocator,
    pools: Mempools<Never>,
    known: BTreeMap<u64, Known>,
    stream: StreamId,
}

impl Run {
    fn core(&self) -> &SharedAllocator<CudaBackend> {
        self.allocator.core()
    }

    /// Uses a pool and allocates in it.
    fn begin(&mut self, id: u64, size_bytes: u64) {
        let target = self.pools.begin(self.core(), (id, 0)).unwrap_or_else(|error| panic!("{error}"));
        let PoolTarget::Own(pool) = target else { panic!("no pool has a source") };
        let made = self.core().allocate(pool, self.stream, size_bytes).expect("memory");
        let known = self.known.entry(id);
        let known = known.or_insert_with(|| Known { pool, uses: 0, blocks: Vec::new(), observer: None });
        assert_eq!(known.pool, pool, "one id is one pool, as long as something needs it");
        known.uses += 1;
        known.blocks.push(made.handle);
    }

    fn free(&mut self, id: u64, count: usize) {
        let Some(known) = self.known.get_mut(&id) else { return };
        let kept = known.blocks.len().saturating_sub(count);
        known.blocks.drain(kept..).for_each(|handle| self.allocator.free(handle).expect("live"));
    }

    fn release(&mut self, id: u64) {
        let expected = self.known.get(&id).is_some_and(|known| known.uses > 0);
        assert_eq!(self.pools.release((id, 0)), expected, "pool {id}");
        if let Some(known) = self.known.get_mut(&id).filter(|_| expected) {
            known.uses -= 1;
        }
    }

    fn observe(&mut self, id: u64) {
        if let Some(known) = self.known.get_mut(&id).filter(|known| known.observer.is_none()) {
            known.observer = Some(self.allocator.core().observe(known.pool).expect("the pool exists").0);
        }
    }

    fn forget(&mut self, id: u64) {
        if let Some(observer) = self.known.get_mut(&id).and_then(|known| known.observer.take()) {
            self.core().forget(observer).expect("no faults");
        }
    }

    /// Begins a pool that cannot be created. It is not listed afterwards.
    fn begin_in_vain(&self) {
        let id = (POOLS + 1, 0);
        self.pools.retain(id, Some(Arc::new(Failing)));
        assert!(self.pools.release(id));
        assert!(self.pools.begin(self.core(), id).is_err());
    }

    /// Releases nothing during a capture, and does not wait for the device.
    fn give_back_while_capturing(&self) {
        let (reserved, waits) = (self.core().stats().reserved_bytes.current, calls("cuCtxSynchronize"));
        let given = self.pools.give_back(self.core(), None, || Ok(true));
        assert!(given.failure.is_none() && given.released_bytes == 0, "{given:?}");
        assert_eq!((self.core().stats().reserved_bytes.current, calls("cuCtxSynchronize")), (reserved, waits));
    }

    /// Releases the memory of one pool, or of all.
    fn give_back(&mut self, only: Option<u64>) {
        let reserved = self.core().stats().reserved_bytes.current;
        let given = self.pools.give_back(self.core(), only.map(|id| (id, 0)), || Ok(false));
        assert!(given.failure.is_none(), "{given:?}");
        assert_eq!(given.released_bytes, reserved - self.core().stats().reserved_bytes.current);
        self.known.retain(|id, known| known.is_needed() || only.is_some_and(|only| only != *id));
    }

    fn check(&self, step: usize) {
        let listed: BTreeMap<u64, (Option<PoolId>, u32)> =
            self.pools.list().iter().map(|pool| (pool.id.0, (pool.own(), pool.uses))).collect();
        let expected = self.known.iter().map(|(id, known)| (*id, (Some(known.pool), known.uses))).collect();
        assert_eq!(listed, expected, "step {step}");
        for known in self.known.values() {
            assert!(self.core().pool_stats(known.pool).is_ok(), "step {step}: {} exists", known.pool);
        }
    }
}

stub_test!(a_mempool_exists_as_long_as_something_needs_it, {
    let device = CudaDevice::new(0).expect("the stub has a device");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let stream = allocator.register_stream(&stream).expect("registered");
    let mut run = Run { allocator, pools: Mempools::default(), known: BTreeMap::new(), stream };
    let mut random = Random(67);
    for step in 0..STEPS {
        let id = 1 + random.below(POOLS);
        match random.below(12) {
            0 | 1 => run.begin(id, (1 + random.below(6)) << 20),
            2 | 3 => run.free(id, 1 + random.below(3) as usize),
            4 | 5 => run.release(id),
            6 => run.observe(id),
            7 => run.forget(id),
            8 => run.give_back(Some(id)),
            9 => run.begin_in_vain(),
            10 => run.give_back_while_capturing(),
            _ => run.give_back(None),
        }
        run.check(step);
    }
    for id in 1..=POOLS {
        run.free(id, usize::MAX);
        run.forget(id);
        (0..run.known.get(&id).map_or(0, |known| known.uses)).for_each(|_| run.release(id));
    }
    run.give_back(None);
    run.check(STEPS);
    assert_eq!((run.known.len(), live().device_bytes), (0, 0));
});

// A trim that fails may have released memory before.
stub_test!(memory_released_before_a_failed_call_is_counted, {
    let device = CudaDevice::new(0).expect("the stub has a device");
    let config = "segments:fixed".parse::<Config>().expect("valid");
    for failed in 1..=3 {
        let allocator = CudaAllocator::new(&device, config.clone()).expect("made");
        let stream = device.context().new_stream().expect("a stream");
        let stream = allocator.register_stream(&stream).expect("registered");
        let mut run = Run { allocator, pools: Mempools::default(), known: BTreeMap::new(), stream };
        (0..3).for_each(|_| run.begin(1, 40 << 20));
        run.free(1, usize::MAX);
        (0..3).for_each(|_| run.release(1));
        let reserved = run.core().stats().reserved_bytes.current;
        fail("cuMemUnmap", failed, 999);
        let given = run.pools.give_back(run.core(), None, || Ok(false));
        heal();
        assert!(given.failure.is_some(), "call {failed} fails: {given:?}");
        let released_bytes = reserved - run.core().stats().reserved_bytes.current;
        assert_eq!((given.released_bytes, released_bytes), (120 << 20, 120 << 20), "call {failed} fails");
    }
});
