//! Pools with a base on the stub, whose driver grants hints for large reservations, moves them, or fails, as CUDA's does.

use crate::process::{calls, device, fail, heal, live, move_hints, stub_test};
use cudarc::driver::DevicePtr;
use std::sync::Arc;
use stub_process::ranks;
use symmalloc_core::backend::{Backend, DeviceAddress, Range};
use symmalloc_core::base::{Base, BaseError, Occupant, SLOT_BYTES};
use symmalloc_core::config::{Config, ConfigError, PoolConfig};
use symmalloc_core::errors::PoolError;
use symmalloc_core::op::Contents;
use symmalloc_core::{Op, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, CudaError, DeviceBuffer, GraphPool};
use symmalloc_harness::generate::Scenario;
use symmalloc_trace::layout;
use symmalloc_trace::replay::Replay;

const MIB: usize = 1 << 20;

fn based(base: &str) -> PoolConfig {
    format!("base:{base}").parse().expect("valid")
}

fn default_pool(base: &str) -> Config {
    Config::builder().default_pool(based(base)).build().expect("valid")
}

/// Returns the address of a buffer's first byte.
fn address(buffer: &DeviceBuffer<u8>) -> u64 {
    buffer.device_ptr(buffer.stream()).0
}

/// Returns the error of a pool that cannot have this base.
fn refused(allocator: &CudaAllocator, base: &str) -> BaseError {
    match allocator.create_pool(based(base)) {
        Err(CudaError::Pool(PoolError::Base(error))) => *error,
        other => panic!("base:{base}: {other:?}"),
    }
}

/// Runs generated programs with bases. Returns a hash of the address of every allocation, and the number of ops.
fn hash_of_addresses(device: &Arc<CudaDevice>) -> (u64, usize) {
    let (mut hash, mut count, mut allocations) = (0_u64, 0, 0);
    for seed in 0..30 {
        let scenario = Scenario::from_seed(seed, 400);
        let base = |pool: &PoolConfig, slot: u32| {
            let base = Base::slot(slot % 60).expect("it exists");
            pool.to_builder().base(base).build().expect("valid")
        };
        let config = scenario.config.to_builder().default_pool(base(scenario.config.default_pool(), 0));
        let mut slot = 0;
        let ops = scenario.ops().filter(|(op, _)| !matches!(op, Op::Sleep { .. } | Op::Wake { .. }));
        let ops = ops.map(|(op, access)| match op {
            Op::CreatePool { pool, config } => {
                slot += 1;
                (Op::CreatePool { pool, config: Box::new(base(&config, slot)) }, access)
            }
            op => (op, access),
        });
        let scenario = Scenario::new(config.build().expect("valid"), 2 << 20, ops.collect::<Vec<_>>());
        let backend = CudaBackend::builder(device).build().expect("the stub supports it");
        let core = symmalloc_core::Allocator::new(backend, scenario.config.clone()).expect("the slot is free");
        let mut replay = Replay::new(&core, &scenario.program);
        for op in scenario.program.ops() {
            if matches!(op, Op::RegisterStream { .. }) {
                let stream = device.context().new_stream().expect("a stream");
                symmalloc_cuda::CudaMemory::add_stream(core.backend(), stream);
            }
            let made = replay.step(op).ok().flatten().map_or(0, |allocation| allocation.address.0);
            hash = (hash ^ made).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(7);
            count += 1;
            allocations += usize::from(made != 0);
        }
    }
    assert!(allocations > 3_000, "{allocations} allocations");
    (hash, count)
}

stub_test!(two_processes_get_the_same_addresses, ["STUB_DEVICES" = "2", "STUB_MEMORY_BYTES" = "68719476736"], {
    let outputs = ranks(2, &[], |rank| {
        // The processes differ in everything else: device, order of the driver's addresses, and what was reserved before.
        let device = CudaDevice::new(rank).expect("a stub device");
        let other = CudaAllocator::new(&device, Config::default()).expect("created");
        let stream = device.context().new_stream().expect("a stream");
        let before: Vec<_> = (0..rank).map(|_| other.alloc_zeroed::<u8>(&stream, MIB).expect("memory")).collect();
        let (hash, ops) = hash_of_addresses(&device);
        assert!(ops >= 10_000, "{ops} ops");
        println!("addresses {hash:016x}");
        drop((before, other));
        assert_eq!((live().mappings, live().device_bytes, live().ranges), (0, 0, 0));
    });
    let line = |text: &str| text.lines().find(|line| line.contains("addresses ")).map(str::to_owned);
    for output in &outputs {
        assert!(output.is_success, "rank {}: {}", output.rank, output.text);
    }
    assert_eq!(line(&outputs[0].text), line(&outputs[1].text));
    assert!(line(&outputs[0].text).is_some());
});

stub_test!(a_pool_with_a_base_makes_one_reservation, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("created");
    let streams = [0; 2].map(|_| device.context().new_stream().expect("a stream"));
    let pool = allocator.create_pool(based("slot:2")).expect("free");
    assert_eq!((calls("cuMemAddressReserve"), live().ranges, live().device_bytes), (1, 1, 0));
    let base = 0x1200_0000_0000;
    let buffers =
        streams.each_ref().map(|stream| allocator.with_pool(&pool).alloc_zeroed::<u8>(stream, MIB).expect("memory"));
    let addresses = buffers.each_ref().map(address);
    assert_eq!(addresses, [base, base + (64 << 30)], "each stream has a range of 64 GiB");
    assert_eq!(calls("cuMemAddressReserve"), 1);
    let bytes = vec![7_u8; MIB];
    let mut buffers = buffers;
    streams[1].memcpy_htod(&bytes, &mut buffers[1]).expect("copied");
    assert_eq!(streams[1].clone_dtoh(&buffers[1]).expect("copied"), bytes);
    drop(buffers);
    pool.destroy().expect("unused");
    assert_eq!((calls("cuMemAddressFree"), live().ranges, live().device_bytes), (1, 0, 0));
});

stub_test!(a_moved_reservation_is_released_and_names_the_mapping, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("created");
    let (start, bytes) = (0x1300_4000_0000_u64, 4096);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the call replaces no mapping.
    let mapped = unsafe { libc::mmap(start as *mut _, bytes, libc::PROT_READ, flags, -1, 0) };
    assert_eq!(mapped as u64, start);
    let error = refused(&allocator, "slot:3");
    let occupant = Occupant::Mapping { start, end: start + bytes as u64, name: "".into() };
    let BaseError::Occupied { base, occupant: found, free_slot } = &error else { panic!("{error}") };
    assert_eq!((*base, found, *free_slot), (Base::slot(3).expect("it exists"), &occupant, Some(0)), "{error}");
    assert!(error.to_string().contains("anonymous memory is mapped at 0x130040000000 to 0x130040001000"), "{error}");
    assert_eq!((live().ranges, calls("cuMemAddressFree"), allocator.core().pool_count()), (0, 1, 1));
    // SAFETY: mapped above.
    unsafe { libc::munmap(mapped, bytes) };
    allocator.create_pool(based("slot:3")).expect("free now").destroy().expect("unused");
});

stub_test!(a_driver_that_ignores_hints_is_an_error, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("created");
    move_hints(true);
    let error = refused(&allocator, "slot:0");
    assert!(
        matches!(error, BaseError::Occupied { occupant: Occupant::Unknown { returned }, .. } if returned != 0),
        "{error}"
    );
    assert_eq!(live().ranges, 0);
    // If the driver also fails to release the other addresses, the error is the same, and they stay reserved.
    fail("cuMemAddressFree", 1, 999);
    refused(&allocator, "slot:0");
    assert_eq!(live().ranges, 1);
    move_hints(false);
    allocator.create_pool(based("slot:0")).expect("free");
});

stub_test!(a_failed_reservation_is_an_error, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("created");
    fail("cuMemAddressReserve", 1, 1);
    let base = Base::slot(0).expect("it exists");
    assert_eq!(refused(&allocator, "slot:0"), BaseError::Driver { base, call: "cuMemAddressReserve", code: 1 });
    heal();
    assert_eq!(live().ranges, 0);
    // Above the limit, the text is an error before any driver call.
    let reserves = calls("cuMemAddressReserve");
    for text in ["base:0x7f0040000000", "base:0x800000000000", "base:0x200000200000", "base:slot:64", "base:here"] {
        let error = text.parse::<PoolConfig>().expect_err(text);
        assert!(error.to_string().starts_with("byte 5: "), "{text}: {error}");
    }
    assert_eq!(calls("cuMemAddressReserve"), reserves);
});

stub_test!(a_slot_belongs_to_one_pool_of_the_process, ["STUB_DEVICES" = "2"], {
    let first = CudaAllocator::new(&device(), Config::default()).expect("created");
    let other_device = CudaDevice::new(1).expect("a stub device");
    let pool = first.create_pool(based("slot:4")).expect("free");
    let second = CudaAllocator::new(&other_device, default_pool("slot:4")).map(drop);
    let Err(CudaError::Config(ConfigError::Base(error))) = second else { panic!("{second:?}") };
    let base = Base::slot(4).expect("it exists");
    let occupant = Occupant::Pool { pool: pool.id(), device: 0, base };
    assert_eq!(*error, BaseError::Occupied { base, occupant, free_slot: Some(0) });
    assert_eq!(live().ranges, 1);
    drop(pool);
    first.trim_all().expect("trimmed");
    let second = CudaAllocator::new(&other_device, default_pool("slot:4")).expect("free now");
    drop((first, second));
    assert_eq!(live().ranges, 0);
});

stub_test!(memory_that_the_driver_allocates_as_a_whole_has_no_base, {
    let backend = CudaBackend::builder(&device()).plain().build().expect("the stub supports it");
    let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("created");
    assert_eq!(refused(&allocator, "slot:0"), BaseError::Unsupported);
    assert_eq!(live().ranges, 0);
});

stub_test!(only_its_own_backend_divides_and_releases_a_space, {
    let device = device();
    let [backend, other] = [0; 2].map(|_| CudaBackend::builder(&device).build().expect("the stub supports it"));
    let space = backend.reserve_at(Base::slot(0).expect("it exists"), PoolId(1)).expect("free");
    let part = |offset: u64, size_bytes: u64| Range { base: DeviceAddress(space.base.0 + offset), size_bytes };
    let granule = backend.granularity_bytes();
    let carved = part(4 * granule, 4 * granule);
    other.carve(space, carved).expect_err("another backend's addresses");
    backend.carve(space, carved).expect("free");
    for (offset, size_bytes) in
        [(4 * granule, granule), (7 * granule, 2 * granule), (0, 5 * granule), (5 * granule, granule)]
    {
        backend.carve(space, part(offset, size_bytes)).expect_err("a part of it is a range");
    }
    for (offset, size_bytes) in
        [(0, 0), (512, granule), (0, 512), (0, SLOT_BYTES + granule), (0, u64::MAX - granule + 1)]
    {
        backend.carve(space, part(offset, size_bytes)).expect_err("not whole granules of the space");
    }
    backend.carve(space, part(SLOT_BYTES - granule, granule)).expect("free");
    backend.release_space(space).expect_err("parts of it are ranges");
    backend.release(carved).expect("nothing is mapped");
    backend.release_space(space).expect_err("a part of it is a range");
    backend.release(part(SLOT_BYTES - granule, granule)).expect("nothing is mapped");
    other.release_space(space).expect_err("another backend's addresses");
    backend.release_space(part(0, 4 * granule)).expect_err("another size");
    assert_eq!((calls("cuMemAddressFree"), live().ranges), (0, 1));
    backend.release_space(space).expect("nothing is mapped");
    backend.release_space(space).expect_err("already released");
    assert_eq!((calls("cuMemAddressFree"), live().ranges), (1, 0));
});

stub_test!(failed_calls_leave_no_addresses_behind, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let cases = [
        ("cuMemAddressReserve", 2),
        ("cuMemAddressFree", 2),
        ("cuMemCreate", 4),
        ("cuMemMap", 4),
        ("cuMemSetAccess", 4),
        ("cuMemUnmap", 2),
    ];
    for (call, times) in cases {
        for nth in 1..=times {
            let allocator = CudaAllocator::new(&device, Config::default()).expect("created");
            fail(call, nth, 2);
            let mut failures = 0;
            for base in ["slot:0", "slot:1"] {
                let Ok(pool) = allocator.create_pool(based(base)) else {
                    failures += 1;
                    continue;
                };
                for size in [MIB, 40 * MIB] {
                    let made = allocator.with_pool(&pool).alloc_zeroed::<u8>(&stream, size);
                    failures += usize::from(made.is_err());
                }
                failures += usize::from(pool.destroy().is_err());
            }
            heal();
            assert_eq!(failures, 1, "{call} {nth}");
            allocator.trim_all().expect("no fault is left");
            drop(allocator);
            assert_eq!((live().mappings, live().device_bytes, live().ranges), (0, 0, 0), "{call} {nth}");
            let both =
                ["slot:0", "slot:1"].map(|base| CudaAllocator::new(&device, default_pool(base)).expect("free again"));
            drop(both);
        }
    }
});

stub_test!(a_restored_pool_keeps_its_addresses_for_graphs, {
    let device = device();
    let config = || default_pool("slot:5");
    let stream = device.context().new_stream().expect("a stream");
    let old = CudaAllocator::new(&device, config()).expect("free");
    let kept = old.alloc_zeroed::<u8>(&stream, 3 * MIB).expect("memory");
    let large = old.alloc_zeroed::<u8>(&stream, 90 * MIB).expect("memory");
    let addresses = [address(&kept), address(&large)];
    let text = layout::to_text(&old.core().save_layout(PoolId::DEFAULT).expect("nothing is retired"));
    drop((kept, large, old));
    assert_eq!(live().ranges, 0);
    let new = CudaAllocator::new(&device, config()).expect("free again");
    new.register_stream(&stream).expect("the first");
    let restored = new.core().restore_layout(PoolId::DEFAULT, &layout::parse(&text).expect("a layout")).expect("fresh");
    let found: Vec<u64> = restored.allocations().map(|restored| restored.allocation.address.0).collect();
    assert_eq!(found, addresses);
});

stub_test!(a_graph_pool_and_a_sleeping_pool_can_have_a_base, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("created");
    let stream = device.context().new_stream().expect("a stream");
    let graphs = GraphPool::new(&allocator, based("slot:6")).expect("free");
    let capture = graphs.begin(&stream).expect("begun");
    let scratch = allocator.alloc_zeroed::<u8>(&stream, MIB).expect("memory");
    assert_eq!(address(&scratch), 0x1600_0000_0000);
    drop(scratch);
    drop(capture);
    let pool = allocator.create_pool(based("slot:7")).expect("free");
    let mut buffer = allocator.with_pool(&pool).alloc_zeroed::<u8>(&stream, MIB).expect("memory");
    stream.memcpy_htod(&vec![3; MIB], &mut buffer).expect("copied");
    let before = address(&buffer);
    allocator.sleep(pool.id(), Contents::Keep).expect("asleep");
    allocator.wake(pool.id()).expect("awake");
    assert_eq!((address(&buffer), stream.clone_dtoh(&buffer).expect("copied")), (before, vec![3; MIB]));
});
