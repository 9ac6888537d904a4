//! `symmalloc import`.

use crate::{Folder, recorded, symmalloc};
use std::fs;

const RMM_LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
    7,12:00:00.000000,allocate,0x30a000000,1048576,0x2\n\
    7,12:00:00.000001,free,0x30b000000,512,0x2\n\
    7,12:00:00.000002,free,0x30a000000,1048576,0x2\n";

#[test]
fn a_log_becomes_a_trace_and_what_was_left_out_is_said() {
    let folder = Folder::new();
    let log = folder.file("rmm.csv", RMM_LOG);
    let trace = folder.path("rmm.trace");
    let said = symmalloc("import {} {}", &[&log, &trace]);
    let words = &said.exited(0).stdout;
    assert!(words.contains("RMM log") && words.contains("before the recording began: 1"), "{words}");
    assert_eq!(fs::read_to_string(&trace).unwrap(), "symmalloc-trace 1\nstream s0\na 0 1048576 s0\nf 0\nend 3\n");
}

#[test]
fn the_extension_compresses_and_everything_reads_back() {
    let folder = Folder::new();
    let snapshot = recorded("fsdp1_train_rank1.pickle.gz");
    let [plain, gzip, zstd] = ["t.trace", "t.trace.gz", "t.trace.zst"].map(|name| folder.path(name));
    symmalloc("import {} {}", &[&snapshot, &plain]).exited(0);
    symmalloc("import {} {}", &[&plain, &gzip]).exited(0);
    symmalloc("import {} {}", &[&gzip, &zstd]).exited(0);
    let starts = [&plain, &gzip, &zstd].map(|path| fs::read(path).unwrap()[..2].to_vec());
    assert_eq!(starts, [b"sy".to_vec(), vec![0x1f, 0x8b], vec![0x28, 0xb5]]);
    // The project's own copy of this job was made by the same way.
    let (again, kept) = (folder.path("again.trace"), folder.path("kept.trace"));
    symmalloc("import {} {}", &[&zstd, &again]).exited(0);
    symmalloc("import {} {}", &[&recorded("fsdp1_train_rank1.trace.zst"), &kept]).exited(0);
    for path in [&again, &kept] {
        assert!(fs::read(path).unwrap() == fs::read(&plain).unwrap(), "{}", path.display());
    }
}

#[test]
fn the_configuration_of_a_trace_is_kept() {
    let folder = Folder::new();
    let a = folder.trace("a.trace", &["config total_limit_mb:64", "stream s0"]);
    let b = folder.path("b.trace");
    symmalloc("import {} {}", &[&a, &b]).exited(0);
    assert!(fs::read_to_string(&b).unwrap().contains("total_limit_mb:64"));
}
