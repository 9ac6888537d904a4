//! Jobs whose ranks are threads, each with a device, an allocator and a registrar, for tests of the registrar.

use cudarc::driver::{CudaStream, DeviceSlice};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stub_process::{Barrier, cuda, nccl, scaled_to_load};
use symmalloc_agreement::Mode;
use symmalloc_core::config::{Config, PoolConfig, PoolConfigBuilder};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, Pool};
use symmalloc_nccl::{Attachment, Communicator, ReduceOp, Registrar, UniqueId, WatchdogMode};

pub(crate) const MIB: u64 = 1 << 20;

/// A deadline that no expected event exceeds.
pub(crate) const PATIENT: Duration = Duration::from_secs(60);

/// A deadline that is short enough to wait for in full. No expected event exceeds it on an idle machine.
pub(crate) const IMPATIENT: Duration = Duration::from_millis(1500);

/// The configuration that all ranks of a job share.
pub(crate) struct Job {
    pub(crate) ranks: usize,
    pub(crate) mode: Mode,
    pub(crate) deadline: Duration,
    pub(crate) check_offsets: bool,
    /// Maximum number of bytes that every second rank prefetches for each range.
    pub(crate) prefetch_bytes: u64,
    /// Every rank uses the default stream, so its context has no other stream yet.
    pub(crate) on_default_stream: bool,
}

/// One rank.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) allocator: CudaAllocator,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) registrar: Registrar,
    pub(crate) world: Communicator,
    pub(crate) mode: Mode,
    pub(crate) deadline: Duration,
    barrier: Arc<Barrier>,
}

impl Job {
    pub(crate) fn new(ranks: usize) -> Self {
        Job {
            ranks,
            mode: Mode::AtSync,
            deadline: PATIENT,
            check_offsets: false,
            prefetch_bytes: 0,
            on_default_stream: false,
        }
    }

    pub(crate) fn quiet(mut self) -> Self {
        self.mode = Mode::Off;
        self
    }

    pub(crate) fn impatient(mut self) -> Self {
        self.deadline = scaled_to_load(IMPATIENT);
        self
    }

    pub(crate) fn checking_offsets(mut self) -> Self {
        self.check_offsets = true;
        self
    }

    pub(crate) fn on_default_stream(mut self) -> Self {
        self.on_default_stream = true;
        self
    }

    /// Runs `body` on one thread per rank. Returns the results by rank.
    pub(crate) fn run<R: Send>(&self, body: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
        let id = UniqueId::new().expect("the stub creates an id");
        let barrier = Arc::new(Barrier::new(self.ranks));
        stub_process::threads(self.ranks, |rank| {
            let rank = self.join(rank, id, Arc::clone(&barrier));
            let result = body(&rank);
            rank.leave();
            result
        })
    }

    fn join(&self, rank: usize, id: UniqueId, barrier: Arc<Barrier>) -> Rank {
        let device = CudaDevice::new(rank).expect("the stub should have a device");
        let prefetch_bytes = if rank.is_multiple_of(2) { self.prefetch_bytes } else { 0 };
        let backend =
            CudaBackend::builder(&device).prefetch_bytes(prefetch_bytes).build().expect("the stub supports it");
        let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("a configuration that fits");
        let stream = match self.on_default_stream {
            true => device.context().default_stream(),
            false => device.context().new_stream().expect("the driver should create a stream"),
        };
        allocator.register_stream(&stream).expect("stream ids are available");
        let registrar = Registrar::builder(&allocator).check_offsets(self.check_offsets).build();
        // The tests examine deadlines and aborts without the watchdog, which would notify ranks of each other's failures immediately.
        let builder = Communicator::builder(&device).deadline(self.deadline).watchdog(WatchdogMode::Off);
        let world = builder.connect(id, rank as u32, self.ranks as u32);
        Rank {
            rank,
            ranks: self.ranks,
            device,
            allocator,
            stream,
            registrar: registrar.expect("the device reports its size"),
            world: world.expect("all ranks should connect"),
            mode: self.mode,
            deadline: self.deadline,
            barrier,
        }
    }
}

impl Rank {
    /// Waits at a barrier for the other threads.
    pub(crate) fn meet(&self) {
        self.barrier.wait();
    }

    /// Creates a symmetric pool with fixed segments.
    pub(crate) fn pool(&self) -> Pool<CudaBackend> {
        self.pool_with(PoolConfigBuilder::fixed)
    }

    pub(crate) fn pool_with(
        &self,
        configure: impl FnOnce(PoolConfigBuilder) -> PoolConfigBuilder,
    ) -> Pool<CudaBackend> {
        let config =
            configure(PoolConfig::builder().symmetric(true)).build().expect("the configuration should be valid");
        self.allocator.create_pool(config).expect("the pool should fit into the device")
    }

    /// Returns an attachment for windows with the job's agreement mode.
    pub(crate) fn windows(&self) -> Attachment {
        Attachment { agreement: self.mode, ..Attachment::default() }
    }

    /// Creates a symmetric pool with fixed segments, attached to the world for windows.
    pub(crate) fn attached_pool(&self) -> Pool<CudaBackend> {
        let pool = self.pool();
        self.registrar
            .attach(&self.world, &[pool.id()], self.windows())
            .expect("the pool should be symmetric and registrable");
        pool
    }

    /// Allocates a buffer of `size_bytes` bytes in a pool.
    pub(crate) fn take(&self, pool: &Pool<CudaBackend>, size_bytes: u64) -> DeviceBuffer<f32> {
        // SAFETY: every bit pattern is a valid `f32`.
        unsafe { self.allocator.with_pool(pool).alloc(&self.stream, size_bytes as usize / 4) }
            .expect("the allocation should fit")
    }

    /// Trims a pool. Returns the number of bytes released.
    pub(crate) fn trim(&self, pool: &Pool<CudaBackend>) -> u64 {
        self.allocator.core().trim_pool(pool.id()).expect("no fault should be injected")
    }

    /// Returns a buffer's offset in its window, which must be equal on all ranks.
    pub(crate) fn offset_of(&self, comm: &Communicator, buffer: &DeviceBuffer<f32>) -> u64 {
        self.registrar.window_of(comm, buffer).expect("it has a window").offset_bytes
    }

    /// All-reduces the last elements of a buffer and checks every sum.
    pub(crate) fn reduce_right(&self, comm: &Communicator, buffer: &mut DeviceBuffer<f32>) {
        let from = buffer.len().saturating_sub(256);
        let mut end = buffer.slice_mut(from..);
        let value = |rank: usize, index: usize| (rank * 1000 + index % 97) as f32;
        let input: Vec<f32> = (0..end.len()).map(|index| value(comm.rank() as usize, index)).collect();
        self.stream.memcpy_htod(&input, &mut end).expect("the copy should succeed");
        comm.all_reduce_in_place(&mut end, ReduceOp::Sum, &self.stream).expect("all ranks submit");
        let output = self.stream.clone_dtoh(&end).expect("the copy should succeed");
        self.stream.synchronize().expect("the stream should complete");
        for (index, sum) in output.into_iter().enumerate() {
            let expected: f32 = (0..comm.ranks() as usize).map(|rank| value(rank, index)).sum();
            assert_eq!(sum, expected, "rank {}, element {index}", self.rank);
        }
    }

    /// Connects another communicator of all ranks, with an id from rank 0.
    pub(crate) fn connect(&self, name: &str, shared: &Mutex<Option<UniqueId>>) -> Communicator {
        self.connect_within(self.deadline, name, shared)
    }

    /// Connects another communicator of all ranks, with a deadline.
    pub(crate) fn connect_within(
        &self,
        deadline: Duration,
        name: &str,
        shared: &Mutex<Option<UniqueId>>,
    ) -> Communicator {
        if self.rank == 0 {
            *shared.lock().expect("the lock is not poisoned") = Some(UniqueId::new().expect("the stub creates an id"));
        }
        self.meet();
        let id = shared.lock().expect("the lock is not poisoned").expect("rank 0 set it");
        let comm = Communicator::builder(&self.device).deadline(deadline).watchdog(WatchdogMode::Off).name(name);
        comm.connect(id, self.rank as u32, self.ranks as u32).expect("all ranks should connect")
    }

    /// Checks the allocator's invariants.
    pub(crate) fn check(&self) {
        self.allocator.core().check().expect("the allocator is consistent");
    }

    fn leave(self) {
        self.check();
        let Rank { registrar, allocator, world, .. } = self;
        if let Err(error) = world.destroy() {
            panic!("the communicator cannot be destroyed: {error}");
        }
        registrar.sweep();
        assert_eq!(allocator.stats().retired_bytes, 0, "dead memory is still held after all communicators have ended");
        drop(registrar);
    }
}

/// Asserts that the stub detected no violation and that no resource is left.
#[track_caller]
pub(crate) fn nothing_is_left() {
    nccl::assert_clean();
    let live = nccl::live();
    assert_eq!(live, nccl::Live { pending: live.pending, ..nccl::Live::default() });
    let cuda::Live { device_bytes, ranges, mappings, .. } = cuda::live();
    assert_eq!((device_bytes, ranges, mappings), (0, 0, 0), "device memory and addresses are released");
}
