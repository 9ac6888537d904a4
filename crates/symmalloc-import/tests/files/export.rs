//! Exported snapshots: recorded jobs survive an export and import, and Python reads the exported files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use symmalloc_core::config::Config;
use symmalloc_core::op::{Op, Pending};
use symmalloc_import::export::export;
use symmalloc_import::{ReadOptions, Recording, read_bytes, read_path};
use symmalloc_trace::replay::Program;
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

/// Returns the ops, and how long each free was pending.
fn ops(recording: &Recording) -> Vec<(&Op, Option<Pending>)> {
    recording.records.iter().map(|record| (&record.op, record.pending)).collect()
}

#[test]
fn every_recorded_job_survives_a_round_trip_with_ops_and_completions() {
    for (name, pending) in [
        ("fsdp1_train_rank0.pickle.gz", 2_542),
        ("fsdp1_train_rank1.pickle.gz", 2_010),
        ("fsdp_train_rank0.trace.zst", 0),
        ("fsdp_train_rank1.trace.zst", 0),
        ("gpt2_train_varlen.trace.zst", 0),
        ("llama_generate.trace.zst", 0),
        ("moe_train.trace.zst", 0),
        ("resnet50_multiscale.trace.zst", 0),
    ] {
        let original = recorded(name);
        assert_eq!(ops(&original).iter().filter(|(_, pending)| pending.is_some()).count(), pending, "{name}");
        let again = read_bytes(&exported(&original, "segments:expandable"), &ReadOptions::default()).unwrap();
        assert!(ops(&again) == ops(&original), "{name}");
    }
}

#[test]
fn a_round_trip_does_not_depend_on_the_configuration() {
    let original = recorded("fsdp1_train_rank0.pickle.gz");
    for config in ["segments:fixed", "segments:fixed,streams:shared", "segments:expandable,streams:shared"] {
        let again = read_bytes(&exported(&original, config), &ReadOptions::default()).unwrap();
        assert!(ops(&again) == ops(&original), "{config}");
    }
}

#[test]
fn without_pending_frees_every_free_completes_immediately() {
    let original = recorded("fsdp1_train_rank1.pickle.gz");
    let program = Program::new(&original.records).unwrap().without_pending();
    let mut bytes = Vec::new();
    let summary = export(&program, &Config::default(), &mut bytes).unwrap();
    assert_eq!(summary.pending_frees, 0);
    let again = read_bytes(&bytes, &ReadOptions::default()).unwrap();
    assert!(ops(&again).iter().all(|(_, pending)| pending.is_none()));
    assert_eq!(again.records.len(), original.records.len());
}

/// Returns a command for Python, or `None` if this machine has none.
fn python(script: &str) -> Option<Command> {
    let mut python = Command::new("python3");
    let version = Command::new("python3").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script));
    version.is_ok_and(|status| status.success()).then_some(python)
}

#[track_caller]
fn assert_python_reads(folder: &TempDir, snapshot: &[u8], original: Option<&Path>) {
    let Some(mut python) = python("snapshot.py") else { return println!("skipped: python3 is not installed") };
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
fn created_and_removed_segments_add_up_when_read_by_python() {
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
