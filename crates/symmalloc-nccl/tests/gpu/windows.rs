//! Tests of windows that only newer versions of NCCL support: over several physical chunks, created during a capture, and with flags.

use crate::job::{Calls, MIB, Rank, devices, devices_with, leave, ranks, reduce_and_check, take};
use cudarc::driver::sys::CUstreamCaptureMode;
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, DeviceBuffer};
use symmalloc_nccl::{Attachment, Capability, Nccl, NcclVersion, Registration, UniqueId, WindowFlags};

/// Returns an allocator with expandable segments of these chunks. Odd ranks allocate addresses in descending order.
fn expandable(rank: &Rank<'_>, chunk_bytes: u64) -> CudaAllocator {
    let builder = CudaBackend::builder(&rank.device).chunk_bytes(chunk_bytes);
    let builder = if rank.rank % 2 == 1 { builder.descending_addresses(2 << 40) } else { builder };
    let pool = PoolConfig::builder().expandable().symmetric(true).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let backend = builder.build().expect("the options should be supported");
    let allocator = CudaAllocator::with_backend(backend, config).expect("the allocator is created");
    allocator.register_stream(&rank.stream).expect("the stream should be registered");
    allocator
}

/// Registers windows on memory that grows, and reduces in them after each growth. `chunk_bytes` returns the chunk size of a rank.
fn grow_windows(chunk_bytes: impl Fn(u32) -> u64 + Sync) {
    let Some(count) = devices() else { return };
    let (version, since) = (Nccl::load().expect("libnccl should be available").version(), NcclVersion::new(2, 30, 3));
    if version < since {
        println!("skipped: NCCL {version} puts no windows on memory that grew, which {since} introduced");
        return;
    }
    let id = UniqueId::new().expect("NCCL creates an id");
    ranks(count, |rank| {
        let world = rank.connect(id, Calls::Blocking);
        let allocator = expandable(rank, chunk_bytes(rank.rank));
        let registrar = rank.registrar(&allocator);
        registrar.attach(&world, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
        let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
        let (mut grown, mut chunks) = (0, 0);
        for round in 0..6 {
            let length = 1_000_003 * (round as usize + 1);
            // SAFETY: the memory is written before it is read.
            tensors.push(unsafe { allocator.alloc(&rank.stream, length) }.expect("the allocation should succeed"));
            let before = registrar.stats().window_bytes;
            registrar.sync(&[&world]).expect("the ranks should agree");
            let stats = registrar.stats();
            grown += u32::from(before > 0 && stats.window_bytes > before);
            let segment = registrar
                .key_of(tensors.last().expect("an allocation should have been made"))
                .expect("in a live segment");
            chunks = chunks.max(allocator.core().backend().chunks_behind(segment.base, stats.window_bytes).len());
            reduce_and_check(rank, &world, 0..count, tensors.iter_mut().collect(), round);
        }
        // Freed memory is reused in place.
        tensors.truncate(2);
        for round in 6..12 {
            take(rank, &allocator, &mut tensors, round);
            registrar.sync(&[&world]).expect("the ranks should agree");
            reduce_and_check(rank, &world, 0..count, tensors.iter_mut().collect(), round);
        }
        assert!(grown > 0 && chunks > 1, "{grown} growths, {chunks} chunks");
        println!("rank {}: {grown} windows grew, {chunks} chunks; {:?}", rank.rank, registrar.stats());
        leave(&registrar, &world);
    });
}

#[test]
fn windows_over_several_chunks_follow_a_segment_that_grows() {
    grow_windows(|_| 2 * MIB);
}

#[test]
fn windows_have_different_chunks_on_each_rank() {
    grow_windows(|rank| if rank % 2 == 0 { 2 * MIB } else { 8 * MIB });
}

/// Another stream of every device is being captured in global mode, in which the driver rejects most calls.
#[test]
fn windows_are_registered_during_a_capture() {
    let Some(count) = devices_with(&[Capability::RegistrationInCapture]) else { return };
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let id = UniqueId::new().expect("NCCL creates an id");
        ranks(count, |rank| {
            let world = rank.connect(id, calls);
            let allocator = rank.allocator(crate::job::fixed());
            let registrar = rank.registrar(&allocator);
            registrar.attach(&world, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
            let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
            take(rank, &allocator, &mut tensors, 1);
            registrar.sync(&[&world]).expect("the ranks should agree");
            reduce_and_check(rank, &world, 0..count, tensors.iter_mut().collect(), 1);
            let captured = rank.device.context().new_stream().expect("the driver should create a stream");
            rank.meet();
            captured
                .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)
                .expect("the capture should begin");
            // SAFETY: the memory is written before it is read.
            tensors.push(unsafe { allocator.alloc(&rank.stream, 8 << 20) }.expect("the allocation should succeed"));
            let before = registrar.stats().windows;
            registrar.sync(&[&world]).expect("the ranks should agree");
            assert_eq!(registrar.stats().windows, before + 1);
            rank.meet();
            // SAFETY: the stream is being captured, and nothing uses the graph.
            let graph = unsafe { cudarc::driver::result::stream::end_capture(captured.cu_stream()) };
            assert!(!graph.expect("the capture is valid").is_null());
            reduce_and_check(rank, &world, 0..count, tensors.iter_mut().collect(), 2);
            leave(&registrar, &world);
        });
    }
}

/// Registers windows with flags, and reduces in them.
fn reduce_with(flags: WindowFlags, capability: Capability) {
    let Some(count) = devices_with(&[capability]) else { return };
    let id = UniqueId::new().expect("NCCL creates an id");
    ranks(count, |rank| {
        let world = rank.connect(id, Calls::Blocking);
        let allocator = rank.allocator(crate::job::fixed());
        let registrar = rank.registrar(&allocator);
        let attachment = Attachment { flags, ..Attachment::default() };
        registrar.attach(&world, &[PoolId::DEFAULT], attachment).expect("the pool should be attachable");
        let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
        for round in 0..6 {
            take(rank, &allocator, &mut tensors, round);
            registrar.sync(&[&world]).expect("the ranks should agree");
            reduce_and_check(rank, &world, 0..count, tensors.iter_mut().collect(), round);
        }
        if rank.is_first() {
            println!("{flags:?}: {:?}", registrar.stats());
        }
        leave(&registrar, &world);
    });
}

#[test]
fn windows_with_strict_ordering_reduce_correctly() {
    reduce_with(WindowFlags::STRICT_ORDERING, Capability::StrictOrderingWindows);
}

#[test]
fn windows_for_the_network_only_reduce_correctly() {
    reduce_with(WindowFlags::GIN_ONLY, Capability::NetworkOnlyWindows);
}
