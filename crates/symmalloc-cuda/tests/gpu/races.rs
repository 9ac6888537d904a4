//! Cross-stream reuse with real kernels: data is corrupted within a second without fences, and never with them.

use crate::device;
use crate::kernels::Kernels;
use cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg};
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::backend::{Backend, BackendError, Event, Range};
use symmalloc_core::config::{Config, PlanPolicy};
use symmalloc_core::{PoolId, SharedAllocator, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, CudaMemory, DeviceBuffer, StreamAllocatorRef};

const COUNT: u32 = 256 << 10;

/// A backend that can skip fence waits, for tests only.
struct Fenced {
    backend: CudaBackend,
    waits: bool,
}

impl Backend for Fenced {
    fn granularity_bytes(&self) -> u64 {
        self.backend.granularity_bytes()
    }
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        self.backend.reserve(size_bytes)
    }
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.backend.map(range, offset_bytes, size_bytes)
    }
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.backend.unmap(range, offset_bytes, size_bytes)
    }
    fn release(&self, range: Range) -> Result<(), BackendError> {
        self.backend.release(range)
    }
    fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
        self.backend.record(stream)
    }
    fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
        if self.waits { self.backend.wait(stream, event) } else { Ok(()) }
    }
    fn query(&self, event: Event) -> Result<bool, BackendError> {
        self.backend.query(event)
    }
    fn recycle(&self, event: Event) {
        self.backend.recycle(event);
    }
    fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        self.backend.synchronize(stream)
    }
}

/// Fills a block on one stream, reads it on a slow second stream, frees it, and allocates it again on the first stream, for the given time.
/// Returns the number of changed elements that the reader found, and the number of rounds. In a pool that learns plans, two rounds form a
/// step, and both use the same placement.
fn wrong_elements(device: &Arc<CudaDevice>, waits: bool, lasting: Duration, config: &str) -> (u32, u32) {
    let config: Config = config.parse().expect("settings");
    let in_steps = config.default_pool().plan() == PlanPolicy::Learn;
    let context = device.context();
    // SAFETY: this test orders the streams explicitly.
    unsafe { context.disable_event_tracking() };
    let kernels = Kernels::compile(context);
    let backend = CudaBackend::builder(device).build().expect("supported");
    let (main, side) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    backend.add_stream(Arc::clone(&main));
    backend.add_stream(Arc::clone(&side));
    let allocator = SharedAllocator::new(Fenced { backend, waits }, config).expect("valid");
    let (main_id, side_id) = (allocator.register_stream().expect("an id"), allocator.register_stream().expect("an id"));
    let wrong = side.alloc_zeros::<u32>(1).expect("a counter");
    side.synchronize().expect("done");
    let grid = LaunchConfig::for_num_elems(COUNT);
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    let (start, mut round) = (Instant::now(), 0_u32);
    while start.elapsed() < lasting {
        round += 1;
        if in_steps && round % 2 == 1 {
            allocator.begin_step(PoolId::DEFAULT, 0).expect("no step is open");
        }
        let block = allocator.allocate(PoolId::DEFAULT, main_id, u64::from(COUNT) * 4).expect("allocated");
        let (pointer, cycles) = (block.address.0, 200_000_u64);
        // SAFETY: the kernel writes COUNT elements of a block that has them.
        unsafe { main.launch_builder(&kernels.fill).arg(&pointer).arg(&round).arg(&COUNT).launch(grid) }
            .expect("launched");
        side.join(&main).expect("ordered");
        // SAFETY: touches no memory.
        unsafe { side.launch_builder(&kernels.delay).arg(&cycles).launch(one) }.expect("launched");
        // SAFETY: reads the block, which is recorded as used by `side`, and increments a separate counter.
        unsafe {
            side.launch_builder(&kernels.count_others).arg(&pointer).arg(&round).arg(&COUNT).arg(&wrong).launch(grid)
        }
        .expect("launched");
        allocator.record_use(block.handle, side_id).expect("known");
        allocator.free(block.handle).expect("freed");
        if in_steps && round.is_multiple_of(2) {
            let report = allocator.end_step(PoolId::DEFAULT).expect("a step is open");
            assert!(round <= 4 || report.planned == 2, "{report:?}");
        }
        if round.is_multiple_of(64) {
            side.synchronize().expect("the work is done");
        }
    }
    side.synchronize().expect("done");
    (side.clone_dtoh(&wrong).expect("copied")[0], round)
}

#[test]
fn without_fences_data_is_corrupted_within_a_second() {
    let Some(device) = device() else { return };
    let (wrong, rounds) = wrong_elements(&device, false, Duration::from_secs(1), "");
    println!("without fences: {wrong} wrong elements in {rounds} rounds");
    assert!(wrong > 0);
}

#[test]
fn with_fences_data_is_never_corrupted() {
    let Some(device) = device() else { return };
    let seconds = std::env::var("SYMMALLOC_RACE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let (wrong, rounds) = wrong_elements(&device, true, Duration::from_secs(seconds), "");
    println!("with fences: {wrong} wrong elements in {rounds} rounds, {seconds} s");
    assert_eq!(wrong, 0);
}

#[test]
fn streams_wait_for_earlier_users_of_planned_placements() {
    let Some(device) = device() else { return };
    for config in ["plan:learn", "plan:learn,streams:shared"] {
        let (unfenced, _) = wrong_elements(&device, false, Duration::from_secs(1), config);
        let (wrong, rounds) = wrong_elements(&device, true, Duration::from_secs(3), config);
        println!("{config}: {wrong} wrong elements in {rounds} rounds; without fences {unfenced}");
        assert!(unfenced > 0 && wrong == 0);
    }
}

#[test]
fn buffers_that_are_dropped_under_a_reader_are_not_overwritten() {
    let Some(device) = device() else { return };
    for is_registered in [true, false] {
        let [counting, borrowing] = [(); 2].map(|()| Reader::new(&device, is_registered));
        counting.rounds("counting", || {
            // SAFETY: written before it is read.
            unsafe { counting.allocator.alloc(&counting.main, COUNT as usize) }.expect("allocated")
        });
        let main = borrowing.allocator.for_stream(&borrowing.main).expect("registered");
        borrowing.rounds("borrowing", || {
            // SAFETY: written before it is read.
            unsafe { main.alloc(COUNT as usize) }.expect("allocated")
        });
    }
}

/// A slow stream next to the stream on which buffers are allocated.
struct Reader {
    kernels: Kernels,
    allocator: CudaAllocator,
    main: Arc<CudaStream>,
    side: Arc<CudaStream>,
    is_registered: bool,
}

impl Reader {
    fn new(device: &Arc<CudaDevice>, is_registered: bool) -> Self {
        let allocator = CudaAllocator::new(device, Config::default()).expect("made");
        let streams = [device.context().new_stream(), device.context().new_stream()];
        let [main, side] = streams.map(|stream| stream.expect("a stream"));
        allocator.register_stream(&main).expect("registered");
        if is_registered {
            allocator.register_stream(&side).expect("registered");
        }
        Reader { kernels: Kernels::compile(device.context()), allocator, main, side, is_registered }
    }

    /// Fills buffers, submits delayed reads, and drops the buffers before they are read.
    fn rounds<A>(&self, name: &str, alloc: impl Fn() -> DeviceBuffer<u32, A>)
    where
        A: StreamAllocatorRef<Memory = CudaBackend>,
    {
        let Reader { kernels, allocator, main, side, is_registered } = self;
        let (grid, one) = (LaunchConfig::for_num_elems(COUNT), LaunchConfig::for_num_elems(1));
        let wrong = side.alloc_zeros::<u32>(1).expect("a counter");
        for round in 0..2000_u32 {
            let mut buffer = alloc();
            // SAFETY: the kernel writes COUNT elements of a buffer that has them, on the buffer's stream.
            unsafe { main.launch_builder(&kernels.fill).arg(&mut buffer).arg(&round).arg(&COUNT).launch(grid) }
                .expect("launched");
            let cycles = 100_000_u64;
            // SAFETY: touches no memory.
            unsafe { side.launch_builder(&kernels.delay).arg(&cycles).launch(one) }.expect("launched");
            {
                let argument = buffer.read_on(side);
                // SAFETY: reads the buffer on the stream of the argument.
                unsafe {
                    let mut launch = side.launch_builder(&kernels.count_others);
                    launch.arg(&argument).arg(&round).arg(&COUNT).arg(&wrong).launch(grid)
                }
                .expect("launched");
            }
            drop(buffer);
            if round.is_multiple_of(64) {
                side.synchronize().expect("the work is done");
            }
        }
        let wrong = side.clone_dtoh(&wrong).expect("copied")[0];
        let reserved = allocator.stats().reserved_bytes.peak;
        println!("{name}, registered: {is_registered}, {wrong} wrong of 2000 rounds, {reserved} bytes reserved");
        assert_eq!((wrong, allocator.drop_errors().count), (0, 0));
        assert_eq!(reserved, 2 << 20, "every round used the same memory");
    }
}
