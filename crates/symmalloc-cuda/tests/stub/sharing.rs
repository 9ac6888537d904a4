//! Sharing of memory between processes. Here both sides are threads; `processes.rs` uses two processes.

mod hostile;
mod processes;

use crate::process::{calls, device, fail, heal, live, stub_test};
use cudarc::driver::{CudaStream, DevicePtr};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_core::config::PoolConfig;
use symmalloc_core::op::Contents;
use symmalloc_cuda::{
    Access, CudaAllocator, CudaBackend, CudaDevice, CudaError, DeviceBuffer, DriverError, Export, ExportState, Import,
    ImportError, Peer, ShareError,
};

const LONG: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// Runs both sides of an attachment in two threads.
pub(super) fn attach(export: &Export, device: &Arc<CudaDevice>, access: Access) -> Result<Import, ShareError> {
    both(export, device, access).1
}

fn both(
    export: &Export,
    device: &Arc<CudaDevice>,
    access: Access,
) -> (Result<Peer, ShareError>, Result<Import, ShareError>) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    thread::scope(|scope| {
        let importer = scope.spawn(move || Import::attach(device, &theirs, access, LONG));
        let served = export.serve(&ours, access, LONG);
        drop(ours);
        (served, importer.join().expect("no panic"))
    })
}

/// A trainer with three weights in a separate pool.
struct Trainer {
    weights: CudaAllocator,
    stream: Arc<CudaStream>,
    embedding: DeviceBuffer<u8>,
    layer: DeviceBuffer<u8>,
    unnamed: DeviceBuffer<u8>,
}

fn filled(allocator: &CudaAllocator, stream: &Arc<CudaStream>, len: usize, name: &str, value: u8) -> DeviceBuffer<u8> {
    let mut buffer = allocator.alloc_zeroed_named::<u8>(stream, len, name).expect("memory");
    stream.memset(&mut buffer, value);
    buffer
}

trait Memset {
    fn memset(&self, buffer: &mut DeviceBuffer<u8>, value: u8);
}

impl Memset for Arc<CudaStream> {
    fn memset(&self, buffer: &mut DeviceBuffer<u8>, value: u8) {
        let content = vec![value; buffer.len()];
        self.memcpy_htod(&content, buffer).expect("copied");
    }
}

impl Trainer {
    fn of(allocator: &CudaAllocator, config: PoolConfig) -> Self {
        let pool = allocator.create_pool(config).expect("a pool");
        let weights = allocator.with_pool(&pool);
        let stream = weights.device().context().new_stream().expect("a stream");
        let embedding = filled(&weights, &stream, 3 * MIB, "embedding", 1);
        let layer = filled(&weights, &stream, 1000, "layer", 2);
        let mut unnamed = weights.alloc_zeroed::<u8>(&stream, 5 * MIB).expect("memory");
        stream.memset(&mut unnamed, 3);
        stream.synchronize().expect("written before it is exported");
        Trainer { weights, stream, embedding, layer, unnamed }
    }

    fn new(device: &Arc<CudaDevice>) -> Self {
        Self::of(&allocator(device), PoolConfig::builder().build().expect("valid"))
    }
}

/// Creates an allocator whose pools grow in chunks of 2 MiB.
fn allocator(device: &Arc<CudaDevice>) -> CudaAllocator {
    let backend = CudaBackend::builder(device).chunk_bytes(2 << 20).build().expect("a backend");
    CudaAllocator::with_backend(backend, Default::default()).expect("an allocator")
}

fn content(import: &Import, name: &str, stream: &Arc<CudaStream>) -> Vec<u8> {
    stream.clone_dtoh(&import.bytes(name, stream).expect("a view")).expect("copied")
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("listed").count() - 1
}

stub_test!(an_importer_sees_the_exporters_bytes_without_a_copy, {
    let device = device();
    let mut trainer = Trainer::new(&device);
    let engine = device.context().new_stream().expect("a stream");
    let before = (live().device_bytes, descriptors());
    let export = trainer.weights.export().expect("exported");
    assert_eq!(
        (export.allocation_count(), export.mapped_bytes()),
        (3, 10 << 20),
        "the chunks that hold slightly more than 8 MiB"
    );
    let mut import = attach(&export, &device, Access::ReadWrite).expect("attached");
    assert_eq!(live().device_bytes, before.0, "no copy");

    assert_eq!(content(&import, "embedding", &engine), vec![1; 3 * MIB]);
    assert_eq!(content(&import, "layer", &engine), vec![2; 1000]);
    let unnamed = import.allocation(2).expect("the third allocation");
    assert_eq!((unnamed.name, unnamed.size_bytes), (None, 5 << 20));
    assert_ne!(
        unnamed.address,
        trainer.unnamed.device_ptr(&trainer.stream).0,
        "the importer maps it at another address"
    );
    // SAFETY: plain bytes.
    let view = unsafe { import.view_at::<u8>(2, &engine) }.expect("a view");
    assert_eq!(engine.clone_dtoh(&view).expect("copied"), vec![3; 5 * MIB]);

    // Both sides write, and each sees the other's writes.
    trainer.stream.memset(&mut trainer.layer, 9);
    trainer.stream.synchronize().expect("written");
    assert_eq!(content(&import, "layer", &engine), vec![9; 1000]);
    // SAFETY: plain bytes, which nobody else uses in the meantime.
    let mut written = unsafe { import.view_mut::<u8>("layer", &engine) }.expect("a view");
    engine.memcpy_htod(&[7; 1000], &mut written).expect("copied");
    engine.synchronize().expect("written");
    assert_eq!(trainer.stream.clone_dtoh(&trainer.layer).expect("copied"), vec![7; 1000]);

    let peers = || export.report().peers;
    assert_eq!(
        peers().iter().map(|peer| (peer.pid, peer.access)).collect::<Vec<_>>(),
        [(std::process::id(), Access::ReadWrite)]
    );
    assert_eq!(trainer.weights.exports(), [export.report()]);
    let report = import.report();
    assert_eq!((report.exporter, report.exporter_is_alive), (std::process::id(), true));
    assert_eq!((report.mapped_bytes, report.allocation_count, report.pool), (10 << 20, 3, trainer.weights.pool()));
    assert_eq!(report.digest, trainer.weights.digest(trainer.weights.pool()).expect("a digest"));

    import.detach().expect("detached");
    assert_eq!((peers(), import.check()), (vec![], Err(ImportError::Detached)));
    import.detach().expect("nothing to do");
    assert_eq!(import.allocation(0), Err(ImportError::Detached));
    drop((import, export));
    assert_eq!(trainer.weights.exports(), []);
    assert_eq!((live().device_bytes, descriptors()), before);
});

stub_test!(invalid_uses_of_an_import_are_errors, {
    let device = device();
    let trainer = Trainer::new(&device);
    let stream = &trainer.stream;
    let twice = [filled(&trainer.weights, stream, 100, "twice", 0), filled(&trainer.weights, stream, 100, "twice", 0)];
    let export = trainer.weights.export().expect("exported");
    let import = attach(&export, &device, Access::Read).expect("attached");
    assert_eq!(import.find("no"), Err(ImportError::Unknown { name: "no".into() }));
    assert_eq!(import.find("twice"), Err(ImportError::Ambiguous { name: "twice".into(), count: 2 }));
    assert_eq!(import.allocation(9), Err(ImportError::NoSuchAllocation { number: 9, count: 5 }));
    // SAFETY: no view is created.
    let elements = unsafe { import.view::<[u8; 7]>("layer", stream) };
    assert_eq!(elements.map(drop), Err(ImportError::Elements { size_bytes: 1000, element_bytes: 7 }));
    // SAFETY: as above.
    let mutable = unsafe { import.view_mut::<u8>("layer", stream) };
    assert_eq!(mutable.map(drop), Err(ImportError::ReadOnly));
    drop(twice);
});

stub_test!(a_stale_import_is_an_error_and_its_memory_stays_mapped, {
    let device = device();
    let Trainer { weights, stream, embedding, layer, unnamed } = Trainer::new(&device);
    let export = weights.export().expect("exported");
    let import = attach(&export, &device, Access::Read).expect("attached");
    let address = import.allocation(1).expect("the second allocation").address;
    let other = weights.alloc_zeroed::<u8>(&stream, 100).expect("allocated");
    drop(other);
    import.check().expect("memory that was not exported may be freed");

    drop(layer);
    let stale = ImportError::Stale { state: ExportState::Freed(1), allocation: Some("layer".into()) };
    assert_eq!(import.check(), Err(stale.clone()));
    assert_eq!(import.bytes("embedding", &stream).map(drop), Err(stale.clone()));
    assert_eq!(
        stale.to_string(),
        "the imported memory is stale: the exporter freed allocation 1 of it, \"layer\"; detach, and attach to a new export"
    );
    let (served, attached) = both(&export, &device, Access::Read);
    assert_eq!(served.expect_err("stale"), ShareError::Stale(ExportState::Freed(1)));
    assert_eq!(attached.expect_err("stale"), ShareError::Stale(ExportState::Freed(1)));
    drop((embedding, unnamed));
    weights.trim_all().expect("trimmed");
    // SAFETY: mapped by the import, regardless of the exporter's actions; the stub's device memory is host memory.
    assert_eq!(unsafe { (address as *const u8).read() }, 2, "the import keeps the last contents");
    assert_eq!(weights.exports().len(), 1, "a peer is still attached");
    drop((import, export));
    assert_eq!((weights.exports(), live().device_bytes), (vec![], 0));
});

stub_test!(a_trim_next_to_exported_memory_keeps_imports_valid, {
    let device = device();
    let allocator = CudaAllocator::new(&device, Default::default()).expect("an allocator");
    let stream = device.context().new_stream().expect("a stream");
    // One chunk, of which the first fifth is allocated again.
    drop(filled(&allocator, &stream, 10 * MIB, "all of it", 0));
    let kept = filled(&allocator, &stream, 2 * MIB, "kept", 7);
    let export = allocator.export().expect("exported");
    assert_eq!(export.mapped_bytes(), 10 << 20, "whole chunks are exported");
    let import = attach(&export, &device, Access::Read).expect("attached");
    assert_eq!(allocator.trim_all().expect("trimmed"), 8 << 20);
    import.check().expect("free memory in the chunk is not part of the export");
    assert_eq!(content(&import, "kept", &stream), vec![7; 2 * MIB]);
    drop(kept);
    assert!(import.check().is_err());
});

stub_test!(sleep_invalidates_imports_and_a_pool_can_be_exported_again_after_wake, {
    let device = device();
    let allocator = allocator(&device);
    let trainer = Trainer::of(&allocator, PoolConfig::builder().build().expect("valid"));
    let pool = trainer.weights.pool();
    let export = trainer.weights.export().expect("exported");
    let import = attach(&export, &device, Access::Read).expect("attached");
    let address = import.allocation(1).expect("the second allocation").address;
    allocator.sleep(pool, Contents::Keep).expect("asleep");
    assert_eq!(import.check(), Err(ImportError::Stale { state: ExportState::Unmapped, allocation: None }));
    assert_eq!(export.check(), Err(ShareError::Stale(ExportState::Unmapped)));
    assert!(trainer.weights.export().is_err(), "the pool has no memory");
    // SAFETY: mapped by the import, regardless of the exporter's actions; the stub's device memory is host memory.
    assert_eq!(unsafe { (address as *const u8).read() }, 2, "the import keeps the last contents");
    allocator.wake(pool).expect("awake");
    assert!(import.check().is_err(), "the export stays stale");
    drop(import);
    let again = trainer.weights.export().expect("exported again");
    let import = attach(&again, &device, Access::Read).expect("attached");
    assert_eq!(content(&import, "layer", &trainer.stream), vec![2; 1000], "the kept contents are restored");
});

stub_test!(importers_detect_the_end_of_an_export, {
    let device = device();
    let trainer = Trainer::new(&device);
    let stream = device.context().new_stream().expect("a stream");
    let import = attach(&trainer.weights.export().expect("exported"), &device, Access::Read).expect("attached");
    import.check().expect("a dropped export is still notified of frees");
    let second = trainer.weights.export().expect("exported again");
    let other = attach(&second, &device, Access::Read).expect("attached");
    second.withdraw();
    assert_eq!(other.check(), Err(ImportError::Stale { state: ExportState::Withdrawn, allocation: None }));
    import.check().expect("the earlier export is unaffected");
    assert_eq!(trainer.weights.exports().len(), 2);

    // An exporter that exits with live allocations leaves them to the importer.
    let Trainer { weights, stream: own, embedding, layer, unnamed } = trainer;
    [embedding, layer, unnamed].into_iter().for_each(|buffer| {
        buffer.leak();
    });
    drop((weights, own));
    import.check().expect("the memory is unchanged");
    let report = import.report();
    assert_eq!((report.state, report.exporter_is_alive), (ExportState::Ended, false));
    assert_eq!(content(&import, "embedding", &stream), vec![1; 3 * MIB]);
});

stub_test!(pools_that_are_empty_or_cannot_be_exported_are_refused, {
    let device = device();
    let allocator = allocator(&device);
    assert_eq!(allocator.export().expect_err("the pool is empty"), ShareError::Empty);
    let plain = CudaAllocator::with_backend(
        CudaBackend::builder(&device).plain().build().expect("a backend"),
        Default::default(),
    );
    let plain = plain.expect("an allocator");
    let stream = device.context().new_stream().expect("a stream");
    let _buffer = plain.alloc_zeroed::<u8>(&stream, 100).expect("memory");
    assert_eq!(plain.export().expect_err("plain memory cannot be exported"), ShareError::NotExportable);
    assert_eq!((plain.exports(), live().mappings), (vec![], 0));
});

stub_test!(other_devices_and_excess_access_are_refused_on_both_sides, ["STUB_DEVICES" = "2"], {
    let device = device();
    let trainer = Trainer::new(&device);
    let export = trainer.weights.export().expect("exported");
    let other = CudaDevice::new(1).expect("the second device");
    let before = descriptors();
    let (served, attached) = both(&export, &other, Access::Read);
    let error = served.expect_err("another device");
    assert!(matches!(error, ShareError::DeviceMismatch { .. }), "{error}");
    assert_eq!(attached.expect_err("another device"), error);
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let error = ShareError::AccessRefused { wanted: Access::ReadWrite, given: Access::Read };
    thread::scope(|scope| {
        let importer = scope.spawn(|| Import::attach(&device, &theirs, Access::ReadWrite, LONG));
        assert_eq!(export.serve(&ours, Access::Read, LONG), Err(error.clone()));
        assert_eq!(importer.join().expect("no panic").expect_err("refused"), error);
    });
    drop((ours, theirs));
    assert_eq!((descriptors(), export.report().peers), (before, vec![]));
});

stub_test!(pools_of_every_kind_and_many_chunks_are_shared, {
    let device = device();
    let engine = device.context().new_stream().expect("a stream");
    let configs = [
        PoolConfig::builder().fixed().build(),
        PoolConfig::builder().reserved(64 << 20).build(),
        PoolConfig::builder().build(),
    ];
    let prefetching = CudaBackend::builder(&device).chunk_bytes(2 << 20).prefetch_bytes(16 << 20).build();
    let prefetching = CudaAllocator::with_backend(prefetching.expect("a backend"), Default::default());
    for allocator in [allocator(&device), prefetching.expect("an allocator")] {
        for config in configs.clone() {
            let trainer = Trainer::of(&allocator, config.expect("valid"));
            let export = trainer.weights.export().expect("exported");
            let import = attach(&export, &device, Access::Read).expect("attached");
            assert_eq!(content(&import, "embedding", &engine), vec![1; 3 * MIB]);
            assert_eq!(content(&import, "layer", &engine), vec![2; 1000]);
        }
    }
    // More chunks than fit in one batch, and a hole.
    let allocator = allocator(&device);
    let first = filled(&allocator, &engine, 100 * MIB, "first", 1);
    let hole = filled(&allocator, &engine, 100 * MIB, "hole", 2);
    let last = filled(&allocator, &engine, 100 * MIB, "last", 3);
    drop(hole);
    let export = allocator.export().expect("exported");
    assert_eq!(export.mapped_bytes(), 200 << 20);
    let import = attach(&export, &device, Access::Read).expect("attached");
    assert_eq!(import.report().mapped_bytes, 200 << 20);
    assert_eq!(content(&import, "last", &engine), vec![3; 100 * MIB]);
    drop((first, last));
});

stub_test!(two_thousand_attachments_leak_nothing, {
    let device = device();
    let trainer = Trainer::new(&device);
    let export = trainer.weights.export().expect("exported");
    drop(attach(&export, &device, Access::Read).expect("attached"));
    assert_eq!(export.report().peers, []);
    let before = (live(), descriptors());
    for _ in 0..2000 {
        drop(attach(&export, &device, Access::Read).expect("attached"));
    }
    assert_eq!(export.report().peers, []);
    assert_eq!((live(), descriptors()), before);
});

/// The driver calls of exporter and importer.
const CALLS: [&str; 14] = [
    "cuDeviceGetUuid_v2",
    "cuMemGetAllocationGranularity",
    "cuCtxGetCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemRetainAllocationHandle",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
    "cuCtxSynchronize",
    "cuMemUnmap",
];

stub_test!(nothing_leaks_after_any_failed_driver_call, {
    let device = device();
    let trainer = Trainer::new(&device);
    let program = || -> Result<(), ShareError> {
        let export = trainer.weights.export()?;
        let (served, attached) = both(&export, &device, Access::Read);
        let (is_served, peers) = (served.is_ok(), export.report().peers.len());
        assert!(peers == 0 || is_served, "an importer that failed to attach is not a peer");
        let mut import = match (served, attached) {
            // The side whose call failed reports the call.
            (Err(ShareError::HungUp), Err(error)) | (Err(error), _) | (Ok(_), Err(error)) => return Err(error),
            (Ok(_), Ok(import)) => import,
        };
        let layer = import.allocation(1).expect("the second allocation").address as *const u8;
        // SAFETY: mapped; the stub's device memory is host memory.
        assert_eq!(unsafe { std::slice::from_raw_parts(layer, 1000) }, [2; 1000]);
        let detached = import.detach();
        if detached.is_err() {
            assert_eq!(export.report().peers.len(), 1, "the exporter still lists it as a peer");
            heal();
            import.detach().expect("the second attempt succeeds");
        }
        Ok(detached?)
    };
    program().expect("no call fails");
    assert_eq!(trainer.weights.exports(), []);
    let before = (live(), descriptors());
    for call in CALLS.into_iter().chain(["cuMemAddressFree"]) {
        let mut nth = 1;
        loop {
            let made = calls(call);
            fail(call, nth, 999);
            let outcome = program();
            let was_reached = calls(call) - made >= nth;
            heal();
            if let Err(error) = &outcome {
                assert!(error.to_string().contains("999"), "{call} {nth}: {error}");
            }
            program().unwrap_or_else(|error| panic!("{call} {nth}, healed: {error}"));
            if !was_reached {
                break;
            }
            nth += 1;
        }
        assert!(nth > 1, "the program never calls {call}");
        trainer.weights.trim_all().expect("failed releases are retried");
        assert_eq!((live(), descriptors()), before, "{call}");
    }
});

stub_test!(silent_and_dead_peers_time_out, {
    let device = device();
    let trainer = Trainer::new(&device);
    let export = trainer.weights.export().expect("exported");
    let before = descriptors();
    let short = Duration::from_millis(100);
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let started = Instant::now();
    assert_eq!(export.serve(&ours, Access::Read, short), Err(ShareError::TimedOut));
    assert_eq!(Import::attach(&device, &theirs, Access::Read, short).map(drop), Err(ShareError::TimedOut));
    assert!(started.elapsed() < LONG / 2);
    drop(theirs);
    // The importer's message is still in the socket.
    assert_eq!(export.serve(&ours, Access::Read, short), Err(ShareError::HungUp));
    drop(ours);
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    drop(ours);
    assert_eq!(Import::attach(&device, &theirs, Access::Read, short).map(drop), Err(ShareError::HungUp));
    drop(theirs);
    assert_eq!((descriptors(), export.report().peers.len()), (before, 0));
});

stub_test!(an_import_that_the_driver_does_not_release_is_kept_and_reported, {
    let device = device();
    let trainer = Trainer::new(&device);
    let export = trainer.weights.export().expect("exported");
    let import = attach(&export, &device, Access::Read).expect("attached");
    fail("cuMemUnmap", 1, 719);
    drop(import);
    assert_eq!(export.report().peers.len(), 1, "the memory stays mapped until the process exits");
    let mut import = attach(&export, &device, Access::Read).expect("attached");
    fail("cuCtxSynchronize", 1, 719);
    let error = CudaError::Driver(DriverError { call: "cuCtxSynchronize", code: 719 });
    assert_eq!(import.detach(), Err(error));
    import.check().expect("still attached");
});
