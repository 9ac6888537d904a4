//! An exporter and an importer in separate processes.

use super::{LONG, MIB, Trainer, content};
use crate::process::{device, live, stub_test};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_core::config::PoolConfig;
use symmalloc_cuda::{Access, CudaAllocator, CudaBackend, CudaDevice, Export, ExportState, Import, ImportError};

/// Runs the exporter of the tests with two processes. It finishes with `end` once an importer is attached.
fn export_at(path: &Path, end: impl FnOnce(Trainer, Export)) {
    let device = device();
    // A channel, as on a machine with a fabric. If the stub supports descriptors, these are used.
    let channels = path.parent().expect("a folder");
    let backend =
        CudaBackend::builder(&device).chunk_bytes(2 << 20).imex_channels(channels).build().expect("a backend");
    let allocator = CudaAllocator::with_backend(backend, Default::default()).expect("an allocator");
    let trainer = Trainer::of(&allocator, PoolConfig::builder().build().expect("valid"));
    let export = trainer.weights.export().expect("exported");
    let waiting = path.with_extension("new");
    let listener = UnixListener::bind(&waiting).expect("a socket");
    std::fs::rename(&waiting, path).expect("renamed");
    let (socket, _) = listener.accept().expect("an importer");
    let peer = export.serve(&socket, Access::Read, LONG).expect("attached");
    assert_ne!(peer.pid, std::process::id());
    end(trainer, export);
}

fn import_from(path: &Path) -> (Arc<CudaDevice>, Import) {
    let until = Instant::now() + LONG;
    let socket = loop {
        match UnixStream::connect(path) {
            Ok(socket) => break socket,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    let device = device();
    let import = Import::attach(&device, &socket, Access::Read, LONG).expect("attached");
    (device, import)
}

fn until(what: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !what() {
        assert!(Instant::now() < until, "timed out");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Starts rank 0 as the exporter and rank 1 as the importer.
fn processes(options: &[(&str, &str)], exporter: fn(&Path), importer: fn(&Path)) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("channel0"), []).expect("a file");
    let place = folder.path().to_str().expect("UTF-8").to_owned();
    let options: Vec<_> = options.iter().copied().chain([("SHARE_TEST_FOLDER", &*place)]).collect();
    let outputs = stub_process::ranks(2, &options, |rank| {
        let folder = std::env::var("SHARE_TEST_FOLDER").expect("set by the test");
        let path = Path::new(&folder).join("socket");
        if rank == 0 { exporter(&path) } else { importer(&path) }
    });
    for output in outputs.iter().filter(|output| output.rank == 1 || output.text.contains("panicked")) {
        assert!(output.is_success, "rank {}:\n{}", output.rank, output.text);
    }
}

fn exporter_that_is_killed(path: &Path) {
    export_at(path, |trainer, export| {
        std::mem::forget((trainer, export));
        // SAFETY: kills this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    });
}

fn importer_that_goes_on(path: &Path) {
    let (device, import) = import_from(path);
    let stream = device.context().new_stream().expect("a stream");
    assert_eq!((live().device_bytes, live().imports), (0, 5), "only memory of the other process is mapped");
    until(|| !import.report().exporter_is_alive);
    import.check().expect("an exporter that has exited does not write anymore");
    assert_eq!(content(&import, "embedding", &stream), vec![1; 3 * MIB]);
    assert_eq!(content(&import, "layer", &stream), vec![2; 1000]);
    drop(import);
    assert_eq!((live().ranges, live().mappings, live().imports), (0, 0, 0));
}

stub_test!(an_importer_outlives_an_exporter_that_is_killed, {
    processes(&[], exporter_that_is_killed, importer_that_goes_on);
});

stub_test!(fabric_handles_are_used_where_there_are_no_descriptors, ["STUB_NO_POSIX_FD" = "1"], {
    fn exporter(path: &Path) {
        export_at(path, |trainer, export| {
            until(|| export.report().peers.is_empty());
            drop(trainer);
        });
    }
    fn importer(path: &Path) {
        let (device, import) = import_from(path);
        let stream = device.context().new_stream().expect("a stream");
        assert_eq!(content(&import, "embedding", &stream), vec![1; 3 * MIB]);
        assert_eq!(content(&import, "layer", &stream), vec![2; 1000]);
    }
    processes(&[], exporter, importer);
});

stub_test!(an_importer_in_another_process_learns_of_frees, {
    fn exporter(path: &Path) {
        export_at(path, |trainer, export| {
            assert_eq!(export.report().peers.len(), 1);
            drop(trainer.layer);
            until(|| export.report().peers.is_empty());
        });
    }
    fn importer(path: &Path) {
        let (_device, import) = import_from(path);
        until(|| import.check().is_err());
        let stale = ImportError::Stale { state: ExportState::Freed(1), allocation: Some("layer".into()) };
        assert_eq!(import.check(), Err(stale));
    }
    processes(&[], exporter, importer);
});
