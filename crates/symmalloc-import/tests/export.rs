//! Exported snapshots: recorded jobs go out and come back, and Python reads what was written.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use symmalloc_core::config::Config;
use symmalloc_core::op::Op;
use symmalloc_core::replay::Program;
use symmalloc_import::export::export;
use symmalloc_import::{ReadOptions, Recording, read_bytes, read_path};
use tempfile::TempDir;

fn job(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces").join(name)
}

fn recorded(name: &str) -> Recording {
    read_path(&job(name), &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn exported(recording: &Recording, config: &str) -> Vec<u8> {
    let program = Program::new(&recording.records).unwrap();
    let mut bytes = Vec::new();
    export(&program, &config.parse::<Config>().unwrap(), &mut bytes).unwrap();
    bytes
}

fn ops(recording: &Recording) -> Vec<&Op> {
    recording.records.iter().map(|record| &record.op).collect()
}

#[test]
fn a_pytorch_snapshot_goes_through_our_trace_and_back_with_the_same_ops() {
    for name in ["fsdp1_train_rank0.pickle.gz", "resnet50_multiscale.trace.zst"] {
        let original = recorded(name);
        for config in ["segments:expandable", "segments:fixed,streams:shared"] {
            let again = read_bytes(&exported(&original, config), &ReadOptions::default()).unwrap();
            assert!(ops(&again) == ops(&original), "{name} with {config}");
        }
    }
}

/// Python, unless this machine has none.
fn python(script: &str) -> Option<Command> {
    let mut python = Command::new("python3");
    let version = Command::new("python3").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script));
    version.is_ok_and(|status| status.success()).then_some(python)
}

#[track_caller]
fn assert_python_reads(folder: &TempDir, snapshot: &[u8], original: Option<&Path>) {
    let Some(mut python) = python("snapshot.py") else { return };
    let path = folder.path().join("exported.pickle");
    fs::write(&path, snapshot).unwrap();
    let output = python.arg(&path).args(original).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn live_bytes_are_those_of_the_original_as_python_reads_both() {
    let folder = tempfile::tempdir().unwrap();
    let original = recorded("fsdp1_train_rank0.pickle.gz");
    for config in ["segments:expandable", "segments:fixed", "segments:fixed,streams:shared"] {
        let original_path = job("fsdp1_train_rank0.pickle.gz");
        assert_python_reads(&folder, &exported(&original, config), Some(&original_path));
    }
}

#[test]
fn segments_that_come_and_go_add_up_as_python_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "symmalloc-trace 1\nstream s0\nstream s1\npool p1 segments:expandable,streams:shared\n\
        pool p2 segments:reserved,segment_mb:4\n\
        a 0 3000000 s0 p1 \"first\"\na 1 9000000 s1 p1\na 2 3000000 s0 p1 \"last; one\"\nf 1\nu 0 s1\ntrim p1\n\
        a 3 100 s1 p2 \"small\"\na 4 9000000 s1 p2\na 5 0 s0\na 6 30000000 s0\nf 6\nf 4\ntrim\na 7 4000000 s1 p1\nend 18\n";
    let recording = read_bytes(lines.as_bytes(), &ReadOptions::default()).unwrap();
    for config in ["segments:fixed", "segments:expandable,release_threshold_mb:1"] {
        assert_python_reads(&folder, &exported(&recording, config), None);
    }
}
